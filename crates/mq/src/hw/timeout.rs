//! Request timeouts, and requests that are requeued.
//!
//! A request has a deadline from the moment the driver takes it. Completion does not touch it: the queue knows one
//! time at which a deadline may have passed, and only then walks its requests. It acts on those that are late, and
//! takes the earliest deadline of the others as the next time (Linux `blk_mq_timeout_work`). In steady state that is
//! one walk for each timeout period.
//!
//! The driver's completions are reaped before timeouts are handled, so a request that completes meanwhile is simply
//! complete. The driver's answer decides: a request that it can cancel is completed, now or later, and not asked for
//! again; one that it cannot cancel gets more time. A request that waits for the driver has no deadline.

use super::HwQueue;
use crate::Bio;
use crate::bio::Wait;
use crate::driver::{Done, Driver, TimedOut};
use crate::request::{Marks, RequestState};

/// Allowed delay of a timeout scan, as a share of the timeout: so a queue with many close deadlines is not scanned for
/// each. At most 10 ms: a path that hangs is left at the timeout, and who waits for that must not wait much longer.
const SLACK_SHARE: u64 = 16;
const SLACK_MAX_NS: u64 = 10_000_000;

impl<D> HwQueue<D> {
    /// Asks the driver about each request that has timed out. Completions are not handled here.
    #[inline(never)]
    pub(super) fn expire<Cx: ?Sized>(&mut self, cx: &mut Cx, now_ns: u64)
    where
        D: Driver<Cx>,
    {
        let mut next_ns = u64::MAX;
        self.mark_done(RequestState::Complete);
        for index in 0..self.table.requests.len() {
            let timeout_ns = self.timeout_ns;
            let request = &mut self.table.requests[index];
            if request.state() != RequestState::InFlight || request.taken_back {
                continue;
            }
            let due_ns = request.start_ns + timeout_ns + u64::from(request.grace_ms) * 1_000_000;
            if now_ns < due_ns {
                next_ns = next_ns.min(due_ns);
                continue;
            }
            request.mark(Marks::LATE);
            request.taken_back = true;
            let namespace = usize::from(request.namespace);
            self.namespaces[namespace].stats.timed_out();
            let mut done = Done {
                ended: &mut self.done,
                requeued: &mut self.requeued,
                table: &mut self.table,
                bytes_left: self.turn_bytes,
            };
            let answer = self.driver.timed_out(cx, &self.memory, index, &mut done, now_ns);
            // Its answer for one request may complete others.
            self.mark_done(RequestState::Complete);
            let request = &mut self.table.requests[index];
            if answer == TimedOut::MoreTime && request.state() == RequestState::InFlight {
                request.taken_back = false;
                let late_ns = now_ns - request.start_ns;
                request.grace_ms = (late_ns / 1_000_000).try_into().unwrap_or(u32::MAX);
                next_ns = next_ns.min(now_ns + timeout_ns);
            }
        }
        self.mark_done(RequestState::InFlight);
        self.expire_ns = if next_ns == u64::MAX {
            // Until a request is taken, if none is left; a request that stays past its timeout is not asked about
            // again.
            u64::MAX
        } else {
            next_ns.max(now_ns + (self.timeout_ns / SLACK_SHARE).min(SLACK_MAX_NS))
        };
    }

    fn mark_done(&mut self, state: RequestState) {
        for (number, _) in &self.done {
            self.table.requests[usize::from(*number)].look.set_state(state);
        }
    }

    /// Lists requeued requests ahead of all later ones, to be offered again at once.
    #[inline(never)]
    pub(super) fn requeue(&mut self) {
        (self.retry_ns, self.again, self.slow_path) = (None, true, true);
        if let Some(budget) = &mut self.budget {
            budget.give(self.requeued.len());
        }
        let HwQueue { requeued, dispatch, table, namespaces, .. } = self;
        for number in requeued.drain(..) {
            let request = &mut table.requests[usize::from(number)];
            let order = request.order;
            let stats = &namespaces[usize::from(request.namespace)].stats;
            stats.requeued();
            if request.has(Marks::SLOW) {
                // The device has it no more. If it is slow again, it is so once more.
                request.unmark(Marks::SLOW);
                stats.slow_ended();
            }
            let start_ns = request.start_ns;
            let begin = |bio: &mut Bio| {
                if bio.wait.since_ns == Wait::UNKNOWN {
                    bio.wait.begin(start_ns, &[0; 3]);
                }
            };
            if !request.has(Marks::FLUSH) {
                if let Some(bio) = &mut request.bio {
                    if !request.look.marks().intersects(Marks::HELD | Marks::SEQUENCE) {
                        bio.wait = Wait::default();
                    }
                    begin(bio);
                }
                request.mark(Marks::HELD);
                table.each_behind(number, begin);
            }
            dispatch.put_back(number, |other| table.requests[usize::from(other)].is_later_than(order));
        }
    }

    /// Counts requests that have been with the device for too long, each once for each time it had them. For now and
    /// then, not for each round.
    pub fn mark_slow(&mut self, now_ns: u64) {
        for namespace in &self.namespaces {
            namespace.stats.set_slow_now(0);
        }
        for request in self.table.requests.iter_mut().filter(|request| request.state() == RequestState::InFlight) {
            if now_ns.saturating_sub(request.start_ns) > self.config.slow_ns {
                let first = !request.has(Marks::SLOW);
                request.mark(Marks::SLOW);
                self.namespaces[usize::from(request.namespace)].stats.slow(first);
            }
        }
    }
}
