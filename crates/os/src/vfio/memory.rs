//! Memory of this process that a device reaches through its IOMMU: the regions of its domain.
//!
//! A mapped region is pinned, and counts as locked memory of this process. It stays alive until it is unmapped.
//!
//! Pages that the owner of a region gives back (a balloon, reports of free pages, memory that is unplugged) stay pinned
//! for the device, and the owner finds others in their place (ADR 28). Regions of others are therefore watched: pinning
//! them has allocated all their pages, so that fewer are a sign of it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use blkyard_mem::{DmaDomain, PAGE_BYTES, Region};
use rustix::fs::fstat;
use rustix::process::{Resource, getrlimit};

use crate::vfio::abi;
use crate::vfio::iova::IovaSpace;
use crate::vfio::{PciAddress, VfioError};

/// Bytes of a page that IOMMUs map as a whole if both addresses are aligned to it.
const HUGE_BYTES: u64 = 2 << 20;

/// A region that the domain lists.
#[derive(Debug)]
struct MappedRegion {
    region: Arc<Region>,
    /// Device address of the page with its first byte, and bytes of its pages; unset if it could not be mapped.
    place: Option<(u64, u64)>,
    /// Offset of its first byte in that page.
    lead: u64,
    /// Blocks of its file since it was mapped; unset for memory of this process.
    blocks: Option<u64>,
}

/// The container of a device, and the memory mapped there.
#[derive(Debug)]
pub(super) struct VfioMemory {
    device: PciAddress,
    container: OwnedFd,
    space: IovaSpace,
    listed: Vec<MappedRegion>,
    /// Changes of the domain's list handled so far.
    seen: u64,
}

impl VfioMemory {
    pub(super) fn new(device: PciAddress, container: OwnedFd) -> Result<VfioMemory, VfioError> {
        let ranges = abi::iova_ranges(container.as_fd());
        let ranges = ranges.map_err(|source| VfioError::System { device, call: "VFIO_IOMMU_GET_INFO", source })?;
        if ranges.is_empty() {
            return Err(VfioError::Part { device, what: "list of usable I/O addresses (Linux 5.4)" });
        }
        Ok(VfioMemory { device, container, space: IovaSpace::new(ranges), listed: Vec::new(), seen: 0 })
    }

    /// Maps new regions of the domain and unmaps removed ones.
    ///
    /// # Errors
    /// A region cannot be mapped. It has no address then; the others are mapped.
    pub(super) fn sync(&mut self, domain: &DmaDomain) -> Result<(), VfioError> {
        // Read before the list: a later change is handled next time.
        let changes = domain.changes();
        if changes == self.seen {
            return Ok(());
        }
        // Before more of their files is allocated.
        self.unmap_returned();
        let wanted = domain.regions();
        let (stay, go): (Vec<_>, Vec<_>) = std::mem::take(&mut self.listed)
            .into_iter()
            .partition(|listed| wanted.iter().any(|region| Arc::ptr_eq(region, &listed.region)));
        self.listed = stay;
        for listed in go {
            self.unmap(listed);
        }
        let mut result = Ok(());
        for region in wanted {
            if self.position(&region).is_none() {
                result = self.map(region).and(result);
            }
        }
        // Several regions may be parts of one file, which grew.
        self.listed.iter_mut().for_each(|listed| listed.blocks = blocks(&listed.region));
        self.seen = changes;
        result
    }

    /// Whether memory of others is mapped, which [`unmap_returned`](VfioMemory::unmap_returned) has to look at.
    pub(super) fn is_watched(&self) -> bool {
        self.listed.iter().any(|listed| listed.place.is_some() && listed.blocks.is_some())
    }

    /// Unmaps the regions of which pages were given back. They have no address from then on, and are not mapped again.
    /// Returns their bytes.
    pub(super) fn unmap_returned(&mut self) -> u64 {
        let mut bytes = 0;
        for number in 0..self.listed.len() {
            let listed = &mut self.listed[number];
            if listed.place.is_none() || blocks(&listed.region) >= listed.blocks {
                continue;
            }
            bytes += listed.region.len() as u64;
            let (place, region) = (listed.place.take(), Arc::clone(&listed.region));
            self.unmap(MappedRegion { region, place, lead: 0, blocks: None });
        }
        bytes
    }

