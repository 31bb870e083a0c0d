//! TCP connections on a lane, for drivers and exports that have no system calls.
//!
//! The ring of a lane in `os` implements [`StreamService`] over io_uring. All sends and receives of the lane's streams
//! in one turn reach the kernel in one call. The owner of streams is a driver or the front end of an export; it reaches
//! the service as the `Cx` of its calls.
//!
//! ```text
//!  StreamSocket ── attach ─┐                ┌─▶ received ─▶ consume ─▶ receive ─▶ …
//!                          ├─▶ StreamId ────┤
//!  connect ── Connected ───┘                └─▶ can_send ─▶ send ─▶ Sent
//!
//!  close ──▶ Closed                  detach ──▶ StreamSocket, for another lane
//! ```
//!
//! Each turn the owner takes its events ([`StreamService::next_event`]), handles what was received, starts the next
//! receive, and sends one list with all that is to be sent.
//!
//! Bounds: a stream has one receive and one list at the kernel, and one list that waits. An owner that asks for no
//! receive leaves the rest to TCP, which holds up the peer. A peer that never reads holds up its own stream only:
//! [`StreamService::can_send`] stays false. Deadlines other than that of a connect are the owner's, who closes the
//! stream.

use std::any::Any;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use blkyard_mem::{RegionTable, Segment};

/// TCP connections of a lane.
pub trait StreamService {
    /// An inbox for the events of an owner. When it is dropped, its streams are closed at some later time.
    fn stream_inbox(&mut self) -> StreamInbox;

    /// Starts to connect. Ends with [`StreamEvent::Connected`], or with [`StreamEvent::Failed`], at the latest at the
    /// deadline, by the lane's clock. Events of the stream carry `token`.
    ///
    /// # Errors
    /// No socket, or no room for another stream on the lane.
    fn connect(
        &mut self,
        inbox: &StreamInbox,
        token: u64,
        address: SocketAddr,
        limits: StreamLimits,
        deadline_ns: u64,
    ) -> Result<StreamId, StreamError>;

    /// Takes a connected socket, or a listening one. Bytes received before are the first that it
    /// [received](StreamService::received).
    ///
    /// # Errors
    /// The socket, if it is not TCP or there is no room for another stream on the lane.
    fn attach_stream(
        &mut self,
        inbox: &StreamInbox,
        token: u64,
        socket: StreamSocket,
        limits: StreamLimits,
    ) -> Result<StreamId, (StreamError, StreamSocket)>;

    /// Accepts one connection of a listening socket, with [`StreamEvent::Accepted`] or
    /// [`StreamEvent::AcceptFailed`]. No effect while an accept is outstanding.
    fn accept(&mut self, stream: StreamId);

    /// The next event of this inbox: the token of its stream, and the event. Owners ask in each of their rounds until
    /// there is none.
    fn next_event(&mut self, inbox: &StreamInbox) -> Option<(u64, StreamEvent)>;

    /// Bytes received and not yet consumed.
    fn received(&self, stream: StreamId) -> &[u8];

    /// The owner is done with so many bytes at the front of [`StreamService::received`].
    ///
    /// # Panics
    /// If they are more.
    fn consume(&mut self, stream: StreamId, bytes: usize);

    /// Starts a receive, which ends with [`StreamEvent::Received`], [`StreamEvent::EndOfStream`] or
    /// [`StreamEvent::Failed`]. With a destination the first bytes go there, and what comes behind them to
    /// [`StreamService::received`]. No effect while a receive is outstanding, bytes are not consumed, or after the end
    /// of the stream.
    fn receive(&mut self, stream: StreamId, into: Option<StreamDestination<'_>>);

    /// Whether the stream takes a list now. If not, it does after the next [`StreamEvent::Sent`].
    fn can_send(&self, stream: StreamId) -> bool;

    /// Sends a list of pieces, in the order of the stream. [`StreamEvent::Sent`] with its number says that the kernel
    /// is done with their memory; numbers are the owner's, and ascend. Bytes are copied. Segments are read later, and
    /// belong to the service until then, which keeps `memory` mapped. False if the list is empty or exceeds the
    /// [limits](StreamLimits), or a segment lies outside the memory: then nothing is sent. A stream that has failed
    /// sends nothing more; [`StreamEvent::Closed`] ends all lists.
    ///
    /// # Panics
    /// If the stream [cannot send](StreamService::can_send).
    fn send<'p>(
        &mut self,
        stream: StreamId,
        number: u64,
        memory: &Arc<RegionTable>,
        pieces: impl Iterator<Item = SendPiece<'p>>,
    ) -> bool;

    /// Ends sending behind the lists given so far: the peer sees the end of the stream.
    fn shutdown(&mut self, stream: StreamId);

