//! The device side of a split virtqueue. [2.7]
//!
//! Owned by one thread. It takes heads from the available ring, and puts used elements into the used ring; indexes
//! are read and written once per batch. The guest may write any of it at any time: an index or head that makes no
//! sense, or a head that is still out, breaks the ring for good ([`RingFault`]), since nothing that follows it can be
//! believed. It does not look into buffers, does not wake anybody (it only says when to), and has no packed format.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use blkyard_mem::View;

use crate::chain::{DESC_BYTES, Table};
use crate::counters::reasons;
use crate::inflight::SplitInflight;
use crate::{Chain, GuestMemory, Inflight, InflightFault};

/// The largest ring. [2.7]
pub const RING_SIZE_MAX: u16 = 32768;

// Places in the available ring [2.7.6] and the used ring [2.7.8]; both begin with flags and index.
const FLAGS: usize = 0;
const INDEX: usize = 2;
const RING: usize = 4;
const AVAIL_ELEMENT: usize = 2;
const USED_ELEMENT: usize = 8;
const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;

/// The three parts of a ring, as [`ring_bytes`] wants them.
#[derive(Clone, Debug)]
pub struct RingLayout {
    /// The descriptor table. The device only reads it.
    pub desc: View,
    /// The available ring. The device only reads it.
    pub avail: View,
    /// The used ring. The device only writes it, and reads its index once, at the start.
    pub used: View,
}

/// Bytes and alignment of descriptor table, available ring and used ring, event indexes included. [2.7]
pub fn ring_bytes(size: u16) -> [(usize, usize); 3] {
    let size = usize::from(size);
    [(size * DESC_BYTES, 16), (RING + size * AVAIL_ELEMENT + 2, 2), (RING + size * USED_ELEMENT + 2, 4)]
}

impl RingLayout {
    /// Finds the parts of a ring of `size` at these addresses of the front-end's process: descriptor table, available
    /// ring, used ring.
    ///
    /// # Errors
    /// Names the part that is not in shared memory, or not aligned.
    pub fn locate(memory: &GuestMemory, size: u16, user_addrs: [u64; 3]) -> Result<RingLayout, RingSetupError> {
        check_size(size)?;
        let bytes = ring_bytes(size);
        let view = |part: usize, what| {
            let (len, align) = bytes[part];
            let addr = user_addrs[part];
            memory.view_user(addr, len, align).ok_or(RingSetupError::Unreachable { what, addr, len, align })
        };
        Ok(RingLayout {
            desc: view(0, "descriptor table")?,
            avail: view(1, "available ring")?,
            used: view(2, "used ring")?,
        })
    }
}

/// Why a ring cannot be set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingSetupError {
    /// Index arithmetic needs a power of two. [2.7]
    #[error("a ring of {0} entries: the size must be a power of two, from 1 to {RING_SIZE_MAX}")]
    Size(u16),
    /// A part of the ring does not lie in one region, or is not aligned.
    #[error("the {what}, {len} bytes at {addr:#x}, does not lie in one shared region at a multiple of {align}")]
    Unreachable {
        /// Which part.
        what: &'static str,
        /// Where it should be, in the front-end's process.
        addr: u64,
        /// Its length, bytes.
        len: usize,
        /// What its address must be a multiple of.
        align: usize,
    },
}

fn check_size(size: u16) -> Result<(), RingSetupError> {
    // A power of two that fits 16 bits is at most 32768.
    if size.is_power_of_two() { Ok(()) } else { Err(RingSetupError::Size(size)) }
}

reasons! {
    /// What is wrong with a ring. It is used no more until the driver sets it up again.
    RingFault {
        /// The available index is further ahead than the ring is long.
        AvailJumped = "available index jumped further than the ring is long",
        /// A head lies outside the descriptor table.
        HeadOutOfRange = "head outside the descriptor table",
        /// A head was offered that has not come back yet.
        HeadTwice = "head offered again before it was used",
    }
}

/// A chain that was fetched and has not been completed. It can be redeemed once, at the ring it came from.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a head that is not completed is lost to the guest"]
pub struct Head(u16);

impl Head {
    /// The first descriptor's place in the table: the guest's word for the request.
    #[inline]
    pub fn index(&self) -> u16 {
        self.0
    }
}

