//! The memory a client shares with the controller: DMA mappings by descriptor.
//!
//! The region of a mapping has the same number, its slot, for as long as it is mapped, so that queues can run while
//! others are mapped and unmapped. A mapping that is removed keeps its slot, without an address, until no request
//! names it.
//!
//! A mapping with the permission to read or write only is used for that. A mapping without a descriptor, without
//! permissions, or of a file that may only be read, is accepted but not mapped. A command that uses memory without the
//! permission or mapping fails with Data Transfer Error or Invalid Field, as for an unmapped address.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use blkyard_mem::{EXPORT_BYTES_MAX, EXPORT_REGIONS_MAX, MapError, Region, RegionTable};
use blkyard_nvme::{DmaMap, DmaRange, DmaRights, RegionSet};
use blkyard_wire::vfio_user::{DmaMapFlags, DmaMapRequest, DmaUnmapRequest};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Maximum number of mappings of a client, announced in the version message.
pub(crate) const MAPS_MAX: usize = 128;
/// First slot of a mapping. The controller's own memory is before it.
const FIRST_SLOT: usize = 1;
/// Regions of the controller itself: its bounce memory, of which a reset makes another.
const OWN_REGIONS: usize = 2;
const _: () = assert!(MAPS_MAX + OWN_REGIONS <= EXPORT_REGIONS_MAX, "one client could use up the memory of others");
const _: () = assert!(FIRST_SLOT + MAPS_MAX <= RegionSet::EXACT as usize, "slots could be taken for each other");
/// Page size of mappings, bytes.
pub(crate) const PAGE: u64 = 4096;

/// Reason for refusing a mapping. Earlier mappings stay.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DmaError {
    #[error("more than {MAPS_MAX} mappings")]
    TooMany,
    #[error("{0:#x}: more than {EXPORT_BYTES_MAX} bytes are mapped with this one")]
    TooLong(u64),
    #[error("{0:#x}: address, size and offset are not in pages of 4096 bytes")]
    Unaligned(u64),
    #[error("{0:#x}: overlaps with another mapping")]
    Overlap(u64),
    #[error("{0:#x}: only a part of this mapping is in the range")]
    Part(u64),
    #[error("{address:#x}: {source}")]
    Map { address: u64, source: MapError },
}

impl DmaError {
    /// Errno for the client.
    pub(crate) fn errno(&self) -> Errno {
        match self {
            DmaError::TooMany | DmaError::TooLong(_) => Errno::NOSPC,
            DmaError::Overlap(_) => Errno::EXIST,
            DmaError::Unaligned(_) | DmaError::Part(_) | DmaError::Map { .. } => Errno::INVAL,
        }
    }
}

/// A mapping as plain data beside its file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DmaMappingSnapshot {
    address: u64,
    size: u64,
    /// Offset in the file; unset if the mapping is accepted but not mapped.
    offset: Option<u64>,
    /// Permissions as the client gave them, if not both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    flags: Option<u32>,
}

/// A mapping; the region is unset if the mapping is accepted but not mapped.
#[derive(Clone, Debug)]
struct DmaSlot {
    address: u64,
    size: u64,
    rights: DmaRights,
    region: Option<Arc<Region>>,
    /// Slot of its region, from [`FIRST_SLOT`] on.
    number: usize,
    /// Whether it is removed, and requests may still name its region.
    is_leaving: bool,
}

/// The current mappings, and those that are leaving. A change makes a new list, so a refused change has no effect.
#[derive(Clone, Debug, Default)]
pub(crate) struct DmaSlots(Vec<DmaSlot>);

