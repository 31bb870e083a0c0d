//! The tables of the report.

use blkyard_os::cpu_places;

use super::gains::{GuestAnalysis, GuestPoint, share_percent};
use super::report::VqFigures;
use super::served::{BackendTable, Found, Spread};
use super::verdicts::{iops, ratios};
use super::world::{Devices, VqScene};
use super::{COUNTS, POST, VqPoint};
use crate::study::parts::{Column, Drawn, Part, column};

impl Devices {
    fn name(self) -> &'static str {
        match self {
            Devices::One => "one device thread",
            Devices::Each => "a thread per queue",
            Devices::Jobs => "run to completion",
        }
    }
}

/// The shares of the post's gains: the study's main figure.
pub(super) fn gains(guest: &GuestAnalysis) -> Part {
    let heads = ["no lock growth, %", "no kicks, %", "no interrupts, %", "no calls, %"];
    let keys = ["without_lock_growth", "without_kicks", "without_interrupts", "without_calls"];
    let mut part = Part {
        name: "gains",
        title: "SIMULATED: gain of two queues over one in a guest with one I/O thread behind them, and the gain \
                without one of the guest's costs"
            .into(),
        columns: vec![
            column("post_percent", "post, %", 0),
            column("here_percent", "here, %", 0),
            column("low_percent", "low, %", 0),
            column("high_percent", "high, %", 0),
            column("share_percent", "share, %", 0),
        ],
        drawn: Drawn { bar: "here_percent", deviation: "", post: "post_percent" },
        ..Part::default()
    };
    part.columns.extend(keys.into_iter().zip(heads).map(|(key, head)| column(key, head, 0)));
    let percent = |ratio: f64| Some((ratio - 1.0) * 100.0);
    for (place, (what, post)) in POST.into_iter().enumerate() {
        let Spread { median, low, high } = guest.ratios[place];
        let name = if place == 0 { format!("{what} (calibrated)") } else { what.to_owned() };
        let mut values = vec![percent(post), percent(median), percent(low), percent(high)];
        values.push(Some(share_percent(median, post)));
        values.extend(guest.without.iter().map(|ratios| percent(ratios[place])));
        part.row(name, values);
    }
    part.notes.push("Low and high: each assumed cost at half and at twice its value, one at a time.".into());
    part.notes.push(match guest.transfer_wanted_ns {
        Some(wanted_ns) => format!(
            "With four jobs the post's gain takes a lock growth of {wanted_ns} ns for each waiter, where {} are assumed.",
            guest.costs.transfer_ns
        ),
        None => "No lock growth up to a hundred times the assumed one gives the post's gain with four jobs.".into(),
    });
    part
}

/// All further tables.
pub(super) fn others(figures: &VqFigures) -> Vec<Part> {
    let mut parts = vec![guest(&figures.guest), grid(&figures.grid), polled(&figures.grid), by_cpus(&figures.cpus)];
    parts.extend([live(figures), steps(figures)]);
    parts.extend(served(figures));
    parts
}

/// IOPS of the post by jobs and queues, over its best: implied by its three gains (spec E.4).
fn posted(jobs: usize, queues: usize) -> Option<f64> {
    match (jobs, queues) {
        (2, 1) => Some(0.72),
        (4, 1) => Some(0.5),
        (2, 2) => Some(0.96),
        (4, 2) => Some(1.0),
        _ => None,
    }
}

fn guest(guest: &GuestAnalysis) -> Part {
    let mut part = Part {
        name: "guest",
        title:
            "SIMULATED: a guest with a CPU for each job, over real rings with suppressed kicks and interrupts; IOPS \
                over those of one I/O thread, and events for each I/O"
                .into(),
        columns: vec![
            column("post", "post, implied", 2),
            column("of_host", "here", 2),
            column("kiops", "KIOPS", 0),
            column("kicks", "kicks", 2),
            column("interrupts", "interrupts", 2),
            column("calls", "calls", 2),
            column("waiters", "waiters", 2),
        ],
        drawn: Drawn { bar: "of_host", deviation: "", post: "post" },
        ..Part::default()
    };
    for GuestPoint { scene, outcome } in &guest.points {
        let (jobs, queues, io_threads) = (scene.jobs, scene.queues, scene.io_threads);
        let post = posted(jobs, queues).filter(|_| io_threads == 1);
        let of_host = guest.of_host(jobs, queues, io_threads);
        let more = if io_threads > 1 { format!(", {io_threads} I/O threads") } else { String::new() };
        part.row(
            format!("{jobs} jobs, {queues} queues{more}"),
            [
                post,
                of_host,
                Some(outcome.iops / 1e3),
                Some(outcome.kicks),
                Some(outcome.interrupts),
                Some(outcome.ipis),
                Some(outcome.waiters),
            ],
        );
    }
    part.notes.push("Waiters: CPUs that wait whenever the lock is taken, on average. Costs, ns:".into());
    for (what, ns, origin) in guest.costs.origins() {
        part.notes.push(format!("{what}: {ns}; {origin}"));
    }
    part
}

