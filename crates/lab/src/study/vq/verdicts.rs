//! Goals, and the reproduced part of the post's curve.

use super::gains::{GuestAnalysis, share_percent};
use super::live::VqLive;
use super::served::{BackEnd, BackendTable, Found, Grid, MeasuredBackend, Spread};
use super::world::Devices;
use super::{COUNTS, POST, VqPoint};
use crate::study::goals::{ClaimVerdict, Goal, GoalVerdict, PostClaim};

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

/// A ratio; a dash where the run has none.
fn shown(value: f64) -> String {
    if value.is_finite() { format!("{value:.2}") } else { "-".into() }
}

/// The post's ratios are the goals: with a thread for each queue in virtual time, with two jobs in real time, and in
/// processes where there are CPUs for it.
pub(super) fn goals(grid: &[VqPoint], live: &VqLive, served: &[BackendTable], cpus: usize) -> Vec<Goal> {
    let mut goals = Vec::new();
    // Each thread is busy in all of these, and the devices are the slower side.
    let mut simulated = |what: &str, value: f64, limit: f64, threads: usize| {
        let at = format!("virtual time: {threads} device threads are at most {threads} times one");
        let goal = Goal::new(format!("IOPS, {what}, at least the post's"), value, limit, at, true);
        goals.push(Goal { verdict: GoalVerdict::ByConstruction, ..goal });
    };
    for (value, (what, post)) in ratios(grid, Devices::Each).into_iter().zip(POST) {
        simulated(what, value, post, 2);
    }
    let own = iops(grid, 4, 4, Devices::Each) / iops(grid, 4, 1, Devices::Each);
    simulated("4 jobs, a queue each over 1", own, POST[1].1, 4);
    let mut by_spread = |what: &str, spread: Spread, limit: f64, at: &str| {
        let at = format!("{at}, {:.2} to {:.2}", spread.low, spread.high);
        let goal = Goal::new(format!("IOPS, {what}, at least the post's"), spread.median, limit, at, false);
        goals.push(Goal { verdict: spread.at_least(limit), ..goal });
    };
    if let Some(spread) = live.two_queues {
        let (what, post) = POST[0];
        by_spread(what, spread, post, "real time, run to completion");
    }
    let ours = measured(served, BackEnd::Blkyard);
    for (place, (what, post)) in POST.into_iter().enumerate() {
        if let Some(ours) = ours.filter(|_| cpus >= CPUS_WANTED[place]) {
            by_spread(what, ours.ratios[place], post, "real time, in processes");
        }
    }
    let theirs = measured(served, BackEnd::QemuFile);
    let (spread, at) = match (ours, theirs) {
        (Some(ours), Some(theirs)) => worst(&ours.iops, &theirs.iops),
        _ => (Spread { median: f64::NAN, low: f64::NAN, high: f64::NAN }, "not measured: see there".into()),
    };
    let what = "IOPS at every point, our daemon on memory over qemu-storage-daemon on a file in memory";
    let goal = Goal::new(what.into(), spread.median, 1.0, at, false);
    goals.push(Goal { verdict: spread.at_least(1.0), ..goal });
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

/// The least of ours over theirs, and where that is. Low and high are those of opposite ends.
fn worst(ours: &Grid<Spread>, theirs: &Grid<Spread>) -> (Spread, String) {
    let points = COUNTS.into_iter().enumerate().flat_map(|(row, jobs)| {
        COUNTS.into_iter().enumerate().map(move |(column, queues)| (row, column, jobs, queues))
    });
    let over = points.map(|(row, column, jobs, queues)| {
        let (ours, theirs) = (ours[row][column], theirs[row][column]);
        let (median, low, high) = (ours.median / theirs.median, ours.low / theirs.high, ours.high / theirs.low);
        (Spread { median, low, high }, format!("{jobs} jobs, {queues} queues, {low:.2} to {high:.2}"))
    });
    let least = over.min_by(|one, other| one.0.low.total_cmp(&other.0.low));
    least.unwrap_or((Spread { median: f64::NAN, low: f64::NAN, high: f64::NAN }, String::new()))
}

/// The post's claims. A ratio is reproduced if its whole spread reaches the post's, and not if none of it does.
pub(super) fn claims(guest: &GuestAnalysis, grid: &[VqPoint], served: &[BackendTable], cpus: usize) -> Vec<PostClaim> {
    let claim =
        |what: String, found: String, verdict: ClaimVerdict| PostClaim { what, found, verdict, reason: "".into() };
    let one = COUNTS.map(|jobs| guest.of_host(jobs, 1, 1).unwrap_or(f64::NAN));
    let mut claims = vec![claim(
        "a guest, one queue: a peak with two jobs and less with four".into(),
        format!("{} of an I/O thread with 1, 2 and 4 jobs", one.map(shown).join(", ")),
        (one[1] > one[0] && one[2] < one[1]).into(),
    )];
    // The first is calibrated, and no claim.
    for (spread, (what, post)) in guest.ratios.into_iter().zip(POST).skip(1) {
        let Spread { median, low, high } = spread;
        let share = share_percent(median, post);
        claims.push(claim(
            format!("a guest, {what}: {post:.2}, predicted"),
            format!(
                "{median:.2} ({low:.2} to {high:.2} with assumed costs halved or doubled), {share:.0} % of the gain"
            ),
            spread.at_least(post).into(),
        ));
    }
    let more = guest.best_of_host(2, 2) / guest.best_of_host(1, 1);
    claims.push(claim(
        "a guest, two I/O threads behind two queues: more than 1.39 at best".into(),
        shown(more),
        (more > POST[2].1).into(),
    ));
    for (value, (what, post)) in ratios(grid, Devices::One).into_iter().zip(POST) {
        claims.push(claim(
            format!("drivers that poll, one device thread, {what}: {post:.2}"),
            shown(value),
            (value >= post).into(),
        ));
    }
    let ours = measured(served, BackEnd::Blkyard);
    for (place, (what, post)) in POST.into_iter().enumerate() {
        let wanted = CPUS_WANTED[place];
        if let Some(spread) = ours.map(|ours| ours.ratios[place])
            && cpus < wanted
        {
            let Spread { median, low, high } = spread;
            claims.push(claim(
                format!("in processes, {what}: {post:.2}"),
                format!("{median:.2} ({low:.2} to {high:.2}) on {cpus} CPUs; its threads want {wanted}"),
                spread.at_least(post).into(),
            ));
        }
    }
    claims
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let live = VqLive { alone_ns: 1.0, shared_ns: None, own_ns: None, apart_ns: None, two_queues: None };
        goals(&[], &live, served, cpus).into_iter().filter(|goal| !goal.at.contains("virtual")).collect()
    }

    #[test]
    fn ratios_in_processes_are_judged_where_every_thread_has_a_cpu() {
        let served = served(30.0, 10.0);
        for (cpus, judged) in [(2, 0), (4, 1), (6, 3)] {
            let goals = goals_on(cpus, &served);
            assert_eq!(goals.len(), judged + 1, "{cpus} CPUs: {goals:?}");
            let seen = claims(&GuestAnalysis::example(), &[], &served, cpus);
            assert_eq!(seen.iter().filter(|claim| claim.what.starts_with("in processes")).count(), 3 - judged);
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

    #[test]
    fn a_spread_that_contains_the_limit_decides_nothing() {
        let spread = Spread { median: 1.4, low: 1.2, high: 1.6 };
        let verdicts = [1.1, 1.3, 1.7].map(|limit| spread.at_least(limit));
        assert_eq!(verdicts, [GoalVerdict::Met, GoalVerdict::Undecided, GoalVerdict::Missed]);
        let mut served = served(30.0, 10.0);
        let Found::Measured(ours) = &mut served[0].found else { unreachable!("it is measured") };
        ours.ratios[0] = Spread { median: 1.4, low: 1.2, high: 1.6 };
        let goals = goals_on(4, &served);
        assert_eq!(goals[0].verdict, GoalVerdict::Undecided, "{goals:?}");
        let claims = claims(&GuestAnalysis::example(), &[], &served, 2);
        let mut seen = claims.iter().filter(|claim| claim.what.starts_with("in processes, 2 jobs"));
        assert!(seen.all(|claim| claim.verdict != ClaimVerdict::Reproduced), "{claims:?}");
    }

    #[test]
    fn what_the_threads_give_by_themselves_is_no_goal_that_is_met() {
        let live = VqLive { alone_ns: 1.0, shared_ns: None, own_ns: None, apart_ns: None, two_queues: None };
        let goals = goals(&[], &live, &served(30.0, 10.0), 2);
        let simulated: Vec<_> = goals.iter().filter(|goal| goal.at.contains("virtual")).collect();
        assert!(simulated.len() == 4 && simulated.iter().all(|goal| goal.verdict == GoalVerdict::ByConstruction));
    }
}
