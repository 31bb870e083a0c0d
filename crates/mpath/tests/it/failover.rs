//! A queue over several paths: order of failover, what is held and for how long, and writes that a lost path may still
//! execute.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use blkyard_mpath::{AccessState, ChoiceReason, ConnectionState, PathState, PolicyKind};
use blkyard_mq::{BufferAccess, ErrorCode, IoErrors, Op, Region, RegionTable, RegisteredBuffer, Status};
use blkyard_sim::Rng;

use crate::paths::{LOST, MS, NO_PATH_NS, Sent, World};

#[test]
fn round_robin_uses_paths_in_turn_and_reports_why() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    (0..6).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.turn();
    assert_eq!([world.sectors(0), world.sectors(1)], [vec![0, 16, 32], vec![8, 24, 40]]);
    world.answer(0, Status::Ok);
    world.answer(1, Status::Medium);
    assert_eq!(world.statuses(), [[Status::Ok; 3], [Status::Medium; 3]].concat());
    let stats = Arc::clone(world.queue.driver_mut().stats());
    let [one, other] = [0, 1].map(|path| stats.path(path));
    assert_eq!((one.ios, one.in_flight, one.moved, one.reason), (3, 0, 0, Some(ChoiceReason::Best)));
    assert!(one.latency_ns > 0 && one.chosen_ns > 0 && other.ios == 3);
}

#[test]
fn reads_of_a_lost_path_go_to_another_in_order_at_once() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    world.set_state(1, LOST);
    (0..5).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.turn();
    assert_eq!(world.sectors(0), [0, 8, 16, 24, 32]);
    world.restore(1);
    world.submit(Op::Read, 40, 0);
    world.lose(0, false);
    assert_eq!(world.sectors(1), [0, 8, 16, 24, 32, 40]);
    world.answer(1, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok; 6]);
}

#[test]
fn a_write_moves_only_once_its_path_is_fenced() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    world.wires[0].borrow_mut().generation = 7;
    world.set_state(1, LOST);
    for (op, sector) in [(Op::Write, 0), (Op::Read, 8), (Op::Discard, 16), (Op::Write, 24)] {
        world.submit(op, sector, 0);
    }
    world.turn();
    world.restore(1);
    world.lose(0, false);
    assert_eq!(world.sectors(1), [8], "a write was sent without proof");
    // The proof of an earlier connection, and that of another path, are none.
    world.fence(0, 6);
    world.fence(1, 9);
    world.run_until(world.now_ns + 1000 * MS);
    assert_eq!(world.sectors(1), [8]);
    assert_eq!(world.queue.driver_mut().stats().held(), 3);
    world.fence(0, 7);
    world.run_until(world.now_ns + 10 * MS);
    assert_eq!(world.sectors(1), [8, 0, 16, 24]);
    world.answer(1, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok; 4]);
    assert_eq!(world.queue.driver_mut().stats().held(), 0);
}

#[test]
fn answered_writes_of_a_lost_path_move_at_once() {
    let mut world = World::new(PolicyKind::Numa, 2, true);
    (0..3).for_each(|at| world.submit(Op::Write, at * 8, 0));
    world.turn();
    world.lose(0, true);
    assert_eq!(world.sectors(1), [0, 8, 16]);
    world.answer(1, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok; 3]);
}

#[test]
fn a_path_error_tries_the_other_path_and_avoids_the_first() {
    let mut world = World::new(PolicyKind::Numa, 2, true);
    world.submit(Op::Write, 0, 0);
    world.turn();
    world.answer(0, Status::Path);
    assert_eq!(world.sectors(1), [0]);
    world.submit(Op::Write, 8, 0);
    world.turn();
    assert_eq!(world.sectors(1), [0, 8], "the path with the error was used");
    // Errors of all paths are waited out: the state of access changes.
    world.answer(1, Status::Path);
    assert!(world.ended.is_empty());
    world.run_until(world.now_ns + 200 * MS);
    assert_eq!(world.sectors(0), [0, 8]);
    world.answer(0, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok; 2]);
}

#[test]
fn path_errors_of_all_paths_end_an_io_after_its_time() {
    let mut world = World::new(PolicyKind::Numa, 2, true);
    world.submit(Op::Read, 0, 0);
    let began_ns = world.now_ns;
    while world.ended.is_empty() {
        world.run_until(world.now_ns + 20 * MS);
        (0..2).for_each(|path| world.answer(path, Status::Path));
        assert!(world.now_ns < began_ns + 2 * NO_PATH_NS);
    }
    assert_eq!(world.statuses(), [Status::Path]);
    assert!(world.now_ns >= began_ns + NO_PATH_NS);
}

