//! The other end of a control socket: finds the daemon, asks, and waits for the answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::place;
use super::wire::{ANSWER_BYTES_MAX, Wish, parse_answer, request_line};

/// How long to wait for an answer: longer than any change may take, and others before us.
const ANSWER_TIME: Duration = Duration::from_mins(2);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No daemon is running where one would be found.
    #[error("no running daemon found; start one with blkyard serve, or name its socket with --control PATH ({})", looked(.0))]
    Nobody(Vec<PathBuf>),
    /// There are several to choose from.
    #[error("several daemons are running; choose one with --control PATH:\n{}", list(.0))]
    Several(Vec<PathBuf>),
    /// Nobody listens there.
    #[error("control socket {}: {cause}; see that the daemon runs, and was started with this --control", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The daemon did not answer.
    #[error("control socket {}: no answer: {cause}; see whether the daemon is busy or ending", path.display())]
    Silent {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
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

/// Asks the daemon at a socket, or the only one that runs.
///
/// # Errors
/// See [`AskError`].
pub fn ask(socket: Option<&Path>, wish: &Wish) -> Result<Value, AskError> {
    let found;
    let path = if let Some(path) = socket {
        path
    } else {
        found = the_only_one()?;
        &found
    };
    let stream = UnixStream::connect(path).map_err(|cause| AskError::Connect { path: path.into(), cause })?;
    let silent = |cause| AskError::Silent { path: path.into(), cause };
    stream.set_read_timeout(Some(ANSWER_TIME)).map_err(silent)?;
    stream.set_write_timeout(Some(ANSWER_TIME)).map_err(silent)?;
    (&stream).write_all(request_line(wish).as_bytes()).map_err(silent)?;
    let mut line = Vec::new();
    BufReader::new(stream.take(ANSWER_BYTES_MAX as u64)).read_until(b'\n', &mut line).map_err(silent)?;
    if line.is_empty() {
        return Err(silent(std::io::ErrorKind::UnexpectedEof.into()));
    }
    parse_answer(&line).map_err(AskError::Refused)
}

fn the_only_one() -> Result<PathBuf, AskError> {
    let mut daemons = place::daemons();
    match daemons.len() {
        0 => Err(AskError::Nobody(place::folders())),
        1 => Ok(daemons.remove(0)),
        _ => Err(AskError::Several(daemons)),
    }
}
