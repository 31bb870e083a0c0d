//! Merging: whether a bio may join a waiting request. After `block/blk-merge.c` of Linux (`blk_try_merge`,
//! `ll_back_merge_fn`,
//! `ll_front_merge_fn`, `bio_will_gap`).
//!
//! Pure: returns whether it may, and the shape of the request afterwards. The hardware queue finds candidates and
//! chains bios.
//!
//! **How segments are counted.** A request of several bios has the segments of each, in order, each split as
//! [`Pieces`](super::split::Pieces) says. Only where two bios meet, the last segment of the one and the first of the
//! other are one segment if [`joins`](Pieces::joins) says so. A joined segment counts as the last segment of its bio
//! for the next seam, so that a row of small bios with contiguous memory becomes one segment. An iteration over the
//! segments of a request from its first bio on, which joins wherever memory is contiguous and the limits allow, finds
//! at most [`Shape::segments`] of them.

use super::split::{Cursor, Pieces};
use crate::{Bio, BioFlags, Op, QueueLimits, Segment};

/// How a bio joins a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Merge {
    /// Behind its last bio.
    Back,
    /// Before its first bio: the request begins earlier now.
    Front,
    /// As one more range of a discard, wherever it is.
    Discard,
}

/// Why a bio does not join a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoMerge {
    /// They are not neighbours, or not of a kind.
    Kind,
    /// Together they exceed a limit. Neither an earlier request nor this one is worth another try.
    Limits,
}

/// A waiting request, as merging sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) op: Op,
    pub(crate) flags: BioFlags,
    pub(crate) sector: u64,
    pub(crate) sectors: u32,
    /// Segments, counted as the head of this module says.
    pub(crate) segments: u16,
    /// Ranges of a discard; one for everything else.
    pub(crate) ranges: u16,
    /// First segment, with those joined to it; undefined without data.
    pub(crate) first: Segment,
    /// Last segment, with those joined to it; undefined without data.
    pub(crate) last: Segment,
}

/// Bios that are never merged: steps of a flush sequence, `NO_MERGE`, and reserved ones that must not wait for others.
const LONERS: BioFlags = BioFlags::FUA.union(BioFlags::PREFLUSH).union(BioFlags::NO_MERGE).union(BioFlags::RESERVED);

impl Shape {
    /// Shape of a bio that became one request, with the `segments` of its split.
    #[inline]
    pub(crate) fn of(bio: &Bio, segments: u16) -> Shape {
        Shape {
            op: bio.op,
            flags: bio.flags,
            sector: bio.sector,
            sectors: bio.sectors,
            segments,
            ranges: 1,
            first: bio.segments.first().copied().unwrap_or_default(),
            last: bio.segments.last().copied().unwrap_or_default(),
        }
    }
}

impl Pieces {
    /// Whether two segments, the last of a bio and the first of the next, become one piece: the second continues the
    /// first in memory, and no limit comes between.
    #[inline]
    pub(crate) fn joins(self, last: Segment, first: Segment) -> bool {
        last.region == first.region
            && last.offset.wrapping_add(u64::from(last.len)) == first.offset
            && last.len > 0
            && first.len > 0
            && last.len.checked_add(first.len).is_some_and(|len| self.is_one(Segment { len, ..last }))
    }
}

/// Whether a bio fails for a stale registered buffer only if the request does: either none of them is in a registered
/// buffer, or all in the same.
fn are_of_one_fate(request: &Shape, bio: &Bio) -> bool {
    let same = |segment: &Segment| segment.region == request.first.region;
    let mut segments = [request.first, request.last].into_iter().chain(bio.segments.iter().copied());
    !segments.any(Segment::is_registered) || (same(&request.last) && bio.segments.iter().all(same))
}

impl QueueLimits {
    /// Whether a bio may join a waiting request of whole bios, and how. Then `request` becomes both together.
    ///
    /// Both were [admitted](QueueLimits::admit). Their flags must be equal: `NOWAIT`, atomic and polled bios join their
    /// own kind only.
    ///
    /// # Errors
    /// Says whether another request may match ([`NoMerge::Kind`]); `request` is unchanged then.
    #[inline]
    pub(crate) fn merge(&self, request: &mut Shape, bio: &Bio) -> Result<Merge, NoMerge> {
        let kind = self.merge_kind(request, bio).filter(|_| are_of_one_fate(request, bio)).ok_or(NoMerge::Kind)?;
        *request = self.merged(request, bio, kind).ok_or(NoMerge::Limits)?;
        Ok(kind)
    }

