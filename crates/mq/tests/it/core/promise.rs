//! A bio's status and its data: all orders of completions, all ways into a request.

use blkyard_mq::{
    Bio, BioFlags, DeadlineConfig, DeviceInfo, FairConfig, HwQueueConfig, KyberConfig, Op, QueueLimits,
    SchedulerConfig, Status, TimesliceConfig,
};

use crate::core::hand::{Bench, bio, disk, with};

/// Sectors of the longest request: a bio of three times as many is split into three.
const PART: u32 = 8;

fn schedulers() -> [SchedulerConfig; 5] {
    [
        SchedulerConfig::None,
        SchedulerConfig::Deadline(DeadlineConfig::default()),
        SchedulerConfig::Kyber(KyberConfig::default()),
        SchedulerConfig::Timeslice(TimesliceConfig::default()),
        SchedulerConfig::Fair(FairConfig::default()),
    ]
}

/// A queue over a device that splits at `PART` sectors.
fn bench(volatile_cache: bool, fua: bool, depth: usize, scheduler: SchedulerConfig) -> Bench {
    let limits = QueueLimits { sectors_max: PART, ..QueueLimits::default() };
    let info = DeviceInfo { volatile_cache, fua, limits, ..disk() };
    Bench::new(info, HwQueueConfig { depth, scheduler, ..HwQueueConfig::default() })
}

fn write(sector: u64, sectors: u32, flags: BioFlags) -> Box<Bio> {
    with(bio(Op::Write, sector, sectors), flags)
}

/// Number of flushes that the device has.
fn flushes(bench: &mut Bench) -> usize {
    bench.device().ops().into_iter().filter(|op| *op == Op::Flush).count()
}

fn end_flush(bench: &mut Bench) {
    bench.device().end(|held| held.op == Op::Flush, Status::Ok);
    bench.turn();
}

#[test]
fn a_late_flush_does_not_ride_the_running_one() {
    // Each needs a flush that is issued after the data written under the first one.
    let late: [(&str, Box<Bio>); 2] =
        [("flush", bio(Op::Flush, 500, 0)), ("flush before data", write(500, PART, BioFlags::PREFLUSH))];
    for (name, late) in late {
        let mut bench = bench(true, false, 8, SchedulerConfig::None);
        bench.submit(bio(Op::Flush, 100, 0));
        bench.turn();
        // A flush is held at sector 0.
        bench.submit(write(1000, PART, BioFlags::empty()));
        bench.turn();
        bench.end(1000, Status::Ok);
        assert_eq!(bench.take_ended(), [(1000, Status::Ok)], "{name}: written while the flush was running");
        bench.submit(late);
        bench.turn();
        end_flush(&mut bench);
        assert_eq!((bench.take_ended(), flushes(&mut bench)), (vec![(100, Status::Ok)], 1), "{name}");
        assert!(!bench.device().sectors().contains(&500), "{name}: its data overtook its flush");
        end_flush(&mut bench);
        bench.end_all();
        assert_eq!(bench.take_ended(), [(500, Status::Ok)], "{name}");
    }
}

#[test]
fn fua_data_that_ends_under_a_flush_gets_the_next_one() {
    // Data that is one request, and data that is three, of which each may be the last to end.
    for (sectors, last) in [(PART, 1000), (3 * PART, 1000), (3 * PART, 1008), (3 * PART, 1016)] {
        let mut bench = bench(true, false, 8, SchedulerConfig::None);
        bench.submit(bio(Op::Flush, 100, 0));
        bench.turn();
        bench.submit(write(1000, sectors, BioFlags::FUA));
        bench.turn();
        for sector in (1000..1000 + u64::from(sectors)).step_by(PART as usize).filter(|sector| *sector != last) {
            bench.end(sector, Status::Ok);
        }
        bench.end(last, Status::Ok);
        assert_eq!(
            (bench.take_ended(), flushes(&mut bench)),
            (vec![], 1),
            "the flush was issued before the data ended"
        );
        end_flush(&mut bench);
        assert_eq!((bench.take_ended(), flushes(&mut bench)), (vec![(100, Status::Ok)], 1), "{sectors}, {last} last");
        end_flush(&mut bench);
        assert_eq!(bench.take_ended(), [(1000, Status::Ok)]);
        assert!(bench.queue.is_idle());
    }
}

