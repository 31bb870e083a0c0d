//! Rate limits: waiting times, charges, and bios that do not wait.

use std::sync::Arc;

use blkyard_mq::{
    BioFlags, DeadlineConfig, DeviceInfo, HwQueueConfig, Op, QueueLimits, RateConfig, RateLimit, SchedulerConfig,
    Status,
};

use crate::core::hand::{Bench, bio, disk, disk_of, of, read, with};

const MS: u64 = 1_000_000;

fn limit(iops: u64, bytes_per_s: u64, burst_ms: u32) -> Arc<RateLimit> {
    Arc::new(RateLimit::new(RateConfig { iops, bytes_per_s, burst_ms }).unwrap())
}

/// A thousand I/Os a second, of which one may be saved up.
fn thousand() -> Arc<RateLimit> {
    limit(1000, 0, 1)
}

fn limited(limits: &[&Arc<RateLimit>]) -> Bench {
    let mut bench = Bench::new(disk(), HwQueueConfig { timeout_ns: 0, ..HwQueueConfig::default() });
    bench.queue.set_rates(0, limits.iter().copied().map(Arc::clone).collect());
    bench
}

/// Sectors that lie apart.
fn reads(count: u64) -> impl Iterator<Item = Box<blkyard_mq::Bio>> {
    (0..count).map(|n| read(n * 100))
}

fn held(bench: &Bench) -> usize {
    bench.snapshot().namespaces[0].waiting
}

/// Runs at the times that the queue names, and completes all, until no bio waits; returns the arrival times.
fn arrivals(bench: &mut Bench) -> Vec<u64> {
    let (mut when, mut seen) = (Vec::new(), 0);
    while held(bench) > 0 || seen < bench.device().given.iter().flatten().count() {
        let given = bench.device().given.iter().flatten().count();
        when.extend(std::iter::repeat_n(bench.now_ns, given - seen));
        seen = given;
        assert!(!bench.queue.has_work(), "it would turn without end");
        let Some(due_ns) = bench.deadline_ns() else { break };
        bench.turn_at(due_ns);
    }
    when
}

#[test]
fn who_stays_within_the_limit_does_not_wait() {
    let mut bench = limited(&[&thousand()]);
    for round in 0..50 {
        bench.now_ns = round * MS;
        bench.submit(read(round * 100));
        assert_eq!(bench.issue(), 1);
    }
    assert_eq!(bench.queue.stats().snapshot().held, 0);
    bench.end_all();
}

#[test]
fn what_exceeds_it_waits_until_the_time_that_the_queue_names() {
    let mut bench = limited(&[&thousand()]);
    bench.submit_all(reads(5));
    bench.now_ns = 10 * MS - 1;
    bench.issue();
    // One is due, one was saved up.
    assert_eq!((bench.device().sectors(), held(&bench)), (vec![0, 100], 3));
    assert_eq!((bench.queue.has_work(), bench.deadline_ns()), (false, Some(11 * MS)));
    assert_eq!(bench.snapshot().namespaces[0].held_ns, Some(MS));
    bench.turn_at(11 * MS - 1);
    assert_eq!(held(&bench), 3, "looked after too early, it waits on");
    assert_eq!(arrivals(&mut bench)[2..], [11 * MS, 12 * MS, 13 * MS]);
    let stats = bench.queue.stats().snapshot();
    assert_eq!((stats.held, stats.held_ns), (3, 3 * MS));
    bench.end_all();
    assert_eq!(bench.take_ok(), [0, 100, 200, 300, 400]);
}

#[test]
fn a_fast_limit_is_looked_after_in_lots() {
    // A hundred thousand a second: not every ten microseconds.
    let mut bench = limited(&[&limit(100_000, 0, 1)]);
    bench.queue.set_depth(128);
    bench.now_ns = 1_000 * MS;
    bench.submit_all(reads(128));
    bench.issue();
    let looked = bench.device().given.len();
    assert_eq!(bench.device().held.len(), 100, "what a millisecond saves up");
    assert!(bench.deadline_ns() >= Some(1_000 * MS + 250_000), "{:?}", bench.deadline_ns());
    arrivals(&mut bench);
    assert!(bench.device().given.len() - looked <= 3, "{:?}", bench.device().given);
    bench.end_all();
}

