//! Whose turn is next among members that share something: the time of a device, or its depth.
//!
//! Deficit round robin (Shreedhar and Varghese, 1995): each member has a credit, and is served as long as that lasts.
//! Whose credit is used up goes to the end and is given as much as is its due. Who comes back and has not used up what
//! was its due in this round goes before all who have: so whoever wants little does not wait for those who want all
//! they can get (as the new flows of FQ-CoDel, RFC 8290). It cannot come before them more often than its due lets it.
//! Of several that come back who has been served least goes first, and not whoever happens to be there first.
//! All of it in a constant number of steps, for any number of members.

use super::super::slots::NONE;
use super::super::streams::Streams;
use super::FairStream;

/// Where a member stands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemberShare {
    /// What it may still use, in the unit of its line. Less than nothing if it has used more.
    pub(super) credit: i64,
    /// Since when it stands where it stands.
    pub(super) since_ns: u64,
    /// The round whose due it has been given.
    round: u32,
    /// The next in its row.
    next: u32,
    /// The credit it takes for it to be served, if that is more than for others.
    pub(super) needs: i64,
    /// What it has had since it is known, in bytes at a usual weight, if anybody counts it.
    pub(super) served: u64,
    /// Of a hundred, what is its due beside others.
    pub(super) weight: u32,
    /// What the line counts for it.
    counted: u32,
    pub(super) queued: bool,
}

impl MemberShare {
    /// Of who has had nothing yet.
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
    /// Who has something left of its due.
    light: MemberList,
    heavy: MemberList,
    /// Whether the one in front is of the light ones.
    front_is_light: bool,
    /// Counted from one. A round is over when all have been served that were heavy at its beginning.
    round: u32,
    left: u32,
    /// Sum of all weights.
    weight: u64,
    /// What it takes to be served.
    least: i64,
    /// How long a heavy one waits while there are light ones; from then on who came first goes first.
    late_ns: u64,
}

impl MemberQueue {
    /// A line in which a member is served that has at least so much credit.
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

    /// What it takes to be served.
    pub(super) fn least(&self) -> i64 {
        self.least
    }

    /// A line as it stands; what stays is empty, and a round further.
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

    /// How many stand in it.
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
            // What was left of earlier rounds is gone, what was owed is not.
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

    /// A member wants more than was its due, and is given what will be in the next round.
    pub(super) fn enter_last(&mut self, streams: &mut Streams<FairStream>, at: u32, due: i64, now_ns: u64) {
        let share = &mut streams.get_mut(at).share;
        if due > 0 {
            // Nobody saves more than it takes to be served.
            share.credit = share.credit.min(due.max(self.least).max(share.needs)) + due;
            share.round = self.round.wrapping_add(1).max(1);
        }
        self.count(share, now_ns);
        self.heavy.push(streams, at);
    }

    fn count(&mut self, share: &mut MemberShare, now_ns: u64) {
        (share.queued, share.since_ns, share.counted) = (true, now_ns, share.weight);
        self.weight += u64::from(share.weight);
    }

    /// Who is next.
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

    /// The one in front wants more than one thing at a time, and so does not go before others: with the credit that it
    /// has.
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
