//! Connections of an export's control path: accepted, connected to a controller, ended.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use blkyard_nvme::fabrics::{
    CONNECT_AUTHENTICATION, ConnectCommand, ConnectData, DISCOVERY_NQN, FabricsCommand, fabrics_status,
};
use blkyard_nvme::tcp::{TcpAdminEvent, TcpEnd};
use blkyard_nvme::tls::TlsHosts;
use blkyard_nvme::{Connected, NvmeStatus, Sqe};
use blkyard_sys::EventFlags;
use blkyard_tls::TlsError;
use rustix::process::{Resource, getrlimit};

use super::super::connection::{AfterAuth, ConnectionPhase, TargetConnection, WaitingConnect};
use super::super::socket::BufferedSocket;
use super::super::{ADMIN_ENTRIES, TRANSFER_BYTES, discovery_entries};
use super::{ACCEPT_PAUSE, ACCEPTS_MAX, NEW_MAX, NvmeTcpError, NvmeTcpSession};
use crate::core::ExportLog;

/// Room for the data of an answer while an I/O queue is being authenticated, bytes: what Linux asks for.
const AUTH_ROOM_BYTES: u32 = 4096;

impl NvmeTcpSession {
    /// Accepts connections.
    pub(super) fn accept(&mut self, now: Instant) -> Result<(), NvmeTcpError> {
        for _ in 0..ACCEPTS_MAX {
            let accepted = match self.listener.get().accept() {
                Ok((stream, peer)) => self.admit(stream, peer, now),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // The peer was faster.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => Err(error),
            };
            if let Err(error) = accepted {
                let cure = "check the limit on open files";
                self.log.warn(format_args!("a connection could not be accepted: {error}; {cure}"));
                self.accepts_from = Some(now + ACCEPT_PAUSE);
                let _ = self.listener.set_events(EventFlags::empty());
                return Ok(());
            }
            // Who is not authenticated may be anybody.
            let is_new =
                |phase: &ConnectionPhase| !matches!(phase, ConnectionPhase::Connecting(_) | ConnectionPhase::Admin(_));
            let mut new = self.connections.iter().filter(|(_, one)| is_new(&one.phase)).map(|(token, _)| *token);
            let oldest = new.next();
            if let Some(oldest) = oldest.filter(|_| new.count() >= new_max()) {
                self.drop_connection(oldest)?;
            }
        }
        Ok(())
    }

    fn admit(&mut self, stream: TcpStream, peer: SocketAddr, now: Instant) -> io::Result<()> {
        BufferedSocket::set_options(&stream)?;
        let local = stream.local_addr()?;
        self.add_connection(stream, [local, peer], now)
    }

    /// Adds a connection, local and peer's address.
    pub(super) fn add_connection(
        &mut self,
        stream: TcpStream,
        addresses: [SocketAddr; 2],
        now: Instant,
    ) -> io::Result<()> {
        let tls = self.config.disk.tls.as_ref();
        let connection = TargetConnection::accept((stream, addresses), tls, &self.set, self.next, now)?;
        self.connections.insert(self.next, connection);
        self.next += 1;
        Ok(())
    }

    /// Handles the socket of a connection.
    pub(super) fn serve(&mut self, token: u64, now: Instant) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        if !connection.receive() {
            let (peer, error) =
                (connection.peer, connection.take_tls_error().filter(|error| *error != TlsError::Ended));
            if let Some(error) = error {
                self.log.warn(format_args!(
                    "{peer} is disconnected: TLS: {error}; see whether its key is in the file of tls_keys=, and of the \
                     same derivation"
                ));
            }
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
                return self.connect(token, WaitingConnect { slot, command, data, answer: None }, now);
            }
            (
                ConnectionPhase::Admin(id) | ConnectionPhase::Authenticating(id, _),
                Some(Ok(command @ (FabricsCommand::AuthSend(_) | FabricsCommand::AuthReceive(_)))),
            ) => {
                let id = *id;
                return self.authenticate(token, id, (slot, command), &data, room, now);
            }
            (ConnectionPhase::Authenticating(..), _) => {
                connection.respond(slot, fabrics_status::AUTHENTICATION_REQUIRED.with_dnr(), 0);
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
        let WaitingConnect { slot, command, data, answer } = &connect;
        if let Some(why) = self.config.disk.tls.as_ref().and_then(|tls| why_not_encrypted(connection, data, tls)) {
            self.log.warn(format_args!("{} is refused: {why}", connection.peer));
            connection.phase = ConnectionPhase::New;
            connection.respond(*slot, fabrics_status::INVALID_HOST.with_dnr(), 0);
            return Ok(());
        }
        let is_authenticated = answer.is_some();
        self.subsystem.set_discovery(discovery_entries(&self.config.disk, connection.local));
        match self.subsystem.connect(command, data, now_ns) {
            Err(refusal) => {
                connection.phase = ConnectionPhase::New;
                connection.respond(*slot, refusal.status, refusal.result);
            }
            Ok(Connected::Admin(id)) if is_authenticated => {
                if let Some(answer) = connect.answer {
                    connection.queue.complete(answer);
                }
                self.opened(token, id);
            }
            Ok(Connected::Admin(id)) => {
                let auth = self.subsystem.authentication(id);
                let result = u64::from(id) | auth.as_ref().map_or(0, |_| CONNECT_AUTHENTICATION);
                if !open(connection, &self.log, (*slot, result), command) {
                    self.subsystem.remove(id);
                    return Ok(());
                }
                match auth {
                    Some(auth) => connection.authenticate(auth, id, AfterAuth::Admin, now),
                    None => self.opened(token, id),
                }
            }
            Ok(Connected::Io(id, connected)) => match self.subsystem.authentication(id) {
                Some(auth) => {
                    let result = u64::from(id) | CONNECT_AUTHENTICATION;
                    if open(connection, &self.log, (*slot, result), command) {
                        connection.authenticate(auth, id, AfterAuth::Io(connected, connect), now);
                    } else {
                        self.disconnect(id, connected.qid);
                    }
                }
                None => self.connect_queue(token, (id, connected), &connect, false),
            },
            // Nobody ends an association of others: it goes on until the host is authenticated.
            Ok(Connected::Replaces(id)) if !is_authenticated && let Some(auth) = self.subsystem.authentication(id) => {
                let result = u64::from(id) | CONNECT_AUTHENTICATION;
                if open(connection, &self.log, (*slot, result), command) {
                    connection.authenticate(auth, id, AfterAuth::Replace(connect), now);
                }
            }
            Ok(Connected::Replaces(id)) => {
                connection.phase = ConnectionPhase::Connecting(connect);
                self.end_association(id, now)?;
            }
        }
        Ok(())
    }

