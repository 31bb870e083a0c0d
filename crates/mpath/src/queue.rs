//! A queue over several paths, as the driver of a hardware queue: one driver for each path.
//!
//! Each request is given to the driver of one path, by the lane's own policy. Tags, splitting, merging and flushes are
//! those of the hardware queue above, whose limits are those of all paths.
//!
//! ```text
//!   HwQueue ─ batch ─▶ choose ─┬─▶ part 0 ─▶ driver of path 0
//!      ▲                       └─▶ part 1 ─▶ driver of path 1
//!      └─ done, requeued ◀─ ends ◀────────────┘
//!               held: no path, or a write that is not fenced
//! ```
//!
//! Rules of failover:
//!
//! * A request that a path gives back is requeued: it is offered again ahead of all later ones, and chosen for anew. A
//!   write that the path may still execute is held until the path's [`PathMonitor`] has the proof.
//! * It fails in place of being offered again if its commands are cancelled each time ([`Cancellations`]).
//! * A failure that another path may not have ([`Retry`]) is treated the same. A request fails so often as there are
//!   paths; path errors are not counted, since a path whose access changes returns them for all I/O. A write that the
//!   device may execute although it failed ends with that failure: its path lives on, and no proof would come.
//! * Without a usable path requests are held, up to `no_path_ns`, or until no path can come back.
//! * A path without monitor has no proof: its writes go to it again if it gives them back.
//! * A driver that takes nothing although it has nothing in flight, or returns a path error, is avoided for a while.
//!
//! A read that is late on its path is sent to another one as well, if that is [set](PathRules::hedged_reads).

mod hedging;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use blkyard_mq::{
    Batch, BatchPart, BufferId, Cancellations, Done, Driver, OpClass, PathGeneration, RegionTable, RegisteredBuffer,
    Retry, Shortage, Status, Tag, TakenRequest, TimedOut, UnfencedRequest,
};

use crate::hedged::HedgedReads;
use crate::policy::{PathChoice, PathIo, PathPolicy};
use crate::stats::{MultipathStats, PathCounters};
use crate::{ConnectionState, MultipathSettings, PathMonitor, PathRules, PathSet, PathState, PolicyKind};

/// How long a path is avoided whose driver takes nothing, ns: a connection that is being set up.
const REFUSED_NS: u64 = 5_000_000;
/// How long a path is avoided that returned a path error, ns. Its owner learns the new state meanwhile.
const PATH_ERROR_NS: u64 = 100_000_000;
/// Interval of looks at held requests, ns.
const HELD_LOOK_NS: u64 = 2_000_000;
/// Longest wait for a proof, ns; far above keep-alive and quiesce time.
const FENCE_MAX_NS: u64 = 60_000_000_000;
/// No path has the request.
const NOWHERE: u8 = u8::MAX;

/// One path of a queue, as it is added.
#[derive(Debug)]
pub struct QueuePath<D> {
    /// Driver of the path's queue, of at least the depth of the hardware queue.
    pub driver: D,
    /// State of the path; unset for one that is always usable and has no proofs.
    pub monitor: Option<Arc<PathMonitor>>,
    /// NUMA node of its port.
    pub node: u16,
}

#[derive(Debug)]
struct PathQueue<D> {
    driver: D,
    monitor: Option<Arc<PathMonitor>>,
    part: BatchPart,
    /// Changes of the monitor that were seen.
    seen: u32,
    /// Until when it is avoided, ns; zero for not.
    avoided_ns: u64,
    usage: PathUsage,
}

#[derive(Debug, Default)]
struct PathUsage {
    counters: PathCounters,
    /// Whether the counters are not published.
    is_changed: bool,
}

impl PathUsage {
    /// A request has left the path's driver.
    #[inline]
    fn left(&mut self, requests: u64) {
        self.counters.in_flight -= requests;
        self.is_changed = true;
    }

    /// Records the end of the request in a slot, if it is final.
    #[inline]
    fn finish(
        &mut self,
        slot: usize,
        known: &mut RequestPath,
        policy: &mut dyn PathPolicy,
        hedges: &mut Option<Box<HedgedReads>>,
        status: Status,
        now_ns: u64,
    ) -> bool {
        if !matches!(status.retry(), Retry::Never | Retry::Later) {
            return false;
        }
        known.path = NOWHERE;
        self.left(1);
        self.counters.ios += 1;
        if let Some(choice) = known.choice.take() {
            self.counters.latency_ns += now_ns.saturating_sub(choice.start_ns);
            policy.complete(choice, now_ns);
        }
        if let Some(hedges) = hedges {
            hedges.answered(slot, now_ns);
        }
        true
    }
}

