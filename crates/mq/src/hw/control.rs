//! Changes of a running queue: memory, size, limits, depth; blocking bios (freeze) or requests (quiesce).
//!
//! | | bios enter | requests reach the driver | what is inside |
//! |---|---|---|---|
//! | frozen | no: there is no room | yes | drains; when the queue is [idle](HwQueue::is_idle) it is empty |
//! | quiesced | yes | no | waits; requests at the driver still complete |
//!
//! Both nest. A queue has one owner, so the call that quiesces it proves that no driver call runs. A queue that is
//! frozen and quiesced does not drain: unquiesce it before waiting for it to drain.

use std::sync::Arc;

use blkyard_mem::RegionTable;

use super::HwQueue;
use crate::BudgetShare;
use crate::driver::{DeviceInfo, Driver, Shortage};
use crate::stats::HwStats;

/// Delay before a retry after a shortage without notification, as in Linux (`BLK_MQ_RESOURCE_DELAY`).
const RETRY_NS: u64 = 3_000_000;
/// `dispatch_busy` of Linux: weight of the past, and of a round that left requests.
const BUSY_WEIGHT: u32 = 8;
const BUSY_FACTOR: u32 = 16;

/// How busy a queue is after a round that left something or did not, in whole numbers as Linux has it
/// (`blk_mq_update_dispatch_busy`).
fn busy_after(busy: u32, left: bool) -> u32 {
    (busy * (BUSY_WEIGHT - 1) + if left { BUSY_FACTOR } else { 0 }) / BUSY_WEIGHT
}

impl<D> HwQueue<D> {
    /// Replaces the memory that segments point into, and lets the driver prepare for it. Registered buffers in regions
    /// that stay are kept.
    ///
    /// # Panics
    /// If the queue is not [idle](HwQueue::is_idle): memory in use must stay.
    pub fn set_memory<Cx: ?Sized>(&mut self, cx: &mut Cx, mut memory: Arc<RegionTable>)
    where
        D: Driver<Cx>,
    {
        assert!(self.is_idle(), "memory was replaced under I/O in flight");
        self.driver.set_memory(cx, &memory);
        self.keep_buffers(cx, &mut memory);
        self.memory = memory;
    }

    /// Replaces the memory that segments point into, with bios in the queue: the regions that they name have the same
    /// numbers in both. For a queue without registered buffers.
    pub fn change_memory<Cx: ?Sized>(&mut self, cx: &mut Cx, memory: Arc<RegionTable>)
    where
        D: Driver<Cx>,
    {
        debug_assert!(self.memory.buffers().next().is_none() && self.absent.is_empty(), "buffers would be lost");
        self.memory = memory;
        self.driver.change_memory(cx, &self.memory);
    }

    /// Replaces the properties of a namespace: size, limits, caches. An unknown namespace stays unknown.
    ///
    /// # Panics
    /// If the queue is not [idle](HwQueue::is_idle): waiting bios were checked against the old limits.
    pub fn set_info(&mut self, namespace: u16, info: Arc<DeviceInfo>) {
        assert!(self.is_idle(), "limits were replaced under I/O in flight");
        let number = usize::from(namespace);
        if let Some(namespace) = self.namespaces.get_mut(number) {
            self.table.set_limits(number, &info.limits);
            namespace.set_info(info);
        }
        self.choose_plain();
    }

    /// Limits the requests in flight to `depth`, reserved ones included: at least one that is not reserved, at most as
    /// many as the queue was made with. Returns the new depth. Excess tags return as their requests complete. The owner
    /// runs the queue afterwards, for waiting bios that have more tags now.
    pub fn set_depth(&mut self, depth: usize) -> usize {
        let depth = self.tags.set_limit(depth);
        self.namespaces.iter_mut().filter_map(|of| of.scheduled.as_mut()).for_each(|of| of.set_depth(depth));
        self.reshare();
        depth
    }

    /// Continues with these counters. `of_namespaces`, one for each, count the I/O of submitters without counters of
    /// their own, and the first of them queue-wide events. Other I/O is counted in `of_submitters`: one for each
    /// namespace, of submitter after submitter ([`Bio::submitter`](crate::Bio::submitter)).
    ///
    /// # Panics
    /// If a namespace has no counters.
    pub fn set_stats(&mut self, of_namespaces: &[Arc<HwStats>], of_submitters: Vec<Arc<HwStats>>) {
        assert_eq!(of_namespaces.len(), self.namespaces.len(), "counters for each namespace");
        for (namespace, stats) in self.namespaces.iter_mut().zip(of_namespaces) {
            let was = std::mem::replace(&mut namespace.stats, Arc::clone(stats));
            if !Arc::ptr_eq(&was, stats) {
                // A gauge, set again by the next scan for slow requests.
                was.set_slow_now(0);
            }
        }
        self.counted = self.config.stats.then(|| Arc::clone(&of_namespaces[0]));
        self.submitters = if self.config.stats { of_submitters } else { Vec::new() };
    }

