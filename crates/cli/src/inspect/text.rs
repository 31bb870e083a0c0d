//! The tree as text, for people.

use std::collections::BTreeMap;
use std::fmt::Write;

use blkyard::spec::show_size;
use blkyard_mq::FairConfig;

use super::tree::{
    AnaNode, DeviceNode, ExportNode, LaneNode, LatencyNode, OpNode, PathNode, QueueNode, QueueNow, RequestNode,
    SchedulerNode, SessionNode, SessionWait, TrackerNode, Tree, WindowLatency,
};

/// The tree, with the daemon itself or without.
pub fn text(tree: &Tree, with_daemon: bool) -> String {
    let mut out = String::new();
    let daemon = &tree.daemon;
    if with_daemon {
        let uptime = show_uptime(daemon.uptime_s);
        line(&mut out, 0, &format!("blkyard {}, process {}, up for {uptime}", daemon.version, daemon.pid));
    }
    if !tree.exports.is_empty() {
        let window = match tree.window_s {
            None => "I/O is counted since the start; --window SECONDS counts for so long".into(),
            Some(seconds) => format!("I/O is counted for {seconds:.1} s"),
        };
        line(&mut out, 0, &window);
    }
    tree.devices.iter().for_each(|node| device(&mut out, node));
    tree.exports.iter().for_each(|node| export(&mut out, node));
    tree.lanes.iter().for_each(|node| lane(&mut out, node));
    out
}

/// Columns of the longest line, names that are longer excepted.
const COLUMNS_MAX: usize = 100;

/// Adds a line, broken between its words if it is too long.
fn line(out: &mut String, depth: usize, text: &str) {
    let mut indent = depth * 2;
    let mut rest = text;
    loop {
        let room = COLUMNS_MAX.saturating_sub(indent);
        let (now, later) = break_at(rest, room);
        let _ = writeln!(out, "{:indent$}{now}", "");
        let Some(later) = later else { return };
        rest = later;
        indent = depth * 2 + 4;
    }
}

/// The start of a text that has room, and the rest: broken behind the last comma or semicolon that fits, else at the
/// last blank; where neither does, at the first blank there is.
fn break_at(text: &str, room: usize) -> (&str, Option<&str>) {
    if text.chars().count() <= room {
        return (text, None);
    }
    let end = text.char_indices().nth(room).map_or(text.len(), |(at, _)| at);
    let blanks = || text.match_indices(' ').map(|(at, _)| at).filter(|at| !text[..*at].trim_start().is_empty());
    let fitting = || blanks().filter(|at| *at <= end);
    let behind_comma = fitting().rfind(|at| text[..*at].ends_with([',', ';']));
    let at = behind_comma.or_else(|| fitting().next_back()).or_else(|| blanks().next());
    at.map_or((text, None), |at| (text[..at].trim_end(), Some(text[at..].trim_start())))
}

fn device(out: &mut String, node: &DeviceNode) {
    line(out, 0, &format!("device {}: {}", node.number, node.name));
    let access = if node.read_only { "read-only" } else { "writable" };
    let cache = match (node.volatile_cache, node.fua) {
        (false, _) => "write-through",
        (true, false) => "write-back",
        (true, true) => "write-back with FUA",
    };
    line(out, 1, &format!("{}, {access}, {cache}; {}", show_size(node.size_bytes), node.reached));
    let limits = node.limits.iter().map(|(name, limit)| format!("{name} {limit}")).collect::<Vec<_>>();
    line(out, 1, &format!("limits: {}", limits.join(", ")));
    rate(out, &node.rate);
    node.tracker.iter().for_each(|node| tracker(out, node));
    let counters: Vec<_> =
        node.counters.iter().filter(|(_, n)| **n > 0).map(|(name, n)| format!("{name} {n}")).collect();
    if !counters.is_empty() {
        line(out, 1, &format!("counted: {}", counters.join(", ")));
    }
    let ios: u64 = node.paths.iter().map(|path| path.ios).sum();
    node.paths.iter().enumerate().for_each(|(number, node)| path(out, number, node, ios));
}

