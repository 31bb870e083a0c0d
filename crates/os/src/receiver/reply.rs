//! The receiver's answer to a request for a connection: the first bytes on its channel.
//!
//! A separate kind says that no connection waits. It differs from an error of the system: when threads are short, for
//! example, there is no connection either, and the daemon must not wait then as for one that has not arrived.

use rustix::io::Errno;

/// Bytes of an answer: three words in the order of this machine.
pub(super) const REPLY_BYTES: usize = 12;

/// How taking a connection went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// The user and process at the other end; the process is 0 if it cannot be seen from here.
    Taken { uid: u32, pid: i32 },
    /// No connection waits.
    None,
    /// Too many sessions of this socket have ended and are not gone.
    Busy,
    /// The system refused it.
    System(Errno),
}

impl Reply {
    pub(super) fn to_bytes(self) -> [u8; REPLY_BYTES] {
        let words = match self {
            Reply::Taken { uid, pid } => [0, uid, pid.cast_unsigned()],
            Reply::None => [1, 0, 0],
            Reply::Busy => [2, 0, 0],
            Reply::System(error) => [3, error.raw_os_error().cast_unsigned(), 0],
        };
        let mut bytes = [0; REPLY_BYTES];
        bytes.chunks_exact_mut(4).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
        bytes
    }

    pub(super) fn from_bytes(bytes: [u8; REPLY_BYTES]) -> Reply {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        match word(0) {
            0 => Reply::Taken { uid: word(4), pid: word(8).cast_signed() },
            1 => Reply::None,
            2 => Reply::Busy,
            _ => Reply::System(Errno::from_raw_os_error(word(4).cast_signed())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_come_back_as_they_were() {
        let taken = Reply::Taken { uid: u32::MAX, pid: -1 };
        for reply in [taken, Reply::None, Reply::Busy, Reply::System(Errno::AGAIN), Reply::System(Errno::MFILE)] {
            assert_eq!(Reply::from_bytes(reply.to_bytes()), reply);
        }
    }
}
