//! The channel on which we speak to a front-end unasked: it is told that the configuration of its disk has changed.
//!
//! The front-end sends one end of a socket with a message. The message layer takes that end and has no words for what we
//! want to say, so we look at the message before the layer does and keep a copy of the end.
//!
//! No answer is asked for: the front-end reads the configuration over the other connection while it has ours in hand, and two that
//! wait for each other wait for ever.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use vhost::vhost_user::message::{BackendReq, FrontendReq};

/// A header: request, flags, bytes of the body; each 32 bits in the order of this machine.
const HEADER_BYTES: usize = 12;
/// The version of the protocol, in the flags of every message.
const VERSION: u32 = 1;

/// Our end of the channel.
#[derive(Debug)]
pub(crate) struct Channel(OwnedFd);

impl Channel {
    /// The channel that the next message brings, if that is what it is for. The message stays where it is.
    pub(crate) fn of_next_message(connection: &UnixStream) -> Option<Channel> {
        let mut header = [0; HEADER_BYTES];
        // First without descriptors, which other messages have, too.
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let (length, _) = rustix::net::recv(connection, &mut header, flags).ok()?;
        if length < HEADER_BYTES || header[..4] != u32::from(FrontendReq::SET_BACKEND_REQ_FD).to_ne_bytes() {
            return None;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut descriptors = RecvAncillaryBuffer::new(&mut space);
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        recvmsg(connection, &mut [IoSliceMut::new(&mut header)], &mut descriptors, flags).ok()?;
        descriptors.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next().map(Channel),
            _ => None,
        })
    }

    /// Says that the configuration has changed. A front-end that has not read what it was told before loses nothing if this
    /// does not fit: it will read the configuration as it is then.
    ///
    /// # Errors
    /// The other end is gone, or was none.
    pub(crate) fn config_changed(&self) -> io::Result<()> {
        let words = [u32::from(BackendReq::CONFIG_CHANGE_MSG), VERSION, 0];
        let message: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        match send(self.0.as_fd(), &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            // Twelve bytes go into a stream whole or not at all.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{IoSlice, Read, Write};

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};

    fn say(to: &UnixStream, request: u32, descriptor: Option<&UnixStream>) {
        let message: Vec<u8> = [request, VERSION, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut descriptors = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = descriptor.iter().map(|end| end.as_fd()).collect();
        if !fds.is_empty() {
            assert!(descriptors.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        sendmsg(to, &[IoSlice::new(&message)], &mut descriptors, SendFlags::empty()).unwrap();
    }

    #[test]
    fn the_channel_is_copied_from_its_message_which_stays() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (end, mut far_end) = UnixStream::pair().unwrap();
        assert!(Channel::of_next_message(&ours).is_none(), "nothing was said");
        say(&theirs, 12, Some(&end));
        assert!(Channel::of_next_message(&ours).is_none(), "another message's descriptor is left alone");
        (&ours).read_exact(&mut [0; HEADER_BYTES]).unwrap();
        (&theirs).write_all(&21_u32.to_ne_bytes()).unwrap();
        assert!(Channel::of_next_message(&ours).is_none(), "less than a header");
        (&ours).read_exact(&mut [0; 4]).unwrap();
        say(&theirs, 21, None);
        assert!(Channel::of_next_message(&ours).is_none(), "it brought none");
        (&ours).read_exact(&mut [0; HEADER_BYTES]).unwrap();

        say(&theirs, 21, Some(&end));
        let channel = Channel::of_next_message(&ours).unwrap();
        let mut header = [0; HEADER_BYTES];
        (&ours).read_exact(&mut header).unwrap();
        assert_eq!(header[..4], 21_u32.to_ne_bytes());
        drop(end);
        channel.config_changed().unwrap();
        far_end.read_exact(&mut header).unwrap();
        let words: Vec<_> = header.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, [2, 1, 0]);
        drop(far_end);
        assert!(channel.config_changed().is_err());
    }

    #[test]
    fn a_front_end_that_never_reads_does_not_hold_us_up() {
        let (end, _far_end) = UnixStream::pair().unwrap();
        let channel = Channel(end.into());
        (0..100_000).for_each(|_| channel.config_changed().unwrap());
    }
}
