//! A daemon that is replaced by another one while it serves, as `serve --takeover` does: the new one opens the disk
//! beside the old one, whose rings are suspended until nothing is in flight, and goes on where they are.
//!
//! A new daemon that cannot open the disk is given up at once. One that refuses what it is given is given up when the
//! rings have drained. The old one goes on then.

use blkyard_export::VirtqueueSetup;

use crate::daemon::WorldDaemon;

/// The new daemon, until it serves.
pub(crate) struct Handover {
    successor: WorldDaemon,
    refuses: bool,
    is_draining: bool,
}

/// What a handover has come to.
pub(crate) enum HandoverStep {
    /// It goes on.
    Going,
    /// The new daemon is to serve, and the old one to end.
    Done,
    /// The old one goes on, and the new one ends.
    Refused,
}

impl Handover {
    /// To this daemon, which was just started, and whether it refuses in the end.
    pub(crate) fn to(successor: WorldDaemon, refuses: bool) -> Handover {
        Handover { successor, refuses, is_draining: false }
    }

    /// When it has something to do by itself.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.successor.next_ns()
    }

    /// Does what can be done now.
    pub(crate) fn step(&mut self, old: &mut WorldDaemon, setups: impl Fn(usize) -> VirtqueueSetup) -> HandoverStep {
        self.successor.run_opening();
        match self.is_draining {
            false if self.successor.has_failed() => return HandoverStep::Refused,
            false if self.successor.is_open() && old.is_serving() => {
                old.suspend();
                self.is_draining = true;
            }
            true if old.is_suspended() && self.refuses => {
                old.resume(setups);
                return HandoverStep::Refused;
            }
            true if old.is_suspended() => return HandoverStep::Done,
            _ => {}
        }
        HandoverStep::Going
    }

    /// The new daemon.
    pub(crate) fn into_successor(self) -> WorldDaemon {
        self.successor
    }
}
