//! A foreign back-end that loses its requests when its memory or a ring changes, or drops requests: every I/O ends, and
//! none is in flight when the memory changes.
//!
//! `LOSSY_SEEDS=N` in the environment sets the number of seeds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_attach::{AttachConfig, Attached};
use blkyard_mq::{Op, QueueKind, Status};
use blkyard_virtio::Features;

use crate::common::{Lossy, LossyConfig, PATIENCE, SLOTS, TestClock, User, config, place, until};

/// Writes and reads back its own blocks, until it is stopped.
fn keep_busy(user: &mut User, first: u64, stop: &AtomicBool) {
    let mut round = 0_u8;
    while !stop.load(Relaxed) || round == 0 {
        round = round.wrapping_add(1);
        for slot in 0..SLOTS {
            user.fill(slot, round ^ slot as u8);
            user.submit(Op::Write, first + slot, slot);
        }
        user.drain_asleep();
        for slot in (0..SLOTS).rev() {
            user.submit(Op::Read, first + slot, slot);
            user.fill(slot, 0);
        }
        user.drain_asleep();
        assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
        assert!((0..SLOTS).all(|slot| user.holds(slot, round ^ slot as u8)), "round {round}");
    }
}

#[test]
fn memory_and_queues_added_under_load_lose_no_io() {
    add_under_load(false);
}

#[test]
fn idle_polled_queue_lets_the_memory_of_another_change() {
    let (_folder, path) = place();
    let _lossy = Lossy::start(&path, LossyConfig::new(2, 1));
    let attached = Attached::open(config(&path)).unwrap();
    let mut polled = User::new(&attached, QueueKind::Poll);
    assert_eq!(polled.one(Op::Read, 0, 0), Status::Ok);
    // Its memory needs another table, and so a rest of the first.
    let mut other = User::new(&attached, QueueKind::Default);
    other.submit(Op::Read, 1, 0);
    until("the other one is served", || {
        polled.turn();
        other.turn();
        !other.ended.is_empty()
    });
    assert_eq!(other.ended.pop().unwrap().status, Status::Ok);
    assert_eq!(polled.one(Op::Read, 0, 0), Status::Ok);
    assert_eq!(attached.view().sessions, 1, "{:?}", attached.view().last_loss);
}

#[test]
fn memory_and_packed_queues_added_under_load_lose_no_io() {
    add_under_load(true);
}

fn add_under_load(packed: bool) {
    let seeds = std::env::var("LOSSY_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    for seed in 0..seeds {
        let (_folder, path) = place();
        let lossy = Lossy::start(&path, LossyConfig::new(4, seed));
        let attached = Attached::open(AttachConfig { packed, ..config(&path) }).unwrap();
        assert_eq!(attached.features().contains(Features::RING_PACKED), packed);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for number in 0..4 {
                let (attached, stop, seen) = (&attached, &stop, &lossy.seen);
                scope.spawn(move || {
                    // Each brings a queue and separate memory, while the others work.
                    until("the first is at work", || number == 0 || seen.done.load(Relaxed) > 0);
                    std::thread::sleep(Duration::from_micros(number * (200 + 700 * (seed % 12))));
                    let mut user = User::new(attached, QueueKind::Default);
                    keep_busy(&mut user, number * SLOTS, stop);
                });
            }
            std::thread::sleep(Duration::from_millis(40));
            stop.store(true, Relaxed);
        });
        // One at first, and more for those that came later.
        assert!(lossy.seen.tables.load(Relaxed) > 1, "seed {seed}: none came late");
        assert_eq!(lossy.seen.lost.load(Relaxed), 0, "seed {seed}");
        assert_eq!((attached.view().sessions, attached.view().faults), (1, 0), "seed {seed}: {:?}", attached.view());
        assert_eq!(lossy.seen.tables_running.load(Relaxed), 0, "seed {seed}: rings are stopped first");
    }
}

/// As with `timeout_s` and `gone_s` of 1 s and 2 s, and faster.
fn impatient(path: &std::path::Path) -> AttachConfig {
    AttachConfig { io_max: Duration::from_millis(300), gone_max: Duration::from_millis(900), ..config(path) }
}

#[test]
fn a_request_that_is_dropped_is_done_again() {
    for seed in 0..3 {
        let (_folder, path) = place();
        let lossy = Lossy::start(&path, LossyConfig { drop_every: 100, ..LossyConfig::new(2, seed) });
        let attached = Attached::open(impatient(&path)).unwrap();
        let mut user = User::new(&attached, QueueKind::Default);
        for round in 0..5_u8 {
            for slot in 0..SLOTS {
                user.fill(slot, round ^ slot as u8);
                user.submit(Op::Write, slot, slot);
            }
            user.drain_asleep();
            for bio in user.ended.drain(..) {
                assert_eq!(bio.status, Status::Ok, "seed {seed}, round {round}, block {}", bio.cookie);
            }
        }
        for block in 0..SLOTS {
            assert_eq!(user.one(Op::Read, block, 0), Status::Ok);
            assert!(user.holds(0, 4 ^ block as u8), "seed {seed}, block {block}");
        }
        assert!(lossy.seen.dropped.load(Relaxed) > 0 && attached.view().sessions > 1, "seed {seed}");
    }
}

