//! Settings of a device over several paths, which all its queues share and any thread changes.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Mutex, PoisonError};

use blkyard_mq::TrackerConfig;

use crate::{HedgeConfig, PolicyKind};

/// How paths are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathRules {
    /// The policy. A queue that changes it begins knowing nothing.
    pub policy: PolicyKind,
    /// Trackers of the policy `latency`.
    pub tracker: TrackerConfig,
    /// How reads are hedged, where drivers can do so; unset for not. A queue that begins with it learns what is late.
    pub hedged_reads: Option<HedgeConfig>,
}

/// See the head of the module.
#[derive(Debug)]
pub struct MultipathSettings {
    rules: Mutex<PathRules>,
    /// Changes of the rules so far.
    changes: AtomicU32,
    /// How long I/O waits while no path is usable, ns.
    pub no_path_ns: u64,
}

impl MultipathSettings {
    /// With these rules and this time.
    pub fn new(rules: PathRules, no_path_ns: u64) -> MultipathSettings {
        MultipathSettings { rules: Mutex::new(rules), changes: AtomicU32::new(0), no_path_ns }
    }

    /// The present rules.
    pub fn rules(&self) -> PathRules {
        *self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the rules. Queues follow in their next round.
    pub fn change(&self, change: impl FnOnce(&mut PathRules)) {
        change(&mut self.rules.lock().unwrap_or_else(PoisonError::into_inner));
        self.changes.fetch_add(1, Release);
    }

    /// Number of changes so far.
    #[inline]
    pub(crate) fn changes(&self) -> u32 {
        self.changes.load(Acquire)
    }
}
