//! Doorbells of a controller that is told of a write by an eventfd: the client stores the value in memory of the server
//! and signals.
//!
//! The server describes them in its reply to DEVICE_GET_REGION_IO_FDS, each as a part of BAR 0 with an eventfd and a
//! place in a file (libvfio-user calls that a shadow ioeventfd). They are used if the places are in the order of the
//! registers, so that the file takes the place of the registers for all owners of queues.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use blkyard_mem::{Region, View};
use blkyard_nvme::registers::{DOORBELLS, cq_doorbell, sq_doorbell};
use blkyard_sys::EventFd;
use blkyard_wire::vfio_user::{IoFd, IoFdKind, RegionIoFds, region_index};

use crate::vfio_user::VfioUserError;

/// The doorbells of the first queues, beginning with the admin queue.
#[derive(Debug)]
pub(crate) struct SignalledDoorbells {
    /// The registers from offset 1000h on.
    pub(crate) registers: View,
    /// To be signalled after a write of a doorbell, by queue.
    pub(crate) eventfds: Vec<Arc<EventFd>>,
}

/// Where a doorbell is: eventfd, file, and where in that file the first doorbell would be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DoorbellPlace {
    eventfd: u32,
    file: u32,
    first_at: u64,
}

impl SignalledDoorbells {
    /// The doorbells of a server that has described them so, with CAP.DSTRD `stride`. `None` if these are not the
    /// doorbells of so many queues.
    ///
    /// # Errors
    /// One of the descriptors is no eventfd, or cannot be mapped.
    pub(crate) fn new(
        fds: &RegionIoFds,
        descriptors: &[OwnedFd],
        stride: u8,
        queues_min: usize,
    ) -> Result<Option<SignalledDoorbells>, VfioUserError> {
        let places = places(fds, stride);
        let Some(DoorbellPlace { file, first_at, .. }) = places.first().copied() else { return Ok(None) };
        if places.len() < queues_min {
            return Ok(None);
        }
        let failed = |cause: String| VfioUserError::Map { index: region_index::BAR0, cause };
        let len = sq_doorbell(places.len() as u16, stride);
        let region = Region::map_file(descriptors[file as usize].as_fd(), first_at, len as u64);
        let region = region.map_err(|error| failed(error.to_string()))?;
        let registers = View::new(region, 0, len, 4).ok_or_else(|| failed("its doorbells are not aligned".into()))?;
        let mut eventfds: Vec<Arc<EventFd>> = Vec::with_capacity(places.len());
        for (queue, place) in places.iter().enumerate() {
            let same = places[..queue].iter().position(|earlier| earlier.eventfd == place.eventfd);
            let eventfd = if let Some(same) = same {
                Arc::clone(&eventfds[same])
            } else {
                let own = descriptors[place.eventfd as usize].try_clone();
                let own = own.map_err(|error| VfioUserError::System(error.to_string()))?;
                Arc::new(EventFd::from_foreign(own).map_err(|error| failed(error.to_string()))?)
            };
            eventfds.push(eventfd);
        }
        Ok(Some(SignalledDoorbells { registers, eventfds }))
    }
}

/// The places of the doorbells of the first queues. A queue has both its doorbells with one eventfd, and all are in one
/// file in the order of the registers; those behind the first queue for which that does not hold are left out.
fn places(fds: &RegionIoFds, stride: u8) -> Vec<DoorbellPlace> {
    let mut places: Vec<DoorbellPlace> = Vec::new();
    for qid in 0..u16::MAX {
        let [tail, head] = [sq_doorbell(qid, stride), cq_doorbell(qid, stride)].map(|at| place_of(fds, at as u64));
        let is_like = |place: &DoorbellPlace| {
            let is_first = |first: &DoorbellPlace| (first.file, first.first_at) == (place.file, place.first_at);
            head == Some(*place) && places.first().is_none_or(is_first)
        };
        match tail.filter(is_like) {
            Some(place) => places.push(place),
            None => break,
        }
    }
    places
}

