//! The report, as text and JSON. Pure formatting.

use std::fmt::Write;

use blkyard_sim::DeviceModel;
use serde::Serialize;

use super::costs::{BATCHES, Costs};
use super::goals::{Goal, GoalVerdict};
use super::grid::{GridLength, GridRow, Ratios, TICK_NS};
use super::grid_claims::{GridClaim, claims};
use super::grid_goals::goals;
use super::judge::GridRuns;
use super::meter::StudyResult;
use super::parts::{figure, wrapped};
use super::post::{POST_NAME, PostCell};
use super::step_instructions::StepInstructions;
use super::tables;
use super::world::CPUS;

/// Parts that are the product's code.
const REAL: &str =
    "queue core, NVMe driver, rings and doorbells in memory, the controller's fetch, parsing and completion";
/// Parts that are a model.
const MODELLED: &str = "service times of the device; CPUs, locks, sleep and wake-up, at costs measured on this machine";

/// Names in the table.
const MODES: &str = "bio: bios taken by the driver, a lock and ids for each job's queue, a helper for all. no tick: its helper only \
                     wakes when called. one lock: one queue for all jobs. mq: the core, a queue for each job. single: the core, one \
                     queue for all. unfair: the same with tags passed on at random. CPU of the post: its percentages of a CPU, for \
                     each job, over its IOPS.";

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
    pub(crate) claims: Vec<GridClaim>,
    /// The grid again, once with each measurement of the costs.
    pub(crate) repeats: Vec<Vec<GridRow>>,
}

impl StudyReport {
    pub(crate) fn new(
        model: DeviceModel,
        costs: &Costs,
        instructions: Result<StepInstructions, String>,
        length: GridLength,
        seed: u64,
        rows: Vec<GridRow>,
        repeats: Vec<Vec<GridRow>>,
    ) -> StudyReport {
        let runs = GridRuns { main: &rows, repeats: &repeats };
        let ceiling_iops = 1e9 / model.serial_ns as f64;
        let (goals, claims) = (goals(runs, ceiling_iops), claims(runs, ceiling_iops));
        StudyReport { model, costs: costs.clone(), instructions, length, seed, rows, goals, claims, repeats }
    }

    /// Verdicts of all goals.
    pub(crate) fn verdicts(&self) -> impl Iterator<Item = GoalVerdict> {
        self.goals.iter().map(|goal| goal.verdict)
    }

