//! An association on its host's side: bring-up, monitoring, error recovery and disconnect.
//!
//! Owned by one thread, which calls [`FabricsHost::advance`] when the returned time is reached and after each call of
//! another method, and then handles all events. Streams and I/O queues have other owners, which get commands by events
//! and report. Each TCP connection of the admin queue is an association of its own, with a number.
//!
//! ```text
//!   New ──▶ Connecting ────────▶ Live ──▶ Resetting ──┐
//!             ▲  Connect, enable,                     │ all streams are closed, requests given back,
//!             │  identify, namespaces                 │ pause
//!             └───────────────────────────────────────┘
//!   after ctrl_loss, a final refusal or a disconnect: Deleting, then Dead or DeletingNoIo
//! ```
//!
//! Failure rules: a lost or late command of a live association begins error recovery. Its streams are closed; each
//! queue gives its requests back when its own stream is proven closed. They wait for the next association, or fail
//! after `fast_io_fail_ns`. A queue with unanswered writes is started again only when the lost association is fenced:
//! the target has accepted a Connect for the same controller identifier, another controller of the subsystem has reset
//! the lost one, or keep-alive timeout and quiesce time have passed since the last stream was closed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use blkyard_mem::RegionTable;
use blkyard_mq::{FenceEvidence, QueueCounts};

use super::admin::{FabricsAdmin, FabricsAdminEvent, FabricsCompleted, FabricsData};
use super::cross_reset::RunningCrossResets;
use super::error::FabricsHostError;
use super::io_queue::{FabricsIoQueueOptions, FabricsQueueCommand};
use super::recovery::FabricsQueueUse;
use super::setup::FabricsStep;
use crate::ana::{ANA_LOG, AnaLog, AnaState};
use crate::auth::{AuthHost, AuthSecrets, AuthSeed};
use crate::cross_reset::{CROSS_RESET_NOTICE, ControllerInstance};
use crate::discovery::{DiscoveredLog, DiscoveryEntry};
use crate::fabrics::{DISCOVERY_NQN, Nqn};
use crate::host::scan::{NamespaceScope, Scan, ScanStep};
use crate::host::watch::KeepAlive;
use crate::host::{ControllerState, NvmLimits, QueueDemand, ScannedNamespace};
use crate::registers::Capabilities;
use crate::tcp::{SendList, TcpEnd};
use crate::tls::TlsPsk;
use crate::{CROSS_RESET_LOG, IDENTIFY_BYTES, IdentifyController, NvmeStatus, Sqe, admin};

/// Deadline of an admin command, ns: 60 s, as in Linux.
pub(super) const ADMIN_NS: u64 = 60_000_000_000;
/// Types of asynchronous events: error and notice, and their values.
const EVENT_ERROR: u64 = 0;
const EVENT_NOTICE: u64 = 2;
const ERROR_PERSISTENT: u64 = 3;
const NOTICE_NAMESPACES: u64 = 0;
const NOTICE_ANA: u64 = 3;
const NOTICE_CROSS_RESET: u64 = CROSS_RESET_NOTICE as u64;
/// Dwords of a log page to read in order to clear an event.
const LOG_DWORDS: u32 = 128;

/// Authentication of a host and its target.
#[derive(Clone, Debug)]
pub struct FabricsHostAuth {
    /// The secrets of both.
    pub secrets: Arc<AuthSecrets>,
    /// Seed of its random numbers: no two associations share one.
    pub seed: AuthSeed,
}