/// A split ring, seen from the device.
///
/// Indexes run freely modulo 2^16:
///
/// ```text
///  used ring ── published ──────▶ next_used      available ring ── next_avail ──────▶ avail_seen
///                     completed, not told                             offered, not fetched
/// ```
#[derive(Debug)]
pub struct SplitRing {
    layout: RingLayout,
    size: u16,
    mask: u16,
    event_idx: bool,
    indirect: bool,
    next_avail: u16,
    /// The available index as last read.
    avail_seen: u16,
    next_used: u16,
    /// The used index as the driver can see it.
    published: u16,
    /// Nothing was published since the set-up. Whether the driver was told of what an earlier owner of the ring
    /// published is not known.
    untold: bool,
    /// How far fetching was ahead of completing at the set-up, by the indexes.
    lead: u16,
    fault: Option<RingFault>,
    /// Which heads are out. A byte each, not a bit: neighbours in one word would wait for each other.
    out: Box<[bool]>,
    /// What the driver has been owed since before the set-up: fetched before anything else, from the end on.
    left: Vec<u16>,
    /// Where what is in flight is recorded.
    inflight: Option<SplitInflight>,
}

impl SplitRing {
    /// A ring of `size` entries whose parts have the lengths and alignments of [`ring_bytes`].
    ///
    /// `next_avail` is where fetching goes on. Where used elements go on is read from the ring: only a device ever
    /// writes that index, and the driver compares what it has seen with nothing else, so to go on from any other
    /// number would lose or invent elements. After an orderly stop the two are equal; after a crash they need not be.
    ///
    /// # Errors
    /// The size is not a power of two.
    pub fn new(
        layout: RingLayout,
        size: u16,
        event_idx: bool,
        indirect: bool,
        next_avail: u16,
    ) -> Result<SplitRing, RingSetupError> {
        check_size(size)?;
        let next_used = layout.used.load_u16(INDEX, Relaxed);
        Ok(SplitRing {
            layout,
            size,
            mask: size - 1,
            event_idx,
            indirect,
            next_avail,
            avail_seen: next_avail,
            next_used,
            published: next_used,
            untold: true,
            lead: next_avail.wrapping_sub(next_used),
            fault: None,
            out: vec![false; usize::from(size)].into(),
            left: Vec::new(),
            inflight: None,
        })
    }

    /// Records from now on what is in flight. What the record says somebody else has left in flight is fetched first, and the
    /// ring goes on after it, wherever it was said to. To be called before anything is fetched.
    ///
    /// # Errors
    /// The record makes no sense; it was not changed.
    pub fn track(&mut self, record: Inflight) -> Result<(), InflightFault> {
        let (inflight, left) = SplitInflight::recover(record, self.size, self.next_used)?;
        self.inflight = Some(inflight);
        if let Some(left) = left {
            left.iter().for_each(|head| self.out[usize::from(*head)] = true);
            // Chains are fetched in the order they were offered, so those in flight are all between the two indexes.
            self.next_avail = self.next_used.wrapping_add(left.len() as u16);
            self.avail_seen = self.next_avail;
            self.lead = 0;
            self.left = left;
        }
        Ok(())
    }

    /// Chains that were in flight before the set-up and have not been fetched again.
    #[inline]
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Takes the next chain, if one is offered. A chain that is wrong in itself is returned like any other, with
    /// its [`Chain::fault`].
    ///
    /// # Errors
    /// The ring is broken. It stays so, and every further fetch says the same.
    #[inline]
    pub fn fetch(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<Option<Head>, RingFault> {
        if self.next_avail == self.avail_seen {
            if let Some(index) = self.left.pop() {
                return Ok(Some(self.take(memory, chain, index)));
            }
            if !self.look()? {
                return Ok(None);
            }
        }
        let place = usize::from(self.next_avail & self.mask);
        let index = self.layout.avail.load_u16(RING + place * AVAIL_ELEMENT, Relaxed);
        if index >= self.size {
            return Err(self.breaks(RingFault::HeadOutOfRange));
        }
        if std::mem::replace(&mut self.out[usize::from(index)], true) {
            return Err(self.breaks(RingFault::HeadTwice));
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.fetched(index);
        }
        Ok(Some(self.take(memory, chain, index)))
    }

    #[inline]
    fn take(&self, memory: &GuestMemory, chain: &mut Chain, index: u16) -> Head {
        let table = Table { view: &self.layout.desc, size: self.size, indirect: self.indirect };
        chain.walk(memory, table, index);
        Head(index)
    }

    /// Reads the available index. Says whether there is something to fetch.
    #[inline]
    fn look(&mut self) -> Result<bool, RingFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        // Pairs with the driver's barrier between its descriptors and ring entries, and the index. [2.7.13.3]
        let avail = self.layout.avail.load_u16(INDEX, Acquire);
        if avail.wrapping_sub(self.next_avail) > self.size {
            return Err(self.breaks(RingFault::AvailJumped));
        }
        self.avail_seen = avail;
        Ok(avail != self.next_avail)
    }

    #[cold]
    fn breaks(&mut self, fault: RingFault) -> RingFault {
        self.avail_seen = self.next_avail;
        *self.fault.get_or_insert(fault)
    }

