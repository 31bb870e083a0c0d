//! A set of lanes, and the placement of pollers on them.
//!
//! Lanes are started and retired, and pollers moved from one to another, while all of them work. To move, a poller is
//! drained on its lane, detached, admitted to the other lane, and continues there. Only pollers whose lane changes
//! move, one at a time, so that the others continue meanwhile.
//!
//! Owned by the control plane; its calls wait for the lanes, each for a bounded time. What begins with `begin_` waits
//! for nothing: several threads can share the set under a lock, and wait for a lane without it. It does not know what a
//! poller is, nor which lane suits it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blkyard_mq::{IdlePolicy, Poller};

use crate::lane_thread::{
    Admission, LaneConfig, LaneError, LaneThread, MakePoller, NotAdmitted, PolicyChange, Release, spawn,
};
use crate::ring::Ring;

/// How long a poller may take to come to rest before it is let stay where it is. A healthy disk needs milliseconds; a
/// guest gives up on a request after thirty seconds, and should find its queue fetching again before.
pub const REST_MAX: Duration = Duration::from_secs(10);
/// How long a lane may take to look at its commands. One that turns does so within milliseconds, one that sleeps is
/// woken; a driver that blocks holds it up.
pub const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Lanes and where their pollers live.
pub struct Lanes<S> {
    config: Box<dyn Fn(usize) -> LaneConfig + Send + Sync>,
    threads: Vec<LaneThread<S>>,
    /// The lane of each poller, by the poller's number.
    places: BTreeMap<u32, usize>,
    /// Number of the next poller. Numbers are not reused.
    next: u32,
    rest_max: Duration,
    answer_max: Duration,
    /// What was decided since about sleep, for all of them.
    policy: Option<IdlePolicy>,
}

/// Result of a new placement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// Pollers that live elsewhere now.
    pub count: usize,
    /// Longest move of a poller: from the request to drain until it continued.
    pub longest: Duration,
}

