//! Cross-Controller Reset: a host that has lost a controller has it reset by another one of the subsystem, and knows
//! then that no command of the lost one is executed any more.
//!
//! Names and values are those of the NVMe Base Specification 2.3: the command in 5.4.3 (opcode 38h), its use in 8.3.3
//! and 9.6.2, the fields of Identify Controller in Figure 328, the log page 1Eh, and the notice F4h in Figure 154.

use serde::{Deserialize, Serialize};

use crate::{IDENTIFY_BYTES, IdentifyController, Sqe, admin};

/// Identifier of the log page.
pub const CROSS_RESET_LOG: u8 = 0x1e;
/// Bytes of the log page.
pub const CROSS_RESET_LOG_BYTES: usize = 4096;
/// Entries of the log page, at most.
pub const CROSS_RESET_ENTRIES_MAX: usize = (CROSS_RESET_LOG_BYTES - HEADER_BYTES) / ENTRY_BYTES;
/// Bit of OAES and of the asynchronous event configuration: notices of completed resets.
pub(crate) const CROSS_RESET_NOTICES: u32 = 1 << 20;
/// Asynchronous event information of that notice.
pub(crate) const CROSS_RESET_NOTICE: u8 = 0xf4;
/// Bit 0 of the result: the reset has been complete before the command (IRS).
pub(crate) const IMMEDIATE: u64 = 1;
/// Bit 0 of the log specific parameter: completed entries are removed (RMC).
pub(crate) const REMOVE_COMPLETED: u8 = 1;

const HEADER_BYTES: usize = 8;
const ENTRY_BYTES: usize = 8;
/// Flags of an entry: the request is validated, and the reset has begun.
const BEGUN: u8 = 0b11;

/// One life of a controller: from its Connect to its end. A later one with the same identifier has other numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ControllerInstance {
    /// Controller identifier (CNTLID).
    pub id: u16,
    /// Controller instance uniquifier (CIU), not zero.
    pub uniquifier: u8,
    /// Controller instance random number (CIRN), not zero.
    pub random: u64,
}

impl ControllerInstance {
    /// The instance that answered with this identify data; `None` if the controller names none.
    pub fn of(identify: &IdentifyController) -> Option<ControllerInstance> {
        let IdentifyController { controller_id: id, uniquifier, random, .. } = *identify;
        (uniquifier != 0 && random != 0).then_some(ControllerInstance { id, uniquifier, random })
    }

    /// The command that has it reset.
    pub const fn reset_command(self) -> Sqe {
        let mut sqe = Sqe::new(admin::CROSS_CONTROLLER_RESET, 0);
        sqe.0[5] = self.id as u64 | (self.uniquifier as u64) << 16;
        sqe.0[6] = self.random;
        sqe
    }

    /// The instance that such a command names; `None` for numbers that no instance has.
    pub(crate) fn of_command(sqe: &Sqe) -> Option<ControllerInstance> {
        let dword = sqe.dword(10);
        let random = u64::from(sqe.dword(12)) | u64::from(sqe.dword(13)) << 32;
        let instance = ControllerInstance { id: dword as u16, uniquifier: (dword >> 16) as u8, random };
        (instance.uniquifier != 0 && random != 0).then_some(instance)
    }
}

/// Progress of a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CrossResetState {
    /// Commands may still be executed.
    Running,
    /// No command is executed any more.
    Succeeded,
    /// Whether commands are executed is unknown.
    Failed,
}

/// An entry of the log page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossResetEntry {
    /// Identifier of the controller that is reset (ICID).
    pub id: u16,
    /// Its uniquifier (CIU).
    pub uniquifier: u8,
    /// Identifier of the controller that was asked (ACID).
    pub asked: u16,
    /// Progress (CCRS).
    pub state: CrossResetState,
}

impl CrossResetEntry {
    /// A log page with these entries, of which those beyond [`CROSS_RESET_ENTRIES_MAX`] are left out.
    pub fn page(entries: impl IntoIterator<Item = CrossResetEntry>) -> Vec<u8> {
        let mut page = vec![0; CROSS_RESET_LOG_BYTES];
        let mut count = 0_u16;
        let (header, places) = page.split_at_mut(HEADER_BYTES);
        for (bytes, entry) in places.chunks_exact_mut(ENTRY_BYTES).zip(entries) {
            bytes[..2].copy_from_slice(&entry.id.to_le_bytes());
            bytes[2] = entry.uniquifier;
            bytes[4..6].copy_from_slice(&entry.asked.to_le_bytes());
            bytes[6] = match entry.state {
                CrossResetState::Running => 0,
                CrossResetState::Succeeded => 1,
                CrossResetState::Failed => 2,
            };
            bytes[7] = BEGUN;
            count += 1;
        }
        header[..2].copy_from_slice(&count.to_le_bytes());
        page
    }

