//! A hardware queue shared by real threads: more threads than queues, and fewer; every bio comes back once, to its
//! submitter, and the data is correct.

use std::sync::Arc;
use std::thread;

use blkyard_mq::{
    Batch, Bio, BlockDevice, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, NullConfig, NullDevice, Op, Parker,
    QueueLimits, QueueMap, RamDevice, Region, RegionTable, Segment, Status, SwQueue,
};

use crate::common::{TimedParker, now_ns};

const THREADS: usize = 8;
const PLACES: usize = 16;
const BLOCK: u32 = 4096;
const SECTORS: u32 = BLOCK / 512;
/// Blocks of the disk that one thread has to itself.
const BLOCKS: u64 = 64;

fn info() -> DeviceInfo {
    DeviceInfo {
        name: "test".into(),
        capacity_sectors: THREADS as u64 * BLOCKS * u64::from(SECTORS),
        limits: QueueLimits::default(),
        read_only: false,
        volatile_cache: false,
        fua: false,
        ..DeviceInfo::default()
    }
}

/// Memory with a block for each slot of each thread.
fn memory(threads: usize) -> Arc<Region> {
    Region::anonymous(threads * PLACES * BLOCK as usize).unwrap()
}

/// Software queues for this many threads on this many hardware queues, by the map.
fn share<D: Driver<()>>(
    threads: usize,
    queues: usize,
    depth: usize,
    region: &Arc<Region>,
    driver: impl Fn() -> D,
) -> Vec<SwQueue<D, ()>> {
    let map = QueueMap::even(threads, queues);
    let share = |queue| {
        let config = HwQueueConfig { depth, bios_max: 2 * depth, ..HwQueueConfig::default() };
        let mut hw = HwQueue::new(driver(), Arc::new(info()), config);
        hw.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(region)])));
        let parkers: Vec<_> = map.cpus_of(queue).map(|_| TimedParker::new() as Arc<dyn Parker>).collect();
        if parkers.is_empty() { Vec::new() } else { SwQueue::share(hw, (), PLACES, parkers) }
    };
    (0..queues).flat_map(share).collect()
}

/// How a thread waits for its completions.
#[derive(Clone, Copy, Debug)]
enum Style {
    Sleep,
    Poll,
    /// Some of its threads one way, some the other.
    Mixed,
}

/// One thread's work: its own bios, repeatedly, each checked as it comes back.
struct Life<D: Driver<()>> {
    queue: SwQueue<D, ()>,
    thread: usize,
    free: Vec<Box<Bio>>,
    out: [bool; PLACES],
}

impl<D: Driver<()>> Life<D> {
    fn new(queue: SwQueue<D, ()>, thread: usize) -> Life<D> {
        let bio = |place| {
            let mut bio = Bio::with_capacity(1);
            bio.cookie = place as u64;
            bio
        };
        Life { queue, thread, free: (0..PLACES).map(bio).collect(), out: [false; PLACES] }
    }

    fn offset(&self, place: u64) -> u64 {
        (self.thread * PLACES) as u64 * u64::from(BLOCK) + place * u64::from(BLOCK)
    }

    fn submit(&mut self, op: Op, block: u64) {
        let mut bio = self.free.pop().unwrap();
        let place = bio.cookie;
        bio.reset();
        bio.op = op;
        bio.sector = (self.thread as u64 * BLOCKS + block) * u64::from(SECTORS);
        bio.sectors = SECTORS;
        bio.segments.push(Segment { region: 0, offset: self.offset(place), len: BLOCK });
        assert!(!std::mem::replace(&mut self.out[place as usize], true));
        self.queue.submit(bio);
    }

    /// Takes completions; `done` sees the block of each.
    fn take(&mut self, sleep: bool, mut done: impl FnMut(&Bio, u64)) -> usize {
        let Life { queue, thread, free, out } = self;
        let mut sink = |bio: Box<Bio>| {
            assert_eq!(bio.status, Status::Ok);
            assert!(std::mem::replace(&mut out[bio.cookie as usize], false), "came back twice, or to another");
            let block = bio.sector / u64::from(SECTORS);
            assert_eq!(block / BLOCKS, *thread as u64, "came back to another");
            done(&bio, block % BLOCKS);
            free.push(bio);
        };
        if sleep { queue.wait(&now_ns, &mut sink) } else { queue.poll(&now_ns, &mut sink) }
    }

    fn end(self) {
        let mut free = self.free;
        self.queue.leave(&now_ns, &mut |bio| free.push(bio));
        assert_eq!(free.len(), PLACES);
    }
}

