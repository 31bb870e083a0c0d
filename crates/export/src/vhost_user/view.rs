//! State of a session for inspection: plain data, updated after each message, off the I/O path.

use blkyard_virtio::Features;

/// A connected front-end, as seen by its export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionView {
    /// Negotiated features.
    pub features: Features,
    /// Number of shared memory regions.
    pub regions: usize,
    /// Total bytes of these regions.
    pub memory_bytes: u64,
    /// Whether it can be notified of a configuration change.
    pub has_channel: bool,
    /// Its settings of each queue.
    pub queues: Vec<VringView>,
}

/// A front-end's settings of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VringView {
    /// Ring size, entries; zero while unset.
    pub size: u16,
    /// Whether the ring is enabled.
    pub enabled: bool,
    /// Whether the ring is running.
    pub running: bool,
}
