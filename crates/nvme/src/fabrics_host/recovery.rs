//! Error recovery: from a lost association to the next one, or to the end; and the I/O queues on both ways.
//!
//! All streams are closed first. Each queue gives its requests back when its own stream is closed, and is not waited
//! for longer than [`CLOSE_NS`] if nobody runs it. Then follows a pause, which doubles with each attempt.

use blkyard_mq::FenceEvidence;

use super::admin::FabricsAdmin;
use super::error::FabricsHostError;
use super::host::{FabricsHost, FabricsHostEvent, FabricsPhase, FabricsPurpose};
use super::io_queue::{FabricsConnect, FabricsQueueCommand, FabricsQueueReport};
use crate::fabrics::{ConnectCommand, ConnectData};
use crate::host::ControllerState;
use crate::{NvmeStatus, RetryDelays};

/// Time for the owners of queues to close their streams, before the next attempt begins without them.
const CLOSE_NS: u64 = 5_000_000_000;
/// Time after which a live association counts as stable: the next loss begins with the shortest pause.
const STABLE_NS: u64 = 10_000_000_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FabricsQueuePhase {
    #[default]
    Closed,
    Connecting,
    Connected,
    Started,
}

/// An I/O queue, as the owner of the association knows it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FabricsQueueUse {
    /// Whether it has an owner.
    is_open: bool,
    entries: u16,
    phase: FabricsQueuePhase,
    /// Oldest association whose stream may still be open.
    unclosed: Option<u64>,
    /// Last association at which writes were left without an answer.
    unanswered: Option<u64>,
}

impl FabricsHost {
    /// Entries of an I/O queue.
    pub(super) fn queue_entries(&self) -> u16 {
        let controller_max = self.capabilities.queue_entries_max.clamp(2, 4096) as u16;
        let commands_max = if self.identify.commands_max > 1 { self.identify.commands_max } else { u16::MAX };
        self.config.queue_entries.min(controller_max).min(commands_max).max(2)
    }

    /// The queue has an owner from now on, which waits for commands.
    pub fn open_queue(&mut self, qid: u16) {
        let (at, entries) = (usize::from(qid) - 1, self.queue_entries());
        if self.queues.len() <= at {
            self.queues.resize(at + 1, FabricsQueueUse::default());
        }
        self.queues[at] = FabricsQueueUse { is_open: true, entries, ..FabricsQueueUse::default() };
        if self.state == ControllerState::Live {
            self.connect_queue(qid);
        } else if self.state.is_ending() || self.loss.is_fast_failed {
            self.events.push_back(FabricsHostEvent::Queue(qid, FabricsQueueCommand::Fail));
        }
    }

    /// The queue has no owner any more, and its stream is closed.
    pub fn close_queue(&mut self, qid: u16, now_ns: u64) {
        if let Some(queue) = self.queue_mut(qid) {
            *queue = FabricsQueueUse::default();
            self.note_closed(now_ns);
        }
    }

    /// Handles a report of a queue about this association.
    pub fn queue_report(&mut self, qid: u16, association: u64, report: FabricsQueueReport, now_ns: u64) {
        let present = self.association;
        let Some(queue) = self.queue_mut(qid) else { return };
        if let FabricsQueueReport::Closed { has_unanswered_writes } = report {
            let is_present = association == present;
            if has_unanswered_writes {
                queue.unanswered = Some(association);
            }
            if is_present {
                queue.phase = FabricsQueuePhase::Closed;
            }
            queue.unclosed = Some(present).filter(|_| !is_present && queue.phase == FabricsQueuePhase::Connecting);
            return self.note_closed(now_ns);
        }
        if association != present || queue.phase == FabricsQueuePhase::Closed {
            return;
        }
        match report {
            FabricsQueueReport::Connected => {
                queue.phase = FabricsQueuePhase::Connected;
                self.loss.is_settled = true;
                self.start_queues();
            }
            FabricsQueueReport::Refused { status } => self.lose(FabricsHostError::QueueRefused { qid, status }, now_ns),
            FabricsQueueReport::Lost => self.lose(FabricsHostError::QueueLost(qid), now_ns),
            FabricsQueueReport::Late => self.lose(FabricsHostError::QueueLate(qid), now_ns),
            FabricsQueueReport::AccessChanged => self.wants_ana = true,
            FabricsQueueReport::Closed { .. } => {}
        }
    }

