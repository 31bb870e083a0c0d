//! `latency`: the policy posted in April 2024, with its tracker, and with its herding.
//!
//! Each path has a tracker of windows for each NUMA node (`blkyard_mq::LatencyWindow`); reads, writes and all sizes
//! share it. Each I/O goes down the path with the lowest value in whole microseconds, the first of equals. A path that
//! was never measured, or has decayed, has the value 0 and gets every I/O until the next window closes. I/Os in flight
//! are not counted.

use blkyard_mq::{LatencyWindow, TrackerConfig};

use crate::policy::{ChoiceReason, PathChoice, PathIo, PathPolicy};
use crate::{PATHS_MAX, PathSet};

/// NUMA nodes told apart; further nodes share the entries.
const NODES_MAX: usize = 8;

/// The policy.
#[derive(Clone, Debug)]
pub struct LatencyPolicy {
    /// By path and node.
    windows: Box<[[LatencyWindow; NODES_MAX]; PATHS_MAX]>,
    config: TrackerConfig,
}

impl Default for LatencyPolicy {
    fn default() -> Self {
        LatencyPolicy::new(TrackerConfig::default())
    }
}

impl LatencyPolicy {
    /// With these settings of its trackers.
    pub fn new(config: TrackerConfig) -> LatencyPolicy {
        let window = LatencyWindow::new(config, 0);
        LatencyPolicy { windows: Box::new([[window; NODES_MAX]; PATHS_MAX]), config }
    }

    /// Settings of the trackers.
    pub fn config(&self) -> TrackerConfig {
        self.config
    }
}

impl PathPolicy for LatencyPolicy {
    #[inline]
    fn choose(&mut self, paths: &PathSet, io: &PathIo, now_ns: u64) -> Option<PathChoice> {
        let node = usize::from(io.node) % NODES_MAX;
        let candidates = paths.candidates();
        let distance_us = |path: &usize| self.windows[*path][node].advance(now_ns) / 1000;
        let path = candidates.clone().min_by_key(distance_us)?;
        let reason = if candidates.only().is_some() { ChoiceReason::OnlyPath } else { ChoiceReason::Best };
        Some(PathChoice::new(path, reason, io, now_ns))
    }

    #[inline]
    fn complete(&mut self, choice: PathChoice, now_ns: u64) {
        let window = &mut self.windows[choice.path][usize::from(choice.node) % NODES_MAX];
        window.advance(now_ns);
        window.record(now_ns.saturating_sub(choice.start_ns), 1);
    }

    fn abandon(&mut self, _: PathChoice) {}
}

#[cfg(test)]
mod tests {
    use blkyard_mq::OpClass;

    use super::*;
    use crate::PathState;

    const WINDOW_NS: u64 = 2_000_000;
    const IO: PathIo = PathIo { class: OpClass::Read, bytes: 512, node: 0 };

    fn two_paths() -> PathSet {
        let mut paths = PathSet::new();
        (0..2).for_each(|_| assert!(paths.add(PathState::default(), 0).is_some()));
        paths
    }

    /// Executes an I/O of this latency; returns the path.
    fn execute(policy: &mut LatencyPolicy, io: PathIo, start_ns: u64, latency_ns: [u64; 2]) -> Option<usize> {
        let choice = policy.choose(&two_paths(), &io, start_ns)?;
        let path = choice.path;
        policy.complete(choice, start_ns + latency_ns[path]);
        Some(path)
    }

    #[test]
    fn every_io_of_a_window_goes_to_the_unmeasured_path() {
        let mut policy = LatencyPolicy::default();
        let mut by_window = Vec::new();
        for window in 0..6 {
            let mut on = [0; 2];
            for io in 0..1000 {
                let path = execute(&mut policy, IO, window * WINDOW_NS + io * 1000, [100_000, 150_000]);
                on[path.unwrap_or_default()] += 1;
            }
            by_window.push(on);
        }
        // The first window measures path 0, then path 1 is at 0. Afterwards path 1 decays by half for each idle window:
        // 150 us is 75 us after one.
        assert_eq!(by_window[0], [1000, 0]);
        assert_eq!(by_window[1], [0, 1000]);
        assert!(by_window[2..].iter().all(|on| on.contains(&1000)), "herding: {by_window:?}");
    }

    #[test]
    fn nodes_are_measured_apart_and_directions_together() {
        let mut policy = LatencyPolicy::default();
        let write = PathIo { class: OpClass::Write, ..IO };
        let far = PathIo { node: 1, ..IO };
        [1, 2]
            .into_iter()
            .for_each(|start_ns| assert!(execute(&mut policy, IO, start_ns, [100_000, 50_000]).is_some()));
        assert_eq!(execute(&mut policy, write, WINDOW_NS + 1, [100_000, 50_000]), Some(1));
        assert_eq!(execute(&mut policy, far, WINDOW_NS + 1, [100_000, 50_000]), Some(0));
    }

    #[test]
    fn less_than_a_microsecond_counts_as_unmeasured() {
        let mut policy = LatencyPolicy::default();
        [1, 2].into_iter().for_each(|start_ns| assert!(execute(&mut policy, IO, start_ns, [900, 900]).is_some()));
        assert_eq!(execute(&mut policy, IO, WINDOW_NS + 1, [900, 900]), Some(0));
    }
}
