//! Secrets of hosts and controllers, as text: `DHHC-1:hh:BASE64:`.
//!
//! `hh` is the hash by which a secret is made one of its owner's name before use, zero for none. The base64 has the key
//! of 32, 48 or 64 bytes and its CRC-32. Secrets are never printed but by [`DhchapSecret::reveal`].
//!
//! Source: NVM Express Base Specification 2.1, 8.3.5.5.7.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::{CrcAlgorithm, checksum};

use super::{AuthHash, AuthSeed};
use crate::fabrics::Nqn;

const PREFIX: &str = "DHHC-1:";
const CRC_BYTES: usize = 4;

/// Why a text is no secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// No `DHHC-1:hh:` at its start, or no colon at its end.
    #[error("it does not have the form DHHC-1:hh:BASE64:")]
    Form,
    /// The hash is unknown.
    #[error("its hash is none of 00, 01, 02, 03")]
    Hash,
    /// The text is no base64.
    #[error("it is not base64 between the colons")]
    Base64,
    /// The key has another length.
    #[error("its key has {0} bytes; keys have 32, 48 or 64")]
    Length(usize),
    /// The checksum does not match.
    #[error("its checksum is wrong: a character was changed or lost")]
    Checksum,
}

/// The secret of a host or a controller.
#[derive(Clone, PartialEq, Eq)]
pub struct DhchapSecret {
    hash: Option<AuthHash>,
    key: Vec<u8>,
}

impl fmt::Debug for DhchapSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DhchapSecret")
    }
}

impl DhchapSecret {
    /// A secret with a random key of 32, 48 or 64 bytes.
    ///
    /// # Errors
    /// The key has another length.
    pub fn new(key: Vec<u8>, hash: Option<AuthHash>) -> Result<DhchapSecret, SecretError> {
        if [32, 48, 64].contains(&key.len()) {
            Ok(DhchapSecret { hash, key })
        } else {
            Err(SecretError::Length(key.len()))
        }
    }

    /// Parses a text, of which white space around it is no part.
    ///
    /// # Errors
    /// See [`SecretError`].
    pub fn parse(text: &str) -> Result<DhchapSecret, SecretError> {
        let rest = text.trim().strip_prefix(PREFIX).ok_or(SecretError::Form)?;
        let (hash, rest) = rest.split_once(':').ok_or(SecretError::Form)?;
        let key = rest.strip_suffix(':').ok_or(SecretError::Form)?;
        let hash = match hash {
            "00" => None,
            "01" => Some(AuthHash::Sha256),
            "02" => Some(AuthHash::Sha384),
            "03" => Some(AuthHash::Sha512),
            _ => return Err(SecretError::Hash),
        };
        let mut key = STANDARD.decode(key).map_err(|_| SecretError::Base64)?;
        let bytes = key.len().saturating_sub(CRC_BYTES);
        let crc = key.split_off(bytes);
        let secret = DhchapSecret::new(key, hash)?;
        if crc == secret.crc() { Ok(secret) } else { Err(SecretError::Checksum) }
    }

    /// The text, which is as secret as the key.
    pub fn reveal(&self) -> String {
        let key = STANDARD.encode([&self.key[..], &self.crc()].concat());
        format!("{PREFIX}{:02}:{key}:", self.hash.map_or(0, AuthHash::id))
    }

    /// The key for responses of the host or subsystem with this name.
    pub(super) fn transformed(&self, owner: &Nqn) -> Vec<u8> {
        match self.hash {
            None => self.key.clone(),
            Some(hash) => hash.hmac(&self.key, &[owner.as_str().as_bytes(), b"NVMe-over-Fabrics"]),
        }
    }

    fn crc(&self) -> [u8; CRC_BYTES] {
        (checksum(CrcAlgorithm::Crc32IsoHdlc, &self.key) as u32).to_le_bytes()
    }
}

/// Secrets of one host and one subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthSecrets {
    /// The host's.
    pub host: DhchapSecret,
    /// The controller's; unset if it does not authenticate itself.
    pub controller: Option<DhchapSecret>,
}

/// Hosts that a subsystem authenticates.
#[derive(Clone, Debug)]
pub struct HostSecrets {
    /// By name of the host.
    pub hosts: HashMap<Nqn, Arc<AuthSecrets>>,
    /// Seed of the random numbers for that: no other subsystem or port has it.
    pub seed: AuthSeed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_has_a_text() {
        for (len, hash, prefix) in [
            (32, None, "DHHC-1:00:"),
            (32, Some(AuthHash::Sha256), "DHHC-1:01:"),
            (48, Some(AuthHash::Sha384), "DHHC-1:02:"),
            (64, Some(AuthHash::Sha512), "DHHC-1:03:"),
        ] {
            let secret = DhchapSecret::new((0..len).collect(), hash).unwrap();
            let text = secret.reveal();
            assert!(text.starts_with(prefix) && text.ends_with(':'), "{text}");
            assert_eq!(DhchapSecret::parse(&format!(" {text}\n")), Ok(secret));
        }
    }

    #[test]
    fn each_text_that_is_no_secret_is_told_why() {
        let text = DhchapSecret::new(vec![1; 32], None).unwrap().reveal();
        let short = format!("DHHC-1:00:{}:", STANDARD.encode([1; 24]));
        let changed = text.replacen("AQEB", "AQEC", 1);
        for (text, error) in [
            ("", SecretError::Form),
            ("secret", SecretError::Form),
            ("DHHC-1:00", SecretError::Form),
            (text.trim_end_matches(':'), SecretError::Form),
            (&text.replace(":00:", ":04:"), SecretError::Hash),
            ("DHHC-1:00:no base64:", SecretError::Base64),
            ("DHHC-1:00::", SecretError::Length(0)),
            (&short, SecretError::Length(20)),
            (&changed, SecretError::Checksum),
        ] {
            assert_eq!(DhchapSecret::parse(text), Err(error), "{text}");
        }
    }

    #[test]
    fn a_secret_is_not_printed() {
        let secret = DhchapSecret::new(vec![1; 32], None).unwrap();
        assert_eq!(format!("{secret:?}"), "DhchapSecret");
    }
}
