//! The rules of `fair`, one by one, with a device by hand; `world.rs` has devices with service times.

mod world;

use proptest::prelude::*;

use super::{Hand, MS, bio, read, with, write};
use crate::sched::{FAIR_WEIGHTS_MAX, FairConfig, FairDevice, SchedulerConfig, StreamKey};
use crate::{Bio, DeviceInfo, Op, Priority};

fn hand(device: FairDevice) -> Hand {
    Hand::new(SchedulerConfig::Fair(FairConfig { device, ..FairConfig::default() }))
}

/// Bios of a stream in a row; a stream's sectors begin at a million times its number.
fn row(stream: u32, from: u64, count: u64) -> Vec<Box<Bio>> {
    (from..from + count).map(|at| read(stream, u64::from(stream) * 1_000_000 + at * 8)).collect()
}

fn owners(sectors: &[u64]) -> Vec<u64> {
    sectors.iter().map(|sector| sector / 1_000_000).collect()
}

#[test]
fn a_device_is_taken_for_what_it_says_until_it_is_measured_and_for_what_the_options_say() {
    let seeks = |device, rotational| {
        let config = SchedulerConfig::Fair(FairConfig { device, ..FairConfig::default() });
        let facts =
            config.build(8, 64, &DeviceInfo { rotational, ..DeviceInfo::default() }).map(|fair| fair.snapshot(0).facts);
        facts.unwrap().contains(&("seeks", 1))
    };
    for rotational in [true, false] {
        assert_eq!(seeks(FairDevice::Measured, rotational), rotational);
        assert!(seeks(FairDevice::Seeks, rotational) && !seeks(FairDevice::Flat, rotational));
    }
}

#[test]
fn an_owner_has_the_device_alone_until_its_turn_is_over() {
    let mut hand = hand(FairDevice::Seeks);
    hand.insert(row(1, 0, 3)).insert(row(2, 0, 3));
    assert_eq!(owners(&hand.all()), [1, 1, 1]);
    // The clock runs since the first end; two share a round of 300 ms, and a turn is 100 ms at most.
    hand.at(50 * MS).end(1_000_000).insert(row(1, 3, 1));
    assert_eq!(owners(&hand.all()), [1]);
    hand.at(149 * MS).insert(row(1, 4, 1));
    assert_eq!(owners(&hand.all()), [1]);
    hand.at(150 * MS).insert(row(1, 5, 1));
    assert_eq!(hand.all(), [], "it is over, and what is in flight is waited for");
    hand.at(160 * MS).end_all();
    assert_eq!(owners(&hand.all()), [2, 2, 2]);
    hand.at(170 * MS).end_all();
    assert_eq!((hand.next(), hand.until_ns), (None, 178 * MS), "it is waited for");
    hand.at(178 * MS);
    assert_eq!(owners(&hand.all()), [1], "and not for longer");
}

#[test]
fn turns_are_shorter_the_more_streams_there_are_but_not_too_short() {
    for (streams, turn_ms) in [(3, 100), (4, 75), (5, 60), (7, 50), (20, 50)] {
        let mut hand = hand(FairDevice::Seeks);
        for stream in 1..=streams {
            hand.insert(row(stream, 0, 2));
        }
        // The first one only thinks after its turn, and counts.
        assert_eq!(owners(&hand.all()), [1, 1]);
        hand.end_all().at(100 * MS);
        assert_eq!(owners(&hand.all()), [2, 2], "{streams}");
        hand.end_all().insert(row(2, 2, 1));
        for ms in 1..=turn_ms {
            let expected = if ms < turn_ms { 2 } else { 3 };
            let next = hand.at((100 + ms) * MS).next().map(|sector| sector / 1_000_000);
            hand.end_all();
            hand.insert([read(2, 2_000_000 + (100 + ms) * 8)]);
            assert_eq!(next, Some(expected), "{streams} streams after {ms} ms");
        }
    }
}

