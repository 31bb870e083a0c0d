//! Pieces of a unix stream with their descriptors.
//!
//! One read of a stream may return plain bytes and the bytes after them, to which descriptors are attached. Sent on as
//! one piece, the descriptors would then arrive with the first of all these bytes. A piece here never does that: its
//! descriptors belong to its first byte. And a piece does not end within what was sent at once, unless that is long:
//! some programs treat a partly received message as broken.
//!
//! Linux charges descriptors in flight to the user who sent them, and once a user exceeds its limit on open files, no
//! process of that user can send any. So a [`SendQueue`] leaves only few unread.
//!
//! Unsafe: the ioctl that reports the unread bytes of a socket's other end.

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use blkyard_sys::{PASSED_FDS_MAX, recv_fds, send_fds};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, recvmsg};

use super::table::leave;

/// Bytes of a piece at most.
const PIECE_BYTES: usize = 32 << 10;
/// Pieces with descriptors that are taken at once.
const PIECES_MAX: usize = 16;
/// Descriptors that a session leaves unread in one direction, unless a single piece has more. As many as a vhost-user
/// message can have.
const UNREAD_FILES_MAX: usize = 32;
/// Descriptors of a piece at most: some clients over vfio-user send the eventfds of all interrupt vectors with one
/// message, and an NVMe export has up to 64 queues and one vector more.
pub(super) const PIECE_FILES_MAX: usize = 65;

/// A piece.
#[derive(Debug, Default)]
pub(super) struct Piece {
    bytes: Vec<u8>,
    /// Bytes that were sent on.
    sent: usize,
    pub(super) files: Vec<OwnedFd>,
}

impl Piece {
    /// These bytes, without descriptors.
    pub(super) fn plain(bytes: Vec<u8>) -> Piece {
        Piece { bytes, ..Piece::default() }
    }

    /// Reads available bytes of a stream, without waiting, as pieces in order; none at its end. Pieces read before an
    /// error are returned, too.
    ///
    /// # Errors
    /// `AGAIN` without data, `TOOMANYREFS` if more than [`PIECE_FILES_MAX`] come with a piece or not all descriptors
    /// can be received, or the system's error.
    pub(super) fn receive(from: &OwnedFd, pieces: &mut VecDeque<Piece>) -> Result<(), Errno> {
        loop {
            let (there, has_files) = match look(from, PIECE_BYTES) {
                Ok((0, _)) => return Ok(()),
                Err(Errno::AGAIN) if !pieces.is_empty() => return Ok(()),
                looked => looked?,
            };
            let plain = if has_files { fewest_with_files(from, there)? - 1 } else { there };
            if plain > 0 {
                Piece::take(from, plain)?.append_to(pieces);
            }
            if !has_files || pieces.len() >= PIECES_MAX {
                return Ok(());
            }
            // Descriptors come with the next byte or the one behind it: which, depends on the version of Linux.
            Piece::take(from, 1)?.append_to(pieces);
        }
    }

    /// Makes it a part of the last piece, if that can be.
    pub(super) fn append_to(mut self, pieces: &mut VecDeque<Piece>) {
        match pieces.back_mut() {
            Some(last) if self.files.is_empty() => last.bytes.append(&mut self.bytes),
            _ => pieces.push_back(self),
        }
    }

    fn take(from: &OwnedFd, most: usize) -> Result<Piece, Errno> {
        let mut bytes = vec![0; most];
        let got = recv_fds(from, &mut bytes, PASSED_FDS_MAX, RecvFlags::DONTWAIT)?;
        bytes.truncate(got.bytes);
        let piece = Piece { bytes, sent: 0, files: got.fds };
        if got.truncated || piece.files.len() > PIECE_FILES_MAX {
            piece.leave_files();
            return Err(Errno::TOOMANYREFS);
        }
        Ok(piece)
    }

    /// Its bytes. `None` if descriptors came with them, which are left to the end of the thread.
    pub(super) fn into_plain(self) -> Option<Vec<u8>> {
        if self.files.is_empty() {
            return Some(self.bytes);
        }
        self.leave_files();
        None
    }

    /// Leaves its descriptors to the end of the thread.
    pub(super) fn leave_files(self) {
        self.files.into_iter().for_each(leave);
    }

