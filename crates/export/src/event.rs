//! Event descriptors that a front-end sends: the kick it rings for us, the call and error we ring for it.
//!
//! They come from outside, so they are looked at before use: anything but an eventfd is refused. Even an eventfd may be
//! made blocking and full by whoever holds the other end, so none is written to here: the lane rings them
//! ([`Signal`](blkyard_mq::SignalEventfd)).

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// An eventfd, non-blocking.
#[derive(Debug)]
pub(crate) struct Event(File);

/// Why a descriptor is not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EventError {
    #[error("the descriptor is {0}, not an eventfd")]
    NotAnEventfd(String),
    #[error("the eventfd is a semaphore, which stays readable after it was read: make it without EFD_SEMAPHORE")]
    Semaphore,
    #[error("the eventfd cannot be made non-blocking: {0}")]
    System(#[from] std::io::Error),
}

impl Event {
    /// Takes a descriptor from a message, if it is an eventfd.
    pub(crate) fn new(file: File) -> Result<Event, EventError> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        if !link.to_string_lossy().starts_with("anon_inode:[eventfd") {
            return Err(EventError::NotAnEventfd(link.display().to_string()));
        }
        let flags = fcntl_getfl(&file).map_err(std::io::Error::from)?;
        fcntl_setfl(&file, flags | OFlags::NONBLOCK).map_err(std::io::Error::from)?;
        Ok(Event(file))
    }

    /// The same for one that we listen to: reading it must make it quiet.
    pub(crate) fn for_kick(file: File) -> Result<Event, EventError> {
        let event = Event::new(file)?;
        // Older kernels do not say so; there the lane that listens to it looks less and less often.
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", event.0.as_raw_fd()))?;
        if info.lines().filter_map(|line| line.strip_prefix("eventfd-semaphore:")).any(|value| value.trim() != "0") {
            return Err(EventError::Semaphore);
        }
        Ok(event)
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

    #[test]
    fn a_semaphore_is_no_kick_where_the_kernel_tells() {
        use rustix::event::{EventfdFlags, eventfd};
        let make = |flags| File::from(eventfd(1, flags | EventfdFlags::CLOEXEC).unwrap());
        let semaphore = make(EventfdFlags::SEMAPHORE);
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", semaphore.as_raw_fd())).unwrap();
        let tells = info.contains("eventfd-semaphore");
        match Event::for_kick(semaphore) {
            Err(error @ EventError::Semaphore) => assert!(tells && error.to_string().contains("without EFD_SEMAPHORE")),
            other => assert!(!tells && other.is_ok(), "{other:?}"),
        }
        assert!(Event::for_kick(make(EventfdFlags::empty())).is_ok());
        assert!(Event::new(make(EventfdFlags::SEMAPHORE)).is_ok(), "nobody listens to it here");
    }

    #[test]
    fn a_pipe_is_not_an_event() {
        let (_reader, writer) = std::io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        assert!(matches!(Event::new(file), Err(EventError::NotAnEventfd(_))));
    }
}
