//! A virtio-blk driver and a device on one thread: the driver's queue core, both sides of the ring, parsing and
//! completing, and a null device.

use blkyard_mem::RegionTable;
use blkyard_mq::{Bio, Status};
use blkyard_virtio::Features;
use blkyard_virtio::driver::{DRIVER_FEATURES, Loopback, LoopbackConfig};

use crate::load::{Load, info};

/// Entries of the ring: a request each.
const RING_SIZE: u16 = 128;

/// Reads through a ring, split or packed, at this depth.
pub fn ring<C: FnMut() -> u64>(
    packed: bool,
    depth: usize,
    clock: C,
) -> Load<Loopback<impl FnMut(&Bio, &RegionTable) -> Status>, C> {
    let wanted = if packed { DRIVER_FEATURES } else { DRIVER_FEATURES - Features::RING_PACKED };
    let Ok(serial) = "cell".parse() else { unreachable!("four letters are a serial number") };
    let config = LoopbackConfig { info: info(), wanted, size: RING_SIZE, serial };
    let null = |_: &Bio, _: &RegionTable| Status::Ok;
    let loopback = Loopback::new(&config, null).unwrap_or_else(|error| panic!("a ring of {RING_SIZE}: {error}"));
    Load::new(loopback, depth, true, clock)
}
