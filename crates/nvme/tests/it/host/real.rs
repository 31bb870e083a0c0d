//! Host and controller of this crate against each other: both sides of a reset, with I/O held by devices.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use blkyard_mem::{DmaDomain, Region, View};
use blkyard_mq::{Bio, DeviceInfo, Op, QueueLimits, Status};
use blkyard_nvme::registers::{CSTS, DOORBELLS, cq_doorbell, sq_doorbell};
use blkyard_nvme::{
    Controller, ControllerIoQueue, ControllerOptions, ControllerQueueReply, ControllerRequest, ControllerState,
    IoQueueCommand, NamespaceTable, NextBio, NvmeHostConfig, ServedNamespace,
};

use crate::host::peer::{PAGE, Peer, Transport, map_of, map_where};
use crate::host::rig::{MS, Rig, S, config};

/// The controller with its queues, and devices that complete on command.
pub struct RealController {
    pub controller: Controller,
    queues: BTreeMap<u16, ControllerIoQueue>,
    doorbells: View,
    pub shares_doorbells: bool,
    pub domain: Arc<DmaDomain>,
    changes: u64,
    pub held: Vec<(u16, u16, Box<Bio>)>,
    pub is_prompt: bool,
    pub gone: bool,
    /// Memory of the host that the controller cannot access for now.
    withdrawn: Option<Arc<Region>>,
    /// Whether a doorbell was written that the host did not write.
    has_bad_doorbells: bool,
    /// Number of queues that an invalid doorbell has stopped.
    pub doorbell_faults: u64,
    disk: HashMap<(u16, u64), u64>,
    lent: Rc<RefCell<HashSet<u64>>>,
    violations: Vec<String>,
}

/// Identifiers of the namespaces: there may be gaps.
const NSIDS: [u32; 2] = [1, 3];

/// The table of these devices; one that is absent has no namespace.
pub fn namespaces(devices: &[Option<DeviceInfo>; 2]) -> NamespaceTable {
    let mut table = NamespaceTable::new(4);
    for ((number, nsid), device) in (0..).zip(NSIDS).zip(devices) {
        table.set(nsid, device.as_ref().and_then(|device| ServedNamespace::new(nsid, number, device)));
    }
    table
}

pub fn device(block: u32) -> DeviceInfo {
    let limits = QueueLimits { logical_block_bytes: block, physical_block_bytes: block, ..QueueLimits::default() };
    DeviceInfo { capacity_sectors: 1 << 16, limits, volatile_cache: true, fua: true, ..DeviceInfo::default() }
}

impl RealController {
    pub fn transport() -> Transport<RealController> {
        let domain = DmaDomain::new(|| ());
        let doorbells = View::new(Region::anonymous(PAGE).unwrap(), 0, PAGE, PAGE).unwrap();
        let namespaces = namespaces(&[device(512), device(4096)].map(Some));
        let options = ControllerOptions { io_queues: 4, queue_entries: 64, ..ControllerOptions::default() };
        let controller = Controller::new(options, doorbells.clone(), &map_of(&domain), namespaces).unwrap();
        let real = RealController {
            controller,
            queues: BTreeMap::new(),
            doorbells,
            shares_doorbells: true,
            changes: domain.changes(),
            domain: Arc::clone(&domain),
            held: vec![],
            is_prompt: true,
            gone: false,
            withdrawn: None,
            has_bad_doorbells: false,
            doorbell_faults: 0,
            disk: HashMap::new(),
            lent: Rc::default(),
            violations: vec![],
        };
        Transport::on(domain, real)
    }

    fn remap(&mut self) {
        if self.domain.changes() != self.changes {
            self.changes = self.domain.changes();
            self.set_memory();
        }
    }

    fn set_memory(&mut self) {
        let is_there = |region: &_| self.withdrawn.as_ref().is_none_or(|withdrawn| !Arc::ptr_eq(withdrawn, region));
        self.controller.set_memory(&map_where(&self.domain, is_there));
    }

    /// Takes a region of the host's memory away, or gives it back.
    pub fn withdraw(&mut self, number: Option<usize>) {
        let regions = self.domain.regions();
        self.withdrawn = number.map(|number| Arc::clone(&regions[number % regions.len()]));
        self.set_memory();
    }

    pub fn has_withdrawn(&self) -> bool {
        self.withdrawn.is_some()
    }

    /// Writes a value that is no index to a doorbell register of a queue.
    pub fn break_doorbell(&mut self, qid: u16, is_head: bool, value: u32) {
        self.has_bad_doorbells = true;
        let offset = if is_head { cq_doorbell(qid, 0) } else { sq_doorbell(qid, 0) };
        self.doorbells.store_u32(offset, value, Release);
    }

