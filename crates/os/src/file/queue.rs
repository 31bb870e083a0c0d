//! The driver: one hardware queue of a file, through the ring of its lane.
//!
//! Requests become entries as they are taken; the lane submits those of all its queues with one call. The driver takes
//! no request while the ring has no room for the completion, or no buffer is free for a request that must be copied:
//! both become free with a completion on this lane.
//!
//! Owns no memory of requests. The regions that they point into are attached to the ring, which keeps them mapped
//! while I/O of this queue is in flight.
//!
//! Unsafe: entries carry addresses. They point into attached regions, or into tables of this queue that are leaked
//! rather than freed if it is dropped with I/O in flight.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::{BufferId, BufferMap, Region, RegionTable, RegisteredBuffer, Span};
use blkyard_mq::{Batch, Cid, Cids, Done, Driver, ErrorCode, Op, Request, Segment, Segments, Shortage, Status};

use super::SharedFile;
use super::disk::DiskUse;
use super::place::{BOUNCES, Data, FileSlot, Next};
use super::syncs::SyncWait;
use crate::ring::{Attachment, FileHolder, InboxId, Ring};

/// One hardware queue of a file.
pub struct FileQueue {
    shared: Arc<SharedFile>,
    /// How this queue is known to the ring of its lane.
    inbox: Option<InboxId>,
    /// Has that ring keep the file open while there is a inbox.
    file: Option<FileHolder>,
    /// What that lane has in flight on the file's disk.
    disk: Option<Arc<DiskUse>>,
    /// The regions of the queue's memory, by their number.
    attached: ManuallyDrop<Vec<Option<Arc<Attachment>>>>,
    /// Registered buffers in those regions.
    buffers: BufferMap<FixedBuffer>,
    cids: Cids,
    places: Box<[FileSlot]>,
    /// The vectors of all slots, one after another.
    vectors: ManuallyDrop<Box<[libc::iovec]>>,
    bounces: ManuallyDrop<Bounces>,
    in_flight: usize,
    /// Syncs that the kernel has answered with success, and that wait for others.
    answered: Vec<(Cid, SyncWait)>,
    /// When they were last looked at.
    looked_ns: u64,
}

/// Interval of the looks at syncs that wait for others, ns: those of other queues do not wake this one. An answer is
/// rarely later than another by as much.
const SYNC_LOOK_NS: u64 = 100_000;

/// A registered buffer, as the kernel knows it.
#[derive(Clone, Copy, Debug, Default)]
struct FixedBuffer {
    /// Address of its first byte.
    address: u64,
    /// Number of its region's piece in which all of it lies, if that is registered with the ring.
    piece: Option<u16>,
}

// SAFETY: the vectors hold addresses for the kernel, which are valid on every thread; this code does not read through
// them.
unsafe impl Send for FileQueue {}

impl FileQueue {
    pub(super) fn new(shared: Arc<SharedFile>, depth: usize) -> FileQueue {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let vectors = vec![empty; depth * usize::from(shared.segments_max)].into_boxed_slice();
        let any_memory = shared.memory_mask == 0 && shared.offset_mask == 0;
        let bounces = Bounces::new(if any_memory { 0 } else { BOUNCES.min(depth) }, shared.bounce_bytes);
        FileQueue {
            inbox: None,
            file: None,
            disk: None,
            attached: ManuallyDrop::new(Vec::new()),
            buffers: BufferMap::default(),
            cids: Cids::new(depth),
            places: (0..depth).map(|_| FileSlot::default()).collect(),
            vectors: ManuallyDrop::new(vectors),
            bounces: ManuallyDrop::new(bounces),
            in_flight: 0,
            answered: Vec::with_capacity(if shared.syncs.is_some() { depth } else { 0 }),
            looked_ns: 0,
            shared,
        }
    }

    /// Makes the queue known to the ring of its lane, once for as long as it stays there.
    #[inline]
    fn inbox(&mut self, ring: &mut Ring) -> InboxId {
        match self.inbox {
            Some(inbox) => inbox,
            None => self.open_inbox(ring),
        }
    }

    #[cold]
    fn open_inbox(&mut self, ring: &mut Ring) -> InboxId {
        self.file = Some(ring.hold(&self.shared.file));
        self.disk = self.shared.disk.as_ref().map(|room| ring.disk_use(room));
        *self.inbox.insert(ring.inbox(self.places.len()))
    }

    /// Leaves the ring, which keeps nothing of this queue.
    fn close_inbox(&mut self, ring: &mut Ring) {
        if let Some(inbox) = self.inbox.take() {
            ring.close(inbox);
        }
        self.file = None;
        self.disk = None;
        self.attached.clear();
        self.buffers.clear();
        ring.sweep();
    }

