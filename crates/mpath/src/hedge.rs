//! When a read that is late is sent down a second path as well. Reads only: a write that is stuck on one path could
//! land after a later one.
//!
//! The delay is learned: the latency that one read in so many exceeds, by size class. A bucket of tokens bounds the
//! hedged share of all I/O. The hedge reads into a buffer of its own, since the first path owns the other until it
//! ends.

use blkyard_mq::OpClass;

use crate::policy::PathIo;

/// Settings of hedged reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HedgeConfig {
    /// Upper bound of hedged reads: one of so many I/Os.
    pub one_in: u32,
    /// Hedges that may come in a row after a quiet time.
    pub burst: u32,
    /// Reads of a size class before their delay is known.
    pub samples_min: u32,
}

impl Default for HedgeConfig {
    fn default() -> Self {
        HedgeConfig { one_in: 100, burst: 16, samples_min: 256 }
    }
}

/// Sizes told apart: up to 8 KiB, up to 64 KiB, larger.
const SIZES: usize = 3;

/// The delay after which reads are hedged, and the budget of hedges.
#[derive(Clone, Debug)]
pub struct HedgeTimer {
    config: HedgeConfig,
    sizes: [SizeDelay; SIZES],
    /// In units of one I/O: a hedge costs [`HedgeConfig::one_in`].
    tokens: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct SizeDelay {
    samples: u32,
    mean: f32,
    delay: f32,
}

impl HedgeTimer {
    /// A timer that knows no latency yet, with an empty budget.
    pub fn new(config: HedgeConfig) -> HedgeTimer {
        let config = HedgeConfig { one_in: config.one_in.max(1), burst: config.burst.max(1), ..config };
        HedgeTimer { config, sizes: [SizeDelay::default(); SIZES], tokens: 0 }
    }

    /// When a read submitted now is to be hedged; `None` for a write, or while the delay is not known.
    #[inline]
    pub fn due_ns(&self, io: &PathIo, now_ns: u64) -> Option<u64> {
        let size = &self.sizes[size_of(io)];
        (io.class == OpClass::Read && size.samples >= self.config.samples_min).then(|| now_ns + size.delay as u64)
    }

    /// Whether a hedge is left in the budget.
    pub fn is_left(&self) -> bool {
        self.tokens >= self.config.one_in
    }

    /// Takes a hedge from the budget. False if it is used up.
    pub fn take(&mut self) -> bool {
        let is_left = self.is_left();
        if is_left {
            self.tokens -= self.config.one_in;
        }
        is_left
    }

    /// Counts an I/O that has completed, and learns from the latency of a read that was not hedged.
    #[inline]
    pub fn completed(&mut self, io: &PathIo, latency_ns: Option<u64>) {
        self.tokens = (self.tokens + 1).min(self.config.one_in * self.config.burst);
        let (OpClass::Read, Some(latency_ns)) = (io.class, latency_ns) else { return };
        let size = &mut self.sizes[size_of(io)];
        let latency = latency_ns as f32;
        if size.samples == 0 {
            (size.mean, size.delay) = (latency, latency * 2.0);
        }
        size.samples = size.samples.saturating_add(1);
        size.mean += (latency.min(size.mean * 4.0) - size.mean) / 64.0;
        // A quantile by steps: up by `one_in` steps when exceeded, down by one when not.
        let step = size.mean / 256.0;
        size.delay += if latency > size.delay { step * (self.config.one_in - 1) as f32 } else { -step };
        size.delay = size.delay.clamp(size.mean, size.mean * 64.0);
    }
}

fn size_of(io: &PathIo) -> usize {
    [8 << 10, 64 << 10].into_iter().filter(|end| io.bytes > *end).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: PathIo = PathIo { class: OpClass::Read, bytes: 4096, node: 0 };

    #[test]
    fn writes_are_never_hedged() {
        let mut timer = HedgeTimer::new(HedgeConfig::default());
        let write = PathIo { class: OpClass::Write, ..READ };
        for _ in 0..10_000 {
            timer.completed(&write, Some(1000));
            timer.completed(&READ, Some(1000));
        }
        assert!(timer.due_ns(&write, 5).is_none() && timer.due_ns(&READ, 5).is_some());
    }

    #[test]
    fn hedges_stay_within_their_budget() {
        let mut timer = HedgeTimer::new(HedgeConfig { burst: 4, ..HedgeConfig::default() });
        assert!(!timer.take());
        let hedged = (0..100_000).filter(|_| {
            timer.completed(&READ, None);
            timer.take()
        });
        assert_eq!(hedged.count(), 1000);
        (0..10_000).for_each(|_| timer.completed(&READ, None));
        assert_eq!((0..10).filter(|_| timer.take()).count(), 4);
    }

    #[test]
    fn the_delay_follows_the_latency_that_one_in_a_hundred_exceeds() {
        let mut timer = HedgeTimer::new(HedgeConfig::default());
        // 200 to 399 us, evenly, and 10 ms for one of 200.
        for n in 0..200_000_u64 {
            let us = if n % 200 == 77 { 10_000 } else { 200 + n * 67 % 200 };
            timer.completed(&READ, Some(us * 1000));
        }
        let delay_us = timer.due_ns(&READ, 0).unwrap_or_default() / 1000;
        assert!((370..480).contains(&delay_us), "{delay_us}");
        assert!(timer.due_ns(&PathIo { bytes: 1 << 20, ..READ }, 0).is_none());
    }
}
