//! Files that a ring knows by number. The kernel then neither looks them up nor counts references for each
//! operation, and keeps them open until the last operation is over, even when the process is killed.
//!
//! Where the table cannot be made, or is full, operations use the descriptor itself.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, squeue};

use super::RingView;

/// Files of one lane. The kernel counts the table against the limit on open files, which is 1024 by default.
const FILES_MAX: usize = 256;

/// How an entry names its file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingFile {
    /// Place in the table, or descriptor.
    pub(crate) number: i32,
    pub(crate) flags: squeue::Flags,
}

/// Holds a file in the table.
pub(crate) type FileHolder = Arc<()>;

#[derive(Debug)]
struct Known {
    file: Arc<OwnedFd>,
    holder: FileHolder,
}

#[derive(Debug)]
pub(super) struct Files {
    /// Empty if there is no table.
    places: Vec<Option<Known>>,
    view: Arc<RingView>,
}

impl Files {
    pub(super) fn new(uring: &IoUring, view: Arc<RingView>) -> Files {
        let made = uring.submitter().register_files_sparse(FILES_MAX as u32);
        let count = if made.is_ok() { FILES_MAX } else { 0 };
        Files { places: std::iter::repeat_with(|| None).take(count).collect(), view }
    }

    pub(super) fn file(&mut self, uring: &IoUring, file: &Arc<OwnedFd>) -> (RingFile, FileHolder) {
        let known =
            self.places.iter().position(|place| place.as_ref().is_some_and(|known| Arc::ptr_eq(&known.file, file)));
        let place = known.or_else(|| self.enter(uring, file));
        match place.and_then(|place| Some((place, self.places[place].as_ref()?))) {
            Some((place, known)) => {
                (RingFile { number: place as i32, flags: squeue::Flags::FIXED_FILE }, Arc::clone(&known.holder))
            }
            None => (RingFile { number: file.as_raw_fd(), flags: squeue::Flags::empty() }, FileHolder::default()),
        }
    }

    fn enter(&mut self, uring: &IoUring, file: &Arc<OwnedFd>) -> Option<usize> {
        let free = self.places.iter().position(Option::is_none)?;
        uring.submitter().register_files_update(free as u32, &[file.as_raw_fd()]).ok()?;
        self.places[free] = Some(Known { file: Arc::clone(file), holder: FileHolder::default() });
        self.view.count_files(1);
        Some(free)
    }

    /// Lets go of files that nobody holds in the table.
    pub(super) fn sweep(&mut self, uring: &IoUring) {
        for (index, place) in self.places.iter_mut().enumerate() {
            if place.as_ref().is_some_and(|known| Arc::strong_count(&known.holder) == 1)
                && uring.submitter().register_files_update(index as u32, &[-1]).is_ok()
            {
                *place = None;
                self.view.count_files(-1);
            }
        }
    }
}
