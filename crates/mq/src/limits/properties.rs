//! Properties of splitting and merging for any limits and bios. The reference is slow and simple, and shares no code
//! with the tested functions: it checks memory in units of 128 bytes, one by one.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::Segment;

const CRUMB: u64 = 128;

/// Many random bios are invalid for the device, which is not tested here.
fn config() -> ProptestConfig {
    ProptestConfig { cases: 2048, max_global_rejects: 1 << 16, ..ProptestConfig::default() }
}

/// Limits that pass their own check.
fn any_limits() -> impl Strategy<Value = QueueLimits> {
    let lengths = (1_u32..40, 1_u16..6, 1_u32..5, 0_u32..6, 0_u32..3);
    let masks = (
        prop::sample::select(&[0_u32, 511, 4095][..]),
        prop::sample::select(&[4095_u32, 8191, u32::MAX][..]),
        prop::sample::select(&[0_u32, 127, 511][..]),
    );
    let blocks = (
        prop::sample::select(&[512_u32, 1024, 4096][..]),
        prop::sample::select(&[1_u32, 4, 8][..]),
        prop::sample::select(&[0_u32, 1, 2][..]),
    );
    let discards = (0_u32..6, 1_u32..4, 0_u32..3, 1_u16..5);
    (lengths, masks, blocks, discards)
        .prop_map(|(lengths, masks, blocks, discards)| {
            let (lbs, granularity_bytes) = (blocks.0, blocks.0 * discards.1);
            let unit = (lbs * blocks.2.max(1)) >> 9;
            let segment = lbs.max(masks.0 + 1).max(masks.2 + 1);
            QueueLimits {
                logical_block_bytes: lbs,
                physical_block_bytes: lbs * blocks.1,
                sectors_max: lengths.0 + unit,
                segments_max: lengths.1,
                segment_bytes_max: segment * lengths.2,
                segment_boundary_mask: masks.1,
                chunk_sectors: unit * 5 * lengths.3,
                virt_boundary_mask: masks.0,
                dma_alignment_mask: masks.2,
                write_granularity_bytes: lbs * blocks.2,
                atomic_sectors_max: lengths.4 * (lbs >> 9),
                discard_sectors_max: (granularity_bytes >> 9) * discards.0 + u32::from(discards.0 > 0),
                discard_granularity_bytes: granularity_bytes,
                discard_alignment_bytes: discards.2.min(discards.1 - 1) * lbs,
                discard_segments_max: discards.3,
                write_zeroes_sectors_max: (lbs >> 9) * discards.0 + u32::from(discards.0 > 0),
            }
        })
        .prop_filter("limits that contradict each other", |limits| {
            limits.sectors_max >= limits.atomic_sectors_max && limits.check().is_ok()
        })
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![2 => Just(Op::Read), 3 => Just(Op::Write), 1 => Just(Op::Discard), 1 => Just(Op::WriteZeroes)]
}

fn any_segments() -> impl Strategy<Value = Vec<(u32, u64, u32)>> {
    proptest::collection::vec((0_u32..2, 0_u64..300, prop_oneof![1_u32..90, Just(32)]), 1..8)
}

/// A bio that a device with these limits admits, made of raw numbers.
fn bio_of(limits: &QueueLimits, op: Op, block: u64, blocks: u32, raw: &[(u32, u64, u32)]) -> Bio {
    let align = u64::from(limits.dma_alignment_mask + 1).max(CRUMB);
    let lbs = u64::from(limits.logical_block_bytes);
    let (mut segments, mut bytes) = (Vec::new(), u64::from(blocks) * lbs);
    if op.has_data() {
        segments.extend(raw.iter().map(|&(region, offset, len)| Segment {
            region,
            offset: (offset * CRUMB).next_multiple_of(align),
            len: (u64::from(len) * CRUMB).next_multiple_of(align) as u32,
        }));
        let sum: u64 = segments.iter().map(|segment| u64::from(segment.len)).sum();
        bytes = sum.next_multiple_of(lbs);
        segments.last_mut().unwrap().len += (bytes - sum) as u32;
    }
    Bio { op, sector: block * (lbs >> 9), sectors: (bytes >> 9) as u32, segments, ..Bio::default() }
}

