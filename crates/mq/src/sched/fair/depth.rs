//! Depth of a device's queue that is worth using while several streams share it.
//!
//! A late bio waits for all requests that the device has already. So the device gets no more than keeps it busy, which
//! is measured in bytes plus a cost for each bio. The device alternately has the whole depth for a while, and a quarter
//! less. If its throughput is the same, the depth is reduced; if not, an eighth is tried, then a sixteenth. If all of
//! them lose throughput, a little more than the whole is tried in the same way. Each comparison spans several turns, so
//! that changes of the load do not matter.
//!
//! When no step is an improvement, large bios get a sixteenth less than the depth found: that is the most throughput
//! lost, and no queue forms in the device. Small bios may use all of it: as many as keep the device busy are served at
//! the same time and do not wait for each other. The next attempt follows after a pause, which grows with each attempt
//! without effect, and ends at once when the device's throughput clearly changes. Attempts cost throughput or latency,
//! so the last step needs two comparisons that agree only, and more depth is not tried each time if it had no effect.
//!
//! If no bio waits although the device has less than the depth, the depth becomes the amount it has had. A lone stream
//! has no limit; its amount is more than the depth and says nothing about it, so the last measurement applies when
//! another stream arrives.
//!
//! A depth of two and a half large bios is possible: with two in flight, the third is dispatched when half of one must
//! have completed, by the measured rate. Two would not keep the device busy, and three would form a queue.

use std::ops::{Add, Sub};

/// How long a turn lasts at least. In half of that flash which collects garbage, and completions that come in batches,
/// show a difference where there is none.
pub(super) const TURN_NS: u64 = 10_000_000;
/// Ends in a turn, at least.
pub(super) const TURN_ENDS: u64 = 128;
/// Pairs of turns in a comparison. The best and the worst are ignored: a device that is collecting garbage says nothing
/// about depths. A smaller depth is accepted only if all others agree: with noisy results too much depth is better than
/// too little.
const TURNS: usize = 4;
/// So many turns in a row that took an eighth more or less than usual show that something has changed, and not that
/// garbage was collected.
const CHANGED_TURNS: u32 = 8;
/// Steps down that are tried: a quarter, an eighth, a sixteenth.
const STEP_MIN: u32 = 2;
const STEP_MAX: u32 = 4;
/// Throughput that may be lost, in percent for each hundred percent less of depth: three quarters of the depth do where
/// they give 99.75 % of the throughput. Several steps down lose several times that.
const LOSS_PERCENT: u64 = 1;
/// What a lone bio counts beside its cost where that shows more throughput: four times the usual price of a bio in all,
/// which is that of a path with 100 thousand bios a second and 3.2 GB/s.
const LONE_PRICE: u64 = 24 << 10;
/// A larger depth is useless if the previous whole reaches at least this part of its throughput, in two comparisons.
const USELESS_PERMILLE: u64 = 990;
/// The least depth: two small bios, for of one there are no three quarters.
const DEPTH_MIN: u64 = 24 << 10;
/// Upper bound; effectively unlimited.
const DEPTH_MAX: u64 = 1 << 40;
/// And this or less where both are too little to keep the device busy.
const LINEAR_PERMILLE: u64 = 955;
/// Attempts that pass, after one in which more was of no use, before more is tried again: more than a minute.
const MORE_AGAIN: u32 = 2;
/// Turns until the next attempt after one without effect: the first pause, and the longest. An attempt is 40 ms with a
/// queue in the device: of a thousand bios one may meet it.
const PAUSE_MIN: u32 = 8;
const PAUSE_MAX: u32 = 4096;
/// A turn without a completion for this long begins again: the load was idle, which says nothing about the device.
const PAUSED_NS: u64 = 1_000_000_000;
/// From this size on it is worth a timer to send a bio between two ends.
const LARGE: u64 = 64 << 10;

/// How much may be in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DepthLimit {
    /// In all, and of small bios.
    pub(super) all: u64,
    pub(super) small: u64,
    /// How long the device takes for a MiB; zero until it is known.
    pub(super) mib_ns: u64,
}

impl DepthLimit {
    /// Whether a bio of this cost fits beside the present amount. The number of small bios is the one nearest to the
    /// limit.
    #[inline]
    pub(super) fn fits(self, has: u64, cost: u64) -> bool {
        if cost < LARGE { has + cost / 2 <= self.small } else { has == 0 || has + cost <= self.all }
    }

    /// Whether that would be more than twice as much as there should be.
    pub(super) fn is_far_beyond(self, has: u64, cost: u64) -> bool {
        has + cost > 2 * self.all
    }

