//! Connections to back-ends.
//!
//! A connector decides which descriptors of a back-end are passed on. Messages are checked independently of it
//! (`session.rs`).

use std::fmt::Debug;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;

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
