//! Messages to a back-end, and its replies: a header of three words, a payload, descriptors beside it. [vhost-user
//! protocol]
//!
//! Every wait has an end: a missing or wrong reply is an error, after which the connection is unusable. `session.rs`
//! interprets the payloads.
//!
//! The `vhost` crate has such messages, too. Its front-end waits without limit, and supports neither a packed ring's
//! base nor descriptors of other types.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_sys::{EventFd, PollFd, PollFlags, TimeSource, recv_fds, send_fds};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::TalkError;
use crate::connector::{Connector, connect_until};

/// Requests of a front-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[expect(non_camel_case_types, reason = "the names of the protocol")]
pub(crate) enum FrontendMessage {
    GET_FEATURES = 1,
    SET_FEATURES = 2,
    SET_OWNER = 3,
    SET_MEM_TABLE = 5,
    SET_VRING_NUM = 8,
    SET_VRING_ADDR = 9,
    SET_VRING_BASE = 10,
    GET_VRING_BASE = 11,
    SET_VRING_KICK = 12,
    SET_VRING_CALL = 13,
    SET_VRING_ERR = 14,
    GET_PROTOCOL_FEATURES = 15,
    SET_PROTOCOL_FEATURES = 16,
    GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18,
    SET_BACKEND_REQ_FD = 21,
    GET_CONFIG = 24,
    GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD = 32,
    GET_MAX_MEM_SLOTS = 36,
    ADD_MEM_REG = 37,
    REM_MEM_REG = 38,
}

/// Bytes of a header: request, flags, bytes of the payload.
pub(crate) const HEADER_BYTES: usize = 12;
/// The version of the protocol, in the flags of every message.
pub(crate) const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
/// The message is an answer.
pub(crate) const REPLY: u32 = 4;
/// The message needs a reply, though its type has none.
pub(crate) const NEED_REPLY: u32 = 8;
/// Bytes of a payload, at most: as QEMU and the `vhost` crate have it.
pub(crate) const PAYLOAD_MAX: usize = 4096;
/// Descriptors beside one message.
pub(crate) const DESCRIPTORS_MAX: usize = 8;

/// The words of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) request: u32,
    pub(crate) flags: u32,
    pub(crate) len: usize,
}

impl Header {
    /// Parses a header; `None` for another version, or a length beyond the limit.
    pub(crate) fn parse(bytes: [u8; HEADER_BYTES]) -> Option<Header> {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let header = Header { request: word(0), flags: word(4), len: word(8) as usize };
        (header.flags & VERSION_MASK == VERSION && header.len <= PAYLOAD_MAX).then_some(header)
    }
}

/// A message as it lies on the wire.
pub(crate) fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let words = [request, flags | VERSION, payload.len() as u32];
    words.into_iter().flat_map(u32::to_ne_bytes).chain(payload.iter().copied()).collect()
}

/// A payload of words.
pub(crate) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// A payload about one queue: its number, and a word.
pub(crate) fn state(queue: u16, word: u32) -> Vec<u8> {
    [u32::from(queue), word].into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// A connection to a back-end.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: UnixStream,
    /// How long all of a conversation may take.
    reply_max: Duration,
    /// When this conversation must be over.
    until: Instant,
    /// Readable when the device is closed: then no reply is waited for.
    end: Arc<EventFd>,
    /// Every message is answered.
    acknowledged: bool,
    clock: Arc<dyn TimeSource>,
}

impl Connection {
    /// Connects. A back-end that is busy with others is waited for.
    pub(crate) fn open(
        connector: &dyn Connector,
        path: &Path,
        reply_max: Duration,
        end: &Arc<EventFd>,
        clock: &Arc<dyn TimeSource>,
    ) -> io::Result<Connection> {
        let until = clock.now() + reply_max;
        let stream = connect_until(connector, path, until, end, &**clock)?;
        stream.set_nonblocking(true)?;
        let (end, clock) = (Arc::clone(end), Arc::clone(clock));
        Ok(Connection { stream, reply_max, until, end, acknowledged: false, clock })
    }

    /// Begins a conversation: the back-end has all its time again.
    pub(crate) fn begin(&mut self) {
        self.until = self.clock.now() + self.reply_max;
    }

