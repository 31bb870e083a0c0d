//! A disk shared by real threads while the number of its queues changes: every bio comes back once, to its submitter,
//! and the data is correct.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use blkyard_mq::{
    Bio, BlockDevice, Context, DeviceInfo, HwQueue, HwQueueConfig, NullConfig, Op, Parker, QueueCounts, QueueFactory,
    QueueKind, QueueLimits, RamDevice, RamQueue, Region, RegionTable, Segment, SharedDisk, SharedSubmitter, Status,
};

use crate::common::{TimedParker, now_ns};

const THREADS: usize = 4;
const PLACES: usize = 16;
const BLOCK: u32 = 4096;
const SECTORS: u32 = BLOCK / 512;
/// Blocks of the disk that one thread has to itself.
const BLOCKS: u64 = 64;

struct Factory {
    device: RamDevice,
    memory: Arc<RegionTable>,
}

impl QueueFactory for Factory {
    type Driver = RamQueue;
    type Cx = ();
    type Error = Infallible;

    fn queue(&mut self, _: QueueKind, _: usize, _: usize) -> Result<(HwQueue<RamQueue>, ()), Infallible> {
        let config = HwQueueConfig { depth: 8, bios_max: 12, ..HwQueueConfig::default() };
        let mut hw = HwQueue::new(self.device.queue(8), Arc::new(self.device.info().clone()), config);
        hw.set_memory(&mut (), Arc::clone(&self.memory));
        Ok((hw, ()))
    }

    fn parker(&mut self, _: &[&()]) -> Result<Arc<dyn Parker>, Infallible> {
        Ok(TimedParker::new())
    }
}

fn factory(latency_ns: u64, memory: &Arc<Region>) -> Factory {
    let info = DeviceInfo {
        name: "test".into(),
        capacity_sectors: THREADS as u64 * BLOCKS * u64::from(SECTORS),
        limits: QueueLimits::default(),
        read_only: false,
        volatile_cache: false,
        fua: false,
        ..DeviceInfo::default()
    };
    let device = RamDevice::new(info, NullConfig { latency_ns, bytes_per_s: 0 }).unwrap();
    Factory { device, memory: Arc::new(RegionTable::new(vec![Arc::clone(memory)])) }
}

/// One thread's work: it writes its part of the disk and reads it back, one I/O to a block at a time, so the expected
/// data is known.
struct Life<'a, D: blkyard_mq::Driver<Cx>, Cx: Context> {
    submitter: SharedSubmitter<D, Cx>,
    thread: u64,
    memory: &'a Region,
    free: Vec<Box<Bio>>,
    wrote: [u64; BLOCKS as usize],
    busy: [bool; BLOCKS as usize],
    next: u64,
    ended: u64,
}

impl<D: blkyard_mq::Driver<Cx>, Cx: Context> Life<'_, D, Cx> {
    fn submit_some(&mut self) {
        while let Some(mut bio) = self.free.pop() {
            let block = self.next * 7 % BLOCKS;
            if std::mem::replace(&mut self.busy[block as usize], true) {
                self.free.push(bio);
                return;
            }
            let cookie = bio.cookie;
            bio.reset();
            bio.op = if self.next.is_multiple_of(3) { Op::Write } else { Op::Read };
            let mut bytes = [0; 16];
            if bio.op == Op::Write {
                self.wrote[block as usize] = self.next + 1;
                bytes[..8].copy_from_slice(&(self.next + 1).to_le_bytes());
                bytes[8..].copy_from_slice(&(self.thread + 1).to_le_bytes());
            }
            self.memory.span(cookie, 16).unwrap().copy_from_slice(&bytes);
            bio.sector = (self.thread * BLOCKS + block) * u64::from(SECTORS);
            bio.sectors = SECTORS;
            bio.segments.push(Segment { region: 0, offset: cookie, len: BLOCK });
            self.submitter.submit(bio);
            self.next += 1;
        }
    }

    fn take(&mut self, sleep: bool) -> usize {
        let Life { submitter, thread, memory, free, wrote, busy, ended, .. } = self;
        let mut sink = |bio: Box<Bio>| {
            assert_eq!(bio.status, Status::Ok);
            let block = bio.sector / u64::from(SECTORS);
            assert_eq!(block / BLOCKS, *thread, "came back to another");
            let block = (block % BLOCKS) as usize;
            assert!(std::mem::replace(&mut busy[block], false), "came back twice");
            let mut bytes = [0; 16];
            memory.span(bio.cookie, 16).unwrap().copy_to_slice(&mut bytes);
            let stamp = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            let who = u64::from_le_bytes(bytes[8..].try_into().unwrap());
            assert_eq!((stamp, who), (wrote[block], if stamp == 0 { 0 } else { *thread + 1 }));
            *ended += 1;
            free.push(bio);
        };
        if sleep { submitter.wait(&now_ns, &mut sink) } else { submitter.poll(&now_ns, &mut sink) }
    }
}

