//! Namespaces of our own NVMe export over vfio-user as attached disks: written data is read back on several queues,
//! through resets, restarts of the server, and its silence.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_attach::{
    AttachError, NamespaceConfig, NamespaceQueue, RemoteNamespace, VfioUserConfig, VfioUserController,
};
use blkyard_export::{
    BoundSocket, HwQueueSet, NvmeDisk, NvmeQueuePoller, SocketConfig, VfioUserExport, VfioUserServer, queue_pair,
};
use blkyard_mem::Region;
use blkyard_mq::{
    BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, Op, QueueKind, RamDevice, RamQueue, RegisteredBuffer, Status,
};
use blkyard_os::{LaneConfig, Lanes, Ring, SystemClock};

use crate::common::{PATIENCE, SLOTS, User, disk, place, until};

const BLOCK: usize = 4096;

/// An export of a disk in memory.
struct Server {
    server: VfioUserServer,
    lanes: Lanes<NvmeQueuePoller<RamQueue>>,
}

impl Server {
    fn start(path: &Path, device: &RamDevice, queues: usize) -> Server {
        Server::of(path, device, device.info(), queues)
    }

    /// The disk with another description.
    fn of(path: &Path, device: &RamDevice, info: &DeviceInfo, queues: usize) -> Server {
        Server::of_namespaces(path, &[(device, info)], queues)
    }

    /// Several disks, each with its description, as namespaces 1, 2 and so on.
    fn of_namespaces(path: &Path, devices: &[(&RamDevice, &DeviceInfo)], queues: usize) -> Server {
        let mut lanes = Lanes::start(1, |_| LaneConfig { name: "lane".into(), ..LaneConfig::default() }).unwrap();
        let mut remotes = Vec::new();
        for _ in 0..queues {
            let (remote, port) = queue_pair();
            let config = HwQueueConfig::default();
            let made = |(device, info): &(&RamDevice, &DeviceInfo)| {
                HwQueue::new(device.queue(config.depth), Arc::new(DeviceInfo::clone(info)), config)
            };
            let hw = HwQueueSet::new::<Ring>(devices.iter().map(made).collect()).unwrap();
            lanes.admit(0, move || NvmeQueuePoller::new(hw, (), port)).unwrap();
            remotes.push(remote);
        }
        let socket = SocketConfig { path: path.into(), mode: None, group: None };
        let namespaces = (1..).zip(devices).map(|(nsid, (_, info))| (nsid, DeviceInfo::clone(info))).collect();
        let disk = NvmeDisk::of_namespaces(namespaces, queues as u16, "serial");
        let config = VfioUserExport { name: "nvme".into(), disk, queues: remotes, domains: Vec::new() };
        Server { server: VfioUserServer::start(BoundSocket::bind(&socket).unwrap(), config).unwrap(), lanes }
    }

    fn stop(self) {
        self.server.ask_to_stop();
        self.server.join();
        self.lanes.join().unwrap();
    }
}

fn config(queues: u16) -> NamespaceConfig {
    let mut config = NamespaceConfig::new("vfio-user:test", Arc::new(SystemClock));
    (config.options.reply_max, config.options.gone_max) = (PATIENCE, PATIENCE);
    config.host.queues.submitters = queues;
    config
}

fn attach_with(path: &Path, config: NamespaceConfig) -> Result<RemoteNamespace, AttachError> {
    let mut transport = VfioUserConfig::new(path, Arc::new(SystemClock)).unwrap();
    transport.reply_max = config.options.reply_max;
    RemoteNamespace::open::<VfioUserController>(transport, config)
}

fn attach(path: &Path, queues: u16) -> RemoteNamespace {
    attach_with(path, config(queues)).unwrap()
}

fn user(disk: &RemoteNamespace, kind: QueueKind) -> User<NamespaceQueue> {
    let region = Region::shared(SLOTS as usize * BLOCK).unwrap();
    User::of(disk.queue(kind, SLOTS as usize).unwrap(), SLOTS as usize, disk.info(), region)
}

