//! The bio: one I/O that a submitter wants done by a block device.

use blkyard_mem::Segment;

use crate::{SECTOR_SHIFT, Status};

/// What is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Device to memory.
    #[default]
    Read,
    /// Memory to device.
    Write,
    /// Make durable what has completed.
    Flush,
    /// The contents of a range no longer matter.
    Discard,
    /// A range reads as zeroes from now on.
    WriteZeroes,
}

impl Op {
    /// Whether the operation carries data in segments.
    #[inline]
    pub fn has_data(self) -> bool {
        matches!(self, Op::Read | Op::Write)
    }

    /// Whether the operation changes what the device holds; a read-only device refuses it.
    #[inline]
    pub fn is_write(self) -> bool {
        matches!(self, Op::Write | Op::Discard | Op::WriteZeroes)
    }
}

bitflags::bitflags! {
    /// How it is wanted.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct BioFlags: u8 {
        /// The write is durable when it completes.
        const FUA = 1;
        /// Zeroed blocks stay allocated.
        const NO_UNMAP = 2;
        /// What has completed before is durable before this begins.
        const PREFLUSH = 4;
        /// Rather comes back with [`Status::Again`] than wait for a tag or a thaw.
        const NOWAIT = 8;
        /// Is done as one request or not at all.
        const ATOMIC = 16;
        /// Its submitter polls for it.
        const POLLED = 32;
        /// Stays a request of its own.
        const NO_MERGE = 64;
        /// Takes a reserved tag, and so gets through when all others are out.
        const RESERVED = 128;
    }
}

/// How urgent a bio is beside others: the I/O priority classes of Linux.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Priority {
    /// Before all others.
    Realtime,
    /// As most.
    #[default]
    BestEffort,
    /// When nobody else wants anything.
    Idle,
}

impl Priority {
    /// All, the most urgent first.
    pub const ALL: [Priority; 3] = [Priority::Realtime, Priority::BestEffort, Priority::Idle];
}

bitflags::bitflags! {
    /// Steps of a flush sequence: see `hw/flush.rs`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(crate) struct FlushSteps: u8 {
        const PREFLUSH = 1;
        const DATA = 2;
        const POSTFLUSH = 4;
    }
}

/// A request for I/O on a contiguous range of sectors, and later its outcome.
///
/// A bio is made once, by the submitter, and goes round: filled in, submitted, given back with its status, filled in
/// again. The list of segments keeps its capacity, so that the round allocates nothing.
// In this order, so that what is looked at together is read at once.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Bio {
    /// What is wanted.
    pub op: Op,
    /// How.
    pub flags: BioFlags,
    /// Which namespace of the hardware queue it is for; zero where there is one.
    pub namespace: u16,
    /// Sectors of 512 bytes, whatever the logical block. For operations with data this is the sum of the segments.
    pub sectors: u32,
    /// First sector.
    pub sector: u64,
    /// The submitter's own word; comes back untouched.
    pub cookie: u64,
    /// Where the data is, in order. Empty for operations without data.
    pub segments: Vec<Segment>,
    /// Index of its submitter, where a hardware queue has several: the thread of a shared queue, or whose counters
    /// count it (see [`HwQueue::set_stats`](crate::HwQueue::set_stats)).
    pub submitter: u16,
    /// What became of it, once it is given back.
    pub status: Status,
    /// What of its flush sequence is still to come.
    pub(crate) steps: FlushSteps,
    /// Who submits: a thread, a connection, a guest's queue. Zero if nobody says; a shared queue then says which
    /// thread. Whoever schedules by it treats equal numbers as one.
    pub stream: u32,
    /// How long it waited for its turn, microseconds; the largest number for anything longer. Kept by schedulers that
    /// need it.
    pub(crate) waited_us: u32,
    /// Which scheduler has handed it out, while it is on its way; zero for none. See `hw/scheduled.rs`.
    pub(crate) ticket: u16,
    /// How urgent it is beside others.
    pub priority: Priority,
    /// Whether somebody waits for it, although it is a write: see [`Bio::is_sync`].
    pub sync: bool,
    /// Its waiting before the driver took it. Not written for a bio that does not wait: see `hw/wait.rs`.
    pub(crate) wait: Wait,
}

const _: () = assert!(std::mem::offset_of!(Bio, wait) == 64, "a bio that does not wait is one line of cache");

/// When a bio came, and how long it waited for what. Times in nanoseconds.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Wait {
    /// Time of the first issue after it was submitted; [`Wait::UNKNOWN`] before that.
    pub(crate) since_ns: u64,
    /// While it waits for a tag, its namespace's clocks when that began; afterwards what they went on by.
    pub(crate) held_ns: [u64; 3],
}

impl Wait {
    /// No time.
    pub(crate) const UNKNOWN: u64 = u64::MAX;

    /// It has just been seen, and waits while these clocks go on.
    #[inline]
    pub(crate) fn begin(&mut self, now_ns: u64, clocks_ns: &[u64; 3]) {
        *self = Wait { since_ns: now_ns, held_ns: *clocks_ns };
    }

    /// Turns what the clocks showed when it began to wait into what it has waited, and back.
    #[inline]
    pub(crate) fn toggle(&mut self, clocks_ns: &[u64; 3]) {
        if self.since_ns != Wait::UNKNOWN {
            self.held_ns.iter_mut().zip(clocks_ns).for_each(|(held, clock)| *held = clock.wrapping_sub(*held));
        }
    }
}

impl Default for Wait {
    fn default() -> Wait {
        Wait { since_ns: Wait::UNKNOWN, held_ns: [0; 3] }
    }
}

impl Bio {
    /// A bio with room for this many segments.
    pub fn with_capacity(segments: usize) -> Box<Bio> {
        Box::new(Bio { segments: Vec::with_capacity(segments), ..Bio::default() })
    }

    /// Forgets the last round; the capacity stays, and so does what is said about the submitter: stream, priority and
    /// whether it waits for its writes.
    #[inline]
    pub fn reset(&mut self) {
        self.flags = BioFlags::empty();
        self.status = Status::Ok;
        self.namespace = 0;
        self.sectors = 0;
        self.sector = 0;
        self.segments.clear();
    }

    /// Whether somebody waits for it: for what is read, for what is to be durable at once, and for a write that says
    /// so.
    #[inline]
    pub fn is_sync(&self) -> bool {
        self.sync || self.op == Op::Read || self.flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH)
    }

    /// The sector behind its last.
    #[inline]
    pub fn end(&self) -> u64 {
        self.sector + u64::from(self.sectors)
    }

    /// Bytes of the range.
    #[inline]
    pub fn bytes(&self) -> u64 {
        u64::from(self.sectors) << SECTOR_SHIFT
    }

    /// Bytes that it moves. What is discarded or zeroed moves none.
    #[inline]
    pub fn moves_bytes(&self) -> u64 {
        if self.op.has_data() { self.bytes() } else { 0 }
    }
}
