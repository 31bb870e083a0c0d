//! Tags: reserved ones, a depth that changes, and bios that are refused rather than made to wait.

use blkyard_mq::{BioFlags, HwQueueConfig, Op, QueueLimits, Status};

use crate::core::hand::{Bench, bio, disk_of, read, with};

fn reserving(depth: usize, reserved: usize, limits: QueueLimits) -> Bench {
    let config = HwQueueConfig { depth, reserved, timeout_ns: 0, ..HwQueueConfig::default() };
    Bench::new(disk_of(limits), config)
}

fn urgent(sector: u64) -> Box<blkyard_mq::Bio> {
    with(read(sector), BioFlags::RESERVED)
}

#[test]
fn a_reserved_tag_is_there_when_all_others_are_out() {
    let mut bench = reserving(4, 1, QueueLimits::default());
    bench.submit_all((0..10).map(|n| read(n * 1000)));
    bench.turn();
    assert_eq!(bench.device().sectors(), [0, 1000, 2000], "the fourth tag is not for everyone");
    bench.submit(urgent(50_000));
    bench.turn();
    assert_eq!(bench.device().sectors(), [0, 1000, 2000, 50_000]);
    assert_eq!(bench.device().held[3].tag.index(), 0, "reserved tags have the lowest numbers");
    bench.end_all();
}

#[test]
fn with_the_reserved_tags_out_a_bio_takes_any_or_waits() {
    let mut bench = reserving(3, 1, QueueLimits::default());
    bench.submit_all([urgent(0), urgent(1000), urgent(2000), urgent(3000)]);
    bench.turn();
    assert_eq!((bench.device().sectors(), bench.queue.has_work()), (vec![0, 1000, 2000], false));
    bench.end(0, Status::Ok);
    assert_eq!(bench.device().sectors(), [1000, 2000, 3000]);
    bench.end_all();
}

#[test]
fn a_reserved_bio_that_must_be_split_does_not_push_another_aside() {
    let limits = QueueLimits { sectors_max: 8, ..QueueLimits::default() };
    let mut bench = reserving(2, 1, limits);
    bench.submit(bio(Op::Read, 0, 24));
    bench.turn();
    assert_eq!(bench.device().sectors(), [0], "the rest waits for the one tag");
    bench.submit(with(bio(Op::Read, 1000, 16), BioFlags::RESERVED));
    // One that is whole does get through.
    bench.submit(urgent(2000));
    bench.turn();
    assert_eq!((bench.device().sectors(), bench.queue.has_work()), (vec![0, 2000], false));
    bench.end_all();
    let mut ended = bench.take_ok();
    ended.sort_unstable();
    assert_eq!(ended, [0, 1000, 2000]);
}

#[test]
fn a_lane_sleeps_while_a_reserved_bio_waits_behind_one_that_is_split() {
    let limits = QueueLimits { sectors_max: 8, ..QueueLimits::default() };
    let mut bench = reserving(2, 1, limits);
    bench.submit_all([bio(Op::Read, 0, 24), with(bio(Op::Read, 1000, 16), BioFlags::RESERVED)]);
    bench.turn();
    assert_eq!((bench.device().sectors(), bench.queue.has_work()), (vec![0], false));
    bench.end_all();
    // Its own parts take the free tags.
    bench.submit(with(bio(Op::Read, 3000, 24), BioFlags::RESERVED));
    bench.turn();
    assert_eq!((bench.device().sectors(), bench.queue.has_work()), (vec![3000, 3008], false));
    bench.end_all();
}

#[test]
fn a_reserved_bio_is_the_first_to_get_the_next_reserved_tag() {
    let limits = QueueLimits { sectors_max: 8, ..QueueLimits::default() };
    let mut bench = reserving(2, 1, limits);
    // One is split and has the normal tag, others wait behind it; the reserved tag is out, too.
    bench.submit_all([bio(Op::Read, 0, 24), urgent(1000), read(2000), urgent(3000), urgent(4000)]);
    bench.turn();
    assert_eq!((bench.device().sectors(), bench.queue.has_work()), (vec![0, 1000], false));
    bench.end(1000, Status::Ok);
    assert_eq!((bench.device().sectors(), bench.queue.has_work()), (vec![0, 3000], false));
    bench.end(3000, Status::Ok);
    assert_eq!(bench.device().sectors(), [0, 4000]);
    bench.end(0, Status::Ok);
    assert_eq!(bench.device().sectors(), [4000, 8], "the normal tag is for who was first");
    bench.end_all();
    assert_eq!(bench.take_ok(), [1000, 3000, 4000, 0, 2000]);
}

