//! The crate's own target behind the connections of the rig: both sides of the crate against each other.

use std::sync::Arc;

use blkyard_mem::{Region, RegionTable};
use blkyard_mq::{Bio, DeviceInfo, FenceEvidence, Op, QueueLimits, Status};
use blkyard_nvme::fabrics::{ANY_CONTROLLER, DISCOVERY_NQN, FABRICS_OPCODE, FabricsCommand, Nqn, fabrics_status};
use blkyard_nvme::tcp::{
    SendList, TcpAdminEvent, TcpAdminQueue, TcpDataMemory, TcpEnd, TcpIoQueue, TcpIoQueueOptions, TcpTargetOptions,
};
use blkyard_nvme::{
    AdminCompletion, Connected, ControllerOptions, ControllerQueueCommand, ControllerQueueReply, ControllerRequest,
    ControllerState, DiscoveryEntry, DiscoveryKind, FabricsHostError, FabricsHostEvent, FabricsOptions,
    FabricsSubsystem, NamespaceTable, NextBio, NvmeStatus, ServedNamespace, Sqe, SubsystemOptions,
};

use crate::fabrics::rig::{Rig, config};
use crate::fabrics::target::{BLOCK, Target, TargetConnection};

const DISK_BYTES: usize = 1 << 20;
const QUEUE: TcpIoQueueOptions = TcpIoQueueOptions {
    entries: 16,
    has_flow_control: true,
    in_capsule: 8192,
    transfer_bytes: 64 << 10,
    pool_bytes: 64 << 10,
};

/// A subsystem with a disk.
pub struct RealTarget {
    subsystem: FabricsSubsystem,
    disk: Arc<Region>,
}

/// The queue of a connection.
#[expect(clippy::large_enum_variant, reason = "there are few of them")]
pub enum RealQueue {
    Admin(TcpAdminQueue),
    Io(TcpIoQueue),
    None,
}

impl RealQueue {
    pub fn new() -> RealQueue {
        let options = TcpTargetOptions {
            slots: 1,
            segments_max: 1,
            in_capsule: 8192,
            maxh2cdata: 128 << 10,
            header_digest: true,
            data_digest: true,
            alignment: 0,
        };
        RealQueue::Admin(TcpAdminQueue::new(options).unwrap())
    }

    pub fn fill(&mut self, list: &mut SendList) -> Option<u64> {
        match self {
            RealQueue::Admin(queue) => queue.fill(list),
            RealQueue::Io(queue) => queue.fill(list),
            RealQueue::None => None,
        }
    }

    pub fn memory(&self) -> &RegionTable {
        match self {
            RealQueue::Admin(queue) => queue.memory(),
            RealQueue::Io(queue) => &queue.memory().table,
            RealQueue::None => unreachable!(),
        }
    }

    pub fn sent(&mut self, number: u64) {
        match self {
            RealQueue::Admin(queue) => queue.sent(number),
            RealQueue::Io(queue) => queue.sent(number),
            RealQueue::None => {}
        }
    }

    pub fn abandon(&mut self) {
        match self {
            RealQueue::Admin(queue) => queue.abandon(TcpEnd::Closed),
            RealQueue::Io(queue) => queue.abandon(TcpEnd::Closed),
            RealQueue::None => {}
        }
    }
}

impl RealTarget {
    pub fn new(hosts: Option<Vec<Nqn>>) -> RealTarget {
        let controller = ControllerOptions {
            controller_id: 1,
            io_queues: 4,
            queue_entries: 128,
            vectors: 1,
            transfer_bytes: 64 << 10,
            fabrics: Some(FabricsOptions { in_capsule: 8192, ..FabricsOptions::default() }),
            ..ControllerOptions::default()
        };
        let entry = DiscoveryEntry {
            kind: DiscoveryKind::Subsystem,
            subsystem: config().subsystem,
            address: "127.0.0.1".parse().unwrap(),
            port: 4420,
            port_id: 1,
            controller_id: ANY_CONTROLLER,
            admin_entries: 32,
            no_flow_control: true,
            secure_channel: blkyard_nvme::SecureChannel::NotRequired,
            has_tls: false,
        };
        let options = SubsystemOptions {
            nqn: config().subsystem,
            hosts,
            auth: None,
            controller,
            controllers_max: 8,
            admin_entries: 32,
            discovery: vec![entry],
            instance_seed: Some(7),
        };
        let limits =
            QueueLimits { discard_sectors_max: 1 << 20, write_zeroes_sectors_max: 1 << 20, ..QueueLimits::default() };
        let capacity_sectors = DISK_BYTES as u64 / 512;
        let info = DeviceInfo { capacity_sectors, limits, volatile_cache: true, ..DeviceInfo::default() };
        let mut table = NamespaceTable::new(2);
        table.set(1, ServedNamespace::new(1, 0, &info));
        RealTarget { subsystem: FabricsSubsystem::new(options, table), disk: Region::anonymous(DISK_BYTES).unwrap() }
    }

