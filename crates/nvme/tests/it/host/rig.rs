//! A host, its I/O queues and a fake controller on one thread and one clock.
//!
//! Messages between threads are lists until they are delivered: commands to the owners of I/O queues, their reports,
//! and late commands. Tests deliver all of them in each round, or in the order of a seed.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use blkyard_mem::{BufferId, DmaDomain, DmaMapping, Region, RegionTable, RegisteredBuffer, Segment};
use blkyard_mq::{Batch, Bio, BioFlags, Done, Driver, HwQueue, HwQueueConfig, Op, Status, TimedOut};
use blkyard_nvme::{
    ControllerState, ControllerTransport, HostController, HostEvent, IoQueue, IoQueueCommand, IoQueueReport,
    LateAction, LateCommand, NvmeHostConfig, QueueDemand,
};

use crate::host::fake::FakeController;
use crate::host::peer::{PAGE, Peer, Transport, base};
use crate::host::wide::{Wide, addr_of};

pub const MS: u64 = 1_000_000;
pub const S: u64 = 1_000_000_000;
/// Pages of the buffer, one per bio.
const PAGES: u32 = 256;
/// Sectors of a bio.
pub const SECTORS: u32 = 8;

/// The driver of one hardware queue.
pub struct QueueDriver {
    pub queue: IoQueue,
    base: u64,
    domain: Arc<DmaDomain>,
}

impl Driver<()> for QueueDriver {
    fn queue_rqs(&mut self, _cx: &mut (), _memory: &RegionTable, batch: &mut Batch<'_>) {
        let base = self.base;
        // Registered buffers are reached by their mapping only.
        self.queue.queue(batch, |segment| (!segment.is_registered()).then_some(base + segment.offset));
    }

    fn add_buffer(&mut self, _cx: &mut (), _memory: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        let mapping = buffer.mapping(&self.domain).unwrap();
        let addresses = mapping.addresses(|region, offset| addr_of(&self.domain, region, offset)).unwrap();
        assert!(addresses.tables().is_some() && self.queue.add_buffer(buffer, &mapping, &addresses));
    }

    fn remove_buffer(&mut self, _cx: &mut (), buffer: BufferId) {
        self.queue.remove_buffer(buffer);
    }

    fn poll(&mut self, _cx: &mut (), _memory: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.queue.poll(done, now_ns);
    }

    fn wants_poll(&self) -> bool {
        self.queue.wants_poll()
    }

    fn timed_out(&mut self, (): &mut (), _: &RegionTable, place: usize, _: &mut Done<'_>, _: u64) -> TimedOut {
        self.queue.timed_out(place as u16)
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.queue.deadline_ns()
    }
}

pub struct Rig<P = FakeController> {
    pub host: HostController<Transport<P>>,
    pub fake: Rc<RefCell<P>>,
    pub queues: BTreeMap<u16, HwQueue<QueueDriver>>,
    pub now_ns: u64,
    /// Minimum time step.
    pub tick_ns: u64,
    /// Messages in flight between threads.
    pub commands: Vec<(u16, IoQueueCommand)>,
    pub reports: Vec<(u16, IoQueueReport)>,
    pub late: Vec<LateCommand>,
    /// Decisions about late commands.
    pub actions: Vec<LateAction>,
    /// All other events.
    pub events: Vec<HostEvent>,
    buffer: Arc<Region>,
    _mapping: DmaMapping,
    lent: Rc<RefCell<HashSet<u64>>>,
    free_pages: Vec<u32>,
    /// Identifiers of the namespaces that the queues were made for: later scans do not change their numbers.
    nsids: Vec<u32>,
    /// Bios in flight by cookie.
    flying: HashMap<u64, Flying>,
    busy: HashSet<u64>,
    cookies: u64,
    /// Expected data of a read by namespace and sector; `None` after a failed write.
    pub model: HashMap<u64, Option<u64>>,
    /// Cookies and statuses of completed bios, in order.
    pub ended: Vec<(u64, Status)>,
    /// I/O in registered buffers.
    pub wide: Wide,
    deadline_ns: Option<u64>,
}

#[derive(Clone, Copy)]
struct Flying {
    op: Op,
    key: u64,
    page: u32,
    word: u64,
}

pub fn config(submitters: u16) -> NvmeHostConfig {
    NvmeHostConfig {
        queues: QueueDemand { submitters, write_queues: 0, poll_queues: 0 },
        ring_entries: 16,
        list_pages: 5,
        ..NvmeHostConfig::default()
    }
}

