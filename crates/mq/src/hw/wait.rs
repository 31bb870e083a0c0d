//! The causes for which a bio waits before the driver takes it, and the time spent on each.
//!
//! The latency of a bio begins with the first [`issue`](HwQueue::issue) after it was submitted, at the time of the
//! round that brought it, and ends when it completes. It has these parts:
//!
//! | part | time in which |
//! |---|---|
//! | [`Held::Limit`] | it waits, and a rate limit holds its namespace |
//! | [`Held::Tag`] | it waits, and no tag is free for its namespace |
//! | [`Held::Scheduler`] | it waits in its scheduler, which could dispatch and does not |
//! | [`Held::Dispatch`] | the driver has not taken its request, or handed it back, or the queue is quiesced |
//! | device | the driver has its request, or has completed it and it is not reaped yet |
//!
//! One cause at a time applies to all waiting bios of a namespace. So a namespace has a clock for each cause, which
//! advances while that cause applies. A bio records the clocks when it begins to wait, and the differences when it
//! gets its tag. That costs the same for any number of waiting bios.
//!
//! A bio that is one whole request and is taken by the driver in its round has not waited: nothing is written or
//! counted for it here, and its latency is the request's. The request of a bio that waited is [marked](Marks::HELD).
//!
//! Each bio that shares a request counts for itself, from its own start. A split bio is at the device from the start
//! of its first part to the end of its last. A bio that needs flushes is at the device while it waits for them, since
//! they wait for requests in flight. A bio in the ring of a shared queue starts when the queue's owner takes it from
//! there.

use super::HwQueue;
use super::namespace::Namespace;
use crate::Bio;
use crate::bio::Wait;
use crate::request::Marks;
use crate::stats::{Held, OpClass};

impl Namespace {
    /// Advances the clock of the cause for which the bios here have waited.
    pub(super) fn advance_clocks(&mut self, now_ns: u64) {
        if let Some(held) = self.held_by {
            self.clocks_ns[held as usize] += now_ns.saturating_sub(self.clocks_at_ns);
        }
        self.clocks_at_ns = now_ns;
    }

    /// Bios have come: they begin to wait.
    pub(super) fn begin_waits(&mut self, now_ns: u64) {
        let clocks_ns = &self.clocks_ns;
        // The newest are at the end, but for those with a reserved tag.
        for bio in self.bios.iter_mut().rev() {
            if self.fresh == 0 {
                return;
            }
            if bio.wait.since_ns == Wait::UNKNOWN {
                bio.wait.begin(now_ns, clocks_ns);
                self.fresh -= 1;
            }
        }
        for bio in self.flush.newest_pending() {
            if self.fresh == 0 {
                return;
            }
            if bio.wait.since_ns == Wait::UNKNOWN {
                bio.wait.begin(now_ns, &[0; 3]);
                self.fresh -= 1;
            }
        }
        self.fresh = 0;
    }
}

impl<D> HwQueue<D> {
    /// Notes the cause of each wait, after a round in which something is left waiting.
    pub(super) fn note_causes(&mut self) {
        for number in 0..self.namespaces.len() {
            let may_take = self.may_take(number, crate::BioFlags::empty());
            let quiesced = self.quiesced > 0;
            let namespace = &mut self.namespaces[number];
            namespace.held_by = match namespace.waiting() {
                0 => None,
                _ if namespace.rated.as_ref().is_some_and(super::rated::Rated::is_held) => Some(Held::Limit),
                _ if !may_take => Some(Held::Tag),
                _ if namespace.scheduled.is_some() && !quiesced => Some(Held::Scheduler),
                _ => None,
            };
        }
    }

