//! The disk that threads share, [`SharedDisk`]: all hardware queues of a device, their maps, and a [`SharedSubmitter`]
//! for each thread.
//!
//! A thread submits to its own submitter, which has an end of one hardware queue of each kind that the device has. The
//! kind of an I/O and the thread's number choose the queue by the maps. The number of queues can change while all
//! threads run:
//!
//! ```text
//!   make      create the new queues, by the factory; if that fails, the old ones stay
//!   freeze    the old queues accept nothing more; submitted bios wait in the threads' rings
//!   drain     the requests of the old queues complete; each empty queue is dismantled
//!   move      the rings go to the new queues, by new maps; the threads are notified, and woken if they sleep
//! ```
//!
//! A thread takes no part in it and need not be running. The I/O path checks nothing: a thread notices when it next
//! goes to its queue and finds it closed. Bios that it submitted meanwhile are in its ring, in order, and continue
//! from there.
//!
//! The rules are those of Linux (`blk_mq_update_nr_hw_queues`), with one difference: the new queues are created before
//! the old ones are gone. So no rollback is needed when that fails, and a device must have room for both.
//!
//! The disk does not choose a thread's number, and does not define what a queue is made of: see [`QueueFactory`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkyard_mem::sync::{AtomicBool, Ordering};

use crate::map::{QueueCounts, QueueKind, QueueMaps};
use crate::stats::HwStats;
use crate::sw::{BatonOutcome, Ends, Member, POLLS_MAX, QueueLocation, SharedHwQueue, rings};
use crate::{Bio, BioFlags, Context, Driver, HwQueue, Parker, Status, SwQueue};

/// Creates hardware queues of a device, with the resources that their drivers need.
pub trait QueueFactory {
    /// Driver of a queue.
    type Driver: Driver<Self::Cx>;
    /// Context that a driver borrows from the thread that runs its queue: one for each queue.
    type Cx: Context;
    /// Why a queue cannot be made.
    type Error: std::error::Error + 'static;

    /// Creates the queue of this number, idle and with its memory set, for `threads` threads.
    ///
    /// # Errors
    /// The device, or the system, has no more.
    fn queue(
        &mut self,
        kind: QueueKind,
        number: usize,
        threads: usize,
    ) -> Result<(HwQueue<Self::Driver>, Self::Cx), Self::Error>;

    /// Creates a parker for a thread that uses these queues, one of each kind of the disk, in order.
    ///
    /// # Errors
    /// A resource of the system is exhausted.
    fn parker(&mut self, beside: &[&Self::Cx]) -> Result<Arc<dyn Parker>, Self::Error>;
}

/// Why a disk cannot have these queues. It keeps those it had.
#[derive(Debug, thiserror::Error)]
pub enum QueuesError<E: std::error::Error + 'static> {
    /// Zero default queues.
    #[error("default queues: 0 were asked for; set at least 1")]
    None,
    /// A kind would come or go.
    #[error("{} queues cannot change from {has} to {asked}: queue kinds are fixed when the device is opened; keep {}",
        .kind.name(), if *.has == 0 { "this at 0" } else { "at least 1" })]
    Kind {
        /// Which.
        kind: QueueKind,
        /// Queues of that kind there are.
        has: usize,
        /// Queues of that kind asked for.
        asked: usize,
    },
    /// They could not be made.
    #[error("new queues could not be created: {0}; the disk keeps its present queues")]
    Make(#[source] E),
}

/// A device that threads share, for the thread that changes it. The threads have its [`SharedSubmitter`]s.
pub struct SharedDisk<F: QueueFactory> {
    /// For one change at a time. No thread that does I/O comes here.
    state: Mutex<State<F>>,
    /// The queues are being changed.
    frozen: Arc<AtomicBool>,
    threads: usize,
    /// Kinds with queues of their own; the order of all fields by thread and kind below.
    kinds: Vec<QueueKind>,
}

struct State<F: QueueFactory> {
    factory: F,
    counts: QueueCounts,
    queues: Vec<Open<F>>,
    /// By thread and kind: the location of its queue, updated by moves.
    location: Vec<Arc<QueueLocation<F::Driver, F::Cx>>>,
}

