//! The bio: one I/O that a submitter wants done by a block device.

use blkyard_mem::Segment;

use crate::{SECTOR_SHIFT, Status};

/// Operation of a bio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Device to memory.
    #[default]
    Read,
    /// Memory to device.
    Write,
    /// Makes all completed writes durable.
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

    /// Whether the operation changes the medium; a read-only device refuses it.
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
        /// All earlier completions are durable before this operation begins.
        const PREFLUSH = 4;
        /// Rather comes back with [`Status::Again`] than wait for a tag or a thaw.
        const NOWAIT = 8;
        /// Is done as one request or not at all.
        const ATOMIC = 16;
        /// Its submitter polls for it.
        const POLLED = 32;
        /// Is not merged with other bios.
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
    /// Served when no other class has I/O.
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
        /// Not a step: its data has a request.
        const DISPATCHED = 8;
    }
}

/// A request for I/O on a contiguous range of sectors, and later its status.
///
/// The submitter allocates a bio once and reuses it: filled in, submitted, returned with its status, filled in again.
/// The list of segments keeps its capacity, so reuse allocates nothing.
// In this order, so that fields used together share a cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Bio {
    /// Operation.
    pub op: Op,
    /// How.
    pub flags: BioFlags,
    /// Which namespace of the hardware queue it is for; zero where there is one.
    pub namespace: u16,
    /// Number of 512-byte sectors, for any logical block size. For operations with data this is the sum of the
    /// segments.
    pub sectors: u32,
    /// First sector.
    pub sector: u64,
    /// The submitter's own word; comes back untouched.
    pub cookie: u64,
    /// Where the data is, in order. Empty for operations without data.
    pub segments: Vec<Segment>,
    /// Index of the submitter, where a hardware queue has several: the thread of a shared queue, or the owner of
    /// separate counters (see [`HwQueue::set_stats`](crate::HwQueue::set_stats)).
    pub submitter: u16,
    /// Status, once the bio is returned.
    pub status: Status,
    /// Steps of its flush sequence that are still to come.
    pub(crate) steps: FlushSteps,
    /// Submitter, for schedulers: a thread, a job. Equal numbers are one stream. Zero if unknown, as behind a guest's
    /// kernel: `fair` then recognises sequences. A shared queue sets the number of the thread in its place, until the
    /// bio is returned.
    pub stream: u32,
    /// Kept by the scheduler that dispatched it.
    pub(crate) scheduler_word: u32,
    /// Generation of the scheduler that dispatched it, while it is in flight; zero for none. See `hw/scheduled.rs`.
    pub(crate) ticket: u16,
    /// How urgent it is beside others.
    pub priority: Priority,
    /// Whether a write is synchronous: see [`Bio::is_sync`].
    pub sync: bool,
    /// Its waiting before the driver took it. Not written for a bio that does not wait: see `hw/wait.rs`.
    pub(crate) wait: Wait,
}

const _: () = assert!(std::mem::offset_of!(Bio, wait) == 64, "a bio that does not wait is one line of cache");

/// Time of arrival, and time held by each cause. In ns.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Wait {
    /// Time of the first issue after it was submitted; [`Wait::UNKNOWN`] before that.
    pub(crate) since_ns: u64,
    /// While it waits for a tag: its namespace's clocks when the wait began. Afterwards: their advance.
    pub(crate) held_ns: [u64; 3],
}

impl Wait {
    /// No time.
    pub(crate) const UNKNOWN: u64 = u64::MAX;

    /// It has arrived, and waits while these clocks advance.
    #[inline]
    pub(crate) fn begin(&mut self, now_ns: u64, clocks_ns: &[u64; 3]) {
        *self = Wait { since_ns: now_ns, held_ns: *clocks_ns };
    }

    /// Converts between the clocks at the beginning of the wait and the time waited.
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

    /// Resets the bio for the next use. The capacity stays, and so do the submitter's settings: stream, priority, sync.
    #[inline]
    pub fn reset(&mut self) {
        self.flags = BioFlags::empty();
        self.status = Status::Ok;
        self.namespace = 0;
        self.sectors = 0;
        self.sector = 0;
        self.segments.clear();
    }

    /// Whether its submitter waits for it: reads, FUA writes, and writes marked as synchronous.
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

    /// Bytes of data. Discards and zeroes have none.
    #[inline]
    pub fn moves_bytes(&self) -> u64 {
        if self.op.has_data() { self.bytes() } else { 0 }
    }
}
