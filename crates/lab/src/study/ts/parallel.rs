//! Part 1: two files of 750 MB, read, and copied, at the same time on a rotating disk.
//!
//! The post has four rows of seconds. One unpublished parameter of the disk is calibrated with the ratio of two of
//! them; the other rows are predictions.

use std::io;

use blkyard_mq::{DeadlineConfig, FairConfig, SchedulerConfig, SliceKey, TimesliceConfig};
use blkyard_sim::{DiskModel, Rng};

use super::TimesliceLength;
use super::cache::{CopyShare, Flusher};
use super::reader::{FileExtent, ReadAhead, Reader, StreamNumbers};
use super::rig::{MS, TimesliceScene, run};
use super::variation::OtherIo;
use crate::study::goals::PostClaim;
use crate::study::judge::RunRange;
use crate::study::parts::{Drawn, Part, column};

/// Size of a file, sectors.
const FILE_SECTORS: u64 = 750_000_000 / 4096 * 8;
/// The post's ticks: its machine had 250 a second.
const TICK_US: u32 = 4000;
/// A turn of `fair`, at most.
const SLICE_SECONDS: f64 = 0.1;
const FAIR: &str = "fair";
const CFQ: &str = "like CFQ, idle 8 ms";
const CFQ_NO_IDLE: &str = "like CFQ, idle 0";
const POSTED: &str = "timeslice as posted, 250 us";
/// The post's row without a scheduler: seconds, and deviation.
const POST_NONE: (f64, f64) = (24.37, 2.05);
/// Its two rows of CFQ: with an idle time of 8 ms, and without.
const POST_CFQ: (f64, f64) = (16.18, 4.95);
const POST_CFQ_NO_IDLE: (f64, f64) = (23.74, 2.82);
/// Its own.
const POST_SLICES: (f64, f64) = (25.58, 3.16);

/// A scheduler, and the post's figures for it.
#[derive(Clone, Copy, Debug)]
struct Contender {
    name: &'static str,
    scheduler: SchedulerConfig,
    /// Streams are software queues, one for each CPU: a reader that moves is another stream.
    by_cpu: bool,
    /// Seconds, and deviation.
    post: Option<(f64, f64)>,
}

impl Contender {
    fn stream(&self, stream: u32) -> StreamNumbers {
        if self.by_cpu { StreamNumbers::moving() } else { StreamNumbers::fixed(stream) }
    }
}

fn contenders() -> Vec<Contender> {
    let of = |name, scheduler, post| Contender { name, scheduler, by_cpu: false, post };
    let by_cpu = |name, slice_us, post| Contender { by_cpu: true, ..of(name, posted(slice_us), post) };
    let fair = |name, config, post| of(name, SchedulerConfig::Fair(config), post);
    vec![
        of("none", SchedulerConfig::None, Some(POST_NONE)),
        of("deadline", SchedulerConfig::Deadline(DeadlineConfig::default()), None),
        by_cpu("timeslice as posted, off", 0, None),
        by_cpu(POSTED, 250, Some(POST_SLICES)),
        of("timeslice, 20 ms", SchedulerConfig::Timeslice(TimesliceConfig::default()), None),
        fair(CFQ_NO_IDLE, FairConfig::like_cfq(0), Some(POST_CFQ_NO_IDLE)),
        fair(CFQ, FairConfig::like_cfq(8), Some(POST_CFQ)),
        fair(FAIR, FairConfig::default(), None),
    ]
}

/// As the post's code behaves on its machine, with software queues as streams: the submitter names its CPU.
pub(super) fn posted(slice_us: u32) -> SchedulerConfig {
    let config = TimesliceConfig { key: SliceKey::Stream, ..TimesliceConfig::as_posted(slice_us, TICK_US) };
    SchedulerConfig::Timeslice(config)
}

/// Positions of two files and of their copies, and the readers' start times.
struct Placed {
    files: [FileExtent; 2],
    copies: [FileExtent; 2],
    starts_ns: [u64; 2],
    seed: u64,
}

