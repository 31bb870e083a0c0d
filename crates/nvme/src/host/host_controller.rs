//! A controller on its host's side: bring-up, monitoring, reset and removal.
//!
//! Owned by one thread, which calls [`HostController::advance`] when the admin queue's interrupt has come, when the
//! returned time is reached and after each call of another method. Without interrupts the returned time is that of the
//! next poll. The owners of I/O queues are other threads. They get
//! commands by [`HostEvent::Queue`], and their reports are passed on.
//!
//! ```text
//!   New ──▶ Connecting ──────────────▶ Live ──▶ Resetting ──┐
//!              ▲   enable, identify,                        │ queues stop, are deleted, controller disabled,
//!              │   queues, namespaces                       │ queues cancel
//!              └────────────────────────────────────────────┘
//!   on failure or removal: Deleting, the same way down, then Dead or DeletingNoIo
//! ```
//!
//! Memory that the controller may access is released only after the controller is proven silent; until then queues are
//! not told to cancel. If silence cannot be proven, the requests stay in flight and the controller is checked
//! periodically.

use std::collections::VecDeque;

use blkyard_mem::{Region, View};
use blkyard_mq::QueueCounts;

use crate::host::admin::{AdminCompleted, AdminData, AdminMemory, AdminQueue};
use crate::host::bring_up::SetupStep;
use crate::host::io_queues::IoQueueSlot;
use crate::host::nvm_limits::NvmLimits;
use crate::host::scan::{Scan, ScanStep, ScannedNamespace};
use crate::host::teardown::DeleteQueues;
use crate::host::watch::{HostWatch, KeepAlive};
use crate::host::{
    ControllerState, ControllerTransport, DeviceGone, Disable, Enable, HostStep, NvmeHostError, QueueDemand,
};
use crate::registers::Capabilities;
use crate::{Doorbells, IDENTIFY_BYTES, IdentifyController, IoQueueCommand, NvmeStatus, PAGE, Sqe};

/// Polling interval of the admin queue of a controller without interrupts, ns: while commands are in flight, and
/// while only an asynchronous event is awaited.
const ADMIN_POLL_NS: u64 = 1_000_000;
const EVENT_POLL_NS: u64 = 1_000_000_000;

/// Configuration of a controller.
#[derive(Clone, Copy, Debug)]
pub struct NvmeHostConfig {
    /// Requested I/O queues.
    pub queues: QueueDemand,
    /// Requested entries of their rings, 2 to 4095.
    pub ring_entries: u16,
    /// Pages for long lists of each queue, at least 5.
    pub list_pages: u16,
    /// Whether to use shadow doorbells if the controller supports them.
    pub has_shadow: bool,
    /// Keep-alive timeout, ms; 0 to disable it.
    pub keep_alive_ms: u32,
}

impl Default for NvmeHostConfig {
    fn default() -> NvmeHostConfig {
        NvmeHostConfig {
            queues: QueueDemand { submitters: 1, write_queues: 0, poll_queues: 0 },
            // As in Linux (`io_queue_depth`).
            ring_entries: 1024,
            // Sixteen concurrent requests of more than 128 KiB, or three of 8 MiB.
            list_pages: 16,
            has_shadow: true,
            keep_alive_ms: 0,
        }
    }
}

/// An event for the other owners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// Command for the owner of this I/O queue.
    Queue(u16, IoQueueCommand),
    /// The controller is live, for the first time or again. New queues can be [taken](HostController::take_queue).
    Live,
    /// [Namespaces](HostController::namespaces) were added, removed or changed.
    NamespacesChanged,
    /// An admin command of the user has ended.
    Completed {
        /// The user's number of the command.
        user: u64,
        /// Its status.
        status: NvmeStatus,
        /// Its result.
        result: u64,
        /// Its data, if it succeeded and reads data.
        data: Option<Box<[u8; IDENTIFY_BYTES]>>,
    },
    /// The controller is shut down until it is [resumed](HostController::resume).
    Suspended,
    /// The controller has failed. Requests in flight fail once it is proven silent.
    Failed(NvmeHostError),
    /// The controller is permanently silent.
    Over,
}

/// Purpose of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdminPurpose {
    Setup(SetupStep),
    Scan(ScanStep),
    Delete,
    Abort,
    KeepAlive,
    EventLog,
    User { user: u64, is_read: bool },
}

impl AdminPurpose {
    pub(crate) fn name(self) -> &'static str {
        match self {
            AdminPurpose::Setup(step) => step.name(),
            AdminPurpose::Scan(_) => "Identify (namespace)",
            AdminPurpose::Delete => "Delete I/O Queue",
            AdminPurpose::Abort => "Abort",
            AdminPurpose::KeepAlive => "Keep Alive",
            AdminPurpose::EventLog => "Get Log Page",
            AdminPurpose::User { .. } => "a command of the user",
        }
    }
}

