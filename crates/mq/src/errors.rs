//! I/O errors of a device, kept until they are logged: `mq` has no log.
//!
//! Every queue of the device records its failed requests here, on the slow path. The logging thread takes the oldest
//! one and the number of those since, as often as a [`LogLimit`](crate::LogLimit) allows.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Op, Status};

/// Error number of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    /// Errno of the operating system.
    Errno(i32),
    /// Status field of an NVMe completion, without the phase bit.
    Nvme(u16),
}

/// A failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoError {
    /// Its operation.
    pub op: Op,
    /// First sector.
    pub sector: u64,
    /// Length, bytes.
    pub bytes: u64,
    /// How it failed.
    pub status: Status,
    /// Error number of the operating system or of the device, if there is one.
    pub code: Option<ErrorCode>,
}

/// The I/O errors of one device. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct IoErrors(Arc<ErrorCounts>);

#[derive(Debug, Default)]
struct ErrorCounts {
    /// Errors since the device was opened.
    count: AtomicU64,
    /// Value of `count` when the last one was taken.
    taken: AtomicU64,
    /// The first one since.
    first: Mutex<Option<IoError>>,
}

impl IoErrors {
    /// Notes an error. Never waits: while another is noted or taken, one is counted only.
    pub(crate) fn note(&self, error: IoError) {
        let first = self.0.first.try_lock();
        self.0.count.fetch_add(1, Relaxed);
        if let Ok(mut first) = first {
            first.get_or_insert(error);
        }
    }

    /// Errors since the device was opened.
    pub fn count(&self) -> u64 {
        self.0.count.load(Relaxed)
    }

    /// Whether there is one to take.
    pub fn is_pending(&self) -> bool {
        self.count() != self.0.taken.load(Relaxed)
    }

    /// Takes the first error since the last one was taken, unset if it could only be counted, and the number of all
    /// since, that one included.
    pub fn take(&self) -> Option<(Option<IoError>, u64)> {
        let mut first = self.0.first.lock().unwrap_or_else(PoisonError::into_inner);
        // An error that is kept has been counted, since both are done under the lock.
        let count = self.count();
        let errors = count - self.0.taken.swap(count, Relaxed);
        (errors > 0).then(|| (first.take(), errors))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(sector: u64) -> IoError {
        IoError { op: Op::Write, sector, bytes: 512, status: Status::Io, code: Some(ErrorCode::Errno(5)) }
    }

    #[test]
    fn first_error_is_kept_and_the_rest_counted() {
        let errors = IoErrors::default();
        assert!(!errors.is_pending() && errors.take().is_none());
        let of_queue = errors.clone();
        (1..=3).for_each(|sector| of_queue.note(error(sector)));
        assert!(errors.is_pending());
        assert_eq!(errors.take(), Some((Some(error(1)), 3)));
        assert!(errors.take().is_none());
        of_queue.note(error(4));
        assert_eq!((errors.take(), errors.count()), (Some((Some(error(4)), 1)), 4));
    }

    #[test]
    fn error_that_meets_the_lock_is_still_pending() {
        let errors = IoErrors::default();
        let held = errors.0.first.lock().unwrap();
        errors.note(error(1));
        assert!(errors.is_pending());
        drop(held);
        assert_eq!(errors.take(), Some((None, 1)));
        errors.note(error(2));
        assert_eq!(errors.take(), Some((Some(error(2)), 1)));
        assert!(!errors.is_pending());
    }
}
