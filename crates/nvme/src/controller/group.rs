//! A completion queue with the submission queues that complete to it.
//!
//! Owned by one thread, since all submission rings share the entries of the completion ring. Submission queues are
//! served round robin, one command each (CC.AMS 0, arbitration burst 1). A command is fetched only if its completion
//! has an entry. A submission ring with an invalid doorbell stops alone; a completion ring with an invalid doorbell
//! stops them all.

use serde::{Deserialize, Serialize};

use super::pair::Fetched;
use super::rings::{
    CompletionRing, CompletionRingSnapshot, DoorbellFault, SubmissionRing, SubmissionRingSnapshot, TokenTable,
};
use crate::doorbell::Doorbells;
use crate::{DmaMap, NvmeStatus};

/// Result of [`QueueGroup::fetch`].
pub(crate) enum FetchOutcome {
    /// A command.
    Command(Fetched),
    /// A command was refused, as its cid is in use. Its completion is written.
    Refused,
    /// None is available.
    Unavailable,
}

/// A submission queue of a group.
#[derive(Debug)]
struct GroupMember {
    ring: SubmissionRing,
    in_flight: u16,
    /// Whether it is being deleted.
    is_stopping: bool,
    /// Whether its fault was recorded.
    is_fault_told: bool,
}

/// State of a submission queue of a group. Its commands in flight are apart.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct GroupMemberSnapshot {
    pub(crate) ring: SubmissionRingSnapshot,
    pub(crate) is_stopping: bool,
    is_fault_told: bool,
}

/// State of a group without its memory and commands.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct QueueGroupSnapshot {
    pub(crate) cq: CompletionRingSnapshot,
    pub(crate) members: Vec<Option<GroupMemberSnapshot>>,
    turn: usize,
    is_fault_told: bool,
}

/// A completion queue and its submission queues.
#[derive(Debug)]
pub(crate) struct QueueGroup {
    cq: CompletionRing,
    /// An index is kept while commands of its queue are in flight.
    members: Vec<Option<GroupMember>>,
    tokens: TokenTable,
    /// Index of the next submission queue.
    turn: usize,
    /// Number of submission queues being removed.
    removing: usize,
    is_fault_told: bool,
}

impl QueueGroup {
    /// A completion queue without submission queues, with at most `depth` commands in flight.
    pub(crate) fn new(cq: CompletionRing, depth: u16) -> QueueGroup {
        let tokens = TokenTable::new(cq.depth().min(depth));
        QueueGroup { cq, members: Vec::new(), tokens, turn: 0, removing: 0, is_fault_told: false }
    }

    /// Identifiers of the submission queues.
    pub(crate) fn sqids(&self) -> impl Iterator<Item = u16> {
        self.members.iter().flatten().map(|member| member.ring.qid())
    }

    /// Saves its state.
    pub(crate) fn snapshot(&self) -> QueueGroupSnapshot {
        let member = |member: &Option<GroupMember>| {
            let GroupMember { ring, is_stopping, is_fault_told, .. } = member.as_ref()?;
            let (is_stopping, is_fault_told) = (*is_stopping, *is_fault_told);
            Some(GroupMemberSnapshot { ring: ring.snapshot(), is_stopping, is_fault_told })
        };
        QueueGroupSnapshot {
            cq: self.cq.snapshot(),
            members: self.members.iter().map(member).collect(),
            turn: self.turn,
            is_fault_told: self.is_fault_told,
        }
    }

    /// A group with saved state and without commands; `None` for an invalid state.
    pub(crate) fn restore(
        saved: &QueueGroupSnapshot,
        (entries_max, depth): (u16, u16),
        map: &DmaMap,
        doorbells: &Doorbells,
    ) -> Option<QueueGroup> {
        let mut group = QueueGroup::new(CompletionRing::restore(&saved.cq, entries_max, map, doorbells)?, depth);
        for member in &saved.members {
            let Some(GroupMemberSnapshot { ring, is_stopping, is_fault_told }) = member else {
                group.members.push(None);
                continue;
            };
            let (is_stopping, is_fault_told) = (*is_stopping, *is_fault_told);
            let ring = SubmissionRing::restore(ring, entries_max, map, doorbells)?;
            group.removing += usize::from(is_stopping);
            group.members.push(Some(GroupMember { ring, in_flight: 0, is_stopping, is_fault_told }));
        }
        (group.turn, group.is_fault_told) = (saved.turn, saved.is_fault_told);
        Some(group)
    }

    /// Submission queue of a command in flight.
    pub(crate) fn sqid(&self, token: u16) -> Option<u16> {
        let (place, _) = self.tokens.command(token)?;
        self.members.get(usize::from(place))?.as_ref().map(|member| member.ring.qid())
    }

    /// Marks a cid of a submission queue as that of a command in flight, and returns its token; `None` if it is in use,
    /// or if there is no such queue or no free token.
    pub(crate) fn claim(&mut self, sqid: u16, cid: u16) -> Option<u16> {
        let is_it = |member: &Option<GroupMember>| member.as_ref().is_some_and(|member| member.ring.qid() == sqid);
        let place = self.members.iter().position(is_it).filter(|_| self.tokens.has_free())?;
        let member = self.members[place].as_mut()?;
        if !member.ring.claim(cid) {
            return None;
        }
        member.in_flight += 1;
        self.cq.reserve();
        Some(self.tokens.take(place as u16, cid))
    }

