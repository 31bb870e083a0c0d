//! Threads kept on CPUs, and two of them at work at the same time.
//!
//! The partner's thread lives for one window and is gone between them, so that variants that need one CPU have it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use blkyard_os::{cpu_places, now_ns, thread_cpu_ns};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::windows::{Round, Variant, for_a_window};

/// The CPUs this process could use before anything was pinned.
pub fn cpus() -> &'static [u32] {
    static CPUS: OnceLock<Vec<u32>> = OnceLock::new();
    CPUS.get_or_init(|| cpu_places().iter().map(|place| place.cpu).collect())
}

/// Pins this thread to its last CPU, so that windows differ by their code and not by their CPU; the first one serves
/// most interrupts.
pub fn pin() {
    if let Some(cpu) = cpus().last() {
        pin_to(*cpu);
    }
}

/// The CPU of a second thread, if there is one.
///
/// # Errors
/// This process has one CPU.
pub fn partner_cpu() -> Result<u32, String> {
    match cpus() {
        [.., other, _] => Ok(*other),
        _ => Err("two threads want two CPUs, and this process has one".into()),
    }
}

pub(crate) fn pin_to(cpu: u32) {
    let mut set = CpuSet::new();
    set.set(cpu as usize);
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!("not pinned to CPU {cpu}, expect more noise: {error}");
    }
}

/// Rounds on this CPU while another thread runs `follow` on another one; counts the rounds here.
///
/// # Errors
/// There is no second CPU.
pub fn led<'a>(lead: impl FnMut() -> u64 + 'a, follow: impl FnMut() + Send + 'a) -> Result<Variant<'a>, String> {
    let cpu = partner_cpu()?;
    let (mut lead, mut follow) = (lead, follow);
    Ok(Box::new(move |window_ns| {
        let (ready, over) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pin_to(cpu);
                ready.store(true, Relaxed);
                while !over.load(Relaxed) {
                    follow();
                }
            });
            await_ready(&ready);
            let cost = for_a_window(window_ns, &mut lead);
            over.store(true, Relaxed);
            cost
        })
    }))
}

/// The same load here and, at the same time, on another CPU. The cost is that of one operation of both together: two
/// independent threads halve it. A window in which either was off its CPU is dropped: the other was alone.
///
/// # Errors
/// There is no second CPU.
pub fn together<'a>(ours: impl Round + 'a, theirs: impl Round + Send + 'a) -> Result<Variant<'a>, String> {
    let cpu = partner_cpu()?;
    let (mut ours, mut theirs) = (ours, theirs);
    Ok(Box::new(move |window_ns| {
        let (ready, over) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let partner = scope.spawn(|| {
                pin_to(cpu);
                ready.store(true, Relaxed);
                on_cpu(|| {
                    let (start_ns, mut done) = (now_ns(), 0);
                    while !over.load(Relaxed) {
                        (0..16).for_each(|_| done += theirs.round());
                    }
                    (now_ns() - start_ns) as f64 / done.max(1) as f64
                })
            });
            await_ready(&ready);
            let ours_ns = on_cpu(|| for_a_window(window_ns, || ours.round()));
            over.store(true, Relaxed);
            // A partner that panicked has printed its message; its window is dropped.
            partner.join().map_or(f64::NAN, |theirs_ns| 1.0 / (1.0 / ours_ns + 1.0 / theirs_ns))
        })
    }))
}

/// The measurement, if this thread had its CPU to itself meanwhile.
fn on_cpu(measured: impl FnOnce() -> f64) -> f64 {
    let (wall_ns, cpu_ns) = (now_ns(), thread_cpu_ns());
    let value = measured();
    let (wall_ns, cpu_ns) = (now_ns() - wall_ns, thread_cpu_ns() - cpu_ns);
    // Interrupts and the hypervisor take their share of every window.
    if cpu_ns * 100 < wall_ns * 97 { f64::NAN } else { value }
}

fn await_ready(ready: &AtomicBool) {
    while !ready.load(Relaxed) {
        // The partner begins on this CPU and moves to its own.
        std::thread::yield_now();
    }
}
