//! The idle policy: when a lane without work stops busy-polling and sleeps.
//!
//! Two rules give the length of a look. [`Pauses`](pauses) takes the pauses between pieces of work as given and finds
//! the window that is cheapest for them. But a client that waits for its I/O makes its pauses from ours: where both
//! sides sleep because the other does, each pause is mostly wake-ups, and no window up to their length would pay.
//! [`Trials`](trials) finds out by experiment whether a longer look makes work come faster at no higher cost, and takes
//! no look where threads wait for CPUs.
//!
//! One lane owns a [`Lookout`]. Time, served I/Os and CPU time are arguments; it reads no clock.

mod pauses;
mod trials;

use pauses::Pauses;
pub use trials::CpuUse;
use trials::Trials;

/// How long a lane turns without work before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdlePolicy {
    /// Nanoseconds from the last work to sleep, at most; zero sleeps at once, the largest number never.
    pub spin_ns: u64,
    /// A longer spin window, ns, that is tried now and then and kept for as long as it pays. Nothing is tried if it is
    /// not longer than `spin_ns`.
    pub trial_ns: u64,
}

impl IdlePolicy {
    /// Upper bound of the option `spin_us`, microseconds: a second, after which a lane might as well never sleep.
    pub const SPIN_US_MAX: u64 = 1_000_000;

    /// Never spins for longer than this, ns; tries nothing.
    pub fn up_to(spin_ns: u64) -> IdlePolicy {
        IdlePolicy { spin_ns, trial_ns: 0 }
    }

    /// Longest spin window, ns.
    pub fn longest_ns(self) -> u64 {
        self.spin_ns.max(self.trial_ns)
    }
}

impl Default for IdlePolicy {
    fn default() -> Self {
        // Cost of a wake-up: 23 to 27 us in docs/benchmarks/daemon.md. A client that sleeps needs one and its own work;
        // several times that is seen by the longer window.
        IdlePolicy { spin_ns: 25_000, trial_ns: 200_000 }
    }
}

/// History of a lane's pauses and trials.
#[derive(Debug)]
pub(crate) struct Lookout {
    last_work_ns: u64,
    pauses: Pauses,
    trials: Trials,
}

impl Lookout {
    /// Without history.
    pub(crate) fn new(policy: IdlePolicy) -> Lookout {
        let trials = Trials::new((policy.trial_ns > policy.spin_ns).then_some(policy.trial_ns));
        Lookout { last_work_ns: 0, pauses: Pauses::new(policy.spin_ns), trials }
    }

    /// Sets the policy and forgets the history.
    pub(crate) fn set_policy(&mut self, policy: IdlePolicy) {
        *self = Lookout { last_work_ns: self.last_work_ns, ..Lookout::new(policy) };
    }

    /// There was work.
    #[inline]
    pub(crate) fn worked(&mut self, now_ns: u64) {
        let pause_ns = now_ns.saturating_sub(std::mem::replace(&mut self.last_work_ns, now_ns));
        self.pauses.ended(pause_ns);
    }

    /// After a turn without work: whether to spin rather than to sleep.
    #[inline]
    pub(crate) fn goes_on(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.last_work_ns) < self.trials.look_ns(self.pauses.look_ns())
    }

    /// Whether [`Lookout::read`] wants to be told how things are.
    #[inline]
    pub(crate) fn wants_reading(&self, now_ns: u64) -> bool {
        now_ns >= self.trials.next_ns()
    }

    /// How things are: I/Os served by the lane so far, wrapping, and how to ask for the CPU time of its thread.
    pub(crate) fn read(&mut self, now_ns: u64, ios: u64, cpu_use: impl FnOnce() -> CpuUse) {
        self.trials.read(now_ns, ios, cpu_use);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of a microsecond are easy to see here.
    const WHOLE_NS: u64 = 24_000;

    /// Spin window of a lane after these pauses.
    fn looks_ns(pauses_ns: &[u64]) -> u64 {
        let mut lookout = Lookout::new(IdlePolicy::up_to(WHOLE_NS));
        let mut now_ns = 0;
        for pause_ns in pauses_ns {
            now_ns += pause_ns;
            lookout.worked(now_ns);
        }
        (0..=WHOLE_NS).find(|ns| !lookout.goes_on(now_ns + ns)).unwrap()
    }

    #[test]
    fn a_look_is_as_long_as_would_have_been_cheapest() {
        let table: [(&[u64], u64, &str); 10] = [
            (&[], 24_000, "nothing known"),
            (&[500_000; 31], 24_000, "too little known"),
            (&[5_000; 64], 6_000, "work every 5 us"),
            (&[10_000; 64], 12_000, "work every 10 us"),
            (&[23_000; 64], 24_000, "work every 23 us"),
            (&[50_000; 64], 1_500, "work every 50 us"),
            (&[1_000; 640], 24_000, "answers that any look sees"),
            (&[80_000, 1_000].repeat(64), 1_500, "a client that follows at once on a disk of 80 us"),
            (&[80_000, 10_000].repeat(64), 12_000, "one that needs 10 us to follow"),
            (&[80_000, 20_000].repeat(64), 1_500, "one that needs 20"),
        ];
        for (pauses_ns, look_ns, what) in table {
            assert_eq!(looks_ns(pauses_ns), look_ns, "{what}");
        }
    }

    #[test]
    fn an_hour_of_rest_is_one_pause_and_old_ways_are_forgotten() {
        let mut pauses_ns = vec![3_600_000_000_000];
        pauses_ns.extend([10_000; 32]);
        assert_eq!(looks_ns(&pauses_ns), 12_000);
        let mut pauses_ns = vec![50_000; 1000];
        pauses_ns.extend([10_000; 96]);
        assert_eq!(looks_ns(&pauses_ns), 12_000);
    }

    #[test]
    fn the_largest_number_never_sleeps_and_zero_always_does() {
        let mut never = Lookout::new(IdlePolicy::up_to(u64::MAX));
        let mut always = Lookout::new(IdlePolicy::up_to(0));
        // An hour apart, for eleven years.
        for hour in 0..100_000 {
            let now_ns = hour * 3_600_000_000_000;
            never.worked(now_ns);
            always.worked(now_ns);
            assert!(never.goes_on(now_ns + 3_599_999_999_999) && !always.goes_on(now_ns));
        }
    }
}
