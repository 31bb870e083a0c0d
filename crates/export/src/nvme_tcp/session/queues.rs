//! Client queues of an export: started with a connection, drained, ended or continued.

use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use blkyard_nvme::fabrics::fabrics_status;
use blkyard_nvme::tcp::{TcpDataMemory, TcpEnd, TcpIoQueue};
use blkyard_nvme::{ConnectedQueue, ControllerQueueReply};

use super::super::connection::{TargetConnection, WaitingConnect};
use super::super::queue::{NvmeTcpQueueSetup, TcpQueueSlot, TcpQueueState};
use super::super::queue_options;
use super::{IoQueueState, NvmeTcpError, NvmeTcpSession, ServedConnection};
use crate::core::LaneGone;

impl NvmeTcpSession {
    /// Starts an I/O queue, whose Connect may be answered already.
    pub(super) fn connect_queue(
        &mut self,
        token: u64,
        (id, connected): (u16, ConnectedQueue),
        connect: &WaitingConnect,
        is_answered: bool,
    ) {
        let qid = connected.qid;
        let Some(number) = self.free_place() else {
            self.disconnect(id, qid);
            if is_answered {
                self.connections.remove(&token);
            } else if let Some(connection) = self.connections.get_mut(&token) {
                connection.respond(connect.slot, fabrics_status::CONTROLLER_BUSY, 0);
            }
            let cure = "serve more with queues=N behind the export's name";
            self.log.warn(format_args!("an I/O queue is refused: all {} are in use; {cure}", self.queues.len()));
            return;
        };
        let Some(connection) = self.connections.remove(&token) else { return };
        let peer = connection.peer;
        let (socket, admin) = connection.into_parts();
        let options = queue_options(connect.command.sq_size + 1, !connect.command.no_flow_control);
        let offset = number as u64 * self.queue_bytes;
        let memory = TcpDataMemory { table: Arc::clone(&self.table), region: 0, offset, bytes: self.queue_bytes };
        let mut queue = TcpIoQueue::new(admin.into_queue(), connected, options, memory);
        if !is_answered {
            queue.accept(connect.slot, id);
        }
        let run = TcpQueueState::new(socket, queue).map_err(|error| error.to_string()).and_then(|state| {
            let slot: TcpQueueSlot = Arc::new(Mutex::new(Some(Box::new(state))));
            self.add_queue(number, (id, qid), &slot, IoQueueState::Stopped);
            self.run_queue(number).unwrap_or_else(|gone| Err(gone.to_string()))
        });
        if let Err(why) = run {
            self.log.warn(format_args!("{peer}: its I/O queue {qid} cannot run: {why}"));
            self.queues[number] = None;
            self.disconnect(id, qid);
        }
        self.drain_from(self.clock.now());
    }

    /// Adds a queue of a controller.
    pub(super) fn add_queue(
        &mut self,
        number: usize,
        (controller, qid): (u16, u16),
        slot: &TcpQueueSlot,
        state: IoQueueState,
    ) {
        let association = self.subsystem.association(controller);
        let host = association.map(|association| (association.host().clone(), association.host_id()));
        let hold = host.map(|host| self.config.disk.ports.hold_of(&host)).unwrap_or_default();
        let (slot, devices) = (Arc::clone(slot), Arc::default());
        let queue = ServedConnection { controller, qid, slot, state, started: None, is_ending: false, devices, hold };
        self.queues[number] = Some(queue);
    }

    /// Has its lane run a stopped queue.
    fn run_queue(&mut self, number: usize) -> Result<Result<(), String>, LaneGone> {
        let (remote, Some(queue)) = (&self.config.queues[number], &self.queues[number]) else { return Ok(Ok(())) };
        if let Err(why) = remote.open() {
            return Ok(Err(why));
        }
        let started = remote.begin_run(self.setup(number, queue))?;
        if let Some(queue) = &mut self.queues[number] {
            (queue.state, queue.started) = (IoQueueState::Running, Some(started));
        }
        Ok(Ok(()))
    }