    /// Puts a used element for the chain into the used ring. `written` are the bytes that were written from the first
    /// writable byte on, without a gap. [2.7.8.2] The driver learns of it with the next [`SplitRing::publish`].
    ///
    /// # Panics
    /// If the head is not out: it belongs to another ring.
    #[inline]
    #[expect(clippy::needless_pass_by_value, reason = "a head is spent when its chain is completed")]
    pub fn complete(&mut self, head: Head, written: u32) {
        let index = head.index();
        let out = self.out.get_mut(usize::from(index)).is_some_and(std::mem::take);
        assert!(out, "head {index} is not out of this ring");
        let element = RING + usize::from(self.next_used & self.mask) * USED_ELEMENT;
        self.layout.used.store_u32(element, u32::from(index), Relaxed);
        self.layout.used.store_u32(element + 4, written, Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.completed(index);
        }
    }

    /// Shows the driver all that was completed since the last time. Says whether the driver wants a call for it.
    #[inline]
    #[must_use = "a driver that is not called when it wants to be sleeps for ever"]
    pub fn publish(&mut self) -> bool {
        if self.next_used == self.published {
            return false;
        }
        let old = std::mem::replace(&mut self.published, self.next_used);
        // A fence has two sides. We store the index, then load what the driver wants; the driver, before it
        // sleeps, stores what it wants, has a full barrier, then loads the index. Both stores cannot be missed by
        // both loads only if neither side's load overtakes its store. Here a sequentially consistent store and load
        // see to that; on x86 they are one exchange and a plain load. Without them the driver could miss the element
        // and we its wish: it would sleep for ever. [2.7.7.2, 2.7.14]
        // The store also releases the used elements and the data to whoever sees the index.
        self.layout.used.store_u16(INDEX, self.next_used, SeqCst);
        if let Some(inflight) = &mut self.inflight {
            inflight.published(self.next_used);
        }
        let wanted = if self.event_idx {
            let event = self.layout.avail.load_u16(RING + usize::from(self.size) * AVAIL_ELEMENT, SeqCst);
            needs_event(event, self.next_used, old)
        } else {
            self.layout.avail.load_u16(FLAGS, SeqCst) & NO_INTERRUPT == 0
        };
        std::mem::replace(&mut self.untold, false) || wanted
    }

    /// Chains the driver has offered beyond those fetched; more than the ring holds if the index makes no sense.
    /// Reads shared memory each time.
    #[inline]
    pub fn available(&self) -> u16 {
        self.layout.avail.load_u16(INDEX, Relaxed).wrapping_sub(self.next_avail)
    }

    /// Asks the driver to notify us of the next chain it offers. Says whether one is there already: then there may be
    /// no notification.
    pub fn enable_notify(&mut self) -> bool {
        // The mirror image of `publish`: we store our wish, then load the index; the driver stores the index, has a
        // full barrier, then loads our wish. Were our load to overtake our store, a chain offered between the two
        // would be seen by nobody. [2.7.10.2, 2.7.13.4]
        if self.event_idx {
            let place = RING + usize::from(self.size) * USED_ELEMENT;
            self.layout.used.store_u16(place, self.next_avail, SeqCst);
        } else {
            self.layout.used.store_u16(FLAGS, 0, SeqCst);
        }
        !self.left.is_empty() || self.fault.is_none() && self.layout.avail.load_u16(INDEX, SeqCst) != self.next_avail
    }

    /// Tells the driver that we look by ourselves. A hint: notifications may come nevertheless. With event indexes
    /// there is nothing to store, since the wish of the last [`SplitRing::enable_notify`] is fulfilled once.
    /// [2.7.10]
    pub fn disable_notify(&mut self) {
        if !self.event_idx {
            self.layout.used.store_u16(FLAGS, NO_NOTIFY, Relaxed);
        }
    }

    /// The index of the next chain to fetch: where another device could go on, once nothing is in flight.
    #[inline]
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Chains fetched and not completed.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.next_avail.wrapping_sub(self.next_used).wrapping_sub(self.lead)
    }

    /// Why the ring is broken, if it is.
    pub fn fault(&self) -> Option<RingFault> {
        self.fault
    }
}

/// Whether moving an index from `old` to `new` passes `event`: the place after which the other side wants to be
/// told. [2.7.10.2]
#[inline]
pub(crate) fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_lies_between_old_and_new() {
        for (event, new, old, want) in [
            (0, 1, 0, true),
            (1, 1, 0, false),
            (0, 2, 1, false),
            (5, 10, 5, true),
            (9, 10, 5, true),
            (10, 10, 5, false),
            (4, 10, 5, false),
            (65535, 0, 65535, true),
            (65534, 3, 65530, true),
            (3, 3, 65530, false),
            (7, 7, 7, false),
        ] {
            assert_eq!(needs_event(event, new, old), want, "event {event}, {old} to {new}");
        }
    }
}
