//! One request at the kernel: the operation in flight, and the next one.
//!
//! ```text
//!   read, write ──▶ the rest of it (short), the same again (EAGAIN) ──▶ done
//!   flush       ──▶ done
//!   discard     ──▶ trim ─or─ punch ──▶ done
//!   write zeroes ─▶ punch ─or─ zero range ─or─ punch, allocate ─or─ writes of zeroes ──▶ sync if durable ──▶ done
//! ```
//!
//! Pure: takes results, returns entries. A request has completed only when the kernel has answered its last operation.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;

use blkyard_mq::{BioFlags, Op, Request, Status};
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};

use super::SharedFile;
use super::disk::DiskUse;
use super::syncs::SyncPlace;

/// Bounce buffers of one queue: firmware and old guests use unaligned memory, with few requests at a time.
pub(super) const BOUNCES: usize = 16;
/// Longest single write where zeroes must be written out.
pub(super) const ZEROES_BYTES: usize = 1 << 20;
/// Times in a row that the kernel may ask to try again. It does so when it is short of memory, which passes; this
/// many mean that it will not.
const RETRIES_MAX: u16 = 10_000;

/// `BLOCK_URING_CMD_DISCARD` of linux/blkdev.h, the ioctl `BLKDISCARD` without the waiting. Linux 6.12.
const BLOCK_DISCARD: u32 = 0x12 << 8;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
const ALLOCATE: i32 = libc::FALLOC_FL_KEEP_SIZE;

/// Operation in the kernel for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FileStep {
    #[default]
    Read,
    Write,
    Sync,
    Discard,
    /// The same on a block device: its own discard, which does not define later reads.
    Trim,
    /// Zeroes by giving the space back.
    Punch,
    /// Zeroes that keep the space.
    ZeroRange,
    /// The same in two steps, where the file system has no such call.
    PunchThenAllocate,
    Allocate,
    /// The same by writing them.
    Zeroes,
}

/// Where the bytes of a request are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Data {
    #[default]
    None,
    /// One run of memory that the ring knows by number.
    Fixed { address: u64, buffer: u16 },
    /// One run of memory.
    One { address: u64 },
    /// Several: the slot's vectors, from the first that is not done.
    Many { first: u16, count: u16 },
}

/// A slot for a request, made at start.
#[derive(Debug, Default)]
pub(super) struct FileSlot {
    step: FileStep,
    keep_space: bool,
    durable: bool,
    offset: u64,
    len: u64,
    done: u64,
    data: Data,
    retries: u16,
    /// A thread of the kernel reads or writes.
    threaded: bool,
    /// Requests that it takes of its disk.
    requests: u32,
    /// Bounce buffer used instead of the request's own memory.
    pub(super) bounce: Option<u16>,
    /// Where it is counted as a sync in flight.
    pub(super) sync: Option<SyncPlace>,
}

/// Next step after a completion from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Over(Status),
    /// Ask again: see [`FileSlot::entry`].
    Ask,
}

impl FileSlot {
    /// A request begins, with its data where the caller has put it.
    pub(super) fn begin(&mut self, request: &Request, data: Data, shared: &SharedFile) -> Next {
        let fua = request.flags().contains(BioFlags::FUA) || shared.write_through;
        *self = FileSlot {
            step: FileStep::Read,
            keep_space: request.flags().contains(BioFlags::NO_UNMAP),
            durable: fua && request.op().is_write(),
            offset: request.offset_bytes(),
            len: request.bytes(),
            done: 0,
            data,
            retries: 0,
            threaded: match request.op() {
                Op::Read => request.bytes() >= shared.threads.read_bytes,
                _ => shared.threads.writes,
            },
            requests: 0,
            bounce: self.bounce,
            sync: None,
        };
        self.step = match request.op() {
            op if (self.durable || op == Op::Flush) && shared.sync_failed.load(Relaxed) => {
                return Next::Over(Status::Io);
            }
            Op::Read => FileStep::Read,
            Op::Write => FileStep::Write,
            Op::Flush => FileStep::Sync,
            Op::Discard if shared.is_block_device && !shared.no_trim.load(Relaxed) => FileStep::Trim,
            Op::Discard if shared.no_punch.load(Relaxed) => return Next::Over(Status::NotSupported),
            Op::Discard => FileStep::Discard,
            Op::WriteZeroes => self.way_to_zeroes(shared),
        };
        Next::Ask
    }

