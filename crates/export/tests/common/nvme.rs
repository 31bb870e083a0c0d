//! Exports over vfio-user on real lanes, and a client of messages only.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blkyard_export::{
    BoundSocket, DetachedQueue, HwQueueSet, NvmeDisk, NvmeDoorbells, NvmeQueuePoller, NvmeQueueRemote, QueueShare,
    SocketConfig, VfioUserExport, VfioUserServer, queue_pair,
};
use blkyard_mq::{HwQueue, HwQueueConfig};
use blkyard_nvme::{Psdt, Sqe, io};
use blkyard_os::{LaneConfig, Lanes, Ring};
use blkyard_sys::{recv_fds, send_fds};
use blkyard_wire::vfio_user::{
    DmaMapFlags, DmaMapRequest, HEADER_BYTES, MessageHeader, MessageKind, RegionAccess, VERSION, VfioCapabilities,
    VfioRequest, VfioVersion,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{RecvFlags, SendFlags};

use super::devices::AnyQueue;
use super::{AnyDevice, Gate, PATIENCE, SERIAL};

/// One export, whose queues live on lanes.
pub struct NvmeWorld {
    pub path: PathBuf,
    server: Option<VfioUserServer>,
    lanes: Lanes<NvmeQueuePoller<AnyQueue>>,
    folder: tempfile::TempDir,
}

impl NvmeWorld {
    /// The queues are dealt to the lanes in turn.
    pub fn new(device: &AnyDevice, queues: usize, lanes: usize) -> NvmeWorld {
        NvmeWorld::with(device, queues, lanes, NvmeDoorbells::Message)
    }

    pub fn with(device: &AnyDevice, queues: usize, lanes: usize, doorbells: NvmeDoorbells) -> NvmeWorld {
        NvmeWorld::of_devices(std::slice::from_ref(device), queues, lanes, doorbells)
    }

    /// Namespaces 1, 2 and so on are these devices.
    pub fn of_devices(devices: &[AnyDevice], queues: usize, lanes: usize, doorbells: NvmeDoorbells) -> NvmeWorld {
        let mut dealt = NvmeWorld::lanes(lanes);
        let mut remotes = Vec::new();
        for number in 0..queues {
            let (remote, port) = queue_pair();
            let hw = hw_queues(devices, HwQueueConfig::default());
            let make = move || NvmeQueuePoller::new(HwQueueSet::new::<Ring>(hw).unwrap(), (), port);
            dealt.admit(number % lanes, make).unwrap();
            remotes.push(remote);
        }
        NvmeWorld::serving(devices, remotes, dealt, doorbells)
    }

    /// The same on one lane, where all queues share a hardware queue for each device.
    pub fn shared(devices: &[AnyDevice], queues: usize) -> NvmeWorld {
        let mut lanes = NvmeWorld::lanes(1);
        let usual = HwQueueConfig::default();
        let share = QueueShare { bios: usual.bios_max, depth: usual.depth, devices: devices.len() };
        let (remotes, ports): (Vec<_>, Vec<_>) = (0..queues).map(|_| queue_pair()).unzip();
        let mut detached = ports.into_iter().map(|port| DetachedQueue::new((), port, share).unwrap());
        let first = detached.next().unwrap();
        let hw = hw_queues(devices, HwQueueConfig { bios_max: usual.bios_max * queues, ..usual });
        let make = move || NvmeQueuePoller::of_detached(HwQueueSet::new::<Ring>(hw).unwrap(), first);
        lanes.admit(0, make).unwrap();
        detached.for_each(|queue| remotes[0].mover().adopt(queue, PATIENCE).unwrap());
        NvmeWorld::serving(devices, remotes, lanes, NvmeDoorbells::Message)
    }

    fn lanes(lanes: usize) -> Lanes<NvmeQueuePoller<AnyQueue>> {
        Lanes::start(lanes, |number| LaneConfig { name: format!("lane{number}"), ..LaneConfig::default() }).unwrap()
    }

    fn serving(
        devices: &[AnyDevice],
        remotes: Vec<NvmeQueueRemote>,
        lanes: Lanes<NvmeQueuePoller<AnyQueue>>,
        doorbells: NvmeDoorbells,
    ) -> NvmeWorld {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nvme.sock");
        let socket = SocketConfig { path: path.clone(), mode: None, group: None };
        let namespaces = (1..).zip(devices).map(|(nsid, device)| (nsid, device.info.clone())).collect();
        let config = VfioUserExport {
            name: "nvme".into(),
            disk: NvmeDisk::of_namespaces(namespaces, remotes.len() as u16, SERIAL).with_doorbells(doorbells),
            queues: remotes,
            domains: devices.iter().flat_map(|device| device.domains.clone()).collect(),
        };
        let server = VfioUserServer::start(BoundSocket::bind(&socket).unwrap(), config).unwrap();
        NvmeWorld { path, server: Some(server), lanes, folder }
    }

    pub fn server(&self) -> &VfioUserServer {
        self.server.as_ref().unwrap()
    }

    /// Everything ends in time, and nothing is left behind.
    pub fn stop(mut self) {
        self.server().ask_to_stop();
        super::until("the export ends", || self.server().is_finished());
        self.server.take().unwrap().join();
        let (told, ended) = std::sync::mpsc::channel();
        let lanes = self.lanes;
        std::thread::spawn(move || told.send(lanes.join()));
        ended.recv_timeout(PATIENCE).expect("the lanes end").unwrap();
        assert_eq!(self.folder.path().read_dir().unwrap().count(), 0, "a socket was left behind");
    }
}

fn hw_queues(devices: &[AnyDevice], config: HwQueueConfig) -> Vec<HwQueue<AnyQueue>> {
    let hw = |device: &AnyDevice| HwQueue::new(device.queue(config.depth), Arc::new(device.info.clone()), config);
    devices.iter().map(hw).collect()
}

/// A client that says what it is told to.
pub struct RawClient {
    stream: UnixStream,
    id: u16,
    /// Descriptors that came with messages.
    descriptors: RefCell<Vec<OwnedFd>>,
}

impl RawClient {
    /// One that has said nothing yet.
    pub fn connect(path: &Path) -> RawClient {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        RawClient { stream, id: 0, descriptors: RefCell::default() }
    }

    /// One after its version.
    pub fn greeted(path: &Path) -> RawClient {
        let mut client = RawClient::connect(path);
        client.call(&RawClient::version(VERSION.0, VERSION.1), &[]).unwrap();
        client
    }

    /// The same with room for this many descriptors in a message.
    pub fn greeted_with(path: &Path, max_msg_fds: u64) -> RawClient {
        let mut client = RawClient::connect(path);
        let capabilities = VfioCapabilities { max_msg_fds, ..VfioCapabilities::default() };
        let version = VfioVersion { major: VERSION.0, minor: VERSION.1, capabilities };
        client.call(&VfioRequest::Version(version), &[]).unwrap();
        client
    }

    pub fn version(major: u16, minor: u16) -> VfioRequest<'static> {
        VfioRequest::Version(VfioVersion { major, minor, capabilities: VfioCapabilities::default() })
    }

    /// Sends bytes as they are.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        // The server may have closed the connection.
        let _ = send_fds(&self.stream, bytes, fds, SendFlags::empty());
    }

    /// Whether a message comes within a time.
    pub fn is_readable(&self, within: Duration) -> bool {
        super::readable(&self.stream, within)
    }

    /// Sends bytes; false if the socket has no room for them.
    pub fn try_send(&self, bytes: &[u8]) -> bool {
        send_fds(&self.stream, bytes, &[], SendFlags::DONTWAIT) == Ok(bytes.len())
    }

    /// The next message: its id and payload, or an errno; nothing if the server closes the connection.
    pub fn receive(&self) -> Option<(u16, Result<Vec<u8>, u32>)> {
        let header = self.read(HEADER_BYTES)?;
        let header = MessageHeader::parse(header.try_into().unwrap(), 1 << 20).unwrap();
        let payload = self.read(header.payload_bytes as usize)?;
        let result = match header.kind {
            MessageKind::Reply => Ok(payload),
            MessageKind::Error(errno) => Err(errno),
            MessageKind::Command { .. } => panic!("the server sent a command"),
        };
        Some((header.id, result))
    }

    fn read(&self, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut at = 0;
        while at < len {
            match recv_fds(&self.stream, &mut bytes[at..], 64, RecvFlags::empty()) {
                Ok(received) if received.bytes > 0 => {
                    at += received.bytes;
                    self.descriptors.borrow_mut().extend(received.fds);
                }
                Err(rustix::io::Errno::AGAIN) => panic!("no answer came"),
                // Closed, maybe with something unread.
                _ => return None,
            }
        }
        Some(bytes)
    }

    /// The descriptors that came with messages.
    pub fn take_descriptors(&self) -> Vec<OwnedFd> {
        self.descriptors.take()
    }

    /// A descriptor that came with a message.
    pub fn take_descriptor(&self) -> Option<OwnedFd> {
        self.descriptors.borrow_mut().pop()
    }

    /// Sends a command and takes its reply.
    pub fn call(&mut self, request: &VfioRequest<'_>, fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>, u32> {
        self.id = self.id.wrapping_add(1);
        self.send(&request.encode(self.id, false), fds);
        let (id, result) = self.receive().expect("the server answers");
        assert_eq!(id, self.id);
        result
    }

    /// A command with a payload as it is.
    pub fn call_raw(&mut self, command: u16, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>, u32> {
        self.id = self.id.wrapping_add(1);
        let kind = MessageKind::Command { no_reply: false };
        let header = MessageHeader { id: self.id, command, payload_bytes: payload.len() as u32, kind };
        self.send(&[&header.encode()[..], payload].concat(), fds);
        let (id, result) = self.receive().expect("the server answers");
        assert_eq!(id, self.id);
        result
    }

    /// The server closes the connection, after an error at most.
    pub fn is_closed(&self) -> bool {
        loop {
            match self.receive() {
                None => return true,
                Some((_, Err(_))) => {}
                Some((_, Ok(_))) => return false,
            }
        }
    }
}

