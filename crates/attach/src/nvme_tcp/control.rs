//! The control thread of an association: runs its state machine, its admin connection, and its queues' commands.
//!
//! ```text
//!   opened ──▶ live ──▶ lost: streams are closed, requests wait ──▶ pause ──▶ connected again
//!                                                              after ctrl_loss: failed, for good
//! ```
//!
//! Owned by its own thread, which waits for nothing but its descriptors and deadlines.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use blkyard_mpath::{AccessState, ConnectionState};
use blkyard_mq::{HeldBack, LogLimit, QueueCounts, QueueKind};
use blkyard_nvme::{AnaState, ControllerState, FabricsHostEvent, FabricsIoQueue, NamespaceScope, ScannedNamespace};
use blkyard_sys::EventFd;

use crate::AttachError;
use crate::nvme::{check_same, find_namespace};
use crate::nvme_tcp::TcpNamespaceConfig;
use crate::nvme_tcp::admin::AdminConnection;
use crate::nvme_tcp::admin_stream::AdminConnector;
use crate::nvme_tcp::disk::{AwaitedNamespace, TcpShared};
use crate::nvme_tcp::mailbox::{OpenedTcpQueue, TcpCommand, TcpQueueMailbox};
use crate::nvme_tcp::peer::PeerRequests;

/// Time for an orderly end.
const SHUT_DOWN_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct TcpControl {
    pub(super) config: TcpNamespaceConfig,
    pub(super) shared: Arc<TcpShared>,
    commands: Receiver<TcpCommand>,
    wake: Arc<EventFd>,
    began: Instant,
    pub(super) admin: AdminConnection,
    pub(super) peers: PeerRequests,
    /// Mailboxes of the queues on their lanes, by identifier from one.
    queues: Vec<Option<Arc<TcpQueueMailbox>>>,
    /// As it was when the disk was opened; its size aside.
    namespace: Option<ScannedNamespace>,
    /// Set until a namespace that was not there when the disk was opened has been found and accepted.
    awaited: Option<AwaitedNamespace>,
    /// Whether it is a spare path without a port.
    pub(super) awaits_port: bool,
    deadline_ns: Option<u64>,
    /// Whether an attempt has failed since the start or the last success.
    has_failed: bool,
    is_over: bool,
    /// Set once it ends: the latest time of that, ns.
    end_ns: Option<u64>,
    log: LogLimit,
}

impl TcpControl {
    pub(super) fn new(
        config: TcpNamespaceConfig,
        shared: Arc<TcpShared>,
        commands: Receiver<TcpCommand>,
        connector: Box<dyn AdminConnector>,
        wake: Arc<EventFd>,
    ) -> TcpControl {
        let (mut host, address) = (config.host.clone(), config.address.clone());
        host.scope = config.namespace.map_or(NamespaceScope::All, NamespaceScope::One);
        TcpControl {
            admin: AdminConnection::new(host, address, connector, Arc::clone(&wake)),
            began: config.clock.now(),
            config,
            shared,
            commands,
            wake,
            peers: PeerRequests::default(),
            queues: Vec::new(),
            namespace: None,
            awaited: None,
            awaits_port: false,
            deadline_ns: None,
            has_failed: false,
            is_over: false,
            end_ns: None,
            log: LogLimit::default(),
        }
    }

    /// Connects, and waits until the controller is live. The first failure is an error: the address may be wrong.
    pub(super) fn open(&mut self) -> Result<(), AttachError> {
        self.start();
        while self.namespace.is_none() {
            self.step();
            if let Some(failure) = self.failure() {
                self.begin_end();
                while self.run_once() {
                    self.wait();
                }
                return Err(failure);
            }
            if self.namespace.is_none() {
                self.wait();
            }
        }
        Ok(())
    }

    /// Begins to connect.
    pub(super) fn start(&mut self) {
        self.admin.host.start(0);
    }

    /// Why the last attempt to connect has failed.
    pub(super) fn failure(&self) -> Option<AttachError> {
        if !self.has_failed {
            return None;
        }
        let (disk, cause) = (self.config.name.clone(), self.admin.why());
        // It is about to try again: unless it has refused us for good, or has no such namespace.
        let is_lost = self.admin.host.state() == ControllerState::Connecting;
        Some(if is_lost { AttachError::Unreachable { disk, cause } } else { AttachError::Controller { disk, cause } })
    }

