//! Order of the members that share a resource: the time of a device, or its depth.
//!
//! Deficit round robin (Shreedhar and Varghese, 1995): each member has a credit and is served while it lasts. A member
//! without credit goes to the back and is given its share of the next round. A returning member that has not used up
//! its share of this round goes ahead of all that have, so a light member does not wait for heavy ones (as the new
//! flows of FQ-CoDel, RFC 8290). Its share limits how often this can happen. Of several returning members the least
//! served one goes first, independent of arrival. All operations take a constant number of steps for any number of
//! members.

use super::super::slots::NONE;
use super::super::streams::Streams;
use super::FairStream;

/// Position of a member.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemberShare {
    /// Remaining credit, in the unit of its queue; negative if overdrawn.
    pub(super) credit: i64,
    /// Time at which it took its position.
    pub(super) since_ns: u64,
    /// Round of its latest share.
    round: u32,
    /// The next in its row.
    next: u32,
    /// The credit it takes for it to be served, if that is more than for others.
    pub(super) needs: i64,
    /// Total service, in bytes at the default weight, if counted.
    pub(super) served: u64,
    /// Share beside others, of a hundred.
    pub(super) weight: u32,
    /// Its weight as counted in the queue's total.
    counted: u32,
    pub(super) queued: bool,
}

impl MemberShare {
    /// For a member without service so far.
    pub(super) fn new(weight: u32) -> MemberShare {
        MemberShare { weight, ..MemberShare::default() }
    }
}

/// A row of members.
#[derive(Clone, Copy, Debug)]
struct MemberList {
    first: u32,
    last: u32,
    len: u32,
}

impl MemberList {
    const EMPTY: MemberList = MemberList { first: NONE, last: NONE, len: 0 };

    fn push(&mut self, streams: &mut Streams<FairStream>, at: u32) {
        streams.get_mut(at).share.next = NONE;
        match self.last {
            NONE => self.first = at,
            last => streams.get_mut(last).share.next = at,
        }
        self.last = at;
        self.len += 1;
    }

    fn push_first(&mut self, streams: &mut Streams<FairStream>, at: u32) {
        streams.get_mut(at).share.next = self.first;
        if self.first == NONE {
            self.last = at;
        }
        self.first = at;
        self.len += 1;
    }

    fn pop(&mut self, streams: &Streams<FairStream>) {
        self.first = streams.get(self.first).share.next;
        if self.first == NONE {
            self.last = NONE;
        }
        self.len -= 1;
    }
}

/// Members that wait for their turn.
#[derive(Debug)]
pub(super) struct MemberQueue {
    /// Members with a rest of their share.
    light: MemberList,
    heavy: MemberList,
    /// Whether the one in front is of the light ones.
    front_is_light: bool,
    /// Number of the round, from 1. A round ends when all members that were heavy at its beginning have been served.
    round: u32,
    left: u32,
    /// Sum of all weights.
    weight: u64,
    /// Smallest credit with which a member is served.
    least: i64,
    /// Longest wait of a heavy member while light ones exist; after that the order of arrival applies.
    late_ns: u64,
}

impl MemberQueue {
    /// A queue in which a member is served that has at least `least` credit.
    pub(super) fn new(least: i64, late_ns: u64) -> MemberQueue {
        MemberQueue {
            light: MemberList::EMPTY,
            heavy: MemberList::EMPTY,
            front_is_light: false,
            round: 1,
            left: 0,
            weight: 0,
            least,
            late_ns,
        }
    }

    /// Smallest credit with which a member is served.
    pub(super) fn least(&self) -> i64 {
        self.least
    }

    /// Takes all members out; the queue stays empty, and a round further.
    pub(super) fn take(&mut self) -> MemberQueue {
        let next =
            MemberQueue { round: self.round.wrapping_add(1).max(1), ..MemberQueue::new(self.least, self.late_ns) };
        std::mem::replace(self, next)
    }

    #[cfg(test)]
    pub(super) fn round(&self) -> u32 {
        self.round
    }

    pub(super) fn weight(&self) -> u64 {
        self.weight
    }

    /// Number of members.
    pub(super) fn len(&self) -> u32 {
        self.light.len + self.heavy.len
    }

    /// Whether the member in front still had something of its due when it came.
    pub(super) fn front_is_light(&self) -> bool {
        self.front_is_light
    }

