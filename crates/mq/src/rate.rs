//! Rate limits on I/Os and bytes a second, shared by hardware queues.
//!
//! A limit is one number for each of the two: the time up to which the I/O so far takes, at that rate. An I/O that
//! costs `c` ns starts at that time, or now if it is past, and moves it `c` later. An I/O ahead of now by more than the
//! burst waits for the difference. This is the generic cell rate algorithm of ATM (ITU-T I.371, virtual scheduling),
//! with two differences:
//!
//! * The cost of the I/O itself is not tested. So one that is longer than the burst passes, and later ones wait for it.
//! * No I/O is refused. A waiting I/O is *booked*: it has its position in the number already, and a time at which it
//!   may pass. Later bookings get later times, so an I/O never waits longer than the earlier bookings take.
//!
//! ```text
//!             burst                        one more, booked
//!       ├───────────────────┤              ├── c ──┤
//!  ─────┼───────────────────┼──────────────┼───────┼────▶ time
//!      now                               free    free'
//!                           └─ waits so ───┘
//! ```
//!
//! Shared by all its queues and lanes; a booking is one compare-and-exchange. `hw/rated.rs` defines the size of a
//! booking and when it passes. A changed limit is a new one, which begins with its whole burst.

use blkyard_mem::sync::{AtomicU64, CachePadded, Ordering::Relaxed};

/// How much may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateConfig {
    /// I/Os per second; zero for any number.
    pub iops: u64,
    /// Bytes per second; zero for any number.
    pub bytes_per_s: u64,
    /// How much may be saved up while less is wanted, as the time it takes at these rates.
    pub burst_ms: u32,
}

impl RateConfig {
    /// Shortest burst: twice a queue's booking, so that a late queue loses nothing.
    pub const BURST_MS_MIN: u32 = 1;
}

impl Default for RateConfig {
    fn default() -> Self {
        // A tenth of a second, as QEMU has it (`throttle_config_init`, bucket size).
        RateConfig { iops: 0, bytes_per_s: 0, burst_ms: 100 }
    }
}

/// A limit that any number of hardware queues share.
#[derive(Debug)]
pub struct RateLimit {
    config: RateConfig,
    pub(crate) ios: Option<Meter>,
    pub(crate) bytes: Option<Meter>,
}

impl RateLimit {
    /// An unused limit; `None` if the configuration is unlimited.
    pub fn new(config: RateConfig) -> Option<RateLimit> {
        let burst_ns = u64::from(config.burst_ms.max(RateConfig::BURST_MS_MIN)) * 1_000_000;
        let meter = |per_s| (per_s > 0).then(|| Meter::new(per_s, burst_ns));
        let limit = RateLimit { ios: meter(config.iops), bytes: meter(config.bytes_per_s), config };
        (limit.ios.is_some() || limit.bytes.is_some()).then_some(limit)
    }

    /// Its configuration.
    pub fn config(&self) -> RateConfig {
        self.config
    }
}

/// One rate of a limit.
#[derive(Debug)]
pub(crate) struct Meter {
    /// When all that has passed or is booked is through, at the rate.
    free_ns: CachePadded<AtomicU64>,
    /// Time of one unit, ns in fixed point with 32 fractional bits, rounded up.
    unit_ns_q32: u64,
    burst_ns: u64,
}

impl Meter {
    fn new(per_s: u64, burst_ns: u64) -> Meter {
        let unit_ns_q32 = (1_000_000_000_u64 << 32).div_ceil(per_s);
        Meter { free_ns: CachePadded(AtomicU64::new(0)), unit_ns_q32, burst_ns }
    }

    /// Time of `units` at the rate, rounded up.
    #[inline]
    pub(crate) fn takes_ns(&self, units: u64) -> u64 {
        let takes_ns = (u128::from(units) * u128::from(self.unit_ns_q32)).div_ceil(1 << 32);
        u64::try_from(takes_ns).unwrap_or(u64::MAX)
    }

    /// Books units, and returns the time at which the last `one` of them may pass.
    #[inline]
    pub(crate) fn book(&self, now_ns: u64, units: u64, one: u64) -> u64 {
        let all_ns = self.takes_ns(units);
        let before_last_ns = all_ns.saturating_sub(self.takes_ns(one));
        let start_ns = self.put(|free_ns| (free_ns.max(now_ns)).saturating_add(all_ns)).max(now_ns);
        start_ns.saturating_add(before_last_ns).saturating_sub(self.burst_ns)
    }

    /// Units that pass unasked.
    #[inline]
    pub(crate) fn charge(&self, now_ns: u64, units: u64) {
        self.book(now_ns, units, units);
    }

    /// Units that were booked and will not pass.
    pub(crate) fn give_back(&self, units: u64) {
        let takes_ns = self.takes_ns(units);
        self.put(|free_ns| free_ns.saturating_sub(takes_ns));
    }

