//! An NVMe export over vfio-user, used by the NVMe host of this project: written data is read back over several queues,
//! through a reset, and after a reconnection.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use blkyard_export::NvmeDoorbells;
use blkyard_mem::Region;
use blkyard_mq::Op;
use blkyard_nvme::{ControllerState, ControllerTransport};
use blkyard_sys::{PollFlags, is_ready};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::common::nvme_host::{BIO_BYTES, Host, QUEUES};
use crate::common::{AnyDevice, NvmeWorld, PATIENCE, SERIAL};

#[test]
fn what_is_written_by_one_queue_is_read_by_another() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), QUEUES, 2);
    for (seed, has_shadow, has_eventfds) in [(1, false, false), (2, true, false), (3, false, true), (4, true, true)] {
        let mut host = Host::connect_with(&world.path, has_shadow, has_eventfds);
        let eventfds = host.controller.transport().doorbell_eventfds().len();
        assert_eq!(eventfds, if has_eventfds { QUEUES + 1 } else { 0 });
        assert_eq!(host.queues.len(), QUEUES, "one for each lane's queue");
        assert_eq!(host.controller.identify().serial[..SERIAL.len()], *SERIAL.as_bytes());
        let found = &host.controller.namespaces()[0].info;
        assert_eq!((found.capacity_sectors, found.volatile_cache), (16384, true));
        host.fill(seed);
        host.submit_all(Op::Write, 0);
        host.finish();
        host.verify(seed);
        host.submit(1, Op::Flush, 0);
        host.submit(2, Op::Discard, 0);
        host.submit(3, Op::WriteZeroes, 1);
        host.finish();
        host.submit(1, Op::Read, 1);
        host.finish();
        host.compare(1, &[0; BIO_BYTES as usize]);
        assert_eq!(world.server().status().session().unwrap().io_queues, QUEUES);
    }
    world.stop();
}

#[test]
fn doorbells_in_shared_memory_need_no_message() {
    let world = NvmeWorld::with(&AnyDevice::ram(0), QUEUES, 2, NvmeDoorbells::Shared);
    let mut host = Host::connect(&world.path, true);
    assert!(host.controller.transport().shared_doorbells().is_some());
    assert!(!host.controller.identify().has_shadow_doorbells(), "they would only be in the way");
    for seed in 30..33 {
        host.fill(seed);
        host.submit_all(Op::Write, 0);
        host.finish();
        host.verify(seed);
        // The lanes and the control thread sleep; no message wakes them.
        std::thread::sleep(Duration::from_millis(150));
        let now_ns = host.now_ns();
        assert!(host.controller.reset(now_ns));
        host.run("the controller is live again", |host| host.controller.state() == ControllerState::Live);
        std::thread::sleep(Duration::from_millis(20));
        host.verify(seed);
    }
    drop(host);
    world.stop();
}

#[test]
fn completions_interrupt_the_vector_of_their_queue() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), QUEUES, 1);
    let mut host = Host::connect(&world.path, true);
    let vectors = host.controller.transport().vectors();
    assert_eq!(vectors, QUEUES as u16 + 1);
    let fired = |host: &mut Host, vector| is_ready(host.controller.transport().eventfd(vector).unwrap(), PollFlags::IN);
    assert!(fired(&mut host, 0), "the admin queue's");
    for qid in 1..=QUEUES as u16 {
        assert!(!fired(&mut host, qid), "nothing was completed yet");
        host.submit(qid, Op::Read, 0);
        host.finish();
        // The completion is written before the interrupt is signalled.
        crate::common::until("the interrupt comes", || {
            is_ready(host.controller.transport().eventfd(qid).unwrap(), PollFlags::IN)
        });
    }
    drop(host);
    world.stop();
}

#[test]
fn a_reset_under_load_loses_nothing() {
    // Slow enough for commands to be in flight.
    let world = NvmeWorld::new(&AnyDevice::ram(2_000_000), QUEUES, 2);
    let mut host = Host::connect(&world.path, true);
    for seed in 10..14 {
        host.fill(seed);
        host.submit_all(Op::Write, 0);
        host.round();
        assert!(host.in_flight > 0);
        let now_ns = host.now_ns();
        assert!(host.controller.reset(now_ns));
        host.finish();
        host.run("the controller is live again", |host| host.controller.state() == ControllerState::Live);
        host.verify(seed);
    }
    drop(host);
    world.stop();
}

#[test]
fn a_host_that_leaves_under_load_comes_again() {
    let world = NvmeWorld::new(&AnyDevice::ram(2_000_000), QUEUES, 2);
    for seed in 20..23 {
        let mut host = Host::connect(&world.path, true);
        host.fill(seed);
        host.submit_all(Op::Write, 0);
        host.finish();
        host.verify(seed);
        // Its memory is unmapped while the device writes to it.
        host.submit_all(Op::Read, 0);
        host.round();
        host.die();
    }
    let mut host = Host::connect(&world.path, false);
    host.verify(22);
    drop(host);
    assert_eq!(world.server().status().sessions(), 4);
    world.stop();
}

#[test]
fn memory_that_is_truncated_under_a_queue_ends_that_session_alone() {
    let world = NvmeWorld::new(&AnyDevice::ram(0), QUEUES, 1);
    let mut host = Host::connect(&world.path, true);
    let file = memfd_create("host", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BIO_BYTES).unwrap();
    let region = Region::map_file(file.as_fd(), 0, BIO_BYTES).unwrap();
    let _mapping = host.controller.transport().domain().map(vec![Arc::clone(&region)]);
    let base = host.controller.transport().dma_addr(&region, 0).unwrap();
    ftruncate(&file, 0).unwrap();
    host.queues.get_mut(&1).unwrap().driver_mut().base = base;
    host.submit(1, Op::Write, 0);
    host.round();
    crate::common::until("the server closes the connection", || host.controller.transport().is_closed_by_server());
    host.die();
    let mut host = Host::connect(&world.path, true);
    host.fill(1);
    host.submit_all(Op::Write, 0);
    host.finish();
    host.verify(1);
    drop(host);
    world.stop();
}

#[test]
fn a_device_that_grows_is_a_namespace_that_grows() {
    let world = NvmeWorld::new(&AnyDevice::null(0), QUEUES, 1);
    let mut host = Host::connect(&world.path, true);
    let mut info = crate::common::disk_info();
    info.capacity_sectors *= 2;
    let changed = world.server().hand().change(0, Arc::new(info)).recv_timeout(PATIENCE).unwrap();
    assert_eq!(changed, Ok(blkyard_export::Changed::Told));
    host.run("the namespace grows", |host| host.controller.namespaces()[0].info.capacity_sectors == 2 * 16384);
    host.submit(1, Op::Read, 1500);
    host.finish();
    drop(host);
    world.stop();
}
