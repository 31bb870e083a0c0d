//! State of a daemon: its devices, exports, queues and lanes.
//!
//! `serve` creates it after start and shares it with the thread of the control socket, where `inspect` reads it and
//! `set` and `takeover` change it. It owns the lanes, since their number can be set; `serve` takes them back at the
//! end. Of queues and exports it holds handles for inspection only.
//!
//! Commands, and the way to them, are unknown here.

mod lanes;
mod placement;
mod queue;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use blkyard::Device;
use blkyard::rate::RateSlot;
use blkyard::spec::Spec;
use blkyard_export::{VhostUserHand, VhostUserStatus, VirtqueueWatch};
use blkyard_mq::{DeviceInfo, RateConfig, RateLimit, SchedulerConfig};
use blkyard_virtio::SerialId;

pub use lanes::{LANES_MAX, SeenPlaces, ServedLanes, SetLanesError};
pub use placement::Share;
pub(crate) use queue::{QueueMaker, depth_of};

/// A device and the exports that serve it, as the user named them.
#[derive(Debug, Clone)]
pub struct DiskPlan {
    /// The device's name, with its options.
    pub device: Spec,
    /// Its exports' names, with theirs.
    pub exports: Vec<Spec>,
}

/// State of a daemon.
pub struct Daemon {
    /// When it began to serve.
    pub started: Instant,
    /// Seconds between statistics lines of each export; 0 for none.
    pub stats_s: AtomicU64,
    /// Its configuration: a plan for each device.
    pub plans: Vec<DiskPlan>,
    /// CPUs to which its lanes are pinned, one after another; empty if the system chooses.
    pub cpus: Vec<u32>,
    /// Time limit for requests in flight at its end, seconds.
    pub drain_s: u64,
    /// Whether another daemon has taken over.
    pub is_handed: AtomicBool,
    /// Its devices.
    pub devices: Vec<Arc<ServedDevice>>,
    /// Its exports.
    pub exports: Vec<ServedExport>,
    /// The threads that do the work.
    pub lanes: Arc<ServedLanes>,
}

/// A device that is served.
pub struct ServedDevice {
    /// As it was opened.
    pub device: Device,
    /// As it is served now.
    info: Mutex<Arc<DeviceInfo>>,
    /// Scheduler of the bios that wait at its queues.
    scheduler: Mutex<SchedulerConfig>,
    /// Rate limit of all its exports together.
    pub rate: RateSlot,
    /// Queues made for it so far.
    streams: AtomicU32,
    changes: Mutex<()>,
}

impl ServedDevice {
    /// A device that is served as this.
    pub fn new(device: Device, info: Arc<DeviceInfo>, scheduler: SchedulerConfig, rate: RateConfig) -> ServedDevice {
        let (info, scheduler, streams) = (Mutex::new(info), Mutex::new(scheduler), AtomicU32::new(0));
        ServedDevice { device, info, scheduler, rate: RateSlot::new(rate), streams, changes: Mutex::new(()) }
    }

    /// Serialises changes: the state is read, changed, recorded and sent to its users while this is held.
    pub fn change(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stream of one more queue: how schedulers know it from the others.
    pub fn new_stream(&self) -> u32 {
        self.streams.fetch_add(1, Relaxed).wrapping_add(1)
    }

    /// Scheduler of the bios that wait at its queues.
    pub fn scheduler(&self) -> SchedulerConfig {
        *self.scheduler.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that another does from now on.
    pub fn set_scheduler(&self, scheduler: SchedulerConfig) {
        *self.scheduler.lock().unwrap_or_else(PoisonError::into_inner) = scheduler;
    }

    /// The limits of a queue of an export that has this one.
    pub fn rates(&self, of_export: &RateSlot) -> Vec<Arc<RateLimit>> {
        [self.rate.limit(), of_export.limit()].into_iter().flatten().collect()
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
    /// Index of its device.
    pub device: usize,
    /// Its session.
    pub status: Arc<VhostUserStatus>,
    /// For changing it.
    pub hand: VhostUserHand,
    /// Serial number of its disks.
    pub serial: SerialId,
    /// Rate limit of its queues together.
    pub rate: Arc<RateSlot>,
    /// Each queue. There may come more.
    pub queues: Mutex<Vec<VirtqueueWatch>>,
    /// Requests in flight that each queue was made for.
    pub depth_max: usize,
}

impl ServedExport {
    /// Each queue that it has by now.
    pub fn queues(&self) -> Vec<VirtqueueWatch> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that it has more queues.
    pub fn add_queues(&self, queues: impl Iterator<Item = VirtqueueWatch>) {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).extend(queues);
    }

    /// Notes that it has so many queues: others were not given to it.
    pub fn keep_queues(&self, queues: usize) {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).truncate(queues);
    }
}

impl fmt::Display for ServedExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Daemon {
    /// Seconds between statistics lines; `None` for none.
    pub fn stats_every(&self) -> Option<u64> {
        Some(self.stats_s.load(Relaxed)).filter(|seconds| *seconds > 0)
    }
}