#[test]
fn an_error_of_every_path_ends_an_io() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    world.submit(Op::Read, 0, 0);
    world.turn();
    world.answer(0, Status::Io);
    assert_eq!((world.sectors(1), world.ended.len()), (vec![0], 0));
    world.answer(1, Status::Io);
    assert_eq!(world.statuses(), [Status::Io]);
}

#[test]
fn a_write_that_a_live_path_fails_ends_at_once() {
    // No proof comes of a path that lives on: the write was held for `no_path_ns`, a minute at least.
    for status in [Status::Io, Status::Timeout, Status::Offline] {
        let mut world = World::new(PolicyKind::RoundRobin, 2, true);
        world.submit(Op::Write, 0, 0);
        world.turn();
        world.answer(0, status);
        assert_eq!((world.statuses(), world.sectors(1)), (vec![status], vec![]));
        assert_eq!(world.queue.driver_mut().stats().held(), 0);
    }
}

#[test]
fn a_failure_has_the_error_number_of_its_last_path() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    (0..2).for_each(|path| world.wires[path].borrow_mut().code = Some(ErrorCode::Nvme(path as u16)));
    let errors = world.queue.info().errors.clone();
    let code = |errors: &IoErrors| errors.take().and_then(|(first, _)| first?.code);
    world.submit(Op::Write, 0, 0);
    world.turn();
    world.answer(0, Status::Io);
    assert_eq!(code(&errors), Some(ErrorCode::Nvme(0)));
    // The next choice is path 1.
    world.submit(Op::Read, 0, 0);
    world.turn();
    world.answer(1, Status::Io);
    world.answer(0, Status::Io);
    assert_eq!(code(&errors), Some(ErrorCode::Nvme(0)));
    world.submit(Op::Read, 0, 0);
    world.turn();
    world.answer(1, Status::Io);
    world.answer(0, Status::Ok);
    assert_eq!(world.statuses(), [Status::Io, Status::Io, Status::Ok]);
    world.wires[1].borrow_mut().code = None;
    world.submit(Op::Write, 0, 0);
    world.turn();
    world.answer(1, Status::Io);
    assert_eq!(errors.take().and_then(|(first, _)| first?.code), None, "that of an earlier request");
}

#[test]
fn io_waits_for_a_path_and_fails_after_its_time() {
    let mut world = World::new(PolicyKind::default(), 2, true);
    (0..2).for_each(|path| world.set_state(path, LOST));
    world.submit(Op::Write, 0, 0);
    world.turn();
    world.run_until(NO_PATH_NS / 2);
    assert!(world.ended.is_empty());
    world.restore(1);
    world.run_until(world.now_ns + 10 * MS);
    assert_eq!(world.sectors(1), [0]);
    world.answer(1, Status::Ok);
    world.set_state(1, LOST);
    world.submit(Op::Write, 0, 0);
    world.turn();
    let began_ns = world.now_ns;
    world.run_until(began_ns + NO_PATH_NS - MS);
    assert_eq!(world.statuses(), [Status::Ok]);
    world.run_until(began_ns + NO_PATH_NS + 10 * MS);
    assert_eq!(world.statuses(), [Status::Path]);
    // Paths that cannot come back are not waited for.
    let dead = PathState { connection: ConnectionState::Dead, ..LOST };
    (0..2).for_each(|path| world.set_state(path, dead));
    world.submit(Op::Read, 0, 0);
    world.turn();
    world.run_until(world.now_ns + 10 * MS);
    assert_eq!(world.statuses(), [Status::Path]);
}

#[test]
fn held_io_fails_in_time_while_more_arrives() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    (0..2).for_each(|path| world.set_state(path, LOST));
    world.submit(Op::Read, 0, 0);
    world.turn();
    (0..2).for_each(|path| world.set_state(path, PathState { connection: ConnectionState::Dead, ..LOST }));
    let gone_ns = world.now_ns;
    // More often than the held I/O is looked at.
    for sector in (8..80).step_by(8) {
        world.submit(Op::Read, sector, 0);
        world.run_until(world.now_ns + MS);
    }
    assert_eq!(world.ended.first(), Some(&(0, Status::Path)));
    assert!(world.ended.len() >= 6, "{:?} within {} ms", world.ended, (world.now_ns - gone_ns) / MS);
}

