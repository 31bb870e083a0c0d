//! Parts of a study, mostly in virtual time: a table, goals, the post's claims. Text, JSON and picture show them.

mod report;
mod runner;
mod svg;
mod table;

pub(crate) use report::PartsReport;
pub(crate) use runner::{PartRun, run_parts, threads};
pub(crate) use table::{figure, wrapped};

use crate::study::goals::{Goal, GoalVerdict, PostClaim};

/// One part.
#[derive(Clone, Debug, Default)]
pub(crate) struct Part {
    /// For programs.
    pub(crate) name: &'static str,
    /// Load and device, in one line.
    pub(crate) title: String,
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<PartRow>,
    /// Remarks below the table.
    pub(crate) notes: Vec<String>,
    pub(crate) drawn: Drawn,
    pub(crate) goals: Vec<Goal>,
    pub(crate) claims: Vec<PostClaim>,
}

/// A column of figures.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    /// For programs, with its unit.
    pub(crate) key: &'static str,
    /// For people.
    pub(crate) head: &'static str,
    /// Digits behind the point.
    pub(crate) digits: usize,
}

/// A row: its name, and a figure for each column, if any.
#[derive(Clone, Debug)]
pub(crate) struct PartRow {
    pub(crate) name: String,
    pub(crate) values: Vec<Option<f64>>,
}

/// Columns of the picture, by key: a bar for each row, its deviation, and the post's value. Empty for none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Drawn {
    pub(crate) bar: &'static str,
    pub(crate) deviation: &'static str,
    pub(crate) post: &'static str,
}

/// A column, short.
pub(crate) const fn column(key: &'static str, head: &'static str, digits: usize) -> Column {
    Column { key, head, digits }
}

impl Part {
    /// Adds a row.
    ///
    /// # Panics
    /// If it has more or fewer figures than there are columns.
    pub(crate) fn row(&mut self, name: impl Into<String>, values: impl IntoIterator<Item = Option<f64>>) {
        let row = PartRow { name: name.into(), values: values.into_iter().collect() };
        assert_eq!(row.values.len(), self.columns.len(), "{}: a figure for each column", row.name);
        self.rows.push(row);
    }

    /// A figure of a row, if the part has it.
    pub(crate) fn value(&self, row: &PartRow, key: &str) -> Option<f64> {
        let at = self.columns.iter().position(|column| column.key == key)?;
        row.values[at]
    }

    /// The result in one line.
    fn summary(&self) -> String {
        let of = |verdict| self.goals.iter().filter(|goal| goal.verdict == verdict).count();
        match self.goals.len() - of(GoalVerdict::ByConstruction) {
            0 => format!("{} rows, no goals", self.rows.len()),
            all => format!("{} of {all} goals met", of(GoalVerdict::Met)),
        }
    }

    /// A figure with an upper bound. A missing one is not met.
    pub(crate) fn at_most(
        &mut self,
        what: impl Into<String>,
        value: impl Into<Option<f64>>,
        limit: f64,
        at: impl Into<String>,
    ) {
        let value = value.into().unwrap_or(f64::NAN);
        self.goals.push(Goal::new(what.into(), value, limit, at.into(), value <= limit));
    }

    /// Marks the last goal as undecided if its limit is no farther from its value than this.
    pub(crate) fn undecided_within(&mut self, noise: f64) {
        if let Some(goal) = self.goals.last_mut().filter(|goal| (goal.value - goal.limit).abs() <= noise) {
            goal.verdict = GoalVerdict::Undecided;
        }
    }

    /// Marks the last goal as met or missed by construction, with the reason.
    pub(crate) fn by_construction(&mut self, reason: &str) {
        if let Some(goal) = self.goals.last_mut() {
            goal.verdict = GoalVerdict::ByConstruction;
            goal.at = format!("{}: {reason}", goal.at);
        }
    }

    /// Something is to be no less than this; the same.
    pub(crate) fn at_least(&mut self, what: impl Into<String>, value: f64, limit: f64, at: impl Into<String>) {
        self.goals.push(Goal::new(what.into(), value, limit, at.into(), value >= limit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_that_there_is_none_of_meets_no_goal() {
        let mut part = Part::default();
        part.at_most("p99", None, 2.0, "");
        part.at_most("p99", 2.0, 2.0, "");
        part.at_least("share", f64::NAN, 0.9, "");
        assert_eq!(part.goals.iter().map(Goal::is_met).collect::<Vec<_>>(), [false, true, false]);
    }

    #[test]
    fn a_goal_within_the_noise_is_undecided_and_an_identity_is_not_met() {
        let mut part = Part::default();
        part.at_most("ratio", 0.99, 1.0, "");
        part.undecided_within(0.02);
        part.at_most("ratio", 0.99, 1.0, "");
        part.undecided_within(0.005);
        part.at_most("ratio", 1.0, 1.0, "readers");
        part.by_construction("one run");
        let verdicts: Vec<_> = part.goals.iter().map(|goal| goal.verdict).collect();
        assert_eq!(verdicts, [GoalVerdict::Undecided, GoalVerdict::Met, GoalVerdict::ByConstruction]);
        // What holds by construction is no goal of a run.
        assert_eq!(part.summary(), "1 of 2 goals met");
    }
}
