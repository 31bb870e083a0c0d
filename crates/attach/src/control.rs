//! The control thread of an attached disk: it does all that is said to the back-end, one thing after the other.
//!
//! ```text
//!                     hangs up, hangs, breaks a ring
//!     up ────────────────────────────────────────────────▶ down
//!     ▲   the old rings go on, if the back-end kept account   │ waits for its end of the connection to close
//!     │   of what was in flight; otherwise there are new ones │ tries again, ever less often
//!     └───────────────────────────────────────────────────────┘ after `gone_max`: all I/O fails
//! ```
//!
//! All rings are set up at once, with all memory that is known, when the first queue has memory: as virtual machines do
//! it. A back-end that takes memory in one table may begin its session anew for another one and lose what it has in
//! flight. So a table changes while nothing is: all queues come to rest, the rings are stopped, and new ones begin.
//!
//! What was in flight at a back-end that is gone is not over. With an account of it, in memory that the next back-end
//! is given, that one finishes it, in the rings where it stands. Without, each queue gets a ring in new memory, which
//! the old back-end does not know; it takes what is finished out of the old one, and what is not is done again, in the
//! order it was submitted. So nothing that was acknowledged is done twice, and nothing is lost.
//!
//! Owned by its own thread, and bounded in each wait. Queues are told by commands (`mailbox.rs`).

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, SendError, TryRecvError};
use std::time::{Duration, Instant};

use blkyard_mem::Region;
use blkyard_mq::{HeldBack, LogLimit, QueueKind};
use blkyard_sys::{EventFd, PollFd, PollFlags, is_ready};
use blkyard_virtio::Violations;
use blkyard_virtio::driver::{BlkDisk, BlkLayout, BlkRing};

use crate::attached::SharedState;
use crate::mailbox::{DeviceCommand, DriverQueueView, Opened, QueueCommand, QueueMailbox, RingEnd};
use crate::message::{Connection, PeerState};
use crate::rings::{QueueRing, Rings};
use crate::session::{BackendSession, has};
use crate::{AttachConfig, AttachError, TalkError};

/// The first pause before a back-end that is gone is looked for again, and the longest. Connecting to nobody costs
/// microseconds.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// In between a pause is this share of the time that it has been away: I/O waits hardly longer for its being looked
/// for.
const PAUSE_SHARE: u32 = 8;
/// Rings that back-ends may break one after the other before what is in flight fails: it may be what breaks them.
const FAULTS_MAX: u32 = 3;
/// A back-end that has served for so long is good again.
const GOOD_AFTER: Duration = Duration::from_secs(10);

/// The state of the connection.
enum Link {
    Up { session: BackendSession, since: Instant },
    Down(Outage),
}

struct Outage {
    since: Instant,
    try_at: Instant,
    /// The connection that was left, until the back-end has closed its end: it may do what it was asked for until then,
    /// and nothing is done again before.
    left: Option<Connection>,
    /// There it writes more than is read at one look.
    floods: bool,
    /// I/O fails.
    gave_up: bool,
    /// What went wrong last, so that it is said once.
    said: String,
}

impl Outage {
    /// The back-end is looked for after the pause.
    fn new(now: Instant, pause: Duration) -> Outage {
        Outage { since: now, try_at: now + pause, left: None, floods: false, gave_up: false, said: String::new() }
    }
}

/// One virtqueue of the device, whether somebody uses it or not.
struct DriverQueue {
    call: Arc<EventFd>,
    violations: Arc<Violations>,
    deaths: Arc<AtomicU64>,
    /// The end of its ring, while the queue is not in use. Missing if it was closed in the middle of I/O.
    spare: Option<RingEnd>,
    /// It was in use before.
    used: bool,
    user: Option<User>,
}

impl DriverQueue {
    fn new() -> std::io::Result<DriverQueue> {
        let (call, violations, deaths) = (Arc::new(EventFd::new()?), Arc::default(), Arc::default());
        Ok(DriverQueue { call, violations, deaths, spare: None, used: false, user: None })
    }
}

/// Who uses a queue.
struct User {
    mailbox: Arc<QueueMailbox>,
    regions: Vec<Arc<Region>>,
    memory_number: u64,
    /// It was given a ring, of those that were made last.
    has_ring: bool,
    /// It has nothing in flight, and takes nothing until it is told that its memory is known.
    at_rest: bool,
}

