//! Lane threads: they wake for work, sleep without it, and end with their pollers.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use blkyard_mq::{
    Bio, BlockDevice, HwQueue, HwQueueConfig, IdlePolicy, Op, Poller, PollerState, Region, RegionTable, SignalEventfd,
    Status,
};
use blkyard_os::{FileConfig, FileQueue, LaneConfig, LaneError, Ring, RingConfig, now_ns, spawn};
use rustix::event::{EventfdFlags, eventfd};

use crate::common::{bio, folders, image, open, pattern};

/// Longer than any test on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);

fn config(name: &str, spin_ns: u64) -> LaneConfig {
    LaneConfig { name: name.into(), policy: IdlePolicy::up_to(spin_ns), ..LaneConfig::default() }
}

/// Counts as far as requested; the request is found by polling, or announced by an eventfd.
struct Counter {
    shared: Arc<Shared>,
    seen: u64,
    last_deadline: Option<u64>,
}

#[derive(Default)]
struct Shared {
    asked: AtomicU64,
    answered: AtomicU64,
    eventfd_wanted: AtomicBool,
    over: AtomicBool,
    runs: AtomicU64,
    eventfd: Mutex<Option<Arc<OwnedFd>>>,
    deadline_ns: AtomicU64,
}

impl Shared {
    /// Asks, and rings if that is wanted, as a guest does.
    fn ask(&self, n: u64) {
        self.asked.store(n, Ordering::SeqCst);
        if self.eventfd_wanted.load(Ordering::SeqCst) {
            let eventfd = self.eventfd.lock().unwrap().clone();
            rustix::io::write(eventfd.unwrap(), &1_u64.to_ne_bytes()).unwrap();
        }
    }

    fn await_answer(&self, n: u64) {
        let start = Instant::now();
        while self.answered.load(Ordering::SeqCst) < n {
            assert!(start.elapsed() < PATIENCE, "the lane sleeps through call {n}");
            std::hint::spin_loop();
        }
    }
}

struct Counting {
    counter: Counter,
    /// The eventfd that it returns; set from the shared slot in each round.
    eventfd: Option<Arc<OwnedFd>>,
}

fn counting(shared: &Arc<Shared>) -> Counting {
    Counting { counter: Counter { shared: Arc::clone(shared), seen: 0, last_deadline: None }, eventfd: None }
}

impl Poller<Ring> for Counting {
    fn run_once(&mut self, ring: &mut Ring, now_ns: u64) -> PollerState {
        let counter = &mut self.counter;
        counter.shared.runs.fetch_add(1, Ordering::Relaxed);
        let eventfd = counter.shared.eventfd.lock().unwrap().clone();
        if self.eventfd.as_ref().map(Arc::as_ptr) != eventfd.as_ref().map(Arc::as_ptr)
            && let Some(old) = std::mem::replace(&mut self.eventfd, eventfd)
        {
            ring.ignore(old.as_fd());
        }
        let due = counter.shared.deadline_ns.load(Ordering::SeqCst);
        counter.last_deadline = (due > 0).then_some(due);
        if due > 0 && now_ns >= due {
            counter.shared.deadline_ns.store(0, Ordering::SeqCst);
            counter.last_deadline = None;
            counter.shared.answered.fetch_add(1, Ordering::SeqCst);
        }
        let asked = counter.shared.asked.load(Ordering::SeqCst);
        if asked == counter.seen {
            return PollerState::Idle;
        }
        counter.seen = asked;
        counter.shared.answered.store(asked, Ordering::SeqCst);
        PollerState::Busy
    }

    fn arm(&mut self) -> bool {
        self.counter.shared.eventfd_wanted.store(true, Ordering::SeqCst);
        self.counter.shared.asked.load(Ordering::SeqCst) != self.counter.seen
    }

    fn disarm(&mut self) {
        self.counter.shared.eventfd_wanted.store(false, Ordering::SeqCst);
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.eventfd.as_ref().map(|eventfd| eventfd.as_fd())
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.counter.last_deadline
    }

    fn is_over(&self) -> bool {
        self.counter.shared.over.load(Ordering::SeqCst)
    }
}

fn new_eventfd() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap())
}

/// A little disorder, so that calls come at every moment of falling asleep.
fn wait_a_little(n: u64) {
    (0..n.wrapping_mul(2_654_435_761) % 4000).for_each(|_| std::hint::spin_loop());
}

#[test]
fn no_call_of_the_waker_is_slept_through() {
    for spin_ns in [0, 2_000] {
        let shared = Arc::new(Shared::default());
        let poller = Arc::clone(&shared);
        let lane = spawn(config("wakes", spin_ns), move |_| vec![counting(&poller)]).unwrap();
        let waker = lane.waker();
        for n in 1..=5_000 {
            shared.asked.store(n, Ordering::Relaxed);
            waker.wake();
            shared.await_answer(n);
            wait_a_little(n);
        }
        shared.over.store(true, Ordering::SeqCst);
        waker.wake();
        lane.join().unwrap();
    }
}

