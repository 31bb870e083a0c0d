//! vfio-user 0.1: a PCI device that another process serves over a unix socket.
//!
//! Source: QEMU's `docs/interop/vfio-user.rst`, whose structures are those of `linux/vfio.h`. A [`FrameReader`] cuts
//! the byte stream into frames; [`VfioRequest::parse`] and [`VfioReply::parse`] turn their payloads into messages; the
//! `encode` functions are the way back. All numbers have the byte order of the host, as the specification says.
//!
//! Not here: migration (`DEVICE_FEATURE`, `MIG_DATA_READ`, `MIG_DATA_WRITE`, the older `DIRTY_PAGES`), whose commands
//! are unknown to this parser; the descriptors, which are only counted; the execution of messages.

mod dma;
mod error;
mod frame;
mod header;
mod irq;
mod payload;
mod region;
mod reply;
mod request;
mod version;

pub use dma::{DmaAccess, DmaMapFlags, DmaMapRequest, DmaUnmapRequest};
pub use error::{FrameError, MessageError};
pub use frame::{Frame, FrameLimits, FrameReader, READ_BYTES_MAX};
pub use header::{Command, HEADER_BYTES, MessageHeader, MessageKind};
pub use irq::{IrqAction, IrqData, IrqFlags, IrqInfo, IrqRange, IrqSetRequest};
pub use region::{
    DeviceFlags, DeviceRegions, IO_FDS_BYTES, IoFd, IoFdKind, REGION_INFO_BYTES, RegionAccess, RegionFlags, RegionInfo,
    RegionIoFds, RegionWrite, SparseArea,
};
pub use reply::VfioReply;
pub use request::VfioRequest;
pub use version::{TwinSocket, VERSION_BYTES_MAX, VfioCapabilities, VfioVersion};

/// The supported protocol version.
pub const VERSION: (u16, u16) = (0, 1);

/// Numbers of the regions of a PCI device (`linux/vfio.h`).
pub mod region_index {
    /// Base address register 0, where NVMe has its registers; the other five follow.
    pub const BAR0: u32 = 0;
    /// Configuration space.
    pub const CONFIG: u32 = 7;
}

/// Numbers of the interrupt types of a PCI device (`linux/vfio.h`).
pub mod irq_index {
    /// The interrupt line.
    pub const INTX: u32 = 0;
    /// Message signalled interrupts.
    pub const MSI: u32 = 1;
    /// MSI-X.
    pub const MSIX: u32 = 2;
    /// Errors of the device.
    pub const ERR: u32 = 3;
    /// The server requests the return of the device.
    pub const REQ: u32 = 4;
}
