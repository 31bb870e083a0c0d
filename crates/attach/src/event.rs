//! Event descriptors of our own, that a back-end gets a copy of: kicks that we ring, calls and errors that it rings.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// An eventfd, non-blocking.
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> io::Result<Event> {
        Ok(Event(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Rings it, from a thread that may be held up by whoever shares it: not from a lane.
    pub(crate) fn ring(&self) {
        // The other side may have made it blocking and full. Then it is readable, which is all that is wanted.
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], Some(&now)) == Ok(1) {
            let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
        }
    }

    /// Makes it quiet; says whether it was rung.
    pub(crate) fn quiet(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let rung = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&now)) == Ok(1);
        rung && rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
