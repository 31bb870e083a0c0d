//! No request stays in a queue whose worker has left (A.28, property 11): pollers move between lanes in any order of
//! events, each bio ends once, and a lane keeps nothing of a poller that has left.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use blkyard_mq::{
    Batch, Bio, Cid, Cids, CpuUse, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, IdlePolicy, Lane, Op, Poller,
    PollerState, QueueLimits, Region, RegionTable, Segment, Status, Wake,
};
use proptest::prelude::*;

const POLLERS: usize = 4;
const LANES: usize = 3;

/// State shared by the pollers of a lane: a ring with room for a few requests, which end when the test says so.
#[derive(Debug, Default)]
struct SharedRing {
    /// Pollers that it knows.
    known: BTreeSet<usize>,
    with_device: Vec<(usize, Cid)>,
    arrived: BTreeMap<usize, VecDeque<Cid>>,
}

impl SharedRing {
    const ROOM: usize = 5;

    fn complete(&mut self, pick: usize) {
        if !self.with_device.is_empty() {
            let (poller, cid) = self.with_device.swap_remove(pick % self.with_device.len());
            self.arrived.entry(poller).or_default().push_back(cid);
        }
    }

    fn has_nothing_of(&self, poller: usize) -> bool {
        !self.known.contains(&poller)
            && self.with_device.iter().all(|(of, _)| *of != poller)
            && self.arrived.get(&poller).is_none_or(VecDeque::is_empty)
    }
}

/// One queue of a device that is reached through the shared it is on.
#[derive(Debug)]
struct SharedRingQueue {
    poller: usize,
    cids: Cids,
}

impl Driver<SharedRing> for SharedRingQueue {
    fn queue_rqs(&mut self, shared: &mut SharedRing, _memory: &RegionTable, batch: &mut Batch<'_>) {
        assert!(shared.known.contains(&self.poller), "requests on a lane that the queue did not enter");
        while shared.with_device.len() < SharedRing::ROOM
            && let Some((tag, ..)) = batch.take()
        {
            shared.with_device.push((self.poller, self.cids.park(tag)));
        }
    }

    fn poll(&mut self, shared: &mut SharedRing, _memory: &RegionTable, done: &mut Done<'_>, _now_ns: u64) {
        while let Some(cid) = shared.arrived.entry(self.poller).or_default().pop_front() {
            match self.cids.redeem(cid) {
                Ok(tag) => done.complete(tag, Status::Ok),
                Err(forged) => panic!("an answer to nothing: {forged:?}"),
            }
        }
    }

    fn set_memory(&mut self, shared: &mut SharedRing, memory: &RegionTable) {
        if memory.iter().next().is_some() {
            shared.known.insert(self.poller);
        } else {
            shared.known.remove(&self.poller);
        }
    }
}

/// A poller's submissions and completions, as seen from outside.
#[derive(Debug, Default)]
struct Outside {
    wanted: VecDeque<u64>,
    ended: Vec<u64>,
}

#[derive(Debug)]
struct Feeder {
    hw: HwQueue<SharedRingQueue>,
    memory: Arc<RegionTable>,
    outside: Rc<RefCell<Outside>>,
    leaving: bool,
}

impl Feeder {
    fn new(poller: usize) -> Feeder {
        // Small limits, so that a bio becomes several requests; fewer tags than those.
        let limits = QueueLimits { sectors_max: 8, ..QueueLimits::default() };
        let info = DeviceInfo { name: "shared".into(), capacity_sectors: 1 << 20, limits, ..DeviceInfo::default() };
        let config = HwQueueConfig { depth: 3, bios_max: 6, ..HwQueueConfig::default() };
        let hw = HwQueue::new(SharedRingQueue { poller, cids: Cids::new(3) }, Arc::new(info), config);
        let Ok(region) = Region::anonymous(1 << 16) else { panic!("no memory for the test") };
        let memory = Arc::new(RegionTable::new(vec![region]));
        Feeder { hw, memory, outside: Rc::default(), leaving: false }
    }
}

impl Poller<SharedRing> for Feeder {
    fn enter(&mut self, shared: &mut SharedRing, _waker: &Arc<dyn Wake>) {
        self.leaving = false;
        self.hw.set_memory(shared, Arc::clone(&self.memory));
    }

    fn leave(&mut self, shared: &mut SharedRing) -> bool {
        self.leaving = true;
        let at_rest = self.hw.is_idle();
        if at_rest {
            self.hw.set_memory(shared, Arc::default());
        }
        at_rest
    }

    fn stay(&mut self) {
        self.leaving = false;
    }

    fn run_once(&mut self, shared: &mut SharedRing, now_ns: u64) -> PollerState {
        let mut outside = self.outside.borrow_mut();
        let mut moved = self.hw.reap(shared, now_ns, &mut |bio| {
            assert_eq!(bio.status, Status::Ok);
            outside.ended.push(bio.cookie);
        });
        while !self.leaving
            && self.hw.room() > 0
            && let Some(cookie) = outside.wanted.pop_front()
        {
            let mut bio = Bio::with_capacity(1);
            (bio.op, bio.cookie, bio.sector, bio.sectors) =
                (Op::Write, cookie, cookie * 32, 1 + (cookie as u32 % 4) * 8);
            bio.segments.push(Segment { region: 0, offset: 0, len: bio.sectors * 512 });
            self.hw.submit(bio);
            moved += 1;
        }
        moved += self.hw.issue(shared, now_ns);
        if moved > 0 { PollerState::Busy } else { PollerState::Waiting }
    }

