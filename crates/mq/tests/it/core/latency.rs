//! Latency is measured from a bio's arrival to its end, with the parts for which it was held.

use std::collections::VecDeque;
use std::sync::Arc;

use blkyard_mq::{
    Bio, BioFlags, DeviceInfo, Held, HwQueueConfig, Op, OpClass, OpSnapshot, QueueLimits, RateConfig, RateLimit, Reach,
    Scheduler, SchedulerSnapshot, Selected, Status,
};

use crate::core::hand::{Bench, bio, disk, disk_of, read, with};

const MS: u64 = 1_000_000;

fn issue_at(bench: &mut Bench, now_ns: u64) -> usize {
    bench.now_ns = now_ns;
    bench.queue.issue(&mut (), now_ns)
}

/// The device is done with the first request that begins here, and the queue hears of it at this time.
fn end_at(bench: &mut Bench, now_ns: u64, sector: u64) {
    bench.device().end(|held| held.sector == sector, Status::Ok);
    bench.now_ns = now_ns;
    bench.reap();
}

fn of(bench: &Bench, class: OpClass) -> OpSnapshot {
    bench.queue.stats().snapshot().op(class).clone()
}

/// Reads so far: number of latencies, their sum, and its parts held and at the device, in microseconds.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reads {
    count: u64,
    whole: u64,
    limit: u64,
    scheduler: u64,
    tag: u64,
    dispatch: u64,
    device: u64,
}

fn reads(bench: &Bench) -> Reads {
    let op = of(bench, OpClass::Read);
    let held = |held: Held| op.held_ns[held as usize] / 1000;
    Reads {
        count: op.latency.samples(),
        whole: op.sum_ns / 1000,
        limit: held(Held::Limit),
        scheduler: held(Held::Scheduler),
        tag: held(Held::Tag),
        dispatch: held(Held::Dispatch),
        device: op.device_ns() / 1000,
    }
}

/// A thousand I/Os a second, of which one may be saved up.
fn limited(depth: usize) -> Bench {
    let limit = Arc::new(RateLimit::new(RateConfig { iops: 1000, bytes_per_s: 0, burst_ms: 1 }).unwrap());
    let mut bench = Bench::new(disk(), HwQueueConfig { depth, timeout_ns: 0, ..HwQueueConfig::default() });
    bench.queue.set_rates(0, vec![limit]);
    bench
}

#[test]
fn what_does_not_wait_is_at_the_device_all_the_time() {
    let mut bench = Bench::deep(8);
    bench.submit_all([read(0), read(100)]);
    issue_at(&mut bench, 10 * MS);
    end_at(&mut bench, 15 * MS, 100);
    end_at(&mut bench, 17 * MS, 0);
    assert_eq!(reads(&bench), Reads { count: 2, whole: 12_000, device: 12_000, ..Reads::default() });
}

#[test]
fn time_under_a_limit_is_latency() {
    let mut bench = limited(128);
    bench.submit_all((0..5).map(|n| read(n * 100)));
    // Two pass at once, one more each millisecond. Each takes a millisecond.
    assert_eq!(issue_at(&mut bench, 10 * MS), 2);
    end_at(&mut bench, 11 * MS, 0);
    end_at(&mut bench, 11 * MS, 100);
    for n in 2..5 {
        assert_eq!(issue_at(&mut bench, (9 + n) * MS), 1);
        end_at(&mut bench, (10 + n) * MS, n * 100);
    }
    let want = Reads { count: 5, whole: 11_000, limit: 6_000, device: 5_000, ..Reads::default() };
    assert_eq!(reads(&bench), want);
    assert_eq!(of(&bench, OpClass::Read).max_ns, 4 * MS);
}

#[test]
fn time_without_a_tag_is_latency() {
    let mut bench = Bench::deep(1);
    bench.submit_all((0..3).map(|n| read(n * 100)));
    issue_at(&mut bench, MS);
    for n in 0..3 {
        end_at(&mut bench, (6 + 5 * n) * MS, n * 100);
        issue_at(&mut bench, (6 + 5 * n) * MS);
    }
    assert_eq!(reads(&bench), Reads { count: 3, whole: 30_000, tag: 15_000, device: 15_000, ..Reads::default() });
}

#[test]
fn each_time_has_one_cause() {
    let mut bench = limited(1);
    bench.submit_all((0..3).map(|n| read(n * 100)));
    let quarter = MS / 4;
    for (n, now_ns) in [(0, 10 * MS), (1, 10 * MS + quarter), (2, 11 * MS)] {
        assert_eq!(issue_at(&mut bench, now_ns), 1);
        end_at(&mut bench, now_ns + quarter, n * 100);
    }
    // The second waits for the tag of the first; the third too, and then for the limit.
    let want = Reads { count: 3, whole: 2_000, limit: 750, tag: 500, device: 750, ..Reads::default() };
    assert_eq!(reads(&bench), want);
}

/// Keeps all it has until a time.
#[derive(Debug)]
struct Keeper {
    bios: VecDeque<Box<Bio>>,
    until_ns: u64,
}

