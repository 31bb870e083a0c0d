//! Part 1: two files of 750 MB, read at the same time from a disk that turns.

use std::io;

use blkyard_mq::{DeadlineConfig, FairConfig, SchedulerConfig, SliceKey, TimesliceConfig};
use blkyard_sim::{DiskModel, Rng};

use super::Length;
use super::part::{Drawn, Part, column};
use super::reader::{File, ReadAhead, Reader};
use super::rig::{MS, Scene, run};

/// Size of a file, sectors.
const FILE_SECTORS: u64 = 750_000_000 / 4096 * 8;
/// The post's ticks: its machine had 250 a second.
pub(super) const TICK_US: u32 = 4000;

/// Who orders, and what the post has for it.
#[derive(Clone, Copy, Debug)]
struct Contender {
    name: &'static str,
    scheduler: SchedulerConfig,
    /// Streams are software queues, of which each CPU has one: a reader that moves is another stream.
    by_cpu: bool,
    /// Seconds, and deviation.
    post: Option<(f64, f64)>,
}

/// A turn of `fair`, at most.
const SLICE_SECONDS: f64 = 0.1;
const FAIR: &str = "fair";
const CFQ: &str = "like CFQ, idle 8 ms";

/// The post's row without a scheduler.
const POST_NONE: (f64, f64) = (24.37, 2.05);

fn contenders() -> Vec<Contender> {
    let of = |name, scheduler, post| Contender { name, scheduler, by_cpu: false, post };
    let posted = |slice_us| {
        // A number for each CPU: what a software queue is there.
        let config = TimesliceConfig { key: SliceKey::Stream, ..TimesliceConfig::as_posted(slice_us, TICK_US) };
        SchedulerConfig::Timeslice(config)
    };
    let by_cpu = |name, slice_us, post| Contender { by_cpu: true, ..of(name, posted(slice_us), post) };
    vec![
        of("none", SchedulerConfig::None, Some(POST_NONE)),
        of("deadline", SchedulerConfig::Deadline(DeadlineConfig::default()), None),
        by_cpu("timeslice as posted, off", 0, None),
        by_cpu("timeslice as posted, 250 us", 250, Some((25.58, 3.16))),
        of("timeslice, 20 ms", SchedulerConfig::Timeslice(TimesliceConfig::default()), None),
        of(CFQ, SchedulerConfig::Fair(FairConfig::like_cfq(8)), Some((16.18, 4.95))),
        of("like CFQ, idle 0", SchedulerConfig::Fair(FairConfig::like_cfq(0)), Some((23.74, 2.82))),
        of(FAIR, SchedulerConfig::Fair(FairConfig::default()), None),
    ]
}

/// Where two files lie and when who reads them begins.
struct Placed {
    files: [File; 2],
    starts_ns: [u64; 2],
    seed: u64,
}

/// The files lie 2 to 20 GB apart in the outer tenth of the disk, either first.
fn place(seed: u64) -> Placed {
    let mut rng = Rng::new(seed);
    let gigabytes = |n: u64| n * 1_000_000_000 / 4096 * 8;
    let first = rng.below(gigabytes(80) / 8) * 8;
    let apart = gigabytes(2) + rng.below(gigabytes(18) / 8) * 8;
    let mut file = |first| File::new(first, FILE_SECTORS, &mut |most| rng.below(most + 1));
    let mut files = [file(first), file(first + apart)];
    if rng.below(2) == 1 {
        files.swap(0, 1);
    }
    Placed { files, starts_ns: [0, rng.below(100 * MS)], seed: rng.draw() }
}

/// Mean and deviation.
fn mean(of: &[f64]) -> (f64, f64) {
    let mean = of.iter().sum::<f64>() / of.len() as f64;
    let sum = of.iter().map(|n| (n - mean).powi(2)).sum::<f64>();
    (mean, (sum / (of.len() as f64 - 1.0).max(1.0)).sqrt())
}

