//! The device side of a packed virtqueue. [2.8]
//!
//! One ring of descriptors: the driver fills slots in turn and marks them available, the device overwrites them with
//! used elements in turn. Two wrap counters say which lap a mark belongs to. A chain lies in adjacent slots, with its
//! id in the last. Its used element takes the next slot to be used, and skips as many slots as the chain had.
//!
//! Owned by one thread. The guest may write any of it at any time. A chain without end, or an offered slot that is
//! still in flight, breaks the ring for good ([`RingFault`]), since the position of the next chain is then unknown. An
//! id is opaque and is returned unchanged; no number from the driver is an index into a private table.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use crate::descriptor::{DESC_BYTES, FilledSlots};
use crate::inflight::{LeftChain, LeftInRecord, PackedInflight};
use crate::order::{InOrder, UsedElement};
use crate::ring::{ChainHead, RUN_MAX, RingBase, RingFault, RingLayout, RingSetupError, check_size};
use crate::{Chain, Features, GuestMemory, Inflight, InflightFault};

/// Marks in a descriptor's flags. [2.8.1] Available and used descriptors differ in the second.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
pub(crate) const MARKS: u16 = AVAIL | USED;

/// In a used element: the device has written to the buffer. [2.8.4]
const WRITE: u16 = 1 << 1;

/// The wrap counter, in a position as published to the other side. [2.8.10]
pub(crate) const WRAP: u16 = 1 << 15;

/// Notification request of a side, the upper half of an event area; the lower half is a position. [2.8.10]
pub(crate) mod request {
    use super::{Position, WRAP};

    /// Everything.
    pub(crate) const ENABLE: u32 = 0;
    /// Disabled.
    pub(crate) const DISABLE: u32 = 1;
    /// When a position is passed.
    pub(crate) const DESC: u32 = 2;

    /// Whether a side with this request must be notified that `count` slots were passed from `old` on, in a ring of
    /// `size`.
    #[inline]
    pub(crate) fn is_met(request: u32, event_idx: bool, old: Position, passed: u16, size: u16) -> bool {
        match request >> 16 & 3 {
            DISABLE => false,
            DESC if event_idx => {
                let event = Position::new(request as u16 & !WRAP, request as u16 & WRAP != 0);
                event.after(old, size) < u32::from(passed)
            }
            // Also a value that was not negotiated or is undefined: a spurious notification is harmless.
            _ => true,
        }
    }
}
const EVENT_BYTES: usize = 4;

/// Descriptors in a line of cache.
pub(crate) const LINE_DESCS: usize = 64 / DESC_BYTES;

/// Bytes and alignment of descriptor ring, driver's event area and device's event area. [2.8.10.1]
pub fn packed_ring_bytes(size: u16) -> [(usize, usize); 3] {
    [(usize::from(size) * DESC_BYTES, 16), (EVENT_BYTES, 4), (EVENT_BYTES, 4)]
}

/// A position in the ring and its lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) place: u16,
    /// Marks of used descriptors in this lap: both, or none in every other.
    lap: u16,
}

impl Position {
    #[inline]
    pub(crate) fn new(place: u16, wrap: bool) -> Position {
        Position { place, lap: if wrap { MARKS } else { 0 } }
    }

    /// From the word that both sides use; `None` if it is outside the ring.
    pub(crate) fn from_word(word: u16, size: u16) -> Option<Position> {
        let place = word & !WRAP;
        (place < size).then_some(Position::new(place, word & WRAP != 0))
    }

    #[inline]
    pub(crate) fn word(self) -> u16 {
        self.place | if self.wrap() { WRAP } else { 0 }
    }

    /// The wrap counter.
    #[inline]
    pub(crate) fn wrap(self) -> bool {
        self.lap != 0
    }

    /// The marks of a descriptor that is used in this lap.
    #[inline]
    pub(crate) fn used(self) -> u16 {
        self.lap
    }

    /// The marks of one that is available in this lap.
    #[inline]
    pub(crate) fn available(self) -> u16 {
        self.lap ^ USED
    }

