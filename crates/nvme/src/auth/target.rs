//! The controller's side of a transaction.

use std::sync::Arc;

use super::message::{AuthMessage, FailureSide};
use super::{AuthFailure, AuthHash, AuthNames, AuthNonce, AuthSecrets, AuthSeed, DhGroup, Responder, Response};
use crate::NvmeStatus;
use crate::fabrics::Nqn;

/// How far a transaction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthOutcome {
    /// Not at its end.
    Pending,
    /// The host is who it claims to be, and has been told.
    Authenticated,
    /// It is not, and has been told: the connection is to be closed.
    Failed(AuthFailure),
}

#[derive(Clone, Debug)]
enum AuthTargetPhase {
    /// Negotiate is awaited.
    Begun,
    /// A Challenge with this public value is to be received. It is computed once, however often there is no room.
    Challenging(AuthHash, DhGroup, Vec<u8>),
    /// A Reply is awaited.
    Challenged(AuthHash, DhGroup),
    /// A Success1 is to be received, with the response to the host's challenge.
    Succeeding(AuthHash, Option<Vec<u8>>),
    /// A Success2 is awaited.
    Confirmed,
    /// A Failure1 is to be received.
    Failing(AuthFailure),
    Over(AuthOutcome),
}

/// The controller's side of transactions on one queue: one after the other.
#[derive(Clone, Debug)]
pub struct AuthTarget {
    names: AuthNames,
    secrets: Arc<AuthSecrets>,
    nonce: AuthNonce,
    /// The host's number of the transaction.
    transaction: u16,
    phase: AuthTargetPhase,
}

impl AuthTarget {
    /// A transaction with a number of its own among all with this seed.
    pub fn new(host: Nqn, subsystem: Nqn, secrets: Arc<AuthSecrets>, seed: &AuthSeed, number: u64) -> AuthTarget {
        AuthTarget {
            names: AuthNames { host, subsystem },
            secrets,
            nonce: seed.nonce(number),
            transaction: 0,
            phase: AuthTargetPhase::Begun,
        }
    }

    /// How far it is, once the last command was answered.
    pub fn outcome(&self) -> AuthOutcome {
        if let AuthTargetPhase::Over(outcome) = self.phase { outcome } else { AuthOutcome::Pending }
    }

    /// A message of the host.
    pub fn sent(&mut self, bytes: &[u8]) {
        if let AuthTargetPhase::Over(_) = self.phase {
            return;
        }
        self.phase = match AuthMessage::parse(bytes) {
            Ok((_, AuthMessage::Failure(failure, FailureSide::Host))) => {
                AuthTargetPhase::Over(AuthOutcome::Failed(failure))
            }
            Ok((transaction, message)) => self.handle(transaction, message).unwrap_or_else(AuthTargetPhase::Failing),
            Err(failure) => AuthTargetPhase::Failing(failure),
        };
    }

    fn handle(&mut self, transaction: u16, message: AuthMessage) -> Result<AuthTargetPhase, AuthFailure> {
        if !matches!(self.phase, AuthTargetPhase::Begun) && transaction != self.transaction {
            return Err(AuthFailure::Payload);
        }
        match (&self.phase, message) {
            (AuthTargetPhase::Begun, AuthMessage::Negotiate { wants_channel, hashes, groups }) => {
                self.transaction = transaction;
                if wants_channel {
                    return Err(AuthFailure::Concatenation);
                }
                let hash = AuthHash::ALL.into_iter().find(|hash| hashes.contains(&hash.id()));
                let group = DhGroup::ALL.into_iter().find(|group| groups.contains(&group.id()));
                let (hash, group) = (hash.ok_or(AuthFailure::Hash)?, group.ok_or(AuthFailure::Group)?);
                Ok(AuthTargetPhase::Challenging(hash, group, group.public(&self.nonce.exponent)))
            }
            (AuthTargetPhase::Challenged(hash, group), AuthMessage::Reply { response, challenge, public }) => {
                self.verify(*hash, *group, &response, challenge, &public)
            }
            (AuthTargetPhase::Confirmed, AuthMessage::Success2) => {
                Ok(AuthTargetPhase::Over(AuthOutcome::Authenticated))
            }
            _ => Err(AuthFailure::Message),
        }
    }

    fn verify(
        &self,
        hash: AuthHash,
        group: DhGroup,
        response: &[u8],
        challenge: Option<(u32, Vec<u8>)>,
        public: &[u8],
    ) -> Result<AuthTargetPhase, AuthFailure> {
        if response.len() != hash.bytes() || public.len() != group.bytes() {
            return Err(AuthFailure::Payload);
        }
        let shared = group.shared(&self.nonce.exponent, public);
        if group != DhGroup::Null && shared.is_none() {
            return Err(AuthFailure::Payload);
        }
        let expected = Response {
            responder: Responder::Host,
            names: &self.names,
            hash,
            secret: &self.secrets.host,
            challenge: &self.nonce.challenge[..hash.bytes()],
            shared: shared.as_deref(),
            sequence: self.nonce.sequence,
            transaction: self.transaction,
        };
        if !expected.is(response) {
            return Err(AuthFailure::Failed);
        }
        let own = match (challenge, &self.secrets.controller) {
            (None, _) => None,
            (Some(_), None) => return Err(AuthFailure::Failed),
            // A host that sends the controller's challenge back would have it answer for the host; the label and the
            // order of names make that another value.
            (Some((sequence, challenge)), Some(secret)) => {
                let responder = Responder::Controller;
                Some(Response { responder, secret, challenge: &challenge, sequence, ..expected }.value())
            }
        };
        Ok(AuthTargetPhase::Succeeding(hash, own))
    }

