//! An NVMe driver and a controller on one thread: the driver's queue core, both sides of the queue pair, PRP entries,
//! parsing and completing, and a null device.

use blkyard_mem::RegionTable;
use blkyard_mq::{Bio, SECTOR_BYTES, Status};
use blkyard_nvme::{
    IdentifyController, IdentifyNamespace, LbaFormat, LoopbackBuffers, NvmeLoopback, NvmeLoopbackConfig,
};

use crate::load::{Load, buffers, info};

/// Entries of each ring: one of them always stays free.
const ENTRIES: u16 = 129;

/// A namespace of 512-byte blocks.
pub fn namespace() -> IdentifyNamespace {
    let blocks = info().capacity_sectors;
    let mut namespace = IdentifyNamespace { blocks, capacity: blocks, ..IdentifyNamespace::default() };
    let block_shift = SECTOR_BYTES.trailing_zeros() as u8;
    namespace.set_lba_format(0, LbaFormat { block_shift, ..LbaFormat::default() });
    namespace
}

/// A queue pair with registered buffers mapped like this.
pub fn config(has_shadow: bool, buffers: LoopbackBuffers) -> NvmeLoopbackConfig {
    let controller = IdentifyController::default();
    NvmeLoopbackConfig { controller, namespace: namespace(), entries: ENTRIES, list_pages: 5, has_shadow, buffers }
}

/// Both sides of a queue pair, over a null device.
pub fn loopback(has_shadow: bool) -> NvmeLoopback<impl FnMut(&Bio, &RegionTable) -> Status> {
    loopback_of(has_shadow, LoopbackBuffers::Contiguous)
}

/// The same, with registered buffers mapped like this.
pub fn loopback_of(
    has_shadow: bool,
    buffers: LoopbackBuffers,
) -> NvmeLoopback<impl FnMut(&Bio, &RegionTable) -> Status> {
    let null = |_: &Bio, _: &RegionTable| Status::Ok;
    NvmeLoopback::new(&config(has_shadow, buffers), null)
        .unwrap_or_else(|error| panic!("a queue pair of {ENTRIES}: {error}"))
}

/// Reads through a queue pair with shadow doorbells, at this depth.
pub fn pair<C: FnMut() -> u64>(
    depth: usize,
    clock: C,
) -> Load<NvmeLoopback<impl FnMut(&Bio, &RegionTable) -> Status>, C> {
    let loopback = loopback(true);
    let info = loopback.info.clone();
    Load::on((), loopback, &info, buffers(depth), depth, true, clock)
}