/// The pieces that `bytes` of `segments` are moved in, `skip` bytes on.
fn pieces(limits: &QueueLimits, segments: &[Segment], skip: u64, bytes: u64) -> Vec<Segment> {
    let crumbs = segments.iter().enumerate().flat_map(|(number, segment)| {
        let count = u64::from(segment.len) / CRUMB;
        (0..count).map(move |crumb| (number, segment.region, segment.offset + crumb * CRUMB))
    });
    let mut out: Vec<Segment> = Vec::new();
    let mut in_segment = None;
    for (number, region, at) in crumbs.skip((skip / CRUMB) as usize).take((bytes / CRUMB) as usize) {
        let on_boundary = at % (u64::from(limits.segment_boundary_mask) + 1) == 0;
        match out.last_mut() {
            Some(piece) if in_segment == Some(number) && piece.len < limits.segment_bytes_max && !on_boundary => {
                piece.len += CRUMB as u32;
            }
            _ => out.push(Segment { region, offset: at, len: CRUMB as u32 }),
        }
        in_segment = Some(number);
    }
    out
}

/// Violation by a request of this shape, or `None` if a device can take it.
fn wrong(limits: &QueueLimits, kind: (Op, BioFlags), sector: u64, sectors: u32, pieces: &[Segment]) -> Option<String> {
    let (op, flags) = kind;
    let longest = match op {
        Op::Flush => 0,
        // Space is given back in whole units.
        Op::Discard => {
            let granularity = limits.discard_granularity_bytes >> 9;
            limits.discard_sectors_max - limits.discard_sectors_max % granularity
        }
        Op::WriteZeroes => limits.write_zeroes_sectors_max,
        Op::Read | Op::Write if flags.contains(BioFlags::ATOMIC) => limits.atomic_sectors_max,
        Op::Read | Op::Write => limits.sectors_max,
    };
    if sectors == 0 || sectors > longest {
        return Some(format!("{sectors} sectors, where {longest} fit"));
    }
    let block = u64::from(limits.logical_block_bytes) >> 9;
    if !sector.is_multiple_of(block) || !u64::from(sectors).is_multiple_of(block) {
        return Some(format!("{sector}+{sectors} is not made of blocks"));
    }
    let chunk = u64::from(limits.chunk_sectors);
    if chunk > 0 && op != Op::Discard && sector / chunk != (sector + u64::from(sectors) - 1) / chunk {
        return Some(format!("{sector}+{sectors} lies in two chunks"));
    }
    if pieces.len() > usize::from(limits.segments_max) {
        return Some(format!("{} pieces", pieces.len()));
    }
    let bytes: u64 = pieces.iter().map(|piece| u64::from(piece.len)).sum();
    if op.has_data() && bytes != u64::from(sectors) * 512 {
        return Some(format!("{bytes} bytes for {sectors} sectors"));
    }
    let dma = u64::from(limits.dma_alignment_mask) + 1;
    for piece in pieces {
        let line = |at: u64| at / (u64::from(limits.segment_boundary_mask) + 1);
        if piece.len > limits.segment_bytes_max
            || line(piece.offset) != line(piece.offset + u64::from(piece.len) - 1)
            || piece.offset % dma != 0
            || u64::from(piece.len) % dma != 0
        {
            return Some(format!("a piece {piece:?}"));
        }
    }
    let virt = u64::from(limits.virt_boundary_mask) + 1;
    let gap = pieces.windows(2).find(|two| (two[0].offset + u64::from(two[0].len)) % virt + two[1].offset % virt != 0);
    gap.map(|gap| format!("a gap between {gap:?}"))
}