fn sleeps(style: Style, thread: usize) -> bool {
    match style {
        Style::Sleep => true,
        Style::Poll => false,
        Style::Mixed => !thread.is_multiple_of(3),
    }
}

/// Each thread gets `bios` of a null device through, in batches of all sizes.
fn null(threads: usize, queues: usize, style: Style, latency_ns: u64, bios: usize) {
    let device = NullDevice::new(info(), NullConfig { latency_ns, bytes_per_s: 0 });
    let region = memory(threads);
    let ends = share(threads, queues, 8, &region, || device.queue(8));
    assert_eq!(ends.len(), threads);
    let stats: Vec<_> = ends.iter().map(|end| Arc::clone(end.stats())).collect();
    thread::scope(|scope| {
        for (thread, queue) in ends.into_iter().enumerate() {
            scope.spawn(move || {
                let mut life = Life::new(queue, thread);
                let (mut submitted, mut ended) = (0, 0);
                while ended < bios {
                    let batch = life.queue.room().min(bios - submitted).min(1 + submitted % PLACES);
                    (0..batch).for_each(|step| life.submit(Op::Read, (submitted + step) as u64 % BLOCKS));
                    submitted += batch;
                    life.queue.ring(&now_ns);
                    let took = life.take(sleeps(style, thread), |_, _| ());
                    ended += took;
                    if took == 0 {
                        thread::yield_now();
                    }
                }
                assert_eq!(life.queue.in_flight(), 0);
                life.end();
            });
        }
    });
    let mut seen: Vec<_> = stats.iter().map(Arc::as_ptr).collect();
    seen.dedup();
    assert_eq!(seen.len(), queues.min(threads));
}

#[test]
fn more_threads_than_queues_that_sleep() {
    null(THREADS, 1, Style::Sleep, 0, 20_000);
    null(THREADS, 2, Style::Sleep, 0, 20_000);
}

#[test]
fn more_threads_than_queues_that_poll() {
    null(THREADS, 1, Style::Poll, 0, 20_000);
    null(THREADS, 2, Style::Poll, 0, 20_000);
}

#[test]
fn more_threads_than_queues_of_both_kinds() {
    null(THREADS, 1, Style::Mixed, 0, 20_000);
    null(THREADS, 2, Style::Mixed, 0, 20_000);
}

#[test]
fn a_device_that_takes_its_time_has_somebody_who_keeps_watch() {
    null(THREADS, 1, Style::Sleep, 50_000, 1000);
    null(THREADS, 2, Style::Mixed, 50_000, 1000);
}

#[test]
fn fewer_threads_than_queues() {
    null(2, 4, Style::Sleep, 0, 20_000);
    null(3, 3, Style::Poll, 0, 20_000);
    null(1, 1, Style::Sleep, 20_000, 1000);
}

/// Each thread writes its part of the disk and reads it back, repeatedly; the first word of a block names its writer
/// and time.
fn ram(threads: usize, queues: usize, style: Style, bios: u64) {
    let device = RamDevice::new(info(), NullConfig::default()).unwrap();
    let region = memory(threads);
    let ends = share(threads, queues, 8, &region, || device.queue(8));
    thread::scope(|scope| {
        for (thread, queue) in ends.into_iter().enumerate() {
            let region = &region;
            scope.spawn(move || {
                let mut life = Life::new(queue, thread);
                let mut wrote = [0_u64; BLOCKS as usize];
                let mut busy = [false; BLOCKS as usize];
                let (mut next, mut ended) = (0_u64, 0);
                while ended < bios {
                    while life.queue.room() > 0 && next < bios {
                        // One I/O to a block at a time, so the expected data is known.
                        let block = next * 7 % BLOCKS;
                        if std::mem::replace(&mut busy[block as usize], true) {
                            break;
                        }
                        let op = if next.is_multiple_of(3) { Op::Write } else { Op::Read };
                        let place = life.free.last().unwrap().cookie;
                        let mut bytes = [0; 16];
                        if op == Op::Write {
                            wrote[block as usize] = next + 1;
                            bytes[..8].copy_from_slice(&(next + 1).to_le_bytes());
                            bytes[8..].copy_from_slice(&(thread as u64 + 1).to_le_bytes());
                        }
                        region.span(life.offset(place), 16).unwrap().copy_from_slice(&bytes);
                        life.submit(op, block);
                        next += 1;
                    }
                    life.queue.ring(&now_ns);
                    let (wrote, busy, base) = (&wrote, &mut busy, life.offset(0));
                    let took = life.take(sleeps(style, thread), |bio, block| {
                        busy[block as usize] = false;
                        let mut bytes = [0; 16];
                        let offset = base + bio.cookie * u64::from(BLOCK);
                        region.span(offset, 16).unwrap().copy_to_slice(&mut bytes);
                        let stamp = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                        let who = u64::from_le_bytes(bytes[8..].try_into().unwrap());
                        assert_eq!(stamp, wrote[block as usize]);
                        assert_eq!(who, if stamp == 0 { 0 } else { thread as u64 + 1 });
                    });
                    ended += took as u64;
                    if took == 0 {
                        thread::yield_now();
                    }
                }
                life.end();
            });
        }
    });
}

