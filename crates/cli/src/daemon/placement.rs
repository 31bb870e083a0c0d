//! The rule that assigns queues to lanes.
//!
//! The queues of each export are spread evenly, starting after those of the previous export, unless the export names
//! lanes. All are on one lane if a scheduler orders them, or if the device has too few queues. The lanes of an export
//! depend only on the number of queues of the exports before it and on the other exports of its device.
//!
//! Lanes are pinned to the CPUs that were named for them, in turn, and have their memory on the NUMA node of those.
//!
//! Only computes; moves no queue.

use std::collections::{BTreeMap, BTreeSet};

use blkyard::spec::SpecError;
use blkyard_mq::{CpuPlace, QueueMap};
use blkyard_os::node_of;

/// Placement parameters of one export.
#[derive(Clone, Debug)]
pub struct Share {
    /// Name of the export, for messages.
    pub name: String,
    /// Number of queues.
    pub queues: usize,
    /// Lanes for the queues, in turn; empty to spread them evenly.
    pub named: Option<Vec<usize>>,
    /// Its devices: one, or each namespace of a controller.
    pub devices: Vec<ShareDevice>,
}

/// A device of an export.
#[derive(Clone, Copy, Debug)]
pub struct ShareDevice {
    /// Number of the device.
    pub number: usize,
    /// Number of the first device that has its queues in common with this one: its own if none has.
    pub pool: usize,
    /// Maximum open queues of the pool, for all exports.
    pub queues: usize,
    /// Whether the device's scheduler orders by time or position, and so needs all queues on one lane, the first of the
    /// export's named lanes.
    pub orders: bool,
}

impl Share {
    /// Whether a scheduler of any device orders.
    pub fn orders(&self) -> bool {
        self.devices.iter().any(|device| device.orders)
    }

    /// Whether any device has a limited number of queues.
    pub fn is_limited(&self) -> bool {
        self.devices.iter().any(|device| device.queues < usize::MAX)
    }

    /// Whether it serves the device of this number.
    pub fn serves(&self, device: usize) -> bool {
        self.devices.iter().any(|known| known.number == device)
    }

    /// Whether it serves a device of this pool.
    pub fn uses(&self, pool: usize) -> bool {
        self.devices.iter().any(|known| known.pool == pool)
    }

    /// The pools of its devices, with the queues of each. It has one of those on each lane.
    fn pools(&self) -> BTreeMap<usize, usize> {
        self.devices.iter().map(|device| (device.pool, device.queues)).collect()
    }
}

/// The CPUs of a lane, of those named for all lanes, and the NUMA node of its memory. Both unset if none were named.
pub fn pin_lane(cpus: &[u32], machine: &[CpuPlace], lane: usize) -> (Option<Vec<u32>>, Option<u32>) {
    let own = (!cpus.is_empty()).then(|| vec![cpus[lane % cpus.len()]]);
    let node = own.as_ref().and_then(|cpus| node_of(machine, cpus));
    (own, node)
}

