//! Keys of encrypted connections: pre-shared keys of TLS 1.3, and what follows from them for a host and a subsystem.
//!
//! ```text
//!   NVMeTLSkey-1:hh:BASE64:  ── bound to the host's name, by hash hh ──▶ retained key
//!   retained key             ── bound to the identity ─────────────────▶ key of TLS
//! ```
//!
//! The identity has both names, so each pair of host and subsystem has its own key. Handshake and encryption are not
//! here.
//!
//! Source: NVM Express TCP Transport Specification 1.1, 3.6.1; RFC 8446, 7.1.

use std::collections::HashMap;
use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::auth::{AuthHash, SecretError};
use crate::fabrics::Nqn;
use crate::key_text::{KeyText, KeyTextForm};

const FORM: KeyTextForm = KeyTextForm { prefix: "NVMeTLSkey-1:", hashes: "00, 01, 02", lengths: &[32, 48] };
/// Bytes of an identity at most: a label of the derivation and OpenSSL take no more.
const IDENTITY_BYTES_MAX: usize = 255;

/// How keys are derived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsDerivation {
    /// As specified.
    #[default]
    Standard,
    /// As libnvme did until its pull request 1051 of August 2025: without the lengths of label and context, and with
    /// the low byte of the key's first. nvme-cli calls it `compat`.
    Compat,
}

/// Version of an identity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsIdentityVersion {
    /// Names only: what nvme-cli makes unless it is told otherwise.
    #[default]
    V0,
    /// With a digest of the retained key, so that a host may have several.
    V1,
}

/// A configured key, as administrators give it to host and target.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsKey(KeyText);

impl fmt::Debug for TlsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsKey")
    }
}

/// The key of a host and a subsystem, with the identity by which the host names it.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsPsk {
    /// Printable: the names, versions and the digest.
    pub identity: String,
    /// The key.
    pub key: Vec<u8>,
}

impl fmt::Debug for TlsPsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsPsk").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl TlsKey {
    /// A key of 32 bytes, or 48 for SHA-384, which is bound to the name of a host by this hash.
    ///
    /// # Errors
    /// The key has another length.
    pub fn new(key: Vec<u8>, hash: Option<AuthHash>) -> Result<TlsKey, SecretError> {
        TlsKey::checked(KeyText { hash, key })
    }

    /// Parses a text, of which white space around it is no part.
    ///
    /// # Errors
    /// See [`SecretError`].
    pub fn parse(text: &str) -> Result<TlsKey, SecretError> {
        FORM.parse(text).and_then(TlsKey::checked)
    }

    /// A hash and a key of its length: one block of the derivation is enough.
    fn checked(text: KeyText) -> Result<TlsKey, SecretError> {
        let lengths = match text.hash {
            Some(AuthHash::Sha256) => &[32],
            Some(AuthHash::Sha384) => &[48],
            _ => FORM.lengths,
        };
        KeyTextForm { lengths, ..FORM }.check(text).map(TlsKey)
    }

    /// The text, which is as secret as the key.
    pub fn reveal(&self) -> String {
        FORM.reveal(&self.0)
    }

    /// Hash of the cipher suite that goes with the key.
    pub fn suite_hash(&self) -> AuthHash {
        if self.0.key.len() == AuthHash::Sha384.bytes() { AuthHash::Sha384 } else { AuthHash::Sha256 }
    }

    /// The key of a host and a subsystem; `None` if their names are too long for an identity.
    pub fn psk(
        &self,
        (host, subsystem): (&Nqn, &Nqn),
        version: TlsIdentityVersion,
        derivation: TlsDerivation,
    ) -> Option<TlsPsk> {
        let hash = self.suite_hash();
        let KeyText { hash: transform, key } = &self.0;
        let retained = match transform {
            None => key.clone(),
            Some(bound) => derive(*bound, key, "HostNQN", host.as_str(), derivation)?,
        };
        let names = format!("{host} {subsystem}");
        let (identity, context) = match version {
            TlsIdentityVersion::V0 => {
                let identity = format!("NVMe0R{:02} {names}", hash.id());
                (identity.clone(), identity)
            }
            TlsIdentityVersion::V1 => {
                let digest = STANDARD.encode(hash.hmac(&retained, &[names.as_bytes(), b" NVMe-over-Fabrics"]));
                (format!("NVMe1R{:02} {names} {digest}", hash.id()), format!("{:02} {digest}", hash.id()))
            }
        };
        if identity.len() > IDENTITY_BYTES_MAX {
            return None;
        }
        let key = derive(hash, &retained, "nvme-tls-psk", &context, derivation)?;
        Some(TlsPsk { identity, key })
    }
}

