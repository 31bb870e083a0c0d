//! Without locked memory I/O works unregistered, with the cause. A separate process, since the limit is global.

mod common;

use std::sync::Arc;

use blkyard_mq::{Op, Region, RegionTable, Status};
use blkyard_os::{FileConfig, FixedBuffers};
use common::{Bench, bio, folders, image, pattern};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

#[test]
fn beyond_the_limit_on_locked_memory_io_goes_on_and_says_why() {
    let folder = &folders()[0];
    let path = image(folder, 1 << 20);
    std::fs::write(&path, pattern(1 << 20, 8)).unwrap();
    // At most the hard limit, which not every user may raise.
    let most = getrlimit(Resource::Memlock).maximum;
    let limit = most.map_or(8 << 20, |most| most.min(8 << 20));
    setrlimit(Resource::Memlock, Rlimit { current: Some(limit), maximum: most }).unwrap();
    // The limit covers all of a user's processes, so it leaves room for others; the ring and the eight mebibytes of the
    // queue are more. For this thread only: the superuser's memory is not counted.
    let mut own = capabilities(None).unwrap();
    own.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, own).unwrap();

    let mut bench = Bench::new(FileConfig::new(&path), 4);
    match bench.ring.buffers() {
        FixedBuffers::Plain { reason } => {
            assert!(reason.contains(&format!("{} KiB", limit >> 10)) && reason.contains("ulimit -l"), "{reason}");
        }
        registered @ FixedBuffers::Registered { .. } => panic!("{registered:?}"),
    }
    assert_eq!(bench.one(bio(Op::Read, 0, &[(0, 65_536)])), Status::Ok);
    assert_eq!(bench.one(bio(Op::Read, 8, &[(1 << 20, 4096), (0, 512)])), Status::Ok);
    assert!(bench.bytes(1 << 20, 4096) == pattern(1 << 20, 8)[4096..8192]);

    // Less memory fits, once the other is gone.
    let small = Region::anonymous(32_768).unwrap();
    let table = RegionTable::new(vec![small]);
    bench.queue.set_memory(&mut bench.ring, Arc::new(table));
    assert_eq!(bench.ring.buffers(), FixedBuffers::Registered { bytes: 32_768 });
    assert_eq!(bench.one(bio(Op::Read, 0, &[(0, 16_384)])), Status::Ok);
}
