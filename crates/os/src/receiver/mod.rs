//! The receiver: accepts and makes connections for a daemon, and receives all descriptors from other processes.
//!
//! ```text
//!   peer ──── connection ────▶ session ──── channel ────▶ daemon
//!             any descriptor   (a thread,   eventfds, near files,
//!                              own table)   ends of our own sockets
//! ```
//!
//! Closing a descriptor can block: a file of a file system whose server is silent, a TCP socket that lingers. Closing a
//! socket that holds such an unread descriptor can block, too. So the daemon never has one. It sends its listening
//! socket and one end of a channel to the receiver, which accepts the next connection on a thread with a private
//! descriptor table, and passes on vetted descriptors only. The receiver is a process, so that one that hangs neither
//! keeps the daemon's files open nor the daemon from ending; for tests it can be a thread.
//!
//! A back-end whose disk the daemon uses is a peer as well: the session connects to its socket instead of accepting a
//! connection.
//!
//! It keeps a duplicate of each listening socket: a daemon that is killed then never closes the last one, whose backlog
//! may hold any descriptor. It lives as long as the daemon or any session, and knows no protocol.

mod client;
mod lines;
mod reply;
mod session;
mod stream;
mod table;
#[cfg(test)]
mod tests;
mod vet;

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use blkyard_sys::{PollFd, PollFlags, recv_fds, wait_for};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair, sockopt};
use rustix::thread::Pid;

pub use client::{AcceptedConnection, Receiver};
use lines::{MESSAGE_BYTES_MAX, ReceiverLine, say};
use reply::Reply;

/// Threads of sessions of one socket that have ended, but for a descriptor that does not let them go. With more no
/// connection is taken there.
const STUCK_MAX: usize = 16;
/// Bytes of a command: its kind, and the path of a socket.
const COMMAND_BYTES_MAX: usize = 4352;

/// Kind of a command, in its first byte. The path of a socket follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    /// Keep a duplicate of the listening socket that comes along.
    Keep = 1,
    /// The same, and take its next connection for the channel that comes along.
    Accept = 2,
    /// Close the duplicate.
    Forget = 3,
    /// Connect to the path, for the channel that comes along.
    Connect = 4,
}

/// Threads that have ended, and may not be gone.
#[derive(Debug, Default)]
struct EndedThreads(Mutex<HashSet<Pid>>);

impl EndedThreads {
    fn note(&self, threads: impl Iterator<Item = Pid>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(threads);
    }

    /// How many are not gone.
    fn stuck(&self) -> usize {
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|id| Path::new(&format!("/proc/self/task/{id}")).exists());
        threads.len()
    }
}

/// A listening socket of the daemon.
struct Listener {
    socket: OwnedFd,
    ended: Arc<EndedThreads>,
}

/// The main thread of a receiver.
struct Hub {
    listeners: HashMap<PathBuf, Listener>,
    /// Threads of sessions that connected to a path.
    connected: HashMap<PathBuf, Arc<EndedThreads>>,
    /// Log channel of the sessions; each has a duplicate while it runs.
    report: OwnedFd,
}

/// Runs the receiver on the socket that is standard input, until the daemon and all sessions have left. For the process
/// that [`Receiver::process`] starts.
///
/// # Errors
/// Standard input is not a receiver's socket, or the system gives no descriptor table.
pub fn receive_for_daemon() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: ignoring a signal runs no code of ours.
        if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    let command = table::raise(&io::stdin().as_fd().try_clone_to_owned()?)?;
    if sockopt::socket_type(&command) != Ok(SocketType::SEQPACKET) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is a part of blkyard serve, which starts it"));
    }
    if let Err(error) = table::isolate_with(&command) {
        ReceiverLine::Failed(error.to_string()).send(&command);
        return Err(error);
    }
    run(&command)
}

/// Executes a daemon's commands until it and all sessions have left, on a thread with a private table.
fn run(command: &OwnedFd) -> io::Result<()> {
    let (reports, report) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let mut hub = Some(Hub { listeners: HashMap::new(), connected: HashMap::new(), report });
    let mut line = vec![0; MESSAGE_BYTES_MAX];
    ReceiverLine::Ready.send(command);
    loop {
        let mut fds = vec![PollFd::new(&reports, PollFlags::IN)];
        if hub.is_some() {
            fds.push(PollFd::new(command, PollFlags::IN));
        }
        wait_for(&mut fds, None)?;
        let [reported, commanded] = [0, 1].map(|index| fds.get(index).is_some_and(|fd| !fd.revents().is_empty()));
        if reported {
            match recv(&reports, &mut line[..], RecvFlags::DONTWAIT) {
                // All writers have left.
                Ok((0, _)) => return Ok(()),
                Ok((_, bytes)) => {
                    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                    let _ = send(command, &line[..bytes.min(MESSAGE_BYTES_MAX)], flags);
                }
                Err(_) => {}
            }
        }
        if commanded
            && let Some(obeying) = &mut hub
            && !obeying.obey(command)
        {
            let Some(Hub { listeners, report, .. }) = hub.take() else { unreachable!("it has just obeyed") };
            drop(report);
            close(listeners.into_values().map(|listener| listener.socket).collect(), command);
        }
    }
}

