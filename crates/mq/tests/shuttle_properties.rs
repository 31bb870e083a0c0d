//! Properties of a queue core that involve threads, over the chaos device, in random schedules: 1 (tags), 3 (no lost
//! wake-up), 6 (order), 7 (quiesce), 9 (announced), 11 (threads that leave). The others: `properties/`.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test --release -p blkyard-mq --test shuttle_properties`
//!
//! A schedule in which all sleep is reported as a deadlock, with a seed to repeat it. Time advances when it is read or
//! slept for; the tick, a second, never comes, since it would hide a lost wake-up.
#![cfg(shuttle)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use blkyard_mem::Baton;
use blkyard_mq::{
    Batch, Bio, BlockDevice, Budget, Context, DeviceInfo, Done, Driver, FairConfig, FairDevice, HwQueue, HwQueueConfig,
    Merging, Op, Parker, Region, RegionTable, SchedulerConfig, Segment, Status, SwQueue, TimedOut, Wake,
};
use blkyard_sim::{ChaosConfig, ChaosDevice, ChaosEvent, ChaosQueue, ChaosStep};
use shuttle::rand::Rng;
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

/// A watch longer than this is one until the next tick.
const FAR_NS: u64 = 100_000_000;
/// Bios that a thread has in flight at a time.
const PLACES: usize = 3;

#[derive(Default)]
struct Clock(AtomicU64);

impl Clock {
    fn now_ns(&self) -> u64 {
        self.0.fetch_add(10, Ordering::Relaxed)
    }
}

/// Where the threads of one hardware queue sleep.
struct Dormitory {
    state: Mutex<State>,
    eventfd: Condvar,
    clock: Arc<Clock>,
}

#[derive(Default)]
struct State {
    called: Vec<bool>,
    /// The budget has slots for the next watching thread.
    rung: bool,
}

struct ModelParker {
    dormitory: Arc<Dormitory>,
    submitter: usize,
}

impl Wake for ModelParker {
    fn wake(&self) {
        self.dormitory.state.lock().unwrap().called[self.submitter] = true;
        self.dormitory.eventfd.notify_all();
    }
}

impl Parker for ModelParker {
    fn sleep(&self) {
        let mut state = self.dormitory.state.lock().unwrap();
        while !state.called[self.submitter] {
            state = self.dormitory.eventfd.wait(state).unwrap();
        }
        state.called[self.submitter] = false;
    }

    fn watch(&self, deadline_ns: u64) {
        let clock = &self.dormitory.clock;
        let mut state = self.dormitory.state.lock().unwrap();
        if deadline_ns.saturating_sub(clock.now_ns()) < FAR_NS {
            if !state.called[self.submitter] && !state.rung {
                clock.0.fetch_max(deadline_ns, Ordering::Relaxed);
            }
        } else {
            while !state.called[self.submitter] && !state.rung {
                state = self.dormitory.eventfd.wait(state).unwrap();
            }
        }
        (state.called[self.submitter], state.rung) = (false, false);
    }
}

/// Wakes the watching thread, for slots of the budget.
struct Ringer(Arc<Dormitory>);

impl Wake for Ringer {
    fn wake(&self) {
        self.0.state.lock().unwrap().rung = true;
        self.0.eventfd.notify_all();
    }
}

/// Requests taken by drivers and not announced by the lane.
#[derive(Default)]
struct Doorbell {
    unannounced: usize,
}

impl Context for Doorbell {
    fn commit(&mut self) {
        self.unannounced = 0;
    }

    fn collect(&mut self) {
        assert_eq!(self.unannounced, 0, "taken and not announced");
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        assert!(self.unannounced == 0 || std::thread::panicking(), "taken and never announced");
    }
}

/// A chaos driver in which no two threads may meet.
struct Alone {
    driver: ChaosQueue,
    busy: Arc<AtomicBool>,
    batches: Arc<AtomicUsize>,
}

impl Alone {
    fn new(driver: ChaosQueue) -> Alone {
        Alone { driver, busy: Arc::default(), batches: Arc::default() }
    }

    fn enter<R>(&mut self, call: impl FnOnce(&mut ChaosQueue) -> R) -> R {
        assert!(!self.busy.swap(true, Ordering::Relaxed), "two threads in one driver");
        thread::yield_now();
        let result = call(&mut self.driver);
        thread::yield_now();
        self.busy.store(false, Ordering::Relaxed);
        result
    }
}

