//! Positions at which a bio must be split to fit the device. After `block/blk-merge.c` of Linux (`bio_split_rw`,
//! `get_max_io_size`, `bvec_split_segs`, `bio_split_discard`).
//!
//! Pure: takes an [admitted](QueueLimits::admit) bio and a position in it, and returns the extent of the next request.

use crate::{Bio, BioFlags, Op, QueueLimits, SECTOR_SHIFT, Segment, Status};

/// A position inside a bio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Sectors before it.
    pub sectors: u32,
    /// Segment it lies in.
    pub segment: u16,
    /// Bytes of that segment before it.
    pub offset: u32,
}

/// The next request's share of a bio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BioSplit {
    /// Length, sectors.
    pub sectors: u32,
    /// Segments of the request, after long ones are split: each on its own, whether it continues its neighbour or not.
    pub segments: u16,
    /// Where the share after this one begins.
    pub end: Cursor,
}

/// How far one piece of memory may reach.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pieces {
    pub(crate) bytes_max: u32,
    pub(crate) boundary_mask: u32,
}

impl Pieces {
    /// Length of the first piece of `left` bytes that begin at `offset` of their region.
    #[inline]
    pub(crate) fn first_len(self, offset: u64, left: u64) -> u32 {
        let mask = u64::from(self.boundary_mask);
        left.min(u64::from(self.bytes_max)).min(mask + 1 - (offset & mask)) as u32
    }

    /// Whether a segment is one piece.
    #[inline]
    pub(crate) fn is_one(self, segment: Segment) -> bool {
        let last_byte = segment.offset.wrapping_add(u64::from(segment.len)).wrapping_sub(1);
        segment.len.wrapping_sub(1) < self.bytes_max
            && (segment.offset ^ last_byte) & !u64::from(self.boundary_mask) == 0
    }
}

impl QueueLimits {
    /// How far one piece of memory may reach.
    #[inline]
    pub(crate) fn pieces(&self) -> Pieces {
        Pieces { bytes_max: self.segment_bytes_max, boundary_mask: self.segment_boundary_mask }
    }

    /// The longest request that fits the limits and begins at `from`.
    ///
    /// A limit that has become zero since the bio was admitted does not split: the device refuses the request itself.
    ///
    /// # Errors
    /// [`Status::Invalid`] if not even one logical block fits, because its segments are too many or too torn, or if the
    /// bio is [atomic](BioFlags::ATOMIC) and does not fit whole; [`Status::Again`] if it does not fit whole and is not
    /// to [wait](BioFlags::NOWAIT), as its parts might have to.
    #[inline]
    pub fn split(&self, bio: &Bio, from: Cursor) -> Result<BioSplit, Status> {
        if from == Cursor::default() && self.takes_whole(bio) {
            let end = Cursor { sectors: bio.sectors, segment: 1, offset: 0 };
            return Ok(BioSplit { sectors: bio.sectors, segments: 1, end });
        }
        self.split_slow(bio, from)
    }

    /// Whether a bio that is [admitted](QueueLimits::admit) fits one request at a glance: the common case.
    #[inline]
    pub(crate) fn takes_whole(&self, bio: &Bio) -> bool {
        matches!(bio.segments[..], [segment] if self.pieces().is_one(segment))
            && bio.sectors <= self.sectors_max
            && self.chunk_sectors == 0
            && bio.op.has_data()
            && !bio.flags.contains(BioFlags::ATOMIC)
    }

    /// Most sectors of a request of this kind that begins at `sector`, wherever it ends: the limit of its operation,
    /// and the way to the next chunk. Zero if the device does not do it (any more).
    pub(super) fn sectors_max_at(&self, op: Op, flags: BioFlags, sector: u64) -> u32 {
        let max = match op {
            Op::Flush => return 0,
            // Chunks do not apply to operations without data.
            Op::Discard => return self.discard_sectors_max / self.granularity() * self.granularity(),
            Op::WriteZeroes => self.write_zeroes_sectors_max,
            Op::Read | Op::Write if flags.contains(BioFlags::ATOMIC) => self.atomic_sectors_max,
            Op::Read | Op::Write => self.sectors_max,
        };
        if self.chunk_sectors == 0 {
            return max;
        }
        let into = sector % u64::from(self.chunk_sectors);
        max.min(self.chunk_sectors - into as u32)
    }

