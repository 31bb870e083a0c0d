//! Clock and calendar: the next event, and its time.
//!
//! Owned by the simulation's runner. Events of one instant come in order of insertion, so a run depends only on its
//! seed. The meaning of an event is unknown here.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Events to come, and the time of the last one that came.
#[derive(Debug)]
pub struct Events<E> {
    now_ns: u64,
    entered: u64,
    heap: BinaryHeap<QueuedEvent<E>>,
}

#[derive(Debug)]
struct QueuedEvent<E> {
    at_ns: u64,
    sequence: u64,
    event: E,
}

impl<E> Default for Events<E> {
    fn default() -> Self {
        Events { now_ns: 0, entered: 0, heap: BinaryHeap::new() }
    }
}

impl<E> Events<E> {
    /// Time since the simulation began, ns.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Adds an event for a time that is not past.
    ///
    /// # Panics
    /// If it is past: the model would change earlier events.
    #[inline]
    pub fn at(&mut self, at_ns: u64, event: impl Into<E>) {
        assert!(at_ns >= self.now_ns, "an event for {at_ns} was entered at {}", self.now_ns);
        self.heap.push(QueuedEvent { at_ns, sequence: self.entered, event: event.into() });
        self.entered += 1;
    }

    /// Enters an event for some time from now.
    #[inline]
    pub fn after(&mut self, delay_ns: u64, event: impl Into<E>) {
        self.at(self.now_ns + delay_ns, event);
    }

    /// When the next event is.
    #[inline]
    pub fn next_ns(&self) -> Option<u64> {
        self.heap.peek().map(|entry| entry.at_ns)
    }

    /// Drops all pending events.
    pub fn clear(&mut self) {
        self.heap.clear();
    }

    /// The next event; its time is now.
    #[inline]
    pub fn advance(&mut self) -> Option<E> {
        let entry = self.heap.pop()?;
        self.now_ns = entry.at_ns;
        Some(entry.event)
    }
}

impl<E> Ord for QueuedEvent<E> {
    /// The heap gives the greatest first: that is the earliest, and of one instant the one entered first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at_ns, other.sequence).cmp(&(self.at_ns, self.sequence))
    }
}

impl<E> PartialOrd for QueuedEvent<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for QueuedEvent<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for QueuedEvent<E> {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn time_is_that_of_the_event_and_moves_only_with_it() {
        let mut events = Events::<&str>::default();
        events.after(20, "second");
        events.at(5, "first");
        assert_eq!((events.now_ns(), events.next_ns()), (0, Some(5)));
        assert_eq!((events.advance(), events.now_ns()), (Some("first"), 5));
        events.after(20, "third");
        assert_eq!((events.advance(), events.now_ns()), (Some("second"), 20));
        assert_eq!((events.advance(), events.now_ns()), (Some("third"), 25));
        assert_eq!((events.advance(), events.now_ns()), (None, 25));
    }

    #[test]
    #[should_panic(expected = "an event for 4 was entered at 5")]
    fn the_past_cannot_be_changed() {
        let mut events = Events::<u8>::default();
        events.at(5, 0);
        events.advance();
        events.at(4, 1);
    }

    proptest! {
        /// Events come by time, and those of one instant as they were entered.
        #[test]
        fn events_come_in_order(times in proptest::collection::vec(0_u64..20, 0..200)) {
            let mut events = Events::<(u64, usize)>::default();
            times.iter().enumerate().for_each(|(n, at)| events.at(*at, (*at, n)));
            let mut want: Vec<_> = times.iter().copied().enumerate().map(|(n, at)| (at, n)).collect();
            want.sort_unstable();
            prop_assert_eq!(std::iter::from_fn(|| events.advance()).collect::<Vec<_>>(), want);
        }
    }
}
