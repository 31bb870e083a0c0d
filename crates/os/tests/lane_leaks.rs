//! Lanes that were started and retired under load leave no thread, no descriptor and no mapping. By itself, so that
//! nobody else opens any meanwhile.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use blkyard_mq::QueueMap;
use blkyard_os::{FileConfig, LaneConfig, Lanes};
use common::mover::{BLOCKS, Mover, Tally};
use common::{image, open};

/// Threads, descriptors, and mappings that are rings or shared memory: those of the heap come and go as they like.
fn counts() -> (usize, usize, usize) {
    let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let rings = maps.lines().filter(|line| line.contains("io_uring") || line.contains("/dev/zero")).count();
    (entries("/proc/self/task"), entries("/proc/self/fd"), rings)
}

/// The counts, once they stand still: the kernel takes threads and rings apart some time after they ended.
fn settled() -> (usize, usize, usize) {
    let mut last = counts();
    for _ in 0..200 {
        std::thread::sleep(Duration::from_millis(20));
        let now = counts();
        if std::mem::replace(&mut last, now) == now {
            return now;
        }
    }
    panic!("the counts do not stand still: {last:?}");
}

#[test]
fn lanes_that_came_and_went_leave_nothing_behind() {
    const QUEUES: usize = 4;
    let folder = tempfile::tempdir().unwrap();
    let device = Arc::new(open(FileConfig::new(image(&folder, QUEUES as u64 * BLOCKS * 4096))));
    let tally: Arc<Tally> = Arc::default();
    let mut lanes =
        Lanes::start(1, |number| LaneConfig { name: format!("lane{number}"), ..LaneConfig::default() }).unwrap();
    for number in 0..QUEUES as u64 {
        let (device, tally) = (Arc::clone(&device), Arc::clone(&tally));
        lanes.admit(0, move || Mover::new(&device, number, &tally)).unwrap();
    }
    let before = settled();
    let ended = tally.ended.load(SeqCst);
    for count in [2, 4, 3, 1].into_iter().cycle().take(40) {
        let map = QueueMap::even(QUEUES, count);
        lanes.deal(count, |station| map.queue_of(station)).unwrap();
    }
    assert_eq!(settled(), before, "threads, descriptors, rings");
    assert!(tally.ended.load(SeqCst) > ended, "there was no load");
    tally.over.store(true, SeqCst);
    lanes.threads()[0].waker().wake();
    lanes.join().unwrap();
}
