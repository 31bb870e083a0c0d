//! The driver's side of a split ring. [2.7]

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use super::{Descriptor, ModelBuffer, link, room};
use crate::split::needs_event;
use crate::{RingBase, RingLayout};

#[derive(Debug)]
pub(super) struct SplitDriverModel {
    layout: RingLayout,
    size: u16,
    event_idx: bool,
    avail: u16,
    avail_published: u16,
    used_seen: u16,
    free: Vec<u16>,
    /// By head: descriptors of the chain in the driver's own record, and the device's room.
    chains: Vec<(Vec<u16>, u32)>,
}

impl SplitDriverModel {
    pub(super) fn new(layout: RingLayout, size: u16, event_idx: bool) -> SplitDriverModel {
        SplitDriverModel {
            layout,
            size,
            event_idx,
            avail: 0,
            avail_published: 0,
            used_seen: 0,
            free: (0..size).rev().collect(),
            chains: vec![(Vec::new(), 0); usize::from(size)],
        }
    }

    pub(super) fn start_at(&mut self, index: u16) {
        (self.avail, self.avail_published, self.used_seen) = (index, index, index);
        self.layout.avail.store_u16(2, index, Relaxed);
        self.layout.used.store_u16(2, index, Relaxed);
    }

    pub(super) fn base(&self) -> RingBase {
        RingBase::from_bits(self.avail_published.into())
    }

    pub(super) fn chain(&mut self, buffers: &[ModelBuffer]) -> Option<u16> {
        let rest = self.free.len().checked_sub(buffers.len())?;
        let mut places = self.free.split_off(rest);
        places.reverse();
        for (at, buffer) in buffers.iter().enumerate() {
            self.set(places[at], link(*buffer, places.get(at + 1).copied()));
        }
        let head = *places.first()?;
        self.chains[usize::from(head)] = (places, room(buffers));
        Some(head)
    }

    pub(super) fn chain_indirect(&mut self, table: u64, buffers: &[ModelBuffer]) -> Option<u16> {
        let head = self.free.pop()?;
        let len = buffers.len() as u32 * 16;
        self.set(head, Descriptor { addr: table, len, flags: Descriptor::INDIRECT, next: 0 });
        self.chains[usize::from(head)] = (vec![head], room(buffers));
        Some(head)
    }

    fn set(&self, place: u16, descriptor: Descriptor) {
        let words = u128::from_le_bytes(descriptor.to_bytes());
        let at = usize::from(place) * 16;
        self.layout.desc.store_u64(at, words as u64, Relaxed);
        self.layout.desc.store_u64(at + 8, (words >> 64) as u64, Relaxed);
    }

    pub(super) fn offer(&mut self, head: u16) {
        let place = usize::from(self.avail & (self.size - 1));
        self.layout.avail.store_u16(4 + 2 * place, head, Relaxed);
        self.avail = self.avail.wrapping_add(1);
    }

    pub(super) fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.avail_published, self.avail);
        // The other side of `SplitRing::enable_notify`.
        self.layout.avail.store_u16(2, self.avail, SeqCst);
        if self.event_idx {
            let event = self.layout.used.load_u16(4 + 8 * usize::from(self.size), SeqCst);
            needs_event(event, self.avail, old)
        } else {
            self.layout.used.load_u16(0, SeqCst) & 1 == 0
        }
    }

    /// The next used element, if there is one.
    pub(super) fn look(&self) -> Option<(u32, u32)> {
        if self.layout.used.load_u16(2, Acquire) == self.used_seen {
            return None;
        }
        let place = 4 + 8 * usize::from(self.used_seen & (self.size - 1));
        Some((self.layout.used.load_u32(place, Relaxed), self.layout.used.load_u32(place + 4, Relaxed)))
    }

    pub(super) fn room(&self, head: u16) -> u32 {
        self.chains[usize::from(head)].1
    }

    /// A chain has come back.
    pub(super) fn pass(&mut self, id: u32) {
        self.used_seen = self.used_seen.wrapping_add(1);
        if let Some((chain, _)) = self.chains.get_mut(id as usize) {
            self.free.append(chain);
        }
    }

    pub(super) fn enable_calls(&mut self) -> bool {
        // The other side of `SplitRing::publish`.
        if self.event_idx {
            self.layout.avail.store_u16(4 + 2 * usize::from(self.size), self.used_seen, SeqCst);
        } else {
            self.layout.avail.store_u16(0, 0, SeqCst);
        }
        self.layout.used.load_u16(2, SeqCst) != self.used_seen
    }

    pub(super) fn disable_calls(&mut self) {
        if !self.event_idx {
            self.layout.avail.store_u16(0, 1, Release);
        }
    }
}
