//! The idle policy: when a lane without work stops busy-polling and sleeps.
//!
//! Busy-polling burns a CPU. Sleeping costs two passages through the kernel, and the submitter waits for the wake-up.
//! A lane without history polls for as long as a sleep would have cost, and then sleeps: it never pays more than twice
//! the optimum. A lane learns the distance between pieces of work, including a sleep between them, so that work every
//! 50 us counts as 50 us whether the lane slept or not. It has four polling times, from a short one for answers that
//! follow at once to the whole window, and takes the one that would have been cheapest for its last pauses.
//!
//! One lane owns a [`Lookout`]. Time is an argument; it reads no clock.

/// How long a lane turns without work before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdlePolicy {
    /// Nanoseconds from the last work to sleep, at most; zero sleeps at once, the largest number never.
    pub spin_ns: u64,
}

impl IdlePolicy {
    /// Upper bound of the option `spin_us`, microseconds: a second, after which a lane might as well never sleep.
    pub const SPIN_US_MAX: u64 = 1_000_000;
}

impl Default for IdlePolicy {
    fn default() -> Self {
        // Cost of a wake-up: 23 to 27 us in docs/benchmarks/daemon.md.
        IdlePolicy { spin_ns: 25_000 }
    }
}

/// Lengths of the spin window, in parts of the whole; a sleep costs as much as the whole.
const LOOKS: [u64; 4] = [1, 4, 8, WHOLE];
const WHOLE: u64 = 16;
/// Number of pauses in an evaluation; earlier ones lose half of their weight each time.
const PAUSES: u32 = 32;

/// History of a lane's pauses.
#[derive(Debug)]
pub(crate) struct Lookout {
    policy: IdlePolicy,
    last_work_ns: u64,
    /// Current spin window.
    look_ns: u64,
    /// Pauses by the shortest window that sees their end, and last those that outlast all. The first window is not
    /// counted: all others include it.
    pauses: [u32; LOOKS.len()],
    /// Pauses since the last evaluation.
    new: u32,
}

impl Lookout {
    /// Without history.
    pub(crate) fn new(policy: IdlePolicy) -> Lookout {
        Lookout { policy, last_work_ns: 0, look_ns: policy.spin_ns, pauses: [0; LOOKS.len()], new: 0 }
    }

    /// Sets the policy and forgets the history.
    pub(crate) fn set_policy(&mut self, policy: IdlePolicy) {
        *self = Lookout { last_work_ns: self.last_work_ns, ..Lookout::new(policy) };
    }

    /// There was work.
    pub(crate) fn worked(&mut self, now_ns: u64) {
        let pause_ns = now_ns.saturating_sub(std::mem::replace(&mut self.last_work_ns, now_ns));
        if pause_ns > self.policy.spin_ns / WHOLE {
            self.paused(pause_ns);
        }
    }

    /// After a turn without work: whether to spin rather than to sleep.
    pub(crate) fn goes_on(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.last_work_ns) < self.look_ns
    }

    fn paused(&mut self, pause_ns: u64) {
        let part_ns = self.policy.spin_ns / WHOLE;
        let seen_by = LOOKS[1..].iter().position(|look| pause_ns <= look * part_ns).unwrap_or(LOOKS.len() - 1);
        self.pauses[seen_by] += 1;
        self.new += 1;
        if self.new == PAUSES {
            self.new = 0;
            let cheapest = (0..LOOKS.len()).min_by_key(|&look| self.cost(look)).unwrap_or(0);
            self.look_ns = if cheapest == LOOKS.len() - 1 { self.policy.spin_ns } else { LOOKS[cheapest] * part_ns };
            self.pauses = self.pauses.map(|pauses| pauses / 2);
        }
    }

    /// Cost of these pauses with this window.
    fn cost(&self, look: usize) -> u64 {
        let (seen, slept) = self.pauses.split_at(look);
        let looked: u64 = seen.iter().zip(&LOOKS[1..]).map(|(&pauses, look)| u64::from(pauses) * look).sum();
        looked + slept.iter().map(|&pauses| u64::from(pauses) * (LOOKS[look] + WHOLE)).sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of a microsecond are easy to see here.
    const WHOLE_NS: u64 = 24_000;

    /// Spin window of a lane after these pauses.
    fn looks_ns(pauses_ns: &[u64]) -> u64 {
        let mut lookout = Lookout::new(IdlePolicy { spin_ns: WHOLE_NS });
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
        let mut never = Lookout::new(IdlePolicy { spin_ns: u64::MAX });
        let mut always = Lookout::new(IdlePolicy { spin_ns: 0 });
        // An hour apart, for eleven years.
        for hour in 0..100_000 {
            let now_ns = hour * 3_600_000_000_000;
            never.worked(now_ns);
            always.worked(now_ns);
            assert!(never.goes_on(now_ns + 3_599_999_999_999) && !always.goes_on(now_ns));
        }
    }
}
