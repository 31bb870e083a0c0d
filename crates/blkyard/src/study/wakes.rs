//! What sleep, wake-up and a lock that changes CPUs cost here and now.
//!
//! A bell is an event descriptor; a sleeper reads it, whoever wakes it writes. Waker and sleeper share a CPU: so the price is that of
//! the two system calls and the switch, without the interrupt between CPUs and the idle loop, which depend on the machine and, under a
//! hypervisor, cost many times as much. A completion interrupts the CPU of its sleeper, so that is also the closer picture. For `bio`,
//! which wakes its helper besides, it is the lowest price there is.

use std::hint::spin_loop;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use blkyard_os::{cpu_places, now_ns, thread_cpu_ns, thread_cpu_split_ns};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;

use super::costs::CallCost;
use super::measure::tenth;
use super::seats::lock;

/// Sleeps in one window.
const CYCLES: usize = 100;
/// Hand-overs in one window.
const HAND_OVERS: u32 = 400;

/// Keeps this thread on a CPU; if the system refuses, there is more noise.
pub(crate) fn pin_to(cpu: u32) {
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(cpu as usize);
    let _ = rustix::thread::sched_setaffinity(None, &cpus);
}

/// What it costs to sleep and be woken, and to wake a sleeper.
///
/// # Errors
/// The system has no descriptors or threads left.
pub(crate) fn sleep_and_ring(windows: usize) -> io::Result<(CallCost, CallCost)> {
    let bell = || eventfd(0, EventfdFlags::CLOEXEC).map(Arc::new);
    let (mine, answering, silent) = (bell()?, bell()?, bell()?);
    let over = Arc::new(AtomicBool::new(false));
    let sleeper = |bell: &Arc<OwnedFd>, answer: Option<&Arc<OwnedFd>>| {
        let (bell, answer, over) = (Arc::clone(bell), answer.map(Arc::clone), Arc::clone(&over));
        // Inherits the CPU of this thread.
        thread::Builder::new().spawn(move || {
            while !over.load(Ordering::Acquire) {
                sleep(&bell);
                if let Some(answer) = &answer {
                    ring(answer);
                }
            }
        })
    };
    let sleepers = [sleeper(&answering, Some(&mine))?, sleeper(&silent, None)?];
    // One cycle: ring for one or for both, sleep until the first answers.
    let cycles = |both: bool| {
        let start_ns = thread_cpu_ns();
        for _ in 0..CYCLES {
            if both {
                ring(&silent);
            }
            ring(&answering);
            sleep(&mine);
        }
        (thread_cpu_ns() - start_ns) as f64 / CYCLES as f64
    };
    cycles(true);
    let before = thread_cpu_split_ns();
    let (mut one, mut two) = (Vec::with_capacity(windows), Vec::with_capacity(windows));
    for _ in 0..windows {
        one.push(cycles(false));
        two.push(cycles(true));
    }
    let after = thread_cpu_split_ns();
    over.store(true, Ordering::Release);
    [&answering, &silent].into_iter().for_each(ring);
    for sleeper in sleepers {
        let _ = sleeper.join();
    }
    let (user_ns, system_ns) = ((after.0 - before.0) as f64, (after.1 - before.1) as f64);
    let user_share = user_ns / (user_ns + system_ns).max(1.0);
    let (one, two) = (tenth(&mut one), tenth(&mut two));
    let ring_ns = (two - one).clamp(0.0, one);
    let split = |ns: f64| CallCost { user_ns: ns * user_share, system_ns: ns * (1.0 - user_share) };
    Ok((split(one - ring_ns), split(ring_ns)))
}

/// A counter of the kernel's: 2^64 calls that nobody heard would be the first to fail.
fn ring(bell: &Arc<OwnedFd>) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

fn sleep(bell: &OwnedFd) {
    let _ = rustix::io::read(bell, &mut [0; 8]);
}

/// What a lock and the data under it cost more when they come from another CPU, nanoseconds; nothing where there is one CPU.
///
/// Two threads take turns, told by a word of their own. What that word alone costs is measured beside, and does not count.
///
/// # Errors
/// The system has no threads left.
pub(crate) fn hand_over_ns(windows: usize) -> io::Result<Option<f64>> {
    let places = cpu_places();
    let [first, .., last] = &places[..] else { return Ok(None) };
    let (first, last) = (first.cpu, last.cpu);
    let field = Arc::new(Field::default());
    let partner = {
        let field = Arc::clone(&field);
        thread::Builder::new().spawn(move || {
            pin_to(last);
            while !field.over.load(Ordering::Acquire) {
                field.turns(1);
            }
        })?
    };
    pin_to(first);
    let window = |locked: bool| {
        field.locked.store(locked, Ordering::Relaxed);
        field.left.store(HAND_OVERS, Ordering::Release);
        let start_ns = now_ns();
        field.turns(0);
        (now_ns() - start_ns) as f64 / f64::from(HAND_OVERS)
    };
    let (mut word, mut both) = (Vec::with_capacity(windows), Vec::with_capacity(windows));
    for _ in 0..windows {
        word.push(window(false));
        both.push(window(true));
    }
    field.over.store(true, Ordering::Release);
    let _ = partner.join();
    Ok(Some((tenth(&mut both) - tenth(&mut word)).max(0.0)))
}

/// What two threads pass between them.
#[derive(Default)]
struct Field {
    /// Hand-overs left; whose turn it is, is its lowest bit.
    left: Line<AtomicU32>,
    locked: Line<AtomicBool>,
    over: Line<AtomicBool>,
    state: Line<Mutex<u64>>,
}

#[derive(Default)]
#[repr(align(128))]
struct Line<T>(T);

impl<T> std::ops::Deref for Line<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl Field {
    /// Takes every other turn until none is left. A partner that is late may have lost its CPU: spinning then gives way.
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
        assert!(sleep.total_ns() > 0.0 && ring.total_ns() >= 0.0, "{sleep:?} {ring:?}");
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
