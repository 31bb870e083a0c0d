//! A back-end that means ill: it agrees on everything, and then does not do as it should.

use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use blkyard_mem::{Region, View};
use blkyard_virtio::BlkConfig;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// What it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ill {
    /// Never answers.
    Silent,
    /// Answers with nonsense.
    Babbling,
    /// Has no configuration.
    NoConfig,
    /// Has no queues.
    NoQueues,
    /// Says it has no size.
    NoBlocks,
    /// Takes requests, and hangs up.
    Swallows,
    /// Says that more came back than was given.
    Lies,
}

const MQ: u64 = 1;
const REPLY_ACK: u64 = 1 << 3;
const CONFIG: u64 = 1 << 9;
const MEM_SLOTS: u64 = 1 << 15;

/// What it was told of a region: address, bytes, offset, file.
type Told = (u64, u64, u64, OwnedFd);

/// One that listens.
pub struct Fake {
    thread: JoinHandle<()>,
}

impl Fake {
    /// Serves so many front-ends, one after the other, as far as it serves at all.
    pub fn start(path: &Path, config: BlkConfig, ill: Ill, sessions: usize) -> Fake {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let thread = std::thread::spawn(move || {
            for _ in 0..sessions {
                let (stream, _) = listener.accept().unwrap();
                serve(&stream, &config, ill);
            }
        });
        Fake { thread }
    }

    /// Waits until it has served all it was to.
    pub fn join(self) {
        self.thread.join().unwrap();
    }
}

fn serve(stream: &UnixStream, config: &BlkConfig, ill: Ill) {
    let mut regions: Vec<Told> = Vec::new();
    let mut used = 0;
    let (mut kick, mut call) = (None, None);
    loop {
        if let (Some(bell), Some(call)) = (&kick, &call)
            && was_kicked(bell, stream)
        {
            match ill {
                Ill::Swallows => return,
                _ => lie(&regions, used, call),
            }
            kick = None;
        }
        let Some((request, flags, payload, file)) = read(stream) else { return };
        let word = |at: usize| u64::from_ne_bytes(payload[at..at + 8].try_into().unwrap());
        let answer = match request {
            _ if ill == Ill::Silent => continue,
            _ if ill == Ill::Babbling => Some(vec![7; 3]),
            1 => Some(config.features().bits().to_ne_bytes().to_vec()),
            15 if ill == Ill::NoConfig => Some((MQ | REPLY_ACK).to_ne_bytes().to_vec()),
            15 => Some((MQ | REPLY_ACK | CONFIG | MEM_SLOTS).to_ne_bytes().to_vec()),
            17 => Some(u64::from(ill != Ill::NoQueues).to_ne_bytes().to_vec()),
            24 => {
                let mut space = config.read(0, 60).unwrap();
                if ill == Ill::NoBlocks {
                    space[20..24].fill(0);
                }
                Some([&payload[..12], &space].concat())
            }
            36 => Some(8_u64.to_ne_bytes().to_vec()),
            _ => (flags & 8 != 0).then(|| vec![0; 8]),
        };
        match request {
            37 => regions.push((word(24), word(16), word(32), file.unwrap())),
            9 => used = word(16),
            12 => kick = file,
            13 => call = file,
            _ => {}
        }
        if let Some(answer) = answer {
            let words = [request, 1 | 4, answer.len() as u32];
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).chain(answer).collect();
            if (&*stream).write_all(&bytes).is_err() {
                return;
            }
        }
    }
}

/// Waits for a kick or a message; says whether it was a kick.
fn was_kicked(kick: &OwnedFd, stream: &UnixStream) -> bool {
    let limit = Timespec { tv_sec: super::PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let mut fds = [PollFd::new(kick, PollFlags::IN), PollFd::new(stream, PollFlags::IN)];
    assert_ne!(poll(&mut fds, Some(&limit)), Ok(0), "neither a kick nor a message came");
    !fds[0].revents().is_empty()
}

/// Moves the used index by more than a ring has entries.
fn lie(regions: &[Told], used: u64, call: &OwnedFd) {
    let (addr, len, offset, file) = regions.iter().find(|(addr, len, ..)| (*addr..addr + len).contains(&used)).unwrap();
    let region = Region::map_file(file.as_fd(), *offset, *len).unwrap();
    View::new(region, used - addr, 4, 4).unwrap().store_u16(2, 0x7777, Ordering::Release);
    rustix::io::write(call, &1_u64.to_ne_bytes()).unwrap();
}

/// The next message: request, flags, payload, descriptor. Nothing at the end.
fn read(stream: &UnixStream) -> Option<(u32, u32, Vec<u8>, Option<OwnedFd>)> {
    let mut header = [0; 12];
    let mut file = None;
    fill(stream, &mut header, &mut file)?;
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    let mut payload = vec![0; word(8) as usize];
    fill(stream, &mut payload, &mut file)?;
    Some((word(0), word(4), payload, file))
}

fn fill(stream: &UnixStream, mut to: &mut [u8], file: &mut Option<OwnedFd>) -> Option<()> {
    while !to.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = recvmsg(stream, &mut [IoSliceMut::new(to)], &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
        if message.bytes == 0 {
            return None;
        }
        let brought = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        *file = file.take().or(brought);
        to = &mut to[message.bytes..];
    }
    Some(())
}
