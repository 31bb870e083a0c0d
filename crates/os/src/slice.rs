//! The time slice of a lane's thread.
//!
//! The kernel's scheduler runs the thread whose slice would end first, among those that have had no more than their
//! share (EEVDF, Documentation/scheduler/sched-eevdf.rst). A lane works for microseconds and then sleeps, so a short
//! slice costs it nothing and lets it go before threads that compute, as guests do, and before those of the kernel that
//! copy for it.
//!
//! Needs Linux 6.12; older kernels ignore the request.
//!
//! Unsafe: the two system calls have no safe wrapper.

use std::io;
use std::mem::size_of;

use libc::{SCHED_BATCH, SCHED_FLAG_RESET_ON_FORK, SCHED_OTHER, sched_attr};

/// Slice of a lane, ns. The kernel's own default is 0.7 ms on one CPU and 2.8 ms from eight on. A fifth of this gained
/// nothing more.
pub(crate) const LANE_SLICE_NS: u64 = 500_000;

/// Gives this thread that slice. Threads that the kernel makes for it, as for copying, have the default one.
///
/// A thread of a real-time policy, which its user chose, stays as it is.
///
/// # Errors
/// The system refuses.
pub(crate) fn shorten_slice(slice_ns: u64) -> io::Result<()> {
    let mut attr = attributes()?;
    if ![SCHED_OTHER, SCHED_BATCH].contains(&attr.sched_policy.cast_signed()) {
        return Ok(());
    }
    attr.sched_flags |= u64::from(SCHED_FLAG_RESET_ON_FORK.cast_unsigned());
    attr.sched_runtime = slice_ns;
    // SAFETY: `attr` is valid for reading its `size` bytes.
    match unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Policy, niceness and slice of this thread.
fn attributes() -> io::Result<sched_attr> {
    let size = size_of::<sched_attr>() as u32;
    let mut attr = sched_attr {
        size,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: `attr` is valid for writing `size` bytes.
    match unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) } {
        0 => Ok(attr),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the kernel has slices of threads: since 6.12 it reports the default one.
    fn has_slices() -> bool {
        attributes().unwrap().sched_runtime > 0
    }

    #[test]
    fn a_thread_has_the_slice_and_those_it_makes_the_default() {
        std::thread::spawn(|| {
            let before = attributes().unwrap();
            shorten_slice(LANE_SLICE_NS).unwrap();
            let after = attributes().unwrap();
            if has_slices() {
                assert_eq!(after.sched_runtime, LANE_SLICE_NS);
            }
            assert_eq!((after.sched_policy, after.sched_nice), (before.sched_policy, before.sched_nice));
            let child = std::thread::spawn(|| attributes().unwrap()).join().unwrap();
            assert_eq!((child.sched_runtime, child.sched_flags), (before.sched_runtime, before.sched_flags));
        })
        .join()
        .unwrap();
    }
}
