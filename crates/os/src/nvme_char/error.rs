//! Errors of namespaces by passthrough, worded as object, cause and cure.

use std::io;
use std::path::PathBuf;

use crate::file::OpenError;
use crate::ring::RingError;

/// Why a namespace cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum NvmeCharError {
    /// It does not exist.
    #[error(
        "{path}: no such device; `blkyard nvme list` shows the namespaces, whose devices are /dev/ngXnY from Linux \
         5.13 on",
        path = path.display()
    )]
    Missing {
        /// The device.
        path: PathBuf,
    },
    /// Not a namespace's character device.
    #[error("{path}: not a character device of an NVMe namespace; {cure}", path = path.display())]
    Kind {
        /// The device.
        path: PathBuf,
        /// What to use instead.
        cure: String,
    },
    /// The user of this process may not open it.
    #[error(
        "{path}: permission denied; run as root, or give the user of this process read and write permission",
        path = path.display()
    )]
    Permission {
        /// The device.
        path: PathBuf,
    },
    /// Another process uses it.
    #[error("{path} is in use: {holder}; stop that program", path = path.display())]
    InUse {
        /// The device.
        path: PathBuf,
        /// Its user.
        holder: String,
    },
    /// It is locked, and no process is seen to use it.
    #[error("{path} is locked, as by I/O in flight of a process that has ended; try again", path = path.display())]
    Held {
        /// The device.
        path: PathBuf,
    },
    /// The block device of the namespace cannot be claimed.
    #[error("{path}: the namespace's block device is needed exclusively: {source}", path = path.display())]
    Block {
        /// The device.
        path: PathBuf,
        /// Error of the block device, with cause and cure.
        #[source]
        source: OpenError,
    },
    /// What another process handed over as the namespace's block device is not that.
    #[error(
        "{path}: what claims its block device is not {block}, so it is another namespace; stop the other daemon, and \
         open the device by its name",
        path = path.display()
    )]
    OtherClaim {
        /// The device.
        path: PathBuf,
        /// Name of its block device.
        block: String,
    },
    /// The kernel offers no queues for polling.
    #[error(
        "{path}: the kernel's driver has no poll queues; start it with the module parameter nvme.poll_queues=N and \
         reset the controller, or leave out poll=on",
        path = path.display()
    )]
    NoPollQueues {
        /// The device.
        path: PathBuf,
    },
    /// No io_uring for passthrough.
    #[error("{path}: {source}", path = path.display())]
    Ring {
        /// The device.
        path: PathBuf,
        /// Cause and cure.
        #[source]
        source: RingError,
    },
    /// A system call or a file of the kernel failed.
    #[error("{path}: {what} failed: {source}; see the kernel's log", path = path.display())]
    System {
        /// The device.
        path: PathBuf,
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}
