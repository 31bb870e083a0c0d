//! The host in virtual time: CPUs, jobs, locks, sleep, around the real code of a mode and the model of the device.
//!
//! A task runs step by step. A step begins when its CPU is free and, in a mode with a lock, when the lock is; then the
//! real code runs, and its CPU is occupied for the measured cost of the step. At the end of that time the device sees
//! the doorbell, I/Os count as completed, and signalled tasks wake.
//!
//! ```text
//!   job:     submit ─▶ collect ─▶ submit ─▶ ... ─▶ no completion ─▶ sleep ─▶ interrupt, or an eventfd ─▶ collect
//!   helper:  sleep ─▶ an eventfd, or the tick ─▶ serve queue 0, 1, .. ─▶ again if signalled meanwhile, else sleep
//! ```
//!
//! Like fio's jobs over libaio, a job keeps its depth in flight: it takes completions, submits as many, and sleeps only
//! without completions. Each job has a CPU to itself; the helper runs on an idle one if there is one, and waits for the
//! first to be free otherwise. An interrupt costs as much as a wake-up by an eventfd, in every mode. A thread that
//! waits for a lock spins.

use std::collections::VecDeque;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blkyard_mq::{Bio, Status, Wake};
use blkyard_sim::{DeviceEvent, DeviceModel, Events, ModelDevice, Rng};

use super::bio::Helper;
use super::costs::{CallCost, CostStep, Costs, StepCosts};
use super::end::{JobEnd, Moved, fill};
use super::job_flags::{cookie, slot_of};
use super::meter::{StudyMeter, StudyResult};
use super::pairs::StudyControllers;

/// CPUs of the post's host.
pub(crate) const CPUS: usize = 4;

/// Configuration of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene<'a> {
    pub(crate) model: DeviceModel,
    pub(crate) jobs: usize,
    /// I/Os that each job keeps in flight.
    pub(crate) depth: usize,
    /// I/Os that count, after as many as are needed to settle.
    pub(crate) ios: u64,
    pub(crate) warm_up: u64,
    pub(crate) seed: u64,
    pub(crate) steps: &'a StepCosts,
    pub(crate) costs: &'a Costs,
    /// Period of the helper's tick, if it has one.
    pub(crate) tick_ns: Option<u64>,
}

/// An eventfd that only remembers.
#[derive(Debug, Default)]
pub(crate) struct RecordedSignal(AtomicBool);

