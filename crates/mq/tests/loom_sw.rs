//! Software queues under loom: small, and every order within the bound, weak memory included.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blkyard-mq --test loom_sw`
//!
//! The real code over the null device. The queue's content is accessed through the baton's cell, so an access without
//! the right ordering fails the model, as does a schedule in which all sleep. Each model names its bound on preemptions
//! and prints its number of orders.
#![cfg(loom)]

#[path = "common/model_parker.rs"]
mod model_parker;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use blkyard_mq::{
    Bio, BioFlags, BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, NullConfig, NullDevice, NullQueue, Op, QueueLimits,
    SwQueue,
};
use loom::thread;

use model_parker::ModelParker;

fn info() -> DeviceInfo {
    DeviceInfo {
        name: "model".into(),
        capacity_sectors: 1024,
        limits: QueueLimits { discard_sectors_max: 1024, ..QueueLimits::default() },
        read_only: false,
        volatile_cache: false,
        fua: false,
        ..DeviceInfo::default()
    }
}

/// A bio that reaches the device as a separate request.
fn discard(cookie: u64) -> Box<Bio> {
    let mut bio = Bio::with_capacity(0);
    (bio.op, bio.flags, bio.sector, bio.sectors) = (Op::Discard, BioFlags::NO_MERGE, cookie, 1);
    bio.cookie = cookie;
    bio
}

/// Work of a model's thread with its end.
type Life = fn(SwQueue<NullQueue, ()>, u64, &dyn Fn() -> u64);

/// Submits one bio and sleeps for it.
fn sleeper(mut queue: SwQueue<NullQueue, ()>, me: u64, clock: &dyn Fn() -> u64) {
    let mut ended = 0;
    queue.submit(discard(me));
    queue.ring(&clock);
    queue.leave(&clock, &mut |bio| {
        assert_eq!(bio.cookie, me);
        ended += 1;
    });
    assert_eq!(ended, 1);
}

/// The same, without ringing first: all is left to the sleep.
fn quiet_sleeper(mut queue: SwQueue<NullQueue, ()>, me: u64, clock: &dyn Fn() -> u64) {
    let mut ended = 0;
    queue.submit(discard(me));
    queue.leave(&clock, &mut |_| ended += 1);
    assert_eq!(ended, 1);
}

/// Polls once before it sleeps.
fn poller(mut queue: SwQueue<NullQueue, ()>, me: u64, clock: &dyn Fn() -> u64) {
    let mut ended = 0;
    queue.submit(discard(me));
    queue.ring(&clock);
    queue.poll(&clock, &mut |_| ended += 1);
    queue.leave(&clock, &mut |_| ended += 1);
    assert_eq!(ended, 1);
}

fn model(name: &str, preemptions: usize, latency_ns: u64, lives: &'static [Life]) {
    let orders = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        let time = Arc::new(AtomicU64::new(0));
        let device = NullDevice::new(info(), NullConfig { latency_ns, bytes_per_s: 0 });
        let config = HwQueueConfig { depth: 1, bios_max: 2, ..HwQueueConfig::default() };
        let hw = HwQueue::new(device.queue(1), Arc::new(info()), config);
        let parkers = lives.iter().map(|_| ModelParker::beside(&time)).collect();
        let mut ends = SwQueue::share(hw, (), 1, parkers).into_iter().zip(0..);
        let (first, _) = ends.next().unwrap();
        let others: Vec<_> = ends
            .map(|(end, submitter)| {
                let time = Arc::clone(&time);
                thread::spawn(move || {
                    lives[submitter as usize](end, submitter, &|| time.fetch_add(10, Ordering::Relaxed))
                })
            })
            .collect();
        lives[0](first, 0, &|| time.fetch_add(10, Ordering::Relaxed));
        others.into_iter().for_each(|other| other.join().unwrap());
    });
    println!("{name}: {} orders, at most {preemptions} preemptions", orders.load(Ordering::Relaxed));
}

#[test]
fn two_sleepers_on_a_device_that_takes_its_time() {
    model("two sleepers, latency", 3, 500, &[sleeper, sleeper]);
}

#[test]
fn two_sleepers_on_a_device_that_answers_on_the_spot() {
    model("two sleepers, on the spot", 3, 0, &[quiet_sleeper, quiet_sleeper]);
}

#[test]
fn a_poller_and_a_sleeper() {
    model("a poller and a sleeper", 3, 500, &[poller, quiet_sleeper]);
}

#[test]
fn three_sleepers() {
    model("three sleepers", 2, 500, &[sleeper, quiet_sleeper, quiet_sleeper]);
}