/// A queue that is in use.
struct Open<F: QueueFactory> {
    kind: QueueKind,
    shared: Arc<SharedHwQueue<F::Driver, F::Cx>>,
    /// By submitter: its thread and kind, as an index.
    users: Vec<usize>,
}

/// New queues that are not in use yet.
struct Made<F: QueueFactory> {
    queues: Vec<(HwQueue<F::Driver>, F::Cx, QueueKind)>,
    /// By queue: its future users, by thread and kind.
    users: Vec<Vec<usize>>,
    /// By thread.
    parkers: Vec<Arc<dyn Parker>>,
    /// By queue: the parker of the thread that closes it.
    closers: Vec<Arc<dyn Parker>>,
}

impl<F: QueueFactory> SharedDisk<F> {
    /// Opens a disk for a number of threads, each with up to `places` bios in flight. At most one queue of a kind for
    /// each thread is created. The returned submitters are in the order of the threads' numbers.
    ///
    /// # Errors
    /// See [`QueuesError`].
    ///
    /// # Panics
    /// Without threads, or with `places` of 0.
    #[expect(clippy::type_complexity, reason = "two things, each named by its own type")]
    pub fn open(
        mut factory: F,
        threads: usize,
        places: usize,
        counts: QueueCounts,
    ) -> Result<(SharedDisk<F>, Vec<SharedSubmitter<F::Driver, F::Cx>>), QueuesError<F::Error>> {
        assert!(threads > 0 && places > 0, "a disk for {threads} threads with {places} places each");
        if counts.default == 0 {
            return Err(QueuesError::None);
        }
        let counts = counts.up_to(threads);
        let kinds: Vec<_> = QueueKind::ALL.into_iter().filter(|kind| counts.of(*kind) > 0).collect();
        let made = make(&mut factory, counts, &kinds, threads).map_err(QueuesError::Make)?;
        let (ends, members): (Vec<Ends>, Vec<_>) = (0..threads * kinds.len()).map(|_| rings(places)).unzip();
        let queues = submitter(made, members, kinds.len());
        let mut sw_queues: Vec<_> = ends.into_iter().map(Some).map(|ends| (ends, None)).collect();
        for open in &queues {
            for (submitter, user) in open.users.iter().enumerate() {
                let (ends, queue) = &mut sw_queues[*user];
                let stream = (*user / kinds.len()) as u32 + 1;
                *queue = ends.take().map(|ends| SwQueue::at_submitter(&open.shared, submitter, ends, stream));
            }
        }
        let mut sw_queues: Vec<_> = sw_queues.into_iter().filter_map(|(_, queue)| queue).collect();
        let location = sw_queues.iter().map(|queue| Arc::clone(queue.location())).collect();
        let frozen = Arc::new(AtomicBool::new(false));
        let end_of = QueueKind::ALL.map(|kind| match kinds.iter().position(|own| *own == kind) {
            None if kind != QueueKind::Poll => Some(0),
            own => own,
        });
        let submitter = |_| SharedSubmitter {
            ends: sw_queues.drain(..kinds.len()).collect(),
            end_of,
            places,
            refused: Vec::with_capacity(places),
            frozen: Arc::clone(&frozen),
        };
        let submitters = (0..threads).map(submitter).collect();
        let state = Mutex::new(State { factory, counts, queues, location });
        Ok((SharedDisk { state, frozen, threads, kinds }, submitters))
    }

    fn state(&self) -> MutexGuard<'_, State<F>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many queues there are.
    pub fn queues(&self) -> QueueCounts {
        self.state().counts
    }

    /// The counters of each queue, in the order of their numbers.
    pub fn stats(&self) -> Vec<(QueueKind, Arc<HwStats>)> {
        self.state().queues.iter().map(|open| (open.kind, Arc::clone(open.shared.stats()))).collect()
    }

