//! A daemon as the control socket sees it: what there is to look at and to change.
//!
//! Made by `serve` when all is placed, shared with the thread of the control socket. Holds watching hands only: it
//! keeps no queue and no lane alive.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use blkyard_export::{ExportStatus, QueueWatch};
use blkyard_os::RingView;

use crate::Device;

/// What a daemon serves, and with what.
pub struct Daemon {
    /// When it began to serve.
    pub started: Instant,
    /// Seconds between the lines it prints of each export; zero for none.
    pub stats_s: AtomicU64,
    /// What it has open.
    pub devices: Vec<Device>,
    /// What others see of it.
    pub exports: Vec<ServedExport>,
    /// The threads that do the work.
    pub lanes: Vec<RunningLane>,
}

/// An export that serves.
pub struct ServedExport {
    /// As the user named it.
    pub name: String,
    /// The place of its device among the daemon's.
    pub device: usize,
    /// Its session.
    pub status: Arc<ExportStatus>,
    /// Each queue, and the number of its lane.
    pub queues: Vec<(QueueWatch, usize)>,
}

/// A lane that runs.
pub struct RunningLane {
    /// Its number, for its queues.
    pub number: usize,
    /// The name of its thread.
    pub thread: String,
    /// CPUs it is kept on; any if none are named.
    pub cpus: Option<Vec<u32>>,
    /// How long it looks for work before it sleeps.
    pub spin_us: u64,
    /// What can be seen of its ring.
    pub ring: Arc<RingView>,
}

impl Daemon {
    /// Seconds between the lines it prints; none if it prints none.
    pub fn stats_every(&self) -> Option<u64> {
        Some(self.stats_s.load(Relaxed)).filter(|seconds| *seconds > 0)
    }
}
