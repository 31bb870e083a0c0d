//! Memory of queues: rings, lists, data pages of admin commands and shadow doorbells, mapped for the controller.
//!
//! Each block is a separate region backed by a file, so it can be mapped by descriptor. It stays mapped until it is
//! dropped; its owner drops it only when the controller is silent.

use std::sync::Arc;

use blkyard_mem::{DmaMapping, Region, View};

use crate::host::{ControllerTransport, NvmeHostError, QueueRings};
use crate::{ListPool, PAGE};

/// A block of memory shared by host and controller.
#[derive(Debug)]
pub(crate) struct SharedBlock {
    region: Arc<Region>,
    /// Keeps the region mapped.
    _mapping: DmaMapping,
}

impl SharedBlock {
    /// A zeroed block of this size, rounded up to pages.
    pub(crate) fn new<T: ControllerTransport + ?Sized>(
        transport: &T,
        bytes: usize,
    ) -> Result<SharedBlock, NvmeHostError> {
        let bytes = bytes.next_multiple_of(PAGE as usize);
        let region = Region::shared(bytes).map_err(|_| NvmeHostError::Memory)?;
        let mapping = transport.dma_domain().map(vec![Arc::clone(&region)]);
        Ok(SharedBlock { region, _mapping: mapping })
    }

    /// Controller address of the block; unset until it is mapped.
    pub(crate) fn addr<T: ControllerTransport + ?Sized>(&self, transport: &T) -> Option<u64> {
        transport.dma_addr(&self.region, 0)
    }

    /// A part of the block.
    pub(crate) fn view(&self, offset: usize, len: usize) -> View {
        let view = View::new(Arc::clone(&self.region), offset as u64, len, PAGE as usize);
        view.expect("a part of a block of our own layout")
    }
}

/// Offsets of an I/O queue's parts in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IoQueueLayout {
    pub(crate) entries: u16,
    pub(crate) list_pages: u16,
    pub(crate) cq_at: usize,
    pub(crate) lists_at: usize,
    pub(crate) bytes: usize,
}

impl IoQueueLayout {
    pub(crate) fn new(entries: u16, list_pages: u16) -> IoQueueLayout {
        let page = PAGE as usize;
        let [sq_bytes, cq_bytes] = QueueRings::bytes(entries).map(|bytes| bytes.next_multiple_of(page));
        let lists_at = sq_bytes + cq_bytes;
        let bytes = lists_at + ListPool::bytes(entries - 1, list_pages);
        IoQueueLayout { entries, list_pages, cq_at: sq_bytes, lists_at, bytes }
    }

    pub(crate) fn rings(&self, block: &SharedBlock) -> QueueRings {
        let [sq_bytes, cq_bytes] = QueueRings::bytes(self.entries);
        QueueRings { sq: block.view(0, sq_bytes), cq: block.view(self.cq_at, cq_bytes), entries: self.entries }
    }

    /// Lists in a block at this controller address.
    pub(crate) fn lists(&self, block: &SharedBlock, addr: u64) -> ListPool {
        let view = block.view(self.lists_at, self.bytes - self.lists_at);
        ListPool::new(view, addr + self.lists_at as u64, self.entries - 1, self.list_pages)
    }
}
