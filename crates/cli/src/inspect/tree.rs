//! The tree of a running daemon, as plain data: the content of `inspect`, and its JSON.
//!
//! Names of fields are part of the interface: fields may be added, and none changes its meaning without a new
//! [`SCHEMA`]. Units are last in the names. Counters are totals since the start of the daemon, or within
//! [`Tree::window_s`].

use std::collections::BTreeMap;

use blkyard_mq::FairConfig;
use serde::{Deserialize, Serialize};

/// The version of the tree's JSON. A field that is removed or changes its meaning gives it the next number; fields that
/// are added do not.
pub const SCHEMA: u32 = 1;

/// Everything.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tree {
    /// The version of this format.
    pub schema: u32,
    /// Seconds within which I/O was counted; unset for since the start of the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_s: Option<f64>,
    /// The daemon itself.
    pub daemon: DaemonNode,
    /// Its devices.
    pub devices: Vec<DeviceNode>,
    /// Its exports.
    pub exports: Vec<ExportNode>,
    /// The threads that do the work.
    pub lanes: Vec<LaneNode>,
}

/// The daemon itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DaemonNode {
    /// Of the program.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Since it serves.
    pub uptime_s: u64,
    /// Seconds between statistics lines of each export; 0 for none.
    pub stats_s: u64,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// Its number: `device:0`.
    pub number: usize,
    /// As the user named it.
    pub name: String,
    /// How I/O reaches it.
    pub reached: String,
    /// Served size.
    pub size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Completed writes may be lost until they are flushed.
    pub volatile_cache: bool,
    /// It makes single writes durable by itself when they say so.
    pub fua: bool,
    /// Limits of one request, by the names of the queue's limits.
    pub limits: BTreeMap<String, u64>,
    /// Rate limits of its exports together, by the names of the options.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rate: BTreeMap<String, u64>,
    /// Its latency tracker, if it is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracker: Option<TrackerNode>,
    /// Counters of unusual events; for files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
    /// Its paths; empty for a device that has one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathNode>,
}

/// A path of a device over several.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PathNode {
    /// Name of the device that is this path.
    pub name: String,
    /// `live`, `live, non-optimized`, `inaccessible`, `changing`, `resetting`, `connecting`, `lost` or another.
    pub state: String,
    /// Why it is not connected, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<String>,
    /// I/Os that completed on it.
    pub ios: u64,
    /// Their latencies together.
    pub latency_sum_ns: u64,
    /// I/Os at it now.
    pub in_flight: u64,
    /// I/Os that it gave back or failed, and that were sent again.
    pub moved: u64,
    /// Reads that were late on another path, and that it was sent as well.
    #[serde(default)]
    pub hedges: u64,
    /// Those that it answered first.
    #[serde(default)]
    pub hedges_won: u64,
    /// Why it was chosen last: `only path`, `best`, `unmeasured` or `probe`; unset if it never was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<String>,
}

/// The latency tracker of a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrackerNode {
    /// Its settings, by the names of the options.
    pub settings: BTreeMap<String, u64>,
    /// The NUMA nodes that had I/O since it is on.
    pub nodes: Vec<NodeLatency>,
}

/// The latency of a device over the last window, for the lanes of one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeLatency {
    /// NUMA node; none for lanes that are not pinned.
    pub node: Option<u32>,
    /// By direction: `read` and `write`.
    pub directions: BTreeMap<String, WindowLatency>,
}

/// The latency of one direction over the last window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WindowLatency {
    /// Mean time at the device, ns; 0 if unknown or forgotten. After idle windows, the part of it that is left.
    pub latency_ns: u64,
    /// I/Os in the window.
    pub samples: u64,
}