#[test]
fn a_back_end_that_answers_messages_and_never_a_request_fails_io_in_time() {
    let (_folder, path) = place();
    let lossy = Lossy::start(&path, LossyConfig { drop_every: 1, ..LossyConfig::new(2, 1) });
    let clock = TestClock::new();
    let config = AttachConfig::new(&path, Arc::clone(&clock) as _);
    let (io_max, gone_max) = (config.io_max, config.gone_max);
    let attached = Attached::open(config).unwrap();
    let mut user = User::new(&attached, QueueKind::Default).by(&clock);
    user.submit(Op::Read, 5, 0);
    user.submit(Op::Write, 5, 1);
    until("it is over", || {
        user.turn_idle();
        // The other side's work takes real time.
        let dropped = lossy.seen.dropped.load(Relaxed);
        if attached.view().is_connected && dropped == 2 * lossy.seen.sessions.load(Relaxed) {
            clock.advance(Duration::from_millis(500));
        } else if !attached.view().is_connected {
            clock.advance(Duration::from_millis(1));
        }
        user.hw.is_idle()
    });
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Timeout));
    let passed = clock.passed();
    assert!(passed >= io_max + gone_max, "{passed:?}");
    assert!(lossy.seen.sessions.load(Relaxed) > 2, "it was tried again");
}

#[test]
fn a_request_that_is_dropped_each_time_fails_and_the_others_do_not() {
    let (_folder, path) = place();
    let _lossy = Lossy::start(&path, LossyConfig { drop_sector: Some(8 * 7), ..LossyConfig::new(2, 1) });
    let attached = Attached::open(impatient(&path)).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    (0..SLOTS).for_each(|slot| user.submit(Op::Read, slot, slot));
    user.drain_asleep();
    for bio in user.ended.drain(..) {
        assert_eq!(bio.status, if bio.cookie == 7 { Status::Timeout } else { Status::Ok }, "block {}", bio.cookie);
    }
    // Its slot is free again by now.
    for block in (0..SLOTS).filter(|block| *block != 7) {
        assert_eq!(user.one(Op::Read, block, 0), Status::Ok);
    }
}

#[test]
fn nothing_is_done_again_before_a_silent_back_end_has_closed_the_connection() {
    let (_folder, path) = place();
    let lossy = Lossy::start(&path, LossyConfig { drop_every: 1, clings: true, ..LossyConfig::new(2, 1) });
    let clock = TestClock::new();
    let config = AttachConfig::new(&path, Arc::clone(&clock) as _);
    let (io_max, gone_max) = (config.io_max, config.gone_max);
    let attached = Attached::open(config).unwrap();
    let mut user = User::new(&attached, QueueKind::Default).by(&clock);
    user.submit(Op::Write, 5, 0);
    until("the back-end has it", || {
        user.turn();
        lossy.seen.dropped.load(Relaxed) == 1
    });
    until("it is left", || {
        clock.advance(Duration::from_millis(100));
        user.turn();
        !attached.view().is_connected
    });
    let left = clock.passed();
    assert!(left >= io_max, "{left:?}");
    // It was left at some time during the last steps.
    let slack = Duration::from_secs(1);
    clock.advance(gone_max.saturating_sub(slack));
    user.turn();
    assert!(user.ended.is_empty(), "it may still be done");
    clock.advance(slack);
    until("it fails", || user.turn() > 0);
    assert_eq!(user.ended.pop().unwrap().status, Status::Io);
    assert_eq!(lossy.seen.dropped.load(Relaxed), 1, "it was given to nobody else");
    drop(lossy);
    let good = Lossy::start(&path, LossyConfig::new(2, 1));
    until("a good one serves", || {
        clock.advance(Duration::from_millis(500));
        user.one(Op::Write, 5, 0) == Status::Ok
    });
    drop((user, attached, good));
}

#[test]
fn a_disk_is_let_go_of_at_once_whatever_its_back_end_does() {
    // It takes the connection, and never answers: the disk is opened with a good one, which goes.
    let (_folder, path) = place();
    let lossy = Lossy::start(&path, LossyConfig::new(2, 1));
    let attached = Attached::open(config(&path)).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    assert_eq!(user.one(Op::Read, 0, 0), Status::Ok);
    drop(lossy);
    until("it is gone", || !attached.view().is_connected);
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let _silent = listener.accept().unwrap();
    let start = Instant::now();
    drop((user, attached));
    // The time limit of a message is a minute.
    assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
}

#[test]
fn a_queue_closed_in_the_middle_of_io_can_be_opened_again() {
    let (_folder, path) = place();
    let lossy = Lossy::start(&path, LossyConfig { drop_sector: Some(8 * 7), ..LossyConfig::new(1, 1) });
    let attached = Attached::open(config(&path)).unwrap();
    for _ in 0..3 {
        let mut user = User::new(&attached, QueueKind::Default);
        assert_eq!(user.one(Op::Read, 1, 0), Status::Ok);
        let dropped = lossy.seen.dropped.load(Relaxed);
        user.submit(Op::Read, 7, 0);
        until("the back-end has it", || {
            user.turn();
            lossy.seen.dropped.load(Relaxed) > dropped
        });
    }
    assert_eq!((lossy.seen.lost.load(Relaxed), attached.view().sessions), (0, 1));
}
