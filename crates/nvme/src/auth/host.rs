//! The host's side of a transaction.

use std::sync::Arc;

use super::message::{AuthMessage, FailureSide};
use super::{AuthFailure, AuthHash, AuthNames, AuthNonce, AuthSecrets, AuthSeed, DhGroup, Responder, Response};
use crate::fabrics::Nqn;

/// Why a host is not authenticated, or does not trust its controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The controller asks for authentication, and there is no secret.
    #[error("the target asks for authentication; name the file with this host's secret by ?secret=FILE")]
    NoSecret,
    /// The controller has refused.
    #[error("the target refuses the authentication ({0:?}); see whether both sides have the same secrets")]
    Refused(AuthFailure),
    /// The controller does not have its secret.
    #[error("the target does not know its own secret; see whether both sides have the same, and who answers there")]
    Impostor,
    /// The controller does not authenticate itself.
    #[error("the target does not authenticate itself; give it its secret, or name none by ctrl_secret= here")]
    OneSided,
    /// The controller breaks the protocol.
    #[error("the target breaks the protocol of authentication ({0:?}); see its log")]
    Malformed(AuthFailure),
}

/// What the host is to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthStep {
    /// Send this by Authentication Send, then call [`AuthHost::sent`].
    Send(Vec<u8>),
    /// Receive by Authentication Receive, then call [`AuthHost::received`].
    Receive,
    /// Both sides are who they claim to be.
    Done,
    /// The connection is to be closed.
    Failed(AuthError),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum AuthHostPhase {
    Negotiating,
    Challenged,
    /// The values that the controller has to respond to; unset if it need not.
    Replied(Option<Expected>),
    Confirming,
    /// A failure is being told.
    Failing(AuthError),
    Over,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Expected {
    hash: AuthHash,
    shared: Option<Vec<u8>>,
}

/// The host's side of a transaction, on one queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthHost {
    names: AuthNames,
    secrets: Arc<AuthSecrets>,
    nonce: AuthNonce,
    phase: AuthHostPhase,
}

impl AuthHost {
    /// A transaction of its own number.
    pub fn new(host: Nqn, subsystem: Nqn, secrets: Arc<AuthSecrets>, seed: &AuthSeed, number: u64) -> AuthHost {
        let names = AuthNames { host, subsystem };
        AuthHost { names, secrets, nonce: seed.nonce(number), phase: AuthHostPhase::Negotiating }
    }

    /// Whether the controller has to authenticate itself, too.
    pub fn is_mutual(&self) -> bool {
        self.secrets.controller.is_some()
    }

    /// What follows an accepted Connect: the first message if the controller asks for an authentication, `None` if the
    /// queue may be used as it is.
    ///
    /// # Errors
    /// It may not: one side has no secret for the other.
    pub fn after_connect(auth: Option<&AuthHost>, is_asked: bool) -> Result<Option<Vec<u8>>, AuthError> {
        match auth {
            None if is_asked => Err(AuthError::NoSecret),
            Some(auth) if is_asked => Ok(Some(auth.begin())),
            Some(auth) if auth.is_mutual() => Err(AuthError::OneSided),
            _ => Ok(None),
        }
    }

    /// What this host has found, once it is telling it: the controller may close the connection before it answers.
    pub fn verdict(&self) -> Option<AuthError> {
        match self.phase {
            AuthHostPhase::Failing(error) => Some(error),
            _ => None,
        }
    }

    /// The first message.
    pub fn begin(&self) -> Vec<u8> {
        let hashes = AuthHash::ALL.map(AuthHash::id).to_vec();
        let groups = DhGroup::ALL.map(DhGroup::id).to_vec();
        self.bytes(&AuthMessage::Negotiate { wants_channel: false, hashes, groups })
    }

