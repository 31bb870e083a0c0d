//! Memory of this process that a device reaches through its IOMMU: the regions of its domain.
//!
//! A mapped region is pinned, and counts as locked memory of this process. It stays alive until it is unmapped.
//!
//! Pages that the owner of a region gives back (a balloon, reports of free pages, memory that is unplugged) stay pinned
//! for the device, and the owner finds others in their place (ADR 28). Regions of others are therefore watched: pinning
//! them has allocated all their pages, so that fewer are a sign of it.

use std::io;
use std::sync::Arc;

use blkyard_mem::{DmaDomain, PAGE_BYTES, Region};
use rustix::fs::fstat;
use rustix::process::{Resource, getrlimit};

use crate::vfio::address_space::AddressSpace;
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
    /// Whether it was unmapped as pages of it were given back. Its place stays taken while it is listed: commands that
    /// name it may be in flight, and must not reach memory that is mapped there next.
    is_returned: bool,
}

/// The I/O address space of a device, and the memory mapped there.
#[derive(Debug)]
pub(super) struct VfioMemory {
    device: PciAddress,
    space: AddressSpace,
    iovas: IovaSpace,
    listed: Vec<MappedRegion>,
    /// Changes of the domain's list handled so far.
    seen: u64,
    /// Bytes that were unmapped as pages of them were given back, and of which nobody was told yet.
    returned_bytes: u64,
}

impl VfioMemory {
    pub(super) fn new(device: PciAddress, space: AddressSpace) -> Result<VfioMemory, VfioError> {
        let [call, _] = space.calls();
        let ranges = space.iova_ranges().map_err(|source| VfioError::System { device, call, source })?;
        if ranges.is_empty() {
            return Err(VfioError::Part { device, what: "list of usable I/O addresses (Linux 5.4)" });
        }
        let (iovas, listed) = (IovaSpace::new(ranges), Vec::new());
        Ok(VfioMemory { device, space, iovas, listed, seen: 0, returned_bytes: 0 })
    }

    /// Maps new regions of the domain and unmaps removed ones.
    ///
    /// # Errors
    /// A region cannot be mapped. It has no address then, and is tried again once another was unmapped; the others are
    /// mapped.
    pub(super) fn sync(&mut self, domain: &DmaDomain) -> Result<(), VfioError> {
        // Read before the list: a later change is handled next time.
        let changes = domain.changes();
        if changes == self.seen {
            return Ok(());
        }
        // Before more of their files is allocated.
        self.look_for_returned();
        let wanted = domain.regions();
        let (stay, go): (Vec<_>, Vec<_>) = std::mem::take(&mut self.listed)
            .into_iter()
            .partition(|listed| wanted.iter().any(|region| Arc::ptr_eq(region, &listed.region)));
        self.listed = stay;
        let mut has_room = false;
        for listed in go {
            has_room |= self.unmap(&listed);
        }
        self.listed.retain(|listed| listed.place.is_some() || listed.is_returned || !has_room);
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
        self.returned_bytes > 0 || self.listed.iter().any(|listed| listed.is_mapped() && listed.blocks.is_some())
    }

    /// Unmaps the regions of which pages were given back. They have no address from then on, and are not mapped again.
    /// Returns the bytes of those since the last call.
    pub(super) fn unmap_returned(&mut self) -> u64 {
        self.look_for_returned();
        std::mem::take(&mut self.returned_bytes)
    }

    fn look_for_returned(&mut self) {
        let VfioMemory { device, space, listed, returned_bytes, .. } = self;
        for listed in listed.iter_mut().filter(|listed| listed.is_mapped()) {
            if blocks(&listed.region) < listed.blocks {
                if !listed.unmap(*device, space) {
                    listed.place = None;
                }
                listed.is_returned = true;
                *returned_bytes += listed.region.len() as u64;
            }
        }
    }