/// The place of the doorbell at this offset from the first one.
fn place_of(fds: &RegionIoFds, at: u64) -> Option<DoorbellPlace> {
    let offset = DOORBELLS as u64 + at;
    let has = |part: &&IoFd| {
        let bytes = part.size.max(size_of::<u32>() as u64);
        part.flags == 0 && part.offset <= offset && offset + size_of::<u32>() as u64 <= part.offset + bytes
    };
    let part = fds.parts.iter().find(has)?;
    let IoFdKind::ShadowEventFd { memory, at: part_at } = part.kind else { return None };
    let first_at = part_at.checked_add(offset - part.offset)?.checked_sub(at)?;
    Some(DoorbellPlace { eventfd: part.fd_index, file: memory, first_at })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    /// A doorbell register with an eventfd, and with file 0 from there on.
    fn doorbell(offset: u64, fd_index: u32, at: u64) -> IoFd {
        let kind = IoFdKind::ShadowEventFd { memory: 0, at };
        IoFd { offset, size: 4, fd_index, kind, flags: 0, value: 0 }
    }

    /// Both doorbells of this many queues of stride 0, the first in the file at 40h.
    fn doorbells(queues: u32) -> RegionIoFds {
        let both = |queue: u32| {
            let at = |word: u64| u64::from(queue) * 8 + word * 4;
            [0, 1].map(|word| doorbell(0x1000 + at(word), queue + 1, 0x40 + at(word)))
        };
        RegionIoFds { index: 0, parts: (0..queues).flat_map(both).collect() }
    }

    #[test]
    fn queues_are_used_up_to_the_first_with_other_doorbells() {
        let changed = |change: &dyn Fn(&mut Vec<IoFd>)| {
            let mut fds = doorbells(4);
            change(&mut fds.parts);
            places(&fds, 0).len()
        };
        let table: [(&dyn Fn(&mut Vec<IoFd>), usize, &str); 9] = [
            (&|_| {}, 4, "all"),
            (&|parts| parts.reverse(), 4, "in any order"),
            (&|parts| parts.truncate(5), 2, "without the head of a queue"),
            (&|parts| parts[4].kind = IoFdKind::EventFd, 2, "without memory"),
            (&|parts| parts[7].fd_index = 9, 3, "with two eventfds for a queue"),
            (&|parts| parts[6].kind = IoFdKind::ShadowEventFd { memory: 5, at: 0x58 }, 3, "in another file"),
            (&|parts| parts[2].kind = IoFdKind::ShadowEventFd { memory: 0, at: 0x58 }, 1, "in another order"),
            (&|parts| parts[2].flags = 1, 1, "with an eventfd for one value only"),
            (&|parts| parts[0].kind = IoFdKind::ShadowEventFd { memory: 0, at: u64::MAX }, 0, "beyond any file"),
        ];
        for (change, queues, what) in table {
            assert_eq!(changed(change), queues, "{what}");
        }
        assert_eq!(places(&doorbells(4), 1).len(), 0, "of another stride");
    }

    #[test]
    fn a_part_may_have_all_doorbells() {
        let part = IoFd { size: 0x1000, ..doorbell(0x1000, 1, 0x2000) };
        let fds = RegionIoFds { index: 0, parts: vec![part] };
        let places = places(&fds, 2);
        assert_eq!(places.len(), 0x1000 / 32);
        assert!(places.iter().all(|place| *place == DoorbellPlace { eventfd: 1, file: 0, first_at: 0x2000 }));
    }

    #[test]
    fn a_value_comes_to_its_place_in_the_file() {
        let server = Region::shared(4096).unwrap();
        let (file, _) = server.file().unwrap();
        let descriptors: Vec<OwnedFd> = std::iter::once(file.try_clone_to_owned().unwrap())
            .chain((0..3).map(|_| EventFd::new().unwrap().into()))
            .collect();
        let doorbells = SignalledDoorbells::new(&doorbells(3), &descriptors, 0, 3).unwrap().unwrap();
        assert_eq!((doorbells.eventfds.len(), doorbells.registers.len()), (3, 24));
        doorbells.registers.store_u32(cq_doorbell(2, 0), 7, Relaxed);
        assert_eq!(View::new(server, 0x40, 24, 4).unwrap().load_u32(20, Relaxed), 7);
    }

    #[test]
    fn fewer_queues_than_wanted_are_not_used_and_other_descriptors_refused() {
        let memory = Region::shared(4096).unwrap();
        let descriptors: Vec<OwnedFd> =
            (0..4).map(|_| memory.file().unwrap().0.try_clone_to_owned().unwrap()).collect();
        assert!(SignalledDoorbells::new(&doorbells(3), &descriptors, 0, 4).unwrap().is_none());
        let error = SignalledDoorbells::new(&doorbells(3), &descriptors, 0, 3).unwrap_err();
        assert!(error.to_string().contains("not an eventfd"), "{error}");
    }
}
