//! The listening socket of an export: its path and its permissions.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::acceptor::{Accepted, Acceptor, DirectAcceptor};

/// Pauses between attempts while a socket has a listener: a killed daemon's last duplicate may stay open for a moment.
/// Each attempt costs that listener a connection.
const ALIVE_WAITS: [Duration; 3] = [Duration::from_millis(50), Duration::from_millis(200), Duration::from_millis(800)];

/// Fewer descriptors arrived with a message than were sent, and than there was room for.
pub(crate) fn out_of_descriptors() -> io::Error {
    io::Error::other("a descriptor of a message could not be received; raise the limit on open files")
}

/// Listening address of an export.
#[derive(Clone, Debug, Default)]
pub struct SocketConfig {
    /// The path of the socket.
    pub path: PathBuf,
    /// Permission bits; default from the umask.
    pub mode: Option<u32>,
    /// Group id; default is the group of the process.
    pub group: Option<u32>,
}

/// Reason why a socket cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The socket has a listener.
    #[error("socket {}: a server or another export is listening on it; stop that one or choose another path", .0.display())]
    Alive(PathBuf),
    /// Another file has that name.
    #[error("socket {}: a file that is not a socket has that name; remove it or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// The path is too long.
    #[error("socket {}: the path has {} bytes, a socket's may have 107; choose a shorter one", .0.display(), .0.as_os_str().len())]
    TooLong(PathBuf),
    /// A system call failed.
    #[error("socket {}: {doing}: {source}; {cure}", path.display())]
    System {
        /// The path of the socket.
        path: PathBuf,
        /// Failed operation.
        doing: &'static str,
        /// Cure.
        cure: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A listening socket, removed at its end.
pub struct BoundSocket {
    /// Set until the socket is closed.
    listener: Option<UnixListener>,
    acceptor: Arc<dyn Acceptor>,
    path: PathBuf,
    /// Device and inode, so that only our own socket is removed.
    identity: (u64, u64),
    /// Whether the socket file is ours to remove.
    owned: AtomicBool,
}

impl BoundSocket {
    /// Listens at the path; replaces a socket without a listener.
    ///
    /// # Errors
    /// See [`SocketError`].
    pub fn bind(config: &SocketConfig) -> Result<BoundSocket, SocketError> {
        let path = config.path.clone();
        // sun_path holds 108 bytes including the terminating zero.
        if path.as_os_str().len() > 107 {
            return Err(SocketError::TooLong(path));
        }
        let failed = |doing, cure| {
            let path = path.clone();
            move |source: io::Error| {
                let is_full = [Errno::MFILE, Errno::NFILE].map(Some).contains(&Errno::from_io_error(&source));
                let cure = if is_full { "raise the limit on open files" } else { cure };
                SocketError::System { path, doing, cure, source }
            }
        };
        remove_stale(&path, &failed)?;
        let wants = config.mode.is_some() || config.group.is_some();
        let listener = listen_at(&path, wants)
            .map_err(|error| failed("cannot listen", "check that its folder exists and is writable")(error.into()))?;
        let metadata = std::fs::symlink_metadata(&path)
            .map_err(failed("cannot be examined", "check which other program changes it"))?;
        let bound = BoundSocket {
            listener: Some(listener),
            acceptor: Arc::new(DirectAcceptor),
            identity: (metadata.dev(), metadata.ino()),
            path: path.clone(),
            owned: AtomicBool::new(true),
        };
        if let Some(group) = config.group {
            std::os::unix::fs::chown(&path, None, Some(group))
                .map_err(failed("its group cannot be set", "name a group that this user belongs to"))?;
        }
        if wants {
            let mode = config.mode.unwrap_or_else(|| 0o777 & !umask());
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))
                .map_err(failed("its mode cannot be set", "check that this user owns it"))?;
        }
        Ok(bound)
    }

    /// Continues to listen on a socket of another process, which keeps its ownership until
    /// [`set_owned`](BoundSocket::set_owned).
    pub fn adopt(listener: OwnedFd, path: PathBuf, identity: (u64, u64)) -> BoundSocket {
        let (listener, acceptor) = (Some(listener.into()), Arc::new(DirectAcceptor));
        BoundSocket { listener, acceptor, path, identity, owned: AtomicBool::new(false) }
    }

    /// Has connections accepted, and the socket closed, by another process: for untrusted front-ends, which may send
    /// descriptors whose close blocks.
    ///
    /// # Errors
    /// The acceptor cannot serve the socket.
    pub fn accept_through(mut self, acceptor: Arc<dyn Acceptor>) -> io::Result<BoundSocket> {
        acceptor.listen(&self.path, self.listener().as_fd())?;
        self.acceptor = acceptor;
        Ok(self)
    }

    /// Accepts the next connection of a non-blocking socket; `None` if none is pending.
    ///
    /// # Errors
    /// It cannot be accepted.
    pub fn accept(&self) -> io::Result<Option<Accepted>> {
        let mut waiting = [PollFd::new(self.listener(), PollFlags::IN)];
        match poll(&mut waiting, Some(&Timespec::default()))? {
            0 => Ok(None),
            _ => self.acceptor.accept(&self.path, self.listener().as_fd()),
        }
    }

    /// Whether the socket file is removed at the end.
    pub fn set_owned(&self, owned: bool) {
        self.owned.store(owned, Ordering::Relaxed);
    }

    /// Device and inode of the socket.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the socket file if it is ours, as the drop does.
    pub fn remove(&self) {
        let owned = self.owned.swap(false, Ordering::Relaxed);
        if owned && std::fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// The listening socket.
    pub fn listener(&self) -> &UnixListener {
        let Some(listener) = &self.listener else { unreachable!("it is closed last") };
        listener
    }
}

