//! After start the data path allocates nothing.

mod common;

use blkyard_mem::CountingAllocator;
use blkyard_mq::{BioFlags, Op};
use blkyard_os::{Direct, FileConfig};
use common::{Bench, bio, folders, image, range, run_once};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn requests_of_all_kinds_allocate_nothing() {
    for folder in folders() {
        for direct in [Direct::Auto, Direct::Off] {
            let path = image(&folder, 8 << 20);
            let mut bench = Bench::new(FileConfig { direct, ..FileConfig::new(path) }, 32);
            // Straight, torn, copied, and without data.
            let mut bios: Vec<_> = (0..64)
                .map(|i: u64| match i % 8 {
                    0..3 => bio(Op::Read, i * 8, &[(i * 4096, 4096)]),
                    3 => bio(Op::Write, i * 8, &[(i * 4096, 4096), (1 << 20, 4096)]),
                    4 => bio(Op::Write, i * 8, &[(i * 4096 + 1, 4096)]),
                    5 => range(Op::WriteZeroes, i * 8, 8, BioFlags::NO_UNMAP),
                    6 => range(Op::Flush, 0, 0, BioFlags::empty()),
                    _ => range(Op::Discard, i * 8, 8, BioFlags::empty()),
                })
                .collect();
            let mut ended = Vec::with_capacity(bios.len());
            for round in 0..4 {
                let before = CountingAllocator::count();
                let all = bios.len();
                bios.drain(..).for_each(|bio| bench.queue.submit(bio));
                while ended.len() < all {
                    run_once(&mut bench.queue, &mut bench.ring, &mut |bio| ended.push(bio));
                }
                let allocated = CountingAllocator::count() - before;
                assert!(ended.iter().all(|bio| bio.status.is_ok()));
                assert!(before > 0, "the allocator counts");
                assert_eq!(allocated, 0, "in round {round}");
                std::mem::swap(&mut bios, &mut ended);
            }
        }
    }
}
