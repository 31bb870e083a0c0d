//! Merging in the queue: which bios share a request, and that each ends once, with its data where it belongs.

use std::sync::Arc;

use blkyard_mq::{
    Bio, BioFlags, BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, Merging, NullConfig, Op, QueueLimits, RamDevice,
    Region, RegionTable, Segment, Status,
};

use crate::core::hand::{Bench, bio, disk, disk_of, of, read, with};

/// Bios put behind, before, and joined as ranges.
fn counts(bench: &Bench) -> [u64; 3] {
    bench.queue.stats().snapshot().merged
}

#[test]
fn neighbours_in_a_plug_become_one_request_and_all_end_once_with_its_status() {
    let mut bench = Bench::deep(8);
    bench.submit_all([read(80), read(88), read(72), read(96)]);
    bench.turn();
    assert_eq!(bench.device().extents(), [(72, 32)]);
    assert_eq!(bench.device().held[0].segments, [Segment { region: 0, offset: 72 << 9, len: 32 << 9 }]);
    assert_eq!(counts(&bench), [2, 1, 0]);
    bench.end(72, Status::Medium);
    let ended = bench.take_ended();
    assert_eq!(ended, [72, 80, 88, 96].map(|sector| (sector, Status::Medium)));
    assert!(bench.queue.is_idle());
}

#[test]
fn what_was_offered_to_the_driver_is_no_plug_any_more() {
    let mut bench = Bench::deep(8);
    bench.submit(read(0));
    bench.issue();
    bench.submit(read(8));
    bench.issue();
    assert_eq!(bench.device().extents(), [(0, 8), (8, 8)]);
    bench.end_all();
}

#[test]
fn a_bio_is_tried_with_the_one_before_only_while_nothing_is_left_over() {
    let mut bench = Bench::deep(8);
    bench.submit_all([read(0), read(100), read(8)]);
    bench.turn();
    assert_eq!(bench.device().sectors(), [0, 100, 8]);
    bench.end_all();
}

/// A queue whose device is full, with these requests left over.
fn left_over(config: HwQueueConfig, sectors: &[u64]) -> Bench {
    let mut bench = Bench::new(disk(), config);
    bench.device().room = 0;
    bench.submit_all(sectors.iter().map(|sector| read(*sector)));
    bench.turn();
    assert!(bench.snapshot().dispatch_busy > 0);
    bench
}

#[test]
fn with_requests_left_over_a_bio_is_tried_with_the_last_eight() {
    let sectors: Vec<u64> = (0..9).map(|n| n * 100).collect();
    let mut bench = left_over(HwQueueConfig::default(), &sectors);
    // The eighth from the end, and the one before it.
    bench.submit_all([read(108), read(8)]);
    assert_eq!((counts(&bench), bench.snapshot().dispatch), ([1, 0, 0], 10));
    bench.device().room = usize::MAX;
    bench.turn_at(10_000_000);
    assert_eq!(bench.device().extents()[..2], [(0, 8), (100, 16)]);
    bench.end_all();
}

#[test]
fn merging_can_be_for_the_last_only_or_off() {
    for (merging, merges) in [(Merging::Recent, 2), (Merging::Last, 1), (Merging::Off, 0)] {
        let mut bench = left_over(HwQueueConfig { merging, ..HwQueueConfig::default() }, &[0, 100]);
        bench.submit_all([read(8), read(200), read(208)]);
        assert_eq!(counts(&bench)[0], merges, "{merging:?}");
        bench.device().room = usize::MAX;
        bench.end_all();
    }
}

#[test]
fn without_a_free_tag_a_bio_still_joins_a_request_that_waits() {
    let mut bench = left_over(HwQueueConfig { depth: 2, ..HwQueueConfig::default() }, &[0, 100]);
    bench.submit_all([read(108), read(8), read(200)]);
    let snapshot = bench.snapshot();
    assert_eq!((counts(&bench), snapshot.tags_in_use, snapshot.namespaces[0].waiting), ([2, 0, 0], 2, 1));
    // A bio that waits for a tag is not overtaken; it joins in its turn.
    bench.submit(read(16));
    assert_eq!(bench.snapshot().namespaces[0].waiting, 2);
    bench.device().room = usize::MAX;
    bench.end_all();
    assert_eq!(bench.take_ok().len(), 6);
}

