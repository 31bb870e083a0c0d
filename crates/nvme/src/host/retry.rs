//! Retries of failed commands: a request ends, or is submitted again at once or after a delay.

use blkyard_mq::{Cancellations, Done, ErrorCode, Status, Tag};

use crate::io_queue::reallocate;
use crate::{IdentifyController, NvmeStatus};

/// Maximum retries of a request, as in Linux.
pub const RETRIES_MAX: u8 = 5;
/// Time for which a command that was cancelled, or could not be started, is submitted again; ns.
pub const CANCELLED_RETRY_NS: u64 = Cancellations::TIME_NS;
/// Delay of such a retry, ns.
const CANCELLED_DELAY_NS: u64 = 100_000_000;
/// Unit of the controller's retry delays, ns.
const DELAY_UNIT_NS: u64 = 100_000_000;

/// Retry delays of the controller (CRDT1 to CRDT3), ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetryDelays([u64; 3]);

impl RetryDelays {
    /// From identify data.
    pub fn new(controller: &IdentifyController) -> RetryDelays {
        let delays = [controller.retry_delay_1, controller.retry_delay_2, controller.retry_delay_3];
        RetryDelays(delays.map(|delay| u64::from(delay) * DELAY_UNIT_NS))
    }

    /// The delay requested by a status.
    fn of(self, status: NvmeStatus) -> u64 {
        match status.retry_delay() {
            0 => 0,
            number => self.0[usize::from(number) - 1],
        }
    }
}

/// Disposition of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// End with the status.
    Complete,
    /// Retry after this delay, ns.
    Retry(u64),
}

impl Disposition {
    /// Disposition of a request after this number of retries.
    pub fn of(status: NvmeStatus, retries: u8, delays: RetryDelays) -> Disposition {
        if status.is_success() || status.is_final() || retries >= RETRIES_MAX {
            return Disposition::Complete;
        }
        Disposition::Retry(delays.of(status))
    }

    /// Disposition of a request whose commands were cancelled, or not started, for so long.
    pub fn of_cancelled(elapsed_ns: u64) -> Disposition {
        match elapsed_ns {
            ..CANCELLED_RETRY_NS => Disposition::Retry(CANCELLED_DELAY_NS),
            _ => Disposition::Complete,
        }
    }
}

/// Retries of one request.
#[derive(Clone, Copy, Debug, Default)]
struct RetryState {
    count: u8,
    /// Commands that resets have cancelled.
    cancelled: Cancellations,
    /// When a command was first cancelled, or not started, by the system; ns.
    cancelled_ns: Option<u64>,
}

impl RetryState {
    fn is_set(self) -> bool {
        self.count > 0 || self.cancelled.is_set() || self.cancelled_ns.is_some()
    }
}

/// A request that waits for its retry.
#[derive(Debug)]
struct DelayedRetry {
    due_ns: u64,
    tag: Tag,
    /// Whether its last command has an answer.
    is_answered: bool,
}

/// Failed requests of one queue.
#[derive(Debug)]
pub struct Retries {
    delays: RetryDelays,
    /// By slot.
    states: Box<[RetryState]>,
    /// Number of slots with a state.
    retried: usize,
    /// Waiting requests.
    delayed: Vec<DelayedRetry>,
}

impl Retries {
    /// Has its memory where this thread allocates.
    pub(crate) fn reallocate(&mut self) {
        reallocate(&mut self.states);
    }

    /// For a queue with so many slots.
    pub fn new(slots: u16, delays: RetryDelays) -> Retries {
        let slots = usize::from(slots);
        let states = vec![RetryState::default(); slots].into();
        Retries { delays, states, retried: 0, delayed: Vec::with_capacity(slots) }
    }

    /// Continues with the delays of another controller.
    pub fn set_delays(&mut self, delays: RetryDelays) {
        self.delays = delays;
    }