    /// The controller cannot fetch its next admin command, which is a fatal error.
    pub fn fail(&mut self) {
        self.controller.set_memory(&map_where(&self.domain, |_| false));
        self.controller.write_register(DOORBELLS as u64, 4, 0).unwrap();
        self.set_memory();
    }

    fn fetch(&mut self) {
        for (cqid, queue) in &mut self.queues {
            loop {
                let mut bio = Bio::with_capacity(queue.segments_max());
                match queue.fetch(&mut bio) {
                    NextBio::Bio(token) => self.held.push((*cqid, token, bio)),
                    NextBio::Without => {}
                    NextBio::Unavailable => break,
                }
            }
        }
    }

    /// Completes a bio of a device.
    pub fn complete(&mut self, number: usize, status: Status) {
        let (cqid, token, bio) = self.held.remove(number);
        let Some(queue) = self.queues.get_mut(&cqid) else {
            self.violations.push(format!("queue {cqid} is gone before its bios are back"));
            return;
        };
        let table = Arc::clone(queue.table());
        let mut sector = bio.sector;
        for segment in bio.segments.iter().filter(|_| status.is_ok()) {
            let all = table.resolve(*segment).unwrap();
            for at in (0..all.len()).step_by(PAGE) {
                let span = all.part(at, PAGE.min(all.len() - at));
                let page = span.as_ptr() as u64 / PAGE as u64;
                if !self.lent.borrow().contains(&page) {
                    self.violations.push(format!("{:?} reached page {page:#x} that was given back", bio.op));
                }
                let key = (bio.namespace, sector);
                if bio.op == Op::Read {
                    span.part(0, 8).copy_from_slice(&self.disk.get(&key).copied().unwrap_or(0).to_le_bytes());
                } else {
                    let mut word = [0; 8];
                    span.part(0, 8).copy_to_slice(&mut word);
                    self.disk.insert(key, u64::from_le_bytes(word));
                }
                sector += (span.len() / 512) as u64;
            }
        }
        queue.end(token, status);
    }

    fn replies(&mut self) {
        let mut over = vec![];
        for (cqid, queue) in &mut self.queues {
            queue.publish();
            // Like an owner that sleeps after each turn.
            queue.arm();
            while let Some(reply) = queue.take_reply() {
                if matches!(reply, ControllerQueueReply::Stopped | ControllerQueueReply::Deleted) {
                    over.push(*cqid);
                }
                if let ControllerQueueReply::Fault(..) = reply {
                    self.doorbell_faults += 1;
                    if !self.has_bad_doorbells {
                        self.violations.push(format!("{reply:?}"));
                    }
                }
                self.controller.reply(*cqid, reply);
            }
        }
        over.iter().for_each(|cqid| drop(self.queues.remove(cqid)));
    }
}

impl Peer for RealController {
    fn at(&mut self, _now_ns: u64) {}

    fn turn(&mut self, now_ns: u64) {
        if self.gone {
            return;
        }
        self.remap();
        let _ = self.controller.poll(now_ns);
        while let Some(request) = self.controller.take_request() {
            match request {
                ControllerRequest::Create(queue) => {
                    let cqid = queue.cqid();
                    assert!(self.queues.insert(cqid, *queue).is_none(), "a queue that exists already");
                    self.controller.reply(cqid, ControllerQueueReply::Created);
                }
                ControllerRequest::Queue(cqid, command) => self.queues.get_mut(&cqid).unwrap().handle(command),
                ControllerRequest::Flush(number) => self.controller.flushed(number),
            }
        }
        self.fetch();
        while self.is_prompt && !self.held.is_empty() {
            self.complete(0, Status::Ok);
        }
        self.replies();
    }

    fn read32(&mut self, offset: usize) -> u32 {
        if self.gone { u32::MAX } else { self.controller.read_register(offset as u64, 4).unwrap() as u32 }
    }

    fn write32(&mut self, offset: usize, value: u32) {
        if !self.gone {
            self.remap();
            self.controller.write_register(offset as u64, 4, u64::from(value)).unwrap();
        }
    }

    fn doorbells(&self) -> Option<View> {
        self.shares_doorbells.then(|| self.doorbells.clone())
    }

    fn vectors(&self) -> u16 {
        5
    }

    fn reset_function(&mut self) -> bool {
        false
    }

    fn lent(&self) -> Rc<RefCell<HashSet<u64>>> {
        Rc::clone(&self.lent)
    }

    fn violations(&self) -> Vec<String> {
        self.violations.clone()
    }
}

fn live(queues: u16) -> Rig<RealController> {
    Rig::live(RealController::transport(), NvmeHostConfig { ring_entries: 32, ..config(queues) })
}

