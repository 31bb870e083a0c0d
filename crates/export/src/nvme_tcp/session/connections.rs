//! Connections of an export's control path: accepted, connected to a controller, ended.

use std::io;
use std::time::Instant;

use blkyard_nvme::fabrics::{FabricsCommand, fabrics_status};
use blkyard_nvme::tcp::{TcpAdminEvent, TcpEnd};
use blkyard_nvme::{Connected, DiscoveryLog, NvmeStatus, Sqe};
use blkyard_sys::EventFlags;

use super::super::connection::{ConnectionPhase, TargetConnection, WaitingConnect};
use super::super::{ADMIN_ENTRIES, TRANSFER_BYTES, discovery_entries};
use super::{ACCEPT_PAUSE, ACCEPTS_MAX, NEW_MAX, NvmeTcpError, NvmeTcpSession};

impl NvmeTcpSession {
    /// Accepts connections.
    pub(super) fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_MAX {
            let accepted = match self.listener.get().accept() {
                Ok(accepted) => TargetConnection::accept(accepted, &self.set, self.next, now),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The peer was faster.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => Err(error),
            };
            match accepted {
                Ok(connection) => {
                    self.connections.insert(self.next, connection);
                    self.next += 1;
                }
                Err(error) => {
                    let cure = "check the limit on open files";
                    self.log.warn(format_args!("a connection could not be accepted: {error}; {cure}"));
                    self.accepts_from = Some(now + ACCEPT_PAUSE);
                    let _ = self.listener.set_events(EventFlags::empty());
                    return;
                }
            }
            let is_new = |phase: &ConnectionPhase| matches!(phase, ConnectionPhase::New | ConnectionPhase::Closing);
            let mut new = self.connections.iter().filter(|(_, one)| is_new(&one.phase)).map(|(token, _)| *token);
            let oldest = new.next();
            if let Some(oldest) = oldest.filter(|_| new.count() >= NEW_MAX) {
                self.connections.remove(&oldest);
            }
        }
    }

    /// Handles the socket of a connection.
    pub(super) fn serve(&mut self, token: u64, now: Instant) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        if !connection.receive() {
            return self.drop_connection(token);
        }
        self.handle(token, now)
    }

    /// Handles the events of a connection.
    pub(super) fn handle(&mut self, token: u64, now: Instant) -> Result<(), NvmeTcpError> {
        while let Some(connection) = self.connections.get_mut(&token)
            && let Some(event) = connection.next_event()
        {
            match event {
                TcpAdminEvent::Started => {}
                TcpAdminEvent::Ended(end) => {
                    if let TcpEnd::Violation(error) = end {
                        self.log.warn(format_args!("{} is disconnected: {error}", connection.peer));
                    }
                    self.end_admin(token, now)?;
                }
                TcpAdminEvent::Command { slot, sqe, data, room } => {
                    self.execute(token, (slot, sqe), data, room, now)?;
                }
            }
        }
        if let Some(connection) = self.connections.get_mut(&token) {
            connection.send();
        }
        Ok(())
    }

    /// Executes a command of a connection.
    pub(super) fn execute(
        &mut self,
        token: u64,
        (slot, sqe): (u16, Sqe),
        data: Vec<u8>,
        room: usize,
        now: Instant,
    ) -> Result<(), NvmeTcpError> {
        let now_ns = self.now_ns(now);
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        let is_fabrics = sqe.opcode() == blkyard_nvme::fabrics::FABRICS_OPCODE;
        let parsed = if is_fabrics { Some(FabricsCommand::parse(&sqe)) } else { None };
        match (&connection.phase, parsed) {
            (_, Some(Err(status))) => connection.respond(slot, status.with_dnr(), 0),
            (ConnectionPhase::New, Some(Ok(FabricsCommand::Connect(command)))) => {
                return self.connect(token, WaitingConnect { slot, command, data }, now);
            }
            (ConnectionPhase::Admin(id), parsed) => {
                let id = *id;
                let Some(association) = self.subsystem.association(id) else { return Ok(()) };
                let controller = &mut association.controller;
                let answer = match parsed {
                    None => {
                        controller.submit(slot, &sqe, data, room, now_ns);
                        return self.advance(id, now);
                    }
                    Some(Ok(FabricsCommand::PropertyGet { size, offset })) => controller.property(size, offset),
                    Some(Ok(FabricsCommand::PropertySet { size, offset, value })) => {
                        controller.set_property(size, offset, value).map(|()| 0)
                    }
                    Some(Ok(FabricsCommand::Disconnect)) => Err(fabrics_status::INVALID_QUEUE_TYPE.with_dnr()),
                    Some(_) => Err(NvmeStatus::COMMAND_SEQUENCE.with_dnr()),
                };
                match answer {
                    Ok(result) => connection.respond(slot, NvmeStatus::SUCCESS, result),
                    Err(status) => connection.respond(slot, status, 0),
                }
                return self.advance(id, now);
            }
            _ => connection.respond(slot, NvmeStatus::COMMAND_SEQUENCE.with_dnr(), 0),
        }
        Ok(())
    }

    /// Handles a Connect.
    pub(super) fn connect(&mut self, token: u64, connect: WaitingConnect, now: Instant) -> Result<(), NvmeTcpError> {
        let now_ns = self.now_ns(now);
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        let WaitingConnect { slot, command, data } = &connect;
        let entries = command.sq_size.saturating_add(1);
        self.subsystem.set_discovery(DiscoveryLog::new(1, &discovery_entries(&self.config.disk, connection.local)));
        match self.subsystem.connect(command, data, now_ns) {
            Err(refusal) => {
                connection.phase = ConnectionPhase::New;
                connection.respond(*slot, refusal.status, refusal.result);
            }
            Ok(Connected::Admin(id)) => {
                if let Err(error) = connection.queue.open(ADMIN_ENTRIES, TRANSFER_BYTES) {
                    self.log.warn(format_args!("{} is not connected: {error}", connection.peer));
                    connection.respond(*slot, NvmeStatus::INTERNAL, 0);
                    self.subsystem.remove(id);
                    return Ok(());
                }
                connection.respond(*slot, NvmeStatus::SUCCESS, id.into());
                if !command.no_flow_control {
                    connection.queue.set_flow_control(entries.into());
                }
                (connection.phase, connection.until) = (ConnectionPhase::Admin(id), None);
                let host = self.subsystem.association(id).map(|association| association.host().to_string());
                self.log.info(format_args!("{}: host {} is connected", connection.peer, host.unwrap_or_default()));
            }
            Ok(Connected::Io(id, connected)) => self.connect_queue(token, (id, connected), &connect),
            Ok(Connected::Replaces(id)) => {
                connection.phase = ConnectionPhase::Connecting(connect);
                self.end_association(id, now)?;
            }
        }
        Ok(())
    }

    /// Closes a connection at once.
    pub(super) fn drop_connection(&mut self, token: u64) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.remove(&token) else { return Ok(()) };
        match connection.phase {
            ConnectionPhase::Admin(id) => self.end_association(id, Instant::now()),
            _ => Ok(()),
        }
    }

    /// Ends a connection so that its peer sees why.
    pub(super) fn end_admin(&mut self, token: u64, now: Instant) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        let phase = std::mem::replace(&mut connection.phase, ConnectionPhase::Closing);
        connection.close(now);
        match phase {
            ConnectionPhase::Admin(id) => self.end_association(id, now),
            _ => Ok(()),
        }
    }

    /// Tries the Connects that wait again.
    pub(super) fn reconnect(&mut self, now: Instant) -> Result<(), NvmeTcpError> {
        let waits = |one: &TargetConnection| matches!(one.phase, ConnectionPhase::Connecting(_));
        let waiting: Vec<_> = self.connections.iter().filter(|(_, one)| waits(one)).map(|(token, _)| *token).collect();
        for token in waiting {
            let Some(connection) = self.connections.get_mut(&token) else { continue };
            let phase = std::mem::replace(&mut connection.phase, ConnectionPhase::New);
            if let ConnectionPhase::Connecting(connect) = phase {
                self.connect(token, connect, now)?;
            }
            if let Some(connection) = self.connections.get_mut(&token) {
                connection.send();
            }
        }
        Ok(())
    }
}
