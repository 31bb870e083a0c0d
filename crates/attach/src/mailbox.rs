//! Messages between a queue on its lane and the control thread of its device.
//!
//! The control thread puts commands into the queue's mailbox and signals its eventfd; the queue reads them in its next
//! round. The queue sends commands to the control thread, and no lane waits for an answer.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{SendError, Sender};

use blkyard_mem::{Mailbox, Region};
use blkyard_mq::QueueKind;
use blkyard_sys::EventFd;
use blkyard_virtio::Violations;

use crate::AttachError;

/// To a queue.
#[derive(Debug)]
pub(crate) enum QueueCommand<R> {
    /// Use this ring, of this number, from now on. Requests in flight in the previous one are to be submitted again.
    Run(RingEnd<R>),
    /// Its memory of this number is known to the back-end, or cannot be. Ends a rest.
    Memory(u64, bool),
    /// Accept no request, and answer with this number once none is in flight: the memory of the session changes.
    Rest(u64),
    /// Its back-end has died.
    Died,
    /// Its back-end was left because it did not answer a request.
    Silent,
    /// Another back-end continues in its ring, and may need a kick.
    GoesOn,
    /// No back-end serves it any more: present and new requests fail, until there is a ring again.
    Fail,
}

/// The driver's end of one ring.
#[derive(Debug)]
pub(crate) struct RingEnd<R> {
    pub(crate) ring: Box<R>,
    pub(crate) kick: Arc<EventFd>,
    /// Counts the rings of a device.
    pub(crate) number: u64,
}

/// Command from a user of the device.
#[derive(Debug)]
pub(crate) enum DeviceCommand<R> {
    /// One more queue.
    Open(QueueKind, Sender<Result<Opened<R>, AttachError>>),
    /// Memory that queues will use, to be announced with the next change.
    Reserve(Arc<Region>),
    /// The memory of a queue, under this number, and whether the queue is quiesced: no request is in flight, and none
    /// is accepted before the answer.
    Memory(u16, u64, Vec<Arc<Region>>, bool),
    /// The queue has no request in flight, and accepts none: the answer to a [`QueueCommand::Rest`] of this number.
    Rested(u16, u64),
    /// The back-end broke this ring of a queue.
    Fault(u16, u64, String),
    /// A request has been in this ring of a queue for too long: which one.
    Late(u16, u64, String),
    /// The queue is dropped. Its ring, if no request is in flight there.
    Close(u16, Option<RingEnd<R>>),
}

/// A queue that may be used.
#[derive(Debug)]
pub(crate) struct Opened<R> {
    pub(crate) number: u16,
    pub(crate) mailbox: Arc<QueueMailbox<R>>,
    /// `None` until there is one.
    pub(crate) ring: Option<RingEnd<R>>,
    /// Time for which requests of a silent back-end are submitted again before they fail, ns.
    pub(crate) gone_max_ns: u64,
}

/// State of a queue for other threads.
#[derive(Clone, Debug)]
pub struct DriverQueueView {
    /// `req.N`, or `req_poll.N` for one that is polled, as Linux names them.
    pub name: String,
    /// Violations of the back-end on it, by reason.
    pub violations: Arc<Violations>,
    /// Consecutive back-ends that died while it had requests in flight, and completed none.
    pub deaths: Arc<AtomicU64>,
}

/// A queue's mailbox. On separate cache lines: neighbours are read by other threads.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct QueueMailbox<R> {
    commands: Mailbox<QueueCommand<R>>,
    /// Rung by the back-end, and for commands; the same one for all back-ends to come.
    pub(crate) eventfd: Arc<EventFd>,
    pub(crate) polled: bool,
    pub(crate) view: DriverQueueView,
}

impl<R> QueueMailbox<R> {
    pub(crate) fn new(kind: QueueKind, eventfd: &Arc<EventFd>, view: DriverQueueView) -> QueueMailbox<R> {
        let polled = kind == QueueKind::Poll;
        QueueMailbox { commands: Mailbox::default(), eventfd: Arc::clone(eventfd), polled, view }
    }

    pub(crate) fn post(&self, command: QueueCommand<R>) {
        // Never closed: a queue that is gone takes no commands, and they go with its mailbox.
        let _ = self.commands.send(command);
        // After the command: an armed queue is woken by the eventfd and finds the command. A polled queue finds it in
        // its next round; its eventfd would never be reset.
        if !self.polled {
            self.eventfd.signal_shared();
        }
    }

    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        self.commands.is_pending()
    }

    #[cold]
    pub(crate) fn take(&self) -> Vec<QueueCommand<R>> {
        self.commands.take()
    }
}

/// The way to the control thread, which ends when all of these are gone.
#[derive(Debug)]
pub(crate) struct ControlSender<C>(Arc<SenderEnd<C>>);

#[derive(Debug)]
struct SenderEnd<C> {
    commands: Option<Sender<C>>,
    wake: Arc<EventFd>,
    /// Signalled when no sender is left: ends every wait of the control thread.
    end: Arc<EventFd>,
}

impl<C> ControlSender<C> {
    pub(crate) fn new(commands: Sender<C>, wake: &Arc<EventFd>, end: &Arc<EventFd>) -> ControlSender<C> {
        let (wake, end) = (Arc::clone(wake), Arc::clone(end));
        ControlSender(Arc::new(SenderEnd { commands: Some(commands), wake, end }))
    }

    /// Whether all other senders are gone.
    pub(crate) fn is_last(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// False if the control thread is gone.
    pub(crate) fn send(&self, command: C) -> bool {
        let SenderEnd { commands, wake, .. } = &*self.0;
        let sent = commands.as_ref().is_some_and(|commands| !matches!(commands.send(command), Err(SendError(_))));
        wake.signal();
        sent
    }
}

impl<C> Clone for ControlSender<C> {
    fn clone(&self) -> ControlSender<C> {
        ControlSender(Arc::clone(&self.0))
    }
}

impl<C> Drop for SenderEnd<C> {
    fn drop(&mut self) {
        self.commands = None;
        self.end.signal();
        self.wake.signal();
    }
}
