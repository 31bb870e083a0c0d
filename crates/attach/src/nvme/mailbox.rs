//! Messages between a queue on its lane and the control thread of its controller.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::mpsc::Sender;

use blkyard_mem::{BufferAddresses, BufferId, BufferMapping, Mailbox, Region, RegisteredBuffer};
use blkyard_mq::QueueKind;
use blkyard_nvme::{IoQueue, IoQueueCommand, IoQueueReport, LateCommand};
use blkyard_sys::EventFd;

use crate::AttachError;

/// To a queue.
#[derive(Debug)]
pub(crate) enum NvmeQueueMessage {
    /// Command of the controller's owner.
    Command(IoQueueCommand),
    /// Use this queue pair from now on. No request is in flight in the previous one.
    Run(RunningQueue),
    /// Controller addresses of its memory of this number, by index of the region; unset if the controller cannot
    /// reach it. And the registered buffers there that it reaches.
    Memory(u64, Vec<Option<u64>>, Vec<ReachedBuffer>),
    /// A registered buffer that the controller reaches.
    Buffer(ReachedBuffer),
}

/// A registered buffer with its controller addresses.
#[derive(Debug)]
pub(crate) struct ReachedBuffer {
    pub(crate) buffer: Arc<RegisteredBuffer>,
    pub(crate) mapping: Arc<BufferMapping>,
    pub(crate) addresses: Arc<BufferAddresses>,
}

/// A queue pair of one session of the controller.
#[derive(Debug)]
pub(crate) struct RunningQueue {
    pub(crate) queue: Box<IoQueue>,
    /// Number of the session.
    pub(crate) session: u64,
    /// Whether an interrupt follows a completion.
    pub(crate) has_interrupt: bool,
    pub(crate) listener: DoorbellListener,
}

/// Who is to be told that a queue has written a doorbell.
#[derive(Clone, Debug)]
pub(crate) enum DoorbellListener {
    /// Nobody: the controller polls the doorbells.
    None,
    /// The control thread, which writes the register.
    Control,
    /// The controller.
    Controller(Arc<EventFd>),
}

impl RunningQueue {
    /// Has its memory on the NUMA node of this thread: a lane, or one that opens the queue for a lane.
    pub(crate) fn move_to_node(&mut self) {
        blkyard_mem::preferred_node().into_iter().for_each(|node| self.queue.move_to_node(node));
    }
}

/// To the control thread. Queues are numbered from zero.
#[derive(Debug)]
pub(crate) enum NvmeCommand {
    /// One more queue, for the namespaces of these indexes.
    Open(Box<[usize]>, QueueKind, Sender<Result<OpenedIoQueue, AttachError>>),
    /// The memory of a queue, under this number.
    Memory {
        queue: usize,
        number: u64,
        regions: Vec<(u32, Arc<Region>)>,
        /// Whether registered buffers stay. If not, no request is in flight.
        keeps_buffers: bool,
    },
    /// One more registered buffer in the memory of a queue.
    AddBuffer(usize, Arc<RegisteredBuffer>),
    /// A queue has dropped a registered buffer.
    RemoveBuffer(usize, BufferId),
    /// Report of a queue, in this session.
    Report(usize, u64, IoQueueReport),
    /// A request has exceeded its timeout, in this session.
    Late(u64, LateCommand),
    /// The controller is to be shut down until the opposite is asked for, or brought up again. Answered once it is.
    Suspend(bool, Sender<Result<(), AttachError>>),
    /// A queue is dropped. Its queue pair, if no request is in flight there.
    Close(usize, Option<RunningQueue>),
}

/// A queue that may be used.
#[derive(Debug)]
pub(crate) struct OpenedIoQueue {
    pub(crate) number: usize,
    pub(crate) mailbox: Arc<NvmeQueueMailbox>,
    pub(crate) running: RunningQueue,
}

/// A queue's mailbox. On separate cache lines: neighbours are read by other threads.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct NvmeQueueMailbox {
    messages: Mailbox<NvmeQueueMessage>,
    /// Signalled by interrupts, and for messages; the same one for all sessions.
    pub(crate) eventfd: Arc<EventFd>,
    pub(crate) is_polled: bool,
    /// Whether the control thread has a doorbell to write.
    has_doorbell: AtomicBool,
}

impl NvmeQueueMailbox {
    pub(crate) fn new(kind: QueueKind, eventfd: &Arc<EventFd>) -> NvmeQueueMailbox {
        let (is_polled, eventfd) = (kind == QueueKind::Poll, Arc::clone(eventfd));
        NvmeQueueMailbox { messages: Mailbox::default(), eventfd, is_polled, has_doorbell: AtomicBool::new(false) }
    }

    pub(crate) fn post(&self, message: NvmeQueueMessage) {
        // Never closed: messages to a queue that is gone are taken by the control thread.
        let _ = self.messages.send(message);
        self.wake();
    }

    /// Has the queue use another queue pair. Messages about one that it was sent before and has not seen are obsolete:
    /// without this, a queue that no thread runs would keep one for each session of its controller.
    pub(crate) fn replace_pair(&self, running: RunningQueue) {
        let unread = self.messages.take().into_iter();
        // Those before are for the pair that it has.
        for message in unread.take_while(|message| !matches!(message, NvmeQueueMessage::Run(_))) {
            let _ = self.messages.send(message);
        }
        self.post(NvmeQueueMessage::Run(running));
    }

    /// Wakes the queue's lane. A polled queue finds messages in its next round; its eventfd would never be reset.
    pub(crate) fn wake(&self) {
        if !self.is_polled {
            self.eventfd.signal_shared();
        }
    }

    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        self.messages.is_pending()
    }

    #[cold]
    pub(crate) fn take(&self) -> Vec<NvmeQueueMessage> {
        self.messages.take()
    }

    /// Has the control thread write the queue's doorbells. True if it must be woken for that.
    #[inline]
    pub(crate) fn post_doorbell(&self) -> bool {
        !self.has_doorbell.swap(true, AcqRel)
    }

    /// Whether doorbells are to be written.
    pub(crate) fn take_doorbell(&self) -> bool {
        self.has_doorbell.load(Acquire) && self.has_doorbell.swap(false, AcqRel)
    }
}
