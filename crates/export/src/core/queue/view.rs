//! State of a queue for inspection: plain data, built by the queue's owner on request.

use blkyard_mq::HwSnapshot;

/// Snapshot of a queue by its owner.
#[derive(Clone, Debug)]
pub struct QueueView {
    /// Position of its ring; `None` without a running session.
    pub ring: Option<RingView>,
    /// The hardware queue, as shown by its first client queue. The others show its settings and their own bios.
    pub hw: HwSnapshot,
    /// Whether the queue drains and fetches no more.
    pub is_suspending: bool,
    /// Time for which nothing is fetched, since the device may execute requests of the process before this one, ns.
    pub held_ns: Option<u64>,
}

/// The client's ring of a running queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingView {
    /// Ring size, entries.
    pub size: u16,
    /// Index of the next request to fetch, in the protocol's terms.
    pub next: u16,
    /// Requests fetched and not completed.
    pub in_flight: u16,
    /// Whether the front-end keeps an in-flight record, from which another server resubmits requests.
    pub is_recorded: bool,
    /// Whether the ring was invalid or its memory truncated: fetching has stopped.
    pub is_broken: bool,
}