    fn arm(&mut self) -> bool {
        false
    }
    fn disarm(&mut self) {}
    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn is_over(&self) -> bool {
        false
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The outside wants so many more of a poller.
    Want(usize, u64),
    Turn(usize),
    /// Completes one of the requests of a lane's device.
    Complete(usize, usize),
    /// A poller is to live on another lane.
    Leave(usize, usize),
    Stay(usize),
    /// The pollers that are between two lanes arrive.
    Arrive,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        2 => (0..POLLERS, 1_u64..5).prop_map(|(poller, count)| Event::Want(poller, count)),
        4 => (0..LANES).prop_map(Event::Turn),
        4 => (0..LANES, 0_usize..64).prop_map(|(lane, pick)| Event::Complete(lane, pick)),
        2 => (0..POLLERS, 0..LANES).prop_map(|(poller, lane)| Event::Leave(poller, lane)),
        1 => (0..POLLERS).prop_map(Event::Stay),
        1 => Just(Event::Arrive),
    ];
    proptest::collection::vec(event, 0..400)
}

struct Nobody;

impl Wake for Nobody {
    fn wake(&self) {}
}

struct World {
    lanes: Vec<(Lane<Feeder>, SharedRing)>,
    waker: Arc<dyn Wake>,
    outside: Vec<Rc<RefCell<Outside>>>,
    /// Where each poller is to live.
    target: [usize; POLLERS],
    /// Between two lanes.
    carried: Vec<(usize, Feeder)>,
    wanted: [u64; POLLERS],
    now_ns: u64,
}

impl World {
    fn new() -> World {
        let lanes =
            (0..LANES).map(|_| (Lane::new(IdlePolicy::default(), CpuUse::default), SharedRing::default())).collect();
        let pollers: Vec<_> = (0..POLLERS).map(|poller| (poller, Feeder::new(poller))).collect();
        let outside = pollers.iter().map(|(_, feeder)| Rc::clone(&feeder.outside)).collect();
        let mut world = World {
            lanes,
            waker: Arc::new(Nobody),
            outside,
            target: [0; POLLERS],
            carried: pollers,
            wanted: [0; POLLERS],
            now_ns: 0,
        };
        world.arrive();
        world
    }

    fn arrive(&mut self) {
        for (poller, feeder) in self.carried.drain(..) {
            let (lane, shared) = &mut self.lanes[self.target[poller]];
            lane.admit(shared, &self.waker, poller as u32, feeder);
        }
    }

    fn turn(&mut self, number: usize) {
        // Every few turns an idle poller is parked.
        self.now_ns += 20_000;
        let (lane, shared) = &mut self.lanes[number];
        lane.turn(shared, self.now_ns);
        while let Some((_, poller, feeder)) = lane.part(shared) {
            let poller = poller as usize;
            assert!(shared.has_nothing_of(poller), "lane {number} has something of poller {poller}, which left");
            self.carried.push((poller, feeder));
        }
    }

    /// Asks a poller to leave its current lane, if any.
    fn leave(&mut self, poller: usize) -> bool {
        self.lanes.iter_mut().any(|(lane, _)| lane.ask_to_leave::<SharedRing>(poller as u32))
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Want(poller, count) => {
                let from = self.wanted[poller];
                self.wanted[poller] += count;
                self.outside[poller].borrow_mut().wanted.extend(from..from + count);
                // As an eventfd would.
                self.lanes.iter_mut().for_each(|(lane, _)| lane.unpark_all::<SharedRing>());
            }
            Event::Turn(lane) => self.turn(lane),
            Event::Complete(lane, pick) => self.lanes[lane].1.complete(pick),
            Event::Leave(poller, lane) => {
                if self.leave(poller) {
                    self.target[poller] = lane;
                }
            }
            Event::Stay(poller) => {
                self.lanes.iter_mut().for_each(|(lane, _)| lane.ask_to_stay::<SharedRing>(poller as u32));
            }
            Event::Arrive => self.arrive(),
        }
    }

    /// Continues without new submissions until all is idle.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            self.arrive();
            (0..LANES).for_each(|lane| self.turn(lane));
            self.lanes.iter_mut().for_each(|(_, shared)| shared.complete(0));
            let ended = |poller: usize| self.outside[poller].borrow().ended.len() as u64 == self.wanted[poller];
            if self.carried.is_empty() && (0..POLLERS).all(ended) {
                return;
            }
        }
        panic!("something does not end: {:?}", self.outside);
    }
}

proptest! {
    #[test]
    fn each_bio_ends_once_and_nothing_stays_behind_however_pollers_move(events in events()) {
        let mut world = World::new();
        events.into_iter().for_each(|event| world.happen(event));
        world.settle();
        for (poller, outside) in world.outside.iter().enumerate() {
            let mut ended = outside.borrow().ended.clone();
            ended.sort_unstable();
            prop_assert_eq!(ended, (0..world.wanted[poller]).collect::<Vec<_>>());
        }
        // The workers go: all they had is with the pollers.
        for poller in 0..POLLERS {
            world.leave(poller);
        }
        (0..LANES).for_each(|lane| world.turn(lane));
        prop_assert_eq!(world.carried.len(), POLLERS);
        prop_assert!(world.lanes.iter().all(|(lane, shared)| lane.pollers().count() == 0 && shared.known.is_empty()));
    }
}
