//! Drivers whose device signals an eventfd: sleepers wake by it, on a lane and on a shared queue, long before their
//! next scan.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blkyard_mq::{
    Batch, Bio, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, IdlePolicy, Op, Parker, Poller, PollerState,
    QueueLimits, RegionTable, Status, SwQueue, Tag,
};
use blkyard_os::{LaneConfig, Ring, RingConfig, RingParker, now_ns, spawn};
use blkyard_sys::EventFd;

/// I/Os one after another. Without the eventfd a thread polls once a second, and takes minutes.
const ROUNDS: u64 = 200;
const LIMIT: Duration = Duration::from_mins(1);

/// State shared by device and driver.
struct Wire {
    finished: Mutex<Vec<usize>>,
    armed: AtomicBool,
    eventfd: EventFd,
}

/// A device with one thread: completes its requests, and signals if armed.
struct DoorbellDriver {
    wire: Arc<Wire>,
    work: Sender<usize>,
    tags: Vec<Option<Tag>>,
}

impl DoorbellDriver {
    fn new(depth: usize) -> DoorbellDriver {
        let eventfd = EventFd::new().unwrap();
        let wire = Arc::new(Wire { finished: Mutex::default(), armed: AtomicBool::new(false), eventfd });
        let (work, wanted) = channel();
        let device = Arc::clone(&wire);
        std::thread::spawn(move || serve(&device, &wanted));
        DoorbellDriver { wire, work, tags: (0..depth).map(|_| None).collect() }
    }
}

fn serve(wire: &Wire, wanted: &Receiver<usize>) {
    while let Ok(place) = wanted.recv() {
        // Long enough for the other side to fall asleep now and then, in any order.
        std::thread::sleep(Duration::from_micros(50 * (place as u64 % 5)));
        wire.finished.lock().unwrap().push(place);
        if wire.armed.swap(false, Ordering::SeqCst) {
            wire.eventfd.signal();
        }
    }
}

impl<Cx: ?Sized> Driver<Cx> for DoorbellDriver {
    fn queue_rqs(&mut self, _: &mut Cx, _: &RegionTable, batch: &mut Batch<'_>) {
        while let Some((tag, _, _)) = batch.take() {
            let place = tag.index();
            self.tags[place] = Some(tag);
            self.work.send(place).unwrap();
        }
    }

    fn poll(&mut self, _: &mut Cx, _: &RegionTable, done: &mut Done<'_>, _: u64) {
        for place in self.wire.finished.lock().unwrap().drain(..) {
            done.complete(self.tags[place].take().unwrap(), Status::Ok);
        }
    }

    fn arm(&mut self) -> bool {
        self.wire.armed.store(true, Ordering::SeqCst);
        !self.wire.finished.lock().unwrap().is_empty()
    }

    fn disarm(&mut self) {
        self.wire.armed.store(false, Ordering::SeqCst);
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wire.eventfd.as_fd())
    }
}

fn queue(depth: usize) -> HwQueue<DoorbellDriver> {
    let limits = QueueLimits { discard_sectors_max: 1024, ..QueueLimits::default() };
    let info = DeviceInfo { name: "eventfd-driver".into(), capacity_sectors: 1 << 20, limits, ..DeviceInfo::default() };
    HwQueue::new(
        DoorbellDriver::new(depth),
        Arc::new(info),
        HwQueueConfig { depth, bios_max: 64, ..Default::default() },
    )
}

/// An I/O without data.
fn submission(sector: u64) -> Box<Bio> {
    let mut bio = Bio::with_capacity(0);
    (bio.op, bio.sector, bio.sectors) = (Op::Discard, sector, 8);
    bio
}

/// Does one I/O after another.
struct OneByOne {
    queue: HwQueue<DoorbellDriver>,
    left: u64,
}

impl Poller<Ring> for OneByOne {
    fn run_once(&mut self, ring: &mut Ring, now_ns: u64) -> PollerState {
        let mut moved = self.queue.reap(ring, now_ns, &mut |bio| assert_eq!(bio.status, Status::Ok));
        if self.queue.is_idle() && self.left > 0 {
            self.left -= 1;
            self.queue.submit(submission(self.left * 8));
            moved += 1;
        }
        moved += self.queue.issue(ring, now_ns);
        if moved > 0 { PollerState::Busy } else { PollerState::Waiting }
    }

    fn arm(&mut self) -> bool {
        self.queue.arm::<Ring>()
    }

    fn disarm(&mut self) {
        self.queue.disarm::<Ring>();
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn device_eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.eventfd::<Ring>()
    }

    fn is_over(&self) -> bool {
        self.left == 0 && self.queue.is_idle()
    }
}

#[test]
fn a_lane_that_sleeps_is_woken_by_the_eventfd_of_a_device() {
    let start = Instant::now();
    let policy = IdlePolicy::up_to(0);
    let config = LaneConfig { name: "eventfd-driver".into(), policy, ..LaneConfig::default() };
    let pollers = |_: &mut Ring| (0..3).map(|_| OneByOne { queue: queue(4), left: ROUNDS }).collect();
    spawn(config, pollers).unwrap().join().unwrap();
    assert!(start.elapsed() < LIMIT, "{:?} for {ROUNDS} I/Os", start.elapsed());
}

#[test]
fn threads_that_share_a_queue_are_woken_by_the_eventfd_of_its_device() {
    const THREADS: usize = 3;
    let start = Instant::now();
    let ring = Ring::new(RingConfig { single_owner: false, ..RingConfig::default() }).unwrap();
    let parkers: Vec<Arc<dyn Parker>> =
        (0..THREADS).map(|_| RingParker::new(&ring).unwrap() as Arc<dyn Parker>).collect();
    let queues = SwQueue::share(queue(8), ring, 8, parkers);
    let all_done = std::sync::Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for mut queue in queues {
            let all_done = &all_done;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    queue.submit(submission(round * 8));
                    let mut ended = 0;
                    queue.wait(&now_ns, &mut |bio| {
                        assert_eq!(bio.status, Status::Ok);
                        ended += 1;
                    });
                    assert_eq!(ended, 1);
                }
                queue.leave(&now_ns, &mut |_| ());
                all_done.wait();
            });
        }
    });
    assert!(start.elapsed() < LIMIT, "{:?} for {ROUNDS} I/Os of each thread", start.elapsed());
}
