//! Files that entries of a ring name. They stay open while an entry with their descriptor may reach the kernel: an
//! entry is submitted later than it is pushed, and by then the number might name another file.
//!
//! No file is registered with the kernel, which would keep it until it has dismantled the ring, long after the last I/O
//! of a killed process (ADR 25).

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

    /// Releases files without a holder.
    pub(super) fn sweep(&mut self) {
        let before = self.known.len();
        self.known.retain(|known| Arc::strong_count(&known.holder) > 1);
        self.view.count_files(self.known.len() as i32 - before as i32);
    }
}
