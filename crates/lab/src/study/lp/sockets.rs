//! The policies in real time: two NVMe/TCP targets on loopback ports, each a daemon of its own, and the real host with
//! both as paths of one disk. Beside them the simulation of the same paths.
//!
//! The delay is injected in the target: its device completes each read after a drawn time of milliseconds, so that
//! neither the sockets nor a busy machine decide. The depth of the export limits the reads that are served at one time,
//! as the channels of a simulated path do; more of them wait in the target.
//!
//! All policies take turns, round by round, each with new connections: a disturbance affects all, and what a policy
//! learns it learns in each round, as in the simulation.

use std::fmt::Display;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use blkyard::Device;
use blkyard_mpath::PolicyKind;
use blkyard_mq::OpClass;
use blkyard_os::Signals;
use blkyard_sim::PathModel;

use super::agreement::{PolicyFigures, PolicyRuns, part};
use super::rig::{Chooser, PathScene, play};
use super::scenes::{MS, US};
use crate::bench::{self, BenchArgs};
use crate::study::StudyError;
use crate::study::folder::Folder;
use crate::study::parts::Part;
use crate::study::process::StudyProcess;

/// Reads that each path serves at one time.
const CHANNELS: u32 = 8;
/// Mean service times of the paths, us: 1 to 1.5.
const SERVICE_US: [u64; 2] = [4000, 6000];
/// Deviation of a service time, per cent of the mean. The target draws it normal, the simulation lognormal.
const JITTER_PERCENT: u64 = 15;
/// Scenes: reads in flight. The first leaves a quarter of the channels idle; the second has half as many again as there
/// are channels.
const SCENES: [(&str, u64); 2] = [("12 readers", 12), ("24 readers", 24)];
/// Simulated runs of each policy, which cost little.
const SIMULATED_RUNS: u64 = 25;
/// Name of the subsystem. Both targets have the same, so that a host takes them for two paths to one disk.
const NQN: &str = "nqn.2026-11.io.blkyard:study";
/// First controller identifier of the second target: those of a subsystem differ.
const SECOND_IDS: u64 = 2001;

/// Time limit for a target's start, and for a command to it, on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// Interval of the checks.
const READY_LOOK: Duration = Duration::from_millis(10);

/// How much is run.
#[derive(Clone, Copy, Debug)]
pub(super) struct SocketLength {
    rounds: u64,
    /// Length of each run.
    run_ms: u64,
}

impl SocketLength {
    pub(super) fn new(quick: bool) -> SocketLength {
        if quick { SocketLength { rounds: 3, run_ms: 300 } } else { SocketLength { rounds: 5, run_ms: 600 } }
    }

    /// Seconds, connecting included.
    fn about_s(self) -> u64 {
        let runs = self.rounds * (SCENES.len() * PolicyKind::ALL.len()) as u64;
        (runs * (self.run_ms + 50)).div_ceil(1000) + 1
    }
}

