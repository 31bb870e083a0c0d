//! Doorbells: the registers of each queue, and the shadow doorbells that avoid most writes to them.
//!
//! With shadow doorbells (Doorbell Buffer Config) the host stores each new index in a page of memory. It writes the
//! register only if the index passes the event index, which the controller has stored before it went to sleep. Both
//! sides need a full barrier between their store and their load. Without it the host can miss the event index and the
//! controller the doorbell, and the controller sleeps without end. `tests/loom_doorbell.rs` checks [`announce`] and
//! [`listen`].

use blkyard_mem::View;
use blkyard_mem::sync::{Ordering, fence};

use crate::registers::{cq_doorbell, sq_doorbell};

/// A 32-bit word shared by both sides.
pub trait SharedWord {
    /// Reads it once.
    fn load(&self, order: Ordering) -> u32;
    /// Writes it once.
    fn store(&self, value: u32, order: Ordering);
}

/// Host: stores a new index, `new`, in a shadow doorbell that held `old`. Returns whether the register must be written
/// as well. A controller that sees the index also sees all earlier writes.
#[inline]
pub fn announce<W: SharedWord>(doorbell: &W, event: &W, old: u16, new: u16) -> bool {
    doorbell.store(u32::from(new), Ordering::Release);
    fence(Ordering::SeqCst);
    passes_event(event.load(Ordering::Relaxed) as u16, new, old)
}

/// Controller: requests a write of the register once the index moves on from `seen`, and returns the present index. The
/// controller may sleep only if it equals `seen`.
#[inline]
pub fn listen<W: SharedWord>(doorbell: &W, event: &W, seen: u16) -> u32 {
    event.store(u32::from(seen), Ordering::Relaxed);
    fence(Ordering::SeqCst);
    doorbell.load(Ordering::Acquire)
}

/// Whether an index that moves from `old` to `new` passes `event`. Indexes wrap at the size of a queue, and their
/// differences at 16 bits.
#[inline]
const fn passes_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A word of a view.
#[derive(Clone, Debug)]
struct ViewWord {
    view: View,
    at: usize,
}

impl SharedWord for ViewWord {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.view.load_u32(self.at, order)
    }

    #[inline]
    fn store(&self, value: u32, order: Ordering) {
        self.view.store_u32(self.at, value, order);
    }
}

/// The doorbells of a controller.
#[derive(Clone, Debug)]
pub struct Doorbells {
    registers: View,
    shadow: Option<ShadowDoorbells>,
    stride: u8,
    /// Whether the shadow doorbells in use, if any, are mapped.
    is_mapped: bool,
}

/// Shadow doorbells and event indexes of Doorbell Buffer Config, with the layout of the registers.
#[derive(Clone, Debug)]
pub struct ShadowDoorbells {
    /// Doorbells, written by the host.
    pub doorbells: View,
    /// Event indexes, written by the controller.
    pub events: View,
}

impl Doorbells {
    /// Doorbells whose registers begin at the start of `registers` (offset 1000h of the controller), at CAP.DSTRD
    /// `stride`. The admin queue has no shadow doorbells.
    pub fn new(registers: View, stride: u8, shadow: Option<ShadowDoorbells>) -> Doorbells {
        Doorbells { registers, shadow, stride, is_mapped: true }
    }

    /// The same while the host has not mapped its shadow doorbells: I/O queues pause.
    pub(crate) fn unmapped(registers: View, stride: u8) -> Doorbells {
        Doorbells { is_mapped: false, ..Doorbells::new(registers, stride, None) }
    }

    /// Whether the doorbells of this queue are mapped.
    pub(crate) fn are_mapped(&self, qid: u16) -> bool {
        self.is_mapped || qid == 0
    }

    /// The shadow doorbells, if they are used.
    pub(crate) fn shadow(&self) -> Option<&ShadowDoorbells> {
        self.shadow.as_ref()
    }

