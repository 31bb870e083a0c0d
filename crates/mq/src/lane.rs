//! The lane: the queues of one thread, and when it may sleep.
//!
//! A lane runs each of its active pollers in turn. A poller is a queue with its feeder, such as a virtqueue and its
//! hardware queue, or a job of load. After work a lane keeps turning for as long as that has paid recently. Then it
//! arms every active poller, so that its eventfd is signalled on work, looks once more, and sleeps. Threads, eventfds
//! and sleeping are provided by the lane's runner.
//!
//! A poller that stays idle while others are active is parked: it is armed by itself, the lane's runner listens to its
//! eventfds, and it costs nothing in turns or sleeps until an eventfd is signalled or the lane's waker is called. So
//! the cost of a turn depends on the active pollers only, however many a lane has. A parked poller with a deadline,
//! such as a queue without a kick, has a single round whenever its deadline is due.
//!
//! Pollers come and go while the others work. One that is to leave is drained first: it fetches nothing more and
//! completes its requests. Then it is detached, and may be admitted to another lane.
//!
//! ```text
//!            ask_to_leave              drained
//!   living ───────────────▶ draining ────────────▶ detached
//!   │ ▲ ▲  ◀───────────────────┘ ask_to_stay            │
//!   │ │ └───────────────────────────────────────────────┘ admit, here or on another lane
//!   ▼ │ unpark
//!   parked
//! ```

mod parking;

use std::collections::BinaryHeap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError};

use blkyard_mem::sync::Mutex;

use crate::idle::{CpuUse, IdlePolicy, Lookout};
use crate::stats::TurnStats;
use parking::{DueRound, park_ns};

/// Wakes a sleeping thread. May be called from any thread, and while none sleeps.
pub trait Wake: Send + Sync {
    /// Makes the next sleep, or the one going on, end at once.
    fn wake(&self);
}

/// The waker of a poller's current lane, for threads that do not know the lane.
///
/// A thread that sends to a poller wakes it afterwards; a poller that enters a lane registers that lane's waker before
/// it reads its messages. So either the new lane is woken, or the poller finds the message: the lock orders the two.
/// Before the first lane no thread is woken.
#[derive(Default)]
pub struct LaneWaker(Mutex<Option<Arc<dyn Wake>>>);

impl LaneWaker {
    /// Sets the poller's lane; the poller reads its messages after this.
    pub fn register(&self, waker: &Arc<dyn Wake>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(waker));
    }
}

impl Wake for LaneWaker {
    fn wake(&self) {
        if let Some(waker) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            waker.wake();
        }
    }
}