    /// Executes a bio of an I/O queue.
    fn execute(&self, queue: &mut TcpIoQueue, slot: u16, bio: &Bio) {
        let mut at = bio.sector * 512;
        if bio.op == Op::WriteZeroes {
            self.disk.zero(at, bio.bytes() as usize);
        }
        for segment in &bio.segments {
            let memory = queue.memory().table.resolve_region(*segment).unwrap();
            let disk = self.disk.span(at, memory.len()).unwrap();
            if bio.op == Op::Read {
                memory.copy_from(&disk);
            } else {
                disk.copy_from(&memory);
            }
            at += u64::from(segment.len);
        }
        queue.end(slot, Status::Ok);
    }
}

impl Target {
    /// Handles the bytes received on a connection.
    pub fn receive_real(&mut self, number: usize) {
        let received = std::mem::take(&mut self.connections[number].to_target.received);
        let mut bytes = &received[..];
        loop {
            let connection = &mut self.connections[number];
            let real = self.real.as_mut().unwrap();
            match &mut connection.real {
                RealQueue::None => break,
                RealQueue::Io(queue) => {
                    queue.receive(&mut bytes);
                    loop {
                        let mut bio = Bio::default();
                        match queue.fetch(&mut bio) {
                            NextBio::Unavailable => break,
                            NextBio::Without => {}
                            NextBio::Bio(slot) => real.execute(queue, slot, &bio),
                        }
                    }
                    // Closed by a shutdown.
                    let end = queue.end_reason();
                    assert!(matches!(end, None | Some(TcpEnd::Closed)), "the host has violated the protocol: {end:?}");
                    break;
                }
                RealQueue::Admin(queue) => match queue.receive(&mut bytes) {
                    None => break,
                    Some(TcpAdminEvent::Started) => {}
                    Some(TcpAdminEvent::Ended(end)) => panic!("the host has violated the protocol: {end:?}"),
                    Some(TcpAdminEvent::Command { slot, sqe, data, room }) => {
                        self.real_command(number, slot, &sqe, data, room);
                    }
                },
            }
            self.pump_controllers();
        }
        self.pump_controllers();
        let rest = bytes.to_vec();
        self.connections[number].to_target.received.splice(0..0, rest);
    }

    fn real_command(&mut self, number: usize, slot: u16, sqe: &Sqe, data: Vec<u8>, room: usize) {
        let now_ns = self.now_ns;
        let id = self.connections[number].controller;
        if sqe.opcode() != FABRICS_OPCODE {
            let real = self.real.as_mut().unwrap();
            return real.subsystem.association(id.unwrap()).unwrap().controller.submit(slot, sqe, data, room, now_ns);
        }
        let command = FabricsCommand::parse(sqe).unwrap();
        if let FabricsCommand::Connect(command) = command {
            loop {
                let real = self.real.as_mut().unwrap();
                let connection = &mut self.connections[number];
                self.log.push(format!("connect {}", command.qid));
                match real.subsystem.connect(&command, &data, now_ns) {
                    Ok(Connected::Replaces(id)) => {
                        self.log.push("replaces".into());
                        self.end_real(id);
                    }
                    Ok(Connected::Admin(id)) => {
                        connection.controller = Some(id);
                        let RealQueue::Admin(queue) = &mut connection.real else { unreachable!() };
                        queue.open(command.sq_size + 1, 64 << 10).unwrap();
                        queue.set_flow_control(u32::from(command.sq_size) + 1);
                        return connection.answer(slot, Ok(id.into()));
                    }
                    Ok(Connected::Io(id, connected)) => {
                        (connection.controller, connection.qid) = (Some(id), command.qid);
                        let RealQueue::Admin(queue) = std::mem::replace(&mut connection.real, RealQueue::None) else {
                            unreachable!()
                        };
                        assert!(command.no_flow_control, "reads of an I/O queue may end without a response");
                        let (entries, has_flow_control) = (command.sq_size + 1, !command.no_flow_control);
                        let options = TcpIoQueueOptions { entries, has_flow_control, ..QUEUE };
                        let bytes = TcpIoQueue::memory_bytes(&options);
                        let region = Region::anonymous(bytes as usize).unwrap();
                        let table = Arc::new(RegionTable::new(vec![region]));
                        let memory = TcpDataMemory { table, region: 0, offset: 0, bytes };
                        let mut queue = TcpIoQueue::new(queue.into_queue(), connected, options, memory);
                        queue.accept(slot, id);
                        connection.real = RealQueue::Io(queue);
                        return;
                    }
                    Err(refusal) => {
                        let RealQueue::Admin(queue) = &mut connection.real else { unreachable!() };
                        let (status, result) = (refusal.status, refusal.result);
                        return queue.complete(AdminCompletion { slot, status, result, data: vec![] });
                    }
                }
            }
        }
        let real = self.real.as_mut().unwrap();
        let controller = &mut real.subsystem.association(id.unwrap()).unwrap().controller;
        let answer = match command {
            FabricsCommand::PropertyGet { size, offset } => controller.property(size, offset),
            FabricsCommand::PropertySet { size, offset, value } => {
                controller.set_property(size, offset, value).map(|()| 0)
            }
            _ => Err(NvmeStatus::INVALID_OPCODE),
        };
        self.connections[number].answer(slot, answer);
    }

