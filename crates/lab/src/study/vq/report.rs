//! The report, as text and JSON. Pure formatting.

use std::fmt::Write;

use blkyard_os::cpu_places;
use serde::Serialize;

use super::rig::DEPTH;
use super::served::{BackendTable, Found, MeasuredBackend, ServedWindows, Spread};
use super::verdicts::{claims, goals, iops, ratios};
use super::world::{Devices, VqScene, play};
use super::{COUNTS, POST, VqCosts, VqLength, VqPoint};
use crate::bench::count;
use crate::study::costs::BATCHES;
use crate::study::goals::{Goal, GoalVerdict, PostClaim};

/// Everything.
#[derive(Debug)]
pub(crate) struct VqReport {
    length: VqLength,
    seed: u64,
    costs: VqCosts,
    pub(super) grid: Vec<VqPoint>,
    pub(super) cpus: Vec<VqPoint>,
    served: Vec<BackendTable>,
    goals: Vec<Goal>,
    claims: Vec<PostClaim>,
}

impl Devices {
    pub(super) fn name(self) -> &'static str {
        match self {
            Devices::One => "one device thread",
            Devices::Each => "a thread per queue",
            Devices::Jobs => "run to completion",
        }
    }
}

impl VqReport {
    pub(super) fn new(
        length: VqLength,
        seed: u64,
        costs: VqCosts,
        grid: Vec<VqPoint>,
        cpus: Vec<VqPoint>,
        served: Vec<BackendTable>,
    ) -> VqReport {
        let cpus_here = cpu_places().len();
        let goals = goals(&grid, &costs.live, &served, cpus_here);
        let claims = claims(&grid, &served, cpus_here);
        VqReport { length, seed, costs, grid, cpus, served, goals, claims }
    }

    /// Verdicts of all goals.
    pub(crate) fn verdicts(&self) -> impl Iterator<Item = GoalVerdict> {
        self.goals.iter().map(|goal| goal.verdict)
    }

    /// The tables.
    pub(crate) fn text(&self) -> String {
        let mut out = format!(
            "study multi-vq: 4 KiB random reads from memory, depth {DEPTH} a job, split rings, driver and device ours; seed {}\n\n",
            self.seed
        );
        self.steps(&mut out);
        self.grid(&mut out);
        self.by_cpus(&mut out);
        self.live(&mut out);
        self.served(&mut out);
        let _ = writeln!(out, "\nclaims of the post");
        for PostClaim { what, found, reproduced, reason } in &self.claims {
            let verdict = if *reproduced { "reproduced".into() } else { format!("not reproduced: {reason}") };
            let _ = writeln!(out, "  {what}: {found}; {verdict}");
        }
        let _ = writeln!(out, "\ngoals");
        for Goal { what, value, limit, at, verdict } in &self.goals {
            let verdict = verdict.word();
            let _ = writeln!(out, "  {verdict:6}  {what}: {value:.2} (goal {limit}), {at}");
        }
        out
    }

    fn steps(&self, out: &mut String) {
        let VqCosts { steps, mail_ns, hand_over_ns, lines_ns, ring, .. } = &self.costs;
        let shown = [1, 4, 16, 64, 128];
        let _ = writeln!(
            out,
            "CPU of the steps, ns for each I/O, measured on this machine on one thread: 10th percentile of {} windows\n  {:36}{:>8}{:>8}{:>8}{:>8}{:>8}",
            self.length.windows, "in batches of", 1, 4, 16, 64, 128
        );
        let copy = |n| steps.turn.at(n) - steps.turn_null.at(n);
        let rows: [(&str, &dyn Fn(usize) -> f64); 5] = [
            ("job: fill", &|n| steps.fill.at(n)),
            ("driver: submit, decide on the kick", &|n| steps.submit.at(n)),
            ("device: fetch, parse, answer", &|n| steps.turn_null.at(n)),
            ("device: copy", &copy),
            ("driver: reap", &|n| steps.reap.at(n)),
        ];
        for (name, cost) in rows {
            let _ = write!(out, "  {name:36}");
            for batch in shown {
                let _ = write!(out, "{:8.1}", cost(batch) / batch as f64);
            }
            let _ = writeln!(out);
        }
        let known = |ns: Option<f64>| ns.map_or("unknown: one CPU".into(), |ns| format!("{ns:.0} more"));
        let _ = writeln!(
            out,
            "  lock from another CPU {}, driver and device on two CPUs {} an I/O on both sides, mail an I/O {mail_ns:.0}\n  \
             (to kick one who sleeps takes {:.0}, and is in none of what follows: both sides look all the time)\n",
            known(*hand_over_ns),
            known(*lines_ns),
            ring.total_ns()
        );
    }