    /// Whether a descriptor with this second word is used in this lap.
    #[inline]
    pub(crate) fn is_used(self, rest: u64) -> bool {
        (rest >> 48) as u16 & MARKS == self.used()
    }

    /// Whether it is available in this lap.
    #[inline]
    pub(crate) fn is_available(self, rest: u64) -> bool {
        (rest >> 48) as u16 & MARKS == self.available()
    }

    /// Advances by at most the ring's size.
    #[inline]
    pub(crate) fn advance(&mut self, slots: u16, size: u16) {
        // At most twice 32768 less one.
        let place = self.place + slots;
        if place >= size {
            self.place = place - size;
            self.lap ^= MARKS;
        } else {
            self.place = place;
        }
    }

    /// Goes back by at most the ring's size.
    #[inline]
    fn retreat(&mut self, slots: u16, size: u16) {
        if self.place < slots {
            self.place += size;
            self.lap ^= MARKS;
        }
        self.place -= slots;
    }

    /// Places from `old` on to this one, which is no more than a lap further on.
    #[inline]
    pub(crate) fn since(self, old: Position, size: u16) -> u16 {
        self.place + if self.lap == old.lap { 0 } else { size } - old.place
    }

    /// Where its descriptor is.
    #[inline]
    pub(crate) fn offset(self) -> usize {
        usize::from(self.place) * DESC_BYTES
    }

    /// Slots from `old` to this position, in a ring in which every other lap looks the same.
    #[inline]
    pub(crate) fn after(self, old: Position, size: u16) -> u32 {
        let lap = |at: Position| u32::from(at.place) + if at.wrap() { 0 } else { u32::from(size) };
        let two_laps = 2 * u32::from(size);
        (lap(self) % two_laps + two_laps - lap(old)) % two_laps
    }
}

/// A used element that is not written yet.
#[derive(Clone, Copy, Debug)]
struct Element {
    id: u16,
    /// Places it passes.
    slots: u16,
    written: u32,
}

impl Element {
    /// Second word of a descriptor, for an element at this position.
    #[inline]
    fn word(self, at: Position) -> u64 {
        let flags = at.used() | if self.written > 0 { WRITE } else { 0 };
        u64::from(self.written) | u64::from(self.id) << 32 | u64::from(flags) << 48
    }
}

/// A packed ring, seen from the device.
///
/// ```text
///           next_used ─────────────▶ next_avail ─────▶
///   published         │ completed, out            │ the driver's to fill
/// ```
#[derive(Debug)]
pub struct PackedRing {
    layout: RingLayout,
    size: u16,
    event_idx: bool,
    indirect: bool,
    /// Next descriptor to read.
    next_avail: Position,
    /// Chains to fetch whose lines were prefetched.
    warm: u16,
    /// The driver takes turns with us.
    is_near: bool,
    /// Where the next used element goes: the first that the driver cannot see yet.
    next_used: Position,
    /// Places passed by used elements that the driver cannot see yet.
    unpublished: u16,
    /// These elements, as long as the ring from the start. They are written together: the driver polls the first, and
    /// each poll takes its line from us.
    elements: Vec<Element>,
    /// No element was published since the set-up. Whether the driver was notified of an earlier owner's elements is
    /// unknown.
    untold: bool,
    /// Places the driver must not fill: of chains that are out, and of used elements it cannot see yet.
    slots_out: u16,
    /// Chains that are out.
    in_flight: u16,
    fault: Option<RingFault>,
    /// If the driver wants its chains back in the order it offered them.
    order: Option<InOrder>,
    /// Chains left in flight before the set-up: fetched first. `None` once that is done.
    left: Option<LeftInRecord>,
    /// Record of the chains in flight.
    inflight: Option<PackedInflight>,
}

