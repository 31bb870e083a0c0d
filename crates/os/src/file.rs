//! A file or a block device as a disk.
//!
//! [`FileDevice::open`] probes the abilities of the file and locks it. From then on only its queues use it, through
//! the ring of their lane. I/O is direct where the file system supports that, and goes through the page cache
//! elsewhere, also where direct I/O needs larger blocks than the disk has; memory that does not fit it is copied and
//! counted.
//!
//! The lock is on the file description that carries the I/O, and the kernel keeps that open until the last operation
//! has completed. So no other program gets the image while I/O of this process is in flight, however it ends.
//!
//! It does not cache, does not grow the file unless asked to, and serves no format but raw: a file named as an image of
//! another one is refused.

mod container;
pub(crate) mod disk;
mod error;
pub(crate) mod holder;
pub(crate) mod lock;
mod open;
mod passthrough;
mod place;
mod queue;
mod size;
mod syncs;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use blkyard_mem::Region;
use blkyard_mq::{BlockDevice, DeviceInfo};

use disk::DiskRoom;
pub use error::OpenError;
pub use queue::FileQueue;
use syncs::Syncs;

/// Locks an open block device against other programs, for as long as it is open.
///
/// # Errors
/// Its user, in words.
pub(crate) fn claim_block_device(device: &File) -> Result<(), String> {
    let user = |pid: Option<i32>| {
        let named = pid.map(|pid| format!("process {pid} holds a lock on it"));
        let found = || device.metadata().ok().and_then(|metadata| holder::living_holder(&metadata));
        named.or_else(found).unwrap_or_else(|| "another process holds a lock on it".into())
    };
    match lock::lock(device.as_fd(), false) {
        Ok(lock::Locked::Yes) => Ok(()),
        Ok(lock::Locked::Taken { pid }) => Err(user(pid)),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether I/O goes past the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Where the file system does it.
    #[default]
    Auto,
    /// Always; an error where it cannot.
    On,
    /// Never.
    Off,
}

/// File to open, and its options.
#[derive(Clone, Debug)]
pub struct FileConfig {
    /// Where it is.
    pub path: PathBuf,
    /// Writes are refused, and other readers welcome.
    pub read_only: bool,
    /// Whether I/O goes past the page cache.
    pub direct: Direct,
    /// Logical block, bytes; by default that of a block device, and 512 for a file, wherever it lies.
    pub block_bytes: Option<u32>,
    /// Each write is durable when it completes, so flushes are no-ops.
    pub write_through: bool,
}

impl FileConfig {
    /// Defaults for the file at `path`: writable, direct where possible, with a volatile cache.
    pub fn new(path: impl Into<PathBuf>) -> FileConfig {
        FileConfig {
            path: path.into(),
            read_only: false,
            direct: Direct::Auto,
            block_bytes: None,
            write_through: false,
        }
    }
}

/// How I/O reaches the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Past the page cache.
    Direct {
        /// Alignment of memory for direct I/O, bytes; unaligned data is copied.
        memory_align: u32,
        /// Alignment of offsets and lengths in the file, bytes.
        offset_align: u32,
    },
    /// Through the page cache.
    Buffered {
        /// Why.
        reason: Indirect,
    },
}

/// Why I/O does not bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indirect {
    /// The configuration says so.
    Asked,
    /// It did not with the process from which the file was taken over.
    Adopted,
    /// There is no direct I/O.
    Refused,
    /// Direct I/O needs blocks of so many bytes.
    Blocks(u32),
    /// The file system does not state the alignment of direct I/O, and a file without data does not show it.
    Untried,
}

impl std::fmt::Display for Indirect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Indirect::Asked => f.write_str("as asked"),
            Indirect::Adopted => f.write_str("as before it was taken over"),
            Indirect::Refused => f.write_str("the file system does no direct I/O on this file"),
            Indirect::Blocks(bytes) => {
                write!(f, "direct I/O needs blocks of {bytes} bytes here")?;
                // No larger block can be asked for.
                if *bytes <= open::BLOCK_BYTES_MAX {
                    write!(f, ": ?block_size={bytes} for a new disk")?;
                }
                Ok(())
            }
            Indirect::Untried => f.write_str("what direct I/O needs here is unknown until the file has data"),
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Mode::Direct { offset_align: 1, .. } => f.write_str("direct"),
            Mode::Direct { memory_align, .. } if *memory_align > 1 => {
                write!(f, "bypassing the page cache, from memory aligned to {memory_align}")
            }
            Mode::Direct { .. } => write!(f, "bypassing the page cache"),
            Mode::Buffered { reason } => write!(f, "through the page cache ({reason})"),
        }
    }
}

