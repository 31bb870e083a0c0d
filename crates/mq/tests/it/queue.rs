//! A hardware queue from the outside: each bio comes back once, for any limits and depth.

use std::sync::Arc;

use blkyard_mq::{
    Bio, BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, NullConfig, NullDevice, Op, OpClass, QueueLimits, RamDevice,
    RamQueue, Region, RegionTable, Segment, Status,
};
use proptest::prelude::*;

const CAPACITY: u64 = 2048;

fn info(limits: QueueLimits) -> DeviceInfo {
    limits.check().unwrap();
    DeviceInfo {
        name: "test".into(),
        capacity_sectors: CAPACITY,
        limits,
        read_only: false,
        volatile_cache: false,
        fua: false,
        ..DeviceInfo::default()
    }
}

fn memory(bytes: usize) -> (Arc<RegionTable>, Arc<Region>) {
    let region = Region::anonymous(bytes).unwrap();
    (Arc::new(RegionTable::new(vec![Arc::clone(&region)])), region)
}

fn bio(op: Op, sector: u64, offset: u64, bytes: u32) -> Box<Bio> {
    let mut bio = Bio::with_capacity(4);
    bio.op = op;
    bio.sector = sector;
    bio.sectors = bytes / 512;
    if op.has_data() {
        bio.segments.push(Segment { region: 0, offset, len: bytes });
    }
    bio
}

/// Runs the queue until it is idle; returns the bios in the order they ended.
fn drain(queue: &mut HwQueue<RamQueue>) -> Vec<Box<Bio>> {
    let mut ended = Vec::new();
    for now in 0.. {
        queue.issue(&mut (), now);
        queue.reap(&mut (), now + 1, &mut |bio| ended.push(bio));
        if queue.is_idle() {
            break;
        }
        assert!(now < 10_000, "the queue does not come to rest");
    }
    ended
}

#[test]
fn what_is_written_is_read_back_through_tight_limits() {
    let limits = QueueLimits { sectors_max: 8, segment_bytes_max: 1024, segments_max: 3, ..QueueLimits::default() };
    let device = RamDevice::new(info(limits), NullConfig::default()).unwrap();
    let (table, region) = memory(128 * 1024);
    let pattern: Vec<u8> = (0..64 * 1024).map(|i| (i / 7) as u8).collect();
    region.span(0, pattern.len()).unwrap().copy_from_slice(&pattern);
    let config = HwQueueConfig { depth: 2, bios_max: 4, ..HwQueueConfig::default() };
    let mut queue = HwQueue::new(device.queue(2), Arc::new(device.info().clone()), config);
    queue.set_memory(&mut (), table);
    queue.submit(bio(Op::Write, 100, 0, 64 * 1024));
    queue.submit(bio(Op::Read, 100, 64 * 1024, 64 * 1024));
    let ended = drain(&mut queue);
    assert!(ended.iter().all(|bio| bio.status == Status::Ok));
    let mut back = vec![0; pattern.len()];
    region.span(64 * 1024, back.len()).unwrap().copy_to_slice(&mut back);
    assert!(back == pattern);
    let stats = queue.stats().snapshot();
    assert_eq!(stats.op(OpClass::Write).bytes, 64 * 1024);
    // 8 sectors at most, but three segments of 1 KiB only: 3 KiB a request.
    assert_eq!(stats.op(OpClass::Write).ios, 22);
}

#[test]
fn a_bio_that_makes_no_sense_comes_back_invalid_and_the_rest_go_on() {
    let device = RamDevice::new(info(QueueLimits::default()), NullConfig::default()).unwrap();
    let (table, _region) = memory(8192);
    let mut queue = HwQueue::new(
        device.queue(4),
        Arc::new(device.info().clone()),
        HwQueueConfig { depth: 4, ..HwQueueConfig::default() },
    );
    queue.set_memory(&mut (), table);
    queue.submit(bio(Op::Read, CAPACITY - 1, 0, 1024));
    queue.submit(bio(Op::Read, 0, 8192 - 512, 1024));
    queue.submit(bio(Op::Read, 0, 0, 1024));
    let mut statuses: Vec<_> = drain(&mut queue).iter().map(|bio| bio.status).collect();
    statuses.sort_by_key(|status| *status as u8);
    assert_eq!(statuses, [Status::Ok, Status::Invalid, Status::Invalid]);
    assert_eq!(queue.stats().snapshot().refused, 1, "only the first never reached the device");
}

