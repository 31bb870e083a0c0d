//! Depth of a device shared by its hardware queues.
//!
//! Each queue of a device has a slot: a cache line that only its owner writes, with its amount in flight and, once a
//! round, its completions. Before a queue dispatches it sums up the others' slots, also once a round; a lone queue
//! reads a single word that says whether they have changed. All of them together use no more than the
//! [depth](super::depth) that keeps the device busy:
//!
//! * a queue with no request in flight may have one, at once and without reading the slots;
//! * while there is room every queue may dispatch;
//! * a queue that has dispatched more for its weight than one that was refused for lack of room lets that one go first,
//!   if the difference is more than [`AHEAD_MAX`]: start-time fair queueing (Goyal and others, 1996);
//! * a stream that is alone on the device has no limit.
//!
//! **No wake-ups.** A refused queue asks again when one of its requests ends, and when the device must have completed
//! half of what all queues have in flight, in case that is earlier: with the other half the device is still busy.
//!
//! **No lock, and no contended word.** The others' slots may be as old as a round; then all together exceed the depth
//! slightly. The depth is a guideline that nothing relies on: tags and a [`Budget`](crate::Budget) are bounds. A queue
//! that finds a measurement due takes a lock, if it is free.

use std::sync::{Arc, OnceLock, TryLockError};

use blkyard_mem::sync::{
    AtomicBool, AtomicU64, AtomicUsize, CachePadded, Mutex,
    Ordering::{Acquire, Relaxed, Release},
};

use super::depth::{Completions, Depth, DepthLimit};

/// Queues of one device that share it: the queues of four exports with as many as one can have. Those beyond share it
/// as it pleases.
/// A model has fewer: loom makes each anew for each order of events.
const MEMBERS_MAX: usize = if cfg!(loom) { 4 } else { 256 };
/// Least and longest time after which a refused queue asks again if none of its requests has ended: rarely enough to
/// cost nothing, and soon enough to see a change.
const AGAIN_MIN_NS: u64 = 100_000;
const AGAIN_MAX_NS: u64 = 1_000_000;
/// A refused queue that has not asked for this long no longer counts as waiting: its lane is busy with other work.
const LACKING_NS: u64 = 4 * AGAIN_MAX_NS;
/// How far a queue may be ahead of others that wait, at the default weight: a few dozen small bios, so that a lane's
/// batches stay whole.
const AHEAD_MAX: u64 = 256 << 10;
/// How far a queue may be behind, for what it did not want.
const BEHIND_MAX: u64 = 2 * AHEAD_MAX;
/// A queue is alone when no other has submitted for this long. Until then it has the depth that keeps the device busy,
/// at nearly no cost, and an occasional submitter does not find the device full.
pub(super) const ALONE_NS: u64 = 1_000_000_000;
/// Longest age of a slot's entry about this.
const SEEN_NS: u64 = 1_000_000;
/// A queue idle for this long announces it to those that may be alone now. Half of `ALONE_NS`, since the clocks of two
/// lanes differ by up to a round.
const NEWS_NS: u64 = ALONE_NS / 2;
/// What a unit counts at the default weight.
const ONE: u64 = 1 << 10;
/// Interval of the device's measurement: a small part of the turns of [`Depth`].
pub(super) const LOOK_NS: u64 = 250_000;

/// State shared by the hardware queues of one device. Part of [`DeviceInfo`](crate::DeviceInfo): a clone belongs to the
/// same device.
///
/// Empty until a queue has a scheduler that shares.
#[derive(Clone, Default)]
pub struct SharedDepth(Arc<OnceLock<Arc<Table>>>);

struct Table {
    read: CachePadded<Read>,
    members: Box<[Arc<CachePadded<DepthMember>>]>,
    regulator: Mutex<Regulator>,
}

