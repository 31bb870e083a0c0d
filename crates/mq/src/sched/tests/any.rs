//! Properties of every scheduler for any load: all bios are dispatched, once, and one that answers `u64::MAX` has a bio
//! in flight.

use proptest::prelude::*;

use super::{Hand, MS, bio, with};
use crate::sched::{
    DeadlineConfig, FairConfig, FairDevice, KyberConfig, SchedulerConfig, SliceKey, SliceOrder, TimesliceConfig,
};
use crate::{BioFlags, Op, Priority};

/// Bios at one time.
const BIOS_MAX: usize = 12;

#[derive(Clone, Debug)]
enum Act {
    /// Stream, operation, position, length, class, and whether a write is synchronous.
    Insert(u32, Op, u64, u32, u8, bool),
    /// Hands one out, and lets so many join it, of which `fits` says which do.
    Next(usize, bool),
    /// One that is out ends, counted from the oldest.
    End(usize),
    /// One that waits is taken back, counted from the oldest slot.
    Take(usize),
    /// Time passes; or goes back a little, as it does on another lane.
    Pass(i64),
}

fn any_act() -> impl Strategy<Value = Act> {
    let op = prop::sample::select(&[Op::Read, Op::Read, Op::Write, Op::Write, Op::Discard, Op::WriteZeroes][..]);
    let stream = prop_oneof![3 => 0_u32..4, 1 => any::<u32>()];
    // In rows, so that they join, and anywhere.
    let place = prop_oneof![3 => 0_u64..12, 1 => 0_u64..1 << 40];
    let sectors = prop_oneof![6 => Just(8), 1 => any::<u32>().prop_map(|sectors| sectors.max(1))];
    let insert = (stream, op, place, sectors, 0_u8..3, any::<bool>())
        .prop_map(|(stream, op, at, sectors, class, sync)| Act::Insert(stream, op, at * 8, sectors, class, sync));
    let pass = prop_oneof![4 => 0_i64..3 * MS as i64, 1 => -5000_i64..0, 1 => 0_i64..20_000 * MS as i64];
    prop_oneof![
        8 => insert,
        6 => (0_usize..4, any::<bool>()).prop_map(|(joins, fits)| Act::Next(joins, fits)),
        4 => (0_usize..BIOS_MAX).prop_map(Act::End),
        2 => (0_usize..BIOS_MAX).prop_map(Act::Take),
        3 => pass.prop_map(Act::Pass),
    ]
}

fn any_config() -> impl Strategy<Value = SchedulerConfig> {
    let deadline =
        (0_u32..600, 0_u32..4, 1_u32..20, 0_u32..100, 0_u32..4).prop_map(|(expire, starved, batch, aging, depth)| {
            SchedulerConfig::Deadline(DeadlineConfig {
                read_expire_ms: expire,
                writes_starved: starved,
                fifo_batch: batch,
                prio_aging_expire_ms: aging,
                async_depth: depth,
                ..DeadlineConfig::default()
            })
        });
    let kyber = (1_u32..5000).prop_map(|target_us| {
        SchedulerConfig::Kyber(KyberConfig {
            read_target_us: target_us,
            write_target_us: target_us,
            ..KyberConfig::default()
        })
    });
    let idle_us = prop::sample::select(&[0, 500, 8000, u32::MAX][..]);
    let slices = (1_u32..30_000, 0_u32..5, idle_us, any::<[bool; 4]>()).prop_map(
        |(slice_us, extensions, idle_us, [queue, lowest, ticks, drain])| {
            SchedulerConfig::Timeslice(TimesliceConfig {
                slice_us,
                extensions,
                idle_us,
                tick_us: u32::from(ticks) * 4000,
                key: if queue { SliceKey::Queue } else { SliceKey::Stream },
                order: if lowest { SliceOrder::Lowest } else { SliceOrder::Arrival },
                drain,
            })
        },
    );
    let kinds = prop::sample::select(vec![FairDevice::Measured, FairDevice::Seeks, FairDevice::Flat]);
    let depth = prop::sample::select(&[0, 1, 64][..]);
    let fair = (1_u32..150, 1_u32..400, 0_u32..10, 1_u32..100, kinds, depth, any::<bool>()).prop_map(
        |(slice_ms, target_ms, idle_ms, async_percent, device, in_flight_kib, drain)| {
            let mut config = FairConfig {
                slice_ms,
                target_ms,
                idle_ms,
                async_percent,
                drain,
                device,
                in_flight_kib,
                ..FairConfig::default()
            };
            (config.weights[0], config.weights[1]) = ((1, 10), (2, 1000));
            SchedulerConfig::Fair(config)
        },
    );
    prop_oneof![1 => deadline, 1 => kyber, 2 => slices, 4 => fair]
}

