//! Cells of the core over memory: the null device, which leaves the core alone, and the RAM device, which adds one
//! copy.
//!
//! A round is what a lane does: collect what is over, fill the bios anew, hand them in, offer them to the device. The
//! clock is read once a round. One owner, one thread, nothing shared.

use std::hint::black_box;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{
    Bio, BlockDevice, DeviceInfo, Driver, HwQueue, HwQueueConfig, NullConfig, NullDevice, Op, QueueLimits, RamDevice,
};

use blkyard_os::now_ns;

use crate::report::{self, Figure, Report};
use crate::windows::{Plan, Round, Variant, measure, variant};

const IO_BYTES: u32 = 4096;
const IO_SECTORS: u64 = IO_BYTES as u64 / 512;
/// Beyond any last-level cache, so that the copy comes from memory, as it would on a disk's worth of data.
const STORE_BYTES: u64 = 1 << 30;
const CAPACITY_SECTORS: u64 = STORE_BYTES / 512;

pub fn info() -> DeviceInfo {
    DeviceInfo {
        name: "cell".into(),
        capacity_sectors: CAPACITY_SECTORS,
        limits: QueueLimits::default(),
        read_only: false,
        volatile_cache: false,
    }
}

/// Places to read, at random, the same for all who start from the same seed.
pub struct Places(u64);

impl Places {
    pub fn new() -> Places {
        Places(0x9e37_79b9_7f4a_7c15)
    }

    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (u64::from((self.0 >> 32) as u32) * (CAPACITY_SECTORS / IO_SECTORS)) >> 32
    }
}

#[inline]
pub fn fill(bio: &mut Bio, slot: u64, block: u64) {
    bio.reset();
    bio.op = Op::Read;
    bio.sector = block * IO_SECTORS;
    bio.sectors = IO_SECTORS as u32;
    bio.cookie = slot;
    bio.segments.push(Segment { region: 0, offset: slot * u64::from(IO_BYTES), len: IO_BYTES });
}

pub fn bios(count: usize) -> Vec<Box<Bio>> {
    let mut bios: Vec<_> = (0..count).map(|_| Bio::with_capacity(1)).collect();
    bios.iter_mut().enumerate().for_each(|(slot, bio)| bio.cookie = slot as u64);
    bios
}

struct Load<D: Driver<()>> {
    queue: HwQueue<D>,
    free: Vec<Box<Bio>>,
    places: Places,
}

impl<D: Driver<()>> Load<D> {
    fn new(driver: D, depth: usize, stats: bool) -> Load<D> {
        let config = HwQueueConfig { depth: depth.max(2), bios_max: depth.max(2), stats, ..HwQueueConfig::default() };
        let mut queue = HwQueue::new(driver, Arc::new(info()), config);
        queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![buffers(depth)])));
        Load { queue, free: bios(depth), places: Places::new() }
    }
}

impl<D: Driver<()>> Round for Load<D> {
    #[inline]
    fn round(&mut self) -> u64 {
        let now_ns = now_ns();
        let free = &mut self.free;
        let ended = self.queue.reap(&mut (), now_ns, &mut |bio| free.push(bio));
        while let Some(mut bio) = self.free.pop() {
            let slot = bio.cookie;
            fill(&mut bio, slot, self.places.next());
            self.queue.submit(bio);
        }
        self.queue.issue(&mut (), now_ns);
        ended as u64
    }
}

impl<D: Driver<()>> Drop for Load<D> {
    /// What is in flight comes back before the queue may go.
    fn drop(&mut self) {
        while !self.queue.is_idle() {
            self.queue.issue(&mut (), 0);
            self.queue.reap(&mut (), 0, &mut |_| ());
        }
    }
}

fn buffers(depth: usize) -> Arc<Region> {
    region(depth * IO_BYTES as usize)
}

fn region(bytes: usize) -> Arc<Region> {
    let Ok(region) = Region::anonymous(bytes) else { panic!("{bytes} bytes of memory cannot be mapped") };
    touch(&region);
    region
}

