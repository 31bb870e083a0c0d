//! The client queues of a hardware queue, and their changes at run time.
//!
//! A client queue leaves by itself: it stops fetching, and leaves once its own bios have returned, independent of the
//! others. It keeps its session, bios, counters and unread commands, and continues from the same position when another
//! hardware queue of its export has adopted it. The control path moves it ([`QueueMover`](super::QueueMover)).

use std::fmt;
use std::io;

use blkyard_mq::{Driver, PollerState, SignalEventfd};

use super::client::ClientQueue;
use super::hw_set::HwQueueSet;
use super::kicks::KickSet;
use super::protocol::QueueSession;
use super::remote::QueuePort;
use super::{QueuePoller, QueueShare, others_run};

/// A client queue detached from its hardware queue; its front-end sees a pause. If dropped, it never runs again.
pub struct DetachedQueue<S: QueueSession> {
    pub(super) queue: Box<ClientQueue<S>>,
    /// Kick set for its next hardware queue, in case that had only one client queue.
    pub(super) kicks: KickSet,
}

impl<S: QueueSession> DetachedQueue<S> {
    /// A stopped client queue without a hardware queue.
    ///
    /// # Errors
    /// The system has no descriptor for a set of kicks.
    pub fn new(identity: S::Identity, port: QueuePort<S>, share: QueueShare) -> io::Result<DetachedQueue<S>> {
        let queue = Box::new(ClientQueue::new(0, identity, port, share));
        Ok(DetachedQueue { queue, kicks: KickSet::new()? })
    }
}

impl<S: QueueSession> fmt::Debug for DetachedQueue<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DetachedQueue").finish_non_exhaustive()
    }
}

impl<D, S: QueueSession> QueuePoller<D, S> {
    /// Hardware queues for a client queue that is new or was detached from others of the same export.
    pub fn of_detached(hw: impl Into<HwQueueSet<D>>, detached: DetachedQueue<S>) -> QueuePoller<D, S> {
        let mut queue = *detached.queue;
        queue.set_number(0);
        QueuePoller::of(hw.into(), vec![queue], None)
    }

    /// Hands over the drained members that were requested. Returns busy if one has left, or commands were handled.
    #[cold]
    pub(super) fn end_slow_round<Cx: ?Sized + SignalEventfd>(&mut self, had_mail: bool, cx: &mut Cx) -> PollerState
    where
        D: Driver<Cx>,
    {
        let before = self.members.len();
        while let Some(index) = self.members.iter().position(ClientQueue::is_parting) {
            let shares = others_run(&self.members, index);
            let mut member = self.members.remove(index);
            let answer = member.part(&mut self.hw, self.kicks.as_ref(), cx, shares);
            self.members_changed();
            if let Some(answer) = answer
                && let Err(member) = answer.send(Box::new(member))
            {
                // The requesting thread has ended. The member stays here.
                self.join(*member, cx);
            }
        }
        if had_mail || self.members.len() < before { PollerState::Busy } else { PollerState::Idle }
    }

    /// Adopts a client queue, which continues from the same position.
    pub(super) fn adopt<Cx: ?Sized + SignalEventfd>(&mut self, detached: DetachedQueue<S>, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        let DetachedQueue { queue, kicks } = detached;
        if self.kicks.is_none() && !self.members.is_empty() {
            self.members.iter_mut().for_each(|member| member.kick_through(&kicks, cx));
            self.kicks = Some(kicks);
        }
        self.join(*queue, cx);
    }

    fn join<Cx: ?Sized + SignalEventfd>(&mut self, mut queue: ClientQueue<S>, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        let is_free = |number: &usize| self.members.iter().all(|member| member.number() != *number);
        queue.set_number((0..=self.members.len()).find(is_free).unwrap_or_default());
        if let Some(waker) = &self.waker {
            // Before the next round reads commands.
            queue.port.shared.waker.register(waker);
        }
        self.members.push(queue);
        let index = self.members.len() - 1;
        let shares = others_run(&self.members, index);
        self.members[index].enter(&mut self.hw, self.kicks.as_ref(), cx, shares);
        self.members_changed();
    }

    /// Adapts the hardware queue's counters and limits to its members.
    pub(super) fn members_changed(&mut self) {
        let Some(first) = self.members.first() else { return };
        let numbers = self.members.iter().map(ClientQueue::number).max().unwrap_or_default() + 1;
        // An unused number belongs to no bio.
        let mut stats = vec![first.stats(); numbers];
        self.positions = vec![0; numbers];
        for (position, member) in self.members.iter().enumerate() {
            stats[member.number()] = member.stats();
            self.positions[member.number()] = position as u8;
        }
        if self.members.len() == 1 {
            // A single member needs no separate counters.
            stats.clear();
        }
        self.hw.set_stats(first.stats(), &stats);
        self.first = 0;
        self.end_holds();
        self.set_depth(None);
    }

    /// Limits the requests in flight to the depths of the members. `changing` is a device whose scheduler is about to
    /// change, and whether the next one orders.
    pub(super) fn set_depth(&mut self, changing: Option<(u16, bool)>) {
        let orders = changing.map_or_else(|| self.hw.orders(), |(_, orders)| orders);
        // Bios of several devices are not bounded together: those of one could then keep those of another out.
        let shares_depth = self.members.len() > 1 && !orders && self.hw.devices() == 1;
        self.members.iter_mut().for_each(|member| member.bound_bios(shares_depth));
        let depths = || self.members.iter().map(ClientQueue::depth);
        // A scheduler that orders gets the depth of one member.
        self.hw.set_depth(depths().max().unwrap_or(1), depths().sum(), changing);
    }
}