/// All in the outermost zone: the end of a file must not depend on the zone's speed. The files are 2 GB apart or more,
/// either first; the copies 24 GB and more behind.
fn place(seed: u64, more_gigabytes: u64) -> Placed {
    let mut rng = Rng::new(seed);
    let gigabytes = |n: u64| n * 1_000_000_000 / 4096 * 8;
    let mut draw = |most: u64| rng.below(gigabytes(most) / 8) * 8;
    let first = draw(20);
    let firsts = [
        first,
        first + gigabytes(2) + draw(more_gigabytes),
        first + gigabytes(24) + draw(8),
        first + gigabytes(36) + draw(8),
    ];
    let mut file = |first| FileExtent::new(first, FILE_SECTORS, &mut |most| rng.below(most + 1));
    let [mut one, mut other, to, to_other] = firsts.map(&mut file);
    if rng.below(2) == 1 {
        std::mem::swap(&mut one, &mut other);
    }
    Placed { files: [one, other], copies: [to, to_other], starts_ns: [0, rng.below(100 * MS)], seed: rng.draw() }
}

/// How much more than 2 GB lies between the files, at most; as spec D.7 has it.
const MORE_GIGABYTES: u64 = 18;

/// Mean and deviation.
fn mean(of: &[f64]) -> (f64, f64) {
    let mean = of.iter().sum::<f64>() / of.len() as f64;
    let sum = of.iter().map(|n| (n - mean).powi(2)).sum::<f64>();
    (mean, (sum / (of.len() as f64 - 1.0).max(1.0)).sqrt())
}

/// How a run went.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Took {
    /// Seconds until both readers had all.
    seconds: f64,
    /// Between the ends of both.
    apart: f64,
    /// Until all that was copied was on the disk.
    durable: f64,
}

impl Took {
    fn of(readers: [&Reader; 2], durable_ns: Option<u64>) -> Took {
        let [one, other] = readers.map(|reader| reader.over_ns().unwrap_or(u64::MAX));
        let seconds = |ns: u64| ns as f64 / 1e9;
        let last_ns = one.max(other);
        Took {
            seconds: seconds(last_ns),
            apart: seconds(one.abs_diff(other)),
            durable: seconds(durable_ns.unwrap_or(last_ns)),
        }
    }
}

/// The disk of a machine that does something else, too.
fn scene(model: DiskModel, scheduler: SchedulerConfig, seed: u64) -> TimesliceScene {
    TimesliceScene { wakes_late: true, ..TimesliceScene::disk(model, scheduler, seed) }
}

/// Two readers, without writes.
fn read(model: DiskModel, contender: &Contender, placed: Placed) -> io::Result<Took> {
    let Placed { files: [one, other], starts_ns, seed, .. } = placed;
    let reader = |stream: u32, file, starts_ns| {
        Reader::new(stream, file, ReadAhead::USUAL, starts_ns).on(contender.stream(stream))
    };
    let (mut one, mut other) = (reader(1, one, starts_ns[0]), reader(2, other, starts_ns[1]));
    run(scene(model, contender.scheduler, seed), &mut [&mut one, &mut other, &mut OtherIo::new(seed)])?;
    Ok(Took::of([&one, &other], None))
}

/// Two copies, with writeback for both.
fn copy(model: DiskModel, contender: &Contender, placed: Placed) -> io::Result<Took> {
    let Placed { files: [one, other], copies, starts_ns, seed } = placed;
    let [share, other_share] = CopyShare::two();
    let mut flusher = Flusher::new(&share, contender.stream(3), copies);
    let reader = |stream: u32, file, starts_ns, share| {
        Reader::new(stream, file, ReadAhead::USUAL, starts_ns).on(contender.stream(stream)).into(share)
    };
    let (mut one, mut other) = (reader(1, one, starts_ns[0], share), reader(2, other, starts_ns[1], other_share));
    let mut others = OtherIo::new(seed);
    run(scene(model, contender.scheduler, seed), &mut [&mut one, &mut other, &mut flusher, &mut others])?;
    Ok(Took::of([&one, &other], flusher.over_ns()))
}

