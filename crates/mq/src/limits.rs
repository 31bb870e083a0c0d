//! What one request to a device may look like, and where a bio must be cut to fit.
//!
//! The rules and their order follow Linux (`block/blk-merge.c`, `struct queue_limits`). Cutting is pure: it takes a
//! bio and a place in it and says how far the next request may reach.

use crate::{Bio, Op, SECTOR_BYTES, SECTOR_SHIFT, Status};

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
    /// Boundary that requests must not cross, sectors; zero if there is none. A stripe, say.
    pub chunk_sectors: u32,
    /// Bits that must be zero where two segments of a request meet; 4095 for NVMe PRP lists, zero if any gap is fine.
    pub virt_boundary_mask: u32,
    /// Bits that must be zero in each segment's start and length.
    pub dma_alignment_mask: u32,
    /// Longest discard, sectors; zero if the device cannot discard.
    pub discard_sectors_max: u32,
    /// Unit in which space is given back, bytes; a multiple of the logical block.
    pub discard_granularity_bytes: u32,
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
            // What Linux assumes of a device that does not say (BLK_MAX_SEGMENTS).
            segments_max: 128,
            segment_bytes_max: 1 << 20,
            chunk_sectors: 0,
            virt_boundary_mask: 0,
            dma_alignment_mask: 0,
            discard_sectors_max: 0,
            discard_granularity_bytes: 512,
            write_zeroes_sectors_max: 0,
        }
    }
}

/// Limits that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("queue limits: {0}")]
pub struct LimitsError(&'static str);

/// A place inside a bio.
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
pub struct Cut {
    /// Length, sectors.
    pub sectors: u32,
    /// Segments of the request, after long ones are cut.
    pub segments: u16,
    /// Where the share after this one begins.
    pub end: Cursor,
}

/// What makes a bio plain: data in one segment, nothing wrong with it, and one request as it stands. Nearly all bios are,
/// so what [`QueueLimits::admit`] and [`QueueLimits::cut`] would find out of them is boiled down to a few comparisons.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain {
    capacity_sectors: u64,
    block_mask: u64,
    dma_mask: u64,
    /// Zero if requests must not cross chunks: then no bio is plain.
    sectors_max: u32,
    /// Operations up to this one.
    op_max: u8,
}

const _: () = assert!((Op::Read as u8) < Op::Write as u8 && Op::Write as u8 == 1);

impl Plain {
    pub(crate) fn new(limits: &QueueLimits, capacity_sectors: u64, read_only: bool) -> Plain {
        let sectors_max = limits.sectors_max.min(limits.segment_bytes_max >> SECTOR_SHIFT);
        Plain {
            capacity_sectors,
            block_mask: u64::from((limits.logical_block_bytes >> SECTOR_SHIFT) - 1),
            dma_mask: u64::from(limits.dma_alignment_mask),
            sectors_max: if limits.chunk_sectors == 0 { sectors_max } else { 0 },
            op_max: if read_only { Op::Read as u8 } else { Op::Write as u8 },
        }
    }

    #[inline]
    pub(crate) fn is(&self, bio: &Bio) -> bool {
        let [segment] = bio.segments[..] else { return false };
        let (sectors, len) = (u64::from(bio.sectors), u64::from(segment.len));
        let torn = ((bio.sector | sectors) & self.block_mask) | ((len | segment.offset) & self.dma_mask);
        bio.op as u8 <= self.op_max
            && bio.sectors.wrapping_sub(1) < self.sectors_max
            && len == sectors << SECTOR_SHIFT
            && bio.sector < self.capacity_sectors
            && sectors <= self.capacity_sectors - bio.sector
            && torn == 0
    }
}

