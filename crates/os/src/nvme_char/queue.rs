//! One queue of a namespace: submits commands from a lane and returns their results.
//!
//! Its entries have 128 bytes and their completions 32, so it has a ring beside the lane's ([ADR 50]). The ring is made
//! on the thread that uses it. Between `arm` and `disarm` the kernel signals the queue's eventfd, to which the lane
//! listens while it sleeps. A polled queue has no eventfd: the lane does not sleep while commands are in flight.
//!
//! Owned by one thread at a time. A command ends with its completion only; until then its tag, memory and vectors stay.
//! It reads no clock and knows no opcodes.
//!
//! Unsafe: entries carry addresses. They point into attached regions, or into tables of this queue that are leaked
//! rather than freed if it is dropped with commands in flight.
//!
//! [ADR 50]: ../../../../docs/adr/0050-the-kernels-nvme-driver-by-passthrough.md

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use blkyard_mem::{BufferId, BufferMap, Region, RegionTable, RegisteredBuffer};
use blkyard_mq::{Cid, Cids, Segment, Segments, Tag};
use blkyard_sys::EventFd;
use io_uring::{Builder, IoUring, cqueue, squeue};

use super::NvmeCharDevice;
use super::abi::{self, CharCommandData};
use crate::ring::{Attachment, Buffers, Ring, RingConfig, RingCounters, RingError};

/// Entries of a ring for each command that can be in flight. More than one, so that a late command seldom holds up
/// others: its entry must not be used again before it has ended.
const ENTRIES_EACH: usize = 4;
/// Bytes of one range of a command with ranges.
const RANGE_BYTES: usize = 16;

/// Data of a command.
#[derive(Clone, Debug)]
pub enum NvmeCharData<'a> {
    /// No data.
    None,
    /// Memory of a request.
    Segments(Segments<'a>),
    /// So many ranges, which were [written](NvmeCharQueue::write_ranges) for the same tag.
    Ranges(u16),
}

/// The io_uring of a queue.
pub(super) struct CommandRing {
    uring: IoUring<squeue::Entry128, cqueue::Entry32>,
    buffers: Buffers,
    is_polled: bool,
    has_failed: bool,
    /// By entry of the submission ring: the last command in it.
    slots: Box<[Cid]>,
    /// Index of the next entry, before it wraps.
    tail: usize,
}

impl CommandRing {
    /// A ring for `depth` commands in flight, in the manner of a lane's ring.
    pub(super) fn new(lane: RingConfig, depth: usize, is_polled: bool) -> Result<CommandRing, RingError> {
        let entries = u32::try_from(depth * ENTRIES_EACH).unwrap_or(u32::MAX);
        let build = |is_deferred: bool| {
            let mut builder: Builder<squeue::Entry128, cqueue::Entry32> = IoUring::builder();
            builder.setup_submit_all().setup_clamp();
            if is_deferred {
                builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
            }
            if is_polled {
                builder.setup_iopoll();
            }
            builder.build(entries)
        };
        let uring = match build(lane.single_owner) {
            // Linux before 6.1.
            Err(error) if lane.single_owner && error.raw_os_error() == Some(libc::EINVAL) => build(false),
            built => built,
        };
        let uring = uring.map_err(RingError::from_setup)?;
        let view = Arc::new(RingCounters::of(0));
        let buffers = Buffers::new(&uring.submitter(), view, lane.registers_memory);
        // No id of a command has this value.
        let slots = vec![Cid(u32::MAX); uring.params().sq_entries() as usize].into_boxed_slice();
        Ok(CommandRing { uring, buffers, is_polled, has_failed: false, slots, tail: 0 })
    }

    /// Submits pushed entries, and has the kernel hand over completions. Entries that it does not accept now stay.
    fn enter(&mut self) {
        if self.has_failed {
            return;
        }
        let Err(error) = self.uring.submit() else { return };
        let passes = [libc::EINTR, libc::EAGAIN, libc::EBUSY, libc::ENOMEM, libc::ETIME];
        if !error.raw_os_error().is_some_and(|errno| passes.contains(&errno)) {
            tracing::error!("io_uring_enter for NVMe commands failed: {error}; its commands never end");
            self.has_failed = true;
        }
    }

    /// Whether entries wait to be submitted, or completions can be had by a call.
    fn wants_call(&mut self) -> bool {
        let queue = self.uring.submission();
        !self.has_failed && (!queue.is_empty() || queue.taskrun() || queue.cq_overflow())
    }

