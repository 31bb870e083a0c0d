//! A shared queue step by step, with a chosen order of events: one doorbell covers all requests, turns are fair, and a
//! sleeper's watch follows the deadlines.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use blkyard_mq::{
    Batch, Bio, BlockDevice, Context, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, Merging, NullConfig,
    NullDevice, Op, Parker, QueueLimits, RegionTable, Status, SwQueue, Tag, Wake,
};

use crate::common::TimedParker;

fn info() -> DeviceInfo {
    let limits = QueueLimits { discard_sectors_max: 1 << 20, ..QueueLimits::default() };
    DeviceInfo {
        name: "test".into(),
        capacity_sectors: 1 << 40,
        limits,
        read_only: false,
        volatile_cache: false,
        fua: false,
        ..DeviceInfo::default()
    }
}

fn share<D: Driver<Cx>, Cx: Context>(
    driver: D,
    cx: Cx,
    config: HwQueueConfig,
    places: usize,
    threads: usize,
) -> Vec<SwQueue<D, Cx>> {
    let parkers = (0..threads).map(|_| TimedParker::new() as Arc<dyn Parker>).collect();
    SwQueue::share(HwQueue::new(driver, Arc::new(info()), config), cx, places, parkers)
}

/// A bio without data; the drivers here use its sector only.
fn bio(sector: u64) -> Box<Bio> {
    let mut bio = Bio::with_capacity(0);
    bio.op = Op::Discard;
    bio.sector = sector;
    bio.sectors = 1;
    bio.cookie = !sector;
    bio
}

#[test]
fn one_ring_gets_everything_through_a_small_queue() {
    let device = NullDevice::new(info(), NullConfig::default());
    let config = HwQueueConfig { depth: 1, bios_max: 2, ..HwQueueConfig::default() };
    let mut queue = share(device.queue(1), (), config, 8, 1).remove(0);
    (0..8).for_each(|sector| queue.submit(bio(sector)));
    assert_eq!((queue.room(), queue.in_flight()), (0, 8));
    queue.ring(&|| 5);
    let mut ended = Vec::new();
    // The clock is not read: no work is left.
    assert_eq!(queue.poll(&|| panic!("run once more"), &mut |bio| ended.push((bio.sector, !bio.cookie))), 8);
    assert_eq!(ended, (0..8).map(|sector| (sector, sector)).collect::<Vec<_>>());
    assert_eq!((queue.poll(&|| 6, &mut |_| ()), queue.wait(&|| 6, &mut |_| ())), (0, 0));
}

/// Answers on the spot, and does something besides once it sees a bio of sector zero.
struct Hooked {
    hook: Option<Box<dyn FnOnce() + Send>>,
    order: Arc<Mutex<Vec<u64>>>,
}

impl Driver<()> for Hooked {
    fn queue_rqs(&mut self, (): &mut (), _: &RegionTable, batch: &mut Batch<'_>) {
        let mut sees_zero = false;
        while let Some((tag, request, _)) = batch.take() {
            sees_zero |= request.sector() == 0;
            self.order.lock().unwrap().push(request.sector());
            batch.complete(tag, Status::Ok);
        }
        if sees_zero && let Some(hook) = self.hook.take() {
            hook();
        }
    }

