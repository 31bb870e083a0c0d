//! The baton: a lock with one owner at a time, on which no thread waits.
//!
//! A [`Baton`] is an ownership lock with a PENDING bit, and guards a value that several threads share, one at a time: a
//! hardware queue. It is a lock without a slow path: a thread that finds it held sets the bit and leaves. The holder
//! cannot release it without having taken the bit.
//!
//! ```text
//!                       take                            take, by another
//!               ┌─────────────────▶ ┌───────┐ ─────────────────────────▶ ┌───────────────┐
//!      ┌──────┐ │                   │ owned │                            │ owned,        │──┐ take, by another
//!      │ idle │─┘                   └───────┘ ◀───────────────────────── │ work pending  │◀─┘
//!      └──────┘ ◀──────────────────────┘             take_pending        └───────────────┘
//!                     give back                                                   └─ give back: refused
//! ```
//!
//! Why leaving is safe: the bit is set by a read-modify-write after the leaving thread has published its work, and
//! idle is reached only from *owned*. If the compare-exchange to idle comes first, the leaving thread finds idle and
//! takes the baton itself. If it comes second, it fails, and the holder takes the pending bit, which makes the
//! published work visible to it. There is one word, and all orders of events are orders of its values: no other fence
//! is needed.
//!
//! How often a holder takes the pending bit before it passes the baton on, and to whom, is decided by its user, the
//! software queue of `mq`. A thread that is preempted while it holds the baton delays the others; they can leave and
//! sleep meanwhile, but not bypass it.
//!
//! Unsafe: the holder reaches the protected value by a reference, through the shared baton.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::sync::{AtomicU32, CachePadded, Ordering, UnsafeCell};

const IDLE: u32 = 0;
const OWNED: u32 = 1;
/// Only ever beside `OWNED`.
const WORK: u32 = 2;
/// A holder panicked: the protected value is unusable. Permanent.
const BROKEN: u32 = 4;

/// Something with one owner at a time.
#[derive(Debug)]
pub struct Baton<T> {
    word: CachePadded<AtomicU32>,
    kept: UnsafeCell<T>,
}

// SAFETY: the word gives one thread at a time access to the value, and passes it on with release and acquire. So the
// value moves between threads, which `Send` allows, and is never shared between them.
unsafe impl<T: Send> Sync for Baton<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Baton<T> {}

/// Ownership of the baton. Must be [given back](Holder::give_back): dropping it breaks the baton for all threads.
#[must_use = "a holder that is dropped breaks the baton"]
#[derive(Debug)]
pub struct Holder<'a, T> {
    baton: &'a Baton<T>,
    /// A holder is as good as `&mut T`: sharing one shares `T`.
    marker: PhantomData<&'a mut T>,
}

impl<T> Baton<T> {
    /// Keeps `kept`, idle.
    pub fn new(kept: T) -> Baton<T> {
        Baton { word: CachePadded(AtomicU32::new(IDLE)), kept: UnsafeCell::new(kept) }
    }

    /// Takes the baton if it is idle; otherwise sets its PENDING bit, and the holder will see all that this thread has
    /// published before.
    ///
    /// # Panics
    /// If a holder panicked.
    #[inline]
    pub fn take(&self) -> Option<Holder<'_, T>> {
        if let Some(holder) = self.take_idle() {
            return Some(holder);
        }
        // Release pairs with the swap in `Holder::take_pending`: the holder sees what we published. Acquire pairs with
        // the compare-exchange in `Holder::give_back`, in case we find it idle after all; then the pending bit is our
        // own, and we take it ourselves.
        match self.word.0.fetch_or(OWNED | WORK, Ordering::AcqRel) {
            IDLE => Some(self.holder()),
            was => {
                assert!(was & BROKEN == 0, "the owner of this queue panicked");
                None
            }
        }
    }

    /// Takes the baton if it is idle; otherwise changes nothing.
    #[inline]
    pub fn take_if_idle(&self) -> Option<Holder<'_, T>> {
        // A load first: a polling thread must not pull the cache line away from the holder each time.
        match self.word.0.load(Ordering::Relaxed) {
            IDLE => self.take_idle(),
            was => {
                assert!(was & BROKEN == 0, "the owner of this queue panicked");
                None
            }
        }
    }

    /// Whether a holder panicked.
    pub fn is_broken(&self) -> bool {
        self.word.0.load(Ordering::Relaxed) & BROKEN != 0
    }

    #[inline]
    fn take_idle(&self) -> Option<Holder<'_, T>> {
        // Acquire pairs with the compare-exchange in `Holder::give_back`: we see all that the last holder did.
        let taken = self.word.0.compare_exchange(IDLE, OWNED, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| self.holder())
    }

    #[inline]
    fn holder(&self) -> Holder<'_, T> {
        Holder { baton: self, marker: PhantomData }
    }
}

impl<'a, T> Holder<'a, T> {
    /// Takes the pending bit. True if it was set: all that other threads published before they set it is visible from
    /// here on.
    #[inline]
    pub fn take_pending(&mut self) -> bool {
        let word = &self.baton.word.0;
        // A plain load may miss a bit that is just being set; then `give_back` does not.
        if word.load(Ordering::Relaxed) & WORK == 0 {
            return false;
        }
        // Acquire pairs with the fetch-or in `Baton::take`. Earlier setters than the last are covered too:
        // read-modify-writes continue a release.
        word.swap(OWNED, Ordering::Acquire);
        true
    }

    /// Releases the baton.
    ///
    /// # Errors
    /// The pending bit is set and not [taken](Holder::take_pending). The holder keeps the baton.
    #[inline]
    pub fn give_back(self) -> Result<(), Holder<'a, T>> {
        // Release pairs with the acquires in `Baton::take` and `Baton::take_if_idle`: the next holder sees our changes.
        match self.baton.word.0.compare_exchange(OWNED, IDLE, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => {
                std::mem::forget(self);
                Ok(())
            }
            Err(_) => Err(self),
        }
    }
}

impl<T> Drop for Holder<'_, T> {
    fn drop(&mut self) {
        // Acquire pairs with the fetch-or in `Baton::take`: threads that left are seen by the one that tells them.
        self.baton.word.0.fetch_or(BROKEN, Ordering::AcqRel);
    }
}

impl<T> Deref for Holder<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: there is one holder at a time, and this borrows it.
        self.baton.kept.with(|kept| unsafe { &*kept })
    }
}

impl<T> DerefMut for Holder<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: there is one holder at a time, and this borrows it mutably.
        self.baton.kept.with_mut(|kept| unsafe { &mut *kept })
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn pending_work_is_seen_before_the_baton_is_released() {
        let baton = Baton::new(7);
        let mut holder = baton.take().unwrap();
        assert!(!holder.take_pending(), "taking an idle baton leaves no work");
        assert!(baton.take_if_idle().is_none());
        assert!(!holder.take_pending(), "and neither does looking at it");
        assert!(baton.take().is_none());
        let mut holder = holder.give_back().unwrap_err();
        assert!(holder.take_pending() && !holder.take_pending());
        *holder += 1;
        holder.give_back().unwrap();
        let holder = baton.take_if_idle().unwrap();
        assert_eq!(*holder, 8);
        holder.give_back().unwrap();
    }

    #[test]
    #[should_panic(expected = "the owner of this queue panicked")]
    fn a_dropped_baton_is_broken_for_all() {
        let baton = Baton::new(());
        drop(baton.take());
        assert!(baton.is_broken());
        let _ = baton.take();
    }
}
