//! Acceptors: accept the connections of a socket, and close sockets whose backlog may hold any descriptor.
//!
//! A front-end can send descriptors whose close blocks, or that block the close of a socket in which they lie unread.
//! An export with untrusted front-ends therefore accepts connections through a separate process that may block. That
//! process decides which descriptors pass; messages are checked here in any case.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};

/// An accepted connection.
#[derive(Debug)]
pub struct Accepted {
    /// Socket connected to the peer.
    pub stream: UnixStream,
    /// User id of the peer.
    pub uid: u32,
    /// Process id of the peer when it connected; 0 if unknown.
    pub pid: i32,
}

/// Accepts connections and closes listening sockets.
pub trait Acceptor: Send + Sync {
    /// Registers a listening socket and its path.
    ///
    /// # Errors
    /// The acceptor cannot serve this socket.
    fn listen(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<()>;

    /// Accepts the next connection of a non-blocking socket; `None` if none is pending.
    ///
    /// # Errors
    /// The connection cannot be accepted; this includes temporary errors, after which a caller must not retry at once.
    fn accept(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<Option<Accepted>>;

    /// Closes a socket and its backlog.
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
