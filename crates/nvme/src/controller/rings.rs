//! The two rings of a controller: submission rings are read, completion rings are written.
//!
//! Each is owned by one thread, inside a queue pair or a completion queue with its submission queues. The host is not
//! trusted: each field is read once, and a doorbell value outside its ring stops the ring permanently
//! ([`DoorbellFault`]).

use std::sync::atomic::Ordering::{Relaxed, Release};

use blkyard_mem::View;
use serde::{Deserialize, Serialize};

use crate::doorbell::{Doorbell, Doorbells};
use crate::{CQE_BYTES, Cqe, DmaMap, DmaRights, NvmeStatus, SQE_BYTES, Sqe};

/// An invalid doorbell value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum DoorbellFault {
    /// The tail is no index of the submission ring.
    #[error("submission queue tail {0} is outside the ring")]
    Tail(u32),
    /// The head is outside the completion ring, or beyond the completed entries.
    #[error("completion queue head {0} is outside the ring or beyond the tail")]
    Head(u32),
}

/// The memory that a ring shares with the host: its entries and its doorbell. A host may unmap it at any time. It is
/// not accessed then, and the ring continues once its addresses are mapped again.
#[derive(Debug)]
struct HostRingMemory {
    qid: u16,
    /// Host address and bytes of the entries.
    addr: u64,
    bytes: usize,
    /// The entries; unset while they or the shadow doorbells are not mapped.
    entries: Option<View>,
    doorbell: Doorbell,
    kind: RingKind,
}

/// What tells the memory of submission and completion rings apart.
#[derive(Clone, Copy, Debug)]
struct RingKind {
    /// Access of the controller to the entries.
    access: DmaRights,
    /// Finds the doorbell of a queue.
    find: fn(&Doorbells, u16) -> Doorbell,
}

impl RingKind {
    const SUBMISSION: RingKind = RingKind { access: DmaRights::ReadOnly, find: Doorbells::sq_tail };
    const COMPLETION: RingKind = RingKind { access: DmaRights::WriteOnly, find: Doorbells::cq_head };
}

impl HostRingMemory {
    /// Memory that is found at `addr` again when the host has changed its memory. The doorbell register is zeroed.
    fn new(
        qid: u16,
        (addr, entries): (u64, View),
        bytes: usize,
        kind: RingKind,
        doorbells: &Doorbells,
    ) -> HostRingMemory {
        assert!(bytes > 0 && entries.len() >= bytes, "a ring of {bytes} bytes in {}", entries.len());
        let doorbell = (kind.find)(doorbells, qid);
        doorbell.clear_register();
        HostRingMemory { qid, addr, bytes, entries: Some(entries), doorbell, kind }
    }

    /// Memory of a ring with saved indexes. The doorbell register is unchanged.
    fn restore(
        qid: u16,
        (addr, bytes): (u64, usize),
        kind: RingKind,
        map: &DmaMap,
        doorbells: &Doorbells,
    ) -> HostRingMemory {
        let doorbell = (kind.find)(doorbells, qid);
        let mut memory = HostRingMemory { qid, addr, bytes, entries: None, doorbell, kind };
        memory.bind(map, doorbells, false);
        memory
    }

    /// Finds the entries in this memory of the host, and switches to these doorbells. New shadow doorbells start with
    /// the present index.
    fn bind(&mut self, map: &DmaMap, doorbells: &Doorbells, is_new: bool) {
        let index = is_new.then(|| self.doorbell.read());
        self.doorbell = (self.kind.find)(doorbells, self.qid);
        if let Some(index) = index {
            self.doorbell.start_shadow(index);
        }
        let entries = map.view(self.addr, self.bytes, self.kind.access);
        self.entries = entries.filter(|_| doorbells.are_mapped(self.qid));
    }

    #[inline]
    fn is_mapped(&self) -> bool {
        self.entries.is_some()
    }
}

/// State of a submission ring without its memory. The cids in use are those of its commands.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SubmissionRingSnapshot {
    pub(crate) qid: u16,
    pub(crate) addr: u64,
    pub(crate) entries: u16,
    head: u16,
    fault: Option<DoorbellFault>,
}

/// A submission ring, controller side.
#[derive(Debug)]
pub(crate) struct SubmissionRing {
    memory: HostRingMemory,
    entries: u16,
    head: u16,
    /// Tail as last read.
    tail: u16,
    /// One bit for each cid in use.
    used_cids: Box<[u64]>,
    fault: Option<DoorbellFault>,
}

impl SubmissionRing {
    /// An empty ring of at least 2 entries at a host address. Its doorbell register is zeroed.
    ///
    /// # Panics
    /// If the memory is too short; the host's values are checked before.
    pub(crate) fn new(qid: u16, at: (u64, View), entries: u16, doorbells: &Doorbells) -> SubmissionRing {
        assert!(entries >= 2, "a submission queue of {entries} entries");
        let memory = HostRingMemory::new(qid, at, SubmissionRing::bytes(entries), RingKind::SUBMISSION, doorbells);
        let used_cids = vec![0; (1 << 16) / 64].into();
        SubmissionRing { memory, entries, head: 0, tail: 0, used_cids, fault: None }
    }