/// Phase of bring-up or teardown.
#[derive(Debug)]
pub(crate) enum HostPhase {
    /// No step is due.
    Idle,
    Enable(Enable),
    Setup(SetupStep),
    /// Waiting for all I/O queues to stop. Until then requests in flight may complete, within the time limit.
    Stop {
        until_ns: Option<u64>,
    },
    Delete(DeleteQueues),
    Disable(Disable),
    /// Disabling has failed; retried at this time.
    Unproven(u64),
    /// Waiting for all I/O queues to cancel their requests in flight.
    Cancel,
}

/// A controller on its host's side.
#[derive(Debug)]
pub struct HostController<T> {
    pub(crate) transport: T,
    pub(crate) config: NvmeHostConfig,
    pub(crate) state: ControllerState,
    pub(crate) phase: HostPhase,
    /// Whether the controller stays disabled after the teardown.
    pub(crate) is_ending: bool,
    /// Whether it was removed without a failure.
    pub(crate) is_removed: bool,
    /// Whether it stays disabled until it is resumed.
    pub(crate) wants_suspend: bool,
    /// Whether its admin queue has stopped responding: it gets no more commands.
    pub(crate) is_mute: bool,
    pub(crate) error: Option<NvmeHostError>,
    pub(crate) admin: Option<AdminQueue<AdminPurpose>>,
    /// Memory of the admin queue until there is one; the controller may be enabled with it.
    pub(crate) admin_memory: Option<AdminMemory>,
    /// Doorbells, or memory in their place.
    pub(crate) registers: Option<View>,
    pub(crate) doorbells: Option<Doorbells>,
    pub(crate) has_shadow: bool,
    pub(crate) capabilities: Capabilities,
    pub(crate) identify: IdentifyController,
    pub(crate) nvm_limits: NvmLimits,
    /// Requested and planned queues during set-up; working queues.
    pub(crate) asked: u16,
    pub(crate) planned: Option<QueueCounts>,
    pub(crate) counts: Option<QueueCounts>,
    pub(crate) queues: Vec<IoQueueSlot>,
    /// Time by which the commands of the bring-up must be complete, ns.
    pub(crate) set_up_until_ns: u64,
    pub(crate) scan: Option<Scan>,
    pub(crate) namespaces: Vec<ScannedNamespace>,
    pub(crate) watch: HostWatch,
    pub(crate) keep_alive: Option<KeepAlive>,
    pub(crate) events: VecDeque<HostEvent>,
    completions: Vec<AdminCompleted<AdminPurpose>>,
}

impl<T: ControllerTransport> HostController<T> {
    /// A controller that was not accessed yet.
    pub fn new(transport: T, config: NvmeHostConfig) -> HostController<T> {
        HostController {
            transport,
            config,
            state: ControllerState::New,
            phase: HostPhase::Idle,
            is_ending: false,
            is_removed: false,
            wants_suspend: false,
            is_mute: false,
            error: None,
            admin: None,
            admin_memory: None,
            registers: None,
            doorbells: None,
            has_shadow: false,
            capabilities: Capabilities::default(),
            identify: IdentifyController::default(),
            nvm_limits: NvmLimits::default(),
            asked: 0,
            planned: None,
            counts: None,
            queues: vec![],
            set_up_until_ns: 0,
            scan: None,
            namespaces: vec![],
            watch: HostWatch::default(),
            keep_alive: None,
            events: VecDeque::new(),
            completions: vec![],
        }
    }

    /// Its state.
    pub fn state(&self) -> ControllerState {
        self.state
    }

    /// Reason of its failure, if it has failed.
    pub fn error(&self) -> Option<NvmeHostError> {
        self.error
    }

    /// Its identify data, once it has been live.
    pub fn identify(&self) -> &IdentifyController {
        &self.identify
    }

    /// Number of working I/O queues of each kind; `None` if the controller granted none.
    pub fn queue_counts(&self) -> Option<QueueCounts> {
        self.counts
    }

    /// Its namespaces. Hardware queues number them in this order.
    pub fn namespaces(&self) -> &[ScannedNamespace] {
        &self.namespaces
    }

    /// The transport, for its owners.
    pub fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    /// The next event, in order.
    pub fn next_event(&mut self) -> Option<HostEvent> {
        self.events.pop_front()
    }

    /// Brings a new controller up. Once is enough.
    pub fn start(&mut self, now_ns: u64) {
        if self.state.change(ControllerState::Connecting) {
            self.connect(now_ns);
        }
    }

