//! The ownership word under loom: one owner at a time, no work lost, nobody left asleep.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blkyard-mem --test loom_baton`
//!
//! What is kept is a `loom` cell: touching it from two threads without the baton's order between them fails the model,
//! however far apart in time. Models without a bound are explored to the end; each prints how many orders that were.
#![cfg(loom)]

mod common;

use blkyard_mem::{Baton, Holder};
use common::explore;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Notify};
use loom::thread;

/// A counter that is no atomic: what a hardware queue is to the baton.
struct Kept(UnsafeCell<usize>);

impl Kept {
    fn add(&mut self, n: usize) {
        // Two accesses, so that an intruder between them is found out.
        let before = self.value();
        // SAFETY: that nobody else is here is what the model checks; loom fails it before it could do harm.
        self.0.with_mut(|kept| unsafe { *kept = before + n });
    }

    fn value(&self) -> usize {
        // SAFETY: as above.
        self.0.with(|kept| unsafe { *kept })
    }
}

struct Yard {
    baton: Baton<Kept>,
    /// What each thread has published and no owner has taken yet.
    published: Vec<AtomicUsize>,
}

impl Yard {
    fn new(threads: usize) -> Arc<Yard> {
        let published = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        Arc::new(Yard { baton: Baton::new(Kept(UnsafeCell::new(0))), published })
    }

    /// Publishes one item and goes to the baton.
    fn submit(&self, me: usize) {
        // Relaxed: it is the baton's word that makes it visible.
        self.published[me].store(1, Ordering::Relaxed);
        if let Some(holder) = self.baton.take() {
            self.crank(holder);
        }
    }

    fn crank(&self, mut holder: Holder<'_, Kept>) {
        loop {
            holder.heed();
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

    /// After all threads are done: every item was taken, once, and the baton is idle.
    fn check(&self, items: usize) {
        let Some(holder) = self.baton.take_if_idle() else { panic!("the baton was not put down") };
        assert_eq!(holder.value(), items, "work was lost, or done twice");
        assert!(holder.give_back().is_ok());
    }
}

fn submitters(threads: usize, rounds: usize, preemptions: Option<usize>) {
    explore(&format!("{threads} submitters of {rounds}"), preemptions, move || {
        let yard = Yard::new(threads);
        let run = move |yard: &Yard, me: usize| {
            for _ in 0..rounds {
                // An item at a time: the place is free once an owner has taken it, and it was, or will be.
                while yard.published[me].load(Ordering::Relaxed) == 1 {
                    thread::yield_now();
                }
                yard.submit(me);
            }
        };
        let others: Vec<_> = (1..threads)
            .map(|me| {
                let yard = Arc::clone(&yard);
                thread::spawn(move || run(&yard, me))
            })
            .collect();
        run(&yard, 0);
        others.into_iter().for_each(|other| other.join().unwrap());
        yard.check(threads * rounds);
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

/// A submitter that sleeps until its item is taken, while another only looks in; whoever takes it wakes it. If the
/// baton could be put down over unheeded work, the sleeper would sleep for ever, and loom would say so.
#[test]
fn a_sleeper_is_woken_by_whoever_took_its_work() {
    explore("a sleeper", None, || {
        struct Bed {
            asleep: AtomicBool,
            woken: Notify,
        }
        let yard = Yard::new(2);
        let bed = Arc::new(Bed { asleep: AtomicBool::new(false), woken: Notify::new() });
        let crank = |yard: &Yard, bed: &Bed, mut holder: Holder<'_, Kept>| {
            loop {
                holder.heed();
                for published in &yard.published {
                    if published.load(Ordering::Relaxed) == 1 {
                        published.store(0, Ordering::Relaxed);
                        holder.add(1);
                    }
                }
                if bed.asleep.load(Ordering::Relaxed) && yard.published[0].load(Ordering::Relaxed) == 0 {
                    bed.asleep.store(false, Ordering::Release);
                    bed.woken.notify();
                }
                match holder.give_back() {
                    Ok(()) => return,
                    Err(still) => holder = still,
                }
            }
        };
        let other = {
            let (yard, bed) = (Arc::clone(&yard), Arc::clone(&bed));
            thread::spawn(move || {
                yard.published[1].store(1, Ordering::Relaxed);
                if let Some(holder) = yard.baton.take() {
                    crank(&yard, &bed, holder);
                }
                if let Some(holder) = yard.baton.take_if_idle() {
                    crank(&yard, &bed, holder);
                }
            })
        };
        yard.published[0].store(1, Ordering::Relaxed);
        bed.asleep.store(true, Ordering::Relaxed);
        match yard.baton.take() {
            Some(holder) => crank(&yard, &bed, holder),
            None => {
                while bed.asleep.load(Ordering::Acquire) {
                    bed.woken.wait();
                }
            }
        }
        other.join().unwrap();
        yard.check(2);
    });
}
