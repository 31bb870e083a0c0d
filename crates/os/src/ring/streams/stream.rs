//! One stream of a ring: its socket, and the memory that the kernel uses for it.
//!
//! Makes the entries of its operations and takes their results; pushes nothing itself. All memory that an entry names
//! belongs to the stream, which stays at its address in a box until the kernel has given everything back.
//!
//! Unsafe: addresses for the kernel, and a buffer that the kernel fills.

use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use blkyard_mem::RegionTable;
use blkyard_mq::{SendPiece, StreamDestination, StreamError, StreamEvent, StreamLimits, StreamSocket};
use io_uring::types::{CancelBuilder, Fd, TimeoutFlags, Timespec};
use io_uring::{opcode, squeue};
use rustix::net::{Shutdown, SocketAddrAny};

/// Bytes of a stream's receive buffer: 31 reads of 4 KiB with their headers, a few calls for a deep queue. Twice as
/// much is slower, since it leaves less of the cache to their destinations. Pages are allocated at their first use.
pub(super) const RECEIVE_BYTES: usize = 128 << 10;

/// An operation that a stream may have at the kernel: a bit of a set.
pub(super) type Operation = u8;
/// Pushed before a receive: the peer gets the list while that is prepared.
pub(super) const SEND: Operation = 1;
/// A receive, or an accept.
pub(super) const RECEIVE: Operation = 2;
pub(super) const CONNECT: Operation = 4;
/// The deadline of a connect.
pub(super) const TIMER: Operation = 8;
/// A cancellation of the others.
pub(super) const CANCEL: Operation = 16;

/// Wait for bytes before the first attempt to receive (`IORING_RECVSEND_POLL_FIRST`).
const RECEIVE_POLL_FIRST: u16 = 1;

/// Memory for the kernel: allocated once, at one address.
struct KernelBuffer {
    start: NonNull<[u8]>,
}

impl KernelBuffer {
    fn new(bytes: usize) -> KernelBuffer {
        let bytes = vec![0; bytes].into_boxed_slice();
        KernelBuffer { start: NonNull::from(Box::leak(bytes)) }
    }

    fn len(&self) -> usize {
        self.start.len()
    }

    /// The address of a byte.
    fn address(&self, at: usize) -> *mut u8 {
        assert!(at <= self.len());
        // SAFETY: inside the allocation, or right behind it.
        unsafe { self.start.as_ptr().cast::<u8>().add(at) }
    }

    /// # Safety
    /// The kernel does not write to the bytes.
    unsafe fn bytes(&self, start: usize, end: usize) -> &[u8] {
        assert!(start <= end && end <= self.len());
        // SAFETY: inside the allocation, initialized, and not written, as promised by the caller.
        unsafe { std::slice::from_raw_parts(self.address(start), end - start) }
    }

    /// # Safety
    /// The kernel does not use the bytes.
    unsafe fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(bytes.len() <= self.len() - at);
        // SAFETY: inside the allocation, which no reference points into while we hold it exclusively.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address(at), bytes.len()) };
    }
}

impl Drop for KernelBuffer {
    fn drop(&mut self) {
        // SAFETY: made from a box, and dropped once. Its owner waits for the kernel, or leaks it.
        drop(unsafe { Box::from_raw(self.start.as_ptr()) });
    }
}

/// A list of pieces.
struct SendBatch {
    number: u64,
    bytes: KernelBuffer,
    /// What is left of the pieces from `first` on.
    pieces: Vec<libc::iovec>,
    first: usize,
    left: usize,
    /// Keeps segments mapped; set while the list waits or is at the kernel.
    memory: Option<Arc<RegionTable>>,
}

impl SendBatch {
    fn new(limits: StreamLimits) -> SendBatch {
        let pieces_max = limits.pieces_max.min(StreamLimits::PIECES_MAX);
        SendBatch {
            number: 0,
            bytes: KernelBuffer::new(limits.bytes_max),
            pieces: Vec::with_capacity(pieces_max),
            first: 0,
            left: 0,
            memory: None,
        }
    }

    fn is_used(&self) -> bool {
        self.memory.is_some()
    }

    fn clear(&mut self) {
        self.pieces.clear();
        (self.first, self.left, self.memory) = (0, 0, None);
    }

