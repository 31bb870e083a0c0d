//! The command `bench`: load on any device, through the core that serves guests, with fio's flags.
//!
//! Jobs are streams of I/O. Up to as many jobs as hardware queues, each has a private queue and lane (`own`); beyond,
//! threads share queues (`shared`). The load and its counters are the same in both (`job`). This module checks the
//! flags, sets everything up, opens the gate, waits, and sums up.
//!
//! It touches the device's data only through I/O of the jobs, and overwrites it without a question.

mod args;
mod cpu;
mod job;
mod own;
mod places;
mod progress;
mod report;
mod shared;
mod tally;
mod text;
mod verify;

#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkyard::rate::take_own_rate;
use blkyard::scheduler::take_device_scheduler;
use blkyard::spec::{Spec, SpecError};
use blkyard::{Connector, Device, DeviceError, DeviceQueue, DiskError, queue_depth};
use blkyard_mq::{ErrorCode, HwQueue, HwQueueConfig, IdlePolicy, IoError, QueueKind, RegisterError, SECTOR_SHIFT};
use blkyard_nvme::NvmeStatus;
use blkyard_os::{LaneConfig, LaneError, LaneThread, RingConfig, Signals, cpu_places, node_of};

pub use args::{BenchArgs, Pattern, ReportFormat, Verify};
pub use report::BenchReport;
pub(crate) use text::count;