    /// How a bio would join a request, within the limits: a few comparisons, without the segments.
    #[inline]
    pub(crate) fn merge_kind(&self, request: &Shape, bio: &Bio) -> Option<Merge> {
        let kind = if bio.op == Op::Discard && self.discard_segments_max > 1 {
            Merge::Discard
        } else if request.sector.wrapping_add(u64::from(request.sectors)) == bio.sector {
            Merge::Back
        } else if bio.sector.wrapping_add(u64::from(bio.sectors)) == request.sector {
            Merge::Front
        } else {
            return None;
        };
        let mergeable = bio.op == request.op
            && bio.flags == request.flags
            && !bio.flags.intersects(LONERS)
            && matches!(bio.op, Op::Read | Op::Write | Op::Discard)
            // A zone is written in order: a later write must not come first.
            && !(kind == Merge::Front && bio.op == Op::Write && self.write_granularity_bytes > 0);
        mergeable.then_some(kind)
    }

    #[inline(never)]
    fn merged(&self, request: &Shape, bio: &Bio, kind: Merge) -> Option<Shape> {
        // A bio that must be split does not become one request by joining another.
        let whole = self.split(bio, Cursor::default()).ok().filter(|split| split.sectors == bio.sectors)?;
        let added = Shape::of(bio, whole.segments);
        let (front, back) = if kind == Merge::Front { (&added, request) } else { (request, &added) };
        let sectors = front.sectors.checked_add(back.sectors)?;
        if sectors > self.sectors_max_at(bio.op, bio.flags, front.sector) {
            return None;
        }
        let together = Shape { sectors, ..*front };
        match kind {
            Merge::Discard => {
                let ranges = request.ranges.checked_add(1).filter(|ranges| *ranges <= self.discard_segments_max)?;
                Some(Shape { ranges, ..together })
            }
            Merge::Back | Merge::Front if !bio.op.has_data() => Some(together),
            Merge::Back | Merge::Front => self.seam(kind, front, back).map(|seam| Shape { sectors, ..seam }),
        }
    }