/// Seconds for the same two files, one after the other: the raw rate of where they lie.
fn one_by_one(model: DiskModel, placed: Placed) -> io::Result<f64> {
    let Placed { files, seed, .. } = placed;
    let mut seconds = 0.0;
    for file in files {
        let mut reader = Reader::new(1, file, ReadAhead::USUAL, 0);
        run(scene(model, SchedulerConfig::None, seed), &mut [&mut reader, &mut OtherIo::new(seed)])?;
        seconds += reader.over_ns().unwrap_or(u64::MAX) as f64 / 1e9;
    }
    Ok(seconds)
}

/// Result of a scheduler.
struct Reached {
    contender: Contender,
    /// Mean and deviation.
    seconds: f64,
    deviation: f64,
    durable: f64,
    durable_deviation: f64,
    /// Between the ends of both, at most.
    apart: f64,
    runs: Vec<Took>,
}

impl Reached {
    fn new(contender: Contender, runs: &[Took]) -> Reached {
        let all = |of: fn(&Took) -> f64| runs.iter().map(of).collect::<Vec<_>>();
        let (seconds, deviation) = mean(&all(|took| took.seconds));
        let (durable, durable_deviation) = mean(&all(|took| took.durable));
        let apart = all(|took| took.apart).into_iter().fold(0.0, f64::max);
        Reached { contender, seconds, deviation, durable, durable_deviation, apart, runs: runs.to_vec() }
    }
}

type Play = fn(DiskModel, &Contender, Placed) -> io::Result<Took>;

/// All contenders, and the raw rate: seconds and deviation.
fn play(length: TimesliceLength, seed: u64, play: Play) -> io::Result<(Vec<Reached>, Vec<f64>)> {
    let model = DiskModel::DESKTOP_2012;
    let places = || (0..length.runs).map(|at| place(seed.wrapping_add(at), MORE_GIGABYTES));
    let raw: Vec<f64> = places().map(|placed| one_by_one(model, placed)).collect::<io::Result<_>>()?;
    let reach = |contender: Contender| {
        let runs: Vec<Took> = places().map(|placed| play(model, &contender, placed)).collect::<io::Result<_>>()?;
        Ok(Reached::new(contender, &runs))
    };
    Ok((contenders().into_iter().map(reach).collect::<io::Result<_>>()?, raw))
}

/// The two readers' ratio for other values of the unpublished parameter.
pub(super) fn calibration(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    let usual = DiskModel::DESKTOP_2012;
    let mut part = Part {
        name: "calibration",
        title: format!(
            "calibration, with two files 2 GB apart: what the disk reads of one in one go while the other waits; {} KiB from here on",
            usual.stretch_sectors / 2
        ),
        columns: vec![
            column("idle_0_seconds", "CFQ idle 0", 2),
            column("idle_8_seconds", "CFQ idle 8", 2),
            column("ratio", "ratio", 3),
            column("post_ratio", "post", 3),
        ],
        drawn: Drawn { bar: "ratio", deviation: "", post: "post_ratio" },
        ..Part::default()
    };
    let post = POST_CFQ_NO_IDLE.0 / POST_CFQ.0;
    let contenders = contenders();
    let seconds = |model, name| {
        let Some(contender) = contenders.iter().find(|contender| contender.name == name) else {
            unreachable!("it is one")
        };
        let runs = (0..length.runs).map(|at| Ok(read(model, contender, place(seed.wrapping_add(at), 0))?.seconds));
        Ok::<f64, io::Error>(mean(&runs.collect::<io::Result<Vec<_>>>()?).0)
    };
    let mut stretches = STRETCHES_KIB.map(|kib| kib * 2).to_vec();
    stretches.push(usual.stretch_sectors);
    stretches.sort_unstable();
    stretches.dedup();
    for stretch_sectors in stretches {
        let model = DiskModel { stretch_sectors, ..usual };
        let (none, idle) = (seconds(model, CFQ_NO_IDLE)?, seconds(model, CFQ)?);
        part.row(format!("{} KiB", stretch_sectors / 2), [Some(none), Some(idle), Some(none / idle), Some(post)]);
    }
    Ok(part)
}

/// Values that are shown beside the one that was found.
const STRETCHES_KIB: [u64; 8] = [256, 512, 576, 640, 768, 1024, 1088, 1536];