/// The share of a bio that is `sectors` long and has `skip` before it, judged.
fn wrong_share(limits: &QueueLimits, bio: &Bio, skip: u32, sectors: u32) -> Option<String> {
    let pieces = pieces(limits, &bio.segments, u64::from(skip) * 512, u64::from(sectors) * 512);
    wrong(limits, (bio.op, bio.flags), bio.sector + u64::from(skip), sectors, &pieces)
}

/// Unit of the parts of a split bio, sectors.
fn unit(limits: &QueueLimits, op: Op) -> u32 {
    (if op == Op::Write {
        limits.write_granularity_bytes.max(limits.logical_block_bytes)
    } else {
        limits.logical_block_bytes
    }) >> 9
}

proptest! {
    #![proptest_config(config())]

    /// Parts cover exactly the bio, in order, never exceed a limit, and are no shorter than necessary; a bio without
    /// parts was invalid.
    #[test]
    fn splits_cover_the_bio_and_keep_the_limits(
        limits in any_limits(), op in any_op(), block in 0_u64..60, blocks in 1_u32..60, raw in any_segments(),
    ) {
        let bio = bio_of(&limits, op, block, blocks, &raw);
        prop_assume!(limits.admit(&bio, 1 << 20).is_ok());
        let unit = unit(&limits, op);
        let physical = u64::from(limits.physical_block_bytes >> 9);
        let (mut at, mut moved) = (Cursor::default(), Vec::new());
        while at.sectors < bio.sectors {
            let left = bio.sectors - at.sectors;
            let split = match limits.split(&bio, at) {
                Ok(split) => split,
                Err(status) => {
                    prop_assert_eq!(status, Status::Invalid);
                    prop_assert!(wrong_share(&limits, &bio, at.sectors, unit.min(left)).is_some(), "{at:?} was not stuck");
                    return Ok(());
                }
            };
            prop_assert_eq!(wrong_share(&limits, &bio, at.sectors, split.sectors), None, "{:?}", split);
            let own = pieces(&limits, &bio.segments, u64::from(at.sectors) * 512, u64::from(split.sectors) * 512);
            prop_assert_eq!(own.len(), usize::from(split.segments));
            prop_assert_eq!(split.end.sectors, at.sectors + split.sectors);
            let end = bio.sector + u64::from(split.end.sectors);
            if split.sectors < left {
                prop_assert!(wrong_share(&limits, &bio, at.sectors, left).is_some(), "split, but fits");
                if op == Op::Discard {
                    let granularity = u64::from(limits.discard_granularity_bytes >> 9);
                    prop_assert_eq!(end % granularity, u64::from(limits.discard_alignment_bytes >> 9));
                } else {
                    prop_assert_eq!(split.sectors % unit, 0);
                    // A write granularity that is no part of the physical block may cost some of it.
                    let step = if end.is_multiple_of(physical) { unit.max(physical as u32) } else { unit };
                    let more = (split.sectors + step).min(left);
                    prop_assert!(wrong_share(&limits, &bio, at.sectors, more).is_some() || limits.write_granularity_bytes > limits.logical_block_bytes, "{split:?} is short");
                }
            }
            moved.extend(own);
            at = split.end;
        }
        // The cursors, the positions in memory at which parts begin, follow from the lengths.
        let crumbs = |segments: &[Segment]| -> Vec<(u32, u64)> {
            segments.iter().flat_map(|s| (0..u64::from(s.len) / CRUMB).map(|n| (s.region, s.offset + n * CRUMB))).collect()
        };
        prop_assert_eq!(crumbs(&moved), crumbs(&bio.segments));
    }

    /// A cursor says the same in sectors and in segments.
    #[test]
    fn cursors_point_where_the_sectors_say(
        limits in any_limits(), block in 0_u64..60, raw in any_segments(),
    ) {
        let bio = bio_of(&limits, Op::Read, block, 1, &raw);
        let mut at = Cursor::default();
        while let Ok(split) = limits.split(&bio, at) {
            at = split.end;
            let before: u64 = bio.segments[..usize::from(at.segment)].iter().map(|segment| u64::from(segment.len)).sum();
            prop_assert_eq!(before + u64::from(at.offset), u64::from(at.sectors) * 512);
            if at.sectors == bio.sectors {
                break;
            }
        }
    }

    /// Atomic and `NOWAIT` bios are one request, or none.
    #[test]
    fn whole_or_nothing(
        limits in any_limits(), op in any_op(), block in 0_u64..60, blocks in 1_u32..20, raw in any_segments(), flags: u8,
    ) {
        let flags = BioFlags::from_bits_truncate(flags) | BioFlags::NOWAIT;
        let bio = Bio { flags, ..bio_of(&limits, op, block, blocks, &raw) };
        prop_assume!(limits.admit(&bio, 1 << 20).is_ok());
        let fits = wrong_share(&limits, &bio, 0, bio.sectors).is_none();
        let block_fits = wrong_share(&limits, &bio, 0, unit(&limits, op).min(bio.sectors)).is_none();
        let want = match () {
            () if fits => Ok(bio.sectors),
            () if flags.contains(BioFlags::ATOMIC) || !block_fits => Err(Status::Invalid),
            () => Err(Status::Again),
        };
        prop_assert_eq!(limits.split(&bio, Cursor::default()).map(|split| split.sectors), want);
    }
}

