//! A daemon: the rings of a guest as client queues of the export core, over NVMe/TCP associations of one or two paths.
//!
//! The control sides, drivers and pollers are those of the product; only its threads are left out. The glue here is
//! that of `serve`: it opens the paths, makes hardware queues over them, and runs the rings.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use blkyard_attach::{TcpAssociation, TcpNamespace, TcpNamespaceConfig};
use blkyard_export::{Suspension, VirtqueuePoller, VirtqueueRemote, VirtqueueSetup, queue_pair};
use blkyard_mpath::{MultipathQueue, MultipathSettings, MultipathStats, PathMonitor, PathRules, QueuePath};
use blkyard_mq::{Driver, HwQueue, HwQueueConfig, Merging, Poller, PollerState, QueueKind, Wake};
use blkyard_nvme::FabricsHostConfig;
use blkyard_sim::Rng;
use blkyard_virtio::{RingBase, SerialId};

use crate::lane::WorldLane;
use crate::network::Network;
use crate::socket::{WorldClock, WorldConnector, address};

type WorldDriver = Box<dyn Driver<WorldLane>>;

/// Pause before a daemon that could not open its disk is started again, ns.
const RESTART_NS: u64 = 1_000_000_000;
/// Requests of a hardware queue.
const DEPTH: usize = 16;
/// Rounds of a lane without time passing: more is a loop without an end.
const ROUNDS_MAX: usize = 100_000;

/// How daemons are made.
#[derive(Clone, Debug)]
pub(crate) struct DaemonConfig {
    pub(crate) host: FabricsHostConfig,
    pub(crate) paths: usize,
    pub(crate) rules: PathRules,
    /// Counters of the queues over several paths, of all daemons.
    pub(crate) path_stats: Rc<RefCell<Vec<Arc<MultipathStats>>>>,
    /// Whether requests of the daemon before it wait until that is silent.
    pub(crate) waits_for_silence: bool,
    pub(crate) no_path_ns: u64,
    pub(crate) io_max_ns: u64,
    pub(crate) merging: bool,
}

/// Wakes no thread: the world runs all lanes.
pub(crate) struct NoWake;

impl Wake for NoWake {
    fn wake(&self) {}
}

/// A ring with its hardware queue, on its lane.
struct ServedRing {
    lane: WorldLane,
    poller: VirtqueuePoller<WorldDriver>,
    remote: VirtqueueRemote,
    started: Receiver<Result<(), String>>,
    is_started: bool,
    /// Its suspension, until it has drained.
    suspension: Option<Suspension<RingBase>>,
}

/// A daemon.
pub(crate) struct WorldDaemon {
    network: Network,
    clock: WorldClock,
    config: DaemonConfig,
    rng: Rng,
    associations: Vec<TcpAssociation>,
    namespaces: Vec<Option<TcpNamespace>>,
    rings: Vec<ServedRing>,
    /// Time of the next attempt to open the disk, ns.
    again_ns: Option<u64>,
    is_ending: bool,
}

impl WorldDaemon {
    pub(crate) fn start(network: &Network, clock: &WorldClock, config: &DaemonConfig, rng: Rng) -> WorldDaemon {
        let mut daemon = WorldDaemon {
            network: network.clone(),
            clock: clock.clone(),
            config: config.clone(),
            rng,
            associations: Vec::new(),
            namespaces: Vec::new(),
            rings: Vec::new(),
            again_ns: None,
            is_ending: false,
        };
        daemon.open();
        daemon
    }

    fn open(&mut self) {
        self.namespaces.clear();
        self.associations = (0..self.config.paths)
            .map(|path| {
                let config = TcpNamespaceConfig {
                    name: format!("path {path}"),
                    address: SocketAddr::to_string(&address(path)),
                    host: self.config.host.clone(),
                    namespace: None,
                    io_max_ns: self.config.io_max_ns,
                    clock: Arc::new(self.clock.clone()),
                };
                let connector = Box::new(WorldConnector(self.network.clone()));
                TcpAssociation::start(config, connector).expect("descriptors for an association")
            })
            .collect();
        self.namespaces = (0..self.config.paths).map(|_| None).collect();
    }

