//! A TCP socket without waits: bytes received and not yet handled, bytes to be sent.
//!
//! Used by admin queues on the control path and by I/O queues on their lanes. Admin queues have what is to be sent
//! copied here. The data of an I/O queue is sent from its place, which the queue keeps until the kernel has taken it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use blkyard_mem::{GatherPiece, RegionTable, send_gathered};
use blkyard_nvme::tcp::{SendList, SendPiece};

/// Bytes received at once, at most: 16 commands with 4 KiB each.
const RECEIVE_BYTES: usize = 64 << 10;
/// Bytes to be sent of an admin queue that are collected, at most, apart from a list: further answers wait.
const SEND_BYTES: usize = 256 << 10;

/// Result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrived {
    /// Bytes are in the buffer.
    Bytes,
    /// None yet.
    Nothing,
    /// The peer has closed the connection, or it is broken.
    End,
}

/// A connected socket with its buffers.
#[derive(Debug)]
pub(crate) struct BufferedSocket {
    stream: TcpStream,
    /// Memory for received bytes, as long as it was needed once.
    input: Vec<u8>,
    /// Received bytes of it that were not handled.
    unread: Range<usize>,
    /// Bytes of the stream behind them that belong to no command any more.
    dropped: usize,
    output: Vec<u8>,
    /// Bytes of the output that were sent.
    sent: usize,
    is_broken: bool,
}

impl BufferedSocket {
    /// A socket, made non-blocking and without delay of short segments.
    ///
    /// # Errors
    /// The socket is gone.
    pub(crate) fn new(stream: TcpStream) -> io::Result<BufferedSocket> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let (input, output) = (Vec::new(), Vec::new());
        Ok(BufferedSocket { stream, input, unread: 0..0, dropped: 0, output, sent: 0, is_broken: false })
    }

    /// The socket.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Makes the memory for received bytes as large as it gets, for a lane that is not to allocate.
    pub(crate) fn reserve(&mut self) {
        self.input.resize(RECEIVE_BYTES.max(self.input.len()), 0);
    }

    /// Continues the stream of another process: with bytes that were received, so many that are dropped behind them,
    /// and bytes to be sent.
    pub(crate) fn restore(&mut self, input: &[u8], dropped: usize, output: &[u8]) {
        self.unread = 0..input.len();
        self.input = input.to_vec();
        self.dropped = dropped;
        self.output.extend_from_slice(output);
    }

    /// Bytes that are to be dropped behind the unread ones.
    pub(crate) fn dropped(&self) -> usize {
        self.dropped
    }

    /// Bytes that are to be sent.
    pub(crate) fn unsent(&self) -> &[u8] {
        &self.output[self.sent..]
    }

    /// Bytes that are to be handled.
    pub(crate) fn unread(&self) -> &[u8] {
        &self.input[self.unread.clone()]
    }

    /// So many bytes of [`BufferedSocket::unread`] remain.
    pub(crate) fn keep(&mut self, bytes: usize) {
        self.unread.start = self.unread.end - bytes;
    }

    /// Receives, at most `most` bytes, unless bytes are unread.
    pub(crate) fn receive(&mut self, most: usize) -> Arrived {
        if !self.unread().is_empty() {
            return Arrived::Bytes;
        }
        if self.is_broken {
            return Arrived::End;
        }
        let most = RECEIVE_BYTES.min(most);
        if self.input.len() < most {
            self.input.resize(most, 0);
        }
        loop {
            match self.stream.read(&mut self.input[..most]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Arrived::Nothing,
                Ok(bytes @ 1..) => {
                    let dropped = self.dropped.min(bytes);
                    self.dropped -= dropped;
                    self.unread = dropped..bytes;
                    if dropped < bytes {
                        return Arrived::Bytes;
                    }
                }
                _ => {
                    self.is_broken = true;
                    return Arrived::End;
                }
            }
        }
    }

    /// Sends a list from its place, without so many bytes at its start. Returns the bytes that the kernel has taken. A
    /// broken connection takes all.
    pub(crate) fn send_list(&mut self, list: &SendList, memory: &RegionTable, sent: usize) -> usize {
        loop {
            let pieces = list.pieces().map(|piece| match piece {
                SendPiece::Bytes(bytes) => GatherPiece::Bytes(bytes),
                // The owner of the list has checked it.
                SendPiece::Data(segment) => GatherPiece::Span(memory.resolve_region(segment).unwrap_or_default()),
            });
            match send_gathered(self.stream.as_fd(), pieces, sent) {
                Ok(bytes @ 1..) => return bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return 0,
                _ => {
                    self.is_broken = true;
                    return list.total() - sent;
                }
            }
        }
    }

    /// Whether another list may be added.
    pub(crate) fn has_room(&self) -> bool {
        self.output.len() < SEND_BYTES
    }

    /// Whether bytes are to be sent.
    pub(crate) fn is_sending(&self) -> bool {
        !self.output.is_empty()
    }

    /// Adds the pieces of a list of which so many bytes were sent. Nothing else is to be sent in that case.
    pub(crate) fn add_rest(&mut self, list: &SendList, memory: &RegionTable, sent: usize) {
        self.add(list, memory);
        self.sent += sent;
    }

    /// Adds the pieces of a list.
    pub(crate) fn add(&mut self, list: &SendList, memory: &RegionTable) {
        for piece in list.pieces() {
            match piece {
                SendPiece::Bytes(bytes) => self.output.extend_from_slice(bytes),
                SendPiece::Data(segment) => {
                    let at = self.output.len();
                    self.output.resize(at + segment.len as usize, 0);
                    if let Some(span) = memory.resolve_region(segment) {
                        span.copy_to_slice(&mut self.output[at..]);
                    }
                }
            }
        }
    }

    /// Sends what the kernel takes. Returns whether it took anything. A broken connection takes all.
    pub(crate) fn flush(&mut self) -> bool {
        let before = self.sent;
        while self.sent < self.output.len() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(bytes @ 1..) => self.sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return self.sent > before,
                _ => {
                    self.is_broken = true;
                    self.sent = self.output.len();
                }
            }
        }
        let is_moved = self.sent > before;
        self.output.clear();
        self.sent = 0;
        is_moved
    }

    /// Ends sending: the peer sees the end of the stream behind what was sent.
    pub(crate) fn shut_down(&self) {
        // A peer that has gone needs none.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl AsFd for BufferedSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
