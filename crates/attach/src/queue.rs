//! One queue of a remote disk as the driver of a hardware queue, for any protocol.
//!
//! ```text
//!            ring and memory known        the back-end is lost: a new ring comes, and
//!   waiting ──────────────────────▶ serving ────────────────┐  requests in flight are submitted again
//!      ▲  ◀──────────── other memory ─┘ ▲ └─────────────────┘
//!      └───────── a new ring ──────── failing ◀── no back-end for too long
//! ```
//!
//! Owned by its lane. It never waits: it sends requests to the control thread (`control.rs`), and accepts no I/O until
//! that has answered. Kicks go through the lane, since the owner of the other end might make us wait.
//!
//! While a lost back-end's requests in flight are recorded, the queue continues to fill its ring, for the next one.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mem::{BufferId, BufferMap, DmaDomain, DmaMapping, RegisteredBuffer};
use blkyard_mq::{
    Batch, Done, Driver, RegionTable, SIGNAL_AGAIN_NS, Shortage, SignalEventfd, SignalSlot, Status, TimedOut,
};
use blkyard_sys::EventFd;

use crate::mailbox::{ControlSender, DeviceCommand, Opened, QueueCommand, QueueMailbox, RingEnd};
use crate::protocol::RemoteRing;

/// One hardware queue of an attached disk.
// On separate cache lines, whatever is beside it.
#[repr(align(128))]
pub struct RemoteQueue<R: RemoteRing> {
    ring: Option<R>,
    kick: Option<Arc<EventFd>>,
    place: SignalSlot,
    /// Whether the slot's kick eventfd has been replaced.
    moved: bool,
    /// By region index: whether a back-end can reach it, if it has room for it.
    reach: Vec<bool>,
    /// Addresses of registered buffers that a back-end can reach, if it has room for all memory.
    buffers: BufferMap<u64>,
    /// Of those regions.
    mapping: DmaMapping,
    /// Whether the back-end was told of the memory.
    known: bool,
    /// Whether it had room for all of it.
    placed: bool,
    failing: bool,
    /// The back-end broke the ring, and the control thread knows.
    broken: bool,
    mailbox: Arc<QueueMailbox<R>>,
    number: u16,
    /// Of the ring, and of the memory.
    ring_number: u64,
    memory_number: u64,
    /// Any of the three below holds: completions are handled one by one.
    slow_path: bool,
    /// Back-ends have died with these requests in flight, and none has completed since.
    mourns: bool,
    /// Number of the rest that the control thread waits for.
    resting: Option<u64>,
    /// Places of requests that a silent back-end had, and since when they are done again, ns.
    lost: Vec<(usize, u64)>,
    /// How long such a request is done again before it fails, ns.
    gone_max_ns: u64,
    /// A back-end continues in the ring that has not been kicked yet.
    unheard: bool,
    /// When it is kicked again, which was impossible.
    kick_again_ns: Option<u64>,
    control: ControlSender<DeviceCommand<R>>,
}

/// Consecutive deaths over the same requests before a log line; the next after twice as many, and so on.
const DEATHS_TOLD: u64 = 4;

impl<R: RemoteRing> RemoteQueue<R> {
    pub(crate) fn new(
        opened: Opened<R>,
        domain: &Arc<DmaDomain>,
        control: ControlSender<DeviceCommand<R>>,
    ) -> RemoteQueue<R> {
        let mut queue = RemoteQueue {
            ring: None,
            kick: None,
            place: SignalSlot::default(),
            moved: false,
            reach: Vec::new(),
            buffers: BufferMap::default(),
            mapping: domain.map(Vec::new()),
            known: false,
            placed: false,
            failing: false,
            broken: false,
            mailbox: opened.mailbox,
            number: opened.number,
            ring_number: 0,
            memory_number: 0,
            slow_path: false,
            mourns: false,
            resting: None,
            lost: Vec::new(),
            gone_max_ns: opened.gone_max_ns,
            unheard: false,
            kick_again_ns: None,
            control,
        };
        if let Some(end) = opened.ring {
            queue.take_ring(end);
        }
        queue
    }

