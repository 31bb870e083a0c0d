//! A program that changes the number of its disk's queues.

use std::time::{Duration, Instant};

use blkyard::{Bio, Disk, DiskConfig, Op, QueueCounts, Status, Submitter};

fn submit(queue: &mut Submitter) {
    let mut bio = Bio::with_capacity(1);
    (bio.op, bio.sectors) = (Op::Read, 8);
    bio.segments.push(queue.buffer(0, 4096));
    queue.submit(bio);
}

#[test]
fn io_that_waits_for_a_limit_goes_on_after_the_queues_have_changed() {
    let config = DiskConfig { threads: 2, depth: 4, buffer_bytes: 4096, queues: QueueCounts::only(2) };
    let mut disk = Disk::open("ram:1M?iops_max=100&burst_ms=1", config).unwrap();
    let (queues, begin) = (disk.queues(), Instant::now());
    let statuses = disk.run(|queue| {
        let mut statuses = Vec::new();
        (0..4).for_each(|_| submit(queue));
        queue.ring();
        if queue.number() == 0 {
            // They are drained at once, and charged at the time of the threads.
            assert_eq!(queues.set(QueueCounts::only(1)).unwrap(), QueueCounts::only(1));
        }
        while queue.wait(|bio| statuses.push(bio.status)) > 0 {}
        submit(queue);
        while queue.wait(|bio| statuses.push(bio.status)) > 0 {}
        statuses
    });
    assert_eq!(statuses, vec![vec![Status::Ok; 5]; 2]);
    assert_eq!((queues.counts(), queues.stats().len()), (QueueCounts::only(1), 1));
    // A tenth of a second, on a machine with time.
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
}
