//! The flush machine in its queue: which bios share a flush, and the propagation of errors (Linux `block/blk-flush.c`).

use std::sync::Arc;

use blkyard_mq::{Bio, BioFlags, BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, Op, Region, RegionTable, Status};
use blkyard_sim::{ChaosConfig, ChaosDevice, ChaosQueue};

use crate::core::hand::{self, bio, disk, with};

struct Bench(hand::Bench);

impl Bench {
    fn new(volatile_cache: bool, fua: bool) -> Bench {
        Bench(hand::Bench::new(DeviceInfo { volatile_cache, fua, ..disk() }, HwQueueConfig::default()))
    }

    fn submit(&mut self, cookie: u64, op: Op, flags: BioFlags) {
        let sectors = if op == Op::Flush { 0 } else { 8 };
        let mut bio = with(bio(op, cookie * 1000, sectors), flags);
        bio.cookie = cookie;
        self.0.submit(bio);
    }

    fn ops(&mut self) -> Vec<Op> {
        self.0.device().ops()
    }

    fn end(&mut self, op: Op, status: Status) {
        self.0.device().end(|held| held.op == op, status);
        self.0.turn();
    }
}

impl std::ops::Deref for Bench {
    type Target = hand::Bench;
    fn deref(&self) -> &hand::Bench {
        &self.0
    }
}

impl std::ops::DerefMut for Bench {
    fn deref_mut(&mut self) -> &mut hand::Bench {
        &mut self.0
    }
}

#[test]
fn without_a_volatile_cache_a_flush_is_over_at_once_and_a_write_is_a_write() {
    let mut bench = Bench::new(false, false);
    bench.submit(1, Op::Flush, BioFlags::empty());
    bench.submit(2, Op::Write, BioFlags::FUA | BioFlags::PREFLUSH);
    bench.turn();
    assert_eq!((bench.take_ended(), bench.ops()), (vec![(1, Status::Ok)], vec![Op::Write]));
    assert_eq!(bench.device().held[0].flags, BioFlags::empty());
    bench.end(Op::Write, Status::Ok);
    assert_eq!(bench.take_ended(), [(2, Status::Ok)]);
}

#[test]
fn a_device_with_fua_of_its_own_gets_the_flag_and_no_flush_after() {
    let mut bench = Bench::new(true, true);
    bench.submit(1, Op::Write, BioFlags::FUA);
    bench.turn();
    assert_eq!(bench.device().held[0].flags, BioFlags::FUA);
    bench.end(Op::Write, Status::Ok);
    assert_eq!((bench.take_ended(), bench.ops()), (vec![(1, Status::Ok)], vec![]));
}

#[test]
fn a_write_with_both_is_flush_data_flush_and_ends_once() {
    let mut bench = Bench::new(true, false);
    bench.submit(1, Op::Write, BioFlags::FUA | BioFlags::PREFLUSH);
    bench.turn();
    assert_eq!(bench.ops(), [Op::Flush]);
    bench.end(Op::Flush, Status::Ok);
    assert_eq!((bench.ops(), bench.ended.len()), (vec![Op::Write], 0));
    bench.end(Op::Write, Status::Ok);
    assert_eq!((bench.ops(), bench.ended.len()), (vec![Op::Flush], 0), "its data is over, the bio is not");
    bench.end(Op::Flush, Status::Ok);
    assert_eq!(bench.take_ended(), [(1, Status::Ok)]);
    assert!(bench.queue.is_idle());
}

#[test]
fn all_who_wait_share_one_flush_and_who_comes_later_takes_the_next() {
    let mut bench = Bench::new(true, false);
    bench.submit(1, Op::Flush, BioFlags::empty());
    bench.turn();
    (2..6).for_each(|cookie| bench.submit(cookie, Op::Flush, BioFlags::empty()));
    bench.turn();
    assert_eq!(bench.ops(), [Op::Flush], "one at a time");
    bench.end(Op::Flush, Status::Ok);
    // The flush in flight was issued before the others arrived: it does not cover their writes.
    assert_eq!((bench.take_ended(), bench.ops()), (vec![(1, Status::Ok)], vec![Op::Flush]));
    bench.end(Op::Flush, Status::Ok);
    assert_eq!(bench.take_ended(), (2..6).map(|cookie| (cookie, Status::Ok)).collect::<Vec<_>>());
    assert_eq!(bench.queue.stats().snapshot().flushes, 2);
}