    /// The request goes to its disk: from the lane, or from a thread if the lane uses more than its share of that.
    #[inline]
    pub(super) fn begin_on(&mut self, disk: &DiskUse) {
        let bytes = match self.step {
            FileStep::Read | FileStep::Write => self.len,
            // The kernel has threads for these.
            FileStep::Sync | FileStep::Discard | FileStep::Trim => return,
            // If zeroes are written at last, piece by piece.
            _ => ZEROES_BYTES as u64,
        };
        self.requests = DiskUse::requests(bytes);
        self.threaded = !disk.begin(self.requests);
    }

    /// It has ended there.
    #[inline]
    pub(super) fn end_on(&mut self, disk: &DiskUse) {
        disk.end(std::mem::take(&mut self.requests));
    }

    /// Whether the request reads into memory.
    pub(super) fn is_read(&self) -> bool {
        self.step == FileStep::Read
    }

    /// Whether the request makes data durable: its own, or all.
    #[inline]
    pub(super) fn is_sync(&self) -> bool {
        self.durable || self.step == FileStep::Sync
    }

    /// Bytes of the request.
    pub(super) fn bytes(&self) -> u64 {
        self.len
    }

    /// Bytes that the next question has the kernel copy, unless a device moves them by itself.
    pub(super) fn bytes_asked(&self) -> u64 {
        match self.step {
            FileStep::Read | FileStep::Write => self.len - self.done,
            FileStep::Zeroes => (self.len - self.done).min(ZEROES_BYTES as u64),
            _ => 0,
        }
    }

