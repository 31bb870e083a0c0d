//! Mode `mq`: the core as designed. A job owns its hardware queue: no lock, no sharing, one doorbell for a batch.

use blkyard_mq::{Bio, Driver, HwQueue};
use blkyard_nvme::LoopbackHost;

use super::end::{JobEnd, Moved, config};
use super::pairs::StudyQueuePair;

/// A job's end: the hardware queue itself.
pub(crate) struct MqEnd<D = LoopbackHost> {
    hw: HwQueue<D>,
}

impl MqEnd {
    /// A queue of `ids` commands, for at most `bios` bios.
    pub(crate) fn new(pair: StudyQueuePair, ids: usize, bios: usize) -> MqEnd {
        MqEnd::over(HwQueue::new(pair.queue.into_driver(), pair.info, config(ids, bios)))
    }
}

impl<D> MqEnd<D> {
    /// Over a queue that is ready.
    pub(crate) fn over(hw: HwQueue<D>) -> MqEnd<D> {
        MqEnd { hw }
    }
}

impl<D: Driver<()>> JobEnd for MqEnd<D> {
    const BATCH: usize = usize::MAX;
    const LOCKED: bool = false;

    #[inline]
    fn submit(&mut self, bios: &mut Vec<Box<Bio>>, now_ns: u64) -> Moved {
        let submitted = bios.len();
        bios.drain(..).for_each(|bio| self.hw.submit(bio));
        self.hw.issue(&mut (), now_ns);
        Moved { submitted, ..Moved::default() }
    }

    #[inline]
    fn collect(&mut self, now_ns: u64, out: &mut Vec<Box<Bio>>) -> Moved {
        let reaped = self.hw.reap(&mut (), now_ns, &mut |bio| out.push(bio));
        Moved { reaped, ..Moved::default() }
    }
}