/// Words that are read often and written rarely.
struct Read {
    /// The depth that has been found to do, and how much may be there just now: [`DepthLimit`].
    depth: AtomicU64,
    limit: AtomicU64,
    small: AtomicU64,
    mib_ns: AtomicU64,
    /// Counter of changes to the other words here, and of queues that become active: the one word that a lone queue
    /// reads.
    news: AtomicU64,
    /// Members ever taken.
    used: AtomicUsize,
    /// Earliest time of the next measurement.
    look_ns: AtomicU64,
    /// Counted up when marks begin anew.
    turn: AtomicU64,
    /// Whether a queue waits because of the limit.
    bound: AtomicBool,
}

struct Regulator {
    depth: Depth,
    /// Completions at the last measurement.
    ended: Completions,
}

#[derive(Default)]
struct DepthMember {
    taken: AtomicBool,
    /// Amount in flight, and its maximum since the turn began.
    has: AtomicU64,
    peak: AtomicU64,
    /// Amount that it has had at the device, at the default weight.
    had: AtomicU64,
    /// When it was last refused for lack of room; zero if it has dispatched since.
    lacking_ns: AtomicU64,
    /// When it last wanted something.
    seen_ns: AtomicU64,
    /// When something of it ended last.
    ended_ns: AtomicU64,
    /// Completions since the table was made, of all owners of the slot.
    ends: AtomicU64,
    lone: AtomicU64,
    cost: AtomicU64,
}

impl DepthMember {
    fn ended(&self) -> Completions {
        let [ends, lone, cost] = [&self.ends, &self.lone, &self.cost].map(|word| word.load(Relaxed));
        Completions { ends, lone, cost }
    }
}

/// One queue's access to the shared depth. Amounts are in the unit of [`Depth`].
pub(super) struct DepthShare {
    table: Arc<Table>,
    member: Arc<CachePadded<DepthMember>>,
    number: usize,
    /// Configured depth; `None` for the measured one.
    given: Option<u64>,
    /// What a unit counts at its weight, in parts of [`ONE`].
    part: u64,
    has: u64,
    had: u64,
    peak: u64,
    turn: u64,
    ended: Completions,
    /// It was refused, and has dispatched nothing since; and its slot says that room was lacking.
    refused: bool,
    lacking: bool,
    seen_ns: u64,
    /// From when on its member is to say again that it wants something.
    seen_until_ns: u64,
    ended_ns: u64,
    /// Round of the last sum over the others, the news count at that time, and the sum.
    round_ns: u64,
    news: u64,
    others: Others,
}

#[derive(Clone, Copy, Default)]
struct Others {
    limit: DepthLimit,
    has: u64,
    ended_ns: u64,
    /// The least that one has had which waits for room.
    lacking: Option<u64>,
    /// They have wanted something of late.
    recent: bool,
}

impl SharedDepth {
    /// Access for one more queue with this part of the usual weight, in hundredths; all together may use this many KiB,
    /// or, for 0, the amount measured to keep the device busy.
    pub(super) fn join(&self, in_flight_kib: u32, percent: u16) -> DepthShare {
        let table = self.0.get_or_init(|| Arc::new(Table::new()));
        let take = |member: &Arc<CachePadded<DepthMember>>| {
            member.0.taken.compare_exchange(false, true, Acquire, Relaxed).is_ok()
        };
        let Some(number) = table.members.iter().position(take) else {
            return SharedDepth::default().join(in_flight_kib, percent);
        };
        table.read.0.used.fetch_max(number + 1, Relaxed);
        let member = &table.members[number].0;
        DepthShare {
            table: Arc::clone(table),
            member: Arc::clone(&table.members[number]),
            number,
            given: Some(u64::from(in_flight_kib) << 10).filter(|given| *given > 0),
            part: ONE * 100 / u64::from(percent.max(1)),
            has: 0,
            had: 0,
            peak: 0,
            turn: 0,
            ended: member.ended(),
            refused: false,
            lacking: false,
            seen_ns: 0,
            seen_until_ns: 0,
            ended_ns: 0,
            round_ns: u64::MAX,
            news: u64::MAX,
            others: Others::default(),
        }
    }
}

