//! `blkyard study latency-policy`: a path is chosen by its latency (H. Reinecke, linux-nvme, April 2024).
//!
//! Closed-loop clients over model paths in virtual time ([`rig`]), with the policies of `blkyard_mpath` as they are: no
//! figure depends on the machine. The post's bed is in `bed.rs`, the scenes with an oracle in `regret.rs`.

mod bed;
mod oracle;
mod regret;
mod rig;
mod scenes;

use super::parts::{Part, PartsReport};

/// How much is run.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathStudyLength {
    pub(super) quick: bool,
    /// Length of a run on the post's bed, ms.
    pub(super) bed_ms: u64,
    /// Number of drawn scenes, and about how many I/Os each.
    pub(super) drawn: u64,
    pub(super) drawn_ios: u64,
}

impl PathStudyLength {
    pub(super) fn new(quick: bool) -> PathStudyLength {
        if quick {
            PathStudyLength { quick, bed_ms: 600, drawn: 12, drawn_ios: 50_000 }
        } else {
            PathStudyLength { quick, bed_ms: 3000, drawn: 100, drawn_ios: 200_000 }
        }
    }
}

/// A part of the study, from its length and seed.
type RunPart = fn(PathStudyLength, u64) -> Part;

/// Every part, and its title for progress output.
const PARTS: [(&str, RunPart); 9] = [
    ("sequential write", |length, seed| bed::pattern(&bed::PATTERNS[0], length, seed)),
    ("random write", |length, seed| bed::pattern(&bed::PATTERNS[1], length, seed)),
    ("sequential read", |length, seed| bed::pattern(&bed::PATTERNS[2], length, seed)),
    ("random read", |length, seed| bed::pattern(&bed::PATTERNS[3], length, seed)),
    ("decay", bed::decay),
    ("capacity", bed::capacity),
    ("published scenes", regret::published),
    ("drawn scenes", regret::drawn),
    ("hedged reads", regret::hedged),
];

/// Runs all parts.
pub(super) fn run(length: PathStudyLength, seed: u64, say: impl Fn(String)) -> PartsReport {
    let part = |(what, run): (&str, RunPart)| {
        say(format!("virtual time: {what} ..."));
        run(length, seed)
    };
    PartsReport {
        study: "latency-policy",
        title: "A path for each I/O, by five policies",
        head: "the real policies over model paths, virtual time",
        post_year: 2024,
        seed,
        parts: PARTS.into_iter().map(part).collect(),
    }
}