#[test]
fn bytes_are_counted_and_one_longer_than_the_burst_passes() {
    // 1 MB/s and a millisecond of it, a kilobyte: 4 KiB take 4.096 ms.
    let mut bench = limited(&[&limit(0, 1_000_000, 1)]);
    bench.submit_all([read(0), read(100), bio(Op::Write, 1000, 2048), read(5000)]);
    bench.now_ns = 100 * MS - 1;
    bench.issue();
    assert_eq!(bench.device().sectors(), [0]);
    let each = 4_096_000;
    let first = 100 * MS - MS + each;
    assert_eq!(arrivals(&mut bench)[1..], [first, first + each, first + each + (1 << 20) * 1000]);
    bench.end_all();
}

#[test]
fn of_two_limits_the_tighter_one_holds() {
    let (device, export) = (limit(10_000, 0, 1), limit(0, 4_096_000, 1));
    let mut bench = limited(&[&device, &export]);
    bench.submit_all(reads(4));
    bench.now_ns = 50 * MS - 1;
    bench.issue();
    assert_eq!(arrivals(&mut bench), [50 * MS, 50 * MS, 51 * MS, 52 * MS]);
    bench.end_all();
}

#[test]
fn each_bio_counts_though_it_joins_the_request_of_another() {
    for scheduler in [SchedulerConfig::None, SchedulerConfig::Deadline(DeadlineConfig::default())] {
        let mut bench = Bench::new(disk(), HwQueueConfig { scheduler, timeout_ns: 0, ..HwQueueConfig::default() });
        bench.queue.set_rates(0, vec![thousand()]);
        bench.submit_all([0, 8, 16, 24].map(read));
        bench.now_ns = 10 * MS - 1;
        bench.issue();
        assert_eq!((bench.device().extents(), held(&bench)), (vec![(0, 16)], 2), "{scheduler:?}");
        bench.end_all();
    }
}

#[test]
fn a_bio_split_in_parts_is_one() {
    let limits = QueueLimits { sectors_max: 8, ..QueueLimits::default() };
    let mut bench = Bench::new(disk_of(limits), HwQueueConfig::default());
    bench.queue.set_rates(0, vec![thousand()]);
    bench.submit_all([bio(Op::Write, 0, 32), read(100), read(200)]);
    bench.now_ns = 10 * MS - 1;
    bench.issue();
    assert_eq!((bench.device().held.len(), held(&bench)), (5, 1));
    bench.end_all();
}

#[test]
fn flushes_and_reserved_bios_do_not_wait_but_the_data_of_a_flush_does() {
    let info = DeviceInfo { volatile_cache: true, ..disk() };
    let config = HwQueueConfig { depth: 8, reserved: 1, timeout_ns: 0, ..HwQueueConfig::default() };
    let mut bench = Bench::new(info, config);
    bench.queue.set_rates(0, vec![thousand()]);
    bench.now_ns = 10 * MS - 1;
    bench.submit_all(reads(4));
    bench.issue();
    bench.submit_all([with(read(9000), BioFlags::RESERVED), bio(Op::Flush, 0, 0)]);
    bench.submit(with(bio(Op::Write, 700, 8), BioFlags::PREFLUSH));
    bench.turn();
    assert_eq!(bench.device().ops(), [Op::Read, Op::Read, Op::Flush, Op::Read]);
    bench.device().end(|held| held.op == Op::Flush, Status::Ok);
    bench.turn();
    assert_eq!((bench.device().ops(), held(&bench)), (vec![Op::Read; 3], 3));
    bench.end_all();
    assert_eq!(bench.ended.len(), 7);
}

#[test]
fn what_moves_no_data_costs_no_bytes() {
    let mut bench = limited(&[&limit(0, 1_000_000, 1)]);
    bench.now_ns = 10 * MS - 1;
    bench.submit_all((0..4).map(|n| bio(Op::Discard, n * 100_000, 1 << 15)));
    bench.issue();
    assert_eq!(held(&bench), 0);
    bench.end_all();
}

