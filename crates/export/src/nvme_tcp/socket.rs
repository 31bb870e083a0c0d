//! A TCP socket without waits: bytes received and not yet handled, bytes to be sent.
//!
//! With TLS these are clear text, and the channel is between them and the kernel.
//!
//! Used by admin queues on the control path and by I/O queues on their lanes. Admin queues have what is to be sent
//! copied here. The data of an I/O queue is sent from its place, which the queue keeps until the kernel has taken it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use blkyard_mem::{GatherPiece, RegionTable, send_gathered};
use blkyard_nvme::tcp::{SendList, SendPiece};
use blkyard_tls::{RECORD_BYTES, TlsChannel, TlsError};
use rustix::net::sockopt;

/// Bytes received at once, at most: 16 commands with 4 KiB each.
const RECEIVE_BYTES: usize = 64 << 10;
/// Bytes to be sent of an admin queue that are collected, at most, apart from a list: further answers wait.
const SEND_BYTES: usize = 256 << 10;

/// A peer that is silent for this long is asked by TCP whether it is still there, and again at each interval. Without
/// an answer to any of so many questions the connection is broken: a host need not have a keep-alive timer, and one
/// that has lost its power says nothing.
const ASKED_AFTER: Duration = Duration::from_mins(1);
const ASKED_AGAIN: Duration = Duration::from_secs(10);
const ASKED_TIMES: u32 = 6;

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
    tls: Option<Box<SocketTls>>,
}

/// Encryption of a connection.
#[derive(Debug)]
struct SocketTls {
    channel: TlsChannel,
    /// Memory for received ciphertext.
    received: Vec<u8>,
    /// Why it is broken.
    error: Option<TlsError>,
}

