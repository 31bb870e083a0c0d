//! The rules of time slices, one by one: spec D.1, its observations, and property (f) of D.7.

use proptest::prelude::*;

use super::{Hand, MS, read};
use crate::DeviceInfo;
use crate::sched::{SchedulerConfig, SliceKey, SliceOrder, TimesliceConfig};

/// Slices of 10 ms without anything else.
const BARE: TimesliceConfig = TimesliceConfig {
    slice_us: 10_000,
    extensions: 0,
    idle_us: 0,
    tick_us: 0,
    key: SliceKey::Stream,
    order: SliceOrder::Arrival,
    drain: false,
};

fn hand(config: TimesliceConfig) -> Hand {
    Hand::new(SchedulerConfig::Timeslice(config))
}

/// Bios of streams: the first sector encodes stream and number.
fn of(streams: &[u32], bios: u64) -> Vec<Box<crate::Bio>> {
    let each = |number| streams.iter().map(move |stream| read(*stream, u64::from(*stream) * 1000 + number * 100));
    (0..bios).flat_map(each).collect()
}

/// Owner of the device at these times, with a constant load: the stream of the dispatched bio.
fn owners(hand: &mut Hand, times_ms: impl IntoIterator<Item = u64>) -> Vec<Option<u64>> {
    times_ms.into_iter().map(|ms| hand.at(ms * MS).next().map(|sector| sector / 1000)).collect()
}

#[test]
fn no_length_is_no_scheduler() {
    assert!(
        SchedulerConfig::Timeslice(TimesliceConfig { slice_us: 0, ..BARE })
            .build(8, 64, &DeviceInfo::default())
            .is_none()
    );
}

#[test]
fn the_owner_goes_in_its_order_and_nobody_else_does_until_its_time_is_up() {
    let mut hand = hand(BARE);
    hand.insert(of(&[1, 2], 3));
    assert_eq!(hand.take(2), [1000, 1100]);
    hand.at(10 * MS - 1).insert([read(1, 1300)]);
    assert_eq!(hand.take(1), [1200]);
    hand.at(10 * MS);
    assert_eq!(hand.take(3), [2000, 2100, 2200]);
}

#[test]
fn a_slice_in_which_something_was_found_is_extended_so_often_and_no_more() {
    // Units of a slice, whole: those extended and the first. The code of the post has five.
    for (extensions, units) in [(0, 1), (3, 4), (4, 5)] {
        let mut hand = hand(TimesliceConfig { extensions, ..BARE });
        hand.insert(of(&[1, 2], 10));
        let times = (0..units).map(|unit| unit * 10 + 5);
        assert_eq!(owners(&mut hand, std::iter::once(0).chain(times.clone())), vec![Some(1); units as usize + 1]);
        assert_eq!(owners(&mut hand, [units * 10 + 15]), [Some(2)]);
    }
}

#[test]
fn a_slice_in_which_nothing_was_found_is_not_extended() {
    let mut hand = hand(TimesliceConfig { extensions: 4, idle_us: u32::MAX, ..BARE });
    hand.insert(of(&[1], 1)).insert(of(&[2], 1));
    assert_eq!(hand.all(), [1000]);
    assert_eq!(
        (hand.at(10 * MS).next(), hand.until_ns),
        (None, 20 * MS),
        "extended for what was found in the first unit"
    );
    assert_eq!(hand.at(20 * MS).next(), Some(2000));
}

#[test]
fn an_owner_with_nothing_to_do_keeps_others_waiting_as_long_as_the_option_says() {
    // At once; after an idle time; at the end of its slice.
    for (idle_us, until_ms) in [(0, 4), (3000, 7), (u32::MAX, 10)] {
        let mut hand = hand(TimesliceConfig { idle_us, ..BARE });
        hand.insert(of(&[1, 2], 1));
        assert_eq!(hand.take(1), [1000]);
        // With something in flight it is not idle.
        assert_eq!((hand.at(3 * MS).next(), hand.until_ns), (None, 10 * MS));
        hand.at(4 * MS).end(1000);
        if until_ms > 4 {
            assert_eq!((hand.next(), hand.until_ns), (None, until_ms * MS), "{idle_us}");
            assert_eq!(hand.at(until_ms * MS - 1).next(), None);
        }
        assert_eq!(hand.at(until_ms * MS).next(), Some(2000), "{idle_us}");
    }
}

