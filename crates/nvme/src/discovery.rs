//! The discovery log page (70h): where subsystems are, and other discovery services.
//!
//! A discovery controller encodes a [`DiscoveryLog`] when it changes and copies parts of it; a host parses header and
//! entries, each from its own read. Fields of a target are checked before a host uses them.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::fabrics::{ANY_CONTROLLER, Nqn};

/// Identifier of the log page.
pub const DISCOVERY_LOG: u8 = 0x70;
/// Bytes of the header, and of each entry.
pub const DISCOVERY_ENTRY_BYTES: usize = 1024;
/// Maximum entries that a host reads: far above any real service, and 1 MiB.
pub const DISCOVERY_ENTRIES_MAX: u64 = 1024;
/// Port of the discovery service.
pub const DISCOVERY_PORT: u16 = 8009;

/// Transport type (TRTYPE) of TCP.
const TCP: u8 = 3;

/// What an entry names (SUBTYPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscoveryKind {
    /// Another discovery service.
    Referral,
    /// A subsystem with namespaces.
    Subsystem,
    /// The discovery service that has the log.
    Current,
}

/// Demand for a secure channel (TREQ bits 1:0).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SecureChannel {
    /// It says nothing.
    #[default]
    NotSpecified,
    /// Required.
    Required,
    /// Not required.
    NotRequired,
}

/// What a discovery service has said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveredLog {
    /// The log's generation (GENCTR).
    pub generation: u64,
    /// Entries of TCP.
    pub entries: Vec<DiscoveryEntry>,
    /// Number of entries that this host cannot use.
    pub others: usize,
}

/// An entry: a subsystem at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// What it names.
    pub kind: DiscoveryKind,
    /// NQN of the subsystem.
    pub subsystem: Nqn,
    /// Address.
    pub address: IpAddr,
    /// TCP port.
    pub port: u16,
    /// Identifier of the port in the subsystem (PORTID).
    pub port_id: u16,
    /// Controller identifier (CNTLID); [`ANY_CONTROLLER`] if the target chooses.
    pub controller_id: u16,
    /// Maximum entries of the admin submission queue (ASQSZ), at least 32.
    pub admin_entries: u16,
    /// Whether flow control of submission queues may be left out (TREQ bit 2).
    pub no_flow_control: bool,
    /// What the target demands of a secure channel.
    pub secure_channel: SecureChannel,
    /// Whether connections can use TLS 1.3 (SECTYPE).
    pub has_tls: bool,
}

/// Reason for which a host cannot use an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// Another transport than TCP.
    #[error("discovery entry: transport {0} is not TCP")]
    Transport(u8),
    /// Another security than none or TLS 1.3.
    #[error("discovery entry: security type {0} is not supported")]
    Security(u8),
    /// A field without a valid value.
    #[error("discovery entry: invalid {0}")]
    Field(&'static str),
}

impl DiscoveryEntry {
    /// Parses an entry.
    pub fn parse(bytes: &[u8; DISCOVERY_ENTRY_BYTES]) -> Result<DiscoveryEntry, DiscoveryError> {
        use DiscoveryError::{Field, Security, Transport};
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if bytes[0] != TCP {
            return Err(Transport(bytes[0]));
        }
        let address: IpAddr = text(&bytes[512..768]).and_then(|text| text.parse().ok()).ok_or(Field("address"))?;
        if bytes[1] != family(address) {
            return Err(Field("address family"));
        }
        let port = text(&bytes[32..64]).and_then(|text| text.parse().ok()).filter(|port| *port > 0);
        let kind = match bytes[2] {
            1 => DiscoveryKind::Referral,
            2 => DiscoveryKind::Subsystem,
            3 => DiscoveryKind::Current,
            _ => return Err(Field("subsystem type")),
        };
        let secure_channel = match bytes[3] & 3 {
            0 => SecureChannel::NotSpecified,
            1 => SecureChannel::Required,
            2 => SecureChannel::NotRequired,
            _ => return Err(Field("security")),
        };
        let has_tls = match bytes[768] {
            0 if secure_channel == SecureChannel::Required => return Err(Field("security")),
            0 => false,
            2 => true,
            other => return Err(Security(other)),
        };
        Ok(DiscoveryEntry {
            kind,
            subsystem: Nqn::parse(&bytes[256..512]).ok_or(Field("NQN"))?,
            address,
            port: port.ok_or(Field("port"))?,
            port_id: u16_at(4),
            controller_id: u16_at(6),
            admin_entries: u16_at(8),
            no_flow_control: bytes[3] & 4 != 0,
            secure_channel,
            has_tls,
        })
    }

