//! A target: a process with two ports of one subsystem, over one device.
//!
//! The machines are those of the product: [`FabricsSubsystem`] with its controllers, [`TcpAdminQueue`] and
//! [`TcpIoQueue`], and a hardware queue for each I/O queue. The glue between them is a model, since that of the product
//! (`export/src/nvme_tcp/session`) waits on sockets and on threads; it keeps its rules. An association ends with its
//! admin connection, at the end of its keep-alive timer, by a reset of another controller, or before a Connect for the
//! same controller is answered; it is gone when the last of its commands is back from the device. If that lasts, other
//! commands of the host wait.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable};
use blkyard_mq::{Bio, DeviceInfo, HwQueue, HwQueueConfig, Merging, Op, SendPiece};
use blkyard_nvme::fabrics::{ConnectCommand, FABRICS_OPCODE, FabricsCommand, Nqn};
use blkyard_nvme::tcp::{
    SendList, TcpAdminEvent, TcpAdminQueue, TcpDataMemory, TcpEnd, TcpIoQueue, TcpIoQueueOptions, TcpTargetOptions,
};
use blkyard_nvme::{
    AdminCompletion, Connected, ControllerInstance, ControllerOptions, ControllerQueueReply, ControllerRequest,
    FabricsOptions, FabricsSubsystem, KEEP_ALIVE_LATE_NS, NamespaceTable, NextBio, NvmeStatus, ServedNamespace, Sqe,
    SubsystemOptions,
};

use crate::medium::{Medium, MediumQueue};
use crate::network::{Ending, Network, Readable, Side};
use crate::oracle::version_of;

/// Bytes read of a connection at one time.
const READ_BYTES: usize = 32 << 10;
const TRANSFER_BYTES: u32 = 64 << 10;
const IN_CAPSULE_BYTES: u32 = 8192;
const QUEUE_ENTRIES: u16 = 32;
const ADMIN_ENTRIES: u16 = 32;
/// Time for ICReq and Connect, ns.
const CONNECT_NS: u64 = 10_000_000_000;
const SLOTS: usize = 33;

#[derive(Debug)]
struct HeldConnect {
    slot: u16,
    command: ConnectCommand,
    data: Vec<u8>,
}

/// An I/O queue with its hardware queue.
#[derive(Debug)]
struct IoSession {
    tcp: TcpIoQueue,
    hw: HwQueue<MediumQueue>,
    free: Vec<Box<Bio>>,
    /// Version of the last write that came.
    last_version: u64,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there are few of them")]
enum PortQueue {
    Admin(TcpAdminQueue),
    Io(IoSession),
}

#[derive(Debug)]
struct PortConnection {
    number: u64,
    queue: PortQueue,
    list: SendList,
    input: Vec<u8>,
    output: Vec<u8>,
    association: Option<u16>,
    qid: u16,
    waiting: Option<HeldConnect>,
    is_ending: bool,
    until_ns: Option<u64>,
}

/// A request for the reset of a controller: by the host of this controller of this port.
#[derive(Debug)]
struct WorldReset {
    instance: ControllerInstance,
    host: (Nqn, [u8; 16]),
    asked: (usize, u16),
}

#[derive(Debug)]
struct ServedPort {
    subsystem: FabricsSubsystem,
    connections: Vec<PortConnection>,
    /// Controllers whose association has ended, while their queues drain; and when their host may have known, ns.
    ending: Vec<(u16, u64)>,
    resets: Vec<WorldReset>,
    ended: VecDeque<(ControllerInstance, (Nqn, [u8; 16]))>,
}

/// How a target is made.
#[derive(Clone, Debug)]
pub(crate) struct TargetConfig {
    pub(crate) info: DeviceInfo,
    pub(crate) nqn: Nqn,
    pub(crate) ports: usize,
    /// Whether its controllers can have each other reset.
    pub(crate) has_resets: bool,
    /// Whether associations end with their keep-alive timer.
    pub(crate) keeps_silent: bool,
    /// Whether queues look at that timer by themselves.
    pub(crate) keeps_deadlines: bool,
    /// Whether commands wait while the device has those of an association that has ended.
    pub(crate) holds: bool,
    /// Whether writes of a queue must come in the order of their versions.
    pub(crate) judges_order: bool,
}

/// The process.
#[derive(Debug)]
pub(crate) struct WorldTarget {
    network: Network,
    medium: Rc<RefCell<Medium>>,
    config: TargetConfig,
    ports: Vec<ServedPort>,
    /// Until then it does nothing.
    pub(crate) hung_ns: u64,
    tickets: Vec<WorldReset>,
    /// Writes that came from connections whose host had left them.
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
        let TargetConfig { info, nqn, .. } = &config;
        let ports_of = |port: usize| {
            network.set_port(port, true, true);
            let controller = ControllerOptions {
                subsystem: nqn.to_string(),
                controller_id: 1 + port as u16 * FabricsSubsystem::CONTROLLER_IDS,
                io_queues: 8,
                queue_entries: QUEUE_ENTRIES,
                depth: QUEUE_ENTRIES,
                vectors: 1,
                transfer_bytes: TRANSFER_BYTES,
                has_shadow: false,
                fabrics: Some(FabricsOptions { in_capsule: IN_CAPSULE_BYTES, ..FabricsOptions::default() }),
                ..ControllerOptions::default()
            };
            let options = SubsystemOptions {
                nqn: nqn.clone(),
                hosts: None,
                auth: None,
                controller,
                controllers_max: 64,
                admin_entries: ADMIN_ENTRIES,
                discovery: Vec::new(),
                instance_seed: config.has_resets.then_some(life * 16 + port as u64),
            };
            let mut table = NamespaceTable::new(1);
            table.set(1, ServedNamespace::new(1, 0, info));
            ServedPort {
                subsystem: FabricsSubsystem::new(options, table),
                connections: Vec::new(),
                ending: Vec::new(),
                resets: Vec::new(),
                ended: VecDeque::new(),
            }
        };
        WorldTarget {
            network: network.clone(),
            medium: Rc::clone(medium),
            ports: (0..config.ports).map(ports_of).collect(),
            config,
            hung_ns: 0,
            tickets: Vec::new(),
            ghosts: 0,
        }
    }