impl AsFd for BoundSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener().as_fd()
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        self.remove();
        self.listener.take().into_iter().for_each(|listener| self.acceptor.close(&self.path, listener.into()));
    }
}

impl fmt::Debug for BoundSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundSocket").field("path", &self.path).field("owned", &self.owned).finish_non_exhaustive()
    }
}

/// Listens at a path. A `private` socket is accessible to its owner only from its creation, for any umask, and is
/// opened to others by its path later.
fn listen_at(path: &Path, private: bool) -> Result<UnixListener, Errno> {
    /// The system's maximum; the default of the standard library.
    const BACKLOG: i32 = -1;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if private {
        // The mode of the descriptor, less the umask, becomes that of the file. The umask belongs to the whole process
        // and must not change while other threads create files.
        rustix::fs::fchmod(&socket, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// The process's umask, read without changing it; if unreadable, 0o077.
fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let said = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    said.and_then(|umask| u32::from_str_radix(umask.trim(), 8).ok()).unwrap_or(0o077)
}

/// Makes room for a socket: a missing file is accepted, a socket without a listener is removed, any other file stays.
fn remove_stale<F>(path: &Path, failed: &impl Fn(&'static str, &'static str) -> F) -> Result<(), SocketError>
where
    F: FnOnce(io::Error) -> SocketError,
{
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("cannot be examined", "check that its folder can be read")(error)),
    };
    if !metadata.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.into()));
    }
    // A full backlog implies a listener.
    let is_alive = |knocked: &Result<(), Errno>| matches!(knocked, Ok(()) | Err(Errno::AGAIN));
    let mut knocked = knock(path);
    for wait in ALIVE_WAITS {
        if !is_alive(&knocked) {
            break;
        }
        std::thread::sleep(wait);
        knocked = knock(path);
    }
    match knocked {
        Ok(()) | Err(Errno::AGAIN) => Err(SocketError::Alive(path.into())),
        Err(Errno::CONNREFUSED) => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("is stale and cannot be removed", "remove it by hand")(error))
            }
            _ => Ok(()),
        },
        // Its server has ended meanwhile.
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(failed("cannot determine whether a server listens on it", "remove it by hand if none does")(
            error.into(),
        )),
    }
}

