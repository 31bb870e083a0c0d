//! The receiver: a process of this program that accepts and makes connections for another one, and receives all
//! descriptors that come with them.
//!
//! [`blkyard_os::Receiver`] describes it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use blkyard::Connector;
use blkyard_export::{Accepted, Acceptor};
use blkyard_os::Receiver;

/// A receiver that was started.
#[derive(Debug)]
pub(crate) struct ReceiverProcess(Receiver);

impl ReceiverProcess {
    /// Starts it. To be called before an image is open.
    ///
    /// # Errors
    /// The system gives no process or descriptor.
    pub(crate) fn start() -> io::Result<ReceiverProcess> {
        // Not by its path, which may name a newer program by now.
        let command = || {
            let mut command = Command::new("/proc/self/exe");
            command.arg("receiver");
            command
        };
        Receiver::process(command).map(ReceiverProcess)
    }
}

/// Starts a receiver that connects to back-ends. To be called by the program `blkyard` itself, which it runs again.
///
/// # Errors
/// The system gives no process or descriptor.
pub fn connector() -> io::Result<Arc<dyn Connector>> {
    Ok(Arc::new(ReceiverProcess::start()?))
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

impl Connector for ReceiverProcess {
    fn connect(&self, path: &Path) -> io::Result<Option<UnixStream>> {
        Ok(self.0.connect(path)?.map(|connected| connected.stream))
    }
}