    fn poll(&mut self, (): &mut (), _: &RegionTable, _: &mut Done<'_>, _: u64) {}
}

#[test]
fn a_burst_of_one_does_not_keep_out_the_others() {
    let order = Arc::new(Mutex::new(Vec::new()));
    let late: Arc<Mutex<Option<SwQueue<Hooked, ()>>>> = Arc::default();
    let hook = {
        let late = Arc::clone(&late);
        move || {
            let mut late = late.lock().unwrap();
            let late = late.as_mut().unwrap();
            late.submit(bio(1000));
            // The queue is owned: this sets the pending bit and returns, without reading the clock.
            late.ring(&|| panic!("the queue had two owners"));
        }
    };
    let driver = Hooked { hook: Some(Box::new(hook)), order: Arc::clone(&order) };
    // Sectors in a row would share requests.
    let config = HwQueueConfig { merging: Merging::Off, ..HwQueueConfig::default() };
    let mut ends = share(driver, (), config, 200, 2);
    *late.lock().unwrap() = ends.pop();
    let mut early = ends.remove(0);
    (0..200).for_each(|sector| early.submit(bio(sector)));
    early.ring(&|| 5);
    let place = order.lock().unwrap().iter().position(|sector| *sector == 1000).unwrap();
    assert_eq!(order.lock().unwrap().len(), 201, "the owner went on until all was done");
    assert!((32..=64).contains(&place), "was served at place {place}, and came when 32 had been");
    let mut ended = 0;
    early.leave(&|| 6, &mut |_| ended += 1);
    let mut late = late.lock().unwrap().take().unwrap();
    assert_eq!((ended, late.poll(&|| 6, &mut |_| ())), (200, 1));
}

#[test]
fn under_pressure_rings_are_served_in_turn() {
    type Ends = Vec<SwQueue<Hooked, ()>>;
    let order = Arc::new(Mutex::new(Vec::new()));
    let others: Arc<Mutex<Ends>> = Arc::default();
    let hook = {
        let others = Arc::clone(&others);
        move || {
            for (end, base) in others.lock().unwrap().iter_mut().zip([100, 200]) {
                (0..4).for_each(|sector| end.submit(bio(base + sector)));
                end.ring(&|| panic!("the queue had two owners"));
            }
        }
    };
    let driver = Hooked { hook: Some(Box::new(hook)), order: Arc::clone(&order) };
    // One bio at a time: each is a new decision whom to serve.
    let config = HwQueueConfig { depth: 1, bios_max: 1, ..HwQueueConfig::default() };
    let mut ends = share(driver, (), config, 4, 3);
    *others.lock().unwrap() = ends.split_off(1);
    let mut first = ends.remove(0);
    (0..4).for_each(|sector| first.submit(bio(sector)));
    first.ring(&|| 5);
    assert_eq!(*order.lock().unwrap(), [0, 100, 200, 1, 101, 201, 2, 102, 202, 3, 103, 203]);
    first.leave(&|| 6, &mut |_| ());
    others.lock().unwrap().drain(..).for_each(|end| end.leave(&|| 6, &mut |_| ()));
}

/// A request takes as many milliseconds as its sector says.
#[derive(Default)]
struct Timed {
    due: VecDeque<(u64, Tag)>,
    ended: Arc<Mutex<Vec<(u64, u64)>>>,
}

impl Driver<()> for Timed {
    fn queue_rqs(&mut self, (): &mut (), _: &RegionTable, batch: &mut Batch<'_>) {
        let now_ns = batch.now_ns();
        while let Some((tag, request, _)) = batch.take() {
            let due_ns = now_ns + request.sector() * 1_000_000;
            self.due.push_back((due_ns, tag));
        }
        self.due.make_contiguous().sort_by_key(|(due_ns, _)| *due_ns);
    }

    fn poll(&mut self, (): &mut (), _: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        while self.due.front().is_some_and(|(due_ns, _)| *due_ns <= now_ns) {
            let (_, tag) = self.due.pop_front().unwrap();
            self.ended.lock().unwrap().push((done.request(&tag).0.sector(), now_ns));
            done.complete(tag, Status::Ok);
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.due.front().map(|(due_ns, _)| *due_ns)
    }
}

/// Sleeps in a time of its own: the watching thread wakes at the deadline, or by the first event's call.
struct TimeParker {
    now_ns: Arc<AtomicU64>,
    /// Deadlines of the watching threads.
    watched: Arc<Mutex<Vec<u64>>>,
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    woken: AtomicBool,
}

impl Wake for TimeParker {
    fn wake(&self) {
        self.woken.store(true, Relaxed);
    }
}

impl Parker for TimeParker {
    fn sleep(&self) {
        panic!("it alone sleeps, and so keeps watch");
    }

