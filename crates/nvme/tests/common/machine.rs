//! A controller with its queues, devices in memory, and a host that writes arbitrary values, all on one thread.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use blkyard_mem::{Region, RegionTable, View};
use blkyard_mq::{Bio, DeviceInfo, Op, QueueLimits, Status};
use blkyard_nvme::registers::{ACQ, AQA, ASQ, CC, CSTS, ControllerConfig, ControllerStatus, admin_queue_attributes};
use blkyard_nvme::{
    CQE_BYTES, Controller, ControllerIoQueue, ControllerOptions, ControllerQueueReply, ControllerRequest, Cqe, DmaMap,
    DmaRange, NamespaceTable, NextBio, NvmeStatus, Psdt, SQE_BYTES, ServedNamespace, Sqe,
};

/// Controller address and size of the host's memory.
pub const BASE: u64 = 0x10_0000;
pub const MEMORY_BYTES: usize = 8 << 20;
/// Bytes of each device.
pub const DEVICE_BYTES: usize = 1 << 20;
/// Entries of the admin rings.
pub const ADMIN_ENTRIES: u16 = 32;
pub const PAGE: u64 = 4096;
pub const MDTS_BYTES: u32 = 64 << 10;
/// An unmapped address.
pub const UNMAPPED: u64 = 1 << 40;

/// A ring pair of a raw host, without checks.
#[derive(Clone, Copy, Debug)]
pub struct RawQueue {
    pub sqid: u16,
    pub cqid: u16,
    pub sq: u64,
    pub cq: u64,
    pub sq_entries: u16,
    pub cq_entries: u16,
    pub tail: u16,
    pub head: u16,
    pub phase: bool,
}

pub struct Machine {
    pub controller: Controller,
    pub queues: BTreeMap<u16, ControllerIoQueue>,
    /// Whether no completion queue can be served.
    pub refuses_queues: bool,
    pub devices: Vec<Arc<Region>>,
    bios: Vec<Box<Bio>>,
    /// Bios held back by devices while `is_held`.
    pub held: Vec<(u16, Box<Bio>)>,
    pub is_held: bool,
    /// Status of every request if not Ok.
    pub answer: Status,
    /// Flushes requested by the controller; their answers are held back while `is_flush_held`.
    pub flushes: Vec<u64>,
    pub is_flush_held: bool,
    /// Requests to devices: operation, flags, device, sector and sectors.
    pub seen: Vec<(Op, u8, u16, u64, u32)>,
    /// Vectors that were signalled.
    pub vectors: Vec<u16>,
    pub region: Arc<Region>,
    pub view: View,
    /// Memory of the doorbell registers.
    pub registers: View,
    pub now_ns: u64,
    pub admin: RawQueue,
    next_page: u64,
    next_cid: u16,
}

pub fn options() -> ControllerOptions {
    ControllerOptions {
        vendor: 0x1234,
        serial: "S1".into(),
        model: "test model".into(),
        firmware: "1.0".into(),
        subsystem: "nqn.2026-11.test:1".into(),
        controller_id: 7,
        io_queues: 8,
        queue_entries: 64,
        depth: 16,
        vectors: 5,
        transfer_bytes: MDTS_BYTES,
        has_shadow: true,
        doorbell_stride: 0,
        fabrics: None,
    }
}

pub fn info(block: u32, read_only: bool) -> DeviceInfo {
    let limits = QueueLimits {
        logical_block_bytes: block,
        physical_block_bytes: block,
        discard_sectors_max: 1 << 20,
        write_zeroes_sectors_max: 1 << 20,
        ..QueueLimits::default()
    };
    DeviceInfo {
        capacity_sectors: DEVICE_BYTES as u64 / 512,
        limits,
        read_only,
        volatile_cache: true,
        fua: true,
        ..DeviceInfo::default()
    }
}

