//! Bios and limits for tests of the limits, and which of them are valid.

use super::*;
use crate::Segment;

/// A bio with segments of the first region.
pub(super) fn bio(op: Op, sector: u64, sectors: u32, segments: &[(u64, u32)]) -> Bio {
    let segments = segments.iter().map(|&(offset, len)| Segment { region: 0, offset, len }).collect();
    Bio { op, sector, sectors, segments, ..Bio::default() }
}

pub(super) fn with(bio: Bio, flags: BioFlags) -> Bio {
    Bio { flags, ..bio }
}

pub(super) fn blocks_of_4k() -> QueueLimits {
    QueueLimits {
        logical_block_bytes: 4096,
        physical_block_bytes: 4096,
        discard_granularity_bytes: 4096,
        ..QueueLimits::default()
    }
}

/// Lengths, in sectors, of the requests a bio is split into, and their segments.
pub(super) fn splits(limits: &QueueLimits, bio: &Bio) -> Result<Vec<(u32, u16)>, Status> {
    limits.check().unwrap();
    let mut out = Vec::new();
    let mut at = Cursor::default();
    while at.sectors < bio.sectors {
        let split = limits.split(bio, at)?;
        out.push((split.sectors, split.segments));
        at = split.end;
    }
    Ok(out)
}

#[test]
fn bios_that_make_no_sense_are_not_admitted() {
    let limits = QueueLimits { dma_alignment_mask: 3, discard_sectors_max: 8, atomic_sectors_max: 8, ..blocks_of_4k() };
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
        ("an empty segment", bio(Op::Read, 0, 8, &[(0, 4096), (8192, 0)]), false),
        ("atomic", with(bio(Op::Write, 0, 8, &[(0, 4096)]), BioFlags::ATOMIC), true),
        ("an atomic read", with(bio(Op::Read, 0, 8, &[(0, 4096)]), BioFlags::ATOMIC), false),
        ("flush", bio(Op::Flush, 0, 0, &[]), true),
        ("discard", bio(Op::Discard, 0, 1000, &[]), true),
        ("zeroes on a device that cannot", bio(Op::WriteZeroes, 0, 8, &[]), false),
        ("discard beyond the end", bio(Op::Discard, 0, 1008, &[]), false),
    ];
    for (name, bio, fits) in table {
        assert_eq!(limits.admit(bio, 1000).is_ok(), *fits, "{name}");
    }
}

#[test]
fn limits_that_contradict_each_other_are_named() {
    let l = QueueLimits::default();
    let table: &[(&str, QueueLimits)] = &[
        ("the logical block", QueueLimits { logical_block_bytes: 0, ..l }),
        ("the physical block", QueueLimits { physical_block_bytes: 256, ..l }),
        ("a request holds at least one logical block", QueueLimits { sectors_max: 7, ..blocks_of_4k() }),
        ("one segment", QueueLimits { segments_max: 0, ..l }),
        ("a segment holds", QueueLimits { segment_bytes_max: 256, ..l }),
        ("the boundary mask", QueueLimits { virt_boundary_mask: 4096, ..l }),
        ("the longest segment ends", QueueLimits { virt_boundary_mask: u32::MAX, ..l }),
        ("the boundary of segments", QueueLimits { segment_boundary_mask: 255, ..l }),
        ("the boundary of segments", QueueLimits { segment_boundary_mask: 2047, virt_boundary_mask: 4095, ..l }),
        ("memory is aligned", QueueLimits { dma_alignment_mask: 1023, ..l }),
        ("a chunk", QueueLimits { chunk_sectors: 12, ..blocks_of_4k() }),
        ("the write granularity", QueueLimits { write_granularity_bytes: 1000, ..l }),
        ("the write granularity", QueueLimits { write_granularity_bytes: 4096, chunk_sectors: 12, ..l }),
        ("an atomic write", QueueLimits { atomic_sectors_max: 4096, ..l }),
        ("the discard granularity", QueueLimits { discard_granularity_bytes: 0, ..l }),
        ("the discard alignment", QueueLimits { discard_alignment_bytes: 512, ..l }),
        ("a discard is as long", QueueLimits { discard_sectors_max: 1, discard_granularity_bytes: 1024, ..l }),
        ("a discard holds", QueueLimits { discard_segments_max: 0, ..l }),
        ("a write of zeroes", QueueLimits { write_zeroes_sectors_max: 1, ..blocks_of_4k() }),
    ];
    assert_eq!((l.check(), blocks_of_4k().check()), (Ok(()), Ok(())));
    for (words, limits) in table {
        let error = limits.check().unwrap_err().to_string();
        assert!(error.contains(words), "{error}, not {words}");
    }
}
