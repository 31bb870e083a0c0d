//! Authentication of hosts: before their queues are used, and again on a live admin queue.

use std::time::Instant;

use blkyard_nvme::auth::AuthOutcome;
use blkyard_nvme::fabrics::FabricsCommand;
use blkyard_nvme::{AdminCompletion, NvmeStatus};

use super::super::connection::{AfterAuth, ConnectionPhase, WaitingConnect};
use super::{NvmeTcpError, NvmeTcpSession};

impl NvmeTcpSession {
    /// Executes a command of an authentication, which may be a new one of a live association.
    pub(super) fn authenticate(
        &mut self,
        token: u64,
        id: u16,
        (slot, command): (u16, FabricsCommand),
        data: &[u8],
        room: usize,
        now: Instant,
    ) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        if connection.auth.is_none() {
            connection.auth = self.subsystem.authentication(id);
        }
        let Some(auth) = &mut connection.auth else {
            connection.respond(slot, NvmeStatus::INVALID_OPCODE.with_dnr(), 0);
            return Ok(());
        };
        let wrong_length = NvmeStatus::INVALID_DATA_SGL_LENGTH.with_dnr();
        let answer = match command {
            FabricsCommand::AuthSend(bytes) if bytes as usize == data.len() && bytes > 0 => {
                auth.sent(data);
                Ok(Vec::new())
            }
            FabricsCommand::AuthReceive(bytes) if bytes as usize == room => auth.receive(room),
            _ => Err(wrong_length),
        };
        let outcome = auth.outcome();
        let completion = match answer {
            Ok(data) => AdminCompletion { slot, status: NvmeStatus::SUCCESS, result: 0, data },
            Err(status) => AdminCompletion { slot, status, result: 0, data: Vec::new() },
        };
        match outcome {
            AuthOutcome::Pending => connection.queue.complete(completion),
            AuthOutcome::Authenticated => {
                connection.auth = None;
                return self.authenticated(token, completion, now);
            }
            AuthOutcome::Failed(failure) => {
                connection.queue.complete(completion);
                // Before the end of the stream.
                connection.send();
                let peer = connection.peer;
                let host = self.subsystem.association(id).map(|association| association.host().to_string());
                let host = host.unwrap_or_default();
                self.log.warn(format_args!(
                    "{peer}: host {host} is not authenticated ({failure:?}); see whether both sides have the same \
                     secrets"
                ));
                return self.end_admin(token, now);
            }
        }
        Ok(())
    }

    /// A host is authenticated, and is to get this answer.
    fn authenticated(&mut self, token: u64, completion: AdminCompletion, now: Instant) -> Result<(), NvmeTcpError> {
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        match std::mem::replace(&mut connection.phase, ConnectionPhase::New) {
            ConnectionPhase::Authenticating(id, then) => match *then {
                AfterAuth::Admin => {
                    connection.queue.complete(completion);
                    self.opened(token, id);
                }
                AfterAuth::Io(connected, connect) => {
                    connection.queue.complete(completion);
                    connection.send();
                    if connection.queue.is_idle() {
                        self.connect_queue(token, (id, connected), &connect, true);
                    } else {
                        // Its peer reads nothing, after a few hundred bytes.
                        self.disconnect(id, connected.qid);
                        self.connections.remove(&token);
                    }
                }
                AfterAuth::Replace(connect) => {
                    let slot = completion.slot;
                    let connect = WaitingConnect { slot, answer: Some(completion), ..connect };
                    return self.connect(token, connect, now);
                }
            },
            // Once more, of a live association.
            phase => {
                connection.phase = phase;
                connection.queue.complete(completion);
            }
        }
        Ok(())
    }

    /// Ends the connections of hosts that are being authenticated.
    pub(super) fn end_authentications(&mut self, now: Instant) -> Result<(), NvmeTcpError> {
        for connection in self.connections.values_mut() {
            // Of a live association: it has to begin anew.
            connection.auth = None;
        }
        let running =
            self.connections.iter().filter(|(_, one)| matches!(one.phase, ConnectionPhase::Authenticating(..)));
        let running: Vec<_> = running.map(|(token, _)| *token).collect();
        for token in running {
            self.end_admin(token, now)?;
        }
        Ok(())
    }
}
