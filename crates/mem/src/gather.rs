//! Sends bytes that lie in several places over a socket: one call, and no copy besides the kernel's.
//!
//! Unsafe: addresses for the kernel, which reads them within the call.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::Span;

/// Maximum pieces of a call; Linux takes 1024. Their table lies on the stack, 8 KiB.
pub const GATHER_MAX: usize = 512;

/// A piece of what is sent.
#[derive(Clone, Copy)]
pub enum GatherPiece<'a> {
    /// Bytes of our own.
    Bytes(&'a [u8]),
    /// Bytes that others may write to meanwhile. The peer gets some mixture then.
    Span(Span<'a>),
}

/// Sends pieces in order, without those bytes at their start that are to be skipped. Returns the bytes that the kernel
/// has taken: some of them, if the socket has room for no more, or of [`GATHER_MAX`] pieces.
///
/// # Errors
/// As of `sendmsg`. It does not wait: a full socket is [`io::ErrorKind::WouldBlock`]. No signal is raised.
pub fn send_gathered<'a>(
    socket: BorrowedFd<'_>,
    pieces: impl Iterator<Item = GatherPiece<'a>>,
    mut skip: usize,
) -> io::Result<usize> {
    let mut table = [const { MaybeUninit::<libc::iovec>::uninit() }; GATHER_MAX];
    let mut count = 0;
    for piece in pieces {
        let (start, len) = match piece {
            GatherPiece::Bytes(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
            GatherPiece::Span(span) => (span.as_ptr(), span.len()),
        };
        if skip >= len {
            skip -= len;
            continue;
        }
        let Some(entry) = table.get_mut(count) else { break };
        entry.write(libc::iovec { iov_base: start.wrapping_add(skip).cast(), iov_len: len - skip });
        (skip, count) = (0, count + 1);
    }
    // SAFETY: all zeroes is an empty header.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    (header.msg_iov, header.msg_iovlen) = (table.as_mut_ptr().cast(), count as _);
    // SAFETY: the first `count` entries of the table are written. Each names bytes that are borrowed, or mapped as long
    // as a span lives, until the call returns; the kernel only reads them.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::Region;

    fn pieces<'a>(header: &'a [u8], region: &'a Region) -> [GatherPiece<'a>; 4] {
        let span = |offset, len| GatherPiece::Span(region.span(offset, len).unwrap());
        [GatherPiece::Bytes(header), span(0, 4096), GatherPiece::Bytes(&[]), span(8192, 100)]
    }

    #[test]
    fn pieces_arrive_in_order_and_without_the_skipped_bytes() {
        let region = Region::anonymous(3 * 4096).unwrap();
        region.span(0, 4096).unwrap().fill(1);
        region.span(8192, 100).unwrap().fill(2);
        let all = [vec![9; 24], vec![1; 4096], vec![2; 100]].concat();
        for skip in [0, 1, 24, 25, 4119, 4120, 4219] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let sent = send_gathered(ours.as_fd(), pieces(&[9; 24], &region).into_iter(), skip).unwrap();
            drop(ours);
            let mut received = Vec::new();
            theirs.read_to_end(&mut received).unwrap();
            assert_eq!((sent, &received[..]), (all.len() - skip, &all[skip..]), "skipped {skip}");
        }
    }

    #[test]
    fn a_full_socket_takes_a_part_and_then_would_block() {
        let region = Region::anonymous(4096).unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let many = || std::iter::repeat_n(GatherPiece::Span(region.span(0, 4096).unwrap()), GATHER_MAX + 1);
        let mut sent = send_gathered(ours.as_fd(), many(), 0).unwrap();
        assert!(sent > 0 && sent < GATHER_MAX * 4096);
        let error = loop {
            match send_gathered(ours.as_fd(), many(), 0) {
                Ok(bytes) => sent += bytes,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(ours);
        let mut received = Vec::new();
        theirs.read_to_end(&mut received).unwrap();
        assert_eq!(received.len(), sent);
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert_eq!(send_gathered(ours.as_fd(), many(), 0).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
