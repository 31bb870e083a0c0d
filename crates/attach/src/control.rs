//! The control thread of an attached disk: it does all that is said to the back-end, one thing after the other.
//!
//! ```text
//!                     hangs up, hangs, breaks a ring
//!     up ────────────────────────────────────────────────▶ down
//!     ▲   the old rings go on, if the back-end kept account   │ tries again, ever less often
//!     └── of what was in flight; otherwise there are new ones ┘ after `gone_max`: all I/O fails
//! ```
//!
//! What was in flight at a back-end that is gone is not over. With an account of it, in memory that the next back-end
//! is given, that one finishes it, in the rings where it stands. Without, each queue gets a ring in new memory, which
//! the old back-end does not know; it takes what is finished out of the old one, and what is not is done again, in the
//! order it was submitted. So nothing that was acknowledged is done twice, and nothing is lost.
//!
//! Owned by its own thread, and bounded in each wait. Queues are told by letters (`door.rs`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use blkyard_mem::{Region, View};
use blkyard_mq::QueueKind;
use blkyard_virtio::driver::{BlkDisk, BlkLayout, BlkRing, SharedMemory};
use blkyard_virtio::{Features, RingBase};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::attached::Shared;
use crate::door::{Door, Letter, Opened, Order};
use crate::event::Event;
use crate::session::{Inflight, RingPlace, Session, addr_of, has};
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
/// A connection that ended so soon was of no use, and the next one will hardly be of more.
const HASTE: Duration = Duration::from_millis(5);
/// How often it is said that requests take long, or what a back-end tells by itself: it could write our log otherwise.
const SAY_EVERY: Duration = Duration::from_secs(10);
/// A back-end that has served for so long is good again.
const GOOD_AFTER: Duration = Duration::from_secs(10);

/// Something that is said no more often than [`SAY_EVERY`].
#[derive(Default)]
struct NowAndThen(Option<Instant>);

impl NowAndThen {
    /// Whether it may be said again; then it is said.
    fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.0.is_none_or(|said_at| now.saturating_duration_since(said_at) >= SAY_EVERY);
        if is_due {
            self.0 = Some(now);
        }
        is_due
    }
}

/// The state of the connection.
enum Link {
    Up { session: Session, since: Instant },
    Down(Outage),
}

struct Outage {
    since: Instant,
    try_at: Instant,
    /// I/O fails.
    gave_up: bool,
    /// What went wrong last, so that it is said once.
    said: String,
}

impl Outage {
    /// `in_haste`: it failed as soon as it had begun, and is not asked again at once.
    fn new(in_haste: bool) -> Outage {
        let now = Instant::now();
        let try_at = if in_haste { now + PAUSE_MAX } else { now };
        Outage { since: now, try_at, gave_up: false, said: String::new() }
    }
}

/// A queue that is open.
struct Slot {
    door: Arc<Door>,
    kick: Arc<Event>,
    regions: Vec<Arc<Region>>,
    memory_number: u64,
    /// It has a ring in the memory that is in use, of this number.
    ring: Option<u64>,
}

pub(crate) struct Control {
    shared: Arc<Shared>,
    orders: Receiver<Order>,
    wake: Arc<Event>,
    /// Rung by a back-end that thinks a ring is broken.
    error: Event,
    link: Link,
    /// By number.
    slots: Vec<Option<Slot>>,
    /// Numbers below this have been in use since the rings were made.
    used: usize,
    /// What was agreed on, for good.
    disk: BlkDisk,
    layout: BlkLayout,
    /// Memory of all rings, one after another.
    rings: Arc<Region>,
    inflight: Option<Inflight>,
    /// Rings made so far.
    made: u64,
    /// Rings broken in a row.
    faults: u32,
    /// That a request takes long.
    late: NowAndThen,
    /// That the disk has another size, or makes no sense.
    news: NowAndThen,
}

