//! The completion queue entry.

use crate::NvmeStatus;

/// Bytes of a completion queue entry.
pub const CQE_BYTES: usize = 16;

/// A completion queue entry as two words of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cqe(pub [u64; 2]);

impl Cqe {
    /// An entry for command `cid` of submission queue `sq_id`, whose head is `sq_head`.
    #[inline]
    pub const fn new(cid: u16, sq_id: u16, sq_head: u16, status: NvmeStatus, result: u64, phase: bool) -> Cqe {
        let status = (status.0 << 1) | phase as u16;
        Cqe([result, sq_head as u64 | (sq_id as u64) << 16 | (cid as u64) << 32 | (status as u64) << 48])
    }

    /// Command-specific result.
    #[inline]
    pub const fn result(self) -> u64 {
        self.0[0]
    }

    /// Head of the submission queue, as reported by the controller.
    #[inline]
    pub const fn sq_head(self) -> u16 {
        self.0[1] as u16
    }

    /// Identifier of the submission queue.
    #[inline]
    pub const fn sq_id(self) -> u16 {
        (self.0[1] >> 16) as u16
    }

    /// Identifier of the command.
    #[inline]
    pub const fn cid(self) -> u16 {
        (self.0[1] >> 32) as u16
    }

    /// The status without the phase bit.
    #[inline]
    pub const fn status(self) -> NvmeStatus {
        NvmeStatus((self.0[1] >> 49) as u16)
    }

    /// The phase bit, by which a new entry is recognised.
    #[inline]
    pub const fn phase(self) -> bool {
        self.0[1] >> 48 & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_is_as_the_specification_has_it() {
        let status = NvmeStatus::LBA_OUT_OF_RANGE.with_dnr();
        let cqe = Cqe::new(0x3456, 0x1122, 0x0708, status, 0x1112_1314_1516_1718, true);
        let bytes: Vec<u8> = cqe.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(bytes.len(), CQE_BYTES);
        assert_eq!(bytes[..8], [0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11], "result");
        assert_eq!(bytes[8..10], [0x08, 0x07], "submission queue head");
        assert_eq!(bytes[10..12], [0x22, 0x11], "submission queue");
        assert_eq!(bytes[12..14], [0x56, 0x34], "command");
        // Phase in bit 0, code 80h in bits 1 to 8, do not retry in bit 15.
        assert_eq!(bytes[14..16], [0x01, 0x81], "status");
        assert_eq!((cqe.cid(), cqe.sq_id(), cqe.sq_head(), cqe.phase()), (0x3456, 0x1122, 0x0708, true));
        assert_eq!((cqe.status(), cqe.result()), (status, 0x1112_1314_1516_1718));
        assert!(!Cqe::new(0xffff, 0xffff, 0xffff, NvmeStatus(0x7fff), 0, false).phase());
    }
}