impl DmaSlots {
    /// Returns these mappings and one more.
    pub(crate) fn with(&self, request: &DmaMapRequest, file: Option<OwnedFd>) -> Result<DmaSlots, DmaError> {
        let DmaMapRequest { flags, offset, address, size } = *request;
        if self.0.len() == MAPS_MAX {
            return Err(DmaError::TooMany);
        }
        let end = address.checked_add(size).filter(|_| size > 0 && (address | size | offset).is_multiple_of(PAGE));
        let end = end.ok_or(DmaError::Unaligned(address))?;
        if self.0.iter().any(|slot| address < slot.address + slot.size && slot.address < end) {
            return Err(DmaError::Overlap(address));
        }
        // Also those that are leaving take addresses.
        if file.is_some() && self.bytes().checked_add(size).is_none_or(|bytes| bytes > EXPORT_BYTES_MAX) {
            return Err(DmaError::TooLong(address));
        }
        let rights = rights_of(flags);
        // Mapped for both in this process: other devices that get the memory expect that.
        let map = |file: OwnedFd| match Region::map_file(file.as_fd(), offset, size) {
            Err(MapError::System(error)) if error.kind() == io::ErrorKind::PermissionDenied && !flags.is_all() => {
                Ok(None)
            }
            mapped => mapped.map(Some),
        };
        let region = file.filter(|_| rights.is_some()).map_or(Ok(None), map);
        let region = region.map_err(|source| DmaError::Map { address, source })?;
        let rights = rights.unwrap_or_default();
        let mut slots = self.0.clone();
        let is_free = |number: &usize| slots.iter().all(|slot| slot.number != *number);
        let number = (FIRST_SLOT..=MAPS_MAX).find(is_free).ok_or(DmaError::TooMany)?;
        slots.push(DmaSlot { address, size, rights, region, number, is_leaving: false });
        Ok(DmaSlots(slots))
    }

    /// Returns these mappings; those in a range, or all, are leaving if they are mapped, or not there. As with VFIO of
    /// the kernel, a range may have several mappings or none, but no part of one: QEMU unmaps so when a guest changes
    /// the domain of its IOMMU.
    pub(crate) fn without(&self, request: &DmaUnmapRequest) -> Result<DmaSlots, DmaError> {
        let range = match *request {
            DmaUnmapRequest::Range { address, size } => address..=address + (size - 1),
            DmaUnmapRequest::All => 0..=u64::MAX,
        };
        let mut slots = Vec::with_capacity(self.0.len());
        for slot in &self.0 {
            let last = slot.address + (slot.size - 1);
            if last < *range.start() || slot.address > *range.end() {
                slots.push(slot.clone());
            } else if !range.contains(&slot.address) || !range.contains(&last) {
                return Err(DmaError::Part(slot.address));
            } else if slot.region.is_some() {
                slots.push(DmaSlot { is_leaving: true, ..slot.clone() });
            }
        }
        Ok(DmaSlots(slots))
    }

    /// Removes the mappings that are leaving, since no request names them any more. Returns whether there were any.
    pub(crate) fn remove_leaving(&mut self) -> bool {
        let before = self.0.len();
        self.0.retain(|slot| !slot.is_leaving);
        self.0.len() < before
    }