impl<D> PathQueue<D> {
    /// Its state: that of its monitor, or connecting while it is avoided.
    fn state(&self) -> PathState {
        let state = self.monitor.as_ref().map_or_else(PathState::default, |monitor| monitor.state());
        match state.connection {
            ConnectionState::Live if self.avoided_ns > 0 => {
                PathState { connection: ConnectionState::Connecting, ..state }
            }
            _ => state,
        }
    }
}

/// What is known of the request in a slot.
#[derive(Debug)]
struct RequestPath {
    /// Path whose driver has it, or is offered it.
    path: u8,
    /// The only path that it may go to.
    pinned: u8,
    /// Failures that count.
    failures: u8,
    /// Commands that lost paths have cancelled.
    cancelled: Cancellations,
    /// Begin of its wait for a path that executes it, ns: its last return from a lost path, else its first failure or
    /// hold; zero for none.
    since_ns: u64,
    /// For the policy that made it.
    choice: Option<PathChoice>,
}

impl RequestPath {
    const NEW: RequestPath = RequestPath {
        path: NOWHERE,
        pinned: NOWHERE,
        failures: 0,
        cancelled: Cancellations::NONE,
        since_ns: 0,
        choice: None,
    };
}

#[derive(Debug)]
enum HeldRequest {
    /// For a usable path.
    Free(Tag),
    /// For the proof that its path executes it no more.
    Unfenced(UnfencedRequest),
}

/// One queue over several paths. `E` is the descriptor that is readable when a path's eventfd is.
#[derive(Debug)]
pub struct MultipathQueue<D, E = OwnedFd> {
    paths: Vec<PathQueue<D>>,
    states: PathSet,
    settings: Arc<MultipathSettings>,
    /// The rules that it follows, and changes of the settings that it has seen.
    rules: PathRules,
    seen_settings: u32,
    policy: Box<dyn PathPolicy>,
    node: u16,
    /// By slot.
    requests: Box<[RequestPath]>,
    held: Vec<HeldRequest>,
    held_look_ns: u64,
    /// Whether a path is avoided.
    has_avoided: bool,
    /// Unset unless reads are hedged, or were.
    hedges: Option<Box<HedgedReads>>,
    stats: Arc<MultipathStats>,
    eventfd: Option<E>,
}

impl<D, E> MultipathQueue<D, E> {
    /// A queue of this depth over these paths, on a lane at this NUMA node. `eventfd` is readable when an eventfd of a
    /// path's driver is.
    ///
    /// # Panics
    /// If there is no path, or there are more than [`PATHS_MAX`](crate::PATHS_MAX).
    pub fn new(
        paths: Vec<QueuePath<D>>,
        settings: Arc<MultipathSettings>,
        depth: usize,
        node: u16,
        eventfd: Option<E>,
    ) -> MultipathQueue<D, E> {
        assert!(!paths.is_empty(), "a queue of no path");
        let mut states = PathSet::new();
        let queue_of = |path: QueuePath<D>| {
            let QueuePath { driver, monitor, node } = path;
            let mut queue = PathQueue {
                driver,
                monitor,
                part: BatchPart::new(depth),
                seen: 0,
                avoided_ns: 0,
                usage: PathUsage::default(),
            };
            queue.seen = queue.monitor.as_ref().map_or(0, |monitor| monitor.changes());
            assert!(states.add(queue.state(), node).is_some(), "a queue of too many paths");
            queue
        };
        let paths = paths.into_iter().map(queue_of).collect();
        let seen_settings = settings.changes();
        let rules = settings.rules();
        MultipathQueue {
            paths,
            states,
            settings,
            rules,
            seen_settings,
            policy: rules.policy.build(rules.tracker),
            node,
            requests: (0..depth).map(|_| RequestPath::NEW).collect(),
            held: Vec::with_capacity(depth),
            held_look_ns: 0,
            has_avoided: false,
            hedges: rules.hedged_reads.map(|config| Box::new(HedgedReads::new(config, depth))),
            stats: Arc::default(),
            eventfd,
        }
    }

