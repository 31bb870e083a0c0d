//! A driver for one queue pair: the core's requests become commands, completions come back by their ids.
//!
//! Owned by its hardware queue. One doorbell write for a batch; an id is valid once ([`Cids`]). There is an entry for
//! each tag, so it never lacks room. The other end and the time are unknown to it.

use blkyard_mem::RegionTable;
use blkyard_mq::{Batch, Cid, Cids, Done, Driver};

use crate::pair::{Command, HostEnd};

/// Drives the host's end of a queue pair.
#[derive(Debug)]
pub struct PairDriver {
    host: HostEnd,
    cids: Cids,
    forged: u64,
}

impl PairDriver {
    /// A driver for a hardware queue of `depth` tags.
    ///
    /// # Panics
    /// If there are more tags than entries.
    pub fn new(host: HostEnd, depth: usize) -> PairDriver {
        assert!(depth <= host.entries(), "{depth} tags over a queue of {} entries", host.entries());
        PairDriver { host, cids: Cids::new(depth), forged: 0 }
    }

    /// Completions of ids that are not in flight.
    pub fn forged(&self) -> u64 {
        self.forged
    }
}

impl<Cx: ?Sized> Driver<Cx> for PairDriver {
    // Always inlined, so that the batch has no address.
    #[inline(always)]
    fn queue_rqs(&mut self, _cx: &mut Cx, _memory: &RegionTable, batch: &mut Batch<'_>) {
        while let Some((tag, request, segments)) = batch.take() {
            // Written where it goes, piece by piece: made elsewhere and copied, it would be read before its pieces have
            // arrived.
            self.host.post(Command {
                cid: self.cids.park(tag).0,
                op: request.op(),
                sector: request.sector(),
                sectors: request.sectors(),
                data: segments.first().unwrap_or_default(),
            });
        }
        self.host.ring();
    }

    #[inline]
    fn poll(&mut self, _cx: &mut Cx, _memory: &RegionTable, done: &mut Done<'_>, _now_ns: u64) {
        while let Some(completion) = self.host.completion() {
            match self.cids.redeem(Cid(completion.cid)) {
                Ok(tag) => done.complete(tag, completion.status),
                Err(_) => self.forged += 1,
            }
        }
        self.host.release();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::pair::{PairCompletion, queue_pair};
    use blkyard_mq::{Bio, DeviceInfo, HwQueue, HwQueueConfig, Op, Status};

    #[test]
    fn what_goes_out_as_a_command_comes_back_as_its_bio_and_once() {
        let (host, mut device) = queue_pair(8);
        let info = DeviceInfo { name: "pair".into(), capacity_sectors: 100, ..DeviceInfo::default() };
        let config = HwQueueConfig { depth: 4, bios_max: 8, ..HwQueueConfig::default() };
        let mut queue = HwQueue::new(PairDriver::new(host, 4), Arc::new(info), config);
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.sector, bio.sectors, bio.cookie) = (Op::Write, 16, 8, 77);
        bio.segments.push(blkyard_mem::Segment { region: 0, offset: 4096, len: 4096 });
        queue.submit(bio);
        assert_eq!(queue.issue(&mut (), 1), 1);
        let command = device.command().unwrap();
        assert_eq!((command.op, command.sector, command.sectors, command.data.offset), (Op::Write, 16, 8, 4096));
        device.complete(PairCompletion { cid: command.cid ^ 0x10000, status: Status::Ok });
        device.complete(PairCompletion { cid: command.cid, status: Status::Io });
        device.complete(PairCompletion { cid: command.cid, status: Status::Ok });
        let mut ended = Vec::new();
        assert_eq!(queue.reap(&mut (), 2, &mut |bio| ended.push((bio.cookie, bio.status))), 1);
        assert_eq!(ended, [(77, Status::Io)]);
        assert_eq!(queue.driver_mut().forged(), 2);
    }
}
