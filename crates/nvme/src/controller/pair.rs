//! A queue pair, controller side: commands are fetched, and completed in any order.
//!
//! Owned by one thread. A fetched command is identified by its *token*, a number of the controller; the host's cid is
//! not used as an index. A command is fetched only if its completion has an entry in the completion ring. A completion
//! ring with several submission rings is a [`QueueGroup`](super::group::QueueGroup).
//!
//! The host is not trusted: each field is read once. An invalid doorbell stops the queue permanently
//! ([`DoorbellFault`]); a cid that is already in use is refused with its status.

use blkyard_mem::View;
use serde::{Deserialize, Serialize};

use super::rings::{
    CompletionRing, CompletionRingSnapshot, DoorbellFault, SubmissionRing, SubmissionRingSnapshot, TokenTable,
};
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

/// State of a queue pair without its memory and commands.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct QueuePairSnapshot {
    sq: SubmissionRingSnapshot,
    cq: CompletionRingSnapshot,
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
        let sq = SubmissionRing::new(qid, (0, rings.sq), rings.sq_entries, doorbells);
        let cq = CompletionRing::new(qid, (0, rings.cq), rings.cq_entries, doorbells);
        ControllerQueuePair::of(sq, cq)
    }

    /// An empty queue pair, which can [continue](ControllerQueuePair::bind) in changed memory.
    pub(crate) fn of(sq: SubmissionRing, cq: CompletionRing) -> ControllerQueuePair {
        let tokens = TokenTable::new(cq.depth());
        ControllerQueuePair { sq, cq, tokens }
    }

    /// Saves its state.
    pub(crate) fn snapshot(&self) -> QueuePairSnapshot {
        QueuePairSnapshot { sq: self.sq.snapshot(), cq: self.cq.snapshot() }
    }

    /// The admin queue pair with saved state; `None` for an invalid state.
    pub(crate) fn restore_admin(
        saved: &QueuePairSnapshot,
        entries_max: u16,
        map: &DmaMap,
        doorbells: &Doorbells,
    ) -> Option<ControllerQueuePair> {
        if saved.sq.qid != 0 || saved.cq.qid != 0 {
            return None;
        }
        let cq = CompletionRing::restore(&saved.cq, entries_max, map, doorbells)?;
        Some(ControllerQueuePair::of(SubmissionRing::restore(&saved.sq, entries_max, map, doorbells)?, cq))
    }

    /// The cid of a command in flight.
    pub(crate) fn cid(&self, token: u16) -> Option<u16> {
        self.tokens.command(token).map(|(_, cid)| cid)
    }

    /// Marks a cid as that of a command in flight, and returns its token; `None` if it is in use or no token is free.
    pub(crate) fn claim(&mut self, cid: u16) -> Option<u16> {
        if !self.tokens.has_free() || !self.sq.claim(cid) {
            return None;
        }
        self.cq.reserve();
        Some(self.tokens.take(0, cid))
    }

    /// Marks a cid as that of a detached command. Returns whether it was free.
    pub(crate) fn claim_detached(&mut self, cid: u16) -> bool {
        self.sq.claim(cid)
    }

    /// Continues in this memory of the host: see [`SubmissionRing::bind`] and [`CompletionRing::bind`].
    pub(crate) fn bind(&mut self, map: &DmaMap, doorbells: &Doorbells) {
        self.sq.bind(map, doorbells, false);
        self.cq.bind(map, doorbells, false);
    }

    /// Whether both rings are mapped.
    pub(crate) fn is_mapped(&self) -> bool {
        self.sq.is_mapped() && self.cq.is_mapped()
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
        // Both rings are armed, even if the first has work. With room, a new head is no reason to wake: the host
        // would write its register after nearly each interrupt.
        let (has_next, has_room) = (self.sq.listen(), self.cq.look_for_room()? || self.cq.listen()?);
        Ok(has_next? & has_room)
    }
}