impl RecordedSignal {
    /// Whether it was signalled since the last call.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Wake for RecordedSignal {
    fn wake(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The ends of the jobs, the queue each uses, and the helper if the mode has one.
pub(crate) struct Cast<M> {
    pub(crate) ends: Vec<M>,
    pub(crate) queue_of: Vec<usize>,
    pub(crate) helper: Option<Helper>,
}

#[derive(Debug)]
enum StudyEvent {
    Device(DeviceEvent),
    /// A task wants its CPU.
    Run(usize),
    /// A task's step has ended.
    Over(usize),
    Tick,
}

impl From<DeviceEvent> for StudyEvent {
    fn from(event: DeviceEvent) -> StudyEvent {
        StudyEvent::Device(event)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobState {
    Asleep,
    /// Its eventfd was signalled, in a step that has not ended yet.
    Called,
    /// Awake as soon as it gets its CPU and has paid for it.
    Waking,
    At(CostStep),
}

struct Task {
    state: JobState,
    cpu: usize,
    /// Its eventfd was signalled while it was awake.
    again: bool,
    /// Tasks to wake when its step ends.
    calls: Vec<usize>,
}

struct StudyJob<M> {
    end: M,
    queue: usize,
    /// Bios that are not out, in the order they came back.
    free: VecDeque<Box<Bio>>,
    batch: Vec<Box<Bio>>,
    /// When the bio of each slot was submitted.
    since_ns: Vec<u64>,
    rng: Rng,
    out: usize,
}

#[derive(Clone, Copy, Default)]
struct StudyQueue {
    /// Completions posted by the device and not taken.
    posted: usize,
    lock_free_ns: u64,
    lock_cpu: Option<usize>,
}

#[derive(Clone, Copy, Default)]
struct Cpu {
    free_ns: u64,
    /// Part of a nanosecond that is still to be paid for: steps are not whole nanoseconds, and time is.
    owed_ns: f64,
}

/// The whole.
pub(crate) struct StudyWorld<'a, M> {
    scene: Scene<'a>,
    events: Events<StudyEvent>,
    device: ModelDevice,
    controllers: StudyControllers,
    jobs: Vec<StudyJob<M>>,
    helper: Option<Helper>,
    /// Jobs first, then the helper.
    tasks: Vec<Task>,
    eventfds: Vec<Arc<RecordedSignal>>,
    queues: Vec<StudyQueue>,
    cpus: [Cpu; CPUS],
    meter: StudyMeter,
    stopping: bool,
}

impl<'a, M: JobEnd> StudyWorld<'a, M> {
    /// Sets the scene. `cast` opens the queues of the device; the eventfds are one for each job, then the helper's.
    pub(crate) fn new(
        scene: Scene<'a>,
        cast: impl FnOnce(&mut StudyControllers, &[Arc<RecordedSignal>]) -> Cast<M>,
    ) -> StudyWorld<'a, M> {
        assert!(scene.jobs <= CPUS, "each job has a CPU to itself");
        let mut controllers = StudyControllers::new(scene.model);
        let eventfds: Vec<_> = (0..=scene.jobs).map(|_| Arc::new(RecordedSignal::default())).collect();
        let Cast { ends, queue_of, helper } = cast(&mut controllers, &eventfds);
        let device = ModelDevice::new(scene.model, controllers.len(), scene.seed);
        let queues = queue_of.iter().max().map_or(0, |last| last + 1);
        let job = |(number, (end, queue)): (usize, (M, usize))| StudyJob {
            end,
            queue,
            free: (0..scene.depth).map(|slot| bio(number, slot)).collect(),
            batch: Vec::with_capacity(scene.depth),
            since_ns: vec![0; scene.depth],
            rng: Rng::new(scene.seed ^ (number as u64 + 1)),
            out: 0,
        };
        let jobs: Vec<_> = ends.into_iter().zip(queue_of).enumerate().map(job).collect();
        let task = |number| Task {
            state: if number < scene.jobs { JobState::At(CostStep::Submit) } else { JobState::Asleep },
            cpu: number % CPUS,
            again: false,
            calls: Vec::with_capacity(scene.jobs + 1),
        };
        let mut events = Events::default();
        (0..scene.jobs).for_each(|job| events.at(0, StudyEvent::Run(job)));
        if let Some(tick_ns) = scene.tick_ns
            && helper.is_some()
        {
            events.at(tick_ns, StudyEvent::Tick);
        }
        StudyWorld {
            scene,
            events,
            device,
            controllers,
            jobs,
            helper,
            tasks: (0..=scene.jobs).map(task).collect(),
            eventfds,
            queues: vec![StudyQueue::default(); queues],
            cpus: [Cpu::default(); CPUS],
            meter: StudyMeter::default(),
            stopping: false,
        }
    }

    /// Runs the simulation to its end, and returns the result. All I/O has completed then.
    pub(crate) fn run(mut self) -> StudyResult {
        let mut outcome = None;
        while !self.stopping || self.jobs.iter().any(|job| job.out > 0) {
            let Some(event) = self.events.advance() else { panic!("the model stands still with I/O in flight") };
            match event {
                StudyEvent::Device(event) => {
                    if let Some((queue, token)) = self.device.handle(event, &mut self.events) {
                        self.controllers.get(queue).complete(token as u16);
                        self.interrupt(queue);
                    }
                }
                StudyEvent::Run(task) => self.step(task),
                StudyEvent::Over(task) => self.over(task),
                StudyEvent::Tick => self.tick(),
            }
            let now_ns = self.events.now_ns();
            if !self.meter.is_on() && self.meter.ios() >= self.scene.warm_up {
                self.meter.start(now_ns);
            } else if !self.stopping && self.meter.is_on() && self.meter.ios() >= self.scene.ios {
                outcome = Some(self.meter.outcome(now_ns));
                self.stopping = true;
            }
        }
        outcome.unwrap_or_default()
    }

    /// The device has posted a completion: the first job of its queue hears of it, if it sleeps.
    fn interrupt(&mut self, queue: usize) {
        self.queues[queue].posted += 1;
        let home = self.jobs.iter().position(|job| job.queue == queue);
        if let Some(home) = home
            && self.tasks[home].state == JobState::Asleep
        {
            self.wake(home);
        }
    }

    fn tick(&mut self) {
        let helper = self.scene.jobs;
        if self.tasks[helper].state == JobState::Asleep {
            self.wake(helper);
        }
        if let Some(tick_ns) = self.scene.tick_ns {
            self.events.after(tick_ns, StudyEvent::Tick);
        }
    }

    fn wake(&mut self, task: usize) {
        if task == self.scene.jobs {
            // The one that is free first; among equals the last, for jobs live on the first.
            let now_ns = self.events.now_ns();
            let free = (0..CPUS).rev().min_by_key(|cpu| self.cpus[*cpu].free_ns.max(now_ns));
            self.tasks[task].cpu = free.unwrap_or(0);
        }
        self.tasks[task].state = JobState::Waking;
        self.events.after(0, StudyEvent::Run(task));
    }

    /// A task gets its CPU, or learns when to ask again.
    fn step(&mut self, task: usize) {
        let now_ns = self.events.now_ns();
        let cpu = self.tasks[task].cpu;
        if self.cpus[cpu].free_ns > now_ns {
            return self.events.at(self.cpus[cpu].free_ns, StudyEvent::Run(task));
        }
        let step = match self.tasks[task].state {
            JobState::At(step) => step,
            JobState::Waking => {
                let sleep = self.scene.costs.sleep;
                self.meter.woke(task == self.scene.jobs);
                let until_ns = self.occupy(cpu, sleep);
                let first = if task == self.scene.jobs { CostStep::LookAfter(0) } else { CostStep::Collect };
                self.tasks[task].state = JobState::At(first);
                return self.events.at(until_ns, StudyEvent::Run(task));
            }
            JobState::Asleep | JobState::Called => unreachable!("a sleeper has no steps"),
        };
        let queue = match step {
            CostStep::LookAfter(queue) => queue,
            CostStep::Collect | CostStep::Submit => self.jobs[task].queue,
        };
        let mut hand_over_ns = 0.0;
        if M::LOCKED {
            let lock = &mut self.queues[queue];
            if lock.lock_free_ns > now_ns {
                let until_ns = lock.lock_free_ns;
                self.occupy(cpu, CallCost { user_ns: (until_ns - now_ns) as f64, system_ns: 0.0 });
                // To the whole nanosecond, at which the lock is free.
                self.cpus[cpu].free_ns = until_ns;
                return self.events.at(until_ns, StudyEvent::Run(task));
            }
            if lock.lock_cpu.replace(cpu).is_some_and(|last| last != cpu) {
                hand_over_ns = self.scene.costs.hand_over_ns.unwrap_or(0.0);
            }
        }
        let moved = self.act(task, step, now_ns);
        self.queues[queue].posted -= moved.reaped;
        self.meter.moved(&moved);
        let user_ns = self.scene.steps.charge(step, &moved, self.scene.costs.mail_ns) + hand_over_ns;
        let mut until_ns = self.occupy(cpu, CallCost { user_ns, system_ns: 0.0 });
        self.queues[queue].lock_free_ns = until_ns;
        // Eventfds are signalled after the lock is released.
        for called in self.answer_eventfds(task) {
            until_ns = self.occupy(cpu, self.scene.costs.ring);
            self.tasks[task].calls.push(called);
        }
        self.events.at(until_ns, StudyEvent::Over(task));
    }

    /// The real code of a step.
    fn act(&mut self, task: usize, step: CostStep, now_ns: u64) -> Moved {
        if let CostStep::LookAfter(queue) = step {
            let Some(helper) = &mut self.helper else { unreachable!("only a helper looks after queues") };
            return helper.look_after(queue, now_ns);
        }
        let StudyJob { end, free, batch, since_ns, rng, out, .. } = &mut self.jobs[task];
        if step == CostStep::Collect {
            let moved = end.collect(now_ns, batch);
            *out -= batch.len();
            assert!(batch.iter().all(|bio| bio.status == Status::Ok), "the modelled device fails nothing");
            free.extend(batch.drain(..));
            return moved;
        }
        for mut bio in free.drain(..free.len().min(M::BATCH)) {
            let slot = slot_of(&bio);
            since_ns[slot] = now_ns;
            fill(&mut bio, slot, rng);
            batch.push(bio);
        }
        *out += batch.len();
        end.submit(batch, now_ns)
    }

    /// Tasks whose eventfds were signalled in their sleep. Awake ones will poll again.
    fn answer_eventfds(&mut self, me: usize) -> Vec<usize> {
        let mut called = Vec::new();
        for (task, eventfd) in self.eventfds.iter().enumerate() {
            if !eventfd.take() {
                continue;
            }
            if self.tasks[task].state == JobState::Asleep {
                self.tasks[task].state = JobState::Called;
                called.push(task);
            } else if task != me {
                self.tasks[task].again = true;
            }
        }
        called
    }

    fn over(&mut self, task: usize) {
        let JobState::At(step) = self.tasks[task].state else { unreachable!("a step ends once") };
        let mut calls = std::mem::take(&mut self.tasks[task].calls);
        calls.drain(..).for_each(|called| self.wake(called));
        self.tasks[task].calls = calls;
        let queue = match step {
            CostStep::LookAfter(queue) => queue,
            CostStep::Collect | CostStep::Submit => self.jobs[task].queue,
        };
        let controller = self.controllers.get(queue);
        self.device.submit(queue, iter::from_fn(|| controller.fetch()).map(u32::from), &mut self.events);
        if step == CostStep::Collect {
            let now_ns = self.events.now_ns();
            let StudyJob { free, since_ns, .. } = &mut self.jobs[task];
            free.iter().for_each(|bio| self.meter.ended(now_ns - since_ns[slot_of(bio)]));
        }
        let next = self.next(task, step);
        self.tasks[task].state = next.map_or(JobState::Asleep, JobState::At);
        if next.is_some() {
            self.events.after(0, StudyEvent::Run(task));
        }
    }

    /// Next step of a task; `None` if it sleeps.
    fn next(&mut self, task: usize, step: CostStep) -> Option<CostStep> {
        if let CostStep::LookAfter(queue) = step {
            let next = queue + 1;
            if next < self.queues.len() {
                return Some(CostStep::LookAfter(next));
            }
            return std::mem::take(&mut self.tasks[task].again).then_some(CostStep::LookAfter(0));
        }
        let job = &mut self.jobs[task];
        if !job.free.is_empty() {
            if self.stopping {
                // No more submissions, but the queue still submits its waiting bios.
                job.free.clear();
            }
            return Some(CostStep::Submit);
        }
        let rung = std::mem::take(&mut self.tasks[task].again);
        (step == CostStep::Submit || rung || self.queues[job.queue].posted > 0).then_some(CostStep::Collect)
    }

    /// Charges a CPU from now, or from when it is free, on. Returns until when.
    fn occupy(&mut self, cpu: usize, cost: CallCost) -> u64 {
        self.meter.charge(cost);
        let now_ns = self.events.now_ns();
        let cpu = &mut self.cpus[cpu];
        cpu.owed_ns += cost.total_ns();
        let whole_ns = cpu.owed_ns as u64;
        cpu.owed_ns -= whole_ns as f64;
        cpu.free_ns = cpu.free_ns.max(now_ns) + whole_ns;
        cpu.free_ns
    }
}

fn bio(job: usize, slot: usize) -> Box<Bio> {
    let mut bio = Bio::with_capacity(1);
    bio.cookie = cookie(job, slot);
    bio
}
