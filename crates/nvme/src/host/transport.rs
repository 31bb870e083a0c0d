//! Access of a host to a controller: registers, memory, doorbells and interrupts.
//!
//! The interface between the host's state machines and their transport: VFIO, vfio-user, a controller in this process,
//! or a fake in a test. Owned by the controller's owner. The owners of I/O queues get the doorbells, addresses and
//! eventfds they need, and do not use the transport.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use blkyard_mem::{DmaDomain, Region, View};

use crate::registers::{CSTS, ControllerStatus};

/// The controller does not respond: it was unplugged, or its process has ended or hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NVMe controller: no longer answers; check that it is still attached")]
pub struct DeviceGone;

/// Access to one controller.
///
/// Register offsets are those of [`registers`](crate::registers). An access reaches the controller in bounded time or
/// fails with [`DeviceGone`]. A transport that cannot detect this returns all ones from reads, as PCI does.
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

    /// The address space of the controller. Regions mapped there by [`DmaDomain::map`](blkyard_mem::DmaDomain::map)
    /// have controller addresses.
    fn dma_domain(&self) -> &Arc<DmaDomain>;

    /// Controller address of a byte of a region; unset if the controller does not reach it. The addresses of a region
    /// are contiguous, and the offset in a page is the same on both sides.
    fn dma_addr(&self, region: &Arc<Region>, offset: u64) -> Option<u64>;

    /// The doorbell registers (from offset 1000h) as memory shared with the controller. If unset, each doorbell is
    /// written by [`ControllerTransport::write32`].
    fn doorbells(&self) -> Option<View>;

    /// Tells the controller that a shared doorbell of this queue was written. By default it polls them. The owners of
    /// I/O queues do that themselves.
    fn signal_doorbell(&mut self, _qid: u16) {}

    /// Bytes of the doorbell registers, which bound the number of queues.
    fn doorbell_bytes(&self) -> usize;

    /// Number of interrupt vectors; zero if queues can only be polled.
    fn vectors(&self) -> u16;

    /// The eventfd that the controller signals for an interrupt vector.
    fn eventfd(&self, vector: u16) -> Option<BorrowedFd<'_>>;

    /// Resets the whole device, such as by a function-level reset. Returns whether that was done; the controller is
    /// then disabled and silent. Not supported by default.
    fn reset_function(&mut self) -> bool {
        false
    }

    /// Whether a controller that does not respond is certain to access no memory any more. This holds for an unplugged
    /// device, the default; a hanging process may continue later.
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
