//! Trials of a longer spin window, for clients whose pauses are made of our own sleep.
//!
//! A client that waits for its I/O submits the next one some time after the completion. If we sleep meanwhile, it pays
//! for a kick and for our wake-up, and often goes to sleep itself: both sleep because the other does. A longer look can
//! be as cheap *and* faster, but nothing in the pauses tells. So it is tried: a short trial now and then, beside the
//! usual window just before it. It pays if I/O comes no slower, and costs no more CPU time than before, or a little
//! more for I/O that comes faster by as much; among equals it wins by its latency. While it is kept, the usual look is
//! checked now and then, and at once if the cost of an I/O rises.
//!
//! ```text
//!            2 of 10 ms, or 10         pays                  pays
//!   usual ─────────────────▶ trial, 2 ms ─────▶ proof, 10 ms ──────▶ kept, 10 ms each ◀──┐
//!     ▲                        │                  │                   │      │ 10 of them,│ still
//!     │         does not       │                  │    little work    │      │ or dearer  │ pays
//!     └────────────────────────┴──────────────────┴───────────────────┘      ▼            │
//!     └──────────────────────────────── does not ──────────────────────── check, 2 ms ────┘
//! ```
//!
//! A trial takes 2 of 102 ms: it comes 100 ms after the last one, or 20 ms after work began if that is later. With
//! little work nothing is tried, and nothing kept.
//!
//! Where threads wait for CPUs a look takes the CPU from others, perhaps from the client that is looked for, and the
//! cost is theirs: no trial on one lane sees it. A lane that itself waits for its CPU much of the time sleeps at once.
//! Much is a share of all time, not of the time in which the lane could run: a lane that sleeps before each I/O waits
//! for its waker to leave the CPU, for as long as the I/O itself takes, while another CPU is idle.

/// CPU time of a thread, totals.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuUse {
    /// For which it ran, ns.
    pub used_ns: u64,
    /// For which it could have run and others did, ns; `None` where the system does not tell.
    pub waited_ns: Option<u64>,
}

/// How things are on a lane at some time: totals since any time.
#[derive(Clone, Copy, Debug, Default)]
struct Reading {
    now_ns: u64,
    /// I/Os served by the lane's pollers, wrapping.
    ios: u64,
    /// Of the lane's thread; `None` while there is little work.
    cpu: Option<CpuUse>,
}

/// Length of a window, ns: long enough for a CPU clock and a scheduler's slice, and a fifth of the time in which a
/// look that no longer pays is to be dropped.
const WINDOW_NS: u64 = 10_000_000;
/// Length of a trial or check, ns.
const TRIAL_NS: u64 = 2_000_000;
/// Windows between trials, and between checks.
const WINDOWS: u32 = 10;
/// Windows with work before a trial: the first one has the beginning of the work in it.
const WORKED: u32 = 2;
/// A lane that serves fewer I/Os in a trial is not judged: 8000 a second.
const IOS_MIN: f64 = 16.0;
/// An I/O may cost more with a long look by this factor, and by no more than I/O comes faster.
const DEARER_MAX: f64 = 1.25;
/// Rates and costs are alike within this.
const NOISE: f64 = 0.05;

/// A CPU is crowded from this share of waiting on. Two lanes and two clients on two CPUs wait for 26 to 28 % of the
/// time, four and four for 32 to 43 %, a lane with a CPU of its own for less than 1 %, and one that three threads wake
/// for each I/O for 8 to 12 % (docs/benchmarks/daemon.md).
const CROWDED: f64 = 0.2;
/// It is no longer crowded once it was below this for some windows in a row: slices are of several ms, and a window may
/// see none of others.
const ROOMY: f64 = 0.15;
const ROOMY_WINDOWS: u32 = 5;

/// What was seen in a window.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// I/Os in each ns.
    rate: f64,
    /// CPU time of an I/O, ns.
    cost: f64,
}

impl Seen {
    /// Whether a long look that saw this is worth its cost beside a usual one, give or take some noise.
    fn pays_beside(self, usual: Seen, noise: f64) -> bool {
        let faster = self.rate / usual.rate;
        faster >= 1.0 - noise && self.cost <= usual.cost * faster.clamp(1.0, DEARER_MAX) * (1.0 + noise)
    }
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Usual looks, for so many windows so far, or more.
    Usual(u32),
    /// A long look is tried beside this.
    Trial(Seen),
    /// It has paid, and is to do so again.
    Proof(Seen),
    /// Long looks, for so many windows so far, as long as an I/O costs at most this, ns.
    Kept(u32, f64),
    /// A usual look is checked beside this.
    Check(Seen),
    /// No looks: others need the CPU, or did so many windows ago.
    Crowded(u32),
}

