//! Streams of a lane: its ring as [`StreamService`].
//!
//! ```text
//!   attach, connect ──▶ open ── close, or its inbox was dropped ──▶ closing ── kernel is done ──▶ Closed, free
//! ```
//!
//! A stream has a receive, a send and a cancellation at the kernel at most; their completions have places of the ring
//! from the start, so that none is missing later. A completion is handled when it is reaped: it makes events in the
//! inbox of the stream's owner, and may make an operation due, which is pushed after all others were reaped. Memory
//! that the kernel uses belongs to the stream (`stream.rs`), which is freed when the last operation has ended.
//!
//! The owner of an inbox looks at it in each round. A parked owner has none: an inbox that was not looked at for a turn
//! is reported to the lane ([`Ring::take_unattended`]).
//!
//! Unsafe: pushes entries whose memory belongs to streams.

mod stream;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use blkyard_mem::RegionTable;
use blkyard_mq::{
    SendPiece, StreamDestination, StreamError, StreamEvent, StreamId, StreamInbox, StreamLimits, StreamService,
    StreamSocket,
};
use io_uring::{Probe, opcode};

use super::{KIND_STREAM, Ring, name};
use stream::{CANCEL, CONNECT, Operation, RECEIVE, RingStream, SEND, SocketKind, TIMER};

/// Streams of a lane: a thousand hosts with an admin and an I/O connection.
const STREAMS_MAX: usize = 2048;
/// Completions that a stream may have outstanding.
const COMPLETIONS_EACH: usize = 3;
/// Events of a stream that may wait in an inbox: two lists, a receive, an end, a failure, a close.
const EVENTS_EACH: usize = 6;
/// Bits of a generation in the name of an entry.
const GENERATION_BITS: u32 = 24;
const OPERATION_BITS: u32 = 8;

/// Events of an owner.
struct InboxEvents {
    /// The owner has the other reference.
    alive: Arc<()>,
    events: VecDeque<(u32, u64, StreamEvent)>,
    /// Turn in which the first event came that the owner has not looked at.
    unseen_since: Option<u64>,
    streams: usize,
}

impl InboxEvents {
    fn is_dropped(&self) -> bool {
        Arc::strong_count(&self.alive) == 1
    }
}

/// A place for a stream.
#[derive(Default)]
struct StreamPlace {
    generation: u32,
    stream: Option<Box<RingStream>>,
}

#[derive(Default)]
pub(super) struct RingStreams {
    places: Vec<StreamPlace>,
    inboxes: Vec<Option<InboxEvents>>,
    open: usize,
    /// Streams with operations that are due, or that may be free.
    ready: Vec<u32>,
    /// Events that no owner has taken.
    pending: usize,
    /// Inboxes with events that their owners have not looked at.
    unseen: usize,
    turn: u64,
    is_probed: bool,
}

impl RingStreams {
    fn get(&self, id: StreamId) -> Option<&RingStream> {
        let place = self.places.get(id.index as usize).filter(|place| place.generation == id.generation)?;
        place.stream.as_deref()
    }

    fn get_mut(&mut self, id: StreamId) -> Option<&mut RingStream> {
        let place = self.places.get_mut(id.index as usize).filter(|place| place.generation == id.generation)?;
        place.stream.as_deref_mut()
    }

    /// A stream that has completions at the kernel by this name.
    fn entry_name(&self, index: u32, operation: Operation) -> u64 {
        let generation = self.places[index as usize].generation;
        name(KIND_STREAM, index, generation << OPERATION_BITS | u32::from(operation))
    }