    /// Shuts our side down. The back-end closes its end once it has released our memory.
    pub(crate) fn hang_up(self) -> OwnedFd {
        // A back-end that has closed already needs no shutdown.
        let _ = self.stream.shutdown(Shutdown::Write);
        self.stream.into()
    }

    /// From now on every message is to be answered: both sides have agreed on it.
    pub(crate) fn acknowledge(&mut self) {
        self.acknowledged = true;
    }

    /// Says something. Where messages are answered, waits until it was accepted.
    pub(crate) fn tell(
        &self,
        request: FrontendMessage,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), TalkError> {
        self.send(request, if self.acknowledged { NEED_REPLY } else { 0 }, payload, fds)?;
        if self.acknowledged {
            match self.number(request)? {
                0 => {}
                code => return Err(TalkError::Refused { request: format!("{request:?}"), code }),
            }
        }
        Ok(())
    }

    /// Sends a request whose reply is one word.
    pub(crate) fn ask_number(&self, request: FrontendMessage) -> Result<u64, TalkError> {
        self.send(request, 0, &[], &[])?;
        self.number(request)
    }

    /// Sends a request whose reply has a payload, and perhaps a descriptor.
    pub(crate) fn ask(
        &self,
        request: FrontendMessage,
        payload: &[u8],
    ) -> Result<(Vec<u8>, Option<OwnedFd>), TalkError> {
        self.send(request, 0, payload, &[])?;
        self.receive(request)
    }

    /// Waits until all that was said has been dealt with.
    pub(crate) fn settle(&self) -> Result<(), TalkError> {
        // Answered in order, and by every back-end.
        if self.acknowledged { Ok(()) } else { self.ask_number(FrontendMessage::GET_FEATURES).map(drop) }
    }

    fn number(&self, request: FrontendMessage) -> Result<u64, TalkError> {
        let (payload, _) = self.receive(request)?;
        let bytes = payload.try_into().map_err(|_| TalkError::Nonsense { request: format!("{request:?}") })?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn send(
        &self,
        request: FrontendMessage,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), TalkError> {
        let bytes = message(request as u32, flags, payload);
        assert!(fds.len() <= DESCRIPTORS_MAX, "{} descriptors", fds.len());
        let (mut rest, mut fds) = (&bytes[..], fds);
        while !rest.is_empty() {
            match send_fds(&self.stream, rest, fds, SendFlags::empty()) {
                Ok(sent) => (rest, fds) = (&rest[sent..], &[]),
                Err(Errno::AGAIN) => self.wait(request, PollFlags::OUT)?,
                Err(error) => return Err(failed(request, &error.into())),
            }
        }
        Ok(())
    }

    /// Waits until there is something to read, or room to write, for as long as this conversation may still take.
    fn wait(&self, request: FrontendMessage, what: PollFlags) -> Result<(), TalkError> {
        let mut fds = [PollFd::new(&self.stream, what), PollFd::new(&*self.end, PollFlags::IN)];
        let now = self.clock.now();
        let ready = self.clock.wait(&mut fds, Some(self.until)).map_err(|error| failed(request, &error))?;
        if ready == 0 && now >= self.until {
            return Err(self.late(request));
        }
        if fds[1].revents().is_empty() { Ok(()) } else { Err(TalkError::LetGo) }
    }

    fn receive(&self, request: FrontendMessage) -> Result<(Vec<u8>, Option<OwnedFd>), TalkError> {
        let nonsense = || TalkError::Nonsense { request: format!("{request:?}") };
        let mut header = [0; HEADER_BYTES];
        let mut descriptor = None;
        self.fill(request, &mut header, &mut descriptor)?;
        let header = Header::parse(header).ok_or_else(nonsense)?;
        if header.request != request as u32 || header.flags & REPLY == 0 {
            return Err(nonsense());
        }
        let mut payload = vec![0; header.len];
        self.fill(request, &mut payload, &mut descriptor)?;
        Ok((payload, descriptor))
    }

    /// Reads as much as there is room for, and keeps the first descriptor that comes along.
    fn fill(
        &self,
        request: FrontendMessage,
        mut to: &mut [u8],
        descriptor: &mut Option<OwnedFd>,
    ) -> Result<(), TalkError> {
        while !to.is_empty() {
            match recv_fds(&self.stream, to, DESCRIPTORS_MAX, RecvFlags::empty()) {
                Ok(received) if received.bytes == 0 => {
                    return Err(TalkError::Closed { request: format!("{request:?}") });
                }
                Ok(received) => {
                    *descriptor = descriptor.take().or(received.fds.into_iter().next());
                    to = &mut to[received.bytes..];
                }
                Err(Errno::AGAIN) => self.wait(request, PollFlags::IN)?,
                Err(error) => return Err(failed(request, &error.into())),
            }
        }
        Ok(())
    }

    fn late(&self, request: FrontendMessage) -> TalkError {
        TalkError::Late { request: format!("{request:?}"), limit: self.reply_max }
    }
}

fn failed(request: FrontendMessage, error: &io::Error) -> TalkError {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            TalkError::Closed { request: format!("{request:?}") }
        }
        _ => TalkError::System(error.to_string()),
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Reads without waiting; the number of bytes, or 0 if the other side has closed.
pub(crate) fn read_now(stream: &UnixStream, to: &mut [u8]) -> io::Result<usize> {
    match (&*stream).read(to) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        read => read,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use blkyard_os::SystemClock;

    use super::*;

    fn pair(reply_max: Duration) -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let (clock, end): (Arc<dyn TimeSource>, _) = (Arc::new(SystemClock), Arc::new(EventFd::new().unwrap()));
        let until = clock.now() + reply_max;
        (Connection { stream: ours, reply_max, until, end, acknowledged: true, clock }, theirs)
    }

