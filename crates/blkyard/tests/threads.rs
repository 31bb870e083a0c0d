//! A disk for more threads than the system gives. A separate process, since it uses up the process's memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use blkyard::{Disk, DiskConfig, QueueCounts};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn without_a_thread_for_each_none_works_and_none_is_waited_for_in_vain() {
    /// More stacks of threads than there is room for; and that room.
    const THREADS: usize = 64;
    const ROOM_BYTES: u64 = 25 << 20;
    let config = DiskConfig { threads: THREADS, depth: 1, buffer_bytes: 512, queues: QueueCounts::only(1) };
    let mut disk = Disk::open("null:1M", config).unwrap();
    let worked = AtomicUsize::new(0);
    let mut run = || catch_unwind(AssertUnwindSafe(|| disk.run(|_| worked.fetch_add(1, Ordering::Relaxed))));
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let used_bytes = pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096;
    let before = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(used_bytes + ROOM_BYTES), ..before }).unwrap();
    let failed = run();
    setrlimit(Resource::As, before).unwrap();
    let why = failed.unwrap_err();
    let why = why.downcast_ref::<String>().unwrap();
    assert!(why.contains("null:1M: a thread for each submitter cannot be had"), "{why}");
    assert_eq!(worked.load(Ordering::Relaxed), 0);
    assert_eq!(run().unwrap().len(), THREADS, "with enough room all do");
}