    /// Ends a queue that its lane cannot run.
    pub(super) fn check_start(&mut self, number: usize) -> Result<(), NvmeTcpError> {
        let Some(Some(queue)) = self.queues.get_mut(number) else { return Ok(()) };
        let Some(started) = &queue.started else { return Ok(()) };
        let why = match started.try_recv() {
            Err(TryRecvError::Empty) => return Ok(()),
            Err(TryRecvError::Disconnected) => LaneGone.to_string(),
            Ok(Err(why)) => why,
            Ok(Ok(())) => {
                queue.started = None;
                return Ok(());
            }
        };
        queue.started = None;
        self.log.warn(format_args!("I/O queue {} of controller {} cannot run: {why}", queue.qid, queue.controller));
        self.end_queue(number)
    }

    fn setup(&self, number: usize, queue: &ServedConnection) -> NvmeTcpQueueSetup {
        NvmeTcpQueueSetup {
            devices: Arc::clone(&queue.devices),
            hold: Arc::clone(&queue.hold),
            name: format!("{}, queue {number}", self.config.name),
            number,
            log: Arc::clone(&self.log),
            slot: Arc::clone(&queue.slot),
            table: Arc::clone(&self.table),
            ended: Arc::clone(self.ended.get()),
            clock: self.clock.clone(),
        }
    }

    /// An I/O queue of a controller is gone.
    pub(super) fn disconnect(&mut self, id: u16, qid: u16) {
        if let Some(association) = self.subsystem.association(id) {
            association.controller.reply(qid, ControllerQueueReply::Stopped);
        }
    }

    /// The connection of a client queue has ended: the queue drains.
    pub(super) fn end_queue(&mut self, number: usize) -> Result<(), NvmeTcpError> {
        let Some(Some(queue)) = self.queues.get_mut(number) else { return Ok(()) };
        queue.is_ending = true;
        if let IoQueueState::Running = queue.state {
            queue.state = IoQueueState::Draining(self.config.queues[number].suspend()?);
        }
        self.drain_from(self.clock.now());
        Ok(())
    }

    pub(super) fn put_back(&self, number: usize, state: Box<TcpQueueState>) {
        if let Some(queue) = &self.queues[number] {
            *queue.slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
        }
    }

    /// Waits until then for a queue to drain.
    pub(super) fn drain_queue(&mut self, number: usize, until: Option<Instant>) -> Result<(), NvmeTcpError> {
        let Some(Some(queue)) = self.queues.get_mut(number) else { return Ok(()) };
        if let IoQueueState::Draining(suspension) = &queue.state
            && suspension.wait_until(until)?
        {
            queue.state = IoQueueState::Stopped;
        }
        Ok(())
    }

    /// Ends or continues a stopped queue.
    pub(super) fn finish_queue(&mut self, number: usize, now: Instant) -> Result<(), NvmeTcpError> {
        let is_stopped = |queue: &&ServedConnection| matches!(queue.state, IoQueueState::Stopped);
        let Some(queue) = self.queues[number].as_ref().filter(is_stopped) else { return Ok(()) };
        let (id, qid, slot) = (queue.controller, queue.qid, Arc::clone(&queue.slot));
        if !queue.is_ending {
            match self.run_queue(number)? {
                Ok(()) => return Ok(()),
                Err(why) => self.log.warn(format_args!("an I/O queue cannot continue: {why}")),
            }
        }
        self.queues[number] = None;
        self.ended.get().forget(number);
        if let Some(state) = slot.lock().unwrap_or_else(PoisonError::into_inner).take() {
            if state.queue.is_uncertain() && !self.uncertain.contains(&id) {
                self.uncertain.push(id);
            }
            let (socket, end) = state.into_socket();
            if let Some(TcpEnd::Violation(error)) = end {
                self.log.warn(format_args!("I/O queue {qid} of controller {id} is disconnected: {error}"));
                // Its peer is to see the TermReq.
                if let Ok(connection) = TargetConnection::closing(socket, &self.set, self.next, now) {
                    self.connections.insert(self.next, connection);
                    self.next += 1;
                }
            }
        }
        self.disconnect(id, qid);
        self.advance(id, now)
    }

    /// Stops all queues, and waits for that.
    pub(super) fn suspend_all(&mut self) -> Result<(), NvmeTcpError> {
        for (queue, remote) in self.queues.iter_mut().zip(&self.config.queues) {
            if let Some(queue) = queue.as_mut().filter(|queue| matches!(queue.state, IoQueueState::Running)) {
                queue.state = IoQueueState::Draining(remote.suspend()?);
            }
        }
        for number in 0..self.queues.len() {
            self.drain_queue(number, None)?;
        }
        Ok(())
    }
}