/// Bounds of a usual look, ns.
const ANY_LOOK: (u64, u64) = (0, u64::MAX);

/// The trials of a lane.
#[derive(Debug)]
pub(super) struct Trials {
    /// The long look, ns.
    long_ns: u64,
    phase: Phase,
    /// No trial before this time, ns.
    trial_ns: u64,
    /// Beginning of the window.
    begin: Reading,
    /// Its end.
    next_ns: u64,
    /// Bounds of a look, ns.
    bounds_ns: (u64, u64),
}

impl Trials {
    pub(super) fn new(long_ns: Option<u64>) -> Trials {
        Trials {
            long_ns: long_ns.unwrap_or(0),
            phase: Phase::Usual(0),
            trial_ns: 0,
            begin: Reading::default(),
            next_ns: if long_ns.is_some() { 0 } else { u64::MAX },
            bounds_ns: ANY_LOOK,
        }
    }

    /// Time of the next reading, ns.
    #[inline]
    pub(super) fn next_ns(&self) -> u64 {
        self.next_ns
    }

    /// The length of a look that would usually be so long, ns.
    #[inline]
    pub(super) fn look_ns(&self, usual_ns: u64) -> u64 {
        usual_ns.clamp(self.bounds_ns.0, self.bounds_ns.1)
    }

    /// A window has ended, with so many I/Os served so far, wrapping; another begins. The CPU time of the lane's thread
    /// is asked for only where there is work: to ask costs more than the rest of a wake-up, and an idle lane would pay
    /// for it with each.
    pub(super) fn read(&mut self, now_ns: u64, ios: u64, cpu_use: impl FnOnce() -> CpuUse) {
        let ns = now_ns.saturating_sub(self.begin.now_ns).max(1) as f64;
        let served = ios.wrapping_sub(self.begin.ios) as f64;
        let is_little = served / ns * (TRIAL_NS as f64) < IOS_MIN;
        let cpu = (!is_little).then(cpu_use);
        let begin = std::mem::replace(&mut self.begin, Reading { now_ns, ios, cpu });
        self.phase = match (begin.cpu, cpu) {
            (Some(begin), Some(end)) => self.next_phase(now_ns, ns, served, begin, end),
            // A window that began while there was little work has no cost.
            _ => Phase::Usual(0),
        };
        let long = (self.long_ns, self.long_ns);
        let (window_ns, bounds_ns) = match self.phase {
            Phase::Usual(_) => (WINDOW_NS, ANY_LOOK),
            Phase::Check(_) => (TRIAL_NS, ANY_LOOK),
            Phase::Trial(_) => {
                self.trial_ns = now_ns + TRIAL_NS + u64::from(WINDOWS) * WINDOW_NS;
                (TRIAL_NS, long)
            }
            Phase::Proof(_) | Phase::Kept(..) => (WINDOW_NS, long),
            Phase::Crowded(_) => (WINDOW_NS, (0, 0)),
        };
        self.next_ns = now_ns + window_ns;
        self.bounds_ns = bounds_ns;
    }

