//! The control path of an NVMe/TCP export beside a lane that is held up.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blkyard_export::{
    ControlLoop, ExportConfig, NvmeTcpDisk, NvmeTcpQueuePoller, NvmeTcpServer, NvmeTcpSession, queue_pair,
};
use blkyard_mq::{BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, NullConfig, NullDevice, Poller, Wake};
use blkyard_nvme::fabrics::{
    ANY_CONTROLLER, CONNECT_BYTES, ConnectCommand, ConnectData, FabricsCommand, Nqn, PropertySize,
};
use blkyard_nvme::registers::{CC, ControllerConfig};
use blkyard_nvme::{Psdt, Sqe};
use blkyard_wire::nvme_tcp::{Framing, IcReq, Pdu};

const PATIENCE: Duration = Duration::from_secs(20);
const ANSWER_BYTES: usize = 24;

fn nqn() -> Nqn {
    Nqn::new("nqn.2026-11.test:disk").unwrap()
}

/// Sends a command with its data in the capsule.
fn send(host: &mut TcpStream, sqe: Sqe, data: &[u8]) {
    let sqe = sqe.with_data(Psdt::Sgl, [0, 1 << 56 | data.len() as u64]);
    let capsule = Pdu::CapsuleCmd { sqe: sqe.0, len: data.len() as u32 };
    host.write_all(capsule.encode(Framing::PLAIN).bytes()).unwrap();
    host.write_all(data).unwrap();
}

/// The result and status of the next answer.
fn answer(host: &mut TcpStream) -> (u16, u16) {
    let mut bytes = [0; ANSWER_BYTES];
    host.read_exact(&mut bytes).expect("an answer in time");
    (u16::from_le_bytes([bytes[8], bytes[9]]), u16::from_le_bytes([bytes[22], bytes[23]]) >> 1)
}

/// A connection that has sent its Connect.
fn connecting(address: SocketAddr, qid: u16, controller_id: u16) -> TcpStream {
    let mut host = TcpStream::connect(address).unwrap();
    host.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = Pdu::IcReq(IcReq { alignment: 0, header_digest: false, data_digest: false, maxr2t: 0 });
    host.write_all(request.encode(Framing::PLAIN).bytes()).unwrap();
    let command = ConnectCommand { qid, sq_size: 31, no_flow_control: true, keep_alive_ms: 0 };
    let mut data = [0; CONNECT_BYTES];
    ConnectData { host_id: [1; 16], controller_id, subsystem: nqn(), host: nqn() }.write(&mut data);
    send(&mut host, FabricsCommand::Connect(command).sqe(), &data);
    host
}

/// The result and status of the Connect.
fn connected(host: &mut TcpStream) -> (u16, u16) {
    host.read_exact(&mut [0; 128]).expect("the connection is initialized in time");
    answer(host)
}

/// An admin queue whose controller is enabled, and the controller's identifier.
fn admin(address: SocketAddr) -> (TcpStream, u16) {
    let mut host = connecting(address, 0, ANY_CONTROLLER);
    let (id, status) = connected(&mut host);
    assert_eq!(status, 0);
    let config =
        ControllerConfig { enabled: true, sq_entry_shift: 6, cq_entry_shift: 4, ..ControllerConfig::default() };
    let (size, offset, value) = (PropertySize::Four, CC as u32, config.bits().into());
    send(&mut host, FabricsCommand::PropertySet { size, offset, value }.sqe(), &[]);
    assert_eq!(answer(&mut host).1, 0);
    (host, id)
}

struct NoWake;

impl Wake for NoWake {
    fn wake(&self) {}
}

#[test]
fn lane_that_is_held_up_holds_up_no_other_host() {
    let info = DeviceInfo { capacity_sectors: 1 << 20, ..DeviceInfo::default() };
    let device = NullDevice::new(info.clone(), NullConfig::default());
    let (remote, port) = queue_pair();
    let config = ExportConfig::<NvmeTcpSession> {
        name: "test".into(),
        disk: NvmeTcpDisk::new(nqn(), vec![(1, info.clone())], 1, "1"),
        queues: vec![remote],
        domains: Vec::new(),
    };
    let control = ControlLoop::start().unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let server = NvmeTcpServer::serve_on(&control, listener, config).unwrap();
    let (_first, id) = admin(address);
    // Nothing runs this queue yet.
    let mut io = connecting(address, 1, id);
    let (_second, _) = admin(address);
    // Once its lane goes on, the queue runs.
    let hw = HwQueue::new(device.queue(4), Arc::new(info), HwQueueConfig { depth: 4, ..HwQueueConfig::default() });
    let mut poller = NvmeTcpQueuePoller::new(hw, (), port);
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let waker: Arc<dyn Wake> = Arc::new(NoWake);
            poller.enter(&mut (), &waker);
            while !ends.load(Ordering::Relaxed) {
                poller.run_once(&mut (), 0);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(connected(&mut io), (id, 0));
        drop(server);
        ends.store(true, Ordering::Relaxed);
    });
}
