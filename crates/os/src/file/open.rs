//! Opens a file: determines its type, size and alignment, and locks it.
//!
//! Runs once, at start, before anything is served. Changes nothing in the file.
//!
//! Unsafe: two ioctls of block devices have no safe wrapper.

use std::fs::{FileType, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blkyard_mem::{PAGE_BYTES, Region};
use blkyard_mq::{DeviceInfo, QueueLimits, SECTOR_SHIFT};
use rustix::fs::{AtFlags, SeekFrom, StatxFlags, seek, statx};

use super::container::{self, Container};
use super::disk::DiskRoom;
use super::holder::living_holder;
use super::lock::{Locked, lock};
use super::passthrough;
use super::place::{BOUNCES, ZEROES_BYTES};
use super::{Direct, FileConfig, FileCounters, FileDevice, Indirect, Mode, OpenError, SharedFile, Syncs, Threads};

/// Largest logical block: the limit of virtio and its guests with pages of the usual size.
pub(super) const BLOCK_BYTES_MAX: u32 = 4096;
/// Largest alignment of direct I/O where it is not stated: no disk in use needs more.
const ALIGN_MAX: u32 = 4096;
/// A process that ends takes its locks with it only once the kernel has taken its rings apart, some milliseconds
/// later. One that follows on its heels waits for that, a third of a second in all, and asks often: a guest waits, too.
const CLAIM_TRIES: u32 = 150;
const CLAIM_PAUSE: Duration = Duration::from_millis(2);
/// Sectors of the longest discard or write of zeroes: four gibibytes less a sector, as Linux's loop driver has it.
/// Shortened to a multiple of the block.
const TRIM_SECTORS_MAX: u32 = u32::MAX >> SECTOR_SHIFT;

const WRITE_PROTECTED: &str = "the device is write-protected";

const _: () = assert!(BOUNCES > 0);

impl FileDevice {
    /// Opens, probes and locks a file or block device.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(config: FileConfig) -> Result<FileDevice, OpenError> {
        if metadata(&config)?.is_file()
            && let Some(named) = container::named(&config.path)
        {
            let hint = ", or rename it if it is raw";
            return Err(container_error(config.path, "is named as", named, hint));
        }
        let claimed = claim(&config, |claimed| !claimed.block_device || !passthrough::may_be_in_flight(&claimed.now))?;
        let (path, is_block_device) = (config.path.clone(), claimed.block_device);
        let device = FileDevice::of(config, claimed)?;
        if !is_block_device && let Ok(Some(begun)) = container::begun(&path) {
            let (path, name, cure) = (path.display(), begun.name, begun.cure(&path));
            tracing::warn!(
                "{path} begins like a {name}, and is served as it is; if it is one, make a disk of it with `{cure}`"
            );
        }
        Ok(device)
    }

    /// Opens the block device of a namespace for passthrough, whose lock the caller has.
    pub(crate) fn open_claim(config: FileConfig) -> Result<FileDevice, OpenError> {
        let claimed = claim(&config, |_| true)?;
        FileDevice::of(config, claimed)
    }

    /// Goes on with a file that another process has opened and locked: the lock lies on this description, and so stays.
    /// A sync that has failed there has failed here.
    ///
    /// # Errors
    /// See [`OpenError`]: it is not locked, say, since this is another description.
    pub fn adopt(config: FileConfig, file: OwnedFd, sync_failed: bool) -> Result<FileDevice, OpenError> {
        let flags = rustix::fs::fcntl_getfl(&file)
            .map_err(|error| system(&config, "its descriptor is invalid")(error.into()))?;
        let probed = match config.direct {
            Direct::Off => Probed::Buffered(Indirect::Asked),
            _ if flags.contains(rustix::fs::OFlags::DIRECT) => Probed::Direct,
            _ => Probed::Buffered(Indirect::Adopted),
        };
        match claim_open(&config, file, probed)? {
            Claim::Got(claimed) => {
                let device = FileDevice::of(config, claimed)?;
                device.shared.sync_failed.store(sync_failed, Ordering::Relaxed);
                Ok(device)
            }
            Claim::Held(_) => Err(OpenError::Held { path: config.path }),
        }
    }

    /// The description that carries its I/O and its lock, for the process that [adopts](FileDevice::adopt) it.
    pub fn description(&self) -> BorrowedFd<'_> {
        self.shared.file.as_fd()
    }

    /// Whether a sync has failed: no flush succeeds since.
    pub fn sync_has_failed(&self) -> bool {
        self.shared.sync_failed.load(Ordering::Relaxed)
    }

    fn of(config: FileConfig, claimed: Claimed) -> Result<FileDevice, OpenError> {
        let system = |what| system(&config, what);
        let Claimed { file, now, block_device, probed } = claimed;

        let bytes = seek(&file, SeekFrom::End(0)).map_err(|e| system("its size cannot be read")(e.into()))?;
        let device_block = block_device.then(|| rustix::fs::ioctl_blksszget(&file).unwrap_or(512));
        let system_type = system_type(file.as_fd(), block_device);
        let block = logical_block(&config, device_block)?;
        let mode = match probed {
            Probed::Direct => mode(&config, file.as_fd(), system_type, device_block, block)?,
            Probed::Buffered(reason) => buffered(&config, reason)?,
        };
        if bytes == 0 {
            return Err(OpenError::Empty { path: config.path });
        }
        if !bytes.is_multiple_of(u64::from(block)) {
            if let Ok(Some(begun)) = container::begun(&config.path) {
                return Err(container_error(config.path, "begins like", begun, ""));
            }
            return Err(OpenError::OddSize { path: config.path, bytes, block });
        }
        let physical = if block_device {
            rustix::fs::ioctl_blkpbszget(&file).unwrap_or(block)
        } else {
            // The file system's allocation unit, if the size is plausible; huge pages are not.
            u32::try_from(now.blksize()).ok().filter(|size| (512..=1 << 16).contains(size)).unwrap_or(4096)
        };
        let physical = if physical.is_power_of_two() { physical.max(block) } else { block };
        let limits = limits(block, physical);
        if let Err(source) = limits.check() {
            return Err(OpenError::Limits { path: config.path, source });
        }
        let info = DeviceInfo {
            name: config.path.display().to_string(),
            capacity_sectors: bytes >> SECTOR_SHIFT,
            limits,
            read_only: config.read_only,
            volatile_cache: !config.write_through,
            // A write with RWF_DSYNC.
            fua: true,
            rotational: block_device && turns(&now),
            ..DeviceInfo::default()
        };
        let (memory_mask, offset_mask) = match mode {
            Mode::Direct { memory_align, offset_align } => (memory_align as usize - 1, u64::from(offset_align) - 1),
            Mode::Buffered { .. } => (0, 0),
        };
        let shared = SharedFile {
            name: info.name.clone(),
            memory_mask,
            offset_mask,
            bounce_bytes: limits.sectors_max << SECTOR_SHIFT,
            segments_max: limits.segments_max,
            write_through: config.write_through,
            counters: FileCounters::default(),
            is_block_device: block_device,
            threads: threads(system_type),
            disk: disk(system_type, &now, block_device),
            no_trim: AtomicBool::new(false),
            no_punch: AtomicBool::new(false),
            sync_failed: false.into(),
            syncs: matches!(mode, Mode::Buffered { .. }).then(Syncs::default),
            no_zero_range: AtomicBool::new(false),
            zeroes: Region::anonymous(ZEROES_BYTES).map_err(system("no memory for its buffers"))?,
            file: Arc::new(file),
        };
        Ok(FileDevice { info, mode, shared: Arc::new(shared) })
    }
}

