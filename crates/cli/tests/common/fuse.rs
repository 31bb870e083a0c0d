//! A file system of this process with one file, which reads as zeroes and forgets what is written. Its server answers
//! as the test wants.
//!
//! Dropping it ends all pending requests with an error.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Requests, by the numbers of `linux/fuse.h`.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
pub const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
pub const FLUSH: u32 = 25;
const INIT: u32 = 26;
const FALLOCATE: u32 = 43;
const LSEEK: u32 = 46;
const NOT_THERE: i32 = -38;
const NO_DATA: i32 = -6;

/// Bytes of the only file.
pub const FILE_BYTES: u64 = 16 << 20;

/// A mounted file system.
pub struct Fuse {
    device: Option<Arc<File>>,
    folder: PathBuf,
    hangs: Arc<AtomicBool>,
    has_data: Arc<AtomicBool>,
}

impl Fuse {
    /// Mounts one at a folder. It does not answer the requests in `silent`. `None` where mounts are not permitted,
    /// which fails where all tests must run.
    pub fn mount(folder: &Path, silent: &'static [u32]) -> Option<Fuse> {
        let mounted = File::options().read(true).write(true).open("/dev/fuse").and_then(|device| {
            let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
            let options = std::ffi::CString::new(options).unwrap();
            mount("test", folder, "fuse", MountFlags::empty(), options.as_c_str())?;
            Ok(device)
        });
        let device = match mounted {
            Ok(device) => Arc::new(device),
            Err(error) => {
                assert!(std::env::var_os("CI").is_none(), "no FUSE file system can be mounted: {error}");
                println!("skipped: no FUSE file system can be mounted here: {error}");
                return None;
            }
        };
        // It has its own share of the device only while it answers, or dropping ours would not end it.
        let weak = Arc::downgrade(&device);
        let hangs = Arc::new(AtomicBool::new(false));
        let all = Arc::clone(&hangs);
        let has_data = Arc::new(AtomicBool::new(true));
        let data = Arc::clone(&has_data);
        std::thread::spawn(move || {
            let mut bytes = vec![0; 1 << 18];
            loop {
                let Some(device) = weak.upgrade() else { return };
                let ready = rustix::event::PollFd::new(&*device, rustix::event::PollFlags::IN);
                let time = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                if !matches!(rustix::event::poll(&mut [ready], Some(&time)), Ok(1..)) {
                    continue;
                }
                let Ok(read) = (&*device).read(&mut bytes) else { return };
                if !all.load(Ordering::Relaxed) {
                    let _ = answer(&bytes[..read], silent, &data).map(|answer| (&*device).write_all(&answer));
                }
            }
        });
        Some(Fuse { device: Some(device), folder: folder.into(), hangs, has_data })
    }

    /// From now on it answers nothing.
    pub fn hang(&self) {
        self.hangs.store(true, Ordering::Relaxed);
    }

    /// Its file is a hole until something is written.
    pub fn empty(&self) {
        self.has_data.store(false, Ordering::Relaxed);
    }

    /// Its file.
    pub fn file(&self) -> PathBuf {
        self.folder.join("file")
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        drop(self.device.take());
        let _ = unmount(&self.folder, UnmountFlags::DETACH);
    }
}

fn answer(request: &[u8], silent: &[u32], has_data: &AtomicBool) -> Option<Vec<u8>> {
    let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
    let (kind, node) = (word(4), u64::from_ne_bytes(request[16..24].try_into().unwrap()));
    if silent.contains(&kind) || kind == FORGET {
        return None;
    }
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
    let attributes = |node: u64| {
        let is_root = node == 1;
        let (size, mode) = if is_root { (0, 0o040_755) } else { (FILE_BYTES, 0o100_644) };
        let mut bytes: Vec<u8> = [node, size, 0, 0, 0, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend(words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]));
        bytes
    };
    // Both names and attributes are good for an hour.
    let hour = 3600_u64.to_ne_bytes();
    let body = match kind {
        // Version 7.31, 16 requests in the background, writes of 128 KiB.
        INIT => words(&[7, 31, 0, 0, 0x000c_0010, 1 << 17, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        LOOKUP => {
            let ids = [2_u64.to_ne_bytes(), [0; 8], hour, hour].concat();
            [ids, words(&[0, 0]), attributes(2)].concat()
        }
        GETATTR => [hour.to_vec(), words(&[0, 0]), attributes(node)].concat(),
        OPEN => vec![0; 16],
        STATFS => vec![0; 80],
        // The length is behind the file's handle and the offset.
        READ => vec![0; word(56) as usize],
        WRITE => {
            has_data.store(true, Ordering::Relaxed);
            words(&[word(56), 0])
        }
        // Behind the file's handle: the offset sought from, which is data.
        LSEEK if has_data.load(Ordering::Relaxed) => request[48..56].to_vec(),
        RELEASE | FLUSH | FSYNC | FALLOCATE => Vec::new(),
        other => {
            let error = if other == LSEEK { NO_DATA } else { NOT_THERE };
            return Some([words(&[16, error.cast_unsigned()]), request[8..16].to_vec()].concat());
        }
    };
    Some([words(&[16 + body.len() as u32, 0]), request[8..16].to_vec(), body].concat())
}