impl Driver<Doorbell> for Alone {
    fn queue_rqs(&mut self, eventfd: &mut Doorbell, memory: &RegionTable, batch: &mut Batch<'_>) {
        let offered = batch.len();
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.enter(|driver| driver.queue_rqs(eventfd, memory, batch));
        eventfd.unannounced += offered - batch.len();
    }

    fn poll(&mut self, eventfd: &mut Doorbell, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.enter(|driver| driver.poll(eventfd, memory, done, now_ns));
    }

    fn timed_out(
        &mut self,
        eventfd: &mut Doorbell,
        memory: &RegionTable,
        place: usize,
        done: &mut Done<'_>,
        now_ns: u64,
    ) -> TimedOut {
        self.enter(|driver| driver.timed_out(eventfd, memory, place, done, now_ns))
    }

    fn deadline_ns(&self) -> Option<u64> {
        Driver::<Doorbell>::deadline_ns(&self.driver)
    }
}

/// Parameters of a run.
#[derive(Clone, Copy)]
struct Plan {
    /// Bios of each thread of each queue: threads leave when they are through, some long before others.
    queues: &'static [&'static [u64]],
    chaos: ChaosConfig,
    /// Places that all queues share.
    budget: Option<usize>,
    /// The queues believe to be of one device, and share a very small depth.
    shares: bool,
    polls: bool,
}

const WILD: ChaosConfig = ChaosConfig {
    seed: 0,
    ring: 2,
    delay_ns_max: 500,
    instant_every: 4,
    refuse_every: 4,
    put_back_every: 5,
    requeue_every: 5,
    fail_every: 0,
    lose_every: 6,
    repeat_every: 4,
    forge_every: 3,
};

/// One thread: writes its blocks, verifies them, and leaves, sometimes with bios in the plug.
fn submitter(mut queue: SwQueue<Alone, Doorbell>, me: u64, bios: u64, plan: Plan, region: &Region, clock: &Clock) {
    let now = || clock.now_ns();
    let rng = || shuttle::rand::thread_rng();
    let place = |number: u64| (me * 16 + number) * 512;
    let byte = |number: u64| (me * 16 + number + 1) as u8;
    // Where requests are lost some fail, and the content of their blocks is unknown.
    let mut written = BTreeSet::new();
    for op in [Op::Write, Op::Read] {
        let mut seen = BTreeSet::new();
        let mut sink = |bio: Box<Bio>| {
            assert_eq!(bio.cookie >> 32, me, "a bio of another thread");
            let number = bio.cookie & 0xffff_ffff;
            assert!(seen.insert(number), "bio {number} of {me} came back twice");
            let mut data = [0; 512];
            region.span(place(number), 512).unwrap().copy_to_slice(&mut data);
            if bio.status.is_ok() && op == Op::Write {
                written.insert(number);
            } else if bio.status.is_ok() && written.contains(&number) {
                assert!(data == [byte(number); 512], "bio {number} of {me} read something else");
            }
            assert!(bio.status.is_ok() || (plan.chaos.lose_every > 0 && bio.status == Status::Timeout));
        };
        for number in 0..bios {
            region.span(place(number), 512).unwrap().fill(if op == Op::Write { byte(number) } else { 0 });
            let mut bio = Bio::with_capacity(1);
            (bio.op, bio.cookie, bio.sectors, bio.sector) = (op, me << 32 | number, 1, me * 16 + number);
            bio.segments.push(Segment { region: 0, offset: place(number), len: 512 });
            queue.submit(bio);
            if rng().gen_bool(0.6) {
                queue.ring(&now);
            }
            while queue.room() == 0 || rng().gen_bool(0.2) {
                if plan.polls && rng().gen_bool(0.5) {
                    queue.ring(&now);
                    queue.poll(&now, &mut sink);
                    thread::yield_now();
                } else if queue.wait(&now, &mut sink) == 0 {
                    break;
                }
            }
        }
        while queue.in_flight() > 0 {
            queue.wait(&now, &mut sink);
        }
        assert_eq!(seen.len() as u64, bios);
    }
    // One more, still in the plug.
    let mut last = Bio::with_capacity(0);
    (last.op, last.cookie) = (Op::Flush, me);
    queue.submit(last);
    let mut ended = 0;
    queue.leave(&now, &mut |bio| {
        assert_eq!(bio.cookie, me);
        ended += 1;
    });
    assert_eq!(ended, 1, "something of a thread that went is still in its ring");
}

