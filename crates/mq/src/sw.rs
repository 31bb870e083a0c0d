//! The software queue: a submitting thread's own end of a hardware queue that it shares with others.
//!
//! Each thread has a [`SwQueue`] to itself: a ring of requests, a ring of answers, and a number of places. Between them
//! stands one hardware queue under a [`Baton`]. Whoever finds it idle turns its run; whoever finds it owned leaves
//! word and goes, and then the owner runs for it, too.
//!
//! ```text
//!   thread A   submit ─▶ sq ─┐                                  ┌─ sq ◀─ submit   thread B
//!              poll  ◀── cq ◀┤  take ─▶ ┌─────────┐ ◀─ take     ├▶ cq ──▶ poll
//!                            ├─────────▶│ HwQueue │◀────────────┤
//!                            └◀─deliver─│  + Cx   │──deliver───▶┘
//!                                       └─────────┘ under the baton
//! ```
//!
//! **Places.** A submitter holds a place from [`submit`](SwQueue::submit) until the bio is given back, and both its
//! rings have as many places. So nothing enters the left ring without a place on the right, and a completion always has
//! room.
//!
//! **Rings are for what crosses.** What a thread passes on by itself goes to the hardware queue straight from its plug,
//! and what it finds to be over straight to its own list. Only when word is left do the bios go into the ring; and the
//! owner looks at the rings of others only when it has heard word, so that threads that take turns do not touch each
//! other's lines.
//!
//! **Stays.** A bio that is carried to another CPU costs two cache lines there and two back; the queue, some sixty
//! once. So it is better that the queue goes to the batch than the batch to the queue, and best if it then stays for
//! many. A thread that is back with a batch within moments of its last, as happens where the device answers on the
//! spot, lets the others have the queue for a while (`STAY_NS`) if it finds it owned. Then it takes it between two of
//! their batches; or, if it does not come to that soon, leaves word like everyone. It waits for that time to pass, not
//! for a holder. Small batches, and those of devices that take their time, are not kept waiting.
//!
//! **Turns.** The owner takes from the rings in turn, a bounded share of each per round, so that first come is first
//! served and nobody's burst keeps the others out. It goes on while work is left or can be made, for a bounded number
//! of rounds; then it passes on: it wakes a sleeper, who will take the queue. If none sleeps, everyone who wants
//! something is running, and comes for it.
//!
//! **Sleep.** A thread sleeps only on its own completion ring. It first announces itself, then goes to the baton as
//! with any work:
//!
//! ```text
//!             announce, take the baton
//!    awake ──────────┬─ owned by another ──▶ parked   the owner cannot leave without hearing of it
//!      ▲             └─ ours: run; nothing for us ─┬─ nobody keeps watch ──▶ on watch, until a deadline
//!      │                                             └─ somebody does ───────▶ parked
//!      └──── completions came, or its turn to keep watch, or to take the queue over ────┘
//! ```
//!
//! One of the sleepers keeps watch: it is the armed sleeper that hears device and deadlines, and does not hold the
//! queue meanwhile, so a submitter need not wake it to get through. An owner that leaves while threads are parked and
//! nobody keeps watch wakes one of them. What lets all this do with the baton's one word: who sleeps is either written
//! down under the baton, or announced before *work* is set, and so heard before the baton is put down.
//!
//! **Moves.** A queue that is [closed](shared::SharedHwQueue::close) takes nothing more in, and once nothing is left in
//! it, it is taken apart. The rings of its threads, with what they hold, go to other queues. A thread finds out when it
//! next goes to the baton: it follows its rings, or sleeps until it is told where they are. So a move costs nothing on
//! the way of an I/O. See [`SharedDisk`](crate::SharedDisk).
//!
//! **The price**: an owner that is preempted delays those who share its queue; they sleep. Threads that only poll come
//! last after those that sleep when the rounds are used up. Who waits out a stay uses its CPU for nothing; it has no
//! more places to submit from.
//!
//! It starts no thread, reads no clock and makes no system call: time is a closure, sleep is a [`Parker`]. It does not
//! choose the queue for a thread: see [`SharedDisk`](crate::SharedDisk). It does not bind bios to the thread
//! that issued them: see [`SwQueue::leave`].

mod ends;
mod shared;

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use blkyard_mem::RegionTable;

use crate::stats::HwStats;
use crate::{Bio, Budget, BudgetError, DeviceInfo, Driver, HwQueue, Wake};
pub(crate) use ends::{Ends, Member, Places, rings};
use shared::Why;
pub(crate) use shared::{BatonOutcome, SharedHwQueue};