    /// Replaces the number; returns the previous one. Relaxed: it orders no other data.
    #[inline]
    fn put(&self, next: impl Fn(u64) -> u64) -> u64 {
        self.free_ns.0.fetch_update(Relaxed, Relaxed, |free_ns| Some(next(free_ns))).unwrap_or_else(|free_ns| free_ns)
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    fn meter(per_s: u64, burst_ms: u32) -> Meter {
        Meter::new(per_s, u64::from(burst_ms) * MS)
    }

    #[test]
    fn what_is_booked_one_by_one_passes_at_the_rate_once_the_burst_is_used_up() {
        // A thousand a second: each takes a millisecond, and three may be saved up.
        let meter = meter(1000, 3);
        let at = [0; 6].map(|now_ns| meter.book(now_ns, 1, 1));
        assert_eq!(at, [0, 0, 0, 0, MS, 2 * MS], "three saved up, the one that is due, then one a millisecond");
    }

    #[test]
    fn table_of_worked_examples() {
        for (what, per_s, burst_ms, books) in [
            // (now, units, when the last may go)
            ("each in its time", 1000, 1, &[(0, 1, 0), (MS, 1, 0), (2 * MS, 1, MS)][..]),
            ("an idle time saves no more than the burst", 1000, 2, &[(0, 1, 0), (90 * MS, 5, 92 * MS)]),
            ("one longer than the burst passes, and the next waits", 1000, 1, &[(0, 1, 0), (MS, 9, 8 * MS)]),
            ("who is late has lost nothing", 1000, 4, &[(0, 4, 0), (3 * MS, 4, 3 * MS), (5 * MS, 1, 4 * MS)]),
            ("bytes", 1_000_000, 1, &[(0, 4096, 3_095_000), (0, 4096, 7_191_000)]),
        ] {
            let meter = meter(per_s, burst_ms);
            for (at, (now_ns, units, due_ns)) in books.iter().enumerate() {
                assert_eq!(meter.book(*now_ns, *units, 1), *due_ns, "{what}, {at}");
            }
        }
    }

    #[test]
    fn a_long_one_by_itself_does_not_wait_for_itself() {
        let meter = meter(1_000_000, 1);
        assert_eq!(meter.book(5 * MS, 1 << 20, 1 << 20), 4 * MS);
        let next_ns = meter.book(5 * MS, 512, 512);
        assert_eq!(next_ns, 4 * MS + (1 << 20) * 1000, "it has passed, and is paid for");
    }

    #[test]
    fn what_is_given_back_others_may_have() {
        let meter = meter(1000, 1);
        meter.book(0, 10, 1);
        meter.give_back(8);
        assert_eq!(meter.book(0, 1, 1), MS);
        // More than there is: never before time began.
        meter.give_back(1000);
        assert_eq!(meter.book(0, 1, 1), 0);
    }

    #[test]
    fn rates_are_kept_to_a_nanosecond_for_each() {
        for (per_s, units, takes_ns) in [
            (1000, 1, 1_000_000),
            (3, 1, 333_333_334),
            (3, 3, 1_000_000_001),
            (100_000_000_000, 4096, 41),
            (1, 9, 9_000_000_000),
        ] {
            let ns = meter(per_s, 1).takes_ns(units);
            assert!(ns.abs_diff(takes_ns) <= 1, "{per_s}/s, {units}: {ns} ns");
        }
    }

    #[test]
    fn no_rate_at_all_is_no_limit() {
        assert!(RateLimit::new(RateConfig::default()).is_none());
        assert!(RateLimit::new(RateConfig { iops: 1, ..RateConfig::default() }).is_some());
    }

    proptest! {
        /// For any bookings: in any interval no more passes than the rate allows in it, the burst, and one.
        #[test]
        fn never_more_than_the_rate_and_the_burst(
            per_s in 1_u64..1_000_000, burst_ms in 1_u32..20,
            books in proptest::collection::vec((0_u64..3_000_000, 1_u64..2000), 1..60),
        ) {
            let meter = meter(per_s, burst_ms);
            let (mut now_ns, mut gone) = (0, Vec::new());
            for (later_ns, units) in books {
                now_ns += later_ns;
                let at_ns = meter.book(now_ns, units, units);
                gone.push((at_ns.max(now_ns), units));
            }
            for from in 0..gone.len() {
                for to in from..gone.len() {
                    // All but the last, which may be as long as it likes.
                    let units: u64 = gone[from..to].iter().map(|(_, units)| units).sum();
                    let (start_ns, end_ns) = (gone[from].0, gone[to].0);
                    let allowed_ns = end_ns - start_ns + meter.burst_ns;
                    prop_assert!(units as u128 * 1_000_000_000 / u128::from(per_s) <= u128::from(allowed_ns) + 1);
                }
            }
            prop_assert!(gone.is_sorted_by_key(|(at_ns, _)| *at_ns), "who books first goes first");
        }
    }
}