    /// Whether a controller finds the same memory by both.
    pub(crate) fn is_same(&self, other: &DmaSlots) -> bool {
        let mapped = |slots: &'_ DmaSlots| -> Vec<_> {
            slots.0.iter().filter(|slot| slot.region.is_some()).map(|slot| (slot.number, slot.is_leaving)).collect()
        };
        mapped(self) == mapped(other)
    }

    /// Saves the mappings, and adds duplicates of their files.
    pub(crate) fn snapshot(&self, files: &mut Vec<OwnedFd>) -> io::Result<Vec<DmaMappingSnapshot>> {
        let save = |&DmaSlot { address, size, rights, ref region, .. }: &DmaSlot| {
            let file = region.as_ref().and_then(|region| region.file());
            let file = file.map(|(file, offset)| Ok::<_, io::Error>((file.try_clone_to_owned()?, offset)));
            let offset = file.transpose()?.map(|(file, offset)| {
                files.push(file);
                offset
            });
            let flags = (rights != DmaRights::ReadWrite).then(|| flags_of(rights).bits());
            Ok(DmaMappingSnapshot { address, size, offset, flags })
        };
        self.0.iter().map(save).collect()
    }

    /// The saved mappings. Their files are next.
    pub(crate) fn restore(
        saved: &[DmaMappingSnapshot],
        files: &mut impl Iterator<Item = OwnedFd>,
    ) -> Result<DmaSlots, String> {
        let mut slots = DmaSlots::default();
        for &DmaMappingSnapshot { address, size, offset, flags } in saved {
            let flags = flags.map_or(DmaMapFlags::all(), DmaMapFlags::from_bits_truncate);
            let request = DmaMapRequest { flags, offset: offset.unwrap_or(0), address, size };
            let file = offset.map(|_| files.next().ok_or("descriptors are missing")).transpose()?;
            slots = slots.with(&request, file).map_err(|error| error.to_string())?;
        }
        Ok(slots)
    }

    /// Number of mappings.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Bytes of the mapped memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().filter(|slot| slot.region.is_some()).map(|slot| slot.size).sum()
    }

    /// The memory as the controller accesses it. Slot 0 is empty, for its own memory.
    pub(crate) fn map(&self) -> DmaMap {
        let (mut table, mut ranges) = (vec![None; FIRST_SLOT], Vec::with_capacity(self.0.len()));
        for &DmaSlot { address, size, rights, ref region, number, is_leaving } in &self.0 {
            let Some(region) = region else { continue };
            table.resize(table.len().max(number + 1), None);
            table[number] = Some(Arc::clone(region));
            if !is_leaving {
                let range = DmaRange { addr: address, len: size, region: number as u32, offset: 0 };
                ranges.push((range, rights));
            }
        }
        let table = Arc::new(RegionTable::of_slots(table));
        DmaMap::with_rights(table, ranges).unwrap_or_else(|error| unreachable!("each mapping was checked: {error}"))
    }
}

/// Rights of the controller by a client's permissions, if there are any.
fn rights_of(flags: DmaMapFlags) -> Option<DmaRights> {
    match (flags.contains(DmaMapFlags::READ), flags.contains(DmaMapFlags::WRITE)) {
        (true, true) => Some(DmaRights::ReadWrite),
        (true, false) => Some(DmaRights::ReadOnly),
        (false, true) => Some(DmaRights::WriteOnly),
        (false, false) => None,
    }
}

/// The permissions for which [`rights_of`] gives these rights.
fn flags_of(rights: DmaRights) -> DmaMapFlags {
    match rights {
        DmaRights::ReadWrite => DmaMapFlags::all(),
        DmaRights::ReadOnly => DmaMapFlags::READ,
        DmaRights::WriteOnly => DmaMapFlags::WRITE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_mappings_keep_their_rights() {
        let mut slots = DmaSlots::default();
        for flags in 0..=3 {
            let (flags, region) = (DmaMapFlags::from_bits_truncate(flags), Region::shared(0x1000).unwrap());
            let address = u64::from(flags.bits()) << 12;
            let file = region.file().map(|(file, _)| file.try_clone_to_owned().unwrap());
            slots = slots.with(&DmaMapRequest { flags, offset: 0, address, size: 0x1000 }, file).unwrap();
        }
        let mut files = Vec::new();
        let saved = slots.snapshot(&mut files).unwrap();
        assert_eq!((files.len(), saved[3].flags), (3, None), "both are the usual case");
        let restored = DmaSlots::restore(&saved, &mut files.into_iter()).unwrap().map();
        for (access, found) in
            [(DmaRights::ReadOnly, [false, true, false, true]), (DmaRights::WriteOnly, [false, false, true, true])]
        {
            let is_found = |page: u64| restored.segment(page << 12, 8, access).is_some();
            assert_eq!([0, 1, 2, 3].map(is_found), found, "{access:?}");
        }
    }
}
