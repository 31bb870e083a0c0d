//! Panics of a program in the middle of its I/O.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::time::Duration;

use blkyard::{Bio, BioFlags, Disk, DiskConfig, Op, QueueCounts, Status};

const DEPTH: usize = 8;

fn read(queue: &blkyard::Submitter, number: usize, flags: BioFlags) -> Box<Bio> {
    let mut bio = Bio::with_capacity(1);
    (bio.op, bio.flags, bio.sector, bio.sectors) = (Op::Read, flags | BioFlags::NO_MERGE, number as u64 * 8, 8);
    bio.segments.push(queue.buffer(number, 4096));
    bio
}

/// Runs a test that may hang, and fails if it does.
fn within_a_minute(test: impl FnOnce() + Send + 'static) {
    let (done, is_done) = channel();
    let thread = std::thread::spawn(move || {
        test();
        done.send(()).unwrap();
    });
    match is_done.recv_timeout(Duration::from_mins(1)) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        _ => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

#[test]
fn a_panic_of_the_closure_that_takes_bios_loses_no_room() {
    let kinds = QueueCounts { default: 1, read: 1, poll: 1 };
    // On one queue, with bios that are refused, and on queues of two kinds.
    for (queues, polled) in [(QueueCounts::only(1), false), (QueueCounts::only(1), true), (kinds, false), (kinds, true)]
    {
        for threads in [1, 2] {
            within_a_minute(move || {
                let config = DiskConfig { threads, depth: DEPTH, buffer_bytes: 4096, queues };
                let mut disk = Disk::open("ram:1M", config).unwrap();
                let run = catch_unwind(AssertUnwindSafe(|| {
                    disk.run(|queue| {
                        for number in 0..DEPTH {
                            let flags = if polled && number % 4 == 3 { BioFlags::POLLED } else { BioFlags::empty() };
                            queue.submit(read(queue, number, flags));
                        }
                        queue.wait(|bio| assert_eq!(bio.status, Status::Medium, "as it should"));
                    })
                }));
                assert!(run.is_err());
                let left = disk.run(|queue| {
                    let left = (queue.in_flight(), queue.room());
                    let mut statuses = Vec::new();
                    (0..DEPTH).for_each(|number| queue.submit(read(queue, number, BioFlags::empty())));
                    while queue.wait(|bio| statuses.push(bio.status)) > 0 {}
                    (left, statuses)
                });
                assert_eq!(left, vec![((0, DEPTH), vec![Status::Ok; DEPTH]); threads]);
            });
        }
    }
}

#[test]
fn wait_dispatches_bios_also_if_another_was_refused() {
    within_a_minute(|| {
        let queues = QueueCounts::only(1);
        let config = DiskConfig { threads: 1, depth: DEPTH, buffer_bytes: 4096, queues };
        let mut disk = Disk::open("null:1M", config).unwrap();
        let stats = disk.queues().stats();
        disk.run(|queue| {
            queue.submit(read(queue, 0, BioFlags::POLLED));
            queue.submit(read(queue, 1, BioFlags::empty()));
            let mut statuses = Vec::new();
            assert!(queue.wait(|bio| statuses.push(bio.status)) > 0);
            assert_eq!(statuses[0], Status::NotSupported, "there are no poll queues");
            let dispatched = stats[0].1.snapshot().ops.iter().map(|op| op.ios).sum::<u64>();
            assert_eq!(dispatched, 1);
        });
    });
}