    #[inline(never)]
    fn split_slow(&self, bio: &Bio, from: Cursor) -> Result<BioSplit, Status> {
        if bio.op == Op::Flush {
            return Ok(BioSplit { sectors: 0, segments: 0, end: from });
        }
        let sectors = self.split_length(bio, from);
        let split = if bio.op.has_data() {
            self.split_data(bio, from, sectors)
        } else {
            BioSplit { sectors, segments: 0, end: Cursor { sectors: from.sectors + sectors, ..from } }
        };
        let is_split = split.end.sectors < bio.sectors;
        if split.sectors == 0 || (is_split && bio.flags.contains(BioFlags::ATOMIC)) {
            return Err(Status::Invalid);
        }
        if is_split && bio.flags.contains(BioFlags::NOWAIT) {
            return Err(Status::Again);
        }
        Ok(split)
    }

    /// Longest request from `from`, without regard to segments, sectors.
    ///
    /// A bio that fits is never split. A necessary split should be at the end of a physical block. (Linux lowers the
    /// maximum to such an end before it compares the length, and so splits some bios that would fit: one request more,
    /// with the same blocks torn.)
    fn split_length(&self, bio: &Bio, from: Cursor) -> u32 {
        let start = bio.sector + u64::from(from.sectors);
        let left = bio.sectors - from.sectors;
        let max = self.sectors_max_at(bio.op, bio.flags, start);
        if left <= max {
            return left;
        }
        match bio.op {
            Op::Discard if max == 0 => left,
            Op::WriteZeroes if self.write_zeroes_sectors_max == 0 => left,
            Op::Discard => {
                // The piece after this one begins on the granularity.
                let granularity = u64::from(self.granularity());
                let shift = u64::from(self.discard_alignment_bytes >> SECTOR_SHIFT) % granularity;
                let beyond = (start + u64::from(max) + granularity - shift) % granularity;
                max - beyond as u32
            }
            _ => {
                let physical = u64::from(self.physical_block_bytes >> SECTOR_SHIFT);
                let end = (start + u64::from(max)) / physical * physical;
                let unit = self.unit_bytes(bio.op) >> SECTOR_SHIFT;
                if end >= start + u64::from(unit) { (end - start) as u32 } else { max / unit * unit }
            }
        }
    }

    /// The unit of a discard, sectors.
    fn granularity(&self) -> u32 {
        (self.discard_granularity_bytes >> SECTOR_SHIFT).max(1)
    }

    /// Unit of the parts of a split bio, bytes.
    fn unit_bytes(&self, op: Op) -> u32 {
        if op == Op::Write {
            self.write_granularity_bytes.max(self.logical_block_bytes)
        } else {
            self.logical_block_bytes
        }
    }

    /// As much of `sectors` as the segments allow; empty if that is less than a block.
    fn split_data(&self, bio: &Bio, from: Cursor, sectors: u32) -> BioSplit {
        let split = |(bytes, segments, end): (u64, u16, Cursor)| {
            let sectors = (bytes >> SECTOR_SHIFT) as u32;
            BioSplit { sectors, segments, end: Cursor { sectors: from.sectors + sectors, ..end } }
        };
        let want = u64::from(sectors) << SECTOR_SHIFT;
        let walked = self.walk(bio, from, want);
        if walked.0 == u64::from(bio.sectors - from.sectors) << SECTOR_SHIFT {
            return split(walked);
        }
        let unit = u64::from(self.unit_bytes(bio.op));
        let bytes = walked.0 / unit * unit;
        split(if bytes == walked.0 { walked } else { self.walk(bio, from, bytes) })
    }

