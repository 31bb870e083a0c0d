//! Messages of a transaction: made by one side, parsed by the other. Lengths in them are not trusted.

use super::{AuthFailure, AuthHash, DhGroup};

/// Longest message, bytes: a Reply with two values of SHA-512 and one of the largest group.
pub const AUTH_MESSAGE_BYTES_MAX: usize = HEAD + 2 * 64 + 1024;

/// Bytes before the values of Challenge, Reply and Success1; also of a Success2.
const HEAD: usize = 16;
const FAILURE_BYTES: usize = 8;
/// Authentication types (AUTH_TYPE): common messages, and DH-HMAC-CHAP.
const COMMON: u8 = 0;
const DHCHAP: u8 = 1;
/// Identifier of the protocol in Negotiate.
const DHCHAP_PROTOCOL: u8 = 1;
const PROTOCOL_BYTES: usize = 64;
/// Within a protocol: the identifiers of hashes, and those of groups.
const HASHES_AT: usize = 4;
const GROUPS_AT: usize = 34;
const IDS_MAX: usize = 30;
/// Reason of a failure: authentication.
const REASON: u8 = 1;

mod id {
    pub const NEGOTIATE: u8 = 0;
    pub const CHALLENGE: u8 = 1;
    pub const REPLY: u8 = 2;
    pub const SUCCESS1: u8 = 3;
    pub const SUCCESS2: u8 = 4;
    pub const FAILURE2: u8 = 0xf0;
    pub const FAILURE1: u8 = 0xf1;
}

/// A message without the identifier of its transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AuthMessage {
    /// What the host offers.
    Negotiate {
        /// Whether a secure channel is to follow (SC_C).
        wants_channel: bool,
        hashes: Vec<u8>,
        groups: Vec<u8>,
    },
    Challenge {
        hash: AuthHash,
        group: DhGroup,
        sequence: u32,
        challenge: Vec<u8>,
        public: Vec<u8>,
    },
    Reply {
        response: Vec<u8>,
        /// The challenge of the host, if it has one.
        challenge: Option<(u32, Vec<u8>)>,
        public: Vec<u8>,
    },
    /// With the response of the controller, if the host has sent a challenge.
    Success1(Option<Vec<u8>>),
    Success2,
    /// From the controller, or from the host.
    Failure(AuthFailure, FailureSide),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureSide {
    Controller,
    Host,
}

impl AuthMessage {
    /// The message, whose response values are of this hash.
    pub(super) fn bytes(&self, transaction: u16, hash: AuthHash) -> Vec<u8> {
        let mut bytes = vec![0; HEAD];
        let (kind, id) = match self {
            AuthMessage::Negotiate { wants_channel, hashes, groups } => {
                bytes.resize(8 + PROTOCOL_BYTES, 0);
                (bytes[6], bytes[7]) = (u8::from(*wants_channel), 1);
                let protocol = &mut bytes[8..];
                (protocol[0], protocol[2], protocol[3]) = (DHCHAP_PROTOCOL, hashes.len() as u8, groups.len() as u8);
                protocol[HASHES_AT..][..hashes.len()].copy_from_slice(hashes);
                protocol[GROUPS_AT..][..groups.len()].copy_from_slice(groups);
                (COMMON, id::NEGOTIATE)
            }
            AuthMessage::Challenge { hash, group, sequence, challenge, public } => {
                (bytes[6], bytes[8], bytes[9]) = (challenge.len() as u8, hash.id(), group.id());
                bytes[10..12].copy_from_slice(&(public.len() as u16).to_le_bytes());
                bytes[12..16].copy_from_slice(&sequence.to_le_bytes());
                bytes.extend_from_slice(challenge);
                bytes.extend_from_slice(public);
                (DHCHAP, id::CHALLENGE)
            }
            AuthMessage::Reply { response, challenge, public } => {
                (bytes[6], bytes[8]) = (response.len() as u8, u8::from(challenge.is_some()));
                bytes[10..12].copy_from_slice(&(public.len() as u16).to_le_bytes());
                bytes.extend_from_slice(response);
                match challenge {
                    Some((sequence, challenge)) => {
                        bytes[12..16].copy_from_slice(&sequence.to_le_bytes());
                        bytes.extend_from_slice(challenge);
                    }
                    None => bytes.resize(HEAD + 2 * response.len(), 0),
                }
                bytes.extend_from_slice(public);
                (DHCHAP, id::REPLY)
            }
            AuthMessage::Success1(response) => {
                (bytes[6], bytes[8]) = (hash.bytes() as u8, u8::from(response.is_some()));
                bytes.extend_from_slice(response.as_deref().unwrap_or_default());
                (DHCHAP, id::SUCCESS1)
            }
            AuthMessage::Success2 => (DHCHAP, id::SUCCESS2),
            AuthMessage::Failure(failure, side) => {
                bytes.truncate(FAILURE_BYTES);
                (bytes[6], bytes[7]) = (REASON, failure.code());
                (COMMON, if *side == FailureSide::Host { id::FAILURE2 } else { id::FAILURE1 })
            }
        };
        (bytes[0], bytes[1]) = (kind, id);
        bytes[4..6].copy_from_slice(&transaction.to_le_bytes());
        bytes
    }