/// The segments of bios in a row: as long as the last of one and the first of the next lie in a row, too, and would be
/// one piece, they are one.
fn joined(limits: &QueueLimits, bios: &VecDeque<Bio>) -> Vec<Segment> {
    let mut out: Vec<Segment> = Vec::new();
    for bio in bios {
        for (number, segment) in bio.segments.iter().enumerate() {
            if number == 0
                && let Some(last) = out.last_mut()
                && (last.region, last.offset + u64::from(last.len)) == (segment.region, segment.offset)
            {
                let both = Segment { len: last.len + segment.len, ..*last };
                if pieces(limits, &[both], 0, u64::from(both.len)).len() == 1 {
                    *last = both;
                    continue;
                }
            }
            out.push(*segment);
        }
    }
    out
}

/// Where a bio is placed: relative to the request in sectors, and relative to its data in memory.
#[derive(Clone, Copy, Debug)]
struct Placement {
    front: bool,
    /// 0: elsewhere on the device.
    near: u8,
    /// 0: elsewhere in memory.
    in_row: u8,
}

fn any_place() -> impl Strategy<Value = Placement> {
    (any::<bool>(), 0_u8..8, 0_u8..3).prop_map(|(front, near, in_row)| Placement { front, near, in_row })
}

proptest! {
    #![proptest_config(config())]

    /// A permitted merge never exceeds a limit, and equals a split of one bio of the same shape; a refused one would
    /// have exceeded a limit, or is one of the few exceptions.
    #[test]
    fn merged_requests_keep_the_limits(
        limits in any_limits(), op in any_op(), atomic in prop::bool::weighted(0.1), block in 30_u64..60,
        steps in proptest::collection::vec((any_place(), 1_u32..6, proptest::collection::vec((0_u32..2, 200_u64..300, prop_oneof![1_u32..33, Just(4), Just(32)]), 1..3)), 2..9),
    ) {
        let flags = if atomic { BioFlags::ATOMIC } else { BioFlags::empty() };
        let kind = (op, flags);
        let block_sectors = u64::from(limits.logical_block_bytes >> 9);
        let mut chain: VecDeque<Bio> = VecDeque::new();
        let mut shape = Shape::default();
        for (place, blocks, raw) in &steps {
            let mut bio = Bio { flags, ..bio_of(&limits, op, block, *blocks, raw) };
            if let (Some(first), Some(last)) = (chain.front(), chain.back()) {
                bio.sector = match (place.near, place.front) {
                    (0, _) => block + 1000 * block_sectors,
                    (_, false) => shape.sector + u64::from(shape.sectors),
                    (_, true) => shape.sector.saturating_sub(u64::from(bio.sectors)),
                };
                if place.in_row > 0 && op.has_data() {
                    let (head, tail) = (first.segments[0], last.segments[last.segments.len() - 1]);
                    if place.front {
                        let edge = bio.segments.last_mut().unwrap();
                        edge.region = head.region;
                        edge.offset = head.offset.saturating_sub(u64::from(edge.len));
                    } else {
                        let edge = bio.segments.first_mut().unwrap();
                        *edge = Segment { region: tail.region, offset: tail.offset + u64::from(tail.len), ..*edge };
                    }
                }
            }
            prop_assume!(limits.admit(&bio, 1 << 20).is_ok());
            if chain.is_empty() {
                let split = limits.split(&bio, Cursor::default());
                prop_assume!(split.is_ok_and(|split| split.sectors == bio.sectors));
                shape = Shape::of(&bio, split.unwrap().segments);
                chain.push_back(bio);
                continue;
            }
            let before = shape;
            let merge = limits.merge(&mut shape, &bio);
            let back = before.sector + u64::from(before.sectors) == bio.sector;
            let front = bio.sector + u64::from(bio.sectors) == before.sector;
            let as_range = op == Op::Discard && limits.discard_segments_max > 1;
            let zone = op == Op::Write && limits.write_granularity_bytes > 0;
            let (copy, sectors) = (Bio { segments: bio.segments.clone(), ..bio }, before.sectors + bio.sectors);
            let bio_end = bio.segments.last().map(|last| (last.region, last.offset + u64::from(last.len)));
            if front && !back { chain.push_front(copy) } else { chain.push_back(copy) }
            let sector = if front && !as_range { bio.sector } else { before.sector };
            let segments = joined(&limits, &chain);
            let bytes = u64::from(sectors) * 512;
            let row = pieces(&limits, &segments, 0, bytes);
            let fault = wrong(&limits, kind, sector, sectors, &row);
            match merge {
                Ok(merge) => {
                    prop_assert_eq!(merge, if as_range { Merge::Discard } else if back { Merge::Back } else { Merge::Front });
                    prop_assert_eq!(fault, None);
                    prop_assert_eq!((shape.op, shape.flags, shape.sector, shape.sectors), (op, flags, sector, sectors));
                    prop_assert_eq!(usize::from(shape.segments), row.len());
                    prop_assert_eq!(shape.ranges, if as_range { chain.len() as u16 } else { 1 });
                    prop_assert!(shape.ranges <= limits.discard_segments_max);
                    prop_assert!(as_range || back || front);
                    if op.has_data() {
                        prop_assert_eq!((Some(&shape.first), Some(&shape.last)), (segments.first(), segments.last()));
                    }
                    let alike = Bio { op, flags, sector, sectors, segments, ..Bio::default() };
                    let split = limits.split(&alike, Cursor::default()).map(|split| (split.sectors, split.segments));
                    prop_assert_eq!(split, Ok((sectors, shape.segments)));
                }
                Err(NoMerge::Kind) => {
                    let mergeable = op != Op::WriteZeroes && (as_range || back || (front && !zone));
                    prop_assert!(!mergeable, "neighbours of a kind");
                    return Ok(());
                }
                Err(NoMerge::Limits) => {
                    prop_assert_eq!(shape, before);
                    let torn = back && before.first.offset & u64::from(limits.virt_boundary_mask) != 0;
                    // Segments that were joined earlier might join this bio instead: ignored.
                    let shifts = front && op.has_data() && bio_end == Some((before.first.region, before.first.offset));
                    let ranges = as_range && before.ranges == limits.discard_segments_max;
                    prop_assert!(fault.is_some() || torn || shifts || ranges, "{before:?} and {bio:?} would fit");
                    return Ok(());
                }
            }
        }
    }
}