impl Table {
    fn new() -> Table {
        let depth = Depth::new();
        let DepthLimit { all, small, mib_ns } = depth.limit();
        Table {
            read: CachePadded(Read {
                depth: AtomicU64::new(depth.depth()),
                limit: AtomicU64::new(all),
                small: AtomicU64::new(small),
                mib_ns: AtomicU64::new(mib_ns),
                news: AtomicU64::new(0),
                used: AtomicUsize::new(0),
                look_ns: AtomicU64::new(0),
                turn: AtomicU64::new(0),
                bound: AtomicBool::new(false),
            }),
            members: (0..MEMBERS_MAX).map(|_| Arc::default()).collect(),
            regulator: Mutex::new(Regulator { depth, ended: Completions::default() }),
        }
    }

    fn members(&self) -> &[Arc<CachePadded<DepthMember>>] {
        &self.members[..self.read.0.used.load(Relaxed)]
    }

    /// Measures the device's throughput, unless another queue is doing so.
    #[inline(never)]
    fn look(&self, now_ns: u64) {
        let mut regulator = match self.regulator.try_lock() {
            Ok(regulator) => regulator,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let Regulator { depth, ended } = &mut *regulator;
        let Read { look_ns, turn, bound, .. } = &self.read.0;
        look_ns.store(now_ns + LOOK_NS, Relaxed);
        let sum = |of: fn(&DepthMember) -> &AtomicU64| {
            self.members().iter().map(|member| of(&member.0).load(Relaxed)).sum::<u64>()
        };
        let all = self.members().iter().fold(Completions::default(), |sum, member| sum + member.0.ended());
        depth.stands(sum(|member| &member.has), sum(|member| &member.peak), bound.load(Relaxed));
        if depth.ended(all - std::mem::replace(ended, all), now_ns) {
            turn.store(turn.load(Relaxed) + 1, Relaxed);
            bound.store(false, Relaxed);
        }
        let (DepthLimit { all, small, mib_ns }, read) = (depth.limit(), &self.read.0);
        let words = [&read.depth, &read.limit, &read.small, &read.mib_ns];
        let mut changed = false;
        for (word, value) in words.into_iter().zip([depth.depth(), all, small, mib_ns]) {
            if word.load(Relaxed) != value {
                word.store(value, Relaxed);
                changed = true;
            }
        }
        if changed {
            self.tell();
        }
    }

    /// Announces a change. The change was written before, so a queue that sees the count sees it, too.
    fn tell(&self) {
        self.read.0.news.fetch_add(1, Release);
    }
}

impl DepthShare {
    /// Whether other queues use the device.
    #[inline]
    pub(super) fn has_company(&self) -> bool {
        self.others.recent
    }

    /// Whether the queue may dispatch a bio of this cost. It has `several` active streams, or one.
    #[inline]
    pub(super) fn fits(&mut self, cost: u64, several: bool, now_ns: u64) -> bool {
        if self.has == 0 && !self.is_ahead() {
            return true;
        }
        if now_ns != self.round_ns {
            let news = self.table.read.0.news.load(Acquire);
            if self.others.recent || news != self.news {
                self.look_at_others(news, now_ns);
            }
        }
        let others = &self.others;
        if !several && !others.recent {
            return true;
        }
        !self.is_ahead() && (self.has == 0 || others.limit.fits(others.has + self.has, cost))
    }

    /// Whether one that waits has had so much less that it goes first.
    #[inline]
    pub(super) fn is_ahead(&self) -> bool {
        self.others.lacking.is_some_and(|least| self.had > least + AHEAD_MAX)
    }

    /// Whether the device has more than twice its depth, or would have it with this bio.
    pub(super) fn is_far_beyond(&self, cost: u64) -> bool {
        self.others.limit.is_far_beyond(self.others.has + self.has, cost)
    }