#[test]
fn a_path_that_takes_nothing_is_avoided_at_once() {
    // Its state is still that of before.
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    world.wires[0].borrow_mut().refuses = true;
    (0..4).for_each(|at| world.submit(Op::Write, at * 8, 0));
    world.turn();
    let mut all = world.sectors(1);
    all.sort_unstable();
    assert_eq!(all, [0, 8, 16, 24]);
    world.wires[0].borrow_mut().refuses = false;
    world.run_until(world.now_ns + 10 * MS);
    (4..6).for_each(|at| world.submit(Op::Write, at * 8, 0));
    world.turn();
    assert_eq!(world.sectors(0).len(), 1, "the path is not used again");
    (0..2).for_each(|path| world.answer(path, Status::Ok));
    assert_eq!(world.statuses(), [Status::Ok; 6]);
}

#[test]
fn a_full_path_keeps_no_io_from_the_other() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    world.wires[0].borrow_mut().room = Some(2);
    (0..12).for_each(|at| world.submit(Op::Read, at * 8, 0));
    let mut rounds = 0;
    while world.sectors(1).len() < 10 {
        world.run_until(world.now_ns + MS);
        rounds += 1;
        assert!(rounds < 100, "{:?}", world.sectors(1));
    }
    assert_eq!(world.sectors(0).len(), 2);
    (0..2).for_each(|path| world.answer(path, Status::Ok));
    assert_eq!(world.statuses(), [Status::Ok; 12]);
}

#[test]
fn non_optimized_paths_are_used_without_an_optimized_one() {
    let mut world = World::new(PolicyKind::QueueDepth, 2, true);
    world.set_state(0, PathState { access: AccessState::NonOptimized, ..PathState::default() });
    (0..3).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.turn();
    assert_eq!(world.sectors(1), [0, 8, 16]);
    world.set_state(1, PathState { access: AccessState::Inaccessible, ..PathState::default() });
    world.answer(1, Status::Path);
    assert_eq!(world.sectors(0), [0, 8, 16]);
    world.answer(0, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok; 3]);
}

#[test]
fn a_late_request_is_the_matter_of_its_path() {
    let mut world = World::new(PolicyKind::Numa, 2, true);
    world.submit(Op::Write, 0, 0);
    world.turn();
    world.run_until(world.now_ns + 150 * MS);
    assert_eq!([0, 1].map(|path| world.wires[path].borrow().late), [1, 0]);
    world.lose(0, false);
    world.run_until(world.now_ns + 300 * MS);
    assert_eq!([0, 1].map(|path| world.wires[path].borrow().late), [1, 0], "a held write was asked for");
    world.fence(0, 0);
    world.run_until(world.now_ns + 10 * MS);
    world.answer(1, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok]);
}

#[test]
fn a_command_that_is_late_on_all_paths_ends_once_it_is_fenced() {
    for (op, step_ns, ends) in
        [(Op::Write, 7_000 * MS, true), (Op::Read, 7_000 * MS, true), (Op::Write, 20 * MS, false)]
    {
        let mut world = World::new(PolicyKind::RoundRobin, 2, true);
        world.submit(op, 0, 0);
        world.turn();
        let mut losses = 0;
        while world.ended.is_empty() && losses < 6 {
            world.run_until(world.now_ns + step_ns);
            let path = (0..2).find(|path| !world.sectors(*path).is_empty()).expect("a path has it");
            world.lose(path, false);
            losses += 1;
            world.restore(path);
            if op == Op::Write {
                world.run_until(world.now_ns + 10 * MS);
                assert_eq!((world.ended.len(), world.queue.driver_mut().stats().held()), (0, 1), "before the proof");
                let generation = world.wires[path].borrow().generation - 1;
                world.fence(path, generation);
            }
            world.run_until(world.now_ns + 10 * MS);
        }
        assert_eq!(losses, 6);
        if !ends {
            (0..2).for_each(|path| world.answer(path, Status::Ok));
        }
        assert_eq!(world.statuses(), [if ends { Status::Io } else { Status::Ok }], "{op:?}");
    }
}

#[test]
fn a_path_without_proofs_gets_its_own_writes_again() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, false);
    (0..4).for_each(|at| world.submit(Op::Write, at * 8, 0));
    world.turn();
    let before = world.sectors(0);
    world.wires[0].borrow_mut().gives_back = Some(false);
    world.turn();
    assert_eq!(world.sectors(0), before);
    // A write that fails without proof ends: its outcome is unknown.
    world.answer(0, Status::Timeout);
    world.answer(1, Status::Ok);
    assert_eq!(world.statuses(), [Status::Timeout, Status::Timeout, Status::Ok, Status::Ok]);
}