impl Scheduler for Keeper {
    fn insert(&mut self, bio: Box<Bio>, _: u64) {
        self.bios.push_back(bio);
    }
    fn next(&mut self, now_ns: u64) -> Selected {
        if now_ns < self.until_ns {
            return Selected::Wait(self.until_ns);
        }
        self.bios.pop_front().map_or(Selected::Wait(u64::MAX), Selected::Bio)
    }
    fn join(&mut self, _: Reach, _: &mut dyn FnMut(&Bio) -> bool, _: u64) -> Option<Box<Bio>> {
        None
    }
    fn ended(&mut self, _: &Bio, _: u64, _: u64) {}
    fn take(&mut self, is_it: &mut dyn FnMut(&Bio) -> bool, _: u64) -> Option<Box<Bio>> {
        let at = self.bios.iter().position(|bio| is_it(bio))?;
        self.bios.remove(at)
    }
    fn drain(&mut self, each: &mut dyn FnMut(Box<Bio>)) {
        self.bios.drain(..).for_each(each);
    }
    fn snapshot(&self, _: u64) -> SchedulerSnapshot {
        SchedulerSnapshot::default()
    }
}

fn keep_until(bench: &mut Bench, until_ns: u64) {
    bench.queue.set_scheduler(0, Some(Box::new(Keeper { bios: VecDeque::with_capacity(256), until_ns })));
}

#[test]
fn time_with_a_scheduler_is_latency() {
    let mut bench = Bench::deep(1);
    keep_until(&mut bench, 3 * MS);
    bench.submit_all([read(0), read(100)]);
    assert_eq!(issue_at(&mut bench, MS), 0);
    assert_eq!(issue_at(&mut bench, 3 * MS), 1);
    end_at(&mut bench, 4 * MS, 0);
    assert_eq!(issue_at(&mut bench, 4 * MS), 1);
    end_at(&mut bench, 5 * MS, 100);
    // Both are kept for two; the second then waits for the tag.
    let want = Reads { count: 2, whole: 7_000, scheduler: 4_000, tag: 1_000, device: 2_000, ..Reads::default() };
    assert_eq!(reads(&bench), want);
}

#[test]
fn another_scheduler_does_not_shorten_the_wait() {
    let mut bench = Bench::deep(4);
    keep_until(&mut bench, 9 * MS);
    bench.submit(read(0));
    issue_at(&mut bench, MS);
    keep_until(&mut bench, 9 * MS);
    bench.submit(read(100));
    issue_at(&mut bench, 4 * MS);
    bench.queue.set_scheduler(0, None);
    bench.submit(read(200));
    assert_eq!(issue_at(&mut bench, 6 * MS), 3);
    [0, 100, 200].into_iter().for_each(|sector| end_at(&mut bench, 7 * MS, sector));
    let got = reads(&bench);
    assert_eq!((got.count, got.whole, got.device), (3, 6_000 + 3_000 + 1_000, 3_000), "{got:?}");
}

#[test]
fn what_a_scheduler_passes_on_at_once_has_not_waited() {
    let mut bench = Bench::deep(4);
    keep_until(&mut bench, 0);
    bench.submit_all([read(0), read(100)]);
    assert_eq!(issue_at(&mut bench, MS), 2);
    end_at(&mut bench, 3 * MS, 0);
    end_at(&mut bench, 3 * MS, 100);
    assert_eq!(reads(&bench), Reads { count: 2, whole: 4_000, device: 4_000, ..Reads::default() });
}

#[test]
fn time_for_which_the_driver_takes_nothing_is_latency() {
    let mut bench = Bench::deep(8);
    bench.device().room = 0;
    bench.submit_all([read(0), read(100)]);
    assert_eq!(issue_at(&mut bench, MS), 0);
    // It joins the request that waits, and counts from its own start.
    bench.submit(read(108));
    assert_eq!(issue_at(&mut bench, 2 * MS), 0);
    bench.device().room = usize::MAX;
    assert_eq!(issue_at(&mut bench, 9 * MS), 2);
    end_at(&mut bench, 10 * MS, 0);
    end_at(&mut bench, 10 * MS, 100);
    let want = Reads {
        count: 3,
        whole: 9_000 + 9_000 + 8_000,
        dispatch: 8_000 + 8_000 + 7_000,
        device: 3_000,
        ..Reads::default()
    };
    assert_eq!(reads(&bench), want);
    assert_eq!(of(&bench, OpClass::Read).ios, 2, "two requests");
}

#[test]
fn time_in_a_quiesced_queue_is_latency() {
    let mut bench = Bench::deep(8);
    bench.queue.quiesce();
    bench.submit(read(0));
    assert_eq!(issue_at(&mut bench, MS), 0);
    bench.queue.unquiesce();
    assert_eq!(issue_at(&mut bench, 5 * MS), 1);
    end_at(&mut bench, 6 * MS, 0);
    assert_eq!(reads(&bench), Reads { count: 1, whole: 5_000, dispatch: 4_000, device: 1_000, ..Reads::default() });
}

