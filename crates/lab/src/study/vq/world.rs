//! Jobs, locks and devices in virtual time. Every thread has a CPU to itself and polls; costs are measured, and waits
//! are simulated.
//!
//! ```text
//!   job:     look (lock) ─▶ fill ─▶ submit (lock) ─▶ look ...     until its depth is in flight and no completion comes
//!   device:  turn of a queue with something to do ─▶ turn of the next ...                      until there is none
//! ```
//!
//! A queue has one lock, which its jobs wait for in order of arrival; a change of CPU costs extra. A poll takes all
//! used chains, and puts another job's into that job's box. Nothing is random. A thread without work spins, and sees a
//! new event at once: so kicks and calls are off, as with the rings of `live.rs`.
//!
//! The real queues and rings carry the requests ([`rings`](super::rings)); only time is virtual. Requests enter the
//! ring when their step ends. A poll takes what is used when it begins, and a turn of a device what is available then;
//! the turn's completions are shown by the device's next round of the queue, so job and device work at the same time.

use std::collections::VecDeque;
use std::io;

use blkyard_mq::Bio;
use blkyard_sim::Events;
use serde::Serialize;

use super::rig::DEPTH;
use super::rings::{SimulatedQueues, bios_of};
use super::steps::BatchCosts;
use crate::study::job_flags::job_of;

/// Threads that serve the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Devices {
    /// One thread for all queues: the post's host.
    One,
    /// A thread for each queue.
    Each,
    /// The job that polls the queue, on its own thread: run to completion.
    Jobs,
}

/// A simulated scene.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct VqScene {
    pub(crate) jobs: usize,
    pub(crate) queues: usize,
    pub(crate) devices: Devices,
}

impl VqScene {
    /// CPUs that it uses. A thread without a job's queue needs none.
    pub(crate) fn cpus(self) -> usize {
        self.jobs
            + match self.devices {
                Devices::One => 1,
                Devices::Each => self.queues.min(self.jobs),
                Devices::Jobs => 0,
            }
    }
}

/// Charged costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prices<'a> {
    pub(crate) steps: &'a BatchCosts,
    /// Putting an I/O into another job's box, and taking it out there: half each.
    pub(crate) mail_ns: f64,
    /// A lock, and the data under it, that come from another CPU.
    pub(crate) hand_over_ns: f64,
    /// Extra cost of an I/O on both sides if driver and device are on two CPUs.
    pub(crate) lines_ns: f64,
}

impl Prices<'_> {
    /// Cost of taking some of the available chains, as their share of the cost of all.
    fn turn_ns(&self, taken: usize, offered: usize) -> f64 {
        let all_ns = self.steps.turn.at(offered);
        if taken == 0 { all_ns } else { all_ns * taken as f64 / offered as f64 }
    }
}

/// Result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct VqResult {
    pub(crate) iops: f64,
    /// Share of the jobs' time that they waited for a lock.
    pub(crate) waiting: f64,
}

/// A thread's step has ended.
struct Over(usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// No work.
    Parked,
    Fill,
    /// Under the lock, or waiting for it.
    Submit,
    Look,
    /// Others' I/Os go to their boxes, those in its own box come out.
    Mail,
    /// Of a device.
    Turn,
}

struct Thread {
    doing: Doing,
    /// I/Os that are not out.
    free: VecDeque<Box<Bio>>,
    /// I/Os in its box.
    boxed: VecDeque<Box<Bio>>,
    /// Of the latest poll: its own, with those of the box, and those of other jobs.
    own: VecDeque<Box<Bio>>,
    away: Vec<Box<Bio>>,
    /// Since when it waits for the lock.
    since_ns: u64,
    /// Parts of a nanosecond not yet taken.
    owed_ns: f64,
    /// Queue to begin with at its next turn.
    next_queue: usize,
}

/// The lock of a queue.
#[derive(Default)]
struct QueueLock {
    is_held: bool,
    last: Option<usize>,
    waiting: VecDeque<usize>,
}

