//! Hedged reads of a queue over several paths: which answer counts, and what becomes of the other.

use blkyard_mpath::{AccessState, ChoiceReason, HedgeConfig, PathState, PolicyKind};
use blkyard_mq::{EndedHedge, Op, Status};

use crate::paths::{HedgeWire, MS, World};

/// Reads before the first can be late.
const LEARNED: u64 = 300;

/// A world of two paths that has learned how long reads take, with every read on the first path.
fn learned() -> World {
    learned_with(2, 0)
}

/// The same with so many paths, and answers that take so much longer than a round.
fn learned_with(paths: usize, answer_ns: u64) -> World {
    let mut world = World::new(PolicyKind::Numa, paths, true);
    world.settings.change(|rules| rules.hedged_reads = Some(HedgeConfig::default()));
    world.wires.iter().for_each(|wire| wire.borrow_mut().hedges = Some(HedgeWire::default()));
    for _ in 0..LEARNED {
        world.submit(Op::Read, 0, 0);
        world.turn();
        world.now_ns += answer_ns;
        world.answer(0, Status::Ok);
    }
    assert_eq!(world.statuses(), [Status::Ok; LEARNED as usize]);
    world
}

/// So many hedges, and reads given up, are at this path.
fn copies(world: &World, path: usize) -> usize {
    world.wires[path].borrow().hedges.as_ref().unwrap().in_flight.len()
}

fn with<R>(world: &World, path: usize, change: impl FnOnce(&mut HedgeWire) -> R) -> R {
    change(world.wires[path].borrow_mut().hedges.as_mut().unwrap())
}

/// The oldest copy at this path ends.
fn end_copy(world: &mut World, path: usize, is_ok: bool) {
    with(world, path, |hedges| {
        let (number, _) = hedges.in_flight.remove(0);
        hedges.ended.push(EndedHedge { number, is_ok });
    });
    world.turn();
}

fn read_that_is_late(world: &mut World) {
    world.submit(Op::Read, 8, 0);
    world.turn();
    world.run_until(world.now_ns + MS);
    assert_eq!((world.sectors(0), copies(world, 1)), (vec![8], 1), "it is at both paths");
}

fn is_idle(world: &mut World) -> bool {
    let stats = world.queue.driver_mut().stats();
    (0..2).all(|path| stats.path(path).in_flight == 0)
}

#[test]
fn a_late_read_is_answered_by_the_path_that_is_first_and_given_up_at_the_other() {
    let mut world = learned();
    read_that_is_late(&mut world);
    end_copy(&mut world, 1, true);
    assert_eq!(world.statuses(), [Status::Ok]);
    assert_eq!(with(&world, 1, |hedges| (hedges.copied, hedges.released)), (1, 1));
    // The path still has it, but nobody waits for it.
    assert_eq!((world.sectors(0).len(), copies(&world, 0)), (0, 1));
    let stats = world.queue.driver_mut().stats();
    let [first, second] = [0, 1].map(|path| stats.path(path));
    assert_eq!((first.in_flight, second.in_flight, second.hedges, second.hedges_won), (1, 0, 1, 1));

    // Its slot serves the next request meanwhile.
    world.submit(Op::Read, 16, 0);
    world.turn();
    world.answer(0, Status::Ok);
    end_copy(&mut world, 0, true);
    assert_eq!(world.statuses(), [Status::Ok]);
    assert!(is_idle(&mut world));
}

#[test]
fn a_hedge_that_comes_second_is_dropped() {
    let mut world = learned();
    read_that_is_late(&mut world);
    world.answer(0, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok]);
    // Another request has the slot by then.
    world.submit(Op::Write, 24, 0);
    world.turn();
    end_copy(&mut world, 1, true);
    assert_eq!(world.statuses(), []);
    assert_eq!(with(&world, 1, |hedges| (hedges.copied, hedges.released)), (0, 1));
    world.answer(0, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok]);
    assert!(is_idle(&mut world));
}

#[test]
fn a_read_whose_data_is_coming_in_is_not_given_up() {
    let mut world = learned();
    read_that_is_late(&mut world);
    with(&world, 0, |hedges| hedges.is_receiving = true);
    end_copy(&mut world, 1, true);
    assert_eq!((world.statuses(), with(&world, 1, |hedges| hedges.copied)), (vec![], 0));
    world.answer(0, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok]);
    assert!(is_idle(&mut world));
}