    /// `req.N` or `req_poll.N`.
    pub fn name(&self) -> &str {
        &self.mailbox.view.name
    }

    fn is_empty(&self) -> bool {
        self.ring.as_ref().is_none_or(|ring| ring.in_flight().next().is_none())
    }

    fn take_ring(&mut self, end: RingEnd<R>) {
        let RingEnd { mut ring, kick, number } = end;
        // A ring begins with calls wanted. We are awake; before a lane sleeps it asks for them.
        ring.disarm();
        // That of the lane, or of the thread that opens the queue for it.
        blkyard_mem::preferred_node().into_iter().for_each(|node| ring.prefer_node(node));
        (self.ring, self.kick, self.ring_number) = (Some(*ring), Some(kick), number);
        (self.moved, self.failing, self.broken) = (true, false, false);
    }

    /// Handles the control thread's commands. `done` takes requests in flight; without it, there are none.
    #[cold]
    fn read_mail(&mut self, mut done: Option<&mut Done<'_>>, now_ns: u64) {
        for command in self.mailbox.take() {
            match command {
                QueueCommand::Run(end) => {
                    self.leave_ring(done.as_deref_mut(), None, now_ns);
                    self.take_ring(end);
                }
                QueueCommand::Memory(number, reached) if number == self.memory_number => {
                    (self.known, self.placed, self.resting) = (true, reached, None);
                }
                QueueCommand::Memory(..) => {}
                QueueCommand::Rest(number) => (self.known, self.resting) = (false, Some(number)),
                QueueCommand::Died => self.note_death(done.as_deref()),
                QueueCommand::Silent => self.note_silence(now_ns),
                QueueCommand::GoesOn => self.unheard = true,
                QueueCommand::Fail => {
                    self.leave_ring(done.as_deref_mut(), Some(Status::Io), now_ns);
                    self.lost.clear();
                    self.failing = true;
                }
            }
        }
        self.answer_rest();
    }

    /// Has the back-end map this memory. Requests wait until it does.
    fn tell_memory(&mut self, memory: &RegionTable) {
        self.known = false;
        self.memory_number += 1;
        self.reach.clear();
        let mut regions = Vec::new();
        for (number, region) in memory.iter() {
            self.reach.resize(number as usize + 1, false);
            if region.file().is_some() {
                self.reach[number as usize] = true;
                regions.push(Arc::clone(region));
            }
        }
        self.mapping.replace(regions.clone());
        let is_quiesced = self.ring.as_ref().is_none_or(is_idle);
        self.control.send(DeviceCommand::Memory(self.number, self.memory_number, regions, is_quiesced));
    }

    /// Answers the control thread's request to drain, when no request is in flight.
    fn answer_rest(&mut self) {
        if let Some(number) = self.resting.take_if(|_| self.ring.as_ref().is_none_or(is_idle)) {
            self.control.send(DeviceCommand::Rested(self.number, number));
        }
        self.slow_path = self.mourns || self.resting.is_some() || !self.lost.is_empty();
    }

    /// A back-end has died. One that dies of a request gets it again after each restart, without end (ADR 24): that is
    /// at least logged.
    fn note_death(&mut self, done: Option<&Done<'_>>) {
        let deaths = &self.mailbox.view.deaths;
        let waiting = self.ring.as_ref().map_or(0, |ring| ring.in_flight().count());
        self.mourns = waiting > 0;
        let in_a_row = if self.mourns { deaths.load(Relaxed) + 1 } else { 0 };
        deaths.store(in_a_row, Relaxed);
        let (Some(ring), Some(done)) = (&self.ring, done) else { return };
        if in_a_row < DEATHS_TOLD || !in_a_row.is_power_of_two() {
            return;
        }
        let Some(oldest) =
            ring.in_flight().map(|place| done.request_at(place).0).min_by_key(|request| request.start_ns())
        else {
            return;
        };
        tracing::error!(
            "{}: {in_a_row} back-ends in a row died without completing a request: {waiting} requests are in flight, the oldest a \
             {:?} of {} sectors at sector {}; they are submitted again until they complete, see the back-end's log",
            self.name(),
            oldest.op(),
            oldest.sectors(),
            oldest.sector()
        );
    }

