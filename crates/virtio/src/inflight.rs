//! The in-flight record of a ring, in memory that outlives the daemon. [vhost-user, Inflight I/O tracking]
//!
//! The front-end keeps a region of memory for each queue. A fetched chain is recorded there before it is processed, and
//! cleared when its used element is published. The region and the ring of a killed daemon together have its uncompleted
//! chains. The next daemon reads both when it sets the ring up, and fetches those chains first, in their earlier order.
//! So a request may be executed twice, and is completed once.
//!
//! The layout is that of the vhost-user document, byte for byte: another back-end can continue from our record, and we
//! from its. Fields are little-endian. The peer may write to this memory, so the region is read when the ring is set
//! up and never again: after that it only mirrors private state. An inconsistent region is refused before anything in
//! it is changed.
//!
//! Owned by the ring it records. Knows nothing of chains and requests.

mod packed;
mod split;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::{Region, View};

use crate::Features;
use crate::counters::reasons;

pub(crate) use packed::{LeftChain, LeftInRecord, PackedInflight};
pub(crate) use split::SplitInflight;

/// Queues begin at multiples of this in a region, as other back-ends have it.
const QUEUE_ALIGN: usize = 64;

// Fields at the beginning of a queue's part, in both formats.
const FEATURES: usize = 0;
const VERSION: usize = 8;
const DESC_NUM: usize = 10;

/// Version of a part in use. A fresh one has zero.
const VERSION_ONE: u16 = 1;

/// Bytes of one queue's part of a region, for a ring of up to `size` entries of the format these features say. Parts
/// follow each other.
pub fn inflight_bytes(features: Features, size: u16) -> usize {
    let bytes = if features.contains(Features::RING_PACKED) { packed::bytes(size) } else { split::bytes(size) };
    bytes.next_multiple_of(QUEUE_ALIGN)
}

/// One queue's part of a region.
#[derive(Clone, Debug)]
pub struct Inflight(View);

impl Inflight {
    /// The `len` bytes at `offset` of a region, if they lie in it and begin at a multiple of 8 in memory.
    pub fn new(region: Arc<Region>, offset: u64, len: usize) -> Option<Inflight> {
        View::new(region, offset, len, align_of::<u64>()).map(Inflight)
    }

    /// The memory it lies in.
    pub fn region(&self) -> &Arc<Region> {
        self.0.region()
    }

    /// Clears the record for a new ring: no chain is in flight, and the old position is invalid.
    pub fn forget(&self) {
        self.0.store_u16(VERSION, 0, Relaxed);
    }

    /// Checks common to both formats, before a part is read. Returns the number of records in use; `None` if it is
    /// fresh.
    fn open(&self, size: u16, bytes: fn(u16) -> usize) -> Result<Option<u16>, InflightFault> {
        if self.0.len() < bytes(size) {
            return Err(InflightFault::TooSmall);
        }
        match self.0.load_u16(VERSION, Relaxed) {
            0 => return Ok(None),
            VERSION_ONE => {}
            _ => return Err(InflightFault::Version),
        }
        if self.0.load_u64(FEATURES, Relaxed) != 0 {
            return Err(InflightFault::Features);
        }
        let records = self.0.load_u16(DESC_NUM, Relaxed);
        if self.0.len() < bytes(records) { Err(InflightFault::DescNum) } else { Ok(Some(records)) }
    }
}

reasons! {
    /// Why a region is not believed.
    InflightFault {
        /// It has no room for the ring.
        TooSmall = "it is shorter than its ring needs",
        /// Of a format that is not known here.
        Version = "it has a version other than 0 and 1",
        /// Unknown features.
        Features = "it has unknown features",
        /// Its number of records cannot be: they do not fit, or are fewer than the ring has while something is in
        /// flight.
        DescNum = "its number of entries does not match its length and its ring",
        /// The used index is further ahead than the ring is long, though something is in flight.
        UsedJumped = "its used index differs from the ring's by more than the ring size",
        /// The list of the last batch points outside the ring.
        BatchOutOfRange = "the list of its last batch has an entry outside the ring",
        /// A descriptor beyond the ring is in flight.
        HeadOutOfRange = "it has a descriptor in flight outside its ring",
        /// A used index is outside the ring.
        UsedOutOfRange = "its used index lies outside the ring",
        /// The list of free entries runs in a circle.
        FreeLoop = "its list of free entries has a cycle",
        /// A chain in flight leads out of the record, or has another length than it says.
        ChainOutOfRange = "the end of a chain in flight is inconsistent",
        /// An entry is free and in flight at once, or in two chains.
        ChainTwice = "a chain in flight has an entry of another chain",
        /// An entry is neither free nor in flight.
        EntryLost = "an entry is neither free nor in flight",
        /// No memory for a copy of the chains in flight.
        NoMemory = "out of memory for a copy of the requests in flight",
    }
}
