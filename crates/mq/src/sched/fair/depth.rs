//! How much of a device's queue is worth using, where several streams share it.
//!
//! Whoever comes late waits for what the device has already. So it is given no more than keeps it busy, which is measured: by turns it has
//! the whole depth for a while, and three quarters of it. If that makes no difference to what it does, the depth becomes less; if it does
//! less, more. The two are compared over several turns, so that it does not matter that what is wanted changes meanwhile. The probe only ever goes
//! down, so that it makes nobody wait for longer.
//!
//! If nobody waits although the device has less than the depth, the depth is what it has had. If that turns out to be needed, the next attempt is
//! made the later the more often that happened: who shares a device that has enough for all must not pay for it.

/// How long a turn lasts at least.
const TURN_NS: u64 = 5_000_000;
/// Ends in a turn, at least.
const TURN_ENDS: u32 = 64;
/// Turns of each kind before they are compared.
const TURNS: u32 = 4;
/// Of a thousand: three quarters do as much as all if they do at least this.
const ENOUGH_PERMILLE: u64 = 985;
/// And less if they do less than this. Where three quarters do 97 of 100, all do 9 of 10 of what any depth could, in a device that grows
/// as slowly with its depth as one whose dies are hit at random.
const TOO_LITTLE_PERMILLE: u64 = 970;
/// The least depth: of one there are no three quarters.
const DEPTH_MIN: usize = 2;
/// Turns after an attempt that failed until the next, the first time and at most: a few percent of the time are spent on attempts.
const PAUSE_MIN: u32 = 8;
const PAUSE_MAX: u32 = 512;

/// See the head of the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depth {
    /// The depth that has been found to do.
    whole: usize,
    most: usize,
    /// Three quarters, for now.
    low: bool,
    /// It was used up in this turn.
    bound: bool,
    /// The most the device had in this turn.
    peak: usize,
    /// Turns until the next attempt with less than nobody waits for, and how many there will be after that.
    pause: u32,
    next_pause: u32,
    since_ns: u64,
    /// Ends to be let by until what belongs to the turn before is over.
    skip: u32,
    ends: u32,
    cost: u64,
    /// What was done, and how long that took: with all of it, with three quarters.
    done: [u64; 2],
    took_ns: [u64; 2],
    turns: u32,
}

impl Depth {
    /// Of a device that has so many places.
    pub(super) fn new(most: usize) -> Depth {
        Depth {
            whole: most.max(DEPTH_MIN),
            most: most.max(DEPTH_MIN),
            low: false,
            bound: false,
            peak: 0,
            pause: 0,
            next_pause: PAUSE_MIN,
            since_ns: 0,
            skip: 0,
            ends: 0,
            cost: 0,
            done: [0; 2],
            took_ns: [0; 2],
            turns: 0,
        }
    }

    /// The depth that has been found to do.
    pub(super) fn depth(&self) -> usize {
        self.whole
    }

    /// How much may be in flight just now.
    #[inline]
    pub(super) fn limit(&self) -> usize {
        if self.low { three_quarters(self.whole) } else { self.whole }
    }

    /// Somebody waits because of it.
    #[inline]
    pub(super) fn bound(&mut self) {
        self.bound = true;
    }

    /// So much is in flight.
    #[inline]
    pub(super) fn used(&mut self, in_flight: usize) {
        self.peak = self.peak.max(in_flight);
    }

    /// Something has ended that was worth so much.
    #[inline]
    pub(super) fn ended(&mut self, cost: u64, now_ns: u64) {
        if self.skip > 0 {
            self.skip -= 1;
            (self.since_ns, self.bound) = (now_ns, false);
            return;
        }
        self.ends += 1;
        self.cost += cost;
        if self.ends >= TURN_ENDS && now_ns.saturating_sub(self.since_ns) >= TURN_NS {
            self.end_turn(now_ns);
        }
    }

