//! The driver of one queue: requests become commands, results become statuses.
//!
//! A command whose controller was reset, or whose status allows it, is submitted again, at most five times. A namespace
//! that is gone fails all requests.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use blkyard_mem::{BufferId, RegisteredBuffer};
use blkyard_mq::{Batch, Done, Driver, Op, RegionTable, Shortage, Status};
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
    /// The kernel refused the command.
    Refused(Status),
}

impl CommandEnd {
    fn of(result: Result<u16, i32>) -> CommandEnd {
        // Numbers as on every Linux architecture we build for (asm-generic/errno.h).
        match result {
            Ok(status) => CommandEnd::Status(NvmeStatus(status)),
            // EINTR, EAGAIN, ENOMEM, EBUSY: cancelled by a reset of the controller, or not submitted.
            Err(4 | 11 | 12 | 16) => CommandEnd::Status(NvmeStatus::HOST_ABORTED),
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
                CommandEnd::Refused(status) => {
                    retries.forget(&tag);
                    if let Err(errno) = result {
                        done.note_errno(tag.index(), errno);
                    }
                    done.complete(tag, status);
                }
            }
        });
    }

    fn set_memory(&mut self, ring: &mut Ring, memory: &RegionTable) {
        self.queue.set_memory(ring, memory);
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
        for errno in [Errno::INTR, Errno::AGAIN] {
            assert_eq!(refused(errno), CommandEnd::Status(NvmeStatus::HOST_ABORTED), "submitted again");
        }
        assert_eq!(refused(Errno::ACCESS), CommandEnd::Refused(Status::Io));
        assert_eq!(refused(Errno::OPNOTSUPP), CommandEnd::Refused(Status::NotSupported));
        assert_eq!(CommandEnd::of(Ok(0x4281)), CommandEnd::Status(NvmeStatus::UNRECOVERED_READ.with_dnr()));
    }
}
