//! Properties of a queue core that involve threads, over the chaos device, in every order within the bound: 1 (tags), 3
//! (no lost wake-up), 6 (order), 7 (quiesce), 9 (announced), 11 (threads that leave). Larger ones, in random orders:
//! `shuttle_properties.rs`.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blkyard-mq --test loom_properties`
//!
//! One or two bios of each of two threads. The device's actions are drawn from a seed, so equal orders have equal
//! actions; a model runs with several seeds, and fails unless all faults that it asks for have occurred.
#![cfg(loom)]

#[path = "common/model_parker.rs"]
mod model_parker;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use blkyard_mem::{Baton, Holder};
use blkyard_mq::{
    Batch, Bio, BioFlags, BlockDevice, Context, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, Op, QueueLimits,
    RegionTable, Status, SwQueue, TimedOut,
};
use blkyard_sim::{ChaosConfig, ChaosDevice, ChaosEvent, ChaosQueue, ChaosStep};
use loom::thread;

use model_parker::ModelParker;

/// Requests taken by drivers and not announced by the lane.
#[derive(Default)]
struct Doorbell(usize);

impl Context for Doorbell {
    fn commit(&mut self) {
        self.0 = 0;
    }

    fn collect(&mut self) {
        assert_eq!(self.0, 0, "taken and not announced");
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        assert!(self.0 == 0 || std::thread::panicking(), "taken and never announced");
    }
}

/// Kinds of trouble, in all orders so far.
#[derive(Debug, Default)]
struct Trouble {
    orders: AtomicUsize,
    refused: AtomicUsize,
    requeued: AtomicUsize,
    late: AtomicUsize,
    repeated: AtomicUsize,
}

/// A chaos driver with an event log, whose requests the lane announces.
struct Heard {
    driver: ChaosQueue,
    trouble: Arc<Trouble>,
    batches: Arc<AtomicUsize>,
}

impl Driver<Doorbell> for Heard {
    fn queue_rqs(&mut self, eventfd: &mut Doorbell, memory: &RegionTable, batch: &mut Batch<'_>) {
        let offered = batch.len();
        self.driver.queue_rqs(eventfd, memory, batch);
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.trouble.refused.fetch_add(batch.len(), Ordering::Relaxed);
        eventfd.0 += offered - batch.len();
    }

    fn poll(&mut self, eventfd: &mut Doorbell, memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.driver.poll(eventfd, memory, done, now_ns);
    }

    fn timed_out(
        &mut self,
        eventfd: &mut Doorbell,
        memory: &RegionTable,
        place: usize,
        done: &mut Done<'_>,
        now_ns: u64,
    ) -> TimedOut {
        self.trouble.late.fetch_add(1, Ordering::Relaxed);
        self.driver.timed_out(eventfd, memory, place, done, now_ns)
    }

    fn deadline_ns(&self) -> Option<u64> {
        Driver::<Doorbell>::deadline_ns(&self.driver)
    }
}

/// Parameters of a model.
#[derive(Clone, Copy)]
struct Plan {
    name: &'static str,
    preemptions: usize,
    seeds: u64,
    /// Bios of each thread.
    threads: &'static [u64],
    chaos: ChaosConfig,
}

/// Every trouble about every second or third time: a model has so few requests.
const WILD: ChaosConfig = ChaosConfig {
    seed: 0,
    ring: 1,
    delay_ns_max: 500,
    instant_every: 4,
    refuse_every: 3,
    put_back_every: 3,
    requeue_every: 3,
    fail_every: 0,
    lose_every: 3,
    repeat_every: 2,
    forge_every: 2,
};

fn info() -> DeviceInfo {
    let limits = QueueLimits { discard_sectors_max: 16, ..QueueLimits::default() };
    DeviceInfo { name: "chaos".into(), capacity_sectors: 16, limits, ..DeviceInfo::default() }
}

