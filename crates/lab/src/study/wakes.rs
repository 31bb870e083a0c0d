//! What sleep, wake-up and a lock that changes CPUs cost here and now.
//!
//! An eventfd is an event descriptor; a sleeper reads it, whoever wakes it writes. Waker and sleeper share a CPU: so
//! the price is that of the two system calls and the switch, without the interrupt between CPUs and the idle loop,
//! which depend on the machine and, under a hypervisor, cost many times as much. A completion interrupts the CPU of its
//! sleeper, so that is also the closer picture. For `bio`, which wakes its helper besides, it is the lowest price there
//! is.

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
/// Sleepers that are rung one after another in one window.
const SLEEPERS: usize = 32;
/// The least of all priorities.
const NICE: i32 = 19;
/// What that many sleepers take to wake and sleep again, many times over.
const REST: Duration = Duration::from_micros(500);
/// Hand-overs in one window.
const HAND_OVERS: u32 = 400;

/// What it costs to sleep and be woken, and to signal the eventfd of a sleeper.
///
/// Sleepers give way to the one who rings, so that nobody is switched to in the middle of a ring.
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
        // Time for all to be asleep again. One who is not is cheaper to ring, so the price errs to the low side.
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
    // Two system calls; what they take outside the system is a few nanoseconds, and the kernel's tick is too coarse to
    // tell.
    let call = |ns| CallCost { user_ns: 0.0, system_ns: ns };
    Ok((call((cycle_ns - ring_ns).max(0.0)), call(ring_ns)))
}

/// A thread that sleeps on its eventfd, and answers if it has somebody to answer to.
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

/// What a lock and the data under it cost more when they come from another CPU, nanoseconds; nothing where there is one
/// CPU.
///
/// Two threads take turns, told by a word of their own. What that word alone costs is measured beside, and does not
/// count.
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

/// What two threads pass between them.
#[derive(Default)]
struct Field {
    /// Hand-overs left; whose turn it is, is its lowest bit.
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
    /// Takes every other turn until none is left. A partner that is late may have lost its CPU: spinning then gives
    /// way.
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