/// A key of the hash's length from another: HKDF-Extract with a salt of zeros, and one block of HKDF-Expand-Label.
/// `None` if the context is too long.
fn derive(hash: AuthHash, key: &[u8], label: &str, context: &str, derivation: TlsDerivation) -> Option<Vec<u8>> {
    let (length, label) = (hash.bytes() as u16, format!("tls13 {label}"));
    let context_length = u8::try_from(context.len()).ok()?;
    let extracted = hash.hmac(&vec![0; hash.bytes()], &[key]);
    let (label, context) = (label.as_bytes(), context.as_bytes());
    Some(match derivation {
        TlsDerivation::Standard => {
            let (length, label_length) = (length.to_be_bytes(), [label.len() as u8]);
            hash.hmac(&extracted, &[&length, &label_length, label, &[context_length], context, &[1]])
        }
        TlsDerivation::Compat => hash.hmac(&extracted, &[&length.to_le_bytes(), label, context, &[1]]),
    })
}

/// The hosts that a subsystem knows by their keys.
#[derive(Clone, Default)]
pub struct TlsHosts {
    /// Host and key by identity.
    known: HashMap<String, (Nqn, Vec<u8>)>,
}

impl fmt::Debug for TlsHosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.known.keys()).finish()
    }
}

impl TlsHosts {
    /// Adds a host with its key, under identities of both versions. False if its name is too long.
    #[must_use]
    pub fn add(&mut self, (host, subsystem): (&Nqn, &Nqn), key: &TlsKey, derivation: TlsDerivation) -> bool {
        [TlsIdentityVersion::V0, TlsIdentityVersion::V1].into_iter().all(|version| {
            let psk = key.psk((host, subsystem), version, derivation);
            psk.map(|TlsPsk { identity, key }| self.known.insert(identity, (host.clone(), key))).is_some()
        })
    }

    /// The key with this identity.
    pub fn key(&self, identity: &str) -> Option<&[u8]> {
        self.known.get(identity).map(|(_, key)| key.as_slice())
    }

    /// The host with the key of this identity.
    pub fn host(&self, identity: &str) -> Option<&Nqn> {
        self.known.get(identity).map(|(host, _)| host)
    }

    /// Whether a host has a key.
    pub fn contains(&self, host: &Nqn) -> bool {
        self.hosts().any(|known| known == host)
    }