/// Columns of three numbers of queues.
fn by_queues(keys: [&'static str; 3], heads: [&'static str; 3], digits: usize) -> impl Iterator<Item = Column> {
    keys.into_iter().zip(heads).map(move |(key, head)| column(key, head, digits))
}

fn grid(grid: &[VqPoint]) -> Part {
    let kiops = by_queues(["kiops_1", "kiops_2", "kiops_4"], ["1 queue", "2 queues", "4 queues"], 0);
    let waiting = by_queues(["waiting_1", "waiting_2", "waiting_4"], ["waits 1, %", "waits 2, %", "waits 4, %"], 0);
    let mut part = Part {
        name: "grid",
        title: "SIMULATED: our drivers and devices that poll, a CPU for each thread; KIOPS, and the jobs' time spent \
                waiting for a queue's lock"
            .into(),
        columns: kiops.chain(waiting).collect(),
        drawn: Drawn { bar: "kiops_2", deviation: "", post: "" },
        ..Part::default()
    };
    for devices in [Devices::One, Devices::Each] {
        for jobs in COUNTS {
            let point = |queues| grid.iter().find(|point| point.scene == VqScene { jobs, queues, devices });
            let kiops = COUNTS.map(|queues| point(queues).map(|point| point.outcome.iops / 1e3));
            let waiting = COUNTS.map(|queues| point(queues).map(|point| point.outcome.waiting * 100.0));
            part.row(format!("{}, {jobs} jobs", devices.name()), kiops.into_iter().chain(waiting));
        }
    }
    part
}

fn polled(grid: &[VqPoint]) -> Part {
    let mut part = Part {
        name: "polled",
        title:
            "SIMULATED: the same as ratios of IOPS. Two device threads are at most twice one: with a thread per queue \
                they hold by construction"
                .into(),
        columns: vec![
            column("post", "post", 2),
            column("one", "one device thread", 2),
            column("each", "a thread per queue", 2),
        ],
        ..Part::default()
    };
    let [one, each] = [Devices::One, Devices::Each].map(|devices| ratios(grid, devices));
    for (place, (what, post)) in POST.into_iter().enumerate() {
        part.row(what, [Some(post), Some(one[place]), Some(each[place])]);
    }
    let own = |devices| iops(grid, 4, 4, devices) / iops(grid, 4, 1, devices);
    part.row("4 jobs, a queue each over 1", [None, Some(own(Devices::One)), Some(own(Devices::Each))]);
    part
}

fn by_cpus(points: &[VqPoint]) -> Part {
    let mut part = Part {
        name: "cpus",
        title: "SIMULATED: so many CPUs, used in four ways; only locks and threads limit the scaling, not memory"
            .into(),
        columns: vec![
            column("kiops", "KIOPS", 0),
            column("times", "times the first", 2),
            column("waiting_percent", "waiting, %", 0),
        ],
        drawn: Drawn { bar: "kiops", deviation: "", post: "" },
        ..Part::default()
    };
    for VqPoint { scene, cpus, outcome } in points {
        let VqScene { jobs, queues, devices } = *scene;
        let first = points.iter().find(|point| point.scene.devices == devices && point.scene.queues == 1);
        let times = first.map(|first| outcome.iops / first.outcome.iops);
        let name = format!("{cpus} CPUs: {jobs} jobs, {queues} queues, {}", devices.name());
        part.row(name, [Some(outcome.iops / 1e3), times, Some(outcome.waiting * 100.0)]);
    }
    part
}