impl BufferedSocket {
    /// Sets the options of an accepted socket: no delay of short segments, and broken two minutes after its peer is
    /// gone.
    ///
    /// # Errors
    /// The socket is gone.
    pub(crate) fn set_options(stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, ASKED_AFTER)?;
        sockopt::set_tcp_keepintvl(stream, ASKED_AGAIN)?;
        Ok(sockopt::set_tcp_keepcnt(stream, ASKED_TIMES)?)
    }

    /// A socket, made non-blocking.
    ///
    /// # Errors
    /// The socket is gone.
    pub(crate) fn new(stream: TcpStream) -> io::Result<BufferedSocket> {
        stream.set_nonblocking(true)?;
        let (input, output) = (Vec::new(), Vec::new());
        Ok(BufferedSocket { stream, input, unread: 0..0, dropped: 0, output, sent: 0, is_broken: false, tls: None })
    }

    /// The socket.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Has this end of a channel between the kernel and this socket, for the bytes that were received, too.
    pub(crate) fn start_tls(&mut self, mut channel: TlsChannel) {
        channel.put(&self.input[self.unread.clone()]);
        self.unread = 0..0;
        self.tls = Some(Box::new(SocketTls { channel, received: Vec::new(), error: None }));
    }

    /// Whether the connection is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// The identity that the peer has proven by its key.
    pub(crate) fn tls_identity(&self) -> Option<String> {
        self.tls.as_ref()?.channel.identity()
    }

    /// Why the encryption is broken, once.
    pub(crate) fn take_tls_error(&mut self) -> Option<TlsError> {
        self.tls.as_mut()?.error.take()
    }

    /// Makes the memory for received bytes as large as it gets, for a lane that is not to allocate.
    pub(crate) fn reserve(&mut self) {
        let mut most = RECEIVE_BYTES;
        if let Some(tls) = &mut self.tls {
            tls.received.resize(most, 0);
            most += RECORD_BYTES;
        }
        self.input.resize(most.max(self.input.len()), 0);
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
        if self.tls.is_some() {
            return self.receive_sealed(most);
        }
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

    /// The same with TLS: all that the received bytes mean, so that what the kernel says of the socket is true of it. A
    /// handshake goes on meanwhile.
    fn receive_sealed(&mut self, most: usize) -> Arrived {
        loop {
            let BufferedSocket { tls: Some(tls), input, .. } = self else { return Arrived::End };
            // With the part of a record that came before.
            input.resize(input.len().max(most + RECORD_BYTES), 0);
            let mut end = 0;
            loop {
                match tls.channel.read(&mut input[end..]) {
                    Ok(0) => break,
                    Ok(bytes) => end += bytes,
                    Err(error) => {
                        tls.error = Some(error);
                        break;
                    }
                }
            }
            let is_over = tls.error.is_some();
            // Of a handshake, or why it has failed.
            self.flush_sealed();
            self.is_broken |= is_over;
            if end > 0 {
                self.unread = 0..end;
                return Arrived::Bytes;
            }
            if self.is_broken {
                return Arrived::End;
            }
            let BufferedSocket { tls: Some(tls), stream, .. } = self else { return Arrived::End };
            tls.received.resize(tls.received.len().max(most), 0);
            match stream.read(&mut tls.received[..most]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Arrived::Nothing,
                Ok(bytes @ 1..) => tls.channel.put(&tls.received[..bytes]),
                _ => {
                    self.is_broken = true;
                    return Arrived::End;
                }
            }
        }
    }

    /// Sends what is encrypted, as far as the kernel takes it. Returns whether it took anything.
    fn flush_sealed(&mut self) -> bool {
        let BufferedSocket { tls: Some(tls), stream, is_broken, .. } = self else { return false };
        let mut is_moved = false;
        while !tls.channel.outgoing().is_empty() {
            let outgoing = tls.channel.outgoing();
            match stream.write(outgoing) {
                Ok(bytes @ 1..) if !*is_broken => tls.channel.sent(bytes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                _ => {
                    *is_broken = true;
                    let all = outgoing.len();
                    tls.channel.sent(all);
                }
            }
            is_moved = true;
        }
        is_moved
    }

    /// Encrypts what is to be sent, and sends it as far as the kernel takes it. Returns whether it took anything.
    fn seal_and_flush(&mut self) -> bool {
        let BufferedSocket { tls: Some(tls), output, sent, is_broken, .. } = self else { return false };
        if tls.channel.is_open() && *sent < output.len() {
            if let Err(error) = tls.channel.write(&output[*sent..]) {
                (tls.error, *is_broken) = (Some(error), true);
            }
            output.clear();
            *sent = 0;
        }
        self.flush_sealed()
    }

    /// Copies, encrypts and sends a list, part by part until the kernel takes no more. Returns the bytes that were
    /// copied.
    fn seal_list(&mut self, list: &SendList, memory: &RegionTable, sent: usize) -> usize {
        let mut copied = sent;
        while copied < list.total() && !self.is_sending() {
            list.copy(memory, copied, SEND_BYTES, &mut self.output);
            copied += self.output.len();
            self.seal_and_flush();
        }
        copied - sent
    }

    /// Sends a list from its place, without so many bytes at its start. Returns the bytes that the kernel has taken, or
    /// encryption. A broken connection takes all.
    pub(crate) fn send_list(&mut self, list: &SendList, memory: &RegionTable, sent: usize) -> usize {
        if self.tls.is_some() {
            return self.seal_list(list, memory, sent);
        }
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
        self.output.len() + self.sealed().len() < SEND_BYTES
    }

    /// Bytes that are encrypted and not sent.
    fn sealed(&self) -> &[u8] {
        self.tls.as_ref().map_or(&[], |tls| tls.channel.outgoing())
    }

    /// Whether bytes are to be sent.
    pub(crate) fn is_sending(&self) -> bool {
        !self.output.is_empty() || !self.sealed().is_empty()
    }

    /// Adds the pieces of a list of which so many bytes were sent. Nothing else is to be sent in that case.
    pub(crate) fn add_rest(&mut self, list: &SendList, memory: &RegionTable, sent: usize) {
        self.add(list, memory);
        self.sent += sent;
    }

    /// Adds the pieces of a list.
    pub(crate) fn add(&mut self, list: &SendList, memory: &RegionTable) {
        list.copy(memory, 0, list.total(), &mut self.output);
    }

    /// Sends what the kernel takes. Returns whether it took anything. A broken connection takes all.
    pub(crate) fn flush(&mut self) -> bool {
        if self.tls.is_some() {
            return self.seal_and_flush();
        }
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
    pub(crate) fn shut_down(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.channel.close();
            self.flush_sealed();
        }
        // A peer that has gone needs none.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl AsFd for BufferedSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