/// Starts the targets and measures all policies in turn.
///
/// # Errors
/// A target cannot be started or serves badly, or a signal came.
pub(super) fn measure(length: SocketLength, seed: u64, say: impl Fn(String)) -> Result<Vec<Part>, StudyError> {
    // Before there is anybody to leave behind: from here on a signal ends the run.
    Signals::install()?;
    say(format!("about {} s", length.about_s()));
    let folder = Folder::new("paths")?;
    let targets = [DelayedTarget::start(0, folder.path())?, DelayedTarget::start(1, folder.path())?];
    let mut parts = Vec::new();
    for (name, readers) in SCENES {
        say(format!("real time: {name} ..."));
        let scene = scene(readers, length);
        let run = |kind: PolicyKind| PolicyRuns { name: kind.name(), real: Vec::new(), simulated: Vec::new() };
        let mut policies = PolicyKind::ALL.map(run);
        for round in 0..length.rounds {
            let seed = seed.wrapping_add(round);
            for (kind, runs) in PolicyKind::ALL.into_iter().zip(&mut policies) {
                runs.real.push(run_real(&targets, kind, readers, length, seed)?);
            }
        }
        for (kind, runs) in PolicyKind::ALL.into_iter().zip(&mut policies) {
            let seeds = (0..SIMULATED_RUNS).map(|run| seed.wrapping_add(run));
            runs.simulated = seeds.map(|seed| simulate(&scene, kind, seed)).collect();
        }
        let title = format!(
            "{name} of 4 KiB, two paths of {CHANNELS} channels, service {} and {} ms with a deviation of {JITTER_PERCENT} %: \
             median of {} rounds of {} ms",
            SERVICE_US[0] / 1000,
            SERVICE_US[1] / 1000,
            length.rounds,
            length.run_ms
        );
        let notes = vec![
            "sim.: the same policies over model paths in virtual time, which have no sockets, timers and CPUs".into(),
            "fast %: share of the faster path; noise %: two standard errors of the rounds' mean latencies".into(),
        ];
        parts.push(part(name, title, &policies, notes));
    }
    Ok(parts)
}

/// The paths as the simulation has them.
fn scene(readers: u64, length: SocketLength) -> PathScene {
    let path = |service_us: u64| PathModel {
        channels: CHANNELS,
        sigma_milli: (JITTER_PERCENT * 10) as u32,
        ..PathModel::new(0, service_us * US)
    };
    PathScene {
        sizes: vec![4096],
        starts_at_once: true,
        ..PathScene::new(SERVICE_US.map(path).to_vec(), readers, length.run_ms * MS)
    }
}

fn simulate(scene: &PathScene, kind: PolicyKind, seed: u64) -> PolicyFigures {
    let run = play(scene, Chooser::Policy(kind), seed);
    let all: u64 = run.by_path.iter().sum();
    PolicyFigures {
        iops: run.iops,
        mean_us: run.mean_us,
        stdev_us: run.stdev_us,
        fast: run.by_path[0] as f64 / all as f64,
    }
}

/// Connects, runs the load and leaves.
fn run_real(
    targets: &[DelayedTarget; 2],
    kind: PolicyKind,
    readers: u64,
    length: SocketLength,
    seed: u64,
) -> Result<PolicyFigures, StudyError> {
    let name = format!(
        "multipath:nvme-tcp://{}/{NQN},nvme-tcp://{}/{NQN}?policy={}&queues=1",
        targets[0].address,
        targets[1].address,
        kind.name()
    );
    let device = Device::open(&name).map_err(fault)?;
    let args = BenchArgs {
        runtime: Some(format!("{}ms", length.run_ms)),
        ..BenchArgs::random_reads(name, readers as u32, seed)
    };
    let report = bench::measure(&args, &device).map_err(fault)?;
    if report.is_cut_short() {
        return Err(StudyError::Interrupted);
    }
    if !report.is_good() {
        return Err(fault(format!("{} reads failed with {}", report.errors(), kind.name())));
    }
    let ios: Vec<u64> = device.paths().iter().map(|path| path.counters.ios).collect();
    let reads = report.summary.of(OpClass::Read);
    Ok(PolicyFigures {
        iops: report.iops(),
        mean_us: reads.mean_ns() / 1e3,
        stdev_us: reads.stddev_ns() / 1e3,
        fast: ios[0] as f64 / ios.iter().sum::<u64>() as f64,
    })
}

fn fault(why: impl Display) -> StudyError {
    StudyError::Served(format!("NVMe/TCP on loopback: {why}"))
}

/// A daemon that serves one path.
struct DelayedTarget {
    _process: StudyProcess,
    address: String,
}

