//! The rules of `adaptive`, over model paths in virtual time.

use blkyard_mpath::{Adaptive, ChoiceReason, PathChoice, PathIo, PathPolicy, PathSet, PathState, PolicyKind};
use blkyard_mq::{OpClass, TrackerConfig};
use blkyard_sim::{Events, ModelPath, PathModel};
use proptest::prelude::*;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const READ: PathIo = PathIo { class: OpClass::Read, bytes: 512, node: 0 };
/// Time constant of the policy: its longest window of a used path.
const TAU_NS: u64 = 10 * MS;
/// Longest time without an I/O on a usable path.
const PROBE_NS: u64 = 1_000 * MS;

/// Closed-loop clients over model paths.
struct World {
    events: Events<PathChoice>,
    set: PathSet,
    paths: Vec<ModelPath>,
    policy: Box<dyn PathPolicy>,
    /// Time, path, reason, and completions before it.
    chosen: Vec<(u64, usize, ChoiceReason)>,
    completed: u64,
}

impl World {
    fn new(policy: Box<dyn PathPolicy>, models: &[PathModel], clients: u64) -> World {
        let mut set = PathSet::new();
        models.iter().for_each(|_| assert!(set.add(PathState::default(), 0).is_some()));
        let paths = models.iter().zip(1..).map(|(model, seed)| ModelPath::new(*model, seed)).collect();
        let mut world = World { events: Events::default(), set, paths, policy, chosen: Vec::new(), completed: 0 };
        (0..clients).for_each(|_| world.submit());
        world
    }

    fn submit(&mut self) {
        let now_ns = self.events.now_ns();
        let choice = self.policy.choose(&self.set, &READ, now_ns).expect("a path is usable");
        self.chosen.push((now_ns, choice.path, choice.reason));
        let ends_ns = self.paths[choice.path].submit(now_ns, READ.bytes);
        self.events.at(ends_ns, choice);
    }

    /// Runs until this time.
    fn run(&mut self, until_ns: u64) {
        while self.events.next_ns().is_some_and(|ns| ns < until_ns) {
            let Some(choice) = self.events.advance() else { break };
            self.paths[choice.path].complete();
            self.policy.complete(choice, self.events.now_ns());
            self.completed += 1;
            self.submit();
        }
    }

    /// Part of the I/Os in this time that a path got.
    fn share(&self, path: usize, from_ns: u64, until_ns: u64) -> f64 {
        let within: Vec<_> = self.chosen.iter().filter(|(ns, ..)| (from_ns..until_ns).contains(ns)).collect();
        within.iter().filter(|(_, on, _)| *on == path).count() as f64 / within.len().max(1) as f64
    }
}

fn adaptive() -> Box<dyn PathPolicy> {
    Box::new(Adaptive::default())
}

fn model(latency_us: u64) -> PathModel {
    PathModel::new(latency_us * US / 2, latency_us * US / 2)
}

#[test]
fn equal_paths_are_within_two_percent_of_round_robin() {
    for (clients, paths) in [(1, 2), (8, 2), (48, 2), (64, 3), (96, 4)] {
        let completed = |kind: PolicyKind| {
            let mut world = World::new(kind.build(TrackerConfig::default()), &vec![model(140); paths], clients);
            world.run(500 * MS);
            world.completed as f64
        };
        let ratio = completed(PolicyKind::Adaptive) / completed(PolicyKind::RoundRobin);
        assert!(ratio > 0.98, "{clients} clients on {paths} paths: {ratio}");
    }
}

#[test]
fn after_a_step_the_shares_converge_within_three_time_constants() {
    let mut world = World::new(adaptive(), &[model(100), model(200)], 16);
    world.run(300 * MS);
    assert!(world.share(0, 100 * MS, 300 * MS) > 0.9, "{}", world.share(0, 100 * MS, 300 * MS));
    world.paths[0].set_model(model(800));
    world.run(600 * MS);
    let (from_ns, until_ns) = (300 * MS + 3 * TAU_NS, 600 * MS);
    assert!(world.share(1, from_ns, until_ns) > 0.9, "{}", world.share(1, from_ns, until_ns));
    // Back again: a probe of the slow path is due after its share of the time, then the same holds.
    world.paths[0].set_model(model(100));
    world.run(1000 * MS);
    let (from_ns, until_ns) = (600 * MS + 3 * TAU_NS, 1000 * MS);
    assert!(world.share(0, from_ns, until_ns) > 0.9, "{}", world.share(0, from_ns, until_ns));
}