/// Configuration of an association.
#[derive(Clone, Debug)]
pub struct FabricsHostConfig {
    /// NQN of this host.
    pub host: Nqn,
    /// Identifier of this host.
    pub host_id: [u8; 16],
    /// NQN of the subsystem; [`DISCOVERY_NQN`] for the discovery service.
    pub subsystem: Nqn,
    /// Authentication of this host, if the target asks for it; and of the target, which must then take part.
    pub auth: Option<FabricsHostAuth>,
    /// Key of its connections, which are then encrypted; of no effect in this crate.
    pub tls: Option<Arc<TlsPsk>>,
    /// Requested I/O queues.
    pub queues: QueueDemand,
    /// Requested entries of an I/O queue, 2 to 4096.
    pub queue_entries: u16,
    /// Namespaces to identify: each takes two commands at every bring-up, and whenever one of them changes.
    pub scope: NamespaceScope,
    /// Whether to ask for header digests.
    pub header_digest: bool,
    /// Whether to ask for data digests.
    pub data_digest: bool,
    /// Keep-alive timeout, ms; 0 to disable it.
    pub keep_alive_ms: u32,
    /// Time for a connection with its Connect command, ns.
    pub connect_ns: u64,
    /// Time from a connected stream to a live controller, ns, without the wait for CSTS.RDY, which CAP.TO limits. A
    /// controller that answers each command just in time, and has thousands of namespaces, would take days.
    pub bring_up_ns: u64,
    /// Shortest and longest pause before a reconnect, ns. It doubles with each attempt.
    pub reconnect_ns: [u64; 2],
    /// Time after which a lost association is given up, ns; unset for never.
    pub ctrl_loss_ns: Option<u64>,
    /// Time after which I/O fails while an association is lost, ns; unset for never.
    pub fast_io_fail_ns: Option<u64>,
    /// Time that a target may need to end the commands of an association beyond the keep-alive timeout, ns.
    pub quiesce_ns: u64,
}

impl FabricsHostConfig {
    /// The defaults of Linux where it has them.
    pub fn new(host: Nqn, host_id: [u8; 16], subsystem: Nqn) -> FabricsHostConfig {
        FabricsHostConfig {
            host,
            host_id,
            subsystem,
            auth: None,
            tls: None,
            queues: QueueDemand { submitters: 1, write_queues: 0, poll_queues: 0 },
            queue_entries: 128,
            scope: NamespaceScope::All,
            header_digest: false,
            data_digest: false,
            keep_alive_ms: 5000,
            connect_ns: 10_000_000_000,
            bring_up_ns: ADMIN_NS,
            reconnect_ns: [100_000_000, 10_000_000_000],
            ctrl_loss_ns: Some(600_000_000_000),
            fast_io_fail_ns: None,
            quiesce_ns: 5_000_000_000,
        }
    }

    /// Whether it is for the discovery service.
    pub fn is_discovery(&self) -> bool {
        self.subsystem.as_str() == DISCOVERY_NQN
    }
}

/// An event for the other owners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FabricsHostEvent {
    /// Connect a stream for the admin queue of this association; then call [`FabricsHost::admin_opened`], or
    /// [`FabricsHost::admin_closed`] if that fails.
    Open(u64),
    /// Send what [`FabricsHost::admin_fill`] still has, and close that stream; then call
    /// [`FabricsHost::admin_closed`].
    Close(u64),
    /// Command for the owner of this I/O queue.
    Queue(u16, FabricsQueueCommand),
    /// The association is live, for the first time or again.
    Live,
    /// [Namespaces](FabricsHost::namespaces) were added, removed or changed.
    NamespacesChanged,
    /// [States](FabricsHost::ana_state) of namespaces have changed.
    AnaChanged,
    /// The discovery log has changed.
    DiscoveryChanged,
    /// The log of a discovery service.
    Discovered(DiscoveredLog),
    /// An admin command of the user has ended.
    Completed {
        /// The user's number of the command.
        user: u64,
        /// Its status; [`NvmeStatus::HOST_ABORTED`] if the association was lost.
        status: NvmeStatus,
        /// Its result.
        result: u64,
        /// Its data, if it succeeded and reads data.
        data: Option<Box<[u8; IDENTIFY_BYTES]>>,
    },
    /// The association is lost; error recovery begins. If [`FabricsHost::wants_reset`], another association with the
    /// subsystem can shorten it.
    Lost(FabricsHostError),
    /// The next attempt to connect, ns.
    Retry(u64),
    /// `fast_io_fail_ns` has passed: I/O fails until the association is live again.
    FastFail,
    /// The reset of another controller has ended; true if that executes no command any more.
    OtherReset(ControllerInstance, bool),
    /// The target executes no command of associations up to this one any more.
    Fenced(u64, FenceEvidence),
    /// The association is given up: all I/O fails.
    Failed(FabricsHostError),
    /// All streams are closed for good.
    Over,
}

/// Purpose of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FabricsPurpose {
    Setup(FabricsStep),
    Scan(ScanStep),
    KeepAlive,
    EventLog,
    Ana,
    CrossReset(ControllerInstance),
    CrossResetLog,
    /// The shutdown, and reads of its progress.
    Shutdown,
    User {
        user: u64,
        is_read: bool,
    },
}

