//! NVMe over vfio-user: a PCI function with an NVMe controller, for virtual machines and for programs with an NVMe
//! driver of their own.
//!
//! The device is one namespace. Each I/O completion queue that the host creates feeds a hardware queue on a lane.
//! Messages of the control path are parsed by `wire`; the controller is in `nvme`. `core` does not depend on this
//! module. See `docs/adr/0042-an-nvme-export-over-vfio-user.md`.
//!
//! Limits: doorbells are written by messages, so a host without shadow doorbells sends a message for each; no area of a
//! BAR can be mapped. The keep-alive timer is checked when a message arrives. A session cannot be handed over to
//! another process.

mod device;
mod memory;
mod pci;
mod queue;
mod session;

use blkyard_mq::DeviceInfo;

use crate::core;

pub use queue::{NvmeQueueSession, NvmeQueueSetup};
pub use session::{VfioSessionError, VfioSessionReserve, VfioSessionView, VfioUserSession};

/// Longest transfer of a command (MDTS), bytes.
const TRANSFER_BYTES: u32 = 128 << 10;

/// Configuration of a vfio-user export.
pub type VfioUserExport = core::ExportConfig<VfioUserSession>;
/// A serving vfio-user export.
pub type VfioUserServer = core::Server<VfioUserSession>;
/// A hardware queue and the I/O completion queues that feed it.
pub type NvmeQueuePoller<D> = core::QueuePoller<D, NvmeQueueSession>;
/// The control path's end of an I/O completion queue.
pub type NvmeQueueRemote = core::QueueRemote<NvmeQueueSession>;

/// A disk as hosts see it: the only namespace of a controller.
#[derive(Clone, Debug)]
pub struct NvmeDisk {
    info: DeviceInfo,
    queues: u16,
    serial: String,
    write_cache: bool,
}

impl NvmeDisk {
    /// A device as a namespace, with this number of I/O queues and this serial number. Devices with logical blocks
    /// outside 512 to 4096 bytes have no namespace.
    pub fn new(info: &DeviceInfo, queues: u16, serial: impl Into<String>) -> NvmeDisk {
        NvmeDisk { info: info.clone(), queues, serial: serial.into(), write_cache: info.volatile_cache }
    }

    /// I/O queues that a host may create, at least one; each has an interrupt vector.
    fn io_queues(&self) -> u16 {
        self.queues.clamp(1, pci::VECTORS_MAX - 1)
    }
}
