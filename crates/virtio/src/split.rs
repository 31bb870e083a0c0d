//! The device side of a split virtqueue. [2.7]
//!
//! Owned by one thread. It takes heads from the available ring, and puts used elements into the used ring; indexes are
//! read and written once per batch. The guest may write any of it at any time. An invalid index or head, or a head that
//! is still in flight, breaks the ring for good ([`RingFault`]), since later contents cannot be trusted. It does not
//! read buffers and sends no call: it only reports when to.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use crate::descriptor::{DESC_BYTES, DescriptorTable};
use crate::inflight::SplitInflight;
use crate::order::{InOrder, UsedElement};
use crate::ring::{ChainHead, RUN_MAX, RingBase, RingFault, RingLayout, RingSetupError, check_size};
use crate::{Chain, Features, GuestMemory, Inflight, InflightFault};

// Places in the available ring [2.7.6] and the used ring [2.7.8]; both begin with flags and index.
pub(crate) const FLAGS: usize = 0;
pub(crate) const INDEX: usize = 2;
pub(crate) const RING: usize = 4;
pub(crate) const AVAIL_ELEMENT: usize = 2;
pub(crate) const USED_ELEMENT: usize = 8;
pub(crate) const NO_INTERRUPT: u16 = 1;
pub(crate) const NO_NOTIFY: u16 = 1;

/// Bytes and alignment of descriptor table, available ring and used ring, event indexes included. [2.7]
pub fn ring_bytes(size: u16) -> [(usize, usize); 3] {
    let size = usize::from(size);
    [(size * DESC_BYTES, 16), (RING + size * AVAIL_ELEMENT + 2, 2), (RING + size * USED_ELEMENT + 2, 4)]
}

/// A split ring, seen from the device.
///
/// Indexes run freely modulo 2^16:
///
/// ```text
///  used ring ── published ──────▶ next_used      available ring ── next_avail ──────▶ avail_seen
///                     completed, unpublished                          offered, not fetched
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
    /// The driver takes turns with us.
    is_near: bool,
    next_used: u16,
    /// The used index as the driver can see it.
    published: u16,
    /// No element was published since the set-up. Whether the driver was notified of an earlier owner's elements is
    /// unknown.
    untold: bool,
    /// How far fetching was ahead of completing at the set-up, by the indexes.
    lead: u16,
    fault: Option<RingFault>,
    /// Which heads are out. A byte each, not a bit: neighbours in one word would wait for each other.
    out: Box<[bool]>,
    /// Chains left in flight before the set-up: fetched first, from the end.
    left: Vec<u16>,
    /// Record of the chains in flight.
    inflight: Option<SplitInflight>,
    /// If the driver wants its chains back in the order it offered them.
    order: Option<InOrder>,
    /// Neither of these: one test for each chain instead of both.
    plain: bool,
}

impl SplitRing {
    /// A ring of `size` entries whose parts have the lengths and alignments of [`ring_bytes`], with the ring features.
    ///
    /// `next_avail` is the position of the next fetch. That of used elements is read from the ring: only a device
    /// writes that index, and the driver compares it with its own last value only, so any other number would lose or
    /// invent elements. After an orderly stop the two are equal; after a crash they need not be.
    ///
    /// # Errors
    /// The size is not a power of two.
    pub fn new(
        layout: RingLayout,
        size: u16,
        features: Features,
        next_avail: u16,
    ) -> Result<SplitRing, RingSetupError> {
        check_size(features - Features::RING_PACKED, size)?;
        let next_used = layout.used.load_u16(INDEX, Relaxed);
        Ok(SplitRing {
            layout,
            size,
            mask: size - 1,
            event_idx: features.contains(Features::EVENT_IDX),
            indirect: features.contains(Features::INDIRECT_DESC),
            next_avail,
            avail_seen: next_avail,
            is_near: false,
            next_used,
            published: next_used,
            untold: true,
            lead: next_avail.wrapping_sub(next_used),
            fault: None,
            out: vec![false; usize::from(size)].into(),
            left: Vec::new(),
            inflight: None,
            order: features.contains(Features::IN_ORDER).then(|| InOrder::new(size)),
            plain: !features.contains(Features::IN_ORDER),
        })
    }

