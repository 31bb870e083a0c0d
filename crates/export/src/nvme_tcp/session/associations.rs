//! Associations of an export: their controllers' work and flushes, and their end.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use blkyard_nvme::{ControllerQueueCommand, ControllerRequest, KEEP_ALIVE_LATE_NS};

use super::super::connection::{AfterAuth, ConnectionPhase, TargetConnection};
use super::{EndingAssociation, IoQueueState, NvmeTcpError, NvmeTcpSession, RunningFlush, ServedConnection};
use crate::core::drain_poll;

impl NvmeTcpSession {
    /// Ends an association: no further command of it is executed.
    pub(super) fn end_association(&mut self, id: u16, now: Instant) -> Result<(), NvmeTcpError> {
        let now_ns = self.now_ns(now);
        let Some(association) = self.subsystem.association(id).filter(|_| !self.ending.contains_key(&id)) else {
            return Ok(());
        };
        let since_ns = association.controller.end_service(now_ns);
        let host = (association.host().clone(), association.host_id());
        let hold = self.config.disk.ports.hold_of(&host);
        self.ending.insert(id, EndingAssociation { since_ns, host: host.0, hold, is_told: false });
        let mut unauthenticated = Vec::new();
        for (token, connection) in &mut self.connections {
            match &connection.phase {
                ConnectionPhase::Admin(of) if *of == id => connection.close(now),
                // One that is to replace this association goes on.
                ConnectionPhase::Authenticating(of, then) if *of == id && !matches!(**then, AfterAuth::Replace(_)) => {
                    unauthenticated.push(*token);
                }
                _ => {}
            }
        }
        for token in unauthenticated {
            self.end_admin(token, now)?;
        }
        for number in 0..self.queues.len() {
            if self.queues[number].as_ref().is_some_and(|queue| queue.controller == id) {
                self.end_queue(number)?;
            }
        }
        self.hold_hosts(now);
        self.drain_from(now);
        Ok(())
    }

    /// Has commands wait, at all ports, of hosts whose associations have ended and of which a device still has
    /// commands: by now the host may count on their end.
    fn hold_hosts(&mut self, now: Instant) {
        let (now_ns, mut has_fewer) = (self.now_ns(now), false);
        for (id, ending) in &mut self.ending {
            let queues = self.queues.iter().flatten().filter(|queue| queue.controller == *id);
            let devices = queues.fold(0, |all, queue| all | queue.devices.load(Relaxed));
            if now_ns < ending.since_ns.saturating_add(KEEP_ALIVE_LATE_NS) {
                continue;
            }
            has_fewer |= ending.hold.set(*id, devices);
            if devices > 0 && !std::mem::replace(&mut ending.is_told, true) {
                let host = &ending.host;
                self.log.warn(format_args!(
                    "commands of host {host} wait: a device has not ended those of controller {id}, whose association \
                     has ended; check the device"
                ));
            }
        }
        if has_fewer {
            self.config.disk.ports.tell_released();
        }
    }

    /// An association has ended, and its last command is back.
    fn removed(&mut self, id: u16) {
        let is_uncertain = self.uncertain.iter().position(|uncertain| *uncertain == id);
        let is_uncertain = is_uncertain.map(|place| self.uncertain.swap_remove(place)).is_some();
        self.finish_resets(id, is_uncertain);
        self.subsystem.remove(id);
    }

    /// Has a controller work, and passes on its answers and requests.
    pub(super) fn advance(&mut self, id: u16, now: Instant) -> Result<(), NvmeTcpError> {
        let now_ns = self.now_ns(now);
        let Some(association) = self.subsystem.association(id) else { return Ok(()) };
        let controller = &mut association.controller;
        controller.poll(now_ns);
        let is_expired = controller.is_expired();
        let completions: Vec<_> = std::iter::from_fn(|| controller.take_completion()).collect();
        let requests: Vec<_> = std::iter::from_fn(|| controller.take_request()).collect();
        if !completions.is_empty() {
            let is_its = |one: &&mut TargetConnection| matches!(one.phase, ConnectionPhase::Admin(of) if of == id);
            if let Some(connection) = self.connections.values_mut().find(is_its) {
                completions.into_iter().for_each(|completion| connection.queue.complete(completion));
                connection.send();
            }
        }
        for request in requests {
            self.obey(id, request)?;
        }
        self.pass_on_resets(id);
        if is_expired && !self.ending.contains_key(&id) {
            let host = self.subsystem.association(id).map(|association| association.host().to_string());
            let host = host.unwrap_or_default();
            self.log.warn(format_args!("host {host} is disconnected: its keep-alive timer has expired"));
            self.end_association(id, now)?;
        }
        Ok(())
    }