#[test]
fn queues_that_share_a_limit_pass_in_turn() {
    let shared = thousand();
    let mut queues = [(); 3].map(|()| limited(&[&shared]));
    queues.iter_mut().for_each(|bench| bench.submit_all(reads(100)));
    let mut now_ns = 500 * MS;
    while now_ns < 560 * MS {
        // The first queue always runs first.
        queues.iter_mut().for_each(|bench| bench.turn_at(now_ns));
        now_ns = queues.iter().filter_map(Bench::deadline_ns).min().unwrap();
    }
    let passed = queues.each_mut().map(|bench| bench.device().held.len());
    assert!(passed.iter().sum::<usize>().abs_diff(61) <= 1, "{passed:?}");
    // The burst goes to the first queue.
    assert!(passed[0] - passed[2] <= 3 && passed[1].abs_diff(passed[2]) <= 1, "{passed:?}");
    queues.iter_mut().for_each(Bench::end_all);
}

#[test]
fn who_wants_more_does_not_starve_who_wants_little() {
    let shared = limit(20_000, 0, 1);
    let (mut many, mut few) = (limited(&[&shared]), limited(&[&shared]));
    let (mut now_ns, mut sent, mut passed) = (500 * MS, 0, 0);
    while now_ns < 600 * MS {
        let room = many.queue.room() as u64;
        many.submit_all((0..room).map(|n| read((sent + n) * 100)));
        sent += room;
        many.turn_at(now_ns);
        while !many.device().held.is_empty() {
            many.device().end(|_| true, Status::Ok);
        }
        few.turn_at(now_ns);
        if !few.device().held.is_empty() {
            passed += 1;
            few.end(0, Status::Ok);
        }
        if few.queue.is_idle() {
            few.submit(read(0));
            few.turn_at(now_ns);
        }
        let due_ns = [many.deadline_ns(), few.deadline_ns()].into_iter().flatten().min();
        now_ns = due_ns.unwrap_or(0).max(now_ns + 1);
    }
    // It waits for one lot of the other at a time, a quarter of a millisecond, and for its own.
    assert!(passed > 250, "{passed} in 100 ms");
    [many, few].iter_mut().for_each(Bench::end_all);
}

#[test]
fn a_limit_is_changed_under_load() {
    let mut bench = limited(&[&limit(1, 0, 1)]);
    bench.submit_all(reads(10));
    bench.now_ns = 10 * MS - 1;
    bench.issue();
    assert_eq!((held(&bench), bench.deadline_ns()), (9, Some(1009 * MS)));
    bench.queue.set_rates(0, vec![thousand()]);
    assert!(bench.queue.has_work());
    bench.turn();
    assert_eq!(held(&bench), 7);
    bench.queue.set_rates(0, Vec::new());
    assert!(bench.queue.has_work());
    bench.turn();
    assert_eq!((held(&bench), bench.device().held.len()), (0, 10));
    bench.end_all();
    assert_eq!(bench.take_ok().len(), 10);
}

#[test]
fn what_was_booked_and_not_used_is_given_back() {
    let shared = limit(10, 0, 1);
    let (mut one, mut other) = (limited(&[&shared]), limited(&[&shared]));
    for bench in [&mut one, &mut other] {
        bench.submit_all(reads(2));
        bench.now_ns = 1000 * MS - 1;
        bench.issue();
    }
    let second_ns = other.deadline_ns().unwrap();
    one.queue.set_rates(0, Vec::new());
    one.end_all();
    let mut third = limited(&[&shared]);
    third.submit(read(0));
    third.now_ns = 1000 * MS - 1;
    third.issue();
    assert_eq!(third.deadline_ns(), Some(second_ns), "in the place that was booked for the one that went");
    [other, third].iter_mut().for_each(Bench::end_all);
}

#[test]
fn who_must_not_wait_comes_back() {
    let mut bench = limited(&[&thousand()]);
    bench.now_ns = 10 * MS - 1;
    bench.submit_all(reads(4).map(|bio| with(bio, BioFlags::NOWAIT)));
    bench.turn();
    assert_eq!((bench.device().held.len(), bench.take_ended()), (2, vec![(200, Status::Again), (300, Status::Again)]));
    bench.end_all();
}

#[test]
fn who_must_not_wait_is_not_kept_out_by_what_is_long_over() {
    let mut bench = limited(&[&thousand()]);
    bench.now_ns = 10 * MS - 1;
    bench.submit_all(reads(4).map(|bio| with(bio, BioFlags::NOWAIT)));
    bench.turn();
    bench.end_all();
    bench.take_ended();
    // The held bios are gone, so no bio waits and no round runs until the next submission.
    bench.now_ns = 1000 * MS;
    bench.submit(with(read(0), BioFlags::NOWAIT));
    bench.turn();
    bench.end_all();
    assert_eq!(bench.take_ended(), [(0, Status::Ok)]);
}

