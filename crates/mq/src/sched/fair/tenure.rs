//! Tenure of a device with seeks: which of its hardware queues it serves for a while.
//!
//! Streams of one hardware queue have [turns](super::turn). Several queues in front of a device, as those of several
//! exports, have tenures, each as long as a turn of a stream with the queue's weight. Within its tenure a queue gives
//! turns to its streams. So a device is shared by queues first, however many streams each has.
//!
//! The next tenure goes to the waiting queue that has had least time of the device for its weight. A queue that comes
//! back has at least as much as the one that is served: start-time fair queueing (Goyal and others, 1996).
//!
//! **No wake-ups**, as in [`shared`](super::shared): a queue that waits asks again, the next one every millisecond. The
//! device is kept for a queue while it has requests there or is idled for; then another may take it. A queue that
//! keeps it far too long, as with a request that never ends, loses it.
//!
//! A lock is taken where tenures begin, end or are asked for, and not for a bio of the queue that has the device.
//! Queues that wait ask less often the more queues there are.

use std::sync::{Arc, OnceLock, PoisonError};

use blkyard_mem::sync::{AtomicU64, Mutex, MutexGuard, Ordering::Relaxed};

use super::hold_off::WriteHoldOff;
use super::write_cost::WriteCost;
use super::{FairConfig, WEIGHT, turn};

/// Interval at which the queue that is next asks again.
const NEXT_NS: u64 = 1_000_000;
/// The same for the others that wait, at least, and for each queue of the device.
const AGAIN_NS: u64 = 10 * NEXT_NS;
const AGAIN_EACH_NS: u64 = NEXT_NS / 10;
/// A tenure that is asked for ends after this time in any case, and two of its lengths: drained requests and the
/// hold-off take less.
const LOST_NS: u64 = 3_000_000_000;
/// The device is kept without a limit in time.
const KEPT: u64 = u64::MAX;

/// State shared by the hardware queues of one device. Part of [`DeviceInfo`](crate::DeviceInfo): a clone belongs to the
/// same device.
///
/// Empty until a queue has a scheduler that shares.
#[derive(Clone, Default)]
pub struct SharedTenure(Arc<OnceLock<Arc<TenureTable>>>);

struct TenureTable {
    /// Number of the queue that has the device, from 1. Changes under the lock.
    holder: AtomicU64,
    /// Until when another one waits.
    wanted_until_ns: AtomicU64,
    queues: Mutex<TenureQueues>,
}

struct TenureQueues {
    members: Vec<Option<TenureMember>>,
    /// Time of the device that the holder had had when its tenure began, ns at the default weight.
    virtual_ns: u64,
    /// When the tenure began, or the last part of it that is as long as it lasts before somebody asked for the device.
    since_ns: u64,
    length_ns: u64,
    /// Since when others ask for it.
    wanted_ns: Option<u64>,
    /// How long the device is left alone after a turn of writes.
    hold_off: WriteHoldOff,
    write_cost: WriteCost,
}

struct TenureMember {
    weight: u32,
    /// Time of the device that it has had, ns at the default weight.
    had_ns: u64,
    /// Until when it waits, unless it asks again.
    waits_until_ns: u64,
    /// Until when the device is kept for it, if it has it. Written by the queue.
    kept_until_ns: Arc<AtomicU64>,
}

/// One queue's access to the tenures of its device.
pub(super) struct Tenure {
    table: Arc<TenureTable>,
    /// Number of the queue, from 1.
    me: u64,
    config: FairConfig,
    /// The device has a volatile cache of writes: [`WriteCost`].
    has_cache: bool,
    /// Length of its tenure, and its end; no end before the first completion.
    length_ns: u64,
    until_ns: u64,
    /// Until when the device is kept, as others see it and as it wrote it last.
    shared_kept_until_ns: Arc<AtomicU64>,
    kept_until_ns: u64,
}

impl SharedTenure {
    /// Access for one more queue.
    pub(super) fn join(&self, config: &FairConfig, has_cache: bool) -> Tenure {
        let table = self.0.get_or_init(|| {
            Arc::new(TenureTable {
                holder: AtomicU64::new(0),
                wanted_until_ns: AtomicU64::new(0),
                queues: Mutex::new(TenureQueues {
                    members: Vec::new(),
                    virtual_ns: 0,
                    since_ns: 0,
                    length_ns: 0,
                    wanted_ns: None,
                    hold_off: WriteHoldOff::default(),
                    write_cost: WriteCost::default(),
                }),
            })
        });
        let kept_until_ns = Arc::new(AtomicU64::new(0));
        let member = Some(TenureMember {
            weight: u32::from(config.weight),
            had_ns: 0,
            waits_until_ns: 0,
            kept_until_ns: Arc::clone(&kept_until_ns),
        });
        let members = &mut table.queues().members;
        let place = members.iter().position(Option::is_none).unwrap_or(members.len());
        if place == members.len() {
            members.push(member);
        } else {
            members[place] = member;
        }
        Tenure {
            table: Arc::clone(table),
            me: place as u64 + 1,
            config: *config,
            has_cache,
            length_ns: 0,
            until_ns: 0,
            shared_kept_until_ns: kept_until_ns,
            kept_until_ns: 0,
        }
    }
}

