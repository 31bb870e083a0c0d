//! The configuration space of the PCI Express endpoint and its MSI-X table: bytes, with a mask of the writable bits.
//!
//! The client maps the BARs and delivers interrupts by the eventfds of DEVICE_SET_IRQS. The bus master bit, the masks
//! in the table and the settings of a link that does not exist therefore have no effect here. A function level reset
//! has one, and so has power state D3hot: registers are out of reach. See
//! `docs/adr/0058-an-nvme-export-is-a-pci-express-endpoint.md`.

use serde::{Deserialize, Serialize};

/// Bytes of configuration space: that of PCI and the extended one, which has no capability and is zero.
pub(crate) const CONFIG_BYTES: usize = 4096;
/// Bytes of BAR 4: the MSI-X table in its first half, the pending bits in its second.
pub(crate) const MSIX_BYTES: usize = 4096;
/// MSI-X entries that fit the first half of BAR 4.
pub(crate) const VECTORS_MAX: u16 = (MSIX_BYTES / 2 / ENTRY_BYTES) as u16;

const ENTRY_BYTES: usize = 16;
/// Mass storage, non-volatile memory, NVM Express I/O controller.
const CLASS: [u8; 3] = [0x02, 0x08, 0x01];
const STATUS_CAPABILITIES: u8 = 1 << 4;
/// Memory space, bus master, and interrupt disable.
const COMMAND_WRITABLE: u16 = 1 << 1 | 1 << 2 | 1 << 10;
/// A memory BAR of 64 bits.
const BAR_64: u32 = 0b100;
/// Capabilities, in the order of their list (PCI Express Base 5.0, 7.5.2, 7.5.3 and 7.7.2).
const MSIX_AT: usize = 0x40;
const MSIX_ID: u8 = 0x11;
const POWER_AT: usize = 0x50;
const POWER_ID: u8 = 0x01;
const EXPRESS_AT: usize = 0x60;
const EXPRESS_ID: u8 = 0x10;
/// BAR of the MSI-X table.
const MSIX_BAR: u32 = 4;

/// Version 3 of power management: D0 and D3hot only, no PME.
const POWER_CAPABILITIES: u16 = 3;
/// PMCSR: the state is kept on the way from D3hot to D0 (No_Soft_Reset). Otherwise a host would take that for a reset.
const POWER_KEPT: u16 = 1 << 3;
const POWER_CONTROL_AT: usize = POWER_AT + 4;
const POWER_STATE: u8 = 0b11;
const D0: u8 = 0b00;
const D3_HOT: u8 = 0b11;

/// Version 2 of the capability, an endpoint.
const EXPRESS_CAPABILITIES: u16 = 2;
/// Role-based error reporting, which each endpoint has, and function level reset. Payloads of 128 bytes.
const DEVICE_CAPABILITIES: u32 = 1 << 15 | 1 << 28;
/// Relaxed ordering, no snoop, read requests of 512 bytes: the values after a reset.
const DEVICE_CONTROL: u16 = 1 << 4 | 1 << 11 | 2 << 12;
/// These, and the reports of errors.
const DEVICE_CONTROL_WRITABLE: u16 = 1 << 4 | 1 << 11 | 7 << 12 | 0xf;
/// High byte of Device Control, and its bit that initiates a function level reset and reads as zero.
const RESET_AT: usize = EXPRESS_AT + 9;
const RESET: u8 = 1 << 7;
/// One lane of 2.5 GT/s, as emulated endpoints have by convention; no power management of the link.
const LINK: u16 = 1 << 4 | 1;
/// Link Capabilities: the field for that is optional (ASPM Optionality Compliance).
const LINK_CAPABILITIES: u32 = LINK as u32 | 1 << 22;
/// Power management, read completion boundary, common clock, extended synch.
const LINK_CONTROL_WRITABLE: u16 = 0b11 | 1 << 3 | 1 << 6 | 1 << 7;
/// Device Capabilities 2: completion timeouts can be disabled. Control bit of the same place.
const COMPLETION_TIMEOUT: u16 = 1 << 4;
/// Link Capabilities 2: 2.5 GT/s.
const LINK_SPEEDS: u32 = 1 << 1;

