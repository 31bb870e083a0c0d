//! The system calls of the control plane: event descriptors, names of descriptors, descriptors over a socket, waits
//! with deadlines, and random bytes.
//!
//! Used by the exports, by attached disks, by the lanes and by the daemon. It knows no protocol, starts no thread and
//! reads no clock: a wait is given the time, or a [`TimeSource`].

#![forbid(unsafe_code)]

mod epoll;
mod event_fd;
mod fd_name;
mod passed_fds;
mod random;
mod wait;

pub use epoll::{EVENTS_MAX, Epoll, ReadyFd, Registered};
pub use event_fd::{BlockingEventFd, EventFd, EventFdError};
pub use fd_name::{fd_name, is_eventfd_name};
pub use passed_fds::{PASSED_FDS_MAX, ReceivedFds, recv_fds, send_fds};
pub use random::random_bytes;
pub use rustix::event::epoll::EventFlags;
pub use rustix::event::{PollFd, PollFlags};
pub use wait::{TimeSource, is_ready, wait_for, wait_until};
