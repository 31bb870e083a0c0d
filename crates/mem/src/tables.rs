//! Memory for the address tables of a DMA domain: a few shared regions, parted among the tables.
//!
//! A device reaches a limited number of regions (a server of vfio-user may take as few as 128), and each costs a
//! descriptor. So tables are parts of regions that grow with what is needed, and a region goes with its last table.
//!
//! Owned by the domain. It maps nothing: the holder of a table lists its region with the domain.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::{DmaDomain, PAGE_BYTES, Region};

/// Bytes of the smallest region: tables of 256 MiB of buffers. Larger ones follow, as large as all before together, so
/// that their number stays small, and at most half of what a device pins is unused.
const REGION_BYTES_MIN: usize = 1 << 20;

/// The regions with tables of a domain.
#[derive(Debug, Default)]
pub(crate) struct TablePool {
    regions: Mutex<Vec<TableRegion>>,
}

/// A region that tables share. It lives as long as a table in it.
#[derive(Debug)]
struct TableRegion {
    region: Weak<Region>,
    bytes: usize,
    /// Free parts in order, none next to another.
    free: Vec<Range<usize>>,
}

/// Memory of one table, until it is dropped.
#[derive(Debug)]
pub(crate) struct TableMemory {
    domain: Arc<DmaDomain>,
    pub(crate) region: Arc<Region>,
    /// First byte; a multiple of a page.
    pub(crate) offset: usize,
    /// Whole pages.
    pub(crate) len: usize,
}

impl TablePool {
    fn lock(&self) -> MutexGuard<'_, Vec<TableRegion>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TableMemory {
    /// Memory for a table of so many bytes.
    ///
    /// # Errors
    /// The system has no more.
    pub(crate) fn new(domain: &Arc<DmaDomain>, bytes: usize) -> io::Result<TableMemory> {
        let len = bytes.next_multiple_of(PAGE_BYTES);
        let table = |region, offset| TableMemory { domain: Arc::clone(domain), region, offset, len };
        let mut regions = domain.tables().lock();
        for shared in regions.iter_mut() {
            // A table that is dropped at this moment gives its part back to a region that may be gone.
            let Some(region) = shared.region.upgrade() else { continue };
            if let Some(offset) = shared.take(len) {
                return Ok(table(region, offset));
            }
        }
        regions.retain(|shared| shared.region.strong_count() > 0);
        let all: usize = regions.iter().map(|shared| shared.bytes).sum();
        let bytes = len.max(all).max(REGION_BYTES_MIN);
        let region = Region::shared(bytes)?;
        let mut free = Vec::new();
        free.extend((len < bytes).then_some(len..bytes));
        regions.push(TableRegion { region: Arc::downgrade(&region), bytes, free });
        Ok(table(region, 0))
    }
}

impl TableRegion {
    /// Takes the first free part of this length.
    fn take(&mut self, len: usize) -> Option<usize> {
        let number = self.free.iter().position(|part| part.len() >= len)?;
        let part = &mut self.free[number];
        let offset = part.start;
        part.start += len;
        if part.start == part.end {
            self.free.remove(number);
        }
        Some(offset)
    }

    /// Gives a part back.
    fn give_back(&mut self, part: Range<usize>) {
        let number = self.free.partition_point(|free| free.start < part.start);
        self.free.insert(number, part);
        self.free.dedup_by(|next, part| {
            let joins = part.end == next.start;
            part.end = if joins { next.end } else { part.end };
            joins
        });
    }
}

impl Drop for TableMemory {
    fn drop(&mut self) {
        let mut regions = self.domain.tables().lock();
        let ours = |shared: &&mut TableRegion| std::ptr::eq(shared.region.as_ptr(), Arc::as_ptr(&self.region));
        if let Some(shared) = regions.iter_mut().find(ours) {
            shared.give_back(self.offset..self.offset + self.len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_BYTES;

    fn places(domain: &Arc<DmaDomain>) -> usize {
        domain.tables().lock().iter().filter(|shared| shared.region.strong_count() > 0).count()
    }

    #[test]
    fn tables_share_a_few_regions_and_never_overlap() {
        let domain = DmaDomain::new(|| ());
        let sizes = [1, PAGE, 3 * PAGE, 17 * PAGE, 300 * PAGE];
        let mut tables = Vec::new();
        let mut random = 7_u64;
        for _ in 0..2000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = (random >> 33) as usize;
            if number % 5 < 3 {
                tables.push(TableMemory::new(&domain, sizes[number % sizes.len()]).unwrap());
            } else if !tables.is_empty() {
                tables.swap_remove(number % tables.len());
            }
            let mut parts: Vec<_> = tables.iter().map(|t| (Arc::as_ptr(&t.region), t.offset, t.len)).collect();
            parts.sort_unstable();
            assert!(parts.windows(2).all(|pair| pair[0].0 != pair[1].0 || pair[0].1 + pair[0].2 <= pair[1].1));
            assert!(tables.iter().all(|table| table.offset + table.len <= table.region.len()));
        }
        assert!(tables.len() > 100 && places(&domain) < 12, "{} regions for {}", places(&domain), tables.len());
    }

    #[test]
    fn a_region_goes_with_its_last_table_and_is_filled_again_before() {
        let domain = DmaDomain::new(|| ());
        let mut tables: Vec<_> = (0..256).map(|_| TableMemory::new(&domain, PAGE).unwrap()).collect();
        assert_eq!(places(&domain), 1);
        let kept = tables.split_off(255);
        drop(tables);
        let whole = TableMemory::new(&domain, 255 * PAGE).unwrap();
        assert!(Arc::ptr_eq(&whole.region, &kept[0].region), "free parts are joined");
        assert!(!Arc::ptr_eq(&TableMemory::new(&domain, PAGE).unwrap().region, &whole.region));
        drop((whole, kept));
        assert_eq!(places(&domain), 0);
        assert_eq!(Arc::strong_count(&domain), 1);
    }
}
