//! Request timeouts: the races of `blk_mq_timeout_work`, one after another.

use std::sync::Arc;

use blkyard_mq::{
    Batch, Cid, Cids, DeviceInfo, Done, Driver, Forged, HwQueue, HwQueueConfig, OpClass, RegionTable, Shortage, Status,
    TimedOut,
};

use crate::core::hand::{Bench, Late, bio, disk, read};

const TIMEOUT_NS: u64 = 1_000_000_000;
const SLACK_NS: u64 = 10_000_000;

fn bench(late: &[Late]) -> Bench {
    let mut bench = Bench::new(disk(), HwQueueConfig { timeout_ns: TIMEOUT_NS, ..HwQueueConfig::default() });
    bench.device().late = late.iter().copied().collect();
    bench
}

#[test]
fn a_sleeping_lane_is_told_when_a_request_will_be_late() {
    let mut bench = bench(&[Late::End(Status::Timeout)]);
    assert_eq!(bench.deadline_ns(), None);
    bench.submit(read(0));
    bench.issue();
    let due_ns = bench.now_ns + TIMEOUT_NS;
    assert_eq!(bench.deadline_ns(), Some(due_ns));
    bench.turn_at(due_ns - 1);
    assert_eq!((bench.device().asked.len(), bench.deadline_ns()), (0, Some(due_ns)));
    bench.turn_at(due_ns);
    assert_eq!(bench.take_ended(), [(0, Status::Timeout)]);
    assert_eq!((bench.queue.stats().snapshot().timed_out, bench.deadline_ns()), (1, None));
    assert_eq!(bench.queue.stats().snapshot().op(OpClass::Read).errors, 1);
}

#[test]
fn the_time_that_a_device_says_goes_before_that_of_the_queue() {
    let info = DeviceInfo { timeout_ns: TIMEOUT_NS / 4, ..disk() };
    let mut bench = Bench::new(info, HwQueueConfig { timeout_ns: TIMEOUT_NS, ..HwQueueConfig::default() });
    bench.device().late = [Late::End(Status::Timeout)].into_iter().collect();
    bench.submit(read(0));
    bench.issue();
    let due_ns = bench.now_ns + TIMEOUT_NS / 4;
    assert_eq!(bench.deadline_ns(), Some(due_ns));
    bench.turn_at(due_ns);
    assert_eq!(bench.take_ended(), [(0, Status::Timeout)]);
}

#[test]
fn a_long_timeout_is_noticed_10_ms_late_at_most() {
    let info = DeviceInfo { timeout_ns: 30 * TIMEOUT_NS, ..disk() };
    let mut bench = Bench::new(info, HwQueueConfig::default());
    bench.device().late = [Late::End(Status::Timeout); 2].into_iter().collect();
    bench.submit(read(0));
    bench.turn_at(1);
    bench.submit(read(1000));
    bench.turn_at(TIMEOUT_NS);
    bench.turn_at(1 + 30 * TIMEOUT_NS);
    assert_eq!(bench.take_ended(), [(0, Status::Timeout)]);
    let due_ns = bench.deadline_ns().unwrap();
    assert!((31 * TIMEOUT_NS..=31 * TIMEOUT_NS + SLACK_NS).contains(&due_ns), "{due_ns}");
    bench.turn_at(due_ns);
    assert_eq!(bench.take_ended(), [(1000, Status::Timeout)]);
}

#[test]
fn a_request_taken_while_another_waits_has_its_own_time() {
    let mut bench = bench(&[Late::End(Status::Timeout)]);
    bench.submit(read(0));
    bench.turn_at(1);
    bench.submit(read(1000));
    bench.turn_at(TIMEOUT_NS / 2);
    bench.turn_at(1 + TIMEOUT_NS);
    assert_eq!(bench.take_ended(), [(0, Status::Timeout)]);
    let due_ns = bench.deadline_ns().unwrap();
    assert!((TIMEOUT_NS * 3 / 2..=TIMEOUT_NS * 3 / 2 + SLACK_NS).contains(&due_ns), "{due_ns}");
    bench.turn_at(due_ns);
    assert_eq!(bench.take_ended(), [(1000, Status::Timeout)]);
}

