//! Teardown: I/O queues stop and are deleted, the controller is disabled, and only then requests are returned.

use std::sync::atomic::Ordering::Relaxed;

use crate::host::admin::{ADMIN_TIMEOUT_NS, AdminData};
use crate::host::host_controller::{AdminPurpose, HostPhase, PhaseChanged};
use crate::host::io_queues::QueueRun;
use crate::host::{ControllerState, ControllerTransport, Disable, HostController, HostEvent, HostStep, NvmeHostError};
use crate::{IoQueueCommand, NvmeStatus, Sqe};

/// Interval of attempts to disable a controller that stays active, ns.
const UNPROVEN_RETRY_NS: u64 = 1_000_000_000;
/// Time for requests in flight to complete before an orderly shutdown, ns, as in Linux.
const DRAIN_NS: u64 = 30_000_000_000;
/// Lower and upper bound of the time for an orderly shutdown (the controller's RTD3E), ns.
const SHUTDOWN_MIN_NS: u64 = 5_000_000_000;
const SHUTDOWN_MAX_NS: u64 = 60_000_000_000;

/// Deletion of all I/O queues within the time limit of one admin command: submission queues first, then completion
/// queues.
#[derive(Debug)]
pub(crate) struct DeleteQueues {
    is_sq: bool,
    /// Commands still to be sent.
    left: Vec<Sqe>,
    in_flight: usize,
    until_ns: u64,
}

impl DeleteQueues {
    pub(crate) fn completed(&mut self) {
        self.in_flight -= 1;
    }
}

impl<T: ControllerTransport> HostController<T> {
    /// Starts the teardown. An orderly one waits for requests in flight.
    pub(crate) fn tear_down(&mut self, is_orderly: bool, now_ns: u64) {
        self.stop_queues(if is_orderly { IoQueueCommand::Drain } else { IoQueueCommand::Stop });
        self.scan = None;
        self.keep_alive = None;
        self.phase = HostPhase::Stop { until_ns: is_orderly.then(|| now_ns.saturating_add(DRAIN_NS)) };
    }

    /// Gives the controller up: a way down in progress is not reversed, but waits no longer for one that is gone.
    pub(crate) fn end(&mut self, error: NvmeHostError, now_ns: u64) {
        self.is_mute |= matches!(error, NvmeHostError::Gone(_) | NvmeHostError::Fatal);
        if self.is_ending {
            return;
        }
        let was_going_down = self.state == ControllerState::Resetting && !self.is_suspended();
        let is_orderly = self.state == ControllerState::Live && error == NvmeHostError::Removed;
        if !self.state.change(ControllerState::Deleting) {
            return;
        }
        self.is_ending = true;
        if error != NvmeHostError::Removed {
            self.error = Some(error);
            self.events.push_back(HostEvent::Failed(error));
        }
        if !was_going_down {
            self.tear_down(is_orderly, now_ns);
        }
    }

    /// Whether only owners of I/O queues hold up the teardown: they have not stopped, or not cancelled their requests.
    pub fn awaits_queues(&self) -> bool {
        match self.phase {
            HostPhase::Stop { until_ns: None } => self.any_queue(QueueRun::Stopping),
            HostPhase::Cancel => self.any_queue(QueueRun::Cancelling),
            _ => false,
        }
    }

    /// Waits no longer for [queues that do not answer](HostController::awaits_queues), such as one that no thread
    /// runs. If they do not answer before the controller is disabled, their rings cannot be used again: called then,
    /// this ends the controller, and its owner opens it anew with other memory.
    pub fn leave_queues(&mut self, now_ns: u64) {
        match self.phase {
            HostPhase::Stop { .. } => self.phase = self.begin_delete(now_ns),
            HostPhase::Cancel => {
                self.end(NvmeHostError::Queues, now_ns);
                self.down(now_ns);
            }
            _ => {}
        }
    }

    /// Executes one step of the teardown.
    pub(crate) fn step_down(&mut self, now_ns: u64) -> Result<Option<u64>, PhaseChanged> {
        match &mut self.phase {
            HostPhase::Stop { until_ns } => {
                let until_ns = *until_ns;
                let is_late = until_ns.is_some_and(|until_ns| until_ns <= now_ns) || self.is_mute && until_ns.is_some();
                if is_late {
                    self.hurry_queues();
                    self.phase = HostPhase::Stop { until_ns: None };
                } else if self.any_queue(QueueRun::Stopping) {
                    return Ok(until_ns);
                } else {
                    self.phase = self.begin_delete(now_ns);
                }
            }
            HostPhase::Delete(_) => {
                if let Some(until_ns) = self.step_delete(now_ns) {
                    return Ok(Some(until_ns));
                }
            }
            HostPhase::Disable(disable) => match disable.advance(&mut self.transport, now_ns) {
                HostStep::Wait { deadline_ns } => return Ok(Some(deadline_ns)),
                HostStep::Done => {
                    let is_gone = disable.is_gone();
                    self.silent(is_gone, now_ns);
                }
                HostStep::Failed(error) => {
                    self.end(error, now_ns);
                    self.phase = HostPhase::Unproven(now_ns.saturating_add(UNPROVEN_RETRY_NS));
                }
            },
            HostPhase::Unproven(retry_ns) => {
                if now_ns < *retry_ns {
                    return Ok(Some(*retry_ns));
                }
                self.phase = HostPhase::Disable(Disable::new(None));
            }
            HostPhase::Cancel => {
                if self.any_queue(QueueRun::Cancelling) {
                    return Ok(None);
                }
                self.down(now_ns);
            }
            _ => return Ok(None),
        }
        Err(PhaseChanged)
    }

