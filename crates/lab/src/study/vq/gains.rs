//! What share of the post's three gains the model of a guest explains, and which of its costs does.

use std::io;

use serde::Serialize;

use super::guest::{GuestResult, GuestScene, play_guest};
use super::guest_costs::{CAUSES, GuestCosts};
use super::served::Spread;
use super::{COUNTS, POST};

/// A scene of the guest and its result.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct GuestPoint {
    #[serde(flatten)]
    pub(crate) scene: GuestScene,
    #[serde(flatten)]
    pub(crate) outcome: GuestResult,
}

/// Everything about the guest.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct GuestAnalysis {
    pub(crate) costs: GuestCosts,
    pub(crate) points: Vec<GuestPoint>,
    /// The post's ratios; low and high over the assumed costs at half and at twice their value.
    pub(crate) ratios: [Spread; 3],
    /// The same without one of the causes.
    pub(crate) without: [[f64; 3]; CAUSES.len()],
    /// Lock growth for each waiter with which four jobs would have the post's ratio, ns. `None` if none below a
    /// hundred times the assumed one has.
    pub(crate) transfer_wanted_ns: Option<u64>,
}

/// IOPS of one queue and of two by jobs, in the order of [`COUNTS`].
type Curves = [[f64; COUNTS.len()]; 2];

fn curves(costs: GuestCosts, ios: u64, seed: u64) -> io::Result<Curves> {
    let mut curves = Curves::default();
    for (queues, curve) in [1, 2].into_iter().zip(&mut curves) {
        for (jobs, iops) in COUNTS.into_iter().zip(curve) {
            *iops = play_guest(GuestScene { jobs, queues, io_threads: 1 }, costs, ios, seed)?.iops;
        }
    }
    Ok(curves)
}

/// The post's three ratios.
fn ratios(curves: &Curves) -> [f64; 3] {
    let [one, two] = curves;
    let best = |curve: &[f64]| curve.iter().copied().fold(0.0, f64::max);
    [two[1] / one[1], two[2] / one[2], best(two) / best(one)]
}

/// Plays the guest with all its costs, with varied ones, and without each cause.
///
/// # Errors
/// There is no memory for the rings.
pub(super) fn analyse(ios: u64, seed: u64) -> io::Result<GuestAnalysis> {
    let costs = GuestCosts::of_2014();
    let mut points = Vec::new();
    for (queues, io_threads) in [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4)] {
        for jobs in COUNTS {
            let scene = GuestScene { jobs, queues, io_threads };
            points.push(GuestPoint { scene, outcome: play_guest(scene, costs, ios, seed)? });
        }
    }
    let found = ratios(&curves(costs, ios, seed)?);
    let mut spreads = found.map(|median| Spread { median, low: median, high: median });
    for varied in costs.varied() {
        for (spread, ratio) in spreads.iter_mut().zip(ratios(&curves(varied, ios, seed)?)) {
            spread.low = spread.low.min(ratio);
            spread.high = spread.high.max(ratio);
        }
    }
    let mut without = [[0.0; 3]; CAUSES.len()];
    for (reduced, ratio) in costs.without().into_iter().zip(&mut without) {
        *ratio = ratios(&curves(reduced, ios, seed)?);
    }
    let transfer_wanted_ns = transfer_wanted_ns(costs, ios, seed)?;
    Ok(GuestAnalysis { costs, points, ratios: spreads, without, transfer_wanted_ns })
}

/// Looks for the lock growth that gives the post's ratio with four jobs, to an eighth.
fn transfer_wanted_ns(costs: GuestCosts, ios: u64, seed: u64) -> io::Result<Option<u64>> {
    let (_, wanted) = POST[1];
    let mut transfer_ns = costs.transfer_ns;
    while transfer_ns < costs.transfer_ns * 100 {
        let at = |queues| {
            play_guest(GuestScene { jobs: 4, queues, io_threads: 1 }, GuestCosts { transfer_ns, ..costs }, ios, seed)
        };
        if at(2)?.iops / at(1)?.iops >= wanted {
            return Ok(Some(transfer_ns));
        }
        transfer_ns += transfer_ns.div_ceil(8);
    }
    Ok(None)
}

