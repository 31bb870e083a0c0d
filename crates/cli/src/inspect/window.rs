//! Counters between two readings of a daemon: the later tree, less the counts of the earlier one.
//!
//! Computed by the client, so the daemon keeps no state for it. Momentary values, such as tags or requests, are those
//! of the later reading.

use std::collections::BTreeMap;

use blkyard_mq::{Held, HistogramSnapshot, OpSnapshot};

use super::InspectError;
use super::tree::{LatencyNode, OpNode, QueueNode, Tree};

/// Percentiles shown.
const PERCENTS: [(&str, f64); 5] = [("50", 50.0), ("90", 90.0), ("99", 99.0), ("99.9", 99.9), ("99.99", 99.99)];

/// Momentary values among the counters, which may decrease.
const GAUGES: [&str; 1] = ["slow_now"];

/// The later of two trees of a daemon, with the counts of the seconds between them.
///
/// # Errors
/// They are of two daemons: one was restarted, or taken over from.
pub fn between(then: &Tree, mut now: Tree, seconds: f64) -> Result<Tree, InspectError> {
    if now.daemon.pid != then.daemon.pid {
        return Err(InspectError::Replaced { then: then.daemon.pid, now: now.daemon.pid });
    }
    now.window_s = Some(seconds);
    let before = |export: usize, queue: usize| {
        let export = then.exports.iter().find(|node| node.number == export)?;
        export.queues.iter().find(|node| node.number == queue)
    };
    for export in &mut now.exports {
        let earlier = then.exports.iter().find(|node| node.number == export.number);
        for namespace in &mut export.namespaces {
            let earlier = earlier.and_then(|node| node.namespaces.iter().find(|node| node.nsid == namespace.nsid));
            earlier.into_iter().for_each(|earlier| subtract_ops(&mut namespace.ops, &earlier.ops));
        }
        for queue in &mut export.queues {
            if let Some(before) = before(export.number, queue.number) {
                queue.subtract(before);
            }
        }
    }
    for device in &mut now.devices {
        let before = then.devices.iter().find(|node| node.number == device.number).map_or(&[][..], |node| &node.paths);
        for (path, before) in device.paths.iter_mut().zip(before) {
            path.ios = path.ios.saturating_sub(before.ios);
            path.latency_sum_ns = path.latency_sum_ns.saturating_sub(before.latency_sum_ns);
            path.moved = path.moved.saturating_sub(before.moved);
            path.hedges = path.hedges.saturating_sub(before.hedges);
            path.hedges_won = path.hedges_won.saturating_sub(before.hedges_won);
        }
    }
    for lane in &mut now.lanes {
        let before = then.lanes.iter().find(|node| node.number == lane.number).and_then(|node| node.turn.as_ref());
        if let (Some(turn), Some(before)) = (&lane.turn, before) {
            lane.turn = LatencyNode::of_turns(&turn.snapshot().since(&before.snapshot()));
        }
    }
    Ok(now)
}

impl QueueNode {
    fn subtract(&mut self, before: &QueueNode) {
        subtract_ops(&mut self.ops, &before.ops);
        self.batches.iter_mut().zip(before.batches).for_each(|(now, then)| *now = now.saturating_sub(then));
        subtract(&mut self.counters, &before.counters);
        subtract(&mut self.refusals, &before.refusals);
    }
}

fn subtract_ops(now: &mut BTreeMap<String, OpNode>, then: &BTreeMap<String, OpNode>) {
    for (name, op) in now {
        if let Some(before) = then.get(name) {
            *op = OpNode::of(&op.snapshot().since(&before.snapshot()));
        }
    }
}

fn subtract(now: &mut BTreeMap<String, u64>, then: &BTreeMap<String, u64>) {
    for (name, count) in now.iter_mut().filter(|(name, _)| !GAUGES.contains(&name.as_str())) {
        *count = count.saturating_sub(then.get(name).copied().unwrap_or(0));
    }
}