    /// Parses a message, whose end may be followed by anything: the transaction and the message.
    pub(super) fn parse(bytes: &[u8]) -> Result<(u16, AuthMessage), AuthFailure> {
        let [kind, id, _, _, low, high, ..] = *bytes else { return Err(AuthFailure::Payload) };
        let message = match (kind, id) {
            (COMMON, id::NEGOTIATE) => parse_negotiate(bytes),
            (COMMON, id::FAILURE1 | id::FAILURE2) => {
                let side = if id == id::FAILURE1 { FailureSide::Controller } else { FailureSide::Host };
                let code = *bytes.get(7).ok_or(AuthFailure::Payload)?;
                Ok(AuthMessage::Failure(AuthFailure::from_code(code), side))
            }
            (DHCHAP, id::CHALLENGE) => parse_challenge(bytes),
            (DHCHAP, id::REPLY) => parse_reply(bytes),
            (DHCHAP, id::SUCCESS1) => parse_success(bytes),
            (DHCHAP, id::SUCCESS2) if bytes.len() >= HEAD => Ok(AuthMessage::Success2),
            (DHCHAP, id::SUCCESS2) => Err(AuthFailure::Payload),
            _ => Err(AuthFailure::Message),
        };
        Ok((u16::from_le_bytes([low, high]), message?))
    }
}

fn parse_negotiate(bytes: &[u8]) -> Result<AuthMessage, AuthFailure> {
    let (head, protocols) = bytes.split_at_checked(8).ok_or(AuthFailure::Payload)?;
    let (wants_channel, count) = (head[6] != 0, usize::from(head[7]));
    let protocols = protocols.get(..count * PROTOCOL_BYTES).ok_or(AuthFailure::Payload)?;
    let ours = protocols.as_chunks::<PROTOCOL_BYTES>().0.iter().find(|protocol| protocol[0] == DHCHAP_PROTOCOL);
    let protocol = ours.ok_or(AuthFailure::Protocol)?;
    let (hashes, groups) = (usize::from(protocol[2]), usize::from(protocol[3]));
    if hashes > IDS_MAX || groups > IDS_MAX {
        return Err(AuthFailure::Payload);
    }
    Ok(AuthMessage::Negotiate {
        wants_channel,
        hashes: protocol[HASHES_AT..][..hashes].to_vec(),
        groups: protocol[GROUPS_AT..][..groups].to_vec(),
    })
}

/// Values of these lengths that follow the head.
fn values<const N: usize>(bytes: &[u8], lens: [usize; N]) -> Result<[Vec<u8>; N], AuthFailure> {
    let mut rest = bytes.get(HEAD..).ok_or(AuthFailure::Payload)?;
    let mut values = [const { Vec::new() }; N];
    for (value, len) in values.iter_mut().zip(lens) {
        let (own, behind) = rest.split_at_checked(len).ok_or(AuthFailure::Payload)?;
        (*value, rest) = (own.to_vec(), behind);
    }
    Ok(values)
}

fn head(bytes: &[u8]) -> Result<&[u8; HEAD], AuthFailure> {
    bytes.first_chunk().ok_or(AuthFailure::Payload)
}

fn parse_challenge(bytes: &[u8]) -> Result<AuthMessage, AuthFailure> {
    let head = head(bytes)?;
    let hash = AuthHash::from_id(head[8]).ok_or(AuthFailure::Hash)?;
    let group = DhGroup::from_id(head[9]).ok_or(AuthFailure::Group)?;
    let public = usize::from(u16::from_le_bytes([head[10], head[11]]));
    if usize::from(head[6]) != hash.bytes() || public != group.bytes() {
        return Err(AuthFailure::Payload);
    }
    let sequence = u32::from_le_bytes([head[12], head[13], head[14], head[15]]);
    let [challenge, public] = values(bytes, [hash.bytes(), public])?;
    Ok(AuthMessage::Challenge { hash, group, sequence, challenge, public })
}

/// Whether its lengths are those of the hash and the group is to be compared by the target, which has chosen them.
fn parse_reply(bytes: &[u8]) -> Result<AuthMessage, AuthFailure> {
    let head = head(bytes)?;
    let (len, public) = (usize::from(head[6]), usize::from(u16::from_le_bytes([head[10], head[11]])));
    let sequence = u32::from_le_bytes([head[12], head[13], head[14], head[15]]);
    let [response, challenge, public] = values(bytes, [len, len, public])?;
    let challenge = (head[8] != 0).then_some((sequence, challenge));
    Ok(AuthMessage::Reply { response, challenge, public })
}

