//! Negotiation of the number of I/O queues.
//!
//! The rules are those of Linux's driver. The bounds, in order: the request, the controller's grant (Set Features 07h),
//! the doorbells of the transport, the interrupt vectors. The result is split into polled queues, read queues and
//! default queues; default queues come first in the numbering, then read queues, then polled queues.

use blkyard_mq::QueueCounts;

/// A host's request for I/O queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueDemand {
    /// Number of submitting threads or CPUs.
    pub submitters: u16,
    /// Number of separate queues for everything except reads; zero if reads share them.
    pub write_queues: u16,
    /// Number of polled queues.
    pub poll_queues: u16,
}

impl QueueDemand {
    /// Number of queues to request; at least one.
    pub fn total(self) -> u16 {
        self.submitters.saturating_add(self.write_queues).saturating_add(self.poll_queues).clamp(1, u16::MAX - 1)
    }
}

/// Dword 11 of Set Features 07h for this number of queues of each kind, at least one.
pub fn queues_dword(queues: u16) -> u32 {
    let count = u32::from(queues.saturating_sub(1));
    count | count << 16
}

/// Number of granted queues from the result of Set Features 07h, at most the requested number.
pub fn granted(result: u64, asked: u16) -> u16 {
    let [submission, completion] = [result & 0xffff, result >> 16 & 0xffff].map(|count| count + 1);
    u16::try_from(submission.min(completion)).unwrap_or(u16::MAX).min(asked)
}

/// Number of I/O queues whose doorbells fit this number of register bytes, besides those of the admin queue. `stride`
/// is CAP.DSTRD.
pub fn doorbell_queues(doorbell_bytes: usize, stride: u8) -> u16 {
    let pairs = doorbell_bytes / (8 << stride);
    u16::try_from(pairs.saturating_sub(1)).unwrap_or(u16::MAX)
}

/// Splits granted queues by kind. `vectors` counts all interrupt vectors, including the admin queue's; with 0 every
/// queue is polled. `None` if no queues were granted.
pub fn split(granted: u16, vectors: u16, demand: QueueDemand) -> Option<QueueCounts> {
    if granted == 0 {
        return None;
    }
    let poll = demand.poll_queues.min(granted - 1);
    let rest = granted - poll;
    // One vector belongs to the admin queue. A single vector serves both.
    let interrupt = if vectors == 0 { rest } else { rest.min((vectors - 1).max(1)) };
    let write = demand.write_queues;
    let read = match interrupt {
        0 | 1 => 0,
        _ if write == 0 => 0,
        _ if write >= interrupt => 1,
        _ => interrupt - write,
    };
    let [default, read, poll] = [interrupt - read, read, poll].map(usize::from);
    Some(QueueCounts { default, read, poll })
}

/// The interrupt vector of an I/O queue, from zero; unset for a polled queue.
pub fn vector(queue: u16, vectors: u16, counts: QueueCounts) -> Option<u16> {
    if vectors == 0 || usize::from(queue) >= counts.default + counts.read {
        return None;
    }
    Some(if vectors == 1 { 0 } else { queue + 1 })
}