    /// A bio does not fit: the time until which to wait, unless a request of the queue ends before. `u64::MAX` if only
    /// that helps.
    pub(super) fn wait_ns(&mut self, cost: u64, now_ns: u64) -> u64 {
        self.refused = true;
        let bound = &self.table.read.0.bound;
        if !bound.load(Relaxed) {
            bound.store(true, Relaxed);
        }
        let Others { limit, has, ended_ns, recent, .. } = self.others;
        let again_ns = if has > 0 || self.has == 0 { now_ns + self.again_after_ns() } else { u64::MAX };
        if self.is_ahead() {
            self.lacks(0);
            return again_ns;
        }
        if recent {
            self.lacks(now_ns.max(1));
        }
        let fits_at_ns = limit.fits_at_ns(has + self.has, cost, self.ended_ns.max(ended_ns));
        fits_at_ns.map_or(again_ns, |fits_at_ns| fits_at_ns.min(again_ns))
    }

    /// Time in which the device must have completed half of what all queues have in flight; the longest if its
    /// throughput is unknown.
    fn again_after_ns(&self) -> u64 {
        let Others { limit: DepthLimit { mib_ns, .. }, has, .. } = self.others;
        let half_ns = (has + self.has).saturating_mul(mib_ns) >> 21;
        if mib_ns > 0 { half_ns.clamp(AGAIN_MIN_NS, AGAIN_MAX_NS) } else { AGAIN_MAX_NS }
    }

    /// Since when it lacks something; zero if it does not.
    fn lacks(&mut self, since_ns: u64) {
        self.lacking = since_ns > 0;
        self.member.0.lacking_ns.store(since_ns, Relaxed);
    }

    #[inline(never)]
    fn look_at_others(&mut self, news: u64, now_ns: u64) {
        let table = &self.table;
        let Read { limit, small, mib_ns, .. } = &table.read.0;
        let [all, small, mib_ns] = [limit, small, mib_ns].map(|word| word.load(Relaxed));
        let measured = DepthLimit { all, small, mib_ns };
        let limit = self.given.map_or(measured, |given| DepthLimit { all: given, small: given, ..measured });
        let mut others = Others { limit, ..Others::default() };
        let mut most = 0;
        for (number, member) in table.members().iter().enumerate() {
            let member = &member.0;
            let had = member.had.load(Relaxed);
            most = most.max(had);
            let seen_ns = member.seen_ns.load(Relaxed);
            if number == self.number || seen_ns == 0 || now_ns.saturating_sub(seen_ns) >= ALONE_NS {
                continue;
            }
            let (has, lacking_ns) = (member.has.load(Relaxed), member.lacking_ns.load(Relaxed));
            others.recent = true;
            others.has += has;
            if lacking_ns > 0 && now_ns.saturating_sub(lacking_ns) < LACKING_NS {
                others.lacking = Some(others.lacking.map_or(had, |least| least.min(had)));
            }
            others.ended_ns = others.ended_ns.max(member.ended_ns.load(Relaxed));
        }
        // What it did not want earlier is not made up for; what it has waited for is.
        let had = most.saturating_sub(BEHIND_MAX);
        if self.had < had && !self.refused {
            self.had = had;
            self.member.0.had.store(had, Relaxed);
        }
        (self.others, self.round_ns, self.news) = (others, now_ns, news);
    }

    /// The queue wants something.
    #[inline]
    pub(super) fn wants(&mut self, now_ns: u64) {
        if now_ns >= self.seen_until_ns {
            self.is_seen(now_ns);
        }
    }

    #[inline(never)]
    fn is_seen(&mut self, now_ns: u64) {
        let was_away = self.seen_ns == 0 || now_ns.saturating_sub(self.seen_ns) >= NEWS_NS;
        (self.seen_ns, self.seen_until_ns) = (now_ns.max(1), now_ns + SEEN_NS);
        self.member.0.seen_ns.store(self.seen_ns, Relaxed);
        if was_away {
            self.table.tell();
        }
    }

    /// The device has something more of it.
    #[inline]
    pub(super) fn took(&mut self, cost: u64) {
        self.has += cost;
        self.had += cost * self.part / ONE;
        self.member.0.has.store(self.has, Relaxed);
        self.member.0.had.store(self.had, Relaxed);
        self.refused = false;
        if self.lacking {
            self.lacks(0);
        }
    }

