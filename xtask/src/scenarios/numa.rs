//! Memory of a daemon on a machine with two NUMA nodes.

use anyhow::{Context, Result, ensure};

use super::pci::program_folder;
use super::{RunsIn, Scenario, ScenarioContext};
use crate::vm::Vm;

pub const SCENARIOS: &[Scenario] = &[Scenario {
    name: "numa-guest",
    sentence: "with --cpus, the rings and tables of each lane lie on the NUMA node of its CPU",
    place: RunsIn::Guest,
    ours: true,
    tell: numa,
}];

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
