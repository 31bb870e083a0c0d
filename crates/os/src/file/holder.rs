//! Finds the process that holds the lock of a file, to distinguish a live process from I/O that a dead one left
//! behind.
//!
//! A process that is killed with I/O in flight is gone long before that I/O: the kernel keeps the file, and the lock
//! on it, until the last operation has completed. The lock names no process. But a live holder has the file open, and
//! the kernel shows which files of a process carry locks (proc(5), `/proc/PID/fdinfo`). Processes of other users and
//! other containers cannot be inspected, and so are not found. Used only when a file cannot be locked.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Owner of a file's lock, as far as visible.
pub(crate) fn living_holder(file: &Metadata) -> Option<String> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let holder = numbers.filter(|process| holds(*process, file)).find(|process| !is_dying(*process));
    holder
        .map(|process| match fs::read_to_string(format!("/proc/{process}/comm")) {
            _ if process == std::process::id() => "another device of this program holds a lock on it".into(),
            Ok(name) => format!("process {process} ({}) holds a lock on it", name.trim_end().escape_debug()),
            Err(_) => format!("process {process} holds a lock on it"),
        })
        .or_else(|| occupation(file))
}

/// Whether one of a process's files is this one, with a lock.
fn holds(process: u32, file: &Metadata) -> bool {
    let Ok(files) = fs::read_dir(format!("/proc/{process}/fdinfo")) else { return false };
    let inode = format!(":{} ", file.ino());
    files.flatten().any(|entry| {
        // `lock: 1: OFDLCK ADVISORY WRITE -1 fe:00:INODE 0 EOF`. The numbers of the device are not those a file is
        // known by on some file systems, so whether it is the same is asked of the file itself.
        let carries = fs::read_to_string(entry.path())
            .is_ok_and(|text| text.lines().any(|line| line.starts_with("lock:") && line.contains(&inode)));
        carries
            && fs::metadata(format!("/proc/{process}/fd/{}", entry.file_name().display()))
                .is_ok_and(|found| (found.dev(), found.ino()) == (file.dev(), file.ino()))
    })
}

/// Whether a process has been killed and is still ending.
fn is_dying(process: u32) -> bool {
    const SIGKILL: u64 = 1 << 8;
    const PF_EXITING: u64 = 1 << 2;
    let Ok(status) = fs::read_to_string(format!("/proc/{process}/status")) else { return true };
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let killed =
        |name| field(name).and_then(|set| u64::from_str_radix(set, 16).ok()).is_some_and(|set| set & SIGKILL != 0);
    if killed("SigPnd:") || killed("ShdPnd:") || field("State:").is_some_and(|state| state.starts_with(['Z', 'X'])) {
        return true;
    }
    // The ninth field, and the sixth after the name, which may hold anything.
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let flags = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(6)?.parse::<u64>().ok());
    flags.is_none_or(|flags| flags & PF_EXITING != 0)
}

/// Use of a block device other than by a process.
fn occupation(file: &Metadata) -> Option<String> {
    if !file.file_type().is_block_device() {
        return None;
    }
    let device = file.rdev();
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let folder = format!("/sys/dev/block/{number}");
    let is_part_of_another =
        |folder: &Path| fs::read_dir(folder.join("holders")).is_ok_and(|mut all| all.next().is_some());
    // Itself and its partitions.
    let parts = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let parts = parts.filter(|part| part.join("partition").exists()).chain([folder.into()]).collect::<Vec<_>>();
    let numbers: Vec<_> = parts.iter().filter_map(|part| fs::read_to_string(part.join("dev")).ok()).collect();
    // The third word of a line is the device.
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut mounted = mounts.lines().filter_map(|line| line.split(' ').nth(2));
    if mounted.any(|mounted| numbers.iter().any(|number| number.trim_end() == mounted)) {
        return Some("it is mounted".into());
    }
    parts.iter().any(|part| is_part_of_another(part)).then(|| "it is part of another device".into())
}