    #[inline(never)]
    fn end_turn(&mut self, now_ns: u64) {
        if !self.bound && !self.low && self.pause == 0 {
            self.whole = self.peak.clamp(DEPTH_MIN, self.most);
            self.bound = true;
        }
        if self.bound {
            let low = usize::from(self.low);
            self.done[low] += self.cost;
            self.took_ns[low] += now_ns - self.since_ns;
            self.turns += 1;
            self.low = !self.low;
        } else {
            // Nobody waited: what was done says nothing of what could be.
            (self.turns, self.low, self.pause) = (0, false, self.pause.saturating_sub(1));
        }
        if self.turns == 2 * TURNS {
            self.decide();
        }
        if self.turns == 0 {
            (self.done, self.took_ns) = ([0; 2], [0; 2]);
        }
        self.skip = self.whole as u32;
        (self.ends, self.cost, self.bound, self.peak, self.since_ns) = (0, 0, false, 0, now_ns);
    }

    fn decide(&mut self) {
        let rate = |at: usize| u128::from(self.done[at]) * 1_000_000_000 / u128::from(self.took_ns[at].max(1));
        let permille = rate(1) * 1000 / rate(0).max(1);
        if permille >= u128::from(ENOUGH_PERMILLE) {
            self.whole = three_quarters(self.whole).max(DEPTH_MIN);
            self.next_pause = PAUSE_MIN;
        } else if permille < u128::from(TOO_LITTLE_PERMILLE) {
            self.whole = (self.whole + (self.whole / 3).max(1)).min(self.most);
            (self.pause, self.next_pause) = (self.next_pause, (self.next_pause * 2).min(PAUSE_MAX));
        }
        self.turns = 0;
    }
}

/// At least one less.
fn three_quarters(depth: usize) -> usize {
    (depth * 3).div_ceil(4).min(depth - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The depth that is found on a device that does `rate(depth)` a second, between these seconds.
    fn find(depth: &mut Depth, from: u64, to: u64, mut rate: impl FnMut(usize) -> f64) -> usize {
        let (mut now_ns, end_ns) = (from as f64 * 1e9, to as f64 * 1e9);
        while now_ns < end_ns {
            now_ns += 1e9 / rate(depth.limit());
            depth.used(depth.limit());
            depth.bound();
            depth.ended(1, now_ns as u64);
        }
        depth.depth()
    }

    #[test]
    fn the_depth_that_keeps_a_device_busy_is_found_from_above_and_below() {
        // 80 us each until the device has all it can do: that is 32, or 4, at one time.
        for (most, enough) in [(256, 32_usize), (256, 4), (16, 32), (64, 1)] {
            let mut depth = Depth::new(most);
            let rate = |depth: usize| depth.min(enough) as f64 * 12_500.0;
            let found = find(&mut depth, 0, 30, rate);
            let wanted = enough.min(most)..=(enough * 3 / 2).max(DEPTH_MIN);
            assert!(wanted.contains(&found), "{found} of {most} for {enough}");
            if most > enough {
                // A device that has become twice as wide.
                let rate = |depth: usize| depth.min(enough * 2) as f64 * 12_500.0;
                let found = find(&mut depth, 30, 60, rate);
                assert!((enough * 2..=enough * 3).contains(&found), "{found} of {most} for {enough} twice");
            }
        }
    }

    #[test]
    fn a_device_that_grows_slowly_with_its_depth_keeps_nine_tenths() {
        let mut depth = Depth::new(256);
        let rate = |depth: usize| 400_000.0 * depth as f64 / (depth as f64 + 8.0);
        let found = find(&mut depth, 0, 60, rate);
        assert!(rate(found) > 0.88 * 400_000.0, "{found}");
    }

    #[test]
    fn who_needs_less_than_there_is_pays_next_to_nothing_for_being_asked() {
        // Three at one time, on a device that has 80 us for each and as many ways.
        let (mut depth, mut now_ns, mut lost_ns) = (Depth::new(64), 0, 0);
        while now_ns < 10_000_000_000 {
            let takes = depth.limit().min(3);
            depth.used(takes);
            if takes < 3 {
                depth.bound();
            }
            let took_ns = 80_000 / takes as u64;
            lost_ns += took_ns - 80_000 / 3;
            now_ns += took_ns;
            depth.ended(1, now_ns);
        }
        assert!(lost_ns * 50 < now_ns, "{lost_ns} of {now_ns}");
    }
}
