//! Short windows, one variant after another, many times over: what is compared shares its minute.
//!
//! A machine with neighbours is slow in bursts. The fast end of many short windows is what the code costs; the slow
//! end is what the neighbours cost. So a cost is the 10th percentile of its windows, and a difference is taken
//! between windows that lie side by side. Nothing here knows what is measured.

use std::time::{Duration, Instant};

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Length of one window.
    pub window: Duration,
    /// Windows of each variant that count.
    pub windows: usize,
    /// Windows of each variant before that.
    pub warm_up: usize,
}

/// Nanoseconds per operation, window by window.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// The value that `percent` of the windows do not exceed.
    pub fn percentile(&self, percent: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() as f64 * percent / 100.0) as usize;
        sorted.get(rank.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
    }

    /// What the code costs: see the head of this module.
    pub fn cost(&self) -> f64 {
        self.percentile(10.0)
    }

    /// Window by window, how much more this one took.
    pub fn more_than(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(this, other)| this - other).collect())
    }

    /// Adds a window.
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }
}

/// Something to measure: does one round and says how many operations that was.
pub trait Round {
    /// One round.
    fn round(&mut self) -> u64;
}

impl<F: FnMut() -> u64> Round for F {
    #[inline]
    fn round(&mut self) -> u64 {
        self()
    }
}

/// A variant, ready to be run for a window.
pub type Variant<'a> = Box<dyn FnMut(Duration) -> f64 + 'a>;

/// Rounds between two looks at the clock that ends a window; together they take some microseconds.
const ROUNDS: u64 = 64;

/// Makes a variant of a round. The loop lies inside, so that the call through the box is paid once a window.
pub fn variant<'a>(mut round: impl Round + 'a) -> Variant<'a> {
    Box::new(move |window| {
        let start = Instant::now();
        let mut done = 0;
        loop {
            for _ in 0..ROUNDS {
                done += round.round();
            }
            let passed = start.elapsed();
            if passed >= window {
                break passed.as_nanos() as f64 / done as f64;
            }
        }
    })
}

/// Runs the variants in turn; returns the windows of each.
pub fn measure<const N: usize>(plan: Plan, mut variants: [Variant<'_>; N]) -> [Samples; N] {
    let mut samples = std::array::from_fn(|_| Samples::default());
    for window in 0..plan.warm_up + plan.windows {
        for (variant, samples) in variants.iter_mut().zip(&mut samples) {
            let value = variant(plan.window);
            if window >= plan.warm_up {
                samples.push(value);
            }
        }
    }
    samples
}
