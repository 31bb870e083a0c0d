//! Reasons why an association is lost or given up.

use std::time::Duration;

use crate::NvmeStatus;
use crate::auth::AuthError;
use crate::fabrics::fabrics_status;
use crate::tcp::TcpEnd;

/// Reason why an association is lost, or cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FabricsHostError {
    /// No connection, or it was closed.
    #[error(
        "NVMe/TCP: no connection to the target, or it was closed at once; see whether it runs, its address and \
         firewalls between, and whether it wants TLS"
    )]
    Unreachable,
    /// The connection ended by a violation or a TermReq.
    #[error("NVMe/TCP: the connection was terminated ({0:?}); see the log of the target")]
    Terminated(TcpEnd),
    /// A step was not complete in time.
    #[error("NVMe/TCP: {0} was not completed in time; see whether the target hangs")]
    Timeout(&'static str),
    /// All steps of a bring-up together were not complete in time.
    #[error(
        "NVMe/TCP: the controller was not brought up within {limit:?}, and {step} is not complete; see why the target \
         answers slowly{}", if *of_many { ", and name the namespace by ?namespace=N" } else { "" }
    )]
    SlowBringUp {
        /// Name of the step.
        step: &'static str,
        /// Time for all steps.
        limit: Duration,
        /// Whether several namespaces are to be identified.
        of_many: bool,
    },
    /// A command needed for bring-up has failed.
    #[error(
        "NVMe/TCP: {command} failed, {}; see the options of the target for this host",
        fabrics_status::text(*status)
    )]
    Command {
        /// Name of the command.
        command: &'static str,
        /// Status of the controller.
        status: NvmeStatus,
    },
    /// This host is not authenticated, or does not trust the target.
    #[error("NVMe/TCP: {0}")]
    Authentication(AuthError),
    /// The controller asks for keys of TLS that follow from an authentication.
    #[error("NVMe/TCP: the target wants secure channel concatenation, which is not supported; give both a key for TLS")]
    SecureChannel,
    /// Capsules of the controller hold no command.
    #[error("NVMe/TCP: the target reports command capsules of {0} bytes; at least 64 are needed")]
    Capsule(u32),
    /// The controller has no NVM command set.
    #[error("NVMe/TCP: the controller offers no I/O command set; name a subsystem with namespaces")]
    NoCommandSet,
    /// CSTS.CFS
    #[error("NVMe/TCP: the controller reports a fatal error; see the log of the target")]
    Fatal,
    /// An I/O queue was refused or lost.
    #[error("NVMe/TCP: the connection of I/O queue {0} was lost")]
    QueueLost(u16),
    /// An I/O queue was refused.
    #[error(
        "NVMe/TCP: the target refused I/O queue {qid}, {}; {}",
        fabrics_status::text(*status),
        refused_queue_cure(*status)
    )]
    QueueRefused {
        /// The queue.
        qid: u16,
        /// Status of Connect.
        status: NvmeStatus,
    },
    /// A command of an I/O queue was not completed in time.
    #[error("NVMe/TCP: a command of I/O queue {0} was not completed in time; see whether the target hangs")]
    QueueLate(u16),
    /// A log page of the controller is malformed.
    #[error("NVMe/TCP: the target's {0} is malformed")]
    Malformed(&'static str),
    /// A group of namespaces stays in transition.
    #[error("NVMe/TCP: the access state of a namespace is in transition for too long; see the target")]
    AnaTransition,
    /// The controller has asked for a reset, or the user has.
    #[error("NVMe/TCP: the controller is being reset")]
    Reset,
    /// No memory for the admin queue.
    #[error("NVMe/TCP: no memory for the admin queue")]
    Memory,
    /// The user has removed it.
    #[error("NVMe/TCP: is being disconnected; open it again")]
    Removed,
}

impl FabricsHostError {
    /// Whether a later attempt would fail in the same way.
    pub fn is_final(self) -> bool {
        match self {
            FabricsHostError::Command { status, .. } => status.is_final(),
            FabricsHostError::Authentication(_)
            | FabricsHostError::SecureChannel
            | FabricsHostError::Removed
            | FabricsHostError::NoCommandSet => true,
            _ => false,
        }
    }
}

/// What to do about an I/O queue that was refused with this status. The admin queue was not.
fn refused_queue_cure(status: NvmeStatus) -> &'static str {
    match status.without_flags() {
        fabrics_status::AUTHENTICATION_REQUIRED => {
            "see whether the secrets of host or target have changed since the admin queue was authenticated"
        }
        fabrics_status::INVALID_HOST => "see the options of the target for this host",
        _ => "ask for fewer queues",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same numbers are those of protected and read-only ranges for I/O commands.
    #[test]
    fn a_refused_connect_is_told_by_the_names_of_its_statuses() {
        for (status, text) in [
            (fabrics_status::CONTROLLER_BUSY, "no further one is left (181h)"),
            (fabrics_status::INVALID_PARAMETERS.with_dnr(), "such as the name of the subsystem (182h)"),
            (fabrics_status::INVALID_HOST.with_dnr(), "this host is not allowed (184h)"),
            (NvmeStatus::INVALID_FIELD.with_dnr(), "(002h)"),
        ] {
            let connect = FabricsHostError::Command { command: "Connect", status }.to_string();
            let queue = FabricsHostError::QueueRefused { qid: 1, status }.to_string();
            assert!(connect.contains(text) && queue.contains(text), "{connect}; {queue}");
        }
    }

    #[test]
    fn a_refused_io_queue_is_told_with_what_may_help() {
        for (status, cure) in [
            (fabrics_status::AUTHENTICATION_REQUIRED.with_dnr(), "the secrets of host or target"),
            (fabrics_status::INVALID_HOST.with_dnr(), "options of the target for this host"),
            (fabrics_status::CONTROLLER_BUSY, "fewer queues"),
        ] {
            let text = FabricsHostError::QueueRefused { qid: 3, status }.to_string();
            assert!(text.contains("refused I/O queue 3") && text.contains(cure), "{text}");
        }
    }
}
