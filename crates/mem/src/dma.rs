//! The memory that a device reaches: mapped once for any number of queues.
//!
//! A [`DmaDomain`] is an address space in which the other side of a device reaches our memory: an IOMMU domain, or the
//! memory table of a back-end. It belongs to the device, and lists the regions to be mapped there. The owner of memory
//! holds a [`DmaMapping`] for as long as I/O may use it; queues hold one of the memory they were given. A region is
//! mapped when its first holder comes, and unmapped when its last one has left.
//!
//! The domain keeps the list. The device, which is told of changes, does the mapping (an ioctl, a message). No I/O path
//! comes here: a queue learns once, with its memory, which regions it can reach.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Region;
use crate::tables::TablePool;

/// An address space in which a device reaches memory.
pub struct DmaDomain {
    mapped: Mutex<MappedRegions>,
    on_change: Box<dyn Fn() + Send + Sync>,
    is_bounced: bool,
    tables: TablePool,
}

/// Regions of a domain, in the order in which they came.
#[derive(Default)]
struct MappedRegions {
    /// Each with the number of its holders.
    regions: Vec<(Arc<Region>, usize)>,
    changes: u64,
}

impl DmaDomain {
    /// A domain without regions. `on_change` is called after each change of the list, on the thread that made it: it
    /// tells the device and does not wait.
    pub fn new(on_change: impl Fn() + Send + Sync + 'static) -> Arc<DmaDomain> {
        DmaDomain::with(Box::new(on_change), false)
    }

    /// A domain in which devices reach copies of registered buffers instead of the buffers, for memory that must not be
    /// mapped itself. Drivers copy the bytes of each I/O: see [`BufferMapping`](crate::BufferMapping).
    pub fn bounced(on_change: impl Fn() + Send + Sync + 'static) -> Arc<DmaDomain> {
        DmaDomain::with(Box::new(on_change), true)
    }

    fn with(on_change: Box<dyn Fn() + Send + Sync>, is_bounced: bool) -> Arc<DmaDomain> {
        Arc::new(DmaDomain { mapped: Mutex::default(), on_change, is_bounced, tables: TablePool::default() })
    }

    /// Memory for tables of addresses of registered buffers.
    pub(crate) fn tables(&self) -> &TablePool {
        &self.tables
    }

    /// Whether devices reach copies of registered buffers.
    pub fn is_bounced(&self) -> bool {
        self.is_bounced
    }

    /// Has these regions mapped for as long as the mapping lives.
    pub fn map(self: &Arc<Self>, regions: Vec<Arc<Region>>) -> DmaMapping {
        let mut mapping = DmaMapping { domain: Arc::clone(self), regions: Vec::new() };
        mapping.replace(regions);
        mapping
    }

    /// The regions to map, each once.
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.lock().regions.iter().map(|(region, _)| Arc::clone(region)).collect()
    }

    /// Number of changes of the list. A device that has seen this number has nothing new to map.
    pub fn changes(&self) -> u64 {
        self.lock().changes
    }

    fn lock(&self) -> MutexGuard<'_, MappedRegions> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MappedRegions {
    fn position(&self, region: &Arc<Region>) -> Option<usize> {
        self.regions.iter().position(|(mapped, _)| Arc::ptr_eq(mapped, region))
    }

    /// One more holder. Says whether the region is new.
    fn add(&mut self, region: &Arc<Region>) -> bool {
        if let Some(number) = self.position(region) {
            self.regions[number].1 += 1;
            return false;
        }
        self.regions.push((Arc::clone(region), 1));
        true
    }

    /// One holder less. Returns the region if that was the last.
    fn remove(&mut self, region: &Arc<Region>) -> Option<Arc<Region>> {
        let number = self.position(region)?;
        self.regions[number].1 -= 1;
        (self.regions[number].1 == 0).then(|| self.regions.remove(number).0)
    }
}

/// Regions of a domain that stay mapped while this lives.
///
/// The holder drops or replaces it only when no request that names these regions is in flight.
pub struct DmaMapping {
    domain: Arc<DmaDomain>,
    regions: Vec<Arc<Region>>,
}

