//! The control path of an NVMe/TCP export: its listening socket, connections, associations and I/O queues.
//!
//! It is the only session of its export, and lasts as long. A step handles the sockets that are ready, and waits for no
//! peer and no lane, except for one that is to own its first queue. Queues that start or drain are looked at again
//! later, so a lane or a device that hangs holds up no other host.
//!
//! An association ends with its admin connection, when its keep-alive timer expires, and before the same host connects
//! to the same controller again. Then its connections are closed and its commands dropped, unless a device has them.
//! The controller is gone when the last of those is back.

mod associations;
mod authentication;
mod connections;
mod handover;
mod queues;
mod resets;
mod simulation;

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use blkyard_mem::{DmaMapping, Region, RegionTable};
use blkyard_mq::DeviceInfo;
use blkyard_nvme::fabrics::Nqn;
use blkyard_nvme::tcp::TcpIoQueue;
use blkyard_nvme::{AnaGroup, FabricsSubsystem};
use blkyard_sys::{Epoll, EventFlags, Registered};

pub use self::handover::{NVME_TCP_STATE_VERSION, NvmeTcpRecord, NvmeTcpState};
use self::resets::PortResets;
use super::clock::ControllerClock;
use super::connection::TargetConnection;
use super::directory::{HostHold, PortMailbox};
use super::queue::{EndedQueues, NvmeTcpQueueSession, TcpQueueSlot};
use super::{ENTRIES_MAX, NvmeTcpAna, NvmeTcpDisk, NvmeTcpExport, queue_options, subsystem_options};
use crate::core::{
    Accepted, AwaitedFd, Changed, ExportConfig, ExportLog, FrontEndSession, LaneGone, PendingFlush, SessionEnd,
    SessionStep, Suspension,
};

/// Connections that are not connected to a controller, at most; fewer where the process may open few files. A further
/// one closes the oldest.
const NEW_MAX: usize = 256;
/// Connections that wait to be accepted, at most: the maximum of most systems.
const BACKLOG: i32 = 4096;
/// Connections accepted in one step.
const ACCEPTS_MAX: usize = 64;
/// Pause after a connection could not be accepted, most likely for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Tokens of the listening socket, the notes of queues, changes of ANA states, and messages of other ports. Connections
/// have the next ones.
const LISTENER: u64 = 0;
const QUEUES: u64 = 1;
const ANA: u64 = 2;
const MAIL: u64 = 3;

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

/// The answer of a lane that is to run a queue: why it cannot.
type QueueStart = Receiver<Result<(), String>>;

/// A client queue with a connection.
struct ServedConnection {
    controller: u16,
    qid: u16,
    slot: TcpQueueSlot,
    state: IoQueueState,
    /// Unset once the lane has answered.
    started: Option<QueueStart>,
    /// Whether the connection ends once the queue has drained.
    is_ending: bool,
    /// Devices that have its commands, as bits modulo 64: known once its association has ended.
    devices: Arc<AtomicU64>,
    /// What its host has to wait for.
    hold: Arc<HostHold>,
}

/// An association that has ended, while its queues drain.
struct EndingAssociation {
    /// From when its host may have known, ns.
    since_ns: u64,
    host: Nqn,
    hold: Arc<HostHold>,
    /// Whether it was logged that its host waits.
    is_told: bool,
}

