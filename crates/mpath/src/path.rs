//! Paths and their states, with the rules of Linux's native multipath.
//!
//! A path is usable if its controller is live (or is being deleted, and still answers), its namespace is ready, no
//! ANA log is pending, and its ANA state is optimized or non-optimized. Non-optimized paths are used only if there is
//! no usable optimized path.

/// Upper bound of paths to one device: twice the ports of a large array.
pub const PATHS_MAX: usize = 16;

/// Asymmetric namespace access (ANA) state of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessState {
    /// Best performance. Also the state of paths of controllers without ANA.
    #[default]
    Optimized,
    /// Usable, slower.
    NonOptimized,
    /// Not usable now.
    Inaccessible,
    /// Not usable any more.
    PersistentLoss,
    /// In transition to another state.
    Change,
}

/// State of the connection to the controller of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConnectionState {
    /// Connected and enabled.
    #[default]
    Live,
    /// Being reset.
    Resetting,
    /// The connection is being established again.
    Connecting,
    /// Being removed; it still executes I/O.
    Deleting,
    /// Gone.
    Dead,
}

/// State of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathState {
    /// State of the connection to its controller.
    pub connection: ConnectionState,
    /// ANA state of the namespace on it.
    pub access: AccessState,
    /// An ANA error was returned, and the log is not read again yet.
    pub ana_pending: bool,
    /// Capacity and identifiers match those of the device.
    pub ready: bool,
}

impl Default for PathState {
    fn default() -> Self {
        PathState {
            connection: ConnectionState::default(),
            access: AccessState::default(),
            ana_pending: false,
            ready: true,
        }
    }
}

/// Access class of a usable path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathClass {
    /// Used first.
    Optimized,
    /// Used without a usable optimized path.
    NonOptimized,
}

impl PathState {
    /// The class of the path; `None` if it is not usable.
    pub fn class(self) -> Option<PathClass> {
        let is_enabled = matches!(self.connection, ConnectionState::Live | ConnectionState::Deleting)
            && !self.ana_pending
            && self.ready;
        match self.access {
            AccessState::Optimized if is_enabled => Some(PathClass::Optimized),
            AccessState::NonOptimized if is_enabled => Some(PathClass::NonOptimized),
            _ => None,
        }
    }

    /// The state in words, for people.
    pub fn name(self) -> &'static str {
        match (self.connection, self.access) {
            (ConnectionState::Dead, _) => "lost",
            (ConnectionState::Connecting, _) => "connecting",
            (ConnectionState::Resetting, _) => "resetting",
            _ if !self.ready => "another device",
            (_, AccessState::Inaccessible) => "inaccessible",
            (_, AccessState::PersistentLoss) => "inaccessible for good",
            (_, AccessState::Change) => "changing",
            _ if self.ana_pending => "changing",
            (ConnectionState::Deleting, _) => "being removed",
            (ConnectionState::Live, AccessState::Optimized) => "live",
            (ConnectionState::Live, AccessState::NonOptimized) => "live, non-optimized",
        }
    }

    /// Whether the path may become usable without intervention. Without a usable path, I/O is queued while some path
    /// is recoverable.
    pub fn is_recoverable(self) -> bool {
        matches!(self.connection, ConnectionState::Live | ConnectionState::Resetting | ConnectionState::Connecting)
    }
}

#[derive(Clone, Copy, Debug)]
struct PathEntry {
    state: PathState,
    node: u16,
}

/// The paths to one device: their states and NUMA nodes. A path is known by its index.
#[derive(Clone, Debug, Default)]
pub struct PathSet {
    paths: Vec<PathEntry>,
    /// Bit set of the usable paths of the best class.
    usable: u32,
    /// Those of them to choose from.
    candidates: u32,
    generation: u32,
}

impl PathSet {
    /// No path.
    pub fn new() -> PathSet {
        PathSet { paths: Vec::with_capacity(PATHS_MAX), ..PathSet::default() }
    }

    /// Adds a path through a port at this NUMA node. Returns its index; `None` if there are [`PATHS_MAX`].
    pub fn add(&mut self, state: PathState, node: u16) -> Option<usize> {
        if self.paths.len() == PATHS_MAX {
            return None;
        }
        self.paths.push(PathEntry { state, node });
        self.update();
        Some(self.paths.len() - 1)
    }

    /// Changes the state of a path; an unknown path stays unknown.
    pub fn set_state(&mut self, path: usize, state: PathState) {
        if let Some(entry) = self.paths.get_mut(path) {
            entry.state = state;
            self.update();
        }
    }

    /// The state of a path.
    pub fn state(&self, path: usize) -> Option<PathState> {
        self.paths.get(path).map(|entry| entry.state)
    }

    /// The NUMA node of a path's port.
    pub fn node(&self, path: usize) -> Option<u16> {
        self.paths.get(path).map(|entry| entry.node)
    }

    /// Number of paths, usable or not.
    pub fn len(&self) -> usize {
        self.paths.len()
    }

    /// Whether there is no path.
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// The paths to choose from, in order: the usable paths of the best class.
    #[inline]
    pub fn candidates(&self) -> Candidates {
        Candidates(self.candidates)
    }

    /// All usable paths of the best class, of which [`PathSet::candidates`] may leave one out.
    #[inline]
    pub(crate) fn usable(&self) -> Candidates {
        Candidates(self.usable)
    }

