//! Cancelled bios: which are taken back, and what the queue does afterwards.

use std::sync::Arc;

use blkyard_mq::{
    BioFlags, DeadlineConfig, DeviceInfo, FairConfig, FairDevice, HwQueueConfig, KyberConfig, Op, RateConfig,
    RateLimit, SchedulerConfig, Shortage, Status, TimesliceConfig,
};

use crate::core::hand::{Bench, bio, disk, of, read, with};

/// Cancels the bios of these first sectors; returns how many were taken back, and how many were not found.
fn cancel(bench: &mut Bench, sectors: &[u64]) -> (usize, usize) {
    let mut left = sectors.len();
    let cancelled = bench.queue.cancel(&mut left, |bio| sectors.contains(&bio.cookie));
    (cancelled, left)
}

fn cancelled(sectors: &[u64]) -> Vec<(u64, Status)> {
    sectors.iter().map(|sector| (*sector, Status::Again)).collect()
}

#[test]
fn bio_without_a_tag_is_taken_back_and_one_at_the_device_is_not() {
    let mut bench = Bench::deep(2);
    bench.submit_all([0, 100, 200, 300, 400].map(read));
    bench.turn();
    assert_eq!(bench.device().sectors(), [0, 100]);
    assert_eq!(cancel(&mut bench, &[0]), (0, 0), "at the device");
    assert_eq!(cancel(&mut bench, &[300, 777]), (1, 1), "one is not there");
    bench.turn();
    assert_eq!(bench.take_ended(), cancelled(&[300]));
    bench.end_all();
    assert_eq!(bench.take_ok(), [0, 100, 200, 400]);
    assert_eq!(bench.device().given.concat(), [0, 100, 200, 400]);
    assert_eq!(bench.queue.stats().snapshot().refused, 1);
}

#[test]
fn bio_is_taken_back_from_each_scheduler() {
    for scheduler in [
        SchedulerConfig::Deadline(DeadlineConfig::default()),
        SchedulerConfig::Kyber(KyberConfig::default()),
        SchedulerConfig::Timeslice(TimesliceConfig::default()),
        SchedulerConfig::Fair(FairConfig::default()),
    ] {
        let mut bench = Bench::new(disk(), HwQueueConfig { depth: 2, scheduler, ..HwQueueConfig::default() });
        bench.submit_all([0, 100].map(read));
        bench.turn();
        let out = bench.device().sectors().len();
        assert!(out > 0, "{scheduler:?}");
        bench.submit_all([200, 300, 400, 500].map(read));
        bench.turn();
        // Not inserted yet.
        bench.submit_all([600, 700].map(read));
        assert_eq!(cancel(&mut bench, &[600]), (1, 0), "{scheduler:?}");
        assert_eq!(cancel(&mut bench, &[300, 500]), (2, 0), "{scheduler:?}");
        assert_eq!(cancel(&mut bench, &[0]), (0, 0), "at the device: {scheduler:?}");
        bench.turn();
        let mut ended = bench.take_ended();
        ended.sort_unstable_by_key(|(sector, _)| *sector);
        assert_eq!(ended, cancelled(&[300, 500, 600]), "{scheduler:?}");
        bench.end_all();
        let mut ended = bench.take_ok();
        ended.sort_unstable();
        assert_eq!(ended, [0, 100, 200, 400, 700], "{scheduler:?}");
    }
}

#[test]
fn who_cancels_gets_no_more_of_a_shared_device() {
    // Room for four bios of all queues: 4 KiB each, and 8 KiB more.
    let fair = FairConfig { device: FairDevice::Flat, in_flight_kib: 48, ..FairConfig::default() };
    let config = HwQueueConfig { scheduler: SchedulerConfig::Fair(fair), ..HwQueueConfig::default() };
    let info = disk();
    let (mut bench, mut other) = (Bench::new(info.clone(), config), Bench::new(info, config));
    other.submit(read(9000));
    other.turn();
    bench.submit_all((0..40).map(|at| read(at * 100)));
    bench.turn();
    let at_the_device = bench.device().sectors().len();
    assert!((1..=4).contains(&at_the_device), "{at_the_device}");
    for sector in (1000..4000).step_by(100) {
        assert_eq!(cancel(&mut bench, &[sector]), (1, 0));
        bench.turn();
        assert_eq!(bench.device().sectors().len(), at_the_device, "after {sector}");
    }
    bench.end_all();
    other.end_all();
}

#[test]
fn bio_held_by_a_rate_limit_is_taken_back_and_leaves_no_hold() {
    let mut bench = Bench::new(disk(), HwQueueConfig { timeout_ns: 0, ..HwQueueConfig::default() });
    let limit = RateLimit::new(RateConfig { iops: 1, bytes_per_s: 0, burst_ms: 1 }).unwrap();
    bench.queue.set_rates(0, vec![Arc::new(limit)]);
    bench.now_ns = 1_000_000_000;
    bench.submit_all([0, 100, 200].map(read));
    bench.turn();
    assert_eq!(bench.device().sectors(), [0]);
    assert_eq!(cancel(&mut bench, &[100, 200]), (2, 0));
    bench.end(0, Status::Ok);
    let ended = bench.take_ended();
    assert_eq!(ended.iter().filter(|(_, status)| *status == Status::Again).count(), 2);
    assert!(bench.queue.is_idle() && !bench.queue.has_work() && bench.deadline_ns().is_none());
    // The next one has its place in the limit.
    bench.submit(read(300));
    bench.turn();
    assert_eq!(bench.device().sectors(), [0_u64; 0]);
    bench.end_all();
    assert_eq!(bench.take_ok(), [300]);
}

