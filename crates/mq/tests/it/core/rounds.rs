//! Many queues, round after round: no bio is lost (the regression of June 2023, when virtio-blk ended requests in
//! batches and a machine with many queues hung).

use std::sync::Arc;

use blkyard_mq::{
    Bio, BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, Merging, NullConfig, NullDevice, NullQueue, Op, OpClass,
    RamDevice, Region, RegionTable, Segment, Status,
};

use crate::core::hand::{Bench, bio, disk, read};

const DISKS: usize = 16;
const QUEUES: usize = 4;
const ROUNDS: u64 = 40;
const LATENCY_NS: u64 = 700;

fn queues() -> Vec<HwQueue<NullQueue>> {
    let config = HwQueueConfig { depth: 8, bios_max: 64, merging: Merging::Off, ..HwQueueConfig::default() };
    (0..DISKS)
        .flat_map(|disk_number| {
            // Some answer on the spot, some later.
            let latency_ns = if disk_number % 2 == 0 { 0 } else { LATENCY_NS };
            let device = NullDevice::new(disk(), NullConfig { latency_ns, bytes_per_s: 0 });
            (0..QUEUES)
                .map(|_| HwQueue::new(device.queue(8), Arc::new(device.info().clone()), config))
                .collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn bursts_of_small_reads_to_sixteen_disks_with_four_queues_each_all_come_back() {
    let mut queues = queues();
    let mut now_ns = 0;
    for round in 0..ROUNDS {
        let burst = 1 + round as usize * 7 % 64;
        let mut seen = vec![vec![false; burst]; queues.len()];
        for queue in &mut queues {
            (0..burst as u64).for_each(|n| {
                let mut bio = read(n * 8);
                bio.cookie = n;
                queue.submit(bio);
            });
        }
        // Turns of the lane until all are idle: as many as a burst needs with eight tags, and no more.
        let mut turns = 0;
        while queues.iter().any(|queue| !queue.is_idle()) {
            for (queue, seen) in queues.iter_mut().zip(&mut seen) {
                let end = |bio: Box<blkyard_mq::Bio>| {
                    assert!(!std::mem::replace(&mut seen[bio.cookie as usize], true), "twice");
                };
                queue.reap(&mut (), now_ns, &mut { end });
                queue.issue(&mut (), now_ns);
            }
            now_ns += LATENCY_NS;
            turns += 1;
            assert!(turns <= burst.div_ceil(8) + 1, "round {round}: {turns} turns for {burst} bios");
        }
        assert!(seen.iter().flatten().all(|seen| *seen), "round {round}: a bio is lost");
    }
}

/// A bio of megabytes does not block the lane's other queues: inline work of the driver is spread over turns.
#[test]
fn long_requests_to_memory_are_done_in_turns_of_so_many_bytes() {
    const TURN_BYTES: u64 = 512 << 10;
    const BIO_BYTES: u32 = 64 << 20;
    let info = DeviceInfo { capacity_sectors: 256 << 11, ..disk() };
    let longest_bytes = u64::from(info.limits.sectors_max) << 9;
    let device = RamDevice::new(info.clone(), NullConfig::default()).unwrap();
    let region = Region::anonymous(BIO_BYTES as usize).unwrap();
    let config = HwQueueConfig::default();
    for op in [Op::Read, Op::Write, Op::WriteZeroes, Op::Discard] {
        let mut queue = HwQueue::new(device.queue(config.depth), Arc::new(info.clone()), config);
        queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
        queue.set_turn_bytes(TURN_BYTES);
        for number in 0..3 {
            let mut bio = Bio::with_capacity(1);
            (bio.op, bio.sector, bio.sectors) = (op, number * u64::from(BIO_BYTES >> 9), BIO_BYTES >> 9);
            if op.has_data() {
                bio.segments.push(Segment { region: 0, offset: 0, len: BIO_BYTES });
            }
            queue.submit(bio);
        }
        let (mut turns, mut ended, mut moved) = (0, 0, 0);
        while !queue.is_idle() {
            ended += queue.reap(&mut (), turns, &mut |bio| assert_eq!(bio.status, Status::Ok));
            queue.issue(&mut (), turns);
            let stats = queue.stats().snapshot();
            assert!(queue.has_work() || queue.is_idle(), "{op:?}: nothing says that there is more to do");
            turns += 1;
            // Each request is counted when it is reaped, one turn later.
            let now_moved: u64 = OpClass::ALL.iter().map(|class| stats.op(*class).bytes).sum();
            let longest = if op.has_data() { longest_bytes } else { u64::from(info.limits.discard_sectors_max) << 9 };
            assert!(now_moved - moved <= TURN_BYTES.max(longest) + longest, "{op:?}: {} in a turn", now_moved - moved);
            moved = now_moved;
        }
        assert_eq!(ended, 3);
    }
}

#[test]
fn requests_of_several_rounds_and_kinds_that_end_together_are_each_counted_with_their_own_time() {
    let mut bench = Bench::deep(8);
    let rounds =
        [(100, [read(0), read(100)]), (200, [bio(Op::Write, 200, 16), read(300)]), (300, [read(400), read(500)])];
    for (now_ns, bios) in rounds {
        bench.submit_all(bios);
        bench.queue.issue(&mut (), now_ns);
    }
    for (sector, status) in
        [(0, Status::Ok), (200, Status::Ok), (100, Status::Ok), (400, Status::Io), (500, Status::Ok), (300, Status::Ok)]
    {
        bench.device().end(|held| held.sector == sector, status);
    }
    bench.now_ns = 1000;
    assert_eq!((bench.reap(), bench.queue.is_idle()), (6, true));
    let stats = bench.queue.stats().snapshot();
    let (reads, writes) = (stats.op(OpClass::Read), stats.op(OpClass::Write));
    assert_eq!((reads.ios, reads.errors, reads.sum_ns), (5, 1, 2 * 900 + 800 + 2 * 700));
    assert_eq!((reads.min_ns, reads.max_ns, reads.latency.samples()), (700, 900, 5));
    assert_eq!((writes.ios, writes.bytes, writes.sum_ns), (1, 16 * 512, 800));
}