    /// Device address of a byte of a region; unset if the region is not mapped.
    pub(super) fn address(&self, region: &Arc<Region>, offset: u64) -> Option<u64> {
        let listed = &self.listed[self.position(region)?];
        let (start, _) = listed.place?;
        (offset < region.len() as u64).then(|| start + listed.lead + offset)
    }

    fn position(&self, region: &Arc<Region>) -> Option<usize> {
        self.listed.iter().position(|listed| Arc::ptr_eq(&listed.region, region))
    }

    fn map(&mut self, region: Arc<Region>) -> Result<(), VfioError> {
        let (device, page) = (self.device, PAGE_BYTES as u64);
        let bytes = region.len() as u64;
        let first = region.span(0, region.len()).map_or(0, |span| span.as_ptr().addr() as u64);
        let (vaddr, lead) = (first / page * page, first % page);
        let size = (lead + bytes).next_multiple_of(page);
        let align = if size < HUGE_BYTES { page } else { HUGE_BYTES };
        let taken = self.space.take(size, align, vaddr % align);
        let mapped = taken.ok_or(VfioError::Addresses { device, bytes }).and_then(|iova| {
            // SAFETY: the pages of a region are mapped as long as it lives, and anyone may write to it; it is listed,
            // and so kept alive, until it is unmapped.
            unsafe { abi::map_dma(self.container.as_fd(), vaddr, iova, size) }.map_err(|error| {
                self.space.give_back(iova);
                map_error(device, bytes, error)
            })?;
            Ok((iova, size))
        });
        let (place, result) = mapped.map_or_else(|error| (None, Err(error)), |place| (Some(place), Ok(())));
        self.listed.push(MappedRegion { region, place, lead, blocks: None });
        result
    }

    /// Unmaps a region. One that cannot be unmapped is leaked: the device may access it until this process ends.
    fn unmap(&mut self, listed: MappedRegion) {
        let Some((iova, size)) = listed.place else { return };
        match abi::unmap_dma(self.container.as_fd(), iova, size) {
            Ok(()) => self.space.give_back(iova),
            Err(error) => {
                tracing::error!("pci:{}: memory at I/O address {iova:#x} cannot be unmapped: {error}", self.device);
                std::mem::forget(listed.region);
            }
        }
    }
}

impl Drop for VfioMemory {
    fn drop(&mut self) {
        for listed in std::mem::take(&mut self.listed) {
            self.unmap(listed);
        }
    }
}

/// Allocated blocks of the file of a region; unset if this process made it, and decides alone when its pages go.
fn blocks(region: &Region) -> Option<u64> {
    let (file, _) = region.file().filter(|_| !region.is_own())?;
    fstat(file).ok().map(|found| found.st_blocks.cast_unsigned())
}

fn map_error(device: PciAddress, bytes: u64, error: io::Error) -> VfioError {
    match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EPERM) => {
            let limit = getrlimit(Resource::Memlock).current;
            let limit = limit.map_or("unlimited".into(), |limit| format!("{limit} bytes"));
            VfioError::Locked { device, bytes, cause: format!("{error}; the limit on locked memory is {limit}") }
        }
        // More mappings than `dma_entry_limit` of the module vfio_iommu_type1.
        Some(libc::ENOSPC) => VfioError::Addresses { device, bytes },
        _ => VfioError::System { device, call: "VFIO_IOMMU_MAP_DMA", source: error },
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn pages_that_their_owner_gives_back_are_missed() {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 1 << 20).unwrap();
        let region = Region::map_file(file.as_fd(), 0, 1 << 20).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
        let whole = blocks(&region);
        assert!(whole.is_some());
        fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 8 * 4096, 4096).unwrap();
        assert!(blocks(&region) < whole);
        assert_eq!(blocks(&Region::shared(4096).unwrap()), None, "no other process gives these back");
    }
}