/// An export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExportNode {
    /// Its number: `export:0`.
    pub number: usize,
    /// As the user named it.
    pub name: String,
    /// The number of the device behind it; with several namespaces, of the first.
    pub device: usize,
    /// Namespaces of an NVMe controller; empty for other protocols.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<NamespaceNode>,
    /// Rate limits of its queues together, by the names of the options.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rate: BTreeMap<String, u64>,
    /// Its weight beside others of its devices, with `scheduler=fair`.
    #[serde(default = "usual_weight")]
    pub weight: u16,
    /// Front-ends so far.
    pub sessions: u64,
    /// Queues that the next one is offered.
    pub offered: u16,
    /// The one that is connected.
    pub session: Option<SessionNode>,
    /// Its queues.
    pub queues: Vec<QueueNode>,
}

/// Of a daemon that does not know weights.
fn usual_weight() -> u16 {
    FairConfig::WEIGHT
}

/// A namespace of an NVMe controller.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NamespaceNode {
    /// Its identifier (NSID).
    pub nsid: u32,
    /// The number of the device behind it.
    pub device: usize,
    /// By operation, for all queues of the export.
    pub ops: BTreeMap<String, OpNode>,
}

/// A front-end that is connected.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionNode {
    /// The features it took.
    pub features: Vec<String>,
    /// Memory it shares.
    pub memory_bytes: u64,
    /// In so many regions.
    pub regions: usize,
    /// Whether it can be notified of changes.
    pub has_channel: bool,
    /// I/O queues that an NVMe host has created; unset for other protocols.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_queues: Option<usize>,
    /// What waits for requests in flight to end, and for how long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<SessionWait>,
    /// The subsystem of an NVMe/TCP export; unset for other protocols.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<TargetNode>,
}

/// A change of a session that waits for a silent device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionWait {
    /// What waits, in words.
    pub what: String,
    /// For how long.
    pub ms: u64,
}

/// A subsystem that is served over NVMe/TCP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TargetNode {
    /// Address of its listening socket.
    pub address: String,
    /// Its NQN.
    pub nqn: String,
    /// State of each ANA group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ana: Vec<AnaNode>,
    /// The connected hosts.
    pub hosts: Vec<HostNode>,
}

/// An ANA group of an NVMe/TCP export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AnaNode {
    /// Its number.
    pub group: u32,
    /// Its state at this port.
    pub state: String,
    /// Its namespaces.
    pub namespaces: Vec<u32>,
}

/// A host of an NVMe/TCP export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostNode {
    /// Identifier of its controller.
    pub controller: u16,
    /// Its NQN.
    pub nqn: String,
}

/// A client queue, such as a virtqueue, and the hardware queue that it feeds. Operations are counted for each client
/// queue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueueNode {
    /// Its number within the export.
    pub number: usize,
    /// The number of the lane it lives on.
    pub lane: usize,
    /// Number of the queue that shows its hardware queue: tags, requests, batches and other counters; unset for itself.
    #[serde(default)]
    pub shown_with: Option<usize>,
    /// Numbers of the other queues that feed the same hardware queue.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares_with: Vec<usize>,
    /// State from its owner; unset if it did not answer in time.
    pub now: Option<QueueNow>,
    /// By operation.
    pub ops: BTreeMap<String, OpNode>,
    /// Calls to the driver, by how many requests it took: 0, 1, 2, 4, 8, 16, 32 and more.
    pub batches: [u64; 7],
    /// Further counters: bios refused or merged; requests slow, slow now, requeued or timed out; flushes issued; number
    /// and nanoseconds of holds by a limit.
    pub counters: BTreeMap<String, u64>,
    /// Refused requests of the guest, by reason.
    pub refusals: BTreeMap<String, u64>,
}