fn open(plan: &Plan, seed: u64, trouble: &Arc<Trouble>) -> (ChaosDevice, Heard) {
    let device = ChaosDevice::new(vec![Arc::new(info())], ChaosConfig { seed, ..plan.chaos }).unwrap();
    let driver = Heard { driver: device.queue(1), trouble: Arc::clone(trouble), batches: Arc::default() };
    (device, driver)
}

/// A separate request, whose sector encodes its thread and number.
fn discard(me: u64, number: u64) -> Box<Bio> {
    let mut bio = Bio::with_capacity(0);
    (bio.op, bio.flags, bio.sector, bio.sectors) = (Op::Discard, BioFlags::NO_MERGE, me * 4 + number, 1);
    bio.cookie = bio.sector;
    bio
}

/// One thread: submits its bios, rings for the first of them, sleeps for all, and leaves.
fn live(mut queue: SwQueue<Heard, Doorbell>, me: u64, bios: u64, loses: bool, clock: &dyn Fn() -> u64) {
    let mut ended = BTreeSet::new();
    for number in 0..bios {
        queue.submit(discard(me, number));
        if number == 0 {
            queue.ring(&clock);
        }
    }
    queue.leave(&clock, &mut |bio| {
        assert!(bio.cookie / 4 == me && ended.insert(bio.cookie), "bio {} ended at {me}", bio.cookie);
        assert!(bio.status.is_ok() || (loses && bio.status == Status::Timeout), "{}", bio.status);
    });
    assert_eq!(ended.len() as u64, bios, "something of a thread that went is still in its ring");
}

/// Checks a device's events: each request begins once between idle and idle, and none is left. Bios of a thread keep
/// their order, unless requests are requeued.
fn check(events: &[ChaosEvent], plan: &Plan, trouble: &Trouble) {
    let mut held = BTreeSet::new();
    let mut last = [None; 4];
    for event in events {
        if event.step == ChaosStep::Taken {
            assert!(held.insert(event.tag), "{event:?} was begun twice");
            let before = last[event.sector as usize / 4].replace(event.sector);
            assert!(plan.chaos.requeue_every > 0 || before < Some(event.sector), "{event:?} was passed by {before:?}");
        } else {
            assert!(held.remove(&event.tag), "{event:?} had not begun");
        }
        trouble.requeued.fetch_add(usize::from(event.step == ChaosStep::Requeued), Ordering::Relaxed);
    }
    assert!(held.is_empty());
}

fn explore(plan: Plan, order: impl Fn(&Plan, u64, &Arc<Trouble>) + Send + Sync + 'static) {
    let order = Arc::new(order);
    let trouble = Arc::new(Trouble::default());
    for seed in 0..plan.seeds {
        let (order, trouble) = (Arc::clone(&order), Arc::clone(&trouble));
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(plan.preemptions);
        builder.max_branches = 10_000;
        builder.check(move || {
            trouble.orders.fetch_add(1, Ordering::Relaxed);
            order(&plan, seed, &trouble);
        });
    }
    println!("{}: at most {} preemptions, {} seeds, {trouble:?}", plan.name, plan.preemptions, plan.seeds);
    let came = |every: u32, count: &AtomicUsize| assert!(every == 0 || count.load(Ordering::Relaxed) > 0);
    came(plan.chaos.refuse_every, &trouble.refused);
    came(plan.chaos.requeue_every, &trouble.requeued);
    came(plan.chaos.lose_every, &trouble.late);
    came(plan.chaos.repeat_every, &trouble.repeated);
}