impl<S: Poller<Ring> + Send + 'static> Lanes<S> {
    /// Starts `count` lanes without pollers. Lane `n`, now or later, is made as `config(n)` says.
    ///
    /// # Errors
    /// A lane cannot be started; then none runs.
    pub fn start(
        count: usize,
        config: impl Fn(usize) -> LaneConfig + Send + Sync + 'static,
    ) -> Result<Lanes<S>, LaneError> {
        let mut lanes = Lanes {
            config: Box::new(config),
            threads: Vec::new(),
            places: BTreeMap::new(),
            next: 0,
            rest_max: REST_MAX,
            answer_max: ANSWER_MAX,
            policy: None,
        };
        lanes.grow(count)?;
        Ok(lanes)
    }

    /// Has a new poller live on a lane; it is made there. Returns its number: pollers are numbered in the order they
    /// come.
    ///
    /// # Errors
    /// The lane is full, has ended, or does not respond.
    ///
    /// # Panics
    /// If there is no such lane.
    pub fn admit(&mut self, lane: usize, make: impl FnOnce() -> S + Send + 'static) -> Result<u32, LaneError> {
        let number = self.reserve(lane)?;
        match self.begin_admit(number, Box::new(make)).wait(self.answer_max) {
            Ok(()) => Ok(number),
            Err(NotAdmitted { error, .. }) => {
                self.forget(number);
                Err(error)
            }
        }
    }

    /// Keeps room on a lane for a new poller; says its number. It is to be [admitted](Lanes::begin_admit) or
    /// [forgotten](Lanes::forget).
    ///
    /// # Errors
    /// The lane is full.
    ///
    /// # Panics
    /// If there is no such lane.
    pub fn reserve(&mut self, lane: usize) -> Result<u32, LaneError> {
        self.check_one_more(lane)?;
        let number = self.next;
        self.next += 1;
        self.places.insert(number, lane);
        Ok(number)
    }

    /// Sends a poller to its lane. If it is not admitted there, it is to be forgotten, or [placed](Lanes::place_on) and
    /// sent elsewhere.
    ///
    /// # Panics
    /// If there is none of this number.
    pub fn begin_admit(&self, number: u32, make: MakePoller<S>) -> Admission<S> {
        self.threads[self.places[&number]].begin_admit(number, make)
    }

    /// The place of a poller is on another lane from now on.
    pub fn place_on(&mut self, number: u32, lane: usize) {
        self.places.insert(number, lane);
    }

    /// A poller is gone, or was never there.
    pub fn forget(&mut self, number: u32) {
        self.places.remove(&number);
    }

    /// Takes a poller off its lane for good: it comes to rest, and here it is. None if there is none of this number.
    ///
    /// # Errors
    /// It does not come to rest, or its lane does not respond, and it stays; or the lane has ended, and the poller with
    /// it.
    pub fn remove(&mut self, number: u32) -> Result<Option<S>, LaneError> {
        let Some(release) = self.begin_release(number) else { return Ok(None) };
        let removed = release.wait(self.rest_max, self.answer_max);
        if removed.as_ref().map_or_else(LaneError::is_poller_gone, |_| true) {
            self.forget(number);
        }
        removed.map(Some)
    }

    /// Asks a poller to leave its lane. Once it has, it is to be [forgotten](Lanes::forget). None if there is none of
    /// this number.
    pub fn begin_release(&self, number: u32) -> Option<Release<S>> {
        Some(self.threads[self.place(number)?].begin_release(number))
    }

    /// The same for a poller that is to go to another lane. That is its place from now on: if it does not leave, it is
    /// to be [placed](Lanes::place_on) where it was.
    ///
    /// # Errors
    /// The other lane is full.
    ///
    /// # Panics
    /// If there is no such poller or lane.
    pub fn begin_carry(&mut self, number: u32, to: usize) -> Result<Release<S>, LaneError> {
        self.check_one_more(to)?;
        let release = self.threads[self.places[&number]].begin_release(number);
        self.places.insert(number, to);
        Ok(release)
    }

    /// Changes the number of lanes to `count`, and has each poller live where `place` says, given its number. Lanes
    /// are started first, then pollers move, then lanes are retired; pollers go on working all the while, but for the
    /// moment they move.
    ///
    /// # Errors
    /// A lane cannot be started or would be full: nothing has changed. A poller does not drain, or a lane has ended:
    /// earlier moves stay, the rest is where it was, and no lane is retired; another call completes the change.
    ///
    /// # Panics
    /// If `count` is 0, or `place` returns a lane beyond it.
    pub fn deal(&mut self, count: usize, place: impl Fn(usize) -> usize) -> Result<Moves, LaneError> {
        let wanted: Vec<_> = self.places.iter().map(|(&poller, &is)| (poller, is, place(poller as usize))).collect();
        assert!(count > 0 && wanted.iter().all(|(_, _, to)| *to < count), "dealt to lanes that are not to be");
        let mut pollers = vec![0; count];
        for (_, is, to) in &wanted {
            // Those to come may all be there before any has gone.
            pollers[*to] += 1;
            if is != to && *is < count {
                pollers[*is] += 1;
            }
        }
        pollers.into_iter().enumerate().try_for_each(|(lane, pollers)| self.check(lane, pollers))?;
        self.grow(count)?;
        let mut moves = Moves::default();
        for (poller, is, to) in wanted {
            if is != to {
                moves.longest = moves.longest.max(self.carry(poller, is, to)?);
                moves.count += 1;
            }
        }
        self.set_count(count)?.into_iter().try_for_each(LaneThread::join)?;
        Ok(moves)
    }

    /// Starts lanes, or takes the last ones off, without any of their pollers moving: one that has pollers stays. Those
    /// taken off are to be joined.
    ///
    /// # Errors
    /// A lane cannot be started: nothing has changed.
    pub fn set_count(&mut self, count: usize) -> Result<Vec<LaneThread<S>>, LaneError> {
        self.grow(count)?;
        let used = self.places.values().max().map_or(0, |lane| lane + 1);
        Ok(self.threads.split_off(count.max(used)))
    }

    /// Moves one poller to another lane; returns the length of its pause.
    fn carry(&mut self, poller: u32, from: usize, to: usize) -> Result<Duration, LaneError> {
        let start = Instant::now();
        let carried = match self.begin_carry(poller, to)?.wait(self.rest_max, self.answer_max) {
            Ok(carried) => carried,
            Err(error) => {
                self.place_on(poller, from);
                return Err(error);
            }
        };
        let admission = self.begin_admit(poller, Box::new(move || carried));
        let Err(NotAdmitted { error, make }) = admission.wait(self.answer_max) else { return Ok(start.elapsed()) };
        if let Some(make) = make {
            // Back to where it came from.
            self.place_on(poller, from);
            self.begin_admit(poller, make).wait(self.answer_max).map_err(|refused| refused.error)?;
        }
        Err(error)
    }

    /// Starts all missing lanes, or none.
    fn grow(&mut self, count: usize) -> Result<(), LaneError> {
        let mut more = Vec::new();
        for number in self.threads.len()..count {
            more.push(spawn(self.config(number), |_| Vec::new())?);
        }
        self.threads.append(&mut more);
        Ok(())
    }

    /// Whether a lane has room for one more poller.
    fn check_one_more(&self, lane: usize) -> Result<(), LaneError> {
        self.check(lane, self.places.values().filter(|place| **place == lane).count() + 1)
    }

    fn check(&self, lane: usize, pollers: usize) -> Result<(), LaneError> {
        let wanted = || (self.config)(lane).ring.pollers_max as usize;
        let max = self.threads.get(lane).map_or_else(wanted, |lane| lane.ring().pollers_max());
        if pollers <= max {
            return Ok(());
        }
        Err(LaneError::Pollers { name: (self.config)(lane).name, count: pollers, max })
    }
}

