//! After start the data path allocates nothing, from the available ring to the used ring. Counted on the thread that
//! runs the queue, so the control path may free its last message meanwhile.

use blkyard_mem::CountingAllocator;

use crate::common::{Data, Hand, kind, range};

#[test]
fn requests_of_all_kinds_allocate_nothing() {
    for latency_ns in [0, 1] {
        let mut hand = Hand::new(latency_ns);
        let (front, mut vq) = hand.connect();
        for round in 0..5 {
            let before = CountingAllocator::count();
            for slot in 0..vq.slots() {
                let sector = u64::from(slot) * 16;
                match slot % 7 {
                    0 => vq.put(slot, kind::IN, sector, Data::In(4096)),
                    1 => vq.put(slot, kind::OUT, sector, Data::Out(&[1; 4096])),
                    2 => vq.put(slot, kind::FLUSH, 0, Data::None),
                    3 => vq.put(slot, kind::DISCARD, 0, Data::Out(&range(sector, 8, 0))),
                    4 => vq.put(slot, kind::WRITE_ZEROES, 0, Data::Out(&range(sector, 8, 1))),
                    5 => vq.put(slot, kind::GET_ID, 0, Data::In(20)),
                    _ => vq.put(slot, 77, 0, Data::None),
                }
            }
            vq.publish();
            let mut answered = 0;
            for _ in 0..10 {
                hand.turn();
                hand.nod();
                answered += std::iter::from_fn(|| vq.poll()).count();
            }
            let allocated = CountingAllocator::count() - before;
            assert_eq!(answered, usize::from(vq.slots()), "round {round}");
            assert!(before > 0, "the allocator counts");
            assert_eq!(allocated, 0, "round {round}");
            assert!((0..vq.slots()).all(|slot| vq.status(slot) == if slot % 7 == 6 { 2 } else { 0 }));
        }
        hand.stop();
        drop(front);
    }
}
