//! The clock, the only one of the project. All other code gets the time as an argument from a caller that read it
//! here.
//!
//! [`now_ns`] asks the system. A loop that reads the time in each round has a [`Clock`], which reads the same time at
//! less cost where the time-stamp counter can be trusted (`clock/tsc.rs`), and asks the system elsewhere. Control
//! threads of the crates below get a [`SystemClock`].
//!
//! Unsafe: one call of the C library, since the safe wrapper would bring a feature of its own.

mod tsc;

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::time::Instant;

use blkyard_mq::CpuUse;
use blkyard_sys::{PollFd, TimeSource, wait_until};

/// Nanoseconds of the monotonic clock; only differences mean anything.
///
/// About 24 ns through the vDSO; for loops there is [`Clock`].
#[inline]
pub fn now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC).unwrap_or(0)
}

/// Nanoseconds of CPU that this thread has used.
///
/// A system call, about a microsecond under a hypervisor: for windows, not for steps.
pub fn thread_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_THREAD_CPUTIME_ID).unwrap_or(0)
}

/// CPU time of this thread, with the time for which it waited for a CPU by the scheduler's own figures (proc(5),
/// `schedstat`), if it has any.
///
/// Four system calls: for windows, not for steps. No descriptor is kept, since each lane of a daemon would have one.
pub(crate) fn thread_cpu_use() -> CpuUse {
    let mut text = [0; 64];
    let read = File::open("/proc/thread-self/schedstat").and_then(|mut file| file.read(&mut text)).unwrap_or(0);
    let waited = std::str::from_utf8(&text[..read]).ok().and_then(|text| text.split(' ').nth(1)?.parse().ok());
    CpuUse { used_ns: thread_cpu_ns(), waited_ns: waited }
}

/// CPU time of this process, all its threads together, ns.
pub fn process_cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap_or(0)
}

/// Nanoseconds of any clock of the system, if it can be read.
pub(crate) fn clock_ns(clock: libc::clockid_t) -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the one structure that is written.
    let status = unsafe { libc::clock_gettime(clock, &raw mut time) };
    (status == 0).then_some(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// The system's monotonic clock, for control threads that wait with deadlines.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl TimeSource for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wait(&self, fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<usize> {
        wait_until(fds, Instant::now(), deadline)
    }
}

/// The monotonic clock for one thread that reads it continually: within [`Clock::ERROR_NS_MAX`] of [`now_ns`], and
/// monotonic.
///
/// About 10 ns where the time-stamp counter can be trusted, as [`now_ns`] elsewhere. The counter's offset and rate are
/// learnt from the system's clock and refreshed every millisecond, so that no error lives longer.
#[derive(Debug)]
pub struct Clock {
    by_counter: bool,
    scale: Cell<Scale>,
    /// Latest time returned.
    told_ns: Cell<u64>,
}

impl Clock {
    /// Largest difference of a reading from [`now_ns`].
    ///
    /// Three errors add up. The system slews its clock by a thousandth at most, one way or the other (`adjtimex`: 500
    /// parts per million, and as many while it corrects an offset), so in a millisecond it deviates by at most 2 us
    /// from the learnt rate. Each of the two comparisons with the counter from which that was learnt has an error of at
    /// most half a microsecond (`COMPARED_CYCLES_MAX`).
    pub const ERROR_NS_MAX: u64 = 3_000;

    /// A clock for this thread.
    #[expect(clippy::new_without_default, reason = "a default would say nothing of what it asks of the machine")]
    pub fn new() -> Clock {
        Clock { by_counter: tsc::is_trusted(), scale: Cell::new(Scale::default()), told_ns: Cell::new(0) }
    }

    /// Nanoseconds of the monotonic clock; only differences mean anything.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        let by_counter = if self.by_counter { self.scale.get().ns_at(tsc::cycles()) } else { None };
        let now_ns = by_counter.unwrap_or_else(|| self.ask()).max(self.told_ns.get());
        self.told_ns.set(now_ns);
        now_ns
    }

    /// Reads the system's clock, and learns the counter's offset and rate from it.
    #[inline(never)]
    fn ask(&self) -> u64 {
        if !self.by_counter {
            return now_ns();
        }
        let before = tsc::cycles();
        let now_ns = now_ns();
        let after = tsc::cycles();
        // An interruption in between makes the time of the clock's reading unknown.
        if after.wrapping_sub(before) < COMPARED_CYCLES_MAX {
            let mut scale = self.scale.get();
            scale.compare(before, now_ns);
            self.scale.set(scale);
        }
        now_ns
    }
}

