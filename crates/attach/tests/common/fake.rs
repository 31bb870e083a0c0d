//! A faulty back-end: it negotiates as it should, and then breaks the protocol in the way that a test chooses.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use blkyard_mem::{Region, View};
use blkyard_sys::send_fds;
use blkyard_virtio::{BlkConfig, Features, inflight_bytes};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;

use super::wire::{message, read};

/// Behaviour.
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
    /// Keeps an in-flight record. Completes a chain that was not offered, and disconnects.
    LiesAndDies,
    /// Leaves an account of something in flight, and hangs up as soon as it has a ring.
    Dies,
    /// Knows no region of memory.
    NoMemory,
    /// Knows two regions of memory, one of them that of the rings. Takes requests, and hangs up.
    Small,
    /// Takes requests, and completes none.
    Holds,
}

/// Faults of a back-end, and its features.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub ill: Ill,
    /// Keeps an in-flight record.
    pub account: bool,
    /// Takes memory as a table; region by region otherwise.
    pub table: bool,
    /// Hangs up after so many messages, those before the rings are there included.
    pub messages_max: Option<usize>,
    /// Counts them from the first kick on.
    pub from_kick: bool,
}

impl From<Ill> for Faults {
    fn from(ill: Ill) -> Faults {
        let account = matches!(ill, Ill::LiesAndDies | Ill::Dies);
        Faults { ill, account, table: false, messages_max: None, from_kick: false }
    }
}

const MQ: u64 = 1;
const REPLY_ACK: u64 = 1 << 3;
const CONFIG: u64 = 1 << 9;
const INFLIGHT: u64 = 1 << 12;
const MEM_SLOTS: u64 = 1 << 15;

/// An announced region: address, bytes, offset, file.
type Told = (u64, u64, u64, OwnedFd);

/// One that listens.
pub struct Fake {
    thread: JoinHandle<Option<OwnedFd>>,
    heard: Arc<Heard>,
}

/// Its messages so far.
#[derive(Default)]
struct Heard {
    kicks: AtomicUsize,
    /// Tables of memory.
    tables: AtomicUsize,
    /// Regions that were added, and removed.
    regions: [AtomicUsize; 2],
}

impl Fake {
    /// Serves so many front-ends, one after the other, as far as it serves at all.
    pub fn start(path: &Path, config: BlkConfig, faults: impl Into<Faults>, sessions: usize) -> Fake {
        let faults = faults.into();
        Fake::start_each(path, config, std::iter::repeat_n(faults, sessions))
    }

    /// Serves one front-end after the other, each with different faults.
    pub fn start_each(
        path: &Path,
        config: BlkConfig,
        faults: impl IntoIterator<Item = Faults, IntoIter: Send + 'static>,
    ) -> Fake {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let (heard, faults) = (Arc::new(Heard::default()), faults.into_iter());
        let counter = Arc::clone(&heard);
        let thread = std::thread::spawn(move || {
            let mut error = None;
            for faults in faults {
                let (stream, _) = listener.accept().unwrap();
                error = serve(&stream, &config, faults, &counter);
            }
            error
        });
        Fake { thread, heard }
    }

    /// Kicks that it has heard.
    pub fn kicks(&self) -> usize {
        self.heard.kicks.load(Ordering::Relaxed)
    }

    /// Number of memory tables received.
    pub fn tables(&self) -> usize {
        self.heard.tables.load(Ordering::Relaxed)
    }

