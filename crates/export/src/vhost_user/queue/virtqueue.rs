//! One virtqueue of an export: its guest's ring, its bios, its commands, apart from the hardware queue it feeds.
//!
//! A hardware queue may serve several virtqueues. Each has its own bios, ring, record of what is in flight, call
//! descriptor and mailbox, and suspends by itself: it is drained when its own bios are back, whatever the others have
//! in flight. A bio's cookie says whose it is.
//!
//! Owned by a [`VhostQueue`](super::VhostQueue), which lends it the hardware queue for each step of a round. Guest
//! memory belongs to the hardware queue: the first virtqueue that starts brings it, the others must bring the same, and
//! the last one that stops takes it away.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;

use blkyard_mem::Region;
use blkyard_mq::{Bio, DeviceInfo, Driver, HwQueue, HwStats, RegionTable, Segment, SignalEventfd, SignalSlot};
use blkyard_sys::EventFd;
use blkyard_virtio::{
    Chain, ChainHead, DeviceRing, GuestMemory, ParseContext, Parsed, Refusals, RingBase, SerialId, VirtioStatus, parse,
    status_of, write_status, written,
};

use super::VirtqueueShare;
use crate::core::ExportLog;
use crate::vhost_user::kicks::KickSet;
use crate::vhost_user::notes::Notes;
use crate::vhost_user::pace::FetchPace;
use crate::vhost_user::remote::{Command, DiskView, QueuePort, Setup};
use crate::vhost_user::view::{QueueView, RingView};

/// Segments a bio has room for from the start: as many as we tell the guest it may send, and header and status.
const SEGMENTS: usize = crate::vhost_user::backend::SEG_MAX as usize + 2;

/// Chains fetched in one round, at most: as many as there are bios by default. A request that is answered on the spot
/// gives its bio back at once, so without this a guest that publishes as fast as we fetch would keep the lane from its
/// other queues.
const ROUND_MAX: usize = 256;

/// The same while what is written is noted for the front-end: a request may name 4 GiB of memory without moving any of
/// it, an unknown one, say, and to note that takes a millisecond.
const NOTED_ROUND_MAX: usize = 16;

/// A virtqueue of a [`VhostQueue`](super::VhostQueue).
pub(crate) struct GuestQueue {
    /// Its number among the virtqueues of its hardware queue; stays while it is one of them.
    number: usize,
    pub(super) port: QueuePort,
    serial: SerialId,
    refusals: Arc<Refusals>,
    pub(super) session: Option<GuestRing>,
    bios: Bios,
    /// What is counted of its I/O.
    stats: Arc<HwStats>,
    /// Requests it may have in flight, and the most that can be.
    depth: usize,
    depth_max: usize,
    suspending: Vec<Sender<RingBase>>,
    /// Asked to leave its hardware queue, by whoever waits for it.
    parting: Option<Sender<Box<GuestQueue>>>,
    flushing: Flushing,
    retiring: bool,
    /// To move to another lane once what was fetched is finished.
    leaving: bool,
    signal: SignalSlot,
}

/// What a bio of a virtqueue carries: whose it is, and the number of its request there.
fn cookie(virtqueue: usize, request: u32) -> u64 {
    (virtqueue as u64) << 32 | u64::from(request)
}

/// The number of the virtqueue that a bio belongs to.
#[inline]
pub(super) fn virtqueue_of(cookie: u64) -> usize {
    (cookie >> 32) as usize
}

#[inline]
fn request_of(cookie: u64) -> u32 {
    cookie as u32
}