    /// The next entry for the kernel. `vectors` are those of this slot.
    #[inline]
    pub(super) fn entry(&self, vectors: *const libc::iovec, shared: &SharedFile) -> squeue::Entry {
        let fd = Fd(shared.file.as_raw_fd());
        let at = self.offset + self.done;
        let left = self.len - self.done;
        let sync = if self.durable { libc::RWF_DSYNC } else { 0 };
        let thread = if self.threaded { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        match (self.step, self.data) {
            (FileStep::Read, Data::Fixed { address, buffer }) => {
                let start = (address + self.done) as *mut u8;
                opcode::ReadFixed::new(fd, start, left as u32, buffer).offset(at).build().flags(thread)
            }
            (FileStep::Read, Data::One { address }) => {
                opcode::Read::new(fd, (address + self.done) as *mut u8, left as u32).offset(at).build().flags(thread)
            }
            (FileStep::Read, Data::Many { first, count }) => {
                let vectors = vectors.wrapping_add(first.into());
                opcode::Readv::new(fd, vectors, count.into()).offset(at).build().flags(thread)
            }
            (FileStep::Write, Data::Fixed { address, buffer }) => {
                let start = (address + self.done) as *const u8;
                opcode::WriteFixed::new(fd, start, left as u32, buffer).offset(at).rw_flags(sync).build().flags(thread)
            }
            (FileStep::Write, Data::One { address }) => {
                let start = (address + self.done) as *const u8;
                opcode::Write::new(fd, start, left as u32).offset(at).rw_flags(sync).build().flags(thread)
            }
            (FileStep::Write, Data::Many { first, count }) => {
                let vectors = vectors.wrapping_add(first.into());
                opcode::Writev::new(fd, vectors, count.into()).offset(at).rw_flags(sync).build().flags(thread)
            }
            (FileStep::Zeroes, _) => {
                let len = left.min(ZEROES_BYTES as u64) as u32;
                let start =
                    shared.zeroes.span(0, len as usize).map_or(std::ptr::null(), |span| span.as_ptr().cast_const());
                opcode::Write::new(fd, start, len).offset(at).rw_flags(sync).build().flags(thread)
            }
            (FileStep::Discard | FileStep::Punch | FileStep::PunchThenAllocate, _) => {
                opcode::Fallocate::new(fd, self.len).offset(self.offset).mode(PUNCH).build()
            }
            (FileStep::ZeroRange, _) => {
                opcode::Fallocate::new(fd, self.len).offset(self.offset).mode(ZERO_RANGE).build()
            }
            (FileStep::Allocate, _) => opcode::Fallocate::new(fd, self.len).offset(self.offset).mode(ALLOCATE).build(),
            (FileStep::Trim, _) => {
                // The range's start goes into the entry's address, its length into the first word of the command.
                let mut command = [0; 16];
                command[..8].copy_from_slice(&self.len.to_ne_bytes());
                opcode::UringCmd16::new(fd, BLOCK_DISCARD).addr(Some(self.offset)).cmd(command).build()
            }
            (FileStep::Sync, _) | (_, Data::None) => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        }
    }

    /// The kernel has answered.
    #[inline]
    pub(super) fn answer(&mut self, result: i32, vectors: &mut [libc::iovec], shared: &SharedFile) -> Next {
        match (self.step, result) {
            (_, i32::MIN..0) => self.failed(-result, shared),
            (FileStep::Read | FileStep::Write | FileStep::Zeroes, _) => self.moved(result as u64, vectors, shared),
            (FileStep::Sync | FileStep::Discard | FileStep::Trim, _) => Next::Over(Status::Ok),
            (FileStep::PunchThenAllocate, _) => {
                self.step = FileStep::Allocate;
                Next::Ask
            }
            (FileStep::Punch | FileStep::ZeroRange | FileStep::Allocate, _) => self.zeroed(),
        }
    }

    fn moved(&mut self, bytes: u64, vectors: &mut [libc::iovec], shared: &SharedFile) -> Next {
        self.retries = 0;
        if bytes == self.len - self.done {
            return Next::Over(Status::Ok);
        }
        self.done += bytes;
        // 0 bytes are the end of a file that has become shorter than the disk; so is a part of a block where only whole
        // blocks are possible.
        if bytes == 0 || bytes > self.len || self.done & shared.offset_mask != 0 {
            return Next::Over(Status::Io);
        }
        if self.step != FileStep::Zeroes {
            shared.counters.continued.fetch_add(1, Relaxed);
        }
        if let Data::Many { first, count } = &mut self.data {
            skip(vectors, first, count, bytes as usize);
        }
        Next::Ask
    }

    /// The range reads as zeroes, perhaps not durably so.
    fn zeroed(&mut self) -> Next {
        if !self.durable {
            return Next::Over(Status::Ok);
        }
        self.step = FileStep::Sync;
        Next::Ask
    }

    fn failed(&mut self, errno: i32, shared: &SharedFile) -> Next {
        match errno {
            // ECANCELED when the submitting thread has ended; our code cancels no I/O.
            libc::EAGAIN | libc::EINTR | libc::ECANCELED if self.retries < RETRIES_MAX => {
                self.retries += 1;
                shared.counters.retried.fetch_add(1, Relaxed);
                Next::Ask
            }
            libc::EOPNOTSUPP | libc::ENOSYS => self.refused(shared),
            _ => {
                if self.loses_more_than_itself(errno, shared) {
                    shared.fail_sync(errno);
                }
                // NOWAIT was not set: an operation that the kernel refuses for this long has failed.
                let status = Status::from_errno(errno);
                Next::Over(if status == Status::Again { Status::Io } else { status })
            }
        }
    }

    /// Whether this failure may have been of a sync, and so of earlier writes.
    fn loses_more_than_itself(&self, errno: i32, shared: &SharedFile) -> bool {
        match (self.step, errno) {
            (FileStep::Sync, _) => true,
            // Unmapped memory or a full file system: detected before any write. Through the page cache space may be
            // lacking later, for writes accepted long before.
            (FileStep::Write | FileStep::Zeroes, libc::EFAULT) => false,
            (FileStep::Write | FileStep::Zeroes, libc::ENOSPC | libc::EDQUOT) if shared.syncs.is_none() => false,
            (FileStep::Write | FileStep::Zeroes, _) => self.durable,
            // These make no data durable: a sync follows them.
            _ => false,
        }
    }

    /// The file system does not do this; there may be another way.
    fn refused(&mut self, shared: &SharedFile) -> Next {
        match self.step {
            FileStep::Trim => {
                // Kernels before 6.12 have no such command, and not every device can; the call for files may do.
                shared.no_trim.store(true, Relaxed);
                self.step = FileStep::Discard;
                return Next::Ask;
            }
            FileStep::Discard => {
                shared.no_punch.store(true, Relaxed);
                return Next::Over(Status::NotSupported);
            }
            FileStep::Punch | FileStep::PunchThenAllocate => shared.no_punch.store(true, Relaxed),
            FileStep::ZeroRange => shared.no_zero_range.store(true, Relaxed),
            FileStep::Allocate => {
                // The hole exists already; written zeroes fill it.
                self.step = FileStep::Zeroes;
                return Next::Ask;
            }
            FileStep::Read | FileStep::Write | FileStep::Sync | FileStep::Zeroes => {
                return Next::Over(Status::NotSupported);
            }
        }
        self.step = self.way_to_zeroes(shared);
        Next::Ask
    }

    /// The best way to zeroes among those not known to be refused.
    fn way_to_zeroes(&self, shared: &SharedFile) -> FileStep {
        let punch = !shared.no_punch.load(Relaxed);
        let zero_range = !shared.no_zero_range.load(Relaxed);
        match (self.keep_space, punch, zero_range) {
            (false, true, _) => FileStep::Punch,
            (_, _, true) => FileStep::ZeroRange,
            (true, true, false) => FileStep::PunchThenAllocate,
            (_, false, false) => FileStep::Zeroes,
        }
    }
}

/// Drops `bytes` from the front of the vectors from `first` on.
fn skip(vectors: &mut [libc::iovec], first: &mut u16, count: &mut u16, mut bytes: usize) {
    while *count > 0 {
        let vector = &mut vectors[usize::from(*first)];
        if bytes < vector.iov_len {
            vector.iov_base = vector.iov_base.wrapping_byte_add(bytes);
            vector.iov_len -= bytes;
            return;
        }
        bytes -= vector.iov_len;
        *first += 1;
        *count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Syncs;
    use super::*;

    fn vector(address: usize, len: usize) -> libc::iovec {
        libc::iovec { iov_base: address as *mut libc::c_void, iov_len: len }
    }

    fn shared(offset_mask: u64) -> SharedFile {
        SharedFile {
            name: String::new(),
            file: std::sync::Arc::new(std::fs::File::open("/dev/null").unwrap().into()),
            memory_mask: 0,
            offset_mask,
            bounce_bytes: 1 << 20,
            segments_max: 4,
            write_through: false,
            counters: super::super::FileCounters::default(),
            is_block_device: false,
            threads: super::super::Threads::NONE,
            disk: None,
            no_trim: false.into(),
            no_punch: false.into(),
            no_zero_range: false.into(),
            sync_failed: false.into(),
            syncs: None,
            zeroes: blkyard_mem::Region::anonymous(ZEROES_BYTES).unwrap(),
        }
    }

    fn place(step: FileStep, len: u64, data: Data) -> FileSlot {
        FileSlot { step, len, data, ..FileSlot::default() }
    }

    #[test]
    fn a_short_transfer_goes_on_where_it_stopped() {
        let shared = shared(511);
        let mut vectors = [vector(0x1000, 512), vector(0x3000, 1024), vector(0x8000, 512)];
        let mut place = place(FileStep::Write, 2048, Data::Many { first: 0, count: 3 });
        assert_eq!(place.answer(1024, &mut vectors, &shared), Next::Ask);
        let Data::Many { first: 1, count: 2 } = place.data else { panic!("{:?}", place.data) };
        assert_eq!((vectors[1].iov_base as usize, vectors[1].iov_len), (0x3200, 512));
        assert_eq!(place.answer(512, &mut vectors, &shared), Next::Ask);
        let Data::Many { first: 2, count: 1 } = place.data else { panic!("{:?}", place.data) };
        assert_eq!(place.answer(512, &mut vectors, &shared), Next::Over(Status::Ok));
        assert_eq!(shared.counters.continued(), 2);
    }

    #[test]
    fn the_end_of_the_file_is_an_error() {
        for (step, so_far, result) in [(FileStep::Read, 0, 0), (FileStep::Write, 512, 0), (FileStep::Read, 0, 100)] {
            let mut place = place(step, 4096, Data::One { address: 0x1000 });
            place.done = so_far;
            assert_eq!(place.answer(result, &mut [], &shared(511)), Next::Over(Status::Io));
        }
        let mut cached = place(FileStep::Read, 4096, Data::One { address: 0x1000 });
        assert_eq!(cached.answer(100, &mut [], &shared(0)), Next::Ask, "any place will do there");
    }

    #[test]
    fn the_kernel_may_ask_to_try_again_but_not_for_ever() {
        let shared = shared(0);
        let mut place = place(FileStep::Read, 512, Data::One { address: 0x1000 });
        for _ in 0..RETRIES_MAX {
            assert_eq!(place.answer(-libc::EAGAIN, &mut [], &shared), Next::Ask);
        }
        assert_eq!(place.answer(-libc::EAGAIN, &mut [], &shared), Next::Over(Status::Io));
        assert_eq!(shared.counters.retried(), u64::from(RETRIES_MAX));
        assert_eq!(place.answer(-libc::ENOSPC, &mut [], &shared), Next::Over(Status::NoSpace));
    }

    #[test]
    fn a_sync_that_failed_is_not_forgotten() {
        let shared = shared(0);
        let mut first = place(FileStep::Sync, 0, Data::None);
        assert_eq!(first.answer(-libc::EIO, &mut [], &shared), Next::Over(Status::Io));
        assert!(shared.sync_failed.load(Relaxed), "every later flush fails, whichever queue it comes by");
        let fresh = self::shared(0);
        let mut read = place(FileStep::Read, 512, Data::One { address: 0x1000 });
        assert_eq!(read.answer(-libc::EIO, &mut [], &fresh), Next::Over(Status::Io));
        assert!(!fresh.sync_failed.load(Relaxed), "a read that failed says nothing of what was written");
    }

    #[test]
    fn what_fails_before_it_is_written_fails_no_flush_of_others() {
        // The second is on a file system in memory, which writes nothing back.
        let (direct, in_memory) = (shared(511), shared(0));
        for (step, errno) in [
            (FileStep::Write, libc::EFAULT),
            (FileStep::Write, libc::ENOSPC),
            (FileStep::Zeroes, libc::EDQUOT),
            (FileStep::Punch, libc::ENOSPC),
            (FileStep::Allocate, libc::ENOSPC),
            (FileStep::ZeroRange, libc::EIO),
            (FileStep::Discard, libc::EIO),
            (FileStep::Trim, libc::EINVAL),
        ] {
            for shared in [&direct, &in_memory] {
                let mut place = FileSlot { durable: true, ..place(step, 4096, Data::None) };
                assert!(matches!(place.answer(-errno, &mut [], shared), Next::Over(_)), "{step:?} {errno}");
                assert!(!shared.sync_failed.load(Relaxed), "{step:?} {errno}");
            }
        }
        // Through the page cache ENOSPC may be of a much earlier write.
        let cached = || SharedFile { syncs: Some(Syncs::default()), ..shared(0) };
        for (step, errno, shared) in [
            (FileStep::Write, libc::ENOSPC, cached()),
            (FileStep::Write, libc::EIO, shared(511)),
            (FileStep::Zeroes, libc::EIO, shared(511)),
        ] {
            let mut place = FileSlot { durable: true, ..place(step, 4096, Data::None) };
            assert!(matches!(place.answer(-errno, &mut [], &shared), Next::Over(_)));
            assert!(shared.sync_failed.load(Relaxed), "{step:?} {errno}");
        }
    }

    #[test]
    fn a_discard_that_the_device_refuses_is_tried_as_for_files() {
        let shared = SharedFile { is_block_device: true, ..shared(0) };
        let mut place = place(FileStep::Trim, 4096, Data::None);
        assert_eq!(place.answer(-libc::EOPNOTSUPP, &mut [], &shared), Next::Ask);
        assert_eq!(place.step, FileStep::Discard);
        assert_eq!(place.answer(-libc::EOPNOTSUPP, &mut [], &shared), Next::Over(Status::NotSupported));
        assert!(shared.no_trim.load(Relaxed) && shared.no_punch.load(Relaxed), "neither is asked for again");
    }

    /// The steps that a write of zeroes takes if the file system refuses some of them.
    fn steps(keep_space: bool, durable: bool, refused: &[FileStep]) -> (Vec<FileStep>, Status) {
        let shared = shared(0);
        let mut place = place(FileStep::Read, 3 << 20, Data::None);
        (place.keep_space, place.durable) = (keep_space, durable);
        place.step = place.way_to_zeroes(&shared);
        let mut steps = Vec::new();
        loop {
            steps.push(place.step);
            let result = match place.step {
                step if refused.contains(&step) => -libc::EOPNOTSUPP,
                FileStep::Zeroes => 1 << 20,
                _ => 0,
            };
            if let Next::Over(status) = place.answer(result, &mut [], &shared) {
                return (steps, status);
            }
        }
    }

    #[test]
    fn zeroes_are_had_one_way_or_another() {
        use FileStep::{Allocate, Punch, PunchThenAllocate, Sync, ZeroRange, Zeroes};
        let table: &[(bool, bool, &[FileStep], &[FileStep])] = &[
            (false, false, &[], &[Punch]),
            (false, true, &[], &[Punch, Sync]),
            (false, false, &[Punch], &[Punch, ZeroRange]),
            (false, true, &[Punch, ZeroRange], &[Punch, ZeroRange, Zeroes, Zeroes, Zeroes]),
            (true, false, &[], &[ZeroRange]),
            (true, true, &[ZeroRange], &[ZeroRange, PunchThenAllocate, Allocate, Sync]),
            (true, false, &[ZeroRange, Allocate], &[ZeroRange, PunchThenAllocate, Allocate, Zeroes, Zeroes, Zeroes]),
            (true, false, &[ZeroRange, PunchThenAllocate], &[ZeroRange, PunchThenAllocate, Zeroes, Zeroes, Zeroes]),
        ];
        for (keep_space, durable, refused, want) in table {
            assert_eq!(steps(*keep_space, *durable, refused), (want.to_vec(), Status::Ok), "{refused:?}");
        }
        assert_eq!(steps(false, false, &[Punch, ZeroRange, Zeroes]).1, Status::NotSupported);
    }
}