    /// A bio of this cost has ended, which its stream may have had alone.
    #[inline]
    pub(super) fn ended(&mut self, cost: u64, lone: bool, now_ns: u64) {
        let had = self.has;
        self.has -= cost;
        self.ended = self.ended + Completions { ends: 1, lone: u64::from(lone), cost };
        self.member.0.has.store(self.has, Relaxed);
        if now_ns != self.ended_ns {
            self.write_down(had, now_ns);
        }
    }

    /// Publishes the values that others need only once a round, at its first completion, when the queue's amount is at
    /// its maximum.
    #[inline(never)]
    fn write_down(&mut self, had: u64, now_ns: u64) {
        let (read, member) = (&self.table.read.0, &self.member.0);
        let turn = read.turn.load(Relaxed);
        if turn != self.turn || had > self.peak {
            (self.turn, self.peak) = (turn, had);
            member.peak.store(had, Relaxed);
        }
        let Completions { ends, lone, cost } = self.ended;
        member.ends.store(ends, Relaxed);
        member.lone.store(lone, Relaxed);
        member.cost.store(cost, Relaxed);
        self.ended_ns = now_ns;
        member.ended_ns.store(now_ns, Relaxed);
        if now_ns >= read.look_ns.load(Relaxed) {
            self.table.look(now_ns);
        }
    }

    /// The depth that has been found to do.
    pub(super) fn depth(&self) -> u64 {
        self.given.unwrap_or_else(|| self.table.read.0.depth.load(Relaxed))
    }
}

impl Drop for DepthShare {
    fn drop(&mut self) {
        let member = &self.member.0;
        for word in [&member.has, &member.had, &member.peak, &member.lacking_ns, &member.seen_ns, &member.ended_ns] {
            word.store(0, Relaxed);
        }
        // Pairs with the acquire of the slot's next owner, which continues the count of completions.
        member.taken.store(false, Release);
    }
}

impl std::fmt::Debug for SharedDepth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let queues = self
            .0
            .get()
            .map_or(0, |table| table.members().iter().filter(|member| member.0.taken.load(Relaxed)).count());
        f.debug_struct("SharedDepth").field("queues", &queues).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for DepthShare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DepthShare").field("number", &self.number).field("has", &self.has).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const COST: u64 = 12 << 10;
    const MS: u64 = 1_000_000;

    /// Queues that share a device of so many slots, with one stream each.
    fn queues(count: usize, places: u32) -> Vec<DepthShare> {
        let shared = SharedDepth::default();
        (0..count).map(|_| shared.join(places * 12, 100)).collect()
    }

    /// Takes small bios until no more fit, or it has `most`; returns how many it took.
    fn take(share: &mut DepthShare, most: usize, now_ns: u64) -> usize {
        share.wants(now_ns);
        for took in 0..most {
            if !share.fits(COST, false, now_ns) {
                share.wait_ns(COST, now_ns);
                return took;
            }
            share.took(COST);
        }
        most
    }

    fn end(share: &mut DepthShare, count: usize, now_ns: u64) {
        (0..count).for_each(|_| share.ended(COST, false, now_ns));
    }

    #[test]
    fn a_queue_alone_has_everything_and_again_when_the_other_has_been_gone_for_a_second() {
        let mut queues = queues(2, 8);
        assert_eq!(take(&mut queues[0], 100, MS), 100);
        assert_eq!(take(&mut queues[1], 100, 2 * MS), 1, "the device is full, and one passes");
        end(&mut queues[1], 1, 3 * MS);
        end(&mut queues[0], 90, 4 * MS);
        assert_eq!(take(&mut queues[0], 100, 5 * MS), 0);
        end(&mut queues[0], 3, 900 * MS);
        assert_eq!(take(&mut queues[0], 100, 901 * MS), 1, "eight in all");
        assert_eq!(take(&mut queues[0], 100, 1003 * MS), 100);
    }