#[test]
fn a_hedge_that_fails_leaves_the_read_where_it_is() {
    let mut world = learned();
    read_that_is_late(&mut world);
    end_copy(&mut world, 1, false);
    assert_eq!((world.statuses(), world.sectors(0)), (vec![], vec![8]));
    world.answer(0, Status::Medium);
    assert_eq!(world.statuses(), [Status::Medium]);
    assert!(is_idle(&mut world));
}

#[test]
fn a_lost_path_takes_its_hedged_read_back_and_the_hedge_does_not_answer_it() {
    let mut world = learned();
    read_that_is_late(&mut world);
    world.lose(0, false);
    world.turn();
    assert_eq!(world.sectors(1), [8], "it was sent again");
    end_copy(&mut world, 1, true);
    assert_eq!(world.statuses(), []);
    world.answer(1, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok]);
    assert!(is_idle(&mut world));
}

#[test]
fn writes_are_not_hedged_nor_reads_beyond_the_budget_or_without_another_path() {
    let mut world = learned();
    world.submit(Op::Write, 8, 0);
    world.turn();
    world.run_until(world.now_ns + MS);
    assert_eq!(copies(&world, 1), 0);
    world.answer(0, Status::Ok);

    // Three hundred reads make three hedges.
    (0..8).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.turn();
    world.run_until(world.now_ns + MS);
    assert_eq!((world.sectors(0).len(), copies(&world, 1)), (8, 3));
    (0..3).for_each(|_| end_copy(&mut world, 1, true));
    world.answer(0, Status::Ok);
    (0..3).for_each(|_| end_copy(&mut world, 0, true));
    assert_eq!(world.statuses(), [Status::Ok; 9]);
    assert!(is_idle(&mut world));

    let mut world = learned();
    world.set_state(1, crate::paths::LOST);
    world.submit(Op::Read, 8, 0);
    world.turn();
    world.run_until(world.now_ns + MS);
    assert_eq!(copies(&world, 1), 0);
    world.answer(0, Status::Ok);
}

#[test]
fn settings_change_with_hedges_on_their_way() {
    let mut world = learned();
    read_that_is_late(&mut world);
    world.settings.change(|rules| (rules.policy, rules.hedged_reads) = (PolicyKind::Adaptive, None));
    world.turn();
    end_copy(&mut world, 1, true);
    end_copy(&mut world, 0, true);
    assert_eq!(world.statuses(), [Status::Ok]);
    assert!(is_idle(&mut world));
    world.submit(Op::Read, 8, 0);
    world.turn();
    world.run_until(world.now_ns + MS);
    assert_eq!((copies(&world, 0), copies(&world, 1)), (0, 0));
    world.answer(0, Status::Ok);
}

#[test]
fn a_read_that_waits_beyond_the_budget_is_hedged_when_there_is_some_again() {
    let mut world = learned();
    (0..4).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.turn();
    world.run_until(world.now_ns + MS);
    assert_eq!((world.sectors(0), copies(&world, 1)), (vec![0, 8, 16, 24], 3));
    // Other I/O fills the budget, while the four are stuck.
    for _ in 0..100 {
        world.submit(Op::Write, 64, 0);
        world.turn();
        world.wires[0].borrow_mut().answers.push((4, Status::Ok));
        world.turn();
    }
    world.run_until(world.now_ns + 4 * MS);
    assert_eq!(copies(&world, 1), 4);
    (0..4).for_each(|_| end_copy(&mut world, 1, true));
    (0..4).for_each(|_| end_copy(&mut world, 0, true));
    assert_eq!(world.statuses(), [Status::Ok; 104]);
    assert!(is_idle(&mut world));
}

#[test]
fn a_hedge_goes_to_another_path_than_its_read_whatever_others_did() {
    let mut world = learned_with(3, MS / 10);
    world.submit(Op::Read, 8, 0);
    world.turn();
    world.set_state(0, PathState { access: AccessState::NonOptimized, ..PathState::default() });
    world.submit(Op::Read, 16, 0);
    world.turn();
    assert_eq!([0, 1].map(|path| world.sectors(path)), [[8], [16]]);
    world.run_until(world.now_ns + MS);
    let at = |path: usize| with(&world, path, |hedges| hedges.in_flight.iter().map(|(_, sector)| *sector).collect());
    let hedges: [Vec<u64>; 3] = [0, 1, 2].map(at);
    assert_eq!(hedges, [vec![], vec![8], vec![16]]);
    (1..3).for_each(|path| end_copy(&mut world, path, true));
    (0..2).for_each(|path| end_copy(&mut world, path, true));
    assert_eq!(world.statuses(), [Status::Ok; 2]);
}

