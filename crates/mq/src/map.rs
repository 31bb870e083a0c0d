//! Maps from CPUs to queues, for each kind of I/O.
//!
//! The rule is that of Linux (`lib/group_cpus.c`, `blk_mq_map_queues`): CPUs form as many groups as there are queues.
//! Every NUMA node gets a share of the groups that matches its CPUs, at least one. Inside a node CPUs are assigned in
//! order with the threads of a core together, and the first groups take the remainder.
//!
//! A device may reserve queues for reads, and for polling submitters. Each kind then has a separate map over its own
//! range of hardware queues; a kind without queues uses those of the default kind (`HCTX_TYPE_*`,
//! `blk_mq_map_swqueue`).

use crate::Op;

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

/// The queue of every CPU, or of other users that share queues.
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

/// Purpose of a hardware queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QueueKind {
    /// All I/O whose kind has no queues of its own.
    #[default]
    Default,
    /// Reads.
    Read,
    /// Polled I/O. No thread sleeps on such a queue.
    Poll,
}

impl QueueKind {
    /// All kinds, in order.
    pub const ALL: [QueueKind; 3] = [QueueKind::Default, QueueKind::Read, QueueKind::Poll];

    /// The kind that an I/O asks for.
    #[inline]
    pub fn of(op: Op, polled: bool) -> QueueKind {
        match op {
            _ if polled => QueueKind::Poll,
            Op::Read => QueueKind::Read,
            _ => QueueKind::Default,
        }
    }

    /// Its name, for people.
    pub fn name(self) -> &'static str {
        match self {
            QueueKind::Default => "default",
            QueueKind::Read => "read",
            QueueKind::Poll => "poll",
        }
    }
}

/// Consecutive hardware queues of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueRange {
    /// The first of them.
    pub first: usize,
    /// Number of queues; 0 if the kind has none of its own.
    pub count: usize,
}

/// Number of hardware queues of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCounts {
    /// For all that has no other; at least one.
    pub default: usize,
    /// For reads.
    pub read: usize,
    /// For submitters that poll.
    pub poll: usize,
}

impl QueueCounts {
    /// So many queues for everything.
    pub fn only(default: usize) -> QueueCounts {
        QueueCounts { default, read: 0, poll: 0 }
    }

    /// The same, but of each kind no more than there are threads to use them.
    #[must_use]
    pub fn up_to(self, threads: usize) -> QueueCounts {
        let QueueCounts { default, read, poll } = self;
        QueueCounts { default: default.min(threads), read: read.min(threads), poll: poll.min(threads) }
    }

    /// All of them.
    pub fn total(self) -> usize {
        self.default + self.read + self.poll
    }

    /// Of one kind.
    pub fn of(self, kind: QueueKind) -> usize {
        match kind {
            QueueKind::Default => self.default,
            QueueKind::Read => self.read,
            QueueKind::Poll => self.poll,
        }
    }

    /// One range after the other: default, read, poll.
    pub fn ranges(self) -> [QueueRange; 3] {
        let QueueCounts { default, read, poll } = self;
        [(0, default), (default, read), (default + read, poll)].map(|(first, count)| QueueRange { first, count })
    }
}

/// The maps of a device: for each CPU and kind, the hardware queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueMaps {
    /// By kind; `None` for a kind without queues.
    maps: [Option<(usize, QueueMap)>; 3],
}

impl QueueMaps {
    /// Maps CPUs to the queues of each kind, by where they sit; `ranges` in the order of [`QueueKind::ALL`].
    ///
    /// # Panics
    /// If the default kind has no queues.
    pub fn spread(places: &[CpuPlace], ranges: [QueueRange; 3]) -> QueueMaps {
        assert!(ranges[0].count > 0, "maps without a default queue");
        let map = |range: QueueRange| (range.count > 0).then(|| (range.first, QueueMap::spread(places, range.count)));
        QueueMaps { maps: ranges.map(map) }
    }

    /// Maps `count` equal members, numbered from zero.
    ///
    /// # Panics
    /// If the default kind has no queues.
    pub fn even(count: usize, ranges: [QueueRange; 3]) -> QueueMaps {
        let places: Vec<_> = (0..count as u32).map(|cpu| CpuPlace { node: 0, core: cpu, cpu }).collect();
        QueueMaps::spread(&places, ranges)
    }

    /// The hardware queue that a CPU uses for this kind of I/O.
    #[inline]
    pub fn queue_of(&self, kind: QueueKind, cpu: usize) -> usize {
        match &self.maps[kind as usize] {
            Some((first, map)) => first + map.queue_of(cpu),
            None if kind == QueueKind::Default => unreachable!("the default kind has queues"),
            None => self.queue_of(QueueKind::Default, cpu),
        }
    }

    /// Kind of a hardware queue: the last that lists it. `None` if no kind does.
    pub fn kind_of(&self, queue: usize) -> Option<QueueKind> {
        let lists = |kind: &&QueueKind| {
            let map = &self.maps[**kind as usize];
            map.as_ref().is_some_and(|(first, map)| (*first..first + map.queues()).contains(&queue))
        };
        QueueKind::ALL.iter().rev().find(lists).copied()
    }

    /// CPUs that use a hardware queue for any kind, each once.
    pub fn cpus_of(&self, queue: usize) -> Vec<usize> {
        let mut cpus: Vec<usize> = Vec::new();
        for (first, map) in self.maps.iter().flatten() {
            if let Some(queue) = queue.checked_sub(*first) {
                cpus.extend(map.cpus_of(queue));
            }
        }
        cpus.sort_unstable();
        cpus.dedup();
        cpus
    }

