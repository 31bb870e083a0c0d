//! The clock, the only one of the project. Whoever needs the time gets it from a caller who read it here.
//!
//! Unsafe: one call of the C library, since the safe wrapper would bring a feature of its own.

/// Nanoseconds of the monotonic clock; only differences mean anything.
///
/// About 21 ns through the vDSO, so it is read once for each round of a lane, not for each I/O.
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

/// Nanoseconds of any clock of the system, if it can be read.
pub(crate) fn clock_ns(clock: libc::clockid_t) -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the one structure that is written.
    let status = unsafe { libc::clock_gettime(clock, &raw mut time) };
    (status == 0).then_some(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_and_never_back() {
        let start = now_ns();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(now_ns() - start >= 2_000_000);
        assert_eq!(clock_ns(12_345), None);
    }

    #[test]
    fn a_thread_is_charged_for_what_it_runs_and_not_for_its_sleep() {
        let start = thread_cpu_ns();
        let mut n = 0_u64;
        while thread_cpu_ns() - start < 30_000_000 {
            n = std::hint::black_box(n + 1);
        }
        let ran = thread_cpu_ns();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(thread_cpu_ns() - ran < 20_000_000);
        assert!(n > 0);
    }
}
