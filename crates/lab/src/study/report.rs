//! The report, as text and JSON. Pure formatting.

use std::fmt::Write;

use blkyard_sim::DeviceModel;
use serde::Serialize;

use super::costs::{BATCHES, Costs, ModeCosts};
use super::goals::{Goal, GoalVerdict, PostClaim, claims, goals};
use super::grid::{GridLength, GridRow, Ratios, TICK_NS};
use super::meter::StudyResult;
use super::post::PostCell;
use super::step_instructions::{COUNTED_BATCHES, StepInstruction, StepInstructions};
use super::world::CPUS;
use crate::bench::count;

/// Parts that are the product's code.
const REAL: &str =
    "queue core, NVMe driver, rings and doorbells in memory, the controller's fetch, parsing and completion";
/// Parts that are a model.
const MODELLED: &str = "service times of the device; CPUs, locks, sleep and wake-up, at costs measured on this machine";

/// Everything.
#[derive(Debug)]
pub(crate) struct StudyReport {
    pub(crate) model: DeviceModel,
    pub(crate) costs: Costs,
    /// Or why they were not counted.
    pub(crate) instructions: Result<StepInstructions, String>,
    pub(crate) length: GridLength,
    pub(crate) seed: u64,
    pub(crate) rows: Vec<GridRow>,
    pub(crate) goals: Vec<Goal>,
    pub(crate) claims: Vec<PostClaim>,
}

impl StudyReport {
    pub(crate) fn new(
        model: DeviceModel,
        costs: &Costs,
        instructions: Result<StepInstructions, String>,
        length: GridLength,
        seed: u64,
        rows: Vec<GridRow>,
    ) -> StudyReport {
        let (goals, claims) = (goals(&rows), claims(&rows));
        StudyReport { model, costs: costs.clone(), instructions, length, seed, rows, goals, claims }
    }

    /// Verdicts of all goals.
    pub(crate) fn verdicts(&self) -> impl Iterator<Item = GoalVerdict> {
        self.goals.iter().map(|goal| goal.verdict)
    }