    /// Whether all rings are served.
    pub(crate) fn is_serving(&self) -> bool {
        !self.rings.is_empty() && self.rings.iter().all(|ring| ring.is_started)
    }

    /// State of the paths.
    pub(crate) fn monitors(&self) -> impl Iterator<Item = Arc<PathMonitor>> {
        self.namespaces.iter().flatten().map(TcpNamespace::as_path)
    }

    /// When it has something to do by itself.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        let controls = self.associations.iter().filter_map(TcpAssociation::deadline).map(|at| self.clock.ns_of(at));
        let lanes = self.rings.iter().flat_map(|ring| {
            [ring.lane.next_ns(), Poller::<WorldLane>::deadline_ns(&ring.poller)].into_iter().flatten()
        });
        controls.chain(lanes).chain(self.again_ns).min()
    }

    /// Runs until nothing is left to do now.
    pub(crate) fn run(&mut self, setups: impl Fn(usize) -> VirtqueueSetup, rings: usize) {
        let now_ns = self.network.now_ns();
        if self.again_ns.is_some_and(|again_ns| now_ns >= again_ns) {
            self.again_ns = None;
            self.open();
        }
        for _ in 0..ROUNDS_MAX {
            let before = self.network.changes();
            self.run_associations();
            if self.rings.is_empty() && self.again_ns.is_none() && !self.is_ending && self.try_open() {
                self.serve(&setups, rings);
            }
            let mut is_busy = false;
            for ring in &mut self.rings {
                is_busy |= ring.run(now_ns);
            }
            if !is_busy && self.network.changes() == before {
                return;
            }
        }
        panic!("a daemon does not come to rest");
    }

    /// Opens the paths. Whether all are.
    fn try_open(&mut self) -> bool {
        for (association, namespace) in self.associations.iter_mut().zip(&mut self.namespaces) {
            if namespace.is_some() {
                continue;
            }
            let Ok(found) = association.take_namespace() else {
                self.namespaces.clear();
                self.associations.clear();
                self.again_ns = Some(self.network.now_ns() + RESTART_NS);
                return false;
            };
            *namespace = found;
        }
        self.is_open()
    }

    /// Serves the rings over the open paths.
    fn serve(&mut self, setups: &impl Fn(usize) -> VirtqueueSetup, rings: usize) {
        let peers: Vec<_> = self.namespaces.iter().flatten().map(|path| Arc::clone(path.peer())).collect();
        if self.config.paths > 1 {
            for namespace in self.namespaces.iter().flatten() {
                namespace.as_path();
                namespace.set_peers(&peers);
            }
        }
        for ring in 0..rings {
            let driver = self.driver();
            let mut info = self.namespaces[0].as_ref().map(|path| path.info().clone()).unwrap_or_default();
            if !self.config.waits_for_silence {
                info.silence_ns = 0;
            }
            let merging = if self.config.merging { Merging::default() } else { Merging::Off };
            let config = HwQueueConfig { depth: DEPTH, merging, ..HwQueueConfig::default() };
            let hw = HwQueue::new(driver, Arc::new(info), config);
            let (remote, port) = queue_pair();
            let serial = SerialId::new("stack").expect("a short serial number");
            let mut poller = VirtqueuePoller::new(hw, serial, port);
            let mut lane = WorldLane::new(&self.network, Rng::new(self.rng.draw()));
            let waker: Arc<dyn Wake> = Arc::new(NoWake);
            poller.enter(&mut lane, &waker);
            let started = remote.begin_run(setups(ring)).expect("its lane is there");
            self.rings.push(ServedRing { lane, poller, remote, started, is_started: false, suspension: None });
        }
    }

    /// Whether all paths are open.
    pub(crate) fn is_open(&self) -> bool {
        self.namespaces.iter().all(Option::is_some) && !self.namespaces.is_empty()
    }

    /// Whether a path could not be opened.
    pub(crate) fn has_failed(&self) -> bool {
        self.again_ns.is_some()
    }

    /// Opens the paths as far as that goes now, and serves nothing.
    pub(crate) fn run_opening(&mut self) {
        for _ in 0..ROUNDS_MAX {
            let before = self.network.changes();
            self.run_associations();
            if !self.has_failed() && !self.is_open() {
                self.try_open();
            }
            if self.network.changes() == before {
                return;
            }
        }
        panic!("a daemon does not come to rest");
    }

    fn run_associations(&mut self) {
        // Messages between paths take a step more.
        for _ in 0..2 {
            self.associations.iter_mut().for_each(|association| {
                association.run_once();
            });
        }
    }

    /// Suspends all rings: requests in flight end, and no other is fetched.
    pub(crate) fn suspend(&mut self) {
        for ring in &mut self.rings {
            ring.suspension = Some(ring.remote.suspend().expect("its lane is there"));
        }
    }

    /// Whether all rings have drained.
    pub(crate) fn is_suspended(&mut self) -> bool {
        for ring in &mut self.rings {
            let has_drained = |suspension: &mut Suspension<_>| {
                suspension.wait_until(Some(Instant::now())).expect("its lane is there")
            };
            ring.suspension.take_if(has_drained);
        }
        self.rings.iter().all(|ring| ring.suspension.is_none())
    }

    /// Goes on with rings that are suspended.
    pub(crate) fn resume(&mut self, setups: impl Fn(usize) -> VirtqueueSetup) {
        for (number, ring) in self.rings.iter_mut().enumerate() {
            ring.started = ring.remote.begin_run(setups(number)).expect("its lane is there");
            ring.is_started = false;
        }
    }

    /// The driver of a hardware queue.
    fn driver(&mut self) -> WorldDriver {
        let mut queues = Vec::new();
        for (association, namespace) in self.associations.iter_mut().zip(self.namespaces.iter().flatten()) {
            let opening = namespace.begin_queue(QueueKind::Default, DEPTH).expect("the depth is allowed");
            association.run_once();
            let driver = opening.wait(Duration::ZERO).expect("the controller has queues for all rings");
            let monitor = (self.config.paths > 1).then(|| namespace.as_path());
            queues.push(QueuePath { driver, monitor, node: 0 });
        }
        if self.config.paths == 1 {
            let Some(queue) = queues.pop() else { unreachable!("there is one path") };
            return Box::new(queue.driver);
        }
        let settings = Arc::new(MultipathSettings::new(self.config.rules, self.config.no_path_ns));
        let queue = MultipathQueue::<_, OwnedFd>::new(queues, settings, DEPTH, 0, None);
        self.config.path_stats.borrow_mut().push(Arc::clone(queue.stats()));
        Box::new(queue)
    }

    /// The process dies.
    pub(crate) fn die(self) {
        for ring in self.rings {
            let ServedRing { lane, poller, remote, .. } = ring;
            // Nothing that is dropped sends anything.
            drop((poller, remote));
            lane.die();
        }
        drop(self.namespaces);
        drop(self.associations);
    }

    /// Begins to end in order. No request is in flight.
    pub(crate) fn end(&mut self) {
        self.is_ending = true;
        for ring in self.rings.drain(..) {
            let ServedRing { mut lane, mut poller, remote, .. } = ring;
            assert!(poller.leave(&mut lane), "a ring without requests leaves its lane");
            drop((poller, remote));
            // Streams of owners that are gone are closed.
            lane.run();
            assert_eq!(lane.open(), 0, "streams that nobody owns");
        }
        self.namespaces.clear();
    }

    /// Whether all associations have ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.associations.retain_mut(TcpAssociation::run_once);
        self.associations.is_empty()
    }
}

impl ServedRing {
    /// Runs the lane until it has nothing to do. Returns whether it had.
    fn run(&mut self, now_ns: u64) -> bool {
        let mut was_busy = false;
        for _ in 0..ROUNDS_MAX {
            let has_events = self.lane.run();
            let state = self.poller.run_once(&mut self.lane, now_ns);
            if let Ok(started) = self.started.try_recv() {
                started.expect("the ring is valid");
                self.is_started = true;
            }
            if state != PollerState::Busy && !has_events {
                return was_busy;
            }
            was_busy = true;
        }
        panic!("a lane does not come to rest");
    }
}