fn container_error(path: PathBuf, sign: &'static str, container: &Container, hint: &'static str) -> OpenError {
    OpenError::Container { sign, format: container.name, cure: container.cure(&path), hint, path }
}

/// Type of the file system that holds the data of a file: `f_type` of `statfs(2)`. That of a block device is unknown:
/// its name is in a file system in memory.
fn system_type(file: BorrowedFd<'_>, block_device: bool) -> Option<i64> {
    rustix::fs::fstatfs(file).ok().map(|system| system.f_type).filter(|_| !block_device)
}

/// Shortest read of a file in memory that has a thread of the kernel of its own. Shorter ones are as fast without, or
/// faster (docs/adr/0071).
const THREADED_BYTES: u64 = 64 << 10;

/// What threads of the kernel do of the I/O of a file on such a file system.
fn threads(system_type: Option<i64>) -> Threads {
    match system_type {
        // The kernel has one thread copy all that a lane reads, unless it is asked for more.
        Some(libc::TMPFS_MAGIC) if has_cpus() => Threads { read_bytes: THREADED_BYTES, ..Threads::NONE },
        // It waits for its server in the calling thread, although asked not to (docs/adr/0081).
        Some(libc::FUSE_SUPER_MAGIC) => Threads::ALL,
        _ => Threads::NONE,
    }
}

