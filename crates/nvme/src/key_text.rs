//! Keys as text: `PREFIX:hh:BASE64:`, with a hash that is used to bind the key to a name, and the key with its CRC-32.
//!
//! The form of the secrets of DH-HMAC-CHAP and of the keys of TLS. Source: NVM Express Base Specification 2.1,
//! 8.3.5.5.7; NVM Express TCP Transport Specification 1.1, 3.6.1.2.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::{CrcAlgorithm, checksum};

use crate::auth::AuthHash;

const CRC_BYTES: usize = 4;

/// Why a text is no secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// It does not begin with this and a hash, or has no colon at its end.
    #[error("it does not have the form {0}hh:BASE64:")]
    Form(&'static str),
    /// The hash is none of these.
    #[error("its hash is none of {0}")]
    Hash(&'static str),
    /// The text is no base64.
    #[error("it is not base64 between the colons")]
    Base64,
    /// The key has another length than these, bytes.
    #[error("its key has {0} bytes; keys have one of {1:?}")]
    Length(usize, &'static [usize]),
    /// The checksum does not match.
    #[error("its checksum is wrong: a character was changed or lost")]
    Checksum,
}

/// A key, and the hash by which it is bound to a name; none if it is used as it is.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct KeyText {
    pub(crate) hash: Option<AuthHash>,
    pub(crate) key: Vec<u8>,
}

/// What the texts of one kind of key have in common.
pub(crate) struct KeyTextForm {
    /// With its colon.
    pub(crate) prefix: &'static str,
    /// The hashes, for messages.
    pub(crate) hashes: &'static str,
    /// Lengths of keys, bytes.
    pub(crate) lengths: &'static [usize],
}

impl KeyTextForm {
    /// A key that has one of the lengths.
    pub(crate) fn check(&self, text: KeyText) -> Result<KeyText, SecretError> {
        let len = text.key.len();
        if self.lengths.contains(&len) { Ok(text) } else { Err(SecretError::Length(len, self.lengths)) }
    }

    /// Parses a text, of which white space around it is no part.
    pub(crate) fn parse(&self, text: &str) -> Result<KeyText, SecretError> {
        let parts = || text.trim().strip_prefix(self.prefix)?.strip_suffix(':')?.split_once(':');
        let (hash, key) = parts().ok_or(SecretError::Form(self.prefix))?;
        let wrong_hash = SecretError::Hash(self.hashes);
        let id = Some(hash).filter(|hash| hash.len() == 2 && self.hashes.contains(hash)).and_then(|id| id.parse().ok());
        let hash = match id.ok_or(wrong_hash)? {
            0 => None,
            id => Some(AuthHash::from_id(id).ok_or(wrong_hash)?),
        };
        let mut key = STANDARD.decode(key).map_err(|_| SecretError::Base64)?;
        let crc = key.split_off(key.len().saturating_sub(CRC_BYTES));
        let text = self.check(KeyText { hash, key })?;
        if crc == crc_of(&text.key) { Ok(text) } else { Err(SecretError::Checksum) }
    }

    /// The text, which is as secret as the key.
    pub(crate) fn reveal(&self, KeyText { hash, key }: &KeyText) -> String {
        let hash = hash.map_or(0, AuthHash::id);
        format!("{}{hash:02}:{}:", self.prefix, STANDARD.encode([&key[..], &crc_of(key)].concat()))
    }
}

fn crc_of(key: &[u8]) -> [u8; CRC_BYTES] {
    (checksum(CrcAlgorithm::Crc32IsoHdlc, key) as u32).to_le_bytes()
}
