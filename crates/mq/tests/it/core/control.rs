//! Changes of a running queue, and its inspection.

use std::sync::Arc;

use blkyard_mq::{BioFlags, DeviceInfo, FlushSnapshot, HwQueueConfig, Op, QueueLimits, RequestState, Status};

use crate::core::hand::{Bench, bio, disk, disk_of, read, with};

#[test]
fn a_frozen_queue_lets_nothing_in_and_drains() {
    let mut bench = Bench::deep(2);
    bench.submit_all((0..6).map(|n| read(n * 1000)));
    bench.queue.freeze();
    assert_eq!(bench.queue.room(), 0, "who may not wait asks for room first");
    bench.end_all();
    assert_eq!((bench.take_ok().len(), bench.queue.is_idle(), bench.queue.room()), (6, true, 0));
    bench.queue.thaw();
    assert_eq!(bench.queue.room(), 256);
}

#[test]
#[should_panic(expected = "submitted to a full queue")]
fn to_submit_to_a_frozen_queue_is_a_bug_of_the_caller() {
    let mut bench = Bench::deep(2);
    bench.queue.freeze();
    bench.submit(read(0));
}

#[test]
fn a_quiesced_queue_takes_bios_and_passes_nothing_on() {
    let mut bench = Bench::deep(8);
    bench.submit(read(0));
    bench.turn();
    bench.queue.quiesce();
    bench.submit_all([read(1000), read(2000)]);
    bench.turn();
    assert_eq!((bench.device().sectors(), bench.device().offers), (vec![0], 1));
    // Requests at the driver still complete.
    bench.end(0, Status::Ok);
    assert_eq!((bench.take_ok(), bench.queue.has_work()), (vec![0], false));
    // They merge meanwhile.
    bench.submit(read(2008));
    bench.queue.unquiesce();
    bench.turn();
    assert_eq!(bench.device().extents(), [(1000, 8), (2000, 8), (2008, 8)]);
    bench.end_all();
}

#[test]
fn both_nest() {
    let mut bench = Bench::deep(8);
    (0..3).for_each(|_| bench.queue.freeze());
    for left in [2, 1, 0] {
        bench.queue.thaw();
        assert_eq!(bench.queue.room() > 0, left == 0, "{left} times frozen");
    }
    (0..2).for_each(|_| bench.queue.quiesce());
    bench.submit(read(0));
    bench.turn();
    bench.queue.unquiesce();
    bench.turn();
    assert_eq!((bench.device().offers, bench.snapshot().quiesced), (0, 1));
    bench.queue.unquiesce();
    bench.turn();
    assert_eq!(bench.device().offers, 1);
    bench.end_all();
}

#[test]
fn a_device_is_recovered_quiesced_and_drains_when_it_runs_again() {
    let mut bench = Bench::deep(4);
    bench.submit_all((0..6).map(|n| read(n * 1000)));
    bench.turn();
    bench.queue.freeze();
    bench.queue.quiesce();
    // The reset requeues all requests of the device.
    (0..4).for_each(|_| bench.device().requeue(|_| true));
    bench.turn();
    assert_eq!((bench.queue.in_flight(), bench.queue.is_idle(), bench.snapshot().dispatch), (0, false, 4));
    bench.queue.unquiesce();
    bench.end_all();
    assert_eq!(bench.take_ok(), (0..6).map(|n| n * 1000).collect::<Vec<_>>());
    bench.queue.thaw();
}

#[test]
fn an_idle_queue_may_get_another_size_and_other_limits() {
    let mut bench = Bench::deep(8);
    let info = DeviceInfo { capacity_sectors: 100, ..disk() };
    bench.queue.set_info(0, Arc::new(info.clone()));
    bench.submit_all([read(96), read(88)]);
    bench.turn();
    assert_eq!((bench.take_ended(), bench.device().sectors()), (vec![(96, Status::Invalid)], vec![88]));
    bench.end_all();
    let limits = QueueLimits { sectors_max: 4, segment_bytes_max: 1024, ..QueueLimits::default() };
    bench.queue.set_info(0, Arc::new(DeviceInfo { limits, capacity_sectors: 200, ..info }));
    bench.submit(read(96));
    bench.turn();
    assert_eq!(bench.device().extents(), [(96, 4), (100, 4)]);
    assert!(bench.device().held.iter().all(|held| held.segments.len() == 2));
    bench.end_all();
    bench.queue.set_info(0, Arc::new(DeviceInfo { read_only: true, ..disk_of(limits) }));
    bench.submit(bio(Op::Write, 8, 8));
    bench.turn();
    assert_eq!((bench.queue.info().read_only, bench.ended.last()), (true, Some(&(8, Status::NotSupported))));
}