    fn watch(&self, deadline_ns: u64) {
        self.watched.lock().unwrap().push(deadline_ns);
        let meanwhile = self.meanwhile.lock().unwrap().take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        if !self.woken.swap(false, Relaxed) {
            self.now_ns.fetch_max(deadline_ns, Relaxed);
        }
    }
}

#[test]
fn whoever_keeps_watch_is_told_of_an_earlier_deadline() {
    const MS: u64 = 1_000_000;
    let driver = Timed::default();
    let ended = Arc::clone(&driver.ended);
    let now_ns = Arc::new(AtomicU64::new(MS));
    let watched = Arc::new(Mutex::new(Vec::new()));
    let parker = Arc::new(TimeParker {
        now_ns: Arc::clone(&now_ns),
        watched: Arc::clone(&watched),
        meanwhile: Mutex::new(None),
        woken: AtomicBool::new(false),
    });
    let parkers = vec![Arc::clone(&parker) as Arc<dyn Parker>, TimedParker::new()];
    let mut ends = SwQueue::share(HwQueue::new(driver, Arc::new(info()), HwQueueConfig::default()), (), 2, parkers);
    let (mut fast, mut slow) = (ends.pop().unwrap(), ends.pop().unwrap());
    let (left, begun_ns) = (Arc::new(Mutex::new(None)), Arc::clone(&now_ns));
    let left_by = Arc::clone(&left);
    // Dispatched while the other thread watches; then its submitter does other work.
    *parker.meanwhile.lock().unwrap() = Some(Box::new(move || {
        fast.submit(bio(10));
        fast.ring(&|| begun_ns.fetch_add(MS, Relaxed));
        *left_by.lock().unwrap() = Some(fast);
    }));
    slow.submit(bio(700));
    assert_eq!(slow.wait(&|| now_ns.load(Relaxed), &mut |_| ()), 1);
    let (ended, watched) = (ended.lock().unwrap().clone(), watched.lock().unwrap().clone());
    let due_ns: Vec<_> = ended.iter().map(|(sector, _)| MS + sector * MS).collect();
    assert_eq!(ended.iter().map(|(sector, _)| *sector).collect::<Vec<_>>(), [10, 700]);
    assert_eq!(ended.iter().map(|(_, at_ns)| *at_ns).collect::<Vec<_>>(), due_ns, "each is seen when it is due");
    assert_eq!(watched, [due_ns[1], due_ns[0], due_ns[1]]);
    let mut fast = left.lock().unwrap().take().unwrap();
    assert_eq!(fast.poll(&|| now_ns.load(Relaxed), &mut |_| ()), 1);
}

/// Completes all its requests when told to, and has no deadline.
#[derive(Default)]
struct Silent {
    held: Vec<Tag>,
    done: Arc<AtomicBool>,
}

impl Driver<()> for Silent {
    fn queue_rqs(&mut self, (): &mut (), _: &RegionTable, batch: &mut Batch<'_>) {
        while let Some((tag, ..)) = batch.take() {
            self.held.push(tag);
        }
    }

    fn poll(&mut self, (): &mut (), _: &RegionTable, done: &mut Done<'_>, _: u64) {
        if self.done.load(Relaxed) {
            self.held.drain(..).for_each(|tag| done.complete(tag, Status::Ok));
        }
    }
}

/// Does something instead of keeping watch, and must have been woken by then.
struct HookedParker {
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    woken: AtomicBool,
}

impl Wake for HookedParker {
    fn wake(&self) {
        self.woken.store(true, Relaxed);
    }
}

impl Parker for HookedParker {
    fn sleep(&self) {
        panic!("it alone sleeps, and so keeps watch");
    }