    /// Number of single regions received: added, removed.
    pub fn regions(&self) -> [usize; 2] {
        self.heard.regions.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// It has served all it was to.
    pub fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until it has served all it was to. Returns the descriptor by which the last session said that a ring is
    /// broken.
    pub fn join(self) -> Option<OwnedFd> {
        self.thread.join().unwrap()
    }
}

fn serve(stream: &UnixStream, config: &BlkConfig, faults: Faults, heard: &Heard) -> Option<OwnedFd> {
    let Faults { ill, account, table, messages_max, from_kick } = faults;
    let (mut messages, mut kicked) = (0, false);
    let mut regions: Vec<Told> = Vec::new();
    let mut used = 0;
    let (mut kick, mut call, mut error) = (None, None, None);
    loop {
        if let (Some(eventfd), Some(call)) = (&kick, &call)
            && was_kicked(eventfd, stream)
        {
            kicked = true;
            heard.kicks.fetch_add(1, Ordering::Relaxed);
            match ill {
                Ill::Holds => {}
                Ill::Swallows | Ill::Small => return error,
                Ill::LiesAndDies => {
                    used_ring(&regions, used).store_u32(4, 1000, Ordering::Relaxed);
                    used_ring(&regions, used).store_u16(2, 1, Ordering::Release);
                    return error;
                }
                _ => lie(&regions, used, call),
            }
            kick = None;
        }
        let Some((request, flags, payload, fds)) = read(stream) else { return error };
        let file = fds.into_iter().next();
        if kicked || !from_kick {
            messages += 1;
        }
        if messages_max.is_some_and(|max| messages > max) {
            return error;
        }
        let word = |at: usize| u64::from_ne_bytes(payload[at..at + 8].try_into().unwrap());
        let answer = match request {
            _ if ill == Ill::Silent => continue,
            _ if ill == Ill::Babbling => Some(vec![7; 3]),
            1 => Some(config.features().bits().to_ne_bytes().to_vec()),
            15 if ill == Ill::NoConfig => Some((MQ | REPLY_ACK).to_ne_bytes().to_vec()),
            11 => Some(payload.clone()),
            15 => {
                let account = if account { INFLIGHT } else { 0 };
                let slots = if table { 0 } else { MEM_SLOTS };
                Some((MQ | REPLY_ACK | CONFIG | slots | account).to_ne_bytes().to_vec())
            }
            17 => Some(if ill == Ill::NoQueues { 0 } else { u64::from(config.queues().max(2)) }.to_ne_bytes().to_vec()),
            24 => {
                let mut space = config.read(0, 60).unwrap();
                if ill == Ill::NoBlocks {
                    space[20..24].fill(0);
                }
                Some([&payload[..12], &space].concat())
            }
            31 => {
                let _ = send_account(stream, &payload, ill == Ill::Dies);
                None
            }
            36 => {
                let slots = match ill {
                    Ill::NoMemory => 0_u64,
                    Ill::Small => 2,
                    _ => 8,
                };
                Some(slots.to_ne_bytes().to_vec())
            }
            _ => (flags & 8 != 0).then(|| vec![0; 8]),
        };
        if let 37 | 38 = request {
            heard.regions[request as usize - 37].fetch_add(1, Ordering::Relaxed);
        }
        match request {
            5 => {
                heard.tables.fetch_add(1, Ordering::Relaxed);
            }
            37 => regions.push((word(24), word(16), word(32), file.unwrap())),
            9 => used = word(16),
            12 => kick = file,
            13 => call = file,
            14 => error = file,
            _ => {}
        }
        if let Some(answer) = answer
            && (&*stream).write_all(&message(request, &answer)).is_err()
        {
            return error;
        }
        if request == 18 && ill == Ill::Dies {
            return error;
        }
    }
}

/// Answers with memory for an in-flight record, which may have entries.
pub fn send_account(stream: &UnixStream, payload: &[u8], in_flight: bool) -> Arc<Region> {
    let number = |at: usize| u16::from_ne_bytes([payload[at], payload[at + 1]]);
    let (queues, size) = (number(16), number(18));
    let part = inflight_bytes(Features::empty(), size);
    let region = Region::shared(part * usize::from(queues)).unwrap();
    if in_flight {
        let first = View::new(Arc::clone(&region), 0, part, 8).unwrap();
        // Of this version and size, and the sixth descriptor is in flight.
        for (at, word) in [(8, 1), (10, size), (16 + 5 * 16, 1)] {
            first.store_u16(at, word, Ordering::Relaxed);
        }
    }
    let words = [region.len() as u64, 0].map(u64::to_ne_bytes).concat();
    let bytes = message(31, &[&words, &payload[16..]].concat());
    let (file, _) = region.file().unwrap();
    // Fails if the front-end has disconnected.
    let sent = send_fds(stream, &bytes, &[file], SendFlags::empty());
    assert!(sent.is_err() || sent == Ok(bytes.len()));
    region
}

/// Waits for a kick or a message; says whether it was a kick.
fn was_kicked(kick: &OwnedFd, stream: &UnixStream) -> bool {
    let limit = Timespec { tv_sec: super::PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let mut fds = [PollFd::new(kick, PollFlags::IN), PollFd::new(stream, PollFlags::IN)];
    assert_ne!(poll(&mut fds, Some(&limit)), Ok(0), "neither a kick nor a message came");
    let kicked = !fds[0].revents().is_empty();
    if kicked {
        let _ = rustix::io::read(kick, &mut [0; 8]);
    }
    kicked
}

/// The beginning of the used ring at this address.
fn used_ring(regions: &[Told], used: u64) -> View {
    let (addr, len, offset, file) = regions.iter().find(|(addr, len, ..)| (*addr..addr + len).contains(&used)).unwrap();
    let region = Region::map_file(file.as_fd(), *offset, *len).unwrap();
    View::new(region, used - addr, 12, 4).unwrap()
}

/// Moves the used index by more than a ring has entries.
fn lie(regions: &[Told], used: u64, call: &OwnedFd) {
    used_ring(regions, used).store_u16(2, 0x7777, Ordering::Release);
    rustix::io::write(call, &1_u64.to_ne_bytes()).unwrap();
}
