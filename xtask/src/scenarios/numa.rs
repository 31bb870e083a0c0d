//! A daemon on machines with several NUMA nodes: its memory, and the latency of a device by node.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::pci::program_folder;
use super::{RunsIn, Scenario, ScenarioContext};
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "numa-guest",
        sentence: "with --cpus, the rings and tables of each lane lie on the NUMA node of its CPU",
        place: RunsIn::Guest,
        ours: true,
        tell: numa,
    },
    Scenario {
        name: "numa-tracker",
        sentence: "on machines with 1, 2 and 4 NUMA nodes a latency tracker has the latency of each node's own I/O",
        place: RunsIn::Guest,
        ours: true,
        tell: tracker,
    },
];

/// One daemon serves a disk over both protocols; another attaches both, on a lane of each node, and serves them to a
/// load. Then come its counters, the memory of its lanes, and a list of its memory.
const TASK: &str = "set -e
    export TMPDIR=/tmp
    cd /tmp
    serve() {
        name=$1
        shift
        /host/blkyard serve --control /tmp/$name.control \"$@\" >/tmp/$name 2>&1 &
        until grep -q ready /tmp/$name; do kill -0 $! || { cat /tmp/$name; exit 1; }; sleep 0.1; done
    }
    serve far --device 'null:1G?share=on' --export 'vfio-user:nvme.sock?queues=2' --export 'vhost-user-blk:blk.sock?queues=2'
    serve near --cpus 0,1 --lanes 2 \
        --device 'vfio-user:nvme.sock?queues=2' --export 'vhost-user-blk:one.sock?queues=2' \
        --device 'vhost-user:blk.sock?queues=2' --export 'vhost-user-blk:two.sock?queues=2'
    near=$!
    for disk in one two; do
        /host/blkyard bench vhost-user:$disk.sock --rw randread --iodepth 8 --numjobs 2 --size 4m >bench 2>&1 || { cat bench; exit 1; }
    done
    /host/blkyard inspect --control /tmp/near.control | grep '^lane'
    cat /proc/$near/numa_maps
    kill %1 %2";

fn numa(ground: &ScenarioContext) -> Result<()> {
    let vm = Vm::new(ground.guest, 2).nodes(2).folder(program_folder(ground)?);
    let output = vm.succeed(TASK)?;
    for node in 0..2 {
        let lane = format!("lane {node}: thread lane{node}, on CPU {node}, memory on node {node}");
        ensure!(output.contains(&lane), "{lane:?} is not in:\n{output}");
    }
    // Memory for which a node was asked, and shared memory of it: pages asked for by node, and found by node.
    let (mut found, mut shared) = ([[0_u64; 2]; 2], [0_u64; 2]);
    for line in output.lines() {
        let Some(asked) = line.split(' ').find_map(|word| word.strip_prefix("prefer:")) else { continue };
        let asked: usize = asked.parse().with_context(|| format!("a policy for one node: {line}"))?;
        ensure!(asked < 2, "a node of the machine: {line}");
        for (node, found) in found[asked].iter_mut().enumerate() {
            let pages = pages(line, node);
            *found += pages;
            shared[asked] += if line.contains("memfd:blkyard") { pages } else { 0 };
        }
    }
    for asked in 0..2 {
        ensure!(found[asked][asked] > 0 && shared[asked] > 0, "memory of node {asked} is missing: {found:?}\n{output}");
        ensure!(found[asked][1 - asked] == 0, "memory of node {asked} lies on the other: {found:?}\n{output}");
    }
    let [zero, one] = found.map(|pages| pages.iter().sum::<u64>());
    ground.measured(format!("{zero} pages of rings and buffers on node 0, {one} on node 1"));
    Ok(())
}

/// Pages of a mapping on a node, of its line in `numa_maps`.
fn pages(line: &str, node: usize) -> u64 {
    let name = format!("N{node}=");
    line.split(' ').find_map(|word| word.strip_prefix(&name)?.parse().ok()).unwrap_or(0)
}

/// Latency trackers of machines with these many nodes. Each lane is on a node of its own, and has an export. The device
/// has a given bandwidth, so that its latency grows with the depth of a load, which differs by node.
fn tracker(ground: &ScenarioContext) -> Result<()> {
    let (programs, mut measured) = (program_folder(ground)?, Vec::new());
    for nodes in [1_u16, 2, 4] {
        let cpus: Vec<_> = (0..nodes).map(|cpu| cpu.to_string()).collect();
        let exports: Vec<_> =
            (0..nodes).map(|lane| format!("--export 'vhost-user-blk:{lane}.sock?queues=1&lanes={lane}'")).collect();
        let task = format!(
            "set -e
            export TMPDIR=/tmp
            cd /tmp
            /host/blkyard serve --control c --cpus {} --lanes {nodes} \
                --device 'ram:16M?share=on&mbps=2&tracker=on&tracker_decay=100&tracker_window_us=200000' {} >served 2>&1 &
            until grep -q ready served; do kill -0 $! || {{ cat served; exit 1; }}; sleep 0.1; done
            depth=4
            for lane in {}; do
                /host/blkyard bench vhost-user:$lane.sock --rw randread --iodepth $depth --size 2m >bench 2>&1 \
                    || {{ cat bench; exit 1; }}
                # Until its last window has ended.
                sleep 0.5
                echo after $lane
                /host/blkyard inspect --control c --json
                depth=$((depth * 3))
            done
            kill %1",
            cpus.join(","),
            exports.join(" "),
            cpus.join(" "),
        );
        let vm = Vm::new(ground.guest, nodes).nodes(nodes).folder(&programs);
        let output = vm.succeed(&task)?;
        let trees: Vec<_> = output.split("after ").skip(1).collect();
        ensure!(trees.len() == usize::from(nodes), "a tree for each of {nodes} nodes:\n{output}");
        let mut known: Vec<u64> = Vec::new();
        for (lane, tree) in trees.iter().enumerate() {
            let (_, tree) = tree.split_once('\n').context("a tree")?;
            let tree: Value = serde_json::from_str(tree).with_context(|| tree.to_owned())?;
            let found = tree["devices"][0]["tracker"]["nodes"].as_array().context("no tracker")?.clone();
            // A machine with one node has no node to choose.
            let numbers: Vec<_> = found.iter().map(|node| node["node"].as_u64()).collect();
            let expected: Vec<_> = (0..=lane as u64).map(|node| Some(node).filter(|_| nodes > 1)).collect();
            ensure!(numbers == expected, "nodes {numbers:?} after lane {lane} of {nodes}");
            let latency = |node: &Value| node["directions"]["read"]["latency_ns"].as_u64();
            let now = found.iter().map(latency).collect::<Option<Vec<_>>>().context("no latency")?;
            ensure!(now[..lane] == known[..], "I/O of node {lane} changed the latency of others: {known:?} {now:?}");
            // Three times as deep: three times the latency, but for noise. Never one read at a time: half of what that
            // takes in an emulated guest is the wake-up behind it, which others hide.
            let longer = known.last().is_none_or(|before| now[lane] > 2 * before);
            ensure!(longer && now[lane] > 0, "latency by node: {now:?}");
            known = now;
        }
        measured.push(format!("{nodes} nodes: {:.1?} ms", known.iter().map(|ns| *ns as f64 / 1e6).collect::<Vec<_>>()));
    }
    ground.measured(measured.join("; "));
    Ok(())
}
