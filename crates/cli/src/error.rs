//! Errors with which a daemon does not start, or ends: those of `serve` and its parts.

use std::path::PathBuf;

use blkyard::DeviceError;
use blkyard::spec::SpecError;

use crate::plan::PlanError;

/// Reason why `serve` failed or ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A name or file is not understood.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A name is not understood.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A socket cannot be had.
    #[error(transparent)]
    Socket(#[from] blkyard_export::SocketError),
    /// A queue cannot be made.
    #[error("{0}")]
    Queue(String),
    /// A lane cannot run.
    #[error(transparent)]
    Lane(#[from] blkyard_os::LaneError),
    /// The default image cannot be made.
    #[error("image {}: cannot be created: {source}; run this in a writable folder, or name a device", path.display())]
    Image {
        /// The image.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The system gave no thread or descriptor.
    #[error("the daemon cannot start: {0}; see the limits on threads and open files")]
    System(#[from] std::io::Error),
    /// It was told to end, and requests did not complete in time.
    #[error("ended {when} {what}; {cure}")]
    Unfinished {
        /// When it gave up.
        when: String,
        /// Requests in flight.
        what: String,
        /// Their fate.
        cure: String,
    },
    /// A part of the daemon ended by itself.
    #[error("{0}; see the messages above, and report a bug")]
    Broken(String),
}
