//! The few system calls of the control plane, once: event descriptors.
//!
//! Used by what serves disks, what attaches them, the lanes and the daemon. It knows no protocol, starts no thread and
//! reads no clock.

#![forbid(unsafe_code)]

mod event_fd;

pub use event_fd::{BlockingEventFd, EventFd, EventFdError};