/// The disk that holds the data of a file on such a file system, or that the file is.
fn disk(system_type: Option<i64>, file: &Metadata, block_device: bool) -> Option<Arc<DiskRoom>> {
    let has_one = !matches!(system_type, Some(libc::TMPFS_MAGIC | libc::FUSE_SUPER_MAGIC));
    has_one.then(|| DiskRoom::of(if block_device { file.rdev() } else { file.dev() }))
}

/// Whether threads can copy beside one another.
fn has_cpus() -> bool {
    std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1)
}

/// Whether the kernel reports a block device, or the disk of a partition, as rotational.
fn turns(device: &Metadata) -> bool {
    let number = device.rdev();
    let folder = format!("/sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    let said = ["queue", "../queue"].map(|queue| std::fs::read_to_string(format!("{folder}/{queue}/rotational")));
    said.into_iter().flatten().next().is_some_and(|said| said.trim() == "1")
}

/// A file that is ours.
struct Claimed {
    file: OwnedFd,
    now: Metadata,
    block_device: bool,
    probed: Probed,
}

/// Whether a file can be had.
enum Claim {
    Got(Claimed),
    /// Another process has it, named by its lock if known.
    Held(Option<i32>),
}

/// Opens and locks a file, and waits a little if another process has it, or it is not free although it is locked.
fn claim(config: &FileConfig, is_free: impl Fn(&Claimed) -> bool) -> Result<Claimed, OpenError> {
    let mut held = None;
    for _ in 0..CLAIM_TRIES {
        match try_claim(config)? {
            Claim::Got(claimed) if is_free(&claimed) => return Ok(claimed),
            Claim::Got(_) => held = None,
            Claim::Held(process) => held = process,
        }
        std::thread::sleep(CLAIM_PAUSE);
    }
    let path = config.path.clone();
    let named = held.map(|process| format!("process {process} holds a lock on it"));
    let Some(holder) = named.or_else(|| living_holder(&metadata(config).ok()?)) else {
        return Err(OpenError::Held { path });
    };
    let hint = if config.read_only { "" } else { ", or open it with ?readonly=on if that program only reads too" };
    Err(OpenError::InUse { path, holder, hint })
}

fn try_claim(config: &FileConfig) -> Result<Claim, OpenError> {
    let block_device = kind_of(&config.path, metadata(config)?.file_type())?;
    let (file, probed) = match open_file(config, block_device) {
        Ok(opened) => opened,
        // Another process has it exclusively: see `open_file`.
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Ok(Claim::Held(None)),
        Err(error) => return Err(open_error(config, block_device, error)),
    };
    claim_open(config, file, probed)
}

/// Locks a file that is open.
fn claim_open(config: &FileConfig, file: OwnedFd, probed: Probed) -> Result<Claim, OpenError> {
    // The name may refer to another file by now.
    let file = std::fs::File::from(file);
    let now = file.metadata().map_err(system(config, "its type cannot be read"))?;
    let block_device = kind_of(&config.path, now.file_type())?;
    let file = OwnedFd::from(file);
    // Some kernels open such a device all the same, and refuse each write.
    if block_device && !config.read_only && is_read_only(file.as_fd()) {
        return Err(OpenError::ReadOnly { path: config.path.clone(), cause: WRITE_PROTECTED });
    }
    match lock(file.as_fd(), config.read_only) {
        Ok(Locked::Yes) => Ok(Claim::Got(Claimed { file, now, block_device, probed })),
        Ok(Locked::Taken { pid }) => Ok(Claim::Held(pid)),
        Err(source) => Err(OpenError::Lock { path: config.path.clone(), source }),
    }
}

/// Maps an error of the system to the operation that failed.
fn system(config: &FileConfig, what: &'static str) -> impl FnOnce(io::Error) -> OpenError + use<> {
    let path = config.path.clone();
    move |source| OpenError::System { path, what, source }
}

fn limits(block: u32, physical: u32) -> QueueLimits {
    let trim = TRIM_SECTORS_MAX / (physical >> SECTOR_SHIFT) * (physical >> SECTOR_SHIFT);
    QueueLimits {
        logical_block_bytes: block,
        physical_block_bytes: physical,
        discard_sectors_max: trim,
        discard_granularity_bytes: physical,
        write_zeroes_sectors_max: trim,
        ..QueueLimits::default()
    }
}

fn metadata(config: &FileConfig) -> Result<Metadata, OpenError> {
    std::fs::metadata(&config.path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => OpenError::Missing { path: config.path.clone() },
        io::ErrorKind::PermissionDenied => {
            OpenError::Permission { path: config.path.clone(), wanted: "search", hint: " on the folders above it" }
        }
        _ => OpenError::System { path: config.path.clone(), what: "it cannot be examined", source },
    })
}

