//! A guest with four CPUs in virtual time, as the post had it: what its driver pays for a queue beside the ring itself.
//!
//! ```text
//!   CPU with a job:     own work ─▶ add (lock) ─▶ kick, if the device sleeps ─▶ own work ...    depth in flight: idle
//!   CPU of interrupts:  interrupt ─▶ lock: complete its own I/Os, call other CPUs for theirs ─▶ what it did before
//!   I/O thread:         round of a queue ─▶ round of the next ...              nothing offered: asks for kicks, sleeps
//! ```
//!
//! The queues and rings are the real ones (`rings.rs`): they decide when a kick or an interrupt is wanted and how much
//! a round fetches; a ring has an entry for each request of four jobs. The costs are those of [`GuestCosts`]; our own
//! driver's few nanoseconds are not added. As in Linux 3.16, the interrupt holds the lock while it completes or sends a
//! call. A CPU takes an interrupt at the end of its step, and none while it spins for a lock, as with
//! `spin_lock_irqsave`. Interrupts of queue `n` go to CPU `n`, on which job `n` runs; nothing moves. Idle CPUs wake at
//! once. What an I/O takes its job varies between half and one and a half times the mean: without that, CPUs and I/O
//! thread fall into step, and the rate depends on which step.

use std::collections::VecDeque;
use std::io;

use blkyard_mq::Bio;
use blkyard_sim::{Events, Rng};
use serde::Serialize;

use super::guest_costs::GuestCosts;
use super::rings::{SimulatedQueues, bios_of};
use crate::study::job_flags::job_of;

/// A simulated guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct GuestScene {
    pub(crate) jobs: usize,
    pub(crate) queues: usize,
    /// Threads of the host behind the queues, queue `n` on thread `n` modulo their number.
    pub(crate) io_threads: usize,
}

/// Result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct GuestResult {
    pub(crate) iops: f64,
    /// Kicks, interrupts and calls between CPUs for each I/O.
    pub(crate) kicks: f64,
    pub(crate) interrupts: f64,
    pub(crate) ipis: f64,
    /// Mean number of CPUs that wait when a lock is taken.
    pub(crate) waiters: f64,
}

/// Counts so far.
#[derive(Clone, Copy, Default)]
struct GuestCounts {
    ios: u64,
    kicks: u64,
    interrupts: u64,
    ipis: u64,
    locks: u64,
    waiters: u64,
}

