//! Threads that share one hardware queue of a real file, over a ring that changes owners.

use std::sync::Arc;

use blkyard_mq::{
    Bio, BioFlags, BlockDevice, HwQueue, HwQueueConfig, Op, Parker, Region, RegionTable, Segment, Status, SwQueue,
};
use blkyard_os::{FileConfig, FileDevice, Ring, RingConfig, RingParker, now_ns};

const THREADS: usize = 4;
const DEPTH: usize = 16;
const BLOCKS: u64 = 512;

#[test]
fn more_threads_than_queues_write_and_read_back_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(THREADS as u64 * BLOCKS * 4096).unwrap();
    let device = FileDevice::open(FileConfig::new(path)).unwrap();
    let mut ring = Ring::new(RingConfig { single_owner: false, ..RingConfig::default() }).unwrap();
    let parkers: Vec<Arc<dyn Parker>> =
        (0..THREADS).map(|_| RingParker::new(&ring).unwrap() as Arc<dyn Parker>).collect();
    let config = HwQueueConfig { depth: 8, bios_max: 32, ..HwQueueConfig::default() };
    let mut hw = HwQueue::new(device.queue(config.depth), Arc::new(device.info().clone()), config);
    let regions: Vec<_> = (0..THREADS).map(|_| Region::anonymous(DEPTH * 4096).unwrap()).collect();
    hw.set_memory(&mut ring, Arc::new(RegionTable::new(regions.clone())));
    let queues = SwQueue::share(hw, ring, DEPTH, parkers);
    // Requests that a thread has issued for others stay in the kernel: no thread ends before all are done.
    let done = std::sync::Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for (thread, (mut queue, region)) in queues.into_iter().zip(&regions).enumerate() {
            let done = &done;
            scope.spawn(move || {
                for op in [Op::Write, Op::Read] {
                    let mut free: Vec<_> = (0..DEPTH as u64).map(|slot| (slot, Bio::with_capacity(1))).collect();
                    let (mut next, mut ended) = (0, 0);
                    while ended < BLOCKS {
                        while next < BLOCKS
                            && let Some((slot, mut bio)) = free.pop()
                        {
                            bio.reset();
                            bio.op = op;
                            bio.sectors = 8;
                            bio.sector = (thread as u64 * BLOCKS + next) * 8;
                            bio.cookie = slot | next << 8;
                            bio.segments.push(Segment { region: thread as u32, offset: slot * 4096, len: 4096 });
                            let span = region.span(slot * 4096, 4096).unwrap();
                            span.fill(if op == Op::Write { pattern(thread, next) } else { 0 });
                            queue.submit(bio);
                            next += 1;
                        }
                        queue.ring(&now_ns);
                        queue.wait(&now_ns, &mut |bio| {
                            assert_eq!(bio.status, Status::Ok);
                            let (slot, block) = (bio.cookie & 0xff, bio.cookie >> 8);
                            let mut bytes = [0; 4096];
                            region.span(slot * 4096, 4096).unwrap().copy_to_slice(&mut bytes);
                            assert_eq!(bytes, [pattern(thread, block); 4096], "{op:?} of block {block}");
                            free.push((slot, bio));
                            ended += 1;
                        });
                    }
                }
                queue.leave(&now_ns, &mut |_| ());
                done.wait();
            });
        }
    });
}

#[test]
fn request_of_several_steps_does_not_wait_for_a_time_limit() {
    /// More than fit into the limit if a step is announced only as a sleep ends, after 1 s.
    const REQUESTS: u64 = 40;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(REQUESTS * 4096).unwrap();
    let device = FileDevice::open(FileConfig::new(path)).unwrap();
    let ring = Ring::new(RingConfig { single_owner: false, ..RingConfig::default() }).unwrap();
    let parkers: Vec<Arc<dyn Parker>> = vec![RingParker::new(&ring).unwrap(), RingParker::new(&ring).unwrap()];
    let config = HwQueueConfig { depth: 8, bios_max: 32, ..HwQueueConfig::default() };
    let hw = HwQueue::new(device.queue(config.depth), Arc::new(device.info().clone()), config);
    let mut queues = SwQueue::share(hw, ring, DEPTH, parkers).into_iter();
    let (Some(mut queue), Some(other)) = (queues.next(), queues.next()) else { unreachable!("two were made") };
    let start = std::time::Instant::now();
    for request in 0..REQUESTS {
        let mut bio = Bio::with_capacity(1);
        bio.op = Op::WriteZeroes;
        bio.flags = BioFlags::FUA;
        (bio.sector, bio.sectors) = (request * 8, 8);
        queue.submit(bio);
        queue.ring(&now_ns);
        let mut done = 0;
        while done == 0 {
            queue.wait(&now_ns, &mut |bio| {
                assert_eq!(bio.status, Status::Ok);
                done += 1;
            });
        }
    }
    assert!(start.elapsed().as_secs() < REQUESTS / 2, "{:?}", start.elapsed());
    [queue, other].into_iter().for_each(|queue| queue.leave(&now_ns, &mut |_| ()));
}

fn pattern(thread: usize, block: u64) -> u8 {
    (block * 7 + thread as u64 * 31 + 1) as u8
}
