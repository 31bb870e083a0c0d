//! Goals and their verdicts, and the post's claims with whether they are reproduced.

use serde::Serialize;

use super::grid::{GridRow, Ratios};

/// What became of a goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum GoalVerdict {
    Met,
    /// It follows from how the model is made, and counts neither as met nor as missed.
    ByConstruction,
    /// The limit lies within the noise of the runs.
    Undecided,
    Missed,
}

impl GoalVerdict {
    pub(crate) fn word(self) -> &'static str {
        match self {
            GoalVerdict::Met => "met",
            GoalVerdict::ByConstruction => "by construction",
            GoalVerdict::Undecided => "undecided",
            GoalVerdict::Missed => "MISSED",
        }
    }

    /// Exit code of `--check` for all goals of a study: 1 if one is missed, else 3 if one is undecided.
    pub(crate) fn exit_code(verdicts: impl IntoIterator<Item = GoalVerdict>) -> u8 {
        match verdicts.into_iter().max() {
            Some(GoalVerdict::Missed) => 1,
            Some(GoalVerdict::Undecided) => 3,
            Some(GoalVerdict::Met | GoalVerdict::ByConstruction) | None => 0,
        }
    }
}

/// A goal with the value reached.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) limit: f64,
    /// Where the value was found.
    pub(crate) at: String,
    pub(crate) verdict: GoalVerdict,
}

impl Goal {
    pub(crate) fn new(what: String, value: f64, limit: f64, at: String, is_met: bool) -> Goal {
        let verdict = if is_met { GoalVerdict::Met } else { GoalVerdict::Missed };
        Goal { what, value, limit, at, verdict }
    }

    #[cfg(test)]
    pub(crate) fn is_met(&self) -> bool {
        self.verdict == GoalVerdict::Met
    }
}

/// A claim of the post's.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PostClaim {
    pub(crate) what: String,
    pub(crate) found: String,
    pub(crate) reproduced: bool,
    /// Reason, or a remark.
    pub(crate) reason: &'static str,
}

/// The goals of the study. Where `bio` is played with and without its tick, the harder one counts.
pub(crate) fn goals(rows: &[GridRow]) -> Vec<Goal> {
    let iops = |row: &GridRow| both(row).map(|ratios| ratios.iops).into_iter().fold(f64::INFINITY, f64::min);
    let cpu = |row: &GridRow| both(row).map(|ratios| ratios.cpu).into_iter().fold(0.0, f64::max);
    // A private queue passes its tags on among one job's bios; a shared one among those of four.
    let of_mean =
        |row: &GridRow| [row.mq, row.single].map(|mode| mode.stdev_us / mode.mean_us).into_iter().fold(0.0, f64::max);
    let max_of_mean =
        |row: &GridRow| [row.mq, row.single].map(|mode| mode.max_us / mode.mean_us).into_iter().fold(0.0, f64::max);
    let all = |_: &GridRow| true;
    let one_job = |row: &GridRow| row.post.jobs == 1;
    let at = |jobs, depth| move |row: &GridRow| row.post.jobs == jobs && row.post.depth == depth;
    let crowded = |row: &GridRow| row.post.jobs == 4 && row.post.depth >= 1024;
    vec![
        at_least("IOPS, mq/bio, at every point", 0.99, rows, all, iops),
        at_most("CPU per I/O, mq/bio, at 1 x 2048", 0.65, rows, at(1, 2048), cpu),
        at_most("CPU per I/O, mq/bio, at 4 x 2048", 0.5, rows, at(4, 2048), cpu),
        at_most("CPU per I/O, mq/bio, in the rows of one job", 1.0, rows, one_job, cpu),
        at_most("latency of mq and of single, stdev/mean, at 4 x 1024 and 4 x 2048", 0.1, rows, crowded, of_mean),
        at_most("latency of mq and of single, max/mean, at 4 x 1024 and 4 x 2048", 2.5, rows, crowded, max_of_mean),
    ]
}