#[test]
fn data_written_on_one_queue_is_read_back_on_another() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 2);
    let attached = attach(&path, 2);
    assert_eq!((attached.queues_max(), attached.info().capacity_sectors), (2, 16384));
    assert_eq!((attached.nsid(), attached.info().name.as_str()), (1, "vfio-user:test"));
    assert!(attached.info().volatile_cache && !attached.info().read_only);
    let mut users = [user(&attached, QueueKind::Default), user(&attached, QueueKind::Poll)];
    for block in 0..SLOTS {
        let user = &mut users[block as usize % 2];
        user.fill(block, block as u8 + 1);
        user.submit(Op::Write, block * 3, block);
    }
    users.iter_mut().for_each(User::drain);
    assert!(users.iter().all(|user| user.ended.iter().all(|bio| bio.status == Status::Ok)));
    for block in 0..SLOTS {
        let user = &mut users[1 - block as usize % 2];
        assert_eq!(user.one(Op::Read, block * 3, block), Status::Ok);
        assert!(user.holds(block, block as u8 + 1), "block {block}");
    }
    let user = &mut users[0];
    assert_eq!(user.one(Op::Flush, 0, 0), Status::Ok);
    for (op, block) in [(Op::Discard, 0), (Op::WriteZeroes, 3)] {
        assert_eq!(user.one(op, block, 0), Status::Ok);
        user.fill(5, 9);
        assert_eq!(user.one(Op::Read, block, 5), Status::Ok);
        assert!(user.holds(5, 0), "{op:?}");
    }
    drop(users);
    drop(attached);
    server.stop();
}

#[test]
fn registered_buffers_carry_data_across_restarts() {
    let (_folder, path) = place();
    let device = disk();
    let mut server = Server::start(&path, &device, 1);
    let attached = attach(&path, 1);
    let mut user = user(&attached, QueueKind::Default);
    let before = attached.dma_domain().regions().len();
    let buffer = user.register();
    for round in 0..3_u8 {
        (0..SLOTS).for_each(|slot| user.fill(slot, slot as u8 + round + 1));
        // Its list is read in place.
        user.submit_whole(Op::Write, 10);
        (0..SLOTS).for_each(|slot| user.submit(Op::Write, 1000 + slot * 2, slot));
        user.turn();
        server.stop();
        server = Server::start(&path, &device, 1);
        user.drain();
        assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok), "round {round}");
        for first in [10, 1000] {
            (0..SLOTS).for_each(|slot| user.fill(slot, 0));
            if first == 10 {
                user.submit_whole(Op::Read, first);
            } else {
                (0..SLOTS).for_each(|slot| user.submit(Op::Read, first + slot * 2, slot));
            }
            user.drain();
            assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok), "round {round}");
            assert!((0..SLOTS).all(|slot| user.holds(slot, slot as u8 + round + 1)), "round {round}, block {first}");
        }
    }
    user.submit_whole(Op::Read, 10);
    user.turn();
    user.unregister(&buffer);
    user.drain();
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
    assert_eq!(user.one(Op::Read, 10, 0), Status::Invalid, "its id is stale");
    // Rings, and the memory of the user.
    let domain = Arc::clone(attached.dma_domain());
    until("its table is unmapped", || domain.regions().len() == before);
    drop((buffer, user, attached));
    server.stop();
}

#[test]
fn buffer_registered_while_another_leaves_has_addresses_of_its_own() {
    const HALF: u64 = SLOTS / 2;
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 1);
    let attached = attach(&path, 1);
    let mut user = user(&attached, QueueKind::Default);
    let left = user.register_slots(0, HALF);
    let right = user.register_slots(HALF, HALF);
    // The queue reads the answers for both after one of them is gone.
    user.unregister(&left);
    std::thread::sleep(Duration::from_millis(100));
    (0..SLOTS).for_each(|slot| user.fill(slot, if slot < HALF { 0x11 } else { 0x22 }));
    user.submit_slots(Op::Write, 100, HALF + 4, 16);
    user.drain();
    (HALF..SLOTS).for_each(|slot| user.fill(slot, 0));
    user.submit_slots(Op::Read, 100, HALF + 4, 16);
    user.drain();
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
    assert!((0..HALF).all(|slot| user.holds(slot, 0x11)), "a read has reached the other buffer");
    assert!((HALF + 4..HALF + 20).all(|slot| user.holds(slot, 0x22)));
    drop((right, left, user, attached));
    server.stop();
}

