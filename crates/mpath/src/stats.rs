//! What inspection shows of the paths of one queue. The lane writes plain words; any thread reads them.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::{ChoiceReason, PATHS_MAX};

/// Counters of a path in one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounters {
    /// I/Os that completed on it.
    pub ios: u64,
    /// Their latencies together, ns.
    pub latency_ns: u64,
    /// I/Os at its driver.
    pub in_flight: u64,
    /// I/Os that were taken from it before they ended, or that failed there and were sent again.
    pub moved: u64,
    /// Hedges that it was sent: reads that were late on another path.
    pub hedges: u64,
    /// Those that came first.
    pub hedges_won: u64,
    /// Time of its last choice, ns; zero for never.
    pub chosen_ns: u64,
    /// Why it was chosen then.
    pub reason: Option<ChoiceReason>,
}

/// Counters of one queue, for other threads.
#[derive(Debug, Default)]
pub struct MultipathStats {
    paths: [[AtomicU64; FIELDS]; PATHS_MAX],
    held: AtomicU64,
}

const FIELDS: usize = 8;
const REASONS: [ChoiceReason; 4] =
    [ChoiceReason::OnlyPath, ChoiceReason::Best, ChoiceReason::Unmeasured, ChoiceReason::Probe];

impl MultipathStats {
    /// Publishes counters of a path.
    #[inline]
    pub(crate) fn publish(&self, path: usize, counters: &PathCounters) {
        let PathCounters { ios, latency_ns, in_flight, moved, hedges, hedges_won, chosen_ns, reason } = *counters;
        let reason = reason.map_or(0, |reason| reason as u64 + 1);
        let values = [ios, latency_ns, in_flight, moved, hedges, hedges_won, chosen_ns, reason];
        self.paths[path].iter().zip(values).for_each(|(field, value)| field.store(value, Relaxed));
    }

    /// Publishes the number of requests that wait for a path or a proof.
    pub(crate) fn publish_held(&self, held: usize) {
        self.held.store(held as u64, Relaxed);
    }

    /// Counters of a path.
    pub fn path(&self, path: usize) -> PathCounters {
        let Some(fields) = self.paths.get(path) else { return PathCounters::default() };
        let [ios, latency_ns, in_flight, moved, hedges, hedges_won, chosen_ns, reason] =
            std::array::from_fn(|field| fields[field].load(Relaxed));
        let reason = usize::try_from(reason).ok().and_then(|code| REASONS.get(code.checked_sub(1)?).copied());
        PathCounters { ios, latency_ns, in_flight, moved, hedges, hedges_won, chosen_ns, reason }
    }

    /// Requests that wait for a path, or for the proof that a lost one executes them no more.
    pub fn held(&self) -> u64 {
        self.held.load(Relaxed)
    }
}
