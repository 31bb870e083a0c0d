//! Registered buffers of a running queue: what is refused, and when a buffer is gone.

use std::sync::Arc;

use blkyard_mq::{
    Bio, BufferAccess, HwQueueConfig, Op, QueueLimits, Region, RegionTable, RegisteredBuffer, SchedulerConfig, Segment,
    Status,
};

use crate::core::hand::{Bench, Held, bio, disk, disk_of, read};

/// A queue with memory of a mebibyte.
fn bench(limits: QueueLimits, config: HwQueueConfig) -> (Bench, Arc<Region>) {
    let mut bench = Bench::new(disk_of(limits), config);
    let region = Region::anonymous(1 << 20).unwrap();
    bench.queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
    (bench, region)
}

fn register(bench: &mut Bench, region: &Arc<Region>, access: BufferAccess) -> Arc<RegisteredBuffer> {
    let buffer = RegisteredBuffer::new(region, 0, region.len() as u64, access).unwrap();
    assert!(bench.queue.add_buffer(&mut (), &buffer));
    buffer
}

/// The bio with its memory in the buffer.
fn within(buffer: &RegisteredBuffer, mut bio: Box<Bio>) -> Box<Bio> {
    for segment in &mut bio.segments {
        segment.region = buffer.id().number();
        segment.offset %= 1 << 20;
    }
    bio
}

#[test]
fn a_buffer_drains_while_the_queue_runs() {
    for scheduler in [SchedulerConfig::None, SchedulerConfig::Deadline(blkyard_mq::DeadlineConfig::default())] {
        let config = HwQueueConfig { depth: 4, scheduler, ..HwQueueConfig::default() };
        let (mut bench, region) = bench(disk().limits, config);
        let buffer = register(&mut bench, &region, BufferAccess::ReadWrite);
        bench.device().room = 2;
        bench.submit(within(&buffer, read(0)));
        bench.submit(read(1000));
        bench.turn();
        assert_eq!(bench.device().sectors(), [0, 1000]);
        // These wait: for the device, and for a tag.
        bench.submit_all([2000, 4000, 6000, 8000].map(|sector| within(&buffer, read(sector))));
        bench.submit_all([3000, 5000].map(read));
        bench.turn();
        assert!(!bench.queue.remove_buffer(&mut (), buffer.id()), "the device has a request of it");
        bench.turn();
        bench.submit(within(&buffer, read(9000)));
        (0..4).for_each(|_| bench.turn());
        let refused = bench.take_ended();
        assert!(!refused.is_empty() && refused.iter().all(|(_, status)| *status == Status::Invalid), "{refused:?}");
        assert!(!bench.queue.remove_buffer(&mut (), buffer.id()));
        let memory = Arc::clone(bench.queue.memory());
        assert!(memory.resolve(buffer.segment(0, 4096)).is_some(), "the device may still complete into it");
        drop(memory);
        bench.end(0, Status::Ok);
        assert!(bench.queue.remove_buffer(&mut (), buffer.id()));
        assert!(bench.queue.memory().resolve(buffer.segment(0, 4096)).is_none());
        bench.device().room = 4;
        bench.turn();
        // One that waited all the time for a tag: a driver finds no memory behind it.
        assert!(bench.queue.memory().plain(buffer.segment(0, 1)).is_none());
        let is_stale = |held: &Held| held.segments.iter().any(|segment| segment.is_registered());
        while !bench.queue.is_idle() {
            while bench.device().held.iter().any(is_stale) {
                bench.device().end(is_stale, Status::Invalid);
            }
            while !bench.device().held.is_empty() {
                bench.device().end(|_| true, Status::Ok);
            }
            bench.turn();
        }
        let mut ended: Vec<_> = refused.into_iter().chain(bench.take_ended()).collect();
        ended.sort_unstable_by_key(|(sector, _)| *sector);
        let ended: Vec<_> = ended.into_iter().map(|(sector, status)| (sector / 1000, status.is_ok())).collect();
        let each = [0, 1, 2, 3, 4, 5, 6, 8, 9].map(|sector| (sector, [0, 1, 3, 5].contains(&sector)));
        assert_eq!(ended, each);
        assert_eq!(Arc::strong_count(&buffer), 1, "the queue has let go of it");
    }
}

