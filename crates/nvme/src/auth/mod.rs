//! In-band authentication of hosts and controllers over fabrics: DH-HMAC-CHAP.
//!
//! ```text
//!   host                                    controller
//!     ── Negotiate: hashes, groups ──────────▶
//!     ◀──── Challenge: C1, g^x ───────────────
//!     ── Reply: R1, and C2, g^y ─────────────▶  is R1 of the host's secret?
//!     ◀──── Success1: R2 ─────────────────────  or Failure1
//!     ── Success2 ───────────────────────────▶  or Failure2; only if the host has sent C2
//! ```
//!
//! [`AuthHost`] and [`AuthTarget`] are the two sides: state machines without I/O, clock or random numbers of their own.
//! Messages go to the controller by Authentication Send and come from it by Authentication Receive, whose transport is
//! the owner's business, as is the time for all of it. Not here: keys for TLS that follow from it (secure channel
//! concatenation).
//!
//! Source: NVM Express Base Specification 2.1, 8.3.5.5; the groups are those of RFC 7919.

mod group;
mod host;
mod message;
mod secret;
mod target;

use hmac::digest::Digest;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Sha256, Sha384, Sha512};

use crate::fabrics::Nqn;

use self::group::DhGroup;
pub use self::host::{AuthError, AuthHost, AuthStep};
pub use self::message::AUTH_MESSAGE_BYTES_MAX;
pub use self::secret::{AuthSecrets, DhchapSecret, HostSecrets};
pub use self::target::{AuthOutcome, AuthTarget};
pub use crate::key_text::SecretError;

/// Protocol of Authentication Send and Receive (SECP), and its two specific bytes.
pub const AUTH_PROTOCOL: u8 = 0xe9;
/// SPSP0 and SPSP1.
pub const AUTH_PROTOCOL_SPECIFIC: [u8; 2] = [1, 1];

/// A hash function, and the HMAC with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthHash {
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

impl AuthHash {
    /// All, the one to be preferred first: none is known to be weak, and the first is the cheapest.
    const ALL: [AuthHash; 3] = [AuthHash::Sha256, AuthHash::Sha384, AuthHash::Sha512];

    /// The identifier in messages and secrets: from one.
    pub fn id(self) -> u8 {
        match self {
            AuthHash::Sha256 => 1,
            AuthHash::Sha384 => 2,
            AuthHash::Sha512 => 3,
        }
    }

    /// The hash with this identifier.
    pub fn from_id(id: u8) -> Option<AuthHash> {
        AuthHash::ALL.into_iter().find(|hash| hash.id() == id)
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            AuthHash::Sha256 => 32,
            AuthHash::Sha384 => 48,
            AuthHash::Sha512 => 64,
        }
    }

    fn digest(self, data: &[u8]) -> Vec<u8> {
        match self {
            AuthHash::Sha256 => Sha256::digest(data).to_vec(),
            AuthHash::Sha384 => Sha384::digest(data).to_vec(),
            AuthHash::Sha512 => Sha512::digest(data).to_vec(),
        }
    }

    /// The HMAC of parts that follow each other.
    pub(crate) fn hmac(self, key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
        match self {
            AuthHash::Sha256 => keyed::<Hmac<Sha256>>(key, parts).finalize().into_bytes().to_vec(),
            AuthHash::Sha384 => keyed::<Hmac<Sha384>>(key, parts).finalize().into_bytes().to_vec(),
            AuthHash::Sha512 => keyed::<Hmac<Sha512>>(key, parts).finalize().into_bytes().to_vec(),
        }
    }

    /// Whether that HMAC is this one, in a time that tells nothing about it.
    fn is_hmac(self, key: &[u8], parts: &[&[u8]], value: &[u8]) -> bool {
        match self {
            AuthHash::Sha256 => keyed::<Hmac<Sha256>>(key, parts).verify_slice(value).is_ok(),
            AuthHash::Sha384 => keyed::<Hmac<Sha384>>(key, parts).verify_slice(value).is_ok(),
            AuthHash::Sha512 => keyed::<Hmac<Sha512>>(key, parts).verify_slice(value).is_ok(),
        }
    }
}

fn keyed<M: Mac + KeyInit>(key: &[u8], parts: &[&[u8]]) -> M {
    let Ok(mut mac) = <M as KeyInit>::new_from_slice(key) else { unreachable!("an HMAC takes keys of any length") };
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// Why a transaction fails (explanation codes of AUTH_Failure1 and AUTH_Failure2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthFailure {
    /// A response is wrong, or a secret is missing.
    Failed,
    /// No protocol in common.
    Protocol,
    /// A secure channel is wanted on one side.
    Concatenation,
    /// No hash in common.
    Hash,
    /// No group in common.
    Group,
    /// A message is malformed.
    Payload,
    /// A message is not the one that is due.
    Message,
}

impl AuthFailure {
    const ALL: [AuthFailure; 7] = [
        AuthFailure::Failed,
        AuthFailure::Protocol,
        AuthFailure::Concatenation,
        AuthFailure::Hash,
        AuthFailure::Group,
        AuthFailure::Payload,
        AuthFailure::Message,
    ];

