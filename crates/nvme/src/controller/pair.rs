//! A queue pair, controller side: commands are fetched, and completed in any order.
//!
//! Owned by one thread. A fetched command is identified by its *token*, a number of the controller; the host's cid is
//! not used as an index. A command is fetched only if its completion has an entry in the completion ring. A completion
//! ring with several submission rings is a [`QueueGroup`](super::group::QueueGroup).
//!
//! The host is not trusted: each field is read once. An invalid doorbell stops the queue permanently
//! ([`DoorbellFault`]); a cid that is already in use is refused with its status.

use blkyard_mem::View;

use super::rings::{CompletionRing, DoorbellFault, SubmissionRing, TokenTable};
use crate::doorbell::Doorbells;
use crate::{DmaMap, NvmeStatus, Sqe};

/// The memory of a queue pair, as set up by the host; the rings may differ in size.
#[derive(Clone, Debug)]
pub struct ControllerRings {
    /// Submission ring.
    pub sq: View,
    /// Entries of the submission ring, at least 2.
    pub sq_entries: u16,
    /// Completion ring.
    pub cq: View,
    /// Entries of the completion ring, at least 2.
    pub cq_entries: u16,
}

/// A command that was fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Token for its [completion](ControllerQueuePair::complete).
    pub token: u16,
    /// A copy of the command.
    pub sqe: Sqe,
}

/// A queue pair, controller side.
#[derive(Debug)]
pub struct ControllerQueuePair {
    sq: SubmissionRing,
    cq: CompletionRing,
    tokens: TokenTable,
}

impl ControllerQueuePair {
    /// An empty queue pair. Its doorbell registers are zeroed.
    ///
    /// # Panics
    /// If the memory is too short; the host's values are checked before.
    pub fn new(qid: u16, rings: ControllerRings, doorbells: &Doorbells) -> ControllerQueuePair {
        let sq = SubmissionRing::new(qid, rings.sq, rings.sq_entries, doorbells);
        let cq = CompletionRing::new(qid, rings.cq, rings.cq_entries, doorbells);
        let tokens = TokenTable::new(cq.depth());
        ControllerQueuePair { sq, cq, tokens }
    }

    /// The same with the host's addresses of the rings, so they can be found in changed memory.
    pub(crate) fn at(mut self, sq: u64, cq: u64) -> ControllerQueuePair {
        self.sq.addr = sq;
        self.cq.addr = cq;
        self
    }

    /// Finds the rings in changed memory. Returns whether both are mapped.
    pub(crate) fn remap(&mut self, map: &DmaMap) -> bool {
        self.sq.remap(map) & self.cq.remap(map)
    }

    /// Number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.tokens.in_flight()
    }

    /// Fault that has stopped the queue, if any.
    pub fn fault(&self) -> Option<DoorbellFault> {
        self.sq.fault().or(self.cq.fault())
    }

    /// Fetches the next command, if there is one and its completion has room. Also returns `None` once it has refused a
    /// command whose cid is in use: the host can add more of those without end. [`ControllerQueuePair::arm`] says
    /// whether there is more.
    ///
    /// # Errors
    /// The host has broken the queue, now or earlier. Fetched commands may still be completed.
    #[inline]
    pub fn fetch(&mut self) -> Result<Option<Fetched>, DoorbellFault> {
        if !self.sq.has_next()? {
            return self.cq.fault().map_or(Ok(None), Err);
        }
        if !self.cq.has_room()? {
            return Ok(None);
        }
        let sqe = self.sq.take();
        let cid = sqe.cid();
        if !self.sq.claim(cid) {
            self.cq.write(cid, &self.sq, NvmeStatus::CID_CONFLICT.with_dnr(), 0);
            return Ok(None);
        }
        self.cq.reserve();
        Ok(Some(Fetched { token: self.tokens.take(0, cid), sqe }))
    }

    /// Completes a command in flight, in any order.
    ///
    /// # Panics
    /// If the token is not in use.
    #[inline]
    pub fn complete(&mut self, token: u16, status: NvmeStatus, result: u64) {
        let (_, cid) = self.tokens.put(token);
        // Freed before the host may use the cid again.
        self.sq.release(cid);
        self.cq.unreserve();
        self.cq.write(cid, &self.sq, status, result);
    }

    /// Detaches a command that may wait for long, so that it holds no entry of the completion ring. Its cid stays in
    /// use until [`ControllerQueuePair::complete_detached`].
    ///
    /// # Panics
    /// If the token is not in use.
    pub(crate) fn detach(&mut self, token: u16) -> u16 {
        let (_, cid) = self.tokens.put(token);
        self.cq.unreserve();
        cid
    }

    /// Completes a detached command, if its completion has room; returns whether it had.
    pub(crate) fn complete_detached(&mut self, cid: u16, status: NvmeStatus, result: u64) -> bool {
        let has_room = self.cq.has_room() == Ok(true);
        if has_room {
            self.sq.release(cid);
            self.cq.write(cid, &self.sq, status, result);
        }
        has_room
    }

    /// Whether completions were written since the last call, so that the host must be interrupted.
    pub fn take_posted(&mut self) -> bool {
        self.cq.take_posted()
    }

    /// Requests doorbell writes from the host before the owner sleeps. Returns whether a command is already available:
    /// then a write may not come. Commands without room in the completion ring wait for its head.
    ///
    /// # Errors
    /// As for [`ControllerQueuePair::fetch`].
    pub fn arm(&mut self) -> Result<bool, DoorbellFault> {
        // Both rings are armed, even if the first has work.
        let (has_next, has_room) = (self.sq.listen(), self.cq.listen());
        Ok(has_next? & has_room?)
    }
}
