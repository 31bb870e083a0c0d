//! Shared by the tests of this crate: back-ends that serve a disk in memory, faulty ones, and a user of an attached
//! disk.
//!
//! Every wait is bounded: a wait that times out panics with its condition.
#![allow(dead_code, unused_imports, reason = "each test file uses its own part")]

mod clock;
mod fake;
mod lossy;
mod wire;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_attach::{AttachConfig, Attached, AttachedQueue};
use blkyard_export::{
    BackendConfig, BoundSocket, SEG_MAX, SocketConfig, VhostUserServer, VirtqueuePoller, VirtqueueRemote, queue_pair,
};
use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{
    Bio, BioFlags, BlockDevice, BufferAccess, DeviceInfo, Driver, HwQueue, HwQueueConfig, NullConfig, Op, QueueKind,
    QueueLimits, RamDevice, RamQueue, RegisteredBuffer, Status,
};
use blkyard_os::{LaneConfig, Lanes, Ring, RingConfig, SystemClock, now_ns};
use blkyard_virtio::{BlkConfig, SerialId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use clock::TestClock;
pub use fake::{Fake, Faults, Ill, send_account};
pub use lossy::{Lossy, LossyConfig};
pub use wire::{is_ready, message, read};

/// Longer than any test on a busy machine.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// Waits until the condition holds; checks every millisecond.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A disk of 8 MiB that can do everything.
pub fn disk_info() -> DeviceInfo {
    let limits = QueueLimits { discard_sectors_max: 8192, write_zeroes_sectors_max: 8192, ..QueueLimits::default() };
    let name = "test".into();
    DeviceInfo { name, capacity_sectors: 16384, limits, volatile_cache: true, fua: true, ..DeviceInfo::default() }
}

/// A back-end's configuration for a disk.
pub fn blk_config(info: &DeviceInfo, queues: usize) -> BlkConfig {
    BlkConfig::new(info, queues as u16, SEG_MAX, true)
}

/// A disk in memory that outlives its back-ends.
pub fn disk() -> RamDevice {
    RamDevice::new(disk_info(), NullConfig { latency_ns: 0, bytes_per_s: 0 }).unwrap()
}

/// A back-end of our own.
pub struct Backend {
    pub server: VhostUserServer,
    lanes: Lanes<VirtqueuePoller<RamQueue>>,
}

impl Backend {
    pub fn start(path: &Path, device: &RamDevice, queues: usize) -> Backend {
        Backend::caching(path, device, queues, true)
    }

    /// The same; says whether it holds back writes until they are flushed.
    pub fn caching(path: &Path, device: &RamDevice, queues: usize, write_back: bool) -> Backend {
        let mut lanes = Lanes::start(1, |_| LaneConfig { name: "lane".into(), ..LaneConfig::default() }).unwrap();
        let info = Arc::new(device.info().clone());
        let mut remotes: Vec<VirtqueueRemote> = Vec::new();
        for _ in 0..queues {
            let (remote, port) = queue_pair();
            let config = HwQueueConfig::default();
            let (driver, info) = (device.queue(config.depth), Arc::clone(&info));
            let make =
                move || VirtqueuePoller::new(HwQueue::new(driver, info, config), SerialId::new("x").unwrap(), port);
            lanes.admit(0, make).unwrap();
            remotes.push(remote);
        }
        let socket = SocketConfig { path: path.into(), mode: None, group: None };
        let disk = BlkConfig::new(&info, queues as u16, SEG_MAX, write_back);
        let config = BackendConfig { name: "backend".into(), disk, queues: remotes, domains: Vec::new() };
        Backend { server: VhostUserServer::start(BoundSocket::bind(&socket).unwrap(), config).unwrap(), lanes }
    }

    pub fn stop(self) {
        self.server.ask_to_stop();
        self.server.join();
        self.lanes.join().unwrap();
    }
}

/// Blocks that a user can have in flight.
pub const SLOTS: u64 = 64;
const BLOCK: u32 = 4096;

/// A user of one queue of an attached disk, on the thread of the test.
pub struct User<Q = AttachedQueue> {
    ring: Ring,
    pub hw: HwQueue<Q>,
    region: Arc<Region>,
    /// How segments name it.
    number: u32,
    /// The time is the system's without one.
    clock: Option<Arc<TestClock>>,
    /// Bios that came back, in order.
    pub ended: Vec<Box<Bio>>,
}

impl User {
    pub fn new(disk: &Attached, kind: QueueKind) -> User {
        User::over(disk, kind, Region::shared((SLOTS * u64::from(BLOCK)) as usize).unwrap())
    }

    pub fn over(disk: &Attached, kind: QueueKind, region: Arc<Region>) -> User {
        User::of(disk.queue(kind, SLOTS as usize).unwrap(), SLOTS as usize, disk.info(), region)
    }
}

impl<Q: Driver<Ring>> User<Q> {
    /// A user of this queue, of this depth.
    pub fn of(queue: Q, depth: usize, info: &DeviceInfo, region: Arc<Region>) -> User<Q> {
        let config = HwQueueConfig { depth, ..HwQueueConfig::default() };
        let mut hw = HwQueue::new(queue, Arc::new(info.clone()), config);
        let mut ring = Ring::new(RingConfig::default()).unwrap();
        hw.set_memory(&mut ring, Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
        User { ring, hw, region, number: 0, clock: None, ended: Vec::new() }
    }

    /// The same, with the time of this clock.
    pub fn by(mut self, clock: &Arc<TestClock>) -> User<Q> {
        self.clock = Some(Arc::clone(clock));
        self
    }

    /// Sets the queue's memory, or none, like a queue that stops.
    pub fn set_memory(&mut self, region: Option<&Arc<Region>>) {
        let regions = region.into_iter().map(Arc::clone).collect();
        self.hw.set_memory(&mut self.ring, Arc::new(RegionTable::new(regions)));
        if let Some(region) = region {
            self.region = Arc::clone(region);
        }
    }

    /// Submits an unmerged I/O of a block, with its data at the slot.
    pub fn submit(&mut self, op: Op, block: u64, slot: u64) {
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.cookie) = (op, slot);
        bio.flags |= BioFlags::NO_MERGE;
        if op != Op::Flush {
            (bio.sector, bio.sectors) = (block * 8, 8);
        }
        if op.has_data() {
            bio.segments.push(Segment { region: self.number, offset: slot * u64::from(BLOCK), len: BLOCK });
        }
        self.hw.submit(bio);
    }

    /// Registers its memory: segments name it by the buffer's id from now on.
    pub fn register(&mut self) -> Arc<RegisteredBuffer> {
        self.register_slots(0, self.region.len() as u64 / u64::from(BLOCK))
    }

    /// The same with a part of it, beginning at a slot.
    pub fn register_slots(&mut self, slot: u64, count: u64) -> Arc<RegisteredBuffer> {
        let [offset, len] = [slot, count].map(|blocks| blocks * u64::from(BLOCK));
        let buffer = RegisteredBuffer::new(&self.region, offset, len, BufferAccess::ReadWrite).unwrap();
        assert!(self.hw.add_buffer(&mut self.ring, &buffer));
        self.number = buffer.id().number();
        buffer
    }

    /// Uses a buffer of its memory that was registered before.
    pub fn adopt(&mut self, buffer: &Arc<RegisteredBuffer>) {
        assert!(self.hw.add_buffer(&mut self.ring, buffer));
        (self.region, self.number) = (Arc::clone(buffer.region()), buffer.id().number());
    }

    /// Adds memory and registers it, whatever is in flight.
    pub fn add_memory(&mut self, region: &Arc<Region>) -> Arc<RegisteredBuffer> {
        self.hw.add_region(&mut self.ring, region);
        self.region = Arc::clone(region);
        self.register()
    }

    /// Unregisters a buffer and removes its memory.
    pub fn remove_memory(&mut self, buffer: &RegisteredBuffer) {
        self.unregister(buffer);
        while !self.hw.remove_region(&mut self.ring, buffer.region()) {
            self.turn();
        }
    }

    /// Memory comes and goes while I/O in other memory is in flight.
    pub fn check_changing_memory(&mut self) {
        let kept = self.register();
        for round in 0..10 {
            let byte = |slot: u64| (round * 7 + slot) as u8;
            (0..SLOTS).for_each(|slot| self.fill(slot, byte(slot)));
            (0..SLOTS).for_each(|slot| self.submit(Op::Write, slot * 3, slot));
            self.turn();
            let more = Region::shared((SLOTS * u64::from(BLOCK)) as usize).unwrap();
            let buffer = self.add_memory(&more);
            self.drain();
            (0..SLOTS).for_each(|slot| self.submit(Op::Read, slot * 3, slot));
            self.drain();
            assert!(self.ended.drain(..).all(|bio| bio.status == Status::Ok), "round {round}");
            assert!((0..SLOTS).all(|slot| self.holds(slot, byte(slot))), "round {round}");
            self.adopt(&kept);
            (0..SLOTS).for_each(|slot| self.submit(Op::Read, slot * 3, slot));
            self.turn();
            self.remove_memory(&buffer);
            self.drain();
            assert!(self.ended.drain(..).all(|bio| bio.status == Status::Ok), "round {round}");
        }
    }

    /// Drains a registered buffer; segments keep its id.
    pub fn unregister(&mut self, buffer: &RegisteredBuffer) {
        while !self.hw.remove_buffer(&mut self.ring, buffer.id()) {
            self.turn();
        }
    }

    /// Submits one I/O with all of its memory.
    pub fn submit_whole(&mut self, op: Op, block: u64) {
        self.submit_slots(op, block, 0, self.region.len() as u32 / BLOCK);
    }

    /// Submits one I/O with the data of so many slots.
    pub fn submit_slots(&mut self, op: Op, block: u64, slot: u64, count: u32) {
        let mut bio = Bio::with_capacity(1);
        let len = count * BLOCK;
        (bio.op, bio.sector, bio.sectors) = (op, block * 8, len / 512);
        bio.segments.push(Segment { region: self.number, offset: slot * u64::from(BLOCK), len });
        self.hw.submit(bio);
    }

    pub fn fill(&self, slot: u64, byte: u8) {
        self.region.span(slot * u64::from(BLOCK), BLOCK as usize).unwrap().fill(byte);
    }

    /// Whether the block at a slot is this byte throughout.
    pub fn holds(&self, slot: u64, byte: u8) -> bool {
        let mut bytes = [0; BLOCK as usize];
        self.region.span(slot * u64::from(BLOCK), bytes.len()).unwrap().copy_to_slice(&mut bytes);
        bytes == [byte; BLOCK as usize]
    }

    /// One round. How many came back in it.
    pub fn turn(&mut self) -> usize {
        let now_ns = self.clock.as_ref().map_or_else(now_ns, |clock| clock.turn_ns());
        let ended = &mut self.ended;
        self.ring.reap();
        let count = self.hw.reap(&mut self.ring, now_ns, &mut |bio| ended.push(bio));
        self.hw.issue(&mut self.ring, now_ns);
        self.ring.submit();
        count
    }

    /// One round of a lane that would sleep after it: a queue without I/O reads its commands then.
    pub fn turn_idle(&mut self) {
        self.turn();
        self.hw.arm::<Ring>();
        self.hw.disarm::<Ring>();
    }

    /// Runs until no I/O is in flight.
    pub fn drain(&mut self) {
        let start = Instant::now();
        while !self.hw.is_idle() {
            if self.turn() == 0 {
                std::thread::yield_now();
            }
            assert!(start.elapsed() < PATIENCE, "I/O does not end");
        }
    }

    /// The same, with sleeps in between like a lane's: by the eventfd alone, except for the queue's deadlines.
    pub fn drain_asleep(&mut self) {
        let start = Instant::now();
        while !self.hw.is_idle() {
            assert!(start.elapsed() < 2 * PATIENCE, "I/O does not end");
            if self.turn() > 0 || self.hw.is_idle() || self.hw.arm::<Ring>() {
                self.hw.disarm::<Ring>();
                continue;
            }
            let due = self.hw.deadline_ns::<Ring>().map(|due_ns| Duration::from_nanos(due_ns.saturating_sub(now_ns())));
            let limit = due.unwrap_or(PATIENCE).min(PATIENCE);
            let eventfd = self.hw.eventfd::<Ring>().expect("a queue that is not polled has an eventfd");
            let time = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
            let rang = poll(&mut [PollFd::new(&eventfd, PollFlags::IN)], Some(&time)).unwrap() > 0;
            assert!(rang || limit < Duration::from_secs(10), "nobody rang");
            if rang {
                let _ = rustix::io::read(eventfd, &mut [0; 8]);
            }
            self.hw.disarm::<Ring>();
        }
    }

    /// One I/O from beginning to end.
    pub fn one(&mut self, op: Op, block: u64, slot: u64) -> Status {
        self.submit(op, block, slot);
        self.drain();
        self.ended.pop().expect("an I/O comes back").status
    }
}

/// A folder with a socket in it.
pub fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.sock");
    (folder, path)
}

/// As disks are attached in tests.
pub fn config(path: &Path) -> AttachConfig {
    AttachConfig {
        queue_size: 64,
        reply_max: PATIENCE,
        gone_max: PATIENCE,
        ..AttachConfig::new(path, Arc::new(SystemClock))
    }
}
