//! The driver's side of a packed virtqueue. [2.8]
//!
//! Owned by one thread. There is one circular ring of descriptors: the driver writes chains into it, the device
//! overwrites them with used elements, each from its own position, and a bit that flips with every lap (the wrap
//! counter) marks new ones. State needed later is kept in private memory. It has no in-order completion.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use super::{Buffer, DeviceFault, NO_TABLES, NoRoom, Tables, UsedChain, check_chain, writable_bytes, write_desc};
use crate::descriptor::{DESC_BYTES, Desc};
use crate::packed::{LINE_DESCS, Position, request};
use crate::ring::check_size;
use crate::{Features, RingBase, RingLayout, RingSetupError};

/// Where the second word of a descriptor is: length, id, flags. [2.8.13]
const REST: usize = 8;

/// A chain by its id, which is its token.
#[derive(Clone, Copy, Debug, Default)]
struct PackedChain {
    /// Descriptors of the ring; 0 if the chain is not in flight.
    descriptors: u16,
    writable_bytes: u32,
}

/// A packed ring, seen from the driver.
///
/// ```text
///  ── used ─────────────────────▶ published ──────▶ next
///          in flight, in any order         added, unpublished
/// ```
// On separate cache lines: rings of neighbour queues are written by other threads.
#[derive(Debug)]
#[repr(align(128))]
pub struct PackedDriver {
    layout: RingLayout,
    tables: Option<Tables>,
    size: u16,
    event_idx: bool,
    /// Where the next chain begins.
    next: Position,
    /// Where the next used element will be.
    used: Position,
    /// The first descriptor not published yet, and the word that will publish it.
    untold: Position,
    telling: u64,
    /// Chains added, published and taken back so far, modulo 2^16.
    added: u16,
    published: u16,
    taken: u16,
    fault: Option<DeviceFault>,
    out: Box<[PackedChain]>,
}

impl PackedDriver {
    /// An empty ring of `size` entries whose parts have the lengths and alignments of
    /// [`packed_ring_bytes`](crate::packed_ring_bytes), with the ring features. The memory is initialised here; the
    /// device must not access it yet. Both sides begin at `base`, and no chain is in flight.
    ///
    /// # Errors
    /// The size is zero or beyond [`RING_SIZE_MAX`](crate::RING_SIZE_MAX), or the base is outside the ring.
    ///
    /// # Panics
    /// If there are tables, but not for each entry.
    pub fn new(
        layout: RingLayout,
        size: u16,
        features: Features,
        tables: Option<Tables>,
        base: RingBase,
    ) -> Result<PackedDriver, RingSetupError> {
        check_size(features | Features::RING_PACKED, size)?;
        let bad = RingSetupError::Base { base: base.bits(), size };
        let start = Position::from_word(base.next_avail(), size).ok_or(bad)?;
        assert!(tables.as_ref().is_none_or(|tables| tables.reach(size)), "a table for each entry");
        layout.avail.store_u32(0, request::ENABLE << 16, Relaxed);
        layout.used.store_u32(0, request::ENABLE << 16, Relaxed);
        for place in 0..size {
            // As if used in the lap before.
            let old = Position::new(place, if place < start.place { start.wrap() } else { !start.wrap() });
            write_desc(&layout.desc, old.offset(), [0, u64::from(old.used()) << 48]);
        }
        Ok(PackedDriver {
            layout,
            tables,
            size,
            event_idx: features.contains(Features::EVENT_IDX),
            next: start,
            used: start,
            untold: start,
            telling: 0,
            added: 0,
            published: 0,
            taken: 0,
            fault: None,
            out: vec![PackedChain::default(); usize::from(size)].into(),
        })
    }

    /// See [`DriverRing::add`](super::DriverRing::add).
    #[inline]
    pub fn add(&mut self, token: u16, buffers: &[Buffer]) -> Result<(), NoRoom> {
        check_chain(buffers);
        assert!(token < self.size, "token {token} on a ring of {}", self.size);
        let writable_bytes = writable_bytes(buffers);
        if let Some(tables) = &self.tables {
            for (row, buffer) in buffers.iter().enumerate() {
                tables.write(token, row as u16, table_row(*buffer));
            }
            self.add_table(token, buffers.len() as u16, writable_bytes);
        } else {
            assert!(buffers.len() <= usize::from(self.size), "a chain of {} in a ring of {}", buffers.len(), self.size);
            let descriptors = buffers.len() as u16;
            if descriptors > self.size - self.out() {
                return Err(NoRoom);
            }
            self.note(token, PackedChain { descriptors, writable_bytes });
            for (row, buffer) in buffers.iter().enumerate() {
                let more = if row + 1 < buffers.len() { Desc::NEXT } else { 0 };
                self.put(buffer.addr, buffer.len, token, write_flag(buffer) | more);
            }
        }
        Ok(())
    }

    /// See [`DriverRing::add_table`](super::DriverRing::add_table).
    // Always inlined: the call would be a third of it.
    #[inline(always)]
    pub fn add_table(&mut self, token: u16, rows: u16, writable_bytes: u32) {
        let addr = self.tables.as_ref().expect(NO_TABLES).addr(token);
        self.note(token, PackedChain { descriptors: 1, writable_bytes });
        self.put(addr, u32::from(rows) * DESC_BYTES as u32, token, Desc::INDIRECT);
    }

    /// A chain is about to be in flight.
    #[inline]
    fn note(&mut self, token: u16, chain: PackedChain) {
        let out = &mut self.out[usize::from(token)];
        assert!(out.descriptors == 0, "token {token} is in flight");
        *out = chain;
        self.added = self.added.wrapping_add(1);
    }

