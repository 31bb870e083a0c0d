//! The policies of Linux that measure no time: `numa`, `round-robin`, `queue-depth`.

use crate::load::InFlight;
use crate::policy::{ChoiceReason, PathChoice, PathIo, PathPolicy};
use crate::{PathSet, path::Candidates};

/// NUMA nodes with a cached path each; further nodes share the entries. As the kernel's default for nodes is 64.
const NODES_MAX: usize = 64;

/// Cached current path of each node.
#[derive(Clone, Debug)]
struct CurrentPaths {
    generation: u32,
    paths: [Option<u8>; NODES_MAX],
}

impl Default for CurrentPaths {
    fn default() -> Self {
        CurrentPaths { generation: 0, paths: [None; NODES_MAX] }
    }
}

impl CurrentPaths {
    /// The entry of a node, empty after a change of a path.
    #[inline]
    fn of(&mut self, paths: &PathSet, node: u16) -> &mut Option<u8> {
        if self.generation != paths.generation() {
            *self = CurrentPaths { generation: paths.generation(), ..CurrentPaths::default() };
        }
        &mut self.paths[usize::from(node) % NODES_MAX]
    }
}

fn reason_among(candidates: &Candidates) -> ChoiceReason {
    if candidates.only().is_some() { ChoiceReason::OnlyPath } else { ChoiceReason::Best }
}

/// `numa`: the nearest path, cached for each node until a path changes.
#[derive(Clone, Debug, Default)]
pub struct NumaPolicy {
    current: CurrentPaths,
}

impl PathPolicy for NumaPolicy {
    #[inline]
    fn choose(&mut self, paths: &PathSet, io: &PathIo, now_ns: u64) -> Option<PathChoice> {
        let candidates = paths.candidates();
        // Of equally near paths the first.
        let distance = |path: &usize| paths.node(*path).map_or(u16::MAX, |node| node.abs_diff(io.node));
        let current = self.current.of(paths, io.node);
        if current.is_none() {
            *current = paths.usable().min_by_key(distance).map(|path| path as u8);
        }
        let current = current.map(usize::from).filter(|path| candidates.has(*path));
        let path = current.or_else(|| candidates.clone().min_by_key(distance))?;
        Some(PathChoice::new(path, reason_among(&candidates), io, now_ns))
    }

    fn complete(&mut self, _: PathChoice, _: u64) {}

    fn abandon(&mut self, _: PathChoice) {}
}

/// `round-robin`: the next path in the list, for each node.
#[derive(Clone, Debug, Default)]
pub struct RoundRobin {
    current: CurrentPaths,
}

impl PathPolicy for RoundRobin {
    #[inline]
    fn choose(&mut self, paths: &PathSet, io: &PathIo, now_ns: u64) -> Option<PathChoice> {
        let candidates = paths.candidates();
        let current = self.current.of(paths, io.node);
        let path = match *current {
            Some(path) => candidates.after(usize::from(path))?,
            None => candidates.clone().next()?,
        };
        *current = Some(path as u8);
        Some(PathChoice::new(path, reason_among(&candidates), io, now_ns))
    }

    fn complete(&mut self, _: PathChoice, _: u64) {}

    fn abandon(&mut self, _: PathChoice) {}
}

/// `queue-depth`: the path with the fewest I/Os in flight; the first of equals.
#[derive(Clone, Debug, Default)]
pub struct QueueDepth {
    in_flight: InFlight,
}

impl PathPolicy for QueueDepth {
    #[inline]
    fn choose(&mut self, paths: &PathSet, io: &PathIo, now_ns: u64) -> Option<PathChoice> {
        let candidates = paths.candidates();
        let path = candidates.clone().min_by_key(|path| self.in_flight.of(*path))?;
        self.in_flight.begin(path);
        Some(PathChoice::new(path, reason_among(&candidates), io, now_ns))
    }