    /// How many hardware queues there are: one beyond the last that is listed.
    pub fn queues(&self) -> usize {
        self.maps.iter().flatten().map(|(first, map)| first + map.queues()).max().unwrap_or(0)
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

    /// Sockets of four cores, numbered as x86 does: the second threads of all cores come after all the first.
    fn sockets(count: u32) -> Vec<CpuPlace> {
        let cores = 4 * count;
        (0..2 * cores).map(|cpu| CpuPlace { node: cpu % cores / 4, core: cpu % cores, cpu }).collect()
    }

    #[test]
    fn queues_of_two_and_four_sockets_stay_on_a_node() {
        for (count, queues) in [(2, 2), (2, 4), (2, 7), (2, 16), (4, 4), (4, 6), (4, 16), (4, 32)] {
            let places = sockets(count);
            let map = QueueMap::spread(&places, queues);
            let node = |cpu: usize| places[cpu].node;
            let mut each = vec![0; count as usize];
            for cpus in groups(&map).iter().filter(|cpus| !cpus.is_empty()) {
                assert!(
                    cpus.iter().all(|cpu| node(*cpu) == node(cpus[0])),
                    "{count} sockets, {queues} queues: {cpus:?}"
                );
                each[node(cpus[0]) as usize] += 1;
            }
            assert_eq!(each.iter().sum::<usize>(), queues, "all queues are used");
            assert!(each.iter().max().unwrap() - each.iter().min().unwrap() <= 1, "{each:?}");
        }
        // Both threads of a core use one queue.
        let (two, four) = (QueueMap::spread(&sockets(2), 8), QueueMap::spread(&sockets(4), 16));
        assert!((0..8).all(|cpu| two.queue_of(cpu) == cpu && two.queue_of(cpu + 8) == cpu));
        assert!((0..16).all(|cpu| four.queue_of(cpu) == cpu && four.queue_of(cpu + 16) == cpu));
        // Fewer queues than sockets: a socket is not divided.
        assert!((0..16).all(|cpu| QueueMap::spread(&sockets(4), 2).queue_of(cpu) == cpu / 4 % 2));
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

    /// Queues by member, for the three kinds.
    fn table(maps: &QueueMaps, members: usize) -> [Vec<usize>; 3] {
        QueueKind::ALL.map(|kind| (0..members).map(|cpu| maps.queue_of(kind, cpu)).collect())
    }

    #[test]
    fn an_io_asks_for_the_queues_of_its_kind() {
        for (op, polled, kind) in [
            (Op::Read, false, QueueKind::Read),
            (Op::Write, false, QueueKind::Default),
            (Op::Flush, false, QueueKind::Default),
            (Op::Discard, false, QueueKind::Default),
            (Op::WriteZeroes, false, QueueKind::Default),
            (Op::Read, true, QueueKind::Poll),
            (Op::Write, true, QueueKind::Poll),
        ] {
            assert_eq!(QueueKind::of(op, polled), kind, "{op:?}, polled: {polled}");
        }
    }

    #[test]
    fn each_kind_has_its_own_range_and_map() {
        let counts = QueueCounts { default: 2, read: 4, poll: 1 };
        let maps = QueueMaps::even(4, counts.ranges());
        assert_eq!(table(&maps, 4), [vec![0, 0, 1, 1], vec![2, 3, 4, 5], vec![6, 6, 6, 6]]);
        assert_eq!((maps.queues(), counts.total()), (7, 7));
        let kinds: Vec<_> = (0..8).map(|queue| maps.kind_of(queue).map(QueueKind::name)).collect();
        let (default, read, poll) = (Some("default"), Some("read"), Some("poll"));
        assert_eq!(kinds, [default, default, read, read, read, read, poll, None]);
        assert_eq!((maps.cpus_of(1), maps.cpus_of(5), maps.cpus_of(6)), (vec![2, 3], vec![3], vec![0, 1, 2, 3]));
    }

    #[test]
    fn a_kind_without_queues_uses_the_default_ones() {
        let maps = QueueMaps::even(6, QueueCounts::only(4).ranges());
        assert_eq!(table(&maps, 6), [(); 3].map(|()| vec![0, 0, 1, 1, 2, 3]));
        let maps = QueueMaps::even(2, QueueCounts { default: 1, read: 0, poll: 2 }.ranges());
        assert_eq!(table(&maps, 2), [vec![0, 0], vec![0, 0], vec![1, 2]]);
    }

    #[test]
    fn a_queue_that_two_kinds_list_is_mapped_once_and_of_the_later_kind() {
        let both = QueueRange { first: 0, count: 2 };
        let maps = QueueMaps::even(4, [both, both, QueueRange { first: 1, count: 1 }]);
        assert_eq!(table(&maps, 4), [vec![0, 0, 1, 1], vec![0, 0, 1, 1], vec![1; 4]]);
        assert_eq!((maps.cpus_of(0), maps.cpus_of(1)), (vec![0, 1], vec![0, 1, 2, 3]));
        assert_eq!((maps.kind_of(0), maps.kind_of(1)), (Some(QueueKind::Read), Some(QueueKind::Poll)));
        assert_eq!(maps.queues(), 2);
    }

    #[test]
    fn a_cpu_nobody_listed_uses_the_first_queue_of_each_kind() {
        let places = [CpuPlace { node: 0, core: 0, cpu: 0 }, CpuPlace { node: 0, core: 3, cpu: 3 }];
        let maps = QueueMaps::spread(&places, QueueCounts { default: 2, read: 2, poll: 0 }.ranges());
        assert_eq!(table(&maps, 6), [vec![0, 0, 0, 1, 0, 0], vec![2, 2, 2, 3, 2, 2], vec![0, 0, 0, 1, 0, 0]]);
    }
}
