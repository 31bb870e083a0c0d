//! The daemon's side of a receiver: starts it, again if it has ended, and asks it for connections.

use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg, socketpair,
    sockopt,
};

use super::reply::{REPLY_BYTES, Reply};
use super::table::{Stderr, raise, spawn};
use super::{COMMAND_BYTES_MAX, Kind};

/// How long the receiver may take to answer: a thread's start. One that takes longer hangs, and another is started.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// A connection that was taken.
#[derive(Debug)]
pub struct Connection {
    /// Our end of the channel to the peer. What comes from it can be used and closed without waiting for the peer.
    pub stream: UnixStream,
    /// The user at the other end.
    pub uid: u32,
    /// The process there, as it connected; 0 if that cannot be known.
    pub pid: i32,
}

/// A receiver. Dropped, it goes on until its sessions have ended.
pub struct Receiver {
    start: Box<dyn Fn() -> io::Result<(OwnedFd, Option<Child>)> + Send + Sync>,
    state: Mutex<State>,
}

struct State {
    /// Where commands go; `None` once it was found closed or without an answer.
    command: Option<OwnedFd>,
    /// How many were started.
    started: u64,
    /// Processes that were started, the last one alive.
    children: Vec<Child>,
}

impl Receiver {
    /// Starts a receiver as a process, by a command that runs [`receive_for_daemon`](super::receive_for_daemon). To be
    /// called before anything is open that the daemon must not leave open behind it.
    ///
    /// # Errors
    /// The system gives no process or descriptor.
    pub fn process(command: impl Fn() -> Command + Send + Sync + 'static) -> io::Result<Receiver> {
        Receiver::start(Box::new(move || {
            let (near, far) = pair()?;
            let child = command().stdin(Stdio::from(far)).stdout(Stdio::null()).spawn()?;
            Ok((near, Some(child)))
        }))
    }

    /// Starts a receiver as a thread of this process, for tests.
    ///
    /// # Errors
    /// The system gives no thread or descriptor.
    pub fn thread() -> io::Result<Receiver> {
        Receiver::start(Box::new(|| {
            let (near, far) = pair()?;
            let begin = |files: Vec<OwnedFd>| {
                if let Some(Err(error)) = files.first().map(super::run) {
                    tracing::error!("the receiver ended: {error}");
                }
            };
            spawn("receiver", vec![raise(&far)?], Stderr::Kept, begin).map_err(|(error, _)| error)?;
            Ok((near, None))
        }))
    }

    fn start(start: Box<dyn Fn() -> io::Result<(OwnedFd, Option<Child>)> + Send + Sync>) -> io::Result<Receiver> {
        let (command, child) = start()?;
        let children = child.into_iter().collect();
        Ok(Receiver { start, state: Mutex::new(State { command: Some(command), started: 1, children }) })
    }

    /// Tells of a socket that listens, which is to be closed by [`Receiver::close`].
    ///
    /// # Errors
    /// There is no receiver, and none can be started.
    pub fn listen(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<()> {
        self.send(Kind::Keep, path, &[listener]).map(drop)
    }

    /// Takes the next connection of a socket, which is non-blocking; none if none waits.
    ///
    /// # Errors
    /// The system gives no descriptor, or the receiver does not answer.
    pub fn accept(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<Option<Connection>> {
        let (mut stream, far) = UnixStream::pair()?;
        let which = self.send(Kind::Accept, path, &[listener, far.as_fd()])?;
        drop(far);
        stream.set_read_timeout(Some(ANSWER_TIME))?;
        let mut reply = [0; REPLY_BYTES];
        if let Err(error) = stream.read_exact(&mut reply) {
            self.give_up(which);
            let cause = if error.kind() == io::ErrorKind::UnexpectedEof { "ended" } else { "does not answer" };
            return Err(io::Error::new(error.kind(), format!("the receiver of descriptors {cause}")));
        }
        stream.set_read_timeout(None)?;
        match Reply::from_bytes(reply) {
            Reply::Taken { uid, pid } => Ok(Some(Connection { stream, uid, pid })),
            Reply::None => Ok(None),
            Reply::Busy => Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "earlier front-ends have left too many descriptors that do not close; end whoever should answer them",
            )),
            Reply::System(error) => Err(error.into()),
        }
    }

    /// Closes a socket in whose backlog anything may lie. Without a receiver it stays open.
    pub fn close(&self, path: &Path, listener: OwnedFd) {
        // First the receiver has one, so that ours is not the last.
        if let Err(error) = self.send(Kind::Keep, path, &[listener.as_fd()]) {
            tracing::error!("{}: the socket stays open: {error}", path.display());
            std::mem::forget(listener);
            return;
        }
        drop(listener);
        // Without a receiver there is nothing to forget.
        let _ = self.send(Kind::Forget, path, &[]);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a command, to a new receiver if the one there was has ended. Says to which.
    fn send(&self, kind: Kind, path: &Path, files: &[BorrowedFd<'_>]) -> io::Result<u64> {
        let mut bytes = vec![kind as u8];
        bytes.extend_from_slice(path.as_os_str().as_bytes());
        if bytes.len() > COMMAND_BYTES_MAX {
            return Err(io::ErrorKind::InvalidFilename.into());
        }
        let mut state = self.state();
        loop {
            let had_one = state.command.is_some();
            let command = match state.command.take() {
                Some(command) => command,
                None => self.restart(&mut state)?,
            };
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(
                files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)),
                "two descriptors at most"
            );
            let flags = SendFlags::NOSIGNAL;
            match rustix::io::retry_on_intr(|| sendmsg(&command, &[IoSlice::new(&bytes)], &mut control, flags)) {
                Ok(_) => {
                    state.command = Some(command);
                    return Ok(state.started);
                }
                // It has ended, or has not read for a long time. Another is started, once.
                Err(Errno::PIPE | Errno::CONNRESET | Errno::AGAIN) if had_one => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn restart(&self, state: &mut State) -> io::Result<OwnedFd> {
        state.children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        let (command, child) = (self.start)()?;
        tracing::warn!("the receiver of descriptors had ended, and was started again; its front-ends were lost");
        state.children.extend(child);
        state.started += 1;
        Ok(command)
    }

    /// The receiver of this number answers no more.
    fn give_up(&self, which: u64) {
        let mut state = self.state();
        if state.started == which {
            state.command = None;
        }
    }
}

/// The two ends for commands.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&near, sockopt::Timeout::Send, Some(ANSWER_TIME))?;
    Ok((near, far))
}
