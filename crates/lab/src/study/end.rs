//! A job's end of its queue: the interface of every mode, to be run in virtual time and measured in real time.

use blkyard_mq::{Bio, HwQueueConfig, Op, SECTOR_SHIFT, Segment};
use blkyard_sim::Rng;

/// Size of the model disk. No data is stored, so it is only a range for random positions.
pub(crate) const CAPACITY_SECTORS: u64 = 1 << 31;
/// The post's block.
pub(crate) const IO_BYTES: u32 = 4096;
const IO_SECTORS: u32 = IO_BYTES >> SECTOR_SHIFT;

/// Result of one step, which determines its charge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Completions taken off the device.
    pub(crate) reaped: usize,
    /// Of these, put into the boxes of other jobs.
    pub(crate) delivered: usize,
    /// Taken out of our own box.
    pub(crate) mailed: usize,
    /// Bios submitted towards the device.
    pub(crate) submitted: usize,
    /// Bios put on a list to wait, since there were no ids.
    pub(crate) listed: usize,
    /// Bios taken off that list and passed on.
    pub(crate) resubmitted: usize,
}

/// A job's end of the queue it uses.
pub(crate) trait JobEnd {
    /// Bios that one call of [`JobEnd::submit`] may get: one, if each writes the doorbell by itself.
    const BATCH: usize;
    /// Whether everything happens under a lock of the queue.
    const LOCKED: bool;

    /// Submits bios of this job and tells the device.
    fn submit(&mut self, bios: &mut Vec<Box<Bio>>, now_ns: u64) -> Moved;

    /// Takes completions, for this job and, where the queue is shared, on behalf of others.
    fn collect(&mut self, now_ns: u64, out: &mut Vec<Box<Bio>>) -> Moved;
}

/// Fills in a bio, the job's own work for each I/O: a 4 KiB write at a random position. Its cookie stays.
#[inline]
pub(crate) fn fill(bio: &mut Bio, slot: usize, rng: &mut Rng) {
    bio.reset();
    bio.op = Op::Write;
    bio.sector = rng.below(CAPACITY_SECTORS / u64::from(IO_SECTORS)) * u64::from(IO_SECTORS);
    bio.sectors = IO_SECTORS;
    bio.segments.push(Segment { region: 0, offset: slot as u64 * u64::from(IO_BYTES), len: IO_BYTES });
}

/// A hardware queue for `bios` bios over a device that takes `ids` commands.
pub(crate) fn config(ids: usize, bios: usize) -> HwQueueConfig {
    HwQueueConfig { depth: ids, bios_max: bios, ..HwQueueConfig::default() }
}
