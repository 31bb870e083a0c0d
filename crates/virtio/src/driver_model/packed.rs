//! The driver's side of a packed ring. [2.8]
//!
//! Positions are counted from the beginning and never wrap here: slot and wrap counter are remainder and parity of the
//! quotient.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use super::{Descriptor, ModelBuffer, link, room};
use crate::{RingBase, RingLayout};

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

#[derive(Debug)]
pub(super) struct PackedDriverModel {
    layout: RingLayout,
    size: u16,
    event_idx: bool,
    /// Places filled since the ring began, whether published or not.
    filled: u64,
    published: u64,
    /// Places of chains that have come back.
    passed: u64,
    /// The first descriptor that was filled and not published: its second word.
    first: u64,
    /// Places that no chain has been promised.
    free: u16,
    ids: Vec<u16>,
    /// The chain of each id, and its room for the device.
    chains: Vec<(Vec<Descriptor>, u32)>,
}

impl PackedDriverModel {
    pub(super) fn new(layout: RingLayout, size: u16, event_idx: bool) -> PackedDriverModel {
        PackedDriverModel {
            layout,
            size,
            event_idx,
            filled: 0,
            published: 0,
            passed: 0,
            first: 0,
            free: size,
            ids: (0..size).rev().collect(),
            chains: vec![(Vec::new(), 0); usize::from(size)],
        }
    }

    pub(super) fn start_at(&mut self, index: u16) {
        (self.filled, self.published, self.passed) = (index.into(), index.into(), index.into());
        // As left by a device that used each slot separately.
        for count in u64::from(index).saturating_sub(self.size.into())..index.into() {
            let marks = if self.wrap(count) { AVAIL | USED } else { 0 };
            self.layout.desc.store_u64(self.offset(count) + 8, u64::from(marks) << 48, Relaxed);
        }
    }

    pub(super) fn base(&self) -> RingBase {
        let word = u32::from(self.word(self.published));
        RingBase::from_bits(word | word << 16)
    }

    fn offset(&self, count: u64) -> usize {
        (count % u64::from(self.size)) as usize * 16
    }

    fn wrap(&self, count: u64) -> bool {
        (count / u64::from(self.size)).is_multiple_of(2)
    }

    /// Place and wrap counter.
    fn word(&self, count: u64) -> u16 {
        (count % u64::from(self.size)) as u16 | u16::from(self.wrap(count)) << 15
    }

    pub(super) fn chain(&mut self, buffers: &[ModelBuffer]) -> Option<u16> {
        let last = buffers.len().checked_sub(1)?;
        let row = buffers.iter().enumerate().map(|(at, buffer)| link(*buffer, (at < last).then_some(0)));
        self.promise(row.collect(), room(buffers))
    }

    pub(super) fn chain_indirect(&mut self, table: u64, buffers: &[ModelBuffer]) -> Option<u16> {
        let len = buffers.len() as u32 * 16;
        let row = vec![Descriptor { addr: table, len, flags: Descriptor::INDIRECT, next: 0 }];
        self.promise(row, room(buffers))
    }

    fn promise(&mut self, row: Vec<Descriptor>, room: u32) -> Option<u16> {
        let free = self.free.checked_sub(row.len() as u16)?;
        let id = self.ids.pop()?;
        self.free = free;
        self.chains[usize::from(id)] = (row, room);
        Some(id)
    }

    pub(super) fn offer(&mut self, head: u16) {
        let row = self.chains[usize::from(head)].0.clone();
        for (at, descriptor) in row.iter().enumerate() {
            let marks = if self.wrap(self.filled) { AVAIL } else { USED };
            // Only the last one's id means anything.
            let id = if at + 1 == row.len() { head } else { 0xdead };
            let descriptor = Descriptor { flags: descriptor.flags | marks, next: id, ..*descriptor };
            let words = u128::from_le_bytes(descriptor.to_packed_bytes());
            self.layout.desc.store_u64(self.offset(self.filled), words as u64, Relaxed);
            let rest = (words >> 64) as u64;
            if self.filled == self.published {
                self.first = rest;
            } else {
                self.layout.desc.store_u64(self.offset(self.filled) + 8, rest, Relaxed);
            }
            self.filled += 1;
        }
    }

    pub(super) fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.filled);
        if old == self.filled {
            return false;
        }
        // The other side of `PackedRing::enable_notify`.
        self.layout.desc.store_u64(self.offset(old) + 8, self.first, SeqCst);
        let request = self.layout.used.load_u32(0, SeqCst);
        match request >> 16 {
            0 => true,
            1 => false,
            _ => {
                assert!(self.event_idx, "the device asks for what was not negotiated");
                (old..self.filled).any(|count| self.word(count) == request as u16)
            }
        }
    }

    /// The next used element, if there is one.
    pub(super) fn look(&self) -> Option<(u32, u32)> {
        let rest = self.layout.desc.load_u64(self.offset(self.passed) + 8, Acquire);
        let flags = (rest >> 48) as u16;
        let used = if self.wrap(self.passed) { AVAIL | USED } else { 0 };
        if flags & (AVAIL | USED) != used || self.passed == self.published {
            return None;
        }
        let written = if flags & Descriptor::WRITE == 0 { 0 } else { rest as u32 };
        Some(((rest >> 32) as u32 & 0xffff, written))
    }

    pub(super) fn room(&self, head: u16) -> u32 {
        self.chains[usize::from(head)].1
    }

    /// A chain has come back.
    pub(super) fn pass(&mut self, id: u32) {
        let slots = std::mem::take(&mut self.chains[id as usize].0).len();
        assert!(slots > 0, "id {id} is not out");
        self.passed += slots as u64;
        self.free += slots as u16;
        self.ids.push(id as u16);
    }

    pub(super) fn enable_calls(&mut self) -> bool {
        // The other side of `PackedRing::publish`.
        let request = if self.event_idx { 2 << 16 | u32::from(self.word(self.passed)) } else { 0 };
        self.layout.avail.store_u32(0, request, SeqCst);
        let rest = self.layout.desc.load_u64(self.offset(self.passed) + 8, SeqCst);
        let used = if self.wrap(self.passed) { AVAIL | USED } else { 0 };
        (rest >> 48) as u16 & (AVAIL | USED) == used && self.passed != self.published
    }

    pub(super) fn disable_calls(&mut self) {
        self.layout.avail.store_u32(0, 1 << 16, Release);
    }
}
