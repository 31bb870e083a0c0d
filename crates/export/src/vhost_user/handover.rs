//! A session that changes hands, told in messages: those the front-end would send, were it to begin with rings that
//! stand where these do.
//!
//! Whoever takes it feeds them to its own message layer, so they are checked like any others, and there is one way to
//! set a session up.

use std::os::fd::OwnedFd;

use crate::vhost_user::wire::Message;

/// A session whose queues are at rest.
#[derive(Debug)]
pub struct SessionState {
    /// The connection.
    pub connection: OwnedFd,
    /// Queues that it was offered.
    pub queues: u16,
    /// What has come of a message that is not whole yet.
    pub part: Message,
    /// The messages that set the session up and run nothing.
    pub setup: Vec<Message>,
    /// Those that let its queues run.
    pub run: Vec<Message>,
}
