//! Bells of others that a lane rings: event descriptors that a front-end gave us to call it by.
//!
//! Each ring is an entry of the lane's own ring, submitted at once. The kernel writes without waiting as long as the
//! descriptor allows; if whoever shares it has made it blocking, a thread of the kernel's writes, and waits while its
//! counter is full; the lane does not. One entry for each place may be out, so such a peer holds up nothing but its own
//! bell. It may have gone through before we hear of it, and been answered: so a bell that is to be rung meanwhile is
//! rung once more when it comes back.
//!
//! Unsafe: entries carry the address of the count that is written, which is static.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkyard_mq::{Chime, ChimePlace};
use io_uring::{opcode, types};

use super::{KIND_CHIME, Ring, RingView, name};

/// Places of one lane: one for each bell that a station may have to ring, on either side.
pub(super) const CHIMES_MAX: usize = super::bells::BELLS_MAX - 1;

/// What is added to the counter of an event descriptor.
static ONE: [u8; 8] = 1_u64.to_ne_bytes();

/// A place, and whether it has a ring out.
#[derive(Debug, Default)]
struct Place {
    out: bool,
    /// It was to be rung once more meanwhile.
    again: bool,
    /// How many rings were called off: what comes back under an older number is of another bell.
    generation: u32,
    /// Whether it is anybody's now.
    taken: bool,
    /// Our duplicate of the bell: an entry may have to wait for the kernel, while its owner closes the descriptor and
    /// the number comes to mean another file.
    bell: Option<OwnedFd>,
}

/// The places of a lane.
#[derive(Debug)]
pub(super) struct Chimes {
    places: Vec<Place>,
    /// Bells of rings that were called off, which entries not yet submitted may still name.
    parting: Vec<OwnedFd>,
    /// Places that are to be rung once more, now that the ring before is over.
    owed: Vec<u32>,
    view: Arc<RingView>,
}

impl Chimes {
    pub(super) fn new(view: Arc<RingView>) -> Chimes {
        Chimes {
            places: Vec::with_capacity(CHIMES_MAX),
            parting: Vec::new(),
            owed: Vec::with_capacity(CHIMES_MAX),
            view,
        }
    }

    /// The number of a place, given when it is first asked for.
    #[inline]
    fn number(&mut self, place: &mut ChimePlace) -> u32 {
        *place.0.get_or_insert_with(|| self.give())
    }

    #[cold]
    fn give(&mut self) -> u32 {
        let free = self.places.iter().position(|place| !place.taken);
        let index = free.unwrap_or_else(|| {
            assert!(self.places.len() < CHIMES_MAX, "more than {CHIMES_MAX} stations of a lane ring bells");
            self.places.push(Place::default());
            self.places.len() - 1
        });
        self.places[index].taken = true;
        self.view.count_chimes(1);
        index as u32
    }

    /// A ring went through, or failed for good. False if none was ever out there.
    pub(super) fn rang(&mut self, index: usize, generation: u32) -> bool {
        let Some(place) = self.places.get_mut(index) else { return false };
        if generation != place.generation {
            return true; // Of a bell that was replaced.
        }
        if std::mem::take(&mut place.again) {
            self.owed.push(index as u32);
        }
        std::mem::take(&mut place.out)
    }

    /// The rings that the kernel may have.
    pub(super) fn out(&self) -> impl Iterator<Item = u64> {
        let out = self.places.iter().enumerate().filter(|(_, place)| place.out);
        out.map(|(index, place)| name(KIND_CHIME, index as u32, place.generation))
    }
}

impl Ring {
    /// Rings once more what was to be rung while it was not known whether the ring before had gone through.
    #[inline]
    pub(super) fn ring_owed(&mut self) {
        while let Some(index) = self.chimes.owed.pop() {
            self.ring_at(index);
        }
    }

    /// Rings the bell of a place, which has no ring out.
    fn ring_at(&mut self, index: u32) {
        let place = &mut self.chimes.places[index as usize];
        let Some(own) = &place.bell else { return };
        place.out = true;
        let name = name(KIND_CHIME, index, place.generation);
        let write = opcode::Write::new(types::Fd(own.as_raw_fd()), ONE.as_ptr(), ONE.len() as u32);
        // SAFETY: the entry points to a static, and its descriptor is kept open until it is submitted.
        unsafe { self.push_named(&write.build().user_data(name)) };
        self.submit();
    }
}

impl Chime for Ring {
    fn chime(&mut self, place: &mut ChimePlace, bell: BorrowedFd<'_>) {
        let index = self.chimes.number(place);
        let place = &mut self.chimes.places[index as usize];
        if place.out {
            place.again = true;
            return;
        }
        if place.bell.is_none() {
            match bell.try_clone_to_owned() {
                Ok(own) => place.bell = Some(own),
                Err(error) => return tracing::error!(%error, "a bell cannot be duplicated, so it is not rung"),
            }
        }
        self.ring_at(index);
        self.reap();
    }

    fn forget(&mut self, place: &mut ChimePlace) {
        let Some(index) = place.0.take() else { return };
        let place = &mut self.chimes.places[index as usize];
        let old = name(KIND_CHIME, index, place.generation);
        let (was_out, bell) = (place.out, place.bell.take());
        *place = Place { generation: place.generation.wrapping_add(was_out.into()), ..Place::default() };
        self.view.count_chimes(-1);
        if was_out {
            self.chimes.parting.extend(bell);
            self.cancel(old);
            self.submit();
        }
        if self.uring.submission().is_empty() {
            self.chimes.parting.clear();
        }
    }

    fn ignore(&mut self, bell: BorrowedFd<'_>) {
        while let Some(index) = self.bells.index_of(bell) {
            self.unwatch(index);
            self.submit();
        }
    }
}
