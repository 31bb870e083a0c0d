//! A host with lanes and hardware queues on the target in memory, in virtual time.

use std::collections::VecDeque;
use std::sync::Arc;

use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Batch, Bio, Done, Driver, HwQueue, HwQueueConfig, Op, Status, TimedOut};
use blkyard_nvme::fabrics::Nqn;
use blkyard_nvme::tcp::SendList;
use blkyard_nvme::{
    ControllerState, FabricsHost, FabricsHostConfig, FabricsHostEvent, FabricsIoQueue, FabricsQueueCommand,
    FabricsQueueReport, QueueDemand, StreamRequest,
};

use crate::fabrics::target::{BLOCK, Target};

pub const MS: u64 = 1_000_000;

/// The driver of a lane's hardware queue.
pub struct LaneDriver(pub FabricsIoQueue);

impl Driver<()> for LaneDriver {
    fn queue_rqs(&mut self, (): &mut (), _: &RegionTable, batch: &mut Batch<'_>) {
        self.0.queue(batch);
    }

    fn poll(&mut self, (): &mut (), _: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        self.0.poll(done, now_ns);
    }

    fn wants_poll(&self) -> bool {
        self.0.wants_poll()
    }

    fn timed_out(&mut self, (): &mut (), _: &RegionTable, _: usize, _: &mut Done<'_>, _: u64) -> TimedOut {
        self.0.timed_out()
    }

    fn set_memory(&mut self, (): &mut (), memory: &RegionTable) {
        self.0.set_memory(memory);
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.0.deadline_ns()
    }
}

/// A queue on its lane.
pub struct Lane {
    pub hw: HwQueue<LaneDriver>,
    pub mail: VecDeque<FabricsQueueCommand>,
    pub connection: Option<usize>,
    pub reports: Vec<FabricsQueueReport>,
    /// Whether it is run.
    pub runs: bool,
    is_opening: bool,
    pub is_closing: bool,
}

/// See the head of the module.
pub struct Rig {
    pub host: FabricsHost,
    pub target: Target,
    pub lanes: Vec<Lane>,
    pub admin: Option<(u64, usize)>,
    pub now_ns: u64,
    pub events: Vec<FabricsHostEvent>,
    pub ended: Vec<(u64, Op, Status)>,
    /// Whether no stream is connected.
    pub unreachable: bool,
    /// Whether path errors are for another path.
    pub fails_over: bool,
    /// Whether streams take until the next turn to close.
    pub closes_late: bool,
    /// Connections that the host has closed, and when.
    pub closed: Vec<(usize, u64)>,
    admin_closing: Option<u64>,
    pub buffer: Arc<Region>,
}

pub fn config() -> FabricsHostConfig {
    let nqn = |name| Nqn::new(name).unwrap();
    let mut config = FabricsHostConfig::new(nqn("nqn.2026-11.example:host"), [7; 16], nqn("nqn.2026-11.example:disk"));
    config.queues = QueueDemand { submitters: 2, write_queues: 0, poll_queues: 0 };
    config.queue_entries = 16;
    config
}

impl Rig {
    pub fn new(config: FabricsHostConfig) -> Rig {
        Rig {
            host: FabricsHost::new(config),
            target: Target::new(),
            lanes: vec![],
            admin: None,
            now_ns: 0,
            events: vec![],
            ended: vec![],
            unreachable: false,
            fails_over: false,
            closes_late: false,
            closed: vec![],
            admin_closing: None,
            buffer: Region::anonymous(1 << 20).unwrap(),
        }
    }

    /// A rig with a live association and so many queues.
    pub fn live(config: FabricsHostConfig, queues: u16) -> Rig {
        let mut rig = Rig::new(config);
        rig.host.start(0);
        rig.run_until(|rig| rig.host.state() == ControllerState::Live);
        (1..=queues).for_each(|qid| rig.open(qid));
        rig.run_until(|rig| (1..=queues).all(|qid| rig.host.is_started(qid)));
        rig
    }

