//! Handover of an export: the state that another process needs to continue with it.
//!
//! The protocol describes its session. Everything is prepared before the queues run again; until then the old export
//! can continue unchanged.

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
    /// Path of the socket; empty if the session accepts connections by itself.
    pub path: PathBuf,
    /// Device and inode of its file, so that only this file is removed at the end.
    pub identity: (u64, u64),
    /// Number of queues.
    pub made: u16,
    /// Number of queues offered to the next front-end.
    pub offered: u16,
    /// Maximum requests in flight of each queue, if limited since the queues were made.
    pub depth: Option<usize>,
    /// Whether the cache is write-back, as chosen by a front-end.
    pub wce: bool,
    /// The connected front-end.
    pub session: Option<T>,
}

impl<T> ExportState<T> {
    /// The same with another description of the session.
    pub fn map_session<U>(self, change: impl FnOnce(T) -> U) -> ExportState<U> {
        let ExportState { listener, path, identity, made, offered, depth, wce, session } = self;
        let session = session.map(change);
        ExportState { listener, path, identity, made, offered, depth, wce, session }
    }
}

/// A quiesced export with its handover state.
#[derive(Debug)]
pub struct Handed<T> {
    /// Handover state; all descriptors are duplicates.
    pub state: ExportState<T>,
    /// Keeps the export quiesced until it is dropped.
    pub rest: QuiescedExport,
}

/// An export that stays quiesced until the result of its handover. Dropping this resumes it.
pub struct QuiescedExport {
    /// Set until it is dropped.
    verdict: Option<Sender<()>>,
    caller: EndpointCaller,
}

impl QuiescedExport {
    pub(crate) fn new(verdict: Sender<()>, caller: EndpointCaller) -> QuiescedExport {
        QuiescedExport { verdict: Some(verdict), caller }
    }

    /// Another process has taken over: the export ends without touching its socket and front-end.
    pub fn let_go(self) {
        // Fails if the export has ended meanwhile, which needs no action.
        let _ = self.verdict.as_ref().map(|verdict| verdict.send(()));
    }
}

impl Drop for QuiescedExport {
    fn drop(&mut self) {
        // Dropped before the export checks.
        self.verdict = None;
        self.caller.call();
    }
}

impl fmt::Debug for QuiescedExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuiescedExport").finish_non_exhaustive()
    }
}