    /// Takes a list. False if it is empty, too long, or not in memory.
    fn fill<'p>(
        &mut self,
        number: u64,
        memory: &Arc<RegionTable>,
        pieces: impl Iterator<Item = SendPiece<'p>>,
    ) -> bool {
        self.clear();
        let mut copied = 0;
        for piece in pieces {
            let (start, len) = match piece {
                SendPiece::Bytes(bytes) if bytes.len() <= self.bytes.len() - copied => {
                    // SAFETY: the list is not at the kernel, since it is being filled.
                    unsafe { self.bytes.write(copied, bytes) };
                    copied += bytes.len();
                    (self.bytes.address(copied - bytes.len()), bytes.len())
                }
                SendPiece::Data(segment) => match memory.resolve(segment) {
                    Some(span) => (span.as_ptr(), span.len()),
                    None => return false,
                },
                SendPiece::Bytes(_) => return false,
            };
            if len == 0 {
                continue;
            }
            if self.pieces.len() == self.pieces.capacity() {
                return false;
            }
            self.pieces.push(libc::iovec { iov_base: start.cast(), iov_len: len });
            self.left += len;
        }
        if self.left == 0 {
            return false;
        }
        (self.number, self.memory) = (number, Some(Arc::clone(memory)));
        true
    }

    /// So many bytes were sent.
    fn advance(&mut self, bytes: usize) {
        let mut bytes = bytes.min(self.left);
        self.left -= bytes;
        while bytes > 0 {
            let piece = &mut self.pieces[self.first];
            if bytes < piece.iov_len {
                piece.iov_base = piece.iov_base.cast::<u8>().wrapping_add(bytes).cast();
                piece.iov_len -= bytes;
                return;
            }
            bytes -= piece.iov_len;
            self.first += 1;
        }
    }
}

/// Kind of a stream's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SocketKind {
    /// Connects.
    Connecting,
    Connected,
    /// Accepts connections.
    Listening,
}

/// A stream of a ring.
pub(super) struct RingStream {
    pub(super) inbox: u32,
    pub(super) token: u64,
    pub(super) kind: SocketKind,
    /// Operations at the kernel.
    pub(super) out: Operation,
    /// Operations to be pushed.
    pub(super) due: Operation,
    pub(super) is_closing: bool,
    /// Whether a detach waits for the receive to end.
    pub(super) is_detaching: bool,
    /// Reported as failed.
    is_failed: bool,
    /// The peer sends no more.
    is_at_end: bool,
    wants_shutdown: bool,
    /// The deadline of the connect has passed.
    is_late: bool,
    /// Error of a connect, reported when its timer is gone.
    connect_error: Option<StreamError>,
    socket: OwnedFd,
    peer: Option<SocketAddr>,
    buffer: KernelBuffer,
    /// Bytes of the buffer that are received and not consumed.
    start: usize,
    end: usize,
    /// Destination of the receive: its bytes, and what keeps them mapped.
    direct: usize,
    direct_memory: Option<Arc<RegionTable>>,
    receive_pieces: [libc::iovec; 2],
    receive_header: libc::msghdr,
    /// Whether the last receive has left no bytes in the socket: the kernel need not look before it waits for more.
    is_drained: bool,
    /// The list at the kernel, and the one that waits.
    sending: SendBatch,
    waiting: SendBatch,
    send_header: libc::msghdr,
    address: Option<SocketAddrAny>,
    deadline: Timespec,
}

// SAFETY: its addresses are for the kernel, and point to its own memory or into regions that it keeps mapped; they are
// valid on every thread.
unsafe impl Send for RingStream {}

