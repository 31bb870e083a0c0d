//! One I/O queue over TCP as the driver of a hardware queue.
//!
//! Owned by its lane, with its stream. It never waits: until its connection is started it accepts no request. All that
//! is to be sent in a round is one list.
//!
//! ```text
//!   poll:      mailbox ─▶ events of the stream ─▶ completions ─▶ reports ─▶ send
//!   queue_rqs: requests ─▶ commands ─▶ send
//! ```
//!
//! A queue that moves to another lane takes its stream along. The stream of a queue that is dropped goes to the control
//! thread, or is closed by the ring that has it.

mod tls;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mem::{BufferId, RegisteredBuffer};
use blkyard_mq::{
    Batch, Done, Driver, HedgeDriver, RegionTable, Shortage, StreamDestination, StreamEvent, StreamId, StreamInbox,
    StreamService, StreamSocket, TimedOut,
};
use blkyard_nvme::tcp::SendList;
use blkyard_nvme::tls::TlsPsk;
use blkyard_nvme::{FabricsIoQueue, StreamRequest};

use self::tls::QueueTls;
use crate::mailbox::ControlSender;
use crate::nvme_tcp::mailbox::{OpenedTcpQueue, TcpCommand, TcpQueueMailbox};

/// Pieces of a list: 128 writes of a segment each, with their headers and digests.
const PIECES_MAX: usize = 512;
/// Time for a TermReq to arrive before the connection is reset, ns.
const LINGER_NS: u64 = 1_000_000_000;

/// The stream of a queue.
#[derive(Debug)]
enum QueueStream {
    None,
    /// On the lane.
    Open(StreamId),
    /// The last list is sent, and the end of the peer's stream awaited until this time, ns.
    Lingering(StreamId, u64),
    /// Its end is awaited.
    Closing,
    /// Between two lanes.
    Detached(StreamSocket),
}

/// One I/O queue of an attached namespace over TCP.
// On separate cache lines, whatever is beside it.
#[repr(align(128))]
#[derive(Debug)]
pub struct TcpNamespaceQueue {
    queue: FabricsIoQueue,
    mailbox: Arc<TcpQueueMailbox>,
    control: ControlSender<TcpCommand>,
    /// On the present lane.
    inbox: Option<StreamInbox>,
    stream: QueueStream,
    address: Option<SocketAddr>,
    list: SendList,
    connect_ns: u64,
    /// Key of its connections, if they are encrypted.
    psk: Option<Arc<TlsPsk>>,
    /// Encryption of the present one.
    tls: Option<Box<QueueTls>>,
    /// Whether something may be sent in the next round only.
    is_waiting_to_send: bool,
}

impl TcpNamespaceQueue {
    pub(super) fn new(
        opened: OpenedTcpQueue,
        control: ControlSender<TcpCommand>,
        connect_ns: u64,
        psk: Option<Arc<TlsPsk>>,
    ) -> TcpNamespaceQueue {
        let OpenedTcpQueue { queue, mailbox } = opened;
        TcpNamespaceQueue {
            queue,
            mailbox,
            control,
            inbox: None,
            stream: QueueStream::None,
            address: None,
            list: SendList::new(PIECES_MAX),
            connect_ns,
            psk,
            tls: None,
            is_waiting_to_send: false,
        }
    }

    #[cold]
    fn read_mail(&mut self) {
        for (command, address) in self.mailbox.take() {
            self.address = Some(address);
            self.queue.command(command);
        }
    }