    /// Executes a request of a controller.
    pub(super) fn obey(&mut self, id: u16, request: ControllerRequest) -> Result<(), NvmeTcpError> {
        match request {
            ControllerRequest::Queue(qid, command) => {
                let is_its = |queue: &ServedConnection| queue.controller == id && queue.qid == qid;
                let place = self.queues.iter().position(|queue| queue.as_ref().is_some_and(is_its));
                let Some(number) = place else {
                    // Its connection ended at the same time.
                    self.disconnect(id, qid);
                    return Ok(());
                };
                match command {
                    ControllerQueueCommand::SetNamespaces(table) => {
                        // Changes of devices stop all queues first.
                        let slot = self.queues[number].as_ref().map(|queue| Arc::clone(&queue.slot));
                        if let Some(state) =
                            slot.and_then(|slot| slot.lock().unwrap_or_else(PoisonError::into_inner).take())
                        {
                            let mut state = state;
                            state.queue.set_namespaces(table);
                            self.put_back(number, state);
                        }
                    }
                    _ => self.end_queue(number)?,
                }
            }
            ControllerRequest::Flush(number) => self.flush(id, number)?,
            ControllerRequest::Create(_) => unreachable!("queues of fabrics are connected"),
        }
        Ok(())
    }

    /// Starts a flush of all devices, after what the controller's queues have in flight: a write among that may have
    /// begun without FUA.
    pub(super) fn flush(&mut self, controller: u16, number: u64) -> Result<(), NvmeTcpError> {
        let may_write =
            |queue: &ServedConnection| queue.controller == controller && !matches!(queue.state, IoQueueState::Stopped);
        let places = 0..self.queues.len();
        let mut queues: Vec<_> = places.filter(|place| self.queues[*place].as_ref().is_some_and(may_write)).collect();
        if queues.is_empty() {
            // Those that wrote have drained: any queue flushes that.
            if let Err(why) = self.config.queues[0].open() {
                self.log.warn(format_args!("the devices cannot be flushed: {why}"));
                self.report_flush(controller, number, false);
                return Ok(());
            }
            queues.push(0);
        }
        for queue in queues {
            let pending = self.config.queues[queue].begin_flush()?;
            self.flushes.push(RunningFlush { controller, number, pending, has_failed: false });
        }
        self.drain_from(self.clock.now());
        Ok(())
    }

    /// A client queue without a connection.
    pub(super) fn free_place(&self) -> Option<usize> {
        self.queues.iter().position(Option::is_none)
    }

    pub(super) fn report_flush(&mut self, controller: u16, number: u64, is_durable: bool) {
        let Some(association) = self.subsystem.association(controller) else { return };
        if is_durable {
            association.controller.flushed(number);
        } else {
            association.controller.flush_failed(number);
        }
    }

    /// Waits until then for a flush.
    pub(super) fn finish_flush(&mut self, place: usize, until: Option<Instant>) -> Result<(), NvmeTcpError> {
        let Some(is_durable) = self.flushes[place].pending.wait_until(until)? else { return Ok(()) };
        let RunningFlush { controller, number, has_failed, .. } = self.flushes.swap_remove(place);
        let is_durable = is_durable && !has_failed;
        let is_its = |flush: &&mut RunningFlush| (flush.controller, flush.number) == (controller, number);
        if let Some(other) = self.flushes.iter_mut().find(is_its) {
            // It reports for both.
            other.has_failed |= !is_durable;
            return Ok(());
        }
        self.report_flush(controller, number, is_durable);
        self.advance(controller, self.clock.now())
    }

    /// Removes the associations that have ended, if their last command is back.
    pub(super) fn remove_ended(&mut self, now: Instant) -> Result<(), NvmeTcpError> {
        self.hold_hosts(now);
        for id in self.ending.keys().copied().collect::<Vec<_>>() {
            if self.queues.iter().flatten().any(|queue| queue.controller == id) {
                continue;
            }
            if self.ending.remove(&id).is_some_and(|ending| ending.hold.set(id, 0)) {
                self.config.disk.ports.tell_released();
            }
            self.removed(id);
            self.reconnect(now)?;
        }
        Ok(())
    }

    /// Looks for what has drained from now on: something more has begun to.
    pub(super) fn drain_from(&mut self, now: Instant) {
        (self.drain_at, self.drains_since) = (Some(now), now);
    }

    /// Looks at queues that drain and at flushes, and ends what has drained.
    pub(super) fn drain(&mut self, now: Instant) -> Result<(), NvmeTcpError> {
        if self.drain_at.is_none_or(|at| at > now) {
            return Ok(());
        }
        self.drain_at = None;
        // Lanes live by the system's clock: it is past, so none is waited for.
        let past = Some(Instant::now());
        for place in (0..self.flushes.len()).rev() {
            self.finish_flush(place, past)?;
        }
        for number in 0..self.queues.len() {
            self.check_start(number)?;
            self.drain_queue(number, past)?;
            self.finish_queue(number, now)?;
        }
        let is_at_rest =
            |queue: &ServedConnection| matches!(queue.state, IoQueueState::Running) && queue.started.is_none();
        let is_draining = !self.queues.iter().flatten().all(is_at_rest);
        self.remove_ended(now)?;
        if is_draining || !self.flushes.is_empty() || !self.ending.is_empty() {
            self.drain_at = Some(now + drain_poll(now.saturating_duration_since(self.drains_since)));
        }
        Ok(())
    }
}
