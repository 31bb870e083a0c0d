//! A disk that threads share, step by step: refusals, queue selection, and changes of the number of queues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use blkyard_mq::{
    Batch, Bio, BioFlags, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, Op, Parker, QueueCounts, QueueFactory,
    QueueKind, QueueLimits, RegionTable, SharedDisk, SharedSubmitter, Status, Tag, Wake,
};

use crate::common::{TimedParker, now_ns};

/// Longer than any machine takes, however busy.
const LIMIT: Duration = Duration::from_mins(1);

fn info() -> DeviceInfo {
    DeviceInfo {
        name: "test".into(),
        capacity_sectors: 1 << 20,
        limits: QueueLimits { discard_sectors_max: 1 << 10, ..QueueLimits::default() },
        read_only: false,
        volatile_cache: false,
        ..DeviceInfo::default()
    }
}

/// State shared by the queues of one device.
#[derive(Default)]
struct Board {
    /// Sectors in the order they came, with the number of their queue.
    order: Mutex<Vec<(usize, u64)>>,
    /// Requests are kept until this is cleared.
    holds: AtomicBool,
    /// Queues that are there.
    queues: AtomicUsize,
    /// Called by the second queue in each poll. While it returns true, recent requests are not completed.
    feeds: Mutex<Option<Box<dyn FnMut() -> bool + Send>>>,
}

/// Records its requests, and may keep them for a while.
struct Queue {
    board: Arc<Board>,
    number: usize,
    kept: VecDeque<Tag>,
    /// How many of these were there when it was fed last.
    older: usize,
}

impl Driver<()> for Queue {
    fn queue_rqs(&mut self, (): &mut (), _: &RegionTable, batch: &mut Batch<'_>) {
        while let Some((tag, request, _)) = batch.take() {
            self.board.order.lock().unwrap().push((self.number, request.sector()));
            self.kept.push_back(tag);
        }
    }

    fn poll(&mut self, (): &mut (), _: &RegionTable, done: &mut Done<'_>, _: u64) {
        if self.number == 1 && self.board.feeds.lock().unwrap().as_mut().is_some_and(|feed| feed()) {
            self.kept.drain(..self.older).for_each(|tag| done.complete(tag, Status::Ok));
            self.older = self.kept.len();
        } else if !self.board.holds.load(Ordering::Relaxed) {
            self.kept.drain(..).for_each(|tag| done.complete(tag, Status::Ok));
        }
    }