    #[test]
    fn who_comes_back_is_noticed_at_once_by_who_was_alone_meanwhile() {
        let mut queues = queues(2, 8);
        // By its own clock, which may be behind that of the other.
        for (round, away_ns) in (1..).zip([ALONE_NS - MS, ALONE_NS, 5 * ALONE_NS]) {
            let left_ns = 10 * ALONE_NS * round;
            take(&mut queues[1], 1, left_ns);
            end(&mut queues[1], 1, left_ns);
            let alone_ns = left_ns + ALONE_NS;
            assert_eq!(take(&mut queues[0], 100, alone_ns), 100);
            end(&mut queues[0], 100, alone_ns + 1);
            let back_ns = left_ns + away_ns;
            take(&mut queues[1], 1, back_ns);
            end(&mut queues[1], 1, back_ns);
            let next_ns = back_ns.max(alone_ns) + 2;
            assert_eq!(take(&mut queues[0], 100, next_ns), 8, "after {away_ns} ns");
            end(&mut queues[0], 8, next_ns + 1);
        }
    }

    #[test]
    fn what_has_ended_is_written_down_once_a_round_and_the_most_there_was() {
        let mut queues = queues(1, 8);
        take(&mut queues[0], 7, MS);
        end(&mut queues[0], 3, 2 * MS);
        take(&mut queues[0], 1, 2 * MS);
        end(&mut queues[0], 1, 3 * MS);
        let member = &queues[0].member.0;
        let words = [&member.has, &member.peak, &member.ends, &member.lone, &member.cost, &member.ended_ns]
            .map(|word| word.load(Relaxed));
        assert_eq!(words, [4 * COST, 7 * COST, 4, 0, 4 * COST, 3 * MS]);
    }

    #[test]
    fn who_has_nothing_there_may_always_have_one() {
        let mut queues = queues(3, 1);
        for now_ns in [MS, 2 * MS] {
            for share in &mut queues {
                assert_eq!(take(share, 1, now_ns), 1);
            }
            queues.iter_mut().for_each(|share| end(share, 1, now_ns));
        }
    }

    /// Has queues of these weights want everything, at a device of 16 places of which the oldest ends first. Returns
    /// how many requests of each have ended after so many in all.
    fn backlogged<const N: usize>(weights: [u16; N], ends: u64) -> [u64; N] {
        let shared = SharedDepth::default();
        let mut queues = weights.map(|weight| shared.join(16 * 12, weight));
        queues.iter_mut().for_each(|share| share.wants(1));
        let (mut device, mut ended) = (VecDeque::new(), [0; N]);
        for round in 0..ends {
            let now_ns = MS + round * 10_000;
            for (at, share) in queues.iter_mut().enumerate() {
                device.extend((0..take(share, 100, now_ns)).map(|_| at));
            }
            assert!(device.len() <= 16 + N, "{}", device.len());
            let at = device.pop_front().unwrap();
            end(&mut queues[at], 1, now_ns);
            ended[at] += 1;
        }
        ended
    }

    #[test]
    fn queues_that_all_want_more_get_as_much_as_each_other() {
        let ended = backlogged([100; 4], 4000);
        assert!(ended.iter().all(|ended| (950..=1050).contains(ended)), "{ended:?}");
    }

    #[test]
    fn queues_get_as_much_as_their_weights() {
        let ended = backlogged([100, 200, 400], 7000);
        for (ended, weight) in ended.iter().zip([1, 2, 4]) {
            assert!((930..=1070).contains(&(ended / weight)), "{ended} for {weight}");
        }
    }

    #[test]
    fn a_share_that_nobody_wants_is_everybodys() {
        let mut queues = queues(2, 12);
        queues.iter_mut().for_each(|share| share.wants(1));
        let mut has = take(&mut queues[0], 100, MS);
        for round in 2..1000 {
            // The second wants one at a time, and has it at once.
            assert_eq!(take(&mut queues[1], 1, round * MS), 1);
            has += take(&mut queues[0], 100, round * MS);
            end(&mut queues[1], 1, round * MS);
            end(&mut queues[0], 1, round * MS);
            has -= 1;
            assert!(has >= 10, "{has}");
        }
    }