struct VqWorld<'a> {
    scene: VqScene,
    prices: Prices<'a>,
    events: Events<Over>,
    /// The jobs, then the devices.
    threads: Vec<Thread>,
    locks: Vec<QueueLock>,
    rings: SimulatedQueues,
    done: u64,
    waited_ns: u64,
}

/// Plays a scene for so many I/Os, after a tenth of that to settle.
///
/// # Errors
/// There is no memory for its rings.
pub(crate) fn play(scene: VqScene, prices: Prices<'_>, ios: u64) -> io::Result<VqResult> {
    let devices = match scene.devices {
        Devices::One => 1,
        Devices::Each => scene.queues,
        Devices::Jobs => 0,
    };
    let thread = |number| Thread {
        doing: Doing::Parked,
        free: if number < scene.jobs { bios_of(number) } else { VecDeque::new() },
        boxed: VecDeque::with_capacity(DEPTH),
        own: VecDeque::with_capacity(DEPTH),
        away: Vec::new(),
        since_ns: 0,
        owed_ns: 0.0,
        next_queue: 0,
    };
    let mut world = VqWorld {
        scene,
        prices,
        events: Events::default(),
        threads: (0..scene.jobs + devices).map(thread).collect(),
        locks: (0..scene.queues).map(|_| QueueLock::default()).collect(),
        rings: SimulatedQueues::new(scene.jobs, scene.queues, scene.devices != Devices::Jobs)?,
        done: 0,
        waited_ns: 0,
    };
    (0..scene.jobs).for_each(|job| world.wake(job));
    world.run_until(ios / 10);
    let (start_ns, before, waited_ns) = (world.events.now_ns(), world.done, world.waited_ns);
    world.run_until(before + ios);
    let ran_ns = (world.events.now_ns() - start_ns) as f64;
    Ok(VqResult {
        iops: (world.done - before) as f64 / ran_ns * 1e9,
        waiting: (world.waited_ns - waited_ns) as f64 / (ran_ns * scene.jobs as f64),
    })
}

