//! Hedged reads of a queue: slots and buffers, and what a queue over several paths asks of this one.
//!
//! A tag has a slot, usually the one of its number. A hedge takes a slot beyond those of tags. A read that is given up
//! keeps its slot until the controller has answered, since its command has the identifier of that slot; its tag has
//! another slot from then on.

use blkyard_mem::{RegionTable, Segment};
use blkyard_mq::{EndedHedge, HedgeDriver, Op, Request, Segments, Tag};

use super::{FabricsIoQueue, FabricsQueueState, SLOT_BYTES};
use crate::tcp::TcpDirection;

/// Hedges and reads given up of a connection, at most. A hung path has as many at its end.
pub(super) const HEDGES_MAX: u16 = 16;
/// Longest read that is hedged, bytes: larger ones are bound by the wire, not by the path's delay.
pub(super) const HEDGE_BYTES_MAX: u32 = 64 << 10;

impl HedgeDriver for FabricsIoQueue {
    fn send_hedge(&mut self, request: &Request) -> Option<u16> {
        let can_send = self.state == FabricsQueueState::Running
            && self.in_flight() + self.hedges.used() < usize::from(self.options.depth)
            && request.bytes() <= HEDGE_BYTES_MAX.into();
        if !can_send {
            return None;
        }
        let (slot, buffer) = self.hedges.take()?;
        let namespace = self.namespaces[usize::from(request.namespace())];
        let sqe = namespace.command(Op::Read, request.sector(), request.sectors(), request.flags());
        let data = self.hedge_buffer(buffer, request.bytes() as u32);
        let is_pushed = self.queue.push(&self.memory, slot, sqe, TcpDirection::Read, std::iter::once(data));
        assert!(is_pushed, "a buffer of a queue is in its memory");
        Some(slot)
    }

    fn give_up(&mut self, place: usize) -> Option<(Tag, u16)> {
        let slot = self.hedges.slot(place);
        let waste = self.hedge_buffer(self.queue.depth() - self.options.depth, HEDGE_BYTES_MAX);
        let is_here = self.parked[usize::from(slot)].is_some();
        if !is_here || !self.hedges.has_spare() || !self.queue.divert(slot, waste) {
            return None;
        }
        self.hedges.give_up(place);
        let tag = self.parked[usize::from(slot)].take()?;
        self.retries.forget(&tag);
        Some((tag, slot))
    }

    fn next_ended(&mut self) -> Option<EndedHedge> {
        self.hedges.next_ended()
    }

    fn copy_hedge(&self, number: u16, memory: &RegionTable, to: Segments<'_>) {
        let Some(buffer) = self.hedges.buffer(number) else { return };
        let from = self.hedge_buffer(buffer, HEDGE_BYTES_MAX);
        let Some(from) = self.memory.resolve(from) else { return };
        let mut at = 0;
        for segment in to {
            let len = segment.len as usize;
            // Its memory was resolved when the read was sent.
            if let Some(to) = memory.resolve(segment) {
                to.copy_from(&from.part(at, len));
            }
            at += len;
        }
    }

    fn release_hedge(&mut self, number: u16) {
        self.hedges.release(number);
    }
}

impl FabricsIoQueue {
    /// The first bytes of a buffer; the last one is for waste.
    fn hedge_buffer(&self, buffer: u16, bytes: u32) -> Segment {
        // Behind the memory of the slots.
        let at = u64::from(self.queue.depth()) * SLOT_BYTES + u64::from(buffer) * u64::from(HEDGE_BYTES_MAX);
        self.private.segment(at, bytes)
    }
}

/// See the head of the module.
#[derive(Debug)]
pub(super) struct HedgeSlots {
    /// By tag.
    slot_of: Box<[u16]>,
    /// Free slots of no tag.
    spare: Vec<u16>,
    /// Slots in use without a tag.
    used: Vec<ExtraSlot>,
    /// Buffers in use, by bit.
    buffers: u32,
}

#[derive(Clone, Copy, Debug)]
struct ExtraSlot {
    slot: u16,
    /// Buffer of a hedge; unset for a read that was given up.
    buffer: Option<u16>,
    state: ExtraState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExtraState {
    InFlight,
    /// Ended, which its owner was not told.
    Ended {
        is_ok: bool,
    },
    /// A hedge that is to be released.
    Told,
}

impl HedgeSlots {
    /// For so many tags, and so many hedges and reads given up together.
    pub(super) fn new(tags: u16, hedges: u16) -> HedgeSlots {
        HedgeSlots {
            slot_of: (0..tags).collect(),
            spare: (tags..tags + hedges).collect(),
            used: Vec::with_capacity(hedges.into()),
            buffers: 0,
        }
    }

