//! Target's side from the first byte of a connection: Connect on an admin queue, then on an I/O queue, whose commands
//! become bios of a device in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable};
use blkyard_mq::{Bio, DeviceInfo, Op, QueueLimits, Status};
use blkyard_nvme::fabrics::{
    ANY_CONTROLLER, CONNECT_BYTES, ConnectCommand, ConnectData, FabricsCommand, Nqn, PropertySize, fabrics_status,
};
use blkyard_nvme::registers::{CC, ControllerConfig};
use blkyard_nvme::tcp::{
    SendList, SendPiece, TcpAdminEvent, TcpAdminQueue, TcpDataMemory, TcpEnd, TcpIoQueue, TcpIoQueueOptions,
    TcpQueueSnapshot, TcpTargetOptions, TcpTargetQueue,
};
use blkyard_nvme::{
    AdminCompletion, AnaGroups, AnaState, Connected, ControllerOptions, Cqe, FabricsOptions, FabricsSubsystem,
    NamespaceTable, NextBio, NvmeStatus, Psdt, ServedNamespace, Sqe, SubsystemOptions, io,
};
use blkyard_wire::nvme_tcp::{Crc32c, DataLimits, Framing, H2cData, IcReq, Pdu, PduEvent, PduReader, PduSender, R2t};

const NAME: &str = "nqn.2026-11.test:disk";
const DISK_BYTES: usize = 1 << 20;
const IN_CAPSULE: u64 = 0x01 << 56;
const TRANSPORT: u64 = 0x5a << 56;
const OPTIONS: TcpTargetOptions = TcpTargetOptions {
    slots: 1,
    segments_max: 1,
    in_capsule: 8192,
    maxh2cdata: 128 << 10,
    header_digest: true,
    data_digest: true,
    alignment: 0,
};
const QUEUE: TcpIoQueueOptions = TcpIoQueueOptions {
    entries: 16,
    has_flow_control: true,
    in_capsule: 8192,
    transfer_bytes: 64 << 10,
    pool_bytes: 64 << 10,
};

fn subsystem(namespaces: &[u32], groups: &Arc<AnaGroups>) -> FabricsSubsystem {
    let controller = ControllerOptions {
        controller_id: 1,
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
    let limits =
        QueueLimits { discard_sectors_max: 1 << 20, write_zeroes_sectors_max: 1 << 20, ..QueueLimits::default() };
    let capacity_sectors = DISK_BYTES as u64 / 512;
    let info = DeviceInfo { capacity_sectors, limits, volatile_cache: true, ..DeviceInfo::default() };
    let mut table = NamespaceTable::new(2);
    for nsid in namespaces.iter().copied() {
        let served = ServedNamespace::new(nsid, nsid as u16 - 1, &info).unwrap();
        table.set(nsid, Some(ServedNamespace { ana_group: nsid, ..served }));
    }
    FabricsSubsystem::new(options, table.with_ana(Arc::clone(groups)))
}

fn connect_pdu(qid: u16, entries: u16, id: u16) -> Vec<u8> {
    connect_pdu_in(Framing::PLAIN, qid, entries, id)
}

fn connect_pdu_in(framing: Framing, qid: u16, entries: u16, id: u16) -> Vec<u8> {
    let connect = ConnectCommand { qid, sq_size: entries - 1, no_flow_control: false, keep_alive_ms: 0 };
    let sqe = FabricsCommand::Connect(connect).sqe().with_cid(7);
    let sqe = sqe.with_data(Psdt::Sgl, [0, IN_CAPSULE + CONNECT_BYTES as u64]);
    let nqn = Nqn::new(NAME).unwrap();
    let mut data = [0; CONNECT_BYTES];
    ConnectData { host_id: [1; 16], controller_id: id, subsystem: nqn.clone(), host: nqn }.write(&mut data);
    encode(Pdu::CapsuleCmd { sqe: sqe.0, len: CONNECT_BYTES as u32 }, framing, &data)
}

fn encode(pdu: Pdu, framing: Framing, data: &[u8]) -> Vec<u8> {
    let digest = Crc32c::of(data).to_le_bytes();
    let digest = if framing.data_digest && !data.is_empty() { &digest[..] } else { &[] };
    [pdu.encode(framing).bytes(), data, digest].concat()
}

fn parse(reader: &mut PduReader, mut bytes: &[u8]) -> (Vec<Pdu>, Vec<u8>) {
    let (mut pdus, mut data) = (Vec::new(), Vec::new());
    while let Some(event) = reader.next(&mut bytes).unwrap() {
        match event {
            PduEvent::Header(pdu) => pdus.push(pdu),
            PduEvent::Data(piece) => data.extend_from_slice(piece),
            PduEvent::DataEnd { .. } => {}
        }
    }
    (pdus, data)
}

fn bytes_of(list: &SendList, memory: &RegionTable) -> Vec<u8> {
    let piece = |piece: SendPiece<'_>| match piece {
        SendPiece::Bytes(bytes) => bytes.to_vec(),
        SendPiece::Data(segment) => {
            let mut bytes = vec![0; segment.len as usize];
            memory.resolve_region(segment).unwrap().copy_to_slice(&mut bytes);
            bytes
        }
    };
    list.pieces().flat_map(piece).collect()
}