impl PackedRing {
    /// A ring of `size` entries whose parts have the lengths and alignments of [`packed_ring_bytes`], with the ring
    /// features. It continues from `base`: unlike in a split ring, shared memory does not hold the position of used
    /// elements.
    ///
    /// # Errors
    /// The size is zero or beyond [`RING_SIZE_MAX`](crate::RING_SIZE_MAX), or the base is outside the ring.
    pub fn new(
        layout: RingLayout,
        size: u16,
        features: Features,
        base: RingBase,
    ) -> Result<PackedRing, RingSetupError> {
        check_size(features | Features::RING_PACKED, size)?;
        let position = |word| Position::from_word(word, size).ok_or(RingSetupError::Base { base: base.bits(), size });
        let (next_avail, next_used) = (position(base.next_avail())?, position(base.next_used())?);
        Ok(PackedRing {
            layout,
            size,
            event_idx: features.contains(Features::EVENT_IDX),
            indirect: features.contains(Features::INDIRECT_DESC),
            next_avail,
            warm: 0,
            is_near: false,
            next_used,
            unpublished: 0,
            elements: Vec::with_capacity(usize::from(size)),
            untold: true,
            slots_out: 0,
            in_flight: 0,
            fault: None,
            order: features.contains(Features::IN_ORDER).then(|| InOrder::new(size)),
            left: None,
            inflight: None,
        })
    }

    /// Records chains in flight from now on. Chains in flight in an existing record are fetched first, and the ring
    /// continues at the record's position: a front-end cannot know it after a crash, since shared memory does not hold
    /// it. To be called before the first fetch.
    ///
    /// # Errors
    /// The record is inconsistent; neither it nor the ring was changed.
    pub fn track(&mut self, record: Inflight) -> Result<(), InflightFault> {
        let (inflight, left) = PackedInflight::recover(record, self.size, &self.layout.desc, self.next_used)?;
        self.inflight = Some(inflight);
        if let Some(left) = left {
            (self.next_used, self.next_avail) = (left.next_used, left.next_used);
            self.next_avail.advance(left.slots, self.size);
            (self.slots_out, self.in_flight) = (left.slots, left.chains.len() as u16);
            self.left = (!left.chains.is_empty()).then_some(left);
        }
        Ok(())
    }

    /// Chains that were in flight before the set-up and have not been fetched again.
    #[inline]
    pub fn left(&self) -> usize {
        self.left.as_ref().map_or(0, |left| left.chains.len())
    }

    /// Number of chains that looked available and are not fetched yet, at most a run. 0 while the driver is near.
    #[inline]
    pub fn in_sight(&self) -> usize {
        usize::from(self.warm)
    }

    /// See [`DeviceRing::set_near`](crate::DeviceRing::set_near).
    #[inline]
    pub fn set_near(&mut self, is_near: bool) {
        self.is_near = is_near;
    }

