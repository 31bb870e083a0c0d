//! The rules of mq-deadline, one by one: spec A.26.

use super::{Hand, MS, bio, read, with, write};
use crate::sched::{DeadlineConfig, SchedulerConfig};
use crate::{Op, Priority};

fn hand(config: DeadlineConfig) -> Hand {
    Hand::new(SchedulerConfig::Deadline(config))
}

fn usual() -> Hand {
    hand(DeadlineConfig::default())
}

fn sync_write(sector: u64) -> Box<crate::Bio> {
    let mut bio = write(0, sector);
    bio.sync = true;
    bio
}

#[test]
fn a_batch_goes_up_by_sectors_and_the_next_begins_with_the_oldest_when_none_is_higher() {
    let mut hand = usual();
    hand.insert([300, 100, 500, 200].map(|sector| read(0, sector)));
    assert_eq!(hand.take(2), [100, 200]);
    // Behind the position, so after those above it.
    hand.insert([50, 20].map(|sector| read(0, sector)));
    assert_eq!(hand.all(), [300, 500, 50, 20]);
}

#[test]
fn a_batch_ends_after_its_requests_and_another_begins_above_it() {
    let mut hand = hand(DeadlineConfig { fifo_batch: 2, ..DeadlineConfig::default() });
    hand.insert([10, 20, 30].map(|sector| read(0, sector)));
    hand.insert([15, 25].map(sync_write));
    // Reads are preferred twice, then it is the writes' turn, if they have been passed over twice.
    assert_eq!(hand.all(), [10, 20, 30, 15, 25]);
}

#[test]
fn reads_go_first_until_writes_have_been_passed_over_twice() {
    let mut hand = hand(DeadlineConfig { fifo_batch: 1, ..DeadlineConfig::default() });
    hand.insert((0..6).map(|at| read(0, 100 * at)));
    hand.insert((0..3).map(|at| sync_write(1000 + 100 * at)));
    assert_eq!(hand.all(), [0, 100, 1000, 200, 300, 1100, 400, 500, 1200]);
}

#[test]
fn without_reads_writes_go_at_once() {
    let mut hand = usual();
    hand.insert([sync_write(200), sync_write(100)]);
    assert_eq!(hand.all(), [100, 200]);
}

#[test]
fn a_batch_of_writes_is_not_broken_off_for_reads() {
    let mut hand = usual();
    hand.insert((0..4).map(|at| sync_write(100 * at)));
    assert_eq!(hand.take(2), [0, 100]);
    hand.insert([read(0, 50)]);
    assert_eq!(hand.all(), [200, 300, 50]);
}

#[test]
fn the_oldest_goes_first_once_its_time_is_up_but_not_within_a_batch() {
    let config = DeadlineConfig { fifo_batch: 2, ..DeadlineConfig::default() };
    let expiries: [(fn(u64) -> Box<crate::Bio>, u64); 2] = [(|sector| read(0, sector), 500), (sync_write, 5000)];
    for (make, expire_ms) in expiries {
        for (age_ms, wanted) in [(expire_ms - 1, [300, 400, 500, 100]), (expire_ms, [100, 300, 400, 500])] {
            let mut hand = hand(config);
            hand.insert([make(150)]);
            assert_eq!(hand.all(), [150]);
            hand.insert([make(100)]);
            hand.at(MS).insert([200, 300, 400, 500].map(make));
            assert_eq!(hand.at(age_ms * MS).take(1), [200], "the batch goes on");
            assert_eq!(hand.all(), wanted);
        }
    }
}

#[test]
fn a_batch_that_begins_with_the_oldest_goes_on_from_there() {
    let mut hand = hand(DeadlineConfig { fifo_batch: 3, ..DeadlineConfig::default() });
    hand.insert([read(0, 900)]);
    assert_eq!(hand.all(), [900]);
    hand.insert([100, 700, 300].map(|sector| read(0, sector)));
    assert_eq!(hand.all(), [100, 300, 700]);
}

#[test]
fn a_lower_class_waits_until_nothing_of_a_higher_one_is_here_or_on_its_way() {
    let mut hand = usual();
    hand.insert([read(0, 100), with(read(0, 200), Priority::Idle), with(read(0, 300), Priority::Realtime)]);
    assert_eq!(hand.all(), [300]);
    assert_eq!(hand.end(300).all(), [100]);
    assert_eq!(hand.until_ns, 10_000 * MS + 1, "asked again when it is old");
    assert_eq!(hand.end(100).all(), [200]);
}