#[test]
fn what_many_threads_write_through_few_queues_is_read_back() {
    ram(THREADS, 1, Style::Mixed, 20_000);
    ram(THREADS, 2, Style::Sleep, 20_000);
    ram(2, 4, Style::Poll, 20_000);
}

/// A thread with bios in flight leaves: it gets them back first, with a slow device and other threads staying.
#[test]
fn who_leaves_takes_its_bios_along() {
    let device = NullDevice::new(info(), NullConfig { latency_ns: 1_000_000, bytes_per_s: 0 });
    let region = memory(2);
    let mut ends = share(2, 1, 8, &region, || device.queue(8)).into_iter();
    let (mut first, mut second) = (Life::new(ends.next().unwrap(), 0), Life::new(ends.next().unwrap(), 1));
    first.submit(Op::Read, 0);
    first.queue.ring(&now_ns);
    second.submit(Op::Read, 1);
    second.queue.ring(&now_ns);
    assert_eq!((first.queue.in_flight(), first.queue.room()), (1, PLACES - 1));
    first.end();
    // One that was never made visible is in flight as well.
    second.submit(Op::Read, 2);
    second.end();
}

#[test]
#[should_panic(expected = "left its queue with 1 bios out")]
fn a_thread_that_goes_without_its_bios_is_loud() {
    let device = NullDevice::new(info(), NullConfig::default());
    let mut ends = share(1, 1, 8, &memory(1), || device.queue(8));
    let mut life = Life::new(ends.remove(0), 0);
    life.submit(Op::Read, 0);
    drop(life.queue);
}

/// A driver that takes requests, completes none, and panics when its fuse has burnt down.
struct Bomb {
    fuse: u32,
}

impl Driver<()> for Bomb {
    fn queue_rqs(&mut self, (): &mut (), _: &RegionTable, batch: &mut Batch<'_>) {
        self.fuse -= 1;
        assert!(self.fuse > 0, "the driver broke a promise");
        while let Some((tag, _, _)) = batch.take() {
            // Forgotten so that its drop does not hide the expected panic.
            std::mem::forget(tag);
        }
    }

    fn poll(&mut self, (): &mut (), _: &RegionTable, _: &mut Done<'_>, _: u64) {}
}

/// A driver that panics gives up its queue, and all threads that share it notice, also sleeping ones; also if the
/// thread in which it panicked keeps its end, as those of a disk do.
#[test]
fn a_broken_queue_leaves_nobody_asleep() {
    let mut ends = share(3, 1, 8, &memory(3), || Bomb { fuse: 3 }).into_iter();
    let (tell, told) = std::sync::mpsc::channel();
    let mut waiters = Vec::new();
    for thread in 0..2 {
        let mut life = Life::new(ends.next().unwrap(), thread);
        life.submit(Op::Read, 0);
        life.queue.ring(&now_ns);
        let tell = tell.clone();
        waiters.push(thread::spawn(move || {
            let wait = std::panic::AssertUnwindSafe(|| life.take(true, |_, _| ()));
            let outcome = std::panic::catch_unwind(wait);
            tell.send(outcome.is_err()).unwrap();
            // Before this thread gives up its own end.
            std::mem::forget(life);
        }));
    }
    // Most likely they are asleep by then. If not, one of them may turn the queue for the last, which finds out then.
    thread::sleep(std::time::Duration::from_millis(20));
    let mut last = Life::new(ends.next().unwrap(), 2);
    let break_it = std::panic::AssertUnwindSafe(|| {
        last.submit(Op::Read, 0);
        last.queue.ring(&now_ns);
        last.take(true, |_, _| ());
    });
    assert!(std::panic::catch_unwind(break_it).is_err());
    for _ in &waiters {
        assert_eq!(told.recv_timeout(std::time::Duration::from_secs(20)), Ok(true), "a thread sleeps on");
    }
    waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    std::mem::forget(last);
}