fn both(row: &GridRow) -> [Ratios; 2] {
    [row.ratios(), Ratios::of(&row.mq, &row.bio_untimed)]
}

fn at_most(
    goal: &str,
    limit: f64,
    rows: &[GridRow],
    which: impl Fn(&GridRow) -> bool,
    value: impl Fn(&GridRow) -> f64,
) -> Goal {
    let (value, at) = worst(rows, which, |row| value(row));
    Goal::new(goal.into(), value, limit, at, value <= limit)
}

fn at_least(
    goal: &str,
    limit: f64,
    rows: &[GridRow],
    which: impl Fn(&GridRow) -> bool,
    value: impl Fn(&GridRow) -> f64,
) -> Goal {
    let (negative, at) = worst(rows, which, |row| -value(row));
    Goal::new(goal.into(), -negative, limit, at, -negative >= limit)
}

/// The largest value, and where it is.
fn worst(rows: &[GridRow], which: impl Fn(&GridRow) -> bool, value: impl Fn(&GridRow) -> f64) -> (f64, String) {
    let rows = rows.iter().filter(|row| which(row));
    let worst = rows.map(|row| (value(row), row)).max_by(|one, other| one.0.total_cmp(&other.0));
    worst.map_or((f64::NAN, String::new()), |(value, row)| (value, format!("{} x {}", row.post.jobs, row.post.depth)))
}

/// The post's other claims.
pub(crate) fn claims(rows: &[GridRow]) -> Vec<PostClaim> {
    // The rows in which the post's device is at its ceiling in both columns.
    let saturated: Vec<_> =
        rows.iter().filter(|row| row.post.mq.iops >= 269_000.0 && row.post.bio.iops >= 265_000.0).collect();
    let iops = saturated.iter().map(|row| row.ratios().iops).sum::<f64>() / saturated.len().max(1) as f64;
    // Up to 4 x 128; above, the post's own figures turn round.
    let calm: Vec<_> = rows.iter().filter(|row| row.post.jobs * row.post.depth <= 2048).collect();
    let times = calm.iter().map(|row| 1.0 / row.ratios().stdev);
    let (least, most) = times.clone().fold((f64::INFINITY, 0.0), |(least, most), n| (n.min(least), n.max(most)));
    let longest = rows.iter().map(|row| row.bio.max_us - row.bio_untimed.max_us).fold(0.0, f64::max);
    vec![
        PostClaim {
            what: "IOPS of mq 1.015 times bio's where the device is at its ceiling".into(),
            found: format!("{iops:.3} on average of {} rows", saturated.len()),
            reproduced: iops >= 1.01,
            reason: "the model's device is the limit there, in both modes: neither leaves its stage empty, so both reach the same",
        },
        PostClaim {
            what: "deviation of mq 1.4 to 7 times lower up to 4 x 128".into(),
            found: format!("{least:.2} to {most:.2} times"),
            reproduced: least >= 1.4,
            reason: "below the number of ids nothing in bio's mechanism holds an I/O up: both modes see the device's own jitter",
        },
        PostClaim {
            what: "latencies of 2.1 ms in bio, from a tick".into(),
            found: format!("the tick adds {longest:.1} us to the longest latency of a row, at most"),
            reproduced: longest >= 2_000.0,
            reason: "a tick only looks after what waits for ids; an I/O would have to be forgotten until the tick to take that long, \
                     and interrupts are not lost here",
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::GoalVerdict::{ByConstruction, Met, Missed, Undecided};
    use super::*;

    #[test]
    fn an_undecided_goal_neither_passes_nor_fails_a_check() {
        assert_eq!(GoalVerdict::exit_code([]), 0);
        assert_eq!(GoalVerdict::exit_code([Met, ByConstruction]), 0);
        assert_eq!(GoalVerdict::exit_code([Undecided, Met]), 3);
        assert_eq!(GoalVerdict::exit_code([Met, Missed, Undecided]), 1);
    }
}
