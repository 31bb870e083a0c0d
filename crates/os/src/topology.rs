//! The CPUs that this process may run on, with their cores and NUMA nodes.

use std::path::Path;

use blkyard_mq::CpuPlace;
use rustix::thread::{CpuSet, sched_getaffinity};

/// Lanes that are made without being asked for. More queues than lanes share them; beyond eight the disks behind them
/// are busy first.
const LANES_DEFAULT_MAX: usize = 8;

/// The CPUs this process may run on, by number.
///
/// Missing information gets defaults: one node, and each CPU a separate core.
pub fn cpu_places() -> Vec<CpuPlace> {
    let allowed = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    let mut places: Vec<_> =
        (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).map(|cpu| place(cpu as u32)).collect();
    if places.is_empty() {
        places.push(CpuPlace { node: 0, core: 0, cpu: 0 });
    }
    places
}

/// Default number of lanes on these CPUs: one for each core, since threads of a core share the resources of a lane, and
/// at most the CPU quota of the process.
pub fn lanes_default(places: &[CpuPlace]) -> usize {
    let mut cores: Vec<_> = places.iter().map(|place| place.core).collect();
    cores.sort_unstable();
    cores.dedup();
    // Knows of the quota of a control group, which the list of CPUs does not show.
    let quota = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    cores.len().min(quota).clamp(1, LANES_DEFAULT_MAX)
}

/// The NUMA node of a thread that is pinned to these CPUs. `None` if they are on several nodes or unknown, or if the
/// machine has one node: then the kernel's choice is as good.
pub fn node_of(places: &[CpuPlace], cpus: &[u32]) -> Option<u32> {
    let place = |cpu: &u32| places.iter().find(|place| place.cpu == *cpu);
    let first = place(cpus.first()?)?.node;
    let is_local = cpus.iter().all(|cpu| place(cpu).is_some_and(|place| place.node == first));
    (is_local && places.iter().any(|place| place.node != first)).then_some(first)
}

fn place(cpu: u32) -> CpuPlace {
    let folder = format!("/sys/devices/system/cpu/cpu{cpu}");
    let folder = Path::new(&folder);
    // The first thread of a core names it: unlike the core's own number, that is unique among packages.
    let siblings = std::fs::read_to_string(folder.join("topology/thread_siblings_list")).unwrap_or_default();
    CpuPlace { node: node(folder).unwrap_or(0), core: first_number(&siblings).unwrap_or(cpu), cpu }
}

/// A CPU's folder holds a link named after its node.
fn node(folder: &Path) -> Option<u32> {
    let mut names = std::fs::read_dir(folder).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.find_map(|name| name.strip_prefix("node")?.parse().ok())
}

/// The first number of a list such as "0-1" or "3,7".
fn first_number(list: &str) -> Option<u32> {
    list.trim().split([',', '-']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_siblings_are_named_by_their_first() {
        for (list, first) in [("0-1\n", Some(0)), ("3,7", Some(3)), ("12", Some(12)), ("", None), ("x", None)] {
            assert_eq!(first_number(list), first, "{list:?}");
        }
    }

    #[test]
    fn the_cpus_of_this_process_have_places() {
        let places = cpu_places();
        assert!(!places.is_empty());
        assert!(places.windows(2).all(|pair| pair[0].cpu < pair[1].cpu));
        let lanes = lanes_default(&places);
        assert!(lanes >= 1 && lanes <= places.len());
    }

    #[test]
    fn a_pinned_thread_has_a_node_where_there_are_several() {
        let machine = |sockets: u32| -> Vec<_> {
            // Numbered as x86 does: the second threads of all cores come after all the first.
            let cpus = 0..sockets * 8;
            cpus.map(|cpu| CpuPlace { node: cpu % (sockets * 4) / 4, core: cpu % (sockets * 4), cpu }).collect()
        };
        let nodes =
            |sockets, pins: &[&[u32]]| pins.iter().map(|cpus| node_of(&machine(sockets), cpus)).collect::<Vec<_>>();
        let pins: [&[u32]; 6] = [&[0], &[3, 8], &[4], &[0, 4], &[], &[100]];
        assert_eq!(nodes(1, &pins[..3]), [None; 3]);
        assert_eq!(nodes(2, &pins), [Some(0), Some(0), Some(1), None, None, None]);
        assert_eq!(
            nodes(4, &[&[0, 16], &[7, 23], &[8], &[15, 31], &[15, 16]]),
            [Some(0), Some(1), Some(2), Some(3), None]
        );
    }

    #[test]
    fn threads_of_a_core_count_as_one_lane() {
        let places: Vec<_> = (0..4).map(|cpu| CpuPlace { node: 0, core: 0, cpu }).collect();
        assert_eq!(lanes_default(&places), 1);
        assert_eq!(lanes_default(&[]), 1);
    }
}
