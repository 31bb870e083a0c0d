//! A target in memory: associations with a disk, on TCP connections whose streams are lists of bytes.

use std::collections::{BTreeMap, HashMap, VecDeque};

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_nvme::fabrics::{
    ANY_CONTROLLER, CONNECT_BYTES, ConnectCommand, ConnectData, FABRICS_OPCODE, FabricsCommand, InvalidParameter,
    fabrics_status,
};
use blkyard_nvme::registers::{CAP, CC, CSTS, Capabilities, ControllerConfig, ControllerStatus};
use blkyard_nvme::tcp::{SendList, SendPiece, TcpEnd, TcpTargetEvent, TcpTargetOptions, TcpTargetQueue, TcpTransfer};
use blkyard_nvme::{
    ANA_LOG, CROSS_RESET_LOG, ControllerInstance, DISCOVERY_LOG, DiscoveryLog, IDENTIFY_BYTES, IdentifyController,
    IdentifyNamespace, LbaFormat, NvmeStatus, Sqe, admin, cns, io,
};

use crate::fabrics::real::{RealQueue, RealTarget};

/// Blocks of the disk, and their size.
pub const BLOCKS: u64 = 64;
pub const BLOCK: usize = 512;
/// Message by which a host tells that it gives an authentication up (NVMe Base 2.0, 8.13.5).
const AUTH_FAILURE2: u8 = 0xf0;
const SLOTS: u16 = 40;
const SLOT_BYTES: u64 = 64 << 10;

/// One direction of a connection.
#[derive(Default)]
pub struct Pipe {
    queue: VecDeque<Queued>,
    pub bytes: VecDeque<u8>,
    pub received: Vec<u8>,
}

enum Queued {
    Bytes(Vec<u8>),
    End(u64),
}

impl Pipe {
    /// Takes a list; its data is read now.
    pub fn push(&mut self, memory: &RegionTable, list: &SendList, number: u64) {
        for piece in list.pieces() {
            let bytes = match piece {
                SendPiece::Bytes(bytes) => bytes.to_vec(),
                SendPiece::Data(segment) => {
                    let mut bytes = vec![0; segment.len as usize];
                    memory.resolve(segment).unwrap().copy_to_slice(&mut bytes);
                    bytes
                }
            };
            self.queue.push_back(Queued::Bytes(bytes));
        }
        self.queue.push_back(Queued::End(number));
    }

    /// Sends up to so many pieces; returns the number of the last list sent.
    pub fn send(&mut self, pieces: usize) -> Option<u64> {
        let mut sent = None;
        for _ in 0..pieces {
            match self.queue.pop_front() {
                Some(Queued::Bytes(bytes)) => self.bytes.extend(bytes),
                Some(Queued::End(number)) => sent = Some(number),
                None => break,
            }
        }
        sent
    }

    pub fn deliver(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes.len());
        self.received.extend(self.bytes.drain(..bytes));
    }
}

/// A connection at the target.
pub struct TargetConnection {
    queue: TcpTargetQueue,
    memory: RegionTable,
    pub to_target: Pipe,
    pub to_host: Pipe,
    pub controller: Option<u16>,
    pub qid: u16,
    /// Commands that wait for their data.
    waiting: HashMap<u16, (Sqe, u32)>,
    pub is_over: bool,
    /// Commands that are not answered: events.
    pub events: VecDeque<u16>,
    /// Whether it has stopped to answer.
    pub hangs: bool,
    /// State of the chance by which answers are replaced; zero for none.
    pub noise: u64,
    /// Its queue at a [`RealTarget`].
    pub real: RealQueue,
}

impl TargetConnection {
    fn new() -> TargetConnection {
        let options = TcpTargetOptions {
            slots: SLOTS,
            segments_max: 4,
            in_capsule: 8192,
            maxh2cdata: 8192,
            header_digest: true,
            data_digest: true,
            alignment: 0,
        };
        let buffers = Region::anonymous(usize::from(SLOTS) * SLOT_BYTES as usize).unwrap();
        TargetConnection {
            queue: TcpTargetQueue::new(options),
            memory: RegionTable::new(vec![buffers]),
            to_target: Pipe::default(),
            to_host: Pipe::default(),
            controller: None,
            qid: 0,
            waiting: HashMap::new(),
            is_over: false,
            events: VecDeque::new(),
            hangs: false,
            noise: 0,
            real: RealQueue::None,
        }
    }