    /// Records chains in flight from now on. Chains in flight in an existing record are fetched first, and the ring
    /// continues after them, whatever its base. To be called before the first fetch.
    ///
    /// # Errors
    /// The record is inconsistent; it was not changed.
    pub fn track(&mut self, record: Inflight) -> Result<(), InflightFault> {
        let (inflight, left) = SplitInflight::recover(record, self.size, self.next_used)?;
        self.inflight = Some(inflight);
        self.plain = false;
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

    /// Chains known to be offered and not fetched yet, a run at most.
    #[inline]
    pub fn in_sight(&self) -> usize {
        usize::from(self.avail_seen.wrapping_sub(self.next_avail))
    }

    /// See [`DeviceRing::set_near`](crate::DeviceRing::set_near).
    #[inline]
    pub fn set_near(&mut self, is_near: bool) {
        self.is_near = is_near;
    }

    /// The available index as it is now. For comparison only.
    pub fn front(&self) -> u16 {
        self.layout.avail.load_u16(INDEX, Relaxed)
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
    // Not inlined: the walk wants all registers.
    #[inline(never)]
    pub fn fetch(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<Option<ChainHead>, RingFault> {
        let index = if self.next_avail != self.avail_seen || self.look(memory, chain)? {
            self.take()?
        } else if let Some(index) = self.left.pop() {
            index
        } else {
            return Ok(None);
        };
        let table = DescriptorTable { view: &self.layout.desc, size: self.size, indirect: self.indirect };
        chain.walk(memory, table, index);
        let place = self.order.as_mut().map_or(0, |order| order.fetched(index, index, 1, chain.writable_bytes()));
        Ok(Some(ChainHead { id: index, slots: 1, place, record: index }))
    }

    /// Takes the next head out of the available ring.
    #[inline(always)]
    fn take(&mut self) -> Result<u16, RingFault> {
        let place = usize::from(self.next_avail & self.mask);
        let index = self.layout.avail.load_u16(RING + place * AVAIL_ELEMENT, Relaxed);
        if index >= self.size {
            return Err(self.breaks(RingFault::HeadOutOfRange));
        }
        // A chain that has completed and is not published has no slot if it is offered again: neither in the order, nor
        // in the record.
        let has_place = self.plain || self.next_avail.wrapping_sub(self.published).wrapping_sub(self.lead) < self.size;
        if std::mem::replace(&mut self.out[usize::from(index)], true) || !has_place {
            return Err(self.breaks(RingFault::HeadTwice));
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.fetched(index);
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(index)
    }

    /// Reads the available index. Returns whether the ring has a chain to fetch; chains left in flight come first.
    // Not inlined: once for each run.
    #[inline(never)]
    fn look(&mut self, memory: &GuestMemory, chain: &Chain) -> Result<bool, RingFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        if !self.left.is_empty() {
            return Ok(false);
        }
        // Pairs with the driver's barrier between its descriptors and ring entries, and the index. [2.7.13.3]
        let avail = self.layout.avail.load_u16(INDEX, Acquire);
        if avail.wrapping_sub(self.next_avail) > self.size {
            return Err(self.breaks(RingFault::AvailJumped));
        }
        let run = avail.wrapping_sub(self.next_avail).min(RUN_MAX);
        self.avail_seen = self.next_avail.wrapping_add(run);
        if run == 0 {
            // The entry comes with the index then, where that is another line, and not after it.
            self.layout.avail.warm_to_read(RING + usize::from(self.next_avail & self.mask) * AVAIL_ELEMENT);
        }
        // The driver's latest writes are in its caches. Requested together, the lines take hardly longer than one.
        if run > 1 && !self.is_near {
            let places = (0..run).map(|ahead| usize::from(self.next_avail.wrapping_add(ahead) & self.mask));
            let heads = places.map(|place| self.layout.avail.load_u16(RING + place * AVAIL_ELEMENT, Relaxed));
            let addr = |head| self.layout.desc.load_u64(usize::from(head) * DESC_BYTES, Relaxed);
            chain.warm(memory, heads.filter(|head| *head < self.size).map(addr));
        }
        Ok(run > 0)
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
    // Always inlined, since a head is four numbers to pack for a call.
    #[inline(always)]
    #[expect(clippy::needless_pass_by_value, reason = "a head is spent when its chain is completed")]
    pub fn complete(&mut self, head: ChainHead, written: u32) {
        let ChainHead { id, slots, place, .. } = head;
        let out = self.out.get_mut(usize::from(id)).is_some_and(std::mem::take);
        assert!(out, "head {id} is not out of this ring");
        if let Some(order) = &mut self.order {
            return order.done(place, written);
        }
        self.put(UsedElement { id, written, chains: 1, slots });
        if let Some(inflight) = &mut self.inflight {
            inflight.completed(id);
        }
    }

    /// Writes the used elements of all chains that are next in order.
    #[inline(never)]
    fn tell(&mut self) {
        while let Some(order) = &mut self.order {
            let each = |id| self.inflight.iter_mut().for_each(|inflight| inflight.completed(id));
            let Some(used) = order.tell(each) else { break };
            self.put(used);
        }
    }

    /// A batch takes the first of its elements and leaves the others as they were. [2.7.9]
    #[inline]
    fn put(&mut self, used: UsedElement) {
        let element = RING + usize::from(self.next_used & self.mask) * USED_ELEMENT;
        self.layout.used.store_u32s(element, [u32::from(used.id), used.written], Relaxed);
        self.next_used = self.next_used.wrapping_add(used.chains);
    }

    /// Publishes all chains completed since the last call. Returns whether the driver wants a call for them.
    #[inline]
    #[must_use = "a driver that is not called when it wants to be sleeps for ever"]
    pub fn publish(&mut self) -> bool {
        if !self.plain {
            self.tell();
        }
        if self.next_used == self.published {
            return false;
        }
        let old = std::mem::replace(&mut self.published, self.next_used);
        // A fence has two sides. We store the index, then load the driver's request; the driver, before it sleeps,
        // stores its request, has a full barrier, then loads the index. Both stores cannot be missed by both loads only
        // if neither side's load overtakes its store. Here a sequentially consistent store and load guarantee that; on
        // x86 they are one exchange and a plain load. Without them the driver could miss the element and we its
        // request: it would sleep without end. [2.7.7.2, 2.7.14] The store also releases the used elements and the data
        // to a reader of the index.
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

    /// Asks the driver for a notification of the next chain it offers. True if one is available already: then there may
    /// be no notification.
    pub fn enable_notify(&mut self) -> bool {
        // The mirror image of `publish`: we store our request, then load the index; the driver stores the index, has a
        // full barrier, then loads our request. If our load overtook our store, neither side would see a chain offered
        // between the two. [2.7.10.2, 2.7.13.4]
        if self.event_idx {
            let place = RING + usize::from(self.size) * USED_ELEMENT;
            self.layout.used.store_u16(place, self.next_avail, SeqCst);
        } else {
            self.layout.used.store_u16(FLAGS, 0, SeqCst);
        }
        !self.left.is_empty() || self.fault.is_none() && self.layout.avail.load_u16(INDEX, SeqCst) != self.next_avail
    }

    /// Tells the driver that we poll. A hint: notifications may come nevertheless. With event indexes there is nothing
    /// to store, since the request of the last [`SplitRing::enable_notify`] applies once. [2.7.10]
    pub fn disable_notify(&mut self) {
        if !self.event_idx {
            self.layout.used.store_u16(FLAGS, NO_NOTIFY, Relaxed);
        }
    }

    /// Index of the next chain to fetch, at which another device could continue once no chain is in flight.
    pub fn base(&self) -> RingBase {
        RingBase::split(self.next_avail)
    }

    /// Chains fetched and not given back.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.next_avail.wrapping_sub(self.next_used).wrapping_sub(self.lead)
    }

    /// Why the ring is broken, if it is.
    pub fn fault(&self) -> Option<RingFault> {
        self.fault
    }
}

/// Whether moving an index from `old` to `new` passes `event`, the position after which the other side wants a
/// notification. [2.7.10.2]
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
