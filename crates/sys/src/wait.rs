//! Waits over a handful of descriptors, with a timeout or an absolute deadline (`ppoll`).
//!
//! A thread whose descriptors change with its state lists them for each wait; one with hundreds registers them once
//! with an [`Epoll`](crate::Epoll). The time is the caller's: a loop reads the clock, handles due work, and waits until
//! the next deadline. An early return is normal, since a signal interrupts a wait. So a loop compares its deadlines
//! with the clock, and not with the result of the wait.

use std::fmt::Debug;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// The clock of a thread that waits. A program passes in the clock of its system; a test passes in one that it moves.
pub trait TimeSource: Debug + Send + Sync {
    /// The time of the monotonic clock.
    fn now(&self) -> Instant;

    /// Waits as [`wait_until`] does, for a deadline of this clock.
    ///
    /// # Errors
    /// Those of [`wait_until`].
    fn wait(&self, fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<usize>;
}

/// Waits until a descriptor is ready, the deadline has passed, or a signal arrives. Without a deadline the wait is
/// unlimited. Returns the number of ready descriptors; zero does not mean that the deadline has passed.
///
/// # Errors
/// The system has no memory, or there are more descriptors than the process may have open.
pub fn wait_until(fds: &mut [PollFd<'_>], now: Instant, deadline: Option<Instant>) -> io::Result<usize> {
    wait_for(fds, deadline.map(|deadline| deadline.saturating_duration_since(now)))
}

/// Waits until a descriptor is ready, the timeout has elapsed, or a signal arrives. Without a timeout the wait is
/// unlimited. Returns the number of ready descriptors.
///
/// # Errors
/// Those of [`wait_until`].
pub fn wait_for(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<usize> {
    match poll(fds, timespec(timeout).as_ref()) {
        Err(Errno::INTR) => Ok(0),
        ready => Ok(ready?),
    }
}

/// Whether a descriptor is ready for one of these events now, or its other end has closed.
pub fn is_ready(descriptor: impl AsFd, events: PollFlags) -> bool {
    // A wait of no length is not interrupted.
    wait_for(&mut [PollFd::new(&descriptor, events)], Some(Duration::ZERO)).is_ok_and(|ready| ready > 0)
}

/// The timeout as the system takes it. One of more seconds than the system can count is unlimited.
pub(crate) fn timespec(timeout: Option<Duration>) -> Option<Timespec> {
    timeout.and_then(|timeout| Timespec::try_from(timeout).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EventFd;

    /// Longer than a busy machine takes.
    const LONG: Duration = Duration::from_secs(30);

    fn readable(event: &EventFd) -> [PollFd<'_>; 1] {
        [PollFd::new(event, PollFlags::IN)]
    }

    #[test]
    fn a_wait_never_ends_before_its_deadline() {
        let event = EventFd::new().unwrap();
        // Shorter than a millisecond, and no whole number of microseconds.
        for wait in [1, 999, 1_500, 999_999, 1_000_001, 2_345_678].map(Duration::from_nanos) {
            let deadline = Instant::now() + wait;
            assert_eq!(wait_until(&mut readable(&event), Instant::now(), Some(deadline)).unwrap(), 0);
            assert!(Instant::now() >= deadline, "{wait:?}");
        }
    }

    #[test]
    fn a_deadline_that_has_passed_looks_once() {
        let event = EventFd::new().unwrap();
        let now = Instant::now();
        let passed = now.checked_sub(Duration::from_secs(5)).unwrap_or(now);
        for deadline in [now, passed] {
            assert_eq!(wait_until(&mut readable(&event), now, Some(deadline)).unwrap(), 0);
        }
        event.signal();
        assert_eq!(wait_until(&mut readable(&event), now, Some(passed)).unwrap(), 1);
        assert!(now.elapsed() < LONG);
    }

    #[test]
    fn what_is_ready_ends_a_wait_of_any_length() {
        let (quiet, event) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        event.signal();
        for timeout in [None, Some(LONG * 1000), Some(Duration::MAX)] {
            let mut fds = [PollFd::new(&quiet, PollFlags::IN), PollFd::new(&event, PollFlags::IN)];
            assert_eq!(wait_for(&mut fds, timeout).unwrap(), 1);
            assert!(fds[0].revents().is_empty() && fds[1].revents() == PollFlags::IN);
        }
        assert!(is_ready(&event, PollFlags::IN) && !is_ready(&quiet, PollFlags::IN));
    }
}
