//! Opens a namespace: determines what it is, locks it, and reads the limits of its queue in the kernel.
//!
//! The lock is on the file description that carries the I/O, so it lasts until the last command has completed, however
//! the process ends. The block device of the namespace is claimed too, exclusively unless it is only read: passthrough
//! would change a mounted file system under the kernel. Another process takes over both descriptions with their locks.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::NvmeCharError;
use super::queue::CommandRing;
use crate::file::holder::living_holder;
use crate::file::lock::{Locked, lock};
use crate::nvme_ioctl::NvmeDeviceNode;
use crate::{FileConfig, FileDevice, RingConfig};

/// Waits for the lock of a process that is ending: a third of a second in all.
const CLAIM_TRIES: u32 = 150;
const CLAIM_PAUSE: Duration = Duration::from_millis(2);

/// Namespace to open, and its options.
#[derive(Clone, Debug)]
pub struct NvmeCharConfig {
    /// Its device, such as `/dev/ng0n1`.
    pub path: PathBuf,
    /// Nothing is written, and other readers may use it.
    pub read_only: bool,
    /// Completions are polled in the kernel's poll queues.
    pub poll: bool,
}

/// Limits of the namespace's queue in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeCharLimits {
    /// Maximum data of a command, bytes. Any memory fits: it may consist of single pages, and the kernel copies data
    /// that the controller's pointers cannot describe.
    pub bytes_max: u32,
    /// Maximum segments of a command.
    pub segments_max: u16,
    /// Commands in flight in one hardware queue of the kernel's driver.
    pub depth_max: usize,
    /// Writes are refused.
    pub is_read_only: bool,
    /// Poll queues are available.
    pub has_poll_queues: bool,
}

/// An open namespace of the kernel's driver.
#[derive(Debug)]
pub struct NvmeCharDevice {
    path: PathBuf,
    node: NvmeDeviceNode,
    nsid: u32,
    limits: NvmeCharLimits,
    poll: bool,
    /// The block device's folder in sysfs.
    sysfs: PathBuf,
    /// Keeps the block device claimed.
    claim: FileDevice,
    /// Completions that name no command in flight.
    forged: AtomicU64,
}

impl NvmeCharDevice {
    /// Opens and claims a namespace.
    ///
    /// # Errors
    /// See [`NvmeCharError`].
    pub fn open(config: NvmeCharConfig) -> Result<NvmeCharDevice, NvmeCharError> {
        let (file, metadata) = open(&config.path, config.read_only)?;
        NvmeCharDevice::of(config, file, &metadata, None)
    }

    /// Continues with a namespace that another process has opened and claimed: the locks are on these descriptions of
    /// the character device and of the block device, and so stay.
    ///
    /// # Errors
    /// See [`NvmeCharError`]; also if they are not those of one namespace.
    pub fn adopt(config: NvmeCharConfig, file: OwnedFd, claim: OwnedFd) -> Result<NvmeCharDevice, NvmeCharError> {
        let file = File::from(file);
        let metadata = file.metadata().map_err(|source| {
            let path = config.path.clone();
            NvmeCharError::System { path, what: "examining its descriptor", source }
        })?;
        NvmeCharDevice::of(config, file, &metadata, Some(claim))
    }

    fn of(
        config: NvmeCharConfig,
        file: File,
        metadata: &Metadata,
        claimed: Option<OwnedFd>,
    ) -> Result<NvmeCharDevice, NvmeCharError> {
        let NvmeCharConfig { path, read_only, poll } = config;
        let system = |what| {
            let path = path.clone();
            move |source| NvmeCharError::System { path, what, source }
        };
        let name = namespace_name(&path, metadata)?;
        // Said before anything is locked.
        CommandRing::new(RingConfig { single_owner: false, ..RingConfig::default() }, 1, poll)
            .map_err(|source| NvmeCharError::Ring { path: path.clone(), source })?;
        claim(&path, &file, metadata, read_only)?;
        let block = block_name(&name);
        let sysfs = Path::new("/sys/block").join(&block);
        let config = FileConfig { read_only, ..FileConfig::new(Path::new("/dev").join(&block)) };
        let claim = match claimed {
            None => FileDevice::open_claim(config),
            Some(claimed) if is_block_device(&claimed, &sysfs) => FileDevice::adopt(config, claimed, false),
            Some(_other) => return Err(NvmeCharError::OtherClaim { path, block }),
        };
        let claim = claim.map_err(|source| NvmeCharError::Block { path: path.clone(), source })?;
        let limits = NvmeCharLimits::read(&sysfs).map_err(system("reading the limits of its queue"))?;
        if poll && !limits.has_poll_queues {
            return Err(NvmeCharError::NoPollQueues { path });
        }
        let node = NvmeDeviceNode::of(file);
        let nsid = node.namespace_id().map_err(system("NVME_IOCTL_ID"))?;
        Ok(NvmeCharDevice { path, node, nsid, limits, poll, sysfs, claim, forged: AtomicU64::new(0) })
    }