/// The guest's side of a queue that runs.
pub(super) struct GuestRing {
    /// For messages: the export, and the queue's number there.
    name: String,
    log: Arc<ExportLog>,
    ring: DeviceRing,
    pub(super) memory: Arc<GuestMemory>,
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

/// The request number in the cookie of the control path's flush, which is no request of the guest.
const FLUSH: u32 = u32::MAX;

impl Flushing {
    fn new(number: usize) -> Flushing {
        let mut bio = Bio::with_capacity(0);
        bio.op = blkyard_mq::Op::Flush;
        bio.cookie = cookie(number, FLUSH);
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

impl GuestQueue {
    /// A stopped virtqueue that has such a share of its hardware queue.
    pub(super) fn new(number: usize, serial: SerialId, port: QueuePort, share: VirtqueueShare) -> GuestQueue {
        let VirtqueueShare { bios, depth } = share;
        let bio = |index| {
            let mut bio = Bio::with_capacity(SEGMENTS);
            bio.cookie = cookie(number, index as u32);
            bio.submitter = number as u16;
            bio
        };
        let (stats, refusals) = (port.stats(), port.refusals());
        GuestQueue {
            number,
            port,
            serial,
            refusals,
            session: None,
            bios: Bios { free: (0..bios).map(bio).collect(), pending: (0..bios).map(|_| None).collect() },
            stats,
            depth,
            depth_max: depth,
            suspending: Vec::new(),
            parting: None,
            flushing: Flushing::new(number),
            retiring: false,
            leaving: false,
            signal: SignalSlot::default(),
        }
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// It has this number from now on. No bio of its own is in a hardware queue.
    pub(super) fn set_number(&mut self, number: usize) {
        self.number = number;
        for bio in self.bios.free.iter_mut().chain(&mut self.flushing.bio) {
            bio.cookie = cookie(number, request_of(bio.cookie));
            bio.submitter = number as u16;
        }
    }

    pub(super) fn stats(&self) -> &Arc<HwStats> {
        &self.stats
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// Bounds the requests it may have in flight; says what the bound has become.
    pub(super) fn set_depth(&mut self, depth: usize) -> usize {
        self.depth = depth.clamp(1, self.depth_max);
        self.depth
    }

    /// Its bios say who submits them.
    pub(super) fn set_stream(&mut self, stream: u32) {
        self.bios.free.iter_mut().for_each(|bio| bio.stream = stream);
    }

    pub(super) fn set_leaving(&mut self, leaving: bool) {
        self.leaving = leaving;
    }

    /// No bio of its own is in the hardware queue.
    pub(super) fn is_drained(&self) -> bool {
        self.bios.free.len() == self.bios.pending.len() && self.flushing.bio.is_some()
    }

    #[inline]
    pub(super) fn is_stopping(&self) -> bool {
        self.retiring || self.leaving || self.parting.is_some() || !self.suspending.is_empty()
    }

    /// It is asked to leave its hardware queue, and nothing of it is in flight.
    pub(super) fn is_parting(&self) -> bool {
        self.parting.is_some() && self.owes_nothing() && self.is_drained()
    }

    /// All that a daemon before us had in flight is fetched, or never will be.
    fn owes_nothing(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.ring.left() == 0 || session.broken)
    }

    /// Leaves its hardware queue, and says who waits for it. `shares` says whether other virtqueues of it run.
    pub(super) fn part<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueue<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: bool,
    ) -> Option<Sender<Box<GuestQueue>>> {
        self.leave(cx);
        if let Some(session) = &self.session {
            session.leave_kick(kicks, cx);
            if !shares {
                hw.set_memory(cx, Arc::new(RegionTable::default()));
            }
        }
        self.parting.take()
    }

    /// Continues at another hardware queue. `shares` says whether other virtqueues of it run.
    pub(super) fn enter<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueue<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: bool,
    ) {
        let Some(session) = &mut self.session else { return };
        if !shares {
            hw.set_memory(cx, Arc::clone(session.memory.table()));
        } else if !hw.memory().is_same(session.memory.table()) {
            // Changes of memory suspend all queues first, and this one was not.
            session.stop("the other queues of its hardware queue run with other memory");
        }
        if let Some(kicks) = kicks {
            session.join_kicks(kicks);
        }
    }

    /// Its kick is heard through a set from now on, and no more by its lane itself.
    pub(super) fn kick_through<Cx: ?Sized + SignalEventfd>(&mut self, kicks: &KickSet, cx: &mut Cx) {
        if let Some(session) = &mut self.session {
            session.leave_kick(None, cx);
            session.join_kicks(kicks);
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.retiring && self.session.is_none()
    }

    /// Does what the control path asks, but for what concerns its hardware queue. `shares` says whether other
    /// virtqueues of that run.
    #[cold]
    pub(super) fn obey<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueue<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: bool,
        command: Command,
    ) {
        match command {
            Command::Run(setup, answer) => {
                let _ = answer.send(self.start(hw, kicks, cx, shares, *setup));
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
                let at_rest = self.session.is_none() && hw.is_idle();
                // A virtqueue that is new beside others that run is told what its hardware queue knows.
                let is_known = self.session.is_none() && is_same_disk(hw.info(), &info);
                if at_rest {
                    hw.set_info(0, info);
                }
                let done = (at_rest || is_known).then_some(());
                let _ = answer.send(done.ok_or_else(|| "the queue is running".into()));
            }
            Command::Part(answer) => self.parting = Some(answer),
            Command::Stay => self.parting = None,
            Command::Retire => self.retiring = true,
            Command::Adopt(..) | Command::Depth(..) | Command::Schedule(..) | Command::Rates(..) | Command::Look(_) => {
                unreachable!("done by the hardware queue")
            }
        }
    }

    fn start<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueue<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: bool,
        setup: Setup,
    ) -> Result<(), String> {
        if self.session.is_some() {
            return Err("the queue is running already".into());
        }
        if shares && !hw.memory().is_same(setup.memory.table()) {
            return Err("the other queues of its hardware queue use other memory".into());
        }
        let mut ring = DeviceRing::new(setup.layout, setup.size, setup.disk.features, setup.base)
            .map_err(|error| error.to_string())?;
        let records = setup.record.as_ref().map(|record| Arc::clone(record.region()));
        if let Some(record) = setup.record {
            ring.track(record).map_err(|fault| format!("the in-flight record is invalid: {fault}"))?;
            if ring.left() > 0 {
                let (name, left) = (&setup.name, ring.left());
                setup.log.info(format_args!("{name}: {left} requests of the previous session are submitted again"));
            }
        }
        if let (Some(kicks), Some(kick)) = (kicks, &setup.kick) {
            kicks.add(kick.as_fd()).map_err(|error| format!("its kick eventfd cannot be polled: {error}"))?;
        }
        if !shares {
            hw.set_memory(cx, Arc::clone(setup.memory.table()));
        }
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
    fn rest<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueue<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: bool,
    ) {
        cx.forget(&mut self.signal);
        let Some(mut session) = self.session.take() else { return };
        // Whoever looks at the ring now is kicked as usual, and we are not to take that from him.
        session.enable_notify();
        if let Some(eventfd) = session.notes.as_ref().and_then(Notes::untold) {
            signal_once(cx, &mut self.signal, eventfd);
        }
        session.leave_kick(kicks, cx);
        let base = session.ring.base();
        drop(session);
        if !shares {
            hw.set_memory(cx, Arc::new(RegionTable::default()));
        }
        for answer in self.suspending.drain(..) {
            let _ = answer.send(base);
        }
    }