/// Counter and clock are compared when no more cycles than this pass in doing so. It takes about a hundred; a counter
/// of 1 GHz, the slowest in use, makes half a microsecond of them.
const COMPARED_CYCLES_MAX: u64 = 500;
/// Validity of a learnt rate, and shortest time over which a rate is measured: short, since an error lives as long;
/// long against the hundred nanoseconds of learning it again.
const SPAN_NS: u64 = 1_000_000;
/// Two rates agree if they differ by less than this share. More than slewing can cause, so one of them was measured
/// while clock or counter stood still: the machine slept, or moved to another host.
const AGREE_SHARE: u64 = 1 << 9;

/// Offset and rate of the counter.
#[derive(Clone, Copy, Debug, Default)]
struct Scale {
    /// The counter and the clock when they were compared.
    cycles: u64,
    ns: u64,
    /// Nanoseconds to a cycle, times 2^32.
    rate: u64,
    /// Cycles from then on for which this is valid: 0 unless two consecutive measurements of the rate agree.
    span: u64,
}

impl Scale {
    /// The time, if this holds at that reading of the counter.
    #[inline]
    fn ns_at(&self, cycles: u64) -> Option<u64> {
        let passed = cycles.wrapping_sub(self.cycles);
        // No overflow: a span has no more than 2^32 times SPAN_NS.
        (passed < self.span).then(|| self.ns + ((passed * self.rate) >> 32))
    }