#[test]
fn a_flush_waits_for_data_of_other_sequences_but_not_for_ever() {
    let mut bench = Bench::new(true, false);
    bench.submit(1, Op::Write, BioFlags::FUA);
    bench.turn();
    bench.submit(2, Op::Flush, BioFlags::empty());
    bench.turn();
    assert_eq!(bench.ops(), [Op::Write], "the write will want a flush too: it may be shared");
    bench.end(Op::Write, Status::Ok);
    assert_eq!(bench.ops(), [Op::Flush]);
    bench.submit(3, Op::Write, BioFlags::FUA);
    bench.end(Op::Flush, Status::Ok);
    let mut ended = bench.take_ended();
    ended.sort_unstable_by_key(|(cookie, _)| *cookie);
    assert_eq!(ended, [(1, Status::Ok), (2, Status::Ok)]);
    // Continuous data delays a flush by at most five seconds.
    bench.submit(4, Op::Flush, BioFlags::empty());
    bench.turn();
    assert_eq!(bench.ops(), [Op::Write]);
    let due_ns = bench.queue.deadline_ns::<()>().unwrap();
    assert!(due_ns <= bench.now_ns + 5_000_000_000);
    bench.now_ns = due_ns;
    bench.turn();
    assert_eq!(bench.ops(), [Op::Write, Op::Flush]);
    bench.end(Op::Flush, Status::Ok);
    assert_eq!(bench.take_ended(), [(4, Status::Ok)]);
    bench.end(Op::Write, Status::Io);
}

#[test]
fn an_error_ends_the_sequence_it_happens_in_and_a_flush_that_fails_fails_all_its_riders() {
    let mut bench = Bench::new(true, false);
    bench.submit(1, Op::Write, BioFlags::FUA);
    bench.turn();
    bench.end(Op::Write, Status::Medium);
    assert_eq!((bench.take_ended(), bench.ops()), (vec![(1, Status::Medium)], vec![]), "no flush after a lost write");
    bench.submit(2, Op::Write, BioFlags::PREFLUSH);
    bench.submit(3, Op::Flush, BioFlags::empty());
    bench.turn();
    bench.end(Op::Flush, Status::Io);
    assert_eq!((bench.take_ended(), bench.ops()), (vec![(2, Status::Io), (3, Status::Io)], vec![]));
    assert!(bench.queue.is_idle());
}

#[test]
fn a_flush_gets_the_first_tag_that_comes_back_although_others_come_as_fast() {
    let info = DeviceInfo { volatile_cache: true, fua: false, ..disk() };
    let mut bench = hand::Bench::new(info, HwQueueConfig { depth: 2, ..HwQueueConfig::default() });
    bench.submit_all([0, 1000].map(|sector| bio(Op::Write, sector, 8)));
    bench.turn();
    bench.submit(bio(Op::Flush, 0, 0));
    bench.turn();
    // As many arrive as end, each before the queue's next round.
    bench.device().end(|held| held.op == Op::Write, Status::Ok);
    bench.reap();
    bench.submit(bio(Op::Write, 2000, 8));
    bench.issue();
    assert_eq!(bench.device().ops(), [Op::Write, Op::Flush]);
    bench.end_all();
}

/// Two queues of a disk whose cache destages only on a flush.
struct Two {
    device: ChaosDevice,
    queues: [HwQueue<ChaosQueue>; 2],
    now_ns: u64,
}

impl Two {
    fn new() -> Two {
        let info = DeviceInfo { capacity_sectors: 64, volatile_cache: true, ..disk() };
        let config = ChaosConfig { instant_every: 0, ..ChaosConfig::quiet(1) };
        let device = ChaosDevice::new(vec![Arc::new(info)], config).unwrap();
        let region = Region::anonymous(64 * 512).unwrap();
        region.span(0, region.len()).unwrap().fill(1);
        let queue = || {
            let mut queue = HwQueue::new(device.queue(8), Arc::clone(&device.infos()[0]), HwQueueConfig::default());
            queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
            queue
        };
        let queues = [queue(), queue()];
        Two { device, queues, now_ns: 0 }
    }

    /// Hands a bio to the device, through this queue.
    fn begin(&mut self, queue: usize, bio: Box<Bio>) {
        self.queues[queue].submit(bio);
        self.queues[queue].issue(&mut (), self.now_ns);
    }

    /// Rounds of this queue until it is empty.
    fn end(&mut self, queue: usize) {
        while !self.queues[queue].is_idle() {
            self.now_ns += 1;
            self.queues[queue].reap(&mut (), self.now_ns, &mut |bio| assert!(bio.status.is_ok()));
            self.queues[queue].issue(&mut (), self.now_ns);
        }
    }

    /// Sectors 0 and 8 after a power failure.
    fn stable(&self) -> [u8; 2] {
        [0, 8].map(|sector| {
            let mut bytes = [0; 512];
            self.device.read_stable(0, sector, &mut bytes);
            bytes[0]
        })
    }
}

#[test]
fn a_flush_covers_what_completed_on_another_queue_before_it_and_nothing_after() {
    let mut two = Two::new();
    two.begin(0, bio(Op::Write, 0, 8));
    two.end(0);
    assert_eq!(two.stable(), [0, 0]);
    two.begin(1, bio(Op::Flush, 0, 0));
    // While the flush is at the device, through the other queue.
    two.begin(0, bio(Op::Write, 8, 8));
    two.end(0);
    two.end(1);
    assert_eq!(two.stable(), [1, 0]);
    // So the next flush is necessary, though this queue has written nothing.
    two.begin(1, bio(Op::Flush, 0, 0));
    two.end(1);
    assert_eq!(two.stable(), [1, 1]);
}