    /// Whether direct I/O cannot use the memory of a request.
    #[inline]
    fn needs_bounce(&self, memory: &RegionTable, request: &Request, segments: Segments<'_>) -> bool {
        let (memory_mask, length_mask) = (self.shared.memory_mask, self.shared.offset_mask as usize);
        if memory_mask | length_mask == 0 || !request.op().has_data() {
            return false;
        }
        let mut segments = segments;
        segments.any(|segment| {
            let torn = |address: u64| address as usize & memory_mask | segment.len as usize & length_mask != 0;
            self.locate(memory, segment).is_some_and(|(address, _)| torn(address))
        })
    }

    /// Resolves the data of the request in slot `index`. `None` if it is not in mapped memory.
    #[inline]
    fn lay_out(
        &mut self,
        ring: &Ring,
        memory: &RegionTable,
        index: usize,
        op: Op,
        segments: Segments<'_>,
    ) -> Option<Data> {
        if !op.has_data() {
            return Some(Data::None);
        }
        if let Some(bounce) = self.places[index].bounce {
            let buffer = self.bounces.buffer(bounce);
            if op == Op::Write {
                copy(memory, segments, |at, span| buffer.part(at, span.len()).copy_from(&span))?;
            }
            return Some(Data::One { address: buffer.as_ptr() as u64 });
        }
        let mut segments = segments;
        let first = segments.next()?;
        let Some(second) = segments.next() else {
            let (address, piece) = self.locate(memory, first)?;
            return Some(match piece.or_else(|| self.fixed(ring, memory.plain(first)?)) {
                Some(buffer) => Data::Fixed { address, buffer },
                None => Data::One { address },
            });
        };
        let max = usize::from(self.shared.segments_max);
        let vectors = &mut self.vectors[index * max..(index + 1) * max];
        let mut count = 0;
        for segment in [first, second].into_iter().chain(segments) {
            let span = memory.resolve(segment)?;
            *vectors.get_mut(count)? = libc::iovec { iov_base: span.as_ptr().cast(), iov_len: span.len() };
            count += 1;
        }
        Some(Data::Many { first: 0, count: count as u16 })
    }

    /// Address of a segment; and the kernel's number for its memory, if it is in a registered buffer.
    #[inline]
    fn locate(&self, memory: &RegionTable, segment: Segment) -> Option<(u64, Option<u16>)> {
        if segment.is_registered()
            && let Some((buffer, into)) = self.buffers.get(segment)
        {
            return Some((buffer.address + into, buffer.piece));
        }
        memory.resolve(segment).map(|span| (span.as_ptr() as u64, None))
    }

    #[inline]
    fn fixed(&self, ring: &Ring, segment: Segment) -> Option<u16> {
        let attachment = self.attached.get(segment.region as usize)?.as_ref()?;
        ring.fixed(attachment, segment.offset, segment.len)
    }

    fn vectors_of(&mut self, index: usize) -> &mut [libc::iovec] {
        let max = usize::from(self.shared.segments_max);
        &mut self.vectors[index * max..(index + 1) * max]
    }

    /// Completes the request in slot `index`: copies bounced data, and frees its buffer.
    fn settle(&mut self, memory: &RegionTable, index: usize, segments: Segments<'_>, status: Status) -> Status {
        let Some(bounce) = self.places[index].bounce.take() else { return status };
        let buffer = self.bounces.buffer(bounce);
        let mut status = status;
        if self.places[index].is_read() && status.is_ok() {
            let copied = copy(memory, segments, |at, span| span.copy_from(&buffer.part(at, span.len())));
            status = if copied.is_some() { status } else { Status::Invalid };
        }
        self.bounces.put(bounce);
        status
    }
}

impl FileQueue {
    /// The kernel has answered the last operation of a request, which is a sync no more. Returns whether its success
    /// waits for other syncs.
    #[inline]
    fn end_sync(&mut self, index: usize, cid: Cid, status: Status) -> bool {
        let Some(place) = self.places[index].sync.take() else { return false };
        let Some(syncs) = &self.shared.syncs else { return false };
        syncs.end(place);
        let mut wait = SyncWait::default();
        if !status.is_ok() || syncs.have_ended(&mut wait) {
            return false;
        }
        self.answered.push((cid, wait));
        true
    }

