//! A disk that threads share under shuttle: the number of its queues changes while they submit, sleep and poll, in
//! random schedules.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test --release -p blkyard-mq --test shuttle_disk`
//!
//! The real code over a device with its own thread, which signals the watching thread. A schedule in which all sleep is
//! reported as a deadlock: a thread that was not told that its rings have moved, or a change that waits for a queue
//! that no thread runs. A far deadline never comes: it would hide a lost wake-up.
#![cfg(shuttle)]

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blkyard_mq::{
    Batch, Bio, BioFlags, Context, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, Op, Parker, QueueCounts,
    QueueFactory, QueueKind, QueueLimits, RegionTable, Segment, SharedDisk, SharedSubmitter, Status, Tag, Wake,
};
use shuttle::rand::Rng;
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

/// A watch longer than this is one until the next tick.
const FAR_NS: u64 = 100_000_000;

/// Everything outside the queues: the threads called, and the device's requests, by queue.
#[derive(Default)]
struct World {
    state: Mutex<State>,
    eventfd: Condvar,
    clock: AtomicU64,
}

#[derive(Default)]
struct State {
    called: Vec<bool>,
    queues: Vec<Pair>,
    over: bool,
}

#[derive(Default)]
struct Pair {
    submitted: VecDeque<Tag>,
    done: VecDeque<Tag>,
}

impl World {
    fn now_ns(&self) -> u64 {
        self.clock.fetch_add(10, Ordering::Relaxed)
    }

    /// The device's thread: completes its requests, one by one, in random order, and signals.
    fn run_device(&self) {
        let mut state = self.state.lock().unwrap();
        loop {
            let busy: Vec<_> = (0..state.queues.len()).filter(|at| !state.queues[*at].submitted.is_empty()).collect();
            if busy.is_empty() {
                if state.over {
                    return;
                }
                state = self.eventfd.wait(state).unwrap();
                continue;
            }
            let queue = busy[shuttle::rand::thread_rng().gen_range(0..busy.len())];
            let Pair { submitted, done } = &mut state.queues[queue];
            let index = shuttle::rand::thread_rng().gen_range(0..submitted.len());
            done.extend(submitted.remove(index));
            self.eventfd.notify_all();
            drop(state);
            thread::yield_now();
            state = self.state.lock().unwrap();
        }
    }
}

/// One thread's parker, beside some of the device's queues.
struct ModelParker {
    world: Arc<World>,
    me: usize,
    beside: Vec<usize>,
}

impl Wake for ModelParker {
    fn wake(&self) {
        self.world.state.lock().unwrap().called[self.me] = true;
        self.world.eventfd.notify_all();
    }
}

impl Parker for ModelParker {
    fn sleep(&self) {
        let mut state = self.world.state.lock().unwrap();
        while !state.called[self.me] {
            state = self.world.eventfd.wait(state).unwrap();
        }
        state.called[self.me] = false;
    }

    fn watch(&self, deadline_ns: u64) {
        self.listen(&self.beside, deadline_ns);
    }

    fn watch_one(&self, beside: usize, deadline_ns: u64) {
        self.listen(&self.beside[beside..=beside], deadline_ns);
    }

    fn give_way(&self) {
        thread::yield_now();
    }
}

impl ModelParker {
    fn listen(&self, queues: &[usize], deadline_ns: u64) {
        assert!(deadline_ns.saturating_sub(self.world.now_ns()) > FAR_NS, "nothing here has a deadline");
        let mut state = self.world.state.lock().unwrap();
        while !state.called[self.me] && queues.iter().all(|queue| state.queues[*queue].done.is_empty()) {
            state = self.world.eventfd.wait(state).unwrap();
        }
        state.called[self.me] = false;
    }
}

/// A queue of the device, and its driver's context: its number, to select its parkers.
struct Queue(Arc<World>);
struct Number(usize);

impl Context for Number {}

impl Driver<Number> for Queue {
    fn queue_rqs(&mut self, Number(number): &mut Number, _: &RegionTable, batch: &mut Batch<'_>) {
        let mut state = self.0.state.lock().unwrap();
        while let Some((tag, _, _)) = batch.take() {
            state.queues[*number].submitted.push_back(tag);
        }
        self.0.eventfd.notify_all();
    }

    fn poll(&mut self, Number(number): &mut Number, _: &RegionTable, done: &mut Done<'_>, _: u64) {
        let mut state = self.0.state.lock().unwrap();
        while let Some(tag) = state.queues[*number].done.pop_front() {
            done.complete(tag, Status::Ok);
        }
    }
}

struct Factory(Arc<World>);

impl QueueFactory for Factory {
    type Driver = Queue;
    type Cx = Number;
    type Error = Infallible;