/// Vendor and device id of the function; also its subsystem's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmePciId {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
}

impl Default for NvmePciId {
    /// The id of the other NVMe target over vfio-user, SPDK's. Drivers find the controller by its class. Linux has no
    /// quirks for this id, other than for that of QEMU's controller (1b36:0010), with which it ignores Write Zeroes and
    /// the identifiers of namespaces.
    fn default() -> NvmePciId {
        NvmePciId { vendor: 0x4e58, device: 1 }
    }
}

/// Readable bytes with their write mask.
#[derive(Clone, Debug)]
struct MaskedBytes {
    bytes: Vec<u8>,
    writable: Vec<u8>,
}

impl MaskedBytes {
    fn new(len: usize) -> MaskedBytes {
        MaskedBytes { bytes: vec![0; len], writable: vec![0; len] }
    }

    fn set(&mut self, at: usize, value: &[u8], writable: &[u8]) {
        self.bytes[at..at + value.len()].copy_from_slice(value);
        self.writable[at..at + writable.len()].copy_from_slice(writable);
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Option<()> {
        let start = usize::try_from(offset).ok()?;
        to.copy_from_slice(self.bytes.get(start..start.checked_add(to.len())?)?);
        Some(())
    }

    /// Whether there are writable bits in a word of 4 bytes.
    fn is_writable(&self, at: usize) -> bool {
        self.writable.get(at..at + 4).is_some_and(|bytes| bytes.iter().any(|byte| *byte != 0))
    }

    /// Words of 4 bytes with another value than there, and their offsets.
    fn difference(&self, other: &MaskedBytes) -> Vec<(u16, u32)> {
        let words = self.bytes.chunks_exact(4).zip(other.bytes.chunks_exact(4)).enumerate();
        words
            .filter(|(_, (value, other))| value != other)
            .map(|(number, (value, _))| {
                (number as u16 * 4, u32::from_le_bytes([value[0], value[1], value[2], value[3]]))
            })
            .collect()
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Option<()> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(from.len()).filter(|end| *end <= self.bytes.len())?;
        for (at, value) in (start..end).zip(from) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | value & mask;
        }
        Some(())
    }
}

/// State of the PCI function as plain data: words that differ from the power-on state, with their offsets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PciSnapshot {
    config: Vec<(u16, u32)>,
    msix: Vec<(u16, u32)>,
}

/// State of the PCI function.
#[derive(Clone, Debug)]
pub(crate) struct PciFunction {
    config: MaskedBytes,
    msix: MaskedBytes,
}

