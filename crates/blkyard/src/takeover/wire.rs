//! How descriptors and lines go from one daemon to the other.
//!
//! Descriptors come first, some with each byte `#`; then the line that says what they are, as every line of a control socket. Nothing
//! follows before the other side has spoken.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::parcel::Files;

/// Descriptors sent with one byte; the system takes 253.
const AT_ONCE: usize = 128;
/// Descriptors of one daemon: each of 64 exports with as many queues and regions of memory as it may have takes 261.
const DESCRIPTORS_MAX: usize = 1 << 16;
/// What precedes descriptors. No line begins so.
const MARK: u8 = b'#';

/// Sends descriptors.
///
/// # Errors
/// The other side is gone or does not read.
pub(super) fn send_files(to: &UnixStream, files: &Files) -> io::Result<()> {
    let fds: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
    for some in fds.chunks(AT_ONCE) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(some)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        rustix::io::retry_on_intr(|| sendmsg(to, &[IoSlice::new(&[MARK])], &mut control, SendFlags::NOSIGNAL))?;
    }
    Ok(())
}

/// Takes descriptors, and the line that follows them.
///
/// # Errors
/// The other side is gone, silent, or sends more than it may.
pub(super) fn receive(mut from: &UnixStream, line_bytes_max: usize) -> io::Result<(Files, Vec<u8>)> {
    let too_much = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut files = Files::new();
    loop {
        let mut byte = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received =
            rustix::io::retry_on_intr(|| recvmsg(from, &mut [IoSliceMut::new(&mut byte)], &mut control, flags))?;
        files.extend(control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => files.collect::<Vec<_>>(),
            _ => Vec::new(),
        }));
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(too_much("not all descriptors can be had; see the limit on open files"));
        }
        if files.len() > DESCRIPTORS_MAX {
            return Err(too_much("more descriptors come than a daemon can have"));
        }
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if byte[0] != MARK {
            let mut line = byte.to_vec();
            // Nothing follows the line, so it may be read in large pieces.
            let mut piece = vec![0; 1 << 16];
            while line.last() != Some(&b'\n') {
                match from.read(&mut piece)? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    read => line.extend_from_slice(&piece[..read]),
                }
                if line.len() > line_bytes_max {
                    return Err(too_much("the line does not end"));
                }
            }
            return Ok((files, line));
        }
    }
}
