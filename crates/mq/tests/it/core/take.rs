//! Bios taken out of a queue before they ended: which ones, in which order, and what the device may still do.

use std::collections::BTreeMap;
use std::sync::Arc;

use blkyard_mq::{
    Bio, BioFlags, BlockDevice, BufferAccess, DeadlineConfig, DeviceInfo, FairConfig, FenceEvidence, Fenced, HwQueue,
    HwQueueConfig, NullConfig, Op, PathGeneration, QueueLimits, RamDevice, Region, RegionTable, RegisteredBuffer,
    SchedulerConfig, Status, TakenBio,
};

use crate::core::hand::{Bench, bio, disk, disk_of, of, read, with};

const SENT: PathGeneration = PathGeneration { path: 1, generation: 4 };

/// Quiesces the queue, and takes everything that the device does not have.
fn take(bench: &mut Bench) -> Vec<TakenBio> {
    let mut taken = Vec::new();
    bench.queue.quiesce();
    let count = bench.queue.take_bios(SENT, &mut |bio| taken.push(bio));
    bench.queue.unquiesce();
    assert_eq!(count, taken.len());
    taken
}

fn proof() -> Fenced {
    Fenced::new(SENT, FenceEvidence::AssociationEnded)
}

/// The bio, and whether the device may still execute it.
fn open(taken: TakenBio) -> (Box<Bio>, bool) {
    match taken {
        TakenBio::Free(bio) => (bio, false),
        TakenBio::Unfenced(bio) => (bio.release(&proof()).unwrap(), true),
    }
}

fn opened(taken: Vec<TakenBio>) -> Vec<(u64, bool)> {
    taken.into_iter().map(open).map(|(bio, may_execute)| (bio.cookie, may_execute)).collect()
}

fn write(sector: u64) -> Box<Bio> {
    bio(Op::Write, sector, 8)
}

fn cookies(taken: Vec<TakenBio>) -> Vec<u64> {
    opened(taken).into_iter().map(|(cookie, _)| cookie).collect()
}

#[test]
fn waiting_bios_come_out_in_order_and_free() {
    for scheduler in [SchedulerConfig::None, SchedulerConfig::Deadline(DeadlineConfig::default())] {
        let mut bench = Bench::new(disk(), HwQueueConfig { depth: 4, scheduler, ..HwQueueConfig::default() });
        bench.device().room = 2;
        let sectors = [9000, 8000, 7000, 6000, 5000, 4000, 3000];
        bench.submit_all(sectors.map(write));
        bench.turn();
        let at_driver = bench.device().sectors();
        let taken = opened(take(&mut bench));
        let waited: Vec<u64> = taken.iter().map(|(sector, _)| *sector).collect();
        assert!(taken.iter().all(|(_, may_execute)| !may_execute));
        let mut all = [at_driver, waited.clone()].concat();
        if scheduler == SchedulerConfig::None {
            assert_eq!(all, sectors);
        }
        all.sort_unstable();
        assert_eq!(all, [3000, 4000, 5000, 6000, 7000, 8000, 9000], "{scheduler:?}");
        bench.end_all();
        assert_eq!((bench.take_ok().len(), bench.queue.room()), (2, 256));
        bench.submit(read(0));
        bench.end_all();
        assert_eq!(bench.take_ok(), [0], "the queue runs on");
    }
}

#[test]
fn unanswered_writes_need_a_fence_and_answered_ones_do_not() {
    let mut bench = Bench::deep(8);
    bench.submit_all([write(0), read(1000), write(2000), bio(Op::Discard, 3000, 8), bio(Op::WriteZeroes, 4000, 8)]);
    bench.turn();
    bench.submit(write(5000));
    bench.device().requeue_answered(|held| held.sector == 2000);
    while !bench.device().held.is_empty() {
        bench.device().requeue(|_| true);
    }
    bench.queue.quiesce();
    bench.turn();
    let taken = opened(take(&mut bench));
    let want = [(0, true), (1000, false), (2000, false), (3000, true), (4000, true), (5000, false)];
    assert_eq!(taken, want);
    assert!(bench.queue.is_idle());
}