impl FabricsPurpose {
    pub(super) fn name(self) -> &'static str {
        match self {
            FabricsPurpose::Setup(step) => step.name(),
            FabricsPurpose::Scan(_) => "Identify (namespace)",
            FabricsPurpose::KeepAlive => "Keep Alive",
            FabricsPurpose::EventLog => "Get Log Page",
            FabricsPurpose::Ana => "Get Log Page (ANA)",
            FabricsPurpose::CrossReset(_) => "Cross-Controller Reset",
            FabricsPurpose::CrossResetLog => "Get Log Page (cross-controller reset)",
            FabricsPurpose::Shutdown => "Property Set (shutdown)",
            FabricsPurpose::User { .. } => "a command of the user",
        }
    }
}

/// Phase of an association.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FabricsPhase {
    /// No step is due.
    Idle,
    /// Waiting for the stream and its initialization.
    Open {
        until_ns: u64,
    },
    Setup(FabricsStep),
    /// Waiting for CSTS.RDY: the next read, and the last.
    Ready {
        at_ns: u64,
        until_ns: u64,
    },
    /// Waiting for the shutdown of the controller: the next read, and the last.
    Shutdown {
        at_ns: u64,
        until_ns: u64,
    },
    /// Waiting for all streams to be closed.
    Close {
        until_ns: u64,
    },
    /// Waiting for the next attempt.
    Pause {
        until_ns: u64,
    },
}

/// Time of the last loss, and what has followed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FabricsLoss {
    /// Time of the loss, or of the start; kept while the association does not become stable.
    pub(super) since_ns: Option<u64>,
    pub(super) attempts: u32,
    /// Pause before the next attempt.
    pub(super) pause_ns: u64,
    pub(super) is_fast_failed: bool,
    /// Time of the last bring-up, and whether a queue has connected since.
    pub(super) live_ns: u64,
    pub(super) is_settled: bool,
}

/// An association on its host's side.
#[derive(Debug)]
pub struct FabricsHost {
    pub(super) config: FabricsHostConfig,
    pub(super) state: ControllerState,
    pub(super) phase: FabricsPhase,
    /// Set during a bring-up: when it must be complete.
    pub(super) bring_up_until_ns: Option<u64>,
    pub(super) error: Option<FabricsHostError>,
    /// Number of the association; zero before the first.
    pub(super) association: u64,
    pub(super) admin: Option<FabricsAdmin<FabricsPurpose>>,
    /// Memory of the admin queue.
    pub(super) memory: Arc<RegionTable>,
    /// Whether there is a stream, or one is being connected or closed.
    pub(super) has_stream: bool,
    /// Identifier of the controller of the last association.
    pub(super) controller_id: Option<u16>,
    /// Whether to ask for that controller.
    pub(super) asks_for_same: bool,
    /// The authentication of the admin queue, and the result of its Connect.
    pub(super) auth: Option<(AuthHost, u64)>,
    pub(super) capabilities: Capabilities,
    pub(super) identify: IdentifyController,
    pub(super) nvm_limits: NvmLimits,
    pub(super) counts: Option<QueueCounts>,
    pub(super) queues: Vec<FabricsQueueUse>,
    pub(super) scan: Option<Scan>,
    pub(super) namespaces: Vec<ScannedNamespace>,
    /// Identifiers of all active namespaces.
    pub(super) active: Vec<u32>,
    pub(super) ana: Option<AnaLog>,
    /// When groups in transition must have left it.
    pub(super) ana_until_ns: Option<u64>,
    pub(super) wants_ana: bool,
    pub(super) wants_scan: bool,
    pub(super) wants_event: bool,
    pub(super) event_log: Option<u8>,
    pub(super) keep_alive: Option<KeepAlive>,
    pub(super) loss: FabricsLoss,
    /// Last association whose commands are executed no more.
    pub(super) fenced_through: u64,
    /// The last association with I/O that is lost and not fenced, and when its last stream was closed.
    pub(super) lost: Option<(u64, Option<u64>)>,
    /// Its controller, if another one can reset that, and nothing but that one is lost.
    pub(super) lost_instance: Option<ControllerInstance>,
    /// Time after which its controller is silent, ns.
    pub(super) lost_silence_ns: u64,
    /// Resets of other controllers.
    pub(super) cross_resets: RunningCrossResets,
    /// Whether a lost association may still execute commands at another controller than the last one: that controller
    /// proves nothing of it.
    pub(super) is_lost_elsewhere: bool,
    /// Whether a queue was started in the present association.
    pub(super) has_started: bool,
    /// Generation and entries of the discovery log that is being read.
    pub(super) log: Option<(u64, u64)>,
    /// What was read of it: entries, and the number of those that cannot be used.
    pub(super) discovered: (Vec<DiscoveryEntry>, usize),
    pub(super) log_reads: u32,
    /// Whether the shutdown was accepted and its progress is read.
    pub(super) reads_shutdown: bool,
    pub(super) events: VecDeque<FabricsHostEvent>,
}