pub fn file(bytes: u64) -> OwnedFd {
    let file = memfd_create("host", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

pub fn read(region: u32, offset: u64, count: u32) -> VfioRequest<'static> {
    VfioRequest::RegionRead(RegionAccess { offset, region, count })
}

pub fn map(address: u64, size: u64, offset: u64) -> VfioRequest<'static> {
    map_for(DmaMapFlags::all(), address, size, offset)
}

/// The same with these permissions of the server.
pub fn map_for(flags: DmaMapFlags, address: u64, size: u64, offset: u64) -> VfioRequest<'static> {
    VfioRequest::DmaMap(DmaMapRequest { flags, offset, address, size })
}

/// A host with an admin queue and nothing else: its memory is a file, mapped at [`AdminHost::BASE`].
pub struct AdminHost {
    pub client: RawClient,
    pub memory: std::fs::File,
    pub tail: u32,
}

impl AdminHost {
    pub const BASE: u64 = 0x10000;

    /// An enabled controller; the rings are the first two pages of the memory.
    pub fn enable(world: &NvmeWorld) -> AdminHost {
        AdminHost::enable_at(&world.path)
    }

    /// The same for the export of a socket.
    pub fn enable_at(path: &Path) -> AdminHost {
        AdminHost::enable_by(RawClient::greeted(path))
    }

