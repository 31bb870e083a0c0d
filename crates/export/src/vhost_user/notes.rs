//! What a queue notes of the guest memory it writes, while the front-end wants to know. [vhost-user, Migration]
//!
//! Of data and status bytes it notes those it writes; of its ring, all parts that a device writes to, each time it may
//! have: a few pages, which are written all the time. Everything is noted after it is written, and before the front-end
//! hears that the queue has come to rest. A front-end may want to be told of it, by an eventfd: it is, once for each
//! round that notes something and once at the end. What a queue notes when its lane goes to sleep it is told of with
//! the next round.

use std::cell::Cell;
use std::sync::Arc;

use blkyard_mq::{Bio, Op, Segment};
use blkyard_sys::EventFd;
use blkyard_virtio::{DirtyLog, GuestMemory};

/// Where a queue notes what it writes.
pub(crate) struct Notes {
    log: Arc<DirtyLog>,
    /// What we write of the ring: guest addresses and bytes. Nothing if nobody wants to know.
    ring: Vec<(u64, u64)>,
    /// What the front-end is told by, and whether there is something to tell.
    eventfd: Option<Arc<EventFd>>,
    untold: Cell<bool>,
}

impl Notes {
    pub(crate) fn new(log: Arc<DirtyLog>, ring: Vec<(u64, u64)>, eventfd: Option<Arc<EventFd>>) -> Notes {
        Notes { log, ring, eventfd, untold: Cell::new(false) }
    }

    /// The eventfd that is to be rung, since something was noted after it was last asked for.
    pub(crate) fn untold(&self) -> Option<&EventFd> {
        self.eventfd.as_deref().filter(|_| self.untold.take())
    }

    /// These bytes were written.
    pub(crate) fn segments(&self, memory: &GuestMemory, segments: &[Segment]) {
        segments.iter().for_each(|segment| self.log.mark_segment(memory, *segment));
        self.untold.set(true);
    }

    /// So many bytes were written to the first of these segments and those behind it.
    pub(crate) fn first_bytes(&self, memory: &GuestMemory, segments: &[Segment], mut bytes: u32) {
        for segment in segments {
            let len = segment.len.min(bytes);
            self.log.mark_segment(memory, Segment { len, ..*segment });
            bytes -= len;
        }
        self.untold.set(true);
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
        self.untold.set(self.untold.get() || !self.ring.is_empty());
    }
}
