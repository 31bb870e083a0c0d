//! What is to be reached, and what of the post's shape can be seen.

use super::live::Live;
use super::world::Devices;
use super::{COUNTS, POST, Point};
use crate::study::goals::{Claim, Goal};

/// IOPS of a point of the grid.
pub(super) fn iops(grid: &[Point], jobs: usize, queues: usize, devices: Devices) -> f64 {
    let is_it = |point: &&Point| {
        let scene = point.scene;
        (scene.jobs, scene.queues, scene.devices) == (jobs, queues, devices)
    };
    grid.iter().find(is_it).map_or(f64::NAN, |point| point.outcome.iops)
}

/// The post's three ratios.
pub(super) fn ratios(grid: &[Point], devices: Devices) -> [f64; 3] {
    let best = |queues| COUNTS.map(|jobs| iops(grid, jobs, queues, devices)).into_iter().fold(0.0, f64::max);
    let over = |jobs| iops(grid, jobs, 2, devices) / iops(grid, jobs, 1, devices);
    [over(2), over(4), best(2) / best(1)]
}

/// The post's ratios are the goals: with a thread for each queue in virtual time, and with two jobs in real time.
pub(super) fn goals(grid: &[Point], live: &Live) -> Vec<Goal> {
    let at_least = |what: String, value: f64, limit: f64, at: &str| Goal {
        what,
        value,
        limit,
        at: at.into(),
        met: value >= limit,
    };
    let simulated = ratios(grid, Devices::Each).into_iter().zip(POST);
    let mut goals: Vec<_> = simulated
        .map(|(value, (what, post))| {
            at_least(format!("IOPS, {what}, at least the post's"), value, post, "virtual time")
        })
        .collect();
    if let Some(value) = live.two_queues() {
        let (what, post) = POST[0];
        goals.push(at_least(format!("IOPS, {what}, at least the post's"), value, post, "real time, run to completion"));
    }
    goals
}

/// The shape of the post's curves, with its one thread behind all queues.
pub(super) fn claims(grid: &[Point]) -> Vec<Claim> {
    let of = |jobs, queues| iops(grid, jobs, queues, Devices::One);
    let one = COUNTS.map(|jobs| of(jobs, 1));
    let shape = one.map(|iops| format!("{:.2}", iops / one[0])).join(", ");
    let found = ratios(grid, Devices::One);
    let mut claims = vec![Claim {
        what: "one queue: a peak with two jobs and less with four".into(),
        found: format!("{shape} times one job with 1, 2 and 4 jobs"),
        reproduced: one[1] > one[0] && one[2] < one[1],
        reason: "the post's peak takes interrupts and exits of a guest, whose price falls on the jobs; here nobody is interrupted, and what \
                 decides is the slower side of the ring",
    }];
    for (value, (what, post)) in found.into_iter().zip(POST) {
        claims.push(Claim {
            what: format!("{what} with one thread behind all queues: {post:.2}"),
            found: format!("{value:.2}"),
            reproduced: value >= post,
            reason: "one thread serves both queues, and where it is the slower side a second queue brings it nothing; the post's guest must have paid \
                     more under its lock than its host did for an I/O",
        });
    }
    claims
}