    /// Resets a live controller; requests in flight are retried afterwards. Returns whether a reset starts; a running
    /// reset is not restarted.
    pub fn reset(&mut self, now_ns: u64) -> bool {
        let begins = self.state == ControllerState::Live && self.state.change(ControllerState::Resetting);
        if begins {
            self.tear_down(false, now_ns);
        }
        begins
    }

    /// Shuts a controller down until [`HostController::resume`]. Requests in flight may complete first; later requests
    /// wait without a limit. A controller that is not live yet is suspended once it is.
    pub fn suspend(&mut self, now_ns: u64) {
        self.wants_suspend = true;
        if self.state == ControllerState::Live && self.state.change(ControllerState::Resetting) {
            self.tear_down(true, now_ns);
        }
    }

    /// Brings a suspended controller up again, after the end of a running shutdown.
    pub fn resume(&mut self, now_ns: u64) {
        self.wants_suspend = false;
        if self.is_suspended() && self.state.change(ControllerState::Connecting) {
            self.connect(now_ns);
        }
    }

    /// Whether it is shut down and can be resumed.
    pub fn is_suspended(&self) -> bool {
        self.state == ControllerState::Resetting && matches!(self.phase, HostPhase::Idle)
    }

    /// Removes the controller: shuts it down and fails requests in flight.
    pub fn remove(&mut self, now_ns: u64) {
        self.is_removed = true;
        match self.state {
            ControllerState::New | ControllerState::Dead => {
                // No queue is in use.
                self.state = ControllerState::DeletingNoIo;
                self.events.push_back(HostEvent::Over);
            }
            _ => self.end(NvmeHostError::Removed, now_ns),
        }
    }

    /// Checks that the controller is present, has not failed and is enabled. For events of the transport, and before a
    /// late command is judged.
    pub fn check(&mut self, now_ns: u64) {
        if matches!(self.state, ControllerState::New | ControllerState::Dead | ControllerState::DeletingNoIo) {
            return;
        }
        match self.transport.status() {
            Err(gone) => self.end(gone.into(), now_ns),
            Ok(status) if status.fatal && self.is_ending => self.is_mute = true,
            Ok(status) if status.fatal || status.subsystem_reset && self.capabilities.subsystem_reset => {
                self.reset(now_ns);
            }
            // Another party has reset it.
            Ok(status) if !status.ready && self.state == ControllerState::Live => {
                self.reset(now_ns);
            }
            Ok(_) => {}
        }
    }

    /// Sends an admin command of the user, identified by a number. It ends with [`HostEvent::Completed`], also if the
    /// controller is reset meanwhile. A late command is aborted; if it does not end then either, the controller is
    /// reset.
    ///
    /// # Errors
    /// All slots are in use, or the controller is not live: returns the number.
    pub fn submit_admin(
        &mut self,
        sqe: Sqe,
        data: AdminData<'_>,
        user: u64,
        timeout_ns: u64,
        now_ns: u64,
    ) -> Result<(), u64> {
        let purpose = AdminPurpose::User { user, is_read: matches!(data, AdminData::Read) };
        let is_live = self.state == ControllerState::Live;
        let is_sent = is_live && self.submit(sqe, data, purpose, now_ns.saturating_add(timeout_ns));
        is_sent.then_some(()).ok_or(user)
    }

    /// Executes all due steps. Returns the latest time of the next call.
    pub fn advance(&mut self, now_ns: u64) -> Option<u64> {
        loop {
            self.poll_admin(now_ns);
            self.expire_admin(now_ns);
            let deadline_ns = match self.step(now_ns) {
                Ok(deadline_ns) => deadline_ns,
                // The phase has changed.
                Err(PhaseChanged) => continue,
            };
            self.watch_live(now_ns);
            if !self.send_keep_alive(now_ns) {
                continue;
            }
            if let Some(admin) = &mut self.admin
                && !admin.announce(&mut self.transport)
            {
                self.end(DeviceGone.into(), now_ns);
                continue;
            }
            let admin = self.admin_due_ns(now_ns);
            let keep_alive = self.keep_alive.as_ref().map(KeepAlive::due_ns);
            return [deadline_ns, admin, keep_alive].into_iter().flatten().min();
        }
    }

    /// When the admin queue must be polled next.
    fn admin_due_ns(&self, now_ns: u64) -> Option<u64> {
        let admin = self.admin.as_ref().filter(|_| !self.is_mute)?;
        let deadline_ns = admin.deadline_ns();
        let poll_ns = match deadline_ns {
            _ if self.transport.vectors() > 0 => None,
            Some(_) => Some(ADMIN_POLL_NS),
            None => admin.awaits_event().then_some(EVENT_POLL_NS),
        };
        let poll_ns = poll_ns.map(|poll_ns| now_ns.saturating_add(poll_ns));
        [deadline_ns, poll_ns].into_iter().flatten().min()
    }