#[test]
fn a_failed_part_fails_its_bio_in_every_order() {
    const ORDERS: [[u64; 3]; 6] = [[0, 8, 16], [0, 16, 8], [8, 0, 16], [8, 16, 0], [16, 0, 8], [16, 8, 0]];
    // With unsupported FUA there is a step behind the data, whose status must not hide that of the data.
    for flags in [BioFlags::empty(), BioFlags::PREFLUSH, BioFlags::FUA, BioFlags::FUA | BioFlags::PREFLUSH] {
        for scheduler in schedulers() {
            for order in ORDERS {
                for failed in [0, 8, 16] {
                    let mut bench = bench(true, false, 8, scheduler);
                    bench.submit(write(0, 3 * PART, flags));
                    bench.turn();
                    if flags.contains(BioFlags::PREFLUSH) {
                        end_flush(&mut bench);
                    }
                    assert_eq!(bench.device().held.len(), 3, "one request for each part");
                    for sector in order {
                        assert!(bench.take_ended().is_empty(), "over before its last part");
                        bench.end(sector, if sector == failed { Status::Medium } else { Status::Ok });
                    }
                    let case = format!("{scheduler:?}, {flags:?}, {failed} failed of {order:?}");
                    assert_eq!(bench.take_ended(), [(0, Status::Medium)], "{case}");
                    assert!(bench.device().held.is_empty() && bench.queue.is_idle(), "{case}");
                }
            }
        }
    }
}

#[test]
fn a_part_that_fails_before_the_next_is_made_fails_its_bio() {
    // One tag: each part ends before the next one is split off.
    for failed in [0, 8, 16] {
        let mut bench = bench(false, false, 1, SchedulerConfig::None);
        bench.submit(bio(Op::Write, 0, 3 * PART));
        bench.turn();
        for sector in [0, 8, 16] {
            assert_eq!(bench.device().sectors(), [sector]);
            bench.end(sector, if sector == failed { Status::Io } else { Status::Ok });
        }
        assert_eq!(bench.take_ended(), [(0, Status::Io)], "{failed} failed");
    }
}

#[test]
fn fua_reaches_a_driver_that_has_it_by_every_way() {
    for scheduler in schedulers() {
        let mut bench = bench(true, true, 8, scheduler);
        // Whole and between neighbours without the flag; split; handed back by the driver and done again.
        bench.submit_all([
            write(0, 4, BioFlags::empty()),
            write(4, 4, BioFlags::FUA),
            write(8, 4, BioFlags::empty()),
            write(100, 3 * PART, BioFlags::FUA),
        ]);
        bench.turn();
        bench.device().requeue(|held| held.sector == 4);
        bench.device().requeue(|held| held.sector == 108);
        bench.turn();
        let mut held: Vec<_> = bench.device().held.iter().map(|held| (held.sector, held.sectors, held.flags)).collect();
        held.sort_unstable_by_key(|(sector, ..)| *sector);
        let expected = [(0, 4, false), (4, 4, true), (8, 4, false), (100, 8, true), (108, 8, true), (116, 8, true)];
        let expected = expected
            .map(|(sector, sectors, fua)| (sector, sectors, if fua { BioFlags::FUA } else { BioFlags::empty() }));
        assert_eq!(held, expected, "{scheduler:?}");
        bench.end_all();
        assert_eq!(bench.queue.stats().snapshot().flushes, 0, "{scheduler:?}: the flag is enough");
        assert_eq!(bench.take_ok().len(), 4);
    }
}

#[test]
fn fua_becomes_one_flush_after_all_data_without_support() {
    for scheduler in schedulers() {
        for sectors in [PART, 3 * PART] {
            let mut bench = bench(true, false, 8, scheduler);
            bench.submit(write(0, sectors, BioFlags::FUA));
            bench.turn();
            while let Some(sector) = bench.device().sectors().first().copied() {
                let case = format!("{scheduler:?}, {sectors} sectors, before {sector} has ended");
                assert_eq!((bench.take_ended(), flushes(&mut bench)), (vec![], 0), "{case}");
                assert!(bench.device().held.iter().all(|held| held.flags.is_empty()), "{case}");
                bench.end(sector, Status::Ok);
                if flushes(&mut bench) > 0 {
                    break;
                }
            }
            assert_eq!((bench.take_ended(), bench.device().ops()), (vec![], vec![Op::Flush]), "{scheduler:?}");
            end_flush(&mut bench);
            assert_eq!(bench.take_ended(), [(0, Status::Ok)], "{scheduler:?}");
        }
    }
}
