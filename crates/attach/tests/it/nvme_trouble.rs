//! A namespace of a controller that drops commands, hangs, or writes invalid completions: no request is lost.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_attach::{NamespaceConfig, NamespaceQueue, RemoteNamespace, VfioUserConfig, VfioUserController};
use blkyard_mem::Region;
use blkyard_mq::{Op, QueueKind, Status};
use blkyard_os::SystemClock;

use crate::common::{PATIENCE, SLOTS, User, place, until};
use crate::server::{ServerFaults, serve_with};

const BLOCK: usize = 4096;

/// A namespace whose I/O is late after a second.
fn attach(path: &Path, reply_max: Duration) -> RemoteNamespace {
    attach_queues(path, reply_max, 1)
}

fn attach_queues(path: &Path, reply_max: Duration, queues: u16) -> RemoteNamespace {
    let mut config = NamespaceConfig::new("vfio-user:test", Arc::new(SystemClock));
    config.host.queues.submitters = queues;
    (config.options.reply_max, config.options.gone_max) = (reply_max, PATIENCE);
    config.options.io_max = Duration::from_secs(1);
    let mut transport = VfioUserConfig::new(path, Arc::new(SystemClock)).unwrap();
    transport.reply_max = reply_max;
    RemoteNamespace::open::<VfioUserController>(transport, config).unwrap()
}

fn user(disk: &RemoteNamespace) -> User<NamespaceQueue> {
    let region = Region::shared(SLOTS as usize * BLOCK).unwrap();
    User::of(disk.queue(QueueKind::Default, 32).unwrap(), 32, disk.info(), region)
}

/// Writes a block from each of some slots.
fn submit_writes(user: &mut User<NamespaceQueue>, seed: u8) {
    for slot in 0..16 {
        user.fill(slot, seed + slot as u8);
        user.submit(Op::Write, slot, slot);
    }
}

/// All writes have succeeded, and their data is there.
fn verify(user: &mut User<NamespaceQueue>, seed: u8) {
    user.drain();
    let statuses: Vec<_> = user.ended.drain(..).map(|bio| bio.status).collect();
    assert_eq!(statuses, [Status::Ok; 16]);
    for slot in 0..16 {
        assert_eq!(user.one(Op::Read, slot, 20), Status::Ok);
        assert!(user.holds(20, seed + slot as u8), "slot {slot}");
    }
}

#[test]
fn dropped_commands_are_retried_after_a_reset() {
    for shares_doorbells in [true, false] {
        let (_folder, path) = place();
        let faults = Arc::new(ServerFaults::default());
        let server = serve_with(&path, shares_doorbells, Arc::clone(&faults));
        let attached = attach(&path, PATIENCE);
        let mut user = user(&attached);
        faults.hold_every.store(5, Relaxed);
        submit_writes(&mut user, 10);
        user.turn();
        until("the controller is reset", || {
            user.turn();
            attached.view().resets > 0
        });
        faults.hold_every.store(0, Relaxed);
        verify(&mut user, 10);
        let view = attached.view();
        assert!(view.aborts > 0 && view.sessions == 1, "{view:?}");
        drop((user, attached));
        server.join().unwrap();
    }
}

#[test]
fn queue_that_no_thread_runs_does_not_hold_up_a_reset_without_end() {
    let (_folder, path) = place();
    let faults = Arc::new(ServerFaults::default());
    let server = serve_with(&path, true, Arc::clone(&faults));
    let attached = attach_queues(&path, PATIENCE, 2);
    let (mut user, mut idle) = (user(&attached), user(&attached));
    // Its memory is known: no change of it comes later.
    assert_eq!(idle.one(Op::Read, 0, 0), Status::Ok);
    faults.hold_every.store(5, Relaxed);
    submit_writes(&mut user, 10);
    user.turn();
    // The reset waits for the idle queue, and goes on without it; the controller is opened again.
    let start = Instant::now();
    while !server.is_finished() {
        user.turn();
        assert!(start.elapsed() < PATIENCE / 3, "the reset waits: {:?}", attached.view());
    }
    server.join().unwrap();
    let _ = std::fs::remove_file(&path);
    let next = serve_with(&path, true, Arc::default());
    user.drain();
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
    submit_writes(&mut user, 50);
    verify(&mut user, 50);
    assert_eq!(attached.view().sessions, 2);
    drop((user, idle, attached));
    next.join().unwrap();
}

/// Has the server make a fault three times, each before writes that must arrive.
fn repeat_fault(fault: &AtomicBool, user: &mut User<NamespaceQueue>) {
    for round in 0..3 {
        fault.store(true, Relaxed);
        until("the fault is made", || !fault.load(Relaxed));
        submit_writes(user, 30 * round);
        verify(user, 30 * round);
    }
}

#[test]
fn device_reset_from_outside_is_set_up_again() {
    for shares_doorbells in [true, false] {
        let (_folder, path) = place();
        let faults = Arc::new(ServerFaults::default());
        let server = serve_with(&path, shares_doorbells, Arc::clone(&faults));
        let attached = attach(&path, PATIENCE);
        let mut user = user(&attached);
        repeat_fault(&faults.resets, &mut user);
        let view = attached.view();
        assert_eq!((view.sessions, view.aborts), (1, 0), "{view:?}");
        drop((user, attached));
        server.join().unwrap();
    }
}

#[test]
fn invalid_completions_complete_no_request() {
    let (_folder, path) = place();
    let faults = Arc::new(ServerFaults::default());
    let server = serve_with(&path, true, Arc::clone(&faults));
    let attached = attach(&path, PATIENCE);
    let mut user = user(&attached);
    repeat_fault(&faults.writes_nonsense, &mut user);
    assert_eq!(attached.view().sessions, 1);
    drop((user, attached));
    server.join().unwrap();
}

#[test]
fn requests_of_a_hung_server_wait_until_it_lets_go() {
    let (_folder, path) = place();
    let faults = Arc::new(ServerFaults::default());
    let server = serve_with(&path, true, Arc::clone(&faults));
    let attached = attach(&path, Duration::from_secs(1));
    let mut user = user(&attached);
    faults.hangs.store(true, Relaxed);
    submit_writes(&mut user, 10);
    until("the loss is noticed", || {
        user.turn();
        !attached.view().is_connected
    });
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(300) {
        user.turn();
    }
    assert!(user.ended.is_empty(), "the server may still access the memory");
    // It goes on, and finds that the client has left.
    faults.hangs.store(false, Relaxed);
    while !server.is_finished() {
        user.turn();
    }
    server.join().unwrap();
    let _ = std::fs::remove_file(&path);
    let next = serve_with(&path, true, Arc::default());
    user.drain();
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
    submit_writes(&mut user, 50);
    verify(&mut user, 50);
    assert_eq!(attached.view().sessions, 2);
    drop((user, attached));
    next.join().unwrap();
}