    /// The segments of `front` and `back` in a row.
    fn seam(&self, kind: Merge, front: &Shape, back: &Shape) -> Option<Shape> {
        let (last, first) = (front.last, back.first);
        let pieces = self.pieces();
        let is_joined = pieces.joins(last, first);
        if !is_joined {
            let boundary = u64::from(self.virt_boundary_mask);
            let end = last.offset.wrapping_add(u64::from(last.len));
            // As Linux, which so leaves alone requests that began torn, rather than to follow them for long.
            let begins_torn = kind == Merge::Back && front.first.offset & boundary != 0;
            // Earlier joins would change if its first bytes now joined those before them: their seams might become
            // gaps. A segment of several pieces was never joined.
            let one_byte = Segment { len: 1, ..first };
            let shifts = kind == Merge::Front && pieces.is_one(first) && pieces.joins(last, one_byte);
            if (end | first.offset) & boundary != 0 || begins_torn || shifts {
                return None;
            }
        }
        let segments = (front.segments.checked_add(back.segments)?.checked_sub(u16::from(is_joined)))
            .filter(|segments| *segments <= self.segments_max)?;
        let mut together = Shape { segments, last: back.last, ..*front };
        if is_joined {
            let run = Segment { len: last.len + first.len, ..last };
            // A joined segment is one piece: a request that has no other begins and ends with it.
            if front.segments == 1 {
                together.first = run;
            }
            if back.segments == 1 {
                together.last = run;
            }
        }
        Some(together)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{bio, with};
    use super::*;

    /// Result for a bio, and first sector, length, segments and ranges of the request afterwards.
    type Want = Result<(Merge, u64, u32, u16, u16), NoMerge>;

    fn merged(limits: &QueueLimits, first: &Bio, second: &Bio) -> Want {
        limits.check().unwrap();
        let whole = limits.split(first, Cursor::default()).unwrap();
        assert_eq!(whole.sectors, first.sectors, "only whole bios merge");
        let mut shape = Shape::of(first, whole.segments);
        let before = shape;
        let merge = limits.merge(&mut shape, second);
        assert!(merge.is_ok() || shape == before, "a request that was refused is as it was");
        merge.map(|merge| (merge, shape.sector, shape.sectors, shape.segments, shape.ranges))
    }

    fn check(table: &[(&str, QueueLimits, Bio, Bio, Want)]) {
        for (name, limits, first, second, want) in table {
            assert_eq!(merged(limits, first, second), *want, "{name}");
        }
    }

    use Merge::{Back, Discard, Front};
    use NoMerge::{Kind, Limits};

    #[test]
    fn neighbours_of_a_kind_merge() {
        let l = QueueLimits { discard_sectors_max: 64, write_zeroes_sectors_max: 64, ..QueueLimits::default() };
        let zones = QueueLimits { write_granularity_bytes: 4096, ..l };
        let read = |sector, at| bio(Op::Read, sector, 8, &[(at, 4096)]);
        let write = |sector, at| bio(Op::Write, sector, 8, &[(at, 4096)]);
        let flagged = |sector, flags| with(write(sector, sector << 13), flags);
        check(&[
            ("behind", l, read(8, 0), read(16, 65536), Ok((Back, 8, 16, 2, 1))),
            ("before", l, read(8, 0), read(0, 65536), Ok((Front, 0, 16, 2, 1))),
            ("a sector apart", l, read(8, 0), read(17, 65536), Err(Kind)),
            ("one over the other", l, read(8, 0), read(8, 65536), Err(Kind)),
            ("of another operation", l, read(8, 0), write(16, 65536), Err(Kind)),
            ("flush", l, read(8, 0), bio(Op::Flush, 16, 0, &[]), Err(Kind)),
            ("zeroes", l, bio(Op::WriteZeroes, 0, 8, &[]), bio(Op::WriteZeroes, 8, 8, &[]), Err(Kind)),
            ("durable", l, flagged(0, BioFlags::FUA), flagged(8, BioFlags::FUA), Err(Kind)),
            ("behind a flush", l, flagged(0, BioFlags::PREFLUSH), flagged(8, BioFlags::PREFLUSH), Err(Kind)),
            ("alone, as asked", l, flagged(0, BioFlags::NO_MERGE), flagged(8, BioFlags::NO_MERGE), Err(Kind)),
            ("reserved", l, flagged(0, BioFlags::RESERVED), flagged(8, BioFlags::RESERVED), Err(Kind)),
            ("only one is polled for", l, flagged(0, BioFlags::POLLED), flagged(8, BioFlags::empty()), Err(Kind)),
            ("only one does not wait", l, flagged(0, BioFlags::empty()), flagged(8, BioFlags::NOWAIT), Err(Kind)),
            ("neither waits", l, flagged(0, BioFlags::NOWAIT), flagged(8, BioFlags::NOWAIT), Ok((Back, 0, 16, 2, 1))),
            ("zones grow at their end", zones, write(8, 0), write(16, 65536), Ok((Back, 8, 16, 2, 1))),
            ("and nowhere else", zones, write(8, 0), write(0, 65536), Err(Kind)),
        ]);
    }

    #[test]
    fn a_merged_request_keeps_the_limits_of_length() {
        let l = QueueLimits { sectors_max: 16, atomic_sectors_max: 8, ..QueueLimits::default() };
        let chunk = QueueLimits { chunk_sectors: 16, ..l };
        let write = |sector, sectors: u32, at| bio(Op::Write, sector, sectors, &[(at, sectors * 512)]);
        let atomic = |sector, sectors: u32, at| with(write(sector, sectors, at), BioFlags::ATOMIC);
        check(&[
            ("as long as may be", l, write(0, 8, 0), write(8, 8, 65536), Ok((Back, 0, 16, 2, 1))),
            ("a sector too long", l, write(0, 8, 0), write(8, 9, 65536), Err(Limits)),
            ("within a chunk", chunk, write(4, 4, 0), write(8, 8, 65536), Ok((Back, 4, 12, 2, 1))),
            ("across chunks", chunk, write(8, 8, 0), write(16, 8, 65536), Err(Limits)),
            ("across chunks, before", chunk, write(16, 8, 0), write(8, 8, 65536), Err(Limits)),
            ("a bio that is split anyway", chunk, write(4, 4, 0), write(8, 12, 65536), Err(Limits)),
            ("atomic together", l, atomic(0, 4, 0), atomic(4, 4, 65536), Ok((Back, 0, 8, 2, 1))),
            ("and no longer", l, atomic(0, 4, 0), atomic(4, 5, 65536), Err(Limits)),
        ]);
    }

    #[test]
    fn segments_that_meet_in_memory_are_one() {
        let l = QueueLimits { segments_max: 2, segment_bytes_max: 8192, ..QueueLimits::default() };
        let line = QueueLimits { segment_boundary_mask: 8191, ..l };
        let read = |sector, segments: &[(u64, u32)]| {
            bio(Op::Read, sector, segments.iter().map(|&(_, len)| len).sum::<u32>() / 512, segments)
        };
        let elsewhere = |mut bio: Bio| {
            bio.segments[0].region = 1;
            bio
        };
        check(&[
            ("in a row", l, read(0, &[(0, 4096)]), read(8, &[(4096, 4096)]), Ok((Back, 0, 16, 1, 1))),
            ("in a row, before", l, read(8, &[(4096, 4096)]), read(0, &[(0, 4096)]), Ok((Front, 0, 16, 1, 1))),
            (
                "in another region",
                l,
                read(0, &[(0, 4096)]),
                elsewhere(read(8, &[(4096, 4096)])),
                Ok((Back, 0, 16, 2, 1)),
            ),
            ("too long for one", l, read(0, &[(0, 4096)]), read(8, &[(4096, 8192)]), Ok((Back, 0, 24, 2, 1))),
            ("a boundary between", line, read(0, &[(4096, 4096)]), read(8, &[(8192, 4096)]), Ok((Back, 0, 16, 2, 1))),
            ("within one", line, read(0, &[(8192, 4096)]), read(8, &[(12288, 4096)]), Ok((Back, 0, 16, 1, 1))),
            ("three in two", l, read(0, &[(0, 512), (4096, 512)]), read(2, &[(4608, 512)]), Ok((Back, 0, 3, 2, 1))),
            ("three", l, read(0, &[(0, 512), (4096, 512)]), read(2, &[(9216, 512)]), Err(Limits)),
            ("a long one is two", l, read(0, &[(0, 512)]), read(1, &[(8192, 12288)]), Err(Limits)),
        ]);
    }

    #[test]
    fn a_bio_in_a_registered_buffer_joins_others_of_that_buffer_only() {
        let l = QueueLimits::default();
        let read = |sector, at, regions: &[u32]| {
            let segments: Vec<_> = (0_u64..).zip(regions).map(|(n, _)| (at + n * 65536, 4096)).collect();
            let mut bio = bio(Op::Read, sector, 8 * regions.len() as u32, &segments);
            bio.segments.iter_mut().zip(regions).for_each(|(segment, region)| segment.region = *region);
            bio
        };
        let (one, other) = (1 << 31, 1 << 31 | 1);
        check(&[
            ("in a row", l, read(0, 0, &[one]), read(8, 4096, &[one]), Ok((Back, 0, 16, 1, 1))),
            ("apart", l, read(0, 0, &[one]), read(8, 16384, &[one]), Ok((Back, 0, 16, 2, 1))),
            ("two buffers", l, read(0, 0, &[one]), read(8, 4096, &[other]), Err(Kind)),
            ("behind a region", l, read(0, 0, &[0]), read(8, 4096, &[one]), Err(Kind)),
            ("before a region", l, read(8, 4096, &[0]), read(0, 0, &[one]), Err(Kind)),
            ("a region behind", l, read(0, 0, &[one]), read(8, 4096, &[0]), Err(Kind)),
            ("in the middle", l, read(0, 0, &[0]), read(8, 16384, &[0, one, 0]), Err(Kind)),
        ]);
    }

    #[test]
    fn no_gap_opens_where_bios_meet() {
        let prp = QueueLimits { virt_boundary_mask: 4095, segment_bytes_max: 8192, ..QueueLimits::default() };
        let read = |sector, at, sectors: u32| bio(Op::Read, sector, sectors, &[(at, sectors * 512)]);
        check(&[
            ("whole pages", prp, read(0, 0, 8), read(8, 65536, 8), Ok((Back, 0, 16, 2, 1))),
            ("the first ends early", prp, read(0, 0, 4), read(4, 65536, 8), Err(Limits)),
            ("the second begins late", prp, read(0, 0, 8), read(8, 512, 4), Err(Limits)),
            ("in a row", prp, read(0, 512, 3), read(3, 2048, 3), Ok((Back, 0, 6, 1, 1))),
            ("in a row, but too long", prp, read(0, 2048, 12), read(12, 8192, 8), Err(Limits)),
            ("began late", prp, read(0, 2048, 4), read(4, 65536, 8), Err(Limits)),
            ("begins late, before", prp, read(4, 65536, 8), read(0, 2048, 4), Ok((Front, 0, 12, 2, 1))),
            ("would shift what was joined", prp, read(12, 12288, 16), read(4, 8192, 8), Err(Limits)),
        ]);
    }

    #[test]
    fn what_was_joined_stays_joined() {
        let prp = QueueLimits { virt_boundary_mask: 4095, segment_bytes_max: 8192, ..QueueLimits::default() };
        let read = |sector, at, sectors: u32| bio(Op::Read, sector, sectors, &[(at, sectors * 512)]);
        let mut shape = Shape::of(&read(8, 12288, 4), 1);
        assert_eq!(prp.merge(&mut shape, &read(12, 14336, 12)), Ok(Back));
        assert_eq!((shape.segments, shape.first.len), (1, 8192));
        // Joined from the front, the first 6 KiB would be one segment and leave a gap at 14336.
        assert_eq!(prp.merge(&mut shape, &read(0, 8192, 8)), Err(Limits));
    }

    #[test]
    fn a_row_of_bios_becomes_one_segment_until_it_is_long_enough() {
        let limits = QueueLimits { segment_bytes_max: 8192, ..QueueLimits::default() };
        let read = |n: u64| bio(Op::Read, n * 4, 4, &[(n * 2048, 2048)]);
        let mut shape = Shape::of(&read(2), 1);
        let mut counts = Vec::new();
        for n in [3, 1, 4, 5, 6, 7, 8, 9] {
            limits.merge(&mut shape, &read(n)).unwrap();
            counts.push((shape.segments, shape.first.len, shape.last.len));
        }
        // 1 to 4 fill the first, 5 to 8 the second.
        let (k4, k6, k8) = (4096, 6144, 8192);
        let want = [
            (1, k4, k4),
            (1, k6, k6),
            (1, k8, k8),
            (2, k8, 2048),
            (2, k8, k4),
            (2, k8, k6),
            (2, k8, k8),
            (3, k8, 2048),
        ];
        assert_eq!(counts, want);
    }

    #[test]
    fn discards_gather_ranges_if_the_device_takes_several() {
        let one = QueueLimits { discard_sectors_max: 64, ..QueueLimits::default() };
        let two = QueueLimits { discard_segments_max: 2, ..one };
        let discard = |sector, sectors| bio(Op::Discard, sector, sectors, &[]);
        check(&[
            ("a neighbour", one, discard(0, 8), discard(8, 8), Ok((Back, 0, 16, 0, 1))),
            ("a neighbour before", one, discard(8, 8), discard(0, 8), Ok((Front, 0, 16, 0, 1))),
            ("far away", one, discard(0, 8), discard(800, 8), Err(Kind)),
            ("far away, as a range", two, discard(0, 8), discard(800, 8), Ok((Discard, 0, 16, 0, 2))),
            ("a neighbour is a range, too", two, discard(0, 8), discard(8, 8), Ok((Discard, 0, 16, 0, 2))),
            ("too long in all", two, discard(0, 8), discard(800, 57), Err(Limits)),
        ]);
        let mut shape = Shape::of(&discard(0, 8), 0);
        assert_eq!(two.merge(&mut shape, &discard(100, 8)), Ok(Discard));
        assert_eq!(two.merge(&mut shape, &discard(200, 8)), Err(Limits));
    }
}
