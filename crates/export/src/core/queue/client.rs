//! One client queue of an export: its bios, commands and session, apart from its hardware queue.
//!
//! A hardware queue may serve several client queues. Each has its own bios, ring, call descriptor and mailbox, and is
//! suspended independently: it is drained when its own bios have returned. A bio's cookie names its client queue.
//!
//! Owned by a [`QueuePoller`](super::QueuePoller), which lends it the hardware queue for each step of a round. Memory
//! belongs to the hardware queue: the first client queue that starts sets it, the others must have the same memory or a
//! newer one, and the last one that stops clears it. Only the protocol knows the content of a ring ([`QueueSession`]).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use blkyard_mem::OneshotSender;
use blkyard_mq::{Bio, DeviceInfo, Driver, HwStats, SignalEventfd, SignalSlot};
use blkyard_sys::EventFd;

use super::QueueShare;
use super::bios::{BioPool, Flushing, is_flush, set_member};
use super::hw_set::HwQueueSet;
use super::kicks::KickSet;
use super::protocol::{BioFeed, QueueSession, QueueSignals};
use super::remote::{ClientCommand, QueuePort};
use super::view::QueueView;

/// A client queue of a [`QueuePoller`](super::QueuePoller), with a session or idle.
pub(crate) struct ClientQueue<S: QueueSession> {
    /// Member number in its hardware queue; constant while it is a member.
    number: usize,
    pub(super) port: QueuePort<S>,
    identity: S::Identity,
    refusals: Arc<S::Refusals>,
    pub(super) session: Option<S>,
    bios: BioPool<S::Pending>,
    /// Counters of its I/O, by device.
    stats: Arc<[Arc<HwStats>]>,
    /// Limit of requests in flight, and its upper bound.
    depth: usize,
    depth_max: usize,
    /// Whether the limit was set explicitly.
    is_depth_set: bool,
    suspending: Vec<Sender<Option<S::Base>>>,
    /// Reply channel of a request to leave its hardware queue.
    parting: Option<OneshotSender<Box<ClientQueue<S>>>>,
    flushing: Flushing,
    retiring: bool,
    /// Set if the queue moves to another lane once it is drained.
    leaving: bool,
    /// Until then nothing is fetched: requests of the process before this one were left in flight, and the device may
    /// still execute them.
    held_until_ns: Option<u64>,
    signal: SignalSlot,
    /// The eventfd that the control path has had it signal last, apart from its session.
    aside: Option<Arc<EventFd>>,
    aside_signal: SignalSlot,
}

