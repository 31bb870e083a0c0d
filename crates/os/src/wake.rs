//! Waking a lane from another thread, cheaply while it is awake.
//!
//! The waker publishes what it has for the lane, calls [`Waker::wake`], and must not be missed; the lane looks, finds
//! nothing, and goes to sleep. Two flags decide: `called`, set by the waker, and `asleep`, set by the lane.
//!
//! ```text
//!   waker                                lane
//!   publishes work                       turns, finds nothing
//!   called = true                        asleep = true
//!   fence                                fence
//!   asleep?  yes: rings the bell         called?  yes: turns again
//! ```
//!
//! Each side stores before its fence and loads after it, so at least one of them sees the other's store: either the
//! bell is rung, and the poll of it, level-triggered, ends the sleep whenever it begins; or the lane sees the call,
//! and with it everything published before. Without either fence both may miss, and the lane sleeps on work.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use blkyard_mq::Wake;
use rustix::event::EventfdFlags;

/// Both sides' flags, and the bell.
#[derive(Debug)]
pub(crate) struct Waker {
    called: AtomicBool,
    asleep: AtomicBool,
    bell: OwnedFd,
}

impl Waker {
    pub(crate) fn new() -> std::io::Result<Arc<Waker>> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Waker { called: AtomicBool::new(false), asleep: AtomicBool::new(false), bell }))
    }

    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The lane wants to sleep. True if it was called since it last asked: then it turns again instead.
    #[inline]
    pub(crate) fn settle(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        // Pairs with the fence in `wake`, see above.
        fence(Ordering::SeqCst);
        let called = self.called.swap(false, Ordering::Acquire);
        if called {
            self.asleep.store(false, Ordering::Relaxed);
        }
        called
    }

    /// The lane is awake again, however it was woken.
    #[inline]
    pub(crate) fn rise(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }
}

impl Wake for Waker {
    #[inline]
    fn wake(&self) {
        // Stored even if it is set already: the lane may be about to clear it, having looked before we published.
        self.called.store(true, Ordering::Release);
        // Pairs with the fence in `settle`, see above.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            // Fails only when 2^64 calls were not heard; then the bell is ringing anyway.
            let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }
}
