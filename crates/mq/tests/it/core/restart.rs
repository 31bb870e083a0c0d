//! Requests left by the driver are offered again, always and not too often: each shortage has its own restart.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blkyard_mq::{Budget, HwQueueConfig, Shortage, Status, Wake};

use crate::core::hand::{Bench, disk, read};

const RETRY_NS: u64 = 3_000_000;

fn full(room: usize, short_of: Shortage) -> Bench {
    // Without timeouts, so that the only deadline is that of the restart.
    let mut bench = Bench::new(disk(), HwQueueConfig { timeout_ns: 0, ..HwQueueConfig::default() });
    (bench.device().room, bench.device().short_of) = (room, short_of);
    bench.submit_all((0..4).map(|n| read(n * 1000)));
    bench.issue();
    bench
}

#[test]
fn a_full_device_that_has_something_is_offered_more_when_that_comes_back() {
    let mut bench = full(1, Shortage::Device);
    assert_eq!((bench.deadline_ns(), bench.queue.has_work()), (None, false), "nobody looks at the clock");
    bench.device().end(|_| true, Status::Ok);
    assert_eq!(bench.reap(), 1);
    // The caller of reap need not know that requests wait: the queue reports work.
    assert!(bench.queue.has_work());
    assert_eq!(bench.issue(), 1);
    assert!(!bench.queue.has_work());
    bench.device().room = usize::MAX;
    bench.end_all();
}

#[test]
fn a_request_that_comes_back_to_be_done_again_is_work() {
    let mut bench = full(4, Shortage::Device);
    for _ in 0..4 {
        bench.device().requeue(|_| true);
    }
    bench.reap();
    assert_eq!((bench.queue.has_work(), bench.queue.in_flight()), (true, 0));
    assert_eq!(bench.issue(), 4);
    bench.end_all();
}

#[test]
fn a_full_device_that_has_nothing_is_asked_again_after_three_milliseconds() {
    let mut bench = full(0, Shortage::Device);
    let due_ns = bench.now_ns + RETRY_NS;
    assert_eq!((bench.deadline_ns(), bench.queue.has_work()), (Some(due_ns), false));
    bench.device().room = usize::MAX;
    bench.turn_at(due_ns - 1);
    assert_eq!((bench.device().offers, bench.queue.in_flight()), (1, 0), "not before its time");
    bench.turn_at(due_ns);
    assert_eq!((bench.device().offers, bench.queue.in_flight()), (2, 4));
    bench.end_all();
}

#[test]
fn a_shortage_that_nobody_tells_of_is_waited_out_even_with_requests_in_flight() {
    let mut bench = full(1, Shortage::System);
    assert_eq!(bench.deadline_ns(), Some(bench.now_ns + RETRY_NS));
    bench.submit(read(9000));
    bench.turn();
    assert_eq!(bench.device().offers, 1);
    // A completion may have freed the missing resource.
    bench.end(0, Status::Ok);
    assert_eq!((bench.device().offers, bench.device().sectors()), (2, vec![1000]));
    bench.device().room = usize::MAX;
    bench.end_all();
}

#[test]
fn what_only_the_lane_is_short_of_is_offered_in_the_next_round() {
    let mut bench = full(1, Shortage::Lane);
    assert_eq!((bench.queue.has_work(), bench.deadline_ns()), (true, None));
    bench.device().room = 3;
    bench.turn();
    assert_eq!((bench.queue.in_flight(), bench.queue.has_work()), (3, true));
    bench.device().room = 4;
    bench.turn();
    assert_eq!((bench.queue.in_flight(), bench.queue.has_work()), (4, false));
    bench.end_all();
}

#[test]
fn a_queue_that_is_quiesced_does_not_wake_its_lane_for_a_retry() {
    let mut bench = full(0, Shortage::System);
    bench.queue.quiesce();
    bench.turn_at(10_000_000);
    assert_eq!((bench.deadline_ns(), bench.queue.has_work()), (None, false));
    bench.queue.unquiesce();
    bench.device().room = usize::MAX;
    bench.turn();
    assert_eq!(bench.queue.in_flight(), 4);
    bench.end_all();
}