/// A connection without a queue yet.
struct Fresh {
    queue: TcpAdminQueue,
    reader: PduReader,
}

impl Fresh {
    fn new() -> Fresh {
        Fresh::with(Framing::PLAIN)
    }

    fn with(framing: Framing) -> Fresh {
        let Framing { header_digest, data_digest, .. } = framing;
        let reader = PduReader::new(PduSender::Controller, DataLimits { in_capsule: 0, h2c: 0 });
        let mut fresh = Fresh { queue: TcpAdminQueue::new(OPTIONS).unwrap(), reader };
        let request = Pdu::IcReq(IcReq { alignment: 0, header_digest, data_digest, maxr2t: 0 });
        assert_eq!(fresh.events(request.encode(Framing::PLAIN).bytes()), [TcpAdminEvent::Started]);
        assert!(matches!(fresh.answers().0[..], [Pdu::IcResp(_)]));
        fresh.reader.start(framing);
        fresh
    }

    fn events(&mut self, mut bytes: &[u8]) -> Vec<TcpAdminEvent> {
        std::iter::from_fn(|| self.queue.receive(&mut bytes)).collect()
    }

    fn answers(&mut self) -> (Vec<Pdu>, Vec<u8>) {
        let mut list = SendList::new(64);
        let mut bytes = Vec::new();
        while let Some(number) = self.queue.fill(&mut list) {
            bytes.extend(bytes_of(&list, self.queue.memory()));
            list.clear();
            self.queue.sent(number);
            assert_eq!(self.events(&[]), []);
        }
        parse(&mut self.reader, &bytes)
    }

    /// Receives a Connect, and returns its slot and the outcome.
    fn connect(&mut self, target: &mut FabricsSubsystem, bytes: &[u8]) -> (u16, Connected) {
        let events = self.events(bytes);
        let [TcpAdminEvent::Command { slot, sqe, data, .. }] = &events[..] else { panic!("{events:?}") };
        let FabricsCommand::Connect(command) = FabricsCommand::parse(sqe).unwrap() else { panic!("{sqe:?}") };
        (*slot, target.connect(&command, data, 0).unwrap())
    }
}

fn data_memory() -> TcpDataMemory {
    let bytes = TcpIoQueue::memory_bytes(&QUEUE);
    let regions = vec![Region::anonymous(4096).unwrap(), Region::anonymous(4096 + bytes as usize).unwrap()];
    TcpDataMemory { table: Arc::new(RegionTable::new(regions)), region: 1, offset: 4096, bytes }
}

/// The same after a way through text.
fn by_text<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T) -> T {
    serde_json::from_str(&serde_json::to_string(value).unwrap()).unwrap()
}

struct Rig {
    queue: TcpIoQueue,
    target: FabricsSubsystem,
    reader: PduReader,
    disk: Arc<Region>,
    groups: Arc<AnaGroups>,
    /// Bios that the device has, by slot.
    out: BTreeMap<u16, Box<Bio>>,
    is_held: bool,
    seen: Vec<(Op, u64, u32)>,
}

impl Rig {
    fn new() -> Rig {
        Rig::with_namespaces(&[1])
    }

    /// Each in the group of its number.
    fn with_namespaces(namespaces: &[u32]) -> Rig {
        Rig::with(namespaces, Framing::PLAIN)
    }

