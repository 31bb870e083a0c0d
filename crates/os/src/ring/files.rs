//! Files that a ring knows by number. The kernel then neither looks them up nor counts references for each
//! operation, and keeps them open until the last operation is over, even when the process is killed.
//!
//! Where the table cannot be made, or is full, operations use the descriptor itself.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, squeue};

/// Files of one lane. The kernel counts the table against the limit on open files, which is 1024 by default.
const FILES_MAX: usize = 256;

/// How an entry names its file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingFile {
    /// Place in the table, or descriptor.
    pub(crate) number: i32,
    pub(crate) flags: squeue::Flags,
}

#[derive(Debug)]
pub(super) struct Files {
    /// Empty if there is no table.
    places: Vec<Option<Arc<OwnedFd>>>,
}

impl Files {
    pub(super) fn new(uring: &IoUring) -> Files {
        let made = uring.submitter().register_files_sparse(FILES_MAX as u32);
        Files { places: if made.is_ok() { vec![None; FILES_MAX] } else { Vec::new() } }
    }

    pub(super) fn file(&mut self, uring: &IoUring, file: &Arc<OwnedFd>) -> RingFile {
        let known = self.places.iter().position(|place| place.as_ref().is_some_and(|held| Arc::ptr_eq(held, file)));
        let place = known.or_else(|| {
            let free = self.places.iter().position(Option::is_none)?;
            let updated = uring.submitter().register_files_update(free as u32, &[file.as_raw_fd()]);
            updated.is_ok().then(|| {
                self.places[free] = Some(Arc::clone(file));
                free
            })
        });
        match place {
            Some(place) => RingFile { number: place as i32, flags: squeue::Flags::FIXED_FILE },
            None => RingFile { number: file.as_raw_fd(), flags: squeue::Flags::empty() },
        }
    }

    /// Lets go of files that nobody else holds.
    pub(super) fn sweep(&mut self, uring: &IoUring) {
        for (index, place) in self.places.iter_mut().enumerate() {
            if place.as_ref().is_some_and(|file| Arc::strong_count(file) == 1)
                && uring.submitter().register_files_update(index as u32, &[-1]).is_ok()
            {
                *place = None;
            }
        }
    }
}