/// Namespaces 1 (512-byte blocks), 2 (4096-byte blocks) and 4 (write protected); 3 and 5 to 8 are not active.
pub fn namespaces() -> NamespaceTable {
    let mut table = NamespaceTable::new(8);
    for (nsid, device, block, read_only) in [(1, 0, 512, false), (2, 1, 4096, false), (4, 2, 512, true)] {
        let mut namespace = ServedNamespace::new(nsid, device, &info(block, read_only)).unwrap();
        namespace.nguid = [nsid as u8; 16];
        table.set(nsid, Some(namespace));
    }
    table
}

/// Guard bytes before and after the host's memory, which no controller may access.
const GUARD_BYTES: usize = 64 << 10;
const GUARD: u8 = 0x5a;

pub fn map_of(region: &Arc<Region>) -> DmaMap {
    let table = Arc::new(RegionTable::new(vec![Arc::clone(region)]));
    let range = DmaRange { addr: BASE, len: MEMORY_BYTES as u64, region: 0, offset: GUARD_BYTES as u64 };
    DmaMap::new(table, vec![range]).unwrap()
}

/// The same, with another region that has this address or none.
pub fn map_with(region: &Arc<Region>, other: &Arc<Region>, addr: Option<u64>) -> DmaMap {
    let table = Arc::new(RegionTable::new(vec![Arc::clone(region), Arc::clone(other)]));
    let range = DmaRange { addr: BASE, len: MEMORY_BYTES as u64, region: 0, offset: GUARD_BYTES as u64 };
    let more = addr.map(|addr| DmaRange { addr, len: other.len() as u64, region: 1, offset: 0 });
    DmaMap::new(table, [range].into_iter().chain(more).collect()).unwrap()
}

/// The memory of a host that has unmapped all of it: bios in flight still find theirs.
pub fn unmapped(region: &Arc<Region>) -> DmaMap {
    DmaMap::new(Arc::new(RegionTable::new(vec![Arc::clone(region)])), vec![]).unwrap()
}

impl Machine {
    pub fn new() -> Machine {
        Machine::with(options())
    }

    pub fn with(options: ControllerOptions) -> Machine {
        let region = Region::anonymous(MEMORY_BYTES + 2 * GUARD_BYTES).unwrap();
        for at in [0, GUARD_BYTES + MEMORY_BYTES] {
            region.span(at as u64, GUARD_BYTES).unwrap().fill(GUARD);
        }
        let view = View::new(Arc::clone(&region), GUARD_BYTES as u64, MEMORY_BYTES, 4096).unwrap();
        let doorbells = Region::anonymous(4096).unwrap();
        let registers = View::new(doorbells, 0, 4096, 4096).unwrap();
        let controller = Controller::new(options, registers.clone(), &map_of(&region), namespaces()).unwrap();
        let mut machine = Machine {
            controller,
            queues: BTreeMap::new(),
            refuses_queues: false,
            devices: (0..3).map(|_| Region::anonymous(DEVICE_BYTES).unwrap()).collect(),
            bios: vec![],
            held: vec![],
            is_held: false,
            answer: Status::Ok,
            flushes: vec![],
            is_flush_held: false,
            seen: vec![],
            vectors: vec![],
            region,
            view,
            registers,
            now_ns: 1,
            admin: RawQueue {
                sqid: 0,
                cqid: 0,
                sq: 0,
                cq: 0,
                sq_entries: ADMIN_ENTRIES,
                cq_entries: ADMIN_ENTRIES,
                tail: 0,
                head: 0,
                phase: true,
            },
            next_page: BASE,
            next_cid: 1,
        };
        (machine.admin.sq, machine.admin.cq) = (machine.page(), machine.page());
        machine
    }

    /// An enabled controller.
    pub fn enabled() -> Machine {
        let mut machine = Machine::new();
        machine.enable();
        machine
    }

    pub fn read32(&self, offset: usize) -> u32 {
        self.controller.read_register(offset as u64, 4).unwrap() as u32
    }