/// Writes every page, so that none is the shared page of zeroes.
fn touch(region: &Region) {
    if let Some(all) = region.span(0, region.len()) {
        all.fill(0xa5);
    }
}

fn null(depth: usize, stats: bool) -> Variant<'static> {
    let device = NullDevice::new(info(), NullConfig::default());
    variant(Load::new(device.queue(depth), depth, stats))
}

/// The load without the core: the clock, the places, the bios.
pub fn load_alone(depth: usize) -> Variant<'static> {
    let (mut ended, mut free, mut places) = (bios(depth), Vec::with_capacity(depth), Places::new());
    variant(move || {
        black_box(now_ns());
        free.append(&mut ended);
        while let Some(mut bio) = free.pop() {
            let slot = bio.cookie;
            fill(&mut bio, slot, places.next());
            ended.push(black_box(bio));
        }
        depth as u64
    })
}

/// `core-null-*`: what the core itself costs.
pub fn null_cells(plan: Plan, report: &mut Report) {
    for depth in [1, 8, 32] {
        let name = format!("core-null-b{depth}");
        let nostats = format!("{name}-nostats");
        let cost = format!("{name}-stats-cost");
        if ![&name, &nostats, &cost].into_iter().any(|cell| report.wants(cell)) {
            continue;
        }
        let [with, without, alone] = measure(plan, [null(depth, true), null(depth, false), load_alone(depth)]);
        let floor = Some(alone.cost());
        report.add(Figure::cost(name, &with).against(floor, None));
        report.add(Figure::cost(nostats, &without).against(floor, None));
        report.add(Figure::difference(cost, &with, &without));
    }
}

/// `ram-4k-*`: the core and one copy, against the copy alone.
pub fn ram_cells(plan: Plan, report: &mut Report) {
    for depth in [1, 32] {
        let name = format!("ram-4k-qd{depth}");
        if !report.wants(&name) {
            continue;
        }
        let device = match RamDevice::new(info(), NullConfig::default()) {
            Ok(device) => device,
            Err(error) => {
                report::skip(&name, &format!("{STORE_BYTES} bytes cannot be mapped: {error}"));
                continue;
            }
        };
        write_all(&device);
        let load = Load::new(device.queue(depth), depth, true);
        let (store, buffers) = (region(STORE_BYTES as usize), buffers(depth));
        let mut places = Places::new();
        let copies = variant(move || {
            for slot in 0..depth {
                let from = store.span(places.next() * u64::from(IO_BYTES), IO_BYTES as usize);
                let to = buffers.span((slot * IO_BYTES as usize) as u64, IO_BYTES as usize);
                if let (Some(from), Some(to)) = (from, to) {
                    to.copy_from(&from);
                }
            }
            depth as u64
        });
        let [core, copy] = measure(plan, [variant(load), copies]);
        report.add(Figure::cost(name, &core).against(None, Some(copy.cost())));
    }
}

/// Writes the whole device once, so that every page is there.
fn write_all(device: &RamDevice) {
    const BYTES: u32 = 1 << 20;
    let mut queue =
        HwQueue::new(device.queue(1), Arc::new(info()), HwQueueConfig { depth: 1, ..HwQueueConfig::default() });
    queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![region(BYTES as usize)])));
    let mut free = vec![Bio::with_capacity(1)];
    for sector in (0..CAPACITY_SECTORS).step_by(BYTES as usize / 512) {
        let Some(mut bio) = free.pop() else { panic!("the bio did not come back") };
        bio.reset();
        (bio.op, bio.sector, bio.sectors) = (Op::Write, sector, BYTES / 512);
        bio.segments.push(Segment { region: 0, offset: 0, len: BYTES });
        queue.submit(bio);
        queue.issue(&mut (), 0);
        queue.reap(&mut (), 0, &mut |bio| free.push(bio));
    }
}