    /// Its device node, as it was named.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The namespace.
    pub fn namespace_id(&self) -> u32 {
        self.nsid
    }

    /// Its open node, for admin commands.
    pub fn node(&self) -> &NvmeDeviceNode {
        &self.node
    }

    /// The description that carries its I/O and its lock, and that which claims its block device, for the process that
    /// [adopts](NvmeCharDevice::adopt) them.
    pub fn descriptions(&self) -> (BorrowedFd<'_>, BorrowedFd<'_>) {
        (self.node.file().as_fd(), self.claim.description())
    }

    /// Limits of its queue in the kernel.
    pub fn limits(&self) -> NvmeCharLimits {
        self.limits
    }

    /// Whether completions are polled in all its queues.
    pub fn is_polled(&self) -> bool {
        self.poll
    }

    /// Its size now, sectors of 512 bytes, as the kernel's driver knows it; `None` once it is gone.
    pub fn sectors_now(&self) -> Option<u64> {
        number(&self.sysfs.join("size")).ok()
    }

    /// Completions that name no command in flight.
    pub fn forged(&self) -> u64 {
        self.forged.load(Relaxed)
    }

    pub(super) fn count_forged(&self) {
        self.forged.fetch_add(1, Relaxed);
    }

    /// The descriptor's number. It is open for as long as this exists.
    pub(super) fn descriptor(&self) -> i32 {
        self.node.file().as_raw_fd()
    }

    /// A device over another file, for tests without a namespace.
    #[cfg(test)]
    pub(super) fn over(file: File, claim: FileDevice) -> NvmeCharDevice {
        let limits = NvmeCharLimits {
            bytes_max: 1 << 20,
            segments_max: 4,
            depth_max: 1023,
            is_read_only: false,
            has_poll_queues: false,
        };
        let node = NvmeDeviceNode::of(file);
        let (path, sysfs) = (PathBuf::from("/dev/null"), PathBuf::new());
        NvmeCharDevice { path, node, nsid: 1, limits, poll: false, sysfs, claim, forged: AtomicU64::new(0) }
    }
}

impl NvmeCharLimits {
    /// Bytes of a page of the host, which is the smallest contiguous piece of memory.
    const PAGE_BYTES: u64 = 4096;

    /// From the block device's folder in sysfs.
    fn read(sysfs: &Path) -> io::Result<NvmeCharLimits> {
        let queue = sysfs.join("queue");
        let bytes = number(&queue.join("max_hw_sectors_kb"))?.saturating_mul(1024);
        let kernel_max = number(&queue.join("max_segments"))?.clamp(4, 4096);
        // With a boundary the kernel copies all segments that do not meet there, and one that starts within a page
        // touches one page more. Without, each of them may touch two pages more.
        let copies = number(&queue.join("virt_boundary_mask")).is_ok_and(|mask| mask > 0);
        let (pages, segments) = if copies { (kernel_max - 1, kernel_max) } else { (kernel_max / 2, kernel_max / 4) };
        Ok(NvmeCharLimits {
            bytes_max: bytes.min(pages * NvmeCharLimits::PAGE_BYTES) as u32,
            segments_max: segments as u16,
            depth_max: number(&queue.join("nr_requests"))?.max(1) as usize,
            is_read_only: number(&sysfs.join("ro"))? != 0,
            // Absent in kernels without polling.
            has_poll_queues: number(&queue.join("io_poll")).is_ok_and(|poll| poll != 0),
        })
    }
}