/// Queues are asked to come to rest.
struct QuiesceState {
    number: u64,
    until: Instant,
}

pub(crate) struct Control {
    shared: Arc<SharedState>,
    orders: Receiver<DeviceCommand>,
    wake: Arc<EventFd>,
    /// Signalled when nobody can want anything any more.
    end: Arc<EventFd>,
    /// Rung by a back-end that thinks a ring is broken.
    error: EventFd,
    link: Link,
    /// By number.
    queues: Vec<DriverQueue>,
    /// Memory for queues that was made before they have it.
    reserved: Vec<Arc<Region>>,
    /// The memory or the rings of the queues are not what the back-end knows.
    changed: bool,
    rest: Option<QuiesceState>,
    /// Rests asked for so far.
    rests: u64,
    /// What was agreed on, for good.
    disk: BlkDisk,
    layout: BlkLayout,
    /// What the next set-up may go on in; if there is nothing, it makes new ones.
    rings: Option<Rings>,
    /// Rings made so far.
    made: u64,
    /// Rings broken in a row.
    faults: u32,
    /// Sessions lost in a row that were not good.
    losses: u32,
    /// Limit on the lines that the back-end causes.
    log: LogLimit,
}

impl Control {
    /// Connects for the first time.
    pub(crate) fn open(
        config: AttachConfig,
        orders: Receiver<DeviceCommand>,
        wake: &Arc<EventFd>,
        end: &Arc<EventFd>,
    ) -> Result<Control, AttachError> {
        let mut session = BackendSession::open(&config, end)?;
        let (path, size) = (config.socket.clone(), config.queue_size);
        let failed = |source| AttachError::System { path: path.clone(), source };
        let disk = session.disk.clone();
        let layout = BlkLayout::new(&disk, size);
        let queues = usize::from(session.queues);
        let talk = |source| AttachError::Talk { path: path.clone(), source };
        let error = EventFd::new().map_err(failed)?;
        let now = config.clock.now();
        let shared = Arc::new(SharedState::new(config, disk.info.capacity_sectors));
        let mut control = Control {
            shared,
            orders,
            wake: Arc::clone(wake),
            end: Arc::clone(end),
            error,
            link: Link::Down(Outage::new(now, Duration::ZERO)),
            queues: (0..queues).map(|_| DriverQueue::new()).collect::<Result<_, _>>().map_err(failed)?,
            reserved: Vec::new(),
            changed: false,
            rest: None,
            rests: 0,
            disk,
            layout,
            rings: None,
            made: 0,
            faults: 0,
            losses: 0,
            log: LogLimit::default(),
        };
        let (rings, ends) = control.make_rings(&session).map_err(talk)?;
        if session.adds_regions() {
            control.announce(&mut session, &rings.region).map_err(talk)?;
        }
        control.give_rings(rings, ends);
        control.begin(session);
        Ok(control)
    }

    fn now(&self) -> Instant {
        self.shared.config.clock.now()
    }

    pub(crate) fn shared(&self) -> &Arc<SharedState> {
        &self.shared
    }

    pub(crate) fn disk(&self) -> &BlkDisk {
        &self.disk
    }

