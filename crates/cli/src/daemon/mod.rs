//! State of a daemon: its devices, exports, queues and lanes.
//!
//! `serve` creates it after start and shares it with the thread of the control socket, where `inspect` reads it and
//! `set` and `takeover` change it. It owns the lanes, since their number can be set; `serve` takes them back at the
//! end. Of queues and exports it holds handles for inspection only.
//!
//! Commands, and the way to them, are unknown here.

mod lanes;
mod placement;
mod protocols;
mod queue;
mod tracker;
mod weight;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use blkyard::Device;
use blkyard::rate::RateSlot;
use blkyard::spec::Spec;
use blkyard_export::NvmeTcpAna;
use blkyard_mq::{DeviceInfo, RateConfig, RateLimit, SchedulerConfig};
use blkyard_virtio::SerialId;

pub use lanes::{LANES_MAX, SeenPlaces, ServedLanes, SetLanesError};
pub use placement::{Share, ShareDevice, pin_lane};
pub use protocols::{
    ByProtocol, ClientRemotes, ClientSessionState, ClientState, ClientWatch, FrontEndHandle, Protocol, ServedFrontEnd,
    ServedServer,
};
pub(crate) use queue::{QueueMaker, depth_of_all};
pub use tracker::{LatencyTrackers, TRACKED, set_path_tracker, usual_tracker};
pub use weight::{WeightSlot, take_weight};

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
    /// Latency trackers of its devices.
    pub trackers: LatencyTrackers,
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
    changes: Mutex<()>,
}

impl ServedDevice {
    /// A device that is served as this.
    pub fn new(device: Device, info: Arc<DeviceInfo>, scheduler: SchedulerConfig, rate: RateConfig) -> ServedDevice {
        let (info, scheduler) = (Mutex::new(info), Mutex::new(scheduler));
        ServedDevice { device, info, scheduler, rate: RateSlot::new(rate), changes: Mutex::new(()) }
    }

    /// Serialises changes: the state is read, changed, recorded and sent to its users while this is held.
    pub fn change(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// Its devices: one, or each namespace of a controller.
    pub devices: Vec<ExportedDevice>,
    /// For inspecting and changing it.
    pub front_end: ServedFrontEnd,
    /// Serial number of its disks.
    pub serial: SerialId,
    /// Rate limit of its queues together.
    pub rate: Arc<RateSlot>,
    /// Its weight beside others of its devices.
    pub weight: Arc<WeightSlot>,
    /// ANA groups of an NVMe/TCP export.
    pub ana: Option<Arc<NvmeTcpAna>>,
    /// Each queue. There may come more.
    pub queues: Mutex<Vec<ClientWatch>>,
    /// Requests in flight that each queue was made for.
    pub depth_max: usize,
}

/// A device of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedDevice {
    /// Index among the devices of the daemon.
    pub device: usize,
    /// Identifier of its namespace, if it is one.
    pub nsid: Option<u32>,
}

impl ServedExport {
    /// The number of a device of the daemon within the export, if the export serves it.
    pub fn place_of(&self, device: usize) -> Option<u16> {
        self.devices.iter().position(|known| known.device == device).map(|place| place as u16)
    }

    /// Each queue that it has by now.
    pub fn queues(&self) -> Vec<ClientWatch> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that it has more queues.
    pub fn add_queues(&self, queues: Vec<ClientWatch>) {
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
