//! Sleep of a shared queue's thread, over a ring that changes owners.
//!
//! A [`RingParker`] has a private eventfd, and a second descriptor of the ring itself, or of each of a few. A thread
//! that only sleeps polls the eventfd; one that watches the ring polls both. The ring's descriptor is readable while
//! completions wait in it, so a watch that begins after a completion ends at once, and no completion is missed. The
//! ring polls a driver's eventfd, which therefore ends a watch as well.
//!
//! For rings without a [single owner](crate::RingConfig::single_owner): there the kernel delivers completions by
//! itself.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use blkyard_mq::{Context, Parker, Wake};
use blkyard_sys::{EventFd, PollFd, PollFlags, wait_for};

use crate::{Ring, now_ns};

/// Parker of one thread beside a shared ring.
#[derive(Debug)]
pub struct RingParker {
    eventfd: EventFd,
    rings: Box<[OwnedFd]>,
}

/// Rings that one parker may be beside: one for each kind of queue that a disk has.
const RINGS_MAX: usize = 3;

impl RingParker {
    /// A parker beside this ring.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn new(ring: &Ring) -> io::Result<Arc<RingParker>> {
        RingParker::beside(&[ring])
    }

    /// A parker beside these rings.
    ///
    /// # Errors
    /// The system has no descriptors left.
    ///
    /// # Panics
    /// If there are more rings than kinds of queues.
    pub fn beside(rings: &[&Ring]) -> io::Result<Arc<RingParker>> {
        assert!(rings.len() <= RINGS_MAX, "a parker beside {} rings", rings.len());
        let eventfd = EventFd::new()?;
        let rings = rings.iter().map(|ring| ring.descriptor().try_clone_to_owned()).collect::<io::Result<_>>()?;
        Ok(Arc::new(RingParker { eventfd, rings }))
    }

    fn listen(&self, rings: &[OwnedFd], deadline_ns: u64) {
        let left = Duration::from_nanos(deadline_ns.saturating_sub(now_ns()));
        // Places that no ring has listen to the eventfd again, which is harmless.
        let mut fds: [PollFd<'_>; 1 + RINGS_MAX] = std::array::from_fn(|place| {
            let ring = place.checked_sub(1).and_then(|ring| rings.get(ring));
            PollFd::from_borrowed_fd(ring.map_or(self.eventfd.as_fd(), OwnedFd::as_fd), PollFlags::IN)
        });
        let _ = wait_for(&mut fds[..=rings.len()], Some(left));
        if !fds[0].revents().is_empty() {
            self.eventfd.take();
        }
    }
}

impl Wake for RingParker {
    fn wake(&self) {
        self.eventfd.signal();
    }
}

impl Parker for RingParker {
    fn sleep(&self) {
        // May end early, for instance by a signal: the caller checks again.
        let _ = wait_for(&mut [PollFd::new(&self.eventfd, PollFlags::IN)], None);
        self.eventfd.take();
    }

    fn watch(&self, deadline_ns: u64) {
        self.listen(&self.rings, deadline_ns);
    }

    fn watch_one(&self, beside: usize, deadline_ns: u64) {
        self.listen(&self.rings[beside..=beside], deadline_ns);
    }

    fn give_way(&self) {
        std::thread::yield_now();
    }
}

impl Context for Ring {
    fn commit(&mut self) {
        self.submit();
        // The threads that share the ring have no other notification of its failure.
        assert!(!self.has_failed(), "{:?}", self.take_failure());
    }

    fn collect(&mut self) {
        self.reap();
        // There is one eventfd, and its collector checks everything.
        while self.next_signalled().is_some() {}
    }

    fn has_more(&mut self) -> bool {
        self.has_unsubmitted_or_untaken()
    }

    fn listen(&mut self, eventfd: BorrowedFd<'_>) {
        // A shared ring has one queue, and so one eventfd.
        self.watch(eventfd, 0);
        self.submit();
    }
}