#[test]
fn many_registered_buffers_leave_a_server_room_for_memory() {
    // More than the 128 regions that the server maps.
    const COUNT: u64 = 200;
    const SIZE: u64 = 4;
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 1);
    let attached = attach(&path, 1);
    let region = Region::shared((COUNT * SIZE) as usize * BLOCK).unwrap();
    let queue = attached.queue(QueueKind::Default, SLOTS as usize).unwrap();
    let mut user = User::of(queue, SLOTS as usize, attached.info(), region);
    let mut buffers = Vec::new();
    for number in 0..COUNT {
        buffers.push(user.register_slots(number * SIZE, SIZE));
        user.fill(number * SIZE, number as u8);
        user.submit_slots(Op::Write, number * SIZE, number * SIZE, SIZE as u32);
        user.drain();
    }
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
    let mapped = attached.dma_domain().regions().len();
    assert!(mapped < 10, "{mapped} regions are mapped");
    // There is room for more memory.
    let more = Region::shared(SLOTS as usize * BLOCK).unwrap();
    user.set_memory(Some(&more));
    user.register();
    for number in 0..COUNT {
        user.submit_slots(Op::Read, number * SIZE, 0, SIZE as u32);
        user.drain();
        assert!(user.holds(0, number as u8), "buffer {number}");
    }
    assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
    drop((buffers, user, attached));
    server.stop();
}

#[test]
fn closed_disk_leaves_nothing_mapped_for_a_buffer_that_lives() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 1);
    let region = Region::shared(SLOTS as usize * BLOCK).unwrap();
    let mut kept: Option<Arc<RegisteredBuffer>> = None;
    for round in 0..10_u8 {
        let attached = attach(&path, 1);
        let domain = Arc::downgrade(attached.dma_domain());
        let queue = attached.queue(QueueKind::Default, SLOTS as usize).unwrap();
        let mut user = User::of(queue, SLOTS as usize, attached.info(), Arc::clone(&region));
        match &kept {
            Some(buffer) => user.adopt(buffer),
            None => kept = Some(user.register()),
        }
        user.fill(0, round + 1);
        user.submit_whole(Op::Write, 10);
        user.drain();
        user.fill(0, 0);
        user.submit_whole(Op::Read, 10);
        user.drain();
        assert!(user.holds(0, round + 1) && user.ended.drain(..).all(|bio| bio.status == Status::Ok));
        drop((user, attached));
        until("the domain is gone", || domain.upgrade().is_none());
        assert_eq!(Arc::strong_count(&region), 2, "round {round}");
    }
    server.stop();
}

#[test]
fn memory_comes_and_goes_with_io_in_flight() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 2);
    let attached = attach(&path, 2);
    let [mut one, mut other] = [user(&attached, QueueKind::Default), user(&attached, QueueKind::Default)];
    one.check_changing_memory();
    assert_eq!(other.one(Op::Read, 0, 0), Status::Ok);
    other.check_changing_memory();
    drop((one, other, attached));
    server.stop();
}

#[test]
fn sleeping_queue_is_woken_by_interrupts() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 1);
    let attached = attach(&path, 1);
    let mut sleeper = user(&attached, QueueKind::Default);
    for round in 0..100 {
        (0..=round % 8).for_each(|slot| sleeper.submit(Op::Read, round, slot));
        sleeper.drain_asleep();
    }
    assert!(sleeper.ended.iter().all(|bio| bio.status == Status::Ok));
    drop((sleeper, attached));
    server.stop();
}

#[test]
fn queues_are_given_back_and_opened_again() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 2);
    // Fewer are granted than asked for.
    let attached = attach(&path, 5);
    assert_eq!(attached.queues_max(), 2);
    let too_deep = attached.queue(QueueKind::Default, 5000).unwrap_err().to_string();
    assert!(too_deep.contains("5000 requests") && too_deep.contains("queue_size"), "{too_deep}");
    for round in 0..4 {
        let mut users = [user(&attached, QueueKind::Default), user(&attached, QueueKind::Default)];
        let none_left = attached.queue(QueueKind::Default, 8).unwrap_err().to_string();
        assert!(none_left.contains("has 2"), "{none_left}");
        for (number, user) in users.iter_mut().enumerate() {
            user.fill(0, round + 1);
            assert_eq!(user.one(Op::Write, number as u64, 0), Status::Ok);
            assert_eq!(user.one(Op::Read, number as u64, 1), Status::Ok);
            assert!(user.holds(1, round + 1));
        }
    }
    drop(attached);
    server.stop();
}

#[test]
fn memory_without_a_file_is_refused() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 1);
    let attached = attach(&path, 1);
    let region = Region::anonymous(1 << 20).unwrap();
    let mut user = User::of(attached.queue(QueueKind::Default, 64).unwrap(), 64, attached.info(), region);
    assert_eq!(user.one(Op::Read, 0, 0), Status::Invalid);
    assert_eq!(user.one(Op::Flush, 0, 0), Status::Ok, "needs no memory");
    let shared = Region::shared(1 << 20).unwrap();
    user.set_memory(Some(&shared));
    assert_eq!(user.one(Op::Read, 0, 0), Status::Ok);
    drop((user, attached));
    server.stop();
}

