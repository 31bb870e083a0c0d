//! In real time, over vhost-user: the load of `bench` through our driver, and a back-end in a separate process.
//!
//! Every back-end runs all the time, with the grid's largest number of queues, and sleeps while it is not measured; the
//! driver opens as many queues as the point needs. A window is one point on one back-end, and all take turns, so that a
//! disturbance affects all. Jobs and back-ends have their default waiting.
//!
//! A missing back-end of another project is named, with the cure. Ours must exist.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use blkyard::{Device, DeviceError};
use blkyard_os::Signals;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Serialize;

use super::rig::{DEPTH, STORE_BYTES};
use super::{COUNTS, QUEUES_MAX};
use crate::bench::{self, BenchArgs, Pattern};
use crate::floor::Samples;
use crate::study::StudyError;
use crate::study::folder::Folder;
use crate::study::goals::GoalVerdict;
use crate::study::process::StudyProcess;

/// Time limit for a back-end's start, which only binds a socket, on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// Interval of the checks.
const READY_LOOK: Duration = Duration::from_millis(10);

/// A back-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BackEnd {
    /// Our daemon, on memory.
    Blkyard,
    /// qemu-storage-daemon, on a file in memory, through its usual threads.
    QemuFile,
    /// qemu-storage-daemon, on its null device, which fills zeroes in.
    QemuNull,
}

pub(crate) const BACK_ENDS: [BackEnd; 3] = [BackEnd::Blkyard, BackEnd::QemuFile, BackEnd::QemuNull];

/// How long.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct ServedWindows {
    pub(crate) count: usize,
    pub(crate) window_ms: u64,
}

/// Of several windows.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    /// 10th and 90th percentile.
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Spread {
    pub(super) fn of(samples: &Samples) -> Spread {
        let [low, median, high] = [10.0, 50.0, 90.0].map(|percent| samples.percentile(percent));
        Spread { median, low, high }
    }

    /// Whether a value of this spread is at least the limit: decided only if both ends agree.
    pub(super) fn at_least(&self, limit: f64) -> GoalVerdict {
        if self.low >= limit {
            GoalVerdict::Met
        } else if self.high >= limit {
            GoalVerdict::Undecided
        } else {
            GoalVerdict::Missed
        }
    }
}

/// Result of a back-end.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct BackendTable {
    pub(crate) back_end: BackEnd,
    #[serde(flatten)]
    pub(crate) found: Found,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Found {
    Measured(Box<MeasuredBackend>),
    /// Cause and cure of a missing result.
    NotMeasured(String),
}

/// Rates of a back-end.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct MeasuredBackend {
    pub(crate) iops: Grid<Spread>,
    /// The post's, window by window.
    pub(crate) ratios: [Spread; 3],
}

impl MeasuredBackend {
    fn of(windows: &[Grid<f64>]) -> MeasuredBackend {
        let over_windows = |value: &dyn Fn(&Grid<f64>) -> f64| {
            let mut samples = Samples::default();
            windows.iter().for_each(|grid| samples.push(value(grid)));
            Spread::of(&samples)
        };
        let places = [0, 1, 2];
        let iops = places.map(|jobs| places.map(|queues| over_windows(&|grid| grid[jobs][queues])));
        // Of one queue and of two.
        let best = |grid: &Grid<f64>, queues: usize| grid.iter().map(|of_jobs| of_jobs[queues]).fold(0.0, f64::max);
        let ratios = [
            over_windows(&|grid| grid[1][1] / grid[1][0]),
            over_windows(&|grid| grid[2][1] / grid[2][0]),
            over_windows(&|grid| best(grid, 1) / best(grid, 0)),
        ];
        MeasuredBackend { iops, ratios }
    }
}

/// By jobs, then by queues, in the order of [`COUNTS`].
pub(crate) type Grid<T> = [[T; COUNTS.len()]; COUNTS.len()];

