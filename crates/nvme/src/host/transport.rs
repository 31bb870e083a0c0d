//! Access of a host to a controller: registers, memory, doorbells and interrupts.
//!
//! The interface between the host's state machines and their transport: VFIO, vfio-user, a controller in this process,
//! or a fake in a test. Owned by the controller's owner; the owners of I/O queues get the doorbells, addresses and
//! eventfds they need and never come here.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use blkyard_mem::{DmaDomain, Region, View};

use crate::registers::{CSTS, ControllerStatus};

/// The controller does not answer any more: it was unplugged, or its process has ended or hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NVMe controller: no longer answers; check that it is still attached")]
pub struct DeviceGone;

/// Access to one controller.
///
/// Register offsets are those of [`registers`](crate::registers). An access either reaches the controller in bounded
/// time or fails with [`DeviceGone`]. A transport that cannot tell lets reads return all ones, as PCI does.
pub trait ControllerTransport {
    /// Reads a 32-bit register.
    ///
    /// # Errors
    /// [`DeviceGone`]
    fn read32(&mut self, offset: usize) -> Result<u32, DeviceGone>;

    /// Writes a 32-bit register.
    ///
    /// # Errors
    /// [`DeviceGone`]
    fn write32(&mut self, offset: usize, value: u32) -> Result<(), DeviceGone>;

    /// Reads a 64-bit register, by default as two halves, the lower one first.
    ///
    /// # Errors
    /// [`DeviceGone`]
    fn read64(&mut self, offset: usize) -> Result<u64, DeviceGone> {
        let low = self.read32(offset)?;
        Ok(u64::from(low) | u64::from(self.read32(offset + 4)?) << 32)
    }

    /// Writes a 64-bit register, by default as two halves, the lower one first.
    ///
    /// # Errors
    /// [`DeviceGone`]
    fn write64(&mut self, offset: usize, value: u64) -> Result<(), DeviceGone> {
        self.write32(offset, value as u32)?;
        self.write32(offset + 4, (value >> 32) as u32)
    }

    /// The address space in which the controller reaches memory. Regions mapped there, by
    /// [`DmaDomain::map`](blkyard_mem::DmaDomain::map), have addresses.
    fn dma_domain(&self) -> &Arc<DmaDomain>;

    /// Controller address of a byte of a region; unset while the region is not mapped. A region is mapped in one piece:
    /// addresses are contiguous. The offset in a page is the same on both sides.
    fn dma_addr(&self, region: &Arc<Region>, offset: u64) -> Option<u64>;

    /// The doorbell registers (offset 1000h on) as memory that is shared with the controller. Without, the owner of a
    /// queue has each doorbell written by [`ControllerTransport::write32`].
    fn doorbells(&self) -> Option<View>;

    /// Bytes of the doorbell registers: they bound the number of queues.
    fn doorbell_bytes(&self) -> usize;

    /// Interrupt vectors; zero if queues can only be polled.
    fn vectors(&self) -> u16;

    /// The eventfd that the controller signals for an interrupt vector.
    fn eventfd(&self, vector: u16) -> Option<BorrowedFd<'_>>;

    /// Resets the device as a whole, beside its registers (a function-level reset). Says whether that was done: the
    /// controller is disabled and silent then. By default there is no such way.
    fn reset_function(&mut self) -> bool {
        false
    }

    /// Once the controller does not answer: whether it is certain that it reaches no memory any more. So it is with a
    /// device that was unplugged, the default; a process that hangs may go on one day.
    fn is_silent_when_gone(&self) -> bool {
        true
    }

    /// CSTS.
    ///
    /// # Errors
    /// [`DeviceGone`], also if the register reads all ones.
    fn status(&mut self) -> Result<ControllerStatus, DeviceGone> {
        ControllerStatus::from_bits(self.read32(CSTS)?).ok_or(DeviceGone)
    }
}