/// Threads read and write until another one has changed the queues `changes` times.
fn run(latency_ns: u64, kinds: QueueCounts, changes: usize, sleeps: impl Fn(u64) -> bool + Sync) {
    let memory = Region::anonymous(THREADS * PLACES * BLOCK as usize).unwrap();
    let (disk, submitters) = SharedDisk::open(factory(latency_ns, &memory), THREADS, PLACES, kinds).unwrap();
    let changed = AtomicUsize::new(0);
    thread::scope(|scope| {
        for (submitter, thread) in submitters.into_iter().zip(0_u64..) {
            let (memory, sleeps, changed) = (&*memory, &sleeps, &changed);
            scope.spawn(move || {
                let bio = |place: usize| {
                    let mut bio = Bio::with_capacity(1);
                    bio.cookie = (thread as usize * PLACES + place) as u64 * u64::from(BLOCK);
                    bio
                };
                let (wrote, busy) = ([0; BLOCKS as usize], [false; BLOCKS as usize]);
                let free = (0..PLACES).map(bio).collect();
                let mut life = Life { submitter, thread, memory, free, wrote, busy, next: 0, ended: 0 };
                while changed.load(Ordering::Relaxed) < changes || life.ended < 1000 {
                    life.submit_some();
                    life.submitter.ring(&now_ns);
                    if life.take(sleeps(thread)) == 0 {
                        thread::yield_now();
                    }
                }
                while life.take(true) > 0 {}
                assert_eq!((life.ended, life.free.len()), (life.next, PLACES));
                life.submitter.leave(&now_ns, &mut |_| ());
            });
        }
        for change in 0..changes {
            let some = |kind| if kinds.of(kind) == 0 { 0 } else { 1 + (change * 7 + kind as usize) % 4 };
            let [default, read, poll] = QueueKind::ALL.map(some);
            let counts = QueueCounts { default, read, poll };
            assert_eq!(disk.set_queues(counts, &now_ns).unwrap(), counts);
            changed.fetch_add(1, Ordering::Relaxed);
            // So that some changes find the threads at work, and others each other.
            if change % 4 == 0 {
                thread::yield_now();
            }
        }
    });
}

#[test]
fn data_stays_what_it_was_while_the_number_of_queues_changes() {
    run(0, QueueCounts::only(4), 400, |thread| thread % 2 == 0);
}

#[test]
fn those_who_sleep_wake_up_beside_their_new_queues() {
    run(50_000, QueueCounts::only(1), 300, |_| true);
}

#[test]
fn those_who_poll_go_on_polling() {
    run(0, QueueCounts::only(2), 300, |_| false);
}

#[test]
fn reads_and_writes_change_queues_apart_from_each_other() {
    run(0, QueueCounts { default: 2, read: 3, poll: 0 }, 300, |thread| thread % 2 == 0);
    run(50_000, QueueCounts { default: 1, read: 2, poll: 0 }, 200, |_| true);
}
