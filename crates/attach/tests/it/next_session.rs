//! State that passes from one session to the next: rings, records, queues and descriptors, valid and invalid ones.

use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{AttachConfig, Attached};
use blkyard_mq::{BlockDevice, DeviceInfo, Op, QueueKind, Status};

use crate::common::{Backend, Fake, Ill, User, blk_config, config, disk, disk_info, place, until};

#[test]
fn a_ring_found_broken_while_nobody_serves_is_not_handed_to_the_next() {
    let (_folder, path) = place();
    let fake = Fake::start(&path, blk_config(&disk_info(), 1), Ill::LiesAndDies, 1);
    let attached = Attached::open(config(&path)).unwrap();
    assert!(attached.view().is_tracked);
    let mut user = User::new(&attached, QueueKind::Default);
    user.submit(Op::Read, 0, 0);
    until("the back-end has it", || {
        user.turn();
        user.hw.in_flight() == 1
    });
    // Without a turn: the lie is found when its author is gone.
    until("the back-end is gone", || !attached.view().is_connected);
    fake.join();
    user.turn();
    assert_eq!(attached.view().queues[0].violations.total(), 1);
    let device = disk();
    std::fs::remove_file(&path).unwrap();
    let backend = Backend::start(&path, &device, 1);
    user.drain_asleep();
    assert_eq!(user.ended.pop().unwrap().status, Status::Ok);
    drop((user, attached));
    backend.stop();
}

#[test]
fn a_queue_opened_again_while_nobody_serves_begins_without_the_account_of_the_one_before() {
    let (_folder, path) = place();
    let fake = Fake::start(&path, blk_config(&disk_info(), 1), Ill::Dies, 1);
    let attached = Attached::open(config(&path)).unwrap();
    let user = User::new(&attached, QueueKind::Default);
    until("the back-end is gone", || !attached.view().is_connected);
    fake.join();
    drop(user);
    let mut user = User::new(&attached, QueueKind::Default);
    let device = disk();
    std::fs::remove_file(&path).unwrap();
    let backend = Backend::start(&path, &device, 1);
    assert_eq!(user.one(Op::Read, 0, 0), Status::Ok);
    assert_eq!(attached.view().faults, 0, "what the one before left was done");
    drop((user, attached));
    backend.stop();
}

#[test]
fn a_queue_opened_while_io_fails_fails_as_well() {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::start(&path, &device, 2);
    let gone_max = Duration::from_millis(50);
    let attached = Attached::open(AttachConfig { gone_max, ..config(&path) }).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    backend.stop();
    assert_eq!(user.one(Op::Read, 0, 0), Status::Io);
    let mut late = User::new(&attached, QueueKind::Default);
    late.submit(Op::Read, 0, 0);
    late.drain_asleep();
    assert_eq!(late.ended.pop().unwrap().status, Status::Io);
    let backend = Backend::start(&path, &device, 2);
    until("it serves again", || late.one(Op::Read, 0, 0) == Status::Ok);
    drop((user, late, attached));
    backend.stop();
}

#[test]
fn a_disk_is_flushed_although_its_back_end_calls_it_write_through() {
    let (_folder, path) = place();
    let device = disk();
    let backend = Backend::caching(&path, &device, 1, false);
    let attached = Attached::open(config(&path)).unwrap();
    assert!(attached.info().volatile_cache, "its users do not flush");
    let mut user = User::new(&attached, QueueKind::Default);
    assert_eq!(user.one(Op::Flush, 0, 0), Status::Ok);
    drop((user, attached));
    backend.stop();
}

#[test]
fn who_served_before_cannot_complain_of_the_rings_of_the_next() {
    let (_folder, path) = place();
    let fake = Fake::start(&path, blk_config(&disk_info(), 1), Ill::Swallows, 1);
    let attached = Attached::open(config(&path)).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    user.submit(Op::Read, 0, 0);
    until("the back-end is gone", || {
        user.turn();
        !attached.view().is_connected
    });
    let error = fake.join().unwrap();
    let device = disk();
    std::fs::remove_file(&path).unwrap();
    let backend = Backend::start(&path, &device, 1);
    user.drain_asleep();
    rustix::io::write(&error, &1_u64.to_ne_bytes()).unwrap();
    // A reader of the second size has handled everything sent at the first.
    for capacity_sectors in [8192, 4096] {
        let info = DeviceInfo { capacity_sectors, ..device.info().clone() };
        backend.server.hand().change(0, Arc::new(info)).recv().unwrap().unwrap();
        until("the new size is known", || attached.capacity_sectors() == capacity_sectors);
    }
    assert_eq!((attached.view().sessions, attached.view().faults), (2, 0));
    drop((user, attached));
    backend.stop();
}

#[test]
fn memory_that_had_no_place_gets_one_when_there_is_one() {
    let (_folder, path) = place();
    let fake = Fake::start(&path, blk_config(&disk_info(), 2), Ill::Small, 1);
    let attached = Attached::open(config(&path)).unwrap();
    let first = User::new(&attached, QueueKind::Default);
    let mut second = User::new(&attached, QueueKind::Default);
    assert_eq!(second.one(Op::Read, 0, 0), Status::Invalid, "a place for one of them");
    drop(first);
    second.submit(Op::Read, 0, 0);
    until("a request reaches the back-end", || {
        if second.ended.pop().is_some() {
            second.submit(Op::Read, 0, 0);
        }
        second.turn();
        !attached.view().is_connected
    });
    fake.join();
    let device = disk();
    std::fs::remove_file(&path).unwrap();
    let backend = Backend::start(&path, &device, 2);
    second.drain_asleep();
    assert_eq!(second.ended.pop().unwrap().status, Status::Ok);
    drop((second, attached));
    backend.stop();
}
