//! A set of lanes, and the placement of pollers on them.
//!
//! Lanes are started and retired, and pollers moved from one to another, while all of them work. To move, a poller is
//! drained on its lane, detached, admitted to the other lane, and continues there. Only pollers whose lane changes
//! move, one at a time, so that the others continue meanwhile.
//!
//! Owned by the control plane; its calls wait for the lanes, each for a bounded time. It knows neither the content of a
//! poller nor the lane that suits it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blkyard_mq::{IdlePolicy, Poller};

use crate::lane_thread::{LaneConfig, LaneError, LaneThread, spawn};
use crate::ring::Ring;

/// Time limit for draining a poller, after which it stays on its lane. A healthy disk needs milliseconds; a guest gives
/// up on a request after thirty seconds, and its queue should fetch again before that.
const REST_MAX: Duration = Duration::from_secs(10);

/// Lanes and where their pollers live.
pub struct Lanes<S> {
    config: Box<dyn Fn(usize) -> LaneConfig + Send + Sync>,
    threads: Vec<LaneThread<S>>,
    /// The lane of each poller, by the poller's number.
    places: BTreeMap<u32, usize>,
    /// Number of the next poller. Numbers are not reused.
    next: u32,
    rest_max: Duration,
    /// Idle policy set after start, for all lanes.
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
            policy: None,
        };
        lanes.grow(count)?;
        Ok(lanes)
    }

    /// Has a new poller live on a lane; it is made there. Returns its number: pollers are numbered in the order they
    /// come.
    ///
    /// # Errors
    /// The lane is full, or has ended.
    ///
    /// # Panics
    /// If there is no such lane.
    pub fn admit(&mut self, lane: usize, make: impl FnOnce() -> S + Send + 'static) -> Result<u32, LaneError> {
        self.check(lane, self.places.values().filter(|place| **place == lane).count() + 1)?;
        let number = self.next;
        self.threads[lane].admit(number, Box::new(make))?;
        self.next += 1;
        self.places.insert(number, lane);
        Ok(number)
    }

    /// Drains and removes a poller from its lane, and returns it. `None` without a poller of this number.
    ///
    /// # Errors
    /// It does not drain, and stays; or the lane has ended, and the poller with it.
    pub fn remove(&mut self, number: u32) -> Result<Option<S>, LaneError> {
        let Some(&lane) = self.places.get(&number) else { return Ok(None) };
        let removed = self.threads[lane].release(number, self.rest_max);
        if !matches!(removed, Err(LaneError::Restless { .. })) {
            self.places.remove(&number);
        }
        removed.map(Some)
    }

    /// Changes the number of lanes to `count`, and moves each poller to the lane that `place` returns for its number.
    /// Lanes are started first, then pollers move, then lanes are retired; pollers continue, except for the time of
    /// their own move.
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
        self.threads.drain(count..).try_for_each(LaneThread::join)?;
        Ok(moves)
    }

    /// Moves one poller to another lane; returns the length of its pause.
    fn carry(&mut self, poller: u32, from: usize, to: usize) -> Result<Duration, LaneError> {
        let (old, new) = (&self.threads[from], &self.threads[to]);
        let start = Instant::now();
        let carried = old.release(poller, self.rest_max)?;
        self.places.insert(poller, to);
        new.admit(poller, Box::new(move || carried))?;
        Ok(start.elapsed())
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

    /// Sets the time without work before a sleep, for all present and later lanes.
    ///
    /// # Errors
    /// A lane has ended. The others have the new policy.
    pub fn set_policy(&mut self, policy: IdlePolicy) -> Result<(), LaneError> {
        self.policy = Some(policy);
        let told: Vec<_> = self.threads.iter().map(|lane| lane.set_policy(policy)).collect();
        told.into_iter().collect()
    }

    /// Sets the time limit for draining a poller that moves.
    pub fn set_rest_max(&mut self, rest_max: Duration) {
        self.rest_max = rest_max;
    }

    /// Waits until all pollers and lanes have ended.
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