/// A path of a device, with its share of the I/O of all paths.
fn path(out: &mut String, number: usize, node: &PathNode, ios: u64) {
    let mut words = vec![format!("path {number}: {}", node.name), node.state.clone()];
    if let Some(mean_ns) = node.latency_sum_ns.checked_div(node.ios) {
        let percent = node.ios * 100 / ios;
        words.push(format!("{percent} % of {ios} I/Os, mean latency {}", show_time(mean_ns)));
    }
    words.push(format!("{} in flight", node.in_flight));
    if node.moved > 0 {
        words.push(format!("{} moved to others", node.moved));
    }
    if node.hedges > 0 {
        words.push(format!("{} hedged reads, {} of them first", node.hedges, node.hedges_won));
    }
    words.extend(node.chosen.as_ref().map(|reason| format!("last chosen as: {reason}")));
    line(out, 1, &words.join(", "));
    if let Some(loss) = &node.loss {
        line(out, 2, &format!("not connected: {loss}"));
    }
}

fn tracker(out: &mut String, tracker: &TrackerNode) {
    let settings: Vec<_> = tracker.settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
    line(out, 1, &format!("latency tracker: {}", settings.join(", ")));
    for node in &tracker.nodes {
        let lanes = node.node.map_or("lanes of no node".into(), |node| format!("node {node}"));
        let directions = node.directions.iter().map(|(name, WindowLatency { latency_ns, samples })| {
            let time = if *latency_ns == 0 { "unknown".into() } else { show_time(*latency_ns) };
            format!("{name} {time} ({samples} in the last window)")
        });
        line(out, 2, &format!("{lanes}: {}", directions.collect::<Vec<_>>().join(", ")));
    }
}

/// Rate limits, if any.
fn rate(out: &mut String, rate: &BTreeMap<String, u64>) {
    if !rate.is_empty() {
        let words: Vec<_> = rate.iter().map(|(name, value)| format!("{name} {value}")).collect();
        line(out, 1, &format!("does not exceed: {}", words.join(", ")));
    }
}

fn export(out: &mut String, node: &ExportNode) {
    let devices = match &node.namespaces[..] {
        [] | [_] => format!("device {}", node.device),
        several => {
            let numbers: Vec<_> = several.iter().map(|namespace| namespace.device.to_string()).collect();
            format!("devices {}", numbers.join(", "))
        }
    };
    line(out, 0, &format!("export {}: {}, of {devices}", node.number, node.name));
    rate(out, &node.rate);
    if node.weight != FairConfig::WEIGHT {
        line(out, 1, &format!("scheduler weight: {}", node.weight));
    }
    if node.namespaces.len() > 1 {
        for namespace in &node.namespaces {
            line(out, 1, &format!("namespace {}: device {}", namespace.nsid, namespace.device));
            namespace.ops.iter().filter(|(_, node)| node.ios > 0).for_each(|(name, node)| op(out, name, node));
        }
    }
    match &node.session {
        None => line(out, 1, &format!("waiting for a front-end; {} so far", node.sessions)),
        Some(SessionNode { target: Some(target), io_queues, .. }) => {
            let queues = io_queues.unwrap_or_default();
            line(out, 1, &format!("{} at {}; I/O queues connected: {queues}", target.nqn, target.address));
            for AnaNode { group, state, namespaces } in &target.ana {
                let numbers: Vec<_> = namespaces.iter().map(ToString::to_string).collect();
                line(out, 1, &format!("ANA group {group} is {state}; namespaces {}", numbers.join(", ")));
            }
            for host in &target.hosts {
                line(out, 1, &format!("controller {}: host {}", host.controller, host.nqn));
            }
        }
        Some(session) => {
            let memory = format!("{} in {} regions", show_size(session.memory_bytes), session.regions);
            line(out, 1, &format!("front-end {} is connected and shares {memory}", node.sessions));
            match session.io_queues {
                None => line(out, 1, &format!("features: {}", session.features.join(" "))),
                Some(queues) => line(out, 1, &format!("I/O queues created: {queues}")),
            }
            if let Some(SessionWait { what, ms }) = &session.waits {
                line(out, 1, &format!("{what} waits for requests in flight, for {:.1} s", *ms as f64 / 1000.0));
            }
        }
    }
    if usize::from(node.offered) != node.queues.len() {
        line(out, 1, &format!("offers {} of {} queues to the next front-end", node.offered, node.queues.len()));
    }
    node.queues.iter().for_each(|node| queue(out, node));
}

