//! Statistics lines of `serve --stats`: for each export its counters since the previous line, and for each device over
//! several paths those of its paths.

use std::fmt::Write;
use std::time::Instant;

use blkyard::{Device, DevicePath};
use blkyard_mpath::PathCounters;
use blkyard_mq::{OpClass, OpSnapshot, StatsSnapshot};

use crate::daemon::{ClientWatch, Daemon};
use crate::inspect::{op_name, show_time};
use crate::log::say;

/// The exports and devices that are watched.
pub struct Watch {
    exports: Vec<WatchedExport>,
    devices: Vec<WatchedPaths>,
}

/// The paths of a device; none for a device that has one.
struct WatchedPaths {
    /// Counters of each path at the last call.
    before: Vec<PathCounters>,
    at: Instant,
}

struct WatchedExport {
    /// Counters at the last call.
    before: StatsSnapshot,
    /// Requests refused by then, by the queues and by the ring parsers.
    refused: u64,
    /// Requests bounced by then.
    bounced: u64,
    at: Instant,
}

impl Watch {
    /// Watches so many exports and devices of a daemon.
    pub fn new(exports: usize, devices: usize) -> Watch {
        let at = Instant::now();
        let export = || WatchedExport { before: StatsSnapshot::default(), refused: 0, bounced: 0, at };
        let device = || WatchedPaths { before: Vec::new(), at };
        Watch { exports: (0..exports).map(|_| export()).collect(), devices: (0..devices).map(|_| device()).collect() }
    }

    /// Prints the counters of each since the last call.
    pub fn print(&mut self, daemon: &Daemon) {
        for (watched, export) in self.exports.iter_mut().zip(&daemon.exports) {
            let state = if export.front_end.is_connected() { "" } else { " (no front-end)" };
            let devices: Vec<_> = export.devices.iter().map(|of| &daemon.devices[of.device].device).collect();
            for line in watched.lines(&devices, &export.queues()) {
                say(format_args!("{}{state}: {line}", export.name));
            }
        }
        for (number, (watched, served)) in self.devices.iter_mut().zip(&daemon.devices).enumerate() {
            for line in watched.lines(&served.device.paths()) {
                say(format_args!("device {number}, {line}"));
            }
        }
    }
}

impl WatchedPaths {
    /// One line for each path since the last call.
    fn lines(&mut self, paths: &[DevicePath]) -> Vec<String> {
        let seconds = self.at.elapsed().as_secs_f64().max(1e-9);
        self.at = Instant::now();
        self.before.resize(paths.len(), PathCounters::default());
        let ios = |(path, before): (&DevicePath, &PathCounters)| path.counters.ios.saturating_sub(before.ios);
        let total = paths.iter().zip(&self.before).map(ios).sum();
        let lines = paths.iter().zip(&self.before).enumerate();
        let lines = lines.map(|(number, (path, before))| path_line(number, path, before, total, seconds)).collect();
        self.before = paths.iter().map(|path| path.counters).collect();
        lines
    }
}

/// State of a path, and its counters since those before; its share is of the `total` I/Os of the device.
fn path_line(number: usize, path: &DevicePath, before: &PathCounters, total: u64, seconds: f64) -> String {
    let DevicePath { name, state, loss, counters } = path;
    let ios = counters.ios.saturating_sub(before.ios);
    let mut line = format!("path {number} {name}: {}, {:.0} IOPS", state.name(), ios as f64 / seconds);
    if let Some(mean_ns) = counters.latency_ns.saturating_sub(before.latency_ns).checked_div(ios) {
        let _ = write!(line, " ({} % of all), mean {}", ios * 100 / total, show_time(mean_ns));
    }
    let _ = write!(line, ", {} in flight", counters.in_flight);
    let moved = counters.moved.saturating_sub(before.moved);
    if moved > 0 {
        let _ = write!(line, ", {moved} moved to others");
    }
    if let Some(reason) = counters.reason {
        let _ = write!(line, ", last chosen as: {}", reason.name());
    }
    if let Some(loss) = loss {
        let _ = write!(line, "; not connected: {loss}");
    }
    line
}

impl WatchedExport {
    /// Lines since the last call: one for each kind of I/O, and one for errors.
    fn lines(&mut self, devices: &[&Device], queues: &[ClientWatch]) -> Vec<String> {
        let mut now = StatsSnapshot::default();
        queues.iter().flat_map(ClientWatch::stats).for_each(|stats| now.merge(&stats.snapshot()));
        let seconds = self.at.elapsed().as_secs_f64().max(1e-9);
        self.at = Instant::now();
        let ops = OpClass::ALL.map(|class| (class, now.op(class).since(self.before.op(class))));
        let mut lines: Vec<_> =
            ops.iter().filter(|(_, op)| op.ios > 0).map(|(class, op)| op_line(*class, op, seconds)).collect();
        if lines.is_empty() {
            lines.push("0 IOPS".into());
        }
        let refusals = queues.iter().flat_map(ClientWatch::refusals).map(|(_, count)| count).sum::<u64>();
        let bounced = devices.iter().filter_map(|device| device.counters().get("bounced").copied()).sum::<u64>();
        let trouble = [
            ("failed", ops.iter().map(|(_, op)| op.errors).sum()),
            ("refused", (now.refused + refusals).saturating_sub(self.refused)),
            ("slow", now.slow.saturating_sub(self.before.slow)),
            ("slow and still in flight", now.slow_now),
            ("bounced", bounced.saturating_sub(self.bounced)),
        ];
        let trouble: Vec<_> =
            trouble.iter().filter(|(_, count)| *count > 0).map(|(name, count)| format!("{count} {name}")).collect();
        if !trouble.is_empty() {
            lines.push(trouble.join(", "));
        }
        (self.refused, self.bounced, self.before) = (now.refused + refusals, bounced, now);
        lines
    }
}

fn op_line(class: OpClass, op: &OpSnapshot, seconds: f64) -> String {
    let mut line = format!("{} {:.0} IOPS", op_name(class), op.ios as f64 / seconds);
    if op.bytes > 0 {
        let _ = write!(line, " {:.1} MiB/s", op.bytes as f64 / seconds / f64::from(1 << 20));
    }
    if op.latency.samples() > 0 {
        let [p50, p99] = [50.0, 99.0].map(|percent| show_time(op.percentile_ns(percent)));
        let _ = write!(line, ", mean {}, p50 {p50}, p99 {p99}", show_time(op.mean_ns()));
    }
    // Its largest part.
    if let Some((name, ns)) = op.parts_ns().into_iter().max_by_key(|(_, ns)| *ns)
        && ns > 0
    {
        let _ = write!(line, " ({:.0} % {name})", ns as f64 * 100.0 / op.sum_ns.max(1) as f64);
    }
    line
}
