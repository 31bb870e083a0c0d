//! Part 3: a reader of 4 KiB blocks beside two streams without a rate limit, on flash and on a disk.
//!
//! The streams are two copies: their reads alone, as the two copies of the post, which seem to have written into the
//! page cache only; and with writeback. Their loss is counted from their rate without the reader and without a
//! scheduler.

use std::collections::VecDeque;
use std::io;

use blkyard_mq::{DeadlineConfig, FairConfig, KyberConfig, Op, SchedulerConfig, TimesliceConfig};
use blkyard_sim::{DiskModel, FlashModel, Rng};

use super::TimesliceLength;
use super::job::TimesliceJob;
use super::reader::{FileExtent, ReadAhead, Reader};
use super::rig::{Hands, MS, S, SubmitterTally, TimesliceRequest, TimesliceScene, TimesliceSubmitter, run};
use crate::study::parts::{Drawn, Part, column};

/// One in so many runs of the study, each with a separate seed; of each figure the worst run counts.
const RUNS_SHARE: u64 = 8;
/// Where the reader reads, and where each copy does and writes to; sectors. On the disk that is 8 GB, and 50 GB apart.
const RANGE_SECTORS: u64 = 16 << 20;
const APART_SECTORS: u64 = 100 << 20;
/// Of each file: more than any copy reads in the time there is.
const FILE_SECTORS: u64 = 16 << 21;
/// Think time of the reader at depth 1.
const THINK_NS: u64 = 10_000;
/// Limit of a copy's unwritten data, bytes.
const DIRTY_BYTES: u64 = 32 << 20;
/// Writes of a copy in flight.
const WRITES: u64 = 8;
/// A slow copy: one block in this time.
const TRICKLE_NS: u64 = 13 * MS;

/// Load beside the reader, and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    Flash { writes: bool },
    Disk { writes: bool },
}

impl Setting {
    fn writes(self) -> bool {
        let (Setting::Flash { writes } | Setting::Disk { writes }) = self;
        writes
    }

    fn scene(self, scheduler: SchedulerConfig, length: TimesliceLength, seed: u64) -> TimesliceScene {
        let mut scene = match self {
            Setting::Flash { .. } => TimesliceScene::flash(FlashModel::NVME_2018, 1, 128, scheduler),
            Setting::Disk { .. } => TimesliceScene::disk(DiskModel::DESKTOP_2012, scheduler, seed),
        };
        // A scheduler's measurements are done by then. A second of flash is as much work as minutes of a disk.
        let (warm_ns, counted_ns) = match self {
            Setting::Flash { .. } => (length.seconds * S / 12, length.seconds * S / 2),
            Setting::Disk { .. } => (2 * S, length.seconds * S * 2),
        };
        (scene.seed, scene.from_ns, scene.until_ns) = (seed, warm_ns, warm_ns + counted_ns);
        scene
    }

    /// A copy, by its number; it begins somewhere that is drawn.
    fn copy(self, number: u64, rng: &mut Rng) -> Box<dyn TimesliceSubmitter> {
        let first = (1 + number) * APART_SECTORS + rng.below(1 << 20) * 8;
        let stream = number as u32 + 2;
        match self {
            Setting::Flash { writes: false } => {
                Box::new(TimesliceJob { think_ns: 20_000, ..TimesliceJob::in_a_row(stream, first, 256, 8) })
            }
            Setting::Flash { writes: true } => Box::new(Copier::new(stream, first, 256, 8, 0)),
            Setting::Disk { writes: false } => {
                let file = FileExtent::new(first, FILE_SECTORS, &mut |most| rng.below(most + 1));
                Box::new(Reader::new(stream, file, ReadAhead::USUAL, 0))
            }
            Setting::Disk { writes: true } => Box::new(Copier::new(stream, first, 1024, 2, 0)),
        }
    }
}

/// A copy: reads blocks, and writes each elsewhere when it has arrived and its turn comes; the writes are asynchronous.
#[derive(Clone, Debug)]
struct Copier {
    stream: u32,
    first: u64,
    sectors: u32,
    /// Reads in flight.
    depth: u64,
    /// Between one read and the next.
    think_ns: u64,
    asked: u64,
    reading: u64,
    read: VecDeque<u64>,
    writing: u64,
}

impl Copier {
    fn new(stream: u32, first: u64, sectors: u32, depth: u64, think_ns: u64) -> Copier {
        Copier { stream, first, sectors, depth, think_ns, asked: 0, reading: 0, read: VecDeque::new(), writing: 0 }
    }

    fn go_on(&mut self, hands: &mut Hands<'_>) {
        let request = TimesliceRequest { sectors: self.sectors, stream: self.stream, ..TimesliceRequest::default() };
        while self.writing < WRITES
            && let Some(sector) = self.read.pop_front()
        {
            self.writing += 1;
            hands.submit(TimesliceRequest { op: Op::Write, sector: sector + APART_SECTORS / 2, ..request });
        }
        let dirty_max = DIRTY_BYTES / (u64::from(self.sectors) * 512);
        while self.reading < self.depth && self.reading + self.read.len() as u64 + self.writing < dirty_max {
            let sector = self.first + self.asked * u64::from(self.sectors) % RANGE_SECTORS;
            self.asked += 1;
            self.reading += 1;
            hands.submit(TimesliceRequest { sector, ..request });
        }
    }
}

