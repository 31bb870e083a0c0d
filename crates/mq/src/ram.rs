//! The RAM device: a disk in private memory, lost when the process ends.
//!
//! All queues share one region and copy in and out of it at once; two concurrent writes to the same sector leave
//! either's bytes, as on a disk. With a latency or a ceiling the data moves at once and the completion waits.
//!
//! Request data is usually not in a cache: while one request is copied, the first page of the next one is prefetched
//! (ADR 23, 27).

use std::io;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Span};

use crate::driver::{Batch, BlockDevice, DeviceInfo, Done, Driver};
use crate::null::{NullConfig, Timed};
use crate::pace::Pace;
use crate::request::{Request, Segments};
use crate::{Op, SECTOR_SHIFT, Status};

/// The bytes of a disk in memory.
#[derive(Clone, Debug)]
pub struct RamStore {
    region: Arc<Region>,
}

/// A disk in memory.
#[derive(Debug)]
pub struct RamDevice {
    info: DeviceInfo,
    store: RamStore,
    pace: Arc<Pace>,
}

impl RamDevice {
    /// A disk as `info` describes it, all zeroes. Memory is allocated on write: in huge pages, where the system has
    /// some and the disk is not larger than the machine's memory.
    ///
    /// # Errors
    /// The address space has no room for it.
    pub fn new(info: DeviceInfo, config: NullConfig) -> io::Result<RamDevice> {
        let store = RamStore::new(info.capacity_sectors)?;
        store.region.prefer_huge_pages();
        Ok(RamDevice { info, store, pace: Arc::new(Pace::new(config.latency_ns, config.bytes_per_s)) })
    }
}

impl BlockDevice for RamDevice {
    type Queue = RamQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn queue(&self, depth: usize) -> RamQueue {
        RamQueue { store: self.store.clone(), timed: Timed::new(Arc::clone(&self.pace), depth) }
    }
}

/// One queue of a RAM device.
#[derive(Debug)]
pub struct RamQueue {
    store: RamStore,
    timed: Timed,
}

impl RamStore {
    /// A store of `sectors` sectors, all zeroes. Memory is allocated on write.
    ///
    /// # Errors
    /// The address space has no room for them.
    pub fn new(sectors: u64) -> io::Result<RamStore> {
        let bytes = sectors.checked_mul(1 << SECTOR_SHIFT).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(RamStore { region: Region::anonymous(usize::try_from(bytes).map_err(io::Error::other)?)? })
    }

    /// Where they are.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Position of a request in the store; `None` if it is out of range.
    #[inline]
    fn place(&self, request: &Request) -> Span<'_> {
        self.region.span(request.offset_bytes(), request.bytes() as usize).unwrap_or_default()
    }

    /// Executes a request at once. `next` is the position of the probable next one: its first lines are prefetched
    /// meanwhile.
    #[inline]
    pub fn transfer(&self, memory: &RegionTable, request: &Request, segments: Segments<'_>, next: Span<'_>) -> Status {
        let (at, len) = (request.offset_bytes(), request.bytes() as usize);
        match request.op() {
            Op::Flush => Status::Ok,
            Op::Discard | Op::WriteZeroes if self.region.span(at, len).is_none() => Status::Invalid,
            Op::Discard | Op::WriteZeroes => {
                self.region.zero(at, len);
                Status::Ok
            }
            op @ (Op::Read | Op::Write) => {
                let place = self.region.span(at, len);
                place.map_or(Status::Invalid, |place| copy(memory, op == Op::Read, place, segments, next))
            }
        }
    }
}

/// Copies the data of a request between a store and the submitter's memory. `next` is the next position, if known.
#[inline]
fn copy(memory: &RegionTable, is_read: bool, place: Span<'_>, segments: Segments<'_>, next: Span<'_>) -> Status {
    let mut at = 0;
    for segment in segments {
        let Some(span) = memory.resolve(segment) else { return Status::Invalid };
        let part = place.part(at, span.len());
        at += span.len();
        let next = if at < place.len() { place.part(at, place.len() - at) } else { next };
        if is_read { span.copy_from_and_fetch(&part, &next) } else { part.copy_from_and_fetch(&span, &next) }
    }
    Status::Ok
}

impl<Cx: ?Sized> Driver<Cx> for RamQueue {
    #[inline]
    fn queue_rqs(&mut self, _cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        let now_ns = batch.now_ns();
        while let Some((tag, ..)) = batch.take_inline() {
            let next = batch.peek().map_or_else(Span::default, |(next, _)| self.store.place(next));
            let (request, segments) = batch.request(&tag);
            let status = self.store.transfer(memory, request, segments, next);
            if self.timed.pace.is_instant() {
                batch.complete(tag, status);
            } else {
                let bytes = if request.op().has_data() { request.bytes() } else { 0 };
                self.timed.push(now_ns, bytes, tag, status);
            }
        }
    }

    #[inline]
    fn poll(&mut self, _cx: &mut Cx, _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.timed.poll(done, now_ns);
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.timed.deadline_ns()
    }
}