impl<S: QueueSession> ClientQueue<S> {
    /// A stopped queue with this share of its hardware queue.
    pub(super) fn new(number: usize, identity: S::Identity, port: QueuePort<S>, share: QueueShare) -> ClientQueue<S> {
        let QueueShare { bios, depth, devices } = share;
        let (stats, refusals) = (port.stats(devices), port.refusals());
        ClientQueue {
            number,
            port,
            identity,
            refusals,
            session: None,
            bios: BioPool::new(number, bios, S::SEGMENTS),
            stats,
            depth,
            depth_max: depth,
            is_depth_set: false,
            suspending: Vec::new(),
            parting: None,
            flushing: Flushing::new(number, devices),
            retiring: false,
            leaving: false,
            held_until_ns: None,
            signal: SignalSlot::default(),
            aside: None,
            aside_signal: SignalSlot::default(),
        }
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Sets its number. None of its bios may be in a hardware queue.
    pub(super) fn set_number(&mut self, number: usize) {
        self.number = number;
        self.bios.set_member(number);
        self.flushing.bio_mut().into_iter().for_each(|bio| set_member(bio, number));
    }

    pub(super) fn stats(&self) -> &[Arc<HwStats>] {
        &self.stats
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// Limits its requests in flight; returns the new limit.
    pub(super) fn set_depth(&mut self, depth: usize) -> usize {
        (self.depth, self.is_depth_set) = (depth.clamp(1, self.depth_max), true);
        self.depth
    }

    /// Limits its bios in the hardware queue to its depth, if a limit was set and the hardware queue has the summed
    /// depths of several members. Otherwise a member may use the unused share of the others.
    pub(super) fn bound_bios(&mut self, shares_depth: bool) {
        self.bios.set_out_max(if shares_depth && self.is_depth_set { self.depth } else { usize::MAX });
    }

    pub(super) fn set_leaving(&mut self, leaving: bool) {
        self.leaving = leaving;
    }

    /// Whether none of its bios is in the hardware queue.
    pub(super) fn is_drained(&self) -> bool {
        self.bios.out() == 0 && self.flushing.is_at_hand()
    }

    #[inline]
    pub(super) fn is_stopping(&self) -> bool {
        self.retiring || self.leaving || self.parting.is_some() || !self.suspending.is_empty()
    }

    /// Whether it is stopping and not drained. A retired member may stay drained beside others for long.
    #[inline]
    pub(super) fn is_draining(&self) -> bool {
        self.is_stopping() && self.session.is_some()
    }

    /// Whether it is to leave its hardware queue and is drained.
    pub(super) fn is_parting(&self) -> bool {
        self.parting.is_some() && self.owes_nothing() && self.is_drained()
    }

    /// Whether all requests left in flight by a previous session were fetched, or never will be.
    fn owes_nothing(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.left() == 0 || session.is_broken())
    }

    /// Leaves its hardware queue, and returns the reply channel. `shares` says whether other members of it run.
    pub(super) fn part<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueueSet<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: bool,
    ) -> Option<OneshotSender<Box<ClientQueue<S>>>> {
        self.leave(cx);
        if let Some(session) = &self.session {
            leave_kick(session, kicks, cx);
            if !shares {
                hw.clear_memory(cx);
            }
        }
        self.parting.take()
    }

