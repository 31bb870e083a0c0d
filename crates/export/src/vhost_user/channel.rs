//! The back-end channel, on which a front-end is told that the configuration of its disk has changed.
//!
//! The front-end sends one end of a socket with a message. The message layer takes that end and cannot send our
//! messages, so we keep a copy of the end.
//!
//! No reply is requested: the front-end may read the configuration over the other connection while it handles our
//! message, so waiting for a reply could deadlock.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{SendFlags, send};
use vhost::vhost_user::message::{BackendReq, FrontendReq};

use crate::vhost_user::wire::{Message, VERSION};

/// Our end of the channel.
#[derive(Debug)]
pub(crate) struct BackendChannel(OwnedFd);

impl BackendChannel {
    /// The channel from a message of that kind; the message keeps its own descriptor.
    pub(crate) fn of(message: &Message) -> Option<BackendChannel> {
        let brings = message.request() == Some(FrontendReq::SET_BACKEND_REQ_FD.into());
        brings.then(|| message.files.first()?.try_clone().ok().map(BackendChannel)).flatten()
    }

    /// Duplicate of our end, for the next process.
    pub(crate) fn end(&self) -> &OwnedFd {
        &self.0
    }

    /// Reports a changed configuration. If an unread report fills the socket, this one is dropped: the front-end will
    /// read the latest configuration anyway.
    ///
    /// # Errors
    /// The other end is closed or invalid.
    pub(crate) fn config_changed(&self) -> io::Result<()> {
        let words = [u32::from(BackendReq::CONFIG_CHANGE_MSG), VERSION, 0];
        let message: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        match send(self.0.as_fd(), &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            // Twelve bytes enter a stream socket completely or not at all.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_channel_is_copied_from_its_message() {
        let (end, mut far_end) = UnixStream::pair().unwrap();
        let message = |request, ends: &[&UnixStream]| {
            Message::new(request, &[], ends.iter().map(|end| end.try_clone().unwrap().into()).collect())
        };
        assert!(
            BackendChannel::of(&message(FrontendReq::SET_VRING_KICK, &[&end])).is_none(),
            "another message's descriptor"
        );
        assert!(BackendChannel::of(&message(FrontendReq::SET_BACKEND_REQ_FD, &[])).is_none(), "it brought none");
        let channel = BackendChannel::of(&message(FrontendReq::SET_BACKEND_REQ_FD, &[&end])).unwrap();
        drop(end);
        channel.config_changed().unwrap();
        let mut header = [0; 12];
        far_end.read_exact(&mut header).unwrap();
        let words: Vec<_> = header.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, [2, 1, 0]);
        drop(far_end);
        assert!(channel.config_changed().is_err());
    }

    #[test]
    fn a_front_end_that_never_reads_does_not_hold_us_up() {
        let (end, _far_end) = UnixStream::pair().unwrap();
        let channel = BackendChannel(end.into());
        (0..100_000).for_each(|_| channel.config_changed().unwrap());
    }
}
