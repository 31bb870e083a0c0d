//! Whether real runs agree with the simulation: figures of each policy from both, and the verdicts.
//!
//! The limits below were set before the first run that was judged by them. How noise is measured was changed after the
//! first runs, from half of the range of the rounds to two standard errors. A goal is undecided if its limit may lie on
//! either side, by how much the rounds differ.

use crate::floor::Samples;
use crate::study::goals::{Goal, GoalVerdict};
use crate::study::parts::{Drawn, Part, column};

/// Figures of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PolicyFigures {
    pub(super) iops: f64,
    pub(super) mean_us: f64,
    pub(super) stdev_us: f64,
    /// Part of the I/Os on the faster path, 0 to 1.
    pub(super) fast: f64,
}

/// A policy's runs: in real time round by round, and simulated seed by seed.
#[derive(Clone, Debug)]
pub(super) struct PolicyRuns {
    pub(super) name: &'static str,
    pub(super) real: Vec<PolicyFigures>,
    pub(super) simulated: Vec<PolicyFigures>,
}

/// The policy that others are put in relation to.
pub(super) const BASE: &str = "round-robin";

/// Largest difference of the mean latency, as a multiple of that of [`BASE`], from the simulation's, relative.
const RATIO_WITHIN: f64 = 0.05;
/// The same of the faster path's share, absolute.
const SHARE_WITHIN: f64 = 0.05;
/// The same of IOPS, relative. Sockets and timers take time that the simulated paths do not have.
const IOPS_WITHIN: f64 = 0.10;
/// The same of the deviation, relative.
const STDEV_WITHIN: f64 = 0.25;
/// Policies whose simulated means differ by more than this must have the same order in real time, relative.
const ORDERED_FROM: f64 = 0.05;

/// Standard error of the median of a normal sample, as a multiple of that of its mean.
const MEDIAN_ERROR: f64 = 1.25;

/// A figure of several rounds.
#[derive(Clone, Copy, Debug)]
struct Rounds {
    median: f64,
    /// Two standard errors of the median.
    noise: f64,
}

impl Rounds {
    fn of(values: impl IntoIterator<Item = f64>) -> Rounds {
        let values: Vec<_> = values.into_iter().collect();
        let mut samples = Samples::default();
        values.iter().for_each(|value| samples.push(*value));
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
        Rounds { median: samples.percentile(50.0), noise: 2.0 * MEDIAN_ERROR * (variance / count).sqrt() }
    }
}

/// The mean latency of each round as a multiple of the base's in the same round.
fn ratios(runs: &[PolicyFigures], base: &[PolicyFigures]) -> Rounds {
    Rounds::of(runs.iter().zip(base).map(|(run, base)| run.mean_us / base.mean_us))
}

/// A figure in real time and simulated.
struct RealAndSimulated {
    name: &'static str,
    real: Rounds,
    simulated: Rounds,
}

impl RealAndSimulated {
    /// Difference of the medians and its noise, as parts of the simulated figure if `is_relative`.
    fn difference(&self, is_relative: bool) -> (f64, f64) {
        let unit = if is_relative { self.simulated.median } else { 1.0 };
        let noise = self.real.noise.hypot(self.simulated.noise) / unit;
        ((self.real.median - self.simulated.median).abs() / unit, noise)
    }

    /// The goal that the difference is at most this.
    fn goal(&self, what: &str, limit: f64, is_relative: bool) -> Goal {
        let (value, noise) = self.difference(is_relative);
        let at = format!("{}, noise {noise:.3}", self.name);
        let mut goal = Goal::new(what.into(), value, limit, at, value <= limit);
        // Rounds without any result decide nothing either.
        if (value - limit).abs() <= noise || value.is_nan() {
            goal.verdict = GoalVerdict::Undecided;
        }
        goal
    }
}

/// The worst goal of several policies: by verdict, then by value.
fn worst(goals: impl Iterator<Item = Goal>) -> Option<Goal> {
    goals.max_by(|one, other| (one.verdict.cmp(&other.verdict)).then(one.value.total_cmp(&other.value)))
}

/// Pairs of policies whose order is wrong in real time, and pairs that the noise leaves open.
fn misordered(means: &[RealAndSimulated]) -> (usize, usize, usize) {
    let (mut ordered, mut wrong, mut open) = (0, 0, 0);
    for one in means {
        for other in means.iter().filter(|other| one.simulated.median * (1.0 + ORDERED_FROM) < other.simulated.median) {
            ordered += 1;
            let distance = other.real.median - one.real.median;
            if distance.abs() <= one.real.noise.hypot(other.real.noise) {
                open += 1;
            } else if distance < 0.0 {
                wrong += 1;
            }
        }
    }
    (ordered, wrong, open)
}

