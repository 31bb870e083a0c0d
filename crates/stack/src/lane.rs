//! A lane's stream service over the simulated network, with the rules of the one over io_uring: lists are read later
//! than they are given, receives end with a part of what has come, a close ends some time after it was asked for.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use blkyard_mem::{RegionTable, Segment};
use blkyard_mq::{
    SendPiece, SignalEventfd, SignalSlot, StreamDestination, StreamError, StreamEvent, StreamId, StreamInbox,
    StreamLimits, StreamService, StreamSocket,
};
use blkyard_sim::Rng;

use crate::network::{Connecting, Ending, Network, Readable, Side};
use crate::socket::port_of;

/// Bytes of a receive, at most.
const RECEIVE_BYTES: u64 = 16 << 10;
/// Longest time from a list to its read by the kernel, and from a close to its end, ns.
const KERNEL_NS: u64 = 30_000;

#[derive(Debug)]
enum PieceToSend {
    Bytes(Vec<u8>),
    Data(Segment),
}

/// A list at the kernel.
#[derive(Debug)]
struct ListAtKernel {
    number: u64,
    at_ns: u64,
    memory: Arc<RegionTable>,
    pieces: Vec<PieceToSend>,
    /// What was read of it, and is not taken by the network.
    bytes: Option<Vec<u8>>,
}

#[derive(Debug)]
enum StreamState {
    Connecting { until_ns: u64 },
    Open,
    Failed,
    Closing { at_ns: u64 },
    Gone,
}

/// The receive of a stream.
#[derive(Debug)]
enum Receive {
    None,
    ToBuffer,
    /// Its first bytes go here.
    ToMemory(Arc<RegionTable>, Segment),
}

#[derive(Debug)]
struct WorldStream {
    connection: u64,
    generation: u32,
    inbox: usize,
    token: u64,
    address: SocketAddr,
    state: StreamState,
    received: Vec<u8>,
    receive: Receive,
    lists: VecDeque<ListAtKernel>,
    is_ended: bool,
}

#[derive(Debug)]
struct Inbox {
    events: VecDeque<(u64, StreamEvent)>,
    alive: Arc<()>,
}

/// A lane.
#[derive(Debug)]
pub(crate) struct WorldLane {
    network: Network,
    rng: Rng,
    streams: Vec<WorldStream>,
    inboxes: Vec<Inbox>,
}

impl WorldLane {
    pub(crate) fn new(network: &Network, rng: Rng) -> WorldLane {
        WorldLane { network: network.clone(), rng, streams: Vec::new(), inboxes: Vec::new() }
    }

    /// What the kernel does until now. Returns whether there is an event.
    pub(crate) fn run(&mut self) -> bool {
        let now_ns = self.network.now_ns();
        for index in 0..self.streams.len() {
            self.run_stream(index, now_ns);
        }
        self.inboxes.iter().any(|inbox| !inbox.events.is_empty())
    }

    fn run_stream(&mut self, index: usize, now_ns: u64) {
        let most = 1 + self.rng.below(RECEIVE_BYTES) as usize;
        let WorldLane { network, streams, inboxes, .. } = self;
        let stream = &mut streams[index];
        let inbox = &mut inboxes[stream.inbox];
        if Arc::strong_count(&inbox.alive) == 1 && !matches!(stream.state, StreamState::Gone) {
            network.close(stream.connection, Side::Host, Ending::Reset);
            (stream.state, stream.receive) = (StreamState::Gone, Receive::None);
            stream.lists.clear();
            return;
        }
        let mut tell = |event| inbox.events.push_back((stream.token, event));
        match stream.state {
            StreamState::Closing { at_ns } if now_ns >= at_ns => {
                stream.state = StreamState::Gone;
                stream.lists.clear();
                tell(StreamEvent::Closed);
            }
            StreamState::Closing { .. } | StreamState::Gone | StreamState::Failed => {}
            StreamState::Connecting { until_ns } => match network.connecting(stream.connection) {
                Connecting::Open => {
                    stream.state = StreamState::Open;
                    tell(StreamEvent::Connected);
                }
                Connecting::Waiting if now_ns < until_ns => {}
                Connecting::Waiting => {
                    stream.state = StreamState::Failed;
                    tell(StreamEvent::Failed(StreamError::ConnectTimeout(stream.address)));
                }
                Connecting::Refused => {
                    stream.state = StreamState::Failed;
                    tell(StreamEvent::Failed(broken()));
                }
            },
            StreamState::Open => {
                while let Some(list) = stream.lists.front_mut().filter(|list| list.at_ns <= now_ns) {
                    let bytes = list.bytes.get_or_insert_with(|| gather(&list.memory, &list.pieces));
                    let taken = network.write(stream.connection, Side::Host, bytes);
                    bytes.drain(..taken);
                    if !bytes.is_empty() {
                        break;
                    }
                    tell(StreamEvent::Sent(list.number));
                    stream.lists.pop_front();
                }
                if matches!(stream.receive, Receive::None) {
                    return;
                }
                let readable = network.readable(stream.connection, Side::Host);
                if readable == Readable::Nothing {
                    return;
                }
                let receive = std::mem::replace(&mut stream.receive, Receive::None);
                match readable {
                    Readable::Nothing => {}
                    Readable::Bytes => {
                        let bytes = network.read(stream.connection, Side::Host, most);
                        let span = match &receive {
                            Receive::ToMemory(memory, segment) => memory.resolve_region(*segment),
                            _ => None,
                        };
                        let direct = span.map_or(0, |span| {
                            let part = span.part(0, bytes.len().min(span.len()));
                            part.copy_from_slice(&bytes[..part.len()]);
                            part.len()
                        });
                        stream.received.extend_from_slice(&bytes[direct..]);
                        tell(StreamEvent::Received { direct: direct as u32 });
                    }
                    Readable::End => {
                        stream.is_ended = true;
                        tell(StreamEvent::EndOfStream);
                    }
                    Readable::Broken => {
                        stream.state = StreamState::Failed;
                        tell(StreamEvent::Failed(broken()));
                    }
                }
            }
        }
    }