/// Whether it is a block device.
fn kind_of(path: &Path, kind: FileType) -> Result<bool, OpenError> {
    let path = path.to_path_buf();
    match kind {
        kind if kind.is_file() => Ok(false),
        kind if kind.is_block_device() => Ok(true),
        kind if kind.is_dir() => Err(OpenError::Directory { path }),
        kind if kind.is_fifo() => Err(OpenError::Kind { path, kind: "pipe" }),
        kind if kind.is_socket() => Err(OpenError::Kind { path, kind: "socket" }),
        kind if kind.is_char_device() => Err(OpenError::Kind { path, kind: "character device" }),
        _ => Err(OpenError::Kind { path, kind: "file of unknown type" }),
    }
}

/// Result of opening with direct I/O.
#[derive(Clone, Copy)]
enum Probed {
    Direct,
    Buffered(Indirect),
}

fn open_file(config: &FileConfig, block_device: bool) -> io::Result<(OwnedFd, Probed)> {
    let open = |flags: i32| {
        let mut options = OpenOptions::new();
        // A block device that is mounted, or part of something larger, is refused with this flag.
        let exclusive = if block_device && !config.read_only { libc::O_EXCL } else { 0 };
        options.read(true).write(!config.read_only).custom_flags(flags | exclusive);
        options.open(&config.path).map(OwnedFd::from)
    };
    match config.direct {
        Direct::Off => open(0).map(|file| (file, Probed::Buffered(Indirect::Asked))),
        Direct::Auto | Direct::On => match open(libc::O_DIRECT) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                open(0).map(|file| (file, Probed::Buffered(Indirect::Refused)))
            }
            opened => opened.map(|file| (file, Probed::Direct)),
        },
    }
}

fn open_error(config: &FileConfig, block_device: bool, source: io::Error) -> OpenError {
    let path = config.path.clone();
    match source.raw_os_error() {
        Some(libc::ENOENT) => OpenError::Missing { path },
        Some(libc::EROFS) => OpenError::ReadOnly { path, cause: "its file system is mounted read-only" },
        Some(libc::ETXTBSY) => OpenError::ReadOnly { path, cause: "it is a running program" },
        Some(libc::EACCES | libc::EPERM) if !config.read_only => {
            let Ok(readable) = OpenOptions::new().read(true).open(&config.path) else {
                return OpenError::Permission { path, wanted: "read and write", hint: "" };
            };
            if block_device && is_read_only(readable.as_fd()) {
                return OpenError::ReadOnly { path, cause: WRITE_PROTECTED };
            }
            if source.raw_os_error() == Some(libc::EPERM) {
                return OpenError::ReadOnly { path, cause: "it is marked immutable" };
            }
            OpenError::Permission { path, wanted: "write", hint: ", or open it with ?readonly=on" }
        }
        Some(libc::EACCES | libc::EPERM) => OpenError::Permission { path, wanted: "read", hint: "" },
        _ => OpenError::System { path, what: "it cannot be opened", source },
    }
}

/// The mode of a file with blocks of this size that is open for direct I/O.
fn mode(
    config: &FileConfig,
    file: BorrowedFd<'_>,
    system_type: Option<i64>,
    device_block: Option<u32>,
    block: u32,
) -> Result<Mode, OpenError> {
    let reason = match alignment(file, system_type, device_block) {
        Alignment::Known(memory_align, offset_align) if offset_align <= block => {
            return Ok(Mode::Direct { memory_align, offset_align });
        }
        Alignment::Known(_, offset_align) => Indirect::Blocks(offset_align),
        Alignment::Unknown if block >= ALIGN_MAX => {
            return Ok(Mode::Direct { memory_align: block, offset_align: block });
        }
        Alignment::Unknown => Indirect::Untried,
        Alignment::None => Indirect::Refused,
    };
    let mode = buffered(config, reason)?;
    let flags = rustix::fs::fcntl_getfl(file)
        .and_then(|flags| rustix::fs::fcntl_setfl(file, flags.difference(rustix::fs::OFlags::DIRECT)));
    flags.map_err(|errno| system(config, "direct I/O cannot be disabled")(errno.into()))?;
    Ok(mode)
}

/// The mode without direct I/O, if that may be.
fn buffered(config: &FileConfig, reason: Indirect) -> Result<Mode, OpenError> {
    match config.direct {
        Direct::On => Err(OpenError::NotDirect { path: config.path.clone(), reason }),
        Direct::Auto | Direct::Off => Ok(Mode::Buffered { reason }),
    }
}