#[test]
fn what_completes_while_it_is_looked_for_is_simply_complete() {
    let mut bench = bench(&[Late::End(Status::Timeout)]);
    bench.submit(read(0));
    bench.issue();
    // The device has completed it, and it is not reaped.
    bench.device().end(|_| true, Status::Ok);
    bench.turn_at(10 * TIMEOUT_NS);
    assert_eq!((bench.take_ended(), bench.device().asked.len()), (vec![(0, Status::Ok)], 0));
    assert_eq!(bench.queue.stats().snapshot().timed_out, 0);
}

#[test]
fn what_completes_while_it_is_aborted_ends_once_as_it_completed() {
    let mut bench = bench(&[Late::Abort]);
    bench.submit(read(0));
    bench.issue();
    bench.turn_at(2 * TIMEOUT_NS);
    assert_eq!((bench.device().asked.len(), bench.ended.len()), (1, 0));
    assert!(bench.snapshot().requests[0].timed_out);
    // It is not asked about again, however long the abort takes.
    assert_eq!(bench.deadline_ns(), None);
    bench.turn_at(9 * TIMEOUT_NS);
    assert_eq!(bench.device().asked.len(), 1);
    bench.end(0, Status::Ok);
    assert_eq!(bench.take_ended(), [(0, Status::Ok)]);
}

#[test]
fn the_next_request_of_a_tag_that_timed_out_has_all_its_time() {
    let mut bench = Bench::new(disk(), HwQueueConfig { depth: 1, timeout_ns: TIMEOUT_NS, ..HwQueueConfig::default() });
    bench.device().late = [Late::MoreTime, Late::Abort, Late::End(Status::Timeout)].into();
    bench.submit(read(0));
    bench.turn_at(1);
    bench.turn_at(2 * TIMEOUT_NS);
    bench.turn_at(4 * TIMEOUT_NS);
    bench.end(0, Status::Ok);
    bench.submit(read(1000));
    bench.turn_at(5 * TIMEOUT_NS);
    assert_eq!((bench.snapshot().requests[0].timed_out, bench.deadline_ns()), (false, Some(6 * TIMEOUT_NS)));
    bench.turn_at(6 * TIMEOUT_NS);
    assert_eq!(
        (bench.take_ended(), bench.device().asked.clone()),
        (vec![(0, Status::Ok), (1000, Status::Timeout)], vec![0, 0, 1000])
    );
}

#[test]
fn a_request_that_waits_for_the_driver_is_never_late() {
    let mut bench = bench(&[Late::End(Status::Timeout)]);
    bench.submit_all([read(0), read(1000)]);
    bench.issue();
    // Handed back, and not offered again for long.
    bench.device().requeue(|held| held.sector == 0);
    bench.queue.quiesce();
    bench.turn_at(TIMEOUT_NS / 2);
    bench.turn_at(2 * TIMEOUT_NS);
    assert_eq!((bench.device().asked.clone(), bench.take_ended()), (vec![1000], vec![(1000, Status::Timeout)]));
    assert_eq!(bench.deadline_ns(), None);
    // Its time begins anew.
    bench.queue.unquiesce();
    bench.turn_at(3 * TIMEOUT_NS);
    assert_eq!(bench.deadline_ns(), Some(4 * TIMEOUT_NS));
    bench.end_all();
    assert_eq!(bench.take_ok(), [0]);
}