    /// The explanation code.
    pub fn code(self) -> u8 {
        match self {
            AuthFailure::Failed => 1,
            AuthFailure::Protocol => 2,
            AuthFailure::Concatenation => 3,
            AuthFailure::Hash => 4,
            AuthFailure::Group => 5,
            AuthFailure::Payload => 6,
            AuthFailure::Message => 7,
        }
    }

    /// Unknown codes say no more than that it failed.
    fn from_code(code: u8) -> AuthFailure {
        AuthFailure::ALL.into_iter().find(|failure| failure.code() == code).unwrap_or(AuthFailure::Failed)
    }
}

/// A seed of random numbers that nobody else knows: challenges and exponents of all transactions follow from it.
///
/// Each value is the HMAC of a number and a label with the seed as key, so two with the same number are the same: the
/// owner gives each transaction a number of its own.
#[derive(Clone)]
pub struct AuthSeed(pub [u8; 32]);

impl std::fmt::Debug for AuthSeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AuthSeed")
    }
}

impl AuthSeed {
    /// The values of one side of a transaction.
    pub(crate) fn nonce(&self, number: u64) -> AuthNonce {
        let draw = |label: &[u8]| -> [u8; 64] {
            let value = AuthHash::Sha512.hmac(&self.0, &[label, &number.to_le_bytes()]);
            std::array::from_fn(|at| value[at])
        };
        let sequence = draw(b"sequence");
        AuthNonce {
            challenge: draw(b"challenge"),
            exponent: draw(b"exponent"),
            // Zero means none.
            sequence: u32::from_le_bytes([sequence[0], sequence[1], sequence[2], sequence[3]]).max(1),
            transaction: u16::from_le_bytes([sequence[4], sequence[5]]),
        }
    }
}

/// Random values of one side of a transaction.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct AuthNonce {
    challenge: [u8; 64],
    exponent: [u8; 64],
    sequence: u32,
    transaction: u16,
}

impl std::fmt::Debug for AuthNonce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AuthNonce")
    }
}

/// Who responds to a challenge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Responder {
    Host,
    Controller,
}

/// The names in a response.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AuthNames {
    host: Nqn,
    subsystem: Nqn,
}

/// What a response is made of.
#[derive(Clone, Copy, Debug)]
struct Response<'a> {
    responder: Responder,
    names: &'a AuthNames,
    hash: AuthHash,
    secret: &'a DhchapSecret,
    challenge: &'a [u8],
    /// The shared secret of the group; unset without one.
    shared: Option<&'a [u8]>,
    sequence: u32,
    transaction: u16,
}

impl Response<'_> {
    fn with<T>(&self, then: impl FnOnce(&[u8], &[&[u8]]) -> T) -> T {
        let AuthNames { host, subsystem } = self.names;
        let (own, label, other) = match self.responder {
            Responder::Host => (host, &b"HostHost"[..], subsystem),
            Responder::Controller => (subsystem, &b"Controller"[..], host),
        };
        let key = self.secret.transformed(own);
        let augmented = self.shared.map(|shared| self.hash.hmac(&self.hash.digest(shared), &[self.challenge]));
        let challenge = augmented.as_deref().unwrap_or(self.challenge);
        let (sequence, transaction) = (self.sequence.to_le_bytes(), self.transaction.to_le_bytes());
        // The zero behind the transaction is SC_C: no secure channel.
        let (own, other) = (own.as_str().as_bytes(), other.as_str().as_bytes());
        then(&key, &[challenge, &sequence, &transaction, &[0], label, own, &[0], other])
    }

    fn value(&self) -> Vec<u8> {
        self.with(|key, parts| self.hash.hmac(key, parts))
    }

    fn is(&self, value: &[u8]) -> bool {
        self.with(|key, parts| self.hash.is_hmac(key, parts, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 2.
    #[test]
    fn an_hmac_is_as_the_rfc_has_it() {
        let value = AuthHash::Sha256.hmac(b"Jefe", &[b"what do ya want ", b"for nothing?"]);
        let known = [0x5bdc_c146_bf60_754e_6a04_2426_0895_75c7_u128, 0x5a00_3f08_9d27_3983_9dec_58b9_64ec_3843];
        assert_eq!(value, known.map(u128::to_be_bytes).concat());
        assert!(AuthHash::Sha256.is_hmac(b"Jefe", &[b"what do ya want for nothing?"], &value));
        assert!(!AuthHash::Sha256.is_hmac(b"jefe", &[b"what do ya want for nothing?"], &value));
        assert!(!AuthHash::Sha256.is_hmac(b"Jefe", &[b"what do ya want for nothing?"], &value[1..]));
    }

    #[test]
    fn each_transaction_has_its_own_values() {
        let seed = AuthSeed([7; 32]);
        let (one, other) = (seed.nonce(1), seed.nonce(2));
        assert_ne!(one.challenge, other.challenge);
        assert_ne!(one.exponent, other.exponent);
        assert_ne!(one.challenge, one.exponent);
        assert_eq!(one.challenge, seed.nonce(1).challenge);
        assert!(!format!("{seed:?} {one:?}").contains('7'), "nothing of it is printed");
    }
}
