//! Back-ends that hang, lie or die: contained, and no acknowledged write is lost or done twice.

use std::io::Seek;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{AttachConfig, Attached};
use blkyard_mq::{Op, QueueKind, Status};

use crate::common::{Backend, Fake, Ill, SLOTS, TestClock, User, blk_config, config, disk, disk_info, place, until};

#[test]
fn what_cannot_be_attached_says_what_is_wrong_and_what_helps() {
    let soon = |path: &std::path::Path| AttachConfig { reply_max: Duration::from_millis(100), ..config(path) };
    let refused = |config: AttachConfig, words: [&str; 2]| {
        let path = config.socket.display().to_string();
        let error = Attached::open(config).unwrap_err().to_string();
        assert!(error.contains(&path) && words.iter().all(|word| error.contains(word)), "{error}");
    };
    let (_folder, path) = place();
    refused(soon(&path), ["no such socket", "start its back-end"]);
    drop(UnixListener::bind(&path).unwrap());
    refused(soon(&path), ["no process listens", "start its back-end"]);
    std::fs::remove_file(&path).unwrap();
    for (ill, words) in [
        (Ill::Silent, ["did not answer", "another front-end"]),
        (Ill::Babbling, ["is invalid", "vhost-user back-end"]),
        (Ill::NoConfig, ["CONFIG", "vhost-user-blk"]),
        (Ill::NoQueues, ["has 0", "at least one"]),
        (Ill::NoMemory, ["no slot for the memory region", "memory slots"]),
        (Ill::NoBlocks, ["block size of 0 bytes", "power of two"]),
    ] {
        let fake = Fake::start(&path, blk_config(&disk_info(), 1), ill, 1);
        let config = if ill == Ill::Silent { soon(&path) } else { config(&path) };
        refused(config, words);
        fake.join();
    }
    let fake = Fake::start(&path, blk_config(&disk_info(), 1), Ill::Swallows, 1);
    refused(AttachConfig { queues: Some(3), ..config(&path) }, ["has 1 of 3 queues", "lower ?queues=N"]);
    fake.join();
}

#[test]
fn what_a_dead_back_end_had_in_hand_is_done_by_the_next_in_the_same_order() {
    let (_folder, path) = place();
    let fake = Fake::start(&path, blk_config(&disk_info(), 1), Ill::Swallows, 1);
    let attached = Attached::open(config(&path)).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    for slot in 0..SLOTS {
        user.fill(slot, slot as u8);
        // Each block is written several times; the last one counts.
        user.submit(Op::Write, slot % 5, slot);
    }
    until("the back-end is gone", || {
        user.turn();
        !attached.view().is_connected
    });
    fake.join();
    assert!(user.ended.is_empty(), "nobody did anything");
    let device = disk();
    std::fs::remove_file(&path).unwrap();
    let backend = Backend::start(&path, &device, 1);
    user.drain_asleep();
    assert_eq!(user.ended.len() as u64, SLOTS);
    assert!(user.ended.iter().all(|bio| bio.status == Status::Ok));
    for block in 0..5 {
        let last = (0..SLOTS).rev().find(|slot| slot % 5 == block).unwrap();
        assert_eq!(user.one(Op::Read, block, 0), Status::Ok);
        assert!(user.holds(0, last as u8), "block {block}");
    }
    assert_eq!(attached.view().sessions, 2);
    drop((user, attached));
    backend.stop();
}

#[test]
fn back_ends_that_die_over_the_same_requests_are_counted_until_something_is_answered() {
    let (_folder, path) = place();
    let fake = Fake::start(&path, blk_config(&disk_info(), 1), Ill::Swallows, 5);
    let attached = Attached::open(config(&path)).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    let deaths = || attached.view().queues[0].deaths.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(deaths(), 0);
    user.submit(Op::Write, 7, 0);
    let mut said = tempfile::tempfile().unwrap();
    let log = tracing_subscriber::fmt().with_writer(Arc::new(said.try_clone().unwrap())).with_ansi(false).finish();
    tracing::subscriber::with_default(log, || {
        until("five have died", || {
            user.turn();
            deaths() == 5
        });
    });
    fake.join();
    assert!(user.ended.is_empty(), "nobody did anything");
    said.rewind().unwrap();
    let said = std::io::read_to_string(said).unwrap();
    let told: Vec<_> = said.lines().filter(|line| line.contains("in a row died")).collect();
    let words = ["req.0: 4 back-ends", "1 requests are in flight", "a Write of 8 sectors at sector 56"];
    assert!(
        told.len() == 1 && words.iter().all(|word| told[0].contains(word)),
        "at the fourth, and not before: {said}"
    );
    let device = disk();
    std::fs::remove_file(&path).unwrap();
    let backend = Backend::start(&path, &device, 1);
    user.drain_asleep();
    assert_eq!(user.ended.pop().unwrap().status, Status::Ok);
    assert_eq!(deaths(), 0, "it was answered");
    // Its next death has another cause.
    backend.stop();
    until("the good one is gone", || !attached.view().is_connected);
    user.submit(Op::Read, 7, 0);
    user.turn();
    assert_eq!(deaths(), 0, "nothing was in flight");
    let backend = Backend::start(&path, &device, 1);
    user.drain_asleep();
    drop((user, attached));
    backend.stop();
}

