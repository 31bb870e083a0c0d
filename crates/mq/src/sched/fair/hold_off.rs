//! Hold-off of a device with seeks after a turn of asynchronous writes.
//!
//! A disk with a write cache completes writes when the cache has them. It destages the rest during the requests that
//! follow, a little at a time, with a seek there and back for each part: 80 ms of continuous writing take three times
//! as long. So the scheduler dispatches no request for a while, as part of the writers' turn. The length is learned
//! from the sequential reads that follow: it grows while some of them take clearly longer than usual, and shrinks
//! slowly when none does. A device without such a cache never shows this, and gets no hold-off. One whose reads stay
//! slow all the same gets none for a while.

/// A read in a row that takes this much longer than usual, and half as long again, was held up by something far away: a
/// turn of the platter, which a read can miss by itself, and some more.
const SLOW_NS: u64 = 10_000_000;
/// How long after a turn of writes that shows in reads: some turns of others.
const LOOK_NS: u64 = 300_000_000;
/// Increase for each slow read: the shortest destaging for a seek there and back.
const MORE_NS: u64 = 4_000_000;
/// Decrease, as a part, after a turn of writes without a slow read.
const LESS_PART: u64 = 16;
/// Upper bound: the length of a turn.
const MOST_NS: u64 = 100_000_000;
/// Turns of writes for which it is given up, if it does not help: minutes.
const GIVEN_UP: u32 = 512;

/// See the head of the module.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WriteHoldOff {
    ns: u64,
    /// When writes had their last turn, and how many reads have been slow since.
    since_ns: Option<u64>,
    slow: u64,
    /// Largest number of slow reads after a turn, since the hold-off was zero.
    slow_most: u64,
    given_up: u32,
}

impl WriteHoldOff {
    /// How long the device is left alone.
    pub(super) fn ns(&self) -> u64 {
        self.ns
    }

    /// A turn of writes has ended, with its hold-off.
    pub(super) fn wrote(&mut self, now_ns: u64) {
        let slow = std::mem::take(&mut self.slow);
        self.since_ns = Some(now_ns);
        if self.given_up > 0 {
            self.given_up -= 1;
        } else if slow > 0 {
            self.ns = (self.ns + slow * MORE_NS).min(MOST_NS);
            self.slow_most = self.slow_most.max(slow);
            if self.ns == MOST_NS && 2 * slow > self.slow_most {
                *self = WriteHoldOff { since_ns: self.since_ns, given_up: GIVEN_UP, ..WriteHoldOff::default() };
            }
        } else {
            self.ns -= self.ns / LESS_PART;
            if self.ns < MORE_NS {
                (self.ns, self.slow_most) = (0, 0);
            }
        }
    }

    /// Whether a read in a row was held up.
    pub(super) fn is_slow(took_ns: u64, usual_ns: u64) -> bool {
        took_ns > usual_ns + usual_ns / 2 + SLOW_NS
    }

    /// A sequential read has ended in a turn, `took_ns` after the previous end, where `usual_ns` is usual. Returns the
    /// time it lost to earlier writes.
    pub(super) fn read(&mut self, took_ns: u64, usual_ns: u64, now_ns: u64) -> u64 {
        let looks = self.since_ns.is_some_and(|since_ns| now_ns.saturating_sub(since_ns) < LOOK_NS);
        if !looks || !WriteHoldOff::is_slow(took_ns, usual_ns) {
            return 0;
        }
        self.slow += 1;
        took_ns - usual_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Runs `turns` turns of writes, each of which leaves dirty data: 10 ms of it delay a read by 24.
    fn play(hold_off: &mut WriteHoldOff, turns: u64, left_ns: u64) {
        for turn in 0..turns {
            let now_ns = turn * 600 * MS;
            hold_off.wrote(now_ns);
            let held_up = left_ns.saturating_sub(hold_off.ns()).div_ceil(10 * MS);
            for read in 0..20 {
                let took_ns = if read < held_up { 29 * MS } else { 5 * MS };
                let lost_ns = hold_off.read(took_ns, 5 * MS, now_ns + read * 10 * MS);
                assert_eq!(lost_ns, took_ns - 5 * MS);
            }
        }
    }

    #[test]
    fn a_device_is_left_alone_for_about_as_long_as_it_takes_to_empty_its_cache() {
        let mut hold_off = WriteHoldOff::default();
        play(&mut hold_off, 50, 0);
        assert_eq!(hold_off.ns(), 0, "it has nothing left");
        for left_ms in [80, 30] {
            play(&mut hold_off, 50, left_ms * MS);
            let ms = hold_off.ns() / MS;
            assert!((left_ms * 3 / 4..=left_ms * 5 / 4).contains(&ms), "{ms} of {left_ms}");
        }
        play(&mut hold_off, 100, 0);
        assert_eq!(hold_off.ns(), 0, "nor any more");
    }

    #[test]
    fn a_read_that_has_missed_a_turn_of_the_platter_was_not_held_up_by_writes() {
        let mut hold_off = WriteHoldOff::default();
        for turn in 0..50 {
            hold_off.wrote(turn * 600 * MS);
            for read in 0..20 {
                assert_eq!(hold_off.read(5 * MS + 8_333_333, 5 * MS, turn * 600 * MS + read * 14 * MS), 0);
            }
        }
        assert_eq!(hold_off.ns(), 0);
    }

    #[test]
    fn what_is_slow_all_the_same_is_given_up() {
        let (mut hold_off, mut silent_ns) = (WriteHoldOff::default(), 0);
        for turn in 0..1000 {
            hold_off.wrote(turn * 600 * MS);
            silent_ns += hold_off.ns();
            // Others use the disk as well.
            for read in 0..20 {
                hold_off.read(if read % 5 == 0 { 29 * MS } else { 5 * MS }, 5 * MS, turn * 600 * MS + read);
            }
        }
        assert!(silent_ns < 2000 * MS, "{silent_ns}");
    }
}