#[test]
fn turns_go_round_though_each_thinks_when_its_turn_is_over() {
    for streams in [2_u64, 3, 6, 20] {
        let mut hand = hand(FairDevice::Seeks);
        let one = |owner: u64, at: u64| row(owner as u32, at, 1);
        (1..=streams).for_each(|stream| {
            hand.insert(one(stream, 0));
        });
        // Each bio takes 5 ms, and its stream submits the next a little later, also while others have the device.
        let (mut turns, mut at) = (vec![1], 1);
        while turns.len() < 10 * streams as usize {
            let owner = hand.next().expect("somebody always wants something") / 1_000_000;
            if turns.last() != Some(&owner) {
                turns.push(owner);
            }
            hand.at(hand.now_ns + 5 * MS).end_all();
            let next = hand.next();
            hand.at(hand.now_ns + MS / 10).insert(one(owner, at));
            at += 1;
            if let Some(other) = next.map(|sector| sector / 1_000_000) {
                turns.push(other);
                hand.at(hand.now_ns + 5 * MS).end_all().insert(one(other, at));
                at += 1;
            }
        }
        let gone_round = turns.iter().zip((1..=streams).cycle()).all(|(owner, expected)| *owner == expected);
        assert!(gone_round, "{streams}: {turns:?}");
    }
}

#[test]
fn of_several_that_come_back_who_has_had_less_goes_first() {
    let mut hand = hand(FairDevice::Seeks);
    hand.insert(row(1, 0, 2));
    assert_eq!(owners(&hand.all()), [1, 1]);
    hand.at(10 * MS).end(1_000_000).at(40 * MS).end_all().insert(row(3, 0, 2));
    assert_eq!((hand.next(), hand.until_ns), (None, 48 * MS), "it is waited for");
    hand.at(48 * MS);
    assert_eq!(owners(&hand.all()), [3, 3]);
    hand.at(50 * MS).insert(row(1, 2, 1)).insert(row(2, 0, 1));
    hand.at(60 * MS).end_all().at(68 * MS);
    assert_eq!(owners(&hand.all()), [2], "the other had 38 ms, though it was there first");
}

#[test]
fn who_never_stops_thinking_is_not_waited_for() {
    let mut hand = hand(FairDevice::Seeks);
    let mut now_ns = 0;
    for at in 0..10 {
        hand.at(now_ns).insert(row(1, at, 1));
        assert_eq!(hand.all().len(), 1);
        hand.end_all();
        now_ns += 100 * MS;
    }
    hand.at(now_ns).insert(row(1, 10, 1));
    assert_eq!(owners(&hand.all()), [1]);
    hand.at(now_ns + MS).end_all().insert(row(2, 0, 1));
    assert_eq!(owners(&hand.all()), [2], "at once");
}

#[test]
fn asynchronous_writes_of_a_submitter_are_sorted_and_not_waited_for() {
    let mut hand = hand(FairDevice::Seeks);
    hand.insert([900, 100, 500].map(|sector| write(1, sector)));
    assert_eq!(hand.all(), [100, 500, 900]);
    hand.insert([read(4, 5000), write(1, 700)]);
    assert_eq!(hand.all(), [700], "its turn");
    hand.at(MS).end_all();
    assert_eq!(hand.all(), [5000], "at once");
    // While a reader is waited for there are no writes.
    hand.insert([write(1, 0)]).end_all();
    assert_eq!((hand.next(), hand.until_ns), (None, 9 * MS));
}

#[test]
fn bios_of_an_unknown_submitter_are_told_apart_as_the_option_says() {
    for (stream, expected) in [(StreamKey::Sequence, 3), (StreamKey::Queue, 2), (StreamKey::Export, 1)] {
        let config = FairConfig { device: FairDevice::Seeks, stream, ..FairConfig::default() };
        let mut hand = Hand::new(SchedulerConfig::Fair(config));
        // Two readers that move between two queues, in rows, and random bios.
        for at in 0..10_u64 {
            for (place, sector) in
                [1_000_000 + at * 8, 9_000_000 + at * 8, at * 7919 % 900 * 10_000].into_iter().enumerate()
            {
                let mut bio = read(0, sector);
                bio.submitter = ((at + place as u64) % 2) as u16;
                hand.insert([bio]);
            }
        }
        assert_eq!(hand.fact("busy"), Some(expected), "{stream:?}");
    }
}

