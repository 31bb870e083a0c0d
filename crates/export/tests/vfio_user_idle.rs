//! CPU time of an idle NVMe export whose doorbells are polled, and wake-ups of one whose device hangs. A separate
//! program, and one test at a time, so that no other test uses the CPUs meanwhile.
#![forbid(unsafe_code)]

mod common;

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use blkyard_export::NvmeDoorbells;
use blkyard_nvme::{Sqe, admin, feature};
use common::{AdminHost, AnyDevice, Gate, NvmeWorld};

/// Held by the test that runs.
static ALONE: Mutex<()> = Mutex::new(());

/// CPU time of the threads of this process, ns.
fn used() -> u64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let stats = threads.filter_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("schedstat")).ok());
    stats.map(|stat| stat.split(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

#[test]
fn an_idle_export_with_shared_doorbells_takes_little_cpu_time() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for doorbells in [NvmeDoorbells::Message, NvmeDoorbells::Shared] {
        let world = NvmeWorld::with(&AnyDevice::ram(0), 2, 1, doorbells);
        let mut host = AdminHost::enable(&world);
        let page = |number: u64| AdminHost::BASE + number * 0x1000;
        for qid in [1, 2] {
            assert_eq!(host.admin(Sqe::create_cq(qid, 8, page(2 * u64::from(qid)), None)), Some(0));
            assert_eq!(host.admin(Sqe::create_sq(qid, 8, page(2 * u64::from(qid) + 1), qid)), Some(0));
        }
        assert_eq!(host.admin(Sqe::new(admin::KEEP_ALIVE, 0)), Some(0));
        std::thread::sleep(Duration::from_millis(300));
        let is_idle = || {
            let (before, start) = (used(), Instant::now());
            std::thread::sleep(Duration::from_secs(1));
            let (spent, passed) = (used() - before, start.elapsed().as_nanos() as u64);
            println!("{doorbells:?}: used {spent} ns of {passed} ns");
            spent * 100 <= passed
        };
        // A busy machine may charge a thread for more than it used; a thread that does not sleep shows in every window.
        assert!((0..5).any(|_| is_idle()), "an idle export uses more than a hundredth of the time");
        world.stop();
    }
}

/// Sleeps of the control thread so far.
fn sleeps() -> u64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let text = |name| move |thread: &std::path::PathBuf| std::fs::read_to_string(thread.join(name)).ok();
    let exports = threads.map(|thread| thread.unwrap().path());
    let exports = exports.filter(|thread| text("comm")(thread).is_some_and(|name| name.trim() == "exports"));
    let counts = exports.filter_map(|thread| {
        let status = text("status")(&thread)?;
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok())
    });
    counts.sum()
}

fn assert_looks_are_few() {
    let before = sleeps();
    std::thread::sleep(Duration::from_secs(1));
    let count = sleeps() - before;
    // Each look is two sleeps: one until it is due, one until it has ended.
    assert!((1..=100).contains(&count), "{count} sleeps within a second");
}

#[test]
fn a_reset_that_waits_for_a_hung_device_is_seldom_looked_at() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::stuck(&world, &gate);
    host.write(0x14, &[0, 0, 0x46, 0]);
    // From here on the interval is the longest.
    std::thread::sleep(Duration::from_secs(1));
    assert_looks_are_few();
    gate.set_shut(false);
    common::until("the reset ends", || host.csts() == 0);
    world.stop();
}

#[test]
fn an_end_that_waits_for_a_hung_device_is_seldom_looked_at_with_a_keep_alive_timer() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let gate = Gate::shut();
    let world = NvmeWorld::new(&AnyDevice::gated(&gate), 2, 1);
    let mut host = AdminHost::stuck(&world, &gate);
    assert_eq!(host.admin(Sqe::feature(admin::SET_FEATURES, feature::KEEP_ALIVE, 1000)), Some(0));
    drop(host);
    // The timer has expired, and from here on the interval is the longest.
    std::thread::sleep(Duration::from_secs(2));
    assert_looks_are_few();
    gate.set_shut(false);
    common::until("the session ends", || !world.server().status().is_connected());
    world.stop();
}
