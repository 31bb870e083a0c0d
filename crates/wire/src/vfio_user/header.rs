//! The 16 bytes before each message: id, command, size, flags, error.

use std::fmt;

use super::FrameError;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 16;

const TYPE_MASK: u32 = 0xf;
const TYPE_COMMAND: u32 = 0;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// Commands, by the specification's names and numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
#[expect(missing_docs, reason = "the names are those of the protocol")]
pub enum Command {
    Version = 1,
    DmaMap = 2,
    DmaUnmap = 3,
    DeviceGetInfo = 4,
    DeviceGetRegionInfo = 5,
    DeviceGetRegionIoFds = 6,
    DeviceGetIrqInfo = 7,
    DeviceSetIrqs = 8,
    RegionRead = 9,
    RegionWrite = 10,
    DmaRead = 11,
    DmaWrite = 12,
    DeviceReset = 13,
    RegionWriteMulti = 15,
}

impl Command {
    /// All of them, each with its name.
    pub const ALL: [(Command, &'static str); 14] = [
        (Command::Version, "VERSION"),
        (Command::DmaMap, "DMA_MAP"),
        (Command::DmaUnmap, "DMA_UNMAP"),
        (Command::DeviceGetInfo, "DEVICE_GET_INFO"),
        (Command::DeviceGetRegionInfo, "DEVICE_GET_REGION_INFO"),
        (Command::DeviceGetRegionIoFds, "DEVICE_GET_REGION_IO_FDS"),
        (Command::DeviceGetIrqInfo, "DEVICE_GET_IRQ_INFO"),
        (Command::DeviceSetIrqs, "DEVICE_SET_IRQS"),
        (Command::RegionRead, "REGION_READ"),
        (Command::RegionWrite, "REGION_WRITE"),
        (Command::DmaRead, "DMA_READ"),
        (Command::DmaWrite, "DMA_WRITE"),
        (Command::DeviceReset, "DEVICE_RESET"),
        (Command::RegionWriteMulti, "REGION_WRITE_MULTI"),
    ];

    /// The command with this number.
    pub fn from_number(number: u16) -> Option<Command> {
        Command::ALL.iter().map(|(command, _)| *command).find(|command| *command as u16 == number)
    }

    /// Whether the server sends this command. The client sends all others.
    pub fn is_from_server(self) -> bool {
        matches!(self, Command::DmaRead | Command::DmaWrite)
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Command::ALL.iter().find(|(command, _)| command == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// A command.
    Command {
        /// The sender requests no reply.
        no_reply: bool,
    },
    /// The reply to a successful command.
    Reply,
    /// The reply to a command that failed, with an errno or 0. The specification allows no payload. libvfio-user
    /// repeats the fields of a region access there; they mean nothing.
    Error(u32),
}

/// A header, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageHeader {
    /// Chosen by the sender of the command, and repeated in the reply.
    pub id: u16,
    /// Number of the command; an unknown number does not invalidate the stream.
    pub command: u16,
    /// Bytes after the header.
    pub payload_bytes: u32,
    /// Command or reply.
    pub kind: MessageKind,
}

impl MessageHeader {
    /// Reads a header of a message that has at most `max` bytes, header included.
    ///
    /// # Errors
    /// [`FrameError::Size`] and [`FrameError::Flags`].
    pub fn parse(bytes: [u8; HEADER_BYTES], max: u32) -> Result<MessageHeader, FrameError> {
        let [i0, i1, c0, c1, s0, s1, s2, s3, f0, f1, f2, f3, e0, e1, e2, e3] = bytes;
        let size = u32::from_ne_bytes([s0, s1, s2, s3]);
        let flags = u32::from_ne_bytes([f0, f1, f2, f3]);
        let payload_bytes = size.checked_sub(HEADER_BYTES as u32).filter(|_| size <= max);
        let payload_bytes = payload_bytes.ok_or(FrameError::Size { size, max })?;
        let kind = match (flags & TYPE_MASK, flags & !TYPE_MASK) {
            (TYPE_COMMAND, 0) => MessageKind::Command { no_reply: false },
            (TYPE_COMMAND, NO_REPLY) => MessageKind::Command { no_reply: true },
            (TYPE_REPLY, 0) => MessageKind::Reply,
            (TYPE_REPLY, ERROR) => MessageKind::Error(u32::from_ne_bytes([e0, e1, e2, e3])),
            _ => return Err(FrameError::Flags(flags)),
        };
        Ok(MessageHeader {
            id: u16::from_ne_bytes([i0, i1]),
            command: u16::from_ne_bytes([c0, c1]),
            payload_bytes,
            kind,
        })
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let (flags, error) = match self.kind {
            MessageKind::Command { no_reply: false } => (TYPE_COMMAND, 0),
            MessageKind::Command { no_reply: true } => (TYPE_COMMAND | NO_REPLY, 0),
            MessageKind::Reply => (TYPE_REPLY, 0),
            MessageKind::Error(errno) => (TYPE_REPLY | ERROR, errno),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..2].copy_from_slice(&self.id.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.command.to_ne_bytes());
        bytes[4..8].copy_from_slice(&(HEADER_BYTES as u32 + self.payload_bytes).to_ne_bytes());
        bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
        bytes[12..16].copy_from_slice(&error.to_ne_bytes());
        bytes
    }

    /// The bytes of the reply to a command that failed.
    pub fn encode_error(id: u16, command: u16, errno: u32) -> [u8; HEADER_BYTES] {
        MessageHeader { id, command, payload_bytes: 0, kind: MessageKind::Error(errno) }.encode()
    }

    /// A whole message: this header, with the payload's length, and the payload.
    ///
    /// # Panics
    /// If the payload is longer than the size field can say: its data is bounded by its sender.
    pub(super) fn message(id: u16, command: Command, kind: MessageKind, payload: &[u8]) -> Vec<u8> {
        let size = u32::try_from(payload.len()).ok().filter(|len| len.checked_add(HEADER_BYTES as u32).is_some());
        let payload_bytes = size.expect("a payload of less than 4 GiB");
        let header = MessageHeader { id, command: command as u16, payload_bytes, kind };
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        bytes.extend_from_slice(&header.encode());
        bytes.extend_from_slice(payload);
        bytes
    }
}
