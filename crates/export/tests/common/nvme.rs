//! Exports over vfio-user on real lanes, and a client of messages only.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkyard_export::{
    BoundSocket, NvmeDisk, NvmeQueuePoller, SocketConfig, VfioUserExport, VfioUserServer, queue_pair,
};
use blkyard_mq::{HwQueue, HwQueueConfig};
use blkyard_os::{LaneConfig, Lanes};
use blkyard_sys::{recv_fds, send_fds};
use blkyard_wire::vfio_user::{
    HEADER_BYTES, MessageHeader, MessageKind, VERSION, VfioCapabilities, VfioRequest, VfioVersion,
};
use rustix::net::{RecvFlags, SendFlags};

use super::devices::AnyQueue;
use super::{AnyDevice, PATIENCE, SERIAL};

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
        let config = |number| LaneConfig { name: format!("lane{number}"), ..LaneConfig::default() };
        let mut dealt = Lanes::start(lanes, config).unwrap();
        let info = Arc::new(device.info.clone());
        let mut remotes = Vec::new();
        for number in 0..queues {
            let (remote, port) = queue_pair();
            let config = HwQueueConfig::default();
            let (driver, info) = (device.queue(config.depth), Arc::clone(&info));
            dealt
                .admit(number % lanes, move || NvmeQueuePoller::new(HwQueue::new(driver, info, config), (), port))
                .unwrap();
            remotes.push(remote);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nvme.sock");
        let socket = SocketConfig { path: path.clone(), mode: None, group: None };
        let config = VfioUserExport {
            name: "nvme".into(),
            disk: NvmeDisk::new(&info, queues as u16, SERIAL),
            queues: remotes,
            domains: device.domains.clone(),
        };
        let server = VfioUserServer::start(BoundSocket::bind(&socket).unwrap(), config).unwrap();
        NvmeWorld { path, server: Some(server), lanes: dealt, folder }
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

/// A client that says what it is told to.
pub struct RawClient {
    stream: UnixStream,
    id: u16,
}

impl RawClient {
    /// One that has said nothing yet.
    pub fn connect(path: &Path) -> RawClient {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        RawClient { stream, id: 0 }
    }

    /// One after its version.
    pub fn greeted(path: &Path) -> RawClient {
        let mut client = RawClient::connect(path);
        client.call(&RawClient::version(VERSION.0, VERSION.1), &[]).unwrap();
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
            match recv_fds(&self.stream, &mut bytes[at..], 1, RecvFlags::empty()) {
                Ok(received) if received.bytes > 0 => at += received.bytes,
                Err(rustix::io::Errno::AGAIN) => panic!("no answer came"),
                // Closed, maybe with something unread.
                _ => return None,
            }
        }
        Some(bytes)
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
