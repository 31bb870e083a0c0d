//! Eventfds: our own, those of which another process has a copy, and those that another process sends.
//!
//! A copy shares its flags and its counter: the other process may make it blocking and full at any time. So
//! [`EventFd::take`] never waits, and [`EventFd::signal_shared`] polls it before it writes. A lane signals foreign
//! descriptors through its ring instead (`SignalEventfd` of `mq`).

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{ReadWriteFlags, preadv2, retry_on_intr};

use crate::fd_name::{fd_name, is_eventfd_name};
use crate::wait::is_ready;

/// An eventfd, non-blocking and closed on exec.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

/// Why a foreign descriptor is refused.
#[derive(Debug, thiserror::Error)]
pub enum EventFdError {
    /// It is of another type.
    #[error("the descriptor is {0}, not an eventfd")]
    NotAnEventfd(String),
    /// One read does not reset it.
    #[error("the eventfd is a semaphore, which stays readable after it was read: make it without EFD_SEMAPHORE")]
    Semaphore,
    /// A system call failed.
    #[error("a system call on the eventfd failed: {0}")]
    System(#[from] io::Error),
}

impl EventFd {
    /// Creates an eventfd with a counter of 0.
    ///
    /// # Errors
    /// The process or the system has no descriptors left.
    pub fn new() -> io::Result<EventFd> {
        Ok(EventFd(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Takes a descriptor of another process if it is an eventfd, and makes it non-blocking.
    ///
    /// # Errors
    /// The descriptor is no eventfd, or a system call failed.
    pub fn from_foreign(descriptor: impl Into<OwnedFd>) -> Result<EventFd, EventFdError> {
        let descriptor = descriptor.into();
        let name = fd_name(&descriptor)?;
        if !is_eventfd_name(&name) {
            return Err(EventFdError::NotAnEventfd(name));
        }
        let flags = fcntl_getfl(&descriptor).map_err(io::Error::from)?;
        fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK).map_err(io::Error::from)?;
        Ok(EventFd(descriptor))
    }

    /// The same for an eventfd that is listened to here: a semaphore is refused, since one read does not reset it.
    ///
    /// # Errors
    /// The descriptor is no eventfd or a semaphore, or a system call failed.
    pub fn from_foreign_to_read(descriptor: impl Into<OwnedFd>) -> Result<EventFd, EventFdError> {
        let event = EventFd::from_foreign(descriptor)?;
        // Older kernels do not report it. There the lane that listens moderates the eventfd.
        let info = std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", event.0.as_raw_fd()))?;
        if info.lines().filter_map(|line| line.strip_prefix("eventfd-semaphore:")).any(|value| value.trim() != "0") {
            return Err(EventFdError::Semaphore);
        }
        Ok(event)
    }

    /// Signals an eventfd of which no other process has a copy: one system call.
    #[inline]
    pub fn signal(&self) {
        // Fails only when the counter is full; then the eventfd is readable already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Signals an eventfd of which another process has a copy. A lane listens to it, and this thread may be delayed for
    /// a moment: not for use on a lane.
    pub fn signal_shared(&self) {
        // The other process may have made it blocking and full. Then it is readable, which suffices. If that happens
        // after the poll, the write waits until the lane has reset it.
        if is_ready(&self.0, PollFlags::OUT) {
            self.signal();
        }
    }

    /// Resets the counter without waiting; returns whether it was signalled.
    pub fn take(&self) -> bool {
        let mut count = [0; 8];
        // Another process may have made it blocking, and may read it first.
        preadv2(&self.0, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT).is_ok()
    }
}

impl AsFd for EventFd {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<EventFd> for OwnedFd {
    fn from(event: EventFd) -> OwnedFd {
        event.0
    }
}

/// An eventfd whose reader sleeps in the read: the cheapest wake-up of a thread, for measurements.
#[derive(Debug)]
pub struct BlockingEventFd(OwnedFd);

impl BlockingEventFd {
    /// Creates an eventfd with a counter of 0.
    ///
    /// # Errors
    /// The process or the system has no descriptors left.
    pub fn new() -> io::Result<BlockingEventFd> {
        Ok(BlockingEventFd(eventfd(0, EventfdFlags::CLOEXEC)?))
    }

    /// Signals it; returns whether that succeeded.
    #[inline]
    pub fn signal(&self) -> bool {
        rustix::io::write(&self.0, &1_u64.to_ne_bytes()).is_ok()
    }

    /// Sleeps until it is signalled, and resets it; returns whether that succeeded.
    #[inline]
    pub fn wait(&self) -> bool {
        retry_on_intr(|| rustix::io::read(&self.0, &mut [0; 8])).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_peer_that_makes_it_blocking_causes_no_wait() {
        let event = EventFd::new().unwrap();
        fcntl_setfl(&event, OFlags::empty()).unwrap();
        assert!(!event.take(), "it was not signalled");
        event.signal_shared();
        event.signal_shared();
        assert!(event.take() && !event.take());
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event.signal_shared();
        assert!(event.take() && !event.take());
    }

    #[test]
    fn a_full_counter_does_not_block_our_signal() {
        let event = EventFd::new().unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event.signal();
        assert!(event.take() && !event.take());
    }

    #[test]
    fn a_semaphore_is_refused_for_reading_where_the_kernel_reports_it() {
        let make = |flags| eventfd(1, flags | EventfdFlags::CLOEXEC).unwrap();
        let semaphore = make(EventfdFlags::SEMAPHORE);
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", semaphore.as_raw_fd())).unwrap();
        let tells = info.contains("eventfd-semaphore");
        match EventFd::from_foreign_to_read(semaphore) {
            Err(error @ EventFdError::Semaphore) => {
                assert!(tells && error.to_string().contains("without EFD_SEMAPHORE"));
            }
            other => assert!(!tells && other.is_ok(), "{other:?}"),
        }
        assert!(EventFd::from_foreign_to_read(make(EventfdFlags::empty())).is_ok());
        assert!(EventFd::from_foreign(make(EventfdFlags::SEMAPHORE)).is_ok(), "not listened to here");
    }

    #[test]
    fn a_foreign_eventfd_becomes_non_blocking() {
        let event = EventFd::from_foreign(eventfd(0, EventfdFlags::CLOEXEC).unwrap()).unwrap();
        assert!(fcntl_getfl(&event).unwrap().contains(OFlags::NONBLOCK));
    }

    #[test]
    fn a_pipe_is_refused() {
        let (_reader, writer) = std::io::pipe().unwrap();
        let file = File::from(OwnedFd::from(writer));
        assert!(matches!(EventFd::from_foreign(file), Err(EventFdError::NotAnEventfd(_))));
    }
}