    /// An operation of a stream has ended. False if there is none of this name.
    pub(super) fn ended(&mut self, index: usize, low: u32, result: i32) -> bool {
        let operation = low as Operation;
        let Some(place) = self.places.get_mut(index).filter(|place| place.generation == low >> OPERATION_BITS) else {
            return false;
        };
        let Some(stream) = place.stream.as_deref_mut().filter(|stream| stream.out & operation != 0) else {
            return false;
        };
        stream.out &= !operation;
        let inbox = self.inboxes[stream.inbox as usize].as_mut();
        let mut new = NewEvents { inbox, pending: &mut self.pending, unseen: &mut self.unseen, turn: self.turn };
        let token = stream.token;
        stream.ended(operation, result, &mut |event| new.put(index as u32, token, event));
        self.ready.push(index as u32);
        true
    }

    fn emit(&mut self, index: u32, event: StreamEvent) {
        let Some(stream) = self.places[index as usize].stream.as_deref() else { return };
        let inbox = self.inboxes[stream.inbox as usize].as_mut();
        let mut new = NewEvents { inbox, pending: &mut self.pending, unseen: &mut self.unseen, turn: self.turn };
        new.put(index, stream.token, event);
    }

    /// Drops the events of a stream.
    fn forget_events(&mut self, index: u32) {
        let Some(stream) = self.places[index as usize].stream.as_deref() else { return };
        if let Some(inbox) = &mut self.inboxes[stream.inbox as usize] {
            let before = inbox.events.len();
            inbox.events.retain(|(other, _, _)| *other != index);
            self.pending -= before - inbox.events.len();
        }
    }

    /// Whether operations are due that were not pushed.
    #[inline]
    pub(super) fn has_due(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Whether an owner has events to take.
    pub(super) fn has_events(&mut self) -> bool {
        if self.pending > 0 {
            // Nobody takes those of a dropped inbox.
            for inbox in self.inboxes.iter_mut().flatten().filter(|inbox| inbox.is_dropped()) {
                self.pending -= inbox.events.len();
                inbox.events.clear();
            }
        }
        self.pending > 0
    }

    /// Puts a stream into a free place.
    fn insert(&mut self, stream: RingStream) -> StreamId {
        let free = self.places.iter().position(|place| place.stream.is_none());
        let index = free.unwrap_or_else(|| {
            self.places.push(StreamPlace::default());
            self.places.len() - 1
        });
        self.open += 1;
        if let Some(inbox) = &mut self.inboxes[stream.inbox as usize] {
            inbox.streams += 1;
            // Room for all from the start: events allocate nothing.
            inbox.events.reserve((inbox.streams * EVENTS_EACH).saturating_sub(inbox.events.len()));
        }
        // With a receive that is not pushed yet.
        self.ready.reserve(self.open * (COMPLETIONS_EACH + 1));
        self.places[index].stream = Some(Box::new(stream));
        StreamId { index: index as u32, generation: self.places[index].generation }
    }

    /// Empties a place. The stream has nothing at the kernel.
    fn remove(&mut self, index: u32) -> Option<Box<RingStream>> {
        let place = &mut self.places[index as usize];
        let stream = place.stream.take()?;
        place.generation = (place.generation + 1) & ((1 << GENERATION_BITS) - 1);
        self.open -= 1;
        if let Some(inbox) = &mut self.inboxes[stream.inbox as usize] {
            inbox.streams -= 1;
        }
        Some(stream)
    }

    /// Resets all connections, so that their operations end.
    pub(super) fn reset_all(&self) {
        self.places.iter().filter_map(|place| place.stream.as_deref()).for_each(RingStream::reset);
    }

    /// Operations that the kernel may have; those that write to memory, or the others.
    pub(super) fn out(&self, writes: bool) -> impl Iterator<Item = u64> {
        let streams = self.places.iter().enumerate().filter_map(|(index, place)| Some((index, place.stream.as_ref()?)));
        streams.flat_map(move |(index, stream)| {
            let all = [RECEIVE, SEND, CONNECT, TIMER].into_iter().filter(|operation| stream.out & operation != 0);
            let is_accept = stream.kind == SocketKind::Listening;
            let wanted = all.filter(move |operation| (*operation == TIMER || is_accept) != writes);
            wanted.map(move |operation| self.entry_name(index as u32, operation))
        })
    }

    /// Keeps all memory that the kernel may use.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.places));
    }
}

