//! The post's bed: 48 clients of 512 bytes over two paths of 24 channels, of which one is slower.
//!
//! The post gives neither its base policy nor its fabric. Here the base is `round-robin`. Wire, service, asymmetry and
//! bursts are fitted, so that `round-robin` has about the post's mean, and printed; all else follows from them.

use blkyard_mpath::PolicyKind;
use blkyard_mq::TrackerConfig;
use blkyard_sim::{PathBurst, PathModel};

use super::PathStudyLength;
use super::rig::{Chooser, PathRun, PathScene, play};
use super::scenes::{BURST, MS, US, post_paths};
use crate::study::goals::PostClaim;
use crate::study::parts::{Drawn, Part, column};

const CLIENTS: u64 = 48;

/// A pattern of the post.
#[derive(Debug)]
pub(super) struct PostPattern {
    name: &'static str,
    /// Mean and deviation, us: base, `latency`, `latency` with decay 10.
    post: [(f64, f64); 3],
    paths: fn() -> Vec<PathModel>,
    fitted: &'static str,
}

/// The random writes' stage: one I/O at a time on each path, heavy-tailed.
const STAGE_US: u64 = 82;
/// Asymmetry of the random writes, in hundredths.
const STAGE_PERCENT: u64 = 250;

pub(super) const PATTERNS: [PostPattern; 4] = [
    PostPattern {
        name: "sequential write",
        post: [(186.0, 331.0), (178.0, 113.0), (182.0, 65.0)],
        paths: || {
            post_paths(
                50,
                68,
                150,
                Some(PathBurst { every_ns: 60 * MS, at_ns: 10 * MS, for_ns: 6 * MS, percent: 2000 }),
            )
        },
        fitted: "wire 50 us, service 68 us, one path 1.5 times slower, 20 times slower for 6 ms of 60",
    },
    PostPattern {
        name: "random write",
        post: [(4598.0, 7903.0), (3427.0, 6703.0), (2619.0, 5894.0)],
        paths: || {
            let stage = |percent| PathModel {
                channels: 1,
                sigma_milli: 1500,
                ..PathModel::new(60 * US, STAGE_US * percent * US / 100)
            };
            vec![stage(100), stage(STAGE_PERCENT)]
        },
        fitted: "wire 60 us, a stage of one I/O at a time per path: mean 82 us, log-deviation 1.5, one path 2.5 times slower",
    },
    PostPattern {
        name: "sequential read",
        post: [(149.0, 65.0), (140.0, 59.0), (142.0, 57.0)],
        paths: || post_paths(48, 63, 150, Some(PathBurst { percent: 280, ..BURST })),
        fitted: "wire 48 us, service 63 us, one path 1.5 times slower, 2.8 times slower for 5 ms of 60",
    },
    PostPattern {
        name: "random read",
        post: [(150.0, 68.0), (141.0, 58.0), (140.0, 57.0)],
        paths: || post_paths(48, 63, 150, Some(PathBurst { percent: 300, ..BURST })),
        fitted: "wire 48 us, service 63 us, one path 1.5 times slower, 3 times slower for 5 ms of 60",
    },
];

const DECAY_10: Chooser = Chooser::Latency(TrackerConfig { window_ns: 2 * MS, samples_min: 2, decay: 10 });

/// Every row: a policy, and the post's row it answers to.
const ROWS: [(&str, Chooser, Option<usize>); 6] = [
    ("numa", Chooser::Policy(PolicyKind::Numa), None),
    ("round-robin", Chooser::Policy(PolicyKind::RoundRobin), Some(0)),
    ("queue-depth", Chooser::Policy(PolicyKind::QueueDepth), None),
    ("latency", Chooser::Policy(PolicyKind::Latency), Some(1)),
    ("latency, decay 10", DECAY_10, Some(2)),
    ("adaptive", Chooser::Policy(PolicyKind::Adaptive), None),
];

