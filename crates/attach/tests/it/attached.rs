//! A disk attached to a back-end of ours: written data is read back, and a sleeper is called.

use std::sync::Arc;

use blkyard_attach::{AttachConfig, Attached};
use blkyard_mem::Region;
use blkyard_mq::{BlockDevice, DeviceInfo, Op, QueueKind, Status};
use blkyard_virtio::Features;

use crate::common::{Backend, SLOTS, User, config, disk, place, until};

#[test]
fn what_is_written_through_any_queue_is_read_back_through_any_other() {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::start(&path, &device, 2);
    let attached = Attached::open(config(&path)).unwrap();
    assert_eq!((attached.queues_max(), attached.info().capacity_sectors), (2, 16384));
    let info = attached.info();
    assert!(info.volatile_cache && !info.read_only && info.limits.discard_sectors_max > 0, "{info:?}");
    let mut users = [User::new(&attached, QueueKind::Default), User::new(&attached, QueueKind::Poll)];
    let names: Vec<_> = attached.view().queues.into_iter().map(|queue| queue.name).collect();
    assert_eq!(names, ["req.0", "req_poll.1"]);
    for block in 0..SLOTS {
        let user = &mut users[block as usize % 2];
        user.fill(block, block as u8 + 1);
        user.submit(Op::Write, block * 3, block);
    }
    users.iter_mut().for_each(User::drain);
    assert!(users.iter().all(|user| user.ended.iter().all(|bio| bio.status == Status::Ok)));
    for block in 0..SLOTS {
        let user = &mut users[1 - block as usize % 2];
        assert_eq!(user.one(Op::Read, block * 3, block), Status::Ok);
        assert!(user.holds(block, block as u8 + 1), "block {block}");
    }
    let user = &mut users[0];
    assert_eq!(user.one(Op::Flush, 0, 0), Status::Ok);
    for (op, block) in [(Op::Discard, 0), (Op::WriteZeroes, 3)] {
        assert_eq!(user.one(op, block, 0), Status::Ok);
        user.fill(5, 9);
        assert_eq!(user.one(Op::Read, block, 5), Status::Ok);
        assert!(user.holds(5, 0), "{op:?}");
    }
    assert!(attached.view().queues.iter().all(|queue| queue.violations.total() == 0));
    drop(users);
    drop(attached);
    backend.stop();
}

#[test]
fn memory_comes_and_goes_with_io_in_flight() {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::start(&path, &device, 2);
    let attached = Attached::open(config(&path)).unwrap();
    let [mut one, mut other] = [User::new(&attached, QueueKind::Default), User::new(&attached, QueueKind::Default)];
    one.check_changing_memory();
    assert_eq!(other.one(Op::Read, 0, 0), Status::Ok);
    other.check_changing_memory();
    drop((one, other, attached));
    backend.stop();
}

#[test]
fn packed_rings_do_the_same() {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::start(&path, &device, 1);
    let attached = Attached::open(AttachConfig { packed: true, ..config(&path) }).unwrap();
    assert!(attached.features().contains(Features::RING_PACKED));
    let mut user = User::new(&attached, QueueKind::Default);
    let mut buffer = None;
    for round in 0..5 * SLOTS {
        if round == 2 * SLOTS {
            buffer = Some(user.register());
        }
        user.fill(round % SLOTS, round as u8);
        user.submit(Op::Write, round, round % SLOTS);
        if round % SLOTS == SLOTS - 1 {
            user.drain_asleep();
        }
    }
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
    for round in 0..5 * SLOTS {
        assert_eq!(user.one(Op::Read, round, 0), Status::Ok);
        assert!(user.holds(0, round as u8), "block {round}");
    }
    drop((user, attached, buffer));
    backend.stop();
}

#[test]
fn whoever_sleeps_is_called_and_one_who_polls_is_not() {
    [false, true].into_iter().for_each(calls_who_sleeps);
}

fn calls_who_sleeps(packed: bool) {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::start(&path, &device, 2);
    let attached = Attached::open(AttachConfig { packed, ..config(&path) }).unwrap();
    let mut sleeper = User::new(&attached, QueueKind::Default);
    for round in 0..100 {
        (0..=round % 8).for_each(|slot| sleeper.submit(Op::Read, round, slot));
        sleeper.drain_asleep();
    }
    let mut poller = User::new(&attached, QueueKind::Poll);
    assert!(poller.hw.eventfd::<blkyard_os::Ring>().is_none());
    assert_eq!(poller.one(Op::Read, 0, 0), Status::Ok);
    drop((sleeper, poller, attached));
    backend.stop();
}

#[test]
fn queues_are_given_out_while_there_are_any_and_given_again() {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::start(&path, &device, 2);
    let attached = Attached::open(config(&path)).unwrap();
    let too_deep = attached.queue(QueueKind::Default, 65).unwrap_err().to_string();
    assert!(too_deep.contains("65 requests") && too_deep.contains("queue_size"), "{too_deep}");
    for round in 0..4 {
        let mut users = [User::new(&attached, QueueKind::Default), User::new(&attached, QueueKind::Default)];
        let none_left = attached.queue(QueueKind::Default, 8).unwrap_err().to_string();
        assert!(none_left.contains("has 2"), "{none_left}");
        for (number, user) in users.iter_mut().enumerate() {
            user.fill(0, round + 1);
            assert_eq!(user.one(Op::Write, number as u64, 0), Status::Ok);
            assert_eq!(user.one(Op::Read, number as u64, 1), Status::Ok);
            assert!(user.holds(1, round + 1));
        }
    }
    drop(attached);
    backend.stop();
}

#[test]
fn memory_that_cannot_be_shared_is_refused_and_counted() {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::start(&path, &device, 1);
    let attached = Attached::open(config(&path)).unwrap();
    let mut user = User::over(&attached, QueueKind::Default, Region::anonymous(1 << 20).unwrap());
    assert_eq!(user.one(Op::Read, 0, 0), Status::Invalid);
    assert_eq!(user.one(Op::Flush, 0, 0), Status::Ok, "what needs no memory goes through");
    assert_eq!(attached.view().queues[0].violations.total(), 1);
    drop((user, attached));
    backend.stop();
}

#[test]
fn a_disk_that_is_resized_there_is_known_to_be_here() {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::start(&path, &device, 1);
    let attached = Attached::open(config(&path)).unwrap();
    let info = DeviceInfo { capacity_sectors: 8192, ..device.info().clone() };
    backend.server.hand().change(0, Arc::new(info)).recv().unwrap().unwrap();
    until("the new size is known", || attached.capacity_sectors() == 8192);
    drop(attached);
    backend.stop();
}
