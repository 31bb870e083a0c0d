//! The sectors of a chaos device as they read, and as a power failure would leave them.
//!
//! A volatile cache guarantees little: a write that completed before a flush was issued is stable when the flush
//! completes. This one guarantees no more: no sector becomes stable by itself, unless it is written again. It then
//! must, since the cache holds one version of each sector.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkyard_mem::{Region, RegionTable, Span};
use blkyard_mq::{BioFlags, DeviceInfo, Op, Ranges, Request, SECTOR_SHIFT, Segments, Status};

#[derive(Debug)]
pub(super) struct Store {
    namespaces: Box<[Place]>,
    now: Arc<Region>,
    cache: Mutex<Cache>,
}

/// Where a namespace lies in the store.
#[derive(Debug)]
struct Place {
    first: u64,
    sectors: u64,
    volatile: bool,
}

#[derive(Debug)]
struct Cache {
    /// As a power failure leaves it.
    stable: Arc<Region>,
    /// By sector: write clock of unstable data; 0 for stable data. Empty without a volatile cache.
    dirty: Box<[u64]>,
    /// Writes completed and flushes issued so far.
    clock: u64,
}

impl Store {
    pub(super) fn new(infos: &[Arc<DeviceInfo>]) -> io::Result<Store> {
        let mut first = 0;
        let place = |info: &Arc<DeviceInfo>| {
            let place = Place { first, sectors: info.capacity_sectors, volatile: info.volatile_cache };
            first += info.capacity_sectors;
            place
        };
        let namespaces: Box<[Place]> = infos.iter().map(place).collect();
        let sectors = usize::try_from(first).map_err(io::Error::other)?;
        let bytes = sectors.checked_mul(1 << SECTOR_SHIFT).ok_or(io::ErrorKind::OutOfMemory)?;
        let dirty = if infos.iter().any(|info| info.volatile_cache) { vec![0; sectors] } else { Vec::new() };
        let cache = Cache { stable: Region::anonymous(bytes)?, dirty: dirty.into(), clock: 0 };
        Ok(Store { namespaces, now: Region::anonymous(bytes)?, cache: Mutex::new(cache) })
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offset of a range in the store; `None` if it is outside its namespace.
    fn find(&self, namespace: u16, sector: u64, sectors: u32) -> Option<(u64, bool)> {
        let place = self.namespaces.get(usize::from(namespace))?;
        let end = sector.checked_add(u64::from(sectors))?;
        (end <= place.sectors).then_some((place.first + sector, place.volatile))
    }

    /// Moves the data of a request, or zeroes its ranges. A discard leaves them alone if `keep` says so.
    pub(super) fn transfer(
        &self,
        memory: &RegionTable,
        request: &Request,
        segments: Segments<'_>,
        ranges: Ranges<'_>,
        keep: bool,
    ) -> Status {
        let namespace = request.namespace();
        match request.op() {
            Op::Flush => Status::Ok,
            Op::Discard if keep => Status::Ok,
            Op::Discard => {
                let mut status = Status::Ok;
                for (sector, sectors) in ranges {
                    status = status.and(self.zero(namespace, sector, sectors));
                }
                status
            }
            Op::WriteZeroes => self.zero(namespace, request.sector(), request.sectors()),
            op @ (Op::Read | Op::Write) => {
                let found = self.find(namespace, request.sector(), request.sectors());
                let Some((first, volatile)) = found else { return Status::Invalid };
                if volatile && op == Op::Write {
                    self.cache().save(&self.now, first, request.sectors());
                }
                let place = self.now.span(first << SECTOR_SHIFT, request.bytes() as usize);
                place.map_or(Status::Invalid, |place| copy(memory, op == Op::Read, place, segments))
            }
        }
    }

    fn zero(&self, namespace: u16, sector: u64, sectors: u32) -> Status {
        let Some((first, volatile)) = self.find(namespace, sector, sectors) else { return Status::Invalid };
        if volatile {
            self.cache().save(&self.now, first, sectors);
        }
        self.now.zero(first << SECTOR_SHIFT, (sectors as usize) << SECTOR_SHIFT);
        Status::Ok
    }

    /// A flush is issued: it covers writes up to this clock.
    pub(super) fn flush_issued(&self) -> u64 {
        let mut cache = self.cache();
        cache.clock += 1;
        cache.clock
    }

    /// A request has completed without error: its data is dirty, or stable; data that a flush covers is stable.
    pub(super) fn ended(&self, request: &Request, ranges: Ranges<'_>, keep: bool, flush_clock: u64) {
        let Some(place) = self.namespaces.get(usize::from(request.namespace())) else { return };
        if !request.op().is_write() && request.op() != Op::Flush || request.op() == Op::Discard && keep {
            return;
        }
        let mut cache = self.cache();
        if request.op() == Op::Flush && place.volatile {
            return cache.flush(&self.now, place, flush_clock);
        }
        cache.clock += 1;
        let volatile = place.volatile && !request.flags().contains(BioFlags::FUA);
        for (sector, sectors) in ranges {
            if let Some((first, _)) = self.find(request.namespace(), sector, sectors) {
                cache.written(&self.now, first, sectors, volatile);
            }
        }
    }

    pub(super) fn read(&self, namespace: u16, sector: u64, stable: bool, to: &mut [u8; 512]) {
        let Some((first, _)) = self.find(namespace, sector, 1) else {
            panic!("namespace {namespace} has no sector {sector}");
        };
        let region = if stable { Arc::clone(&self.cache().stable) } else { Arc::clone(&self.now) };
        sector_of(&region, first).copy_to_slice(to);
    }
}

/// Copies the data of a request between the store and the submitter's memory.
fn copy(memory: &RegionTable, is_read: bool, place: Span<'_>, segments: Segments<'_>) -> Status {
    let mut at = 0;
    for segment in segments {
        let Some(span) = memory.resolve(segment) else { return Status::Invalid };
        let part = place.part(at, span.len());
        at += span.len();
        if is_read { span.copy_from(&part) } else { part.copy_from(&span) }
    }
    Status::Ok
}

fn sector_of(region: &Region, sector: u64) -> Span<'_> {
    let Some(span) = region.span(sector << SECTOR_SHIFT, 512) else { unreachable!("found in its namespace") };
    span
}

impl Cache {
    /// Dirty data of a range is about to be overwritten.
    fn save(&mut self, now: &Region, first: u64, sectors: u32) {
        for sector in first..first + u64::from(sectors) {
            if std::mem::take(&mut self.dirty[sector as usize]) != 0 {
                sector_of(&self.stable, sector).copy_from(&sector_of(now, sector));
            }
        }
    }

    fn written(&mut self, now: &Region, first: u64, sectors: u32, volatile: bool) {
        for sector in first..first + u64::from(sectors) {
            if volatile {
                // Of two concurrent writes, a flush that covers the first to complete covers both.
                let dirty = &mut self.dirty[sector as usize];
                *dirty = if *dirty == 0 { self.clock } else { *dirty };
                continue;
            }
            sector_of(&self.stable, sector).copy_from(&sector_of(now, sector));
            if let Some(dirty) = self.dirty.get_mut(sector as usize) {
                *dirty = 0;
            }
        }
    }

    fn flush(&mut self, now: &Region, place: &Place, flush_clock: u64) {
        for sector in place.first..place.first + place.sectors {
            let dirty = &mut self.dirty[sector as usize];
            if *dirty != 0 && *dirty <= flush_clock {
                *dirty = 0;
                sector_of(&self.stable, sector).copy_from(&sector_of(now, sector));
            }
        }
    }
}
