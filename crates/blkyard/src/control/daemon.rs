//! A daemon as the control socket sees it: what there is to look at and to change.
//!
//! Made by `serve` when all is placed, shared with the thread of the control socket. Holds watching hands only: it
//! keeps no queue and no lane alive.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use blkyard_export::{ExportHand, ExportStatus, QueueWatch};
use blkyard_mq::DeviceInfo;
use blkyard_os::RingView;

use crate::Device;

/// What a daemon serves, and with what.
pub struct Daemon {
    /// When it began to serve.
    pub started: Instant,
    /// Seconds between the lines it prints of each export; zero for none.
    pub stats_s: AtomicU64,
    /// What it has open.
    pub devices: Vec<ServedDevice>,
    /// What others see of it.
    pub exports: Vec<ServedExport>,
    /// The threads that do the work.
    pub lanes: Vec<RunningLane>,
}

/// A device that is served.
pub struct ServedDevice {
    /// As it was opened.
    pub device: Device,
    /// As it is served now.
    info: Mutex<Arc<DeviceInfo>>,
}

impl ServedDevice {
    /// A device that is served as it was opened.
    pub fn new(device: Device) -> ServedDevice {
        ServedDevice { info: Mutex::new(Arc::new(device.info().clone())), device }
    }

    /// As it is served now.
    pub fn info(&self) -> Arc<DeviceInfo> {
        Arc::clone(&self.info.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes that it is served otherwise from now on.
    pub fn set_info(&self, info: Arc<DeviceInfo>) {
        *self.info.lock().unwrap_or_else(PoisonError::into_inner) = info;
    }
}

/// An export that serves.
pub struct ServedExport {
    /// As the user named it.
    pub name: String,
    /// The place of its device among the daemon's.
    pub device: usize,
    /// Its session.
    pub status: Arc<ExportStatus>,
    /// For changing it.
    pub hand: ExportHand,
    /// Each queue, and the number of its lane.
    pub queues: Vec<(QueueWatch, usize)>,
    /// Requests in flight that each queue was made for.
    pub depth_max: usize,
}

impl fmt::Display for ServedExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
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
