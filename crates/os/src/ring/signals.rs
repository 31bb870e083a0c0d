//! Foreign eventfds that a lane signals: the call eventfds of a front-end, the kick eventfds of a back-end.
//!
//! The other end may have made its eventfd blocking and full, and may change that at any time, so nothing is written to
//! it: a write may wait, whatever was checked before. Each eventfd is registered with a small ring of its own instead,
//! and a signal is a message from the lane's ring to that ring. The kernel posts the message as a completion and
//! signals the eventfd as it does for any completion, which never waits: a full counter stays full.
//!
//! Messages are posted while the lane submits them. None is in flight after that, so nothing has to be waited for when
//! the eventfd is replaced or the lane ends.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mq::{SignalEventfd, SignalSlot};
use io_uring::{IoUring, opcode, types};

use super::{KIND_SIGNAL, Ring, RingCounters, name};

/// The ring to which an eventfd is registered.
struct Signaller {
    uring: IoUring,
    /// Number of the lane's entry that carries the latest message, counted from its ring's first.
    entry: u64,
}

impl Signaller {
    #[cold]
    fn new(eventfd: BorrowedFd<'_>) -> io::Result<Signaller> {
        // One message at a time: the completion of the last one is taken before the next is sent.
        let uring = IoUring::new(1)?;
        uring.submitter().register_eventfd(eventfd.as_raw_fd())?;
        Ok(Signaller { uring, entry: 0 })
    }
}

/// What a lane keeps for an eventfd.
#[derive(Default)]
struct SignalState {
    /// Whether it is in use.
    taken: bool,
    signaller: Option<Signaller>,
    /// Whether it was reported that no signaller can be made.
    reported: bool,
}

/// Signal slots of a lane.
pub(super) struct EventfdSignals {
    places: Vec<SignalState>,
    /// Signallers that were given up, which entries that the kernel does not accept now may still name.
    parting: Vec<Signaller>,
    view: Arc<RingCounters>,
}

impl EventfdSignals {
    pub(super) fn new(view: Arc<RingCounters>) -> EventfdSignals {
        EventfdSignals { places: Vec::new(), parting: Vec::new(), view }
    }

    /// Index of a slot, assigned at its first use.
    #[inline]
    fn number(&mut self, place: &mut SignalSlot) -> u32 {
        *place.number.get_or_insert_with(|| self.give())
    }

    #[cold]
    fn give(&mut self) -> u32 {
        let free = self.places.iter().position(|place| !place.taken);
        let index = free.unwrap_or_else(|| {
            self.places.push(SignalState::default());
            self.places.len() - 1
        });
        self.places[index].taken = true;
        self.view.count_signals(1);
        index as u32
    }
}

impl SignalEventfd for Ring {
    fn signal(&mut self, place: &mut SignalSlot, eventfd: BorrowedFd<'_>) {
        let index = self.signals.number(place);
        let submitted = self.pushed - self.uring.submission().len() as u64;
        let signaller = self.signals.places[index as usize].signaller_for(eventfd);
        place.is_owed = signaller.is_none();
        let Some(signaller) = signaller else { return };
        if signaller.entry > submitted {
            return; // A message that is not sent yet is this signal as well.
        }
        signaller.uring.completion().for_each(drop);
        signaller.entry = self.pushed + 1;
        let message = opcode::MsgRingData::new(types::Fd(signaller.uring.as_raw_fd()), 0, 0, None);
        // SAFETY: the entry points to no memory, and its ring is kept until it is submitted.
        unsafe { self.push_named(&message.build().user_data(name(KIND_SIGNAL, index, 0))) };
        self.submit();
        self.reap();
    }

    fn forget(&mut self, place: &mut SignalSlot) {
        let Some(index) = place.number.take() else { return };
        let old = std::mem::take(&mut self.signals.places[index as usize]);
        self.signals.view.count_signals(-1);
        self.signals.parting.extend(old.signaller);
        // Entries that wait may name it. Otherwise it would be kept until another slot is forgotten.
        self.flush();
        if self.uring.submission().is_empty() {
            self.signals.parting.clear();
        }
    }

    fn ignore(&mut self, eventfd: BorrowedFd<'_>) {
        while let Some(index) = self.eventfds.index_of(eventfd) {
            self.unwatch(index);
            self.submit();
        }
    }
}

impl SignalState {
    #[inline]
    fn signaller_for(&mut self, eventfd: BorrowedFd<'_>) -> Option<&mut Signaller> {
        if self.signaller.is_none() {
            self.make_signaller(eventfd);
        }
        self.signaller.as_mut()
    }

    #[cold]
    fn make_signaller(&mut self, eventfd: BorrowedFd<'_>) {
        match Signaller::new(eventfd) {
            Ok(signaller) => self.signaller = Some(signaller),
            // The caller tries again.
            Err(error) if !std::mem::replace(&mut self.reported, true) => {
                tracing::error!(%error, "no ring can be made for an eventfd, so it is signalled later; raise the limit on open files");
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use blkyard_sys::EventFd;

    use super::super::{Cid, RingConfig};
    use super::*;

    #[test]
    fn a_ring_of_an_eventfd_is_closed_with_its_slot_although_entries_wait() {
        let mut ring = Ring::new(RingConfig { entries: 8, outstanding_max: 8, ..RingConfig::default() }).unwrap();
        let inbox = ring.inbox(1);
        let eventfd = EventFd::new().unwrap();
        let mut place = SignalSlot::default();
        ring.signal(&mut place, eventfd.as_fd());
        // SAFETY: the entry points to no memory.
        unsafe { ring.push(inbox, Cid(0), opcode::Nop::new().build()) };
        ring.forget(&mut place);
        assert!(ring.signals.parting.is_empty());
        assert!(ring.signals.places.iter().all(|place| place.signaller.is_none()));
        ring.reap();
        assert!(ring.take(inbox).is_some(), "the entry was submitted");
    }
}
