//! Exports of `serve` whose front-ends are connected and idle, beside a busy one on the same lane: the busy one works,
//! and an idle one is answered when it wakes, also after commands, moves and reconnects.
#![forbid(unsafe_code)]

mod common;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkyard_attach::{AttachConfig, Attached, AttachedQueue};
use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Bio, HwQueue, HwQueueConfig, Op, QueueKind, SignalEventfd, SignalSlot};
use blkyard_os::{SystemClock, now_ns};
use common::{Daemon, PATIENCE, program, succeed};

const EXPORTS: usize = 24;
const QUEUES: usize = 4;
const BLOCK_BYTES: usize = 4096;
const BLOCK_SECTORS: u32 = 8;

/// Kicks at once, as a thread without a lane does.
struct Kicks;

impl SignalEventfd for Kicks {
    fn signal(&mut self, _place: &mut SignalSlot, eventfd: BorrowedFd<'_>) {
        rustix::io::write(eventfd, &1_u64.to_ne_bytes()).unwrap();
    }

    fn forget(&mut self, _place: &mut SignalSlot) {}
}

/// A front-end with one I/O at a time on any of its queues.
struct Guest {
    queues: Vec<HwQueue<AttachedQueue>>,
    memory: Arc<Region>,
    _disk: Attached,
}

impl Guest {
    fn connect(socket: &Path, queues: usize) -> Guest {
        let disk = Attached::open(AttachConfig::new(socket, Arc::new(SystemClock))).unwrap();
        let memory = Region::shared(BLOCK_BYTES).unwrap();
        let queue = |_| {
            let config = HwQueueConfig { depth: 2, bios_max: 2, ..HwQueueConfig::default() };
            let queue = disk.queue(QueueKind::Poll, config.depth).unwrap();
            let mut queue = HwQueue::new(queue, Arc::new(disk.info().clone()), config);
            queue.set_memory(&mut Kicks, Arc::new(RegionTable::new(vec![Arc::clone(&memory)])));
            queue
        };
        Guest { queues: (0..queues).map(queue).collect(), memory, _disk: disk }
    }

    fn io(&mut self, queue: usize, op: Op, block: u64) {
        let mut bio = Bio::with_capacity(1);
        (bio.op, bio.sector, bio.sectors) = (op, block * u64::from(BLOCK_SECTORS), BLOCK_SECTORS);
        bio.segments.push(Segment { region: 0, offset: 0, len: BLOCK_BYTES as u32 });
        let queue = &mut self.queues[queue];
        queue.submit(bio);
        let (begin, mut ended) = (Instant::now(), None);
        while ended.is_none() {
            assert!(begin.elapsed() < PATIENCE, "{op:?} of block {block} is not answered");
            queue.issue(&mut Kicks, now_ns());
            queue.reap(&mut Kicks, now_ns(), &mut |bio| ended = Some(bio.status));
            std::thread::yield_now();
        }
        assert!(ended.unwrap().is_ok(), "{op:?} of block {block}: {ended:?}");
    }

    /// Writes a block by one queue and reads it back by the next.
    fn check(&mut self, queue: usize, block: u64, seed: u64) {
        let data: Vec<u8> = (0..BLOCK_BYTES as u64).map(|n| (n * 7 + block * 31 + seed * 131) as u8).collect();
        let memory = Arc::clone(&self.memory);
        let span = memory.span(0, BLOCK_BYTES).unwrap();
        span.copy_from_slice(&data);
        self.io(queue, Op::Write, block);
        span.fill(0);
        self.io((queue + 1) % self.queues.len(), Op::Read, block);
        let mut back = vec![0; BLOCK_BYTES];
        span.copy_to_slice(&mut back);
        assert!(back == data, "block {block} is not what was written");
    }

    fn check_all(&mut self, seed: u64) {
        (0..self.queues.len()).for_each(|queue| self.check(queue, queue as u64, seed));
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.set_memory(&mut Kicks, Arc::default()));
    }
}

#[test]
fn idle_exports_answer_beside_a_busy_one() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut serve = program(folder, &["serve", "--control", "c", "--lanes", "1"]);
    for export in 0..=EXPORTS {
        serve.args(["--device", "ram:1M", "--export", &format!("vhost-user-blk:s{export}?queues={QUEUES}")]);
    }
    let daemon = Daemon::launch(&mut serve);
    let socket = |export: usize| folder.join(format!("s{export}"));
    let mut idle: Vec<_> = (0..EXPORTS).map(|export| Guest::connect(&socket(export), QUEUES)).collect();
    let mut busy = Guest::connect(&socket(EXPORTS), 1);
    let (stop, checked) = (AtomicBool::new(false), AtomicU64::new(0));
    // Until the idle ones had time to be parked, and the busy one was served meanwhile.
    let rest = |checks: u64| {
        let (begin, before) = (Instant::now(), checked.load(Relaxed));
        while checked.load(Relaxed) < before + checks || begin.elapsed() < Duration::from_millis(20) {
            assert!(begin.elapsed() < PATIENCE, "the busy one is not served");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                busy.check(0, checked.load(Relaxed) % 256, checked.load(Relaxed));
                checked.fetch_add(1, Relaxed);
            }
        });
        // Stops the busy one even if an assertion fails here.
        let _stop = Stop(&stop);
        for round in 0..3 {
            rest(100);
            idle.iter_mut().for_each(|guest| guest.check_all(round));
        }
        rest(100);
        succeed(folder, &["inspect", "--control", "c"]);
        succeed(folder, &["set", "--control", "c", "export:0", "depth=3", "iops_max=100000"]);
        rest(100);
        idle.iter_mut().for_each(|guest| guest.check_all(3));
        // Front-ends leave and come, on queues that were parked.
        rest(100);
        for export in 0..3 {
            drop(idle.remove(0));
            idle.push(Guest::connect(&socket(export), QUEUES));
        }
        rest(100);
        idle.iter_mut().for_each(|guest| guest.check_all(4));
        // Parked queues move to another lane and back.
        for lanes in ["lanes=2", "lanes=1"] {
            rest(100);
            succeed(folder, &["set", "--control", "c", "daemon", lanes]);
            rest(100);
            idle.iter_mut().for_each(|guest| guest.check_all(5));
        }
    });
    drop((idle, busy));
    daemon.stop();
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}
