//! Arbitrary bios of a program: each comes back, and valid ones are executed.
//!
//! `ANY_CASES=N` in the environment sets the number of cases.

use blkyard::{Bio, BioFlags, Disk, DiskConfig, Op, QueueCounts, Segment, Status};
use proptest::prelude::*;

const DEPTH: usize = 8;
const BUFFER: u32 = 64 << 10;

/// Numbers near the edges of everything.
fn edge() -> impl Strategy<Value = u64> {
    let near = |edge: u64| (0..16_u64).prop_map(move |by| edge.wrapping_add(by).wrapping_sub(8));
    prop_oneof![
        0..64_u64,
        (0..64_u64).prop_map(|n| n * 8),
        (0..63_u32, 0..16_u64).prop_map(|(bit, by)| (1 << bit) + by - (by / 2).min(1)),
        near(0),
        near(2048),
        near(u64::MAX),
        near(u64::MAX >> 9),
        near(i64::MAX as u64),
        any::<u64>(),
    ]
}

/// A segment, usually a valid one.
fn segment() -> impl Strategy<Value = Segment> {
    let there = (0..DEPTH as u64, 1..=16_u32).prop_map(|(buffer, blocks)| Segment {
        region: 0,
        offset: buffer * u64::from(BUFFER),
        len: blocks * 512,
    });
    let any = (edge(), edge(), prop_oneof![Just(0_u32), Just(1), Just(u32::MAX)])
        .prop_map(|(offset, len, region)| Segment { region, offset, len: len as u32 });
    prop_oneof![3 => there, 1 => any]
}

fn bio() -> impl Strategy<Value = Box<Bio>> {
    let ops = prop::sample::select(vec![Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes]);
    let flags = prop_oneof![3 => Just(0_u8), 1 => any::<u8>()];
    let namespace = prop_oneof![9 => Just(0_u16), 1 => any::<u16>()];
    let segments = prop::collection::vec(segment(), 0..6);
    (ops, flags, edge(), edge(), namespace, segments, any::<bool>(), any::<u32>()).prop_map(
        |(op, flags, sector, sectors, namespace, segments, fits, stream)| {
            let mut bio = Bio::with_capacity(8);
            (bio.op, bio.flags, bio.namespace, bio.stream) = (op, BioFlags::from_bits_retain(flags), namespace, stream);
            (bio.sector, bio.sectors) = (sector, sectors as u32);
            if fits {
                bio.sectors = segments.iter().fold(0_u32, |all, segment| all.wrapping_add(segment.len / 512));
                bio.sector %= 2048;
            }
            bio.segments.extend(segments);
            bio
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: std::env::var("ANY_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(8),
        failure_persistence: None,
        max_shrink_iters: 500,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_bio_comes_back_whatever_it_asks_for(bios in prop::collection::vec(bio(), 1..40), readonly in any::<bool>()) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let image = file.path().display().to_string();
        let small = "ram:1M?max_sectors=8&virt_boundary=on";
        for device in [&image, "ram:1M", small, "null:1M", "chaos:1M?latency_us=5", "model:flash?size=1M"] {
            for scheduler in ["none", "deadline", "kyber", "timeslice", "fair"] {
                let mark = if device.contains('?') { '&' } else { '?' };
                let readonly = if readonly { "on" } else { "off" };
                let name = format!("{device}{mark}scheduler={scheduler}&readonly={readonly}");
                let config = DiskConfig {
                    threads: 1,
                    depth: DEPTH,
                    buffer_bytes: BUFFER as usize,
                    queues: QueueCounts { default: 1, read: 1, poll: 1 },
                };
                let mut disk = Disk::open(&name, config).unwrap();
                let went_well = disk.run(|queue| {
                    let mut ended = 0;
                    for bio in &bios {
                        let mut again = Bio::with_capacity(8);
                        (again.op, again.flags, again.namespace) = (bio.op, bio.flags, bio.namespace);
                        (again.sector, again.sectors, again.stream) = (bio.sector, bio.sectors, bio.stream);
                        again.segments.extend_from_slice(&bio.segments);
                        while queue.room() == 0 {
                            ended += queue.wait(|_| ());
                        }
                        queue.submit(again);
                    }
                    while queue.in_flight() > 0 {
                        ended += queue.wait(|_| ());
                    }
                    // After all that an honest one is done.
                    let mut bio = Bio::with_capacity(1);
                    (bio.op, bio.sectors) = (Op::Read, 8);
                    bio.segments.push(queue.buffer(0, 4096));
                    let mut status = Status::Again;
                    // A device that makes trouble may fail some.
                    for _ in 0..100 {
                        let mut back = None;
                        queue.submit(bio);
                        queue.wait(|bio| back = Some(bio));
                        bio = back.unwrap();
                        status = bio.status;
                        if status.is_ok() {
                            break;
                        }
                    }
                    (ended, status)
                });
                prop_assert_eq!(went_well, [(bios.len(), Status::Ok)], "{}", name);
            }
        }
    }
}
