//! State of a queue for inspection: plain data, made by its owner when a command asks for it.

use blkyard_mq::HwSnapshot;

/// A queue at one moment, as its owner sees it.
#[derive(Clone, Debug)]
pub struct QueueView {
    /// Position of its ring; `None` while no front-end runs it.
    pub ring: Option<RingView>,
    /// The hardware queue, as the first of its client queues shows it; the others show how it is set, and their own
    /// bios.
    pub hw: HwSnapshot,
    /// Whether it drains, and fetches no more.
    pub is_suspending: bool,
}

/// The client's ring of a queue that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingView {
    /// Entries.
    pub size: u16,
    /// Index of the next request to fetch, as the protocol counts.
    pub next: u16,
    /// Requests fetched and not yet completed.
    pub in_flight: u16,
    /// The front-end keeps a record of them, by which another server does them again.
    pub is_recorded: bool,
    /// It made no sense, or its memory went away: it is fetched from no more.
    pub is_broken: bool,
}
