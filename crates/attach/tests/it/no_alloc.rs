//! After start the data path allocates nothing, from the bio to the available ring and from the used ring to the bio.
//! Counted on the thread that runs the queue; the control thread may allocate.

use blkyard_attach::{AttachConfig, Attached};
use blkyard_mem::CountingAllocator;
use blkyard_mq::{Op, QueueKind, Status};

use crate::common::{Backend, SLOTS, User, config, disk, place};

#[test]
fn requests_of_all_kinds_allocate_nothing() {
    for packed in [false, true] {
        let (_folder, path) = place();
        let device = disk();
        let backend = Backend::start(&path, &device, 2);
        let attached = Attached::open(AttachConfig { packed, ..config(&path) }).unwrap();
        for kind in [QueueKind::Default, QueueKind::Poll] {
            let mut user = User::new(&attached, kind);
            user.ended.reserve(SLOTS as usize);
            // By the time one has come back, ring and memory are known.
            assert_eq!(user.one(Op::Write, 0, 0), Status::Ok);
            for round in 0..5 {
                for slot in 0..SLOTS {
                    let ops = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];
                    user.submit(ops[slot as usize % ops.len()], slot, slot);
                }
                let before = CountingAllocator::count();
                if kind == QueueKind::Poll {
                    user.drain();
                } else {
                    user.drain_asleep();
                }
                assert!(before > 0, "the allocator counts");
                assert_eq!(CountingAllocator::count() - before, 0, "packed {packed}, {kind:?}, round {round}");
                assert!(user.ended.iter().all(|bio| bio.status == Status::Ok) && user.ended.len() as u64 == SLOTS);
                user.ended.clear();
            }
        }
        drop(attached);
        backend.stop();
    }
}