#[test]
fn who_waits_in_a_lower_class_for_ten_seconds_goes_first() {
    for (prio_aging_expire_ms, at_ms, wanted) in
        [(10_000, 10_000, vec![100, 300]), (10_000, 10_001, vec![200, 100, 300]), (0, 60_000, vec![100, 300])]
    {
        let mut hand = hand(DeadlineConfig { prio_aging_expire_ms, ..DeadlineConfig::default() });
        hand.insert([with(read(0, 200), Priority::Idle)]);
        hand.at(at_ms * MS).insert([read(0, 300), read(0, 100)]);
        assert_eq!(hand.all(), wanted, "{prio_aging_expire_ms} ms, at {at_ms} ms");
    }
}

#[test]
fn a_class_has_its_own_expiry_and_position() {
    let mut hand = usual();
    hand.insert([with(read(0, 500), Priority::Realtime), with(read(0, 400), Priority::Realtime), read(0, 50)]);
    assert_eq!(hand.all(), [400, 500]);
    assert_eq!(hand.end_all().all(), [50], "not looked for above 500");
}

#[test]
fn writes_nobody_waits_for_leave_tags_to_others() {
    // Of 8 tags 6.
    for (async_depth, wanted) in [(0, 6), (2, 2), (100, 10)] {
        let mut hand = hand(DeadlineConfig { async_depth, ..DeadlineConfig::default() });
        hand.insert((0..10).map(|at| write(0, 100 * at)));
        assert_eq!((hand.all().len(), hand.fact("async_out")), (wanted, Some(wanted as u64)));
        if wanted < 10 {
            assert_eq!(hand.until_ns, u64::MAX);
            assert_eq!(hand.insert([read(0, 5)]).all(), [5]);
            assert_eq!(hand.end(0).all(), [100 * wanted as u64]);
        }
    }
}

#[test]
fn neighbours_join_behind_and_with_front_merges_before() {
    for (front_merges, wanted) in [(true, vec![116, 124, 100]), (false, vec![116, 124])] {
        let mut hand = hand(DeadlineConfig { front_merges, ..DeadlineConfig::default() });
        hand.insert([108, 124, 100, 116, 200].map(|sector| read(0, sector)));
        hand.insert([write(0, 132)]);
        hand.at(500 * MS);
        assert_eq!(hand.next(), Some(108), "its time is up");
        let (mut start, mut end) = (108, 116);
        let mut joined = Vec::new();
        while let Some(sector) = hand.join(start, end) {
            (start, end) = (start.min(sector), end.max(sector + 8));
            joined.push(sector);
        }
        assert_eq!(joined, wanted, "a write is no neighbour of a read");
    }
}

#[test]
fn who_joins_is_no_request_of_the_batch() {
    let mut hand = hand(DeadlineConfig { fifo_batch: 2, ..DeadlineConfig::default() });
    hand.insert([100, 108, 116, 200, 300].map(|sector| read(0, sector)));
    assert_eq!((hand.next(), hand.join(100, 108), hand.join(100, 116)), (Some(100), Some(108), Some(116)));
    assert_eq!((hand.next(), hand.fact("batch")), (Some(200), Some(2)));
}

#[test]
fn what_is_neither_read_nor_written_goes_with_the_writes() {
    let mut hand = usual();
    hand.insert([bio(Op::Discard, 0, 100), bio(Op::WriteZeroes, 0, 200), read(0, 300)]);
    assert_eq!((hand.fact("reads"), hand.fact("writes")), (Some(1), Some(2)));
    assert_eq!(hand.all(), [300, 100, 200]);
}

#[test]
fn what_waits_is_given_back_in_the_order_it_came() {
    let mut hand = usual();
    hand.insert([300, 100, 200].map(|sector| read(0, sector)));
    hand.insert([write(0, 50), with(read(0, 10), Priority::Realtime)]);
    assert_eq!(hand.next(), Some(10));
    let mut left = Vec::new();
    hand.scheduler.drain(&mut |bio| left.push(bio.sector));
    assert_eq!(left, [300, 100, 200, 50]);
}
