//! Jobs that share hardware queues: more threads than queues, or queues of several kinds; each job has a submitter of
//! the disk.
//!
//! A thread submits into its ring, makes it visible, and takes completions; a thread that finds the queue idle runs it
//! for all (see [`SharedDisk`]). Without work it polls for a while and then sleeps on its own ring.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;

use blkyard::{Device, DiskError, Meet, Queues};
use blkyard_mq::{Context, Driver, RegionTable, SharedDisk, SharedSubmitter};
use blkyard_os::Clock;

use super::BenchError;
use super::args::{BenchArgs, BenchPlan};
use super::job::{BenchJob, Gate};

/// Opens the disk for the jobs and starts a thread for each. They wait for the gate.
pub(crate) fn spawn(
    args: &BenchArgs,
    plan: &BenchPlan,
    device: &Device,
    gate: &Arc<Gate>,
    jobs: Vec<BenchJob>,
) -> Result<Vec<JoinHandle<()>>, BenchError> {
    // A job's buffers are in the region of its number, which may be the same for all.
    let regions = jobs.iter().filter_map(|job| job.memory().region(0).cloned()).collect();
    let registered: Vec<_> = jobs.iter().map(BenchJob::register).collect::<Result<_, _>>()?;
    let queues = Queues {
        device,
        info: Arc::new(device.info().clone()),
        memory: Arc::new(RegionTable::new(regions)),
        buffers: registered.iter().flatten().map(Arc::clone).collect(),
        registers_memory: plan.is_registered,
        bios: plan.iodepth,
        tags: plan.tags(device.info()),
        scheduler: plan.scheduler,
        rates: plan.rates.clone(),
    };
    let (_, submitters) = SharedDisk::open(queues, plan.jobs, plan.iodepth, plan.queues).map_err(DiskError::from)?;
    let spin_ns = args.spin_us.saturating_mul(1000);
    // A thread that has issued I/O for others stays until theirs has completed: see `SwQueue::leave`.
    let all_done = Arc::new(Barrier::new(plan.jobs));
    let mut threads = Vec::with_capacity(plan.jobs);
    for (number, ((queue, job), buffer)) in submitters.into_iter().zip(jobs).zip(registered).enumerate() {
        let (gate, all_done) = (Arc::clone(gate), Arc::clone(&all_done));
        let region = buffer.map_or(number as u32, |buffer| buffer.id().number());
        let worker = Worker { queue, job, region, spin_ns };
        threads.push(std::thread::Builder::new().name(format!("bench-{number}")).spawn(move || {
            while !gate.open.load(Ordering::Acquire) {
                std::thread::park();
            }
            // Dropped also while a panic unwinds: the others must not wait for this one in vain.
            let _meet = Meet(&all_done);
            worker.run();
        })?);
    }
    Ok(threads)
}

/// One job at its way to the disk.
struct Worker<D, Cx> {
    queue: SharedSubmitter<D, Cx>,
    job: BenchJob,
    region: u32,
    spin_ns: u64,
}

impl<D: Driver<Cx>, Cx: Context> Worker<D, Cx> {
    fn run(mut self) {
        let Worker { queue, job, region, spin_ns } = &mut self;
        let mut ended = Vec::with_capacity(queue.room());
        let clock = Clock::new();
        let clock = &|| clock.now_ns();
        let mut worked_ns = clock();
        while !job.is_over() {
            let mut now_ns = clock();
            if queue.poll(clock, &mut |bio| ended.push(bio)) == 0
                && queue.in_flight() > 0
                && !job.is_ready()
                && now_ns.saturating_sub(worked_ns) >= *spin_ns
            {
                queue.wait(clock, &mut |bio| ended.push(bio));
            }
            if !ended.is_empty() {
                // Polling may have taken a turn for all, and waiting a sleep.
                now_ns = clock();
                ended.drain(..).for_each(|bio| job.ended(bio, now_ns));
                worked_ns = now_ns;
            }
            job.advance(now_ns);
            if job.is_ready() {
                while let Some(bio) = job.request(*region, now_ns) {
                    queue.submit(bio);
                }
                queue.ring(clock);
                worked_ns = now_ns;
            }
            job.publish(now_ns);
        }
        self.queue.leave(clock, &mut |_| ());
    }
}