    /// Its counters, readable by anyone.
    pub fn stats(&self) -> &Arc<MultipathStats> {
        &self.stats
    }

    /// The states of its paths.
    pub fn states(&self) -> &PathSet {
        &self.states
    }

    /// Takes over changes of states and of the policy.
    #[inline]
    fn look_at_changes(&mut self, now_ns: u64) {
        let changed = |path: &PathQueue<D>| path.monitor.as_ref().is_some_and(|seen| seen.changes() != path.seen);
        let is_set = self.seen_settings == self.settings.changes();
        if self.has_avoided || !is_set || self.paths.iter().any(changed) {
            self.take_changes(now_ns);
        }
    }

    #[cold]
    fn take_changes(&mut self, now_ns: u64) {
        let changes = self.settings.changes();
        if self.seen_settings != changes {
            self.seen_settings = changes;
            self.follow(self.settings.rules());
        }
        self.has_avoided = false;
        for (number, path) in self.paths.iter_mut().enumerate() {
            if let Some(monitor) = &path.monitor {
                let changes = monitor.changes();
                if std::mem::replace(&mut path.seen, changes) != changes {
                    // It is told anew what the path can do.
                    path.avoided_ns = 0;
                }
            }
            if path.avoided_ns <= now_ns {
                path.avoided_ns = 0;
            }
            self.has_avoided |= path.avoided_ns > 0;
            let state = path.state();
            if self.states.state(number) != Some(state) {
                self.states.set_state(number, state);
            }
        }
    }

    #[cold]
    fn follow(&mut self, rules: PathRules) {
        let PathRules { policy, tracker, hedged_reads } = std::mem::replace(&mut self.rules, rules);
        let is_other_tracker = policy == PolicyKind::Latency && tracker != rules.tracker;
        if policy != rules.policy || is_other_tracker {
            self.policy = rules.policy.build(rules.tracker);
            // The new policy has not made these.
            self.requests.iter_mut().for_each(|request| request.choice = None);
            self.hedges.iter_mut().for_each(|hedges| hedges.forget_choices());
        }
        if hedged_reads != rules.hedged_reads {
            match (&mut self.hedges, rules.hedged_reads) {
                (Some(hedges), config) => hedges.follow(config),
                (None, Some(config)) => self.hedges = Some(Box::new(HedgedReads::new(config, self.requests.len()))),
                (None, None) => {}
            }
        }
    }

    #[cold]
    fn avoid(&mut self, path: usize, until_ns: u64) {
        let avoided = &mut self.paths[path];
        avoided.avoided_ns = avoided.avoided_ns.max(until_ns);
        self.has_avoided = true;
        self.states.set_state(path, self.paths[path].state());
    }

    /// Gives each request of a batch to a path. Requests without a usable path are held.
    #[inline]
    fn assign(&mut self, batch: &mut Batch<'_>, now_ns: u64) {
        while let (Some(slot), Some((request, _))) = (batch.next_slot(), batch.peek()) {
            let io = PathIo {
                class: OpClass::of(request.op()),
                bytes: request.bytes().try_into().unwrap_or(u32::MAX),
                node: self.node,
            };
            let known = &mut self.requests[slot];
            if !request.was_requeued() {
                *known = RequestPath::NEW;
            }
            let path = if known.pinned == NOWHERE {
                let Some(choice) = self.policy.choose(&self.states, &io, now_ns) else {
                    self.hold_next(batch, now_ns);
                    continue;
                };
                let path = choice.path;
                let counters = &mut self.paths[path].usage.counters;
                (counters.reason, counters.chosen_ns) = (Some(choice.reason), now_ns);
                known.choice = Some(choice);
                path
            } else {
                usize::from(known.pinned)
            };
            known.path = path as u8;
            if let Some(hedges) = &mut self.hedges {
                hedges.sent(slot, &io, now_ns);
            }
            let chosen = &mut self.paths[path];
            chosen.usage.counters.in_flight += 1;
            batch.assign(&mut chosen.part);
        }
    }

    #[cold]
    fn hold_next(&mut self, batch: &mut Batch<'_>, now_ns: u64) {
        let Some((tag, ..)) = batch.take() else { return };
        let known = &mut self.requests[tag.index()];
        known.path = NOWHERE;
        if known.since_ns == 0 {
            known.since_ns = now_ns.max(1);
        }
        // The look at those that are held already is not put off.
        if self.held.is_empty() {
            self.held_look_ns = now_ns.saturating_add(HELD_LOOK_NS);
        }
        self.held.push(HeldRequest::Free(tag));
        self.stats.publish_held(self.held.len());
    }

