//! Handover of an export: the state that another process needs to continue with it.
//!
//! The protocol describes its session. All is prepared before the queues are to run; until they do, the export that
//! handed over can continue unchanged.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::Sender;

use super::control_loop::EndpointCaller;

/// An export with drained queues. `T` describes a session of its protocol.
#[derive(Debug)]
pub struct ExportState<T> {
    /// Its listening socket.
    pub listener: OwnedFd,
    /// Where its socket is.
    pub path: PathBuf,
    /// Device and inode of its socket file, so that another's is not removed at the end.
    pub identity: (u64, u64),
    /// Queues it has.
    pub made: u16,
    /// Queues of these that the next front-end is offered.
    pub offered: u16,
    /// Requests that each queue may have in flight, if that was bounded since they were made.
    pub depth: Option<usize>,
    /// Whether the cache is write-back: a front-end's choice is kept.
    pub wce: bool,
    /// The front-end that is connected.
    pub session: Option<T>,
}

/// An export that is handed over, and rests.
#[derive(Debug)]
pub struct Handed<T> {
    /// State to be taken: all descriptors are duplicates.
    pub state: ExportState<T>,
    /// Until when it rests.
    pub rest: QuiescedExport,
}

/// An export that stays quiesced until the result of its handover. Dropping this resumes it.
pub struct QuiescedExport {
    /// There until it is dropped.
    verdict: Option<Sender<()>>,
    caller: EndpointCaller,
}

impl QuiescedExport {
    pub(crate) fn new(verdict: Sender<()>, caller: EndpointCaller) -> QuiescedExport {
        QuiescedExport { verdict: Some(verdict), caller }
    }

    /// Another process has taken it: the export ends without touching its socket and its front-end.
    pub fn let_go(self) {
        // An export that has ended meanwhile needs no verdict.
        let _ = self.verdict.as_ref().map(|verdict| verdict.send(()));
    }
}

impl Drop for QuiescedExport {
    fn drop(&mut self) {
        // Before the export checks.
        self.verdict = None;
        self.caller.call();
    }
}

impl fmt::Debug for QuiescedExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuiescedExport").finish_non_exhaustive()
    }
}
