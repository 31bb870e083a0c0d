//! Builds the tree of a daemon.
//!
//! Counters are read in place. State that only a queue's owner knows is requested from all queues at once, and waited
//! for together, for a bounded time: a hanging lane is what users most need to see.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blkyard::DevicePath;
use blkyard::rate::{RateSlot, options};
use blkyard::tracker::tracker_options;
use blkyard_export::QueueView;
use blkyard_mq::{
    HwQueueConfig, NamespaceSnapshot, Op, OpClass, QueueLimits, RequestSnapshot, RequestState, SchedulerSnapshot,
    StatsSnapshot,
};
use blkyard_nvme::AnaGroup;
use blkyard_os::{LaneConfig, LaneThread};

use super::tree::{
    AnaNode, DaemonNode, DeviceNode, ExportNode, HostNode, LaneNode, LatencyNode, NamespaceNode, NodeLatency, OpNode,
    PathNode, QueueNode, QueueNow, RequestNode, SCHEMA, SchedulerNode, SessionNode, SessionWait, TagsNode, TargetNode,
    TrackerNode, Tree, WindowLatency,
};
use crate::daemon::{
    ByProtocol, ClientWatch, Daemon, ExportedDevice, SeenPlaces, ServedDevice, ServedExport, ServedLanes, TRACKED,
};

/// How long all queues together have to answer. A lane that turns does so within microseconds; one that sleeps is
/// woken.
const ANSWER_TIME: Duration = Duration::from_secs(2);

/// The tree as it is now.
pub fn collect(daemon: &Daemon) -> Tree {
    let all: Vec<_> = daemon.exports.iter().map(ServedExport::queues).collect();
    let asked: Vec<Vec<_>> = all.iter().map(|queues| queues.iter().map(ClientWatch::look).collect()).collect();
    let seen: Vec<_> = (0..all.len()).map(|export| daemon.lanes.seen(export)).collect();
    let lanes = lane_nodes(&daemon.lanes, &seen);
    let until = Instant::now() + ANSWER_TIME;
    let wait = |asked: Option<std::sync::mpsc::Receiver<QueueView>>| {
        asked?.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    };
    let exports = daemon.exports.iter().zip(&all).zip(asked).enumerate().map(|(number, ((export, queues), asked))| {
        let now = |queue: &ClientWatch, asked| match wait(asked) {
            Some(view) => Some(queue_now(&view)),
            None if queue.is_open() => None,
            None => Some(queue_at_rest(export, &daemon.devices[export.devices[0].device])),
        };
        let SeenPlaces { lanes, hardware_queues } = &seen[number];
        let queues = queues.iter().zip(lanes).zip(asked).enumerate();
        let queues = queues.map(|(queue_number, ((queue, lane), asked))| {
            let node = queue_node(queue_number, queue, *lane, now(queue, asked));
            node.sharing(hardware_queues.iter().find(|numbers| numbers.contains(&queue_number)))
        });
        export_node(number, export, namespace_nodes(export, &all[number]), queues.collect())
    });
    Tree {
        schema: SCHEMA,
        window_s: None,
        exports: exports.collect(),
        daemon: DaemonNode {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            uptime_s: daemon.started.elapsed().as_secs(),
            stats_s: daemon.stats_every().unwrap_or(0),
        },
        devices: daemon
            .devices
            .iter()
            .enumerate()
            .map(|(number, device)| device_node(daemon, number, device))
            .collect(),
        lanes,
    }
}

fn device_node(daemon: &Daemon, number: usize, served: &ServedDevice) -> DeviceNode {
    let (device, info) = (&served.device, served.info());
    DeviceNode {
        number,
        name: info.name.clone(),
        reached: device.describe(),
        size_bytes: info.capacity_sectors << blkyard_mq::SECTOR_SHIFT,
        read_only: info.read_only,
        volatile_cache: info.volatile_cache,
        fua: info.fua,
        limits: limits_by_name(&info.limits),
        rate: rate(&served.rate),
        tracker: tracker_node(daemon, number),
        counters: device.counters(),
        paths: device.paths().into_iter().map(path_node).collect(),
    }
}