    /// Opens a queue on a lane.
    pub fn open(&mut self, qid: u16) {
        let scanned = &self.host.namespaces()[0];
        let options = self.host.queue_options(qid, 8, self.fails_over);
        let queue = FabricsIoQueue::new(options, Box::new([scanned.namespace])).unwrap();
        let config = HwQueueConfig { depth: options.depth.into(), bios_max: 64, ..HwQueueConfig::default() };
        let mut hw = HwQueue::new(LaneDriver(queue), Arc::new(scanned.info.clone()), config);
        hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&self.buffer)])));
        let (mail, reports) = (VecDeque::new(), vec![]);
        let lane = Lane { hw, mail, connection: None, reports, runs: true, is_opening: false, is_closing: false };
        assert_eq!(usize::from(qid), self.lanes.len() + 1);
        self.lanes.push(lane);
        self.host.open_queue(qid);
    }

    /// A bio for one block; its data is at the block's place in the buffer.
    pub fn submit(&mut self, qid: u16, op: Op, block: u64, value: u8) {
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.cookie) = (op, block);
        if op != Op::Flush {
            (bio.sector, bio.sectors) = (block, 1);
        }
        if op.has_data() {
            let offset = block * BLOCK as u64 + u64::from(qid - 1) * (64 << 10);
            bio.segments.push(Segment { region: 0, offset, len: BLOCK as u32 });
            if op == Op::Write {
                self.buffer.span(offset, BLOCK).unwrap().fill(value);
            }
        }
        self.lanes[usize::from(qid) - 1].hw.submit(bio);
    }

    /// The byte that a block's buffer is filled with.
    pub fn value(&self, qid: u16, block: u64) -> u8 {
        let mut bytes = [0; BLOCK];
        let offset = block * BLOCK as u64 + u64::from(qid - 1) * (64 << 10);
        self.buffer.span(offset, BLOCK).unwrap().copy_to_slice(&mut bytes);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "block {block} is torn");
        bytes[0]
    }

    /// Handles the events of the host.
    pub fn control(&mut self) {
        self.host.advance(self.now_ns);
        while let Some(event) = self.host.next_event() {
            match &event {
                FabricsHostEvent::Open(association) => {
                    assert!(self.admin.is_none(), "two admin streams");
                    if self.unreachable {
                        self.host.admin_closed(*association, self.now_ns);
                    } else {
                        self.admin = Some((*association, self.target.accept()));
                        self.host.admin_opened(*association, self.now_ns);
                    }
                }
                FabricsHostEvent::Close(association) => {
                    self.admin_closing = Some(*association);
                    if !self.closes_late {
                        self.close_admin();
                    }
                }
                FabricsHostEvent::Queue(qid, command) => {
                    self.lanes[usize::from(*qid) - 1].mail.push_back(command.clone());
                }
                _ => {}
            }
            self.events.push(event);
        }
    }

    /// Closes the admin stream, if that is wanted.
    pub fn close_admin(&mut self) {
        if let Some(association) = self.admin_closing.take() {
            let stream = self.admin.take();
            self.closed.extend(stream.map(|(_, number)| (number, self.now_ns)));
            self.host.admin_closed(association, self.now_ns);
        }
    }

    /// The host's side of the admin stream: sends, and receives so many bytes.
    pub fn pump_admin(&mut self, bytes: usize) {
        let Some((association, number)) = self.admin else { return };
        let connection = &mut self.target.connections[number];
        let mut list = SendList::new(64);
        if let Some(filled) = self.host.admin_fill(&mut list) {
            connection.to_target.push(self.host.admin_memory(), &list, filled);
        }
        if let Some(sent) = connection.to_target.send(64) {
            self.host.admin_sent(association, sent, self.now_ns);
        }
        let connection = &mut self.target.connections[number];
        connection.to_host.deliver(bytes);
        let received = std::mem::take(&mut connection.to_host.received);
        let is_over = connection.is_over;
        self.host.admin_receive(association, &received, self.now_ns);
        if is_over {
            self.host.admin_lost(association, self.now_ns);
        }
    }

    /// One turn of a lane: commands, its stream, and its hardware queue.
    pub fn turn(&mut self, at: usize, bytes: usize) {
        let now_ns = self.now_ns;
        let lane = &mut self.lanes[at];
        if !lane.runs {
            return;
        }
        let may_close = !self.closes_late || lane.is_closing;
        for command in lane.mail.drain(..) {
            lane.hw.driver_mut().0.command(command);
        }
        let ended = &mut self.ended;
        lane.hw.reap(&mut (), now_ns, &mut |bio| ended.push((bio.cookie, bio.op, bio.status)));
        lane.hw.issue(&mut (), now_ns);
        let queue = &mut lane.hw.driver_mut().0;
        match queue.take_stream_request() {
            Some(StreamRequest::Open) => lane.is_opening = true,
            Some(StreamRequest::Close) => lane.is_closing = true,
            None => {}
        }
        if std::mem::take(&mut lane.is_opening) {
            if self.unreachable {
                queue.closed();
            } else {
                lane.connection = Some(self.target.accept());
                queue.opened(now_ns);
            }
        }
        if let Some(number) = lane.connection {
            let connection = &mut self.target.connections[number];
            let mut list = SendList::new(64);
            if queue.wants_send()
                && let Some(filled) = queue.fill(&mut list)
            {
                connection.to_target.push(queue.memory(), &list, filled);
            }
            if let Some(sent) = connection.to_target.send(64) {
                queue.sent(sent);
            }
            connection.to_host.deliver(bytes);
            let received = std::mem::take(&mut connection.to_host.received);
            queue.receive(&received);
            if connection.is_over {
                queue.lost();
            }
        }
        if let Some(StreamRequest::Close) = queue.take_stream_request() {
            lane.is_closing = true;
        }
        if lane.is_closing && may_close {
            lane.is_closing = false;
            self.closed.extend(lane.connection.take().map(|number| (number, now_ns)));
            queue.closed();
        }
        if queue.take_traffic() {
            self.host.note_traffic();
        }
        while let Some((association, report)) = queue.take_report() {
            lane.reports.push(report);
            self.host.queue_report(at as u16 + 1, association, report, now_ns);
        }
    }

    /// The target's side of all connections, without I/O commands.
    pub fn pump_target(&mut self, bytes: usize) {
        self.target.now_ns = self.now_ns;
        self.target.expire();
        self.target.answer_delayed();
        for number in 0..self.target.connections.len() {
            if !self.target.connections[number].is_over {
                self.target.connections[number].to_target.deliver(bytes);
                self.target.receive(number);
                self.target.connections[number].pump();
            }
        }
    }

    /// All parts once.
    pub fn round(&mut self) {
        self.control();
        self.pump_admin(usize::MAX);
        (0..self.lanes.len()).for_each(|at| self.turn(at, usize::MAX));
        self.pump_target(usize::MAX);
        self.control();
    }

    /// Runs with time passing until this holds.
    pub fn run_until(&mut self, mut holds: impl FnMut(&Rig) -> bool) {
        for _ in 0..100_000 {
            if holds(self) {
                return;
            }
            self.now_ns += 10 * MS;
            self.round();
            self.target.execute_all();
        }
        panic!("does not come: {:?} {:?} {:?}", self.host.state(), self.host.error(), self.events);
    }

    /// Runs for this time.
    pub fn run_for(&mut self, ms: u64) {
        let until_ns = self.now_ns + ms * MS;
        self.run_until(|rig| rig.now_ns >= until_ns);
    }

    /// The target loses a controller: its connections end.
    pub fn cut(&mut self) {
        let ids: Vec<u16> = self.target.controllers.keys().copied().collect();
        ids.into_iter().for_each(|id| self.target.end_controller(id));
    }

    pub fn statuses(&mut self) -> Vec<Status> {
        self.ended.drain(..).map(|(_, _, status)| status).collect()
    }

    pub fn count(&self, is: impl Fn(&FabricsHostEvent) -> bool) -> usize {
        self.events.iter().filter(|event| is(event)).count()
    }
}
