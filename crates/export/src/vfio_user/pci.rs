//! The configuration space of the PCI function and its MSI-X table: bytes, with a mask of the writable bits.
//!
//! The client maps the BARs and delivers interrupts by the eventfds of DEVICE_SET_IRQS. The bus master bit and the
//! masks in the table therefore have no effect here.

use serde::{Deserialize, Serialize};

/// Bytes of configuration space.
pub(crate) const CONFIG_BYTES: usize = 256;
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
const MSIX_AT: usize = 0x40;
const MSIX_ID: u8 = 0x11;
/// BAR of the MSI-X table.
const MSIX_BAR: u32 = 4;

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

/// State of the PCI function as plain data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PciSnapshot {
    config: Vec<u8>,
    msix: Vec<u8>,
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
        config.set(MSIX_AT, &[MSIX_ID, 0], &[]);
        // Enable and mask of the function.
        config.set(MSIX_AT + 2, &(vectors - 1).to_le_bytes(), &0xc000_u16.to_le_bytes());
        config.set(MSIX_AT + 4, &MSIX_BAR.to_le_bytes(), &[]);
        config.set(MSIX_AT + 8, &(MSIX_BAR | (MSIX_BYTES as u32 / 2)).to_le_bytes(), &[]);
        let mut msix = MaskedBytes::new(MSIX_BYTES);
        for entry in (0..usize::from(vectors)).map(|vector| vector * ENTRY_BYTES) {
            msix.set(entry, &[0; 12], &[0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
            // The mask bit of the entry.
            msix.set(entry + 12, &[1], &[1]);
        }
        PciFunction { config, msix }
    }

    /// Saves its state: configuration space and BAR 4.
    pub(crate) fn snapshot(&self) -> PciSnapshot {
        PciSnapshot { config: self.config.bytes.clone(), msix: self.msix.bytes.clone() }
    }

    /// Restores the writable bits of a saved state; unset for a state of another size.
    pub(crate) fn restore(&mut self, saved: &PciSnapshot) -> Option<()> {
        let has_size = saved.config.len() == CONFIG_BYTES && saved.msix.len() == MSIX_BYTES;
        self.write_config(0, &saved.config).filter(|()| has_size)?;
        self.write_msix(0, &saved.msix)
    }

    /// Reads configuration space; unset for an access outside of it.
    pub(crate) fn read_config(&self, offset: u64, to: &mut [u8]) -> Option<()> {
        self.config.read(offset, to)
    }

    /// Writes the writable bits of configuration space.
    pub(crate) fn write_config(&mut self, offset: u64, from: &[u8]) -> Option<()> {
        self.config.write(offset, from)
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

    #[test]
    fn the_size_of_a_bar_is_found_by_writing_ones() {
        let mut function = PciFunction::new(NvmePciId::default(), 0x2000, 5);
        let mut word = [0; 4];
        function.write_config(0x10, &[0xff; 4]).unwrap();
        function.read_config(0x10, &mut word).unwrap();
        assert_eq!(u32::from_le_bytes(word), 0xffff_e004);
        function.write_config(0x00, &[0xff; 4]).unwrap();
        function.read_config(0x00, &mut word).unwrap();
        assert_eq!(word, [0x58, 0x4e, 0x01, 0x00], "vendor and device are read-only");
        function.read_config(0x40, &mut word).unwrap();
        assert_eq!(word, [0x11, 0, 4, 0], "MSI-X with five vectors");
    }

    #[test]
    fn saved_state_has_what_the_host_wrote() {
        let mut function = PciFunction::new(NvmePciId::default(), 0x2000, 5);
        function.write_config(0x04, &[0x06, 0x04]).unwrap();
        function.write_config(0x10, &[0, 0, 0xc0, 0xfe]).unwrap();
        function.write_msix(2 * 16, &[0xff; 16]).unwrap();
        let saved = function.snapshot();
        let mut other = PciFunction::new(NvmePciId::default(), 0x2000, 5);
        other.restore(&saved).unwrap();
        assert_eq!((other.config.bytes, other.msix.bytes), (function.config.bytes, function.msix.bytes));
        let mut other = PciFunction::new(NvmePciId { vendor: 1, device: 2 }, 0x2000, 5);
        other.restore(&saved).unwrap();
        assert_eq!(other.config.bytes[..4], [1, 0, 2, 0], "read-only bits are those of the new function");
        let short = PciSnapshot { msix: vec![0; 16], ..saved };
        assert_eq!(other.restore(&short), None);
    }

    #[test]
    fn accesses_that_leave_a_region_are_refused() {
        let mut function = PciFunction::new(NvmePciId::default(), 0x2000, 5);
        for (offset, len) in [(256, 1), (255, 2), (u64::MAX, 1), (u64::MAX - 1, 4), (0, 257)] {
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
