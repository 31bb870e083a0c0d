//! How often a request is submitted again whose commands are cancelled.

/// Commands of one request that a reset or a lost connection has cancelled: they ended without an answer.
///
/// Such a request is submitted again, and no retry is counted. The number of cancelled commands alone is no reason to
/// fail it: a controller may restart often. Nor is the time: it may have been away. Both together bound a request that
/// is itself the cause of the resets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cancellations {
    count: u8,
    is_exhausted: bool,
    /// Time of the first one, ns.
    first_ns: u64,
}

impl Cancellations {
    /// None.
    pub const NONE: Cancellations = Cancellations { count: 0, is_exhausted: false, first_ns: 0 };
    /// Cancelled commands after which a further one may fail the request: the retries of a failed command.
    pub const MAX: u8 = 5;
    /// Time since the first one, ns. It is the default timeout of an I/O, here and in Linux, and longer than a reset of
    /// a live controller.
    pub const TIME_NS: u64 = 30_000_000_000;

    /// Counts a command that was cancelled now. Returns whether the request is to fail: more than
    /// [`MAX`](Cancellations::MAX) were cancelled, the first one [`TIME_NS`](Cancellations::TIME_NS) ago.
    pub fn add(&mut self, now_ns: u64) -> bool {
        if self.count == 0 {
            self.first_ns = now_ns;
        }
        self.count = self.count.saturating_add(1);
        let elapsed_ns = now_ns.saturating_sub(self.first_ns);
        self.is_exhausted = self.count > Cancellations::MAX && elapsed_ns >= Cancellations::TIME_NS;
        self.is_exhausted
    }

    /// Whether the last command that was cancelled is to fail the request.
    pub fn is_exhausted(self) -> bool {
        self.is_exhausted
    }

    /// Whether there is one.
    pub fn is_set(self) -> bool {
        self.count > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cancellations_fail_a_request_only_if_many_and_over_long() {
        let long_ns = Cancellations::TIME_NS;
        let after = |times_ns: &[u64]| {
            let mut cancelled = Cancellations::NONE;
            let last = times_ns.iter().map(|time_ns| cancelled.add(7 + time_ns)).last();
            assert_eq!(last, Some(cancelled.is_exhausted()));
            cancelled.is_exhausted()
        };
        assert!(!after(&[0; 300]), "many at once");
        assert!(!after(&[0, 0, 0, 0, 0, long_ns - 1]), "many within the time");
        assert!(!after(&[0, 0, 0, 0, u64::MAX - 7]), "few over long");
        assert!(after(&[0, 0, 0, 0, 0, long_ns]));
        assert!(after(&[0, 1, 2, 3, long_ns, long_ns]));
    }
}
