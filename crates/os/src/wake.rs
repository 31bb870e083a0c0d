//! Wakes a lane from another thread, at low cost while it is awake.
//!
//! A [`WakeFlag`] says whether the lane sleeps, and an eventfd ends its sleep. Its poll is level-triggered, so a
//! signal that arrives before the sleep begins ends it all the same.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mem::WakeFlag;
use blkyard_mq::Wake;
use blkyard_sys::EventFd;

/// The flag and the eventfd.
#[derive(Debug)]
pub(crate) struct Waker {
    flag: WakeFlag,
    eventfd: EventFd,
}

impl Waker {
    pub(crate) fn new() -> std::io::Result<Arc<Waker>> {
        Ok(Arc::new(Waker { flag: WakeFlag::default(), eventfd: EventFd::new()? }))
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
        self.flag.wake(|| self.eventfd.signal());
    }
}
