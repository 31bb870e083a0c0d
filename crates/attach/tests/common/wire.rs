//! The vhost-user protocol as the back-ends of tests speak it: whole messages, and whether one has arrived.
#![allow(dead_code, reason = "each test program uses its own part")]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use blkyard_sys::recv_fds;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::RecvFlags;

const HEADER_BYTES: usize = 12;
/// Version 1, and a reply.
const REPLY_FLAGS: u32 = 1 | 1 << 2;
/// Most descriptors of a message: one for each region of a memory table.
const FDS_MAX: usize = 8;

/// The next message: request, flags, payload, descriptors. `None` once the front-end has disconnected.
pub fn read(stream: &UnixStream) -> Option<(u32, u32, Vec<u8>, Vec<OwnedFd>)> {
    let (mut header, mut fds) = ([0; HEADER_BYTES], Vec::new());
    fill(stream, &mut header, &mut fds)?;
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    let mut payload = vec![0; word(8) as usize];
    fill(stream, &mut payload, &mut fds)?;
    Some((word(0), word(4), payload, fds))
}

/// The bytes of a reply to a request.
pub fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, REPLY_FLAGS, payload.len() as u32];
    header.iter().flat_map(|word| word.to_ne_bytes()).chain(payload.iter().copied()).collect()
}

/// Waits for so long until a descriptor is readable; says whether it is.
pub fn is_ready(fd: &impl AsFd, within_ms: i64) -> bool {
    let time = Timespec { tv_sec: 0, tv_nsec: within_ms * 1_000_000 };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&time)) == Ok(1)
}

fn fill(stream: &UnixStream, mut to: &mut [u8], fds: &mut Vec<OwnedFd>) -> Option<()> {
    while !to.is_empty() {
        let received = recv_fds(stream, to, FDS_MAX, RecvFlags::empty()).ok()?;
        if received.bytes == 0 {
            return None;
        }
        fds.extend(received.fds);
        to = &mut to[received.bytes..];
    }
    Some(())
}
