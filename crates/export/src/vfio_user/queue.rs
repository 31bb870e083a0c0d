//! The session of one I/O completion queue: commands of a host, with its submission queues, as the core's queues have
//! them.
//!
//! The queue itself is [`ControllerIoQueue`], which turns commands into bios and writes completions. While the
//! session runs, it belongs to the lane; at rest it is parked in its [`QueueSlot`], where the control path hands it
//! what the admin side asks. So the two never touch it at the same time, and no command crosses threads.
//!
//! The kick is an eventfd of our own: the control path signals it when a message writes a doorbell of the queue.
//!
//! Owned by a lane, in a [`QueuePoller`](crate::QueuePoller).

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use blkyard_mem::RegionTable;
use blkyard_mq::{Bio, SignalEventfd};
use blkyard_nvme::{ControllerIoQueue, ControllerQueueReply, NextBio};
use blkyard_sys::EventFd;

use super::TRANSFER_BYTES;
use crate::core::{BioFeed, ExportLog, QueueSession, QueueSignals, RingView};

/// Bios filled in and commands refused in one round, at most.
const ROUND_MAX: usize = 64;
/// Failures of commands that wait for the admin side; more are not logged.
const FAILURES_MAX: usize = 64;

/// What running queues tell the admin side.
#[derive(Debug)]
pub(crate) struct ReplyQueue {
    replies: Mutex<Vec<(u16, ControllerQueueReply)>>,
    /// Signalled for what the admin side should know soon.
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

