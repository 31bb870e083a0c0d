//! The session of one virtqueue: a guest's ring, requests and eventfds behind the core's queue interface.
//!
//! A chain is fetched while a free bio exists, parsed into it, and completed when the bio returns. A malformed chain is
//! completed with an error; a malformed ring stops the virtqueue with a counted reason. Draining, bounds and commands
//! belong to the core.
//!
//! Owned by a lane, in a [`VirtqueuePoller`](crate::VirtqueuePoller).

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blkyard_mem::{Region, RegionTable};
use blkyard_mq::{Bio, Segment, SignalEventfd};
use blkyard_sys::EventFd;
use blkyard_virtio::{
    Chain, ChainHead, DeviceRing, Features, GuestMemory, Inflight, ParseContext, Parsed, Refusal, Refusals, RingBase,
    RingLayout, SerialId, VirtioStatus, parse, status_of, write_status, written,
};

use crate::core::{BioFeed, ExportLog, FetchPace, QueueSession, QueueSignals, RingView};
use crate::vhost_user::notes::Notes;

/// Maximum chains fetched in one round: the default number of bios.
const ROUND_MAX: usize = 256;

/// The same limit while writes are logged. A request, for instance one of unknown type, may name 4 GiB of memory
/// without transferring data, and logging that takes a millisecond.
const NOTED_ROUND_MAX: usize = 16;

/// Bytes of a read after which nothing more is fetched in a round while writes are logged. A read that fails at once,
/// for instance beyond the end of the disk, is logged as a whole.
const NOTED_READ_MAX: u64 = 4 << 20;

/// Setup of a virtqueue session.
pub struct VirtqueueSetup {
    /// For messages: the queue's number in its export.
    pub(crate) name: String,
    pub(crate) log: Arc<ExportLog>,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) layout: RingLayout,
    pub(crate) size: u16,
    /// Position of the ring.
    pub(crate) base: RingBase,
    /// In-flight record of the queue, which contains the position once used.
    pub(crate) record: Option<Inflight>,
    /// Log of written guest pages.
    pub(crate) notes: Option<Notes>,
    pub(crate) kick: Option<Arc<EventFd>>,
    pub(crate) call: Option<Arc<EventFd>>,
    pub(crate) error: Option<Arc<EventFd>>,
    pub(crate) disk: DiskView,
    /// Connection to the front-end; closed if the shared memory is truncated.
    pub(crate) connection: Arc<UnixStream>,
}

impl VirtqueueSetup {
    /// A ring that no messages describe, for an owner of both of its ends such as the simulation: split or packed, as
    /// the features say, from its start or where the record of its requests in flight says. With `write_back` completed
    /// writes may be lost before a flush.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn of_ring(
        name: &str,
        memory: &Arc<GuestMemory>,
        (layout, size): (&RingLayout, u16),
        features: Features,
        record: Option<Inflight>,
        write_back: bool,
    ) -> io::Result<VirtqueueSetup> {
        Ok(VirtqueueSetup {
            name: name.to_owned(),
            log: Arc::new(ExportLog::new(name.to_owned())),
            memory: Arc::clone(memory),
            layout: layout.clone(),
            size,
            base: RingBase::start(features),
            record,
            notes: None,
            kick: Some(Arc::new(EventFd::new()?)),
            call: None,
            error: None,
            disk: DiskView { features, write_back: Arc::new(AtomicBool::new(write_back)) },
            connection: Arc::new(UnixStream::pair()?.0),
        })
    }
}

/// Session state for request parsing, the same for all queues.
#[derive(Clone)]
pub(crate) struct DiskView {
    pub(crate) features: Features,
    /// Whether writes may be lost before a flush; changes while the queue runs.
    pub(crate) write_back: Arc<AtomicBool>,
}

/// The guest's side of a running queue.
pub struct VirtqueueSession {
    /// Names of the export and of the queue, for messages.
    name: String,
    log: Arc<ExportLog>,
    ring: DeviceRing,
    memory: Arc<GuestMemory>,
    /// Memory of the in-flight record.
    records: Option<Arc<Region>>,
    /// Log of written guest pages, if enabled by the front-end.
    notes: Option<Notes>,
    /// Maximum chains fetched in one round.
    round_max: usize,
    kick: Option<Arc<EventFd>>,
    call: Option<Arc<EventFd>>,
    error: Option<Arc<EventFd>>,
    disk: DiskView,
    connection: Arc<UnixStream>,
    chain: Chain,
    pace: FetchPace,
    /// Whether the ring is broken: no chain is fetched any more, and fetched requests still complete.
    broken: bool,
    /// Whether the ring broke in this round: the front-end is to be notified.
    alarm: bool,
    /// Whether the memory was truncated and the control path notified.
    lost: bool,
}

