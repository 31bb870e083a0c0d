//! A rate limit for log lines (`printk_ratelimited` of Linux): a token bucket that counts the lines held back.

use std::fmt::{self, Display};
use std::time::{Duration, Instant};

/// Burst of log lines that one peer may cause: some restarts of a guest, with the lines of its firmware and its kernel.
const PEER_BURST: u32 = 30;
/// Time to the next line after that. A flood of years fills a megabyte in a day.
const PEER_INTERVAL: Duration = Duration::from_secs(10);

/// Says which of many log lines on one object are shown.
#[derive(Debug)]
pub struct LogLimit {
    burst: u32,
    interval: Duration,
    tokens: u32,
    /// When a token was added last.
    refilled: Option<Instant>,
    held_back: u64,
}

/// For the lines that one peer causes: 30 at once, then one every 10 s.
impl Default for LogLimit {
    fn default() -> LogLimit {
        LogLimit::new(PEER_BURST, PEER_INTERVAL)
    }
}

/// Number of lines held back, as the end of the next line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldBack(pub u64);

impl Display for HeldBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " ({} lines before this were left out)", self.0) }
    }
}

impl LogLimit {
    /// Up to `burst` lines at once, and one more for each `interval`.
    pub fn new(burst: u32, interval: Duration) -> LogLimit {
        LogLimit { burst, interval, tokens: burst, refilled: None, held_back: 0 }
    }

    /// Asks for a line. Some if it is to be shown: the number of lines held back since the last one.
    pub fn pass(&mut self, now: Instant) -> Option<u64> {
        self.refill(now);
        if self.tokens == 0 {
            self.held_back += 1;
            return None;
        }
        self.tokens -= 1;
        Some(std::mem::take(&mut self.held_back))
    }

    /// Returns the number of dropped lines, for a line of its own, if there are any and one is due.
    pub fn pass_held_back(&mut self, now: Instant) -> Option<u64> {
        self.refill(now);
        if self.held_back == 0 || self.tokens == 0 { None } else { self.pass(now) }
    }

    fn refill(&mut self, now: Instant) {
        let refilled = *self.refilled.get_or_insert(now);
        let intervals = now.saturating_duration_since(refilled).as_nanos() / self.interval.as_nanos().max(1);
        let intervals = u32::try_from(intervals).unwrap_or(u32::MAX);
        self.tokens = self.tokens.saturating_add(intervals).min(self.burst);
        let full = self.tokens == self.burst;
        self.refilled = Some(if full { now } else { refilled + self.interval * intervals });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn burst_passes_and_the_rest_is_counted() {
        let (mut limit, now) = (LogLimit::new(3, 10 * SECOND), Instant::now());
        let shown = (0..1000).filter(|_| limit.pass(now).is_some()).count();
        assert_eq!(shown, 3);
        assert_eq!(limit.pass_held_back(now + 9 * SECOND), None);
        assert_eq!(limit.pass(now + 10 * SECOND), Some(997));
        assert_eq!(limit.pass(now + 10 * SECOND), None);
        assert_eq!(limit.pass_held_back(now + 20 * SECOND), Some(1));
        assert_eq!(limit.pass_held_back(now + 3600 * SECOND), None, "nothing was held back since");
    }

    #[test]
    fn steady_flood_is_one_line_an_interval() {
        let (mut limit, begin) = (LogLimit::new(5, 10 * SECOND), Instant::now());
        let times = (0..100_000).map(|step| begin + step * SECOND / 100);
        let shown: Vec<u64> = times.filter_map(|now| limit.pass(now)).collect();
        // 1000 seconds.
        assert!((104..=105).contains(&shown.len()), "{}", shown.len());
        assert!(shown.iter().sum::<u64>() > 98_000);
    }

    #[test]
    fn lone_line_after_a_flood_passes_at_once() {
        let (mut limit, begin) = (LogLimit::new(2, 10 * SECOND), Instant::now());
        assert_eq!((0..1000).filter_map(|_| limit.pass(begin)).count(), 2);
        assert!(limit.pass(begin + 15 * SECOND).is_some());
        assert!(limit.pass(begin + 21 * SECOND).is_some(), "the half interval counts");
    }
}
