//! Measured costs of a mode's steps on this machine, as data, and the charge of a step. Measures nothing itself.

use std::array;

use serde::Serialize;

use super::end::Moved;

/// The measured sizes of batch; costs are interpolated between them, and extrapolated by the last slope.
pub(crate) const BATCHES: [usize; 9] = [0, 1, 2, 4, 8, 16, 32, 64, 128];

/// Cost of a step by the size of its batch, nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Curve(pub(crate) [f64; BATCHES.len()]);

impl Curve {
    /// A cost for each, without a fixed part.
    pub(crate) fn each(ns: f64) -> Curve {
        Curve(BATCHES.map(|n| n as f64 * ns))
    }

    /// Continues the line through the last two of the first `known` points, where there are more batches.
    pub(crate) fn extend(&mut self, known: usize) {
        let (Some(last), Some(from)) = (known.checked_sub(1), known.checked_sub(2)) else { return };
        let slope = (self.0[last] - self.0[from]) / (BATCHES[last] - BATCHES[from]) as f64;
        let start = self.0[last];
        for (ns, batch) in self.0.iter_mut().zip(BATCHES).skip(known) {
            *ns = start + slope.max(0.0) * (batch - BATCHES[last]) as f64;
        }
    }

    /// For a batch of `n`.
    pub(crate) fn at(&self, n: usize) -> f64 {
        let above = BATCHES.partition_point(|size| *size < n).clamp(1, BATCHES.len() - 1);
        let (low, high) = (BATCHES[above - 1] as f64, BATCHES[above] as f64);
        let slope = (self.0[above] - self.0[above - 1]) / (high - low);
        (self.0[above - 1] + slope * (n as f64 - low)).max(0.0)
    }
}

/// The steps of one mode. All of it is user time: they make no system call.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct StepCosts {
    /// Taking completions.
    pub(crate) collect: Curve,
    /// Filling bios in and passing them on.
    pub(crate) submit: Curve,
    /// Filling bios in and putting them on a list, since there is no id. Only `bio` does.
    pub(crate) list: Curve,
    /// The helper's service of one queue, by the bios it submits. Only `bio` has one.
    pub(crate) pass: Curve,
}

/// One mode, while there is an id for every bio and while there is not.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct ModeCosts {
    pub(crate) within: StepCosts,
    pub(crate) beyond: StepCosts,
}

/// CPU time of something that calls the system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct CallCost {
    pub(crate) user_ns: f64,
    pub(crate) system_ns: f64,
}

impl CallCost {
    pub(crate) fn total_ns(self) -> f64 {
        self.user_ns + self.system_ns
    }
}

/// All that was measured.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Costs {
    pub(crate) bio: ModeCosts,
    pub(crate) single: ModeCosts,
    pub(crate) mq: ModeCosts,
    /// Putting a bio into another job's box, and taking it out there: half each.
    pub(crate) mail_ns: f64,
    /// To sleep on an eventfd, and to continue after its signal.
    pub(crate) sleep: CallCost,
    /// To signal the eventfd of a sleeper.
    pub(crate) ring: CallCost,
    /// Extra cost of a lock and its data if the last holder was on another CPU. Unknown, and not charged, with one CPU.
    pub(crate) hand_over_ns: Option<f64>,
    /// Windows that each figure is the 10th percentile of, in each of several measurements.
    pub(crate) windows: usize,
    /// Load average of the machine when the measurement began, if known: the study itself adds at most 1.
    pub(crate) load: Option<f64>,
}

/// The middle one; of an even number the mean of both.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<_> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let (Some(low), Some(high)) = (sorted.get(sorted.len().saturating_sub(1) / 2), sorted.get(sorted.len() / 2)) else {
        return 0.0;
    };
    f64::midpoint(*low, *high)
}

impl StepCosts {
    fn median(steps: &[StepCosts]) -> StepCosts {
        let curve = |of: fn(&StepCosts) -> &Curve| {
            Curve(array::from_fn(|place| median(steps.iter().map(|steps| of(steps).0[place]))))
        };
        StepCosts {
            collect: curve(|steps| &steps.collect),
            submit: curve(|steps| &steps.submit),
            list: curve(|steps| &steps.list),
            pass: curve(|steps| &steps.pass),
        }
    }
}

