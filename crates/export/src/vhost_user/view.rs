//! What others may see of queues and sessions: plain data, made at the moment somebody asks.
//!
//! The owner of a queue makes a [`QueueView`] when a command asks for one; nothing is kept for it meanwhile. What the
//! export knows of its session it notes after each message, which is no part of any I/O.

use blkyard_mq::HwSnapshot;
use blkyard_virtio::Features;

/// A queue at one moment, as its owner sees it.
#[derive(Clone, Debug)]
pub struct QueueView {
    /// Where its ring stands; none while no front-end runs it.
    pub ring: Option<RingView>,
    /// The hardware queue, as the first of its virtqueues shows it; the others show how it is set, and their own bios.
    pub hw: HwSnapshot,
    /// It fetches no more, and comes to rest once all it fetched is finished.
    pub is_suspending: bool,
}

/// The guest's ring of a queue that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingView {
    /// Entries.
    pub size: u16,
    /// Where in the available ring the next chain is fetched.
    pub next_avail: u16,
    /// Chains fetched and not yet given back.
    pub in_flight: u16,
    /// The front-end keeps a record of them, by which another back-end does them again.
    pub is_recorded: bool,
    /// It made no sense, or its memory went away: it is fetched from no more.
    pub is_broken: bool,
}

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