fn path_node(path: DevicePath) -> PathNode {
    let DevicePath { name, state, loss, counters } = path;
    PathNode {
        name,
        state: state.name().to_owned(),
        loss,
        ios: counters.ios,
        latency_sum_ns: counters.latency_ns,
        in_flight: counters.in_flight,
        moved: counters.moved,
        hedges: counters.hedges,
        hedges_won: counters.hedges_won,
        chosen: counters.reason.map(|reason| reason.name().to_owned()),
    }
}

fn rate(rate: &RateSlot) -> BTreeMap<String, u64> {
    options(rate.config()).into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// Limits by their names.
pub fn limits_by_name(limits: &QueueLimits) -> BTreeMap<String, u64> {
    let all = [
        ("logical_block_bytes", limits.logical_block_bytes),
        ("physical_block_bytes", limits.physical_block_bytes),
        ("sectors_max", limits.sectors_max),
        ("segments_max", u32::from(limits.segments_max)),
        ("segment_bytes_max", limits.segment_bytes_max),
        ("segment_boundary_mask", limits.segment_boundary_mask),
        ("chunk_sectors", limits.chunk_sectors),
        ("virt_boundary_mask", limits.virt_boundary_mask),
        ("dma_alignment_mask", limits.dma_alignment_mask),
        ("write_granularity_bytes", limits.write_granularity_bytes),
        ("atomic_sectors_max", limits.atomic_sectors_max),
        ("discard_sectors_max", limits.discard_sectors_max),
        ("discard_granularity_bytes", limits.discard_granularity_bytes),
        ("discard_alignment_bytes", limits.discard_alignment_bytes),
        ("discard_segments_max", u32::from(limits.discard_segments_max)),
        ("write_zeroes_sectors_max", limits.write_zeroes_sectors_max),
    ];
    all.map(|(name, limit)| (name.to_owned(), u64::from(limit))).into()
}

fn tracker_node(daemon: &Daemon, device: usize) -> Option<TrackerNode> {
    let config = daemon.trackers.config(device)?;
    let options = tracker_options(Some(config)).into_iter();
    let nodes = daemon.trackers.nodes(device).into_iter().map(|node| {
        let window = |place: usize| WindowLatency { latency_ns: node.latency_ns[place], samples: node.samples[place] };
        let directions = TRACKED.iter().enumerate().map(|(place, class)| (op_name(*class).to_owned(), window(place)));
        NodeLatency { node: node.node, directions: directions.collect() }
    });
    Some(TrackerNode {
        settings: options.filter_map(|(key, value)| Some((key.to_owned(), value?))).collect(),
        nodes: nodes.collect(),
    })
}

/// The namespaces of an export, with their counters over all of its queues.
fn namespace_nodes(export: &ServedExport, queues: &[ClientWatch]) -> Vec<NamespaceNode> {
    let node = |(place, of): (usize, &ExportedDevice)| {
        let mut stats = StatsSnapshot::default();
        queues.iter().filter_map(|queue| queue.stats().get(place)).for_each(|queue| stats.merge(&queue.snapshot()));
        Some(NamespaceNode { nsid: of.nsid?, device: of.device, ops: ops_of(&stats) })
    };
    export.devices.iter().enumerate().filter_map(node).collect()
}

fn ops_of(stats: &StatsSnapshot) -> BTreeMap<String, OpNode> {
    OpClass::ALL.map(|class| (op_name(class).to_owned(), OpNode::of(stats.op(class)))).into()
}

fn export_node(
    number: usize,
    export: &ServedExport,
    namespaces: Vec<NamespaceNode>,
    queues: Vec<QueueNode>,
) -> ExportNode {
    let session = export.front_end.session().map(|session| match session {
        ByProtocol::VhostUser(session) => SessionNode {
            features: session.features.iter_names().map(|(name, _)| name.to_owned()).collect(),
            memory_bytes: session.memory_bytes,
            regions: session.regions,
            has_channel: session.has_channel,
            io_queues: None,
            waits: None,
            target: None,
        },
        ByProtocol::VfioUser(session) => SessionNode {
            features: Vec::new(),
            memory_bytes: session.memory_bytes,
            regions: session.dma_maps,
            // An asynchronous event.
            has_channel: true,
            io_queues: Some(session.io_queues),
            waits: session
                .waits
                .map(|(what, waited)| SessionWait { what: what.to_owned(), ms: waited.as_millis() as u64 }),
            target: None,
        },
        ByProtocol::NvmeTcp(session) => SessionNode {
            features: Vec::new(),
            memory_bytes: session.memory_bytes,
            regions: 1,
            has_channel: true,
            io_queues: Some(session.queues),
            waits: None,
            target: Some(TargetNode {
                address: session.address.map(|address| address.to_string()).unwrap_or_default(),
                nqn: session.nqn,
                ana: session.ana.into_iter().map(ana_node).collect(),
                hosts: session.hosts.into_iter().map(|(controller, nqn)| HostNode { controller, nqn }).collect(),
            }),
        },
    });
    ExportNode {
        number,
        name: export.name.clone(),
        device: export.devices[0].device,
        namespaces,
        rate: rate(&export.rate),
        weight: export.weight.get(),
        sessions: export.front_end.sessions(),
        offered: export.front_end.offered(),
        session,
        queues,
    }
}

fn ana_node(group: AnaGroup) -> AnaNode {
    AnaNode { group: group.id, state: group.state.name().to_owned(), namespaces: group.namespaces }
}

fn queue_node(number: usize, queue: &ClientWatch, lane: usize, now: Option<QueueNow>) -> QueueNode {
    let mut stats = StatsSnapshot::default();
    queue.stats().iter().for_each(|of_device| stats.merge(&of_device.snapshot()));
    let refusals = queue.refusals().into_iter();
    QueueNode {
        number,
        lane,
        shown_with: None,
        shares_with: Vec::new(),
        now,
        ops: ops_of(&stats),
        batches: stats.dispatched,
        counters: counters(&stats),
        refusals: refusals.filter(|(_, n)| *n > 0).map(|(reason, n)| (reason.to_owned(), n)).collect(),
    }
}

impl QueueNode {
    /// The same, with the numbers of all queues that its hardware queue serves.
    fn sharing(mut self, numbers: Option<&Vec<usize>>) -> QueueNode {
        self.shares_with = numbers.into_iter().flatten().copied().filter(|number| *number != self.number).collect();
        self.shown_with = numbers.and_then(|numbers| numbers.first().copied()).filter(|first| *first != self.number);
        self
    }
}

fn counters(stats: &StatsSnapshot) -> BTreeMap<String, u64> {
    let [back, front, discards] = stats.merged;
    let all = [
        ("refused", stats.refused),
        ("slow", stats.slow),
        ("slow_now", stats.slow_now),
        ("merged_back", back),
        ("merged_front", front),
        ("merged_discards", discards),
        ("requeued", stats.requeued),
        ("timed_out", stats.timed_out),
        ("flushes", stats.flushes),
        ("held", stats.held),
        ("held_ns", stats.held_ns),
    ];
    all.map(|(name, count)| (name.to_owned(), count)).into()
}

/// The name of a class of operations.
pub fn op_name(class: OpClass) -> &'static str {
    match class {
        OpClass::Read => "read",
        OpClass::Write => "write",
        OpClass::Flush => "flush",
        OpClass::Trim => "trim",
    }
}

