//! Files that entries of a ring name. They stay open while an entry may reach the kernel that has their descriptor:
//! what is pushed is submitted later, and by then the number might be another file's.
//!
//! The kernel is told of none of them. It would keep a file that a ring knows by number until it has taken the dead
//! ring apart, long after the last I/O of a process that was killed (ADR 25).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::RingCounters;

/// Keeps a file open for the entries that name it.
pub(crate) type FileHolder = Arc<()>;

#[derive(Debug)]
struct Known {
    file: Arc<OwnedFd>,
    holder: FileHolder,
}

#[derive(Debug)]
pub(super) struct Files {
    known: Vec<Known>,
    view: Arc<RingCounters>,
}

impl Files {
    pub(super) fn new(view: Arc<RingCounters>) -> Files {
        Files { known: Vec::new(), view }
    }

    pub(super) fn hold(&mut self, file: &Arc<OwnedFd>) -> FileHolder {
        if let Some(known) = self.known.iter().find(|known| Arc::ptr_eq(&known.file, file)) {
            return Arc::clone(&known.holder);
        }
        let holder = FileHolder::default();
        self.known.push(Known { file: Arc::clone(file), holder: Arc::clone(&holder) });
        self.view.count_files(1);
        holder
    }

    /// Lets go of files that nobody holds.
    pub(super) fn sweep(&mut self) {
        let before = self.known.len();
        self.known.retain(|known| Arc::strong_count(&known.holder) > 1);
        self.view.count_files(self.known.len() as i32 - before as i32);
    }
}