/// All policies with a pattern, beside the post's rows.
pub(super) fn pattern(pattern: &PostPattern, length: PathStudyLength, seed: u64) -> Part {
    let scene = PathScene::new((pattern.paths)(), CLIENTS, length.bed_ms * MS);
    let runs: Vec<PathRun> = ROWS.iter().map(|(_, chooser, _)| play(&scene, *chooser, seed)).collect();
    let base = &runs[1];
    let mut part = Part {
        name: pattern.name,
        title: format!("{} of 512 B, 48 clients, two paths", pattern.name),
        columns: vec![
            column("mean_us", "mean us", 1),
            column("stdev_us", "stdev us", 1),
            column("p99_us", "p99 us", 0),
            column("mean_ratio", "mean / rr", 3),
            column("stdev_ratio", "stdev / rr", 3),
            column("post_mean_us", "post us", 0),
            column("post_stdev_us", "post stdev", 0),
            column("post_mean_ratio", "post mean /", 3),
            column("post_stdev_ratio", "stdev /", 3),
        ],
        drawn: Drawn { bar: "mean_us", deviation: "stdev_us", post: "post_mean_us" },
        notes: vec![format!("fitted: {}; the mean of round-robin holds by construction", pattern.fitted)],
        ..Part::default()
    };
    for ((name, _, post), run) in ROWS.iter().zip(&runs) {
        let post = post.map(|row| pattern.post[row]);
        let (post_mean, post_stdev) = pattern.post[0];
        part.row(
            *name,
            [
                Some(run.mean_us),
                Some(run.stdev_us),
                Some(run.p99_us),
                Some(run.mean_us / base.mean_us),
                Some(run.stdev_us / base.stdev_us),
                post.map(|(mean, _)| mean),
                post.map(|(_, stdev)| stdev),
                post.map(|(mean, _)| mean / post_mean),
                post.map(|(_, stdev)| stdev / post_stdev),
            ],
        );
    }
    let adaptive = &runs[5];
    let ratios = |row: usize| {
        let ((mean, stdev), (base_mean, base_stdev)) = (pattern.post[row], pattern.post[0]);
        (mean / base_mean, stdev / base_stdev)
    };
    for (row, what) in [(1, "latency"), (2, "latency, decay 10")] {
        let ((mean, stdev), run) = (ratios(row), &runs[row + 2]);
        let (found_mean, found_stdev) = (run.mean_us / base.mean_us, run.stdev_us / base.stdev_us);
        let reproduced = found_mean <= mean + 0.02 && found_stdev <= stdev + 0.1;
        part.claims.push(PostClaim {
            what: format!("{}, {what}: mean {mean:.3} and deviation {stdev:.3} of the base", pattern.name),
            found: format!("{found_mean:.3} and {found_stdev:.3}"),
            verdict: reproduced.into(),
            reason: if reproduced { "".into() } else { herding(run, base).into() },
        });
    }
    let (mean, stdev) = (ratios(1).0.min(ratios(2).0), ratios(1).1.min(ratios(2).1));
    part.at_most(
        format!("{}: mean of adaptive to round-robin, against the post's best", pattern.name),
        adaptive.mean_us / base.mean_us,
        mean,
        "",
    );
    part.at_most(
        format!("{}: deviation of adaptive to round-robin, at most 0.65", pattern.name),
        adaptive.stdev_us / base.stdev_us,
        0.65,
        "",
    );
    part.at_most(
        format!("{}: deviation of adaptive to round-robin, against the post's best", pattern.name),
        adaptive.stdev_us / base.stdev_us,
        stdev,
        "",
    );
    let others = runs[1..5].iter().map(|run| run.mean_us).fold(f64::INFINITY, f64::min);
    part.at_most(
        format!("{}: mean of adaptive to the best of the others", pattern.name),
        adaptive.mean_us / others,
        1.0,
        "",
    );
    if pattern.name == "random write" {
        part.notes.push(format!(
            "with both paths saturated the best mean is 2 / (1 + asymmetry) of round-robin's: the post's {:.3} and {:.3} imply {:.2} and {:.2}",
            pattern.post[1].0 / pattern.post[0].0,
            pattern.post[2].0 / pattern.post[0].0,
            2.0 * pattern.post[0].0 / pattern.post[1].0 - 1.0,
            2.0 * pattern.post[0].0 / pattern.post[2].0 - 1.0,
        ));
    }
    part
}

/// `latency` with every decay.
pub(super) fn decay(length: PathStudyLength, seed: u64) -> Part {
    let columns = PATTERNS.iter().flat_map(|pattern| match pattern.name {
        "sequential write" => [column("seq_write_mean_us", "seq. write", 1), column("seq_write_stdev_us", "stdev", 1)],
        "random write" => [column("rand_write_mean_us", "rand. write", 0), column("rand_write_stdev_us", "stdev", 0)],
        "sequential read" => [column("seq_read_mean_us", "seq. read", 1), column("seq_read_stdev_us", "stdev", 1)],
        _ => [column("rand_read_mean_us", "rand. read", 1), column("rand_read_stdev_us", "stdev", 1)],
    });
    let mut part = Part {
        name: "decay",
        title: "latency by its decay: per cent kept for each idle window; mean and deviation, us".into(),
        columns: columns.collect(),
        drawn: Drawn { bar: "seq_write_stdev_us", ..Drawn::default() },
        notes: vec!["the post says that decay steers the deviation".into()],
        ..Part::default()
    };
    for decay in (0..=100).step_by(10) {
        let chooser = Chooser::Latency(TrackerConfig { decay, ..TrackerConfig::default() });
        let runs = PATTERNS
            .iter()
            .map(|pattern| play(&PathScene::new((pattern.paths)(), CLIENTS, length.bed_ms * MS), chooser, seed));
        let values: Vec<_> = runs.flat_map(|run| [Some(run.mean_us), Some(run.stdev_us)]).collect();
        part.row(format!("decay {decay}"), values);
    }
    part
}