    /// A connection is the admin queue of this controller.
    pub(super) fn opened(&mut self, token: u64, id: u16) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        (connection.phase, connection.until) = (ConnectionPhase::Admin(id), None);
        let host = self.subsystem.association(id).map(|association| association.host().to_string());
        self.log.info(format_args!("{}: host {} is connected", connection.peer, host.unwrap_or_default()));
    }

    /// Closes a connection at once.
    pub(super) fn drop_connection(&mut self, token: u64) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.remove(&token) else { return Ok(()) };
        self.left(connection.phase, self.clock.now())
    }

    /// A connection in this phase has ended.
    fn left(&mut self, phase: ConnectionPhase, now: Instant) -> Result<(), NvmeTcpError> {
        match phase {
            ConnectionPhase::Admin(id) => return self.end_association(id, now),
            ConnectionPhase::Authenticating(id, then) => match *then {
                AfterAuth::Admin => return self.end_association(id, now),
                AfterAuth::Io(connected, _) => self.disconnect(id, connected.qid),
                AfterAuth::Replace(_) => {}
            },
            _ => {}
        }
        Ok(())
    }

    /// Ends a connection so that its peer sees why.
    pub(super) fn end_admin(&mut self, token: u64, now: Instant) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        let phase = std::mem::replace(&mut connection.phase, ConnectionPhase::Closing);
        connection.close(now);
        self.left(phase, now)
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

/// Connections that are not connected to a controller, at most: so many that those of controllers, and the queues that
/// these start, have descriptors left.
fn new_max() -> usize {
    let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok());
    files.map_or(NEW_MAX, |files| NEW_MAX.min(files / 4))
}

/// Why the host that a Connect names is not the one with whose key its connection is encrypted, if it is not. Who wants
/// the discovery service only needs no key.
fn why_not_encrypted(connection: &TargetConnection, data: &[u8], tls: &TlsHosts) -> Option<String> {
    // Data that is none is refused by the subsystem.
    let names = ConnectData::parse(data.try_into().ok()?).ok()?;
    let host = names.host;
    match connection.tls_identity() {
        Some(identity) if tls.host(&identity) == Some(&host) => None,
        Some(identity) => Some(format!("it has the key of {identity:?}, and says that it is host {host}")),
        None if names.subsystem.as_str() == DISCOVERY_NQN || !tls.contains(&host) => None,
        None => Some(format!("host {host} is to use TLS: connect with its key (nvme connect --tls)")),
    }
}

/// Makes a connection a queue that answers commands, and answers its Connect. False if the system has no memory left,
/// which the host is told.
fn open(
    connection: &mut TargetConnection,
    log: &ExportLog,
    (slot, result): (u16, u64),
    command: &ConnectCommand,
) -> bool {
    let (slots, bytes) = if command.qid == 0 { (ADMIN_ENTRIES, TRANSFER_BYTES) } else { (1, AUTH_ROOM_BYTES) };
    if let Err(error) = connection.queue.open(slots, bytes) {
        log.warn(format_args!("{} is not connected: {error}", connection.peer));
        connection.respond(slot, NvmeStatus::INTERNAL, 0);
        return false;
    }
    connection.respond(slot, NvmeStatus::SUCCESS, result);
    if !command.no_flow_control {
        connection.queue.set_flow_control(u32::from(command.sq_size) + 1);
    }
    true
}
