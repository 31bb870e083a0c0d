//! A host over NVMe/TCP that waits for each answer: made of PDUs, so that a test can send what no driver sends.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use blkyard_nvme::auth::{AUTH_MESSAGE_BYTES_MAX, AuthHost, AuthStep};
use blkyard_nvme::fabrics::{
    ANY_CONTROLLER, CONNECT_BYTES, ConnectCommand, ConnectData, FabricsCommand, Nqn, PropertySize,
};
use blkyard_nvme::registers::{CC, CSTS, ControllerConfig};
use blkyard_nvme::{Cqe, NvmeStatus, Psdt, Sqe, admin, feature, io};
use blkyard_wire::nvme_tcp::{DataLimits, Framing, H2cData, IcReq, Pdu, PduEvent, PduReader, PduSender, TermReq};

use crate::common::PATIENCE;

const IN_CAPSULE: u64 = 0x01 << 56;
const TRANSPORT: u64 = 0x5a << 56;

/// A connection, with a queue after its Connect.
pub struct TcpQueue {
    pub stream: TcpStream,
    reader: PduReader,
    received: Vec<u8>,
    next_cid: u16,
}

/// The answer to a command.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: NvmeStatus,
    pub result: u64,
    pub data: Vec<u8>,
}

impl TcpQueue {
    /// A connection without initialization.
    pub fn open(address: SocketAddr) -> TcpQueue {
        let stream = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        let reader = PduReader::new(PduSender::Controller, DataLimits { in_capsule: 0, h2c: 0 });
        TcpQueue { stream, reader, received: Vec::new(), next_cid: 0 }
    }

    /// An initialized connection.
    pub fn initialized(address: SocketAddr) -> TcpQueue {
        let mut queue = TcpQueue::open(address);
        let request = Pdu::IcReq(IcReq { alignment: 0, header_digest: false, data_digest: false, maxr2t: 0 });
        queue.send(request.encode(Framing::PLAIN).bytes());
        assert!(matches!(queue.next(), Some((Pdu::IcResp(_), _))));
        queue.reader.start(Framing::PLAIN);
        queue
    }

    pub fn send(&mut self, bytes: &[u8]) {
        // A target that has disconnected already is noticed by the next read.
        let _ = self.stream.write_all(bytes);
    }

    /// The next PDU with its data; `None` at the end of the stream.
    pub fn next(&mut self) -> Option<(Pdu, Vec<u8>)> {
        let (mut header, mut data) = (None, Vec::new());
        loop {
            let mut bytes = &self.received[..];
            while let Some(event) = self.reader.next(&mut bytes).unwrap() {
                match event {
                    PduEvent::Header(pdu) if pdu.data_bytes() == 0 => header = Some((pdu, true)),
                    PduEvent::Header(pdu) => header = Some((pdu, false)),
                    PduEvent::Data(piece) => data.extend_from_slice(piece),
                    PduEvent::DataEnd { .. } => header = header.map(|(pdu, _)| (pdu, true)),
                }
                if let Some((pdu, true)) = header {
                    let left = bytes.len();
                    self.received.drain(..self.received.len() - left);
                    return Some((pdu, data));
                }
            }
            self.received.clear();
            let mut buffer = vec![0; 64 << 10];
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(bytes) => self.received.extend_from_slice(&buffer[..bytes]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("no answer: {error}"),
            }
        }
    }

    /// The TermReq that ends the connection.
    pub fn term_req(&mut self) -> TermReq {
        let next = self.next();
        let Some((Pdu::C2hTermReq(term), _)) = next else { panic!("{next:?}") };
        assert!(self.next().is_none(), "the connection ends");
        term
    }

    /// Sends a command: data for the controller, or the length of the buffer for data of the controller.
    pub fn submit(&mut self, sqe: Sqe, data: &[u8], room: u32) -> u16 {
        self.next_cid = self.next_cid.wrapping_add(1);
        let cid = self.next_cid;
        let is_short = !data.is_empty() && data.len() <= 8192;
        let bytes = (data.len() as u32).max(room);
        let descriptor = if is_short { IN_CAPSULE } else { TRANSPORT } + u64::from(bytes);
        let sqe = sqe.with_cid(cid).with_data(Psdt::Sgl, [0, descriptor]);
        let capsule = if is_short { data } else { &[] };
        let pdu = Pdu::CapsuleCmd { sqe: sqe.0, len: capsule.len() as u32 }.encode(Framing::PLAIN);
        self.send(&[pdu.bytes(), capsule].concat());
        cid
    }

    /// Executes a command.
    pub fn run(&mut self, sqe: Sqe, data: &[u8], room: u32) -> Answer {
        let cid = self.submit(sqe, data, room);
        self.answer(cid, data)
    }

