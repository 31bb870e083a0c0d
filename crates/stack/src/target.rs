//! A target: a process with two ports of one subsystem, over one device.
//!
//! The ports are exports of the product: an [`NvmeTcpSession`] each, with the pollers of its queues. What stands for
//! their process is here: it runs lanes and control paths in turn, lets time pass on their clock, and has a
//! [stream](TargetStream) to the network for each connection.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use blkyard_export::{
    ControllerClock, FrontEndSession, NvmeTcpDisk, NvmeTcpExport, NvmeTcpQueuePoller, NvmeTcpSession, PortDirectory,
    SessionStep, queue_pair,
};
use blkyard_mq::{DeviceInfo, HwQueue, HwQueueConfig, Merging, Poller, PollerState, Wake};
use blkyard_nvme::fabrics::Nqn;

use crate::daemon::NoWake;
use crate::medium::{Medium, MediumQueue};
use crate::network::{Ending, Network};
use crate::socket::address;
use crate::stream::TargetStream;

/// Client queues of a port: those of associations that end, too.
const QUEUES: u16 = 8;
const DEPTH: usize = 16;
const BIOS_MAX: usize = 64;
/// Rounds of a lane or a control path without time passing: more is a loop without an end.
const ROUNDS_MAX: usize = 10_000;
/// By how much the clock is slow of a target that does not keep its silence.
const SLOWNESS: u64 = 50;
/// Address of all hosts.
const HOST: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 1, 1)), 50_000);

/// How a target is made.
#[derive(Clone, Debug)]
pub(crate) struct TargetConfig {
    pub(crate) info: DeviceInfo,
    pub(crate) nqn: Nqn,
    pub(crate) ports: usize,
    /// Whether its controllers can have each other reset.
    pub(crate) has_resets: bool,
    /// Whether associations end with their keep-alive timer, and not long after it.
    pub(crate) keeps_silent: bool,
    /// Whether queues look at that timer by themselves.
    pub(crate) keeps_deadlines: bool,
    /// Whether commands wait while the device has those of an association that has ended.
    pub(crate) holds: bool,
    /// Whether writes of a queue must come in the order of their versions.
    pub(crate) judges_order: bool,
}

struct ServedPort {
    session: NvmeTcpSession,
    /// With one hardware queue each.
    lanes: Vec<NvmeTcpQueuePoller<MediumQueue>>,
    streams: Vec<TargetStream>,
}

/// The process.
pub(crate) struct WorldTarget {
    network: Network,
    config: TargetConfig,
    directory: Arc<PortDirectory>,
    ports: Vec<ServedPort>,
    clock: ControllerClock,
    clock_ns: Arc<AtomicU64>,
    /// Until then it does nothing.
    pub(crate) hung_ns: u64,
    /// Pieces that came though their host had left the connection.
    pub(crate) ghosts: u64,
}

impl WorldTarget {
    /// A process that listens. `life` differs for each.
    pub(crate) fn start(
        network: &Network,
        medium: &Rc<RefCell<Medium>>,
        config: TargetConfig,
        life: u64,
    ) -> WorldTarget {
        let clock_ns = Arc::new(AtomicU64::new(0));
        let clock = ControllerClock::simulated(Arc::clone(&clock_ns));
        let directory = Arc::new(PortDirectory::default());
        let port_of = |port: usize| {
            network.set_port(port, true, true);
            let (queues, links): (Vec<_>, Vec<_>) = (0..QUEUES).map(|_| queue_pair()).unzip();
            let disk = NvmeTcpDisk::new(config.nqn.clone(), vec![(1, config.info.clone())], QUEUES, "stack");
            let disk = disk.with_ports(Arc::clone(&directory));
            let disk = disk.with_first_controller(1 + port as u16 * NvmeTcpDisk::CONTROLLER_IDS);
            let disk = disk.with_instance_seed(config.has_resets.then_some(life * 16 + port as u64));
            let export = NvmeTcpExport { name: format!("port {port}"), disk, queues, domains: Vec::new() };
            // Nobody connects to it: connections come from the network of the world.
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
            let session = NvmeTcpSession::simulated(listener, export, clock.clone()).expect("memory for a port");
            let lanes = links.into_iter().map(|link| {
                let queue = MediumQueue::new(medium, config.judges_order);
                let limits = HwQueueConfig {
                    depth: DEPTH,
                    bios_max: BIOS_MAX,
                    merging: Merging::Off,
                    ..HwQueueConfig::default()
                };
                let hw = HwQueue::new(queue, Arc::new(config.info.clone()), limits);
                let mut lane = NvmeTcpQueuePoller::new(hw, (), link);
                let waker: Arc<dyn Wake> = Arc::new(NoWake);
                lane.enter(&mut (), &waker);
                lane
            });
            ServedPort { session, lanes: lanes.collect(), streams: Vec::new() }
        };
        WorldTarget {
            network: network.clone(),
            ports: (0..config.ports).map(port_of).collect(),
            config,
            directory,
            clock,
            clock_ns,
            hung_ns: 0,
            ghosts: 0,
        }
    }