    /// Expects the controller of a namespace that is known from elsewhere, with so many queues.
    pub(super) fn wait_for(&mut self, known: ScannedNamespace, awaited: AwaitedNamespace, counts: QueueCounts) {
        let entries = awaited.late.depth + 1;
        self.admin.host.assume(entries.try_into().unwrap_or(u16::MAX), counts);
        self.admin.host.narrow_scope(known.namespace.nsid);
        (self.namespace, self.awaited) = (Some(known), Some(awaited));
    }

    /// Connects a spare path once its port is known.
    fn look_for_port(&mut self) {
        let Some((name, address)) = self.shared.port.get().filter(|_| self.awaits_port).cloned() else { return };
        self.awaits_port = false;
        self.config.name = name;
        self.admin.set_address(address);
        self.set_connection(ConnectionState::Connecting);
        self.admin.host.start(self.now_ns());
    }

    fn now_ns(&self) -> u64 {
        let since = self.config.clock.now().saturating_duration_since(self.began);
        since.as_nanos().try_into().unwrap_or(u64::MAX)
    }

    pub(super) fn namespace(&self) -> Option<&ScannedNamespace> {
        self.namespace.as_ref()
    }

    /// I/O queues that may be open, by kind.
    pub(super) fn counts(&self) -> Option<QueueCounts> {
        self.admin.host.queue_counts()
    }

    fn queues_max(&self) -> usize {
        self.counts().map_or(0, QueueCounts::total)
    }

    /// Time after which the controller executes no command of a process that has died, ns.
    pub(super) fn silence_ns(&self) -> u64 {
        self.admin.host.silence_ns()
    }

    /// Requests that a queue may have in flight.
    pub(super) fn depth(&self) -> usize {
        usize::from(self.admin.host.queue_options(1, 1, false).depth)
    }

    /// Runs until the disk and all its queues are dropped, then disconnects in order.
    pub(super) fn run(mut self) {
        while self.run_once() {
            self.wait();
        }
    }

    /// Handles all that is due, and disconnects once the disk and all its queues are dropped. False at the end.
    pub(super) fn run_once(&mut self) -> bool {
        if !self.step() && self.end_ns.is_none() {
            self.shared.peer.close();
            self.begin_end();
            self.step();
        }
        !self.is_over && self.end_ns.is_none_or(|end_ns| self.now_ns() < end_ns)
    }

    /// Disconnects in order, for a bounded time.
    fn begin_end(&mut self) {
        let now_ns = self.now_ns();
        self.end_ns = Some(now_ns + SHUT_DOWN_MAX.as_nanos() as u64);
        if self.admin.host.state() == ControllerState::DeletingNoIo {
            self.is_over = true;
        } else {
            self.admin.host.disconnect(now_ns);
        }
    }

