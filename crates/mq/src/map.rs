//! Which queue serves which CPU.
//!
//! The rule is that of Linux (`lib/group_cpus.c`, `blk_mq_map_queues`): CPUs are dealt to as many groups as there are queues;
//! every NUMA node gets a share of the groups that matches its CPUs, at least one; inside a node CPUs go in order with the threads of a
//! core together, and the first groups take what is left over.

/// Where a CPU sits. Numbers are the system's and need not be dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuPlace {
    /// NUMA node.
    pub node: u32,
    /// Core within the system; threads of one core share it.
    pub core: u32,
    /// The CPU's own number.
    pub cpu: u32,
}

/// For every CPU, or whatever else shares queues, the queue it uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueMap {
    queue_of: Vec<u32>,
    queues: usize,
}

impl QueueMap {
    /// Maps `count` equal members, numbered from zero, to `queues` queues in consecutive runs.
    ///
    /// # Panics
    /// If there are no queues.
    pub fn even(count: usize, queues: usize) -> QueueMap {
        let places: Vec<_> = (0..count as u32).map(|cpu| CpuPlace { node: 0, core: cpu, cpu }).collect();
        QueueMap::spread(&places, queues)
    }

    /// Maps CPUs to `queues` queues by where they sit. A CPU that is not listed uses queue zero.
    ///
    /// # Panics
    /// If there are no queues.
    pub fn spread(places: &[CpuPlace], queues: usize) -> QueueMap {
        assert!(queues > 0, "a map to no queues");
        let mut places = places.to_vec();
        places.sort_unstable();
        let cpus = places.iter().map(|place| place.cpu as usize + 1).max().unwrap_or(0);
        let mut map = QueueMap { queue_of: vec![0; cpus], queues };
        let mut nodes: Vec<&[CpuPlace]> = places.chunk_by(|a, b| a.node == b.node).collect();
        if queues <= nodes.len() {
            for (index, node) in nodes.iter().enumerate() {
                node.iter().for_each(|place| map.queue_of[place.cpu as usize] = (index % queues) as u32);
            }
            return map;
        }
        // The smallest node first, so that its share is not rounded away; then numbered in the nodes' own order.
        nodes.sort_by_key(|node| node.len());
        let (mut groups_left, mut cpus_left) = (queues, places.len());
        let mut shares: Vec<(u32, usize)> = Vec::new();
        for node in &nodes {
            let share = (groups_left * node.len() / cpus_left).clamp(1, node.len());
            shares.push((node[0].node, share));
            groups_left -= share;
            cpus_left -= node.len();
        }
        nodes.sort_by_key(|node| node[0].node);
        let mut first = 0;
        for node in nodes {
            let Some(&(_, groups)) = shares.iter().find(|(number, _)| *number == node[0].node) else { continue };
            let (each, extra) = (node.len() / groups, node.len() % groups);
            let mut rest = node.iter();
            for group in 0..groups {
                let take = each + usize::from(group < extra);
                rest.by_ref().take(take).for_each(|place| map.queue_of[place.cpu as usize] = (first + group) as u32);
            }
            first += groups;
        }
        map
    }

    /// The queue that a CPU uses.
    #[inline]
    pub fn queue_of(&self, cpu: usize) -> usize {
        self.queue_of.get(cpu).map_or(0, |queue| *queue as usize)
    }

    /// The CPUs that use a queue.
    pub fn cpus_of(&self, queue: usize) -> impl Iterator<Item = usize> {
        self.queue_of.iter().enumerate().filter(move |(_, q)| **q as usize == queue).map(|(cpu, _)| cpu)
    }

    /// How many queues the map was made for.
    pub fn queues(&self) -> usize {
        self.queues
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn groups(map: &QueueMap) -> Vec<Vec<usize>> {
        (0..map.queues()).map(|queue| map.cpus_of(queue).collect()).collect()
    }

    #[test]
    fn six_cpus_on_four_queues() {
        assert_eq!(groups(&QueueMap::even(6, 4)), [vec![0, 1], vec![2, 3], vec![4], vec![5]]);
    }

    #[test]
    fn more_queues_than_cpus_leaves_queues_unused() {
        assert_eq!(groups(&QueueMap::even(2, 4)), [vec![0], vec![1], vec![], vec![]]);
    }

    #[test]
    fn threads_of_one_core_share_a_queue() {
        // Four cores of two threads, numbered as x86 does: the second threads come after all the first.
        let places: Vec<_> = (0..8).map(|cpu| CpuPlace { node: 0, core: cpu % 4, cpu }).collect();
        assert_eq!(groups(&QueueMap::spread(&places, 4)), [vec![0, 4], vec![1, 5], vec![2, 6], vec![3, 7]]);
    }

    #[test]
    fn nodes_get_queues_by_their_size_and_at_least_one() {
        let node = |cpu| u32::from(cpu >= 6);
        let places: Vec<_> = (0..8).map(|cpu| CpuPlace { node: node(cpu), core: cpu, cpu }).collect();
        assert_eq!(groups(&QueueMap::spread(&places, 4)), [vec![0, 1], vec![2, 3], vec![4, 5], vec![6, 7]]);
        assert_eq!(groups(&QueueMap::spread(&places, 2)), [vec![0, 1, 2, 3, 4, 5], vec![6, 7]]);
        assert_eq!(groups(&QueueMap::spread(&places, 1)), [(0..8).collect::<Vec<_>>()]);
    }

    proptest! {
        /// Every queue up to the number of CPUs is used, and by CPUs of one node if there are enough queues.
        #[test]
        fn queues_are_used_evenly(cpus in 1_usize..64, queues in 1_usize..64) {
            let map = QueueMap::even(cpus, queues);
            let sizes: Vec<usize> = groups(&map).iter().map(Vec::len).filter(|n| *n > 0).collect();
            prop_assert_eq!(sizes.len(), cpus.min(queues));
            prop_assert_eq!(sizes.iter().sum::<usize>(), cpus);
            prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
            prop_assert!((1..cpus).all(|cpu| map.queue_of(cpu) >= map.queue_of(cpu - 1)));
        }
    }
}
