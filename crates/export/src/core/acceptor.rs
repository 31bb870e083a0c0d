//! Acceptors: accept the connections of a socket, and close sockets whose backlog may hold any descriptor.
//!
//! A front-end sends descriptors, and some block on close, or block the close of a socket in which they lie unread. An
//! export with untrusted front-ends accepts connections through a process that may block. That process decides which
//! descriptors pass; messages are checked here all the same.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};

/// A connection that was taken.
#[derive(Debug)]
pub struct Accepted {
    /// The way to the other side.
    pub stream: UnixStream,
    /// The user there.
    pub uid: u32,
    /// The process there, as it connected; 0 if that cannot be known.
    pub pid: i32,
}

/// Takes connections and closes listening sockets.
pub trait Acceptor: Send + Sync {
    /// Registers a listening socket and its path.
    ///
    /// # Errors
    /// It cannot be served.
    fn listen(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<()>;

    /// Accepts the next connection of a non-blocking socket; `None` if none waits.
    ///
    /// # Errors
    /// It cannot be accepted, for any kind of error: a caller that retries at once would spin.
    fn accept(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<Option<Accepted>>;

    /// Closes a socket, and with it its backlog.
    fn close(&self, path: &Path, listener: OwnedFd);
}

/// Accepts connections directly: for trusted front-ends.
#[derive(Debug)]
pub(crate) struct DirectAcceptor;

impl Acceptor for DirectAcceptor {
    fn listen(&self, _path: &Path, _listener: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn accept(&self, _path: &Path, listener: BorrowedFd<'_>) -> io::Result<Option<Accepted>> {
        let stream = match accept_with(listener, SocketFlags::CLOEXEC) {
            Err(Errno::AGAIN) => return Ok(None),
            accepted => accepted?,
        };
        let peer = sockopt::socket_peercred(&stream)?;
        Ok(Some(Accepted { stream: stream.into(), uid: peer.uid.as_raw(), pid: peer.pid.as_raw_nonzero().get() }))
    }

    fn close(&self, _path: &Path, listener: OwnedFd) {
        drop(listener);
    }
}