    /// The tables.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let StudyReport { model, length, seed, .. } = self;
        let _ = writeln!(
            out,
            "study mq-vs-bio: 4 KiB random writes, a queue for each job (single: one for all), {CPUS} CPUs, virtual time\n\
             device: {:.2} us one by one, then {:.2} us together (stdev {:.2}); rings of {} ({})\n\
             real: {REAL}\n\
             model: {MODELLED}\n\
             length: {} I/Os a point, or each place {} times if that is more; seed {seed}\n",
            us(model.serial_ns),
            us(model.parallel_ns),
            us(model.jitter_ns),
            model.ring_entries,
            model.source,
            length.ios,
            length.rounds
        );
        self.steps(&mut out);
        self.instructions(&mut out);
        self.grid(&mut out);
        let _ = writeln!(out, "\nclaims of the post");
        for PostClaim { what, found, reproduced, reason } in &self.claims {
            let verdict = if *reproduced { "reproduced".into() } else { format!("not reproduced: {reason}") };
            let _ = writeln!(out, "  {what}: {found}; {verdict}");
        }
        let _ = writeln!(out, "\ngoals (against bio with or without its tick, whichever is harder)");
        for Goal { what, value, limit, at, verdict } in &self.goals {
            let verdict = verdict.word();
            let _ = writeln!(out, "  {verdict:6}  {what}: {value:.3} (goal {limit}), the worst at {at}");
        }
        out
    }

    fn steps(&self, out: &mut String) {
        let Costs { bio, single, mq, mail_ns, sleep, ring, hand_over_ns, windows } = &self.costs;
        let _ = writeln!(
            out,
            "CPU of the steps, ns for each I/O, measured on this machine: 10th percentile of {windows} windows\n  \
             {:34}{:>8}{:>8}{:>8}{:>8}{:>8}",
            "in batches of", 1, 4, 16, 64, 128
        );
        let modes = [("bio", bio), ("single", single), ("mq", mq)];
        for (name, ModeCosts { within, beyond }) in modes {
            let mut curves = vec![
                ("collect", within.collect),
                ("fill, submit", within.submit),
                ("collect, fewer ids than bios", beyond.collect),
            ];
            if name == "bio" {
                curves.push(("fill, put on the list", beyond.list));
                curves.push(("helper: take from the list", beyond.pass));
            } else {
                curves.push(("fill, submit, fewer ids than bios", beyond.submit));
            }
            for (step, curve) in curves {
                let _ = write!(out, "  {:34}", format!("{name}: {step}"));
                for (place, batch) in BATCHES.into_iter().enumerate() {
                    if [1, 4, 16, 64, 128].contains(&batch) {
                        let _ = write!(out, "{:8.1}", curve.0[place] / batch as f64);
                    }
                }
                let _ = writeln!(out);
            }
        }
        let _ = writeln!(
            out,
            "  sleep and be woken {:.0}, signal a sleeper's eventfd {:.0} (both system), hand a bio to another thread {mail_ns:.0}, lock from another CPU {}\n",
            sleep.total_ns(),
            ring.total_ns(),
            hand_over_ns.map_or("unknown: one CPU".into(), |ns| format!("{ns:.0} more"))
        );
    }

    fn instructions(&self, out: &mut String) {
        let counted = match &self.instructions {
            Ok(StepInstructions(counted)) => counted,
            Err(why) => {
                let _ = writeln!(out, "instructions of the steps: not counted, {why}\n");
                return;
            }
        };
        let _ = writeln!(
            out,
            "instructions of the steps for each I/O, counted by valgrind; independent of other load\n  {:34}{:>8}{:>8}{:>8}",
            "in batches of", COUNTED_BATCHES[0], COUNTED_BATCHES[1], COUNTED_BATCHES[2]
        );
        for steps in counted.chunk_by(|one, next| (one.mode, one.within) == (next.mode, next.within)) {
            let StepInstruction { mode, within, .. } = steps[0];
            let ids = if within { "" } else { ", fewer ids than bios" };
            let mut line = |what: &str, value: fn(&StepInstruction) -> Option<f64>| {
                if steps.iter().all(|step| value(step).is_some()) {
                    let _ = write!(out, "  {:34}", format!("{mode}: {what}{ids}"));
                    steps.iter().filter_map(value).for_each(|value| {
                        let _ = write!(out, "{value:8.1}");
                    });
                    let _ = writeln!(out);
                }
            };
            line("collect", |step| Some(step.collect));
            line(if mode == "bio" && !within { "fill, list" } else { "fill, submit" }, |step| Some(step.submit));
            line("helper", |step| step.pass);
        }
        let _ = writeln!(out);
    }

    fn grid(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "{:11}{:16}{:>8}  {:>18}  {:>40}\n{:11}{:16}{:>8}  {:>6}{:>6}{:>6}  {:>10}{:>10}{:>10}{:>10}",
            "",
            "",
            "",
            "CPU ns/io",
            "lat (usec)",
            "jobs,depth",
            "",
            "IOPS",
            "usr",
            "sys",
            "all",
            "min",
            "max",
            "avg",
            "stdev"
        );
        for row in &self.rows {
            let mut name = format!("{},{}", row.post.jobs, row.post.depth);
            let modes = [("bio", row.bio), ("bio, no tick", row.bio_untimed), ("single", row.single), ("mq", row.mq)];
            for (mode, outcome) in modes {
                let StudyResult { iops, user_ns, system_ns, min_us, max_us, mean_us, stdev_us, .. } = outcome;
                let _ = writeln!(
                    out,
                    "{:11}{mode:16}{:>8}  {user_ns:6.0}{system_ns:6.0}{:6.0}  {min_us:10.2}{max_us:10.2}{mean_us:10.2}{stdev_us:10.2}",
                    std::mem::take(&mut name),
                    count(iops),
                    outcome.cpu_ns()
                );
            }
            for (name, Ratios { iops, cpu, max, stdev }) in
                [("mq/bio", row.ratios()), ("mq/bio, post", row.post_ratios())]
            {
                let _ = writeln!(
                    out,
                    "{:11}{name:16}{iops:8.3}  {:12}{cpu:6.2}  {:10}{max:10.2}{:10}{stdev:10.2}",
                    "", "", "", ""
                );
            }
        }
    }

    /// The same, for programs.
    pub(crate) fn json(&self) -> String {
        let StudyReport { model, costs, instructions, length, seed, rows, goals, claims } = self;
        let whole = StudyJson {
            study: "mq-vs-bio",
            real: REAL,
            modelled: MODELLED,
            model: ModelReport {
                source: model.source,
                serial_ns: model.serial_ns,
                parallel_ns: model.parallel_ns,
                jitter_ns: model.jitter_ns,
                ring_entries: model.ring_entries,
                cpus: CPUS,
                tick_ns: TICK_NS,
            },
            ios_min: length.ios,
            rounds_min: length.rounds,
            seed: *seed,
            batches: &BATCHES,
            costs,
            instructions: instructions.as_ref().ok(),
            not_counted: instructions.as_ref().err(),
            rows: rows.iter().map(JsonRow::of).collect(),
            claims,
            goals,
        };
        serde_json::to_string_pretty(&whole).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

#[derive(Serialize)]
struct StudyJson<'a> {
    study: &'static str,
    /// Parts that are the product's code.
    real: &'static str,
    /// Parts that are a model.
    modelled: &'static str,
    model: ModelReport,
    ios_min: u64,
    rounds_min: u64,
    seed: u64,
    /// The sizes of batch that the curves in `costs` are of.
    batches: &'a [usize],
    costs: &'a Costs,
    instructions: Option<&'a StepInstructions>,
    /// Why there are no counts of instructions.
    not_counted: Option<&'a String>,
    rows: Vec<JsonRow>,
    claims: &'a [PostClaim],
    goals: &'a [Goal],
}

