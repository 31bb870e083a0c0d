//! The interface of a driver, [`Driver`], which a hardware queue drives, and of a device, which a user opens.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use blkyard_mem::{BufferId, RegionTable, RegisteredBuffer};

use crate::fifo::put_first;
use crate::request::{Marks, Ranges, Request, RequestState, RequestTable, Segments};
use crate::{ErrorCode, HedgeDriver, IoErrors, QueueLimits, SharedDepth, SharedTenure, Status, Tag};

/// Driver of a hardware queue: one queue pair of a device.
///
/// `Cx` is the state that all queues of one lane share and the driver borrows for each call, such as the io_uring.
/// Drivers that need no such state accept any.
pub trait Driver<Cx: ?Sized> {
    /// Takes requests from the front of the batch, in order, until the batch is empty or the device is full. Requests
    /// taken are in flight until their tag comes back, here ([`Batch::complete`], [`Batch::put_back`]) or in
    /// [`Driver::poll`]. Requests left stay with the core, which offers them again in the same order, at a time that
    /// depends on the shortage ([`Batch::short_of`]).
    ///
    /// A driver that completes requests before it returns takes them by [`Batch::take_inline`], and its limits bound
    /// the bytes of one request: the other queues of its lane wait meanwhile.
    ///
    /// Before it returns the driver announces the batch to the device with one doorbell write. A driver whose doorbell
    /// is shared by the whole lane leaves that to the lane.
    fn queue_rqs(&mut self, cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>);

    /// Returns requests that the device has completed since the last call. `now_ns` is the time of this batch.
    fn poll(&mut self, cx: &mut Cx, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64);

    /// Whether the driver must be polled although no request is in flight, for a message from another thread or an
    /// event of its connection. Asked in every round of an idle queue.
    #[inline]
    fn wants_poll(&self) -> bool {
        false
    }

    /// The request in this slot has exceeded its timeout; earlier completions have been returned. A driver that can
    /// prove that the device will not touch the request any more may complete it. One that cannot, such as the file
    /// driver with a request in the kernel, leaves it in flight, however late: the default.
    fn timed_out(
        &mut self,
        _cx: &mut Cx,
        _memory: &RegionTable,
        _place: usize,
        _done: &mut Done<'_>,
        _now_ns: u64,
    ) -> TimedOut {
        TimedOut::MoreTime
    }

    /// The memory of later requests; none is in flight. A driver may prepare it, for instance register it with the
    /// kernel, and releases the memory it prepared before. An empty table releases all resources held with this `cx`;
    /// the next call may bring another.
    fn set_memory(&mut self, _cx: &mut Cx, _memory: &RegionTable) {}

    /// The memory has gained or lost regions; the others keep their numbers, and registered buffers stay. Requests may
    /// be in flight; none of them names a region that was lost.
    fn change_memory(&mut self, _cx: &mut Cx, _memory: &RegionTable) {}

    /// Segments of later requests may name this registered buffer, which is in the memory of requests. A driver that
    /// prepares it uses what it prepared for segments with its id; others find their bytes by the memory. Called again
    /// for each buffer after [`Driver::set_memory`], which releases all of them.
    fn add_buffer(&mut self, _cx: &mut Cx, _memory: &RegionTable, _buffer: &Arc<RegisteredBuffer>) {}

    /// Releases what was prepared for a registered buffer: no request in flight names it, and no later one will.
    fn remove_buffer(&mut self, _cx: &mut Cx, _buffer: BufferId) {}

    /// Asks the device to signal the [eventfd](Driver::eventfd) on every later completion. True if a completion came
    /// before the device saw that: then the driver must be polled. A driver without an eventfd does nothing.
    fn arm(&mut self) -> bool {
        false
    }

    /// The device need not ring any more.
    fn disarm(&mut self) {}

    /// Event descriptor that the device signals on completion, if it uses one. The same one for the life of the driver.
    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Latest time of the next poll, although no eventfd will be signalled; for models with timers.
    fn deadline_ns(&self) -> Option<u64> {
        None
    }

    /// Generation of the connection that the requests in flight were sent on; constant for a driver without one. Names
    /// what a [`Fenced`](crate::Fenced) must cover.
    fn generation(&self) -> u32 {
        0
    }

    /// What it offers for hedged reads; `None` if it can send none.
    fn hedges(&mut self) -> Option<&mut dyn HedgeDriver> {
        None
    }
}

/// A driver of a kind known at run time: one indirect call for a batch, none for a request.
impl<Cx: ?Sized, D: Driver<Cx> + ?Sized> Driver<Cx> for Box<D> {
    #[inline]
    fn queue_rqs(&mut self, cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        (**self).queue_rqs(cx, memory, batch);
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        (**self).poll(cx, memory, done, now_ns);
    }

    #[inline]
    fn wants_poll(&self) -> bool {
        (**self).wants_poll()
    }

    fn timed_out(
        &mut self,
        cx: &mut Cx,
        memory: &RegionTable,
        place: usize,
        done: &mut Done<'_>,
        now_ns: u64,
    ) -> TimedOut {
        (**self).timed_out(cx, memory, place, done, now_ns)
    }