    /// Offers each part to its path's driver. Returns why requests are left, if some are, and whether all those may go
    /// to another path now.
    #[inline]
    fn offer<Cx: ?Sized>(
        &mut self,
        cx: &mut Cx,
        memory: &RegionTable,
        batch: &mut Batch<'_>,
        now_ns: u64,
    ) -> (Option<Shortage>, bool)
    where
        D: Driver<Cx>,
    {
        let (mut short_of, mut may_move) = (None, true);
        for number in 0..self.paths.len() {
            let MultipathQueue { paths, requests, policy, hedges, .. } = self;
            let PathQueue { driver, part, usage, .. } = &mut paths[number];
            if part.is_empty() {
                continue;
            }
            let mut left = 0;
            let give_up = |slot: usize| {
                left += 1;
                let known: &mut RequestPath = &mut requests[slot];
                known.path = NOWHERE;
                if let Some(choice) = known.choice.take() {
                    policy.abandon(choice);
                }
                if let Some(hedges) = hedges {
                    hedges.left(slot);
                }
            };
            let shortage = batch.offer(part, |part| driver.queue_rqs(cx, memory, part), give_up);
            usage.left(left);
            if part.has_ends() {
                let finish =
                    |slot, status| usage.finish(slot, &mut requests[slot], policy.as_mut(), hedges, status, now_ns);
                batch.pass_on(part, finish);
            }
            if left > 0 {
                if usage.counters.in_flight == 0 && shortage != Shortage::Lane {
                    self.avoid(number, now_ns.saturating_add(REFUSED_NS));
                } else {
                    may_move = false;
                }
                // The driver of one path knows nothing of completions of the others.
                let shortage = if shortage == Shortage::Lane { shortage } else { Shortage::System };
                short_of = Some(short_of.filter(|other| *other != Shortage::Lane).unwrap_or(shortage));
            }
        }
        (short_of, may_move)
    }

    #[inline]
    fn poll_path<Cx: ?Sized>(
        &mut self,
        cx: &mut Cx,
        memory: &RegionTable,
        number: usize,
        done: &mut Done<'_>,
        now_ns: u64,
    ) where
        D: Driver<Cx>,
    {
        let PathQueue { driver, part, usage, .. } = &mut self.paths[number];
        if usage.counters.in_flight == 0 && !part.has_ends() && !driver.wants_poll() {
            return;
        }
        // Asked before the poll, in which the driver may give back requests of a connection and begin another.
        let generation = driver.generation();
        done.poll_part(part, |done| driver.poll(cx, memory, done, now_ns));
        if part.has_ends() {
            self.settle(number, generation, done, now_ns);
        }
        if self.hedges.as_ref().is_some_and(|hedges| hedges.is_at(number)) {
            self.take_copies(number, memory, done, now_ns);
        }
    }

    /// Passes on what the driver of a path has completed, and moves what it has given back.
    #[inline]
    fn settle(&mut self, number: usize, generation: u32, done: &mut Done<'_>, now_ns: u64) {
        let MultipathQueue { paths, requests, policy, hedges, .. } = self;
        let PathQueue { part, usage, .. } = &mut paths[number];
        let finish = |slot, status| usage.finish(slot, &mut requests[slot], policy.as_mut(), hedges, status, now_ns);
        done.pass_on(part, finish);
        let sent = PathGeneration { path: number as u32, generation };
        while self.paths[number].part.has_ends() {
            let Some((taken, status)) = done.next_given_back(&mut self.paths[number].part, sent) else { break };
            self.given_back(number, taken, status, done, now_ns);
        }
    }

