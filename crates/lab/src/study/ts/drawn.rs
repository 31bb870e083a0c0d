//! Part 5: drawn loads, none of which anybody has looked at: what `fair` costs where there may be nothing to win.
//!
//! A set is one to 32 streams behind one to eight queues, each with an operation, a size, a depth, and positions in a
//! row or anywhere. Its work is what each stream does, as a part of what the device does of that kind alone: time of
//! the device. It is compared with the better of no scheduler and `deadline` on the same set.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;

use blkyard_mq::{DeadlineConfig, FairConfig, Op, SchedulerConfig};
use blkyard_sim::{DiskModel, FixedLatency, FlashModel, Model, Rng};

use super::TimesliceLength;
use super::job::TimesliceJob;
use super::neighbour::PATH;
use super::rig::{MS, S, SubmitterTally, TimesliceScene, TimesliceSubmitter, run};
use crate::study::parts::{Drawn, Part, column};

/// Tags of a queue; a disk has its own number.
const DEPTH: usize = 128;
/// Depth at which a device does the most of one kind.
const FULL_DEPTH: usize = 64;
/// Streams of a set, and queues, at most; both are powers of two, as all that is drawn.
const STREAMS_LOG2_MAX: u64 = 5;
const QUEUES_LOG2_MAX: u64 = 3;
const DEPTH_LOG2_MAX: u64 = 6;
/// Sizes: 4 KiB to 1 MiB.
const SIZE_LOG2_MAX: u64 = 8;
/// Where a stream may be, sectors.
const RANGE_SECTORS: u64 = 1 << 23;
/// One set of each device in so many runs of the study.
const SETS_SHARE: u64 = 3;
/// Goals: the work, over the better of the other two.
const FLASH_WORK: f64 = 0.98;
const DISK_WORK: f64 = 0.97;

/// A device of the sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DrawnDevice {
    Disk,
    NewFlash,
    WornFlash,
    Path,
}

impl DrawnDevice {
    const ALL: [DrawnDevice; 4] = [DrawnDevice::Path, DrawnDevice::NewFlash, DrawnDevice::WornFlash, DrawnDevice::Disk];

    fn name(self) -> &'static str {
        match self {
            DrawnDevice::Disk => "disk",
            DrawnDevice::NewFlash => "flash, new",
            DrawnDevice::WornFlash => "flash, worn",
            DrawnDevice::Path => "path",
        }
    }

    /// Of each block that is collected, how many pages in a thousand are moved.
    fn flash(self) -> FlashModel {
        let valid_permille = if self == DrawnDevice::WornFlash { 600 } else { 0 };
        FlashModel { valid_permille, ..FlashModel::NVME_2018 }
    }

    fn scene(self, scheduler: SchedulerConfig, queues: usize, seed: u64) -> TimesliceScene {
        let mut scene = match self {
            DrawnDevice::Disk => TimesliceScene::disk(DiskModel::DESKTOP_2012, scheduler, seed),
            _ => TimesliceScene::flash(self.flash(), queues, DEPTH, scheduler),
        };
        if self == DrawnDevice::Path {
            scene.model = Model::Line(FixedLatency::new(PATH, seed));
        }
        scene.queues = vec![scene.queues[0]; queues];
        // Depths are known by then, and the caches are full.
        let (warm_ns, counted_ns) = match self {
            DrawnDevice::Disk => (10 * S, 60 * S),
            _ => (S, S),
        };
        (scene.seed, scene.from_ns, scene.until_ns) = (seed, warm_ns, warm_ns + counted_ns);
        scene
    }

    fn goal(self) -> f64 {
        if self == DrawnDevice::Disk { DISK_WORK } else { FLASH_WORK }
    }
}

/// What a device does at one cost: operation, sectors, and whether anywhere.
type JobKind = (bool, u32, bool);

fn kind(job: &TimesliceJob) -> JobKind {
    (job.op == Op::Read, job.sectors, job.random)
}

/// A power of two that is drawn, up to this one; each as likely.
fn power(rng: &mut Rng, log2_max: u64) -> u64 {
    1 << rng.below(log2_max + 1)
}

/// Streams of a set.
fn draw(seed: u64) -> (usize, Vec<TimesliceJob>) {
    let mut rng = Rng::new(seed);
    let (streams, queues) = (power(&mut rng, STREAMS_LOG2_MAX), power(&mut rng, QUEUES_LOG2_MAX));
    let queues = queues.min(streams) as usize;
    let (only, alike) = (rng.below(3), rng.below(4) == 0);
    let mut jobs: Vec<TimesliceJob> = Vec::new();
    for number in 0..streams {
        let first = (number + 1) * (2 * RANGE_SECTORS) + rng.below(RANGE_SECTORS / 8) * 8;
        let stream = number as u32 + 1;
        let queue = number as usize % queues;
        if let Some(like) = jobs.first().filter(|_| alike) {
            jobs.push(TimesliceJob { first, stream, queue, ..*like });
            continue;
        }
        let writes = match only {
            0 => false,
            1 => true,
            _ => rng.below(2) == 0,
        };
        let sectors = 8 * power(&mut rng, SIZE_LOG2_MAX) as u32;
        let depth = power(&mut rng, DEPTH_LOG2_MAX) as usize;
        jobs.push(TimesliceJob {
            op: if writes { Op::Write } else { Op::Read },
            random: rng.below(2) == 0,
            range_sectors: RANGE_SECTORS,
            queue,
            ..TimesliceJob::in_a_row(stream, first, sectors, depth)
        });
    }
    (queues, jobs)
}

