//! A hardware queue over fake paths, whose other ends are in the hands of the test.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use blkyard_mpath::{
    AccessState, ConnectionState, MultipathQueue, MultipathSettings, PathMonitor, PathRules, PathState, PolicyKind,
    QueuePath,
};
use blkyard_mq::{
    Batch, Bio, BufferId, DeviceInfo, Done, Driver, EndedHedge, ErrorCode, FenceEvidence, HedgeDriver, HwQueue,
    HwQueueConfig, Op, QueueLimits, RegionTable, RegisteredBuffer, Request, Segment, Segments, Shortage, Status, Tag,
    TimedOut,
};

pub const MS: u64 = 1_000_000;
pub const NO_PATH_NS: u64 = 5_000 * MS;
pub const DEPTH: usize = 16;

/// A command at a path. The offset of a write's segment stands for its data.
#[derive(Debug)]
pub struct Sent {
    pub tag: Tag,
    pub op: Op,
    pub sector: u64,
    pub data: u64,
}

/// What a path does with its commands; the test has the other end.
#[derive(Debug, Default)]
pub struct Wire {
    pub refuses: bool,
    /// Commands that it takes; unset for all.
    pub room: Option<usize>,
    pub generation: u32,
    pub sent: Vec<Sent>,
    /// Answers to be told at the next poll: index in `sent`, and status.
    pub answers: Vec<(usize, Status)>,
    /// Error number of those that fail.
    pub code: Option<ErrorCode>,
    /// All commands are given back at the next poll; true if they were answered.
    pub gives_back: Option<bool>,
    pub late: usize,
    /// Calls of its driver that are not about requests, in order.
    pub calls: Vec<&'static str>,
    /// Whether it has events: it is polled without requests, and is not armed without a report.
    pub has_events: bool,
    pub due_ns: Option<u64>,
    /// What it does with hedges; unset if it can send none.
    pub hedges: Option<HedgeWire>,
}

/// Hedges at a path, and reads that were given up; the test has the other end.
#[derive(Debug, Default)]
pub struct HedgeWire {
    /// Data of reads comes in: none is given up.
    pub is_receiving: bool,
    pub next: u16,
    /// Those in flight, by number and sector.
    pub in_flight: Vec<(u16, u64)>,
    pub ended: Vec<EndedHedge>,
    /// Reads that were given up, and hedges whose end was told: their owner is to release those.
    pub given_up: Vec<u16>,
    pub told: Vec<u16>,
    /// Sectors of requests to which data was copied.
    pub copied: usize,
    pub released: usize,
}

#[derive(Debug)]
pub struct FakePath(pub Rc<RefCell<Wire>>);

impl<Cx: ?Sized> Driver<Cx> for FakePath {
    fn queue_rqs(&mut self, _: &mut Cx, _: &RegionTable, batch: &mut Batch<'_>) {
        let mut wire = self.0.borrow_mut();
        if wire.refuses {
            return batch.short_of(Shortage::Device);
        }
        while wire.room.is_none_or(|room| wire.sent.len() < room)
            && let Some((tag, request, segments)) = batch.take()
        {
            let data = segments.first().map_or(0, |segment| segment.offset);
            let (op, sector) = (request.op(), request.sector());
            wire.sent.push(Sent { tag, op, sector, data });
        }
    }

    fn poll(&mut self, _: &mut Cx, _: &RegionTable, done: &mut Done<'_>, _: u64) {
        let mut wire = self.0.borrow_mut();
        if std::mem::take(&mut wire.has_events) {
            wire.calls.push("poll");
        }
        let mut answers = std::mem::take(&mut wire.answers);
        answers.sort_unstable_by_key(|(at, _)| std::cmp::Reverse(*at));
        for (at, status) in answers {
            let tag = wire.sent.remove(at).tag;
            if let Some(code) = wire.code.filter(|_| !status.is_ok()) {
                done.note_code(tag.index(), code);
            }
            done.complete(tag, status);
        }
        if let Some(answered) = wire.gives_back.take() {
            // The order in which a driver gives back must not matter.
            for sent in wire.sent.drain(..).rev() {
                if answered { done.requeue_answered(sent.tag) } else { done.requeue(sent.tag) }
            }
            wire.generation += 1;
        }
    }

