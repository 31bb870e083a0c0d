//! A set of lanes, and the placement of pollers on them.
//!
//! Lanes are started and retired, and pollers moved from one to another, while all of them work. To move, a poller is
//! drained on its lane, detached, admitted to the other lane, and continues there. Only pollers whose place changes
//! move, one at a time, so that the others continue meanwhile.
//!
//! Owned by the control plane; its calls wait for the lanes, each for a bounded time. It does not know what a poller
//! is, nor which lane suits it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blkyard_mq::{IdlePolicy, Poller};

use crate::lane_thread::{LaneConfig, LaneError, LaneThread, spawn};
use crate::ring::Ring;

/// How long a poller may take to come to rest before it is let stay where it is. A healthy disk needs milliseconds; a
/// guest gives up on a request after thirty seconds, and should find its queue fetching again before.
const REST_MAX: Duration = Duration::from_secs(10);

/// Lanes and where their pollers live.
pub struct Lanes<S> {
    config: Box<dyn Fn(usize) -> LaneConfig + Send + Sync>,
    threads: Vec<LaneThread<S>>,
    /// The lane of each poller, by the poller's number.
    places: BTreeMap<u32, usize>,
    /// Number of the next poller. None is given twice.
    next: u32,
    rest_max: Duration,
    /// What was decided since about sleep, for all of them.
    policy: Option<IdlePolicy>,
}

/// What re-dealing came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// Pollers that live elsewhere now.
    pub count: usize,
    /// The longest that one was on its way: from when it was asked to come to rest until it went on.
    pub longest: Duration,
}

impl<S: Poller<Ring> + Send + 'static> Lanes<S> {
    /// Starts `count` lanes without pollers. Lane `n`, now or later, is made as `config(n)` says.
    ///
    /// # Errors
    /// One of them cannot be started; then none is.
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

    /// Takes a poller off its lane for good: it comes to rest, and here it is. None if there is none of this number.
    ///
    /// # Errors
    /// It does not come to rest, and stays; or the lane has ended, and the poller with it.
    pub fn remove(&mut self, number: u32) -> Result<Option<S>, LaneError> {
        let Some(&lane) = self.places.get(&number) else { return Ok(None) };
        let removed = self.threads[lane].release(number, self.rest_max);
        if !matches!(removed, Err(LaneError::Restless { .. })) {
            self.places.remove(&number);
        }
        removed.map(Some)
    }

    /// Changes the number of lanes to `count`, and has each poller live where `place` says, given its number. Lanes
    /// are started first, then pollers move, then lanes are retired; pollers go on working all the while, but for the
    /// moment they move.
    ///
    /// # Errors
    /// A lane cannot be started or would be full: nothing has changed. A poller does not come to rest, or a lane has
    /// ended: what has moved lives where it should, the rest where it did, and no lane is retired; trying again does
    /// what is left.
    ///
    /// # Panics
    /// If there are to be no lanes, or `place` names one that is not to be.
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

    /// Moves one poller to another lane; says how long it rested.
    fn carry(&mut self, poller: u32, from: usize, to: usize) -> Result<Duration, LaneError> {
        let (old, new) = (&self.threads[from], &self.threads[to]);
        let start = Instant::now();
        let carried = old.release(poller, self.rest_max)?;
        self.places.insert(poller, to);
        new.admit(poller, Box::new(move || carried))?;
        Ok(start.elapsed())
    }

    /// Starts the lanes that are missing, or none.
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

    /// The lane of a poller; none if there is none of this number.
    pub fn place(&self, number: u32) -> Option<usize> {
        self.places.get(&number).copied()
    }

    /// How a lane is made, whether it runs or not, and with what was decided since.
    pub fn config(&self, lane: usize) -> LaneConfig {
        let made = (self.config)(lane);
        LaneConfig { policy: self.policy.unwrap_or(made.policy), ..made }
    }

    /// Changes how long all lanes, those to come among them, turn without work before they sleep.
    ///
    /// # Errors
    /// A lane has ended. The others do as they are told.
    pub fn set_policy(&mut self, policy: IdlePolicy) -> Result<(), LaneError> {
        self.policy = Some(policy);
        let told: Vec<_> = self.threads.iter().map(|lane| lane.set_policy(policy)).collect();
        told.into_iter().collect()
    }

    /// How long a poller may take to come to rest when it is to move.
    pub fn set_rest_max(&mut self, rest_max: Duration) {
        self.rest_max = rest_max;
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