    /// The process dies, with its machine if `ending` says so.
    pub(crate) fn die(self, ending: Ending) {
        for (number, port) in self.ports.iter().enumerate() {
            port.connections.iter().for_each(|one| self.network.close(one.number, Side::Target, ending));
            self.network.set_port(number, false, ending != Ending::Silence);
        }
    }

    /// Associations and connections that it has.
    pub(crate) fn in_use(&self) -> usize {
        self.ports.iter().map(|port| port.connections.len() + port.subsystem.associations().count()).sum()
    }

    /// When it has something to do by itself.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        let keeps_silent = self.config.keeps_silent;
        let timers = self.ports.iter().flat_map(|port| {
            let timers = port.subsystem.associations().filter(|(id, _)| keeps_silent && !port.is_ending(*id));
            let timers = timers.filter_map(|(_, association)| association.controller.deadline_ns());
            let queues = port.connections.iter().filter_map(|one| match &one.queue {
                PortQueue::Io(session) => session.hw.deadline_ns::<()>(),
                PortQueue::Admin(_) => None,
            });
            timers.chain(queues).chain(port.connections.iter().filter_map(|one| one.until_ns))
        });
        timers.min().map(|at_ns| at_ns.max(self.hung_ns))
    }

    /// Does all there is to do now. Returns whether anything moved.
    pub(crate) fn run(&mut self, now_ns: u64) -> bool {
        if now_ns < self.hung_ns {
            return false;
        }
        let mut is_busy = false;
        // Lanes may run before the control path does.
        for port in 0..self.ports.len() {
            is_busy |= self.serve_all(port, now_ns, |queue| matches!(queue, PortQueue::Io(_)));
        }
        for port in 0..self.ports.len() {
            is_busy |= self.end_overdue(port, now_ns);
            while let Some(number) = self.network.accept(port) {
                self.accept(port, number, now_ns);
                is_busy = true;
            }
            is_busy |= self.serve_all(port, now_ns, |queue| matches!(queue, PortQueue::Admin(_)));
            is_busy |= self.advance_all(port, now_ns);
            is_busy |= self.remove_ended(port, now_ns);
        }
        for ticket in std::mem::take(&mut self.tickets) {
            self.reset(ticket, now_ns);
            is_busy = true;
        }
        is_busy
    }

    /// Serves the connections of one kind.
    fn serve_all(&mut self, port: usize, now_ns: u64, is_its: impl Fn(&PortQueue) -> bool) -> bool {
        let (mut is_busy, mut at) = (false, 0);
        while at < self.ports[port].connections.len() {
            if is_its(&self.ports[port].connections[at].queue) {
                is_busy |= self.serve(port, at, now_ns);
            }
            at += 1;
        }
        is_busy
    }

    /// Ends the associations whose timer should have expired long ago, before any of their commands.
    fn end_overdue(&mut self, port: usize, now_ns: u64) -> bool {
        let now_ns = self.clock_ns(now_ns);
        let overdue = self.ports[port].subsystem.associations();
        let overdue = overdue.filter(|(_, one)| !one.controller.is_expired() && one.controller.is_overdue(now_ns));
        let overdue: Vec<u16> = overdue.map(|(id, _)| id).collect();
        for id in &overdue {
            if let Some(association) = self.ports[port].subsystem.association(*id) {
                association.controller.poll(now_ns);
            }
            self.end_association(port, *id, now_ns);
        }
        !overdue.is_empty()
    }

    /// The clock of its controllers. One that stands still ends no association.
    fn clock_ns(&self, now_ns: u64) -> u64 {
        if self.config.keeps_silent { now_ns } else { 0 }
    }

    /// Whether the device has commands of an association that has ended, and its host may count on their end.
    fn holds(&self, now_ns: u64) -> bool {
        let has_commands = |port: &ServedPort, id: u16| {
            let mut queues = port.connections.iter().filter(|one| one.association == Some(id));
            queues.any(|one| matches!(&one.queue, PortQueue::Io(session) if session.tcp.bios_out() > 0))
        };
        let ended =
            self.ports.iter().flat_map(|port| port.ending.iter().map(move |(id, since_ns)| (port, *id, since_ns)));
        let mut late = ended.filter(|(_, _, since_ns)| now_ns >= **since_ns + KEEP_ALIVE_LATE_NS);
        self.config.holds && late.any(|(port, id, _)| has_commands(port, id))
    }

    fn accept(&mut self, port: usize, number: u64, now_ns: u64) {
        let options = TcpTargetOptions {
            slots: 1,
            segments_max: 1,
            in_capsule: IN_CAPSULE_BYTES,
            maxh2cdata: TRANSFER_BYTES,
            header_digest: true,
            data_digest: true,
            alignment: 0,
        };
        let Ok(queue) = TcpAdminQueue::new(options) else { panic!("no memory for an admin queue") };
        self.ports[port].connections.push(PortConnection {
            number,
            queue: PortQueue::Admin(queue),
            list: SendList::new(2 * 128 + SendList::PIECES_MIN),
            input: Vec::new(),
            output: Vec::new(),
            association: None,
            qid: 0,
            waiting: None,
            is_ending: false,
            until_ns: Some(now_ns + CONNECT_NS),
        });
    }

    /// Serves a connection.
    fn serve(&mut self, port: usize, at: usize, now_ns: u64) -> bool {
        let network = self.network.clone();
        let one = &mut self.ports[port].connections[at];
        let mut is_busy = false;
        if one.until_ns.is_some_and(|until_ns| now_ns >= until_ns) {
            self.end_connection(port, at, now_ns);
            return true;
        }
        if !one.is_ending && one.input.len() < READ_BYTES {
            match network.readable(one.number, Side::Target) {
                Readable::Nothing => {}
                Readable::Bytes => {
                    one.input.extend(network.read(one.number, Side::Target, READ_BYTES));
                    is_busy = true;
                }
                Readable::End | Readable::Broken => {
                    self.end_connection(port, at, now_ns);
                    return true;
                }
            }
        }
        is_busy |= match &self.ports[port].connections[at].queue {
            PortQueue::Admin(_) => self.serve_admin(port, at, now_ns),
            PortQueue::Io(_) => self.serve_io(port, at, now_ns),
        };
        is_busy | self.send(port, at)
    }

    fn serve_admin(&mut self, port: usize, at: usize, now_ns: u64) -> bool {
        let mut is_busy = false;
        loop {
            let one = &mut self.ports[port].connections[at];
            let PortQueue::Admin(queue) = &mut one.queue else { return true };
            if one.is_ending {
                return is_busy;
            }
            let input = std::mem::take(&mut one.input);
            let mut bytes = &input[..];
            let event = queue.receive(&mut bytes);
            is_busy |= bytes.len() < input.len();
            one.input = bytes.to_vec();
            match event {
                None => return is_busy,
                Some(TcpAdminEvent::Started) => {}
                Some(TcpAdminEvent::Ended(end)) => {
                    assert!(!matches!(end, TcpEnd::Violation(_)), "the host has violated the protocol: {end:?}");
                    self.end_connection(port, at, now_ns);
                    return true;
                }
                Some(TcpAdminEvent::Command { slot, sqe, data, room }) => {
                    self.command(port, at, (slot, sqe), data, room, now_ns);
                }
            }
            is_busy = true;
        }
    }

    fn command(&mut self, port: usize, at: usize, (slot, sqe): (u16, Sqe), data: Vec<u8>, room: usize, now_ns: u64) {
        let clock_ns = self.clock_ns(now_ns);
        let ServedPort { subsystem, connections, .. } = &mut self.ports[port];
        let one = &mut connections[at];
        let parsed = (sqe.opcode() == FABRICS_OPCODE).then(|| FabricsCommand::parse(&sqe));
        let answer = match (one.association, parsed) {
            (_, Some(Err(status))) => Err(status.with_dnr()),
            (None, Some(Ok(FabricsCommand::Connect(command)))) => {
                return self.connect(port, at, HeldConnect { slot, command, data }, now_ns);
            }
            (Some(id), parsed) => {
                let Some(association) = subsystem.association(id) else { return };
                match parsed {
                    None => return association.controller.submit(slot, &sqe, data, room, clock_ns),
                    Some(Ok(FabricsCommand::PropertyGet { size, offset })) => {
                        association.controller.property(size, offset)
                    }
                    Some(Ok(FabricsCommand::PropertySet { size, offset, value })) => {
                        association.controller.set_property(size, offset, value).map(|()| 0)
                    }
                    Some(_) => Err(NvmeStatus::COMMAND_SEQUENCE.with_dnr()),
                }
            }
            _ => Err(NvmeStatus::COMMAND_SEQUENCE.with_dnr()),
        };
        one.answer(slot, answer);
    }

    fn connect(&mut self, port: usize, at: usize, connect: HeldConnect, now_ns: u64) {
        let HeldConnect { slot, command, data } = &connect;
        let clock_ns = self.clock_ns(now_ns);
        let connected = self.ports[port].subsystem.connect(command, data, clock_ns);
        let one = &mut self.ports[port].connections[at];
        match connected {
            Err(refusal) => {
                let PortQueue::Admin(queue) = &mut one.queue else { return };
                let (slot, status, result) = (*slot, refusal.status, refusal.result);
                queue.complete(AdminCompletion { slot, status, result, data: Vec::new() });
            }
            Ok(Connected::Admin(id)) => {
                let PortQueue::Admin(queue) = &mut one.queue else { return };
                queue.open(ADMIN_ENTRIES, TRANSFER_BYTES).expect("memory for an admin queue");
                one.answer(*slot, Ok(id.into()));
                (one.association, one.until_ns) = (Some(id), None);
            }
            Ok(Connected::Io(id, connected)) => {
                let mut one = self.ports[port].connections.remove(at);
                let PortQueue::Admin(admin) = one.queue else { unreachable!("it has received a Connect") };
                let options = TcpIoQueueOptions {
                    entries: command.sq_size + 1,
                    has_flow_control: !command.no_flow_control,
                    in_capsule: IN_CAPSULE_BYTES,
                    transfer_bytes: TRANSFER_BYTES,
                    pool_bytes: TRANSFER_BYTES,
                };
                let bytes = TcpIoQueue::memory_bytes(&options);
                let region = Region::anonymous(bytes as usize).expect("memory for an I/O queue");
                let table = Arc::new(RegionTable::new(vec![region]));
                let memory = TcpDataMemory { table: Arc::clone(&table), region: 0, offset: 0, bytes };
                let mut tcp = TcpIoQueue::new(admin.into_queue(), connected, options, memory);
                tcp.accept(*slot, id);
                let config =
                    HwQueueConfig { depth: 16, bios_max: 64, merging: Merging::Off, ..HwQueueConfig::default() };
                let mut hw = HwQueue::new(MediumQueue::new(&self.medium), Arc::new(self.config.info.clone()), config);
                hw.set_memory(&mut (), table);
                let free = (0..64).map(|_| Bio::with_capacity(SLOTS)).collect();
                one.queue = PortQueue::Io(IoSession { tcp, hw, free, last_version: 0 });
                (one.association, one.qid, one.until_ns) = (Some(id), command.qid, None);
                self.ports[port].connections.insert(at, one);
            }
            Ok(Connected::Replaces(id)) => {
                one.waiting = Some(connect);
                self.end_association(port, id, now_ns);
            }
        }
    }

    fn serve_io(&mut self, port: usize, at: usize, now_ns: u64) -> bool {
        let (judges_order, network) = (self.config.judges_order, self.network.clone());
        let (holds, clock_ns) = (self.holds(now_ns), self.clock_ns(now_ns));
        let one = &mut self.ports[port].connections[at];
        let number = one.number;
        let PortQueue::Io(session) = &mut one.queue else { return false };
        let mut is_busy = false;
        if self.config.keeps_deadlines && !one.is_ending && clock_ns >= session.tcp.serves_until_ns() {
            session.drop_commands();
            one.is_ending = true;
            is_busy = true;
        }
        if !one.is_ending {
            let input = std::mem::take(&mut one.input);
            let mut bytes = &input[..];
            session.tcp.receive(&mut bytes);
            is_busy |= bytes.len() < input.len();
            one.input = bytes.to_vec();
        }
        let IoSession { tcp, hw, free, last_version } = session;
        is_busy |= hw.reap(&mut (), now_ns, &mut |bio| {
            tcp.end(bio.cookie as u16, bio.status);
            free.push(bio);
        }) > 0;
        while !one.is_ending && !holds && hw.room() > 0 && tcp.has_ready() {
            let Some(mut bio) = free.pop() else { break };
            match tcp.fetch(&mut bio) {
                NextBio::Bio(slot) => {
                    bio.cookie = slot.into();
                    bio.namespace = 0;
                    if bio.op == Op::Write && !network.is_open(number, Side::Host) {
                        self.ghosts += 1;
                    }
                    if judges_order && bio.op == Op::Write {
                        let mut sector = [0; 512];
                        let first =
                            bio.segments.first().and_then(|segment| tcp.memory().table.resolve_region(*segment));
                        let first = first.expect("a write has data in the memory of its queue");
                        first.part(0, 512).copy_to_slice(&mut sector);
                        let version = version_of(&sector).1;
                        let last = std::mem::replace(last_version, version);
                        assert!(last < version, "write {version} came behind write {last} on one queue");
                    }
                    hw.submit(bio);
                }
                NextBio::Without => free.push(bio),
                NextBio::Unavailable => {
                    free.push(bio);
                    break;
                }
            }
            is_busy = true;
        }
        is_busy |= hw.issue(&mut (), now_ns) > 0;
        if let Some(end) = tcp.end_reason().filter(|_| !one.is_ending) {
            assert!(!matches!(end, TcpEnd::Violation(_)), "the host has violated the protocol: {end:?}");
            self.end_connection(port, at, now_ns);
            return true;
        }
        is_busy
    }

    fn send(&mut self, port: usize, at: usize) -> bool {
        let network = self.network.clone();
        let one = &mut self.ports[port].connections[at];
        let mut is_busy = false;
        loop {
            if !one.output.is_empty() {
                let taken = network.write(one.number, Side::Target, &one.output);
                one.output.drain(..taken);
                is_busy |= taken > 0;
                if !one.output.is_empty() {
                    return is_busy;
                }
            }
            let number = match &mut one.queue {
                PortQueue::Admin(queue) => queue.fill(&mut one.list),
                PortQueue::Io(session) => session.tcp.fill(&mut one.list),
            };
            let Some(number) = number else { return is_busy };
            let memory = match &one.queue {
                PortQueue::Admin(queue) => queue.memory(),
                PortQueue::Io(session) => &session.tcp.memory().table,
            };
            for piece in one.list.pieces() {
                match piece {
                    SendPiece::Bytes(bytes) => one.output.extend_from_slice(bytes),
                    SendPiece::Data(segment) => {
                        let start = one.output.len();
                        one.output.resize(start + segment.len as usize, 0);
                        if let Some(span) = memory.resolve_region(segment) {
                            span.copy_to_slice(&mut one.output[start..]);
                        }
                    }
                }
            }
            one.list.clear();
            match &mut one.queue {
                PortQueue::Admin(queue) => {
                    queue.sent(number);
                    let event = queue.receive(&mut &[][..]);
                    assert!(event.is_none(), "without bytes there is no event: {event:?}");
                }
                PortQueue::Io(session) => {
                    session.tcp.sent(number);
                    session.tcp.receive(&mut &[][..]);
                }
            }
        }
    }

    /// A connection has ended.
    fn end_connection(&mut self, port: usize, at: usize, now_ns: u64) {
        let one = &mut self.ports[port].connections[at];
        if std::mem::replace(&mut one.is_ending, true) {
            return;
        }
        one.until_ns = None;
        let association = one.association;
        match &mut one.queue {
            PortQueue::Admin(queue) => {
                queue.abandon(TcpEnd::Closed);
                if let Some(id) = association {
                    self.end_association(port, id, now_ns);
                }
            }
            PortQueue::Io(session) => session.tcp.abandon(TcpEnd::Closed),
        }
    }

    /// Ends an association: no further command of it is executed.
    fn end_association(&mut self, port: usize, id: u16, now_ns: u64) {
        let port = &mut self.ports[port];
        if port.is_ending(id) {
            return;
        }
        let Some(association) = port.subsystem.association(id) else { return };
        let since_ns = association.controller.end_service(now_ns);
        port.ending.push((id, since_ns));
        for one in port.connections.iter_mut().filter(|one| one.association == Some(id)) {
            (one.is_ending, one.until_ns) = (true, None);
            match &mut one.queue {
                PortQueue::Admin(queue) => queue.abandon(TcpEnd::Closed),
                PortQueue::Io(session) => session.drop_commands(),
            }
        }
    }

    /// Drops connections that have ended, and removes associations whose last command is back.
    fn remove_ended(&mut self, port: usize, now_ns: u64) -> bool {
        let mut is_busy = false;
        let mut at = 0;
        while at < self.ports[port].connections.len() {
            let one = &self.ports[port].connections[at];
            let has_drained = match &one.queue {
                PortQueue::Admin(_) => one.output.is_empty(),
                PortQueue::Io(session) => session.hw.is_idle() && session.tcp.bios_out() == 0,
            };
            if !one.is_ending || !has_drained {
                at += 1;
                continue;
            }
            is_busy = true;
            let one = self.ports[port].connections.remove(at);
            self.network.close(one.number, Side::Target, Ending::Death);
            if let (Some(id), true) = (one.association, one.qid > 0)
                && let Some(association) = self.ports[port].subsystem.association(id)
            {
                association.controller.reply(one.qid, ControllerQueueReply::Stopped);
            }
        }
        for (id, since_ns) in std::mem::take(&mut self.ports[port].ending) {
            if self.ports[port].connections.iter().any(|one| one.association == Some(id)) {
                self.ports[port].ending.push((id, since_ns));
                continue;
            }
            is_busy = true;
            self.finish_resets(port, id);
            self.ports[port].subsystem.remove(id);
            for at in 0..self.ports[port].connections.len() {
                if let Some(waiting) = self.ports[port].connections[at].waiting.take() {
                    self.connect(port, at, waiting, now_ns);
                }
            }
        }
        is_busy
    }

    fn advance_all(&mut self, port: usize, now_ns: u64) -> bool {
        let ids: Vec<u16> = self.ports[port].subsystem.associations().map(|(id, _)| id).collect();
        let (mut is_busy, clock_ns) = (false, self.clock_ns(now_ns));
        for id in ids {
            let ServedPort { subsystem, connections, .. } = &mut self.ports[port];
            let Some(association) = subsystem.association(id) else { continue };
            let host = (association.host().clone(), association.host_id());
            let controller = &mut association.controller;
            controller.poll(clock_ns);
            while let Some(completion) = controller.take_completion() {
                is_busy = true;
                let mut admins = connections.iter_mut().filter(|one| one.association == Some(id) && !one.is_ending);
                if let Some(PortQueue::Admin(queue)) = admins.find(|one| one.qid == 0).map(|one| &mut one.queue) {
                    queue.complete(completion);
                }
            }
            let mut stopped = Vec::new();
            while let Some(request) = controller.take_request() {
                is_busy = true;
                match request {
                    // Durable already: all that a stopped controller has executed was flushed by its hosts, or need
                    // not be.
                    ControllerRequest::Flush(number) => controller.flushed(number),
                    ControllerRequest::Queue(qid, _) => stopped.push(qid),
                    ControllerRequest::Create(_) => unreachable!("queues of fabrics are connected"),
                }
            }
            while let Some(instance) = controller.take_cross_reset() {
                is_busy = true;
                self.tickets.push(WorldReset { instance, host: host.clone(), asked: (port, id) });
            }
            for qid in stopped {
                let connections = &self.ports[port].connections;
                let queue = connections.iter().position(|one| one.association == Some(id) && one.qid == qid);
                if let Some(at) = queue {
                    self.end_connection(port, at, now_ns);
                } else if let Some(association) = self.ports[port].subsystem.association(id) {
                    association.controller.reply(qid, ControllerQueueReply::Stopped);
                }
            }
            let ServedPort { subsystem, .. } = &mut self.ports[port];
            let is_expired = subsystem.association(id).is_some_and(|known| known.controller.is_expired());
            if is_expired && !self.ports[port].is_ending(id) {
                self.end_association(port, id, now_ns);
                is_busy = true;
            }
        }
        is_busy
    }

    /// Resets a controller for another one.
    fn reset(&mut self, ticket: WorldReset, now_ns: u64) {
        let instance = ticket.instance;
        let place = self.ports.iter().position(|port| {
            let first = port.subsystem.options().controller.controller_id;
            (first..first + FabricsSubsystem::CONTROLLER_IDS).contains(&instance.id)
        });
        let unknown = Err(NvmeStatus::INVALID_FIELD.with_dnr());
        let Some(port) = place else { return self.answer_reset(&ticket, unknown, now_ns) };
        let has_ended = self.ports[port].ended.iter().any(|(ended, host)| *ended == instance && *host == ticket.host);
        if has_ended {
            return self.answer_reset(&ticket, Ok(()), now_ns);
        }
        let known = self.ports[port].subsystem.association(instance.id);
        let known = known.filter(|known| known.controller.instance() == Some(instance));
        if known.is_none_or(|known| (known.host(), known.host_id()) != (&ticket.host.0, ticket.host.1)) {
            return self.answer_reset(&ticket, unknown, now_ns);
        }
        if self.ports[port].resets.iter().any(|running| running.instance == instance) {
            return self.answer_reset(&ticket, Err(NvmeStatus::CROSS_RESET_RUNNING), now_ns);
        }
        self.ports[port].resets.push(ticket);
        self.end_association(port, instance.id, now_ns);
    }

    fn answer_reset(&mut self, ticket: &WorldReset, outcome: Result<(), NvmeStatus>, _now_ns: u64) {
        let (port, id) = ticket.asked;
        if let Some(association) = self.ports[port].subsystem.association(id) {
            association.controller.other_reset(ticket.instance, outcome);
        }
    }

    fn finish_resets(&mut self, port: usize, id: u16) {
        let Some(association) = self.ports[port].subsystem.association(id) else { return };
        let Some(instance) = association.controller.instance() else { return };
        let host = (association.host().clone(), association.host_id());
        self.ports[port].ended.push_back((instance, host));
        for place in (0..self.ports[port].resets.len()).rev() {
            if self.ports[port].resets[place].instance == instance {
                let ticket = self.ports[port].resets.swap_remove(place);
                self.answer_reset(&ticket, Ok(()), 0);
            }
        }
    }
}

impl ServedPort {
    /// Whether the association of this controller has ended.
    fn is_ending(&self, id: u16) -> bool {
        self.ending.iter().any(|(ending, _)| *ending == id)
    }
}

impl IoSession {
    /// No command begins any more, and those that the device does not have are taken back.
    fn drop_commands(&mut self) {
        self.tcp.abandon(TcpEnd::Closed);
        let mut all = usize::MAX;
        self.hw.cancel(&mut all, |_| true);
    }
}

impl PortConnection {
    fn answer(&mut self, slot: u16, answer: Result<u64, NvmeStatus>) {
        let PortQueue::Admin(queue) = &mut self.queue else { unreachable!("an admin command came") };
        let (status, result) = answer.map_or_else(|status| (status, 0), |result| (NvmeStatus::SUCCESS, result));
        queue.complete(AdminCompletion { slot, status, result, data: Vec::new() });
    }
}
