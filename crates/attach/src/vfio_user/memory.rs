//! Process memory mapped by the server: the regions of the domain that have a file.
//!
//! Device addresses equal process addresses. A region stays alive until the server has confirmed that it unmapped it.
//! See `docs/adr/0041-an-nvme-controller-over-vfio-user.md`.

use std::sync::Arc;

use blkyard_mem::{DmaDomain, PAGE_BYTES, Region, Span};
use blkyard_wire::vfio_user::{DmaAccess, DmaMapFlags, DmaMapRequest, DmaUnmapRequest, VfioRequest};

use crate::vfio_user::VfioUserError;
use crate::vfio_user::connection::{DmaMemory, ServerConnection};

/// A region that the domain lists.
#[derive(Debug)]
struct ListedRegion {
    region: Arc<Region>,
    /// Address of its first byte.
    address: u64,
    /// Bytes mapped by the server: whole pages; zero if it cannot map the region.
    mapped: u64,
    /// The domain has dropped it, and the server refuses to unmap it: it stays alive.
    is_condemned: bool,
}

/// Process memory, as mapped by the server.
#[derive(Debug, Default)]
pub(crate) struct ServerMemory {
    listed: Vec<ListedRegion>,
    /// Changes of the domain's list handled so far.
    seen: u64,
}

impl ServerMemory {
    /// Has the server map new regions of the domain and unmap removed ones.
    ///
    /// # Errors
    /// The connection is unusable. A region that the server refuses to map has no address, and is no error; it is tried
    /// again once another was unmapped. One that it refuses to unmap stays alive until the connection ends.
    pub(crate) fn sync(&mut self, connection: &mut ServerConnection, domain: &DmaDomain) -> Result<(), VfioUserError> {
        // Read before the list: a later change is handled next time.
        let changes = domain.changes();
        if changes == self.seen {
            return Ok(());
        }
        let wanted = domain.regions();
        let (mut at, mut has_room) = (0, false);
        while let Some(listed) = self.listed.get_mut(at) {
            let is_wanted = wanted.iter().any(|region| Arc::ptr_eq(region, &listed.region));
            listed.is_condemned &= !is_wanted;
            if is_wanted || listed.is_condemned {
                at += 1;
                continue;
            }
            let unmap = DmaUnmapRequest::Range { address: listed.address, size: listed.mapped };
            if listed.mapped > 0 {
                match connection.call(&VfioRequest::DmaUnmap(unmap), &[], self) {
                    Ok(_) => {}
                    Err(VfioUserError::Refused { .. }) => {
                        self.listed[at].is_condemned = true;
                        continue;
                    }
                    Err(error) => return Err(error),
                }
            }
            has_room |= self.listed.swap_remove(at).mapped > 0;
        }
        self.listed.retain(|listed| listed.mapped > 0 || !has_room);
        for region in wanted {
            if !self.listed.iter().any(|listed| Arc::ptr_eq(&listed.region, &region)) {
                let listed = self.map(connection, region)?;
                self.listed.push(listed);
            }
        }
        self.seen = changes;
        Ok(())
    }

    /// Server address of a byte of a region; `None` if it has not mapped it.
    pub(crate) fn address(&self, region: &Arc<Region>, offset: u64) -> Option<u64> {
        let listed = self.listed.iter().find(|listed| Arc::ptr_eq(&listed.region, region) && !listed.is_condemned)?;
        (offset < listed.mapped).then(|| listed.address + offset)
    }

    fn map(&self, connection: &mut ServerConnection, region: Arc<Region>) -> Result<ListedRegion, VfioUserError> {
        let page = PAGE_BYTES as u64;
        let address = region.span(0, 1).map_or(0, |span| span.as_ptr().addr() as u64);
        let size = region.len() as u64 / page * page;
        let mapped = self.listed.iter().filter(|listed| listed.mapped > 0).count();
        let peer = connection.peer();
        let has_room = mapped < peer.dma_maps && peer.descriptors > 0;
        let Some((file, offset)) = region
            .file()
            .filter(|(_, offset)| has_room && size > 0 && offset.is_multiple_of(page) && address.is_multiple_of(page))
        else {
            return Ok(ListedRegion { region, address, mapped: 0, is_condemned: false });
        };
        let flags = DmaMapFlags::READ | DmaMapFlags::WRITE;
        let map = VfioRequest::DmaMap(DmaMapRequest { flags, offset, address, size });
        let mapped = match connection.call(&map, &[file], self) {
            Ok(_) => size,
            Err(VfioUserError::Refused { .. }) => 0,
            Err(error) => return Err(error),
        };
        Ok(ListedRegion { region, address, mapped, is_condemned: false })
    }

    fn span(&self, access: DmaAccess) -> Option<Span<'_>> {
        self.listed.iter().find_map(|listed| {
            let offset = access.address.checked_sub(listed.address)?;
            let is_inside = offset.checked_add(u64::from(access.count)).is_some_and(|end| end <= listed.mapped);
            is_inside.then(|| listed.region.span(offset, access.count as usize)).flatten()
        })
    }
}

impl DmaMemory for ServerMemory {
    fn read(&self, access: DmaAccess, to: &mut [u8]) -> bool {
        self.span(access).map(|span| span.copy_to_slice(to)).is_some()
    }

    fn write(&self, access: DmaAccess, from: &[u8]) -> bool {
        self.span(access).map(|span| span.copy_from_slice(from)).is_some()
    }
}
