//! Who takes the connections of a socket, and closes what others may have put there.
//!
//! A front-end sends descriptors, and some hang whoever closes them, or closes a socket in which they lie unread. An
//! export that faces those it does not trust takes its connections through somebody who is not hurt by that. Which
//! descriptors pass is that one's affair; what a message means is looked at here all the same.

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
    /// Is told of a socket that listens at a path from now on.
    ///
    /// # Errors
    /// It cannot be served.
    fn listen(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<()>;

    /// Takes the next connection of a non-blocking socket; none if none waits.
    ///
    /// # Errors
    /// It cannot be had, whatever the error's kind: a caller that asks again at once would spin.
    fn accept(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<Option<Accepted>>;

    /// Closes a socket, and with it what lies in its backlog.
    fn close(&self, path: &Path, listener: OwnedFd);
}

/// Takes connections as they are: for those who trust every front-end.
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