    /// Latest time of the next step.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let due_ns = self.deadline_ns.into_iter().chain(self.end_ns).min();
        due_ns.map(|due_ns| self.began + Duration::from_nanos(due_ns))
    }

    /// Handles all that is due. False once the disk and all its queues are dropped.
    fn step(&mut self) -> bool {
        self.wake.take();
        self.look_for_port();
        let is_used = loop {
            match self.commands.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => break true,
                Err(TryRecvError::Disconnected) => break false,
            }
        };
        // Each is reset, also if several have something.
        let users = self.queues.iter().flatten();
        if users.filter(|queue| queue.take_traffic()).count() > 0 {
            self.admin.host.note_traffic();
        }
        self.admin.receive(self.now_ns());
        self.talk_to_peers(self.now_ns());
        loop {
            let now_ns = self.now_ns();
            let due_ns = self.admin.host.advance(now_ns);
            self.deadline_ns = due_ns.into_iter().chain(self.peers_due_ns()).min();
            self.admin.send(now_ns);
            let Some(event) = self.admin.next_event(now_ns) else { break };
            self.handle(event, now_ns);
        }
        is_used
    }

    fn obey(&mut self, command: TcpCommand) {
        match command {
            TcpCommand::Open(kind, answer) => {
                let opened = self.open_queue(kind);
                if let Err(unheard) = answer.send(opened)
                    && let Ok(OpenedTcpQueue { queue, .. }) = unheard.0
                {
                    // It was waited for no longer.
                    self.obey(TcpCommand::Close(queue.qid(), None));
                }
            }
            TcpCommand::Report(qid, association, report) => {
                self.admin.host.queue_report(qid, association, report, self.now_ns());
            }
            TcpCommand::Close(qid, socket) => {
                drop(socket);
                if let Some(queue) = self.queues.get_mut(usize::from(qid) - 1) {
                    *queue = None;
                }
                self.admin.host.close_queue(qid, self.now_ns());
            }
        }
    }

    fn open_queue(&mut self, kind: QueueKind) -> Result<OpenedTcpQueue, AttachError> {
        let have = self.queues_max();
        self.queues.resize(self.queues.len().max(have), None);
        // Preferably of its kind, as the queues are numbered: default, read, poll.
        let ranges = self.counts().map(QueueCounts::ranges).unwrap_or_default();
        let own = ranges[kind as usize];
        let mut numbers = (own.first..own.first + own.count).chain(0..have);
        let free = numbers.find(|number| self.queues[*number].is_none());
        let (Some(index), Some(namespace)) = (free, &self.namespace) else {
            let (disk, cure) =
                (self.config.name.clone(), "raise ?queues=N if the controller has more, or ask for fewer queues");
            return Err(AttachError::Queues { disk, wanted: have + 1, have, cure });
        };
        let qid = index as u16 + 1;
        let segments_max = usize::from(namespace.info.limits.segments_max);
        let options = self.admin.host.queue_options(qid, segments_max, self.is_path());
        let system = |source| AttachError::System { disk: self.config.name.clone(), source };
        let queue = FabricsIoQueue::new(options, [namespace.namespace].into()).map_err(system)?;
        let mailbox = Arc::new(TcpQueueMailbox::new(kind).map_err(system)?);
        self.queues[index] = Some(Arc::clone(&mailbox));
        self.admin.host.open_queue(qid);
        Ok(OpenedTcpQueue { queue, mailbox })
    }

    fn handle(&mut self, event: FabricsHostEvent, now_ns: u64) {
        match event {
            FabricsHostEvent::Queue(qid, command) => {
                let queue = self.queues.get(usize::from(qid) - 1).and_then(Option::as_ref);
                if let (Some(queue), Some(peer)) = (queue, self.admin.peer()) {
                    queue.post((command, peer));
                }
            }
            FabricsHostEvent::Live => self.live(now_ns),
            FabricsHostEvent::NamespacesChanged => _ = self.look_at_namespace(now_ns),
            FabricsHostEvent::Lost(error) => {
                self.set_connection(ConnectionState::Resetting);
                let why = self.admin.why();
                self.note_loss(why);
                self.say(|name, held_back| {
                    tracing::warn!("{name}: {error}: I/O waits, and the connection is made again{held_back}");
                });
                self.path_lost(now_ns);
            }
            FabricsHostEvent::Retry(_) => {
                self.has_failed = true;
                // It stays lost for I/O over several paths once I/O is to fail.
                if self.shared.monitor.state().connection != ConnectionState::Dead {
                    self.set_connection(ConnectionState::Connecting);
                }
                let why = self.admin.why();
                self.note_loss(why);
            }
            FabricsHostEvent::FastFail => {
                self.set_connection(ConnectionState::Dead);
                self.say(|name, held_back| {
                    tracing::error!("{name}: not connected for fast_io_fail_s: I/O fails until it is{held_back}");
                });
            }
            FabricsHostEvent::Failed(error) => {
                self.has_failed = true;
                self.set_connection(ConnectionState::Dead);
                self.shared.peer.give_up(error);
                self.note_loss(error.to_string());
                let cure = "open the device again, as a takeover does";
                tracing::error!("{}: {error}: given up, all I/O fails; {cure}", self.config.name);
            }
            // A disk that is given up stays, and fails all I/O.
            FabricsHostEvent::Over => self.is_over = self.end_ns.is_some(),
            FabricsHostEvent::AnaChanged => self.look_at_access(),
            FabricsHostEvent::OtherReset(instance, is_reset) => self.peer_was_reset(instance, is_reset),
            FabricsHostEvent::Fenced(association, evidence) => self.fenced(association, evidence, now_ns),
            FabricsHostEvent::DiscoveryChanged
            | FabricsHostEvent::Discovered(..)
            | FabricsHostEvent::Completed { .. }
            // Handled by the admin connection.
            | FabricsHostEvent::Open(_)
            | FabricsHostEvent::Close(_) => {}
        }
    }

    /// Whether it is one of several paths.
    pub(super) fn is_path(&self) -> bool {
        self.shared.is_path.load(Relaxed)
    }

    fn set_connection(&self, connection: ConnectionState) {
        self.shared.monitor.change(|state| state.connection = connection);
    }

    /// Tells queues over several paths the state of access.
    fn look_at_access(&self) {
        let Some(known) = &self.namespace else { return };
        let access = match self.admin.host.ana_state(known.namespace.nsid).unwrap_or_default() {
            AnaState::Optimized => AccessState::Optimized,
            AnaState::NonOptimized => AccessState::NonOptimized,
            AnaState::Inaccessible => AccessState::Inaccessible,
            AnaState::PersistentLoss => AccessState::PersistentLoss,
            AnaState::Change => AccessState::Change,
        };
        self.shared.monitor.change(|state| state.access = access);
    }

    fn note_loss(&mut self, why: String) {
        self.shared.note(|view| (view.is_connected, view.last_loss) = (false, Some(why)));
    }

    /// Logs what the controller causes, at a bounded rate.
    fn say(&mut self, line: impl FnOnce(&str, HeldBack)) {
        if let Some(held_back) = self.log.pass(self.config.clock.now()) {
            line(&self.config.name, HeldBack(held_back));
        }
    }

    fn live(&mut self, now_ns: u64) {
        if self.namespace.is_none() {
            match self.find_namespace(self.config.namespace) {
                Ok(_) if self.queues_max() == 0 => {
                    (self.admin.cause, self.has_failed) = (Some("the controller grants no I/O queue".into()), true);
                    return;
                }
                Ok(found) => {
                    self.admin.host.narrow_scope(found.namespace.nsid);
                    self.namespace = Some(found);
                }
                Err(cause) => {
                    (self.admin.cause, self.has_failed) = (Some(cause), true);
                    return;
                }
            }
        }
        if !self.look_at_namespace(now_ns) {
            return;
        }
        (self.has_failed, self.admin.cause) = (false, None);
        self.look_at_access();
        self.set_connection(ConnectionState::Live);
        self.shared.note(|view| {
            view.is_connected = true;
            view.sessions += 1;
        });
    }

    /// Whether the namespace is as it was. One that is not ends the association, and I/O waits for another.
    fn look_at_namespace(&mut self, now_ns: u64) -> bool {
        let Some(known) = &self.namespace else { return false };
        let found = match &self.awaited {
            None => self.find_known(known),
            Some(awaited) => self.find_awaited(known, awaited),
        };
        match found {
            Ok(found) => self.found(found),
            Err(why) => {
                let until = if self.awaited.is_some() { "not used until that changes" } else { "I/O waits until then" };
                self.say(|name, held_back| tracing::error!("{name}: {why}; {until}{held_back}"));
                self.admin.cause = Some(why);
                self.admin.host.reset(now_ns);
                return false;
            }
        }
        true
    }

    fn find_namespace(&self, nsid: Option<u32>) -> Result<ScannedNamespace, String> {
        find_namespace(self.admin.host.namespaces(), self.admin.host.active_namespaces(), nsid)
    }

    fn find_known(&self, known: &ScannedNamespace) -> Result<ScannedNamespace, String> {
        let nsid = known.namespace.nsid;
        let found = self.admin.host.namespaces().iter().find(|found| found.namespace.nsid == nsid);
        let found = found.ok_or_else(|| format!("namespace {nsid} was removed; attach it again"))?;
        check_same(known, found).map(|()| found.clone())
    }

    /// The namespace that was not there when the disk was opened: it must keep what users were told of the disk.
    fn find_awaited(&self, known: &ScannedNamespace, awaited: &AwaitedNamespace) -> Result<ScannedNamespace, String> {
        let AwaitedNamespace { late, beside } = awaited;
        let found = self.find_namespace(Some(known.namespace.nsid))?;
        (late.accepts)(beside.capacity(), &found.info, &found.ids)?;
        let (queues, depth) = (self.queues_max(), self.depth());
        if queues < late.queues || depth < late.depth {
            let has = format!("the controller has {queues} I/O queues of {depth} requests");
            return Err(format!("{has}, and the disk {} of {}; allow as many at the target", late.queues, late.depth));
        }
        Ok(found)
    }

    /// Goes on with the namespace.
    fn found(&mut self, found: ScannedNamespace) {
        let sectors = found.info.capacity_sectors;
        let old = self.shared.set_capacity(sectors);
        if old != sectors && old != 0 {
            self.say(|name, held_back| {
                tracing::info!("{name}: the capacity changed from {old} to {sectors} sectors{held_back}");
            });
        }
        if self.awaited.take().is_some() {
            tracing::info!("{}: connected, and used from now on", self.config.name);
            self.namespace = Some(found);
        }
    }

    /// Sleeps until there is a command or an event, or something is due.
    fn wait(&self) {
        // After an early end everything is checked again.
        let _ = self.config.clock.wait(&mut self.admin.events(), self.deadline());
    }
}