    /// What there is to see. What the hardware queue holds is shown with the first of its virtqueues; with the others
    /// only how it is set, and their own bios.
    pub(super) fn view<D>(&self, hw: &HwQueue<D>, is_first: bool, now_ns: u64) -> QueueView {
        let ring = self.session.as_ref().map(|session| RingView {
            size: session.ring.size(),
            next_avail: session.ring.base().next_avail(),
            in_flight: session.ring.in_flight(),
            is_recorded: session.records.is_some(),
            is_broken: session.broken,
        });
        let mut hw = hw.snapshot(now_ns);
        if !is_first {
            let bios = self.bios.pending.len() - self.bios.free.len();
            (hw.bios, hw.tags_in_use, hw.in_flight, hw.dispatch) = (bios, 0, 0, 0);
            hw.requests.clear();
            hw.namespaces.iter_mut().for_each(|namespace| (namespace.waiting, namespace.held_ns) = (0, None));
        }
        QueueView { ring, hw, is_suspending: self.is_stopping() && self.session.is_some() }
    }

    /// Answers what needs nothing done while no session runs.
    #[inline]
    pub(super) fn answer_at_rest(&mut self) {
        // At rest already: memory was let go of when the session ended.
        for answer in self.suspending.drain(..) {
            let _ = answer.send(RingBase::SPLIT_START);
        }
        // Without memory nothing was written since.
        for answer in self.flushing.asked.drain(..) {
            let _ = answer.send(true);
        }
    }

