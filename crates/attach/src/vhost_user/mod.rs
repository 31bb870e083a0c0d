//! vhost-user-blk: the protocol of attached disks.
//!
//! Its requests (`session.rs`), their bytes (`message.rs`), unsolicited messages of a back-end (`channel.rs`), and the
//! rings (`rings.rs`). The core decides when a message is sent, and who is affected.

mod channel;
mod message;
mod rings;
mod session;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blkyard_sys::TimeSource;
use blkyard_virtio::Features;
use blkyard_virtio::driver::BlkRing;

use crate::connector::{Connector, DirectConnector};
use crate::protocol::RemoteOptions;
use crate::{AttachError, RemoteDisk, RemoteQueue};

pub use session::BackendSession;

/// A disk that a vhost-user-blk back-end serves.
pub type Attached = RemoteDisk<BackendSession>;

/// One virtqueue of such a disk, as the driver of a hardware queue.
pub type AttachedQueue = RemoteQueue<BlkRing>;

/// Entries of a ring, at most: as many as QEMU's back-ends take.
pub const QUEUE_SIZE_MAX: u16 = 1024;

/// How a disk is attached.
#[derive(Clone, Debug)]
pub struct AttachConfig {
    /// The back-end's socket.
    pub socket: PathBuf,
    /// Makes the connections to it.
    pub connector: Arc<dyn Connector>,
    /// The clock of its control thread.
    pub clock: Arc<dyn TimeSource>,
    /// Queues to use; all that the back-end has, if it is not said.
    pub queues: Option<u16>,
    /// Entries of each ring: a power of two, up to [`QUEUE_SIZE_MAX`].
    pub queue_size: u16,
    /// Packed rings.
    pub packed: bool,
    /// How long the back-end may take to answer messages: all of a set-up, or of one change.
    pub reply_max: Duration,
    /// How long it may take for a request. After that its session is given up.
    pub io_max: Duration,
    /// How long I/O waits for a back-end that is gone, or is done again at one that does not answer it. After that it
    /// fails, until there is one again.
    pub gone_max: Duration,
}

impl AttachConfig {
    /// The defaults, for a socket.
    pub fn new(socket: impl Into<PathBuf>, clock: Arc<dyn TimeSource>) -> AttachConfig {
        AttachConfig {
            socket: socket.into(),
            connector: Arc::new(DirectConnector),
            clock,
            queues: None,
            // Twice the usual number of requests of a hardware queue; the memory is allocated on use.
            queue_size: 256,
            packed: false,
            // A busy machine answers within milliseconds, and hardly ever within seconds.
            reply_max: Duration::from_secs(10),
            // As in Linux; a flush of a full cache takes that long.
            io_max: Duration::from_secs(30),
            // A daemon restarts within seconds, a supervisor may take its time; guests give a disk half a minute or
            // more.
            gone_max: Duration::from_mins(1),
        }
    }

    /// The name of the disk, for messages.
    pub fn name(&self) -> String {
        format!("vhost-user:{}", self.socket.display())
    }

    fn options(&self) -> RemoteOptions {
        RemoteOptions {
            name: self.name(),
            clock: Arc::clone(&self.clock),
            reply_max: self.reply_max,
            io_max: self.io_max,
            gone_max: self.gone_max,
        }
    }
}

impl Attached {
    /// Connects to the back-end and negotiates everything but memory. Takes at most as long as the back-end's replies
    /// may.
    ///
    /// # Errors
    /// See [`AttachError`]: each names socket, cause and cure.
    pub fn open(config: AttachConfig) -> Result<Attached, AttachError> {
        let options = config.options();
        RemoteDisk::connect(config, options)
    }

    /// The features that were agreed on.
    pub fn features(&self) -> Features {
        self.agreed().features
    }
}