    /// Has the kernel signal the eventfd of later completions. True if one is there already.
    fn arm(&mut self) -> bool {
        self.uring.completion().enable_eventfd();
        // The kernel publishes a completion, and then looks whether to signal it.
        fence(Ordering::SeqCst);
        self.wants_call() || !self.uring.completion().is_empty()
    }
}

/// A registered buffer, as the kernel knows it.
#[derive(Clone, Copy, Debug, Default)]
struct KnownBuffer {
    /// Address of its first byte.
    address: u64,
    /// Number of its region's piece in which all of it lies, if that is registered with the ring.
    piece: Option<u16>,
}

/// A queue of a namespace.
pub struct NvmeCharQueue {
    device: Arc<NvmeCharDevice>,
    is_polled: bool,
    eventfd: EventFd,
    /// Unset on no lane.
    ring: Option<CommandRing>,
    /// The regions of the queue's memory, by their number.
    attached: ManuallyDrop<Vec<Option<Arc<Attachment>>>>,
    /// Those regions. They stay mapped if commands are in flight.
    regions: ManuallyDrop<Vec<Arc<Region>>>,
    /// Registered buffers in those regions.
    buffers: BufferMap<KnownBuffer>,
    cids: Cids,
    depth: usize,
    segments_max: usize,
    /// The vectors of all slots, one after another.
    vectors: ManuallyDrop<Box<[libc::iovec]>>,
    ranges_max: usize,
    /// The ranges of all slots. Pages take memory once they are written.
    ranges: ManuallyDrop<Arc<Region>>,
    in_flight: usize,
}

// SAFETY: the vectors hold addresses for the kernel, which are valid on every thread; this code does not read through
// them.
unsafe impl Send for NvmeCharQueue {}

impl NvmeCharQueue {
    /// A queue of `depth` commands, each with so many segments or ranges.
    ///
    /// # Errors
    /// The system has no memory, or no descriptor.
    pub fn new(
        device: &Arc<NvmeCharDevice>,
        depth: usize,
        segments_max: u16,
        ranges_max: u16,
        is_polled: bool,
    ) -> io::Result<NvmeCharQueue> {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let (segments_max, ranges_max) = (usize::from(segments_max), usize::from(ranges_max));
        Ok(NvmeCharQueue {
            device: Arc::clone(device),
            is_polled,
            eventfd: EventFd::new()?,
            ring: None,
            attached: ManuallyDrop::new(Vec::new()),
            regions: ManuallyDrop::new(Vec::new()),
            buffers: BufferMap::default(),
            cids: Cids::new(depth),
            depth,
            segments_max,
            vectors: ManuallyDrop::new(vec![empty; depth * segments_max].into_boxed_slice()),
            ranges_max,
            ranges: ManuallyDrop::new(Region::anonymous((depth * ranges_max * RANGE_BYTES).max(RANGE_BYTES))?),
            in_flight: 0,
        })
    }

    /// Makes the ring of the queue on the lane's thread, once for as long as it stays there. False if the system has no
    /// resources for it now.
    #[inline]
    pub fn open(&mut self, lane: &Ring) -> bool {
        self.ring.is_some() || self.open_ring(lane)
    }

    #[cold]
    fn open_ring(&mut self, lane: &Ring) -> bool {
        let made = CommandRing::new(lane.config(), self.depth, self.is_polled).and_then(|mut ring| {
            if !self.is_polled {
                let eventfd = self.eventfd.as_fd().as_raw_fd();
                ring.uring.submitter().register_eventfd(eventfd).map_err(RingError::from_setup)?;
                ring.uring.completion().disable_eventfd();
            }
            Ok(ring)
        });
        match made {
            Ok(ring) => self.ring = Some(ring),
            Err(error) => tracing::warn!("{}: {error}; its requests wait", self.device.path().display()),
        }
        self.ring.is_some()
    }

    /// The memory of later commands; none is in flight. An empty table takes the queue off its lane.
    pub fn set_memory(&mut self, lane: &Ring, memory: &RegionTable) {
        self.buffers.clear();
        self.attached.clear();
        self.regions.clear();
        if memory.iter().next().is_none() {
            self.ring = None;
            return;
        }
        self.regions.extend(memory.iter().map(|(_, region)| Arc::clone(region)));
        if !self.open(lane) {
            return;
        }
        let Some(CommandRing { uring, buffers, .. }) = &mut self.ring else { return };
        // Both together might exceed the limit on locked memory.
        buffers.sweep(&uring.submitter());
        for (number, region) in memory.iter() {
            let number = number as usize;
            if self.attached.len() <= number {
                self.attached.resize(number + 1, None);
            }
            self.attached[number] = Some(buffers.attach(&uring.submitter(), region));
        }
    }