    fn with(namespaces: &[u32], framing: Framing) -> Rig {
        let groups = Arc::new(AnaGroups::default());
        let mut target = subsystem(namespaces, &groups);
        let mut admin = Fresh::new();
        let (slot, connected) = admin.connect(&mut target, &connect_pdu(0, 32, ANY_CONTROLLER));
        let Connected::Admin(id) = connected else { panic!("{connected:?}") };
        admin.queue.open(32, 4096).unwrap();
        let status = NvmeStatus::SUCCESS;
        admin.queue.complete(AdminCompletion { slot, status, result: id.into(), data: Vec::new() });
        let (pdus, _) = admin.answers();
        assert!(matches!(pdus[..], [Pdu::CapsuleResp(cqe)] if Cqe(cqe).result() == 1), "{pdus:?}");
        let config =
            ControllerConfig { enabled: true, sq_entry_shift: 6, cq_entry_shift: 4, ..ControllerConfig::default() };
        let controller = &mut target.association(id).unwrap().controller;
        controller.set_property(PropertySize::Four, CC as u32, config.bits().into()).unwrap();

        let mut fresh = Fresh::with(framing);
        let (slot, connected) = fresh.connect(&mut target, &connect_pdu_in(framing, 1, QUEUE.entries, id));
        let Connected::Io(id, connected) = connected else { panic!("{connected:?}") };
        let Fresh { queue, reader } = fresh;
        let mut queue = TcpIoQueue::new(queue.into_queue(), connected, QUEUE, data_memory());
        queue.accept(slot, id);
        let disk = Region::anonymous(DISK_BYTES).unwrap();
        let (out, seen) = (BTreeMap::new(), Vec::new());
        let mut rig = Rig { queue, target, reader, disk, groups, out, is_held: false, seen };
        assert_eq!(rig.statuses(), [(7, NvmeStatus::SUCCESS)]);
        rig
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.take(bytes);
        self.run();
    }

    /// Receives bytes without executing a command.
    fn take(&mut self, mut bytes: &[u8]) {
        self.queue.receive(&mut bytes);
        assert!(bytes.is_empty(), "{} bytes wait", bytes.len());
    }

    /// Another process continues with the queue. Returns what it has sent before, and how many bytes of the stream are
    /// to be dropped.
    fn hand_over(&mut self) -> (Vec<u8>, usize) {
        let mut list = SendList::new(64);
        let mut sent = Vec::new();
        while let Some(number) = self.queue.fill(&mut list) {
            sent.extend(bytes_of(&list, &self.queue.memory().table));
            list.clear();
            self.queue.sent(number);
            self.queue.receive(&mut &[][..]);
        }
        let mut bytes = Vec::new();
        let saved = by_text(&self.queue.snapshot(&mut bytes).unwrap());
        let mut target = subsystem(&[1], &self.groups);
        target.restore(&by_text(&self.target.snapshot().unwrap())).unwrap();
        let connected = target.association(1).unwrap().controller.connect_queue(1).unwrap();
        let (mut rest, tcp) = (&bytes[..], TcpTargetQueue::restore(OPTIONS, &saved).unwrap());
        let mut queue = TcpIoQueue::new(tcp, connected, QUEUE, data_memory());
        queue.restore_commands(&saved, &mut rest).unwrap();
        let input = saved.take_input(&mut rest).unwrap();
        assert!(rest.is_empty(), "{} bytes are surplus", rest.len());
        (self.queue, self.target) = (queue, target);
        self.take(input);
        (sent, saved.dropped() as usize)
    }

    /// Fetches all bios, and completes them unless the device holds them back.
    fn run(&mut self) {
        loop {
            let mut bio = Box::new(Bio::default());
            match self.queue.fetch(&mut bio) {
                NextBio::Unavailable => break,
                NextBio::Without => {}
                NextBio::Bio(slot) => {
                    self.seen.push((bio.op, bio.sector, bio.sectors));
                    // A command of several ranges or namespaces has several bios.
                    let is_expanding = matches!(bio.op, Op::Discard | Op::Flush);
                    assert!(self.out.insert(slot, bio).is_none() || is_expanding);
                    if is_expanding && !self.is_held {
                        self.finish(slot);
                    }
                }
            }
        }
        while let Some(slot) = self.out.keys().next().copied().filter(|_| !self.is_held) {
            self.finish(slot);
        }
    }

    fn finish(&mut self, slot: u16) {
        let bio = self.out.remove(&slot).unwrap();
        let mut at = bio.sector * 512;
        for segment in &bio.segments {
            let memory = self.queue.memory().table.resolve_region(*segment).unwrap();
            let disk = self.disk.span(at, memory.len()).unwrap();
            if bio.op == Op::Read {
                memory.copy_from(&disk);
            } else {
                disk.copy_from(&memory);
            }
            at += u64::from(segment.len);
        }
        self.queue.end(slot, Status::Ok);
    }

    fn answers(&mut self) -> (Vec<Pdu>, Vec<u8>) {
        let mut list = SendList::new(64);
        let mut bytes = Vec::new();
        while let Some(number) = self.queue.fill(&mut list) {
            bytes.extend(bytes_of(&list, &self.queue.memory().table));
            list.clear();
            self.queue.sent(number);
            self.queue.receive(&mut &[][..]);
            self.run();
        }
        parse(&mut self.reader, &bytes)
    }

    fn statuses(&mut self) -> Vec<(u16, NvmeStatus)> {
        let cqes = self.answers().0.into_iter().filter_map(|pdu| match pdu {
            Pdu::CapsuleResp(cqe) => Some(Cqe(cqe)),
            _ => None,
        });
        cqes.map(|cqe| (cqe.cid(), cqe.status())).collect()
    }
}