impl OpNode {
    /// The node of these counts.
    pub fn of(op: &OpSnapshot) -> OpNode {
        let mut latency = LatencyNode::of_turns(op);
        if let Some(latency) = &mut latency {
            latency.part_sum_ns = op.parts_ns().map(|(name, ns)| (name.to_owned(), ns)).into();
        }
        OpNode { ios: op.ios, bytes: op.bytes, errors: op.errors, latency }
    }

    /// The counts of this node.
    fn snapshot(&self) -> OpSnapshot {
        let times = self.latency.as_ref().map(LatencyNode::snapshot).unwrap_or_default();
        OpSnapshot { ios: self.ios, bytes: self.bytes, errors: self.errors, ..times }
    }
}

impl LatencyNode {
    /// The node of durations without parts; `None` without samples.
    pub fn of_turns(times: &OpSnapshot) -> Option<LatencyNode> {
        (times.latency.samples() > 0).then(|| LatencyNode {
            min_ns: times.min_ns,
            mean_ns: times.mean_ns(),
            sum_ns: times.sum_ns,
            part_sum_ns: BTreeMap::new(),
            max_ns: times.max_ns,
            percentile_ns: PERCENTS.map(|(name, percent)| (name.to_owned(), times.percentile_ns(percent))).into(),
            histogram: times.latency.iter().collect(),
        })
    }

    /// The times of this node.
    fn snapshot(&self) -> OpSnapshot {
        OpSnapshot {
            sum_ns: self.sum_ns,
            min_ns: self.min_ns,
            max_ns: self.max_ns,
            latency: self.histogram.iter().copied().collect::<HistogramSnapshot>(),
            held_ns: Held::ALL.map(|held| self.part_sum_ns.get(held.name()).copied().unwrap_or(0)),
            ..OpSnapshot::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkyard_mq::OpClass;

    /// A queue that has completed reads which took so long.
    fn queue(times_ns: &[u64], refused: u64, slow_now: u64) -> QueueNode {
        let latency: HistogramSnapshot = times_ns.iter().map(|ns| (*ns, 1)).collect();
        let op = OpSnapshot {
            ios: times_ns.len() as u64,
            bytes: 4096 * times_ns.len() as u64,
            sum_ns: times_ns.iter().sum(),
            min_ns: times_ns.iter().copied().min().unwrap_or(u64::MAX),
            max_ns: times_ns.iter().copied().max().unwrap_or(0),
            held_ns: [0, 0, times_ns.iter().sum::<u64>() / 2, 0],
            latency,
            ..OpSnapshot::default()
        };
        QueueNode {
            number: 0,
            lane: 0,
            shown_with: None,
            shares_with: Vec::new(),
            now: None,
            ops: BTreeMap::from([(super::super::op_name(OpClass::Read).to_owned(), OpNode::of(&op))]),
            batches: [times_ns.len() as u64; 7],
            counters: BTreeMap::from([("refused".into(), refused), ("slow_now".into(), slow_now)]),
            refusals: BTreeMap::new(),
        }
    }

    #[test]
    fn a_window_has_only_what_came_in_it() {
        let before = queue(&[90_000_000, 80_000_000], 3, 2);
        let mut now = queue(&[90_000_000, 80_000_000, 1000, 2000, 3000], 7, 1);
        now.subtract(&before);
        let read = &now.ops["read"];
        let latency = read.latency.as_ref().unwrap();
        assert_eq!((read.ios, read.bytes, latency.mean_ns, latency.min_ns), (3, 3 * 4096, 2000, 1000));
        assert!(latency.percentile_ns["99"] >= 3000 && latency.percentile_ns["99"] <= latency.max_ns);
        assert!(latency.max_ns < 3100, "{latency:?}");
        assert_eq!((latency.part_sum_ns["tag"], latency.part_sum_ns["device"]), (3000, 3000));
        assert_eq!((now.batches[0], now.counters["refused"], now.counters["slow_now"]), (3, 4, 1));
    }

    #[test]
    fn a_window_without_io_has_no_latency() {
        let before = queue(&[5000], 0, 0);
        let mut now = before.clone();
        now.subtract(&before);
        assert_eq!((now.ops["read"].ios, &now.ops["read"].latency), (0, &None));
    }
}