    pub fn write32(&mut self, offset: usize, value: u32) -> Option<u16> {
        self.controller.write_register(offset as u64, 4, u64::from(value)).unwrap()
    }

    pub fn write64(&mut self, offset: usize, value: u64) {
        self.controller.write_register(offset as u64, 8, value).unwrap();
    }

    pub fn status(&self) -> ControllerStatus {
        ControllerStatus::from_bits(self.read32(CSTS)).unwrap()
    }

    pub fn config() -> ControllerConfig {
        ControllerConfig { enabled: true, sq_entry_shift: 6, cq_entry_shift: 4, ..ControllerConfig::default() }
    }

    pub fn enable(&mut self) {
        let admin = self.admin;
        self.zero(admin.cq, PAGE as usize);
        (self.admin.tail, self.admin.head, self.admin.phase) = (0, 0, true);
        self.write32(AQA, admin_queue_attributes(ADMIN_ENTRIES, ADMIN_ENTRIES));
        self.write64(ASQ, admin.sq);
        self.write64(ACQ, admin.cq);
        self.write32(CC, Machine::config().bits());
        assert!(self.status().ready, "{:?}", self.status());
    }

    /// An unused page of the host's memory.
    pub fn page(&mut self) -> u64 {
        self.next_page += PAGE;
        assert!(self.next_page <= BASE + MEMORY_BYTES as u64);
        self.next_page - PAGE
    }

    pub fn pages(&mut self, count: u64) -> u64 {
        let first = self.page();
        (1..count).for_each(|_| {
            self.page();
        });
        first
    }

    pub fn put(&self, addr: u64, bytes: &[u8]) {
        self.view.span(addr - BASE, bytes.len()).unwrap().copy_from_slice(bytes);
    }

    pub fn get(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.view.span(addr - BASE, len).unwrap().copy_to_slice(&mut bytes);
        bytes
    }

    pub fn zero(&self, addr: u64, len: usize) {
        self.view.span(addr - BASE, len).unwrap().fill(0);
    }

    pub fn put_words(&self, addr: u64, words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.put(addr, &bytes);
    }

    /// Whether no byte outside the host's memory was written.
    pub fn guards_are_whole(&self) -> bool {
        let mut bytes = vec![0; GUARD_BYTES];
        [0, GUARD_BYTES + MEMORY_BYTES].into_iter().all(|at| {
            self.region.span(at as u64, GUARD_BYTES).unwrap().copy_to_slice(&mut bytes);
            bytes.iter().all(|byte| *byte == GUARD)
        })
    }

    /// Runs turns until no part has work.
    pub fn run(&mut self) {
        for _ in 0..10_000 {
            if !self.turn() {
                return;
            }
        }
        panic!("the machine does not come to rest");
    }

