//! `blkyard study time-slice`: streams that share a device, ordered by time slices or by `fair` (A. Herrmann,
//! linux-kernel, February 2016: "blk-mq: per software queue time slices").
//!
//! Everything is virtual time on device models ([`rig`]): no figure depends on the machine. Each part returns a
//! [`Part`], from which report and picture are made.

mod beside;
mod cache;
mod drawn;
mod job;
mod jobs;
mod neighbour;
mod parallel;
mod reader;
mod rig;
mod variation;

use std::io;

use crate::study::parts::{PartRun, PartsReport, run_parts, threads};

/// How much is run.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimesliceLength {
    /// Runs of scenes that depend on positions, each with a separate seed.
    pub(super) runs: u64,
    /// How long jobs run that have no end, seconds.
    pub(super) seconds: u64,
}

impl TimesliceLength {
    pub(super) fn new(quick: bool) -> TimesliceLength {
        if quick { TimesliceLength { runs: 4, seconds: 5 } } else { TimesliceLength { runs: 24, seconds: 60 } }
    }
}

/// Every part, in the order of the report.
const PARTS: [PartRun<TimesliceLength>; 15] = [
    PartRun::new("the disk's calibration", [4.0, 0.5], parallel::calibration),
    PartRun::new("two files read in parallel", [2.0, 0.3], parallel::readers),
    PartRun::new("two files copied in parallel", [3.0, 0.3], parallel::copies),
    PartRun::new("1 to 16 jobs on a disk", [2.0, 0.2], jobs::disk),
    PartRun::new("16 jobs on flash", [10.0, 1.2], jobs::flash),
    PartRun::new("one beside two streams on flash", [20.0, 0.4], beside::flash),
    PartRun::new("one beside two copies on flash", [10.0, 0.4], beside::flash_writes),
    PartRun::new("one beside two streams on a disk", [1.0, 0.1], beside::disk),
    PartRun::new("one beside two copies on a disk", [1.0, 0.1], beside::disk_writes),
    PartRun::new("a noisy neighbour on a path that reads", [38.0, 2.0], neighbour::path_reads),
    PartRun::new("a noisy neighbour on a path that writes", [12.0, 0.4], neighbour::path_writes),
    PartRun::new("a noisy neighbour on flash that reads", [130.0, 10.0], neighbour::flash_reads),
    PartRun::new("a noisy neighbour on flash that reads much at a time", [12.0, 1.5], neighbour::flash_large_reads),
    PartRun::new("a noisy neighbour on flash that writes", [12.0, 2.0], neighbour::flash_writes),
    PartRun::new("drawn loads on all devices", [14.0, 6.0], drawn::part),
];

/// Runs all parts.
///
/// # Errors
/// There is no memory for it.
pub(super) fn run(is_quick: bool, seed: u64, say: impl Fn(String) + Sync) -> io::Result<PartsReport> {
    let length = TimesliceLength::new(is_quick);
    Ok(PartsReport {
        study: "time-slice",
        title: "Time slices for streams that share a device",
        head: "the real queue core on models of devices, virtual time",
        post: "A. Herrmann, linux-kernel, February 2016: \"blk-mq: per software queue time slices\"",
        time: "simulated",
        mark: "post (2016)",
        seed,
        parts: run_parts(&PARTS, (length, is_quick), seed, threads(), say)?,
    })
}
