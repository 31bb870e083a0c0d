//! The memory shared by a front-end: a table of regions, received as a whole or region by region.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkyard_mem::{EXPORT_BYTES_MAX, EXPORT_REGIONS_MAX, MapError, Region, RegionTable, View};
use blkyard_virtio::{GuestMemory, GuestRange};

/// Maximum number of regions of a front-end: the number of memory slots in QEMU in practice.
pub(crate) const SLOTS_MAX: usize = 64;
// With a record and a log, and all of them twice while they are replaced.
const _: () = assert!(2 * (SLOTS_MAX + 2) <= EXPORT_REGIONS_MAX, "one front-end could use up the memory of others");

/// Size of the low memory that a guest with a running driver has written: the first MiB holds the BIOS vectors and data
/// of a PC, or a kernel's parameters and tables.
const LOW_BYTES: u64 = 1 << 20;

/// A region in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Announced {
    pub(crate) guest_addr: u64,
    pub(crate) user_addr: u64,
    pub(crate) len: u64,
    pub(crate) file_offset: u64,
}

impl Announced {
    /// A region as described by a message.
    pub(crate) fn words(&self) -> [u64; 4] {
        [self.guest_addr, self.len, self.user_addr, self.file_offset]
    }
}

/// Error of a memory table. The previous one stays.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error("guest memory at {guest_addr:#x}: {source}")]
    Map { guest_addr: u64, source: MapError },
    #[error("more than {SLOTS_MAX} memory regions; share fewer, larger ones")]
    TooMany,
    #[error("more than {EXPORT_BYTES_MAX} bytes of memory regions, dirty log and in-flight memory; share less memory")]
    TooLong,
    #[error("no memory region at {0:#x} to remove")]
    Unknown(u64),
    #[error("guest memory: {0}")]
    Overlap(String),
}

/// Checks that mappings of these lengths take no more addresses than an export has.
pub(crate) fn check_bytes(lengths: &[u64]) -> Result<(), MemoryError> {
    let bytes = lengths.iter().try_fold(0_u64, |bytes, len| bytes.checked_add(*len));
    if bytes.is_some_and(|bytes| bytes <= EXPORT_BYTES_MAX) { Ok(()) } else { Err(MemoryError::TooLong) }
}

/// The current regions.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    slots: Vec<(Announced, Arc<Region>)>,
}

impl Memory {
    /// The regions as the queues see them.
    pub(crate) fn snapshot(&self) -> Result<Arc<GuestMemory>, MemoryError> {
        let mut table = RegionTable::default();
        let ranges = self.slots.iter().map(|(announced, region)| GuestRange {
            guest_addr: announced.guest_addr,
            user_addr: announced.user_addr,
            len: announced.len,
            region: table.insert(Arc::clone(region)),
            offset: 0,
        });
        let ranges = ranges.collect();
        let memory = GuestMemory::new(Arc::new(table), ranges);
        memory.map(Arc::new).map_err(|error| MemoryError::Overlap(error.to_string()))
    }

    /// Its regions.
    pub(crate) fn regions(&self) -> Vec<Arc<Region>> {
        self.slots.iter().map(|(_, region)| Arc::clone(region)).collect()
    }

    /// Number of regions, and their total bytes.
    pub(crate) fn extent(&self) -> (usize, u64) {
        (self.slots.len(), self.slots.iter().map(|(announced, _)| announced.len).sum())
    }

    /// Whether a front-end address lies in one of the regions.
    pub(crate) fn has_user_addr(&self, addr: u64) -> bool {
        self.slots.iter().any(|(slot, _)| addr.wrapping_sub(slot.user_addr) < slot.len)
    }

    /// Whether the low memory of a guest, from guest address 0, reads as zeros where firmware or a kernel loader always
    /// writes data.
    pub(crate) fn is_blank(&self) -> bool {
        let Some((slot, region)) = self.slots.iter().find(|(slot, _)| slot.guest_addr == 0) else { return false };
        let len = slot.len.min(LOW_BYTES) as usize & !7;
        let Some(view) = View::new(Arc::clone(region), 0, len, 8) else { return false };
        (0..len).step_by(8).all(|offset| view.load_u64(offset, Ordering::Relaxed) == 0)
    }

    /// Each region, with a duplicate of its file.
    pub(crate) fn announced(&self) -> impl Iterator<Item = (Announced, io::Result<OwnedFd>)> {
        self.slots.iter().map(|(announced, region)| {
            let Some((file, _)) = region.file() else { unreachable!("what a front-end shares is a file") };
            (*announced, file.try_clone_to_owned())
        })
    }

    /// Maps a complete new table.
    pub(crate) fn table(announced: &[(Announced, File)]) -> Result<Memory, MemoryError> {
        let mut memory = Memory::default();
        for (announced, file) in announced {
            memory = memory.with(*announced, file)?;
        }
        Ok(memory)
    }

    /// Returns these regions and one more.
    pub(crate) fn with(&self, announced: Announced, file: &File) -> Result<Memory, MemoryError> {
        if self.slots.len() == SLOTS_MAX {
            return Err(MemoryError::TooMany);
        }
        check_bytes(&[self.extent().1, announced.len])?;
        let region = Region::map_file(file.as_fd(), announced.file_offset, announced.len)
            .map_err(|source| MemoryError::Map { guest_addr: announced.guest_addr, source })?;
        let mut slots = self.slots.clone();
        slots.push((announced, region));
        Ok(Memory { slots })
    }

    /// Returns these regions without one, identified by its addresses and size.
    pub(crate) fn without(&self, announced: &Announced) -> Result<Memory, MemoryError> {
        let same = |slot: &Announced| {
            slot.guest_addr == announced.guest_addr
                && slot.user_addr == announced.user_addr
                && slot.len == announced.len
        };
        let mut slots = self.slots.clone();
        let found = slots.iter().position(|(slot, _)| same(slot)).ok_or(MemoryError::Unknown(announced.guest_addr))?;
        slots.remove(found);
        Ok(Memory { slots })
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn regions_take_no_more_addresses_than_an_export_has() {
        // A file without memory.
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, EXPORT_BYTES_MAX).unwrap();
        let half = EXPORT_BYTES_MAX / 2;
        let region = |guest_addr, len| Announced { guest_addr, user_addr: guest_addr, len, file_offset: 0 };
        let memory = Memory::table(&[(region(0, half), file.try_clone().unwrap())]).unwrap();
        let memory = memory.with(region(half, half), &file).unwrap();
        assert!(matches!(memory.with(region(2 * half, 4096), &file), Err(MemoryError::TooLong)));
        assert!(matches!(memory.with(region(2 * half, u64::MAX), &file), Err(MemoryError::TooLong)));
        assert!(memory.without(&region(0, half)).unwrap().with(region(2 * half, 4096), &file).is_ok());
    }
}
