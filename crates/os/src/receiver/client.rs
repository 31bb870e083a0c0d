//! The daemon's side of a receiver: starts it, restarts it if it has ended, and asks it for connections.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blkyard_mq::LogLimit;
use blkyard_sys::{PollFd, PollFlags, send_fds, wait_until};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, shutdown, socketpair, sockopt,
};

use super::lines::{MESSAGE_BYTES_MAX, ReceiverLine, log_all};
use super::reply::{REPLY_BYTES, Reply};
use super::table::{raise, spawn};
use super::{COMMAND_BYTES_MAX, Kind};

/// How long the receiver may take to answer: a thread's start. One that takes longer hangs, and another is started.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// How long it may take to start: a process, on a busy machine.
const START_TIME: Duration = Duration::from_secs(30);
/// Time from one start of a receiver to the next, at least.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// Lines on restarts: as many at once, and then one in this time.
const RESTART_LINES: (u32, Duration) = (5, Duration::from_mins(1));
const RESTARTED: &str = "the receiver of descriptors had ended, and was started again; its front-ends were lost";

/// A connection that was taken.
#[derive(Debug)]
pub struct AcceptedConnection {
    /// Our end of the channel to the peer. Its content can be used and closed without waiting for the peer.
    pub stream: UnixStream,
    /// The user at the other end.
    pub uid: u32,
    /// The process there, as it connected; 0 if that cannot be known.
    pub pid: i32,
}

/// A receiver. After it is dropped, it continues until its sessions have ended.
pub struct Receiver {
    start: Box<dyn Fn() -> io::Result<(OwnedFd, Option<Child>)> + Send + Sync>,
    state: Mutex<ReceiverState>,
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiver").finish_non_exhaustive()
    }
}

struct ReceiverState {
    /// Channel for commands; `None` once it was found closed or without an answer.
    command: Option<CommandSocket>,
    /// How many were started.
    started: u64,
    /// Time of the last attempt to start one.
    started_at: Instant,
    restart_lines: LogLimit,
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
            // Should it end by an error, that is found when the next command is sent.
            let begin = |files: Vec<OwnedFd>| drop(files.first().map(super::run));
            spawn("receiver", vec![raise(&far)?], begin).map_err(|(error, _)| error)?;
            Ok((near, None))
        }))
    }

    fn start(start: Box<dyn Fn() -> io::Result<(OwnedFd, Option<Child>)> + Send + Sync>) -> io::Result<Receiver> {
        let (command, child) = begin(&*start)?;
        let children = child.into_iter().collect();
        let restart_lines = LogLimit::new(RESTART_LINES.0, RESTART_LINES.1);
        let state =
            ReceiverState { command: Some(command), started: 1, started_at: Instant::now(), restart_lines, children };
        Ok(Receiver { start, state: Mutex::new(state) })
    }

    /// Registers a listening socket, which is to be closed by [`Receiver::close`].
    ///
    /// # Errors
    /// There is no receiver, and none can be started.
    pub fn listen(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<()> {
        self.send(Kind::Keep, path, &[listener]).map(drop)
    }

    /// Accepts the next connection of a non-blocking socket; `None` if none waits.
    ///
    /// # Errors
    /// The system gives no descriptor, or the receiver does not answer.
    pub fn accept(&self, path: &Path, listener: BorrowedFd<'_>) -> io::Result<Option<AcceptedConnection>> {
        self.ask(Kind::Accept, path, &[listener], "front-ends")
    }

    /// Connects to the socket of a back-end, without waiting; `None` if its backlog is full. A shutdown of either half
    /// passes through.
    ///
    /// # Errors
    /// No process listens there, the system gives no descriptor, or the receiver does not answer.
    pub fn connect(&self, path: &Path) -> io::Result<Option<AcceptedConnection>> {
        self.ask(Kind::Connect, path, &[], "back-ends")
    }

    /// Asks for a session, with a connection of `peers`.
    fn ask(
        &self,
        kind: Kind,
        path: &Path,
        listener: &[BorrowedFd<'_>],
        peers: &str,
    ) -> io::Result<Option<AcceptedConnection>> {
        let (mut stream, far) = UnixStream::pair()?;
        let which = self.send(kind, path, &[listener, &[far.as_fd()]].concat())?;
        drop(far);
        stream.set_read_timeout(Some(ANSWER_TIME))?;
        let mut reply = [0; REPLY_BYTES];
        if let Err(error) = stream.read_exact(&mut reply) {
            // One that has ended is found when the next command is sent: here it may be the session alone.
            let cause = if error.kind() == io::ErrorKind::UnexpectedEof {
                "has dropped a connection"
            } else {
                self.give_up(which);
                "does not answer"
            };
            return Err(io::Error::other(format!("the receiver of descriptors {cause}")));
        }
        stream.set_read_timeout(None)?;
        match Reply::from_bytes(reply) {
            Reply::Taken { uid, pid } => Ok(Some(AcceptedConnection { stream, uid, pid })),
            Reply::None => Ok(None),
            Reply::Busy => Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!(
                    "earlier {peers} have left too many descriptors that do not close; end whoever should answer them"
                ),
            )),
            Reply::System(error) => Err(error.into()),
        }
    }

    /// Closes a socket whose backlog may hold any descriptor. Without a receiver it stays open.
    pub fn close(&self, path: &Path, listener: OwnedFd) {
        // First the receiver has one, so that ours is not the last.
        if let Err(error) = self.send(Kind::Keep, path, &[listener.as_fd()]) {
            tracing::error!("{}: the socket stays open: {error}", path.display());
            std::mem::forget(listener);
            return;
        }
        drop(listener);
        // Without a receiver there is no entry to remove.
        let _ = self.send(Kind::Forget, path, &[]);
    }

    fn state(&self) -> MutexGuard<'_, ReceiverState> {
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
        if state.command.is_none() {
            self.restart(&mut state)?;
        }
        if state.with_command(|command| send(command, &bytes, files))? {
            return Ok(state.started);
        }
        // It has ended, or has not read for a long time. Another is started, once.
        self.restart(&mut state)?;
        if state.with_command(|command| send(command, &bytes, files))? {
            return Ok(state.started);
        }
        Err(ended())
    }

    /// Starts another receiver, unless the last one was started just now.
    fn restart(&self, state: &mut ReceiverState) -> io::Result<()> {
        state.children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        let now = Instant::now();
        if now.duration_since(state.started_at) < RESTART_PAUSE {
            return Err(ended());
        }
        // An attempt that fails is followed by the pause, too.
        state.started_at = now;
        let (command, child) = begin(&*self.start)?;
        match state.restart_lines.pass(now) {
            Some(0) => tracing::warn!("{RESTARTED}"),
            Some(count) => tracing::warn!("{RESTARTED} ({count} lines before this were left out)"),
            None => {}
        }
        state.children.extend(child);
        state.command = Some(command);
        state.started += 1;
        Ok(())
    }

    /// The receiver of this number answers no more.
    fn give_up(&self, which: u64) {
        let mut state = self.state();
        if state.started == which {
            state.command = None;
        }
    }
}