impl GuestAnalysis {
    /// IOPS of a point, over what one I/O thread can do.
    pub(super) fn of_host(&self, jobs: usize, queues: usize, io_threads: usize) -> Option<f64> {
        let wanted = GuestScene { jobs, queues, io_threads };
        let point = self.points.iter().find(|point| point.scene == wanted)?;
        Some(point.outcome.iops * self.costs.service_ns as f64 / 1e9)
    }

    /// The best over all numbers of jobs.
    pub(super) fn best_of_host(&self, queues: usize, io_threads: usize) -> f64 {
        COUNTS.into_iter().filter_map(|jobs| self.of_host(jobs, queues, io_threads)).fold(0.0, f64::max)
    }
}

#[cfg(test)]
impl GuestAnalysis {
    /// Round figures.
    pub(super) fn example() -> GuestAnalysis {
        let outcome = GuestResult { iops: 2e5, kicks: 0.5, interrupts: 0.3, ipis: 0.2, waiters: 0.1 };
        let points = COUNTS.into_iter().flat_map(|queues| {
            COUNTS.map(|jobs| GuestPoint { scene: GuestScene { jobs, queues, io_threads: 1 }, outcome })
        });
        GuestAnalysis {
            costs: GuestCosts::of_2014(),
            points: points.collect(),
            ratios: [Spread { median: 1.2, low: 1.1, high: 1.3 }; 3],
            without: [[1.0; 3]; CAUSES.len()],
            transfer_wanted_ns: None,
        }
    }
}

/// Share of a gain of the post that a ratio here explains, percent.
pub(super) fn share_percent(here: f64, post: f64) -> f64 {
    (here - 1.0) / (post - 1.0) * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const IOS: u64 = 6_000;

    #[test]
    fn two_jobs_have_the_ratio_that_is_calibrated() {
        let (_, post) = POST[0];
        let curves = curves(GuestCosts::of_2014(), IOS, 1).unwrap();
        let [two_jobs, ..] = ratios(&curves);
        assert!((two_jobs / post - 1.0).abs() < 0.03, "{two_jobs}: {curves:?}");
    }

    #[test]
    fn a_guest_that_pays_nothing_gains_nothing_from_a_second_queue() {
        let free =
            GuestCosts { hold_ns: 0, transfer_ns: 0, kick_ns: 0, interrupt_ns: 0, call_ns: 0, ..GuestCosts::of_2014() };
        for ratio in ratios(&curves(free, IOS, 1).unwrap()) {
            assert!((ratio - 1.0).abs() < 0.03, "{ratio}");
        }
    }

    #[test]
    fn lock_growth_costs_the_queue_that_is_shared() {
        let costs = GuestCosts { transfer_ns: 5_000, ..GuestCosts::of_2014() };
        let [_, four_jobs, _] = ratios(&curves(costs, IOS, 1).unwrap());
        let [_, assumed, _] = ratios(&curves(GuestCosts::of_2014(), IOS, 1).unwrap());
        assert!(four_jobs > assumed * 1.2, "{four_jobs} {assumed}");
    }

    #[test]
    fn no_point_exceeds_its_io_threads_and_kicks_are_suppressed_under_load() {
        let costs = GuestCosts::of_2014();
        for (jobs, queues, io_threads) in [(1, 1, 1), (4, 4, 1), (4, 4, 4)] {
            let result = play_guest(GuestScene { jobs, queues, io_threads }, costs, IOS, 1).unwrap();
            assert!(result.iops <= io_threads as f64 * 1e9 / costs.service_ns as f64 * 1.01, "{result:?}");
            assert!(result.kicks <= 1.0 && result.interrupts <= 1.0, "{result:?}");
        }
        let full = play_guest(GuestScene { jobs: 4, queues: 4, io_threads: 1 }, costs, IOS, 1).unwrap();
        assert!(full.kicks < 0.01 && full.ipis < 0.01, "an I/O thread that never sleeps wants no kick: {full:?}");
    }
}
