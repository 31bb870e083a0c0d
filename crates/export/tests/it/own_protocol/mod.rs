//! The core of the exports with a protocol of its own: queues, server, orders, stop and takeover without a line of
//! vhost-user.

mod by_hand;
mod mini;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use blkyard_export::{
    BoundSocket, Changed, DetachedQueue, ExportConfig, Handed, QueuePoller, QueueRemote, QueueShare, QueueWatch,
    Server, SocketConfig, queue_pair,
};
use blkyard_mq::{
    BlockDevice, DeviceInfo, FairConfig, HwQueue, HwQueueConfig, NullConfig, OpClass, RamDevice, RamQueue, RateConfig,
    RateLimit, SchedulerConfig,
};
use blkyard_os::{LaneConfig, Lanes};
use mini::{MiniDisk, MiniOp, MiniQueueSession, MiniRequest, MiniRing, MiniSession};

const PATIENCE: Duration = Duration::from_secs(30);
const IDENTITY: [u8; 512] = [b'm'; 512];
const QUEUES: usize = 2;

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "{what}: waited in vain");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// An export of two queues that share a hardware queue, on a lane.
struct MiniWorld {
    server: Option<Server<MiniSession>>,
    lanes: Lanes<QueuePoller<RamQueue, MiniQueueSession>>,
    watches: Vec<QueueWatch<MiniQueueSession>>,
    rings: Vec<Arc<MiniRing>>,
    device: RamDevice,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

fn device(latency_ns: u64) -> RamDevice {
    let info = DeviceInfo { capacity_sectors: 2048, volatile_cache: true, ..DeviceInfo::default() };
    RamDevice::new(info, NullConfig { latency_ns, bytes_per_s: 0 }).unwrap()
}

/// Lanes with the queues of an export, and its configuration.
fn queues(
    device: &RamDevice,
    rings: &[Arc<MiniRing>],
) -> (Lanes<QueuePoller<RamQueue, MiniQueueSession>>, ExportConfig<MiniSession>) {
    let mut lanes = Lanes::start(1, |_| LaneConfig::default()).unwrap();
    let usual = HwQueueConfig::default();
    let config = HwQueueConfig { bios_max: usual.bios_max * QUEUES, ..usual };
    let (driver, info) = (device.queue(config.depth), Arc::new(device.info().clone()));
    let share = QueueShare { bios: usual.bios_max, depth: usual.depth, devices: 1 };
    let (remotes, ports): (Vec<QueueRemote<_>>, Vec<_>) = (0..QUEUES).map(|_| queue_pair()).unzip();
    let detached = ports.into_iter().map(|port| DetachedQueue::new(IDENTITY, port, share).unwrap());
    let mut detached = detached.collect::<Vec<_>>().into_iter();
    let (first, hw_info) = (detached.next().unwrap(), Arc::clone(&info));
    lanes.admit(0, move || QueuePoller::of_detached(HwQueue::new(driver, hw_info, config), first)).unwrap();
    detached.for_each(|queue| remotes[0].mover().adopt(queue, std::time::Duration::from_secs(30)).unwrap());
    let disk =
        MiniDisk { info: DeviceInfo::clone(&info), queues: QUEUES as u16, write_back: true, rings: rings.to_vec() };
    (lanes, ExportConfig { name: "mini".into(), disk, queues: remotes, domains: Vec::new() })
}

impl MiniWorld {
    fn new(latency_ns: u64) -> MiniWorld {
        let (folder, device, rings) = (tempfile::tempdir().unwrap(), device(latency_ns), MiniRing::several(QUEUES));
        let path = folder.path().join("mini.sock");
        let (lanes, config) = queues(&device, &rings);
        let watches = config.queues.iter().map(QueueRemote::watch).collect();
        let socket = SocketConfig { path: path.clone(), mode: None, group: None };
        let server = Server::start(BoundSocket::bind(&socket).unwrap(), config).unwrap();
        MiniWorld { server: Some(server), lanes, watches, rings, device, path, _folder: folder }
    }

    fn server(&self) -> &Server<MiniSession> {
        self.server.as_ref().unwrap()
    }

    fn connect(&self) -> Client {
        Client(UnixStream::connect(&self.path).unwrap())
    }

    fn counted(&self, queue: usize, class: OpClass) -> u64 {
        self.watches[queue].stats()[0].snapshot().op(class).ios
    }

