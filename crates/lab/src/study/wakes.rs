//! Cost of sleep, wake-up and a lock that changes CPUs on this machine.
//!
//! A sleeper reads an eventfd, its waker writes it. Both share a CPU: so the cost is that of the two system calls and
//! the switch, without the interrupt between CPUs and the idle loop, which depend on the machine and, under a
//! hypervisor, cost many times as much. A completion interrupts the CPU of its sleeper, so that is also the closer
//! model. For `bio`, which wakes its helper besides, it is the lowest possible cost.

use std::hint::spin_loop;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blkyard_os::{now_ns, thread_cpu_ns};
use blkyard_sys::BlockingEventFd;

use super::costs::CallCost;
use super::job_flags::lock;
use crate::floor::cpus::{partner_cpu, pin, pin_to};
use crate::floor::windows::Samples;

/// Sleeps in one window.
const CYCLES: usize = 100;
/// Sleepers that are signalled one after another in one window.
const SLEEPERS: usize = 32;
/// The least of all priorities.
const NICE: i32 = 19;
/// Many times the time for all sleepers to wake and sleep again.
const REST: Duration = Duration::from_micros(500);
/// Hand-overs in one window.
const HAND_OVERS: u32 = 400;

/// Cost of a sleep with its wake-up, and of a signal to a sleeper's eventfd.
///
/// Sleepers have a lower priority than the waker, so that no switch happens in the middle of a signal.
///
/// # Errors
/// The system has no descriptors or threads left.
pub(crate) fn sleep_and_ring(windows: usize) -> io::Result<(CallCost, CallCost)> {
    let sleepers = (0..SLEEPERS).map(|_| WokenThread::new(None)).collect::<io::Result<Vec<_>>>()?;
    let mine = Arc::new(BlockingEventFd::new()?);
    let partner = WokenThread::new(Some(Arc::clone(&mine)))?;
    let mut clock = Samples::default();
    let (mut rings, mut cycles) = (Samples::default(), Samples::default());
    for _ in 0..windows {
        // Time for all to be asleep again. One that is not is cheaper to signal, so the error is to the low side.
        thread::sleep(REST);
        let start_ns = thread_cpu_ns();
        clock.push((thread_cpu_ns() - start_ns) as f64);
        let start_ns = thread_cpu_ns();
        for sleeper in &sleepers {
            sleeper.eventfd.signal();
        }
        rings.push((thread_cpu_ns() - start_ns) as f64);
        let start_ns = thread_cpu_ns();
        for _ in 0..CYCLES {
            partner.eventfd.signal();
            mine.wait();
        }
        cycles.push((thread_cpu_ns() - start_ns) as f64);
    }
    let ring_ns = ((rings.cost() - clock.cost()) / SLEEPERS as f64).max(0.0);
    let cycle_ns = (cycles.cost() - clock.cost()) / CYCLES as f64;
    // Two system calls; their user part is a few nanoseconds, and the kernel's tick is too coarse to show it.
    let call = |ns| CallCost { user_ns: 0.0, system_ns: ns };
    Ok((call((cycle_ns - ring_ns).max(0.0)), call(ring_ns)))
}

/// A thread that sleeps on its eventfd, and answers to a partner, if any.
struct WokenThread {
    eventfd: Arc<BlockingEventFd>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl WokenThread {
    fn new(answer: Option<Arc<BlockingEventFd>>) -> io::Result<WokenThread> {
        let (eventfd, over) = (Arc::new(BlockingEventFd::new()?), Arc::new(AtomicBool::new(false)));
        let thread = thread::Builder::new().stack_size(1 << 16).spawn({
            let (eventfd, over) = (Arc::clone(&eventfd), Arc::clone(&over));
            // On the CPU of the thread that made it.
            move || {
                let _ = rustix::process::setpriority_process(None, NICE);
                while !over.load(Ordering::Acquire) {
                    eventfd.wait();
                    if let Some(answer) = &answer {
                        answer.signal();
                    }
                }
            }
        })?;
        Ok(WokenThread { eventfd, over, thread: Some(thread) })
    }
}

impl Drop for WokenThread {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        self.eventfd.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Extra cost of a lock and its data when they come from another CPU, ns; `None` with one CPU.
///
/// Two threads take turns, through a separate word. The cost of that word is measured as well, and subtracted.
///
/// # Errors
/// The system has no threads left.
pub(crate) fn hand_over_ns(windows: usize) -> io::Result<Option<f64>> {
    let Ok(other) = partner_cpu() else { return Ok(None) };
    let field = Arc::new(Field::default());
    let partner = {
        let field = Arc::clone(&field);
        thread::Builder::new().spawn(move || {
            pin_to(other);
            while !field.over.load(Ordering::Acquire) {
                field.turns(1);
            }
        })?
    };
    pin();
    let window = |locked: bool| {
        field.locked.store(locked, Ordering::Relaxed);
        field.left.store(HAND_OVERS, Ordering::Release);
        let start_ns = now_ns();
        field.turns(0);
        (now_ns() - start_ns) as f64 / f64::from(HAND_OVERS)
    };
    let (mut word, mut both) = (Samples::default(), Samples::default());
    for _ in 0..windows {
        word.push(window(false));
        both.push(window(true));
    }
    field.over.store(true, Ordering::Release);
    let _ = partner.join();
    Ok(Some((both.cost() - word.cost()).max(0.0)))
}

/// State passed between two threads.
#[derive(Default)]
struct Field {
    /// Remaining hand-overs; the lowest bit says whose turn it is.
    left: WakeWord<AtomicU32>,
    locked: WakeWord<AtomicBool>,
    over: WakeWord<AtomicBool>,
    state: WakeWord<Mutex<u64>>,
}

#[derive(Default)]
#[repr(align(128))]
struct WakeWord<T>(T);

impl<T> std::ops::Deref for WakeWord<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl Field {
    /// Takes every other turn until none is left. A late partner may have lost its CPU: then spinning yields.
    fn turns(&self, odd: u32) {
        // As long a path, without the line that moves.
        let own = Mutex::new(0);
        let mut idle = 0_u32;
        loop {
            let left = self.left.load(Ordering::Acquire);
            if left == 0 {
                if odd == 1 {
                    thread::yield_now();
                }
                return;
            }
            if left & 1 != odd {
                idle += 1;
                if idle.is_multiple_of(1 << 14) {
                    thread::yield_now();
                }
                spin_loop();
                continue;
            }
            idle = 0;
            *lock(if self.locked.load(Ordering::Relaxed) { &self.state } else { &own }) += 1;
            self.left.store(left - 1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_and_wake_have_a_price() {
        let (sleep, ring) = thread::spawn(|| sleep_and_ring(3)).join().unwrap().unwrap();
        // How it divides is for more windows than these to tell.
        assert!(sleep.total_ns() + ring.total_ns() > 0.0, "{sleep:?} {ring:?}");
    }

    #[test]
    fn a_lock_changes_hands_every_time() {
        let field = Arc::new(Field::default());
        field.left.store(100, Ordering::Release);
        field.locked.store(true, Ordering::Relaxed);
        let partner = Arc::clone(&field);
        let partner = thread::spawn(move || partner.turns(1));
        field.turns(0);
        partner.join().unwrap();
        assert_eq!(*lock(&field.state), 100);
    }
}