    /// The message was sent and accepted.
    pub fn sent(&mut self) -> AuthStep {
        match &self.phase {
            AuthHostPhase::Negotiating => {
                self.phase = AuthHostPhase::Challenged;
                AuthStep::Receive
            }
            AuthHostPhase::Challenged | AuthHostPhase::Replied(_) => AuthStep::Receive,
            AuthHostPhase::Confirming => {
                self.phase = AuthHostPhase::Over;
                AuthStep::Done
            }
            AuthHostPhase::Failing(error) => AuthStep::Failed(*error),
            AuthHostPhase::Over => AuthStep::Done,
        }
    }

    /// A message was received.
    pub fn received(&mut self, bytes: &[u8]) -> AuthStep {
        let message = match AuthMessage::parse(bytes) {
            Ok((transaction, message)) if transaction == self.nonce.transaction => message,
            Ok(_) => return self.fail(AuthFailure::Payload, AuthError::Malformed(AuthFailure::Payload)),
            Err(failure) => return self.fail(failure, AuthError::Malformed(failure)),
        };
        match (std::mem::replace(&mut self.phase, AuthHostPhase::Over), message) {
            (_, AuthMessage::Failure(failure, FailureSide::Controller)) => {
                AuthStep::Failed(AuthError::Refused(failure))
            }
            (AuthHostPhase::Challenged, AuthMessage::Challenge { hash, group, sequence, challenge, public }) => {
                self.reply(hash, group, sequence, &challenge, &public)
            }
            (AuthHostPhase::Replied(None), AuthMessage::Success1(_)) => AuthStep::Done,
            (AuthHostPhase::Replied(Some(_)), AuthMessage::Success1(None)) => {
                self.fail(AuthFailure::Failed, AuthError::OneSided)
            }
            (AuthHostPhase::Replied(Some(expected)), AuthMessage::Success1(Some(response))) => {
                self.confirm(&expected, &response)
            }
            _ => self.fail(AuthFailure::Message, AuthError::Malformed(AuthFailure::Message)),
        }
    }

    fn reply(&mut self, hash: AuthHash, group: DhGroup, sequence: u32, challenge: &[u8], public: &[u8]) -> AuthStep {
        let shared = group.shared(&self.nonce.exponent, public);
        if group != DhGroup::Null && shared.is_none() {
            return self.fail(AuthFailure::Payload, AuthError::Malformed(AuthFailure::Payload));
        }
        let response = Response {
            responder: Responder::Host,
            names: &self.names,
            hash,
            secret: &self.secrets.host,
            challenge,
            shared: shared.as_deref(),
            sequence,
            transaction: self.nonce.transaction,
        };
        let is_mutual = self.is_mutual();
        let own = is_mutual.then(|| (self.nonce.sequence, self.nonce.challenge[..hash.bytes()].to_vec()));
        let reply = AuthMessage::Reply {
            response: response.value(),
            challenge: own,
            public: group.public(&self.nonce.exponent),
        };
        self.phase = AuthHostPhase::Replied(is_mutual.then_some(Expected { hash, shared }));
        AuthStep::Send(self.bytes(&reply))
    }

    fn confirm(&mut self, expected: &Expected, response: &[u8]) -> AuthStep {
        let Some(secret) = &self.secrets.controller else { return AuthStep::Done };
        let own = Response {
            responder: Responder::Controller,
            names: &self.names,
            hash: expected.hash,
            secret,
            challenge: &self.nonce.challenge[..expected.hash.bytes()],
            shared: expected.shared.as_deref(),
            sequence: self.nonce.sequence,
            transaction: self.nonce.transaction,
        };
        if !own.is(response) {
            return self.fail(AuthFailure::Failed, AuthError::Impostor);
        }
        self.phase = AuthHostPhase::Confirming;
        AuthStep::Send(self.bytes(&AuthMessage::Success2))
    }

    fn fail(&mut self, failure: AuthFailure, error: AuthError) -> AuthStep {
        self.phase = AuthHostPhase::Failing(error);
        AuthStep::Send(self.bytes(&AuthMessage::Failure(failure, FailureSide::Host)))
    }

    fn bytes(&self, message: &AuthMessage) -> Vec<u8> {
        // Of messages of the host none depends on the hash but by its values.
        message.bytes(self.nonce.transaction, AuthHash::Sha256)
    }
}