    /// Device address of a byte of a region; unset if the region is not mapped.
    pub(super) fn address(&self, region: &Arc<Region>, offset: u64) -> Option<u64> {
        let listed = &self.listed[self.position(region)?];
        let (start, _) = listed.place.filter(|_| listed.is_mapped())?;
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
        let taken = self.iovas.take(size, align, vaddr % align);
        let mapped = taken.ok_or(VfioError::Addresses { device, bytes }).and_then(|iova| {
            // SAFETY: the pages of a region are mapped as long as it lives, and anyone may write to it; it is listed,
            // and so kept alive, until it is unmapped.
            unsafe { self.space.map(vaddr, iova, size) }.map_err(|error| {
                self.iovas.give_back(iova);
                map_error(device, &self.space, bytes, error)
            })?;
            Ok((iova, size))
        });
        let (place, result) = mapped.map_or_else(|error| (None, Err(error)), |place| (Some(place), Ok(())));
        self.listed.push(MappedRegion { region, place, lead, blocks: None, is_returned: false });
        result
    }

    /// Unmaps a region that is no longer listed, and gives its place back. Returns whether it had one.
    fn unmap(&mut self, listed: &MappedRegion) -> bool {
        let is_free = listed.is_returned || listed.unmap(self.device, &self.space);
        let place = listed.place.filter(|_| is_free);
        place.into_iter().for_each(|(iova, _)| self.iovas.give_back(iova));
        place.is_some()
    }
}

impl MappedRegion {
    /// Whether the device reaches it.
    fn is_mapped(&self) -> bool {
        self.place.is_some() && !self.is_returned
    }

    /// Unmaps it, if it has a place. A region that cannot be unmapped is leaked, with its place: the device may access
    /// it until this process ends.
    fn unmap(&self, device: PciAddress, space: &AddressSpace) -> bool {
        let Some((iova, size)) = self.place else { return true };
        let unmapped = space.unmap(iova, size);
        if let Err(error) = &unmapped {
            tracing::error!("pci:{device}: memory at I/O address {iova:#x} cannot be unmapped: {error}");
            std::mem::forget(Arc::clone(&self.region));
        }
        unmapped.is_ok()
    }
}

impl Drop for VfioMemory {
    fn drop(&mut self) {
        for listed in std::mem::take(&mut self.listed) {
            self.unmap(&listed);
        }
    }
}

/// Allocated blocks of the file of a region; unset if this process made it, and decides alone when its pages go.
fn blocks(region: &Region) -> Option<u64> {
    let (file, _) = region.file().filter(|_| !region.is_own())?;
    fstat(file).ok().map(|found| found.st_blocks.cast_unsigned())
}

