//! Software queues under shuttle: many threads, several hardware queues, random schedules.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test --release -p blkyard-mq --test shuttle_sw`
//!
//! This is the real code: `--cfg shuttle` puts shuttle's atomics into `blkyard_mem::sync`, and every access to one is a
//! point where another thread may run. Threads sleep on shuttle's condition variables, so a schedule in which all sleep
//! is reported as a deadlock, with a seed to repeat it. Weak memory is not modelled here, but by loom.
//!
//! Time is a number that advances when it is read or slept for. The far deadline of a watch, the tick, never comes: it
//! would hide a lost wake-up.
#![cfg(shuttle)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blkyard_mq::{
    Batch, Bio, BlockDevice, Budget, Context, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, NullConfig, NullDevice,
    Op, Parker, QueueLimits, QueueMap, RegionTable, Segment, Status, SwQueue, Tag, Wake,
};
use shuttle::rand::Rng;
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

/// A watch longer than this is one until the next tick.
const FAR_NS: u64 = 100_000_000;

#[derive(Default)]
struct Clock(AtomicU64);

impl Clock {
    fn now_ns(&self) -> u64 {
        self.0.fetch_add(10, Ordering::Relaxed)
    }
}

/// Everything outside one hardware queue: the threads called, and the device's requests.
struct World {
    state: Mutex<State>,
    eventfd: Condvar,
    clock: Arc<Clock>,
}

#[derive(Default)]
struct State {
    called: Vec<bool>,
    submitted: VecDeque<Tag>,
    done: VecDeque<Tag>,
    over: bool,
}

impl World {
    fn new(submitters: usize, clock: &Arc<Clock>) -> Arc<World> {
        let state = State { called: vec![false; submitters], ..State::default() };
        Arc::new(World { state: Mutex::new(state), eventfd: Condvar::new(), clock: Arc::clone(clock) })
    }

    fn parkers(self: &Arc<World>) -> Vec<Arc<dyn Parker>> {
        let submitters = self.state.lock().unwrap().called.len();
        (0..submitters)
            .map(|submitter| Arc::new(ModelParker { world: Arc::clone(self), submitter }) as Arc<dyn Parker>)
            .collect()
    }
}

struct ModelParker {
    world: Arc<World>,
    submitter: usize,
}

impl Wake for ModelParker {
    fn wake(&self) {
        self.world.state.lock().unwrap().called[self.submitter] = true;
        self.world.eventfd.notify_all();
    }
}

impl Parker for ModelParker {
    fn sleep(&self) {
        let mut state = self.world.state.lock().unwrap();
        while !state.called[self.submitter] {
            state = self.world.eventfd.wait(state).unwrap();
        }
        state.called[self.submitter] = false;
    }

    fn watch(&self, deadline_ns: u64) {
        let mut state = self.world.state.lock().unwrap();
        if deadline_ns.saturating_sub(self.world.clock.now_ns()) < FAR_NS {
            // Sleeps for some schedules' worth of time, or until called.
            for _ in 0..shuttle::rand::thread_rng().gen_range(0..4) {
                if state.called[self.submitter] {
                    break;
                }
                drop(state);
                thread::yield_now();
                state = self.world.state.lock().unwrap();
            }
            if !state.called[self.submitter] {
                self.world.clock.0.fetch_max(deadline_ns, Ordering::Relaxed);
            }
        } else {
            while !state.called[self.submitter] && state.done.is_empty() {
                state = self.world.eventfd.wait(state).unwrap();
            }
        }
        state.called[self.submitter] = false;
    }
}

/// An independent device: a thread that completes its requests, one by one, in random order, and signals the watching
/// thread.
struct EventDriver(Arc<World>);

impl<Cx> Driver<Cx> for EventDriver {
    fn queue_rqs(&mut self, _: &mut Cx, _: &RegionTable, batch: &mut Batch<'_>) {
        let mut state = self.0.state.lock().unwrap();
        while let Some((tag, _, _)) = batch.take() {
            state.submitted.push_back(tag);
        }
        self.0.eventfd.notify_all();
    }

    fn poll(&mut self, _: &mut Cx, _: &RegionTable, done: &mut Done<'_>, _: u64) {
        let mut state = self.0.state.lock().unwrap();
        while let Some(tag) = state.done.pop_front() {
            done.complete(tag, Status::Ok);
        }
    }
}

impl World {
    /// The life of the device thread.
    fn run_device(&self) {
        let mut state = self.state.lock().unwrap();
        loop {
            while state.submitted.is_empty() && !state.over {
                state = self.eventfd.wait(state).unwrap();
            }
            if state.over {
                return;
            }
            let index = shuttle::rand::thread_rng().gen_range(0..state.submitted.len());
            let tag = state.submitted.remove(index).unwrap();
            state.done.push_back(tag);
            self.eventfd.notify_all();
            drop(state);
            thread::yield_now();
            state = self.state.lock().unwrap();
        }
    }

    fn end_device(&self) {
        self.state.lock().unwrap().over = true;
        self.eventfd.notify_all();
    }
}

fn info() -> DeviceInfo {
    DeviceInfo {
        name: "model".into(),
        capacity_sectors: 1024,
        limits: QueueLimits::default(),
        read_only: false,
        volatile_cache: false,
        fua: false,
        ..DeviceInfo::default()
    }
}