/// Schedulers whose means differ by no more do the same.
const SAME: f64 = 0.02;
const VARIES: &str = "runs differ in where files and platter are, in late wake-ups and in the machine's other I/O; the amounts are \
                      assumed";

/// Two readers.
pub(super) fn readers(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    let mut part = Part {
        name: "readers",
        title: format!(
            "two files of 750 MB read in parallel from a disk, {} runs, each with the files elsewhere",
            length.runs
        ),
        columns: vec![
            column("seconds", "seconds", 2),
            column("deviation", "stdev", 2),
            column("to_none", "to none", 3),
            column("post_to_none", "post", 2),
            column("post_deviation_percent", "post stdev %", 0),
            column("apart_seconds", "ends apart", 2),
        ],
        drawn: Drawn { bar: "to_none", deviation: "", post: "post_to_none" },
        ..Part::default()
    };
    let (rows, raws) = play(length, seed, read)?;
    let (raw, raw_deviation) = mean(&raws);
    let none = rows[0].seconds;
    part.row("one after the other", [Some(raw), Some(raw_deviation), Some(raw / none), None, None, None]);
    for Reached { contender, seconds, deviation, apart, .. } in &rows {
        let post = contender.post.map(|(seconds, _)| seconds / POST_NONE.0);
        let post_deviation = contender.post.map(|(seconds, deviation)| deviation / seconds * 100.0);
        part.row(
            contender.name,
            [Some(*seconds), Some(*deviation), Some(seconds / none), post, post_deviation, Some(*apart)],
        );
    }
    goals(&mut part, &rows, |took| took.seconds, &raws, "readers");
    let same = |reached: &&Reached| (reached.seconds / none - 1.0).abs() <= SAME;
    let same: Vec<_> = rows[1..].iter().filter(same).map(|reached| reached.contender.name).collect();
    if same.contains(&CFQ_NO_IDLE) {
        part.notes.push(format!(
            "within {:.0} % of none: {}; so the calibrated ratio is none over CFQ, and CFQ's figure to none is no prediction",
            100.0 * SAME,
            same.join("; ")
        ));
    }
    part.notes.push(VARIES.into());
    if let Some(posted) = rows.iter().find(|reached| reached.contender.name == POSTED) {
        let found = against_none(posted, &rows[0], |took| took.seconds);
        part.claims.push(PostClaim {
            what: "slices of 250 us as posted are no better than none".into(),
            found: format!("{} of it, the post {:.2}", found.text(2), POST_SLICES.0 / POST_NONE.0),
            verdict: found.at_least(0.97).into(),
            reason: "".into(),
        });
    }
    Ok(part)
}

/// Two copies.
pub(super) fn copies(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    let mut part = Part {
        name: "copies",
        title: format!(
            "the same two files copied on the disk, {} runs: until both are read, and until all is durable",
            length.runs
        ),
        columns: vec![
            column("seconds", "read", 2),
            column("deviation", "stdev", 2),
            column("apart_seconds", "ends apart", 2),
            column("durable_seconds", "durable", 2),
            column("durable_deviation", "stdev", 2),
            column("durable_to_none", "to none", 3),
            column("post_to_none", "post", 2),
            column("mb_per_s", "MB/s", 1),
        ],
        drawn: Drawn { bar: "durable_to_none", deviation: "", post: "post_to_none" },
        notes: vec!["MB/s counts both directions; one after the other: as the files are read, twice".into()],
        ..Part::default()
    };
    let (rows, raws) = play(length, seed, copy)?;
    // Both directions.
    let raws: Vec<f64> = raws.into_iter().map(|seconds| 2.0 * seconds).collect();
    let (raw, raw_deviation) = mean(&raws);
    let none = rows[0].durable;
    let rate = |seconds: f64| Some(4.0 * FILE_SECTORS as f64 * 512.0 / 1e6 / seconds);
    part.row(
        "one after the other",
        [None, None, None, Some(raw), Some(raw_deviation), Some(raw / none), None, rate(raw)],
    );
    for Reached { contender, seconds, deviation, durable, durable_deviation, apart, .. } in &rows {
        let post = contender.post.map(|(seconds, _)| seconds / POST_NONE.0);
        part.row(
            contender.name,
            [
                Some(*seconds),
                Some(*deviation),
                Some(*apart),
                Some(*durable),
                Some(*durable_deviation),
                Some(durable / none),
                post,
                rate(*durable),
            ],
        );
    }
    goals(&mut part, &rows, |took| took.durable, &raws, "copies");
    for (name, post, what) in [
        (CFQ, POST_CFQ, "CFQ copies faster than none"),
        (POSTED, POST_SLICES, "slices of 250 us as posted copy no faster than none"),
    ] {
        let Some(reached) = rows.iter().find(|reached| reached.contender.name == name) else { continue };
        let post = post.0 / POST_NONE.0;
        let found = against_none(reached, &rows[0], |took| took.durable);
        let sides = [found.at_least(0.95 * post), found.at_most(1.05 * post)];
        part.claims.push(PostClaim {
            what: format!("{what}: {post:.2} of its time, within 5 %"),
            found: format!(
                "{} with the copies on the disk, {:.2} until both are read",
                found.text(2),
                reached.seconds / rows[0].seconds
            ),
            verdict: sides[0].max(sides[1]).into(),
            reason: "".into(),
        });
    }
    Ok(part)
}

