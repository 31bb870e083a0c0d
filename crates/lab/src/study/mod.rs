//! `blkyard study`: repetition of a published measurement. The post's figures and ours are printed beside each other,
//! then each goal with its verdict.
//!
//! `mq-vs-bio` is the first: the NVMe driver moves from bios to the multi-queue core (M. Bjørling, linux-nvme, October
//! 2013). Each mode's own code is measured step by step on this machine (`measure.rs`, `wakes.rs`) and then run on a
//! model of the post's device and host in virtual time, which charges each step its measured cost (`world.rs`). So
//! latencies contain the cost of the code and no noise of the machine.
//!
//! `multi-vq` is the second: every virtqueue of a virtio-blk disk becomes a hardware queue (M. Lei, linux-kernel, June
//! 2014); see `vq/`.
//!
//! `time-slice` is the third: streams take turns at a disk (A. Herrmann, linux-kernel, February 2016); see `ts/`.
//!
//! `premapped` is the fourth: buffers are registered and mapped once for many I/Os (K. Busch, linux-nvme, August 2022);
//! see `premapped/`.
//!
//! `latency-policy` is the fifth: a path is chosen by its latency (H. Reinecke, linux-nvme, April 2024); see `lp/`.

mod bio;
mod costs;
mod end;
mod folder;
mod goals;
mod grid;
mod grid_claims;
mod grid_goals;
mod instructions;
mod job_flags;
mod judge;
mod lp;
mod measure;
mod meter;
mod mode_rig;
mod mq;
mod pairs;
mod parts;
mod post;
mod premapped;
mod process;
mod report;
mod single;
mod step_instructions;
mod svg;
mod tables;
mod ts;
mod unfair;
mod vq;
mod wakes;
mod world;

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use blkyard_sim::DeviceModel;
use clap::ValueEnum;

use costs::Costs;
use goals::GoalVerdict;
use grid::GridLength;
use instructions::SectionList;
use report::StudyReport;
use step_instructions::StepInstructions;

use crate::Console;
use crate::floor::cpus;

/// Command-line options of `study`.
#[derive(Clone, Debug, clap::Args)]
pub struct StudyArgs {
    /// Which claim.
    #[arg(value_enum, value_name = "NAME")]
    pub name: Study,
    /// One JSON object instead of tables.
    #[arg(long)]
    pub json: bool,
    /// Draw the figures into a file as well.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Exit with 1 if a goal is missed, and with 3 if none is missed and one is undecided: its limit lies within the
    /// noise of the runs. A goal that holds by construction is neither.
    #[arg(long)]
    pub check: bool,
    /// Finish within a minute: fewer windows, shorter runs.
    #[arg(long)]
    pub quick: bool,
    /// Execute only the sections whose instructions are counted: the study starts itself so under valgrind.
    #[arg(long, hide = true)]
    pub count_instructions: bool,
    /// Seed of all chance: places and jitter.
    #[arg(long, value_name = "SEED", default_value_t = 0x0062_6c6b_7961_7264)]
    pub seed: u64,
    /// For premapped: only read this device, with memory mapped for each I/O and once.
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// For latency-policy: only run the policies over NVMe/TCP on loopback, beside the simulation of the same paths.
    #[arg(long)]
    pub sockets: bool,
    /// For multi-vq: the other back-end that our driver is measured with.
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-storage-daemon")]
    pub qemu_storage_daemon: PathBuf,
}

/// The claims that can be run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Study {
    /// NVMe on the multi-queue core against the bio-based driver, 2013.
    MqVsBio,
    /// Several virtqueues for a virtio-blk disk against one, 2014.
    MultiVq,
    /// Time slices for streams that share a disk, 2016.
    TimeSlice,
    /// Buffers registered and mapped once, 2022.
    Premapped,
    /// A path for each I/O by its latency, 2024.
    LatencyPolicy,
}

