//! In-order completion: used elements in the order of the fetches, for drivers that rely on it. [2.7.9, 2.8.11]
//!
//! Completions arrive in any order and wait here until all earlier ones have arrived. Then they are published, a whole
//! batch by its last chain where that is permitted. A ring has an instance only if the feature was negotiated. It
//! touches no shared memory, and all its slots are allocated at set-up.

/// Chains fetched and not published, oldest first.
#[derive(Debug)]
pub(crate) struct InOrder {
    places: Box<[UsedSlot]>,
    /// The oldest.
    first: u16,
    /// Where the next goes.
    next: u16,
    len: u16,
}

#[derive(Clone, Copy, Debug, Default)]
struct UsedSlot {
    id: u16,
    /// Where it is recorded as being in flight.
    record: u16,
    /// Descriptors in the ring.
    slots: u16,
    /// Bytes the device may write.
    room: u32,
    written: u32,
    done: bool,
}

/// A used element, for one chain or a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UsedElement {
    /// The driver's word for the last chain.
    pub(crate) id: u16,
    /// Bytes written to the last chain; to all others as many as they had room for.
    pub(crate) written: u32,
    /// Chains.
    pub(crate) chains: u16,
    /// Their descriptors in the ring.
    pub(crate) slots: u16,
}

impl InOrder {
    /// Room for as many chains as a ring of this size holds.
    pub(crate) fn new(size: u16) -> InOrder {
        InOrder { places: vec![UsedSlot::default(); usize::from(size)].into(), first: 0, next: 0, len: 0 }
    }

    /// Adds a fetched chain; there is room for it. Returns its slot.
    #[inline(never)]
    pub(crate) fn fetched(&mut self, id: u16, record: u16, slots: u16, writable_bytes: u64) -> u16 {
        let place = self.next;
        let room = u32::try_from(writable_bytes).unwrap_or(u32::MAX);
        self.places[usize::from(place)] = UsedSlot { id, record, slots, room, written: 0, done: false };
        self.next = self.after(place);
        self.len += 1;
        place
    }

    /// The chain in a slot has completed.
    #[inline(never)]
    pub(crate) fn done(&mut self, place: u16, written: u32) {
        let place = &mut self.places[usize::from(place)];
        (place.written, place.done) = (written, true);
    }

    /// The next used element to publish; `each` gets the record of every chain it covers. A batch ends before a chain
    /// that is not completed, and after one whose buffer was not filled: skipped ones count as filled.
    pub(crate) fn tell(&mut self, mut each: impl FnMut(u16)) -> Option<UsedElement> {
        let mut told = None;
        while self.len > 0 {
            let place = self.places[usize::from(self.first)];
            if !place.done {
                break;
            }
            each(place.record);
            let UsedElement { chains, slots, .. } =
                told.unwrap_or(UsedElement { id: 0, written: 0, chains: 0, slots: 0 });
            told = Some(UsedElement {
                id: place.id,
                written: place.written,
                chains: chains + 1,
                slots: slots + place.slots,
            });
            self.first = self.after(self.first);
            self.len -= 1;
            if place.written != place.room {
                break;
            }
        }
        told
    }

    fn after(&self, place: u16) -> u16 {
        let next = place + 1;
        if usize::from(next) == self.places.len() { 0 } else { next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_told_by_its_last_chain_and_ends_where_one_was_not_filled() {
        let mut order = InOrder::new(5);
        // The slots have wrapped already.
        for id in 0..3 {
            let place = order.fetched(id, 0, 1, 1);
            order.done(place, 1);
            assert_eq!(order.tell(|_| {}), Some(UsedElement { id, written: 1, chains: 1, slots: 1 }));
        }
        let places: Vec<_> = (10..15).map(|id| order.fetched(id, 0, 3, 513)).collect();
        for at in [1, 2, 4] {
            order.done(places[at], 513);
            assert_eq!(order.tell(|_| {}), None, "the first is not done");
        }
        order.done(places[0], 513);
        assert_eq!(order.tell(|_| {}), Some(UsedElement { id: 12, written: 513, chains: 3, slots: 9 }));
        assert_eq!(order.tell(|_| {}), None);
        order.done(places[3], 0);
        assert_eq!(
            order.tell(|_| {}),
            Some(UsedElement { id: 13, written: 0, chains: 1, slots: 3 }),
            "it cannot be skipped"
        );
        assert_eq!(order.tell(|_| {}), Some(UsedElement { id: 14, written: 513, chains: 1, slots: 3 }));
        assert_eq!(order.tell(|_| {}), None);
    }
}