    /// The memory has gained or lost regions; none of these is in use by a command in flight.
    pub fn change_memory(&mut self, memory: &RegionTable) {
        let numbers = 0..memory.iter().map(|(number, _)| number + 1).max().unwrap_or(0);
        let mut attached = Vec::new();
        if let Some(CommandRing { uring, buffers, .. }) = &mut self.ring {
            let attach = |number| memory.region(number).map(|region| buffers.attach(&uring.submitter(), region));
            attached = numbers.map(attach).collect();
        }
        // Those that stay have a holder all the time.
        *self.attached = attached;
        *self.regions = memory.iter().map(|(_, region)| Arc::clone(region)).collect();
        if let Some(CommandRing { uring, buffers, .. }) = &mut self.ring {
            buffers.sweep(&uring.submitter());
        }
    }

    /// Segments of later commands may name this registered buffer, which is in the memory of the queue.
    pub fn add_buffer(&mut self, memory: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        let first = buffer.segment(0, 1);
        let (Some(plain), Some(span)) = (memory.plain(first), memory.resolve(first)) else { return };
        let piece_of = |at: u64| self.fixed(Segment { offset: buffer.offset() + at, len: 1, ..plain });
        let piece = piece_of(0).filter(|piece| piece_of(buffer.len() - 1) == Some(*piece));
        self.buffers.insert(buffer, KnownBuffer { address: span.as_ptr() as u64, piece });
    }

    /// Forgets a registered buffer, which no command in flight names.
    pub fn remove_buffer(&mut self, buffer: BufferId) {
        self.buffers.remove(buffer);
    }

    /// Number under which the kernel knows a segment's memory for good.
    #[inline]
    fn fixed(&self, segment: Segment) -> Option<u16> {
        let attachment = self.attached.get(segment.region as usize)?.as_ref()?;
        self.ring.as_ref()?.buffers.fixed(attachment, segment.offset, segment.len)
    }

    /// Address of a segment, and the kernel's number for its memory.
    #[inline]
    fn locate(&self, memory: &RegionTable, segment: Segment) -> Option<(u64, Option<u16>)> {
        if segment.is_registered()
            && let Some((buffer, into)) = self.buffers.get(segment)
        {
            return Some((buffer.address + into, buffer.piece));
        }
        let span = memory.resolve(segment)?;
        Some((span.as_ptr() as u64, memory.plain(segment).and_then(|plain| self.fixed(plain))))
    }

    /// Writes the ranges of a command with this tag, each in the words of its memory format. Returns their number;
    /// `None` if there are none or too many.
    pub fn write_ranges(&mut self, tag: &Tag, ranges: impl Iterator<Item = [u64; 2]>) -> Option<u16> {
        let mut count = 0;
        for words in ranges {
            let span = if count < self.ranges_max { self.range_span(tag.index(), count) } else { None }?;
            span.copy_from_slice(words.map(u64::to_le_bytes).as_flattened());
            count += 1;
        }
        (count > 0).then_some(count as u16)
    }