    /// A round begins that gives back what is over.
    #[inline(always)]
    pub(super) fn resume(&mut self) {
        if let Some(session) = &mut self.session {
            session.pace.resume(|| session.ring.front());
        }
    }

    /// One of its bios is over.
    #[inline(always)]
    pub(super) fn end(&mut self, bio: Box<Bio>) {
        match &mut self.session {
            _ if request_of(bio.cookie) == FLUSH => self.flushing.end(bio),
            Some(session) => session.end(&mut self.bios, bio),
            None => unreachable!("a queue rests once its bios are back"),
        }
    }

    /// Passes on what the guest published, and shows it what was completed if anything has moved by now.
    #[inline(always)]
    pub(super) fn feed<Cx: ?Sized + SignalEventfd, D>(
        &mut self,
        hw: &mut HwQueue<D>,
        cx: &mut Cx,
        device_idle: bool,
        mut busy: bool,
    ) -> bool {
        let stopping = self.is_stopping();
        let Some(session) = &mut self.session else { return busy };
        self.flushing.submit(hw);
        if !session.broken {
            // A queue that comes to rest owes what was in flight before it began, and nothing else that it has not
            // fetched.
            let most = if stopping { session.ring.left().min(session.round_max) } else { session.round_max };
            // The control path's flush takes a place, too: there may be more bios at hand than there is room for.
            let most = most.min(hw.room());
            busy |= session.fetch(hw, &mut self.bios, &self.serial, &self.refusals, most, device_idle);
        }
        // Before the device has its turn, which may take a while: the guest need not wait for that.
        if busy && session.publish() {
            session.call(cx, &mut self.signal);
        }
        if busy && let Some(eventfd) = session.notes.as_ref().and_then(Notes::untold) {
            signal_once(cx, &mut self.signal, eventfd);
        }
        busy
    }

    /// Ends its part of a round. True if it came to rest, or told the front-end that it is broken.
    #[inline(always)]
    pub(super) fn end_round<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
        &mut self,
        hw: &mut HwQueue<D>,
        kicks: Option<&KickSet>,
        cx: &mut Cx,
        shares: impl FnOnce() -> bool,
    ) -> bool {
        let stopping = self.is_stopping();
        let Some(session) = &mut self.session else { return false };
        let mut busy = false;
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
        let is_to_rest = self.retiring || !self.suspending.is_empty();
        if stopping && is_to_rest && self.owes_nothing() && self.is_drained() {
            self.rest(hw, kicks, cx, shares());
            return true;
        }
        busy
    }

    /// Lets go of the lane it was on.
    pub(super) fn leave<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx) {
        // A call that has not gone through goes to an eventfd that is ringing already.
        cx.forget(&mut self.signal);
    }

    /// Asks the guest to kick from now on. True if there is something to do already.
    pub(super) fn arm(&mut self, room: usize) -> bool {
        // A queue that is being stopped fetches nothing, whatever the guest publishes: it waits for completions only.
        let fetches = !self.is_stopping();
        match &mut self.session {
            Some(session) if fetches && !session.broken => {
                let offered = session.enable_notify() && !self.bios.free.is_empty() && room > 0;
                offered || session.is_cut_short()
            }
            _ => false,
        }
    }

    pub(super) fn disarm(&mut self) {
        if let Some(session) = &mut self.session {
            session.disable_notify();
        }
    }

    /// The descriptor that the guest kicks, if it is to be listened to now.
    pub(super) fn kick(&self) -> Option<BorrowedFd<'_>> {
        let session = self.session.as_ref().filter(|session| !session.broken && !self.is_stopping())?;
        session.kick.as_ref().map(|kick| kick.as_fd())
    }

    /// It runs without a kick descriptor: the lane is to look by itself.
    pub(super) fn is_polled(&self) -> bool {
        let polls = |session: &GuestRing| session.kick.is_none() && !session.broken;
        !self.is_stopping() && self.session.as_ref().is_some_and(polls)
    }
}