#[test]
fn no_eventfd_is_slept_through_also_when_it_is_replaced() {
    let shared = Arc::new(Shared { eventfd: Mutex::new(Some(new_eventfd())), ..Shared::default() });
    let poller = Arc::clone(&shared);
    let lane = spawn(config("eventfds", 0), move |_| vec![counting(&poller)]).unwrap();
    let waker = lane.waker();
    for n in 1..=5_000 {
        if n % 100 == 0 {
            // The old one is closed first, so that the new one gets its number.
            *shared.eventfd.lock().unwrap() = None;
            *shared.eventfd.lock().unwrap() = Some(new_eventfd());
            waker.wake();
        }
        shared.ask(n);
        shared.await_answer(n);
        wait_a_little(n);
    }
    shared.over.store(true, Ordering::SeqCst);
    waker.wake();
    lane.join().unwrap();
}

#[test]
fn a_parked_poller_hears_its_eventfd_and_the_waker_beside_a_busy_one() {
    const IDLE: usize = 40;
    let with_eventfd = || Arc::new(Shared { eventfd: Mutex::new(Some(new_eventfd())), ..Shared::default() });
    let idle: Vec<_> = (0..IDLE).map(|_| with_eventfd()).collect();
    let busy = with_eventfd();
    for spin_ns in [0, u64::MAX] {
        let pollers: Vec<_> = idle.iter().chain([&busy]).map(counting).collect();
        let lane = spawn(config("parks", spin_ns), move |_| pollers).unwrap();
        let mut asked = 0;
        for n in 1..=200_u64 {
            let poller = &idle[n as usize % IDLE];
            // Until it is parked: armed while the busy one is kept busy.
            let start = Instant::now();
            while !poller.eventfd_wanted.load(Ordering::SeqCst) || start.elapsed() < Duration::from_millis(n % 3) {
                assert!(start.elapsed() < PATIENCE, "it is never parked");
                asked += 1;
                busy.ask(asked);
                busy.await_answer(asked);
            }
            let next = poller.answered.load(Ordering::SeqCst) + 1;
            if n % 5 == 0 {
                *poller.eventfd.lock().unwrap() = Some(new_eventfd());
                lane.waker().wake();
            }
            if n % 7 == 0 {
                poller.asked.store(next, Ordering::SeqCst);
                lane.waker().wake();
            } else {
                poller.ask(next);
            }
            poller.await_answer(next);
        }
        idle.iter().chain([&busy]).for_each(|shared| shared.over.store(true, Ordering::SeqCst));
        lane.waker().wake();
        lane.join().unwrap();
        for shared in idle.iter().chain([&busy]) {
            shared.over.store(false, Ordering::SeqCst);
            shared.asked.store(0, Ordering::SeqCst);
            shared.answered.store(0, Ordering::SeqCst);
        }
    }
}

#[test]
fn an_idle_lane_sleeps_and_wakes_for_a_deadline() {
    let shared = Arc::new(Shared { eventfd: Mutex::new(Some(new_eventfd())), ..Shared::default() });
    let pollers: Vec<_> = (0..16).map(|_| counting(&shared)).collect();
    let lane = spawn(config("idle", 50_000), move |_| pollers).unwrap();
    // The system decides when it first falls asleep; a lane that keeps turning never has a quiet window.
    let start = Instant::now();
    loop {
        let (runs, cpu_ns) = (shared.runs.load(Ordering::Relaxed), lane.cpu_ns().unwrap());
        std::thread::sleep(Duration::from_millis(100));
        let turned = shared.runs.load(Ordering::Relaxed) - runs;
        let used_ns = lane.cpu_ns().unwrap() - cpu_ns;
        if turned == 0 && runs > 0 && used_ns < 1_000_000 {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{turned} turns and {used_ns} ns of CPU time in 100 ms without work");
    }
    let due = now_ns() + 30_000_000;
    shared.deadline_ns.store(due, Ordering::SeqCst);
    lane.waker().wake();
    shared.await_answer(1);
    assert!(now_ns() >= due);
    shared.over.store(true, Ordering::SeqCst);
    lane.waker().wake();
    lane.join().unwrap();
}

#[test]
fn an_eventfd_that_rings_for_ever_does_not_keep_a_lane_awake_and_is_still_heard() {
    let semaphore = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).unwrap();
    rustix::io::write(&semaphore, &(1_u64 << 63).to_ne_bytes()).unwrap();
    let [endless, honest] = [Arc::new(semaphore), new_eventfd()]
        .map(|eventfd| Arc::new(Shared { eventfd: Mutex::new(Some(eventfd)), ..Shared::default() }));
    let pollers = vec![counting(&endless), counting(&honest)];
    let lane = spawn(config("endless", 0), move |_| pollers).unwrap();
    endless.ask(1);
    endless.await_answer(1);
    let (runs, cpu_ns) = (endless.runs.load(Ordering::Relaxed), lane.cpu_ns().unwrap());
    let start = Instant::now();
    std::thread::sleep(Duration::from_secs(1));
    let used_ns = lane.cpu_ns().unwrap() - cpu_ns;
    let (turned, passed) = (endless.runs.load(Ordering::Relaxed) - runs, start.elapsed());
    // Two turns to a pause of a millisecond; without pauses there are hundreds of thousands.
    assert!(u128::from(turned) <= 10 * passed.as_millis(), "{turned} turns in {passed:?}");
    assert!(u128::from(used_ns) * 5 <= passed.as_nanos(), "{used_ns} ns of CPU time in {passed:?}");
    for n in 2..=200 {
        for shared in [&endless, &honest] {
            shared.ask(n);
            shared.await_answer(n);
        }
    }
    for shared in [endless, honest] {
        shared.over.store(true, Ordering::SeqCst);
    }
    lane.waker().wake();
    lane.join().unwrap();
}

