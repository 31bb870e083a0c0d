//! A queue pair, controller side: commands are fetched and handed out, and completed in any order.
//!
//! Owned by one thread. A command that is handed out is known by its *token*, a number of our own; the host's cid names
//! nothing here. No command is fetched unless its completion has an entry in the completion ring, which belongs to one
//! submission ring.
//!
//! The host is not trusted: each field is read once. What breaks the rules of doorbells stops the queue for good
//! ([`DoorbellFault`]); a cid that is in use is refused with the status for it.

use std::sync::atomic::Ordering::{Relaxed, Release};

use blkyard_mem::View;

use crate::doorbell::{Doorbell, Doorbells};
use crate::{CQE_BYTES, Cqe, NvmeStatus, SQE_BYTES, Sqe};

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

/// What a host wrote to a doorbell that no host writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoorbellFault {
    /// A tail that is no index of the submission ring.
    #[error("submission queue tail {0} is outside the ring")]
    Tail(u32),
    /// A head that is no index of the completion ring, or beyond what was completed.
    #[error("completion queue head {0} is outside the ring or beyond the tail")]
    Head(u32),
}

/// A command that was fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// By which it is [completed](ControllerQueuePair::complete).
    pub token: u16,
    /// What the host wants; a copy.
    pub sqe: Sqe,
}

/// A queue pair, controller side.
#[derive(Debug)]
pub struct ControllerQueuePair {
    qid: u16,
    rings: ControllerRings,
    sq_head: u16,
    /// As last read.
    sq_tail: u16,
    cq_tail: u16,
    /// As last read.
    cq_head: u16,
    phase: bool,
    sq_doorbell: Doorbell,
    cq_doorbell: Doorbell,
    /// By token: the host's cid, of commands that are handed out.
    cids: Box<[Option<u16>]>,
    free_tokens: Vec<u16>,
    /// A bit for each cid that is in use.
    used_cids: Box<[u64]>,
    fault: Option<DoorbellFault>,
}

impl ControllerQueuePair {
    /// An empty queue pair, as the host creates it. Its doorbell registers are zeroed.
    ///
    /// # Panics
    /// If the memory does not suffice: what a host says of it is checked before.
    pub fn new(qid: u16, rings: ControllerRings, doorbells: &Doorbells) -> ControllerQueuePair {
        assert!(
            rings.sq_entries >= 2
                && rings.cq_entries >= 2
                && rings.sq.len() >= usize::from(rings.sq_entries) * SQE_BYTES
                && rings.cq.len() >= usize::from(rings.cq_entries) * CQE_BYTES,
            "queues of {} and {} entries in {} and {} bytes",
            rings.sq_entries,
            rings.cq_entries,
            rings.sq.len(),
            rings.cq.len()
        );
        let (sq_doorbell, cq_doorbell) = (doorbells.sq_tail(qid), doorbells.cq_head(qid));
        sq_doorbell.clear_register();
        cq_doorbell.clear_register();
        let tokens = rings.cq_entries - 1;
        ControllerQueuePair {
            qid,
            rings,
            sq_head: 0,
            sq_tail: 0,
            cq_tail: 0,
            cq_head: 0,
            phase: true,
            sq_doorbell,
            cq_doorbell,
            cids: vec![None; usize::from(tokens)].into(),
            free_tokens: (0..tokens).rev().collect(),
            used_cids: vec![0; (1 << 16) / 64].into(),
            fault: None,
        }
    }

    /// Commands that are handed out.
    pub fn in_flight(&self) -> usize {
        self.cids.len() - self.free_tokens.len()
    }

    /// Why the queue has stopped, if it has.
    pub fn fault(&self) -> Option<DoorbellFault> {
        self.fault
    }

    /// Fetches the next command, if there is one and its completion has room.
    ///
    /// # Errors
    /// The host broke the queue, now or before. What was handed out may still be completed.
    #[inline]
    pub fn fetch(&mut self) -> Result<Option<Fetched>, DoorbellFault> {
        // Each cid that is in use takes an entry of the completion ring, so this ends.
        loop {
            if self.sq_head == self.sq_tail && self.look_for_tail()? {
                return Ok(None);
            }
            if !self.has_room() && !self.look_for_room()? {
                return Ok(None);
            }
            let at = usize::from(self.sq_head) * SQE_BYTES;
            let mut sqe = Sqe::default();
            for (number, words) in sqe.0.as_chunks_mut().0.iter_mut().enumerate() {
                *words = self.rings.sq.load_u64s(at + number * 16, Relaxed);
            }
            self.sq_head = next(self.sq_head, self.rings.sq_entries);
            let cid = sqe.cid();
            let (word, bit) = (usize::from(cid / 64), 1 << (cid % 64));
            if self.used_cids[word] & bit != 0 {
                self.write(cid, NvmeStatus::CID_CONFLICT.with_dnr(), 0);
                continue;
            }
            self.used_cids[word] |= bit;
            let Some(token) = self.free_tokens.pop() else { unreachable!("as many tokens as completions have room") };
            self.cids[usize::from(token)] = Some(cid);
            return Ok(Some(Fetched { token, sqe }));
        }
    }

