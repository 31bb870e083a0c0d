//! The kernel of a target: passes bytes between the network and the socket of a session.
//!
//! The session's socket is one end of a pair whose other end is here. A pair has no latency and no thread, so what the
//! session finds in its socket is decided by the network of the world alone.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use blkyard_sys::{PollFlags, is_ready};

use crate::network::{Ending, Network, Readable, Side};

/// Bytes passed on at one time.
const PASSED_BYTES: usize = 32 << 10;
/// Bytes at the start of each PDU, among them its type and length.
const COMMON_HEADER_BYTES: usize = 8;
/// Type of the PDU by which a target says that its host has violated the protocol.
const C2H_TERM_REQ: u8 = 3;

/// The stream of a connection.
#[derive(Debug)]
pub(crate) struct TargetStream {
    number: u64,
    socket: UnixStream,
    /// From the network, and not taken by the socket.
    incoming: Vec<u8>,
    /// From the socket, and not taken by the network.
    outgoing: Vec<u8>,
    answers: AnswerCheck,
    has_host_ended: bool,
    has_target_ended: bool,
    pub(crate) is_over: bool,
    /// Pieces that came though their host had left the connection.
    pub(crate) ghosts: u64,
}

/// Looks for the end of a stream by its target that its host has caused.
#[derive(Debug, Default)]
struct AnswerCheck {
    header: Vec<u8>,
    /// Bytes left of a PDU whose header was read.
    left: usize,
}

impl TargetStream {
    /// The stream of this connection, and the socket for its session.
    pub(crate) fn new(number: u64) -> io::Result<(TargetStream, OwnedFd)> {
        let (socket, session) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        let stream = TargetStream {
            number,
            socket,
            incoming: Vec::new(),
            outgoing: Vec::new(),
            answers: AnswerCheck::default(),
            has_host_ended: false,
            has_target_ended: false,
            is_over: false,
            ghosts: 0,
        };
        Ok((stream, session.into()))
    }

    /// Passes on what can be. Returns whether anything moved.
    pub(crate) fn run(&mut self, network: &Network) -> bool {
        if self.is_over {
            return false;
        }
        let is_moved = self.pass_in(network) | self.pass_out(network);
        // The session has closed its end, not only for sending.
        if self.has_target_ended && !self.is_over && is_ready(&self.socket, PollFlags::empty()) {
            self.end(network);
        }
        is_moved || self.is_over
    }

    fn pass_in(&mut self, network: &Network) -> bool {
        let mut is_moved = false;
        while !self.has_host_ended {
            if self.incoming.is_empty() {
                match network.readable(self.number, Side::Target) {
                    Readable::Nothing => break,
                    Readable::Bytes => {
                        self.incoming = network.read(self.number, Side::Target, PASSED_BYTES);
                        self.ghosts += u64::from(!network.is_open(self.number, Side::Host));
                    }
                    Readable::End => {
                        // A session that has closed its end needs to know nothing.
                        let _ = self.socket.shutdown(Shutdown::Write);
                        self.has_host_ended = true;
                    }
                    Readable::Broken => {
                        self.end(network);
                        return true;
                    }
                }
            }
            match self.socket.write(&self.incoming) {
                Ok(taken) => drop(self.incoming.drain(..taken)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Its session has closed it.
                Err(_) => self.incoming.clear(),
            }
            is_moved = true;
        }
        is_moved
    }

    fn pass_out(&mut self, network: &Network) -> bool {
        let mut is_moved = false;
        while !self.is_over {
            let taken = network.write(self.number, Side::Target, &self.outgoing);
            self.outgoing.drain(..taken);
            if !self.outgoing.is_empty() || self.has_target_ended {
                break;
            }
            let mut bytes = vec![0; PASSED_BYTES];
            match self.socket.read(&mut bytes) {
                Ok(0) => {
                    network.shut_down(self.number, Side::Target);
                    self.has_target_ended = true;
                }
                Ok(read) => {
                    self.answers.pass(&bytes[..read]);
                    self.outgoing.extend_from_slice(&bytes[..read]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.end(network),
            }
            is_moved = true;
        }
        is_moved
    }

    /// The process has died.
    pub(crate) fn die(&self, network: &Network, ending: Ending) {
        network.close(self.number, Side::Target, ending);
    }

    fn end(&mut self, network: &Network) {
        network.close(self.number, Side::Target, Ending::Death);
        // The session's end sees that when this is dropped.
        self.is_over = true;
    }
}

impl AnswerCheck {
    /// Reads on.
    fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let skipped = self.left.min(bytes.len());
                self.left -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            let taken = bytes.len().min(COMMON_HEADER_BYTES - self.header.len());
            self.header.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if let [kind, _, _, _, length @ ..] = &self.header[..]
                && let Ok(length) = <[u8; 4]>::try_from(length)
            {
                assert_ne!(*kind, C2H_TERM_REQ, "the host has violated the protocol, says its target");
                self.left = u32::from_le_bytes(length) as usize - COMMON_HEADER_BYTES;
                self.header.clear();
            }
        }
    }
}