#[test]
fn a_wide_path_gets_a_large_load_within_milliseconds() {
    let wide = PathModel { channels: 512, ..model(1000) };
    let mut world = World::new(adaptive(), &[model(40), wide], 16);
    world.run(20 * MS);
    (16..512).for_each(|_| world.submit());
    world.run(60 * MS);
    let in_flight = world.paths[1].in_flight();
    assert!(in_flight > 64, "{in_flight} of 512 I/Os on the wide path");
}

#[test]
fn a_path_that_became_faster_is_known_by_one_probe() {
    let mut world = World::new(adaptive(), &[model(200), model(1000)], 1);
    world.run(1000 * MS);
    world.paths[1].set_model(model(150));
    let before = world.chosen.len();
    world.run(3000 * MS);
    let probe = world.chosen[before..].iter().position(|(_, path, _)| *path == 1).expect("a probe");
    let (at_ns, ..) = world.chosen[before + probe];
    assert!(world.share(1, at_ns, at_ns + 5 * MS) > 0.9, "{}", world.share(1, at_ns, at_ns + 5 * MS));
}

#[test]
fn a_silent_path_is_passed_over_before_it_answers() {
    let mut world = World::new(adaptive(), &[model(100), model(120)], 32);
    world.run(100 * MS);
    world.paths[0].set_model(model(10_000_000));
    let on_silent = |world: &World| world.chosen.iter().filter(|(ns, path, _)| *ns >= 100 * MS && *path == 0).count();
    world.run(200 * MS);
    assert!(on_silent(&world) <= 32, "{} I/Os on a path that answers none", on_silent(&world));
    let later: Vec<_> = world.chosen.iter().filter(|(ns, path, _)| *ns > 101 * MS && *path == 0).collect();
    assert!(later.is_empty(), "{later:?}, {} on the other", world.share(1, 101 * MS, 200 * MS));
}

#[test]
fn a_lost_path_comes_back_unmeasured() {
    let mut world = World::new(adaptive(), &[model(100), model(200)], 4);
    world.run(50 * MS);
    world.set.set_state(0, PathState { ready: false, ..PathState::default() });
    world.run(100 * MS);
    assert!((world.share(1, 51 * MS, 100 * MS) - 1.0).abs() < f64::EPSILON);
    world.set.set_state(0, PathState::default());
    world.run(150 * MS);
    let back = world.chosen.iter().find(|(ns, path, _)| *ns > 100 * MS && *path == 0);
    assert!(matches!(back, Some((_, _, ChoiceReason::Unmeasured))), "{back:?}");
    assert!(world.share(0, 110 * MS, 150 * MS) > 0.9, "{}", world.share(0, 110 * MS, 150 * MS));
}

#[test]
fn an_abandoned_io_leaves_no_load_and_no_latency() {
    let mut set = PathSet::new();
    (0..2).for_each(|_| assert!(set.add(PathState::default(), 0).is_some()));
    let mut policy = Adaptive::default();
    let fresh = format!("{policy:?}");
    let first = policy.choose(&set, &READ, 5).expect("a path");
    policy.abandon(first);
    let again = policy.choose(&set, &READ, 5).expect("a path");
    assert_eq!((again.path, again.reason), (0, ChoiceReason::Unmeasured));
    policy.abandon(again);
    assert_ne!(fresh, format!("{policy:?}"), "the time of the last choice is kept");
}

/// I/Os in a second of clients that read 1 MiB and 128 KiB in turn, over two links of which one is twice as fast.
fn mixed_sizes(kind: PolicyKind) -> u64 {
    let link = |mb: u64| PathModel { bytes_per_s: mb * 1_000_000, channels: 256, ..model(140) };
    let mut set = PathSet::new();
    let mut paths = [link(3000), link(1500)].map(|model| ModelPath::new(model, 3));
    paths.iter().for_each(|_| assert!(set.add(PathState::default(), 0).is_some()));
    let (mut policy, mut events) = (kind.build(TrackerConfig::default()), Events::default());
    let submit = |policy: &mut Box<dyn PathPolicy>, paths: &mut [ModelPath; 2], now_ns: u64, number: u64| {
        let io = PathIo { bytes: if number.is_multiple_of(2) { 1 << 20 } else { 128 << 10 }, ..READ };
        let choice = policy.choose(&set, &io, now_ns).expect("a path is usable");
        (paths[choice.path].submit(now_ns, io.bytes), choice)
    };
    let mut completed = 0;
    for number in 0..16 {
        let (ends_ns, choice) = submit(&mut policy, &mut paths, 0, number);
        events.at(ends_ns, choice);
    }
    while events.next_ns().is_some_and(|ns| ns < 1000 * MS) {
        let Some(choice): Option<PathChoice> = events.advance() else { break };
        let now_ns = events.now_ns();
        paths[choice.path].complete();
        policy.complete(choice, now_ns);
        completed += 1;
        let (ends_ns, choice) = submit(&mut policy, &mut paths, now_ns, completed);
        events.at(ends_ns, choice);
    }
    completed
}

