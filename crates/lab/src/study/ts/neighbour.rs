//! Part 4: noisy neighbours. Two guests' queues on one device, one at depth 256, the other at depth 1: the second one's
//! latency, and the work of the device.

use std::io;

use blkyard_mq::{DeadlineConfig, DeviceInfo, FairConfig, HwQueueConfig, KyberConfig, Merging, Op, SchedulerConfig};
use blkyard_sim::{FixedLatency, Flash, FlashModel, LineModel, Model};

use super::TimesliceLength;
use super::job::TimesliceJob;
use super::rig::{MS, S, SubmitterTally, TimesliceScene, run};
use crate::study::parts::{Drawn, Part, column};

/// Depth of the neighbour.
const DEPTH: usize = 256;
/// Of the device that each of the two has.
const RANGE_SECTORS: u64 = 1 << 26;
/// Think time of the reader.
const THINK_NS: u64 = 20_000;
/// Time in which schedulers complete their measurements.
const WARM_NS: u64 = 2 * S;
/// Fixed depths of the neighbour: the result of a scheduler that knew the right one.
const LIMITS: [usize; 9] = [1, 2, 4, 8, 12, 16, 32, 64, 128];
/// Goals: the p99 over that alone, and the share of the device's work.
const P99_TIMES: f64 = 1.5;
const WORK: f64 = 0.95;
/// A network path, or an array behind one: 100 us for one, 100 thousand a second, 3.2 GB/s.
pub(super) const PATH: LineModel =
    LineModel { access_ns: 10_000, bytes_per_s: 3_200_000_000, latency_ns: 90_000, jitter_ns: 5_000, depth: 1023 };

#[derive(Clone, Copy)]
enum NeighbourDevice {
    Path,
    Flash,
}

/// A neighbour's load.
#[derive(Clone, Copy)]
struct NeighbourLoad {
    name: &'static str,
    op: Op,
    sectors: u32,
}

const READS: NeighbourLoad = NeighbourLoad { name: "random reads of 4 KiB", op: Op::Read, sectors: 8 };
const LARGE_READS: NeighbourLoad = NeighbourLoad { name: "reads of 128 KiB in a row", op: Op::Read, sectors: 256 };
const WRITES: NeighbourLoad = NeighbourLoad { name: "writes of 128 KiB in a row", op: Op::Write, sectors: 256 };

/// Result of a run, or of several with different seeds.
#[derive(Clone, Copy, Default)]
struct NeighbourFigures {
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    victim_iops: f64,
    neighbour_iops: f64,
}

pub(super) fn path_reads(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    part("neighbour_path_reads", NeighbourDevice::Path, READS, length, seed)
}

pub(super) fn path_writes(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    part("neighbour_path_writes", NeighbourDevice::Path, WRITES, length, seed)
}

pub(super) fn flash_reads(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    part("neighbour_flash_reads", NeighbourDevice::Flash, READS, length, seed)
}

pub(super) fn flash_large_reads(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    part("neighbour_flash_large_reads", NeighbourDevice::Flash, LARGE_READS, length, seed)
}

pub(super) fn flash_writes(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    part("neighbour_flash_writes", NeighbourDevice::Flash, WRITES, length, seed)
}

/// The device with a queue for each guest. `limit` bounds the neighbour's requests there; with a limit its requests do
/// not become longer instead.
fn scene(
    device: NeighbourDevice,
    scheduler: SchedulerConfig,
    limit: usize,
    length: TimesliceLength,
    seed: u64,
) -> TimesliceScene {
    let flash = TimesliceScene::flash(FlashModel::NVME_2018, 2, DEPTH, scheduler);
    let (name, model) = match device {
        NeighbourDevice::Path => ("path", Model::Line(FixedLatency::new(PATH, seed))),
        NeighbourDevice::Flash => ("flash", Model::Flash(Box::new(Flash::new(FlashModel::NVME_2018)))),
    };
    let mut queues = flash.queues;
    let merging = if limit < DEPTH { Merging::Off } else { queues[1].merging };
    queues[1] = HwQueueConfig { depth: limit, merging, ..queues[1] };
    let until_ns = WARM_NS + length.seconds * 100 * MS;
    TimesliceScene {
        info: DeviceInfo { name: name.into(), ..flash.info },
        model,
        queues,
        seed,
        from_ns: WARM_NS,
        until_ns,
        wakes_late: false,
    }
}

