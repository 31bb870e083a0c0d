//! Doorbells with eventfds: a client stores an index in the memory of the doorbell registers, and signals the queue's
//! lane itself.
//!
//! Without them each doorbell of a sleeping queue is a message, which two threads of the export handle before the lane
//! wakes. A client asks for them by DEVICE_GET_REGION_IO_FDS before it makes queues. The eventfds are numbered by
//! submission queue, since the client asks before it says which completion queue that will feed. Those of one number
//! are the usual case; a completion queue with other submission queues is polled.
//!
//! The client has copies of the eventfds and could make them blocking and full, so this process never writes them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError};

use blkyard_mem::{Region, View};
use blkyard_nvme::ControllerOptions;
use blkyard_nvme::registers::{DOORBELLS, cq_doorbell, sq_doorbell};
use blkyard_sys::EventFd;
use blkyard_wire::vfio_user::{IoFd, IoFdKind, RegionIoFds, SparseArea, VfioReply, region_index};

use super::device::{CreatedQueue, NvmeFunction};
use super::{NvmeDisk, VfioUserExport};
use crate::core::LaneGone;

/// Queues with an eventfd at most, the admin queue included: their description fits a message.
const QUEUES_MAX: usize = 40;

/// The eventfds of the admin queue and of the first I/O queues. Empty until a client asks for them.
#[derive(Debug, Default)]
pub(super) struct DoorbellEventfds(Vec<Arc<EventFd>>);

impl DoorbellEventfds {
    /// One for each of these queues, as far as a message with this many descriptors has room for them and for the file
    /// of the registers.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub(super) fn new(queues: usize, descriptors_max: usize) -> io::Result<DoorbellEventfds> {
        let queues = queues.min(QUEUES_MAX).min(descriptors_max.saturating_sub(1));
        (0..queues).map(|_| EventFd::new().map(Arc::new)).collect::<io::Result<_>>().map(DoorbellEventfds)
    }

    /// Those of an earlier process.
    pub(super) fn of(eventfds: Vec<Arc<EventFd>>) -> DoorbellEventfds {
        DoorbellEventfds(eventfds)
    }

    /// The eventfd of a queue; the admin queue is queue 0.
    pub(super) fn get(&self, qid: usize) -> Option<&Arc<EventFd>> {
        self.0.get(qid)
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = &Arc<EventFd>> {
        self.0.iter()
    }

    /// Whether the client has none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The reply to a client. Its descriptors are the file of the registers, which has the layout of BAR 0, and these
    /// eventfds.
    pub(super) fn describe(&self, stride: u8) -> RegionIoFds {
        let part = |at: usize, qid: usize| {
            let offset = (DOORBELLS + at) as u64;
            let kind = IoFdKind::ShadowEventFd { memory: 0, at: offset };
            IoFd { offset, size: size_of::<u32>() as u64, fd_index: qid as u32 + 1, kind, flags: 0, value: 0 }
        };
        let of_queue = |qid: usize| {
            let [tail, head] = [sq_doorbell(qid as u16, stride), cq_doorbell(qid as u16, stride)];
            [part(tail, qid), part(head, qid)]
        };
        RegionIoFds { index: region_index::BAR0, parts: (0..self.0.len()).flat_map(of_queue).collect() }
    }
}

impl NvmeFunction {
    /// The part of BAR 0 that the client may map, if any, and its file. The file has the layout of the region.
    pub(crate) fn shared_doorbells(&self) -> Option<(SparseArea, BorrowedFd<'_>)> {
        let (file, _) = self.registers.region().file().filter(|_| self.is_polled)?;
        Some((SparseArea { offset: DOORBELLS as u64, size: self.registers.len() as u64 }, file))
    }

