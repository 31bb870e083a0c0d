//! `blkyard study latency-policy`: a path is chosen by its latency (H. Reinecke, linux-nvme, April 2024).
//!
//! Closed-loop clients over model paths in virtual time ([`rig`]), with the policies of `blkyard_mpath` as they are: no
//! figure depends on the machine. The post's bed is in `bed.rs`, the scenes with an oracle in `regret.rs`.
//!
//! With `--sockets` the same policies run in real time, over NVMe/TCP on loopback, beside the simulation of the same
//! paths (`sockets.rs`, judged in `agreement.rs`).

mod agreement;
mod bed;
mod oracle;
mod regret;
mod rig;
mod scenes;
mod sockets;

use std::io;

use super::StudyError;
use super::parts::{PartRun, PartsReport, run_parts, threads};

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

/// Every part, in the order of the report.
const PARTS: [PartRun<PathStudyLength>; 9] = [
    PartRun::new("sequential write", [1.0, 0.2], |length, seed| Ok(bed::pattern(&bed::PATTERNS[0], length, seed))),
    PartRun::new("random write", [1.0, 0.2], |length, seed| Ok(bed::pattern(&bed::PATTERNS[1], length, seed))),
    PartRun::new("sequential read", [1.0, 0.2], |length, seed| Ok(bed::pattern(&bed::PATTERNS[2], length, seed))),
    PartRun::new("random read", [1.0, 0.2], |length, seed| Ok(bed::pattern(&bed::PATTERNS[3], length, seed))),
    PartRun::new("decay", [5.0, 1.0], |length, seed| Ok(bed::decay(length, seed))),
    PartRun::new("capacity", [5.0, 1.0], |length, seed| Ok(bed::capacity(length, seed))),
    PartRun::new("published scenes", [10.0, 2.5], |length, seed| Ok(regret::published(length, seed))),
    PartRun::new("drawn scenes", [60.0, 3.0], |length, seed| Ok(regret::drawn(length, seed))),
    PartRun::new("hedged reads", [1.0, 0.2], |length, seed| Ok(regret::hedged(length, seed))),
];

/// Author, list, month and subject of the post.
const POST: &str = "H. Reinecke, linux-nvme, April 2024: latency-based path policy of NVMe multipath";

/// Runs all parts.
///
/// # Errors
/// A part was not run.
pub(super) fn run(is_quick: bool, seed: u64, say: impl Fn(String) + Sync) -> io::Result<PartsReport> {
    let length = PathStudyLength::new(is_quick);
    Ok(PartsReport {
        study: "latency-policy",
        title: "A path for each I/O, by five policies",
        head: "the real policies over model paths, virtual time",
        post: POST,
        time: "simulated",
        mark: "post (2024)",
        seed,
        parts: run_parts(&PARTS, (length, is_quick), seed, threads(), say)?,
    })
}

/// Runs the policies over real sockets, beside the simulation of the same paths.
///
/// # Errors
/// A target cannot be started or serves badly, or a signal came.
pub(super) fn run_on_sockets(is_quick: bool, seed: u64, say: impl Fn(String)) -> Result<PartsReport, StudyError> {
    Ok(PartsReport {
        study: "latency-policy",
        title: "A path for each I/O, by five policies",
        head: "the real host over NVMe/TCP on loopback to two targets with delayed service, real time, beside the simulation",
        post: POST,
        time: "real time, sockets",
        mark: "simulation",
        seed,
        parts: sockets::measure(sockets::SocketLength::new(is_quick), seed, say)?,
    })
}
