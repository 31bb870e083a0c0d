//! Budgets under loom: few slots, two or three queues, every order within the bound, weak memory included.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blkyard-mq --test loom_budget`
//!
//! A queue takes, returns its slots, and sleeps when it came out short. A lost wake-up is a schedule in which all
//! sleep, and fails the model; so does a lost slot. Slots in excess are counted. Each model names its bound on
//! preemptions and prints its number of orders.
#![cfg(loom)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blkyard_mq::{Budget, BudgetShare, Wake};
use loom::sync::Notify;
use loom::thread;

struct ModelLane(Notify);

impl Wake for ModelLane {
    fn wake(&self) {
        self.0.notify();
    }
}

/// Slots in use of all queues together. Not modelled: in a model one thread runs at a time.
struct Out {
    count: AtomicUsize,
    places: usize,
}

impl Out {
    fn add(&self, count: usize) {
        let out = self.count.fetch_add(count, Ordering::Relaxed) + count;
        assert!(out <= self.places, "{out} places are out of {}", self.places);
    }

    fn sub(&self, count: usize) {
        self.count.fetch_sub(count, Ordering::Relaxed);
    }
}

/// Gets `work` requests through the device, as many at a time as there are slots.
fn live(mut share: BudgetShare, lane: &ModelLane, out: &Out, mut work: usize) {
    while work > 0 {
        let took = share.take(work);
        out.add(took);
        work -= took;
        if took > 0 {
            out.sub(took);
            share.give(took);
        } else {
            lane.0.wait();
        }
    }
    // It may still be waiting for slots: dropping it must not lose those granted now.
}

fn model(name: &str, preemptions: usize, places: usize, work: &'static [usize]) {
    let orders = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        let budget = Budget::new(places, work.len());
        let out = Arc::new(Out { count: AtomicUsize::new(0), places });
        let mut queues: Vec<_> = work
            .iter()
            .map(|work| {
                let lane = Arc::new(ModelLane(Notify::new()));
                let share = budget.join(Arc::clone(&lane) as Arc<dyn Wake>).unwrap();
                (share, lane, Arc::clone(&out), *work)
            })
            .collect();
        let (share, lane, out, work) = queues.remove(0);
        let spawn = |(share, lane, out, work): (_, Arc<ModelLane>, Arc<Out>, _)| {
            thread::spawn(move || live(share, &lane, &out, work))
        };
        let others: Vec<_> = queues.into_iter().map(spawn).collect();
        live(share, &lane, &out, work);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(budget.free(), places, "places were lost");
    });
    println!("{name}: {} orders, at most {preemptions} preemptions", orders.load(Ordering::Relaxed));
}

#[test]
fn two_queues_and_one_place() {
    model("two queues, one place", 3, 1, &[1, 1]);
    model("two queues, one place, twice", 2, 1, &[2, 1]);
}

#[test]
fn two_queues_that_want_more_than_there_is() {
    model("two queues, two places", 2, 2, &[3, 2]);
}

#[test]
fn three_queues_and_one_place() {
    model("three queues, one place", 1, 1, &[1, 1, 1]);
}

#[test]
fn three_queues_and_two_places() {
    model("three queues, two places", 2, 2, &[1, 2, 1]);
}
