//! One virtqueue as the driver of a hardware queue.
//!
//! ```text
//!            ring and memory known        the back-end is lost: a new ring comes, and
//!   waiting ──────────────────────▶ serving ────────────────┐  what was in flight is done again
//!      ▲  ◀──────────── other memory ─┘ ▲ └─────────────────┘
//!      └───────── a new ring ──────── failing ◀── nobody serves it for too long
//! ```
//!
//! Owned by its lane. It never waits: what it wants of the back-end it asks of the control thread (`control.rs`), and
//! takes no request until that has said so. Kicks go through the lane, since whoever holds the other end might make us
//! wait.
//!
//! While a back-end is gone that kept account of what was in flight, the queue goes on filling its ring, for the next
//! one.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mq::{Batch, Chime, ChimePlace, Done, Driver, RegionTable, Shortage, Status, TimedOut};
use blkyard_virtio::driver::BlkRing;

use crate::door::{Door, Letter, Line, Opened, Order};
use crate::event::Event;

/// One hardware queue of an attached disk.
// On lines of its own, whatever is beside it.
#[repr(align(128))]
pub struct AttachedQueue {
    ring: Option<BlkRing>,
    kick: Option<Arc<Event>>,
    place: ChimePlace,
    /// The kick under the place is another by now.
    moved: bool,
    /// By number of a region: whether a back-end can reach it, if it has a place for it.
    reach: Vec<bool>,
    /// The back-end was told of the memory.
    known: bool,
    /// And had a place for all of it.
    placed: bool,
    failing: bool,
    /// The back-end broke the ring, and the control thread knows.
    broken: bool,
    door: Arc<Door>,
    number: u16,
    /// Of the ring, and of the memory.
    ring_number: u64,
    memory_number: u64,
    /// Back-ends have died over what is in flight, and nothing was answered since.
    mourns: bool,
    /// A back-end goes on in the ring that has not been kicked yet.
    unheard: bool,
    line: Line,
}

/// So many back-ends that die one after the other over the same requests are told of; and then twice as many, and so
/// on.
const DEATHS_TOLD: u64 = 4;

impl AttachedQueue {
    pub(crate) fn new(opened: Opened, line: Line) -> AttachedQueue {
        AttachedQueue {
            ring: None,
            kick: None,
            place: ChimePlace::default(),
            moved: false,
            reach: Vec::new(),
            known: false,
            placed: false,
            failing: false,
            broken: false,
            door: opened.door,
            number: opened.number,
            ring_number: 0,
            memory_number: 0,
            mourns: false,
            unheard: false,
            line,
        }
    }

    /// `req.N` or `req_poll.N`.
    pub fn name(&self) -> &str {
        &self.door.view.name
    }

    fn is_empty(&self) -> bool {
        self.ring.as_ref().is_none_or(|ring| ring.in_flight().next().is_none())
    }

    /// Reads what the control thread has to say. `done` takes what was in flight; without it, nothing is.
    #[cold]
    fn read_mail(&mut self, mut done: Option<&mut Done<'_>>) {
        for letter in self.door.take() {
            match letter {
                Letter::Run(mut ring, kick, number) => {
                    self.leave_ring(done.as_deref_mut(), None);
                    // A ring begins with calls wanted. We are awake; before a lane sleeps it asks for them.
                    ring.disarm();
                    (self.ring, self.kick, self.ring_number) = (Some(*ring), Some(kick), number);
                    (self.moved, self.failing, self.broken) = (true, false, false);
                }
                Letter::Memory(number, reached) if number == self.memory_number => {
                    (self.known, self.placed) = (true, reached);
                }
                Letter::Memory(..) => {}
                Letter::Died => self.note_death(done.as_deref()),
                Letter::GoesOn => self.unheard = true,
                Letter::Fail => {
                    self.leave_ring(done.as_deref_mut(), Some(Status::Io));
                    self.failing = true;
                }
            }
        }
    }

