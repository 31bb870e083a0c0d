//! The lane: the queues of one thread, and when it may sleep.
//!
//! A lane runs each of its active pollers in turn. A poller is a queue with its feeder, such as a virtqueue and its
//! hardware queue, or a job of load. After work a lane keeps turning for as long as that has paid recently. Then it
//! arms every active poller, so that its eventfd is signalled on work, looks once more, and sleeps. Threads, eventfds
//! and sleeping are provided by the lane's runner.
//!
//! A poller that stays idle while others are active is parked: it is armed by itself, the lane's runner listens to its
//! eventfds, and it costs nothing in turns or sleeps until an eventfd is signalled or the lane's waker is called. So
//! the cost of a turn depends on the active pollers only, however many a lane has.
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

use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError};

use blkyard_mem::sync::Mutex;

use crate::idle::{IdlePolicy, Lookout};
use crate::stats::TurnStats;
use parking::park_ns;

/// Wakes whoever sleeps at the other end. May be called from any thread, and when nobody sleeps.
pub trait Wake: Send + Sync {
    /// Makes the next sleep, or the one going on, end at once.
    fn wake(&self);
}

/// The waker of the lane that a poller lives on, for those who do not know which one that is.
///
/// Whoever sends something to a poller wakes it afterwards; a poller that enters a lane registers that lane's waker
/// before it looks at what was sent. So either the new lane is woken, or the poller finds what was sent by itself: the
/// lock says which of the two came first. Until there is a lane nobody is woken.
#[derive(Default)]
pub struct LaneWaker(Mutex<Option<Arc<dyn Wake>>>);