/// Where events of one inbox are put.
struct NewEvents<'a> {
    inbox: Option<&'a mut InboxEvents>,
    pending: &'a mut usize,
    unseen: &'a mut usize,
    turn: u64,
}

impl NewEvents<'_> {
    fn put(&mut self, index: u32, token: u64, event: StreamEvent) {
        let Some(inbox) = self.inbox.as_mut().filter(|inbox| !inbox.is_dropped()) else { return };
        inbox.events.push_back((index, token, event));
        *self.pending += 1;
        if inbox.unseen_since.is_none() {
            inbox.unseen_since = Some(self.turn);
            *self.unseen += 1;
        }
    }
}

impl Ring {
    /// Whether an owner has not looked at its inbox for a turn, as a parked one. Asked once a turn, after reaping.
    #[inline]
    pub(crate) fn take_unattended(&mut self) -> bool {
        let streams = &mut self.streams;
        streams.turn += 1;
        if streams.unseen == 0 { false } else { self.has_unattended() }
    }

    #[cold]
    fn has_unattended(&mut self) -> bool {
        self.sweep_streams();
        let before = self.streams.turn - 1;
        let inboxes = self.streams.inboxes.iter().flatten();
        inboxes.filter_map(|inbox| inbox.unseen_since).any(|since| since < before)
    }

    /// Makes the steps that are due after completions were reaped, and at the end of a turn.
    #[inline]
    pub(super) fn run_streams(&mut self) {
        while let Some(index) = self.streams.ready.pop() {
            self.push_due(index);
        }
    }

    /// Pushes the operations of a stream that are due, and frees it if it is closed.
    fn push_due(&mut self, index: u32) {
        loop {
            let Some(stream) = self.streams.places[index as usize].stream.as_deref_mut() else { return };
            let due = stream.due & !stream.out;
            if due == 0 {
                break;
            }
            let operation = 1 << due.trailing_zeros();
            stream.due &= !operation;
            let generation = self.streams.places[index as usize].generation;
            let name_of = |operation| name(KIND_STREAM, index, generation << OPERATION_BITS | u32::from(operation));
            let Some(stream) = self.streams.places[index as usize].stream.as_deref_mut() else { return };
            let entry = stream.entry(operation, name_of).user_data(name_of(operation));
            stream.out |= operation;
            // SAFETY: the entry points to memory of the stream, and into regions that it keeps mapped, until its
            // completion is reaped; if the ring cannot wait for that, they are leaked.
            unsafe { self.push_named(&entry) };
        }
        let Some(stream) = self.streams.places[index as usize].stream.as_deref() else { return };
        if stream.is_closing && stream.out == 0 {
            self.free_stream(index);
        }
    }

    #[cold]
    fn free_stream(&mut self, index: u32) {
        self.streams.emit(index, StreamEvent::Closed);
        // Its socket is closed with it. That does not block: a connection that was reset has no data, and nobody can
        // have sent descriptors over TCP.
        drop(self.streams.remove(index));
        self.held -= COMPLETIONS_EACH;
    }

    /// Closes the streams of dropped inboxes.
    pub(super) fn sweep_streams(&mut self) {
        for inbox in 0..self.streams.inboxes.len() {
            let Some(events) = self.streams.inboxes[inbox].as_mut().filter(|events| events.is_dropped()) else {
                continue;
            };
            self.streams.pending -= events.events.len();
            events.events.clear();
            self.streams.unseen -= usize::from(events.unseen_since.take().is_some());
            if events.streams == 0 {
                self.streams.inboxes[inbox] = None;
                continue;
            }
            for index in 0..self.streams.places.len() {
                let place = &self.streams.places[index];
                if place.stream.as_deref().is_some_and(|stream| stream.inbox as usize == inbox) {
                    self.close_stream(StreamId { index: index as u32, generation: place.generation });
                }
            }
        }
    }

