//! Jobs that share hardware queues: more threads than queues, each at its own end of one.
//!
//! A thread submits into its ring, makes it visible, and takes back what is over; whoever finds the queue idle turns
//! its crank for all (see [`SwQueue`]). With nothing to do it polls for a while and then sleeps on its own ring.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;

use blkyard_mq::{Bed, Context, Driver, HwQueue, HwQueueConfig, RegionTable, SwQueue};
use blkyard_os::{Ring, RingBed, RingConfig, now_ns};

use super::BenchError;
use super::args::{BenchArgs, Plan};
use super::job::{Gate, Job};
use crate::Device;

/// Deals the jobs out to the plan's queues and starts a thread for each. They wait for the gate.
pub(crate) fn spawn(
    args: &BenchArgs,
    plan: &Plan,
    device: &Device,
    gate: &Arc<Gate>,
    jobs: Vec<Job>,
) -> Result<Vec<JoinHandle<()>>, BenchError> {
    let mut groups: Vec<Vec<Job>> = (0..plan.queues).map(|_| Vec::new()).collect();
    jobs.into_iter().enumerate().for_each(|(number, job)| groups[number % plan.queues].push(job));
    let spin_ns = args.spin_us.saturating_mul(1000);
    let mut threads = Vec::with_capacity(plan.jobs);
    for (number, group) in groups.into_iter().enumerate() {
        // Who has issued I/O for others stays until theirs is over: see `SwQueue::leave`.
        let all_done = Arc::new(Barrier::new(group.len()));
        for (member, (queue, job)) in share(plan, device, number, group)?.into_iter().enumerate() {
            let (gate, all_done) = (Arc::clone(gate), Arc::clone(&all_done));
            let worker = Worker { queue, job, region: member as u32, spin_ns };
            let name = format!("bench-{number}.{member}");
            threads.push(std::thread::Builder::new().name(name).spawn(move || {
                while !gate.open.load(Ordering::Acquire) {
                    std::thread::park();
                }
                // Dropped also while a panic unwinds: the others must not wait for this one in vain.
                let _meet = Meet(all_done);
                worker.run();
            })?);
        }
    }
    Ok(threads)
}

/// One hardware queue with its ring, shared among the jobs of a group.
fn share(
    plan: &Plan,
    device: &Device,
    number: usize,
    group: Vec<Job>,
) -> Result<Vec<(SwQueue<crate::DeviceQueue, Ring>, Job)>, BenchError> {
    let info = Arc::new(device.info().clone());
    let depth = plan.depth(&info, group.len());
    let name = format!("bench-{number}");
    let mut ring = Ring::new(RingConfig { single_owner: false, ..RingConfig::default() })
        .map_err(|source| blkyard_os::LaneError::Ring { name, source })?;
    let config = HwQueueConfig { depth, bios_max: plan.iodepth * group.len(), ..HwQueueConfig::default() };
    let mut hw = HwQueue::new(device.queue(depth), info, config);
    // One table for all; a job's buffers are the region of its number in the group.
    let regions = group.iter().filter_map(|job| job.memory().region(0).cloned()).collect();
    hw.set_memory(&mut ring, Arc::new(RegionTable::new(regions)));
    let beds = group.iter().map(|_| Ok(RingBed::new(&ring)? as Arc<dyn Bed>));
    let beds = beds.collect::<std::io::Result<Vec<_>>>()?;
    Ok(SwQueue::share(hw, ring, plan.iodepth, beds).into_iter().zip(group).collect())
}

/// Waits for the others in the end.
struct Meet(Arc<Barrier>);

impl Drop for Meet {
    fn drop(&mut self) {
        self.0.wait();
    }
}

/// One job at its end of a queue.
struct Worker<D, Cx> {
    queue: SwQueue<D, Cx>,
    job: Job,
    region: u32,
    spin_ns: u64,
}

impl<D: Driver<Cx>, Cx: Context> Worker<D, Cx> {
    fn run(mut self) {
        let Worker { queue, job, region, spin_ns } = &mut self;
        let mut ended = Vec::with_capacity(queue.room());
        let mut worked_ns = now_ns();
        while !job.is_over() {
            let mut now_ns = now_ns();
            if queue.poll(&blkyard_os::now_ns, &mut |bio| ended.push(bio)) == 0
                && queue.in_flight() > 0
                && !job.is_ready()
                && now_ns.saturating_sub(worked_ns) >= *spin_ns
            {
                queue.wait(&blkyard_os::now_ns, &mut |bio| ended.push(bio));
            }
            if !ended.is_empty() {
                // Polling may have taken a turn for all, and waiting a sleep.
                now_ns = blkyard_os::now_ns();
                ended.drain(..).for_each(|bio| job.ended(bio, now_ns));
                worked_ns = now_ns;
            }
            if job.is_ready() {
                while let Some(bio) = job.wish(*region, now_ns) {
                    queue.submit(bio);
                }
                queue.ring(&blkyard_os::now_ns);
                worked_ns = now_ns;
            }
            job.settle(now_ns);
        }
        self.queue.leave(&now_ns, &mut |_| ());
    }
}