    fn timed_out(&mut self, _: &mut Cx, _: &RegionTable, _: usize, _: &mut Done<'_>, _: u64) -> TimedOut {
        self.0.borrow_mut().late += 1;
        TimedOut::MoreTime
    }

    fn generation(&self) -> u32 {
        self.0.borrow().generation
    }

    fn wants_poll(&self) -> bool {
        self.0.borrow().has_events
    }

    fn set_memory(&mut self, _: &mut Cx, _: &RegionTable) {
        self.0.borrow_mut().calls.push("set_memory");
    }

    fn change_memory(&mut self, _: &mut Cx, _: &RegionTable) {
        self.0.borrow_mut().calls.push("change_memory");
    }

    fn add_buffer(&mut self, _: &mut Cx, _: &RegionTable, _: &Arc<RegisteredBuffer>) {
        self.0.borrow_mut().calls.push("add_buffer");
    }

    fn remove_buffer(&mut self, _: &mut Cx, _: BufferId) {
        self.0.borrow_mut().calls.push("remove_buffer");
    }

    fn arm(&mut self) -> bool {
        let mut wire = self.0.borrow_mut();
        wire.calls.push("arm");
        wire.has_events
    }

    fn disarm(&mut self) {
        self.0.borrow_mut().calls.push("disarm");
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.0.borrow().due_ns
    }

    fn hedges(&mut self) -> Option<&mut dyn HedgeDriver> {
        if self.0.borrow().hedges.is_some() { Some(self) } else { None }
    }
}

impl HedgeDriver for FakePath {
    fn send_hedge(&mut self, request: &Request) -> Option<u16> {
        let mut wire = self.0.borrow_mut();
        if wire.refuses {
            return None;
        }
        let hedges = wire.hedges.as_mut()?;
        hedges.next += 1;
        hedges.in_flight.push((hedges.next, request.sector()));
        Some(hedges.next)
    }

    fn give_up(&mut self, place: usize) -> Option<(Tag, u16)> {
        let mut wire = self.0.borrow_mut();
        let at = wire.sent.iter().position(|sent| sent.tag.index() == place)?;
        if wire.hedges.as_ref()?.is_receiving {
            return None;
        }
        let Sent { tag, sector, .. } = wire.sent.remove(at);
        let hedges = wire.hedges.as_mut()?;
        hedges.next += 1;
        hedges.in_flight.push((hedges.next, sector));
        hedges.given_up.push(hedges.next);
        Some((tag, hedges.next))
    }

    fn next_ended(&mut self) -> Option<EndedHedge> {
        let mut wire = self.0.borrow_mut();
        let hedges = wire.hedges.as_mut()?;
        let ended = hedges.ended.pop()?;
        if !hedges.given_up.contains(&ended.number) {
            hedges.told.push(ended.number);
        }
        Some(ended)
    }

    fn copy_hedge(&self, number: u16, _: &RegionTable, to: Segments<'_>) {
        let mut wire = self.0.borrow_mut();
        let hedges = wire.hedges.as_mut().unwrap();
        assert!(hedges.told.contains(&number), "hedge {number} has no data to copy");
        hedges.copied += to.count();
    }

    fn release_hedge(&mut self, number: u16) {
        let mut wire = self.0.borrow_mut();
        let hedges = wire.hedges.as_mut().unwrap();
        let at = hedges.told.iter().position(|told| *told == number).expect("a hedge that has ended, once");
        hedges.told.swap_remove(at);
        hedges.released += 1;
    }
}

pub struct World {
    pub wires: Vec<Rc<RefCell<Wire>>>,
    pub monitors: Vec<Option<Arc<PathMonitor>>>,
    pub settings: Arc<MultipathSettings>,
    pub queue: HwQueue<MultipathQueue<FakePath>>,
    pub now_ns: u64,
    pub ended: Vec<(u64, Status)>,
}

