//! Scenes in which every policy is compared with an oracle: regret is the oracle's throughput over the policy's, less
//! one, in per cent. The published scenes have names; the drawn ones come from the seed.

use blkyard_mpath::PolicyKind;
use blkyard_mq::TrackerConfig;
use blkyard_sim::Rng;

use super::PathStudyLength;
use super::oracle::OracleRule;
use super::rig::{Chooser, PathRun, PathScene, play};
use super::scenes::{self, MS};
use crate::study::parts::{Drawn, Part, column};

/// Largest regret of `adaptive`, per cent.
const REGRET_MAX: f64 = 5.0;

/// The compared policies; `adaptive` is the last.
const CHOOSERS: [Chooser; 6] = [
    Chooser::Policy(PolicyKind::Numa),
    Chooser::Policy(PolicyKind::RoundRobin),
    Chooser::Policy(PolicyKind::QueueDepth),
    Chooser::Policy(PolicyKind::Latency),
    Chooser::Latency(TrackerConfig { window_ns: 2 * MS, samples_min: 2, decay: 10 }),
    Chooser::Policy(PolicyKind::Adaptive),
];
const NAMES: [&str; 6] = ["numa", "round-robin", "queue-depth", "latency", "latency, decay 10", "adaptive"];
const ADAPTIVE: usize = 5;
const QUEUE_DEPTH: usize = 2;

/// A scene with the oracle and every policy.
struct Compared {
    oracle: PathRun,
    runs: Vec<PathRun>,
}

impl Compared {
    fn new(scene: &PathScene, seed: u64) -> Compared {
        let rules = OracleRule::ALL.map(|rule| play(scene, Chooser::Oracle(rule), seed));
        let best = rules.into_iter().max_by(|one, other| one.iops.total_cmp(&other.iops));
        Compared { oracle: best.unwrap_or_default(), runs: CHOOSERS.map(|chooser| play(scene, chooser, seed)).into() }
    }

    fn regret(&self, policy: usize) -> f64 {
        (self.oracle.iops / self.runs[policy].iops - 1.0) * 100.0
    }

    /// The smallest regret of the other policies.
    fn best_other(&self) -> f64 {
        (0..ADAPTIVE).map(|policy| self.regret(policy)).fold(f64::INFINITY, f64::min)
    }
}

/// The published scenes.
pub(super) fn published(length: PathStudyLength, seed: u64) -> Part {
    let mut part = Part {
        name: "published",
        title: "published scenes: regret in per cent against the oracle".into(),
        columns: vec![
            column("numa", "numa", 1),
            column("round_robin", "round-robin", 1),
            column("queue_depth", "queue-depth", 1),
            column("latency", "latency", 1),
            column("latency_decay_10", "decay 10", 1),
            column("adaptive", "adaptive", 1),
            column("oracle_mean_us", "oracle us", 1),
            column("adaptive_mean_us", "adaptive us", 1),
            column("adaptive_p99_us", "its p99", 0),
        ],
        drawn: Drawn { bar: "adaptive", ..Drawn::default() },
        notes: vec![
            "the oracle knows the paths' present parameters, not coming draws or changes; it is the best of four rules, \
             known after the run, and no bound"
                .into(),
        ],
        ..Part::default()
    };
    for (name, scene) in scenes::published(length.quick) {
        let compared = Compared::new(&scene, seed);
        let adaptive = &compared.runs[ADAPTIVE];
        let regrets = (0..CHOOSERS.len()).map(|policy| compared.regret(policy));
        let means = [compared.oracle.mean_us, adaptive.mean_us, adaptive.p99_us];
        part.row(name.clone(), regrets.chain(means).map(Some).collect::<Vec<_>>());
        part.at_most("regret of adaptive, per cent", compared.regret(ADAPTIVE), REGRET_MAX, name.clone());
        // On equal paths there is nothing to win, and an allowance of two per cent.
        let is_equal = scene.changes.is_empty() && scene.paths.windows(2).all(|pair| pair[0] == pair[1]);
        let limit = if is_equal { 1.02 } else { 1.0 };
        let worse = (100.0 + compared.regret(ADAPTIVE)) / (100.0 + compared.best_other());
        part.at_most("adaptive to the best other policy, time per I/O", worse, limit, name.clone());
        if name.contains("+30 ms") {
            let times = adaptive.iops / compared.runs[QUEUE_DEPTH].iops;
            part.at_least("throughput of adaptive to queue-depth, one path 150 times slower", times, 1.8, name);
        }
    }
    part
}

