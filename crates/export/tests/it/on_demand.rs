//! Queues whose poller is made on demand: it exists from the first start of a ring to the end of the session, and
//! counters and settings outlive it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use blkyard_export::{
    BackendConfig, BoundSocket, Handed, QueueHost, SEG_MAX, VhostUserServer, VirtqueuePoller, VirtqueuePort,
    VirtqueueSession, on_demand_queue,
};
use blkyard_mq::{HwQueue, HwQueueConfig};
use blkyard_os::Lanes;
use blkyard_virtio::{BlkConfig, SerialId};

use crate::common::{
    AnyDevice, AnyQueue, Front, PATIENCE, Ram, Request, SERIAL, Vq, World, end, one_queue, start_lanes, until,
};

const QUEUES: usize = 4;

/// Makes pollers on a lane, and counts them.
struct Host {
    lanes: Arc<Mutex<Lanes<VirtqueuePoller<AnyQueue>>>>,
    device: AnyDevice,
    number: Mutex<Option<u32>>,
    pollers: Arc<AtomicUsize>,
    fails: Arc<AtomicBool>,
}

impl QueueHost<VirtqueueSession> for Host {
    fn open(&self, port: VirtqueuePort) -> Result<(), String> {
        if self.fails.load(SeqCst) {
            return Err("lane lane0: it is full; run more lanes".into());
        }
        let config = HwQueueConfig::default();
        let hw = HwQueue::new(self.device.queue(config.depth), Arc::new(self.device.info.clone()), config);
        let queue = VirtqueuePoller::new(hw, SerialId::new(SERIAL).unwrap(), port);
        *self.number.lock().unwrap() = Some(self.lanes.lock().unwrap().admit(0, move || queue).unwrap());
        self.pollers.fetch_add(1, SeqCst);
        Ok(())
    }

    fn close(&self) {
        let number = self.number.lock().unwrap().take().unwrap();
        assert!(self.lanes.lock().unwrap().remove(number).unwrap().is_some());
        self.pollers.fetch_sub(1, SeqCst);
    }
}

/// An export whose pollers are counted.
struct Hosts {
    lanes: Arc<Mutex<Lanes<VirtqueuePoller<AnyQueue>>>>,
    pollers: Arc<AtomicUsize>,
    fails: Arc<AtomicBool>,
}

impl Hosts {
    fn new() -> Hosts {
        Hosts { lanes: Arc::new(Mutex::new(start_lanes(1))), pollers: Arc::default(), fails: Arc::default() }
    }

    fn living(&self) -> usize {
        self.pollers.load(SeqCst)
    }

    fn config(&self) -> BackendConfig {
        let device = AnyDevice::ram(0);
        let host = |_| Host {
            lanes: Arc::clone(&self.lanes),
            device: device.clone(),
            number: Mutex::default(),
            pollers: Arc::clone(&self.pollers),
            fails: Arc::clone(&self.fails),
        };
        let queues = (0..QUEUES).map(|queue| on_demand_queue(Box::new(host(queue)))).collect();
        let disk = BlkConfig::new(&device.info, QUEUES as u16, SEG_MAX, true);
        BackendConfig { name: "on demand".into(), disk, queues, domains: Vec::new() }
    }

    fn end(self) {
        assert_eq!(self.living(), 0);
        end(Arc::into_inner(self.lanes).expect("all hosts are gone").into_inner().unwrap()).unwrap();
    }
}

#[test]
fn takeover_opens_queues_that_run_only() {
    let [old, new] = [(); 2].map(|()| Hosts::new());
    let world = World::serving((vec![old.config()], start_lanes(1)));
    let (front, mut vq) = one_queue(&world.exports[0]);
    assert_eq!(vq.write(0, &[7; 512]), 0);
    let handed = world.exports[0].server().hand().hand_over().recv_timeout(PATIENCE).unwrap();
    let Handed { state, rest } = handed.unwrap();
    let socket = BoundSocket::adopt(state.listener, state.path, state.identity);
    let taking = VhostUserServer::take_over(socket, new.config(), state.offered, state.wce, state.session);
    let taking = taking.unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(new.living(), 1, "before the other process lets go, and no other ring runs");
    rest.let_go();
    let server = taking.go();
    assert_eq!(vq.write(0, &[8; 512]), 0);
    assert_eq!(new.living(), 1);
    server.ask_to_stop();
    server.join();
    drop(front);
    world.stop();
    old.end();
    new.end();
}

#[test]
fn pollers_live_from_first_start_to_end_of_session() {
    let hosts = Hosts::new();
    let config = hosts.config();
    let world = World::serving((vec![config], start_lanes(1)));
    let export = &world.exports[0];
    let living = || hosts.living();
    let limit = || export.watch(0).look().unwrap().recv_timeout(PATIENCE).unwrap().hw.depth_limit;
    assert_eq!(living(), 0);
    assert!(!export.watch(0).is_open() && export.watch(0).look().is_none());
    // It is noted for the poller to come.
    assert_eq!(export.server().hand().set_depth(7).recv_timeout(PATIENCE), Ok(Ok(7)));
    assert_eq!(living(), 0);

    let front = Front::connect(export);
    assert_eq!(living(), 0, "nothing was started");
    front.leave(export);
    for sessions in 1..4 {
        let (front, mut vq) = one_queue(export);
        assert_eq!(living(), 1, "one ring was started");
        assert_eq!(limit(), 7);
        assert_eq!(vq.write(0, &[sessions; 512]), 0);
        assert_eq!(vq.read(0, 512), [sessions; 512]);
        front.leave(export);
        until("its poller has left", || living() == 0);
        let ios: u64 = blkyard_mq::OpClass::ALL.map(|class| export.stats(0).snapshot().op(class).ios).iter().sum();
        assert_eq!(ios, 2 * u64::from(sessions), "of all sessions");
    }

    hosts.fails.store(true, SeqCst);
    let ram = Ram::new(1 << 20);
    let front = Front::connect(export);
    front.share(&[&ram]).unwrap();
    let vq = Vq::new(&ram, 0);
    front.set_ring(0, &vq);
    assert!(front.set_event(Request::SetVringKick, 0, Some(&vq.kick)), "it is not enabled yet");
    assert!(
        !front.raw.accepts(Request::SetVringEnable, &[0, 1].map(u32::to_ne_bytes).concat(), &[]),
        "it has no poller"
    );
    drop(front);
    hosts.fails.store(false, SeqCst);
    let (front, mut vq) = one_queue(export);
    assert_eq!(vq.write(0, &[9; 512]), 0);
    assert_eq!(living(), 1);
    world.stop();
    drop(front);
    hosts.end();
}