    /// Descriptors in flight: no more than there are, since with tables each takes a token.
    fn out(&self) -> u16 {
        self.next.since(self.used, self.size)
    }

    /// See [`DriverRing::coming`](super::DriverRing::coming). Chains of one descriptor each, as tables make them.
    #[inline]
    pub fn coming(&self, after: u16) -> Option<u16> {
        if after >= self.published.wrapping_sub(self.taken) || self.tables.is_none() {
            return None;
        }
        let mut at = self.used;
        at.advance(after, self.size);
        let rest = self.layout.desc.load_u64(at.offset() + REST, Relaxed);
        if !at.is_used(rest) {
            return None;
        }
        if usize::from(after).is_multiple_of(LINE_DESCS) {
            // New descriptors will replace these used elements.
            self.layout.desc.warm(at.offset());
        }
        Some((rest >> 32) as u16)
    }

    /// Writes the next descriptor. The device goes from one to the next only as long as they are available, so that
    /// of all added since the last publish only the first has to wait for it.
    // Always inlined, as `add_table`.
    #[inline(always)]
    fn put(&mut self, addr: u64, len: u32, id: u16, flags: u16) {
        let rest = word(len, id, flags | self.next.available());
        if self.next == self.untold {
            self.layout.desc.store_u64(self.next.offset(), addr, Relaxed);
            self.telling = rest;
        } else {
            write_desc(&self.layout.desc, self.next.offset(), [addr, rest]);
        }
        self.next.advance(1, self.size);
    }

    /// See [`DriverRing::publish`](super::DriverRing::publish).
    #[inline]
    #[must_use = "a device that is not kicked when it wants to be sleeps for ever"]
    pub fn publish(&mut self) -> bool {
        if self.next == self.untold {
            return false;
        }
        if self.fault.is_none() {
            self.published = self.added;
        }
        let old = std::mem::replace(&mut self.untold, self.next);
        let passed = self.next.since(old, self.size);
        // As in `SplitDriver::publish`: we store a descriptor, then load the device's request; the device stores its
        // request, then loads the descriptor (`PackedRing::enable_notify`). The store also releases all descriptors
        // after it. [2.8.21.3]
        self.layout.desc.store_u64(old.offset() + REST, self.telling, SeqCst);
        request::is_met(self.layout.used.load_u32(0, SeqCst), self.event_idx, old, passed, self.size)
    }

    /// See [`DriverRing::poll`](super::DriverRing::poll).
    #[inline]
    pub fn poll(&mut self) -> Result<Option<UsedChain>, DeviceFault> {
        if self.published == self.taken {
            return self.fault.map_or(Ok(None), Err);
        }
        // Pairs with the device's release of the rest of the element, status bytes and data. [2.8.6]
        let rest = self.layout.desc.load_u64(self.used.offset() + REST, Acquire);
        let (written, id, flags) = (rest as u32, (rest >> 32) as u16, (rest >> 48) as u16);
        if self.used.is_available(rest) {
            return Ok(None);
        }
        if !self.used.is_used(rest) {
            // This slot was written by us in this lap, and only the device has written since.
            return Err(self.breaks(DeviceFault::FlagsNonsense));
        }
        // Without the flag no byte was written, and the length is undefined. [2.8.5]
        let written = if flags & Desc::WRITE == 0 { 0 } else { written };
        let Some(out) = self.out.get_mut(usize::from(id)) else {
            return Err(self.breaks(DeviceFault::IdOutOfRange));
        };
        if out.descriptors == 0 {
            return Err(self.breaks(DeviceFault::IdNotInFlight));
        }
        if written > out.writable_bytes {
            return Err(self.breaks(DeviceFault::LengthTooLong));
        }
        let descriptors = std::mem::take(&mut out.descriptors);
        self.used.advance(descriptors, self.size);
        self.taken = self.taken.wrapping_add(1);
        Ok(Some(UsedChain { token: id, written }))
    }

    #[cold]
    fn breaks(&mut self, fault: DeviceFault) -> DeviceFault {
        // The ring is not read any more.
        self.published = self.taken;
        *self.fault.get_or_insert(fault)
    }

    /// See [`DriverRing::arm`](super::DriverRing::arm).
    pub fn arm(&mut self) -> bool {
        // The mirror image of the device's publish, as in `SplitDriver::arm`. Position and flags are one word, so
        // that no device sees the one without the other. [2.8.10]
        let request = if self.event_idx { request::DESC << 16 | u32::from(self.used.word()) } else { request::ENABLE };
        self.layout.avail.store_u32(0, request, SeqCst);
        let rest = self.layout.desc.load_u64(self.used.offset() + REST, SeqCst);
        self.published != self.taken && !self.used.is_available(rest)
    }

    /// See [`DriverRing::disarm`](super::DriverRing::disarm).
    pub fn disarm(&mut self) {
        self.layout.avail.store_u32(0, request::DISABLE << 16, Relaxed);
    }

    /// Chains added and not come back.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.added.wrapping_sub(self.taken)
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Why the ring is broken, if it is.
    pub fn fault(&self) -> Option<DeviceFault> {
        self.fault
    }
}

/// A row of a table: only the direction of a buffer is said there. [2.8.7]
#[inline(always)]
pub(super) fn table_row(buffer: Buffer) -> [u64; 2] {
    [buffer.addr, word(buffer.len, 0, write_flag(&buffer))]
}

/// The second word of a descriptor. [2.8.13]
#[inline]
fn word(len: u32, id: u16, flags: u16) -> u64 {
    u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48
}

#[inline]
fn write_flag(buffer: &Buffer) -> u16 {
    if buffer.writable { Desc::WRITE } else { 0 }
}