    fn buffer(slot: u16, len: u32) -> Segment {
        Segment { region: 0, offset: u64::from(slot) * SLOT_BYTES, len }
    }

    fn data(&self, slot: u16, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.memory.resolve(TargetConnection::buffer(slot, len)).unwrap().copy_to_slice(&mut bytes);
        bytes
    }

    pub fn respond(&mut self, slot: u16, status: NvmeStatus, result: u64) {
        if !self.is_over {
            let (status, result) = match self.draw(6) {
                1 => (NvmeStatus(self.draw(0x8000) as u16), self.draw(u64::MAX)),
                2 => (status, self.draw(u64::MAX)),
                _ => (status, result),
            };
            self.queue.respond(slot, status, result);
        }
    }

    /// A number below this one; zero without noise.
    fn draw(&mut self, below: u64) -> u64 {
        self.noise ^= self.noise << 13;
        self.noise ^= self.noise >> 7;
        self.noise ^= self.noise << 17;
        self.noise % below
    }

    fn respond_with(&mut self, slot: u16, data: &[u8], transfer: u32) {
        if self.draw(12) == 1 {
            return self.respond(slot, NvmeStatus::INTERNAL, 0);
        }
        let mut whole = vec![0; transfer as usize];
        let len = data.len().min(whole.len());
        whole[..len].copy_from_slice(&data[..len]);
        if self.draw(3) > 0 {
            for _ in 0..self.draw(64) {
                let at = self.draw(transfer.into()) as usize;
                whole[at] = self.draw(256) as u8;
            }
        }
        let segment = TargetConnection::buffer(slot, transfer);
        self.memory.resolve(segment).unwrap().copy_from_slice(&whole);
        assert!(self.queue.respond_with(&self.memory, slot, std::iter::once(segment), 0));
    }

    /// Sends what there is.
    pub fn pump(&mut self) {
        let mut list = SendList::new(64);
        if !matches!(self.real, RealQueue::None) {
            if let Some(number) = self.real.fill(&mut list) {
                self.to_host.push(self.real.memory(), &list, number);
            }
            if let Some(number) = self.to_host.send(64) {
                self.real.sent(number);
            }
            return;
        }
        if let Some(number) = self.queue.fill(&self.memory, &mut list) {
            self.to_host.push(&self.memory, &list, number);
        }
        if let Some(number) = self.to_host.send(64) {
            self.queue.sent(number);
        }
    }
}

/// A command with its data.
pub struct Arrived {
    pub connection: usize,
    pub slot: u16,
    pub sqe: Sqe,
    pub bytes: u32,
    pub data: Vec<u8>,
}

/// A controller with its association.
#[derive(Default)]
pub struct TargetController {
    cc: u32,
    pub keep_alives: u32,
    pub last_ns: u64,
    pub keep_alive_ns: u64,
    pub shutdowns: u32,
    /// Its life; zero for none.
    pub life: u64,
}

/// How the target behaves.
pub struct TargetBehaviour {
    /// Whether it accepts a Connect that names a controller.
    pub is_static: bool,
    pub queues: u16,
    /// Status of the next Connects.
    pub refuse: VecDeque<(u16, NvmeStatus)>,
    /// ANA log, if any.
    pub ana: Option<Vec<u8>>,
    pub discovery: Option<DiscoveryLog>,
    pub namespaces: Vec<u32>,
    pub by_traffic: bool,
    /// Queue that authenticates with empty messages. As Linux does, it closes the connection once it is told of a
    /// failure.
    pub authenticates: Option<u16>,
    pub never_ready: bool,
    /// When controllers become ready, ns.
    pub ready_ns: u64,
    /// Time that the answer to an Identify takes, ns.
    pub identify_ns: u64,
    /// Maximum transfer.
    pub mdts: u8,
    /// Statuses of the next I/O commands, which are not executed.
    pub refuse_io: VecDeque<NvmeStatus>,
    /// Whether controllers name their lives, and can have others reset.
    pub has_lives: bool,
    /// Declared quiesce time, ms.
    pub quiesce_ms: u16,
    /// Status and result of the next Cross-Controller Reset commands.
    pub resets: VecDeque<(NvmeStatus, u64)>,
    /// Log pages of resets that are read next.
    pub reset_logs: VecDeque<Vec<u8>>,
}

