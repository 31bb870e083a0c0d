//! The median of some samples and the interval in which the true one lies, without assumptions on their distribution.

use serde::Serialize;

/// Samples of each figure at least: with fewer there is no interval of this confidence.
pub(crate) const SAMPLES_MIN: usize = 6;
/// Share of intervals that miss the true median at most.
const MISSES: f64 = 0.05;

/// A median with its interval of 95 % confidence, by order statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct MedianInterval {
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
}

impl MedianInterval {
    /// Of these samples.
    ///
    /// # Panics
    /// If there are too few.
    pub(crate) fn of(samples: impl IntoIterator<Item = f64>) -> MedianInterval {
        let mut sorted: Vec<_> = samples.into_iter().collect();
        let count = sorted.len();
        assert!(count >= SAMPLES_MIN, "{count} samples");
        sorted.sort_by(f64::total_cmp);
        let skip = skipped(count);
        let median = f64::midpoint(sorted[(count - 1) / 2], sorted[count / 2]);
        MedianInterval { low: sorted[skip], median, high: sorted[count - 1 - skip] }
    }
}

/// Samples to leave out at either end: the true median is beyond the next one with a probability of [`MISSES`] at most.
fn skipped(count: usize) -> usize {
    let (mut term, mut below, mut skip) = (0.5_f64.powi(count as i32), 0.0, 0);
    loop {
        below += term;
        if 2.0 * below > MISSES {
            return skip.max(1) - 1;
        }
        term *= (count - skip) as f64 / (skip + 1) as f64;
        skip += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_that_of_the_sign_test() {
        // Table values for 95 %: the first rank of the interval.
        for (count, rank) in [(6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (30, 10)] {
            assert_eq!(skipped(count) + 1, rank, "{count}");
        }
        let found = MedianInterval::of([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]);
        assert_eq!(found, MedianInterval { low: 1.0, median: 3.5, high: 6.0 });
    }
}
