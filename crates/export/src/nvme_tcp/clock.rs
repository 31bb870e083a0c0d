//! The clock of an export's controllers, read by its control path and by the lanes of its queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A clock that starts at zero: that of the system, or one that a simulation sets.
#[derive(Clone, Debug)]
pub struct ControllerClock {
    began: Instant,
    /// Its time, ns; unset for that of the system.
    set_ns: Option<Arc<AtomicU64>>,
}

impl ControllerClock {
    /// The system's, from this time on.
    pub(crate) fn since(began: Instant) -> ControllerClock {
        ControllerClock { began, set_ns: None }
    }

    /// A clock that stands still until this value is changed, ns.
    pub fn simulated(ns: Arc<AtomicU64>) -> ControllerClock {
        ControllerClock { began: Instant::now(), set_ns: Some(ns) }
    }

    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// Its time, ns.
    pub(crate) fn now_ns(&self) -> u64 {
        match &self.set_ns {
            None => self.began.elapsed().as_nanos() as u64,
            Some(set_ns) => set_ns.load(Relaxed),
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.began + Duration::from_nanos(self.now_ns())
    }

    /// This time as one of the clock, ns.
    pub fn ns_of(&self, time: Instant) -> u64 {
        time.saturating_duration_since(self.began).as_nanos() as u64
    }
}
