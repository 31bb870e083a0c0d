//! A foreign back-end: it serves a disk in memory, knows its memory by SET_MEM_TABLE only, and does not complete its
//! requests before it restarts its session.
//!
//! A message that changes the memory, or a ring while another runs, makes it restart; so does the end of a ring. Its
//! fetched requests are lost then. It may also drop single requests, or all of them.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Bio, DeviceInfo, Op, QueueLimits, SECTOR_SHIFT};
use blkyard_virtio::{
    BlkConfig, Chain, ChainHead, DeviceRing, Features, GuestMemory, GuestRange, ParseContext, Parsed, RingBase,
    RingLayout, VirtioStatus, parse, write_status, written,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::wire::{is_ready, message, read};

const MQ: u64 = 1;
const REPLY_ACK: u64 = 1 << 3;
const CONFIG: u64 = 1 << 9;
/// Sectors of its disk.
const SECTORS: u64 = 16384;

/// Behaviour of the back-end.
#[derive(Clone, Copy, Debug)]
pub struct LossyConfig {
    pub queues: u16,
    /// Orders and delays are drawn from this.
    pub seed: u64,
    /// Once in so many requests one is dropped; zero for never.
    pub drop_every: u64,
    /// Requests that touch this sector are dropped, however often they come.
    pub drop_sector: Option<u64>,
    /// Turns that a request takes, at most.
    pub turns_max: u64,
    /// It does not notice that a front-end has left: it keeps the connection open until it is stopped.
    pub clings: bool,
}

impl LossyConfig {
    pub fn new(queues: u16, seed: u64) -> LossyConfig {
        LossyConfig { queues, seed, drop_every: 0, drop_sector: None, turns_max: 20, clings: false }
    }
}

/// Its counters.
#[derive(Debug, Default)]
pub struct Seen {
    pub sessions: AtomicU64,
    /// Messages with a table of memory.
    pub tables: AtomicU64,
    /// Those with more regions than the one before.
    pub tables_grown: AtomicU64,
    /// The same while any ring ran.
    pub tables_running: AtomicU64,
    /// Requests lost at a restart.
    pub lost: AtomicU64,
    pub dropped: AtomicU64,
    pub done: AtomicU64,
}

/// One that listens until it is dropped.
pub struct Lossy {
    pub seen: Arc<Seen>,
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Lossy {
    pub fn start(path: &Path, config: LossyConfig) -> Lossy {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let (seen, stop) = (Arc::new(Seen::default()), Arc::new(AtomicBool::new(false)));
        let (on_thread, until) = (Arc::clone(&seen), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut disk = vec![0; (SECTORS << SECTOR_SHIFT) as usize];
            let mut chance = config.seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut clung = Vec::new();
            while !until.load(Relaxed) {
                if !is_ready(&listener, 5) {
                    continue;
                }
                let stream = listener.accept().unwrap().0;
                on_thread.sessions.fetch_add(1, Relaxed);
                let mut session = Session::new(config, &on_thread, &mut disk, &mut chance);
                while !until.load(Relaxed) && session.turn(&stream).is_some() {}
                if config.clings {
                    clung.push(stream);
                }
            }
        });
        Lossy { seen, path: path.into(), stop, thread: Some(thread) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Lossy {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        let _ = std::fs::remove_file(&self.path);
        assert!(std::thread::panicking() || ended.is_none_or(|ended| ended.is_ok()), "the back-end panicked");
    }
}

/// A ring as set up.
#[derive(Default)]
struct Vring {
    size: u16,
    base: u32,
    addresses: Option<[u64; 3]>,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    enabled: bool,
    ring: Option<DeviceRing>,
}

/// A fetched request.
struct Held {
    queue: u16,
    head: ChainHead,
    status_at: Segment,
    room_bytes: u64,
    bio: Box<Bio>,
    turns: u64,
}

struct Session<'a> {
    config: LossyConfig,
    seen: &'a Seen,
    disk: &'a mut [u8],
    chance: &'a mut u64,
    features: Features,
    memory: Option<Arc<GuestMemory>>,
    vrings: BTreeMap<u16, Vring>,
    held: Vec<Held>,
    chain: Chain,
}

impl<'a> Session<'a> {
    fn new(config: LossyConfig, seen: &'a Seen, disk: &'a mut [u8], chance: &'a mut u64) -> Session<'a> {
        Session {
            config,
            seen,
            disk,
            chance,
            features: Features::empty(),
            memory: None,
            vrings: BTreeMap::new(),
            held: Vec::new(),
            chain: Chain::new(256),
        }
    }

    /// Numbers that seem to be of no order (xorshift, Marsaglia 2003).
    fn draw(&mut self, below: u64) -> u64 {
        *self.chance ^= *self.chance << 13;
        *self.chance ^= *self.chance >> 7;
        *self.chance ^= *self.chance << 17;
        *self.chance % below.max(1)
    }

    /// Handles a message if there is one, then the rings. `None` at the end.
    fn turn(&mut self, stream: &UnixStream) -> Option<()> {
        let pause_ns = if self.held.is_empty() { 1_000_000 } else { 0 };
        let mut fds = vec![PollFd::new(stream, PollFlags::IN)];
        let kicks = self.vrings.values().filter_map(|vring| vring.kick.as_ref());
        fds.extend(kicks.map(|kick| PollFd::new(kick, PollFlags::IN)));
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: pause_ns }));
        let has_message = !fds[0].revents().is_empty();
        if has_message {
            self.message(stream)?;
        }
        self.fetch();
        self.finish();
        Some(())
    }

    /// Restarts the session, and loses the fetched requests.
    fn begin_anew(&mut self) {
        self.seen.lost.fetch_add(self.held.len() as u64, Relaxed);
        self.held.clear();
        let Some(memory) = &self.memory else { return };
        for vring in self.vrings.values_mut() {
            if let Some(ring) = vring.ring.take() {
                vring.base = ring.base().bits();
            }
            if let (Some(addresses), Some(_), true) = (vring.addresses, &vring.kick, vring.enabled) {
                let layout = RingLayout::locate(memory, self.features, vring.size, addresses).unwrap();
                let base = RingBase::from_bits(vring.base);
                vring.ring = Some(DeviceRing::new(layout, vring.size, self.features, base).unwrap());
            }
        }
    }

    fn runs(&self) -> bool {
        self.vrings.values().any(|vring| vring.ring.is_some())
    }

    fn message(&mut self, stream: &UnixStream) -> Option<()> {
        let (request, flags, payload, mut files) = read(stream)?;
        let long = |at: usize| u64::from_ne_bytes(payload[at..at + 8].try_into().unwrap());
        let word = |at: usize| u32::from_ne_bytes(payload[at..at + 4].try_into().unwrap());
        let blk = blk_config(self.config.queues);
        let mut answer = match request {
            1 => Some((blk.features() | Features::PROTOCOL_FEATURES).bits().to_ne_bytes().to_vec()),
            15 => Some((MQ | REPLY_ACK | CONFIG).to_ne_bytes().to_vec()),
            17 => Some(u64::from(self.config.queues).to_ne_bytes().to_vec()),
            24 => Some([&payload[..12], &blk.read(0, 60).unwrap()].concat()),
            _ => (flags & 8 != 0).then(|| vec![0; 8]),
        };
        match request {
            2 => self.features = Features::from_bits_truncate(long(0)),
            5 => {
                let (mut regions, mut ranges) = (Vec::new(), Vec::new());
                for (number, file) in files.iter().enumerate() {
                    let [guest_addr, len, user_addr, offset] = [0, 8, 16, 24].map(|at| long(8 + number * 32 + at));
                    regions.push(Region::map_file(file.as_fd(), offset, len).unwrap());
                    ranges.push(GuestRange { guest_addr, user_addr, len, region: number as u32, offset: 0 });
                }
                self.seen.tables.fetch_add(1, Relaxed);
                let before = self.memory.as_ref().map_or(0, |memory| memory.table().iter().count());
                self.seen.tables_grown.fetch_add(u64::from(regions.len() > before), Relaxed);
                self.seen.tables_running.fetch_add(u64::from(self.runs()), Relaxed);
                self.memory = Some(Arc::new(GuestMemory::new(Arc::new(RegionTable::new(regions)), ranges).unwrap()));
                self.begin_anew();
            }
            8..=13 | 18 => {
                let queue = (word(0) & 0xff) as u16;
                let vring = self.vrings.entry(queue).or_default();
                match request {
                    8 => vring.size = word(4) as u16,
                    9 => vring.addresses = Some([long(8), long(24), long(16)]),
                    10 => vring.base = word(4),
                    11 => {
                        let base = vring.ring.take().map_or(vring.base, |ring| ring.base().bits());
                        (vring.base, vring.kick, vring.enabled) = (base, None, false);
                        answer = Some([queue.into(), base].into_iter().flat_map(u32::to_ne_bytes).collect());
                    }
                    12 => vring.kick = files.pop(),
                    13 => vring.call = files.pop(),
                    _ => vring.enabled = word(4) == 1,
                }
                self.begin_anew();
            }
            _ => {}
        }
        if let Some(answer) = answer {
            (&*stream).write_all(&message(request, &answer)).ok()?;
        }
        Some(())
    }

    /// Fetches the available chains of all rings.
    fn fetch(&mut self) {
        let Some(memory) = self.memory.clone() else { return };
        for queue in 0..self.config.queues {
            while self.fetch_one(&memory, queue) {}
        }
    }

    /// Takes one request; says whether there was one.
    fn fetch_one(&mut self, memory: &GuestMemory, queue: u16) -> bool {
        let Some(vring) = self.vrings.get_mut(&queue) else { return false };
        let Some(ring) = &mut vring.ring else { return false };
        let Some(head) = ring.fetch(memory, &mut self.chain).unwrap() else {
            // Polled in each turn: no kick is needed.
            let _ = ring.enable_notify();
            if let Some(kick) = vring.kick.as_ref().filter(|kick| is_ready(kick, 0)) {
                let _ = rustix::io::read(kick, &mut [0; 8]);
            }
            return false;
        };
        let mut bio = Bio::with_capacity(256);
        let context = ParseContext { features: self.features, write_back: false };
        let Parsed::Io { status_at } = parse(&self.chain, memory, &context, &mut bio) else {
            panic!("a request that makes no sense");
        };
        let room_bytes = self.chain.writable_bytes() - 1;
        let sectors = bio.sector..bio.sector + u64::from(bio.sectors);
        let is_chosen = self.config.drop_sector.is_some_and(|sector| sectors.contains(&sector));
        let every = self.config.drop_every;
        if is_chosen || every > 0 && self.draw(every) == 0 {
            self.seen.dropped.fetch_add(1, Relaxed);
            return true;
        }
        let turns = self.draw(self.config.turns_max);
        self.held.push(Held { queue, head, status_at, room_bytes, bio, turns });
        true
    }

    /// Completes requests that have been held for long enough.
    fn finish(&mut self) {
        let Some(memory) = self.memory.clone() else { return };
        self.held.iter_mut().for_each(|held| held.turns = held.turns.saturating_sub(1));
        let mut calls = Vec::new();
        while let Some(number) = self.held.iter().position(|held| held.turns == 0) {
            let Held { queue, head, status_at, room_bytes, bio, .. } = self.held.swap_remove(number);
            self.carry_out(&memory, &bio);
            self.seen.done.fetch_add(1, Relaxed);
            write_status(&memory, status_at, VirtioStatus::Ok);
            let ring = self.vrings.get_mut(&queue).and_then(|vring| vring.ring.as_mut());
            ring.expect("what is in hand is lost with its ring").complete(head, written(room_bytes, VirtioStatus::Ok));
            calls.push(queue);
        }
        for queue in calls {
            let Some(vring) = self.vrings.get_mut(&queue) else { continue };
            if vring.ring.as_mut().is_some_and(DeviceRing::publish)
                && let Some(call) = &vring.call
            {
                rustix::io::write(call, &1_u64.to_ne_bytes()).unwrap();
            }
        }
    }

    fn carry_out(&mut self, memory: &GuestMemory, bio: &Bio) {
        let mut at = (bio.sector << SECTOR_SHIFT) as usize;
        for segment in &bio.segments {
            let (span, len) = (memory.table().resolve(*segment).unwrap(), segment.len as usize);
            match bio.op {
                Op::Read => span.copy_from_slice(&self.disk[at..at + len]),
                Op::Write => span.copy_to_slice(&mut self.disk[at..at + len]),
                _ => {}
            }
            at += len;
        }
    }
}

fn blk_config(queues: u16) -> BlkConfig {
    let limits = QueueLimits::default();
    let info = DeviceInfo { name: "lossy".into(), capacity_sectors: SECTORS, limits, ..DeviceInfo::default() };
    BlkConfig::new(&info, queues, 126, false)
}
