//! Scheduled bios: those that pass the scheduler and those that bypass it, the times of its calls, and joins.

use blkyard_mq::{
    BioFlags, DeadlineConfig, DeviceInfo, HwQueueConfig, KyberConfig, Merging, Op, SchedulerConfig, Status,
    TimesliceConfig,
};

use crate::core::hand::{Bench, bio, disk, read, with};

/// One tag, so that order shows.
fn narrow(scheduler: SchedulerConfig) -> Bench {
    Bench::new(disk(), HwQueueConfig { depth: 1, scheduler, timeout_ns: 0, ..HwQueueConfig::default() })
}

fn deadline() -> SchedulerConfig {
    SchedulerConfig::Deadline(DeadlineConfig::default())
}

fn slices(slice_us: u32) -> SchedulerConfig {
    SchedulerConfig::Timeslice(TimesliceConfig { slice_us, extensions: 0, ..TimesliceConfig::default() })
}

fn waiting(bench: &Bench) -> usize {
    bench.snapshot().namespaces[0].waiting
}

#[test]
fn a_tag_goes_to_whom_the_scheduler_says() {
    let mut bench = narrow(deadline());
    bench.submit_all([300, 100, 200].map(read));
    bench.issue();
    assert_eq!((bench.device().sectors(), waiting(&bench)), (vec![100], 2));
    bench.end(100, Status::Ok);
    bench.submit(read(150));
    bench.end(200, Status::Ok);
    bench.end_all();
    assert_eq!(bench.take_ok(), [100, 200, 300, 150]);
}

#[test]
fn neighbours_join_the_request_that_has_the_only_tag() {
    let mut bench = narrow(deadline());
    bench.submit_all([108, 116, 200, 100].map(read));
    bench.issue();
    assert_eq!((bench.device().extents(), waiting(&bench)), (vec![(100, 24)], 1));
    // A later bio has no waiting neighbour.
    bench.submit(read(124));
    bench.end(100, Status::Ok);
    assert_eq!(bench.device().extents(), [(124, 8)]);
    bench.end_all();
    assert_eq!(bench.take_ok(), [100, 108, 116, 124, 200]);
}

#[test]
fn a_bio_before_the_oldest_joins_it() {
    let one = DeadlineConfig { fifo_batch: 1, ..DeadlineConfig::default() };
    let mut bench = narrow(SchedulerConfig::Deadline(one));
    bench.submit(read(0));
    bench.issue();
    bench.submit_all([5000, 900, 892].map(read));
    bench.turn();
    bench.now_ns = 501_000_000;
    bench.end(0, Status::Ok);
    assert_eq!(bench.device().extents(), [(5000, 8)]);
    bench.end(5000, Status::Ok);
    assert_eq!(bench.device().extents(), [(892, 16)]);
    bench.end_all();
}

#[test]
fn where_nothing_is_merged_nothing_joins() {
    let config = HwQueueConfig { scheduler: deadline(), merging: Merging::Off, ..HwQueueConfig::default() };
    let mut bench = Bench::new(disk(), config);
    bench.submit_all([108, 100].map(read));
    bench.issue();
    assert_eq!(bench.device().extents(), [(100, 8), (108, 8)]);
    bench.end_all();
}

#[test]
fn what_is_submitted_is_there_from_the_round_on_that_begins_after_it() {
    // The lane slept for a minute: a bio fetched then has not waited for a minute.
    let mut bench = narrow(deadline());
    bench.submit(read(0));
    bench.turn();
    bench.now_ns = 60_000_000_000;
    bench.submit_all([800, 900, 700].map(read));
    bench.turn();
    assert_eq!(bench.snapshot().namespaces[0].scheduler.as_ref().map(|scheduler| scheduler.oldest_ns), Some(0));
    bench.end_all();
    assert_eq!(bench.take_ok(), [0, 700, 800, 900]);
}

#[test]
fn a_reserved_bio_and_flushes_do_not_pass_through_it() {
    let info = blkyard_mq::DeviceInfo { volatile_cache: true, ..disk() };
    let config = HwQueueConfig { depth: 2, reserved: 1, scheduler: slices(1000), ..HwQueueConfig::default() };
    let mut bench = Bench::new(info, config);
    bench.submit_all([read(0), read(100), with(read(200), BioFlags::RESERVED), bio(Op::Flush, 0, 0)]);
    bench.issue();
    assert_eq!((bench.device().ops(), bench.device().sectors()), (vec![Op::Flush, Op::Read], vec![0, 200]));
    bench.end_all();
    assert_eq!(bench.ended.len(), 4);
}

#[test]
fn who_must_not_wait_comes_back_when_tags_are_short() {
    let mut bench = narrow(slices(1000));
    bench.submit_all([read(0), with(read(100), BioFlags::NOWAIT)]);
    bench.turn();
    assert_eq!(bench.take_ended(), [(100, Status::Again)]);
    bench.end(0, Status::Ok);
    bench.submit(with(read(200), BioFlags::NOWAIT));
    bench.turn();
    bench.end(200, Status::Ok);
    assert_eq!(bench.take_ok(), [0, 200]);
}

