//! Driver and device on one thread, over one ring in memory: a queue of requests on one side, a handler of bios on the
//! other. For tests, benchmarks and studies of both sides alone: there is no socket, no second thread and no wake-up.
//!
//! The device runs when the driver is polled. Its half treats a chain as a back-end does, and completes it at once.

use std::io;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Batch, Bio, DeviceInfo, Done, Driver, Status};

use super::{BlkDisk, BlkLayout, BlkRing, DRIVER_FEATURES, SEGMENTS_MAX, SharedMemory};
use crate::{
    BlkConfig, Chain, DeviceRing, Features, GuestMemory, GuestRange, ParseContext, Parsed, Refusals, RingBase,
    RingLayout, SerialId, Violations, VirtioStatus, parse, status_of, write_status, written,
};

/// Where the device finds the memory of the queue, and from where on the regions of the requests, each at a multiple of
/// [`REGION_SPACE`].
const QUEUE_ADDR: u64 = 1 << 32;
const REGION_SPACE: u64 = 1 << 40;

/// Configuration of a loopback.
#[derive(Clone, Debug)]
pub struct LoopbackConfig {
    /// The disk behind the device.
    pub info: DeviceInfo,
    /// Features that the driver takes if they are offered.
    pub wanted: Features,
    /// Entries of the ring.
    pub size: u16,
    /// Serial number of the disk.
    pub serial: SerialId,
}

/// A driver, and the device it drives. As a [`Driver`] it is one queue of the disk.
#[derive(Debug)]
pub struct Loopback<S> {
    /// The driver's half.
    pub driver: BlkRing,
    /// The device's half.
    pub device: LoopbackDevice<S>,
    /// The disk as the driver sees it.
    pub disk: BlkDisk,
}

/// The device's half of a [`Loopback`].
#[derive(Debug)]
pub struct LoopbackDevice<S> {
    /// The ring.
    pub ring: DeviceRing,
    /// Refused requests.
    pub refusals: Refusals,
    /// Whether it does anything at its turn.
    pub is_running: bool,
    serve: S,
    queue: Arc<Region>,
    memory: GuestMemory,
    chain: Chain,
    bio: Box<Bio>,
    context: ParseContext,
    serial: SerialId,
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> Loopback<S> {
    /// A queue whose device serves bios by calling `serve`, which gets the table that their segments point into.
    ///
    /// # Errors
    /// The configuration is inconsistent, or there is no memory.
    pub fn new(config: &LoopbackConfig, serve: S) -> io::Result<Loopback<S>> {
        let offer = BlkConfig::new(&config.info, 1, u32::from(SEGMENTS_MAX), true);
        let features = (offer.features() & DRIVER_FEATURES & config.wanted) | Features::VERSION_1;
        let space = offer.read(0, 60).unwrap_or_default();
        let disk = BlkDisk::new(&config.info.name, features, &space, config.size).map_err(io::Error::other)?;
        let layout = BlkLayout::new(&disk, config.size);
        let queue = Region::anonymous(layout.bytes)?;
        let shared = SharedMemory { region: Arc::clone(&queue), offset: 0, addr: QUEUE_ADDR };
        let driver = BlkRing::new(&disk, config.size, &shared, Arc::new(Violations::default()));
        let memory = guest_memory(&queue, &RegionTable::default())?;
        let addrs = layout.parts.map(|part| QUEUE_ADDR + part as u64);
        let ring = RingLayout::locate(&memory, features, config.size, addrs)
            .and_then(|ring| DeviceRing::new(ring, config.size, features, RingBase::start(features)));
        let device = LoopbackDevice {
            ring: ring.map_err(io::Error::other)?,
            refusals: Refusals::default(),
            is_running: true,
            serve,
            queue,
            memory,
            chain: Chain::new(SEGMENTS_MAX + 2),
            bio: Bio::with_capacity(usize::from(SEGMENTS_MAX)),
            context: ParseContext { features, write_back: true },
            serial: config.serial,
        };
        Ok(Loopback { driver: driver.map_err(io::Error::other)?, device, disk })
    }
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> LoopbackDevice<S> {
    /// Fetches and completes all available chains. Returns whether the driver wants a call.
    #[inline]
    pub fn turn(&mut self) -> bool {
        if !self.is_running {
            return false;
        }
        // A broken ring returns an error each time, and no chain.
        while let Ok(Some(head)) = self.ring.fetch(&self.memory, &mut self.chain) {
            let room = self.chain.writable_bytes().saturating_sub(1);
            let (status, at) = match parse(&self.chain, &self.memory, &self.context, &mut self.bio) {
                Parsed::Io { status_at } => (status_of((self.serve)(&self.bio, self.memory.table())), Some(status_at)),
                Parsed::GetId { status_at } => {
                    self.serial.write(&self.memory, self.chain.writable());
                    (VirtioStatus::Ok, Some(status_at))
                }
                Parsed::Reject { status, status_at, reason } => {
                    self.refusals.request(&reason);
                    (status, status_at)
                }
            };
            let len = at.map_or(0, |at| {
                write_status(&self.memory, at, status);
                written(room, status)
            });
            self.ring.complete(head, len);
        }
        self.ring.publish()
    }

    /// Memory of the queue: ring and request slots.
    pub fn queue_memory(&self) -> &Arc<Region> {
        &self.queue
    }
}

/// The queue's memory and the regions of the table, which keep their numbers, as the device sees them.
fn guest_memory(queue: &Arc<Region>, table: &RegionTable) -> io::Result<GuestMemory> {
    let mut table = table.clone();
    let range = |(region, memory): (u32, &Arc<Region>)| {
        let guest_addr = region_addr(region);
        GuestRange { guest_addr, user_addr: guest_addr, len: memory.len() as u64, region, offset: 0 }
    };
    let mut ranges: Vec<_> = table.iter().map(range).collect();
    let region = table.insert(Arc::clone(queue));
    ranges.push(GuestRange {
        guest_addr: QUEUE_ADDR,
        user_addr: QUEUE_ADDR,
        len: queue.len() as u64,
        region,
        offset: 0,
    });
    GuestMemory::new(Arc::new(table), ranges).map_err(io::Error::other)
}

fn region_addr(region: u32) -> u64 {
    REGION_SPACE * (u64::from(region) + 1)
}

impl<S: FnMut(&Bio, &RegionTable) -> Status, Cx: ?Sized> Driver<Cx> for Loopback<S> {
    #[inline]
    fn queue_rqs(&mut self, _cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        // The device polls in its turn.
        let _ = self.driver.queue(batch, |segment: Segment| {
            let segment = memory.plain(segment)?;
            memory.resolve_region(segment).map(|_| region_addr(segment.region) + segment.offset)
        });
    }

    #[inline]
    fn poll(&mut self, _cx: &mut Cx, _memory: &RegionTable, done: &mut Done<'_>, _now_ns: u64) {
        let _ = self.device.turn();
        // A broken ring is counted, and its requests stay in flight.
        let _ = self.driver.poll(done);
    }

    fn set_memory(&mut self, _cx: &mut Cx, memory: &RegionTable) {
        self.device.memory = guest_memory(&self.device.queue, memory).expect("regions shorter than their space");
    }
}