    /// A path has given a request back, or failed it.
    #[cold]
    fn given_back(
        &mut self,
        number: usize,
        taken: TakenRequest,
        status: Option<Status>,
        done: &mut Done<'_>,
        now_ns: u64,
    ) {
        let slot = match &taken {
            TakenRequest::Free(tag) => tag.index(),
            TakenRequest::Unfenced(request) => request.index(),
        };
        let usage = &mut self.paths[number].usage;
        usage.left(1);
        usage.counters.moved += 1;
        if let Some(hedges) = &mut self.hedges {
            hedges.left(slot);
        }
        let known = &mut self.requests[slot];
        (known.path, known.pinned) = (NOWHERE, NOWHERE);
        if let Some(choice) = known.choice.take() {
            self.policy.abandon(choice);
        }
        // It was at a path until now, however long ago it first failed.
        if known.since_ns == 0 || status.is_none() {
            known.since_ns = now_ns.max(1);
        }
        let is_late = now_ns >= known.since_ns.saturating_add(self.settings.no_path_ns);
        let is_path_error = status.is_some_and(|status| status.retry() == Retry::Elsewhere);
        let is_last = status.is_some_and(|_| {
            known.failures += u8::from(!is_path_error);
            usize::from(known.failures) >= self.paths.len() || is_late
        });
        let was_cancelled = match &taken {
            TakenRequest::Free(tag) => status.is_none() && done.request(tag).0.is_unanswered(),
            TakenRequest::Unfenced(_) => status.is_none(),
        };
        let is_exhausted = was_cancelled && known.cancelled.add(now_ns);
        let has_proof = self.paths[number].monitor.is_some();
        match (taken, status) {
            (TakenRequest::Free(tag), Some(status)) if is_last => done.complete(tag, status),
            (TakenRequest::Free(tag), None) if is_exhausted => done.complete(tag, Status::Io),
            // The path lives on, so no proof comes.
            (TakenRequest::Unfenced(request), Some(status)) => request.fail(done, status),
            (TakenRequest::Unfenced(request), None) if !has_proof => {
                self.requests[slot].pinned = number as u8;
                request.requeue_same(done);
            }
            (TakenRequest::Unfenced(request), None) => {
                self.held.push(HeldRequest::Unfenced(request));
                // It may be proven already.
                self.held_look_ns = now_ns;
                self.stats.publish_held(self.held.len());
            }
            (TakenRequest::Free(tag), _) => done.requeue_answered(tag),
        }
        if status.is_some() && (is_path_error || status == Some(Status::Offline)) {
            self.avoid(number, now_ns.saturating_add(PATH_ERROR_NS));
        }
    }

    /// Requeues held requests that may go on, and ends those that have waited for too long.
    #[cold]
    fn look_at_held(&mut self, done: &mut Done<'_>, now_ns: u64) {
        self.held_look_ns = now_ns.saturating_add(HELD_LOOK_NS);
        let has_path = self.states.candidates().next().is_some();
        let can_have = self.states.is_recoverable();
        let no_path_ns = self.settings.no_path_ns;
        let mut at = 0;
        while at < self.held.len() {
            let slot = match &self.held[at] {
                HeldRequest::Free(tag) => tag.index(),
                HeldRequest::Unfenced(request) => request.index(),
            };
            let waited_ns = now_ns.saturating_sub(self.requests[slot].since_ns);
            match self.held.swap_remove(at) {
                HeldRequest::Free(tag) if has_path => done.requeue_answered(tag),
                HeldRequest::Free(tag) if !can_have || waited_ns >= no_path_ns => done.complete(tag, Status::Path),
                HeldRequest::Unfenced(request) => match self.release(request) {
                    Ok(tag) if self.requests[slot].cancelled.is_exhausted() => done.complete(tag, Status::Io),
                    Ok(tag) => done.requeue_answered(tag),
                    Err(request) if waited_ns >= no_path_ns.max(FENCE_MAX_NS) => request.fail(done, Status::Timeout),
                    Err(request) => {
                        self.put_back(at, HeldRequest::Unfenced(request));
                        at += 1;
                    }
                },
                free @ HeldRequest::Free(_) => {
                    self.put_back(at, free);
                    at += 1;
                }
            }
        }
        self.stats.publish_held(self.held.len());
    }

    /// Undoes a removal from the held requests.
    fn put_back(&mut self, at: usize, request: HeldRequest) {
        self.held.push(request);
        let last = self.held.len() - 1;
        self.held.swap(at, last);
    }

    fn release(&self, request: UnfencedRequest) -> Result<Tag, UnfencedRequest> {
        let path = request.sent().path;
        let monitor = self.paths.get(path as usize).and_then(|path| path.monitor.as_ref());
        match monitor.and_then(|monitor| monitor.fenced(path)) {
            Some(proof) => request.release(&proof),
            None => Err(request),
        }
    }

