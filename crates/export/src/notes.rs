//! What a queue notes of the guest memory it writes, while the front-end wants to know. [vhost-user, Migration]
//!
//! Of data and status bytes it notes those it writes; of its ring, all parts that a device writes to, each time it may
//! have: a few pages, which are written all the time. Everything is noted after it is written, and before the front-end hears that
//! the queue has come to rest.

use std::sync::Arc;

use blkyard_mq::{Bio, Op, Segment};
use blkyard_virtio::{DirtyLog, GuestMemory};

/// Where a queue notes what it writes.
pub(crate) struct Notes {
    log: Arc<DirtyLog>,
    /// What we write of the ring: guest addresses and bytes. Nothing if nobody wants to know.
    ring: Vec<(u64, u64)>,
}

impl Notes {
    pub(crate) fn new(log: Arc<DirtyLog>, ring: Vec<(u64, u64)>) -> Notes {
        Notes { log, ring }
    }

    /// These bytes were written.
    pub(crate) fn segments(&self, memory: &GuestMemory, segments: &[Segment]) {
        segments.iter().for_each(|segment| self.log.mark_segment(memory, *segment));
    }

    /// A bio has ended, well or not: what it read may have been written in part.
    pub(crate) fn ended(&self, memory: &GuestMemory, bio: &Bio) {
        if bio.op == Op::Read {
            self.segments(memory, &bio.segments);
        }
    }

    /// Something was written to the ring.
    pub(crate) fn ring(&self) {
        self.ring.iter().for_each(|(guest_addr, bytes)| self.log.mark(*guest_addr, *bytes));
    }
}
