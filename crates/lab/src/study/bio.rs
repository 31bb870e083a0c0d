//! Mode `bio`: a driver that takes bios directly, as the NVMe driver did before it moved to the multi-queue core.
//!
//! No requests and no tags of the core. Each queue has one lock and, under it, a bitmap of command ids and a list of
//! bios without an id. Every bio writes the doorbell by itself. Once the list is not empty, every new bio is queued
//! behind it, and only the helper takes from it: one thread for all queues, called by the thread that takes completions
//! while the list is not empty, and besides by a tick. (Linux 3.12, drivers/block/nvme-core.c: `nvme_make_request`,
//! `nvme_kthread`, `nvme_resubmit_bios`.)
//!
//! Written with the same care as the core, so that only the design differs: plain words under the lock, no search from
//! the first id, completions looked up by id and checked, I/Os counted and timed. Rings, data pointers and doorbells
//! are the product's, as in the other modes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use blkyard_mq::{Bio, DeviceInfo, Op, SECTOR_BYTES, Status, Wake};
use blkyard_nvme::{DmaSegment, ListError, LoopbackQueue, NvmeNamespace, Sqe, io};

use super::end::{JobEnd, Moved};
use super::job_flags::{JobFlag, deliver, job_of, lock};
use super::pairs::StudyQueuePair;

/// One queue, for all jobs that use it and the helper.
pub(crate) struct BioQueue {
    inner: Mutex<Inner>,
    job_flags: Arc<[JobFlag]>,
    helper: Arc<dyn Wake>,
}

/// State under the lock.
struct Inner {
    queue: LoopbackQueue,
    ids: Ids,
    /// Bios in flight, by id.
    places: Box<[BioSlot]>,
    /// Bios for which there was no id, in the order they came.
    list: VecDeque<Box<Bio>>,
    info: Arc<DeviceInfo>,
    account: Account,
}

#[derive(Default)]
struct BioSlot {
    bio: Option<Box<Bio>>,
    start_ns: u64,
}

/// Counters of the driver, as for /proc/diskstats at the time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Account {
    pub(crate) ios: u64,
    pub(crate) sectors: u64,
    pub(crate) total_ns: u64,
}

impl BioQueue {
    /// A queue of `ids` commands, for at most `bios` bios.
    pub(crate) fn new(
        pair: StudyQueuePair,
        ids: usize,
        bios: usize,
        job_flags: Arc<[JobFlag]>,
        helper: Arc<dyn Wake>,
    ) -> Arc<BioQueue> {
        let inner = Inner {
            queue: pair.queue,
            ids: Ids::new(ids),
            places: (0..ids).map(|_| BioSlot::default()).collect(),
            list: VecDeque::with_capacity(bios),
            info: pair.info,
            account: Account::default(),
        };
        Arc::new(BioQueue { inner: Mutex::new(inner), job_flags, helper })
    }

    /// The counters.
    #[cfg(test)]
    pub(crate) fn account(&self) -> Account {
        lock(&self.inner).account
    }

    /// Bios that wait for an id.
    #[cfg(test)]
    pub(crate) fn listed(&self) -> usize {
        lock(&self.inner).list.len()
    }
}

impl Inner {
    /// Whether a bio is valid and fits one command. The driver of the time split longer ones; this load has none.
    #[inline]
    fn takes(&self, bio: &Bio) -> bool {
        let DeviceInfo { capacity_sectors, limits, read_only, .. } = &*self.info;
        let block_mask = limits.logical_block_bytes / SECTOR_BYTES as u32 - 1;
        let [segment] = &bio.segments[..] else { return false };
        bio.op.has_data()
            && !(*read_only && bio.op.is_write())
            && (bio.sectors.wrapping_sub(1)) < limits.sectors_max
            && (bio.sectors | bio.sector as u32) & block_mask == 0
            && bio.sector <= capacity_sectors.saturating_sub(bio.sectors.into())
            && u64::from(segment.len) == bio.bytes()
            && segment.len <= limits.segment_bytes_max
            && segment.offset as u32 & limits.dma_alignment_mask == 0
    }

    /// Passes a bio on under an id.
    #[inline]
    fn start(&mut self, id: usize, bio: Box<Bio>, now_ns: u64) {
        let slot = id as u16;
        let Ok(sqe) = self.command(slot, &bio) else { unreachable!("all buffers of the load are mapped") };
        self.queue.pair.push(slot, sqe);
        let _ = self.queue.pair.announce();
        self.places[id] = BioSlot { bio: Some(bio), start_ns: now_ns };
    }

    /// Makes a bio's command.
    #[inline]
    fn command(&mut self, slot: u16, bio: &Bio) -> Result<Sqe, ListError> {
        let LoopbackQueue { namespace: NvmeNamespace { nsid, sector_shift, sgl_threshold }, .. } = self.queue;
        let run = |segment| Some(DmaSegment { addr: self.queue.addr(segment)?, len: segment.len.into() });
        let run = bio.segments.first().and_then(|segment| run(*segment));
        let (psdt, data) = self.queue.lists.map(slot, bio.bytes(), run.into_iter(), 1, sgl_threshold)?;
        let opcode = if bio.op == Op::Read { io::READ } else { io::WRITE };
        let sqe = Sqe::with_blocks(opcode, nsid, bio.sector >> sector_shift, bio.sectors >> sector_shift, 0);
        Ok(sqe.with_data(psdt, data))
    }

