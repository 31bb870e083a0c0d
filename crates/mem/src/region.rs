//! A range of memory that another party may write at any time.
//!
//! A [`Region`] is mapped once and stays at its address until its last holder drops it. It is private memory that the
//! kernel reads into, or a file shared with a virtual machine. No reference into it is ever formed: bytes go in and
//! out by copy, fields through [`crate::View`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::PAGE_BYTES;
use crate::fault::{EXPORT_BYTES_MAX, MappingBytes, WatchedMapping};
use crate::segment::Span;

/// Bytes of a huge page, on x86-64 and on others with pages of 4 KiB. Where they are larger, the advice does less.
const HUGE_BYTES: usize = 2 << 20;

/// Mapped memory with more than one writer.
pub struct Region {
    /// First byte of the region; not page-aligned if its offset in the file is not. The mapped bytes before and behind
    /// it are unused.
    base: NonNull<u8>,
    len: usize,
    mapping: *mut std::ffi::c_void,
    mapping_len: usize,
    watched: Option<WatchedMapping>,
    /// The addresses that a mapping of a file takes; given back after it is unmapped.
    _bytes: Option<MappingBytes>,
    /// File for other processes to map, and the region's offset there.
    file: Option<(OwnedFd, u64)>,
    /// Whether this process made the memory.
    is_own: bool,
}

// SAFETY: a region is an address range that stays mapped while the region lives; all access is by raw copies and
// atomics, which any thread may do.
unsafe impl Send for Region {}
// SAFETY: as above; no method returns a reference into the memory.
unsafe impl Sync for Region {}

/// Types of file systems whose files need no other process or machine: in memory, or on a disk of this machine, for
/// which a thread waits no longer than for other I/O. Not those of other processes (FUSE) and machines (NFS), and no
/// overlays, which may contain one.
const NEAR: [u64; 9] = [
    0x0102_1994, // tmpfs
    0x9584_58f6, // hugetlbfs
    0x8584_58f6, // ramfs
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0xf2f5_2010, // F2FS
    0x2fc1_2fc1, // ZFS
    0xca45_1a4e, // bcachefs
];

/// Checks that a descriptor is a regular file which is read, written and closed without waiting for another process or
/// machine. A memfd has seals, and is recognised by them without a query of its file system. Any other file system is
/// queried, and may keep the caller waiting: call this on a thread on which no other depends.
///
/// # Errors
/// [`MapError::Far`], [`MapError::NotAFile`], or the system's error.
pub fn check_near(file: BorrowedFd<'_>) -> Result<(), MapError> {
    if rustix::fs::fcntl_get_seals(file).is_ok() {
        return Ok(());
    }
    let kind = rustix::fs::fstatfs(file).map_err(io::Error::from)?.f_type.cast_unsigned();
    if !NEAR.contains(&kind) {
        return Err(MapError::Far { kind });
    }
    // A device or pipe has a name in a near file system, but its own driver handles its close.
    let mode = rustix::fs::fstat(file).map_err(io::Error::from)?.st_mode;
    let is_file = rustix::fs::FileType::from_raw_mode(mode) == rustix::fs::FileType::RegularFile;
    if is_file { Ok(()) } else { Err(MapError::NotAFile) }
}

/// Why a file could not be mapped as a region.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The region's end lies beyond the end of its file; touching it would raise SIGBUS.
    #[error("memory region of {len} bytes at offset {offset} ends beyond its file of {file_len} bytes")]
    BeyondEnd {
        /// Place of the region in the file, bytes.
        offset: u64,
        /// Length of the region, bytes.
        len: u64,
        /// Length of the file, bytes.
        file_len: u64,
    },
    /// Only files with a known length are mapped.
    #[error("memory region's descriptor is not a file: share the memory as a memfd or a file on tmpfs or hugetlbfs")]
    NotAFile,
    /// An access would wait for another process or machine, which may never answer.
    #[error(
        "memory region's file is neither in memory nor on a disk of this machine, its file system being of kind \
         {kind:#x}: share the memory as a memfd or a file on tmpfs or hugetlbfs"
    )]
    Far {
        /// The number by which the system names the kind (`linux/magic.h`).
        kind: u64,
    },
    /// Length zero, or offset and length beyond the address range.
    #[error("memory region of {len} bytes at offset {offset} has no valid extent")]
    Extent {
        /// Place of the region in the file, bytes.
        offset: u64,
        /// Length of the region, bytes.
        len: u64,
    },
    /// The region takes more addresses than a client may have: [`EXPORT_BYTES_MAX`].
    #[error("memory region of {len} bytes is longer than {EXPORT_BYTES_MAX}: share less memory")]
    TooLong {
        /// Length of the region, bytes.
        len: u64,
    },
    /// The system refused.
    #[error("memory region cannot be mapped: {0}")]
    System(#[from] io::Error),
}