/// Connects and disconnects. Does not wait for a listener that accepts no connection.
fn knock(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::fs::{Mode, OFlags};

    use super::*;

    fn at(path: PathBuf) -> SocketConfig {
        SocketConfig { path, mode: Some(0o660), group: None }
    }

    #[test]
    fn a_socket_that_is_alive_is_left_alone_and_a_dead_one_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = BoundSocket::bind(&at(path.clone())).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert!(matches!(BoundSocket::bind(&at(path.clone())), Err(SocketError::Alive(_))));
        // Closed without being removed, as after a crash.
        let listener = first.listener().try_clone().unwrap();
        std::mem::forget(listener);
        drop(first);
        assert!(!path.exists(), "our own socket goes with us");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let again = BoundSocket::bind(&at(path.clone())).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        drop(again);
        assert!(path.exists(), "what is not ours stays");
        assert!(matches!(BoundSocket::bind(&at(path)), Err(SocketError::NotASocket(_))));
    }

    #[test]
    fn a_socket_whose_server_is_ending_is_had() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = BoundSocket::bind(&at(path.clone())).unwrap();
        // Between two looks at it, as that of a daemon that is restarted.
        let ending = std::thread::spawn(move || {
            std::thread::sleep(ALIVE_WAITS[0] / 2);
            drop(first);
        });
        let second = BoundSocket::bind(&at(path.clone()));
        ending.join().unwrap();
        assert!(second.is_ok() && path.exists(), "{second:?}");
    }

    #[test]
    fn a_socket_whose_listener_takes_nobody_is_alive_and_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        // Backlog of a socket for one front-end: the second connection waits, and the third would block.
        rustix::net::listen(&listener, 0).unwrap();
        let _waiting = UnixStream::connect(&path).unwrap();
        let (told, came) = std::sync::mpsc::channel();
        std::thread::spawn(move || told.send(BoundSocket::bind(&at(path)).map(drop)));
        let bound = came.recv_timeout(std::time::Duration::from_secs(30)).expect("it waits for the listener");
        assert!(matches!(bound, Err(SocketError::Alive(_))), "{bound:?}");
    }

    #[test]
    fn a_socket_is_never_more_open_than_it_is_to_be() {
        /// Enough repetitions to show the fault, also on one CPU.
        const BINDS: usize = 2000;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        // Only root can set a group of which it is no member.
        let own = std::fs::metadata(folder.path()).unwrap().gid();
        let group = if rustix::process::geteuid().is_root() { own + 12_345 } else { own };
        let over = AtomicBool::new(false);
        for (mode, group) in [(Some(0o660), Some(group)), (Some(0o600), None), (None, Some(group))] {
            let wanted = mode.unwrap_or(0o777 & !umask());
            over.store(false, Ordering::Relaxed);
            std::thread::scope(|scope| {
                let watch = scope.spawn(|| {
                    let mut seen = 0;
                    while !over.load(Ordering::Relaxed) {
                        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                        let Ok(socket) = rustix::fs::open(&path, flags, Mode::empty()) else { continue };
                        // One call may return a former group with a later mode, as it reads both without a lock.
                        let bits = rustix::fs::fstat(&socket).unwrap().st_mode & 0o777;
                        let now = rustix::fs::fstat(&socket).unwrap().st_gid;
                        let is_given = group.is_none_or(|group| now == group);
                        let most = if is_given { wanted | 0o600 } else { 0o600 };
                        if bits & !most != 0 {
                            return Err(format!("mode {bits:o} of group {now} exceeds {most:o}"));
                        }
                        seen += 1;
                    }
                    Ok(seen)
                });
                for _ in 0..BINDS {
                    drop(BoundSocket::bind(&SocketConfig { path: path.clone(), mode, group }).unwrap());
                }
                let last = BoundSocket::bind(&SocketConfig { path: path.clone(), mode, group }).unwrap();
                let metadata = std::fs::metadata(&path).unwrap();
                assert_eq!(metadata.permissions().mode() & 0o777, wanted);
                assert!(group.is_none_or(|group| metadata.gid() == group));
                over.store(true, Ordering::Relaxed);
                drop(last);
                assert_eq!(watch.join().unwrap().map(drop), Ok(()));
            });
        }
    }

    #[test]
    fn a_private_socket_is_its_owners_from_the_first_moment() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _listener = listen_at(&path, true).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600 & !umask());
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn paths_that_cannot_be_are_named() {
        let long = PathBuf::from("/tmp").join("x".repeat(120));
        assert!(matches!(BoundSocket::bind(&at(long)), Err(SocketError::TooLong(_))));
        let error = BoundSocket::bind(&at("/nonexistent/s".into())).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/s") && error.contains("folder exists"), "{error}");
    }
}