    /// Changes the number of queues while threads use them. Returns the new numbers: of each kind at most the number of
    /// threads. Drains the old queues, and runs them while it waits.
    ///
    /// Meanwhile a `NOWAIT` bio comes back with [`Status::Again`]; others wait in their rings. Each thread's order of
    /// submission to a kind of queue is kept.
    ///
    /// # Errors
    /// See [`QueuesError`]; the disk then keeps the queues it had.
    pub fn set_queues(
        &self,
        asked: QueueCounts,
        clock: &impl Fn() -> u64,
    ) -> Result<QueueCounts, QueuesError<F::Error>> {
        let mut guard = self.state();
        let state = &mut *guard;
        if asked.default == 0 {
            return Err(QueuesError::None);
        }
        for kind in QueueKind::ALL {
            let (has, asked) = (state.counts.of(kind), asked.of(kind));
            if (has == 0) != (asked == 0) {
                return Err(QueuesError::Kind { kind, has, asked });
            }
        }
        let counts = asked.up_to(self.threads);
        if counts == state.counts {
            return Ok(counts);
        }
        let made = make(&mut state.factory, counts, &self.kinds, self.threads).map_err(QueuesError::Make)?;
        self.frozen.store(true, Ordering::Relaxed);
        let old = std::mem::take(&mut state.queues);
        let mut calls = Vec::new();
        // All queues are frozen before the first is waited for.
        old.iter().for_each(|open| open.shared.freeze(&mut calls));
        let mut members: Vec<Option<Member>> = state.location.iter().map(|_| None).collect();
        for open in &old {
            for (user, member) in open.users.iter().zip(open.shared.close(&mut calls, clock)) {
                members[*user] = Some(member);
            }
        }
        state.queues = submitter(made, members.into_iter().flatten().collect(), self.kinds.len());
        for open in &state.queues {
            open.users
                .iter()
                .enumerate()
                .for_each(|(submitter, user)| state.location[*user].set(&open.shared, submitter));
        }
        state.counts = counts;
        self.frozen.store(false, Ordering::Relaxed);
        old.iter().for_each(|open| open.shared.wake_all());
        // For bios submitted meanwhile: their threads may rely on another one to run the queue.
        state.queues.iter().for_each(|open| open.shared.start(&mut calls, clock));
        Ok(counts)
    }
}

impl<F: QueueFactory> SharedDisk<F> {
    /// Changes all queues while threads use them, one after the other: `command` is called by the thread that runs a
    /// queue, again and again until it returns true. First `remember` changes the factory, for queues made later; its
    /// result is passed on.
    /// Returns when all queues are changed; any thread may call it, also one with I/O in flight.
    ///
    /// # Panics
    /// If a thread has panicked in a queue.
    pub fn change_queues<T: Send + Sync + 'static>(
        &self,
        remember: impl FnOnce(&mut F) -> T,
        command: impl Fn(&T, &mut HwQueue<F::Driver>, &mut F::Cx) -> bool + Send + Sync + 'static,
        clock: &impl Fn() -> u64,
    ) {
        let mut state = self.state();
        let remembered = remember(&mut state.factory);
        let command = Arc::new(move |hw: &mut HwQueue<F::Driver>, cx: &mut F::Cx| command(&remembered, hw, cx));
        let mut calls = Vec::new();
        state.queues.iter().for_each(|open| open.shared.obtain(&command, &mut calls, clock));
    }
}

/// Creates queues and parkers, without changing the disk.
fn make<F: QueueFactory>(
    factory: &mut F,
    counts: QueueCounts,
    kinds: &[QueueKind],
    threads: usize,
) -> Result<Made<F>, F::Error> {
    let maps = QueueMaps::even(threads, counts.ranges());
    let mut users: Vec<Vec<usize>> = (0..counts.total()).map(|_| Vec::new()).collect();
    let queues_of = |thread| kinds.iter().map(move |kind| (*kind, thread));
    for (user, (kind, thread)) in (0..threads).flat_map(queues_of).enumerate() {
        users[maps.queue_of(kind, thread)].push(user);
    }
    let mut queues = Vec::with_capacity(users.len());
    for (number, users) in users.iter().enumerate() {
        let kind = maps.kind_of(number).unwrap_or_default();
        let (hw, cx) = factory.queue(kind, number, users.len())?;
        queues.push((hw, cx, kind));
    }
    let mut parkers = Vec::with_capacity(threads);
    for thread in 0..threads {
        let beside: Vec<_> = kinds.iter().map(|kind| &queues[maps.queue_of(*kind, thread)].1).collect();
        parkers.push(factory.parker(&beside)?);
    }
    let closers = queues.iter().map(|(_, cx, _)| factory.parker(&[cx])).collect::<Result<_, _>>()?;
    Ok(Made { queues, users, parkers, closers })
}

