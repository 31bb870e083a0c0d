//! Goals and claims, judged from the samples: within their noise both are undecided.

use serde::Serialize;

use super::interval::MedianInterval;
use super::mapping::{MODELS, MappingModel};
use super::{BATCHES, Bed, IoMemory, PremappedRow, PremappedRows, SIZES};

/// Least ratio of IOPS of a goal at 512 B, and a value that its interval excludes.
const SMALL_MIN: f64 = 1.00;
const SMALL_EXCLUDED: f64 = 0.99;
/// Largest ratio of submissions of any size to one of 512 B.
const FLAT_MAX: f64 = 1.10;
/// Largest share of CPU of large I/O.
const HALF: f64 = 0.5;

/// What became of a goal or a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PremappedVerdict {
    /// A goal is met, a claim reproduced.
    Yes,
    /// Neither.
    No,
    /// The interval has values of both kinds.
    Undecided,
    /// It follows from what the model was fitted to.
    BuiltIn,
    /// It cannot be shown here.
    NotShown,
    /// It is a figure of something that is not here.
    NotApplicable,
}

/// A goal.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PremappedGoal {
    pub(crate) what: String,
    pub(crate) goal: String,
    /// The worst value, and where.
    pub(crate) value: MedianInterval,
    pub(crate) at: String,
    /// The same by instructions, if they were counted.
    pub(crate) by_instructions: Option<f64>,
    pub(crate) verdict: PremappedVerdict,
}

/// A claim of the post or its follow-up.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PremappedClaim {
    pub(crate) what: String,
    pub(crate) found: String,
    pub(crate) verdict: PremappedVerdict,
    pub(crate) reason: String,
}

/// Ratio of two rows' figures, sample by sample, since samples alternate.
pub(crate) fn ratio(
    one: &PremappedRow,
    other: &PremappedRow,
    figure: impl Fn(&PremappedRow) -> Vec<f64>,
) -> MedianInterval {
    MedianInterval::of(figure(one).into_iter().zip(figure(other)).map(|(one, other)| one / other))
}

pub(crate) fn polled(row: &PremappedRow) -> Vec<f64> {
    row.samples.total_ns().collect()
}

fn submit(row: &PremappedRow) -> Vec<f64> {
    row.samples.submit_ns.clone()
}

/// Polled, with the charge of a model; only a mapping that is made once has none.
pub(crate) fn charged(model: MappingModel) -> impl Fn(&PremappedRow) -> Vec<f64> {
    move |row| {
        let charge_ns = if row.memory == IoMemory::Mapped { 0.0 } else { model.total_ns(row.bytes) };
        row.samples.total_ns().map(|ns| ns + charge_ns).collect()
    }
}

/// By interrupt, without a model of mapping.
pub(crate) fn interrupt(rows: &PremappedRows) -> impl Fn(&PremappedRow) -> Vec<f64> {
    let sleep_ns = rows.sleep.total_ns();
    move |row| row.samples.total_ns().map(|ns| ns + sleep_ns / row.batch.min(row.bed.depth()) as f64).collect()
}

fn instructions(row: &PremappedRow) -> Option<f64> {
    row.instructions.map(|[submit, complete]| submit + complete)
}

/// The goals of the study.
pub(crate) fn goals(rows: &PremappedRows) -> Vec<PremappedGoal> {
    let mut goals: Vec<_> = [IoMemory::Registered, IoMemory::Plain].map(|other| small(rows, other)).into();
    goals.push(flat(rows));
    goals.extend([64 << 10, 128 << 10].map(|bytes| large(rows, bytes)));
    goals
}

fn places() -> impl Iterator<Item = (Bed, usize)> {
    Bed::ALL.into_iter().flat_map(|bed| BATCHES.map(|batch| (bed, batch)))
}

fn at(bed: Bed, batch: usize) -> String {
    format!("{}, batches of {batch}", bed.name())
}

/// 512 B, mapped against another kind of memory.
fn small(rows: &PremappedRows, other: IoMemory) -> PremappedGoal {
    let found = places().map(|(bed, batch)| {
        let [other, mapped] = [other, IoMemory::Mapped].map(|memory| rows.get(bed, SIZES[0], batch, memory));
        let value = ratio(other, mapped, polled);
        let counted = instructions(other).zip(instructions(mapped)).map(|(other, mapped)| other / mapped);
        (at(bed, batch), value, counted, small_verdict(value))
    });
    worst(format!("512 B, polled: IOPS mapped/{}", other.name()), "at least 1.00, interval above 0.99", found, true)
}