/// One thread: submits its bios in batches, sometimes sleeps for them, sometimes only polls, and counts completions.
fn submitter<D: Driver<Cx>, Cx: Context>(mut queue: SwQueue<D, Cx>, me: u64, bios: u64, polls: bool, clock: &Clock) {
    let now = || clock.now_ns();
    let mut seen = vec![false; bios as usize];
    let mut sink = |bio: Box<Bio>| {
        assert_eq!((bio.cookie >> 32, bio.status), (me, Status::Ok));
        let number = (bio.cookie & 0xffff_ffff) as usize;
        assert!(!std::mem::replace(&mut seen[number], true), "bio {number} of {me} came back twice");
    };
    let mut next = 0;
    while next < bios {
        let batch = shuttle::rand::thread_rng().gen_range(1..=queue.room() as u64).min(bios - next);
        for _ in 0..batch {
            let mut bio = Bio::with_capacity(1);
            bio.cookie = me << 32 | next;
            bio.op = Op::Read;
            bio.sectors = 8;
            bio.segments.push(Segment { region: 0, offset: 0, len: 4096 });
            queue.submit(bio);
            next += 1;
        }
        if shuttle::rand::thread_rng().gen_bool(0.8) {
            queue.ring(&now);
        }
        while queue.room() == 0 || shuttle::rand::thread_rng().gen_bool(0.3) {
            if polls && shuttle::rand::thread_rng().gen_bool(0.5) {
                queue.ring(&now);
                queue.poll(&now, &mut sink);
                thread::yield_now();
            } else if queue.wait(&now, &mut sink) == 0 {
                break;
            }
        }
    }
    queue.leave(&now, &mut sink);
    assert!(seen.into_iter().all(|seen| seen), "a bio of {me} did not come back");
}

/// Threads on queues, each with its own world.
#[derive(Clone, Copy)]
struct Plan {
    threads: usize,
    queues: usize,
    bios: u64,
    polls: bool,
    /// Slots of a budget that all queues share; 0 for none.
    budget: usize,
}

fn run<D>(plan: Plan, driver: impl Fn(&Arc<World>) -> D, devices: bool)
where
    D: Driver<()> + Send + 'static,
{
    let clock = Arc::new(Clock::default());
    let map = QueueMap::even(plan.threads, plan.queues);
    let budget = (plan.budget > 0).then(|| Budget::new(plan.budget, plan.queues));
    let (mut threads, mut worlds, mut device_threads) = (Vec::new(), Vec::new(), Vec::new());
    for queue in 0..plan.queues {
        let world = World::new(map.cpus_of(queue).count(), &clock);
        // So small that bios wait in the queue for tags, and in the rings for the queue.
        let config = HwQueueConfig { depth: 2, bios_max: 3, ..HwQueueConfig::default() };
        let hw = HwQueue::new(driver(&world), Arc::new(info()), config);
        let parkers = world.parkers();
        if parkers.is_empty() {
            continue;
        }
        let ends = match &budget {
            Some(budget) => SwQueue::share_within(budget, hw, (), 3, parkers).unwrap(),
            None => SwQueue::share(hw, (), 3, parkers),
        };
        if devices {
            let world = Arc::clone(&world);
            device_threads.push(thread::spawn(move || world.run_device()));
        }
        worlds.push(world);
        for (end, cpu) in ends.into_iter().zip(map.cpus_of(queue).collect::<Vec<_>>()) {
            let clock = Arc::clone(&clock);
            threads.push(thread::spawn(move || submitter(end, cpu as u64, plan.bios, plan.polls, &clock)));
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    worlds.iter().for_each(|world| world.end_device());
    device_threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn null(latency_ns: u64) -> impl Fn(&Arc<World>) -> blkyard_mq::NullQueue {
    let device = NullDevice::new(info(), NullConfig { latency_ns, bytes_per_s: 0 });
    move |_| device.queue(2)
}

const MANY: Plan = Plan { threads: 5, queues: 2, bios: 6, polls: true, budget: 0 };
const SLEEPERS: Plan = Plan { polls: false, ..MANY };

#[test]
fn five_threads_on_two_queues_that_take_their_time() {
    shuttle::check_random(|| run(MANY, null(500), false), 10_000);
}

#[test]
fn five_threads_on_two_queues_that_answer_on_the_spot() {
    shuttle::check_random(|| run(MANY, null(0), false), 10_000);
}

#[test]
fn four_threads_on_one_queue_whose_device_rings() {
    let plan = Plan { threads: 4, queues: 1, ..MANY };
    shuttle::check_random(move || run(plan, |world| EventDriver(Arc::clone(world)), true), 10_000);
}

#[test]
fn two_threads_on_three_queues_whose_devices_ring() {
    let plan = Plan { threads: 2, queues: 3, ..MANY };
    shuttle::check_random(move || run(plan, |world| EventDriver(Arc::clone(world)), true), 10_000);
}

/// A queue that comes out short sleeps until the other queue returns slots: no deadline would end it.
#[test]
fn threads_on_two_queues_that_share_a_budget() {
    for budget in [1, 3] {
        let plan = Plan { threads: 4, bios: 4, budget, ..MANY };
        shuttle::check_random(move || run(plan, null(500), false), 5000);
        shuttle::check_random(move || run(plan, |world| EventDriver(Arc::clone(world)), true), 5000);
        let plan = Plan { polls: false, ..plan };
        shuttle::check_random(move || run(plan, null(0), false), 5000);
        shuttle::check_pct(move || run(plan, |world| EventDriver(Arc::clone(world)), true), 5000, 3);
    }
}

/// Schedules with few, well placed preemptions find what random ones rarely do; spinning is impossible then, so all
/// sleep.
#[test]
fn sleepers_under_schedules_with_three_preemptions() {
    shuttle::check_pct(|| run(SLEEPERS, null(500), false), 5000, 3);
    let plan = Plan { threads: 4, queues: 1, ..SLEEPERS };
    shuttle::check_pct(move || run(plan, |world| EventDriver(Arc::clone(world)), true), 5000, 3);
}
