//! The interface of a driver, [`Driver`], which a hardware queue drives, and of a device, which a user opens.

use std::os::fd::BorrowedFd;

use blkyard_mem::RegionTable;

use crate::fifo::put_first;
use crate::request::{Ranges, Request, RequestState, RequestTable, Segments};
use crate::{IoErrors, QueueLimits, SharedDepth, Status, Tag};

/// What a hardware queue drives: one queue pair of a device.
///
/// `Cx` is what all queues of one lane share and the driver borrows for each call: the ring of system calls, say.
/// Drivers that need nothing work with any.
pub trait Driver<Cx: ?Sized> {
    /// Takes requests from the front of the batch, in order, until the batch is empty or the device is full. What is
    /// taken is in flight until its tag comes back, here ([`Batch::complete`], [`Batch::put_back`]) or in
    /// [`Driver::poll`]; what is left stays with the core, which offers it again, in the same order. When depends on
    /// what the driver was short of ([`Batch::short_of`]).
    ///
    /// A driver whose requests are done before this returns takes them by [`Batch::take_inline`], and its limits bound
    /// what one request moves: the other queues of its lane wait meanwhile.
    ///
    /// Before it returns the driver announces to the device all it took: one doorbell for the batch. A driver whose
    /// doorbell is shared by the whole lane leaves that to the lane.
    fn queue_rqs(&mut self, cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>);

    /// Hands over what the device has finished since the last call. `now_ns` is the time of this batch.
    fn poll(&mut self, cx: &mut Cx, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64);

    /// Whether the driver must be polled although nothing is in flight: another thread has left something for it. Asked
    /// in every round of an idle queue.
    #[inline]
    fn wants_poll(&self) -> bool {
        false
    }

    /// The request at this place has been in flight for longer than it may; what the device has finished by now has
    /// been handed over. A driver that can prove that the device will not touch the request any more may complete it.
    /// One that cannot, as with a file in the hands of the kernel, leaves it as it is, however late: that is what
    /// happens by default.
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

    /// The memory of the requests to come; nothing is in flight. A driver may prepare it, by registering it with the
    /// kernel, say, and lets go of what it prepared before. Given none at all it lets go of all it has with this `cx`,
    /// for the next call may bring another.
    fn set_memory(&mut self, _cx: &mut Cx, _memory: &RegionTable) {}

    /// Asks the device to ring the [eventfd](Driver::eventfd) from now on, whenever it has finished something. True if
    /// something came before it heard: then there is something to poll for. Nothing to do for a driver without an
    /// eventfd.
    fn arm(&mut self) -> bool {
        false
    }

    /// The device need not ring any more.
    fn disarm(&mut self) {}

    /// The event descriptor that the device rings, if it tells of what it has finished by one. The same one for as long
    /// as the driver lives.
    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// When the driver must be polled next, at the latest, although nothing outside will wake it; for models with
    /// timers.
    fn deadline_ns(&self) -> Option<u64> {
        None
    }
}

/// A driver of a kind that is known when the program runs: one indirect call for a batch, none for a request.
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
}

/// What a driver does about a request whose time is up (`BLK_EH_DONE` and `BLK_EH_RESET_TIMER` of Linux).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedOut {
    /// It has completed it, or will: the request is not asked about again.
    TakenBack,
    /// It is given as much time again, and asked about again after that.
    MoreTime,
}

/// Why a driver leaves requests in a batch, and so what must happen before it is offered them again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shortage {
    /// The device is full: something must come back from it. If nothing is there, the queue tries again after a while.
    #[default]
    Device,
    /// Something is missing that nobody will tell of: the queue tries again after a while.
    System,
    /// What the lane shares, its time among it, is used up until the next round. By then what it holds has been passed
    /// on, and the other queues have had their turn.
    Lane,
}

/// Requests on their way to the driver.
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
    // Always inlined, so that a driver that does not look at the segments does not pay for them.
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
        // Picked up last: so a tag that is held over a look into the table is not kept on the stack.
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

    /// Gives back a request of this batch that the device would not have after all: it waits again, where it stood. One
    /// that was taken earlier comes back through [`Done::requeue`].
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

/// By itself, so that the number needs no place in memory.
#[cold]
fn started_twice(number: u16) -> ! {
    panic!("request {number} was started twice");
}

/// Where a driver puts what the device has finished.
#[derive(Debug)]
pub struct Done<'a> {
    pub(crate) ended: &'a mut Vec<(u16, Status)>,
    pub(crate) requeued: &'a mut Vec<u16>,
    pub(crate) table: &'a mut RequestTable,
    /// Bytes that may still be copied in this turn.
    pub(crate) bytes_left: u64,
}

impl Done<'_> {
    /// Whether the [bytes of this turn](crate::HwQueue::set_turn_bytes) are used up. A driver that copies what has come
    /// back leaves the rest for the next turn then.
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

    /// The request at a place, and its segments.
    #[inline]
    pub fn request_at(&self, index: usize) -> (&Request, Segments<'_>) {
        let request = &self.table.requests[index];
        (request, self.table.bios.segments(request))
    }

    /// The ranges of a discard.
    pub fn ranges(&self, tag: &Tag) -> Ranges<'_> {
        self.table.bios.ranges(&self.table.requests[tag.index()])
    }

    /// A request is over.
    #[inline]
    pub fn complete(&mut self, tag: Tag, status: Status) {
        self.ended.push((tag.put_down(), status));
    }

    /// Notes what the system said to the request at a place, which fails now.
    #[cold]
    pub fn note_errno(&mut self, index: usize, errno: i32) {
        self.table.errnos.push((index as u16, errno));
    }

    /// A request is to be done again: it waits before all that was submitted after it.
    pub fn requeue(&mut self, tag: Tag) {
        self.table.requests[tag.index()].set_idle();
        self.requeued.push(tag.put_down());
    }
}

/// What a device is, the same for all its queues.
#[derive(Clone, Debug, Default)]
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
    /// With a volatile cache: the device makes single writes durable by itself when they say FUA. Otherwise the queue
    /// flushes.
    pub fua: bool,
    /// An arm has to move: what lies far apart takes longer than what lies together.
    pub rotational: bool,
    /// Time after which the driver is asked about a request, ns; zero for that of the queue's configuration.
    pub timeout_ns: u64,
    /// How much of it all its queues have in flight together, where a scheduler learns that.
    pub depth: SharedDepth,
    /// What failed and is not logged yet.
    pub errors: IoErrors,
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