    /// When the kernel does something next by itself.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        let at = |stream: &WorldStream| match stream.state {
            StreamState::Connecting { until_ns } => Some(until_ns),
            StreamState::Closing { at_ns } => Some(at_ns),
            StreamState::Open => stream.lists.front().filter(|list| list.bytes.is_none()).map(|list| list.at_ns),
            StreamState::Failed | StreamState::Gone => None,
        };
        self.streams.iter().filter_map(at).min()
    }

    /// The process has died.
    pub(crate) fn die(self) {
        for stream in self.streams.iter().filter(|stream| !matches!(stream.state, StreamState::Gone)) {
            self.network.close(stream.connection, Side::Host, Ending::Death);
        }
    }

    /// Streams that are not closed.
    pub(crate) fn open(&self) -> usize {
        self.streams.iter().filter(|stream| !matches!(stream.state, StreamState::Gone)).count()
    }

    fn stream(&self, id: StreamId) -> Option<&WorldStream> {
        let stream = self.streams.get(id.index as usize).filter(|stream| stream.generation == id.generation);
        stream.filter(|stream| !matches!(stream.state, StreamState::Gone))
    }

    fn stream_mut(&mut self, id: StreamId) -> Option<&mut WorldStream> {
        let stream = self.streams.get_mut(id.index as usize).filter(|stream| stream.generation == id.generation);
        stream.filter(|stream| !matches!(stream.state, StreamState::Gone))
    }
}

fn broken() -> StreamError {
    StreamError::System { what: "stream", source: std::io::ErrorKind::ConnectionReset.into() }
}

fn gather(memory: &RegionTable, pieces: &[PieceToSend]) -> Vec<u8> {
    let mut all = Vec::new();
    for piece in pieces {
        match piece {
            PieceToSend::Bytes(bytes) => all.extend_from_slice(bytes),
            PieceToSend::Data(segment) => {
                let start = all.len();
                all.resize(start + segment.len as usize, 0);
                if let Some(span) = memory.resolve(*segment) {
                    span.copy_to_slice(&mut all[start..]);
                }
            }
        }
    }
    all
}

impl StreamService for WorldLane {
    fn stream_inbox(&mut self) -> StreamInbox {
        let alive = Arc::new(());
        self.inboxes.push(Inbox { events: VecDeque::new(), alive: Arc::clone(&alive) });
        StreamInbox { index: self.inboxes.len() as u32 - 1, alive }
    }

    fn connect(
        &mut self,
        inbox: &StreamInbox,
        token: u64,
        address: SocketAddr,
        _limits: StreamLimits,
        deadline_ns: u64,
    ) -> Result<StreamId, StreamError> {
        let stream = WorldStream {
            connection: self.network.connect(port_of(address)),
            generation: 0,
            inbox: inbox.index as usize,
            token,
            address,
            state: StreamState::Connecting { until_ns: deadline_ns },
            received: Vec::new(),
            receive: Receive::None,
            lists: VecDeque::new(),
            is_ended: false,
        };
        let free = self.streams.iter().position(|stream| matches!(stream.state, StreamState::Gone));
        let index = free.unwrap_or(self.streams.len());
        let generation = free.map_or(0, |index| self.streams[index].generation + 1);
        let stream = WorldStream { generation, ..stream };
        if let Some(index) = free {
            self.streams[index] = stream;
        } else {
            self.streams.push(stream);
        }
        Ok(StreamId { index: index as u32, generation })
    }

