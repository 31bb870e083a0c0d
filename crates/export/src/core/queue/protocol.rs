//! Interface of a protocol to the queues of an export: the client's ring while a session runs it.
//!
//! The core owns the hardware queue and its members, bios, bounds, commands and waits. A protocol fetches requests of
//! its ring into bios, completes them there, and names its kick and call. Other members, draining and lanes are unknown
//! to it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mem::RegionTable;
use blkyard_mq::{Bio, HwQueue, SignalEventfd, SignalSlot};
use blkyard_sys::EventFd;

use super::bios::BioPool;
use super::view::RingView;

/// The session of one client queue: its ring, from its start by a client until it is suspended. Owned by the lane;
/// every method is a plain call of the poller, and no method waits.
///
/// Calls in one round, in this order: [`resume`](QueueSession::resume) and [`end`](QueueSession::end) for completions;
/// [`fetch`](QueueSession::fetch); [`publish`](QueueSession::publish); [`end_round`](QueueSession::end_round).
pub trait QueueSession: Sized + Send + 'static {
    /// All that a session needs to run.
    type Setup: Send;
    /// Identity of the device for every client, such as a serial number.
    type Identity: Send;
    /// Data for the end of a request, beside the bio that carries it.
    type Pending: Send;
    /// Position of a ring, for the session that continues it.
    type Base: Copy + Send;
    /// Counters of clients' mistakes, over all sessions of a queue.
    type Refusals: Default + Send + Sync;

    /// Segments a bio has room for from the start.
    const SEGMENTS: usize;

    /// A session that does not run yet.
    ///
    /// # Errors
    /// The client's set-up is invalid.
    fn start(setup: Self::Setup) -> Result<Self, String>;

    /// It runs from now on: the client need not kick while it does.
    fn begin<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>);

    /// The memory that its bios point into.
    fn memory(&self) -> &Arc<RegionTable>;

    /// Event descriptor by which the client announces requests. Without it the ring is polled now and then.
    fn kick(&self) -> Option<BorrowedFd<'_>>;

    /// The kick cannot be polled: it is dropped.
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

    /// Fetches requests while bios are free, at most `most`. `device_idle` says whether the device has no request.
    /// Returns whether any was fetched.
    fn fetch<D>(&mut self, feed: &mut BioFeed<'_, D, Self>, most: usize, device_idle: bool) -> bool;

    /// A bio has ended, with its status.
    fn end(&mut self, bio: &Bio, pending: Self::Pending);

    /// Publishes completions, and calls the client if it wants to be called.
    fn publish<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>);

    /// Ends a round. True if the client was notified of something other than a completion.
    fn end_round<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) -> bool;

    /// Asks the client to kick from now on. True if it has offered something already.
    fn arm(&mut self) -> bool;

    /// The client need not kick.
    fn disarm(&mut self);

    /// Releases the ring, without requests in flight: returns its position.
    fn rest<Cx: ?Sized + SignalEventfd>(self, signals: &mut QueueSignals<'_, Cx>) -> Self::Base;

    /// State of the ring for inspection.
    fn view(&self) -> RingView;
}

/// The way of a session's requests into the hardware queue.
pub struct BioFeed<'a, D, S: QueueSession> {
    pub(super) hw: &'a mut HwQueue<D>,
    pub(super) bios: &'a mut BioPool<S::Pending>,
    /// The queue's identity for its clients.
    pub identity: &'a S::Identity,
    /// Where the client's mistakes are counted.
    pub refusals: &'a S::Refusals,
}

impl<D, S: QueueSession> BioFeed<'_, D, S> {
    /// A bio for the next request, if one is free. It continues by [`submit`](BioFeed::submit) or
    /// [`put_back`](BioFeed::put_back); when dropped, it is lost to the queue, which then never drains.
    #[inline(always)]
    #[must_use]
    pub fn take(&mut self) -> Option<Box<Bio>> {
        self.bios.take()
    }

    /// Returns an unused bio.
    #[inline(always)]
    pub fn put_back(&mut self, bio: Box<Bio>) {
        self.bios.put_back(bio);
    }

    /// Submits a bio; `pending` comes back with it, at its [end](QueueSession::end). Its cookie, submitter and stream
    /// belong to the core.
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
