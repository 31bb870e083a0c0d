//! Errors of NVMe commands, worded as object, cause and cure.

use std::io;

use blkyard_attach::VfioUserError;
use blkyard_nvme::{NvmeHostError, NvmeStatus};

/// Reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum NvmeError {
    /// The name belongs to no transport.
    #[error(
        "{0}: not the name of an NVMe device; give vfio-user:SOCKET, nvme-tcp://HOST:PORT/NQN, pci:ADDRESS, /dev/nvmeX, \
         /dev/nvmeXnY or /dev/ngXnY"
    )]
    Name(String),
    /// The device cannot be opened.
    #[error("{name}: {source}; see blkyard nvme list, and run as root")]
    Open {
        /// Name of the device.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// The device cannot be driven by this process.
    #[error(transparent)]
    Device(#[from] crate::DeviceError),
    /// The kernel did not submit the command, or cancelled it.
    #[error("{name}: {source}; {cure}")]
    Kernel {
        /// Name of the device.
        name: String,
        /// The system's error.
        source: io::Error,
        /// What to do.
        cure: &'static str,
    },
    /// The server of the controller failed.
    #[error("{name}: {source}")]
    Server {
        /// Name of the device.
        name: String,
        /// The error.
        source: VfioUserError,
    },
    /// The controller failed.
    #[error("{name}: {source}")]
    Controller {
        /// Name of the device.
        name: String,
        /// The error.
        source: NvmeHostError,
    },
    /// The controller has no I/O queue.
    #[error("{0}: the controller granted no I/O queue; send the command to the admin queue")]
    NoQueue(String),
    /// A command did not end, and the controller could not be reset.
    #[error("{0}: the command did not end, and the controller did not stop; reset the device")]
    Stuck(String),
    /// The controller reported an error for a command.
    #[error("{name}: {command} failed, NVMe status: {status}; {}", cure(*.status))]
    Status {
        /// Name of the device.
        name: String,
        /// Name of the command.
        command: &'static str,
        /// The controller's status.
        status: NvmeStatus,
    },
}

/// What to do about a status.
fn cure(status: NvmeStatus) -> &'static str {
    match status.without_flags() {
        NvmeStatus::INVALID_OPCODE => "the controller does not support the command",
        NvmeStatus::INVALID_FIELD => "the controller does not support one of the values",
        NvmeStatus::INVALID_NAMESPACE => "give a namespace of this controller with -n",
        NvmeStatus::INVALID_LOG_PAGE => "the controller does not have this log page",
        NvmeStatus::LBA_OUT_OF_RANGE => "see id-ns for the size of the namespace",
        NvmeStatus::ABORT_REQUESTED | NvmeStatus::HOST_ABORTED => "it exceeded its timeout; give a longer one with -t",
        _ if status.is_final() => "a retry fails as well; see error-log",
        _ => "retry, or see error-log",
    }
}