/// Counters of unusual events of a file. Written by all its queues, readable by any thread.
#[derive(Debug, Default)]
pub struct FileCounters {
    bounced: AtomicU64,
    continued: AtomicU64,
    retried: AtomicU64,
    forged: AtomicU64,
}

impl FileCounters {
    /// Requests whose data was copied because of its alignment.
    pub fn bounced(&self) -> u64 {
        self.bounced.load(Relaxed)
    }

    /// Times the kernel did less than it was asked, and was asked for the rest.
    pub fn continued(&self) -> u64 {
        self.continued.load(Relaxed)
    }

    /// Times the kernel asked us to try again.
    pub fn retried(&self) -> u64 {
        self.retried.load(Relaxed)
    }

    /// Completions for requests that were not in flight.
    pub fn forged(&self) -> u64 {
        self.forged.load(Relaxed)
    }
}

/// State that all queues of a file share.
#[derive(Debug)]
struct SharedFile {
    /// The device, for messages.
    name: String,
    file: Arc<OwnedFd>,
    /// Bits that must be zero in the address of memory; zero if any will do.
    memory_mask: usize,
    /// Bits that must be zero in file offsets, and in the length of each segment.
    offset_mask: u64,
    bounce_bytes: u32,
    segments_max: u16,
    write_through: bool,
    counters: FileCounters,
    is_block_device: bool,
    threads: Threads,
    /// The disk on which it is, if the kernel may wait for that in the calling thread.
    disk: Option<Arc<DiskRoom>>,
    /// Learned from refusals, since asking would take changing the file.
    no_trim: AtomicBool,
    no_punch: AtomicBool,
    no_zero_range: AtomicBool,
    /// A sync has failed. The kernel reports that once for each description, and the lost writes stay lost, so no flush
    /// succeeds from then on.
    sync_failed: AtomicBool,
    /// Syncs in flight, of a file whose writes the page cache may still have when they complete.
    syncs: Option<Syncs>,
    /// Source of zeroes where the file has no operation for them. Never written, so it takes no memory.
    zeroes: Arc<Region>,
}

/// Reads and writes that are left to threads of the kernel, each to another one. It gives them others by itself where
/// it says that it would have to wait.
#[derive(Clone, Copy, Debug)]
struct Threads {
    /// Shortest read that is.
    read_bytes: u64,
    /// Whether all writes are.
    writes: bool,
}

impl Threads {
    const NONE: Threads = Threads { read_bytes: u64::MAX, writes: false };
    const ALL: Threads = Threads { read_bytes: 0, writes: true };
}

impl SharedFile {
    /// A sync has failed.
    #[cold]
    fn fail_sync(&self, errno: i32) {
        if !self.sync_failed.swap(true, Relaxed) {
            tracing::error!(
                "{}: a sync failed: {}; what was written since the last flush may be lost, so every flush and durable write \
                 fails until the device is opened again: see to the disk, then restart",
                self.name,
                std::io::Error::from_raw_os_error(errno)
            );
        }
    }
}

/// An open file or block device.
#[derive(Debug)]
pub struct FileDevice {
    info: DeviceInfo,
    mode: Mode,
    shared: Arc<SharedFile>,
}

impl FileDevice {
    /// How I/O reaches the file.
    pub fn mode(&self) -> &Mode {
        &self.mode
    }

    /// Counters of unusual events.
    pub fn counters(&self) -> &FileCounters {
        &self.shared.counters
    }
}

impl BlockDevice for FileDevice {
    type Queue = FileQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn queue(&self, depth: usize) -> FileQueue {
        FileQueue::new(Arc::clone(&self.shared), depth)
    }
}