impl Hub {
    /// Takes one command. False once the daemon has left.
    fn obey(&mut self, command: &OwnedFd) -> bool {
        let mut bytes = [0; COMMAND_BYTES_MAX];
        let got = match recv_fds(command, &mut bytes, 2, RecvFlags::DONTWAIT) {
            Ok(got) => got,
            Err(Errno::AGAIN) => return true,
            Err(_) => return false,
        };
        let mut files = got.fds.into_iter();
        let (socket, channel) = (files.next(), files.next());
        let Some((kind, path)) = bytes[..got.bytes].split_first() else { return false };
        if got.truncated {
            say(command, Path::new(""), "not all descriptors of a command can be had; raise the limit on open files");
        }
        let path = PathBuf::from(OsStr::from_bytes(path));
        match (*kind, socket, channel) {
            (kind, Some(socket), None) if kind == Kind::Keep as u8 => self.keep(path, socket),
            (kind, Some(socket), Some(channel)) if kind == Kind::Accept as u8 => {
                self.keep(path.clone(), socket);
                self.accept(path, channel);
            }
            (kind, Some(channel), None) if kind == Kind::Connect as u8 => self.connect(path, channel),
            (kind, None, None) if kind == Kind::Forget as u8 => {
                close(self.listeners.remove(&path).map(|listener| listener.socket).into_iter().collect(), command);
            }
            (_, socket, channel) => close(socket.into_iter().chain(channel).collect(), command),
        }
        true
    }

    /// Keeps a listening socket, unless it is known: then this is not the last duplicate.
    fn keep(&mut self, path: PathBuf, socket: OwnedFd) {
        let identity = |socket: &OwnedFd| fstat(socket).map(|stat| (stat.st_dev, stat.st_ino)).ok();
        if self.listeners.get(&path).is_some_and(|known| identity(&known.socket) == identity(&socket)) {
            return;
        }
        let before = self.listeners.insert(path, Listener { socket, ended: Arc::default() });
        close(before.map(|listener| listener.socket).into_iter().collect(), &self.report);
    }

    /// Starts a session that takes the next connection.
    fn accept(&self, path: PathBuf, channel: OwnedFd) {
        let Some(listener) = self.listeners.get(&path) else { return };
        self.start(Some(&listener.socket), channel, Arc::clone(&listener.ended), path);
    }

    /// Starts a session that connects to a path.
    fn connect(&mut self, path: PathBuf, channel: OwnedFd) {
        let ended = Arc::clone(self.connected.entry(path.clone()).or_default());
        self.start(None, channel, ended, path);
    }

    /// Starts a session with the next connection of a listening socket or, without one, to the path.
    fn start(&self, listener: Option<&OwnedFd>, channel: OwnedFd, ended: Arc<EndedThreads>, path: PathBuf) {
        if ended.stuck() >= STUCK_MAX {
            return session::refuse(&channel, Reply::Busy);
        }
        let mut files = vec![channel];
        for file in [Some(&self.report), listener].into_iter().flatten() {
            match rustix::io::fcntl_dupfd_cloexec(file, 0) {
                Ok(duplicate) => files.push(duplicate),
                Err(error) => return session::refuse(&files[0], Reply::System(error)),
            }
        }
        let begin = move |files: Vec<OwnedFd>| {
            let mut files = files.into_iter();
            if let (Some(channel), Some(report)) = (files.next(), files.next()) {
                session::run(files.next(), channel, session::Outside { report, ended, path });
            }
        };
        if let Err((error, files)) = table::spawn("session", files, begin) {
            session::refuse(&files[0], Reply::System(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)));
        }
    }
}

/// Closes sockets whose backlog may hold any descriptor, on a thread that ends with them.
fn close(sockets: Vec<OwnedFd>, log: &OwnedFd) {
    if sockets.is_empty() {
        return;
    }
    let leave_all = |sockets: Vec<OwnedFd>| sockets.into_iter().for_each(table::leave);
    if let Err((error, sockets)) = table::spawn("closing", sockets, leave_all) {
        say(log, Path::new(""), format!("a listening socket stays open: {error}"));
        sockets.into_iter().for_each(table::leave);
    }
}