    /// Requests are left that were offered to the driver or may not be: notes when their bios began to wait for it.
    #[inline(never)]
    pub(super) fn note_left(&mut self, now_ns: u64) {
        let HwQueue { dispatch, table, joined, .. } = self;
        let joined = std::mem::take(joined);
        let begin = |bio: &mut Bio| {
            if bio.wait.since_ns == Wait::UNKNOWN {
                bio.wait.begin(now_ns, &[0; 3]);
            }
        };
        for number in dispatch.newest_first() {
            let request = &mut table.requests[usize::from(number)];
            if request.has(Marks::FLUSH) {
                continue;
            }
            let is_noted = request.has(Marks::HELD);
            if is_noted && !joined {
                return;
            }
            request.mark(Marks::HELD);
            if let Some(bio) = &mut request.bio {
                if !is_noted {
                    // Created in this round, so it has not waited; the field may be of an earlier use.
                    bio.wait = Wait::default();
                }
                begin(bio);
            }
            table.each_behind(number, begin);
        }
    }

    /// A bio has ended that needed more than its data.
    pub(super) fn count_sequence(&self, bio: &Bio, now_ns: u64) {
        let held_ns = bio.wait.held_ns.iter().sum::<u64>();
        self.count_latency(bio, bio.wait.since_ns.saturating_add(held_ns).min(now_ns), now_ns);
    }

    /// Counts the latency of a bio whose request, or first part, was last dispatched at `start_ns`.
    pub(super) fn count_latency(&self, bio: &Bio, start_ns: u64, now_ns: u64) {
        if !self.config.stats {
            return;
        }
        let wait =
            if bio.wait.since_ns == Wait::UNKNOWN { Wait { since_ns: start_ns, held_ns: [0; 3] } } else { bio.wait };
        let [limit, scheduler, tag] = wait.held_ns;
        let waited_ns = start_ns.saturating_sub(wait.since_ns);
        let dispatch = waited_ns.saturating_sub(limit + scheduler + tag);
        let latency_ns = now_ns.saturating_sub(wait.since_ns);
        let stats = self.stats_of(bio.namespace, bio.submitter);
        stats.ended(OpClass::of(bio.op), latency_ns, [limit, scheduler, tag, dispatch]);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        BlockDevice, DeadlineConfig, DeviceInfo, HwQueueConfig, NullConfig, NullDevice, NullQueue, Op, SchedulerConfig,
    };

    /// A round that submits so many bios, none adjacent, and reaps completions.
    fn round(hw: &mut HwQueue<NullQueue>, bios: u64, now_ns: u64) {
        for number in 0..bios {
            let mut bio = Bio::with_capacity(1);
            (bio.op, bio.sector, bio.sectors) = (Op::Discard, number * 100, 8);
            hw.submit(bio);
        }
        hw.issue(&mut (), now_ns);
        hw.reap(&mut (), now_ns, &mut |_| ());
    }

    #[test]
    fn causes_are_noted_only_while_something_waits() {
        // As many as there are tags bypass this limit.
        let deadline = DeadlineConfig { async_depth: 4, ..DeadlineConfig::default() };
        for scheduler in [SchedulerConfig::None, SchedulerConfig::Deadline(deadline)] {
            let limits = crate::QueueLimits { discard_sectors_max: 8, ..crate::QueueLimits::default() };
            let info = DeviceInfo { capacity_sectors: 1 << 20, limits, ..DeviceInfo::default() };
            let config = HwQueueConfig { depth: 4, scheduler, ..HwQueueConfig::default() };
            let driver = NullDevice::new(info.clone(), NullConfig::default()).queue(config.depth);
            let mut hw = HwQueue::new(driver, Arc::new(info), config);
            // Applies to no bio, so it stays until causes are recorded.
            let untouched = Some(Held::Limit);
            hw.namespaces[0].held_by = untouched;
            (1..9).for_each(|now_ns| round(&mut hw, 4, now_ns));
            assert_eq!((hw.bios_held, hw.namespaces[0].held_by), (0, untouched), "{scheduler:?}");
            // More than there are tags.
            round(&mut hw, 5, 9);
            assert_eq!(hw.namespaces[0].held_by, Some(Held::Tag), "{scheduler:?}");
        }
    }
}
