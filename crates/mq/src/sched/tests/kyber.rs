//! The rules of Kyber, one by one: spec A.26.

use super::{Hand, MS, bio, read, write};
use crate::Op;
use crate::sched::{KyberConfig, SchedulerConfig};

/// Targets of 2 and 10 ms, and room for many.
fn hand() -> Hand {
    Hand::of(SchedulerConfig::Kyber(KyberConfig::default()), 2000)
}

fn many(op: Op, count: u64) -> impl Iterator<Item = Box<crate::Bio>> {
    (0..count).map(move |at| bio(op, 0, 1000 * (op as u64 + 1) * 1000 + at * 100))
}

fn tokens(hand: &Hand) -> [u64; 4] {
    ["read_tokens", "write_tokens", "discard_tokens", "other_tokens"].map(|name| hand.fact(name).unwrap())
}

/// So many of a kind come, wait, and take so long.
fn pass(hand: &mut Hand, op: Op, count: u64, wait_ns: u64, io_ns: u64) {
    for bio in many(op, count) {
        let now_ns = hand.insert([bio]).now_ns;
        assert!(hand.at(now_ns + wait_ns).next().is_some());
        hand.at(now_ns + wait_ns + io_ns).end_all_after(io_ns);
        hand.at(now_ns);
    }
    let now_ns = hand.now_ns;
    hand.at(now_ns + wait_ns + io_ns);
}

/// Ends the window: with something that is measured, and well within its target.
fn window(hand: &mut Hand) {
    let now_ns = hand.now_ns + 150 * MS;
    hand.at(now_ns).insert([bio(Op::Discard, 0, 0)]);
    assert!(hand.next().is_some());
    hand.end_all();
}

#[test]
fn each_domain_has_no_more_on_its_way_than_tokens() {
    for (op, most) in [(Op::Read, 256), (Op::Write, 128), (Op::Discard, 64), (Op::WriteZeroes, 16)] {
        let mut hand = hand();
        hand.insert(many(op, most + 1));
        assert_eq!(hand.all().len() as u64, most, "{op:?}");
        assert_eq!(hand.until_ns, u64::MAX, "until one of them ends");
        let first = hand.out[0].sector;
        assert_eq!(hand.end(first).all().len(), 1);
    }
}

#[test]
fn domains_take_turns_by_batches_and_who_has_none_is_passed_over() {
    let mut hand = hand();
    let ops = [(Op::Read, 40), (Op::Write, 10), (Op::Discard, 3), (Op::WriteZeroes, 1)];
    ops.into_iter().for_each(|(op, count)| {
        hand.insert(many(op, count));
    });
    let _ = hand.all();
    let mut runs: Vec<(Op, usize)> = Vec::new();
    for bio in &hand.out {
        match runs.last_mut() {
            Some((op, count)) if *op == bio.op => *count += 1,
            _ => runs.push((bio.op, 1)),
        }
    }
    let (read, write, discard) = (Op::Read, Op::Write, Op::Discard);
    let first = [(read, 16), (write, 8), (discard, 1), (Op::WriteZeroes, 1)];
    let then = [(read, 16), (write, 2), (discard, 1), (read, 8), (discard, 1)];
    assert_eq!(runs, [&first[..], &then[..]].concat());
}

#[test]
fn within_a_domain_the_order_is_that_of_arrival() {
    let mut hand = hand();
    hand.insert([300, 100, 200].map(|sector| read(0, sector)));
    assert_eq!(hand.all(), [300, 100, 200]);
}

#[test]
fn neighbours_join_if_there_is_a_token_for_them() {
    let mut hand = hand();
    hand.insert([100, 500, 108].map(|sector| read(0, sector))).insert([write(0, 116)]);
    assert_eq!((hand.next(), hand.join(100, 108), hand.join(100, 116)), (Some(100), Some(108), None));
    hand.insert((0..300).map(|at| read(0, 10_000 + at * 100)));
    let _ = hand.all();
    hand.insert([read(0, 124)]);
    assert_eq!(hand.join(116, 124), None);
}

#[test]
fn a_device_that_is_congested_gets_less_of_who_is_well_and_more_of_who_suffers() {
    let mut hand = hand();
    // Reads take 3 ms where 2 are wanted, writes 1 where 10 are.
    pass(&mut hand, Op::Read, 600, 0, 3 * MS);
    pass(&mut hand, Op::Write, 600, 0, MS);
    assert_eq!(tokens(&hand), [256, 128, 64, 16], "not before the window ends");
    window(&mut hand);
    // The slowest writes are in the first quarter of their target: a fourth. Reads have all there are. The others did
    // not say.
    assert_eq!(tokens(&hand), [256, 32, 64, 16]);
    // Again, and the writes suffer: they wait for 13 ms, which is in the sixth quarter.
    pass(&mut hand, Op::Read, 600, 0, 3 * MS);
    pass(&mut hand, Op::Write, 600, 13 * MS, MS);
    window(&mut hand);
    assert_eq!(tokens(&hand), [256, 48, 64, 16]);
}

#[test]
fn without_congestion_only_who_suffers_gets_more() {
    let mut hand = hand();
    pass(&mut hand, Op::Read, 600, 0, 3 * MS);
    pass(&mut hand, Op::Write, 600, 0, MS);
    window(&mut hand);
    assert_eq!(tokens(&hand)[1], 32);
    // It is not the device that keeps writes waiting, and reads are fine.
    pass(&mut hand, Op::Read, 600, 0, MS);
    pass(&mut hand, Op::Write, 600, 40 * MS, MS);
    window(&mut hand);
    assert_eq!(tokens(&hand), [256, 64, 64, 16]);
}

#[test]
fn what_a_domain_said_before_counts_in_one_congestion_only() {
    let mut hand = hand();
    pass(&mut hand, Op::Write, 600, 0, MS);
    window(&mut hand);
    assert_eq!(tokens(&hand)[1], 128, "no congestion");
    for _ in 0..2 {
        pass(&mut hand, Op::Read, 600, 0, 3 * MS);
        window(&mut hand);
        assert_eq!(tokens(&hand)[1], 32);
    }
}

#[test]
fn few_samples_do_after_a_second() {
    let mut hand = hand();
    pass(&mut hand, Op::Read, 10, 0, 3 * MS);
    pass(&mut hand, Op::Write, 10, 0, MS);
    window(&mut hand);
    assert_eq!(tokens(&hand)[1], 128);
    (0..8).for_each(|_| window(&mut hand));
    assert_eq!(tokens(&hand)[1], 32);
}

#[test]
fn a_domain_keeps_one_token() {
    let mut hand = hand();
    for wanted in [32, 8, 2, 1, 1] {
        pass(&mut hand, Op::Read, 600, 0, 3 * MS);
        pass(&mut hand, Op::Write, 600, 0, MS);
        window(&mut hand);
        assert_eq!(tokens(&hand)[1], wanted);
    }
}
