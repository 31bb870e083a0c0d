//! The session of one I/O completion queue: a host's commands and submission queues behind the core's queue interface.
//!
//! The queue itself is [`ControllerIoQueue`], which turns commands into bios and writes completions. A running queue
//! belongs to its lane. A stopped queue is parked in its [`QueueSlot`], where the control path passes it the commands
//! of the admin side. The two never access it at the same time. Only [`QueueOrders`] reach a running queue.
//!
//! The kick is an eventfd of our own. The control path signals it when a message writes a doorbell of the queue, or the
//! client has a copy and does so itself.
//!
//! Owned by a lane, in a [`QueuePoller`](crate::QueuePoller).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkyard_mem::RegionTable;
use blkyard_mq::{Bio, SignalEventfd};
use blkyard_nvme::{ControllerIoQueue, ControllerMemory, ControllerQueueCommand, ControllerQueueReply, NextBio};
use blkyard_sys::EventFd;

use super::TRANSFER_BYTES;
use crate::core::{BioFeed, ExportLog, QueueSession, QueueSignals, RingView};

/// Bios filled in and commands refused in one round, at most.
const ROUND_MAX: usize = 64;
/// Failures of commands that wait for the admin side; more are not logged.
const FAILURES_MAX: usize = 64;

/// Replies and failures of running queues for the admin side.
#[derive(Debug)]
pub(crate) struct ReplyQueue {
    replies: Mutex<Vec<(u16, ControllerQueueReply)>>,
    /// Signalled when a reply or failure is queued.
    eventfd: EventFd,
}