    /// Sends the rest without waiting, as far as possible; whether all is sent.
    ///
    /// # Errors
    /// The other side has left, or the system's error.
    fn send(&mut self, to: &OwnedFd) -> Result<bool, Errno> {
        while self.sent < self.bytes.len() {
            let fds: Vec<_> = self.files.iter().map(|file| file.as_fd()).collect();
            match send_fds(to, &self.bytes[self.sent..], &fds, SendFlags::DONTWAIT) {
                Ok(sent) => {
                    self.sent += sent;
                    self.files.clear();
                }
                Err(Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// Pieces to be sent to one end of a session.
#[derive(Debug, Default)]
pub(super) struct SendQueue {
    pieces: VecDeque<Piece>,
    /// Upper bound of the descriptors that were sent and not read.
    unread_files: usize,
}

impl SendQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    pub(super) fn push(&mut self, piece: Piece) {
        self.pieces.push_back(piece);
    }

    /// Whether the next piece has to wait until the other end has read the descriptors before it. No readiness of the
    /// socket tells when.
    pub(super) fn is_held(&self) -> bool {
        let next = self.pieces.front().map_or(0, |piece| piece.files.len());
        next > 0 && self.unread_files > 0 && self.unread_files + next > UNREAD_FILES_MAX
    }

    /// Sends without waiting, as far as possible. A queue whose other end has left is empty then, too.
    ///
    /// # Errors
    /// `PIPE` or `CONNRESET` if the other end has left, or the system's error.
    pub(super) fn send(&mut self, to: &OwnedFd) -> Result<(), Errno> {
        while !self.pieces.is_empty() {
            if self.is_held() && is_all_read(to)? {
                self.unread_files = 0;
            }
            if self.is_held() {
                break;
            }
            let Some(piece) = self.pieces.front_mut() else { break };
            let files = piece.files.len();
            let sent = piece.send(to);
            if piece.files.is_empty() {
                self.unread_files += files;
            }
            match sent {
                Ok(true) => drop(self.pieces.pop_front()),
                Ok(false) => break,
                Err(error) => {
                    if matches!(error, Errno::PIPE | Errno::CONNRESET) {
                        self.pieces.clear();
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

/// Whether the other end has read all that was sent there, or is closed.
fn is_all_read(socket: &OwnedFd) -> Result<bool, Errno> {
    let mut unread: libc::c_int = 0;
    // SAFETY: this ioctl (of sockets: SIOCOUTQ) writes an int, to which the pointer leads.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) } < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok(unread == 0)
}

/// Number of available bytes, up to `most`, and whether descriptors come with the last of them or, in some versions of
/// Linux, with the next one. Consumes nothing.
fn look(from: &OwnedFd, most: usize) -> Result<(usize, bool), Errno> {
    let mut bytes = vec![0; most];
    let mut control = RecvAncillaryBuffer::default();
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let got = recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    Ok((got.bytes, got.flags.contains(ReturnFlags::CTRUNC)))
}

/// The fewest bytes for which [`look`] finds descriptors, at least 1. `beyond` are known to have some.
fn fewest_with_files(from: &OwnedFd, mut beyond: usize) -> Result<usize, Errno> {
    let mut without = 0;
    while beyond - without > 1 {
        let middle = without.midpoint(beyond);
        if look(from, middle)?.1 { beyond = middle } else { without = middle }
    }
    Ok(beyond)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;

    use super::*;

    fn put(to: &OwnedFd, bytes: &[u8], files: usize) {
        let files = (0..files).map(|_| UnixStream::pair().unwrap().0.into()).collect();
        assert!(Piece { bytes: bytes.to_vec(), sent: 0, files }.send(to).unwrap());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn descriptors_stay_with_their_bytes(parts in prop::collection::vec((1..2000_usize, 0..4_usize), 1..20)) {
            let (near, far) = UnixStream::pair().unwrap();
            let (near, far) = (OwnedFd::from(near), OwnedFd::from(far));
            let (mut wanted, mut ends) = (Vec::new(), Vec::new());
            let mut at = 0;
            for (len, files) in &parts {
                put(&far, &vec![7; *len], *files);
                if *files > 0 {
                    wanted.push((at, *files));
                    ends.extend((at > 0).then_some(at));
                }
                at += len;
            }
            drop(far);
            let (mut came, mut place) = (Vec::new(), 0);
            loop {
                let mut pieces = VecDeque::new();
                Piece::receive(&near, &mut pieces).unwrap();
                if pieces.is_empty() {
                    break;
                }
                for piece in pieces {
                    if !piece.files.is_empty() {
                        came.push((place, piece.files.len()));
                    }
                    place += piece.bytes.len();
                    ends.retain(|end| *end != place);
                }
            }
            prop_assert!(ends.is_empty(), "no piece ends where another's descriptors begin: {:?}", ends);
            prop_assert_eq!((came, place), (wanted, at));
        }
    }

    #[test]
    fn a_piece_is_sent_on_as_there_is_room() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let near = OwnedFd::from(near);
        let mut piece = Piece { bytes: vec![3; 1 << 20], sent: 0, files: Vec::new() };
        let mut got = 0;
        while !piece.send(&near).unwrap() {
            got += far.read(&mut [0; 5000]).unwrap();
        }
        drop(near);
        got += far.read_to_end(&mut Vec::new()).unwrap();
        assert_eq!(got, 1 << 20);
    }

    #[test]
    fn nothing_yet_and_the_end_are_told_apart() {
        let (near, far) = UnixStream::pair().unwrap();
        let near = OwnedFd::from(near);
        let mut pieces = VecDeque::new();
        assert_eq!(Piece::receive(&near, &mut pieces), Err(Errno::AGAIN));
        drop(far);
        assert_eq!(Piece::receive(&near, &mut pieces), Ok(()));
        assert!(pieces.is_empty());
    }
}