    /// Waits for the answer to a command with this data for the controller.
    fn answer(&mut self, cid: u16, data: &[u8]) -> Answer {
        let mut received = Vec::new();
        loop {
            let (pdu, piece) = self.next().expect("the connection stays");
            match pdu {
                Pdu::CapsuleResp(cqe) => {
                    let cqe = Cqe(cqe);
                    assert_eq!(cqe.cid(), cid);
                    return Answer { status: cqe.status(), result: cqe.result(), data: received };
                }
                Pdu::C2hData(_) => received.extend(piece),
                Pdu::R2t(r2t) => {
                    let part = &data[r2t.offset as usize..][..r2t.len as usize];
                    let (cccid, ttag, offset, len) = (r2t.cccid, r2t.ttag, r2t.offset, r2t.len);
                    let header = Pdu::H2cData(H2cData { cccid, ttag, offset, len, is_last: true });
                    self.send(&[header.encode(Framing::PLAIN).bytes(), part].concat());
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Executes a command that must succeed; returns its data.
    pub fn succeed(&mut self, sqe: Sqe, data: &[u8], room: u32) -> Vec<u8> {
        let answer = self.run(sqe, data, room);
        assert!(answer.status.is_success(), "{sqe:?}: {answer:?}");
        answer.data
    }

    /// Executes a Connect.
    pub fn connect(&mut self, subsystem: &str, host: &str, qid: u16, controller: u16, keep_alive_ms: u32) -> Answer {
        let cid = self.submit_connect(subsystem, host, qid, controller, keep_alive_ms);
        self.answer(cid, &[])
    }

    /// Sends a Connect, and does not wait.
    pub fn submit_connect(
        &mut self,
        subsystem: &str,
        host: &str,
        qid: u16,
        controller: u16,
        keep_alive_ms: u32,
    ) -> u16 {
        let sq_size = if qid == 0 { 31 } else { 127 };
        let connect = ConnectCommand { qid, sq_size, no_flow_control: false, keep_alive_ms };
        let mut data = [0; CONNECT_BYTES];
        let nqn = |name: &str| Nqn::new(name).unwrap();
        let (subsystem, host) = (nqn(subsystem), nqn(host));
        ConnectData { host_id: [3; 16], controller_id: controller, subsystem, host }.write(&mut data);
        self.submit(FabricsCommand::Connect(connect).sqe(), &data, 0)
    }

    /// Authenticates itself; the step at which that ends.
    pub fn authenticate(&mut self, mut auth: AuthHost) -> AuthStep {
        let mut step = AuthStep::Send(auth.begin());
        loop {
            step = match step {
                AuthStep::Send(message) => {
                    self.succeed(FabricsCommand::AuthSend(message.len() as u32).sqe(), &message, 0);
                    auth.sent()
                }
                AuthStep::Receive => {
                    let room = AUTH_MESSAGE_BYTES_MAX as u32;
                    auth.received(&self.succeed(FabricsCommand::AuthReceive(room).sqe(), &[], room))
                }
                end => return end,
            };
        }
    }

    pub fn write(&mut self, nsid: u32, block: u64, data: &[u8]) {
        let blocks = data.len() as u32 / 512;
        self.succeed(Sqe::with_blocks(io::WRITE, nsid, block, blocks, 0), data, 0);
    }

    pub fn read(&mut self, nsid: u32, block: u64, bytes: u32) -> Vec<u8> {
        self.succeed(Sqe::with_blocks(io::READ, nsid, block, bytes / 512, 0), &[], bytes)
    }

    pub fn property(&mut self, offset: usize) -> u64 {
        let get = FabricsCommand::PropertyGet { size: PropertySize::Four, offset: offset as u32 };
        self.run(get.sqe(), &[], 0).result
    }

    pub fn set_config(&mut self, config: ControllerConfig) {
        let value = config.bits().into();
        let set = FabricsCommand::PropertySet { size: PropertySize::Four, offset: CC as u32, value };
        assert!(self.run(set.sqe(), &[], 0).status.is_success());
    }
}

/// A host with an association and I/O queues.
pub struct TcpHost {
    pub admin: TcpQueue,
    pub controller: u16,
    pub io: Vec<TcpQueue>,
}

pub fn enabled() -> ControllerConfig {
    ControllerConfig { enabled: true, sq_entry_shift: 6, cq_entry_shift: 4, ..ControllerConfig::default() }
}

impl TcpHost {
    /// Connects as this host: to any controller, or to the one of an earlier association.
    pub fn connect(address: SocketAddr, subsystem: &str, host: &str, controller: Option<u16>, queues: u16) -> TcpHost {
        let mut admin = TcpQueue::initialized(address);
        let answer = admin.connect(subsystem, host, 0, controller.unwrap_or(ANY_CONTROLLER), 0);
        assert!(answer.status.is_success(), "{answer:?}");
        let controller = answer.result as u16;
        admin.set_config(enabled());
        assert_eq!(admin.property(CSTS), 1);
        let wanted = u32::from(queues - 1) * 0x1_0001;
        let granted = admin.run(Sqe::feature(admin::SET_FEATURES, feature::QUEUES, wanted), &[], 0);
        assert_eq!(granted.result, u64::from(wanted));
        let connect = |qid| {
            let mut queue = TcpQueue::initialized(address);
            let answer = queue.connect(subsystem, host, qid, controller, 0);
            assert_eq!((answer.status, answer.result), (NvmeStatus::SUCCESS, controller.into()));
            queue
        };
        TcpHost { admin, controller, io: (1..=queues).map(connect).collect() }
    }
}