#[test]
fn our_host_uses_our_controller() {
    let mut rig = live(3);
    let found: Vec<_> = rig.host.namespaces().iter().map(|found| (found.namespace.nsid, found.info.clone())).collect();
    assert_eq!(found.iter().map(|(nsid, _)| *nsid).collect::<Vec<_>>(), [1, 3]);
    for ((_, info), block) in found.iter().zip([512, 4096]) {
        assert_eq!((info.capacity_sectors, info.limits.logical_block_bytes), (1 << 16, block));
        assert!(info.volatile_cache && info.fua && !info.read_only);
    }
    assert_eq!(rig.queues.len(), 3);
    for op in [Op::Write, Op::Read] {
        for block in 0..90 {
            rig.submit(1 + block as u16 % 3, block as u16 % 2, op, block).unwrap();
        }
        rig.finish();
    }
    assert!(rig.ended.len() == 180 && rig.ended.iter().all(|(_, status)| status.is_ok()));
    assert_eq!(rig.fake.borrow().disk.len(), 90);
}

#[test]
fn a_reset_waits_for_what_devices_still_have() {
    let mut rig = live(2);
    rig.fake.borrow_mut().is_prompt = false;
    for block in 0..20 {
        rig.submit(1 + block as u16 % 2, 0, Op::Read, block).unwrap();
    }
    rig.run(|rig| rig.fake.borrow().held.len() == 20, S);
    rig.host.reset(rig.now_ns);
    // 60 s for the deletion of queues, and 60.5 s for the controller to become idle (CAP.TO).
    let until_ns = rig.now_ns + 100 * S;
    rig.tick_ns = 20 * MS;
    while rig.now_ns < until_ns {
        rig.round();
        rig.pass();
    }
    assert_eq!((rig.host.state(), rig.ended.len()), (ControllerState::Resetting, 0));
    rig.fake.borrow_mut().is_prompt = true;
    rig.finish();
    rig.run(|rig| rig.host.state() == ControllerState::Live, 200 * S);
    assert!(rig.ended.iter().all(|(_, status)| status.is_ok()));
}

#[test]
fn doorbells_that_are_not_shared_begin_anew_after_a_reset() {
    let transport = RealController::transport();
    transport.fake.borrow_mut().shares_doorbells = false;
    let mut rig = Rig::live(transport, NvmeHostConfig { ring_entries: 32, has_shadow: false, ..config(1) });
    let mut total = 0;
    for count in [9, 3, 5] {
        total += count;
        for block in 0..count {
            rig.submit(1, 0, Op::Write, block as u64).unwrap();
        }
        for _ in 0..50 {
            rig.round();
            let now_ns = rig.now_ns;
            rig.host.forward_doorbells(1, now_ns);
            rig.pass();
        }
        // A stale head of the completion queue would be a violation.
        rig.check();
        assert_eq!(rig.ended.len(), total);
        rig.host.reset(rig.now_ns);
        rig.run(|rig| rig.host.state() == ControllerState::Live, 200 * S);
    }
}

#[test]
fn completions_reaped_during_a_reset_leave_no_head_behind() {
    let transport = RealController::transport();
    transport.fake.borrow_mut().shares_doorbells = false;
    let mut rig = Rig::live(transport, NvmeHostConfig { ring_entries: 32, has_shadow: false, ..config(1) });
    for block in 0..9 {
        rig.submit(1, 0, Op::Write, block).unwrap();
    }
    rig.turn_queue(1);
    let now_ns = rig.now_ns;
    rig.host.forward_doorbells(1, now_ns);
    rig.turn_fake();
    // All are complete, and their queue has no turn until it cancels.
    rig.host.reset(now_ns);
    while rig.ended.is_empty() {
        rig.turn_fake();
        rig.advance_host();
        while let Some((_, command)) = rig.commands.first().copied() {
            rig.deliver_command(0);
            if command == IoQueueCommand::Cancel {
                rig.turn_queue(1);
            }
        }
        while !rig.reports.is_empty() {
            rig.deliver_report(0);
        }
        rig.pass();
    }
    assert_eq!(rig.ended.len(), 9);
    rig.run(|rig| rig.host.state() == ControllerState::Live, 200 * S);
    for block in 0..3 {
        rig.submit(1, 0, Op::Read, block).unwrap();
    }
    for _ in 0..50 {
        rig.round();
        let now_ns = rig.now_ns;
        rig.host.forward_doorbells(1, now_ns);
        rig.pass();
    }
    // A head before the queue's first completion is a fault of the host.
    rig.check();
    assert_eq!(rig.ended.len(), 12);
}

#[test]
fn a_late_command_is_aborted_by_our_controller() {
    let mut rig = live(1);
    rig.fake.borrow_mut().is_prompt = false;
    rig.submit(1, 0, Op::Read, 0).unwrap();
    rig.run(|rig| !rig.actions.is_empty(), 100 * S);
    rig.fake.borrow_mut().is_prompt = true;
    rig.finish();
    assert_eq!(rig.ended, [(1, Status::Ok)]);
    assert_eq!(rig.host.state(), ControllerState::Live);
}