    fn set_memory(&mut self, cx: &mut Cx, memory: &RegionTable) {
        (**self).set_memory(cx, memory);
    }

    fn change_memory(&mut self, cx: &mut Cx, memory: &RegionTable) {
        (**self).change_memory(cx, memory);
    }

    fn add_buffer(&mut self, cx: &mut Cx, memory: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        (**self).add_buffer(cx, memory, buffer);
    }

    fn remove_buffer(&mut self, cx: &mut Cx, buffer: BufferId) {
        (**self).remove_buffer(cx, buffer);
    }

    #[inline]
    fn arm(&mut self) -> bool {
        (**self).arm()
    }

    #[inline]
    fn disarm(&mut self) {
        (**self).disarm();
    }

    #[inline]
    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        (**self).eventfd()
    }

    #[inline]
    fn deadline_ns(&self) -> Option<u64> {
        (**self).deadline_ns()
    }

    #[inline]
    fn generation(&self) -> u32 {
        (**self).generation()
    }

    fn hedges(&mut self) -> Option<&mut dyn HedgeDriver> {
        (**self).hedges()
    }
}

/// A driver's answer for a request that has timed out (`BLK_EH_DONE` and `BLK_EH_RESET_TIMER` of Linux).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedOut {
    /// It has completed it, or will: the request is not asked about again.
    TakenBack,
    /// It is given as much time again, and asked about again after that.
    MoreTime,
}

/// Cause for which a driver leaves requests in a batch; determines when they are offered again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shortage {
    /// The device is full: a completion is needed. With no request in flight the queue retries after a delay.
    #[default]
    Device,
    /// A system resource without notification is exhausted: the queue retries after a delay.
    System,
    /// A resource of the lane, such as its time, is used up until the next round. By then the lane has submitted its
    /// entries, and the other queues have had their turn.
    Lane,
}

/// Requests offered to the driver.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Those offered, in order. Those taken are of no meaning any more.
    pub(crate) offered: &'a mut [u16],
    pub(crate) taken: usize,
    pub(crate) table: &'a mut RequestTable,
    pub(crate) done: &'a mut Vec<(u16, Status)>,
    pub(crate) now_ns: u64,
    pub(crate) shortage: Shortage,
    /// Bytes that may still be copied in this turn.
    pub(crate) bytes_left: u64,
}

impl Batch<'_> {
    /// Requests not yet taken.
    #[inline]
    pub fn len(&self) -> usize {
        self.offered.len() - self.taken
    }

    /// Whether all are taken.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The time of this batch.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// The next request, without taking it.
    #[inline]
    pub fn peek(&self) -> Option<(&Request, Segments<'_>)> {
        let number = *self.offered.get(self.taken)?;
        let request = &self.table.requests[usize::from(number)];
        Some((request, self.table.bios.segments(request)))
    }

    /// Takes the next request: it is in flight from here on.
    // Always inlined, so that a driver that does not use the segments does not pay for them.
    #[inline(always)]
    pub fn take(&mut self) -> Option<(Tag, &Request, Segments<'_>)> {
        let number = *self.offered.get(self.taken)?;
        self.taken += 1;
        let RequestTable { requests, bios, .. } = &mut *self.table;
        let request = &mut requests[usize::from(number)];
        if request.state() != RequestState::Idle {
            started_twice(number);
        }
        request.look.set_state(RequestState::InFlight);
        request.start_ns = self.now_ns;
        let request = &*request;
        // Picked up last: a tag that is held across a table lookup would be kept on the stack.
        Some((Tag::pick_up(number), request, bios.segments(request)))
    }

    /// [`Batch::take`] for a driver that copies or clears the bytes of a request before it returns, or has the kernel
    /// do so in the lane's thread. Ends when the [bytes of this turn](crate::HwQueue::set_turn_bytes) are used up, the
    /// last request whole: the rest is offered in the next turn.
    #[inline(always)]
    pub fn take_inline(&mut self) -> Option<(Tag, &Request, Segments<'_>)> {
        let number = *self.offered.get(self.taken)?;
        if self.bytes_left == 0 {
            self.shortage = Shortage::Lane;
            return None;
        }
        let bytes = self.table.requests[usize::from(number)].bytes();
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
        self.take()
    }

    /// A request that was taken, and its segments.
    pub fn request(&self, tag: &Tag) -> (&Request, Segments<'_>) {
        let request = &self.table.requests[tag.index()];
        (request, self.table.bios.segments(request))
    }

    /// The ranges of a discard that was taken.
    pub fn ranges(&self, tag: &Tag) -> Ranges<'_> {
        self.table.bios.ranges(&self.table.requests[tag.index()])
    }

    /// Completes a request on the spot.
    #[inline]
    pub fn complete(&mut self, tag: Tag, status: Status) {
        self.done.push((tag.put_down(), status));
    }

    /// Returns a request of this batch that the device refused: it waits again, in its old position. One that was taken
    /// earlier comes back through [`Done::requeue`].
    pub fn put_back(&mut self, tag: Tag) {
        let (requests, number) = (&mut self.table.requests, tag.put_down());
        let request = &mut requests[usize::from(number)];
        request.set_idle();
        let order = request.order;
        self.taken -= 1;
        put_first(&mut self.offered[self.taken..], number, |other| requests[usize::from(other)].is_later_than(order));
    }

    /// Says why requests are left. Without a word it is the device that is full.
    pub fn short_of(&mut self, shortage: Shortage) {
        self.shortage = shortage;
    }
}