/// Each tag has one request at a time, and none is left at the device.
fn check_tags(events: &[ChaosEvent]) {
    let mut held = BTreeSet::new();
    for event in events {
        match event.step {
            ChaosStep::Taken => assert!(held.insert(event.tag), "{event:?} was begun twice"),
            _ => assert!(held.remove(&event.tag), "{event:?} had not begun"),
        }
    }
    assert!(held.is_empty());
}

/// Each thread's bios reach the device in the order it submitted them.
fn check_order(events: &[ChaosEvent], threads: u64) {
    let taken: Vec<_> = events.iter().filter(|event| event.step == ChaosStep::Taken && event.op != Op::Flush).collect();
    for thread in 0..threads {
        for op in [Op::Write, Op::Read] {
            let own = taken.iter().filter(|event| event.sector / 16 == thread && event.op == op);
            assert!(own.map(|event| event.sector).is_sorted(), "bios of thread {thread} passed each other");
        }
    }
}

fn info() -> DeviceInfo {
    DeviceInfo { name: "chaos".into(), capacity_sectors: 256, volatile_cache: true, ..DeviceInfo::default() }
}

fn run(plan: Plan) {
    let clock = Arc::new(Clock::default());
    let budget = plan.budget.map(|places| Budget::new(places, plan.queues.len()));
    let (mut threads, mut devices, info) = (Vec::new(), Vec::new(), info());
    let fair = FairConfig { device: FairDevice::Flat, in_flight_kib: 1, ..FairConfig::default() };
    let scheduler = if plan.shares { SchedulerConfig::Fair(fair) } else { SchedulerConfig::None };
    for lives in plan.queues {
        let seed = shuttle::rand::thread_rng().r#gen();
        let device = ChaosDevice::new(vec![Arc::new(info.clone())], ChaosConfig { seed, ..plan.chaos }).unwrap();
        let state = State { called: vec![false; lives.len()], rung: false };
        let dormitory =
            Arc::new(Dormitory { state: Mutex::new(state), eventfd: Condvar::new(), clock: Arc::clone(&clock) });
        // So small that bios wait in the queue for tags, and in the rings for the queue.
        let config = HwQueueConfig {
            depth: 2,
            bios_max: 3,
            merging: Merging::Off,
            timeout_ns: 2000,
            scheduler,
            ..HwQueueConfig::default()
        };
        let mut hw = HwQueue::new(Alone::new(device.queue(2)), Arc::clone(&device.infos()[0]), config);
        let region = Region::anonymous(256 * 512).unwrap();
        hw.set_memory(&mut Doorbell::default(), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
        if let Some(budget) = &budget {
            hw.set_budget(Some(budget.join(Arc::new(Ringer(Arc::clone(&dormitory)))).unwrap()));
        }
        let parker =
            |submitter| Arc::new(ModelParker { dormitory: Arc::clone(&dormitory), submitter }) as Arc<dyn Parker>;
        let ends = SwQueue::share(hw, Doorbell::default(), PLACES, (0..lives.len()).map(parker).collect());
        for (me, (end, bios)) in ends.into_iter().zip(*lives).enumerate() {
            let (clock, region, bios) = (Arc::clone(&clock), Arc::clone(&region), *bios);
            threads.push(thread::spawn(move || submitter(end, me as u64, bios, plan, &region, &clock)));
        }
        devices.push((device, lives.len() as u64));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    for (device, threads) in devices {
        let mut events = Vec::new();
        device.take_events(&mut events);
        check_tags(&events);
        if plan.chaos.requeue_every == 0 {
            check_order(&events, threads);
        }
        let counts = device.counts();
        assert_eq!(counts.sent, counts.refused);
    }
    if let (Some(budget), Some(places)) = (budget, plan.budget) {
        assert_eq!(budget.free(), places, "places were lost");
    }
}

// 1, 3, 9, 11
#[test]
fn threads_come_to_nothing_however_wild_the_device_and_leave_nothing() {
    let plan = Plan { queues: &[&[1, 5, 2], &[4]], chaos: WILD, budget: None, shares: false, polls: true };
    shuttle::check_random(move || run(plan), 2000);
}

// 3
#[test]
fn queues_that_share_few_places_all_get_through_and_no_place_is_lost() {
    let plan = Plan { queues: &[&[3, 2], &[4], &[1]], chaos: WILD, budget: Some(1), shares: false, polls: false };
    shuttle::check_random(move || run(plan), 2000);
    shuttle::check_pct(move || run(plan), 1000, 3);
}

// 3
#[test]
fn queues_that_look_at_each_other_all_get_through() {
    let plan = Plan { queues: &[&[3, 2], &[4], &[1]], chaos: WILD, budget: None, shares: true, polls: false };
    shuttle::check_random(move || run(plan), 1000);
    shuttle::check_pct(move || run(plan), 500, 3);
}

// 6
#[test]
fn the_bios_of_a_thread_reach_the_device_in_order() {
    let chaos = ChaosConfig { put_back_every: 0, requeue_every: 0, lose_every: 0, ..WILD };
    let plan = Plan { queues: &[&[5, 5, 3]], chaos, budget: None, shares: false, polls: true };
    shuttle::check_random(move || run(plan), 2000);
}

// 11
#[test]
fn sleepers_get_through_though_others_leave_at_any_time() {
    let plan = Plan { queues: &[&[4, 1, 0, 2]], chaos: WILD, budget: None, shares: false, polls: false };
    shuttle::check_pct(move || run(plan), 1500, 3);
}

/// Takes the queue, waiting for it.
fn take<'a, T>(baton: &'a Baton<T>) -> blkyard_mem::Holder<'a, T> {
    loop {
        if let Some(holder) = baton.take_if_idle() {
            return holder;
        }
        thread::yield_now();
    }
}