fn number(file: &Path) -> io::Result<u64> {
    fs::read_to_string(file)?.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn open(path: &Path, read_only: bool) -> Result<(File, Metadata), NvmeCharError> {
    let opened = OpenOptions::new().read(true).write(!read_only).open(path);
    let opened = opened.and_then(|file| file.metadata().map(|metadata| (file, metadata)));
    opened.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => NvmeCharError::Missing { path: path.into() },
        io::ErrorKind::PermissionDenied => NvmeCharError::Permission { path: path.into() },
        _ => NvmeCharError::System { path: path.into(), what: "open", source },
    })
}

/// Name of the namespace in the kernel, such as `ng0n1`, whatever link names it.
fn namespace_name(path: &Path, metadata: &Metadata) -> Result<String, NvmeCharError> {
    let device = metadata.rdev();
    let folder = format!("/sys/dev/char/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let leaf = |link: &Path| Some(fs::canonicalize(link).ok()?.file_name()?.to_str()?.to_owned());
    let is_char = metadata.file_type().is_char_device();
    let is_namespace =
        is_char && leaf(&Path::new(&folder).join("subsystem")).is_some_and(|subsystem| subsystem == "nvme-generic");
    let name = if is_namespace { leaf(Path::new(&folder)) } else { None };
    name.ok_or_else(|| NvmeCharError::Kind { path: path.into(), cure: cure(path) })
}

/// The device to use instead of one that is no namespace's character device.
fn cure(path: &Path) -> String {
    let leaf = path.file_name().and_then(|leaf| leaf.to_str()).unwrap_or_default();
    match leaf.strip_prefix("nvme") {
        Some(rest) if rest.contains('n') => format!("use nvme:/dev/ng{rest}, or file:{}", path.display()),
        Some(rest) if !rest.is_empty() => format!("name a namespace of this controller, such as nvme:/dev/ng{rest}n1"),
        _ => "use /dev/ngXnY, as `blkyard nvme list` shows it".into(),
    }
}

/// Name of the block device of a namespace: `nvme0n1` for `ng0n1`.
fn block_name(name: &str) -> String {
    format!("nvme{}", name.strip_prefix("ng").unwrap_or(name))
}

/// Whether a descriptor is of the block device with this folder in sysfs.
fn is_block_device(descriptor: &OwnedFd, sysfs: &Path) -> bool {
    let Ok(found) = rustix::fs::fstat(descriptor) else { return false };
    let numbers = format!("{}:{}", rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev));
    fs::read_to_string(sysfs.join("dev")).is_ok_and(|text| text.trim() == numbers)
}