    /// Time at which a bio that does not fit now will fit, if no request ends before and the last one ended at
    /// `ended_ns`. `None` if no time helps.
    pub(super) fn fits_at_ns(self, has: u64, cost: u64, ended_ns: u64) -> Option<u64> {
        let waits = has <= self.all && cost >= LARGE && self.mib_ns > 0;
        waits.then(|| ended_ns + ((has + cost).saturating_sub(self.all).saturating_mul(self.mib_ns) >> 20))
    }
}

/// What has ended.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Completions {
    pub(super) ends: u64,
    /// How many of the bios were the only one that their stream had.
    pub(super) lone: u64,
    pub(super) cost: u64,
}

impl Add for Completions {
    type Output = Completions;

    fn add(self, other: Completions) -> Completions {
        Completions { ends: self.ends + other.ends, lone: self.lone + other.lone, cost: self.cost + other.cost }
    }
}

impl Sub for Completions {
    type Output = Completions;

    fn sub(self, other: Completions) -> Completions {
        Completions { ends: self.ends - other.ends, lone: self.lone - other.lone, cost: self.cost - other.cost }
    }
}

/// What a device does in a turn.
#[derive(Clone, Copy, Debug, Default)]
struct Throughput {
    ended: Completions,
    ns: u64,
}

impl Throughput {
    /// How long the device takes for a MiB of cost; at least one.
    fn mib_ns(self) -> u64 {
        (self.ns << 20).checked_div(self.ended.cost).unwrap_or(0).max(1)
    }

    /// Its ratio to another's, per mille. With less depth, streams with one bio at a time do more, and the others less.
    /// How much the device did for such a bio is unknown, so it counts at the usual price or at a high one, whichever
    /// shows more: the high price alone would take any wait of theirs for lost throughput.
    fn permille_of(self, other: Throughput) -> u64 {
        let counted = |of: Throughput, price: u64| u128::from(of.ended.cost + of.ended.lone * price);
        let ratio = |price| {
            let whole = counted(other, price) * u128::from(self.ns);
            (counted(self, price) * u128::from(other.ns) * 1000).checked_div(whole).unwrap_or(0) as u64
        };
        ratio(0).max(ratio(LONE_PRICE))
    }
}

/// See the head of the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depth {
    /// The depth that has been found to do, or is tried beside `less`.
    whole: u64,
    less: u64,
    /// Depth found while a bio waited; 0 until then.
    measured: u64,
    /// How much may be in flight just now, and how much of small bios.
    limit: u64,
    limit_small: u64,
    /// How much less is tried: a half to the power of this.
    step: u32,
    /// `less` was the whole until it was found too little.
    grows: bool,
    /// It is `less`, for now.
    low: bool,
    /// It was used up in this turn.
    bound: bool,
    /// Amount at the device, and its maximum in this turn.
    has: u64,
    peak: u64,
    /// Turns until the next attempt, and how many there will be after that.
    pause: u32,
    next_pause: u32,
    since_ns: u64,
    /// When something ended last.
    ended_ns: u64,
    /// Amount that must end until the previous turn's requests are over.
    skip: u64,
    ended: Completions,
    /// How long the device takes for a MiB of cost; a mean, zero until it is known.
    mib_ns: u64,
    /// What it did in the last turn with the whole.
    with_whole: Throughput,
    /// Turns in a row that took clearly more or less than the mean.
    changed: u32,
    /// Throughput with the smaller depth over that with the whole one just before, per mille, for each comparison.
    permille: [u64; TURNS],
    turns: usize,
    /// Attempts until more than the whole may be tried.
    more_after: u32,
}

impl Depth {
    /// For an unknown device.
    pub(super) fn new() -> Depth {
        Depth {
            whole: DEPTH_MAX,
            less: DEPTH_MAX,
            measured: 0,
            limit: DEPTH_MAX,
            limit_small: DEPTH_MAX,
            step: STEP_MIN,
            grows: false,
            low: false,
            bound: false,
            has: 0,
            peak: 0,
            pause: 0,
            next_pause: PAUSE_MIN,
            since_ns: 0,
            ended_ns: 0,
            skip: 0,
            ended: Completions::default(),
            mib_ns: 0,
            with_whole: Throughput::default(),
            changed: 0,
            permille: [0; TURNS],
            turns: 0,
            more_after: 0,
        }
    }

    /// The depth that has been found to do.
    pub(super) fn depth(&self) -> u64 {
        if self.grows { self.less } else { self.whole }
    }