/// Seconds until both readers have all, and between their ends.
fn read(model: DiskModel, contender: &Contender, seed: u64) -> io::Result<(f64, f64)> {
    let Placed { files: [one, other], starts_ns, seed } = place(seed);
    let scene = Scene::disk(model, contender.scheduler, seed);
    let mut readers =
        [Reader::new(1, one, ReadAhead::USUAL, starts_ns[0]), Reader::new(2, other, ReadAhead::USUAL, starts_ns[1])];
    if contender.by_cpu {
        readers.iter_mut().for_each(|reader| reader.moves = true);
    }
    let [one, other] = &mut readers;
    run(scene, &mut [one, other])?;
    let ends = readers.map(|reader| reader.over_ns().unwrap_or(u64::MAX));
    Ok((ends[0].max(ends[1]) as f64 / 1e9, ends[0].abs_diff(ends[1]) as f64 / 1e9))
}

/// Seconds for the same two files, one after the other: the raw rate of where they lie.
fn one_by_one(model: DiskModel, seed: u64) -> io::Result<f64> {
    let Placed { files, seed, .. } = place(seed);
    let mut seconds = 0.0;
    for file in files {
        let mut reader = Reader::new(1, file, ReadAhead::USUAL, 0);
        run(Scene::disk(model, SchedulerConfig::None, seed), &mut [&mut reader])?;
        seconds += reader.over_ns().unwrap_or(u64::MAX) as f64 / 1e9;
    }
    Ok(seconds)
}

/// Two readers, and nobody who writes.
pub(super) fn readers(length: Length, seed: u64) -> io::Result<Part> {
    let mut part = Part {
        name: "readers",
        title: format!(
            "two files of 750 MB read in parallel from a disk, {} runs, each with the files elsewhere: seconds",
            length.runs
        ),
        columns: vec![
            column("seconds", "mean", 2),
            column("deviation", "stdev", 2),
            column("to_none", "to none", 3),
            column("post_to_none", "post", 2),
            column("apart_seconds", "ends apart", 2),
        ],
        drawn: Drawn { bar: "to_none", deviation: "", post: "post_to_none" },
        ..Part::default()
    };
    let seeds = || (0..length.runs).map(|at| seed.wrapping_add(at));
    let raw: Vec<f64> = seeds().map(|seed| one_by_one(DiskModel::DESKTOP_2012, seed)).collect::<io::Result<_>>()?;
    let (raw, raw_deviation) = mean(&raw);
    let rows: Vec<Reached> = contenders()
        .into_iter()
        .map(|contender| Reached::new(contender, seeds().map(|seed| read(DiskModel::DESKTOP_2012, &contender, seed))))
        .collect::<io::Result<_>>()?;
    let none = rows[0].seconds;
    part.row("one after the other", [Some(raw), Some(raw_deviation), Some(raw / none), None, None]);
    for Reached { contender, seconds, deviation, apart } in &rows {
        let post = contender.post.map(|(seconds, _)| seconds / POST_NONE.0);
        part.row(contender.name, [Some(*seconds), Some(*deviation), Some(seconds / none), post, Some(*apart)]);
    }
    let of = |name| rows.iter().find(|reached| reached.contender.name == name);
    if let (Some(fair), Some(cfq)) = (of(FAIR), of(CFQ)) {
        let at = "readers";
        part.at_most("seconds, fair/like CFQ", fair.seconds / cfq.seconds, 1.0, at);
        part.at_most("seconds, fair/raw rate", fair.seconds / raw, 1.08, at);
        part.at_most("deviation, fair/like CFQ", fair.deviation / cfq.deviation, 1.0, at);
        part.at_most("seconds between the ends of both, fair", fair.apart, 2.0 * SLICE_SECONDS, at);
    }
    Ok(part)
}

/// What came of a contender.
struct Reached {
    contender: Contender,
    seconds: f64,
    deviation: f64,
    /// Seconds between the ends of both, the longest.
    apart: f64,
}

impl Reached {
    fn new(contender: Contender, runs: impl Iterator<Item = io::Result<(f64, f64)>>) -> io::Result<Reached> {
        let (seconds, aparts): (Vec<f64>, Vec<f64>) = runs.collect::<io::Result<Vec<_>>>()?.into_iter().unzip();
        let (seconds, deviation) = mean(&seconds);
        Ok(Reached { contender, seconds, deviation, apart: aparts.into_iter().fold(0.0, f64::max) })
    }
}
