//! Virtqueues of an attached disk: their memory, their kicks, and their in-flight records.
//!
//! Owned by the control thread, which decides who serves them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkyard_mem::{Region, Segment, View};
use blkyard_mq::{Batch, Done, Tag};
use blkyard_sys::EventFd;
use blkyard_virtio::driver::{BlkLayout, BlkRing, DeviceFault, SharedMemory};
use blkyard_virtio::{Features, RingBase};

use super::session::{InflightMemory, RingPlace, addr_of};
use crate::protocol::RemoteRing;

/// The virtqueues of a disk.
pub struct Rings {
    /// Memory of all rings, one after another.
    pub(crate) region: Arc<Region>,
    /// In-flight record, if the back-end keeps one.
    pub(crate) record: Option<InflightMemory>,
    /// By queue.
    pub(crate) kicks: Vec<Arc<EventFd>>,
}

impl Rings {
    pub(crate) fn memory(&self, number: usize, layout: &BlkLayout) -> SharedMemory {
        let offset = (number * layout.bytes) as u64;
        SharedMemory { region: Arc::clone(&self.region), offset, addr: addr_of(&self.region) + offset }
    }

    /// Addresses of a queue's ring, and the base at which a back-end begins, or continues for an earlier one.
    pub(crate) fn place(&self, number: usize, layout: &BlkLayout, features: Features, resumed: bool) -> RingPlace {
        let memory = self.memory(number, layout);
        // The position of a packed ring is only in the record, and the back-end reads it there; a fresh ring has the
        // start position.
        let is_split = !features.contains(Features::RING_PACKED);
        let begins = RingBase::start(features).bits();
        let base = if resumed && is_split { used_index(&memory, layout).into() } else { begins };
        RingPlace { addr: memory.addr, layout: *layout, base }
    }
}

/// Used index of a split ring; a back-end finds later chains in its record. [2.7.8]
fn used_index(memory: &SharedMemory, layout: &BlkLayout) -> u16 {
    /// Flags come first.
    const INDEX: usize = 2;
    let used = View::new(Arc::clone(&memory.region), memory.offset + layout.parts[2] as u64, INDEX + 2, 4);
    used.map_or(0, |used| used.load_u16(INDEX, Ordering::Acquire))
}

impl RemoteRing for BlkRing {
    type Fault = DeviceFault;

    #[inline]
    fn queue(&mut self, batch: &mut Batch<'_>, translate: impl FnMut(Segment) -> Option<u64>) -> bool {
        BlkRing::queue(self, batch, translate)
    }

    #[inline]
    fn poll(&mut self, done: &mut Done<'_>) -> Result<(), DeviceFault> {
        BlkRing::poll(self, done)
    }

    #[inline]
    fn in_flight(&self) -> impl Iterator<Item = usize> {
        BlkRing::in_flight(self)
    }

    fn take_in_flight(&mut self) -> impl Iterator<Item = Tag> {
        BlkRing::take_in_flight(self)
    }

    #[inline]
    fn arm(&mut self) -> bool {
        BlkRing::arm(self)
    }

    #[inline]
    fn disarm(&mut self) {
        BlkRing::disarm(self);
    }

    fn prefer_node(&self, node: u32) {
        BlkRing::prefer_node(self, node);
    }
}
