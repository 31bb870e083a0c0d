//! Handover of a session as messages: those of a front-end whose rings begin at the current positions.
//!
//! The next process feeds them to its own message layer, so they are checked like any others, and there is one way to
//! set a session up.

use std::os::fd::OwnedFd;

use crate::vhost_user::wire::Message;

/// A session with drained queues.
#[derive(Debug)]
pub struct SessionState {
    /// The connection.
    pub connection: OwnedFd,
    /// Queues that it was offered.
    pub queues: u16,
    /// Received part of a message.
    pub part: Message,
    /// Messages that set the session up and start no queue.
    pub setup: Vec<Message>,
    /// Those that let its queues run.
    pub run: Vec<Message>,
}
