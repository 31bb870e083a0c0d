//! Part 2: 1 to 16 sequential readers on a disk; and, for the cost of schedulers without a benefit, random readers on
//! flash.

use std::io;

use blkyard_mq::{DeadlineConfig, FairConfig, SchedulerConfig, TimesliceConfig};
use blkyard_sim::{DiskModel, FlashModel, Rng};

use super::TimesliceLength;
use super::job::TimesliceJob;
use super::parallel::posted;
use super::reader::{FileExtent, ReadAhead, Reader};
use super::rig::{S, SubmitterTally, TimesliceScene, TimesliceSubmitter, run};
use crate::study::goals::PostClaim;
use crate::study::parts::{Drawn, Part, column};

const JOBS: [u64; 5] = [1, 2, 4, 8, 16];
/// Of each file: more than any job reads in the time there is.
const FILE_SECTORS: u64 = 16 << 21;
/// Sectors between the beginnings of two files.
const APART_SECTORS: u64 = 40 << 21;
/// Time in which the start-up phase ends.
const WARM_SECONDS: u64 = 2;
/// Gain of time slices over none with 8 jobs, percent, in the post.
const POST_GAIN: f64 = 40.0;

/// Bytes per second of so many readers, and the p99 of their windows, ns.
fn readers(
    jobs: u64,
    scheduler: SchedulerConfig,
    length: TimesliceLength,
    seed: u64,
) -> io::Result<(f64, Option<u64>)> {
    let mut scene = TimesliceScene::disk(DiskModel::DESKTOP_2012, scheduler, seed);
    (scene.from_ns, scene.until_ns) = (WARM_SECONDS * S, (WARM_SECONDS + length.seconds) * S);
    let mut rng = Rng::new(seed);
    let mut reader = |number| {
        let first = number * APART_SECTORS + rng.below(APART_SECTORS / 16) * 8;
        let file = FileExtent::new(first, FILE_SECTORS, &mut |most| rng.below(most + 1));
        Reader::new(number as u32 + 1, file, ReadAhead::USUAL, 0)
    };
    let mut readers: Vec<Reader> = (0..jobs).map(&mut reader).collect();
    let mut submitters: Vec<&mut dyn TimesliceSubmitter> = readers.iter_mut().map(|reader| reader as _).collect();
    let tallies = run(scene, &mut submitters)?;
    let rate = tallies.iter().map(SubmitterTally::bytes_per_s).sum();
    Ok((rate, longest_ns(&tallies)))
}

/// The worst p99 of these submitters, ns. `None` if one has no samples.
fn longest_ns(tallies: &[SubmitterTally]) -> Option<u64> {
    let each: Option<Vec<u64>> = tallies.iter().map(|tally| tally.percentile_ns(99.0)).collect();
    each?.into_iter().max()
}

/// Readers of files on a disk.
pub(super) fn disk(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    let schedulers = [
        ("none", SchedulerConfig::None),
        ("timeslice as posted, 250 us", posted(250)),
        ("timeslice, 20 ms", SchedulerConfig::Timeslice(TimesliceConfig::default())),
        ("fair", SchedulerConfig::Fair(FairConfig::default())),
        ("fair, rounds of 1 s", SchedulerConfig::Fair(FairConfig { target_ms: 1000, ..FairConfig::default() })),
    ];
    let mut part = Part {
        name: "jobs",
        title: format!("1 to 16 jobs, each reading a file of its own from a disk, {} s", length.seconds),
        columns: vec![
            column("mb_per_s", "MB/s", 1),
            column("gain_percent", "gain %", 1),
            column("post_gain_percent", "post", 0),
            column("p99_ms", "p99 ms", 0),
        ],
        drawn: Drawn { bar: "mb_per_s", deviation: "", post: "" },
        notes: vec!["p99: of a window of 512 KiB, the longest of any job".into()],
        ..Part::default()
    };
    for jobs in JOBS {
        let mut none = f64::NAN;
        for (name, scheduler) in schedulers {
            let (rate, p99_ns) = readers(jobs, scheduler, length, seed)?;
            if scheduler == SchedulerConfig::None {
                none = rate;
            }
            let gain = (rate / none - 1.0) * 100.0;
            let is_posts = jobs == 8 && matches!(scheduler, SchedulerConfig::Timeslice(_));
            let is_posted = is_posts && name.contains("as posted");
            if is_posts
                && !is_posted
                && let Some(claim) = part.claims.last_mut()
            {
                claim.found = format!("{}; beside it, not of the post: {gain:.0} % with {name}", claim.found);
            }
            if is_posted {
                part.claims.push(PostClaim {
                    what: format!("8 jobs read at least {POST_GAIN} % more with time slices than without"),
                    found: format!("{gain:.0} % with {name}"),
                    verdict: (gain >= POST_GAIN).into(),
                    reason: "".into(),
                });
            }
            let post = is_posted.then_some(POST_GAIN);
            part.row(
                format!("{jobs} jobs, {name}"),
                [Some(rate / 1e6), Some(gain), post, p99_ns.map(|ns| ns as f64 / 1e6)],
            );
        }
    }
    Ok(part)
}

/// Random readers on flash: no gain possible, only a loss.
pub(super) fn flash(length: TimesliceLength, seed: u64) -> io::Result<Part> {
    let mut part = Part {
        name: "jobs_flash",
        title: "16 jobs of random reads of 4 KiB from flash, depth 16 each, one queue of 128 tags".into(),
        columns: vec![column("kiops", "kIOPS", 1), column("to_none", "to none", 3), column("p99_us", "p99 us", 0)],
        drawn: Drawn { bar: "to_none", deviation: "", post: "" },
        ..Part::default()
    };
    let mut none = f64::NAN;
    for scheduler in [
        SchedulerConfig::None,
        SchedulerConfig::Deadline(DeadlineConfig::default()),
        SchedulerConfig::Timeslice(TimesliceConfig::default()),
        SchedulerConfig::Fair(FairConfig::default()),
    ] {
        let mut scene = TimesliceScene { seed, ..TimesliceScene::flash(FlashModel::NVME_2018, 1, 128, scheduler) };
        (scene.from_ns, scene.until_ns) = (S / 2, S / 2 + length.seconds * S / 20);
        let mut jobs: Vec<TimesliceJob> =
            (0..16).map(|job| TimesliceJob::anywhere(job + 1, u64::from(job) << 24, 1 << 24, 16)).collect();
        let mut submitters: Vec<&mut dyn TimesliceSubmitter> = jobs.iter_mut().map(|job| job as _).collect();
        let tallies = run(scene, &mut submitters)?;
        let kiops = tallies.iter().map(SubmitterTally::ios_per_s).sum::<f64>() / 1e3;
        let p99_us = longest_ns(&tallies).map(|ns| ns as f64 / 1e3);
        if scheduler == SchedulerConfig::None {
            none = kiops;
        }
        part.row(scheduler.name(), [Some(kiops), Some(kiops / none), p99_us]);
        if matches!(scheduler, SchedulerConfig::Fair(_)) {
            part.at_least("IOPS on flash, fair/none", kiops / none, 0.98, "16 jobs, depth 16");
        }
    }
    Ok(part)
}