    /// Counter and clock were read at one moment.
    fn compare(&mut self, cycles: u64, ns: u64) {
        let passed_ns = ns.saturating_sub(self.ns);
        if passed_ns < SPAN_NS {
            return;
        }
        let passed = u128::from(cycles.wrapping_sub(self.cycles));
        let rate = (u128::from(passed_ns) << 32).checked_div(passed).unwrap_or(0) as u64;
        let agrees = rate.abs_diff(self.rate) < self.rate / AGREE_SHARE;
        let span = if agrees { (SPAN_NS << 32) / rate } else { 0 };
        *self = Scale { cycles, ns, rate, span };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn time_goes_on_and_never_back() {
        let start = now_ns();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(now_ns() - start >= 2_000_000);
        assert_eq!(clock_ns(12_345), None);
    }

    #[test]
    fn a_thread_knows_how_long_it_waited_for_its_cpu() {
        let cpu = rustix::thread::sched_getcpu();
        let run = move || {
            let mut only = rustix::thread::CpuSet::new();
            only.set(cpu);
            rustix::thread::sched_setaffinity(None, &only).unwrap();
            let (before, begin) = (thread_cpu_use(), Instant::now());
            while begin.elapsed() < Duration::from_millis(200) {}
            let after = thread_cpu_use();
            (after.used_ns - before.used_ns, after.waited_ns.unwrap() - before.waited_ns.unwrap())
        };
        // Two threads that never sleep, on one CPU.
        let both = [std::thread::spawn(run), std::thread::spawn(run)];
        for thread in both {
            let (used_ns, waited_ns) = thread.join().unwrap();
            assert!(waited_ns > 20_000_000, "ran for {used_ns} ns, waited for {waited_ns}");
        }
    }

    #[test]
    fn a_thread_is_charged_for_what_it_runs_and_not_for_its_sleep() {
        let start = thread_cpu_ns();
        let mut n = 0_u64;
        while thread_cpu_ns() - start < 30_000_000 {
            n = std::hint::black_box(n + 1);
        }
        assert!(n > 0);
        // A machine whose host takes the CPU away sometimes charges that time to the running thread.
        let sleeps_free = (0..20).any(|_| {
            let ran = thread_cpu_ns();
            std::thread::sleep(std::time::Duration::from_millis(50));
            thread_cpu_ns() - ran < 20_000_000
        });
        assert!(sleeps_free, "it was charged for each of its sleeps");
    }

    /// Longest time in which a clock learns the counter's rate, on a machine with other load.
    const LEARNT_NS_MAX: u64 = 60_000_000_000;

    /// Reads a clock for this time, between two readings of the system's, and longer until it uses the counter; returns
    /// the number of readings.
    fn read_for(clock: &Clock, duration_ns: u64) -> u64 {
        let (start_ns, mut by_counter) = (now_ns(), 0);
        let mut told_ns = clock.now_ns();
        loop {
            let before_ns = now_ns();
            by_counter += u64::from(clock.by_counter && clock.scale.get().ns_at(tsc::cycles()).is_some());
            let now_ns = clock.now_ns();
            let after_ns = super::now_ns();
            assert!(now_ns >= told_ns, "{now_ns} was told after {told_ns}");
            let right = before_ns - Clock::ERROR_NS_MAX..=after_ns + Clock::ERROR_NS_MAX;
            assert!(right.contains(&now_ns), "told {now_ns}, and it was {before_ns} to {after_ns}");
            told_ns = now_ns;
            let passed_ns = after_ns - start_ns;
            let learns = clock.by_counter && by_counter == 0 && passed_ns < LEARNT_NS_MAX;
            if passed_ns > duration_ns && !learns {
                return by_counter;
            }
        }
    }

    #[test]
    fn a_clock_agrees_with_the_systems_and_never_goes_back() {
        let clock = Clock::new();
        assert_eq!(read_for(&clock, 100_000_000) > 0, tsc::is_trusted());
        std::thread::sleep(std::time::Duration::from_millis(30));
        read_for(&clock, 100_000_000);
    }

    #[test]
    fn a_clock_without_a_counter_is_the_systems() {
        let clock = Clock { by_counter: false, ..Clock::new() };
        assert_eq!(read_for(&clock, 10_000_000), 0);
        assert_eq!(clock.scale.get().ns, 0, "nothing was learnt");
    }

    #[test]
    fn a_clock_that_would_go_back_stands_still() {
        let clock = Clock::new();
        let ahead_ns = now_ns() + 3_600_000_000_000;
        clock.told_ns.set(ahead_ns);
        assert_eq!((clock.now_ns(), clock.now_ns()), (ahead_ns, ahead_ns));
    }

    /// A counter and a clock that a test winds. Both begin anywhere.
    struct SetClock {
        cycles: u64,
        ns: u64,
        scale: Scale,
    }

    impl SetClock {
        /// One in which the scale holds.
        fn learnt() -> SetClock {
            // So that the counter overflows on the way.
            let mut world = SetClock { cycles: u64::MAX - 4_000_000, ns: 77_000_000_000, scale: Scale::default() };
            world.pass(0, 0);
            for _ in 0..2 {
                assert_eq!(world.tell(), None, "what was measured once is not known");
                world.pass(2_500_000, 1_000_000);
            }
            assert_eq!(world.tell(), Some(world.ns));
            world
        }

        /// So much passes, and the two are compared.
        fn pass(&mut self, cycles: u64, ns: u64) {
            self.cycles = self.cycles.wrapping_add(cycles);
            self.ns += ns;
            self.scale.compare(self.cycles, self.ns);
        }

        fn tell(&self) -> Option<u64> {
            self.scale.ns_at(self.cycles)
        }
    }

    #[test]
    fn a_scale_holds_for_its_span_and_no_longer() {
        let SetClock { cycles, ns, scale } = SetClock::learnt();
        for passed in [1, 1000, 2_499_998] {
            let told_ns = scale.ns_at(cycles.wrapping_add(passed)).unwrap();
            assert!(told_ns.abs_diff(ns + passed * 2 / 5) <= 1, "{passed} cycles are {} ns", told_ns - ns);
        }
        for passed in [2_500_001, 1 << 40, u64::MAX] {
            assert_eq!(scale.ns_at(cycles.wrapping_add(passed)), None, "{passed} cycles on");
        }
    }

    #[test]
    fn a_clock_that_is_slewed_is_followed() {
        let mut world = SetClock::learnt();
        for ns in [1_000_900, 1_001_000, 1_000_000, 1_000_000_000] {
            world.pass(ns / 10 * 25, ns);
            assert_eq!(world.tell(), Some(world.ns));
        }
        world.pass(2_500_000, 1_001_000);
        assert_eq!(world.tell(), Some(world.ns), "by a thousandth more than before");
        let later_ns = world.scale.ns_at(world.cycles + 2_400_000).unwrap() - world.ns;
        assert!(later_ns.abs_diff(960_960) <= 1, "{later_ns}");
    }

    #[test]
    fn what_slewing_cannot_explain_is_not_believed() {
        let leaps: [(&str, u64, u64); 5] = [
            ("the clock stood still while the machine slept", 25_000_000_000, 1_000_000),
            ("the counter stood still", 0, 1_000_000_000),
            ("the counter began anew", 0_u64.wrapping_sub(70_000_000_000), 2_000_000),
            ("another host, whose counter is faster", 3_000_000, 1_000_000),
            ("a counter that hardly moves", 1, 1_000_000_000),
        ];
        for (what, cycles, ns) in leaps {
            let mut world = SetClock::learnt();
            world.pass(cycles, ns);
            assert_eq!(world.tell(), None, "{what}");
            for told in [false, true] {
                world.pass(3_000_000, 1_000_000);
                assert_eq!(world.tell().is_some(), told || cycles == 3_000_000, "{what}");
            }
        }
    }

    #[test]
    fn a_rate_is_not_measured_over_less_than_a_span() {
        let mut world = SetClock::learnt();
        let before = world.scale;
        world.pass(2_400_000, 999_999);
        assert_eq!((world.scale.cycles, world.scale.rate), (before.cycles, before.rate));
    }
}
