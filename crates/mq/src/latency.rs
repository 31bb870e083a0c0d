//! Latency windows: the arithmetic of the latency tracker, as the post put it into the block layer (H. Reinecke,
//! linux-nvme, April 2024).
//!
//! Samples are averaged over a window. At its end the mean replaces the value, if there were enough samples; otherwise
//! the value keeps a part of itself. There is no moving average. Time is an argument: windows that have ended are
//! closed when the tracker is next asked.

/// Settings of a latency tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackerConfig {
    /// Length of a window, ns; at least 1.
    pub window_ns: u64,
    /// Low-water mark: samples that a window needs for its mean to count.
    pub samples_min: u64,
    /// Percentage of the value that is kept at the end of a window with fewer samples: 100 never forgets, 0 forgets at
    /// once.
    pub decay: u8,
}

impl TrackerConfig {
    /// Upper bound of the decay, percent.
    pub const DECAY_MAX: u8 = 100;
    /// Window of rotating disks, ns.
    pub const ROTATIONAL_WINDOW_NS: u64 = 75_000_000;
}

impl Default for TrackerConfig {
    /// As posted, for devices that do not rotate.
    fn default() -> Self {
        TrackerConfig { window_ns: 2_000_000, samples_min: 2, decay: 50 }
    }
}

/// The latency of one kind of I/O over the last window.
#[derive(Clone, Copy, Debug)]
pub struct LatencyWindow {
    config: TrackerConfig,
    end_ns: u64,
    value_ns: u64,
    samples: u64,
    sum_ns: u64,
}

impl LatencyWindow {
    /// A tracker whose first window begins at this time. Its value is 0: unknown.
    pub fn new(config: TrackerConfig, now_ns: u64) -> LatencyWindow {
        let config = TrackerConfig {
            window_ns: config.window_ns.max(1),
            decay: config.decay.min(TrackerConfig::DECAY_MAX),
            ..config
        };
        LatencyWindow { config, end_ns: now_ns.saturating_add(config.window_ns), value_ns: 0, samples: 0, sum_ns: 0 }
    }

    /// Adds samples to the window that is open: their sum, and their number.
    #[inline]
    pub fn record(&mut self, sum_ns: u64, samples: u64) {
        self.sum_ns = self.sum_ns.saturating_add(sum_ns);
        self.samples += samples;
    }

    /// Closes the windows that have ended. Returns the value, ns; 0 if unknown or forgotten.
    #[inline]
    pub fn advance(&mut self, now_ns: u64) -> u64 {
        if now_ns >= self.end_ns {
            self.close(now_ns);
        }
        self.value_ns
    }

    /// The end of the open window.
    pub fn end_ns(&self) -> u64 {
        self.end_ns
    }

    /// Samples in the open window.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    #[inline(never)]
    fn close(&mut self, now_ns: u64) {
        let TrackerConfig { window_ns, samples_min, decay } = self.config;
        // The first window has the samples; all later ones that have ended are idle.
        let mut idle = (now_ns - self.end_ns) / window_ns;
        if self.samples > 0 && self.samples >= samples_min {
            self.value_ns = self.sum_ns / self.samples;
        } else {
            idle += 1;
        }
        self.end_ns += ((now_ns - self.end_ns) / window_ns + 1).saturating_mul(window_ns);
        (self.samples, self.sum_ns) = (0, 0);
        if decay < TrackerConfig::DECAY_MAX {
            for _ in 0..idle {
                if self.value_ns == 0 {
                    break;
                }
                self.value_ns = (u128::from(self.value_ns) * u128::from(decay) / 100) as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn window(decay: u8) -> LatencyWindow {
        LatencyWindow::new(TrackerConfig { decay, ..TrackerConfig::default() }, 0)
    }

    #[test]
    fn a_windows_mean_replaces_the_value() {
        let mut window = window(50);
        window.record(300, 2);
        assert_eq!((window.advance(2 * MS - 1), window.samples()), (0, 2));
        assert_eq!((window.advance(2 * MS), window.samples(), window.end_ns()), (150, 0, 4 * MS));
        window.record(9000, 3);
        assert_eq!(window.advance(5 * MS), 3000);
    }

    #[test]
    fn below_the_low_water_mark_the_value_keeps_its_decay() {
        for (decay, kept) in [(100, [800, 800, 800]), (50, [400, 200, 100]), (10, [80, 8, 0]), (0, [0, 0, 0])] {
            let mut window = window(decay);
            window.record(1600, 2);
            assert_eq!(window.advance(2 * MS), 800);
            // One sample is fewer than the low-water mark, and is dropped.
            window.record(5, 1);
            assert_eq!([4, 6, 8].map(|ms| window.advance(ms * MS)), kept, "decay {decay}");
        }
    }

    #[test]
    fn idle_windows_decay_as_often_when_nobody_asks() {
        let (mut asked, mut unasked) = (window(90), window(90));
        asked.record(2_000_000, 2);
        unasked.record(2_000_000, 2);
        (1..=20).for_each(|ms| assert!(asked.advance(2 * ms * MS) > 0));
        assert_eq!((unasked.advance(41 * MS), unasked.end_ns()), (asked.advance(40 * MS), 42 * MS));
        assert_eq!(unasked.advance(u64::MAX / 2), 0);
    }

    #[test]
    fn settings_are_clamped() {
        let config = TrackerConfig { window_ns: 0, samples_min: 0, decay: 200 };
        let mut window = LatencyWindow::new(config, 5);
        window.record(8, 1);
        assert_eq!((window.advance(6), window.advance(1000)), (8, 8));
    }
}