impl ReceiverState {
    /// Sends a command: false if the receiver has ended or hangs. Only then is its socket given up, which ends one that
    /// hangs: it stays after any other error, since the receiver and its listening sockets are as they were.
    fn with_command(&mut self, send: impl FnOnce(&OwnedFd) -> Result<(), Errno>) -> io::Result<bool> {
        let Some(command) = &self.command else { return Ok(false) };
        match send(&command.0) {
            Ok(()) => Ok(true),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::AGAIN) => {
                self.command = None;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Our end of the socket for commands, which the thread that logs has as well. Dropped, both ends see the end.
struct CommandSocket(Arc<OwnedFd>);

impl CommandSocket {
    /// Waits until the receiver obeys.
    fn wait_ready(&self) -> io::Result<()> {
        let failed = |why: &str| Err(io::Error::other(format!("the receiver of descriptors cannot start: {why}")));
        let (mut fds, begin) = ([PollFd::new(&*self.0, PollFlags::IN)], Instant::now());
        let (mut now, deadline) = (begin, begin + START_TIME);
        while wait_until(&mut fds, now, Some(deadline))? == 0 && now < deadline {
            now = Instant::now();
        }
        if fds[0].revents().is_empty() {
            return failed(&format!("it is not ready after {} s; see whether the machine hangs", START_TIME.as_secs()));
        }
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let (_, count) = recv(&*self.0, &mut bytes[..], RecvFlags::DONTWAIT)?;
        match ReceiverLine::from_bytes(&bytes[..count.min(bytes.len())]) {
            Some(ReceiverLine::Ready) => Ok(()),
            Some(ReceiverLine::Failed(why)) => failed(&why),
            _ => failed("its process ended at once; see that this program can be run again"),
        }
    }
}

impl Drop for CommandSocket {
    fn drop(&mut self) {
        let _ = shutdown(&*self.0, Shutdown::Both);
    }
}

/// Starts a receiver that is ready, and a thread that logs its lines.
fn begin(start: &dyn Fn() -> io::Result<(OwnedFd, Option<Child>)>) -> io::Result<(CommandSocket, Option<Child>)> {
    let (near, mut child) = start()?;
    let command = CommandSocket(Arc::new(near));
    let log = Arc::clone(&command.0);
    let thread = || std::thread::Builder::new().name("receiver log".into()).spawn(move || log_all(&log));
    if let Err(error) = command.wait_ready().and_then(|()| thread()) {
        if let Some(child) = &mut child {
            let _ = child.kill();
            let _ = child.wait();
        }
        return Err(error);
    }
    Ok((command, child))
}

/// Sends the bytes of a command, and descriptors.
fn send(command: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    assert!(files.len() <= 2, "two descriptors at most");
    send_fds(command, bytes, files, SendFlags::empty()).map(drop)
}

fn ended() -> io::Error {
    io::Error::new(
        io::ErrorKind::BrokenPipe,
        format!("the receiver of descriptors has ended, and is started again after {} s", RESTART_PAUSE.as_secs()),
    )
}

/// The two ends for commands.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (near, far) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&near, sockopt::Timeout::Send, Some(ANSWER_TIME))?;
    Ok((near, far))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// How many receivers were started.
    pub(in super::super) fn started(receiver: &Receiver) -> u64 {
        receiver.state().started
    }

    /// Makes the receiver appear ended to this side.
    pub(in super::super) fn end(receiver: &Receiver) {
        let command = pair().unwrap().0;
        receiver.state().command = Some(CommandSocket(Arc::new(command)));
    }

    /// Sends bytes with descriptors.
    pub(in super::super) fn send(to: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) {
        super::send(to, bytes, files).unwrap();
    }

    /// Makes the pause be over.
    pub(in super::super) fn let_pause_end(receiver: &Receiver) {
        let mut state = receiver.state();
        state.started_at = state.started_at.checked_sub(RESTART_PAUSE).unwrap();
    }
}
