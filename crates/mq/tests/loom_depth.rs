//! `SharedDepth` under loom: the state shared by the queues of one device, weak memory included.
//!
//! `RUSTFLAGS="--cfg loom -C overflow-checks" cargo test --release -p blkyard-mq --test loom_depth`
//!
//! Most values that a queue reads of others may be stale. Two things must hold:
//!
//! * a queue that has read a new value of the news counter reads the change that it announces, since it does not check
//!   again;
//! * the completion counts never decrease when a slot gets a new owner. A decrease is a subtraction that overflows in
//!   the regulator, hence the overflow checks.
//!
//! Built with the source files, since their items are private. Each model names its bound on preemptions and prints its
//! number of orders.
#![cfg(loom)]

#[path = "../src/sched/fair/depth.rs"]
mod depth;
#[path = "../src/sched/fair/shared.rs"]
#[expect(dead_code, reason = "only the scheduler uses all of it")]
mod shared;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use depth::{TURN_ENDS, TURN_NS};
use loom::thread;
use shared::{ALONE_NS, DepthShare, LOOK_NS, SharedDepth};

/// Cost of one bio.
const COST: u64 = 64 << 10;
/// A cost beyond any limit that is measured here, and far below the limit before the first measurement.
const FAR: u64 = 1 << 30;

fn model(name: &str, preemptions: usize, story: impl Fn(SharedDepth) + Sync + Send + 'static) {
    let orders = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        story(SharedDepth::default());
    });
    println!("{name}: {} orders, at most {preemptions} preemptions", orders.load(Ordering::Relaxed));
}

/// A round in which the queue would submit one more bio.
fn look(share: &mut DepthShare, now_ns: u64) {
    share.wants(now_ns);
    share.fits(COST, true, now_ns);
}

#[test]
fn a_queue_that_reads_news_knows_the_other_queue() {
    model("a queue joins", 3, |shared| {
        let mut first = shared.join(0, 100);
        look(&mut first, 1);
        first.took(COST);
        look(&mut first, 2);
        assert!(!first.has_company());
        let other = thread::spawn(move || {
            let mut second = shared.join(0, 100);
            second.wants(3);
            second
        });
        look(&mut first, 3);
        let _second = other.join().unwrap();
        // The join above makes this round current, except for values that round 3 has read already.
        look(&mut first, 4);
        assert!(first.has_company(), "it takes the device for its own");
    });
}

#[test]
fn two_queues_that_begin_at_once_know_each_other() {
    fn begin(mut share: DepthShare) -> DepthShare {
        share.wants(1);
        share.took(COST);
        look(&mut share, 2);
        share
    }
    model("two queues begin", 2, |shared| {
        let second = shared.join(0, 100);
        let other = thread::spawn(move || begin(second));
        let mut shares = [begin(shared.join(0, 100)), other.join().unwrap()];
        for share in &mut shares {
            look(share, 3);
            assert!(share.has_company());
        }
    });
}

#[test]
fn a_queue_that_reads_news_knows_the_limit() {
    model("the limit changes", 3, |shared| {
        // The measured queue is idle now: otherwise the other one would check in every round.
        let mut measured = shared.join(0, 100);
        measured.wants(1);
        (0..2 * TURN_ENDS).for_each(|_| measured.took(COST));
        // The limit was reached: otherwise the measurement says nothing about the depth.
        measured.wait_ns(COST, 1);
        let mut now_ns = 2 * ALONE_NS;
        (0..TURN_ENDS).for_each(|_| measured.ended(COST, false, now_ns));
        let mut alone = shared.join(0, 100);
        look(&mut alone, now_ns);
        alone.took(COST);
        now_ns += TURN_NS;
        look(&mut alone, now_ns);
        assert!(!alone.has_company() && !alone.is_far_beyond(FAR));
        let other = thread::spawn(move || {
            measured.ended(COST, false, now_ns);
            measured
        });
        look(&mut alone, now_ns + 1);
        let _measured = other.join().unwrap();
        look(&mut alone, now_ns + 2);
        assert!(!alone.has_company() && alone.is_far_beyond(FAR), "it goes by the old limit");
    });
}

#[test]
fn counts_never_decrease_when_a_submitter_gets_a_new_owner() {
    model("a submitter gets a new owner", 2, |shared| {
        let mut leaves = shared.join(0, 100);
        (0..3).for_each(|_| leaves.took(COST));
        let other = thread::spawn(move || {
            // Each is written down at once; the regulator counts both.
            leaves.ended(COST, false, LOOK_NS);
            leaves.ended(COST, false, 2 * LOOK_NS);
        });
        // On the same submitter, if the other owner has left it by now.
        let mut joins = shared.join(0, 100);
        joins.took(COST);
        joins.ended(COST, false, 5 * LOOK_NS);
        other.join().unwrap();
    });
}