#[test]
fn a_hedge_makes_the_policy_forget_no_path() {
    let mut world = World::new(PolicyKind::Adaptive, 2, true);
    world.settings.change(|rules| rules.hedged_reads = Some(HedgeConfig::default()));
    world.wires.iter().for_each(|wire| wire.borrow_mut().hedges = Some(HedgeWire::default()));
    for _ in 0..LEARNED {
        (0..4).for_each(|at| world.submit(Op::Read, at * 8, 0));
        world.turn();
        world.now_ns += MS / 10;
        (0..2).for_each(|path| world.answer(path, Status::Ok));
    }
    assert_eq!(world.statuses(), [Status::Ok; 4 * LEARNED as usize]);
    assert!((0..2).all(|path| world.queue.driver_mut().stats().path(path).ios > 0), "both paths are known");

    world.submit(Op::Read, 8, 0);
    world.turn();
    let late = usize::from(world.sectors(0).is_empty());
    world.run_until(world.now_ns + MS);
    end_copy(&mut world, 1 - late, true);
    end_copy(&mut world, late, true);
    assert_eq!(world.statuses(), [Status::Ok]);
    (0..4).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.turn();
    (0..2).for_each(|path| world.answer(path, Status::Ok));
    let reasons = [0, 1].map(|path| world.queue.driver_mut().stats().path(path).reason);
    assert!(!reasons.contains(&Some(ChoiceReason::Unmeasured)), "{reasons:?}");
}

#[test]
fn a_hedge_that_fails_is_no_load_of_its_path() {
    let mut world = learned();
    world.settings.change(|rules| rules.policy = PolicyKind::QueueDepth);
    read_that_is_late(&mut world);
    end_copy(&mut world, 1, false);
    world.answer(0, Status::Ok);
    (0..4).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.turn();
    assert_eq!([0, 1].map(|path| world.sectors(path).len()), [2, 2]);
    (0..2).for_each(|path| world.answer(path, Status::Ok));
    assert_eq!(world.statuses(), [Status::Ok; 5]);
}

#[test]
fn a_number_of_one_path_is_no_number_of_another() {
    let mut world = learned();
    (1..3).for_each(|at| world.submit(Op::Read, at * 8, 0));
    world.turn();
    world.run_until(world.now_ns + MS);
    let numbers = |world: &World, path| -> Vec<_> { with(world, path, |hedges| hedges.in_flight.clone()) };
    assert_eq!(numbers(&world, 1), [(1, 8), (2, 16)]);
    with(&world, 1, |hedges| {
        let (number, _) = hedges.in_flight.remove(1);
        hedges.ended.push(EndedHedge { number, is_ok: true });
    });
    world.turn();
    assert_eq!((world.statuses(), numbers(&world, 0)), (vec![Status::Ok], vec![(1, 16)]));
    // It is not the end of the other read's hedge.
    end_copy(&mut world, 0, true);
    assert_eq!((world.statuses(), numbers(&world, 1)), (vec![], vec![(1, 8)]));
    end_copy(&mut world, 1, true);
    end_copy(&mut world, 0, true);
    assert_eq!(world.statuses(), [Status::Ok]);
    assert!(is_idle(&mut world));
}

#[test]
fn reads_in_flight_are_not_hedged_once_that_is_off() {
    let mut world = learned();
    world.submit(Op::Read, 8, 0);
    world.turn();
    world.settings.change(|rules| rules.hedged_reads = None);
    world.turn();
    world.run_until(world.now_ns + MS);
    assert_eq!((world.sectors(0), copies(&world, 1)), (vec![8], 0));
    assert_eq!(world.queue.deadline_ns::<()>().filter(|due_ns| *due_ns < 50 * MS), None);
    world.answer(0, Status::Ok);
    assert_eq!(world.statuses(), [Status::Ok]);
}
