//! The kicks of several client queues as one descriptor, on which their lane sleeps.
//!
//! An edge-triggered epoll instance. It stays readable from a kick until the lane has read it, and the kick descriptors
//! themselves are never read. A kick of a client queue that is stopped meanwhile is therefore kept for the descriptor's
//! next user. The set owns no descriptor: each is removed before its owner drops it.

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
    /// The system has no descriptor left.
    pub(crate) fn new() -> io::Result<KickSet> {
        Ok(KickSet(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Adds a kick; an earlier signal is reported, too.
    ///
    /// # Errors
    /// The kick is already in the set, or the system's limit on watches is reached.
    pub(crate) fn add(&self, kick: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.0, kick, EventData::new_u64(0), EventFlags::IN | EventFlags::ET)?)
    }

    /// Removes a kick.
    pub(crate) fn remove(&self, kick: BorrowedFd<'_>) {
        let removed = epoll::delete(&self.0, kick);
        debug_assert!(removed.is_ok(), "a kick was removed that was never added: {removed:?}");
    }
}

/// The eventfds of several devices as one descriptor, readable while any of them is. A device reads its own.
#[derive(Debug)]
pub(crate) struct DeviceEvents(OwnedFd);

impl DeviceEvents {
    /// A set of these, which live as long as it does.
    ///
    /// # Errors
    /// The system has no descriptor left, or its limit on watches is reached.
    pub(crate) fn new(eventfds: &[BorrowedFd<'_>]) -> io::Result<DeviceEvents> {
        let set = epoll::create(CreateFlags::CLOEXEC)?;
        for eventfd in eventfds {
            epoll::add(&set, eventfd, EventData::new_u64(0), EventFlags::IN)?;
        }
        Ok(DeviceEvents(set))
    }
}

impl AsFd for DeviceEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for KickSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
