//! Namespaces over TCP as attached disks, over real sockets: data is read back on several queues, through cuts of the
//! connections, restarts and the silence of the target.

mod target;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_attach::{AttachError, LateNamespace, TcpNamespace, TcpNamespaceConfig, TcpNamespaceQueue};
use blkyard_mem::Region;
use blkyard_mpath::ConnectionState;
use blkyard_mq::{Op, QueueKind, Status};
use blkyard_nvme::FabricsHostConfig;
use blkyard_nvme::fabrics::Nqn;
use blkyard_os::SystemClock;
use target::{DISK_BYTES, NAME, Target};

use crate::common::{PATIENCE, SLOTS, User};

const BLOCK: usize = 4096;
/// Time for another thread to do what it has begun.
const LULL: Duration = Duration::from_millis(20);

fn config(address: SocketAddr, queues: u16) -> TcpNamespaceConfig {
    let mut host = FabricsHostConfig::new(Nqn::new("nqn.host").unwrap(), [7; 16], Nqn::new(NAME).unwrap());
    host.queues.submitters = queues;
    host.connect_ns = PATIENCE.as_nanos() as u64;
    host.keep_alive_ms = PATIENCE.as_millis() as u32;
    host.quiesce_ns = 0;
    TcpNamespaceConfig {
        name: "nvme-tcp:test".into(),
        address: address.to_string(),
        host,
        namespace: None,
        io_max_ns: PATIENCE.as_nanos() as u64,
        clock: Arc::new(SystemClock),
    }
}

fn attach(target: &Target, queues: u16) -> TcpNamespace {
    TcpNamespace::open(config(target.address, queues)).unwrap()
}

fn user(disk: &TcpNamespace, kind: QueueKind) -> User<TcpNamespaceQueue> {
    let region = Region::shared(SLOTS as usize * BLOCK).unwrap();
    User::of(disk.queue(kind, SLOTS as usize).unwrap(), SLOTS as usize, disk.info(), region)
}

/// Writes and reads back all slots, at another place for each round.
fn exercise(user: &mut User<TcpNamespaceQueue>, round: u64) {
    user.ended.clear();
    for slot in 0..SLOTS {
        user.fill(slot, (slot + round * 3) as u8 + 1);
        user.submit(Op::Write, round * SLOTS + slot, slot);
    }
    user.drain();
    for slot in 0..SLOTS {
        user.fill(slot, 0);
        user.submit(Op::Read, round * SLOTS + slot, slot);
    }
    user.drain();
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok), "round {round}");
    (0..SLOTS).for_each(|slot| assert!(user.holds(slot, (slot + round * 3) as u8 + 1), "slot {slot} of {round}"));
}

#[test]
fn data_written_on_one_queue_is_read_back_on_another() {
    for (header_digest, data_digest) in [(false, false), (true, true)] {
        let target = Target::start();
        let mut config = config(target.address, 2);
        (config.host.header_digest, config.host.data_digest) = (header_digest, data_digest);
        let disk = TcpNamespace::open(config).unwrap();
        assert_eq!((disk.queues_max(), disk.nsid()), (2, 1));
        assert_eq!(disk.info().capacity_sectors, DISK_BYTES as u64 / 512);
        let mut users = [user(&disk, QueueKind::Default), user(&disk, QueueKind::Poll)];
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
        assert_eq!(users[0].one(Op::Flush, 0, 0), Status::Ok);
        users[0].check_changing_memory();
        assert!(disk.view().is_connected && disk.view().sessions == 1);
        drop(users);
        drop(disk);
        crate::common::until("the association ends", || target.associations() == 0);
    }
}

#[test]
fn cut_connections_are_made_again_and_io_goes_on() {
    let target = Target::start();
    let disk = attach(&target, 1);
    let mut user = user(&disk, QueueKind::Default);
    exercise(&mut user, 0);
    for round in 1..6 {
        (0..SLOTS).for_each(|slot| user.fill(slot, round as u8));
        (0..SLOTS).for_each(|slot| user.submit(Op::Write, slot, slot));
        user.turn();
        target.cut();
        user.drain();
        assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok), "round {round}");
        exercise(&mut user, round);
    }
    assert!(disk.view().sessions > 1);
}

#[test]
fn connection_may_be_given_up_while_data_of_reads_comes_in() {
    let target = Target::start();
    let disk = attach(&target, 1);
    let mut user = user(&disk, QueueKind::Default);
    exercise(&mut user, 0);
    for turns in 1..5 {
        let executed = target.commands();
        (0..SLOTS).for_each(|slot| user.submit(Op::Read, slot, slot));
        user.turn();
        crate::common::until("the target has all reads", || target.commands() == executed + SLOTS);
        std::thread::sleep(LULL);
        // More than is received at once: the kernel has received the rest of a read into its place by then.
        (0..turns).for_each(|_| _ = user.turn());
        target.cut();
        crate::common::until("the control thread has noticed", || !disk.view().is_connected);
        std::thread::sleep(LULL);
        user.drain();
        assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok), "after {turns} turns");
        exercise(&mut user, 0);
    }
}

#[test]
fn restarted_target_gets_the_requests_that_were_in_flight() {
    let target = Target::start();
    let disk = attach(&target, 1);
    let mut user = user(&disk, QueueKind::Default);
    exercise(&mut user, 0);
    target.hold(true);
    (0..SLOTS).for_each(|slot| user.submit(Op::Write, slot, slot));
    (0..10).for_each(|_| _ = user.turn());
    let (address, region) = (target.address, Arc::clone(target.disk()));
    drop(target);
    let target = Target::at(address, &region);
    user.drain();
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
    assert!(target.commands() >= SLOTS);
    exercise(&mut user, 1);
}