    /// A member wants something. It is light if enough is left of its due, and if it may be.
    pub(super) fn enter(
        &mut self,
        streams: &mut Streams<FairStream>,
        at: u32,
        due: i64,
        may_be_light: bool,
        now_ns: u64,
    ) {
        let share = &mut streams.get_mut(at).share;
        let rounds = i64::from(self.round.wrapping_sub(share.round) as i32);
        if share.round == 0 || rounds > 0 {
            // Credit of earlier rounds expires, debts do not.
            share.credit = share.credit.saturating_add(due.saturating_mul(rounds.max(1))).min(due);
            share.round = self.round;
        }
        if may_be_light && share.credit >= self.least {
            self.count(share, now_ns);
            let (served, first) = (share.served, self.light.first);
            if first != NONE && served < streams.get(first).share.served {
                self.light.push_first(streams, at);
            } else {
                self.light.push(streams, at);
            }
        } else {
            let due = if share.round == self.round && share.credit < self.least { due } else { 0 };
            self.enter_last(streams, at, due, now_ns);
        }
    }

    /// Queues a member that exceeds its share at the back, with the share of the next round.
    pub(super) fn enter_last(&mut self, streams: &mut Streams<FairStream>, at: u32, due: i64, now_ns: u64) {
        let share = &mut streams.get_mut(at).share;
        if due > 0 {
            // Savings are limited to the credit needed to be served.
            share.credit = share.credit.min(due.max(self.least).max(share.needs)) + due;
            share.round = self.round.wrapping_add(1).max(1);
        }
        self.count(share, now_ns);
        self.heavy.push(streams, at);
    }

    /// A member whose turn was cut short goes on with the rest of its credit. It keeps the time of its position.
    pub(super) fn enter_first(&mut self, streams: &mut Streams<FairStream>, at: u32, since_ns: u64) {
        self.count(&mut streams.get_mut(at).share, since_ns);
        self.heavy.push_first(streams, at);
        self.left += 1;
    }

    fn count(&mut self, share: &mut MemberShare, now_ns: u64) {
        (share.queued, share.since_ns, share.counted) = (true, now_ns, share.weight);
        self.weight += u64::from(share.weight);
    }

    /// The next member.
    #[inline]
    pub(super) fn front(&mut self, streams: &Streams<FairStream>, now_ns: u64) -> Option<u32> {
        let since_ns = |row: &MemberList| streams.get(row.first).share.since_ns;
        self.front_is_light = self.light.first != NONE
            && (self.heavy.first == NONE
                || now_ns.saturating_sub(since_ns(&self.heavy)) < self.late_ns
                || since_ns(&self.light) <= since_ns(&self.heavy));
        let row = if self.front_is_light { &self.light } else { &self.heavy };
        (row.first != NONE).then_some(row.first)
    }

    /// Since when the one waits that waits for longest.
    pub(super) fn since_ns(&self, streams: &Streams<FairStream>) -> Option<u64> {
        let firsts = [self.light.first, self.heavy.first].into_iter().filter(|at| *at != NONE);
        firsts.map(|at| streams.get(at).share.since_ns).min()
    }

    /// The one in front leaves.
    pub(super) fn pop(&mut self, streams: &mut Streams<FairStream>) {
        let row = if self.front_is_light { &mut self.light } else { &mut self.heavy };
        let share = &mut streams.get_mut(row.first).share;
        share.queued = false;
        self.weight -= u64::from(share.counted);
        if !self.front_is_light {
            if self.left == 0 {
                self.round = self.round.wrapping_add(1).max(1);
                self.left = row.len;
            }
            self.left -= 1;
        }
        row.pop(streams);
    }

    /// The front has more than one bio at a time, so it does not go ahead of others: with the credit that it has.
    pub(super) fn demote(&mut self, streams: &mut Streams<FairStream>, now_ns: u64) {
        let at = self.light.first;
        if self.front_is_light && !streams.get(at).bios.is_empty() {
            self.pop(streams);
            self.enter_last(streams, at, 0, now_ns);
        }
    }

    /// The one in front has used up its credit, and goes to the end.
    pub(super) fn rotate(&mut self, streams: &mut Streams<FairStream>, due: i64, now_ns: u64) {
        let at = if self.front_is_light { self.light.first } else { self.heavy.first };
        self.pop(streams);
        self.enter_last(streams, at, due, now_ns);
    }
}