/// A queue without a poller: empty, with the settings for its next one.
fn queue_at_rest(export: &ServedExport, served: &ServedDevice) -> QueueNow {
    let depth = export.depth_max;
    let scheduler = served.scheduler().build(1, 1, &served.info());
    let scheduler = scheduler.map(|scheduler| scheduler_node(&scheduler.snapshot(0)));
    let limit = export.front_end.depth().unwrap_or(depth);
    QueueNow {
        state: "at rest".into(),
        ring_size: 0,
        chains: 0,
        bios: 0,
        bios_max: HwQueueConfig::default().bios_max,
        waiting: 0,
        held_ns: None,
        dispatch: 0,
        in_flight: 0,
        tags: TagsNode { depth, limit, reserved: 0, in_use: 0, active_users: 0 },
        dispatch_busy: 0,
        frozen: 0,
        quiesced: 0,
        flush_pending: 0,
        flush_running: 0,
        scheduler,
        requests: Vec::new(),
    }
}

fn queue_now(view: &QueueView) -> QueueNow {
    let state = match &view.ring {
        None => "at rest",
        Some(ring) if ring.is_broken => "broken",
        Some(_) if view.is_suspending => "suspending",
        Some(_) if view.held_ns.is_some() => "held",
        Some(_) => "running",
    };
    let hw = &view.hw;
    let sum = |of: fn(&NamespaceSnapshot) -> usize| hw.namespaces.iter().map(of).sum();
    QueueNow {
        state: state.into(),
        ring_size: view.ring.map_or(0, |ring| ring.size),
        chains: view.ring.map_or(0, |ring| ring.in_flight),
        bios: hw.bios,
        bios_max: hw.bios_max,
        waiting: sum(|namespace| namespace.waiting),
        held_ns: hw.namespaces.iter().filter_map(|namespace| namespace.held_ns).chain(view.held_ns).max(),
        dispatch: hw.dispatch,
        in_flight: hw.in_flight,
        tags: TagsNode {
            depth: hw.depth,
            limit: hw.depth_limit,
            reserved: hw.reserved,
            in_use: hw.tags_in_use,
            active_users: sum(|namespace| namespace.active.into()),
        },
        dispatch_busy: hw.dispatch_busy,
        frozen: hw.frozen,
        quiesced: hw.quiesced,
        flush_pending: sum(|namespace| namespace.flush.pending),
        flush_running: sum(|namespace| namespace.flush.running),
        scheduler: hw.namespaces.iter().find_map(|namespace| namespace.scheduler.as_ref()).map(scheduler_node),
        requests: hw.requests.iter().map(request_node).collect(),
    }
}