#[test]
fn bios_of_two_namespaces_do_not_meet() {
    let mut bench = Bench::of(vec![disk(), disk()], HwQueueConfig::default());
    bench.submit_all([of(0, read(0)), of(1, read(8)), of(0, read(8)), of(1, read(16))]);
    bench.turn();
    let held: Vec<_> = bench.device().held.iter().map(|held| (held.namespace, held.sector, held.sectors)).collect();
    // A request of another namespace may be between two of one: the plug is searched for its own last.
    assert_eq!(held, [(0, 0, 16), (1, 8, 16)]);
    bench.end_all();
}

#[test]
fn what_stands_for_itself_is_not_merged() {
    let cached = || DeviceInfo { volatile_cache: true, ..disk() };
    let write = |sector| bio(Op::Write, sector, 8);
    let flagged = |flags| [with(write(0), flags), with(write(8), flags)];
    let cases: [(&str, DeviceInfo, Vec<Box<Bio>>); 5] = [
        ("told so", disk(), flagged(BioFlags::NO_MERGE).into()),
        ("a sequence and its neighbour", cached(), vec![with(write(0), BioFlags::FUA), write(8)]),
        ("sequences", cached(), flagged(BioFlags::FUA).into()),
        ("reads and writes", disk(), vec![write(0), read(8)]),
        ("zeroes", disk(), vec![bio(Op::WriteZeroes, 0, 8), bio(Op::WriteZeroes, 8, 8)]),
    ];
    for (name, info, bios) in cases {
        let mut bench = Bench::new(info, HwQueueConfig::default());
        let count = bios.len();
        bench.submit_all(bios);
        bench.turn();
        assert_eq!((bench.device().held.len(), counts(&bench)), (count, [0, 0, 0]), "{name}");
        bench.end_all();
    }
}

#[test]
fn a_part_of_a_bio_is_not_merged() {
    let limits = QueueLimits { sectors_max: 16, ..QueueLimits::default() };
    let mut bench = Bench::new(disk_of(limits), HwQueueConfig::default());
    bench.submit_all([bio(Op::Read, 0, 20), read(20)]);
    bench.turn();
    assert_eq!(bench.device().extents(), [(0, 16), (16, 4), (20, 8)]);
    bench.end_all();
    assert_eq!(bench.take_ok(), [0, 20]);
}

#[test]
fn the_first_of_a_kind_that_is_full_ends_the_search_and_is_not_tried_again() {
    let limits = QueueLimits { sectors_max: 16, ..QueueLimits::default() };
    let mut bench = Bench::new(disk_of(limits), HwQueueConfig::default());
    bench.submit_all([read(0), read(8), read(16), read(24)]);
    bench.turn();
    assert_eq!(bench.device().extents(), [(0, 16), (16, 16)]);
    bench.end_all();
    bench.device().room = 0;
    // The one in the middle is of a kind with the bio, and too long with it: the one before, which would do, is not
    // asked.
    bench.submit_all([read(100), bio(Op::Read, 108, 12)]);
    bench.turn();
    assert_eq!(bench.snapshot().dispatch, 2, "twenty sectors are too many");
    bench.submit(read(120));
    assert_eq!((counts(&bench)[0], bench.snapshot().dispatch), (2, 3));
    // Four sectors would fit, but the request was found full before.
    bench.submit(bio(Op::Read, 120, 4));
    assert_eq!(bench.snapshot().dispatch, 4);
    bench.device().room = usize::MAX;
    bench.end_all();
}

#[test]
fn discards_gather_as_ranges_where_the_device_takes_several() {
    let limits = QueueLimits { discard_sectors_max: 1000, discard_segments_max: 3, ..QueueLimits::default() };
    let mut bench = Bench::new(disk_of(limits), HwQueueConfig::default());
    let discard = |sector| bio(Op::Discard, sector, 8);
    bench.submit_all([discard(800), discard(0), discard(400), discard(600)]);
    bench.turn();
    assert_eq!(bench.device().held[0].ranges, [(800, 8), (0, 8), (400, 8)]);
    assert_eq!(bench.device().held[1].ranges, [(600, 8)]);
    assert_eq!((counts(&bench), bench.device().held[0].sectors), ([0, 0, 2], 24));
    bench.device().end(|_| true, Status::NotSupported);
    bench.end_all();
    let ended = bench.take_ended();
    assert_eq!(ended.iter().filter(|(_, status)| *status == Status::NotSupported).count(), 3);
    assert_eq!(ended.len(), 4);
}

