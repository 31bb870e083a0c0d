//! The control thread of a remote disk: sends all messages to the back-end, in sequence.
//!
//! ```text
//!                     hangs up, hangs, breaks a ring
//!     up ────────────────────────────────────────────────▶ down
//!     ▲   the old rings continue, if the back-end recorded    │ waits for its end of the connection to close
//!     │   the requests in flight; otherwise new rings         │ reconnects, with a growing pause
//!     └───────────────────────────────────────────────────────┘ after `gone_max`: all I/O fails
//! ```
//!
//! All rings are set up at once, with all known memory, when the first queue has memory, as virtual machines do it. A
//! back-end may have to be stopped for a change of memory, and lose its requests in flight. So such a change is made
//! while none are: all queues are quiesced, the rings are stopped, and new ones begin.
//!
//! Requests in flight at a lost back-end have not completed. If they are recorded, in memory that the next back-end
//! gets, that one completes them, in the same rings. Otherwise each queue gets a ring in new memory, which the old
//! back-end does not know; it takes completions from the old ring, and submits the rest again, in order of submission.
//! So no acknowledged write is done twice, and none is lost.
//!
//! Owned by its own thread, and bounded in each wait. The protocol (`protocol.rs`) defines messages, `queues.rs` knows
//! the users of the queues, and `outage.rs` the time to reconnect. Queues get commands (`mailbox.rs`).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SendError, TryRecvError};
use std::time::{Duration, Instant};

use blkyard_mem::{DmaDomain, Region};
use blkyard_mq::{DeviceInfo, HeldBack, LogLimit, QueueKind};
use blkyard_sys::{EventFd, PollFd, PollFlags, is_ready};

use crate::left_peer::LeftPeer;
use crate::mailbox::{DeviceCommand, Opened, QueueCommand, RingEnd};
use crate::outage::{LossHistory, Outage, OutageStep};
use crate::protocol::{NewRing, RemoteOptions, RemoteSession};
use crate::queues::DriverQueues;
use crate::shared::SharedState;
use crate::{AttachError, TalkError};

/// The state of the connection.
enum Link<S> {
    Up { session: S, since: Instant },
    Down(Outage),
}

/// The rings of all queues: those of a session, in which the next one may continue.
///
/// One value, so that a set-up that fails half-way is undone by dropping it.
struct RingSet<R> {
    rings: R,
    /// By queue: number of its ring, of all rings of the disk so far.
    numbers: Vec<u64>,
    /// Whether a back-end knows them, and may have used them.
    served: bool,
}

pub(crate) struct Control<S: RemoteSession> {
    config: S::Config,
    shared: Arc<SharedState>,
    commands: Receiver<DeviceCommand<S::Ring>>,
    wake: Arc<EventFd>,
    /// Signalled when the disk and all its queues are dropped.
    end: Arc<EventFd>,
    link: Link<S>,
    queues: DriverQueues<S::Ring>,
    /// Whether memory or rings of the queues differ from the back-end's.
    changed: bool,
    /// Result of the first negotiation, valid for all sessions.
    agreed: S::Agreed,
    /// Rings in which the next set-up may continue; without them it makes new ones.
    rings: Option<RingSet<S::Rings>>,
    /// Rings made so far.
    made: u64,
    history: LossHistory,
    /// Limit on the lines that the back-end causes.
    log: LogLimit,
}

/// Result of the first session.
pub(crate) struct Discovered<A> {
    pub(crate) shared: Arc<SharedState>,
    pub(crate) domain: Arc<DmaDomain>,
    pub(crate) info: DeviceInfo,
    pub(crate) agreed: A,
    pub(crate) queues: usize,
    pub(crate) depth_max: usize,
}