    /// The message for the host, which has room for so many bytes, with zeros up to there.
    ///
    /// # Errors
    /// The status of the command: there is not enough room. The message stays.
    pub fn receive(&mut self, room: usize) -> Result<Vec<u8>, NvmeStatus> {
        let (mut message, next) = match &self.phase {
            AuthTargetPhase::Challenging(hash, group, public) => {
                let message = AuthMessage::Challenge {
                    hash: *hash,
                    group: *group,
                    sequence: self.nonce.sequence,
                    challenge: self.nonce.challenge[..hash.bytes()].to_vec(),
                    public: public.clone(),
                };
                (message.bytes(self.transaction, *hash), AuthTargetPhase::Challenged(*hash, *group))
            }
            AuthTargetPhase::Succeeding(hash, response) => {
                let next = match response {
                    Some(_) => AuthTargetPhase::Confirmed,
                    None => AuthTargetPhase::Over(AuthOutcome::Authenticated),
                };
                (AuthMessage::Success1(response.clone()).bytes(self.transaction, *hash), next)
            }
            phase => {
                // Nothing is to be received now.
                let failure = match phase {
                    AuthTargetPhase::Failing(failure) | AuthTargetPhase::Over(AuthOutcome::Failed(failure)) => *failure,
                    _ => AuthFailure::Message,
                };
                let message = AuthMessage::Failure(failure, FailureSide::Controller);
                let next = AuthTargetPhase::Over(AuthOutcome::Failed(failure));
                (message.bytes(self.transaction, AuthHash::Sha256), next)
            }
        };
        if message.len() > room {
            return Err(NvmeStatus::INVALID_FIELD.with_dnr());
        }
        self.phase = next;
        message.resize(room, 0);
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AUTH_MESSAGE_BYTES_MAX, AuthError, AuthHost, AuthStep, DhchapSecret};
    use super::*;

    const ROOM: usize = AUTH_MESSAGE_BYTES_MAX;

    fn secret(byte: u8, hash: Option<AuthHash>) -> DhchapSecret {
        DhchapSecret::new(vec![byte; 32], hash).unwrap()
    }

    fn secrets(host: u8, controller: Option<u8>) -> Arc<AuthSecrets> {
        let controller = controller.map(|byte| secret(byte, Some(AuthHash::Sha512)));
        Arc::new(AuthSecrets { host: secret(host, Some(AuthHash::Sha256)), controller })
    }

    fn sides(host: &Arc<AuthSecrets>, target: &Arc<AuthSecrets>) -> (AuthHost, AuthTarget) {
        let name = |name: &str| Nqn::new(&format!("nqn.2026-11.example:{name}")).unwrap();
        let (host, target) = (Arc::clone(host), Arc::clone(target));
        (
            AuthHost::new(name("host"), name("disk"), host, &AuthSeed([1; 32]), 1),
            AuthTarget::new(name("host"), name("disk"), target, &AuthSeed([2; 32]), 1),
        )
    }

    /// Runs a transaction, whose first message may be changed, to its end on both sides.
    fn run(host: &mut AuthHost, target: &mut AuthTarget, change: impl Fn(&mut Vec<u8>)) -> (AuthStep, AuthOutcome) {
        let mut first = host.begin();
        change(&mut first);
        let mut step = AuthStep::Send(first);
        for _ in 0..8 {
            step = match step {
                AuthStep::Send(bytes) => {
                    target.sent(&bytes);
                    host.sent()
                }
                AuthStep::Receive => host.received(&target.receive(ROOM).unwrap()),
                end => return (end, target.outcome()),
            };
        }
        panic!("the transaction does not end: {host:?}");
    }

    #[test]
    fn a_host_with_the_right_secret_is_authenticated() {
        for (hosts, targets) in [(None, None), (None, Some(2)), (Some(2), Some(2))] {
            let (mut host, mut target) = sides(&secrets(1, hosts), &secrets(1, targets));
            let end = run(&mut host, &mut target, |_| {});
            assert_eq!(end, (AuthStep::Done, AuthOutcome::Authenticated), "{hosts:?} {targets:?}");
        }
    }

