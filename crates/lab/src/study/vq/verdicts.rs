//! Goals, and the reproduced part of the post's curve.

use super::live::VqLive;
use super::served::{BackEnd, BackendTable, Found, Grid, MeasuredBackend, Spread};
use super::world::Devices;
use super::{COUNTS, POST, VqPoint};
use crate::study::goals::{Goal, PostClaim};

/// IOPS of a point of the grid.
pub(super) fn iops(grid: &[VqPoint], jobs: usize, queues: usize, devices: Devices) -> f64 {
    let is_it = |point: &&VqPoint| {
        let scene = point.scene;
        (scene.jobs, scene.queues, scene.devices) == (jobs, queues, devices)
    };
    grid.iter().find(is_it).map_or(f64::NAN, |point| point.outcome.iops)
}

/// The post's three ratios.
pub(super) fn ratios(grid: &[VqPoint], devices: Devices) -> [f64; 3] {
    let best = |queues| COUNTS.map(|jobs| iops(grid, jobs, queues, devices)).into_iter().fold(0.0, f64::max);
    let over = |jobs| iops(grid, jobs, 2, devices) / iops(grid, jobs, 1, devices);
    [over(2), over(4), best(2) / best(1)]
}

/// The post's ratios are the goals: with a thread for each queue in virtual time, and with two jobs in real time.
pub(super) fn goals(grid: &[VqPoint], live: &VqLive, served: &[BackendTable], cpus: usize) -> Vec<Goal> {
    let at_least =
        |what: String, value: f64, limit: f64, at: &str| Goal::new(what, value, limit, at.into(), value >= limit);
    let simulated = ratios(grid, Devices::Each).into_iter().zip(POST);
    let mut goals: Vec<_> = simulated
        .map(|(value, (what, post))| {
            at_least(format!("IOPS, {what}, at least the post's"), value, post, "virtual time")
        })
        .collect();
    // Two device threads are at most twice one, so two queues cannot give this to four jobs.
    let own = iops(grid, 4, 4, Devices::Each) / iops(grid, 4, 1, Devices::Each);
    let (_, post) = POST[1];
    goals.push(at_least(
        "IOPS, 4 jobs, a queue each over 1, at least the post's of two".into(),
        own,
        post,
        "virtual time",
    ));
    if let Some(value) = live.two_queues() {
        let (what, post) = POST[0];
        goals.push(at_least(format!("IOPS, {what}, at least the post's"), value, post, "real time, run to completion"));
    }
    let ours = measured(served, BackEnd::Blkyard);
    for (place, (what, post)) in POST.into_iter().enumerate() {
        if let Some(ours) = ours.filter(|_| cpus >= CPUS_WANTED[place]) {
            let what = format!("IOPS, {what}, at least the post's");
            goals.push(at_least(what, ours.ratios[place].median, post, "real time, in processes"));
        }
    }
    let theirs = measured(served, BackEnd::QemuFile);
    let (value, at) = match (ours, theirs) {
        (Some(ours), Some(theirs)) => worst(&ours.iops, &theirs.iops),
        _ => (f64::NAN, "not measured: see there".into()),
    };
    goals.push(at_least(
        "IOPS at every point, our daemon on memory over qemu-storage-daemon on a file in memory".into(),
        value,
        1.0,
        &at,
    ));
    goals
}

/// CPUs needed for the post's ratios, one for each job and device thread: with fewer they share CPUs, and a second
/// queue adds none. In the post's order.
const CPUS_WANTED: [usize; 3] = [4, 6, 6];

fn measured(served: &[BackendTable], back_end: BackEnd) -> Option<&MeasuredBackend> {
    served.iter().find(|table| table.back_end == back_end).and_then(|table| match &table.found {
        Found::Measured(measured) => Some(&**measured),
        Found::NotMeasured(_) => None,
    })
}

/// The least of ours over theirs, and where that is.
fn worst(ours: &Grid<Spread>, theirs: &Grid<Spread>) -> (f64, String) {
    let points = COUNTS.into_iter().enumerate().flat_map(|(row, jobs)| {
        COUNTS.into_iter().enumerate().map(move |(column, queues)| (row, column, jobs, queues))
    });
    let over = points.map(|(row, column, jobs, queues)| {
        (ours[row][column].median / theirs[row][column].median, format!("{jobs} jobs, {queues} queues"))
    });
    over.min_by(|one, other| one.0.total_cmp(&other.0)).unwrap_or_default()
}

