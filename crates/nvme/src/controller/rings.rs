//! The two rings of a controller: submission rings are read, completion rings are written.
//!
//! Each is owned by one thread, inside a queue pair or a completion queue with its submission queues. The host is not
//! trusted: each field is read once, and a doorbell value outside its ring stops the ring permanently
//! ([`DoorbellFault`]).

use std::sync::atomic::Ordering::{Relaxed, Release};

use blkyard_mem::View;

use crate::doorbell::{Doorbell, Doorbells};
use crate::{CQE_BYTES, Cqe, DmaMap, NvmeStatus, SQE_BYTES, Sqe};

/// An invalid doorbell value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoorbellFault {
    /// The tail is no index of the submission ring.
    #[error("submission queue tail {0} is outside the ring")]
    Tail(u32),
    /// The head is outside the completion ring, or beyond the completed entries.
    #[error("completion queue head {0} is outside the ring or beyond the tail")]
    Head(u32),
}

/// A submission ring, controller side.
#[derive(Debug)]
pub(crate) struct SubmissionRing {
    pub(crate) qid: u16,
    /// Host address of the ring.
    pub(crate) addr: u64,
    view: View,
    entries: u16,
    head: u16,
    /// Tail as last read.
    tail: u16,
    doorbell: Doorbell,
    /// One bit for each cid in use.
    used_cids: Box<[u64]>,
    fault: Option<DoorbellFault>,
}

impl SubmissionRing {
    /// An empty ring of at least 2 entries. Its doorbell register is zeroed.
    ///
    /// # Panics
    /// If the memory is too short; the host's values are checked before.
    pub(crate) fn new(qid: u16, view: View, entries: u16, doorbells: &Doorbells) -> SubmissionRing {
        let len = view.len();
        assert!(
            entries >= 2 && len >= usize::from(entries) * SQE_BYTES,
            "a submission queue of {entries} entries in {len} bytes"
        );
        let doorbell = doorbells.sq_tail(qid);
        doorbell.clear_register();
        let used_cids = vec![0; (1 << 16) / 64].into();
        SubmissionRing { qid, addr: 0, view, entries, head: 0, tail: 0, doorbell, used_cids, fault: None }
    }

    /// Fault that has stopped the ring, if any.
    pub(crate) fn fault(&self) -> Option<DoorbellFault> {
        self.fault
    }

    /// Whether a command is available.
    #[inline]
    pub(crate) fn has_next(&mut self) -> Result<bool, DoorbellFault> {
        if self.head != self.tail {
            return Ok(true);
        }
        let tail = self.doorbell.read();
        self.set_tail(tail)?;
        Ok(self.head != self.tail)
    }

    /// Takes a copy of the next command, which must be available.
    #[inline]
    pub(crate) fn take(&mut self) -> Sqe {
        let at = usize::from(self.head) * SQE_BYTES;
        let mut sqe = Sqe::default();
        for (number, words) in sqe.0.as_chunks_mut().0.iter_mut().enumerate() {
            *words = self.view.load_u64s(at + number * 16, Relaxed);
        }
        self.head = next(self.head, self.entries);
        sqe
    }

    /// Marks a cid as in use. Returns whether it was free.
    #[inline]
    pub(crate) fn claim(&mut self, cid: u16) -> bool {
        let (word, bit) = (&mut self.used_cids[usize::from(cid / 64)], 1 << (cid % 64));
        let is_free = *word & bit == 0;
        *word |= bit;
        is_free
    }

    /// Marks a cid as free.
    #[inline]
    pub(crate) fn release(&mut self, cid: u16) {
        self.used_cids[usize::from(cid / 64)] &= !(1 << (cid % 64));
    }

    /// Requests a write of the register once the tail advances. Returns whether a command is already available.
    pub(crate) fn listen(&mut self) -> Result<bool, DoorbellFault> {
        let tail = self.doorbell.listen(self.tail);
        self.set_tail(tail)?;
        Ok(self.head != self.tail)
    }

    /// A ring at this address in the memory of the host; `None` if it is not mapped contiguously.
    pub(crate) fn map(
        qid: u16,
        addr: u64,
        entries: u16,
        map: &DmaMap,
        doorbells: &Doorbells,
    ) -> Option<SubmissionRing> {
        let view = map.view(addr, usize::from(entries) * SQE_BYTES)?;
        Some(SubmissionRing { addr, ..SubmissionRing::new(qid, view, entries, doorbells) })
    }