/// Data for the completion of a request.
pub struct PendingChain {
    head: ChainHead,
    status_at: Segment,
    /// Writable bytes before the status.
    room_bytes: u64,
}

impl QueueSession for VirtqueueSession {
    type Setup = VirtqueueSetup;
    type Identity = SerialId;
    type Pending = PendingChain;
    type Base = RingBase;
    type Refusals = Refusals;

    /// The limit offered to the guest, plus header and status.
    const SEGMENTS: usize = crate::SEG_MAX as usize + 2;

    fn start(setup: VirtqueueSetup) -> Result<VirtqueueSession, String> {
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
        Ok(VirtqueueSession {
            name: setup.name,
            log: setup.log,
            // A small ring may still have chains up to the offered limit, in indirect tables.
            chain: Chain::new(setup.size.max(Self::SEGMENTS as u16)),
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
        })
    }

    fn begin<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) {
        self.disarm();
        if self.records.is_some() {
            // An earlier owner may have died between publishing a completion and calling the guest.
            self.call(signals);
        }
    }

    fn memory(&self) -> &Arc<RegionTable> {
        self.memory.table()
    }

    fn kick(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(|kick| kick.as_fd())
    }

    fn lose_kick(&mut self, error: &io::Error) {
        self.log.warn(format_args!("{}: its kick cannot be listened to, so its ring is polled: {error}", self.name));
        self.kick = None;
    }

    fn held(&self, silence_ns: u64) {
        let (name, held_s) = (&self.name, silence_ns as f64 / 1e9);
        self.log.info(format_args!(
            "{name}: its requests wait {held_s} s: until then the target may execute those of the process before this one"
        ));
    }

    fn call_again<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) {
        self.call(signals);
    }

    fn set_call<Cx: ?Sized + SignalEventfd>(&mut self, call: Option<Arc<EventFd>>, signals: &mut QueueSignals<'_, Cx>) {
        signals.forget_call();
        self.call = call;
        // The guest may have missed a call on the previous descriptor.
        self.call(signals);
    }

    #[inline(always)]
    fn is_broken(&self) -> bool {
        self.broken
    }

    /// Stops fetching from this ring.
    #[cold]
    fn stop(&mut self, why: &str) {
        if !self.broken {
            self.broken = true;
            self.alarm = true;
            self.log.warn(format_args!("{}: stopped: {why}", self.name));
        }
    }

    #[inline]
    fn is_lost(&self) -> bool {
        self.memory.is_faulted() || self.records.as_ref().is_some_and(|records| records.is_faulted())
    }

    #[inline]
    fn left(&self) -> usize {
        self.ring.left()
    }

    #[inline(always)]
    fn round_max(&self) -> usize {
        self.round_max
    }

    #[inline(always)]
    fn resume(&mut self) {
        self.pace.resume(|| self.ring.front());
    }

    /// While the device is idle, the pace bounds the number of chains.
    #[inline(always)]
    fn fetch<D>(&mut self, feed: &mut BioFeed<'_, D, Self>, mut most: usize, device_idle: bool) -> bool {
        self.ring.set_near(self.pace.takes_turns());
        // The chains visible now are the rest of those that the last round took half of.
        let rest = self.ring.in_sight();
        if device_idle && rest > 0 {
            most = most.min(rest);
        }
        let mut fetched = 0;
        while fetched < most {
            let Some(mut bio) = feed.take() else { break };
            let head = match self.ring.fetch(&self.memory, &mut self.chain) {
                Ok(Some(head)) => head,
                Ok(None) => {
                    feed.put_back(bio);
                    break;
                }
                Err(fault) => {
                    feed.put_back(bio);
                    // A ring in truncated memory reads as zeros that the guest has not written.
                    if !self.is_lost() {
                        feed.refusals.ring_fault(&fault);
                        self.stop(&fault.to_string());
                    }
                    break;
                }
            };
            fetched += 1;
            if fetched == 1 && rest == 0 && device_idle {
                most = most.min(self.pace.begin(1 + self.ring.in_sight(), || self.ring.front()));
            }
            // Read after the chain was found: chains published after a change of the mode use the new mode.
            let write_back = self.disk.write_back.load(Ordering::Acquire);
            let context = ParseContext { features: self.disk.features, write_back };
            match parse(&self.chain, &self.memory, &context, &mut bio) {
                Parsed::Io { status_at } => {
                    let room_bytes = self.chain.writable_bytes() - 1;
                    feed.submit(bio, PendingChain { head, status_at, room_bytes });
                    if room_bytes > NOTED_READ_MAX && self.notes.is_some() {
                        // All queues of the guest may have such reads: others on the lane get their turn.
                        feed.end_round();
                        break;
                    }
                }
                Parsed::GetId { status_at } => {
                    let id_bytes = feed.identity.write(&self.memory, self.chain.writable());
                    write_status(&self.memory, status_at, VirtioStatus::Ok);
                    if let Some(notes) = &self.notes {
                        notes.first_bytes(&self.memory, self.chain.writable(), id_bytes);
                        notes.segments(&self.memory, &[status_at]);
                    }
                    // A longer buffer has a gap between the first bytes and the status.
                    let whole = u64::from(id_bytes) + 1 == self.chain.writable_bytes();
                    self.ring.complete(head, id_bytes + u32::from(whole));
                    feed.put_back(bio);
                }
                Parsed::Reject { status, status_at, reason } => {
                    feed.refusals.request(&reason);
                    match status_at {
                        Some(at) => self.finish(head, at, status, self.chain.writable_bytes() - 1),
                        None => self.ring.complete(head, 0),
                    }
                    feed.put_back(bio);
                    if matches!(reason, Refusal::Chain(_)) {
                        // It may have had thousands of descriptors, as may those of the guest's other queues: others on
                        // the lane get their turn.
                        feed.end_round();
                        break;
                    }
                }
            }
        }
        fetched > 0
    }

    #[inline(always)]
    fn end(&mut self, bio: &Bio, pending: PendingChain) {
        if let Some(notes) = &self.notes {
            notes.ended(&self.memory, bio);
        }
        self.finish(pending.head, pending.status_at, status_of(bio.status), pending.room_bytes);
    }

    #[inline(always)]
    fn publish<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) {
        let wanted = self.ring.publish();
        self.note_ring();
        if wanted && let Some(call) = &self.call {
            self.pace.signal(|| self.ring.front(), || signals.call(call));
        }
        if let Some(eventfd) = self.notes.as_ref().and_then(Notes::untold) {
            signals.signal_once(eventfd);
        }
    }

    #[inline(always)]
    fn end_round<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) -> bool {
        self.pace.end(self.ring.in_sight() > 0, || self.ring.front());
        // Also checked in rounds without work, since polling reads the memory.
        if self.is_lost() {
            self.lose();
        }
        if std::mem::take(&mut self.alarm)
            && let Some(error) = &self.error
        {
            signals.signal_once(error);
            return true;
        }
        false
    }

    fn arm(&mut self) -> bool {
        let offered = self.ring.enable_notify();
        self.note_ring();
        offered
    }

    fn disarm(&mut self) {
        self.ring.disable_notify();
        self.note_ring();
    }

    fn rest<Cx: ?Sized + SignalEventfd>(mut self, signals: &mut QueueSignals<'_, Cx>) -> RingBase {
        // The next owner of the ring needs its kicks.
        self.arm();
        if let Some(eventfd) = self.notes.as_ref().and_then(Notes::untold) {
            signals.signal_once(eventfd);
        }
        self.ring.base()
    }

    fn view(&self) -> RingView {
        RingView {
            size: self.ring.size(),
            next: self.ring.base().next_avail(),
            in_flight: self.ring.in_flight(),
            is_recorded: self.records.is_some(),
            is_broken: self.broken,
        }
    }
}

impl VirtqueueSession {
    /// Writes a request's status and adds it to the used ring.
    #[inline(always)]
    fn finish(&mut self, head: ChainHead, status_at: Segment, status: VirtioStatus, room_bytes: u64) {
        write_status(&self.memory, status_at, status);
        if let Some(notes) = &self.notes {
            notes.segments(&self.memory, &[status_at]);
        }
        self.ring.complete(head, written(room_bytes, status));
    }

    #[inline]
    fn note_ring(&self) {
        if let Some(notes) = &self.notes {
            notes.ring();
        }
    }

    #[inline]
    fn call<Cx: ?Sized + SignalEventfd>(&self, signals: &mut QueueSignals<'_, Cx>) {
        if let Some(call) = &self.call {
            signals.call(call);
        }
    }

    /// Handles memory truncated under the ring: ends the control path's session, which suspends all queues and releases
    /// the memory.
    #[cold]
    fn lose(&mut self) {
        if !self.lost {
            self.lost = true;
            self.stop("the front-end truncated the memory of the queue");
            let _ = self.connection.shutdown(Shutdown::Both);
        }
    }
}
