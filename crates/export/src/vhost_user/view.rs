//! What others may see of a session: plain data. The export notes it after each message, which is no part of any I/O.

use blkyard_virtio::Features;

/// A front-end that is connected, as its export knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionView {
    /// What it took of what was offered.
    pub features: Features,
    /// Regions of memory it shares.
    pub regions: usize,
    /// Their bytes, all together.
    pub memory_bytes: u64,
    /// Whether it can be told that the configuration has changed.
    pub has_channel: bool,
    /// What it has said of each queue.
    pub queues: Vec<VringView>,
}

/// What a front-end has said of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VringView {
    /// Entries of its ring; zero before it says.
    pub size: u16,
    /// It may run.
    pub enabled: bool,
    /// It runs.
    pub running: bool,
}
