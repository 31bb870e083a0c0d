//! An NVMe driver and a controller on one thread: the driver's queue core, both sides of the queue pair, PRP entries,
//! parsing and completing, and a null device.

use blkyard_mem::RegionTable;
use blkyard_mq::{Bio, SECTOR_BYTES, Status};
use blkyard_nvme::{IdentifyController, IdentifyNamespace, LbaFormat, NvmeLoopback, NvmeLoopbackConfig};

use crate::load::{Load, buffers, info};

/// Entries of each ring.
const ENTRIES: u16 = 128;

/// Reads through a queue pair with shadow doorbells, at this depth.
pub fn pair<C: FnMut() -> u64>(
    depth: usize,
    clock: C,
) -> Load<NvmeLoopback<impl FnMut(&Bio, &RegionTable) -> Status>, C> {
    let blocks = info().capacity_sectors;
    let mut namespace = IdentifyNamespace { blocks, capacity: blocks, ..IdentifyNamespace::default() };
    let block_shift = SECTOR_BYTES.trailing_zeros() as u8;
    namespace.set_lba_format(0, LbaFormat { block_shift, ..LbaFormat::default() });
    let controller = IdentifyController::default();
    let config = NvmeLoopbackConfig { controller, namespace, entries: ENTRIES, list_pages: 5, has_shadow: true };
    let null = |_: &Bio, _: &RegionTable| Status::Ok;
    let loopback = NvmeLoopback::new(&config, null);
    let loopback = loopback.unwrap_or_else(|error| panic!("a queue pair of {ENTRIES}: {error}"));
    let info = loopback.info.clone();
    Load::on((), loopback, &info, buffers(depth), depth, true, clock)
}
