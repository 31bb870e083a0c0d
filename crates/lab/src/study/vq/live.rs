//! The variants that two CPUs can run in real time.
//!
//! Run to completion: driver and device of a queue run on one thread, by the job itself. Two jobs have a queue each, or
//! share one under its lock, as `single` does. And apart: the job and its driver on one CPU, the device on the other,
//! both polling.

use std::io;
use std::sync::Arc;

use blkyard_mq::{Bio, RamDevice};
use blkyard_os::now_ns;
use blkyard_sim::Rng;
use serde::Serialize;

use super::rig::{self, DEPTH, part, tie};
use super::served::Spread;
use crate::floor::cpus::{led, together};
use crate::floor::windows::{Round, Samples, WindowPlan, measure, variant};
use crate::study::end::JobEnd;
use crate::study::job_flags::{JobFlag, cookie, slot_of};
use crate::study::mq::MqEnd;
use crate::study::single::{Single, SingleEnd};
use crate::study::world::RecordedSignal;

/// Long enough for two threads to be started and to meet.
const WINDOW_NS: u64 = 1_000_000;

/// Nanoseconds for an I/O of all threads together, 10th percentile. `None` without two CPUs.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct VqLive {
    /// One job, one queue, one thread.
    pub(crate) alone_ns: f64,
    /// Two jobs on two threads that share one queue.
    pub(crate) shared_ns: Option<f64>,
    /// Two jobs on two threads, a queue each.
    pub(crate) own_ns: Option<f64>,
    /// One job and one queue, driver and device on a CPU each.
    pub(crate) apart_ns: Option<f64>,
    /// How many times the IOPS of two jobs two queues make, window by window.
    pub(crate) two_queues: Option<Spread>,
}

/// Measures all forms in turn.
///
/// # Errors
/// There is no memory.
pub(super) fn live(ram: &RamDevice, windows: usize, seed: u64) -> io::Result<VqLive> {
    // A disk for each queue: a queue that closes takes its memory from its disk, for which all queues of the disk must
    // turn, and here each turns with its job only. They are dropped after the queues.
    let (mut ties, mut queues) = (Vec::new(), Vec::new());
    for (name, ios) in [("alone", DEPTH), ("one", DEPTH), ("other", DEPTH), ("shared", 2 * DEPTH), ("apart", DEPTH)] {
        let (tie, of_it) = tie(&format!("live-{name}"), ram, &[ios])?;
        ties.push(tie);
        queues.extend(of_it);
    }
    let [alone, one, other, shared, mut apart] =
        <[_; 5]>::try_from(queues).map_err(|_| io::Error::other("not five queues"))?;
    let own = |queue, job: u64| LiveJob::new(MqEnd::over(queue), 0, 0, seed ^ job);
    let job_flags: Arc<[JobFlag]> = (0..2).map(|_| JobFlag::new(DEPTH, Arc::new(RecordedSignal::default()))).collect();
    let single = Single::over(shared, job_flags);
    let share = |job: usize| LiveJob::new(SingleEnd::new(&single, job, 2 * DEPTH), job, job * DEPTH, seed ^ job as u64);
    let mut device = part(&mut apart)?;
    let mut apart = own(apart, 0);

    let mut variants = vec![variant(own(alone, 0))];
    let pairs = together(share(0), share(1)).and_then(|sharing| {
        let owning = together(own(one, 1), own(other, 2))?;
        Ok([sharing, owning, led(|| apart.round(), || _ = device.run_once(&mut (), now_ns()))?])
    });
    let two_cpus = pairs.is_ok();
    variants.extend(pairs.into_iter().flatten());
    let samples = measure(WindowPlan { window_ns: WINDOW_NS, windows, warm_up: 3 }, &mut variants);
    drop(variants);
    let costs: Vec<_> = samples.iter().map(Samples::cost).collect();
    // I/O in flight completes before the queue is dropped.
    while apart.is_out() {
        device.run_once(&mut (), now_ns());
        apart.collect();
    }
    let of = |place: usize| costs.get(place).copied().filter(|cost| two_cpus && cost.is_finite());
    let two_queues = of(1).and(of(2)).map(|_| Spread::of(&samples[1].over(&samples[2])));
    Ok(VqLive { alone_ns: costs[0], shared_ns: of(1), own_ns: of(2), apart_ns: of(3), two_queues })
}

/// A job that keeps its depth out.
struct LiveJob<M: JobEnd> {
    end: M,
    /// Its first buffer.
    first: usize,
    free: Vec<Box<Bio>>,
    batch: Vec<Box<Bio>>,
    rng: Rng,
}

impl<M: JobEnd> LiveJob<M> {
    fn new(end: M, job: usize, first: usize, seed: u64) -> LiveJob<M> {
        let bio = |slot| {
            let mut bio = Bio::with_capacity(1);
            bio.cookie = cookie(job, slot);
            bio
        };
        let free = (0..DEPTH).map(bio).collect();
        LiveJob { end, first, free, batch: Vec::with_capacity(DEPTH), rng: Rng::new(seed) }
    }

    fn collect(&mut self) {
        self.end.collect(now_ns(), &mut self.free);
    }

    fn is_out(&self) -> bool {
        self.free.len() < DEPTH
    }
}

impl<M: JobEnd> Drop for LiveJob<M> {
    fn drop(&mut self) {
        while self.is_out() {
            self.collect();
        }
    }
}

impl<M: JobEnd> Round for LiveJob<M> {
    /// Submits all free bios, and takes completions.
    #[inline]
    fn round(&mut self) -> u64 {
        let now_ns = now_ns();
        if !self.free.is_empty() {
            for mut bio in self.free.drain(..) {
                let slot = slot_of(&bio);
                rig::fill(&mut bio, self.first + slot, &mut self.rng);
                self.batch.push(bio);
            }
            self.end.submit(&mut self.batch, now_ns);
        }
        self.end.collect(now_ns, &mut self.free);
        self.free.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn queues_close_without_waiting_for_each_other() {
        let begun = Instant::now();
        let found = live(&rig::ram().unwrap(), 2, 1).unwrap();
        assert!(found.alone_ns > 0.0);
        // A back-end that does not answer is waited for for 10 s.
        assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
    }
}