/// Why a study was not run.
#[derive(Debug, thiserror::Error)]
pub enum StudyError {
    /// The measurement lacks a resource.
    #[error("the machine cannot be measured: {0}; free descriptors and threads and run the study again")]
    Measure(#[from] io::Error),
    /// The picture was not written.
    #[error("{path}: {error}; name a file that can be written with --svg")]
    Picture {
        /// Where to.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A measured back-end misbehaves.
    #[error("{0}")]
    Served(String),
    /// A signal ended the study.
    #[error("the study was interrupted")]
    Interrupted,
}

/// Bios out when there are to be fewer ids: the most that a queue has in the grid.
const BEYOND: usize = 2048;

/// Measurements of the costs, each from a fresh start: their differences are the noise, with that of addresses.
const MEASUREMENTS: usize = 6;

/// Runs a study and prints its report.
///
/// # Errors
/// See [`StudyError`].
pub fn run(args: &StudyArgs, console: Console) -> Result<ExitCode, StudyError> {
    let say = |what: String| {
        if !args.json {
            (console.note)(&what);
        }
    };
    if args.count_instructions {
        let mut sections = SectionList::default();
        match args.name {
            Study::MqVsBio => measure::sections(DeviceModel::NVME_2013, BEYOND, &mut sections),
            Study::Premapped => premapped::sections(args.quick, &mut sections),
            Study::MultiVq | Study::TimeSlice | Study::LatencyPolicy => {}
        }
        return Ok((console.print)(&sections.text(), ExitCode::SUCCESS));
    }
    match args.name {
        Study::MqVsBio => {
            let report = mq_vs_bio(args, say)?;
            publish(args, console, report.verdicts(), || svg::picture(&report), || report.json(), || report.text())
        }
        Study::MultiVq => {
            let report = vq::run(vq::VqLength::new(args.quick), &args.qemu_storage_daemon, args.seed, say)?;
            publish(args, console, report.verdicts(), || report.picture(), || report.json(), || report.text())
        }
        Study::Premapped if args.device.is_some() => {
            let name = args.device.as_deref().unwrap_or_default();
            let report = premapped::run_on_device(name, premapped::PremappedLength::new(args.quick))?;
            let report = if args.json { format!("{}\n", report.json()) } else { report.text() };
            Ok((console.print)(&report, ExitCode::SUCCESS))
        }
        Study::Premapped => {
            let report = premapped::run(premapped::PremappedLength::new(args.quick), say)?;
            let picture = || premapped::svg::picture(&report);
            publish(args, console, report.verdicts(), picture, || report.json(), || report.text())
        }
        Study::TimeSlice => {
            let report = ts::run(args.quick, args.seed, say)?;
            publish(args, console, report.verdicts(), || report.picture(), || report.json(), || report.text())
        }
        Study::LatencyPolicy => {
            let report = if args.sockets {
                lp::run_on_sockets(args.quick, args.seed, say)?
            } else {
                lp::run(args.quick, args.seed, say)?
            };
            publish(args, console, report.verdicts(), || report.picture(), || report.json(), || report.text())
        }
    }
}

fn mq_vs_bio(args: &StudyArgs, say: impl Fn(String)) -> Result<StudyReport, StudyError> {
    let model = DeviceModel::NVME_2013;
    let (windows, length, seconds) = if args.quick {
        (17, GridLength { ios: 30_000, rounds: 8 }, 30)
    } else {
        (67, GridLength { ios: 200_000, rounds: 25 }, 60)
    };
    say(format!("about {seconds} s if the CPUs are idle"));
    let measured: Vec<_> = (1..=MEASUREMENTS)
        .map(|number| {
            say(format!("measuring the steps of each mode, {number} of {MEASUREMENTS} ..."));
            measure(model, windows)
        })
        .collect::<io::Result<_>>()?;
    let costs = Costs::median(&measured);
    say("counting their instructions ...".into());
    let instructions = instructions::count("mq-vs-bio", args.quick).map(|sections| StepInstructions::new(&sections));
    say("virtual time: repeats with each measurement ...".into());
    let repeats = grid::repeat(model, &measured, length, args.seed);
    say("virtual time: the grid ...".into());
    let rows = grid::play(model, &costs, length, args.seed, |row| say(row.summary()));
    Ok(StudyReport::new(model, &costs, instructions, length, args.seed, rows, repeats))
}

/// Draws and prints the requested parts of a report.
fn publish(
    args: &StudyArgs,
    console: Console,
    verdicts: impl Iterator<Item = GoalVerdict>,
    picture: impl FnOnce() -> String,
    json: impl FnOnce() -> String,
    text: impl FnOnce() -> String,
) -> Result<ExitCode, StudyError> {
    if let Some(path) = &args.svg {
        std::fs::write(path, picture()).map_err(|error| StudyError::Picture { path: path.clone(), error })?;
    }
    let code = ExitCode::from(if args.check { GoalVerdict::exit_code(verdicts) } else { 0 });
    let report = if args.json { format!("{}\n", json()) } else { text() };
    Ok((console.print)(&report, code))
}

/// Measures everything on a separate thread, which is pinned to one CPU.
fn measure(model: DeviceModel, windows: usize) -> io::Result<Costs> {
    let load = load_average();
    let measuring = thread::Builder::new().spawn(move || {
        let hand_over_ns = wakes::hand_over_ns(windows)?;
        cpus::pin();
        let (sleep, ring) = wakes::sleep_and_ring(windows)?;
        let modes = measure::modes(model, BEYOND, windows);
        Ok(Costs {
            bio: modes.bio,
            single: modes.single,
            mq: modes.mq,
            mail_ns: modes.mail_ns,
            sleep,
            ring,
            hand_over_ns,
            windows,
            load,
        })
    })?;
    measuring.join().unwrap_or_else(|_| Err(io::Error::other("a measuring thread panicked")))
}

/// Load average of the last minute.
fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}