    /// Ends the syncs that have waited for others, as far as those have ended.
    #[cold]
    fn look_at_answered(&mut self, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.looked_ns = now_ns;
        let mut at = 0;
        while let Some((cid, wait)) = self.answered.get_mut(at) {
            let cid = *cid;
            if !self.shared.syncs.as_ref().is_none_or(|syncs| syncs.have_ended(wait)) {
                at += 1;
                continue;
            }
            self.answered.swap_remove(at);
            if let Ok(index) = self.cids.look(cid) {
                self.finish(memory, done, cid, index, Status::Ok);
            }
        }
    }

    /// Completes a request. A sync has failed if another one has that was in flight beside it.
    #[inline]
    fn finish(&mut self, memory: &RegionTable, done: &mut Done<'_>, cid: Cid, index: usize, status: Status) {
        if self.places[index].bounce.is_some() {
            done.spend(self.places[index].bytes());
        }
        let is_lost = self.places[index].is_sync() && self.shared.sync_failed.load(Relaxed);
        let status = status.and(if is_lost { Status::Io } else { Status::Ok });
        let (_, segments) = done.request_at(index);
        let status = self.settle(memory, index, segments, status);
        let Ok(tag) = self.cids.redeem(cid) else { return };
        if let Some(disk) = &self.disk {
            self.places[index].end_on(disk);
        }
        self.in_flight -= 1;
        done.complete(tag, status);
    }
}

/// Calls `each` with the spans of a request and their offsets. `None` if one of them is not in mapped memory.
fn copy(memory: &RegionTable, segments: Segments<'_>, mut each: impl FnMut(usize, Span<'_>)) -> Option<()> {
    let mut at = 0;
    for segment in segments {
        let span = memory.resolve(segment)?;
        each(at, span);
        at += span.len();
    }
    Some(())
}

impl Driver<Ring> for FileQueue {
    #[inline]
    fn queue_rqs(&mut self, ring: &mut Ring, memory: &RegionTable, batch: &mut Batch<'_>) {
        let inbox = self.inbox(ring);
        loop {
            if ring.room() == 0 {
                // The lane enters the kernel before the next round.
                return batch.short_of(Shortage::Lane);
            }
            let Some((request, segments)) = batch.peek() else { return };
            let needs_bounce = self.needs_bounce(memory, request, segments);
            if needs_bounce && self.bounces.free.is_empty() && self.bounces.region.is_some() {
                return;
            }
            // Data in the page cache is copied when the lane enters the kernel, and so is that of file systems in
            // memory.
            let Some((tag, request, segments)) = batch.take_inline() else { return };
            let index = tag.index();
            if needs_bounce && self.bounces.region.is_none() {
                batch.complete(tag, Status::Io);
                continue;
            }
            if needs_bounce {
                self.shared.counters.bounced.fetch_add(1, Relaxed);
                self.places[index].bounce = self.bounces.free.pop();
            }
            let next = match self.lay_out(ring, memory, index, request.op(), segments) {
                Some(data) => self.places[index].begin(request, data, &self.shared),
                None => Next::Over(Status::Invalid),
            };
            if let Next::Over(status) = next {
                if let Some(bounce) = self.places[index].bounce.take() {
                    self.bounces.put(bounce);
                }
                batch.complete(tag, status);
                continue;
            }
            if let Some(syncs) = &self.shared.syncs
                && self.places[index].is_sync()
            {
                self.places[index].sync = Some(syncs.begin());
            }
            if let Some(disk) = &self.disk {
                self.places[index].begin_on(disk);
            }
            let max = usize::from(self.shared.segments_max);
            let vectors = self.vectors[index * max..].as_ptr();
            let entry = self.places[index].entry(vectors, &self.shared);
            self.in_flight += 1;
            // SAFETY: the entry points into regions that are attached or bounce buffers, vectors of this slot, or the
            // shared zeroes; all stay until the tag is redeemed, or are leaked if the queue is dropped earlier.
            unsafe { ring.push(inbox, self.cids.park(tag), entry) };
        }
    }

    #[inline]
    fn poll(&mut self, ring: &mut Ring, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        let Some(inbox) = self.inbox else { return };
        while !done.is_spent()
            && let Some(completion) = ring.take(inbox)
        {
            let Ok(index) = self.cids.look(completion.cid) else {
                self.shared.counters.forged.fetch_add(1, Relaxed);
                continue;
            };
            let max = usize::from(self.shared.segments_max);
            let vectors = &mut self.vectors[index * max..(index + 1) * max];
            match self.places[index].answer(completion.result, vectors, &self.shared) {
                Next::Over(status) => {
                    if self.end_sync(index, completion.cid, status) {
                        continue;
                    }
                    if !status.is_ok() && completion.result < 0 {
                        done.note_code(index, ErrorCode::Errno(-completion.result));
                    }
                    self.finish(memory, done, completion.cid, index, status);
                }
                Next::Ask => {
                    done.spend(self.places[index].bytes_asked());
                    let vectors = self.vectors_of(index).as_ptr();
                    let entry = self.places[index].entry(vectors, &self.shared);
                    // SAFETY: as for its first push; the slot of the completion just taken is free.
                    unsafe { ring.push(inbox, completion.cid, entry) };
                }
            }
        }
        if !self.answered.is_empty() {
            self.look_at_answered(memory, done, now_ns);
        }
    }