    pub(crate) fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Until nobody can want anything any more.
    pub(crate) fn run(mut self) {
        loop {
            self.wait();
            self.wake.take();
            if let Link::Up { session, .. } = &mut self.link {
                session.begin();
            }
            loop {
                match self.orders.try_recv() {
                    Ok(order) => self.obey(order),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            if self.changed {
                self.with_session(Control::change);
            }
            self.look();
        }
    }

    /// Sleeps until there is an order, until the back-end says something, or until it is to be looked for.
    fn wait(&self) {
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        let mut until = None;
        match &self.link {
            Link::Up { session, .. } => {
                fds.push(PollFd::new(&self.error, PollFlags::IN));
                fds.push(PollFd::from_borrowed_fd(session.socket(), PollFlags::IN | PollFlags::RDHUP));
                fds.extend(session.channel.iter().map(|channel| PollFd::new(channel, PollFlags::IN)));
            }
            Link::Down(outage) => {
                if let Some(left) = &outage.left {
                    until = Some(outage.since + self.shared.config.gone_max);
                    if outage.floods {
                        // What it writes would wake us without end.
                        until = until.min(Some(self.now() + PAUSE_MIN));
                    } else {
                        fds.push(PollFd::new(left, PollFlags::IN | PollFlags::RDHUP));
                    }
                } else {
                    until = Some(outage.try_at);
                }
            }
        }
        until = until.into_iter().chain(self.rest.as_ref().map(|rest| rest.until)).min();
        // Whatever ends this early, all is looked at.
        let _ = self.shared.config.clock.wait(&mut fds, until);
    }

    /// Looks after the connection.
    fn look(&mut self) {
        let now = self.now();
        match &mut self.link {
            Link::Up { session, .. } => {
                if let Some(channel) = &mut session.channel {
                    match channel.read() {
                        Ok(false) => {}
                        Ok(true) => self.read_config(),
                        // It tells us of nothing any more.
                        Err(_) => session.channel = None,
                    }
                }
                if self.error.take() {
                    self.leave(&TalkError::RingError);
                } else if let Link::Up { session, .. } = &self.link
                    && is_ready(session.socket(), PollFlags::IN | PollFlags::RDHUP)
                {
                    // All answers were read: this is the end, or nonsense.
                    self.leave(&TalkError::HungUp);
                }
            }
            Link::Down(outage) => {
                let is_over = now.saturating_duration_since(outage.since) >= self.shared.config.gone_max;
                let peer = outage.left.as_ref().map(Connection::look);
                outage.floods = peer == Some(PeerState::Talking);
                if peer == Some(PeerState::Closed) || peer.is_some() && is_over {
                    outage.left = None;
                    if is_over && !outage.gave_up {
                        self.give_up();
                    }
                } else if outage.left.is_none() && now >= outage.try_at {
                    self.connect_again();
                }
            }
        }
        if self.rest.as_ref().is_some_and(|rest| self.now() >= rest.until) {
            let restless = self.users().find(|user| !user.at_rest).map(|user| user.mailbox.view.name.clone());
            let limit = self.shared.config.io_max;
            self.leave(&TalkError::Restless { queue: restless.unwrap_or_default(), limit });
        }
    }

    fn users(&self) -> impl Iterator<Item = &User> {
        self.queues.iter().filter_map(|queue| queue.user.as_ref())
    }

    fn obey(&mut self, order: DeviceCommand) {
        match order {
            DeviceCommand::Open(kind, answer) => {
                if let Err(SendError(Ok(Opened { number, ring, .. }))) = answer.send(self.open_queue(kind)) {
                    // It was waited for no longer.
                    self.obey(DeviceCommand::Close(number, ring));
                }
            }
            DeviceCommand::Reserve(region) => self.reserved.push(region),
            DeviceCommand::Memory(number, memory_number, regions) => {
                if let Some(user) = &mut self.queues[usize::from(number)].user {
                    (user.regions, user.memory_number, user.at_rest) = (regions, memory_number, true);
                    self.changed = true;
                }
            }
            DeviceCommand::Rested(number, rest) => {
                if let Some(user) = &mut self.queues[usize::from(number)].user {
                    user.at_rest |= self.rest.as_ref().is_some_and(|asked| asked.number == rest);
                }
            }
            DeviceCommand::Fault(number, ring, fault) => {
                if let Some(queue) = self.name_of(number, ring) {
                    self.leave(&TalkError::Fault { queue, fault });
                }
            }
            DeviceCommand::Late(number, ring, what) => {
                let limit = self.shared.config.io_max;
                // One that has just come back has its time from then on. It is asked for again.
                let now = self.now();
                let is_late =
                    matches!(&self.link, Link::Up { since, .. } if now.saturating_duration_since(*since) >= limit);
                if let Some(queue) = self.name_of(number, ring).filter(|_| is_late) {
                    self.leave(&TalkError::Silent { request: format!("{queue}, {what},"), limit });
                }
            }
            DeviceCommand::Close(number, end) => {
                let ring = self.ring_number(number.into());
                let queue = &mut self.queues[usize::from(number)];
                if let Some(user) = queue.user.take() {
                    // It may have a new one by now, and not know.
                    let unread = user.mailbox.take().into_iter().filter_map(|command| match command {
                        QueueCommand::Run(end) => Some(end),
                        _ => None,
                    });
                    queue.spare = unread.chain(end).find(|end| Some(end.number) == ring);
                    // What was made for the disk stays with it until something else changes.
                    self.changed |= user.regions.iter().any(|region| !has(&self.reserved, region));
                }
                self.note_queues();
            }
        }
    }

    /// The name of a queue that is in use, if this is its ring.
    fn name_of(&self, number: u16, ring: u64) -> Option<String> {
        let queue = &self.queues[usize::from(number)];
        let is_its = self.ring_number(number.into()) == Some(ring);
        queue.user.as_ref().filter(|_| is_its).map(|user| user.mailbox.view.name.clone())
    }

    fn ring_number(&self, queue: usize) -> Option<u64> {
        self.rings.as_ref().map(|rings| rings.queues[queue].number)
    }

    /// Does something with the session, if there is one, and leaves it if that fails.
    fn with_session(&mut self, work: impl FnOnce(&mut Control, &mut BackendSession) -> Result<(), TalkError>) {
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

    fn open_queue(&mut self, kind: QueueKind) -> Result<Opened, AttachError> {
        let free = |queue: &DriverQueue| queue.user.is_none();
        let fresh = self.queues.iter().position(|queue| free(queue) && !queue.used);
        let Some(number) = fresh.or_else(|| self.queues.iter().position(free)) else {
            let (path, have) = (self.shared.config.socket.clone(), self.queues.len());
            let cure = "ask for fewer, or start it with more";
            return Err(AttachError::Queues { path, wanted: have + 1, have, cure });
        };
        let queue = &mut self.queues[number];
        let name = format!("{}.{number}", if kind == QueueKind::Poll { "req_poll" } else { "req" });
        let view =
            DriverQueueView { name, violations: Arc::clone(&queue.violations), deaths: Arc::clone(&queue.deaths) };
        let mailbox = Arc::new(QueueMailbox::new(kind, &queue.call, view));
        let ring = queue.spare.take();
        let (user_mailbox, has_ring) = (Arc::clone(&mailbox), ring.is_some());
        let user = User { mailbox: user_mailbox, regions: Vec::new(), memory_number: 0, has_ring, at_rest: true };
        queue.user = Some(user);
        self.changed |= !has_ring;
        if matches!(self.link, Link::Down(_)) && queue.used {
            // What whoever had it before has left in the account is not this one's.
            self.rings = None;
        }
        queue.used = true;
        if matches!(self.link, Link::Down(Outage { gave_up: true, .. })) {
            mailbox.post(QueueCommand::Fail);
        }
        self.note_queues();
        let gone_max_ns = self.shared.config.gone_max.as_nanos().try_into().unwrap_or(u64::MAX);
        Ok(Opened { number: number as u16, mailbox, ring, gone_max_ns })
    }

    /// All memory that the back-end is to know, that of the rings first.
    fn regions(&mut self, session: &BackendSession, rings: &Arc<Region>) -> Vec<Arc<Region>> {
        // Nobody else has it, but for what the session knows.
        self.reserved
            .retain(|region| Arc::strong_count(region) > 1 + usize::from(session.knows(std::slice::from_ref(region))));
        let mut wanted = vec![Arc::clone(rings)];
        for region in self.reserved.iter().chain(self.users().flat_map(|user| &user.regions)) {
            if !has(&wanted, region) {
                wanted.push(Arc::clone(region));
            }
        }
        wanted
    }

    /// Some queue has memory: rings are wanted.
    fn is_wanted(&self) -> bool {
        self.users().any(|user| user.memory_number > 0)
    }

    /// Has the back-end know the memory of all queues, and serve the rings: now, or once the queues are at rest.
    fn change(&mut self, session: &mut BackendSession) -> Result<(), TalkError> {
        if !session.runs() {
            return if self.is_wanted() { self.set_up(session) } else { Ok(()) };
        }
        if self.users().all(|user| user.has_ring)
            && let Some(rings) = self.rings.as_ref().map(|rings| Arc::clone(&rings.region))
        {
            let wanted = self.regions(session, &rings);
            if !session.needs_table(&wanted) {
                self.announce(session, &rings)?;
                self.tell_users(session);
                return Ok(());
            }
        }
        if self.users().all(|user| user.at_rest) {
            session.stop_rings()?;
            self.rings = None;
            self.set_up(session)
        } else {
            self.ask_for_rest();
            Ok(())
        }
    }

    /// Has all queues come to rest, and answer when they are.
    fn ask_for_rest(&mut self) {
        if self.rest.is_some() {
            return;
        }
        self.rests += 1;
        self.rest = Some(QuiesceState { number: self.rests, until: self.now() + self.shared.config.io_max });
        self.users().filter(|user| !user.at_rest).for_each(|user| user.mailbox.post(QueueCommand::Rest(self.rests)));
    }

    /// Has the back-end know the memory of the rings and all queues. No ring runs, or regions can be added to its
    /// memory.
    fn announce(&mut self, session: &mut BackendSession, rings: &Arc<Region>) -> Result<(), TalkError> {
        let wanted = self.regions(session, rings);
        let count = wanted.len();
        session.set_regions(wanted)?;
        if !session.knows(std::slice::from_ref(rings)) {
            return Err(TalkError::NoMemory);
        }
        if session.regions() < count
            && let Some(held_back) = self.pass()
        {
            tracing::error!(
                "{}: its back-end can know {} memory regions and {count} are in use; I/O in the others fails. Use fewer \
                 guests, or queues with memory of their own{held_back}",
                self.shared.config.name(),
                session.regions()
            );
        }
        Ok(())
    }

    /// Has all queues go on with the memory that the session knows.
    fn tell_users(&mut self, session: &BackendSession) {
        (self.changed, self.rest) = (false, None);
        for user in self.queues.iter_mut().filter_map(|queue| queue.user.as_mut()) {
            user.at_rest = false;
            user.mailbox.post(QueueCommand::Memory(user.memory_number, session.knows(&user.regions)));
        }
    }

    /// Whether a session can serve the rings that there are: all queues have theirs, and it goes by the account of what
    /// is in flight there if there is one.
    fn goes_on(&self, session: &BackendSession, rings: &Rings) -> bool {
        let has_ring = |queue: &DriverQueue| queue.user.as_ref().map_or(queue.spare.is_some(), |user| user.has_ring);
        self.queues.iter().all(has_ring) && rings.record.is_some() == session.tracks()
    }

    /// Has the back-end know all memory, and serve all queues: in the rings they have, or in new ones. No ring runs.
    fn set_up(&mut self, session: &mut BackendSession) -> Result<(), TalkError> {
        let old = self.rings.take().filter(|rings| self.goes_on(session, rings));
        if let Some(mut rings) = old {
            let was_served = std::mem::replace(&mut rings.served, true);
            let done = self.serve(session, &rings);
            // Also if that failed: what is in flight there the next one finds in the account.
            self.rings = Some(rings);
            done?;
            if was_served {
                // What the one before did not hear this one must, and what it did not say nobody will.
                self.users().for_each(|user| user.mailbox.post(QueueCommand::GoesOn));
            }
        } else {
            let (mut rings, ends) = self.make_rings(session)?;
            self.serve(session, &rings)?;
            rings.served = true;
            self.give_rings(rings, ends);
        }
        self.tell_users(session);
        Ok(())
    }

    /// Has the back-end know all memory, and serve these rings.
    fn serve(&mut self, session: &mut BackendSession, rings: &Rings) -> Result<(), TalkError> {
        self.announce(session, &rings.region)?;
        rings.record.iter().try_for_each(|record| session.set_inflight(record))?;
        for number in 0..self.queues.len() {
            let place = rings.place(number, &self.layout, self.disk.features);
            let (kick, call) = (&rings.queues[number].kick, &self.queues[number].call);
            // Also if the queue is polled and never asks to be called: libvhost-user panics where it would call nobody.
            session.start_ring(number as u16, &place, kick, call, &self.error)?;
        }
        session.enable_rings()
    }

    /// A new ring for each queue, in new memory: who has the old ones writes to nobody's ring.
    fn make_rings(&mut self, session: &BackendSession) -> Result<(Rings, Vec<RingEnd>), TalkError> {
        let region = Region::shared(self.layout.bytes * self.queues.len()).map_err(system)?;
        let record = session.new_inflight(self.layout.size)?;
        let mut rings = Rings { region, record, queues: Vec::new(), served: false };
        let mut ends = Vec::with_capacity(self.queues.len());
        for (number, queue) in self.queues.iter().enumerate() {
            let (memory, violations) = (rings.memory(number, &self.layout), Arc::clone(&queue.violations));
            let ring = BlkRing::new(&self.disk, self.layout.size, &memory, violations).map_err(system)?;
            let kick = Arc::new(EventFd::new().map_err(system)?);
            self.made += 1;
            rings.queues.push(QueueRing { number: self.made, kick: Arc::clone(&kick) });
            ends.push(RingEnd { ring: Box::new(ring), kick, number: self.made });
        }
        Ok((rings, ends))
    }

    /// These are the rings from now on. Hands them to those who use the queues, and keeps the others.
    fn give_rings(&mut self, rings: Rings, ends: Vec<RingEnd>) {
        self.rings = Some(rings);
        for (queue, end) in self.queues.iter_mut().zip(ends) {
            match &mut queue.user {
                Some(user) => {
                    user.has_ring = true;
                    user.mailbox.post(QueueCommand::Run(end));
                }
                None => queue.spare = Some(end),
            }
        }
    }

    /// The back-end is of no use any more. If rings cannot be trusted, there will be new ones.
    fn leave(&mut self, why: &TalkError) {
        if *why == TalkError::LetGo {
            return;
        }
        let broken = matches!(why, TalkError::Fault { .. } | TalkError::RingError);
        let silent = matches!(why, TalkError::Silent { .. });
        if broken || silent || self.rings.as_ref().is_some_and(|rings| rings.record.is_none()) {
            // Also while there is none: the next one must not go on in these rings.
            self.rings = None;
        }
        let now = self.now();
        let gone = Link::Down(Outage::new(now, Duration::ZERO));
        let (session, since) = match std::mem::replace(&mut self.link, gone) {
            Link::Up { session, since } => (session, since),
            down @ Link::Down(_) => {
                self.link = down;
                return;
            }
        };
        if let Some(held_back) = self.pass() {
            tracing::warn!("{}: {why}. I/O waits for it to come back{held_back}", self.shared.config.name());
        }
        if now.saturating_duration_since(since) >= GOOD_AFTER {
            (self.faults, self.losses) = (0, 0);
        }
        let pause = if broken { PAUSE_MAX } else { pause_after(self.losses) };
        self.losses += 1;
        if broken {
            self.faults += 1;
        }
        self.rest = None;
        self.link = Link::Down(Outage { left: Some(session.leave()), ..Outage::new(now, pause) });
        self.shared.note(|view| {
            view.is_connected = false;
            view.faults += u64::from(broken);
            view.last_loss = Some(why.to_string());
        });
        self.users().for_each(|user| user.mailbox.post(if silent { QueueCommand::Silent } else { QueueCommand::Died }));
        if self.faults >= FAULTS_MAX {
            self.give_up();
        }
    }

    /// Lets all I/O fail, until there is a back-end again.
    fn give_up(&mut self) {
        if let Some(held_back) = self.pass() {
            let name = self.shared.config.name();
            tracing::error!("{name}: I/O fails from now on, until its back-end is well again{held_back}");
        }
        self.rings = None;
        self.users().for_each(|user| user.mailbox.post(QueueCommand::Fail));
        if let Link::Down(outage) = &mut self.link {
            outage.gave_up = true;
        }
    }

    fn connect_again(&mut self) {
        let mut session = match BackendSession::open(&self.shared.config, &self.end) {
            Ok(session) => session,
            Err(error) => return self.try_later(&error.to_string()),
        };
        if let Err(source) = self.take_over(&mut session) {
            // It may have begun in some of the rings.
            let left = Some(session.leave());
            if let Link::Down(outage) = &mut self.link {
                outage.left = left;
            }
            let path = self.shared.config.socket.clone();
            return self.try_later(&AttachError::Talk { path, source }.to_string());
        }
        let now = self.now();
        let away = match &self.link {
            Link::Down(outage) => now.saturating_duration_since(outage.since),
            Link::Up { .. } => Duration::ZERO,
        };
        if let Some(held_back) = self.pass() {
            tracing::info!("{}: served again, after {away:?}{held_back}", self.shared.config.name());
        }
        self.begin(session);
        let capacity = self.disk.info.capacity_sectors;
        self.set_capacity(capacity);
    }

    fn try_later(&mut self, why: &str) {
        let (now, gone_max) = (self.now(), self.shared.config.gone_max);
        let Link::Down(outage) = &mut self.link else { return };
        if outage.said != why {
            tracing::debug!("{why}");
            outage.said = why.into();
        }
        let away = now.saturating_duration_since(outage.since);
        outage.try_at = now + (away / PAUSE_SHARE).clamp(PAUSE_MIN, PAUSE_MAX);
        if away >= gone_max && !outage.gave_up {
            self.give_up();
        }
    }

    /// Has a back-end that is connected go on where the one before stopped.
    fn take_over(&mut self, session: &mut BackendSession) -> Result<(), TalkError> {
        self.check_same(session)?;
        session.queues = self.queues.len() as u16;
        // One that is gone, and yet is not, still has the old one.
        self.error = EventFd::new().map_err(system)?;
        if self.is_wanted() {
            self.set_up(session)?;
        }
        self.disk.info.capacity_sectors = session.disk.info.capacity_sectors;
        Ok(())
    }

    /// What queues and their users were told must hold for whoever serves them now.
    fn check_same(&self, session: &BackendSession) -> Result<(), TalkError> {
        let (old, new) = (&self.disk, &session.disk);
        let what = if new.features != old.features {
            format!("it offers {:?} where {:?} was agreed on", new.features, old.features)
        } else if usize::from(session.queues) < self.queues.len() {
            format!("it has {} queues where {} are in use", session.queues, self.queues.len())
        } else if new.info.limits != old.info.limits {
            "it changed its limits".into()
        } else if new.info.volatile_cache && !old.info.volatile_cache {
            // Who was told that there is no cache flushes none.
            "it has a volatile write cache now".into()
        } else {
            return Ok(());
        };
        Err(TalkError::Changed { what })
    }

    /// The back-end says that its configuration has changed.
    fn read_config(&mut self) {
        let Link::Up { session, .. } = &self.link else { return };
        match session.read_disk(&self.shared.config) {
            Ok(disk) => self.set_capacity(disk.info.capacity_sectors),
            Err(AttachError::Talk { source, .. }) => self.leave(&source),
            Err(error) => {
                if let Some(held_back) = self.pass() {
                    tracing::warn!("{error}; what it said before holds{held_back}");
                }
            }
        }
    }

    fn set_capacity(&mut self, sectors: u64) {
        self.disk.info.capacity_sectors = sectors;
        let old = self.shared.set_capacity(sectors);
        if old != sectors
            && let Some(held_back) = self.pass()
        {
            tracing::info!("{}: {sectors} sectors now, {old} before{held_back}", self.shared.config.name());
        }
    }

    /// Whether a line that the back-end causes is logged, and what it says of those that were not.
    fn pass(&mut self) -> Option<HeldBack> {
        let now = self.now();
        self.log.pass(now).map(HeldBack)
    }

    /// This session serves from now on.
    fn begin(&mut self, session: BackendSession) {
        let (features, is_tracked) = (self.disk.features, session.tracks());
        self.link = Link::Up { session, since: self.now() };
        self.shared.note(|view| {
            (view.is_connected, view.features, view.is_tracked) = (true, features, is_tracked);
            view.sessions += 1;
        });
    }

    fn note_queues(&mut self) {
        let queues = self.users().map(|user| user.mailbox.view.clone()).collect();
        self.shared.note(|view| view.queues = queues);
    }
}

fn system(error: impl std::fmt::Display) -> TalkError {
    TalkError::System(error.to_string())
}

/// How long a back-end is left alone after so many sessions in a row that were not good.
fn pause_after(losses: u32) -> Duration {
    if losses == 0 { Duration::ZERO } else { PAUSE_MAX.min(PAUSE_MIN * 2_u32.saturating_pow(losses)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_grows_with_each_lost_session() {
        let pauses_ms: Vec<_> = [0, 1, 2, 8, 9, 40].map(|losses| pause_after(losses).as_millis()).into();
        assert_eq!(pauses_ms, [0, 2, 4, 256, 500, 500]);
    }
}