/// Starts the back-ends and measures them in turn.
///
/// # Errors
/// Our own daemon cannot be started or serves badly, or a signal came.
pub(super) fn measure(qemu: &Path, windows: ServedWindows, seed: u64) -> Result<Vec<BackendTable>, StudyError> {
    // Before there is anybody to leave behind: from here on a signal ends the window.
    Signals::install()?;
    let folder = Folder::new("served")?;
    let mut started = Vec::new();
    for back_end in BACK_ENDS {
        let served = match RunningBackend::start(back_end, qemu, folder.path(), seed) {
            Err(StudyError::Served(why)) if back_end != BackEnd::Blkyard => Err(why),
            server => Ok(server?),
        };
        started.push((back_end, served));
    }
    let mut grids = vec![Vec::new(); started.len()];
    // The first round warms up.
    for round in 0..=windows.count {
        let mut grid = vec![Grid::<f64>::default(); started.len()];
        for (jobs_at, jobs) in COUNTS.into_iter().enumerate() {
            for (queues_at, queues) in COUNTS.into_iter().enumerate() {
                for ((_, server), grid) in started.iter().zip(&mut grid) {
                    if let Ok(server) = server {
                        grid[jobs_at][queues_at] =
                            server.window(jobs, queues, windows.window_ms, seed ^ round as u64)?;
                    }
                }
            }
        }
        if round > 0 {
            grids.iter_mut().zip(grid).for_each(|(grids, grid)| grids.push(grid));
        }
    }
    let table = |((back_end, server), grids): ((BackEnd, Result<RunningBackend, String>), Vec<Grid<f64>>)| {
        let found = server.map_or_else(Found::NotMeasured, |_| Found::Measured(Box::new(MeasuredBackend::of(&grids))));
        BackendTable { back_end, found }
    };
    Ok(started.into_iter().zip(grids).map(table).collect())
}

impl BackEnd {
    fn is_ours(self) -> bool {
        self == BackEnd::Blkyard
    }

    /// For people.
    pub(crate) fn name(self) -> &'static str {
        match self {
            BackEnd::Blkyard => "blkyard serve, memory",
            BackEnd::QemuFile => "qemu-storage-daemon, file in memory",
            BackEnd::QemuNull => "qemu-storage-daemon, null-co zeroes",
        }
    }

    /// The command that serves at this socket. The file holds its data, if any, and is removed with it.
    fn command(self, qemu: &Path, socket: &Path) -> io::Result<(Command, Option<File>)> {
        if self.is_ours() {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["serve", "--control", "none", "--device", &format!("ram:{STORE_BYTES}"), "--export"]);
            command.arg(format!("vhost-user-blk:{}?queues={QUEUES_MAX}", socket.display()));
            return Ok((command, None));
        }
        let (node, store) = if self == BackEnd::QemuFile {
            // Pages of tmpfs without a mount.
            let store = File::from(memfd_create("blkyard-study", MemfdFlags::CLOEXEC)?);
            store.set_len(STORE_BYTES)?;
            let path = format!("/proc/{}/fd/{}", std::process::id(), store.as_raw_fd());
            (format!("driver=file,filename={path},node-name=disk"), Some(store))
        } else {
            (format!("driver=null-co,size={STORE_BYTES},read-zeroes=on,node-name=disk"), None)
        };
        let export = format!(
            "vhost-user-blk,id=export,node-name=disk,iothread=io,writable=on,num-queues={QUEUES_MAX},addr.type=unix,addr.path={}",
            socket.display()
        );
        let mut command = Command::new(qemu);
        command.args(["--object", "iothread,id=io", "--blockdev", &node, "--export", &export]);
        Ok((command, store))
    }

    fn fault(self, why: impl Display) -> StudyError {
        StudyError::Served(format!("{}: {why}", self.name()))
    }
}

/// A back-end that runs.
struct RunningBackend {
    back_end: BackEnd,
    socket: PathBuf,
    _running: StudyProcess,
    _store: Option<File>,
}

