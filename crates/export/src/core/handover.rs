//! An export that changes hands: all that another process needs to go on where this one stopped.
//!
//! How a session is described is its protocol's affair. All is prepared before the queues are to run; until they do,
//! the export that handed over can go on as if nothing had happened.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::Sender;

use super::control_loop::EndpointCaller;

/// An export whose queues are at rest. `T` describes a session of its protocol.
#[derive(Debug)]
pub struct ExportState<T> {
    /// What it listens with.
    pub listener: OwnedFd,
    /// Where its socket is.
    pub path: PathBuf,
    /// Device and inode of the socket there, so that nobody else's is removed in the end.
    pub identity: (u64, u64),
    /// Queues it has.
    pub made: u16,
    /// Queues of these that the next front-end is offered.
    pub offered: u16,
    /// Requests that each queue may have in flight, if that was bounded since they were made.
    pub depth: Option<usize>,
    /// Whether the cache is write-back: what a front-end chose stays chosen.
    pub wce: bool,
    /// The front-end that is connected.
    pub session: Option<T>,
}

/// An export that is handed over, and rests.
#[derive(Debug)]
pub struct Handed<T> {
    /// What is to be taken: all descriptors are duplicates.
    pub state: ExportState<T>,
    /// Until when it rests.
    pub rest: QuiescedExport,
}

/// An export that rests until it is known whether somebody takes it. Dropping this lets it go on.
pub struct QuiescedExport {
    /// There until it is dropped.
    verdict: Option<Sender<()>>,
    caller: EndpointCaller,
}

impl QuiescedExport {
    pub(crate) fn new(verdict: Sender<()>, caller: EndpointCaller) -> QuiescedExport {
        QuiescedExport { verdict: Some(verdict), caller }
    }

    /// Somebody has taken it: the export ends, and leaves its socket and its front-end alone.
    pub fn let_go(self) {
        // An export that has ended meanwhile has nothing to let go of.
        let _ = self.verdict.as_ref().map(|verdict| verdict.send(()));
    }
}

impl Drop for QuiescedExport {
    fn drop(&mut self) {
        // Before the export looks.
        self.verdict = None;
        self.caller.call();
    }
}

impl fmt::Debug for QuiescedExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuiescedExport").finish_non_exhaustive()
    }
}