    /// Queues are deleted first if the controller responds.
    fn begin_delete(&mut self, now_ns: u64) -> HostPhase {
        let answers = !self.is_mute && self.transport.status().is_ok_and(|status| status.ready && !status.fatal);
        self.is_mute |= !answers;
        if !answers || self.admin.is_none() {
            return self.begin_disable();
        }
        HostPhase::Delete(DeleteQueues {
            is_sq: true,
            left: self.queues.iter().filter(|queue| queue.has_sq).map(|queue| queue.delete(true)).collect(),
            in_flight: 0,
            until_ns: now_ns.saturating_add(ADMIN_TIMEOUT_NS),
        })
    }

    fn begin_disable(&self) -> HostPhase {
        let wanted_ns = (u64::from(self.identify.shutdown_us) * 1000).next_multiple_of(1_000_000_000);
        let shutdown_ns = wanted_ns.clamp(SHUTDOWN_MIN_NS, SHUTDOWN_MAX_NS);
        HostPhase::Disable(Disable::new(
            ((self.is_ending || self.wants_suspend) && !self.is_mute).then_some(shutdown_ns),
        ))
    }

    /// Returns the deadline to wait for, if any.
    fn step_delete(&mut self, now_ns: u64) -> Option<u64> {
        let HostPhase::Delete(mut delete) = std::mem::replace(&mut self.phase, HostPhase::Cancel) else { return None };
        if now_ns < delete.until_ns && !self.is_mute {
            while let Some(sqe) = delete.left.last() {
                if !self.submit(*sqe, AdminData::None, AdminPurpose::Delete, delete.until_ns) {
                    break;
                }
                delete.left.pop();
                delete.in_flight += 1;
            }
            let is_through = delete.left.is_empty() && delete.in_flight == 0;
            if is_through && delete.is_sq {
                delete.is_sq = false;
                let others = self.queues.iter().filter(|queue| queue.has_cq);
                delete.left = others.map(|queue| queue.delete(false)).collect();
                self.phase = HostPhase::Delete(delete);
                return None;
            }
            if !is_through {
                let until_ns = delete.until_ns;
                self.phase = HostPhase::Delete(delete);
                return Some(until_ns);
            }
        }
        self.phase = self.begin_disable();
        None
    }

    /// The controller is silent: its memory may be reused.
    fn silent(&mut self, is_gone: bool, now_ns: u64) {
        if is_gone {
            self.end(crate::DeviceGone.into(), now_ns);
        }
        if let Some(admin) = &mut self.admin {
            for purpose in admin.cancel() {
                if let AdminPurpose::User { user, .. } = purpose {
                    let status = NvmeStatus::HOST_ABORTED;
                    self.events.push_back(HostEvent::Completed { user, status, result: 0, data: None });
                }
            }
        }
        self.admin_memory = None;
        self.cancel_queues();
        self.phase = HostPhase::Cancel;
    }

    /// Zeroes doorbell registers that the controller does not share: its own are zero when the queues are created anew,
    /// and an old index must not be [forwarded](HostController::forward_doorbells) then. Queues that cancel still reap
    /// completions, and write the head of their completion ring; afterwards they write no doorbell before they start.
    fn clear_private_doorbells(&self) {
        if let Some(registers) = self.registers.as_ref().filter(|_| self.transport.doorbells().is_none()) {
            for at in (0..registers.len()).step_by(size_of::<u32>()) {
                registers.store_u32(at, 0, Relaxed);
            }
        }
    }

    /// Continues once no request is in flight.
    fn down(&mut self, now_ns: u64) {
        self.counts = None;
        self.clear_private_doorbells();
        if !self.is_ending && self.wants_suspend {
            self.phase = HostPhase::Idle;
            self.events.push_back(HostEvent::Suspended);
            return;
        }
        if !self.is_ending {
            self.state.change(ControllerState::Connecting);
            self.connect(now_ns);
            return;
        }
        self.phase = HostPhase::Idle;
        self.fail_queues();
        self.state.change(if self.is_removed { ControllerState::DeletingNoIo } else { ControllerState::Dead });
        self.events.push_back(HostEvent::Over);
    }
}