#[test]
fn writes_nobody_waits_for_have_fewer_turns_and_whole_slices() {
    let mut hand = hand(FairDevice::Seeks);
    let more = |owner: u64, at: u64| if owner == 1 { row(1, at, 1) } else { vec![write(2, 2_000_000 + at * 8)] };
    (0..10).for_each(|at| {
        hand.insert(more(1, at)).insert(more(2, at));
    });
    // Owner of the device, and its consecutive bios; each bio takes 5 ms.
    let mut turns = vec![(1, 0)];
    for at in 10..2000 {
        let owner = hand.next().expect("there is always something") / 1_000_000;
        match turns.last_mut() {
            Some((last, bios)) if *last == owner => *bios += 1,
            _ => turns.push((owner, 1)),
        }
        hand.at(hand.now_ns + 5 * MS).end_all().insert(more(owner, at));
    }
    turns.pop();
    let writes: Vec<u32> = turns.iter().filter(|(owner, _)| *owner == 2).map(|(_, bios)| *bios).collect();
    assert!(writes.len() > 10 && writes.iter().all(|bios| (18..=23).contains(bios)), "{turns:?}");
    let share = f64::from(writes.iter().sum::<u32>()) * 5.0 / 10_000.0;
    assert!((0.2..0.4).contains(&share), "{share}");
}

#[test]
fn a_stream_goes_on_upwards_and_nobody_in_it_waits_for_more_than_two_batches() {
    let mut hand = hand(FairDevice::Seeks);
    hand.insert([500, 100, 900].map(|sector| bio(Op::Read, 1, sector)));
    assert_eq!(hand.take(2), [100, 500]);
    // A later bio is of the next batch, although it is on the way.
    hand.insert([600, 50].map(|sector| bio(Op::Read, 1, sector)));
    assert_eq!(hand.all(), [900, 50, 600]);
}

#[test]
fn those_who_seek_have_their_turn_together() {
    let mut hand = hand(FairDevice::Seeks);
    let mut at = 0;
    let mut jump = |stream: u32| {
        at += 1;
        read(stream, u64::from(stream) * 1_000_000 + at * 7919 % 900 * 1000)
    };
    // Two random streams, until detected, and a sequential one.
    for _ in 0..20 {
        hand.insert([jump(1), jump(2)]);
        let mut out = 0;
        while out < 2 {
            out += hand.all().len();
            let now_ns = hand.now_ns;
            hand.at(now_ns + MS).end_all();
        }
    }
    hand.insert([jump(1), jump(2), jump(1), jump(2)]).insert(row(3, 0, 2));
    let mut owners = owners(&hand.all());
    owners.sort_unstable();
    assert_eq!(owners, [1, 1, 2, 2]);
    hand.end_all();
    assert_eq!(hand.next(), None, "they are waited for as well");
    assert!(hand.until_ns <= hand.now_ns + 8 * MS, "{}", hand.until_ns);
    let until_ns = hand.until_ns;
    hand.at(until_ns);
    assert_eq!(hand.all().len(), 2, "and then it is the other's turn");
}

#[test]
fn a_more_urgent_class_goes_first_and_the_last_only_when_nobody_else_wants_anything() {
    for device in [FairDevice::Seeks, FairDevice::Flat] {
        let mut hand = hand(device);
        hand.insert([
            with(read(1, 10), Priority::Idle),
            with(read(2, 20), Priority::BestEffort),
            with(read(3, 30), Priority::Realtime),
        ]);
        assert_eq!(hand.next(), Some(30));
        hand.end_all().at(20 * MS);
        assert_eq!(hand.all(), [20], "{device:?}");
        hand.end_all().insert([with(read(3, 38), Priority::Realtime)]);
        // Independent of the turn's owner.
        assert_eq!(hand.all(), [38], "{device:?}");
        hand.end_all().at(40 * MS);
        assert_eq!(hand.all(), [10], "{device:?}");
    }
}

