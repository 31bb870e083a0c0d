//! Messages between a queue on its lane and the control thread of its association.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;

use blkyard_mem::Mailbox;
use blkyard_mq::{QueueKind, StreamSocket};
use blkyard_nvme::{FabricsIoQueue, FabricsQueueCommand, FabricsQueueReport};
use blkyard_sys::EventFd;

use crate::AttachError;

/// To a queue: a command of the association, and the address for its connection.
pub(super) type TcpQueueMessage = (FabricsQueueCommand, SocketAddr);

/// To the control thread.
#[derive(Debug)]
pub(super) enum TcpCommand {
    /// One more queue.
    Open(QueueKind, Sender<Result<OpenedTcpQueue, AttachError>>),
    /// Report of the queue of this identifier, about this association.
    Report(u16, u64, FabricsQueueReport),
    /// A queue is dropped. The socket of its stream, if it has left its lane, is closed here.
    Close(u16, Option<StreamSocket>),
}

/// A queue that may be used.
#[derive(Debug)]
pub(super) struct OpenedTcpQueue {
    pub(super) queue: FabricsIoQueue,
    pub(super) mailbox: Arc<TcpQueueMailbox>,
}

/// A queue's mailbox. On separate cache lines: neighbours are read by other threads.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct TcpQueueMailbox {
    messages: Mailbox<TcpQueueMessage>,
    /// Signalled for messages.
    pub(super) eventfd: EventFd,
    pub(super) is_polled: bool,
    /// Whether I/O was completed since the last look: restarts the keep-alive timer of some controllers.
    has_traffic: AtomicBool,
}

impl TcpQueueMailbox {
    pub(super) fn new(kind: QueueKind) -> std::io::Result<TcpQueueMailbox> {
        let (eventfd, is_polled) = (EventFd::new()?, kind == QueueKind::Poll);
        Ok(TcpQueueMailbox { messages: Mailbox::default(), eventfd, is_polled, has_traffic: AtomicBool::new(false) })
    }

    pub(super) fn post(&self, message: TcpQueueMessage) {
        // Never closed: messages to a queue that is gone have no effect.
        let _ = self.messages.send(message);
        // A polled queue finds messages in its next round; its eventfd would never be reset.
        if !self.is_polled {
            self.eventfd.signal_shared();
        }
    }

    #[inline]
    pub(super) fn has_mail(&self) -> bool {
        self.messages.is_pending()
    }

    #[cold]
    pub(super) fn take(&self) -> Vec<TcpQueueMessage> {
        self.messages.take()
    }

    /// I/O was completed.
    #[inline]
    pub(super) fn note_traffic(&self) {
        if !self.has_traffic.load(Relaxed) {
            self.has_traffic.store(true, Relaxed);
        }
    }

    pub(super) fn take_traffic(&self) -> bool {
        self.has_traffic.load(Relaxed) && self.has_traffic.swap(false, Relaxed)
    }
}