    #[inline]
    fn deadline_ns(&self) -> Option<u64> {
        (!self.answered.is_empty()).then_some(self.looked_ns + SYNC_LOOK_NS)
    }

    fn set_memory(&mut self, ring: &mut Ring, memory: &RegionTable) {
        if memory.iter().next().is_none() {
            return self.close_inbox(ring);
        }
        self.inbox(ring);
        self.buffers.clear();
        // Kept regions keep their attachment. Others are detached before new ones are attached, since both together
        // might exceed the limit on locked memory.
        let kept = std::mem::take(&mut *self.attached);
        let kept: Vec<_> = kept.into_iter().flatten().filter(|held| ring.is_attached_in(held, memory)).collect();
        ring.sweep();
        for (number, region) in memory.iter() {
            let number = number as usize;
            if self.attached.len() <= number {
                self.attached.resize(number + 1, None);
            }
            self.attached[number] = Some(ring.attach(region));
        }
        drop(kept);
    }

    fn change_memory(&mut self, ring: &mut Ring, memory: &RegionTable) {
        self.inbox(ring);
        let last = memory.iter().map(|(number, _)| number).max();
        let numbers = 0..last.map_or(0, |last| last + 1);
        let attached = numbers.map(|number| memory.region(number).map(|region| ring.attach(region))).collect();
        // Those that stay have a holder all the time.
        *self.attached = attached;
        ring.sweep();
    }

    fn add_buffer(&mut self, ring: &mut Ring, memory: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        let first = buffer.segment(0, 1);
        let (Some(plain), Some(span)) = (memory.plain(first), memory.resolve(first)) else { return };
        if let Some(Some(attachment)) = self.attached.get(plain.region as usize) {
            ring.want(attachment);
        }
        let piece_of = |at: u64| self.fixed(ring, Segment { offset: buffer.offset() + at, len: 1, ..plain });
        let piece = piece_of(0).filter(|piece| piece_of(buffer.len() - 1) == Some(*piece));
        self.buffers.insert(buffer, FixedBuffer { address: span.as_ptr() as u64, piece });
    }

    fn remove_buffer(&mut self, _: &mut Ring, buffer: BufferId) {
        self.buffers.remove(buffer);
    }
}

impl Drop for FileQueue {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // Those of other queues do not wait for it.
            let syncs = self.places.iter_mut().filter_map(|slot| slot.sync.take());
            syncs.for_each(|place| self.shared.syncs.iter().for_each(|all| all.end(place)));
            // Only during a panic's unwinding. The kernel may still use all this, and the zeroes of the device; the
            // ring keeps the file open as long as it lives, for entries not submitted.
            std::mem::forget(Arc::clone(&self.shared.zeroes));
            std::mem::forget(self.file.take());
            return;
        }
        // SAFETY: each is dropped here, once, and not used again.
        unsafe {
            ManuallyDrop::drop(&mut self.attached);
            ManuallyDrop::drop(&mut self.vectors);
            ManuallyDrop::drop(&mut self.bounces);
        }
    }
}

impl std::fmt::Debug for FileQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileQueue")
            .field("depth", &self.places.len())
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

/// Aligned buffers for unaligned requests. Their pages are allocated at the first use.
struct Bounces {
    region: Option<Arc<Region>>,
    bytes: u32,
    free: Vec<u16>,
}

impl Bounces {
    fn new(count: usize, bytes: u32) -> Bounces {
        // An address space without room for this fails the requests that need it, and no others.
        let region = (count > 0).then(|| Region::anonymous(count * bytes as usize).ok()).flatten();
        let count = if region.is_some() { count } else { 0 };
        Bounces { region, bytes, free: (0..count as u16).rev().collect() }
    }

    fn buffer(&self, index: u16) -> Span<'_> {
        let start = u64::from(index) * u64::from(self.bytes);
        let span = self.region.as_ref().and_then(|region| region.span(start, self.bytes as usize));
        let Some(span) = span else { unreachable!("a buffer that was given out is there") };
        span
    }

    fn put(&mut self, index: u16) {
        self.free.push(index);
    }
}