    #[test]
    fn a_queue_that_was_alone_owes_nothing_and_one_that_was_away_is_owed_nothing() {
        let mut queues = queues(2, 8);
        // The first is alone, then the second.
        for at in [0, 1] {
            for round in 0..1000 {
                let now_ns = (at as u64 + 1) * 10 * ALONE_NS + round * MS;
                let took = take(&mut queues[at], 100, now_ns);
                end(&mut queues[at], took, now_ns);
            }
        }
        let (mut took, mut has) = ([0; 2], [0; 2]);
        for round in 0..1000 {
            let now_ns = 20 * ALONE_NS + (1000 + round) * MS;
            for at in [0, 1] {
                let more = take(&mut queues[at], 100, now_ns);
                (took[at], has[at]) = (took[at] + more, has[at] + more);
            }
            for at in [0, 1] {
                end(&mut queues[at], has[at], now_ns);
                has[at] = 0;
            }
        }
        assert!(took[0].abs_diff(took[1]) < 100, "{took:?}");
    }

    #[test]
    fn who_is_refused_asks_again_although_nothing_of_it_ends() {
        let mut queues = queues(2, 8);
        take(&mut queues[0], 8, MS);
        assert_eq!(take(&mut queues[1], 2, MS), 1);
        assert_eq!(queues[1].wait_ns(COST, MS), MS + AGAIN_MAX_NS, "the device's throughput is unknown");
        end(&mut queues[0], 8, MS);
        assert_eq!(take(&mut queues[1], 2, 2 * MS), 2);
    }

    #[test]
    fn who_is_refused_asks_again_when_half_of_what_is_in_flight_must_have_ended() {
        let mut share = queues(1, 8).remove(0);
        for (has_kib, after_ns) in [(16, AGAIN_MIN_NS), (400, 200_000), (1600, 800_000), (1 << 20, AGAIN_MAX_NS)] {
            // A KiB in a microsecond.
            let limit = DepthLimit { mib_ns: 1024 * 1000, ..DepthLimit::default() };
            share.others = Others { has: has_kib << 10, limit, ..Others::default() };
            assert_eq!(share.wait_ns(COST, MS), MS + after_ns, "{has_kib} KiB");
        }
    }

    #[test]
    fn a_queue_that_is_gone_leaves_nothing_behind_and_its_member_to_the_next() {
        let shared = SharedDepth::default();
        let mut stays = shared.join(96, 100);
        for number in 0..2 * MEMBERS_MAX {
            let mut goes = shared.join(96, 100);
            assert_eq!(goes.number, 1);
            take(&mut goes, 8, MS + number as u64);
        }
        assert_eq!(take(&mut stays, 100, 2 * MS), 100, "it is alone");
        end(&mut stays, 100, 3 * MS);
        // More than there are members for: the last one is by itself.
        let more: Vec<_> = (0..MEMBERS_MAX).map(|_| shared.join(96, 100)).collect();
        assert!(!Arc::ptr_eq(&more[MEMBERS_MAX - 1].table, &stays.table) && Arc::ptr_eq(&more[0].table, &stays.table));
    }

    #[test]
    fn one_depth_is_learned_for_all() {
        // 100 us each, and 16 at a time: the demand of both.
        let shared = SharedDepth::default();
        let mut queues = [shared.join(0, 100), shared.join(0, 100)];
        let (mut device, mut has, mut now_ns) = (VecDeque::new(), [0_usize; 2], 0);
        while now_ns < 20_000 * MS {
            for (at, share) in queues.iter_mut().enumerate() {
                let took = take(share, 128 - has[at], now_ns);
                has[at] += took;
                device.extend((0..took).map(|_| at));
            }
            now_ns += 100_000 / device.len().min(16) as u64;
            let at = device.pop_front().unwrap();
            end(&mut queues[at], 1, now_ns);
            has[at] -= 1;
        }
        let depth = queues[0].depth() / COST;
        assert!((15..=20).contains(&depth) && queues[1].depth() / COST == depth, "{depth}");
        assert!(has.iter().all(|has| (6..=11).contains(has)), "{has:?}");
    }
}