#[test]
fn a_buffer_without_io_is_gone_at_once() {
    let (mut bench, region) = bench(disk().limits, HwQueueConfig::default());
    let [one, other] = [BufferAccess::ReadWrite; 2].map(|access| register(&mut bench, &region, access));
    bench.submit(within(&other, read(0)));
    bench.turn();
    assert!(bench.queue.remove_buffer(&mut (), one.id()) && bench.queue.remove_buffer(&mut (), one.id()));
    assert!(!bench.queue.remove_buffer(&mut (), other.id()));
    bench.end_all();
    assert_eq!(bench.take_ok(), [0]);
    assert!(bench.queue.remove_buffer(&mut (), other.id()));
}

#[test]
fn a_read_into_a_read_only_buffer_never_reaches_the_device() {
    for depth in [1, 8] {
        let config = HwQueueConfig { depth, ..HwQueueConfig::default() };
        let (mut bench, region) = bench(disk().limits, config);
        let buffer = register(&mut bench, &region, BufferAccess::ReadOnly);
        bench.submit_all([read(0), within(&buffer, read(1000)), within(&buffer, bio(Op::Write, 2000, 8)), read(3000)]);
        bench.end_all();
        let mut ended = bench.take_ended();
        ended.sort_unstable_by_key(|(sector, _)| *sector);
        assert_eq!(ended, [(0, Status::Ok), (1000, Status::Invalid), (2000, Status::Ok), (3000, Status::Ok)]);
        assert!(bench.device().given.iter().flatten().all(|sector| *sector != 1000));
    }
}

#[test]
fn parts_and_merged_bios_name_the_same_bytes_of_the_buffer() {
    let limits = QueueLimits { sectors_max: 64, segment_bytes_max: 32768, ..disk().limits };
    let (mut bench, region) = bench(limits, HwQueueConfig::default());
    let buffer = register(&mut bench, &region, BufferAccess::ReadWrite);
    // Split into three.
    bench.submit(within(&buffer, bio(Op::Write, 8, 160)));
    bench.turn();
    let pieces: Vec<Segment> = bench.device().held.iter().flat_map(|held| held.segments.clone()).collect();
    let at = |offset, len| buffer.segment(offset, len);
    assert_eq!(pieces, [at(4096, 32768), at(36864, 32768), at(69632, 16384)]);
    // The second part is drained like the others.
    assert!(!bench.queue.remove_buffer(&mut (), buffer.id()));
    bench.end(8, Status::Ok);
    bench.end(136, Status::Ok);
    assert!(!bench.queue.remove_buffer(&mut (), buffer.id()));
    bench.end_all();
    assert!(bench.queue.remove_buffer(&mut (), buffer.id()));
    assert_eq!(bench.take_ok(), [8]);
    // Merged into one.
    assert!(bench.queue.add_buffer(&mut (), &buffer));
    bench.submit_all([0, 8, 16].map(|sector| within(&buffer, read(sector))));
    bench.submit(read(24));
    bench.turn();
    let held: Vec<_> = bench.device().held.iter().map(|held| (held.sector, held.segments.clone())).collect();
    assert_eq!(held[0], (0, vec![at(0, 12288)]));
    assert_eq!(held.len(), 2, "memory of a region is not merged with that of a buffer");
    assert!(!bench.queue.remove_buffer(&mut (), buffer.id()), "a merged request names it");
    bench.end_all();
    assert!(bench.queue.remove_buffer(&mut (), buffer.id()));
}

