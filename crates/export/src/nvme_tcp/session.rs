//! The control path of an NVMe/TCP export: its listening socket, connections, associations and I/O queues.
//!
//! It is the only session of its export, and lasts as long. A step handles the sockets that are ready, and never waits
//! for a peer. It waits for a lane only to start a queue; queues that drain are looked at again later, so a device that
//! hangs holds up no other host.
//!
//! An association ends with its admin connection, when its keep-alive timer expires, and before the same host connects
//! to the same controller again. Then its connections are closed and its commands dropped, unless a device has them.
//! The controller is gone when the last of those is back.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blkyard_mem::{DmaMapping, Region, RegionTable};
use blkyard_mq::DeviceInfo;
use blkyard_nvme::fabrics::{FabricsCommand, fabrics_status};
use blkyard_nvme::tcp::{TcpAdminEvent, TcpDataMemory, TcpEnd, TcpIoQueue};
use blkyard_nvme::{
    AnaGroup, Connected, ConnectedQueue, ControllerQueueCommand, ControllerQueueReply, ControllerRequest, DiscoveryLog,
    FabricsSubsystem, NvmeStatus, Sqe,
};
use blkyard_sys::{Epoll, EventFlags, Registered};

use super::connection::{ConnectionPhase, TargetConnection, WaitingConnect};
use super::queue::{EndedQueues, NvmeTcpQueueSession, NvmeTcpQueueSetup, TcpQueueSlot, TcpQueueState};
use super::{
    ADMIN_ENTRIES, ENTRIES_MAX, NvmeTcpAna, NvmeTcpDisk, NvmeTcpExport, TRANSFER_BYTES, discovery_entries,
    queue_options, subsystem_options,
};
use crate::core::{
    Accepted, AwaitedFd, Changed, ExportConfig, ExportLog, FrontEndSession, LaneGone, PendingFlush, SessionEnd,
    SessionStep, Suspension,
};

/// Connections that are not connected to a controller, at most. A further one closes the oldest.
const NEW_MAX: usize = 256;
/// Connections that wait to be accepted, at most: the maximum of most systems.
const BACKLOG: i32 = 4096;
/// Connections accepted in one step.
const ACCEPTS_MAX: usize = 64;
/// Pause after a connection could not be accepted, most likely for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Interval of looks at queues that drain or flush.
const DRAIN_POLL: Duration = Duration::from_millis(2);
/// Tokens of the listening socket, the notes of queues, and changes of ANA states. Connections have the next ones.
const LISTENER: u64 = 0;
const QUEUES: u64 = 1;
const ANA: u64 = 2;