fn scheduler_node(scheduler: &SchedulerSnapshot) -> SchedulerNode {
    SchedulerNode {
        name: scheduler.name.into(),
        options: scheduler.options.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
        waiting: scheduler.waiting,
        oldest_ns: scheduler.oldest_ns,
        facts: scheduler.facts.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
    }
}

pub(crate) fn request_node(request: &RequestSnapshot) -> RequestNode {
    let op = match request.op {
        Op::Read => "read",
        Op::Write => "write",
        Op::Flush => "flush",
        Op::Discard => "discard",
        Op::WriteZeroes => "write-zeroes",
    };
    let state = match request.state {
        RequestState::Idle => "waiting",
        RequestState::InFlight => "in flight",
        RequestState::Complete => "complete",
    };
    RequestNode {
        tag: request.tag,
        op: op.into(),
        flags: request.flags.iter_names().map(|(name, _)| name.to_owned()).collect(),
        sector: request.sector,
        sectors: request.sectors,
        state: state.into(),
        age_ns: request.age_ns,
        timed_out: request.timed_out,
    }
}

fn lane_nodes(lanes: &ServedLanes, exports: &[SeenPlaces]) -> Vec<LaneNode> {
    let lanes = lanes.lanes();
    let see = |(number, thread): (usize, &LaneThread<_>)| {
        let LaneConfig { cpus, node, policy, .. } = lanes.config(number);
        let of_export = |(export, seen): (usize, &SeenPlaces)| {
            let queues = seen.lanes.iter().enumerate().filter(|(_, lane)| **lane == number);
            queues.map(|(queue, _)| (export, queue)).collect::<Vec<_>>()
        };
        LaneNode {
            number,
            thread: thread.name().to_owned(),
            cpus,
            node,
            spin_us: policy.longest_ns() / 1000,
            strays: thread.ring().strays(),
            turn: LatencyNode::of_turns(&thread.turns().snapshot()),
            queues: exports.iter().enumerate().flat_map(of_export).collect(),
        }
    };
    lanes.threads().iter().enumerate().map(see).collect()
}