impl TimesliceSubmitter for Copier {
    fn wake(&mut self, _: u64, hands: &mut Hands<'_>) {
        self.go_on(hands);
    }

    fn ended(&mut self, request: &TimesliceRequest, hands: &mut Hands<'_>) {
        if request.op == Op::Read {
            self.reading -= 1;
            self.read.push_back(request.sector);
        } else {
            self.writing -= 1;
        }
        if self.think_ns == 0 {
            self.go_on(hands);
        } else if request.op == Op::Read {
            hands.wake_after(self.think_ns, 1);
        }
    }
}

/// Result of a run: the reader's percentiles, ns, and reads a second; the copies' bytes a second.
#[derive(Clone, Copy, Debug, Default)]
struct Got {
    percentiles_ns: [Option<u64>; 4],
    per_s: f64,
    bytes_per_s: f64,
}

const PERCENTILES: [f64; 4] = [50.0, 99.0, 99.9, 100.0];

impl Got {
    fn of(tallies: &[SubmitterTally], reads: bool) -> Got {
        let (reader, copies) = tallies.split_at(usize::from(reads));
        Got {
            percentiles_ns: reader
                .first()
                .map_or([None; 4], |tally| PERCENTILES.map(|percent| tally.percentile_ns(percent))),
            per_s: reader.first().map_or(0.0, SubmitterTally::ios_per_s),
            bytes_per_s: copies.iter().map(SubmitterTally::bytes_per_s).sum(),
        }
    }

    /// Of each figure the worse.
    fn worse(self, other: Got) -> Got {
        // `None` is the worst.
        let at = |at: usize| Some(self.percentiles_ns[at]?.max(other.percentiles_ns[at]?));
        Got {
            percentiles_ns: [at(0), at(1), at(2), at(3)],
            per_s: self.per_s.min(other.per_s),
            bytes_per_s: self.bytes_per_s.min(other.bytes_per_s),
        }
    }
}

/// Runs the reader, if there is one, beside these copies.
fn beside(scene: TimesliceScene, reads: bool, mut copies: Vec<Box<dyn TimesliceSubmitter>>) -> io::Result<Got> {
    let mut reader = TimesliceJob { think_ns: THINK_NS, ..TimesliceJob::anywhere(1, 0, RANGE_SECTORS, 1) };
    let mut submitters: Vec<&mut dyn TimesliceSubmitter> = Vec::new();
    if reads {
        submitters.push(&mut reader);
    }
    submitters.extend(copies.iter_mut().map(|copy| copy.as_mut() as _));
    Ok(Got::of(&run(scene, &mut submitters)?, reads))
}

/// The worst of several runs.
fn worst(length: TimesliceLength, seed: u64, mut got: impl FnMut(u64) -> io::Result<Got>) -> io::Result<Got> {
    let mut worst = got(seed)?;
    for at in 1..length.runs / RUNS_SHARE {
        worst = worst.worse(got(seed.wrapping_add(at))?);
    }
    Ok(worst)
}

