//! Devices that others serve: the front-end of vhost-user-blk.
//!
//! [`Attached`] is a disk behind a socket. Each virtqueue is the driver of a hardware queue of its own
//! ([`AttachedQueue`]); rings and headers are in memory of ours that the back-end maps, data stays where it is, in
//! regions that have a file.
//!
//! A control thread for each device does all that is said over its socket. No lane ever waits for it: a queue whose
//! ring or memory the back-end does not know yet takes nothing. A back-end that hangs, lies or dies is left, and looked
//! for again; what was in flight is kept and goes on, or is done again.
//!
//! A back-end may answer with descriptors, and some hang whoever closes them, or closes a socket in which they lie
//! unread: a file of a FUSE mount whose server is silent, a TCP socket that lingers. Then the control thread hangs, and
//! with it whoever drops the disk. Only connections of a [`Connector`] that sees to that are safe; by default there is
//! none, for those who trust their back-ends.
//!
//! Does no file I/O and knows no `io_uring`: kicks go through whatever the lane rings eventfds with.
#![forbid(unsafe_code)]

mod attached;
mod channel;
mod connector;
mod control;
mod error;
mod mailbox;
mod message;
mod queue;
mod rings;
mod session;

pub use attached::{AttachConfig, Attached, AttachedView, QUEUE_SIZE_MAX};
pub use connector::Connector;
pub use error::{AttachError, TalkError};
pub use mailbox::DriverQueueView;
pub use queue::AttachedQueue;
