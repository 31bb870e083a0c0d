//! The other end of a control socket: finds the daemon, asks, and waits for the answer, for a bounded time.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde_json::Value;

use super::place;
use super::wire::{ANSWER_BYTES_MAX, ControlRequest, parse_answer, request_line};

/// Default time limit of `inspect` for an answer: lanes have 2 s for theirs.
pub const INSPECT_TIMEOUT_S: u64 = 10;
/// How long `set` does: longer than most changes take, and others before us.
pub const SET_TIMEOUT_S: u64 = 120;
/// Upper bound of the time limits of both.
pub const TIMEOUT_S_MAX: u64 = 86_400;
/// Interval of attempts to connect to a full backlog.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No daemon is running where one would be found.
    #[error("no running daemon found; start one with blkyard serve, or name its socket with --control PATH ({})", looked(.0))]
    Nobody(Vec<PathBuf>),
    /// There are several to choose from.
    #[error("several daemons are running; choose one with --control PATH:\n{}", list(.0))]
    Several(Vec<PathBuf>),
    /// No listener.
    #[error("control socket {}: {cause}; check that the daemon runs, and was started with this --control", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The daemon did not answer.
    #[error("control socket {}: no answer {cause}; wait longer with --timeout-s, or check whether the daemon hangs or is ending", path.display())]
    Silent {
        /// The socket.
        path: PathBuf,
        /// Time limit, or the system's error.
        cause: String,
    },
    /// The daemon said no.
    #[error("{0}")]
    Refused(String),
}

fn looked(places: &[PathBuf]) -> String {
    format!("looked in {}", places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", "))
}

fn list(sockets: &[PathBuf]) -> String {
    sockets.iter().map(|socket| format!("  {}", socket.display())).collect::<Vec<_>>().join("\n")
}

/// Asks the daemon at a socket, or the only one that runs. Waits for no longer than this.
///
/// # Errors
/// See [`AskError`].
pub fn ask(socket: Option<&Path>, request: &ControlRequest, within: Duration) -> Result<Value, AskError> {
    let deadline = Instant::now() + within;
    let found;
    let path = if let Some(path) = socket {
        path
    } else {
        found = the_only_one()?;
        &found
    };
    let silent = |error: &io::Error| {
        let cause = match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => format!("within {within:?}"),
            _ => format!("({error})"),
        };
        AskError::Silent { path: path.into(), cause }
    };
    loop {
        let stream = connect(path, deadline).map_err(|cause| match cause.kind() {
            io::ErrorKind::TimedOut => silent(&cause),
            _ => AskError::Connect { path: path.into(), cause },
        })?;
        match exchange(&stream, request_line(request).as_bytes(), deadline) {
            Ok(line) => return parse_answer(&line).map_err(AskError::Refused),
            // Replaced before its request was read. Repeating `inspect` is harmless.
            Err(error) if was_let_go(&error) && *request == ControlRequest::Inspect && Instant::now() < deadline => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            Err(error) => return Err(silent(&error)),
        }
    }
}

fn was_let_go(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// Sends a request and reads the line that answers it.
fn exchange(mut stream: &UnixStream, request: &[u8], deadline: Instant) -> io::Result<Vec<u8>> {
    stream.set_write_timeout(Some(left(deadline)?))?;
    stream.write_all(request)?;
    let (mut line, mut piece) = (Vec::new(), vec![0; 1 << 16]);
    while line.last() != Some(&b'\n') && line.len() < ANSWER_BYTES_MAX {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut piece) {
            Ok(0) if line.is_empty() => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(0) => break,
            Ok(read) => line.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(line)
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Connects. A listener with a full backlog is tried again until the deadline, at least once.
///
/// # Errors
/// There is no listener, or it accepts no connection in time.
pub fn connect(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    while let Err(error) = rustix::net::connect(&socket, &address) {
        match error {
            Errno::INTR => {}
            Errno::AGAIN if Instant::now() < deadline => std::thread::sleep(RETRY_INTERVAL),
            Errno::AGAIN => return Err(io::ErrorKind::TimedOut.into()),
            error => return Err(error.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Whether a socket has a listener, also one with a full backlog.
pub fn is_listened_at(path: &Path) -> bool {
    connect(path, Instant::now()).map_or_else(|error| error.kind() == io::ErrorKind::TimedOut, |_| true)
}

fn the_only_one() -> Result<PathBuf, AskError> {
    let mut daemons = place::daemons();
    match daemons.len() {
        0 => Err(AskError::Nobody(place::folders())),
        1 => Ok(daemons.remove(0)),
        _ => Err(AskError::Several(daemons)),
    }
}
