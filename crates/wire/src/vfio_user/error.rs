//! Faults of frames and messages.
//!
//! A [`FrameError`] loses the message boundaries and ends the connection. After a [`MessageError`] the boundaries are
//! intact: a server replies with an error, a client closes the connection.

use super::Command;

/// Reason why a byte stream is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Shorter than its own header, or longer than the receiver takes.
    #[error("message size {size} is not in 16..={max}")]
    Size {
        /// Bytes, the header included.
        size: u32,
        /// The receiver's limit.
        max: u32,
    },
    /// Neither command nor reply, reserved bits, or bits that exclude each other.
    #[error("message flags {0:#x} are undefined")]
    Flags(u32),
    /// More descriptors than the receiver takes with one message.
    #[error("a message brought more than {max} descriptors")]
    Descriptors {
        /// The receiver's limit.
        max: usize,
    },
    /// The stream ended inside a message.
    #[error("the stream ended after {bytes} bytes of a message")]
    Truncated {
        /// Bytes of the message that came.
        bytes: usize,
    },
}

/// Fault of a command's payload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The command is unknown, or belongs to the other direction.
    #[error("command {0} is unknown here")]
    UnknownCommand(u16),
    /// The length of the payload does not match its contents.
    #[error("{command}: payload of {bytes} bytes, {expected} expected")]
    Length {
        /// The command.
        command: Command,
        /// Bytes of the payload.
        bytes: usize,
        /// Bytes of the structure and of its announced data; a lower bound if more may follow.
        expected: u64,
    },
    /// `argsz` is less than the structure, or differs from the sent length.
    #[error("{command}: argsz {argsz} is invalid")]
    Argsz {
        /// The command.
        command: Command,
        /// Its value.
        argsz: u32,
    },
    /// Undefined flags, or flags that exclude each other.
    #[error("{command}: flags {flags:#x} are invalid")]
    Flags {
        /// The command.
        command: Command,
        /// Their value.
        flags: u32,
    },
    /// A range ends beyond 64 bits (32 for interrupts), or is empty where it must not be.
    #[error("{command}: range of {len} at {start:#x} is invalid")]
    Range {
        /// The command.
        command: Command,
        /// Its start.
        start: u64,
        /// Its length.
        len: u64,
    },
    /// More data than the receiver takes with one message.
    #[error("{command}: {count} bytes of data, {max} at most")]
    DataTooLong {
        /// The command.
        command: Command,
        /// Bytes that are asked for or announced.
        count: u64,
        /// The receiver's limit.
        max: u32,
    },
    /// A count that the command does not allow.
    #[error("{command}: count {count} is invalid")]
    Count {
        /// The command.
        command: Command,
        /// Its value.
        count: u64,
    },
    /// The message cannot have this number of descriptors.
    #[error("{command}: {came} descriptors, at most {max} expected")]
    Descriptors {
        /// The command.
        command: Command,
        /// Received descriptors.
        came: usize,
        /// Maximum number of descriptors.
        max: usize,
    },
    /// A descriptor is named but missing, or required but not named.
    #[error("{command}: descriptor {index} is missing")]
    NoDescriptor {
        /// The command.
        command: Command,
        /// Its index among those of the message.
        index: u32,
    },
    /// The data of VERSION does not end with NUL, or is too long.
    #[error("VERSION: data of {bytes} bytes is not terminated by NUL or too long")]
    VersionData {
        /// Bytes of the data.
        bytes: usize,
    },
    /// The data of VERSION is not valid JSON of the expected form.
    #[error("VERSION: invalid data: {0}")]
    Json(String),
    /// A capability of a region is outside the payload or before another, or occurs twice.
    #[error("DEVICE_GET_REGION_INFO: capability at offset {offset} is invalid")]
    Capability {
        /// Its offset.
        offset: u32,
    },
    /// A capability has an unknown version.
    #[error("DEVICE_GET_REGION_INFO: capability {id} has unknown version {version}")]
    CapabilityVersion {
        /// The capability.
        id: u16,
        /// Its version.
        version: u16,
    },
    /// An area to be mapped lies outside its region.
    #[error("DEVICE_GET_REGION_INFO: area of {len:#x} bytes at {start:#x} is outside its region of {region:#x} bytes")]
    OutsideRegion {
        /// Start of the area in the region.
        start: u64,
        /// Bytes of the area.
        len: u64,
        /// Bytes of the region.
        region: u64,
    },
    /// A file descriptor for I/O of unknown kind.
    #[error("DEVICE_GET_REGION_IO_FDS: type {0} is unknown")]
    IoFdType(u32),
}