    /// The tail doorbell of a submission queue.
    ///
    /// # Panics
    /// If the memory has no room for it; queues are only created within it.
    pub(crate) fn sq_tail(&self, qid: u16) -> Doorbell {
        self.at(qid, sq_doorbell(qid, self.stride))
    }

    /// The head doorbell of a completion queue.
    ///
    /// # Panics
    /// If the memory has no room for it.
    pub(crate) fn cq_head(&self, qid: u16) -> Doorbell {
        self.at(qid, cq_doorbell(qid, self.stride))
    }

    fn at(&self, qid: u16, at: usize) -> Doorbell {
        let word = |view: &View| {
            assert!(at + 4 <= view.len(), "a doorbell at {at:#x} in memory of {} bytes", view.len());
            ViewWord { view: view.clone(), at }
        };
        let shadow = self.shadow.as_ref().filter(|_| qid != 0);
        let shadow = shadow.map(|shadow| (word(&shadow.doorbells), word(&shadow.events)));
        Doorbell { register: word(&self.registers), shadow }
    }
}

/// One doorbell.
#[derive(Debug)]
pub(crate) struct Doorbell {
    register: ViewWord,
    /// Doorbell and event index.
    shadow: Option<(ViewWord, ViewWord)>,
}

impl Doorbell {
    /// Host: moves the index from `old` to `new`. Returns whether the register was written.
    #[inline]
    pub(crate) fn ring(&self, old: u16, new: u16) -> bool {
        if let Some((doorbell, event)) = &self.shadow
            && !announce(doorbell, event, old, new)
        {
            return false;
        }
        self.register.store(u32::from(new), Ordering::Release);
        true
    }

    /// The index that the controller reads, and the event index that it has stored.
    pub(crate) fn words(&self) -> (u32, Option<u32>) {
        (self.read(), self.shadow.as_ref().map(|(_, event)| event.load(Ordering::Relaxed)))
    }

    /// Controller: the index last written by the host.
    #[inline]
    pub(crate) fn read(&self) -> u32 {
        let word = self.shadow.as_ref().map_or(&self.register, |(doorbell, _)| doorbell);
        word.load(Ordering::Acquire)
    }

    /// Controller: requests a write of the register once the index moves on from `seen`. Without shadow doorbells each
    /// move is a write. Returns the present index.
    #[inline]
    pub(crate) fn listen(&self, seen: u16) -> u32 {
        match &self.shadow {
            Some((doorbell, event)) => listen(doorbell, event, seen),
            None => self.read(),
        }
    }

    /// Host: zeroes shadow doorbell and event index before the queue is created again.
    pub(crate) fn clear_shadow(&self) {
        if let Some((doorbell, event)) = &self.shadow {
            doorbell.store(0, Ordering::Relaxed);
            event.store(0, Ordering::Relaxed);
        }
    }

    /// Controller: starts to use the shadow doorbell of an existing queue with this index.
    pub(crate) fn start_shadow(&self, index: u32) {
        if let Some((doorbell, event)) = &self.shadow {
            doorbell.store(index, Ordering::Release);
            event.store(index, Ordering::Relaxed);
        }
    }

    /// Controller: zeroes the register when the queue is created.
    pub(crate) fn clear_register(&self) {
        self.register.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The event is passed if and only if it is one of the indexes from the old one to the one before the new one,
    /// counted modulo the queue size.
    #[test]
    fn an_event_is_passed_by_the_step_that_leaves_it() {
        for entries in [2_u16, 3, 8, 11] {
            for old in 0..entries {
                for steps in 1..entries {
                    let new = (old + steps) % entries;
                    for event in 0..entries {
                        let is_left = (0..steps).any(|step| (old + step) % entries == event);
                        assert_eq!(passes_event(event, new, old), is_left, "{event} from {old} to {new} of {entries}");
                    }
                }
            }
        }
        assert!(passes_event(u16::MAX - 1, 0, u16::MAX - 1) && !passes_event(0, 0, u16::MAX - 1));
    }
}