    /// Continues on another hardware queue. `shares` says whether other members of it run.
    pub(super) fn enter<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueueSet<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: bool,
    ) {
        let Some(session) = &mut self.session else { return };
        if shares {
            hw.renew_memory(cx, session);
        } else {
            hw.set_memory(cx, session);
        }
        if !hw.has_memory_of(session) {
            // A protocol without versions suspends all queues first, which does not include this one.
            session.stop("the other queues of its hardware queue run with other memory");
        }
        if let Some(kicks) = kicks {
            join_kicks(session, kicks);
        }
    }

    /// Waits for its kick by a set from now on, not directly by its lane.
    pub(super) fn kick_through<Cx: ?Sized + SignalEventfd>(&mut self, kicks: &KickSet, cx: &mut Cx) {
        if let Some(session) = &mut self.session {
            leave_kick(session, None, cx);
            join_kicks(session, kicks);
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.retiring && self.session.is_none() && self.is_drained()
    }

    /// Executes commands of the control path, except those for its hardware queue. `shares` says whether other members
    /// of the hardware queue run.
    #[cold]
    pub(super) fn obey<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueueSet<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        (shares, now_ns): (bool, u64),
        command: ClientCommand<S>,
    ) {
        match command {
            ClientCommand::Run(setup, answer) => {
                let started = self.start(hw, kicks, cx, shares, *setup);
                if started.is_ok() {
                    self.hold(hw.silence_ns(), now_ns);
                }
                let _ = answer.send(started);
            }
            ClientCommand::Suspend(answer) => self.suspending.push(answer),
            ClientCommand::Flush(answer) => {
                if !shares && self.session.is_none() && hw.is_idle() {
                    // Drivers of remote disks accept no request before they have had memory, even if it is empty.
                    hw.clear_memory(cx);
                }
                self.flushing.ask(&mut self.bios, answer);
            }
            ClientCommand::Call(call, answer) => {
                if let Some(session) = &mut self.session {
                    session.set_call(call, &mut QueueSignals { cx, slot: &mut self.signal });
                }
                let _ = answer.send(());
            }
            ClientCommand::Notify => {
                self.port.shared.take_notification();
                self.notify(hw, cx);
            }
            ClientCommand::Signal(eventfd, answer) => {
                if !self.aside.as_ref().is_some_and(|last| Arc::ptr_eq(last, &eventfd)) {
                    cx.forget(&mut self.aside_signal);
                }
                cx.signal(&mut self.aside_signal, eventfd.as_fd());
                self.aside = Some(eventfd);
                let _ = answer.send(());
            }
            ClientCommand::Change(device, info, answer) => {
                let at_rest = self.session.is_none() && hw.is_idle();
                // A new queue beside running ones gets the present state of their hardware queue.
                let is_known =
                    self.session.is_none() && hw.info(device).is_some_and(|known| is_same_disk(known, &info));
                if at_rest {
                    hw.set_info(device, info);
                }
                let done = (at_rest || is_known).then_some(());
                let _ = answer.send(done.ok_or_else(|| "the queue is running".into()));
            }
            ClientCommand::Part(answer) => self.parting = Some(answer),
            ClientCommand::Stay => self.parting = None,
            ClientCommand::Retire => {
                self.retiring = true;
                self.forget_aside(cx);
            }
            ClientCommand::Adopt(..)
            | ClientCommand::Depth(..)
            | ClientCommand::Schedule(..)
            | ClientCommand::Rates(..)
            | ClientCommand::Look(_) => {
                unreachable!("done by the hardware queue")
            }
        }
    }

    /// Has its session handle what the control path has left for it, after the requests that the client submitted
    /// before.
    fn notify<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(&mut self, hw: &mut HwQueueSet<D>, cx: &mut Cx) {
        let stopping = self.is_stopping();
        let Some(session) = &mut self.session else { return };
        let most =
            if stopping || self.held_until_ns.is_some() || session.is_broken() { 0 } else { session.round_max() };
        let most = most.min(hw.room()).min(self.bios.room());
        let (identity, refusals) = (&self.identity, &*self.refusals);
        let mut feed = BioFeed { hw, bios: &mut self.bios, identity, refusals };
        session.fetch(&mut feed, most, false);
        session.notified(&mut feed);
        hw.renew_memory(cx, session);
        session.publish(&mut QueueSignals { cx, slot: &mut self.signal });
    }

    /// Holds its requests back if some were left in flight, and the device may execute those of a dead process for this
    /// time.
    fn hold(&mut self, silence_ns: u64, now_ns: u64) {
        let left = self.session.as_ref().filter(|session| silence_ns > 0 && session.left() > 0);
        self.held_until_ns = left.map(|session| {
            session.held(silence_ns);
            now_ns.saturating_add(silence_ns)
        });
    }

    /// Until when it fetches nothing.
    pub(super) fn held_until_ns(&self) -> Option<u64> {
        self.held_until_ns
    }

    /// Fetches again if that time has come.
    pub(super) fn end_hold(&mut self, now_ns: u64) {
        self.held_until_ns.take_if(|until_ns| now_ns >= *until_ns);
    }

    fn start<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueueSet<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: bool,
        setup: S::Setup,
    ) -> Result<(), String> {
        if self.session.is_some() {
            return Err("the queue is running already".into());
        }
        let mut session = S::start(setup)?;
        if shares {
            hw.renew_memory(cx, &session);
        } else {
            hw.set_memory(cx, &session);
        }
        if !hw.has_memory_of(&session) {
            return Err("the other queues of its hardware queue use other memory".into());
        }
        if let Some(kicks) = kicks {
            join_kicks(&mut session, kicks);
        }
        session.begin(&mut QueueSignals { cx, slot: &mut self.signal });
        self.session = Some(session);
        Ok(())
    }

    /// Whether the client is to be signalled again, which was impossible.
    #[inline]
    pub(super) fn owes_signals(&self) -> bool {
        (self.signal.is_owed && self.session.is_some()) || self.aside_signal.is_owed
    }

    #[cold]
    pub(super) fn signal_again<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx) {
        if std::mem::take(&mut self.signal.is_owed)
            && let Some(session) = &mut self.session
        {
            session.call_again(&mut QueueSignals { cx, slot: &mut self.signal });
        }
        if std::mem::take(&mut self.aside_signal.is_owed)
            && let Some(aside) = &self.aside
        {
            cx.signal(&mut self.aside_signal, aside.as_fd());
        }
    }

    /// Once drained: releases the ring and reports its position.
    #[cold]
    fn rest<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueueSet<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: bool,
    ) {
        cx.forget(&mut self.signal);
        let Some(session) = self.session.take() else { return };
        leave_kick(&session, kicks, cx);
        let base = session.rest(&mut QueueSignals { cx, slot: &mut self.signal });
        if !shares {
            hw.clear_memory(cx);
        }
        for answer in self.suspending.drain(..) {
            let _ = answer.send(Some(base));
        }
    }

    /// State for inspection. The first member shows the hardware queue; all show their settings and their own bios.
    pub(super) fn view<D>(&self, hw: &HwQueueSet<D>, is_first: bool, now_ns: u64) -> QueueView {
        let mut hw = hw.snapshot(now_ns);
        if !is_first {
            (hw.bios, hw.tags_in_use, hw.in_flight, hw.dispatch) = (self.bios.out(), 0, 0, 0);
            hw.requests.clear();
            hw.namespaces.iter_mut().for_each(|namespace| (namespace.waiting, namespace.held_ns) = (0, None));
        }
        let ring = self.session.as_ref().map(S::view);
        let held_ns = self.held_until_ns.map(|until_ns| until_ns.saturating_sub(now_ns));
        QueueView { ring, hw, is_suspending: self.is_draining(), held_ns }
    }

    /// Answers commands that need no work while no session runs.
    #[inline]
    pub(super) fn answer_at_rest(&mut self) {
        // Already drained: memory was released at the end of the session.
        for answer in self.suspending.drain(..) {
            let _ = answer.send(None);
        }
    }

    /// Whether a flush of the control path is requested or in flight. It needs no session.
    #[inline]
    pub(super) fn is_flushing(&self) -> bool {
        !self.flushing.is_at_hand()
    }

    /// Starts a round; bios complete next.
    #[inline(always)]
    pub(super) fn resume(&mut self) {
        if let Some(session) = &mut self.session {
            session.resume();
        }
    }

    /// Completes one of its bios.
    #[inline(always)]
    pub(super) fn end(&mut self, bio: Box<Bio>) {
        match &mut self.session {
            _ if is_flush(&bio) => self.flushing.end(bio),
            Some(session) => {
                let pending = self.bios.pending_of(&bio);
                session.end(&bio, pending);
                self.flushing.returned(&mut self.bios, &bio);
                self.bios.put_back(bio);
            }
            None => unreachable!("a queue rests once its bios are back"),
        }
    }

    /// Publishes completions if there may be any, and fetches requests. `waits` says that it waits for another member
    /// to drain.
    #[inline(always)]
    pub(super) fn feed<Cx: ?Sized + SignalEventfd, D>(
        &mut self,
        hw: &mut HwQueueSet<D>,
        cx: &mut Cx,
        device_idle: bool,
        waits: bool,
        mut busy: bool,
    ) -> bool {
        let stopping = self.is_stopping();
        let Some(session) = &mut self.session else {
            self.flushing.submit(hw);
            return busy;
        };
        // First, for the client may be asleep: while it wakes up, the lane fetches, and then executes.
        if busy {
            session.publish(&mut QueueSignals { cx, slot: &mut self.signal });
        }
        self.flushing.submit(hw);
        if !session.is_broken() {
            // A draining queue fetches only the requests left in flight by an earlier owner.
            let most = match (stopping, waits) {
                _ if self.held_until_ns.is_some() => 0,
                (true, _) => session.left().min(session.round_max()),
                (false, true) => 0,
                (false, false) if hw.is_round_spent() => 0,
                (false, false) => session.round_max(),
            };
            // The control path's flush takes a slot, too, so free bios may exceed the available slots.
            let most = most.min(hw.room()).min(self.bios.room());
            let (identity, refusals) = (&self.identity, &*self.refusals);
            let mut feed = BioFeed { hw, bios: &mut self.bios, identity, refusals };
            // Those that completed on the spot are published before the device's turn, which may be long.
            if session.fetch(&mut feed, most, device_idle) {
                busy = true;
                session.publish(&mut QueueSignals { cx, slot: &mut self.signal });
            }
        }
        busy
    }

    /// Ends its part of a round. Returns whether it has drained or notified the client.
    #[inline(always)]
    pub(super) fn end_round<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueueSet<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: impl FnOnce() -> bool,
    ) -> bool {
        let stopping = self.is_stopping();
        let Some(session) = &mut self.session else { return false };
        let told = session.end_round(&mut QueueSignals { cx, slot: &mut self.signal });
        let is_to_rest = self.retiring || !self.suspending.is_empty();
        if stopping && is_to_rest && self.owes_nothing() && self.is_drained() {
            self.rest(hw, kicks, cx, shares());
            return true;
        }
        told
    }

    /// Detaches from its lane.
    pub(super) fn leave<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx) {
        // A pending call goes to an eventfd that is already signalled.
        cx.forget(&mut self.signal);
        cx.forget(&mut self.aside_signal);
    }

    fn forget_aside<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx) {
        cx.forget(&mut self.aside_signal);
        (self.aside, self.aside_signal.is_owed) = (None, false);
    }

    /// Requests a kick from the client. Returns whether work is already available. `waits` says that it waits for
    /// another member to drain.
    pub(super) fn arm(&mut self, room: usize, waits: bool) -> bool {
        // A stopping queue fetches nothing, and waits only for completions.
        let fetches = !self.is_stopping() && !waits && self.held_until_ns.is_none();
        match &mut self.session {
            Some(session) if fetches && !session.is_broken() => {
                let offered = session.arm() && self.bios.room() > 0 && room > 0;
                offered || session.is_lost()
            }
            _ => false,
        }
    }

    pub(super) fn disarm(&mut self) {
        if let Some(session) = &mut self.session {
            session.disarm();
        }
    }

    /// The kick descriptor to wait for, if any.
    pub(super) fn kick(&self) -> Option<BorrowedFd<'_>> {
        self.session.as_ref().filter(|session| !session.is_broken() && !self.is_stopping())?.kick()
    }

    /// Whether it runs without a kick descriptor: the lane polls it.
    pub(super) fn is_polled(&self) -> bool {
        let polls = |session: &S| session.kick().is_none() && !session.is_broken();
        !self.is_stopping() && self.session.as_ref().is_some_and(polls)
    }
}

/// Adds a session's kick to a set.
#[cold]
fn join_kicks<S: QueueSession>(session: &mut S, kicks: &KickSet) {
    if let Some(Err(error)) = session.kick().map(|kick| kicks.add(kick)) {
        session.lose_kick(&error);
    }
}

/// Removes a session's kick from the set.
fn leave_kick<S: QueueSession, Cx: ?Sized + SignalEventfd>(session: &S, kicks: Option<&KickSet>, cx: &mut Cx) {
    match (session.kick(), kicks) {
        (Some(kick), Some(kicks)) => kicks.remove(kick),
        (Some(kick), None) => cx.ignore(kick),
        (None, _) => {}
    }
}

/// Whether two descriptions are of the same disk with the same state.
fn is_same_disk(one: &DeviceInfo, other: &DeviceInfo) -> bool {
    let parts = |info: &DeviceInfo| {
        (info.capacity_sectors, info.limits, info.read_only, info.volatile_cache, info.fua, info.rotational)
    };
    parts(one) == parts(other)
}