#[test]
fn missing_namespace_is_named() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 1);
    let error = attach_with(&path, NamespaceConfig { namespace: Some(7), ..config(1) }).unwrap_err().to_string();
    assert!(error.contains("vfio-user:test") && error.contains("no namespace 7; it has 1"), "{error}");
    drop(attach(&path, 1));
    server.stop();
    let error = attach_with(&path, config(1)).unwrap_err().to_string();
    assert!(error.contains("start the server"), "{error}");
}

#[test]
fn requests_survive_restarts_of_the_server() {
    let (_folder, path) = place();
    let device = disk();
    let mut server = Server::start(&path, &device, 2);
    let attached = attach(&path, 2);
    let mut users = [user(&attached, QueueKind::Default), user(&attached, QueueKind::Default)];
    for round in 0..6_u64 {
        for (number, user) in users.iter_mut().enumerate() {
            for slot in 0..SLOTS {
                user.fill(slot, (round * 7 + slot + number as u64) as u8);
                user.submit(Op::Write, slot * 2 + number as u64, slot);
            }
            user.turn();
        }
        server.stop();
        server = Server::start(&path, &device, 2);
        for (number, user) in users.iter_mut().enumerate() {
            user.drain();
            assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok), "round {round}");
            for slot in 0..SLOTS {
                assert_eq!(user.one(Op::Read, slot * 2 + number as u64, 0), Status::Ok);
                assert!(user.holds(0, (round * 7 + slot + number as u64) as u8), "round {round}, slot {slot}");
            }
        }
    }
    assert!(attached.view().sessions > 6 && attached.view().is_connected, "{:?}", attached.view());
    drop((users, attached));
    server.stop();
}

#[test]
fn io_fails_after_gone_max_and_works_again_later() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 1);
    let mut short = config(1);
    short.options.gone_max = Duration::from_millis(200);
    let attached = attach_with(&path, short).unwrap();
    let mut user = user(&attached, QueueKind::Default);
    assert_eq!(user.one(Op::Write, 0, 0), Status::Ok);
    server.stop();
    let start = Instant::now();
    assert_eq!(user.one(Op::Write, 0, 0), Status::Offline);
    assert!(start.elapsed() >= Duration::from_millis(100));
    assert!(attached.view().last_loss.is_some() && !attached.view().is_connected);
    let server = Server::start(&path, &device, 1);
    until("it works again", || user.one(Op::Write, 0, 0) == Status::Ok);
    drop((user, attached));
    server.stop();
}

#[test]
fn other_disk_after_a_restart_is_refused() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 1);
    let mut short = config(1);
    short.options.gone_max = Duration::from_millis(500);
    let attached = attach_with(&path, short).unwrap();
    let mut user = user(&attached, QueueKind::Default);
    server.stop();
    let mut info = device.info().clone();
    info.read_only = true;
    let server = Server::of(&path, &device, &info, 1);
    assert_eq!(user.one(Op::Write, 0, 0), Status::Offline);
    server.stop();
    let server = Server::start(&path, &device, 1);
    until("it works again", || user.one(Op::Write, 0, 0) == Status::Ok);
    drop((user, attached));
    server.stop();
}

#[test]
fn resize_at_the_server_is_seen() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 1);
    let attached = attach(&path, 1);
    let info = DeviceInfo { capacity_sectors: 8192, ..device.info().clone() };
    server.server.hand().change(0, Arc::new(info)).recv().unwrap().unwrap();
    until("the new size is known", || attached.capacity_sectors() == 8192);
    drop(attached);
    server.stop();
}

