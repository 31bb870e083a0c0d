//! A queue's log of written guest memory, while the front-end requests one. [vhost-user, Migration]
//!
//! Data and status bytes are logged, and in each round all device-written parts of the ring: a few pages that are
//! written continuously. An entry is made after its write, and before the front-end learns that the queue has drained.
//! If the front-end sets an eventfd, it is signalled once for each round with new entries and once at the end. Entries
//! made when the lane goes to sleep are announced in the next round.

use std::cell::Cell;
use std::sync::Arc;

use blkyard_mq::{Bio, Op, Segment};
use blkyard_sys::EventFd;
use blkyard_virtio::{DirtyLog, GuestMemory};

/// A queue's access to the log.
pub(crate) struct Notes {
    log: Arc<DirtyLog>,
    /// Written parts of the ring: guest addresses and lengths, bytes. Empty without a log.
    ring: Vec<(u64, u64)>,
    /// Eventfd of the front-end, and whether a signal is due.
    eventfd: Option<Arc<EventFd>>,
    untold: Cell<bool>,
}

impl Notes {
    pub(crate) fn new(log: Arc<DirtyLog>, ring: Vec<(u64, u64)>, eventfd: Option<Arc<EventFd>>) -> Notes {
        Notes { log, ring, eventfd, untold: Cell::new(false) }
    }

    /// The eventfd, if entries were added since the last call.
    pub(crate) fn untold(&self) -> Option<&EventFd> {
        self.eventfd.as_deref().filter(|_| self.untold.take())
    }

    /// Logs these bytes as written.
    pub(crate) fn segments(&self, memory: &GuestMemory, segments: &[Segment]) {
        segments.iter().for_each(|segment| self.log.mark_segment(memory, *segment));
        self.untold.set(true);
    }

    /// Logs this number of bytes, written to these segments from the first on.
    pub(crate) fn first_bytes(&self, memory: &GuestMemory, segments: &[Segment], mut bytes: u32) {
        for segment in segments {
            let len = segment.len.min(bytes);
            self.log.mark_segment(memory, Segment { len, ..*segment });
            bytes -= len;
        }
        self.untold.set(true);
    }

    /// Logs the buffer of a completed bio. A failed bio may have written a part of it.
    pub(crate) fn ended(&self, memory: &GuestMemory, bio: &Bio) {
        if bio.op == Op::Read {
            self.segments(memory, &bio.segments);
        }
    }

    /// Logs a write to the ring.
    pub(crate) fn ring(&self) {
        self.ring.iter().for_each(|(guest_addr, bytes)| self.log.mark(*guest_addr, *bytes));
        self.untold.set(self.untold.get() || !self.ring.is_empty());
    }
}