impl RunningBackend {
    /// Starts it, and writes its disk once: unwritten data would not be read from memory.
    fn start(back_end: BackEnd, qemu: &Path, folder: &Path, seed: u64) -> Result<RunningBackend, StudyError> {
        let socket = folder.join(format!("{back_end:?}.sock"));
        let (mut command, store) = back_end.command(qemu, &socket)?;
        let mut running = start(back_end, &mut command, socket.with_extension("log"))?;
        await_ready(back_end, &mut running, &socket)?;
        let server = RunningBackend { back_end, socket, _running: running, _store: store };
        let all = BenchArgs { rw: Pattern::Write, bs: "1m".into(), iodepth: 8, ..load(&server.socket, 1, 1, seed) };
        server.measure(&all)?;
        Ok(server)
    }

    /// IOPS of so many jobs on so many queues.
    fn window(&self, jobs: usize, queues: usize, window_ms: u64, seed: u64) -> Result<f64, StudyError> {
        let report = self.measure(&BenchArgs {
            runtime: Some(format!("{window_ms}ms")),
            ..load(&self.socket, jobs, queues, seed)
        })?;
        Ok(report.iops())
    }

    /// Attaches, runs the load and leaves.
    fn measure(&self, args: &BenchArgs) -> Result<bench::BenchReport, StudyError> {
        let device = attach(&self.socket).map_err(|error| self.back_end.fault(error))?;
        let report = bench::measure(args, &device).map_err(|error| self.back_end.fault(error))?;
        if report.is_cut_short() {
            return Err(StudyError::Interrupted);
        }
        if !report.is_good() {
            let (errors, why) = (report.errors(), report.violations.join("; "));
            return Err(self.back_end.fault(format!("{errors} I/Os failed: {why}")));
        }
        Ok(report)
    }
}

fn attach(socket: &Path) -> Result<Device, DeviceError> {
    Device::open(&device_name(socket))
}

fn device_name(socket: &Path) -> String {
    format!("vhost-user:{}", socket.display())
}

/// The post's load.
fn load(socket: &Path, jobs: usize, queues: usize, seed: u64) -> BenchArgs {
    BenchArgs {
        numjobs: jobs as u32,
        queues: Some(queues as u32),
        ..BenchArgs::random_reads(device_name(socket), DEPTH as u32, seed)
    }
}

fn start(back_end: BackEnd, command: &mut Command, log: PathBuf) -> Result<StudyProcess, StudyError> {
    StudyProcess::start(command, log).map_err(|error| {
        let program = command.get_program().display();
        let cure = match error.kind() {
            ErrorKind::NotFound if !back_end.is_ours() => {
                "; it comes with Debian's package qemu-utils; name one that is elsewhere with --qemu-storage-daemon"
            }
            _ => "",
        };
        back_end.fault(format!("{program} cannot be started: {error}{cure}"))
    })
}

fn await_ready(back_end: BackEnd, process: &mut StudyProcess, socket: &Path) -> Result<(), StudyError> {
    let limit = Instant::now() + READY_LIMIT;
    while let Err(error) = attach(socket) {
        if let Some(status) = process.ended()? {
            return Err(back_end.fault(format!("it ended with {status}, and said: {}", process.said())));
        }
        if Instant::now() > limit {
            return Err(back_end.fault(error));
        }
        thread::sleep(READY_LOOK);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_those_of_each_window_and_not_of_the_medians() {
        let window = |one, two| [[one, two, 0.0]; COUNTS.len()];
        // A machine that is twice as fast in the second window, where two queues are worth less.
        let MeasuredBackend { iops, ratios } =
            MeasuredBackend::of(&[window(10.0, 20.0), window(20.0, 30.0), window(5.0, 15.0)]);
        assert_eq!((iops[0][0].median, iops[2][1].median), (10.0, 20.0));
        assert_eq!(ratios.map(|ratio| (ratio.low, ratio.median, ratio.high)), [(1.5, 2.0, 3.0); 3]);
    }

    #[test]
    fn every_back_end_serves_as_many_queues_as_the_grid_has() {
        for back_end in BACK_ENDS {
            let (command, _) = back_end.command(Path::new("qemu"), Path::new("/x.sock")).unwrap();
            let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
            assert!(words.iter().any(|word| word.contains("queues=4") && word.contains("/x.sock")), "{words:?}");
        }
    }
}