    /// Whether another stream can be opened.
    #[cold]
    fn check_stream(&mut self) -> Result<(), StreamError> {
        self.sweep_streams();
        if !self.streams.is_probed {
            self.probe_operations()?;
            self.streams.is_probed = true;
        }
        let max = STREAMS_MAX.min(self.streams.open + self.room() / COMPLETIONS_EACH);
        if self.streams.open < max { Ok(()) } else { Err(StreamError::TooMany { max }) }
    }

    /// Whether the kernel has the operations of streams.
    fn probe_operations(&self) -> Result<(), StreamError> {
        let mut probe = Probe::new();
        if let Err(error) = self.uring.submitter().register_probe(&mut probe) {
            return Err(stream::system("operations of io_uring cannot be listed", error));
        }
        let needed = [
            (opcode::Recv::CODE, "RECV"),
            (opcode::RecvMsg::CODE, "RECVMSG"),
            (opcode::Send::CODE, "SEND"),
            (opcode::SendMsg::CODE, "SENDMSG"),
            (opcode::Connect::CODE, "CONNECT"),
            (opcode::Accept::CODE, "ACCEPT"),
            (opcode::Timeout::CODE, "TIMEOUT"),
            (opcode::TimeoutRemove::CODE, "TIMEOUT_REMOVE"),
            (opcode::AsyncCancel::CODE, "ASYNC_CANCEL"),
        ];
        let missing = needed.into_iter().find(|(code, _)| !probe.is_supported(*code));
        missing.map_or(Ok(()), |(_, operation)| Err(StreamError::Unsupported { operation }))
    }

    fn insert_stream(&mut self, stream: RingStream) -> StreamId {
        self.held += COMPLETIONS_EACH;
        let id = self.streams.insert(stream);
        self.push_due(id.index);
        id
    }
}

impl StreamService for Ring {
    fn stream_inbox(&mut self) -> StreamInbox {
        self.sweep_streams();
        let inboxes = &mut self.streams.inboxes;
        let index = inboxes.iter().position(Option::is_none).unwrap_or_else(|| {
            inboxes.push(None);
            inboxes.len() - 1
        });
        let alive = Arc::new(());
        let events = InboxEvents { alive: Arc::clone(&alive), events: VecDeque::new(), unseen_since: None, streams: 0 };
        inboxes[index] = Some(events);
        StreamInbox { index: index as u32, alive }
    }

    fn connect(
        &mut self,
        inbox: &StreamInbox,
        token: u64,
        address: SocketAddr,
        limits: StreamLimits,
        deadline_ns: u64,
    ) -> Result<StreamId, StreamError> {
        self.check_stream()?;
        let stream = RingStream::connecting(inbox.index, token, address, limits, deadline_ns)?;
        Ok(self.insert_stream(stream))
    }

    fn attach_stream(
        &mut self,
        inbox: &StreamInbox,
        token: u64,
        socket: StreamSocket,
        limits: StreamLimits,
    ) -> Result<StreamId, (StreamError, StreamSocket)> {
        if let Err(error) = self.check_stream() {
            return Err((error, socket));
        }
        let has_received = !socket.received.is_empty();
        let stream = RingStream::attached(inbox.index, token, socket, limits)?;
        let id = self.insert_stream(stream);
        if has_received {
            self.streams.emit(id.index, StreamEvent::Received { direct: 0 });
        }
        Ok(id)
    }

    fn accept(&mut self, stream: StreamId) {
        if self.streams.get_mut(stream).is_some_and(RingStream::prepare_accept) {
            self.push_due(stream.index);
        }
    }

