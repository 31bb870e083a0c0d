//! Fabrics commands: Connect with its data, Authentication Send and Receive, Property Get and Set, Disconnect.
//!
//! Formats of both sides, without state. A target parses a command with [`FabricsCommand::parse`], a host makes one
//! with [`FabricsCommand::sqe`]. Which properties and controllers exist is the caller's business.

use std::fmt;

use crate::auth::{AUTH_PROTOCOL, AUTH_PROTOCOL_SPECIFIC};
use crate::{NvmeStatus, Psdt, Sqe};

/// Opcode of all fabrics commands, on admin and I/O queues.
pub const FABRICS_OPCODE: u8 = 0x7f;
/// Bytes of the data of a Connect command.
pub const CONNECT_BYTES: usize = 1024;
/// Maximum bytes of an NQN.
pub const NQN_BYTES_MAX: usize = 223;
/// Bytes of a field with an NQN, which a zero byte ends.
const NQN_FIELD: usize = 256;
/// The controller identifier of a Connect that asks for any controller.
pub const ANY_CONTROLLER: u16 = 0xffff;
/// NQN of the discovery service.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Fabrics command types (FCTYPE).
mod fctype {
    pub const PROPERTY_SET: u8 = 0x00;
    pub const CONNECT: u8 = 0x01;
    pub const PROPERTY_GET: u8 = 0x04;
    pub const AUTH_SEND: u8 = 0x05;
    pub const AUTH_RECEIVE: u8 = 0x06;
    pub const DISCONNECT: u8 = 0x08;
}

/// Statuses of fabrics commands. Their numbers mean something else for I/O commands.
pub mod fabrics_status {
    use crate::NvmeStatus;

    /// Connect: unknown record format.
    pub const INCOMPATIBLE_FORMAT: NvmeStatus = NvmeStatus(0x180);
    /// Connect: the controller is in use.
    pub const CONTROLLER_BUSY: NvmeStatus = NvmeStatus(0x181);
    /// Connect: a field is invalid; see [`super::InvalidParameter`].
    pub const INVALID_PARAMETERS: NvmeStatus = NvmeStatus(0x182);
    /// Connect: the host is to read the discovery log again.
    pub const RESTART_DISCOVERY: NvmeStatus = NvmeStatus(0x183);
    /// Connect: the host is not allowed.
    pub const INVALID_HOST: NvmeStatus = NvmeStatus(0x184);
    /// The host is to be authenticated first.
    pub const AUTHENTICATION_REQUIRED: NvmeStatus = NvmeStatus(0x191);
    /// The command is for another type of queue.
    pub const INVALID_QUEUE_TYPE: NvmeStatus = NvmeStatus(0x185);

    /// The status of a fabrics or admin command as text, without the names that the numbers have for I/O commands.
    pub fn text(status: NvmeStatus) -> String {
        let status = status.without_flags();
        let name = match status {
            INCOMPATIBLE_FORMAT => "unknown record format",
            CONTROLLER_BUSY => "the controller is in use, or no further one is left",
            INVALID_PARAMETERS => "invalid parameters, such as the name of the subsystem",
            RESTART_DISCOVERY => "the discovery log is to be read again",
            INVALID_HOST => "this host is not allowed",
            INVALID_QUEUE_TYPE => "wrong type of queue",
            AUTHENTICATION_REQUIRED => "authentication is required",
            _ => return status.to_string(),
        };
        format!("{name} ({:03x}h)", status.0)
    }
}

/// Bits of the result of a Connect beside the controller identifier: the host is to be authenticated, and on a secure
/// channel (AUTHREQ: ATR, ASCR).
pub const CONNECT_AUTHENTICATION: u64 = 1 << 17;
/// See [`CONNECT_AUTHENTICATION`].
pub const CONNECT_SECURE_CHANNEL: u64 = 1 << 18;

/// Width of a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PropertySize {
    /// Four bytes.
    Four,
    /// Eight bytes.
    Eight,
}

/// A Connect command without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectCommand {
    /// Queue identifier; zero for the admin queue.
    pub qid: u16,
    /// Entries of the submission queue, less one (SQSIZE).
    pub sq_size: u16,
    /// Whether the host needs no flow control of the submission queue.
    pub no_flow_control: bool,
    /// Keep-alive timeout, ms; zero for none. For the admin queue.
    pub keep_alive_ms: u32,
}

