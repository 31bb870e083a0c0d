//! A queue whose tags are shared by all jobs and passed on at random: a mechanism for the post's tail at 4 x 1024 and
//! above.
//!
//! The post does not state the cause of its tail. Waiting bios that are served out of order are the likely one; this is
//! the simplest such order, and not the product's. Everything else is the core and driver of mode `single`.

use std::sync::{Arc, Mutex};

use blkyard_mq::{Bio, HwQueue};
use blkyard_nvme::LoopbackHost;
use blkyard_sim::Rng;

use super::end::{JobEnd, Moved, config};
use super::job_flags::{JobFlag, deliver, job_of, lock};
use super::pairs::StudyQueuePair;

/// The queue, for all jobs.
pub(crate) struct UnfairQueue {
    inner: Mutex<UnfairTags>,
    job_flags: Arc<[JobFlag]>,
}

/// State under the lock.
struct UnfairTags {
    hw: HwQueue<LoopbackHost>,
    /// Bios without a tag.
    waiting: Vec<Box<Bio>>,
    free: usize,
    rng: Rng,
}

impl UnfairQueue {
    /// A queue of `ids` commands, for at most `bios` bios.
    pub(crate) fn new(
        pair: StudyQueuePair,
        ids: usize,
        bios: usize,
        job_flags: Arc<[JobFlag]>,
        seed: u64,
    ) -> Arc<UnfairQueue> {
        let hw = HwQueue::new(pair.queue.into_driver(), pair.info, config(ids, bios));
        let inner = UnfairTags { hw, waiting: Vec::with_capacity(bios), free: ids, rng: Rng::new(seed) };
        Arc::new(UnfairQueue { inner: Mutex::new(inner), job_flags })
    }
}

impl UnfairTags {
    /// Submits waiting bios, each the next by chance, while there are tags.
    fn issue(&mut self, now_ns: u64) {
        while self.free > 0 && !self.waiting.is_empty() {
            let next = self.rng.below(self.waiting.len() as u64) as usize;
            self.hw.submit(self.waiting.swap_remove(next));
            self.free -= 1;
        }
        self.hw.issue(&mut (), now_ns);
    }
}

/// A job's end.
pub(crate) struct UnfairEnd {
    queue: Arc<UnfairQueue>,
    job: usize,
    away: Vec<Box<Bio>>,
}

impl UnfairEnd {
    pub(crate) fn new(queue: &Arc<UnfairQueue>, job: usize, bios: usize) -> UnfairEnd {
        UnfairEnd { queue: Arc::clone(queue), job, away: Vec::with_capacity(bios) }
    }
}

impl JobEnd for UnfairEnd {
    const BATCH: usize = usize::MAX;
    const LOCKED: bool = true;

    fn submit(&mut self, bios: &mut Vec<Box<Bio>>, now_ns: u64) -> Moved {
        let submitted = bios.len();
        let mut inner = lock(&self.queue.inner);
        inner.waiting.append(bios);
        inner.issue(now_ns);
        Moved { submitted, ..Moved::default() }
    }

    fn collect(&mut self, now_ns: u64, out: &mut Vec<Box<Bio>>) -> Moved {
        let UnfairEnd { queue, job, away } = self;
        let mailed = queue.job_flags[*job].take_mail(out);
        let mut inner = lock(&queue.inner);
        let route = &mut |bio: Box<Bio>| if job_of(&bio) == *job { out.push(bio) } else { away.push(bio) };
        let reaped = inner.hw.reap(&mut (), now_ns, route);
        inner.free += reaped;
        inner.issue(now_ns);
        drop(inner);
        let delivered = away.len();
        if delivered > 0 {
            deliver(&queue.job_flags, away);
        }
        Moved { reaped, delivered, mailed, ..Moved::default() }
    }
}
