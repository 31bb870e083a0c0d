//! How often the control path looks at queues that drain or flush.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Shortest and longest polling interval. In between it is an eighth of the time since any began: a device that hangs
/// can hold up all exports of a daemon at once.
const DRAIN_POLL: RangeInclusive<Duration> = Duration::from_millis(2)..=Duration::from_millis(100);

/// Polling interval of queues that have drained for this time.
pub(crate) fn drain_poll(waited: Duration) -> Duration {
    (waited / 8).clamp(*DRAIN_POLL.start(), *DRAIN_POLL.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_that_drain_for_long_are_polled_less_often() {
        for (waited_ms, poll_ms) in [(0, 2), (16, 2), (80, 10), (800, 100), (30_000, 100)] {
            assert_eq!(drain_poll(Duration::from_millis(waited_ms)), Duration::from_millis(poll_ms), "{waited_ms}");
        }
    }
}
