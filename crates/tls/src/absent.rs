//! A program without TLS: no channel exists.

use crate::TlsError;

/// One end of a connection, which cannot be made.
#[derive(Debug)]
pub enum NoChannel {}

impl NoChannel {
    /// Whether channels can be made.
    pub const IS_BUILT: bool = false;

    /// The end of a client.
    pub fn client(_identity: &str, _key: &[u8]) -> Result<NoChannel, TlsError> {
        Err(TlsError::Absent)
    }

    /// The end of a server.
    pub fn server(_key_of: impl Fn(&str) -> Option<Vec<u8>> + Send + Sync + 'static) -> Result<NoChannel, TlsError> {
        Err(TlsError::Absent)
    }

    /// Goes on with the handshake.
    pub fn shake_hands(&mut self) -> Result<bool, TlsError> {
        match *self {}
    }

    /// Whether the handshake is complete.
    pub fn is_open(&self) -> bool {
        match *self {}
    }

    /// The identity that the client has proven.
    pub fn identity(&self) -> Option<String> {
        match *self {}
    }

    /// Bytes that have come.
    pub fn put(&mut self, _ciphertext: &[u8]) {
        match *self {}
    }

    /// Reads.
    pub fn read(&mut self, _clear: &mut [u8]) -> Result<usize, TlsError> {
        match *self {}
    }

    /// Writes.
    pub fn write(&mut self, _clear: &[u8]) -> Result<(), TlsError> {
        match *self {}
    }

    /// Bytes to be sent.
    pub fn outgoing(&self) -> &[u8] {
        match *self {}
    }

    /// So many of them were sent.
    pub fn sent(&mut self, _bytes: usize) {
        match *self {}
    }

    /// Ends it.
    pub fn close(&mut self) {
        match *self {}
    }
}