/// Eventfds of other processes, for the pollers of a lane: signals them, and stops polling them. The other end may have
/// arranged that a plain write would block; these calls never block.
pub trait SignalEventfd {
    /// Signals an eventfd. A slot belongs to the caller, is numbered at its first use, and signals the eventfd that it
    /// was first used with until it is forgotten. It may be impossible for the moment: see [`SignalSlot::is_owed`].
    fn signal(&mut self, place: &mut SignalSlot, eventfd: BorrowedFd<'_>);

    /// The eventfd of this slot is about to be another. What is owed stays so.
    fn forget(&mut self, place: &mut SignalSlot);

    /// Stops polling an eventfd of a poller, which another lane will read from now on: a lane that reads an eventfd
    /// resets it. By default none is polled.
    fn ignore(&mut self, _eventfd: BorrowedFd<'_>) {}
}

/// Identifies an eventfd that a poller signals.
#[derive(Debug, Default)]
pub struct SignalSlot {
    /// Given by the lane.
    pub number: Option<u32>,
    /// Whether the last signal was not sent, for lack of descriptors. Its caller signals again within
    /// [`SIGNAL_AGAIN_NS`]: the next cause for a signal may be long in coming, as while the other end waits for this
    /// one.
    pub is_owed: bool,
}

/// Pause before a signal that was not sent is tried again, ns.
pub const SIGNAL_AGAIN_NS: u64 = 100_000_000;

/// Signals nothing: for lanes in models.
impl SignalEventfd for () {
    fn signal(&mut self, _place: &mut SignalSlot, _eventfd: BorrowedFd<'_>) {}
    fn forget(&mut self, _place: &mut SignalSlot) {}
}

/// Result of one round of a poller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PollerState {
    /// No work and no request in flight.
    Idle,
    /// A request is in flight, or due later; the device will signal.
    Waiting,
    /// Something moved.
    Busy,
}

/// A hardware queue and its feeder. `Cx` is the state that the pollers of a lane share.
pub trait Poller<Cx: ?Sized> {
    /// It lives on a lane from now on, which `waker` wakes. Called before the first run there.
    fn enter(&mut self, _cx: &mut Cx, _waker: &Arc<dyn Wake>) {}

    /// Asks it to leave: from now on it fetches nothing and completes its requests. Called after every turn until it is
    /// true; then no request is in flight, `cx` holds nothing of it, and it may enter another lane. By default a poller
    /// never leaves.
    fn leave(&mut self, _cx: &mut Cx) -> bool {
        false
    }

    /// It need not leave after all.
    fn stay(&mut self) {}

    /// Limits the bytes that it copies in one round, plus the rest of a request: the others of the lane wait meanwhile.
    /// Ignored by a poller whose device works by itself.
    fn set_turn_bytes(&mut self, _bytes: u64) {}

    /// One round: completes, fetches, dispatches.
    fn run_once(&mut self, cx: &mut Cx, now_ns: u64) -> PollerState;

    /// Asks both sides of the queue, guest and device, to signal from now on. True if something came in before they
    /// were asked: then do not sleep. It may have been taken in, so a round follows before the next call.
    fn arm(&mut self) -> bool;

    /// They need not signal any more.
    fn disarm(&mut self);

    /// Current event descriptor that is signalled when there is something to fetch, if any. Before it is replaced the
    /// poller has it [ignored](SignalEventfd::ignore).
    fn eventfd(&self) -> Option<BorrowedFd<'_>>;

    /// The event descriptor that the device signals when it has completed something, if it does. As for
    /// [`Poller::eventfd`].
    fn device_eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// When to be run next although no eventfd may be signalled.
    fn deadline_ns(&self) -> Option<u64> {
        None
    }

    /// I/Os served so far, wrapping, by which the lane sees whether a longer look pays. By default none, and none does.
    fn served(&self) -> u64 {
        0
    }

    /// Called at most every second or so: for scans for slow requests.
    fn tick(&mut self, _now_ns: u64) {}

    /// Whether no work will ever come again.
    fn is_over(&self) -> bool;
}

/// The lane's next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// Another turn, at once.
    Turn,
    /// Sleep until an eventfd, a completion, or this time.
    Sleep(Option<u64>),
    /// All pollers have ended, or there are none.
    End,
}

/// Bytes that the active pollers of a lane copy together in one turn, unless there are very many: half a millisecond
/// of memory that no cache holds.
const TURN_BYTES: u64 = 4 << 20;
/// Bytes that one of them copies in a turn at most: a whole queue of 128 requests of 4 KiB, so that only long requests
/// are ever put off.
pub(crate) const POLLER_BYTES_MAX: u64 = 512 << 10;
/// Lower bound of a poller's bytes: many times the cost of a turn.
const POLLER_BYTES_MIN: u64 = 128 << 10;

/// How often pollers are ticked.
const TICK_NS: u64 = 1_000_000_000;

/// A poller, by its name from the lanes' runner.
#[derive(Debug)]
struct Resident<S> {
    name: u32,
    poller: S,
    leaving: bool,
    parked: bool,
    /// Time of its next round while it is parked, ns; unset without a deadline.
    due_ns: Option<u64>,
    /// Time of its last work, ns; when it was admitted or unparked, if that is later.
    busy_ns: u64,
    /// It had work since [`Lane::take_worked`] was called last.
    worked: bool,
    /// What [`Poller::served`] was when it was read last.
    served: u64,
}

/// Number of a poller on its lane, from 0, unchanged while it lives there. Free numbers are given again.
pub type Slot = usize;

/// The pollers of one thread.
#[derive(Debug)]
pub struct Lane<S> {
    slots: Vec<Option<Resident<S>>>,
    /// Pollers that every turn runs, in the order they became active.
    active: Vec<Slot>,
    /// Parked since [`Lane::next_parked`] was last asked.
    newly_parked: Vec<Slot>,
    /// Number of parked pollers.
    parked: usize,
    /// Rounds of parked pollers by time. Those of pollers that were unparked meanwhile are ignored.
    due: BinaryHeap<DueRound>,
    /// How many were asked to leave.
    leaving: usize,
    /// Bytes that an active poller may copy in a turn, as last set.
    turn_bytes: u64,
    lookout: Lookout,
    /// Tells the CPU time of the lane's thread.
    cpu_use: fn() -> CpuUse,
    /// I/Os served by the pollers while they were active, wrapping.
    served: u64,
    /// Idle time after which a poller is parked, ns.
    park_ns: u64,
    last_tick_ns: u64,
    /// Time of the last turn, ns.
    now_ns: u64,
    armed: bool,
    turns: Arc<TurnStats>,
    /// When the turn before began, if something moved in it.
    worked_ns: Option<u64>,
}

impl<S> Lane<S> {
    /// A lane without pollers yet. `cpu_use` is that of the calling thread; asked at most every 2 ms, and only where
    /// there is work.
    pub fn new(policy: IdlePolicy, cpu_use: fn() -> CpuUse) -> Lane<S> {
        Lane {
            slots: Vec::new(),
            active: Vec::new(),
            newly_parked: Vec::new(),
            parked: 0,
            due: BinaryHeap::new(),
            leaving: 0,
            turn_bytes: POLLER_BYTES_MAX,
            lookout: Lookout::new(policy),
            cpu_use,
            served: 0,
            park_ns: park_ns(policy),
            last_tick_ns: 0,
            now_ns: 0,
            armed: false,
            turns: Arc::default(),
            worked_ns: None,
        }
    }