fn empty_header() -> libc::msghdr {
    // SAFETY: all zeroes is an empty header.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

const NO_PIECE: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// A failed system call.
pub(super) fn system(what: &'static str, errno: impl Into<std::io::Error>) -> StreamError {
    StreamError::System { what, source: errno.into() }
}

fn errno(what: &'static str, result: i32) -> StreamError {
    system(what, std::io::Error::from_raw_os_error(-result))
}

/// Whether an operation ended without cause of its own, for instance because the thread that submitted it has ended.
fn is_interrupted(result: i32) -> bool {
    matches!(-result, libc::EAGAIN | libc::EINTR | libc::ECANCELED)
}

impl RingStream {
    fn new(inbox: u32, token: u64, kind: SocketKind, socket: OwnedFd, limits: StreamLimits, received: &[u8]) -> Self {
        let (buffer, limits) = match kind {
            SocketKind::Listening => (0, StreamLimits { pieces_max: 0, bytes_max: 0 }),
            _ => (RECEIVE_BYTES.max(received.len()), limits),
        };
        let mut buffer = KernelBuffer::new(buffer);
        // SAFETY: the kernel does not know the buffer yet.
        unsafe { buffer.write(0, received) };
        RingStream {
            inbox,
            token,
            kind,
            out: 0,
            due: 0,
            is_closing: false,
            is_detaching: false,
            is_failed: false,
            is_at_end: false,
            wants_shutdown: false,
            is_late: false,
            connect_error: None,
            socket,
            peer: None,
            buffer,
            start: 0,
            end: received.len(),
            direct: 0,
            direct_memory: None,
            receive_pieces: [NO_PIECE; 2],
            receive_header: empty_header(),
            is_drained: false,
            sending: SendBatch::new(limits),
            waiting: SendBatch::new(limits),
            send_header: empty_header(),
            address: None,
            deadline: Timespec::new(),
        }
    }

    /// A new socket that connects.
    pub(super) fn connecting(
        inbox: u32,
        token: u64,
        address: SocketAddr,
        limits: StreamLimits,
        deadline_ns: u64,
    ) -> Result<RingStream, StreamError> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, Some(ipproto::TCP))
            .map_err(|error| system("a socket cannot be created", error))?;
        send_at_once(&socket);
        // Also at the death of this process: the kernel would go on sending for minutes what the peer has not taken.
        let _ = rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
        let mut stream = RingStream::new(inbox, token, SocketKind::Connecting, socket, limits, &[]);
        (stream.peer, stream.address) = (Some(address), Some(address.into()));
        stream.deadline = Timespec::new().sec(deadline_ns / 1_000_000_000).nsec((deadline_ns % 1_000_000_000) as u32);
        stream.due = CONNECT | TIMER;
        Ok(stream)
    }

    /// A socket that came from elsewhere.
    pub(super) fn attached(
        inbox: u32,
        token: u64,
        socket: StreamSocket,
        limits: StreamLimits,
    ) -> Result<RingStream, (StreamError, StreamSocket)> {
        let StreamSocket { received, peer, socket } = socket;
        let (kind, descriptor): (_, OwnedFd) = match socket.downcast::<TcpStream>() {
            Ok(stream) => (SocketKind::Connected, (*stream).into()),
            Err(other) => match other.downcast::<TcpListener>() {
                Ok(listener) => (SocketKind::Listening, (*listener).into()),
                Err(socket) => return Err((StreamError::NotTcp, StreamSocket { received, peer, socket })),
            },
        };
        let is_tcp = rustix::net::sockopt::socket_protocol(&descriptor) == Ok(Some(rustix::net::ipproto::TCP));
        // The kernel waits for a socket by itself, if that is blocking.
        let blocking = rustix::io::ioctl_fionbio(&descriptor, false);
        let error = if is_tcp {
            blocking.err().map(|error| system("a socket cannot be attached", error))
        } else {
            Some(StreamError::NotTcp)
        };
        if let Some(error) = error {
            return Err((error, StreamSocket { received, peer, socket: Box::new(TcpStream::from(descriptor)) }));
        }
        if kind == SocketKind::Connected {
            send_at_once(&descriptor);
        }
        let mut stream = RingStream::new(inbox, token, kind, descriptor, limits, &received);
        stream.peer = peer;
        Ok(stream)
    }

    pub(super) fn received(&self) -> &[u8] {
        if self.out & RECEIVE != 0 {
            return &[];
        }
        // SAFETY: no receive is at the kernel, and none is pushed while the stream is borrowed.
        unsafe { self.buffer.bytes(self.start, self.end) }
    }

    pub(super) fn consume(&mut self, bytes: usize) {
        assert!(bytes <= self.received().len(), "consumed more than was received");
        self.start += bytes;
    }

    /// Whether a receive may be started.
    fn can_receive(&self) -> bool {
        let is_idle = (self.out | self.due) & RECEIVE == 0 && self.start == self.end;
        is_idle && !self.is_closing && !self.is_failed && !self.is_at_end
    }

    /// Prepares a receive. False if there is none to be pushed.
    pub(super) fn prepare_receive(&mut self, into: Option<StreamDestination<'_>>) -> bool {
        if self.kind != SocketKind::Connected || !self.can_receive() {
            return false;
        }
        (self.start, self.end, self.direct) = (0, 0, 0);
        let mut count = 0;
        if let Some(StreamDestination { memory, segment }) = into
            && let Some(span) = memory.resolve(segment)
        {
            self.receive_pieces[0] = libc::iovec { iov_base: span.as_ptr().cast(), iov_len: span.len() };
            (self.direct, self.direct_memory) = (span.len(), Some(Arc::clone(memory)));
            count = 1;
        }
        self.receive_pieces[count] =
            libc::iovec { iov_base: self.buffer.address(0).cast(), iov_len: self.buffer.len() };
        self.receive_header.msg_iov = self.receive_pieces.as_mut_ptr();
        self.receive_header.msg_iovlen = (count + 1) as _;
        self.due |= RECEIVE;
        true
    }

    /// Prepares an accept. False if there is none to be pushed.
    pub(super) fn prepare_accept(&mut self) -> bool {
        let is_idle = self.kind == SocketKind::Listening && (self.out | self.due) & RECEIVE == 0 && !self.is_closing;
        self.due |= if is_idle { RECEIVE } else { 0 };
        is_idle
    }

    pub(super) fn can_send(&self) -> bool {
        let is_open = self.kind == SocketKind::Connected && !self.is_closing && !self.is_failed;
        is_open && !self.wants_shutdown && !self.waiting.is_used()
    }

    /// Takes a list, and prepares to send it if no other is at the kernel. False if it is too long or not in memory.
    pub(super) fn prepare_send<'p>(
        &mut self,
        number: u64,
        memory: &Arc<RegionTable>,
        pieces: impl Iterator<Item = SendPiece<'p>>,
    ) -> bool {
        assert!(self.can_send(), "a list was given to a stream that cannot send");
        if !self.waiting.fill(number, memory, pieces) {
            self.waiting.clear();
            return false;
        }
        self.continue_sending();
        true
    }

    /// Makes the list that waits the next one to be sent, if none is; and shuts down behind the last.
    fn continue_sending(&mut self) {
        if self.sending.is_used() || self.is_closing || self.is_failed {
            return;
        }
        if self.waiting.is_used() {
            std::mem::swap(&mut self.sending, &mut self.waiting);
            self.due |= SEND;
        } else if self.wants_shutdown {
            // A peer that has reset the connection needs no end of it.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
    }

    /// Whether lists are not sent yet.
    pub(super) fn is_sending(&self) -> bool {
        self.sending.is_used()
    }

    /// Whether a receive has a destination.
    pub(super) fn is_direct(&self) -> bool {
        self.direct_memory.is_some()
    }

    /// The peer sees the end of the stream behind the last list.
    pub(super) fn shutdown(&mut self) {
        self.wants_shutdown = self.kind == SocketKind::Connected;
        self.continue_sending();
    }

    /// Resets the connection: it sends nothing more, and its operations end.
    pub(super) fn reset(&self) {
        if self.kind == SocketKind::Listening {
            // It may have duplicates.
            return;
        }
        // Errors mean that there is nothing to reset.
        let _ = rustix::net::sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO));
        let _ = rustix::net::connect_unspec(&self.socket);
    }

    /// Begins to close. All that is at the kernel is to be cancelled.
    pub(super) fn close(&mut self) {
        self.is_closing = true;
        self.waiting.clear();
        self.due = if self.out & !CANCEL != 0 { CANCEL } else { 0 };
        self.reset();
    }

    /// The entry of a due operation.
    pub(super) fn entry(&mut self, operation: Operation, name_of: impl Fn(Operation) -> u64) -> squeue::Entry {
        let fd = Fd(self.socket.as_raw_fd());
        match operation {
            RECEIVE if self.kind == SocketKind::Listening => {
                opcode::Accept::new(fd, std::ptr::null_mut(), std::ptr::null_mut()).flags(libc::SOCK_CLOEXEC).build()
            }
            RECEIVE => {
                let flags = if self.is_drained { RECEIVE_POLL_FIRST } else { 0 };
                if self.direct_memory.is_some() {
                    return opcode::RecvMsg::new(fd, &raw mut self.receive_header).ioprio(flags).build();
                }
                let [piece, _] = self.receive_pieces;
                opcode::Recv::new(fd, piece.iov_base.cast(), piece.iov_len as u32).ioprio(flags).build()
            }
            SEND => {
                let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
                let pieces = &mut self.sending.pieces[self.sending.first..];
                if let [piece] = pieces {
                    let (start, len) = (piece.iov_base.cast_const().cast(), piece.iov_len as u32);
                    return opcode::Send::new(fd, start, len).flags(flags).build();
                }
                self.send_header.msg_iov = pieces.as_mut_ptr();
                self.send_header.msg_iovlen = pieces.len() as _;
                opcode::SendMsg::new(fd, &raw const self.send_header).flags(flags as u32).build()
            }
            CONNECT => {
                let (address, len) = match &self.address {
                    Some(address) => (address.as_ptr(), address.addr_len()),
                    None => (std::ptr::null(), 0),
                };
                opcode::Connect::new(fd, address.cast(), len).build()
            }
            TIMER => opcode::Timeout::new(&raw const self.deadline).flags(TimeoutFlags::ABS).build(),
            // A timer belongs to no descriptor.
            _ if self.out & !CANCEL == TIMER => opcode::TimeoutRemove::new(name_of(TIMER)).build(),
            _ => opcode::AsyncCancel2::new(CancelBuilder::fd(fd).all()).build(),
        }
    }

    /// An operation has ended with this result. Calls `emit` for each event. Operations that are due next are marked.
    pub(super) fn ended(&mut self, operation: Operation, result: i32, emit: &mut dyn FnMut(StreamEvent)) {
        match operation {
            RECEIVE if self.kind == SocketKind::Listening => self.accepted(result, emit),
            RECEIVE => self.receive_ended(result, emit),
            SEND => self.send_ended(result, emit),
            CONNECT if result < 0 => {
                let error = match self.peer {
                    Some(peer) if self.is_late => StreamError::ConnectTimeout(peer),
                    _ => errno("connect", result),
                };
                self.connect_error = Some(error);
            }
            TIMER if self.out & CONNECT != 0 && !self.is_closing => {
                if result == -libc::ETIME {
                    self.is_late = true;
                    self.due |= CANCEL;
                    self.reset();
                } else {
                    self.due |= TIMER;
                }
            }
            _ => {}
        }
        let at_kernel = self.out | self.due;
        if self.is_closing {
            if at_kernel & CANCEL == 0 && at_kernel != 0 {
                // The timer of a connect that was cancelled, or an operation that the cancellation has missed.
                self.due |= CANCEL;
            }
        } else if self.kind == SocketKind::Connecting && at_kernel & CONNECT == 0 {
            if at_kernel == TIMER {
                self.due |= CANCEL;
            } else if at_kernel == 0 {
                self.kind = SocketKind::Connected;
                match self.connect_error.take() {
                    Some(error) => self.fail(error, emit),
                    None => emit(StreamEvent::Connected),
                }
            }
        }
    }

    fn fail(&mut self, error: StreamError, emit: &mut dyn FnMut(StreamEvent)) {
        if !std::mem::replace(&mut self.is_failed, true) && !self.is_closing {
            emit(StreamEvent::Failed(error));
        }
    }

    fn accepted(&mut self, result: i32, emit: &mut dyn FnMut(StreamEvent)) {
        if result >= 0 {
            // SAFETY: the kernel has just made this descriptor for us.
            let socket = TcpStream::from(unsafe { OwnedFd::from_raw_fd(result) });
            if !self.is_closing {
                emit(StreamEvent::Accepted(socket.into()));
            }
        } else if !self.is_closing {
            if is_interrupted(result) || result == -libc::ECONNABORTED {
                self.due |= RECEIVE;
            } else {
                emit(StreamEvent::AcceptFailed(errno("accept", result)));
            }
        }
    }

    fn receive_ended(&mut self, result: i32, emit: &mut dyn FnMut(StreamEvent)) {
        if is_interrupted(result) && !self.is_closing && !self.is_detaching {
            self.due |= RECEIVE;
            return;
        }
        self.direct_memory = None;
        if self.is_closing || (self.is_detaching && result < 0) {
            return;
        }
        match usize::try_from(result) {
            Ok(0) => {
                self.is_at_end = true;
                emit(StreamEvent::EndOfStream);
            }
            Ok(bytes) => {
                self.is_drained = bytes < self.direct + self.buffer.len();
                let direct = bytes.min(self.direct);
                self.end = bytes - direct;
                emit(StreamEvent::Received { direct: direct as u32 });
            }
            Err(_) => self.fail(errno("receive", result), emit),
        }
    }

    fn send_ended(&mut self, result: i32, emit: &mut dyn FnMut(StreamEvent)) {
        if self.is_closing {
            return self.sending.clear();
        }
        match usize::try_from(result) {
            Ok(bytes) => self.sending.advance(bytes),
            Err(_) if is_interrupted(result) => {}
            Err(_) => return self.fail(errno("send", result), emit),
        }
        if self.sending.left > 0 {
            self.due |= SEND;
            return;
        }
        emit(StreamEvent::Sent(self.sending.number));
        self.sending.clear();
        self.continue_sending();
    }

    /// The socket and what it has received, for another lane. Nothing is at the kernel.
    pub(super) fn into_socket(self) -> StreamSocket {
        debug_assert!(self.out == 0, "a stream is taken from its lane while the kernel uses it");
        let received = self.received().to_vec();
        StreamSocket { received, peer: self.peer, socket: Box::new(TcpStream::from(self.socket)) }
    }
}

impl AsFd for RingStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A list is sent whole: the kernel need not wait for more.
fn send_at_once(socket: &OwnedFd) {
    let _ = rustix::net::sockopt::set_tcp_nodelay(socket, true);
}
