//! The kicks of several client queues as one descriptor, on which their lane sleeps.
//!
//! An epoll instance, edge-triggered: it is readable from a kick until the lane has read it, and the kick descriptors
//! themselves are never read. So a kick of one client queue that is stopped meanwhile stays for the descriptor's next
//! user. It holds no descriptor: each is removed before its owner drops it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

/// The kicks of the client queues of one hardware queue.
#[derive(Debug)]
pub(crate) struct KickSet(OwnedFd);

impl KickSet {
    /// An empty set.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(crate) fn new() -> io::Result<KickSet> {
        Ok(KickSet(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Adds a kick, which is reported even if it came before.
    ///
    /// # Errors
    /// It is in the set already, or the system's limit on watches is reached.
    pub(crate) fn add(&self, kick: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.0, kick, EventData::new_u64(0), EventFlags::IN | EventFlags::ET)?)
    }

    /// Listens no more to this kick.
    pub(crate) fn remove(&self, kick: BorrowedFd<'_>) {
        let removed = epoll::delete(&self.0, kick);
        debug_assert!(removed.is_ok(), "a kick was removed that was never added: {removed:?}");
    }
}

impl AsFd for KickSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
