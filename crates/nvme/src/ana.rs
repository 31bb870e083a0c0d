//! Asymmetric namespace access: the log page (0Ch) as a host reads it, and the groups of a port of a target.
//!
//! A target's log is checked: groups beyond the bound of identify data, or a length beyond the page, end it.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU64};

use serde::{Deserialize, Serialize};

use crate::{NamespaceTable, NvmeStatus};

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
    /// All states.
    pub const ALL: [AnaState; 5] = [
        AnaState::Optimized,
        AnaState::NonOptimized,
        AnaState::Inaccessible,
        AnaState::PersistentLoss,
        AnaState::Change,
    ];

    /// Its code.
    pub const fn code(self) -> u8 {
        match self {
            AnaState::Optimized => 1,
            AnaState::NonOptimized => 2,
            AnaState::Inaccessible => 3,
            AnaState::PersistentLoss => 4,
            AnaState::Change => 0xf,
        }
    }

    /// From its code; `None` for an undefined one.
    pub fn from_code(code: u8) -> Option<AnaState> {
        AnaState::ALL.into_iter().find(|state| state.code() == code)
    }

    /// Its name, as Linux writes it.
    pub const fn name(self) -> &'static str {
        match self {
            AnaState::Optimized => "optimized",
            AnaState::NonOptimized => "non-optimized",
            AnaState::Inaccessible => "inaccessible",
            AnaState::PersistentLoss => "persistent-loss",
            AnaState::Change => "change",
        }
    }

    /// From its name.
    pub fn from_name(name: &str) -> Option<AnaState> {
        AnaState::ALL.into_iter().find(|state| state.name() == name)
    }

    /// Status of I/O at a controller in this state. A host may try it by another path.
    fn status(self) -> NvmeStatus {
        match self {
            AnaState::Optimized | AnaState::NonOptimized => NvmeStatus::SUCCESS,
            AnaState::Inaccessible => NvmeStatus::ANA_INACCESSIBLE,
            AnaState::PersistentLoss => NvmeStatus::ANA_LOSS,
            AnaState::Change => NvmeStatus::ANA_TRANSITION,
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

/// States of the groups at one port of a target.
///
/// Shared by whoever changes them, the controllers of the port, and their I/O queues: a change holds for the next
/// command, without stopping a queue. Commands that have begun complete as they would have.
#[derive(Debug)]
pub struct AnaGroups {
    /// Codes of the states. Group 1 is the first one.
    states: [AtomicU8; AnaGroups::GROUPS_MAX as usize],
    /// Changes of each group.
    changes: [AtomicU64; AnaGroups::GROUPS_MAX as usize],
    /// Changes of all groups.
    all_changes: AtomicU64,
}

impl Default for AnaGroups {
    fn default() -> AnaGroups {
        AnaGroups {
            states: [const { AtomicU8::new(AnaState::Optimized.code()) }; AnaGroups::GROUPS_MAX as usize],
            changes: [const { AtomicU64::new(0) }; AnaGroups::GROUPS_MAX as usize],
            all_changes: AtomicU64::new(0),
        }
    }
}

/// States of groups that were changed, with the changes of each and of all.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AnaSnapshot {
    /// Group, code of its state, changes.
    groups: Vec<(u32, u8, u64)>,
    all_changes: u64,
}

impl AnaGroups {
    /// Saves the states.
    pub fn snapshot(&self) -> AnaSnapshot {
        let of = |group: u32| {
            let at = group as usize - 1;
            (group, self.states[at].load(Relaxed), self.changes[at].load(Relaxed))
        };
        let groups = (1..=AnaGroups::GROUPS_MAX).map(of).filter(|(_, _, changes)| *changes > 0).collect();
        AnaSnapshot { groups, all_changes: self.all_changes.load(Relaxed) }
    }

    /// Restores saved states. Returns whether they are valid.
    pub fn restore(&self, saved: &AnaSnapshot) -> bool {
        for (group, code, changes) in &saved.groups {
            let place = (*group as usize).wrapping_sub(1);
            if place >= self.states.len() || AnaState::from_code(*code).is_none() {
                return false;
            }
            self.states[place].store(*code, Relaxed);
            self.changes[place].store(*changes, Relaxed);
        }
        self.all_changes.store(saved.all_changes, Relaxed);
        true
    }

    /// Maximum groups, and maximum identifier of a group (ANAGRPMAX): those of Linux's target.
    pub const GROUPS_MAX: u32 = 128;
    /// Maximum duration of the state "change" (ANATT), s. Linux resets a controller that is in it twice as long.
    pub const TRANSITION_S: u8 = 30;

    /// State of a group.
    ///
    /// # Panics
    /// If there is no such group.
    #[inline]
    pub fn state(&self, group: u32) -> AnaState {
        let code = self.states[group as usize - 1].load(Relaxed);
        AnaState::from_code(code).unwrap_or(AnaState::Inaccessible)
    }

    /// Sets the state of a group. Returns whether it is another one.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn set(&self, group: u32, state: AnaState) -> bool {
        let place = group as usize - 1;
        let is_changed = self.states[place].swap(state.code(), Relaxed) != state.code();
        if is_changed {
            self.changes[place].fetch_add(1, Relaxed);
            self.all_changes.fetch_add(1, Relaxed);
        }
        is_changed
    }

    /// Whether I/O of a group is accepted.
    #[inline]
    pub(crate) fn check(&self, group: u32) -> Result<(), NvmeStatus> {
        // The common states are the two smallest codes.
        if self.states[group as usize - 1].load(Relaxed) <= AnaState::NonOptimized.code() {
            return Ok(());
        }
        match self.state(group).status() {
            NvmeStatus::SUCCESS => Ok(()),
            status => Err(status),
        }
    }

    /// The log page: the groups that have namespaces, ascending, with or without the identifiers of these.
    pub(crate) fn page(&self, table: &NamespaceTable, is_groups_only: bool) -> Vec<u8> {
        let mut page = vec![0; HEADER_BYTES];
        page[..8].copy_from_slice(&self.all_changes.load(Relaxed).to_le_bytes());
        let mut count: u16 = 0;
        for group in 1..=AnaGroups::GROUPS_MAX {
            let of_group = table.iter().filter(|namespace| namespace.ana_group == group);
            let namespaces: Vec<_> = of_group.map(|namespace| namespace.format.nsid).collect();
            if namespaces.is_empty() {
                continue;
            }
            count += 1;
            let mut entry = [0; GROUP_BYTES];
            let listed = if is_groups_only { &[][..] } else { &namespaces };
            entry[..4].copy_from_slice(&group.to_le_bytes());
            entry[4..8].copy_from_slice(&(listed.len() as u32).to_le_bytes());
            entry[8..16].copy_from_slice(&self.changes[group as usize - 1].load(Relaxed).to_le_bytes());
            entry[16] = self.state(group).code();
            page.extend(entry);
            page.extend(listed.iter().flat_map(|nsid| nsid.to_le_bytes()));
        }
        page[8..10].copy_from_slice(&count.to_le_bytes());
        page
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

    #[test]
    fn page_of_a_target_is_read_by_a_host() {
        let mut table = NamespaceTable::new(9);
        for (nsid, group) in [(1, 2), (4, 1), (9, 2)] {
            let info = blkyard_mq::DeviceInfo { capacity_sectors: 8, ..Default::default() };
            let served = crate::ServedNamespace::new(nsid, 0, &info).unwrap();
            table.set(nsid, Some(crate::ServedNamespace { ana_group: group, ..served }));
        }
        let groups = AnaGroups::default();
        assert!(groups.set(2, AnaState::Inaccessible) && !groups.set(2, AnaState::Inaccessible));
        assert!(groups.set(128, AnaState::Change), "a group without namespaces is not in the log");
        let group = |id, state, namespaces| AnaGroup { id, state, namespaces };
        let want = vec![group(1, AnaState::Optimized, vec![4]), group(2, AnaState::Inaccessible, vec![1, 9])];
        let page = groups.page(&table, false);
        assert_eq!(AnaLog::parse(&page), Some(AnaLog { change_count: 2, groups: want }));
        assert_eq!((page[16 + 8], page[16 + 32 + 4 + 8]), (0, 1), "changes of each group");
        assert!(page.len() as u64 <= AnaLog::bytes_max(2, 3));
        let only = AnaLog::parse(&groups.page(&table, true)).unwrap();
        assert!(only.groups.len() == 2 && only.groups.iter().all(|group| group.namespaces.is_empty()));
    }

    #[test]
    fn each_state_has_its_status() {
        let groups = AnaGroups::default();
        let status = |state| {
            groups.set(3, state);
            groups.check(3)
        };
        assert_eq!([AnaState::Optimized, AnaState::NonOptimized].map(status), [Ok(()), Ok(())]);
        assert_eq!(status(AnaState::Inaccessible), Err(NvmeStatus(0x302)));
        assert_eq!(status(AnaState::PersistentLoss), Err(NvmeStatus(0x301)));
        assert_eq!(status(AnaState::Change), Err(NvmeStatus(0x303)));
        assert_eq!(groups.check(4), Ok(()), "of another group");
        assert!(AnaState::ALL.iter().all(|state| AnaState::from_name(state.name()) == Some(*state)));
    }
}
