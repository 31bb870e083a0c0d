//! The software queue: a thread's own end of a hardware queue that it shares with others.
//!
//! Each thread has a private [`SwQueue`]: a ring of requests, a ring of completions, and a number of slots. Between the
//! threads is one hardware queue under a [`Baton`]. A thread that finds it idle runs it. A thread that finds it owned
//! sets its pending bit and continues; the owner then runs the queue for it, too.
//!
//! ```text
//!   thread A   submit ─▶ sq ─┐                                  ┌─ sq ◀─ submit   thread B
//!              poll  ◀── cq ◀┤  take ─▶ ┌─────────┐ ◀─ take     ├▶ cq ──▶ poll
//!                            ├─────────▶│ HwQueue │◀────────────┤
//!                            └◀─deliver─│  + Cx   │──deliver───▶┘
//!                                       └─────────┘ under the baton
//! ```
//!
//! **Slots.** A submitter holds a slot from [`submit`](SwQueue::submit) until the bio is returned, and both its rings
//! have as many entries. So nothing enters the left ring without a slot on the right, and a completion always has room.
//!
//! **Rings are for crossing threads.** Bios that a thread dispatches itself go to the hardware queue straight from its
//! plug, and completions that it reaps itself straight to its own list. Only with the pending bit do bios go into the
//! ring; and the owner reads the rings of others only after it has seen that bit, so threads that take turns do not
//! touch each other's cache lines.
//!
//! **Holding the queue.** A bio that crosses to another CPU costs two cache lines there and two back; the queue some
//! sixty once. So moving the queue's lines once per many batches costs less than moving the bios' lines. A thread that
//! returns with a batch within moments of its last one, as with a device that completes at once, lets the others keep
//! the queue for a while (`HOLD_NS`) if it finds it owned. Then it takes the queue between two of their batches; or, if
//! that fails, sets the pending bit like all others. It waits for that time to pass, not for a holder. Small batches,
//! and those of slower devices, never wait.
//!
//! **Turns.** The owner takes from the rings in turn, a bounded share of each per round, so service is in order of
//! arrival and no thread's burst blocks the others. It continues while there is work, for a bounded number of rounds;
//! then it passes the queue on: it wakes a sleeper, which takes the queue. If none sleeps, every thread with work is
//! running, and will take it.
//!
//! **Sleep.** A thread sleeps only on its own completion ring. It first announces itself, then goes to the baton as
//! with any work:
//!
//! ```text
//!             announce, take the baton
//!    awake ──────────┬─ owned by another ──▶ parked   the owner sees the pending bit before it leaves
//!      ▲             └─ ours: run; no completion ──┬─ no thread watches ─────▶ on watch, until a deadline
//!      │                                             └─ another one does ────▶ parked
//!      └──── completions came, or its turn to watch, or to take the queue over ────┘
//! ```
//!
//! One of the sleepers watches: it is the armed sleeper that is woken by device and deadlines. It does not own the
//! queue meanwhile, so a submitter need not wake it. An owner that leaves while threads are parked and none watches
//! wakes one of them. This needs only the baton's one word, because a sleeper is either recorded under the baton, or
//! announced before the pending bit is set, and so seen before the baton is released.
//!
//! **Moves.** A queue that is [closed](shared::SharedHwQueue::close) accepts no more bios, and is dismantled once it is
//! empty. The rings of its threads, with their content, go to other queues. A thread notices when it next goes to the
//! baton: it follows its rings, or sleeps until it is told their location. So a move costs nothing on the I/O path. See
//! [`SharedDisk`](crate::SharedDisk).
//!
//! **The price**: a preempted owner delays the threads that share its queue; they sleep. Threads that only poll come
//! after sleepers when the rounds are used up. A thread that waits for `HOLD_NS` uses its CPU for nothing; it has no
//! more slots to submit from.
//!
//! It starts no thread, reads no clock and makes no system call: time is a closure, sleep is a [`Parker`]. It does not
//! choose the queue for a thread: see [`SharedDisk`](crate::SharedDisk). It does not bind bios to the thread that
//! issued them: see [`SwQueue::leave`].

mod core;
mod ends;
mod shared;

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use crate::stats::HwStats;
use crate::{Bio, Budget, BudgetError, DeviceInfo, Driver, HwQueue, Wake};
use ends::Places;
pub(crate) use ends::{Ends, Member, rings};
use shared::Why;
pub(crate) use shared::{BatonOutcome, SharedHwQueue};

/// Polls of a queue before the thread yields the CPU.
pub(crate) const POLLS_MAX: u32 = 64;