use crate::Console;
use args::BenchPlan;
use cpu::CpuTime;
use job::{BenchJob, Gate, JobResult};
use own::Own;
use progress::BenchProgress;
use tally::{LiveCounters, Summary};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The options do not go together, or not with the device.
    #[error(transparent)]
    Args(#[from] SpecError),
    /// The device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Its queues cannot be shared.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A lane cannot run.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// There is no memory for buffers.
    #[error("buffers of {bytes} bytes for each of {jobs} jobs: {source}; lower --bs, --iodepth or --numjobs")]
    Memory {
        /// Number of jobs.
        jobs: usize,
        /// Size of a job's buffers.
        bytes: u64,
        /// The system's error.
        source: std::io::Error,
    },
    /// Buffers cannot be registered.
    #[error("{0}; or use --no-registered")]
    Register(#[from] RegisterError),
    /// The system gave no descriptor.
    #[error("bench cannot start: {0}; see the limits on threads and open files")]
    System(#[from] std::io::Error),
    /// A thread ended without a word.
    #[error("a job ended by itself after {0} of {1} had reported; see the messages above, and report a bug")]
    Lost(usize, usize),
}

/// Runs the command: opens the device, measures, prints. Exit code 1 if an I/O failed or a block mismatched.
/// `connector` makes the connection to a device that another process serves.
///
/// # Errors
/// See [`BenchError`]; nothing was measured then.
pub fn run(
    args: &BenchArgs,
    console: Console,
    connector: impl FnOnce() -> io::Result<Arc<dyn Connector>>,
) -> Result<ExitCode, BenchError> {
    let mut spec = Spec::parse(&args.device)?;
    take_device_scheduler(&mut spec)?;
    take_own_rate(&mut spec)?;
    Device::ask_queues(&mut spec, args.queue_counts(cpu_places().len()));
    let device = Device::through(spec, connector)?;
    lay_out(args, &device)?;
    let report = measure(args, &device)?;
    let code = if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    let code = match args.output_format {
        ReportFormat::Normal => (console.print)(&text::text(&report), code),
        ReportFormat::Json => (console.print)(&format_args!("{}\n", report.json()), code),
    };
    if report.is_cut_short() {
        // A back-end that is silent would be waited for.
        std::mem::forget(device);
    }
    Ok(code)
}

/// Writes a fresh RAM device once. Unwritten pages are all the same page of zeroes, which stays in the cache and makes
/// reads look several times too fast; pages first written during the measurement make writes look slow.
fn lay_out(args: &BenchArgs, device: &Device) -> Result<(), BenchError> {
    if !device.needs_preconditioning() || device.info().read_only {
        return Ok(());
    }
    let plan = BenchPlan::new(args, device.info(), 1)?;
    let bytes = plan.blocks * u64::from(plan.block_bytes);
    if memory_available().is_some_and(|available| bytes > available / 2) {
        tracing::warn!("{}: too large to be written before the run: reads of unwritten blocks look fast", args.device);
        return Ok(());
    }
    let write = BenchArgs {
        rw: Pattern::Write,
        iodepth: 1,
        iodepth_batch: 1,
        numjobs: 1,
        read_queues: None,
        poll_queues: None,
        hipri: false,
        runtime: None,
        rwmixread: None,
        verify: None,
        fsync: 0,
        ..args.clone()
    };
    // Rate limits apply to the measurement only.
    let plan = BenchPlan { rates: Vec::new(), ..plan_for(&write, device)? };
    measure_plan(&write, device, plan).map(|_| ())
}

/// Memory that can be had without swapping.
fn memory_available() -> Option<u64> {
    let words = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = words.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Runs the load on an open device. SIGINT or SIGTERM ends it early, with the report so far. I/O in flight is then
/// waited for, but only for a moment.
///
/// # Errors
/// See [`BenchError`].
pub fn measure(args: &BenchArgs, device: &Device) -> Result<BenchReport, BenchError> {
    measure_plan(args, device, plan_for(args, device)?)
}

fn plan_for(args: &BenchArgs, device: &Device) -> Result<BenchPlan, BenchError> {
    Ok(BenchPlan::new(args, device.info(), cpu_places().len().min(device.queues_max()))?)
}

fn measure_plan(args: &BenchArgs, device: &Device, plan: BenchPlan) -> Result<BenchReport, BenchError> {
    let plan = Arc::new(plan);
    let gate = Arc::new(Gate::default());
    let lives: Vec<_> = (0..plan.jobs).map(|_| Arc::new(LiveCounters::default())).collect();
    let (tell, told) = channel();
    let bytes = u64::from(plan.block_bytes) * plan.iodepth as u64;
    let parts = device.memory(plan.jobs, bytes as usize);
    let parts = parts.map_err(|source| BenchError::Memory { jobs: plan.jobs, bytes, source })?;
    let job = |(number, (live, part))| BenchJob::new(&plan, number, &gate, live, tell.clone(), part);
    let jobs: Vec<_> = lives.iter().zip(parts).enumerate().map(job).collect();
    drop(tell);
    let workers = if plan.shares() {
        Workers::Threads(shared::spawn(args, &plan, device, &gate, jobs)?)
    } else {
        Workers::Lanes(spawn_own(args, &plan, device, jobs)?)
    };
    // Not earlier: until here a signal ends the program as usual.
    let signals = Signals::install()?;
    let cpu_before = CpuTime::now();
    gate.open.store(true, Ordering::Release);
    workers.call();
    let shown = std::io::stderr().is_terminal();
    let mut progress = BenchProgress::new(&plan, lives.clone(), shown);
    let outcomes = wait(&plan, &gate, &told, &signals, &workers, &mut progress);
    let cpu = CpuTime::now().since(cpu_before);
    progress.finish();
    let is_cut_short = gate.stop.load(Ordering::Relaxed);
    // Threads with I/O that never completes do not end, and are abandoned.
    let is_abandoned = gate.abandon.load(Ordering::Relaxed);
    if !is_abandoned && (!workers.join()? || outcomes.len() < plan.jobs) {
        return Err(BenchError::Lost(outcomes.len(), plan.jobs));
    }
    Ok(BenchReport { is_cut_short, ..add_up(args, &plan, device, outcomes, &lives, cpu) })
}

/// Threads of the jobs.
enum Workers {
    Lanes(Vec<LaneThread<Own<DeviceQueue>>>),
    Threads(Vec<JoinHandle<()>>),
}

impl Workers {
    /// Has them check the gate.
    fn call(&self) {
        match self {
            Workers::Lanes(lanes) => lanes.iter().for_each(|lane| lane.waker().wake()),
            Workers::Threads(threads) => threads.iter().for_each(|thread| thread.thread().unpark()),
        }
    }

    /// Waits for their end. False if one of them panicked, with its own message.
    fn join(self) -> Result<bool, LaneError> {
        match self {
            Workers::Lanes(lanes) => lanes.into_iter().try_for_each(LaneThread::join).map(|()| true),
            Workers::Threads(threads) => Ok(threads.into_iter().map(JoinHandle::join).all(|end| end.is_ok())),
        }
    }
}

/// Each job on a private queue and lane.
fn spawn_own(
    args: &BenchArgs,
    plan: &BenchPlan,
    device: &Device,
    jobs: Vec<BenchJob>,
) -> Result<Vec<LaneThread<Own<DeviceQueue>>>, BenchError> {
    let places = cpu_places();
    let cpus: Vec<_> = places.iter().map(|place| place.cpu).collect();
    // One thread a CPU stays where it is; more than that the system spreads better than we.
    let pinned = jobs.len() <= cpus.len();
    let info = Arc::new(device.info().clone());
    let mut lanes = Vec::new();
    for (number, job) in jobs.into_iter().enumerate() {
        let depth = queue_depth(device, plan.scheduler, plan.tags(&info));
        let (bios_max, scheduler) = (plan.iodepth, plan.scheduler);
        let queue = HwQueueConfig { depth, bios_max, scheduler, ..HwQueueConfig::default() };
        let mut hw = HwQueue::new(device.queue(QueueKind::Default, depth)?, Arc::clone(&info), queue);
        hw.set_rates(0, plan.rates.clone());
        let config = LaneConfig {
            name: format!("bench-{number}"),
            cpus: pinned.then(|| vec![cpus[number]]),
            node: pinned.then(|| node_of(&places, &[cpus[number]])).flatten(),
            policy: IdlePolicy::up_to(args.spin_us.saturating_mul(1000)),
            ring: RingConfig { registers_memory: plan.is_registered, ..RingConfig::default() },
        };
        let buffer = job.register()?;
        lanes.push(blkyard_os::spawn(config, move |ring| {
            hw.set_memory(ring, Arc::clone(job.memory()));
            let buffer = buffer.filter(|buffer| hw.add_buffer(ring, buffer));
            vec![Own::new(hw, job, buffer.map(|buffer| buffer.id()))]
        })?);
    }
    Ok(lanes)
}

/// How long I/O in flight may take after a signal.
const DRAIN_TIME: Duration = Duration::from_secs(2);
/// How long jobs may take after that to report without it.
const REPORT_TIME: Duration = Duration::from_secs(1);

/// Waits until all jobs have reported, or until a signal, and then for a bounded time until they have stopped.
fn wait(
    plan: &BenchPlan,
    gate: &Gate,
    told: &Receiver<JobResult>,
    signals: &Signals,
    workers: &Workers,
    progress: &mut BenchProgress,
) -> Vec<JobResult> {
    const DRAW_EVERY: Duration = Duration::from_millis(250);
    let (mut stopped, mut abandoned): (Option<Instant>, Option<Instant>) = (None, None);
    let start = Instant::now();
    let mut outcomes = Vec::with_capacity(plan.jobs);
    while outcomes.len() < plan.jobs {
        match told.recv_timeout(DRAW_EVERY) {
            Ok(outcome) => outcomes.push(outcome),
            Err(RecvTimeoutError::Timeout) => {
                progress.draw(start.elapsed());
                let is_signalled = signals.wait(Some(Duration::ZERO)).is_some();
                match (stopped, abandoned) {
                    (None, _) if is_signalled => {
                        gate.stop.store(true, Ordering::Relaxed);
                        stopped = Some(Instant::now());
                        workers.call();
                    }
                    (Some(at), None) if is_signalled || at.elapsed() >= DRAIN_TIME => {
                        gate.abandon.store(true, Ordering::Relaxed);
                        abandoned = Some(Instant::now());
                        workers.call();
                    }
                    (_, Some(at)) if at.elapsed() >= REPORT_TIME => break,
                    _ => {}
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    outcomes
}

fn add_up(
    args: &BenchArgs,
    plan: &BenchPlan,
    device: &Device,
    outcomes: Vec<JobResult>,
    lives: &[Arc<LiveCounters>],
    cpu: CpuTime,
) -> BenchReport {
    let (mut summary, mut outstanding) = (Summary::default(), 0);
    let mut silent: Vec<_> = lives.iter().map(Some).collect();
    let (mut checked, mut mismatches, mut violations) = (0, 0, Vec::new());
    for outcome in outcomes {
        summary.merge(&outcome.summary);
        checked += outcome.checked;
        mismatches += outcome.mismatches;
        violations.extend(outcome.violations);
        outstanding += outcome.outstanding;
        silent[outcome.job] = None;
    }
    for (job, live) in silent.into_iter().enumerate().filter_map(|(job, live)| Some((job, live?))) {
        summary.merge(&live.summary());
        outstanding += live.in_flight();
        violations.push(format!("job {job}: it sleeps until its I/O has completed; its latencies are unknown"));
    }
    if let Some((Some(IoError { op, sector, bytes, code: Some(code), .. }), _)) = device.info().errors.take() {
        let sectors = bytes >> SECTOR_SHIFT;
        violations.push(format!(
            "first error of the device: {op:?} of {sectors} sectors at sector {sector}: {}",
            cause(code)
        ));
    }
    BenchReport {
        device: device.info().name.clone(),
        options: report::options(args, plan),
        jobs: plan.jobs,
        summary,
        cpu,
        checked,
        mismatches,
        violations,
        outstanding,
        is_cut_short: false,
    }
}

/// The meaning of a device's error number.
fn cause(code: ErrorCode) -> String {
    match code {
        ErrorCode::Errno(errno) => io::Error::from_raw_os_error(errno).to_string(),
        ErrorCode::Nvme(status) => NvmeStatus(status).to_string(),
    }
}