#[test]
fn two_namespaces_share_one_controller() {
    let (_folder, path) = place();
    let devices = [disk(), disk()];
    let start = || Server::of_namespaces(&path, &devices.each_ref().map(|device| (device, device.info())), 5);
    let mut server = start();
    let mut transport = VfioUserConfig::new(&path, Arc::new(SystemClock)).unwrap();
    transport.reply_max = PATIENCE;
    let attached = RemoteNamespace::open_all::<VfioUserController>(transport, config(2), &[2, 1]).unwrap();
    assert_eq!(attached.iter().map(|disk| (disk.nsid(), disk.queues_max())).collect::<Vec<_>>(), [(2, 2), (1, 2)]);
    assert_eq!(attached[0].info().name, "vfio-user:test?namespace=2");
    let mut users: Vec<_> = attached.iter().map(|disk| user(disk, QueueKind::Default)).collect();
    let second = attached[0].queue(QueueKind::Default, 8).unwrap();
    assert!(matches!(attached[0].queue(QueueKind::Default, 8), Err(AttachError::Queues { have: 2, .. })));
    drop(second);
    for round in 0..3_u8 {
        for (number, user) in users.iter_mut().enumerate() {
            (0..SLOTS).for_each(|slot| user.fill(slot, 100 * number as u8 + slot as u8 + round + 1));
            (0..SLOTS).for_each(|slot| user.submit(Op::Write, slot, slot));
            user.turn();
        }
        if round == 1 {
            // Both continue with the next server, each with its own namespace.
            server.stop();
            server = start();
        }
        users.iter_mut().for_each(User::drain);
        for (number, user) in users.iter_mut().enumerate() {
            assert!(user.ended.drain(..).all(|bio| bio.status == Status::Ok));
            for slot in 0..SLOTS {
                assert_eq!(user.one(Op::Read, slot, slot), Status::Ok);
                assert!(user.holds(slot, 100 * number as u8 + slot as u8 + round + 1), "round {round}, slot {slot}");
            }
        }
    }
    let info = DeviceInfo { capacity_sectors: 8192, ..devices[1].info().clone() };
    server.server.hand().change(1, Arc::new(info)).recv().unwrap().unwrap();
    until("the new size is known", || attached[0].capacity_sectors() == 8192);
    assert_eq!(attached[1].capacity_sectors(), 16384);
    // The controller stays for the other one.
    let mut attached = attached.into_iter();
    drop((users.remove(0), attached.next()));
    assert_eq!(users[0].one(Op::Read, 1, 1), Status::Ok);
    drop((users, attached));
    server.stop();
}

#[test]
fn namespaces_take_their_queues_from_a_pool_if_the_controller_grants_too_few() {
    let (_folder, path) = place();
    let devices = [disk(), disk()];
    let server = Server::of_namespaces(&path, &devices.each_ref().map(|device| (device, device.info())), 3);
    let transport = || VfioUserConfig::new(&path, Arc::new(SystemClock)).unwrap();
    let attached = RemoteNamespace::open_all::<VfioUserController>(transport(), config(2), &[1, 2]).unwrap();
    let [one, other] = [0, 1].map(|index| attached[index].queue_pool().unwrap());
    assert_eq!((one.pool, one.index, other.index), (other.pool, 0, 1));
    assert_eq!([0, 1].map(|index| attached[index].queues_max()), [3, 3]);
    let of_both = attached[0].queue_of(&[0, 1], QueueKind::Default, 8).unwrap();
    let mut users: Vec<_> = attached.iter().map(|disk| user(disk, QueueKind::Default)).collect();
    let none_left = attached[1].queue(QueueKind::Default, 8);
    assert!(matches!(none_left, Err(AttachError::Queues { have: 3, .. })), "{none_left:?}");
    drop(of_both);
    let again = attached[1].queue_of(&[1, 0], QueueKind::Default, 8).unwrap();
    for (number, user) in users.iter_mut().enumerate() {
        user.fill(0, 50 + number as u8);
        assert_eq!(user.one(Op::Write, 0, 0), Status::Ok);
    }
    drop((users, again, attached));
    // With enough for each there is no pool.
    let attached = RemoteNamespace::open_all::<VfioUserController>(transport(), config(1), &[1, 2]).unwrap();
    assert_eq!([0, 1].map(|index| attached[index].queue_pool()), [None, None]);
    let mut users: Vec<_> = attached.iter().map(|disk| user(disk, QueueKind::Default)).collect();
    for (number, user) in users.iter_mut().enumerate() {
        assert_eq!(user.one(Op::Read, 0, 0), Status::Ok);
        assert!(user.holds(0, 50 + number as u8));
    }
    drop((users, attached));
    server.stop();
}

#[test]
fn namespace_that_is_not_there_is_named() {
    let (_folder, path) = place();
    let device = disk();
    let server = Server::start(&path, &device, 2);
    let transport = VfioUserConfig::new(&path, Arc::new(SystemClock)).unwrap();
    let error = RemoteNamespace::open_all::<VfioUserController>(transport, config(1), &[1, 7]).unwrap_err();
    assert!(error.to_string().contains("no namespace 7; it has 1"), "{error}");
    server.stop();
}
