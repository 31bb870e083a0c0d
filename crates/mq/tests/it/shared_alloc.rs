//! After start a shared queue allocates nothing, for polling and for sleeping threads.

use std::sync::{Arc, Barrier};
use std::thread;

use blkyard_mem::CountingAllocator;
use blkyard_mq::{
    Bio, BlockDevice, DeviceInfo, HwQueue, HwQueueConfig, NullConfig, NullDevice, Op, Parker, QueueLimits, Segment,
    SwQueue,
};

use crate::common::{TimedParker, now_ns};

const BATCH: usize = 32;

fn steady(threads: usize, latency_ns: u64, sleeps: bool, rounds: usize) {
    let info = DeviceInfo {
        name: "test".into(),
        capacity_sectors: 1024,
        limits: QueueLimits::default(),
        read_only: false,
        volatile_cache: false,
        fua: false,
        ..DeviceInfo::default()
    };
    let device = NullDevice::new(info.clone(), NullConfig { latency_ns, bytes_per_s: 0 });
    let hw = HwQueue::new(device.queue(16), Arc::new(info), HwQueueConfig { depth: 16, ..HwQueueConfig::default() });
    let parkers = (0..threads).map(|_| TimedParker::new() as Arc<dyn Parker>).collect();
    let start = Barrier::new(threads);
    thread::scope(|scope| {
        for mut queue in SwQueue::share(hw, (), BATCH, parkers) {
            let start = &start;
            scope.spawn(move || {
                let mut free: Vec<_> = (0..BATCH).map(|_| Bio::with_capacity(1)).collect();
                start.wait();
                let before = CountingAllocator::count();
                assert!(before > 0, "the allocator counts");
                for _ in 0..rounds {
                    while let Some(mut bio) = free.pop() {
                        bio.reset();
                        bio.op = Op::Read;
                        bio.sectors = 8;
                        bio.segments.push(Segment { region: 0, offset: 0, len: 4096 });
                        queue.submit(bio);
                    }
                    queue.ring(&now_ns);
                    let mut sink = |bio| free.push(bio);
                    let took = if sleeps { queue.wait(&now_ns, &mut sink) } else { queue.poll(&now_ns, &mut sink) };
                    if took == 0 {
                        thread::yield_now();
                    }
                }
                assert_eq!(CountingAllocator::count() - before, 0);
                queue.leave(&now_ns, &mut |_| ());
            });
        }
    });
}

#[test]
fn one_thread_alone_allocates_nothing() {
    steady(1, 0, false, 1000);
    steady(1, 10_000, true, 100);
}

#[test]
fn threads_that_share_allocate_nothing() {
    steady(4, 0, false, 1000);
    steady(4, 0, true, 1000);
    steady(4, 10_000, true, 200);
}