/// A flush that a controller waits for, or one of several.
struct RunningFlush {
    controller: u16,
    number: u64,
    pending: PendingFlush,
    /// Whether another one of them has failed.
    has_failed: bool,
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
    /// By client queue: those from the start, for which there is memory.
    queues: Vec<Option<ServedConnection>>,
    /// Controllers whose association has ended, while their queues drain.
    ending: BTreeMap<u16, EndingAssociation>,
    /// Those of them of which a device may still execute a command: it has given that back without an answer.
    uncertain: Vec<u16>,
    mailbox: Registered<Arc<PortMailbox>>,
    resets: PortResets,
    flushes: Vec<RunningFlush>,
    ended: Registered<Arc<EndedQueues>>,
    /// Kept registered.
    _ana: Option<Registered<Arc<NvmeTcpAna>>>,
    table: Arc<RegionTable>,
    queue_bytes: u64,
    /// Keeps the memory mapped for the devices.
    _mappings: Vec<DmaMapping>,
    clock: ControllerClock,
    accepts_from: Option<Instant>,
    /// Next look at queues that drain or flush.
    drain_at: Option<Instant>,
    /// When the latest of them began.
    drains_since: Instant,
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
        let first = config.disk.first_controller;
        let mailbox = Arc::new(PortMailbox::new(first..first + NvmeTcpDisk::CONTROLLER_IDS)?);
        config.disk.ports.add_mailbox(&mailbox);
        let mailbox = set.register(mailbox, MAIL, EventFlags::IN)?;
        let ana = config.disk.ana.as_ref().map(|ana| set.register(Arc::clone(ana), ANA, EventFlags::IN));
        // Devices in other processes map it, too. Pages that no command has used take no memory.
        let queue_bytes = TcpIoQueue::memory_bytes(&queue_options(ENTRIES_MAX, true));
        let region = Region::shared(queue_bytes as usize * queues)?;
        let mappings = config.domains.iter().map(|domain| domain.map(vec![Arc::clone(&region)])).collect();
        let options = subsystem_options(&config.disk);
        let subsystem = FabricsSubsystem::new(options, config.disk.table());
        let now = Instant::now();
        Ok(NvmeTcpSession {
            queues: (0..queues).map(|_| None).collect(),
            config,
            log: Arc::clone(log),
            set,
            listener,
            address,
            subsystem,
            connections: BTreeMap::new(),
            next: MAIL + 1,
            ending: BTreeMap::new(),
            uncertain: Vec::new(),
            mailbox,
            resets: PortResets::default(),
            flushes: Vec::new(),
            ended,
            _ana: ana.transpose()?,
            table: Arc::new(RegionTable::new(vec![region])),
            queue_bytes,
            _mappings: mappings,
            clock: ControllerClock::since(now),
            accepts_from: None,
            drain_at: None,
            drains_since: now,
        })
    }

    fn now_ns(&self, now: Instant) -> u64 {
        self.clock.ns_of(now)
    }

    fn work(&mut self) -> Result<bool, NvmeTcpError> {
        let now = self.clock.now();
        let now_ns = self.now_ns(now);
        let overdue = self.subsystem.associations().filter(|(_, one)| one.controller.is_overdue(now_ns));
        // Before any command: this process may have been stopped, and a host that counts on time comes back.
        for id in overdue.map(|(id, _)| id).collect::<Vec<_>>() {
            self.advance(id, now)?;
        }
        let ready = self.set.wait(now, Some(now))?;
        let is_busy = !ready.is_empty();
        if is_busy && self.drain_at.is_some() {
            // A host that comes back is not refused for what has drained since the last look.
            self.drain_at = Some(now);
            self.drain(now)?;
        }
        for ready in ready {
            match ready.token {
                LISTENER => self.accept(now)?,
                QUEUES => {
                    for number in self.ended.get().take() {
                        self.end_queue(number)?;
                    }
                }
                // The associations are looked at below.
                ANA => self.tell_ana(),
                MAIL => self.read_mail(now)?,
                token => self.serve(token, now)?,
            }
        }
        if self.accepts_from.is_some_and(|from| from <= now) {
            self.accepts_from = None;
            // Without memory for that, no connection is accepted until the next pause ends.
            let _ = self.listener.set_events(EventFlags::IN);
            self.accept(now)?;
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
}

impl FrontEndSession for NvmeTcpSession {
    type Queue = NvmeTcpQueueSession;
    type Disk = NvmeTcpDisk;
    type Reserve = ();
    type State = NvmeTcpState;
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
        _state: NvmeTcpState,
        _reserve: (),
        _config: NvmeTcpExport,
        _log: &Arc<ExportLog>,
    ) -> Result<(NvmeTcpSession, ()), String> {
        unreachable!("it is resumed with its listening socket")
    }

    /// Of a session that was handed over.
    fn begin(&mut self, _start: Option<()>) -> Result<(), NvmeTcpError> {
        self.proceed()
    }

    fn listener(&self) -> Option<BorrowedFd<'_>> {
        Some(self.listener.get().as_fd())
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
        let timers = self.subsystem.associations().filter(|(id, _)| !self.ending.contains_key(id));
        let timers = timers.filter_map(|(_, association)| association.controller.deadline_ns());
        let timers = timers.map(|until_ns| self.clock.began() + Duration::from_nanos(until_ns));
        let connections = self.connections.values().filter_map(|connection| connection.until);
        timers.chain(connections).chain(self.accepts_from).chain(self.drain_at).min()
    }

    fn with_config<T>(&mut self, change: impl FnOnce(&mut ExportConfig<Self>) -> T) -> T {
        change(&mut self.config)
    }

    fn change(&mut self, device: u16, info: &Arc<DeviceInfo>) -> Result<Changed, String> {
        self.suspend_all().map_err(|error| error.to_string())?;
        let changed = self.config.change(device, info);
        self.subsystem.set_namespaces(&self.config.disk.table());
        let now = self.clock.now();
        let ids: Vec<_> = self.subsystem.associations().map(|(id, _)| id).collect();
        for id in ids {
            self.advance(id, now).map_err(|error| error.to_string())?;
        }
        for number in 0..self.queues.len() {
            self.finish_queue(number, now).map_err(|error| error.to_string())?;
        }
        self.drain_from(now);
        changed.map(|()| Changed::Told)
    }

    fn hand_over(&mut self) -> (Vec<usize>, Result<NvmeTcpState, String>) {
        let state = self.rest().map_err(|error| error.to_string()).and_then(|()| self.save());
        // All that are stopped go on.
        (Vec::new(), state)
    }

    fn go_on(&mut self, _running: Vec<usize>) {
        if let Err(error) = self.proceed() {
            self.log.warn(format_args!("its queues cannot continue: {error}"));
        }
    }

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
        let ended = self.suspend_all();
        self.connections.clear();
        self.queues.clear();
        self.ending.iter().for_each(|(id, ending)| _ = ending.hold.set(*id, 0));
        self.config.disk.ports.tell_released();
        self.mailbox.get().close();
        self.config.queues.iter().for_each(super::NvmeTcpQueueRemote::close);
        if let SessionEnd::Over(error) = end {
            self.log.warn(format_args!("the export ends: {error}"));
        }
        (self.config, ended)
    }
}