    /// Whether a queue is started.
    pub fn is_started(&self, qid: u16) -> bool {
        let queue = self.queues.get(usize::from(qid).wrapping_sub(1));
        queue.is_some_and(|queue| queue.phase == FabricsQueuePhase::Started)
    }

    fn queue_mut(&mut self, qid: u16) -> Option<&mut FabricsQueueUse> {
        self.queues.get_mut(usize::from(qid).wrapping_sub(1)).filter(|queue| queue.is_open)
    }

    fn open_queues(&self) -> impl Iterator<Item = u16> + use<> {
        let open = self.queues.iter().zip(1_u16..).filter(|(queue, _)| queue.is_open).map(|(_, qid)| qid);
        open.collect::<Vec<_>>().into_iter()
    }

    /// Has all queues connect, of a live association.
    pub(super) fn connect_queues(&mut self, now_ns: u64) {
        self.loss.live_ns = now_ns;
        self.loss.is_fast_failed = false;
        self.loss.is_settled = self.open_queues().next().is_none();
        self.open_queues().for_each(|qid| self.connect_queue(qid));
    }

    fn connect_queue(&mut self, qid: u16) {
        let data = ConnectData {
            host_id: self.config.host_id,
            controller_id: self.controller_id.unwrap_or_default(),
            subsystem: self.config.subsystem.clone(),
            host: self.config.host.clone(),
        };
        let (association, connect_ns) = (self.association, self.config.connect_ns);
        let (in_capsule, delays) = (self.identify.in_capsule_bytes(), RetryDelays::new(&self.identify));
        let auth = self.authentication(qid);
        let Some(queue) = self.queue_mut(qid) else { return };
        queue.phase = FabricsQueuePhase::Connecting;
        queue.unclosed.get_or_insert(association);
        // Without flow control, which it does not need: the controller may then end a read with its data, and say no
        // more.
        let command = ConnectCommand { qid, sq_size: queue.entries - 1, no_flow_control: true, keep_alive_ms: 0 };
        let connect = FabricsConnect { association, command, data, auth, in_capsule, delays, connect_ns };
        self.events.push_back(FabricsHostEvent::Queue(qid, FabricsQueueCommand::Connect(Box::new(connect))));
    }

    /// Starts the queues that are connected and have no unfenced write to send again.
    fn start_queues(&mut self) {
        let fenced_through = self.fenced_through;
        for qid in self.open_queues() {
            let Some(queue) = self.queue_mut(qid) else { continue };
            queue.unanswered = queue.unanswered.filter(|association| *association > fenced_through);
            if queue.phase == FabricsQueuePhase::Connected && queue.unanswered.is_none() {
                queue.phase = FabricsQueuePhase::Started;
                self.has_started = true;
                self.events.push_back(FabricsHostEvent::Queue(qid, FabricsQueueCommand::Start));
            }
        }
    }

    /// Has all queues close their streams.
    pub(super) fn close_queues(&mut self) {
        for qid in self.open_queues() {
            let is_ending = self.state.is_ending();
            let Some(queue) = self.queue_mut(qid) else { continue };
            queue.phase = FabricsQueuePhase::Closed;
            if queue.unclosed.is_some() {
                self.events.push_back(FabricsHostEvent::Queue(qid, FabricsQueueCommand::Close));
            }
            if is_ending {
                self.events.push_back(FabricsHostEvent::Queue(qid, FabricsQueueCommand::Fail));
            }
        }
    }

    /// The association is lost: error recovery, or the end of a disconnect.
    pub(super) fn lose(&mut self, error: FabricsHostError, now_ns: u64) {
        let verdict = self.auth.as_ref().and_then(|(auth, _)| auth.verdict());
        let error = verdict.map_or(error, FabricsHostError::Authentication);
        if self.state == ControllerState::Connecting && error.is_final() {
            return self.give_up(error, now_ns);
        }
        let attempts = self.loss.attempts.min(20);
        let [first_ns, max_ns] = self.config.reconnect_ns;
        self.lose_and_retry(error, now_ns, first_ns.saturating_mul(1 << attempts).min(max_ns));
    }

