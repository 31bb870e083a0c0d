//! Layout of a virtio-blk queue in the memory shared with the device.
//!
//! ```text
//!  ┌────────────┬─────────┬────────┬─────────┬─────────┬─
//!  │ desc       │ avail   │ used   │ slot 0  │ slot 1  │ …      each part and slot on separate cache lines
//!  └────────────┴─────────┴────────┴─────────┴─────────┴─
//!   a slot    0  header: type, reserved, sector        64  … status, or further segments
//!            16  status                                80  … or, in a discard, ranges; or the serial number
//!            32  table: header, first segment, …
//! ```
//!
//! Header, status and the variable rows of a table for one segment share one cache line: we write it, the device reads
//! and writes it, we read it. A request with ranges has a table of three rows and no segments, so
//! that the rest of its rows is room for them.

use blkyard_mem::PAGE_BYTES;

use crate::blk::{HEADER_BYTES, ID_BYTES, RANGE_BYTES};
use crate::descriptor::DESC_BYTES;
use crate::driver::disk::BlkDisk;
use crate::{Features, packed_ring_bytes, ring_bytes};

const LINE_BYTES: usize = 64;
/// Lines are fetched in pairs.
const PLACE_ALIGN: usize = 2 * LINE_BYTES;

pub(super) const STATUS_AT: usize = HEADER_BYTES;

/// Table of a slot. Two of its rows are in the first cache line.
pub(super) const TABLE_AT: usize = LINE_BYTES - 2 * DESC_BYTES;
const _: () = assert!(STATUS_AT < TABLE_AT);
/// Rows that a request with ranges needs for its table: header, ranges, status.
const RANGE_ROWS: u16 = 3;
pub(super) const RANGES_AT: usize = TABLE_AT + RANGE_ROWS as usize * DESC_BYTES;
const _: () = assert!(RANGE_BYTES == DESC_BYTES);
/// As many bytes as two ranges, behind a table of as many rows.
pub(super) const ID_AT: usize = RANGES_AT;
const _: () = assert!(ID_AT + ID_BYTES <= PLACE_ALIGN);

/// Rows for a request of so many segments, header and status included; at least as many as a request with a range
/// needs.
fn rows(segments_max: u16) -> u16 {
    (segments_max + 2).max(RANGE_ROWS + 1)
}

/// Ranges there is room for.
pub(super) fn ranges_max(segments_max: u16) -> u16 {
    rows(segments_max) - RANGE_ROWS
}

/// The memory of one queue. Offsets are bytes from its start, which must be a multiple of [`BlkLayout::ALIGN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkLayout {
    /// Entries of the ring.
    pub size: u16,
    /// Offsets of descriptors, available and used ring; for a packed ring of descriptors, the driver's and the device's
    /// event area.
    pub parts: [usize; 3],
    /// Offset of the first request slot.
    pub places: usize,
    /// Distance between two slots.
    pub stride: usize,
    /// Places.
    pub depth: u16,
    /// Rows of each slot's table.
    pub rows: u16,
    /// Bytes in all: whole pages, since queues of different NUMA nodes share none.
    pub bytes: usize,
}

impl BlkLayout {
    /// Alignment of the memory's start, here and at the device.
    pub const ALIGN: usize = PLACE_ALIGN;

    /// Layout for a queue of this disk whose ring has `size` entries.
    pub fn new(disk: &BlkDisk, size: u16) -> BlkLayout {
        let packed = disk.features.contains(Features::RING_PACKED);
        let mut at = 0;
        let parts = if packed { packed_ring_bytes(size) } else { ring_bytes(size) }.map(|(bytes, _)| {
            let part = at;
            at += bytes.next_multiple_of(PLACE_ALIGN);
            part
        });
        let rows = rows(disk.info.limits.segments_max);
        let stride = (TABLE_AT + usize::from(rows) * DESC_BYTES).next_multiple_of(PLACE_ALIGN);
        let depth = disk.depth(size);
        let bytes = (at + usize::from(depth) * stride).next_multiple_of(PAGE_BYTES);
        BlkLayout { size, parts, places: at, stride, depth, rows, bytes }
    }
}