    fn answer(theirs: &mut UnixStream, request: FrontendMessage, flags: u32, payload: &[u8]) {
        theirs.write_all(&message(request as u32, flags, payload)).unwrap();
    }

    #[test]
    fn an_answer_is_waited_for_and_read_for_what_it_says() {
        let (talk, mut theirs) = pair(Duration::from_mins(1));
        answer(&mut theirs, FrontendMessage::SET_OWNER, REPLY, &words(&[0]));
        talk.tell(FrontendMessage::SET_OWNER, &[], &[]).unwrap();
        answer(&mut theirs, FrontendMessage::SET_VRING_NUM, REPLY, &words(&[22]));
        let refused = talk.tell(FrontendMessage::SET_VRING_NUM, &state(3, 64), &[]).unwrap_err();
        assert!(matches!(refused, TalkError::Refused { code: 22, .. }), "{refused}");
        let mut said = [0; 2 * HEADER_BYTES + 8];
        theirs.read_exact(&mut said).unwrap();
        assert_eq!(said[..12], message(3, NEED_REPLY, &[]));
        assert_eq!(said[12..], message(8, NEED_REPLY, &[3, 0, 0, 0, 64, 0, 0, 0]));
    }

    #[test]
    fn nonsense_silence_and_an_end_are_three_errors() {
        let (talk, mut theirs) = pair(Duration::from_millis(20));
        let late = talk.ask_number(FrontendMessage::GET_FEATURES).unwrap_err();
        assert!(matches!(late, TalkError::Late { .. }), "{late}");
        for (request, flags, payload) in [
            (FrontendMessage::GET_QUEUE_NUM, REPLY, words(&[1])),
            (FrontendMessage::GET_FEATURES, 0, words(&[1])),
            (FrontendMessage::GET_FEATURES, REPLY | 2, words(&[1])),
            (FrontendMessage::GET_FEATURES, REPLY, words(&[1, 2])),
            (FrontendMessage::GET_FEATURES, REPLY, vec![0; PAYLOAD_MAX + 1]),
        ] {
            let (talk, mut theirs) = pair(Duration::from_mins(1));
            answer(&mut theirs, request, flags, &payload);
            let nonsense = talk.ask_number(FrontendMessage::GET_FEATURES).unwrap_err();
            assert!(matches!(nonsense, TalkError::Nonsense { .. }), "{request:?} {flags} {payload:?}: {nonsense}");
        }
        theirs.write_all(&[1, 0]).unwrap();
        drop(theirs);
        let closed = talk.ask_number(FrontendMessage::GET_FEATURES).unwrap_err();
        assert!(matches!(closed, TalkError::Closed { .. }), "{closed}");
    }
}