/// The lane of each queue by export, for this number of lanes.
///
/// # Errors
/// An export names a lane that does not exist.
pub fn deal(shares: &[Share], lanes: usize) -> Result<Vec<usize>, SpecError> {
    let mut places = Vec::new();
    let mut used = BTreeMap::<usize, usize>::new();
    for (number, share) in shares.iter().enumerate() {
        // End of the queues so far, so that small exports do not all share the first lane.
        let first = places.len();
        let map = QueueMap::even(share.queues, lanes);
        let spread = |queue: usize| match &share.named {
            Some(named) => named[queue % named.len()],
            None => (map.queue_of(queue) + first) % lanes,
        };
        let wanted = (0..share.queues).map(spread).collect::<BTreeSet<_>>().len();
        let pools = share.pools();
        // Each later export of a pool needs a lane as well.
        let lacks_queues = pools.iter().any(|(pool, queues)| {
            let others = shares[number + 1..].iter().filter(|other| other.uses(*pool)).count();
            let used = used.get(pool).copied().unwrap_or(0);
            wanted > queues.saturating_sub(used + others)
        });
        let is_one = share.orders() || lacks_queues;
        for pool in pools.into_keys() {
            *used.entry(pool).or_default() += if is_one { 1 } else { wanted };
        }
        for queue in 0..share.queues {
            let lane = match &share.named {
                Some(named) if is_one => named[0],
                None if is_one => number % lanes,
                _ => spread(queue),
            };
            if lane >= lanes {
                let cause = format!("no lane {lane}");
                let cure = format!("name lanes from 0 to {}, or run more lanes", lanes - 1);
                return Err(SpecError::new(&share.name, cause, cure));
            }
            places.push(lane);
        }
    }
    Ok(places)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn share(queues: usize, named: Option<Vec<usize>>) -> Share {
        let devices = vec![ShareDevice { number: 0, pool: 0, queues: usize::MAX, orders: false }];
        Share { name: format!("of {queues}"), queues, named, devices }
    }

    #[test]
    fn queues_are_dealt_evenly_and_the_next_export_begins_where_the_last_ended() {
        let shares = [share(4, None), share(1, None), share(2, None)];
        assert_eq!(deal(&shares, 1).unwrap(), [0; 7]);
        assert_eq!(deal(&shares, 2).unwrap(), [0, 0, 1, 1, 0, 1, 0]);
        assert_eq!(deal(&shares, 4).unwrap(), [0, 1, 2, 3, 0, 1, 2]);
    }

    /// Sockets of four cores, numbered as x86 does: the second threads of all cores come after all the first.
    fn machine(sockets: u32) -> Vec<CpuPlace> {
        let cores = 4 * sockets;
        (0..2 * cores).map(|cpu| CpuPlace { node: cpu % cores / 4, core: cpu % cores, cpu }).collect()
    }

    #[test]
    fn queues_have_memory_on_the_node_of_their_lane() {
        let nodes = |sockets: u32, cpus: &[u32], lanes: usize, queues: usize| -> Vec<Option<u32>> {
            let places = deal(&[share(queues, None)], lanes).unwrap();
            places.into_iter().map(|lane| pin_lane(cpus, &machine(sockets), lane).1).collect()
        };
        // One lane for each core: queues follow the sockets.
        let cores: Vec<u32> = (0..16).collect();
        assert_eq!(nodes(1, &cores[..4], 4, 4), [None; 4], "one node: the system's choice is as good");
        assert_eq!(nodes(2, &cores[..8], 8, 8), [[Some(0); 4], [Some(1); 4]].concat());
        let of_four: Vec<_> = (0..4).flat_map(|node| [Some(node); 4]).collect();
        assert_eq!(nodes(4, &cores, 16, 16), of_four);
        // Fewer lanes than queues, one on each socket; second threads are on the socket of their core.
        assert_eq!(nodes(2, &[0, 4], 2, 4), [Some(0), Some(0), Some(1), Some(1)]);
        assert_eq!(nodes(4, &[16, 20, 24, 28], 4, 8), [0, 0, 1, 1, 2, 2, 3, 3].map(Some));
        // More lanes than CPUs that were named, and none named.
        assert_eq!(nodes(2, &[1, 5], 4, 4), [Some(0), Some(1), Some(0), Some(1)]);
        assert_eq!(nodes(4, &[], 4, 4), [None; 4]);
    }

    #[test]
    fn device_with_few_queues_binds_all_its_controllers() {
        let device = |number, queues| ShareDevice { number, pool: number, queues, orders: false };
        let shares = [
            Share { devices: vec![device(0, usize::MAX), device(1, 3)], ..share(2, None) },
            Share { devices: vec![device(1, 3)], ..share(2, None) },
        ];
        // Two queues of device 1 for the first export leave one for the second.
        assert_eq!(deal(&shares, 2).unwrap(), [0, 1, 1, 1]);
    }

    #[test]
    fn devices_with_common_queues_need_one_on_each_lane_together() {
        let device = |number| ShareDevice { number, pool: 1, queues: 2, orders: false };
        let of = |numbers: &[usize]| Share { devices: numbers.iter().copied().map(device).collect(), ..share(2, None) };
        assert_eq!(deal(&[of(&[1, 2, 3])], 2).unwrap(), [0, 1]);
        // One of the two is for the other export.
        assert_eq!(deal(&[of(&[1, 2]), of(&[3])], 2).unwrap(), [0, 0, 1, 1]);
    }

    #[test]
    fn lanes_that_are_named_are_taken_in_turn_and_must_be_there() {
        let shares = [share(1, None), share(3, Some(vec![2, 0]))];
        assert_eq!(deal(&shares, 3).unwrap(), [0, 2, 0, 2]);
        let error = deal(&shares, 2).unwrap_err().to_string();
        assert!(error.contains("of 3") && error.contains("no lane 2") && error.contains("0 to 1"), "{error}");
    }
}
