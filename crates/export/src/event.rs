//! Event descriptors that a front-end sends: the kick it rings for us, the call and error we ring for it.
//!
//! They come from outside, so they are looked at before use: anything but an eventfd is refused. Even an eventfd may be
//! made blocking and full by whoever holds the other end, so none is written to here: the lane rings them
//! ([`Chime`](blkyard_mq::Chime)).

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
    fn a_pipe_is_not_an_event() {
        let (_reader, writer) = std::io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        assert!(matches!(Event::new(file), Err(EventError::NotAnEventfd(_))));
    }
}