impl Control {
    /// Connects for the first time.
    pub(crate) fn open(
        config: AttachConfig,
        orders: Receiver<Order>,
        wake: &Arc<Event>,
    ) -> Result<Control, AttachError> {
        let mut session = Session::open(&config)?;
        let (path, size) = (config.socket.clone(), config.queue_size);
        let failed = |source| AttachError::System { path: path.clone(), source };
        let disk = session.disk.clone();
        let layout = BlkLayout::new(&disk, size);
        let queues = usize::from(session.queues);
        let rings = new_rings(&layout, queues).map_err(failed)?;
        let talk = |source| AttachError::Talk { path: path.clone(), source };
        session.set_regions(vec![Arc::clone(&rings)]).map_err(talk)?;
        session.knows(&[Arc::clone(&rings)]).then_some(()).ok_or(TalkError::NoMemory).map_err(talk)?;
        let inflight = session.new_inflight(size).map_err(talk)?;
        inflight.iter().try_for_each(|record| session.set_inflight(record)).map_err(talk)?;
        let error = Event::new().map_err(failed)?;
        let shared = Arc::new(Shared::new(config, disk.info.capacity_sectors));
        let mut control = Control {
            shared,
            orders,
            wake: Arc::clone(wake),
            error,
            link: Link::Up { session, since: Instant::now() },
            slots: (0..queues).map(|_| None).collect(),
            used: 0,
            disk,
            layout,
            rings,
            inflight,
            made: 0,
            faults: 0,
            late: NowAndThen::default(),
            news: NowAndThen::default(),
        };
        control.note_session();
        Ok(control)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn disk(&self) -> &BlkDisk {
        &self.disk
    }

    pub(crate) fn queues(&self) -> usize {
        self.slots.len()
    }

    /// Until nobody can want anything any more.
    pub(crate) fn run(mut self) {
        loop {
            self.wait();
            self.wake.quiet();
            loop {
                match self.orders.try_recv() {
                    Ok(order) => self.obey(order),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
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
            Link::Down(outage) => until = Some(outage.try_at),
        }
        let left = until.map(|at| at.saturating_duration_since(Instant::now()));
        let time = left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
        // Whatever ends this early, all is looked at.
        let _ = poll(&mut fds, time.as_ref());
    }

    /// Looks after the connection.
    fn look(&mut self) {
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
                if self.error.quiet() {
                    self.leave(&TalkError::RingError);
                } else if let Link::Up { session, .. } = &self.link
                    && is_readable(session)
                {
                    // All answers were read: this is the end, or nonsense.
                    self.leave(&TalkError::HungUp);
                }
            }
            Link::Down(outage) if Instant::now() >= outage.try_at => self.connect_again(),
            Link::Down(_) => {}
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Open(kind, answer) => {
                let _ = answer.send(self.open_queue(kind));
            }
            Order::Memory(number, memory_number, regions) => {
                if let Some(slot) = &mut self.slots[usize::from(number)] {
                    (slot.regions, slot.memory_number) = (regions, memory_number);
                    self.with_session(Control::set_memory);
                }
            }
            Order::Fault(number, ring, fault) => {
                let slot = self.slots[usize::from(number)].as_ref().filter(|slot| slot.ring == Some(ring));
                if let Some(slot) = slot {
                    let queue = slot.door.view.name.clone();
                    self.leave(&TalkError::Fault { queue, fault });
                }
            }
            Order::Late(number) => {
                if let Some(slot) = &self.slots[usize::from(number)]
                    && self.late.is_due(Instant::now())
                {
                    tracing::warn!("{}: {}: a request takes long", self.shared.config.name(), slot.door.view.name);
                }
                self.with_session(|_, session| session.probe());
            }
            Order::Close(number) => {
                if self.slots[usize::from(number)].take().is_some_and(|slot| slot.ring.is_some()) {
                    self.with_session(|control, session| {
                        session.stop_ring(number)?;
                        control.set_memory(session)
                    });
                }
                self.note_queues();
            }
        }
    }

    /// Does something with the session, if there is one, and leaves it if that fails.
    fn with_session(&mut self, work: impl FnOnce(&mut Control, &mut Session) -> Result<(), TalkError>) {
        let nobody = Link::Down(Outage::new(false));
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
        let path = || self.shared.config.socket.clone();
        // One that was in use before has left its traces in the account of what is in flight.
        let fresh = (self.used..self.slots.len()).next();
        let Some(number) = fresh.or_else(|| self.slots.iter().position(Option::is_none)) else {
            let cure = "ask for fewer, or start it with more";
            return Err(AttachError::Queues {
                path: path(),
                wanted: self.slots.len() + 1,
                have: self.slots.len(),
                cure,
            });
        };
        let failed = |source| AttachError::System { path: path(), source };
        let door = Arc::new(Door::new(number as u16, kind).map_err(failed)?);
        let kick = Arc::new(Event::new().map_err(failed)?);
        let slot = Slot { door: Arc::clone(&door), kick, regions: Vec::new(), memory_number: 0, ring: None };
        self.slots[number] = Some(slot);
        self.used = self.used.max(number + 1);
        self.note_queues();
        if fresh.is_none() && self.inflight.is_some() {
            self.leave(&TalkError::Renewed);
        } else {
            self.with_session(|control, session| control.start(session, number, false));
        }
        if matches!(self.link, Link::Down(Outage { gave_up: true, .. })) {
            door.post(Letter::Fail);
        }
        Ok(Opened { number: number as u16, door })
    }

    /// Has the back-end know the memory of all queues, and tells them.
    fn set_memory(&mut self, session: &mut Session) -> Result<(), TalkError> {
        let mut wanted = vec![Arc::clone(&self.rings)];
        for region in self.slots.iter().flatten().flat_map(|slot| &slot.regions) {
            if !has(&wanted, region) {
                wanted.push(Arc::clone(region));
            }
        }
        let count = wanted.len();
        session.set_regions(wanted)?;
        if !session.knows(&[Arc::clone(&self.rings)]) {
            return Err(TalkError::NoMemory);
        }
        if session.regions() < count {
            tracing::error!(
                "{}: its back-end can know {} memory regions and {count} are in use; I/O in the others fails. Use fewer guests, \
                 jobs or queues with memory of their own",
                self.shared.config.name(),
                session.regions()
            );
        }
        for slot in self.slots.iter().flatten() {
            slot.door.post(Letter::Memory(slot.memory_number, session.knows(&slot.regions)));
        }
        Ok(())
    }

    /// Has the back-end serve a queue: in the ring it has, or in a new one.
    fn start(&mut self, session: &Session, number: usize, goes_on: bool) -> Result<(), TalkError> {
        let (offset, system) = (number * self.layout.bytes, |error: String| TalkError::System(error));
        let Some(slot) = &mut self.slots[number] else { return Ok(()) };
        let memory = SharedMemory {
            region: Arc::clone(&self.rings),
            offset: offset as u64,
            addr: addr_of(&self.rings) + offset as u64,
        };
        let goes_on = goes_on && slot.ring.is_some();
        let begins = RingBase::start(self.disk.features).bits();
        // Of a packed ring nobody but the account knows where it goes on, and it says so to the back-end; in a fresh
        // one nothing has begun.
        let is_split = !self.disk.features.contains(Features::RING_PACKED);
        let base = if goes_on && is_split { used_index(&memory, &self.layout).into() } else { begins };
        let place = RingPlace { addr: memory.addr, layout: self.layout, base };
        // Also if the queue is polled, and never asks to be called: libvhost-user panics where it would call nobody.
        let call = &slot.door.bell;
        if goes_on {
            session.start_ring(number as u16, &place, &slot.kick, call, &self.error)?;
            // What the old one did not hear the new one must, and what the old one did not say nobody will.
            slot.door.post(Letter::GoesOn);
            return Ok(());
        }
        // One that is gone, and yet is not, has the old one.
        slot.kick = Arc::new(Event::new().map_err(|error| system(error.to_string()))?);
        let complaints = Arc::clone(&slot.door.view.complaints);
        let ring = BlkRing::new(&self.disk, self.layout.size, &memory, complaints)
            .map_err(|error| system(error.to_string()))?;
        session.start_ring(number as u16, &place, &slot.kick, call, &self.error)?;
        self.made += 1;
        slot.ring = Some(self.made);
        slot.door.post(Letter::Run(Box::new(ring), Arc::clone(&slot.kick), self.made));
        Ok(())
    }

    /// The back-end is of no use any more. If rings cannot be trusted, there will be new ones.
    fn leave(&mut self, why: &TalkError) {
        let broken = matches!(why, TalkError::Fault { .. } | TalkError::RingError);
        if broken || *why == TalkError::Renewed {
            // Also while there is none: the next one must not go on in these rings.
            self.inflight = None;
        }
        let Link::Up { since, .. } = &self.link else { return };
        let is_hasty = broken || (since.elapsed() < HASTE && *why != TalkError::Renewed);
        tracing::warn!("{}: {why}. I/O waits for it to come back", self.shared.config.name());
        if since.elapsed() >= GOOD_AFTER {
            self.faults = 0;
        }
        if broken {
            self.faults += 1;
        }
        self.link = Link::Down(Outage::new(is_hasty));
        self.shared.note(|view| {
            view.is_connected = false;
            view.faults += u64::from(broken);
            view.last_loss = Some(why.to_string());
        });
        if *why != TalkError::Renewed {
            self.slots.iter().flatten().for_each(|slot| slot.door.post(Letter::Died));
        }
        if self.faults >= FAULTS_MAX {
            self.give_up();
        }
    }

    /// Lets all I/O fail, until there is a back-end again.
    fn give_up(&mut self) {
        tracing::error!("{}: I/O fails from now on, until its back-end is well again", self.shared.config.name());
        self.inflight = None;
        for slot in self.slots.iter().flatten() {
            slot.door.post(Letter::Fail);
        }
        if let Link::Down(outage) = &mut self.link {
            outage.gave_up = true;
        }
    }

    fn connect_again(&mut self) {
        let again = Session::open(&self.shared.config).and_then(|session| {
            self.take_over(session)
                .map_err(|source| AttachError::Talk { path: self.shared.config.socket.clone(), source })
        });
        match again {
            Ok(session) => {
                let away = if let Link::Down(outage) = &self.link { outage.since.elapsed() } else { Duration::ZERO };
                tracing::info!("{}: served again, after {away:?}", self.shared.config.name());
                self.link = Link::Up { session, since: Instant::now() };
                self.note_session();
                let capacity = self.disk.info.capacity_sectors;
                self.set_capacity(capacity);
            }
            Err(error) => self.try_later(&error.to_string()),
        }
    }

    fn try_later(&mut self, why: &str) {
        let gone_max = self.shared.config.gone_max;
        let Link::Down(outage) = &mut self.link else { return };
        if outage.said != why {
            tracing::debug!("{why}");
            outage.said = why.into();
        }
        let pause = (outage.since.elapsed() / PAUSE_SHARE).clamp(PAUSE_MIN, PAUSE_MAX);
        outage.try_at = Instant::now() + pause;
        if outage.since.elapsed() >= gone_max && !outage.gave_up {
            self.give_up();
        }
    }

    /// Has a back-end that is connected go on where the one before stopped.
    fn take_over(&mut self, mut session: Session) -> Result<Session, TalkError> {
        self.check_same(&session)?;
        // One that is gone, and yet is not, still has the old one.
        self.error = Event::new().map_err(|error| TalkError::System(error.to_string()))?;
        let goes_on = self.inflight.is_some() && session.tracks();
        if !goes_on {
            let rings = new_rings(&self.layout, self.slots.len());
            self.rings = rings.map_err(|error| TalkError::System(error.to_string()))?;
            self.inflight = None;
            self.used = self.slots.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
            self.slots.iter_mut().flatten().for_each(|slot| slot.ring = None);
        }
        self.set_memory(&mut session)?;
        if !goes_on {
            self.inflight = session.new_inflight(self.layout.size)?;
        }
        self.inflight.iter().try_for_each(|record| session.set_inflight(record))?;
        for number in 0..self.slots.len() {
            self.start(&session, number, goes_on)?;
        }
        self.disk.info.capacity_sectors = session.disk.info.capacity_sectors;
        Ok(session)
    }

    /// What queues and their users were told must hold for whoever serves them now.
    fn check_same(&self, session: &Session) -> Result<(), TalkError> {
        let (old, new) = (&self.disk, &session.disk);
        let what = if new.features != old.features {
            format!("it offers {:?} where {:?} was agreed on", new.features, old.features)
        } else if usize::from(session.queues) < self.slots.len() {
            format!("it has {} queues where {} are in use", session.queues, self.slots.len())
        } else if new.info.limits != old.info.limits {
            "its limits are others".into()
        } else if new.info.volatile_cache && !old.info.volatile_cache {
            // Who was told that there is no cache flushes none.
            "it holds back writes until they are flushed, which it did not".into()
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
            Err(error) if self.news.is_due(Instant::now()) => tracing::warn!("{error}; what it said before holds"),
            Err(_) => {}
        }
    }

    fn set_capacity(&mut self, sectors: u64) {
        self.disk.info.capacity_sectors = sectors;
        let old = self.shared.set_capacity(sectors);
        if old != sectors && self.news.is_due(Instant::now()) {
            tracing::info!("{}: {sectors} sectors now, {old} before", self.shared.config.name());
        }
    }

    fn note_session(&mut self) {
        let (features, is_tracked) = (self.disk.features, self.inflight.is_some());
        self.shared.note(|view| {
            (view.is_connected, view.features, view.is_tracked) = (true, features, is_tracked);
            view.sessions += 1;
        });
    }

    fn note_queues(&mut self) {
        let queues = self.slots.iter().flatten().map(|slot| slot.door.view.clone()).collect();
        self.shared.note(|view| view.queues = queues);
    }
}

/// How many chains of a split ring came back so far: what is beyond that a back-end finds in its account. [2.7.8]
fn used_index(memory: &SharedMemory, layout: &BlkLayout) -> u16 {
    /// Flags come first.
    const INDEX: usize = 2;
    let used = View::new(Arc::clone(&memory.region), memory.offset + layout.parts[2] as u64, INDEX + 2, 4);
    used.map_or(0, |used| used.load_u16(INDEX, Ordering::Acquire))
}

fn new_rings(layout: &BlkLayout, queues: usize) -> std::io::Result<Arc<Region>> {
    Region::shared(layout.bytes * queues)
}

fn is_readable(session: &Session) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut fds = [PollFd::from_borrowed_fd(session.socket(), PollFlags::IN | PollFlags::RDHUP)];
    poll(&mut fds, Some(&now)).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_back_end_could_have_us_say_without_end_is_said_now_and_then() {
        let (start, mut news) = (Instant::now(), NowAndThen::default());
        let said: Vec<_> = (0..25).filter(|second| news.is_due(start + Duration::from_secs(*second))).collect();
        assert_eq!(said, [0, 10, 20]);
    }
}