#[test]
fn the_depth_shrinks_below_what_is_out_and_grows_back() {
    let mut bench = Bench::deep(8);
    bench.submit_all((0..30).map(|n| read(n * 1000)));
    bench.turn();
    assert_eq!((bench.queue.set_depth(3), bench.queue.in_flight()), (3, 8));
    for left in [7, 6, 5, 4, 3, 3, 3] {
        bench.device().end(|_| true, Status::Ok);
        bench.turn();
        assert_eq!(bench.queue.in_flight(), left);
    }
    assert_eq!((bench.snapshot().depth, bench.snapshot().depth_limit), (8, 3));
    assert_eq!((bench.queue.set_depth(100), bench.queue.has_work()), (8, true));
    bench.turn();
    assert_eq!(bench.queue.in_flight(), 8);
    assert_eq!(bench.queue.set_depth(0), 1);
    bench.end_all();
    assert_eq!(bench.take_ok().len(), 30);
}

#[test]
fn reserved_tags_stay_whatever_the_depth() {
    let mut bench = reserving(8, 2, QueueLimits::default());
    assert_eq!(bench.queue.set_depth(1), 3);
    bench.submit_all([read(0), read(1000), urgent(2000), urgent(3000)]);
    bench.turn();
    assert_eq!(bench.device().sectors(), [0, 2000, 3000]);
    bench.end_all();
}

#[test]
fn who_does_not_wait_comes_back_if_there_is_no_tag_or_others_wait() {
    let mut bench = Bench::deep(1);
    let hasty = |sector| with(read(sector), BioFlags::NOWAIT);
    bench.submit_all([hasty(0), hasty(1000)]);
    bench.turn();
    assert_eq!((bench.take_ended(), bench.device().sectors()), (vec![(1000, Status::Again)], vec![0]));
    bench.submit_all([read(2000), hasty(3000)]);
    bench.turn();
    assert_eq!(bench.take_ended(), [(3000, Status::Again)]);
    assert_eq!(bench.queue.stats().snapshot().refused, 2);
    bench.end_all();
}

#[test]
fn who_does_not_wait_is_not_split() {
    let limits = QueueLimits { sectors_max: 8, ..QueueLimits::default() };
    let mut bench = Bench::new(disk_of(limits), HwQueueConfig::default());
    bench.submit_all([with(bio(Op::Read, 0, 9), BioFlags::NOWAIT), with(read(1000), BioFlags::NOWAIT)]);
    bench.turn();
    assert_eq!((bench.take_ended(), bench.device().sectors()), (vec![(0, Status::Again)], vec![1000]));
    bench.end_all();
}

#[test]
fn an_atomic_write_is_one_request_or_invalid() {
    let limits = QueueLimits { atomic_sectors_max: 16, ..QueueLimits::default() };
    let mut bench = Bench::new(disk_of(limits), HwQueueConfig::default());
    let atomic = |sector, sectors| with(bio(Op::Write, sector, sectors), BioFlags::ATOMIC);
    bench.submit_all([atomic(0, 16), atomic(1000, 17)]);
    bench.turn();
    assert_eq!((bench.take_ended(), bench.device().extents()), (vec![(1000, Status::Invalid)], vec![(0, 16)]));
    bench.end_all();
}

#[test]
fn what_is_not_of_whole_blocks_comes_back_invalid() {
    let limits = QueueLimits {
        logical_block_bytes: 4096,
        physical_block_bytes: 4096,
        discard_granularity_bytes: 4096,
        ..QueueLimits::default()
    };
    let mut bench = Bench::new(disk_of(limits), HwQueueConfig::default());
    bench.submit_all([bio(Op::Read, 4, 8), bio(Op::Read, 8, 4), bio(Op::Read, 8, 0), read(16)]);
    bench.turn();
    assert_eq!(bench.take_ended(), [4, 8, 8].map(|sector| (sector, Status::Invalid)));
    assert_eq!(bench.device().sectors(), [16]);
    bench.end_all();
}

#[test]
fn what_a_device_does_not_do_comes_back_unsupported() {
    let mut bench = Bench::new(disk_of(QueueLimits::default()), HwQueueConfig::default());
    bench.submit_all([bio(Op::Discard, 0, 8), bio(Op::WriteZeroes, 0, 8)]);
    bench.turn();
    assert_eq!(bench.take_ended(), [(0, Status::NotSupported); 2]);
}