/// Dispatches one bio and those that join it.
fn take(hand: &mut Hand, joins: usize, fits: bool) -> Result<usize, TestCaseError> {
    let Some(sector) = hand.next() else {
        prop_assert!(hand.until_ns < u64::MAX || !hand.out.is_empty(), "it waits for nothing");
        return Ok(0);
    };
    let (mut took, mut start, mut end) = (1, sector, hand.out.last().map_or(0, |bio| bio.end()));
    for _ in 0..if fits { joins } else { joins.min(1) } {
        let reach = crate::sched::Reach { start, end };
        let Some(bio) = hand.scheduler.join(reach, &mut |_| fits, hand.now_ns) else { break };
        prop_assert!(fits && reach.touches(&bio), "{reach:?} {bio:?}");
        (start, end) = (start.min(bio.sector), end.max(bio.end()));
        hand.out.push(bio);
        took += 1;
    }
    Ok(took)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn all_that_goes_in_comes_out_and_nobody_waits_for_nothing(
        config in any_config(), acts in prop::collection::vec(any_act(), 1..600),
    ) {
        let mut hand = Hand::of(config, BIOS_MAX);
        let (mut wanted, mut came) = (0, 0);
        for act in acts {
            match act {
                Act::Insert(stream, op, sector, sectors, class, sync) => {
                    if wanted - came + hand.out.len() < BIOS_MAX {
                        let mut bio = with(bio(op, stream, sector), Priority::ALL[usize::from(class)]);
                        (bio.sectors, bio.sync) = (sectors, sync);
                        if sector % 128 == 0 && op == Op::Write {
                            bio.flags = BioFlags::FUA;
                        }
                        hand.insert([bio]);
                        wanted += 1;
                    }
                }
                // Like the queue: asks only while bios are there.
                Act::Next(joins, fits) if came < wanted => came += take(&mut hand, joins, fits)?,
                Act::End(at) if !hand.out.is_empty() => {
                    let bio = hand.out.remove(at % hand.out.len());
                    hand.scheduler.ended(&bio, hand.now_ns.saturating_sub(MS / 10), hand.now_ns);
                }
                Act::Take(mut at) => {
                    let mut is_it = |_: &crate::Bio| at.checked_sub(1).map(|left| at = left).is_none();
                    if let Some(bio) = hand.scheduler.take(&mut is_it, hand.now_ns) {
                        prop_assert!(bio.sectors > 0);
                        wanted -= 1;
                    }
                }
                Act::Next(..) | Act::End(_) => {}
                Act::Pass(ns) => {
                    let now_ns = hand.now_ns.saturating_add_signed(ns);
                    hand.at(now_ns);
                }
            }
        }
        prop_assert_eq!(hand.scheduler.snapshot(hand.now_ns).waiting, wanted - came);
        // From here on a device that has one at a time.
        for _ in 0..100_000 {
            if came == wanted {
                break;
            }
            let took = take(&mut hand, 1, true)?;
            came += took;
            let until_ns = if took > 0 || !hand.out.is_empty() { hand.now_ns + MS } else { hand.until_ns };
            hand.at(until_ns).end_all_after(MS / 2);
        }
        prop_assert_eq!(came, wanted);
        hand.end_all();
        prop_assert_eq!(hand.scheduler.snapshot(hand.now_ns).waiting, 0);
    }
}
