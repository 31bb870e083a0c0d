//! A virtqueue and the hardware queue it feeds, as a poller of a lane.
//!
//! A round gives back what the device finished, fetches what the guest published (half of it, if the device has
//! nothing), and passes it on; one look at the clock, one used index and at most one call for all of it. A chain is
//! fetched only while a bio is at hand to carry it. The guest's mistakes end in an error status, or stop this queue
//! with a counted reason; they reach nobody else.
//!
//! Owned by its lane. What the control path wants comes as commands (see [`crate::remote`]). A queue that moves to
//! another lane comes to rest first and takes its session along: whoever is connected notices a pause and nothing else.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use blkyard_mem::Region;
use blkyard_mq::{Bio, Driver, HwQueue, Poller, PollerState, RegionTable, Segment, SignalEventfd, SignalSlot, Wake};
use blkyard_sys::EventFd;
use blkyard_virtio::{
    Chain, ChainHead, DeviceRing, GuestMemory, ParseContext, Parsed, Refusals, RingBase, SerialId, VirtioStatus, parse,
    status_of, write_status, written,
};

use crate::log::ExportLog;
use crate::notes::Notes;
use crate::pace::FetchPace;
use crate::remote::{Command, DiskView, QueuePort, Setup};
use crate::view::{QueueView, RingView};

/// Segments a bio has room for from the start: as many as we tell the guest it may send, and header and status.
const SEGMENTS: usize = crate::backend::SEG_MAX as usize + 2;

/// How often a queue without a kick descriptor looks for work by itself.
const POLL_NS: u64 = 200_000;

/// Chains fetched in one round, at most: as many as there are bios by default. A request that is answered on the spot
/// gives its bio back at once, so without this a guest that publishes as fast as we fetch would keep the lane from its
/// other queues.
const ROUND_MAX: usize = 256;

/// The same while what is written is noted for the front-end: a request may name 4 GiB of memory without moving any of
/// it, an unknown one, say, and to note that takes a millisecond.
const NOTED_ROUND_MAX: usize = 16;

/// A virtqueue and its hardware queue.
pub struct VhostQueue<D> {
    hw: HwQueue<D>,
    port: QueuePort,
    serial: SerialId,
    refusals: Arc<Refusals>,
    session: Option<GuestRing>,
    bios: Bios,
    suspending: Vec<Sender<RingBase>>,
    flushing: Flushing,
    retiring: bool,
    /// To move to another lane once what was fetched is finished.
    leaving: bool,
    now_ns: u64,
    signal: SignalSlot,
}

/// The guest's side of a queue that runs.
struct GuestRing {
    /// For messages: the export, and the queue's number there.
    name: String,
    log: Arc<ExportLog>,
    ring: DeviceRing,
    memory: Arc<GuestMemory>,
    /// Where the record of what is in flight lies.
    records: Option<Arc<Region>>,
    /// Where is noted which of the guest's pages are written, if somebody wants to know.
    notes: Option<Notes>,
    /// Chains fetched in one round, at most.
    round_max: usize,
    kick: Option<Arc<EventFd>>,
    call: Option<Arc<EventFd>>,
    error: Option<Arc<EventFd>>,
    disk: DiskView,
    connection: Arc<UnixStream>,
    chain: Chain,
    pace: FetchPace,
    /// A broken ring is fetched from no more; what was fetched still ends.
    broken: bool,
    /// It broke in this round: the front-end is to be told.
    alarm: bool,
    /// Its memory was cut short, and the control path has been told.
    lost: bool,
}

/// What is known of the requests under way: bios not in use, and for those in use what their end needs.
struct Bios {
    free: Vec<Box<Bio>>,
    pending: Box<[Option<Pending>]>,
}

/// Flushes that the control path asks for, one at a time.
struct Flushing {
    /// Not on its way: ready for the next.
    bio: Option<Box<Bio>>,
    asked: Vec<Sender<bool>>,
}

/// The cookie of the control path's flush, which is no request of the guest.
const FLUSH: u64 = u64::MAX;

impl Flushing {
    fn new() -> Flushing {
        let mut bio = Bio::with_capacity(0);
        bio.op = blkyard_mq::Op::Flush;
        bio.cookie = FLUSH;
        Flushing { bio: Some(bio), asked: Vec::new() }
    }