impl QueueLimits {
    /// Checks the limits against each other.
    ///
    /// # Errors
    /// Names the first rule that is broken.
    pub fn check(&self) -> Result<(), LimitsError> {
        let lbs = self.logical_block_bytes;
        let rules = [
            (lbs.is_power_of_two() && lbs >= 512, "the logical block is a power of two, 512 bytes or more"),
            (
                self.physical_block_bytes.is_power_of_two() && self.physical_block_bytes >= lbs,
                "the physical block is a power of two, no smaller than the logical block",
            ),
            (self.sectors_max >= lbs >> SECTOR_SHIFT, "a request holds at least one logical block"),
            (self.segments_max >= 1, "a request holds at least one segment"),
            (self.segment_bytes_max >= lbs, "a segment holds at least one logical block"),
            ((self.virt_boundary_mask + 1).is_power_of_two(), "the boundary mask is one less than a power of two"),
            (
                self.segment_bytes_max & self.virt_boundary_mask == 0,
                "the longest segment ends on the boundary between segments",
            ),
            (self.chunk_sectors.is_multiple_of(lbs >> SECTOR_SHIFT), "a chunk is made of logical blocks"),
            (
                self.discard_granularity_bytes >= 512 && self.discard_granularity_bytes.is_multiple_of(lbs),
                "the discard granularity is made of logical blocks",
            ),
        ];
        rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, rule)| Err(LimitsError(rule)))
    }

    /// Whether a bio makes sense on a device of `capacity` sectors, before anything is cut from it.
    ///
    /// # Errors
    /// [`Status::Invalid`] if it is empty, unaligned, beyond the end, or its segments do not add up;
    /// [`Status::NotSupported`] if the device does not do the operation at all.
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
        match bio.op {
            Op::Discard if self.discard_sectors_max == 0 => return Err(Status::NotSupported),
            Op::WriteZeroes if self.write_zeroes_sectors_max == 0 => return Err(Status::NotSupported),
            Op::Discard | Op::WriteZeroes | Op::Flush => return Ok(()),
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
            bytes += u64::from(segment.len);
            bits |= segment.len | segment.offset as u32;
        }
        if bytes != bio.bytes() || bits & self.dma_alignment_mask != 0 || bio.segments.len() > usize::from(u16::MAX) {
            return Err(Status::Invalid);
        }
        Ok(())
    }

    /// The longest request that fits the limits and begins at `from`.
    ///
    /// # Errors
    /// [`Status::Invalid`] if not even one logical block fits: its segments are too many or too torn.
    #[inline]
    pub fn cut(&self, bio: &Bio, from: Cursor) -> Result<Cut, Status> {
        if from == Cursor::default() && self.takes_whole(bio) {
            let end = Cursor { sectors: bio.sectors, segment: 1, offset: 0 };
            return Ok(Cut { sectors: bio.sectors, segments: 1, end });
        }
        self.cut_slow(bio, from)
    }

    /// Whether a bio that is [admitted](QueueLimits::admit) fits one request at a glance: the common case.
    #[inline]
    pub(crate) fn takes_whole(&self, bio: &Bio) -> bool {
        matches!(bio.segments[..], [segment] if segment.len <= self.segment_bytes_max)
            && bio.sectors <= self.sectors_max
            && self.chunk_sectors == 0
            && bio.op.has_data()
    }

    fn cut_slow(&self, bio: &Bio, from: Cursor) -> Result<Cut, Status> {
        let sectors = match bio.op {
            Op::Flush => 0,
            Op::Read | Op::Write => return self.cut_data(bio, from),
            Op::Discard => self.cut_discard(bio, from),
            Op::WriteZeroes => self.cut_length(bio, from, self.write_zeroes_sectors_max),
        };
        let end = Cursor { sectors: from.sectors + sectors, ..from };
        Ok(Cut { sectors, segments: 0, end })
    }

    /// Sectors from `from` within `max` and up to the next chunk boundary, ending on a physical block if possible.
    fn cut_length(&self, bio: &Bio, from: Cursor, max: u32) -> u32 {
        let start = bio.sector + u64::from(from.sectors);
        let left = bio.sectors - from.sectors;
        let mut max = max;
        if self.chunk_sectors != 0 {
            let into = start % u64::from(self.chunk_sectors);
            max = max.min(self.chunk_sectors - into as u32);
        }
        if left <= max {
            return left;
        }
        let physical = u64::from(self.physical_block_bytes >> SECTOR_SHIFT);
        let end = (start + u64::from(max)) / physical * physical;
        if end > start {
            return (end - start) as u32;
        }
        let logical = self.logical_block_bytes >> SECTOR_SHIFT;
        max / logical * logical
    }

    fn cut_discard(&self, bio: &Bio, from: Cursor) -> u32 {
        let granularity = (self.discard_granularity_bytes >> SECTOR_SHIFT).max(1);
        let left = bio.sectors - from.sectors;
        let max = (self.discard_sectors_max / granularity * granularity).max(granularity);
        if left <= max {
            return left;
        }
        // The piece after this one begins on the granularity.
        let end = bio.sector + u64::from(from.sectors) + u64::from(max);
        let beyond = (end % u64::from(granularity)) as u32;
        if beyond < max { max - beyond } else { max }
    }

    fn cut_data(&self, bio: &Bio, from: Cursor) -> Result<Cut, Status> {
        let want = u64::from(self.cut_length(bio, from, self.sectors_max)) << SECTOR_SHIFT;
        let (bytes, _) = self.walk(bio, from, want, |_| ());
        let block = u64::from(self.logical_block_bytes);
        let bytes = bytes / block * block;
        if bytes == 0 {
            return Err(Status::Invalid);
        }
        let mut end = from;
        let (_, segments) = self.walk(bio, from, bytes, |at| end = at);
        end.sectors = from.sectors + (bytes >> SECTOR_SHIFT) as u32;
        Ok(Cut { sectors: (bytes / SECTOR_BYTES) as u32, segments, end })
    }

    /// Walks pieces of segments from `from` until `want` bytes are covered or a limit stops it; tells where each
    /// piece ends. Returns bytes and pieces.
    fn walk(&self, bio: &Bio, from: Cursor, want: u64, mut at: impl FnMut(Cursor)) -> (u64, u16) {
        let (mut bytes, mut pieces) = (0_u64, 0_u16);
        let mut offset = from.offset;
        let mut previous_end = None;
        for index in usize::from(from.segment)..bio.segments.len() {
            let segment = bio.segments[index];
            if let Some(end) = previous_end
                && (end | (segment.offset as u32).wrapping_add(offset)) & self.virt_boundary_mask != 0
            {
                break;
            }
            while offset < segment.len {
                if bytes == want || pieces == self.segments_max {
                    return (bytes, pieces);
                }
                let left = u64::from(segment.len - offset).min(want - bytes);
                let len = left.min(u64::from(self.segment_bytes_max)) as u32;
                bytes += u64::from(len);
                pieces += 1;
                offset += len;
                let done = offset == segment.len;
                at(Cursor {
                    sectors: 0,
                    segment: index as u16 + u16::from(done),
                    offset: if done { 0 } else { offset },
                });
            }
            previous_end = Some((segment.offset as u32).wrapping_add(segment.len));
            offset = 0;
        }
        (bytes, pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkyard_mem::Segment;
    use proptest::prelude::*;

    fn bio(op: Op, sector: u64, sectors: u32, segments: &[(u64, u32)]) -> Bio {
        let segments = segments.iter().map(|&(offset, len)| Segment { region: 0, offset, len }).collect();
        Bio { op, sector, sectors, segments, ..Bio::default() }
    }

    fn blocks_of_4k() -> QueueLimits {
        QueueLimits {
            logical_block_bytes: 4096,
            physical_block_bytes: 4096,
            discard_granularity_bytes: 4096,
            ..QueueLimits::default()
        }
    }

    /// Lengths, in sectors, of the requests a bio is cut into.
    fn cuts(limits: &QueueLimits, bio: &Bio) -> Result<Vec<(u32, u16)>, Status> {
        limits.check().unwrap();
        let mut out = Vec::new();
        let mut at = Cursor::default();
        while at.sectors < bio.sectors {
            let cut = limits.cut(bio, at)?;
            out.push((cut.sectors, cut.segments));
            at = cut.end;
        }
        Ok(out)
    }

    #[test]
    fn bios_are_cut_where_the_limits_say() {
        let l = QueueLimits::default();
        let k64 = QueueLimits { sectors_max: 128, ..l };
        let chunk = QueueLimits { chunk_sectors: 16, ..l };
        let phys = QueueLimits { sectors_max: 12, physical_block_bytes: 4096, ..l };
        let prp = QueueLimits { virt_boundary_mask: 4095, segment_bytes_max: 4096, ..l };
        let two = QueueLimits { segments_max: 2, ..l };
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
                "a cut inside a segment",
                two,
                bio(Op::Read, 0, 3, &[(0, 256), (512, 512), (2048, 768)]),
                &[(1, 2), (2, 2)],
            ),
        ];
        for (name, limits, bio, want) in table {
            assert_eq!(cuts(limits, bio).as_deref(), Ok(*want), "{name}");
        }
    }

    #[test]
    fn discards_end_on_the_granularity() {
        let limits = QueueLimits { discard_sectors_max: 70, discard_granularity_bytes: 4096, ..QueueLimits::default() };
        // 70 rounds to 64; the first piece is shortened so that the second begins on a multiple of 8.
        assert_eq!(cuts(&limits, &bio(Op::Discard, 3, 200, &[])), Ok(vec![(61, 0), (64, 0), (64, 0), (11, 0)]));
    }

    #[test]
    fn a_block_torn_beyond_the_segment_limit_is_invalid() {
        let limits = QueueLimits { segments_max: 2, ..blocks_of_4k() };
        let torn = bio(Op::Read, 0, 8, &[(0, 1024), (2048, 1024), (4096, 2048)]);
        assert_eq!(cuts(&limits, &torn), Err(Status::Invalid));
    }

    #[test]
    fn bios_that_make_no_sense_are_not_admitted() {
        let limits = QueueLimits { dma_alignment_mask: 3, discard_sectors_max: 8, ..blocks_of_4k() };
        let table: &[(&str, Bio, bool)] = &[
            ("whole", bio(Op::Read, 8, 8, &[(0, 4096)]), true),
            ("last block", bio(Op::Write, 992, 8, &[(0, 4096)]), true),
            ("beyond the end", bio(Op::Write, 1000, 8, &[(0, 4096)]), false),
            ("wraps", bio(Op::Write, u64::MAX - 7, 8, &[(0, 4096)]), false),
            ("empty", bio(Op::Read, 0, 0, &[]), false),
            ("start off the block", bio(Op::Read, 4, 8, &[(0, 4096)]), false),
            ("length off the block", bio(Op::Read, 0, 4, &[(0, 2048)]), false),
            ("segments too short", bio(Op::Read, 0, 8, &[(0, 2048)]), false),
            ("segments too long", bio(Op::Read, 0, 8, &[(0, 8192)]), false),
            ("unaligned memory", bio(Op::Read, 0, 8, &[(2, 4096)]), false),
            ("flush", bio(Op::Flush, 0, 0, &[]), true),
            ("discard", bio(Op::Discard, 0, 1000, &[]), true),
            ("zeroes on a device that cannot", bio(Op::WriteZeroes, 0, 8, &[]), false),
            ("discard beyond the end", bio(Op::Discard, 0, 1008, &[]), false),
        ];
        for (name, bio, fits) in table {
            assert_eq!(limits.admit(bio, 1000).is_ok(), *fits, "{name}");
        }
    }

    proptest! {
        /// What is taken at a glance is what the long way would admit, and pass on in one piece; and little else is left to it.
        #[test]
        fn a_plain_bio_is_one_request(
            op in prop::sample::select(&[Op::Read, Op::Write, Op::Discard, Op::Flush][..]), read_only: bool,
            sector in 0_u64..120, sectors in 0_u32..12, offset in 0_u64..20, extra in 0_u32..2,
            sectors_max in 8_u32..10, chunk in prop::sample::select(&[0_u32, 8][..]),
            block in prop::sample::select(&[512_u32, 4096][..]), dma_mask in prop::sample::select(&[0_u32, 3, 511][..]),
        ) {
            let limits = QueueLimits {
                sectors_max, chunk_sectors: chunk, dma_alignment_mask: dma_mask, discard_sectors_max: 8,
                logical_block_bytes: block, physical_block_bytes: 4096, discard_granularity_bytes: 4096,
                ..QueueLimits::default()
            };
            let bio = bio(op, sector, sectors, &[(offset, sectors * 512 + extra)]);
            let admitted = limits.admit(&bio, 100).is_ok() && !(read_only && op.is_write());
            let whole = admitted && op.has_data() && cuts(&limits, &bio) == Ok(vec![(sectors, 1)]);
            let plain = Plain::new(&limits, 100, read_only).is(&bio);
            prop_assert!(!plain || whole);
            prop_assert!(plain || !whole || chunk != 0);
        }

        /// What comes out covers exactly what went in, and never crosses a limit.
        #[test]
        fn cuts_cover_the_bio_and_keep_the_limits(
            pieces in proptest::collection::vec((0_u64..64, 1_u32..40), 1..12),
            sector in 0_u64..100, sectors_max in 1_u32..64, segments_max in 1_u16..6, chunk in 0_u32..20,
            boundary in prop_oneof![Just(0_u32), Just(511), Just(1023)],
        ) {
            let limits = QueueLimits {
                sectors_max, segments_max, chunk_sectors: chunk, virt_boundary_mask: boundary,
                segment_bytes_max: 8192, ..QueueLimits::default()
            };
            prop_assume!(limits.check().is_ok());
            let segments: Vec<_> = pieces.iter().map(|&(at, len)| (at * 512, len * 512)).collect();
            let total: u32 = pieces.iter().map(|&(_, len)| len).sum();
            let bio = bio(Op::Read, sector, total, &segments);
            let mut at = Cursor::default();
            let mut bytes = Vec::new();
            while at.sectors < total {
                let cut = limits.cut(&bio, at).unwrap();
                prop_assert!(cut.sectors > 0 && cut.sectors <= sectors_max);
                prop_assert!(cut.segments <= segments_max);
                if chunk > 0 {
                    let first = sector + u64::from(at.sectors);
                    prop_assert_eq!(first / u64::from(chunk), (first + u64::from(cut.sectors) - 1) / u64::from(chunk));
                }
                let part: Vec<Segment> = crate::request::pieces(&bio.segments, at, cut.sectors, limits.segment_bytes_max).collect();
                prop_assert_eq!(part.len(), usize::from(cut.segments));
                for pair in part.windows(2) {
                    let touching = pair[0].offset + u64::from(pair[0].len) == pair[1].offset;
                    let bits = (pair[0].offset as u32 + pair[0].len) | pair[1].offset as u32;
                    prop_assert!(touching || bits & boundary == 0);
                }
                prop_assert!(part.iter().all(|s| s.len <= limits.segment_bytes_max));
                bytes.extend(part.iter().flat_map(|s| (s.offset..s.offset + u64::from(s.len)).step_by(256)));
                prop_assert_eq!(cut.end.sectors, at.sectors + cut.sectors);
                at = cut.end;
            }
            let want: Vec<u64> = segments.iter().flat_map(|&(o, l)| (o..o + u64::from(l)).step_by(256)).collect();
            prop_assert_eq!(bytes, want);
        }
    }
}