/// The drawn scenes.
pub(super) fn drawn(length: PathStudyLength, seed: u64) -> Part {
    let mut part = Part {
        name: "drawn",
        title: format!(
            "{} drawn scenes of 2 to 8 paths, 20 us to 50 ms, 1 to 4096 in flight, 512 B to 1 MiB, changes every 10 ms to 10 s: regret in per cent",
            length.drawn
        ),
        columns: vec![
            column("median", "median", 1),
            column("mean", "mean", 1),
            column("p90", "90th pct.", 1),
            column("worst", "worst", 1),
            column("within_5", "within 5 %", 0),
            column("best", "best of six", 0),
        ],
        drawn: Drawn { bar: "median", ..Drawn::default() },
        ..Part::default()
    };
    let mut rng = Rng::new(seed);
    let scenes: Vec<_> = (0..length.drawn).map(|_| scenes::drawn(rng.draw(), length.drawn_ios)).collect();
    let compared: Vec<_> = scenes.iter().map(|scene| Compared::new(scene, seed)).collect();
    for (policy, name) in NAMES.into_iter().enumerate() {
        let mut regrets: Vec<f64> = compared.iter().map(|scene| scene.regret(policy)).collect();
        regrets.sort_by(f64::total_cmp);
        let of = |part: f64| regrets[((regrets.len() - 1) as f64 * part) as usize];
        let is_best = |scene: &&Compared| (0..CHOOSERS.len()).all(|other| scene.regret(policy) <= scene.regret(other));
        let values = [
            of(0.5),
            regrets.iter().sum::<f64>() / regrets.len() as f64,
            of(0.9),
            of(1.0),
            regrets.iter().filter(|regret| **regret <= REGRET_MAX).count() as f64,
            compared.iter().filter(is_best).count() as f64,
        ];
        part.row(name, values.map(Some));
        if policy == ADAPTIVE {
            part.at_most("regret of adaptive in each drawn scene, per cent", of(1.0), REGRET_MAX, "the worst");
        }
    }
    let still = compared.iter().zip(&scenes).filter(|(_, scene)| scene.changes.is_empty());
    let mut still: Vec<f64> = still.map(|(compared, _)| compared.regret(ADAPTIVE)).collect();
    still.sort_by(f64::total_cmp);
    part.notes.push(format!(
        "without a change within the run: {} scenes, adaptive's median {:.1}, worst {:.1}",
        still.len(),
        still.get(still.len() / 2).copied().unwrap_or(f64::NAN),
        still.last().copied().unwrap_or(f64::NAN)
    ));
    part
}

/// Hedged reads in the scene in which both paths stall.
pub(super) fn hedged(length: PathStudyLength, seed: u64) -> Part {
    let mut part = Part {
        name: "hedged",
        title: "reads on two paths that stall 10 ms for 0.5 % of I/O".into(),
        columns: vec![
            column("mean_us", "mean us", 1),
            column("p99_us", "p99", 1),
            column("p999_us", "p99.9", 1),
            column("more_io", "more I/O, %", 2),
        ],
        drawn: Drawn { bar: "p999_us", ..Drawn::default() },
        ..Part::default()
    };
    let scene = scenes::published(length.quick).into_iter().find(|(name, _)| name == scenes::BOTH_STALL);
    let Some((name, scene)) = scene else { unreachable!("the scene is published") };
    let runs = [("adaptive", Chooser::Policy(PolicyKind::Adaptive)), ("adaptive, hedged", Chooser::Hedged)]
        .map(|(name, chooser)| (name, play(&scene, chooser, seed)));
    let more = |run: &PathRun| run.hedges as f64 / run.ios as f64 * 100.0;
    for (name, run) in &runs {
        part.row(*name, [run.mean_us, run.p99_us, run.p999_us, more(run)].map(Some));
    }
    let [(_, plain), (_, hedged)] = &runs;
    part.at_least("p99.9 without hedged reads to that with them", plain.p999_us / hedged.p999_us, 10.0, name.clone());
    part.at_most("more I/O by hedged reads, per cent", more(hedged), 1.0, name);
    part
}