/// Submits this many bios to queue 1, and has the controller complete all of them.
fn complete_behind_the_owner(rig: &mut Rig<RealController>, count: u64) {
    for block in 0..count {
        rig.submit(1, 0, Op::Write, block).unwrap();
    }
    rig.turn_queue(1);
    let now_ns = rig.now_ns;
    rig.host.forward_doorbells(1, now_ns);
    rig.turn_fake();
}

#[test]
fn a_lost_interrupt_costs_the_timeout_and_no_command() {
    let mut rig = live(1);
    complete_behind_the_owner(&mut rig, 9);
    assert!(rig.ended.is_empty(), "nobody has looked");
    // The owner sleeps until a request is due.
    rig.now_ns = rig.queues[&1].deadline_ns::<()>().expect("requests have a deadline");
    rig.turn_queue(1);
    rig.advance_host();
    assert!(rig.ended.len() == 9 && rig.ended.iter().all(|(_, status)| status.is_ok()), "{:?}", rig.ended);
    assert!(rig.late.is_empty() && rig.actions.is_empty(), "completions are looked for before a command is late");
    assert_eq!(rig.host.state(), ControllerState::Live);
}

#[test]
fn a_fatal_error_of_our_controller_is_reset_and_fails_no_request() {
    let mut rig = live(2);
    rig.fake.borrow_mut().is_prompt = false;
    for block in 0..20 {
        rig.submit(1 + block as u16 % 2, 0, Op::Write, block).unwrap();
    }
    rig.run(|rig| rig.fake.borrow().held.len() == 20, S);
    rig.fake.borrow_mut().fail();
    assert_eq!(rig.fake.borrow_mut().read32(CSTS) & 2, 2, "CSTS.CFS");
    // Some requests are complete, without a completion that the host could see; the others never are.
    (0..5).for_each(|_| rig.fake.borrow_mut().complete(0, Status::Ok));
    rig.fake.borrow_mut().is_prompt = true;
    rig.finish();
    assert!(rig.ended.len() == 20 && rig.ended.iter().all(|(_, status)| status.is_ok()), "{:?}", rig.ended);
    rig.run(|rig| rig.host.state() == ControllerState::Live, 200 * S);
}

#[test]
fn a_doorbell_that_is_no_index_costs_at_most_a_reset() {
    for (qid, is_head) in [(1, false), (1, true), (0, false), (0, true)] {
        for value in [32, 0xffff, u32::MAX] {
            let mut rig = Rig::live(RealController::transport(), NvmeHostConfig { has_shadow: false, ..config(2) });
            rig.fake.borrow_mut().break_doorbell(qid, is_head, value);
            rig.turn_fake();
            // The admin queue is looked at without its owner.
            assert_eq!(rig.fake.borrow().doorbell_faults, u64::from(qid > 0), "queue {qid}: {value:#x}");
            for block in 0..30 {
                let _ = rig.submit(1 + block as u16 % 2, 0, Op::Write, block);
            }
            // An event tells of it, or the commands of the queue are late.
            rig.finish();
            assert!(rig.ended.iter().all(|(_, status)| status.is_ok()), "{:?}", rig.ended);
            rig.run(|rig| rig.host.state() == ControllerState::Live, 200 * S);
            let cookie = rig.submit(1, 0, Op::Read, 40).unwrap();
            rig.finish();
            assert_eq!(rig.ended.last(), Some(&(cookie, Status::Ok)));
        }
    }
}

#[test]
fn memory_that_is_withdrawn_fails_its_requests_or_stops_its_queue() {
    let regions = live(2).fake.borrow().domain.regions().len();
    let mut failed = Vec::new();
    for number in 0..regions {
        let mut rig = live(2);
        rig.fake.borrow_mut().withdraw(Some(number));
        for block in 0..20 {
            rig.submit(1 + block as u16 % 2, 0, Op::Write, block).unwrap();
        }
        for _ in 0..20 {
            rig.round();
            rig.pass();
        }
        rig.fake.borrow_mut().withdraw(None);
        rig.finish();
        failed.push(rig.ended.iter().filter(|(_, status)| *status == Status::Io).count());
        assert_eq!(rig.ended.iter().filter(|(_, status)| status.is_ok()).count(), 20 - failed[number]);
        rig.run(|rig| rig.host.state() == ControllerState::Live, 200 * S);
        let cookie = rig.submit(1, 0, Op::Write, 40).unwrap();
        rig.finish();
        assert_eq!(rig.ended.last(), Some(&(cookie, Status::Ok)));
    }
    // Data, memory that no bio uses, and the rings of each queue, which go on where they were.
    assert_eq!(failed, [20, 0, 0, 0, 0]);
}