/// Highest throughput of so many clients, I/Os per second: the fastest path is filled up to where it begins to queue,
/// then the next.
fn bound(paths: &[PathModel], clients: u64) -> f64 {
    let mut paths: Vec<_> = paths.iter().map(|path| (path.latency_at_ns(512, 0) as f64, path)).collect();
    paths.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut left = clients as f64;
    let mut iops = 0.0;
    for (latency_ns, path) in paths {
        let window = f64::from(path.channels) * latency_ns / path.service_ns as f64;
        let used = window.min(left);
        left -= used;
        iops += used * 1e9 / latency_ns;
    }
    iops
}

/// `adaptive` against the capacity of the paths, by asymmetry.
pub(super) fn capacity(length: PathStudyLength, seed: u64) -> Part {
    let mut part = Part {
        name: "capacity",
        title: "48 clients, two paths of 24 channels, by asymmetry: mean us, and its ratio to round-robin".into(),
        columns: vec![
            column("round_robin_us", "round-robin", 1),
            column("queue_depth_us", "queue-depth", 1),
            column("adaptive_us", "adaptive", 1),
            column("best_split_us", "best split", 1),
            column("bound_us", "bound", 1),
            column("ratio", "to rr", 3),
            column("over_bound", "over bound", 3),
            column("stdev_ratio", "stdev / rr", 3),
        ],
        drawn: Drawn { bar: "adaptive_us", deviation: "", post: "bound_us" },
        notes: vec![
            "bound: every channel of the faster path always busy, and never a queue (service times without chance)".into(),
            "best split: the best fixed division of the clients, found by trying all; chance in the service times is in it".into(),
            "wide: 60 us of wire beside 80 us of service; narrow: 1 us of wire, where every client needs a channel".into(),
        ],
        ..Part::default()
    };
    for (shape, wire_us) in [("wide", 60), ("narrow", 1)] {
        for percent in [100, 150, 250] {
            let paths = post_paths(wire_us, 80, percent, None);
            let scene = PathScene::new(paths.clone(), CLIENTS, length.bed_ms * MS);
            let run = |chooser| play(&scene, chooser, seed);
            let [round_robin, queue_depth, adaptive] =
                [PolicyKind::RoundRobin, PolicyKind::QueueDepth, PolicyKind::Adaptive]
                    .map(|kind| run(Chooser::Policy(kind)));
            let short = PathScene { run_ns: scene.run_ns / 4, ..scene.clone() };
            let splits = (CLIENTS / 2..=CLIENTS).map(|first| play(&short, Chooser::Split(first), seed).mean_us);
            let split = splits.fold(f64::INFINITY, f64::min);
            let bound_us = CLIENTS as f64 * 1e6 / bound(&paths, CLIENTS);
            let at = format!("{shape}, {:.1} to 1", percent as f64 / 100.0);
            part.row(
                at.clone(),
                [
                    round_robin.mean_us,
                    queue_depth.mean_us,
                    adaptive.mean_us,
                    split,
                    bound_us,
                    adaptive.mean_us / round_robin.mean_us,
                    adaptive.mean_us / bound_us,
                    adaptive.stdev_us / round_robin.stdev_us,
                ]
                .map(Some),
            );
            if percent == 100 {
                part.at_most(
                    "mean of adaptive to round-robin on equal paths",
                    adaptive.mean_us / round_robin.mean_us,
                    1.02,
                    at,
                );
            } else {
                part.at_most("mean of adaptive to the capacity bound", adaptive.mean_us / bound_us, 1.03, at);
            }
        }
    }
    part
}

/// How far the clients of a run crowd one path, beside the base.
fn herding(run: &PathRun, base: &PathRun) -> String {
    let [found, usual] = [run, base].map(|run| 100.0 * run.beside_idle);
    format!("{found:.0} % of the I/Os were sent while the other path had none, {usual:.0} % with round-robin")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_of_saturated_paths_follows_from_their_asymmetry() {
        let narrow = |percent| post_paths(0, 80, percent, None);
        let ratio = |percent| {
            let paths = narrow(percent);
            // Round robin gets twice what the slower path serves.
            2.0 * 24.0 * 1e9 / paths[1].service_ns as f64 / bound(&paths, CLIENTS)
        };
        assert!((ratio(150) - 0.8).abs() < 0.001 && (ratio(250) - 2.0 / 3.5).abs() < 0.001);
    }

    #[test]
    fn a_path_that_is_not_filled_leaves_the_other_unused() {
        let paths = post_paths(60, 80, 300, None);
        assert!((bound(&paths, 10) - 10.0 / 140e-6).abs() < 1.0);
    }
}