#[test]
fn a_queue_whose_scheduler_keeps_its_bios_sleeps_until_it_is_time() {
    let mut bench = narrow(SchedulerConfig::Timeslice(TimesliceConfig {
        slice_us: 10_000,
        extensions: 0,
        ..TimesliceConfig::default()
    }));
    let (mut one, mut other) = (read(0), read(100));
    (one.stream, other.stream) = (1, 2);
    bench.submit_all([one, other]);
    bench.issue();
    bench.end(0, Status::Ok);
    let due_ns = bench.deadline_ns().unwrap();
    assert_eq!((bench.queue.has_work(), due_ns), (false, bench.now_ns + 8_000_000));
    bench.turn_at(due_ns - 1);
    assert_eq!(bench.device().sectors(), []);
    bench.turn_at(due_ns);
    assert_eq!((bench.device().sectors(), bench.deadline_ns()), (vec![100], None));
    bench.end_all();
}

#[test]
fn a_scheduler_is_replaced_without_losing_a_bio() {
    let mut bench = narrow(deadline());
    bench.submit_all([300, 100, 200].map(read));
    bench.issue();
    bench.submit(read(50));
    let had = bench.queue.set_scheduler(0, slices(1000).build(1, 256, &DeviceInfo::default()));
    assert_eq!(had.map(|had| had.snapshot(0).name), Some("deadline"));
    // In the order in which they came; the first is with the device, and ends under the new one.
    bench.end(100, Status::Ok);
    assert_eq!(bench.device().sectors(), [300]);
    bench.queue.set_scheduler(0, None);
    bench.submit(read(10));
    bench.end_all();
    assert_eq!(bench.take_ok(), [100, 300, 200, 50, 10]);
    bench.queue.set_scheduler(0, deadline().build(1, 256, &DeviceInfo::default()));
    bench.submit_all([9, 8].map(|n| read(n * 1000)));
    bench.end_all();
    assert_eq!(bench.take_ok(), [8000, 9000]);
}

#[test]
fn a_quiesced_queue_hands_nothing_out_and_does_not_turn_for_it() {
    let mut bench = narrow(deadline());
    bench.queue.quiesce();
    bench.submit_all([300, 100].map(read));
    bench.turn();
    assert_eq!((bench.snapshot().tags_in_use, waiting(&bench), bench.queue.has_work()), (0, 2, false));
    assert_eq!(bench.deadline_ns(), None);
    bench.queue.unquiesce();
    assert!(bench.queue.has_work());
    bench.end_all();
    assert_eq!(bench.take_ok(), [100, 300]);
}

#[test]
fn a_bio_split_in_parts_is_handed_out_once_and_ends_once() {
    let config = HwQueueConfig { depth: 2, scheduler: deadline(), ..HwQueueConfig::default() };
    let mut bench = Bench::new(disk(), config);
    bench.submit_all([bio(Op::Write, 0, 5000), bio(Op::Write, 9000, 8)]);
    bench.issue();
    assert_eq!(bench.device().extents(), [(0, 2048), (2048, 2048)]);
    bench.end(0, Status::Ok);
    assert_eq!(bench.device().extents(), [(2048, 2048), (4096, 904)]);
    bench.end_all();
    assert_eq!(bench.take_ok(), [0, 9000]);
    let scheduler = bench.snapshot().namespaces[0].scheduler.clone().unwrap();
    assert!(scheduler.facts.contains(&("async_out", 0)), "{scheduler:?}");
}

#[test]
fn slices_of_no_length_are_no_scheduler() {
    let bench = narrow(slices(0));
    assert_eq!(bench.snapshot().namespaces[0].scheduler, None);
}

#[test]
fn a_bio_in_flight_is_not_taken_for_one_of_a_later_scheduler() {
    for scheduler in [SchedulerConfig::Kyber(KyberConfig::default()), deadline()] {
        let config = HwQueueConfig { depth: 2, bios_max: 4, scheduler, timeout_ns: 0, ..HwQueueConfig::default() };
        let mut bench = Bench::new(disk(), config);
        bench.submit(read(0));
        bench.turn();
        // As often as numbers of schedulers can differ: each abort of a scheduled command is one.
        (0..u32::from(u16::MAX) - 1).for_each(|_| bench.queue.schedule(0, scheduler));
        bench.end(0, Status::Ok);
        bench.submit(read(100));
        bench.end_all();
        assert_eq!(bench.take_ok(), [0, 100]);
    }
}

#[test]
fn async_writes_leave_a_tag_also_after_a_change_of_depth() {
    let config = HwQueueConfig { depth: 16, scheduler: deadline(), timeout_ns: 0, ..HwQueueConfig::default() };
    let mut bench = Bench::new(disk(), config);
    let writes = |from: u64| (from..from + 20).map(|n| bio(Op::Write, n * 100, 8));
    bench.queue.set_depth(4);
    bench.submit_all(writes(0));
    bench.turn();
    assert_eq!(bench.device().held.len(), 3, "three quarters");
    bench.submit(read(9000));
    bench.turn();
    assert_eq!(bench.device().held.last().map(|held| held.op), Some(Op::Read));
    bench.queue.set_depth(16);
    bench.turn();
    assert_eq!(bench.device().held.len(), 13);
    bench.end_all();
    assert_eq!(bench.take_ok().len(), 21);
}
