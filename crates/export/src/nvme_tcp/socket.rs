//! A TCP socket without waits: bytes received and not yet handled, bytes to be sent.
//!
//! Used by admin queues on the control path and by I/O queues on their lanes. What is to be sent is copied here, so
//! the memory of a command is free at once.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use blkyard_mem::RegionTable;
use blkyard_nvme::tcp::{SendList, SendPiece};

/// Bytes received at once, at most: 16 commands with 4 KiB each.
const RECEIVE_BYTES: usize = 64 << 10;
/// Bytes to be sent that are collected, at most, apart from a list: further answers wait in their queue.
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
    input: Vec<u8>,
    /// Bytes of the input that were handled.
    taken: usize,
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
        Ok(BufferedSocket { stream, input, taken: 0, output, sent: 0, is_broken: false })
    }

    /// The socket.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Makes the buffers as large as they get, for a lane that is not to allocate.
    pub(crate) fn reserve(&mut self) {
        self.input.reserve(RECEIVE_BYTES);
        self.output.reserve(2 * SEND_BYTES);
    }

    /// Bytes that are to be handled.
    pub(crate) fn unread(&self) -> &[u8] {
        &self.input[self.taken..]
    }

    /// So many bytes of [`BufferedSocket::unread`] remain.
    pub(crate) fn keep(&mut self, bytes: usize) {
        self.taken = self.input.len() - bytes;
    }

    /// Receives, at most `most` bytes, unless bytes are unread.
    pub(crate) fn receive(&mut self, most: usize) -> Arrived {
        if !self.unread().is_empty() {
            return Arrived::Bytes;
        }
        if self.is_broken {
            return Arrived::End;
        }
        self.taken = 0;
        self.input.resize(RECEIVE_BYTES.min(most), 0);
        loop {
            let received = self.stream.read(&mut self.input);
            let bytes = *received.as_ref().unwrap_or(&0);
            match received {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.input.clear();
                    return Arrived::Nothing;
                }
                Ok(1..) => {
                    self.input.truncate(bytes);
                    return Arrived::Bytes;
                }
                _ => {
                    self.input.clear();
                    self.is_broken = true;
                    return Arrived::End;
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
