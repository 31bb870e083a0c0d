//! VERSION: the first message of each side, with its capabilities as JSON.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use super::payload::{PayloadReader, check_descriptors};
use super::{Command, MessageError};

/// Maximum bytes of a VERSION payload. Known peers send less than 200.
pub const VERSION_BYTES_MAX: usize = 4096;

/// The proposal of a client, or the answer of its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VfioVersion {
    /// Major number, the same on both sides.
    pub major: u16,
    /// Minor number; the server's is not above the client's.
    pub minor: u16,
    /// Capabilities of the sender.
    pub capabilities: VfioCapabilities,
}

/// Capabilities of a peer. Fields that are not sent have the default of the specification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VfioCapabilities {
    /// Descriptors that the sender receives with one message.
    pub max_msg_fds: u64,
    /// Bytes of data that the sender receives with one message.
    pub max_data_xfer_size: NonZeroU64,
    /// DMA mappings at one time.
    pub max_dma_maps: u64,
    /// Page sizes of DMA mappings, one bit each.
    pub pgsizes: NonZeroU64,
    /// Whether the server sends its commands on a separate socket.
    #[serde(skip_serializing_if = "TwinSocket::is_default")]
    pub twin_socket: TwinSocket,
    /// Whether REGION_WRITE_MULTI is supported.
    pub write_multiple: bool,
    /// Whether DEVICE_GET_REGION_IO_FDS is worth a message. Not of the specification, in which every server has it: one
    /// of those in use takes the payload of a command that it does not know for the next message.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub region_io_fds: bool,
}

/// Description of a second socket for the server's commands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TwinSocket {
    /// Whether the sender has such a socket.
    pub supported: bool,
    /// Index of the socket among the descriptors of the reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fd_index: Option<u32>,
}

impl TwinSocket {
    fn is_default(&self) -> bool {
        *self == TwinSocket::default()
    }
}

impl Default for VfioCapabilities {
    fn default() -> VfioCapabilities {
        const XFER: NonZeroU64 = NonZeroU64::new(1 << 20).unwrap();
        const PAGES: NonZeroU64 = NonZeroU64::new(4096).unwrap();
        VfioCapabilities {
            max_msg_fds: 1,
            max_data_xfer_size: XFER,
            max_dma_maps: 65535,
            pgsizes: PAGES,
            twin_socket: TwinSocket::default(),
            write_multiple: false,
            region_io_fds: false,
        }
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct VersionData {
    capabilities: VfioCapabilities,
}

impl VfioVersion {
    /// Reads a payload; `descriptors` of a reply may hold the second socket.
    pub(super) fn parse(payload: &[u8], descriptors: usize, is_reply: bool) -> Result<VfioVersion, MessageError> {
        check_descriptors(Command::Version, descriptors, usize::from(is_reply))?;
        let mut fields = PayloadReader::new(Command::Version, payload, 4)?;
        let (major, minor) = (fields.u16()?, fields.u16()?);
        let data = fields.rest();
        let capabilities = match data.split_last() {
            None => VfioCapabilities::default(),
            Some((0, json)) if payload.len() <= VERSION_BYTES_MAX => {
                let data: VersionData =
                    serde_json::from_slice(json).map_err(|error| MessageError::Json(error.to_string()))?;
                data.capabilities
            }
            Some(_) => return Err(MessageError::VersionData { bytes: data.len() }),
        };
        if let Some(index) = capabilities.twin_socket.fd_index
            && is_reply
            && index as usize >= descriptors
        {
            return Err(MessageError::NoDescriptor { command: Command::Version, index });
        }
        Ok(VfioVersion { major, minor, capabilities })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&self.major.to_ne_bytes());
        bytes.extend_from_slice(&self.minor.to_ne_bytes());
        let data = VersionData { capabilities: self.capabilities.clone() };
        bytes.extend(serde_json::to_vec(&data).expect("numbers and booleans are JSON"));
        bytes.push(0);
        bytes
    }
}
