//! The limits of a device on one request.
//!
//! The rules and their order follow Linux (`block/blk-settings.c`, `struct queue_limits`). They are pure functions:
//! `split.rs` finds where a bio must be split, `merge.rs` which bios may share a request, `fast_path.rs` which bios
//! need no check.

mod fast_path;
mod merge;
#[cfg(test)]
mod properties;
mod split;
#[cfg(test)]
mod tests;

pub(crate) use self::fast_path::FastPath;
pub(crate) use self::merge::{Merge, NoMerge, Shape};
pub(crate) use self::split::Pieces;
pub use self::split::{BioSplit, Cursor};
use crate::{Bio, BioFlags, Op, SECTOR_SHIFT, Status};

/// The limits of a device. Sizes in sectors are of 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Smallest unit of I/O, bytes; a power of two, at least 512.
    pub logical_block_bytes: u32,
    /// Unit below which the device reads, modifies and writes, bytes; at least the logical block.
    pub physical_block_bytes: u32,
    /// Longest read or write, sectors.
    pub sectors_max: u32,
    /// Most segments in one request.
    pub segments_max: u16,
    /// Longest segment, bytes.
    pub segment_bytes_max: u32,
    /// Boundary that no segment may cross, less one byte, counted from the start of its region; a power of two less
    /// one.
    pub segment_boundary_mask: u32,
    /// Boundary that requests must not cross, such as a stripe, sectors; 0 for none.
    pub chunk_sectors: u32,
    /// Bits that must be zero where two segments of a request meet; 4095 for NVMe PRP lists, zero if any gap is fine.
    pub virt_boundary_mask: u32,
    /// Bits that must be zero in each segment's start and length.
    pub dma_alignment_mask: u32,
    /// Unit in which a zone is written, bytes: a write is split at multiples of it. Zero if there are no zones, and the
    /// logical block will do.
    pub write_granularity_bytes: u32,
    /// Longest [atomic](BioFlags::ATOMIC) write, sectors; 0 if unsupported.
    pub atomic_sectors_max: u32,
    /// Longest discard, all its ranges together, sectors; zero if the device cannot discard.
    pub discard_sectors_max: u32,
    /// Unit in which space is given back, bytes; a multiple of the logical block.
    pub discard_granularity_bytes: u32,
    /// Where the first such unit begins, bytes; less than one.
    pub discard_alignment_bytes: u32,
    /// Most ranges in one discard; 256 for NVMe.
    pub discard_segments_max: u16,
    /// Longest write of zeroes, sectors; zero if the device cannot.
    pub write_zeroes_sectors_max: u32,
}

impl Default for QueueLimits {
    fn default() -> Self {
        QueueLimits {
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            // 1 MiB: long enough that the cost per request vanishes, short enough that a bounce buffer is cheap.
            sectors_max: 2048,
            // Linux's default for a device that reports no limit (BLK_MAX_SEGMENTS).
            segments_max: 128,
            segment_bytes_max: 1 << 20,
            // As Linux has it (BLK_SEG_BOUNDARY_MASK): a counter of 32 bits in a device does not overflow.
            segment_boundary_mask: u32::MAX,
            chunk_sectors: 0,
            virt_boundary_mask: 0,
            dma_alignment_mask: 0,
            write_granularity_bytes: 0,
            atomic_sectors_max: 0,
            discard_sectors_max: 0,
            discard_granularity_bytes: 512,
            discard_alignment_bytes: 0,
            discard_segments_max: 1,
            write_zeroes_sectors_max: 0,
        }
    }
}

