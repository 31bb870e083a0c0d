//! Asymmetric namespace access: the log page (0Ch), host side.
//!
//! A target's log is checked: groups beyond the bound of identify data, or a length beyond the page, end it.

/// Identifier of the log page.
pub const ANA_LOG: u8 = 0x0c;
/// Bytes of the header, and of a group without its namespaces.
const HEADER_BYTES: usize = 16;
const GROUP_BYTES: usize = 32;

/// State of a group of namespaces at a controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AnaState {
    /// The preferred access; also that of controllers without this feature.
    #[default]
    Optimized,
    /// Usable.
    NonOptimized,
    /// Not usable by this controller now.
    Inaccessible,
    /// Not usable by this controller any more.
    PersistentLoss,
    /// About to change.
    Change,
}

impl AnaState {
    /// From its code; `None` for an undefined one.
    pub fn from_code(code: u8) -> Option<AnaState> {
        match code {
            1 => Some(AnaState::Optimized),
            2 => Some(AnaState::NonOptimized),
            3 => Some(AnaState::Inaccessible),
            4 => Some(AnaState::PersistentLoss),
            0xf => Some(AnaState::Change),
            _ => None,
        }
    }

    /// Whether I/O is accepted.
    pub fn is_usable(self) -> bool {
        matches!(self, AnaState::Optimized | AnaState::NonOptimized)
    }
}

/// A group of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnaGroup {
    /// Its identifier, not zero.
    pub id: u32,
    /// Its state.
    pub state: AnaState,
    /// Its namespaces, ascending.
    pub namespaces: Vec<u32>,
}

/// The log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnaLog {
    /// Changes with the log.
    pub change_count: u64,
    /// The groups.
    pub groups: Vec<AnaGroup>,
}

impl AnaLog {
    /// Maximum bytes of a log of so many groups and namespaces.
    pub fn bytes_max(groups: u32, namespaces: u32) -> u64 {
        HEADER_BYTES as u64 + u64::from(groups) * GROUP_BYTES as u64 + u64::from(namespaces) * 4
    }

    /// Parses a log. `None` if it does not fit the bytes, or a group is invalid.
    pub fn parse(bytes: &[u8]) -> Option<AnaLog> {
        let (header, mut rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let change_count = u64::from_le_bytes(*header.first_chunk()?);
        let count = u16::from_le_bytes([header[8], header[9]]);
        let mut groups = Vec::new();
        for _ in 0..count {
            let (group, after) = rest.split_first_chunk::<GROUP_BYTES>()?;
            let word = |at: usize| u32::from_le_bytes([group[at], group[at + 1], group[at + 2], group[at + 3]]);
            let (id, namespaces) = (word(0), usize::try_from(word(4)).ok()?);
            let (ids, next) = after.split_at_checked(namespaces.checked_mul(4)?)?;
            let state = AnaState::from_code(group[16] & 0xf).filter(|_| id > 0)?;
            let namespaces = ids.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect();
            groups.push(AnaGroup { id, state, namespaces });
            rest = next;
        }
        Some(AnaLog { change_count, groups })
    }

    /// State of a namespace of this group. A namespace whose group is not in the log is not usable.
    pub fn state_of(&self, group: u32) -> AnaState {
        self.groups.iter().find(|known| known.id == group).map_or(AnaState::Inaccessible, |known| known.state)
    }

    /// Whether a group is about to change.
    pub fn is_changing(&self) -> bool {
        self.groups.iter().any(|group| group.state == AnaState::Change)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> Vec<u8> {
        let mut bytes = vec![0; 16];
        (bytes[0], bytes[8]) = (7, 2);
        for (id, state, namespaces) in [(1, 1, &[1_u32, 5][..]), (2, 0xf, &[])] {
            let mut group = [0; 32];
            (group[0], group[4], group[16]) = (id, namespaces.len() as u8, state);
            bytes.extend(group);
            bytes.extend(namespaces.iter().flat_map(|id| id.to_le_bytes()));
        }
        bytes
    }

    #[test]
    fn a_log_has_groups_with_namespaces() {
        let parsed = AnaLog::parse(&log()).unwrap();
        let group = |id, state, namespaces| AnaGroup { id, state, namespaces };
        let groups = vec![group(1, AnaState::Optimized, vec![1, 5]), group(2, AnaState::Change, vec![])];
        assert_eq!(parsed, AnaLog { change_count: 7, groups });
        assert_eq!([1, 2, 3].map(|id| parsed.state_of(id).is_usable()), [true, false, false]);
        assert!(parsed.is_changing());
        assert_eq!(AnaLog::bytes_max(2, 2), log().len() as u64);
    }

    #[test]
    fn each_malformed_log_is_refused() {
        for end in 0..log().len() {
            assert_eq!(AnaLog::parse(&log()[..end]), None, "{end} bytes");
        }
        for (at, byte) in [(8, 3), (9, 0xff), (16, 0), (16 + 4, 0xff), (16 + 7, 0xff), (16 + 16, 0), (16 + 16, 5)] {
            let mut bytes = log();
            bytes[at] = byte;
            assert_eq!(AnaLog::parse(&bytes), None, "{at}");
        }
    }
}
