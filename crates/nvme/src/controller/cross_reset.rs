//! Resets of other controllers of the subsystem, which the owner executes.
//!
//! A command waits for the reset for [`IMMEDIATE_NS`], and says then whether it is complete. Of a later end the host
//! learns by an event, and reads the log page.

use serde::{Deserialize, Serialize};

use super::Controller;
use super::admin::{AdminOutcome, AdminResult, PendingAdmin, refuse};
use super::capabilities::CROSS_RESETS_MAX;
use super::events::ControllerEvent;
use crate::cross_reset::IMMEDIATE;
use crate::{CROSS_RESET_ENTRIES_MAX, ControllerInstance, CrossResetEntry, CrossResetState, NvmeStatus, Sqe};

/// Time that the command waits for the reset, ns: longer than queues take to stop whose device has no command.
const IMMEDIATE_NS: u64 = 20_000_000;

/// The reset of another controller.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct CrossReset {
    instance: ControllerInstance,
    state: CrossResetState,
    /// Whether the owner has it.
    is_taken: bool,
    /// When the command is answered in any case; unset once it is.
    answer_ns: Option<u64>,
}

impl Controller {
    /// Cross-Controller Reset. The first invalid field determines the status.
    pub(super) fn reset_other(&mut self, sqe: &Sqe) -> AdminResult {
        let own = self.options.instance();
        let instance = ControllerInstance::of_command(sqe).filter(|named| own.is_some_and(|own| own.id != named.id));
        let Some(instance) = instance else { return refuse(NvmeStatus::INVALID_FIELD) };
        let is_running = |reset: &&CrossReset| reset.state == CrossResetState::Running;
        if self.cross_resets.iter().filter(is_running).any(|reset| reset.instance == instance) {
            // It may have failed when the host asks again.
            return Err(NvmeStatus::CROSS_RESET_RUNNING);
        }
        if self.cross_resets.iter().filter(is_running).count() >= CROSS_RESETS_MAX {
            return Err(NvmeStatus::CROSS_RESET_LIMIT);
        }
        if self.cross_resets.len() >= CROSS_RESET_ENTRIES_MAX {
            return Err(NvmeStatus::CROSS_RESET_LOG_FULL);
        }
        let answer_ns = Some(self.now_ns.saturating_add(IMMEDIATE_NS));
        self.cross_resets.push(CrossReset { instance, state: CrossResetState::Running, is_taken: false, answer_ns });
        Ok(AdminOutcome::Pending(PendingAdmin::CrossReset(instance)))
    }

    /// Its life, if other controllers can have it reset.
    pub fn instance(&self) -> Option<ControllerInstance> {
        self.options.instance()
    }

    /// The next controller to be reset: another one of the subsystem, for the same host. Then call
    /// [`Controller::other_reset`].
    pub fn take_cross_reset(&mut self) -> Option<ControllerInstance> {
        let reset = self.cross_resets.iter_mut().find(|reset| !reset.is_taken)?;
        reset.is_taken = true;
        Some(reset.instance)
    }

    /// The reset of another controller has ended: none of its commands is executed any more, or it failed, or was
    /// refused, with this status.
    pub fn other_reset(&mut self, instance: ControllerInstance, outcome: Result<(), NvmeStatus>) {
        let is_its = |reset: &CrossReset| reset.instance == instance && reset.state == CrossResetState::Running;
        let Some(place) = self.cross_resets.iter().position(is_its) else { return };
        let pending = PendingAdmin::CrossReset(instance);
        if self.cross_resets[place].answer_ns.is_some() {
            self.cross_resets.remove(place);
            match outcome {
                Ok(()) => self.end_pending(pending, NvmeStatus::SUCCESS, IMMEDIATE),
                Err(status) => self.end_pending(pending, status, 0),
            };
            return;
        }
        let state = if outcome.is_ok() { CrossResetState::Succeeded } else { CrossResetState::Failed };
        self.cross_resets[place].state = state;
        self.events.push(ControllerEvent::CrossReset, self.features.async_events);
    }

    /// Answers the commands whose resets take longer.
    pub(super) fn answer_slow_resets(&mut self) {
        for place in 0..self.cross_resets.len() {
            let reset = &mut self.cross_resets[place];
            if reset.answer_ns.take_if(|until_ns| self.now_ns >= *until_ns).is_some() {
                let instance = reset.instance;
                self.end_pending(PendingAdmin::CrossReset(instance), NvmeStatus::SUCCESS, 0);
            }
        }
    }

    pub(super) fn cross_reset_deadline_ns(&self) -> Option<u64> {
        self.cross_resets.iter().filter_map(|reset| reset.answer_ns).min()
    }

    /// Those that the host may read of, for a controller in another process. That asks its owner again for those that
    /// run. A reset whose command waits begins anew with the command.
    pub(super) fn saved_resets(&self) -> Vec<CrossReset> {
        let told = self.cross_resets.iter().filter(|reset| reset.answer_ns.is_none());
        told.map(|reset| CrossReset { is_taken: reset.state != CrossResetState::Running, ..*reset }).collect()
    }

    pub(super) fn restore_resets(&mut self, saved: &[CrossReset]) {
        self.cross_resets = saved.to_vec();
        self.cross_resets.truncate(CROSS_RESET_ENTRIES_MAX);
    }

    /// The log page. Resets whose command waits are not in it.
    pub(super) fn cross_reset_page(&self) -> Vec<u8> {
        let entry = |reset: &CrossReset| CrossResetEntry {
            id: reset.instance.id,
            uniquifier: reset.instance.uniquifier,
            asked: self.options.controller_id,
            state: reset.state,
        };
        CrossResetEntry::page(self.cross_resets.iter().filter(|reset| reset.answer_ns.is_none()).map(entry))
    }

    pub(super) fn remove_completed_resets(&mut self) {
        self.cross_resets.retain(|reset| reset.state == CrossResetState::Running);
    }
}