impl<S: RemoteSession> Control<S> {
    /// Connects for the first time.
    pub(crate) fn open(
        config: S::Config,
        options: RemoteOptions,
        commands: Receiver<DeviceCommand<S::Ring>>,
        wake: &Arc<EventFd>,
        end: &Arc<EventFd>,
    ) -> Result<(Control<S>, Discovered<S::Agreed>), AttachError> {
        let mut session = S::open(&config, end)?;
        let disk = options.name.clone();
        let talk = |source| AttachError::Talk { disk: disk.clone(), source };
        let (info, agreed, now) = (session.info().clone(), session.agreed().clone(), options.clock.now());
        let told = Arc::clone(wake);
        let domain = DmaDomain::new(move || told.signal());
        let queues = DriverQueues::new(session.queues(), Arc::clone(&domain));
        let queues = queues.map_err(|source| AttachError::System { disk: disk.clone(), source })?;
        let shared = Arc::new(SharedState::new(options, info.capacity_sectors));
        let found = Discovered {
            shared: Arc::clone(&shared),
            domain,
            info,
            agreed: agreed.clone(),
            queues: queues.len(),
            depth_max: session.depth_max(&config),
        };
        let mut control = Control {
            config,
            shared,
            commands,
            wake: Arc::clone(wake),
            end: Arc::clone(end),
            link: Link::Down(Outage::new(now, Duration::ZERO)),
            queues,
            changed: false,
            agreed,
            rings: None,
            made: 0,
            history: LossHistory::default(),
            log: LogLimit::default(),
        };
        let (rings, ends) = control.make_rings(&session).map_err(talk)?;
        if session.adds_regions() {
            control.announce(&mut session, S::ring_region(&rings.rings)).map_err(talk)?;
        }
        control.give_rings(rings, ends);
        control.begin(session);
        Ok((control, found))
    }

    fn options(&self) -> &RemoteOptions {
        &self.shared.options
    }

    fn now(&self) -> Instant {
        self.options().clock.now()
    }

    /// Runs until the disk and all its queues are dropped.
    pub(crate) fn run(mut self) {
        while self.run_once() {
            self.wait();
        }
    }