    fn watch(&self, _deadline_ns: u64) {
        let meanwhile = self.meanwhile.lock().unwrap().take().expect("there is nothing more to wait for");
        meanwhile();
        assert!(self.woken.load(Relaxed), "it would sleep until the deadline, with its bio in its ring");
    }
}

#[test]
fn whoever_keeps_watch_is_called_when_another_brings_what_it_waits_for() {
    let driver = Silent::default();
    let done = Arc::clone(&driver.done);
    let parker = Arc::new(HookedParker { meanwhile: Mutex::new(None), woken: AtomicBool::new(false) });
    let parkers = vec![Arc::clone(&parker) as Arc<dyn Parker>, TimedParker::new()];
    let hw = HwQueue::new(driver, Arc::new(info()), HwQueueConfig::default());
    let mut ends = SwQueue::share(hw, (), 2, parkers);
    let (mut other, mut sleeper) = (ends.pop().unwrap(), ends.pop().unwrap());
    *parker.meanwhile.lock().unwrap() = Some(Box::new(move || {
        done.store(true, Relaxed);
        other.submit(bio(1000));
        other.ring(&|| 6);
        assert_eq!(other.poll(&|| 7, &mut |_| ()), 1);
    }));
    sleeper.submit(bio(0));
    assert_eq!(sleeper.wait(&|| 5, &mut |_| ()), 1);
}

#[test]
fn what_did_not_fit_goes_before_what_is_submitted_after_it() {
    let driver = Timed::default();
    let ended = Arc::clone(&driver.ended);
    let config = HwQueueConfig { depth: 1, bios_max: 1, ..HwQueueConfig::default() };
    let mut queue = share(driver, (), config, 4, 1).remove(0);
    (0..3).for_each(|step| queue.submit(bio(9 - step)));
    queue.ring(&|| 0);
    queue.submit(bio(6));
    queue.ring(&|| 0);
    let time = Cell::new(0);
    let clock = || time.replace(time.get() + 1_000_000);
    let mut came = Vec::new();
    while queue.in_flight() > 0 {
        queue.poll(&clock, &mut |bio| came.push(bio.sector));
    }
    // One at a time, each faster than the one before.
    assert_eq!(came, [9, 8, 7, 6]);
    assert_eq!(ended.lock().unwrap().iter().map(|(sector, _)| *sector).collect::<Vec<_>>(), came);
}

/// How often a thread that finds the queue owned reads its clock, which moves by a microsecond each time, before it
/// leaves word: it comes with so many bios, so long after it was there, and so often one time after the other.
fn reads_before_word_is_left(bios: u64, away_ns: u64, times: u64) -> u64 {
    let time = Arc::new(AtomicU64::new(1_000_000));
    let late: Arc<Mutex<Option<SwQueue<Hooked, ()>>>> = Arc::default();
    let reads = Arc::new(AtomicU64::new(0));
    let hook = {
        let (late, time, reads) = (Arc::clone(&late), Arc::clone(&time), Arc::clone(&reads));
        move || {
            let mut late = late.lock().unwrap();
            let late = late.as_mut().unwrap();
            time.fetch_add(away_ns, Relaxed);
            for _ in 0..times {
                (0..bios).for_each(|sector| late.submit(bio(1000 + 2 * sector)));
                let before = time.load(Relaxed);
                late.ring(&|| time.fetch_add(1000, Relaxed));
                reads.store((time.load(Relaxed) - before) / 1000, Relaxed);
            }
        }
    };
    let driver = Hooked { hook: Some(Box::new(hook)), order: Arc::default() };
    let mut ends = share(driver, (), HwQueueConfig::default(), 64, 2);
    let mut second = ends.pop().unwrap();
    second.submit(bio(1));
    second.ring(&|| time.load(Relaxed));
    assert_eq!(second.poll(&|| 0, &mut |_| ()), 1);
    *late.lock().unwrap() = Some(second);
    let mut first = ends.remove(0);
    first.submit(bio(0));
    first.ring(&|| time.load(Relaxed));
    first.leave(&|| 0, &mut |_| ());
    let mut second = late.lock().unwrap().take().unwrap();
    assert_eq!(second.poll(&|| panic!("the owner did not serve it"), &mut |_| ()) as u64, times * bios);
    reads.load(Relaxed)
}

#[test]
fn who_is_back_at_once_with_a_batch_lets_the_other_stay() {
    assert_eq!(reads_before_word_is_left(8, 0, 1), 0, "a few bios are carried over");
    assert_eq!(reads_before_word_is_left(32, 500_000, 1), 1, "who was elsewhere meanwhile is kept waiting by nobody");
    let reads = reads_before_word_is_left(32, 0, 1);
    assert!((64..=70).contains(&reads), "a stay is some microseconds, and here it took {reads}");
    let reads = reads_before_word_is_left(32, 500_000, 2);
    assert!((64..=70).contains(&reads), "who left word a moment ago is back as well, and here it took {reads}");
}

/// Counts an owner's calls for its drivers' shared state.
#[derive(Default)]
struct Counted {
    committed: Arc<Mutex<(u32, u32)>>,
}

impl Context for Counted {
    fn commit(&mut self) {
        self.committed.lock().unwrap().0 += 1;
    }