fn map_error(device: PciAddress, space: &AddressSpace, bytes: u64, error: io::Error) -> VfioError {
    match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EPERM) => {
            let limit = getrlimit(Resource::Memlock).current;
            let limit = limit.map_or("unlimited".into(), |limit| format!("{limit} bytes"));
            let owner = space.accounted_to();
            let cause = format!("{error}; the limit on locked memory of {owner} is {limit}");
            VfioError::Locked { device, bytes, cause }
        }
        // More mappings than `dma_entry_limit` of the module vfio_iommu_type1.
        Some(libc::ENOSPC) => VfioError::Addresses { device, bytes },
        _ => VfioError::System { device, call: space.calls()[1], source: error },
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

    use super::*;

    const BYTES: u64 = 1 << 20;

    /// Memory of another process, all of whose pages are allocated.
    fn memory_of_others() -> (OwnedFd, Arc<Region>) {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, BYTES).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, BYTES).unwrap();
        let region = Region::map_file(file.as_fd(), 0, BYTES).unwrap();
        (file, region)
    }

    /// Descriptors that refuse each call: what is unmapped there stays mapped, as far as they know.
    fn spaces() -> [AddressSpace; 2] {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let container = AddressSpace::Container { container: null(), _group: null() };
        [container, AddressSpace::Ioas { iommufd: null(), id: 1 }]
    }

    /// Memory with one region listed, in a space that refuses each call.
    fn memory_with(region: &Arc<Region>) -> VfioMemory {
        memory_in(spaces().into_iter().next().unwrap(), region)
    }

    fn memory_in(space: AddressSpace, region: &Arc<Region>) -> VfioMemory {
        let mut iovas = IovaSpace::new(vec![(0, 4 * BYTES - 1)]);
        let place = iovas.take(BYTES, PAGE_BYTES as u64, 0).map(|iova| (iova, BYTES));
        let listed =
            MappedRegion { region: Arc::clone(region), place, lead: 0, blocks: blocks(region), is_returned: false };
        VfioMemory {
            device: "0000:01:00.0".parse().unwrap(),
            space,
            iovas,
            listed: vec![listed],
            seen: 0,
            returned_bytes: 0,
        }
    }

    fn give_back(file: &OwnedFd) {
        fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 8 * 4096, 4096).unwrap();
    }

    #[test]
    fn pages_that_their_owner_gives_back_are_missed() {
        let (file, region) = memory_of_others();
        let mut memory = memory_with(&region);
        assert!(memory.is_watched() && memory.address(&region, 0).is_some());
        assert_eq!(memory.unmap_returned(), 0);
        give_back(&file);
        assert_eq!(memory.unmap_returned(), BYTES);
        assert_eq!((memory.address(&region, 0), memory.is_watched(), memory.unmap_returned()), (None, false, 0));
        assert_eq!(blocks(&Region::shared(4096).unwrap()), None, "no other process gives these back");
    }

    #[test]
    fn pages_missed_as_more_memory_is_mapped_are_told_of_too() {
        let (file, region) = memory_of_others();
        let mut memory = memory_with(&region);
        let domain = DmaDomain::new(|| ());
        let _mapping = domain.map(vec![Arc::clone(&region)]);
        give_back(&file);
        memory.sync(&domain).unwrap();
        assert_eq!(memory.address(&region, 0), None);
        assert!(memory.is_watched(), "the bytes are to be told of");
        assert_eq!((memory.unmap_returned(), memory.is_watched()), (BYTES, false));
    }

    #[test]
    fn place_of_memory_that_was_given_back_stays_taken_while_it_is_listed() {
        let (_file, region) = memory_of_others();
        let mut memory = memory_with(&region);
        let (iova, _) = memory.listed[0].place.unwrap();
        memory.listed[0].is_returned = true;
        assert_ne!(memory.iovas.take(BYTES, PAGE_BYTES as u64, 0), Some(iova));
        let listed = memory.listed.remove(0);
        memory.unmap(&listed);
        assert_eq!(memory.iovas.take(BYTES, PAGE_BYTES as u64, 0), Some(iova), "no command names it any more");
    }

    #[test]
    fn memory_that_could_not_be_mapped_is_tried_again_when_other_memory_has_gone() {
        let (_file, region) = memory_of_others();
        let mut memory = memory_with(&region);
        // Already unmapped, so that its place is free once it is listed no more.
        memory.listed[0].is_returned = true;
        let domain = DmaDomain::new(|| ());
        let first = domain.map(vec![region]);
        let _second = domain.map(vec![Region::shared(4096).unwrap()]);
        assert!(memory.sync(&domain).is_err());
        memory.sync(&domain).unwrap();
        drop(first);
        assert!(memory.sync(&domain).is_err(), "it was not tried again");
        memory.sync(&domain).unwrap();
    }

    #[test]
    fn memory_that_stays_mapped_is_kept_in_both_interfaces() {
        for space in spaces() {
            let (_file, region) = memory_of_others();
            let mut memory = memory_in(space, &region);
            let listed = memory.listed.remove(0);
            let (iova, _) = listed.place.unwrap();
            memory.unmap(&listed);
            drop(listed);
            assert_eq!(Arc::strong_count(&region), 2, "leaked, as the device may access it");
            assert_ne!(memory.iovas.take(BYTES, PAGE_BYTES as u64, 0), Some(iova));
        }
    }

    #[test]
    fn errors_of_a_mapping_name_the_limit_and_the_call() {
        let device = "0000:01:00.0".parse().unwrap();
        let [container, ioas] = spaces();
        let error = |space, code| map_error(device, space, 4096, io::Error::from_raw_os_error(code)).to_string();
        for (space, owner) in [(&container, "this process"), (&ioas, "all processes of this user")] {
            let said = error(space, libc::ENOMEM);
            assert!(said.contains("ulimit -l") && said.contains(owner), "{said}");
            assert!(error(space, libc::ENOSPC).contains("no I/O address is free"));
        }
        assert!(error(&container, libc::EEXIST).contains("VFIO_IOMMU_MAP_DMA failed: File exists"));
        assert!(error(&ioas, libc::EADDRINUSE).contains("IOMMU_IOAS_MAP failed: Address already in use"));
    }
}