#[test]
fn a_requeued_request_of_a_draining_buffer_is_refused() {
    let (mut bench, region) = bench(disk().limits, HwQueueConfig::default());
    let buffer = register(&mut bench, &region, BufferAccess::ReadWrite);
    bench.submit(within(&buffer, read(0)));
    bench.turn();
    assert!(!bench.queue.remove_buffer(&mut (), buffer.id()));
    bench.device().requeue(|_| true);
    (0..3).for_each(|_| bench.turn());
    assert_eq!((bench.take_ended(), bench.device().held.len()), (vec![(0, Status::Invalid)], 0));
    assert!(bench.queue.remove_buffer(&mut (), buffer.id()));
}

#[test]
fn buffers_stay_with_regions_that_stay() {
    let (mut bench, region) = bench(disk().limits, HwQueueConfig::default());
    let other = Region::anonymous(4096).unwrap();
    let buffer = register(&mut bench, &region, BufferAccess::ReadWrite);
    let foreign = RegisteredBuffer::new(&other, 0, 4096, BufferAccess::ReadWrite).unwrap();
    assert!(!bench.queue.add_buffer(&mut (), &foreign), "its region is not in the queue's memory");
    bench.queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&other), Arc::clone(&region)])));
    let plain = bench.queue.memory().plain(buffer.segment(4096, 512));
    assert_eq!(plain, Some(Segment { region: 1, offset: 4096, len: 512 }));
    bench.queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![other])));
    assert_eq!(bench.queue.memory().plain(buffer.segment(4096, 512)), None);
}

#[test]
fn a_queue_without_memory_keeps_its_buffers() {
    let (mut bench, region) = bench(disk().limits, HwQueueConfig::default());
    let [stays, goes] = [BufferAccess::ReadWrite; 2].map(|access| register(&mut bench, &region, access));
    bench.queue.set_memory(&mut (), Arc::default());
    assert_eq!(bench.queue.memory().plain(stays.segment(0, 512)), None);
    assert!(bench.queue.remove_buffer(&mut (), goes.id()), "one that is unregistered meanwhile does not come back");
    assert_eq!(Arc::strong_count(&goes), 1);
    for _ in 0..2 {
        bench.queue.set_memory(&mut (), Arc::default());
    }
    bench.queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
    assert!(bench.queue.memory().plain(stays.segment(0, 512)).is_some());
    assert_eq!(bench.queue.memory().plain(goes.segment(0, 512)), None);
    bench.submit(within(&stays, read(0)));
    bench.end_all();
    assert_eq!(bench.take_ok(), [0]);
    // Another queue is given the same memory, buffers and all.
    let mut other = Bench::new(disk(), HwQueueConfig::default());
    other.queue.set_memory(&mut (), Arc::clone(bench.queue.memory()));
    assert_eq!(other.device().buffers, [stays.id()]);
}

#[test]
fn a_region_comes_and_goes_with_io_in_flight() {
    let (mut bench, region) = bench(disk().limits, HwQueueConfig::default());
    let first = register(&mut bench, &region, BufferAccess::ReadWrite);
    bench.submit(within(&first, read(0)));
    bench.turn();
    let more = Region::anonymous(1 << 20).unwrap();
    for _ in 0..2 {
        bench.queue.add_region(&mut (), &more);
    }
    assert_eq!(bench.device().regions, [0, 1]);
    assert_eq!(bench.device().buffers, [first.id()], "buffers stay");
    let second = register(&mut bench, &more, BufferAccess::ReadWrite);
    bench.submit(within(&second, read(1000)));
    let mut plain = read(2000);
    plain.segments[0] = Segment { region: 1, offset: 0, len: 4096 };
    bench.submit(plain);
    bench.turn();
    bench.end(1000, Status::Ok);
    assert!(bench.queue.remove_buffer(&mut (), second.id()));
    assert!(!bench.queue.remove_region(&mut (), &more), "a request names it by its number");
    bench.end(2000, Status::Ok);
    assert!(bench.queue.remove_region(&mut (), &more) && bench.queue.remove_region(&mut (), &more));
    assert_eq!(bench.device().regions, [0]);
    drop(second);
    assert_eq!(Arc::strong_count(&more), 1);
    bench.end_all();
    assert_eq!(bench.take_ok(), [1000, 2000, 0]);
}