impl TenureTable {
    fn queues(&self) -> MutexGuard<'_, TenureQueues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TenureQueues {
    fn member(&mut self, number: u64) -> Option<&mut TenureMember> {
        self.members.get_mut((number as usize).wrapping_sub(1))?.as_mut()
    }

    /// The queues that wait.
    fn waiting(&self, now_ns: u64) -> impl Iterator<Item = (u64, &TenureMember)> {
        let members = (1..).zip(&self.members);
        let waits = move |member: &&TenureMember| now_ns < member.waits_until_ns;
        members.filter_map(move |(number, member)| Some((number, member.as_ref().filter(waits)?)))
    }

    /// The one that is next.
    fn next(&self, now_ns: u64) -> Option<u64> {
        self.waiting(now_ns).min_by_key(|(_, member)| member.had_ns).map(|(number, _)| number)
    }

    /// If nobody waits, no more of the tenure counts than its length.
    fn forget_unwanted(&mut self, now_ns: u64) {
        if self.waiting(now_ns).next().is_none() {
            self.wanted_ns = None;
            self.since_ns = self.since_ns.max(now_ns.saturating_sub(self.length_ns));
        }
    }

    /// Charges a queue more or less than the time of its tenure.
    fn correct(&mut self, number: u64, ns: i64) {
        if let Some(member) = self.member(number) {
            let own_ns = ns * i64::from(WEIGHT) / i64::from(member.weight.max(1));
            member.had_ns = member.had_ns.saturating_add_signed(own_ns);
        }
    }

    /// Counts the time of a tenure that ends.
    fn charge(&mut self, number: u64, end_ns: u64) {
        let used_ns = end_ns.saturating_sub(self.since_ns);
        if let Some(member) = self.member(number) {
            member.had_ns += used_ns * u64::from(WEIGHT) / u64::from(member.weight.max(1));
        }
    }
}

impl Tenure {
    /// The queue wants the device. `None` if it has it, still or from now on; else when it asks again.
    #[inline]
    pub(super) fn take(&mut self, now_ns: u64) -> Option<u64> {
        if self.holds() && !self.is_over(now_ns) { None } else { self.ask(now_ns) }
    }

    /// Whether the queue has the device.
    #[inline]
    pub(super) fn holds(&self) -> bool {
        self.table.holder.load(Relaxed) == self.me
    }

    /// Whether others wait for it.
    #[inline]
    pub(super) fn is_wanted(&self, now_ns: u64) -> bool {
        now_ns < self.table.wanted_until_ns.load(Relaxed)
    }

    /// A request of the queue has ended. The end of its tenure is counted from the first one: the way from another's
    /// position is charged, but does not shorten it.
    #[inline]
    pub(super) fn ended(&mut self, now_ns: u64) {
        if self.until_ns == u64::MAX {
            self.until_ns = now_ns + self.length_ns;
        }
    }

    /// Whether it has been used up, and others wait.
    #[inline]
    pub(super) fn is_over(&self, now_ns: u64) -> bool {
        now_ns >= self.until_ns && self.is_wanted(now_ns)
    }

    /// If it has no request at the device, the queue keeps it until then.
    #[inline]
    pub(super) fn keep(&mut self, until_ns: u64) {
        if until_ns != self.kept_until_ns {
            self.kept_until_ns = until_ns;
            self.shared_kept_until_ns.store(until_ns, Relaxed);
        }
    }

    /// The queue has a request at the device.
    #[inline]
    pub(super) fn works(&mut self) {
        self.keep(KEPT);
    }

    /// The queue wants nothing more.
    pub(super) fn leave(&mut self, now_ns: u64) {
        if self.holds() {
            let mut queues = self.table.queues();
            // It may have been taken meanwhile.
            if self.holds() {
                queues.forget_unwanted(now_ns);
                queues.charge(self.me, now_ns);
                self.table.holder.store(0, Relaxed);
            }
        }
    }

