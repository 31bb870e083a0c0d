//! Cross-controller resets of a port: those that its controllers are asked for, and those of its controllers.
//!
//! A reset is the end of the association. It is complete once the last command of that is back, which is when the
//! association is removed. A controller that is unknown is not reset: it may be one of another process, whose commands
//! its devices may still execute.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use blkyard_nvme::fabrics::Nqn;
use blkyard_nvme::{ControllerInstance, NvmeStatus};
use serde::{Deserialize, Serialize};

use super::super::directory::{PortMessage, ResetTicket};
use super::{IoQueueState, NvmeTcpError, NvmeTcpSession};

/// Associations that are remembered after their end, so that a host that asks late learns of it.
const REMEMBERED_MAX: usize = 64;

/// State of the resets of a port's controllers.
#[derive(Debug, Default)]
pub(super) struct PortResets {
    /// Of controllers that end.
    running: Vec<ResetTicket>,
    /// Controllers that have ended, with their hosts; of none a command is executed any more.
    ended: VecDeque<(ControllerInstance, (Nqn, [u8; 16]))>,
}

/// A controller that has ended, with its host.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct EndedController {
    instance: ControllerInstance,
    host: String,
    host_id: [u8; 16],
}

impl PortResets {
    /// The controllers that have ended.
    pub(super) fn save(&self) -> Vec<EndedController> {
        let save = |(instance, (host, host_id)): &(ControllerInstance, (Nqn, [u8; 16]))| EndedController {
            instance: *instance,
            host: host.as_str().to_owned(),
            host_id: *host_id,
        };
        self.ended.iter().map(save).collect()
    }

    pub(super) fn restore(&mut self, saved: &[EndedController]) {
        let known = |one: &EndedController| Some((one.instance, (Nqn::new(&one.host)?, one.host_id)));
        self.ended = saved.iter().take(REMEMBERED_MAX).filter_map(known).collect();
    }
}

impl NvmeTcpSession {
    /// Passes on what a controller is asked to reset.
    pub(super) fn pass_on_resets(&mut self, id: u16) {
        let Some(association) = self.subsystem.association(id) else { return };
        let host = (association.host().clone(), association.host_id());
        while let Some(instance) = association.controller.take_cross_reset() {
            let asked = (Arc::clone(self.mailbox.get()), id);
            let ticket = ResetTicket::new(instance, host.clone(), asked);
            match self.config.disk.ports.port_of(instance.id) {
                Some(port) => port.send(PortMessage::Reset(ticket)),
                None => ticket.answer(Err(NvmeStatus::INVALID_FIELD.with_dnr())),
            }
        }
    }

    /// Handles the messages of ports.
    pub(super) fn read_mail(&mut self, now: Instant) -> Result<(), NvmeTcpError> {
        for message in self.mailbox.get().take() {
            match message {
                PortMessage::Reset(ticket) => self.reset(ticket, now)?,
                PortMessage::Released => {
                    for (queue, remote) in self.queues.iter().zip(&self.config.queues) {
                        if queue.as_ref().is_some_and(|queue| matches!(queue.state, IoQueueState::Running)) {
                            remote.notify()?;
                        }
                    }
                }
                PortMessage::Answer(id, instance, outcome) => {
                    if let Some(association) = self.subsystem.association(id) {
                        association.controller.other_reset(instance, outcome);
                        self.advance(id, now)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Resets a controller of this port.
    fn reset(&mut self, ticket: ResetTicket, now: Instant) -> Result<(), NvmeTcpError> {
        let instance = ticket.instance;
        let is_its = |(ended, host): &(ControllerInstance, _)| *ended == instance && *host == ticket.host;
        if self.resets.ended.iter().any(is_its) {
            ticket.answer(Ok(()));
            return Ok(());
        }
        let known =
            self.subsystem.association(instance.id).filter(|known| known.controller.instance() == Some(instance));
        // A host learns nothing of the controllers of others.
        if known.is_none_or(|known| (known.host(), known.host_id()) != (&ticket.host.0, ticket.host.1)) {
            ticket.answer(Err(NvmeStatus::INVALID_FIELD.with_dnr()));
            return Ok(());
        }
        if self.resets.running.iter().any(|running| running.instance == instance) {
            ticket.answer(Err(NvmeStatus::CROSS_RESET_RUNNING));
            return Ok(());
        }
        let (host, id) = (&ticket.host.0, instance.id);
        self.log.info(format_args!("host {host} is disconnected: it has controller {id} reset by another one"));
        self.resets.running.push(ticket);
        self.end_association(id, now)
    }

    /// An association has ended: its last command is back, but a device may still execute one that `is_uncertain`.
    pub(super) fn finish_resets(&mut self, id: u16, is_uncertain: bool) {
        let Some(association) = self.subsystem.association(id) else { return };
        let Some(instance) = association.controller.instance() else { return };
        if !is_uncertain {
            self.resets.ended.push_back((instance, (association.host().clone(), association.host_id())));
            if self.resets.ended.len() > REMEMBERED_MAX {
                self.resets.ended.pop_front();
            }
        }
        let outcome = if is_uncertain { Err(NvmeStatus::INTERNAL) } else { Ok(()) };
        for place in (0..self.resets.running.len()).rev() {
            if self.resets.running[place].instance == instance {
                self.resets.running.swap_remove(place).answer(outcome);
            }
        }
    }
}
