//! Service time of a model device: a latency, and a ceiling on throughput shared by all its queues.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The pace of a model device. Without latency and ceiling it completes on the spot.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    pub(crate) latency_ns: u64,
    /// Bytes per second; zero for no ceiling.
    pub(crate) bytes_per_s: u64,
    /// When the device has passed on all it was given so far.
    free_ns: AtomicU64,
}

impl Pace {
    pub(crate) fn new(latency_ns: u64, bytes_per_s: u64) -> Pace {
        Pace { latency_ns, bytes_per_s, free_ns: AtomicU64::new(0) }
    }

    /// Whether requests complete on the spot.
    #[inline]
    pub(crate) fn is_instant(&self) -> bool {
        self.latency_ns == 0 && self.bytes_per_s == 0
    }

    /// When a request of `bytes` that arrives now is done. One request after another passes the ceiling.
    pub(crate) fn due_ns(&self, now_ns: u64, bytes: u64) -> u64 {
        let Some(per_s) = std::num::NonZeroU64::new(self.bytes_per_s) else {
            return now_ns + self.latency_ns;
        };
        let takes = (u128::from(bytes) * 1_000_000_000 / u128::from(per_s.get())) as u64;
        let passed = |free: u64| Some(free.max(now_ns) + takes);
        let before = self.free_ns.fetch_update(Relaxed, Relaxed, passed).unwrap_or_else(|free| free);
        before.max(now_ns) + takes + self.latency_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_holds_for_what_comes_at_once() {
        let pace = Pace::new(10, 1_000_000_000);
        assert_eq!([pace.due_ns(100, 50), pace.due_ns(100, 50), pace.due_ns(500, 50)], [160, 210, 560]);
        assert!(!pace.is_instant() && Pace::default().is_instant());
    }
}
