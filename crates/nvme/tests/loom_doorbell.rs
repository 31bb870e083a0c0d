//! Shadow doorbells under loom: a sleeping controller is woken, and sees the announced commands.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blkyard-nvme --test loom_doorbell`
//!
//! The host announces each command by itself. A write of the register is loom's `Notify`, which like an eventfd keeps a
//! signal from before the sleep. A lost wake-up leaves all threads asleep and fails the model, as happens without any
//! one of the barriers and checks. To show this, a controller may instead sleep until the host has sent all commands,
//! and check whether the register was written by then.
#![cfg(loom)]

use blkyard_nvme::doorbell::{SharedWord, announce, listen};
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::sync::{Arc, Notify};
use loom::thread;
use std::sync::atomic::AtomicBool;

/// Entries of the ring. The run wraps around its end.
const ENTRIES: u16 = 4;
const START: u16 = 3;

struct Word(AtomicU32);

impl SharedWord for Word {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }
}

struct Shared {
    doorbell: Word,
    event: Word,
    register: Notify,
    /// Whether the register was written since the controller slept.
    is_rung: loom::sync::atomic::AtomicBool,
    /// A field of each command, which its announcement makes visible.
    commands: [AtomicU32; ENTRIES as usize],
}

type Announce = fn(&Word, &Word, u16, u16) -> bool;
type Listen = fn(&Word, &Word, u16) -> u32;

/// The host sends this number of commands one by one; the controller sleeps whenever it may until it has received them
/// all. With `lost` it sleeps until the host has sent all, and records whether it was not woken.
fn run(commands: u16, announce: Announce, listen: Listen, lost: Option<std::sync::Arc<AtomicBool>>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(move || {
        let word = |value: u16| Word(AtomicU32::new(value.into()));
        let shared = Arc::new(Shared {
            doorbell: word(START),
            // Left over from an earlier sleep.
            event: word(START - 1),
            register: Notify::new(),
            is_rung: loom::sync::atomic::AtomicBool::new(false),
            commands: [0; ENTRIES as usize].map(|_| AtomicU32::new(0)),
        });
        let host = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let mut tail = START;
                for _ in 0..commands {
                    let next = (tail + 1) % ENTRIES;
                    shared.commands[usize::from(tail)].store(7, Ordering::Relaxed);
                    if announce(&shared.doorbell, &shared.event, tail, next) {
                        shared.is_rung.store(true, Ordering::Relaxed);
                        shared.register.notify();
                    }
                    tail = next;
                }
            })
        };
        let mut host = Some(host);
        let mut join = || host.take().into_iter().for_each(|host| host.join().unwrap());
        let (mut head, mut taken) = (START, 0);
        while taken < commands {
            let tail = shared.doorbell.load(Ordering::Acquire) as u16;
            while head != tail {
                assert_eq!(shared.commands[usize::from(head)].load(Ordering::Relaxed), 7, "announced, and not there");
                head = (head + 1) % ENTRIES;
                taken += 1;
            }
            if taken == commands || listen(&shared.doorbell, &shared.event, head) != u32::from(head) {
                continue;
            }
            let Some(lost) = &lost else {
                shared.register.wait();
                continue;
            };
            join();
            if !shared.is_rung.swap(false, Ordering::Relaxed) {
                lost.store(true, Ordering::Relaxed);
                break;
            }
        }
        join();
    });
}

/// Whether a controller can miss a wake-up.
fn is_lost(announce: Announce, listen: Listen) -> bool {
    let lost = std::sync::Arc::new(AtomicBool::new(false));
    run(2, announce, listen, Some(std::sync::Arc::clone(&lost)));
    lost.load(Ordering::Relaxed)
}

#[test]
fn a_sleeping_controller_is_woken() {
    run(1, announce, listen, None);
    run(2, announce, listen, None);
    assert!(!is_lost(announce, listen));
}

/// [`announce`] without its barrier.
fn announce_without_barrier(doorbell: &Word, event: &Word, old: u16, new: u16) -> bool {
    doorbell.store(new.into(), Ordering::Release);
    let event = event.load(Ordering::Relaxed) as u16;
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// [`listen`] without its barrier.
fn listen_without_barrier(doorbell: &Word, event: &Word, seen: u16) -> u32 {
    event.store(seen.into(), Ordering::Relaxed);
    doorbell.load(Ordering::Acquire)
}

/// [`listen`] without a second look.
fn listen_without_look(_: &Word, event: &Word, seen: u16) -> u32 {
    event.store(seen.into(), Ordering::Relaxed);
    fence(Ordering::SeqCst);
    seen.into()
}

#[test]
fn each_precaution_is_needed() {
    assert!(is_lost(announce_without_barrier, listen), "the host's barrier");
    assert!(is_lost(announce, listen_without_barrier), "the controller's barrier");
    assert!(is_lost(announce, listen_without_look), "the second look");
}