    fn write(&self, bytes: &mut [u8]) {
        bytes.fill(0);
        let kind = match self.kind {
            DiscoveryKind::Referral => 1,
            DiscoveryKind::Subsystem => 2,
            DiscoveryKind::Current => 3,
        };
        let security = match self.secure_channel {
            SecureChannel::NotSpecified => 0,
            SecureChannel::Required => 1,
            SecureChannel::NotRequired => 2,
        };
        let requirements = security | if self.no_flow_control { 4 } else { 0 };
        bytes[..4].copy_from_slice(&[TCP, family(self.address), kind, requirements]);
        bytes[4..6].copy_from_slice(&self.port_id.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.controller_id.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.admin_entries.to_le_bytes());
        put_text(&mut bytes[32..64], &self.port.to_string());
        self.subsystem.write(&mut bytes[256..512]);
        put_text(&mut bytes[512..768], &self.address.to_string());
        bytes[768] = if self.has_tls { 2 } else { 0 };
    }

    /// Whether the target chooses the controller.
    pub fn is_dynamic(&self) -> bool {
        self.controller_id == ANY_CONTROLLER
    }
}

/// Header of the log page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscoveryHeader {
    /// Changes with the log (GENCTR): a host that reads another one afterwards starts again.
    pub generation: u64,
    /// Number of entries, unchecked (NUMREC).
    pub entries: u64,
}

impl DiscoveryHeader {
    /// Parses a header, of which 18 bytes are enough. `None` if the log has an unknown format or
    /// [too many entries](DISCOVERY_ENTRIES_MAX).
    pub fn parse(bytes: &[u8]) -> Option<DiscoveryHeader> {
        let header = bytes.first_chunk::<18>()?;
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|number| header[at + number]));
        let header = DiscoveryHeader { generation: u64_at(0), entries: u64_at(8) };
        (bytes[16..18] == [0, 0] && header.entries <= DISCOVERY_ENTRIES_MAX).then_some(header)
    }
}

/// The log page of a discovery controller, encoded.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiscoveryLog(Vec<u8>);

impl DiscoveryLog {
    /// Encodes a log.
    pub fn new(generation: u64, entries: &[DiscoveryEntry]) -> DiscoveryLog {
        let mut bytes = vec![0; DISCOVERY_ENTRY_BYTES * (entries.len() + 1)];
        bytes[..8].copy_from_slice(&generation.to_le_bytes());
        bytes[8..16].copy_from_slice(&(entries.len() as u64).to_le_bytes());
        for (entry, place) in entries.iter().zip(bytes.chunks_exact_mut(DISCOVERY_ENTRY_BYTES).skip(1)) {
            entry.write(place);
        }
        DiscoveryLog(bytes)
    }

    /// All bytes of the log.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The bytes from `offset` on, at most `len`; what a host asks for beyond them is zero. `None` if the offset is not
    /// in the log: the command is refused with Invalid Field.
    pub fn part(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let from = self.0.get(usize::try_from(offset).ok()?..).filter(|from| !from.is_empty())?;
        Some(&from[..from.len().min(len)])
    }
}

const fn family(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 1,
        IpAddr::V6(_) => 2,
    }
}

/// An ASCII field, padded with blanks or ended by a zero byte.
fn text(field: &[u8]) -> Option<&str> {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    std::str::from_utf8(&field[..end]).ok().map(|text| text.trim_end_matches(' '))
}