/// A separate function, so that the number needs no stack slot.
#[cold]
fn started_twice(number: u16) -> ! {
    panic!("request {number} was started twice");
}

/// Completions, as the driver reports them.
#[derive(Debug)]
pub struct Done<'a> {
    pub(crate) ended: &'a mut Vec<(u16, Status)>,
    pub(crate) requeued: &'a mut Vec<u16>,
    pub(crate) table: &'a mut RequestTable,
    /// Bytes that may still be copied in this turn.
    pub(crate) bytes_left: u64,
}

impl Done<'_> {
    /// Whether the [bytes of this turn](crate::HwQueue::set_turn_bytes) are used up. A driver that copies completed
    /// data then leaves the rest for the next turn.
    #[inline]
    pub fn is_spent(&self) -> bool {
        self.bytes_left == 0
    }

    /// So many bytes are copied in this turn.
    #[inline]
    pub fn spend(&mut self, bytes: u64) {
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
    }

    /// The request a tag names, and its segments.
    #[inline]
    pub fn request(&self, tag: &Tag) -> (&Request, Segments<'_>) {
        self.request_at(tag.index())
    }

    /// The request in a slot, and its segments.
    #[inline]
    pub fn request_at(&self, index: usize) -> (&Request, Segments<'_>) {
        let request = &self.table.requests[index];
        (request, self.table.bios.segments(request))
    }

    /// The ranges of a discard.
    pub fn ranges(&self, tag: &Tag) -> Ranges<'_> {
        self.table.bios.ranges(&self.table.requests[tag.index()])
    }

    /// Completes a request.
    #[inline]
    pub fn complete(&mut self, tag: Tag, status: Status) {
        self.ended.push((tag.put_down(), status));
    }

    /// Records the error number of the request in a slot, which fails now.
    #[cold]
    pub fn note_code(&mut self, index: usize, code: ErrorCode) {
        self.table.codes.push((index as u16, code));
    }

    /// Requeues a request: it waits ahead of all that were submitted after it. Its memory is not accessed any more, but
    /// the device may still execute it: see [`HwQueue::take_bios`](crate::HwQueue::take_bios).
    pub fn requeue(&mut self, tag: Tag) {
        self.requeue_marked(tag, Marks::UNANSWERED);
    }

    /// [`Done::requeue`] for a request that the device does not execute any more, because it has answered it or is
    /// proven to execute nothing.
    pub fn requeue_answered(&mut self, tag: Tag) {
        self.requeue_marked(tag, Marks::empty());
    }

    fn requeue_marked(&mut self, tag: Tag, marks: Marks) {
        // The error number of a request that fails is that of its last attempt.
        self.table.take_code(tag.index() as u16);
        let request = &mut self.table.requests[tag.index()];
        request.set_idle();
        request.unmark(Marks::UNANSWERED);
        request.mark(marks | Marks::REQUEUED);
        self.requeued.push(tag.put_down());
    }
}

/// Properties of a device, the same for all its queues.
#[derive(Clone, Debug, Default)]
pub struct DeviceInfo {
    /// As the user named it, for messages.
    pub name: String,
    /// Size, sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// Limits of a request.
    pub limits: QueueLimits,
    /// Writes are refused.
    pub read_only: bool,
    /// Completed writes may be lost on power failure until they are flushed.
    pub volatile_cache: bool,
    /// With a volatile cache: the device makes single writes durable by itself when they say FUA. Otherwise the queue
    /// flushes.
    pub fua: bool,
    /// Has seeks: distant positions take longer than adjacent ones.
    pub rotational: bool,
    /// Time after which the driver is asked about a request, ns; zero for that of the queue's configuration.
    pub timeout_ns: u64,
    /// Time for which the device may still execute requests of a process that has died, ns; zero if it cannot be opened
    /// before they have ended, as with a lock.
    pub silence_ns: u64,
    /// How much of it all its queues have in flight together, where a scheduler learns that.
    pub depth: SharedDepth,
    /// Which of its queues has it, where a scheduler gives it to one after the other.
    pub tenure: SharedTenure,
    /// I/O errors that are not logged yet.
    pub errors: IoErrors,
}

/// An opened disk that provides hardware queues.
pub trait BlockDevice {
    /// Driver of one queue of this device.
    type Queue;

    /// Properties of the device.
    fn info(&self) -> &DeviceInfo;

    /// Opens one more queue of `depth` requests.
    fn queue(&self, depth: usize) -> Self::Queue;
}
