//! A front-end without manners: any bytes, any descriptors.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::PATIENCE;

/// The messages used here, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Request {
    GetFeatures = 1,
    SetFeatures = 2,
    SetOwner = 3,
    SetMemTable = 5,
    SetLogBase = 6,
    SetLogFd = 7,
    SetVringNum = 8,
    SetVringAddr = 9,
    SetVringBase = 10,
    GetVringBase = 11,
    SetVringKick = 12,
    SetVringCall = 13,
    SetVringErr = 14,
    GetProtocolFeatures = 15,
    SetProtocolFeatures = 16,
    GetQueueNum = 17,
    SetVringEnable = 18,
    GetConfig = 24,
    SetConfig = 25,
    SetInflightFd = 32,
    ResetDevice = 34,
    AddMemReg = 37,
    RemMemReg = 38,
}

const NEED_REPLY: u32 = 8;
const VERSION: u32 = 1;

/// A connection.
pub struct Raw(pub UnixStream);

impl Raw {
    pub fn connect(path: &Path) -> Raw {
        Raw::over(UnixStream::connect(path).unwrap())
    }

    /// `None` without a listener.
    pub fn try_connect(path: &Path) -> Option<Raw> {
        UnixStream::connect(path).ok().map(Raw::over)
    }

    pub fn over(stream: UnixStream) -> Raw {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Raw(stream)
    }

    /// Sends bytes with descriptors; false if the other side has closed.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        match sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) => {
                assert_eq!(sent, bytes.len());
                true
            }
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => false,
            Err(error) => panic!("cannot send: {error}"),
        }
    }

    /// A message as it lies on the wire.
    pub fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
        let words = [request, flags, payload.len() as u32];
        words.iter().flat_map(|word| word.to_ne_bytes()).chain(payload.iter().copied()).collect()
    }

    /// Sends a well-formed message without asking for a reply.
    pub fn tell(&self, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.send(&Raw::message(request as u32, VERSION, payload), fds)
    }

    /// Sends a message and waits for its reply; `None` if the session ends instead.
    pub fn ask(&self, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Option<Vec<u8>> {
        self.send(&Raw::message(request as u32, VERSION | NEED_REPLY, payload), fds).then(|| self.reply(request))?
    }

    /// The reply to a message; `None` if the session ends instead.
    pub fn reply(&self, request: Request) -> Option<Vec<u8>> {
        let mut header = [0; 12];
        if !self.read(&mut header) {
            return None;
        }
        let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        assert_eq!((word(0), word(4)), (request as u32, VERSION | 4), "an answer to something else");
        let mut payload = vec![0; word(8) as usize];
        self.read(&mut payload).then_some(payload)
    }

    /// Whether a message that answers with a number was accepted; false also if the session ended.
    pub fn accepts(&self, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.ask(request, payload, fds).is_some_and(|answer| answer == 0_u64.to_ne_bytes())
    }

    /// Fills the buffer; false at the end of the stream.
    fn read(&self, to: &mut [u8]) -> bool {
        match (&self.0).read_exact(to) {
            Ok(()) => true,
            Err(error)
                if matches!(error.kind(), std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset) =>
            {
                false
            }
            Err(error) => panic!("no answer: {error}"),
        }
    }

    /// Waits until the other side has closed, with any messages before.
    pub fn wait_closed(&self) {
        let mut bytes = [0; 4096];
        loop {
            match (&self.0).read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
                Err(error) => panic!("the session goes on: {error}"),
            }
        }
    }

    /// Shuts down the sending side.
    pub fn hang_up(&self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }

    /// Feature bits and protocol features, so that every message is allowed and answered.
    pub fn negotiate(&self, features: u64) {
        self.tell(Request::SetOwner, &[], &[]);
        let Some(offered) = self.ask(Request::GetFeatures, &[], &[]) else { panic!("no features") };
        let offered = u64::from_ne_bytes(offered.try_into().unwrap());
        let protocol = self.ask(Request::GetProtocolFeatures, &[], &[]).unwrap();
        self.tell(Request::SetProtocolFeatures, &protocol, &[]);
        assert!(self.accepts(Request::SetFeatures, &(offered & features).to_ne_bytes(), &[]));
    }
}

/// Numbers as they lie in a payload.
pub fn words64(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Index and number of a ring's state.
pub fn state(index: u32, num: u32) -> Vec<u8> {
    [index, num].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Addresses of a ring: descriptors, available, used.
pub fn addresses(index: u32, [desc, avail, used]: [u64; 3]) -> Vec<u8> {
    let mut payload = state(index, 0);
    payload.extend(words64(&[desc, used, avail, 0]));
    payload
}
