//! The load of the core cells, as light as possible, and the same load without a core.
//!
//! A round is that of a lane: reap completions, fill the bios again, submit them, issue. Filling sets an operation, a
//! position from a cheap generator, and one segment. One owner, one thread, no sharing.

use std::hint::black_box;
use std::sync::Arc;

use blkyard_lab::floor::{IO_BYTES, RandomOffsets, Round, STORE_BYTES, touched};
use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Bio, BlockDevice, DeviceInfo, Driver, HwQueue, HwQueueConfig, NullConfig, NullDevice, NullQueue, Op};
use blkyard_mq::{QueueLimits, SECTOR_BYTES, SchedulerConfig};

const IO_SECTORS: u32 = IO_BYTES / SECTOR_BYTES as u32;
const BLOCKS: u32 = (STORE_BYTES / IO_BYTES as u64) as u32;

pub fn info() -> DeviceInfo {
    DeviceInfo {
        name: "cell".into(),
        capacity_sectors: STORE_BYTES / SECTOR_BYTES,
        limits: QueueLimits::default(),
        read_only: false,
        ..DeviceInfo::default()
    }
}

/// Makes a read of the next position of it.
#[inline]
pub fn fill(bio: &mut Bio, places: &mut RandomOffsets) {
    let slot = bio.cookie;
    bio.reset();
    bio.op = Op::Read;
    bio.sector = places.next(BLOCKS) * u64::from(IO_SECTORS);
    bio.sectors = IO_SECTORS;
    bio.cookie = slot;
    bio.segments.push(Segment { region: 0, offset: slot * u64::from(IO_BYTES), len: IO_BYTES });
}

pub fn bios(count: usize) -> Vec<Box<Bio>> {
    let mut bios: Vec<_> = (0..count).map(|_| Bio::with_capacity(1)).collect();
    bios.iter_mut().enumerate().for_each(|(slot, bio)| bio.cookie = slot as u64);
    bios
}

/// A hardware queue under load, a clock that is read once a round, and the driver's context.
pub struct Load<D: Driver<Cx>, C: FnMut() -> u64, Cx = ()> {
    queue: HwQueue<D>,
    clock: C,
    free: Vec<Box<Bio>>,
    places: RandomOffsets,
    /// Its lane.
    pub cx: Cx,
}

impl<D: Driver<()>, C: FnMut() -> u64> Load<D, C> {
    pub fn new(driver: D, depth: usize, stats: bool, clock: C) -> Load<D, C> {
        Load::on((), driver, &info(), buffers(depth), depth, stats, clock)
    }
}

impl<D: Driver<Cx>, C: FnMut() -> u64, Cx> Load<D, C, Cx> {
    /// The same on a lane of this kind, for a disk of that kind. `memory` has room for the depth.
    pub fn on(
        mut cx: Cx,
        driver: D,
        info: &DeviceInfo,
        memory: Arc<Region>,
        depth: usize,
        stats: bool,
        clock: C,
    ) -> Self {
        let config = HwQueueConfig { depth: depth.max(2), bios_max: depth.max(2), stats, ..HwQueueConfig::default() };
        let mut queue = HwQueue::new(driver, Arc::new(info.clone()), config);
        queue.set_memory(&mut cx, Arc::new(RegionTable::new(vec![memory])));
        Load { queue, clock, free: bios(depth), places: RandomOffsets::new(), cx }
    }

    /// With this scheduler.
    pub fn scheduled(mut self, config: SchedulerConfig) -> Self {
        self.queue.schedule(0, config);
        self
    }
}

/// The core alone: a queue over the null device.
pub fn null<C: FnMut() -> u64>(depth: usize, stats: bool, clock: C) -> Load<NullQueue, C> {
    let device = NullDevice::new(info(), NullConfig::default());
    Load::new(device.queue(depth), depth, stats, clock)
}

impl<D: Driver<Cx>, C: FnMut() -> u64, Cx> Round for Load<D, C, Cx> {
    #[inline]
    fn round(&mut self) -> u64 {
        let now_ns = (self.clock)();
        let free = &mut self.free;
        let ended = self.queue.reap(&mut self.cx, now_ns, &mut |bio| free.push(bio));
        for mut bio in free.drain(..) {
            fill(&mut bio, &mut self.places);
            self.queue.submit(bio);
        }
        self.queue.issue(&mut self.cx, now_ns);
        ended as u64
    }
}

impl<D: Driver<Cx>, C: FnMut() -> u64, Cx> Load<D, C, Cx> {
    /// A round without submissions. True once no I/O is in flight.
    pub fn drains(&mut self) -> bool {
        let (now_ns, free) = ((self.clock)(), &mut self.free);
        self.queue.issue(&mut self.cx, now_ns);
        self.queue.reap(&mut self.cx, now_ns, &mut |bio| free.push(bio));
        self.queue.is_idle()
    }
}

impl<D: Driver<Cx>, C: FnMut() -> u64, Cx> Drop for Load<D, C, Cx> {
    /// I/O in flight completes before the queue is dropped.
    fn drop(&mut self) {
        while !self.drains() {}
    }
}

/// The load without the core: the clock, the positions, the bios.
pub fn load_only(depth: usize, mut clock: impl FnMut() -> u64) -> impl Round {
    let (mut ended, mut free, mut places) = (bios(depth), Vec::with_capacity(depth), RandomOffsets::new());
    move || {
        black_box(clock());
        for bio in ended.drain(..) {
            free.push(black_box(bio));
        }
        for mut bio in free.drain(..) {
            fill(&mut bio, &mut places);
            ended.push(black_box(bio));
        }
        depth as u64
    }
}

pub fn buffers(depth: usize) -> Arc<Region> {
    match touched(depth as u64 * u64::from(IO_BYTES)) {
        Ok(region) => region,
        Err(why) => panic!("{why}"),
    }
}