    /// Whether a successful request can be completed without [`Retries::finish`].
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.retried == 0
    }

    /// Handles the end of a command: completes its request, or retries it.
    #[cold]
    pub fn finish(&mut self, tag: Tag, status: NvmeStatus, done: &mut Done<'_>, now_ns: u64) {
        self.finish_after(tag, status, 0, done, now_ns);
    }

    /// The same, with a retry no earlier than after this time, ns.
    #[cold]
    pub fn finish_after(&mut self, tag: Tag, status: NvmeStatus, after_ns: u64, done: &mut Done<'_>, now_ns: u64) {
        let state = &mut self.states[tag.index()];
        match Disposition::of(status, state.count, self.delays) {
            Disposition::Complete => {
                self.forget(&tag);
                if !status.is_success() {
                    done.note_code(tag.index(), ErrorCode::Nvme(status.0));
                }
                done.complete(tag, status.to_status());
            }
            Disposition::Retry(delay_ns) => {
                self.retried += usize::from(!state.is_set());
                state.count += 1;
                match delay_ns.max(after_ns) {
                    0 => done.requeue_answered(tag),
                    delay_ns => {
                        let due_ns = now_ns.saturating_add(delay_ns);
                        self.delayed.push(DelayedRetry { due_ns, tag, is_answered: true });
                    }
                }
            }
        }
    }

    /// Handles a command that a reset or the loss of the controller has cancelled. Its request is submitted again at
    /// once, and in order. That is no retry: [`Cancellations`] bound it.
    #[cold]
    pub fn finish_reset(&mut self, tag: Tag, done: &mut Done<'_>, now_ns: u64) {
        if self.note_cancelled(&tag, now_ns) {
            self.forget(&tag);
            done.note_code(tag.index(), ErrorCode::Nvme(NvmeStatus::HOST_ABORTED.0));
            done.complete(tag, Status::Io);
        } else {
            done.requeue(tag);
        }
    }

    /// Counts a command that the loss of its controller has cancelled. Returns whether its request is to fail.
    #[cold]
    pub fn note_cancelled(&mut self, tag: &Tag, now_ns: u64) -> bool {
        let state = &mut self.states[tag.index()];
        self.retried += usize::from(!state.is_set());
        state.cancelled.add(now_ns)
    }

    /// Whether the last command of a request was cancelled, and the request is to fail.
    #[cold]
    pub fn is_exhausted(&self, tag: &Tag) -> bool {
        self.states[tag.index()].cancelled.is_exhausted()
    }

    /// Goes on with the counts of another queue whose requests, none of which waits there, come here. Requests have the
    /// same slots in both.
    pub fn adopt(&mut self, other: &mut Retries) {
        debug_assert!(other.delayed.is_empty(), "a request waits in the other queue");
        for (state, others) in self.states.iter_mut().zip(&mut other.states) {
            *state = std::mem::take(others);
        }
        self.retried = self.states.iter().filter(|state| state.is_set()).count();
        other.retried = 0;
    }

    /// Handles a command that ended without an answer of the controller: cancelled by a reset, or not started. Its
    /// request is retried for [`CANCELLED_RETRY_NS`]; such retries do not count. Then it fails, with this code.
    #[cold]
    pub fn finish_cancelled(&mut self, tag: Tag, code: ErrorCode, done: &mut Done<'_>, now_ns: u64) {
        let state = &mut self.states[tag.index()];
        let first_ns = state.cancelled_ns.unwrap_or(now_ns);
        match Disposition::of_cancelled(now_ns.saturating_sub(first_ns)) {
            Disposition::Complete => {
                self.forget(&tag);
                done.note_code(tag.index(), code);
                done.complete(tag, Status::Io);
            }
            Disposition::Retry(delay_ns) => {
                self.retried += usize::from(!state.is_set());
                state.cancelled_ns = Some(first_ns);
                let due_ns = now_ns.saturating_add(delay_ns);
                self.delayed.push(DelayedRetry { due_ns, tag, is_answered: false });
            }
        }
    }

    /// Handles the end of a request without a command.
    #[inline]
    pub fn forget(&mut self, tag: &Tag) {
        if self.retried > 0 {
            self.retried -= usize::from(std::mem::take(&mut self.states[tag.index()]).is_set());
        }
    }

    /// Earliest deadline of a retry.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.delayed.iter().map(|delayed| delayed.due_ns).min()
    }

    /// Resubmits the requests whose delay has ended.
    #[inline]
    pub fn requeue_due(&mut self, done: &mut Done<'_>, now_ns: u64) {
        if !self.delayed.is_empty() {
            self.requeue_before(now_ns, done);
        }
    }

    #[cold]
    fn requeue_before(&mut self, now_ns: u64, done: &mut Done<'_>) {
        let mut number = 0;
        while let Some(delayed) = self.delayed.get(number) {
            if delayed.due_ns > now_ns {
                number += 1;
                continue;
            }
            match self.delayed.swap_remove(number) {
                DelayedRetry { tag, is_answered: true, .. } => done.requeue_answered(tag),
                DelayedRetry { tag, .. } => done.requeue(tag),
            }
        }
    }

    /// Drops all waiting requests with their hardware queue.
    pub fn abandon_delayed(&mut self) {
        self.delayed.drain(..).for_each(|delayed| std::mem::forget(delayed.tag));
    }

    /// Fails all waiting requests after the controller is gone.
    pub fn fail_delayed(&mut self, done: &mut Done<'_>) {
        while let Some(DelayedRetry { tag, .. }) = self.delayed.pop() {
            self.forget(&tag);
            done.complete(tag, Status::Offline);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_retried_unless_it_is_final() {
        let identify = IdentifyController { retry_delay_1: 1, retry_delay_3: 30, ..Default::default() };
        let delays = RetryDelays::new(&identify);
        let of = |status, retries| Disposition::of(status, retries, delays);
        assert_eq!(of(NvmeStatus::SUCCESS, 0), Disposition::Complete);
        assert_eq!(of(NvmeStatus::INTERNAL, 0), Disposition::Retry(0));
        assert_eq!(of(NvmeStatus::INTERNAL, 4), Disposition::Retry(0));
        assert_eq!(of(NvmeStatus::INTERNAL, 5), Disposition::Complete, "five times at most");
        assert_eq!(of(NvmeStatus::LBA_OUT_OF_RANGE.with_dnr(), 0), Disposition::Complete);
        assert_eq!(of(NvmeStatus::ABORT_REQUESTED, 0), Disposition::Retry(0));
        let delayed = |number: u16| NvmeStatus(NvmeStatus::COMMAND_INTERRUPTED.0 | number << 11);
        assert_eq!(of(delayed(1), 0), Disposition::Retry(100_000_000));
        assert_eq!(of(delayed(2), 0), Disposition::Retry(0), "a delay that the controller does not name");
        assert_eq!(of(delayed(3), 1), Disposition::Retry(3_000_000_000));
    }

    #[test]
    fn cancelled_commands_are_retried_for_thirty_seconds() {
        for elapsed_ns in [0, 1_000_000_000, CANCELLED_RETRY_NS - 1] {
            assert_eq!(Disposition::of_cancelled(elapsed_ns), Disposition::Retry(100_000_000), "{elapsed_ns}");
        }
        assert_eq!(Disposition::of_cancelled(CANCELLED_RETRY_NS), Disposition::Complete);
    }
}
