//! I/O queues of an NVMe export that no lane can serve: their creation fails, and the session continues.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use blkyard_export::{
    BoundSocket, NvmeDisk, NvmeQueuePoller, NvmeQueueSession, QueueHost, QueuePort, SocketConfig, VfioUserExport,
    VfioUserServer, on_demand_queue,
};
use blkyard_mq::{HwQueue, HwQueueConfig};
use blkyard_nvme::{Psdt, Sqe, admin, io};
use blkyard_os::{LaneConfig, Lanes};

use crate::common::{AdminHost, AnyDevice, AnyQueue, SERIAL, until};

const QUEUES: u16 = 2;

/// Makes pollers on a lane, unless it is told to fail.
struct Host {
    lanes: Arc<Mutex<Lanes<NvmeQueuePoller<AnyQueue>>>>,
    device: AnyDevice,
    number: Mutex<Option<u32>>,
    fails: Arc<AtomicBool>,
}

impl QueueHost<NvmeQueueSession> for Host {
    fn open(&self, port: QueuePort<NvmeQueueSession>) -> Result<(), String> {
        if self.fails.load(SeqCst) {
            return Err("lane lane0: it is full; run more lanes".into());
        }
        let config = HwQueueConfig::default();
        let hw = HwQueue::new(self.device.queue(config.depth), Arc::new(self.device.info.clone()), config);
        let queue = NvmeQueuePoller::new(hw, (), port);
        *self.number.lock().unwrap() = Some(self.lanes.lock().unwrap().admit(0, move || queue).unwrap());
        Ok(())
    }

    fn close(&self) {
        let number = self.number.lock().unwrap().take().unwrap();
        assert!(self.lanes.lock().unwrap().remove(number).unwrap().is_some());
    }
}

#[test]
fn a_queue_without_a_lane_fails_alone() {
    let fails = Arc::new(AtomicBool::new(true));
    let lanes = Arc::new(Mutex::new(Lanes::start(1, |_| LaneConfig::default()).unwrap()));
    let device = AnyDevice::ram(0);
    let host = |_| Host {
        lanes: Arc::clone(&lanes),
        device: device.clone(),
        number: Mutex::default(),
        fails: Arc::clone(&fails),
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nvme.sock");
    let config = VfioUserExport {
        name: "nvme".into(),
        disk: NvmeDisk::new(&device.info, QUEUES, SERIAL),
        queues: (0..QUEUES).map(|queue| on_demand_queue(Box::new(host(queue)))).collect(),
        domains: Vec::new(),
    };
    let socket = SocketConfig { path: path.clone(), mode: None, group: None };
    let server = VfioUserServer::start(BoundSocket::bind(&socket).unwrap(), config).unwrap();

    let mut host = AdminHost::enable_at(&path);
    let page = |number: u64| AdminHost::BASE + number * 0x1000;
    let internal = host.admin(Sqe::create_cq(1, 8, page(3), None)).expect("it is answered");
    assert_ne!(internal & 0x7ff, 0, "no lane serves it");
    assert_eq!(host.admin(Sqe::new(admin::KEEP_ALIVE, 0)), Some(0), "the session continues");
    fails.store(false, SeqCst);
    assert_eq!(host.admin(Sqe::create_cq(1, 8, page(3), None)), Some(0));
    assert_eq!(host.admin(Sqe::create_sq(1, 8, page(2), 1)), Some(0));
    host.put(2, 0, Sqe::with_blocks(io::READ, 1, 0, 1, 0).with_data(Psdt::Prp, [page(4), 0]));
    host.write(0x1080, &[1, 0, 0, 0]);
    until("the read is complete", || host.status(3, 0) == Some(0));
    assert_eq!(server.status().session().unwrap().io_queues, 1);
    drop(host);
    server.ask_to_stop();
    server.join();
    let lanes = Arc::into_inner(lanes).expect("all hosts are gone").into_inner().unwrap();
    lanes.join().unwrap();
}
