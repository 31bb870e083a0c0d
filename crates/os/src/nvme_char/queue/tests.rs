//! The queue over /dev/null, which completes every command of an io_uring with success, and over a file, which refuses
//! them all.

use std::fs::File;
use std::path::Path;

use blkyard_mem::BufferAccess;
use blkyard_mq::{Batch, Bio, DeviceInfo, Done, Driver, HwQueue, HwQueueConfig, Op, QueueLimits, Status, TagSet};

use super::*;
use crate::{FileConfig, FileDevice, now_ns};

const DEPTH: usize = 8;

/// Opcode and no more of each command.
struct TestDriver {
    queue: NvmeCharQueue,
    errnos: Vec<i32>,
}

impl Driver<Ring> for TestDriver {
    fn queue_rqs(&mut self, ring: &mut Ring, memory: &RegionTable, batch: &mut Batch<'_>) {
        assert!(self.queue.open(ring));
        while self.queue.has_room()
            && let Some((tag, request, segments)) = batch.take()
        {
            let op = request.op();
            let data = match op {
                Op::Read | Op::Write => NvmeCharData::Segments(segments),
                Op::Discard => {
                    let ranges = batch.ranges(&tag).map(|(sector, sectors)| [u64::from(sectors) << 32, sector]);
                    NvmeCharData::Ranges(self.queue.write_ranges(&tag, ranges).unwrap())
                }
                _ => NvmeCharData::None,
            };
            if let Err(tag) = self.queue.push(memory, tag, [op as u64, 0, 0, 0, 0, 0, 0, 0], data) {
                batch.complete(tag, Status::Invalid);
            }
        }
        self.queue.submit();
    }

    fn poll(&mut self, _: &mut Ring, _: &RegionTable, done: &mut Done<'_>, _: u64) {
        let errnos = &mut self.errnos;
        self.queue.poll(|tag, result| {
            errnos.extend(result.err());
            done.complete(tag, if result == Ok(0) { Status::Ok } else { Status::Io });
        });
    }

    fn set_memory(&mut self, ring: &mut Ring, memory: &RegionTable) {
        self.queue.set_memory(ring, memory);
    }

    fn add_buffer(&mut self, _: &mut Ring, memory: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        self.queue.add_buffer(memory, buffer);
    }
}

/// A queue over a file, its lane's ring, and a region of memory of a program or of a front-end.
fn rig(path: &Path, single_owner: bool, is_private: bool) -> (HwQueue<TestDriver>, Ring, Arc<Region>) {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(4096).unwrap();
    let claim = FileDevice::open(FileConfig::new(image.path())).unwrap();
    let device = Arc::new(NvmeCharDevice::over(File::open(path).unwrap(), claim));
    let queue = NvmeCharQueue::new(&device, DEPTH, 4, 4, false).unwrap();
    let limits = QueueLimits {
        segments_max: 4,
        sectors_max: 2048,
        discard_sectors_max: 1 << 20,
        discard_segments_max: 4,
        ..QueueLimits::default()
    };
    let info = DeviceInfo { name: "null".into(), capacity_sectors: 1 << 20, limits, ..DeviceInfo::default() };
    let config = HwQueueConfig { depth: DEPTH, bios_max: 64, ..HwQueueConfig::default() };
    let mut queue = HwQueue::new(TestDriver { queue, errnos: Vec::new() }, Arc::new(info), config);
    let mut ring = Ring::new(RingConfig { single_owner, ..RingConfig::default() }).unwrap();
    let region = if is_private { Region::anonymous(1 << 20) } else { Region::shared(1 << 20) }.unwrap();
    queue.set_memory(&mut ring, Arc::new(RegionTable::new(vec![Arc::clone(&region)])));
    (queue, ring, region)
}

fn bio(op: Op, sector: u64, segments: &[Segment]) -> Box<Bio> {
    let mut bio = Bio::with_capacity(segments.len());
    (bio.op, bio.sector) = (op, sector);
    bio.sectors = if segments.is_empty() { 8 } else { segments.iter().map(|segment| segment.len / 512).sum() };
    bio.segments.extend_from_slice(segments);
    bio
}

/// Runs bios to their end; returns their statuses.
fn run(queue: &mut HwQueue<TestDriver>, ring: &mut Ring, bios: Vec<Box<Bio>>) -> Vec<Status> {
    let (count, mut statuses) = (bios.len(), Vec::new());
    bios.into_iter().for_each(|bio| queue.submit(bio));
    let start_ns = now_ns();
    while statuses.len() < count {
        queue.issue(ring, now_ns());
        queue.reap(ring, now_ns(), &mut |bio| statuses.push(bio.status));
        assert!(now_ns() - start_ns < 30_000_000_000, "{statuses:?}");
    }
    statuses
}

fn segment(offset: u64, len: u32) -> Segment {
    Segment { region: 0, offset, len }
}