/// Threads that share a queue over the device.
fn share(plan: &Plan, seed: u64, trouble: &Arc<Trouble>) {
    let time = Arc::new(AtomicU64::new(0));
    let (device, driver) = open(plan, seed, trouble);
    let config = HwQueueConfig { depth: 1, bios_max: 2, timeout_ns: 2000, ..HwQueueConfig::default() };
    let hw = HwQueue::new(driver, Arc::clone(&device.infos()[0]), config);
    let parkers = plan.threads.iter().map(|_| ModelParker::beside(&time)).collect();
    let mut ends = SwQueue::share(hw, Doorbell::default(), 2, parkers).into_iter().zip(plan.threads).zip(0..);
    let ((first, bios), _) = ends.next().unwrap();
    let loses = plan.chaos.lose_every > 0;
    let others: Vec<_> = ends
        .map(|((end, bios), me)| {
            let time = Arc::clone(&time);
            thread::spawn(move || live(end, me, *bios, loses, &|| time.fetch_add(10, Ordering::Relaxed)))
        })
        .collect();
    live(first, 0, *bios, loses, &|| time.fetch_add(10, Ordering::Relaxed));
    others.into_iter().for_each(|other| other.join().unwrap());
    let mut events = Vec::new();
    device.take_events(&mut events);
    check(&events, plan, trouble);
    let counts = device.counts();
    assert_eq!(counts.sent, counts.refused);
    trouble.repeated.fetch_add(counts.sent as usize, Ordering::Relaxed);
}

// 1, 3, 9, 11
#[test]
fn two_threads_come_to_nothing_however_wild_the_device_and_leave_nothing() {
    explore(Plan { name: "wild", preemptions: 2, seeds: 6, threads: &[1, 1], chaos: WILD }, share);
}

// 3, 6, 11
#[test]
fn bios_reach_the_device_in_the_order_of_their_thread() {
    let chaos = ChaosConfig { put_back_every: 0, requeue_every: 0, lose_every: 0, ..WILD };
    explore(Plan { name: "order", preemptions: 2, seeds: 4, threads: &[2, 1], chaos }, share);
}

type Core = (HwQueue<Heard>, Doorbell, u64);

fn run_once((hw, eventfd, now_ns): &mut Core) {
    *now_ns += 1_000_000;
    hw.issue(eventfd, *now_ns);
    eventfd.commit();
    hw.reap(eventfd, *now_ns, &mut |_| ());
}

/// Does something to the queue, having waited for it.
fn with(baton: &Baton<Core>, act: impl FnOnce(&mut Core)) {
    let mut holder = loop {
        match baton.take_if_idle() {
            Some(holder) => break holder,
            None => thread::yield_now(),
        }
    };
    act(&mut holder);
    put_down(holder);
}

fn put_down(mut holder: Holder<'_, Core>) {
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
    let chaos = ChaosConfig { lose_every: 0, ..WILD };
    let plan = Plan { name: "quiesce", preemptions: 3, seeds: 4, threads: &[], chaos };
    explore(plan, |plan, seed, trouble| {
        let (device, driver) = open(plan, seed, trouble);
        let batches = Arc::clone(&driver.batches);
        let config = HwQueueConfig { depth: 1, bios_max: 4, ..HwQueueConfig::default() };
        let hw = HwQueue::new(driver, Arc::clone(&device.infos()[0]), config);
        let baton = loom::sync::Arc::new(Baton::new((hw, Doorbell::default(), 0)));
        let worker = {
            let baton = loom::sync::Arc::clone(&baton);
            thread::spawn(move || {
                for number in 0..2 {
                    with(&baton, |core| {
                        core.0.submit(discard(0, number));
                        run_once(core);
                    });
                }
            })
        };
        with(&baton, |core| core.0.quiesce());
        // From here on, whatever the other thread does.
        let before = batches.load(Ordering::Relaxed);
        thread::yield_now();
        assert_eq!(batches.load(Ordering::Relaxed), before, "the driver was offered something");
        with(&baton, |core| {
            assert_eq!(batches.load(Ordering::Relaxed), before, "the driver was offered something");
            core.0.unquiesce();
        });
        worker.join().unwrap();
        with(&baton, |core| {
            while !core.0.is_idle() {
                run_once(core);
            }
        });
        let mut events = Vec::new();
        device.take_events(&mut events);
        check(&events, plan, trouble);
        trouble.repeated.fetch_add(device.counts().sent as usize, Ordering::Relaxed);
    });
}
