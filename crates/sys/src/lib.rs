//! The few system calls of the control plane, once: event descriptors, and descriptors over a socket.
//!
//! Used by what serves disks, what attaches them, the lanes and the daemon. It knows no protocol, starts no thread and
//! reads no clock.

#![forbid(unsafe_code)]

mod event_fd;
mod passed_fds;

pub use event_fd::{BlockingEventFd, EventFd, EventFdError};
pub use passed_fds::{PASSED_FDS_MAX, ReceivedFds, recv_fds, send_fds};
