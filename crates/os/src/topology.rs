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
    fn threads_of_a_core_count_as_one_lane() {
        let places: Vec<_> = (0..4).map(|cpu| CpuPlace { node: 0, core: 0, cpu }).collect();
        assert_eq!(lanes_default(&places), 1);
        assert_eq!(lanes_default(&[]), 1);
    }
}