/// What the set is, in words.
fn told(queues: usize, jobs: &[TimesliceJob]) -> String {
    let job = |job: &TimesliceJob| {
        let (op, kib) = (if job.op == Op::Read { "r" } else { "w" }, job.sectors / 2);
        format!("{op}{}{kib}k*{}", if job.random { "?" } else { "" }, job.depth)
    };
    let some: Vec<_> = jobs.iter().take(6).map(job).collect();
    let more = if jobs.len() > some.len() { ", ..." } else { "" };
    format!("{} streams, {queues} queues: {}{more}", jobs.len(), some.join(", "))
}

fn tallies(scene: TimesliceScene, jobs: &[TimesliceJob]) -> io::Result<Vec<SubmitterTally>> {
    let mut jobs = jobs.to_vec();
    let mut submitters: Vec<&mut dyn TimesliceSubmitter> = Vec::new();
    submitters.extend(jobs.iter_mut().map(|job| job as _));
    run(scene, &mut submitters)
}

/// Figures of a set.
#[derive(Clone, Debug)]
struct DrawnFigures {
    /// Work with `fair` over that with the better of the others.
    work: f64,
    /// Longest wait with `fair`, and with no scheduler, ms.
    longest_ms: [f64; 2],
    told: String,
}

fn measure(device: DrawnDevice, seed: u64, most: &mut BTreeMap<JobKind, f64>) -> io::Result<DrawnFigures> {
    let (queues, jobs) = draw(seed);
    for job in &jobs {
        if let Entry::Vacant(entry) = most.entry(kind(job)) {
            let alone = TimesliceJob { depth: FULL_DEPTH, queue: 0, ..*job };
            let scene = device.scene(SchedulerConfig::None, 1, seed);
            entry.insert(tallies(scene, &[alone])?[0].ios_per_s());
        }
    }
    let run = |scheduler| {
        let tallies = tallies(device.scene(scheduler, queues, seed), &jobs)?;
        let work = jobs.iter().zip(&tallies).map(|(job, tally)| tally.ios_per_s() / most[&kind(job)]).sum::<f64>();
        let longest_ns = tallies.iter().filter_map(|tally| tally.percentile_ns(100.0)).max();
        Ok::<_, io::Error>((work, longest_ns.unwrap_or(0) as f64 / MS as f64))
    };
    let fair = run(SchedulerConfig::Fair(FairConfig::default()))?;
    let none = run(SchedulerConfig::None)?;
    let deadline = run(SchedulerConfig::Deadline(DeadlineConfig::default()))?;
    let work = fair.0 / none.0.max(deadline.0);
    Ok(DrawnFigures { work, longest_ms: [fair.1, none.1], told: format!("set {seed}: {}", told(queues, &jobs)) })
}

