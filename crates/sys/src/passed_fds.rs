//! Descriptors over a unix socket, beside bytes (`SCM_RIGHTS`).
//!
//! One call is one `sendmsg` or `recvmsg`; the protocols above define messages and timeouts.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Descriptors that Linux passes with one call at most (`SCM_MAX_FD`).
pub const PASSED_FDS_MAX: usize = 253;

/// Bytes of the ancillary data of `fds` descriptors.
const SPACE_BYTES_MAX: usize = rustix::cmsg_space!(ScmRights(PASSED_FDS_MAX));

/// Result of one receive. Descriptors left in it are closed with it.
#[derive(Debug)]
pub struct ReceivedFds {
    /// How many bytes came; 0 at the end of the stream.
    pub bytes: usize,
    /// The descriptors that came with them, in order, closed on exec.
    pub fds: Vec<OwnedFd>,
    /// More descriptors came than there was room for, or than this process may have open. The kernel closed those.
    pub truncated: bool,
}

/// Sends bytes, and descriptors with the first of them. Returns the number of bytes sent: at least one, with which all
/// descriptors have gone.
///
/// # Errors
/// `MSGSIZE` for more descriptors than [`PASSED_FDS_MAX`], or the system's error; `AGAIN` for a non-blocking call
/// without room. An interrupted call is repeated. There is no SIGPIPE.
pub fn send_fds(to: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> Result<usize, Errno> {
    if fds.len() > PASSED_FDS_MAX {
        return Err(Errno::MSGSIZE);
    }
    let mut space = [MaybeUninit::uninit(); SPACE_BYTES_MAX];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)), "there is room");
    retry_on_intr(|| sendmsg(&to, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL))
}

/// Receives bytes, and the descriptors that came with them. There is room for `fds_max`, and for up to three more where
/// alignment leaves it: a caller that needs an exact bound compares the count.
///
/// # Errors
/// The system's error: `AGAIN` for a non-blocking call without data. An interrupted call is repeated.
///
/// # Panics
/// If `fds_max` is beyond [`PASSED_FDS_MAX`].
pub fn recv_fds(from: impl AsFd, bytes: &mut [u8], fds_max: usize, flags: RecvFlags) -> Result<ReceivedFds, Errno> {
    assert!(fds_max <= PASSED_FDS_MAX, "{fds_max} descriptors do not come with one message");
    let mut space = [MaybeUninit::uninit(); SPACE_BYTES_MAX];
    let mut control = RecvAncillaryBuffer::new(&mut space[..rustix::cmsg_space!(ScmRights(fds_max))]);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| recvmsg(&from, &mut [IoSliceMut::new(bytes)], &mut control, flags))?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    Ok(ReceivedFds { bytes: received.bytes, fds, truncated: received.flags.contains(ReturnFlags::CTRUNC) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::fs::fstat;
    use rustix::io::{FdFlags, fcntl_getfd};

    use super::*;
    use crate::EventFd;

    #[test]
    fn descriptors_come_in_order_with_the_first_byte_closed_on_exec() {
        let (near, far) = UnixStream::pair().unwrap();
        let files = [std::io::pipe().unwrap().0, std::io::pipe().unwrap().0];
        let fds = [files[0].as_fd(), files[1].as_fd()];
        assert_eq!(send_fds(&near, b"hello", &fds, SendFlags::empty()), Ok(5));
        let mut bytes = [0; 2];
        let first = recv_fds(&far, &mut bytes, 8, RecvFlags::DONTWAIT).unwrap();
        assert_eq!((first.bytes, first.fds.len(), first.truncated), (2, 2, false));
        for (sent, came) in files.iter().zip(&first.fds) {
            assert_eq!(fstat(sent).unwrap().st_ino, fstat(came).unwrap().st_ino);
            assert!(fcntl_getfd(came).unwrap().contains(FdFlags::CLOEXEC));
        }
        let mut bytes = [0; 8];
        let rest = recv_fds(&far, &mut bytes, 8, RecvFlags::DONTWAIT).unwrap();
        assert!(rest.bytes == 3 && rest.fds.is_empty() && bytes.starts_with(b"llo"));
        assert_eq!(recv_fds(&far, &mut bytes, 8, RecvFlags::DONTWAIT).unwrap_err(), Errno::AGAIN);
        drop(near);
        assert_eq!(recv_fds(&far, &mut bytes, 8, RecvFlags::DONTWAIT).unwrap().bytes, 0);
        assert_eq!(send_fds(&far, b"x", &[], SendFlags::empty()), Err(Errno::PIPE));
    }

    #[test]
    fn surplus_descriptors_are_closed_and_reported() {
        let (near, far) = UnixStream::pair().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let fds = vec![writer.as_fd(); 20];
        assert_eq!(send_fds(&near, b"x", &fds, SendFlags::empty()), Ok(1));
        let received = recv_fds(&far, &mut [0; 1], 4, RecvFlags::empty()).unwrap();
        assert!(received.truncated && (4..=7).contains(&received.fds.len()), "{received:?}");
        drop(received);
        drop(fds);
        drop(writer);
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "a descriptor stayed open");
    }

    #[test]
    fn more_descriptors_than_the_system_passes_are_refused() {
        let (near, far) = UnixStream::pair().unwrap();
        let event = EventFd::new().unwrap();
        let refused = send_fds(&near, b"x", &[event.as_fd(); PASSED_FDS_MAX + 1], SendFlags::empty());
        assert_eq!(refused, Err(Errno::MSGSIZE));
        assert_eq!(send_fds(&near, b"x", &[event.as_fd(); PASSED_FDS_MAX], SendFlags::empty()), Ok(1));
        let received = recv_fds(&far, &mut [0; 1], PASSED_FDS_MAX, RecvFlags::empty()).unwrap();
        assert!(received.fds.len() == PASSED_FDS_MAX && !received.truncated);
    }
}
