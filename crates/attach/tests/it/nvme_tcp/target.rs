//! A target with a thread for each connection, over the machines of crate `nvme` and ordinary sockets. It can be made
//! to break: connections that are cut, commands that are held.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkyard_mem::{Region, RegionTable};
use blkyard_mq::{Bio, DeviceInfo, Op, QueueLimits, SendPiece, Status};
use blkyard_nvme::fabrics::{FabricsCommand, Nqn};
use blkyard_nvme::tcp::{
    SendList, TcpAdminEvent, TcpAdminQueue, TcpDataMemory, TcpEnd, TcpIoQueue, TcpIoQueueOptions, TcpTargetOptions,
};
use blkyard_nvme::{
    AdminCompletion, Connected, ControllerOptions, ControllerQueueReply, ControllerRequest, FabricsOptions,
    FabricsSubsystem, NamespaceTable, NextBio, NvmeStatus, ServedNamespace, Sqe, SubsystemOptions, admin,
};

pub const NAME: &str = "nqn.2026-11.test:disk";
pub const DISK_BYTES: usize = 8 << 20;
const FABRICS: u8 = 0x7f;
const OPTIONS: TcpTargetOptions = TcpTargetOptions {
    slots: 1,
    segments_max: 1,
    in_capsule: 8192,
    maxh2cdata: 128 << 10,
    header_digest: true,
    data_digest: true,
    alignment: 0,
};

struct Connection {
    socket: TcpStream,
    controller: u16,
}

/// State that the threads share.
struct Shared {
    began: Instant,
    subsystem: Mutex<FabricsSubsystem>,
    disk: Arc<Region>,
    connections: Mutex<Vec<Connection>>,
    is_over: AtomicBool,
    /// Commands are held.
    pub is_held: AtomicBool,
    commands: AtomicU64,
    /// Time that the answer to an Identify takes.
    identify_delay: Duration,
}

pub struct Target {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Target {
    pub fn start() -> Target {
        Target::slow(1, Duration::ZERO)
    }

    /// A target with so many namespaces, whose answers to Identify commands take this time.
    pub fn slow(namespaces: u32, identify_delay: Duration) -> Target {
        Target::with(own_address(), &Region::anonymous(DISK_BYTES).unwrap(), namespaces, identify_delay)
    }

    /// A target at this address with this disk.
    pub fn at(address: SocketAddr, disk: &Arc<Region>) -> Target {
        Target::with(address, disk, 1, Duration::ZERO)
    }

    fn with(address: SocketAddr, disk: &Arc<Region>, namespaces: u32, identify_delay: Duration) -> Target {
        let start = Instant::now();
        let listener = loop {
            match TcpListener::bind(address) {
                Ok(listener) => break listener,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(30), "{error}"),
            }
        };
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let shared = Arc::new(Shared {
            began: Instant::now(),
            subsystem: Mutex::new(subsystem(disk, namespaces)),
            disk: Arc::clone(disk),
            connections: Mutex::default(),
            is_over: AtomicBool::new(false),
            is_held: AtomicBool::new(false),
            commands: AtomicU64::new(0),
            identify_delay,
        });
        let own = Arc::clone(&shared);
        let thread = Some(std::thread::spawn(move || accept(&listener, &own)));
        Target { address, shared, thread }
    }

    pub fn disk(&self) -> &Arc<Region> {
        &self.shared.disk
    }

    pub fn hold(&self, is_held: bool) {
        self.shared.is_held.store(is_held, SeqCst);
    }

    /// I/O commands executed.
    pub fn commands(&self) -> u64 {
        self.shared.commands.load(SeqCst)
    }

    pub fn associations(&self) -> usize {
        self.shared.subsystem.lock().unwrap().associations().count()
    }

