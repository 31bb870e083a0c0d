//! Short windows, one variant after another, repeatedly: compared variants share their minute.
//!
//! A machine with neighbours is slow in bursts. The fast end of many short windows is the cost of the code; the slow
//! end is the cost of the neighbours. So a cost is the 10th percentile of its windows, and a difference is taken
//! between adjacent windows. The measured code is unknown here.

use blkyard_os::now_ns;

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct WindowPlan {
    /// Length of one window.
    pub window_ns: u64,
    /// Windows of each variant that count.
    pub windows: usize,
    /// Windows of each variant before that.
    pub warm_up: usize,
}

/// Nanoseconds per operation, window by window.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// The value that `percent` of the windows do not exceed, of those that count.
    pub fn percentile(&self, percent: f64) -> f64 {
        let mut sorted: Vec<_> = self.0.iter().copied().filter(|value| !value.is_nan()).collect();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() as f64 * percent / 100.0) as usize;
        sorted.get(rank.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
    }

    /// Cost of the code: see the head of this module.
    pub fn cost(&self) -> f64 {
        self.percentile(10.0)
    }

    /// Window by window, how much more this one took.
    #[must_use]
    pub fn more_than(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(this, other)| this - other).collect())
    }

    /// Window by window, how many times this one took.
    #[must_use]
    pub fn over(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(this, other)| this / other).collect())
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

/// A variant, ready to be run for a window of so many nanoseconds; returns nanoseconds per operation.
pub type Variant<'a> = Box<dyn FnMut(u64) -> f64 + 'a>;

/// Rounds between two clock reads at the end of a window; together they take some microseconds.
const ROUNDS: u64 = 64;

/// Makes a variant of a round. The loop lies inside, so that the call through the box is paid once a window.
pub fn variant<'a>(mut round: impl Round + 'a) -> Variant<'a> {
    Box::new(move |window_ns| for_a_window(window_ns, || round.round()))
}

/// Rounds for as long as the window; returns nanoseconds per operation.
#[inline]
pub(crate) fn for_a_window(window_ns: u64, mut round: impl FnMut() -> u64) -> f64 {
    let start_ns = now_ns();
    let mut done = 0;
    loop {
        (0..ROUNDS).for_each(|_| done += round());
        let passed_ns = now_ns() - start_ns;
        if passed_ns >= window_ns {
            break passed_ns as f64 / done.max(1) as f64;
        }
    }
}

/// Runs the variants in turn; returns the windows of each.
pub fn measure(plan: WindowPlan, variants: &mut [Variant<'_>]) -> Vec<Samples> {
    let mut samples = vec![Samples::default(); variants.len()];
    for window in 0..plan.warm_up + plan.windows {
        for (variant, samples) in variants.iter_mut().zip(&mut samples) {
            let value = variant(plan.window_ns);
            if window >= plan.warm_up {
                samples.push(value);
            }
        }
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_windows_in_order() {
        let mut samples = Samples::default();
        (0..100).rev().for_each(|value| samples.push(f64::from(value)));
        assert_eq!([0.0, 10.0, 50.0, 100.0].map(|percent| samples.percentile(percent) as u32), [0, 10, 50, 99]);
        samples.push(f64::NAN);
        assert_eq!(samples.percentile(100.0) as u32, 99, "a window that is no number counts for nothing");
        assert!(Samples::default().cost().is_nan());
    }

    #[test]
    fn variants_take_turns_and_warm_up_without_being_counted() {
        let order = std::cell::RefCell::new(Vec::new());
        let of = |name: f64| -> Variant<'_> {
            let order = &order;
            Box::new(move |_| {
                order.borrow_mut().push(name as u32);
                name
            })
        };
        let plan = WindowPlan { window_ns: 1, windows: 2, warm_up: 1 };
        let samples = measure(plan, &mut [of(1.0), of(2.0)]);
        assert_eq!(*order.borrow(), [1, 2, 1, 2, 1, 2]);
        assert_eq!(samples[1].over(&samples[0]).percentile(50.0) as i32, 2);
        assert_eq!(samples[0].more_than(&samples[1]).percentile(50.0) as i32, -1);
    }
}
