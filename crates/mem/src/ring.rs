//! A ring between two threads: one pushes values, the other pops them, in order.
//!
//! Each end is owned by one thread, cannot be copied, and may move to another thread. There is no lock, and no locked
//! instruction:
//!
//! ```text
//!             head (consumer's line)        tail (producer's line)
//!               │                             │
//!    ───free────┼───────published─────────────┼─────pushed only─────┼───free───
//!               │◀──── taken only ─────▶│     │                     │
//!                                     pop                         push
//! ```
//!
//! An end publishes its position once per batch: [`Producer::publish`], [`Consumer::release`]. It caches the position
//! of the other end, and reads it again only when that does not suffice. So a batch costs one cache line each way
//! besides the slots themselves.
//!
//! It wakes no thread: sleeping until a value arrives is arranged elsewhere ([`crate::Baton`]).
//!
//! Unsafe: a slot is written by one thread and read by another.

use std::mem::MaybeUninit;

use crate::sync::{Arc, AtomicUsize, CachePadded, Ordering, UnsafeCell};

struct RingMemory<T> {
    /// End of the written slots. Written by the producer alone. A free-running count; a slot is its lower bits.
    tail: CachePadded<AtomicUsize>,
    /// End of the free slots. Written by the consumer alone.
    head: CachePadded<AtomicUsize>,
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
    capacity: usize,
}

// SAFETY: the indexes give each slot to one thread at a time, see the module's head. Values move from one thread to the
// other, which `Send` allows; no reference to one is shared.
unsafe impl<T: Send> Sync for RingMemory<T> {}
// SAFETY: as above; a ring that moves takes its values with it.
unsafe impl<T: Send> Send for RingMemory<T> {}

impl<T> RingMemory<T> {
    #[inline(always)]
    fn slot(&self, index: usize) -> &UnsafeCell<MaybeUninit<T>> {
        // SAFETY: the length is a power of two, so an index masked with one less is below it.
        unsafe { self.slots.get_unchecked(index & (self.slots.len() - 1)) }
    }
}

impl<T> Drop for RingMemory<T> {
    fn drop(&mut self) {
        // Both ends are dropped, and published their positions before; the reference count, when it reached zero,
        // ordered all their writes before this.
        let (mut head, tail) = (self.head.0.load(Ordering::Relaxed), self.tail.0.load(Ordering::Relaxed));
        while head != tail {
            // SAFETY: slots between head and tail are written, and have no other owner.
            self.slot(head).with_mut(|slot| unsafe { (*slot).assume_init_drop() });
            head = head.wrapping_add(1);
        }
    }
}

/// The end that puts in.
pub struct Producer<T> {
    ring: Arc<RingMemory<T>>,
    /// How far we have written.
    tail: usize,
    /// How far we have said so.
    told: usize,
    /// How far we have seen the consumer come.
    head_seen: usize,
}

/// The end that takes out.
pub struct Consumer<T> {
    ring: Arc<RingMemory<T>>,
    /// How far we have taken.
    head: usize,
    /// How far we have said so.
    told: usize,
    /// How far we have seen the producer come.
    tail_seen: usize,
}

/// A ring for `capacity` values. All its memory is allocated here.
///
/// # Panics
/// If `capacity` is 0.
pub fn channel<T>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    assert!(capacity > 0, "a ring without places");
    let slots = (0..capacity.next_power_of_two()).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect();
    let ring =
        RingMemory { tail: CachePadded(AtomicUsize::new(0)), head: CachePadded(AtomicUsize::new(0)), slots, capacity };
    let ring = Arc::new(ring);
    let producer = Producer { ring: Arc::clone(&ring), tail: 0, told: 0, head_seen: 0 };
    (producer, Consumer { ring, head: 0, told: 0, tail_seen: 0 })
}

impl<T> Producer<T> {
    /// Values that the ring holds at most.
    pub fn capacity(&self) -> usize {
        self.ring.capacity
    }

    /// Free slots, as published by the consumer.
    #[inline]
    pub fn room(&mut self) -> usize {
        self.look();
        self.ring.capacity - self.tail.wrapping_sub(self.head_seen)
    }

    /// Values in the ring, published or not, less those that the consumer has released.
    #[inline]
    pub fn len(&mut self) -> usize {
        self.look();
        self.tail.wrapping_sub(self.head_seen)
    }

    /// Whether the consumer has released every value.
    #[inline]
    pub fn is_empty(&mut self) -> bool {
        self.len() == 0
    }

