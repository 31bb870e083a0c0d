//! The real code of the study: the core over the virtio-blk driver, the ring, the device's half, and a disk in memory behind it.

use std::io;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Bio, DeviceInfo, Driver, HwQueue, Op, SECTOR_SHIFT, Status};
use blkyard_sim::Rng;
use blkyard_virtio::Features;
use blkyard_virtio::driver::{DRIVER_FEATURES, Loopback, LoopbackConfig};

use crate::floor::{IO_BYTES, touched};
use crate::study::end::config;

/// I/Os that each job keeps out, as in the post.
pub(super) const DEPTH: usize = 64;
/// Entries of a ring: a request each, for four jobs that share one.
pub(super) const RING: u16 = 256;
/// The disk: larger than a second-level cache and small enough for a busy machine.
pub(super) const STORE_BYTES: u64 = 1 << 28;
const IO_SECTORS: u32 = IO_BYTES >> SECTOR_SHIFT;
const BLOCKS: u64 = STORE_BYTES / IO_BYTES as u64;

/// The memory of the disk, every page of it there.
pub(super) fn store() -> io::Result<Arc<Region>> {
    touched(STORE_BYTES).map_err(io::Error::other)
}

/// Serves reads from the store: one copy.
pub(super) fn ram(store: &Arc<Region>) -> impl FnMut(&Bio, &RegionTable) -> Status + Send + use<> {
    let store = Arc::clone(store);
    move |bio, memory| {
        let mut at = bio.sector << SECTOR_SHIFT;
        for segment in &bio.segments {
            let places = memory.resolve(*segment).zip(store.span(at, segment.len as usize));
            let Some((to, from)) = places else { return Status::Invalid };
            to.copy_from(&from);
            at += u64::from(segment.len);
        }
        Status::Ok
    }
}

/// Says that all went well.
pub(super) fn null() -> impl FnMut(&Bio, &RegionTable) -> Status + Send {
    |_, _| Status::Ok
}

/// A split ring, as the post's were, with a device that serves so.
pub(super) fn loopback<S: FnMut(&Bio, &RegionTable) -> Status>(serve: S) -> io::Result<Loopback<S>> {
    let info = DeviceInfo::clone(&info());
    let serial = "study".parse().map_err(io::Error::other)?;
    let wanted = DRIVER_FEATURES - Features::RING_PACKED;
    Loopback::new(&LoopbackConfig { info, wanted, size: RING, serial }, serve)
}

/// The core over a driver, with this memory.
pub(super) fn queue<D: Driver<()>>(driver: D, memory: Arc<RegionTable>) -> HwQueue<D> {
    let bios = usize::from(RING);
    let mut hw = HwQueue::new(driver, info(), config(bios, bios));
    hw.set_memory(&mut (), memory);
    hw
}

/// Memory for the data of so many I/Os.
pub(super) fn buffers(ios: usize) -> io::Result<Arc<RegionTable>> {
    let region = touched(ios as u64 * u64::from(IO_BYTES)).map_err(io::Error::other)?;
    Ok(Arc::new(RegionTable::new(vec![region])))
}

/// Makes a random read of a bio, into the buffer of this number. The cookie stays.
#[inline]
pub(super) fn fill(bio: &mut Bio, buffer: usize, rng: &mut Rng) {
    bio.reset();
    bio.op = Op::Read;
    bio.sector = rng.below(BLOCKS) * u64::from(IO_SECTORS);
    bio.sectors = IO_SECTORS;
    bio.segments.push(Segment { region: 0, offset: buffer as u64 * u64::from(IO_BYTES), len: IO_BYTES });
}

fn info() -> Arc<DeviceInfo> {
    let capacity_sectors = STORE_BYTES >> SECTOR_SHIFT;
    Arc::new(DeviceInfo { name: "study".into(), capacity_sectors, ..DeviceInfo::default() })
}
