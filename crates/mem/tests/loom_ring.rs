//! The thread ring under loom: every order of a producer and a consumer, on rings small enough to wrap.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blkyard-mem --test loom_ring`
//!
//! loom checks besides that a slot is never read while it is written, nor before it was. Models without a bound are
//! explored to the end; each prints how many orders that were.
#![cfg(loom)]

mod common;

use blkyard_mem::ring::{Consumer, Producer, channel};
use common::explore;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

/// Pushes `count` values in batches, as room permits; yields without room.
fn produce(mut producer: Producer<usize>, count: usize, batch: usize) {
    for value in 0..count {
        let mut submission = value;
        while let Err(back) = producer.push(submission) {
            submission = back;
            producer.publish();
            thread::yield_now();
        }
        if (value + 1) % batch == 0 {
            producer.publish();
        }
    }
    producer.publish();
}

fn consume(mut consumer: Consumer<usize>, count: usize, batch: usize) {
    let mut next = 0;
    while next < count {
        if let Some(value) = consumer.pop() {
            assert_eq!(value, next);
            next += 1;
            if next % batch == 0 {
                consumer.release();
            }
        } else {
            consumer.release();
            thread::yield_now();
        }
    }
    assert!(consumer.pop().is_none());
}

fn both(name: &str, preemptions: Option<usize>, [capacity, count, batch]: [usize; 3]) {
    explore(name, preemptions, move || {
        let (producer, consumer) = channel(capacity);
        let other = thread::spawn(move || produce(producer, count, batch));
        consume(consumer, count, batch);
        other.join().unwrap();
    });
}

#[test]
fn one_place_wraps() {
    both("one place", None, [1, 3, 1]);
}

#[test]
fn two_places_wrap() {
    both("two places", Some(4), [2, 4, 1]);
}

#[test]
fn two_places_in_batches_wrap() {
    both("two places in batches", None, [2, 4, 2]);
}

/// Remaining values are dropped exactly once, whichever end is dropped last.
#[test]
fn what_is_left_is_dropped_once() {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    explore("what is left", None, || {
        let dropped = Arc::new(AtomicUsize::new(0));
        let (mut producer, mut consumer) = channel(2);
        let counter = Arc::clone(&dropped);
        let other = thread::spawn(move || {
            for _ in 0..2 {
                producer.push(Counted(Arc::clone(&counter))).ok().unwrap();
                producer.publish();
            }
        });
        drop(consumer.pop());
        drop(consumer);
        other.join().unwrap();
        assert_eq!(dropped.load(Ordering::Relaxed), 2);
    });
}