    #[test]
    fn each_hash_and_each_group_is_agreed_on() {
        for hash in AuthHash::ALL {
            for group in DhGroup::ALL {
                let (mut host, mut target) = sides(&secrets(1, Some(2)), &secrets(1, Some(2)));
                let only = |first: &mut Vec<u8>| {
                    (first[10], first[11], first[12], first[42]) = (1, 1, hash.id(), group.id());
                };
                let end = run(&mut host, &mut target, only);
                assert_eq!(end, (AuthStep::Done, AuthOutcome::Authenticated), "{hash:?} {group:?}");
            }
        }
    }

    #[test]
    fn a_host_with_another_secret_is_refused() {
        let (mut host, mut target) = sides(&secrets(9, None), &secrets(1, None));
        let refused = AuthStep::Failed(AuthError::Refused(AuthFailure::Failed));
        assert_eq!(run(&mut host, &mut target, |_| {}), (refused, AuthOutcome::Failed(AuthFailure::Failed)));
    }

    #[test]
    fn a_target_without_the_secret_of_its_name_is_not_trusted() {
        let (mut host, mut target) = sides(&secrets(1, Some(2)), &secrets(1, Some(9)));
        let (step, outcome) = run(&mut host, &mut target, |_| {});
        assert_eq!(step, AuthStep::Failed(AuthError::Impostor));
        assert_eq!(outcome, AuthOutcome::Failed(AuthFailure::Failed));
        // Without any it says so itself.
        let (mut host, mut target) = sides(&secrets(1, Some(2)), &secrets(1, None));
        let (step, _) = run(&mut host, &mut target, |_| {});
        assert_eq!(step, AuthStep::Failed(AuthError::Refused(AuthFailure::Failed)));
    }

    #[test]
    fn each_offer_without_anything_in_common_has_its_reason() {
        for (at, value, failure) in [
            (6, 1, AuthFailure::Concatenation),
            (8, 7, AuthFailure::Protocol),
            (10, 0, AuthFailure::Hash),
            (11, 0, AuthFailure::Group),
            (10, 31, AuthFailure::Payload),
            (1, 9, AuthFailure::Message),
        ] {
            let (mut host, mut target) = sides(&secrets(1, None), &secrets(1, None));
            let (_, outcome) = run(&mut host, &mut target, |first| first[at] = value);
            assert_eq!(outcome, AuthOutcome::Failed(failure), "{at} {value}");
        }
    }

    /// CVE-2026-89970: an Authentication Receive of one byte.
    #[test]
    fn a_message_that_finds_no_room_stays() {
        let (host, mut target) = sides(&secrets(1, None), &secrets(1, None));
        target.sent(&host.begin());
        for room in [0, 1, 15, 16, 303] {
            assert_eq!(target.receive(room), Err(NvmeStatus::INVALID_FIELD.with_dnr()), "{room}");
        }
        assert_eq!(target.receive(304).map(|message| message.len()), Ok(304));
        assert_eq!(target.outcome(), AuthOutcome::Pending);
    }

    #[test]
    fn messages_that_are_not_due_end_the_transaction() {
        // A receive before Negotiate; twice the same; a Reply of another transaction.
        let (host, target) = sides(&secrets(1, None), &secrets(1, None));
        let mut early = target.clone();
        assert_eq!(early.receive(ROOM).map(|message| message[1]), Ok(0xf1));
        assert_eq!(early.outcome(), AuthOutcome::Failed(AuthFailure::Message));
        let mut twice = target.clone();
        twice.sent(&host.begin());
        twice.sent(&host.begin());
        assert_eq!(twice.receive(ROOM).map(|message| message[7]), Ok(AuthFailure::Message.code()));
        let (mut host, mut other) = (host, target);
        other.sent(&host.begin());
        host.sent();
        let AuthStep::Send(mut reply) = host.received(&other.receive(ROOM).unwrap()) else { panic!() };
        reply[4] ^= 1;
        other.sent(&reply);
        assert_eq!(other.receive(ROOM).map(|message| message[7]), Ok(AuthFailure::Payload.code()));
        // What comes behind a failure changes nothing.
        other.sent(&host.begin());
        assert_eq!(other.outcome(), AuthOutcome::Failed(AuthFailure::Payload));
    }

    #[test]
    fn a_reply_that_was_recorded_is_of_no_use_later() {
        let (mut host, mut target) = sides(&secrets(1, None), &secrets(1, None));
        target.sent(&host.begin());
        host.sent();
        let AuthStep::Send(reply) = host.received(&target.receive(ROOM).unwrap()) else { panic!() };
        let (host, _) = sides(&secrets(1, None), &secrets(1, None));
        let name = |name: &str| Nqn::new(&format!("nqn.2026-11.example:{name}")).unwrap();
        let mut later = AuthTarget::new(name("host"), name("disk"), secrets(1, None), &AuthSeed([2; 32]), 2);
        later.sent(&host.begin());
        later.receive(ROOM).unwrap();
        later.sent(&reply);
        later.receive(ROOM).unwrap();
        assert_eq!(later.outcome(), AuthOutcome::Failed(AuthFailure::Failed));
    }
}
