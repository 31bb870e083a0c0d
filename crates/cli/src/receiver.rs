//! The daemon's receiver: a process of this program that takes connections and all descriptors that come with them.
//!
//! What it does, and why, is said in [`blkyard_os::Receiver`].

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Command;

use blkyard_export::{Accepted, Acceptor};
use blkyard_os::Receiver;

/// A receiver that was started.
pub(crate) struct ReceiverProcess(Receiver);

impl ReceiverProcess {
    /// Starts it. To be called before an image is open.
    ///
    /// # Errors
    /// The system gives no process or descriptor.
    pub(crate) fn start() -> io::Result<ReceiverProcess> {
        // Not by its path, where a newer program may stand by now.
        let command = || {
            let mut command = Command::new("/proc/self/exe");
            command.arg("receiver");
            command
        };
        Receiver::process(command).map(ReceiverProcess)
    }
}

impl Acceptor for ReceiverProcess {
    fn listen(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<()> {
        self.0.listen(path, listener)
    }

    fn accept(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<Option<Accepted>> {
        let taken = self.0.accept(path, listener)?;
        Ok(taken.map(|taken| Accepted { stream: taken.stream, uid: taken.uid, pid: taken.pid }))
    }

    fn close(&self, path: &Path, listener: OwnedFd) {
        self.0.close(path, listener);
    }
}