impl FabricsHost {
    /// An association that was not started.
    pub fn new(config: FabricsHostConfig) -> FabricsHost {
        FabricsHost {
            config,
            state: ControllerState::New,
            phase: FabricsPhase::Idle,
            bring_up_until_ns: None,
            error: None,
            association: 0,
            admin: None,
            memory: Arc::default(),
            has_stream: false,
            controller_id: None,
            asks_for_same: false,
            auth: None,
            capabilities: Capabilities::default(),
            identify: IdentifyController::default(),
            nvm_limits: NvmLimits::default(),
            counts: None,
            queues: vec![],
            scan: None,
            namespaces: vec![],
            active: vec![],
            ana: None,
            ana_until_ns: None,
            wants_ana: false,
            wants_scan: false,
            wants_event: false,
            event_log: None,
            keep_alive: None,
            loss: FabricsLoss::default(),
            fenced_through: 0,
            lost: None,
            lost_instance: None,
            lost_silence_ns: 0,
            cross_resets: RunningCrossResets::default(),
            is_lost_elsewhere: false,
            has_started: false,
            log: None,
            discovered: (vec![], 0),
            log_reads: 0,
            reads_shutdown: false,
            events: VecDeque::new(),
        }
    }

    /// Its state.
    pub fn state(&self) -> ControllerState {
        self.state
    }

    /// Its configuration.
    pub fn config(&self) -> &FabricsHostConfig {
        &self.config
    }

    /// Number of the present or last association.
    pub fn association(&self) -> u64 {
        self.association
    }

    /// Reason of the last loss or failure.
    pub fn error(&self) -> Option<FabricsHostError> {
        self.error
    }

    /// Identify data of the controller, once it has been live.
    pub fn identify(&self) -> &IdentifyController {
        &self.identify
    }

    /// Identifier of the controller.
    pub fn controller_id(&self) -> Option<u16> {
        self.controller_id
    }

    /// Number of I/O queues of each kind that may be opened; `None` if the controller granted none.
    pub fn queue_counts(&self) -> Option<QueueCounts> {
        self.counts
    }

    /// Properties of an I/O queue for this association.
    pub fn queue_options(&self, qid: u16, segments_max: usize, fails_over: bool) -> FabricsIoQueueOptions {
        FabricsIoQueueOptions {
            qid,
            depth: self.queue_entries() - 1,
            segments_max,
            header_digest: self.config.header_digest,
            data_digest: self.config.data_digest,
            fails_over,
        }
    }

    /// Its namespaces in scope. Hardware queues number them in this order.
    pub fn namespaces(&self) -> &[ScannedNamespace] {
        &self.namespaces
    }

    /// Identifiers of its active namespaces, in scope or not.
    pub fn active_namespaces(&self) -> &[u32] {
        &self.active
    }

    /// Identifies no other namespace from now on.
    pub fn narrow_scope(&mut self, nsid: u32) {
        self.config.scope = NamespaceScope::One(nsid);
        self.namespaces.retain(|known| known.namespace.nsid == nsid);
    }

    /// State of a namespace's access by this controller; unset for an unknown one.
    pub fn ana_state(&self, nsid: u32) -> Option<AnaState> {
        let namespace = self.namespaces.iter().find(|known| known.namespace.nsid == nsid)?;
        Some(self.ana.as_ref().map_or(AnaState::Optimized, |log| log.state_of(namespace.ana_group)))
    }

    /// Last association whose commands the target is proven to execute no more.
    pub fn fenced_through(&self) -> u64 {
        self.fenced_through
    }

    /// The next event, in order.
    pub fn next_event(&mut self) -> Option<FabricsHostEvent> {
        self.events.pop_front()
    }

