//! No request stays in a queue whose worker is gone (A.28, property 11): stations move between lanes in any order of
//! events, each bio ends once, and a lane that a station has left has nothing of it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use blkyard_mq::{
    Batch, Bio, Cid, Cids, Crank, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, IdlePolicy, Lane, Op, QueueLimits,
    Region, RegionTable, Segment, Station, Status, Wake,
};
use proptest::prelude::*;

const STATIONS: usize = 4;
const LANES: usize = 3;

/// What the stations of a lane share: a ring with room for a few requests, which end when the test says so.
#[derive(Debug, Default)]
struct Yard {
    /// Stations that it knows.
    known: BTreeSet<usize>,
    with_device: Vec<(usize, Cid)>,
    arrived: BTreeMap<usize, VecDeque<Cid>>,
}

impl Yard {
    const ROOM: usize = 5;

    fn complete(&mut self, pick: usize) {
        if !self.with_device.is_empty() {
            let (station, cid) = self.with_device.swap_remove(pick % self.with_device.len());
            self.arrived.entry(station).or_default().push_back(cid);
        }
    }

    fn has_nothing_of(&self, station: usize) -> bool {
        !self.known.contains(&station)
            && self.with_device.iter().all(|(of, _)| *of != station)
            && self.arrived.get(&station).is_none_or(VecDeque::is_empty)
    }
}

/// One queue of a device that is reached through the yard it is on.
#[derive(Debug)]
struct YardQueue {
    station: usize,
    cids: Cids,
}

impl Driver<Yard> for YardQueue {
    fn queue_rqs(&mut self, yard: &mut Yard, _memory: &RegionTable, batch: &mut Batch<'_>) {
        assert!(yard.known.contains(&self.station), "requests on a lane that the queue did not enter");
        while yard.with_device.len() < Yard::ROOM
            && let Some((tag, ..)) = batch.take()
        {
            yard.with_device.push((self.station, self.cids.park(tag)));
        }
    }

    fn poll(&mut self, yard: &mut Yard, _memory: &RegionTable, done: &mut Done<'_>, _now_ns: u64) {
        while let Some(cid) = yard.arrived.entry(self.station).or_default().pop_front() {
            match self.cids.redeem(cid) {
                Ok(tag) => done.complete(tag, Status::Ok),
                Err(forged) => panic!("an answer to nothing: {forged:?}"),
            }
        }
    }

    fn set_memory(&mut self, yard: &mut Yard, memory: &RegionTable) {
        if memory.iter().next().is_some() {
            yard.known.insert(self.station);
        } else {
            yard.known.remove(&self.station);
        }
    }
}

/// What the outside has of a station: what it wants, and what it got.
#[derive(Debug, Default)]
struct Outside {
    wanted: VecDeque<u64>,
    ended: Vec<u64>,
}

#[derive(Debug)]
struct Feeder {
    hw: HwQueue<YardQueue>,
    memory: Arc<RegionTable>,
    outside: Rc<RefCell<Outside>>,
    leaving: bool,
}

impl Feeder {
    fn new(station: usize) -> Feeder {
        // Small limits, so that a bio becomes several requests; fewer tags than those.
        let limits = QueueLimits { sectors_max: 8, ..QueueLimits::default() };
        let info = DeviceInfo { name: "yard".into(), capacity_sectors: 1 << 20, limits, ..DeviceInfo::default() };
        let config = HwQueueConfig { depth: 3, bios_max: 6, ..HwQueueConfig::default() };
        let hw = HwQueue::new(YardQueue { station, cids: Cids::new(3) }, Arc::new(info), config);
        let Ok(region) = Region::anonymous(1 << 16) else { panic!("no memory for the test") };
        let memory = Arc::new(RegionTable::new(vec![region]));
        Feeder { hw, memory, outside: Rc::default(), leaving: false }
    }
}

impl Station<Yard> for Feeder {
    fn enter(&mut self, yard: &mut Yard, _waker: &Arc<dyn Wake>) {
        self.leaving = false;
        self.hw.set_memory(yard, Arc::clone(&self.memory));
    }

    fn leave(&mut self, yard: &mut Yard) -> bool {
        self.leaving = true;
        let at_rest = self.hw.is_idle();
        if at_rest {
            self.hw.set_memory(yard, Arc::default());
        }
        at_rest
    }

    fn stay(&mut self) {
        self.leaving = false;
    }