    /// One turn. Returns whether any part had work.
    pub fn turn(&mut self) -> bool {
        let mut is_busy = false;
        if self.controller.poll(self.now_ns) {
            self.vectors.push(0);
            is_busy = true;
        }
        while let Some(request) = self.controller.take_request() {
            is_busy = true;
            match request {
                ControllerRequest::Create(queue) => {
                    let cqid = queue.cqid();
                    if self.refuses_queues {
                        self.controller.reply(cqid, ControllerQueueReply::NotCreated);
                        continue;
                    }
                    let old = self.queues.insert(cqid, *queue);
                    assert!(old.is_none(), "a queue that exists already");
                    self.controller.reply(cqid, ControllerQueueReply::Created);
                }
                ControllerRequest::Queue(cqid, command) => self.queues.get_mut(&cqid).unwrap().handle(command),
                ControllerRequest::Flush(number) => self.flushes.push(number),
            }
        }
        if !self.is_flush_held {
            for number in std::mem::take(&mut self.flushes) {
                is_busy = true;
                self.controller.flushed(number);
            }
        }
        let mut over = vec![];
        for (cqid, queue) in &mut self.queues {
            let (table, held) = (Arc::clone(queue.table()), &mut self.held);
            let before = held.len();
            for _ in 0..4 {
                let mut bio = self.bios.pop().unwrap_or_else(|| Bio::with_capacity(queue.segments_max()));
                match queue.fetch(&mut bio) {
                    NextBio::Bio(token) => {
                        bio.cookie = u64::from(token);
                        held.push((*cqid, bio));
                        continue;
                    }
                    NextBio::Without => is_busy = true,
                    NextBio::Unavailable => {}
                }
                self.bios.push(bio);
            }
            for (_, bio) in &held[before..] {
                self.seen.push((bio.op, bio.flags.bits(), bio.namespace, bio.sector, bio.sectors));
                is_busy = true;
                assert!(bio.segments.iter().all(|segment| table.resolve(*segment).is_some()));
            }
        }
        if !self.is_held {
            is_busy |= self.release() > 0;
        }
        for (cqid, queue) in &mut self.queues {
            self.vectors.extend(queue.publish());
            while let Some(reply) = queue.take_reply() {
                is_busy = true;
                if matches!(reply, ControllerQueueReply::Stopped | ControllerQueueReply::Deleted) {
                    over.push(*cqid);
                }
                self.controller.reply(*cqid, reply);
            }
            is_busy |= queue.arm();
        }
        over.iter().for_each(|cqid| drop(self.queues.remove(cqid)));
        is_busy | self.controller.arm()
    }

    /// Completes all bios held back by devices.
    pub fn release(&mut self) -> usize {
        let held = std::mem::take(&mut self.held);
        let count = held.len();
        for (cqid, mut bio) in held {
            let queue = self.queues.get_mut(&cqid).unwrap();
            bio.status = self.answer;
            if self.answer == Status::Ok {
                bio.status = ram(&self.devices[usize::from(bio.namespace)], &bio, queue.table());
            }
            queue.end(bio.cookie as u16, bio.status);
            self.bios.push(bio);
        }
        count
    }

    /// Puts a command with this cid into a ring, and writes the doorbell.
    pub fn push(&mut self, queue: &mut RawQueue, sqe: Sqe, cid: u16) {
        self.put_words(queue.sq + u64::from(queue.tail) * SQE_BYTES as u64, &sqe.with_cid(cid).0);
        queue.tail = (queue.tail + 1) % queue.sq_entries;
        self.ring_tail(queue.sqid, u32::from(queue.tail));
    }

    pub fn ring_tail(&mut self, sqid: u16, tail: u32) -> Option<u16> {
        self.write32(0x1000 + usize::from(sqid) * 8, tail)
    }

    pub fn ring_head(&mut self, cqid: u16, head: u32) -> Option<u16> {
        self.write32(0x1004 + usize::from(cqid) * 8, head)
    }

    /// Takes the available completions, and writes the head doorbell.
    pub fn take(&mut self, queue: &mut RawQueue) -> Vec<Cqe> {
        let mut all = vec![];
        loop {
            let at = (queue.cq - BASE) as usize + usize::from(queue.head) * CQE_BYTES;
            let cqe = Cqe(self.view.load_u64s(at, Acquire));
            if cqe.phase() != queue.phase {
                break;
            }
            all.push(cqe);
            queue.head = (queue.head + 1) % queue.cq_entries;
            queue.phase ^= queue.head == 0;
        }
        if !all.is_empty() {
            self.ring_head(queue.cqid, u32::from(queue.head));
        }
        all
    }

    pub fn cid(&mut self) -> u16 {
        self.next_cid = self.next_cid.wrapping_add(1);
        self.next_cid
    }

    /// Sends an admin command without waiting; returns its cid.
    pub fn start_admin(&mut self, sqe: Sqe) -> u16 {
        let (mut queue, cid) = (self.admin, self.cid());
        self.push(&mut queue, sqe, cid);
        self.admin = queue;
        cid
    }

