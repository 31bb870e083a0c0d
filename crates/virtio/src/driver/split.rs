//! The driver's side of a split virtqueue. [2.7]
//!
//! Owned by one thread. Only the driver writes descriptors and the available ring, and their state that is needed
//! later is kept in private memory: nothing that the device could have changed is ever read back. The used index is
//! read once for a run of elements, each element once.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use super::{Buffer, DeviceFault, NO_TABLES, NoRoom, Tables, UsedChain, check_chain, writable_bytes, write_desc};
use crate::descriptor::{DESC_BYTES, Desc};
use crate::ring::check_size;
use crate::split::{AVAIL_ELEMENT, FLAGS, INDEX, NO_INTERRUPT, NO_NOTIFY, RING, USED_ELEMENT, needs_event};
use crate::{Features, RingBase, RingLayout, RingSetupError};

/// A chain, by the index of its first descriptor.
#[derive(Clone, Copy, Debug, Default)]
struct SplitChain {
    token: u16,
    /// Its last descriptor.
    tail: u16,
    /// Descriptors of the ring; 0 if the chain is not in flight.
    descriptors: u16,
    writable_bytes: u32,
}

/// A split ring, seen from the driver.
///
/// Indexes run freely modulo 2^16:
///
/// ```text
///  used ring ── last_used ──────▶ used_seen      available ring ── published ──────▶ next_avail
///                     used, not taken                                added, unpublished
/// ```
// On separate cache lines: rings of neighbour queues are written by other threads.
#[derive(Debug)]
#[repr(align(128))]
pub struct SplitDriver {
    layout: RingLayout,
    /// With tables the first descriptor of a chain is at the index of its token, and never changes.
    tables: Option<Tables>,
    size: u16,
    mask: u16,
    event_idx: bool,
    next_avail: u16,
    /// The available index as the device can see it.
    published: u16,
    last_used: u16,
    /// The used index as last read.
    used_seen: u16,
    /// Free descriptors, and the first of them.
    free: u16,
    free_head: u16,
    fault: Option<DeviceFault>,
    /// The descriptor after each one, in its chain or among those that are free.
    next: Box<[u16]>,
    out: Box<[SplitChain]>,
}

impl SplitDriver {
    /// An empty ring of `size` entries whose parts have the lengths and alignments of
    /// [`ring_bytes`](crate::ring_bytes), with the ring features. The memory is initialised here; the device must not
    /// access it yet. Both indexes begin at `base`.
    ///
    /// # Errors
    /// The size is not a power of two.
    ///
    /// # Panics
    /// If there are tables, but not for each entry.
    pub fn new(
        layout: RingLayout,
        size: u16,
        features: Features,
        tables: Option<Tables>,
        base: RingBase,
    ) -> Result<SplitDriver, RingSetupError> {
        check_size(features - Features::RING_PACKED, size)?;
        let start = base.next_avail();
        assert!(tables.as_ref().is_none_or(|tables| tables.reach(size)), "a table for each entry");
        layout.avail.store_u16(FLAGS, 0, Relaxed);
        layout.avail.store_u16(INDEX, start, Relaxed);
        layout.avail.store_u16(RING + usize::from(size) * AVAIL_ELEMENT, start, Relaxed);
        layout.used.store_u16(FLAGS, 0, Relaxed);
        layout.used.store_u16(INDEX, start, Relaxed);
        layout.used.store_u16(RING + usize::from(size) * USED_ELEMENT, start, Relaxed);
        if let Some(tables) = &tables {
            // The length is that of the whole table: where a chain ends in it, its rows say. [2.7.5.3.1] So the
            // descriptor is written once, and its line stays in the device's cache.
            let bytes = u64::from(tables.rows) * DESC_BYTES as u64;
            let rest = bytes | u64::from(Desc::INDIRECT) << 32;
            for token in 0..size {
                write_desc(&layout.desc, usize::from(token) * DESC_BYTES, [tables.addr(token), rest]);
            }
        }
        Ok(SplitDriver {
            layout,
            tables,
            size,
            mask: size - 1,
            event_idx: features.contains(Features::EVENT_IDX),
            next_avail: start,
            published: start,
            last_used: start,
            used_seen: start,
            free: size,
            free_head: 0,
            fault: None,
            // The last one's successor is never used: no descriptor is free then.
            next: (0..size).map(|at| (at + 1) & (size - 1)).collect(),
            out: vec![SplitChain::default(); usize::from(size)].into(),
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
                let more = row + 1 < buffers.len();
                tables.write(token, row as u16, table_row(row as u16, *buffer, more));
            }
            self.add_table(token, buffers.len() as u16, writable_bytes);
        } else {
            let head = self.add_direct(token, buffers, writable_bytes)?;
            self.make_available(head);
        }
        Ok(())
    }