impl GuestRing {
    /// Memory that the front-end shares with us has gone away.
    #[inline]
    fn is_cut_short(&self) -> bool {
        self.memory.is_faulted() || self.records.as_ref().is_some_and(|records| records.is_faulted())
    }

    /// Has its kick heard through a set.
    #[cold]
    fn join_kicks(&mut self, kicks: &KickSet) {
        let Some(kick) = &self.kick else { return };
        if let Err(error) = kicks.add(kick.as_fd()) {
            self.log
                .warn(format_args!("{}: its kick cannot be listened to, so its ring is polled: {error}", self.name));
            self.kick = None;
        }
    }

    /// Has its kick no longer heard.
    fn leave_kick<Cx: ?Sized + SignalEventfd>(&self, kicks: Option<&KickSet>, cx: &mut Cx) {
        match (&self.kick, kicks) {
            (Some(kick), Some(kicks)) => kicks.remove(kick.as_fd()),
            (Some(kick), None) => cx.ignore(kick.as_fd()),
            (None, _) => {}
        }
    }

    /// Fetches chains while there are bios to carry them, but no more than `most`, and what the pace says if the device
    /// has nothing. Returns whether anything was fetched.
    #[inline(always)]
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
                    bios.pending[request_of(bio.cookie) as usize] = Some(Pending { head, status_at, room_bytes });
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
    #[inline(always)]
    fn finish(&mut self, head: ChainHead, status_at: Segment, status: VirtioStatus, room_bytes: u64) {
        write_status(&self.memory, status_at, status);
        if let Some(notes) = &self.notes {
            notes.segments(&self.memory, &[status_at]);
        }
        self.ring.complete(head, written(room_bytes, status));
    }

    /// A bio has ended.
    #[inline(always)]
    fn end(&mut self, bios: &mut Bios, bio: Box<Bio>) {
        let Some(pending) = bios.pending[request_of(bio.cookie) as usize].take() else {
            unreachable!("a bio that is out has its request");
        };
        if let Some(notes) = &self.notes {
            notes.ended(&self.memory, &bio);
        }
        self.finish(pending.head, pending.status_at, status_of(bio.status), pending.room_bytes);
        bios.free.push(bio);
    }

    /// Shows the guest what was completed; says whether it wants a call for it.
    #[inline(always)]
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
            self.log.warn(format_args!("{}: stopped: {why}", self.name));
        }
    }

    /// The memory was cut short under the ring. Ends the control path's session, which suspends all queues and lets go
    /// of the memory.
    #[cold]
    fn lose(&mut self) {
        if !self.lost {
            self.lost = true;
            self.stop("the front-end truncated the memory of the queue");
            let _ = self.connection.shutdown(Shutdown::Both);
        }
    }
}

/// Whether two descriptions are of the same disk in the same state.
fn is_same_disk(one: &DeviceInfo, other: &DeviceInfo) -> bool {
    let parts = |info: &DeviceInfo| {
        (info.capacity_sectors, info.limits, info.read_only, info.volatile_cache, info.fua, info.rotational)
    };
    parts(one) == parts(other)
}

/// Signals another eventfd than the guest's, under the same place. A call of the guest's that has not gone through goes
/// to a eventfd that is ringing already.
#[cold]
fn signal_once<Cx: ?Sized + SignalEventfd>(cx: &mut Cx, place: &mut SignalSlot, eventfd: &EventFd) {
    cx.forget(place);
    cx.signal(place, eventfd.as_fd());
    cx.forget(place);
}