    /// Takes the device's completions.
    #[inline]
    fn reap(&mut self, now_ns: u64, mut sink: impl FnMut(Box<Bio>)) -> usize {
        let Inner { queue: LoopbackQueue { pair, lists, .. }, ids, places, account, .. } = self;
        let mut reaped = 0;
        let _ = pair.poll(|completed| {
            let _ = lists.release(completed.slot);
            let id = usize::from(completed.slot);
            let BioSlot { bio, start_ns } = &mut places[id];
            // The queue pair returns only commands that were pushed.
            let Some(mut bio) = bio.take() else { return };
            ids.put(id);
            bio.status = completed.status.to_status();
            account.ios += 1;
            account.sectors += u64::from(bio.sectors);
            account.total_ns += now_ns.saturating_sub(*start_ns);
            reaped += 1;
            sink(bio);
        });
        reaped
    }
}

/// A job's end.
pub(crate) struct BioEnd {
    queue: Arc<BioQueue>,
    job: usize,
    /// Completions of other jobs, to be delivered.
    away: Vec<Box<Bio>>,
}

impl BioEnd {
    pub(crate) fn new(queue: &Arc<BioQueue>, job: usize, bios: usize) -> BioEnd {
        BioEnd { queue: Arc::clone(queue), job, away: Vec::with_capacity(bios) }
    }
}

impl JobEnd for BioEnd {
    const BATCH: usize = 1;
    const LOCKED: bool = true;

    #[inline]
    fn submit(&mut self, bios: &mut Vec<Box<Bio>>, now_ns: u64) -> Moved {
        let mut moved = Moved::default();
        for mut bio in bios.drain(..) {
            let mut inner = lock(&self.queue.inner);
            if !inner.takes(&bio) {
                drop(inner);
                bio.status = Status::Invalid;
                deliver(&self.queue.job_flags, &mut vec![bio]);
                continue;
            }
            if inner.list.is_empty()
                && let Some(id) = inner.ids.take()
            {
                inner.start(id, bio, now_ns);
                moved.submitted += 1;
            } else {
                inner.list.push_back(bio);
                moved.listed += 1;
            }
        }
        moved
    }

    #[inline]
    fn collect(&mut self, now_ns: u64, out: &mut Vec<Box<Bio>>) -> Moved {
        let BioEnd { queue, job, away } = self;
        let mailed = queue.job_flags[*job].take_mail(out);
        let mut inner = lock(&queue.inner);
        let reaped = inner.reap(now_ns, |bio| if job_of(&bio) == *job { out.push(bio) } else { away.push(bio) });
        let helper_wanted = reaped > 0 && !inner.list.is_empty();
        drop(inner);
        let delivered = away.len();
        if delivered > 0 {
            deliver(&queue.job_flags, away);
        }
        if helper_wanted {
            queue.helper.wake();
        }
        Moved { reaped, delivered, mailed, ..Moved::default() }
    }
}

/// The helper: takes bios off the lists once there are ids again.
pub(crate) struct Helper {
    queues: Vec<Arc<BioQueue>>,
    away: Vec<Box<Bio>>,
}

impl Helper {
    pub(crate) fn new(queues: Vec<Arc<BioQueue>>, bios: usize) -> Helper {
        Helper { queues, away: Vec::with_capacity(bios) }
    }

    /// Serves one queue: takes completions, and submits waiting bios while ids are free.
    #[inline]
    pub(crate) fn look_after(&mut self, queue: usize, now_ns: u64) -> Moved {
        let Helper { queues, away } = self;
        let queue = &queues[queue];
        let mut inner = lock(&queue.inner);
        let reaped = inner.reap(now_ns, |bio| away.push(bio));
        let mut resubmitted = 0;
        while !inner.list.is_empty()
            && let Some(id) = inner.ids.take()
            && let Some(bio) = inner.list.pop_front()
        {
            inner.start(id, bio, now_ns);
            resubmitted += 1;
        }
        drop(inner);
        let delivered = away.len();
        if delivered > 0 {
            deliver(&queue.job_flags, away);
        }
        Moved { reaped, delivered, resubmitted, ..Moved::default() }
    }
}

/// Command ids as a bitmap: a set bit is an id in use.
#[derive(Debug)]
struct Ids {
    words: Box<[u64]>,
    /// Words before this one have no id left.
    from: usize,
}

impl Ids {
    fn new(count: usize) -> Ids {
        let mut words = vec![0; count.div_ceil(64)];
        if let Some(last) = words.last_mut()
            && !count.is_multiple_of(64)
        {
            // Ids beyond the count are in use for good.
            *last = !0 << (count % 64);
        }
        Ids { words: words.into(), from: 0 }
    }