    /// Runs, and takes the admin completions.
    pub fn admin_completions(&mut self) -> Vec<Cqe> {
        self.run();
        let mut queue = self.admin;
        let all = self.take(&mut queue);
        self.admin = queue;
        all
    }

    /// An admin command: its result, or its status without flags.
    pub fn admin(&mut self, sqe: Sqe) -> Result<u64, NvmeStatus> {
        let cid = self.start_admin(sqe);
        let all = self.admin_completions();
        let [cqe] = all[..] else { panic!("{} completions of {sqe:?}", all.len()) };
        assert_eq!((cqe.cid(), cqe.sq_id()), (cid, 0));
        result(cqe)
    }

    /// An admin command that reads `len` bytes.
    pub fn admin_read(&mut self, sqe: Sqe, len: usize) -> Result<Vec<u8>, NvmeStatus> {
        let addr = self.pages(len.div_ceil(4096) as u64);
        let second = if len > 4096 { addr + PAGE } else { 0 };
        self.admin(sqe.with_data(Psdt::Prp, [addr, second])).map(|_| self.get(addr, len))
    }

    /// Creates an I/O queue pair.
    pub fn queue_pair(&mut self, qid: u16, entries: u16) -> RawQueue {
        self.queue(qid, qid, entries)
    }

    /// Creates a submission queue, and its completion queue if the two have the same identifier.
    pub fn queue(&mut self, sqid: u16, cqid: u16, entries: u16) -> RawQueue {
        let (sq, cq) = (self.page(), self.page());
        self.zero(cq, PAGE as usize);
        if sqid == cqid {
            assert_eq!(self.admin(Sqe::create_cq(cqid, entries.into(), cq, Some(1))), Ok(0));
        }
        assert_eq!(self.admin(Sqe::create_sq(sqid, entries.into(), sq, cqid)), Ok(0));
        RawQueue { sqid, cqid, sq, cq, sq_entries: entries, cq_entries: entries, tail: 0, head: 0, phase: true }
    }

    /// An I/O command: its result, or its status without flags.
    pub fn io(&mut self, queue: &mut RawQueue, sqe: Sqe) -> Result<u64, NvmeStatus> {
        let cid = self.cid();
        self.push(queue, sqe, cid);
        self.run();
        let all = self.take(queue);
        let [cqe] = all[..] else { panic!("{} completions of {sqe:?}", all.len()) };
        assert_eq!((cqe.cid(), cqe.sq_id()), (cid, queue.sqid));
        result(cqe)
    }

    pub fn load32(&self, addr: u64) -> u32 {
        self.view.load_u32((addr - BASE) as usize, Relaxed)
    }

    pub fn store32(&self, addr: u64, value: u32) {
        self.view.store_u32((addr - BASE) as usize, value, Release);
    }
}

pub fn result(cqe: Cqe) -> Result<u64, NvmeStatus> {
    if cqe.status().is_success() { Ok(cqe.result()) } else { Err(cqe.status().without_flags()) }
}

/// Executes a bio on a region.
fn ram(store: &Arc<Region>, bio: &Bio, memory: &RegionTable) -> Status {
    if bio.op == Op::Flush {
        return Status::Ok;
    }
    let Some(place) = store.span(bio.sector * 512, bio.bytes() as usize) else { return Status::Invalid };
    match bio.op {
        Op::Flush => {}
        Op::Discard | Op::WriteZeroes => place.fill(0),
        Op::Read | Op::Write => {
            let mut done = 0;
            for segment in &bio.segments {
                let span = memory.resolve(*segment).unwrap();
                let part = place.part(done, span.len());
                if bio.op == Op::Read {
                    span.copy_from(&part);
                } else {
                    part.copy_from(&span);
                }
                done += span.len();
            }
        }
    }
    Status::Ok
}