impl<P: Peer> Rig<P> {
    /// A host whose controller is not started.
    pub fn new(transport: Transport<P>, config: NvmeHostConfig) -> Rig<P> {
        let buffer = Region::anonymous(PAGES as usize * PAGE).unwrap();
        let mapping = transport.dma_domain().map(vec![Arc::clone(&buffer)]);
        let fake = Rc::clone(&transport.fake);
        let lent = fake.borrow().lent();
        let wide = Wide::new(transport.dma_domain(), &lent);
        Rig {
            host: HostController::new(transport, config),
            fake,
            queues: BTreeMap::new(),
            now_ns: 1,
            tick_ns: 1,
            commands: vec![],
            reports: vec![],
            late: vec![],
            actions: vec![],
            events: vec![],
            buffer,
            _mapping: mapping,
            lent,
            free_pages: (0..PAGES).rev().collect(),
            nsids: vec![],
            flying: HashMap::new(),
            busy: HashSet::new(),
            cookies: 0,
            model: HashMap::new(),
            ended: vec![],
            wide,
            deadline_ns: None,
        }
    }

    /// A host with a live controller.
    pub fn live(transport: Transport<P>, config: NvmeHostConfig) -> Rig<P> {
        let mut rig = Rig::new(transport, config);
        rig.start();
        assert_eq!(rig.host.state(), ControllerState::Live, "{:?}", rig.host.error());
        rig
    }

    /// Starts the controller, and waits until it is live or dead.
    pub fn start(&mut self) {
        self.host.start(self.now_ns);
        self.run(|rig| !rig.host.is_busy(), 5000 * S);
    }

    /// Runs the controller.
    pub fn turn_fake(&mut self) {
        self.fake.borrow_mut().turn(self.now_ns);
    }

    pub fn advance_host(&mut self) {
        self.fake.borrow_mut().at(self.now_ns);
        self.deadline_ns = self.host.advance(self.now_ns);
        while let Some(event) = self.host.next_event() {
            match event {
                HostEvent::Queue(qid, command) => self.commands.push((qid, command)),
                other => self.events.push(other),
            }
        }
        while let Some(queue) = self.host.take_queue() {
            let infos = self.host.namespaces().iter().map(|found| Arc::new(found.info.clone())).collect();
            self.nsids = self.host.namespaces().iter().map(|found| found.namespace.nsid).collect();
            let (qid, depth) = (queue.qid(), usize::from(queue.depth()));
            let domain = Arc::clone(self.host.transport().dma_domain());
            let driver = QueueDriver { queue, base: base(&self.buffer), domain };
            let config = HwQueueConfig { depth, bios_max: 64, ..HwQueueConfig::default() };
            let mut hw = HwQueue::with_namespaces(driver, infos, config);
            let memory = [&self.buffer, &self.wide.region].map(Arc::clone);
            hw.set_memory(&mut (), Arc::new(RegionTable::new(memory.into())));
            assert!(self.queues.insert(qid, hw).is_none(), "queue {qid} was made twice");
        }
    }

    pub fn deliver_command(&mut self, number: usize) {
        let (qid, command) = self.commands.remove(number);
        self.queues.get_mut(&qid).unwrap().driver_mut().queue.command(command);
        self.look_at(qid);
    }

    pub fn deliver_report(&mut self, number: usize) {
        let (qid, report) = self.reports.remove(number);
        self.host.queue_report(qid, report);
    }

    pub fn deliver_late(&mut self, number: usize) {
        let late = self.late.remove(number);
        self.fake.borrow_mut().at(self.now_ns);
        let action = self.host.late_command(late, self.now_ns);
        self.actions.push(action);
    }

    fn look_at(&mut self, qid: u16) {
        let queue = &mut self.queues.get_mut(&qid).unwrap().driver_mut().queue;
        self.reports.extend(queue.take_report().map(|report| (qid, report)));
        self.late.extend(queue.take_late());
    }

    /// Runs the owner of an I/O queue.
    pub fn turn_queue(&mut self, qid: u16) {
        let mut over = vec![];
        let hw = self.queues.get_mut(&qid).unwrap();
        hw.reap(&mut (), self.now_ns, &mut |bio| over.push(bio));
        hw.issue(&mut (), self.now_ns);
        for bio in over {
            self.end(&bio);
        }
        self.look_at(qid);
    }