    /// How long the device is left alone after writes.
    pub(super) fn hold_off_ns(&self) -> u64 {
        self.table.queues().hold_off.ns()
    }

    /// A turn of writes of this price has ended, with its hold-off. Returns what it, and the queue, is charged, ns.
    pub(super) fn wrote(&self, price: u64, used_ns: u64, now_ns: u64) -> u64 {
        let mut queues = self.table.queues();
        queues.hold_off.wrote(now_ns);
        if !self.has_cache {
            return used_ns;
        }
        let charged_ns = queues.write_cost.wrote(price, used_ns);
        queues.correct(self.me, charged_ns as i64 - used_ns as i64);
        charged_ns
    }

    /// Reads of a turn have lost this time to earlier writes, which is not charged to the queue.
    pub(super) fn lost(&self, ns: u64) {
        if ns > 0 && self.has_cache {
            let mut queues = self.table.queues();
            queues.write_cost.lost(ns);
            queues.correct(self.me, -(ns as i64));
        }
    }

    /// See [`WriteHoldOff::read`].
    #[inline]
    pub(super) fn read(&self, took_ns: u64, usual_ns: u64, now_ns: u64) -> u64 {
        if WriteHoldOff::is_slow(took_ns, usual_ns) {
            self.table.queues().hold_off.read(took_ns, usual_ns, now_ns)
        } else {
            0
        }
    }

    /// Asks for the device.
    #[inline(never)]
    fn ask(&mut self, now_ns: u64) -> Option<u64> {
        let table = Arc::clone(&self.table);
        let mut queues = table.queues();
        queues.forget_unwanted(now_ns);
        let mut holder = table.holder.load(Relaxed);
        let kept_until_ns = queues.member(holder).map_or(0, |member| member.kept_until_ns.load(Relaxed));
        let lost_ns = LOST_NS + 2 * queues.length_ns;
        let is_lost = queues.wanted_ns.is_some_and(|wanted_ns| now_ns.saturating_sub(wanted_ns) > lost_ns);
        if holder == self.me || now_ns >= kept_until_ns || is_lost {
            queues.charge(holder, if holder == self.me { now_ns } else { now_ns.min(kept_until_ns) });
            holder = 0;
        }
        let (virtual_ns, number_of_queues) = (queues.virtual_ns, queues.members.len() as u64);
        let others_again_ns = AGAIN_NS.max(AGAIN_EACH_NS * number_of_queues);
        let Some(member) = queues.member(self.me) else { unreachable!("it has joined") };
        if now_ns >= member.waits_until_ns {
            member.had_ns = member.had_ns.max(virtual_ns);
        }
        member.waits_until_ns = now_ns + others_again_ns * 5 / 2;
        let had_ns = member.had_ns;
        let next = queues.next(now_ns);
        let mut again_ns = Some(now_ns + if next == Some(self.me) { NEXT_NS } else { others_again_ns });
        if holder == 0 && next == Some(self.me) {
            if let Some(member) = queues.member(self.me) {
                member.waits_until_ns = 0;
            }
            let weight = u32::from(self.config.weight);
            let all: u64 = queues.waiting(now_ns).map(|(_, member)| u64::from(member.weight)).sum();
            let length_ns = turn::share_ns(&self.config, weight, all + u64::from(weight));
            (self.length_ns, self.until_ns) = (length_ns, u64::MAX);
            (queues.virtual_ns, queues.since_ns, queues.length_ns) = (had_ns, now_ns, length_ns);
            queues.wanted_ns = None;
            self.works();
            holder = self.me;
            again_ns = None;
        }
        let wanted_until_ns = queues.waiting(now_ns).map(|(_, member)| member.waits_until_ns).max();
        if wanted_until_ns.is_some() {
            queues.wanted_ns.get_or_insert(now_ns);
        }
        table.wanted_until_ns.store(wanted_until_ns.unwrap_or(0), Relaxed);
        table.holder.store(holder, Relaxed);
        again_ns
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        let mut queues = self.table.queues();
        queues.members[self.me as usize - 1] = None;
        if self.holds() {
            self.table.holder.store(0, Relaxed);
        }
    }
}