fn small_verdict(value: MedianInterval) -> PremappedVerdict {
    if value.median >= SMALL_MIN && value.low > SMALL_EXCLUDED {
        PremappedVerdict::Yes
    } else if value.high < SMALL_MIN {
        PremappedVerdict::No
    } else {
        PremappedVerdict::Undecided
    }
}

/// Submission of a mapped buffer of any size against one of 512 B.
fn flat(rows: &PremappedRows) -> PremappedGoal {
    let sizes = places().flat_map(|(bed, batch)| SIZES[1..].iter().map(move |bytes| (bed, batch, *bytes)));
    let found = sizes.map(|(bed, batch, bytes)| {
        let [row, first] = [bytes, SIZES[0]].map(|bytes| rows.get(bed, bytes, batch, IoMemory::Mapped));
        let value = ratio(row, first, submit);
        let counted = row.instructions.zip(first.instructions).map(|(row, first)| row[0] / first[0]);
        (format!("{} B, {}", bytes, at(bed, batch)), value, counted, most(value, FLAT_MAX))
    });
    worst("submission, mapped: any size/512 B".into(), "at most 1.10 up to 1 MiB", found, false)
}

pub(crate) fn most(value: MedianInterval, limit: f64) -> PremappedVerdict {
    if value.high <= limit {
        PremappedVerdict::Yes
    } else if value.low > limit {
        PremappedVerdict::No
    } else {
        PremappedVerdict::Undecided
    }
}

/// CPU of large I/O with strict mapping. Where it is half without that, too, the model decides nothing.
fn large(rows: &PremappedRows, bytes: u32) -> PremappedGoal {
    let [_, _, strict] = MODELS;
    let found = places().map(|(bed, batch)| {
        let [registered, mapped] =
            [IoMemory::Registered, IoMemory::Mapped].map(|memory| rows.get(bed, bytes, batch, memory));
        let value = ratio(mapped, registered, charged(strict));
        let without = most(ratio(mapped, registered, polled), HALF);
        let verdict = match most(value, HALF) {
            PremappedVerdict::Yes if without != PremappedVerdict::Yes => PremappedVerdict::BuiltIn,
            verdict => verdict,
        };
        (at(bed, batch), value, None, verdict)
    });
    let what = format!("{} KiB, polled, strict mapping modelled: CPU mapped/registered", bytes >> 10);
    worst(what, "at most 0.50", found, false)
}

/// The worst of all verdicts, and the worst value that has it.
fn worst(
    what: String,
    goal: &str,
    found: impl Iterator<Item = (String, MedianInterval, Option<f64>, PremappedVerdict)>,
    small_is_bad: bool,
) -> PremappedGoal {
    let found: Vec<_> = found.collect();
    let sign = if small_is_bad { 1.0 } else { -1.0 };
    let order = |value: &MedianInterval| sign * value.median;
    let is_any = |verdict| found.iter().any(|(_, _, _, found)| *found == verdict);
    let verdict = [PremappedVerdict::No, PremappedVerdict::Undecided, PremappedVerdict::BuiltIn];
    let verdict = verdict.into_iter().find(|verdict| is_any(*verdict)).unwrap_or(PremappedVerdict::Yes);
    let counted = found.iter().filter_map(|(_, _, counted, _)| *counted).map(|counted| sign * counted);
    let by_instructions = counted.min_by(f64::total_cmp).map(|counted| sign * counted);
    // The place that decides the verdict, if others have noisier intervals.
    let deciding = found.iter().filter(|(_, _, _, found)| *found == verdict);
    let worst = deciding.min_by(|one, other| order(&one.1).total_cmp(&order(&other.1)));
    let (at, value) = worst.map_or_else(Default::default, |(at, value, ..)| (at.clone(), *value));
    PremappedGoal { what, goal: goal.into(), value, at, by_instructions, verdict }
}

