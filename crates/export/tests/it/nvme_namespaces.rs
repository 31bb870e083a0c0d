//! A controller with several namespaces, each on a device of its own.

use std::sync::Arc;

use blkyard_export::{Changed, NvmeDoorbells};
use blkyard_mq::{BioFlags, Op};
use blkyard_nvme::Sqe;

use crate::common::nvme_host::{Host, QUEUES};
use crate::common::{AdminHost, AnyDevice, Gate, NvmeWorld, PATIENCE, Seen, disk_info, until};

fn world(devices: &[AnyDevice]) -> NvmeWorld {
    NvmeWorld::of_devices(devices, QUEUES, 2, NvmeDoorbells::Message)
}

#[test]
fn namespaces_have_their_own_data_and_properties() {
    let small = AnyDevice::ram_with(blkyard_mq::DeviceInfo { capacity_sectors: 8192, ..disk_info() }, 0);
    let read_only = AnyDevice::ram_with(blkyard_mq::DeviceInfo { read_only: true, ..disk_info() }, 0);
    let world = world(&[AnyDevice::ram(0), small, read_only]);
    let mut host = Host::connect(&world.path, true);
    let found: Vec<_> = host.controller.namespaces().iter().map(|found| &found.info).collect();
    assert_eq!(found.iter().map(|info| info.capacity_sectors).collect::<Vec<_>>(), [16384, 8192, 16384]);
    assert_eq!(found.iter().map(|info| info.read_only).collect::<Vec<_>>(), [false, false, true]);
    for round in 0..4 {
        for namespace in 0..2 {
            host.namespace = namespace;
            host.fill(10 * round + namespace as u8);
            host.submit_all(Op::Write, 0);
        }
        host.finish();
        for namespace in 0..2 {
            host.namespace = namespace;
            host.verify(10 * round + namespace as u8);
            host.submit(1, Op::Flush, 0);
        }
        host.finish();
    }
    drop(host);
    world.stop();
}

#[test]
fn namespace_that_hangs_does_not_stop_another() {
    let gate = Gate::shut();
    let world = world(&[AnyDevice::gated(&gate), AnyDevice::ram(0)]);
    let mut host = Host::connect(&world.path, true);
    // Fewer than the host's tags, which its namespaces share. They are not adjacent, so they are not merged.
    for number in 0..16 {
        host.submit(1, Op::Write, 2 * number);
    }
    host.run("the first device has them", |_| gate.held() == 16);
    host.namespace = 1;
    for seed in 0..8 {
        host.fill(seed);
        host.submit_all(Op::Write, 0);
        host.run("the second namespace goes on", |host| host.in_flight_of[1] == 0);
        host.fill(!seed);
        host.submit_all(Op::Read, 1);
        host.run("the second namespace goes on", |host| host.in_flight_of[1] == 0);
    }
    assert_eq!((host.in_flight_of[0], gate.held()), (16, 16));
    gate.set_shut(false);
    host.finish();
    drop(host);
    world.stop();
}

#[test]
fn growth_of_one_namespace_is_announced_as_its_own() {
    let world = world(&[AnyDevice::null(0), AnyDevice::null(0)]);
    let mut host = Host::connect(&world.path, true);
    let mut info = disk_info();
    info.capacity_sectors *= 2;
    let changed = world.server().hand().change(1, Arc::new(info)).recv_timeout(PATIENCE).unwrap();
    assert_eq!(changed, Ok(Changed::Told));
    host.run("the namespace grows", |host| host.controller.namespaces()[1].info.capacity_sectors == 2 * 16384);
    assert_eq!(host.controller.namespaces()[0].info.capacity_sectors, 16384);
    host.namespace = 1;
    host.submit(1, Op::Read, 1500);
    host.finish();
    drop(host);
    world.stop();
}

#[test]
fn changed_namespace_list_names_the_one_that_grew() {
    let world = world(&[AnyDevice::null(0), AnyDevice::null(0), AnyDevice::null(0)]);
    let mut host = AdminHost::enable(&world);
    let info = blkyard_mq::DeviceInfo { capacity_sectors: 32768, ..disk_info() };
    world.server().hand().change(1, Arc::new(info)).recv_timeout(PATIENCE).unwrap().unwrap();
    // Get Log Page: Changed Namespace List, 4096 bytes.
    let mut log = Sqe::new(0x02, u32::MAX);
    (log.0[3], log.0[5]) = (AdminHost::BASE + 0x4000, 0x04 | 1023 << 16);
    assert_eq!(host.admin(log), Some(0));
    assert_eq!(host.words(4, 2), [2, 0]);
    // Identify: active namespaces after 1, then the descriptors of 2 and 3.
    let identify = |nsid: u32, cns: u64| {
        let mut sqe = Sqe::new(0x06, nsid);
        (sqe.0[3], sqe.0[5]) = (AdminHost::BASE + 0x4000, cns);
        sqe
    };
    assert_eq!(host.admin(identify(1, 0x02)), Some(0));
    assert_eq!(host.words(4, 3), [2, 3, 0]);
    let ids = [2, 3].map(|nsid| {
        assert_eq!(host.admin(identify(nsid, 0x03)), Some(0));
        // EUI-64, NGUID and UUID, each behind its type and length.
        let words = host.words(4, 13);
        assert_eq!([words[0], words[3], words[8]], [0x0801, 0x1002, 0x1003]);
        assert_eq!(host.admin(identify(nsid, 0x00)), Some(0));
        let namespace = host.words(4, 32);
        assert_eq!((&namespace[26..30], &namespace[30..32]), (&words[4..8], &words[1..3]), "the same in Identify");
        words
    });
    for part in [1..3, 4..8, 9..13] {
        assert_ne!(ids[0][part.clone()], ids[1][part]);
    }
    drop(host);
    world.stop();
}

#[test]
fn shutdown_flushes_the_devices_of_all_namespaces() {
    let gates = [Gate::open(), Gate::open(), Gate::open()];
    let world = world(&gates.each_ref().map(AnyDevice::gated));
    let mut host = AdminHost::enable(&world);
    // CC: enabled, with a normal shutdown.
    host.write(0x14, &[1, 0x40, 0x46, 0]);
    for gate in &gates {
        until("the device is flushed", || gate.seen().contains(&Seen::Ended(Op::Flush, 0)));
        assert_eq!(gate.seen().iter().filter(|seen| **seen == Seen::Taken(Op::Flush, BioFlags::empty(), 0)).count(), 1);
    }
    until("the shutdown is complete", || host.shutdown_status() == 2);
    drop(host);
    world.stop();
}
