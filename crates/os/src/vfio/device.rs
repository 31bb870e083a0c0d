//! A PCI device that this process has open: regions, configuration space, interrupts, reset.
//!
//! A device is alone in its I/O address space. Dropping it disables bus mastering, closes it, and unmaps all memory.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkyard_mem::{DmaDomain, Region};
use blkyard_sys::EventFd;

use crate::vfio::abi::{self, RegionDescription};
use crate::vfio::address_space::AddressSpace;
use crate::vfio::memory::VfioMemory;
use crate::vfio::{HostPciDevice, PciAddress, VfioError, VfioInterface};

/// Offsets and bits of configuration space (PCI Local Bus 3.0, 6.1 and 6.8.2).
const COMMAND: u64 = 0x04;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const STATUS: u64 = 0x06;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const CAPABILITIES: u64 = 0x34;
const CAPABILITY_MSIX: u8 = 0x11;
/// Bytes of configuration space with capabilities.
const CONFIG_BYTES: u64 = 256;
/// Maximum capabilities in these bytes.
const CAPABILITIES_MAX: usize = 48;

/// A PCI device that is open through VFIO.
#[derive(Debug)]
pub struct VfioDevice {
    address: PciAddress,
    /// Closed before the memory is unmapped.
    device: File,
    memory: Mutex<VfioMemory>,
    config: u64,
    bar0: (u64, u64),
    /// Whether the device can be reset by itself.
    is_resettable: bool,
    vectors_max: u32,
    removal: EventFd,
}

impl VfioDevice {
    /// Opens a device that the driver vfio-pci has, by this interface of the kernel. If unset, iommufd is used where
    /// the kernel offers it for the device and this process may open it, and the group elsewhere. Memory and bus master
    /// are enabled.
    ///
    /// # Errors
    /// See [`VfioError`].
    pub fn open(function: &HostPciDevice, interface: Option<VfioInterface>) -> Result<VfioDevice, VfioError> {
        let (opened, space) = AddressSpace::open(function, interface)?;
        let device = function.address();
        VfioDevice::with(device, opened, VfioMemory::new(device, space)?)
    }

    fn with(device: PciAddress, opened: OwnedFd, memory: VfioMemory) -> Result<VfioDevice, VfioError> {
        let failed = |call| move |source| VfioError::System { device, call, source };
        let fd = opened.as_fd();
        let info = abi::device_info(fd).map_err(failed("VFIO_DEVICE_GET_INFO"))?;
        if info.flags & abi::DEVICE_PCI == 0 || info.regions <= abi::CONFIG || info.irqs <= abi::IRQ_MSIX {
            return Err(VfioError::Part { device, what: "PCI regions" });
        }
        let region = |index| abi::region_info(fd, index).map_err(failed("VFIO_DEVICE_GET_REGION_INFO"));
        let (config, bar0) = (region(abi::CONFIG)?, region(abi::BAR0)?);
        let RegionDescription { flags, size, offset, .. } = bar0;
        if flags & abi::REGION_MMAP == 0 {
            return Err(VfioError::Part { device, what: "BAR 0 that can be mapped" });
        }
        let vectors_max = abi::irq_count(fd, abi::IRQ_MSIX).map_err(failed("VFIO_DEVICE_GET_IRQ_INFO"))?;
        let removal = EventFd::new().map_err(failed("eventfd"))?;
        if info.irqs > abi::IRQ_REQUEST && abi::irq_count(fd, abi::IRQ_REQUEST).is_ok_and(|count| count > 0) {
            abi::set_irqs(fd, abi::IRQ_REQUEST, &[removal.as_fd()]).map_err(failed("VFIO_DEVICE_SET_IRQS"))?;
        }
        let opened = VfioDevice {
            address: device,
            device: opened.into(),
            memory: Mutex::new(memory),
            config: config.offset,
            bar0: (offset, size),
            is_resettable: info.flags & abi::DEVICE_RESET != 0,
            vectors_max,
            removal,
        };
        opened.enable().map_err(failed("a write to the PCI configuration space"))?;
        Ok(opened)
    }

    /// Its address.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// Maps BAR 0, its registers. Accesses to it reach the device as they are made.
    ///
    /// # Errors
    /// The system's error.
    pub fn map_bar0(&self) -> Result<Arc<Region>, VfioError> {
        let (offset, size) = self.bar0;
        let mapped = Region::map_device(self.device.as_fd(), offset, size as usize);
        mapped.map_err(|source| VfioError::System { device: self.address, call: "mmap of BAR 0", source })
    }