    /// The same for an error that is not final, with this pause before the next attempt.
    pub(super) fn lose_and_retry(&mut self, error: FabricsHostError, now_ns: u64, pause_ns: u64) {
        match self.state {
            ControllerState::New | ControllerState::Dead | ControllerState::DeletingNoIo => return,
            ControllerState::Deleting => return self.close_all(now_ns),
            _ if matches!(self.phase, FabricsPhase::Close { .. } | FabricsPhase::Pause { .. }) => return,
            _ => {}
        }
        self.error = Some(error);
        self.loss.pause_ns = pause_ns;
        if self.state == ControllerState::Live {
            self.state.change(ControllerState::Resetting);
            if self.loss.is_settled || now_ns.saturating_sub(self.loss.live_ns) >= STABLE_NS {
                (self.loss.since_ns, self.loss.attempts) = (Some(now_ns), 0);
                self.loss.pause_ns = pause_ns.min(self.config.reconnect_ns[0]);
            }
            self.events.push_back(FabricsHostEvent::Lost(error));
        }
        self.loss.attempts += 1;
        self.close_all(now_ns);
    }

    /// Gives the association up.
    pub(super) fn give_up(&mut self, error: FabricsHostError, now_ns: u64) {
        if !self.state.change(ControllerState::Deleting) {
            return;
        }
        self.error = Some(error);
        if error != FabricsHostError::Removed {
            self.events.push_back(FabricsHostEvent::Failed(error));
        }
        self.close_all(now_ns);
    }

    /// Closes all streams.
    pub(super) fn close_all(&mut self, now_ns: u64) {
        if matches!(self.phase, FabricsPhase::Close { .. }) {
            // Queues learn of the end of the association besides.
            return self.close_queues();
        }
        (self.bring_up_until_ns, self.ana_until_ns, self.keep_alive, self.scan) = (None, None, None, None);
        (self.wants_event, self.wants_scan, self.wants_ana, self.event_log) = (false, false, false, None);
        self.fail_cross_resets();
        if std::mem::take(&mut self.has_started) {
            self.note_lost();
        }
        self.admin.iter_mut().for_each(FabricsAdmin::abandon);
        if self.has_stream {
            self.events.push_back(FabricsHostEvent::Close(self.association));
        }
        self.close_queues();
        self.phase = FabricsPhase::Close { until_ns: now_ns.saturating_add(CLOSE_NS) };
        self.note_closed(now_ns);
        self.look_at_close(now_ns);
    }

    /// The stream of the admin queue is closed: its commands end.
    pub(super) fn stream_closed(&mut self, now_ns: u64) {
        for purpose in self.admin.take().into_iter().flat_map(FabricsAdmin::into_purposes) {
            if let FabricsPurpose::User { user, .. } = purpose {
                let status = NvmeStatus::HOST_ABORTED;
                self.events.push_back(FabricsHostEvent::Completed { user, status, result: 0, data: None });
            }
        }
        self.note_closed(now_ns);
        self.look_at_close(now_ns);
    }

    /// Notes when the last stream of a lost association is closed.
    fn note_closed(&mut self, now_ns: u64) {
        let Some((association, None)) = self.lost else { return };
        let is_admin = self.has_stream && self.association <= association;
        let is_queue = self.queues.iter().filter_map(|queue| queue.unclosed).any(|unclosed| unclosed <= association);
        if !is_admin && !is_queue {
            self.lost = Some((association, Some(now_ns)));
        }
    }

    /// Continues once all streams are closed, or those of queues that nobody runs are left.
    pub(super) fn look_at_close(&mut self, now_ns: u64) {
        let FabricsPhase::Close { until_ns } = self.phase else { return };
        let is_waiting = self.queues.iter().any(|queue| queue.unclosed.is_some()) && now_ns < until_ns;
        if self.has_stream || is_waiting {
            return;
        }
        self.admin = None;
        if self.lost.is_none() {
            self.fenced_through = self.association;
        }
        if self.state == ControllerState::Deleting {
            let is_removed = self.error == Some(FabricsHostError::Removed);
            self.state.change(if is_removed { ControllerState::DeletingNoIo } else { ControllerState::Dead });
            self.phase = FabricsPhase::Idle;
            return self.events.push_back(FabricsHostEvent::Over);
        }
        let until_ns = now_ns.saturating_add(self.loss.pause_ns);
        self.phase = FabricsPhase::Pause { until_ns };
        self.events.push_back(FabricsHostEvent::Retry(until_ns));
    }