    /// See [`DriverRing::add_table`](super::DriverRing::add_table).
    // Always inlined: the call would be a third of it.
    #[inline(always)]
    pub fn add_table(&mut self, token: u16, _rows: u16, writable_bytes: u32) {
        assert!(self.tables.is_some(), "{NO_TABLES}");
        let out = &mut self.out[usize::from(token)];
        assert!(out.descriptors == 0, "token {token} is in flight");
        *out = SplitChain { token, tail: token, descriptors: 1, writable_bytes };
        self.make_available(token);
    }

    #[inline]
    fn make_available(&mut self, head: u16) {
        let place = RING + usize::from(self.next_avail & self.mask) * AVAIL_ELEMENT;
        self.layout.avail.store_u16(place, head, Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// See [`DriverRing::coming`](super::DriverRing::coming).
    #[inline]
    pub fn coming(&self, after: u16) -> Option<u16> {
        if after >= self.used_seen.wrapping_sub(self.last_used) {
            return None;
        }
        let element = RING + usize::from(self.last_used.wrapping_add(after) & self.mask) * USED_ELEMENT;
        let id = self.layout.used.load_u32(element, Relaxed);
        self.out.get(id as usize).map(|out| out.token)
    }

    /// Writes the chain into free descriptors; returns the first.
    #[inline]
    fn add_direct(&mut self, token: u16, buffers: &[Buffer], writable_bytes: u32) -> Result<u16, NoRoom> {
        assert!(buffers.len() <= usize::from(self.size), "a chain of {} in a ring of {}", buffers.len(), self.size);
        let descriptors = buffers.len() as u16;
        if descriptors > self.free {
            return Err(NoRoom);
        }
        let head = self.free_head;
        let mut tail = head;
        for (row, buffer) in buffers.iter().enumerate() {
            tail = self.free_head;
            let next = self.next[usize::from(tail)];
            let words = desc(*buffer, row + 1 < buffers.len(), next);
            write_desc(&self.layout.desc, usize::from(tail) * DESC_BYTES, words);
            self.free_head = next;
        }
        self.free -= descriptors;
        self.out[usize::from(head)] = SplitChain { token, tail, descriptors, writable_bytes };
        Ok(head)
    }

    /// See [`DriverRing::publish`](super::DriverRing::publish).
    #[inline]
    #[must_use = "a device that is not kicked when it wants to be sleeps for ever"]
    pub fn publish(&mut self) -> bool {
        if self.next_avail == self.published {
            return false;
        }
        let old = std::mem::replace(&mut self.published, self.next_avail);
        // A fence has two sides. We store the index, then load the device's request; the device, before it sleeps,
        // stores its request, then loads the index (`SplitRing::enable_notify`). If either load overtook its store, the
        // device could miss the chain and we its request. The store also releases descriptors, ring entries and the
        // chains' data. [2.7.13.3, 2.7.13.4]
        self.layout.avail.store_u16(INDEX, self.next_avail, SeqCst);
        if self.event_idx {
            let event = self.layout.used.load_u16(RING + usize::from(self.size) * USED_ELEMENT, SeqCst);
            needs_event(event, self.next_avail, old)
        } else {
            self.layout.used.load_u16(FLAGS, SeqCst) & NO_NOTIFY == 0
        }
    }

    /// See [`DriverRing::poll`](super::DriverRing::poll).
    #[inline]
    pub fn poll(&mut self) -> Result<Option<UsedChain>, DeviceFault> {
        if self.last_used == self.used_seen && !self.look()? {
            return Ok(None);
        }
        let element = RING + usize::from(self.last_used & self.mask) * USED_ELEMENT;
        let id = self.layout.used.load_u32(element, Relaxed);
        let written = self.layout.used.load_u32(element + 4, Relaxed);
        let Some(out) = self.out.get_mut(id as usize) else {
            return Err(self.breaks(DeviceFault::IdOutOfRange));
        };
        if out.descriptors == 0 {
            return Err(self.breaks(DeviceFault::IdNotInFlight));
        }
        if written > out.writable_bytes {
            return Err(self.breaks(DeviceFault::LengthTooLong));
        }
        let SplitChain { token, tail, descriptors, .. } = *out;
        out.descriptors = 0;
        self.last_used = self.last_used.wrapping_add(1);
        if self.tables.is_none() {
            self.next[usize::from(tail)] = self.free_head;
            self.free_head = id as u16;
            self.free += descriptors;
        }
        Ok(Some(UsedChain { token, written }))
    }

    /// Reads the used index. Says whether there is something to take.
    #[inline]
    fn look(&mut self) -> Result<bool, DeviceFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        // Pairs with the device's release of its elements, status bytes and data (`SplitRing::publish`). [2.7.14]
        let used = self.layout.used.load_u16(INDEX, Acquire);
        if used.wrapping_sub(self.last_used) > self.published.wrapping_sub(self.last_used) {
            return Err(self.breaks(DeviceFault::UsedJumped));
        }
        self.used_seen = used;
        if used == self.last_used {
            // The element comes with the index then, and not after it.
            self.layout.used.warm_to_read(RING + usize::from(used & self.mask) * USED_ELEMENT);
            return Ok(false);
        }
        Ok(true)
    }

    #[cold]
    fn breaks(&mut self, fault: DeviceFault) -> DeviceFault {
        self.used_seen = self.last_used;
        *self.fault.get_or_insert(fault)
    }

    /// See [`DriverRing::arm`](super::DriverRing::arm).
    pub fn arm(&mut self) -> bool {
        // The mirror image of `SplitRing::publish`: we store our request, then load the index; the device stores the
        // index, then loads our request. [2.7.7.1]
        if self.event_idx {
            let place = RING + usize::from(self.size) * AVAIL_ELEMENT;
            self.layout.avail.store_u16(place, self.last_used, SeqCst);
        } else {
            self.layout.avail.store_u16(FLAGS, 0, SeqCst);
        }
        // With no chain in flight none can be used, whatever the index says.
        self.published != self.last_used && self.layout.used.load_u16(INDEX, SeqCst) != self.last_used
    }

    /// See [`DriverRing::disarm`](super::DriverRing::disarm). With event indexes there is nothing to store, since
    /// the request of the last [`SplitDriver::arm`] is fulfilled once. [2.7.7]
    pub fn disarm(&mut self) {
        if !self.event_idx {
            self.layout.avail.store_u16(FLAGS, NO_INTERRUPT, Relaxed);
        }
    }

    /// Chains added and not come back.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.next_avail.wrapping_sub(self.last_used)
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

/// A row of a table: its chain continues with the next row, or ends.
#[inline(always)]
pub(super) fn table_row(row: u16, buffer: Buffer, more: bool) -> [u64; 2] {
    desc(buffer, more, row + 1)
}

/// A buffer's descriptor. [2.7.5]
#[inline(always)]
fn desc(buffer: Buffer, more: bool, next: u16) -> [u64; 2] {
    let write = if buffer.writable { Desc::WRITE } else { 0 };
    let (flags, next) = if more { (write | Desc::NEXT, next) } else { (write, 0) };
    [buffer.addr, u64::from(buffer.len) | u64::from(flags) << 32 | u64::from(next) << 48]
}