#[test]
fn how_busy_the_device_is_goes_up_with_what_it_leaves_and_down_to_nothing() {
    let mut bench = full(0, Shortage::Lane);
    let mut seen = vec![bench.snapshot().dispatch_busy];
    for _ in 0..9 {
        bench.turn();
        seen.push(bench.snapshot().dispatch_busy);
    }
    assert_eq!(seen, [2, 3, 4, 5, 6, 7, 8, 9, 9, 9]);
    bench.device().room = usize::MAX;
    bench.turn();
    let mut seen = vec![bench.snapshot().dispatch_busy];
    for n in 0..7 {
        bench.submit(read(100_000 + n * 1000));
        bench.turn();
        seen.push(bench.snapshot().dispatch_busy);
    }
    assert_eq!(seen, [7, 6, 5, 4, 3, 2, 1, 0]);
    bench.end_all();
}

#[derive(Default)]
struct Doorbell(AtomicUsize);

impl Wake for Doorbell {
    fn wake(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Doorbell {
    fn rang(&self) -> bool {
        self.0.swap(0, Ordering::Relaxed) > 0
    }
}

fn budgeted(budget: &Budget) -> (Bench, Arc<Doorbell>) {
    let mut bench = Bench::new(disk(), HwQueueConfig { timeout_ns: 0, ..HwQueueConfig::default() });
    let eventfd = Arc::new(Doorbell::default());
    bench.queue.set_budget(Some(budget.join(Arc::clone(&eventfd) as Arc<dyn Wake>).unwrap()));
    (bench, eventfd)
}

#[test]
fn a_queue_short_of_budget_is_woken_when_another_gives_places_back() {
    let budget = Budget::new(4, 2);
    let ((mut one, one_eventfd), (mut two, two_eventfd)) = (budgeted(&budget), budgeted(&budget));
    one.submit_all((0..4).map(|n| read(n * 1000)));
    two.submit_all((0..4).map(|n| read(n * 1000)));
    one.turn();
    two.turn();
    assert_eq!((one.queue.in_flight(), two.queue.in_flight(), budget.free()), (4, 0, 0));
    assert_eq!((two.deadline_ns(), two.queue.has_work()), (None, false), "it sleeps, and will be woken");
    one.end(0, Status::Ok);
    assert_eq!((one_eventfd.rang(), two_eventfd.rang()), (false, true));
    two.turn();
    assert_eq!(two.queue.in_flight(), 1);
    while one.queue.in_flight() > 0 {
        one.device().end(|_| true, Status::Ok);
        one.turn();
    }
    assert!(two_eventfd.rang());
    two.turn();
    assert_eq!(two.queue.in_flight(), 4);
    two.end_all();
    assert_eq!(budget.free(), 4);
}

#[test]
fn what_is_not_offered_keeps_no_places_from_others() {
    let budget = Budget::new(4, 2);
    let ((mut one, _), (mut two, _)) = (budgeted(&budget), budgeted(&budget));
    one.device().room = 1;
    one.submit_all((0..4).map(|n| read(n * 1000)));
    one.turn();
    assert_eq!(budget.free(), 3, "three were refused");
    one.device().requeue(|_| true);
    one.queue.quiesce();
    one.turn();
    assert_eq!(budget.free(), 4, "a request that came back has no place");
    two.submit_all((0..4).map(|n| read(n * 1000)));
    two.turn();
    assert_eq!(two.queue.in_flight(), 4);
    one.queue.unquiesce();
    one.turn();
    assert_eq!(one.queue.in_flight(), 0);
    two.end_all();
    one.device().room = usize::MAX;
    one.end_all();
    assert_eq!(budget.free(), 4);
}

#[test]
fn a_driver_short_of_something_is_left_alone_though_the_budget_is_short_too() {
    let budget = Budget::new(2, 2);
    let (mut bench, eventfd) = budgeted(&budget);
    (bench.device().room, bench.device().short_of) = (0, Shortage::System);
    bench.submit_all((0..3).map(|n| read(n * 1000)));
    bench.issue();
    assert_eq!(bench.deadline_ns(), Some(bench.now_ns + RETRY_NS));
    // Its own slots came back to it, which is no reason to retry at once.
    eventfd.rang();
    for _ in 0..10 {
        bench.turn();
    }
    assert_eq!((bench.device().offers, eventfd.rang(), budget.free()), (1, false, 2));
    bench.device().room = usize::MAX;
    bench.turn_at(10_000_000);
    assert_eq!(bench.queue.in_flight(), 2);
    bench.device().end(|_| true, Status::Ok);
    bench.turn();
    bench.end_all();
}
