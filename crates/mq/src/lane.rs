//! The lane: one thread's worth of queues, and when it may sleep.
//!
//! A lane runs each of its pollers in turn. A poller is a queue with whoever feeds it: a virtqueue and
//! its hardware queue, a job of load. After work a lane goes on turning for as long as has paid of late; then
//! it asks every poller's outside to signal an eventfd, looks once more, and sleeps. It does not know what a thread, an
//! eventfd or a sleep is made of: that is told by whoever runs it.
//!
//! Pollers come and go while the others work. One that is to leave comes to rest first: it takes nothing more and
//! finishes what it took; then nothing of it is left here, and it may be carried to another lane.
//!
//! ```text
//!            ask_to_leave                     at rest
//!   living ───────────────▶ coming to rest ────────────▶ parted
//!     ▲  ◀───────────────────┘ ask_to_stay                 │
//!     └────────────────────────────────────────────────────┘ admit, here or on another lane
//! ```

use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError};

use blkyard_mem::sync::Mutex;

use crate::idle::{IdlePolicy, Lookout};
use crate::stats::TurnStats;

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

/// What the pollers of a lane do with eventfds of the outside: ring them, and listen to them no more. Whoever holds the
/// other end may have arranged that a plain write would wait for it; here nobody waits.
pub trait SignalEventfd {
    /// Signals an eventfd. If an earlier ring under the same `place` is not known to have gone through, it is rung once
    /// more when it has. A place is the caller's own, and given a number when it is first used.
    fn signal(&mut self, place: &mut SignalSlot, eventfd: BorrowedFd<'_>);

    /// The eventfd under this place is about to be another: what has not gone through is called off.
    fn forget(&mut self, place: &mut SignalSlot);

    /// Listens no more to an eventfd that is rung for one of the pollers: from here on it is somebody else's to hear. A
    /// lane that heard it would make it quiet. By default there is none to listen to.
    fn ignore(&mut self, _eventfd: BorrowedFd<'_>) {}
}

/// Where a poller's ring is kept track of.
#[derive(Debug, Default)]
pub struct SignalSlot(pub Option<u32>);

/// Rings nothing: for lanes that are models.
impl SignalEventfd for () {
    fn signal(&mut self, _place: &mut SignalSlot, _eventfd: BorrowedFd<'_>) {}
    fn forget(&mut self, _place: &mut SignalSlot) {}
}

/// What a turn of the run came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PollerState {
    /// Nothing is wanted and nothing is in flight.
    Idle,
    /// Something is in flight, or due later; the device will tell.
    Waiting,
    /// Something moved.
    Busy,
}

/// A queue and whoever feeds it. `Cx` is what the pollers of a lane share.
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

    /// Asks the outside, on both sides of the queue, to ring from now on. True if something came in before it heard:
    /// then do not sleep.
    fn arm(&mut self) -> bool;

    /// The outside need not ring any more.
    fn disarm(&mut self);

    /// The event descriptor the outside rings, if it has one now.
    fn eventfd(&self) -> Option<BorrowedFd<'_>>;

    /// The event descriptor the device behind the queue rings, if it tells of what it has finished by one.
    fn device_eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// When to be run next although no eventfd may ring.
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

/// Bytes that the pollers of a lane copy together in one turn, unless there are very many: half a millisecond of
/// memory that no cache holds.
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
    /// It had work since [`Lane::take_worked`] was called last.
    worked: bool,
}

/// The pollers of one thread.
#[derive(Debug)]
pub struct Lane<S> {
    residents: Vec<Resident<S>>,
    /// How many were asked to leave.
    leaving: usize,
    lookout: Lookout,
    last_tick_ns: u64,
    armed: bool,
    turns: Arc<TurnStats>,
    /// When the turn before began, if something moved in it.
    worked_ns: Option<u64>,
}

impl<S> Lane<S> {
    /// A lane without pollers yet.
    pub fn new(policy: IdlePolicy) -> Lane<S> {
        Lane {
            residents: Vec::new(),
            leaving: 0,
            lookout: Lookout::new(policy),
            last_tick_ns: 0,
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
    }

    /// The pollers, in the order they are run.
    pub fn pollers(&self) -> impl Iterator<Item = &S> {
        self.residents.iter().map(|resident| &resident.poller)
    }

    /// The pollers, in the order they are run, and whether each had work since this was called last.
    pub fn take_worked(&mut self) -> impl Iterator<Item = (&S, bool)> {
        self.residents.iter_mut().map(|resident| (&resident.poller, std::mem::take(&mut resident.worked)))
    }

    /// A poller lives here from now on, under a name that no other one here has.
    pub fn admit<Cx: ?Sized>(&mut self, cx: &mut Cx, waker: &Arc<dyn Wake>, name: u32, mut poller: S)
    where
        S: Poller<Cx>,
    {
        poller.enter(cx, waker);
        self.residents.push(Resident { name, poller, leaving: false, worked: false });
        self.share_turn::<Cx>();
    }

    /// Deals what may be copied in one turn out to the pollers.
    fn share_turn<Cx: ?Sized>(&mut self)
    where
        S: Poller<Cx>,
    {
        let each = TURN_BYTES / self.residents.len().max(1) as u64;
        let each = each.clamp(POLLER_BYTES_MIN, POLLER_BYTES_MAX);
        self.residents.iter_mut().for_each(|resident| resident.poller.set_turn_bytes(each));
    }

    /// Asks a poller to come to rest; [`Lane::part`] gives it back then. False if there is none of this name.
    pub fn ask_to_leave(&mut self, name: u32) -> bool {
        let found = self.residents.iter_mut().find(|resident| resident.name == name);
        let Some(resident) = found else { return false };
        self.leaving += usize::from(!resident.leaving);
        resident.leaving = true;
        true
    }

    /// Lets a poller stay that was asked to leave and has not parted.
    pub fn ask_to_stay<Cx: ?Sized>(&mut self, name: u32)
    where
        S: Poller<Cx>,
    {
        let found = self.residents.iter_mut().find(|resident| resident.name == name && resident.leaving);
        let Some(resident) = found else { return };
        resident.leaving = false;
        resident.poller.stay();
        self.leaving -= 1;
    }

    /// The next poller of those asked to leave that has come to rest, with its name. To be asked after every turn.
    #[inline]
    pub fn part<Cx: ?Sized>(&mut self, cx: &mut Cx) -> Option<(u32, S)>
    where
        S: Poller<Cx>,
    {
        if self.leaving == 0 { None } else { self.part_slow(cx) }
    }

    #[cold]
    fn part_slow<Cx: ?Sized>(&mut self, cx: &mut Cx) -> Option<(u32, S)>
    where
        S: Poller<Cx>,
    {
        let ready = |resident: &mut Resident<S>| resident.leaving && resident.poller.leave(cx);
        let index = self.residents.iter_mut().position(ready)?;
        let Resident { name, mut poller, .. } = self.residents.remove(index);
        self.leaving -= 1;
        if self.armed {
            // Our next turn would have; it is not among ours any more.
            poller.disarm();
        }
        self.share_turn::<Cx>();
        Some((name, poller))
    }

    /// Runs every poller once, and says whether to go on or sleep. Before a sleep every poller is armed; the
    /// next turn disarms it.
    pub fn turn<Cx: ?Sized>(&mut self, cx: &mut Cx, now_ns: u64) -> Idle
    where
        S: Poller<Cx>,
    {
        if let Some(began_ns) = self.worked_ns.take() {
            self.turns.record(now_ns.saturating_sub(began_ns));
        }
        if self.armed {
            self.armed = false;
            self.residents.iter_mut().for_each(|resident| resident.poller.disarm());
        }
        let mut busiest = PollerState::Idle;
        for resident in &mut self.residents {
            let state = resident.poller.run_once(cx, now_ns);
            resident.worked |= state == PollerState::Busy;
            busiest = busiest.max(state);
        }
        if now_ns.saturating_sub(self.last_tick_ns) >= TICK_NS {
            self.last_tick_ns = now_ns;
            self.residents.iter_mut().for_each(|resident| resident.poller.tick(now_ns));
        }
        if busiest == PollerState::Busy {
            self.lookout.worked(now_ns);
            // The next turn follows at once.
            self.worked_ns = Some(now_ns);
            return Idle::Turn;
        }
        if self.pollers().all(S::is_over) {
            return Idle::End;
        }
        if self.lookout.goes_on(now_ns) {
            return Idle::Turn;
        }
        self.armed = true;
        // Every poller is armed, even after one had work: what is armed is what the next turn disarms.
        let work = self.residents.iter_mut().fold(false, |work, resident| resident.poller.arm() | work);
        if work {
            return Idle::Turn;
        }
        let deadline = self.pollers().filter_map(S::deadline_ns).min();
        // While anything is in flight the tick must come, for it is what counts I/O that takes too long.
        let tick = (busiest == PollerState::Waiting).then_some(self.last_tick_ns + TICK_NS);
        Idle::Sleep([deadline, tick].into_iter().flatten().min())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Fake {
        work: u32,
        comes_while_arming: bool,
        armed: bool,
        over: bool,
        due: Option<u64>,
        leaving: bool,
        turn_bytes: u64,
    }

    impl Poller<()> for Fake {
        fn leave(&mut self, (): &mut ()) -> bool {
            self.leaving = true;
            self.work == 0
        }
        fn stay(&mut self) {
            self.leaving = false;
        }
        fn set_turn_bytes(&mut self, bytes: u64) {
            self.turn_bytes = bytes;
        }
        fn run_once(&mut self, (): &mut (), _: u64) -> PollerState {
            assert!(!self.armed, "run while armed");
            if self.work == 0 {
                return PollerState::Idle;
            }
            self.work -= 1;
            PollerState::Busy
        }
        fn arm(&mut self) -> bool {
            self.armed = true;
            std::mem::take(&mut self.comes_while_arming)
        }
        fn disarm(&mut self) {
            self.armed = false;
        }
        fn eventfd(&self) -> Option<BorrowedFd<'_>> {
            None
        }
        fn deadline_ns(&self) -> Option<u64> {
            self.due
        }
        fn is_over(&self) -> bool {
            self.over
        }
    }

    fn lane(pollers: Vec<Fake>, spin_ns: u64) -> Lane<Fake> {
        struct Nobody;
        impl Wake for Nobody {
            fn wake(&self) {}
        }
        let waker: Arc<dyn Wake> = Arc::new(Nobody);
        let mut lane = Lane::new(IdlePolicy { spin_ns });
        for (name, poller) in pollers.into_iter().enumerate() {
            lane.admit(&mut (), &waker, name as u32, poller);
        }
        lane
    }

    #[test]
    fn a_lane_spins_for_a_bounded_time_after_work_then_sleeps() {
        let mut lane = lane(vec![Fake { work: 1, ..Fake::default() }, Fake::default()], 100);
        assert_eq!(lane.turn(&mut (), 1000), Idle::Turn);
        assert_eq!(lane.turn(&mut (), 1099), Idle::Turn);
        assert_eq!(lane.turn(&mut (), 1100), Idle::Sleep(None));
        assert!(lane.pollers().all(|s| s.armed));
        lane.turn(&mut (), 1100);
    }

    #[test]
    fn turns_are_timed_in_which_something_moved() {
        let mut lane = lane(vec![Fake { work: 2, ..Fake::default() }], 0);
        for now_ns in [1000, 1300, 1500, 9000, 9900] {
            lane.turn(&mut (), now_ns);
        }
        let turns = lane.turns().snapshot();
        assert_eq!((turns.latency.samples(), turns.sum_ns, turns.max_ns), (2, 500, 300));
    }

    #[test]
    fn work_that_comes_while_arming_is_not_slept_over() {
        let fakes =
            vec![Fake { comes_while_arming: true, ..Fake::default() }, Fake { due: Some(77), ..Fake::default() }];
        let mut lane = lane(fakes, 0);
        assert_eq!(lane.turn(&mut (), 5), Idle::Turn);
        assert_eq!(lane.turn(&mut (), 6), Idle::Sleep(Some(77)));
    }

    #[test]
    fn a_lane_ends_when_all_its_pollers_are_over() {
        let mut lane = lane(vec![Fake { over: true, ..Fake::default() }], 50_000);
        assert_eq!(lane.turn(&mut (), 5), Idle::End);
    }

    #[test]
    fn a_poller_that_is_to_leave_parts_once_at_rest_and_unarmed() {
        let mut lane = lane(vec![Fake { work: 2, ..Fake::default() }, Fake::default()], 0);
        assert!(lane.ask_to_leave(0) && lane.ask_to_leave(0) && !lane.ask_to_leave(7));
        assert_eq!(lane.turn(&mut (), 1), Idle::Turn);
        assert!(lane.part(&mut ()).is_none(), "parted with work in hand");
        lane.turn(&mut (), 2);
        assert_eq!(lane.turn(&mut (), 3), Idle::Sleep(None));
        let (name, poller) = lane.part(&mut ()).unwrap();
        assert!(name == 0 && !poller.armed && lane.pollers().count() == 1);
        assert!(lane.part(&mut ()).is_none(), "the other one was not asked");
        lane.turn(&mut (), 4);
    }

    #[test]
    fn pollers_share_what_a_turn_may_copy() {
        let shares = |count: usize| {
            let lane = lane((0..count).map(|_| Fake::default()).collect(), 0);
            let shares: Vec<_> = lane.pollers().map(|poller| poller.turn_bytes).collect();
            assert!(shares.iter().all(|share| *share == shares[0]), "{shares:?}");
            shares[0]
        };
        assert_eq!([1, 8, 16, 32, 512].map(shares), [512 << 10, 512 << 10, 256 << 10, 128 << 10, 128 << 10]);
        let mut lane = lane((0..16).map(|_| Fake::default()).collect(), 0);
        for name in 0..8 {
            assert!(lane.ask_to_leave(name) && lane.part(&mut ()).is_some());
        }
        assert!(lane.pollers().all(|poller| poller.turn_bytes == 512 << 10), "those that left have no share");
    }

    #[test]
    fn a_poller_that_may_stay_after_all_goes_on() {
        let mut lane = lane(vec![Fake { work: 9, ..Fake::default() }], 0);
        lane.ask_to_leave(0);
        lane.turn(&mut (), 1);
        assert!(lane.part(&mut ()).is_none() && lane.pollers().all(|s| s.leaving));
        lane.ask_to_stay(0);
        assert!(lane.pollers().all(|s| !s.leaving));
        for now_ns in 2..99 {
            lane.turn(&mut (), now_ns);
            assert!(lane.part(&mut ()).is_none());
        }
    }
}