    /// Number of changes so far: cached choices of another generation are stale.
    #[inline]
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether some path may become usable without intervention.
    pub fn is_recoverable(&self) -> bool {
        self.paths.iter().any(|entry| entry.state.is_recoverable())
    }

    /// What `choose` says of the set without this path, for a second choice. The path is as usable as before, and no
    /// state has changed.
    pub(crate) fn without<R>(&mut self, path: usize, choose: impl FnOnce(&PathSet) -> R) -> R {
        self.candidates &= !(1 << path);
        let choice = choose(self);
        self.candidates = self.usable;
        choice
    }

    fn update(&mut self) {
        let of = |class| {
            let bit = |(path, entry): (usize, &PathEntry)| u32::from(entry.state.class() == Some(class)) << path;
            self.paths.iter().enumerate().map(bit).sum()
        };
        let optimized: u32 = of(PathClass::Optimized);
        self.usable = if optimized == 0 { of(PathClass::NonOptimized) } else { optimized };
        self.candidates = self.usable;
        self.generation = self.generation.wrapping_add(1);
    }
}

/// Indexes of the paths to choose from.
#[derive(Clone, Debug)]
pub struct Candidates(u32);

impl Candidates {
    /// Number of paths.
    #[inline]
    pub fn count(&self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether the path is one of them.
    #[inline]
    pub fn has(&self, path: usize) -> bool {
        path < PATHS_MAX && self.0 >> path & 1 == 1
    }

    /// The others, without those of a bit set.
    #[inline]
    pub(crate) fn except(self, paths: u32) -> Candidates {
        Candidates(self.0 & !paths)
    }

    /// The only path, if there is exactly one.
    #[inline]
    pub fn only(&self) -> Option<usize> {
        (self.0.is_power_of_two()).then(|| self.0.trailing_zeros() as usize)
    }

    /// The first path after this one, in a circle.
    #[inline]
    pub fn after(&self, path: usize) -> Option<usize> {
        let later = self.0 & (u32::MAX << 1).wrapping_shl(path as u32);
        let from = if later == 0 { self.0 } else { later };
        (from != 0).then(|| from.trailing_zeros() as usize)
    }
}

impl Iterator for Candidates {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let path = self.0.trailing_zeros() as usize;
        self.0 &= self.0 - 1;
        // Always so; known here, an index of an array of paths is not checked again.
        (path < PATHS_MAX).then_some(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_usable_by_the_rules_of_native_multipath() {
        use ConnectionState::{Connecting, Dead, Deleting, Live, Resetting};
        let state = PathState::default();
        let rows = [
            (state, Some(PathClass::Optimized)),
            (PathState { connection: Deleting, ..state }, Some(PathClass::Optimized)),
            (PathState { connection: Resetting, ..state }, None),
            (PathState { connection: Connecting, ..state }, None),
            (PathState { connection: Dead, ..state }, None),
            (PathState { ana_pending: true, ..state }, None),
            (PathState { ready: false, ..state }, None),
            (PathState { access: AccessState::NonOptimized, ..state }, Some(PathClass::NonOptimized)),
            (PathState { access: AccessState::Inaccessible, ..state }, None),
            (PathState { access: AccessState::PersistentLoss, ..state }, None),
            (PathState { access: AccessState::Change, ..state }, None),
        ];
        for (state, class) in rows {
            assert_eq!(state.class(), class, "{state:?}");
        }
        let recoverable = [Live, Resetting, Connecting, Deleting, Dead]
            .map(|connection| PathState { connection, ..state }.is_recoverable());
        assert_eq!(recoverable, [true, true, true, false, false]);
    }

    #[test]
    fn candidates_are_of_the_best_class() {
        let mut paths = PathSet::new();
        let non_optimized = PathState { access: AccessState::NonOptimized, ..PathState::default() };
        for state in [non_optimized, PathState::default(), non_optimized, PathState::default()] {
            paths.add(state, 0);
        }
        assert_eq!(paths.candidates().collect::<Vec<_>>(), [1, 3]);
        paths.set_state(1, PathState { ready: false, ..PathState::default() });
        assert_eq!((paths.candidates().only(), paths.candidates().count()), (Some(3), 1));
        paths.set_state(3, PathState { connection: ConnectionState::Dead, ..PathState::default() });
        assert_eq!(paths.candidates().collect::<Vec<_>>(), [0, 2]);
        assert!(paths.is_recoverable() && paths.generation() == 6);
        let circle: Vec<_> = (0..PATHS_MAX).map(|path| paths.candidates().after(path)).collect();
        assert_eq!(circle[..3], [Some(2), Some(2), Some(0)]);
        assert!(circle[3..].iter().all(|path| *path == Some(0)) && !paths.candidates().has(31));
        [0, 2].into_iter().for_each(|path| paths.set_state(path, PathState { ready: false, ..PathState::default() }));
        assert_eq!(
            (paths.candidates().next(), paths.candidates().after(0), paths.candidates().only()),
            (None, None, None)
        );
    }

    #[test]
    fn a_set_is_bounded() {
        let mut paths = PathSet::new();
        assert!(paths.is_empty());
        let added: Vec<_> = (0..=PATHS_MAX).map(|node| paths.add(PathState::default(), node as u16)).collect();
        assert_eq!((added[PATHS_MAX - 1], added[PATHS_MAX], paths.len()), (Some(PATHS_MAX - 1), None, PATHS_MAX));
        assert_eq!((paths.node(3), paths.node(PATHS_MAX), paths.state(PATHS_MAX)), (Some(3), None, None));
    }
}
