//! Tables of `mq-vs-bio`: the grid, and the steps with their costs and instructions.

use std::fmt::Write;

use super::costs::{BATCHES, Costs, ModeCosts};
use super::grid::{GridRow, Ratios};
use super::meter::StudyResult;
use super::parts::wrapped;
use super::post::PostCell;
use super::step_instructions::{COUNTED_BATCHES, StepInstruction, StepInstructions};
use crate::bench::count;

/// The grid: the post's figures and ours.
pub(super) fn grid(out: &mut String, rows: &[GridRow]) {
    let _ = writeln!(
        out,
        "{:10}{:16}{:>8}  {:>21}  {:>40}\n{:10}{:16}{:>8}  {:>7}{:>7}{:>7}  {:>10}{:>10}{:>10}{:>10}",
        "",
        "",
        "",
        "CPU, ns/io",
        "latency, us",
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
    for row in rows {
        let post = |cell: PostCell| posted(cell, row.post.jobs);
        let modes = [
            ("bio, post", Some(post(row.post.bio))),
            ("bio", Some(row.bio)),
            ("bio, no tick", Some(row.bio_untimed)),
            ("bio, one lock", row.bio_one_lock),
            ("mq, post", Some(post(row.post.mq))),
            ("mq", Some(row.mq)),
            ("single", Some(row.single)),
            ("single, unfair", row.unfair),
        ];
        let mut name = format!("{},{}", row.post.jobs, row.post.depth);
        for (mode, outcome) in modes.into_iter().filter_map(|(mode, outcome)| outcome.map(|outcome| (mode, outcome))) {
            let StudyResult { iops, user_ns, system_ns, min_us, max_us, mean_us, stdev_us, .. } = outcome;
            let _ = writeln!(
                out,
                "{:10}{mode:16}{:>8}  {user_ns:7.0}{system_ns:7.0}{:7.0}  {min_us:10.2}{max_us:10.2}{mean_us:10.2}{stdev_us:10.2}",
                std::mem::take(&mut name),
                count(iops),
                outcome.cpu_ns()
            );
        }
        for (name, Ratios { iops, cpu, max, stdev }) in [("mq/bio, post", row.post_ratios()), ("mq/bio", row.ratios())]
        {
            let _ = writeln!(out, "{:10}{name:16}{iops:8.3}  {cpu:21.2}  {max:20.2}{stdev:20.2}", "");
        }
    }
}

/// A cell of the post's as a result: CPU time for each I/O follows from its percentages and IOPS.
pub(super) fn posted(cell: PostCell, jobs: usize) -> StudyResult {
    let PostCell { iops, min_us, max_us, mean_us, stdev_us, .. } = cell;
    let (user_ns, system_ns) = (cell.user_ns(jobs), cell.system_ns(jobs));
    StudyResult { iops, user_ns, system_ns, min_us, max_us, mean_us, stdev_us, ..StudyResult::default() }
}

/// Costs of the steps.
pub(super) fn steps(out: &mut String, costs: &Costs, measurements: usize) {
    let Costs { bio, single, mq, mail_ns, sleep, ring, hand_over_ns, windows, load } = costs;
    let load = load.map_or("unknown".into(), |load| format!("{load:.1}"));
    wrapped(
        out,
        "",
        2,
        &format!(
            "CPU of the steps, ns for each I/O, measured on this machine: median of {measurements} measurements, each the \
             10th percentile of {windows} windows; load average before each at most {load}, to which the \
             study adds up to 1: other load raises the costs, and the range of the runs does not show it"
        ),
    );
    let shown = [1, 4, 16, 64, 128];
    let _ = write!(out, "  {:42}", "in batches of");
    shown.iter().for_each(|batch| {
        let _ = write!(out, "{batch:>8}");
    });
    out.push('\n');
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
            let _ = write!(out, "  {:42}", format!("{name}: {step}"));
            for (place, batch) in BATCHES.into_iter().enumerate().filter(|(_, batch)| shown.contains(batch)) {
                let _ = write!(out, "{:8.1}", curve.0[place] / batch as f64);
            }
            out.push('\n');
        }
    }
    wrapped(
        out,
        "  ",
        2,
        &format!(
            "sleep and be woken {:.0}, signal a sleeper's eventfd {:.0} (both system), hand a bio to another thread \
             {mail_ns:.0}, lock from another CPU {}",
            sleep.total_ns(),
            ring.total_ns(),
            hand_over_ns.map_or("unknown: one CPU".into(), |ns| format!("{ns:.0} more"))
        ),
    );
}

/// Instructions of the steps.
pub(super) fn instructions(out: &mut String, counted: &Result<StepInstructions, String>) {
    let counted = match counted {
        Ok(StepInstructions(counted)) => counted,
        Err(why) => return wrapped(out, "", 2, &format!("instructions of the steps: not counted, {why}")),
    };
    let _ = writeln!(out, "instructions of the steps for each I/O, counted by valgrind; independent of other load");
    let _ = write!(out, "  {:42}", "in batches of");
    COUNTED_BATCHES.iter().for_each(|batch| {
        let _ = write!(out, "{batch:>8}");
    });
    out.push('\n');
    for steps in counted.chunk_by(|one, next| (one.mode, one.within) == (next.mode, next.within)) {
        let StepInstruction { mode, within, .. } = steps[0];
        let ids = if within { "" } else { ", fewer ids than bios" };
        let mut line = |what: &str, value: fn(&StepInstruction) -> Option<f64>| {
            if steps.iter().all(|step| value(step).is_some()) {
                let _ = write!(out, "  {:42}", format!("{mode}: {what}{ids}"));
                steps.iter().filter_map(value).for_each(|value| {
                    let _ = write!(out, "{value:8.1}");
                });
                out.push('\n');
            }
        };
        line("collect", |step| Some(step.collect));
        line(if mode == "bio" && !within { "fill, list" } else { "fill, submit" }, |step| Some(step.submit));
        line("helper", |step| step.pass);
    }
}
