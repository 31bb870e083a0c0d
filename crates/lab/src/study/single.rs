//! Mode `single`: the core with one hardware queue for all, under one lock.
//!
//! A port that ignores queues: requests, tags and batches of the core, but every job waits for the same lock, and
//! completions of another job go to its box.

use std::sync::{Arc, Mutex};

use blkyard_mq::{Bio, Driver, HwQueue};
use blkyard_nvme::LoopbackHost;

use super::end::{JobEnd, Moved, config};
use super::job_flags::{JobFlag, deliver, job_of, spin_lock};
use super::pairs::StudyQueuePair;

/// The queue.
pub(crate) struct Single<D = LoopbackHost> {
    hw: Mutex<HwQueue<D>>,
    job_flags: Arc<[JobFlag]>,
}

impl Single {
    /// A queue of `ids` commands, for at most `bios` bios.
    pub(crate) fn new(pair: StudyQueuePair, ids: usize, bios: usize, job_flags: Arc<[JobFlag]>) -> Arc<Single> {
        let hw = HwQueue::new(pair.queue.into_driver(), pair.info, config(ids, bios));
        Single::over(hw, job_flags)
    }
}

impl<D> Single<D> {
    /// Over a queue that is ready.
    pub(crate) fn over(hw: HwQueue<D>, job_flags: Arc<[JobFlag]>) -> Arc<Single<D>> {
        Arc::new(Single { hw: Mutex::new(hw), job_flags })
    }
}

/// A job's end.
pub(crate) struct SingleEnd<D = LoopbackHost> {
    queue: Arc<Single<D>>,
    job: usize,
    away: Vec<Box<Bio>>,
}

impl<D> SingleEnd<D> {
    pub(crate) fn new(queue: &Arc<Single<D>>, job: usize, bios: usize) -> SingleEnd<D> {
        SingleEnd { queue: Arc::clone(queue), job, away: Vec::with_capacity(bios) }
    }
}

impl<D: Driver<()>> JobEnd for SingleEnd<D> {
    const BATCH: usize = usize::MAX;
    const LOCKED: bool = true;

    #[inline]
    fn submit(&mut self, bios: &mut Vec<Box<Bio>>, now_ns: u64) -> Moved {
        let submitted = bios.len();
        let mut hw = spin_lock(&self.queue.hw);
        bios.drain(..).for_each(|bio| hw.submit(bio));
        hw.issue(&mut (), now_ns);
        Moved { submitted, ..Moved::default() }
    }

    #[inline]
    fn collect(&mut self, now_ns: u64, out: &mut Vec<Box<Bio>>) -> Moved {
        let SingleEnd { queue, job, away } = self;
        let mailed = queue.job_flags[*job].take_mail(out);
        let mut hw = spin_lock(&queue.hw);
        let route = &mut |bio: Box<Bio>| if job_of(&bio) == *job { out.push(bio) } else { away.push(bio) };
        let reaped = hw.reap(&mut (), now_ns, route);
        // Tags came back, and bios may wait for them.
        if reaped > 0 && hw.has_work() {
            hw.issue(&mut (), now_ns);
        }
        drop(hw);
        let delivered = away.len();
        if delivered > 0 {
            deliver(&queue.job_flags, away);
        }
        Moved { reaped, delivered, mailed, ..Moved::default() }
    }
}
