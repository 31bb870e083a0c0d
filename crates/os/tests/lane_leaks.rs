//! Lanes that were started and retired under load leave no thread, no descriptor and no mapping. A separate program, so
//! that no other test opens any meanwhile.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use blkyard_mq::QueueMap;
use blkyard_os::{FileConfig, LaneConfig, Lanes};
use common::mover::{BLOCKS, Mover, Tally};
use common::{image, open};

/// Longer than the kernel takes to take threads and rings apart, on a busy machine too.
const PATIENCE: Duration = Duration::from_mins(1);

/// Threads, descriptors, and mappings that are rings or shared memory: those of the heap come and go as they like, and
/// so do the kernel's own threads for the rings of threads that live.
fn counts() -> [usize; 3] {
    let entries = |path: &str| std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
    let tasks: Vec<_> = entries("/proc/self/task").map(|task| task.into_string().unwrap()).collect();
    let name = |task: &String| std::fs::read_to_string(format!("/proc/self/task/{task}/comm")).unwrap_or_default();
    let is_ours = |task: &&String| match name(task).trim_end().strip_prefix("iou-wrk-") {
        Some(owner) => !tasks.iter().any(|task| task == owner),
        None => true,
    };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let rings = maps.lines().filter(|line| line.contains("io_uring") || line.contains("/dev/zero")).count();
    [tasks.iter().filter(is_ours).count(), entries("/proc/self/fd").count(), rings]
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < PATIENCE, "waited in vain: {what}; {:?}", counts());
    }
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
    // A lane has the resources of a sleep from its first sleep on.
    lanes.deal(2, |_| 1).unwrap();
    let used_ns = || lanes.threads()[0].cpu_ns().unwrap();
    until("a lane without pollers sleeps", || {
        let before_ns = used_ns();
        std::thread::sleep(Duration::from_millis(20));
        used_ns() == before_ns
    });
    lanes.deal(1, |_| 0).unwrap();
    // Some of the other lane may be there yet: less than the thirty that come and go now could leave behind.
    let before = counts();
    println!("threads, descriptors, rings: {before:?}");
    let ended = tally.ended.load(SeqCst);
    for count in [2, 4, 3, 1].into_iter().cycle().take(40) {
        let map = QueueMap::even(QUEUES, count);
        lanes.deal(count, |poller| map.queue_of(poller)).unwrap();
    }
    until("as many threads, descriptors and rings as before", || {
        std::thread::sleep(Duration::from_millis(5));
        counts().iter().zip(before).all(|(now, before)| *now <= before)
    });
    until("the load goes on", || tally.ended.load(SeqCst) > ended);
    tally.over.store(true, SeqCst);
    lanes.threads()[0].waker().wake();
    lanes.join().unwrap();
}