/// The table of a scene with its verdicts.
///
/// # Panics
/// If no policy is [`BASE`].
pub(super) fn part(name: &'static str, title: String, policies: &[PolicyRuns], notes: Vec<String>) -> Part {
    let Some(base) = policies.iter().find(|policy| policy.name == BASE) else { panic!("{BASE} is not run") };
    let mut part = Part {
        name,
        title,
        columns: vec![
            column("iops", "IOPS", 0),
            column("simulated_iops", "sim.", 0),
            column("mean_us", "mean us", 0),
            column("simulated_mean_us", "sim.", 0),
            column("stdev_us", "stdev us", 0),
            column("simulated_stdev_us", "sim.", 0),
            column("fast_percent", "fast %", 1),
            column("simulated_fast_percent", "sim.", 1),
            column("mean_ratio", "mean / rr", 3),
            column("simulated_mean_ratio", "sim.", 3),
            column("noise_percent", "noise %", 1),
        ],
        drawn: Drawn { bar: "mean_us", deviation: "stdev_us", post: "simulated_mean_us" },
        notes,
        ..Part::default()
    };
    let compare = |policy: &PolicyRuns, figure: fn(&PolicyFigures) -> f64| RealAndSimulated {
        name: policy.name,
        real: Rounds::of(policy.real.iter().map(figure)),
        simulated: Rounds::of(policy.simulated.iter().map(figure)),
    };
    let ratio = |policy: &PolicyRuns| RealAndSimulated {
        name: policy.name,
        real: ratios(&policy.real, &base.real),
        simulated: ratios(&policy.simulated, &base.simulated),
    };
    for policy in policies {
        let iops = compare(policy, |run| run.iops);
        let mean = compare(policy, |run| run.mean_us);
        let stdev = compare(policy, |run| run.stdev_us);
        let fast = compare(policy, |run| 100.0 * run.fast);
        let ratio = ratio(policy);
        let pairs = [&iops, &mean, &stdev, &fast, &ratio].map(|both| [both.real.median, both.simulated.median]);
        let noise = 100.0 * mean.real.noise / mean.real.median;
        part.row(policy.name, pairs.into_iter().flatten().chain([noise]).map(Some));
    }
    let all = |what: String, limit: f64, is_relative: bool, figure: &dyn Fn(&PolicyRuns) -> RealAndSimulated| {
        worst(policies.iter().map(|policy| figure(policy).goal(&what, limit, is_relative)))
    };
    let goals = [
        all(format!("{name}: mean to {BASE}'s, largest difference from the simulation"), RATIO_WITHIN, true, &ratio),
        all(format!("{name}: share of the faster path, the same"), SHARE_WITHIN, false, &|policy| {
            compare(policy, |run| run.fast)
        }),
        all(format!("{name}: IOPS, the same"), IOPS_WITHIN, true, &|policy| compare(policy, |run| run.iops)),
        all(format!("{name}: deviation, the same"), STDEV_WITHIN, true, &|policy| compare(policy, |run| run.stdev_us)),
    ];
    part.goals.extend(goals.into_iter().flatten());
    let means: Vec<_> = policies.iter().map(|policy| compare(policy, |run| run.mean_us)).collect();
    let (ordered, wrong, open) = misordered(&means);
    let at = format!("of {ordered} pairs more than {:.0} % apart, {open} within the noise", 100.0 * ORDERED_FROM);
    part.at_most(format!("{name}: pairs of policies in another order than simulated"), wrong as f64, 0.0, at);
    if wrong == 0 && open > 0 {
        part.undecided_within(0.0);
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(mean_us: f64, fast: f64) -> PolicyFigures {
        PolicyFigures { iops: 12e6 / mean_us, mean_us, stdev_us: mean_us / 5.0, fast }
    }

    fn policy(name: &'static str, real: [f64; 3], simulated: f64) -> PolicyRuns {
        let real = real.map(|mean_us| figures(mean_us, 0.5)).to_vec();
        PolicyRuns { name, real, simulated: vec![figures(simulated, 0.5); 3] }
    }

    fn verdicts(policies: &[PolicyRuns]) -> Vec<GoalVerdict> {
        part("scene", String::new(), policies, Vec::new()).goals.iter().map(|goal| goal.verdict).collect()
    }

    #[test]
    fn equal_figures_agree_in_all() {
        let policies = [policy(BASE, [5000.0; 3], 5000.0), policy("adaptive", [4500.0; 3], 4500.0)];
        assert_eq!(verdicts(&policies), [GoalVerdict::Met; 5]);
    }

    #[test]
    fn an_overhead_of_all_policies_is_no_difference_of_their_ratio() {
        // IOPS and deviation differ by a fifth.
        let policies = [policy(BASE, [6250.0; 3], 5000.0), policy("adaptive", [5625.0; 3], 4500.0)];
        let [met, missed, undecided] = [GoalVerdict::Met, GoalVerdict::Missed, GoalVerdict::Undecided];
        assert_eq!(verdicts(&policies), [met, met, missed, undecided, met]);
    }

    #[test]
    fn the_worst_policy_decides_and_its_name_is_said() {
        let policies =
            [policy(BASE, [5000.0; 3], 5000.0), policy("adaptive", [5600.0; 3], 4500.0), policy("numa", [1.0; 3], 1.0)];
        let part = part("scene", String::new(), &policies, Vec::new());
        assert_eq!(part.goals[0].verdict, GoalVerdict::Missed);
        assert!(part.goals[0].at.starts_with("adaptive, "), "{}", part.goals[0].at);
        assert_eq!((part.goals[4].value, part.goals[4].verdict), (1.0, GoalVerdict::Missed), "the order is another");
    }

    #[test]
    fn noisy_rounds_decide_nothing() {
        let noisy = policy("adaptive", [3000.0, 4500.0, 6000.0], 4500.0);
        let decided = verdicts(&[policy(BASE, [5000.0; 3], 5000.0), noisy]);
        assert!(!decided.contains(&GoalVerdict::Missed), "{decided:?}");
        assert_eq!((decided[0], decided[4]), (GoalVerdict::Undecided, GoalVerdict::Undecided), "{decided:?}");
    }
}