    /// How long its turns take, readable by anyone.
    pub fn turns(&self) -> &Arc<TurnStats> {
        &self.turns
    }

    /// From now on it turns without work for as long as this says.
    pub fn set_policy(&mut self, policy: IdlePolicy) {
        self.lookout.set_policy(policy);
        self.park_ns = park_ns(policy);
    }

    /// All pollers, parked ones too.
    pub fn pollers(&self) -> impl Iterator<Item = &S> {
        self.slots.iter().flatten().map(|resident| &resident.poller)
    }

    /// A poller by its slot, and whether it had work since the last call.
    ///
    /// # Panics
    /// If the slot is empty.
    pub fn take_worked(&mut self, slot: Slot) -> (&S, bool) {
        let resident = resident_mut(&mut self.slots, slot);
        (&resident.poller, std::mem::take(&mut resident.worked))
    }

    /// A poller lives here from now on, under a name that no other one here has.
    pub fn admit<Cx: ?Sized>(&mut self, cx: &mut Cx, waker: &Arc<dyn Wake>, name: u32, mut poller: S)
    where
        S: Poller<Cx>,
    {
        poller.enter(cx, waker);
        let served = poller.served();
        let new = Resident {
            name,
            poller,
            leaving: false,
            parked: false,
            due_ns: None,
            busy_ns: self.now_ns,
            worked: false,
            served,
        };
        let slot = if let Some(free) = self.slots.iter().position(Option::is_none) {
            self.slots[free] = Some(new);
            free
        } else {
            self.slots.push(Some(new));
            self.slots.len() - 1
        };
        self.active.push(slot);
        // Room for all from the start: parking allocates nothing.
        self.active.reserve(self.slots.len() - self.active.len());
        self.newly_parked.reserve(self.slots.len() - self.newly_parked.len());
        self.reserve_due();
        self.share_turn::<Cx>(Some(slot));
    }

    /// Divides the bytes of a turn among the active pollers. The one that `came` is always told, the others only after
    /// a change.
    fn share_turn<Cx: ?Sized>(&mut self, came: Option<Slot>)
    where
        S: Poller<Cx>,
    {
        let each = TURN_BYTES / self.active.len().max(1) as u64;
        let each = each.clamp(POLLER_BYTES_MIN, POLLER_BYTES_MAX);
        let changed = std::mem::replace(&mut self.turn_bytes, each) != each;
        let told = if changed { self.active.as_slice() } else { came.as_slice() };
        told.iter().for_each(|&slot| resident_mut(&mut self.slots, slot).poller.set_turn_bytes(each));
    }

    fn slot_of(&self, name: u32) -> Option<Slot> {
        self.slots.iter().position(|resident| resident.as_ref().is_some_and(|resident| resident.name == name))
    }

    /// Asks a poller to drain; [`Lane::part`] returns it then. False if there is none of this name.
    pub fn ask_to_leave<Cx: ?Sized>(&mut self, name: u32) -> bool
    where
        S: Poller<Cx>,
    {
        let Some(slot) = self.slot_of(name) else { return false };
        self.unpark(slot);
        let resident = resident_mut(&mut self.slots, slot);
        self.leaving += usize::from(!resident.leaving);
        resident.leaving = true;
        true
    }

    /// Lets a poller stay that was asked to leave and has not parted.
    pub fn ask_to_stay<Cx: ?Sized>(&mut self, name: u32)
    where
        S: Poller<Cx>,
    {
        let Some(slot) = self.slot_of(name) else { return };
        let resident = resident_mut(&mut self.slots, slot);
        if std::mem::take(&mut resident.leaving) {
            resident.poller.stay();
            self.leaving -= 1;
        }
    }

    /// The next drained poller of those asked to leave, with its slot and name. Called after every turn.
    #[inline]
    pub fn part<Cx: ?Sized>(&mut self, cx: &mut Cx) -> Option<(Slot, u32, S)>
    where
        S: Poller<Cx>,
    {
        if self.leaving == 0 { None } else { self.part_slow(cx) }
    }

