//! Foreign eventfds that a lane signals: the call eventfds of a front-end.
//!
//! Each signal is an entry of the lane's own ring, submitted at once. The kernel writes without waiting if the
//! descriptor is non-blocking. If the peer has made it blocking, a kernel thread writes, and waits while its counter
//! is full; the lane does not. One entry for each slot may be in flight, so such a peer delays only its own eventfd.
//! The peer may have received the signal and reacted before the completion is reaped, so an eventfd that is to be
//! signalled meanwhile is signalled once more on completion.
//!
//! Unsafe: entries carry the address of the count that is written, which is static.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkyard_mq::{SignalEventfd, SignalSlot};
use io_uring::{opcode, types};

use super::{KIND_SIGNAL, Ring, RingCounters, name};

/// Value added to the counter of an event descriptor.
static ONE: [u8; 8] = 1_u64.to_ne_bytes();

/// A slot, and whether a signal of it is in flight.
#[derive(Debug, Default)]
struct SignalState {
    out: bool,
    /// To be signalled once more when the current signal completes.
    again: bool,
    /// Number of cancelled signals: a completion with an older number is of another eventfd.
    generation: u32,
    /// Whether it is in use.
    taken: bool,
    /// Our duplicate of the eventfd: an entry may wait for the kernel while the owner closes the descriptor and its
    /// number names another file.
    eventfd: Option<OwnedFd>,
}

/// Signal slots of a lane.
#[derive(Debug)]
pub(super) struct EventfdSignals {
    places: Vec<SignalState>,
    /// Eventfds of rings that were called off, which entries not yet submitted may still name.
    parting: Vec<OwnedFd>,
    /// Slots to be signalled once more, since their previous signal has completed.
    repeats: Vec<u32>,
    view: Arc<RingCounters>,
}

impl EventfdSignals {
    pub(super) fn new(view: Arc<RingCounters>) -> EventfdSignals {
        EventfdSignals { places: Vec::new(), parting: Vec::new(), repeats: Vec::new(), view }
    }

    /// Index of a slot, assigned at its first use.
    #[inline]
    fn number(&mut self, place: &mut SignalSlot) -> u32 {
        *place.0.get_or_insert_with(|| self.give())
    }

    #[cold]
    fn give(&mut self) -> u32 {
        let free = self.places.iter().position(|place| !place.taken);
        let index = free.unwrap_or_else(|| {
            self.places.push(SignalState::default());
            // Room for all from the start: signalling allocates nothing.
            self.repeats.reserve(self.places.len() - self.repeats.len());
            self.places.len() - 1
        });
        self.places[index].taken = true;
        self.view.count_signals(1);
        index as u32
    }

    /// A signal has completed, or failed permanently. False if none was in flight.
    pub(super) fn ended(&mut self, index: usize, generation: u32) -> bool {
        let Some(place) = self.places.get_mut(index) else { return false };
        if generation != place.generation {
            return true; // Of an eventfd that was replaced.
        }
        if std::mem::take(&mut place.again) {
            self.repeats.push(index as u32);
        }
        std::mem::take(&mut place.out)
    }

    /// The rings that the kernel may have.
    pub(super) fn out(&self) -> impl Iterator<Item = u64> {
        let out = self.places.iter().enumerate().filter(|(_, place)| place.out);
        out.map(|(index, place)| name(KIND_SIGNAL, index as u32, place.generation))
    }
}

impl Ring {
    /// Repeats signals that were requested while the previous one was in flight.
    #[inline]
    pub(super) fn repeat_signals(&mut self) {
        while let Some(index) = self.signals.repeats.pop() {
            self.signal_at(index);
        }
    }

    /// Signals the eventfd of a slot without a signal in flight.
    fn signal_at(&mut self, index: u32) {
        let place = &mut self.signals.places[index as usize];
        let Some(own) = &place.eventfd else { return };
        place.out = true;
        let name = name(KIND_SIGNAL, index, place.generation);
        let write = opcode::Write::new(types::Fd(own.as_raw_fd()), ONE.as_ptr(), ONE.len() as u32);
        // SAFETY: the entry points to a static, and its descriptor is kept open until it is submitted.
        unsafe { self.push_named(&write.build().user_data(name)) };
        self.submit();
    }
}

impl SignalEventfd for Ring {
    fn signal(&mut self, place: &mut SignalSlot, eventfd: BorrowedFd<'_>) {
        let index = self.signals.number(place);
        let place = &mut self.signals.places[index as usize];
        if place.out {
            place.again = true;
            return;
        }
        if place.eventfd.is_none() {
            match eventfd.try_clone_to_owned() {
                Ok(own) => place.eventfd = Some(own),
                Err(error) => {
                    return tracing::error!(%error, "an eventfd cannot be duplicated, so it is not signalled; raise the limit on open files");
                }
            }
        }
        self.signal_at(index);
        self.reap();
    }

    fn forget(&mut self, place: &mut SignalSlot) {
        let Some(index) = place.0.take() else { return };
        let place = &mut self.signals.places[index as usize];
        let old = name(KIND_SIGNAL, index, place.generation);
        let (was_out, eventfd) = (place.out, place.eventfd.take());
        *place = SignalState { generation: place.generation.wrapping_add(was_out.into()), ..SignalState::default() };
        self.view.count_signals(-1);
        if was_out {
            self.signals.parting.extend(eventfd);
            self.cancel(old);
            self.submit();
        }
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