/// Goals of `fair`. Runs with the same positions are compared with each other.
fn goals(part: &mut Part, rows: &[Reached], of: fn(&Took) -> f64, raws: &[f64], at: &str) {
    let find = |name| rows.iter().find(|reached| reached.contender.name == name);
    let (Some(fair), Some(cfq)) = (find(FAIR), find(CFQ)) else { return };
    let all = |reached: &Reached| reached.runs.iter().map(of).collect::<Vec<_>>();
    let (fair_all, cfq_all) = (all(fair), all(cfq));
    let ((seconds, deviation), (cfq_seconds, cfq_deviation)) = (mean(&fair_all), mean(&cfq_all));
    part.at_most("seconds, fair/like CFQ", seconds / cfq_seconds, 1.0, at);
    part.undecided_within(noise(&fair_all, &cfq_all));
    part.at_most("seconds, fair/raw rate", seconds / mean(raws).0, 1.08, at);
    part.undecided_within(noise(&fair_all, raws));
    part.at_most("deviation, fair/like CFQ", deviation / cfq_deviation, 1.0, at);
    part.undecided_within(deviation_noise(fair_all.len()));
    part.at_most("deviation of the mean, fair/CFQ of the post", deviation / seconds * POST_CFQ.0 / POST_CFQ.1, 1.0, at);
    part.by_construction("of the post's machine all varied, and how much of it did here is assumed");
    part.at_most("seconds between the ends of both, fair", fair.apart, 2.0 * SLICE_SECONDS, at);
}

/// What was reached to what none reached, with two standard errors on each side.
fn against_none(reached: &Reached, none: &Reached, of: fn(&Took) -> f64) -> RunRange {
    let [all, base] = [reached, none].map(|reached| reached.runs.iter().map(of).collect::<Vec<_>>());
    let (value, noise) = (mean(&all).0 / mean(&base).0, noise(&all, &base));
    RunRange { value, low: value - noise, high: value + noise }
}

/// Two standard errors of the mean ratio of runs with the same positions.
fn noise(one: &[f64], other: &[f64]) -> f64 {
    let ratios: Vec<f64> = one.iter().zip(other).map(|(one, other)| one / other).collect();
    2.0 * mean(&ratios).1 / (ratios.len() as f64).sqrt()
}