    /// The last controller says that associations up to this one have ended. Without effect while a lost one had
    /// another controller: only time fences that.
    pub(super) fn fence_ended(&mut self, association: u64) {
        if !self.is_lost_elsewhere {
            self.fence(association, FenceEvidence::AssociationEnded);
        }
    }

    /// The target executes no command of associations up to this one any more.
    pub(super) fn fence(&mut self, association: u64, evidence: FenceEvidence) {
        if association > self.fenced_through {
            self.fenced_through = association;
            self.lost = self.lost.filter(|(lost, _)| *lost > association);
            self.is_lost_elsewhere &= self.lost.is_some();
            self.lost_instance = None;
            self.events.push_back(FabricsHostEvent::Fenced(association, evidence));
            self.start_queues();
        }
    }

    /// When a lost association is fenced by the time that has passed.
    fn fenced_ns(&self) -> Option<u64> {
        let (_, closed_ns) = self.lost?;
        Some(closed_ns?.saturating_add(self.lost_silence_ns))
    }

    /// Time after which an association that was lost, or else the present one, executes no command once its streams are
    /// closed, ns.
    pub fn silence_ns(&self) -> u64 {
        if self.lost.is_some() { self.lost_silence_ns } else { self.own_silence_ns() }
    }

    /// The same of the present association: keep-alive timeout, and the quiesce time that its controller declares. A
    /// controller that counts traffic looks at intervals of the timeout, so its timer expires after two of them at the
    /// latest.
    pub(super) fn own_silence_ns(&self) -> u64 {
        let declared_ns = u64::from(self.identify.quiesce_ms) * 1_000_000;
        let quiesce_ns = if declared_ns > 0 { declared_ns } else { self.config.quiesce_ns };
        let intervals = if self.identify.keeps_alive_by_traffic() { 2 } else { 1 };
        (intervals * u64::from(self.config.keep_alive_ms) * 1_000_000).saturating_add(quiesce_ns)
    }

    /// Handles the timers of a lost association.
    pub(super) fn look_at_loss(&mut self, now_ns: u64) {
        if let (Some((association, _)), Some(fenced_ns)) = (self.lost, self.fenced_ns())
            && now_ns >= fenced_ns
        {
            self.fence(association, FenceEvidence::QuiesceElapsed);
        }
        let (fast_ns, end_ns) = self.loss_timers();
        if fast_ns.is_some_and(|ns| now_ns >= ns) {
            self.loss.is_fast_failed = true;
            self.events.push_back(FabricsHostEvent::FastFail);
            for qid in self.open_queues() {
                self.events.push_back(FabricsHostEvent::Queue(qid, FabricsQueueCommand::Fail));
            }
        }
        if end_ns.is_some_and(|ns| now_ns >= ns) {
            let first_error = match self.phase {
                FabricsPhase::Setup(_) | FabricsPhase::Ready { .. } => FabricsHostError::Timeout(self.step_name()),
                _ => FabricsHostError::Unreachable,
            };
            self.give_up(self.error.unwrap_or(first_error), now_ns);
        }
    }

    /// When I/O fails, and when the association is given up.
    fn loss_timers(&self) -> (Option<u64>, Option<u64>) {
        let is_lost = matches!(self.state, ControllerState::Resetting | ControllerState::Connecting);
        let Some(since_ns) = self.loss.since_ns.filter(|_| is_lost) else { return (None, None) };
        let at = |time_ns: Option<u64>| time_ns.map(|time_ns| since_ns.saturating_add(time_ns));
        let fast_ns = self.config.fast_io_fail_ns.filter(|_| !self.loss.is_fast_failed);
        (at(fast_ns), at(self.config.ctrl_loss_ns))
    }

    pub(super) fn loss_due_ns(&self) -> Option<u64> {
        let (fast_ns, end_ns) = self.loss_timers();
        [fast_ns, end_ns, self.fenced_ns()].into_iter().flatten().min()
    }
}