fn table(setting: Setting, length: TimesliceLength, seed: u64) -> io::Result<Part> {
    let disk = matches!(setting, Setting::Disk { .. });
    let run = |scheduler, reads, copies: u64| {
        worst(length, seed, |seed| {
            let mut rng = Rng::new(seed);
            let copies = (0..copies).map(|number| setting.copy(number, &mut rng)).collect();
            beside(setting.scene(scheduler, length, seed), reads, copies)
        })
    };
    let (place, name) = match setting {
        Setting::Flash { writes: false } => {
            ("flash, beside two that read 128 KiB in a row, 8 at a time", "beside_flash")
        }
        Setting::Flash { writes: true } => ("flash, beside two copies that write", "beside_flash_writes"),
        Setting::Disk { writes: false } => ("a disk, beside two that read files", "beside_disk"),
        Setting::Disk { writes: true } => ("a disk, beside two copies that write", "beside_disk_writes"),
    };
    let mut part = Part {
        name,
        title: format!(
            "one who reads 4 KiB at depth 1 from {place}; of {} runs the worst",
            (length.runs / RUNS_SHARE).max(1)
        ),
        columns: vec![
            column("p50_us", "p50 us", 0),
            column("p99_us", "p99 us", 0),
            column("p999_us", "p99.9 us", 0),
            column("max_us", "max us", 0),
            column("rate_share", "of its rate", 3),
            column("copies_mb_per_s", "copies MB/s", 1),
            column("copies_share", "of theirs", 3),
        ],
        drawn: Drawn { bar: if disk { "p99_us" } else { "p999_us" }, deviation: "", post: "" },
        ..Part::default()
    };
    let alone = run(SchedulerConfig::None, true, 0)?;
    let copies = run(SchedulerConfig::None, false, 2)?;
    let row = |part: &mut Part, name: &str, got: Got, has_copies: bool| {
        let us = |at: usize| got.percentiles_ns[at].map(|ns| ns as f64 / 1e3);
        let figures = [us(0), us(1), us(2), us(3), (got.per_s > 0.0).then_some(got.per_s / alone.per_s)];
        let theirs = [got.bytes_per_s / 1e6, got.bytes_per_s / copies.bytes_per_s].map(|of| has_copies.then_some(of));
        part.row(name, figures.into_iter().chain(theirs));
    };
    row(&mut part, "the reader alone", alone, false);
    part.notes
        .push(format!("The copies have {:.1} MB/s without the reader and a scheduler.", copies.bytes_per_s / 1e6));
    let mut fair = Got::default();
    let ns = |got: Got, at: usize| got.percentiles_ns[at].map(|ns| ns as f64);
    for scheduler in [
        SchedulerConfig::None,
        SchedulerConfig::Deadline(DeadlineConfig::default()),
        SchedulerConfig::Kyber(KyberConfig::default()),
        SchedulerConfig::Timeslice(TimesliceConfig::default()),
        SchedulerConfig::Fair(FairConfig::default()),
    ] {
        let got = run(scheduler, true, 2)?;
        row(&mut part, scheduler.name(), got, true);
        if matches!(scheduler, SchedulerConfig::Fair(_)) {
            fair = got;
        }
    }
    let at = if setting.writes() { "copies that write" } else { "copies that read" };
    if disk {
        part.at_most("p99 of one beside two on a disk, fair, ms", ns(fair, 1).map(|ns| ns / 1e6), 300.0, at);
        part.at_least("its rate, fair/alone", fair.per_s / alone.per_s, 0.2, at);
    } else {
        let times = ns(fair, 2).zip(ns(alone, 2)).map(|(fair, alone)| fair / alone);
        part.at_most("p99.9 of one beside two on flash, fair/alone", times, 2.0, at);
        part.at_least("throughput of the two, fair/without the one", fair.bytes_per_s / copies.bytes_per_s, 0.9, at);
    }
    if setting == (Setting::Flash { writes: true }) {
        let trickle = worst(length, seed, |seed| {
            let scene = setting.scene(SchedulerConfig::None, length, seed);
            beside(scene, true, vec![Box::new(Copier::new(2, APART_SECTORS, 256, 1, TRICKLE_NS))])
        })?;
        row(&mut part, "none, a trickle", trickle, true);
        part.notes.push(
            "The trickle is one copy of 10 MB/s, read and written: what a read waits behind are dies that program and collect garbage,\n  \
             so no order of what is written can do better while anything is."
                .into(),
        );
    }
    Ok(part)
}

pub(super) fn flash(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    table(Setting::Flash { writes: false }, length, seed)
}

pub(super) fn flash_writes(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    table(Setting::Flash { writes: true }, length, seed)
}

pub(super) fn disk(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    table(Setting::Disk { writes: false }, length, seed)
}

pub(super) fn disk_writes(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    table(Setting::Disk { writes: true }, length, seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: TimesliceLength = TimesliceLength { runs: 1, seconds: 5 };

    #[test]
    fn fair_lets_one_on_flash_hardly_wait_and_takes_little_from_the_streams() {
        let part = flash(SHORT, 1).unwrap();
        let figure = |name, key| {
            let row = part.rows.iter().find(|row| row.name == name).unwrap();
            part.value(row, key).unwrap()
        };
        assert!(figure("none", "p50_us") > 5.0 * figure("fair", "p50_us"), "{:?}", part.rows);
        assert!(figure("fair", "copies_share") > 0.85, "{:?}", part.rows);
        assert!(figure("the reader alone", "p999_us") < 60.0, "{:?}", part.rows);
    }

    #[test]
    fn a_copy_writes_what_it_has_read_and_holds_no_more_than_it_may() {
        let scene = Setting::Flash { writes: true }.scene(SchedulerConfig::None, SHORT, 1);
        let mut copy = Copier::new(1, 0, 256, 8, 0);
        let tallies = run(scene, &mut [&mut copy]).unwrap();
        let (read, written) = (tallies[0].read_bytes, tallies[0].written_bytes);
        assert!(read > 100 << 20 && read.abs_diff(written) <= DIRTY_BYTES, "{read} {written}");
    }

    #[test]
    fn a_reader_beside_two_copies_on_a_disk_waits_no_longer_than_a_round() {
        let scheduler = SchedulerConfig::Fair(FairConfig::default());
        let length = TimesliceLength::new(false);
        for seed in 1..=3 {
            let setting = Setting::Disk { writes: true };
            let mut rng = Rng::new(seed);
            let copies = (0..2).map(|number| setting.copy(number, &mut rng)).collect();
            let got = beside(setting.scene(scheduler, length, seed), true, copies).unwrap();
            let p99_ns = got.percentiles_ns[1].unwrap();
            assert!(p99_ns <= u64::from(FairConfig::default().target_ms) * MS, "seed {seed}: {p99_ns}");
        }
    }
}