    /// The first position from the next one on that does not look available. For comparison only.
    pub fn front(&self) -> u16 {
        let mut at = self.next_avail;
        for _ in self.slots_out..self.size {
            let rest = self.layout.desc.load_u64(at.offset() + 8, Relaxed);
            if !at.is_available(rest) {
                break;
            }
            at.advance(1, self.size);
        }
        at.word()
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
    // Not inlined: it would take registers from the loop of split rings beside it.
    #[inline(never)]
    pub fn fetch(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<Option<ChainHead>, RingFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        if self.left.is_some() {
            return self.fetch_left(memory, chain);
        }
        // The second word comes first. Pairs with the driver's barrier between all else of a chain and the flags of its
        // first descriptor. [2.8.21]
        let first = self.layout.desc.load_u64s_back(self.next_avail.offset(), Acquire);
        if !self.next_avail.is_available(first[1]) {
            return Ok(None);
        }
        if self.warm > 0 {
            self.warm -= 1;
        } else if !self.is_near {
            self.warm_run(memory, chain);
        }
        if self.slots_out == self.size {
            return Err(self.breaks(RingFault::AvailJumped));
        }
        let (id, slots, record) = if let Some(id) = chain.walk_packed(memory, first, self.indirect) {
            (id, 1, self.inflight.as_mut().map_or(0, |inflight| inflight.fetched_one(first)))
        } else {
            self.fetch_slots(memory, chain, first)?
        };
        self.next_avail.advance(slots, self.size);
        self.slots_out += slots;
        self.in_flight += 1;
        Ok(Some(self.head(chain, id, slots, record)))
    }

    /// Takes a chain that is not a single indirect descriptor: returns its id, its length in slots, and its record.
    #[inline(never)]
    fn fetch_slots(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
        first: [u64; 2],
    ) -> Result<(u16, u16, u16), RingFault> {
        let free = self.size - self.slots_out;
        let slots = FilledSlots { view: &self.layout.desc, size: self.size, place: self.next_avail.place, free };
        let Some((id, count)) = chain.walk_slots(memory, slots, first) else {
            return Err(self.breaks(RingFault::ChainOverrun));
        };
        let read = |slot: u16| slots.view.load_u64s(slots.offset(slot.into()), Relaxed);
        let record = match &mut self.inflight {
            None => 0,
            Some(inflight) if count == 1 => inflight.fetched_one(first),
            Some(inflight) => inflight.fetched(count, read),
        };
        Ok((id, count, record))
    }

    /// Prefetches the first lines of the next chains together. Assumes one slot for each chain, as with tables. The
    /// descriptors are read again later: a driver may withdraw an offer meanwhile.
    #[inline(never)]
    fn warm_run(&mut self, memory: &GuestMemory, chain: &Chain) {
        let (mut at, mut run) = (self.next_avail, 0);
        let most = RUN_MAX.min(self.size);
        let descs = std::iter::from_fn(|| {
            let [addr, rest] = self.layout.desc.load_u64s(at.offset(), Relaxed);
            let is_offered = run < most && at.is_available(rest);
            at.advance(1, self.size);
            run += u16::from(is_offered);
            is_offered.then_some(addr)
        });
        chain.warm(memory, descs);
        // Used elements will replace these descriptors.
        for ahead in (0..run).step_by(LINE_DESCS).skip(usize::from(run == 1)) {
            let mut at = self.next_avail;
            at.advance(ahead, self.size);
            self.layout.desc.warm(at.offset());
        }
        // The first is being fetched.
        self.warm = run.saturating_sub(1);
    }

    /// Takes the next chain that was in flight before the set-up, from the copies of its descriptors.
    #[cold]
    fn fetch_left(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<Option<ChainHead>, RingFault> {
        let next = |left: &mut LeftInRecord| {
            let LeftChain { record, slots, at } = left.chains.pop()?;
            let size = left.slots;
            let copies = FilledSlots { view: &left.copies, size, place: at, free: slots };
            let first = left.copies.load_u64s(copies.offset(0), Relaxed);
            // The copy was a whole chain, unless another process wrote to the record.
            let walked = match chain.walk_packed(memory, first, self.indirect) {
                Some(id) => Some((id, 1)),
                None => chain.walk_slots(memory, copies, first),
            };
            let walked = walked.filter(|(_, count)| *count == slots);
            Some((walked, slots, record))
        };
        let taken = self.left.as_mut().and_then(next);
        if self.left() == 0 {
            self.left = None;
        }
        match taken {
            None => Ok(None),
            Some((None, ..)) => Err(self.breaks(RingFault::ChainOverrun)),
            Some((Some((id, _)), slots, record)) => Ok(Some(self.head(chain, id, slots, record))),
        }
    }

    #[inline]
    fn head(&mut self, chain: &Chain, id: u16, slots: u16, record: u16) -> ChainHead {
        // Each chain takes at least one slot, so there is one for it in the order, too.
        let place = self.order.as_mut().map_or(0, |order| order.fetched(id, record, slots, chain.writable_bytes()));
        ChainHead { id, slots, place, record }
    }

    #[cold]
    fn breaks(&mut self, fault: RingFault) -> RingFault {
        *self.fault.get_or_insert(fault)
    }

    /// Makes a used element for the chain. `written` are the bytes that were written from the first writable byte on,
    /// without a gap. [2.8.4] The driver learns of it with the next [`PackedRing::publish`].
    ///
    /// # Panics
    /// If no such head can be out: it belongs to another ring.
    // Always inlined, since a head is four numbers to pack for a call.
    #[inline(always)]
    #[expect(clippy::needless_pass_by_value, reason = "a head is spent when its chain is completed")]
    pub fn complete(&mut self, head: ChainHead, written: u32) {
        let ChainHead { id, slots, place, record } = head;
        assert!(self.in_flight > 0 && slots <= self.slots_out - self.unpublished, "head {id} is not out of this ring");
        match &mut self.order {
            None => {
                if let Some(inflight) = &mut self.inflight {
                    inflight.completed(record);
                }
                self.put(UsedElement { id, written, chains: 1, slots });
            }
            Some(order) => order.done(place, written),
        }
    }

    /// A batch takes the first of its slots and leaves the others unchanged. [2.8.11]
    #[inline(always)]
    fn put(&mut self, used: UsedElement) {
        self.in_flight -= used.chains;
        self.unpublished += used.slots;
        self.elements.push(Element { id: used.id, slots: used.slots, written: used.written });
    }

    /// Publishes all chains completed since the last call. Returns whether the driver wants a call for them.
    #[inline]
    #[must_use = "a driver that is not called when it wants to be sleeps for ever"]
    pub fn publish(&mut self) -> bool {
        while let Some(order) = &mut self.order {
            let each = |record| self.inflight.iter_mut().for_each(|inflight| inflight.completed(record));
            let Some(used) = order.tell(each) else { break };
            self.put(used);
        }
        let Some((first, others)) = self.elements.split_first() else { return false };
        let passed = std::mem::replace(&mut self.unpublished, 0);
        self.slots_out -= passed;
        let old = self.next_used;
        self.next_used.advance(passed, self.size);
        if let Some(inflight) = &mut self.inflight {
            inflight.publishing(self.next_used);
        }
        // Until the first is written, the driver does not read the others. Those in its line come last, too.
        let mut at = self.next_used;
        for element in others.iter().rev() {
            at.retreat(element.slots, self.size);
            self.layout.desc.store_u64(at.offset() + 8, element.word(at), Relaxed);
        }
        // As in a split ring: we store an element, then load the driver's request; the driver, before it sleeps, stores
        // its request, has a full barrier, then loads that element. If either side's load overtook its own store, the
        // driver could miss the element and we its request, and it would sleep without end. [2.8.21.3] The store also
        // releases the other elements of the batch, and the data, to a reader of this one.
        self.layout.desc.store_u64(old.offset() + 8, first.word(old), SeqCst);
        self.elements.clear();
        if let Some(inflight) = &mut self.inflight {
            inflight.published();
        }
        let wanted = request::is_met(self.layout.avail.load_u32(0, SeqCst), self.event_idx, old, passed, self.size);
        std::mem::replace(&mut self.untold, false) || wanted
    }

    /// Asks the driver for a notification of the next chain it offers. True if one is available already: then there may
    /// be no notification.
    pub fn enable_notify(&mut self) -> bool {
        // The mirror image of `publish`: we store our request, then load the next descriptor; the driver stores that,
        // has a full barrier, then loads our request. If our load overtook our store, neither side would see a chain
        // offered between the two. [2.8.10, 2.8.21.3] Position and flags of a request are one store.
        let request =
            if self.event_idx { request::DESC << 16 | u32::from(self.next_avail.word()) } else { request::ENABLE };
        self.layout.used.store_u32(0, request, SeqCst);
        let rest = self.layout.desc.load_u64(self.next_avail.offset() + 8, SeqCst);
        self.left.is_some() || self.fault.is_none() && self.next_avail.is_available(rest)
    }

    /// Tells the driver that we poll. A hint: notifications may come nevertheless.
    pub fn disable_notify(&mut self) {
        // Also with event indexes: a requested position comes round again in every other lap.
        self.layout.used.store_u32(0, request::DISABLE << 16, Relaxed);
    }

    /// Position of fetching and of used elements, at which another device could continue once no chain is in flight.
    pub fn base(&self) -> RingBase {
        let mut next_used = self.next_used;
        next_used.advance(self.unpublished, self.size);
        RingBase::packed(self.next_avail.word(), next_used.word())
    }

    /// Chains fetched and not given back.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Why the ring is broken, if it is.
    pub fn fault(&self) -> Option<RingFault> {
        self.fault
    }
}