fn live(figures: &VqFigures) -> Part {
    let live = &figures.costs.live;
    let mut part = Part {
        name: "live",
        title: "REAL TIME on this machine, windows in turn, 10th percentile; and what virtual time makes of the same"
            .into(),
        columns: vec![
            column("ns", "ns an I/O", 1),
            column("kiops", "KIOPS", 0),
            column("simulated_kiops", "simulated, KIOPS", 0),
        ],
        drawn: Drawn { bar: "kiops", deviation: "", post: "" },
        ..Part::default()
    };
    let rows = [
        ("run to completion, 1 thread, 1 queue", Some(live.alone_ns)),
        ("run to completion, 2 threads, 1 queue", live.shared_ns),
        ("run to completion, 2 threads, 2 queues", live.own_ns),
        ("driver and device apart, 1 queue (fitted)", live.apart_ns),
    ];
    for ((name, ns), simulated) in rows.into_iter().zip(figures.simulated_live) {
        part.row(name, [ns, ns.map(|ns| 1e6 / ns), ns.map(|_| simulated / 1e3)]);
    }
    part.notes.push(match live.two_queues {
        Some(Spread { median, low, high }) => {
            format!("2 threads, 2 queues over 1: {median:.2} ({low:.2} to {high:.2}); the post has 1.33.")
        }
        None => "A dash: both threads never had a CPU each for a window.".into(),
    });
    part
}

fn steps(figures: &VqFigures) -> Part {
    let costs = &figures.costs;
    let mut part = Part {
        name: "steps",
        title: format!(
            "MEASURED on one thread: CPU of the steps, ns for each I/O in batches; 10th percentile of {} windows",
            figures.length.windows
        ),
        columns: [("ns_1", "1"), ("ns_4", "4"), ("ns_16", "16"), ("ns_64", "64"), ("ns_128", "128")]
            .map(|(key, head)| column(key, head, 1))
            .into(),
        drawn: Drawn { bar: "ns_64", deviation: "", post: "" },
        ..Part::default()
    };
    let steps = &costs.steps;
    let copy = |n| steps.turn.at(n) - steps.turn_null.at(n);
    let rows: [(&str, &dyn Fn(usize) -> f64); 5] = [
        ("job: fill", &|n| steps.fill.at(n)),
        ("driver: submit, decide on the kick", &|n| steps.submit.at(n)),
        ("device: fetch, parse, answer", &|n| steps.turn_null.at(n)),
        ("device: copy", &copy),
        ("driver: reap", &|n| steps.reap.at(n)),
    ];
    for (name, cost) in rows {
        part.row(name, [1, 4, 16, 64, 128].map(|batch| Some(cost(batch) / batch as f64)));
    }
    let known = |ns: Option<f64>| ns.map_or("unknown with one CPU".into(), |ns| format!("{ns:.0} ns more"));
    part.notes = vec![
        format!("A lock from another CPU: {}. Mail: {:.0} ns an I/O.", known(costs.hand_over_ns), costs.mail_ns),
        format!(
            "Fitted: driver and device on two CPUs (lines_ns), {} an I/O on both sides, so that one job on one queue takes its \
             measured time.",
            known(costs.lines_ns)
        ),
        format!(
            "A kick of a sleeper takes {:.0} ns, and is in no simulated figure: both sides poll.",
            costs.ring.total_ns()
        ),
    ];
    part
}

/// A table for each back-end, and its ratios.
fn served(figures: &VqFigures) -> Vec<Part> {
    let windows = figures.length.served;
    let mut parts = Vec::new();
    for BackendTable { back_end, found } in &figures.served {
        let title = format!(
            "REAL TIME, in processes on {} CPUs: our driver over vhost-user at {}; KIOPS, median of {} windows of {} ms (10th, 90th \
             percentile)",
            cpu_places().len(),
            back_end.name(),
            windows.count,
            windows.window_ms
        );
        let medians = by_queues(["kiops_1", "kiops_2", "kiops_4"], ["1 queue", "2 queues", "4 queues"], 0);
        let mut columns = Vec::new();
        for (median, [low, high]) in medians.zip([["low_1", "high_1"], ["low_2", "high_2"], ["low_4", "high_4"]]) {
            columns.extend([median, column(low, "10th", 0), column(high, "90th", 0)]);
        }
        let mut part = Part { name: "served", title, columns, ..Part::default() };
        part.drawn = Drawn { bar: "kiops_2", deviation: "", post: "" };
        match found {
            Found::Measured(measured) => {
                for (jobs, of_jobs) in COUNTS.into_iter().zip(measured.iops) {
                    let cells = of_jobs.map(|Spread { median, low, high }| [median, low, high].map(|n| Some(n / 1e3)));
                    part.row(format!("{jobs} jobs"), cells.into_iter().flatten());
                }
                for ((what, post), Spread { median, low, high }) in POST.into_iter().zip(measured.ratios) {
                    part.notes.push(format!("{what}: post {post:.2}, here {median:.2} ({low:.2} to {high:.2})"));
                }
            }
            Found::NotMeasured(why) => {
                part.columns.clear();
                part.notes.push(format!("NOT MEASURED: {why}"));
            }
        }
        parts.push(part);
    }
    parts
}