impl std::fmt::Debug for SharedTenure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedTenure").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Tenure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tenure").field("me", &self.me).field("holds", &self.holds()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// TenureQueues of these weights at one device.
    fn queues<const N: usize>(weights: [u16; N]) -> [Tenure; N] {
        let shared = SharedTenure::default();
        weights.map(|weight| shared.join(&FairConfig { weight, ..FairConfig::default() }, false))
    }

    #[test]
    fn a_queue_alone_has_the_device_at_once_and_keeps_it() {
        let [mut one] = queues([100]);
        for ms in [1, 2, 10_000, 20_000] {
            assert_eq!(one.take(ms * MS), None);
            one.ended(ms * MS);
            assert!(!one.is_wanted(ms * MS) && !one.is_over(ms * MS));
        }
    }

    #[test]
    fn the_device_goes_to_who_has_had_least_for_its_weight() {
        let mut all = queues([100, 300, 100]);
        let (mut had_ms, mut holder) = ([0; 3], None);
        for ms in 1..100_000 {
            for (at, queue) in all.iter_mut().enumerate() {
                if queue.take(ms * MS).is_none() {
                    queue.ended(ms * MS);
                    holder = Some(at);
                }
            }
            had_ms[holder.unwrap()] += 1;
        }
        for (had_ms, expected_ms) in had_ms.iter().zip([20_000_u64, 60_000, 20_000]) {
            assert!(expected_ms.abs_diff(*had_ms) < 400, "{had_ms}");
        }
    }

    #[test]
    fn who_comes_to_a_device_that_was_long_used_alone_is_next_and_no_more() {
        let mut all = queues([100, 100]);
        assert_eq!(all[0].take(MS), None);
        all[0].ended(MS);
        let mut now_ms = 100_000;
        assert_eq!(all[1].take(now_ms * MS), Some((now_ms + 1) * MS), "it is not idle");
        let mut had_ms = [0_u64; 2];
        let mut holder = 0;
        for _ in 0..10_000 {
            now_ms += 1;
            for (at, queue) in all.iter_mut().enumerate() {
                if queue.take(now_ms * MS).is_none() {
                    queue.ended(now_ms * MS);
                    holder = at;
                }
            }
            had_ms[holder] += 1;
        }
        assert!(had_ms[0].abs_diff(had_ms[1]) <= 200, "{had_ms:?}");
    }

    #[test]
    fn nobody_pays_for_what_nobody_else_wanted() {
        for is_asked_early in [false, true] {
            let mut all = queues([100, 100]);
            assert_eq!(all[0].take(MS), None);
            all[0].ended(MS);
            if is_asked_early {
                // It goes away again.
                assert!(all[1].take(2 * MS).is_some());
            }
            let hours_ns = 36_000_000 * MS;
            all[0].keep(hours_ns);
            let mut had_ms = [0_u64; 2];
            assert_eq!(all[1].take(hours_ns), None);
            for ms in 1..10_000 {
                for (at, queue) in all.iter_mut().enumerate() {
                    if queue.take(hours_ns + ms * MS).is_none() {
                        queue.ended(hours_ns + ms * MS);
                        had_ms[at] += 1;
                    }
                }
            }
            assert!(had_ms[0].abs_diff(had_ms[1]) <= 200, "{had_ms:?}");
        }
    }

    #[test]
    fn a_device_that_is_kept_for_nothing_may_be_taken() {
        let [mut one, mut two] = queues([100, 100]);
        assert_eq!(one.take(MS), None);
        one.ended(2 * MS);
        one.keep(10 * MS);
        assert_eq!(two.take(9 * MS), Some(10 * MS));
        assert_eq!(two.take(10 * MS), None);
        assert!(!one.holds());
        assert_eq!(one.take(11 * MS), Some(12 * MS), "the next one asks again soon");
        two.leave(12 * MS);
        assert_eq!(one.take(12 * MS), None);
    }

    #[test]
    fn a_queue_whose_requests_never_end_loses_the_device_and_one_that_is_gone_leaves_it() {
        let [mut hangs, mut two, three] = queues([100; 3]);
        assert_eq!(hangs.take(MS), None);
        hangs.works();
        let start_ns = 2 * MS;
        let mut now_ns = start_ns;
        while let Some(again_ns) = two.take(now_ns) {
            now_ns = again_ns;
        }
        assert!((LOST_NS..LOST_NS + 300 * MS).contains(&(now_ns - start_ns)), "{}", now_ns - start_ns);
        drop((two, three));
        assert_eq!(hangs.take(now_ns), None);
    }

    #[test]
    fn who_has_asked_and_gone_away_holds_nothing_up() {
        let [mut one, mut two, mut three] = queues([100; 3]);
        assert_eq!(one.take(MS), None);
        assert!(two.take(2 * MS).is_some() && three.take(2 * MS).is_some());
        one.leave(3 * MS);
        // The second is next, and does not come.
        let mut now_ns = 3 * MS;
        while let Some(again_ns) = three.take(now_ns) {
            now_ns = again_ns;
        }
        assert!(now_ns < 2 * MS + 4 * AGAIN_NS, "{now_ns}");
    }
}