#[test]
fn policy_changes_with_io_in_flight() {
    let mut world = World::new(PolicyKind::Adaptive, 2, true);
    for policy in PolicyKind::ALL {
        (0..4).for_each(|at| world.submit(Op::Read, at * 8, 0));
        world.turn();
        world.settings.change(|rules| rules.policy = policy);
        world.turn();
        (0..2).for_each(|path| world.answer(path, Status::Ok));
        assert_eq!(world.statuses(), [Status::Ok; 4], "{policy:?}");
    }
}

#[test]
fn the_policy_learns_of_every_end() {
    // Requests that a full path leaves, and those of a lost one, are at neither any more.
    let mut world = World::new(PolicyKind::QueueDepth, 2, true);
    world.wires[0].borrow_mut().room = Some(2);
    (0..12).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.run_until(world.now_ns + 100 * MS);
    world.lose(1, true);
    world.wires[0].borrow_mut().room = None;
    world.restore(1);
    for _ in 0..20 {
        world.run_until(world.now_ns + 10 * MS);
        (0..2).for_each(|path| world.answer(path, Status::Ok));
    }
    assert_eq!(world.statuses(), [Status::Ok; 12]);
    (0..8).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.turn();
    assert_eq!([0, 1].map(|path| world.sectors(path).len()), [4, 4]);
    (0..2).for_each(|path| world.answer(path, Status::Ok));

    // The latency of completed ones is known.
    let mut world = World::new(PolicyKind::Latency, 2, true);
    for _ in 0..40 {
        (0..2).for_each(|at| world.submit(Op::Read, at * 8, 0));
        world.turn();
        world.run_until(world.now_ns + MS / 10);
        world.answer(1, Status::Ok);
        world.run_until(world.now_ns + MS);
        world.answer(0, Status::Ok);
    }
    let ios = [0, 1].map(|path| world.queue.driver_mut().stats().path(path).ios);
    assert!(ios[1] > ios[0], "{ios:?}");
}

#[test]
fn a_path_that_is_offline_is_avoided() {
    let mut world = World::new(PolicyKind::Numa, 2, true);
    world.submit(Op::Read, 0, 0);
    world.turn();
    world.answer(0, Status::Offline);
    world.submit(Op::Read, 8, 0);
    world.turn();
    assert_eq!([0, 1].map(|path| world.sectors(path)), [vec![], vec![0, 8]]);
    world.answer(1, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok; 2]);
}

#[test]
fn a_path_is_used_again_as_soon_as_its_state_changes() {
    let mut world = World::new(PolicyKind::Numa, 2, true);
    world.submit(Op::Read, 0, 0);
    world.turn();
    world.answer(0, Status::Path);
    world.set_state(0, LOST);
    world.set_state(0, PathState::default());
    world.submit(Op::Read, 8, 0);
    world.turn();
    assert_eq!([0, 1].map(|path| world.sectors(path)), [[8], [0]]);
    (0..2).for_each(|path| world.answer(path, Status::Ok));
    assert_eq!(world.statuses(), [Status::Ok; 2]);
}

#[test]
fn answered_requests_are_given_back_without_a_bound() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    world.submit(Op::Read, 0, 0);
    world.turn();
    for _ in 0..10 {
        world.run_until(world.now_ns + 7000 * MS);
        let path = (0..2).find(|path| !world.sectors(*path).is_empty()).expect("a path has it");
        world.lose(path, true);
        world.restore(path);
        world.run_until(world.now_ns + 10 * MS);
    }
    (0..2).for_each(|path| world.answer(path, Status::Ok));
    assert_eq!(world.statuses(), [Status::Ok]);
}

#[test]
fn path_errors_that_come_late_end_an_io_after_its_time() {
    // A path is not avoided any more when the other one fails.
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    world.submit(Op::Read, 0, 0);
    world.turn();
    let began_ns = world.now_ns;
    while world.ended.is_empty() {
        world.run_until(world.now_ns + 150 * MS);
        let path = (0..2).find(|path| !world.sectors(*path).is_empty()).expect("a path has it");
        world.answer(path, Status::Path);
        assert!(world.now_ns < began_ns + 2 * NO_PATH_NS);
    }
    assert_eq!(world.statuses(), [Status::Path]);
}