    /// A back-end has died. One that dies of a request is given it again by whoever starts the next, without end (ADR
    /// 24): that is at least told.
    fn note_death(&mut self, done: Option<&Done<'_>>) {
        let deaths = &self.door.view.deaths;
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
            "{}: {in_a_row} back-ends died one after the other and answered nothing; {waiting} requests are in flight, the oldest a \
             {:?} of {} sectors at sector {}. They are done again until they are answered; see what the back-end says of them",
            self.name(),
            oldest.op(),
            oldest.sectors(),
            oldest.sector()
        );
    }

    /// Something was answered: what back-ends died of was something else.
    #[cold]
    fn forget_deaths(&mut self) {
        self.mourns = false;
        self.door.view.deaths.store(0, Relaxed);
    }

    /// Rings the back-end's bell, through the lane.
    #[inline]
    fn kick<Cx: ?Sized + Chime>(&mut self, cx: &mut Cx) {
        self.unheard = false;
        if let Some(kick) = &self.kick {
            if std::mem::take(&mut self.moved) {
                cx.forget(&mut self.place);
            }
            cx.chime(&mut self.place, kick.as_fd());
        }
    }

    /// The back-end of the ring is gone: takes what it has still finished. The rest ends with this status, or is to be
    /// done again.
    fn leave_ring(&mut self, done: Option<&mut Done<'_>>, status: Option<Status>) {
        let Some(mut ring) = self.ring.take() else { return };
        let Some(done) = done else { return };
        // A broken ring has nothing more to say.
        let _ = ring.poll(done);
        for tag in ring.take_in_flight() {
            match status {
                Some(status) => done.complete(tag, status),
                None => done.requeue(tag),
            }
        }
    }
}

impl<Cx: ?Sized + Chime> Driver<Cx> for AttachedQueue {
    #[inline]
    fn queue_rqs(&mut self, cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        if self.door.has_mail() && self.is_empty() {
            self.read_mail(None);
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
        let kick_wanted = ring.queue(batch, |segment| {
            let reached = reach.get(segment.region as usize).is_some_and(|reached| *reached);
            memory.resolve(segment).filter(|_| reached).map(|span| span.as_ptr() as u64)
        });
        if kick_wanted || self.unheard {
            self.kick(cx);
        }
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, _memory: &RegionTable, done: &mut Done<'_>, _now_ns: u64) {
        if let Some(ring) = &mut self.ring {
            let before = ring.ring().in_flight();
            let polled = ring.poll(done);
            let is_answered = ring.ring().in_flight() != before;
            if let Err(fault) = polled
                && !std::mem::replace(&mut self.broken, true)
            {
                self.line.send(Order::Fault(self.number, self.ring_number, fault.to_string()));
            }
            if self.mourns && is_answered {
                self.forget_deaths();
            }
        }
        if self.door.has_mail() {
            self.read_mail(Some(done));
        }
        if self.unheard {
            self.kick(cx);
        }
    }

    /// A request in the hands of a back-end stays there. But the back-end may hang, and is asked whether it does.
    fn timed_out(&mut self, _: &mut Cx, _: &RegionTable, _: usize, _: &mut Done<'_>, _: u64) -> TimedOut {
        self.line.send(Order::Late(self.number));
        TimedOut::MoreTime
    }

    fn set_memory(&mut self, cx: &mut Cx, memory: &RegionTable) {
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
        if memory.iter().next().is_none() {
            // The next call may come from another lane.
            cx.forget(&mut self.place);
        }
        self.line.send(Order::Memory(self.number, self.memory_number, regions));
    }

    fn arm(&mut self) -> bool {
        if self.door.polled {
            return false;
        }
        let finished = !self.broken && self.ring.as_mut().is_some_and(BlkRing::arm);
        if !self.door.has_mail() {
            return finished;
        }
        // Without anything in flight nobody would poll. What waits may go on with what is read.
        if self.is_empty() {
            self.read_mail(None);
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

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        (!self.door.polled).then(|| self.door.bell.as_fd())
    }
}

impl Drop for AttachedQueue {
    fn drop(&mut self) {
        self.line.send(Order::Close(self.number));
    }
}

impl std::fmt::Debug for AttachedQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AttachedQueue")
            .field("name", &self.name())
            .field("known", &self.known)
            .field("failing", &self.failing)
            .finish_non_exhaustive()
    }
}