#[test]
fn request_that_the_driver_refused_is_taken_back_unless_it_is_shared() {
    for short_of in [Shortage::Device, Shortage::System, Shortage::Lane] {
        let mut bench = Bench::deep(8);
        (bench.device().room, bench.device().short_of) = (0, short_of);
        // The last two are one request.
        bench.submit_all([0, 100, 200, 208].map(read));
        bench.turn();
        assert_eq!(bench.snapshot().dispatch, 3);
        assert_eq!(cancel(&mut bench, &[208]), (0, 0), "it shares a request");
        assert_eq!(cancel(&mut bench, &[0, 100]), (2, 0));
        bench.turn();
        assert_eq!(bench.take_ended(), cancelled(&[100, 0]));
        assert_eq!(bench.snapshot().tags_in_use, 1);
        bench.device().room = 8;
        bench.end_all();
        assert_eq!(bench.take_ok(), [200, 208]);
        // With none left, nothing is offered again.
        bench.device().room = 0;
        bench.submit(read(900));
        bench.turn();
        assert_eq!(cancel(&mut bench, &[900]), (1, 0));
        bench.turn();
        assert_eq!(bench.take_ended(), cancelled(&[900]));
        assert!(bench.queue.is_idle() && !bench.queue.has_work() && bench.deadline_ns().is_none(), "{short_of:?}");
    }
}

#[test]
fn request_that_came_back_without_an_answer_is_not_taken_back() {
    let mut bench = Bench::deep(8);
    bench.submit_all([0, 100].map(read));
    bench.turn();
    bench.device().room = 0;
    bench.device().requeue(|held| held.sector == 0);
    bench.device().requeue_answered(|held| held.sector == 100);
    bench.turn();
    assert_eq!(bench.snapshot().dispatch, 2);
    assert_eq!(cancel(&mut bench, &[0, 100]), (1, 0), "the device may still execute the first");
    bench.device().room = 8;
    bench.end_all();
    assert_eq!(bench.take_ended(), [(100, Status::Again), (0, Status::Ok)]);
}

#[test]
fn bio_split_in_part_is_not_taken_back() {
    let mut info = disk();
    info.limits.sectors_max = 8;
    let mut bench = Bench::new(info, HwQueueConfig { depth: 2, ..HwQueueConfig::default() });
    bench.submit(bio(Op::Read, 0, 32));
    bench.submit(read(100));
    bench.turn();
    assert_eq!(cancel(&mut bench, &[0, 100]), (1, 0));
    bench.end_all();
    assert_eq!(bench.take_ended(), [(100, Status::Again), (0, Status::Ok)]);
}

#[test]
fn flush_behind_another_is_taken_back() {
    let info = DeviceInfo { volatile_cache: true, ..disk() };
    let mut bench = Bench::new(info, HwQueueConfig::default());
    let flush = |cookie| {
        let mut flush = bio(Op::Flush, 0, 0);
        flush.cookie = cookie;
        flush
    };
    bench.submit(flush(1));
    bench.turn();
    bench.submit_all([flush(2), with(read(100), BioFlags::empty()), flush(3)]);
    // Its data has moved before its flush.
    bench.submit(with(bio(Op::Write, 200, 8), BioFlags::FUA));
    bench.turn();
    bench.end(200, Status::Ok);
    assert_eq!(cancel(&mut bench, &[1, 2, 3, 200]).0, 2, "flushes that no device has");
    bench.turn();
    assert_eq!(bench.take_ended(), cancelled(&[2, 3]));
    bench.end_all();
    let mut ended = bench.take_ok();
    ended.sort_unstable();
    assert_eq!(ended, [1, 100, 200]);
}

#[test]
fn bio_of_any_namespace_is_taken_back() {
    let config = HwQueueConfig { depth: 8, ..HwQueueConfig::default() };
    let mut bench = Bench::of(vec![disk(), disk()], config);
    bench.submit_all((0..12).map(|n| of((n % 2) as u16, read(n * 100))));
    bench.turn();
    let out = bench.device().sectors();
    let waiting: Vec<u64> = (0..12).map(|n| n * 100).filter(|sector| !out.contains(sector)).collect();
    assert_eq!(cancel(&mut bench, &waiting), (waiting.len(), 0));
    bench.end_all();
    let (ok, back): (Vec<_>, Vec<_>) = bench.take_ended().into_iter().partition(|(_, status)| status.is_ok());
    assert_eq!((ok.len(), back.len()), (out.len(), waiting.len()));
}
