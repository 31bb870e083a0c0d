//! Handover of an export with all its associations: plain data beside bytes and descriptors.
//!
//! The export is handed over at rest: no bio is in flight, and associations that were ending have ended. Of each
//! connection the next process gets the socket, what was received and not answered, and what is to be sent. So the peer
//! sees a pause. Commands that were not answered are executed again from their start, which may have been executed in
//! part only.
//!
//! The listening socket is the same in both processes, so no connect is refused. Connections that wait for the end of
//! their peer are left behind, and hosts that are being authenticated connect again, as do those over TLS: the keys of
//! their connections stay in the first process.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use blkyard_mem::Region;
use blkyard_nvme::tcp::{TcpAdminQueue, TcpDataMemory, TcpIoQueue, TcpQueueSnapshot, TcpTargetQueue};
use blkyard_nvme::{AnaSnapshot, SubsystemSnapshot};
use serde::{Deserialize, Serialize};

use super::super::clock::ControllerClock;
use super::super::connection::{ConnectionPhase, TargetConnection};
use super::super::queue::TcpQueueState;
use super::super::socket::BufferedSocket;
use super::super::{ADMIN_ENTRIES, ENTRIES_MAX, NvmeTcpExport, NvmeTcpServer, TRANSFER_BYTES, queue_options};
use super::resets::EndedController;
use super::{IoQueueState, NvmeTcpError, NvmeTcpSession};
use crate::core::{ControlLoop, ExportLog, Server, Taking};

/// Version of [`NvmeTcpRecord`], incremented by every incompatible change.
pub const NVME_TCP_STATE_VERSION: u32 = 1;

/// An export at rest, without its listening socket.
#[derive(Debug)]
pub struct NvmeTcpState {
    /// Start of its clock: timers of associations go on during the handover.
    pub began: Instant,
    /// Its state.
    pub record: NvmeTcpRecord,
    /// Descriptors: memory with the bytes of all connections, and their sockets.
    pub files: Vec<OwnedFd>,
}

/// State of an export beside its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub struct NvmeTcpRecord {
    subsystem: SubsystemSnapshot,
    ended: Vec<EndedController>,
    ana: Option<AnaSnapshot>,
    connections: Vec<ConnectionRecord>,
    /// Bytes of all connections.
    bytes: u64,
}

/// What a connection is.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum ConnectionRole {
    /// Not connected to a controller.
    New,
    /// The admin queue of this controller.
    Admin(u16),
    /// An I/O queue.
    Io { controller: u16, qid: u16, entries: u16, has_flow_control: bool, is_uncertain: bool },
}

/// A connection. Its bytes: those of the queue, received ones, ones to be sent.
#[derive(Debug, Serialize, Deserialize)]
struct ConnectionRecord {
    role: ConnectionRole,
    peer: Option<SocketAddr>,
    queue: TcpQueueSnapshot,
    unread: u64,
    /// Bytes of the stream to be dropped behind those.
    dropped: u64,
    unsent: u64,
}

/// The connections of an export as they are saved.
struct SavedConnections {
    records: Vec<ConnectionRecord>,
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
}

impl SavedConnections {
    /// Adds a connection; `queue` adds the bytes of its queue.
    fn add(
        &mut self,
        role: ConnectionRole,
        peer: Option<SocketAddr>,
        socket: &BufferedSocket,
        queue: impl FnOnce(&mut Vec<u8>) -> Option<TcpQueueSnapshot>,
    ) -> Result<(), String> {
        let queue = queue(&mut self.bytes).ok_or("a connection is not at rest")?;
        let unread = socket.unread();
        let skipped = unread.len().min(queue.dropped() as usize);
        let (unread, unsent) = (&unread[skipped..], socket.unsent());
        self.bytes.extend_from_slice(unread);
        self.bytes.extend_from_slice(unsent);
        let dropped = u64::from(queue.dropped()) - skipped as u64 + socket.dropped() as u64;
        let (unread, unsent) = (unread.len() as u64, unsent.len() as u64);
        self.records.push(ConnectionRecord { role, peer, queue, unread, dropped, unsent });
        self.files.push(socket.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?);
        Ok(())
    }
}

impl NvmeTcpSession {
    /// Brings the export to rest.
    pub(super) fn rest(&mut self) -> Result<(), NvmeTcpError> {
        loop {
            let now = self.clock.now();
            // What other ports ask for, before they rest.
            self.read_mail(now)?;
            self.end_authentications(now)?;
            self.end_encrypted()?;
            while !self.flushes.is_empty() {
                self.finish_flush(0, None)?;
            }
            self.suspend_all()?;
            for number in 0..self.queues.len() {
                let Some(queue) = &mut self.queues[number] else { continue };
                let slot = queue.slot.lock().unwrap_or_else(PoisonError::into_inner);
                queue.is_ending |= slot.as_ref().is_none_or(|state| state.queue.end_reason().is_some());
                drop(slot);
                if queue.is_ending {
                    self.finish_queue(number, now)?;
                }
            }
            self.remove_ended(now)?;
            let are_stopped = self.queues.iter().flatten().all(|queue| matches!(queue.state, IoQueueState::Stopped));
            if self.flushes.is_empty() && self.ending.is_empty() && are_stopped {
                return Ok(());
            }
        }
    }