/// Sets with the seeds from `seed` on, on each device.
pub(super) fn part(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    let sets = (length.runs / SETS_SHARE).max(1);
    let mut part = Part {
        name: "drawn",
        title: format!("{sets} drawn sets on each device: work with fair over that of the better of none and deadline"),
        columns: vec![
            column("least", "least", 3),
            column("median", "median", 3),
            column("most", "most", 3),
            column("below_percent", "below goal, %", 0),
            column("longest_ms", "longest ms", 0),
            column("longest_none_ms", "with none", 0),
        ],
        drawn: Drawn { bar: "least", deviation: "", post: "" },
        ..Part::default()
    };
    for device in DrawnDevice::ALL {
        let mut most = BTreeMap::new();
        let all = (seed..seed + sets).map(|seed| measure(device, seed, &mut most)).collect::<io::Result<Vec<_>>>()?;
        let mut sets = all.iter().collect::<Vec<_>>();
        sets.sort_by(|one, other| one.work.total_cmp(&other.work));
        let [least, median, best] = [0, sets.len() / 2, sets.len() - 1].map(|at| sets[at].work);
        let below = sets.iter().filter(|set| set.work < device.goal()).count() as f64 / sets.len() as f64;
        let longest = |at: usize| all.iter().map(|set| set.longest_ms[at]).fold(0.0, f64::max);
        let values = [least, median, best, below * 100.0, longest(0), longest(1)];
        part.row(device.name(), values.map(Some));
        part.notes.push(format!("{}, the least: {}", device.name(), sets[0].told));
        part.at_least("work of each drawn set", least, device.goal(), device.name());
    }
    part.notes.push(
        "r, w: reads, writes; ?: anywhere; *: depth. Work: of each stream what the device does of its kind".into(),
    );
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_large_writers_is_not_taken_for_a_disk() {
        let set = measure(DrawnDevice::Path, 7, &mut BTreeMap::new()).unwrap();
        assert!(set.work > FLASH_WORK && set.longest_ms[0] < 2.0 * set.longest_ms[1], "{set:?}");
    }

    /// Many steps of depth, each of which loses little, lost 8 % together.
    #[test]
    fn a_path_read_by_many_streams_keeps_the_depth_that_it_needs() {
        let set = measure(DrawnDevice::Path, 241, &mut BTreeMap::new()).unwrap();
        assert!(set.work > FLASH_WORK, "{set:?}");
    }

    #[test]
    fn flash_behind_queues_that_wait_for_each_other_is_not_taken_for_a_disk() {
        let set = measure(DrawnDevice::NewFlash, 9, &mut BTreeMap::new()).unwrap();
        assert!(set.work > FLASH_WORK && set.longest_ms[0] < 100.0, "{set:?}");
    }

    /// Readers with deep queues, anywhere and in a row, behind four queues.
    #[test]
    fn a_disk_that_sorts_deep_queues_is_not_taken_for_flash() {
        let set = measure(DrawnDevice::Disk, 24, &mut BTreeMap::new()).unwrap();
        assert!(set.work > DISK_WORK, "{set:?}");
    }

    /// The tenure of a queue ends within a turn of every second one of its streams.
    #[test]
    fn streams_of_two_queues_on_a_disk_have_equal_shares() {
        let mut scene = DrawnDevice::Disk.scene(SchedulerConfig::Fair(FairConfig::default()), 2, 1);
        scene.until_ns = scene.from_ns + 20 * S;
        let reader = |at: u32| TimesliceJob {
            queue: at as usize % 2,
            ..TimesliceJob::in_a_row(at + 1, u64::from(at) * 2 * RANGE_SECTORS, 256, 1)
        };
        let done: Vec<_> = tallies(scene, &(0..8).map(reader).collect::<Vec<_>>())
            .unwrap()
            .iter()
            .map(SubmitterTally::ios_per_s)
            .collect();
        let mean = done.iter().sum::<f64>() / 8.0;
        assert!(done.iter().all(|rate| (0.9..1.1).contains(&(rate / mean))), "{done:.0?}");
    }

    /// One writes 64 KiB anywhere, which fills the cache of a disk in a moment and takes long to destage; the other
    /// writes in a row.
    #[test]
    fn who_writes_into_the_cache_of_a_disk_pays_for_what_the_disk_does() {
        for queues in [1, 2] {
            let scene = DrawnDevice::Disk.scene(SchedulerConfig::Fair(FairConfig::default()), queues, 1);
            let writer = |random, sectors, depth| TimesliceJob {
                op: Op::Write,
                random,
                range_sectors: RANGE_SECTORS,
                ..TimesliceJob::in_a_row(1, 2 * RANGE_SECTORS, sectors, depth)
            };
            let row =
                TimesliceJob { first: 6 * RANGE_SECTORS, stream: 2, queue: queues - 1, ..writer(false, 2048, 16) };
            let jobs = [writer(true, 128, 16), row];
            let alone = |job: TimesliceJob| {
                let scene = DrawnDevice::Disk.scene(SchedulerConfig::None, 1, 1);
                tallies(scene, &[TimesliceJob { depth: FULL_DEPTH, queue: 0, ..job }]).unwrap()[0].ios_per_s()
            };
            let done = tallies(scene, &jobs).unwrap();
            let parts: Vec<_> = jobs.iter().zip(&done).map(|(job, tally)| tally.ios_per_s() / alone(*job)).collect();
            // Shares by time alone were 0.9 and 0.1.
            assert!(parts.iter().all(|part| (0.35..0.65).contains(part)), "{queues} queues: {parts:.3?}");
        }
    }

    #[test]
    fn random_writers_into_the_cache_of_a_disk_have_their_weights() {
        for (sectors, depth, queues) in [(8, 4, 1), (8, 64, 2), (128, 4, 2), (128, 64, 1)] {
            let writer = |stream, queue| TimesliceJob {
                op: Op::Write,
                random: true,
                range_sectors: RANGE_SECTORS,
                queue,
                ..TimesliceJob::in_a_row(stream, u64::from(stream) * 2 * RANGE_SECTORS, sectors, depth)
            };
            // Of submitters in one queue, or of two queues.
            let mut config = FairConfig::default();
            config.weights[0] = (2, 300);
            let mut scene = DrawnDevice::Disk.scene(SchedulerConfig::Fair(config), queues, 1);
            if queues > 1 {
                config = FairConfig { weight: 300, ..FairConfig::default() };
                scene.queues[1].scheduler = SchedulerConfig::Fair(config);
            }
            let done = tallies(scene, &[writer(1, 0), writer(2, queues - 1)]).unwrap();
            let [one, other] = [0, 1].map(|at| done[at].ios_per_s());
            let share = one / (one + other) * 4.0;
            assert!((0.9..1.1).contains(&share), "{sectors} sectors, depth {depth}, {queues} queues: {share:.3}");
        }
    }
}
