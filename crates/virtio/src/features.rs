//! Feature bits, which device and driver negotiate before the first request.

bitflags::bitflags! {
    /// The feature bits this crate knows. [virtio 1.2, 5.2.3 and 6]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Features: u64 {
        /// The config space has the maximum length of a segment. [5.2.3]
        const SIZE_MAX = 1 << 1;
        /// The config space has the maximum number of segments in a request. [5.2.3]
        const SEG_MAX = 1 << 2;
        /// The disk is read-only.
        const RO = 1 << 5;
        /// The config space has the logical block size.
        const BLK_SIZE = 1 << 6;
        /// There is a cache, and a request that flushes it.
        const FLUSH = 1 << 9;
        /// The config space has the topology.
        const TOPOLOGY = 1 << 10;
        /// The cache can be switched between write-back and write-through in the config space.
        const CONFIG_WCE = 1 << 11;
        /// There is more than one queue.
        const MQ = 1 << 12;
        /// Ranges can be given back.
        const DISCARD = 1 << 13;
        /// Ranges can be zeroed without sending zeroes.
        const WRITE_ZEROES = 1 << 14;
        /// vhost-user's own: we note which pages of guest memory we write. The guest never sees it.
        const LOG_ALL = 1 << 26;
        /// A descriptor may point to a table of descriptors. [2.7.5.3]
        const INDIRECT_DESC = 1 << 28;
        /// Each side publishes the index at which it wants a notification. [2.7.7, 2.7.10]
        const EVENT_IDX = 1 << 29;
        /// vhost-user's own: there are protocol features to negotiate. The guest never sees it.
        const PROTOCOL_FEATURES = 1 << 30;
        /// Not the legacy interface: little-endian, no assumption on how a request is laid out. [6.1]
        const VERSION_1 = 1 << 32;
        /// Rings are packed: descriptors and used elements share one ring. [2.8]
        const RING_PACKED = 1 << 34;
        /// Chains come back in the order they were offered. [2.7.9, 2.8.11]
        const IN_ORDER = 1 << 35;
    }
}
