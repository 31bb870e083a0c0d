//! After start the data path allocates nothing: a hardware queue in its steady state, over the null and the RAM device.

use std::sync::Arc;

use blkyard_mem::CountingAllocator;
use blkyard_mq::{
    Bio, BlockDevice, DeadlineConfig, DeviceInfo, Driver, HwQueue, HwQueueConfig, KyberConfig, NullConfig, NullDevice,
    Op, QueueLimits, RamDevice, RateConfig, RateLimit, Region, RegionTable, SchedulerConfig, Segment, SliceOrder,
    TimesliceConfig,
};

const BATCH: usize = 32;
const OPS: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];

fn info(limits: QueueLimits) -> DeviceInfo {
    let limits = QueueLimits { discard_sectors_max: 64, write_zeroes_sectors_max: 64, ..limits };
    DeviceInfo {
        name: "test".into(),
        capacity_sectors: 1 << 16,
        limits,
        read_only: false,
        volatile_cache: false,
        fua: false,
        ..DeviceInfo::default()
    }
}

/// Rounds of a full batch of all operations, some of which are refused; the count of allocations must not change.
fn steady<D: Driver<()>>(driver: D, info: &DeviceInfo, depth: usize, scheduler: SchedulerConfig) {
    steady_within(driver, info, depth, scheduler, RateConfig::default());
}

/// The same within a limit.
fn steady_within<D: Driver<()>>(
    driver: D,
    info: &DeviceInfo,
    depth: usize,
    scheduler: SchedulerConfig,
    rate: RateConfig,
) {
    let config = HwQueueConfig { depth, bios_max: BATCH, scheduler, ..HwQueueConfig::default() };
    let mut queue = HwQueue::new(driver, Arc::new(info.clone()), config);
    queue.set_rates(0, RateLimit::new(rate).map(Arc::new).into_iter().collect());
    let Ok(region) = Region::anonymous(BATCH * 16384) else { panic!("no memory for the test") };
    queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![region])));
    let mut free: Vec<_> = (0..BATCH).map(|_| Bio::with_capacity(2)).collect();
    let mut now_ns = 1;
    let mut before = 0;
    for round in 0..2000_u64 {
        if round == 100 {
            before = CountingAllocator::count();
        }
        let mut slot = 0;
        while let Some(mut bio) = free.pop() {
            slot += 1;
            bio.reset();
            bio.op = OPS[((round + slot) % 5) as usize];
            // Now and then one that lies beyond the end.
            bio.sector = if slot == 7 { 1 << 20 } else { (round * 31 + slot * 97) % 60_000 / 8 * 8 };
            bio.sectors = 32;
            bio.stream = (round * 7 + slot) as u32 % 1000;
            if bio.op.has_data() {
                let offset = (slot - 1) * 16384;
                bio.segments.push(Segment { region: 0, offset, len: 4096 });
                bio.segments.push(Segment { region: 0, offset: offset + 4096, len: 12288 });
            }
            queue.submit(bio);
        }
        while !queue.is_idle() {
            queue.issue(&mut (), now_ns);
            now_ns += 1000;
            queue.reap(&mut (), now_ns, &mut |bio| free.push(bio));
        }
        queue.mark_slow(now_ns);
    }
    assert!(before > 0, "the allocator counts");
    assert_eq!(CountingAllocator::count() - before, 0);
}

/// All schedulers, and none; slices so short that streams take turns.
fn schedulers() -> [SchedulerConfig; 5] {
    let slices =
        |order| SchedulerConfig::Timeslice(TimesliceConfig { slice_us: 2, order, ..TimesliceConfig::default() });
    [
        SchedulerConfig::None,
        SchedulerConfig::Deadline(DeadlineConfig::default()),
        SchedulerConfig::Kyber(KyberConfig::default()),
        slices(SliceOrder::Arrival),
        slices(SliceOrder::Lowest),
    ]
}

#[test]
fn a_queue_in_its_steady_state_allocates_nothing() {
    // As they come, and with limits that cut every bio into many.
    let tight = QueueLimits { sectors_max: 8, segment_bytes_max: 2048, segments_max: 3, ..QueueLimits::default() };
    for limits in [QueueLimits::default(), tight] {
        let info = info(limits);
        for latency_ns in [0, 5000] {
            let config = NullConfig { latency_ns, bytes_per_s: 0 };
            for depth in [1, 8, 64] {
                for scheduler in schedulers() {
                    steady(NullDevice::new(info.clone(), config).queue(depth), &info, depth, scheduler);
                }
                match RamDevice::new(info.clone(), config) {
                    Ok(device) => steady(device.queue(depth), &info, depth, SchedulerConfig::None),
                    Err(error) => panic!("no memory for the test: {error}"),
                }
            }
        }
    }
}

#[test]
fn a_queue_that_is_limited_allocates_nothing_either() {
    let info = info(QueueLimits::default());
    let rate = RateConfig { iops: 1_000_000, bytes_per_s: 4 << 30, burst_ms: 1 };
    for scheduler in schedulers() {
        let device = NullDevice::new(info.clone(), NullConfig::default());
        steady_within(device.queue(8), &info, 8, scheduler, rate);
    }
}
