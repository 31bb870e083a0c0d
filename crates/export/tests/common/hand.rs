//! An export whose one lane is the test's own thread: it turns when the test says so, and never sleeps.

use std::sync::Arc;

use blkyard_export::{
    BackendConfig, BoundSocket, DetachedVirtqueue, QueueShare, SEG_MAX, SocketConfig, VhostUserServer, VirtqueuePoller,
    queue_pair,
};
use blkyard_mq::{
    BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, NullConfig, Poller, PollerState, RamDevice, RamQueue,
    SignalEventfd,
};
use blkyard_virtio::{BlkConfig, Refusals, SerialId};

use super::{Data, Front, PATIENCE, Ram, Vq, disk_info};

/// A queue to be run by hand.
pub struct Hand {
    queue: VirtqueuePoller<RamQueue>,
    refusals: Vec<Arc<Refusals>>,
    server: VhostUserServer,
    now_ns: u64,
    folder: tempfile::TempDir,
}

impl Hand {
    /// A disk in memory with one queue.
    pub fn new(latency_ns: u64) -> Hand {
        Hand::of(latency_ns, HwQueueConfig::default())
    }

    /// The same, with a queue that is made so.
    pub fn of(latency_ns: u64, config: HwQueueConfig) -> Hand {
        Hand::serving(&disk_info(), latency_ns, config)
    }

    /// The same with a disk that is like this.
    pub fn serving(info: &DeviceInfo, latency_ns: u64, config: HwQueueConfig) -> Hand {
        Hand::with_queues(info, latency_ns, config, 1)
    }

    /// The same with so many queues, which share a hardware queue.
    pub fn with_queues(info: &DeviceInfo, latency_ns: u64, config: HwQueueConfig, queues: usize) -> Hand {
        let folder = tempfile::tempdir().unwrap();
        let device = RamDevice::new(info.clone(), NullConfig { latency_ns, bytes_per_s: 0 }).unwrap();
        let (remotes, ports): (Vec<_>, Vec<_>) = (0..queues).map(|_| queue_pair()).unzip();
        let hw = HwQueue::new(device.queue(config.depth), Arc::new(info.clone()), config);
        let share = QueueShare { bios: config.bios_max / queues, depth: config.depth, devices: 1 };
        let virtqueue = |port| DetachedVirtqueue::new(SerialId::new("by hand").unwrap(), port, share).unwrap();
        let mut virtqueues = ports.into_iter().map(virtqueue);
        let mut queue = VirtqueuePoller::of_detached(hw, virtqueues.next().unwrap());
        for other in virtqueues {
            let mover = remotes[0].mover();
            let adopt = std::thread::spawn(move || mover.adopt(other, PATIENCE).unwrap());
            while !adopt.is_finished() {
                queue.run_once(&mut (), 0);
            }
            adopt.join().unwrap();
        }
        let refusals = remotes.iter().map(|remote| Arc::clone(remote.watch().refusals().unwrap())).collect();
        let socket = SocketConfig { path: folder.path().join("disk.sock"), mode: None, group: None };
        let disk = BlkConfig::new(info, queues as u16, SEG_MAX, true);
        let config = BackendConfig { name: "disk".into(), disk, queues: remotes, domains: Vec::new() };
        let server = VhostUserServer::start(BoundSocket::bind(&socket).unwrap(), config).unwrap();
        Hand { queue, refusals, server, now_ns: 0, folder }
    }

    /// One round, a microsecond after the last.
    pub fn turn(&mut self) -> PollerState {
        self.turn_with(&mut ())
    }

    /// The same, with this way to signal the guest's eventfd.
    pub fn turn_with(&mut self, signal: &mut impl SignalEventfd) -> PollerState {
        self.now_ns += 1000;
        self.queue.run_once(signal, self.now_ns)
    }

    /// Goes to sleep, as far as the queue can tell, and wakes up again; says whether it would have had to stay awake.
    pub fn nod(&mut self) -> bool {
        let work = Poller::<()>::arm(&mut self.queue);
        Poller::<()>::disarm(&mut self.queue);
        work
    }

    /// Requests refused so far.
    pub fn refused(&self) -> u64 {
        self.refusals.iter().map(|refusals| refusals.total()).sum()
    }

    /// A front-end with the queue running.
    pub fn connect(&mut self) -> (Front, Vq) {
        self.connect_with(1 << 20)
    }

    /// The same with so many bytes of memory.
    pub fn connect_with(&mut self, memory_bytes: u64) -> (Front, Vq) {
        let (front, mut vqs) = self.connect_all(memory_bytes);
        (front, vqs.remove(0))
    }

    /// A front-end with all queues running, and so many bytes of memory.
    pub fn connect_all(&mut self, memory_bytes: u64) -> (Front, Vec<Vq>) {
        let (path, queues) = (self.folder.path().join("disk.sock"), self.refusals.len() as u64);
        let begin = std::thread::spawn(move || {
            let ram = Ram::new(memory_bytes);
            let mut front = Front::dial(&path);
            front.negotiate(super::PLAIN);
            front.share(&[&ram]).unwrap();
            let vqs: Vec<_> = (0..queues).map(|index| Vq::new(&ram, index)).collect();
            vqs.iter().enumerate().for_each(|(index, vq)| front.start(index, vq));
            (front, vqs)
        });
        while !begin.is_finished() {
            self.turn();
        }
        begin.join().unwrap()
    }

    /// Turns while the guest offers a few requests and waits for all of them, until the queue has detected the
    /// alternation: then it takes all offered chains in one round.
    pub fn learn_that_it_takes_turns(&mut self, vq: &mut Vq) {
        for _ in 0..40 {
            (0..16).for_each(|slot| vq.put(slot, 77, 0, Data::None));
            vq.publish_silently();
            let refused = self.refused() + 16;
            while self.refused() < refused {
                self.turn();
            }
            assert_eq!(std::iter::from_fn(|| vq.poll()).count(), 16);
        }
    }

    /// Turns until the export has ended.
    pub fn stop(mut self) {
        self.server.ask_to_stop();
        while !self.server.is_finished() {
            self.turn();
        }
        self.server.join();
    }
}
