//! Shared by the tests of this crate: folders for files, and a queue that is drained.
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod mover;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkyard_mq::{
    Bio, BioFlags, BlockDevice, Driver, HwQueue, HwQueueConfig, Merging, Op, Region, RegionTable, Segment, Status,
};
use blkyard_os::{FileConfig, FileDevice, FileQueue, Ring, RingConfig, now_ns};

/// A folder on a disk's file system and one on tmpfs, which refuse different things.
pub fn folders() -> Vec<tempfile::TempDir> {
    let shm = Path::new("/dev/shm");
    let mut folders = vec![tempfile::tempdir().unwrap()];
    if shm.is_dir() {
        folders.push(tempfile::tempdir_in(shm).unwrap());
    }
    folders
}

/// A file of this size.
pub fn image(folder: &tempfile::TempDir, bytes: u64) -> PathBuf {
    let path = folder.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

pub fn open(config: FileConfig) -> FileDevice {
    FileDevice::open(config).unwrap_or_else(|error| panic!("{error}"))
}

/// A device with one queue, a ring and one region of memory.
pub struct Bench {
    pub ring: Ring,
    pub queue: HwQueue<FileQueue>,
    pub device: FileDevice,
    pub region: Arc<Region>,
}

impl Bench {
    pub fn new(config: FileConfig, depth: usize) -> Bench {
        Bench::with_ring(config, depth, RingConfig::default())
    }

    /// As [`Bench::new`], with a request for each bio.
    pub fn unmerged(config: FileConfig, depth: usize) -> Bench {
        Bench::made(config, depth, RingConfig::default(), Merging::Off)
    }

    pub fn with_ring(config: FileConfig, depth: usize, ring: RingConfig) -> Bench {
        Bench::made(config, depth, ring, Merging::default())
    }

    fn made(config: FileConfig, depth: usize, ring: RingConfig, merging: Merging) -> Bench {
        let device = open(config);
        let mut ring = Ring::new(ring).unwrap();
        let queue_config = HwQueueConfig { depth, bios_max: 256, merging, ..HwQueueConfig::default() };
        let mut queue = HwQueue::new(device.queue(depth), Arc::new(device.info().clone()), queue_config);
        let region = Region::anonymous(8 << 20).unwrap();
        queue.set_memory(&mut ring, Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
        Bench { ring, queue, device, region }
    }

    /// Runs bios to their end; gives them back in the order they ended.
    pub fn run(&mut self, bios: Vec<Box<Bio>>) -> Vec<Box<Bio>> {
        let mut ended = Vec::new();
        let mut rest = bios.into_iter();
        let mut left = rest.len();
        let start = now_ns();
        while left > 0 {
            for bio in rest.by_ref().take(self.queue.room()) {
                self.queue.submit(bio);
            }
            left -= run_once(&mut self.queue, &mut self.ring, &mut |bio| ended.push(bio));
            assert!(now_ns() - start < 300_000_000_000, "the queue does not come to rest");
        }
        ended
    }

    pub fn one(&mut self, bio: Box<Bio>) -> Status {
        self.run(vec![bio])[0].status
    }

    pub fn fill(&self, offset: u64, bytes: &[u8]) {
        self.region.span(offset, bytes.len()).unwrap().copy_from_slice(bytes);
    }

    pub fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.region.span(offset, len).unwrap().copy_to_slice(&mut bytes);
        bytes
    }
}

/// One round; sleeps if the kernel has all there is to do.
pub fn run_once<D: Driver<Ring>>(queue: &mut HwQueue<D>, ring: &mut Ring, sink: &mut dyn FnMut(Box<Bio>)) -> usize {
    ring.reap();
    let mut ended = queue.reap(ring, now_ns(), &mut |bio| sink(bio));
    queue.issue(ring, now_ns());
    ended += queue.reap(ring, now_ns(), &mut |bio| sink(bio));
    if ended == 0 && queue.in_flight() > 0 {
        ring.sleep(Some(now_ns() + 1_000_000_000));
    } else {
        ring.submit();
    }
    ended
}

/// A bio over pieces of region 0: offset and length each.
pub fn bio(op: Op, sector: u64, pieces: &[(u64, u32)]) -> Box<Bio> {
    let mut bio = Bio::with_capacity(pieces.len());
    bio.op = op;
    bio.sector = sector;
    bio.segments.extend(pieces.iter().map(|&(offset, len)| Segment { region: 0, offset, len }));
    bio.sectors = pieces.iter().map(|(_, len)| len).sum::<u32>() / 512;
    bio
}

/// A bio without data.
pub fn range(op: Op, sector: u64, sectors: u32, flags: BioFlags) -> Box<Bio> {
    let mut bio = Bio::with_capacity(0);
    (bio.op, bio.sector, bio.sectors, bio.flags) = (op, sector, sectors, flags);
    bio
}

/// Bytes that tell where they belong.
pub fn pattern(len: usize, seed: u32) -> Vec<u8> {
    let word = |i: u32| i.wrapping_mul(2_654_435_761).wrapping_add(seed).to_le_bytes();
    (0..len.div_ceil(4) as u32).flat_map(word).take(len).collect()
}
