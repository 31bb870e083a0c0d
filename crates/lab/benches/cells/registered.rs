//! Reads of several sizes through an NVMe queue pair, in plain memory and in registered buffers.

use std::sync::Arc;

use blkyard_lab::floor::Round;
use blkyard_mem::{BufferAccess, Region, RegionTable, RegisteredBuffer, Segment};
use blkyard_mq::{Bio, HwQueue, HwQueueConfig, SECTOR_BYTES, Status};
use blkyard_nvme::{LoopbackBuffers, NvmeLoopback};

use crate::load::bios;
use crate::nvme::loopback_of;

/// I/Os of a round.
const DEPTH: usize = 32;
/// Distance of positions on the disk, so that nothing merges.
const STRIDE: u64 = 8192;

/// A load of reads of one size, each into a buffer of its own.
pub struct SizedReads<S: FnMut(&Bio, &RegionTable) -> Status> {
    queue: HwQueue<NvmeLoopback<S>>,
    free: Vec<Box<Bio>>,
    /// Memory of each bio, by its cookie.
    segments: Vec<Segment>,
    now_ns: u64,
}

/// Reads of `bytes` into plain memory, or if `buffers` are given into registered buffers that are mapped so.
pub fn sized(bytes: u32, buffers: Option<LoopbackBuffers>) -> SizedReads<impl FnMut(&Bio, &RegionTable) -> Status> {
    let loopback = loopback_of(true, buffers.unwrap_or_default());
    let config = HwQueueConfig { depth: DEPTH, bios_max: DEPTH, ..HwQueueConfig::default() };
    let info = Arc::new(loopback.info.clone());
    let mut queue = HwQueue::new(loopback, info, config);
    let len = DEPTH * bytes as usize;
    let region = Region::shared(len).unwrap_or_else(|error| panic!("{len} bytes of buffers: {error}"));
    queue.set_memory(&mut (), Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
    let buffer = RegisteredBuffer::new(&region, 0, len as u64, BufferAccess::ReadWrite);
    let buffer = buffer.unwrap_or_else(|error| panic!("{error}"));
    assert!(queue.add_buffer(&mut (), &buffer));
    let number = if buffers.is_some() { buffer.id().number() } else { 0 };
    let segment = |slot| Segment { region: number, offset: slot as u64 * u64::from(bytes), len: bytes };
    SizedReads { queue, free: bios(DEPTH), segments: (0..DEPTH).map(segment).collect(), now_ns: 0 }
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> Round for SizedReads<S> {
    fn round(&mut self) -> u64 {
        let SizedReads { queue, free, segments, now_ns } = self;
        *now_ns += 1000;
        let ended = queue.reap(&mut (), *now_ns, &mut |bio| free.push(bio));
        for mut bio in free.drain(..) {
            let segment = segments[bio.cookie as usize];
            bio.reset();
            (bio.sector, bio.sectors) = (bio.cookie * STRIDE, segment.len / SECTOR_BYTES as u32);
            bio.segments.push(segment);
            queue.submit(bio);
        }
        queue.issue(&mut (), *now_ns);
        ended as u64
    }
}

impl<S: FnMut(&Bio, &RegionTable) -> Status> Drop for SizedReads<S> {
    /// A tag must not be dropped while it is out.
    fn drop(&mut self) {
        while self.queue.in_flight() > 0 {
            self.queue.reap(&mut (), self.now_ns, &mut drop);
        }
    }
}