#[test]
fn every_command_comes_back_with_its_result() {
    for single_owner in [true, false] {
        let (mut queue, mut ring, region) = rig(Path::new("/dev/null"), single_owner, true);
        let buffer = RegisteredBuffer::new(&region, 4096, 65536, BufferAccess::ReadWrite).unwrap();
        assert!(queue.add_buffer(&mut ring, &buffer));
        let bios = (0..40).map(|number| match number % 5 {
            0 => bio(Op::Read, number * 64, &[segment(number * 4096, 4096)]),
            1 => bio(Op::Write, number * 64, &[segment(0, 4096), segment(8192, 4096), segment(65536, 512)]),
            2 => bio(Op::Read, number * 64, &[buffer.segment(512, 8192)]),
            3 => bio(Op::Discard, number * 64, &[]),
            _ => {
                let mut flush = bio(Op::Flush, 0, &[]);
                flush.sectors = 0;
                flush
            }
        });
        let statuses = run(&mut queue, &mut ring, bios.collect());
        assert_eq!(statuses, [Status::Ok; 40], "single owner: {single_owner}");
        // To another lane.
        queue.set_memory(&mut ring, Arc::new(RegionTable::new(Vec::new())));
        drop(ring);
        let mut ring = Ring::new(RingConfig::default()).unwrap();
        queue.set_memory(&mut ring, Arc::new(RegionTable::new(vec![region])));
        assert_eq!(run(&mut queue, &mut ring, vec![bio(Op::Read, 0, &[segment(0, 512)])]), [Status::Ok]);
    }
}

#[test]
fn an_errno_of_the_kernel_is_no_status() {
    let image = tempfile::NamedTempFile::new().unwrap();
    let (mut queue, mut ring, _) = rig(image.path(), true, true);
    assert_eq!(run(&mut queue, &mut ring, vec![bio(Op::Read, 0, &[segment(0, 512)])]), [Status::Io]);
    assert_eq!(queue.driver_mut().errnos, [libc::EOPNOTSUPP]);
    assert_eq!([outcome(0), outcome(0x4281), outcome(0x7fff)], [Ok(0), Ok(0x4281), Ok(0x7fff)]);
    assert_eq!([outcome(-libc::ENODEV), outcome(1 << 16)], [Err(libc::ENODEV), Err(libc::EIO)]);
}

#[test]
fn data_is_told_by_address_and_by_number_of_private_memory_only() {
    for is_private in [true, false] {
        let (mut queue, mut ring, region) = rig(Path::new("/dev/null"), true, is_private);
        let buffer = RegisteredBuffer::new(&region, 4096, 65536, BufferAccess::ReadWrite).unwrap();
        assert!(queue.add_buffer(&mut ring, &buffer));
        let mut table = RegionTable::new(vec![Arc::clone(&region)]);
        table.add_buffer(&buffer);
        let driver = &queue.driver_mut().queue;
        let start = region.span(0, 1).unwrap().as_ptr() as u64;
        let piece = is_private.then_some(0);
        assert_eq!(driver.locate(&table, segment(512, 4096)), Some((start + 512, piece)));
        assert_eq!(driver.locate(&table, buffer.segment(512, 4096)), Some((start + 4096 + 512, piece)));
        assert_eq!(driver.locate(&table, segment(1 << 20, 1)), None, "outside the region");
        assert_eq!(driver.locate(&table, Segment { region: 1, offset: 0, len: 1 }), None);
    }
}

#[test]
fn an_idle_queue_is_armed_without_a_poll() {
    let (mut queue, mut ring, _) = rig(Path::new("/dev/null"), true, true);
    assert!(!queue.arm::<Ring>(), "nothing is in flight");
    queue.disarm::<Ring>();
    assert_eq!(run(&mut queue, &mut ring, vec![bio(Op::Read, 0, &[segment(0, 512)])]), [Status::Ok]);
}

#[test]
fn an_entry_is_used_again_only_after_its_command() {
    let mut cids = Cids::new(DEPTH);
    let mut tags = TagSet::new(DEPTH, 0);
    let (mut queue, mut ring, _) = rig(Path::new("/dev/null"), true, true);
    assert_eq!(run(&mut queue, &mut ring, vec![bio(Op::Read, 0, &[segment(0, 512)])]), [Status::Ok]);
    let queue = &mut queue.driver_mut().queue;
    assert!(queue.has_room());
    // A command that does not end, in the next entry.
    let cid = cids.park(tags.take().unwrap());
    std::mem::swap(&mut queue.cids, &mut cids);
    let ring = queue.ring.as_mut().unwrap();
    assert!(ring.slots.len() >= DEPTH * ENTRIES_EACH);
    ring.slots[ring.tail] = cid;
    assert!(!queue.has_room());
    let tag = queue.cids.redeem(cid).unwrap();
    assert!(queue.has_room());
    tags.put(tag);
}