    /// Handles all due commands, messages and deadlines. False once the disk and all its queues are dropped.
    fn run_once(&mut self) -> bool {
        self.wake.take();
        if let Link::Up { session, .. } = &mut self.link {
            session.begin();
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
        // Kept until it is done: the domain is read again and again while queues quiesce.
        self.changed |= self.queues.is_domain_changed();
        if self.changed {
            self.with_session(Control::change);
        }
        // The end also cuts short what is said to the back-end: an answer that nobody reads any more is no loss of it.
        if is_ready(&*self.end, PollFlags::IN) {
            return false;
        }
        self.look();
        true
    }

    /// Sleeps until there is a command, until the back-end says something, or until something is due.
    fn wait(&self) {
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        let mut deadline = self.queues.quiesce_deadline();
        match &self.link {
            Link::Up { session, .. } => session.add_fds(&mut fds),
            Link::Down(outage) => {
                fds.extend(outage.awaited().map(|left| PollFd::new(left, PollFlags::IN | PollFlags::RDHUP)));
                let due = outage.deadline(self.now(), self.options().gone_max);
                deadline = Some(deadline.map_or(due, |deadline| deadline.min(due)));
            }
        }
        // After an early end everything is checked again.
        let _ = self.options().clock.wait(&mut fds, deadline);
    }

    /// Checks the connection.
    fn look(&mut self) {
        match &mut self.link {
            Link::Up { session, .. } => match session.look() {
                Ok(false) => {}
                Ok(true) => self.read_info(),
                Err(error) => self.leave(&error),
            },
            Link::Down(outage) => match outage.look(self.shared.options.clock.now(), self.shared.options.gone_max) {
                OutageStep::Wait => {}
                OutageStep::Connect => self.connect_again(),
                OutageStep::Fail => self.fail_for_time(),
            },
        }
        if let Some(queue) = self.queues.overdue(self.now()) {
            self.leave(&TalkError::Restless { queue, limit: self.options().io_max });
        }
    }

    fn obey(&mut self, command: DeviceCommand<S::Ring>) {
        match command {
            DeviceCommand::Open(kind, answer) => {
                if let Err(SendError(Ok(Opened { number, ring, .. }))) = answer.send(self.open_queue(kind)) {
                    // It was waited for no longer.
                    self.obey(DeviceCommand::Close(number, ring));
                }
            }
            DeviceCommand::Reserve(region) => self.queues.reserve(region),
            DeviceCommand::Memory(number, memory_number, regions, is_quiesced) => {
                self.changed |= self.queues.set_memory(number, memory_number, regions, is_quiesced);
            }
            DeviceCommand::Rested(number, quiesce) => self.queues.set_quiesced(number, quiesce),
            DeviceCommand::Fault(number, ring, fault) => {
                if let Some(queue) = self.name_of(number, ring) {
                    self.leave(&TalkError::Fault { queue, fault });
                }
            }
            DeviceCommand::Late(number, ring, what) => {
                let (now, limit) = (self.now(), self.options().io_max);
                // One that has just come back has its time from then on. It is asked for again.
                let is_late =
                    matches!(&self.link, Link::Up { since, .. } if now.saturating_duration_since(*since) >= limit);
                if let Some(queue) = self.name_of(number, ring).filter(|_| is_late) {
                    self.leave(&TalkError::Silent { request: format!("{queue}, {what},"), limit });
                }
            }
            DeviceCommand::Close(number, end) => {
                let ring = self.ring_number(number);
                self.queues.close(number, end, ring);
                self.note_queues();
            }
        }
    }

    /// The name of a queue that is in use, if this is its ring.
    fn name_of(&self, number: u16, ring: u64) -> Option<String> {
        let is_its = self.ring_number(number) == Some(ring);
        self.queues.name(number).filter(|_| is_its).map(str::to_owned)
    }

    fn ring_number(&self, queue: u16) -> Option<u64> {
        self.rings.as_ref().map(|rings| rings.numbers[usize::from(queue)])
    }

    /// Does something with the session, if there is one, and leaves it if that fails.
    fn with_session(&mut self, work: impl FnOnce(&mut Control<S>, &mut S) -> Result<(), TalkError>) {
        let nobody = Link::Down(Outage::new(self.now(), Duration::ZERO));
        match std::mem::replace(&mut self.link, nobody) {
            Link::Up { mut session, since } => {
                let done = work(self, &mut session);
                self.link = Link::Up { session, since };
                if let Err(error) = done {
                    self.leave(&error);
                }
            }
            down @ Link::Down(_) => self.link = down,
        }
    }

    fn open_queue(&mut self, kind: QueueKind) -> Result<Opened<S::Ring>, AttachError> {
        let Some(opened) = self.queues.open(kind) else {
            let (disk, have) = (self.options().name.clone(), self.queues.len());
            let cure = "lower ?queues=N, or start the back-end with more queues";
            return Err(AttachError::Queues { disk, wanted: have + 1, have, cure });
        };
        self.changed |= opened.ring.is_none();
        if let Link::Down(outage) = &self.link {
            if opened.was_used {
                // The record belongs to the previous user.
                self.rings = None;
            }
            if outage.gave_up() {
                opened.mailbox.post(QueueCommand::Fail);
            }
        }
        self.note_queues();
        let gone_max_ns = self.options().gone_max.as_nanos().try_into().unwrap_or(u64::MAX);
        Ok(Opened { number: opened.number as u16, mailbox: opened.mailbox, ring: opened.ring, gone_max_ns })
    }

    /// Has the back-end know the memory of all queues, and serve the rings: now, or once the queues are quiesced.
    fn change(&mut self, session: &mut S) -> Result<(), TalkError> {
        if !session.runs() {
            return if self.queues.have_memory() { self.set_up(session) } else { Ok(()) };
        }
        if self.queues.users_have_rings()
            && let Some(rings) = &self.rings
        {
            let region = S::ring_region(&rings.rings).cloned();
            let wanted = self.regions(session, region.clone());
            if !session.must_quiesce(&wanted) {
                self.announce(session, region.as_ref())?;
                self.resume(session);
                return Ok(());
            }
        }
        if self.queues.are_quiesced() {
            session.stop_rings()?;
            self.rings = None;
            self.set_up(session)
        } else {
            self.queues.quiesce(self.now(), self.options().io_max);
            Ok(())
        }
    }

    /// All memory that the back-end is to know, that of the rings first.
    fn regions(&mut self, session: &S, rings: Option<Arc<Region>>) -> Vec<Arc<Region>> {
        self.queues.regions(rings, |region| session.knows(std::slice::from_ref(region)))
    }

    /// Has the back-end know the memory of the rings and all queues. No ring runs, or regions can be added to its
    /// memory.
    fn announce(&mut self, session: &mut S, rings: Option<&Arc<Region>>) -> Result<(), TalkError> {
        let wanted = self.regions(session, rings.cloned());
        let count = wanted.len();
        session.set_regions(wanted)?;
        if rings.is_some_and(|rings| !session.knows(std::slice::from_ref(rings))) {
            return Err(TalkError::NoMemory);
        }
        if session.regions() < count
            && let Some(held_back) = self.pass()
        {
            tracing::error!(
                "{}: its back-end accepts {} memory regions and {count} are in use: I/O in the others fails; use fewer \
                 guests, or give the back-end more memory slots{held_back}",
                self.options().name,
                session.regions()
            );
        }
        Ok(())
    }

    /// Resumes all queues with the memory that the session knows.
    fn resume(&mut self, session: &S) {
        self.changed = false;
        self.queues.resume(|regions| session.knows(regions));
    }

    /// Has the back-end know all memory, and serve all queues: in the rings they have, or in new ones. No ring runs.
    fn set_up(&mut self, session: &mut S) -> Result<(), TalkError> {
        // All queues have their ring, and the session uses the in-flight record if there is one.
        let can_resume =
            |old: &RingSet<_>| self.queues.all_have_rings() && S::is_recorded(&old.rings) == session.is_tracked();
        if let Some(mut rings) = self.rings.take().filter(can_resume) {
            let was_served = std::mem::replace(&mut rings.served, true);
            let done = self.serve(session, &rings.rings, true);
            // Also after an error: the next session finds the requests in flight in the record.
            self.rings = Some(rings);
            done?;
            if was_served {
                // This session must see kicks that the previous one missed, and repeat its calls.
                self.queues.post_all(|| QueueCommand::GoesOn);
            }
        } else {
            let (mut rings, ends) = self.make_rings(session)?;
            self.serve(session, &rings.rings, false)?;
            rings.served = true;
            self.give_rings(rings, ends);
        }
        self.resume(session);
        Ok(())
    }

    /// Has the back-end know all memory, and serve these rings.
    fn serve(&mut self, session: &mut S, rings: &S::Rings, resumed: bool) -> Result<(), TalkError> {
        self.announce(session, S::ring_region(rings))?;
        session.start_rings(rings, &self.queues.shared(), resumed)
    }

    /// A new ring for each queue, in new memory: writes of the old rings' owner reach no ring in use.
    fn make_rings(&mut self, session: &S) -> Result<(RingSet<S::Rings>, Vec<RingEnd<S::Ring>>), TalkError> {
        let (rings, new) = session.make_rings(&self.queues.shared())?;
        let mut set = RingSet { rings, numbers: Vec::with_capacity(new.len()), served: false };
        let ends = new.into_iter().map(|NewRing { ring, kick }| {
            self.made += 1;
            set.numbers.push(self.made);
            RingEnd { ring: Box::new(ring), kick, number: self.made }
        });
        let ends = ends.collect();
        Ok((set, ends))
    }

    /// Replaces the rings: passes them to the users of the queues, and keeps the others.
    fn give_rings(&mut self, rings: RingSet<S::Rings>, ends: Vec<RingEnd<S::Ring>>) {
        self.rings = Some(rings);
        self.queues.give_rings(ends);
    }

    /// The back-end is of no use any more. If rings cannot be trusted, there will be new ones.
    fn leave(&mut self, why: &TalkError) {
        if *why == TalkError::LetGo {
            return;
        }
        let broken = matches!(why, TalkError::Fault { .. } | TalkError::RingError);
        let silent = matches!(why, TalkError::Silent { .. });
        if broken || silent || self.rings.as_ref().is_some_and(|rings| !S::is_recorded(&rings.rings)) {
            // Also without new ones: the next session must not continue in these rings.
            self.rings = None;
        }
        let now = self.now();
        let (session, since) = match std::mem::replace(&mut self.link, Link::Down(Outage::new(now, Duration::ZERO))) {
            Link::Up { session, since } => (session, since),
            down @ Link::Down(_) => {
                self.link = down;
                return;
            }
        };
        if let Some(held_back) = self.pass() {
            tracing::warn!("{}: {why}; I/O waits until it is connected again{held_back}", self.options().name);
        }
        let mut outage = Outage::new(now, self.history.lost(now.saturating_duration_since(since), broken));
        outage.set_left(LeftPeer(session.leave()));
        self.link = Link::Down(outage);
        self.queues.end_quiesce();
        self.shared.note(|view| {
            view.is_connected = false;
            view.faults += u64::from(broken);
            view.last_loss = Some(why.to_string());
        });
        self.queues.post_all(|| if silent { QueueCommand::Silent } else { QueueCommand::Died });
        if self.history.has_too_many_faults() {
            self.give_up("the back-end broke its rings repeatedly");
        }
    }

    fn fail_for_time(&mut self) {
        self.give_up(&format!("not connected for {:?}", self.options().gone_max));
    }

    /// Lets all I/O fail, until there is a back-end again.
    fn give_up(&mut self, why: &str) {
        if let Some(held_back) = self.pass() {
            let name = &self.options().name;
            tracing::error!("{name}: {why}: I/O fails until it is connected again; see its log{held_back}");
        }
        self.rings = None;
        self.queues.post_all(|| QueueCommand::Fail);
        if let Link::Down(outage) = &mut self.link {
            outage.give_up();
        }
    }

    fn connect_again(&mut self) {
        let mut session = match S::open(&self.config, &self.end) {
            Ok(session) => session,
            Err(error) => return self.try_later(&error),
        };
        if let Err(source) = self.take_over(&mut session) {
            // It may have begun in some of the rings.
            let left = LeftPeer(session.leave());
            if let Link::Down(outage) = &mut self.link {
                outage.set_left(left);
            }
            return self.try_later(&AttachError::Talk { disk: self.options().name.clone(), source });
        }
        let now = self.now();
        let away = match &self.link {
            Link::Down(outage) => outage.away(now),
            Link::Up { .. } => Duration::ZERO,
        };
        if let Some(held_back) = self.pass() {
            tracing::info!("{}: connected again after {away:?}{held_back}", self.options().name);
        }
        let capacity = session.info().capacity_sectors;
        self.begin(session);
        self.set_capacity(capacity);
    }

    fn try_later(&mut self, error: &AttachError) {
        let (now, gone_max) = (self.now(), self.options().gone_max);
        let Link::Down(outage) = &mut self.link else { return };
        let (step, is_news) = outage.try_later(now, gone_max, &error.to_string());
        if is_news && let Some(held_back) = self.pass() {
            tracing::warn!("{error}; it is tried again{held_back}");
        }
        if step == OutageStep::Fail {
            self.fail_for_time();
        }
    }

    /// Has a newly connected back-end continue for the previous one.
    fn take_over(&mut self, session: &mut S) -> Result<(), TalkError> {
        session.check_same(&self.agreed)?;
        let (have, used) = (session.queues(), self.queues.len());
        if have < used {
            return Err(TalkError::Changed { what: format!("it has {have} queues where {used} are in use") });
        }
        session.set_queues(used);
        if self.queues.have_memory() {
            self.set_up(session)?;
        }
        Ok(())
    }

    /// The back-end's disk has changed.
    fn read_info(&mut self) {
        let Link::Up { session, .. } = &self.link else { return };
        match session.read_info(&self.config) {
            Ok(info) => self.set_capacity(info.capacity_sectors),
            Err(AttachError::Talk { source, .. }) => self.leave(&source),
            Err(error) => {
                if let Some(held_back) = self.pass() {
                    tracing::warn!("{error}; the previous configuration stays in use{held_back}");
                }
            }
        }
    }

    fn set_capacity(&mut self, sectors: u64) {
        let old = self.shared.set_capacity(sectors);
        if old != sectors
            && let Some(held_back) = self.pass()
        {
            tracing::info!("{}: the capacity changed from {old} to {sectors} sectors{held_back}", self.options().name);
        }
    }

    /// Whether a log line that the back-end causes is logged, with the number of those that were not.
    fn pass(&mut self) -> Option<HeldBack> {
        let now = self.now();
        self.log.pass(now).map(HeldBack)
    }

    /// This session serves from now on.
    fn begin(&mut self, session: S) {
        let is_tracked = session.is_tracked();
        self.link = Link::Up { session, since: self.now() };
        self.shared.note(|view| {
            (view.is_connected, view.is_tracked) = (true, is_tracked);
            view.sessions += 1;
        });
    }

    fn note_queues(&mut self) {
        let queues = self.queues.views();
        self.shared.note(|view| view.queues = queues);
    }
}

#[cfg(test)]
mod tests;
