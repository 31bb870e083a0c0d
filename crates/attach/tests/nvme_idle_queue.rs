//! Queues that no thread runs while the server of their controller is restarted again and again. The only test of its
//! program, since it counts the descriptors of the process.
#![forbid(unsafe_code)]

mod common;

use std::path::Path;
use std::sync::Arc;

use blkyard_attach::{NamespaceConfig, NamespaceQueue, RemoteNamespace, VfioUserConfig, VfioUserController};
use blkyard_export::{
    BoundSocket, HwQueueSet, NvmeDisk, NvmeQueuePoller, SocketConfig, VfioUserExport, VfioUserServer, queue_pair,
};
use blkyard_mem::Region;
use blkyard_mq::{BlockDevice, HwQueue, HwQueueConfig, Op, QueueKind, RamDevice, RamQueue, Status};
use blkyard_os::{LaneConfig, Lanes, Ring, SystemClock};
use common::{PATIENCE, SLOTS, User, disk, place, until};

const BLOCK: usize = 4096;
const QUEUES: u16 = 3;

struct RestartedServer {
    server: VfioUserServer,
    lanes: Lanes<NvmeQueuePoller<RamQueue>>,
}

impl RestartedServer {
    fn start(path: &Path, device: &RamDevice) -> RestartedServer {
        let mut lanes = Lanes::start(1, |_| LaneConfig { name: "lane".into(), ..LaneConfig::default() }).unwrap();
        let mut remotes = Vec::new();
        for _ in 0..QUEUES {
            let (remote, port) = queue_pair();
            let config = HwQueueConfig::default();
            let queues = vec![HwQueue::new(device.queue(config.depth), Arc::new(device.info().clone()), config)];
            let hw = HwQueueSet::new::<Ring>(queues).unwrap();
            lanes.admit(0, move || NvmeQueuePoller::new(hw, (), port)).unwrap();
            remotes.push(remote);
        }
        let socket = SocketConfig { path: path.into(), mode: None, group: None };
        let disk = NvmeDisk::new(device.info(), QUEUES, "serial");
        let config = VfioUserExport { name: "nvme".into(), disk, queues: remotes, domains: Vec::new() };
        let server = VfioUserServer::start(BoundSocket::bind(&socket).unwrap(), config).unwrap();
        RestartedServer { server, lanes }
    }

    fn stop(self) {
        self.server.ask_to_stop();
        self.server.join();
        self.lanes.join().unwrap();
    }
}

/// Descriptors of shared memory that this process has.
fn memory_files() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("/memfd:")).count()
}

fn user(attached: &RemoteNamespace) -> User<NamespaceQueue> {
    let region = Region::shared(SLOTS as usize * BLOCK).unwrap();
    let queue = attached.queue(QueueKind::Default, SLOTS as usize).unwrap();
    User::of(queue, SLOTS as usize, attached.info(), region)
}

#[test]
fn idle_queue_keeps_one_queue_pair_over_many_sessions() {
    const SESSIONS: u64 = 12;
    let (_folder, path) = place();
    let device = disk();
    let mut server = RestartedServer::start(&path, &device);
    let mut config = NamespaceConfig::new("vfio-user:test", Arc::new(SystemClock));
    (config.options.reply_max, config.options.gone_max) = (PATIENCE, PATIENCE);
    config.host.queues.submitters = QUEUES;
    let transport = VfioUserConfig::new(&path, Arc::new(SystemClock)).unwrap();
    let attached = RemoteNamespace::open::<VfioUserController>(transport, config).unwrap();
    let mut users = [(); QUEUES as usize].map(|()| user(&attached));
    let mut counts = Vec::new();
    for session in 1..=SESSIONS {
        until("the controller is there", || attached.view().sessions == session && attached.view().is_connected);
        counts.push(memory_files());
        server.stop();
        server = RestartedServer::start(&path, &device);
    }
    // The first session's pairs are in use, those of the second and later ones are not seen yet.
    let growth = counts[SESSIONS as usize - 1].saturating_sub(counts[2]);
    assert!(growth < usize::from(QUEUES), "shared memory of each session: {counts:?}");
    for user in &mut users {
        for slot in 0..SLOTS {
            assert_eq!(user.one(Op::Write, slot, slot), Status::Ok);
        }
    }
    drop((users, attached));
    server.stop();
}