impl Region {
    /// Maps `len` bytes of zeroed memory of our own, page-aligned, and if it is large aligned to a huge page. Pages are
    /// taken when they are touched.
    ///
    /// # Errors
    /// The system has no room, or `len` is zero.
    pub fn anonymous(len: usize) -> io::Result<Arc<Region>> {
        let too_long = || io::Error::from(io::ErrorKind::OutOfMemory);
        let align = if len < HUGE_BYTES { PAGE_BYTES } else { HUGE_BYTES };
        // The kernel aligns to pages. The mapped rest is never accessed, and takes no memory.
        let mapping_len = len
            .checked_next_multiple_of(PAGE_BYTES)
            .and_then(|len| len.checked_add(align - PAGE_BYTES))
            .ok_or_else(too_long)?;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
        let mapping = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapping_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let start = mapping.cast::<u8>();
        let base = NonNull::new(start.wrapping_add(start.align_offset(align)));
        let base = base.ok_or_else(|| io::Error::other("mapped at address zero"))?;
        let region = Region { base, len, mapping, mapping_len, watched: None, _bytes: None, file: None, is_own: true };
        region.follow_thread();
        Ok(Arc::new(region))
    }

    /// Places memory of our own where its maker wants all of its memory.
    fn follow_thread(&self) {
        if let Some(node) = crate::preferred_node() {
            self.prefer_node(0, self.len, node);
        }
    }

    /// Has `len` bytes from `offset` on this NUMA node, whoever touches them first: whole pages, since a page may be
    /// shared with a neighbour, and those at the region's ends. Present pages move, unless another process uses them
    /// too, or a device. Advice only, for memory of our own.
    pub(crate) fn prefer_node(&self, offset: u64, len: usize, node: u32) {
        let Some(span) = self.span(offset, len) else { return };
        let (base, start) = (self.start(), span.as_ptr().addr());
        let (begin, mut end) = (start.next_multiple_of(PAGE_BYTES), start + len);
        // The rest of the last page is unused.
        end = if end == base + self.len { end.next_multiple_of(PAGE_BYTES) } else { end / PAGE_BYTES * PAGE_BYTES };
        if begin < end {
            let first = span.as_ptr().wrapping_add(begin - start);
            crate::node::place(first.cast(), end - begin, node);
        }
    }

    /// Address of the first byte.
    pub(crate) fn start(&self) -> usize {
        self.base.addr().get()
    }

    /// The NUMA node that was asked for at this offset, by [`prefer_node`](crate::prefer_node) or
    /// [`View::prefer_node`](crate::View::prefer_node). `None` if the system chooses.
    pub fn node_at(&self, offset: u64) -> Option<u32> {
        crate::node::placed_at(self.span(offset, 1)?.as_ptr().cast())
    }