    /// Resets the connection and cancels all that is outstanding. [`StreamEvent::Closed`] follows once the kernel has
    /// given back all memory, and no other event: from then on no byte of the stream leaves this machine. Bytes that
    /// the peer has not acknowledged may be lost: for an orderly end the owner shuts down and awaits the end of the
    /// peer's stream first. No effect on a stream that is closing.
    fn close_stream(&mut self, stream: StreamId);

    /// Takes a stream off the lane, with the bytes received and not consumed, for another lane. No event follows.
    /// `None`, without an effect, while a connect, a list or a receive with a destination is outstanding, and if the
    /// stream is closing.
    fn detach_stream(&mut self, stream: StreamId) -> Option<StreamSocket>;
}

/// Event of a stream.
#[derive(Debug)]
pub enum StreamEvent {
    /// The connection is established.
    Connected,
    /// A listening socket has accepted a connection.
    Accepted(StreamSocket),
    /// No connection was accepted: descriptors or memory have run out, for example. The owner may accept again later.
    AcceptFailed(StreamError),
    /// A receive has ended: so many bytes are in its destination, and the others in [`StreamService::received`].
    Received {
        /// Bytes in the destination.
        direct: u32,
    },
    /// The peer sends no more. Lists may still be sent.
    EndOfStream,
    /// The kernel is done with the memory of all lists up to this number.
    Sent(u64),
    /// The connection is broken. Its owner must close the stream; lists stay with the kernel until then.
    Failed(StreamError),
    /// The stream is closed: the kernel has given back all memory. Its id is void.
    Closed,
}

/// Why there is no stream, or why it is broken.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The lane has all the streams it has room for.
    #[error("streams: the maximum of a lane is {max}; run more lanes, or connect fewer hosts")]
    TooMany {
        /// Upper bound.
        max: usize,
    },
    /// The kernel lacks an operation.
    #[error("streams: io_uring of this kernel lacks {operation}; use Linux 6.1 or later")]
    Unsupported {
        /// The operation.
        operation: &'static str,
    },
    /// No socket of TCP.
    #[error("streams: not a TCP socket; use the address of an IPv4 or IPv6 peer")]
    NotTcp,
    /// No answer until the deadline.
    #[error("{0}: no answer to connect; see the address, the peer and firewalls between")]
    ConnectTimeout(SocketAddr),
    /// Error of the system.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// Its error.
        #[source]
        source: std::io::Error,
    },
}

/// A piece of a list to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendPiece<'a> {
    /// Bytes, copied when they are given.
    Bytes(&'a [u8]),
    /// Data, read by the kernel later. It must not be released before the list is sent.
    Data(Segment),
}

/// Destination of a receive.
#[derive(Clone, Copy, Debug)]
pub struct StreamDestination<'a> {
    /// Memory of the segment, which the service keeps mapped.
    pub memory: &'a Arc<RegionTable>,
    /// First bytes to be received. One outside the memory is not used.
    pub segment: Segment,
}

/// Maximum size of a list, allocated with the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamLimits {
    /// Pieces, at most [`StreamLimits::PIECES_MAX`].
    pub pieces_max: usize,
    /// Bytes of pieces that are copied.
    pub bytes_max: usize,
}

impl StreamLimits {
    /// Maximum pieces: as many as Linux takes in one call (`UIO_MAXIOV`).
    pub const PIECES_MAX: usize = 1024;
}

/// Names a stream on its lane. Void after [`StreamEvent::Closed`] and after a detach: calls with a void id do nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId {
    /// Index at the service.
    pub index: u32,
    /// Generation of the index.
    pub generation: u32,
}

/// Inbox of an owner of streams. Only good with the lane that gave it.
#[derive(Debug)]
pub struct StreamInbox {
    /// Index at the service.
    pub index: u32,
    /// Shared with the service, which so learns that the inbox was dropped.
    pub alive: Arc<()>,
}

/// A socket that belongs to no lane, on its way to one.
#[derive(Debug)]
pub struct StreamSocket {
    /// Bytes received and not consumed.
    pub received: Vec<u8>,
    /// Address of the other end, if known.
    pub peer: Option<SocketAddr>,
    /// The socket: a [`TcpStream`] or [`TcpListener`] for lanes of the system.
    pub socket: Box<dyn Any + Send>,
}

impl From<TcpStream> for StreamSocket {
    fn from(socket: TcpStream) -> StreamSocket {
        StreamSocket { received: Vec::new(), peer: socket.peer_addr().ok(), socket: Box::new(socket) }
    }
}

impl From<TcpListener> for StreamSocket {
    fn from(socket: TcpListener) -> StreamSocket {
        StreamSocket { received: Vec::new(), peer: None, socket: Box::new(socket) }
    }
}