/// Gives the queues their members: by thread and kind.
fn submitter<F: QueueFactory>(made: Made<F>, members: Vec<Member>, kinds: usize) -> Vec<Open<F>> {
    let Made { queues, users, parkers, closers } = made;
    let mut members: Vec<_> = members.into_iter().map(Some).collect();
    queues
        .into_iter()
        .zip(users)
        .zip(closers)
        .map(|(((hw, cx, kind), users), closer)| {
            let here = users.iter().filter_map(|user| members[*user].take()).collect();
            let parker = |user: &usize| (Arc::clone(&parkers[user / kinds]), user % kinds);
            let parkers = users.iter().map(parker).chain([(closer, 0)]).collect();
            let shared = SharedHwQueue::open(hw, cx, here, parkers, kind == QueueKind::Poll);
            Open { kind, shared: Arc::new(shared), users }
        })
        .collect()
}

/// One thread's way to a [`SharedDisk`].
///
/// Made by [`SharedDisk::open`], then moved to its thread. Before it goes it must [leave](SharedSubmitter::leave).
pub struct SharedSubmitter<D, Cx> {
    /// For each kind that the disk has queues for, in order.
    ends: Vec<SwQueue<D, Cx>>,
    /// By kind: which of them serves it.
    end_of: [Option<usize>; 3],
    /// Bios that it may have out, of all kinds together.
    places: usize,
    /// Bios refused before they entered a ring, to be returned.
    refused: Vec<Box<Bio>>,
    /// The queues are being changed.
    frozen: Arc<AtomicBool>,
}

impl<D: Driver<Cx>, Cx: Context> SharedSubmitter<D, Cx> {
    /// How many more bios may be submitted before one comes back.
    #[inline]
    pub fn room(&self) -> usize {
        self.places - self.in_flight()
    }

