//! Interface of a protocol to the queues of an export: the client's ring while a session runs it.
//!
//! The core owns the hardware queue and its members, bios, bounds, commands and waits. A protocol fetches requests of
//! its ring into bios, completes them there, and provides its kick and call. It does not know of other members,
//! draining or lanes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mem::RegionTable;
use blkyard_mq::{Bio, SignalEventfd, SignalSlot};
use blkyard_sys::EventFd;

use super::bios::BioPool;
use super::hw_set::HwQueueSet;
use super::view::RingView;

/// The session of one client queue: its ring, from the start by a client until suspension. Owned by the lane. The
/// poller calls every method directly, and no method waits.
///
/// Calls in one round, in this order: [`resume`](QueueSession::resume) and [`end`](QueueSession::end) for completions;
/// [`fetch`](QueueSession::fetch); [`publish`](QueueSession::publish); [`end_round`](QueueSession::end_round).
pub trait QueueSession: Sized + Send + 'static {
    /// Setup of a session.
    type Setup: Send;
    /// Identity of the device for every client, such as a serial number.
    type Identity: Send;
    /// Data for the completion of a request, kept beside its bio.
    type Pending: Send;
    /// Position of a ring, for the session that continues it.
    type Base: Copy + Send;
    /// Counters of invalid requests, over all sessions of a queue.
    type Refusals: Default + Send + Sync;

    /// Initial segment capacity of a bio.
    const SEGMENTS: usize;

    /// A session that does not run yet.
    ///
    /// # Errors
    /// The client's set-up is invalid.
    fn start(setup: Self::Setup) -> Result<Self, String>;

    /// Starts to run; the client need not kick while it runs.
    fn begin<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>);

    /// The memory that its bios point into. Changes in [`QueueSession::notified`] only, to one with the regions of all
    /// bios in flight under the same numbers.
    fn memory(&self) -> &Arc<RegionTable>;

    /// Number of changes of the client's memory before it. Of the client's sessions that share a hardware queue, those
    /// with the newest memory have the regions of all others.
    fn memory_version(&self) -> u64 {
        0
    }

    /// Eventfd by which the client announces requests. Without it the ring is polled, the less often the longer it is
    /// idle.
    fn kick(&self) -> Option<BorrowedFd<'_>>;

    /// The kick cannot be polled, and is dropped.
    fn lose_kick(&mut self, error: &io::Error);

    /// Nothing is fetched for this time, ns: the device may still execute requests of the process before this one.
    fn held(&self, _silence_ns: u64) {}

    /// Calls the client again: the lane could not send a call for lack of descriptors. By default a client is never
    /// called.
    fn call_again<Cx: ?Sized + SignalEventfd>(&mut self, _signals: &mut QueueSignals<'_, Cx>) {}

    /// Replaces the call eventfd.
    fn set_call<Cx: ?Sized + SignalEventfd>(&mut self, call: Option<Arc<EventFd>>, signals: &mut QueueSignals<'_, Cx>);

    /// Whether the ring was invalid or its memory truncated: fetching has stopped.
    fn is_broken(&self) -> bool;

    /// Marks the ring as broken, for this reason.
    fn stop(&mut self, why: &str);

    /// Whether the client's shared memory was truncated.
    fn is_lost(&self) -> bool;

    /// Number of requests that a previous session had fetched and not completed, and that are still to be fetched. A
    /// queue drains only after these are complete.
    fn left(&self) -> usize;

    /// Maximum requests fetched in one round. A request completed on the spot returns its bio at once, so without this
    /// bound a client that submits as fast as it is served would starve the other queues of the lane.
    fn round_max(&self) -> usize;

    /// Starts a round, which returns completions first.
    fn resume(&mut self);

    /// Fetches requests while bios are free, at most `most`. `device_idle` says whether the device has no request.
    /// Returns whether any request was fetched.
    fn fetch<D>(&mut self, feed: &mut BioFeed<'_, D, Self>, most: usize, device_idle: bool) -> bool;

    /// Handles requests that the control path has left for it: see [`QueueRemote::notify`](crate::QueueRemote::notify).
    fn notified<D>(&mut self, _feed: &mut BioFeed<'_, D, Self>) {}

    /// Completes a bio with its status.
    fn end(&mut self, bio: &Bio, pending: Self::Pending);

    /// Publishes completions, and calls the client if it has requested calls.
    fn publish<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>);

    /// Ends a round. Returns whether the client was notified of an event other than a completion.
    fn end_round<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) -> bool;

    /// Requests a kick from the client. Returns whether a request is already available.
    fn arm(&mut self) -> bool;

    /// Tells the client that kicks are not needed.
    fn disarm(&mut self);

    /// Releases the ring without requests in flight; returns its position.
    fn rest<Cx: ?Sized + SignalEventfd>(self, signals: &mut QueueSignals<'_, Cx>) -> Self::Base;

    /// State of the ring for inspection.
    fn view(&self) -> RingView;
}

/// Access for a session's requests to the hardware queue.
pub struct BioFeed<'a, D, S: QueueSession> {
    pub(super) hw: &'a mut HwQueueSet<D>,
    pub(super) bios: &'a mut BioPool<S::Pending>,
    /// The device's identity for clients.
    pub identity: &'a S::Identity,
    /// Counters of invalid requests.
    pub refusals: &'a S::Refusals,
}

impl<D, S: QueueSession> BioFeed<'_, D, S> {
    /// A bio for the next request, if one is free. It must be passed to [`submit`](BioFeed::submit) or
    /// [`put_back`](BioFeed::put_back); a dropped bio is lost to the queue, which then never drains.
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

    /// Has no client queue of the export on this lane fetch any more in this round: a request has taken long to read.
    /// The calling session stops by itself.
    #[cold]
    pub fn end_round(&mut self) {
        self.hw.set_round_spent(true);
    }

    /// Submits a bio to the device that its namespace names; `pending` is returned at its [end](QueueSession::end). Its
    /// cookie, submitter and stream belong to the core.
    #[inline(always)]
    pub fn submit(&mut self, bio: Box<Bio>, pending: S::Pending) {
        self.bios.keep(&bio, pending);
        self.hw.submit(bio);
    }

    /// Takes back submitted bios that no device has, of at most this number with this pending data. They come to their
    /// [end](QueueSession::end) with [`Status::Again`](blkyard_mq::Status::Again). Returns their number.
    #[cold]
    pub fn cancel(&mut self, most: usize, is_its: impl Fn(&S::Pending) -> bool) -> usize {
        let bios = &*self.bios;
        self.hw.cancel(most, |bio| bios.pending(bio).is_some_and(&is_its))
    }
}

/// Signals eventfds of the client, for which a plain write might block.
pub struct QueueSignals<'a, Cx: ?Sized> {
    pub(super) cx: &'a mut Cx,
    pub(super) slot: &'a mut SignalSlot,
}

impl<Cx: ?Sized + SignalEventfd> QueueSignals<'_, Cx> {
    /// Signals the client's call eventfd.
    #[inline]
    pub fn call(&mut self, call: &EventFd) {
        self.cx.signal(self.slot, call.as_fd());
    }

    /// Prepares for a new call eventfd.
    pub fn forget_call(&mut self) {
        self.cx.forget(self.slot);
    }

    /// Signals an eventfd other than the client's call. A pending call goes to an eventfd that is already signalled.
    /// Without descriptors this signal is lost.
    #[cold]
    pub fn signal_once(&mut self, eventfd: &EventFd) {
        let owes_call = self.slot.is_owed;
        self.cx.forget(self.slot);
        self.cx.signal(self.slot, eventfd.as_fd());
        self.cx.forget(self.slot);
        self.slot.is_owed = owes_call;
    }
}