pub const LOST: PathState = PathState {
    connection: ConnectionState::Connecting,
    access: AccessState::Optimized,
    ana_pending: false,
    ready: true,
};

impl World {
    pub fn new(policy: PolicyKind, paths: usize, has_monitors: bool) -> World {
        let wires: Vec<_> = (0..paths).map(|_| Rc::new(RefCell::new(Wire::default()))).collect();
        let monitor = || has_monitors.then(|| Arc::new(PathMonitor::new(PathState::default())));
        let monitors: Vec<_> = (0..paths).map(|_| monitor()).collect();
        let queue_path = |(wire, monitor): (&Rc<RefCell<Wire>>, &Option<Arc<PathMonitor>>)| QueuePath {
            driver: FakePath(Rc::clone(wire)),
            monitor: monitor.clone(),
            node: 0,
        };
        let queues = wires.iter().zip(&monitors).map(queue_path).collect();
        let settings = Arc::new(MultipathSettings::new(PathRules { policy, ..PathRules::default() }, NO_PATH_NS));
        let driver = MultipathQueue::new(queues, Arc::clone(&settings), DEPTH, 0, None);
        let limits = QueueLimits { discard_sectors_max: 1024, ..QueueLimits::default() };
        let info = DeviceInfo { capacity_sectors: 1 << 20, limits, ..DeviceInfo::default() };
        let config = HwQueueConfig {
            depth: DEPTH,
            merging: blkyard_mq::Merging::Off,
            timeout_ns: 100 * MS,
            ..HwQueueConfig::default()
        };
        let queue = HwQueue::new(driver, Arc::new(info), config);
        World { wires, monitors, settings, queue, now_ns: MS, ended: Vec::new() }
    }

    pub fn submit(&mut self, op: Op, sector: u64, data: u64) {
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.sector, bio.sectors, bio.cookie) = (op, sector, 8, sector);
        bio.segments.push(Segment { region: 0, offset: data, len: 4096 });
        self.queue.submit(bio);
    }

    /// A round of the lane.
    pub fn turn(&mut self) {
        self.now_ns += 1000;
        self.queue.reap(&mut (), self.now_ns, &mut |bio| self.ended.push((bio.cookie, bio.status)));
        self.queue.issue(&mut (), self.now_ns);
    }

    /// Rounds, at each of the queue's deadlines, up to this time.
    pub fn run_until(&mut self, until_ns: u64) {
        while self.now_ns < until_ns {
            let due_ns = self.queue.deadline_ns::<()>().unwrap_or(until_ns);
            self.now_ns = due_ns.clamp(self.now_ns + 1, until_ns);
            self.turn();
        }
    }

    pub fn sectors(&self, path: usize) -> Vec<u64> {
        self.wires[path].borrow().sent.iter().map(|sent| sent.sector).collect()
    }

    pub fn answer(&mut self, path: usize, status: Status) {
        let mut wire = self.wires[path].borrow_mut();
        wire.answers = (0..wire.sent.len()).map(|at| (at, status)).collect();
        drop(wire);
        self.turn();
    }

    /// The connection of a path is lost: its driver gives all back, and takes nothing.
    pub fn lose(&mut self, path: usize, answered: bool) {
        let mut wire = self.wires[path].borrow_mut();
        (wire.refuses, wire.gives_back) = (true, Some(answered));
        drop(wire);
        self.set_state(path, LOST);
        self.turn();
    }

    pub fn restore(&mut self, path: usize) {
        self.wires[path].borrow_mut().refuses = false;
        self.set_state(path, PathState::default());
    }

    pub fn set_state(&self, path: usize, state: PathState) {
        if let Some(monitor) = &self.monitors[path] {
            monitor.set_state(state);
        }
    }

    pub fn fence(&self, path: usize, generation: u32) {
        self.monitors[path].as_ref().unwrap().fence(generation, FenceEvidence::AssociationEnded);
    }

    pub fn statuses(&mut self) -> Vec<Status> {
        self.ended.drain(..).map(|(_, status)| status).collect()
    }
}