#[test]
fn nobody_is_kept_waiting_for_ever_by_a_more_urgent_class() {
    for device in [FairDevice::Seeks, FairDevice::Flat] {
        let mut hand = hand(device);
        hand.insert([with(read(1, 1_000_000), Priority::Idle), read(2, 2_000_000)]);
        let (mut urgent, mut ends) = (0, [None; 3]);
        while ends.contains(&None) {
            urgent += 8;
            hand.insert([with(read(3, 3_000_000 + urgent), Priority::Realtime)]);
            let out = owners(&hand.all());
            out.into_iter().for_each(|owner| ends[owner as usize - 1] = Some(hand.now_ns));
            hand.at(hand.now_ns + MS).end_all();
            assert!(hand.now_ns < 5000 * MS, "{device:?} {ends:?}");
        }
    }
}

#[test]
fn who_wants_little_does_not_wait_for_who_wants_much() {
    let mut hand = hand(FairDevice::Flat);
    hand.insert(row(1, 0, 50));
    assert_eq!(owners(&hand.take(8)), [1; 8]);
    hand.insert(row(2, 0, 1));
    assert_eq!(owners(&hand.take(1)), [2]);
    // Heavy streams take turns, for any number of waiting bios.
    hand.insert(row(3, 0, 13));
    let mut of = [0; 3];
    for _ in 0..5 {
        owners(&hand.end_all().take(5)).into_iter().for_each(|owner| of[owner as usize - 1] += 1);
    }
    assert!(of[2] >= 10, "{of:?}");
}

#[test]
fn a_device_is_given_what_keeps_it_busy_and_who_wants_little_passes_beside_that() {
    let mut hand = hand(FairDevice::Flat);
    // It does one every 20 us, however many it has. Two want all of it.
    let us = MS / 1000;
    hand.insert(row(1, 0, 20)).insert(row(2, 0, 20));
    for at in 20..100_000 {
        hand.take(64);
        let sector = hand.out[0].sector;
        let now_ns = hand.now_ns;
        hand.at(now_ns + 20 * us).end(sector).insert(row((sector / 1_000_000) as u32, at, 1));
    }
    hand.all();
    assert!((1..4).contains(&hand.out.len()), "{:?}", hand.scheduler.snapshot(hand.now_ns).facts);
    hand.insert(row(3, 0, 1));
    assert_eq!(owners(&hand.all()), [3]);
    hand.insert(row(3, 1, 1));
    assert_eq!(hand.all(), [], "it has one there already");
}

#[test]
fn where_others_wait_bios_join_up_to_a_length() {
    let mut hand = hand(FairDevice::Flat);
    hand.insert(row(1, 0, 50));
    assert_eq!((hand.next(), hand.join(1_000_000, 1_000_008)), (Some(1_000_000), Some(1_000_008)));
    assert_eq!(hand.join(1_000_000 - 1000, 1_000_016), Some(1_000_016), "alone, to any");
    hand.insert(row(2, 0, 1));
    assert_eq!(hand.take(2), [2_000_000, 1_000_024]);
    assert_eq!(hand.join(1_000_032 - 249, 1_000_032), None);
    assert_eq!(hand.join(1_000_032 - 248, 1_000_032), Some(1_000_032));
}

#[test]
fn who_comes_back_often_gets_no_more_than_its_due() {
    let mut hand = hand(FairDevice::Flat);
    hand.insert(row(1, 0, 50));
    let mut of = [0; 2];
    for at in 0..60 {
        // One bio at a time, as soon as the previous one ends.
        hand.insert(row(2, at, 1));
        loop {
            let next = hand.next().expect("there is always something") / 1_000_000;
            hand.end_all();
            of[next as usize - 1] += 1;
            if next == 2 {
                break;
            }
            hand.insert(row(1, 50 + of[0] as u64, 1));
        }
    }
    assert!(of[0] >= 40, "{of:?}");
}

#[test]
fn weights_are_shares() {
    let mut weights = [(0, 0); FAIR_WEIGHTS_MAX];
    weights[0] = (2, 300);
    let config = FairConfig { device: FairDevice::Flat, weights, ..FairConfig::default() };
    let mut hand = Hand::new(SchedulerConfig::Fair(config));
    let mut of = [0_u32; 3];
    hand.insert(row(1, 0, 20)).insert(row(2, 0, 20));
    for at in 20..2000 {
        let next = hand.next().expect("there is always something") / 1_000_000;
        hand.end_all().insert(row(next as u32, at, 1));
        of[next as usize] += 1;
    }
    let times = f64::from(of[2]) / f64::from(of[1]);
    assert!((2.8..3.2).contains(&times), "{of:?}");
}