/// Times that a thread looks at a queue it polls before it lets others have the CPU.
pub(crate) const POLLS_MAX: u32 = 64;

/// Where one thread sleeps. To [wake](Wake::wake) it works from any thread, and holds for the next sleep if none is
/// going on.
///
/// Both sleeps may end for no reason; whoever slept looks again.
pub trait Parker: Wake {
    /// Sleeps until woken.
    fn sleep(&self);

    /// Keeps watch: sleeps until woken, until the device may have something to say, or until the deadline. If the
    /// device had something to say before and nobody has looked since, returns at once.
    fn watch(&self, deadline_ns: u64);

    /// Keeps watch for one of several devices that this parker is beside, by its place among them.
    fn watch_one(&self, _beside: usize, deadline_ns: u64) {
        self.watch(deadline_ns);
    }

    /// Lets other threads have the CPU, for one who polls and finds nothing.
    fn give_way(&self) {
        std::hint::spin_loop();
    }
}

/// What the drivers of a shared queue borrow (`Cx` of [`Driver`]), as its owner for the time being must treat it.
pub trait Context {
    /// Announces to the device what drivers have left to be announced together.
    fn commit(&mut self) {}

    /// Fetches what the device has finished, for drivers to find.
    fn collect(&mut self) {}

    /// Whether there is something of drivers to be announced, or something fetched that they have not taken: no watch
    /// tells of either.
    fn has_more(&mut self) -> bool {
        false
    }

    /// Whoever keeps watch is told when this eventfd is signalled, a driver's, once: as if a completion had come.
    /// [`Context::collect`] makes it quiet again.
    fn listen(&mut self, _eventfd: BorrowedFd<'_>) {}
}

impl Context for () {}

/// One thread's end of a shared hardware queue.
///
/// Made by [`SwQueue::share`], then moved to its thread. Before it goes it must [leave](SwQueue::leave).
// Shares no cache line with the one of another thread, wherever they are kept.
#[repr(align(128))]
pub struct SwQueue<D, Cx> {
    shared: Arc<SharedHwQueue<D, Cx>>,
    submitter: usize,
    ends: Ends,
    places: Places,
    /// Submitters whose threads are to be woken as soon as the baton is put down.
    calls: Vec<usize>,
    /// Where we are told of moves.
    location: Arc<QueueLocation<D, Cx>>,
    /// What bios get that do not say whose they are.
    stream: u32,
}

/// Has somebody turn the run of a shared queue, for a budget that it takes from.
struct SharedQueueWaker<D, Cx> {
    /// Known once the queue is shared; it is idle before. The queue has the budget, and the budget this waker: so it
    /// does not keep the queue.
    shared: OnceLock<Weak<SharedHwQueue<D, Cx>>>,
    /// A list for the submitters whose threads are to be woken.
    calls: Mutex<Vec<usize>>,
}

impl<D, Cx> SharedQueueWaker<D, Cx> {
    fn wakes(&self, shared: &Arc<SharedHwQueue<D, Cx>>) {
        self.shared.get_or_init(|| Arc::downgrade(shared));
    }
}

impl<D: Driver<Cx> + Send, Cx: Context + Send> Wake for SharedQueueWaker<D, Cx> {
    fn wake(&self) {
        if let Some(shared) = self.shared.get().and_then(Weak::upgrade) {
            // Taken out, so that nobody waits here for who has it. Who finds it gone makes one of its own.
            let list = || self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            let mut calls = std::mem::take(&mut *list());
            shared.set_pending(true, &mut calls);
            *list() = calls;
        }
    }
}

/// Where a thread is told which queue its rings lead to, and at which submitter.
pub(crate) struct QueueLocation<D, Cx>(Mutex<(Arc<SharedHwQueue<D, Cx>>, usize)>);

impl<D, Cx> QueueLocation<D, Cx> {
    /// The rings of the thread have moved.
    pub(crate) fn tell(&self, shared: &Arc<SharedHwQueue<D, Cx>>, submitter: usize) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (Arc::clone(shared), submitter);
    }
}

impl<D, Cx> SwQueue<D, Cx> {
    /// Whoever has these ends sits here.
    pub(crate) fn seated(
        shared: &Arc<SharedHwQueue<D, Cx>>,
        submitter: usize,
        ends: Ends,
        stream: u32,
    ) -> SwQueue<D, Cx> {
        let places = Places::new(ends.places());
        let calls = Vec::with_capacity(shared.calls_max());
        let location = Arc::new(QueueLocation(Mutex::new((Arc::clone(shared), submitter))));
        SwQueue { shared: Arc::clone(shared), submitter, ends, places, calls, location, stream }
    }

