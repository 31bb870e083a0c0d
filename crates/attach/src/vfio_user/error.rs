//! Errors of vfio-user devices, worded as object, cause and cure.

use std::time::Duration;

use blkyard_wire::vfio_user::{Command, FrameError, MessageError};

/// Error of a connection to a server. The connection is unusable afterwards, except for [`VfioUserError::Refused`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VfioUserError {
    /// Connecting to the socket failed.
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
        /// Time limit of the reply.
        limit: Duration,
    },
    /// The device was closed by its user.
    #[error("the device was closed")]
    LetGo,
    /// The server sent an invalid byte stream.
    #[error("the server broke the protocol: {0}; check that the socket belongs to a vfio-user server")]
    Frame(#[from] FrameError),
    /// The server sent an invalid message.
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
    /// The reply does not match the command, or exceeds a limit of ours.
    #[error("the server's answer to {request} does not match the request; see its log")]
    Mismatch {
        /// The command.
        request: Command,
    },
    /// The server sent a command before the version was negotiated.
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
    /// The server refused a command.
    #[error("the server refused {request} with errno {errno}; see its log")]
    Refused {
        /// The command.
        request: Command,
        /// Its errno; 0 if unset.
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
        /// Cause of the failure.
        cause: String,
    },
    /// A system call failed.
    #[error("a system call failed: {0}; see the limits on memory and open files")]
    System(String),
}