    /// Sizes queues that are opened before the first bring-up: for a controller that is known from another one.
    pub fn assume(&mut self, queue_entries: u16, counts: QueueCounts) {
        (self.capabilities.queue_entries_max, self.counts) = (queue_entries.into(), Some(counts));
    }

    /// Connects for the first time. Once is enough.
    pub fn start(&mut self, now_ns: u64) {
        if self.state.change(ControllerState::Connecting) {
            self.loss.since_ns = Some(now_ns);
            self.connect(now_ns);
        }
    }

    /// Ends a live association and connects again; requests in flight are retried.
    pub fn reset(&mut self, now_ns: u64) {
        if self.state == ControllerState::Live {
            self.lose(FabricsHostError::Reset, now_ns);
        }
    }

    /// Disconnects in order: queues are closed and their waiting requests fail, the controller is shut down. Ends with
    /// [`FabricsHostEvent::Over`].
    pub fn disconnect(&mut self, now_ns: u64) {
        match self.state {
            ControllerState::New | ControllerState::Dead => {
                self.state = ControllerState::DeletingNoIo;
                self.events.push_back(FabricsHostEvent::Over);
            }
            ControllerState::Live => {
                self.error = Some(FabricsHostError::Removed);
                self.state.change(ControllerState::Deleting);
                self.shut_down(now_ns);
            }
            ControllerState::Resetting | ControllerState::Connecting => self.give_up(FabricsHostError::Removed, now_ns),
            ControllerState::Deleting | ControllerState::DeletingNoIo => {}
        }
    }

    /// Sends an admin command of the user, identified by a number. It ends with [`FabricsHostEvent::Completed`].
    ///
    /// # Errors
    /// All slots are in use, or the association is not live: returns the number.
    pub fn submit_admin(
        &mut self,
        sqe: Sqe,
        data: FabricsData<'_>,
        user: u64,
        timeout_ns: u64,
        now_ns: u64,
    ) -> Result<(), u64> {
        let purpose = FabricsPurpose::User { user, is_read: matches!(data, FabricsData::Read(_)) };
        let is_live = self.state == ControllerState::Live;
        let is_sent = is_live && self.submit(sqe, data, purpose, now_ns.saturating_add(timeout_ns));
        is_sent.then_some(()).ok_or(user)
    }

    /// Records completed I/O, by which some controllers restart their keep-alive timer.
    pub fn note_traffic(&mut self) {
        self.keep_alive.iter_mut().for_each(KeepAlive::note_traffic);
    }

    /// Memory of the lists of the admin queue.
    pub fn admin_memory(&self) -> &Arc<RegionTable> {
        &self.memory
    }

    /// The stream of this association is connected.
    pub fn admin_opened(&mut self, association: u64, now_ns: u64) {
        if association == self.association && matches!(self.phase, FabricsPhase::Open { .. }) {
            self.stream_opened(now_ns);
        }
    }

    /// The stream of this association is broken, or the target has ended it.
    pub fn admin_lost(&mut self, association: u64, now_ns: u64) {
        if association == self.association {
            self.lose(FabricsHostError::Unreachable, now_ns);
        }
    }

    /// The stream of this association is closed, or was not connected.
    pub fn admin_closed(&mut self, association: u64, now_ns: u64) {
        if association == self.association && self.has_stream {
            self.has_stream = false;
            self.lose(FabricsHostError::Unreachable, now_ns);
            self.stream_closed(now_ns);
        }
    }

    /// Whether [`FabricsHost::admin_fill`] has something to send.
    pub fn admin_wants_send(&self) -> bool {
        self.has_stream && self.admin.as_ref().is_some_and(FabricsAdmin::wants_send)
    }

    /// Adds PDUs to an empty list of the admin queue. Returns its number, or `None` if there are none.
    pub fn admin_fill(&mut self, list: &mut SendList) -> Option<u64> {
        self.admin.as_mut().filter(|_| self.has_stream)?.fill(list)
    }

    /// The kernel is done with the memory of all lists of this association up to this number.
    pub fn admin_sent(&mut self, association: u64, number: u64, now_ns: u64) {
        if association == self.association {
            self.admin.iter_mut().for_each(|admin| admin.sent(number));
            self.admin_receive(association, &[], now_ns);
        }
    }