    /// Where this thread is told of moves.
    pub(crate) fn location(&self) -> &Arc<QueueLocation<D, Cx>> {
        &self.location
    }
}

impl<D: Driver<Cx>, Cx: Context> SwQueue<D, Cx> {
    /// Shares an idle hardware queue, whose memory is set, among as many threads as there are parkers. Each may have up
    /// to
    /// `places` bios out.
    ///
    /// # Panics
    /// If the queue is not idle, or nobody or nothing is to be served.
    pub fn share(hw: HwQueue<D>, cx: Cx, places: usize, parkers: Vec<Arc<dyn Parker>>) -> Vec<SwQueue<D, Cx>> {
        assert!(!parkers.is_empty(), "a queue is shared among nobody");
        let (ends, members): (Vec<_>, Vec<_>) = parkers.iter().map(|_| rings(places)).unzip();
        let parkers = parkers.into_iter().map(|parker| (parker, 0)).collect();
        let shared = Arc::new(SharedHwQueue::open(hw, cx, members, parkers, false));
        ends.into_iter()
            .enumerate()
            .map(|(submitter, ends)| SwQueue::seated(&shared, submitter, ends, submitter as u32 + 1))
            .collect()
    }

    /// As [`SwQueue::share`], where each request takes a place from a budget, too: see [`HwQueue::set_budget`]. When
    /// the budget has places for this queue, one of its threads turns the run.
    ///
    /// # Errors
    /// The budget is shared by as many queues as it was made for.
    pub fn share_within(
        budget: &Budget,
        mut hw: HwQueue<D>,
        cx: Cx,
        places: usize,
        parkers: Vec<Arc<dyn Parker>>,
    ) -> Result<Vec<SwQueue<D, Cx>>, BudgetError>
    where
        D: Send + 'static,
        Cx: Send + 'static,
    {
        let waker = Arc::new(SharedQueueWaker {
            shared: OnceLock::new(),
            calls: Mutex::new(Vec::with_capacity(parkers.len() + 1)),
        });
        hw.set_budget(Some(budget.join(Arc::clone(&waker) as Arc<dyn Wake>)?));
        let queues = SwQueue::share(hw, cx, places, parkers);
        queues.iter().take(1).for_each(|queue| waker.wakes(&queue.shared));
        Ok(queues)
    }

    /// What the device is.
    pub fn info(&self) -> &Arc<DeviceInfo> {
        self.shared.info()
    }

    /// The memory that segments point into.
    pub fn memory(&self) -> &Arc<RegionTable> {
        self.shared.memory()
    }

    /// The counters of the hardware queue, for all who share it.
    pub fn stats(&self) -> &Arc<HwStats> {
        self.shared.stats()
    }

    /// How many more bios may be submitted before one comes back.
    #[inline]
    pub fn room(&self) -> usize {
        self.places.room()
    }