impl LaneWaker {
    /// The poller lives on another lane from now on, and looks at what was sent to it after this.
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

/// What the pollers of a lane do with eventfds of other processes: signal them, and listen to them no more. Whoever
/// holds the other end may have arranged that a plain write would block; here nothing blocks.
pub trait SignalEventfd {
    /// Signals an eventfd. If an earlier signal of the same slot is not known to be done, the eventfd is signalled once
    /// more when it is. A slot is the caller's own, and given a number when it is first used.
    fn signal(&mut self, place: &mut SignalSlot, eventfd: BorrowedFd<'_>);

    /// The eventfd of this slot is about to be another: a signal that is not done is cancelled.
    fn forget(&mut self, place: &mut SignalSlot);

    /// Listens no more to an eventfd of one of the pollers: from here on it is another lane's to read. A lane that read
    /// it would reset it. By default there is none to listen to.
    fn ignore(&mut self, _eventfd: BorrowedFd<'_>) {}
}

/// Names a poller's signal that is not known to be done.
#[derive(Debug, Default)]
pub struct SignalSlot(pub Option<u32>);

/// Signals nothing: for lanes that are models.
impl SignalEventfd for () {
    fn signal(&mut self, _place: &mut SignalSlot, _eventfd: BorrowedFd<'_>) {}
    fn forget(&mut self, _place: &mut SignalSlot) {}
}

/// What one round of a poller came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PollerState {
    /// Nothing is wanted and nothing is in flight.
    Idle,
    /// Something is in flight, or due later; the device will tell.
    Waiting,
    /// Something moved.
    Busy,
}

/// A hardware queue and what feeds it. `Cx` is what the pollers of a lane share.
pub trait Poller<Cx: ?Sized> {
    /// It lives on a lane from now on, which `waker` wakes. Called before the first run there.
    fn enter(&mut self, _cx: &mut Cx, _waker: &Arc<dyn Wake>) {}

    /// It is to leave: from now on it takes nothing more and finishes what it took. Asked after every turn until it is
    /// true; then nothing is in flight, nothing of it is left with `cx`, and it may enter another lane. By default a
    /// poller stays for good.
    fn leave(&mut self, _cx: &mut Cx) -> bool {
        false
    }

    /// It need not leave after all.
    fn stay(&mut self) {}

    /// From now on it copies so many bytes in one round, and the rest of a request: the others of the lane wait
    /// meanwhile. Nothing to do for a poller whose device works by itself.
    fn set_turn_bytes(&mut self, _bytes: u64) {}

    /// One round: gives back what is over, takes what is wanted, passes it on.
    fn run_once(&mut self, cx: &mut Cx, now_ns: u64) -> PollerState;

    /// Asks both sides of the queue, guest and device, to signal from now on. True if something came in before they
    /// were asked: then do not sleep.
    fn arm(&mut self) -> bool;

    /// They need not signal any more.
    fn disarm(&mut self);

    /// The event descriptor that is signalled when there is something to fetch, if there is one now. Before another
    /// takes its place the poller has it [ignored](SignalEventfd::ignore).
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

    /// Called now and then, at most every second or so: for looking after what takes long.
    fn tick(&mut self, _now_ns: u64) {}

    /// Nothing will ever come again.
    fn is_over(&self) -> bool;
}

/// What the lane wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// Another turn, at once.
    Turn,
    /// Sleep until an eventfd, a completion, or this time.
    Sleep(Option<u64>),
    /// All pollers are over, or there are none.
    End,
}

/// Bytes that the active pollers of a lane copy together in one turn, unless there are very many: half a millisecond
/// of memory that no cache holds.
const TURN_BYTES: u64 = 4 << 20;
/// Bytes that one of them copies in a turn at most: a whole queue of 128 requests of 4 KiB, so that only long requests
/// are ever put off.
pub(crate) const POLLER_BYTES_MAX: u64 = 512 << 10;
/// And what it may at least: many times what a turn costs by itself.
const POLLER_BYTES_MIN: u64 = 128 << 10;

/// How often pollers are ticked.
const TICK_NS: u64 = 1_000_000_000;

/// A poller, by the name that whoever runs the lanes gave it.
#[derive(Debug)]
struct Resident<S> {
    name: u32,
    poller: S,
    leaving: bool,
    parked: bool,
    /// Time of its last work, ns; when it was admitted or unparked, if that is later.
    busy_ns: u64,
    /// It had work since [`Lane::take_worked`] was called last.
    worked: bool,
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
    /// How many were asked to leave.
    leaving: usize,
    /// Bytes that an active poller may copy in a turn, as it was last told.
    turn_bytes: u64,
    lookout: Lookout,
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
    /// A lane without pollers yet.
    pub fn new(policy: IdlePolicy) -> Lane<S> {
        Lane {
            slots: Vec::new(),
            active: Vec::new(),
            newly_parked: Vec::new(),
            parked: 0,
            leaving: 0,
            turn_bytes: POLLER_BYTES_MAX,
            lookout: Lookout::new(policy),
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

    /// A poller by its slot, and whether it had work since this was called last.
    ///
    /// # Panics
    /// If there is none.
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
        let new = Some(Resident { name, poller, leaving: false, parked: false, busy_ns: self.now_ns, worked: false });
        let slot = if let Some(free) = self.slots.iter().position(Option::is_none) {
            self.slots[free] = new;
            free
        } else {
            self.slots.push(new);
            self.slots.len() - 1
        };
        self.active.push(slot);
        // Room for all from the start: to park allocates nothing.
        self.active.reserve(self.slots.len() - self.active.len());
        self.newly_parked.reserve(self.slots.len() - self.newly_parked.len());
        self.share_turn::<Cx>(Some(slot));
    }

    /// Deals what may be copied in one turn out to the active pollers. One that `came` has to be told, the others only
    /// if it changes.
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

    /// Asks a poller to come to rest; [`Lane::part`] gives it back then. False if there is none of this name.
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

    /// The next poller of those asked to leave that has come to rest, with its slot and name. To be asked after every
    /// turn.
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

    /// Runs every active poller once, parks those that have been idle, and says whether to go on or sleep. Before a
    /// sleep every poller is armed; the next turn disarms the active ones.
    pub fn turn<Cx: ?Sized>(&mut self, cx: &mut Cx, now_ns: u64) -> Idle
    where
        S: Poller<Cx>,
    {
        if let Some(began_ns) = self.worked_ns.take() {
            self.turns.record(now_ns.saturating_sub(began_ns));
        }
        self.now_ns = now_ns;
        if std::mem::take(&mut self.armed) {
            self.active.iter().for_each(|&slot| resident_mut(&mut self.slots, slot).poller.disarm());
        }
        let mut busiest = PollerState::Idle;
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
        if long_idle && self.active.len() > 1 {
            self.park::<Cx>();
        }
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
        if self.lookout.goes_on(now_ns) {
            return Idle::Turn;
        }
        self.armed = true;
        // Every poller is armed, even after one had work: what is armed is what the next turn disarms.
        let arm = |work, &slot| resident_mut(&mut self.slots, slot).poller.arm() | work;
        if self.active.iter().fold(false, arm) {
            return Idle::Turn;
        }
        let deadline_ns = |&slot: &Slot| resident(&self.slots, slot).poller.deadline_ns();
        let deadline = self.active.iter().filter_map(deadline_ns).min();
        // While anything is in flight the tick must come, for it is what counts I/O that takes too long.
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