struct Fails;

impl Poller<Ring> for Fails {
    fn run_once(&mut self, _: &mut Ring, _: u64) -> PollerState {
        panic!("the sky falls");
    }
    fn arm(&mut self) -> bool {
        false
    }
    fn disarm(&mut self) {}
    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn is_over(&self) -> bool {
        true
    }
}

#[test]
fn a_lane_that_panics_is_an_error_to_whoever_joins() {
    let lane = spawn(config("fails", 0), |_| vec![Fails]).unwrap();
    let error = lane.join().unwrap_err().to_string();
    assert!(error.contains("lane fails panicked") && error.contains("the sky falls"), "{error}");
    let early = spawn(config("early", 0), |_| -> Vec<Fails> { panic!("while building") }).unwrap_err();
    assert!(matches!(early, LaneError::Panicked { .. }), "{early}");
}

#[test]
fn a_lane_that_cannot_start_says_so_to_whoever_spawns() {
    let pinned = LaneConfig { cpus: Some(vec![100_000]), ..config("pinned", 0) };
    let error = spawn(pinned, |_| vec![Fails]).unwrap_err();
    assert!(error.to_string().contains("pinned to CPUs [100000]"), "{error}");
    let error = spawn(config("full", 0), |_| (0..2000).map(|_| Fails).collect()).unwrap_err();
    assert!(error.to_string().contains("2000 queues exceed"), "{error}");
    let cpu = blkyard_os::cpu_places()[0].cpu;
    let pinned = LaneConfig { cpus: Some(vec![cpu]), ..config("pinned", 0) };
    let place = Arc::new(AtomicU64::new(u64::MAX));
    let told = Arc::clone(&place);
    let lane = spawn(pinned, move |_| {
        told.store(rustix::thread::sched_getcpu() as u64, Ordering::SeqCst);
        Vec::<Fails>::new()
    })
    .unwrap();
    lane.join().unwrap();
    assert_eq!(place.load(Ordering::SeqCst), u64::from(cpu));
}

enum Submission {
    Io(Box<Bio>),
    Memory(Arc<RegionTable>),
    End,
}

/// Panics with I/O in the kernel.
struct FailsInFlight {
    queue: HwQueue<FileQueue>,
}

impl Poller<Ring> for FailsInFlight {
    fn run_once(&mut self, ring: &mut Ring, now_ns: u64) -> PollerState {
        (0..16).for_each(|i| self.queue.submit(bio(Op::Read, i * 16, &[(i * 8192, 2048), (i * 8192 + 4096, 2048)])));
        self.queue.issue(ring, now_ns);
        ring.submit();
        self.queue.submit(bio(Op::Read, 0, &[(0, 2048), (4096, 2048)]));
        self.queue.issue(ring, now_ns);
        panic!("with {} in flight", self.queue.in_flight());
    }
    fn arm(&mut self) -> bool {
        false
    }
    fn disarm(&mut self) {}
    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn is_over(&self) -> bool {
        false
    }
}

#[test]
fn a_lane_that_panics_with_io_in_flight_takes_nothing_with_it() {
    let folder = &folders()[0];
    let path = image(folder, 1 << 20);
    let device = open(FileConfig::new(&path));
    let lane = spawn(config("in flight", 0), move |ring| {
        let info = Arc::new(device.info().clone());
        let mut queue = HwQueue::new(device.queue(32), info, HwQueueConfig { depth: 32, ..Default::default() });
        queue.set_memory(ring, table().0);
        vec![FailsInFlight { queue }]
    });
    let error = lane.unwrap().join().unwrap_err().to_string();
    assert!(error.contains("with 17 in flight"), "{error}");
    open(FileConfig::new(&path));
}