#[test]
fn a_late_request_may_be_done_again() {
    let mut bench = bench(&[Late::Requeue, Late::End(Status::Timeout)]);
    bench.submit(read(0));
    bench.turn_at(1);
    bench.turn_at(TIMEOUT_NS + 1);
    assert_eq!((bench.queue.in_flight(), bench.device().given.len()), (1, 2));
    assert!(!bench.snapshot().requests[0].timed_out);
    bench.turn_at(2 * TIMEOUT_NS);
    assert_eq!(bench.device().asked.len(), 1);
    bench.turn_at(2 * TIMEOUT_NS + 1 + SLACK_NS);
    assert_eq!(bench.take_ended(), [(0, Status::Timeout)]);
}

#[test]
fn time_goes_on_in_a_queue_that_is_frozen_or_quiesced() {
    let mut bench = bench(&[Late::End(Status::Timeout)]);
    bench.submit(read(0));
    bench.issue();
    bench.queue.freeze();
    bench.queue.quiesce();
    assert_eq!(bench.deadline_ns(), Some(bench.now_ns + TIMEOUT_NS));
    bench.turn_at(2 * TIMEOUT_NS);
    assert_eq!((bench.take_ended(), bench.queue.is_idle()), (vec![(0, Status::Timeout)], true));
}

#[test]
fn a_second_timeout_resets_the_device_and_ends_the_others_too() {
    let mut bench = bench(&[Late::MoreTime, Late::MoreTime, Late::MoreTime, Late::Reset(Status::Timeout)]);
    bench.submit_all([read(0), read(1000), read(2000)]);
    bench.turn_at(1);
    bench.turn_at(TIMEOUT_NS + 1);
    assert_eq!((bench.device().asked.clone(), bench.ended.len()), (vec![0, 1000, 2000], 0));
    assert_eq!(bench.deadline_ns(), Some(2 * TIMEOUT_NS + 1));
    bench.turn_at(2 * TIMEOUT_NS + 1);
    // All three were late. The first reset ended the others, about which the driver is not asked.
    assert_eq!(bench.device().asked, [0, 1000, 2000, 0]);
    assert_eq!(bench.take_ended(), [0, 1000, 2000].map(|sector| (sector, Status::Timeout)));
    assert_eq!(bench.queue.stats().snapshot().timed_out, 4);
}

#[test]
fn what_the_driver_takes_back_is_not_asked_about_again_though_others_are_late() {
    let mut bench = bench(&[Late::Abort, Late::MoreTime]);
    bench.submit(read(0));
    bench.turn_at(1);
    bench.submit(read(1000));
    bench.turn_at(TIMEOUT_NS / 2);
    bench.turn_at(TIMEOUT_NS + 1);
    assert_eq!(bench.device().asked, [0]);
    bench.turn_at(2 * TIMEOUT_NS);
    bench.turn_at(4 * TIMEOUT_NS);
    assert_eq!(bench.device().asked, [0, 1000, 1000]);
    bench.end(0, Status::Timeout);
    bench.end(1000, Status::Ok);
    assert_eq!(bench.take_ended(), [(0, Status::Timeout), (1000, Status::Ok)]);
}

#[test]
fn what_cannot_be_taken_back_is_never_answered_early_but_counted() {
    let mut bench = bench(&[Late::MoreTime]);
    bench.submit(read(0));
    bench.turn_at(1);
    for times in 1..=50 {
        bench.turn_at(times * TIMEOUT_NS + 1);
        assert_eq!((bench.ended.len(), bench.queue.stats().snapshot().timed_out), (0, times));
        assert_eq!(bench.deadline_ns(), Some((times + 1) * TIMEOUT_NS + 1));
    }
    bench.queue.mark_slow(bench.now_ns);
    assert_eq!(bench.queue.stats().snapshot().slow_now, 1);
    bench.end(0, Status::Ok);
    assert_eq!((bench.take_ended(), bench.queue.stats().snapshot().slow_now), (vec![(0, Status::Ok)], 0));
}

