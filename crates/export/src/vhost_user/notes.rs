//! A queue's log of written guest memory, while the front-end wants one. [vhost-user, Migration]
//!
//! Written data and status bytes are logged; of its ring all parts that a device writes to, each time: a few pages,
//! which are written all the time. Everything is logged after it is written, and before the front-end learns that the
//! queue has drained. A front-end may want an eventfd: it is signalled once for each round with new entries and once at
//! the end. Entries made when the lane goes to sleep are announced with the next round.

use std::cell::Cell;
use std::sync::Arc;

use blkyard_mq::{Bio, Op, Segment};
use blkyard_sys::EventFd;
use blkyard_virtio::{DirtyLog, GuestMemory};

/// A queue's access to the log.
pub(crate) struct Notes {
    log: Arc<DirtyLog>,
    /// Written parts of the ring: guest addresses and bytes. Empty without a log.
    ring: Vec<(u64, u64)>,
    /// Eventfd of the front-end, and whether a signal is due.
    eventfd: Option<Arc<EventFd>>,
    untold: Cell<bool>,
}

impl Notes {
    pub(crate) fn new(log: Arc<DirtyLog>, ring: Vec<(u64, u64)>, eventfd: Option<Arc<EventFd>>) -> Notes {
        Notes { log, ring, eventfd, untold: Cell::new(false) }
    }

    /// The eventfd, if entries were made since the last call.
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

    /// A bio has ended, with or without error: its buffer may have been written in part.
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
