//! Waking a lane from another thread, cheaply while it is awake.
//!
//! A [`WakeFlag`] says whether the lane sleeps, and an event descriptor ends its sleep. The poll of it is
//! level-triggered, so a signal that comes before the sleep begins ends it all the same.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkyard_mem::WakeFlag;
use blkyard_mq::Wake;
use rustix::event::EventfdFlags;

/// The flag and the eventfd.
#[derive(Debug)]
pub(crate) struct Waker {
    flag: WakeFlag,
    eventfd: OwnedFd,
}

impl Waker {
    pub(crate) fn new() -> std::io::Result<Arc<Waker>> {
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Waker { flag: WakeFlag::default(), eventfd }))
    }

    pub(crate) fn eventfd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// The flag, for the lane: whether it may sleep, and that it is awake.
    #[inline]
    pub(crate) fn flag(&self) -> &WakeFlag {
        &self.flag
    }
}

impl Wake for Waker {
    #[inline]
    fn wake(&self) {
        self.flag.wake(|| {
            // Fails only when 2^64 calls were not heard; then the eventfd is ringing anyway.
            let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
        });
    }
}