#[test]
fn a_back_end_that_restarts_again_and_again_under_load_loses_nothing() {
    for packed in [false, true] {
        restart_under_load(packed);
    }
}

fn restart_under_load(packed: bool) {
    const BLOCKS: u64 = 500;
    let (_folder, path) = place();
    let device = disk();
    let mut backend = Some(Backend::start(&path, &device, 2));
    let attached = Attached::open(AttachConfig { packed, ..config(&path) }).unwrap();
    assert!(attached.view().is_tracked);
    let mut users = [User::new(&attached, QueueKind::Default), User::new(&attached, QueueKind::Default)];
    for round in 1..=8_u64 {
        for (number, user) in users.iter_mut().enumerate() {
            for slot in 0..SLOTS {
                user.fill(slot, (slot + round) as u8);
                user.submit(Op::Write, number as u64 * BLOCKS + slot, slot);
            }
            user.turn();
        }
        // With some of it done, some in flight.
        backend.take().unwrap().stop();
        users.iter_mut().for_each(|user| {
            user.turn();
        });
        backend = Some(Backend::start(&path, &device, 2));
        for (number, user) in users.iter_mut().enumerate() {
            user.drain_asleep();
            assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
            for slot in (0..SLOTS).rev() {
                user.submit(Op::Read, number as u64 * BLOCKS + slot, slot);
                user.fill(slot, 0);
            }
            user.drain_asleep();
            assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
            assert!((0..SLOTS).all(|slot| user.holds(slot, (slot + round) as u8)), "queue {number}, round {round}");
        }
    }
    drop((users, attached));
    backend.take().unwrap().stop();
}

#[test]
fn a_back_end_that_breaks_rings_is_left_and_what_it_has_fails_in_the_end() {
    let (_folder, path) = place();
    let fake = Fake::start(&path, blk_config(&disk_info(), 1), Ill::Lies, 3);
    let attached = Attached::open(config(&path)).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    user.submit(Op::Read, 0, 0);
    user.submit(Op::Flush, 0, 1);
    user.drain_asleep();
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Io));
    let view = attached.view();
    assert_eq!((view.sessions, view.faults), (3, 3));
    assert_eq!(view.queues[0].violations.total(), 3, "{:?}", view.queues);
    assert_eq!(user.one(Op::Read, 0, 0), Status::Io, "until a good one comes");
    fake.join();
    std::fs::remove_file(&path).unwrap();
    let device = disk();
    let backend = Backend::start(&path, &device, 1);
    until("a good one serves", || user.one(Op::Read, 0, 0) == Status::Ok);
    drop((user, attached));
    backend.stop();
}

#[test]
fn io_for_a_back_end_that_stays_away_fails_after_its_time_and_goes_on_when_it_is_back() {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::start(&path, &device, 1);
    let clock = TestClock::new();
    let config = AttachConfig::new(&path, Arc::clone(&clock) as _);
    let gone_max = config.gone_max;
    let attached = Attached::open(config).unwrap();
    let mut user = User::new(&attached, QueueKind::Default).by(&clock);
    assert_eq!(user.one(Op::Read, 0, 0), Status::Ok);
    backend.stop();
    until("it is gone", || !attached.view().is_connected);
    user.submit(Op::Read, 0, 0);
    let step = Duration::from_millis(250);
    while clock.passed() + step < gone_max {
        clock.advance(step);
        user.turn();
        assert!(user.ended.is_empty(), "after {:?}", clock.passed());
    }
    // A connection is attempted each half second.
    (0..4).for_each(|_| clock.advance(step));
    until("it fails", || user.turn() > 0);
    assert_eq!(user.ended.pop().unwrap().status, Status::Io);
    let backend = Backend::start(&path, &device, 1);
    until("it serves again", || {
        clock.advance(step);
        user.one(Op::Read, 0, 0) == Status::Ok
    });
    drop((user, attached));
    backend.stop();
}

#[test]
fn another_disk_at_the_same_place_is_not_taken_for_ours() {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::start(&path, &device, 2);
    let attached = Attached::open(config(&path)).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    backend.stop();
    let fewer = Backend::start(&path, &device, 1);
    user.submit(Op::Read, 0, 0);
    until("the other one was looked at", || {
        user.turn();
        fewer.server.status().sessions() > 0
    });
    assert!(user.ended.is_empty() && !attached.view().is_connected);
    fewer.stop();
    let backend = Backend::start(&path, &device, 2);
    user.drain_asleep();
    assert_eq!(user.ended.pop().unwrap().status, Status::Ok);
    drop((user, attached));
    backend.stop();
}