/// State of a queue from its owner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueueNow {
    /// `at rest`, `running`, `suspending`, `broken`, or `held` while the device may execute requests of the process
    /// before this one.
    pub state: String,
    /// Entries of the guest's ring.
    pub ring_size: u16,
    /// Requests fetched and not given back, such as chains of a virtqueue.
    pub chains: u16,
    /// Bios in the queue.
    pub bios: usize,
    /// Bios there may be.
    pub bios_max: usize,
    /// Of these, how many wait to become requests.
    pub waiting: usize,
    /// For how much longer a limit holds those, or all that comes is held.
    #[serde(default)]
    pub held_ns: Option<u64>,
    /// Requests that wait for the driver.
    pub dispatch: usize,
    /// Requests that the device has.
    pub in_flight: usize,
    /// Tags.
    pub tags: TagsNode,
    /// How often of late the driver left something over: zero for never, 9 to 16 for always.
    pub dispatch_busy: u32,
    /// How often bios are kept out of it.
    pub frozen: u32,
    /// How often requests are kept from the driver.
    pub quiesced: u32,
    /// Bios that wait for the next flush.
    pub flush_pending: usize,
    /// Bios that ride on the flush in flight.
    pub flush_running: usize,
    /// Scheduler of the waiting bios, if any.
    pub scheduler: Option<SchedulerNode>,
    /// Requests that have a tag, by tag.
    pub requests: Vec<RequestNode>,
}

/// A scheduler of a queue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SchedulerNode {
    /// Its name.
    pub name: String,
    /// Its options.
    pub options: BTreeMap<String, String>,
    /// Bios that it keeps.
    pub waiting: usize,
    /// For how long the oldest of them has waited.
    pub oldest_ns: u64,
    /// Further facts.
    pub facts: BTreeMap<String, u64>,
}

/// The tags of a queue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TagsNode {
    /// There are.
    pub depth: usize,
    /// Limit of tags in use: see `set depth=`.
    pub limit: usize,
    /// Are reserved.
    pub reserved: usize,
    /// Are out.
    pub in_use: usize,
    /// Devices that share them and have I/O.
    pub active_users: usize,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RequestNode {
    /// Its tag.
    pub tag: usize,
    /// Read, write, flush, discard, write-zeroes.
    pub op: String,
    /// How.
    pub flags: Vec<String>,
    /// First sector, of 512 bytes.
    pub sector: u64,
    /// How many.
    pub sectors: u32,
    /// `waiting` for the driver, `in flight`, or `complete`.
    pub state: String,
    /// Time since the driver took it; unset while it waits.
    pub age_ns: Option<u64>,
    /// Its time is up, and the driver is at it.
    pub timed_out: bool,
}

/// Counters of one kind of operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OpNode {
    /// Requests completed, well or not.
    pub ios: u64,
    /// Bytes of their ranges.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Latency, as the submitter sees it: from arrival in the queue to the end; unset before the first I/O.
    pub latency: Option<LatencyNode>,
}

/// Times that something took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LatencyNode {
    /// Shortest.
    pub min_ns: u64,
    /// Arithmetic mean.
    pub mean_ns: u64,
    /// Sum.
    pub sum_ns: u64,
    /// Parts of that sum: held by a `limit` or by the `scheduler`, waiting for a `tag`, with a tag and not taken by the
    /// driver (`dispatch`), at the `device`. For I/O only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub part_sum_ns: BTreeMap<String, u64>,
    /// Longest.
    pub max_ns: u64,
    /// Percentiles 50, 90, 99, 99.9 and 99.99, each to one part in 32 and at most the maximum.
    pub percentile_ns: BTreeMap<String, u64>,
    /// Buckets that are not empty: the largest value in nanoseconds, and the count of each.
    pub histogram: Vec<(u64, u64)>,
}

/// A lane.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LaneNode {
    /// Its number: `lane:0`.
    pub number: usize,
    /// The name of its thread.
    pub thread: String,
    /// CPUs to which it is pinned; unset if the system chooses.
    pub cpus: Option<Vec<u32>>,
    /// NUMA node of its memory; unset if the system chooses.
    #[serde(default)]
    pub node: Option<u32>,
    /// Longest busy-polling before it sleeps.
    pub spin_us: u64,
    /// Completions without a request.
    pub strays: u64,
    /// Length of its turns with work. Completions that arrive during a turn are found in the next one.
    #[serde(default)]
    pub turn: Option<LatencyNode>,
    /// Its queues: the numbers of export and queue.
    pub queues: Vec<(usize, usize)>,
}