impl ReplyQueue {
    /// An empty one.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub(crate) fn new() -> io::Result<ReplyQueue> {
        Ok(ReplyQueue { replies: Mutex::default(), eventfd: EventFd::new()? })
    }

    /// Takes all queued replies.
    pub(crate) fn take(&self) -> Vec<(u16, ControllerQueueReply)> {
        // Cleared before the queue is read: a later entry signals again.
        self.eventfd.take();
        std::mem::take(&mut *self.replies.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Has the control path look at the state of the queues.
    #[cold]
    fn wake(&self) {
        self.eventfd.signal();
    }

    #[cold]
    fn push(&self, cqid: u16, reply: ControllerQueueReply) {
        // A host reads failures by a log page, which arrives as a message, so failures cannot cause wake-ups.
        let is_failure = matches!(reply, ControllerQueueReply::Failed(_));
        let mut replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        if is_failure && replies.len() >= FAILURES_MAX {
            return;
        }
        replies.push((cqid, reply));
        drop(replies);
        if !is_failure {
            self.wake();
        }
    }
}

impl AsFd for ReplyQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

/// Storage of an I/O queue without a running session.
pub(crate) type QueueSlot = Arc<Mutex<Option<Box<ControllerIoQueue>>>>;

/// Commands of the admin side that a queue executes while it runs: aborts and changes of memory. A running session
/// takes them when it is notified, and the control path once the queue is stopped, so each is executed once.
#[derive(Debug, Default)]
pub(crate) struct QueueOrders(Mutex<Vec<ControllerQueueCommand>>);

impl QueueOrders {
    pub(crate) fn push(&self, command: ControllerQueueCommand) {
        self.lock().push(command);
    }

    /// In their order.
    pub(crate) fn take(&self) -> Vec<ControllerQueueCommand> {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ControllerQueueCommand>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Setup of an I/O queue session.
pub struct NvmeQueueSetup {
    /// For messages: the queue's number in its export.
    pub(crate) name: String,
    pub(crate) log: Arc<ExportLog>,
    pub(crate) slot: QueueSlot,
    pub(crate) orders: Arc<QueueOrders>,
    pub(crate) kick: Option<Arc<EventFd>>,
    /// Interrupt of the queue's vector.
    pub(crate) call: Option<Arc<EventFd>>,
    /// Whether that was set while the queue was not running.
    pub(crate) is_call_new: bool,
    pub(crate) replies: Arc<ReplyQueue>,
}

/// The host's side of a running I/O completion queue.
pub struct NvmeQueueSession {
    name: String,
    log: Arc<ExportLog>,
    /// Slot to return the queue to when it stops.
    slot: QueueSlot,
    queue: Box<ControllerIoQueue>,
    orders: Arc<QueueOrders>,
    memory: ControllerMemory,
    kick: Option<Arc<EventFd>>,
    call: Option<Arc<EventFd>>,
    is_call_new: bool,
    replies: Arc<ReplyQueue>,
    is_broken: bool,
}

impl QueueSession for NvmeQueueSession {
    type Setup = NvmeQueueSetup;
    type Identity = ();
    /// The command's token in the controller's queue.
    type Pending = u16;
    type Base = ();
    type Refusals = ();

    /// Initial segment capacity: the pages of the longest transfer. SGLs with many short segments grow it.
    const SEGMENTS: usize = TRANSFER_BYTES as usize / 4096 + 1;

    fn start(setup: NvmeQueueSetup) -> Result<NvmeQueueSession, String> {
        let NvmeQueueSetup { name, log, slot, orders, kick, call, is_call_new, replies } = setup;
        let queue = slot.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or("the queue is not there")?;
        let memory = queue.memory().clone();
        let is_broken = false;
        Ok(NvmeQueueSession { name, log, slot, queue, orders, memory, kick, call, is_call_new, replies, is_broken })
    }

    /// Completions may have been written while the queue was stopped.
    fn begin<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) {
        self.publish(signals);
        if self.is_call_new {
            // As in `set_call`.
            self.call(signals);
        }
    }

    fn memory(&self) -> &Arc<RegionTable> {
        self.memory.table()
    }

    fn memory_version(&self) -> u64 {
        self.memory.version()
    }

    fn kick(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(|kick| kick.as_fd())
    }

    fn lose_kick(&mut self, error: &io::Error) {
        self.log.warn(format_args!("{}: its kick cannot be listened to, so its queue is polled: {error}", self.name));
        self.kick = None;
    }

    fn call_again<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) {
        self.call(signals);
    }

    fn set_call<Cx: ?Sized + SignalEventfd>(&mut self, call: Option<Arc<EventFd>>, signals: &mut QueueSignals<'_, Cx>) {
        signals.forget_call();
        self.call = call;
        // The host may have missed a call on the previous descriptor.
        self.call(signals);
    }

    #[inline(always)]
    fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Stops fetching from this queue.
    #[cold]
    fn stop(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_broken, true) {
            self.log.warn(format_args!("{}: stopped: {why}", self.name));
        }
    }

    #[inline]
    fn is_lost(&self) -> bool {
        self.memory.table().is_faulted()
    }

    /// Zero: fetched commands stay in the controller's queue until they complete.
    fn left(&self) -> usize {
        0
    }

    #[inline(always)]
    fn round_max(&self) -> usize {
        ROUND_MAX
    }

    fn resume(&mut self) {}

    #[inline]
    fn fetch<D>(&mut self, feed: &mut BioFeed<'_, D, Self>, most: usize, _device_idle: bool) -> bool {
        let mut is_fetched = false;
        for _ in 0..most {
            let Some(mut bio) = feed.take() else { break };
            match self.queue.fetch(&mut bio) {
                NextBio::Bio(token) => feed.submit(bio, token),
                // Refused, or completed without a device request.
                NextBio::Without => feed.put_back(bio),
                NextBio::Unavailable => {
                    feed.put_back(bio);
                    break;
                }
            }
            is_fetched = true;
        }
        is_fetched
    }

    #[cold]
    fn notified<D>(&mut self, feed: &mut BioFeed<'_, D, Self>) {
        let queue = &mut self.queue;
        for command in self.orders.take() {
            match command {
                ControllerQueueCommand::Abort { sqid, cid } => {
                    queue.abort(sqid, cid, |token, bios| feed.cancel(bios, |pending| *pending == token));
                }
                command => queue.handle(command),
            }
        }
        self.memory = queue.memory().clone();
    }

    #[inline]
    fn end(&mut self, bio: &Bio, token: u16) {
        self.queue.end(token, bio.status);
    }

    #[inline]
    fn publish<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) {
        if self.queue.publish().is_some() {
            self.call(signals);
        }
    }

    #[inline]
    fn end_round<Cx: ?Sized + SignalEventfd>(&mut self, _signals: &mut QueueSignals<'_, Cx>) -> bool {
        // Also checked in rounds without work, since polling reads the memory.
        if self.is_lost() {
            self.lose();
        }
        self.tell();
        false
    }

    fn arm(&mut self) -> bool {
        let is_ready = self.queue.arm();
        self.tell();
        is_ready
    }

    /// Event indexes are left unchanged: the host only writes doorbell registers more often than needed.
    fn disarm(&mut self) {}

    fn rest<Cx: ?Sized + SignalEventfd>(mut self, _signals: &mut QueueSignals<'_, Cx>) {
        // While the queue is stopped, the host writes doorbell registers, as for a sleeping queue.
        self.arm();
        *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.queue);
    }

    fn view(&self) -> RingView {
        RingView {
            size: self.queue.entries(),
            next: 0,
            in_flight: self.queue.in_flight() as u16,
            is_recorded: false,
            is_broken: self.is_broken,
        }
    }
}

impl NvmeQueueSession {
    #[inline]
    fn call<Cx: ?Sized + SignalEventfd>(&self, signals: &mut QueueSignals<'_, Cx>) {
        if let Some(call) = &self.call {
            signals.call(call);
        }
    }

    /// Passes replies and failures to the admin side.
    #[inline]
    fn tell(&mut self) {
        while let Some(reply) = self.queue.take_reply() {
            self.replies.push(self.queue.cqid(), reply);
        }
    }

    /// Handles truncated memory: the control path ends the session. It disconnects the client after all queues are
    /// suspended, since a client takes the end of its connection for the silence of the device.
    #[cold]
    fn lose(&mut self) {
        if !self.is_broken {
            self.stop("the client truncated memory that it shares");
            self.replies.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::queue_pair;

    #[test]
    fn notifications_of_a_lane_that_takes_none_are_one() {
        let (remote, port) = queue_pair::<NvmeQueueSession>();
        for _ in 0..2 {
            (0..1000).for_each(|_| remote.notify().unwrap());
            assert_eq!(port.take_all(), 1);
        }
    }
}