    /// Ends the associations over encrypted connections, whose keys only this process has: their hosts connect again.
    fn end_encrypted(&mut self) -> Result<(), NvmeTcpError> {
        let encrypted = self.connections.iter().filter(|(_, connection)| connection.is_encrypted());
        for token in encrypted.map(|(token, _)| *token).collect::<Vec<_>>() {
            self.drop_connection(token)?;
        }
        Ok(())
    }

    /// Saves the state of an export at rest, which can continue unchanged.
    pub(super) fn save(&mut self) -> Result<NvmeTcpState, String> {
        let mut saved = SavedConnections { records: Vec::new(), bytes: Vec::new(), files: Vec::new() };
        for connection in self.connections.values_mut() {
            connection.collect();
            let role = match connection.phase {
                ConnectionPhase::New | ConnectionPhase::Connecting(_) => ConnectionRole::New,
                ConnectionPhase::Admin(id) => ConnectionRole::Admin(id),
                // None is left of the former.
                ConnectionPhase::Authenticating(..) | ConnectionPhase::Closing => continue,
            };
            let queue = &connection.queue;
            saved.add(role, Some(connection.peer), connection.socket(), |bytes| queue.snapshot(bytes))?;
        }
        for queue in self.queues.iter().flatten() {
            let mut slot = queue.slot.lock().unwrap_or_else(PoisonError::into_inner);
            let state = slot.as_mut().ok_or("a queue is not stopped")?;
            state.collect();
            let io = &state.queue;
            let role = ConnectionRole::Io {
                controller: queue.controller,
                qid: queue.qid,
                entries: io.entries(),
                has_flow_control: io.has_flow_control(),
                is_uncertain: io.is_uncertain(),
            };
            saved.add(role, None, state.socket(), |bytes| io.snapshot(bytes))?;
        }
        let SavedConnections { records, bytes, files: sockets } = saved;
        let said = |error: io::Error| error.to_string();
        let memory = Region::shared(bytes.len().max(1)).map_err(said)?;
        if let Some(span) = memory.span(0, bytes.len()) {
            span.copy_from_slice(&bytes);
        }
        let Some((file, _)) = memory.file() else { unreachable!("shared memory is a file") };
        let mut files = vec![file.try_clone_to_owned().map_err(said)?];
        files.extend(sockets);
        let record = NvmeTcpRecord {
            subsystem: self.subsystem.snapshot().map_err(|error| error.to_string())?,
            ended: self.resets.save(),
            ana: self.config.disk.ana.as_ref().map(|ana| ana.states().snapshot()),
            connections: records,
            bytes: bytes.len() as u64,
        };
        Ok(NvmeTcpState { began: self.clock.began(), record, files })
    }

    /// Continues at rest, here or after a handover: starts the queues, and handles what was received.
    pub(super) fn proceed(&mut self) -> Result<(), NvmeTcpError> {
        let now = self.clock.now();
        for number in 0..self.queues.len() {
            self.finish_queue(number, now)?;
        }
        let tokens: Vec<_> = self.connections.keys().copied().collect();
        for token in tokens {
            self.handle(token, now)?;
        }
        self.drain_from(now);
        Ok(())
    }

    /// An export that another process has handed over, at rest.
    ///
    /// # Errors
    /// The state is invalid for this export, or the system has no resources left.
    fn restore(
        listener: TcpListener,
        config: NvmeTcpExport,
        state: NvmeTcpState,
        log: &Arc<ExportLog>,
    ) -> Result<NvmeTcpSession, String> {
        let said = |error: io::Error| error.to_string();
        let NvmeTcpState { began, record, files } = state;
        let mut session = NvmeTcpSession::new(listener, config, log).map_err(said)?;
        session.clock = ControllerClock::since(began);
        session.subsystem.restore(&record.subsystem).map_err(|error| error.to_string())?;
        session.resets.restore(&record.ended);
        if let (Some(ana), Some(saved)) = (&session.config.disk.ana, &record.ana)
            && !ana.states().restore(saved)
        {
            return Err("the state of an ANA group is invalid".into());
        }
        let mut files = files.into_iter();
        let file = files.next().ok_or("descriptors are missing")?;
        let mut all = vec![0; usize::try_from(record.bytes).map_err(|_| "too many bytes")?];
        if !all.is_empty() {
            let memory = Region::map_file(file.as_fd(), 0, record.bytes).map_err(|error| error.to_string())?;
            memory.span(0, all.len()).ok_or("bytes are missing")?.copy_to_slice(&mut all);
        }
        let mut bytes = &all[..];
        for connection in &record.connections {
            let socket = files.next().ok_or("descriptors are missing")?;
            let socket = BufferedSocket::new(TcpStream::from(socket)).map_err(said)?;
            session.restore_connection(connection, socket, &mut bytes)?;
        }
        if files.next().is_some() || !bytes.is_empty() {
            return Err("it has surplus descriptors or bytes".into());
        }
        Ok(session)
    }