    /// Finds how much may be in flight, after anything has changed.
    fn set_limits(&mut self) {
        self.limit = if self.pause > 0 {
            self.whole - self.whole / 16
        } else if self.low {
            self.less
        } else {
            self.whole
        };
        // Until it is measured the whole is only the load's demand; a slightly smaller limit shows whether the demand
        // is larger.
        self.limit_small = if self.pause > 0 && self.measured > 0 { self.whole } else { self.limit };
    }

    /// How much may be in flight just now.
    pub(super) fn limit(&self) -> DepthLimit {
        DepthLimit { all: self.limit, small: self.limit_small, mib_ns: self.mib_ns }
    }

    /// Records the amount at the device, its maximum in this turn, and whether a bio has waited because of the limit.
    pub(super) fn stands(&mut self, has: u64, peak: u64, bound: bool) {
        (self.has, self.peak, self.bound) = (has, peak.max(has), bound);
    }

    /// Bios have ended. True if the turn's marks start again.
    pub(super) fn ended(&mut self, ended: Completions, now_ns: u64) -> bool {
        let paused = now_ns.saturating_sub(std::mem::replace(&mut self.ended_ns, now_ns)) >= PAUSED_NS;
        if self.skip > 0 || paused {
            self.skip = self.skip.saturating_sub(ended.cost);
            (self.ended, self.since_ns) = (Completions::default(), now_ns);
            return true;
        }
        self.ended = self.ended + ended;
        let is_over = self.ended.ends >= TURN_ENDS && now_ns.saturating_sub(self.since_ns) >= TURN_NS;
        if is_over {
            self.end_turn(now_ns);
        }
        is_over
    }

    #[inline(never)]
    fn end_turn(&mut self, now_ns: u64) {
        let turn = Throughput { ended: self.ended, ns: now_ns - self.since_ns };
        let mib_ns = turn.mib_ns();
        if self.pause > 0 {
            self.pause -= 1;
            if self.bound && self.measured == 0 {
                // Until now it was only the load's demand.
                (self.pause, self.next_pause) = (0, PAUSE_MIN);
            } else if self.bound {
                self.look_for_change(mib_ns);
            }
        } else if !self.bound && (self.grows || self.low) {
            // The demand is below the depth.
            self.keep();
        } else {
            if !self.bound {
                // Not at once, unless the depth is unknown: a short lull does not change the load.
                let known = self.whole < DEPTH_MAX;
                let is_alone = self.measured > 0 && self.peak > 2 * self.measured;
                let had = if is_alone { self.measured } else { self.peak };
                self.try_less(had.max(if known { self.whole - self.whole / 8 } else { DEPTH_MIN }));
            } else if self.turns == 0 && !self.low && !self.grows {
                self.try_less(self.whole);
            }
            if self.low {
                self.permille[self.turns] = turn.permille_of(self.with_whole);
                self.turns += 1;
            } else {
                self.with_whole = turn;
                self.learn(mib_ns);
            }
            self.low = !self.low;
            if self.is_clear() {
                self.decide();
            }
        }
        self.set_limits();
        self.skip = self.has;
        (self.ended, self.bound, self.peak, self.since_ns) = (Completions::default(), false, self.has, now_ns);
    }

    fn try_less(&mut self, whole: u64) {
        if whole != self.whole {
            self.more_after = 0;
        }
        (self.whole, self.less) = (whole, (whole - (whole >> self.step)).max(DEPTH_MIN));
    }

    /// One bio more at least.
    fn try_more(&mut self) {
        let more = (self.whole / 8).max(self.ended.cost / self.ended.ends.max(1));
        (self.less, self.whole, self.grows) = (self.whole, (self.whole + more).min(DEPTH_MAX), true);
    }

    /// Starts a pause without changes.
    fn keep(&mut self) {
        (self.grows, self.low, self.turns) = (false, false, 0);
        (self.pause, self.next_pause) = (self.next_pause, (self.next_pause * 4).min(PAUSE_MAX));
    }

    fn learn(&mut self, mib_ns: u64) {
        self.mib_ns = if self.mib_ns == 0 { mib_ns } else { (self.mib_ns * 7 + mib_ns) / 8 };
    }

    /// Ends a pause if the device does more or less than it did, by an eighth.
    fn look_for_change(&mut self, mib_ns: u64) {
        if mib_ns.abs_diff(self.mib_ns) <= self.mib_ns / 8 {
            self.changed = 0;
            return self.learn(mib_ns);
        }
        self.changed += 1;
        if self.changed >= CHANGED_TURNS {
            (self.pause, self.next_pause, self.step, self.changed) = (0, PAUSE_MIN, STEP_MIN, 0);
            self.more_after = 0;
            self.mib_ns = mib_ns;
        }
    }

