//! PCI devices driven by this process through VFIO: registers and doorbells in memory, interrupts by eventfd, memory
//! mapped for the device by its IOMMU.
//!
//! [`HostPciDevice`] is a device of the machine, and gives it to the kernel's driver vfio-pci. [`VfioDevice`] is one
//! that this process has open. Its owner is the thread that controls the device. What the device does is not known
//! here. Uses iommufd or the groups and containers of VFIO; see `docs/adr/0049-a-pci-device-through-vfio.md`.

mod abi;
mod address_space;
mod bind;
mod device;
mod error;
mod iommufd;
mod iova;
mod memory;

pub use address_space::VfioInterface;
pub use bind::{HostPciDevice, PciAddress};
pub use device::VfioDevice;
pub use error::VfioError;