    fn queue(&mut self, _: QueueKind, _: usize, _: usize) -> Result<(HwQueue<Queue>, Number), Infallible> {
        let mut state = self.0.state.lock().unwrap();
        state.queues.push(Pair::default());
        let number = Number(state.queues.len() - 1);
        drop(state);
        let info = DeviceInfo {
            name: "model".into(),
            capacity_sectors: 1024,
            limits: QueueLimits { discard_sectors_max: 1024, ..QueueLimits::default() },
            read_only: false,
            volatile_cache: false,
            fua: false,
            ..DeviceInfo::default()
        };
        // So small that bios wait in the queue for tags, and in the rings for the queue.
        let config = HwQueueConfig { depth: 1, bios_max: 2, ..HwQueueConfig::default() };
        Ok((HwQueue::new(Queue(Arc::clone(&self.0)), Arc::new(info), config), number))
    }

    fn parker(&mut self, beside: &[&Number]) -> Result<Arc<dyn Parker>, Infallible> {
        let mut state = self.0.state.lock().unwrap();
        state.called.push(false);
        let (me, beside) = (state.called.len() - 1, beside.iter().map(|number| number.0).collect());
        Ok(Arc::new(ModelParker { world: Arc::clone(&self.0), me, beside }))
    }
}

/// One thread: submits its bios in batches, sometimes sleeps for them, sometimes only polls, and counts completions.
fn submitter(mut queue: SharedSubmitter<Queue, Number>, bios: u64, polls: bool, kinds: bool, world: &World) {
    let now = || world.now_ns();
    let mut seen = vec![false; bios as usize];
    let mut sink = |bio: Box<Bio>| {
        assert_eq!(bio.status, Status::Ok);
        let number = bio.cookie as usize;
        assert!(!std::mem::replace(&mut seen[number], true), "bio {number} came back twice");
    };
    let mut next = 0;
    while next < bios {
        let batch = shuttle::rand::thread_rng().gen_range(1..=queue.room() as u64).min(bios - next);
        for _ in 0..batch {
            let mut bio = Bio::with_capacity(1);
            (bio.cookie, bio.op, bio.sector, bio.sectors) = (next, Op::Discard, next, 1);
            bio.flags = BioFlags::NO_MERGE;
            if kinds && next % 2 == 1 {
                bio.op = Op::Read;
                bio.sectors = 8;
                bio.segments.push(Segment { region: 0, offset: 0, len: 4096 });
            }
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
    assert!(seen.into_iter().all(|seen| seen), "a bio did not come back");
}

/// Threads submit while the number of queues becomes each of these in turn.
fn run(threads: usize, bios: u64, polls: bool, counts: &[QueueCounts]) {
    let world = Arc::new(World::default());
    let (disk, submitters) = SharedDisk::open(Factory(Arc::clone(&world)), threads, 2, counts[0]).unwrap();
    let device = Arc::clone(&world);
    let device = thread::spawn(move || device.run_device());
    let kinds = counts[0].read > 0;
    let spawn = |queue| {
        let world = Arc::clone(&world);
        thread::spawn(move || submitter(queue, bios, polls, kinds, &world))
    };
    let threads: Vec<_> = submitters.into_iter().map(spawn).collect();
    for counts in &counts[1..] {
        assert_eq!(disk.set_queues(*counts, &|| world.now_ns()).unwrap(), *counts);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    world.state.lock().unwrap().over = true;
    world.eventfd.notify_all();
    device.join().unwrap();
}

const ONE: QueueCounts = QueueCounts { default: 1, read: 0, poll: 0 };
const ONE_TWO_ONE: [QueueCounts; 3] = [ONE, QueueCounts { default: 2, ..ONE }, ONE];

#[test]
fn two_threads_while_one_queue_becomes_two_and_one_again() {
    shuttle::check_random(|| run(2, 4, true, &ONE_TWO_ONE), 10_000);
}

#[test]
fn two_sleepers_while_one_queue_becomes_two_and_one_again() {
    shuttle::check_random(|| run(2, 4, false, &ONE_TWO_ONE), 10_000);
}

#[test]
fn three_threads_while_three_queues_become_two_and_one_and_three() {
    let counts = [3, 2, 1, 3].map(QueueCounts::only);
    shuttle::check_random(move || run(3, 3, true, &counts), 5000);
}

/// A thread sleeps for reads and others at once, on two queues.
#[test]
fn two_threads_whose_reads_go_elsewhere() {
    let counts = [(1, 1), (2, 1), (1, 2)].map(|(default, read)| QueueCounts { default, read, poll: 0 });
    shuttle::check_random(move || run(2, 4, true, &counts), 10_000);
    shuttle::check_pct(move || run(2, 4, false, &counts), 5000, 3);
}

/// Schedules with few, well placed preemptions find what random ones rarely do; spinning is impossible then, so all
/// sleep.
#[test]
fn sleepers_under_schedules_with_three_preemptions() {
    shuttle::check_pct(|| run(2, 3, false, &ONE_TWO_ONE), 10_000, 3);
}