#[test]
fn a_write_that_is_never_fenced_ends_after_a_minute() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    world.submit(Op::Write, 0, 0);
    world.turn();
    world.lose(0, false);
    let began_ns = world.now_ns;
    world.run_until(began_ns + 59_000 * MS);
    assert!(world.ended.is_empty() && world.sectors(1).is_empty());
    world.run_until(began_ns + 61_000 * MS);
    assert_eq!((world.statuses(), world.sectors(1)), (vec![Status::Timeout], vec![]));
}

#[test]
fn a_write_without_proof_moves_once_its_path_has_answered_it() {
    let mut world = World::new(PolicyKind::Numa, 2, false);
    world.submit(Op::Write, 0, 0);
    world.turn();
    world.wires[0].borrow_mut().gives_back = Some(false);
    world.turn();
    assert_eq!(world.sectors(0), [0]);
    world.lose(0, true);
    assert_eq!(world.sectors(1), [0]);
    world.answer(1, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok]);
}

#[test]
fn every_path_learns_of_memory_buffers_and_sleep() {
    let mut world = World::new(PolicyKind::default(), 3, true);
    let region = Region::anonymous(4096).unwrap();
    let memory = Arc::new(RegionTable::new(vec![Arc::clone(&region)]));
    let buffer = RegisteredBuffer::new(&region, 0, 4096, BufferAccess::ReadWrite).unwrap();
    world.queue.set_memory(&mut (), Arc::clone(&memory));
    world.queue.change_memory(&mut (), memory);
    assert!(world.queue.add_buffer(&mut (), &buffer) && world.queue.remove_buffer(&mut (), buffer.id()));
    assert!(!world.queue.arm::<()>());
    world.queue.disarm::<()>();
    let calls = ["set_memory", "change_memory", "add_buffer", "remove_buffer", "arm", "disarm"];
    for (path, wire) in world.wires.iter().enumerate() {
        assert_eq!(std::mem::take(&mut wire.borrow_mut().calls), calls, "path {path}");
    }
    // Without a request, too: a connection is made, or lost.
    for path in 0..3 {
        world.wires[path].borrow_mut().has_events = true;
        world.wires[path].borrow_mut().due_ns = Some(world.now_ns + MS);
        assert!(world.queue.arm::<()>(), "path {path}");
        assert_eq!(world.queue.deadline_ns::<()>(), Some(world.now_ns + MS), "path {path}");
        world.turn();
        assert_eq!(world.wires[path].borrow().calls.last(), Some(&"poll"), "path {path}");
        world.wires[path].borrow_mut().due_ns = None;
    }
}

#[test]
fn what_a_full_path_leaves_goes_to_another_though_none_answers() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    world.wires[0].borrow_mut().room = Some(1);
    (0..2).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.turn();
    world.submit(Op::Read, 16, 0);
    world.turn();
    assert_eq!([0, 1].map(|path| world.sectors(path)), [[0], [8]]);
    // No completion restarts the queue: it names a time.
    let due_ns = world.queue.deadline_ns::<()>().unwrap();
    assert!(due_ns <= world.now_ns + 5 * MS, "{due_ns} at {}", world.now_ns);
    world.run_until(due_ns);
    assert_eq!(world.sectors(1), [8, 16]);
    (0..2).for_each(|path| world.answer(path, Status::Ok));
    assert_eq!(world.statuses(), [Status::Ok; 3]);
}

#[test]
fn io_of_the_last_path_waits_its_time_though_it_was_moved_long_before() {
    for op in [Op::Read, Op::Write] {
        let mut world = World::new(PolicyKind::RoundRobin, 2, true);
        world.submit(op, 0, 0);
        world.turn();
        world.lose(0, true);
        world.run_until(world.now_ns + 2 * NO_PATH_NS);
        assert_eq!(world.sectors(1), [0]);
        world.lose(1, true);
        world.run_until(world.now_ns + NO_PATH_NS - 100 * MS);
        assert_eq!((world.statuses(), world.queue.driver_mut().stats().held()), (vec![], 1), "{op:?}");
        world.run_until(world.now_ns + 200 * MS);
        assert_eq!(world.statuses(), [Status::Path], "{op:?}");
    }
}