    #[cold]
    fn part_slow<Cx: ?Sized>(&mut self, cx: &mut Cx) -> Option<(Slot, u32, S)>
    where
        S: Poller<Cx>,
    {
        let index = self.active.iter().position(|&slot| {
            let resident = resident_mut(&mut self.slots, slot);
            resident.leaving && resident.poller.leave(cx)
        })?;
        let slot = self.active.remove(index);
        let Some(Resident { name, mut poller, .. }) = self.slots[slot].take() else { unreachable!("it is active") };
        self.leaving -= 1;
        if self.armed {
            // Our next turn would have; it is not among ours any more.
            poller.disarm();
        }
        self.share_turn::<Cx>(None);
        Some((slot, name, poller))
    }

    /// Tells the lookout what the active pollers have served, and at what cost. Parked ones are left out: a lane may
    /// have thousands, and they serve next to nothing.
    #[cold]
    fn read_lookout<Cx: ?Sized>(&mut self, now_ns: u64)
    where
        S: Poller<Cx>,
    {
        for &slot in &self.active {
            let resident = resident_mut(&mut self.slots, slot);
            let served = resident.poller.served();
            self.served = self.served.wrapping_add(served.wrapping_sub(resident.served));
            resident.served = served;
        }
        self.lookout.read(now_ns, self.served, self.cpu_use);
    }

    /// Runs every active poller once, parks those that have been idle, and returns whether to continue or sleep. Before
    /// a sleep every poller is armed; the next turn disarms the active ones.
    pub fn turn<Cx: ?Sized>(&mut self, cx: &mut Cx, now_ns: u64) -> Idle
    where
        S: Poller<Cx>,
    {
        if let Some(began_ns) = self.worked_ns.take() {
            self.turns.record(now_ns.saturating_sub(began_ns));
        }
        self.now_ns = now_ns;
        if self.lookout.wants_reading(now_ns) {
            self.read_lookout::<Cx>(now_ns);
        }
        if std::mem::take(&mut self.armed) {
            self.active.iter().for_each(|&slot| resident_mut(&mut self.slots, slot).poller.disarm());
        }
        let mut busiest = self.run_due(cx);
        let mut long_idle = false;
        for &slot in &self.active {
            let resident = resident_mut(&mut self.slots, slot);
            let state = resident.poller.run_once(cx, now_ns);
            if state == PollerState::Idle {
                long_idle |= now_ns.saturating_sub(resident.busy_ns) > self.park_ns;
            } else {
                resident.busy_ns = now_ns;
                resident.worked |= state == PollerState::Busy;
            }
            busiest = busiest.max(state);
        }
        let finds_work = long_idle && self.active.len() > 1 && self.park::<Cx>();
        if now_ns.saturating_sub(self.last_tick_ns) >= TICK_NS {
            self.last_tick_ns = now_ns;
            self.slots.iter_mut().flatten().for_each(|resident| resident.poller.tick(now_ns));
        }
        if busiest == PollerState::Busy {
            self.lookout.worked(now_ns);
            // The next turn follows at once.
            self.worked_ns = Some(now_ns);
            return Idle::Turn;
        }
        let is_over = |&slot: &Slot| resident(&self.slots, slot).poller.is_over();
        if self.active.iter().all(is_over) && self.pollers().all(S::is_over) {
            return Idle::End;
        }
        if self.lookout.goes_on(now_ns) || finds_work {
            return Idle::Turn;
        }
        self.armed = true;
        // Every poller is armed, even after one had work: the next turn disarms all of them.
        let arm = |work, &slot| resident_mut(&mut self.slots, slot).poller.arm() | work;
        if self.active.iter().fold(false, arm) {
            return Idle::Turn;
        }
        let due_ns = self.next_due_ns();
        if due_ns.is_some_and(|due_ns| due_ns <= now_ns) {
            return Idle::Turn;
        }
        let deadline_ns = |&slot: &Slot| resident(&self.slots, slot).poller.deadline_ns();
        let deadline = self.active.iter().filter_map(deadline_ns).chain(due_ns).min();
        // With requests in flight the tick must come, since it detects slow I/O.
        let tick = (busiest == PollerState::Waiting).then_some(self.last_tick_ns + TICK_NS);
        Idle::Sleep([deadline, tick].into_iter().flatten().min())
    }
}

#[inline]
fn resident<S>(slots: &[Option<Resident<S>>], slot: Slot) -> &Resident<S> {
    let Some(resident) = &slots[slot] else { unreachable!("a slot in use has its poller") };
    resident
}

#[inline]
fn resident_mut<S>(slots: &mut [Option<Resident<S>>], slot: Slot) -> &mut Resident<S> {
    let Some(resident) = &mut slots[slot] else { unreachable!("a slot in use has its poller") };
    resident
}

#[cfg(test)]
mod tests;