    /// Bios submitted and not given back.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.places.held()
    }

    /// Accepts a bio, which nobody sees before [`SwQueue::ring`]. It comes back through [`SwQueue::poll`] or
    /// [`SwQueue::wait`], whatever happens.
    ///
    /// # Panics
    /// If there is no [room](SwQueue::room): the caller holds a place before it makes a request.
    #[inline]
    pub fn submit(&mut self, mut bio: Box<Bio>) {
        self.places.hold();
        if bio.stream == 0 {
            bio.stream = self.stream;
        }
        self.ends.plug.push(bio);
    }

    /// Passes on to the device what was submitted, if the queue is idle; if it is owned, makes it visible and its owner
    /// will. With a batch at a device that answers on the spot it may take its turn, some microseconds later: see the
    /// module's head.
    #[inline]
    pub fn ring(&mut self, clock: &impl Fn() -> u64) {
        if !self.ends.plug.is_empty() {
            self.turn(Why::Ring, clock);
        }
    }

    /// Gives back what is over, without waiting. Looks after the queue if nothing has come and nobody else does.
    /// Returns how many bios were given back.
    ///
    /// Bios still to be made visible stay so: see [`SwQueue::ring`].
    #[inline]
    pub fn poll(&mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let ended = self.drain(sink);
        if ended > 0 || self.in_flight() == 0 {
            return ended;
        }
        match self.turn(Why::Poll, clock) {
            BatonOutcome::Owned => 0,
            _ => self.drain(sink),
        }
    }

    /// Makes visible what was submitted and sleeps until at least one bio is over. Returns how many were given back:
    /// none only if none is out.
    ///
    /// It sleeps as soon as it can; a thread that rather spins a while polls first. On a queue that is
    /// [polled](crate::QueueKind::Poll) it does not sleep: it polls, and now and then lets others have the CPU.
    pub fn wait(&mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        loop {
            let ended = self.drain(sink);
            if ended > 0 || self.in_flight() == 0 {
                self.ring(clock);
                return ended;
            }
            let turn = self.lie_down(clock);
            if turn != BatonOutcome::Ran || self.ends.is_empty() {
                self.shared.rest(self.submitter, turn);
            }
        }
    }

    /// Leaves: waits until all bios of this thread are given back.
    ///
    /// What this thread has issued for others may still be in flight. Where a device binds I/O to the thread that
    /// issued it, as `io_uring` does, a thread must not end before [all](SwQueue::stats) are done with the queue.
    pub fn leave(mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) {
        while self.wait(clock, sink) > 0 {}
    }

    /// Whether nobody sleeps here.
    pub(crate) fn is_polled(&self) -> bool {
        self.shared.is_polled()
    }

    pub(crate) fn parker(&self) -> &Arc<dyn Parker> {
        self.shared.parker(self.submitter)
    }

    /// Makes visible what was submitted, runs, unless another does, and gets ready to sleep; what it comes to says
    /// how. A queue that is polled is run for a while, and nobody gets ready for anything.
    pub(crate) fn lie_down(&mut self, clock: &impl Fn() -> u64) -> BatonOutcome {
        self.ends.publish();
        if !self.shared.is_polled() {
            // Announced here, made known by the baton's read-modify-write: an owner who is there hears it before it
            // leaves. Release, so that an owner who hears it early knows our ring as empty as we left it.
            self.shared.announce(self.submitter);
            return self.turn(Why::Wait, clock);
        }
        let mut why = Why::Ring;
        for _ in 0..POLLS_MAX {
            match self.turn(why, clock) {
                BatonOutcome::Closed => return BatonOutcome::Closed,
                _ if !self.ends.is_empty() => return BatonOutcome::Ran,
                _ => why = Why::Poll,
            }
        }
        BatonOutcome::Ran
    }

    /// Gets up after lying down, though nothing has come here.
    pub(crate) fn get_up(&mut self, clock: &impl Fn() -> u64) {
        self.shared.announce_up(self.submitter);
        self.turn(Why::Up, clock);
    }

    #[inline]
    pub(crate) fn drain(&mut self, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let ended = self.ends.drain(sink);
        self.places.free(ended);
        ended
    }

    /// Goes to the baton, and runs the queue if it is ours.
    #[inline]
    fn turn(&mut self, why: Why, clock: &impl Fn() -> u64) -> BatonOutcome {
        let SwQueue { shared, submitter, ends, calls, .. } = self;
        match shared.turn(*submitter, why, ends, calls, clock) {
            BatonOutcome::Closed => self.follow(why, clock),
            turn => turn,
        }
    }

    /// The queue is closed: goes after our rings. They may still be on the way, and then whoever moves them runs for
    /// us.
    #[inline(never)]
    fn follow(&mut self, why: Why, clock: &impl Fn() -> u64) -> BatonOutcome {
        {
            let told = self.location.0.lock().unwrap_or_else(PoisonError::into_inner);
            if Arc::ptr_eq(&told.0, &self.shared) {
                return BatonOutcome::Closed;
            }
            (self.shared, self.submitter) = (Arc::clone(&told.0), told.1);
        }
        self.calls.reserve(self.shared.calls_max());
        if why == Why::Wait {
            // Announced at the old submitter, not at this.
            return BatonOutcome::Ran;
        }
        // Even for one who only looks: we may have been left word at the old place, which is to be heard at the new
        // one.
        self.turn(if why == Why::Poll { Why::Up } else { why }, clock)
    }
}

impl<D, Cx> Drop for SwQueue<D, Cx> {
    fn drop(&mut self) {
        if self.shared.is_broken() {
            // They find out as they look again.
            self.shared.wake_all();
        }
        let held = self.places.held();
        assert!(held == 0 || std::thread::panicking(), "a thread left its queue with {held} bios out");
    }
}

impl<D, Cx> std::fmt::Debug for SwQueue<D, Cx> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SwQueue")
            .field("device", &self.shared.info().name)
            .field("submitter", &self.submitter)
            .field("places", &self.places)
            .finish_non_exhaustive()
    }
}
