//! The flag of a thread that sleeps: a waker signals it only while it sleeps, and no wake-up is lost.
//!
//! A [`WakeFlag`] stands between one sleeper and any number of wakers. A waker publishes its work and calls
//! [`WakeFlag::wake`]. The sleeper asks [`WakeFlag::take_call`] before it looks for work, and looks everywhere if it
//! was called; if it finds nothing it sleeps, but only if [`WakeFlag::prepare_wait`] allows it: not after a call that
//! it has not taken. The caller provides sleep and signal: a signal must last until the sleeper has seen it, as that of
//! an eventfd does.
//!
//! ```text
//!                 prepare_wait                          wake: signals
//!   ┌───────┐ ────────────────▶ ┌────────┐ ────────────────────────────▶ ┌───────┐
//!   │ awake │                   │ asleep │                               │ woken │──┐ wake
//!   └───────┘ ◀──────────────── └────────┘                               └───────┘◀─┘
//!     │   ▲       finish_wait                                              ▲   │
//!     │   └──────────────────── take_call: true ───────────────────────────┼───┘
//!     └────────────────────────────────── wake ────────────────────────────┘
//! ```
//!
//! There is one word, and all that happens to it is a read-modify-write, so all orders of events are orders of its
//! values: either the waker finds *asleep* and signals, or the sleeper finds *woken* and looks for work again. The
//! one plain load is that of `take_call`: it may miss a call for a while, and `prepare_wait` does not. A waker
//! releases what it has published, the sleeper acquires it, and no other fence is needed. As `std`'s parker, but for
//! two things: the sleep itself is elsewhere, and *woken* outlasts a sleep, so that the sleeper learns of each call.

use crate::sync::{AtomicU32, Ordering};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
/// Called since the sleeper last asked.
const WOKEN: u32 = 2;

/// Whether a thread sleeps, and whether it was called.
#[derive(Debug)]
pub struct WakeFlag(AtomicU32);

impl Default for WakeFlag {
    fn default() -> WakeFlag {
        WakeFlag(AtomicU32::new(AWAKE))
    }
}

impl WakeFlag {
    /// Calls the sleeper, after something was published for it. `signal` must end its sleep, and is called only if it
    /// sleeps or is about to.
    #[inline]
    pub fn wake(&self, signal: impl FnOnce()) {
        // Done even if it is `WOKEN` already: the sleeper may be about to clear that, having looked before we
        // published. Release pairs with the acquire in `take_call`; several wakers are one release sequence.
        if self.0.swap(WOKEN, Ordering::Release) == ASLEEP {
            signal();
        }
    }

    /// Whether the thread was called since the last check: then it looks for work everywhere, and finds all that was
    /// published before the call. Costs a plain load otherwise.
    #[inline]
    pub fn take_call(&self) -> bool {
        // Acquire pairs with the swap in `wake`.
        self.0.load(Ordering::Relaxed) == WOKEN && self.0.swap(AWAKE, Ordering::Acquire) == WOKEN
    }

    /// The thread has found no work and wants to sleep. False after a call since the last [`take_call`]: it must take
    /// the call and look again.
    ///
    /// [`take_call`]: WakeFlag::take_call
    #[inline]
    #[must_use = "who sleeps although it was called sleeps over its work"]
    pub fn prepare_wait(&self) -> bool {
        self.0.compare_exchange(AWAKE, ASLEEP, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// The thread is awake again, for any cause. A call is kept for the next `take_call`.
    #[inline]
    pub fn finish_wait(&self) {
        let _ = self.0.compare_exchange(ASLEEP, AWAKE, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn only_a_sleeper_is_signalled_and_each_call_is_told_once() {
        let (flag, signals) = (WakeFlag::default(), std::cell::Cell::new(0));
        let wake = || flag.wake(|| signals.set(signals.get() + 1));
        assert!(!flag.take_call());
        wake();
        wake();
        assert!(!flag.prepare_wait() && flag.take_call() && !flag.take_call() && flag.prepare_wait());
        assert_eq!(signals.get(), 0, "it was awake");
        wake();
        wake();
        assert_eq!(signals.get(), 1, "the first has ended the sleep");
        flag.finish_wait();
        assert!(!flag.prepare_wait() && !flag.prepare_wait(), "it was called during the sleep");
        assert!(flag.take_call() && flag.prepare_wait());
        flag.finish_wait();
        wake();
        assert_eq!(signals.get(), 1, "it had risen by itself");
        assert!(!flag.prepare_wait() && flag.take_call());
    }
}
