//! The control thread of a controller: runs its state machine, and opens it again when it was lost.
//!
//! ```text
//!   opened ──▶ live ──▶ failed: queues stop; once the controller is silent their requests wait
//!     ▲          │ ▲                       │
//!     │          └─┘ reset                 ▼ silent
//!     └───────────────────────────── opened again, with a growing pause; after `gone_max` I/O fails
//! ```
//!
//! A session is one transport with one `HostController`. Requests of a lost session are returned to their hardware
//! queues, in order, when the controller is proven silent (ADR 39), and go to the queue pairs of the next session.
//! A controller that hangs and keeps its connection open is not silent: its requests stay in flight, however long.
//! One that is gone is left at once: each lane cancels when it reads its messages, and no queue waits for another. A
//! reset of a live controller needs an answer of every queue.
//!
//! A controller that is suspended is shut down, and I/O waits, until it is resumed; also the one of a later session.
//!
//! Owned by its own thread. Each wait for the device is bounded by the transport.

mod memory;
mod namespaces;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SendError, TryRecvError};
use std::time::{Duration, Instant};

use blkyard_mq::{HeldBack, LogLimit, QueueKind};
use blkyard_nvme::{
    ControllerState, HostController, HostEvent, IoQueueCommand, LateAction, LateCommand, ScannedNamespace,
};
use blkyard_sys::{EventFd, PollFd, PollFlags};

pub(crate) use self::namespaces::{check_same, find_namespace};
use crate::AttachError;
use crate::nvme::disk::NamespaceShared;
use crate::nvme::mailbox::{DoorbellListener, NvmeCommand, NvmeQueueMessage, OpenedIoQueue, RunningQueue};
use crate::nvme::queue_use::QueueUse;
use crate::nvme::suspend::{SuspendAnswer, SuspendRequests};
use crate::nvme::{HostParts, NvmeTransport};
use crate::outage::{LossHistory, Outage, OutageStep, PAUSE_MIN};

/// Time for the owners of queues to stop, and to cancel requests.
const QUEUES_WAIT: Duration = Duration::from_secs(5);
/// How often a controller that is gone is checked for its silence.
const LEAVE_RETRY: Duration = Duration::from_secs(1);

/// A transport with its controller.
#[derive(Debug)]
struct HostSession<T> {
    host: HostController<T>,
    number: u64,
    since: Instant,
    /// Whether its queues were passed on.
    is_served: bool,
    /// Latest time of the next step, ns.
    deadline_ns: Option<u64>,
    /// Since when only queues hold up a reset.
    awaits_queues_since: Option<Instant>,
    /// Changes of the domain that were announced.
    dma_seen: u64,
}

#[derive(Debug)]
pub(crate) struct NvmeControl<T: NvmeTransport> {
    config: T::Config,
    shared: Arc<NamespaceShared>,
    parts: HostParts,
    commands: Receiver<NvmeCommand>,
    wake: Arc<EventFd>,
    began: Instant,
    session: Option<HostSession<T>>,
    /// Since the last session was lost, until the next one serves.
    outage: Option<Outage>,
    history: LossHistory,
    sessions: u64,
    queues: Vec<QueueUse>,
    /// Identifiers of the namespaces in use; unset for the only one.
    wanted: Box<[Option<u32>]>,
    /// As they were when the disks were opened; their sizes aside. Empty before.
    namespaces: Vec<ScannedNamespace>,
    /// Whether the first session had fewer queues than were asked for, and several namespaces: a queue may then serve
    /// more than one.
    shares_queues: bool,
    suspend_requests: SuspendRequests,
    /// When memory of others was last looked at.
    memory_seen: Instant,
    log: LogLimit,
}

