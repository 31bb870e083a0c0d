//! A vhost-user-blk back-end that negotiates everything up to the rings, and sends the descriptors that a test chooses.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use blkyard_mem::Region;
use blkyard_mq::DeviceInfo;
use blkyard_virtio::{BlkConfig, Features};

use super::wire::{message, read};

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
const INFLIGHT_BYTES: u64 = 1 << 16;

/// Answers messages until this one has been answered, by the test's `send`. Returns the channel for requests of the
/// back-end; `None` if the front-end has left.
pub fn agree(stream: &UnixStream, last: u32, mut send: impl FnMut(u32, &[u8], Option<OwnedFd>)) -> Option<UnixStream> {
    let info = DeviceInfo { name: "hostile".into(), capacity_sectors: 2048, ..DeviceInfo::default() };
    let disk = BlkConfig::new(&info, 1, 126, false);
    let mut channel = None;
    loop {
        let (request, _, payload, fds) = read(stream)?;
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
                channel = fds.into_iter().next().map(UnixStream::from);
                continue;
            }
            _ => continue,
        };
        send(request, &message(request, &answer), memory);
        if request == last {
            return channel;
        }
    }
}
