//! Set-up of a PCI device before its registers are used: enables memory and bus master, places BAR 0, enables MSI-X.
//!
//! A server may emulate a device that responds only after this set-up (QEMU's does). Guests do it in firmware or
//! kernel.

use blkyard_wire::vfio_user::region_index::CONFIG;

use crate::vfio_user::VfioUserError;
use crate::vfio_user::device::DeviceState;

/// Offsets and bits of configuration space (PCI Local Bus 3.0, 6.1 and 6.8.2).
const COMMAND: u64 = 0x04;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const STATUS: u64 = 0x06;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const BAR0: u64 = 0x10;
const BAR_TYPE: u32 = 0b110;
const BAR_64: u32 = 0b100;
const CAPABILITIES: u64 = 0x34;
const CAPABILITY_MSIX: u8 = 0x11;
const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_MASK_ALL: u16 = 1 << 14;
/// Bytes of configuration space of any device.
pub(crate) const CONFIG_BYTES: u64 = 256;
/// Maximum capabilities in these bytes.
const CAPABILITIES_MAX: usize = 48;

/// Address of BAR 0. The server does not use it; zero would mean unset.
const BAR0_ADDRESS: u32 = 0x1000_0000;

/// Bytes of an entry of the MSI-X table, and offset of the word that masks a vector.
const MSIX_ENTRY_BYTES: u64 = 16;
const MSIX_VECTOR_CONTROL: u64 = 12;

/// The MSI-X capability of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MsixCapability {
    /// Offset of its control word in configuration space.
    control_at: u64,
    /// Region with the table, and the offset of the table.
    table: (u32, u64),
    /// Region with the pending bits, and their offset.
    pending: (u32, u64),
}

impl MsixCapability {
    /// Finds the capability.
    pub(crate) fn find(device: &mut DeviceState) -> Result<Option<MsixCapability>, VfioUserError> {
        if config16(device, STATUS)? & STATUS_CAPABILITIES == 0 {
            return Ok(None);
        }
        let mut at = u64::from(config16(device, CAPABILITIES)? & 0xfc);
        // Bounded, since the list may be circular.
        for _ in 0..CAPABILITIES_MAX {
            if !(0x40..=CONFIG_BYTES - 12).contains(&at) {
                return Ok(None);
            }
            let [id, next] = config16(device, at)?.to_le_bytes();
            if id == CAPABILITY_MSIX {
                let mut place = [0; 8];
                device.read_region(CONFIG, at + 4, &mut place)?;
                let [table, pending] = [0, 4].map(|at| {
                    let word = u32::from_le_bytes([place[at], place[at + 1], place[at + 2], place[at + 3]]);
                    (word & 7, u64::from(word & !7))
                });
                return Ok(Some(MsixCapability { control_at: at + 2, table, pending }));
            }
            at = u64::from(next & 0xfc);
        }
        Ok(None)
    }

    /// Offset of the first byte of the table or the pending bits in BAR 0, at or after `from`.
    pub(crate) fn first_in_bar0(self, from: u64) -> Option<u64> {
        [self.table, self.pending]
            .into_iter()
            .filter(|(region, at)| *region == 0 && *at >= from)
            .map(|(_, at)| at)
            .min()
    }

    /// Enables MSI-X without the function mask.
    pub(crate) fn enable(self, device: &mut DeviceState) -> Result<(), VfioUserError> {
        let control = config16(device, self.control_at)? & !MSIX_MASK_ALL | MSIX_ENABLE;
        device.write_region(CONFIG, self.control_at, &control.to_le_bytes())
    }

    /// Unmasks vectors by their entries in the table.
    pub(crate) fn unmask(self, device: &mut DeviceState, vectors: u16) -> Result<(), VfioUserError> {
        let (region, table) = self.table;
        for vector in 0..u64::from(vectors) {
            let at = table + vector * MSIX_ENTRY_BYTES + MSIX_VECTOR_CONTROL;
            device.write_region(region, at, &0_u32.to_le_bytes())?;
        }
        Ok(())
    }
}

/// Gives BAR 0 an address, and enables memory decoding and bus master.
pub(crate) fn enable(device: &mut DeviceState, bar0_bytes: u64) -> Result<(), VfioUserError> {
    let mut bar = [0; 4];
    device.read_region(CONFIG, BAR0, &mut bar)?;
    let is_64 = u32::from_le_bytes(bar) & BAR_TYPE == BAR_64;
    let address = u64::from(BAR0_ADDRESS).max(bar0_bytes.checked_next_power_of_two().unwrap_or(0));
    let [low, high] = [address as u32, (address >> 32) as u32];
    device.write_region(CONFIG, BAR0, &low.to_le_bytes())?;
    if is_64 {
        device.write_region(CONFIG, BAR0 + 4, &high.to_le_bytes())?;
    }
    let command = config16(device, COMMAND)? | COMMAND_MEMORY | COMMAND_BUS_MASTER;
    device.write_region(CONFIG, COMMAND, &command.to_le_bytes())
}

/// Whether memory decoding is enabled, which a reset of the device disables.
pub(crate) fn decodes_memory(device: &mut DeviceState) -> Result<bool, VfioUserError> {
    Ok(config16(device, COMMAND)? & COMMAND_MEMORY != 0)
}

fn config16(device: &mut DeviceState, at: u64) -> Result<u16, VfioUserError> {
    let mut word = [0; 2];
    device.read_region(CONFIG, at, &mut word)?;
    Ok(u16::from_le_bytes(word))
}