    /// Handles the events of the stream.
    #[inline]
    fn run_stream<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx, now_ns: u64) {
        while let Some((_, event)) = self.inbox.as_ref().and_then(|inbox| cx.next_event(inbox)) {
            match (event, &self.stream) {
                (StreamEvent::Received { direct }, QueueStream::Open(stream)) => {
                    let stream = *stream;
                    self.received(cx, stream, direct);
                }
                (StreamEvent::Sent(number), QueueStream::Open(_)) => {
                    // What is encrypted is a copy.
                    if self.tls.is_none() {
                        self.queue.sent(number);
                    }
                    self.is_waiting_to_send = false;
                }
                (event, _) => self.changed(cx, event, now_ns),
            }
        }
        if let Some(request) = self.queue.take_stream_request() {
            self.obey(cx, request, now_ns);
        }
        if let QueueStream::Lingering(stream, until_ns) = self.stream
            && now_ns >= until_ns
        {
            self.close(cx, stream);
        }
    }

    #[inline]
    fn received<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx, stream: StreamId, direct: u32) {
        if direct > 0 {
            self.queue.received(direct);
        }
        if self.tls.is_some() {
            return self.received_sealed(cx, stream);
        }
        let bytes = cx.received(stream);
        let len = bytes.len();
        self.queue.receive(bytes);
        cx.consume(stream, len);
        self.receive(cx, stream);
    }

    /// Starts the next receive: into the segments of a request, if those are what comes next.
    #[inline]
    fn receive<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx, stream: StreamId) {
        let memory = self.queue.memory();
        let destination = if self.tls.is_none() { self.queue.destination() } else { None };
        cx.receive(stream, destination.map(|segment| StreamDestination { memory, segment }));
    }

    /// Events other than those of a running connection.
    #[cold]
    fn changed<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx, event: StreamEvent, now_ns: u64) {
        match (event, &self.stream) {
            (StreamEvent::Connected, QueueStream::Open(stream)) => {
                let stream = *stream;
                match self.psk.clone() {
                    None => self.queue.opened(now_ns),
                    Some(psk) => self.shake_hands(cx, stream, &psk, now_ns),
                }
                self.receive(cx, stream);
            }
            (StreamEvent::Closed, _) => {
                (self.stream, self.is_waiting_to_send, self.tls) = (QueueStream::None, false, None);
                self.queue.closed();
            }
            (StreamEvent::EndOfStream | StreamEvent::Failed(_), QueueStream::Open(_)) => self.queue.lost(),
            (StreamEvent::EndOfStream | StreamEvent::Failed(_), QueueStream::Lingering(stream, _)) => {
                let stream = *stream;
                self.close(cx, stream);
            }
            (StreamEvent::Received { .. }, QueueStream::Lingering(stream, _)) => {
                // Nothing is of use behind a TermReq.
                let stream = *stream;
                let len = cx.received(stream).len();
                cx.consume(stream, len);
                cx.receive(stream, None);
            }
            _ => {}
        }
    }

    #[cold]
    fn obey<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx, request: StreamRequest, now_ns: u64) {
        match (request, &self.stream) {
            (StreamRequest::Open, QueueStream::None) => self.open(cx, now_ns),
            (StreamRequest::Close, QueueStream::Open(stream)) => {
                let stream = *stream;
                // A TermReq is to arrive, if the controller takes it.
                let says_why = self.queue.wants_send() && cx.can_send(stream);
                self.send(cx);
                if says_why {
                    cx.shutdown(stream);
                    self.stream = QueueStream::Lingering(stream, now_ns.saturating_add(LINGER_NS));
                } else {
                    self.close(cx, stream);
                }
            }
            (StreamRequest::Close, QueueStream::None) => self.queue.closed(),
            (StreamRequest::Close, QueueStream::Detached(_)) => {
                self.stream = QueueStream::None;
                self.queue.closed();
            }
            _ => {}
        }
    }

    fn close<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx, stream: StreamId) {
        cx.close_stream(stream);
        self.stream = QueueStream::Closing;
    }

    fn open<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx, now_ns: u64) {
        // One whose stream was left behind on another lane.
        self.tls = None;
        let (limits, until_ns) = (self.limits(), now_ns.saturating_add(self.connect_ns));
        let inbox = self.inbox.get_or_insert_with(|| cx.stream_inbox());
        let Some(address) = self.address else { return self.queue.closed() };
        match cx.connect(inbox, 0, address, limits, until_ns) {
            Ok(stream) => self.stream = QueueStream::Open(stream),
            Err(error) => {
                tracing::warn!("NVMe/TCP I/O queue {}: {error}", self.queue.qid());
                self.queue.closed();
            }
        }
    }

    /// Puts the stream of another lane onto this one.
    #[cold]
    fn attach<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx) {
        if !matches!(self.stream, QueueStream::Detached(_)) {
            return;
        }
        let QueueStream::Detached(socket) = std::mem::replace(&mut self.stream, QueueStream::None) else { return };
        let limits = self.limits();
        let inbox = self.inbox.get_or_insert_with(|| cx.stream_inbox());
        match cx.attach_stream(inbox, 0, socket, limits) {
            Ok(stream) => {
                self.stream = QueueStream::Open(stream);
                if cx.received(stream).is_empty() {
                    self.receive(cx, stream);
                }
            }
            Err((error, _)) => {
                tracing::warn!("NVMe/TCP I/O queue {}: {error}", self.queue.qid());
                self.queue.lost();
                self.queue.closed();
            }
        }
    }

    /// Takes the stream off its lane. No request is in flight.
    #[cold]
    fn leave<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx) {
        match self.stream {
            QueueStream::Open(stream) => {
                if let Some(socket) = cx.detach_stream(stream) {
                    self.stream = QueueStream::Detached(socket);
                } else {
                    // It is being set up. The lane closes the stream with the inbox, and no request is concerned.
                    self.stream = QueueStream::None;
                    self.queue.lost();
                    self.queue.take_stream_request();
                    self.queue.closed();
                }
            }
            QueueStream::Lingering(..) | QueueStream::Closing => {
                self.stream = QueueStream::None;
                self.queue.closed();
            }
            QueueStream::None | QueueStream::Detached(_) => {}
        }
        self.inbox = None;
    }

    /// Sends all that is to be sent, in one list if it fits.
    #[inline]
    fn send<Cx: ?Sized + StreamService>(&mut self, cx: &mut Cx) {
        let QueueStream::Open(stream) = self.stream else { return };
        if self.tls.is_some() {
            return self.send_sealed(cx, stream);
        }
        while self.queue.wants_send() {
            if !cx.can_send(stream) {
                self.is_waiting_to_send = true;
                return;
            }
            self.list.clear();
            let Some(number) = self.queue.fill(&mut self.list) else { return };
            if !cx.send(stream, number, self.queue.memory(), self.list.pieces()) {
                // Memory of a request is gone: its client has cut its file.
                return self.queue.lost();
            }
        }
    }

    #[inline]
    fn report(&mut self) {
        while let Some((association, report)) = self.queue.take_report() {
            self.control.send(TcpCommand::Report(self.queue.qid(), association, report));
        }
        if self.queue.take_traffic() {
            self.mailbox.note_traffic();
        }
    }
}