fn put_text(field: &mut [u8], text: &str) {
    field.fill(b' ');
    field[..text.len()].copy_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabrics::DISCOVERY_NQN;

    fn entries() -> [DiscoveryEntry; 2] {
        let referral = DiscoveryEntry {
            kind: DiscoveryKind::Referral,
            subsystem: Nqn::new(DISCOVERY_NQN).unwrap(),
            address: "fd00::17".parse().unwrap(),
            port: DISCOVERY_PORT,
            port_id: 0x0102,
            controller_id: ANY_CONTROLLER,
            admin_entries: 32,
            no_flow_control: false,
            secure_channel: SecureChannel::NotRequired,
            has_tls: false,
        };
        let subsystem = DiscoveryEntry {
            kind: DiscoveryKind::Subsystem,
            subsystem: Nqn::new("nqn.2026-11.example:disk").unwrap(),
            address: "192.0.2.1".parse().unwrap(),
            port: 4420,
            no_flow_control: true,
            secure_channel: SecureChannel::Required,
            has_tls: true,
            ..referral.clone()
        };
        [referral, subsystem]
    }

    fn entry(log: &DiscoveryLog, number: u64) -> [u8; DISCOVERY_ENTRY_BYTES] {
        let bytes = DISCOVERY_ENTRY_BYTES as u64;
        log.part((number + 1) * bytes, DISCOVERY_ENTRY_BYTES).unwrap().try_into().unwrap()
    }

    #[test]
    fn the_log_is_as_the_specification_has_it() {
        let log = DiscoveryLog::new(0x0102, &entries());
        let header = log.part(0, 1024).unwrap();
        assert_eq!(header[..18], [2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(DiscoveryHeader::parse(header), Some(DiscoveryHeader { generation: 0x0102, entries: 2 }));
        let [referral, subsystem] = [0, 1].map(|number| entry(&log, number));
        assert_eq!(referral[..10], [3, 2, 1, 2, 2, 1, 0xff, 0xff, 32, 0]);
        assert_eq!((&referral[32..37], referral[63]), (&b"8009 "[..], b' '));
        assert_eq!(&referral[512..521], b"fd00::17 ");
        assert_eq!((&subsystem[..4], subsystem[768]), (&[3, 1, 2, 5][..], 2));
        assert_eq!(&subsystem[256..260], b"nqn.");
        assert_eq!([referral, subsystem].map(|bytes| DiscoveryEntry::parse(&bytes).unwrap()), entries());
    }

    #[test]
    fn an_offset_beyond_the_log_has_no_bytes() {
        // CVE-2026-64320: a 64-bit offset.
        let log = DiscoveryLog::new(1, &entries());
        assert_eq!(log.part(3071, 4096).map(<[u8]>::len), Some(1));
        for offset in [3072, 1 << 32, u64::MAX - 4095, u64::MAX] {
            assert_eq!(log.part(offset, 4096), None, "{offset:x}");
        }
    }

    #[test]
    fn each_malformed_entry_is_refused() {
        use DiscoveryError::{Field, Security, Transport};
        let log = DiscoveryLog::new(1, &entries());
        let cases: &[(usize, &[u8], DiscoveryError)] = &[
            (0, &[1], Transport(1)),
            (1, &[2], Field("address family")),
            (2, &[0], Field("subsystem type")),
            (32, b"0 ", Field("port")),
            (32, b"65536", Field("port")),
            (32, &[b'1'; 32], Field("port")),
            (256, &[b'n'; 256], Field("NQN")),
            (512, b"host.example", Field("address")),
            (512, &[0xff; 256], Field("address")),
            (768, &[1], Security(1)),
            (768, &[0], Field("security")),
        ];
        for (at, part, error) in cases {
            let mut bytes = entry(&log, 1);
            bytes[*at..at + part.len()].copy_from_slice(part);
            assert_eq!(DiscoveryEntry::parse(&bytes), Err(*error), "{at}");
        }
        assert_eq!(DiscoveryHeader::parse(&[0; 17]), None);
        let mut header = [0; 18];
        header[16] = 1;
        assert_eq!(DiscoveryHeader::parse(&header), None, "unknown format");
        let mut header = [0; 18];
        header[8..16].fill(0xff);
        assert_eq!(DiscoveryHeader::parse(&header), None, "too many entries");
    }
}
