//! Messages of a receiver to its daemon on the command socket: that it is ready, or why not, and lines for the log.
//!
//! The daemon logs the lines, in its own format and with a limit for each socket, since a peer can cause any number.
//! The receiver itself writes no log.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkyard_mq::LogLimit;
use blkyard_sys::{PollFd, PollFlags, wait_for};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Lines about one socket at once, as the log of an export has them.
const BURST: u32 = 30;
/// Time to the next line after that.
const INTERVAL: Duration = Duration::from_secs(10);
/// Bytes of a message.
pub(super) const MESSAGE_BYTES_MAX: usize = 8192;

/// A message of the receiver; its first byte is its kind.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReceiverLine {
    /// It obeys commands.
    Ready,
    /// It cannot, and ends.
    Failed(String),
    /// For the log, about the socket with this path; of the receiver itself if that is empty.
    Line(PathBuf, String),
}

impl ReceiverLine {
    /// Sends it, unless there is no room: a log that is full of lines has room for no more.
    pub(super) fn send(&self, to: &OwnedFd) {
        let mut bytes = match self {
            ReceiverLine::Ready => vec![1],
            ReceiverLine::Failed(why) => [&[2], why.as_bytes()].concat(),
            ReceiverLine::Line(path, text) => [&[3], path.as_os_str().as_bytes(), &[0], text.as_bytes()].concat(),
        };
        bytes.truncate(MESSAGE_BYTES_MAX);
        let _ = send(to, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<ReceiverLine> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match bytes.split_first()? {
            (1, _) => Some(ReceiverLine::Ready),
            (2, why) => Some(ReceiverLine::Failed(text(why))),
            (3, line) => {
                let end = line.iter().position(|byte| *byte == 0)?;
                Some(ReceiverLine::Line(OsStr::from_bytes(&line[..end]).into(), text(&line[end + 1..])))
            }
            _ => None,
        }
    }
}

/// Says a line.
pub(super) fn say(to: &OwnedFd, path: &Path, text: impl Into<String>) {
    ReceiverLine::Line(path.into(), text.into()).send(to);
}

/// Logs incoming lines until the receiver or the daemon has left.
pub(super) fn log_all(from: &OwnedFd) {
    let mut lines = ReceiverLines::default();
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    loop {
        match wait_for(&mut [PollFd::new(from, PollFlags::IN)], lines.holds_back.then_some(INTERVAL)) {
            Ok(0) => lines.held_back(Instant::now()).iter().for_each(|line| tracing::warn!("{line}")),
            Ok(_) => match recv(from, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return,
                Ok((_, count)) => {
                    if let Some(ReceiverLine::Line(path, text)) =
                        ReceiverLine::from_bytes(&bytes[..count.min(bytes.len())])
                        && let Some(line) = lines.pass(&path, &text, Instant::now())
                    {
                        tracing::warn!("{line}");
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => return,
            },
            Err(_) => return,
        }
    }
}

/// Which lines are shown.
#[derive(Debug, Default)]
struct ReceiverLines {
    limits: HashMap<PathBuf, LogLimit>,
    /// Whether a line was dropped since the last check.
    holds_back: bool,
}

impl ReceiverLines {
    /// The line as it is logged; `None` if it is dropped.
    fn pass(&mut self, path: &Path, text: &str, now: Instant) -> Option<String> {
        let limit = self.limits.entry(path.into()).or_insert_with(|| LogLimit::new(BURST, INTERVAL));
        let Some(count) = limit.pass(now) else {
            self.holds_back = true;
            return None;
        };
        let mut line = format!("{}: {text}", subject(path));
        if count > 0 {
            let _ = write!(line, " ({count} lines before this were left out)");
        }
        Some(line)
    }

    /// Lines with the number of dropped ones.
    fn held_back(&mut self, now: Instant) -> Vec<String> {
        self.holds_back = false;
        let counts = self.limits.iter_mut().filter_map(|(path, limit)| Some((path, limit.pass_held_back(now)?)));
        counts.map(|(path, count)| format!("{}: {count} more lines were left out", subject(path))).collect()
    }
}

fn subject(path: &Path) -> String {
    match path.to_string_lossy() {
        path if path.is_empty() => "the receiver of descriptors".into(),
        path => path.into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_one_socket_are_limited_and_counted() {
        let (mut lines, begin) = (ReceiverLines::default(), Instant::now());
        let shown = (0..1000).filter_map(|_| lines.pass(Path::new("a"), "x", begin)).count();
        assert_eq!(shown, BURST as usize);
        assert_eq!(lines.pass(Path::new("b"), "y", begin).unwrap(), "b: y");
        assert!(lines.holds_back);
        assert_eq!(lines.held_back(begin + INTERVAL), ["a: 970 more lines were left out"]);
        assert!(!lines.holds_back && lines.held_back(begin + 2 * INTERVAL).is_empty());
        let line = lines.pass(Path::new(""), "z", begin).unwrap();
        assert_eq!(line, "the receiver of descriptors: z");
    }
}