    fn collect(&mut self) {
        self.committed.lock().unwrap().1 += 1;
    }
}

#[test]
fn each_round_announces_and_fetches_once() {
    let cx = Counted::default();
    let calls = Arc::clone(&cx.committed);
    let device = NullDevice::new(info(), NullConfig { latency_ns: 10, bytes_per_s: 0 });
    let mut queue = share(device.queue(4), cx, HwQueueConfig { depth: 4, ..HwQueueConfig::default() }, 4, 1).remove(0);
    (0..4).for_each(|sector| queue.submit(bio(sector)));
    queue.ring(&|| 100);
    assert_eq!(*calls.lock().unwrap(), (1, 1));
    assert_eq!(queue.poll(&|| 105, &mut |_| ()), 0);
    assert_eq!(queue.poll(&|| 110, &mut |_| ()), 4);
    assert_eq!(*calls.lock().unwrap(), (3, 3));
}

/// Completes requests below sector 100 at once. From there on it completes one, keeps one, and panics at the third.
struct Trap {
    order: Arc<Mutex<Vec<u64>>>,
    kept: Vec<Tag>,
}

impl Driver<()> for Trap {
    fn queue_rqs(&mut self, (): &mut (), _: &RegionTable, batch: &mut Batch<'_>) {
        while let Some((tag, request, _)) = batch.take() {
            let sector = request.sector();
            self.order.lock().unwrap().push(sector);
            match sector {
                0..=100 => batch.complete(tag, Status::Ok),
                _ => self.kept.push(tag),
            }
            assert_ne!(sector, 102, "a bug that the test planted");
        }
    }

    fn poll(&mut self, (): &mut (), _: &RegionTable, _: &mut Done<'_>, _: u64) {}
}

impl Drop for Trap {
    fn drop(&mut self) {
        // A queue that is given up takes its requests along.
        self.kept.drain(..).for_each(std::mem::forget);
    }
}

#[test]
fn a_driver_that_panics_in_the_middle_of_a_batch_answers_nothing_twice_and_all_who_wait_hear_of_it() {
    let order = Arc::new(Mutex::new(Vec::new()));
    let driver = Trap { order: Arc::clone(&order), kept: Vec::new() };
    let config = HwQueueConfig { merging: Merging::Off, ..HwQueueConfig::default() };
    let mut ends = share(driver, (), config, 4, 3);
    let (mut last, mut sleeper, mut first) = (ends.pop().unwrap(), ends.pop().unwrap(), ends.pop().unwrap());
    // Earlier completions stay available, whatever happens to the queue.
    (0..2).for_each(|sector| first.submit(bio(sector)));
    first.ring(&|| 5);
    // A bio that the device keeps: its thread, asleep or about to be, is notified.
    let sleeper = std::thread::spawn(move || {
        sleeper.submit(bio(200));
        sleeper.wait(&|| 6, &mut |_| unreachable!("nobody answered it"))
    });
    let breaker = std::thread::spawn(move || {
        (100..104).for_each(|sector| last.submit(bio(sector)));
        last.ring(&|| 7);
        // Another may have turned the queue for it, and found the bug.
        last.wait(&|| 8, &mut |bio| unreachable!("{} was answered by a queue that was given up", bio.sector))
    });
    assert!(breaker.join().is_err() && sleeper.join().is_err());
    let mut back = Vec::new();
    first.poll(&|| 9, &mut |bio| back.push((bio.sector, bio.status)));
    assert_eq!(back, [(0, Status::Ok), (1, Status::Ok)]);
    assert_eq!(first.in_flight(), 0);
    let next = std::panic::AssertUnwindSafe(move || {
        first.submit(bio(3));
        first.ring(&|| 10);
    });
    assert!(std::panic::catch_unwind(next).is_err(), "a queue that was given up takes more");
    let mut order = order.lock().unwrap().clone();
    order.retain(|sector| *sector != 200);
    assert_eq!(order, [0, 1, 100, 101, 102], "each was taken once, and none after the bug");
}

#[test]
fn a_bio_that_another_thread_submits_again_is_of_that_thread() {
    let device = NullDevice::new(info(), NullConfig::default());
    let [mut first, mut second] =
        <[_; 2]>::try_from(share(device.queue(4), (), HwQueueConfig::default(), 4, 2)).unwrap();
    let mut back = Vec::new();
    for stream in [0, 77] {
        let mut bio = bio(0);
        bio.stream = stream;
        first.submit(bio);
        first.ring(&|| 5);
        first.poll(&|| 6, &mut |bio| back.push(bio));
        assert_eq!(back[0].stream, stream, "it comes back as it was submitted");
        second.submit(back.remove(0));
        second.ring(&|| 7);
        second.poll(&|| 8, &mut |bio| back.push(bio));
        assert_eq!(back.remove(0).stream, stream);
    }
}