    /// Asks the system for huge pages, which avoid most page-table walks of random accesses. Advice only: its effect is
    /// not visible and not required. From then on a first access may take 2 MiB of memory instead of a page.
    ///
    /// Not used for regions larger than the machine's memory, of which only parts can be used, nor for
    /// [shared](Region::file) memory, which its owner configures.
    pub fn prefer_huge_pages(&self) {
        let machine = rustix::system::sysinfo();
        let machine_bytes = u128::from(machine.totalram) * u128::from(machine.mem_unit);
        if self.watched.is_some() || self.len as u128 > machine_bytes {
            return;
        }
        // SAFETY: our own mapping, in which the region begins at a page; its contents stay. A system without huge pages
        // refuses, which is as good.
        let _ = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, rustix::mm::Advice::LinuxHugepage) };
    }

    /// Maps `len` bytes of zeroed private memory that [can be shared](Region::file): a memfd with a sealed length.
    ///
    /// # Errors
    /// The system has no room, or `len` is zero.
    pub fn shared(len: usize) -> io::Result<Arc<Region>> {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        let file = memfd_create("blkyard", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mut region = Region::map_shared(file.as_fd(), 0, len as u64).map_err(|error| match error {
            MapError::System(error) => error,
            other => io::Error::new(io::ErrorKind::InvalidInput, other),
        })?;
        region.is_own = true;
        region.follow_thread();
        Ok(Arc::new(region))
    }

    /// Maps `len` bytes at `offset` of a file, shared with its other users. If the file shrinks later, the region turns
    /// into zeroes and [`Region::is_faulted`] is true. Only a near file is mapped, since its sender might have to
    /// answer accesses to it. The check may take as long as the file's file system likes, so it is not for a thread on
    /// which others depend.
    ///
    /// # Errors
    /// See [`MapError`]; nothing stays mapped.
    pub fn map_file(file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Arc<Region>, MapError> {
        if len > EXPORT_BYTES_MAX {
            return Err(MapError::TooLong { len });
        }
        Region::map_shared(file, offset, len).map(Arc::new)
    }

    fn map_shared(file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Region, MapError> {
        let end = offset.checked_add(len).filter(|_| len > 0).ok_or(MapError::Extent { offset, len })?;
        check_near(file)?;
        let stat = rustix::fs::fstat(file).map_err(io::Error::from)?;
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        if end > file_len {
            return Err(MapError::BeyondEnd { offset, len, file_len });
        }
        // Huge pages are mapped whole, whatever part of them the region is; a block size beyond a page is how hugetlbfs
        // reports its page size.
        let page = u64::try_from(stat.st_blksize).unwrap_or(0).max(PAGE_BYTES as u64);
        let page = if page.is_power_of_two() { page } else { PAGE_BYTES as u64 };
        let lead = (offset % page) as usize;
        let extent = || MapError::Extent { offset, len };
        let mapping_len = usize::try_from(len)
            .ok()
            .and_then(|len| len.checked_add(lead))
            .and_then(|len| len.checked_next_multiple_of(page as usize))
            .ok_or_else(extent)?;
        let bytes = Some(MappingBytes::take(mapping_len)?);
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
        let mapping = unsafe {
            mmap(
                std::ptr::null_mut(),
                mapping_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                offset - lead as u64,
            )
            .map_err(io::Error::from)?
        };
        let base = NonNull::new(mapping.cast::<u8>().wrapping_add(lead)).ok_or_else(extent)?;
        let mut region = Region {
            base,
            len: len as usize,
            mapping,
            mapping_len,
            watched: None,
            _bytes: bytes,
            file: None,
            is_own: false,
        };
        region.watched = Some(WatchedMapping::new(mapping as usize, mapping_len)?);
        region.file = Some((file.try_clone_to_owned()?, offset));
        Ok(region)
    }

    /// Maps `len` bytes at `offset` of a device's file, such as the registers of a PCI device: both are whole pages.
    /// Accesses by [`View`](crate::View) reach the device as they are made. If the device takes its memory away, the
    /// region turns into zeroes and [`Region::is_faulted`] is true.
    ///
    /// # Errors
    /// The system's error.
    pub fn map_device(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Arc<Region>> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let bytes = Some(MappingBytes::take(len)?);
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
        let mapping = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, offset)? };
        let base = NonNull::new(mapping.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        let mut region =
            Region { base, len, mapping, mapping_len: len, watched: None, _bytes: bytes, file: None, is_own: false };
        region.watched = Some(WatchedMapping::new(mapping as usize, len)?);
        Ok(Arc::new(region))
    }

    /// Closes the file or device from which the region was mapped, although there are holders: it turns into zeroes,
    /// and [`Region::is_faulted`] is true. Without effect on private memory.
    pub fn detach(&self) {
        self.watched.iter().for_each(WatchedMapping::give_up);
    }

    /// Bytes in the region.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The mapped file, and the offset of the region there, for processes that map the same memory. `None` if the
    /// memory is private.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.file.as_ref().map(|(file, offset)| (file.as_fd(), *offset))
    }

    /// Whether this process made the memory, and so decides alone when its pages go: it is private, or
    /// [shared](Region::shared) with others that it gave it to. It may be pinned. A file that was mapped may be someone
    /// else's (ADR 28).
    pub fn is_own(&self) -> bool {
        self.is_own
    }

    /// Whether the file behind the region was truncated while it was mapped. The region's content is lost.
    pub fn is_faulted(&self) -> bool {
        self.watched.as_ref().is_some_and(WatchedMapping::faulted)
    }

    /// The `len` bytes from `offset`, or `None` if they are not in the region.
    #[inline]
    pub fn span(&self, offset: u64, len: usize) -> Option<Span<'_>> {
        let offset = usize::try_from(offset).ok()?;
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: offset + len <= self.len, so the range lies inside the mapping, which lives as long as `self`.
        Some(unsafe { Span::new(self.base.add(offset), len) })
    }

    /// Zeroes `len` bytes from `offset` of a region of our own, giving whole pages back to the system.
    ///
    /// # Panics
    /// If they do not lie in the region.
    pub fn zero(&self, offset: u64, len: usize) {
        let Some(span) = self.span(offset, len) else { panic!("zeroing outside the region") };
        let lead = span.as_ptr().align_offset(PAGE_BYTES).min(len);
        let pages = (len - lead) / PAGE_BYTES * PAGE_BYTES;
        // Below this a system call costs more than the stores. A file's pages would come back as they are in the file.
        if pages < 64 * PAGE_BYTES || self.watched.is_some() {
            span.fill(0);
            return;
        }
        span.part(0, lead).fill(0);
        span.part(lead + pages, len - lead - pages).fill(0);
        let middle = span.part(lead, pages);
        // SAFETY: whole pages of a private anonymous mapping of ours; they read as zeroes afterwards.
        let dropped = unsafe { rustix::mm::madvise(middle.as_ptr().cast(), pages, rustix::mm::Advice::LinuxDontNeed) };
        if dropped.is_err() {
            middle.fill(0);
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.watched = None;
        // SAFETY: the mapping is ours, and every span borrowed from it has ended. After a failure it stays mapped,
        // which is harmless.
        let _ = unsafe { munmap(self.mapping, self.mapping_len) };
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("len", &self.len).field("faulted", &self.is_faulted()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_keeps_what_is_copied_in() {
        let region = Region::anonymous(10_000).unwrap();
        region.span(9_990, 10).unwrap().copy_from_slice(b"0123456789");
        let mut back = [0; 10];
        region.span(9_990, 10).unwrap().copy_to_slice(&mut back);
        assert_eq!(&back, b"0123456789");
    }

    #[test]
    fn zeroing_touches_what_it_names_and_nothing_else() {
        let region = Region::anonymous(1 << 20).unwrap();
        for (offset, len) in [(0, 1 << 20), (1, 4095), (5000, 600_000), (4096, 500_000), (100, 0)] {
            region.span(0, 1 << 20).unwrap().fill(7);
            region.zero(offset, len);
            let mut bytes = vec![1; 1 << 20];
            region.span(0, 1 << 20).unwrap().copy_to_slice(&mut bytes);
            let range = offset as usize..offset as usize + len;
            assert!(bytes[range.clone()].iter().all(|b| *b == 0), "{offset}+{len}");
            assert!(bytes[..range.start].iter().chain(&bytes[range.end..]).all(|b| *b == 7), "{offset}+{len}");
        }
    }

    #[test]
    fn large_memory_that_prefers_huge_pages_asks_for_them_where_they_can_be() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            eprintln!("skipped: this system has no transparent huge pages");
            return;
        }
        let (plain, huge) = (Region::anonymous(4 * HUGE_BYTES).unwrap(), Region::anonymous(4 * HUGE_BYTES).unwrap());
        huge.prefer_huge_pages();
        assert!(huge.base.as_ptr().addr().is_multiple_of(HUGE_BYTES));
        assert!(mapped(&huge, "VmFlags").contains(" hg ") && !mapped(&plain, "VmFlags").contains(" hg "));
    }

    #[test]
    fn what_is_larger_than_the_machine_and_what_is_shared_stays_in_small_pages() {
        let sparse = Region::anonymous(1 << 44).unwrap();
        let shared = Region::shared(2 * HUGE_BYTES).unwrap();
        for region in [sparse, shared] {
            region.prefer_huge_pages();
            assert!(!mapped(&region, "VmFlags").contains(" hg "));
        }
    }

    #[test]
    fn zeroing_a_part_of_a_huge_page_gives_that_part_back_and_leaves_the_rest() {
        let region = Region::anonymous(4 * HUGE_BYTES).unwrap();
        region.prefer_huge_pages();
        let all = region.span(0, region.len()).unwrap();
        let resident = || mapped(&region, "Rss").replace(" kB", "").trim().parse::<usize>().unwrap() << 10;
        all.fill(7);
        assert_eq!(resident(), region.len());
        let (offset, len) = (HUGE_BYTES / 2, 2 * HUGE_BYTES);
        region.zero(offset as u64, len);
        assert_eq!(resident(), region.len() - len);
        let mut bytes = vec![1; region.len()];
        all.copy_to_slice(&mut bytes);
        assert!(
            bytes
                .iter()
                .enumerate()
                .all(|(at, byte)| *byte == if (offset..offset + len).contains(&at) { 0 } else { 7 })
        );
    }

    /// The system's entry for the mapping in which a region begins.
    fn mapped(region: &Region, key: &str) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let base = region.base.as_ptr().addr();
        let begins = |line: &str| {
            let (from, to) = line.split_whitespace().next()?.split_once('-')?;
            let [from, to] = [from, to].map(|at| usize::from_str_radix(at, 16).ok());
            Some((from?..to?).contains(&base))
        };
        let mut lines = smaps.lines().skip_while(|line| begins(line) != Some(true));
        let line = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        format!("{} ", line.unwrap())
    }

    #[test]
    fn spans_outside_the_region_do_not_exist() {
        let region = Region::anonymous(4096).unwrap();
        assert!(region.span(4096, 1).is_none());
        assert!(region.span(4095, 2).is_none());
        assert!(region.span(u64::MAX, 1).is_none());
        assert!(region.span(1, usize::MAX).is_none());
        assert!(region.span(4096, 0).is_some());
    }

    /// A memfd without seals: its length can change.
    fn memory(len: u64) -> std::fs::File {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        file.into()
    }

    #[test]
    fn a_region_beyond_the_end_of_its_file_is_refused() {
        let file = memory(8192);
        assert!(matches!(Region::map_file(file.as_fd(), 4096, 4097), Err(MapError::BeyondEnd { .. })));
        assert!(matches!(Region::map_file(file.as_fd(), u64::MAX, 2), Err(MapError::Extent { .. })));
        assert!(matches!(Region::map_file(file.as_fd(), 0, 0), Err(MapError::Extent { .. })));
        assert!(Region::map_file(file.as_fd(), 100, 8092).is_ok());
    }

    #[test]
    fn shared_memory_is_the_same_for_all_who_map_its_file_and_keeps_its_length() {
        let ours = Region::shared(10_000).unwrap();
        let (file, offset) = ours.file().unwrap();
        let theirs = Region::map_file(file, offset, ours.len() as u64).unwrap();
        theirs.span(9_990, 10).unwrap().copy_from_slice(b"0123456789");
        let mut back = [0; 10];
        ours.span(9_990, 10).unwrap().copy_to_slice(&mut back);
        assert_eq!(&back, b"0123456789");
        assert!(rustix::fs::ftruncate(file, 4096).is_err() && rustix::fs::ftruncate(file, 20_000).is_err());
        assert!(Region::anonymous(4096).unwrap().file().is_none() && Region::shared(0).is_err());
        assert!(ours.is_own() && !theirs.is_own() && Region::anonymous(4096).unwrap().is_own());
    }

    #[test]
    fn a_detached_region_no_longer_holds_its_file() {
        let file = rustix::fs::memfd_create("detach-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        let region = Region::map_device(file.as_fd(), 4096, 4096).unwrap();
        let other = Region::map_device(file.as_fd(), 4096, 4096).unwrap();
        let view = crate::View::new(Arc::clone(&region), 0, 4096, 4).unwrap();
        view.store_u32(8, 7, std::sync::atomic::Ordering::Relaxed);
        drop(file);
        let is_mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("detach-test");
        region.detach();
        assert!(region.is_faulted() && !other.is_faulted() && is_mapped());
        let mut bytes = [1; 12];
        view.store_u32(8, 9, std::sync::atomic::Ordering::Relaxed);
        other.span(0, 12).unwrap().copy_to_slice(&mut bytes);
        assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0]);
        drop(other);
        assert!(!is_mapped());
    }

    #[test]
    fn a_part_of_a_huge_page_is_mapped_and_unmapped() {
        use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
        let Ok(file) = memfd_create("huge-test", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) else {
            eprintln!("skipped: this system has no huge pages");
            return;
        };
        let page = fstat(&file).unwrap().st_blksize as u64;
        ftruncate(&file, 2 * page).unwrap();
        // The system needs no free huge page: none is touched.
        let region = Region::map_file(file.as_fd(), page - 8192, 3 * 4096).unwrap();
        let lead = region.base.as_ptr().addr() - region.mapping.addr();
        assert_eq!((lead as u64, region.mapping_len as u64), (page - 8192, 2 * page));
        let is_mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("huge-test");
        assert!(is_mapped());
        drop(region);
        assert!(!is_mapped());
    }

    #[test]
    fn a_pipe_is_not_memory() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(matches!(Region::map_file(reader.as_fd(), 0, 4096), Err(MapError::Far { .. })));
        let folder = std::fs::File::open(std::env::temp_dir()).unwrap();
        assert!(matches!(Region::map_file(folder.as_fd(), 0, 1), Err(MapError::NotAFile | MapError::Far { .. })));
    }

    #[test]
    fn a_file_whose_pages_somebody_else_would_have_to_bring_is_not_memory() {
        // A file that the kernel generates stands for those of other processes and machines: it is regular, and has a
        // length.
        let file = std::fs::File::open("/sys/devices/system/cpu/online").unwrap();
        assert!(file.metadata().unwrap().is_file() && file.metadata().unwrap().len() >= 4096);
        let error = Region::map_file(file.as_fd(), 0, 4096).unwrap_err();
        assert!(matches!(error, MapError::Far { kind: 0x6265_6572 }), "{error}");
        assert!(error.to_string().contains("0x62656572") && error.to_string().contains("as a memfd"), "{error}");
    }

    #[test]
    fn files_in_memory_and_on_a_disk_are_memory() {
        let folders = [std::env::temp_dir(), "/dev/shm".into(), "/var/tmp".into()];
        let files = folders.iter().filter_map(|folder| tempfile::tempfile_in(folder).ok());
        let mut mapped = 0;
        for file in files.chain([memory(0)]) {
            file.set_len(8192).unwrap();
            match Region::map_file(file.as_fd(), 0, 8192) {
                Ok(region) => {
                    region.span(0, 4).unwrap().copy_from_slice(b"data");
                    mapped += 1;
                }
                // In a container it may lie on an overlay.
                Err(error) => assert!(matches!(error, MapError::Far { .. }), "{error}"),
            }
        }
        assert!(mapped > 0);
    }

    #[test]
    fn a_file_cut_short_while_mapped_turns_into_zeroes_and_the_process_lives() {
        let file = memory(8192);
        let other = Region::map_file(file.as_fd(), 0, 4096).unwrap();
        let region = Region::map_file(file.as_fd(), 0, 8192).unwrap();
        region.span(5000, 4).unwrap().copy_from_slice(b"data");
        file.set_len(4096).unwrap();
        assert!(!region.is_faulted());
        let mut back = [1; 4];
        region.span(5000, 4).unwrap().copy_to_slice(&mut back);
        assert_eq!(back, [0; 4]);
        assert!(region.is_faulted());
        assert!(!other.is_faulted(), "a region that lies within what is left goes on");
    }
}
