//! TLS 1.3 with pre-shared keys, over bytes that others move.
//!
//! A [`TlsChannel`] is one end of a connection without its socket: its owner brings the bytes that have come, takes
//! those that are to be sent, and reads and writes what they mean.
//!
//! ```text
//!   socket ── put ──▶ TlsChannel ── read ───▶ owner
//!   socket ◀─ outgoing, sent ──── ◀── write ── owner
//! ```
//!
//! The protocol is that of OpenSSL, with feature `openssl`; without it, making a channel is an error. Certificates,
//! earlier versions, resumption and early data are switched off: who has no key gets no further than the handshake.
//!
//! Here is no clock: the owner bounds the time of a handshake. It also bounds what it puts in, and what it writes
//! before it takes what is outgoing.
#![forbid(unsafe_code)]

#[cfg(not(feature = "openssl"))]
mod absent;
#[cfg(feature = "openssl")]
mod openssl;

#[cfg(not(feature = "openssl"))]
pub use absent::NoChannel as TlsChannel;
#[cfg(feature = "openssl")]
pub use openssl::TlsChannel;

/// Bytes that the clear text of a record has at most, and what its ciphertext has beyond them (RFC 8446, 5.2).
pub const RECORD_BYTES: usize = (16 << 10) + 5 + 256;

/// First byte of a client's first record (content type `handshake`, RFC 8446, 5.1).
pub const HANDSHAKE: u8 = 22;

/// Why a channel cannot be made, or is broken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// The program was built without TLS.
    #[error("this program was built without TLS; build it with --features tls, which needs OpenSSL and its headers")]
    Absent,
    /// The other end has no key that this end knows.
    #[error("no key for {0:?}")]
    UnknownIdentity(String),
    /// The other end breaks the protocol, or has another key.
    #[error("{0}")]
    Protocol(String),
    /// The other end has ended the channel in order.
    #[error("the other end has closed it")]
    Ended,
}
