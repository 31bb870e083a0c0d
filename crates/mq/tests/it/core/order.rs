//! Order: waiting requests reach the driver in order of submission, with requeues in between.

use blkyard_mq::{BioFlags, DeviceInfo, HwQueueConfig, Op, QueueLimits, Status};

use crate::core::hand::{Bench, bio, disk, disk_of, read, with};

#[test]
fn the_driver_is_given_a_batch_in_the_order_of_submission() {
    // Linux passed its list of a plug on backwards until November 2024.
    let mut bench = Bench::deep(64);
    let sectors: Vec<u64> = (0..40).map(|n| n * 1000).collect();
    bench.submit_all(sectors.iter().map(|sector| read(*sector)));
    bench.turn();
    assert_eq!(bench.device().given, [sectors]);
    bench.end_all();
}

#[test]
fn what_waits_for_a_tag_keeps_its_order() {
    let mut bench = Bench::deep(3);
    let sectors: Vec<u64> = (0..10).map(|n| n * 1000).collect();
    bench.submit_all(sectors.iter().map(|sector| read(*sector)));
    bench.turn();
    for n in [1, 0, 2] {
        bench.end(n * 1000, Status::Ok);
    }
    bench.end_all();
    assert_eq!(bench.device().given.concat(), sectors);
}

#[test]
fn a_bio_that_is_split_stays_in_its_place() {
    let limits = QueueLimits { sectors_max: 8, ..QueueLimits::default() };
    let mut bench = Bench::new(disk_of(limits), HwQueueConfig { depth: 2, ..HwQueueConfig::default() });
    bench.submit_all([read(1000), bio(Op::Read, 0, 20), read(2000)]);
    bench.end_all();
    assert_eq!(bench.device().given.concat(), [1000, 0, 8, 16, 2000]);
    assert_eq!(bench.take_ok(), [1000, 0, 2000]);
}

#[test]
fn a_bio_of_several_requests_ends_once_with_the_first_failure() {
    let limits = QueueLimits { sectors_max: 8, ..QueueLimits::default() };
    let mut bench = Bench::new(disk_of(limits), HwQueueConfig::default());
    bench.submit(bio(Op::Read, 0, 24));
    bench.turn();
    bench.end(16, Status::Ok);
    bench.end(0, Status::Medium);
    assert!(bench.take_ended().is_empty());
    bench.end(8, Status::Io);
    assert_eq!(bench.take_ended(), [(0, Status::Medium)]);
}

#[test]
fn requests_that_come_back_stand_before_what_came_later_in_their_old_order() {
    let mut bench = Bench::deep(16);
    bench.submit_all((0..6).map(|n| read(n * 1000)));
    bench.turn();
    bench.device().room = 2;
    // Out of order, and some keep going: 1 and 4 stay.
    for sector in [3000, 0, 5000, 2000] {
        bench.device().requeue(|held| held.sector == sector);
    }
    bench.submit_all((6..8).map(|n| read(n * 1000)));
    bench.turn();
    assert_eq!((bench.device().sectors(), bench.snapshot().dispatch), (vec![1000, 4000], 6));
    bench.device().room = usize::MAX;
    bench.end(1000, Status::Ok);
    assert_eq!(bench.device().given.last().unwrap(), &[0, 2000, 3000, 5000, 6000, 7000]);
    assert_eq!(bench.queue.stats().snapshot().requeued, 4);
    bench.end_all();
    assert_eq!(bench.ended.len(), 8);
}

#[test]
fn what_is_put_back_within_a_batch_stands_where_it_stood() {
    let mut bench = Bench::deep(8);
    (bench.device().room, bench.device().puts_back) = (1, true);
    bench.submit_all((0..4).map(|n| read(n * 1000)));
    bench.turn();
    assert_eq!((bench.device().sectors(), bench.queue.in_flight(), bench.snapshot().dispatch), (vec![0], 1, 3));
    bench.device().room = 3;
    bench.end(0, Status::Ok);
    assert_eq!(bench.device().sectors(), [1000, 2000, 3000]);
    bench.end_all();
}

#[test]
fn a_flush_that_is_put_back_stands_where_it_stood() {
    let mut bench = Bench::new(DeviceInfo { volatile_cache: true, ..disk() }, HwQueueConfig::default());
    bench.device().room = 0;
    bench.submit_all([read(1000), read(2000)]);
    bench.turn();
    bench.submit(bio(Op::Flush, 0, 0));
    bench.device().puts_back = true;
    bench.turn_at(10_000_000);
    assert_eq!(bench.snapshot().dispatch, 3);
    bench.device().room = usize::MAX;
    bench.turn_at(20_000_000);
    assert_eq!(bench.device().ops(), [Op::Flush, Op::Read, Op::Read], "before what waits");
    bench.end_all();
}

#[test]
fn data_behind_its_flush_goes_before_what_waits_for_a_tag() {
    let info = DeviceInfo { volatile_cache: true, ..disk() };
    let mut bench = Bench::new(info, HwQueueConfig { depth: 1, ..HwQueueConfig::default() });
    let preflush = |sector| with(bio(Op::Write, sector, 8), BioFlags::PREFLUSH);
    bench.submit_all([preflush(1000), preflush(2000), read(3000)]);
    bench.end_all();
    let given = bench.device().given.concat();
    // The flush may begin before or after the read, which is not its business; its riders keep their order.
    let place = |sector| given.iter().position(|given| *given == sector).unwrap();
    assert!(place(1000) < place(2000), "{given:?}");
    assert_eq!(bench.queue.stats().snapshot().flushes, 1);
}
