//! A poller that loads a file by itself, checks all it reads, and moves from lane to lane.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::ThreadId;

use blkyard_mq::{
    Bio, BlockDevice, HwQueue, HwQueueConfig, Op, Poller, PollerState, Region, RegionTable, Status, Wake,
};
use blkyard_os::{FileDevice, FileQueue, Ring};

use super::{bio, pattern};

/// Blocks of 4 KiB that a poller has in flight, each with a separate position in the file.
pub const BLOCKS: u64 = 16;
const BLOCK_BYTES: u64 = 4096;

/// A poller's state, for the test.
#[derive(Debug, Default)]
pub struct Tally {
    /// Bios that came back.
    pub ended: AtomicU64,
    /// Times the poller entered a lane.
    pub entered: AtomicU64,
    /// The poller is to finish.
    pub over: AtomicBool,
}

/// Writes a block, reads it back, compares, and writes it anew, for all its blocks at once.
pub struct Mover {
    queue: HwQueue<FileQueue>,
    region: Arc<Region>,
    memory: Arc<RegionTable>,
    /// First block in the file.
    first: u64,
    /// Latest content of each block, and whether it is being read back.
    rounds: Vec<(u32, bool)>,
    ready: Vec<Box<Bio>>,
    /// Whether each block's bio is in the queue: it must come back once.
    out: Vec<bool>,
    leaving: bool,
    at_home: Option<ThreadId>,
    tally: Arc<Tally>,
}

impl Mover {
    /// The `number`-th of several that share a file of at least `number + 1` times [`BLOCKS`] blocks.
    pub fn new(device: &FileDevice, number: u64, tally: &Arc<Tally>) -> Mover {
        // Fewer requests than blocks, so that some wait.
        let config = HwQueueConfig { depth: 8, bios_max: BLOCKS as usize, ..HwQueueConfig::default() };
        let queue = HwQueue::new(device.queue(config.depth), Arc::new(device.info().clone()), config);
        let region = Region::anonymous((2 * BLOCKS * BLOCK_BYTES) as usize).unwrap();
        let memory = Arc::new(RegionTable::new(vec![Arc::clone(&region)]));
        let mut mover = Mover {
            queue,
            region,
            memory,
            first: number * BLOCKS,
            rounds: vec![(0, false); BLOCKS as usize],
            ready: Vec::new(),
            out: vec![false; BLOCKS as usize],
            leaving: false,
            at_home: None,
            tally: Arc::clone(tally),
        };
        for block in 0..BLOCKS {
            let submission = mover.write(block);
            mover.ready.push(submission);
        }
        mover
    }

    fn data(&self, block: u64) -> Vec<u8> {
        pattern(BLOCK_BYTES as usize, ((self.first + block) as u32) << 16 | self.rounds[block as usize].0)
    }

    fn submission(&self, op: Op, block: u64) -> Box<Bio> {
        // Writes go from the first half of the memory, reads to the second.
        let half = if op == Op::Read { BLOCKS } else { 0 };
        let mut bio = bio(op, (self.first + block) * 8, &[((half + block) * BLOCK_BYTES, BLOCK_BYTES as u32)]);
        bio.cookie = block;
        bio
    }

    fn write(&self, block: u64) -> Box<Bio> {
        let data = self.data(block);
        self.region.span(block * BLOCK_BYTES, data.len()).unwrap().copy_from_slice(&data);
        self.submission(Op::Write, block)
    }

    /// The next bio after a completed one.
    fn next(&mut self, ended: &Bio) -> Box<Bio> {
        let block = ended.cookie;
        assert_eq!(ended.status, Status::Ok);
        assert!(std::mem::take(&mut self.out[block as usize]), "block {block} came back twice");
        self.tally.ended.fetch_add(1, SeqCst);
        let (round, reading) = &mut self.rounds[block as usize];
        if !*reading {
            *reading = true;
            return self.submission(Op::Read, block);
        }
        let (round, at) = (*round, (BLOCKS + block) * BLOCK_BYTES);
        let mut back = vec![0; BLOCK_BYTES as usize];
        self.region.span(at, back.len()).unwrap().copy_to_slice(&mut back);
        assert!(back == self.data(block), "block {block} is not what was written to it in round {round}");
        self.rounds[block as usize] = (round + 1, false);
        self.write(block)
    }
}

impl Poller<Ring> for Mover {
    fn enter(&mut self, ring: &mut Ring, _waker: &Arc<dyn Wake>) {
        assert!(self.at_home.replace(std::thread::current().id()).is_none(), "entered two lanes");
        self.leaving = false;
        self.queue.set_memory(ring, Arc::clone(&self.memory));
        self.tally.entered.fetch_add(1, SeqCst);
    }

    fn leave(&mut self, ring: &mut Ring) -> bool {
        self.leaving = true;
        if !self.queue.is_idle() {
            return false;
        }
        self.queue.set_memory(ring, Arc::default());
        assert_eq!(self.at_home.take(), Some(std::thread::current().id()), "left a lane it does not live on");
        true
    }

    fn stay(&mut self) {
        self.leaving = false;
    }

    fn run_once(&mut self, ring: &mut Ring, now_ns: u64) -> PollerState {
        assert_eq!(self.at_home, Some(std::thread::current().id()), "run by a lane it does not live on");
        let mut ended = Vec::new();
        let mut moved = self.queue.reap(ring, now_ns, &mut |bio| ended.push(bio));
        for bio in &ended {
            let next = self.next(bio);
            self.ready.push(next);
        }
        while !self.leaving
            && !self.tally.over.load(SeqCst)
            && let Some(bio) = self.ready.pop()
        {
            self.out[bio.cookie as usize] = true;
            self.queue.submit(bio);
            moved += 1;
        }
        moved += self.queue.issue(ring, now_ns);
        match moved {
            0 if self.queue.is_idle() => PollerState::Idle,
            0 => PollerState::Waiting,
            _ => PollerState::Busy,
        }
    }

    fn arm(&mut self) -> bool {
        !self.leaving && !self.tally.over.load(SeqCst) && !self.ready.is_empty()
    }

    fn disarm(&mut self) {}

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn is_over(&self) -> bool {
        self.tally.over.load(SeqCst) && self.queue.is_idle()
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        // No bio was lost, unless a lane panicked with it.
        assert!(std::thread::panicking() || self.out.iter().all(|out| !out), "bios are out when all is over");
    }
}