    /// Walks pieces of segments from `from` until `want` bytes are covered or a limit stops it. Returns bytes, pieces
    /// and where it stopped.
    fn walk(&self, bio: &Bio, from: Cursor, want: u64) -> (u64, u16, Cursor) {
        let boundary = u64::from(self.virt_boundary_mask);
        let (mut bytes, mut pieces, mut at) = (0_u64, 0_u16, from);
        let mut previous_end = 0;
        while let Some(segment) = bio.segments.get(usize::from(at.segment)) {
            if at.offset >= segment.len {
                at = Cursor { segment: at.segment + 1, offset: 0, ..at };
                continue;
            }
            let start = segment.offset.wrapping_add(u64::from(at.offset));
            // Two pieces meet on the boundary, those of one segment no less than those of two.
            let is_gap = pieces > 0 && (previous_end | start) & boundary != 0;
            if bytes == want || pieces == self.segments_max || is_gap {
                break;
            }
            let left = u64::from(segment.len - at.offset).min(want - bytes);
            let len = self.pieces().first_len(start, left);
            bytes += u64::from(len);
            pieces += 1;
            at.offset += len;
            previous_end = start.wrapping_add(u64::from(len));
        }
        (bytes, pieces, at)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{bio, blocks_of_4k, splits, with};
    use super::*;

    #[test]
    fn bios_are_split_where_the_limits_say() {
        let l = QueueLimits::default();
        let k64 = QueueLimits { sectors_max: 128, ..l };
        let chunk = QueueLimits { chunk_sectors: 16, ..l };
        let phys = QueueLimits { sectors_max: 12, physical_block_bytes: 4096, ..l };
        let prp = QueueLimits { virt_boundary_mask: 4095, segment_bytes_max: 4096, ..l };
        let pages = QueueLimits { virt_boundary_mask: 4095, segment_bytes_max: 8192, ..l };
        let two = QueueLimits { segments_max: 2, ..l };
        let line = QueueLimits { segment_boundary_mask: 8191, ..l };
        let zone = QueueLimits { write_granularity_bytes: 4096, sectors_max: 20, ..l };
        let table: &[(&str, QueueLimits, Bio, &[(u32, u16)])] = &[
            ("small and whole", l, bio(Op::Read, 0, 8, &[(0, 4096)]), &[(8, 1)]),
            ("longest", k64, bio(Op::Read, 0, 300, &[(0, 300 * 512)]), &[(128, 1), (128, 1), (44, 1)]),
            ("chunk", chunk, bio(Op::Write, 12, 24, &[(0, 24 * 512)]), &[(4, 1), (16, 1), (4, 1)]),
            ("end on a physical block", phys, bio(Op::Write, 4, 30, &[(0, 30 * 512)]), &[(12, 1), (8, 1), (10, 1)]),
            ("within one physical block", phys, bio(Op::Write, 1, 6, &[(0, 3072)]), &[(6, 1)]),
            ("segments", two, bio(Op::Read, 0, 4, &[(0, 512), (9000, 512), (0, 1024)]), &[(2, 2), (2, 1)]),
            ("no gap", prp, bio(Op::Read, 0, 16, &[(2048, 2048), (8192, 4096), (0, 2048)]), &[(16, 3)]),
            ("gap at the start of the next", prp, bio(Op::Read, 0, 9, &[(0, 4096), (512, 512)]), &[(8, 1), (1, 1)]),
            ("gap at the end of the last", prp, bio(Op::Read, 0, 9, &[(0, 512), (4096, 4096)]), &[(1, 1), (8, 1)]),
            ("long segment", prp, bio(Op::Read, 0, 24, &[(0, 12288)]), &[(24, 3)]),
            (
                "a piece that ends between boundaries",
                pages,
                bio(Op::Read, 0, 36, &[(2048, 18432)]),
                &[(16, 1), (16, 1), (4, 1)],
            ),
            ("the boundary of segments", line, bio(Op::Read, 0, 24, &[(4096, 12288)]), &[(24, 2)]),
            ("one that ends there", line, bio(Op::Read, 0, 8, &[(4096, 4096)]), &[(8, 1)]),
            ("one that crosses it", line, bio(Op::Read, 0, 8, &[(6144, 4096)]), &[(8, 2)]),
            (
                "zones are written in their unit",
                zone,
                bio(Op::Write, 0, 40, &[(0, 20480)]),
                &[(16, 1), (16, 1), (8, 1)],
            ),
            ("and read in any", zone, bio(Op::Read, 0, 40, &[(0, 20480)]), &[(20, 1), (20, 1)]),
            (
                "a split inside a segment",
                two,
                bio(Op::Read, 0, 3, &[(0, 256), (512, 512), (2048, 768)]),
                &[(1, 2), (2, 2)],
            ),
        ];
        for (name, limits, bio, want) in table {
            assert_eq!(splits(limits, bio).as_deref(), Ok(*want), "{name}");
        }
    }

    #[test]
    fn discards_end_on_the_granularity() {
        let limits = QueueLimits { discard_sectors_max: 70, discard_granularity_bytes: 4096, ..QueueLimits::default() };
        let shifted = QueueLimits { discard_alignment_bytes: 1536, ..limits };
        let withdrawn = QueueLimits { discard_sectors_max: 0, ..limits };
        let table: &[(&str, QueueLimits, &[(u32, u16)])] = &[
            // 70 rounds to 64; the first piece is shortened so that the second begins on a multiple of 8, or 3 behind
            // one.
            ("from zero", limits, &[(61, 0), (64, 0), (64, 0), (11, 0)]),
            ("shifted by three", shifted, &[(64, 0), (64, 0), (64, 0), (8, 0)]),
            ("no discards any more", withdrawn, &[(200, 0)]),
        ];
        for (name, limits, want) in table {
            assert_eq!(splits(limits, &bio(Op::Discard, 3, 200, &[])).as_deref(), Ok(*want), "{name}");
        }
    }

    #[test]
    fn zeroes_are_split_to_their_own_limit_and_the_chunk() {
        let limits = QueueLimits { write_zeroes_sectors_max: 30, chunk_sectors: 64, ..blocks_of_4k() };
        let zeroes = bio(Op::WriteZeroes, 8, 96, &[]);
        assert_eq!(splits(&limits, &zeroes), Ok(vec![(24, 0), (24, 0), (8, 0), (24, 0), (16, 0)]));
        let withdrawn = QueueLimits { write_zeroes_sectors_max: 0, ..limits };
        assert_eq!(splits(&withdrawn, &zeroes), Ok(vec![(96, 0)]));
    }

    #[test]
    fn a_block_torn_beyond_the_segment_limit_is_invalid() {
        let limits = QueueLimits { segments_max: 2, ..blocks_of_4k() };
        let torn = bio(Op::Read, 0, 8, &[(0, 1024), (2048, 1024), (4096, 2048)]);
        assert_eq!(splits(&limits, &torn), Err(Status::Invalid));
    }

    #[test]
    fn some_bios_are_whole_or_nothing() {
        let limits =
            QueueLimits { sectors_max: 16, atomic_sectors_max: 8, chunk_sectors: 64, ..QueueLimits::default() };
        let write = |flags, sector, sectors| with(bio(Op::Write, sector, sectors, &[(0, sectors * 512)]), flags);
        let table: &[(&str, Bio, Result<&[(u32, u16)], Status>)] = &[
            ("atomic", write(BioFlags::ATOMIC, 0, 8), Ok(&[(8, 1)])),
            ("too long for that", write(BioFlags::ATOMIC, 0, 9), Err(Status::Invalid)),
            ("across chunks", write(BioFlags::ATOMIC, 60, 8), Err(Status::Invalid)),
            ("does not wait", write(BioFlags::NOWAIT, 0, 16), Ok(&[(16, 1)])),
            ("would have to", write(BioFlags::NOWAIT, 0, 17), Err(Status::Again)),
            ("both", write(BioFlags::NOWAIT | BioFlags::ATOMIC, 0, 9), Err(Status::Invalid)),
        ];
        for (name, bio, want) in table {
            assert_eq!(splits(&limits, bio), want.map(<[_]>::to_vec), "{name}");
        }
    }
}