    /// The entries of a log page. One with an unknown state has failed.
    pub fn parse(page: &[u8; IDENTIFY_BYTES]) -> Vec<CrossResetEntry> {
        let count = usize::from(u16::from_le_bytes([page[0], page[1]]));
        let entry = |bytes: &[u8; ENTRY_BYTES]| CrossResetEntry {
            id: u16::from_le_bytes([bytes[0], bytes[1]]),
            uniquifier: bytes[2],
            asked: u16::from_le_bytes([bytes[4], bytes[5]]),
            state: match bytes[6] {
                0 => CrossResetState::Running,
                1 => CrossResetState::Succeeded,
                _ => CrossResetState::Failed,
            },
        };
        page[HEADER_BYTES..].as_chunks().0.iter().take(count).map(entry).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INSTANCE: ControllerInstance =
        ControllerInstance { id: 0x1234, uniquifier: 0x56, random: 0x0102_0304_0506_0708 };

    #[test]
    fn a_command_names_the_instance_in_its_dwords() {
        let sqe = INSTANCE.reset_command();
        assert_eq!((sqe.opcode(), sqe.nsid(), sqe.dword(10)), (0x38, 0, 0x0056_1234));
        assert_eq!((sqe.dword(11), sqe.dword(12), sqe.dword(13)), (0, 0x0506_0708, 0x0102_0304));
        assert_eq!(ControllerInstance::of_command(&sqe), Some(INSTANCE));
        for wrong in [ControllerInstance { uniquifier: 0, ..INSTANCE }, ControllerInstance { random: 0, ..INSTANCE }] {
            assert_eq!(ControllerInstance::of_command(&wrong.reset_command()), None);
        }
        // Reserved bits are ignored.
        let mut dwords = sqe.dwords();
        (dwords[10], dwords[11], dwords[14]) = (dwords[10] | 0xff00_0000, u32::MAX, u32::MAX);
        assert_eq!(ControllerInstance::of_command(&Sqe::from_dwords(dwords)), Some(INSTANCE));
    }

    #[test]
    fn an_instance_without_numbers_is_none() {
        let mut bytes = [0; IDENTIFY_BYTES];
        bytes[78..80].copy_from_slice(&[0x34, 0x12]);
        bytes[135] = 0x56;
        bytes[136..144].copy_from_slice(&INSTANCE.random.to_le_bytes());
        let identify = IdentifyController::parse(&bytes);
        assert_eq!(ControllerInstance::of(&identify), Some(INSTANCE));
        assert_eq!(ControllerInstance::of(&IdentifyController { uniquifier: 0, ..identify.clone() }), None);
        assert_eq!(ControllerInstance::of(&IdentifyController { random: 0, ..identify }), None);
    }

    #[test]
    fn a_page_has_its_entries_where_the_specification_has_them() {
        let states = [CrossResetState::Running, CrossResetState::Succeeded, CrossResetState::Failed];
        let entries = [0, 1, 2].map(|at| CrossResetEntry {
            id: 0x1200 + at,
            uniquifier: at as u8 + 1,
            asked: 0x3400 + at,
            state: states[usize::from(at)],
        });
        let page = CrossResetEntry::page(entries);
        assert_eq!(page[..16], [3, 0, 0, 0, 0, 0, 0, 0, 0x00, 0x12, 1, 0, 0x00, 0x34, 0, 3]);
        assert_eq!(page[16..32], [0x01, 0x12, 2, 0, 0x01, 0x34, 1, 3, 0x02, 0x12, 3, 0, 0x02, 0x34, 2, 3]);
        let mut page: [u8; IDENTIFY_BYTES] = page.try_into().unwrap();
        assert_eq!(CrossResetEntry::parse(&page), entries);
        // A count beyond the page, and a state that is reserved.
        page[..2].fill(0xff);
        page[14] = 9;
        let parsed = CrossResetEntry::parse(&page);
        assert_eq!((parsed.len(), parsed[0].state), (511, CrossResetState::Failed));
        assert_eq!(CrossResetEntry::page(vec![entries[0]; 600])[..2], [0xff, 1]);
    }
}
