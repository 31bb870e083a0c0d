//! A guest that asks for as much as it may, and its neighbour on the same lane: turn by turn, without a clock.

use std::sync::Arc;

use blkyard_mq::{DeviceInfo, HwQueueConfig};
use blkyard_virtio::INDIRECT_BYTES_MAX;
use blkyard_virtio::driver_model::Descriptor;

use crate::common::{Data, Hand, disk_info, kind, range};

/// Bytes of one request of the greedy guest.
const BIG_BYTES: u32 = 64 << 20;
/// Of such requests, all offered at once.
const BIGS: u16 = 8;
/// I/Os of the neighbour between two of those that end: it takes two turns for one, and a big one takes sixty-four
/// turns of half a mebibyte begun.
const BETWEEN_MIN: u32 = 30;

/// Turns a lane of two while one guest has big requests under way: I/Os of the other one before each that ends.
fn ios_between(op: u32, data: Data<'_>) -> Vec<u32> {
    let info = DeviceInfo { capacity_sectors: u64::from(BIG_BYTES) >> 9, ..disk_info() };
    let mut greedy = Hand::serving(&info, 0, HwQueueConfig::default());
    let mut neighbour = Hand::new(0);
    let (big_front, mut big) = greedy.connect_with(u64::from(BIG_BYTES) + (4 << 20));
    let (small_front, mut small) = neighbour.connect();
    for slot in 0..BIGS {
        big.put(slot, op, 0, data);
    }
    big.publish();
    let (mut between, mut ios) = (Vec::new(), 0);
    small.put(0, kind::IN, 0, Data::In(4096));
    small.publish();
    while between.len() < usize::from(BIGS) {
        greedy.turn();
        neighbour.turn();
        if small.poll().is_some() {
            assert_eq!(small.status(0), 0);
            ios += 1;
            small.put(0, kind::IN, 0, Data::In(4096));
            small.publish();
        }
        while let Some((head, _)) = big.poll() {
            assert_eq!(big.status((head / 3) as u16), 0);
            between.push(std::mem::take(&mut ios));
        }
    }
    drop((big_front, small_front));
    greedy.stop();
    neighbour.stop();
    between
}

#[test]
fn a_neighbour_gets_its_turns_between_the_parts_of_long_requests() {
    let between = ios_between(kind::IN, Data::In(BIG_BYTES));
    assert!(between.iter().all(|ios| *ios >= BETWEEN_MIN), "{between:?}");
}

#[test]
fn a_neighbour_gets_its_turns_while_gigabytes_are_cleared() {
    // Sixteen parts each of four mebibytes, one to a turn.
    for op in [kind::DISCARD, kind::WRITE_ZEROES] {
        let between = ios_between(op, Data::Out(&range(0, BIG_BYTES >> 9, 0)));
        assert!(between.iter().all(|ios| *ios >= 7), "{between:?}");
    }
}

#[test]
fn a_turn_walks_one_chain_of_too_many_descriptors() {
    assert_walks_one_chain_a_turn(1);
}

#[test]
fn a_turn_walks_one_such_chain_of_all_queues_of_a_guest() {
    assert_walks_one_chain_a_turn(2);
}

fn assert_walks_one_chain_a_turn(queues: usize) {
    const TABLE: u64 = 2 << 20;
    // While the device has a request, nothing else bounds the chains of a turn.
    let mut hand = Hand::with_queues(&disk_info(), 1_000_000_000, HwQueueConfig::default(), queues);
    let (front, mut vqs) = hand.connect_all(4 << 20);
    vqs[0].put(0, kind::IN, 0, Data::In(512));
    vqs[0].publish();
    hand.turn();
    let rows = INDIRECT_BYTES_MAX / 16;
    let (ram, size) = (Arc::clone(&vqs[0].ram), vqs[0].size);
    for row in 1..=rows {
        let flags = if row < rows { Descriptor::NEXT } else { 0 };
        let descriptor = Descriptor { addr: ram.guest_addr + (3 << 20), len: 512, flags, next: row as u16 };
        ram.write(TABLE + u64::from(row - 1) * 16, &descriptor.to_bytes());
    }
    let heads = 3..size;
    for vq in &mut vqs {
        for head in heads.clone() {
            let addr = ram.guest_addr + TABLE;
            vq.descriptor(head, Descriptor { addr, len: INDIRECT_BYTES_MAX, flags: Descriptor::INDIRECT, next: 0 });
            vq.offer(head);
        }
        vq.publish();
    }
    for refused in 1..=(queues * heads.len()) as u64 {
        hand.turn();
        assert_eq!(hand.refused(), refused, "a neighbour waits for more than one walk");
    }
    for vq in &mut vqs {
        assert_eq!(std::iter::from_fn(|| vq.poll()).count(), heads.len());
    }
    drop(front);
    hand.stop();
}