    fn range_span(&self, slot: usize, number: usize) -> Option<blkyard_mem::Span<'_>> {
        let offset = (slot * self.ranges_max + number) * RANGE_BYTES;
        self.ranges.span(offset as u64, RANGE_BYTES)
    }

    /// Whether a command can be pushed; otherwise one in flight must complete first.
    ///
    /// An entry is used again only once its command has completed. Linux 6.10 to 6.12 read it again when a command
    /// that could not be started at once (a controller in reset, no free tag) is started later, and would execute
    /// another command in its place.
    #[inline]
    pub fn has_room(&self) -> bool {
        let Some(ring) = &self.ring else { return false };
        self.cids.look(ring.slots[ring.tail & (ring.slots.len() - 1)]).is_err()
    }

    /// Pushes a command with the words of a submission queue entry, for the next [`NvmeCharQueue::submit`].
    ///
    /// # Errors
    /// The tag, if the data is not in the memory of the queue, has more segments than fit, or there is no
    /// [room](NvmeCharQueue::has_room).
    #[inline]
    pub fn push(&mut self, memory: &RegionTable, tag: Tag, words: [u64; 8], data: NvmeCharData<'_>) -> Result<(), Tag> {
        let Some(data) = self.lay_out(memory, tag.index(), data).filter(|_| self.has_room()) else {
            return Err(tag);
        };
        let cid = self.cids.park(tag);
        self.in_flight += 1;
        let mut entry = abi::entry(self.device.descriptor(), words, data);
        squeue::EntryMarker::set_user_data(&mut entry, u64::from(cid.0));
        let Some(ring) = &mut self.ring else { unreachable!("a queue with room has a ring") };
        ring.slots[ring.tail & (ring.slots.len() - 1)] = cid;
        ring.tail = ring.tail.wrapping_add(1);
        // SAFETY: the entry points into regions that the queue keeps mapped, or vectors and ranges of this slot; all
        // stay until the tag is redeemed, or are leaked if the queue is dropped earlier. The device keeps the file
        // open.
        while unsafe { ring.uring.submission().push(&entry) }.is_err() {
            // The kernel has not accepted earlier entries.
            ring.enter();
            if ring.has_failed {
                break;
            }
            if ring.uring.submission().is_full() {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Addresses of the data of the command in this slot. `None` if it is not in mapped memory.
    #[inline]
    fn lay_out(&mut self, memory: &RegionTable, slot: usize, data: NvmeCharData<'_>) -> Option<CharCommandData> {
        let mut segments = match data {
            NvmeCharData::None => return Some(CharCommandData::None),
            NvmeCharData::Ranges(count) => {
                let bytes = u32::from(count) * RANGE_BYTES as u32;
                let address = self.range_span(slot, 0)?.as_ptr() as u64;
                return Some(CharCommandData::Buffer { address, bytes, piece: None });
            }
            NvmeCharData::Segments(segments) => segments,
        };
        let first = segments.next()?;
        let Some(second) = segments.next() else {
            let (address, piece) = self.locate(memory, first)?;
            return Some(CharCommandData::Buffer { address, bytes: first.len, piece });
        };
        let max = self.segments_max;
        let vectors = &mut self.vectors[slot * max..(slot + 1) * max];
        let mut count = 0;
        for segment in [first, second].into_iter().chain(segments) {
            let span = memory.resolve(segment)?;
            *vectors.get_mut(count)? = libc::iovec { iov_base: span.as_ptr().cast(), iov_len: span.len() };
            count += 1;
        }
        Some(CharCommandData::Vector { address: vectors.as_ptr() as u64, count: count as u32 })
    }

    /// Submits the pushed commands with one call.
    #[inline]
    pub fn submit(&mut self) {
        if let Some(ring) = &mut self.ring
            && ring.wants_call()
        {
            ring.enter();
        }
    }

    /// Returns completed commands: the tag, and the status of the controller or an errno of the kernel.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(Tag, Result<u16, i32>)) {
        let Some(ring) = self.ring.as_mut().filter(|_| self.in_flight > 0) else { return };
        if ring.is_polled || ring.wants_call() {
            ring.enter();
        }
        for completion in ring.uring.completion() {
            match self.cids.redeem(Cid(completion.user_data() as u32)) {
                Ok(tag) => {
                    self.in_flight -= 1;
                    each(tag, outcome(completion.result()));
                }
                Err(_) => self.device.count_forged(),
            }
        }
    }

    /// Whether commands are in flight.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.in_flight > 0
    }

    /// Asks for a signal of the eventfd on later completions. True if the queue must be polled: a completion is there,
    /// an entry is not submitted yet, or its commands are found by polling only.
    pub fn arm(&mut self) -> bool {
        match &mut self.ring {
            Some(ring) if self.in_flight > 0 && !ring.has_failed => self.is_polled || ring.arm(),
            _ => false,
        }
    }

    /// The eventfd need not be signalled any more.
    pub fn disarm(&mut self) {
        if let Some(ring) = self.ring.as_mut().filter(|ring| !ring.is_polled) {
            ring.uring.completion().disable_eventfd();
        }
    }

    /// Signalled on completions while the queue is armed.
    pub fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        (!self.is_polled).then(|| self.eventfd.as_fd())
    }
}

/// Result of a completion: a status of the controller, or an errno of the kernel.
#[inline]
fn outcome(result: i32) -> Result<u16, i32> {
    // A status has fifteen bits.
    u16::try_from(result).map_err(|_| if result < 0 { -result } else { libc::EIO })
}

impl Drop for NvmeCharQueue {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // Only during a panic's unwinding. The kernel may still use all this.
            std::mem::forget(self.ring.take());
            std::mem::forget(Arc::clone(&self.device));
            return;
        }
        self.ring = None;
        // SAFETY: each is dropped here, once, and not used again.
        unsafe {
            ManuallyDrop::drop(&mut self.attached);
            ManuallyDrop::drop(&mut self.regions);
            ManuallyDrop::drop(&mut self.vectors);
            ManuallyDrop::drop(&mut self.ranges);
        }
    }
}

impl std::fmt::Debug for NvmeCharQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NvmeCharQueue")
            .field("device", &self.device.path())
            .field("depth", &self.depth)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
