//! A thread's part of a shared queue: its ends of the rings, its slots, and the lists of bios that need not cross
//! threads.

use blkyard_mem::ring::{Consumer, Producer, channel};

use crate::Bio;

/// The rings of a thread: its own ends, and those that the queue has.
pub(crate) fn rings(places: usize) -> (Ends, Member) {
    let (to_queue, sq) = channel(places);
    let (cq, from_queue) = channel(places);
    let list = || Vec::with_capacity(places);
    (Ends { plug: list(), sq: to_queue, cq: from_queue, own: list(), dispatched_ns: 0 }, Member { sq, cq })
}

/// A thread's own ends of its rings, and the bios that bypass them: those that it dispatches itself, and those that it
/// completes itself.
pub(crate) struct Ends {
    /// Submitted, and not passed on or made visible.
    pub(super) plug: Vec<Box<Bio>>,
    sq: Producer<Box<Bio>>,
    cq: Consumer<Box<Bio>>,
    /// Over, as this thread itself found out.
    pub(super) own: Vec<Box<Bio>>,
    /// Time at which this thread last dispatched its plug.
    pub(super) dispatched_ns: u64,
}

impl Ends {
    /// Number of slots of the rings.
    pub(super) fn places(&self) -> usize {
        self.sq.capacity()
    }

    /// Makes submitted bios visible.
    pub(super) fn publish(&mut self) {
        for bio in self.plug.drain(..) {
            let Ok(()) = self.sq.push(bio) else { unreachable!("the ring has a place for each place held") };
        }
        self.sq.publish();
    }

    /// Whether no bio is to be returned.
    #[inline]
    pub(super) fn is_empty(&mut self) -> bool {
        self.own.is_empty() && self.cq.is_empty()
    }

    /// Returns all completed bios, and their number. Ring and slots are free before the first call of `sink`, which may
    /// panic: then the other bios are dropped.
    #[inline]
    pub(super) fn drain(&mut self, places: &mut Places, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        while let Some(bio) = self.cq.pop() {
            self.own.push(bio);
        }
        self.cq.release();
        let ended = self.own.len();
        places.free(ended);
        self.own.drain(..).for_each(sink);
        ended
    }
}

/// The queue's ends of a thread's rings.
pub(crate) struct Member {
    pub(super) sq: Consumer<Box<Bio>>,
    pub(super) cq: Producer<Box<Bio>>,
}

/// The bios a thread may have out, and those it has.
#[derive(Debug)]
pub(crate) struct Places {
    count: usize,
    held: usize,
}

impl Places {
    pub(crate) fn new(count: usize) -> Places {
        Places { count, held: 0 }
    }

    /// How many more bios may be submitted before one comes back.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.count - self.held
    }

    /// Bios submitted and not given back.
    #[inline]
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// A bio is submitted.
    ///
    /// # Panics
    /// If there is no room.
    #[inline]
    pub(crate) fn hold(&mut self) {
        assert!(self.held < self.count, "a bio was submitted without a place");
        self.held += 1;
    }

    /// Bios were given back.
    #[inline]
    pub(crate) fn free(&mut self, ended: usize) {
        self.held -= ended;
    }
}