impl DmaMapping {
    /// Replaces all mapped regions by these, as one change: the device never sees both sets, nor neither.
    pub fn replace(&mut self, regions: Vec<Arc<Region>>) {
        let mut mapped = self.domain.lock();
        let mut changed = regions.iter().fold(false, |changed, region| mapped.add(region) | changed);
        let before = std::mem::replace(&mut self.regions, regions);
        let unmapped: Vec<_> = before.iter().filter_map(|region| mapped.remove(region)).collect();
        changed |= !unmapped.is_empty();
        mapped.changes += u64::from(changed);
        drop(mapped);
        if changed {
            (self.domain.on_change)();
        }
    }
}

impl Drop for DmaMapping {
    fn drop(&mut self) {
        self.replace(Vec::new());
    }
}

impl std::fmt::Debug for DmaDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mapped = self.lock();
        f.debug_struct("DmaDomain")
            .field("regions", &mapped.regions)
            .field("changes", &mapped.changes)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for DmaMapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DmaMapping").field("regions", &self.regions).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::*;

    fn domain() -> (Arc<DmaDomain>, Arc<AtomicU64>) {
        let told = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&told);
        let on_change = move || {
            counter.fetch_add(1, Relaxed);
        };
        (DmaDomain::new(on_change), told)
    }

    fn same(domain: &DmaDomain, regions: &[&Arc<Region>]) -> bool {
        let mapped = domain.regions();
        mapped.len() == regions.len() && mapped.iter().zip(regions).all(|(one, other)| Arc::ptr_eq(one, other))
    }

    #[test]
    fn a_region_is_mapped_once_for_all_its_holders() {
        let (domain, told) = domain();
        let [one, two] = [4096, 8192].map(|len| Region::anonymous(len).unwrap());
        let owner = domain.map(vec![Arc::clone(&one), Arc::clone(&two)]);
        let mut queues: Vec<_> = (0..4).map(|_| domain.map(vec![Arc::clone(&one)])).collect();
        assert!(same(&domain, &[&one, &two]));
        assert_eq!((told.load(Relaxed), domain.changes()), (1, 1));
        drop(owner);
        assert!(same(&domain, &[&one]), "the queues still have it");
        queues.truncate(1);
        assert_eq!(told.load(Relaxed), 2);
        drop(queues);
        assert!(same(&domain, &[]));
        assert_eq!((told.load(Relaxed), domain.changes()), (3, 3));
        assert_eq!(Arc::strong_count(&one), 1, "a region that is unmapped is let go of");
    }

    #[test]
    fn a_replacement_is_one_change_and_keeps_what_stays() {
        let (domain, told) = domain();
        let [stays, goes, comes] = [0; 3].map(|_| Region::anonymous(4096).unwrap());
        let mut owner = domain.map(vec![Arc::clone(&goes), Arc::clone(&stays)]);
        owner.replace(vec![Arc::clone(&stays), Arc::clone(&comes)]);
        assert!(same(&domain, &[&stays, &comes]));
        assert_eq!(told.load(Relaxed), 2);
        owner.replace(vec![Arc::clone(&comes), Arc::clone(&stays)]);
        assert_eq!(told.load(Relaxed), 2, "another order is no change");
    }

    #[test]
    fn a_change_can_be_looked_at_where_it_is_told() {
        let seen = Arc::new(Mutex::new(None::<Arc<DmaDomain>>));
        let (at, count) = (Arc::clone(&seen), Arc::new(AtomicU64::new(0)));
        let counter = Arc::clone(&count);
        let domain = DmaDomain::new(move || {
            let regions = at.lock().unwrap().as_ref().map_or(0, |domain| domain.regions().len());
            counter.store(regions as u64, Relaxed);
        });
        *seen.lock().unwrap() = Some(Arc::clone(&domain));
        let mapping = domain.map(vec![Region::anonymous(4096).unwrap()]);
        assert_eq!(count.load(Relaxed), 1);
        drop(mapping);
        assert_eq!(count.load(Relaxed), 0);
        *seen.lock().unwrap() = None;
    }
}
