//! The baton under loom: one owner at a time, no lost work, no thread left asleep.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blkyard-mem --test loom_baton`
//!
//! The protected value is a `loom` cell: access from two threads without the baton's ordering between them fails the
//! model, however far apart in time. Models without a bound are explored completely; each prints its number of orders.
#![cfg(loom)]

mod common;

use blkyard_mem::{Baton, Holder};
use common::explore;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Notify};
use loom::thread;

/// A plain counter, in place of the hardware queue.
struct Kept(UnsafeCell<usize>);

impl Kept {
    fn add(&mut self, n: usize) {
        // Two accesses, so that an intruder between them is found out.
        let before = self.value();
        // SAFETY: the model checks that no other thread is here; loom fails it before any harm.
        self.0.with_mut(|kept| unsafe { *kept = before + n });
    }

    fn value(&self) -> usize {
        // SAFETY: as above.
        self.0.with(|kept| unsafe { *kept })
    }
}

struct SharedQueue {
    baton: Baton<Kept>,
    /// Items published by each thread that no owner has taken yet.
    published: Vec<AtomicUsize>,
}

impl SharedQueue {
    fn new(threads: usize) -> Arc<SharedQueue> {
        let published = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        Arc::new(SharedQueue { baton: Baton::new(Kept(UnsafeCell::new(0))), published })
    }

    /// Publishes one item and goes to the baton.
    fn submit(&self, me: usize) {
        // Relaxed: the baton's word makes it visible.
        self.published[me].store(1, Ordering::Relaxed);
        if let Some(holder) = self.baton.take() {
            self.run_once(holder);
        }
    }

    fn run_once(&self, mut holder: Holder<'_, Kept>) {
        loop {
            holder.take_pending();
            for published in &self.published {
                if published.load(Ordering::Relaxed) == 1 {
                    published.store(0, Ordering::Relaxed);
                    holder.add(1);
                }
            }
            match holder.give_back() {
                Ok(()) => return,
                Err(still) => holder = still,
            }
        }
    }

    /// At the end of all threads: every item was taken, once, and the baton is idle.
    fn check(&self, items: usize) {
        let Some(holder) = self.baton.take_if_idle() else { panic!("the baton was not put down") };
        assert_eq!(holder.value(), items, "work was lost, or done twice");
        assert!(holder.give_back().is_ok());
    }
}

fn submitters(threads: usize, rounds: usize, preemptions: Option<usize>) {
    explore(&format!("{threads} submitters of {rounds}"), preemptions, move || {
        let shared = SharedQueue::new(threads);
        let run = move |shared: &SharedQueue, me: usize| {
            for _ in 0..rounds {
                // One item at a time: the slot is free once an owner has taken it, now or later.
                while shared.published[me].load(Ordering::Relaxed) == 1 {
                    thread::yield_now();
                }
                shared.submit(me);
            }
        };
        let others: Vec<_> = (1..threads)
            .map(|me| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || run(&shared, me))
            })
            .collect();
        run(&shared, 0);
        others.into_iter().for_each(|other| other.join().unwrap());
        shared.check(threads * rounds);
    });
}

#[test]
fn two_submitters_lose_nothing() {
    submitters(2, 1, None);
}

#[test]
fn two_submitters_lose_nothing_twice() {
    submitters(2, 2, Some(5));
}

#[test]
fn three_submitters_lose_nothing() {
    submitters(3, 1, Some(4));
}

/// A submitter sleeps until its item is taken, while another only polls; the thread that takes it wakes it. If the
/// baton could be released with the pending bit set, the sleeper would sleep without end, and loom would report it.
#[test]
fn a_sleeper_is_woken_by_whoever_took_its_work() {
    explore("a sleeper", None, || {
        struct Parker {
            asleep: AtomicBool,
            woken: Notify,
        }
        let shared = SharedQueue::new(2);
        let parker = Arc::new(Parker { asleep: AtomicBool::new(false), woken: Notify::new() });
        let run_once = |shared: &SharedQueue, parker: &Parker, mut holder: Holder<'_, Kept>| {
            loop {
                holder.take_pending();
                for published in &shared.published {
                    if published.load(Ordering::Relaxed) == 1 {
                        published.store(0, Ordering::Relaxed);
                        holder.add(1);
                    }
                }
                if parker.asleep.load(Ordering::Relaxed) && shared.published[0].load(Ordering::Relaxed) == 0 {
                    parker.asleep.store(false, Ordering::Release);
                    parker.woken.notify();
                }
                match holder.give_back() {
                    Ok(()) => return,
                    Err(still) => holder = still,
                }
            }
        };
        let other = {
            let (shared, parker) = (Arc::clone(&shared), Arc::clone(&parker));
            thread::spawn(move || {
                shared.published[1].store(1, Ordering::Relaxed);
                if let Some(holder) = shared.baton.take() {
                    run_once(&shared, &parker, holder);
                }
                if let Some(holder) = shared.baton.take_if_idle() {
                    run_once(&shared, &parker, holder);
                }
            })
        };
        shared.published[0].store(1, Ordering::Relaxed);
        parker.asleep.store(true, Ordering::Relaxed);
        match shared.baton.take() {
            Some(holder) => run_once(&shared, &parker, holder),
            None => {
                while parker.asleep.load(Ordering::Acquire) {
                    parker.woken.wait();
                }
            }
        }
        other.join().unwrap();
        shared.check(2);
    });
}