    /// Goals, the post's claims, then the tables.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let StudyReport { model, length, seed, repeats, .. } = self;
        wrapped(
            &mut out,
            "",
            2,
            &format!(
                "study mq-vs-bio: 4 KiB random writes on {CPUS} CPUs, one queue for each job, virtual time; seed {seed}"
            ),
        );
        wrapped(&mut out, "", 2, &format!("post: {POST_NAME}"));
        wrapped(&mut out, "real: ", 6, REAL);
        wrapped(&mut out, "model: ", 7, MODELLED);
        let [serial_us, parallel_us, jitter_us] = [model.serial_ns, model.parallel_ns, model.jitter_ns].map(us);
        wrapped(
            &mut out,
            "device: ",
            8,
            &format!(
                "{serial_us:.2} us one by one, then {parallel_us:.2} us together (stdev {jitter_us:.2}); rings of {} ({})",
                model.ring_entries, model.source
            ),
        );
        let GridLength { ios, rounds } = length;
        let repeated = length.of_a_repeat();
        wrapped(
            &mut out,
            "length: ",
            8,
            &format!(
                "{ios} I/Os a point, or each place {rounds} times if that is more; {} repeats of {} I/Os or {} times, each with a                  measurement of the costs and a seed of its own",
                repeats.len(),
                repeated.ios,
                repeated.rounds
            ),
        );
        self.write_verdicts(&mut out);
        wrapped(&mut out, "\n", 2, MODES);
        tables::grid(&mut out, &self.rows);
        out.push('\n');
        tables::steps(&mut out, &self.costs, repeats.len());
        out.push('\n');
        tables::instructions(&mut out, &self.instructions);
        out
    }

    fn write_verdicts(&self, out: &mut String) {
        let count = |verdict| self.verdicts().filter(|one| *one == verdict).count();
        let counts = [GoalVerdict::Met, GoalVerdict::Missed, GoalVerdict::Undecided, GoalVerdict::ByConstruction]
            .map(|verdict| format!("{} {}", count(verdict), verdict.word().to_lowercase()));
        let _ = writeln!(out, "\ngoals: {}", counts.join(", "));
        for Goal { what, value, limit, at, verdict } in &self.goals {
            let first = format!("  {:17}", verdict.word());
            let (value, limit) = (figure(*value, 3), figure(*limit, 3));
            wrapped(out, &first, first.len(), &format!("{what}: {value} (goal {limit}), {at}"));
        }
        let _ = writeln!(out, "\nclaims of the post and its analysis");
        for GridClaim { what, post, found, verdict, reason } in &self.claims {
            let first = format!("  {:17}", verdict.word());
            let reason = if reason.is_empty() { String::new() } else { format!("; {reason}") };
            wrapped(out, &first, first.len(), &format!("{what}: {found} (post {post}){reason}"));
        }
    }

    /// The same, for programs.
    pub(crate) fn json(&self) -> String {
        let StudyReport { model, costs, instructions, length, seed, rows, goals, claims, repeats } = self;
        let whole = StudyJson {
            study: "mq-vs-bio",
            post: POST_NAME,
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
            repeated_ratios: repeats.iter().map(|rows| rows.iter().map(GridRow::ratios).collect()).collect(),
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
    post: &'static str,
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
    /// Ratios of each row, for each repeat.
    repeated_ratios: Vec<Vec<Ratios>>,
    claims: &'a [GridClaim],
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
    bio_one_lock: Option<StudyResult>,
    unfair: Option<StudyResult>,
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
            bio_one_lock: row.bio_one_lock,
            unfair: row.unfair,
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
        let PostCell { iops, min_us, max_us, mean_us, stdev_us, .. } = *cell;
        PublishedCell {
            iops,
            user_ns: cell.user_ns(jobs),
            system_ns: cell.system_ns(jobs),
            min_us,
            max_us,
            mean_us,
            stdev_us,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::grid::tests::example_rows;
    use crate::study::step_instructions::StepInstruction;

    fn report(instructions: Result<StepInstructions, String>) -> StudyReport {
        let rows = example_rows();
        let length = GridLength { ios: 200_000, rounds: 25 };
        let repeats = vec![rows.clone(); 6];
        StudyReport::new(DeviceModel::NVME_2013, &Costs::example(), instructions, length, u64::MAX, rows, repeats)
    }

    fn counted() -> StepInstructions {
        let step =
            |within, batch| StepInstruction { mode: "single", within, batch, collect: 1e4, submit: 1e4, pass: None };
        StepInstructions(
            [true, false].into_iter().flat_map(|within| [1, 16, 128].map(|batch| step(within, batch))).collect(),
        )
    }

    #[test]
    fn no_line_has_more_than_110_columns_and_no_figure_is_nan() {
        for instructions in [Ok(counted()), Err("valgrind is not installed ".repeat(8))] {
            let mut report = report(instructions);
            let row = &mut report.rows[15];
            (row.mq.max_us, row.mq.iops, row.mq.system_ns) = (123_456.78, 999_949.0, 99_999.0);
            let text = report.text();
            for line in text.lines() {
                assert!(line.chars().count() <= 110, "{line}");
            }
            let is_figure = |word: &str| !["NaN", "inf"].contains(&word);
            assert!(text.split(|c: char| !c.is_alphanumeric()).all(is_figure), "{text}");
            assert!(!report.json().contains("NaN") && !super::super::svg::picture(&report).contains("NaN"));
        }
    }

    #[test]
    fn verdicts_come_before_tables_and_the_posts_figures_stand_beside_ours() {
        let text = report(Ok(counted())).text();
        let place = |word: &str| text.find(word).unwrap_or_else(|| panic!("no {word}: {text}"));
        let order =
            ["post: M. Bj", "\ngoals: ", "\nclaims of the post", "jobs,depth", "CPU of the steps", "instructions of"];
        assert!(order.map(place).is_sorted(), "{text}");
        // Row 1,1 of the post: 81.8 K, 9.76 and 21.12 %, latency 11, 111, 11.90, 0.46.
        let row = "mq, post           81.8k     1193   2582   3775       11.00    111.00     11.90      0.46";
        assert!(text.contains(row), "{text}");
    }
}
