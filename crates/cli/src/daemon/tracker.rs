//! Latency trackers of devices: the mean time of reads and of writes at a device, by NUMA node of the lane that
//! submitted them, over windows of time. The arithmetic is that of [`LatencyWindow`].
//!
//! One thread closes the windows of all devices. It takes the difference of counters that the queues have anyway, so
//! I/O costs the same with a tracker and without. It sleeps while no tracker is on.
//!
//! Owned by the [`Daemon`]. A tracker decides nothing: the policies of paths measure for themselves, on their lanes,
//! and `latency` with the same settings.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blkyard::Device;
use blkyard_mq::{DeviceInfo, DeviceTime, HwStats, LatencyWindow, OpClass, TrackerConfig};
use blkyard_os::now_ns;

use super::{Daemon, ExportedDevice};

/// Directions that are tracked.
pub const TRACKED: [OpClass; 2] = [OpClass::Read, OpClass::Write];

/// The trackers of a daemon's devices.
#[derive(Debug, Default)]
pub struct LatencyTrackers {
    state: Mutex<TrackersState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct TrackersState {
    /// By number of the device; a missing one is off.
    devices: BTreeMap<usize, DeviceTracker>,
    ends: bool,
}

/// A node of a device at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackedNode {
    /// NUMA node of the lanes; `None` for lanes that are not pinned to one.
    pub node: Option<u32>,
    /// Values of the last window by [`TRACKED`], ns; 0 if unknown or forgotten.
    pub latency_ns: [u64; 2],
    /// Operations in the last window.
    pub samples: [u64; 2],
}

/// The tracker that a device begins with: windows are longer if it rotates.
pub fn usual_tracker(info: &DeviceInfo) -> TrackerConfig {
    let usual = TrackerConfig::default();
    TrackerConfig {
        window_ns: if info.rotational { TrackerConfig::ROTATIONAL_WINDOW_NS } else { usual.window_ns },
        ..usual
    }
}

/// Has the policy `latency` of a device over several paths measure as the device's tracker, or as it begins if that is
/// off.
pub fn set_path_tracker(device: &Device, tracker: Option<TrackerConfig>) {
    if let Some(settings) = device.path_settings() {
        settings.change(|rules| rules.tracker = tracker.unwrap_or_default());
    }
}

impl LatencyTrackers {
    /// Starts the thread that closes the windows of a daemon, until [`LatencyTrackers::end`].
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(daemon: &Arc<Daemon>) -> io::Result<JoinHandle<()>> {
        let daemon = Arc::clone(daemon);
        thread::Builder::new().name("tracker".into()).spawn(move || daemon.trackers.run(&daemon))
    }

    /// Turns a device's tracker on with these settings, or off. What it had learned is forgotten.
    pub fn set(&self, device: usize, config: Option<TrackerConfig>) {
        let mut state = self.state();
        match config {
            Some(config) => state.devices.insert(device, DeviceTracker::new(config, now_ns())),
            None => state.devices.remove(&device),
        };
        self.changed.notify_all();
    }

    /// Settings of a device's tracker; `None` if it is off.
    pub fn config(&self, device: usize) -> Option<TrackerConfig> {
        self.state().devices.get(&device).map(|tracker| tracker.config)
    }

    /// The nodes of a device that had I/O.
    pub fn nodes(&self, device: usize) -> Vec<TrackedNode> {
        self.state().devices.get(&device).map(DeviceTracker::nodes).unwrap_or_default()
    }

    /// Ends the thread.
    pub fn end(&self) {
        self.state().ends = true;
        self.changed.notify_all();
    }

