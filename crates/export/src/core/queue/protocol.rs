//! What a protocol is to the queues of an export: the client's ring while a session runs it.
//!
//! The core owns the hardware queue and its members, bios, bounds, commands and what they wait for. A protocol fetches
//! commands of its ring into bios, completes them there, and says by what it is kicked and calls. It knows nothing of
//! other members, of draining, or of lanes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mem::RegionTable;
use blkyard_mq::{Bio, HwQueue, SignalEventfd, SignalSlot};
use blkyard_sys::EventFd;

use super::bios::BioPool;
use super::view::RingView;

/// The session of one client queue: its ring, from the moment a client starts it until it is suspended. Owned by the
/// lane; every method is a plain call of the poller, and no method waits.
///
/// Calls in one round, in this order: [`resume`](QueueSession::resume) and [`end`](QueueSession::end) for what the
/// device has finished; [`fetch`](QueueSession::fetch); [`publish`](QueueSession::publish);
/// [`end_round`](QueueSession::end_round).
pub trait QueueSession: Sized + Send + 'static {
    /// All that a session needs to run.
    type Setup: Send;
    /// What the queue says of its device to every client, such as a serial number.
    type Identity: Send;
    /// What the protocol needs at the end of a request, beside the bio that carries it.
    type Pending: Send;
    /// Where a ring stands, for the session that goes on with it.
    type Base: Copy + Send;
    /// Counters of what clients got wrong, over all sessions of a queue.
    type Refusals: Default + Send + Sync;

    /// Segments a bio has room for from the start.
    const SEGMENTS: usize;

    /// A session that does not run yet.
    ///
    /// # Errors
    /// What the client set up is no ring.
    fn start(setup: Self::Setup) -> Result<Self, String>;

    /// It runs from now on: the client need not kick while it does.
    fn begin<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>);

    /// The memory that its bios point into.
    fn memory(&self) -> &Arc<RegionTable>;

    /// By what the client says that there is something to fetch. Without it the ring is looked at now and then.
    fn kick(&self) -> Option<BorrowedFd<'_>>;

    /// The kick cannot be listened to: from now on there is none.
    fn lose_kick(&mut self, error: &io::Error);

    /// Calls the client by this from now on.
    fn set_call<Cx: ?Sized + SignalEventfd>(&mut self, call: Option<Arc<EventFd>>, signals: &mut QueueSignals<'_, Cx>);

    /// Whether the ring made no sense, or its memory went away: it is fetched from no more.
    fn is_broken(&self) -> bool;

    /// The ring makes no sense, for this reason.
    fn stop(&mut self, why: &str);

    /// Whether memory that the client shares has gone away.
    fn is_lost(&self) -> bool;

    /// Requests that a session before this one had fetched and never completed, and that are still to be fetched. A
    /// queue does not rest before these are done.
    fn left(&self) -> usize;

    /// Requests that one round fetches, at most. A request that is completed on the spot returns its bio at once, so
    /// without this bound a client that offers as fast as it is served would keep the lane from its other queues.
    fn round_max(&self) -> usize;

    /// A round begins that gives something back first.
    fn resume(&mut self);

    /// Fetches requests while there are bios to carry them, but no more than `most`. `device_idle` says that the device
    /// has nothing to do. Returns whether anything was fetched.
    fn fetch<D>(&mut self, feed: &mut BioFeed<'_, D, Self>, most: usize, device_idle: bool) -> bool;

    /// A bio has ended, with its status.
    fn end(&mut self, bio: &Bio, pending: Self::Pending);

    /// Shows the client what was completed, and calls it if it wants to be.
    fn publish<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>);

    /// A round ends. True if the client was told something that is no completion.
    fn end_round<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) -> bool;

    /// Asks the client to kick from now on. True if it has offered something already.
    fn arm(&mut self) -> bool;

    /// The client need not kick.
    fn disarm(&mut self);

    /// Lets go of the ring, in which nothing is in flight: says where it stands.
    fn rest<Cx: ?Sized + SignalEventfd>(self, signals: &mut QueueSignals<'_, Cx>) -> Self::Base;

    /// What there is to see of the ring.
    fn view(&self) -> RingView;
}

/// The way of a session's requests into the hardware queue.
pub struct BioFeed<'a, D, S: QueueSession> {
    pub(super) hw: &'a mut HwQueue<D>,
    pub(super) bios: &'a mut BioPool<S::Pending>,
    /// What the queue says of its device.
    pub identity: &'a S::Identity,
    /// Where the client's mistakes are counted.
    pub refusals: &'a S::Refusals,
}

impl<D, S: QueueSession> BioFeed<'_, D, S> {
    /// A bio for the next request, if one is free. It goes on by [`submit`](BioFeed::submit) or
    /// [`put_back`](BioFeed::put_back); dropped, it is lost to the queue, which then never rests.
    #[inline(always)]
    #[must_use]
    pub fn take(&mut self) -> Option<Box<Bio>> {
        self.bios.take()
    }

    /// The bio carried nothing.
    #[inline(always)]
    pub fn put_back(&mut self, bio: Box<Bio>) {
        self.bios.put_back(bio);
    }

    /// Submits a bio; what is pending comes back with it, at its [end](QueueSession::end). Its cookie, submitter and
    /// stream are the core's.
    #[inline(always)]
    pub fn submit(&mut self, bio: Box<Bio>, pending: S::Pending) {
        self.bios.keep(&bio, pending);
        self.hw.submit(bio);
    }
}

/// By which a session signals eventfds of its client, which may have arranged that a plain write would block.
pub struct QueueSignals<'a, Cx: ?Sized> {
    pub(super) cx: &'a mut Cx,
    pub(super) slot: &'a mut SignalSlot,
}

impl<Cx: ?Sized + SignalEventfd> QueueSignals<'_, Cx> {
    /// Signals the eventfd by which the client is called.
    #[inline]
    pub fn call(&mut self, call: &EventFd) {
        self.cx.signal(self.slot, call.as_fd());
    }

    /// The eventfd by which the client is called is about to be another.
    pub fn forget_call(&mut self) {
        self.cx.forget(self.slot);
    }

    /// Signals another eventfd than the client's call. A call that has not gone through goes to an eventfd that is
    /// signalled already.
    #[cold]
    pub fn signal_once(&mut self, eventfd: &EventFd) {
        self.cx.forget(self.slot);
        self.cx.signal(self.slot, eventfd.as_fd());
        self.cx.forget(self.slot);
    }
}