    fn crank(&mut self, yard: &mut Yard, now_ns: u64) -> Crank {
        let mut outside = self.outside.borrow_mut();
        let mut moved = self.hw.reap(yard, now_ns, &mut |bio| {
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
        moved += self.hw.issue(yard, now_ns);
        if moved > 0 { Crank::Busy } else { Crank::Waiting }
    }

    fn arm(&mut self) -> bool {
        false
    }
    fn disarm(&mut self) {}
    fn bell(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn is_over(&self) -> bool {
        false
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The outside wants so many more of a station.
    Want(usize, u64),
    Turn(usize),
    /// One of the requests that a lane's device has is over.
    Complete(usize, usize),
    /// A station is to live on another lane.
    Leave(usize, usize),
    Stay(usize),
    /// The stations that are between two lanes arrive.
    Arrive,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        2 => (0..STATIONS, 1_u64..5).prop_map(|(station, count)| Event::Want(station, count)),
        4 => (0..LANES).prop_map(Event::Turn),
        4 => (0..LANES, 0_usize..64).prop_map(|(lane, pick)| Event::Complete(lane, pick)),
        2 => (0..STATIONS, 0..LANES).prop_map(|(station, lane)| Event::Leave(station, lane)),
        1 => (0..STATIONS).prop_map(Event::Stay),
        1 => Just(Event::Arrive),
    ];
    proptest::collection::vec(event, 0..400)
}

struct Nobody;

impl Wake for Nobody {
    fn wake(&self) {}
}

struct World {
    lanes: Vec<(Lane<Feeder>, Yard)>,
    waker: Arc<dyn Wake>,
    outside: Vec<Rc<RefCell<Outside>>>,
    /// Where each station is to live.
    target: [usize; STATIONS],
    /// Between two lanes.
    carried: Vec<(usize, Feeder)>,
    wanted: [u64; STATIONS],
    now_ns: u64,
}

impl World {
    fn new() -> World {
        let lanes = (0..LANES).map(|_| (Lane::new(IdlePolicy::default()), Yard::default())).collect();
        let stations: Vec<_> = (0..STATIONS).map(|station| (station, Feeder::new(station))).collect();
        let outside = stations.iter().map(|(_, feeder)| Rc::clone(&feeder.outside)).collect();
        let mut world = World {
            lanes,
            waker: Arc::new(Nobody),
            outside,
            target: [0; STATIONS],
            carried: stations,
            wanted: [0; STATIONS],
            now_ns: 0,
        };
        world.arrive();
        world
    }

    fn arrive(&mut self) {
        for (station, feeder) in self.carried.drain(..) {
            let (lane, yard) = &mut self.lanes[self.target[station]];
            lane.admit(yard, &self.waker, station as u32, feeder);
        }
    }

    fn turn(&mut self, number: usize) {
        self.now_ns += 1000;
        let (lane, yard) = &mut self.lanes[number];
        lane.turn(yard, self.now_ns);
        while let Some((station, feeder)) = lane.part(yard) {
            let station = station as usize;
            assert!(yard.has_nothing_of(station), "lane {number} has something of station {station}, which left");
            self.carried.push((station, feeder));
        }
    }

    /// Asks a station to leave whatever lane it is on, if it is on any.
    fn leave(&mut self, station: usize) -> bool {
        self.lanes.iter_mut().any(|(lane, _)| lane.ask_to_leave(station as u32))
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Want(station, count) => {
                let from = self.wanted[station];
                self.wanted[station] += count;
                self.outside[station].borrow_mut().wanted.extend(from..from + count);
            }
            Event::Turn(lane) => self.turn(lane),
            Event::Complete(lane, pick) => self.lanes[lane].1.complete(pick),
            Event::Leave(station, lane) => {
                if self.leave(station) {
                    self.target[station] = lane;
                }
            }
            Event::Stay(station) => {
                self.lanes.iter_mut().for_each(|(lane, _)| lane.ask_to_stay::<Yard>(station as u32));
            }
            Event::Arrive => self.arrive(),
        }
    }

    /// Goes on without new wishes until nothing moves any more.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            self.arrive();
            (0..LANES).for_each(|lane| self.turn(lane));
            self.lanes.iter_mut().for_each(|(_, yard)| yard.complete(0));
            let ended = |station: usize| self.outside[station].borrow().ended.len() as u64 == self.wanted[station];
            if self.carried.is_empty() && (0..STATIONS).all(ended) {
                return;
            }
        }
        panic!("something does not end: {:?}", self.outside);
    }
}

proptest! {
    #[test]
    fn each_bio_ends_once_and_nothing_stays_behind_however_stations_move(events in events()) {
        let mut world = World::new();
        events.into_iter().for_each(|event| world.happen(event));
        world.settle();
        for (station, outside) in world.outside.iter().enumerate() {
            let mut ended = outside.borrow().ended.clone();
            ended.sort_unstable();
            prop_assert_eq!(ended, (0..world.wanted[station]).collect::<Vec<_>>());
        }
        // The workers go: all they had is with the stations.
        for station in 0..STATIONS {
            world.leave(station);
        }
        (0..LANES).for_each(|lane| world.turn(lane));
        prop_assert_eq!(world.carried.len(), STATIONS);
        prop_assert!(world.lanes.iter().all(|(lane, yard)| lane.stations().count() == 0 && yard.known.is_empty()));
    }
}