    fn restore_connection(
        &mut self,
        saved: &ConnectionRecord,
        mut socket: BufferedSocket,
        bytes: &mut &[u8],
    ) -> Result<(), String> {
        const INVALID: &str = "the state of a connection is invalid";
        let (now, said) = (self.clock.now(), |error: io::Error| error.to_string());
        let rest = |socket: &mut BufferedSocket, bytes: &mut &[u8]| -> Result<(), String> {
            let mut input = saved.queue.take_input(bytes).ok_or(INVALID)?.to_vec();
            input.extend(take(bytes, saved.unread)?);
            let output = take(bytes, saved.unsent)?;
            socket.restore(&input, saved.dropped as usize, &output);
            Ok(())
        };
        let (phase, open) = match saved.role {
            ConnectionRole::New => (ConnectionPhase::New, None),
            ConnectionRole::Admin(id) => (ConnectionPhase::Admin(id), Some((ADMIN_ENTRIES, TRANSFER_BYTES))),
            ConnectionRole::Io { controller, qid, entries, has_flow_control, is_uncertain } => {
                let number = self.queues.iter().position(Option::is_none).ok_or("it has fewer queues")?;
                let connected = self.subsystem.association(controller).ok_or(INVALID)?.controller.connect_queue(qid);
                let connected = connected.map_err(|_| INVALID)?;
                if !(2..=ENTRIES_MAX).contains(&entries) {
                    return Err(INVALID.into());
                }
                let options = queue_options(entries, has_flow_control);
                let offset = number as u64 * self.queue_bytes;
                let memory =
                    TcpDataMemory { table: Arc::clone(&self.table), region: 0, offset, bytes: self.queue_bytes };
                let tcp = TcpTargetQueue::restore(TargetConnection::OPTIONS, &saved.queue).ok_or(INVALID)?;
                let mut queue = TcpIoQueue::new(tcp, connected, options, memory);
                queue.restore_commands(&saved.queue, bytes).ok_or(INVALID)?;
                queue.set_uncertain(is_uncertain);
                rest(&mut socket, bytes)?;
                let state = TcpQueueState::new(socket, queue).map_err(said)?;
                // A failure must be found while the other process still serves.
                self.config.queues[number].open()?;
                let slot = Arc::new(Mutex::new(Some(Box::new(state))));
                self.add_queue(number, (controller, qid), &slot, IoQueueState::Stopped);
                return Ok(());
            }
        };
        let is_known =
            if let ConnectionPhase::Admin(id) = phase { self.subsystem.association(id).is_some() } else { true };
        let peer = saved.peer.filter(|_| is_known).ok_or(INVALID)?;
        let queue = TcpAdminQueue::restore(TargetConnection::OPTIONS, open, &saved.queue, bytes).ok_or(INVALID)?;
        rest(&mut socket, bytes)?;
        let addresses = [socket.stream().local_addr().map_err(said)?, peer];
        let connection = TargetConnection::with(socket, addresses, queue, &self.set, self.next, now);
        let mut connection = connection.map_err(said)?;
        if open.is_some() {
            (connection.phase, connection.until) = (phase, None);
        }
        self.connections.insert(self.next, connection);
        self.next += 1;
        Ok(())
    }
}

/// Takes so many bytes.
fn take(bytes: &mut &[u8], len: u64) -> Result<Vec<u8>, String> {
    let (taken, rest) = bytes.split_at_checked(len as usize).ok_or("bytes are missing")?;
    let taken = taken.to_vec();
    *bytes = rest;
    Ok(taken)
}

impl NvmeTcpServer {
    /// Prepares to continue an export that another process has handed over, with its listening socket. Before
    /// [`Taking::go`], no request is served and the other process is not affected.
    ///
    /// # Errors
    /// The state is invalid for this export, or the system has no memory, thread or descriptor left.
    pub fn take_over_listening(
        control: &ControlLoop,
        listener: TcpListener,
        config: NvmeTcpExport,
        (offered, wce): (u16, bool),
        state: NvmeTcpState,
    ) -> Result<Taking<NvmeTcpSession>, String> {
        Server::take_over_session(control, config, offered, wce, |config, log| {
            NvmeTcpSession::restore(listener, config, state, log).map(|session| (session, ()))
        })
    }
}