fn blocks(opcode: u8, cid: u16, block: u64, bytes: u32, kind: u64) -> Sqe {
    blocks_of(1, opcode, cid, block, bytes, kind)
}

fn blocks_of(nsid: u32, opcode: u8, cid: u16, block: u64, bytes: u32, kind: u64) -> Sqe {
    let sqe = Sqe::with_blocks(opcode, nsid, block, bytes / 512, 0).with_cid(cid);
    sqe.with_data(Psdt::Sgl, [0, kind + u64::from(bytes)])
}

fn pdu(sqe: Sqe, data: &[u8]) -> Vec<u8> {
    pdu_in(Framing::PLAIN, sqe, data)
}

fn pdu_in(framing: Framing, sqe: Sqe, data: &[u8]) -> Vec<u8> {
    encode(Pdu::CapsuleCmd { sqe: sqe.0, len: data.len() as u32 }, framing, data)
}

fn h2c(r2t: R2t, data: &[u8]) -> Vec<u8> {
    h2c_in(Framing::PLAIN, r2t, data)
}

fn h2c_in(framing: Framing, r2t: R2t, data: &[u8]) -> Vec<u8> {
    let header = H2cData { cccid: r2t.cccid, ttag: r2t.ttag, offset: 0, len: data.len() as u32, is_last: true };
    encode(Pdu::H2cData(header), framing, data)
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at / 512) as u8 ^ seed ^ at as u8).collect()
}

#[test]
fn data_in_capsules_and_by_transfer_is_written_and_read() {
    let mut rig = Rig::new();
    // In the capsule, by transfer into the memory of the slot, and into the pool.
    for (cid, bytes) in [(1, 4096), (2, 8192), (3, 12288), (4, 64 << 10)] {
        let data = pattern(bytes, cid as u8);
        let len = bytes as u32;
        if bytes <= 8192 {
            rig.receive(&pdu(blocks(io::WRITE, cid, 64, len, IN_CAPSULE), &data));
            assert_eq!(rig.statuses(), [(cid, NvmeStatus::SUCCESS)]);
        }
        rig.receive(&pdu(blocks(io::WRITE, cid, 64, len, TRANSPORT), &[]));
        let [Pdu::R2t(r2t)] = rig.answers().0[..] else { panic!("no R2T") };
        assert_eq!((r2t.offset, r2t.len), (0, len));
        rig.receive(&h2c(r2t, &data));
        assert_eq!(rig.statuses(), [(cid, NvmeStatus::SUCCESS)]);
        rig.receive(&pdu(blocks(io::READ, cid, 64, len, TRANSPORT), &[]));
        let (pdus, read) = rig.answers();
        assert!(matches!(pdus[..], [.., Pdu::C2hData(_), Pdu::CapsuleResp(_)]), "{pdus:?}");
        assert_eq!(read, data);
    }
    assert_eq!(rig.queue.in_flight(), 0);
}

#[test]
fn commands_wait_in_order_for_the_pool() {
    let mut rig = Rig::new();
    rig.is_held = true;
    // The pool has room for one: the second waits, and the third behind it, but not the short one.
    for (cid, bytes) in [(1, 64 << 10), (2, 16 << 10), (3, 64 << 10), (4, 4096)] {
        rig.receive(&pdu(blocks(io::READ, cid, u64::from(cid) * 8, bytes, TRANSPORT), &[]));
    }
    assert_eq!(rig.seen, [(Op::Read, 8, 128), (Op::Read, 32, 8)]);
    rig.is_held = false;
    rig.run();
    assert_eq!(
        rig.statuses(),
        [(1, NvmeStatus::SUCCESS), (4, NvmeStatus::SUCCESS), (2, NvmeStatus::SUCCESS), (3, NvmeStatus::SUCCESS)]
    );
    assert_eq!(rig.queue.in_flight(), 0);
    // Writes that wait do not hold up the data of the first one, which is behind them in the stream.
    let data = pattern(64 << 10, 9);
    let both = [1, 2].map(|cid| pdu(blocks(io::WRITE, cid, 0, 64 << 10, TRANSPORT), &[])).concat();
    rig.receive(&both);
    for cid in [1, 2] {
        let pdus = rig.answers().0;
        let [Pdu::R2t(r2t)] = pdus[..] else { panic!("{pdus:?}") };
        assert_eq!(r2t.cccid, cid);
        rig.receive(&h2c(r2t, &data));
        if cid == 2 {
            assert_eq!(rig.statuses(), [(2, NvmeStatus::SUCCESS)]);
            break;
        }
        let mut list = SendList::new(64);
        let number = rig.queue.fill(&mut list).unwrap();
        rig.queue.sent(number);
        rig.receive(&[]);
        let (pdus, _) = parse(&mut rig.reader, &bytes_of(&list, &rig.queue.memory().table));
        assert!(matches!(pdus[..], [Pdu::CapsuleResp(_)]), "{pdus:?}");
    }
}