    /// Whether this share of the throughput, per mille, is enough for the smaller depth.
    fn is_enough(&self, permille: u64) -> bool {
        permille * 100 >= 100_000 - LOSS_PERCENT * (1000 >> self.step)
    }

    /// Whether all has been compared, or at the last step two have said that less is too little, which four cannot make
    /// enough, or that more is of no use.
    fn is_clear(&self) -> bool {
        let found = &self.permille[..self.turns];
        let says = |permille: &u64| if self.grows { *permille >= USELESS_PERMILLE } else { !self.is_enough(*permille) };
        found.len() == TURNS || (self.step == STEP_MAX && found.iter().filter(|permille| says(permille)).count() == 2)
    }

    fn decide(&mut self) {
        let found = &mut self.permille[..self.turns];
        found.sort_unstable();
        let middle = u64::midpoint(found[(found.len() - 1) / 2], found[found.len() / 2]);
        let said = if self.step == STEP_MIN { middle } else { found[1] };
        let useless = found[found.len() - 2] >= USELESS_PERMILLE;
        let enough = self.is_enough(said);
        self.turns = 0;
        if self.grows {
            if useless {
                (self.whole, self.more_after) = (self.less, MORE_AGAIN);
                self.keep();
            } else {
                self.next_pause = PAUSE_MIN;
                self.try_more();
            }
        } else if enough && self.whole > DEPTH_MIN {
            (self.whole, self.next_pause, self.more_after) = (self.less, PAUSE_MIN, 0);
            self.step = (self.step - 1).max(STEP_MIN);
        } else if self.step < STEP_MAX {
            self.step += 1;
        } else if self.next_pause == PAUSE_MIN || (middle <= LINEAR_PERMILLE && self.more_after == 0) {
            self.try_more();
        } else {
            self.more_after = self.more_after.saturating_sub(1);
            self.keep();
        }
        self.measured = self.depth();
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    const COST: u64 = 12 << 10;

    /// Depth found on a device that does `rate(depth)` small bios a second, between these seconds, with a demand of up
    /// to
    /// `wanted`.
    fn find(depth: &mut Depth, wanted: u64, seconds: [u64; 2], rate: impl FnMut(u64) -> f64) -> u64 {
        find_ns(depth, wanted, seconds.map(|s| s as f64 * 1e9), rate)
    }

    fn find_ns(depth: &mut Depth, wanted: u64, ns: [f64; 2], mut rate: impl FnMut(u64) -> f64) -> u64 {
        let [mut now_ns, end_ns] = ns;
        let (mut has, mut peak, mut bound) = (0, 0, false);
        while now_ns < end_ns {
            while has < wanted * COST && (has == 0 || depth.limit().fits(has, COST)) {
                has += COST;
                peak = has.max(peak);
            }
            bound |= has < wanted * COST;
            now_ns += 1e9 / rate(has / COST);
            has -= COST;
            depth.stands(has, peak, bound);
            if depth.ended(Completions { ends: 1, lone: 0, cost: COST }, now_ns as u64) {
                (peak, bound) = (0, false);
            }
        }
        (depth.depth() + COST / 2) / COST
    }

    #[test]
    fn the_depth_that_keeps_a_device_busy_is_found_from_above_and_below() {
        // 80 us each until the device has all it can do: that is 32, or 4, at one time.
        for (most, enough) in [(256, 32_u64), (256, 4), (16, 32), (64, 1)] {
            let mut depth = Depth::new();
            let rate = |depth: u64| depth.min(enough) as f64 * 12_500.0;
            let found = find(&mut depth, most, [0, 30], rate);
            let wanted = enough.min(most)..=(enough * 3 / 2).max(2);
            assert!(wanted.contains(&found), "{found} of {most} for {enough}");
            if most > enough {
                // A device that has become twice as wide.
                let rate = |depth: u64| depth.min(enough * 2) as f64 * 12_500.0;
                let found = find(&mut depth, most, [30, 90], rate);
                assert!((enough * 2..=enough * 3).contains(&found), "{found} of {most} for {enough} twice: {depth:?}");
            }
        }
    }

    #[test]
    fn it_does_not_matter_for_how_long_the_machine_runs_nor_how_long_nothing_was_wanted() {
        const DAY: u64 = 86_400;
        let mut depth = Depth::new();
        let rate = |depth: u64| depth.min(8) as f64 * 12_500.0;
        for day in [1, 30] {
            let [from_ns, to_ns] = [0.0, 0.1].map(|s| (day * DAY) as f64 + s);
            find_ns(&mut depth, 64, [from_ns, to_ns].map(|s| s * 1e9), rate);
            // 12 KiB in 80 us at eight at one time.
            let mib_ns = depth.limit().mib_ns;
            assert!((700_000..1_200_000).contains(&mib_ns), "{mib_ns} on day {day}");
        }
    }

    /// A lone stream submits 128 small bios to a device that takes 20 us for one. Returns the end time.
    fn alone(depth: &mut Depth, [mut now_ns, end_ns]: [u64; 2]) -> u64 {
        while now_ns < end_ns {
            now_ns += 20_000;
            depth.stands(128 * COST, 128 * COST, false);
            depth.ended(Completions { ends: 1, lone: 0, cost: COST }, now_ns);
        }
        now_ns
    }

    #[test]
    fn what_one_has_who_is_alone_says_nothing_of_the_depth() {
        let mut depth = Depth::new();
        let rate = |depth: u64| depth.min(4) as f64 * 12_500.0;
        let found = find(&mut depth, 128, [0, 10], rate);
        assert!((4..=6).contains(&found), "{found}");
        alone(&mut depth, [10_000_000_000, 70_000_000_000]);
        let after = (depth.depth() + COST / 2) / COST;
        assert!((4..=6).contains(&after), "{found}, and {after} after a minute alone");
        // A depth of unknown value: it is measured as soon as a bio waits.
        let mut depth = Depth::new();
        alone(&mut depth, [0, 60_000_000_000]);
        let found = find(&mut depth, 128, [60, 64], rate);
        assert!((4..=6).contains(&found), "{found} after a minute alone of which nothing was known");
    }

    #[test]
    fn a_device_that_grows_slowly_with_its_depth_keeps_nine_tenths() {
        let rate = |depth: u64| 400_000.0 * depth as f64 / (depth as f64 + 8.0);
        let found = find(&mut Depth::new(), 256, [0, 60], rate);
        assert!(rate(found) > 0.88 * 400_000.0, "{found}");
    }

    #[test]
    fn attempts_cost_next_to_nothing() {
        // Three at one time, on a device that has 80 us for each and as many ways; and as many as it takes, on one of
        // four.
        for (wanted, ways) in [(3, 3), (256, 4)] {
            let (mut depth, mut did_ns) = (Depth::new(), 0.0);
            find(&mut depth, wanted, [0, 10], |depth| {
                did_ns += 80_000.0 / ways as f64;
                depth.min(ways) as f64 * 12_500.0
            });
            assert!(did_ns > 9.8e9, "{did_ns} ns worth in ten seconds");
        }
    }

    #[test]
    fn of_small_bios_as_many_may_be_there_as_do() {
        let mut depth = Depth::new();
        let rate = |depth: u64| depth.min(59) as f64 * 12_500.0;
        let found = find(&mut depth, 256, [0, 30], rate);
        assert!(depth.pause > 0 && found >= 59, "{depth:?}");
        let (limit, has) = (depth.limit(), (found - 1) * COST);
        assert!(limit.fits(has, COST) && !limit.fits(has + 2 * COST, COST), "{found}: {limit:?}");
        assert!(limit.all < depth.depth(), "of large ones a sixteenth less: {limit:?}");
    }

    #[test]
    fn nobody_waits_for_long_behind_what_is_only_tried() {
        // Five ways: less is too little each time, and in proportion, so that more is tried as well.
        let mut depth = Depth::new();
        find(&mut depth, 256, [0, 10], |depth| depth.min(5) as f64 * 12_500.0);
        let did = depth.depth();
        let (mut ends, mut behind) = (0_u64, 0_u64);
        find(&mut depth, 256, [10, 130], |has| {
            (ends, behind) = (ends + 1, behind + u64::from(has * COST > did + COST / 2));
            has.min(5) as f64 * 12_500.0
        });
        assert!(behind * 2000 < ends, "{behind} of {ends} beyond {did}, at last {}", depth.depth());
    }

    #[test]
    fn between_two_ends_a_large_bio_goes_when_what_is_too_much_of_it_must_be_done() {
        let large = 128 << 10;
        let limit = DepthLimit { all: 5 * large / 2, small: 5 * large / 2, mib_ns: 320_000 };
        assert!(limit.fits(large, large) && !limit.fits(2 * large, large));
        // Half of it: 64 KiB at 320 us for a MiB.
        assert_eq!(limit.fits_at_ns(2 * large, large, 1_000_000), Some(1_020_000));
        assert_eq!(limit.fits_at_ns(3 * large, large, 1_000_000), None, "one is all that goes beyond");
    }
}