    /// Submits one request to a queue; returns its status.
    fn io(&self, queue: usize, op: MiniOp, sector: u64, slot: u64) -> u8 {
        self.rings[queue].offer(MiniRequest { id: 7, op, sector, slot });
        let mut status = None;
        until("a request is completed", || {
            status = self.rings[queue].poll();
            status.is_some()
        });
        let Some((7, status)) = status else { panic!("{status:?}") };
        status
    }

    fn stop(mut self) {
        let server = self.server.take().unwrap();
        server.ask_to_stop();
        until("the export ends", || server.is_finished());
        server.join();
        self.lanes.join().unwrap();
        assert!(!self.path.exists(), "its socket goes with it");
    }
}

/// The client's end of a connection.
struct Client(UnixStream);

impl Client {
    /// Sends a command and returns the number of its reply; `None` if the connection ends.
    fn ask(&mut self, what: u8, queue: u8) -> Option<u64> {
        self.0.set_read_timeout(Some(PATIENCE)).unwrap();
        self.0.write_all(&[what, queue]).unwrap();
        let mut answer = [0; 9];
        self.0.read_exact(&mut answer).ok()?;
        Some(u64::from_ne_bytes(answer[1..].try_into().unwrap()))
    }

    fn run_all(&mut self) {
        (0..QUEUES as u8).for_each(|queue| assert_eq!(self.ask(b'R', queue), Some(0)));
    }
}

#[test]
fn requests_of_an_own_protocol_reach_the_device() {
    let world = MiniWorld::new(0);
    let mut client = world.connect();
    client.run_all();
    for round in 0..100 {
        let (queue, other) = (round % QUEUES, (round + 1) % QUEUES);
        world.rings[queue].set_bytes(1, &[round as u8; 512]);
        assert_eq!(world.io(queue, MiniOp::Write, 5, 1), 0);
        assert_eq!(world.io(other, MiniOp::Read, 5, 2), 0);
        assert_eq!(world.rings[other].bytes(2), [round as u8; 512]);
    }
    assert_eq!(world.io(0, MiniOp::Identify, 0, 3), 0);
    assert_eq!(world.rings[0].bytes(3), IDENTITY);
    assert_eq!(world.io(1, MiniOp::Nonsense, 0, 0), 2);
    assert_eq!(world.watches[1].refusals().unwrap().load(SeqCst), 1);
    assert_eq!(world.io(1, MiniOp::Read, 1 << 40, 0), 1, "the core judges the range");
    assert_eq!((world.counted(0, OpClass::Write), world.counted(1, OpClass::Write)), (50, 50));
    assert_eq!(client.ask(b'F', 0), Some(1), "a flush of the control path");
    assert!(world.rings[0].call.take(), "it was called");
    let ring = world.watches[0].look().unwrap().recv_timeout(PATIENCE).unwrap().ring.unwrap();
    assert_eq!((ring.next, ring.in_flight), (101, 0));
    world.stop();
}

#[test]
fn own_queue_suspends_with_io_in_flight_and_goes_on() {
    let world = MiniWorld::new(20_000_000);
    let mut client = world.connect();
    client.run_all();
    for id in 0..40 {
        world.rings[0].offer(MiniRequest { id, op: MiniOp::Write, sector: u64::from(id), slot: 0 });
    }
    until("some are in flight", || world.rings[0].waiting() < 40);
    let fetched = client.ask(b'S', 0).unwrap();
    assert!(fetched > 0, "what was fetched is finished");
    let completed = std::iter::from_fn(|| world.rings[0].poll()).count() as u64;
    assert_eq!((completed, world.rings[0].waiting() as u64), (fetched, 40 - fetched));
    // No request is fetched meanwhile; the other queue is not affected.
    world.rings[0].offer(MiniRequest { id: 40, op: MiniOp::Read, sector: 0, slot: 0 });
    assert_eq!(world.io(1, MiniOp::Read, 0, 1), 0);
    assert_eq!((world.rings[0].poll(), world.rings[0].waiting() as u64), (None, 41 - fetched));
    assert_eq!(client.ask(b'R', 0), Some(0));
    let mut rest = 0;
    until("the rest is done", || {
        rest += std::iter::from_fn(|| world.rings[0].poll()).count() as u64;
        rest == 41 - fetched
    });
    assert_eq!(client.ask(b'S', 0), Some(41));
    world.stop();
}

#[test]
fn orders_from_outside_reach_an_own_protocol() {
    let world = MiniWorld::new(0);
    let hand = world.server().hand().clone();
    let grown = |sectors| Arc::new(DeviceInfo { capacity_sectors: sectors, ..world.device.info().clone() });
    assert_eq!(hand.change(0, grown(1024)).recv_timeout(PATIENCE).unwrap(), Ok(Changed::Unseen));
    let mut client = world.connect();
    client.run_all();
    assert_eq!(client.ask(b'C', 0), Some(1024));
    assert_eq!(hand.change(0, grown(2048)).recv_timeout(PATIENCE).unwrap(), Ok(Changed::Untold));
    assert_eq!(client.ask(b'C', 0), Some(2048));
    assert_eq!(world.io(1, MiniOp::Read, 2000, 0), 0, "it goes on, with the new size");
    assert_eq!(hand.set_depth(4).recv_timeout(PATIENCE).unwrap(), Ok(4));
    assert_eq!(hand.schedule(0, SchedulerConfig::Fair(FairConfig::default())).recv_timeout(PATIENCE).unwrap(), Ok(()));
    let limit = Arc::new(RateLimit::new(RateConfig { iops: 1_000_000, bytes_per_s: 0, burst_ms: 10 }).unwrap());
    assert_eq!(hand.set_rates(0, vec![limit]).recv_timeout(PATIENCE).unwrap(), Ok(()));
    assert_eq!(world.io(0, MiniOp::Write, 0, 0), 0);
    assert_eq!(hand.offer(1, Vec::new()).recv_timeout(PATIENCE).unwrap(), Ok(Changed::Silent));
    let status = world.server().status();
    assert_eq!(
        (status.is_connected(), status.sessions(), status.session(), status.depth()),
        (true, 1, Some(2), Some(4))
    );
    // An unknown command ends the session; the next front-end is served with the presently offered queues.
    assert_eq!(client.ask(b'?', 0), None);
    let mut next = world.connect();
    assert_eq!((next.ask(b'R', 0), next.ask(b'R', 1)), (Some(0), None));
    world.stop();
}

#[test]
fn export_of_an_own_protocol_stops_with_io_in_flight() {
    let world = MiniWorld::new(50_000_000);
    let mut client = world.connect();
    client.run_all();
    world.rings[1].offer(MiniRequest { id: 1, op: MiniOp::Write, sector: 0, slot: 0 });
    until("it is in flight", || world.rings[1].waiting() == 0);
    let ring = Arc::clone(&world.rings[1]);
    world.stop();
    assert_eq!(ring.poll(), Some((1, 0)), "what was fetched is finished");
}

#[test]
fn session_of_an_own_protocol_is_handed_over() {
    let mut world = MiniWorld::new(0);
    let mut client = world.connect();
    client.run_all();
    assert_eq!(world.io(0, MiniOp::Write, 3, 0), 0);
    let handed = world.server().hand().hand_over().recv_timeout(PATIENCE).unwrap().unwrap();
    let Handed { state, rest } = handed;
    world.rings[0].set_bytes(0, &[9; 512]);
    world.rings[0].offer(MiniRequest { id: 7, op: MiniOp::Write, sector: 4, slot: 0 });
    let (lanes, config) = queues(&world.device, &world.rings);
    let socket = BoundSocket::adopt(state.listener, state.path, state.identity);
    let taking = Server::take_over(socket, config, state.offered, state.wce, state.session).unwrap();
    assert_eq!(world.rings[0].waiting(), 1, "nobody serves it before the other lets go");
    rest.let_go();
    let heir = taking.go();
    until("the old export ends", || world.server().is_finished());
    drop(world.server.take());
    std::mem::replace(&mut world.lanes, lanes).join().unwrap();
    world.server = Some(heir);
    let mut done = None;
    until("the request is completed by the heir", || {
        done = world.rings[0].poll();
        done.is_some()
    });
    assert_eq!(done, Some((7, 0)));
    assert_eq!(world.io(1, MiniOp::Read, 4, 1), 0);
    assert_eq!(world.rings[1].bytes(1), [9; 512], "both are of the same disk");
    assert_eq!(client.ask(b'S', 0), Some(2), "it counts on");
    world.stop();
}