    /// Completes a command that was handed out, in any order.
    ///
    /// # Panics
    /// If the token is not out.
    #[inline]
    pub fn complete(&mut self, token: u16, status: NvmeStatus, result: u64) {
        let cid = self.cids[usize::from(token)].take();
        let Some(cid) = cid else { panic!("token {token} is not out") };
        self.free_tokens.push(token);
        // Before the host may use it again.
        self.used_cids[usize::from(cid / 64)] &= !(1 << (cid % 64));
        self.write(cid, status, result);
    }

    /// Asks the host to write the doorbell registers when it moves on, before the owner sleeps. Says whether it has
    /// already: then there may be no write. Commands that wait for room in the completion ring wait for its head.
    ///
    /// # Errors
    /// As for [`ControllerQueuePair::fetch`].
    pub fn arm(&mut self) -> Result<bool, DoorbellFault> {
        let tail = self.sq_doorbell.listen(self.sq_tail);
        let head = self.cq_doorbell.listen(self.cq_head);
        self.take_tail(tail)?;
        self.take_head(head)?;
        Ok(self.sq_head != self.sq_tail && self.has_room())
    }

    /// Whether one more completion than those owed has an entry. One entry always stays free.
    #[inline]
    fn has_room(&self) -> bool {
        let entries = usize::from(self.rings.cq_entries);
        let unread = usize::from(distance(self.cq_head, self.cq_tail, self.rings.cq_entries));
        unread + self.in_flight() < entries - 1
    }

    /// Reads the head; says whether there is room now.
    #[cold]
    fn look_for_room(&mut self) -> Result<bool, DoorbellFault> {
        let head = self.cq_doorbell.read();
        self.take_head(head)?;
        Ok(self.has_room())
    }

    /// Reads the tail; says whether nothing has come.
    #[inline]
    fn look_for_tail(&mut self) -> Result<bool, DoorbellFault> {
        let tail = self.sq_doorbell.read();
        self.take_tail(tail)?;
        Ok(self.sq_head == self.sq_tail)
    }

    #[inline]
    fn take_tail(&mut self, tail: u32) -> Result<(), DoorbellFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        if tail >= u32::from(self.rings.sq_entries) {
            return self.stop(DoorbellFault::Tail(tail));
        }
        self.sq_tail = tail as u16;
        Ok(())
    }

    #[inline]
    fn take_head(&mut self, head: u32) -> Result<(), DoorbellFault> {
        let entries = self.rings.cq_entries;
        let is_index = head < u32::from(entries);
        if !is_index || distance(self.cq_head, head as u16, entries) > distance(self.cq_head, self.cq_tail, entries) {
            return self.stop(DoorbellFault::Head(head));
        }
        self.cq_head = head as u16;
        Ok(())
    }

    /// Fetches nothing more.
    #[cold]
    fn stop(&mut self, fault: DoorbellFault) -> Result<(), DoorbellFault> {
        self.fault = Some(fault);
        self.sq_tail = self.sq_head;
        Err(fault)
    }

    #[inline]
    fn write(&mut self, cid: u16, status: NvmeStatus, result: u64) {
        let cqe = Cqe::new(cid, self.qid, self.sq_head, status, result, self.phase);
        // The second word last: it has the phase.
        self.rings.cq.store_u64s(usize::from(self.cq_tail) * CQE_BYTES, cqe.0, Release);
        self.cq_tail = next(self.cq_tail, self.rings.cq_entries);
        self.phase ^= self.cq_tail == 0;
    }
}

#[inline]
const fn next(index: u16, entries: u16) -> u16 {
    if index + 1 == entries { 0 } else { index + 1 }
}

/// Steps from one index to another, round a ring.
#[inline]
const fn distance(from: u16, to: u16, entries: u16) -> u16 {
    if to >= from { to - from } else { to + (entries - from) }
}