    /// Entries of the completion queue.
    pub(crate) fn entries(&self) -> u16 {
        self.cq.depth() + 1
    }

    /// Number of commands in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.tokens.in_flight()
    }

    /// Adds a submission queue.
    pub(crate) fn add(&mut self, ring: SubmissionRing) {
        let member = Some(GroupMember { ring, in_flight: 0, is_stopping: false, is_fault_told: false });
        match self.members.iter_mut().find(|member| member.is_none()) {
            Some(place) => *place = member,
            None => self.members.push(member),
        }
    }

    /// Stops fetching from a submission queue; it is removed when its last command is complete.
    pub(crate) fn begin_removal(&mut self, qid: u16) {
        if let Some(member) = self.members.iter_mut().flatten().find(|member| member.ring.qid() == qid) {
            member.is_stopping = true;
            self.removing += 1;
        }
    }

    /// Removes a submission queue that is being removed and has no command in flight.
    #[inline]
    pub(crate) fn finish_removal(&mut self) -> Option<u16> {
        if self.removing == 0 {
            return None;
        }
        let is_over = |member: &GroupMember| member.is_stopping && member.in_flight == 0;
        let place = self.members.iter_mut().find(|member| member.as_ref().is_some_and(is_over))?;
        self.removing -= 1;
        place.take().map(|member| member.ring.qid())
    }

    /// Fetches the next command of the next submission queue, if there is one, a token is free and its completion has
    /// room. Broken and empty queues are skipped. At most one command is taken: the host can add more without end.
    #[inline]
    pub(crate) fn fetch(&mut self) -> FetchOutcome {
        for _ in 0..self.members.len() {
            let place = if self.turn < self.members.len() { self.turn } else { 0 };
            let member = self.members[place].as_mut().filter(|member| !member.is_stopping);
            let Some(member) = member.and_then(|member| (member.ring.has_next() == Ok(true)).then_some(member)) else {
                self.turn = place + 1;
                continue;
            };
            // The queue keeps its turn while it waits for room.
            if !self.tokens.has_free() || self.cq.has_room() != Ok(true) {
                self.turn = place;
                return FetchOutcome::Unavailable;
            }
            self.turn = place + 1;
            let sqe = member.ring.take();
            let cid = sqe.cid();
            if !member.ring.claim(cid) {
                self.cq.write(cid, &member.ring, NvmeStatus::CID_CONFLICT.with_dnr(), 0);
                return FetchOutcome::Refused;
            }
            member.in_flight += 1;
            self.cq.reserve();
            return FetchOutcome::Command(Fetched { token: self.tokens.take(place as u16, cid), sqe });
        }
        FetchOutcome::Unavailable
    }

    /// Completes a command in flight, in any order. Returns its submission queue and cid.
    ///
    /// # Panics
    /// If the token is not in use.
    #[inline]
    pub(crate) fn complete(&mut self, token: u16, status: NvmeStatus, result: u64) -> (u16, u16) {
        let (place, cid) = self.tokens.put(token);
        let Some(member) = &mut self.members[usize::from(place)] else {
            unreachable!("a submission queue stays while it has commands in flight")
        };
        member.in_flight -= 1;
        member.ring.release(cid);
        self.cq.unreserve();
        self.cq.write(cid, &member.ring, status, result);
        (member.ring.qid(), cid)
    }

    /// Whether completions were written since the last call, so that the host must be interrupted.
    #[inline]
    pub(crate) fn take_posted(&mut self) -> bool {
        self.cq.take_posted()
    }

    /// The token of a command in flight.
    pub(crate) fn find(&self, sqid: u16, cid: u16) -> Option<u16> {
        let is_it = |member: &Option<GroupMember>| member.as_ref().is_some_and(|member| member.ring.qid() == sqid);
        let place = self.members.iter().position(is_it)?;
        self.tokens.find(place as u16, cid)
    }

    /// An invalid doorbell that was not returned before: the submission queue, or zero for the completion queue.
    pub(crate) fn take_fault(&mut self) -> Option<(u16, DoorbellFault)> {
        if let Some(fault) = self.cq.fault().filter(|_| !self.is_fault_told) {
            self.is_fault_told = true;
            return Some((0, fault));
        }
        self.members.iter_mut().flatten().filter(|member| !member.is_fault_told).find_map(|member| {
            let fault = member.ring.fault()?;
            member.is_fault_told = true;
            Some((member.ring.qid(), fault))
        })
    }

    /// Requests writes of the doorbell registers. Returns whether a command is already available.
    pub(crate) fn arm(&mut self) -> bool {
        let mut has_next = false;
        for member in self.members.iter_mut().flatten().filter(|member| !member.is_stopping) {
            has_next |= member.ring.listen() == Ok(true);
        }
        // With room, a new head is no reason to wake: the host would write its register after nearly each interrupt.
        let has_room = self.cq.look_for_room() == Ok(true) || self.cq.listen() == Ok(true);
        has_next && has_room && self.tokens.has_free()
    }

    /// Continues in this memory of the host, with these doorbells: see [`SubmissionRing::bind`] and
    /// [`CompletionRing::bind`].
    pub(crate) fn bind(&mut self, map: &DmaMap, doorbells: &Doorbells, is_new: bool) {
        self.cq.bind(map, doorbells, is_new);
        for member in self.members.iter_mut().flatten() {
            member.ring.bind(map, doorbells, is_new);
        }
    }
}
