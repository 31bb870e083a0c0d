//! Judgement of figures with noise: a figure of the main run with its range in all runs, a goal or claim decided only
//! where the whole range lies on one side of the limit.

use serde::Serialize;

use super::goals::{ClaimVerdict, GoalVerdict};
use super::grid::GridRow;

/// A figure of the main run, and its least and greatest value in all runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct RunRange {
    pub(crate) value: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl RunRange {
    /// Verdict of an upper limit. A missing figure misses it.
    pub(crate) fn at_most(self, limit: f64) -> GoalVerdict {
        match self {
            RunRange { value, .. } if !value.is_finite() => GoalVerdict::Missed,
            RunRange { high, .. } if high <= limit => GoalVerdict::Met,
            RunRange { low, .. } if low > limit => GoalVerdict::Missed,
            _ => GoalVerdict::Undecided,
        }
    }

    /// Verdict of a lower limit.
    pub(crate) fn at_least(self, limit: f64) -> GoalVerdict {
        RunRange { value: -self.value, low: -self.high, high: -self.low }.at_most(-limit)
    }

    /// Whether a claim of at most this value is reproduced.
    pub(crate) fn is_at_most(self, limit: f64) -> ClaimVerdict {
        self.at_most(limit).into()
    }

    /// Whether a claim of at least this value is reproduced.
    pub(crate) fn is_at_least(self, limit: f64) -> ClaimVerdict {
        self.at_least(limit).into()
    }

    /// The value, and the range where it shows.
    pub(crate) fn text(self, digits: usize) -> String {
        let [value, low, high] = [self.value, self.low, self.high].map(|value| format!("{value:.digits$}"));
        if low == high { value } else { format!("{value} ({low} to {high})") }
    }
}

/// The main run, and repetitions of it with single measurements of the costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GridRuns<'a> {
    pub(crate) main: &'a [GridRow],
    pub(crate) repeats: &'a [Vec<GridRow>],
}

impl GridRuns<'_> {
    /// A figure of a whole run, and its range.
    pub(crate) fn range(&self, figure: impl Fn(&[GridRow]) -> f64) -> RunRange {
        let value = figure(self.main);
        let repeats = self.repeats.iter().map(|rows| figure(rows));
        let (low, high) = repeats.fold((value, value), |(low, high), one| (low.min(one), high.max(one)));
        RunRange { value, low, high }
    }

    /// The greatest figure of some rows.
    pub(crate) fn most(&self, which: impl Fn(&GridRow) -> bool, figure: impl Fn(&GridRow) -> f64) -> RunRange {
        self.range(|rows| rows.iter().filter(|row| which(row)).map(&figure).fold(f64::NEG_INFINITY, f64::max))
    }

    /// The least figure of some rows.
    pub(crate) fn least(&self, which: impl Fn(&GridRow) -> bool, figure: impl Fn(&GridRow) -> f64) -> RunRange {
        self.range(|rows| rows.iter().filter(|row| which(row)).map(&figure).fold(f64::INFINITY, f64::min))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_within_the_range_decides_nothing() {
        let range = RunRange { value: 0.97, low: 0.95, high: 0.99 };
        assert_eq!(
            [1.0, 0.98, 0.94].map(|limit| range.at_most(limit)),
            [GoalVerdict::Met, GoalVerdict::Undecided, GoalVerdict::Missed]
        );
        assert_eq!(
            [0.95, 0.96, 1.0].map(|limit| range.is_at_least(limit)),
            [ClaimVerdict::Reproduced, ClaimVerdict::Undecided, ClaimVerdict::NotReproduced]
        );
        assert_eq!(range.text(2), "0.97 (0.95 to 0.99)");
        assert_eq!(range.text(0), "1");
    }

    #[test]
    fn a_missing_figure_meets_no_limit() {
        let none = GridRuns { main: &[], repeats: &[] }.most(|_| true, |row| row.mq.iops);
        assert_eq!([none.at_most(1.0), none.at_least(1.0)], [GoalVerdict::Missed; 2]);
    }
}
