//! Paths that leave while their siblings are used.
//!
//! CVE-2026-89972: a sibling path was freed while another thread went through the list of paths. A path here belongs to
//! its queue as long as that lives, and leaves by a change of its state: there is nothing that could be freed. What is
//! tested is that such a change at any moment loses no I/O.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_mpath::{AccessState, ConnectionState, PathIo, PathSet, PathState, PolicyKind};
use blkyard_mq::{Op, OpClass, Status, TrackerConfig};
use blkyard_sim::Rng;

use crate::paths::{DEPTH, LOST, MS, World};

/// States of a path that cannot be used: lost, inaccessible, without its namespace, given up.
const UNUSABLE: [PathState; 4] = [
    LOST,
    PathState { connection: ConnectionState::Live, access: AccessState::Inaccessible, ..LOST },
    PathState { connection: ConnectionState::Live, ready: false, ..LOST },
    PathState { connection: ConnectionState::Dead, ..LOST },
];

#[test]
fn path_that_left_after_it_was_chosen_is_completed_and_not_chosen_again() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(TrackerConfig::default());
        let mut set = PathSet::new();
        (0..4).for_each(|_| assert!(set.add(PathState::default(), 0).is_some()));
        let mut rng = Rng::new(1);
        let (mut now_ns, mut in_flight) = (1000, Vec::new());
        for round in 0..20_000_u64 {
            now_ns += 1000;
            let path = rng.below(4) as usize;
            let is_leaving = rng.below(2) == 0;
            let state = if is_leaving { UNUSABLE[rng.below(4) as usize] } else { PathState::default() };
            set.set_state(path, state);
            let io = PathIo { class: OpClass::Read, bytes: 512 << rng.below(8), node: 0 };
            match policy.choose(&set, &io, now_ns) {
                Some(choice) => {
                    assert!(set.candidates().has(choice.path), "{kind:?}, round {round}: path {}", choice.path);
                    in_flight.push(choice);
                }
                None => assert_eq!(set.candidates().count(), 0, "{kind:?}, round {round}"),
            }
            // Those of paths that have left are among them, in any order.
            while in_flight.len() > 16 || (!in_flight.is_empty() && rng.below(3) == 0) {
                let choice = in_flight.swap_remove(rng.below(in_flight.len() as u64) as usize);
                if rng.below(4) == 0 { policy.abandon(choice) } else { policy.complete(choice, now_ns) }
            }
        }
    }
}

/// Time after which the threads of a loaded machine must have run.
const LONGEST: Duration = Duration::from_mins(1);

/// Threads of the connections change the states while the lane chooses among the paths.
#[test]
fn siblings_that_leave_on_another_thread_cost_no_io() {
    for kind in PolicyKind::ALL {
        let mut world = World::new(kind, 3, true);
        let monitors: Vec<_> = world.monitors.iter().flatten().map(Arc::clone).collect();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for (number, monitor) in monitors.iter().enumerate() {
                let stop = &stop;
                scope.spawn(move || {
                    let mut rng = Rng::new(number as u64);
                    // Without a path that may come back I/O would fail.
                    let states = if number == 0 { 3 } else { 4 };
                    while !stop.load(Relaxed) {
                        monitor.set_state(UNUSABLE[rng.below(states) as usize]);
                        std::thread::yield_now();
                        monitor.set_state(PathState::default());
                        std::thread::yield_now();
                    }
                });
            }
            let mut submitted = 0;
            // Paths of threads that other processes keep from running stay as they are for as long.
            let start = Instant::now();
            let mut round = 0;
            while round < 5000 || (world.ended.len() <= 1000 && start.elapsed() < LONGEST) {
                while submitted < world.ended.len() + DEPTH {
                    world.submit(Op::Read, submitted as u64 * 8, 0);
                    submitted += 1;
                }
                if round >= 5000 {
                    // Held I/O fails after 50 000 rounds, which a lane that only looks is through in no time.
                    std::thread::sleep(Duration::from_millis(2));
                }
                // I/O that is held is looked at again after a time.
                world.now_ns += MS / 10;
                world.turn();
                world.answer(round % 3, Status::Ok);
                round += 1;
            }
            stop.store(true, Relaxed);
        });
        (0..3).for_each(|path| world.restore(path));
        for path in 0..30 {
            world.now_ns += MS;
            world.answer(path % 3, Status::Ok);
        }
        let mut sectors: Vec<_> = world.ended.iter().map(|(sector, _)| *sector).collect();
        sectors.sort_unstable();
        assert!(sectors.len() > 1000, "{kind:?}: {} I/Os", sectors.len());
        assert!(sectors.iter().zip((0..).step_by(8)).all(|(sector, due)| *sector == due), "{kind:?}: each ends once");
        assert!(world.statuses().iter().all(|status| *status == Status::Ok), "{kind:?}");
        assert_eq!(world.queue.in_flight(), 0, "{kind:?}");
    }
}