    /// After a window with work: its end, length and I/Os, and the CPU time at its ends.
    fn next_phase(&self, now_ns: u64, ns: f64, ios: f64, begin: CpuUse, end: CpuUse) -> Phase {
        let used_ns = end.used_ns.saturating_sub(begin.used_ns) as f64;
        let waited_ns = match (begin.waited_ns, end.waited_ns) {
            (Some(begin_ns), Some(end_ns)) => end_ns.saturating_sub(begin_ns) as f64,
            _ => 0.0,
        };
        let seen = Seen { rate: ios / ns, cost: used_ns / ios };
        let waits = waited_ns / ns;
        match self.phase {
            _ if waits > CROWDED => Phase::Crowded(0),
            Phase::Crowded(_) if waits > ROOMY => Phase::Crowded(0),
            Phase::Crowded(roomy) if roomy < ROOMY_WINDOWS => Phase::Crowded(roomy + 1),
            Phase::Usual(windows) if windows < WORKED => Phase::Usual(windows + 1),
            Phase::Usual(windows) if now_ns < self.trial_ns => Phase::Usual(windows),
            Phase::Usual(_) => Phase::Trial(seen),
            Phase::Trial(usual) if seen.pays_beside(usual, 0.0) => Phase::Proof(usual),
            Phase::Proof(usual) if seen.pays_beside(usual, 0.0) => Phase::Kept(0, usual.cost * DEARER_MAX),
            Phase::Kept(windows, cost) if windows < WINDOWS && seen.cost <= cost => Phase::Kept(windows + 1, cost),
            Phase::Kept(..) => Phase::Check(seen),
            Phase::Check(long) if long.pays_beside(seen, NOISE) => Phase::Kept(0, seen.cost * DEARER_MAX),
            Phase::Crowded(_) | Phase::Trial(_) | Phase::Proof(_) | Phase::Check(_) => Phase::Usual(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{IdlePolicy, Lookout};
    use super::*;

    const US: u64 = 1000;
    const MS: u64 = 1000 * US;
    /// From a signal until the sleeper runs.
    const WAKE_NS: u64 = 26 * US;
    /// Service of an I/O, and CPU time of it.
    const SERVICE_NS: u64 = 500;

    /// When clients submit.
    #[derive(Clone, Copy)]
    enum Load {
        /// One I/O at a time; submits the next one so long after a completion that it awaited without a sleep. It
        /// sleeps if the completion takes longer than a microsecond.
        Closed(u64),
        /// As `Closed`, and always sleeps, as a guest does.
        ClosedAsleep(u64),
        /// One I/O each so many ns.
        Open(u64),
    }

    /// A lane with its lookout and clients in virtual time.
    struct World {
        lookout: Lookout,
        now_ns: u64,
        ios: u64,
        cpu_ns: u64,
        /// CPU time that a sleep takes from the sleeper.
        sleep_ns: u64,
        /// Time for which the lane waits for its CPU, in parts of the time for which it has it.
        waits: f64,
        /// Time for which it waits for its CPU after each wake-up.
        wake_waits_ns: u64,
        /// Wake-ups so far.
        wakes: u64,
        /// How often its CPU time was asked for.
        asked: u32,
    }

    impl World {
        fn new() -> World {
            World {
                lookout: Lookout::new(IdlePolicy::default()),
                now_ns: 0,
                ios: 0,
                cpu_ns: 0,
                sleep_ns: 12 * US,
                waits: 0.0,
                wake_waits_ns: 0,
                wakes: 0,
                asked: 0,
            }
        }

        /// Runs a load for this time; returns I/Os a second and the CPU's share.
        fn run(&mut self, load: Load, for_ns: u64) -> (f64, f64) {
            let (begin_ns, ios, cpu_ns) = (self.now_ns, self.ios, self.cpu_ns);
            let mut due_ns = self.now_ns;
            while self.now_ns < begin_ns + for_ns {
                // Until the submission.
                let mut slept = false;
                while self.now_ns < due_ns {
                    if self.lookout.goes_on(self.now_ns) {
                        let step_ns = (due_ns - self.now_ns).min(100);
                        self.now_ns += step_ns;
                        self.cpu_ns += step_ns;
                        self.read();
                    } else {
                        self.now_ns = due_ns + WAKE_NS + self.wake_waits_ns;
                        self.wakes += 1;
                        self.cpu_ns += self.sleep_ns;
                        slept = true;
                    }
                }
                self.read();
                self.lookout.worked(self.now_ns);
                self.now_ns += SERVICE_NS;
                self.cpu_ns += SERVICE_NS;
                self.ios += 1;
                due_ns = match load {
                    Load::Closed(think_ns) if !slept => self.now_ns + think_ns,
                    Load::Closed(think_ns) | Load::ClosedAsleep(think_ns) => self.now_ns + WAKE_NS + think_ns,
                    Load::Open(gap_ns) => due_ns + gap_ns,
                };
            }
            let ns = (self.now_ns - begin_ns) as f64;
            ((self.ios - ios) as f64 * 1e9 / ns, (self.cpu_ns - cpu_ns) as f64 / ns)
        }

        fn read(&mut self) {
            if self.lookout.wants_reading(self.now_ns) {
                let waited_ns = (self.cpu_ns as f64 * self.waits) as u64 + self.wakes * self.wake_waits_ns;
                let used_ns = self.cpu_ns;
                self.lookout.read(self.now_ns, self.ios, || {
                    self.asked += 1;
                    CpuUse { used_ns, waited_ns: Some(waited_ns) }
                });
            }
        }

        fn is_long(&self) -> bool {
            self.lookout.trials.look_ns(0) > 0
        }

        /// Share of this time, in steps of half a millisecond, in which looks were long.
        fn share_long(&mut self, load: Load, for_ns: u64) -> f64 {
            let steps = for_ns / (MS / 2);
            let long = (0..steps).filter(|_| {
                self.run(load, MS / 2);
                self.is_long()
            });
            long.count() as f64 / steps as f64
        }
    }

    /// It would be seen by a look that the usual rule, after work 50 us apart, does not take.
    const CLOSED: Load = Load::Closed(5 * US);
    const OPEN: Load = Load::Open(50 * US);

    #[test]
    fn two_that_sleep_because_the_other_does_are_woken_within_200_ms() {
        let mut world = World::new();
        world.run(OPEN, 500 * MS);
        let (asleep, cpu_asleep) = world.run(CLOSED, 50 * MS);
        world.run(CLOSED, 150 * MS);
        let (awake, cpu_awake) = world.run(CLOSED, 1000 * MS);
        assert!(asleep < 30_000.0 && awake > 170_000.0, "{asleep} {awake}");
        assert!(cpu_awake / awake < cpu_asleep / asleep);
    }

    #[test]
    fn a_client_that_comes_after_a_rest_is_tried_at_once() {
        let mut world = World::new();
        world.run(CLOSED, 40 * MS);
        assert!(world.is_long());
        world.run(Load::Open(100 * MS), 1000 * MS);
        assert!(!world.is_long());
        world.run(CLOSED, 40 * MS);
        assert!(world.is_long());
    }

    #[test]
    fn bursts_are_tried_for_a_twenty_fifth_of_the_time() {
        let mut world = World::new();
        let mut long = 0.0;
        for _ in 0..50 {
            long += world.share_long(OPEN, 40 * MS) * 40.0;
            world.run(Load::Open(10 * MS), 20 * MS);
        }
        let share = long / (50.0 * 60.0);
        assert!(share > 0.0 && share <= 0.04, "{share}");
    }

    #[test]
    fn a_long_look_ends_within_50_ms_once_it_no_longer_pays() {
        let mut world = World::new();
        world.run(OPEN, 100 * MS);
        world.run(CLOSED, 300 * MS);
        assert!(world.is_long());
        world.run(OPEN, 50 * MS);
        let (rate, cpu) = world.run(OPEN, 1000 * MS);
        assert!(rate > 19_900.0 && cpu < 0.30, "{rate} {cpu}");
    }

    #[test]
    fn clients_at_their_own_pace_are_tried_for_a_twenty_fifth_of_the_time() {
        let mut world = World::new();
        let (_, cpu) = world.run(Load::Open(50 * US), 3000 * MS);
        assert!(cpu < 0.30, "{cpu}");
        let long = world.share_long(Load::Open(50 * US), 3000 * MS);
        assert!(long > 0.0 && long <= 0.04, "{long}");
    }

    #[test]
    fn rare_work_is_neither_tried_nor_measured() {
        for gap_ns in [MS / 4, 10 * MS, 1000 * MS] {
            let mut world = World::new();
            let long = world.share_long(Load::Open(gap_ns), 3000 * MS);
            assert!(long <= 0.0, "an I/O each {gap_ns} ns: {long}");
            assert!(world.asked <= 1, "an I/O each {gap_ns} ns: CPU time asked for {} times", world.asked);
        }
    }

    #[test]
    fn a_client_that_always_sleeps_gets_a_long_look_where_that_costs_little_more() {
        // Its pause is its wake-up and its own work.
        for (sleep_ns, think_ns, is_long) in [(22 * US, 0, true), (12 * US, 0, false), (22 * US, 40 * US, false)] {
            let mut world = World { sleep_ns, ..World::new() };
            world.run(Load::ClosedAsleep(think_ns), 500 * MS);
            let long = world.share_long(Load::ClosedAsleep(think_ns), 2000 * MS);
            assert_eq!(long > 0.5, is_long, "a sleep of {sleep_ns} ns, thinks for {think_ns} ns: {long}");
        }
    }

    #[test]
    fn a_lane_that_waits_for_its_waker_as_long_as_it_works_looks_longer() {
        let mut world = World { wake_waits_ns: 9 * US, sleep_ns: 9 * US, ..World::new() };
        world.run(CLOSED, 500 * MS);
        assert!(world.share_long(CLOSED, 120 * MS) > 0.9);
    }

    #[test]
    fn a_lane_that_waits_for_its_cpu_sleeps_at_once() {
        let mut world = World::new();
        world.run(CLOSED, 500 * MS);
        assert!(world.share_long(CLOSED, 120 * MS) > 0.9);
        world.waits = 0.5;
        world.run(CLOSED, 30 * MS);
        assert!(!world.lookout.goes_on(world.now_ns), "looks although others need its CPU");
        world.waits = 0.02;
        world.run(CLOSED, 250 * MS);
        assert!(world.share_long(CLOSED, 120 * MS) > 0.9);
    }
}