/// A fabrics command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricsCommand {
    /// Writes a property. The value of a property of four bytes is in the low half.
    PropertySet {
        /// Width.
        size: PropertySize,
        /// Offset of the register.
        offset: u32,
        /// Value.
        value: u64,
    },
    /// Reads a property; the result of the command is its value.
    PropertyGet {
        /// Width.
        size: PropertySize,
        /// Offset of the register.
        offset: u32,
    },
    /// Makes a queue; with [`ConnectData`].
    Connect(ConnectCommand),
    /// Sends a message of an authentication, of so many bytes.
    AuthSend(u32),
    /// Receives a message of an authentication, into so many bytes.
    AuthReceive(u32),
    /// Ends an I/O queue.
    Disconnect,
}

/// The protocol of Authentication Send and Receive: SPSP0, SPSP1 and SECP behind a reserved byte.
const AUTH_WORD: u32 = u32::from_le_bytes([0, AUTH_PROTOCOL_SPECIFIC[0], AUTH_PROTOCOL_SPECIFIC[1], AUTH_PROTOCOL]);

impl FabricsCommand {
    /// Parses a command of opcode 7Fh; the status of one that is refused.
    pub fn parse(sqe: &Sqe) -> Result<FabricsCommand, NvmeStatus> {
        let size = || match sqe.0[5] & 7 {
            0 => Ok(PropertySize::Four),
            1 => Ok(PropertySize::Eight),
            _ => Err(NvmeStatus::INVALID_FIELD),
        };
        let offset = (sqe.0[5] >> 32) as u32;
        let has_format = sqe.0[5] as u16 == 0;
        match sqe.nsid() as u8 {
            fctype::PROPERTY_SET => {
                let size = size()?;
                let value = if size == PropertySize::Four { sqe.0[6] & 0xffff_ffff } else { sqe.0[6] };
                Ok(FabricsCommand::PropertySet { size, offset, value })
            }
            fctype::PROPERTY_GET => Ok(FabricsCommand::PropertyGet { size: size()?, offset }),
            fctype::CONNECT | fctype::DISCONNECT if !has_format => Err(fabrics_status::INCOMPATIBLE_FORMAT),
            fctype::CONNECT => Ok(FabricsCommand::Connect(ConnectCommand {
                qid: (sqe.0[5] >> 16) as u16,
                sq_size: (sqe.0[5] >> 32) as u16,
                no_flow_control: sqe.0[5] >> 48 & 4 != 0,
                keep_alive_ms: sqe.0[6] as u32,
            })),
            fctype::AUTH_SEND | fctype::AUTH_RECEIVE if sqe.0[5] as u32 != AUTH_WORD => Err(NvmeStatus::INVALID_FIELD),
            fctype::AUTH_SEND => Ok(FabricsCommand::AuthSend(offset)),
            fctype::AUTH_RECEIVE => Ok(FabricsCommand::AuthReceive(offset)),
            fctype::DISCONNECT => Ok(FabricsCommand::Disconnect),
            _ => Err(NvmeStatus::INVALID_OPCODE),
        }
    }

    /// The command, without data.
    pub fn sqe(&self) -> Sqe {
        let command = |kind: u8, word5: u64, word6: u64| {
            let mut sqe = Sqe::new(FABRICS_OPCODE, kind.into()).with_data(Psdt::Sgl, [0, 0]);
            (sqe.0[5], sqe.0[6]) = (word5, word6);
            sqe
        };
        let property =
            |size: PropertySize, offset: u32| u64::from(size == PropertySize::Eight) | u64::from(offset) << 32;
        match *self {
            FabricsCommand::PropertySet { size, offset, value } => {
                command(fctype::PROPERTY_SET, property(size, offset), value)
            }
            FabricsCommand::PropertyGet { size, offset } => command(fctype::PROPERTY_GET, property(size, offset), 0),
            FabricsCommand::Connect(ConnectCommand { qid, sq_size, no_flow_control, keep_alive_ms }) => {
                let attributes = if no_flow_control { 4 } else { 0 };
                let word = u64::from(qid) << 16 | u64::from(sq_size) << 32 | attributes << 48;
                command(fctype::CONNECT, word, keep_alive_ms.into())
            }
            FabricsCommand::AuthSend(bytes) => {
                command(fctype::AUTH_SEND, u64::from(AUTH_WORD) | u64::from(bytes) << 32, 0)
            }
            FabricsCommand::AuthReceive(bytes) => {
                command(fctype::AUTH_RECEIVE, u64::from(AUTH_WORD) | u64::from(bytes) << 32, 0)
            }
            FabricsCommand::Disconnect => command(fctype::DISCONNECT, 0, 0),
        }
    }
}

