//! Exports on real lanes, several in one process.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use blkyard_export::{
    BackendConfig, BoundSocket, DetachedVirtqueue, Handed, QueueShare, QuiescedExport, SEG_MAX, SocketConfig,
    VhostUserServer, VhostUserStatus, VirtqueueMover, VirtqueuePoller, VirtqueueRemote, VirtqueueWatch, queue_pair,
};
use blkyard_mq::{HwQueue, HwQueueConfig, HwStats};
use blkyard_os::{LaneConfig, LaneError, Lanes};
use blkyard_virtio::{BlkConfig, Refusals, SerialId};

use super::AnyDevice;
use super::devices::AnyQueue;

/// The serial number of every disk here.
pub const SERIAL: &str = "disk-0001";

/// An export that serves.
pub struct Served {
    pub path: PathBuf,
    server: Option<VhostUserServer>,
    status: Arc<VhostUserStatus>,
    watches: Vec<VirtqueueWatch>,
    movers: Vec<VirtqueueMover>,
}

impl Served {
    pub fn status(&self) -> &VhostUserStatus {
        &self.status
    }

    pub fn server(&self) -> &VhostUserServer {
        self.server.as_ref().unwrap()
    }

    /// Counters of a queue.
    pub fn stats(&self, queue: usize) -> &HwStats {
        &self.watches[queue].stats()[0]
    }

    /// A handle for a queue's inspection.
    pub fn watch(&self, queue: usize) -> &VirtqueueWatch {
        &self.watches[queue]
    }

    /// A handle that moves a single queue to another lane.
    pub fn mover(&self, queue: usize) -> &VirtqueueMover {
        &self.movers[queue]
    }

    fn refusals(&self, queue: usize) -> &Refusals {
        self.watches[queue].refusals().unwrap()
    }

    /// How often a queue has refused something, by the words for the reason.
    pub fn refused(&self, queue: usize, reason: &str) -> u64 {
        let count = self.refusals(queue).iter().find(|(name, _)| name.contains(reason));
        count.unwrap_or_else(|| panic!("no reason is called {reason}")).1
    }

    pub fn refused_in_all(&self, queue: usize) -> u64 {
        self.refusals(queue).total()
    }
}

/// Lanes, and exports with their queues on them.
pub struct World {
    pub exports: Vec<Served>,
    pub lanes: Lanes<VirtqueuePoller<AnyQueue>>,
    folder: tempfile::TempDir,
}

impl World {
    /// One export for each device, with as many queues each, dealt to the lanes in turn.
    pub fn new(devices: Vec<AnyDevice>, queues: usize, lanes: usize) -> World {
        World::serving(make(devices, queues, lanes))
    }

    /// One export, whose queues share a hardware queue on the first lane.
    pub fn shared(device: &AnyDevice, queues: usize, lanes: usize) -> World {
        let mut dealt = start_lanes(lanes);
        let usual = HwQueueConfig::default();
        let config = HwQueueConfig { bios_max: usual.bios_max * queues, ..usual };
        let (driver, info) = (device.queue(config.depth), Arc::new(device.info.clone()));
        let disk = BlkConfig::new(&info, queues as u16, SEG_MAX, true);
        let share = QueueShare { bios: usual.bios_max, depth: usual.depth, devices: 1 };
        let (remotes, ports): (Vec<_>, Vec<_>) = (0..queues).map(|_| queue_pair()).unzip();
        let virtqueue = |port| DetachedVirtqueue::new(SerialId::new(SERIAL).unwrap(), port, share).unwrap();
        let mut virtqueues = ports.into_iter().map(virtqueue);
        let first = virtqueues.next().unwrap();
        dealt.admit(0, move || VirtqueuePoller::of_detached(HwQueue::new(driver, info, config), first)).unwrap();
        virtqueues.for_each(|virtqueue| remotes[0].mover().adopt(virtqueue, super::PATIENCE).unwrap());
        World::serving((
            vec![BackendConfig { name: "shared".into(), disk, queues: remotes, domains: Vec::new() }],
            dealt,
        ))
    }

    /// The virtqueue is alone at a hardware queue from now on, on this lane.
    pub fn carry_apart(&mut self, device: &AnyDevice, queue: usize, lane: usize) {
        let config = HwQueueConfig::default();
        let (driver, info) = (device.queue(config.depth), Arc::new(device.info.clone()));
        let detached = self.exports[0].mover(queue).part(super::PATIENCE, super::PATIENCE).unwrap();
        let make = move || VirtqueuePoller::of_detached(HwQueue::new(driver, info, config), detached);
        self.lanes.admit(lane, make).unwrap();
    }

    /// The virtqueue shares the hardware queue of another from now on.
    pub fn carry_to(&self, queue: usize, other: usize) {
        let detached = self.exports[0].mover(queue).part(super::PATIENCE, super::PATIENCE).unwrap();
        self.exports[0].mover(other).adopt(detached, super::PATIENCE).unwrap();
    }