    /// Sends a flush on its way if one is asked for and there is room.
    #[inline]
    fn submit<D>(&mut self, hw: &mut HwQueue<D>) {
        if !self.asked.is_empty()
            && hw.room() > 0
            && let Some(bio) = self.bio.take()
        {
            hw.submit(bio);
        }
    }

    #[cold]
    fn end(&mut self, bio: Box<Bio>) {
        for answer in self.asked.drain(..) {
            let _ = answer.send(bio.status.is_ok());
        }
        self.bio = Some(bio);
    }
}

struct Pending {
    head: ChainHead,
    status_at: Segment,
    /// Room for data before the status.
    room_bytes: u64,
}

impl<D> VhostQueue<D> {
    /// A queue on its lane, stopped.
    pub fn new(hw: HwQueue<D>, serial: SerialId, port: QueuePort) -> VhostQueue<D> {
        let room = hw.room();
        let bio = |index| {
            let mut bio = Bio::with_capacity(SEGMENTS);
            bio.cookie = index as u64;
            bio
        };
        let refusals = Arc::new(Refusals::default());
        let _ = port.shared.stats.set(Arc::clone(hw.stats()));
        let _ = port.shared.refusals.set(Arc::clone(&refusals));
        VhostQueue {
            hw,
            port,
            serial,
            refusals,
            session: None,
            bios: Bios { free: (0..room).map(bio).collect(), pending: (0..room).map(|_| None).collect() },
            suspending: Vec::new(),
            flushing: Flushing::new(),
            retiring: false,
            leaving: false,
            now_ns: 0,
            signal: SignalSlot::default(),
        }
    }

    /// The same, and its bios say who submits them, for schedulers: no two queues that share a device's queue have the
    /// same stream.
    #[must_use]
    pub fn with_stream(mut self, stream: u32) -> VhostQueue<D> {
        self.bios.free.iter_mut().for_each(|bio| bio.stream = stream);
        self
    }

    #[cold]
    fn read_mail<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        for command in self.port.shared.mailbox.take() {
            match command {
                Command::Run(setup, answer) => {
                    let _ = answer.send(self.start(cx, *setup));
                }
                Command::Suspend(answer) => self.suspending.push(answer),
                Command::Flush(answer) => self.flushing.asked.push(answer),
                Command::Call(call, answer) => {
                    if let Some(session) = &mut self.session {
                        cx.forget(&mut self.signal);
                        session.call = call;
                        // The guest may have missed one that went to the old descriptor.
                        session.call(cx, &mut self.signal);
                    }
                    let _ = answer.send(());
                }
                Command::Change(info, answer) => {
                    let at_rest = self.session.is_none() && self.hw.is_idle();
                    if at_rest {
                        self.hw.set_info(0, info);
                    }
                    let _ = answer.send(at_rest.then_some(()).ok_or_else(|| "the queue runs".into()));
                }
                Command::Depth(depth, answer) => {
                    let _ = answer.send(self.hw.set_depth(depth));
                }
                Command::Schedule(config, answer) => {
                    self.hw.schedule(0, config);
                    let _ = answer.send(());
                }
                Command::Rates(limits, answer) => {
                    self.hw.set_rates(0, limits);
                    let _ = answer.send(());
                }
                Command::Look(answer) => {
                    let _ = answer.send(self.view());
                }
                Command::Retire => self.retiring = true,
            }
        }
    }

    fn start<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx, setup: Setup) -> Result<(), String>
    where
        D: Driver<Cx>,
    {
        if self.session.is_some() {
            return Err("the queue runs already".into());
        }
        let mut ring = DeviceRing::new(setup.layout, setup.size, setup.disk.features, setup.base)
            .map_err(|error| error.to_string())?;
        let records = setup.record.as_ref().map(|record| Arc::clone(record.region()));
        if let Some(record) = setup.record {
            ring.track(record).map_err(|fault| format!("the record of what is in flight cannot be: {fault}"))?;
            if ring.left() > 0 {
                let (name, left) = (&setup.name, ring.left());
                setup.log.info(format_args!("{name}: it begins with {left} requests that were in flight before"));
            }
        }
        self.hw.set_memory(cx, Arc::clone(setup.memory.table()));
        let mut session = GuestRing {
            name: setup.name,
            log: setup.log,
            // A small ring may still bring chains as long as we said they may be, in tables of their own.
            chain: Chain::new(setup.size.max(SEGMENTS as u16)),
            pace: FetchPace::default(),
            ring,
            memory: setup.memory,
            records,
            round_max: if setup.notes.is_some() { NOTED_ROUND_MAX } else { ROUND_MAX },
            notes: setup.notes,
            kick: setup.kick,
            call: setup.call,
            error: setup.error,
            disk: setup.disk,
            connection: setup.connection,
            broken: false,
            alarm: false,
            lost: false,
        };
        session.disable_notify();
        if session.records.is_some() {
            // Who had the ring before us may have died between showing the guest an answer and calling it.
            session.call(cx, &mut self.signal);
        }
        self.session = Some(session);
        Ok(())
    }

    /// Once nothing fetched is left: lets go of the guest and says where the queue stands.
    #[cold]
    fn rest<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        cx.forget(&mut self.signal);
        let Some(mut session) = self.session.take() else { return };
        // Whoever looks at the ring now is kicked as usual, and we are not to take that from him.
        session.enable_notify();
        if let Some(eventfd) = session.notes.as_ref().and_then(Notes::untold) {
            signal_once(cx, &mut self.signal, eventfd);
        }
        if let Some(kick) = &session.kick {
            cx.ignore(kick.as_fd());
        }
        let base = session.ring.base();
        drop(session);
        self.hw.set_memory(cx, Arc::new(RegionTable::default()));
        for answer in self.suspending.drain(..) {
            let _ = answer.send(base);
        }
    }

    /// What there is to see.
    fn view(&self) -> QueueView {
        let ring = self.session.as_ref().map(|session| RingView {
            size: session.ring.size(),
            next_avail: session.ring.base().next_avail(),
            in_flight: session.ring.in_flight(),
            is_recorded: session.records.is_some(),
            is_broken: session.broken,
        });
        QueueView {
            ring,
            hw: self.hw.snapshot(self.now_ns),
            is_suspending: self.is_stopping() && self.session.is_some(),
        }
    }

    fn is_stopping(&self) -> bool {
        self.retiring || self.leaving || !self.suspending.is_empty()
    }
}