impl Default for TargetBehaviour {
    fn default() -> TargetBehaviour {
        TargetBehaviour {
            is_static: true,
            queues: 4,
            refuse: VecDeque::new(),
            ana: None,
            discovery: None,
            namespaces: vec![1],
            by_traffic: false,
            authenticates: None,
            never_ready: false,
            ready_ns: 0,
            identify_ns: 0,
            mdts: 0,
            refuse_io: VecDeque::new(),
            has_lives: false,
            quiesce_ms: 0,
            resets: VecDeque::new(),
            reset_logs: VecDeque::new(),
        }
    }
}

/// See the head of the module.
#[derive(Default)]
pub struct Target {
    pub connections: Vec<TargetConnection>,
    pub controllers: BTreeMap<u16, TargetController>,
    next_controller: u16,
    lives: u64,
    pub behaviour: TargetBehaviour,
    pub disk: Vec<u8>,
    pub arrived: Vec<Arrived>,
    /// Identify commands that are answered later, and when, ns.
    delayed: VecDeque<(u64, Arrived)>,
    /// Names of the admin commands, in order.
    pub log: Vec<String>,
    pub now_ns: u64,
    /// Seed of wrong answers; zero for none.
    pub noise: u64,
    /// The crate's own target, in place of this one.
    pub real: Option<RealTarget>,
}

impl Target {
    pub fn new() -> Target {
        Target { disk: vec![0; BLOCKS as usize * BLOCK], next_controller: 1, ..Target::default() }
    }

    /// A new connection.
    pub fn accept(&mut self) -> usize {
        self.connections.push(TargetConnection::new());
        let number = self.connections.len() as u64;
        if let Some(connection) = self.connections.last_mut() {
            connection.noise = self.noise.wrapping_mul(number);
            if self.real.is_some() {
                connection.real = RealQueue::new();
            }
        }
        self.connections.len() - 1
    }

    /// The target learns that a connection has ended. Its commands that have not been executed are dropped.
    pub fn end(&mut self, number: usize) {
        let connection = &mut self.connections[number];
        if !std::mem::replace(&mut connection.is_over, true) {
            connection.queue.abandon(TcpEnd::Closed);
        }
        self.arrived.retain(|arrived| arrived.connection != number);
        self.delayed.retain(|(_, delayed)| delayed.connection != number);
    }

    /// Ends an association.
    pub fn end_controller(&mut self, id: u16) {
        self.controllers.remove(&id);
        for number in 0..self.connections.len() {
            if self.connections[number].controller == Some(id) {
                self.end(number);
            }
        }
    }

    /// Another controller has this one reset; false if it is not there.
    pub fn reset(&mut self, instance: ControllerInstance) -> bool {
        let is_there = self.controllers.get(&instance.id).is_some_and(|controller| controller.life == instance.random);
        if is_there {
            self.end_controller(instance.id);
        }
        is_there
    }