/// Locks the namespace, and waits a little if another process has it.
fn claim(path: &Path, file: &File, metadata: &Metadata, read_only: bool) -> Result<(), NvmeCharError> {
    let mut named = None;
    for _ in 0..CLAIM_TRIES {
        match lock(file.as_fd(), read_only) {
            Ok(Locked::Yes) => return Ok(()),
            Ok(Locked::Taken { pid }) => named = pid,
            Err(source) => return Err(NvmeCharError::System { path: path.into(), what: "locking it", source }),
        }
        std::thread::sleep(CLAIM_PAUSE);
    }
    let named = named.map(|process| format!("process {process} holds a lock on it"));
    match named.or_else(|| living_holder(metadata)) {
        Some(holder) => Err(NvmeCharError::InUse { path: path.into(), holder }),
        None => Err(NvmeCharError::Held { path: path.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(path: &str) -> String {
        let config = NvmeCharConfig { path: path.into(), read_only: true, poll: false };
        NvmeCharDevice::open(config).unwrap_err().to_string()
    }

    #[test]
    fn a_device_that_is_no_namespace_is_refused_with_a_cure() {
        assert!(refusal("/dev/ng987n1").contains("no such device"));
        assert!(refusal("/dev/null").contains("not a character device of an NVMe namespace; use /dev/ngXnY"));
        let folder = tempfile::tempdir().unwrap();
        for (leaf, want) in
            [("nvme3n2", "use nvme:/dev/ng3n2, or file:"), ("nvme3", "such as nvme:/dev/ng3n1"), ("nvme", "/dev/ngXnY")]
        {
            let path = folder.path().join(leaf);
            File::create(&path).unwrap();
            let text = refusal(path.to_str().unwrap());
            assert!(text.contains(want) && text.starts_with(path.to_str().unwrap()), "{text}");
        }
    }

    #[test]
    fn a_locked_device_names_its_user() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let open = || open(path.path(), false).unwrap();
        let (first, metadata) = open();
        claim(path.path(), &first, &metadata, false).unwrap();
        let (second, metadata) = open();
        let text = claim(path.path(), &second, &metadata, false).unwrap_err().to_string();
        assert!(text.contains("is in use: another device of this program"), "{text}");
        drop(first);
        claim(path.path(), &second, &metadata, false).unwrap();
    }

    #[test]
    fn descriptors_of_another_device_are_not_adopted() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let config = NvmeCharConfig { path: "/dev/ng0n1".into(), read_only: true, poll: false };
        let text = NvmeCharDevice::adopt(config, null(), null()).unwrap_err().to_string();
        assert!(text.contains("/dev/ng0n1: not a character device of an NVMe namespace"), "{text}");
        let sysfs = tempfile::tempdir().unwrap();
        assert!(!is_block_device(&null(), sysfs.path()));
        for (numbers, is_it) in [("1:3\n", true), ("1:30\n", false), ("259:0\n", false)] {
            fs::write(sysfs.path().join("dev"), numbers).unwrap();
            assert_eq!(is_block_device(&null(), sysfs.path()), is_it, "{numbers}");
        }
    }

    #[test]
    fn a_lock_moves_with_its_description() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let open = || open(path.path(), false).unwrap();
        let (old, metadata) = open();
        claim(path.path(), &old, &metadata, false).unwrap();
        let new = old.try_clone().unwrap();
        claim(path.path(), &new, &metadata, false).unwrap();
        drop(old);
        let (other, metadata) = open();
        assert!(claim(path.path(), &other, &metadata, false).is_err(), "the lock went with the old process");
    }

    #[test]
    fn limits_are_read_from_the_block_device() {
        let folder = tempfile::tempdir().unwrap();
        let set = |values: &[(&str, &str)]| {
            fs::create_dir_all(folder.path().join("queue")).unwrap();
            values.iter().for_each(|(leaf, text)| fs::write(folder.path().join(leaf), text).unwrap());
            NvmeCharLimits::read(folder.path())
        };
        assert!(set(&[("ro", "0\n")]).is_err());
        let usual = [
            ("queue/max_hw_sectors_kb", "512\n"),
            ("queue/max_segments", "127\n"),
            ("queue/virt_boundary_mask", "4095\n"),
            ("queue/nr_requests", "1023\n"),
        ];
        let want = NvmeCharLimits {
            bytes_max: 126 * 4096,
            segments_max: 127,
            depth_max: 1023,
            is_read_only: false,
            has_poll_queues: false,
        };
        assert_eq!(set(&usual).unwrap(), want, "512 KiB may be 129 pages");
        let other = [("queue/max_hw_sectors_kb", "128\n"), ("ro", "1\n"), ("queue/io_poll", "1\n")];
        let want = NvmeCharLimits { bytes_max: 128 << 10, is_read_only: true, has_poll_queues: true, ..want };
        assert_eq!(set(&other).unwrap(), want);
        let torn = set(&[("queue/max_hw_sectors_kb", "512\n"), ("queue/virt_boundary_mask", "0\n")]).unwrap();
        assert_eq!((torn.bytes_max, torn.segments_max), (63 * 4096, 31), "63 pages and 31 times two");
        assert!(set(&[("queue/max_segments", "many\n")]).is_err());
    }

    #[test]
    fn a_namespace_has_the_block_device_of_its_numbers() {
        assert_eq!((block_name("ng0n1"), block_name("ng12n34")), ("nvme0n1".into(), "nvme12n34".into()));
    }
}
