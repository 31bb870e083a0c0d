//! Secrets of hosts and controllers, as text: `DHHC-1:hh:BASE64:`.
//!
//! `hh` is the hash by which a secret is made one of its owner's name before use, zero for none. The base64 has the key
//! of 32, 48 or 64 bytes and its CRC-32. Secrets are never printed but by [`DhchapSecret::reveal`].
//!
//! Source: NVM Express Base Specification 2.1, 8.3.5.5.7.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::{AuthHash, AuthSeed};
use crate::fabrics::Nqn;
use crate::key_text::{KeyText, KeyTextForm, SecretError};

const FORM: KeyTextForm = KeyTextForm { prefix: "DHHC-1:", hashes: "00, 01, 02, 03", lengths: &[32, 48, 64] };

/// The secret of a host or a controller.
#[derive(Clone, PartialEq, Eq)]
pub struct DhchapSecret(KeyText);

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
        FORM.check(KeyText { hash, key }).map(DhchapSecret)
    }

    /// Parses a text, of which white space around it is no part.
    ///
    /// # Errors
    /// See [`SecretError`].
    pub fn parse(text: &str) -> Result<DhchapSecret, SecretError> {
        FORM.parse(text).map(DhchapSecret)
    }

    /// The text, which is as secret as the key.
    pub fn reveal(&self) -> String {
        FORM.reveal(&self.0)
    }

    /// The key for responses of the host or subsystem with this name.
    pub(super) fn transformed(&self, owner: &Nqn) -> Vec<u8> {
        let KeyText { hash, key } = &self.0;
        match hash {
            None => key.clone(),
            Some(hash) => hash.hmac(key, &[owner.as_str().as_bytes(), b"NVMe-over-Fabrics"]),
        }
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
        let short = "DHHC-1:00:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB:";
        let changed = text.replacen("AQEB", "AQEC", 1);
        for (text, error) in [
            ("", SecretError::Form("DHHC-1:")),
            ("secret", SecretError::Form("DHHC-1:")),
            ("DHHC-1:00", SecretError::Form("DHHC-1:")),
            (text.trim_end_matches(':'), SecretError::Form("DHHC-1:")),
            (&text.replace(":00:", ":04:"), SecretError::Hash("00, 01, 02, 03")),
            ("DHHC-1:00:no base64:", SecretError::Base64),
            ("DHHC-1:00::", SecretError::Length(0, &[32, 48, 64])),
            (short, SecretError::Length(20, &[32, 48, 64])),
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
