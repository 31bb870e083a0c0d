//! A queue pair, controller side: commands are fetched, and completed in any order.
//!
//! Owned by one thread. A fetched command is known by its *token*, a number of our own; the host's cid is not used as
//! an index. No command is fetched unless its completion has an entry in the completion ring. A completion ring that
//! serves several submission rings is a [`QueueGroup`](super::group::QueueGroup).
//!
//! The host is not trusted: each field is read once. A violation of the rules of doorbells stops the queue permanently
//! ([`DoorbellFault`]); a cid that is in use is refused with its status.

use blkyard_mem::View;

use super::rings::{CompletionRing, DoorbellFault, SubmissionRing, TokenTable};
use crate::doorbell::Doorbells;
use crate::{DmaMap, NvmeStatus, Sqe};

/// The memory of a queue pair as the host has it: rings may differ in size.
#[derive(Clone, Debug)]
pub struct ControllerRings {
    /// Submission ring.
    pub sq: View,
    /// Its entries, at least 2.
    pub sq_entries: u16,
    /// Completion ring.
    pub cq: View,
    /// Its entries, at least 2.
    pub cq_entries: u16,
}

/// A command that was fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// By which it is [completed](ControllerQueuePair::complete).
    pub token: u16,
    /// The command; a copy.
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
    /// An empty queue pair, as the host creates it. Its doorbell registers are zeroed.
    ///
    /// # Panics
    /// If the memory does not suffice: the host's values are checked before.
    pub fn new(qid: u16, rings: ControllerRings, doorbells: &Doorbells) -> ControllerQueuePair {
        let sq = SubmissionRing::new(qid, rings.sq, rings.sq_entries, doorbells);
        let cq = CompletionRing::new(qid, rings.cq, rings.cq_entries, doorbells);
        let tokens = TokenTable::new(cq.depth());
        ControllerQueuePair { sq, cq, tokens }
    }

    /// The same with the host's addresses of the rings: they can be looked up again in changed memory.
    pub(crate) fn at(mut self, sq: u64, cq: u64) -> ControllerQueuePair {
        self.sq.addr = sq;
        self.cq.addr = cq;
        self
    }

    /// Finds the rings anew in memory that has changed. Says whether both are mapped.
    pub(crate) fn remap(&mut self, map: &DmaMap) -> bool {
        self.sq.remap(map) & self.cq.remap(map)
    }

    /// Commands that are handed out.
    pub fn in_flight(&self) -> usize {
        self.tokens.in_flight()
    }

    /// Why the queue has stopped, if it has.
    pub fn fault(&self) -> Option<DoorbellFault> {
        self.sq.fault().or(self.cq.fault())
    }

    /// Fetches the next command, if there is one and its completion has room.
    ///
    /// # Errors
    /// The host broke the queue, now or before. Fetched commands may still be completed.
    #[inline]
    pub fn fetch(&mut self) -> Result<Option<Fetched>, DoorbellFault> {
        // Each cid that is in use takes an entry of the completion ring, so this ends.
        loop {
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
                continue;
            }
            self.cq.reserve();
            return Ok(Some(Fetched { token: self.tokens.take(0, cid), sqe }));
        }
    }

    /// Completes a command that was handed out, in any order.
    ///
    /// # Panics
    /// If the token is not out.
    #[inline]
    pub fn complete(&mut self, token: u16, status: NvmeStatus, result: u64) {
        let (_, cid) = self.tokens.put(token);
        // Before the host may use it again.
        self.sq.release(cid);
        self.cq.unreserve();
        self.cq.write(cid, &self.sq, status, result);
    }

    /// Takes a command that may wait for long out of the queue pair, so that it holds no entry of the completion ring.
    /// Its cid stays in use until [`ControllerQueuePair::complete_detached`].
    ///
    /// # Panics
    /// If the token is not out.
    pub(crate) fn detach(&mut self, token: u16) -> u16 {
        let (_, cid) = self.tokens.put(token);
        self.cq.unreserve();
        cid
    }

    /// Completes a detached command, if its completion has room; says whether it had.
    pub(crate) fn complete_detached(&mut self, cid: u16, status: NvmeStatus, result: u64) -> bool {
        let has_room = self.cq.has_room() == Ok(true);
        if has_room {
            self.sq.release(cid);
            self.cq.write(cid, &self.sq, status, result);
        }
        has_room
    }

    /// Whether completions were written since the last call: the host is to be interrupted.
    pub fn take_posted(&mut self) -> bool {
        self.cq.take_posted()
    }

    /// Asks the host to write the doorbell registers when it moves on, before the owner sleeps. Says whether it has
    /// already: then there may be no write. Commands that wait for room in the completion ring wait for its head.
    ///
    /// # Errors
    /// As for [`ControllerQueuePair::fetch`].
    pub fn arm(&mut self) -> Result<bool, DoorbellFault> {
        // Both, even if the first has something to say.
        let (has_next, has_room) = (self.sq.listen(), self.cq.listen());
        Ok(has_next? & has_room?)
    }
}