impl PciFunction {
    /// A function after reset, with this size of BAR 0 in bytes (a power of two) and this number of vectors.
    pub(crate) fn new(id: NvmePciId, bar0_bytes: u64, vectors: u16) -> PciFunction {
        let (vendor, device) = (id.vendor.to_le_bytes(), id.device.to_le_bytes());
        let mut config = MaskedBytes::new(CONFIG_BYTES);
        config.set(0x00, &vendor, &[]);
        config.set(0x02, &device, &[]);
        config.set(0x04, &[0; 2], &COMMAND_WRITABLE.to_le_bytes());
        config.set(0x06, &[STATUS_CAPABILITIES], &[]);
        config.set(0x09, &CLASS, &[]);
        config.set(0x0c, &[0], &[0xff]);
        // Address bits below the size of a BAR read as zero; hosts find the size by this.
        let bar = |bytes: u64| ((!(bytes - 1)) as u32).to_le_bytes();
        config.set(0x10, &BAR_64.to_le_bytes(), &bar(bar0_bytes));
        config.set(0x14, &[0; 4], &[0xff; 4]);
        config.set(0x20, &BAR_64.to_le_bytes(), &bar(MSIX_BYTES as u64));
        config.set(0x24, &[0; 4], &[0xff; 4]);
        config.set(0x2c, &vendor, &[]);
        config.set(0x2e, &device, &[]);
        config.set(0x34, &[MSIX_AT as u8], &[]);
        config.set(0x3c, &[0], &[0xff]);
        config.set(MSIX_AT, &[MSIX_ID, POWER_AT as u8], &[]);
        // Enable and mask of the function.
        config.set(MSIX_AT + 2, &(vectors - 1).to_le_bytes(), &0xc000_u16.to_le_bytes());
        config.set(MSIX_AT + 4, &MSIX_BAR.to_le_bytes(), &[]);
        config.set(MSIX_AT + 8, &(MSIX_BAR | (MSIX_BYTES as u32 / 2)).to_le_bytes(), &[]);
        config.set(POWER_AT, &[POWER_ID, EXPRESS_AT as u8], &[]);
        config.set(POWER_AT + 2, &POWER_CAPABILITIES.to_le_bytes(), &[]);
        config.set(POWER_CONTROL_AT, &POWER_KEPT.to_le_bytes(), &[POWER_STATE]);
        // Registers of slots and root ports, and status registers without an event, stay zero.
        config.set(EXPRESS_AT, &[EXPRESS_ID, 0], &[]);
        config.set(EXPRESS_AT + 0x02, &EXPRESS_CAPABILITIES.to_le_bytes(), &[]);
        config.set(EXPRESS_AT + 0x04, &DEVICE_CAPABILITIES.to_le_bytes(), &[]);
        config.set(EXPRESS_AT + 0x08, &DEVICE_CONTROL.to_le_bytes(), &DEVICE_CONTROL_WRITABLE.to_le_bytes());
        config.set(EXPRESS_AT + 0x0c, &LINK_CAPABILITIES.to_le_bytes(), &[]);
        config.set(EXPRESS_AT + 0x10, &[0; 2], &LINK_CONTROL_WRITABLE.to_le_bytes());
        config.set(EXPRESS_AT + 0x12, &LINK.to_le_bytes(), &[]);
        config.set(EXPRESS_AT + 0x24, &COMPLETION_TIMEOUT.to_le_bytes(), &[]);
        config.set(EXPRESS_AT + 0x28, &[0; 2], &COMPLETION_TIMEOUT.to_le_bytes());
        config.set(EXPRESS_AT + 0x2c, &LINK_SPEEDS.to_le_bytes(), &[]);
        let mut msix = MaskedBytes::new(MSIX_BYTES);
        for entry in (0..usize::from(vectors)).map(|vector| vector * ENTRY_BYTES) {
            msix.set(entry, &[0; 12], &[0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
            // The mask bit of the entry.
            msix.set(entry + 12, &[1], &[1]);
        }
        PciFunction { config, msix }
    }

    /// Saves its state, as the difference from a function after reset.
    pub(crate) fn snapshot(&self, reset: &PciFunction) -> PciSnapshot {
        PciSnapshot { config: self.config.difference(&reset.config), msix: self.msix.difference(&reset.msix) }
    }

    /// Restores the writable bits of a saved state; unset for a state with a word that this function cannot have.
    pub(crate) fn restore(&mut self, saved: &PciSnapshot) -> Option<()> {
        for &(offset, word) in &saved.config {
            self.config.is_writable(usize::from(offset)).then_some(())?;
            self.write_config(u64::from(offset), &word.to_le_bytes())?;
        }
        for &(offset, word) in &saved.msix {
            self.msix.is_writable(usize::from(offset)).then_some(())?;
            self.write_msix(u64::from(offset), &word.to_le_bytes())?;
        }
        Some(())
    }

    /// Whether a write of configuration space initiates a function level reset.
    pub(crate) fn is_reset(offset: u64, from: &[u8]) -> bool {
        let at = (RESET_AT as u64).checked_sub(offset).and_then(|at| usize::try_from(at).ok());
        at.and_then(|at| from.get(at)).is_some_and(|byte| byte & RESET != 0)
    }

    /// Whether the function is in power state D3hot: it answers accesses to configuration space only.
    pub(crate) fn is_off(&self) -> bool {
        self.config.bytes[POWER_CONTROL_AT] & POWER_STATE == D3_HOT
    }

    /// Reads configuration space; unset for an access outside of it.
    pub(crate) fn read_config(&self, offset: u64, to: &mut [u8]) -> Option<()> {
        self.config.read(offset, to)
    }

    /// Writes the writable bits of configuration space.
    pub(crate) fn write_config(&mut self, offset: u64, from: &[u8]) -> Option<()> {
        let state = self.config.bytes[POWER_CONTROL_AT];
        self.config.write(offset, from)?;
        // A write of a state that the function does not have changes nothing.
        let now = &mut self.config.bytes[POWER_CONTROL_AT];
        if ![D0, D3_HOT].contains(&(*now & POWER_STATE)) {
            *now = state;
        }
        Some(())
    }

    /// Reads BAR 4.
    pub(crate) fn read_msix(&self, offset: u64, to: &mut [u8]) -> Option<()> {
        self.msix.read(offset, to)
    }

    /// Writes the writable bits of BAR 4.
    pub(crate) fn write_msix(&mut self, offset: u64, from: &[u8]) -> Option<()> {
        self.msix.write(offset, from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function() -> PciFunction {
        PciFunction::new(NvmePciId::default(), 0x2000, 5)
    }

    fn word(function: &PciFunction, at: usize) -> u32 {
        let mut word = [0; 4];
        function.read_config(at as u64, &mut word).unwrap();
        u32::from_le_bytes(word)
    }

    #[test]
    fn the_size_of_a_bar_is_found_by_writing_ones() {
        let mut function = function();
        function.write_config(0x10, &[0xff; 4]).unwrap();
        assert_eq!(word(&function, 0x10), 0xffff_e004);
        function.write_config(0x00, &[0xff; 4]).unwrap();
        assert_eq!(word(&function, 0), 0x0001_4e58, "vendor and device are read-only");
        assert_eq!(word(&function, 0x40) & 0xffff_00ff, 0x0004_0011, "MSI-X with five vectors");
    }

    #[test]
    fn a_host_finds_the_capabilities_of_an_express_endpoint() {
        let function = function();
        let mut list = Vec::new();
        let mut at = word(&function, 0x34) as usize;
        while at != 0 {
            assert!(at.is_multiple_of(4) && (0x40..0x100).contains(&at) && list.len() < 8, "{at:#x}");
            let [id, next, ..] = word(&function, at).to_le_bytes();
            list.push((id, at));
            at = usize::from(next);
        }
        assert_eq!(list, [(MSIX_ID, 0x40), (POWER_ID, 0x50), (EXPRESS_ID, 0x60)]);
        assert_eq!(word(&function, 0x60) >> 16, 0x0002, "version 2, endpoint");
        assert_eq!(word(&function, 0x64), 0x1000_8000, "function level reset, role-based errors");
        assert_eq!(word(&function, 0x68), 0x2810);
        assert_eq!((word(&function, 0x6c) & 0x3ff, word(&function, 0x70) >> 16), (0x11, 0x11), "2.5 GT/s, x1");
        for at in (0x9c..CONFIG_BYTES).step_by(4) {
            assert_eq!(word(&function, at), 0, "{at:#x}: no extended capability");
        }
    }

    #[test]
    fn a_function_has_two_power_states() {
        let mut function = function();
        // D1 and D2 do not exist; other bits of the register cannot be written.
        for (value, state) in [(0x03, D3_HOT), (0x01, D3_HOT), (0x02, D3_HOT), (0xfc, D0), (0x02, D0), (0xff, D3_HOT)] {
            function.write_config(POWER_CONTROL_AT as u64, &[value, 0xff]).unwrap();
            assert_eq!(word(&function, POWER_CONTROL_AT), u32::from(POWER_KEPT) | u32::from(state), "{value:#x}");
            assert_eq!(function.is_off(), state == D3_HOT);
        }
    }

    #[test]
    fn any_write_that_sets_the_bit_resets_the_function() {
        let function = function();
        for (offset, bytes, is_reset) in [
            (RESET_AT, &[0x80][..], true),
            (RESET_AT - 1, &[0x00, 0xa8], true),
            (RESET_AT - 1, &[0x80], false),
            (RESET_AT + 1, &[0x80], false),
            (RESET_AT, &[0x7f], false),
            (RESET_AT, &[], false),
            (0, &[0xff; CONFIG_BYTES], true),
        ] {
            assert_eq!(PciFunction::is_reset(offset as u64, bytes), is_reset, "{offset:#x} {}", bytes.len());
        }
        assert!(!PciFunction::is_reset(u64::MAX, &[0xff; 16]));
        let mut written = function.clone();
        written.write_config(0x68, &[0xff; 4]).unwrap();
        assert_eq!(word(&written, 0x68), 0x781f | 0x2810, "the bit reads as zero");
    }

    #[test]
    fn random_accesses_change_writable_bits_only() {
        let mut function = function();
        let before = function.clone();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for _ in 0..20_000 {
            let (offset, len) = (next() % 4200, next() as usize % 70);
            let mut bytes: Vec<_> = (0..len).map(|_| next() as u8).collect();
            let is_inside = offset + len as u64 <= CONFIG_BYTES as u64;
            assert_eq!(function.write_config(offset, &bytes).is_some(), is_inside);
            assert_eq!(function.write_msix(offset, &bytes).is_some(), is_inside);
            assert_eq!(function.read_config(offset, &mut bytes).is_some(), is_inside);
            assert!(matches!(function.config.bytes[POWER_CONTROL_AT] & POWER_STATE, D0 | D3_HOT));
        }
        let is_kept = |now: &MaskedBytes, before: &MaskedBytes| {
            (0..now.bytes.len()).all(|at| (now.bytes[at] ^ before.bytes[at]) & !now.writable[at] == 0)
        };
        assert!(is_kept(&function.config, &before.config) && is_kept(&function.msix, &before.msix));
        let mut restored = before.clone();
        restored.restore(&function.snapshot(&before)).unwrap();
        assert_eq!((restored.config.bytes, restored.msix.bytes), (function.config.bytes, function.msix.bytes));
    }

    #[test]
    fn saved_state_has_what_the_host_wrote() {
        let reset = function();
        assert_eq!(reset.snapshot(&reset), PciSnapshot { config: vec![], msix: vec![] });
        let mut function = function();
        function.write_config(0x04, &[0x06, 0x04]).unwrap();
        function.write_config(0x10, &[0, 0, 0xc0, 0xfe]).unwrap();
        function.write_config(POWER_CONTROL_AT as u64, &[D3_HOT]).unwrap();
        function.write_msix(2 * 16, &[0xff; 16]).unwrap();
        let saved = function.snapshot(&reset);
        assert_eq!((saved.config.len(), saved.msix.len()), (3, 3), "of vectors, those in use");
        let mut other = reset.clone();
        other.restore(&saved).unwrap();
        assert_eq!((&other.config.bytes, &other.msix.bytes), (&function.config.bytes, &function.msix.bytes));
        assert!(other.is_off());
        let mut other = PciFunction::new(NvmePciId { vendor: 1, device: 2 }, 0x2000, 5);
        other.restore(&saved).unwrap();
        assert_eq!(other.config.bytes[..4], [1, 0, 2, 0], "read-only bits are those of the new function");
        for (config, msix) in [
            (vec![(0x9c, 1)], vec![]),
            (vec![(4096, 1)], vec![]),
            (vec![(u16::MAX, 1)], vec![]),
            (vec![], vec![(5 * 16, 1)]),
            (vec![], vec![(4095, 1)]),
        ] {
            assert_eq!(reset.clone().restore(&PciSnapshot { config, msix }), None, "no such register");
        }
    }

    #[test]
    fn accesses_that_leave_a_region_are_refused() {
        let mut function = function();
        for (offset, len) in [(4096, 1), (4095, 2), (u64::MAX, 1), (u64::MAX - 1, 4), (0, 4097)] {
            assert_eq!(function.read_config(offset, &mut vec![0; len]), None, "{offset:#x}");
            assert_eq!(function.write_config(offset, &vec![0; len]), None, "{offset:#x}");
        }
        assert_eq!(function.write_msix(4095, &[0; 2]), None);
        let mut control = [0];
        function.write_msix(5 * 16 + 12, &[1]).unwrap();
        function.read_msix(5 * 16 + 12, &mut control).unwrap();
        assert_eq!(control, [0], "there is no sixth vector");
    }
}
