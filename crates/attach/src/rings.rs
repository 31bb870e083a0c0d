//! The rings of an attached disk: their memory, their kicks, and the account of what is in flight in them.
//!
//! Owned by the control thread, which decides who serves them (`control.rs`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkyard_mem::{Region, View};
use blkyard_sys::EventFd;
use blkyard_virtio::driver::{BlkLayout, SharedMemory};
use blkyard_virtio::{Features, RingBase};

use crate::session::{InflightMemory, RingPlace, addr_of};

/// A ring of a queue, as the back-end is told of it.
pub(crate) struct QueueRing {
    /// Counts the rings of a device.
    pub(crate) number: u64,
    pub(crate) kick: Arc<EventFd>,
}

/// The rings of all queues: what a session serves, and the next one may go on in.
///
/// They are one value, so that what a set-up does that fails half-way is undone by dropping it.
pub(crate) struct Rings {
    /// Memory of all rings, one after another.
    pub(crate) region: Arc<Region>,
    /// Where the back-end keeps account of what is in flight in them, if it does.
    pub(crate) record: Option<InflightMemory>,
    pub(crate) queues: Vec<QueueRing>,
    /// A back-end was told of them, and may have begun there.
    pub(crate) served: bool,
}

impl Rings {
    pub(crate) fn memory(&self, number: usize, layout: &BlkLayout) -> SharedMemory {
        let offset = (number * layout.bytes) as u64;
        SharedMemory { region: Arc::clone(&self.region), offset, addr: addr_of(&self.region) + offset }
    }

    /// Where the ring of a queue lies and where a back-end goes on in it.
    pub(crate) fn place(&self, number: usize, layout: &BlkLayout, features: Features) -> RingPlace {
        let memory = self.memory(number, layout);
        // Of a packed ring nobody but the account knows where it goes on, and it says so to the back-end; in a fresh
        // one nothing has begun.
        let is_split = !features.contains(Features::RING_PACKED);
        let begins = RingBase::start(features).bits();
        let base = if self.served && is_split { used_index(&memory, layout).into() } else { begins };
        RingPlace { addr: memory.addr, layout: *layout, base }
    }
}

/// How many chains of a split ring came back so far: what is beyond that a back-end finds in its account. [2.7.8]
fn used_index(memory: &SharedMemory, layout: &BlkLayout) -> u16 {
    /// Flags come first.
    const INDEX: usize = 2;
    let used = View::new(Arc::clone(&memory.region), memory.offset + layout.parts[2] as u64, INDEX + 2, 4);
    used.map_or(0, |used| used.load_u16(INDEX, Ordering::Acquire))
}