/// Two standard errors of the ratio of two deviations, each of so many runs.
fn deviation_noise(runs: usize) -> f64 {
    2.0 / (runs as f64 - 1.0).max(1.0).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::goals::GoalVerdict;

    const MODEL: DiskModel = DiskModel::DESKTOP_2012;

    #[test]
    fn a_figure_to_none_is_as_certain_as_its_runs() {
        let reached = |all: &[f64]| {
            let took = |seconds: &f64| Took { seconds: *seconds, apart: 0.0, durable: 1.0 };
            Reached::new(contenders().remove(0), &all.iter().map(took).collect::<Vec<_>>())
        };
        let none = reached(&[10.0; 4]);
        let verdict = |all: &[f64]| against_none(&reached(all), &none, |took| took.seconds).at_least(0.97);
        assert_eq!(verdict(&[9.9; 4]), GoalVerdict::Met);
        assert_eq!(verdict(&[9.5; 4]), GoalVerdict::Missed);
        // A mean of 9.9 and of 9.5, with two standard errors of 0.08.
        assert_eq!(verdict(&[9.2, 10.6, 9.2, 10.6]), GoalVerdict::Undecided);
        assert_eq!(verdict(&[8.8, 10.2, 8.8, 10.2]), GoalVerdict::Undecided);
        assert_eq!(against_none(&none, &none, |took| took.seconds).text(2), "1.00");
    }

    /// Property (a) of spec D.7.
    #[test]
    fn one_who_reads_alone_has_the_raw_rate_whoever_orders() {
        let seconds = |scheduler| {
            let Placed { files: [file, _], seed, .. } = place(1, MORE_GIGABYTES);
            let mut reader = Reader::new(1, file, ReadAhead::USUAL, 0);
            run(TimesliceScene::disk(MODEL, scheduler, seed), &mut [&mut reader]).unwrap();
            reader.over_ns().unwrap() as f64 / 1e9
        };
        let raw = FILE_SECTORS as f64 * 512.0 / MODEL.outer_bytes_per_s as f64;
        for contender in contenders() {
            let took = seconds(contender.scheduler);
            assert!((took / raw - 1.0).abs() < 0.01, "{}: {took} s, {raw} raw", contender.name);
        }
    }

    /// Properties (b) and (c).
    #[test]
    fn two_who_read_end_together_and_no_later_than_with_cfq() {
        let contenders = contenders();
        let find = |name| contenders.iter().find(|contender| contender.name == name).unwrap();
        for seed in 0..3 {
            let took = |name| read(MODEL, find(name), place(seed, MORE_GIGABYTES)).unwrap();
            let (fair, cfq) = (took(FAIR), took(CFQ));
            assert!(fair.apart < 2.0 * SLICE_SECONDS, "{fair:?}");
            assert!(fair.seconds <= 1.05 * cfq.seconds, "{fair:?} {cfq:?}");
        }
    }

    #[test]
    fn two_copies_take_hardly_longer_than_the_raw_rate_though_the_disk_has_a_write_cache() {
        let contenders = contenders();
        let fair = contenders.iter().find(|contender| contender.name == FAIR).unwrap();
        for seed in 0..2 {
            let took = copy(MODEL, fair, place(seed, MORE_GIGABYTES)).unwrap();
            let raw = 2.0 * one_by_one(MODEL, place(seed, MORE_GIGABYTES)).unwrap();
            assert!(took.durable <= 1.08 * raw && took.apart < 2.0 * SLICE_SECONDS, "{took:?}, {raw} s raw");
        }
    }

    /// Property (e); costs are measured elsewhere.
    #[test]
    fn slices_of_no_length_are_none_to_the_last_nanosecond() {
        let took = |scheduler| {
            let contender = Contender { name: "", scheduler, by_cpu: false, post: None };
            copy(MODEL, &contender, place(2, MORE_GIGABYTES)).unwrap()
        };
        assert_eq!(took(SchedulerConfig::None), took(posted(0)));
        assert_ne!(took(SchedulerConfig::None), took(posted(250)));
    }

    /// The one figure that is fitted: CFQ without an idle time takes 1.47 times as long as with one.
    #[test]
    fn the_disk_is_calibrated() {
        let contenders = contenders();
        let seconds = |name| {
            let contender = contenders.iter().find(|contender| contender.name == name).unwrap();
            (0..4).map(|seed| read(MODEL, contender, place(seed, 0)).unwrap().seconds).sum::<f64>()
        };
        let ratio = seconds(CFQ_NO_IDLE) / seconds(CFQ);
        assert!((ratio / (POST_CFQ_NO_IDLE.0 / POST_CFQ.0) - 1.0).abs() < 0.05, "{ratio}");
    }
}