/// Alignment for direct I/O on a file.
enum Alignment {
    /// Of memory and of offsets, bytes.
    Known(u32, u32),
    /// The file system does not state it, and the file has no data to try it with.
    Unknown,
    /// There is no direct I/O, although it can be opened for it.
    None,
}

fn alignment(file: BorrowedFd<'_>, system_type: Option<i64>, device_block: Option<u32>) -> Alignment {
    let stated = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if let Ok(stated) = stated
        && stated.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let (memory, offset) = (stated.stx_dio_mem_align, stated.stx_dio_offset_align);
        let has_direct = memory.is_power_of_two() && offset.is_power_of_two();
        return if has_direct { Alignment::Known(memory, offset) } else { Alignment::None };
    }
    // Older kernels do not state it of a block device: it is the block.
    if let Some(block) = device_block {
        return Alignment::Known(block, block);
    }
    // On tmpfs direct and cached I/O are the same, at any offset.
    if system_type == Some(libc::TMPFS_MAGIC) {
        return Alignment::Known(1, 1);
    }
    // Holes prove nothing: the device is not read.
    let Ok(data) = seek(file, SeekFrom::Data(0)) else { return Alignment::Unknown };
    let smaller = std::iter::successors(Some(512), |align| Some(align * 2));
    let mut smaller = smaller.take_while(|align| *align < ALIGN_MAX);
    let offset = smaller.find(|align| try_read(file, data, *align)).unwrap_or(ALIGN_MAX);
    // Memory with the alignment of offsets is always sufficient.
    Alignment::Known(offset, offset)
}

/// Whether a direct read behind `data` works at an offset that is aligned to exactly `align`.
fn try_read(file: BorrowedFd<'_>, data: u64, align: u32) -> bool {
    let Ok(memory) = Region::anonymous(PAGE_BYTES) else { return false };
    let place = data.next_multiple_of(u64::from(ALIGN_MAX)) + u64::from(align);
    let Some(span) = memory.span(0, align as usize) else { return false };
    // SAFETY: `span` is mapped and writable for its length, and has no other user.
    let read = unsafe { libc::pread(file.as_raw_fd(), span.as_ptr().cast(), span.len(), place as i64) };
    read == align as isize
}

/// The logical block: what was asked for, or that of a block device. That of an image does not depend on where it lies:
/// its partition table counts in blocks (docs/adr/0083).
fn logical_block(config: &FileConfig, device_block: Option<u32>) -> Result<u32, OpenError> {
    let own = device_block.unwrap_or(512).max(512);
    let Some(asked) = config.block_bytes else { return Ok(own) };
    let max = BLOCK_BYTES_MAX.max(own);
    if !asked.is_power_of_two() || !(512..=max).contains(&asked) {
        return Err(OpenError::Block { path: config.path.clone(), asked, max });
    }
    Ok(asked)
}

/// Whether a block device is write-protected.
fn is_read_only(device: BorrowedFd<'_>) -> bool {
    /// `linux/fs.h`, `_IO(0x12, 94)`.
    const BLKROGET: libc::Ioctl = 0x125e;
    let mut protected: libc::c_int = 0;
    // SAFETY: the question writes one int, which `protected` is.
    let asked = unsafe { libc::ioctl(device.as_raw_fd(), BLKROGET, &raw mut protected) };
    asked == 0 && protected != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_io_on_a_block_device_needs_its_blocks_also_if_the_kernel_does_not_state_it() {
        let unstated = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(alignment(unstated.as_fd(), None, Some(4096)), Alignment::Known(4096, 4096)));
        assert!(matches!(alignment(unstated.as_fd(), None, Some(512)), Alignment::Known(512, 512)));
    }

    #[test]
    fn a_block_size_is_named_as_a_cure_only_if_it_can_be_asked_for() {
        assert!(Indirect::Blocks(4096).to_string().contains("?block_size=4096"));
        assert!(!Indirect::Blocks(16384).to_string().contains("block_size"));
    }

    #[test]
    fn where_the_name_of_a_block_device_is_says_nothing_of_its_data() {
        let name = std::fs::File::open("/dev/null").unwrap();
        let as_file = system_type(name.as_fd(), false);
        assert!(as_file.is_some());
        assert_eq!(system_type(name.as_fd(), true), None);
        assert_eq!(threads(None).read_bytes, Threads::NONE.read_bytes);
    }
}