fn victim() -> TimesliceJob {
    TimesliceJob { think_ns: THINK_NS, ..TimesliceJob::anywhere(1, 0, RANGE_SECTORS, 1) }
}

fn neighbour(load: NeighbourLoad) -> TimesliceJob {
    let NeighbourLoad { op, sectors, .. } = load;
    let random = sectors == READS.sectors;
    TimesliceJob { op, sectors, random, queue: 1, ..TimesliceJob::anywhere(2, RANGE_SECTORS, RANGE_SECTORS, DEPTH) }
}

/// NaN without samples: no mean exists then, and no goal is met.
fn us(tally: &SubmitterTally, percent: f64) -> f64 {
    tally.percentile_ns(percent).map_or(f64::NAN, |ns| ns as f64 / 1e3)
}

fn alone(
    mut job: TimesliceJob,
    device: NeighbourDevice,
    length: TimesliceLength,
    seed: u64,
) -> io::Result<SubmitterTally> {
    let scene = scene(device, SchedulerConfig::None, DEPTH, length, seed);
    Ok(run(scene, &mut [&mut job])?.remove(0))
}

/// Both, as many times as there are runs; means.
fn both(
    device: NeighbourDevice,
    load: NeighbourLoad,
    scheduler: SchedulerConfig,
    limit: usize,
    length: TimesliceLength,
    seed: u64,
) -> io::Result<NeighbourFigures> {
    let mut sum = NeighbourFigures::default();
    for run_seed in seed..seed + runs(length) {
        let (mut victim, mut neighbour) = (victim(), neighbour(load));
        let scene = scene(device, scheduler, limit, length, run_seed);
        let tallies = run(scene, &mut [&mut victim, &mut neighbour])?;
        sum.p50_us += us(&tallies[0], 50.0);
        sum.p99_us += us(&tallies[0], 99.0);
        sum.p999_us += us(&tallies[0], 99.9);
        sum.victim_iops += tallies[0].ios_per_s();
        sum.neighbour_iops += tallies[1].ios_per_s();
    }
    let mean = |sum: f64| sum / runs(length) as f64;
    Ok(NeighbourFigures {
        p50_us: mean(sum.p50_us),
        p99_us: mean(sum.p99_us),
        p999_us: mean(sum.p999_us),
        victim_iops: mean(sum.victim_iops),
        neighbour_iops: mean(sum.neighbour_iops),
    })
}

fn runs(length: TimesliceLength) -> u64 {
    (length.runs / 6).max(1)
}