    /// Finds the ring in changed memory. Returns whether it is mapped.
    pub(crate) fn remap(&mut self, map: &DmaMap) -> bool {
        let view = map.view(self.addr, usize::from(self.entries) * SQE_BYTES);
        let is_mapped = view.is_some();
        self.view = view.unwrap_or_else(|| self.view.clone());
        is_mapped
    }

    /// Switches to other doorbells; new shadow doorbells start with the index of the register.
    pub(crate) fn rebind(&mut self, doorbells: &Doorbells, is_new: bool) {
        let now = self.doorbell.read();
        self.doorbell = doorbells.sq_tail(self.qid);
        if is_new {
            self.doorbell.start_shadow(now);
        }
    }

    #[inline]
    fn set_tail(&mut self, tail: u32) -> Result<(), DoorbellFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        if tail >= u32::from(self.entries) {
            return self.stop(DoorbellFault::Tail(tail));
        }
        self.tail = tail as u16;
        Ok(())
    }

    /// Stops fetching.
    #[cold]
    fn stop(&mut self, fault: DoorbellFault) -> Result<(), DoorbellFault> {
        self.fault = Some(fault);
        self.tail = self.head;
        Err(fault)
    }
}

/// A completion ring, controller side.
#[derive(Debug)]
pub(crate) struct CompletionRing {
    qid: u16,
    /// Host address of the ring.
    pub(crate) addr: u64,
    view: View,
    entries: u16,
    tail: u16,
    /// Head as last read.
    head: u16,
    phase: bool,
    doorbell: Doorbell,
    /// Entries reserved for commands in flight.
    owed: u16,
    /// Whether entries were written since the last [`CompletionRing::take_posted`].
    is_posted: bool,
    fault: Option<DoorbellFault>,
}

impl CompletionRing {
    /// An empty ring of at least 2 entries. Its doorbell register is zeroed.
    ///
    /// # Panics
    /// If the memory is too short; the host's values are checked before.
    pub(crate) fn new(qid: u16, view: View, entries: u16, doorbells: &Doorbells) -> CompletionRing {
        let len = view.len();
        assert!(
            entries >= 2 && len >= usize::from(entries) * CQE_BYTES,
            "a completion queue of {entries} entries in {len} bytes"
        );
        let doorbell = doorbells.cq_head(qid);
        doorbell.clear_register();
        CompletionRing {
            qid,
            addr: 0,
            view,
            entries,
            tail: 0,
            head: 0,
            phase: true,
            doorbell,
            owed: 0,
            is_posted: false,
            fault: None,
        }
    }

    /// Maximum commands in flight: one entry always stays free.
    pub(crate) fn depth(&self) -> u16 {
        self.entries - 1
    }

    /// Fault that has stopped the ring, if any.
    pub(crate) fn fault(&self) -> Option<DoorbellFault> {
        self.fault
    }

    /// Whether an entry is free besides the reserved ones.
    #[inline]
    pub(crate) fn has_room(&mut self) -> Result<bool, DoorbellFault> {
        if self.is_roomy() { Ok(true) } else { self.look_for_room() }
    }

    /// Reads the head; returns whether an entry is free now.
    #[cold]
    fn look_for_room(&mut self) -> Result<bool, DoorbellFault> {
        let head = self.doorbell.read();
        self.set_head(head)?;
        Ok(self.is_roomy())
    }

    #[inline]
    fn is_roomy(&self) -> bool {
        let unread = distance(self.head, self.tail, self.entries);
        self.fault.is_none() && unread + self.owed < self.entries - 1
    }

    /// Reserves a free entry.
    #[inline]
    pub(crate) fn reserve(&mut self) {
        self.owed += 1;
    }

    /// Releases a reserved entry.
    #[inline]
    pub(crate) fn unreserve(&mut self) {
        self.owed -= 1;
    }