impl<S> Lanes<S> {
    /// The lanes, by their number.
    pub fn threads(&self) -> &[LaneThread<S>] {
        &self.threads
    }

    /// The lane of each poller that lives, in the order they came.
    pub fn places(&self) -> Vec<usize> {
        self.places.values().copied().collect()
    }

    /// Lane of a poller; `None` without a poller of this number.
    pub fn place(&self, number: u32) -> Option<usize> {
        self.places.get(&number).copied()
    }

    /// Configuration of a lane, running or not, with later settings.
    pub fn config(&self, lane: usize) -> LaneConfig {
        let made = (self.config)(lane);
        LaneConfig { policy: self.policy.unwrap_or(made.policy), ..made }
    }

    /// Changes how long all lanes, those to come among them, turn without work before they sleep.
    pub fn set_policy(&mut self, policy: IdlePolicy) -> PolicyChange {
        self.policy = Some(policy);
        PolicyChange::of(self.threads.iter().map(|lane| lane.set_policy(policy)))
    }

    /// Sets the time limit for draining a poller that moves.
    pub fn set_rest_max(&mut self, rest_max: Duration) {
        self.rest_max = rest_max;
    }

    /// How long a lane may take to look at its commands.
    pub fn set_answer_max(&mut self, answer_max: Duration) {
        self.answer_max = answer_max;
    }

    /// Waits until all pollers are over, and the lanes have ended.
    ///
    /// # Errors
    /// One of them panicked; the others have ended all the same.
    pub fn join(self) -> Result<(), LaneError> {
        let ends: Vec<_> = self.threads.into_iter().map(LaneThread::join).collect();
        ends.into_iter().collect()
    }
}

impl<S> std::fmt::Debug for Lanes<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lanes").field("threads", &self.threads).field("places", &self.places).finish_non_exhaustive()
    }
}
