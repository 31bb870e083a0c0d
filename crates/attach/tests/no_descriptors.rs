//! Kicks and doorbells without descriptors. A separate program with one test: the limit on open files is that of the
//! process.
#![forbid(unsafe_code)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use blkyard_attach::{Attached, NamespaceConfig, RemoteNamespace, VfioUserConfig, VfioUserController};
use blkyard_export::{
    BoundSocket, HwQueueSet, NvmeDisk, NvmeQueuePoller, SocketConfig, VfioUserExport, VfioUserServer, queue_pair,
};
use blkyard_mem::Region;
use blkyard_mq::{BlockDevice, Driver, HwQueue, HwQueueConfig, Op, QueueKind, Status};
use blkyard_os::{LaneConfig, Lanes, Ring, SystemClock};
use common::{Backend, SLOTS, User, config, disk, place};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Time for the other end to do what it has begun.
const LULL: Duration = Duration::from_millis(300);

/// The first I/O of a queue, whose other end cannot be told of it at once. Nothing is submitted after it.
fn check<Q: Driver<Ring>>(user: &mut User<Q>) {
    for _ in 0..10 {
        std::thread::sleep(LULL / 10);
        user.turn_idle();
    }
    // Nothing more can be opened; what is open stays.
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..before }).unwrap();
    user.submit(Op::Write, 1, 1);
    user.turn();
    std::thread::sleep(LULL);
    let ended = user.turn();
    setrlimit(Resource::Nofile, before).unwrap();
    assert_eq!(ended, 0, "the other end is told without a descriptor");
    user.drain_asleep();
    assert_eq!(user.ended.pop().unwrap().status, Status::Ok);
}

fn check_vhost_user() {
    let (_folder, path) = place();
    let backend = Backend::start(&path, &disk(), 1);
    let attached = Attached::open(config(&path)).unwrap();
    let mut user = User::new(&attached, QueueKind::Default);
    check(&mut user);
    drop((user, attached));
    backend.stop();
}

fn check_vfio_user() {
    let (_folder, path) = place();
    let device = disk();
    let mut lanes = Lanes::start(1, |_| LaneConfig { name: "lane".into(), ..LaneConfig::default() }).unwrap();
    let (remote, port) = queue_pair();
    let config = HwQueueConfig::default();
    let hw = HwQueue::new(device.queue(config.depth), Arc::new(device.info().clone()), config);
    lanes.admit(0, move || NvmeQueuePoller::new(HwQueueSet::new::<Ring>(vec![hw]).unwrap(), (), port)).unwrap();
    let disk = NvmeDisk::new(device.info(), 1, "serial");
    let config = VfioUserExport { name: "nvme".into(), disk, queues: vec![remote], domains: Vec::new() };
    let socket = SocketConfig { path: path.clone(), mode: None, group: None };
    let server = VfioUserServer::start(BoundSocket::bind(&socket).unwrap(), config).unwrap();

    let transport = VfioUserConfig::new(&path, Arc::new(SystemClock)).unwrap();
    let config = NamespaceConfig::new("vfio-user:test", Arc::new(SystemClock));
    let attached = RemoteNamespace::open::<VfioUserController>(transport, config).unwrap();
    let region = Region::shared(SLOTS as usize * 4096).unwrap();
    let mut user = User::of(attached.queue(QueueKind::Default, 32).unwrap(), 32, attached.info(), region);
    check(&mut user);
    drop((user, attached));
    server.ask_to_stop();
    server.join();
    lanes.join().unwrap();
}

#[test]
fn io_goes_on_once_its_lane_has_descriptors_again() {
    check_vhost_user();
    check_vfio_user();
}