/// The claims of the post and its follow-up. Loads as there: two bios for a call at 512 B, 31 at 128 KiB.
pub(crate) fn claims(rows: &PremappedRows) -> Vec<PremappedClaim> {
    let pair =
        |bytes, batch| [IoMemory::Registered, IoMemory::Mapped].map(|memory| rows.get(Bed::Many, bytes, batch, memory));
    let [registered, mapped] = pair(512, 2);
    let small = ratio(registered, mapped, polled);
    let is_below = |value: MedianInterval, limit: f64| {
        let above = MedianInterval { low: -value.high, median: -value.median, high: -value.low };
        (most(value, limit), most(above, -limit))
    };
    let (slower, faster) = is_below(small, 1.0);
    let [registered, mapped] = pair(128 << 10, 31);
    let large = ratio(mapped, registered, interrupt(rows));
    let found = |value: MedianInterval| format!("{:.3} ({:.3} to {:.3})", value.median, value.low, value.high);
    let busch = flat_of(rows);
    vec![
        PremappedClaim {
            what: "512 B, polled: mapped has 0.978 of the IOPS of registered (the post)".into(),
            found: found(small),
            verdict: slower,
            reason: String::new(),
        },
        PremappedClaim {
            what: "512 B: mapped has 1.009 of the IOPS of registered (follow-up)".into(),
            found: found(small),
            verdict: faster,
            reason: String::new(),
        },
        PremappedClaim {
            what: "128 KiB, polled: mapped has 1.008 of the IOPS of registered (the post)".into(),
            found: "equal: the modelled link limits both".into(),
            verdict: PremappedVerdict::NotShown,
            reason: "the ceiling is the post's own figure, and its samples of both overlap".into(),
        },
        PremappedClaim {
            what: "128 KiB, by interrupt: mapped takes half the CPU (the post)".into(),
            found: format!("{} without a model of mapping", found(large)),
            verdict: most(large, HALF),
            reason: String::new(),
        },
        PremappedClaim {
            what: "submission of mapped memory is flat from 4 to 64 KiB (K. Busch: 1504, 1490, 1586 ns)".into(),
            found: found(busch),
            verdict: most(busch, FLAT_MAX),
            reason: String::new(),
        },
        PremappedClaim {
            what: "a mapping is good for one file only (the post)".into(),
            found: "one registration has a mapping for each DMA domain".into(),
            verdict: PremappedVerdict::No,
            reason: String::new(),
        },
    ]
}

/// Submission at 64 KiB over that at 4 KiB, one device and one bio a call, as fio at depth 1.
fn flat_of(rows: &PremappedRows) -> MedianInterval {
    let [large, small] = [64 << 10, 4 << 10].map(|bytes| rows.get(Bed::One, bytes, 1, IoMemory::Mapped));
    ratio(large, small, submit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(low: f64, median: f64, high: f64) -> MedianInterval {
        MedianInterval { low, median, high }
    }

    #[test]
    fn within_the_noise_a_goal_is_undecided() {
        assert_eq!(small_verdict(interval(0.995, 1.001, 1.02)), PremappedVerdict::Yes);
        assert_eq!(small_verdict(interval(0.985, 1.001, 1.02)), PremappedVerdict::Undecided);
        assert_eq!(small_verdict(interval(0.995, 0.999, 1.02)), PremappedVerdict::Undecided);
        assert_eq!(small_verdict(interval(0.97, 0.98, 0.99)), PremappedVerdict::No);
        assert_eq!(most(interval(1.0, 1.05, 1.09), FLAT_MAX), PremappedVerdict::Yes);
        assert_eq!(most(interval(1.0, 1.05, 1.2), FLAT_MAX), PremappedVerdict::Undecided);
        assert_eq!(most(interval(1.11, 1.15, 1.2), FLAT_MAX), PremappedVerdict::No);
    }

    #[test]
    fn the_worst_place_decides_a_goal() {
        let found = [
            ("a", interval(0.97, 0.97, 1.0), PremappedVerdict::Yes),
            ("b", interval(0.9, 0.98, 1.1), PremappedVerdict::Undecided),
        ];
        let found = found.map(|(at, value, verdict)| (at.to_owned(), value, Some(value.median), verdict));
        let goal = worst("x".into(), "y", found.into_iter(), true);
        assert_eq!(
            (goal.at.as_str(), goal.verdict, goal.by_instructions),
            ("b", PremappedVerdict::Undecided, Some(0.97))
        );
    }
}