#[test]
fn a_device_that_takes_one_range_is_given_one() {
    let mut bench = Bench::new(disk(), HwQueueConfig::default());
    let discard = |sector| bio(Op::Discard, sector, 8);
    bench.submit_all([discard(80), discard(88), discard(72), discard(800)]);
    bench.turn();
    let ranges: Vec<_> = bench.device().held.iter().map(|held| held.ranges.clone()).collect();
    assert_eq!(ranges, [vec![(72, 24)], vec![(800, 8)]]);
    bench.end_all();
}

#[test]
fn links_come_back_however_often_bios_are_merged() {
    let config = HwQueueConfig { depth: 2, bios_max: 8, ..HwQueueConfig::default() };
    let mut bench = Bench::new(disk(), config);
    for round in 0..1000 {
        // All eight in one request, from both ends: seven links.
        let sectors = [40, 48, 32, 24, 56, 16, 64, 8];
        bench.submit_all(sectors.map(read));
        bench.turn();
        assert_eq!(bench.device().extents(), [(8, 64)], "round {round}");
        bench.end(8, Status::Ok);
        assert_eq!(bench.take_ok(), [8, 16, 24, 32, 40, 48, 56, 64]);
    }
}

#[test]
fn a_request_that_comes_back_may_grow_before_it_goes_again() {
    let mut bench = left_over(HwQueueConfig::default(), &[0]);
    bench.device().room = 1;
    bench.turn_at(10_000_000);
    bench.device().requeue(|_| true);
    bench.device().room = 0;
    bench.turn();
    bench.submit(read(8));
    bench.device().room = 1;
    bench.turn_at(20_000_000);
    assert_eq!(bench.device().extents(), [(0, 16)]);
    bench.end_all();
    assert_eq!(bench.take_ok(), [0, 8]);
}

#[test]
fn merged_bios_find_their_own_data() {
    let info = DeviceInfo { capacity_sectors: 1024, ..disk() };
    let device = RamDevice::new(info.clone(), NullConfig::default()).unwrap();
    let region = Region::anonymous(1 << 20).unwrap();
    let disk_bytes: Vec<u8> = (0..1024 * 512).map(|at| (at / 512 % 251) as u8).collect();
    region.span(0, disk_bytes.len()).unwrap().copy_from_slice(&disk_bytes);
    let mut queue = HwQueue::new(device.queue(8), Arc::new(info), HwQueueConfig::default());
    queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
    let mut turn = |bios: Vec<Box<Bio>>| {
        bios.into_iter().for_each(|bio| queue.submit(bio));
        queue.issue(&mut (), 1);
        let mut ended = Vec::new();
        queue.reap(&mut (), 2, &mut |bio| ended.push((bio.cookie, bio.status)));
        assert!(queue.is_idle());
        ended
    };
    // Written in pieces that meet on the disk, not all in memory, and in no order: a piece of memory comes from where
    // it belongs.
    let pieces = [(100, 8), (108, 3), (92, 8), (111, 5), (90, 2)];
    let ended = turn(pieces.iter().map(|&(sector, sectors)| bio(Op::Write, sector, sectors)).collect());
    assert_eq!(ended, [90, 92, 100, 108, 111].map(|sector| (sector, Status::Ok)));
    // Read back into buffers in reverse order.
    let reads = [(90_u64, 6_u32), (96, 10), (106, 1), (107, 9)];
    let place = |sector: u64| (1 << 20) - ((sector - 80) << 13);
    let ended = turn(
        reads
            .iter()
            .map(|&(sector, sectors)| {
                let mut bio = bio(Op::Read, sector, sectors);
                bio.segments[0].offset = place(sector);
                bio
            })
            .collect(),
    );
    assert_eq!(ended.len(), 4);
    for (sector, sectors) in reads {
        let mut back = vec![0; sectors as usize * 512];
        region.span(place(sector), back.len()).unwrap().copy_to_slice(&mut back);
        assert!(back == disk_bytes[sector as usize * 512..][..back.len()], "sector {sector}");
    }
    assert_eq!(queue.stats().snapshot().merged, [5, 2, 0]);
}

#[test]
fn a_row_of_bios_becomes_requests_of_full_length_in_order() {
    let limits = QueueLimits { sectors_max: 64, ..QueueLimits::default() };
    let mut bench = Bench::new(disk_of(limits), HwQueueConfig::default());
    bench.submit_all((0..32).map(|n| read(n * 8)));
    bench.turn();
    assert_eq!(bench.device().extents(), [(0, 64), (64, 64), (128, 64), (192, 64)]);
    assert!(bench.device().held.iter().all(|held| held.segments.len() == 1));
    bench.end_all();
    assert_eq!(bench.take_ok(), (0..32).map(|n| n * 8).collect::<Vec<_>>());
}