    #[inline]
    fn take(&mut self) -> Option<usize> {
        while let Some(word) = self.words.get_mut(self.from) {
            if *word != !0 {
                let bit = word.trailing_ones() as usize;
                *word |= 1 << bit;
                return Some(self.from * 64 + bit);
            }
            self.from += 1;
        }
        None
    }

    #[inline]
    fn put(&mut self, id: usize) {
        self.words[id / 64] &= !(1 << (id % 64));
        self.from = self.from.min(id / 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::end::CAPACITY_SECTORS;
    use crate::study::job_flags::{cookie, slot_of};
    use crate::study::pairs::{StudyController, queue_pair};
    use crate::study::world::RecordedSignal;
    use blkyard_mq::Segment;
    use blkyard_sim::DeviceModel;

    #[test]
    fn ids_are_given_once_and_all_of_them() {
        for count in [1, 63, 64, 65, 1023] {
            let mut ids = Ids::new(count);
            let all: Vec<_> = std::iter::from_fn(|| ids.take()).collect();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
            ids.put(count / 2);
            assert_eq!((ids.take(), ids.take()), (Some(count / 2), None));
        }
    }

    fn bio(job: usize, slot: usize) -> Box<Bio> {
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.sectors, bio.cookie) = (Op::Write, 8, cookie(job, slot));
        bio.segments.push(Segment { region: 0, offset: 0, len: 4096 });
        bio
    }

    fn finish(device: &mut StudyController, count: usize) {
        for _ in 0..count {
            let token = device.fetch().unwrap();
            device.complete(token);
        }
    }

    /// A queue of two ids for two jobs.
    fn queue() -> (Arc<BioQueue>, [BioEnd; 2], Arc<[Arc<RecordedSignal>; 3]>, StudyController) {
        let (pair, device) = queue_pair(DeviceModel { ring_entries: 4, ..DeviceModel::NVME_2013 }, 1);
        let eventfds = Arc::new([(); 3].map(|()| Arc::new(RecordedSignal::default())));
        let job_flags = eventfds[..2].iter().map(|eventfd| JobFlag::new(8, eventfd.clone())).collect();
        let queue = BioQueue::new(pair, 2, 16, job_flags, eventfds[2].clone());
        let ends = [0, 1].map(|job| BioEnd::new(&queue, job, 8));
        (queue, ends, eventfds, device)
    }

    #[test]
    fn without_ids_bios_wait_on_the_list_and_only_the_helper_takes_from_it() {
        let (queue, [mut end, _], eventfds, mut device) = queue();
        let mut helper = Helper::new(vec![Arc::clone(&queue)], 8);
        for slot in 0..4 {
            end.submit(&mut vec![bio(0, slot)], 0);
        }
        assert_eq!(queue.listed(), 2);
        finish(&mut device, 1);
        let mut out = Vec::new();
        end.collect(5, &mut out);
        assert_eq!((out.len(), queue.listed(), eventfds[2].take()), (1, 2, true));
        // There is an id, but the list is not empty: the newcomer goes behind it.
        assert_eq!(end.submit(&mut out, 5).listed, 1);
        assert_eq!(helper.look_after(0, 6), Moved { resubmitted: 1, ..Moved::default() });
        assert_eq!(queue.listed(), 2);
        // In the order they came.
        let order: Vec<_> = (0..4)
            .map(|_| {
                finish(&mut device, 1);
                end.collect(7, &mut out);
                helper.look_after(0, 7);
                out.pop().map(|bio| slot_of(&bio))
            })
            .collect();
        assert_eq!(order, [Some(1), Some(2), Some(3), Some(0)]);
        assert_eq!(queue.account().ios, 5);
    }

    #[test]
    fn what_ended_for_another_job_is_in_its_box_and_its_eventfd_rings() {
        let (_, [mut one, mut two], eventfds, mut device) = queue();
        one.submit(&mut vec![bio(0, 7)], 0);
        two.submit(&mut vec![bio(1, 9)], 0);
        finish(&mut device, 2);
        let mut out = Vec::new();
        let moved = one.collect(1, &mut out);
        assert_eq!((moved.reaped, moved.delivered, out.len()), (2, 1, 1));
        assert!(eventfds[1].take() && !eventfds[0].take() && !eventfds[2].take());
        let moved = two.collect(1, &mut out);
        assert_eq!((moved.reaped, moved.mailed, out.len()), (0, 1, 2));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let (queue, [mut one, _], eventfds, _) = queue();
        let wrong: [fn(&mut Bio); 5] = [
            |bio| bio.sector = CAPACITY_SECTORS - 7,
            |bio| bio.sectors = 0,
            |bio| bio.sectors = 16,
            |bio| bio.segments.clear(),
            |bio| bio.op = Op::Flush,
        ];
        let mut out = Vec::new();
        for make_wrong in wrong {
            let mut bio = bio(0, 0);
            make_wrong(&mut bio);
            one.submit(&mut vec![bio], 0);
            assert!(eventfds[0].take());
            one.collect(1, &mut out);
            assert_eq!(out.pop().map(|bio| bio.status), Some(Status::Invalid));
        }
        assert_eq!(queue.account().ios, 0);
    }
}
