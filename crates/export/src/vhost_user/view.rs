//! State of a session for inspection: plain data, updated after each message, off the I/O path.

use blkyard_virtio::Features;

/// A front-end that is connected, as its export knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionView {
    /// Negotiated features.
    pub features: Features,
    /// Regions of memory it shares.
    pub regions: usize,
    /// Their bytes, all together.
    pub memory_bytes: u64,
    /// Whether it can be notified of a changed configuration.
    pub has_channel: bool,
    /// Its settings of each queue.
    pub queues: Vec<VringView>,
}

/// A front-end's settings of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VringView {
    /// Entries of its ring; zero before it says.
    pub size: u16,
    /// It may run.
    pub enabled: bool,
    /// It runs.
    pub running: bool,
}