    /// Takes bytes received on the stream of this association, all of them.
    pub fn admin_receive(&mut self, association: u64, mut bytes: &[u8], now_ns: u64) {
        while association == self.association
            && let Some(event) = self.admin.as_mut().and_then(|admin| admin.receive(&mut bytes))
        {
            match event {
                FabricsAdminEvent::Started => self.stream_started(now_ns),
                FabricsAdminEvent::Completed(completed) => self.completed(&completed, now_ns),
                FabricsAdminEvent::Ended(end) => self.lose_by(end, now_ns),
            }
        }
    }

    fn lose_by(&mut self, end: TcpEnd, now_ns: u64) {
        let error =
            if end == TcpEnd::Closed { FabricsHostError::Unreachable } else { FabricsHostError::Terminated(end) };
        self.lose(error, now_ns);
    }

    /// Executes all due steps. Returns the latest time of the next call.
    pub fn advance(&mut self, now_ns: u64) -> Option<u64> {
        self.expire(now_ns);
        self.step(now_ns);
        self.watch_live(now_ns);
        self.send_keep_alive(now_ns);
        self.look_at_loss(now_ns);
        self.deadline_ns()
    }

    fn deadline_ns(&self) -> Option<u64> {
        let phase_ns = match self.phase {
            FabricsPhase::Idle | FabricsPhase::Setup(_) => None,
            FabricsPhase::Open { until_ns } | FabricsPhase::Close { until_ns } | FabricsPhase::Pause { until_ns } => {
                Some(until_ns)
            }
            FabricsPhase::Ready { at_ns, .. } | FabricsPhase::Shutdown { at_ns, .. } => Some(at_ns),
        };
        let admin_ns = self.admin.as_ref().and_then(FabricsAdmin::deadline_ns);
        let keep_alive_ns = self.keep_alive.as_ref().map(KeepAlive::due_ns).filter(|ns| *ns < u64::MAX);
        let reset_ns = self.cross_resets.due_ns();
        let all_ns = [
            phase_ns,
            self.bring_up_until_ns,
            admin_ns,
            keep_alive_ns,
            self.ana_until_ns,
            self.loss_due_ns(),
            reset_ns,
        ];
        all_ns.into_iter().flatten().min()
    }

    /// Handles an overdue bring-up, and overdue commands.
    fn expire(&mut self, now_ns: u64) {
        if self.bring_up_until_ns.take_if(|until_ns| now_ns >= *until_ns).is_some() {
            let (step, limit) = (self.step_name(), Duration::from_nanos(self.config.bring_up_ns));
            let of_many = self.config.scope == NamespaceScope::All && self.scan.as_ref().is_some_and(Scan::has_many);
            self.lose(FabricsHostError::SlowBringUp { step, limit, of_many }, now_ns);
        }
        if let Some(purpose) = self.admin.as_ref().and_then(|admin| admin.late(now_ns)).copied() {
            self.lose(FabricsHostError::Timeout(purpose.name()), now_ns);
        }
        if self.ana_until_ns.is_some_and(|until_ns| now_ns >= until_ns) {
            self.ana_until_ns = None;
            self.lose(FabricsHostError::AnaTransition, now_ns);
        }
    }

    /// Executes a step of the present phase.
    fn step(&mut self, now_ns: u64) {
        match self.phase {
            FabricsPhase::Open { until_ns } if now_ns >= until_ns => {
                self.lose(FabricsHostError::Timeout("the connection"), now_ns);
            }
            FabricsPhase::Ready { at_ns, until_ns } if now_ns >= at_ns => self.look_at_ready(until_ns, now_ns),
            FabricsPhase::Shutdown { at_ns, until_ns } if now_ns >= at_ns => self.look_at_shutdown(until_ns, now_ns),
            FabricsPhase::Close { .. } => self.look_at_close(now_ns),
            FabricsPhase::Pause { until_ns } if now_ns >= until_ns => self.connect(now_ns),
            _ => {}
        }
    }

    /// Sends an admin command, if a slot is free.
    pub(super) fn submit(
        &mut self,
        sqe: Sqe,
        data: FabricsData<'_>,
        purpose: FabricsPurpose,
        deadline_ns: u64,
    ) -> bool {
        self.admin.as_mut().is_some_and(|admin| admin.submit(sqe, data, purpose, deadline_ns))
    }

