//! State of a path, as its connection's owner tells it to the lanes.
//!
//! One thread writes; lanes look for changes once a round, at the cost of a load of a cache line that rarely changes.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use blkyard_mq::{FenceEvidence, Fenced, PathGeneration};

use crate::{AccessState, ConnectionState, PathState};

/// State and proofs of one path. On separate cache lines, whatever is beside it.
#[repr(align(128))]
#[derive(Debug)]
pub struct PathMonitor {
    /// Number of changes so far.
    changes: AtomicU32,
    /// [`PathState`], a byte for each field.
    state: AtomicU32,
    /// Last fenced generation in the high half, and a code of its evidence; zero before the first.
    fence: AtomicU64,
}

impl Default for PathMonitor {
    /// A live path.
    fn default() -> PathMonitor {
        PathMonitor::new(PathState::default())
    }
}

impl PathMonitor {
    /// A path in this state.
    pub fn new(state: PathState) -> PathMonitor {
        PathMonitor { changes: AtomicU32::new(1), state: AtomicU32::new(pack(state)), fence: AtomicU64::new(0) }
    }

    /// Sets the state.
    pub fn set_state(&self, state: PathState) {
        if self.state.swap(pack(state), Relaxed) != pack(state) {
            self.changes.fetch_add(1, Release);
        }
    }

    /// Changes the state.
    pub fn change(&self, change: impl FnOnce(&mut PathState)) {
        let mut state = self.state();
        change(&mut state);
        self.set_state(state);
    }

    /// The state.
    pub fn state(&self) -> PathState {
        unpack(self.state.load(Relaxed))
    }

    /// The device executes no command of generations up to this one any more.
    pub fn fence(&self, through: u32, evidence: FenceEvidence) {
        let code = match evidence {
            FenceEvidence::AssociationEnded => 1,
            FenceEvidence::CrossControllerReset => 2,
            FenceEvidence::QuiesceElapsed => 3,
        };
        let new = u64::from(through) << 32 | code;
        if self.fence.fetch_max(new, Relaxed) < new {
            self.changes.fetch_add(1, Release);
        }
    }

    /// The last proof, for the path of this number.
    pub fn fenced(&self, path: u32) -> Option<Fenced> {
        let fence = self.fence.load(Relaxed);
        let evidence = match fence & 3 {
            1 => FenceEvidence::AssociationEnded,
            2 => FenceEvidence::CrossControllerReset,
            3 => FenceEvidence::QuiesceElapsed,
            _ => return None,
        };
        Some(Fenced::new(PathGeneration { path, generation: (fence >> 32) as u32 }, evidence))
    }

    /// Number of changes so far: whoever has seen it sees what was set before.
    #[inline]
    pub fn changes(&self) -> u32 {
        self.changes.load(Acquire)
    }
}

fn pack(state: PathState) -> u32 {
    let connection = match state.connection {
        ConnectionState::Live => 0,
        ConnectionState::Resetting => 1,
        ConnectionState::Connecting => 2,
        ConnectionState::Deleting => 3,
        ConnectionState::Dead => 4,
    };
    let access = match state.access {
        AccessState::Optimized => 0,
        AccessState::NonOptimized => 1,
        AccessState::Inaccessible => 2,
        AccessState::PersistentLoss => 3,
        AccessState::Change => 4,
    };
    u32::from_le_bytes([connection, access, u8::from(state.ana_pending), u8::from(state.ready)])
}

fn unpack(packed: u32) -> PathState {
    let [connection, access, ana_pending, ready] = packed.to_le_bytes();
    PathState {
        connection: match connection {
            0 => ConnectionState::Live,
            1 => ConnectionState::Resetting,
            2 => ConnectionState::Connecting,
            3 => ConnectionState::Deleting,
            _ => ConnectionState::Dead,
        },
        access: match access {
            0 => AccessState::Optimized,
            1 => AccessState::NonOptimized,
            2 => AccessState::Inaccessible,
            3 => AccessState::PersistentLoss,
            _ => AccessState::Change,
        },
        ana_pending: ana_pending != 0,
        ready: ready != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_told_as_it_was_set() {
        use {AccessState as A, ConnectionState as C};
        let monitor = PathMonitor::new(PathState::default());
        assert_eq!(monitor.state(), PathState::default());
        for connection in [C::Live, C::Resetting, C::Connecting, C::Deleting, C::Dead] {
            for access in [A::Optimized, A::NonOptimized, A::Inaccessible, A::PersistentLoss, A::Change] {
                for (ana_pending, ready) in [(false, true), (true, false)] {
                    let state = PathState { connection, access, ana_pending, ready };
                    monitor.set_state(state);
                    let changes = monitor.changes();
                    monitor.set_state(state);
                    assert_eq!((monitor.state(), monitor.changes()), (state, changes));
                }
            }
        }
    }

    #[test]
    fn a_fence_never_goes_back() {
        let monitor = PathMonitor::new(PathState::default());
        assert_eq!(monitor.fenced(1), None);
        monitor.fence(7, FenceEvidence::QuiesceElapsed);
        monitor.fence(6, FenceEvidence::AssociationEnded);
        let fenced = monitor.fenced(1).unwrap();
        assert_eq!(fenced.through(), PathGeneration { path: 1, generation: 7 });
        assert_eq!(fenced.evidence(), FenceEvidence::QuiesceElapsed);
    }
}