    /// Offset of the first byte of the MSI-X table or the pending bits in BAR 0, at or after `from`.
    ///
    /// # Errors
    /// The configuration space cannot be read.
    pub fn msix_in_bar0(&self, from: u64) -> Result<Option<u64>, VfioError> {
        let find = || {
            if self.read_config16(STATUS)? & STATUS_CAPABILITIES == 0 {
                return Ok(None);
            }
            let mut at = u64::from(self.read_config16(CAPABILITIES)? & 0xfc);
            // Bounded, since the list may be circular.
            for _ in 0..CAPABILITIES_MAX {
                if !(0x40..=CONFIG_BYTES - 12).contains(&at) {
                    break;
                }
                let [id, next] = self.read_config16(at)?.to_le_bytes();
                if id == CAPABILITY_MSIX {
                    let mut places = [0; 8];
                    self.device.read_exact_at(&mut places, self.config + at + 4)?;
                    let places = [0, 4].map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|byte| places[at + byte])));
                    // BAR in the lowest three bits.
                    let in_bar0 = places.into_iter().filter(|place| place.trailing_zeros() >= 3).map(u64::from);
                    return Ok(in_bar0.filter(|place| *place >= from).min());
                }
                at = u64::from(next & 0xfc);
            }
            Ok(None)
        };
        let read = "a read of the PCI configuration space";
        find().map_err(|source| VfioError::System { device: self.address, call: read, source })
    }

    /// Number of its MSI-X vectors.
    pub fn vectors_max(&self) -> u32 {
        self.vectors_max
    }

    /// Has its first MSI-X vectors signal these eventfds, and enables MSI-X.
    ///
    /// # Errors
    /// The system has no interrupts left.
    pub fn set_vectors(&self, eventfds: &[BorrowedFd<'_>]) -> Result<(), VfioError> {
        let set = abi::set_irqs(self.device.as_fd(), abi::IRQ_MSIX, eventfds);
        set.map_err(|source| VfioError::System { device: self.address, call: "VFIO_DEVICE_SET_IRQS", source })
    }

    /// Signalled when the kernel wants the device back: it is unplugged, or is to change its driver. The kernel waits
    /// until the device is closed.
    pub fn removal(&self) -> BorrowedFd<'_> {
        self.removal.as_fd()
    }

    /// Whether the kernel has asked for the device since the last call.
    pub fn take_removal(&self) -> bool {
        self.removal.take()
    }

    /// Resets the device alone. Its configuration space stays as it was. Returns whether that was done; the device is
    /// silent then.
    pub fn reset(&self) -> bool {
        self.is_resettable && abi::reset(self.device.as_fd()).is_ok() && self.enable().is_ok()
    }

    /// Takes the device's right to access memory, until it is reset or opened again. What it has written before is in
    /// memory afterwards.
    pub fn disable_bus_master(&self) {
        // A device that is gone fails this, and accesses no memory. A read follows writes of the device.
        let _ = self.set_command(0, COMMAND_BUS_MASTER).and_then(|()| self.read_config16(COMMAND));
    }

    /// Maps new regions of its domain and unmaps removed ones.
    ///
    /// # Errors
    /// A region cannot be mapped; it has no address then.
    pub fn sync_dma(&self, domain: &DmaDomain) -> Result<(), VfioError> {
        self.memory().sync(domain)
    }

    /// Whether memory of others is mapped. Look at it now and then: see
    /// [`unmap_returned`](VfioDevice::unmap_returned).
    pub fn watches_memory(&self) -> bool {
        self.memory().is_watched()
    }

    /// Unmaps memory of others of which its owner has given pages back: the device would use the former ones. It has no
    /// address from then on. Returns its bytes.
    pub fn unmap_returned(&self) -> u64 {
        self.memory().unmap_returned()
    }

    /// Device address of a byte of a mapped region.
    pub fn dma_addr(&self, region: &Arc<Region>, offset: u64) -> Option<u64> {
        self.memory().address(region, offset)
    }

    fn enable(&self) -> io::Result<()> {
        self.set_command(COMMAND_MEMORY | COMMAND_BUS_MASTER, 0)
    }

    fn set_command(&self, set: u16, clear: u16) -> io::Result<()> {
        let command = self.read_config16(COMMAND)? & !clear | set;
        self.device.write_all_at(&command.to_le_bytes(), self.config + COMMAND)
    }

    fn read_config16(&self, at: u64) -> io::Result<u16> {
        let mut word = [0; 2];
        self.device.read_exact_at(&mut word, self.config + at)?;
        Ok(u16::from_le_bytes(word))
    }

    fn memory(&self) -> MutexGuard<'_, VfioMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for VfioDevice {
    fn drop(&mut self) {
        self.disable_bus_master();
    }
}