    /// Writes a value into the next slot. The consumer sees it once it is [published](Producer::publish).
    ///
    /// # Errors
    /// No slot is free; the value comes back.
    #[inline]
    pub fn push(&mut self, value: T) -> Result<(), T> {
        if self.tail.wrapping_sub(self.head_seen) == self.ring.capacity && self.room() == 0 {
            return Err(value);
        }
        // SAFETY: the slot at `tail` is less than the capacity after the consumer's released position, so it is free,
        // and ours until we publish it.
        self.ring.slot(self.tail).with_mut(|slot| unsafe {
            (*slot).write(value);
        });
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Publishes all pushed values. False if there are none.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.told == self.tail {
            return false;
        }
        // Pairs with the load in `Consumer::look`: a thread that sees this tail sees the slots written before it.
        // Without that, it would read slots before they are written.
        self.ring.tail.0.store(self.tail, Ordering::Release);
        self.told = self.tail;
        true
    }

    #[inline]
    fn look(&mut self) {
        // Pairs with the store in `Consumer::release`: a thread that sees this head writes its slots after they were
        // read. Without that, a value could be overwritten while it is taken.
        self.head_seen = self.ring.head.0.load(Ordering::Acquire);
    }
}

impl<T> Consumer<T> {
    /// Values that were published and not yet taken.
    #[inline]
    pub fn len(&mut self) -> usize {
        self.look();
        self.tail_seen.wrapping_sub(self.head)
    }

    /// Whether all published values have been taken.
    #[inline]
    pub fn is_empty(&mut self) -> bool {
        self.tail_seen == self.head && self.len() == 0
    }

    /// Takes the next value. Its slot is free once it is [released](Consumer::release).
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        // SAFETY: the slot at `head` is before the tail that we have seen, so it is written; it is ours until we
        // release it, and since `head` advances it is read once.
        let value = self.ring.slot(self.head).with(|slot| unsafe { (*slot).assume_init_read() });
        self.head = self.head.wrapping_add(1);
        Some(value)
    }

    /// Publishes the slots of all taken values as free. False if there are none.
    #[inline]
    pub fn release(&mut self) -> bool {
        if self.told == self.head {
            return false;
        }
        // Pairs with the load in `Producer::look`, see there.
        self.ring.head.0.store(self.head, Ordering::Release);
        self.told = self.head;
        true
    }

    #[inline]
    fn look(&mut self) {
        // Pairs with the store in `Producer::publish`, see there.
        self.tail_seen = self.ring.tail.0.load(Ordering::Acquire);
    }
}

impl<T> Drop for Producer<T> {
    fn drop(&mut self) {
        self.publish();
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        self.release();
    }
}

impl<T> std::fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Producer").field("tail", &self.tail).field("told", &self.told).finish_non_exhaustive()
    }
}

impl<T> std::fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Consumer").field("head", &self.head).field("told", &self.told).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use std::rc::Rc;

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nothing_is_seen_before_it_is_told() {
        let (mut producer, mut consumer) = channel(2);
        producer.push(1).unwrap();
        assert_eq!((consumer.pop(), consumer.len()), (None, 0));
        assert!(producer.publish() && !producer.publish());
        assert_eq!((consumer.len(), consumer.pop(), producer.room()), (1, Some(1), 1));
        assert!(consumer.release() && !consumer.release());
        assert_eq!((producer.room(), producer.is_empty()), (2, true));
    }

    #[test]
    fn what_is_left_is_dropped_with_the_ring() {
        let value = Rc::new(());
        let (mut producer, mut consumer) = channel(4);
        (0..3).for_each(|_| producer.push(Rc::clone(&value)).unwrap());
        producer.publish();
        producer.push(Rc::clone(&value)).unwrap();
        let taken = consumer.pop();
        drop(consumer);
        drop(producer);
        assert_eq!(Rc::strong_count(&value), 2);
        drop(taken);
    }

    proptest! {
        /// For any order of calls, values come out once, in order, and within the capacity.
        #[test]
        fn first_in_first_out(capacity in 1_usize..9, steps in proptest::collection::vec(0_u8..4, 0..400)) {
            let (mut producer, mut consumer) = channel(capacity);
            let (mut pushed, mut told, mut taken, mut freed) = (0_usize, 0_usize, 0_usize, 0_usize);
            for step in steps {
                match step {
                    0 => match producer.push(pushed) {
                        Ok(()) => pushed += 1,
                        Err(value) => prop_assert_eq!((value, pushed - freed), (pushed, capacity)),
                    },
                    1 => { prop_assert_eq!(producer.publish(), told != pushed); told = pushed; }
                    2 => {
                        let more = taken < told;
                        prop_assert_eq!(consumer.pop(), more.then_some(taken));
                        taken += usize::from(more);
                    }
                    _ => { prop_assert_eq!(consumer.release(), freed != taken); freed = taken; }
                }
                prop_assert_eq!((producer.len(), producer.room()), (pushed - freed, capacity - (pushed - freed)));
                prop_assert_eq!(consumer.len(), told - taken);
            }
        }
    }
}