    /// Slot of the requests with this tag.
    #[inline]
    pub(super) fn slot(&self, tag: usize) -> u16 {
        self.slot_of[tag]
    }

    /// Slots in use without a tag.
    #[inline]
    pub(super) fn used(&self) -> usize {
        self.used.len()
    }

    /// Whether a slot is left.
    pub(super) fn has_spare(&self) -> bool {
        !self.spare.is_empty()
    }

    /// Slot and buffer for a hedge.
    pub(super) fn take(&mut self) -> Option<(u16, u16)> {
        let slot = self.spare.pop()?;
        let buffer = self.buffers.trailing_ones() as u16;
        self.buffers |= 1 << buffer;
        self.used.push(ExtraSlot { slot, buffer: Some(buffer), state: ExtraState::InFlight });
        Some((slot, buffer))
    }

    /// The read of this tag was given up: its slot is another one. There is a [spare](HedgeSlots::has_spare) one.
    pub(super) fn give_up(&mut self, tag: usize) {
        let Some(next) = self.spare.pop() else { return };
        let slot = std::mem::replace(&mut self.slot_of[tag], next);
        self.used.push(ExtraSlot { slot, buffer: None, state: ExtraState::InFlight });
    }

    /// The command of a slot has ended which no request has.
    pub(super) fn end(&mut self, slot: u16, is_ok: bool) {
        let used = self.used.iter_mut().find(|used| used.slot == slot && used.state == ExtraState::InFlight);
        if let Some(used) = used {
            used.state = ExtraState::Ended { is_ok };
        }
    }

    /// The next one that has ended.
    pub(super) fn next_ended(&mut self) -> Option<EndedHedge> {
        let is_ended = |used: &ExtraSlot| matches!(used.state, ExtraState::Ended { .. });
        let at = self.used.iter().position(is_ended)?;
        let ExtraSlot { slot, buffer, state } = self.used[at];
        if buffer.is_some() {
            self.used[at].state = ExtraState::Told;
        } else {
            self.used.swap_remove(at);
            self.spare.push(slot);
        }
        Some(EndedHedge { number: slot, is_ok: state == ExtraState::Ended { is_ok: true } })
    }

    /// Buffer of a hedge that has ended.
    pub(super) fn buffer(&self, slot: u16) -> Option<u16> {
        self.used.iter().find(|used| used.slot == slot && used.state == ExtraState::Told)?.buffer
    }

    /// A hedge that has ended is not needed any more.
    pub(super) fn release(&mut self, slot: u16) {
        let told = |used: &ExtraSlot| used.slot == slot && used.state == ExtraState::Told;
        let Some(at) = self.used.iter().position(told) else { return };
        let buffer = self.used.swap_remove(at).buffer;
        self.buffers &= !buffer.map_or(0, |buffer| 1 << buffer);
        self.spare.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_whose_read_was_given_up_has_another_slot_and_no_slot_has_two_uses() {
        let mut slots = HedgeSlots::new(4, 2);
        let (hedge, buffer) = slots.take().unwrap();
        assert_eq!((hedge, buffer), (5, 0));
        slots.give_up(2);
        assert_eq!((slots.slot(2), slots.used(), slots.has_spare()), (4, 2, false));
        assert!(slots.take().is_none());

        // The old slot of the tag is free once the command has ended.
        slots.end(2, true);
        assert_eq!(slots.next_ended(), Some(EndedHedge { number: 2, is_ok: true }));
        assert!(slots.next_ended().is_none() && slots.has_spare());
        assert_eq!(slots.take(), Some((2, 1)));
    }

    #[test]
    fn a_hedge_keeps_its_buffer_until_it_is_released() {
        let mut slots = HedgeSlots::new(4, 2);
        let (one, _) = slots.take().unwrap();
        assert!(slots.buffer(one).is_none());
        slots.release(one);
        assert_eq!(slots.used(), 1);
        slots.end(one, true);
        // A connection that is lost ends what has not ended.
        slots.end(one, false);
        assert_eq!(slots.next_ended(), Some(EndedHedge { number: one, is_ok: true }));
        assert_eq!(slots.buffer(one), Some(0));
        slots.release(one);
        assert_eq!((slots.used(), slots.take()), (0, Some((one, 0))));
    }
}