    /// The reply to a client that asks for descriptors of a region, with at most `argsz` bytes; without parts if there
    /// are none. `descriptors_max` is the number of descriptors that it takes with a message.
    ///
    /// # Errors
    /// The cause, as text.
    pub(super) fn offer_eventfds(
        &mut self,
        argsz: u32,
        index: u32,
        descriptors_max: usize,
    ) -> Result<VfioReply<'static>, String> {
        if index != region_index::BAR0 {
            return Ok(VfioReply::DeviceGetRegionIoFds(RegionIoFds { index, parts: Vec::new() }));
        }
        if self.doorbell_eventfds.is_empty() && !self.is_polled {
            if self.queues.iter().any(Option::is_some) {
                return Err("it comes before I/O queues are created".into());
            }
            let eventfds = DoorbellEventfds::new(self.vectors.len(), descriptors_max);
            self.doorbell_eventfds = eventfds.map_err(|error| error.to_string())?;
        }
        let io_queues = self.vectors.len() as u16 - 1;
        let fds = self.doorbell_eventfds.describe(ControllerOptions::widest_stride(io_queues));
        let bytes = fds.reply_bytes();
        if bytes > argsz {
            return Ok(VfioReply::RegionIoFdsCut { argsz: bytes, index });
        }
        Ok(VfioReply::DeviceGetRegionIoFds(fds))
    }

    /// The descriptors of that reply.
    pub(crate) fn offered_descriptors(&self) -> Vec<BorrowedFd<'_>> {
        if self.doorbell_eventfds.is_empty() {
            return Vec::new();
        }
        let file = self.registers.region().file().map(|(file, _)| file);
        file.into_iter().chain(self.doorbell_eventfds.iter().map(|eventfd| eventfd.as_fd())).collect()
    }

    /// Readable when the client has written a doorbell of the admin queue, if it signals that.
    pub(crate) fn admin_doorbell(&self) -> Option<&Arc<EventFd>> {
        self.doorbell_eventfds.get(0)
    }

    /// Tells a queue that a message has written one of its doorbells.
    pub(super) fn kick(&self, config: &VfioUserExport, cqid: u16) -> Result<(), LaneGone> {
        let place = usize::from(cqid) - 1;
        match self.queues.get(place).and_then(Option::as_ref) {
            Some(CreatedQueue { kick: Some(kick), .. }) => kick.signal(),
            // The client could have made that of its doorbells blocking and full.
            Some(_) if !self.is_polled => config.queues[place].notify()?,
            _ => {}
        }
        Ok(())
    }

    /// What the lane of a queue listens to. Eventfds of submission queues with another number are listened to by no
    /// lane, so a queue that has any is polled.
    pub(super) fn kick_of(&self, place: usize, created: &CreatedQueue) -> Option<Arc<EventFd>> {
        let cqid = place + 1;
        let is_unheard = |sqid: usize| sqid != cqid && self.doorbell_eventfds.get(sqid).is_some();
        let slot = created.slot.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sqids = slot.iter().flat_map(|queue| queue.submission_queues());
        if sqids.any(|sqid| is_unheard(usize::from(sqid))) {
            return None;
        }
        self.doorbell_eventfds.get(cqid).or(created.kick.as_ref()).cloned()
    }
}

/// Bytes of the doorbell registers, in whole pages.
pub(super) fn doorbell_bytes(disk: &NvmeDisk) -> usize {
    sq_doorbell(disk.io_queues() + 1, ControllerOptions::widest_stride(disk.io_queues())).next_multiple_of(4096)
}

/// The doorbell registers in a region with their layout, which ends with them.
pub(super) fn registers_in(region: Arc<Region>) -> View {
    let len = region.len() - DOORBELLS;
    View::new(region, DOORBELLS as u64, len, 8).unwrap_or_else(|| unreachable!("its end"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_queues_have_an_eventfd_as_a_message_has_room_for() {
        for (queues, descriptors_max, expected) in
            [(3, 16, 3), (33, 16, 15), (65, 253, QUEUES_MAX), (3, 1, 0), (3, 0, 0)]
        {
            let eventfds = DoorbellEventfds::new(queues, descriptors_max).unwrap();
            assert_eq!(eventfds.iter().len(), expected, "{queues} queues, {descriptors_max} descriptors");
            assert_eq!(eventfds.describe(4).parts.len(), 2 * expected);
            assert!(eventfds.describe(4).reply_bytes() <= 4096);
        }
    }

    #[test]
    fn the_file_has_a_doorbell_at_its_offset_in_the_region() {
        let reply = DoorbellEventfds::new(2, 16).unwrap().describe(0);
        let kind = |at| IoFdKind::ShadowEventFd { memory: 0, at };
        let part = |offset, fd_index| IoFd { offset, size: 4, fd_index, kind: kind(offset), flags: 0, value: 0 };
        assert_eq!(reply.parts, [part(0x1000, 1), part(0x1004, 1), part(0x1008, 2), part(0x100c, 2)]);
    }
}