#[derive(Serialize)]
struct ModelReport {
    source: &'static str,
    serial_ns: u64,
    parallel_ns: u64,
    jitter_ns: u64,
    ring_entries: usize,
    cpus: usize,
    tick_ns: u64,
}

#[derive(Serialize)]
struct JsonRow {
    jobs: usize,
    depth: usize,
    bio: StudyResult,
    bio_no_tick: StudyResult,
    single: StudyResult,
    mq: StudyResult,
    ratios: Ratios,
    post_mq: PublishedCell,
    post_bio: PublishedCell,
    post_ratios: Ratios,
}

impl JsonRow {
    fn of(row: &GridRow) -> JsonRow {
        JsonRow {
            jobs: row.post.jobs,
            depth: row.post.depth,
            bio: row.bio,
            bio_no_tick: row.bio_untimed,
            single: row.single,
            mq: row.mq,
            ratios: row.ratios(),
            post_mq: PublishedCell::of(&row.post.mq, row.post.jobs),
            post_bio: PublishedCell::of(&row.post.bio, row.post.jobs),
            post_ratios: row.post_ratios(),
        }
    }
}

/// A cell of the post's, in the words of an [`StudyResult`].
#[derive(Serialize)]
struct PublishedCell {
    iops: f64,
    user_ns: f64,
    system_ns: f64,
    min_us: f64,
    max_us: f64,
    mean_us: f64,
    stdev_us: f64,
}

impl PublishedCell {
    fn of(cell: &PostCell, jobs: usize) -> PublishedCell {
        let ns = |percent: f64| percent / (cell.user_percent + cell.system_percent) * cell.cpu_ns(jobs);
        let PostCell { iops, min_us, max_us, mean_us, stdev_us, .. } = *cell;
        PublishedCell {
            iops,
            user_ns: ns(cell.user_percent),
            system_ns: ns(cell.system_percent),
            min_us,
            max_us,
            mean_us,
            stdev_us,
        }
    }
}