/// Why an NVMe/TCP export ends.
#[derive(Debug, thiserror::Error)]
pub enum NvmeTcpError {
    /// A lane has ended.
    #[error(transparent)]
    Lane(#[from] LaneGone),
    /// The export cannot wait.
    #[error("its connections cannot be waited for: {0}")]
    Wait(#[from] io::Error),
}

/// State of an export for inspection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeTcpView {
    /// Address of the listening socket.
    pub address: Option<SocketAddr>,
    /// NQN of the subsystem.
    pub nqn: String,
    /// Hosts with an association, by controller identifier; discovery services are left out.
    pub hosts: Vec<(u16, String)>,
    /// I/O queues that are connected.
    pub queues: usize,
    /// ANA groups with their states and namespaces.
    pub ana: Vec<AnaGroup>,
    /// Bytes of memory for the data of commands.
    pub memory_bytes: u64,
}

/// State of a client queue with a connection.
enum IoQueueState {
    Stopped,
    Running,
    Draining(Suspension<()>),
}

/// A client queue with a connection.
struct ServedConnection {
    controller: u16,
    qid: u16,
    slot: TcpQueueSlot,
    state: IoQueueState,
    /// Whether the connection ends once the queue has drained.
    is_ending: bool,
}

/// A flush that a controller waits for.
struct RunningFlush {
    controller: u16,
    number: u64,
    queue: usize,
    pending: PendingFlush,
    /// Whether a session without a connection runs for it.
    has_session: bool,
}

/// The control path of an export.
pub struct NvmeTcpSession {
    config: NvmeTcpExport,
    log: Arc<ExportLog>,
    set: Arc<Epoll>,
    listener: Registered<TcpListener>,
    address: SocketAddr,
    subsystem: FabricsSubsystem,
    connections: BTreeMap<u64, TargetConnection>,
    next: u64,
    /// By client queue.
    queues: Vec<Option<ServedConnection>>,
    /// Controllers whose association has ended, while their queues drain.
    ending: Vec<u16>,
    flushes: Vec<RunningFlush>,
    ended: Registered<Arc<EndedQueues>>,
    /// Kept registered.
    _ana: Option<Registered<Arc<NvmeTcpAna>>>,
    table: Arc<RegionTable>,
    queue_bytes: u64,
    /// Keeps the memory mapped for the devices.
    _mappings: Vec<DmaMapping>,
    began: Instant,
    accepts_from: Option<Instant>,
    drain_at: Option<Instant>,
}

impl NvmeTcpSession {
    /// Serves on a listening socket.
    pub(super) fn new(
        listener: TcpListener,
        config: NvmeTcpExport,
        log: &Arc<ExportLog>,
    ) -> io::Result<NvmeTcpSession> {
        listener.set_nonblocking(true)?;
        // More connections than the default at the same time: a peer that finds no room tries again after a second.
        rustix::net::listen(&listener, BACKLOG)?;
        let address = listener.local_addr()?;
        let set = Arc::new(Epoll::new()?);
        let listener = set.register(listener, LISTENER, EventFlags::IN)?;
        let queues = config.queues.len();
        let ended = set.register(Arc::new(EndedQueues::new(queues)?), QUEUES, EventFlags::IN)?;
        let ana = config.disk.ana.as_ref().map(|ana| set.register(Arc::clone(ana), ANA, EventFlags::IN));
        // Devices in other processes map it, too. Pages that no command has used take no memory.
        let queue_bytes = TcpIoQueue::memory_bytes(&queue_options(ENTRIES_MAX, true));
        let region = Region::shared(queue_bytes as usize * queues)?;
        let mappings = config.domains.iter().map(|domain| domain.map(vec![Arc::clone(&region)])).collect();
        let options = subsystem_options(&config.disk);
        let subsystem = FabricsSubsystem::new(options, config.disk.table());
        Ok(NvmeTcpSession {
            queues: (0..queues).map(|_| None).collect(),
            config,
            log: Arc::clone(log),
            set,
            listener,
            address,
            subsystem,
            connections: BTreeMap::new(),
            next: ANA + 1,
            ending: Vec::new(),
            flushes: Vec::new(),
            ended,
            _ana: ana.transpose()?,
            table: Arc::new(RegionTable::new(vec![region])),
            queue_bytes,
            _mappings: mappings,
            began: Instant::now(),
            accepts_from: None,
            drain_at: None,
        })
    }

    fn now_ns(&self, now: Instant) -> u64 {
        (now - self.began).as_nanos() as u64
    }

    fn work(&mut self) -> Result<bool, NvmeTcpError> {
        let now = Instant::now();
        let ready = self.set.wait(now, Some(now))?;
        let is_busy = !ready.is_empty();
        for ready in ready {
            match ready.token {
                LISTENER => self.accept(now),
                QUEUES => {
                    for number in self.ended.get().take() {
                        self.end_queue(number)?;
                    }
                }
                // The associations are looked at below.
                ANA => self.tell_ana(),
                token => self.serve(token, now)?,
            }
        }
        if self.accepts_from.is_some_and(|from| from <= now) {
            self.accepts_from = None;
            // Without memory for that, no connection is accepted until the next pause ends.
            let _ = self.listener.set_events(EventFlags::IN);
            self.accept(now);
        }
        let due = |connection: &TargetConnection| connection.until.is_some_and(|until| until <= now);
        let late: Vec<_> = self.connections.iter().filter(|(_, one)| due(one)).map(|(token, _)| *token).collect();
        for token in late {
            self.drop_connection(token)?;
        }
        let expired: Vec<_> = self.subsystem.associations().map(|(id, _)| id).collect();
        for id in expired {
            self.advance(id, now)?;
        }
        self.drain(now)?;
        Ok(is_busy)
    }

    /// Notifies the hosts of changed ANA states.
    fn tell_ana(&mut self) {
        if let Some(ana) = &self.config.disk.ana {
            ana.take_changed();
        }
        self.subsystem.ana_changed();
    }