    /// Passes on what controllers ask for, and their completions.
    fn pump_controllers(&mut self) {
        let real = self.real.as_mut().unwrap();
        let ids: Vec<u16> = real.subsystem.associations().map(|(id, _)| id).collect();
        for id in ids {
            let controller = &mut real.subsystem.association(id).unwrap().controller;
            controller.poll(self.now_ns);
            let of_controller = |connection: &&mut TargetConnection| connection.controller == Some(id);
            while let Some(request) = controller.take_request() {
                match request {
                    ControllerRequest::Queue(qid, ControllerQueueCommand::Stop) => {
                        let mut queues = self.connections.iter_mut().filter(of_controller);
                        if let Some(connection) = queues.find(|connection| connection.qid == qid && !connection.is_over)
                        {
                            connection.real.abandon();
                        }
                        controller.reply(qid, ControllerQueueReply::Stopped);
                    }
                    ControllerRequest::Flush(number) => controller.flushed(number),
                    other => panic!("{other:?}"),
                }
            }
            while let Some(completion) = controller.take_completion() {
                let mut queues = self.connections.iter_mut().filter(of_controller);
                if let Some(RealQueue::Admin(queue)) = queues.find(|c| c.qid == 0 && !c.is_over).map(|c| &mut c.real) {
                    queue.complete(completion);
                }
            }
        }
    }

    /// Ends associations whose keep-alive timer has expired.
    pub fn expire_real(&mut self) {
        self.pump_controllers();
        let real = self.real.as_mut().unwrap();
        let ids: Vec<u16> = real.subsystem.associations().map(|(id, _)| id).collect();
        for id in ids {
            let real = self.real.as_mut().unwrap();
            if real.subsystem.association(id).unwrap().controller.is_expired() {
                self.log.push("expired".into());
                self.end_real(id);
            }
        }
    }

    /// Ends an association.
    fn end_real(&mut self, id: u16) {
        for connection in self.connections.iter_mut().filter(|connection| connection.controller == Some(id)) {
            connection.is_over = true;
            connection.real.abandon();
        }
        self.real.as_mut().unwrap().subsystem.remove(id);
    }

    fn cut_real(&mut self) {
        let real = self.real.as_ref().unwrap();
        let ids: Vec<u16> = real.subsystem.associations().map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.end_real(id));
    }
}

impl TargetConnection {
    fn answer(&mut self, slot: u16, answer: Result<u64, NvmeStatus>) {
        let RealQueue::Admin(queue) = &mut self.real else { unreachable!() };
        let (status, result) = answer.map_or_else(|status| (status, 0), |result| (NvmeStatus::SUCCESS, result));
        queue.complete(AdminCompletion { slot, status, result, data: vec![] });
    }
}

