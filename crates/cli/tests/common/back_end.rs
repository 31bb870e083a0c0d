//! A vhost-user-blk back-end that agrees on everything up to rings, with whatever descriptors a test has it send.

use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use blkyard_mem::Region;
use blkyard_mq::DeviceInfo;
use blkyard_virtio::{BlkConfig, Features};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

const GET_FEATURES: u32 = 1;
const GET_PROTOCOL_FEATURES: u32 = 15;
const GET_QUEUE_NUM: u32 = 17;
const SET_BACKEND_REQ_FD: u32 = 21;
/// The last message of a session before rings and their memory.
pub const GET_CONFIG: u32 = 24;
/// The same for the first session of a disk.
pub const GET_INFLIGHT_FD: u32 = 31;

/// MQ, BACKEND_REQ, CONFIG and INFLIGHT_SHMFD.
const PROTOCOL: u64 = 1 | 1 << 5 | 1 << 9 | 1 << 12;
const HEADER_BYTES: usize = 12;
const INFLIGHT_BYTES: u64 = 1 << 16;

/// Answers one message after the other until this one has been answered. How the answers are sent is the test's.
/// Returns the channel for requests of the back-end; `None` if the front-end has left.
pub fn agree(stream: &UnixStream, last: u32, mut send: impl FnMut(u32, &[u8], Option<OwnedFd>)) -> Option<UnixStream> {
    let info = DeviceInfo { name: "hostile".into(), capacity_sectors: 2048, ..DeviceInfo::default() };
    let disk = BlkConfig::new(&info, 1, 126, false);
    let mut channel = None;
    loop {
        let (request, payload, file) = read(stream)?;
        let mut memory = None;
        let answer = match request {
            GET_FEATURES => (disk.features() | Features::PROTOCOL_FEATURES).bits().to_ne_bytes().to_vec(),
            GET_PROTOCOL_FEATURES => PROTOCOL.to_ne_bytes().to_vec(),
            GET_QUEUE_NUM => 1_u64.to_ne_bytes().to_vec(),
            GET_CONFIG => [&payload[..12], &disk.read(0, payload.len() as u32 - 12).unwrap()].concat(),
            GET_INFLIGHT_FD => {
                let region = Region::shared(INFLIGHT_BYTES as usize).unwrap();
                memory = Some(region.file().unwrap().0.try_clone_to_owned().unwrap());
                [&INFLIGHT_BYTES.to_ne_bytes()[..], &[0; 8], &payload[16..]].concat()
            }
            SET_BACKEND_REQ_FD => {
                channel = file.map(UnixStream::from);
                continue;
            }
            _ => continue,
        };
        send(request, &[&header(request, 5, answer.len()), &answer[..]].concat(), memory);
        if request == last {
            return channel;
        }
    }
}

/// The header of a message: request, flags with the version, bytes of the payload.
fn header(request: u32, flags: u32, bytes: usize) -> Vec<u8> {
    [request, flags, bytes as u32].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// The next message: request, payload, descriptor. `None` at the end.
fn read(mut stream: &UnixStream) -> Option<(u32, Vec<u8>, Option<OwnedFd>)> {
    let mut header = [0; HEADER_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let got = recvmsg(stream.as_fd(), &mut [IoSliceMut::new(&mut header)], &mut control, flags).ok()?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    let mut payload = vec![0; word(8) as usize];
    (got.bytes == HEADER_BYTES).then(|| stream.read_exact(&mut payload).ok())??;
    Some((word(0), payload, file))
}
