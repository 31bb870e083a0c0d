//! The driver of one queue: requests become commands, results become statuses.
//!
//! A command whose status allows it is submitted again, at most five times; one that the kernel cancelled or could not
//! start, for a bounded time. A namespace that is gone fails all requests.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use blkyard_mem::{BufferId, RegisteredBuffer};
use blkyard_mq::{Batch, Done, Driver, ErrorCode, Op, RegionTable, Shortage, Status};
use blkyard_nvme::{NvmeNamespace, NvmeStatus, Retries, RetryDelays, Sqe};
use blkyard_os::{NvmeCharData, NvmeCharQueue, Ring};

/// A queue of a namespace.
#[derive(Debug)]
pub(super) struct NvmeCharDriver {
    queue: NvmeCharQueue,
    namespace: NvmeNamespace,
    retries: Retries,
}

/// How a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandEnd {
    /// A status, which decides whether the command is submitted again.
    Status(NvmeStatus),
    /// The kernel cancelled the command, or could not start it: it is submitted again for a bounded time.
    Cancelled(ErrorCode),
    /// The kernel refused the command.
    Refused(Status),
}

impl CommandEnd {
    fn of(result: Result<u16, i32>) -> CommandEnd {
        // Numbers as on every Linux architecture we build for (asm-generic/errno.h).
        match result {
            Ok(status) => match NvmeStatus(status).without_flags() {
                // Statuses of the kernel's driver: cancelled, or its controller was not live.
                NvmeStatus::HOST_ABORTED | NvmeStatus::HOST_PATH_ERROR => {
                    CommandEnd::Cancelled(ErrorCode::Nvme(status))
                }
                _ => CommandEnd::Status(NvmeStatus(status)),
            },
            // EINTR, EAGAIN, ENOMEM, EBUSY: cancelled by a reset of the controller, or not submitted. EIO: its queue
            // was not enabled. EFAULT: a worker thread of the kernel, which starts commands that wait for the end of a
            // reset, did not find their memory. It is mapped: Linux 6.12 with X32 may take such a worker for a thread
            // of 32 bits, and then cuts its addresses off.
            Err(errno @ (4 | 5 | 11 | 12 | 14 | 16)) => CommandEnd::Cancelled(ErrorCode::Errno(errno)),
            // ENXIO, ENODEV, ESHUTDOWN: the namespace was removed.
            Err(6 | 19 | 108) => CommandEnd::Refused(Status::Offline),
            Err(errno) => CommandEnd::Refused(Status::from_errno(errno)),
        }
    }
}

impl NvmeCharDriver {
    pub(super) fn new(
        queue: NvmeCharQueue,
        namespace: NvmeNamespace,
        depth: u16,
        delays: RetryDelays,
    ) -> NvmeCharDriver {
        NvmeCharDriver { queue, namespace, retries: Retries::new(depth, delays) }
    }
}

impl Driver<Ring> for NvmeCharDriver {
    #[inline]
    fn queue_rqs(&mut self, ring: &mut Ring, memory: &RegionTable, batch: &mut Batch<'_>) {
        if !self.queue.open(ring) {
            return batch.short_of(Shortage::System);
        }
        let namespace = self.namespace;
        while self.queue.has_room()
            && let Some((tag, request, segments)) = batch.take()
        {
            if !self.retries.is_empty() && !request.was_requeued() {
                // Left by a request that was taken to another queue.
                self.retries.forget(&tag);
            }
            let (op, sector, sectors, flags) = (request.op(), request.sector(), request.sectors(), request.flags());
            let (sqe, data) = match op {
                Op::Read | Op::Write => {
                    (namespace.command(op, sector, sectors, flags), NvmeCharData::Segments(segments))
                }
                Op::Flush | Op::WriteZeroes => (namespace.command(op, sector, sectors, flags), NvmeCharData::None),
                Op::Discard => {
                    let ranges = batch.ranges(&tag).map(|range| namespace.range(range).words());
                    let Some(count) = self.queue.write_ranges(&tag, ranges) else {
                        self.retries.forget(&tag);
                        batch.complete(tag, Status::Invalid);
                        continue;
                    };
                    (Sqe::deallocate(namespace.nsid, count), NvmeCharData::Ranges(count))
                }
            };
            if let Err(tag) = self.queue.push(memory, tag, sqe.0, data) {
                self.retries.forget(&tag);
                batch.complete(tag, Status::Invalid);
            }
        }
        self.queue.submit();
    }

    #[inline]
    fn poll(&mut self, _: &mut Ring, _: &RegionTable, done: &mut Done<'_>, now_ns: u64) {
        let retries = &mut self.retries;
        retries.requeue_due(done, now_ns);
        self.queue.poll(|tag, result| {
            if result == Ok(0) && retries.is_empty() {
                return done.complete(tag, Status::Ok);
            }
            match CommandEnd::of(result) {
                CommandEnd::Status(status) => retries.finish(tag, status, done, now_ns),
                CommandEnd::Cancelled(code) => retries.finish_cancelled(tag, code, done, now_ns),
                CommandEnd::Refused(status) => {
                    retries.forget(&tag);
                    if let Err(errno) = result {
                        done.note_code(tag.index(), ErrorCode::Errno(errno));
                    }
                    done.complete(tag, status);
                }
            }
        });
    }

    fn set_memory(&mut self, ring: &mut Ring, memory: &RegionTable) {
        self.queue.set_memory(ring, memory);
    }

    fn change_memory(&mut self, _: &mut Ring, memory: &RegionTable) {
        self.queue.change_memory(memory);
    }

    fn add_buffer(&mut self, _: &mut Ring, memory: &RegionTable, buffer: &Arc<RegisteredBuffer>) {
        self.queue.add_buffer(memory, buffer);
    }

    fn remove_buffer(&mut self, _: &mut Ring, buffer: BufferId) {
        self.queue.remove_buffer(buffer);
    }

    fn arm(&mut self) -> bool {
        self.queue.arm()
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.eventfd()
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.retries.deadline_ns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_the_kernel_are_statuses_of_the_core() {
        use rustix::io::Errno;
        let refused = |errno: Errno| CommandEnd::of(Err(errno.raw_os_error()));
        for errno in [Errno::NODEV, Errno::NXIO] {
            assert_eq!(refused(errno), CommandEnd::Refused(Status::Offline), "a namespace that was removed");
        }
        for errno in [Errno::INTR, Errno::AGAIN, Errno::IO, Errno::FAULT] {
            assert_eq!(refused(errno), CommandEnd::Cancelled(ErrorCode::Errno(errno.raw_os_error())), "not counted");
        }
        for status in [0x370, 0x371] {
            assert_eq!(CommandEnd::of(Ok(status)), CommandEnd::Cancelled(ErrorCode::Nvme(status)), "of the kernel");
        }
        assert_eq!(refused(Errno::ACCESS), CommandEnd::Refused(Status::Io));
        assert_eq!(refused(Errno::OPNOTSUPP), CommandEnd::Refused(Status::NotSupported));
        assert_eq!(CommandEnd::of(Ok(0x4281)), CommandEnd::Status(NvmeStatus::UNRECOVERED_READ.with_dnr()));
    }
}