#[test]
fn what_is_handed_back_counts_from_its_start() {
    let mut bench = Bench::deep(8);
    bench.submit_all([read(0), read(8)]);
    issue_at(&mut bench, MS);
    bench.device().requeue(|_| true);
    bench.now_ns = 3 * MS;
    bench.reap();
    assert_eq!(issue_at(&mut bench, 4 * MS), 1);
    end_at(&mut bench, 6 * MS, 0);
    let want = Reads { count: 2, whole: 10_000, dispatch: 6_000, device: 4_000, ..Reads::default() };
    assert_eq!(reads(&bench), want);
}

#[test]
fn each_bio_of_a_request_counts_for_itself() {
    let mut bench = Bench::deep(8);
    // In this order the second joins behind the first, and the third before it.
    bench.submit_all([read(100), read(108), read(92)]);
    assert_eq!(issue_at(&mut bench, MS), 1);
    end_at(&mut bench, 3 * MS, 92);
    assert_eq!(reads(&bench), Reads { count: 3, whole: 6_000, device: 6_000, ..Reads::default() });
    assert_eq!(of(&bench, OpClass::Read).ios, 1);
}

#[test]
fn a_split_bio_is_at_the_device_from_its_first_part_to_its_last() {
    let info = disk_of(QueueLimits { sectors_max: 8, ..QueueLimits::default() });
    let mut bench = Bench::new(info, HwQueueConfig { depth: 1, ..HwQueueConfig::default() });
    bench.submit_all([bio(Op::Read, 0, 16), bio(Op::Read, 100, 8)]);
    issue_at(&mut bench, MS);
    end_at(&mut bench, 3 * MS, 0);
    issue_at(&mut bench, 3 * MS);
    end_at(&mut bench, 6 * MS, 8);
    assert_eq!(reads(&bench), Reads { count: 1, whole: 5_000, device: 5_000, ..Reads::default() });
    issue_at(&mut bench, 6 * MS);
    end_at(&mut bench, 7 * MS, 100);
    assert_eq!(reads(&bench), Reads { count: 2, whole: 11_000, tag: 5_000, device: 6_000, ..Reads::default() });
    assert_eq!(of(&bench, OpClass::Read).ios, 3);
}

#[test]
fn a_flush_counts_once_for_each_who_wants_it() {
    let mut bench = Bench::new(DeviceInfo { volatile_cache: true, ..disk() }, HwQueueConfig::default());
    bench.submit(bio(Op::Flush, 0, 0));
    issue_at(&mut bench, MS);
    bench.submit(bio(Op::Flush, 0, 0));
    issue_at(&mut bench, 2 * MS);
    end_at(&mut bench, 4 * MS, 0);
    issue_at(&mut bench, 4 * MS);
    end_at(&mut bench, 5 * MS, 0);
    let flush = of(&bench, OpClass::Flush);
    assert_eq!((flush.latency.samples(), flush.sum_ns, flush.device_ns()), (2, 6 * MS, 6 * MS));
}

#[test]
fn a_write_that_is_flushed_after_counts_both() {
    let mut bench = Bench::new(DeviceInfo { volatile_cache: true, ..disk() }, HwQueueConfig::default());
    bench.submit(with(bio(Op::Write, 0, 8), BioFlags::FUA));
    issue_at(&mut bench, MS);
    end_at(&mut bench, 3 * MS, 0);
    issue_at(&mut bench, 3 * MS);
    end_at(&mut bench, 7 * MS, 0);
    let write = of(&bench, OpClass::Write);
    assert_eq!((write.ios, write.latency.samples(), write.sum_ns, write.device_ns()), (1, 1, 6 * MS, 6 * MS));
}

#[test]
fn a_bio_that_goes_round_forgets_its_last_wait() {
    let mut bench = Bench::deep(1);
    let mut back = Vec::new();
    let mut round = |bench: &mut Bench, bios: Vec<Box<Bio>>, times: [u64; 3]| {
        let count = bios.len();
        bios.into_iter().for_each(|bio| bench.queue.submit(bio));
        for now_ns in times {
            bench.queue.issue(&mut (), now_ns);
            while !bench.device().held.is_empty() {
                bench.device().end(|_| true, Status::Ok);
            }
            bench.queue.reap(&mut (), now_ns + MS, &mut |bio| back.push(bio));
        }
        assert_eq!(back.len(), count);
        std::mem::take(&mut back)
    };
    let mut bios = round(&mut bench, vec![read(0), read(100)], [MS, 2 * MS, 3 * MS]);
    assert_eq!(reads(&bench), Reads { count: 2, whole: 3_000, tag: 1_000, device: 2_000, ..Reads::default() });
    // The one that has waited is alone this time; then another joins it from the front.
    let waited = bios.pop().unwrap();
    let bios = round(&mut bench, vec![waited], [11 * MS, 12 * MS, 13 * MS]);
    assert_eq!(reads(&bench), Reads { count: 3, whole: 4_000, tag: 1_000, device: 3_000, ..Reads::default() });
    round(&mut bench, bios.into_iter().chain([read(92)]).collect(), [21 * MS, 22 * MS, 23 * MS]);
    assert_eq!(reads(&bench), Reads { count: 5, whole: 6_000, tag: 1_000, device: 5_000, ..Reads::default() });
}