#[test]
fn an_owner_that_comes_back_in_time_goes_on() {
    let mut hand = hand(TimesliceConfig { idle_us: 3000, ..BARE });
    hand.insert(of(&[1, 2], 1));
    assert_eq!(hand.take(1), [1000]);
    hand.at(4 * MS).end(1000);
    assert_eq!(hand.at(5 * MS).next(), None);
    assert_eq!(hand.at(6 * MS).insert([read(1, 1100)]).all(), [1100]);
    // The wait begins anew.
    hand.at(7 * MS).end(1100);
    assert_eq!((hand.next(), hand.until_ns), (None, 10 * MS));
}

#[test]
fn slices_are_rounded_up_to_ticks() {
    // Slice, tick, when it begins and when it ends, microseconds.
    let table = [
        (250, 4000, 0, 4000),
        (250, 4000, 3999, 4000),
        (250, 1000, 500, 1000),
        (9000, 4000, 100, 12_000),
        (250, 0, 100, 350),
    ];
    for (slice_us, tick_us, begin_us, end_us) in table {
        let mut hand = hand(TimesliceConfig { slice_us, tick_us, ..BARE });
        hand.at(begin_us * 1000).insert(of(&[1, 2], 2));
        assert_eq!(hand.next(), Some(1000));
        assert_eq!(hand.at(end_us * 1000 - 1).next(), Some(1100), "{slice_us} {tick_us} {begin_us}");
        assert_eq!(hand.at(end_us * 1000).next(), Some(2000), "{slice_us} {tick_us} {begin_us}");
    }
}

#[test]
fn time_may_be_anything_from_the_start() {
    // Where a counter of 32 bits overflows in ticks of 1, 4 and 10 ms, five minutes before, and at the very end.
    let edges = [1_u64, 4, 10].map(|ms| (u64::from(u32::MAX) + 1) * ms * MS);
    let starts = edges.into_iter().flat_map(|edge| [edge - 300_000 * MS, edge - 1]).chain([0, u64::MAX - 15 * MS]);
    for start_ns in starts {
        for tick_us in [0, 1000] {
            let mut hand = hand(TimesliceConfig { tick_us, ..BARE });
            hand.at(start_ns).insert(of(&[1, 2], 2));
            assert_eq!(hand.next(), Some(1000), "nobody has a slice yet, whatever time it is");
            assert_eq!(hand.at(start_ns + 8 * MS).next(), Some(1100));
            assert_eq!(hand.at(start_ns + 11 * MS).next(), Some(2000), "{start_ns} {tick_us}");
        }
    }
}

#[test]
fn a_slice_is_a_streams_or_a_software_queues() {
    for (key, wanted) in [(SliceKey::Stream, [1, 3]), (SliceKey::Queue, [1, 2])] {
        let mut hand = hand(TimesliceConfig { key, ..BARE });
        let mut bios = of(&[1, 2, 3], 1);
        // The second is of another stream, but was submitted where the first was.
        bios[1].submitter = 1;
        bios[2].stream = 1;
        hand.insert(bios);
        assert_eq!(hand.all().iter().map(|sector| sector / 1000).collect::<Vec<_>>(), wanted);
    }
}

#[test]
fn next_is_who_came_first_or_who_has_the_lowest_number() {
    for (order, wanted) in [(SliceOrder::Arrival, [5, 9, 2, 7]), (SliceOrder::Lowest, [2, 5, 7, 9])] {
        let mut hand = hand(TimesliceConfig { order, ..BARE });
        hand.insert(of(&[5, 9, 2, 7], 2));
        assert_eq!(
            owners(&mut hand, [0, 10, 20, 30, 40]),
            wanted.into_iter().chain([wanted[0]]).map(Some).collect::<Vec<_>>()
        );
    }
}