fn queue(out: &mut String, node: &QueueNode) {
    let now = match &node.now {
        None => "its lane does not answer".into(),
        Some(now) => format!("{}, ring of {}", now.state, now.ring_size),
    };
    let others: Vec<_> = node.shares_with.iter().map(ToString::to_string).collect();
    let shared = match (&others[..], node.shown_with) {
        ([], _) => String::new(),
        (_, Some(first)) => format!(", shares the hardware queue shown with queue {first}"),
        ([other], None) => format!(", shares its hardware queue with queue {other}"),
        (others, None) => format!(", shares its hardware queue with queues {}", others.join(", ")),
    };
    line(out, 1, &format!("queue {} on lane {}: {now}{shared}", node.number, node.lane));
    if node.shown_with.is_none() {
        node.now.iter().for_each(|node| now_of(out, node));
    }
    node.ops.iter().filter(|(_, node)| node.ios > 0).for_each(|(name, node)| op(out, name, node));
    if node.batches.iter().any(|n| *n > 0) {
        let names = ["0", "1", "2", "4", "8", "16", "32+"];
        let batches: Vec<_> = names.iter().zip(node.batches).map(|(name, n)| format!("{name}: {n}")).collect();
        line(out, 2, &format!("batches  {}", batches.join("  ")));
    }
    let counted = node.counters.iter().chain(&node.refusals).filter(|(_, n)| **n > 0);
    let counted: Vec<_> = counted.map(|(name, n)| format!("{name}: {n}")).collect();
    if !counted.is_empty() {
        line(out, 2, &counted.join(", "));
    }
}

/// State from the owner of a queue.
fn now_of(out: &mut String, node: &QueueNow) {
    let tags = &node.tags;
    let mut text = format!("tags {} of {}", tags.in_use, tags.limit);
    if tags.limit < tags.depth {
        let _ = write!(text, " (made for {})", tags.depth);
    }
    if tags.reserved > 0 {
        let _ = write!(text, ", {} reserved", tags.reserved);
    }
    let _ = write!(
        text,
        "; {} in flight, {} dispatched, {} of {} bios",
        node.in_flight, node.dispatch, node.bios, node.bios_max
    );
    for (name, n) in [
        ("waiting", node.waiting),
        ("for the next flush", node.flush_pending),
        ("on the flush in flight", node.flush_running),
        ("times frozen", node.frozen as usize),
        ("times quiesced", node.quiesced as usize),
    ] {
        if n > 0 {
            let _ = write!(text, ", {n} {name}");
        }
    }
    if let Some(held_ns) = node.held_ns {
        let by = if node.state == "held" { "until a dead process is silent" } else { "by a limit" };
        let _ = write!(text, ", held {by} for another {}", show_time(held_ns));
    }
    line(out, 2, &text);
    if let Some(scheduler) = &node.scheduler {
        line(out, 2, &scheduled(scheduler));
    }
    node.requests.iter().for_each(|node| request(out, node));
}

/// One line on a scheduler.
fn scheduled(node: &SchedulerNode) -> String {
    let options: Vec<_> = node.options.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let facts: Vec<_> = node.facts.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let kept = match node.waiting {
        0 => "keeps nothing".into(),
        n => format!("keeps {n}, the oldest for {}", show_time(node.oldest_ns)),
    };
    format!("{} ({}) {kept}; {}", node.name, options.join(" "), facts.join(", "))
}

fn request(out: &mut String, node: &RequestNode) {
    let mut text = format!("tag {:<4} {} {} +{}", node.tag, node.op, node.sector, node.sectors);
    for flag in &node.flags {
        let _ = write!(text, " {flag}");
    }
    let _ = write!(text, ", {}", node.state);
    if let Some(age_ns) = node.age_ns {
        let _ = write!(text, " for {}", show_time(age_ns));
    }
    if node.timed_out {
        text.push_str(", its time is up");
    }
    line(out, 3, &text);
}

fn op(out: &mut String, name: &str, node: &OpNode) {
    let mut text = format!("{name:<5}  {} I/Os", node.ios);
    if node.bytes > 0 {
        let _ = write!(text, ", {}", show_size(node.bytes));
    }
    if node.errors > 0 {
        let _ = write!(text, ", {} failed", node.errors);
    }
    if let Some(latency) = &node.latency {
        let _ = write!(text, "; {}", times(latency));
    }
    line(out, 2, &text);
    if let Some(latency) = &node.latency {
        line(out, 4, &format!("of the mean {}", parts(latency)));
    }
}