    /// Handles completions of the admin queue.
    fn poll_admin(&mut self, now_ns: u64) {
        let Some(admin) = &mut self.admin else { return };
        let mut completions = std::mem::take(&mut self.completions);
        admin.poll(&mut self.transport, &mut completions);
        for completed in completions.drain(..) {
            self.admin_completed(&completed, now_ns);
        }
        self.completions = completions;
    }

    fn admin_completed(&mut self, completed: &AdminCompleted<AdminPurpose>, now_ns: u64) {
        let AdminCompleted { slot, purpose, status, result } = *completed;
        let Some(purpose) = purpose else {
            self.async_event(status, result, now_ns);
            return;
        };
        match purpose {
            AdminPurpose::Setup(step) => self.setup_completed(step, slot, status, result, now_ns),
            AdminPurpose::Scan(_) => self.scan_completed(slot, status, now_ns),
            AdminPurpose::Delete => {
                if let HostPhase::Delete(delete) = &mut self.phase {
                    delete.completed();
                }
            }
            AdminPurpose::Abort => self.watch.abort_completed(),
            AdminPurpose::KeepAlive if status.is_success() => {
                self.keep_alive.iter_mut().for_each(|keep_alive| keep_alive.answered(now_ns));
            }
            AdminPurpose::KeepAlive => {
                let error = NvmeHostError::Command { command: purpose.name(), status };
                self.keep_alive_failed(error, now_ns);
            }
            // Reading the log page has cleared the event: the next one may arrive.
            AdminPurpose::EventLog => self.watch.wants_event = true,
            AdminPurpose::User { user, is_read } => {
                let admin = self.admin.as_ref().filter(|_| is_read && status.is_success());
                let data = admin.map(|admin| admin.data(slot));
                self.events.push_back(HostEvent::Completed { user, status, result, data });
            }
        }
    }

    /// Handles overdue admin commands.
    fn expire_admin(&mut self, now_ns: u64) {
        if self.is_mute {
            return;
        }
        let Some(purpose) = self.admin.as_ref().and_then(|admin| admin.late(now_ns)).copied() else { return };
        if matches!(purpose, AdminPurpose::User { .. }) && self.abort_late_admin(now_ns) {
            return;
        }
        // Until the controller is disabled, the admin queue returns no more completions in any case.
        self.is_mute = true;
        match self.state {
            ControllerState::Connecting => self.end(NvmeHostError::Timeout(purpose.name()), now_ns),
            ControllerState::Live => {
                self.check(now_ns);
                self.reset(now_ns);
            }
            // The teardown does not wait for this command.
            _ => {}
        }
    }

    /// Sends an admin command, if a slot is free.
    pub(crate) fn submit(&mut self, sqe: Sqe, data: AdminData<'_>, purpose: AdminPurpose, deadline_ns: u64) -> bool {
        let Some(admin) = self.admin.as_mut().filter(|_| !self.is_mute) else { return false };
        admin.submit(sqe, data, purpose, deadline_ns).is_ok()
    }

    /// Executes one step of the present phase.
    fn step(&mut self, now_ns: u64) -> Result<Option<u64>, PhaseChanged> {
        match &mut self.phase {
            HostPhase::Idle | HostPhase::Setup(_) => Ok(None),
            HostPhase::Enable(enable) => match enable.advance(&mut self.transport, now_ns) {
                HostStep::Wait { deadline_ns } => Ok(Some(deadline_ns)),
                HostStep::Done => {
                    self.enabled(now_ns);
                    Err(PhaseChanged)
                }
                HostStep::Failed(error) => {
                    self.end(error, now_ns);
                    Err(PhaseChanged)
                }
            },
            HostPhase::Stop { .. }
            | HostPhase::Delete(_)
            | HostPhase::Disable(_)
            | HostPhase::Unproven(_)
            | HostPhase::Cancel => self.step_down(now_ns),
        }
    }

    /// Memory in place of the doorbells, for a controller that does not share them.
    pub(crate) fn private_doorbells(&self) -> Result<View, NvmeHostError> {
        let bytes = self.transport.doorbell_bytes().clamp(PAGE as usize, 1 << 19).next_multiple_of(PAGE as usize);
        let region = Region::anonymous(bytes).map_err(|_| NvmeHostError::Memory)?;
        View::new(region, 0, bytes, PAGE as usize).ok_or(NvmeHostError::Memory)
    }
}

/// Changes the phase; another step may be due.
#[derive(Debug)]
pub(crate) struct PhaseChanged;
