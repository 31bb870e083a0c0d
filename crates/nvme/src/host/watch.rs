//! Monitoring of a live controller: late commands, asynchronous events, keep-alive.

use crate::host::admin::{ADMIN_TIMEOUT_NS, AdminData};
use crate::host::host_controller::AdminPurpose;
use crate::host::scan::{NamespaceScope, Scan};
use crate::host::{ControllerState, ControllerTransport, HostController, NvmeHostError};
use crate::{LateCommand, NvmeStatus, Sqe, admin};

/// Types of asynchronous events: error and notice.
const EVENT_ERROR: u64 = 0;
const EVENT_NOTICE: u64 = 2;
/// Error: persistent internal error.
const ERROR_PERSISTENT: u64 = 3;
/// Notice: namespace attributes changed.
const NOTICE_NAMESPACES: u64 = 0;
/// Time for an admin command of the user to end after its Abort was sent, ns.
const ABORTED_NS: u64 = 5_000_000_000;
/// Dwords of a log page to read in order to clear an event.
const LOG_DWORDS: u32 = 128;

/// Decision about a late command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LateAction {
    /// No action: it has ended already, or will once the controller is silent.
    Nothing,
    /// Extend its timeout once more.
    MoreTime,
    /// Abort sent; its timeout is extended once more.
    Abort,
    /// Reset the controller.
    Reset,
    /// Give the controller up.
    GiveUp,
}

/// Monitoring state.
#[derive(Debug, Default)]
pub(crate) struct HostWatch {
    /// Available Abort commands, of the controller's limit.
    aborts_left: u16,
    /// Whether to send the Asynchronous Event Request.
    pub(crate) wants_event: bool,
    pub(crate) wants_scan: bool,
    /// A log page to be read.
    log: Option<u8>,
}

impl HostWatch {
    /// State for a newly enabled controller that accepts `abort_limit` + 1 Abort commands.
    pub(crate) fn start(&mut self, abort_limit: u8) {
        *self = HostWatch { aborts_left: u16::from(abort_limit) + 1, ..HostWatch::default() };
    }

    pub(crate) fn abort_completed(&mut self) {
        self.aborts_left += 1;
    }
}

/// Keep-alive commands at a fraction of the timeout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeepAlive {
    timeout_ns: u64,
    interval_ns: u64,
    is_by_traffic: bool,
    /// Whether commands have completed since the last check.
    saw_traffic: bool,
    sent_ns: Option<u64>,
    due_ns: u64,
}

impl KeepAlive {
    /// Keep-alive with this timeout. A controller that restarts its timer at any command is checked more often, and
    /// gets Keep Alive only without other traffic.
    pub(crate) fn new(timeout_ns: u64, is_by_traffic: bool, now_ns: u64) -> KeepAlive {
        let interval_ns = timeout_ns / if is_by_traffic { 4 } else { 2 };
        let due_ns = now_ns.saturating_add(interval_ns);
        KeepAlive { timeout_ns, interval_ns, is_by_traffic, saw_traffic: false, sent_ns: None, due_ns }
    }

    /// Time of the next check.
    pub(crate) fn due_ns(&self) -> u64 {
        if self.sent_ns.is_some() { u64::MAX } else { self.due_ns }
    }

    /// Whether to send a command now.
    pub(crate) fn is_due(&mut self, now_ns: u64) -> bool {
        if now_ns < self.due_ns() {
            return false;
        }
        if self.is_by_traffic && std::mem::take(&mut self.saw_traffic) {
            self.due_ns = now_ns.saturating_add(self.interval_ns);
            return false;
        }
        self.sent_ns = Some(now_ns);
        true
    }

    /// The controller has completed a command.
    pub(crate) fn note_traffic(&mut self) {
        self.saw_traffic = true;
    }

    /// Time after which the controller ends an association without commands, ns.
    pub(crate) fn timeout_ns(&self) -> u64 {
        self.timeout_ns
    }

    /// Handles a completed command: the next one is due an interval after this one was sent.
    pub(crate) fn answered(&mut self, now_ns: u64) {
        let round_trip_ns = self.sent_ns.take().map_or(0, |sent_ns| now_ns.saturating_sub(sent_ns));
        self.saw_traffic = false;
        self.due_ns = now_ns.saturating_add(self.interval_ns.saturating_sub(round_trip_ns));
    }
}

