//! A block device as a disk: a loop device, where we may make one. Says so where we may not.

use std::path::{Path, PathBuf};
use std::process::Command;

use blkyard_mq::{BioFlags, BlockDevice, Op, Status};
use blkyard_os::{FileConfig, FileDevice, OpenError};

use crate::common::{Bench, bio, image, pattern, range};

/// A loop device over a file; goes with its holder.
struct Loop(PathBuf);

impl Loop {
    fn new(backing: &Path, options: &[&str]) -> Option<Loop> {
        let made = Command::new("losetup").args(["--find", "--show"]).args(options).arg(backing).output();
        let made = made.ok().filter(|made| made.status.success());
        let Some(made) = made else {
            println!("skipped: no loop device can be made here");
            return None;
        };
        Some(Loop(String::from_utf8(made.stdout).unwrap().trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

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
