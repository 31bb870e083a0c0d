//! A connection that was left, until the other side has closed its end too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// Bytes discarded at a time. A back-end that writes without end must not block the control thread.
const DISCARD_MAX: usize = 16 << 10;

/// State of the other side of a closed connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerState {
    /// It has closed its end.
    Closed,
    /// No data to read.
    Silent,
    /// More data than one check reads.
    Talking,
}

/// A connection whose near side was shut down.
#[derive(Debug)]
pub(crate) struct LeftPeer(pub(crate) OwnedFd);

impl LeftPeer {
    /// Whether the other side has closed. Its data is discarded, 16 KiB at a time.
    pub(crate) fn look(&self) -> PeerState {
        let (mut bytes, mut discarded) = ([0; 512], 0);
        while discarded < DISCARD_MAX {
            match recv(&self.0, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return PeerState::Closed,
                Ok((_, count)) => discarded += count,
                Err(Errno::AGAIN) => return PeerState::Silent,
                Err(Errno::INTR) => {}
                Err(_) => return PeerState::Closed,
            }
        }
        PeerState::Talking
    }
}

impl AsFd for LeftPeer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn one_look_reads_a_bounded_part_of_a_flood() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let peer = LeftPeer(ours.into());
        theirs.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while let Ok(count) = theirs.write(&[7; 1024]) {
            sent += count;
        }
        assert!(sent > DISCARD_MAX);
        for _ in 0..sent / DISCARD_MAX {
            assert_eq!(peer.look(), PeerState::Talking);
        }
        assert_eq!(peer.look(), PeerState::Silent);
        drop(theirs);
        assert_eq!(peer.look(), PeerState::Closed);
    }
}