impl GuestRing {
    /// Memory that the front-end shares with us has gone away.
    #[inline]
    fn is_cut_short(&self) -> bool {
        self.memory.is_faulted() || self.records.as_ref().is_some_and(|records| records.is_faulted())
    }

    /// Fetches chains while there are bios to carry them, but no more than `most`, and what the pace says if the device
    /// has nothing. Returns whether anything was fetched.
    #[inline]
    fn fetch<D>(
        &mut self,
        hw: &mut HwQueue<D>,
        bios: &mut Bios,
        serial: &SerialId,
        refusals: &Refusals,
        mut most: usize,
        device_idle: bool,
    ) -> bool {
        self.ring.set_near(self.pace.takes_turns());
        // What is in sight by now is the rest of what the last round took half of.
        let rest = self.ring.in_sight();
        if device_idle && rest > 0 {
            most = most.min(rest);
        }
        let mut fetched = 0;
        while fetched < most {
            let Some(mut bio) = bios.free.pop() else { break };
            let head = match self.ring.fetch(&self.memory, &mut self.chain) {
                Ok(Some(head)) => head,
                Ok(None) => {
                    bios.free.push(bio);
                    break;
                }
                Err(fault) => {
                    bios.free.push(bio);
                    // A ring whose memory is gone reads as zeroes: that is not what the guest wrote.
                    if !self.is_cut_short() {
                        refusals.ring_fault(&fault);
                        self.stop(&fault.to_string());
                    }
                    break;
                }
            };
            fetched += 1;
            if fetched == 1 && rest == 0 && device_idle {
                most = most.min(self.pace.begin(1 + self.ring.in_sight(), || self.ring.front()));
            }
            // Looked at after the chain was found: what was published after the mode had changed is done in the new
            // one.
            let write_back = self.disk.write_back.load(Ordering::Acquire);
            let context = ParseContext { features: self.disk.features, write_back };
            match parse(&self.chain, &self.memory, &context, &mut bio) {
                Parsed::Io { status_at } => {
                    let room_bytes = self.chain.writable_bytes() - 1;
                    bios.pending[bio.cookie as usize] = Some(Pending { head, status_at, room_bytes });
                    hw.submit(bio);
                }
                Parsed::GetId { status_at } => {
                    let id_bytes = serial.write(&self.memory, self.chain.writable());
                    write_status(&self.memory, status_at, VirtioStatus::Ok);
                    if let Some(notes) = &self.notes {
                        notes.first_bytes(&self.memory, self.chain.writable(), id_bytes);
                        notes.segments(&self.memory, &[status_at]);
                    }
                    // Between a longer buffer's first bytes and the status is a gap.
                    let whole = u64::from(id_bytes) + 1 == self.chain.writable_bytes();
                    self.ring.complete(head, id_bytes + u32::from(whole));
                    bios.free.push(bio);
                }
                Parsed::Reject { status, status_at, reason } => {
                    refusals.request(&reason);
                    match status_at {
                        Some(at) => self.finish(head, at, status, self.chain.writable_bytes() - 1),
                        None => self.ring.complete(head, 0),
                    }
                    bios.free.push(bio);
                }
            }
        }
        fetched > 0
    }

