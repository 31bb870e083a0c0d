//! Devices that others serve: the core that every protocol shares, and the front-end of vhost-user-blk on it.
//!
//! [`RemoteDisk`] is a disk that a back-end serves. Each of its queues is the driver of a hardware queue
//! ([`RemoteQueue`]). A control thread for each disk does all that is said to the back-end. No lane ever waits for it:
//! a queue whose ring or memory the back-end does not know yet takes nothing. A back-end that hangs, lies or dies is
//! left, and looked for again; what was in flight is kept and goes on, or is done again.
//!
//! A protocol is a module that implements the traits of `protocol.rs`; the core names none. There is one: [`Attached`]
//! is a disk over vhost-user. Its rings and headers are in memory of ours that the back-end maps; data stays where it
//! is, in regions that have a file.
//!
//! A back-end may answer with descriptors, and some hang whoever closes them, or closes a socket in which they lie
//! unread: a file of a FUSE mount whose server is silent, a TCP socket that lingers. Then the control thread hangs, and
//! with it whoever drops the disk. Only connections of a [`Connector`] that sees to that are safe; by default there is
//! none, for those who trust their back-ends.
//!
//! Does no file I/O and knows no `io_uring`: kicks go through whatever the lane signals eventfds with.
#![forbid(unsafe_code)]

mod connector;
mod control;
mod error;
mod left_peer;
mod mailbox;
mod outage;
mod protocol;
mod queue;
mod queues;
mod remote;
mod shared;
mod vhost_user;

pub use connector::Connector;
pub use error::{AttachError, TalkError};
pub use mailbox::DriverQueueView;
pub use queue::RemoteQueue;
pub use remote::RemoteDisk;
pub use shared::AttachedView;
pub use vhost_user::{AttachConfig, Attached, AttachedQueue, QUEUE_SIZE_MAX};