    /// A ring at this address in the memory of the host; `None` if it is not mapped contiguously.
    pub(crate) fn map(
        qid: u16,
        addr: u64,
        entries: u16,
        map: &DmaMap,
        doorbells: &Doorbells,
    ) -> Option<SubmissionRing> {
        let view = map
            .view(addr, SubmissionRing::bytes(entries), DmaRights::ReadOnly)
            .filter(|_| doorbells.are_mapped(qid))?;
        Some(SubmissionRing::new(qid, (addr, view), entries, doorbells))
    }

    /// Saves its state.
    pub(crate) fn snapshot(&self) -> SubmissionRingSnapshot {
        let SubmissionRing { memory: HostRingMemory { qid, addr, .. }, entries, head, fault, .. } = self;
        SubmissionRingSnapshot { qid: *qid, addr: *addr, entries: *entries, head: *head, fault: *fault }
    }

    /// A ring with saved state and without cids in use; `None` for an invalid state.
    pub(crate) fn restore(
        saved: &SubmissionRingSnapshot,
        entries_max: u16,
        map: &DmaMap,
        doorbells: &Doorbells,
    ) -> Option<SubmissionRing> {
        let &SubmissionRingSnapshot { qid, addr, entries, head, fault } = saved;
        if entries < 2 || entries > entries_max || head >= entries {
            return None;
        }
        let range = (addr, SubmissionRing::bytes(entries));
        let memory = HostRingMemory::restore(qid, range, RingKind::SUBMISSION, map, doorbells);
        let used_cids = vec![0; (1 << 16) / 64].into();
        Some(SubmissionRing { memory, entries, head, tail: head, used_cids, fault })
    }

    /// Bytes of a ring.
    pub(crate) const fn bytes(entries: u16) -> usize {
        entries as usize * SQE_BYTES
    }

    /// Continues in this memory of the host, with these doorbells. While the ring is not mapped, it has no command.
    pub(crate) fn bind(&mut self, map: &DmaMap, doorbells: &Doorbells, is_new: bool) {
        self.memory.bind(map, doorbells, is_new);
        if !self.memory.is_mapped() {
            // The tail is read again once the ring is mapped.
            self.tail = self.head;
        }
    }

    /// Identifier of the queue.
    #[inline]
    pub(crate) fn qid(&self) -> u16 {
        self.memory.qid
    }

    /// Whether its memory is mapped.
    pub(crate) fn is_mapped(&self) -> bool {
        self.memory.is_mapped()
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
        if !self.memory.is_mapped() {
            return Ok(false);
        }
        let tail = self.memory.doorbell.read();
        self.set_tail(tail)?;
        Ok(self.head != self.tail)
    }