#[test]
fn held_io_has_a_deadline() {
    let mut world = World::new(PolicyKind::RoundRobin, 2, true);
    world.submit(Op::Write, 0, 0);
    world.turn();
    let is_due = |world: &mut World| {
        let due_ns = world.queue.deadline_ns::<()>();
        assert!(due_ns.is_some_and(|due_ns| due_ns <= world.now_ns + 2 * MS), "{due_ns:?} at {}", world.now_ns);
    };
    // For a proof.
    world.lose(0, false);
    is_due(&mut world);
    // For a path.
    world.set_state(1, LOST);
    world.fence(0, 0);
    world.run_until(world.now_ns + 10 * MS);
    assert_eq!((world.sectors(1), world.queue.driver_mut().stats().held()), (vec![], 1));
    is_due(&mut world);
}

/// A medium behind the paths, which executes commands of lost connections late, until they are fenced.
fn ghost_writes(seed: u64) {
    const SECTORS: u64 = 6;
    let mut rng = Rng::new(seed);
    let policy = PolicyKind::ALL[rng.below(5) as usize];
    let mut world = World::new(policy, 2 + rng.below(2) as usize, true);
    let paths = world.wires.len();
    let mut medium = BTreeMap::new();
    // Last acknowledged data, and data in flight, of each sector.
    let (mut known, mut under_way) = (BTreeMap::new(), BTreeMap::new());
    // Path, generation, sector, data.
    let mut ghosts: Vec<(usize, u32, u64, u64)> = Vec::new();
    let execute = |medium: &mut BTreeMap<u64, u64>, sector, data| medium.insert(sector, data);
    let mut data = 0;
    for step in 0..400 {
        let is_end = step >= 300;
        let path = rng.below(paths as u64) as usize;
        match rng.below(if is_end { 4 } else { 10 }) {
            0 | 1 => {
                // It answers one command, which it has executed.
                let mut wire = world.wires[path].borrow_mut();
                if !wire.sent.is_empty() && wire.gives_back.is_none() {
                    let at = rng.below(wire.sent.len() as u64) as usize;
                    let Sent { op, sector, data, .. } = wire.sent[at];
                    if op == Op::Write {
                        execute(&mut medium, sector, data);
                    }
                    wire.answers.push((at, Status::Ok));
                }
                drop(wire);
                world.turn();
            }
            2 => {
                // All generations before the present one, or all of a lost path.
                let wire = world.wires[path].borrow();
                if wire.generation > 0 {
                    let through = wire.generation - 1;
                    drop(wire);
                    ghosts.retain(|(on, generation, ..)| *on != path || *generation > through);
                    world.fence(path, through);
                }
            }
            3 => world.restore(path),
            4 => {
                let wire = world.wires[path].borrow();
                let of = |sent: &Sent| (path, wire.generation, sent.sector, sent.data);
                ghosts.extend(wire.sent.iter().filter(|sent| sent.op == Op::Write).map(of));
                drop(wire);
                world.lose(path, false);
            }
            5 => {
                // A command of a lost connection is executed late.
                if !ghosts.is_empty() {
                    let (_, _, sector, data) = ghosts.swap_remove(rng.below(ghosts.len() as u64) as usize);
                    execute(&mut medium, sector, data);
                }
            }
            _ => {
                let sector = rng.below(SECTORS) * 8;
                if let Entry::Vacant(entry) = under_way.entry(sector) {
                    data += 4096;
                    let op = if rng.below(4) == 0 { Op::Read } else { Op::Write };
                    entry.insert((op == Op::Write).then_some(data));
                    world.submit(op, sector, data);
                    world.turn();
                }
            }
        }
        world.run_until(world.now_ns + rng.below(3 * MS));
        for (sector, status) in world.ended.drain(..) {
            assert_eq!(status, Status::Ok, "seed {seed}");
            if let Some(data) = under_way.remove(&sector).expect("a bio ends once") {
                known.insert(sector, data);
            }
        }
        for (sector, data) in &known {
            if !under_way.contains_key(sector) {
                assert_eq!(medium.get(sector), Some(data), "seed {seed}, step {step}: an acknowledged write is lost");
            }
        }
    }
    // Whatever is still under way belongs to bios that have not ended.
    for (_, _, sector, _) in ghosts {
        assert!(under_way.contains_key(&sector), "seed {seed}: a ghost of an acknowledged write is left");
    }
    // Tags of the fake paths go with the queue.
    for wire in &world.wires {
        wire.borrow_mut().sent.drain(..).for_each(|sent| std::mem::forget(sent.tag));
    }
}

#[test]
fn no_ghost_write_overwrites_an_acknowledged_one() {
    (0..100_000).for_each(ghost_writes);
}