#[test]
fn a_queue_that_is_to_be_empty_does_not_wait_but_pays() {
    type Queue = blkyard_mq::HwQueue<crate::core::hand::Hand>;
    let frozen: (fn(&mut Queue), fn(&mut Queue)) = (|queue| queue.freeze(), |queue| queue.thaw());
    let hurried: (fn(&mut Queue), fn(&mut Queue)) = (|queue| queue.set_hurry(true), |queue| queue.set_hurry(false));
    for (hurry, wait) in [frozen, hurried] {
        let mut bench = limited(&[&thousand()]);
        bench.submit_all(reads(12));
        bench.now_ns = 10 * MS - 1;
        bench.issue();
        assert_eq!(held(&bench), 10);
        hurry(&mut bench.queue);
        assert!(bench.queue.has_work());
        bench.turn();
        assert_eq!(held(&bench), 0);
        bench.end_all();
        wait(&mut bench.queue);
        bench.submit(read(0));
        bench.turn();
        assert_eq!(bench.deadline_ns(), Some(21 * MS), "twelve have passed");
        bench.end_all();
    }
}

#[test]
fn without_a_tag_nobody_asks_when_it_may_pass() {
    let mut bench = Bench::new(disk(), HwQueueConfig { depth: 1, timeout_ns: 0, ..HwQueueConfig::default() });
    bench.queue.set_rates(0, vec![thousand()]);
    bench.now_ns = 10 * MS - 1;
    bench.submit_all(reads(3));
    bench.issue();
    assert_eq!((bench.queue.has_work(), bench.deadline_ns()), (false, None));
    bench.end(0, Status::Ok);
    assert_eq!((bench.device().sectors(), bench.deadline_ns()), (vec![100], None));
    bench.end(100, Status::Ok);
    assert_eq!(bench.deadline_ns(), Some(11 * MS));
    bench.end_all();
}

#[test]
fn namespaces_have_limits_of_their_own() {
    let mut bench = Bench::of(vec![disk(), disk()], HwQueueConfig { timeout_ns: 0, ..HwQueueConfig::default() });
    bench.queue.set_rates(1, vec![thousand()]);
    bench.now_ns = 10 * MS - 1;
    bench.submit_all(reads(5).map(|bio| of(1, bio)));
    bench.submit_all(reads(5));
    bench.issue();
    assert_eq!((bench.device().count_of(0), bench.device().count_of(1)), (5, 2));
    bench.end_all();
}

#[test]
fn a_flush_does_not_wait_for_writes_that_a_limit_or_a_scheduler_holds() {
    // One I/O a second, so that the second write is held; its data is to be followed by a flush of its own.
    for scheduler in [SchedulerConfig::None, SchedulerConfig::Deadline(DeadlineConfig::default())] {
        let info = DeviceInfo { volatile_cache: true, fua: false, ..disk() };
        let config = HwQueueConfig { timeout_ns: 0, scheduler, ..HwQueueConfig::default() };
        let mut bench = Bench::new(info, config);
        bench.queue.set_rates(0, vec![limit(1, 0, 1)]);
        bench.now_ns = 10_000 * MS;
        bench.submit_all([0, 100, 200].map(|sector| with(bio(Op::Write, sector, 8), BioFlags::FUA)));
        bench.turn();
        assert_eq!((bench.device().ops(), held(&bench)), (vec![Op::Write], 2), "{scheduler:?}");
        bench.end(0, Status::Ok);
        assert_eq!(bench.device().ops(), [Op::Flush], "the first write waits for its flush alone, {scheduler:?}");
        bench.device().end(|held| held.op == Op::Flush, Status::Ok);
        bench.turn();
        assert_eq!(bench.take_ok(), [0]);
        let mut flush = bio(Op::Flush, 0, 0);
        flush.cookie = 7;
        bench.submit(flush);
        bench.turn();
        assert_eq!((bench.device().ops(), held(&bench)), (vec![Op::Flush], 2), "{scheduler:?}");
        bench.end_all();
        assert_eq!(bench.take_ok(), [7, 100, 200]);
    }
}