#[test]
fn what_is_slow_is_so_while_the_device_has_it() {
    let mut bench = Bench::new(disk(), HwQueueConfig { timeout_ns: 0, ..HwQueueConfig::default() });
    let slow = |bench: &Bench| {
        let stats = bench.queue.stats().snapshot();
        (stats.slow, stats.slow_now)
    };
    bench.submit_all([read(0), read(1000)]);
    bench.turn_at(1);
    let late_ns = HwQueueConfig::default().slow_ns + 2;
    bench.queue.mark_slow(late_ns);
    assert_eq!(slow(&bench), (2, 2));
    bench.device().room = 1;
    bench.device().requeue(|held| held.sector == 0);
    bench.turn_at(late_ns);
    assert_eq!(slow(&bench), (2, 1), "it waits, and is not slow");
    bench.queue.mark_slow(late_ns + 1);
    bench.device().room = 2;
    bench.turn_at(late_ns + 2);
    assert_eq!(bench.device().sectors(), [1000, 0]);
    bench.end(0, Status::Ok);
    assert_eq!((bench.take_ok(), slow(&bench)), (vec![0], (2, 1)), "the other one is");
    bench.end(1000, Status::Ok);
    assert_eq!((bench.take_ok(), slow(&bench)), (vec![1000], (2, 0)));
}

#[test]
fn while_nothing_is_late_requests_are_gone_through_once_a_timeout() {
    let mut bench = bench(&[]);
    let (mut looks, mut last) = (0, None);
    for n in 1..=10_000_u64 {
        bench.submit(read(n * 1000));
        // Each takes 2 ms; ten seconds pass.
        bench.turn_at(n * TIMEOUT_NS / 1000);
        if n > 2 {
            bench.end((n - 2) * 1000, Status::Ok);
        }
        let due = bench.deadline_ns();
        looks += usize::from(due != last);
        last = due;
    }
    assert!((10..=12).contains(&looks), "{looks} looks in ten timeouts");
    bench.end_all();
}

#[test]
fn a_queue_may_do_without_timeouts() {
    let mut bench = Bench::new(disk(), HwQueueConfig { timeout_ns: 0, ..HwQueueConfig::default() });
    bench.submit(read(0));
    bench.issue();
    assert_eq!(bench.deadline_ns(), None);
    bench.turn_at(1 << 60);
    assert!(bench.device().asked.is_empty());
    bench.end_all();
}

#[test]
fn a_flush_may_be_late_and_fails_its_riders() {
    let info = DeviceInfo { volatile_cache: true, ..disk() };
    let mut bench = Bench::new(info, HwQueueConfig { timeout_ns: TIMEOUT_NS, ..HwQueueConfig::default() });
    bench.device().late = [Late::End(Status::Timeout)].into();
    bench.submit_all((1..3).map(|n| {
        let mut flush = bio(blkyard_mq::Op::Flush, 0, 0);
        flush.cookie = n;
        flush
    }));
    bench.turn_at(1);
    bench.turn_at(TIMEOUT_NS + 1);
    assert_eq!(bench.take_ended(), [(1, Status::Timeout), (2, Status::Timeout)]);
    assert!(bench.queue.is_idle());
}

#[test]
fn a_driver_that_is_short_does_not_move_the_time_of_what_it_has() {
    let mut bench = bench(&[Late::End(Status::Timeout)]);
    (bench.device().room, bench.device().short_of) = (1, Shortage::Device);
    bench.submit_all([read(0), read(1000)]);
    bench.turn_at(1);
    bench.turn_at(TIMEOUT_NS);
    assert_eq!(bench.deadline_ns(), Some(TIMEOUT_NS + 1));
    bench.turn_at(TIMEOUT_NS + 1);
    // In the same round: the freed tag is taken.
    assert_eq!((bench.take_ended(), bench.device().sectors()), (vec![(0, Status::Timeout)], vec![1000]));
    bench.end_all();
}

