//! Goals of `mq-vs-bio`. Where `bio` is played with and without its tick, the harder one counts.

use super::goals::{Goal, GoalVerdict};
use super::grid::{GridRow, Ratios};
use super::judge::{GridRuns, RunRange};

/// Share of the device's ceiling from which on the device decides the IOPS.
const AT_CEILING: f64 = 0.99;

/// All goals, on a device with this ceiling.
pub(crate) fn goals(runs: GridRuns<'_>, ceiling_iops: f64) -> Vec<Goal> {
    let iops = |row: &GridRow| both(row).map(|ratios| ratios.iops).into_iter().fold(f64::INFINITY, f64::min);
    let cpu = |row: &GridRow| both(row).map(|ratios| ratios.cpu).into_iter().fold(0.0, f64::max);
    // A private queue passes its tags on among one job's bios; a shared one among those of four.
    let of_mean =
        |row: &GridRow| [row.mq, row.single].map(|mode| mode.stdev_us / mode.mean_us).into_iter().fold(0.0, f64::max);
    let max_of_mean =
        |row: &GridRow| [row.mq, row.single].map(|mode| mode.max_us / mode.mean_us).into_iter().fold(0.0, f64::max);
    let is_at_ceiling = |row: &GridRow| row.bio.iops >= AT_CEILING * ceiling_iops;
    let one_job = |row: &GridRow| row.post.jobs == 1;
    let at = |jobs, depth| move |row: &GridRow| row.post.jobs == jobs && row.post.depth == depth;
    let crowded = |row: &GridRow| row.post.jobs == 4 && row.post.depth >= 1024;
    let mut goals = vec![
        at_least("IOPS, mq/bio, below the device's ceiling", 0.99, runs, |row| !is_at_ceiling(row), iops),
        at_least("IOPS, mq/bio, at the device's ceiling", 0.99, runs, is_at_ceiling, iops),
        at_most("CPU per I/O, mq/bio, at 1 x 2048", 0.65, runs, at(1, 2048), cpu),
        at_most("CPU per I/O, mq/bio, at 4 x 2048", 0.5, runs, at(4, 2048), cpu),
        at_most("CPU per I/O, mq/bio, in the rows of one job", 1.0, runs, one_job, cpu),
        at_most("latency of mq and of single, stdev/mean, at 4 x 1024 and 4 x 2048", 0.1, runs, crowded, of_mean),
        at_most("latency of mq and of single, max/mean, at 4 x 1024 and 4 x 2048", 2.5, runs, crowded, max_of_mean),
    ];
    // A device that is never idle gives every mode the same IOPS.
    if goals[1].verdict == GoalVerdict::Met {
        goals[1].verdict = GoalVerdict::ByConstruction;
        goals[1].at.push_str("; the device is the limit of both modes");
    }
    goals
}

fn both(row: &GridRow) -> [Ratios; 2] {
    [row.ratios(), Ratios::of(&row.mq, &row.bio_untimed)]
}

fn at_most(
    goal: &str,
    limit: f64,
    runs: GridRuns<'_>,
    which: impl Fn(&GridRow) -> bool,
    value: impl Fn(&GridRow) -> f64,
) -> Goal {
    let range = runs.most(&which, &value);
    judged(goal, limit, range, range.at_most(limit), &place(runs.main, which, value))
}

fn at_least(
    goal: &str,
    limit: f64,
    runs: GridRuns<'_>,
    which: impl Fn(&GridRow) -> bool,
    value: impl Fn(&GridRow) -> f64,
) -> Goal {
    let range = runs.least(&which, &value);
    judged(goal, limit, range, range.at_least(limit), &place(runs.main, which, |row| -value(row)))
}

fn judged(what: &str, limit: f64, RunRange { value, low, high }: RunRange, verdict: GoalVerdict, place: &str) -> Goal {
    let at = format!("{low:.3} to {high:.3} in all runs; the worst at {place}");
    Goal { what: what.into(), value, limit, at, verdict }
}

/// The row of the largest value.
fn place(rows: &[GridRow], which: impl Fn(&GridRow) -> bool, value: impl Fn(&GridRow) -> f64) -> String {
    let worst = rows.iter().filter(|row| which(row)).max_by(|one, other| value(one).total_cmp(&value(other)));
    worst.map_or_else(|| "no row".into(), |row| format!("{} x {}", row.post.jobs, row.post.depth))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::grid::tests::example_rows;

    #[test]
    fn a_goal_is_undecided_when_repeats_disagree_and_missed_when_all_miss_it() {
        let rows = example_rows();
        let mut worse = rows.clone();
        worse.iter_mut().for_each(|row| row.mq.user_ns *= 100.0);
        let verdict = |main: &[GridRow], repeat: &[GridRow]| {
            let goals = goals(GridRuns { main, repeats: &[repeat.to_vec()] }, 270_000.0);
            goals.iter().find(|goal| goal.what.ends_with("rows of one job")).map(|goal| goal.verdict)
        };
        assert_eq!(verdict(&rows, &rows), Some(GoalVerdict::Met));
        assert_eq!(verdict(&rows, &worse), Some(GoalVerdict::Undecided));
        assert_eq!(verdict(&worse, &worse), Some(GoalVerdict::Missed));
    }

    #[test]
    fn equal_iops_at_the_ceiling_are_not_a_goal_met() {
        let rows = example_rows();
        let goals = goals(GridRuns { main: &rows, repeats: &[] }, 270_000.0);
        assert_eq!([goals[0].verdict, goals[1].verdict], [GoalVerdict::Met, GoalVerdict::ByConstruction]);
    }
}
