//! A guest that asks for as much as it may, and its neighbour on the same lane: turn by turn, without a clock.

use blkyard_mq::{DeviceInfo, HwQueueConfig};

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
