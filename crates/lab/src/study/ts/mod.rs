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

use std::io;

use crate::study::parts::{Part, PartsReport};

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

/// A part, and its title for progress output.
type Runs = fn(TimesliceLength, u64) -> io::Result<Part>;
const PARTS: [(&str, Runs); 15] = [
    ("the one figure that is calibrated", parallel::calibration),
    ("two files read in parallel", parallel::readers),
    ("two files copied in parallel", parallel::copies),
    ("1 to 16 jobs on a disk", jobs::disk),
    ("16 jobs on flash", jobs::flash),
    ("one beside two streams on flash", beside::flash),
    ("one beside two copies on flash", beside::flash_writes),
    ("one beside two streams on a disk", beside::disk),
    ("one beside two copies on a disk", beside::disk_writes),
    ("a noisy neighbour on a path that reads", neighbour::path_reads),
    ("a noisy neighbour on a path that writes", neighbour::path_writes),
    ("a noisy neighbour on flash that reads", neighbour::flash_reads),
    ("a noisy neighbour on flash that reads much at a time", neighbour::flash_large_reads),
    ("a noisy neighbour on flash that writes", neighbour::flash_writes),
    ("drawn loads on all devices", drawn::part),
];

/// Runs all parts.
///
/// # Errors
/// There is no memory for it.
pub(super) fn run(length: TimesliceLength, seed: u64, say: impl Fn(String)) -> io::Result<PartsReport> {
    let part = |(what, run): (&str, Runs)| {
        say(format!("virtual time: {what} ..."));
        run(length, seed)
    };
    Ok(PartsReport {
        study: "time-slice",
        title: "Time slices for streams that share a device",
        head: "the real queue core on models of devices, virtual time",
        post_year: 2016,
        seed,
        parts: PARTS.into_iter().map(part).collect::<io::Result<_>>()?,
    })
}