    /// The process dies, with its machine if `ending` says so.
    pub(crate) fn die(self, ending: Ending) {
        for (number, port) in self.ports.iter().enumerate() {
            port.streams.iter().for_each(|stream| stream.die(&self.network, ending));
            self.network.set_port(number, false, ending != Ending::Silence);
        }
    }

    /// Associations, queues and connections that it has.
    pub(crate) fn in_use(&self) -> usize {
        let of_port = |port: &ServedPort| {
            let view = port.session.view();
            view.hosts.len() + view.queues + port.streams.len()
        };
        self.ports.iter().map(of_port).sum()
    }

    /// Factor between the time of the world and that of its clock.
    fn slowness(&self) -> u64 {
        if self.config.keeps_silent { 1 } else { SLOWNESS }
    }

    /// When it has something to do by itself.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        let controls = self.ports.iter().filter_map(|port| port.session.deadline());
        let controls = controls.map(|at| self.clock.ns_of(at) * self.slowness());
        let lanes = self.ports.iter().flat_map(|port| port.lanes.iter().filter_map(Poller::<()>::deadline_ns));
        controls.chain(lanes).min().map(|at_ns| at_ns.max(self.hung_ns))
    }

    /// Does all there is to do now. Returns whether anything moved.
    pub(crate) fn run(&mut self, now_ns: u64) -> bool {
        if now_ns < self.hung_ns {
            return false;
        }
        let time_ns = now_ns / self.slowness();
        let mut is_busy = self.pass();
        // Lanes may run before the control path does.
        self.clock_ns.store(if self.config.keeps_deadlines { time_ns } else { 0 }, Relaxed);
        for lane in self.ports.iter_mut().flat_map(|port| &mut port.lanes) {
            is_busy |= run_lane(lane, now_ns);
        }
        self.clock_ns.store(time_ns, Relaxed);
        for (number, port) in self.ports.iter_mut().enumerate() {
            while let Some(connection) = self.network.accept(number) {
                let (stream, socket) = TargetStream::new(connection).expect("descriptors for a connection");
                port.session.add_stream(socket, [address(number), HOST]).expect("memory for a connection");
                port.streams.push(stream);
                is_busy = true;
            }
            is_busy |= run_control(&mut port.session);
        }
        if !self.config.holds {
            self.directory.release_all();
        }
        is_busy | self.pass()
    }

    /// Passes bytes on between its sockets and the network.
    fn pass(&mut self) -> bool {
        let mut is_busy = false;
        for port in &mut self.ports {
            for stream in &mut port.streams {
                is_busy |= stream.run(&self.network);
                self.ghosts += std::mem::take(&mut stream.ghosts);
            }
            port.streams.retain(|stream| !stream.is_over);
        }
        is_busy
    }
}

/// Runs a lane until it may sleep. Returns whether it had work.
fn run_lane(lane: &mut NvmeTcpQueuePoller<MediumQueue>, now_ns: u64) -> bool {
    for round in 0..ROUNDS_MAX {
        if lane.run_once(&mut (), now_ns) == PollerState::Busy {
            continue;
        }
        let has_work = Poller::<()>::arm(lane);
        Poller::<()>::disarm(lane);
        if !has_work {
            return round > 0;
        }
    }
    panic!("a lane of the target does not come to rest");
}

/// Runs a control path until it waits. Returns whether it had something to do.
fn run_control(session: &mut NvmeTcpSession) -> bool {
    for round in 0..ROUNDS_MAX {
        match session.step() {
            SessionStep::Handled => {}
            SessionStep::Waiting => return round > 0,
            SessionStep::Over(error) => panic!("a port of the target has ended: {error}"),
        }
    }
    panic!("a control path of the target does not come to rest");
}