    /// Bios submitted and not given back.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.refused.len() + self.ends.iter().map(SwQueue::in_flight).sum::<usize>()
    }

    /// Adds a bio to this thread's plug, for a queue of its kind; it becomes visible with [`SharedSubmitter::ring`]. It
    /// always comes back through [`SharedSubmitter::poll`] or [`SharedSubmitter::wait`]: with [`Status::NotSupported`]
    /// if it is polled and there are no poll queues, with [`Status::Again`] if it must not wait while the queues are
    /// being changed.
    ///
    /// # Panics
    /// Without [room](SharedSubmitter::room): the caller needs a free slot before it creates a request.
    #[inline]
    pub fn submit(&mut self, bio: Box<Bio>) {
        assert!(self.room() > 0, "a bio was submitted without a place");
        let kind = QueueKind::of(bio.op, bio.flags.contains(BioFlags::POLLED));
        match self.end_of[kind as usize] {
            Some(_) if bio.flags.contains(BioFlags::NOWAIT) && self.frozen.load(Ordering::Relaxed) => {
                self.refuse(bio, Status::Again);
            }
            Some(end) => self.ends[end].submit(bio),
            None => self.refuse(bio, Status::NotSupported),
        }
    }

    #[inline(never)]
    fn refuse(&mut self, mut bio: Box<Bio>, status: Status) {
        bio.status = status;
        self.refused.push(bio);
    }

    /// Makes submitted bios visible, and dispatches them, or leaves that to the thread that runs the queue.
    #[inline]
    pub fn ring(&mut self, clock: &impl Fn() -> u64) {
        self.ends.iter_mut().for_each(|end| end.ring(clock));
    }

    /// Returns completed bios, without waiting. Runs the queues if none has completed and no other thread runs them.
    /// Returns the number of bios.
    #[inline]
    pub fn poll(&mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let mut ended = self.give_back_refused(sink);
        for end in &mut self.ends {
            ended += end.poll(clock, sink);
        }
        ended
    }

    /// Makes submitted bios visible and sleeps until at least one bio completes. Returns the number of completed bios:
    /// 0 only if none is in flight.
    ///
    /// A thread with bios in flight on a poll queue does not sleep: it polls, and yields the CPU now and then.
    pub fn wait(&mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        if !self.refused.is_empty() {
            self.ring(clock);
            return self.give_back_refused(sink);
        }
        let mut busy = self.ends.iter_mut().filter(|end| end.in_flight() > 0);
        match (busy.next(), busy.next()) {
            (None, _) => 0,
            (Some(end), None) => end.wait(clock, sink),
            _ => self.wait_for_any(clock, sink),
        }
    }

    /// Leaves: waits until all bios of this thread are given back. The same holds as for [`SwQueue::leave`].
    pub fn leave(mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) {
        while self.wait(clock, sink) > 0 {}
    }

    #[inline]
    fn give_back_refused(&mut self, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let count = self.refused.len();
        self.refused.drain(..).for_each(sink);
        count
    }

    /// Sleeps on several queues at once: lies down at each, and gets up from all.
    #[inline(never)]
    fn wait_for_any(&mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        if self.ends.iter().any(|end| end.is_polled() && end.in_flight() > 0) {
            return self.poll_for_any(clock, sink);
        }
        // Also if a bio has completed already: an owner runs the queue only for threads that have set their pending
        // bit.
        self.ring(clock);
        let mut lies = [false; 3];
        loop {
            if self.ends.iter_mut().any(SwQueue::has_completed) {
                // Also after a completion: an owner that served us before it saw our announcement would record us as
                // asleep after. Before `sink` is called, which may panic.
                self.ends.iter_mut().zip(lies).filter(|(_, lies)| *lies).for_each(|(end, _)| end.unpark(clock));
                return self.ends.iter_mut().map(|end| end.drain(sink)).sum();
            }
            let (mut again, mut closed) = (false, None);
            // Where this thread keeps watch: nowhere, at one queue, or at several; and until when.
            let mut watch: Option<(Option<usize>, u64)> = None;
            for (index, end) in self.ends.iter_mut().enumerate().filter(|(_, end)| end.in_flight() > 0) {
                let turn = end.prepare_park(clock);
                lies[index] = matches!(turn, BatonOutcome::Owned | BatonOutcome::Park | BatonOutcome::Watch(_));
                match turn {
                    BatonOutcome::Ran => again = true,
                    BatonOutcome::Closed => closed = Some(index),
                    BatonOutcome::Watch(due_ns) => {
                        watch = Some(watch.map_or((Some(index), due_ns), |(_, until_ns)| (None, until_ns.min(due_ns))));
                    }
                    BatonOutcome::Owned | BatonOutcome::Park => {}
                }
            }
            if again {
                continue;
            }
            // A thread has one parker for all its queues. Only while its rings move to new queues, one after the other,
            // there may be an old and a new one; the moving thread wakes the old one at the end.
            let parker = closed.map_or_else(|| self.parker(), |index| self.ends[index].parker());
            match watch {
                None => parker.sleep(),
                Some((Some(index), until_ns)) => parker.watch_one(index, until_ns),
                Some((None, until_ns)) => parker.watch(until_ns),
            }
        }
    }

    /// The parker of the queues that this thread waits for.
    fn parker(&self) -> &Arc<dyn Parker> {
        let busy = self.ends.iter().find(|end| end.in_flight() > 0);
        busy.unwrap_or(&self.ends[0]).parker()
    }

    #[inline(never)]
    fn poll_for_any(&mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        self.ring(clock);
        loop {
            for _ in 0..POLLS_MAX {
                let ended = self.ends.iter_mut().map(|end| end.poll(clock, sink)).sum();
                if ended > 0 {
                    return ended;
                }
            }
            self.parker().give_way();
        }
    }
}

impl<F: QueueFactory> std::fmt::Debug for SharedDisk<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedDisk").field("threads", &self.threads).field("kinds", &self.kinds).finish_non_exhaustive()
    }
}

impl<D, Cx> std::fmt::Debug for SharedSubmitter<D, Cx> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Submitter").field("ends", &self.ends).field("places", &self.places).finish_non_exhaustive()
    }
}
