//! NVMe over vfio-user: a PCI function with an NVMe controller, for virtual machines and for programs with an NVMe
//! driver of their own.
//!
//! The device is the one namespace; each I/O completion queue that the host creates feeds a hardware queue on a lane.
//! The messages of the control path are parsed by `wire`, the controller is that of `nvme`. Stands on `core`, which
//! names nothing of it. See `docs/adr/0042-an-nvme-export-over-vfio-user.md`.
//!
//! Limits: doorbells are written by messages, so a host that does not set up shadow doorbells pays a message for each;
//! no area of a BAR is offered to be mapped. The keep-alive timer is looked at when a message comes. A session is not
//! handed over to another process.

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

/// What a vfio-user export serves.
pub type VfioUserExport = core::ExportConfig<VfioUserSession>;
/// A vfio-user export that serves.
pub type VfioUserServer = core::Server<VfioUserSession>;
/// A hardware queue and the I/O completion queues that feed it.
pub type NvmeQueuePoller<D> = core::QueuePoller<D, NvmeQueueSession>;
/// The control path's end of an I/O completion queue.
pub type NvmeQueueRemote = core::QueueRemote<NvmeQueueSession>;

/// A disk as hosts see it: the one namespace of a controller.
#[derive(Clone, Debug)]
pub struct NvmeDisk {
    info: DeviceInfo,
    queues: u16,
    serial: String,
    write_cache: bool,
}

impl NvmeDisk {
    /// A device as a namespace, with so many I/O queues and this serial number. A device whose logical blocks are not
    /// of 512 to 4096 bytes has no namespace.
    pub fn new(info: &DeviceInfo, queues: u16, serial: impl Into<String>) -> NvmeDisk {
        NvmeDisk { info: info.clone(), queues, serial: serial.into(), write_cache: info.volatile_cache }
    }

    /// I/O queues that a host may create: at least one, and a vector for each.
    fn io_queues(&self) -> u16 {
        self.queues.clamp(1, pci::VECTORS_MAX - 1)
    }
}
