//! Connections to back-ends.
//!
//! A connector decides which descriptors of a back-end are passed on. Messages are checked independently of it
//! (`session.rs`).

use std::fmt::Debug;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use blkyard_sys::{EventFd, PollFd, PollFlags, TimeSource};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Connects to the socket of a back-end.
///
/// An untrusted back-end needs a connector whose streams bring no descriptor that blocks on close, and leave none in
/// their queue. A shutdown of either half must pass through: a lost disk waits until its back-end has closed.
pub trait Connector: Debug + Send + Sync {
    /// Connects, without waiting; `None` if the back-end's backlog is full.
    ///
    /// # Errors
    /// No process listens there, or the system gives no descriptor.
    fn connect(&self, path: &Path) -> io::Result<Option<UnixStream>>;
}

/// Connects, and waits while the back-end is busy with others, until then or until `end` is readable.
pub(crate) fn connect_until(
    connector: &dyn Connector,
    path: &Path,
    until: Instant,
    end: &EventFd,
    clock: &dyn TimeSource,
) -> io::Result<UnixStream> {
    /// How soon a full queue of connections is looked at again.
    const AGAIN: Duration = Duration::from_millis(5);
    loop {
        match connector.connect(path) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(Some(stream)) => return Ok(stream),
            Ok(None) => {
                let now = clock.now();
                let is_let_go = clock.wait(&mut [PollFd::new(end, PollFlags::IN)], Some(now + AGAIN))? > 0;
                if now >= until || is_let_go {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
        }
    }
}

/// Connects in this process: for trusted back-ends.
#[derive(Debug)]
pub(crate) struct DirectConnector;

impl Connector for DirectConnector {
    fn connect(&self, path: &Path) -> io::Result<Option<UnixStream>> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Err(Errno::AGAIN) => Ok(None),
            connected => Ok(connected.map(|()| Some(socket.into()))?),
        }
    }
}
