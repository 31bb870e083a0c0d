//! Sleep and wake-up under loom: no wake-up is lost, and no command stays in a mailbox while its owner sleeps.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blkyard-mem --test loom_wake`
//!
//! The sleeper is a small lane: it takes a call, looks for work, asks whether it may sleep, and sleeps until it is
//! signalled. A signal is loom's `Notify`, which like an eventfd keeps one that comes before the sleep. A lost wake-up
//! is an order of events in which all sleep, and fails the model. Each prints its number of orders.
#![cfg(loom)]

mod common;

use blkyard_mem::{Mailbox, WakeFlag};
use common::explore;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Notify};
use loom::thread;

struct Sleeper {
    flag: WakeFlag,
    signal: Notify,
    mailbox: Mailbox<usize>,
    /// Published by a plain store: only the flag makes it visible.
    published: AtomicUsize,
}

impl Sleeper {
    fn new() -> Arc<Sleeper> {
        let (flag, mailbox) = (WakeFlag::default(), Mailbox::default());
        Arc::new(Sleeper { flag, signal: Notify::new(), mailbox, published: AtomicUsize::new(0) })
    }

    fn wake(&self) {
        self.flag.wake(|| self.signal.notify());
    }

    fn send(&self, command: usize) {
        assert!(self.mailbox.send(command).is_ok());
        self.wake();
    }

    /// Polls until `look` has found all, with sleeps in between.
    fn run(&self, mut look: impl FnMut(&Sleeper) -> bool) {
        loop {
            self.flag.take_call();
            if look(self) {
                return;
            }
            if self.flag.prepare_wait() {
                self.signal.wait();
                self.flag.finish_wait();
            }
        }
    }

    /// Until so many commands were taken.
    fn take(&self, count: usize) -> Vec<usize> {
        let mut taken = Vec::new();
        self.run(|sleeper| {
            if sleeper.mailbox.is_pending() {
                taken.append(&mut sleeper.mailbox.take());
            }
            taken.len() == count
        });
        taken
    }
}

fn spawn(sleeper: &Arc<Sleeper>, life: impl FnOnce(&Sleeper) + 'static) -> thread::JoinHandle<()> {
    let sleeper = Arc::clone(sleeper);
    thread::spawn(move || life(&sleeper))
}

#[test]
fn a_sleeper_sees_what_was_published_before_the_call() {
    explore("a store and a call", None, || {
        let sleeper = Sleeper::new();
        let waker = spawn(&sleeper, |sleeper| {
            sleeper.published.store(1, Ordering::Relaxed);
            sleeper.wake();
        });
        sleeper.run(|sleeper| sleeper.published.load(Ordering::Relaxed) == 1);
        waker.join().unwrap();
    });
}

#[test]
fn calls_of_two_wakers_are_one_release_sequence() {
    explore("two stores and two calls", Some(3), || {
        let sleeper = Sleeper::new();
        let wakers = [1, 2].map(|amount| {
            spawn(&sleeper, move |sleeper| {
                sleeper.published.fetch_add(amount, Ordering::Relaxed);
                sleeper.wake();
            })
        });
        sleeper.run(|sleeper| sleeper.published.load(Ordering::Relaxed) == 3);
        wakers.into_iter().for_each(|waker| waker.join().unwrap());
    });
}

#[test]
fn a_sleep_ended_by_another_event_loses_no_call() {
    explore("a call and a completion", Some(3), || {
        let sleeper = Sleeper::new();
        // A completion ends the sleep directly, like that of a ring, without the flag.
        let completion = Arc::new(AtomicUsize::new(0));
        let device = {
            let completion = Arc::clone(&completion);
            spawn(&sleeper, move |sleeper| {
                completion.store(1, Ordering::Release);
                sleeper.signal.notify();
            })
        };
        let waker = spawn(&sleeper, |sleeper| sleeper.send(7));
        let mut taken = Vec::new();
        sleeper.run(|sleeper| {
            if sleeper.mailbox.is_pending() {
                taken.append(&mut sleeper.mailbox.take());
            }
            taken.len() == 1 && completion.load(Ordering::Acquire) == 1
        });
        device.join().unwrap();
        waker.join().unwrap();
    });
}

#[test]
fn no_command_stays_behind_while_its_owner_sleeps() {
    explore("a command", None, || {
        let sleeper = Sleeper::new();
        let sender = spawn(&sleeper, |sleeper| sleeper.send(1));
        assert_eq!(sleeper.take(1), [1]);
        sender.join().unwrap();
    });
    explore("two commands of one", Some(4), || {
        let sleeper = Sleeper::new();
        let sender = spawn(&sleeper, |sleeper| {
            sleeper.send(1);
            sleeper.send(2);
        });
        assert_eq!(sleeper.take(2), [1, 2]);
        sender.join().unwrap();
    });
    explore("two commands of two", Some(3), || {
        let sleeper = Sleeper::new();
        let senders = [1, 2].map(|command| spawn(&sleeper, move |sleeper| sleeper.send(command)));
        let mut taken = sleeper.take(2);
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}

/// The queue of an attached disk has no flag to sleep by: each command signals the eventfd that its lane listens to.
#[test]
fn an_eventfd_for_each_command_leaves_none_behind() {
    explore("two commands and an eventfd", Some(4), || {
        let sleeper = Sleeper::new();
        let sender = spawn(&sleeper, |sleeper| {
            for command in [1, 2] {
                assert!(sleeper.mailbox.send(command).is_ok());
                sleeper.signal.notify();
            }
        });
        let mut taken = Vec::new();
        while taken.len() < 2 {
            if sleeper.mailbox.is_pending() {
                taken.append(&mut sleeper.mailbox.take());
            } else {
                sleeper.signal.wait();
            }
        }
        assert_eq!(taken, [1, 2]);
        sender.join().unwrap();
    });
}

#[test]
fn a_command_is_taken_or_comes_back_when_the_owner_ends() {
    explore("a command and the end", None, || {
        let sleeper = Sleeper::new();
        let kept = std::sync::Arc::new(());
        let mailbox = Arc::new(Mailbox::default());
        let sender = {
            let (mailbox, kept) = (Arc::clone(&mailbox), std::sync::Arc::clone(&kept));
            spawn(&sleeper, move |_| drop(mailbox.send(kept)))
        };
        mailbox.close();
        sender.join().unwrap();
        assert_eq!(std::sync::Arc::strong_count(&kept), 1, "whoever waits for an answer would wait for ever");
    });
}
