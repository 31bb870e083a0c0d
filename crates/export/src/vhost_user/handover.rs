//! Handover of a session as messages: those of a front-end whose rings start at the current positions.
//!
//! The next process passes them to its own message layer, so they are checked like all others and there is only one way
//! to set up a session.

use std::os::fd::OwnedFd;

use crate::vhost_user::wire::Message;

/// A session with drained queues.
#[derive(Debug)]
pub struct SessionState {
    /// The connection.
    pub connection: OwnedFd,
    /// Number of queues offered to the front-end.
    pub queues: u16,
    /// Received part of a message.
    pub part: Message,
    /// Messages that set the session up and start no queue.
    pub setup: Vec<Message>,
    /// Messages that start its queues.
    pub run: Vec<Message>,
}