fn part(
    name: &'static str,
    device: NeighbourDevice,
    load: NeighbourLoad,
    length: TimesliceLength,
    seed: u64,
) -> io::Result<Part> {
    let on = match device {
        NeighbourDevice::Path => "a path of 100 us, 100 thousand a second and 3.2 GB/s",
        NeighbourDevice::Flash => "flash",
    };
    let mut part = Part {
        name,
        title: format!("one random read at a time beside {DEPTH} {}, on {on}, a queue each", load.name),
        columns: vec![
            column("p50_us", "p50 us", 0),
            column("p99_us", "p99 us", 0),
            column("p999_us", "p99.9 us", 0),
            column("p99_times", "p99/alone", 2),
            column("victim_iops", "its IOPS", 0),
            column("neighbour_percent", "neighbour %", 1),
            column("work_percent", "work %", 1),
        ],
        drawn: Drawn { bar: "p99_times", deviation: "", post: "" },
        ..Part::default()
    };
    let quiet = alone(victim(), device, length, seed)?;
    let noisy_iops = alone(neighbour(load), device, length, seed)?.ios_per_s();
    // Maximum rate of the device for the reader's load.
    let most_iops = alone(neighbour(READS), device, length, seed)?.ios_per_s();
    let p99_us = us(&quiet, 99.0);
    let share = Some(quiet.ios_per_s() / most_iops * 100.0);
    let iops = quiet.ios_per_s();
    part.row(
        "alone",
        [Some(us(&quiet, 50.0)), Some(p99_us), Some(us(&quiet, 99.9)), Some(1.0), Some(iops), None, share],
    );
    let work = |figures: NeighbourFigures| figures.neighbour_iops / noisy_iops + figures.victim_iops / most_iops;
    let row = |part: &mut Part, name: String, scheduler, limit| {
        let figures = both(device, load, scheduler, limit, length, seed)?;
        let NeighbourFigures { p50_us, p99_us: beside_us, p999_us, victim_iops, neighbour_iops } = figures;
        let (times, percent) = (beside_us / p99_us, neighbour_iops / noisy_iops * 100.0);
        let values = [p50_us, beside_us, p999_us, times, victim_iops, percent, work(figures) * 100.0];
        part.row(name, values.map(|value| Some(value).filter(|value| !value.is_nan())));
        Ok::<_, io::Error>((times, work(figures)))
    };
    let fair = FairConfig::default();
    for (name, scheduler) in [
        ("none", SchedulerConfig::None),
        ("kyber", SchedulerConfig::Kyber(KyberConfig::default())),
        ("deadline", SchedulerConfig::Deadline(DeadlineConfig::default())),
        ("fair, per queue", SchedulerConfig::Fair(FairConfig { per_queue: true, ..fair })),
    ] {
        row(&mut part, name.into(), scheduler, DEPTH)?;
    }
    let (times, does) = row(&mut part, "fair".into(), SchedulerConfig::Fair(fair), DEPTH)?;
    let at = || format!("beside {}, {on}", load.name);
    part.at_most("p99 beside a neighbour, times alone", times, P99_TIMES, at());
    part.at_least("what the device does then, of what it could", does, WORK, at());
    let mut best = f64::INFINITY;
    // A short study runs two of them.
    let (first, step) = if runs(length) > 1 { (0, 1) } else { (4, 3) };
    for limit in LIMITS.into_iter().skip(first).step_by(step) {
        let (times, does) = row(&mut part, format!("none, neighbour at {limit}"), SchedulerConfig::None, limit)?;
        if does >= WORK {
            best = best.min(times);
        }
    }
    if best < f64::INFINITY {
        part.notes.push(format!(
            "of fixed depths that leave the device {:.0} % of its work the best has a p99 of {best:.2} times alone",
            WORK * 100.0
        ));
    }
    part.notes.push("work: what each does, of what the device does of that kind at a depth of 256".into());
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::goals::Goal;

    #[test]
    fn on_a_path_a_neighbour_is_hardly_noticed_and_loses_next_to_nothing() {
        let part = path_reads(TimesliceLength { runs: 1, seconds: 2 }, 1).unwrap();
        assert!(part.goals.len() == 2 && part.goals.iter().all(Goal::is_met), "{:?}", part.goals);
        let times =
            |name: &str| part.rows.iter().find(|row| row.name == name).and_then(|row| part.value(row, "p99_times"));
        assert!(times("none") > Some(20.0) && times("alone") == Some(1.0), "{:?}", part.rows);
    }

    /// The reader gains by less depth, at the expense of what the writer does: that is no loss of throughput.
    #[test]
    fn on_a_path_large_writes_leave_a_reader_its_latency() {
        let part = path_writes(TimesliceLength { runs: 1, seconds: 6 }, 1).unwrap();
        assert!(part.goals.len() == 2 && part.goals.iter().all(Goal::is_met), "{:?}", part.goals);
    }
}