#[test]
fn an_answer_on_a_later_connection_ends_the_doubt() {
    let mut bench = Bench::deep(8);
    bench.submit(write(0));
    bench.turn();
    bench.device().requeue(|_| true);
    bench.turn();
    bench.device().requeue_answered(|_| true);
    bench.queue.quiesce();
    bench.turn();
    assert_eq!(opened(take(&mut bench)), [(0, false)]);
}

#[test]
fn what_the_driver_has_stays_until_it_gives_it_back() {
    let mut bench = Bench::deep(8);
    bench.submit_all([write(0), write(1000)]);
    bench.turn();
    assert_eq!((take(&mut bench).len(), bench.queue.in_flight()), (0, 2));
    bench.device().requeue(|held| held.sector == 1000);
    bench.queue.quiesce();
    bench.end(0, Status::Ok);
    assert_eq!((bench.take_ok(), opened(take(&mut bench))), (vec![0], vec![(1000, true)]));
}

#[test]
fn a_new_write_does_not_join_one_that_the_device_may_still_execute() {
    for op in [Op::Write, Op::Discard] {
        let mut bench = Bench::deep(8);
        bench.submit(bio(op, 0, 8));
        bench.turn();
        // The connection is lost, and the driver takes nothing until there is another.
        bench.device().room = 0;
        bench.device().requeue(|_| true);
        bench.turn();
        bench.submit(bio(op, 8, 8));
        bench.turn();
        assert_eq!(opened(take(&mut bench)), [(0, true), (8, false)], "{op:?}");
    }
}

#[test]
fn merged_bios_come_out_one_by_one_and_share_the_doubt() {
    let mut bench = Bench::deep(8);
    bench.submit_all([8, 16, 0].map(write));
    bench.turn();
    assert_eq!(bench.device().extents(), [(0, 24)]);
    bench.device().requeue(|_| true);
    bench.queue.quiesce();
    bench.turn();
    assert_eq!(opened(take(&mut bench)), [(0, true), (8, true), (16, true)]);
    assert_eq!(bench.queue.room(), 256);
}

#[test]
fn a_split_bio_comes_out_whole_once_the_driver_has_no_part_of_it() {
    let limits = QueueLimits { sectors_max: 8, ..disk().limits };
    for tags in [2, 8] {
        let mut bench = Bench::new(disk_of(limits), HwQueueConfig { depth: tags, ..HwQueueConfig::default() });
        bench.device().room = 2;
        bench.submit_all([bio(Op::Write, 0, 40), read(1000)]);
        bench.turn();
        assert_eq!(bench.device().sectors(), [0, 8]);
        // Only the bio behind it.
        assert_eq!(cookies(take(&mut bench)), [1000], "{tags} tags");
        bench.device().end(|held| held.sector == 0, Status::Ok);
        bench.queue.quiesce();
        bench.turn();
        assert_eq!(take(&mut bench).len(), 0);
        bench.device().requeue(|_| true);
        bench.turn();
        let mut taken = take(&mut bench);
        let (bio, may_execute) = open(taken.pop().unwrap());
        assert!(taken.is_empty() && may_execute && bench.queue.is_idle());
        assert_eq!((bio.sector, bio.sectors, bio.segments.len(), bio.status), (0, 40, 1, Status::Ok));
        // All of it is written elsewhere.
        let mut other = Bench::new(disk_of(limits), HwQueueConfig::default());
        other.submit(bio);
        other.end_all();
        assert_eq!(other.device().given.concat(), [0, 8, 16, 24, 32]);
        bench.queue.unquiesce();
        bench.submit_all([0, 1000, 2000].map(read));
        bench.end_all();
        assert_eq!(bench.take_ok().len(), 3, "all tags are back");
    }
}