/// Feeds a hardware queue of a file from a channel.
struct Disk {
    queue: HwQueue<FileQueue>,
    submissions: mpsc::Receiver<Submission>,
    waiting: VecDeque<Submission>,
    ended: mpsc::Sender<Box<Bio>>,
    over: bool,
}

impl Disk {
    fn look(&mut self) -> bool {
        self.waiting.extend(self.submissions.try_iter());
        !self.waiting.is_empty()
    }
}

impl Poller<Ring> for Disk {
    fn run_once(&mut self, ring: &mut Ring, now_ns: u64) -> PollerState {
        let ended = &self.ended;
        let mut moved = self.queue.reap(ring, now_ns, &mut |bio| ended.send(bio).unwrap());
        self.look();
        while self.queue.room() > 0 {
            match self.waiting.pop_front() {
                Some(Submission::Io(bio)) => self.queue.submit(bio),
                // Memory in use must stay: its replacement waits for requests in flight.
                Some(submission @ Submission::Memory(_)) if !self.queue.is_idle() => {
                    self.waiting.push_front(submission);
                    break;
                }
                Some(Submission::Memory(table)) => self.queue.set_memory(ring, table),
                Some(Submission::End) => self.over = true,
                None => break,
            }
            moved += 1;
        }
        moved += self.queue.issue(ring, now_ns);
        match moved {
            0 if self.queue.is_idle() => PollerState::Idle,
            0 => PollerState::Waiting,
            _ => PollerState::Busy,
        }
    }

    fn arm(&mut self) -> bool {
        self.look()
    }
    fn disarm(&mut self) {}
    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn tick(&mut self, now_ns: u64) {
        self.queue.mark_slow(now_ns);
    }
    fn is_over(&self) -> bool {
        self.over && self.queue.is_idle()
    }
}

fn table() -> (Arc<RegionTable>, Arc<Region>) {
    let region = Region::anonymous(4 << 20).unwrap();
    (Arc::new(RegionTable::new(vec![Arc::clone(&region)])), region)
}

#[test]
fn a_file_is_served_by_a_lane_while_its_memory_is_replaced() {
    for folder in folders() {
        for single_owner in [true, false] {
            let path = image(&folder, 4 << 20);
            let device = open(FileConfig::new(&path));
            let (submission, submissions) = mpsc::channel();
            let (end, ended) = mpsc::channel();
            let ring = RingConfig { single_owner, ..RingConfig::default() };
            let lane = spawn(LaneConfig { ring, ..config("disk", 20_000) }, move |ring| {
                let info = Arc::new(device.info().clone());
                let mut queue = HwQueue::new(device.queue(32), info, HwQueueConfig { depth: 32, ..Default::default() });
                queue.set_memory(ring, Arc::default());
                vec![Disk { queue, submissions, waiting: VecDeque::new(), ended: end, over: false }]
            })
            .unwrap();
            let waker = lane.waker();
            let send = |submissions: Vec<Submission>| {
                submissions.into_iter().for_each(|one| submission.send(one).unwrap());
                waker.wake();
            };
            let await_all = |n| {
                for _ in 0..n {
                    let bio = ended.recv_timeout(PATIENCE).expect("an answer");
                    assert_eq!(bio.status, Status::Ok);
                }
            };
            for round in 0..20 {
                let (memory, region) = table();
                let data = pattern(64 * 4096, round);
                region.span(0, data.len()).unwrap().copy_from_slice(&data);
                let writes = (0..64).map(|i| Submission::Io(bio(Op::Write, i * 8, &[(i * 4096, 4096)])));
                send(std::iter::once(Submission::Memory(memory)).chain(writes).collect());
                // The next memory is asked for while these are in flight.
                let (memory, region) = table();
                let reads = (0..64).map(|i| Submission::Io(bio(Op::Read, i * 8, &[(i * 4096, 4096)])));
                send(std::iter::once(Submission::Memory(memory)).chain(reads).collect());
                await_all(128);
                let mut back = vec![0; data.len()];
                region.span(0, back.len()).unwrap().copy_to_slice(&mut back);
                assert!(back == data, "round {round}");
            }
            send(vec![Submission::Memory(Arc::default()), Submission::End]);
            assert_eq!(lane.ring().strays(), 0);
            lane.join().unwrap();
            // The lane is gone, and with it the lock.
            open(FileConfig::new(&path));
        }
    }
}