#[test]
fn each_invalid_command_has_its_status() {
    let mut rig = Rig::new();
    let read = |bytes| blocks(io::READ, 1, 0, bytes, TRANSPORT);
    let nsid = |sqe: Sqe, nsid: u64| {
        let mut sqe = sqe;
        sqe.0[0] = sqe.0[0] & 0xffff_ffff | nsid << 32;
        sqe
    };
    let fabrics = |command: FabricsCommand| command.sqe().with_cid(1);
    let connect = ConnectCommand { qid: 1, sq_size: 15, no_flow_control: false, keep_alive_ms: 0 };
    let property = FabricsCommand::PropertyGet { size: PropertySize::Four, offset: 0 };
    let other_length = |sqe: Sqe, bytes: u64| sqe.with_data(Psdt::Sgl, [0, TRANSPORT + bytes]);
    let flush = Sqe::new(io::FLUSH, 1).with_cid(1);
    for (name, sqe, status) in [
        ("beyond the end", blocks(io::READ, 1, 2041, 4096, TRANSPORT), NvmeStatus::LBA_OUT_OF_RANGE),
        ("namespace 0", nsid(read(4096), 0), NvmeStatus::INVALID_NAMESPACE),
        ("namespace 3", nsid(read(4096), 3), NvmeStatus::INVALID_NAMESPACE),
        ("inactive namespace", nsid(read(4096), 2), NvmeStatus::INVALID_FIELD),
        ("longer than MDTS", read((64 << 10) + 512), NvmeStatus::INVALID_FIELD),
        ("short buffer", other_length(read(4096), 4095), NvmeStatus::INVALID_DATA_SGL_LENGTH),
        // CVE-2026-80789.
        ("4 GiB for a page", other_length(read(4096), 0xffff_ffff), NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("data of a flush", other_length(flush, 512), NvmeStatus::INVALID_DATA_SGL_LENGTH),
        ("Compare", blocks(io::COMPARE, 1, 0, 4096, TRANSPORT), NvmeStatus::INVALID_OPCODE),
        ("Verify", other_length(blocks(io::VERIFY, 1, 0, 4096, 0), 0), NvmeStatus::INVALID_OPCODE),
        ("unknown opcode", other_length(blocks(0x99, 1, 0, 4096, 0), 0), NvmeStatus::INVALID_OPCODE),
        ("second Connect", fabrics(FabricsCommand::Connect(connect)), NvmeStatus::COMMAND_SEQUENCE),
        ("property on an I/O queue", fabrics(property), fabrics_status::INVALID_QUEUE_TYPE),
        ("Disconnect", fabrics(FabricsCommand::Disconnect), NvmeStatus::INVALID_OPCODE),
        ("Authentication Send", fabrics(FabricsCommand::AuthSend(16)), NvmeStatus::INVALID_OPCODE),
    ] {
        rig.receive(&pdu(sqe, &[]));
        assert_eq!(rig.statuses(), [(1, status.with_dnr())], "{name}");
    }
    let read_with_data = blocks(io::READ, 1, 0, 512, IN_CAPSULE);
    rig.receive(&pdu(read_with_data, &[0; 512]));
    assert_eq!(rig.statuses(), [(1, NvmeStatus::INVALID_FIELD.with_dnr())]);
    assert_eq!((rig.seen.len(), rig.queue.in_flight()), (0, 0));
}

#[test]
fn flushes_and_ranges_become_bios() {
    let mut rig = Rig::new();
    let flush = |nsid: u32| Sqe::new(io::FLUSH, nsid).with_cid(1).with_data(Psdt::Sgl, [0, TRANSPORT]);
    for nsid in [1, u32::MAX] {
        rig.receive(&pdu(flush(nsid), &[]));
        assert_eq!(rig.statuses(), [(1, NvmeStatus::SUCCESS)]);
    }
    assert_eq!(rig.seen, [(Op::Flush, 0, 0), (Op::Flush, 0, 0)]);
    let zeroes = Sqe::with_blocks(io::WRITE_ZEROES, 1, 8, 8, 0).with_cid(2).with_data(Psdt::Sgl, [0, TRANSPORT]);
    rig.receive(&pdu(zeroes, &[]));
    assert_eq!((rig.statuses(), rig.seen.pop()), (vec![(2, NvmeStatus::SUCCESS)], Some((Op::WriteZeroes, 8, 8))));
    let ranges = [(0_u32, 8_u32, 64_u64), (0, 16, 128)];
    let data: Vec<u8> = ranges
        .iter()
        .flat_map(|(flags, blocks, slba)| {
            [&flags.to_le_bytes()[..], &blocks.to_le_bytes(), &slba.to_le_bytes()].concat()
        })
        .collect();
    let with_data = |sqe: Sqe| sqe.with_cid(3).with_data(Psdt::Sgl, [0, IN_CAPSULE + data.len() as u64]);
    rig.receive(&pdu(with_data(Sqe::deallocate(1, 2)), &data));
    assert_eq!(rig.statuses(), [(3, NvmeStatus::SUCCESS)]);
    assert_eq!(rig.seen[2..], [(Op::Discard, 128, 16), (Op::Discard, 64, 8)]);
    // Linux gives a buffer for 256 ranges, however many there are.
    let padded = [&data[..], &vec![0; 4096 - data.len()]].concat();
    for (bytes, status) in [(4096, NvmeStatus::SUCCESS), (16, NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr())] {
        let deallocate = Sqe::deallocate(1, 2).with_cid(3).with_data(Psdt::Sgl, [0, IN_CAPSULE + bytes]);
        rig.receive(&pdu(deallocate, &padded[..bytes as usize]));
        assert_eq!((rig.statuses(), rig.seen.len()), (vec![(3, status)], 6), "{bytes} bytes");
    }
    rig.seen.truncate(4);
    // A hint only.
    let mut hint = Sqe::deallocate(1, 2);
    hint.0[5] &= 0xffff_ffff;
    rig.receive(&pdu(with_data(hint), &data));
    assert_eq!((rig.statuses(), rig.seen.len()), (vec![(3, NvmeStatus::SUCCESS)], 4));
}

#[test]
fn commands_of_a_closed_connection_are_not_executed() {
    let mut rig = Rig::new();
    rig.is_held = true;
    rig.receive(&pdu(blocks(io::READ, 1, 0, 4096, TRANSPORT), &[]));
    assert_eq!(rig.queue.bios_out(), 1);
    // One with its data, one that waits for it, and one that waits for the pool.
    let mut bytes = pdu(blocks(io::WRITE, 2, 0, 4096, IN_CAPSULE), &[7; 4096]);
    bytes.extend(pdu(blocks(io::WRITE, 3, 0, 64 << 10, TRANSPORT), &[]));
    bytes.extend(pdu(blocks(io::WRITE, 4, 0, 64 << 10, TRANSPORT), &[]));
    rig.queue.receive(&mut &bytes[..]);
    assert!(rig.queue.has_ready());
    rig.queue.abandon(TcpEnd::Closed);
    rig.run();
    assert_eq!(rig.seen, [(Op::Read, 0, 8)], "only what the device had already");
    rig.is_held = false;
    rig.run();
    rig.queue.receive(&mut &[][..]);
    assert_eq!((rig.queue.bios_out(), rig.queue.in_flight(), rig.answers().0.len()), (0, 0, 0));
}

#[test]
fn commands_for_a_held_device_wait_in_their_order() {
    let mut rig = Rig::with_namespaces(&[1, 2]);
    let read = |nsid, cid: u16| pdu(blocks_of(nsid, io::READ, cid, cid.into(), 512, TRANSPORT), &[]);
    rig.take(&[read(1, 1), read(2, 2), read(1, 3), read(2, 4)].concat());
    rig.queue.hold(1 << 1);
    rig.is_held = true;
    rig.run();
    assert_eq!(rig.seen, [(Op::Read, 1, 1), (Op::Read, 3, 1)]);
    assert_eq!((rig.queue.devices_out(), rig.queue.has_ready()), (1, false));
    rig.take(&[read(2, 5), read(1, 6)].concat());
    rig.queue.hold(1 << 0);
    rig.run();
    assert_eq!(rig.seen[2..], [(Op::Read, 2, 1), (Op::Read, 4, 1), (Op::Read, 5, 1)]);
    assert_eq!(rig.queue.devices_out(), 3);
    rig.queue.hold(0);
    rig.is_held = false;
    rig.run();
    assert_eq!(rig.seen[5..], [(Op::Read, 6, 1)]);
    assert_eq!((rig.queue.devices_out(), rig.statuses().len()), (0, 6));
}

#[test]
fn commands_that_are_held_end_with_their_connection() {
    let mut rig = Rig::new();
    rig.take(&pdu(blocks(io::READ, 1, 0, 512, TRANSPORT), &[]));
    rig.queue.hold(1);
    rig.queue.abandon(TcpEnd::Closed);
    rig.queue.hold(0);
    rig.run();
    rig.queue.receive(&mut &[][..]);
    assert_eq!((rig.seen.len(), rig.queue.in_flight()), (0, 0));
}

#[test]
fn io_of_an_inaccessible_group_ends_before_the_device() {
    let mut rig = Rig::with_namespaces(&[1, 2]);
    let write = |cid, nsid| pdu(blocks_of(nsid, io::WRITE, cid, 0, 4096, IN_CAPSULE), &pattern(4096, 1));
    let flush = |cid, nsid| pdu(Sqe::new(io::FLUSH, nsid).with_cid(cid).with_data(Psdt::Sgl, [0, TRANSPORT]), &[]);
    let states = [
        (AnaState::Inaccessible, NvmeStatus::ANA_INACCESSIBLE),
        (AnaState::PersistentLoss, NvmeStatus::ANA_LOSS),
        (AnaState::Change, NvmeStatus::ANA_TRANSITION),
    ];
    for (state, status) in states {
        // One command is with the device, and another one waits for its data.
        rig.is_held = true;
        rig.receive(&write(1, 2));
        rig.receive(&pdu(blocks_of(2, io::WRITE, 2, 0, 4096, TRANSPORT), &[]));
        let [Pdu::R2t(r2t)] = rig.answers().0[..] else { panic!("no R2T") };
        rig.groups.set(2, state);
        rig.seen.clear();
        rig.receive(&h2c(r2t, &pattern(4096, 2)));
        for bytes in [write(3, 2), flush(4, 2), flush(5, u32::MAX)] {
            rig.receive(&bytes);
        }
        rig.receive(&pdu(blocks_of(2, io::READ, 6, 0, 64 << 10, TRANSPORT), &[]));
        assert_eq!(rig.statuses(), [2, 3, 4, 5, 6].map(|cid| (cid, status)), "{state:?}");
        assert!(rig.seen.is_empty(), "{:?}", rig.seen);
        // Another group is not concerned, nor is what had begun.
        rig.is_held = false;
        rig.receive(&write(7, 1));
        assert_eq!(rig.statuses(), [(1, NvmeStatus::SUCCESS), (7, NvmeStatus::SUCCESS)]);
        rig.groups.set(2, AnaState::NonOptimized);
        rig.receive(&flush(8, u32::MAX));
        rig.receive(&write(9, 2));
        assert_eq!(rig.statuses(), [(8, NvmeStatus::SUCCESS), (9, NvmeStatus::SUCCESS)]);
    }
    assert_eq!(rig.queue.in_flight(), 0);
}

/// A queue whose stream continues in another process after `cut` bytes, on the way again and again.
/// Returns the number of bytes.
fn handed_over_at(framing: Framing, cut: usize) -> usize {
    let mut rig = Rig::with(&[1], framing);
    let mut statuses = BTreeMap::new();
    let (mut at, mut read) = (0, BTreeMap::new());
    let mut streams: Vec<Vec<u8>> = Vec::new();
    // Short writes with their data, one that is refused, writes whose data is asked for, and a flush.
    for cid in 1..=3_u16 {
        let data = pattern(1024 * usize::from(cid), cid as u8);
        streams.push(pdu_in(
            framing,
            blocks(io::WRITE, cid, u64::from(cid) * 64, data.len() as u32, IN_CAPSULE),
            &data,
        ));
    }
    streams.push(pdu_in(framing, blocks(io::READ, 4, 0, 512, IN_CAPSULE), &[1; 512]));
    for (cid, bytes) in [(5, 4096), (6, 20 << 10), (7, 40 << 10), (8, 16 << 10)] {
        streams.push(pdu_in(framing, blocks(io::WRITE, cid, u64::from(cid) * 128, bytes, TRANSPORT), &[]));
    }
    streams.push(pdu_in(framing, Sqe::new(io::FLUSH, 1).with_cid(9).with_data(Psdt::Sgl, [0, 0]), &[]));
    let mut data = Vec::new();
    while !streams.is_empty() || !data.is_empty() {
        let mut stream = std::mem::take(&mut streams).concat();
        stream.extend(std::mem::take(&mut data).concat());
        let mut sent = Vec::new();
        if (at..at + stream.len()).contains(&cut) {
            let (before, after) = stream.split_at(cut - at);
            rig.take(before);
            let (bytes, dropped) = rig.hand_over();
            sent = bytes;
            rig.take(&after[dropped..]);
            // Once more, with all that was restored.
            let (bytes, dropped) = rig.hand_over();
            assert_eq!(dropped, 0);
            sent.extend(bytes);
            rig.run();
        } else {
            rig.receive(&stream);
        }
        at += stream.len();
        let mut pdus = parse(&mut rig.reader, &sent).0;
        pdus.extend(rig.answers().0);
        for pdu in pdus {
            match pdu {
                Pdu::R2t(r2t) => data.push(h2c_in(framing, r2t, &pattern(r2t.len as usize, r2t.cccid as u8))),
                Pdu::CapsuleResp(cqe) => {
                    let cqe = Cqe(cqe);
                    assert!(statuses.insert(cqe.cid(), cqe.status()).is_none(), "{} is answered twice", cqe.cid());
                }
                other => panic!("{other:?}"),
            }
        }
    }
    for (cid, start, bytes) in [(1, 64, 1024), (2, 128, 2048), (3, 192, 3072), (5, 640, 4096), (6, 768, 20 << 10)] {
        read.insert(cid, (start, bytes));
    }
    read.extend([(7, (896, 40 << 10)), (8, (1024, 16 << 10))]);
    for (cid, (start, bytes)) in read {
        let mut disk = vec![0; bytes];
        rig.disk.span(start * 512, bytes).unwrap().copy_to_slice(&mut disk);
        assert!(disk == pattern(bytes, cid), "the write {cid}");
    }
    let refused = statuses.remove(&4);
    assert_eq!(refused, Some(NvmeStatus::INVALID_FIELD.with_dnr()));
    assert!(statuses.len() == 8 && statuses.values().all(|status| status.is_success()), "{statuses:?}");
    assert_eq!(rig.queue.in_flight(), 0);
    // The last command has the last head.
    rig.receive(&pdu_in(framing, Sqe::new(io::FLUSH, 1).with_cid(1).with_data(Psdt::Sgl, [0, 0]), &[]));
    let [Pdu::CapsuleResp(cqe)] = rig.answers().0[..] else { panic!("no answer") };
    assert_eq!(Cqe(cqe).sq_head(), 11);
    at
}

#[test]
fn a_queue_is_handed_over_at_any_byte_of_its_stream() {
    let digests = Framing { header_digest: true, data_digest: true, ..Framing::PLAIN };
    for framing in [Framing::PLAIN, digests] {
        let bytes = handed_over_at(framing, usize::MAX);
        // Most of the headers and digests, and some of the data.
        let cuts = (0..8200).step_by(3).chain((8200..bytes).step_by(97));
        cuts.for_each(|cut| assert_eq!(handed_over_at(framing, cut), bytes, "cut {cut}"));
    }
}

/// Replaces the number at this place of a tree. False if there are fewer.
fn replace_number(value: &mut serde_json::Value, place: &mut usize, with: u64) -> bool {
    use serde_json::Value;
    match value {
        Value::Number(_) if *place == 0 => {
            *value = with.into();
            true
        }
        Value::Number(_) => {
            *place -= 1;
            false
        }
        Value::Array(all) => all.iter_mut().any(|one| replace_number(one, place, with)),
        Value::Object(all) => all.values_mut().any(|one| replace_number(one, place, with)),
        _ => false,
    }
}

#[test]
fn a_wrong_number_in_a_saved_queue_is_refused_or_harmless() {
    let mut rig = Rig::new();
    for (cid, bytes) in [(1, 4096), (2, 20 << 10), (3, 64 << 10)] {
        rig.take(&pdu(blocks(io::WRITE, cid, 0, bytes, TRANSPORT), &[]));
    }
    let [Pdu::R2t(short), Pdu::R2t(_)] = rig.answers().0[..] else { panic!("no R2Ts") };
    rig.take(&h2c(short, &[1; 4096]));
    rig.take(&pdu(blocks(io::WRITE, 4, 0, 512, IN_CAPSULE), &[2; 512])[..100]);
    let mut bytes = Vec::new();
    let saved = serde_json::to_value(rig.queue.snapshot(&mut bytes).unwrap()).unwrap();
    let mut refused = 0;
    for place in 0.. {
        for with in [0, 1, 5, 40, 0xffff, u64::from(u32::MAX), u64::MAX] {
            let mut changed = saved.clone();
            if !replace_number(&mut changed, &mut place.clone(), with) {
                assert!(refused > 30, "{refused} are refused");
                return;
            }
            let mut target = subsystem(&[1], &rig.groups);
            target.restore(&rig.target.snapshot().unwrap()).unwrap();
            let connected = target.association(1).unwrap().controller.connect_queue(1).unwrap();
            let mut rest = &bytes[..];
            let queue = serde_json::from_value::<TcpQueueSnapshot>(changed).ok().and_then(|saved| {
                let tcp = TcpTargetQueue::restore(OPTIONS, &saved)?;
                let mut queue = TcpIoQueue::new(tcp, connected, QUEUE, data_memory());
                queue.restore_commands(&saved, &mut rest)?;
                queue.receive(&mut saved.take_input(&mut rest)?);
                Some(queue)
            });
            let Some(queue) = queue else {
                refused += 1;
                continue;
            };
            rig.queue = queue;
            rig.run();
            let mut list = SendList::new(64);
            rig.queue.fill(&mut list);
            rig.queue.abandon(TcpEnd::Closed);
        }
    }
}