    /// Runs all parts once, and delivers all messages.
    pub fn round(&mut self) {
        self.turn_fake();
        self.advance_host();
        while !self.commands.is_empty() {
            self.deliver_command(0);
        }
        for qid in self.queues.keys().copied().collect::<Vec<_>>() {
            self.turn_queue(qid);
        }
        while !self.late.is_empty() {
            self.deliver_late(0);
        }
        while !self.reports.is_empty() {
            self.deliver_report(0);
        }
        self.turn_fake();
    }

    /// Advances the time to the next deadline.
    pub fn pass(&mut self) {
        let queues = self.queues.values().filter_map(HwQueue::deadline_ns::<()>).min();
        let next_ns = [self.deadline_ns, queues].into_iter().flatten().min().unwrap_or(self.now_ns + MS);
        self.now_ns = next_ns.clamp(self.now_ns + self.tick_ns, self.now_ns + S);
    }

    /// Runs rounds until a condition holds.
    pub fn run(&mut self, until: impl Fn(&Rig<P>) -> bool, limit_ns: u64) {
        let limit_ns = self.now_ns + limit_ns;
        loop {
            for _ in 0..6 {
                self.round();
                if until(self) {
                    return;
                }
            }
            assert!(self.now_ns < limit_ns, "it does not come: {:?} {:?}", self.host.state(), self.host.error());
            self.pass();
        }
    }

    /// Runs rounds until all bios are complete.
    pub fn finish(&mut self) {
        self.run(|rig| rig.in_flight() == 0, 2000 * S);
        self.check();
    }

    pub fn check(&self) {
        let violations = self.fake.borrow().violations();
        assert!(violations.is_empty(), "{violations:?}");
    }

    /// Number of bios in flight.
    pub fn in_flight(&self) -> usize {
        self.flying.len() + self.wide.in_flight()
    }

    /// Identifier of a namespace of the queues.
    pub fn nsid(&self, namespace: u16) -> Option<u64> {
        self.nsids.get(usize::from(namespace)).map(|nsid| u64::from(*nsid))
    }

    /// Submits a bio to a queue, unless the queue or the buffer is full or its sector is in use.
    pub fn submit(&mut self, qid: u16, namespace: u16, op: Op, block: u64) -> Option<u64> {
        let nsid = self.nsid(namespace)?;
        let hw = self.queues.get_mut(&qid)?;
        let key = (nsid << 48) | (block * u64::from(SECTORS));
        if hw.room() == 0 || self.busy.contains(&key) || self.free_pages.is_empty() {
            return None;
        }
        self.busy.insert(key);
        let page = self.free_pages.pop().unwrap();
        let at = u64::from(page) * PAGE as u64;
        self.cookies += 1;
        let word = if op == Op::Write { self.cookies } else { u64::MAX };
        self.buffer.span(at, 8).unwrap().copy_from_slice(&word.to_le_bytes());
        self.lent.borrow_mut().insert((base(&self.buffer) + at) / PAGE as u64);
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.flags, bio.cookie, bio.namespace) = (op, BioFlags::NO_MERGE, self.cookies, namespace);
        (bio.sector, bio.sectors) = (block * u64::from(SECTORS), SECTORS);
        bio.segments.push(Segment { region: 0, offset: at, len: SECTORS * 512 });
        self.flying.insert(self.cookies, Flying { op, key, page, word });
        hw.submit(bio);
        Some(self.cookies)
    }

    fn end(&mut self, bio: &Bio) {
        if self.wide.end(bio) {
            return self.ended.push((bio.cookie, bio.status));
        }
        let flying = self.flying.remove(&bio.cookie).expect("a bio ends once");
        let at = u64::from(flying.page) * PAGE as u64;
        let mut word = [0; 8];
        self.buffer.span(at, 8).unwrap().copy_to_slice(&mut word);
        let word = u64::from_le_bytes(word);
        match (flying.op, bio.status.is_ok()) {
            (Op::Write, true) => {
                self.model.insert(flying.key, Some(flying.word));
            }
            (Op::Write, false) => {
                self.model.insert(flying.key, None);
            }
            (_, true) => {
                let want = self.model.get(&flying.key).copied().unwrap_or(Some(0));
                assert!(want.is_none_or(|want| want == word), "read {word}, wrote {want:?}");
            }
            _ => {}
        }
        self.lent.borrow_mut().remove(&((base(&self.buffer) + at) / PAGE as u64));
        self.free_pages.push(flying.page);
        self.busy.remove(&flying.key);
        self.ended.push((bio.cookie, bio.status));
    }
}