impl<T: NvmeTransport> NvmeControl<T> {
    /// Opens the controller, and waits until it is live.
    pub(crate) fn open(
        config: T::Config,
        wanted: &[Option<u32>],
        shared: Arc<NamespaceShared>,
        parts: HostParts,
        commands: Receiver<NvmeCommand>,
        wake: Arc<EventFd>,
    ) -> Result<NvmeControl<T>, AttachError> {
        let began = shared.config.options.clock.now();
        let mut control = NvmeControl {
            config,
            shared,
            parts,
            commands,
            wake,
            began,
            session: None,
            outage: None,
            history: LossHistory::default(),
            sessions: 0,
            queues: Vec::new(),
            wanted: wanted.into(),
            namespaces: Vec::new(),
            shares_queues: false,
            suspend_requests: SuspendRequests::default(),
            memory_seen: began,
            log: LogLimit::default(),
        };
        control.connect().map_err(|cause| control.failed(cause))?;
        loop {
            control.take_signals();
            control.advance();
            if let Some(why) = control.shared.last_loss() {
                return Err(control.failed(why));
            }
            if control.session.as_ref().is_some_and(|session| session.is_served) {
                return Ok(control);
            }
            control.wait(false);
        }
    }

    fn failed(&self, cause: String) -> AttachError {
        AttachError::Controller { disk: self.name().into(), cause }
    }

    fn name(&self) -> &str {
        &self.shared.config.options.name
    }

    fn now(&self) -> Instant {
        self.shared.config.options.clock.now()
    }