fn put_down<T>(mut holder: blkyard_mem::Holder<'_, T>) {
    loop {
        holder.take_pending();
        match holder.give_back() {
            Ok(()) => return,
            Err(still) => holder = still,
        }
    }
}

// 7
#[test]
fn once_quiesced_the_driver_is_not_called_by_anyone_until_the_queue_may_run_again() {
    shuttle::check_random(
        || {
            let seed = shuttle::rand::thread_rng().r#gen();
            let device = ChaosDevice::new(vec![Arc::new(info())], ChaosConfig { seed, lose_every: 0, ..WILD }).unwrap();
            let driver = Alone::new(device.queue(2));
            let batches = Arc::clone(&driver.batches);
            let config = HwQueueConfig { depth: 2, bios_max: 8, ..HwQueueConfig::default() };
            let hw = HwQueue::new(driver, Arc::clone(&device.infos()[0]), config);
            let baton = Arc::new(Baton::new((hw, Doorbell::default(), 0_u64, 0_u64)));
            let run_once = |core: &mut (HwQueue<Alone>, Doorbell, u64, u64)| {
                let (hw, eventfd, now_ns, ended) = core;
                *now_ns += 1_000_000;
                hw.issue(eventfd, *now_ns);
                eventfd.commit();
                *ended += hw.reap(eventfd, *now_ns, &mut |_| ()) as u64;
            };
            let worker = |_| {
                let baton = Arc::clone(&baton);
                thread::spawn(move || {
                    for _ in 0..4 {
                        let mut holder = take(&baton);
                        let mut bio = Bio::with_capacity(0);
                        bio.op = Op::Flush;
                        if holder.0.room() > 0 {
                            holder.0.submit(bio);
                        }
                        run_once(&mut holder);
                        put_down(holder);
                    }
                })
            };
            let workers: Vec<_> = (0..2).map(worker).collect();
            let mut holder = take(&baton);
            holder.0.quiesce();
            put_down(holder);
            // From here on, whatever the other threads do.
            let before = batches.load(Ordering::Relaxed);
            for _ in 0..shuttle::rand::thread_rng().gen_range(0..12) {
                thread::yield_now();
                assert_eq!(batches.load(Ordering::Relaxed), before, "the driver was offered something");
            }
            let mut holder = take(&baton);
            holder.0.unquiesce();
            put_down(holder);
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            let mut holder = take(&baton);
            while !holder.0.is_idle() {
                run_once(&mut holder);
            }
            put_down(holder);
        },
        2000,
    );
}