    /// Takes a copy of the next command, which must be available.
    #[inline]
    pub(crate) fn take(&mut self) -> Sqe {
        let Some(view) = &self.memory.entries else { unreachable!("a ring that is not mapped has no command") };
        let at = usize::from(self.head) * SQE_BYTES;
        let mut sqe = Sqe::default();
        for (number, words) in sqe.0.as_chunks_mut().0.iter_mut().enumerate() {
            *words = view.load_u64s(at + number * 16, Relaxed);
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
        if !self.memory.is_mapped() {
            return Ok(false);
        }
        let tail = self.memory.doorbell.listen(self.tail);
        self.set_tail(tail)?;
        Ok(self.head != self.tail)
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

/// State of a completion ring without its memory. Entries are reserved for its commands in flight.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CompletionRingSnapshot {
    pub(crate) qid: u16,
    pub(crate) addr: u64,
    pub(crate) entries: u16,
    tail: u16,
    head: u16,
    phase: bool,
    held: Vec<(usize, [u64; 2])>,
    is_posted: bool,
    fault: Option<DoorbellFault>,
}

/// A completion ring, controller side.
#[derive(Debug)]
pub(crate) struct CompletionRing {
    memory: HostRingMemory,
    entries: u16,
    tail: u16,
    /// Head as last read.
    head: u16,
    phase: bool,
    /// Entries reserved for commands in flight.
    owed: u16,
    /// Offsets and contents of entries to be written once the ring is mapped again.
    held: Vec<(usize, [u64; 2])>,
    /// Whether entries were written since the last [`CompletionRing::take_posted`].
    is_posted: bool,
    fault: Option<DoorbellFault>,
}

impl CompletionRing {
    /// An empty ring of at least 2 entries at a host address. Its doorbell register is zeroed.
    ///
    /// # Panics
    /// If the memory is too short; the host's values are checked before.
    pub(crate) fn new(qid: u16, at: (u64, View), entries: u16, doorbells: &Doorbells) -> CompletionRing {
        assert!(entries >= 2, "a completion queue of {entries} entries");
        let memory = HostRingMemory::new(qid, at, CompletionRing::bytes(entries), RingKind::COMPLETION, doorbells);
        CompletionRing {
            memory,
            entries,
            tail: 0,
            head: 0,
            phase: true,
            owed: 0,
            held: Vec::new(),
            is_posted: false,
            fault: None,
        }
    }

    /// A ring at this address in the memory of the host; `None` if it is not mapped contiguously.
    pub(crate) fn map(
        qid: u16,
        addr: u64,
        entries: u16,
        map: &DmaMap,
        doorbells: &Doorbells,
    ) -> Option<CompletionRing> {
        let view = map
            .view(addr, CompletionRing::bytes(entries), DmaRights::WriteOnly)
            .filter(|_| doorbells.are_mapped(qid))?;
        Some(CompletionRing::new(qid, (addr, view), entries, doorbells))
    }

    /// Saves its state.
    pub(crate) fn snapshot(&self) -> CompletionRingSnapshot {
        CompletionRingSnapshot {
            qid: self.memory.qid,
            addr: self.memory.addr,
            entries: self.entries,
            tail: self.tail,
            head: self.head,
            phase: self.phase,
            held: self.held.clone(),
            is_posted: self.is_posted,
            fault: self.fault,
        }
    }

    /// A ring with saved state and without reserved entries; `None` for an invalid state.
    pub(crate) fn restore(
        saved: &CompletionRingSnapshot,
        entries_max: u16,
        map: &DmaMap,
        doorbells: &Doorbells,
    ) -> Option<CompletionRing> {
        let &CompletionRingSnapshot { qid, addr, entries, tail, head, phase, ref held, is_posted, fault } = saved;
        let bytes = CompletionRing::bytes(entries);
        let is_entry = |(at, _): &(usize, _)| *at < bytes && at.is_multiple_of(CQE_BYTES);
        let are_indexes = tail < entries && head < entries;
        let are_held = held.len() < usize::from(entries) && held.iter().all(is_entry);
        if entries < 2 || entries > entries_max || !are_indexes || !are_held {
            return None;
        }
        let memory = HostRingMemory::restore(qid, (addr, bytes), RingKind::COMPLETION, map, doorbells);
        let held = held.clone();
        let mut ring = CompletionRing { memory, entries, tail, head, phase, owed: 0, held, is_posted, fault };
        ring.bind(map, doorbells, false);
        Some(ring)
    }

    /// Bytes of a ring.
    pub(crate) const fn bytes(entries: u16) -> usize {
        entries as usize * CQE_BYTES
    }

    /// Continues in this memory of the host, with these doorbells. While the ring is not mapped, it has no room;
    /// completions of earlier commands are written afterwards.
    pub(crate) fn bind(&mut self, map: &DmaMap, doorbells: &Doorbells, is_new: bool) {
        self.memory.bind(map, doorbells, is_new);
        if let Some(view) = &self.memory.entries {
            for (at, cqe) in self.held.drain(..) {
                view.store_u64s(at, cqe, Release);
                self.is_posted = true;
            }
        }
    }

    /// Whether its memory is mapped.
    pub(crate) fn is_mapped(&self) -> bool {
        self.memory.is_mapped()
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
    pub(crate) fn look_for_room(&mut self) -> Result<bool, DoorbellFault> {
        if !self.memory.is_mapped() {
            return Ok(false);
        }
        let head = self.memory.doorbell.read();
        self.set_head(head)?;
        Ok(self.is_roomy())
    }

    #[inline]
    fn is_roomy(&self) -> bool {
        let unread = distance(self.head, self.tail, self.entries);
        self.fault.is_none() && self.memory.is_mapped() && unread + self.owed < self.entries - 1
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

    /// Writes a completion into a free entry, or holds it back until the ring is mapped.
    #[inline]
    pub(crate) fn write(&mut self, cid: u16, sq: &SubmissionRing, status: NvmeStatus, result: u64) {
        let cqe = Cqe::new(cid, sq.qid(), sq.head, status, result, self.phase);
        let at = usize::from(self.tail) * CQE_BYTES;
        self.tail = next(self.tail, self.entries);
        self.phase ^= self.tail == 0;
        let Some(view) = &self.memory.entries else { return self.hold(at, cqe) };
        // The second word is written last, since it has the phase bit.
        view.store_u64s(at, cqe.0, Release);
        self.is_posted = true;
    }

    /// Each has its reserved entry, so there are never more than entries.
    #[cold]
    fn hold(&mut self, at: usize, cqe: Cqe) {
        self.held.push((at, cqe.0));
    }

    /// Whether entries were written since the last call, so that the host must be interrupted.
    #[inline]
    pub(crate) fn take_posted(&mut self) -> bool {
        std::mem::take(&mut self.is_posted)
    }

    /// Requests a write of the register once the head moves. Returns whether an entry is free.
    pub(crate) fn listen(&mut self) -> Result<bool, DoorbellFault> {
        if !self.memory.is_mapped() {
            return Ok(false);
        }
        let head = self.memory.doorbell.listen(self.head);
        self.set_head(head)?;
        Ok(self.is_roomy())
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

    /// Index of the submission queue and cid of a command in flight.
    pub(crate) fn command(&self, token: u16) -> Option<(u16, u16)> {
        self.out.get(usize::from(token)).copied().flatten()
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