#[test]
fn late_command_ends_the_association_and_is_sent_again() {
    let target = Target::start();
    let mut config = config(target.address, 1);
    config.io_max_ns = 200_000_000;
    let disk = TcpNamespace::open(config).unwrap();
    let mut user = user(&disk, QueueKind::Default);
    exercise(&mut user, 0);
    target.hold(true);
    user.submit(Op::Read, 0, 0);
    let start = Instant::now();
    while disk.view().sessions == 1 {
        user.turn();
        assert!(start.elapsed() < PATIENCE, "the association is not ended");
    }
    target.hold(false);
    user.drain();
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
}

#[test]
fn target_that_is_not_there_is_an_error_with_a_cure() {
    let target = Target::start();
    let address = target.address;
    drop(target);
    let error = TcpNamespace::open(config(address, 1)).unwrap_err();
    assert!(matches!(error, AttachError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains(&format!("cannot connect to {}", address.ip())), "{error}");
}

/// Each answer comes at once, compared with the time for one.
#[test]
fn target_that_answers_slowly_is_not_waited_for_without_end() {
    let target = Target::slow(1000, Duration::from_millis(50));
    let mut config = config(target.address, 1);
    config.host.bring_up_ns = 400_000_000;
    let start = Instant::now();
    let error = TcpNamespace::open(config).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(30), "all answers take 100 s: {:?}", start.elapsed());
    assert!(matches!(error, AttachError::Unreachable { .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("nvme-tcp:test: ") && text.contains("was not brought up within"), "{text}");
    assert!(text.ends_with("see why the target answers slowly, and name the namespace by ?namespace=N"), "{text}");
}

#[test]
fn one_namespace_of_many_at_a_slow_target_is_opened_by_its_name() {
    let target = Target::slow(1000, Duration::from_millis(50));
    let config = TcpNamespaceConfig { namespace: Some(700), ..config(target.address, 1) };
    let start = Instant::now();
    let disk = TcpNamespace::open(config.clone()).unwrap();
    assert!(start.elapsed() < Duration::from_secs(30), "all answers take 100 s: {:?}", start.elapsed());
    let mut user = user(&disk, QueueKind::Default);
    exercise(&mut user, 0);
    target.cut();
    exercise(&mut user, 1);
    assert_eq!((disk.nsid(), disk.view().sessions), (700, 2));
    let error = TcpNamespace::open(TcpNamespaceConfig { namespace: Some(1001), ..config }).unwrap_err().to_string();
    let cause = "the controller has no namespace 1001; it has 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and \
                 984 more";
    assert!(error.contains(cause), "{error}");
}

#[test]
fn spare_path_is_used_once_it_has_a_port() {
    let target = Target::start();
    let disk = attach(&target, 1);
    let late = || LateNamespace {
        info: disk.info().clone(),
        queues: 1,
        depth: disk.depth_max(),
        why: "no port".into(),
        accepts: Box::new(|_, _, _| Ok(())),
    };
    // Nobody is there, and it is not tried.
    let config = config("127.0.0.1:1".parse().unwrap(), 1);
    let (unused, _) = TcpNamespace::spare(config.clone(), &disk, late()).unwrap();
    let (spare, port) = TcpNamespace::spare(config, &disk, late()).unwrap();
    let state = spare.as_path();
    let mut user = user(&spare, QueueKind::Default);
    user.submit(Op::Flush, 0, 0);
    (0..10).for_each(|_| _ = user.turn());
    std::thread::sleep(LULL);
    assert_eq!((user.ended.len(), port.name()), (0, None));
    assert_eq!((state.state().connection, spare.view().last_loss.as_deref()), (ConnectionState::Dead, Some("no port")));
    port.connect("nvme-tcp:found", &target.address.to_string());
    port.connect("nvme-tcp:other", "127.0.0.1:1");
    user.drain();
    exercise(&mut user, 0);
    assert_eq!((port.name().as_deref(), spare.view().sessions), (Some("nvme-tcp:found"), 1));
    assert_eq!(state.state().connection, ConnectionState::Live);
    drop((user, spare, unused, disk));
    crate::common::until("the associations end", || target.associations() == 0);
}

#[test]
fn io_fails_after_ctrl_loss() {
    let target = Target::start();
    let mut config = config(target.address, 1);
    config.host.ctrl_loss_ns = Some(300_000_000);
    let disk = TcpNamespace::open(config).unwrap();
    let mut user = user(&disk, QueueKind::Default);
    exercise(&mut user, 0);
    drop(target);
    user.ended.clear();
    user.submit(Op::Read, 0, 0);
    user.drain();
    assert!(!user.ended[0].status.is_ok(), "{:?}", user.ended[0].status);
    assert!(!disk.view().is_connected && disk.view().last_loss.is_some());
    // Also that of a queue that is opened later: the disk has not ended.
    drop(user);
    let mut user = self::user(&disk, QueueKind::Default);
    user.submit(Op::Read, 0, 0);
    user.drain();
    assert!(!user.ended[0].status.is_ok() && !disk.is_finished(), "{:?}", user.ended[0].status);
}

#[test]
fn queue_that_stops_and_continues_keeps_its_connection() {
    let target = Target::start();
    let disk = attach(&target, 1);
    let mut user = user(&disk, QueueKind::Default);
    for round in 0..5 {
        exercise(&mut user, round);
        user.set_memory(None);
        let region = Region::shared(SLOTS as usize * BLOCK).unwrap();
        user.set_memory(Some(&region));
    }
    exercise(&mut user, 5);
    assert_eq!(disk.view().sessions, 1, "{:?}", disk.view());
}
