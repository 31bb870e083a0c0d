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

/// How long after the driver found itself short of something that nobody will tell of the queue tries again, as in
/// Linux (`BLK_MQ_RESOURCE_DELAY`).
const RETRY_NS: u64 = 3_000_000;
/// `dispatch_busy` of Linux: weight of the past, and what a round that left something counts.
const BUSY_WEIGHT: u32 = 8;
const BUSY_FACTOR: u32 = 16;

/// How busy a queue is after a round that left something or did not, in whole numbers as Linux has it
/// (`blk_mq_update_dispatch_busy`).
fn busy_after(busy: u32, left: bool) -> u32 {
    (busy * (BUSY_WEIGHT - 1) + if left { BUSY_FACTOR } else { 0 }) / BUSY_WEIGHT
}

impl<D> HwQueue<D> {
    /// Replaces the memory that segments point into, and lets the driver prepare for it.
    ///
    /// # Panics
    /// If the queue is not [idle](HwQueue::is_idle): memory in use must stay.
    pub fn set_memory<Cx: ?Sized>(&mut self, cx: &mut Cx, memory: Arc<RegionTable>)
    where
        D: Driver<Cx>,
    {
        assert!(self.is_idle(), "memory was replaced under I/O in flight");
        self.driver.set_memory(cx, &memory);
        self.memory = memory;
    }

    /// Replaces what a namespace is: its size, limits, caches. A namespace that does not exist stays that way.
    ///
    /// # Panics
    /// If the queue is not [idle](HwQueue::is_idle): what waits was judged by what held before.
    pub fn set_info(&mut self, namespace: u16, info: Arc<DeviceInfo>) {
        assert!(self.is_idle(), "limits were replaced under I/O in flight");
        let number = usize::from(namespace);
        if let Some(namespace) = self.namespaces.get_mut(number) {
            self.table.set_limits(number, &info.limits);
            namespace.set_info(info);
        }
        self.choose_plain();
    }

    /// Lets no more than `depth` requests out at one time from now on, those reserved among them: at least one that is
    /// not reserved, at most as many as the queue was made with. Returns what the depth has become. What is out beyond
    /// that comes back when it is over.
    pub fn set_depth(&mut self, depth: usize) -> usize {
        let depth = self.tags.set_limit(depth);
        self.reshare();
        depth
    }

    /// Counts on in these counters: what concerns the queue as a whole, and the I/O of submitters without counters of
    /// their own, in `of_queue`; other I/O in those that [`Bio::submitter`](crate::Bio::submitter) is the index of.
    /// For a queue of one namespace.
    pub fn set_stats(&mut self, of_queue: Arc<HwStats>, of_submitters: Vec<Arc<HwStats>>) {
        let was = std::mem::replace(&mut self.namespaces[0].stats, Arc::clone(&of_queue));
        if !Arc::ptr_eq(&was, &of_queue) {
            // A gauge, found out again at the next look for slow requests.
            was.set_slow_now(0);
        }
        self.counted = self.config.stats.then_some(of_queue);
        self.submitters = if self.config.stats { of_submitters } else { Vec::new() };
    }

    /// Has a driver that does its work in the lane's thread copy so many bytes in one turn, and one request more, when
    /// it takes requests; and as many when it gives them back. The rest follows in the next turns.
    ///
    /// # Panics
    /// If it is zero: nothing would ever be done.
    pub fn set_turn_bytes(&mut self, bytes: u64) {
        assert!(bytes > 0, "a turn without bytes");
        self.turn_bytes = bytes;
    }

    /// Has each request take a place from a budget, beside its tag, before it is offered to the driver. Whoever turns
    /// this queue's run is woken when the budget has places for it.
    ///
    /// # Panics
    /// If the queue is not [idle](HwQueue::is_idle): what is with the driver has taken no place.
    pub fn set_budget(&mut self, budget: Option<BudgetShare>) {
        assert!(self.is_idle(), "a budget was set under I/O in flight");
        self.budget = budget;
        self.slow_path = true;
    }

    /// Lets no bio in, until it is [thawed](HwQueue::thaw) as often. What is in drains.
    pub fn freeze(&mut self) {
        self.frozen += 1;
        self.bios_max = 0;
        // What is in is to drain.
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

    /// Passes nothing on to the driver, until it is [let run](HwQueue::unquiesce) as often. Bios still enter, as long
    /// as there is room, and what the driver has still comes back.
    pub fn quiesce(&mut self) {
        self.quiesced += 1;
        self.slow_path = true;
    }

    /// Undoes one [`HwQueue::quiesce`]. The owner turns the run afterwards, for what has gathered.
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
                // It is the driver that is short: more places would only be dealt to us and refused again.
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
        // With nothing on its way back, nobody else would ever restart this queue.
        let on_its_way = self.in_flight() > 0 || !self.done.is_empty();
        self.retry_ns = match shortage {
            _ if !left => None,
            Shortage::Lane => None,
            // Woken when there are places. If the driver refused those it could have, being woken is no help.
            _ if refused == 0 && self.budget.as_ref().is_some_and(BudgetShare::is_waiting) => None,
            Shortage::Device if on_its_way => None,
            Shortage::Device | Shortage::System => Some(now_ns + RETRY_NS),
        };
        let shared = self.namespaces.len() > 1 || self.budget.is_some();
        let held_back = self.quiesced > 0 || self.retry_ns.is_some();
        self.slow_path = shared || held_back || self.again || self.busy > 0;
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