    #[inline]
    fn next_event(&mut self, inbox: &StreamInbox) -> Option<(u64, StreamEvent)> {
        let events = self.streams.inboxes.get_mut(inbox.index as usize)?.as_mut()?;
        assert!(Arc::ptr_eq(&events.alive, &inbox.alive), "an inbox of another lane");
        if events.unseen_since.take().is_some() {
            self.streams.unseen -= 1;
        }
        let (_, token, event) = events.events.pop_front()?;
        self.streams.pending -= 1;
        Some((token, event))
    }

    #[inline]
    fn received(&self, stream: StreamId) -> &[u8] {
        self.streams.get(stream).map_or(&[], RingStream::received)
    }

    #[inline]
    fn consume(&mut self, stream: StreamId, bytes: usize) {
        match self.streams.get_mut(stream) {
            Some(stream) => stream.consume(bytes),
            None => assert!(bytes == 0, "consumed bytes of a stream that is closed"),
        }
    }

    /// Pushed at the end of the turn, or behind a list that is sent before.
    #[inline]
    fn receive(&mut self, stream: StreamId, into: Option<StreamDestination<'_>>) {
        if self.streams.get_mut(stream).is_some_and(|stream| stream.prepare_receive(into)) {
            self.streams.ready.push(stream.index);
        }
    }

    #[inline]
    fn can_send(&self, stream: StreamId) -> bool {
        self.streams.get(stream).is_some_and(RingStream::can_send)
    }

    #[inline]
    fn send<'p>(
        &mut self,
        stream: StreamId,
        number: u64,
        memory: &Arc<RegionTable>,
        pieces: impl Iterator<Item = SendPiece<'p>>,
    ) -> bool {
        let Some(open) = self.streams.get_mut(stream) else { panic!("a list was given to a stream that is closed") };
        if !open.prepare_send(number, memory, pieces) {
            return false;
        }
        self.push_due(stream.index);
        true
    }

    fn shutdown(&mut self, stream: StreamId) {
        if let Some(stream) = self.streams.get_mut(stream) {
            stream.shutdown();
        }
    }

    fn close_stream(&mut self, stream: StreamId) {
        let Some(open) = self.streams.get_mut(stream).filter(|stream| !stream.is_closing) else { return };
        open.close();
        self.streams.forget_events(stream.index);
        self.push_due(stream.index);
    }

    fn detach_stream(&mut self, stream: StreamId) -> Option<StreamSocket> {
        let open = self.streams.get_mut(stream)?;
        let is_busy = open.kind != SocketKind::Connected || open.is_closing || open.is_sending() || open.is_direct();
        let inbox = self.streams.get(stream)?.inbox;
        let has_sent = self.streams.inboxes[inbox as usize].as_ref().is_some_and(|inbox| {
            inbox.events.iter().any(|(of, _, event)| *of == stream.index && matches!(event, StreamEvent::Sent(_)))
        });
        if is_busy || has_sent {
            return None;
        }
        self.cancel_receive(stream)?;
        self.streams.forget_events(stream.index);
        let detached = self.streams.remove(stream.index)?;
        self.held -= COMPLETIONS_EACH;
        Some(detached.into_socket())
    }
}

impl Ring {
    /// Cancels the receive of a stream and waits for its end, which follows at once. `None` if the kernel refuses the
    /// ring.
    fn cancel_receive(&mut self, id: StreamId) -> Option<()> {
        loop {
            let stream = self.streams.get_mut(id)?;
            stream.is_detaching = true;
            if stream.out == 0 {
                return Some(());
            }
            stream.due |= if stream.out & RECEIVE != 0 { CANCEL } else { 0 };
            self.push_due(id.index);
            if let Err(error) = self.uring.submit_and_wait(1) {
                self.refused(error);
            }
            if self.has_failed() {
                return None;
            }
            self.reap();
        }
    }
}

impl std::fmt::Debug for RingStreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RingStreams").field("open", &self.open).field("pending", &self.pending).finish_non_exhaustive()
    }
}