#[test]
fn who_comes_in_an_epoch_has_a_turn_in_it_once() {
    let mut hand = hand(BARE);
    hand.insert(of(&[1, 2], 1));
    assert_eq!(hand.all(), [1000]);
    assert_eq!((hand.fact("epoch"), hand.fact("owner")), (Some(1), Some(1)));
    // The first had its turn, the third had not.
    hand.at(10 * MS).insert(of(&[3], 1));
    assert_eq!(hand.all(), [2000]);
    hand.insert([read(1, 1100)]);
    assert_eq!(hand.at(20 * MS).all(), [3000]);
    assert_eq!(hand.at(30 * MS).all(), [1100]);
    assert_eq!(hand.fact("epoch"), Some(2));
}

#[test]
fn an_owner_may_wait_until_the_device_has_nothing_of_others() {
    let mut hand = hand(TimesliceConfig { drain: true, ..BARE });
    hand.insert(of(&[1, 2], 2));
    assert_eq!(hand.take(2), [1000, 1100]);
    assert_eq!((hand.at(10 * MS).next(), hand.until_ns), (None, u64::MAX));
    assert_eq!(hand.at(12 * MS).end(1000).next(), None);
    // The slice begins as the device is free.
    assert_eq!(hand.at(15 * MS).end(1100).next(), Some(2000));
    assert_eq!(hand.at(25 * MS - 1).next(), Some(2100));
}

#[test]
fn neighbours_of_the_owner_join_and_nobody_elses() {
    let mut hand = hand(BARE);
    hand.insert([read(1, 100), read(2, 108), read(1, 500), read(1, 108), read(1, 92)]);
    assert_eq!(
        (hand.next(), hand.join(100, 108), hand.join(100, 116), hand.join(92, 116)),
        (Some(100), Some(108), Some(92), None)
    );
    assert_eq!(hand.next(), Some(500));
}

#[test]
fn as_posted_a_slice_of_250_us_is_a_tick_and_lasts_for_five() {
    let mut hand = hand(TimesliceConfig::as_posted(250, 4000));
    hand.insert(of(&[7, 3], 10));
    let owners = owners(&mut hand, (0..8).map(|at| at * 4));
    assert_eq!(owners, [3, 3, 3, 3, 3, 7, 7, 7].map(Some));
}

proptest! {
    /// Property (f) of D.7: a stream is served twice in an epoch only if it is alone.
    #[test]
    fn a_stream_is_served_at_most_once_in_an_epoch(
        steps in prop::collection::vec((0_u32..6, 0_u64..12, any::<bool>()), 1..400),
        lowest: bool, extensions in 0_u32..3, idle_ms in 0_u32..4, drain: bool,
    ) {
        let order = if lowest { SliceOrder::Lowest } else { SliceOrder::Arrival };
        let mut hand = hand(TimesliceConfig { order, extensions, idle_us: idle_ms * 1000, drain, ..BARE });
        let (mut held, mut served, mut last) = (0, Vec::new(), None);
        let mut epoch = 0;
        for (stream, pass_ms, end) in steps {
            if held < 64 {
                hand.insert([read(stream, 0)]);
                held += 1;
            }
            let now_ns = hand.now_ns + pass_ms * MS;
            hand.at(now_ns);
            if end {
                held -= hand.out.len();
                hand.end_all();
            }
            if hand.next().is_some() {
                let owner = hand.out.last().unwrap().stream;
                if hand.fact("epoch") != Some(epoch) {
                    epoch = hand.fact("epoch").unwrap();
                    served.clear();
                    last = None;
                }
                if last.replace(owner) != Some(owner) {
                    prop_assert!(!served.contains(&owner), "stream {owner} was served twice in epoch {epoch}");
                    served.push(owner);
                }
            }
        }
        // Each waiting stream is served as time passes and requests end.
        for _ in 0..1000 {
            let now_ns = hand.now_ns + 10 * MS;
            held -= hand.out.len();
            hand.end_all().at(now_ns).next();
            if held == 0 {
                break;
            }
        }
        prop_assert_eq!(held, 0);
    }
}