    /// Limits the bytes that a driver working in the lane's thread copies in one turn, when it takes requests and again
    /// when it returns them: to this number, and one more request. The rest follows in later turns.
    ///
    /// # Panics
    /// If it is 0: no request would ever be done.
    pub fn set_turn_bytes(&mut self, bytes: u64) {
        assert!(bytes > 0, "a turn without bytes");
        self.turn_bytes = bytes;
    }

    /// Has each request take a slot from a budget, beside its tag, before it is offered to the driver. The thread that
    /// runs this queue is woken when the budget has slots for it.
    ///
    /// # Panics
    /// If the queue is not [idle](HwQueue::is_idle): requests at the driver have taken no slot.
    pub fn set_budget(&mut self, budget: Option<BudgetShare>) {
        assert!(self.is_idle(), "a budget was set under I/O in flight");
        self.budget = budget;
        self.slow_path = true;
    }

    /// Accepts no bios, until it is [thawed](HwQueue::thaw) as often. Accepted bios drain.
    pub fn freeze(&mut self) {
        self.frozen += 1;
        self.bios_max = 0;
        // Bios in the queue are to drain.
        self.release();
    }

    /// Undoes one [`HwQueue::freeze`].
    ///
    /// # Panics
    /// If the queue is not frozen.
    pub fn thaw(&mut self) {
        assert!(self.frozen > 0, "a queue was thawed that is not frozen");
        self.frozen -= 1;
        if self.frozen == 0 {
            self.bios_max = self.config.bios_max;
        }
    }

    /// Issues no requests, until it is [unquiesced](HwQueue::unquiesce) as often. Bios still enter, as long as there is
    /// room, and requests at the driver still complete.
    pub fn quiesce(&mut self) {
        self.quiesced += 1;
        self.slow_path = true;
    }

    /// Undoes one [`HwQueue::quiesce`]. The owner runs the queue afterwards, for the waiting bios.
    ///
    /// # Panics
    /// If the queue is not quiesced.
    pub fn unquiesce(&mut self) {
        assert!(self.quiesced > 0, "a queue was let run that is not quiesced");
        self.quiesced -= 1;
    }

    /// The driver has left requests, or might have, or has lately: when they are offered again is decided here. Not all
    /// were offered to it if there is a budget; `refused` are those that were.
    #[inline(never)]
    pub(super) fn settle(&mut self, shortage: Shortage, refused: usize, now_ns: u64) {
        if let Some(budget) = &mut self.budget {
            if refused > 0 {
                // The driver is the cause: more slots would only be granted to us and refused again.
                budget.take(0);
            }
            budget.give(refused);
        }
        let left = !self.dispatch.is_empty();
        if left {
            self.note_left(now_ns);
        }
        let busy = busy_after(self.busy, left);
        if (std::mem::replace(&mut self.busy, busy) > 0) != (busy > 0) {
            self.choose_plain();
        }
        self.again = left && shortage == Shortage::Lane;
        // With no completion to come, no other event would restart this queue.
        let on_its_way = self.in_flight() > 0 || !self.done.is_empty();
        self.retry_ns = match shortage {
            _ if !left => None,
            Shortage::Lane => None,
            // Woken when slots are granted. If the driver refused those it had, a wake-up does not help.
            _ if refused == 0 && self.budget.as_ref().is_some_and(BudgetShare::is_waiting) => None,
            Shortage::Device if on_its_way => None,
            Shortage::Device | Shortage::System => Some(now_ns + RETRY_NS),
        };
        let shared = self.namespaces.len() > 1 || self.budget.is_some();
        let held_back = self.quiesced > 0 || self.retry_ns.is_some();
        self.slow_path = shared || held_back || self.again || self.busy > 0 || !self.draining.is_empty();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_fades_within_a_dozen_rounds_and_grows_to_nine() {
        let steps = |busy, left| std::iter::successors(Some(busy), move |busy| Some(busy_after(*busy, left))).skip(1);
        assert_eq!(steps(16, false).take(13).collect::<Vec<_>>(), [14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]);
        assert_eq!((steps(0, true).nth(100), steps(16, true).nth(100)), (Some(9), Some(16)));
    }
}