    /// Accepts connections.
    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_MAX {
            let accepted = match self.listener.get().accept() {
                Ok((stream, _)) => TargetConnection::accept(stream, &self.set, self.next, now),
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
    fn serve(&mut self, token: u64, now: Instant) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        if !connection.receive() {
            return self.drop_connection(token);
        }
        self.handle(token, now)
    }

    /// Handles the events of a connection.
    fn handle(&mut self, token: u64, now: Instant) -> Result<(), NvmeTcpError> {
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
    fn execute(
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
    fn connect(&mut self, token: u64, connect: WaitingConnect, now: Instant) -> Result<(), NvmeTcpError> {
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

    /// Starts an I/O queue.
    fn connect_queue(&mut self, token: u64, (id, connected): (u16, ConnectedQueue), connect: &WaitingConnect) {
        let qid = connected.qid;
        let Some(number) = self.queues.iter().position(Option::is_none) else {
            self.disconnect(id, qid);
            if let Some(connection) = self.connections.get_mut(&token) {
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
        queue.accept(connect.slot, id);
        let run = TcpQueueState::new(socket, queue).map_err(|error| error.to_string()).and_then(|state| {
            let slot: TcpQueueSlot = Arc::new(Mutex::new(Some(Box::new(state))));
            let state = IoQueueState::Running;
            self.queues[number] =
                Some(ServedConnection { controller: id, qid, slot: Arc::clone(&slot), state, is_ending: false });
            let setup = self.setup(number, Some(slot));
            self.config.queues[number].run(setup).unwrap_or_else(|gone| Err(gone.to_string()))
        });
        if let Err(why) = run {
            self.log.warn(format_args!("{peer}: its I/O queue {qid} cannot run: {why}"));
            self.queues[number] = None;
            self.disconnect(id, qid);
        }
    }

    fn setup(&self, number: usize, slot: Option<TcpQueueSlot>) -> NvmeTcpQueueSetup {
        NvmeTcpQueueSetup {
            name: format!("{}, queue {number}", self.config.name),
            number,
            log: Arc::clone(&self.log),
            slot,
            table: Arc::clone(&self.table),
            ended: Arc::clone(self.ended.get()),
        }
    }

    /// An I/O queue of a controller is gone.
    fn disconnect(&mut self, id: u16, qid: u16) {
        if let Some(association) = self.subsystem.association(id) {
            association.controller.reply(qid, ControllerQueueReply::Stopped);
        }
    }

    /// The connection of a client queue has ended: the queue drains.
    fn end_queue(&mut self, number: usize) -> Result<(), NvmeTcpError> {
        let Some(Some(queue)) = self.queues.get_mut(number) else { return Ok(()) };
        queue.is_ending = true;
        if let IoQueueState::Running = queue.state {
            queue.state = IoQueueState::Draining(self.config.queues[number].suspend()?);
        }
        self.drain_at = Some(Instant::now());
        Ok(())
    }

    /// Closes a connection at once.
    fn drop_connection(&mut self, token: u64) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.remove(&token) else { return Ok(()) };
        match connection.phase {
            ConnectionPhase::Admin(id) => self.end_association(id, Instant::now()),
            _ => Ok(()),
        }
    }

    /// Ends a connection so that its peer sees why.
    fn end_admin(&mut self, token: u64, now: Instant) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        let phase = std::mem::replace(&mut connection.phase, ConnectionPhase::Closing);
        connection.close(now);
        match phase {
            ConnectionPhase::Admin(id) => self.end_association(id, now),
            _ => Ok(()),
        }
    }

    /// Ends an association: no further command of it is executed.
    fn end_association(&mut self, id: u16, now: Instant) -> Result<(), NvmeTcpError> {
        if self.ending.contains(&id) || self.subsystem.association(id).is_none() {
            return Ok(());
        }
        self.ending.push(id);
        for connection in self.connections.values_mut() {
            if matches!(connection.phase, ConnectionPhase::Admin(of) if of == id) {
                connection.close(now);
            }
        }
        for number in 0..self.queues.len() {
            if self.queues[number].as_ref().is_some_and(|queue| queue.controller == id) {
                self.end_queue(number)?;
            }
        }
        self.drain_at = Some(now);
        Ok(())
    }

    /// Has a controller work, and passes on its answers and requests.
    fn advance(&mut self, id: u16, now: Instant) -> Result<(), NvmeTcpError> {
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
        if is_expired && !self.ending.contains(&id) {
            let host = self.subsystem.association(id).map(|association| association.host().to_string());
            let host = host.unwrap_or_default();
            self.log.warn(format_args!("host {host} is disconnected: its keep-alive timer has expired"));
            self.end_association(id, now)?;
        }
        Ok(())
    }

    /// Executes a request of a controller.
    fn obey(&mut self, id: u16, request: ControllerRequest) -> Result<(), NvmeTcpError> {
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

    fn put_back(&self, number: usize, state: Box<TcpQueueState>) {
        if let Some(queue) = &self.queues[number] {
            *queue.slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
        }
    }

    /// Starts a flush of all devices, by any queue.
    fn flush(&mut self, controller: u16, number: u64) -> Result<(), NvmeTcpError> {
        let runs = |queue: &Option<ServedConnection>| {
            queue.as_ref().is_some_and(|queue| matches!(queue.state, IoQueueState::Running))
        };
        let running = self.queues.iter().position(runs);
        let is_free =
            |place: &usize| self.queues[*place].is_none() && self.flushes.iter().all(|flush| flush.queue != *place);
        let free = (0..self.queues.len()).find(is_free);
        let Some(queue) = running.or(free) else {
            // All queues drain, which takes as long as their devices: later flushes find one.
            self.report_flush(controller, number, false);
            return Ok(());
        };
        let has_session = running.is_none();
        if has_session && let Err(why) = self.config.queues[queue].run(self.setup(queue, None))? {
            self.log.warn(format_args!("the devices cannot be flushed: {why}"));
            self.report_flush(controller, number, false);
            return Ok(());
        }
        let pending = self.config.queues[queue].begin_flush()?;
        self.flushes.push(RunningFlush { controller, number, queue, pending, has_session });
        self.drain_at = Some(Instant::now());
        Ok(())
    }

    fn report_flush(&mut self, controller: u16, number: u64, is_durable: bool) {
        let Some(association) = self.subsystem.association(controller) else { return };
        if is_durable {
            association.controller.flushed(number);
        } else {
            association.controller.flush_failed(number);
        }
    }

    /// Looks at queues that drain and at flushes, and ends what has drained.
    fn drain(&mut self, now: Instant) -> Result<(), NvmeTcpError> {
        if self.drain_at.is_none_or(|at| at > now) {
            return Ok(());
        }
        self.drain_at = None;
        for place in (0..self.flushes.len()).rev() {
            let Some(is_durable) = self.flushes[place].pending.wait_until(Some(now))? else { continue };
            let RunningFlush { controller, number, queue, has_session, .. } = self.flushes.swap_remove(place);
            if has_session {
                // It has no request: this ends at once.
                self.config.queues[queue].suspend()?.wait()?;
            }
            self.report_flush(controller, number, is_durable);
            self.advance(controller, now)?;
        }
        for number in 0..self.queues.len() {
            self.drain_queue(number, Some(now))?;
            self.finish_queue(number, now)?;
        }
        let is_draining = self.queues.iter().flatten().any(|queue| !matches!(queue.state, IoQueueState::Running));
        for id in std::mem::take(&mut self.ending) {
            if self.queues.iter().flatten().any(|queue| queue.controller == id) {
                self.ending.push(id);
                continue;
            }
            self.subsystem.remove(id);
            self.reconnect(now)?;
        }
        if is_draining || !self.flushes.is_empty() || !self.ending.is_empty() {
            self.drain_at = Some(now + DRAIN_POLL);
        }
        Ok(())
    }

    /// Waits until then for a queue to drain.
    fn drain_queue(&mut self, number: usize, until: Option<Instant>) -> Result<(), NvmeTcpError> {
        let Some(Some(queue)) = self.queues.get_mut(number) else { return Ok(()) };
        if let IoQueueState::Draining(suspension) = &queue.state
            && suspension.wait_until(until)?
        {
            queue.state = IoQueueState::Stopped;
        }
        Ok(())
    }

    /// Ends or continues a stopped queue.
    fn finish_queue(&mut self, number: usize, now: Instant) -> Result<(), NvmeTcpError> {
        let is_stopped = |queue: &&ServedConnection| matches!(queue.state, IoQueueState::Stopped);
        let Some(queue) = self.queues[number].as_ref().filter(is_stopped) else { return Ok(()) };
        let (id, qid, slot) = (queue.controller, queue.qid, Arc::clone(&queue.slot));
        if !queue.is_ending {
            let setup = self.setup(number, Some(Arc::clone(&slot)));
            match self.config.queues[number].run(setup)? {
                Ok(()) => {
                    if let Some(queue) = &mut self.queues[number] {
                        queue.state = IoQueueState::Running;
                    }
                    return Ok(());
                }
                Err(why) => self.log.warn(format_args!("an I/O queue cannot continue: {why}")),
            }
        }
        self.queues[number] = None;
        if let Some(state) = slot.lock().unwrap_or_else(PoisonError::into_inner).take() {
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

    /// Tries the Connects that wait again.
    fn reconnect(&mut self, now: Instant) -> Result<(), NvmeTcpError> {
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

    /// Stops all queues, and waits for that.
    fn suspend_all(&mut self) -> Result<(), NvmeTcpError> {
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

impl FrontEndSession for NvmeTcpSession {
    type Queue = NvmeTcpQueueSession;
    type Disk = NvmeTcpDisk;
    type Reserve = ();
    type State = std::convert::Infallible;
    type Start = ();
    type View = NvmeTcpView;
    type Error = NvmeTcpError;

    fn reserve() -> io::Result<()> {
        Ok(())
    }

    fn accept(_connection: Accepted, _reserve: (), _config: NvmeTcpExport, _log: &Arc<ExportLog>) -> NvmeTcpSession {
        unreachable!("it accepts connections by itself")
    }

    fn resume(
        state: Self::State,
        _reserve: (),
        _config: NvmeTcpExport,
        _log: &Arc<ExportLog>,
    ) -> Result<(NvmeTcpSession, ()), String> {
        match state {}
    }

    fn begin(&mut self, _start: Option<()>) -> Result<(), NvmeTcpError> {
        Ok(())
    }

    fn step(&mut self) -> SessionStep<NvmeTcpError> {
        match self.work() {
            Ok(true) => SessionStep::Handled,
            Ok(false) => SessionStep::Waiting,
            Err(error) => SessionStep::Over(error),
        }
    }

    fn interest(&self) -> (AwaitedFd, EventFlags) {
        (Arc::clone(&self.set) as _, EventFlags::IN)
    }

    fn deadline(&self) -> Option<Instant> {
        let timers = self.subsystem.associations().filter(|(id, _)| !self.ending.contains(id));
        let timers = timers.filter_map(|(_, association)| association.controller.deadline_ns());
        let timers = timers.map(|until_ns| self.began + Duration::from_nanos(until_ns));
        let connections = self.connections.values().filter_map(|connection| connection.until);
        timers.chain(connections).chain(self.accepts_from).chain(self.drain_at).min()
    }

    fn with_config<T>(&mut self, change: impl FnOnce(&mut ExportConfig<Self>) -> T) -> T {
        let changed = change(&mut self.config);
        self.queues.resize_with(self.config.queues.len().min(self.ended_queues()), || None);
        changed
    }

    fn change(&mut self, device: u16, info: &Arc<DeviceInfo>) -> Result<Changed, String> {
        self.suspend_all().map_err(|error| error.to_string())?;
        let changed = self.config.change(device, info);
        self.subsystem.set_namespaces(&self.config.disk.table());
        let now = Instant::now();
        let ids: Vec<_> = self.subsystem.associations().map(|(id, _)| id).collect();
        for id in ids {
            self.advance(id, now).map_err(|error| error.to_string())?;
        }
        for number in 0..self.queues.len() {
            self.finish_queue(number, now).map_err(|error| error.to_string())?;
        }
        changed.map(|()| Changed::Told)
    }

    fn hand_over(&mut self) -> (Vec<usize>, Result<Self::State, String>) {
        (Vec::new(), Err("connections over TCP cannot be handed over; stop the daemon instead".to_owned()))
    }

    fn go_on(&mut self, _running: Vec<usize>) {}

    fn view(&self) -> NvmeTcpView {
        let hosts = self.subsystem.associations().filter(|(_, association)| !association.is_discovery());
        NvmeTcpView {
            address: Some(self.address),
            nqn: self.config.disk.nqn.to_string(),
            hosts: hosts.map(|(id, association)| (id, association.host().to_string())).collect(),
            queues: self.queues.iter().flatten().count(),
            ana: self.config.disk.ana_view(),
            memory_bytes: self.queue_bytes * self.queues.len() as u64,
        }
    }

    fn end(mut self, end: &SessionEnd<NvmeTcpError>) -> (NvmeTcpExport, Result<(), NvmeTcpError>) {
        let mut ended = self.suspend_all();
        for flush in std::mem::take(&mut self.flushes).into_iter().filter(|flush| flush.has_session) {
            let suspended = self.config.queues[flush.queue].suspend().and_then(Suspension::wait);
            ended = ended.and(suspended.map(drop).map_err(NvmeTcpError::from));
        }
        self.connections.clear();
        self.queues.clear();
        self.config.queues.iter().for_each(super::NvmeTcpQueueRemote::close);
        if let SessionEnd::Over(error) = end {
            self.log.warn(format_args!("the export ends: {error}"));
        }
        (self.config, ended)
    }
}

impl NvmeTcpSession {
    /// Client queues that the memory has room for: those from the start.
    fn ended_queues(&self) -> usize {
        self.table.region(0).map_or(0, |region| region.len()) / self.queue_bytes as usize
    }
}