/// Location of the invalid field of a Connect, for the result of [`fabrics_status::INVALID_PARAMETERS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidParameter {
    /// Its offset, in the command or its data.
    pub offset: u16,
    /// Whether it is in the data.
    pub in_data: bool,
}

impl InvalidParameter {
    /// The result of the command.
    pub fn result(self) -> u64 {
        u64::from(self.offset) | u64::from(self.in_data) << 16
    }

    /// From the result of the command.
    pub fn from_result(result: u64) -> InvalidParameter {
        InvalidParameter { offset: result as u16, in_data: result >> 16 & 1 != 0 }
    }
}

/// An NVMe Qualified Name: at most 223 bytes of UTF-8 that begin with `nqn.`, without control characters: names of
/// strangers are in the log and on terminals.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Nqn(String);

impl Nqn {
    /// Checks a name.
    pub fn new(name: &str) -> Option<Nqn> {
        let is_valid = name.starts_with("nqn.") && name.len() <= NQN_BYTES_MAX && !name.contains(char::is_control);
        is_valid.then(|| Nqn(name.to_owned()))
    }

    /// Parses a field that a zero byte ends. A field without one is invalid.
    pub fn parse(field: &[u8]) -> Option<Nqn> {
        let len = field.iter().position(|byte| *byte == 0)?;
        Nqn::new(std::str::from_utf8(&field[..len]).ok()?)
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Writes the name into a field that is longer than any name.
    pub(crate) fn write(&self, field: &mut [u8]) {
        field.fill(0);
        field[..self.0.len()].copy_from_slice(self.0.as_bytes());
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Data of a Connect command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectData {
    /// Identifier of the host (HOSTID).
    pub host_id: [u8; 16],
    /// Controller identifier: [`ANY_CONTROLLER`] on an admin queue, that of the association on an I/O queue.
    pub controller_id: u16,
    /// The subsystem.
    pub subsystem: Nqn,
    /// The host.
    pub host: Nqn,
}

const HOST_ID_AT: usize = 0;
const CONTROLLER_ID_AT: usize = 16;
const SUBSYSTEM_AT: usize = 256;
const HOST_AT: usize = 512;

impl ConnectData {
    /// Parses the data; the location of a name that is none.
    pub fn parse(bytes: &[u8; CONNECT_BYTES]) -> Result<ConnectData, InvalidParameter> {
        let nqn = |at: usize| {
            Nqn::parse(&bytes[at..at + NQN_FIELD]).ok_or(InvalidParameter { offset: at as u16, in_data: true })
        };
        Ok(ConnectData {
            host_id: std::array::from_fn(|number| bytes[HOST_ID_AT + number]),
            controller_id: u16::from_le_bytes([bytes[CONTROLLER_ID_AT], bytes[CONTROLLER_ID_AT + 1]]),
            subsystem: nqn(SUBSYSTEM_AT)?,
            host: nqn(HOST_AT)?,
        })
    }

    /// Encodes the data.
    pub fn write(&self, bytes: &mut [u8; CONNECT_BYTES]) {
        bytes.fill(0);
        bytes[HOST_ID_AT..][..16].copy_from_slice(&self.host_id);
        bytes[CONTROLLER_ID_AT..][..2].copy_from_slice(&self.controller_id.to_le_bytes());
        self.subsystem.write(&mut bytes[SUBSYSTEM_AT..][..NQN_FIELD]);
        self.host.write(&mut bytes[HOST_AT..][..NQN_FIELD]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nonzero bytes of a command from byte 40 on.
    fn expect(command: FabricsCommand, kind: u8, parts: &[(usize, &[u8])]) {
        let sqe = command.sqe();
        let bytes: Vec<u8> = sqe.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut want = [0; 64];
        (want[0], want[1], want[4]) = (0x7f, 0x40, kind);
        for (at, part) in parts {
            want[*at..at + part.len()].copy_from_slice(part);
        }
        assert_eq!(bytes, want, "{command:?}");
        assert_eq!(FabricsCommand::parse(&sqe), Ok(command));
    }

    #[test]
    fn each_fabrics_command_is_as_the_specification_has_it() {
        let (four, eight) = (PropertySize::Four, PropertySize::Eight);
        let set = FabricsCommand::PropertySet { size: four, offset: 0x14, value: 0x0046_0001 };
        expect(set, 0, &[(44, &[0x14]), (48, &[1, 0, 0x46])]);
        expect(FabricsCommand::PropertyGet { size: eight, offset: 0 }, 4, &[(40, &[1])]);
        let connect = ConnectCommand { qid: 0x0102, sq_size: 127, no_flow_control: true, keep_alive_ms: 5000 };
        let parts: &[(usize, &[u8])] = &[(42, &[2, 1]), (44, &[127, 0]), (46, &[4]), (48, &[0x88, 0x13])];
        expect(FabricsCommand::Connect(connect), 1, parts);
        expect(FabricsCommand::AuthSend(0x0201), 5, &[(41, &[1, 1, 0xe9, 1, 2])]);
        expect(FabricsCommand::AuthReceive(0x0201), 6, &[(41, &[1, 1, 0xe9, 1, 2])]);
        expect(FabricsCommand::Disconnect, 8, &[]);
    }

    #[test]
    fn each_malformed_fabrics_command_has_its_status() {
        let sqe = |kind: u32, word: u64| {
            let mut sqe = Sqe::new(FABRICS_OPCODE, kind);
            sqe.0[5] = word;
            FabricsCommand::parse(&sqe)
        };
        assert_eq!(sqe(0, 2), Err(NvmeStatus::INVALID_FIELD));
        assert_eq!(sqe(4, 7), Err(NvmeStatus::INVALID_FIELD));
        assert_eq!(sqe(1, 1), Err(fabrics_status::INCOMPATIBLE_FORMAT));
        assert_eq!(sqe(8, 0x100), Err(fabrics_status::INCOMPATIBLE_FORMAT));
        for (kind, word) in [(5, 0), (5, 0xe901_0101), (6, 0xe902_0100), (6, 0xe801_0100)] {
            assert_eq!(sqe(kind, word), Err(NvmeStatus::INVALID_FIELD), "{kind:x} {word:x}");
        }
        for kind in [2, 3, 7, 0x10, 0xff] {
            assert_eq!(sqe(kind, 0), Err(NvmeStatus::INVALID_OPCODE), "{kind:x}");
        }
    }

    #[test]
    fn connect_data_is_as_the_specification_has_it() {
        let host = Nqn::new("nqn.2014-08.org.nvmexpress:uuid:0").unwrap();
        let subsystem = Nqn::new(&format!("nqn.{}", "x".repeat(NQN_BYTES_MAX - 4))).unwrap();
        let data = ConnectData { host_id: [7; 16], controller_id: 0x0102, subsystem, host };
        let mut bytes = [0xff; CONNECT_BYTES];
        data.write(&mut bytes);
        assert_eq!((bytes[..16] == [7; 16], &bytes[16..20]), (true, &[2, 1, 0, 0][..]));
        assert_eq!((&bytes[256..261], bytes[256 + 223]), (&b"nqn.x"[..], 0));
        assert_eq!(&bytes[512..519], b"nqn.201");
        assert_eq!(ConnectData::parse(&bytes), Ok(data));
    }

    #[test]
    fn names_without_an_end_or_with_control_characters_are_refused() {
        let mut good = [0; CONNECT_BYTES];
        let nqn = Nqn::new(DISCOVERY_NQN).unwrap();
        let data = ConnectData { host_id: [0; 16], controller_id: 0, subsystem: nqn.clone(), host: nqn };
        data.write(&mut good);
        for at in [SUBSYSTEM_AT, HOST_AT] {
            // CVE-2023-6121: a name without a zero byte; also too long, empty, no NQN, no UTF-8, and names that would
            // make a line of their own in a log, or direct a terminal.
            let controls: [&[u8]; 3] = [b"nqn.x\n2026 ERROR lost\0", b"nqn.x\x1b[2J\0", "nqn.x\u{9b}2J\0".as_bytes()];
            let long = [&b"nqn."[..], &[b'a'; 220]].concat();
            for name in [&[b'n'; 256][..], &long, b"\0", b"iqn.x\0", b"nqn.\xff\0"].into_iter().chain(controls) {
                let mut bytes = good;
                bytes[at..at + name.len()].copy_from_slice(name);
                let wrong = InvalidParameter { offset: at as u16, in_data: true };
                assert_eq!(ConnectData::parse(&bytes), Err(wrong), "{name:?}");
                assert_eq!(InvalidParameter::from_result(wrong.result()), wrong);
            }
        }
        assert_eq!(InvalidParameter { offset: 42, in_data: false }.result(), 42);
        assert_eq!(InvalidParameter { offset: 256, in_data: true }.result(), 0x1_0100);
    }
}