/// How times are distributed.
fn times(node: &LatencyNode) -> String {
    let mut text = format!("mean {}", show_time(node.mean_ns));
    for (percent, ns) in &node.percentile_ns {
        let _ = write!(text, ", p{percent} {}", show_time(*ns));
    }
    let _ = write!(text, ", max {}", show_time(node.max_ns));
    text
}

/// Parts of a mean, the largest first.
fn parts(node: &LatencyNode) -> String {
    let samples = node.histogram.iter().map(|(_, count)| count).sum::<u64>().max(1);
    let words = |name: &str| match name {
        "limit" => "held by a limit",
        "scheduler" => "held by the scheduler",
        "tag" => "waiting for a tag",
        "dispatch" => "waiting for the driver",
        _ => "at the device",
    };
    let mut parts: Vec<_> = node.part_sum_ns.iter().filter(|(_, ns)| **ns > 0).collect();
    parts.sort_by_key(|(_, ns)| std::cmp::Reverse(**ns));
    let parts: Vec<_> =
        parts.iter().map(|(name, ns)| format!("{} {}", show_time(**ns / samples), words(name))).collect();
    if parts.is_empty() { "nothing took any time".into() } else { parts.join(", ") }
}

fn lane(out: &mut String, node: &LaneNode) {
    let cpus = match &node.cpus {
        None => "any CPU".into(),
        Some(cpus) => format!("CPU {}", cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    };
    let memory = node.node.map_or_else(String::new, |node| format!(", memory on node {node}"));
    line(
        out,
        0,
        &format!("lane {}: thread {}, on {cpus}{memory}, spins up to {} us", node.number, node.thread, node.spin_us),
    );
    let queues: Vec<_> = node.queues.iter().map(|(export, queue)| format!("{export}/{queue}")).collect();
    line(out, 1, &format!("queues (export/queue): {}", queues.join(" ")));
    if let Some(turn) = &node.turn {
        line(out, 1, &format!("a turn with work takes: {}", times(turn)));
    }
}

/// A time in whole seconds as a person would write it.
fn show_uptime(seconds: u64) -> String {
    if seconds < 60 { format!("{seconds} s") } else { show_time(seconds.saturating_mul(1_000_000_000)) }
}

/// A time as a person would write it: three digits and a unit.
pub fn show_time(ns: u64) -> String {
    let seconds = ns / 1_000_000_000;
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        1_000_000_000..60_000_000_000 => format!("{:.1} s", ns as f64 / 1e9),
        _ if seconds < 3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uptime_has_a_unit_that_fits() {
        for (seconds, text) in [(0, "0 s"), (1, "1 s"), (59, "59 s"), (61, "1 min 1 s"), (7380, "2 h 3 min")] {
            assert_eq!(show_uptime(seconds), text);
        }
    }

    #[test]
    fn long_lines_are_broken_and_lose_nothing() {
        let words: Vec<_> = (0..80).map(|n| format!("limit_number_{n} {n}")).collect();
        for (depth, text) in [(0, words.join(", ")), (3, words.join(" ")), (1, "x".repeat(300)), (2, "short".into())] {
            let mut out = String::new();
            line(&mut out, depth, &text);
            let longest = out.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(longest <= COLUMNS_MAX || !text.contains(' '), "{longest}:\n{out}");
            assert_eq!(out.split_whitespace().collect::<Vec<_>>(), text.split_whitespace().collect::<Vec<_>>());
        }
    }

    #[test]
    fn an_operation_without_data_says_no_size() {
        let mut out = String::new();
        op(&mut out, "flush", &OpNode { ios: 4, bytes: 0, errors: 1, latency: None });
        assert_eq!(out, "    flush  4 I/Os, 1 failed\n");
    }

    #[test]
    fn times_are_readable() {
        for (ns, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (76_500, "76.5 us"),
            (12_300_000, "12.3 ms"),
            (1_500_000_000, "1.5 s"),
            (61_000_000_000, "1 min 1 s"),
            (7_380_000_000_000, "2 h 3 min"),
        ] {
            assert_eq!(show_time(ns), text);
        }
    }
}