    /// The back-end is disconnected for its silence. Its requests in flight are submitted again, but not without end
    /// (ADR 13).
    fn note_silence(&mut self, now_ns: u64) {
        let Some(ring) = &self.ring else { return };
        for place in ring.in_flight() {
            if self.lost.iter().all(|(lost, _)| *lost != place) {
                self.lost.push((place, now_ns));
            }
        }
    }

    /// Takes completions, and handles events that depend on them: a reply, a drain, a repeated request.
    #[cold]
    fn poll_slow_path(&mut self, done: &mut Done<'_>) -> Result<(), R::Fault> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let before: Vec<_> = ring.in_flight().collect();
        let polled = ring.poll(done);
        let after: Vec<_> = ring.in_flight().collect();
        if self.mourns && after.len() != before.len() {
            // A request has completed: the cause of the deaths was another.
            self.mourns = false;
            self.mailbox.view.deaths.store(0, Relaxed);
        }
        self.lost.retain(|(place, _)| after.contains(place) || !before.contains(place));
        self.answer_rest();
        polled
    }

    /// Rings the back-end's eventfd, through the lane.
    #[inline]
    fn kick<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx, now_ns: u64) {
        self.unheard = false;
        if let Some(kick) = &self.kick {
            if std::mem::take(&mut self.moved) {
                cx.forget(&mut self.place);
            }
            cx.signal(&mut self.place, kick.as_fd());
            self.kick_again_ns = self.place.is_owed.then(|| now_ns + SIGNAL_AGAIN_NS);
        }
    }

    /// The back-end of the ring is lost: takes its remaining completions. Other requests end with this status, or are
    /// submitted again unless that has lasted too long.
    fn leave_ring(&mut self, done: Option<&mut Done<'_>>, status: Option<Status>, now_ns: u64) {
        if let Some(done) = done {
            // A broken ring has no more completions.
            let _ = self.poll_slow_path(done);
            let lost = &mut self.lost;
            for tag in self.ring.iter_mut().flat_map(R::take_in_flight) {
                let number = lost.iter().position(|(place, _)| *place == tag.index());
                let is_over = number.is_some_and(|number| now_ns.saturating_sub(lost[number].1) >= self.gone_max_ns);
                let status = status.or(is_over.then_some(Status::Timeout));
                if let Some(status) = status {
                    number.map(|number| lost.swap_remove(number));
                    done.complete(tag, status);
                } else {
                    done.requeue(tag);
                }
            }
        }
        self.ring = None;
    }
}

fn is_idle(ring: &impl RemoteRing) -> bool {
    ring.in_flight().next().is_none()
}

impl<Cx: ?Sized + SignalEventfd, R: RemoteRing> Driver<Cx> for RemoteQueue<R> {
    #[inline]
    fn queue_rqs(&mut self, cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        if self.mailbox.has_mail() && self.is_empty() {
            self.read_mail(None, batch.now_ns());
        }
        let (Some(ring), true, false) = (&mut self.ring, self.known, self.failing) else {
            if self.failing {
                while let Some((tag, _, _)) = batch.take() {
                    batch.complete(tag, Status::Io);
                }
            }
            return batch.short_of(Shortage::Device);
        };
        let reach: &[bool] = if self.placed { &self.reach } else { &[] };
        let buffers = Some(&self.buffers).filter(|_| self.placed);
        let kick_wanted = ring.queue(batch, |segment| {
            if segment.is_registered() {
                return buffers?.get(segment).map(|(address, into)| address + into);
            }
            let reached = reach.get(segment.region as usize).is_some_and(|reached| *reached);
            memory.resolve_region(segment).filter(|_| reached).map(|span| span.as_ptr() as u64)
        });
        if kick_wanted || self.unheard {
            self.kick(cx, batch.now_ns());
        }
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        if let Some(ring) = &mut self.ring {
            let polled = if self.slow_path { self.poll_slow_path(done) } else { ring.poll(done) };
            if let Err(fault) = polled
                && !std::mem::replace(&mut self.broken, true)
            {
                self.control.send(DeviceCommand::Fault(self.number, self.ring_number, fault.to_string()));
            }
        }
        if self.mailbox.has_mail() {
            self.read_mail(Some(done), now_ns);
        }
        if self.unheard || self.kick_again_ns.is_some_and(|again_ns| now_ns >= again_ns) {
            self.kick(cx, now_ns);
        }
    }