/// Sleep of one thread. [`wake`](Wake::wake) works from any thread, and applies to the next sleep if the thread is
/// awake.
///
/// Both sleeps may end spuriously; the caller checks again.
pub trait Parker: Wake {
    /// Sleeps until woken.
    fn sleep(&self);

    /// Watches: sleeps until woken, until the device may have completions, or until the deadline. Returns at once if
    /// the device had some before that were not collected.
    fn watch(&self, deadline_ns: u64);

    /// Watches one of the several devices of this parker, by its index among them.
    fn watch_one(&self, _beside: usize, deadline_ns: u64) {
        self.watch(deadline_ns);
    }

    /// Yields the CPU, for a thread that polls without result.
    fn give_way(&self) {
        std::hint::spin_loop();
    }
}

/// Context of a shared queue's drivers (`Cx` of [`Driver`]), for its current owner.
pub trait Context {
    /// Announces to the device the entries that drivers left to be announced together.
    fn commit(&mut self) {}

    /// Collects the device's completions, for drivers to reap.
    fn collect(&mut self) {}

    /// Whether there is something of drivers to be announced, or something fetched that they have not taken: no watch
    /// tells of either.
    fn has_more(&mut self) -> bool {
        false
    }

    /// Polls a driver's eventfd once: its signal wakes the watching thread, like a completion. [`Context::collect`]
    /// resets it.
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
    /// Submitters whose threads are to be woken once the baton is released.
    calls: Vec<usize>,
    /// Current location of the queue, updated by moves.
    location: Arc<QueueLocation<D, Cx>>,
    /// Stream of bios without one.
    stream: u32,
}

/// Has some thread run a shared queue, for its budget.
struct SharedQueueWaker<D, Cx> {
    /// Known once the queue is shared; it is idle before. The queue has the budget, and the budget this waker: so it
    /// does not keep the queue.
    shared: OnceLock<Weak<SharedHwQueue<D, Cx>>>,
    /// List of submitters whose threads are to be woken.
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
            // Taken out of the mutex, so that no thread waits for its user. A thread that finds it taken allocates its
            // own.
            let list = || self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            let mut calls = std::mem::take(&mut *list());
            shared.set_pending(true, &mut calls);
            *list() = calls;
        }
    }
}

/// Wakes all threads of a queue if this one panics while it owns the queue. Made before the baton is taken, so that it
/// is dropped after it.
struct PanicNotice<'a, D, Cx>(&'a SharedHwQueue<D, Cx>);

impl<D, Cx> Drop for PanicNotice<'_, D, Cx> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() && self.0.is_broken() {
            // They find the baton broken when they check again.
            self.0.wake_all();
        }
    }
}

/// Current queue of a thread's rings, and its submitter index there.
pub(crate) struct QueueLocation<D, Cx>(Mutex<(Arc<SharedHwQueue<D, Cx>>, usize)>);

impl<D, Cx> QueueLocation<D, Cx> {
    /// The rings of the thread have moved.
    pub(crate) fn set(&self, shared: &Arc<SharedHwQueue<D, Cx>>, submitter: usize) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (Arc::clone(shared), submitter);
    }
}

impl<D, Cx> SwQueue<D, Cx> {
    /// The owner of these ends has this submitter index.
    pub(crate) fn at_submitter(
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

    /// Location of this thread's queue, updated by moves.
    pub(crate) fn location(&self) -> &Arc<QueueLocation<D, Cx>> {
        &self.location
    }
}

impl<D: Driver<Cx>, Cx: Context> SwQueue<D, Cx> {
    /// Shares an idle hardware queue, whose memory is set, among as many threads as there are parkers. Each may have up
    /// to `places` bios in flight.
    ///
    /// # Panics
    /// If the queue is not idle, or without threads or slots.
    pub fn share(hw: HwQueue<D>, cx: Cx, places: usize, parkers: Vec<Arc<dyn Parker>>) -> Vec<SwQueue<D, Cx>> {
        assert!(!parkers.is_empty(), "a queue is shared among nobody");
        let (ends, members): (Vec<_>, Vec<_>) = parkers.iter().map(|_| rings(places)).unzip();
        let parkers = parkers.into_iter().map(|parker| (parker, 0)).collect();
        let shared = Arc::new(SharedHwQueue::open(hw, cx, members, parkers, false));
        ends.into_iter()
            .enumerate()
            .map(|(submitter, ends)| SwQueue::at_submitter(&shared, submitter, ends, submitter as u32 + 1))
            .collect()
    }

    /// As [`SwQueue::share`], with a slot of a budget for each request: see [`HwQueue::set_budget`]. When the budget
    /// has slots for this queue, one of its threads runs it.
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