#[test]
fn what_is_discarded_is_no_data_that_others_wait_for() {
    let mut hand = hand(FairDevice::Flat);
    let mut all = bio(Op::Discard, 2, 0);
    all.sectors = u32::MAX;
    hand.insert([all]);
    assert_eq!(hand.next(), Some(0));
    // Beside a constant reader, a stream that discarded two terabytes does not wait until as much is read.
    hand.insert(row(1, 0, 20)).insert([write(3, 8)]);
    let mut came = Vec::new();
    for at in 20..500 {
        let sector = hand.next().expect("there is always something");
        came.push(sector);
        if sector != 8 {
            hand.end(sector).insert(row(1, at, 1));
        }
    }
    assert!(came.contains(&8), "the write waits");
}

#[test]
fn streams_that_come_and_go_take_no_places() {
    let mut hand = hand(FairDevice::Flat);
    // Many more than slots, with at most two bios each, of which one joins the other.
    for stream in 1..2000_u32 {
        let at = u64::from(stream) * 1_000_000;
        hand.insert(row(stream, 0, 2));
        assert_eq!((hand.next(), hand.join(at, at + 8)), (Some(at), Some(at + 8)));
        hand.end_all();
    }
}

#[test]
fn a_clock_that_goes_back_a_little_does_no_harm() {
    // A queue that goes to another lane takes the time of another clock.
    let mut hand = hand(FairDevice::Seeks);
    hand.at(50 * MS).insert(row(1, 0, 3)).insert(row(2, 0, 1));
    assert_eq!(owners(&hand.take(2)), [1, 1]);
    hand.end(1_000_000).at(50 * MS - 1000);
    assert_eq!(owners(&hand.take(1)), [1]);
    hand.at(150 * MS).end_all();
    assert_eq!(owners(&hand.take(1)), [2]);
}

/// A random request.
fn request() -> impl Strategy<Value = (u32, u64, u8, bool, u64)> {
    (0_u32..6, 0_u64..50, 0_u8..3, any::<bool>(), 0_u64..30)
}

proptest! {
    /// On either kind of device, and on one that is found to be of the other kind all the time, everything that goes in
    /// comes out, each within a bound, however it is ended.
    #[test]
    fn nothing_is_lost_and_nobody_waits_for_ever(
        requests in prop::collection::vec(request(), 1..300),
        device in prop_oneof![Just(FairDevice::Seeks), Just(FairDevice::Flat), Just(FairDevice::Measured)],
        drain: bool,
        idle_ms in 0_u32..10,
    ) {
        let config = FairConfig { device, drain, idle_ms, ..FairConfig::default() };
        let mut hand = Hand::new(SchedulerConfig::Fair(config));
        let (mut wanted, mut came) = (0, 0);
        for (stream, place, class, write, gap_ms) in requests {
            let sector = u64::from(stream) * 1_000_000 + place * 8 * (1 + u64::from(stream) * 1000);
            let op = if write { Op::Write } else { Op::Read };
            if wanted - came < 40 {
                hand.insert([with(bio(op, stream, sector), Priority::ALL[usize::from(class)])]);
                wanted += 1;
            }
            came += hand.take(gap_ms as usize % 3).len();
            hand.at(hand.now_ns + gap_ms * MS);
            if gap_ms % 2 == 0 {
                hand.end_all();
            }
        }
        // From here on the device takes 10 ms for each, one at a time.
        let until_ns = hand.now_ns + 20_000 * MS;
        while came < wanted {
            if hand.next().is_some() {
                came += 1;
                hand.at(hand.now_ns + 10 * MS).end_all();
            } else if hand.out.is_empty() {
                prop_assert!(hand.until_ns < u64::MAX, "{} of {wanted} came", came);
                let until_ns = hand.until_ns;
                hand.at(until_ns);
            } else {
                hand.end_all();
            }
            prop_assert!(hand.now_ns < until_ns, "{} of {wanted} came", came);
        }
        hand.end_all();
        prop_assert_eq!(hand.fact("busy"), Some(0));
        prop_assert_eq!(hand.fact("in_flight"), Some(0));
    }
}
