//! Messages of a front-end on the wire, and their transfer to the message layer.
//!
//! Bytes are collected here until a message is complete, so a front-end that stops within a message does not block its
//! export. The message layer reads from a private socket pair. It keeps negotiated state private and learns it from
//! messages only, so it can continue a session of another process (see [`crate::vhost_user::handover`]).
//!
//! Messages are not interpreted here.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use blkyard_sys::{recv_fds, send_fds};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use vhost::vhost_user::message::{FrontendReq, MAX_ATTACHED_FD_ENTRIES, MAX_MSG_SIZE};
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::core::out_of_descriptors;
use crate::vhost_user::backend::Backend;

/// Message header: request, flags, bytes of the body; 32 bits each in native byte order.
pub(crate) const HEADER_BYTES: usize = 12;
/// The version of the protocol, in the flags of every message.
pub(crate) const VERSION: u32 = 1;
/// Flag of a reply.
const REPLY: u32 = 4;
/// Flag of a message whose sender requests a reply.
const NEED_REPLY: u32 = 8;
/// Bytes of the longest message; longer ones are refused by their header.
pub const MESSAGE_BYTES_MAX: usize = HEADER_BYTES + MAX_MSG_SIZE;
/// Maximum number of descriptors with one message.
pub const MESSAGE_FILES_MAX: usize = MAX_ATTACHED_FD_ENTRIES;

/// A complete or partial message, with its descriptors received so far.
#[derive(Debug, Default)]
pub struct Message {
    /// Header and body.
    pub bytes: Vec<u8>,
    /// Descriptors, in order of arrival.
    pub files: Vec<OwnedFd>,
}

impl Message {
    /// A front-end's message without the flag that requests a reply.
    pub(crate) fn new(request: FrontendReq, body: &[u8], files: Vec<OwnedFd>) -> Message {
        let header = [u32::from(request), VERSION, body.len() as u32];
        let bytes = header.into_iter().flat_map(u32::to_ne_bytes).chain(body.iter().copied()).collect();
        Message { bytes, files }
    }

    /// The reply to a message whose sender requests only the result.
    pub(crate) fn acknowledgement(request: FrontendReq, is_ok: bool) -> Message {
        let header = [u32::from(request), VERSION | REPLY, size_of::<u64>() as u32];
        let bytes = header.into_iter().flat_map(u32::to_ne_bytes).chain(u64::from(!is_ok).to_ne_bytes()).collect();
        Message { bytes, files: Vec::new() }
    }

    /// Whether this is a front-end's message in our protocol version, without a body.
    pub(crate) fn is_bare(&self) -> bool {
        let flags = self.word(1).map(|flags| flags & !NEED_REPLY);
        flags == Some(VERSION) && self.word(2) == Some(0) && self.bytes.len() == HEADER_BYTES
    }

    /// Whether the sender requests a reply.
    pub(crate) fn needs_reply(&self) -> bool {
        self.word(1).is_some_and(|flags| flags & NEED_REPLY != 0)
    }

    /// Its request number.
    pub(crate) fn request(&self) -> Option<u32> {
        self.word(0)
    }

    /// The first word of its body.
    pub(crate) fn body_word(&self) -> Option<u32> {
        self.word(HEADER_BYTES / 4)
    }

    fn word(&self, index: usize) -> Option<u32> {
        let bytes = self.bytes.get(index * 4..index * 4 + 4)?;
        bytes.try_into().ok().map(u32::from_ne_bytes)
    }

    /// Total bytes as far as known. A message whose header exceeds the limit ends with its header.
    fn whole_bytes(&self) -> usize {
        let body = self.word(2).map_or(0, |body| body as usize);
        HEADER_BYTES + if body > MAX_MSG_SIZE { 0 } else { body }
    }

    /// Whether the message is incomplete.
    pub(crate) fn is_part(&self) -> bool {
        self.bytes.len() < self.whole_bytes() && self.files.len() <= MESSAGE_FILES_MAX
    }

    /// Sends the whole message without waiting.
    ///
    /// # Errors
    /// The socket has no room, which the caller must handle; or the peer is gone.
    fn send(&self, to: &UnixStream) -> Result<(), Errno> {
        let fds: Vec<_> = self.files.iter().map(|file| file.as_fd()).collect();
        if fds.len() > MESSAGE_FILES_MAX {
            return Err(Errno::MSGSIZE);
        }
        let mut sent = 0;
        while sent < self.bytes.len() {
            // Descriptors are sent with the first byte.
            let fds = if sent == 0 { &fds[..] } else { &[] };
            sent += send_fds(to, &self.bytes[sent..], fds, SendFlags::DONTWAIT)?;
        }
        Ok(())
    }

    /// Reads up to `most` further bytes with their descriptors, without waiting; returns the number of bytes.
    fn receive(&mut self, from: &UnixStream, most: usize) -> Result<usize, Errno> {
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let most = most.min(bytes.len());
        // One more than allowed, so that an excess descriptor is detected.
        let received = recv_fds(from, &mut bytes[..most], MESSAGE_FILES_MAX + 1, RecvFlags::DONTWAIT)?;
        self.bytes.extend_from_slice(&bytes[..received.bytes]);
        self.files.extend(received.fds);
        if received.truncated && self.files.len() <= MESSAGE_FILES_MAX {
            return Err(Errno::MFILE);
        }
        if received.truncated || self.files.len() > MESSAGE_FILES_MAX {
            return Err(Errno::TOOMANYREFS);
        }
        Ok(received.bytes)
    }
}