    fn run(&self, daemon: &Daemon) {
        let mut state = self.state();
        while !state.ends {
            let Some(end_ns) = state.devices.values().map(|tracker| tracker.end_ns).min() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left_ns = end_ns.saturating_sub(now_ns());
            if left_ns > 0 {
                let left = Duration::from_nanos(left_ns);
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            // Lanes that change hold their lock for long; nobody is to wait for that here.
            drop(state);
            let queues = queues_by_node(daemon);
            state = self.state();
            let now_ns = now_ns();
            for (device, tracker) in state.devices.iter_mut().filter(|(_, tracker)| tracker.end_ns <= now_ns) {
                tracker.close(queues.iter().filter(|queue| queue.device == *device), now_ns);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, TrackersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The counters of a device in one queue, at one moment.
struct TrackedQueue {
    device: usize,
    node: Option<u32>,
    stats: Arc<HwStats>,
    /// By [`TRACKED`].
    time: [DeviceTime; 2],
}

fn queues_by_node(daemon: &Daemon) -> Vec<TrackedQueue> {
    let nodes: Vec<Option<u32>> = {
        let lanes = daemon.lanes.lanes();
        (0..lanes.threads().len()).map(|lane| lanes.config(lane).node).collect()
    };
    let mut all = Vec::new();
    for (number, export) in daemon.exports.iter().enumerate() {
        let lanes = daemon.lanes.seen(number).lanes;
        for (queue, lane) in export.queues().iter().zip(lanes) {
            let node = nodes.get(lane).copied().flatten();
            let of_device = |(of, stats): (&ExportedDevice, &Arc<HwStats>)| TrackedQueue {
                device: of.device,
                node,
                stats: Arc::clone(stats),
                time: TRACKED.map(|class| stats.device_time(class)),
            };
            all.extend(export.devices.iter().zip(queue.stats()).map(of_device));
        }
    }
    all
}

/// A tracker that is on.
#[derive(Debug)]
struct DeviceTracker {
    config: TrackerConfig,
    /// End of the open window.
    end_ns: u64,
    /// The counters at the end of the last window, by their address, which they keep while they are held here. By
    /// counter and not by node, since a queue may move to another node. `None` before the first window.
    before: Option<BTreeMap<usize, (Arc<HwStats>, [DeviceTime; 2])>>,
    nodes: BTreeMap<Option<u32>, [NodeWindow; 2]>,
}

#[derive(Clone, Copy, Debug)]
struct NodeWindow {
    window: LatencyWindow,
    latency_ns: u64,
    /// In the last window.
    samples: u64,
}

impl DeviceTracker {
    fn new(config: TrackerConfig, now_ns: u64) -> DeviceTracker {
        // The first window is over at once, and only reads the counters.
        DeviceTracker { config, end_ns: now_ns, before: None, nodes: BTreeMap::new() }
    }

    fn close<'a>(&mut self, queues: impl Iterator<Item = &'a TrackedQueue>, now_ns: u64) {
        let begin_ns = self.end_ns.saturating_sub(self.config.window_ns);
        let mut sums: BTreeMap<Option<u32>, [DeviceTime; 2]> = BTreeMap::new();
        let mut counters = BTreeMap::new();
        for TrackedQueue { node, stats, time, .. } in queues {
            let address = Arc::as_ptr(stats).addr();
            let then = match &self.before {
                None => *time,
                Some(before) => before.get(&address).map(|(_, then)| *then).unwrap_or_default(),
            };
            for (sum, (now, then)) in sums.entry(*node).or_default().iter_mut().zip(time.iter().zip(then)) {
                let more = now.since(then);
                sum.sum_ns = sum.sum_ns.saturating_add(more.sum_ns);
                sum.samples += more.samples;
            }
            counters.insert(address, (Arc::clone(stats), *time));
        }
        self.before = Some(counters);
        for (node, sums) in &sums {
            if sums.iter().any(|sum| sum.samples > 0) {
                let window = LatencyWindow::new(self.config, begin_ns);
                self.nodes.entry(*node).or_insert([NodeWindow { window, latency_ns: 0, samples: 0 }; 2]);
            }
        }
        for (node, windows) in &mut self.nodes {
            for (window, sum) in windows.iter_mut().zip(sums.get(node).copied().unwrap_or_default()) {
                window.window.record(sum.sum_ns, sum.samples);
                window.samples = sum.samples;
                window.latency_ns = window.window.advance(now_ns);
            }
        }
        let windows = now_ns.saturating_sub(self.end_ns) / self.config.window_ns + 1;
        self.end_ns += windows * self.config.window_ns;
    }

    fn nodes(&self) -> Vec<TrackedNode> {
        let node = |(node, windows): (&Option<u32>, &[NodeWindow; 2])| TrackedNode {
            node: *node,
            latency_ns: windows.each_ref().map(|window| window.latency_ns),
            samples: windows.each_ref().map(|window| window.samples),
        };
        self.nodes.iter().map(node).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn queue(node: u32) -> TrackedQueue {
        TrackedQueue { device: 0, node: Some(node), stats: Arc::default(), time: Default::default() }
    }

    fn reads(queue: &mut TrackedQueue, sum_ns: u64, samples: u64) {
        queue.time[0].sum_ns += sum_ns;
        queue.time[0].samples += samples;
    }

    fn read(tracker: &DeviceTracker) -> Vec<(Option<u32>, u64, u64)> {
        tracker.nodes().iter().map(|node| (node.node, node.latency_ns[0], node.samples[0])).collect()
    }

    #[test]
    fn each_of_four_nodes_has_the_mean_of_its_own_queues() {
        let mut tracker = DeviceTracker::new(TrackerConfig::default(), 0);
        let mut queues: Vec<_> = [0, 0, 1, 2, 3].into_iter().map(queue).collect();
        reads(&mut queues[0], 999, 9);
        tracker.close(queues.iter(), 0);
        assert_eq!(read(&tracker), [], "what came before it was on");
        reads(&mut queues[0], 300, 1);
        reads(&mut queues[1], 100, 1);
        reads(&mut queues[2], 5000, 5);
        reads(&mut queues[3], 70, 1);
        tracker.close(queues.iter(), 2 * MS);
        // One sample is below the low-water mark; the fourth node had none.
        assert_eq!(read(&tracker), [(Some(0), 200, 2), (Some(1), 1000, 5), (Some(2), 0, 1)]);
        assert_eq!(tracker.nodes()[0].latency_ns[1], 0, "no writes");
        tracker.close(queues.iter(), 4 * MS);
        assert_eq!(read(&tracker), [(Some(0), 100, 0), (Some(1), 500, 0), (Some(2), 0, 0)], "decay keeps half");
        // A window that closes late counts as the idle ones that it spans.
        tracker.close(queues.iter(), 9 * MS);
        assert_eq!((read(&tracker)[1].1, tracker.end_ns), (125, 10 * MS));
    }

    #[test]
    fn a_queue_that_moves_or_comes_counts_what_is_new() {
        let mut tracker = DeviceTracker::new(TrackerConfig { decay: 100, ..TrackerConfig::default() }, 0);
        let mut queues = vec![queue(0)];
        reads(&mut queues[0], 1000, 10);
        tracker.close(queues.iter(), 0);
        queues[0].node = Some(1);
        reads(&mut queues[0], 8, 2);
        queues.push(queue(1));
        reads(&mut queues[1], 16, 2);
        tracker.close(queues.iter(), 2 * MS);
        assert_eq!(read(&tracker), [(Some(1), 6, 4)]);
        queues.clear();
        tracker.close(queues.iter(), 4 * MS);
        assert_eq!(read(&tracker), [(Some(1), 6, 0)]);
    }
}