    fn completed(&mut self, completed: &FabricsCompleted<FabricsPurpose>, now_ns: u64) {
        let FabricsCompleted { slot, purpose, status, result } = *completed;
        let Some(purpose) = purpose else { return self.async_event(status, result, now_ns) };
        match purpose {
            FabricsPurpose::Setup(step) => self.setup_completed(step, slot, status, result, now_ns),
            FabricsPurpose::Scan(_) => self.scan_completed(slot, status, now_ns),
            FabricsPurpose::KeepAlive if status.is_success() => {
                self.keep_alive.iter_mut().for_each(|keep_alive| keep_alive.answered(now_ns));
            }
            FabricsPurpose::KeepAlive => {
                self.lose(FabricsHostError::Command { command: purpose.name(), status }, now_ns);
            }
            // Reading the log page has cleared the event: the next one may arrive.
            FabricsPurpose::EventLog => self.wants_event = true,
            FabricsPurpose::Ana => self.ana_read(status, now_ns),
            FabricsPurpose::CrossReset(instance) => self.cross_reset_answered(instance, status, result, now_ns),
            FabricsPurpose::CrossResetLog => self.cross_reset_log_read(slot, status, now_ns),
            FabricsPurpose::Shutdown => self.shutdown_completed(status, result, now_ns),
            FabricsPurpose::User { user, is_read } => {
                let admin = self.admin.as_ref().filter(|_| is_read && status.is_success());
                let data = admin.map(|admin| admin.data(slot));
                self.events.push_back(FabricsHostEvent::Completed { user, status, result, data });
            }
        }
        if purpose != FabricsPurpose::KeepAlive {
            self.note_traffic();
        }
    }

    fn async_event(&mut self, status: NvmeStatus, result: u64, now_ns: u64) {
        if !status.is_success() {
            // The controller does not support the request; there is no alternative.
            return;
        }
        let (kind, info, log) = (result & 7, result >> 8 & 0xff, (result >> 16) as u8);
        match (kind, info) {
            (EVENT_ERROR, ERROR_PERSISTENT) => self.reset(now_ns),
            (EVENT_NOTICE, NOTICE_NAMESPACES) => self.wants_scan = true,
            (EVENT_NOTICE, NOTICE_ANA) => self.wants_ana = true,
            (EVENT_NOTICE, NOTICE_CROSS_RESET) => self.cross_resets.wants_log = true,
            (EVENT_NOTICE, 0xf0) => self.events.push_back(FabricsHostEvent::DiscoveryChanged),
            _ => {}
        }
        // An event stays masked until its log page was read; those with a use of their own are read in any case.
        match log {
            0 | ANA_LOG | CROSS_RESET_LOG => self.wants_event = true,
            lid => self.event_log = Some(lid),
        }
    }

    /// Periodic work of a live association.
    fn watch_live(&mut self, now_ns: u64) {
        if self.state != ControllerState::Live {
            return;
        }
        let deadline_ns = now_ns.saturating_add(ADMIN_NS);
        if let Some(lid) = self.event_log {
            let sqe = Sqe::get_log_page(lid, u32::MAX, 0, LOG_DWORDS, 0);
            if self.submit(sqe, FabricsData::Read(LOG_DWORDS * 4), FabricsPurpose::EventLog, deadline_ns) {
                self.event_log = None;
            }
        }
        if self.wants_ana && self.read_ana(now_ns) {
            self.wants_ana = false;
        }
        self.read_cross_reset_log(now_ns);
        if self.wants_scan && self.scan.is_none() {
            self.wants_scan = false;
            self.scan = Some(Scan::new(self.config.scope, self.namespaces.clone()));
            self.go_on_scanning(now_ns);
        }
        if self.wants_event
            && let Some(admin) = &mut self.admin
        {
            self.wants_event = false;
            admin.arm_event();
        }
    }

    fn send_keep_alive(&mut self, now_ns: u64) {
        let Some(keep_alive) = &mut self.keep_alive else { return };
        if !keep_alive.is_due(now_ns) {
            return;
        }
        let deadline_ns = now_ns.saturating_add(keep_alive.timeout_ns());
        let purpose = FabricsPurpose::KeepAlive;
        if !self.submit(Sqe::new(admin::KEEP_ALIVE, 0), FabricsData::None, purpose, deadline_ns) {
            self.lose(FabricsHostError::Timeout(purpose.name()), now_ns);
        }
    }
}