    /// All that has come.
    pub(crate) fn take(&self) -> Vec<(u16, ControllerQueueReply)> {
        // Before the look: what comes later signals again.
        self.eventfd.take();
        std::mem::take(&mut *self.replies.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[cold]
    fn push(&self, cqid: u16, reply: ControllerQueueReply) {
        // Failures are read by a log page, which comes as a message. A host cannot cause a wake-up with each of them.
        let is_failure = matches!(reply, ControllerQueueReply::Failed(_));
        let mut replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        if is_failure && replies.len() >= FAILURES_MAX {
            return;
        }
        replies.push((cqid, reply));
        drop(replies);
        if !is_failure {
            self.eventfd.signal();
        }
    }
}

impl AsFd for ReplyQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

/// Where an I/O queue is while no session runs it.
pub(crate) type QueueSlot = Arc<Mutex<Option<Box<ControllerIoQueue>>>>;

/// All an I/O queue needs to run.
pub struct NvmeQueueSetup {
    /// For messages: the queue's number in its export.
    pub(crate) name: String,
    pub(crate) log: Arc<ExportLog>,
    /// Unset for a session that has no commands, and only flushes what came before it.
    pub(crate) slot: Option<QueueSlot>,
    /// The regions that bios point into.
    pub(crate) table: Arc<RegionTable>,
    pub(crate) kick: Option<Arc<EventFd>>,
    /// Interrupt of the queue's vector.
    pub(crate) call: Option<Arc<EventFd>>,
    pub(crate) replies: Arc<ReplyQueue>,
    /// The connection, to be closed should the shared memory go away under us.
    pub(crate) connection: Arc<UnixStream>,
}

/// The host's side of an I/O completion queue that runs.
pub struct NvmeQueueSession {
    name: String,
    log: Arc<ExportLog>,
    /// Where the queue goes at rest.
    slot: Option<QueueSlot>,
    queue: Option<Box<ControllerIoQueue>>,
    table: Arc<RegionTable>,
    kick: Option<Arc<EventFd>>,
    call: Option<Arc<EventFd>>,
    replies: Arc<ReplyQueue>,
    connection: Arc<UnixStream>,
    is_broken: bool,
}

impl QueueSession for NvmeQueueSession {
    type Setup = NvmeQueueSetup;
    type Identity = ();
    /// The command's token in the controller's queue.
    type Pending = u16;
    type Base = ();
    type Refusals = ();

    /// As many as the longest transfer in pages needs. One whose SGL has many short pieces takes more.
    const SEGMENTS: usize = TRANSFER_BYTES as usize / 4096 + 1;

    fn start(setup: NvmeQueueSetup) -> Result<NvmeQueueSession, String> {
        let NvmeQueueSetup { name, log, slot, table, kick, call, replies, connection } = setup;
        let take = |slot: &QueueSlot| slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        let queue = slot.as_ref().map(|slot| take(slot).ok_or("the queue is not there")).transpose()?;
        Ok(NvmeQueueSession { name, log, slot, queue, table, kick, call, replies, connection, is_broken: false })
    }

    fn begin<Cx: ?Sized + SignalEventfd>(&mut self, _signals: &mut QueueSignals<'_, Cx>) {}

    fn memory(&self) -> &Arc<RegionTable> {
        &self.table
    }

    fn kick(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(|kick| kick.as_fd())
    }

    fn lose_kick(&mut self, error: &io::Error) {
        self.log.warn(format_args!("{}: its kick cannot be listened to, so its queue is polled: {error}", self.name));
        self.kick = None;
    }

    fn set_call<Cx: ?Sized + SignalEventfd>(&mut self, call: Option<Arc<EventFd>>, signals: &mut QueueSignals<'_, Cx>) {
        signals.forget_call();
        self.call = call;
        // The host may have missed one that went to the old descriptor.
        self.call(signals);
    }

    #[inline(always)]
    fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Fetches no more from this queue.
    #[cold]
    fn stop(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_broken, true) {
            self.log.warn(format_args!("{}: stopped: {why}", self.name));
        }
    }

    #[inline]
    fn is_lost(&self) -> bool {
        self.table.is_faulted()
    }

    /// A command that was fetched stays in the controller's queue until it is complete.
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
        let Some(queue) = &mut self.queue else { return false };
        let mut is_fetched = false;
        for _ in 0..most {
            let Some(mut bio) = feed.take() else { break };
            match queue.fetch(&mut bio) {
                NextBio::Bio(token) => feed.submit(bio, token),
                // Refused, or complete without a device.
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

    #[inline]
    fn end(&mut self, bio: &Bio, token: u16) {
        let Some(queue) = &mut self.queue else { unreachable!("without a queue there are no commands") };
        queue.end(token, bio.status);
    }

    #[inline]
    fn publish<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) {
        if self.queue.as_mut().is_some_and(|queue| queue.publish().is_some()) {
            self.call(signals);
        }
    }

    #[inline]
    fn end_round<Cx: ?Sized + SignalEventfd>(&mut self, _signals: &mut QueueSignals<'_, Cx>) -> bool {
        // Also without work: looking for some touches the memory.
        if self.is_lost() {
            self.lose();
        }
        self.tell();
        false
    }

    fn arm(&mut self) -> bool {
        let is_ready = self.queue.as_mut().is_some_and(|queue| queue.arm());
        self.tell();
        is_ready
    }

    /// The event indexes stay: the host writes a doorbell more than it needs to, at most.
    fn disarm(&mut self) {}

    fn rest<Cx: ?Sized + SignalEventfd>(mut self, _signals: &mut QueueSignals<'_, Cx>) {
        // Doorbells are written by the host's registers from now on, as if it slept.
        self.arm();
        if let Some(slot) = &self.slot {
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = self.queue.take();
        }
    }

    fn view(&self) -> RingView {
        let queue = self.queue.as_ref();
        RingView {
            size: queue.map_or(0, |queue| queue.entries()),
            next: 0,
            in_flight: queue.map_or(0, |queue| queue.in_flight() as u16),
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

    /// Passes on what the queue has to say to the admin side.
    #[inline]
    fn tell(&mut self) {
        let Some(queue) = &mut self.queue else { return };
        while let Some(reply) = queue.take_reply() {
            self.replies.push(queue.cqid(), reply);
        }
    }

    /// The memory was cut short. Ends the control path's session, which suspends all queues and lets go of the memory.
    #[cold]
    fn lose(&mut self) {
        if !self.is_broken {
            self.stop("the client truncated memory that it shares");
            let _ = self.connection.shutdown(Shutdown::Both);
        }
    }
}