/// The shape of the post's curves, with its one thread behind all queues.
pub(super) fn claims(grid: &[VqPoint], served: &[BackendTable], cpus: usize) -> Vec<PostClaim> {
    let of = |jobs, queues| iops(grid, jobs, queues, Devices::One);
    let one = COUNTS.map(|jobs| of(jobs, 1));
    let shape = one.map(|iops| format!("{:.2}", iops / one[0])).join(", ");
    let found = ratios(grid, Devices::One);
    let mut claims = vec![PostClaim {
        what: "one queue: a peak with two jobs and less with four".into(),
        found: format!("{shape} times one job with 1, 2 and 4 jobs"),
        reproduced: one[1] > one[0] && one[2] < one[1],
        reason: "the post's peak takes interrupts and exits of a guest, whose price falls on the jobs; here nobody is interrupted, and what \
                 decides is the slower side of the ring",
    }];
    for (value, (what, post)) in found.into_iter().zip(POST) {
        claims.push(PostClaim {
            what: format!("{what} with one thread behind all queues: {post:.2}"),
            found: format!("{value:.2}"),
            reproduced: value >= post,
            reason: "one thread serves both queues, and where it is the slower side a second queue brings it nothing; the post's guest must have paid \
                     more under its lock than its host did for an I/O",
        });
    }
    let ours = measured(served, BackEnd::Blkyard);
    for (place, (what, post)) in POST.into_iter().enumerate() {
        if let Some(Spread { median, low, high }) = ours.map(|ours| ours.ratios[place])
            && cpus < CPUS_WANTED[place]
        {
            claims.push(PostClaim {
                what: format!("{what} in processes of their own: {post:.2}"),
                found: format!("{median:.2} ({low:.2} to {high:.2}) on {cpus} CPUs"),
                reproduced: median >= post,
                reason: "jobs and device threads want a CPU each, four with two jobs and six with four: here they take turns on fewer, and a \
                         second queue brings no CPU with it",
            });
        }
    }
    claims
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::goals::GoalVerdict;
    use crate::study::vq::served::BACK_ENDS;

    fn served(ours: f64, theirs: f64) -> Vec<BackendTable> {
        let spread = |median| Spread { median, low: median, high: median };
        let measured = |iops, ratio| MeasuredBackend {
            iops: [[spread(iops); COUNTS.len()]; COUNTS.len()],
            ratios: [spread(ratio); 3],
        };
        let found = [measured(ours, 1.5), measured(theirs, 1.0), measured(theirs, 1.0)];
        let table = |(back_end, measured)| BackendTable { back_end, found: Found::Measured(Box::new(measured)) };
        BACK_ENDS.into_iter().zip(found).map(table).collect()
    }

    fn goals_on(cpus: usize, served: &[BackendTable]) -> Vec<Goal> {
        let live = VqLive { alone_ns: 1.0, shared_ns: None, own_ns: None, apart_ns: None };
        goals(&[], &live, served, cpus).into_iter().filter(|goal| !goal.at.contains("virtual")).collect()
    }

    #[test]
    fn ratios_in_processes_are_judged_where_every_thread_has_a_cpu() {
        let served = served(30.0, 10.0);
        for (cpus, judged) in [(2, 0), (4, 1), (6, 3)] {
            let goals = goals_on(cpus, &served);
            assert_eq!(goals.len(), judged + 1, "{cpus} CPUs: {goals:?}");
            let seen = claims(&[], &served, cpus);
            assert_eq!(seen.iter().filter(|claim| claim.what.contains("in processes")).count(), 3 - judged);
        }
        // The post has 1.33, 2.00 and 1.39.
        assert_eq!(goals_on(6, &served).iter().map(Goal::is_met).collect::<Vec<_>>(), [true, false, true, true]);
    }

    #[test]
    fn the_other_daemon_is_a_goal_that_only_a_measurement_meets() {
        let mut served = served(9.0, 10.0);
        assert!(matches!(goals_on(2, &served)[..], [Goal { verdict: GoalVerdict::Missed, .. }]));
        served[1].found = Found::NotMeasured("it is not there".into());
        let goals = goals_on(2, &served);
        assert!(goals[0].value.is_nan() && !goals[0].is_met(), "{goals:?}");
    }
}