impl<T: ControllerTransport> HostController<T> {
    /// Decides about a late command, in the order of Linux's driver. Its queue was polled first without a completion.
    pub fn late_command(&mut self, late: LateCommand, now_ns: u64) -> LateAction {
        let Some(queue) = self.queues.get(usize::from(late.qid).wrapping_sub(1)) else { return LateAction::Nothing };
        if queue.starts != late.starts {
            // From before a reset, which has cancelled it.
            return LateAction::Nothing;
        }
        let was_live = self.state == ControllerState::Live;
        self.check(now_ns);
        match self.state {
            ControllerState::Live => {}
            ControllerState::Resetting if was_live => return LateAction::Reset,
            ControllerState::Resetting => return LateAction::MoreTime,
            ControllerState::Connecting | ControllerState::New => return LateAction::Nothing,
            _ => return LateAction::GiveUp,
        }
        let has_budget = self.watch.aborts_left > 0;
        let aborted = self.queue_mut(late.qid).and_then(|queue| queue.aborted.get_mut(usize::from(late.slot)));
        let Some(aborted) = aborted else { return LateAction::Nothing };
        if *aborted == Some(late.sequence) {
            self.reset(now_ns);
            return LateAction::Reset;
        }
        if !has_budget {
            return LateAction::MoreTime;
        }
        *aborted = Some(late.sequence);
        let deadline_ns = now_ns.saturating_add(ADMIN_TIMEOUT_NS);
        if !self.submit(Sqe::abort(late.qid, late.cid), AdminData::None, AdminPurpose::Abort, deadline_ns) {
            return LateAction::MoreTime;
        }
        self.watch.aborts_left -= 1;
        LateAction::Abort
    }

    /// Aborts the late admin command of the user, and gives it time to end. Returns false if it was aborted already, or
    /// the controller accepts no Abort now.
    pub(crate) fn abort_late_admin(&mut self, now_ns: u64) -> bool {
        if self.state != ControllerState::Live || self.watch.aborts_left == 0 {
            return false;
        }
        let aborted_ns = now_ns.saturating_add(ABORTED_NS);
        let Some(cid) = self.admin.as_mut().and_then(|admin| admin.grant_time(now_ns, aborted_ns)) else {
            return false;
        };
        let deadline_ns = now_ns.saturating_add(ADMIN_TIMEOUT_NS);
        let is_sent = self.submit(Sqe::abort(0, cid), AdminData::None, AdminPurpose::Abort, deadline_ns);
        self.watch.aborts_left -= u16::from(is_sent);
        is_sent
    }

    /// Records completed I/O, which restarts some controllers' keep-alive timer.
    pub fn note_traffic(&mut self) {
        self.keep_alive.iter_mut().for_each(KeepAlive::note_traffic);
    }

    /// Periodic work for a live controller.
    pub(crate) fn watch_live(&mut self, now_ns: u64) {
        if self.state != ControllerState::Live {
            return;
        }
        let deadline_ns = now_ns.saturating_add(ADMIN_TIMEOUT_NS);
        if let Some(lid) = self.watch.log
            && self.submit(
                Sqe::get_log_page(lid, u32::MAX, 0, LOG_DWORDS, 0),
                AdminData::Read,
                AdminPurpose::EventLog,
                deadline_ns,
            )
        {
            self.watch.log = None;
        }
        if self.watch.wants_scan && self.scan.is_none() {
            self.watch.wants_scan = false;
            self.scan = Some(Scan::new(NamespaceScope::All, self.namespaces.clone()));
            self.go_on_scanning(now_ns);
        }
        if self.watch.wants_event
            && let Some(admin) = &mut self.admin
        {
            self.watch.wants_event = false;
            admin.arm_event();
        }
    }

    /// Sends the keep-alive command when it is due: from Set Features on, also while namespaces are scanned on the way
    /// up. Returns false if it could not be sent: the controller is on its way down.
    pub(crate) fn send_keep_alive(&mut self, now_ns: u64) -> bool {
        let Some(keep_alive) = &mut self.keep_alive else { return true };
        if !keep_alive.is_due(now_ns) {
            return true;
        }
        let deadline_ns = now_ns.saturating_add(keep_alive.timeout_ns);
        let purpose = AdminPurpose::KeepAlive;
        let is_sent = self.submit(Sqe::new(admin::KEEP_ALIVE, 0), AdminData::None, purpose, deadline_ns);
        if !is_sent {
            self.keep_alive_failed(NvmeHostError::Timeout(purpose.name()), now_ns);
        }
        is_sent
    }

    /// The keep-alive command was not taken, or failed. A controller on its way up is given up, as for other commands.
    pub(crate) fn keep_alive_failed(&mut self, error: NvmeHostError, now_ns: u64) {
        if self.state == ControllerState::Connecting {
            self.end(error, now_ns);
        } else {
            self.reset(now_ns);
        }
    }

    /// Handles a completed Asynchronous Event Request.
    pub(crate) fn async_event(&mut self, status: NvmeStatus, result: u64, now_ns: u64) {
        if !status.is_success() {
            // The controller does not support the request; there is no alternative.
            return;
        }
        let (kind, info, log) = (result & 7, result >> 8 & 0xff, (result >> 16) as u8);
        match (kind, info) {
            (EVENT_ERROR, ERROR_PERSISTENT) => {
                self.reset(now_ns);
            }
            (EVENT_NOTICE, NOTICE_NAMESPACES) => self.watch.wants_scan = true,
            _ => {}
        }
        // An event stays masked until its log page was read.
        match log {
            0 => self.watch.wants_event = true,
            lid => self.watch.log = Some(lid),
        }
    }
}
