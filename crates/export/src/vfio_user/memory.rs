//! The memory a client shares with the controller: DMA mappings by descriptor.
//!
//! A mapping without a descriptor, or without both read and write permission, is accepted but not mapped. A command
//! that uses it fails with Data Transfer Error or Invalid Field, as for an unmapped address.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use blkyard_mem::{EXPORT_REGIONS_MAX, MapError, Region, RegionTable};
use blkyard_nvme::{DmaMap, DmaRange};
use blkyard_wire::vfio_user::{DmaMapFlags, DmaMapRequest, DmaUnmapRequest};
use rustix::io::Errno;

/// Maximum number of mappings of a client, announced in the version message.
pub(crate) const MAPS_MAX: usize = 128;
const _: () = assert!(MAPS_MAX <= EXPORT_REGIONS_MAX, "one client could use up the memory of others");
/// Page size of mappings, bytes.
pub(crate) const PAGE: u64 = 4096;

/// Reason for refusing a mapping. Earlier mappings stay.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DmaError {
    #[error("more than {MAPS_MAX} mappings")]
    TooMany,
    #[error("{0:#x}: address, size and offset are not in pages of 4096 bytes")]
    Unaligned(u64),
    #[error("{0:#x}: overlaps with another mapping")]
    Overlap(u64),
    #[error("{0:#x}: no such mapping")]
    Unknown(u64),
    #[error("{address:#x}: {source}")]
    Map { address: u64, source: MapError },
}

impl DmaError {
    /// Errno for the client.
    pub(crate) fn errno(&self) -> Errno {
        match self {
            DmaError::TooMany => Errno::NOSPC,
            DmaError::Overlap(_) => Errno::EXIST,
            DmaError::Unknown(_) => Errno::NOENT,
            DmaError::Unaligned(_) | DmaError::Map { .. } => Errno::INVAL,
        }
    }
}

/// A mapping; the region is unset if the mapping is accepted but not mapped.
#[derive(Clone, Debug)]
struct DmaSlot {
    address: u64,
    size: u64,
    region: Option<Arc<Region>>,
}

/// The current mappings. A change makes a new list, so a refused change has no effect.
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
        let file = file.filter(|_| flags.contains(DmaMapFlags::READ | DmaMapFlags::WRITE));
        let region = file.map(|file| Region::map_file(file.as_fd(), offset, size)).transpose();
        let region = region.map_err(|source| DmaError::Map { address, source })?;
        let mut slots = self.0.clone();
        slots.push(DmaSlot { address, size, region });
        Ok(DmaSlots(slots))
    }

    /// Returns these mappings without one, identified by its exact range, or without all.
    pub(crate) fn without(&self, request: &DmaUnmapRequest) -> Result<DmaSlots, DmaError> {
        let DmaUnmapRequest::One { address, size } = *request else { return Ok(DmaSlots::default()) };
        let mut slots = self.0.clone();
        let found = slots.iter().position(|slot| (slot.address, slot.size) == (address, size));
        slots.remove(found.ok_or(DmaError::Unknown(address))?);
        Ok(DmaSlots(slots))
    }

    /// Number of mappings.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The memory as the controller accesses it.
    pub(crate) fn map(&self) -> DmaMap {
        let mut table = RegionTable::default();
        let ranges = self.0.iter().filter_map(|slot| {
            let region = table.insert(Arc::clone(slot.region.as_ref()?));
            Some(DmaRange { addr: slot.address, len: slot.size, region, offset: 0 })
        });
        let ranges = ranges.collect();
        DmaMap::new(Arc::new(table), ranges).unwrap_or_else(|error| unreachable!("each mapping was checked: {error}"))
    }
}