    /// Cuts all connections, as a network does.
    pub fn cut(&self) {
        for connection in self.shared.connections.lock().unwrap().iter() {
            let _ = connection.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.shared.is_over.store(true, SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A loopback address of its own: of 127.0.0.1 any other program could get the port while the target is gone.
fn own_address() -> SocketAddr {
    static TARGETS: AtomicU8 = AtomicU8::new(0);
    let [low, high, ..] = std::process::id().to_le_bytes();
    (Ipv4Addr::new(127, 1 + TARGETS.fetch_add(1, SeqCst) % 200, high, low), 0).into()
}

fn subsystem(disk: &Arc<Region>, namespaces: u32) -> FabricsSubsystem {
    let controller = ControllerOptions {
        controller_id: 1,
        io_queues: 4,
        queue_entries: 128,
        vectors: 1,
        transfer_bytes: 64 << 10,
        fabrics: Some(FabricsOptions { in_capsule: 8192, ..FabricsOptions::default() }),
        ..ControllerOptions::default()
    };
    let nqn = Nqn::new(NAME).unwrap();
    let options = SubsystemOptions {
        nqn,
        hosts: None,
        auth: None,
        controller,
        controllers_max: 8,
        admin_entries: 32,
        discovery: Vec::new(),
        instance_seed: None,
    };
    let limits = QueueLimits { discard_sectors_max: 1 << 20, ..QueueLimits::default() };
    let capacity_sectors = disk.len() as u64 / 512;
    let info = DeviceInfo { capacity_sectors, limits, volatile_cache: true, ..DeviceInfo::default() };
    let mut table = NamespaceTable::new(namespaces + 1);
    (1..=namespaces).for_each(|nsid| table.set(nsid, ServedNamespace::new(nsid, 0, &info)));
    FabricsSubsystem::new(options, table)
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut threads = vec![];
    while !shared.is_over.load(SeqCst) {
        match listener.accept() {
            Ok((socket, _)) => {
                let own = Arc::clone(shared);
                threads.push(std::thread::spawn(move || serve(socket, &own)));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    threads.into_iter().for_each(|thread: JoinHandle<()>| thread.join().unwrap());
}

enum Queue {
    Admin(Box<TcpAdminQueue>, Option<u16>),
    Io(Box<TcpIoQueue>, u16),
    Gone,
}

fn serve(mut socket: TcpStream, shared: &Shared) {
    socket.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
    socket.set_nodelay(true).unwrap();
    let mut queue = Queue::Admin(Box::new(TcpAdminQueue::new(OPTIONS).unwrap()), None);
    let (mut list, mut buffer) = (SendList::new(512), vec![0; 64 << 10]);
    let mut held = vec![];
    while !shared.is_over.load(SeqCst) {
        let received = match socket.read(&mut buffer) {
            Ok(0) => break,
            Ok(received) => received,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => 0,
            Err(_) => break,
        };
        let mut bytes = &buffer[..received];
        loop {
            queue = handle(queue, &mut bytes, shared, &socket, &mut held);
            if !send(&mut queue, &mut list, &mut socket) || bytes.is_empty() {
                break;
            }
        }
    }
    end(queue, shared);
}

fn handle(
    queue: Queue,
    bytes: &mut &[u8],
    shared: &Shared,
    socket: &TcpStream,
    held: &mut Vec<(u16, Box<Bio>)>,
) -> Queue {
    match queue {
        Queue::Admin(mut admin, mut id) => {
            while let Some(event) = admin.receive(bytes) {
                let TcpAdminEvent::Command { slot, sqe, data, room } = event else { continue };
                if let Some(io) = execute(&mut admin, &mut id, (slot, &sqe, data, room), shared) {
                    let (connected, of) = io;
                    let options = TcpIoQueueOptions {
                        entries: 128,
                        has_flow_control: true,
                        in_capsule: 8192,
                        transfer_bytes: 64 << 10,
                        pool_bytes: 1 << 20,
                    };
                    let bytes = TcpIoQueue::memory_bytes(&options);
                    let table = RegionTable::new(vec![Region::anonymous(bytes as usize).unwrap()]);
                    let memory = TcpDataMemory { table: Arc::new(table), region: 0, offset: 0, bytes };
                    let mut io = TcpIoQueue::new(admin.into_queue(), connected, options, memory);
                    io.accept(slot, of);
                    note(shared, socket, of);
                    return Queue::Io(Box::new(io), of);
                }
                if let Some(id) = id {
                    note(shared, socket, id);
                }
            }
            if let Some(id) = id {
                let mut subsystem = shared.subsystem.lock().unwrap();
                let Some(association) = subsystem.association(id) else { return Queue::Gone };
                association.controller.poll(shared.began.elapsed().as_nanos() as u64);
                while let Some(request) = association.controller.take_request() {
                    // The disk is memory.
                    if let ControllerRequest::Flush(number) = request {
                        association.controller.flushed(number);
                    }
                }
                while let Some(completion) = association.controller.take_completion() {
                    admin.complete(completion);
                }
                if association.controller.is_expired() {
                    return Queue::Gone;
                }
            }
            Queue::Admin(admin, id)
        }
        Queue::Io(mut io, id) => {
            io.receive(bytes);
            let mut bio = Box::new(Bio::default());
            loop {
                match io.fetch(&mut bio) {
                    NextBio::Unavailable => break,
                    NextBio::Without => {}
                    NextBio::Bio(slot) => held.push((slot, std::mem::take(&mut bio))),
                }
            }
            if !shared.is_held.load(SeqCst) {
                for (slot, bio) in held.drain(..) {
                    shared.commands.fetch_add(1, SeqCst);
                    finish(&mut io, slot, &bio, shared);
                }
            }
            io.receive(bytes);
            if io.end_reason().is_some() { Queue::Gone } else { Queue::Io(io, id) }
        }
        Queue::Gone => Queue::Gone,
    }
}

fn note(shared: &Shared, socket: &TcpStream, controller: u16) {
    let mut connections = shared.connections.lock().unwrap();
    let peer = socket.peer_addr().ok();
    if !connections.iter().any(|known| known.socket.peer_addr().ok() == peer) {
        connections.push(Connection { socket: socket.try_clone().unwrap(), controller });
    }
}

/// Executes a command of a connection without a queue, or of an admin queue. Returns the I/O queue that it connects.
fn execute(
    admin: &mut TcpAdminQueue,
    id: &mut Option<u16>,
    (slot, sqe, data, room): (u16, &Sqe, Vec<u8>, usize),
    shared: &Shared,
) -> Option<(blkyard_nvme::ConnectedQueue, u16)> {
    if sqe.opcode() == admin::IDENTIFY {
        std::thread::sleep(shared.identify_delay);
    }
    let now_ns = shared.began.elapsed().as_nanos() as u64;
    let mut subsystem = shared.subsystem.lock().unwrap();
    let answer = |status, result| AdminCompletion { slot, status, result, data: vec![] };
    if sqe.opcode() != FABRICS {
        if let Some(association) = id.and_then(|id| subsystem.association(id)) {
            association.controller.submit(slot, sqe, data, room, now_ns);
        }
        return None;
    }
    let command = match FabricsCommand::parse(sqe) {
        Ok(command) => command,
        Err(status) => {
            admin.complete(answer(status, 0));
            return None;
        }
    };
    let outcome = match command {
        FabricsCommand::Connect(connect) => loop {
            match subsystem.connect(&connect, &data, now_ns) {
                Ok(Connected::Admin(new)) => {
                    *id = Some(new);
                    admin.open(32, 64 << 10).unwrap();
                    break Ok(u64::from(new));
                }
                Ok(Connected::Io(of, connected)) => return Some((connected, of)),
                Ok(Connected::Replaces(old)) => {
                    cut(shared, old);
                    subsystem.remove(old);
                }
                Err(refusal) => {
                    admin.complete(answer(refusal.status, refusal.result));
                    return None;
                }
            }
        },
        FabricsCommand::PropertyGet { size, offset } => match id.and_then(|id| subsystem.association(id)) {
            Some(association) => association.controller.property(size, offset),
            None => Err(NvmeStatus::INVALID_FIELD),
        },
        FabricsCommand::PropertySet { size, offset, value } => match id.and_then(|id| subsystem.association(id)) {
            Some(association) => association.controller.set_property(size, offset, value).map(|()| 0),
            None => Err(NvmeStatus::INVALID_FIELD),
        },
        FabricsCommand::AuthSend(_) | FabricsCommand::AuthReceive(_) | FabricsCommand::Disconnect => {
            Err(NvmeStatus::INVALID_FIELD)
        }
    };
    admin.complete(match outcome {
        Ok(result) => answer(NvmeStatus::SUCCESS, result),
        Err(status) => answer(status, 0),
    });
    None
}

fn cut(shared: &Shared, controller: u16) {
    shared.connections.lock().unwrap().retain(|connection| {
        let is_its = connection.controller == controller;
        if is_its {
            let _ = connection.socket.shutdown(Shutdown::Both);
        }
        !is_its
    });
}

fn end(queue: Queue, shared: &Shared) {
    match queue {
        Queue::Admin(_, Some(id)) => {
            shared.subsystem.lock().unwrap().remove(id);
            cut(shared, id);
        }
        Queue::Io(mut io, id) => {
            io.abandon(TcpEnd::Closed);
            if let Some(association) = shared.subsystem.lock().unwrap().association(id) {
                association.controller.reply(io.qid(), ControllerQueueReply::Stopped);
            }
        }
        _ => {}
    }
}

fn finish(io: &mut TcpIoQueue, slot: u16, bio: &Bio, shared: &Shared) {
    let mut at = bio.sector * 512;
    for segment in &bio.segments {
        let memory = io.memory().table.resolve_region(*segment).unwrap();
        let disk = shared.disk.span(at, memory.len()).unwrap();
        if bio.op == Op::Read {
            memory.copy_from(&disk);
        } else {
            disk.copy_from(&memory);
        }
        at += u64::from(segment.len);
    }
    io.end(slot, Status::Ok);
}

/// Sends all. False if the connection is gone.
fn send(queue: &mut Queue, list: &mut SendList, socket: &mut TcpStream) -> bool {
    loop {
        list.clear();
        let number = match queue {
            Queue::Admin(admin, _) => admin.fill(list),
            Queue::Io(io, _) => io.fill(list),
            Queue::Gone => return false,
        };
        let Some(number) = number else { return true };
        let memory = match queue {
            Queue::Admin(admin, _) => admin.memory().clone(),
            Queue::Io(io, _) => RegionTable::clone(&io.memory().table),
            Queue::Gone => return false,
        };
        let mut bytes = vec![];
        for piece in list.pieces() {
            match piece {
                SendPiece::Bytes(piece) => bytes.extend_from_slice(piece),
                SendPiece::Data(segment) => {
                    let start = bytes.len();
                    bytes.resize(start + segment.len as usize, 0);
                    memory.resolve_region(segment).unwrap().copy_to_slice(&mut bytes[start..]);
                }
            }
        }
        if socket.write_all(&bytes).is_err() {
            return false;
        }
        match queue {
            Queue::Admin(admin, _) => admin.sent(number),
            Queue::Io(io, _) => io.sent(number),
            Queue::Gone => {}
        }
    }
}
