//! Limits of NVM commands besides MDTS (Identify, CNS 06h, command set 00h).

use crate::{IDENTIFY_BYTES, PAGE};

/// The limits; 0 for unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NvmLimits {
    /// Maximum Write Zeroes, bytes (WZSL).
    pub write_zeroes_bytes: u64,
    /// Maximum ranges of a deallocation (DMRL).
    pub deallocate_ranges: u8,
    /// Maximum range of a deallocation, blocks (DMRSL).
    pub deallocate_range_blocks: u32,
    /// Maximum total of all ranges of a deallocation, blocks (DMSL).
    pub deallocate_blocks: u64,
}

impl NvmLimits {
    /// From identify data of a controller with a minimum page of 4096 bytes.
    pub fn parse(bytes: &[u8; IDENTIFY_BYTES]) -> NvmLimits {
        let write_zeroes_bytes = match u32::from(bytes[1]) {
            0 => 0,
            shift if shift < PAGE.leading_zeros() => PAGE << shift,
            _ => u64::MAX,
        };
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        NvmLimits {
            write_zeroes_bytes,
            deallocate_ranges: bytes[3],
            deallocate_range_blocks: word(4),
            deallocate_blocks: u64::from(word(8)) | u64::from(word(12)) << 32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_stand_where_the_specification_has_them() {
        let mut bytes = [0; IDENTIFY_BYTES];
        assert_eq!(NvmLimits::parse(&bytes), NvmLimits::default(), "zero is unlimited");
        // VSL, WZSL, WUSL, DMRL, DMRSL, DMSL.
        bytes[..16].copy_from_slice(&[9, 3, 9, 16, 1, 2, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
        let limits = NvmLimits {
            write_zeroes_bytes: 32768,
            deallocate_ranges: 16,
            deallocate_range_blocks: 0x201,
            deallocate_blocks: 0x0102_0304_0506_0708,
        };
        assert_eq!(NvmLimits::parse(&bytes), limits);
        for shift in [52, 63, 64, 255] {
            bytes[1] = shift;
            assert_eq!(NvmLimits::parse(&bytes).write_zeroes_bytes, u64::MAX, "an absurd limit is none");
        }
    }
}