#[derive(Debug)]
enum GuestEvent {
    /// A step of this CPU has ended.
    Cpu(usize),
    /// A round of this I/O thread has ended.
    IoThread(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CpuStep {
    Idle,
    /// The job prepares an I/O.
    Prepare,
    /// Under the lock, or waiting for it.
    Add,
    /// The exit of a kick.
    Kick,
    /// The entry of an interrupt of this queue.
    Interrupt(usize),
    /// Waits for the lock, for the interrupt.
    Reap(usize),
    /// Under the lock: the first of the completions that it has found.
    Complete(usize),
    /// Answers a call.
    Answer,
}

/// A CPU, and the job on it.
struct GuestCpu {
    step: CpuStep,
    /// I/Os that are not out.
    free: VecDeque<Box<Bio>>,
    /// I/Os of the job that another CPU has taken off its queue.
    inbox: VecDeque<Box<Bio>>,
    /// Those of them that it completes now.
    answered: VecDeque<Box<Bio>>,
    is_called: bool,
    /// Queues whose interrupt is pending.
    interrupts: VecDeque<usize>,
    /// What the interrupt has found in its queue and not completed.
    reaped: VecDeque<Box<Bio>>,
    /// What waiters add to its next step under the lock, ns.
    transfer_ns: u64,
    /// Whether the next of these wants a call.
    is_calling: bool,
}

#[derive(Default)]
struct GuestLock {
    is_held: bool,
    waiting: VecDeque<usize>,
}

struct IoThread {
    is_asleep: bool,
    /// Queue to begin with in the next round.
    next: usize,
}

struct GuestWorld {
    scene: GuestScene,
    costs: GuestCosts,
    events: Events<GuestEvent>,
    cpus: Vec<GuestCpu>,
    locks: Vec<GuestLock>,
    io_threads: Vec<IoThread>,
    rings: SimulatedQueues,
    rng: Rng,
    counts: GuestCounts,
}

/// Plays a scene for so many I/Os, after a tenth of that to settle.
///
/// # Errors
/// There is no memory for its rings.
pub(crate) fn play_guest(scene: GuestScene, costs: GuestCosts, ios: u64, seed: u64) -> io::Result<GuestResult> {
    let cpu = |job| GuestCpu {
        step: CpuStep::Idle,
        free: bios_of(job),
        inbox: VecDeque::new(),
        answered: VecDeque::new(),
        is_called: false,
        interrupts: VecDeque::new(),
        reaped: VecDeque::new(),
        transfer_ns: 0,
        is_calling: false,
    };
    let mut rings = SimulatedQueues::new(scene.jobs, scene.queues, true)?;
    // A guest's driver has calls enabled except in its interrupt, and nobody polls.
    for queue in &mut rings.queues {
        queue.driver_may_sleep();
    }
    let mut world = GuestWorld {
        scene,
        costs,
        events: Events::default(),
        cpus: (0..scene.jobs).map(cpu).collect(),
        locks: (0..scene.queues).map(|_| GuestLock::default()).collect(),
        io_threads: (0..scene.io_threads).map(|_| IoThread { is_asleep: false, next: 0 }).collect(),
        rings,
        rng: Rng::new(seed),
        counts: GuestCounts::default(),
    };
    (0..scene.io_threads).for_each(|thread| world.serve(thread));
    (0..scene.jobs).for_each(|cpu| world.next(cpu));
    world.run_until(ios / 10);
    let (start_ns, before) = (world.events.now_ns(), world.counts);
    world.run_until(before.ios + ios);
    let (ran_ns, counts) = ((world.events.now_ns() - start_ns) as f64, world.counts);
    let done = (counts.ios - before.ios) as f64;
    let each = |count: u64, before: u64| (count - before) as f64 / done;
    Ok(GuestResult {
        iops: done / ran_ns * 1e9,
        kicks: each(counts.kicks, before.kicks),
        interrupts: each(counts.interrupts, before.interrupts),
        ipis: each(counts.ipis, before.ipis),
        waiters: (counts.waiters - before.waiters) as f64 / (counts.locks - before.locks) as f64,
    })
}

impl GuestWorld {
    fn run_until(&mut self, ios: u64) {
        while self.counts.ios < ios {
            match self.events.advance() {
                Some(GuestEvent::Cpu(cpu)) => self.over(cpu),
                Some(GuestEvent::IoThread(thread)) => self.serve(thread),
                None => unreachable!("I/Os are out and nobody works on them"),
            }
        }
    }

    fn queue_of(&self, job: usize) -> usize {
        job % self.scene.queues
    }

    fn begin(&mut self, cpu: usize, step: CpuStep, cost_ns: u64) {
        self.cpus[cpu].step = step;
        self.events.after(cost_ns, GuestEvent::Cpu(cpu));
    }

    /// The next step of a CPU that has ended one, or was idle: interrupts first, then calls, then its job.
    fn next(&mut self, cpu: usize) {
        let GuestCpu { free, inbox, answered, is_called, interrupts, .. } = &mut self.cpus[cpu];
        let (step, cost_ns) = if let Some(queue) = interrupts.pop_front() {
            (CpuStep::Interrupt(queue), self.costs.interrupt_ns)
        } else if std::mem::take(is_called) {
            answered.append(inbox);
            (CpuStep::Answer, self.costs.call_ns + self.costs.complete_ns * answered.len() as u64)
        } else if free.is_empty() {
            self.cpus[cpu].step = CpuStep::Idle;
            return;
        } else {
            let mean_ns = self.costs.prepare_ns;
            (CpuStep::Prepare, mean_ns / 2 + self.rng.below(mean_ns + 1))
        };
        self.begin(cpu, step, cost_ns);
    }

    /// Something is pending for a CPU.
    fn rouse(&mut self, cpu: usize) {
        if self.cpus[cpu].step == CpuStep::Idle {
            self.next(cpu);
        }
    }

    fn over(&mut self, cpu: usize) {
        let now_ns = self.events.now_ns();
        match self.cpus[cpu].step {
            CpuStep::Idle => unreachable!("an idle CPU has no step"),
            CpuStep::Prepare => self.want_lock(cpu, self.queue_of(cpu), CpuStep::Add),
            CpuStep::Add => {
                let queue = self.queue_of(cpu);
                let bio = self.cpus[cpu].free.pop_front();
                let kick = self.rings.queues[queue].submit(bio.into_iter(), now_ns);
                self.release(queue);
                if kick {
                    self.counts.kicks += 1;
                    self.begin(cpu, CpuStep::Kick, self.costs.kick_ns);
                } else {
                    self.next(cpu);
                }
            }
            CpuStep::Kick => {
                self.wake_thread(self.queue_of(cpu));
                self.next(cpu);
            }
            CpuStep::Interrupt(queue) => self.want_lock(cpu, queue, CpuStep::Reap(queue)),
            CpuStep::Reap(_) => unreachable!("an interrupt waits for its lock"),
            CpuStep::Complete(queue) => {
                if let Some(bio) = self.cpus[cpu].reaped.pop_front() {
                    self.deliver(cpu, bio);
                }
                self.complete_next(cpu, queue);
            }
            CpuStep::Answer => {
                let GuestCpu { free, answered, .. } = &mut self.cpus[cpu];
                self.counts.ios += answered.len() as u64;
                free.append(answered);
                self.next(cpu);
            }
        }
    }

    fn want_lock(&mut self, cpu: usize, queue: usize, step: CpuStep) {
        self.cpus[cpu].step = step;
        if self.locks[queue].is_held {
            self.locks[queue].waiting.push_back(cpu);
        } else {
            self.locked(cpu, queue);
        }
    }

    /// A CPU has the lock. Each further waiter takes the lock's line away from it once.
    fn locked(&mut self, cpu: usize, queue: usize) {
        self.locks[queue].is_held = true;
        let waiters = self.locks[queue].waiting.len() as u64;
        self.counts.locks += 1;
        self.counts.waiters += waiters;
        self.cpus[cpu].transfer_ns = self.costs.transfer_ns * waiters;
        if self.cpus[cpu].step == CpuStep::Add {
            let cost_ns = self.costs.hold_ns + self.cpus[cpu].transfer_ns;
            self.begin(cpu, CpuStep::Add, cost_ns);
        } else {
            self.complete_next(cpu, queue);
        }
    }

    /// Under the lock: the next completion, if there is one. Otherwise the interrupt ends.
    fn complete_next(&mut self, cpu: usize, queue: usize) {
        while self.cpus[cpu].reaped.is_empty() {
            let now_ns = self.events.now_ns();
            let (ring, reaped) = (&mut self.rings.queues[queue], &mut self.cpus[cpu].reaped);
            ring.driver_wakes();
            if ring.reap(now_ns, &mut |bio| reaped.push_back(bio)) == 0 && ring.driver_may_sleep() {
                self.release(queue);
                return self.next(cpu);
            }
        }
        let owner = job_of(&self.cpus[cpu].reaped[0]);
        let is_calling = owner != cpu && self.cpus[owner].inbox.is_empty();
        let mut cost_ns = self.costs.hold_ns + std::mem::take(&mut self.cpus[cpu].transfer_ns);
        if owner == cpu {
            cost_ns += self.costs.complete_ns;
        } else if is_calling {
            cost_ns += self.costs.call_ns;
        }
        self.cpus[cpu].is_calling = is_calling;
        self.begin(cpu, CpuStep::Complete(queue), cost_ns);
    }

    fn release(&mut self, queue: usize) {
        self.locks[queue].is_held = false;
        if let Some(next) = self.locks[queue].waiting.pop_front() {
            self.locked(next, queue);
        }
    }

    /// An I/O goes to its job. A CPU that has an unanswered call is not called again.
    fn deliver(&mut self, cpu: usize, bio: Box<Bio>) {
        let owner = job_of(&bio);
        if owner == cpu {
            self.cpus[cpu].free.push_back(bio);
            self.counts.ios += 1;
            return;
        }
        self.cpus[owner].inbox.push_back(bio);
        if std::mem::take(&mut self.cpus[cpu].is_calling) {
            self.counts.ipis += 1;
            self.cpus[owner].is_called = true;
            self.rouse(owner);
        }
    }

    fn wake_thread(&mut self, queue: usize) {
        let thread = queue % self.scene.io_threads;
        if std::mem::take(&mut self.io_threads[thread].is_asleep) {
            self.queues_of(thread).for_each(|queue| self.rings.queues[queue].device_wakes());
            self.serve(thread);
        }
    }

    fn queues_of(&self, thread: usize) -> impl DoubleEndedIterator<Item = usize> + use<> {
        (thread..self.scene.queues).step_by(self.scene.io_threads)
    }

    /// The next round of an I/O thread, or its sleep.
    fn serve(&mut self, thread: usize) {
        let queues: Vec<_> = self.queues_of(thread).collect();
        loop {
            for step in 0..queues.len() {
                let at = (self.io_threads[thread].next + step) % queues.len();
                let queue = queues[at];
                let round = self.rings.queues[queue].run_device(self.events.now_ns());
                if round.call {
                    self.counts.interrupts += 1;
                    self.cpus[queue].interrupts.push_back(queue);
                    self.rouse(queue);
                }
                if round.taken > 0 {
                    self.io_threads[thread].next = at + 1;
                    let cost_ns = round.taken as u64 * self.costs.service_ns;
                    return self.events.after(cost_ns, GuestEvent::IoThread(thread));
                }
            }
            // Each queue is asked for its kicks, even if an earlier one has work.
            let awake = queues.iter().filter(|queue| !self.rings.queues[**queue].device_may_sleep()).count();
            if awake == 0 {
                self.io_threads[thread].is_asleep = true;
                return;
            }
            queues.iter().for_each(|queue| self.rings.queues[*queue].device_wakes());
        }
    }
}