#[test]
fn flush_sequences_start_again_elsewhere() {
    let info = DeviceInfo { volatile_cache: true, ..disk() };
    let mut bench = Bench::new(info.clone(), HwQueueConfig::default());
    let flush = |cookie| {
        let mut bio = bio(Op::Flush, 0, 0);
        bio.cookie = cookie;
        bio
    };
    // The data of one is done, that of another is at the device; a flush waits for both.
    bench.submit_all([1000, 2000].map(|sector| with(write(sector), BioFlags::FUA)));
    bench.turn();
    bench.end(1000, Status::Ok);
    bench.submit_all([flush(3), with(write(4000), BioFlags::PREFLUSH), write(5000)]);
    bench.queue.quiesce();
    bench.turn();
    bench.device().requeue(|_| true);
    bench.turn();
    let want = [(1000, false), (2000, true), (5000, false), (3, false), (4000, false)];
    let mut taken = Vec::new();
    bench.queue.take_bios(SENT, &mut |bio| taken.push(open(bio)));
    assert_eq!(taken.iter().map(|(bio, may)| (bio.cookie, *may)).collect::<Vec<_>>(), want);
    assert!(bench.queue.is_idle());
    let mut other = Bench::new(info, HwQueueConfig::default());
    other.submit_all(taken.into_iter().map(|(bio, _)| bio));
    other.end_all();
    assert_eq!(other.take_ok().len(), 5);
    bench.queue.unquiesce();
    bench.submit_all([with(write(1000), BioFlags::FUA), flush(2)]);
    bench.end_all();
    assert_eq!(bench.take_ok().len(), 2, "its flush machine begins anew");
}

#[test]
fn bios_that_wait_on_a_flush_go_once_that_is_back() {
    let info = DeviceInfo { volatile_cache: true, ..disk() };
    let mut bench = Bench::new(info, HwQueueConfig::default());
    bench.submit(bio(Op::Flush, 0, 0));
    bench.turn();
    assert_eq!((bench.device().ops(), take(&mut bench).len()), (vec![Op::Flush], 0));
    bench.device().requeue(|_| true);
    bench.queue.quiesce();
    bench.turn();
    assert_eq!((opened(take(&mut bench)), bench.queue.is_idle()), (vec![(0, false)], true));
}

#[test]
fn a_registered_buffer_means_the_same_to_the_other_queue() {
    let region = Region::anonymous(1 << 16).unwrap();
    let other = Region::anonymous(1 << 16).unwrap();
    let buffer = RegisteredBuffer::new(&region, 8192, 4096, BufferAccess::ReadWrite).unwrap();
    let mut bench = Bench::deep(4);
    bench.queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
    assert!(bench.queue.add_buffer(&mut (), &buffer));
    let mut named = write(16);
    named.segments[0] = buffer.segment(0, 4096);
    bench.submit(named);
    bench.turn();
    bench.device().requeue(|_| true);
    bench.queue.quiesce();
    bench.turn();
    let (bio, _) = open(take(&mut bench).pop().unwrap());
    assert_eq!((bio.cookie, &bio.segments[..]), (16, &[buffer.segment(0, 4096)][..]));
    // A queue whose regions have other numbers.
    let info = DeviceInfo { capacity_sectors: 1 << 11, ..disk() };
    let device = RamDevice::new(info, NullConfig::default()).unwrap();
    let info = Arc::new(device.info().clone());
    let mut queue = HwQueue::new(device.queue(4), info, HwQueueConfig { depth: 4, ..HwQueueConfig::default() });
    queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![other, Arc::clone(&region)])));
    assert!(queue.add_buffer(&mut (), &buffer));
    queue.memory().resolve(buffer.segment(0, 4096)).unwrap().copy_from_slice(&[7; 4096]);
    let mut ended = Vec::new();
    let mut run = |queue: &mut HwQueue<_>, bio: Box<Bio>| {
        queue.submit(bio);
        queue.issue(&mut (), 1);
        queue.reap(&mut (), 2, &mut |bio| ended.push(bio));
        ended.pop().unwrap()
    };
    assert_eq!(run(&mut queue, bio).status, Status::Ok);
    let mut back = read(16);
    back.segments[0].offset = 0;
    assert_eq!(run(&mut queue, back).status, Status::Ok);
    let mut bytes = [0; 4096];
    let first = blkyard_mq::Segment { region: 0, offset: 0, len: 4096 };
    queue.memory().resolve(first).unwrap().copy_to_slice(&mut bytes);
    assert_eq!(bytes, [7; 4096]);
}

#[test]
#[should_panic(expected = "not quiesced")]
fn a_queue_that_issues_requests_gives_no_bios() {
    Bench::deep(4).queue.take_bios(SENT, &mut |_| ());
}