#[test]
fn a_look_for_late_requests_does_not_forget_what_is_to_be_offered_again() {
    let mut bench = bench(&[Late::MoreTime]);
    (bench.device().room, bench.device().short_of) = (1, Shortage::System);
    bench.submit_all([read(0), read(1000)]);
    bench.turn_at(1);
    bench.turn_at(TIMEOUT_NS);
    assert_eq!(bench.deadline_ns(), Some(TIMEOUT_NS + 1), "before the retry is due");
    bench.now_ns = TIMEOUT_NS + 1;
    bench.reap();
    assert_eq!(bench.device().asked, [0]);
    let retry_ns = TIMEOUT_NS + 3_000_000;
    assert_eq!(bench.deadline_ns(), Some(retry_ns), "nobody would offer it again within a second");
    bench.device().room = 2;
    bench.turn_at(retry_ns);
    assert_eq!(bench.device().sectors(), [0, 1000]);
    bench.end_all();
}

/// A device that knows requests by ids, loses its answers, and delivers them after a reset.
struct Wire {
    cids: Cids,
    sent: Vec<Cid>,
    arriving: Vec<Cid>,
    forged: Vec<Forged>,
}

impl Driver<()> for Wire {
    fn queue_rqs(&mut self, (): &mut (), _: &RegionTable, batch: &mut Batch<'_>) {
        while let Some((tag, ..)) = batch.take() {
            self.sent.push(self.cids.park(tag));
        }
    }

    fn poll(&mut self, (): &mut (), _: &RegionTable, done: &mut Done<'_>, _: u64) {
        for cid in self.arriving.drain(..) {
            match self.cids.redeem(cid) {
                Ok(tag) => done.complete(tag, Status::Ok),
                Err(forged) => self.forged.push(forged),
            }
        }
    }

    fn timed_out(&mut self, (): &mut (), _: &RegionTable, _: usize, done: &mut Done<'_>, _: u64) -> TimedOut {
        for cid in self.sent.drain(..) {
            if let Ok(tag) = self.cids.redeem(cid) {
                done.complete(tag, Status::Timeout);
            }
        }
        TimedOut::TakenBack
    }
}

#[test]
fn an_answer_that_comes_after_the_reset_does_not_end_the_next_request_of_its_tag() {
    let wire = Wire { cids: Cids::new(1), sent: Vec::new(), arriving: Vec::new(), forged: Vec::new() };
    let config = HwQueueConfig { depth: 1, timeout_ns: TIMEOUT_NS, ..HwQueueConfig::default() };
    let mut queue = HwQueue::new(wire, Arc::new(disk()), config);
    let mut ended = Vec::new();
    queue.submit(read(0));
    queue.issue(&mut (), 1);
    let lost = queue.driver_mut().sent[0];
    queue.reap(&mut (), 2 * TIMEOUT_NS, &mut |bio| ended.push((bio.cookie, bio.status)));
    queue.submit(read(1000));
    queue.issue(&mut (), 2 * TIMEOUT_NS);
    let next = queue.driver_mut().sent[0];
    assert_eq!((lost.0 & 0xffff, next.0 & 0xffff), (0, 0), "the same place");
    queue.driver_mut().arriving.push(lost);
    queue.reap(&mut (), 2 * TIMEOUT_NS + 1, &mut |bio| ended.push((bio.cookie, bio.status)));
    assert_eq!((ended.clone(), queue.in_flight()), (vec![(0, Status::Timeout)], 1));
    assert_eq!(queue.driver_mut().forged, [Forged(lost.0)]);
    queue.driver_mut().arriving.extend([next, next]);
    queue.reap(&mut (), 2 * TIMEOUT_NS + 2, &mut |bio| ended.push((bio.cookie, bio.status)));
    assert_eq!(ended, [(0, Status::Timeout), (1000, Status::Ok)]);
    assert_eq!(queue.driver_mut().forged.len(), 2, "an answer that comes twice is good once");
}
