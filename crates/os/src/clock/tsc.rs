//! The time-stamp counter of an x86 CPU: how it is read, and whether it can be trusted.
//!
//! Trusted only where the kernel uses it as its own clock source and the CPU reports that it runs at one rate on all
//! CPUs in every power state. Then CPUs agree: the kernel checks that continuously. The length of a cycle is not known
//! here.
//!
//! Unsafe: the instruction itself, and one call of the C library.

use std::sync::OnceLock;

/// Whether the counter can be trusted here. Determined once.
pub(super) fn is_trusted() -> bool {
    static TRUSTED: OnceLock<bool> = OnceLock::new();
    *TRUSTED.get_or_init(|| ticks_evenly() && is_the_kernels_own() && may_be_read())
}

/// Cycles, by a counter that is [trusted](is_trusted). May be read some instructions early or late, but within a thread
/// never goes back (Intel SDM 3, 17.17).
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn cycles() -> u64 {
    // SAFETY: every x86-64 CPU has the instruction; where the system forbids it the counter is not trusted, and this
    // not called.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn cycles() -> u64 {
    unreachable!("there is no counter to trust")
}

/// The CPU's word that the counter neither stops nor changes its rate: "invariant TSC" (AMD APM 3, E.4.7; Intel SDM 3,
/// 17.17.1).
#[cfg(target_arch = "x86_64")]
fn ticks_evenly() -> bool {
    use std::arch::x86_64::__cpuid;
    const HIGHEST: u32 = 0x8000_0000;
    const POWER: u32 = 0x8000_0007;
    const INVARIANT_TSC: u32 = 1 << 8;
    __cpuid(HIGHEST).eax >= POWER && __cpuid(POWER).edx & INVARIANT_TSC != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks_evenly() -> bool {
    false
}

/// The kernel drops the counter for another clock when it finds it wanting.
fn is_the_kernels_own() -> bool {
    let source = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    source.is_ok_and(|source| source.trim() == "tsc")
}

/// A process may have been forbidden the instruction (`PR_SET_TSC`), and would die of it.
fn may_be_read() -> bool {
    let mut state: libc::c_int = 0;
    // SAFETY: `state` is valid for the one integer that is written.
    let status = unsafe { libc::prctl(libc::PR_GET_TSC, &raw mut state) };
    status == 0 && state == libc::PR_TSC_ENABLE
}
