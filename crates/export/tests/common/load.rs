//! A guest that verifies its data.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use super::{Data, Vq, kind};

/// Writes to the queue's own part of the disk and reads back, many requests at a time, until `over`. Returns the number
/// of completions and the longest gap between them.
pub fn load(number: usize, vq: &mut Vq, answered: &AtomicU64, over: &AtomicBool) -> Duration {
    let bytes = |slot: u16, round: u8| vec![round ^ slot as u8 ^ 0x5a; 4096];
    let sector = |slot: u16| number as u64 * 2048 + u64::from(slot) * 8;
    let mut rounds = vec![(0_u8, false); usize::from(vq.slots())];
    let mut out = vec![true; rounds.len()];
    for slot in 0..vq.slots() {
        vq.put(slot, kind::OUT, sector(slot), Data::Out(&bytes(slot, 0)));
    }
    vq.publish();
    let (mut longest, mut last) = (Duration::ZERO, Instant::now());
    while out.contains(&true) {
        let (head, written) = vq.wait_used();
        longest = longest.max(last.elapsed());
        last = Instant::now();
        answered.fetch_add(1, SeqCst);
        let slot = head as u16 / 3;
        let (round, reading) = &mut rounds[usize::from(slot)];
        assert!(std::mem::take(&mut out[usize::from(slot)]), "request {slot} of queue {number} was answered twice");
        assert_eq!((vq.status(slot), written), (0, if *reading { 4097 } else { 1 }));
        if *reading {
            let back = vq.ram.read(vq.data_at(slot), 4096);
            assert!(back == bytes(slot, *round), "request {slot} of queue {number} brings what was not written");
            *round = round.wrapping_add(1);
        }
        *reading = !*reading;
        if over.load(SeqCst) {
            continue;
        }
        out[usize::from(slot)] = true;
        if *reading {
            vq.put(slot, kind::IN, sector(slot), Data::In(4096));
        } else {
            vq.put(slot, kind::OUT, sector(slot), Data::Out(&bytes(slot, *round)));
        }
        vq.publish();
    }
    assert_eq!(vq.poll(), None, "an answer to nothing");
    longest
}
