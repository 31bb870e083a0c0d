//! The back-end channel, on which a back-end reports a changed configuration of its disk.
//!
//! Other messages are refused, and their descriptors are closed. This module never waits.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use super::message::{HEADER_BYTES, Header, NEED_REPLY, REPLY, message, read_now, words};

/// The configuration has changed.
const CONFIG_CHANGE: u32 = 2;

/// Our end.
#[derive(Debug)]
pub(crate) struct BackendChannelReader {
    stream: UnixStream,
    /// Received bytes of the next message.
    come: Vec<u8>,
}

impl BackendChannelReader {
    /// Our end, and the one for the back-end.
    pub(crate) fn pair() -> io::Result<(BackendChannelReader, UnixStream)> {
        let (stream, theirs) = UnixStream::pair()?;
        stream.set_nonblocking(true)?;
        Ok((BackendChannelReader { stream, come: Vec::new() }, theirs))
    }

    /// Reads available bytes. True if the configuration has changed.
    ///
    /// # Errors
    /// The back-end has closed its end, or sends an invalid message: the channel is over.
    pub(crate) fn read(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 512];
        let count = read_now(&self.stream, &mut bytes)?;
        self.come.extend_from_slice(&bytes[..count]);
        let mut changed = false;
        while let Some(head) = self.come.first_chunk::<HEADER_BYTES>() {
            let header = Header::parse(*head).ok_or(io::ErrorKind::InvalidData)?;
            let end = HEADER_BYTES + header.len;
            if self.come.len() < end {
                break;
            }
            self.come.drain(..end);
            let known = header.request == CONFIG_CHANGE;
            changed |= known;
            if header.flags & NEED_REPLY != 0 {
                // A back-end that does not read its replies gets none.
                let answer = message(header.request, REPLY, &words(&[u64::from(!known)]));
                let _ = (&self.stream).write(&answer);
            }
        }
        Ok(changed)
    }
}

impl AsFd for BackendChannelReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_change_is_heard_whole_and_answered_if_that_is_wanted() {
        let (mut channel, mut theirs) = BackendChannelReader::pair().unwrap();
        assert!(!channel.read().unwrap(), "nothing was said");
        let said = message(CONFIG_CHANGE, NEED_REPLY, &[]);
        theirs.write_all(&said[..5]).unwrap();
        assert!(!channel.read().unwrap());
        theirs.write_all(&said[5..]).unwrap();
        assert!(channel.read().unwrap() && !channel.read().unwrap());
        theirs.write_all(&message(4, NEED_REPLY, &[0; 20])).unwrap();
        assert!(!channel.read().unwrap());
        let mut answers = [0; 2 * (HEADER_BYTES + 8)];
        theirs.read_exact(&mut answers).unwrap();
        assert_eq!(answers, [message(2, REPLY, &words(&[0])), message(4, REPLY, &words(&[1]))].concat()[..]);
        theirs.write_all(&[0xff; HEADER_BYTES]).unwrap();
        assert!(channel.read().is_err());
        drop(theirs);
        assert!(channel.read().is_err());
    }
}