    #[inline]
    fn wants_poll(&self) -> bool {
        self.mailbox.has_mail() || self.kick_again_ns.is_some()
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.kick_again_ns
    }

    /// A request at a back-end stays there until its session ends. The session is given up now.
    fn timed_out(&mut self, _: &mut Cx, _: &RegionTable, place: usize, done: &mut Done<'_>, _: u64) -> TimedOut {
        let request = done.request_at(place).0;
        let what = format!("a {:?} of {} sectors at sector {}", request.op(), request.sectors(), request.sector());
        self.control.send(DeviceCommand::Late(self.number, self.ring_number, what));
        TimedOut::MoreTime
    }

    fn set_memory(&mut self, cx: &mut Cx, memory: &RegionTable) {
        self.buffers.clear();
        if memory.iter().next().is_none() {
            // The next call may come from another lane.
            cx.forget(&mut self.place);
        }
        self.tell_memory(memory);
    }

    /// The control thread has the queue drained before the back-end maps other memory.
    fn change_memory(&mut self, _: &mut Cx, memory: &RegionTable) {
        self.tell_memory(memory);
    }

    fn add_buffer(&mut self, _: &mut Cx, _: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        let first = buffer.region().span(buffer.offset(), 1).filter(|_| buffer.region().file().is_some());
        if let Some(first) = first {
            self.buffers.insert(buffer, first.as_ptr() as u64);
        }
    }

    fn remove_buffer(&mut self, _: &mut Cx, buffer: BufferId) {
        self.buffers.remove(buffer);
    }

    fn arm(&mut self) -> bool {
        if self.mailbox.polled {
            return false;
        }
        let finished = !self.broken && self.ring.as_mut().is_some_and(R::arm);
        if !self.mailbox.has_mail() {
            return finished;
        }
        // With no request in flight the queue would not be polled. Waiting requests may continue after the read.
        if self.is_empty() {
            self.read_mail(None, 0);
        }
        true
    }

    fn disarm(&mut self) {
        if !self.broken
            && let Some(ring) = &mut self.ring
        {
            ring.disarm();
        }
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        (!self.mailbox.polled).then(|| self.mailbox.eventfd.as_fd())
    }
}

impl<R: RemoteRing> Drop for RemoteQueue<R> {
    fn drop(&mut self) {
        let end = self.ring.take().zip(self.kick.take()).and_then(|(ring, kick)| {
            if is_idle(&ring) {
                return Some(RingEnd { ring: Box::new(ring), kick, number: self.ring_number });
            }
            // The back-end may still read it, and the memory it names.
            tracing::warn!(
                "{}: closed with requests in flight: their data may or may not have reached the disk",
                self.name()
            );
            std::mem::forget(ring);
            None
        });
        self.control.send(DeviceCommand::Close(self.number, end.filter(|_| !self.broken)));
    }
}

impl<R: RemoteRing> std::fmt::Debug for RemoteQueue<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteQueue")
            .field("name", &self.name())
            .field("known", &self.known)
            .field("failing", &self.failing)
            .finish_non_exhaustive()
    }
}