    fn attach_stream(
        &mut self,
        _inbox: &StreamInbox,
        _token: u64,
        socket: StreamSocket,
        _limits: StreamLimits,
    ) -> Result<StreamId, (StreamError, StreamSocket)> {
        // No queue of the world moves to another lane.
        Err((StreamError::NotTcp, socket))
    }

    fn accept(&mut self, _stream: StreamId) {}

    fn next_event(&mut self, inbox: &StreamInbox) -> Option<(u64, StreamEvent)> {
        self.inboxes[inbox.index as usize].events.pop_front()
    }

    fn received(&self, stream: StreamId) -> &[u8] {
        self.stream(stream).map_or(&[], |stream| &stream.received)
    }

    fn consume(&mut self, stream: StreamId, bytes: usize) {
        if let Some(stream) = self.stream_mut(stream) {
            stream.received.drain(..bytes);
        }
    }

    fn receive(&mut self, stream: StreamId, into: Option<StreamDestination<'_>>) {
        let Some(stream) = self.stream_mut(stream) else { return };
        let is_free = matches!(stream.receive, Receive::None) && stream.received.is_empty() && !stream.is_ended;
        if is_free && matches!(stream.state, StreamState::Open) {
            let to = |into: StreamDestination<'_>| Receive::ToMemory(Arc::clone(into.memory), into.segment);
            stream.receive = into.map_or(Receive::ToBuffer, to);
        }
    }

    fn can_send(&self, stream: StreamId) -> bool {
        self.stream(stream).is_some_and(|stream| {
            !matches!(stream.state, StreamState::Closing { .. } | StreamState::Connecting { .. })
                && stream.lists.len() < 2
        })
    }

    fn send<'p>(
        &mut self,
        stream: StreamId,
        number: u64,
        memory: &Arc<RegionTable>,
        pieces: impl Iterator<Item = SendPiece<'p>>,
    ) -> bool {
        let at_ns = self.network.now_ns() + self.rng.below(KERNEL_NS);
        let pieces: Vec<_> = pieces
            .map(|piece| match piece {
                SendPiece::Bytes(bytes) => PieceToSend::Bytes(bytes.to_vec()),
                SendPiece::Data(segment) => PieceToSend::Data(segment),
            })
            .collect();
        let Some(stream) = self.stream_mut(stream) else { return true };
        let is_inside = |piece: &PieceToSend| match piece {
            PieceToSend::Bytes(_) => true,
            PieceToSend::Data(segment) => memory.resolve(*segment).is_some(),
        };
        if pieces.is_empty() || !pieces.iter().all(is_inside) {
            return false;
        }
        if !matches!(stream.state, StreamState::Failed) {
            stream.lists.push_back(ListAtKernel { number, at_ns, memory: Arc::clone(memory), pieces, bytes: None });
        }
        true
    }

    fn shutdown(&mut self, stream: StreamId) {
        let network = self.network.clone();
        if let Some(stream) = self.stream_mut(stream) {
            // What it was given so far leaves first.
            while let Some(list) = stream.lists.pop_front() {
                let bytes = list.bytes.unwrap_or_else(|| gather(&list.memory, &list.pieces));
                network.write(stream.connection, Side::Host, &bytes);
            }
            network.shut_down(stream.connection, Side::Host);
        }
    }

    fn close_stream(&mut self, stream: StreamId) {
        let at_ns = self.network.now_ns() + self.rng.below(KERNEL_NS);
        let network = self.network.clone();
        if let Some(stream) = self.stream_mut(stream)
            && !matches!(stream.state, StreamState::Closing { .. })
        {
            network.close(stream.connection, Side::Host, Ending::Reset);
            (stream.state, stream.receive) = (StreamState::Closing { at_ns }, Receive::None);
        }
    }

    fn detach_stream(&mut self, stream: StreamId) -> Option<StreamSocket> {
        let network = self.network.clone();
        let stream = self.stream_mut(stream)?;
        let is_direct = matches!(stream.receive, Receive::ToMemory(..));
        if !matches!(stream.state, StreamState::Open) || !stream.lists.is_empty() || is_direct {
            return None;
        }
        stream.state = StreamState::Gone;
        let socket = Box::new(DetachedEnd { network, connection: stream.connection });
        Some(StreamSocket { received: std::mem::take(&mut stream.received), peer: Some(stream.address), socket })
    }
}

/// The end of a stream that has left its lane.
#[derive(Debug)]
struct DetachedEnd {
    network: Network,
    connection: u64,
}

impl Drop for DetachedEnd {
    fn drop(&mut self) {
        self.network.close(self.connection, Side::Host, Ending::Death);
    }
}

impl SignalEventfd for WorldLane {
    fn signal(&mut self, _place: &mut SignalSlot, _eventfd: BorrowedFd<'_>) {}

    fn forget(&mut self, _place: &mut SignalSlot) {}
}