impl Costs {
    /// The median of several measurements, figure by figure.
    pub(crate) fn median(measured: &[Costs]) -> Costs {
        let steps = |of: &dyn Fn(&Costs) -> StepCosts| StepCosts::median(&measured.iter().map(of).collect::<Vec<_>>());
        let mode = |of: fn(&Costs) -> &ModeCosts| ModeCosts {
            within: steps(&|costs| of(costs).within),
            beyond: steps(&|costs| of(costs).beyond),
        };
        let call = |of: fn(&Costs) -> &CallCost| CallCost {
            user_ns: median(measured.iter().map(|costs| of(costs).user_ns)),
            system_ns: median(measured.iter().map(|costs| of(costs).system_ns)),
        };
        let is_known = measured.iter().any(|costs| costs.hand_over_ns.is_some());
        Costs {
            bio: mode(|costs| &costs.bio),
            single: mode(|costs| &costs.single),
            mq: mode(|costs| &costs.mq),
            mail_ns: median(measured.iter().map(|costs| costs.mail_ns)),
            sleep: call(|costs| &costs.sleep),
            ring: call(|costs| &costs.ring),
            hand_over_ns: is_known.then(|| median(measured.iter().filter_map(|costs| costs.hand_over_ns))),
            windows: measured.first().map_or(0, |costs| costs.windows),
            load: measured.iter().filter_map(|costs| costs.load).reduce(f64::max),
        }
    }
}

/// A step of a task's loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CostStep {
    Collect,
    Submit,
    /// Of the helper, after this queue.
    LookAfter(usize),
}

impl StepCosts {
    /// Cost of a step with this result.
    pub(crate) fn charge(&self, step: CostStep, moved: &Moved, mail_ns: f64) -> f64 {
        let mail = (moved.delivered + moved.mailed) as f64 * mail_ns / 2.0;
        mail + match step {
            CostStep::Collect => self.collect.at(moved.reaped),
            CostStep::Submit => self.submit.at(moved.submitted) + self.list.at(moved.listed),
            CostStep::LookAfter(_) => {
                self.pass.at(moved.resubmitted) + self.collect.at(moved.reaped) - self.collect.at(0)
            }
        }
    }
}

#[cfg(test)]
impl Costs {
    /// Round figures of about the right size.
    pub(crate) fn example() -> Costs {
        let curve = |first: f64, each: f64| Curve(BATCHES.map(|n| first + each * n as f64));
        let steps = |lock: f64| StepCosts {
            collect: curve(10.0 + lock, 20.0),
            submit: curve(10.0 + lock, 30.0),
            list: Curve::each(20.0 + lock),
            pass: curve(lock, 30.0),
        };
        let mode = |lock| ModeCosts { within: steps(lock), beyond: steps(lock) };
        Costs {
            bio: mode(20.0),
            single: mode(20.0),
            mq: mode(0.0),
            mail_ns: 40.0,
            sleep: CallCost { user_ns: 100.0, system_ns: 1500.0 },
            ring: CallCost { user_ns: 50.0, system_ns: 900.0 },
            hand_over_ns: Some(100.0),
            windows: 0,
            load: Some(7.5),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_goes_through_its_points_and_on() {
        let curve = Curve(BATCHES.map(|n| if n == 0 { 5.0 } else { 10.0 + 2.0 * n as f64 }));
        for (n, want) in [(0, 5.0), (1, 12.0), (3, 16.0), (100, 210.0), (128, 266.0), (256, 522.0)] {
            assert!((curve.at(n) - want).abs() < 1e-9, "{n}: {}", curve.at(n));
        }
        assert!((Curve::each(3.0).at(2048) - 6144.0).abs() < 1e-9);
    }

    #[test]
    fn a_curve_with_few_measured_batches_goes_on_in_a_line() {
        let mut curve = Curve(BATCHES.map(|n| if n <= 4 { 10.0 + 3.0 * n as f64 } else { f64::NAN }));
        curve.extend(4);
        assert_eq!(curve.0.map(|ns| ns as usize), BATCHES.map(|n| 10 + 3 * n));
    }

    #[test]
    fn measurements_have_a_median_figure_by_figure() {
        let [mut low, middle, mut high] = [(); 3].map(|()| Costs::example());
        (low.mail_ns, high.mail_ns) = (0.0, 1e9);
        (low.mq.beyond.submit.0[3], high.mq.beyond.submit.0[3]) = (1e9, 0.0);
        high.hand_over_ns = None;
        let found = Costs::median(&[low, middle.clone(), high]);
        assert!((found.mail_ns - 40.0).abs() < 1e-9);
        assert_eq!(found.mq.beyond.submit, middle.mq.beyond.submit);
        assert_eq!((found.sleep, found.hand_over_ns), (middle.sleep, Some(100.0)));
    }

    #[test]
    fn a_step_is_charged_for_all_it_moved() {
        let costs = Costs::example();
        let moved = Moved { reaped: 4, delivered: 1, mailed: 1, ..Moved::default() };
        let alone = costs.mq.within.collect.at(4);
        assert!((costs.mq.within.charge(CostStep::Collect, &moved, 40.0) - alone - 40.0).abs() < 1e-9);
    }
}
