//! NVMe commands that are in flight beside the block layer.
//!
//! A process that is killed leaves commands of passthrough behind. The kernel completes them later, and keeps the
//! character device of their namespace open meanwhile, with its lock ([ADR 50]). The block device has no part in it.
//!
//! [ADR 50]: ../../../../docs/adr/0050-the-kernels-nvme-driver-by-passthrough.md

use std::fs::{self, File, Metadata};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::lock::{Locked, lock};

/// Whether commands of passthrough may be in flight on the namespace of a block device, which the caller has locked: a
/// user of passthrough needs both locks, so none can begin. False where the character device is missing (Linux before
/// 5.13) or may not be opened.
pub(super) fn may_be_in_flight(device: &Metadata) -> bool {
    let number = device.rdev();
    let folder = format!("/sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    let node = fs::canonicalize(folder).ok().and_then(|folder| character_device(&folder));
    node.is_some_and(|node| is_locked(&node))
}

/// The character device of the namespace with this block device or partition.
fn character_device(folder: &Path) -> Option<PathBuf> {
    let disk = if folder.join("partition").exists() { folder.parent()? } else { folder };
    let namespace = disk.file_name()?.to_str()?.strip_prefix("nvme").filter(|rest| rest.contains('n'))?;
    Some(Path::new("/dev").join(format!("ng{namespace}")))
}

/// Whether another description holds a writer's lock.
fn is_locked(node: &Path) -> bool {
    File::open(node).is_ok_and(|node| matches!(lock(node.as_fd(), true), Ok(Locked::Taken { .. })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_found_by_its_disk_and_partitions() {
        let folder = tempfile::tempdir().unwrap();
        let device = |name: &str| {
            let folder = folder.path().join(name);
            fs::create_dir_all(&folder).unwrap();
            character_device(&folder)
        };
        assert_eq!(device("nvme0n1"), Some("/dev/ng0n1".into()));
        let partition = folder.path().join("nvme12n34/nvme12n34p5");
        fs::create_dir_all(&partition).unwrap();
        fs::write(partition.join("partition"), "5\n").unwrap();
        assert_eq!(character_device(&partition), Some("/dev/ng12n34".into()));
        assert_eq!((device("sda"), device("nvme0")), (None, None));
    }

    #[test]
    fn only_a_writers_lock_counts() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!is_locked(file.path()) && !is_locked(Path::new("/nonexistent")));
        let reader = File::open(file.path()).unwrap();
        assert!(matches!(lock(reader.as_fd(), true), Ok(Locked::Yes)));
        assert!(!is_locked(file.path()));
        drop(reader);
        let writer = file.reopen().unwrap();
        assert!(matches!(lock(writer.as_fd(), false), Ok(Locked::Yes)));
        assert!(is_locked(file.path()));
    }
}