    /// This device has no events: it must be polled often.
    fn deadline_ns(&self) -> Option<u64> {
        (!self.kept.is_empty()).then(|| now_ns() + 100_000)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.board.queues.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the device has {0} queues and no more")]
struct NoMore(usize);

struct Factory {
    board: Arc<Board>,
    queues_max: usize,
    sleepless: bool,
}

impl QueueFactory for Factory {
    type Driver = Queue;
    type Cx = ();
    type Error = NoMore;

    fn queue(&mut self, _: QueueKind, number: usize, threads: usize) -> Result<(HwQueue<Queue>, ()), NoMore> {
        assert!(threads > 0, "a queue for nobody");
        if number >= self.queues_max {
            return Err(NoMore(self.queues_max));
        }
        self.board.queues.fetch_add(1, Ordering::Relaxed);
        let queue = Queue { board: Arc::clone(&self.board), number, kept: VecDeque::new(), older: 0 };
        let config = HwQueueConfig { depth: 4, bios_max: 8, ..HwQueueConfig::default() };
        Ok((HwQueue::new(queue, Arc::new(info()), config), ()))
    }

    fn parker(&mut self, _: &[&()]) -> Result<Arc<dyn Parker>, NoMore> {
        Ok(if self.sleepless { Arc::new(Sleepless) } else { TimedParker::new() })
    }
}

/// Must not sleep here.
struct Sleepless;

impl Wake for Sleepless {
    fn wake(&self) {}
}

impl Parker for Sleepless {
    fn sleep(&self) {
        panic!("somebody slept on a queue that is polled");
    }

    fn watch(&self, _: u64) {
        panic!("somebody kept watch on a queue that is polled");
    }
}

type Threads = Vec<SharedSubmitter<Queue, ()>>;

fn open(threads: usize, counts: QueueCounts) -> (Arc<Board>, SharedDisk<Factory>, Threads) {
    let board = Arc::new(Board::default());
    let factory = Factory { board: Arc::clone(&board), queues_max: 16, sleepless: false };
    let (disk, submitters) = SharedDisk::open(factory, threads, 8, counts).unwrap();
    (board, disk, submitters)
}

/// A bio without data, as a separate request.
fn bio(op: Op, sector: u64, flags: BioFlags) -> Box<Bio> {
    let (mut bio, flags) = (Bio::with_capacity(0), flags | BioFlags::NO_MERGE);
    (bio.op, bio.sector, bio.sectors, bio.flags, bio.cookie) = (op, sector, 1, flags, !sector);
    bio
}

fn discard(sector: u64) -> Box<Bio> {
    bio(Op::Discard, sector, BioFlags::empty())
}

/// Gives back all that is out, by sector.
fn finish(submitter: &mut SharedSubmitter<Queue, ()>) -> Vec<(u64, Status)> {
    let mut ended = Vec::new();
    while submitter.wait(&now_ns, &mut |bio| {
        assert_eq!(bio.cookie, !bio.sector, "the submitter's own word comes back untouched");
        ended.push((bio.sector, bio.status));
    }) > 0
    {}
    ended
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LIMIT, "waited too long until {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn each_thread_uses_the_queue_of_its_number() {
    let (board, disk, mut threads) = open(6, QueueCounts::only(4));
    for (number, thread) in threads.iter_mut().enumerate() {
        thread.submit(discard(number as u64));
        thread.ring(&now_ns);
    }
    assert_eq!(*board.order.lock().unwrap(), [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (3, 5)]);
    for (number, thread) in threads.iter_mut().enumerate() {
        assert_eq!(finish(thread), [(number as u64, Status::Ok)]);
    }
    assert_eq!((disk.queues(), disk.stats().len()), (QueueCounts::only(4), 4));
}

#[test]
fn reads_and_what_is_polled_for_have_queues_of_their_own() {
    let (board, disk, mut threads) = open(2, QueueCounts { default: 1, read: 2, poll: 1 });
    let thread = &mut threads[1];
    // No memory is set: a read is refused by its queue, which counts it.
    thread.submit(discard(1));
    thread.submit(bio(Op::Discard, 2, BioFlags::POLLED));
    thread.submit(discard(3));
    thread.ring(&now_ns);
    assert_eq!(*board.order.lock().unwrap(), [(0, 1), (0, 3), (3, 2)]);
    assert_eq!(finish(thread).len(), 3);
    thread.submit(bio(Op::Read, 7, BioFlags::empty()));
    assert_eq!(finish(thread), [(7, Status::Invalid)]);
    let refused = disk.stats().iter().map(|(_, stats)| stats.snapshot().refused).collect::<Vec<_>>();
    assert_eq!(refused, [0, 0, 1, 0], "thread one reads through the second of the read queues");
}

#[test]
fn what_is_polled_for_needs_a_queue_for_that() {
    let (board, _disk, mut threads) = open(1, QueueCounts::only(1));
    threads[0].submit(bio(Op::Discard, 3, BioFlags::POLLED));
    threads[0].submit(discard(4));
    assert_eq!((threads[0].in_flight(), threads[0].room()), (2, 6));
    threads[0].ring(&now_ns);
    assert_eq!(finish(&mut threads[0]), [(3, Status::NotSupported), (4, Status::Ok)]);
    assert_eq!((threads[0].in_flight(), board.order.lock().unwrap().len()), (0, 1));
}

#[test]
fn nobody_sleeps_on_a_queue_that_is_polled() {
    let board = Arc::new(Board::default());
    let factory = Factory { board: Arc::clone(&board), queues_max: 16, sleepless: true };
    let (disk, mut threads) = SharedDisk::open(factory, 2, 8, QueueCounts { default: 1, read: 0, poll: 1 }).unwrap();
    board.holds.store(true, Ordering::Relaxed);
    let polled = |sector| bio(Op::Discard, sector, BioFlags::POLLED);
    thread::scope(|scope| {
        for (number, thread) in threads.iter_mut().enumerate() {
            thread.submit(polled(number as u64));
            scope.spawn(move || assert_eq!(finish(thread), [(number as u64, Status::Ok)]));
        }
        until("both are at the device", || board.order.lock().unwrap().len() == 2);
        // The closing thread only polls; the default queue is idle.
        let disk = &disk;
        let change = scope.spawn(move || disk.set_queues(QueueCounts { default: 1, read: 0, poll: 2 }, &now_ns));
        until("the new queues are made, and the old ones to be closed", || board.queues.load(Ordering::Relaxed) == 4);
        board.holds.store(false, Ordering::Relaxed);
        assert_eq!(change.join().unwrap().unwrap(), QueueCounts { default: 1, read: 0, poll: 2 });
    });
    // Out on both kinds at once, a thread polls for both.
    threads[0].submit(polled(5));
    threads[0].submit(discard(6));
    assert_eq!(threads[0].wait(&now_ns, &mut |_| ()) + threads[0].wait(&now_ns, &mut |_| ()), 2);
}

#[test]
fn nobody_sleeps_until_a_polled_queue_has_moved() {
    let board = Arc::new(Board::default());
    let factory = Factory { board: Arc::clone(&board), queues_max: 16, sleepless: true };
    let (disk, mut threads) = SharedDisk::open(factory, 3, 8, QueueCounts { default: 1, read: 0, poll: 3 }).unwrap();
    let [first, _, last] = &mut threads[..] else { panic!("three threads") };
    let polled = |sector| bio(Op::Discard, sector, BioFlags::POLLED);
    board.holds.store(true, Ordering::Relaxed);
    last.submit(polled(3));
    last.ring(&now_ns);
    thread::scope(|scope| {
        let disk = &disk;
        let change = scope.spawn(move || disk.set_queues(QueueCounts { default: 1, read: 0, poll: 1 }, &now_ns));
        until("only the last thread's queue is left of the old four", || board.queues.load(Ordering::Relaxed) == 3);
        // This queue is closed, and is moved with the last.
        first.submit(polled(1));
        scope.spawn(move || assert_eq!(finish(first), [(1, Status::Ok)]));
        thread::sleep(Duration::from_millis(50));
        board.holds.store(false, Ordering::Relaxed);
        assert_eq!(finish(last), [(3, Status::Ok)]);
        change.join().unwrap().unwrap();
    });
}

#[test]
fn there_is_at_least_one_queue_and_at_most_one_a_thread() {
    let (board, disk, _threads) = open(3, QueueCounts::only(9));
    assert_eq!((disk.queues(), board.queues.load(Ordering::Relaxed)), (QueueCounts::only(3), 3));
    assert_eq!(disk.set_queues(QueueCounts::only(1), &now_ns).unwrap(), QueueCounts::only(1));
    assert_eq!(disk.set_queues(QueueCounts::only(7), &now_ns).unwrap(), QueueCounts::only(3));
    let error = disk.set_queues(QueueCounts::only(0), &now_ns).unwrap_err().to_string();
    assert!(error.contains("at least 1"), "{error}");
    let error = disk.set_queues(QueueCounts { default: 1, read: 1, poll: 0 }, &now_ns).unwrap_err().to_string();
    assert!(error.contains("read queues cannot change from 0 to 1"), "{error}");
    assert_eq!(disk.queues(), QueueCounts::only(3));
    let factory = Factory { board, queues_max: 16, sleepless: false };
    assert!(SharedDisk::open(factory, 1, 1, QueueCounts::only(0)).is_err());
}

#[test]
fn old_queues_leave_nothing_behind() {
    let (board, disk, mut threads) = open(4, QueueCounts::only(4));
    for (step, count) in [1, 3, 2, 4, 1, 4].into_iter().enumerate() {
        for thread in &mut threads {
            (0..8).for_each(|sector| thread.submit(discard(sector)));
            // One in two is made visible; the others stay in the plug.
            if step % 2 == 0 {
                thread.ring(&now_ns);
            }
        }
        assert_eq!(disk.set_queues(QueueCounts::only(count), &now_ns).unwrap(), QueueCounts::only(count));
        assert_eq!(board.queues.load(Ordering::Relaxed), count, "queues that are there after {step}");
        for thread in &mut threads {
            assert_eq!(finish(thread).len(), 8);
        }
    }
    drop((disk, threads));
    assert_eq!(board.queues.load(Ordering::Relaxed), 0);
}

#[test]
fn if_new_queues_cannot_be_made_the_old_ones_stay() {
    let board = Arc::new(Board::default());
    let factory = Factory { board: Arc::clone(&board), queues_max: 2, sleepless: false };
    let (disk, mut threads) = SharedDisk::open(factory, 4, 8, QueueCounts::only(2)).unwrap();
    board.holds.store(true, Ordering::Relaxed);
    threads[0].submit(discard(9));
    threads[0].ring(&now_ns);
    let error = disk.set_queues(QueueCounts::only(3), &now_ns).unwrap_err().to_string();
    assert!(error.contains("the device has 2 queues and no more"), "{error}");
    assert_eq!((disk.queues(), board.queues.load(Ordering::Relaxed)), (QueueCounts::only(2), 2));
    board.holds.store(false, Ordering::Relaxed);
    assert_eq!(finish(&mut threads[0]), [(9, Status::Ok)]);
}

#[test]
fn the_order_of_a_thread_is_kept_over_a_change() {
    let (board, disk, mut threads) = open(2, QueueCounts::only(2));
    board.holds.store(true, Ordering::Relaxed);
    // Four of eight are at the device when the queues change, the others wait for tags and in the ring.
    (0..8).for_each(|sector| threads[1].submit(discard(sector)));
    threads[1].ring(&now_ns);
    thread::scope(|scope| {
        let change = scope.spawn(|| disk.set_queues(QueueCounts::only(1), &now_ns));
        thread::sleep(Duration::from_millis(5));
        board.holds.store(false, Ordering::Relaxed);
        assert_eq!(change.join().unwrap().unwrap(), QueueCounts::only(1));
    });
    finish(&mut threads[1]);
    let order = board.order.lock().unwrap().iter().map(|(_, sector)| *sector).collect::<Vec<_>>();
    assert_eq!(order, (0..8).collect::<Vec<_>>());
}

#[test]
fn a_queue_that_is_to_go_takes_nothing_more_however_fast_it_is_fed() {
    let (board, disk, mut threads) = open(2, QueueCounts::only(2));
    board.holds.store(true, Ordering::Relaxed);
    threads[1].submit(discard(0));
    threads[1].ring(&now_ns);
    let thread = Arc::new(Mutex::new(threads.pop().unwrap()));
    let (feeder, mut fed) = (Arc::clone(&thread), 0);
    *board.feeds.lock().unwrap() = Some(Box::new(move || {
        let mut thread = feeder.lock().unwrap();
        thread.poll(&now_ns, &mut |_| ());
        fed += 1;
        if thread.room() > 0 {
            thread.submit(discard(fed));
            thread.ring(&now_ns);
        }
        fed < 100
    }));
    disk.set_queues(QueueCounts::only(1), &now_ns).unwrap();
    *board.feeds.lock().unwrap() = None;
    board.holds.store(false, Ordering::Relaxed);
    finish(&mut thread.lock().unwrap());
    let order = board.order.lock().unwrap().clone();
    let (old, new): (Vec<_>, Vec<_>) = order.into_iter().partition(|(queue, _)| *queue == 1);
    assert_eq!(old, [(1, 0)]);
    assert!(!new.is_empty(), "what was fed went to the new queue");
}

#[test]
fn who_must_not_wait_is_told_to_come_again_while_the_queues_change() {
    let (board, disk, mut threads) = open(2, QueueCounts::only(1));
    board.holds.store(true, Ordering::Relaxed);
    let (first, second) = threads.split_at_mut(1);
    first[0].submit(discard(1));
    first[0].ring(&now_ns);
    thread::scope(|scope| {
        let change = scope.spawn(|| disk.set_queues(QueueCounts::only(2), &now_ns));
        // Sleeps through it all.
        let sleeper = scope.spawn(|| finish(&mut first[0]));
        let mut again = 0;
        until("the queues change", || {
            if second[0].room() > 1 {
                second[0].submit(bio(Op::Discard, 2, BioFlags::NOWAIT));
                second[0].ring(&now_ns);
            }
            second[0].poll(&now_ns, &mut |bio| again += usize::from(bio.status == Status::Again));
            again > 0
        });
        // One that may wait continues after them.
        second[0].submit(discard(3));
        second[0].ring(&now_ns);
        assert!(!change.is_finished());
        board.holds.store(false, Ordering::Relaxed);
        assert_eq!(change.join().unwrap().unwrap(), QueueCounts::only(2));
        assert_eq!(sleeper.join().unwrap(), [(1, Status::Ok)]);
        assert!(finish(&mut second[0]).contains(&(3, Status::Ok)));
        second[0].submit(bio(Op::Discard, 4, BioFlags::NOWAIT));
        assert_eq!(finish(&mut second[0]), [(4, Status::Ok)]);
    });
}
