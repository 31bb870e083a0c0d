//! A front-end of `serve` that runs in the test: all queues of an export, one I/O at a time.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_attach::{AttachConfig, Attached, AttachedQueue};
use blkyard_mem::{Region, RegionTable, Segment};
use blkyard_mq::{Bio, HwQueue, HwQueueConfig, Op, QueueKind, SignalEventfd, SignalSlot};
use blkyard_os::{SystemClock, now_ns};

use crate::common::IDLE_PAUSE;

/// Longer than any test on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);
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
pub struct Guest {
    queues: Vec<HwQueue<AttachedQueue>>,
    memory: Arc<Region>,
    _disk: Attached,
}

impl Guest {
    /// Connects to all queues of an export.
    pub fn connect(socket: &Path, queues: usize) -> Guest {
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
            std::thread::sleep(IDLE_PAUSE);
        }
        assert!(ended.unwrap().is_ok(), "{op:?} of block {block}: {ended:?}");
    }

    /// Writes a block by one queue and reads it back by the next.
    pub fn check(&mut self, queue: usize, block: u64, seed: u64) {
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

    /// The same by each queue in turn.
    pub fn check_all(&mut self, seed: u64) {
        (0..self.queues.len()).for_each(|queue| self.check(queue, queue as u64, seed));
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.set_memory(&mut Kicks, Arc::default()));
    }
}