fn parse_success(bytes: &[u8]) -> Result<AuthMessage, AuthFailure> {
    let head = head(bytes)?;
    if head[8] == 0 {
        return Ok(AuthMessage::Success1(None));
    }
    let [response] = values(bytes, [usize::from(head[6])])?;
    Ok(AuthMessage::Success1(Some(response)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages() -> Vec<AuthMessage> {
        let reply = |challenge| AuthMessage::Reply { response: vec![1; 48], challenge, public: vec![2; 256] };
        vec![
            AuthMessage::Negotiate { wants_channel: false, hashes: vec![1, 2, 3], groups: vec![0, 1, 2, 3, 4, 5] },
            AuthMessage::Challenge {
                hash: AuthHash::Sha384,
                group: DhGroup::Ffdhe2048,
                sequence: 0x0403_0201,
                challenge: vec![5; 48],
                public: vec![6; 256],
            },
            reply(None),
            reply(Some((7, vec![8; 48]))),
            AuthMessage::Success1(None),
            AuthMessage::Success1(Some(vec![9; 48])),
            AuthMessage::Success2,
            AuthMessage::Failure(AuthFailure::Payload, FailureSide::Host),
            AuthMessage::Failure(AuthFailure::Failed, FailureSide::Controller),
        ]
    }

    #[test]
    fn each_message_is_parsed_as_it_was_made() {
        for message in messages() {
            let bytes = message.bytes(0x0201, AuthHash::Sha384);
            assert_eq!((bytes[4], bytes[5]), (1, 2), "{message:?}");
            assert_eq!(AuthMessage::parse(&bytes), Ok((0x0201, message)));
        }
    }

    #[test]
    fn messages_are_as_the_specification_has_them() {
        let bytes = messages()[0].bytes(1, AuthHash::Sha256);
        assert_eq!((bytes.len(), &bytes[..8]), (72, &[0, 0, 0, 0, 1, 0, 0, 1][..]));
        assert_eq!((&bytes[8..16], &bytes[42..48]), (&[1, 0, 3, 6, 1, 2, 3, 0][..], &[0, 1, 2, 3, 4, 5][..]));
        let bytes = messages()[1].bytes(1, AuthHash::Sha384);
        assert_eq!((bytes.len(), &bytes[..16]), (320, &[1, 1, 0, 0, 1, 0, 48, 0, 2, 1, 0, 1, 1, 2, 3, 4][..]));
        let bytes = messages()[2].bytes(1, AuthHash::Sha384);
        assert_eq!((bytes.len(), &bytes[..16]), (368, &[1, 2, 0, 0, 1, 0, 48, 0, 0, 0, 0, 1, 0, 0, 0, 0][..]));
        let bytes = messages()[5].bytes(1, AuthHash::Sha384);
        assert_eq!((bytes.len(), &bytes[..10]), (64, &[1, 3, 0, 0, 1, 0, 48, 0, 1, 0][..]));
        assert_eq!(messages()[6].bytes(1, AuthHash::Sha384), [1, 4, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(messages()[7].bytes(1, AuthHash::Sha384), [0, 0xf0, 0, 0, 1, 0, 1, 6]);
        assert_eq!(messages()[8].bytes(1, AuthHash::Sha384), [0, 0xf1, 0, 0, 1, 0, 1, 1]);
    }

    #[test]
    fn no_message_is_read_beyond_its_end() {
        for message in messages() {
            let bytes = message.bytes(1, AuthHash::Sha384);
            for len in 0..bytes.len() {
                let parsed = AuthMessage::parse(&bytes[..len]);
                // A failure of seven bytes and a success without a value are told by less.
                assert!(parsed.is_err() || !matches!(message, AuthMessage::Challenge { .. }), "{message:?} {len}");
            }
        }
    }

    /// CVE-2026-64319, -90230 and -72130: lengths beyond the transfer, and more identifiers than the list has.
    #[test]
    fn lengths_in_messages_are_not_trusted() {
        let all = messages();
        let change = |message: &AuthMessage, at: usize, value: u8| {
            let mut bytes = message.bytes(1, AuthHash::Sha384);
            bytes[at] = value;
            AuthMessage::parse(&bytes).map(|_| ())
        };
        // Negotiate: protocols, hashes, groups. Challenge and Reply: values of the hash and the group.
        for (message, at) in [(0, 7), (0, 10), (0, 11), (1, 6), (1, 10), (1, 11), (3, 6), (3, 11), (5, 6)] {
            assert_eq!(change(&all[message], at, 255), Err(AuthFailure::Payload), "{message} {at}");
        }
        assert_eq!(change(&all[0], 10, 31), Err(AuthFailure::Payload));
        assert_eq!(change(&all[0], 10, 30), Ok(()));
        assert_eq!(change(&all[0], 8, 2), Err(AuthFailure::Protocol));
        assert_eq!(change(&all[1], 8, 4), Err(AuthFailure::Hash));
        assert_eq!(change(&all[1], 9, 6), Err(AuthFailure::Group));
        assert_eq!(change(&all[1], 0, 2), Err(AuthFailure::Message));
        assert_eq!(change(&all[1], 1, 5), Err(AuthFailure::Message));
    }
}