    /// The same by a client after its version.
    pub fn enable_by(mut client: RawClient) -> AdminHost {
        let memory = file(0x10000);
        client.call(&map(AdminHost::BASE, 0x10000, 0), &[memory.as_fd()]).unwrap();
        let mut host = AdminHost { client, memory: memory.into(), tail: 0 };
        host.write(0x24, &[7, 0, 7, 0]);
        host.write(0x28, &AdminHost::BASE.to_le_bytes());
        host.write(0x30, &(AdminHost::BASE + 0x1000).to_le_bytes());
        host.write(0x14, &[1, 0, 0x46, 0]);
        assert_eq!(host.client.call(&read(0, 0x1c, 4), &[]).unwrap()[16], 1, "CSTS.RDY");
        host
    }

    /// One whose write is in flight at a device that does not answer.
    pub fn stuck(world: &NvmeWorld, gate: &Gate) -> AdminHost {
        let mut host = AdminHost::enable(world);
        host.get_stuck(gate);
        host
    }

    /// Creates queue 1 in the pages 2 and 3, and has it write to a device that does not answer.
    pub fn get_stuck(&mut self, gate: &Gate) {
        let page = |number: u64| AdminHost::BASE + number * 0x1000;
        assert_eq!(self.admin(Sqe::create_cq(1, 8, page(3), None)), Some(0));
        assert_eq!(self.admin(Sqe::create_sq(1, 8, page(2), 1)), Some(0));
        self.put(2, 0, Sqe::with_blocks(io::WRITE, 1, 0, 1, 0).with_data(Psdt::Prp, [page(4), 0]));
        self.write(0x1080, &[1, 0, 0, 0]);
        super::until("the write is in flight", || gate.held() == 1);
    }

    /// The low byte of CSTS.
    pub fn csts(&mut self) -> u8 {
        self.client.call(&read(0, 0x1c, 4), &[]).unwrap()[16]
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let access = RegionAccess { offset, region: 0, count: bytes.len() as u32 };
        self.client.call(&VfioRequest::RegionWrite(access, bytes), &[]).unwrap();
    }

    /// Puts a command into a submission ring in a page of the memory.
    pub fn put(&self, page: u64, index: u32, sqe: Sqe) {
        let bytes: Vec<u8> = sqe.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.memory.write_all_at(&bytes, page * 0x1000 + u64::from(index) * 64).unwrap();
    }

    /// Status of a completion ring's entry in its first round; unset if it is not there.
    pub fn status(&self, page: u64, index: u32) -> Option<u16> {
        let mut bytes = [0; 2];
        self.memory.read_exact_at(&mut bytes, page * 0x1000 + u64::from(index) * 16 + 14).unwrap();
        let word = u16::from_le_bytes(bytes);
        (word & 1 != 0).then_some(word >> 1)
    }

    /// Words of 32 bits at the start of a page of the memory.
    pub fn words(&self, page: u64, count: usize) -> Vec<u32> {
        let mut bytes = vec![0; count * 4];
        self.memory.read_exact_at(&mut bytes, page * 0x1000).unwrap();
        bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    /// CSTS.SHST.
    pub fn shutdown_status(&mut self) -> u8 {
        self.client.call(&read(0, 0x1c, 4), &[]).unwrap()[16] >> 2 & 3
    }

    /// Sends an admin command: it is carried out when this returns, unless it waits for a device.
    /// Returns the status of the completion with the same index, if it is there. Seven at most.
    pub fn admin(&mut self, sqe: Sqe) -> Option<u16> {
        let index = self.tail;
        self.put(0, index, sqe.with_cid(index as u16));
        self.tail += 1;
        self.write(0x1000, &self.tail.to_le_bytes());
        self.status(1, index)
    }
}