    /// These exports, with their queues on these lanes.
    pub fn serving((made, lanes): (Vec<BackendConfig>, Lanes<VirtqueuePoller<AnyQueue>>)) -> World {
        let folder = tempfile::tempdir().unwrap();
        let serve = |(number, config): (usize, BackendConfig)| {
            let path = folder.path().join(format!("{number}.sock"));
            let socket = SocketConfig { path: path.clone(), mode: None, group: None };
            let watches = config.queues.iter().map(VirtqueueRemote::watch).collect();
            let movers = config.queues.iter().map(VirtqueueRemote::mover).collect();
            let server = VhostUserServer::start(BoundSocket::bind(&socket).unwrap(), config).unwrap();
            Served { path, status: Arc::clone(server.status()), server: Some(server), watches, movers }
        };
        let exports = made.into_iter().enumerate().map(serve).collect();
        World { exports, lanes, folder }
    }

    /// Hands everything over to another world, with the same devices, and ends. Returns the length of the pause, too.
    pub fn hand_over(self, devices: &[AnyDevice], queues: usize, lanes: usize) -> (World, Duration) {
        let (made, heirs) = make(devices.to_vec(), queues, lanes);
        let begin = Instant::now();
        let asked: Vec<_> = self.exports.iter().map(|export| export.server().hand().hand_over()).collect();
        let handed = asked.into_iter().map(|answer| answer.recv_timeout(super::PATIENCE).unwrap().unwrap());
        let mut rests = Vec::new();
        let mut taken = Vec::new();
        for (handed, config) in handed.zip(made) {
            let Handed { state, rest } = handed;
            let watches = config.queues.iter().map(VirtqueueRemote::watch).collect();
            let movers = config.queues.iter().map(VirtqueueRemote::mover).collect();
            let socket = BoundSocket::adopt(state.listener, state.path.clone(), state.identity);
            let taking = VhostUserServer::take_over(socket, config, state.offered, state.wce, state.session);
            taken.push((state.path, taking.unwrap_or_else(|why| panic!("{why}")), watches, movers));
            rests.push(rest);
        }
        rests.into_iter().for_each(QuiescedExport::let_go);
        let exports = taken.into_iter().map(|(path, taking, watches, movers)| {
            let server = taking.go();
            Served { path, status: Arc::clone(server.status()), server: Some(server), watches, movers }
        });
        let exports = exports.collect();
        let pause = begin.elapsed();
        let World { exports: old, lanes, folder } = self;
        super::until("the exports end", || old.iter().all(|export| export.server().is_finished()));
        drop(old);
        end(lanes).unwrap();
        (World { exports, lanes: heirs, folder }, pause)
    }

    /// Two disks in memory with two queues each, on two lanes.
    pub fn pair() -> World {
        World::new(vec![AnyDevice::ram(0), AnyDevice::ram(0)], 2, 2)
    }

    /// A recording disk and one in memory, each with two queues.
    pub fn gated(gate: &Arc<super::Gate>) -> World {
        World::new(vec![AnyDevice::gated(gate), AnyDevice::ram(0)], 2, 2)
    }

    /// Asks all to end and waits for it, as the daemon does; panics if it takes too long.
    pub fn stop(mut self) {
        self.exports.iter().for_each(|export| export.server().ask_to_stop());
        super::until("the exports end", || self.exports.iter().all(|export| export.server().is_finished()));
        self.exports.iter_mut().filter_map(|export| export.server.take()).for_each(VhostUserServer::join);
        end(self.lanes).unwrap();
        assert_eq!(self.folder.path().read_dir().unwrap().count(), 0, "a socket was left behind");
    }
}

/// Lanes without pollers.
pub fn start_lanes(lanes: usize) -> Lanes<VirtqueuePoller<AnyQueue>> {
    let config = |number| LaneConfig { name: format!("lane{number}"), ..LaneConfig::default() };
    Lanes::start(lanes, config).unwrap()
}

/// Configurations of exports, with their queues on lanes.
fn make(
    devices: Vec<AnyDevice>,
    queues: usize,
    lanes: usize,
) -> (Vec<BackendConfig>, Lanes<VirtqueuePoller<AnyQueue>>) {
    let mut dealt = start_lanes(lanes);
    let mut made = Vec::new();
    let mut next = 0;
    for (number, device) in devices.into_iter().enumerate() {
        let info = Arc::new(device.info.clone());
        let mut remotes = Vec::new();
        for _ in 0..queues {
            let (remote, port) = queue_pair();
            let config = HwQueueConfig::default();
            let (driver, info) = (device.queue(config.depth), Arc::clone(&info));
            let serial = SerialId::new(SERIAL).unwrap();
            let make = move || VirtqueuePoller::new(HwQueue::new(driver, info, config), serial, port);
            dealt.admit(next % lanes, make).unwrap();
            remotes.push(remote);
            next += 1;
        }
        let disk = BlkConfig::new(&info, queues as u16, SEG_MAX, true);
        made.push(BackendConfig {
            name: format!("export {number}"),
            disk,
            queues: remotes,
            domains: device.domains.clone(),
        });
    }
    (made, dealt)
}

/// Waits until the lanes have ended; panics if that takes too long.
pub fn end(lanes: Lanes<VirtqueuePoller<AnyQueue>>) -> Result<(), LaneError> {
    let (told, ended) = channel();
    std::thread::spawn(move || told.send(lanes.join()));
    ended.recv_timeout(super::PATIENCE).expect("the lanes end")
}
