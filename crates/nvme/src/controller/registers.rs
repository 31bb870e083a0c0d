//! Register accesses of a host: each has a defined result, for any size and offset.
//!
//! Reads are of 1, 2, 4 or 8 bytes, writes of 4 or 8, aligned to their size. Reserved registers read as zero. Writes to
//! reserved and read-only registers have no effect. Doorbells are written by 4 bytes and read as zero.

use super::capabilities::{READY_500MS, VERSION};
use super::{Controller, ControllerEvent};
use crate::registers as reg;

/// Writable bits of CC.
const CC_WRITABLE: u32 = 0x00ff_fff1;
/// End of the defined registers.
const REGISTERS_END: usize = 0x70;

/// An access to no register. It has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterFault {
    /// The size is not 1, 2, 4 or 8 bytes for a read, 4 or 8 for a write, 4 for a doorbell write.
    #[error("register access of {0} bytes: this size is not supported here")]
    Size(usize),
    /// The offset is not a multiple of the size.
    #[error("register access at {0:#x}: not aligned to its size")]
    Unaligned(u64),
    /// The offset is after the last doorbell.
    #[error("register access at {0:#x}: outside the registers")]
    Outside(u64),
}

/// AQA, ASQ and ACQ, which survive a reset.
#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct QueueAddresses {
    pub(super) attributes: u32,
    pub(super) sq: u64,
    pub(super) cq: u64,
}

impl Controller {
    /// Bytes of the registers and doorbells; accesses beyond them are [`RegisterFault::Outside`].
    pub fn register_bytes(&self) -> usize {
        reg::DOORBELLS + self.registers.len()
    }

    /// Reads `bytes` bytes of registers.
    ///
    /// # Errors
    /// See [`RegisterFault`].
    pub fn read_register(&self, offset: u64, bytes: usize) -> Result<u64, RegisterFault> {
        let at = self.check(offset, bytes, &[1, 2, 4, 8])?;
        if at >= REGISTERS_END {
            return Ok(0);
        }
        let word = u64::from(self.read32(at & !7)) | u64::from(self.read32((at & !7) + 4)) << 32;
        let word = word >> (at % 8 * 8);
        Ok(if bytes == 8 { word } else { word & ((1 << (bytes * 8)) - 1) })
    }

    /// Writes `bytes` bytes of registers. Returns the queue whose doorbell was written, if any: 0 for the admin queue,
    /// otherwise its I/O completion queue.
    ///
    /// # Errors
    /// See [`RegisterFault`].
    pub fn write_register(&mut self, offset: u64, bytes: usize, value: u64) -> Result<Option<u16>, RegisterFault> {
        let at = self.check(offset, bytes, &[4, 8])?;
        if at >= reg::DOORBELLS {
            if bytes != 4 {
                return Err(RegisterFault::Size(bytes));
            }
            return Ok(self.write_doorbell(at - reg::DOORBELLS, value as u32));
        }
        self.write32(at, value as u32);
        if bytes == 8 {
            self.write32(at + 4, (value >> 32) as u32);
        }
        Ok(None)
    }

    fn check(&self, offset: u64, bytes: usize, sizes: &[usize]) -> Result<usize, RegisterFault> {
        if !sizes.contains(&bytes) {
            return Err(RegisterFault::Size(bytes));
        }
        if !offset.is_multiple_of(bytes as u64) {
            return Err(RegisterFault::Unaligned(offset));
        }
        let at = usize::try_from(offset).ok().filter(|at| *at < self.register_bytes());
        at.ok_or(RegisterFault::Outside(offset))
    }

    fn read32(&self, at: usize) -> u32 {
        let cap = self.options.capabilities().bits();
        let halves = |value: u64| [value as u32, (value >> 32) as u32];
        let addresses = &self.admin_addresses;
        match at {
            reg::CAP => halves(cap)[0],
            0x04 => halves(cap)[1],
            reg::VS => VERSION,
            reg::CC => self.cc,
            reg::CSTS => self.status.bits(),
            reg::AQA => addresses.attributes,
            reg::ASQ => halves(addresses.sq)[0],
            0x2c => halves(addresses.sq)[1],
            reg::ACQ => halves(addresses.cq)[0],
            0x34 => halves(addresses.cq)[1],
            reg::CRTO => u32::from(READY_500MS),
            // Interrupt masks apply to pin interrupts, which are not supported; all others are reserved or unsupported.
            _ => 0,
        }
    }

    fn write32(&mut self, at: usize, value: u32) {
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        let addresses = &mut self.admin_addresses;
        match at {
            reg::CC => self.write_cc(value & CC_WRITABLE),
            reg::AQA => addresses.attributes = value & 0x0fff_0fff,
            reg::ASQ => addresses.sq = low(addresses.sq),
            0x2c => addresses.sq = high(addresses.sq),
            reg::ACQ => addresses.cq = low(addresses.cq),
            0x34 => addresses.cq = high(addresses.cq),
            _ => {}
        }
    }

    fn write_cc(&mut self, value: u32) {
        let [old, new] = [self.cc, value].map(reg::ControllerConfig::from_bits);
        self.cc = value;
        match (old.enabled, new.enabled) {
            // During a reset, the controller is enabled at its end.
            (false, true) if self.is_resetting => {}
            // A shutdown of a disabled controller ends here.
            (false, true) if self.stopping.is_some() => self.finish_reset(),
            (false, true) => self.enable(),
            (true, false) => self.reset(),
            _ if new.shutdown != 0 && old.shutdown == 0 && !self.is_resetting => self.shut_down(),
            _ => {}
        }
    }

    /// Stores a doorbell for the owner of its queue.
    fn write_doorbell(&mut self, at: usize, value: u32) -> Option<u16> {
        // A controller that is not enabled has no queues.
        self.admin.as_ref()?;
        let step = 4 << self.options.doorbell_stride;
        let (number, is_head) = ((at / (2 * step)) as u16, at / step % 2 == 1);
        let cqid = if !at.is_multiple_of(step) {
            None
        } else if number == 0 {
            Some(0)
        } else if is_head {
            self.cqs.get(usize::from(number)).and_then(Option::as_ref).map(|_| number)
        } else {
            self.sqs.get(usize::from(number)).and_then(Option::as_ref).map(|queue| queue.cqid)
        };
        if cqid.is_none() {
            self.events.push(ControllerEvent::InvalidDoorbellRegister, self.features.async_events);
            return None;
        }
        if !is_head && !self.is_mapped(number) {
            // The controller is to fetch from memory, or with doorbells, that it cannot access.
            self.fail();
            return None;
        }
        self.registers.store_u32(at, value, std::sync::atomic::Ordering::Release);
        cqid
    }
}