    fn grid(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "SIMULATED: a CPU for each thread; KIOPS, and the jobs' time spent waiting for a queue's lock\n  {:20}{:>6}{:>18}{:>18}{:>18}",
            "", "jobs", "1 queue", "2 queues", "4 queues"
        );
        for devices in [Devices::One, Devices::Each] {
            for jobs in COUNTS {
                let _ = write!(out, "  {:20}{jobs:>6}", if jobs == 1 { devices.name() } else { "" });
                for queues in COUNTS {
                    let wanted = VqScene { jobs, queues, devices };
                    if let Some(VqPoint { outcome, .. }) = self.grid.iter().find(|point| point.scene == wanted) {
                        let _ = write!(out, "{:>11.0}{:6.0}%", outcome.iops / 1e3, outcome.waiting * 100.0);
                    }
                }
                let _ = writeln!(out);
            }
        }
        let _ = writeln!(
            out,
            "\n  {:28}{:>12}{:>22}{:>22}",
            "ratios of IOPS", "post", "one device thread", "a thread per queue"
        );
        let [one, each] = [Devices::One, Devices::Each].map(|devices| ratios(&self.grid, devices));
        for (place, (what, post)) in POST.into_iter().enumerate() {
            let _ = writeln!(out, "  {what:28}{post:12.2}{:22.2}{:22.2}", one[place], each[place]);
        }
    }

    fn by_cpus(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "\nSIMULATED: so many CPUs, used in four ways (memory's bandwidth is not in it: nothing but locks and threads ends the scaling)\n  \
             {:8}{:>40}{:>10}{:>8}{:>9}",
            "CPUs", "", "KIOPS", "times", "waiting"
        );
        for VqPoint { scene, cpus, outcome } in &self.cpus {
            let VqScene { jobs, queues, devices } = *scene;
            let first = self.cpus.iter().find(|point| point.scene.devices == devices && point.scene.queues == 1);
            let times = first.map_or(f64::NAN, |first| outcome.iops / first.outcome.iops);
            let way = format!("{jobs} jobs, {queues} queues, {}", devices.name());
            let _ = writeln!(
                out,
                "  {cpus:<8}{way:>40}{:>10.0}{times:>8.2}{:>8.0}%",
                outcome.iops / 1e3,
                outcome.waiting * 100.0
            );
        }
    }

    fn live(&self, out: &mut String) {
        let live = &self.costs.live;
        let _ = writeln!(
            out,
            "\nREAL TIME on this machine, windows in turn; beside it what virtual time makes of the same\n  {:52}{:>10}{:>10}{:>10}",
            "", "ns an I/O", "IOPS", "simulated"
        );
        let alone = VqScene { jobs: 1, queues: 1, devices: Devices::Jobs };
        let rows = [
            ("run to completion, 1 thread, 1 queue", Some(live.alone_ns), alone),
            ("run to completion, 2 threads, 1 queue", live.shared_ns, VqScene { jobs: 2, ..alone }),
            ("run to completion, 2 threads, 2 queues", live.own_ns, VqScene { jobs: 2, queues: 2, ..alone }),
            (
                "driver and device apart, 1 queue (sets the model)",
                live.apart_ns,
                VqScene { devices: Devices::Each, ..alone },
            ),
        ];
        for (name, ns, scene) in rows {
            match ns {
                Some(ns) => {
                    let simulated = play(scene, self.costs.prices(), self.length.ios).map_or(f64::NAN, |it| it.iops);
                    let _ = writeln!(out, "  {name:52}{ns:10.1}{:>10}{:>10}", count(1e9 / ns), count(simulated));
                }
                None => {
                    let _ = writeln!(
                        out,
                        "  {name:52}not measured: both threads never had their CPUs to themselves for a window"
                    );
                }
            }
        }
        if let Some(times) = live.two_queues() {
            let _ = writeln!(out, "  {:52}{times:10.2}{:>10}", "2 threads: 2 queues over 1 (post: 1.33)", "");
        }
    }

    fn served(&self, out: &mut String) {
        let windows = self.length.served;
        let _ = writeln!(
            out,
            "\nREAL TIME, IN PROCESSES on {} CPUs: our driver over vhost-user, the back-end a process of its own, both as they are by default;\n\
             KIOPS, median of {} windows of {} ms in turn (10th to 90th percentile)",
            cpu_places().len(),
            windows.count,
            windows.window_ms
        );
        for BackendTable { back_end, found } in &self.served {
            let Found::Measured(measured) = found else { continue };
            let MeasuredBackend { iops, ratios } = &**measured;
            let _ = writeln!(
                out,
                "  {:38}{:>6}{:>24}{:>24}{:>24}",
                back_end.name(),
                "jobs",
                "1 queue",
                "2 queues",
                "4 queues"
            );
            for (jobs, of_jobs) in COUNTS.into_iter().zip(iops) {
                let cells = of_jobs.map(|spread| thousands(&spread)).concat();
                let _ = writeln!(out, "  {:38}{jobs:>6}{cells}", "");
            }
            for ((what, post), Spread { median, low, high }) in POST.into_iter().zip(ratios) {
                let _ = writeln!(out, "    {what:30} post {post:.2}, here {median:.2} ({low:.2} to {high:.2})");
            }
        }
        for BackendTable { found, .. } in &self.served {
            if let Found::NotMeasured(why) = found {
                let _ = writeln!(out, "  NOT MEASURED: {why}");
            }
        }
    }

    /// The same, for programs.
    pub(crate) fn json(&self) -> String {
        let VqReport { length, seed, costs, grid, cpus, served, goals, claims } = self;
        let post = POST.map(|(what, ratio)| VqPost { what, ratio });
        let [one, each] = [Devices::One, Devices::Each].map(|devices| ratios(grid, devices));
        let whole = VqJson {
            study: "multi-vq",
            depth: DEPTH,
            windows: length.windows,
            ios: length.ios,
            seed: *seed,
            batches: &BATCHES,
            costs,
            simulated_grid: grid,
            simulated_cpus: cpus,
            served_windows: length.served,
            served,
            post,
            ratios_one_device_thread: one,
            ratios_thread_per_queue: each,
            claims,
            goals,
        };
        serde_json::to_string_pretty(&whole).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
    }

    /// IOPS over those of one job and one queue with the same devices.
    pub(super) fn times(&self, jobs: usize, queues: usize, devices: Devices) -> f64 {
        iops(&self.grid, jobs, queues, devices) / iops(&self.grid, 1, 1, devices)
    }
}

fn thousands(spread: &Spread) -> String {
    let Spread { median, low, high } = spread;
    format!("{:>24}", format!("{:.0} ({:.0} to {:.0})", median / 1e3, low / 1e3, high / 1e3))
}

#[derive(Serialize)]
struct VqJson<'a> {
    study: &'static str,
    depth: usize,
    windows: usize,
    ios: u64,
    seed: u64,
    /// The sizes of batch that the curves in `costs` are of.
    batches: &'a [usize],
    /// Measurements in real time.
    costs: &'a VqCosts,
    simulated_grid: &'a [VqPoint],
    simulated_cpus: &'a [VqPoint],
    served_windows: ServedWindows,
    /// In separate processes, in real time.
    served: &'a [BackendTable],
    post: [VqPost; 3],
    /// In the post's order.
    ratios_one_device_thread: [f64; 3],
    ratios_thread_per_queue: [f64; 3],
    claims: &'a [PostClaim],
    goals: &'a [Goal],
}

#[derive(Serialize)]
struct VqPost {
    what: &'static str,
    ratio: f64,
}