    /// The hosts, each at least once.
    pub fn hosts(&self) -> impl Iterator<Item = &Nqn> {
        self.known.values().map(|(host, _)| host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(len: usize, hash: Option<AuthHash>) -> TlsKey {
        TlsKey::new((0..len as u8).collect(), hash).unwrap()
    }

    fn nqn(name: &str) -> Nqn {
        Nqn::new(name).unwrap()
    }

    #[test]
    fn a_key_has_a_text() {
        for (len, hash, prefix) in [
            (32, None, "NVMeTLSkey-1:00:"),
            (48, None, "NVMeTLSkey-1:00:"),
            (32, Some(AuthHash::Sha256), "NVMeTLSkey-1:01:"),
            (48, Some(AuthHash::Sha384), "NVMeTLSkey-1:02:"),
        ] {
            let key = key(len, hash);
            let text = key.reveal();
            assert!(text.starts_with(prefix), "{text}");
            assert_eq!(TlsKey::parse(&text), Ok(key));
        }
        let wrong = TlsKey::new(vec![0; 48], Some(AuthHash::Sha256));
        assert_eq!(wrong, Err(SecretError::Length(48, &[32])));
        let text = key(32, None).reveal().replace(":00:", ":03:");
        assert_eq!(TlsKey::parse(&text), Err(SecretError::Hash("00, 01, 02")));
        assert_eq!(TlsKey::parse("DHHC-1:00:AA==:"), Err(SecretError::Form("NVMeTLSkey-1:")));
    }

    /// Computed with OpenSSL's HKDF and HMAC, of keys of bytes from zero on.
    #[test]
    fn keys_follow_from_names_as_openssl_computes_them() {
        use AuthHash::{Sha256, Sha384};
        use TlsDerivation::{Compat, Standard};
        use TlsIdentityVersion::{V0, V1};
        let plain = " xODnedunvj9H6amDrlQKN+Z8DzUqmsGoOed3NSRdy9A=";
        let bound = " zchNQkI440eW2/nWhDtdKL6QY+O4WWnaMSH0bgzAHqk=";
        let compat = " RBvYnP6e4oELe9d8F25iGCctzoyxF006TcgfU4dUr4E=";
        let long = " kac5u2T4azp2JygRs4+LtUScPuXtmu8d5/NnmqhAivLNvnBpAh942p/c11jlZSxG";
        for (len, hash, version, derivation, prefix, digest, start) in [
            (32, None, V0, Standard, "NVMe0R01", "", 0x345d_bf67_a4d4_d786_u64),
            (32, None, V1, Standard, "NVMe1R01", plain, 0x7807_0e30_bee5_b6e4),
            (32, None, V0, Compat, "NVMe0R01", "", 0x67f1_95a1_2c2a_cb6d),
            (32, None, V1, Compat, "NVMe1R01", plain, 0x8b77_811b_b879_ec65),
            (32, Some(Sha256), V0, Standard, "NVMe0R01", "", 0x3984_22ff_5fc6_b5d4),
            (32, Some(Sha256), V1, Standard, "NVMe1R01", bound, 0x6f9b_f5b6_b443_60f1),
            (32, Some(Sha256), V0, Compat, "NVMe0R01", "", 0x39b9_6df8_906c_3e3a),
            (32, Some(Sha256), V1, Compat, "NVMe1R01", compat, 0x8312_7fce_16ba_897f),
            (48, None, V0, Standard, "NVMe0R02", "", 0x0c84_dbbd_6453_128c),
            (48, Some(Sha384), V0, Standard, "NVMe0R02", "", 0xe098_2121_3bda_bd05),
            (48, Some(Sha384), V1, Standard, "NVMe1R02", long, 0xdabf_337a_5711_0046),
            (48, Some(Sha384), V0, Compat, "NVMe0R02", "", 0x4db2_17e8_0daa_9765),
        ] {
            let psk = key(len, hash).psk((&nqn("nqn.a"), &nqn("nqn.b")), version, derivation).unwrap();
            assert_eq!(psk.identity, format!("{prefix} nqn.a nqn.b{digest}"), "{hash:?}, {derivation:?}");
            assert_eq!(psk.key.len(), len);
            assert_eq!(psk.key[..8], start.to_be_bytes(), "{hash:?}, {version:?}, {derivation:?}");
        }
    }

    #[test]
    fn a_long_name_has_no_identity() {
        let long = nqn(&format!("nqn.{}", "a".repeat(219)));
        let psk =
            |host: &Nqn| key(32, None).psk((host, &nqn("nqn.b")), TlsIdentityVersion::V0, TlsDerivation::Standard);
        assert!(psk(&nqn("nqn.a")).is_some());
        assert!(psk(&long).is_some());
        let both = key(32, None).psk((&long, &long), TlsIdentityVersion::V0, TlsDerivation::Standard);
        assert_eq!(both, None);
    }

    #[test]
    fn a_host_is_known_by_both_versions_of_its_identity() {
        let (a, b, subsystem) = (nqn("nqn.a"), nqn("nqn.b"), nqn("nqn.s"));
        let mut hosts = TlsHosts::default();
        assert!(hosts.add((&a, &subsystem), &key(32, None), TlsDerivation::Standard));
        for version in [TlsIdentityVersion::V0, TlsIdentityVersion::V1] {
            let psk = |host| key(32, None).psk((host, &subsystem), version, TlsDerivation::Standard).unwrap();
            let of_a = psk(&a);
            assert_eq!(hosts.host(&of_a.identity), Some(&a));
            assert_eq!(hosts.key(&of_a.identity), Some(&of_a.key[..]));
            assert_eq!(hosts.host(&psk(&b).identity), None);
        }
        assert!(hosts.contains(&a) && !hosts.contains(&b));
        let shown =
            format!("{hosts:?} {:?}", key(32, None).psk((&a, &b), TlsIdentityVersion::V0, TlsDerivation::Compat));
        assert!(shown.contains("NVMe0R01 nqn.a nqn.s") && !shown.contains("key: ["), "{shown}");
    }
}