    /// Ends the associations whose keep-alive timer has expired.
    pub fn expire(&mut self) {
        if self.real.is_some() {
            return self.expire_real();
        }
        let is_late = |controller: &TargetController| {
            controller.keep_alive_ns > 0 && self.now_ns > controller.last_ns + controller.keep_alive_ns
        };
        let late: Vec<u16> = self.controllers.iter().filter(|(_, c)| is_late(c)).map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.end_controller(id));
    }

    /// Answers the Identify commands that are due.
    pub fn answer_delayed(&mut self) {
        while let Some((_, due)) = self.delayed.pop_front_if(|(due_ns, _)| *due_ns <= self.now_ns) {
            self.admin(due.connection, due.slot, &due.sqe, due.bytes);
        }
    }

    /// Handles the bytes received on a connection.
    pub fn receive(&mut self, number: usize) {
        if self.real.is_some() {
            return self.receive_real(number);
        }
        let received = std::mem::take(&mut self.connections[number].to_target.received);
        let mut bytes = &received[..];
        loop {
            let connection = &mut self.connections[number];
            if connection.is_over {
                return;
            }
            let TargetConnection { queue, memory, .. } = connection;
            let event = queue.receive(&mut bytes, |segment, piece| {
                memory.resolve(segment).unwrap().copy_from_slice(piece);
            });
            match event {
                None => break,
                Some(TcpTargetEvent::Started | TcpTargetEvent::Released(_)) => {}
                Some(TcpTargetEvent::Command { slot, sqe, transfer }) => match transfer {
                    TcpTransfer::None => self.command(number, slot, sqe, 0, vec![]),
                    TcpTransfer::Transport(bytes) if is_read(&sqe) => self.command(number, slot, sqe, bytes, vec![]),
                    TcpTransfer::InCapsule(bytes) | TcpTransfer::Transport(bytes) => {
                        let segment = TargetConnection::buffer(slot, bytes);
                        assert!(queue.receive_data(memory, slot, std::iter::once(segment)));
                        connection.waiting.insert(slot, (sqe, bytes));
                    }
                },
                Some(TcpTargetEvent::DataReady(slot)) => {
                    let (sqe, len) = connection.waiting.remove(&slot).unwrap();
                    let data = connection.data(slot, len);
                    self.command(number, slot, sqe, len, data);
                }
                Some(TcpTargetEvent::Ended(end)) => {
                    if matches!(end, TcpEnd::Violation(_)) {
                        panic!("the host has violated the protocol: {end:?}");
                    }
                    return self.end(number);
                }
            }
        }
        let rest = bytes.to_vec();
        self.connections[number].to_target.received.splice(0..0, rest);
    }

    fn command(&mut self, number: usize, slot: u16, sqe: Sqe, bytes: u32, data: Vec<u8>) {
        let now_ns = self.now_ns;
        let controller = self.connections[number].controller.and_then(|id| self.controllers.get_mut(&id));
        if let Some(controller) = controller
            && (self.behaviour.by_traffic || sqe.opcode() == admin::KEEP_ALIVE)
        {
            controller.last_ns = now_ns;
        }
        if self.connections[number].hangs {
            return;
        }
        if sqe.opcode() == FABRICS_OPCODE {
            self.fabrics(number, slot, &sqe, &data);
        } else if sqe.opcode() == admin::IDENTIFY && self.behaviour.identify_ns > 0 {
            let arrived = Arrived { connection: number, slot, sqe, bytes, data };
            self.delayed.push_back((now_ns + self.behaviour.identify_ns, arrived));
        } else if self.connections[number].qid == 0 {
            self.admin(number, slot, &sqe, bytes);
        } else {
            self.arrived.push(Arrived { connection: number, slot, sqe, bytes, data });
        }
    }

    fn fabrics(&mut self, number: usize, slot: u16, sqe: &Sqe, data: &[u8]) {
        let (id, now_ns) = (self.connections[number].controller, self.now_ns);
        let answer = match FabricsCommand::parse(sqe).unwrap() {
            FabricsCommand::Connect(command) => self.connect(number, command, data),
            FabricsCommand::PropertyGet { offset, .. } => {
                let controller = &self.controllers[&id.unwrap()];
                let config = ControllerConfig::from_bits(controller.cc);
                let status = ControllerStatus {
                    ready: config.enabled && !self.behaviour.never_ready && now_ns >= self.behaviour.ready_ns,
                    fatal: false,
                    shutdown: if config.shutdown > 0 { 2 } else { 0 },
                    subsystem_reset: false,
                    paused: false,
                };
                let capabilities = Capabilities {
                    queue_entries_max: 64,
                    command_sets: 1,
                    timeout_500ms: 2,
                    ..Capabilities::default()
                };
                match offset as usize {
                    CAP => (NvmeStatus::SUCCESS, capabilities.bits()),
                    CSTS => (NvmeStatus::SUCCESS, status.bits().into()),
                    _ => (NvmeStatus::INVALID_FIELD, 0),
                }
            }
            FabricsCommand::PropertySet { offset, value, .. } => {
                assert_eq!(offset as usize, CC);
                let controller = self.controllers.get_mut(&id.unwrap()).unwrap();
                controller.shutdowns += u32::from(ControllerConfig::from_bits(value as u32).shutdown > 0);
                controller.cc = value as u32;
                (NvmeStatus::SUCCESS, 0)
            }
            FabricsCommand::AuthSend(_) if data[1] == AUTH_FAILURE2 => return self.end(number),
            FabricsCommand::AuthSend(_) => (NvmeStatus::SUCCESS, 0),
            FabricsCommand::AuthReceive(len) => {
                let segment = TargetConnection::buffer(slot, len);
                let connection = &mut self.connections[number];
                connection.memory.resolve(segment).unwrap().copy_from_slice(&vec![0; len as usize]);
                assert!(connection.queue.respond_with(&connection.memory, slot, std::iter::once(segment), 0));
                return;
            }
            FabricsCommand::Disconnect => (NvmeStatus::INVALID_OPCODE, 0),
        };
        self.connections[number].respond(slot, answer.0, answer.1);
    }

    fn connect(&mut self, number: usize, command: ConnectCommand, data: &[u8]) -> (NvmeStatus, u64) {
        let data: &[u8; CONNECT_BYTES] = data.try_into().unwrap();
        let data = ConnectData::parse(data).unwrap();
        self.log.push(format!("connect {} {:x}", command.qid, data.controller_id));
        if let Some(at) = self.behaviour.refuse.iter().position(|(qid, _)| *qid == command.qid) {
            return (self.behaviour.refuse.remove(at).unwrap().1, 0);
        }
        let wrong = InvalidParameter { offset: 16, in_data: true };
        let refused = (fabrics_status::INVALID_PARAMETERS.with_dnr(), wrong.result());
        let asks_for_authentication = u64::from(self.behaviour.authenticates == Some(command.qid)) << 17;
        if command.qid > 0 {
            if !self.controllers.contains_key(&data.controller_id) {
                return refused;
            }
            assert!(self.noise > 0 || (command.qid <= self.behaviour.queues && command.sq_size < 64));
            let connection = &mut self.connections[number];
            (connection.controller, connection.qid) = (Some(data.controller_id), command.qid);
            return (NvmeStatus::SUCCESS, u64::from(data.controller_id) | asks_for_authentication);
        }
        let id = if data.controller_id == ANY_CONTROLLER {
            let id = self.next_controller;
            self.next_controller += 1;
            id
        } else if self.behaviour.is_static {
            self.end_controller(data.controller_id);
            data.controller_id
        } else {
            return refused;
        };
        let keep_alive_ns = u64::from(command.keep_alive_ms) * 1_000_000;
        self.lives += 1;
        let life = if self.behaviour.has_lives { self.lives } else { 0 };
        let controller = TargetController { last_ns: self.now_ns, keep_alive_ns, life, ..TargetController::default() };
        self.controllers.insert(id, controller);
        self.connections[number].controller = Some(id);
        (NvmeStatus::SUCCESS, u64::from(id) | asks_for_authentication)
    }

    fn admin(&mut self, number: usize, slot: u16, sqe: &Sqe, bytes: u32) {
        let behaviour = &self.behaviour;
        let mut data = vec![0; IDENTIFY_BYTES];
        let page: &mut [u8; IDENTIFY_BYTES] = (&mut data[..]).try_into().unwrap();
        let (cns, nsid) = (sqe.dword(10) as u8, sqe.nsid());
        let connection = &mut self.connections[number];
        match sqe.opcode() {
            admin::IDENTIFY => {
                self.log.push(format!("identify {cns}"));
                match cns {
                    cns::CONTROLLER => {
                        let id = connection.controller.unwrap();
                        let life = self.controllers[&id].life;
                        let identify = IdentifyController {
                            controller_id: id,
                            uniquifier: life as u8,
                            random: life,
                            cross_resets: if behaviour.has_lives { 4 } else { 0 },
                            quiesce_ms: behaviour.quiesce_ms,
                            mdts: behaviour.mdts,
                            command_capsule: (64 + 4096) / 16,
                            namespaces: 8,
                            namespaces_max: 8,
                            ana_groups: 4,
                            ana_transition_s: 1,
                            multipath: if behaviour.ana.is_some() { 8 } else { 0 },
                            attributes: if behaviour.by_traffic { 1 << 6 } else { 0 },
                            async_events: 1 << 8 | 1 << 11,
                            ..IdentifyController::default()
                        };
                        identify.write(page);
                    }
                    cns::ACTIVE_NAMESPACES => {
                        let ids = behaviour.namespaces.iter().filter(|id| **id > nsid);
                        for (at, id) in ids.take(IDENTIFY_BYTES / 4).enumerate() {
                            page[at * 4..][..4].copy_from_slice(&id.to_le_bytes());
                        }
                    }
                    cns::NAMESPACE => {
                        let mut identify = IdentifyNamespace {
                            blocks: BLOCKS,
                            capacity: BLOCKS,
                            ana_group: nsid,
                            ..IdentifyNamespace::default()
                        };
                        identify.set_lba_format(0, LbaFormat { block_shift: 9, ..LbaFormat::default() });
                        identify.write(page);
                    }
                    cns::NAMESPACE_IDS => {}
                    _ => return connection.respond(slot, NvmeStatus::INVALID_FIELD.with_dnr(), 0),
                }
                connection.respond_with(slot, &data, bytes);
            }
            admin::SET_FEATURES => {
                let queues = u64::from(behaviour.queues) - 1;
                self.log.push(format!("feature {}", sqe.dword(10) as u8));
                connection.respond(slot, NvmeStatus::SUCCESS, queues | queues << 16);
            }
            admin::KEEP_ALIVE => {
                self.log.push("keep alive".into());
                let controller = connection.controller.and_then(|id| self.controllers.get_mut(&id));
                controller.into_iter().for_each(|controller| controller.keep_alives += 1);
                connection.respond(slot, NvmeStatus::SUCCESS, 0);
            }
            admin::CROSS_CONTROLLER_RESET => {
                self.log.push(format!("reset {:x} {:x}", sqe.dword(10), sqe.dword(12)));
                let (status, result) = self.behaviour.resets.pop_front().unwrap();
                connection.respond(slot, status, result);
            }
            admin::ASYNC_EVENT => connection.events.push_back(slot),
            admin::GET_LOG_PAGE => {
                let (lid, offset) = (sqe.dword(10) as u8, u64::from(sqe.dword(12)));
                self.log.push(format!("log {lid:x}"));
                let empty = vec![0; 4096];
                let log = match (lid, &behaviour.discovery) {
                    (ANA_LOG, _) => behaviour.ana.clone().unwrap_or(empty),
                    (CROSS_RESET_LOG, _) => self.behaviour.reset_logs.pop_front().unwrap_or(empty),
                    (DISCOVERY_LOG, Some(log)) => log.part(offset, bytes as usize).unwrap_or(&empty).to_vec(),
                    _ => empty,
                };
                connection.respond_with(slot, &log, bytes);
            }
            opcode => panic!("admin command {opcode:x}"),
        }
    }

    /// Completes an Asynchronous Event Request of every association.
    pub fn event(&mut self, result: u64) {
        for connection in self.connections.iter_mut().filter(|connection| !connection.is_over) {
            if let Some(slot) = connection.events.pop_front() {
                connection.respond(slot, NvmeStatus::SUCCESS, result);
            }
        }
    }

    /// Executes an I/O command.
    pub fn execute(&mut self, number: usize) {
        let Arrived { connection, slot, sqe, bytes, data } = self.arrived.remove(number);
        let connection = &mut self.connections[connection];
        if let Some(status) = self.behaviour.refuse_io.pop_front() {
            return connection.respond(slot, status, 0);
        }
        let start = (sqe.slba() as usize).saturating_mul(BLOCK);
        if start.saturating_add(bytes as usize) > self.disk.len() {
            return connection.respond(slot, NvmeStatus::LBA_OUT_OF_RANGE.with_dnr(), 0);
        }
        match sqe.opcode() {
            io::READ => {
                let data = self.disk[start..start + bytes as usize].to_vec();
                connection.respond_with(slot, &data, bytes);
            }
            io::WRITE => {
                self.disk[start..start + data.len()].copy_from_slice(&data);
                connection.respond(slot, NvmeStatus::SUCCESS, 0);
            }
            _ => connection.respond(slot, NvmeStatus::SUCCESS, 0),
        }
    }

    /// Executes all I/O commands.
    pub fn execute_all(&mut self) {
        while !self.arrived.is_empty() {
            self.execute(0);
        }
    }
}

fn is_read(sqe: &Sqe) -> bool {
    match sqe.opcode() {
        FABRICS_OPCODE => matches!(FabricsCommand::parse(sqe), Ok(FabricsCommand::AuthReceive(_))),
        opcode => opcode & 3 == 2,
    }
}