#[test]
fn a_read_only_device_refuses_what_would_change_it() {
    let (table, _region) = memory(8192);
    let info = DeviceInfo { read_only: true, ..info(QueueLimits::default()) };
    let device = RamDevice::new(info.clone(), NullConfig::default()).unwrap();
    let mut queue =
        HwQueue::new(device.queue(4), Arc::new(info), HwQueueConfig { depth: 4, ..HwQueueConfig::default() });
    queue.set_memory(&mut (), table);
    for (op, want) in [
        (Op::Write, Status::NotSupported),
        (Op::Discard, Status::NotSupported),
        (Op::WriteZeroes, Status::NotSupported),
        (Op::Read, Status::Ok),
        (Op::Flush, Status::Ok),
    ] {
        queue.submit(bio(op, 0, 0, 512));
        assert_eq!(drain(&mut queue)[0].status, want, "{op:?}");
    }
}

#[test]
fn latency_and_deadline_follow_the_clock_that_is_passed_in() {
    let device = NullDevice::new(info(QueueLimits::default()), NullConfig { latency_ns: 1000, bytes_per_s: 0 });
    let (table, _region) = memory(4096);
    let mut queue = HwQueue::new(
        device.queue(4),
        Arc::new(device.info().clone()),
        HwQueueConfig { depth: 4, slow_ns: 500, ..HwQueueConfig::default() },
    );
    queue.set_memory(&mut (), table);
    queue.submit(bio(Op::Read, 0, 0, 512));
    assert_eq!(queue.issue(&mut (), 5000), 1);
    assert_eq!(queue.deadline_ns::<()>(), Some(6000));
    assert_eq!(queue.reap(&mut (), 5999, &mut |_| ()), 0);
    queue.mark_slow(5999);
    assert_eq!((queue.stats().snapshot().slow, queue.stats().snapshot().slow_now), (1, 1));
    assert_eq!(queue.reap(&mut (), 6100, &mut |_| ()), 1);
    let stats = queue.stats().snapshot();
    assert_eq!((stats.slow, stats.slow_now), (1, 0));
    assert_eq!(stats.op(OpClass::Read).max_ns, 1100);
}

proptest! {
    /// A bio ends exactly once, with its cookie, and the memory has the device's data.
    #[test]
    fn every_bio_ends_once(
        depth in 1_usize..8, bios_max in 1_usize..12,
        sectors_max in 1_u32..16,
        submissions in proptest::collection::vec((0_u64..CAPACITY, 0_u32..40, 0_u8..5), 1..80),
    ) {
        let limits = QueueLimits { sectors_max, discard_sectors_max: 9, write_zeroes_sectors_max: 7, ..QueueLimits::default() };
        let device = RamDevice::new(info(limits), NullConfig::default()).unwrap();
        let (table, _region) = memory(64 * 512);
        let config = HwQueueConfig { depth, bios_max, ..HwQueueConfig::default() };
        let mut queue = HwQueue::new(device.queue(depth), Arc::new(device.info().clone()), config);
    queue.set_memory(&mut (), table);
        let mut ended = vec![0; submissions.len()];
        let mut wanted = submissions.iter().enumerate();
        let mut submitted = 0;
        for now in 0_u64.. {
            while queue.room() > 0 {
                let Some((index, (sector, sectors, op))) = wanted.next() else { break };
                let op = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes][usize::from(*op)];
                let mut bio = bio(op, *sector, 0, sectors * 512);
                bio.cookie = index as u64;
                queue.submit(bio);
                submitted += 1;
            }
            queue.issue(&mut (), now);
            queue.reap(&mut (), now, &mut |bio| {
                ended[bio.cookie as usize] += 1;
                let fits = bio.op == Op::Flush || (bio.sectors > 0 && bio.sector + u64::from(bio.sectors) <= CAPACITY);
                assert_eq!(bio.status == Status::Ok, fits, "{bio:?}");
            });
            if queue.is_idle() && submitted == submissions.len() {
                break;
            }
            prop_assert!(now < 10_000);
        }
        prop_assert!(ended.iter().all(|n| *n == 1));
    }
}
