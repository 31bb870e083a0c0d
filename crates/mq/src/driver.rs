//! What a hardware queue drives, and what a user opens.

use blkyard_mem::RegionTable;

use crate::fifo::Fifo;
use crate::limits::Cursor;
use crate::request::{Request, Segments, pieces};
use crate::{Bio, QueueLimits, Status, Tag};

/// What a hardware queue drives: one queue pair of a device.
///
/// `Cx` is what all queues of one lane share and the driver borrows for each call: the ring of system calls, say. Drivers
/// that need nothing work with any.
pub trait Driver<Cx: ?Sized> {
    /// Takes requests from the front of the batch, in order, until the batch is empty or the device is full. What is taken is
    /// in flight until its tag comes back, here ([`Batch::complete`]) or in [`Driver::poll`]; what is left stays with the
    /// core, which offers it again, in the same order, after a completion.
    ///
    /// Before it returns the driver announces to the device all it took: one doorbell for the batch. A driver whose
    /// doorbell is shared by the whole lane leaves that to the lane.
    fn queue_rqs(&mut self, cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>);

    /// Hands over what the device has finished since the last call. `now_ns` is the time of this batch.
    fn poll(&mut self, cx: &mut Cx, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64);

    /// The memory of the requests to come; nothing is in flight. A driver may prepare it, by registering it with the
    /// kernel, say, and lets go of what it prepared before.
    fn set_memory(&mut self, _cx: &mut Cx, _memory: &RegionTable) {}

    /// When the driver must be polled next, at the latest, although nothing outside will wake it; for models with timers.
    fn deadline_ns(&self) -> Option<u64> {
        None
    }
}

/// Requests of one queue.
pub(crate) type Table = [Request];

/// Bios that were cut into several requests, by place.
#[derive(Debug)]
pub(crate) struct Split {
    pub(crate) bio: Option<Box<Bio>>,
    pub(crate) parts_in_flight: u32,
    pub(crate) uncut: bool,
}

/// Requests on their way to the driver.
#[derive(Debug)]
pub struct Batch<'a> {
    pub(crate) waiting: &'a mut Fifo,
    pub(crate) requests: &'a mut Table,
    pub(crate) splits: &'a [Split],
    pub(crate) segment_bytes_max: u32,
    pub(crate) done: &'a mut Vec<(u16, Status)>,
    pub(crate) now_ns: u64,
    pub(crate) taken: usize,
}

impl Batch<'_> {
    /// Requests not yet taken.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether all are taken.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The time of this batch.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// The next request, without taking it.
    #[inline]
    pub fn peek(&self) -> Option<(&Request, Segments<'_>)> {
        let request = &self.requests[usize::from(self.waiting.front()?)];
        Some((request, segments(request, self.splits, self.segment_bytes_max)))
    }

    /// Takes the next request: it is in flight from here on.
    // Always inlined, so that a driver that does not look at the segments does not pay for them.
    #[inline(always)]
    pub fn take(&mut self) -> Option<(Tag, &Request, Segments<'_>)> {
        let tag = Tag::pick_up(self.waiting.pop()?);
        let request = &mut self.requests[tag.index()];
        assert!(!request.in_flight, "request {} was started twice", tag.index());
        request.in_flight = true;
        request.start_ns = self.now_ns;
        self.taken += 1;
        let request = &*request;
        Some((tag, request, segments(request, self.splits, self.segment_bytes_max)))
    }

    /// Completes a request on the spot.
    #[inline]
    pub fn complete(&mut self, tag: Tag, status: Status) {
        self.done.push((tag.put_down(), status));
    }
}

/// Where a driver puts what the device has finished.
#[derive(Debug)]
pub struct Done<'a> {
    pub(crate) ended: &'a mut Vec<(u16, Status)>,
    pub(crate) requests: &'a Table,
    pub(crate) splits: &'a [Split],
    pub(crate) segment_bytes_max: u32,
}

impl Done<'_> {
    /// The request a tag names, and its segments.
    #[inline]
    pub fn request(&self, tag: &Tag) -> (&Request, Segments<'_>) {
        self.request_at(tag.index())
    }

    /// The request at a place, and its segments.
    #[inline]
    pub fn request_at(&self, index: usize) -> (&Request, Segments<'_>) {
        let request = &self.requests[index];
        (request, segments(request, self.splits, self.segment_bytes_max))
    }

    /// The request is over.
    #[inline]
    pub fn complete(&mut self, tag: Tag, status: Status) {
        self.ended.push((tag.put_down(), status));
    }
}

#[inline(always)]
fn segments<'a>(request: &'a Request, splits: &'a [Split], segment_bytes_max: u32) -> Segments<'a> {
    let (bio, from) = match &request.whole {
        Some(bio) => (Some(bio), Cursor::default()),
        None => (splits.get(usize::from(request.part_of)).and_then(|split| split.bio.as_ref()), request.from),
    };
    let all = bio.map_or(&[][..], |bio| &bio.segments);
    let sectors = if request.op.has_data() { request.sectors } else { 0 };
    pieces(all, from, sectors, segment_bytes_max)
}

/// What a device is, the same for all its queues.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// As the user named it, for messages.
    pub name: String,
    /// Size, sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// What one request may look like.
    pub limits: QueueLimits,
    /// Writes are refused.
    pub read_only: bool,
    /// Completed writes may be lost on power failure until they are flushed.
    pub volatile_cache: bool,
}

/// What a user opens: a disk that gives out hardware queues.
pub trait BlockDevice {
    /// What drives one queue of this device.
    type Queue;

    /// What the device is.
    fn info(&self) -> &DeviceInfo;

    /// Opens one more queue of `depth` requests.
    fn queue(&self, depth: usize) -> Self::Queue;
}