/// Entries of each ring of an I/O queue: the requested number, limited by the controller (CAP.MQES) and by the slots of
/// a cid, and at least two. One entry always stays free.
pub fn ring_entries(queue_entries_max: u32, wanted: u16) -> u16 {
    /// Slots fit the twelve bits of a cid, as in Linux.
    const ENTRIES_MAX: u16 = 4095;
    let entries = u32::from(wanted.clamp(2, ENTRIES_MAX)).min(queue_entries_max);
    u16::try_from(entries).unwrap_or(ENTRIES_MAX).max(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(submitters: u16, write_queues: u16, poll_queues: u16) -> QueueDemand {
        QueueDemand { submitters, write_queues, poll_queues }
    }

    fn counts(granted: u16, vectors: u16, demand: QueueDemand) -> [usize; 3] {
        split(granted, vectors, demand).map_or([0; 3], |counts| [counts.default, counts.read, counts.poll])
    }

    #[test]
    fn a_queue_for_each_submitter_and_kind_is_asked_for() {
        assert_eq!(demand(4, 0, 0).total(), 4);
        assert_eq!(demand(4, 2, 3).total(), 9);
        assert_eq!(demand(0, 0, 0).total(), 1);
        assert_eq!(demand(u16::MAX, 1, 1).total(), u16::MAX - 1);
    }

    #[test]
    fn the_feature_counts_from_zero() {
        assert_eq!(queues_dword(1), 0);
        assert_eq!(queues_dword(9), 8 | 8 << 16);
        assert_eq!(queues_dword(0), 0);
    }

    #[test]
    fn the_smaller_grant_counts_and_never_more_than_was_asked() {
        for (result, asked, queues) in [
            (7 | 7 << 16, 8, 8),
            (7 | 3 << 16, 8, 4),
            (3 | 7 << 16, 8, 4),
            (63 | 63 << 16, 8, 8),
            (0, 8, 1),
            (0xffff_ffff, 8, 8),
            (0xffff_ffff, u16::MAX - 1, u16::MAX - 1),
        ] {
            assert_eq!(granted(result, asked), queues, "{result:#x}");
        }
    }

    #[test]
    fn doorbells_bound_the_queues() {
        for (bytes, stride, queues) in [
            (0, 0, 0),
            (8, 0, 0),
            (15, 0, 0),
            (16, 0, 1),
            (4096, 0, 511),
            (4096, 2, 127),
            (4096, 9, 0),
            (1 << 20, 0, 65535),
        ] {
            assert_eq!(doorbell_queues(bytes, stride), queues, "{bytes} bytes, stride {stride}");
        }
    }

    /// Rows: granted, vectors, write queues, polled queues; default, read, poll.
    #[test]
    fn queues_are_split_by_kind() {
        for (given, want) in [
            // None granted: admin queue only.
            ((0, 9, 0, 0), [0, 0, 0]),
            // No write queues: reads and writes share.
            ((8, 9, 0, 0), [8, 0, 0]),
            // One queue, for any request.
            ((1, 9, 4, 0), [1, 0, 0]),
            // At least as many write queues as granted queues: one for reads.
            ((8, 9, 8, 0), [7, 1, 0]),
            ((8, 9, 20, 0), [7, 1, 0]),
            // Otherwise the rest is for reads.
            ((8, 9, 2, 0), [2, 6, 0]),
            ((2, 9, 1, 0), [1, 1, 0]),
            // At least one queue is not polled.
            ((8, 9, 0, 2), [6, 0, 2]),
            ((4, 9, 0, 4), [1, 0, 3]),
            ((1, 9, 0, 4), [1, 0, 0]),
            ((8, 9, 2, 2), [2, 4, 2]),
            // Vectors bound the queues that are not polled; one vector is the admin queue's.
            ((8, 4, 0, 0), [3, 0, 0]),
            ((8, 4, 0, 2), [3, 0, 2]),
            ((8, 4, 1, 2), [1, 2, 2]),
            ((8, 2, 0, 0), [1, 0, 0]),
            // A single vector serves the admin queue and one other.
            ((8, 1, 3, 0), [1, 0, 0]),
            // Without vectors all queues are polled, and vectors are no bound.
            ((8, 0, 0, 0), [8, 0, 0]),
            ((8, 0, 2, 3), [2, 3, 3]),
        ] {
            let (granted, vectors, write, poll) = given;
            assert_eq!(counts(granted, vectors, demand(8, write, poll)), want, "{given:?}");
        }
    }

    #[test]
    fn each_interrupt_queue_has_a_vector() {
        let counts = QueueCounts { default: 2, read: 1, poll: 1 };
        let vectors = |all| [0, 1, 2, 3].map(|queue| vector(queue, all, counts));
        assert_eq!(vectors(4), [Some(1), Some(2), Some(3), None]);
        assert_eq!(vectors(0), [None; 4]);
        assert_eq!(vector(0, 1, QueueCounts::only(1)), Some(0), "shared with the admin queue");
    }

    #[test]
    fn rings_are_as_long_as_both_sides_can() {
        for (max, wanted, entries) in
            [(1024, 1024, 1024), (64, 1024, 64), (1 << 16, 5000, 4095), (2, 1024, 2), (1024, 0, 2), (1024, 1, 2)]
        {
            assert_eq!(ring_entries(max, wanted), entries);
        }
    }
}