    fn publish(&mut self) {
        for (number, path) in self.paths.iter_mut().enumerate() {
            if std::mem::take(&mut path.usage.is_changed) {
                self.stats.publish(number, &path.usage.counters);
            }
        }
    }
}

impl<Cx: ?Sized, D: Driver<Cx>, E: AsFd> Driver<Cx> for MultipathQueue<D, E> {
    fn queue_rqs(&mut self, cx: &mut Cx, memory: &RegionTable, batch: &mut Batch<'_>) {
        let now_ns = batch.now_ns();
        self.look_at_changes(now_ns);
        // Each round but the last avoids one path more.
        for _ in 0..=self.paths.len() {
            self.assign(batch, now_ns);
            let (short_of, may_move) = self.offer(cx, memory, batch, now_ns);
            let Some(shortage) = short_of else { break };
            batch.short_of(shortage);
            if !may_move {
                break;
            }
        }
    }

    fn poll(&mut self, cx: &mut Cx, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.look_at_changes(now_ns);
        for number in 0..self.paths.len() {
            self.poll_path(cx, memory, number, done, now_ns);
        }
        if self.hedges.as_ref().and_then(|hedges| hedges.next_ns()).is_some_and(|late_ns| now_ns >= late_ns) {
            self.send_hedges(cx, memory, done, now_ns);
        }
        if !self.held.is_empty() && now_ns >= self.held_look_ns {
            self.look_at_held(done, now_ns);
        }
        self.publish();
    }

    fn wants_poll(&self) -> bool {
        // Copies are no requests of the hardware queue.
        let has_copies = self.hedges.as_ref().is_some_and(|hedges| hedges.has_copies());
        has_copies || self.paths.iter().any(|path| path.driver.wants_poll())
    }

    fn timed_out(
        &mut self,
        cx: &mut Cx,
        memory: &RegionTable,
        place: usize,
        done: &mut Done<'_>,
        now_ns: u64,
    ) -> TimedOut {
        let number = usize::from(self.requests[place].path);
        let Some(path) = self.paths.get_mut(number) else { return TimedOut::MoreTime };
        let PathQueue { driver, part, .. } = path;
        let generation = driver.generation();
        let timed_out = done.poll_part(part, |done| driver.timed_out(cx, memory, place, done, now_ns));
        if part.has_ends() {
            self.settle(number, generation, done, now_ns);
        }
        if self.requests[place].path == number as u8 { timed_out } else { TimedOut::MoreTime }
    }

    fn set_memory(&mut self, cx: &mut Cx, memory: &RegionTable) {
        self.paths.iter_mut().for_each(|path| path.driver.set_memory(cx, memory));
    }

    fn change_memory(&mut self, cx: &mut Cx, memory: &RegionTable) {
        self.paths.iter_mut().for_each(|path| path.driver.change_memory(cx, memory));
    }

    fn add_buffer(&mut self, cx: &mut Cx, memory: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        self.paths.iter_mut().for_each(|path| path.driver.add_buffer(cx, memory, buffer));
    }

    fn remove_buffer(&mut self, cx: &mut Cx, buffer: BufferId) {
        self.paths.iter_mut().for_each(|path| path.driver.remove_buffer(cx, buffer));
    }

    fn arm(&mut self) -> bool {
        // Each of them, also if one has something.
        let armed = self.paths.iter_mut().filter_map(|path| path.driver.arm().then_some(())).count();
        armed > 0 || self.paths.iter().any(|path| path.part.has_ends())
    }

    fn disarm(&mut self) {
        self.paths.iter_mut().for_each(|path| path.driver.disarm());
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.eventfd.as_ref().map(AsFd::as_fd)
    }

    fn deadline_ns(&self) -> Option<u64> {
        let held_ns = (!self.held.is_empty()).then_some(self.held_look_ns);
        let paths = self.paths.iter().filter_map(|path| path.driver.deadline_ns());
        let late_ns = self.hedges.as_ref().and_then(|hedges| hedges.next_ns());
        paths.chain(held_ns).chain(late_ns).min()
    }
}

/// A queue may be dropped with requests held: their submitters are gone.
impl<D, E> Drop for MultipathQueue<D, E> {
    fn drop(&mut self) {
        for request in self.held.drain(..) {
            match request {
                HeldRequest::Free(tag) => std::mem::forget(tag),
                HeldRequest::Unfenced(request) => request.forget(),
            }
        }
    }
}