    /// Writes a request's status and puts it into the used ring.
    #[inline]
    fn finish(&mut self, head: ChainHead, status_at: Segment, status: VirtioStatus, room_bytes: u64) {
        write_status(&self.memory, status_at, status);
        if let Some(notes) = &self.notes {
            notes.segments(&self.memory, &[status_at]);
        }
        self.ring.complete(head, written(room_bytes, status));
    }

    /// A bio has ended.
    #[inline]
    fn end(&mut self, bios: &mut Bios, bio: Box<Bio>) {
        let Some(pending) = bios.pending[bio.cookie as usize].take() else {
            unreachable!("a bio that is out has its request");
        };
        if let Some(notes) = &self.notes {
            notes.ended(&self.memory, &bio);
        }
        self.finish(pending.head, pending.status_at, status_of(bio.status), pending.room_bytes);
        bios.free.push(bio);
    }

    /// Shows the guest what was completed; says whether it wants a call for it.
    #[inline]
    fn publish(&mut self) -> bool {
        let wanted = self.ring.publish();
        self.note_ring();
        wanted
    }

    fn enable_notify(&mut self) -> bool {
        let offered = self.ring.enable_notify();
        self.note_ring();
        offered
    }

    fn disable_notify(&mut self) {
        self.ring.disable_notify();
        self.note_ring();
    }

    #[inline]
    fn note_ring(&self) {
        if let Some(notes) = &self.notes {
            notes.ring();
        }
    }

    #[inline]
    fn call<Cx: ?Sized + SignalEventfd>(&self, cx: &mut Cx, place: &mut SignalSlot) {
        if let Some(call) = &self.call {
            cx.signal(place, call.as_fd());
        }
    }

    /// Fetches no more from this ring.
    #[cold]
    fn stop(&mut self, why: &str) {
        if !self.broken {
            self.broken = true;
            self.alarm = true;
            self.log.warn(format_args!("{}: it is stopped: {why}", self.name));
        }
    }

    /// The memory was cut short under the ring. Ends the control path's session, which suspends all queues and lets go
    /// of the memory.
    #[cold]
    fn lose(&mut self) {
        if !self.lost {
            self.lost = true;
            self.stop("the memory it lives in was truncated by the front-end");
            let _ = self.connection.shutdown(Shutdown::Both);
        }
    }
}

/// Signals another eventfd than the guest's, under the same place. A call of the guest's that has not gone through goes
/// to a eventfd that is ringing already.
#[cold]
fn signal_once<Cx: ?Sized + SignalEventfd>(cx: &mut Cx, place: &mut SignalSlot, eventfd: &EventFd) {
    cx.forget(place);
    cx.signal(place, eventfd.as_fd());
    cx.forget(place);
}

impl<Cx: ?Sized + SignalEventfd, D: Driver<Cx>> Poller<Cx> for VhostQueue<D> {
    fn enter(&mut self, cx: &mut Cx, waker: &Arc<dyn Wake>) {
        self.leaving = false;
        if let Some(session) = &self.session {
            self.hw.set_memory(cx, Arc::clone(session.memory.table()));
        }
        // Before the first run, which looks for mail.
        self.port.shared.waker.register(waker);
    }

    fn leave(&mut self, cx: &mut Cx) -> bool {
        self.leaving = true;
        if !self.hw.is_idle() {
            return false;
        }
        // A call that has not gone through goes to an eventfd that is ringing already.
        cx.forget(&mut self.signal);
        self.hw.set_memory(cx, Arc::new(RegionTable::default()));
        true
    }

    fn stay(&mut self) {
        self.leaving = false;
    }

    fn set_turn_bytes(&mut self, bytes: u64) {
        self.hw.set_turn_bytes(bytes);
    }