/// Received part of the next message.
#[derive(Debug, Default)]
pub(crate) struct MessageBuffer(Message);

impl MessageBuffer {
    /// Continues with bytes received by another process, if they are a valid part of a message.
    pub(crate) fn of(part: Message) -> Option<MessageBuffer> {
        part.is_part().then_some(MessageBuffer(part))
    }

    /// A copy of the received part.
    pub(crate) fn part(&self) -> io::Result<Message> {
        let files = self.0.files.iter().map(OwnedFd::try_clone).collect::<Result<_, _>>()?;
        Ok(Message { bytes: self.0.bytes.clone(), files })
    }

    /// The next message, if complete. Does not wait.
    ///
    /// # Errors
    /// The front-end has left, or sent too many descriptors.
    pub(crate) fn take(&mut self, connection: &UnixStream) -> Result<Option<Message>, Error> {
        loop {
            let missing = self.0.whole_bytes() - self.0.bytes.len();
            if missing == 0 {
                return Ok(Some(std::mem::take(&mut self.0)));
            }
            match self.0.receive(connection, missing) {
                Ok(0) if self.0.bytes.is_empty() => return Err(Error::Disconnected),
                Ok(0) => return Err(Error::PartialMessage),
                Ok(_) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::TOOMANYREFS) => return Err(Error::IncorrectFds),
                Err(Errno::MFILE) => return Err(Error::SocketError(out_of_descriptors())),
                Err(Errno::CONNRESET) => return Err(Error::Disconnected),
                Err(error) => return Err(Error::SocketError(error.into())),
            }
        }
    }
}

/// The sockets between the session and its message layer.
#[derive(Debug)]
pub struct RelaySockets {
    /// Our end.
    near: UnixStream,
    /// The message layer's end, and a duplicate of it for its unread bytes.
    far: UnixStream,
    unread: UnixStream,
}

impl RelaySockets {
    /// A connected pair.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub(crate) fn new() -> io::Result<RelaySockets> {
        let (near, far) = UnixStream::pair()?;
        Ok(RelaySockets { near, unread: far.try_clone()?, far })
    }
}

/// Zeros appended to each message: the length of a header, and never a valid one.
///
/// The message layer repeats a read that failed for lack of descriptors, although the bytes are already consumed. It
/// would wait without end; with this padding it reads an invalid header and fails.
const PADDING: [u8; HEADER_BYTES] = [0; HEADER_BYTES];

/// The message layer, and our end of its socket.
pub(crate) struct Relay {
    handler: BackendReqHandler<Mutex<Backend>>,
    near: UnixStream,
    unread: UnixStream,
}

impl Relay {
    /// A message layer without state, on a socket pair.
    pub(crate) fn new(sockets: RelaySockets, backend: Arc<Mutex<Backend>>) -> Relay {
        let RelaySockets { near, far, unread } = sockets;
        Relay { handler: BackendReqHandler::from_stream(far, backend), near, unread }
    }

    /// Passes on a whole message. Returns the reply, if any, and the result: an error ends the session.
    pub(crate) fn handle(&mut self, message: &Message) -> (Message, Result<(), Error>) {
        let mut answer = Message::default();
        // The message layer would wait for the missing part.
        if message.bytes.len() != message.whole_bytes() {
            return (answer, Err(Error::PartialMessage));
        }
        // The socket has room: each message is consumed before the next is written.
        let padding = Message { bytes: PADDING.to_vec(), files: Vec::new() };
        if let Err(error) = message.send(&self.near).and_then(|()| padding.send(&self.near)) {
            return (answer, Err(Error::SocketError(error.into())));
        }
        let outcome = self.handler.handle_request();
        // A reply may report a failure. Without one, the socket has no data.
        while answer.receive(&self.near, MESSAGE_BYTES_MAX).is_ok_and(|bytes| bytes > 0) {}
        let outcome = match (self.take_unread(), outcome) {
            (unread, outcome) if unread == PADDING.len() => outcome,
            // More bytes than the padding are the unread rest of a refused message.
            (unread, Err(error)) if unread > PADDING.len() => Err(error),
            _ => Err(Error::SocketError(io::Error::other(
                "too many open files to receive the descriptors of a message; raise the limit on open files",
            ))),
        };
        (answer, outcome)
    }

    /// Drains the message layer's socket; returns the number of bytes.
    fn take_unread(&self) -> usize {
        let mut unread = Message::default();
        while unread.receive(&self.unread, MESSAGE_BYTES_MAX).is_ok_and(|bytes| bytes > 0) {}
        unread.bytes.len()
    }
}

/// Sends a reply to the front-end.
///
/// # Errors
/// The front-end has left.
pub(crate) fn reply(connection: &UnixStream, answer: &Message) -> Result<(), Error> {
    answer.send(connection).map_err(|error| match error {
        Errno::PIPE | Errno::CONNRESET => Error::Disconnected,
        error => Error::SocketError(error.into()),
    })
}