    /// The controller's time.
    fn ns(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.began).as_nanos().try_into().unwrap_or(u64::MAX)
    }

    /// The namespaces in use, once the controller is live.
    pub(crate) fn namespaces(&self) -> &[ScannedNamespace] {
        &self.namespaces
    }

    /// Queues that each namespace may have open.
    pub(crate) fn share(&self) -> usize {
        if self.shares_queues { self.queues.len() } else { self.queues.len() / self.wanted.len() }
    }

    /// Whether a queue may serve several namespaces.
    pub(crate) fn shares_queues(&self) -> bool {
        self.shares_queues
    }

    /// Runs until the disk and all its queues are dropped, then shuts the controller down.
    pub(crate) fn run(mut self) {
        while self.run_once() {
            self.wait(false);
        }
        self.shut_down();
    }

    /// Handles all due commands, events and deadlines. False once the disk and all its queues are dropped.
    fn run_once(&mut self) -> bool {
        self.take_signals();
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
        self.forward_doorbells();
        self.sync_dma();
        self.watch_memory();
        self.advance();
        self.look_at_outage();
        self.answer_suspended();
        true
    }

    /// Resets the eventfds that end a wait, before their causes are looked at.
    fn take_signals(&self) {
        self.wake.take();
        self.parts.dma_changed.take();
    }

    fn obey(&mut self, command: NvmeCommand) {
        let now_ns = self.ns(self.now());
        match command {
            NvmeCommand::Open(namespaces, kind, answer) => {
                let opened = self.open_queue(namespaces, kind);
                if let Err(SendError(Ok(OpenedIoQueue { number, running, .. }))) = answer.send(opened) {
                    // It was waited for no longer.
                    self.obey(NvmeCommand::Close(number, Some(running)));
                }
            }
            NvmeCommand::Memory { queue, number, regions, keeps_buffers } => {
                self.queues[queue].set_memory(number, regions, keeps_buffers);
                self.announce(queue, QueueUse::announce_memory);
            }
            NvmeCommand::AddBuffer(number, buffer) => {
                self.queues[number].add_buffer(buffer, &self.parts.domain);
                self.announce(number, QueueUse::announce_buffer);
            }
            NvmeCommand::RemoveBuffer(number, buffer) => self.queues[number].remove_buffer(buffer),
            NvmeCommand::Report(number, session_number, report) => {
                if let Some(session) = self.session.as_mut().filter(|session| session.number == session_number) {
                    session.host.queue_report(number as u16 + 1, report);
                }
            }
            NvmeCommand::Late(session_number, late) => {
                if self.session.as_ref().is_some_and(|session| session.number == session_number) {
                    self.late(late, now_ns);
                }
            }
            NvmeCommand::Suspend(is_wanted, answer) => self.suspend(is_wanted, answer, now_ns),
            NvmeCommand::Close(number, running) => {
                let running = running.filter(|running| self.is_current(running));
                if let Some((session_number, report)) = self.queues[number].close(running) {
                    self.obey(NvmeCommand::Report(number, session_number, report));
                }
            }
        }
    }

    /// Shuts the controller down, or brings it up again.
    fn suspend(&mut self, is_wanted: bool, answer: SuspendAnswer, now_ns: u64) {
        self.suspend_requests.ask(is_wanted, answer);
        match &mut self.session {
            Some(session) if is_wanted => session.host.suspend(now_ns),
            Some(session) => session.host.resume(now_ns),
            None => {}
        }
    }

    /// Tells those who wait for the controller to be shut down or up that it is, or was lost.
    fn answer_suspended(&mut self) {
        if !self.suspend_requests.is_awaited() {
            return;
        }
        let is_wanted = self.suspend_requests.is_wanted();
        let has_come = |session: &HostSession<T>| {
            if is_wanted { session.host.is_suspended() } else { session.host.state() == ControllerState::Live }
        };
        let has_come = self.session.as_ref().filter(|_| self.outage.is_none()).map(has_come);
        self.suspend_requests.answer(&self.shared.config.options.name, has_come);
    }

    /// Whether a queue pair is not older than one that its lane was sent.
    fn is_current(&self, running: &RunningQueue) -> bool {
        running.session == self.sessions
            || self.session.as_ref().is_none_or(|session| !session.is_served && running.session + 1 == self.sessions)
    }

    fn open_queue(&mut self, namespaces: Box<[usize]>, kind: QueueKind) -> Result<OpenedIoQueue, AttachError> {
        let wants_interrupt = kind != QueueKind::Poll;
        let free = [wants_interrupt, !wants_interrupt]
            .into_iter()
            .find_map(|has_interrupt| self.queues.iter().position(|queue| queue.is_free(has_interrupt)));
        let used = |namespace: &usize| self.queues.iter().filter(|queue| queue.serves(*namespace)).count();
        let has_room = namespaces.iter().all(|namespace| used(namespace) < self.share());
        let all = &self.namespaces;
        let opened =
            free.filter(|_| has_room).and_then(|number| self.queues[number].open(number, kind, namespaces, all));
        let Some(opened) = opened else {
            let (disk, have) = (self.name().to_owned(), self.share());
            let cure = if self.shares_queues {
                "give the controller more, or export its namespaces as one controller, whose namespaces share queues"
            } else {
                "raise ?queues=N if the controller has more, or ask for fewer queues"
            };
            return Err(AttachError::Queues { disk, wanted: have + 1, have, cure });
        };
        if self.outage.as_ref().is_some_and(Outage::gave_up) {
            opened.mailbox.post(NvmeQueueMessage::Command(IoQueueCommand::Fail));
        }
        Ok(opened)
    }

    fn forward_doorbells(&mut self) {
        let now_ns = self.ns(self.now());
        let Some(session) = &mut self.session else { return };
        for (number, queue) in self.queues.iter().enumerate() {
            if queue.user().is_some_and(|user| user.take_doorbell()) {
                session.host.forward_doorbells(number as u16 + 1, now_ns);
            }
        }
    }

    fn late(&mut self, late: LateCommand, now_ns: u64) {
        let Some(session) = &mut self.session else { return };
        let action = session.host.late_command(late, now_ns);
        let what = match action {
            LateAction::Abort => "it is aborted",
            LateAction::Reset => "the controller is reset",
            LateAction::Nothing | LateAction::MoreTime | LateAction::GiveUp => return,
        };
        self.shared.note(|view| match action {
            LateAction::Abort => view.aborts += 1,
            _ => view.resets += 1,
        });
        if let Some(held_back) = self.pass() {
            tracing::warn!(
                "{}: a command on queue {} was not completed within {:?}: {what}{held_back}",
                self.name(),
                late.qid,
                self.shared.config.options.io_max
            );
        }
    }

    /// Begins a session.
    fn connect(&mut self) -> Result<(), String> {
        // Signals of the previous session.
        if let Some(admin) = self.parts.eventfds.first() {
            admin.take();
        }
        let dma_seen = self.parts.domain.changes();
        let transport = T::open(&self.config, &self.parts)?;
        let now = self.now();
        let mut host = HostController::new(transport, self.shared.config.host);
        host.start(self.ns(now));
        self.sessions += 1;
        let number = self.sessions;
        self.session = Some(HostSession {
            host,
            number,
            since: now,
            is_served: false,
            deadline_ns: Some(0),
            awaits_queues_since: None,
            dma_seen,
        });
        Ok(())
    }

    /// Runs the controller: events of the transport, interrupts, deadlines.
    fn advance(&mut self) {
        self.look_at_transport();
        let Some(session) = &mut self.session else { return };
        if self.parts.eventfds.first().is_some_and(|admin| admin.take()) && session.host.transport().vectors() == 1 {
            // The vector of all queues.
            self.queues.iter().filter_map(QueueUse::user).for_each(|user| user.wake());
        }
        loop {
            let now = self.now();
            let now_ns = self.ns(now);
            let Some(session) = &mut self.session else { return };
            session.deadline_ns = session.host.advance(now_ns);
            let Some(event) = session.host.next_event() else { break };
            self.handle(&event, now);
        }
        self.leave_queues();
    }

    /// Handles events of the transport.
    fn look_at_transport(&mut self) {
        let now_ns = self.ns(self.now());
        let Some(session) = &mut self.session else { return };
        let transport = session.host.transport();
        let is_lost = transport.failure().is_some() || transport.event_source().is_some() && !transport.look();
        let was_reset = transport.take_reset() && !is_lost;
        if (is_lost || was_reset) && session.host.error().is_none() {
            session.host.check(now_ns);
        }
        if was_reset && let Some(held_back) = self.pass() {
            tracing::warn!("{}: the device was reset from outside; it is set up again{held_back}", self.name());
        }
    }

    /// Goes on without queues that do not answer. A thread that shares a queue and has no I/O need not run it.
    fn leave_queues(&mut self) {
        let now = self.now();
        let now_ns = self.ns(now);
        let Some(session) = &mut self.session else { return };
        if !session.host.awaits_queues() {
            session.awaits_queues_since = None;
            return;
        }
        let until = *session.awaits_queues_since.get_or_insert(now) + QUEUES_WAIT;
        if now < until {
            let until_ns = until.saturating_duration_since(self.began).as_nanos().try_into().unwrap_or(u64::MAX);
            session.deadline_ns = Some(session.deadline_ns.map_or(until_ns, |due_ns| due_ns.min(until_ns)));
            return;
        }
        session.awaits_queues_since = None;
        session.host.leave_queues(now_ns);
        session.deadline_ns = Some(now_ns);
    }

    fn handle(&mut self, event: &HostEvent, now: Instant) {
        let Some(session) = &mut self.session else { return };
        match event {
            // A lost controller is opened again.
            HostEvent::Queue(_, IoQueueCommand::Fail) if session.host.state() != ControllerState::Live => {}
            // It is being removed, since a namespace has changed: no request goes there.
            HostEvent::Queue(_, IoQueueCommand::Start) if session.host.state().is_ending() => {}
            HostEvent::Queue(qid, command) => {
                let report = self.queues.get_mut(usize::from(*qid) - 1).and_then(|queue| queue.command(*command));
                if let Some(report) = report {
                    session.host.queue_report(*qid, report);
                }
            }
            HostEvent::Live if session.is_served => self.shared.note(|view| view.is_suspended = false),
            HostEvent::Live => match self.serve(now) {
                Ok(()) if self.suspend_requests.is_wanted() => {
                    let now_ns = self.ns(now);
                    self.session.iter_mut().for_each(|session| session.host.suspend(now_ns));
                }
                Ok(()) => {}
                Err(why) => self.refuse(&why, now),
            },
            HostEvent::NamespacesChanged if session.is_served => self.namespaces_changed(),
            HostEvent::Failed(error) => self.lost(&error.to_string(), now),
            HostEvent::Over => {
                self.session = None;
                if self.outage.is_none() {
                    self.outage = Some(Outage::new(now, Duration::ZERO));
                }
            }
            HostEvent::Suspended => self.shared.note(|view| view.is_suspended = true),
            HostEvent::NamespacesChanged | HostEvent::Completed { .. } => {}
        }
    }

    /// Passes the queues of a new session on.
    fn serve(&mut self, now: Instant) -> Result<(), String> {
        let Some(session) = &mut self.session else { return Ok(()) };
        let scanned = session.host.namespaces();
        let numbers: Vec<_> = scanned.iter().map(|found| found.namespace.nsid).collect();
        let find = |nsid: &Option<u32>| find_namespace(scanned, &numbers, *nsid);
        let found = self.wanted.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        self.namespaces.iter().zip(&found).try_for_each(|(known, found)| check_same(known, found))?;
        let granted = session.host.queue_counts().map_or(0, blkyard_mq::QueueCounts::total);
        if self.namespaces.is_empty() {
            self.namespaces.clone_from(&found);
            let asked = usize::from(self.shared.config.host.queues.total());
            self.shares_queues = found.len() > 1 && granted < asked;
        }
        if granted == 0 {
            return Err("the controller grants no I/O queue; see its log".into());
        }
        let used = self.queues.iter().rposition(|queue| queue.user().is_some()).map_or(0, |last| last + 1);
        if granted < used {
            return Err(format!("the controller grants {granted} queues where {used} are in use; give it as many"));
        }
        let is_shared = session.host.transport().doorbells().is_some();
        let mut new = Vec::new();
        while let Some(queue) = session.host.take_queue() {
            new.push(queue);
        }
        let depth = self.shared.depth();
        if let Some(shallow) = new.iter().find(|queue| usize::from(queue.depth()) < depth) {
            return Err(format!("its queues have {} entries where {depth} are in use", shallow.depth()));
        }
        for queue in new {
            let number = usize::from(queue.qid()) - 1;
            if number >= self.queues.len() {
                let eventfd = self.parts.eventfds.get(number + 1).ok_or("it has more queues than were asked for")?;
                self.queues.push(QueueUse::new(Arc::clone(eventfd)));
            }
            if depth == 0 {
                self.shared.set_depth(usize::from(queue.depth()));
            }
            let listener = match session.host.transport().doorbell_eventfd(queue.qid()) {
                Some(eventfd) if is_shared => DoorbellListener::Controller(Arc::clone(eventfd)),
                _ if is_shared => DoorbellListener::None,
                _ => DoorbellListener::Control,
            };
            let running = RunningQueue {
                has_interrupt: session.host.queue_vector(queue.qid()).is_some(),
                queue: Box::new(queue),
                session: session.number,
                listener,
            };
            self.queues[number].run(running, &found);
        }
        session.is_served = true;
        for (index, found) in found.iter().enumerate() {
            self.shared.set_capacity(index, found.info.capacity_sectors);
        }
        self.shared.note(|view| {
            (view.is_connected, view.is_suspended) = (true, false);
            view.sessions += 1;
        });
        (0..self.queues.len()).for_each(|number| self.announce(number, QueueUse::announce_memory));
        if let Some(outage) = self.outage.take()
            && let Some(held_back) = self.pass()
        {
            tracing::info!("{}: connected again after {:?}{held_back}", self.name(), outage.away(now));
        }
        Ok(())
    }

    /// Ends a session that cannot serve the users of the earlier ones.
    fn refuse(&mut self, why: &str, now: Instant) {
        self.session = None;
        self.try_later(why, now);
    }

    /// The controller has failed, or is gone.
    fn lost(&mut self, error: &str, now: Instant) {
        let why = self.loss_reason(error);
        let Some(session) = &self.session else { return };
        if !session.is_served {
            return self.try_later(&why, now);
        }
        let served = now.saturating_duration_since(session.since);
        self.outage = Some(Outage::new(now, self.history.lost(served, false)));
        if let Some(held_back) = self.pass() {
            tracing::warn!("{}: {why}; I/O waits until it is connected again{held_back}", self.name());
        }
        self.shared.note(|view| {
            (view.is_connected, view.is_suspended) = (false, false);
            view.last_loss = Some(why);
        });
    }

    /// The transport's reason, if it has one.
    fn loss_reason(&mut self, error: &str) -> String {
        let failure = self.session.as_mut().and_then(|session| session.host.transport().failure());
        failure.unwrap_or_else(|| error.to_owned())
    }

    /// A connection attempt has failed.
    fn try_later(&mut self, why: &str, now: Instant) {
        self.shared.note(|view| view.last_loss = Some(why.into()));
        let gone_max = self.shared.config.options.gone_max;
        let outage = self.outage.get_or_insert_with(|| Outage::new(now, Duration::ZERO));
        let (step, is_news) = outage.try_later(now, gone_max, why);
        if is_news && let Some(held_back) = self.pass() {
            tracing::warn!("{}: {why}; it is tried again{held_back}", self.name());
        }
        if step == OutageStep::Fail {
            self.give_up();
        }
    }

    /// Connects again, or fails I/O after too long.
    fn look_at_outage(&mut self) {
        let (now, gone_max) = (self.now(), self.shared.config.options.gone_max);
        self.leave_silent();
        let Some(outage) = &mut self.outage else { return };
        if outage.away(now) >= gone_max && !outage.gave_up() {
            return self.give_up();
        }
        if self.session.is_none() && outage.look(now, gone_max) == OutageStep::Connect {
            match self.connect() {
                Ok(()) => self.advance(),
                Err(why) => self.try_later(&why, self.now()),
            }
        }
    }

    /// Ends the session of a controller that is gone and silent: all queues cancel.
    fn leave_silent(&mut self) {
        let Some(session) = self.session.as_mut().filter(|session| session.host.error().is_some()) else { return };
        let transport = session.host.transport();
        if transport.failure().is_none() || !transport.is_silent_when_gone() {
            return;
        }
        self.session = None;
        for queue in &mut self.queues {
            // Lanes report to a session that is over.
            queue.command(IoQueueCommand::Stop);
            queue.command(IoQueueCommand::Cancel);
        }
    }

    /// Lets all I/O fail that is not at the controller, until it is back.
    fn give_up(&mut self) {
        if let Some(held_back) = self.pass() {
            let (name, gone_max) = (self.name(), self.shared.config.options.gone_max);
            tracing::error!(
                "{name}: not connected for {gone_max:?}: I/O fails until it is connected again; see its log{held_back}"
            );
        }
        for user in self.queues.iter().filter_map(QueueUse::user) {
            user.post(NvmeQueueMessage::Command(IoQueueCommand::Fail));
        }
        self.outage.iter_mut().for_each(Outage::give_up);
    }

    /// Sleeps until there is a command or an event, or something is due.
    fn wait(&mut self, is_ending: bool) {
        let (now, memory_due) = (self.now(), self.memory_due());
        let mut deadline = None;
        let own = [&self.wake, &self.parts.dma_changed];
        let mut fds: Vec<_> = own.into_iter().map(|event| PollFd::new(&**event, PollFlags::IN)).collect();
        let gone_max = self.shared.config.options.gone_max;
        if let Some(outage) = self.outage.as_ref().filter(|_| !is_ending) {
            if self.session.is_none() {
                deadline = Some(outage.deadline(now, gone_max));
            } else {
                // Is it silent meanwhile? Has it been away for too long?
                let left = gone_max.saturating_sub(outage.away(now)).max(PAUSE_MIN);
                deadline = Some(now + if outage.gave_up() { LEAVE_RETRY } else { LEAVE_RETRY.min(left) });
            }
        }
        if let Some(session) = &mut self.session {
            let due = session.deadline_ns.map(|due_ns| self.began + Duration::from_nanos(due_ns));
            deadline = [deadline, due, memory_due].into_iter().flatten().min();
            fds.extend(self.parts.eventfds.first().map(|admin| PollFd::new(&**admin, PollFlags::IN)));
            let source = session.host.transport().event_source();
            fds.extend(source.map(|source| PollFd::from_borrowed_fd(source, PollFlags::IN | PollFlags::RDHUP)));
        }
        // After an early end everything is checked again.
        let _ = self.shared.config.options.clock.wait(&mut fds, deadline);
    }

    /// Shuts the controller down, within the time limit of its replies.
    fn shut_down(mut self) {
        let until = self.now() + self.shared.config.options.reply_max;
        let now_ns = self.ns(self.now());
        let Some(session) = self.session.as_mut().filter(|_| self.outage.is_none()) else { return };
        session.host.remove(now_ns);
        loop {
            self.take_signals();
            self.advance();
            let now = self.now();
            let until_ns = self.ns(until);
            let Some(session) = self.session.as_mut().filter(|_| now < until) else { return };
            session.deadline_ns = Some(session.deadline_ns.map_or(until_ns, |due_ns| due_ns.min(until_ns)));
            self.wait(true);
        }
    }

    /// Whether a log line that the controller causes is logged, with the number of those that were not.
    fn pass(&mut self) -> Option<HeldBack> {
        let now = self.now();
        self.log.pass(now).map(HeldBack)
    }
}