    fn run_once(&mut self, cx: &mut Cx, now_ns: u64) -> PollerState {
        self.now_ns = now_ns;
        let had_mail = self.port.shared.mailbox.is_pending();
        if had_mail {
            self.read_mail(cx);
        }
        let stopping = self.is_stopping();
        if stopping != self.hw.is_in_hurry() {
            self.hw.set_hurry(stopping);
        }
        let Some(session) = &mut self.session else {
            // At rest already: memory was let go of when the session ended.
            for answer in self.suspending.drain(..) {
                let _ = answer.send(RingBase::SPLIT_START);
            }
            // Without memory nothing was written since.
            for answer in self.flushing.asked.drain(..) {
                let _ = answer.send(true);
            }
            return if had_mail { PollerState::Busy } else { PollerState::Idle };
        };
        let bios = &mut self.bios;
        let mut busy = had_mail;
        if !self.hw.is_idle() {
            session.pace.resume(|| session.ring.front());
            let flushing = &mut self.flushing;
            busy |= self.hw.reap(cx, now_ns, &mut |bio| match bio.cookie {
                FLUSH => flushing.end(bio),
                _ => session.end(bios, bio),
            }) > 0;
        }
        self.flushing.submit(&mut self.hw);
        if !session.broken {
            // A queue that comes to rest owes what was in flight before it began, and nothing else that it has not
            // fetched.
            let most = if stopping { session.ring.left().min(session.round_max) } else { session.round_max };
            // The control path's flush takes a place, too: there may be more bios at hand than there is room for.
            let most = most.min(self.hw.room());
            let idle = self.hw.is_idle();
            busy |= session.fetch(&mut self.hw, bios, &self.serial, &self.refusals, most, idle);
        }
        // Before the device has its turn, which may take a while: the guest need not wait for that.
        if busy && session.publish() {
            session.call(cx, &mut self.signal);
        }
        if busy && let Some(eventfd) = session.notes.as_ref().and_then(Notes::untold) {
            signal_once(cx, &mut self.signal, eventfd);
        }
        busy |= self.hw.issue(cx, now_ns) > 0;
        session.pace.end(session.ring.in_sight() > 0, || session.ring.front());
        // Also without work: looking for some touches the memory.
        if session.is_cut_short() {
            session.lose();
        }
        if std::mem::take(&mut session.alarm)
            && let Some(error) = &session.error
        {
            signal_once(cx, &mut self.signal, error);
            busy = true;
        }
        let owes = session.ring.left() > 0 && !session.broken;
        if stopping && !owes && self.hw.is_idle() && (self.retiring || !self.suspending.is_empty()) {
            self.rest(cx);
            return PollerState::Busy;
        }
        match (busy || self.hw.has_work(), self.hw.is_idle()) {
            (true, _) => PollerState::Busy,
            (false, false) => PollerState::Waiting,
            (false, true) => PollerState::Idle,
        }
    }

    fn arm(&mut self) -> bool {
        // A queue that is being stopped fetches nothing, whatever the guest publishes: it waits for completions only.
        let fetches = !self.is_stopping();
        let work = match &mut self.session {
            Some(session) if fetches && !session.broken => {
                let offered = session.enable_notify() && !self.bios.free.is_empty() && self.hw.room() > 0;
                offered || session.is_cut_short()
            }
            _ => false,
        };
        let finished = self.hw.arm::<Cx>();
        work || finished || self.port.shared.mailbox.is_pending()
    }

    fn disarm(&mut self) {
        if let Some(session) = &mut self.session {
            session.disable_notify();
        }
        self.hw.disarm::<Cx>();
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        let session = self.session.as_ref().filter(|session| !session.broken && !self.is_stopping())?;
        session.kick.as_ref().map(|kick| kick.as_fd())
    }

    fn device_eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.hw.eventfd::<Cx>()
    }

    fn deadline_ns(&self) -> Option<u64> {
        let polls = |session: &GuestRing| session.kick.is_none() && !session.broken;
        let unkicked = !self.is_stopping() && self.session.as_ref().is_some_and(polls);
        let poll = unkicked.then_some(self.now_ns + POLL_NS);
        [self.hw.deadline_ns(), poll].into_iter().flatten().min()
    }

    fn tick(&mut self, now_ns: u64) {
        self.hw.mark_slow(now_ns);
    }

    fn is_over(&self) -> bool {
        self.retiring && self.session.is_none()
    }
}