#[test]
fn large_sizes_are_told_apart_on_a_link() {
    let ratio = mixed_sizes(PolicyKind::Adaptive) as f64 / mixed_sizes(PolicyKind::QueueDepth) as f64;
    assert!(ratio > 1.0, "{ratio}");
}

/// Number of probes of the second path in this time.
fn probes(world: &World, from_ns: u64, until_ns: u64) -> usize {
    let is_probe = |(ns, path, why): &&(u64, usize, ChoiceReason)| {
        (from_ns..until_ns).contains(ns) && *path == 1 && *why == ChoiceReason::Probe
    };
    world.chosen.iter().filter(is_probe).count()
}

#[test]
fn probes_of_an_unchanged_path_become_rarer() {
    let mut world = World::new(adaptive(), &[model(100), model(1000)], 1);
    world.run(4000 * MS);
    let (first, last) = (probes(&world, 0, 500 * MS), probes(&world, 3500 * MS, 4000 * MS));
    assert!(first > 2 * last && last > 0, "{first} in the first half second, {last} in the last");
}

#[test]
fn a_path_that_recovers_often_is_probed_more_often() {
    let mut still = World::new(adaptive(), &[model(200), model(1000)], 1);
    still.run(2000 * MS);
    let mut changing = World::new(adaptive(), &[model(200), model(1000)], 1);
    for half in 1..=100 {
        changing.run(half * 20 * MS);
        changing.paths[1].set_model(model(if half % 2 == 1 { 40 } else { 1000 }));
    }
    let (still, changing) = (probes(&still, 0, 2000 * MS), probes(&changing, 0, 2000 * MS));
    assert!(changing > 3 * still, "{changing} probes, {still} if nothing changes");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_unmeasured_path_gets_at_most_its_fair_share(
        latencies_us in prop::collection::vec(20_u64..50_000, 2..8),
        clients in 1_u64..256,
    ) {
        let models: Vec<_> = latencies_us.iter().map(|us| model(*us)).collect();
        let mut world = World::new(adaptive(), &models, clients);
        world.run(50 * MS);
        let fair = (clients as usize).div_ceil(models.len()).max(2);
        for path in 0..models.len() {
            let unmeasured = world.chosen.iter();
            let unmeasured = unmeasured.filter(|(_, on, why)| *on == path && *why == ChoiceReason::Unmeasured);
            let count = unmeasured.count();
            prop_assert!(count <= fair, "path {path} of {latencies_us:?}: {count} I/Os, fair {fair}");
        }
    }

    #[test]
    fn every_usable_path_gets_a_probe_in_time(
        latencies_us in prop::collection::vec(20_u64..20_000, 2..6),
        clients in 1_u64..32,
    ) {
        let models: Vec<_> = latencies_us.iter().map(|us| model(*us)).collect();
        let mut world = World::new(adaptive(), &models, clients);
        let end_ns = 3 * PROBE_NS;
        world.run(end_ns);
        let slowest_ns = latencies_us.iter().max().map_or(0, |us| us * US);
        // The next I/O after the time is up is the probe; paths are probed one at a time, a millisecond apart.
        let bound_ns = PROBE_NS + 4 * slowest_ns + 10 * MS;
        for path in 0..models.len() {
            let times = world.chosen.iter().filter(|(_, on, _)| *on == path).map(|(ns, ..)| *ns);
            let times: Vec<u64> = std::iter::once(0).chain(times).chain([end_ns]).collect();
            let gap_ns = times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
            prop_assert!(gap_ns <= bound_ns, "path {path} of {latencies_us:?}, {clients} clients: {gap_ns} ns unused");
        }
    }
}