    /// Writes a completion into a free entry.
    #[inline]
    pub(crate) fn write(&mut self, cid: u16, sq: &SubmissionRing, status: NvmeStatus, result: u64) {
        let cqe = Cqe::new(cid, sq.qid, sq.head, status, result, self.phase);
        // The second word is written last, since it has the phase bit.
        self.view.store_u64s(usize::from(self.tail) * CQE_BYTES, cqe.0, Release);
        self.tail = next(self.tail, self.entries);
        self.phase ^= self.tail == 0;
        self.is_posted = true;
    }

    /// Whether entries were written since the last call, so that the host must be interrupted.
    #[inline]
    pub(crate) fn take_posted(&mut self) -> bool {
        std::mem::take(&mut self.is_posted)
    }

    /// Requests a write of the register once the head moves. Returns whether an entry is free.
    pub(crate) fn listen(&mut self) -> Result<bool, DoorbellFault> {
        let head = self.doorbell.listen(self.head);
        self.set_head(head)?;
        Ok(self.is_roomy())
    }

    /// A ring at this address in the memory of the host; `None` if it is not mapped contiguously.
    pub(crate) fn map(
        qid: u16,
        addr: u64,
        entries: u16,
        map: &DmaMap,
        doorbells: &Doorbells,
    ) -> Option<CompletionRing> {
        let view = map.view(addr, usize::from(entries) * CQE_BYTES)?;
        Some(CompletionRing { addr, ..CompletionRing::new(qid, view, entries, doorbells) })
    }

    /// Finds the ring in changed memory. Returns whether it is mapped.
    pub(crate) fn remap(&mut self, map: &DmaMap) -> bool {
        let view = map.view(self.addr, usize::from(self.entries) * CQE_BYTES);
        let is_mapped = view.is_some();
        self.view = view.unwrap_or_else(|| self.view.clone());
        is_mapped
    }

    /// Switches to other doorbells; new shadow doorbells start with the index of the register.
    pub(crate) fn rebind(&mut self, doorbells: &Doorbells, is_new: bool) {
        let now = self.doorbell.read();
        self.doorbell = doorbells.cq_head(self.qid);
        if is_new {
            self.doorbell.start_shadow(now);
        }
    }

    #[inline]
    fn set_head(&mut self, head: u32) -> Result<(), DoorbellFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        let entries = self.entries;
        let is_index = head < u32::from(entries);
        if !is_index || distance(self.head, head as u16, entries) > distance(self.head, self.tail, entries) {
            let fault = DoorbellFault::Head(head);
            self.fault = Some(fault);
            return Err(fault);
        }
        self.head = head as u16;
        Ok(())
    }
}

/// Commands in flight, by token.
#[derive(Debug)]
pub(crate) struct TokenTable {
    /// Index of the owner's submission queue, and the host's cid.
    out: Box<[Option<(u16, u16)>]>,
    free: Vec<u16>,
}

impl TokenTable {
    pub(crate) fn new(tokens: u16) -> TokenTable {
        TokenTable { out: vec![None; usize::from(tokens)].into(), free: (0..tokens).rev().collect() }
    }

    /// Number of commands in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.out.len() - self.free.len()
    }

    /// Whether a token is free.
    #[inline]
    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Assigns a token to a command.
    ///
    /// # Panics
    /// If no token is free.
    #[inline]
    pub(crate) fn take(&mut self, sq: u16, cid: u16) -> u16 {
        let Some(token) = self.free.pop() else { unreachable!("as many tokens as completions have room") };
        self.out[usize::from(token)] = Some((sq, cid));
        token
    }

    /// Releases a token; returns its submission queue and cid.
    ///
    /// # Panics
    /// If the token is not in use.
    #[inline]
    pub(crate) fn put(&mut self, token: u16) -> (u16, u16) {
        let Some(command) = self.out[usize::from(token)].take() else { panic!("token {token} is not out") };
        self.free.push(token);
        command
    }

    /// The token of a command.
    pub(crate) fn find(&self, sq: u16, cid: u16) -> Option<u16> {
        self.out.iter().position(|command| *command == Some((sq, cid))).map(|token| token as u16)
    }
}

#[inline]
const fn next(index: u16, entries: u16) -> u16 {
    if index + 1 == entries { 0 } else { index + 1 }
}

/// Distance from one index to another in a ring.
#[inline]
const fn distance(from: u16, to: u16, entries: u16) -> u16 {
    if to >= from { to - from } else { to + (entries - from) }
}