#[test]
#[should_panic(expected = "limits were replaced under I/O in flight")]
fn limits_stay_while_anything_waits() {
    let mut bench = Bench::deep(8);
    bench.submit(read(0));
    bench.queue.set_info(0, Arc::new(disk()));
}

#[test]
fn a_flush_that_lacks_only_a_tag_does_not_keep_the_lane_awake() {
    let info = DeviceInfo { volatile_cache: true, ..disk() };
    let mut bench = Bench::new(info, HwQueueConfig { depth: 1, timeout_ns: 0, ..HwQueueConfig::default() });
    bench.submit_all([read(1000), bio(Op::Flush, 0, 0)]);
    bench.turn();
    assert_eq!((bench.device().ops(), bench.deadline_ns(), bench.queue.has_work()), (vec![Op::Read], None, false));
    bench.turn_at(60_000_000_000);
    assert_eq!((bench.deadline_ns(), bench.queue.has_work()), (None, false), "however long it takes");
    bench.end(1000, Status::Ok);
    assert_eq!(bench.device().ops(), [Op::Flush]);
    bench.end_all();
}

#[test]
fn who_looks_in_sees_what_is_there() {
    let config = HwQueueConfig { depth: 4, reserved: 1, bios_max: 20, ..HwQueueConfig::default() };
    let mut bench = Bench::new(DeviceInfo { volatile_cache: true, ..disk() }, config);
    bench.device().room = 2;
    bench.submit_all([read(1000), with(bio(Op::Write, 2000, 16), BioFlags::NO_UNMAP)]);
    bench.turn_at(100);
    bench.submit_all([read(3000), read(4000), read(5000)]);
    bench.submit_all([bio(Op::Flush, 0, 0), with(bio(Op::Write, 6000, 8), BioFlags::PREFLUSH)]);
    bench.turn_at(700);
    bench.queue.freeze();
    let snapshot = bench.queue.snapshot(1100);
    assert_eq!((snapshot.depth, snapshot.depth_limit, snapshot.reserved, snapshot.tags_in_use), (4, 4, 1, 3));
    assert_eq!((snapshot.in_flight, snapshot.dispatch, snapshot.bios, snapshot.bios_max), (2, 1, 7, 20));
    assert_eq!((snapshot.dispatch_busy, snapshot.frozen, snapshot.quiesced), (2, 1, 0));
    let [namespace] = &snapshot.namespaces[..] else { panic!("there is one") };
    assert_eq!((namespace.waiting, namespace.flush), (2, FlushSnapshot { pending: 2, running: 0 }));
    assert_eq!(namespace.info.name, "hand");
    let rows: Vec<_> = snapshot
        .requests
        .iter()
        .map(|request| (request.op, request.sector, request.sectors, request.state, request.age_ns, request.timed_out))
        .collect();
    assert_eq!(
        rows,
        [
            (Op::Read, 1000, 8, RequestState::InFlight, Some(1000), false),
            (Op::Write, 2000, 16, RequestState::InFlight, Some(1000), false),
            (Op::Read, 3000, 8, RequestState::Idle, None, false),
        ]
    );
    assert_eq!(snapshot.requests[1].flags, BioFlags::NO_UNMAP);
    bench.queue.thaw();
    bench.device().room = usize::MAX;
    bench.end(1000, Status::Ok);
    // The waiting bios are on the flush in flight now.
    assert_eq!(bench.snapshot().namespaces[0].flush, FlushSnapshot { pending: 0, running: 2 });
    bench.end_all();
    let snapshot = bench.snapshot();
    assert_eq!((snapshot.bios, snapshot.tags_in_use, snapshot.requests.len()), (0, 0, 0));
}