fn rig(hosts: Option<Vec<Nqn>>, queues: u16) -> Rig {
    let mut rig = Rig::new(config());
    rig.target.real = Some(RealTarget::new(hosts));
    rig.host.start(0);
    if queues > 0 {
        rig.run_until(|rig| rig.host.state() == ControllerState::Live);
        (1..=queues).for_each(|qid| rig.open(qid));
        rig.run_until(|rig| (1..=queues).all(|qid| rig.host.is_started(qid)));
    }
    rig
}

#[test]
fn both_sides_do_io_and_keep_each_other_alive() {
    let mut rig = rig(None, 2);
    for block in 0..32 {
        rig.submit(1 + (block % 2) as u16, Op::Write, block, block as u8 + 1);
    }
    rig.run_until(|rig| rig.ended.len() == 32);
    rig.submit(1, Op::Flush, 0, 0);
    for block in 0..31 {
        rig.submit(2 - (block % 2) as u16, Op::Read, block, 0);
    }
    rig.run_until(|rig| rig.ended.len() == 64);
    assert_eq!(rig.statuses(), [Status::Ok; 64]);
    assert!((0..31).all(|block| rig.value(2 - (block % 2) as u16, block) == block as u8 + 1));
    rig.run_for(60_000);
    assert_eq!((rig.host.state(), rig.host.association()), (ControllerState::Live, 1));
    // Without trim a range reads as before; write zeroes clears it.
    rig.submit(1, Op::WriteZeroes, 3, 0);
    rig.submit(1, Op::Discard, 40, 0);
    rig.run_until(|rig| rig.ended.len() == 2);
    rig.submit(1, Op::Read, 3, 0);
    rig.run_until(|rig| rig.ended.len() == 3);
    assert_eq!((rig.statuses(), rig.value(1, 3)), (vec![Status::Ok; 3], 0));
    rig.host.disconnect(rig.now_ns);
    rig.run_until(|rig| rig.events.last() == Some(&FabricsHostEvent::Over));
    assert_eq!(rig.count(|event| *event == FabricsHostEvent::Fenced(1, FenceEvidence::AssociationEnded)), 1);
}

#[test]
fn a_reconnect_replaces_the_association_and_fences_it() {
    let mut rig = rig(None, 1);
    rig.submit(1, Op::Write, 5, 9);
    // The host closes its connections, and the target does not learn of it.
    let (association, _) = rig.admin.unwrap();
    rig.round();
    rig.host.admin_lost(association, rig.now_ns);
    rig.run_until(|rig| rig.host.association() == 2 && rig.host.is_started(1));
    assert!(rig.target.log.contains(&"replaces".to_owned()));
    assert_eq!(rig.count(|event| *event == FabricsHostEvent::Fenced(1, FenceEvidence::AssociationEnded)), 1);
    rig.run_until(|rig| rig.ended.len() == 1);
    // A target that was restarted knows no association: the same controller is made anew.
    rig.target.cut_real();
    rig.run_until(|rig| rig.count(|event| matches!(event, FabricsHostEvent::Lost(_))) == 2);
    rig.run_until(|rig| rig.host.is_started(1));
    rig.submit(1, Op::Read, 5, 0);
    rig.run_until(|rig| rig.ended.len() == 2);
    assert_eq!((rig.statuses(), rig.value(1, 5)), (vec![Status::Ok; 2], 9));
    assert_eq!(BLOCK, 512);
}

#[test]
fn a_host_that_is_not_allowed_learns_why() {
    let mut rig = rig(Some(vec![]), 0);
    rig.run_until(|rig| rig.events.last() == Some(&FabricsHostEvent::Over));
    let status = fabrics_status::INVALID_HOST.with_dnr();
    assert_eq!(rig.host.error(), Some(FabricsHostError::Command { command: "Connect", status }));
}

#[test]
fn the_discovery_service_names_the_subsystem() {
    let mut config = config();
    config.subsystem = Nqn::new(DISCOVERY_NQN).unwrap();
    let mut rig = Rig::new(config);
    rig.target.real = Some(RealTarget::new(Some(vec![rig.host.config().host.clone()])));
    rig.host.start(0);
    rig.run_until(|rig| rig.host.state() == ControllerState::Live);
    let found = rig.events.iter().find_map(|event| match event {
        FabricsHostEvent::Discovered(found) => Some(found.entries.clone()),
        _ => None,
    });
    assert_eq!(found.unwrap()[0].port, 4420);
    rig.host.disconnect(rig.now_ns);
    rig.run_until(|rig| rig.events.last() == Some(&FabricsHostEvent::Over));
}
