//! Transfer of descriptors and lines from one daemon to the other.
//!
//! Descriptors come first, some with each byte `#`; then the line that describes them, like every line of a control
//! socket. Nothing follows before the other side has answered.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blkyard_sys::{recv_fds, send_fds};
use rustix::net::{RecvFlags, SendFlags};

use super::handover::PassedFiles;

/// Descriptors sent with one byte: as many as the receiver, through which a control socket is reached, relays at once.
const AT_ONCE: usize = 32;
/// Descriptors of one daemon: each of 64 exports with as many queues and regions of memory as it may have takes 261.
const DESCRIPTORS_MAX: usize = 1 << 16;
/// Bytes of one call: less than a buffer of the system's, for each of which the call waits again.
const PIECE_BYTES: usize = 16 << 10;
/// Byte that carries descriptors. No line begins with it.
const MARK: u8 = b'#';

/// Sends descriptors, and the line that describes them.
///
/// # Errors
/// The other side is gone, or does not read all within this time.
pub(super) fn send(to: &UnixStream, files: &PassedFiles, line: &str, within: Duration) -> io::Result<()> {
    try_send(to, files, line, within).map_err(|error| in_words(error, within))
}

fn try_send(mut to: &UnixStream, files: &PassedFiles, line: &str, within: Duration) -> io::Result<()> {
    let limit = Limit::of(within);
    let fds: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
    for some in fds.chunks(AT_ONCE) {
        to.set_write_timeout(Some(limit.left()?))?;
        send_fds(to, &[MARK], some, SendFlags::empty())?;
    }
    let mut line = line.as_bytes();
    while !line.is_empty() {
        to.set_write_timeout(Some(limit.left()?))?;
        match to.write(&line[..line.len().min(PIECE_BYTES)]) {
            Ok(written) => line = &line[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Takes descriptors, and the line that follows them. Later lines that have arrived are dropped: the other side has
/// given up, and the first says why.
///
/// # Errors
/// The other side is gone, sends more than it may, or not all within this time.
pub(super) fn receive(
    from: &UnixStream,
    line_bytes_max: usize,
    within: Duration,
) -> io::Result<(PassedFiles, Vec<u8>)> {
    try_receive(from, line_bytes_max, within).map_err(|error| in_words(error, within))
}

fn try_receive(mut from: &UnixStream, line_bytes_max: usize, within: Duration) -> io::Result<(PassedFiles, Vec<u8>)> {
    let too_much = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    let limit = Limit::of(within);
    let mut files = PassedFiles::new();
    loop {
        let mut byte = [0];
        from.set_read_timeout(Some(limit.left()?))?;
        let received = recv_fds(from, &mut byte, AT_ONCE, RecvFlags::empty())?;
        files.extend(received.fds);
        if received.truncated {
            return Err(too_much("not all descriptors could be received; raise the limit on open files"));
        }
        if files.len() > DESCRIPTORS_MAX {
            return Err(too_much("more descriptors than a daemon can have"));
        }
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if byte[0] != MARK {
            let mut line = byte.to_vec();
            // The line is the last, so it may be read in large pieces.
            let mut piece = vec![0; 1 << 16];
            let mut end = None;
            while end.is_none() && byte[0] != b'\n' {
                from.set_read_timeout(Some(limit.left()?))?;
                match from.read(&mut piece) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(read) => {
                        let before = line.len();
                        line.extend_from_slice(&piece[..read]);
                        end = piece[..read].iter().position(|byte| *byte == b'\n').map(|place| before + place + 1);
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
                if line.len() > line_bytes_max {
                    return Err(too_much("the line is too long"));
                }
            }
            line.truncate(end.unwrap_or(line.len()));
            return Ok((files, line));
        }
    }
}

/// The error of an exchange that had this long. The system's word for the end of that time says nothing of it.
fn in_words(error: io::Error, within: Duration) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::new(io::ErrorKind::TimedOut, format!("not within {within:?}"))
        }
        _ => error,
    }
}

/// Deadline for a whole message, however slowly it arrives.
struct Limit(Instant);

impl Limit {
    fn of(within: Duration) -> Limit {
        Limit(Instant::now() + within)
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.0.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has the other end do something over and over until that is refused.
    fn until_refused(mut act: impl FnMut(&UnixStream) -> io::Result<usize> + Send + 'static) -> UnixStream {
        let (near, far) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            while act(&far).is_ok_and(|bytes| bytes > 0) {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        near
    }

    #[test]
    fn lines_after_the_first_are_dropped() {
        let (near, far) = UnixStream::pair().unwrap();
        send(&far, &PassedFiles::new(), "first\nsecond\n", Duration::from_secs(30)).unwrap();
        let (_, line) = receive(&near, 100, Duration::from_secs(30)).unwrap();
        assert_eq!(String::from_utf8_lossy(&line), "first\n");
    }

    #[test]
    fn a_silent_end_is_told_in_words() {
        let (near, _far) = UnixStream::pair().unwrap();
        let error = receive(&near, 100, Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.to_string(), "not within 20ms");
    }

    #[test]
    fn who_dribbles_has_no_more_time_than_others() {
        for byte in [MARK, b' '] {
            let near = until_refused(move |mut far| far.write(&[byte]));
            let begin = Instant::now();
            assert!(receive(&near, usize::MAX, Duration::from_millis(200)).is_err());
            assert!(begin.elapsed() < Duration::from_mins(1), "it was listened to for {:?}", begin.elapsed());
        }
    }

    #[test]
    fn who_reads_in_drops_has_no_more_time_than_others() {
        let near = until_refused(|mut far| far.read(&mut [0; 512]));
        let line = "x".repeat(64 << 20);
        assert!(send(&near, &PassedFiles::new(), &line, Duration::from_millis(200)).is_err());
    }
}
