//! Why a device cannot be reached over vfio-user: object, cause, cure.

use std::time::Duration;

use blkyard_wire::vfio_user::{Command, FrameError, MessageError};

/// Error between us and a server. The connection is unusable after it, except for [`VfioUserError::Refused`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VfioUserError {
    /// The socket cannot be connected to.
    #[error("socket {socket}: {cause}; start the server, or correct the path")]
    Socket {
        /// Path of the socket.
        socket: String,
        /// The system's error.
        cause: String,
    },
    /// The server has closed the connection.
    #[error("the server closed the connection; see its log")]
    Closed,
    /// The server did not reply in time.
    #[error("the server did not answer {request} within {limit:?}: it hangs, or serves another client; see its log")]
    Late {
        /// The command.
        request: Command,
        /// How long it had.
        limit: Duration,
    },
    /// The device was closed by its user.
    #[error("the device was closed")]
    LetGo,
    /// The server sent bytes that are no messages.
    #[error("the server broke the protocol: {0}; check that the socket belongs to a vfio-user server")]
    Frame(#[from] FrameError),
    /// The server sent a message that the protocol does not allow.
    #[error("the server sent an invalid message: {0}; check that the socket belongs to a vfio-user server")]
    Message(#[from] MessageError),
    /// A reply without a request.
    #[error("the server answered message {id}, which is not in flight; see its log")]
    UnknownReply {
        /// Id of the reply.
        id: u16,
    },
    /// The reply names another command than the message with its id.
    #[error("the server answered {asked} with command {came}; see its log")]
    OtherCommand {
        /// The request.
        asked: Command,
        /// Number of the command in the reply.
        came: u16,
    },
    /// The reply is about something else than the command, or exceeds a limit of ours.
    #[error("the server's answer to {request} does not match the request; see its log")]
    Mismatch {
        /// The command.
        request: Command,
    },
    /// The server sent a command before a version was agreed on.
    #[error("the server sent a command before its version; check that the socket belongs to a vfio-user server")]
    Early,
    /// The server speaks another version, or uses a capability that was not offered.
    #[error("the server speaks version {major}.{minor} or a mode that was not offered; version 0.1 is needed")]
    Version {
        /// Its major number.
        major: u16,
        /// Its minor number.
        minor: u16,
    },
    /// The server carried a command out with an error.
    #[error("the server refused {request} with errno {errno}; see its log")]
    Refused {
        /// The command.
        request: Command,
        /// Its error number; 0 if it named none.
        errno: u32,
    },
    /// A part of an NVMe controller is missing.
    #[error("the device has no {what}; check that the socket belongs to an NVMe controller")]
    Device {
        /// Missing part.
        what: &'static str,
    },
    /// A part of a region that the server offers cannot be mapped.
    #[error("region {index} of the server cannot be mapped: {cause}")]
    Map {
        /// Number of the region.
        index: u32,
        /// Why.
        cause: String,
    },
    /// A system call failed.
    #[error("a system call failed: {0}; see the limits on memory and open files")]
    System(String),
}