impl VqWorld<'_> {
    fn run_until(&mut self, done: u64) {
        while self.done < done {
            let Some(Over(thread)) = self.events.advance() else {
                unreachable!("I/Os are out and nobody works on them")
            };
            self.over(thread);
        }
    }

    fn over(&mut self, number: usize) {
        let now_ns = self.events.now_ns();
        match self.threads[number].doing {
            Doing::Parked => unreachable!("a thread at rest has no step"),
            Doing::Fill => self.want_lock(number, Doing::Submit),
            Doing::Submit => {
                let queue = self.queue_of(number);
                self.rings.queues[queue].submit(self.threads[number].free.drain(..), now_ns);
                self.release(number);
                self.wake_device(queue);
                self.want_lock(number, Doing::Look);
            }
            Doing::Look => {
                let queue = self.queue_of(number);
                let ring = &mut self.rings.queues[queue];
                if ring.waiting() > 0 {
                    ring.issue(now_ns);
                    self.wake_device(queue);
                }
                self.release(number);
                let Thread { boxed, own, away, .. } = &mut self.threads[number];
                let moved = boxed.len() + away.len();
                own.append(boxed);
                if moved > 0 {
                    self.begin(number, Doing::Mail, moved as f64 * self.prices.mail_ns / 2.0);
                } else {
                    self.collected(number);
                }
            }
            Doing::Mail => {
                for bio in std::mem::take(&mut self.threads[number].away) {
                    let job = job_of(&bio);
                    self.threads[job].boxed.push_back(bio);
                    self.wake(job);
                }
                self.collected(number);
            }
            Doing::Turn => self.turn(number),
        }
    }

    /// A job has all completions of a poll.
    fn collected(&mut self, job: usize) {
        let has_news = self.rings.queues[self.queue_of(job)].has_news();
        let thread = &mut self.threads[job];
        self.done += thread.own.len() as u64;
        thread.free.append(&mut thread.own);
        if !thread.free.is_empty() {
            let cost = self.prices.steps.fill.at(thread.free.len());
            self.begin(job, Doing::Fill, cost);
        } else if !thread.boxed.is_empty() || has_news {
            self.want_lock(job, Doing::Look);
        } else {
            thread.doing = Doing::Parked;
        }
    }

    fn want_lock(&mut self, job: usize, doing: Doing) {
        let (now_ns, queue) = (self.events.now_ns(), self.queue_of(job));
        self.threads[job].doing = doing;
        self.threads[job].since_ns = now_ns;
        if self.locks[queue].is_held {
            self.locks[queue].waiting.push_back(job);
        } else {
            self.locked(job, queue);
        }
    }

    /// A job has the lock, and executes its step.
    fn locked(&mut self, job: usize, number: usize) {
        let now_ns = self.events.now_ns();
        let VqWorld { scene, prices, threads, locks, rings, .. } = self;
        let (thread, queue_lock, queue) = (&mut threads[job], &mut locks[number], &mut rings.queues[number]);
        queue_lock.is_held = true;
        let comes_over = queue_lock.last.replace(job).is_some_and(|last| last != job);
        let lines_ns = if scene.devices == Devices::Jobs { 0.0 } else { prices.lines_ns / 2.0 };
        let mut cost = if comes_over { prices.hand_over_ns } else { 0.0 };
        // Bios that the ring has no room for are paid when it has.
        let issued = if thread.doing == Doing::Submit {
            thread.free.len().min(queue.room())
        } else {
            let Thread { own, away, .. } = thread;
            let (reaped, served) = queue.reap_and_serve(now_ns, &mut |bio| {
                if job_of(&bio) == job { own.push_back(bio) } else { away.push(bio) }
            });
            let served_ns = if scene.devices == Devices::Jobs { prices.steps.turn.at(served) } else { 0.0 };
            cost += served_ns + prices.steps.reap.at(reaped) + lines_ns * reaped as f64;
            queue.waiting().min(queue.room())
        };
        if issued > 0 {
            cost += prices.steps.submit.at(issued) + lines_ns * issued as f64;
        }
        self.waited_ns += now_ns - thread.since_ns;
        let doing = thread.doing;
        self.begin(job, doing, cost);
    }

    fn release(&mut self, job: usize) {
        let number = self.queue_of(job);
        self.locks[number].is_held = false;
        if let Some(next) = self.locks[number].waiting.pop_front() {
            self.locked(next, number);
        }
    }

    /// Something came that a thread may wait for.
    fn wake(&mut self, number: usize) {
        if self.threads[number].doing != Doing::Parked {
            return;
        }
        if number < self.scene.jobs { self.want_lock(number, Doing::Look) } else { self.turn(number) }
    }

    fn wake_device(&mut self, queue: usize) {
        match self.scene.devices {
            Devices::One => self.wake(self.scene.jobs),
            Devices::Each => self.wake(self.scene.jobs + queue),
            Devices::Jobs => {}
        }
    }

    /// A device begins its next turn, or rests.
    fn turn(&mut self, number: usize) {
        let (first, count) = match self.scene.devices {
            Devices::Each => (number - self.scene.jobs, 1),
            Devices::One | Devices::Jobs => (0, self.scene.queues),
        };
        self.threads[number].doing = Doing::Turn;
        let start = self.threads[number].next_queue;
        let mut cost = 0.0;
        for step in 0..count {
            let queue = first + (start + step) % count;
            let round = self.rings.queues[queue].run_device(self.events.now_ns());
            cost += self.prices.turn_ns(round.taken, round.offered) + self.prices.lines_ns * round.taken as f64;
            if round.shown > 0 {
                (queue..self.scene.jobs).step_by(self.scene.queues).for_each(|job| self.wake(job));
            }
            if round.taken > 0 {
                self.threads[number].next_queue = (start + step + 1) % count;
                return self.begin(number, Doing::Turn, cost);
            }
        }
        self.threads[number].doing = Doing::Parked;
    }

    /// Takes a thread's CPU for so long.
    fn begin(&mut self, number: usize, doing: Doing, cost_ns: f64) {
        let thread = &mut self.threads[number];
        thread.doing = doing;
        thread.owed_ns += cost_ns;
        let whole_ns = thread.owed_ns as u64;
        thread.owed_ns -= whole_ns as f64;
        self.events.after(whole_ns, Over(number));
    }

    fn queue_of(&self, job: usize) -> usize {
        job % self.scene.queues
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::costs::Curve;

    const IOS: u64 = 30_000;

    fn steps() -> BatchCosts {
        let [fill, submit, turn, reap] = [5.0, 20.0, 100.0, 15.0].map(Curve::each);
        BatchCosts { fill, submit, turn, turn_null: Curve::default(), reap }
    }

    fn iops(jobs: usize, queues: usize, devices: Devices, steps: &BatchCosts, hand_over_ns: f64) -> f64 {
        let prices = Prices { steps, mail_ns: 0.0, hand_over_ns, lines_ns: 0.0 };
        play(VqScene { jobs, queues, devices }, prices, IOS).unwrap().iops
    }

    fn is_near(value: f64, want: f64) -> bool {
        (value / want - 1.0).abs() < 0.03
    }

    #[test]
    fn one_job_and_its_device_work_at_once_and_the_slower_side_decides() {
        let steps = steps();
        assert!(is_near(iops(1, 1, Devices::Each, &steps, 0.0), 1e9 / 100.0));
        assert!(is_near(iops(2, 1, Devices::Each, &steps, 0.0), 1e9 / 100.0));
    }

    #[test]
    fn the_same_scene_plays_the_same_twice() {
        let steps = steps();
        let at = |devices| iops(3, 2, devices, &steps, 500.0).to_bits();
        for devices in [Devices::One, Devices::Each, Devices::Jobs] {
            assert_eq!(at(devices), at(devices), "{devices:?}");
        }
    }

    #[test]
    fn more_bios_than_a_ring_has_entries_wait_for_their_turn() {
        let steps = steps();
        assert!(8 * DEPTH > usize::from(super::super::rig::RING));
        assert!(is_near(iops(8, 1, Devices::One, &steps, 0.0), 1e9 / 100.0));
    }

    #[test]
    fn run_to_completion_is_the_sum_of_both_sides_and_grows_with_its_queues() {
        let steps = steps();
        for jobs in [1, 2, 16] {
            assert!(is_near(iops(jobs, jobs, Devices::Jobs, &steps, 0.0), jobs as f64 * 1e9 / 140.0), "{jobs}");
        }
    }

    #[test]
    fn one_device_thread_is_the_limit_of_all_queues_and_a_thread_each_is_not() {
        let steps = steps();
        assert!(is_near(iops(4, 4, Devices::One, &steps, 0.0), 1e9 / 100.0));
        assert!(is_near(iops(4, 4, Devices::Each, &steps, 0.0), 4e9 / 100.0));
    }

    #[test]
    fn jobs_on_one_queue_are_serial_under_its_lock_and_pay_for_bringing_it_over() {
        let fast = BatchCosts { turn: Curve::each(1.0), ..steps() };
        // Filling runs concurrently; 35 ns of each I/O do not.
        let free = iops(4, 1, Devices::Each, &fast, 0.0);
        assert!(free <= 1e9 / 35.0 * 1.01 && free > 1e9 / 40.0, "{free}");
        let paid = iops(4, 1, Devices::Each, &fast, 2_000.0);
        assert!(paid < free * 0.8, "{paid} {free}");
        assert!(is_near(iops(4, 4, Devices::Each, &fast, 2_000.0), 4e9 / 41.0));
    }

    #[test]
    fn lines_that_come_over_are_paid_on_both_sides_and_not_by_one_that_runs_to_completion() {
        let steps = steps();
        let at = |devices, lines_ns| {
            let prices = Prices { steps: &steps, mail_ns: 0.0, hand_over_ns: 0.0, lines_ns };
            play(VqScene { jobs: 1, queues: 1, devices }, prices, IOS).unwrap()
        };
        assert!(is_near(at(Devices::Each, 50.0).iops, 1e9 / 150.0), "the device is the slower side");
        assert_eq!(at(Devices::Jobs, 50.0), at(Devices::Jobs, 0.0));
    }
}
