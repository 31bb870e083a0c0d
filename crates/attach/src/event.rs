//! Event descriptors of our own, that a back-end gets a copy of: kicks that we ring, calls and errors that it rings.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{ReadWriteFlags, preadv2};

/// An eventfd, non-blocking.
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> io::Result<Event> {
        Ok(Event(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Rings it, from a thread that may be held up for a moment: not from a lane. If somebody else has it, too, it must
    /// be one that a lane listens to.
    pub(crate) fn ring(&self) {
        // The other side may have made it blocking and full. Then it is readable, which is all that is wanted. If it
        // does so just now, we wait until the lane has made it quiet.
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], Some(&now)) == Ok(1) {
            let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
        }
    }

    /// Makes it quiet; says whether it was rung.
    pub(crate) fn quiet(&self) -> bool {
        let mut count = [0; 8];
        // Whoever shares it may have made it blocking, and may read it first.
        preadv2(&self.0, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT).is_ok()
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{OFlags, fcntl_setfl};

    #[test]
    fn who_makes_an_eventfd_blocking_and_full_or_empty_holds_up_nobody() {
        let event = Event::new().unwrap();
        fcntl_setfl(&event, OFlags::empty()).unwrap();
        assert!(!event.quiet(), "nobody rang");
        event.ring();
        event.ring();
        assert!(event.quiet() && !event.quiet());
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event.ring();
        assert!(event.quiet() && !event.quiet());
    }
}
