//! A block device as a disk: a loop device, where we may make one. Says so where we may not.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_mq::{Bio, BioFlags, BlockDevice, HwQueue, HwQueueConfig, Op, Region, RegionTable, Status};
use blkyard_os::{Direct, FileConfig, FileDevice, FileQueue, OpenError, Ring, RingConfig, now_ns};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::common::{Bench, bio, image, pattern, range};
use crate::loop_device::Loop;

#[test]
fn a_block_device_is_read_written_and_trimmed() {
    let folder = tempfile::tempdir().unwrap();
    for (size, block) in [("512", 512), ("4096", 4096)] {
        let path = image(&folder, 4 << 20);
        let Some(device) = Loop::new(&path, &["--sector-size", size]) else { return };
        let mut bench = Bench::new(FileConfig::new(&device.0), 8);
        let info = bench.device.info().clone();
        assert_eq!(info.limits.logical_block_bytes, block);
        assert_eq!(info.capacity_sectors, 8192);
        info.limits.check().unwrap();
        let data = pattern(1 << 20, 6);
        bench.fill(0, &data);
        assert_eq!(bench.one(bio(Op::Write, 0, &[(0, 1 << 20)])), Status::Ok);
        assert_eq!(bench.one(range(Op::Flush, 0, 0, BioFlags::empty())), Status::Ok);
        for (at, op, flags) in [
            (0, Op::Discard, BioFlags::empty()),
            (256, Op::WriteZeroes, BioFlags::empty()),
            (512, Op::WriteZeroes, BioFlags::NO_UNMAP | BioFlags::FUA),
        ] {
            assert_eq!(bench.one(range(op, at, 64, flags)), Status::Ok, "{op:?}");
        }
        assert_eq!(bench.one(bio(Op::Read, 0, &[(4 << 20, 1 << 20)])), Status::Ok);
        let mut want = data;
        for at in [0, 256, 512] {
            want[at * 512..(at + 64) * 512].fill(0);
        }
        assert!(bench.bytes(4 << 20, 1 << 20) == want);
        bench.fill(1, &want);
        assert_eq!(bench.one(bio(Op::Write, 0, &[(1, 8192)])), Status::Ok, "from unaligned memory");
    }
}

#[test]
fn a_block_device_that_is_used_or_write_protected_is_refused_for_writing() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, 4 << 20);
    let Some(device) = Loop::new(&path, &[]) else { return };
    let open = |read_only| FileDevice::open(FileConfig { read_only, ..FileConfig::new(&device.0) });
    let held = open(false).unwrap();
    assert!(matches!(open(false), Err(OpenError::InUse { .. })));
    drop(held);
    drop(device);
    let Some(device) = Loop::new(&path, &["--read-only"]) else { return };
    let open = |read_only| FileDevice::open(FileConfig { read_only, ..FileConfig::new(&device.0) });
    let error = open(false).unwrap_err();
    assert!(matches!(error, OpenError::ReadOnly { .. }), "{error}");
    assert!(error.to_string().contains("?readonly=on"), "{error}");
    open(true).unwrap();
}

/// A queue of a device with a ring of its own, which is run by hand.
struct HandQueue {
    queue: HwQueue<FileQueue>,
    ring: Ring,
}

impl HandQueue {
    fn new(device: &FileDevice, region: &Arc<Region>) -> HandQueue {
        let mut ring = Ring::new(RingConfig::default()).unwrap();
        let mut queue = HwQueue::new(device.queue(8), Arc::new(device.info().clone()), HwQueueConfig::default());
        queue.set_memory(&mut ring, Arc::new(RegionTable::new(vec![Arc::clone(region)])));
        HandQueue { queue, ring }
    }

    /// Statuses of what ends in one round.
    fn turn(&mut self) -> Vec<Status> {
        let mut ended = Vec::new();
        self.ring.reap();
        self.queue.reap(&mut self.ring, now_ns(), &mut |bio| ended.push(bio.status));
        self.queue.issue(&mut self.ring, now_ns());
        self.ring.submit();
        ended
    }

    /// Turns until something ends, for this time at most.
    fn turn_for(&mut self, time: Duration) -> Vec<Status> {
        let begin = Instant::now();
        loop {
            let ended = self.turn();
            if !ended.is_empty() || begin.elapsed() > time {
                return ended;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// The kernel reports pages that could not be written to one of the syncs in flight.
#[test]
fn no_sync_succeeds_beside_one_that_fails() {
    const BYTES: u32 = 8 << 20;
    const PATIENCE: Duration = Duration::from_secs(30);
    for (round, syncs) in [[Op::Flush, Op::Flush], [Op::Flush, Op::Write]].into_iter().cycle().take(6).enumerate() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let backing = memfd_create("backing", flags).unwrap();
        ftruncate(&backing, 64 << 20).unwrap();
        let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), backing.as_raw_fd()));
        let Some(device) = Loop::new(&path, &[]) else { return };
        let device = FileDevice::open(FileConfig { direct: Direct::Off, ..FileConfig::new(&device.0) }).unwrap();
        let region = Region::anonymous(BYTES as usize).unwrap();
        region.span(0, BYTES as usize).unwrap().fill(1);
        let [mut first, mut second] = [0; 2].map(|_| HandQueue::new(&device, &region));
        for at in 0..4 {
            first.queue.submit(bio(Op::Write, at * u64::from(BYTES >> 9), &[(0, BYTES)]));
            assert_eq!(first.turn_for(PATIENCE), [Status::Ok]);
        }
        // From here on nothing more can be written to it.
        fcntl_add_seals(&backing, SealFlags::WRITE).unwrap();
        for (queue, op) in [&mut first, &mut second].into_iter().zip(syncs) {
            let mut sync = if op == Op::Write { bio(op, 32 << 11, &[(0, 4096)]) } else { Bio::with_capacity(0) };
            (sync.op, sync.flags) = (op, if op == Op::Write { BioFlags::FUA } else { BioFlags::empty() });
            queue.queue.submit(sync);
            queue.turn();
        }
        // The lanes of both look at their answers in either order, and much later.
        let (one, other) = if round % 4 < 2 { (&mut first, &mut second) } else { (&mut second, &mut first) };
        let mut ended = one.turn_for(Duration::from_millis(500));
        ended.extend(other.turn_for(PATIENCE));
        if ended.len() < 2 {
            ended.extend(one.turn_for(PATIENCE));
        }
        assert_eq!(ended, [Status::Io; 2], "round {round}");
        assert!(device.sync_has_failed());
    }
}