impl DelayedTarget {
    /// Starts the target of this path, and limits the reads that it serves at one time.
    fn start(path: usize, folder: &Path) -> Result<DelayedTarget, StudyError> {
        let program = std::env::current_exe()?;
        let control = folder.join(format!("control{path}"));
        let mut serve = Command::new(&program);
        serve.arg("serve").arg("--control").arg(&control).args(serve_words(path));
        let output = folder.join(format!("target{path}"));
        let mut process = StudyProcess::start(&mut serve, output)?;
        let port = await_port(&mut process)?;
        let mut set = Command::new(program);
        set.arg("set").arg("--control").arg(&control).args(["export:0", &format!("depth={CHANNELS}")]);
        let mut set = StudyProcess::start(&mut set, folder.join(format!("set{path}")))?;
        let status = await_end(&mut set)?;
        if !status.success() {
            return Err(fault(format!("the depth of a target cannot be set: {}", set.said())));
        }
        Ok(DelayedTarget { _process: process, address: format!("127.0.0.1:{port}") })
    }
}

/// The options of the daemon.
fn serve_words(path: usize) -> Vec<String> {
    let us = SERVICE_US[path];
    let device = format!("model:latency?us={us}&jitter_us={}&size=64M&seed={path}", us * JITTER_PERCENT / 100);
    let ids = if path == 0 { String::new() } else { format!("&controller_ids={SECOND_IDS}") };
    let export = format!("nvme-tcp://127.0.0.1:0?nqn={NQN}&queues=4{ids}");
    ["--device", &device, "--export", &export].map(String::from).to_vec()
}

/// The port that a daemon which is ready has said how to connect to.
fn port_in(said: &str) -> Option<u16> {
    said.lines().any(|line| line == "ready").then_some(())?;
    let mut words = said.split_whitespace();
    words.find(|word| *word == "-s")?;
    words.next()?.parse().ok()
}

/// Waits until the daemon serves.
fn await_port(target: &mut StudyProcess) -> Result<u16, StudyError> {
    wait(target, "a target is not ready", |target, ended| match (port_in(&target.said()), ended) {
        (Some(port), None) => Ok(Some(port)),
        (None, None) => Ok(None),
        (_, Some(status)) => Err(fault(format!("a target ended with {status}, and said: {}", target.said()))),
    })
}

fn await_end(process: &mut StudyProcess) -> Result<ExitStatus, StudyError> {
    wait(process, "a target does not answer", |_, ended| Ok(ended))
}

fn wait<T>(
    process: &mut StudyProcess,
    what: &str,
    done: impl Fn(&StudyProcess, Option<ExitStatus>) -> Result<Option<T>, StudyError>,
) -> Result<T, StudyError> {
    let limit = Instant::now() + READY_LIMIT;
    loop {
        let ended = process.ended()?;
        if let Some(found) = done(process, ended)? {
            return Ok(found);
        }
        if Instant::now() > limit {
            return Err(fault(format!("{what} within {} s", READY_LIMIT.as_secs())));
        }
        thread::sleep(READY_LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_is_found_once_the_daemon_is_ready() {
        let said = "connect with\n  nvme connect -t tcp -a 127.0.0.1 -s 33787 -n nqn.x\n";
        assert_eq!(port_in(said), None);
        assert_eq!(port_in(&format!("{said}ready\n")), Some(33787));
        assert_eq!(port_in("ready\n"), None);
    }

    #[test]
    fn simulated_paths_have_the_times_of_the_targets() {
        let length = SocketLength::new(true);
        // One reader at a time: nothing waits for a channel.
        let one = simulate(&scene(1, length), PolicyKind::Numa, 1);
        assert!((one.mean_us / SERVICE_US[0] as f64 - 1.0).abs() < 0.1, "{one:?}");
        assert!(one.fast > 0.999, "{one:?}");
        // The channels of the faster path are its rate.
        let full = simulate(&scene(24, length), PolicyKind::Numa, 1);
        let rate = f64::from(CHANNELS) * 1e6 / SERVICE_US[0] as f64;
        assert!((full.iops / rate - 1.0).abs() < 0.1, "{full:?}");
        assert!(serve_words(1)[1].contains("us=6000&jitter_us=900"), "{:?}", serve_words(1));
    }
}
