//! A disk in memory behind a loopback, and the load a test puts on it.

use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Bio, BioFlags, DeviceInfo, Driver, HwQueue, HwQueueConfig, Op, QueueLimits, Status};
use blkyard_virtio::Features;
use blkyard_virtio::driver::{DRIVER_FEATURES, Loopback, LoopbackConfig};

pub const SECTORS: u64 = 4096;
const BUFFER_BYTES: usize = 1 << 20;

pub fn info() -> DeviceInfo {
    DeviceInfo {
        name: "loop".into(),
        capacity_sectors: SECTORS,
        limits: QueueLimits {
            discard_sectors_max: 1024,
            discard_segments_max: 1,
            write_zeroes_sectors_max: 512,
            ..QueueLimits::default()
        },
        volatile_cache: true,
        ..DeviceInfo::default()
    }
}

/// A disk's handler of bios: data in a private region.
pub fn ram(store: Arc<Region>) -> impl FnMut(&Bio, &RegionTable) -> Status {
    move |bio, memory| {
        let at = bio.sector * 512;
        let Some(place) = store.span(at, bio.bytes() as usize) else { return Status::Invalid };
        match bio.op {
            Op::Flush => {}
            Op::Discard | Op::WriteZeroes => place.fill(0),
            Op::Read | Op::Write => {
                let mut done = 0;
                for segment in &bio.segments {
                    let span = memory.resolve(*segment).unwrap();
                    let part = place.part(done, span.len());
                    if bio.op == Op::Read {
                        span.copy_from(&part);
                    } else {
                        part.copy_from(&span);
                    }
                    done += span.len();
                }
            }
        }
        Status::Ok
    }
}

pub fn config(format: Features, size: u16) -> LoopbackConfig {
    let rings = Features::RING_PACKED | Features::INDIRECT_DESC | Features::EVENT_IDX;
    LoopbackConfig {
        info: info(),
        wanted: (DRIVER_FEATURES - rings) | format,
        size,
        serial: "loop-serial".parse().unwrap(),
    }
}

pub fn store() -> Arc<Region> {
    Region::anonymous(SECTORS as usize * 512).unwrap()
}

/// A hardware queue over a driver, with a buffer for data.
pub struct Bench<D> {
    pub hw: HwQueue<D>,
    pub buffer: Arc<Region>,
    pub ended: Vec<Box<Bio>>,
    now_ns: u64,
}

impl<D: Driver<()>> Bench<D> {
    pub fn new(driver: D, info: DeviceInfo, depth: u16) -> Bench<D> {
        let config = HwQueueConfig { depth: usize::from(depth), bios_max: 512, ..HwQueueConfig::default() };
        let mut hw = HwQueue::new(driver, Arc::new(info), config);
        let buffer = Region::anonymous(BUFFER_BYTES).unwrap();
        hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&buffer)])));
        Bench { hw, buffer, ended: Vec::with_capacity(512), now_ns: 0 }
    }

    /// Submits an operation with its data in these pieces of the buffer, offset and length.
    pub fn submit(&mut self, op: Op, flags: BioFlags, sector: u64, sectors: u32, pieces: &[(u64, u32)], cookie: u64) {
        let mut bio = Bio::with_capacity(pieces.len());
        (bio.op, bio.flags, bio.sector, bio.sectors, bio.cookie) = (op, flags, sector, sectors, cookie);
        bio.segments.extend(pieces.iter().map(|(offset, len)| Segment { region: 0, offset: *offset, len: *len }));
        self.hw.submit(bio);
    }

    /// One round of the queue.
    pub fn round(&mut self) {
        // After the retry delay of a queue whose device was full.
        self.now_ns += 10_000_000;
        self.hw.issue(&mut (), self.now_ns);
        let ended = &mut self.ended;
        self.hw.reap(&mut (), self.now_ns, &mut |bio| ended.push(bio));
    }

    /// Rounds until no bio is left; the statuses by cookie.
    pub fn finish(&mut self) -> Vec<(u64, Status)> {
        let mut rounds = 0;
        while !self.hw.is_idle() {
            self.round();
            rounds += 1;
            assert!(rounds < 10_000, "the queue does not come to rest");
        }
        let mut ended: Vec<_> = self.ended.drain(..).map(|bio| (bio.cookie, bio.status)).collect();
        ended.sort_by_key(|(cookie, _)| *cookie);
        ended
    }

    pub fn one(&mut self, op: Op, flags: BioFlags, sector: u64, sectors: u32, pieces: &[(u64, u32)]) -> Status {
        self.submit(op, flags, sector, sectors, pieces, 0);
        self.finish()[0].1
    }

    pub fn put(&self, offset: u64, bytes: &[u8]) {
        self.buffer.span(offset, bytes.len()).unwrap().copy_from_slice(bytes);
    }

    pub fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.buffer.span(offset, len).unwrap().copy_to_slice(&mut bytes);
        bytes
    }
}

/// A bench over a loopback, as deep as the driver allows.
pub fn bench<S: FnMut(&Bio, &RegionTable) -> Status>(config: &LoopbackConfig, serve: S) -> Bench<Loopback<S>> {
    let loopback = Loopback::new(config, serve).unwrap();
    let (info, depth) = (loopback.disk.info.clone(), loopback.driver.depth());
    Bench::new(loopback, info, depth)
}