    /// Properties of the device.
    pub fn info(&self) -> &Arc<DeviceInfo> {
        self.shared.info()
    }

    /// Counters of the hardware queue, for all its threads.
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

    /// Adds a bio to the plug; it becomes visible with [`SwQueue::ring`]. It always comes back through
    /// [`SwQueue::poll`] or [`SwQueue::wait`].
    ///
    /// # Panics
    /// Without [room](SwQueue::room): the caller needs a free slot before it creates a request.
    #[inline]
    pub fn submit(&mut self, mut bio: Box<Bio>) {
        self.places.hold();
        if bio.stream == 0 {
            bio.stream = self.stream;
        }
        self.ends.plug.push(bio);
    }

    /// Dispatches submitted bios, if the queue is idle; if it is owned, makes them visible to its owner. A batch for a
    /// device that completes at once may take its turn some microseconds later: see the module's head.
    #[inline]
    pub fn ring(&mut self, clock: &impl Fn() -> u64) {
        if !self.ends.plug.is_empty() {
            self.turn(Why::Ring, clock);
        }
    }

    /// Returns completed bios, without waiting. Runs the queue if none has completed and no other thread runs it.
    /// Returns the number of bios.
    ///
    /// Bios in the plug stay there: see [`SwQueue::ring`].
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

    /// Makes submitted bios visible and sleeps until at least one bio completes. Returns the number of completed bios:
    /// 0 only if none is in flight.
    ///
    /// It sleeps as soon as it can; a thread that prefers to spin polls first. On a [poll
    /// queue](crate::QueueKind::Poll) it does not sleep: it polls, and yields the CPU now and then.
    pub fn wait(&mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        loop {
            let ended = self.drain(sink);
            if ended > 0 || self.in_flight() == 0 {
                self.ring(clock);
                return ended;
            }
            let turn = self.prepare_park(clock);
            if turn != BatonOutcome::Ran || self.ends.is_empty() {
                self.shared.rest(self.submitter, turn);
            }
        }
    }

    /// Leaves: waits until all bios of this thread are returned.
    ///
    /// Requests that this thread has issued for others may still be in flight. Where a device binds I/O to the issuing
    /// thread, as `io_uring` does, a thread must not end before [all](SwQueue::stats) requests of the queue have
    /// completed.
    pub fn leave(mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) {
        while self.wait(clock, sink) > 0 {}
    }

    /// Whether this is a poll queue, on which no thread sleeps.
    pub(crate) fn is_polled(&self) -> bool {
        self.shared.is_polled()
    }

    pub(crate) fn parker(&self) -> &Arc<dyn Parker> {
        self.shared.parker(self.submitter)
    }

    /// Makes submitted bios visible, runs the queue unless another thread does, and prepares to sleep; the result says
    /// how. A poll queue is run for a while, without preparation.
    pub(crate) fn prepare_park(&mut self, clock: &impl Fn() -> u64) -> BatonOutcome {
        self.ends.publish();
        if !self.shared.is_polled() {
            // Announced here, published by the baton's read-modify-write: the current owner sees it before it leaves.
            // Release, so that an owner which sees it early sees our ring as empty as we left it.
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

    /// Ends a prepared sleep without a completion.
    pub(crate) fn unpark(&mut self, clock: &impl Fn() -> u64) {
        self.shared.announce_up(self.submitter);
        self.turn(Why::Up, clock);
    }

    /// Whether a bio is to be returned.
    pub(crate) fn has_completed(&mut self) -> bool {
        !self.ends.is_empty()
    }

    #[inline]
    pub(crate) fn drain(&mut self, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let own = self.stream;
        self.ends.drain(&mut self.places, &mut |mut bio: Box<Bio>| {
            // Another thread may submit it again.
            if bio.stream == own {
                bio.stream = 0;
            }
            sink(bio);
        })
    }

    /// Goes to the baton, and runs the queue if it is free.
    #[inline]
    fn turn(&mut self, why: Why, clock: &impl Fn() -> u64) -> BatonOutcome {
        let SwQueue { shared, submitter, ends, calls, .. } = self;
        match shared.turn(*submitter, why, ends, calls, clock) {
            BatonOutcome::Closed => self.follow(why, clock),
            turn => turn,
        }
    }

    /// The queue is closed: follows our rings. They may still be moving; then the moving thread runs the queue for us.
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
        // Even for a poll: a pending bit set at the old location applies to the new one.
        self.turn(if why == Why::Poll { Why::Up } else { why }, clock)
    }
}

impl<D, Cx> Drop for SwQueue<D, Cx> {
    fn drop(&mut self) {
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