/// Limits that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("queue limits: {0}")]
pub struct LimitsError(&'static str);

/// Whether it is a power of two less one, as masks are.
fn is_mask(mask: u32) -> bool {
    mask & mask.wrapping_add(1) == 0
}

impl QueueLimits {
    /// Checks the limits against each other: with valid limits every admitted bio can be split, except for segments
    /// that are too many or too fragmented for a single block.
    ///
    /// # Errors
    /// Names the first violated rule.
    pub fn check(&self) -> Result<(), LimitsError> {
        let lbs = self.logical_block_bytes;
        if !lbs.is_power_of_two() || lbs < 512 {
            return Err(LimitsError("the logical block is a power of two, 512 bytes or more"));
        }
        let block_sectors = lbs >> SECTOR_SHIFT;
        let write_unit_sectors = self.write_granularity_bytes.max(lbs) >> SECTOR_SHIFT;
        let granularity = self.discard_granularity_bytes;
        let rules = [
            (
                self.physical_block_bytes.is_power_of_two() && self.physical_block_bytes >= lbs,
                "the physical block is a power of two, no smaller than the logical block",
            ),
            (self.sectors_max >= block_sectors, "a request holds at least one logical block"),
            (self.segments_max >= 1, "a request holds at least one segment"),
            (self.segment_bytes_max >= lbs, "a segment holds at least one logical block"),
            (is_mask(self.virt_boundary_mask), "the boundary mask is one less than a power of two"),
            (
                self.segment_bytes_max & self.virt_boundary_mask == 0,
                "the longest segment ends on the boundary between segments",
            ),
            (
                is_mask(self.segment_boundary_mask)
                    && self.segment_boundary_mask >= (lbs - 1).max(self.virt_boundary_mask),
                "the boundary of segments is a power of two, no smaller than a logical block or the boundary between them",
            ),
            (
                is_mask(self.dma_alignment_mask)
                    && self.dma_alignment_mask < lbs
                    && self.segment_bytes_max & self.dma_alignment_mask == 0,
                "memory is aligned to a power of two that divides the logical block and the longest segment",
            ),
            (self.chunk_sectors.is_multiple_of(block_sectors), "a chunk is made of logical blocks"),
            (
                self.write_granularity_bytes.is_multiple_of(lbs)
                    && write_unit_sectors <= self.sectors_max
                    && self.chunk_sectors.is_multiple_of(write_unit_sectors),
                "the write granularity is made of logical blocks, fits a request and divides the chunk",
            ),
            (
                self.atomic_sectors_max.is_multiple_of(block_sectors) && self.atomic_sectors_max <= self.sectors_max,
                "an atomic write is made of logical blocks and no longer than others",
            ),
            (
                granularity >= 512 && granularity.is_multiple_of(lbs),
                "the discard granularity is made of logical blocks",
            ),
            (
                self.discard_alignment_bytes.is_multiple_of(lbs) && self.discard_alignment_bytes < granularity,
                "the discard alignment is made of logical blocks and less than the granularity",
            ),
            (
                self.discard_sectors_max == 0 || self.discard_sectors_max >= granularity >> SECTOR_SHIFT,
                "a discard is as long as the granularity, or there is none",
            ),
            (self.discard_segments_max >= 1, "a discard holds at least one range"),
            (
                self.write_zeroes_sectors_max == 0 || self.write_zeroes_sectors_max >= block_sectors,
                "a write of zeroes holds at least one logical block, or there is none",
            ),
        ];
        rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, rule)| Err(LimitsError(rule)))
    }

    /// Whether a bio makes sense on a device of `capacity` sectors, before anything is split from it.
    ///
    /// # Errors
    /// [`Status::Invalid`] if it is empty, unaligned, beyond the end, its segments are empty or do not add up, it reads
    /// into a registered buffer that is [read-only](blkyard_mem::BufferAccess), or it is [atomic](BioFlags::ATOMIC) and
    /// no write; [`Status::NotSupported`] if the device does not do the operation at
    /// all.
    #[inline]
    pub fn admit(&self, bio: &Bio, capacity: u64) -> Result<(), Status> {
        if bio.op == Op::Flush {
            return Ok(());
        }
        let block_mask = u64::from((self.logical_block_bytes >> SECTOR_SHIFT) - 1);
        let sectors = u64::from(bio.sectors);
        let end = bio.sector.checked_add(sectors).ok_or(Status::Invalid)?;
        if sectors == 0 || end > capacity || (bio.sector | sectors) & block_mask != 0 {
            return Err(Status::Invalid);
        }
        if bio.flags.contains(BioFlags::ATOMIC) {
            if bio.op != Op::Write {
                return Err(Status::Invalid);
            }
            if self.atomic_sectors_max == 0 {
                return Err(Status::NotSupported);
            }
        }
        match bio.op {
            Op::Discard if self.discard_sectors_max == 0 => return Err(Status::NotSupported),
            Op::WriteZeroes if self.write_zeroes_sectors_max == 0 => return Err(Status::NotSupported),
            Op::Discard | Op::WriteZeroes | Op::Flush => return Ok(()),
            Op::Read if bio.segments.iter().any(|segment| segment.is_read_only()) => return Err(Status::Invalid),
            Op::Read | Op::Write => {}
        }
        if let [segment] = bio.segments[..] {
            let bits = segment.len | segment.offset as u32;
            let fits = u64::from(segment.len) == bio.bytes() && bits & self.dma_alignment_mask == 0;
            return if fits { Ok(()) } else { Err(Status::Invalid) };
        }
        let mut bytes = 0_u64;
        let mut bits = 0;
        for segment in &bio.segments {
            if segment.len == 0 {
                return Err(Status::Invalid);
            }
            bytes += u64::from(segment.len);
            bits |= segment.len | segment.offset as u32;
        }
        if bytes != bio.bytes() || bits & self.dma_alignment_mask != 0 || bio.segments.len() > usize::from(u16::MAX) {
            return Err(Status::Invalid);
        }
        Ok(())
    }
}