impl<Cx: ?Sized + StreamService> Driver<Cx> for TcpNamespaceQueue {
    #[inline]
    fn queue_rqs(&mut self, cx: &mut Cx, _: &RegionTable, batch: &mut Batch<'_>) {
        if self.is_waiting_to_send {
            // The peer takes nothing at present.
            return batch.short_of(Shortage::Device);
        }
        self.queue.queue(batch);
        self.send(cx);
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, _: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        if self.mailbox.has_mail() {
            self.read_mail();
        }
        self.run_stream(cx, now_ns);
        self.queue.poll(done, now_ns);
        if let Some(request) = self.queue.take_stream_request() {
            self.obey(cx, request, now_ns);
        }
        self.send(cx);
        self.report();
    }

    /// While it has a lane: events of its stream come at any time.
    #[inline]
    fn wants_poll(&self) -> bool {
        self.inbox.is_some() || self.mailbox.has_mail() || self.queue.wants_poll()
    }

    /// Reports it. The association is ended, and the request given back when its stream is closed.
    fn timed_out(&mut self, _: &mut Cx, _: &RegionTable, _: usize, _: &mut Done<'_>, _: u64) -> TimedOut {
        let timed_out = self.queue.timed_out();
        self.report();
        timed_out
    }

    fn set_memory(&mut self, cx: &mut Cx, memory: &RegionTable) {
        if memory.iter().next().is_none() {
            // The next call may come from another lane.
            self.leave(cx);
            self.report();
        } else {
            self.attach(cx);
        }
        self.queue.set_memory(memory);
    }

    fn change_memory(&mut self, _: &mut Cx, memory: &RegionTable) {
        self.queue.set_memory(memory);
    }

    fn add_buffer(&mut self, _: &mut Cx, memory: &RegionTable, _: &Arc<RegisteredBuffer>) {
        self.queue.set_memory(memory);
    }

    fn remove_buffer(&mut self, _: &mut Cx, _: BufferId) {}

    fn arm(&mut self) -> bool {
        if !self.mailbox.is_polled {
            self.mailbox.eventfd.take();
        }
        self.mailbox.has_mail() || self.queue.wants_poll()
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        (!self.mailbox.is_polled).then(|| self.mailbox.eventfd.as_fd())
    }

    fn generation(&self) -> u32 {
        self.queue.association() as u32
    }

    /// Sent at the end of the next poll, like all that a poll makes.
    fn hedges(&mut self) -> Option<&mut dyn HedgeDriver> {
        self.queue.hedges()
    }

    fn deadline_ns(&self) -> Option<u64> {
        let linger_ns = match self.stream {
            QueueStream::Lingering(_, until_ns) => Some(until_ns),
            _ => None,
        };
        [self.queue.deadline_ns(), linger_ns].into_iter().flatten().min()
    }
}

impl Drop for TcpNamespaceQueue {
    fn drop(&mut self) {
        let detached = match std::mem::replace(&mut self.stream, QueueStream::None) {
            QueueStream::Detached(socket) => Some(socket),
            // Its ring closes it, since the inbox is gone, and keeps the memory that the kernel uses.
            _ => None,
        };
        if self.queue.in_flight() > 0 {
            tracing::warn!(
                "NVMe/TCP I/O queue {}: closed with requests in flight: their data may or may not have reached the disk",
                self.queue.qid()
            );
        }
        self.control.send(TcpCommand::Close(self.queue.qid(), detached));
    }
}
