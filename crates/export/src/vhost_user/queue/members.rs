//! Which virtqueues a hardware queue serves, and how that changes while they run.
//!
//! A virtqueue leaves by itself: it fetches nothing more, and goes once its own bios are back, whatever the others have
//! in flight. It takes its session, bios, counters and unread commands along, and continues where it stood when another
//! hardware queue of its export has adopted it. The control path carries it ([`QueueMover`](crate::QueueMover)).

use std::io;
use std::sync::Arc;
use std::sync::mpsc::SendError;

use blkyard_mq::{Driver, HwQueue, PollerState, SignalEventfd};
use blkyard_virtio::SerialId;

use super::{GuestQueue, VhostQueue, VirtqueueShare, others_run};
use crate::vhost_user::kicks::KickSet;
use crate::vhost_user::remote::QueuePort;

/// A virtqueue between two hardware queues. Its front-end notices a pause. Dropped, it never runs again.
pub struct DetachedVirtqueue {
    pub(crate) virtqueue: Box<GuestQueue>,
    /// For the kicks of its next hardware queue, should that have served one virtqueue only.
    pub(crate) kicks: KickSet,
}

impl DetachedVirtqueue {
    /// A virtqueue that no hardware queue serves yet, stopped. Its bios say for schedulers who submits them: no two
    /// virtqueues of a device have the same stream.
    ///
    /// # Errors
    /// The system has no descriptor to hear several kicks by.
    pub fn new(serial: SerialId, port: QueuePort, share: VirtqueueShare, stream: u32) -> io::Result<DetachedVirtqueue> {
        let mut virtqueue = Box::new(GuestQueue::new(0, serial, port, share));
        virtqueue.set_stream(stream);
        Ok(DetachedVirtqueue { virtqueue, kicks: KickSet::new()? })
    }
}

impl<D> VhostQueue<D> {
    /// A hardware queue for a virtqueue that is new or has left another one of the same export.
    pub fn of_detached(hw: HwQueue<D>, detached: DetachedVirtqueue) -> VhostQueue<D> {
        let mut virtqueue = *detached.virtqueue;
        virtqueue.set_number(0);
        VhostQueue::of(hw, vec![virtqueue], None)
    }

    /// Hands over the virtqueues that are asked for and drained. Busy if one has left, or there was mail.
    #[cold]
    pub(super) fn end_slow_round<Cx: ?Sized + SignalEventfd>(&mut self, had_mail: bool, cx: &mut Cx) -> PollerState
    where
        D: Driver<Cx>,
    {
        let before = self.virtqueues.len();
        while let Some(index) = self.virtqueues.iter().position(GuestQueue::is_parting) {
            let shares = others_run(&self.virtqueues, index);
            let mut virtqueue = self.virtqueues.remove(index);
            let answer = virtqueue.part(&mut self.hw, self.kicks.as_ref(), cx, shares);
            self.members_changed();
            if let Some(answer) = answer
                && let Err(SendError(virtqueue)) = answer.send(Box::new(virtqueue))
            {
                // Whoever asked is gone. It is better served here than nowhere.
                self.join(*virtqueue, cx);
            }
        }
        if had_mail || self.virtqueues.len() < before { PollerState::Busy } else { PollerState::Idle }
    }

    /// Serves one more virtqueue, which continues where it stood.
    pub(super) fn adopt<Cx: ?Sized + SignalEventfd>(&mut self, detached: DetachedVirtqueue, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        let DetachedVirtqueue { virtqueue, kicks } = detached;
        if self.kicks.is_none() && !self.virtqueues.is_empty() {
            self.virtqueues.iter_mut().for_each(|member| member.kick_through(&kicks, cx));
            self.kicks = Some(kicks);
        }
        self.join(*virtqueue, cx);
    }

    fn join<Cx: ?Sized + SignalEventfd>(&mut self, mut virtqueue: GuestQueue, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        let is_free = |number: &usize| self.virtqueues.iter().all(|member| member.number() != *number);
        virtqueue.set_number((0..=self.virtqueues.len()).find(is_free).unwrap_or_default());
        if let Some(waker) = &self.waker {
            // Before the next round, which looks for mail.
            virtqueue.port.shared.waker.register(waker);
        }
        self.virtqueues.push(virtqueue);
        let index = self.virtqueues.len() - 1;
        let shares = others_run(&self.virtqueues, index);
        self.virtqueues[index].enter(&mut self.hw, self.kicks.as_ref(), cx, shares);
        self.members_changed();
    }

    /// Has the hardware queue count, and bound what is in flight, for the virtqueues there are.
    pub(super) fn members_changed(&mut self) {
        let Some(first) = self.virtqueues.first() else { return };
        let numbers = self.virtqueues.iter().map(GuestQueue::number).max().unwrap_or_default() + 1;
        // A number that is not in use is of no bio.
        let mut stats = vec![Arc::clone(first.stats()); numbers];
        self.positions = vec![0; numbers];
        for (position, virtqueue) in self.virtqueues.iter().enumerate() {
            stats[virtqueue.number()] = Arc::clone(virtqueue.stats());
            self.positions[virtqueue.number()] = position as u8;
        }
        if self.virtqueues.len() == 1 {
            // Nothing to tell apart.
            stats.clear();
        }
        self.hw.set_stats(Arc::clone(first.stats()), stats);
        self.first = 0;
        self.set_depth(self.hw.scheduler().orders());
    }

    /// Bounds what is in flight by the depths of the virtqueues. `orders` says whether a scheduler orders them.
    pub(super) fn set_depth(&mut self, orders: bool) {
        let depths = self.virtqueues.iter().map(GuestQueue::depth);
        // What orders for the device orders as little as if there were one virtqueue.
        let depth = if orders { depths.max().unwrap_or(1) } else { depths.sum() };
        self.hw.set_depth(depth);
    }
}