/// A small generator of numbers (xorshift).
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// Everything at once: two namespaces, splits, merges, flushes, schedulers, and a device that gives requests back with
/// and without an answer.
#[test]
fn any_queue_is_emptied_and_runs_on() {
    for seed in 1..2000_u64 {
        let mut draw = Draw(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let limits = QueueLimits { sectors_max: [16, 2048][draw.below(2) as usize], ..disk().limits };
        let info = DeviceInfo { volatile_cache: draw.below(2) > 0, fua: draw.below(2) > 0, ..disk_of(limits) };
        let schedulers = [
            SchedulerConfig::None,
            SchedulerConfig::Deadline(DeadlineConfig::default()),
            SchedulerConfig::Fair(FairConfig::default()),
        ];
        let config = HwQueueConfig {
            depth: 2 + draw.below(10) as usize,
            scheduler: schedulers[draw.below(3) as usize],
            bios_max: 64,
            timeout_ns: 0,
            ..HwQueueConfig::default()
        };
        let namespaces = 1 + draw.below(2);
        let mut bench = Bench::of(vec![info; namespaces as usize], config);
        // By cookie: how often it came back, and whether the device had it last without an answer.
        let mut back = BTreeMap::new();
        let mut submitted = 0;
        for life in 0..3 {
            bench.device().room = 1 + draw.below(12) as usize;
            for _ in 0..draw.below(60) {
                match draw.below(6) {
                    0..3 if bench.queue.room() > 0 => {
                        let op = [Op::Write, Op::Read, Op::Write, Op::Flush][draw.below(4) as usize];
                        let sectors = if op == Op::Flush { 0 } else { 8 * (1 + draw.below(6) as u32) };
                        let mut bio = of(draw.below(namespaces) as u16, bio(op, 8 * draw.below(40), sectors));
                        let flags = [BioFlags::empty(), BioFlags::FUA, BioFlags::PREFLUSH, BioFlags::empty()];
                        bio.flags = if op == Op::Write { flags[draw.below(4) as usize] } else { BioFlags::empty() };
                        bio.cookie = submitted;
                        submitted += 1;
                        bench.submit(bio);
                    }
                    3 if !bench.device().held.is_empty() => bench.device().end(|_| true, Status::Ok),
                    4 if !bench.device().held.is_empty() && draw.below(2) > 0 => bench.device().requeue(|_| true),
                    4 if !bench.device().held.is_empty() => bench.device().requeue_answered(|_| true),
                    _ => bench.turn(),
                }
            }
            bench.queue.quiesce();
            let early = opened_bios(&mut bench);
            while !bench.device().held.is_empty() {
                match draw.below(3) {
                    0 => bench.device().end(|_| true, Status::Ok),
                    1 => bench.device().requeue_answered(|_| true),
                    _ => bench.device().requeue(|_| true),
                }
            }
            // What has completed may need a flush, which waits.
            (0..3).for_each(|_| bench.turn());
            let late = opened_bios(&mut bench);
            for (bio, may_execute) in early.iter().chain(&late) {
                assert!(!may_execute || bio.op == Op::Write, "seed {seed}");
                assert!(bio.status.is_ok());
                *back.entry(bio.cookie).or_insert(0) += 1;
            }
            for (cookie, status) in bench.take_ended() {
                assert!(status.is_ok(), "seed {seed}: {status}");
                *back.entry(cookie).or_insert(0) += 1;
            }
            assert!(bench.queue.is_idle() && !bench.queue.has_work(), "seed {seed}, life {life}");
            assert_eq!((bench.queue.room(), bench.queue.in_flight()), (64, 0), "seed {seed}");
            bench.queue.unquiesce();
            assert!(back.len() as u64 == submitted && back.values().all(|times| *times == 1), "seed {seed}: {back:?}");
        }
        bench.device().room = usize::MAX;
        bench.submit_all((0..64).map(|number| of((number % namespaces) as u16, read(number * 1000))));
        bench.end_all();
        assert_eq!(bench.take_ok().len(), 64, "seed {seed}: every tag is back");
    }
}

fn opened_bios(bench: &mut Bench) -> Vec<(Box<Bio>, bool)> {
    let mut taken = Vec::new();
    bench.queue.take_bios(SENT, &mut |bio| taken.push(open(bio)));
    taken
}