    fn complete(&mut self, choice: PathChoice, _: u64) {
        self.in_flight.end(choice.path);
    }

    fn abandon(&mut self, choice: PathChoice) {
        self.in_flight.end(choice.path);
    }
}

#[cfg(test)]
mod tests {
    use blkyard_mq::OpClass;

    use super::*;
    use crate::{AccessState, ConnectionState, PathState};

    fn paths(states: &[(PathState, u16)]) -> PathSet {
        let mut paths = PathSet::new();
        states.iter().for_each(|(state, node)| assert!(paths.add(*state, *node).is_some()));
        paths
    }

    fn io(node: u16) -> PathIo {
        PathIo { class: OpClass::Read, bytes: 512, node }
    }

    const OPTIMIZED: PathState = PathState {
        connection: ConnectionState::Live,
        access: AccessState::Optimized,
        ana_pending: false,
        ready: true,
    };
    const NON_OPTIMIZED: PathState = PathState { access: AccessState::NonOptimized, ..OPTIMIZED };
    const GONE: PathState = PathState { connection: ConnectionState::Dead, ..OPTIMIZED };

    fn chosen(policy: &mut impl PathPolicy, paths: &PathSet, nodes: &[u16]) -> Vec<Option<usize>> {
        let one = |node: &u16| policy.choose(paths, &io(*node), 0).map(|choice| choice.path);
        nodes.iter().map(one).collect()
    }

    #[test]
    fn numa_keeps_the_nearest_path_until_a_path_changes() {
        let mut paths = paths(&[(OPTIMIZED, 3), (OPTIMIZED, 0), (OPTIMIZED, 1), (NON_OPTIMIZED, 2)]);
        let mut numa = NumaPolicy::default();
        assert_eq!(chosen(&mut numa, &paths, &[0, 1, 2, 3, 0, 70]), [1, 2, 0, 0, 1, 0].map(Some));
        paths.set_state(1, GONE);
        assert_eq!(chosen(&mut numa, &paths, &[0, 1, 0]), [2, 2, 2].map(Some));
        [0, 2].into_iter().for_each(|path| paths.set_state(path, GONE));
        assert_eq!(chosen(&mut numa, &paths, &[0, 2]), [3, 3].map(Some));
        paths.set_state(3, GONE);
        assert_eq!(chosen(&mut numa, &paths, &[0]), [None]);
    }

    #[test]
    fn round_robin_takes_paths_in_list_order_for_each_node() {
        let mut paths = paths(&[(OPTIMIZED, 0), (NON_OPTIMIZED, 0), (OPTIMIZED, 0), (OPTIMIZED, 0)]);
        let mut round_robin = RoundRobin::default();
        assert_eq!(chosen(&mut round_robin, &paths, &[0, 0, 1, 0, 0, 1]), [0, 2, 0, 3, 0, 2].map(Some));
        [0, 2, 3].into_iter().for_each(|path| paths.set_state(path, GONE));
        assert_eq!(chosen(&mut round_robin, &paths, &[0, 0]), [1, 1].map(Some));
    }

    #[test]
    fn queue_depth_takes_the_path_with_the_fewest_in_flight() {
        let paths = paths(&[(OPTIMIZED, 0), (OPTIMIZED, 0), (NON_OPTIMIZED, 0)]);
        let mut queue_depth = QueueDepth::default();
        let mut choose = || queue_depth.choose(&paths, &io(0), 0);
        let choices: Vec<_> = (0..5).filter_map(|_| choose()).collect();
        assert_eq!(choices.iter().map(|choice| choice.path).collect::<Vec<_>>(), [0, 1, 0, 1, 0]);
        for choice in choices.into_iter().filter(|choice| choice.path == 0) {
            if choice.start_ns == 0 {
                queue_depth.complete(choice, 10);
            }
        }
        assert_eq!(chosen(&mut queue_depth, &paths, &[0, 0, 0]), [0, 0, 0].map(Some));
    }
}
