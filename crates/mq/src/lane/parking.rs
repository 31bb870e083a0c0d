//! The parked pollers of a lane, which its turns leave out.
//!
//! An idle poller is parked: armed by itself, in no turn, and in no preparation for a sleep. [`Lane::unpark`] brings
//! it back when one of its eventfds is signalled, [`Lane::unpark_all`] when the lane's waker was called. A poller with
//! completions outstanding is not idle, and is not parked.
//!
//! A parked poller with a deadline has one round when it is due, and is unparked only if that round finds work. A queue
//! without a kick is polled so, at its own interval. A turn runs few such rounds, so many pollers with the same
//! deadline do not delay the active ones.
//!
//! The lane's runner does the other half: it listens to the eventfds of each poller that [`Lane::next_parked`]
//! returns, and keeps listening across turns and sleeps.

use std::cmp::Reverse;
use std::ops::RangeInclusive;

use super::{Lane, Poller, PollerState, Slot, resident, resident_mut};
use crate::idle::IdlePolicy;

/// Bounds of the idle time after which a poller is parked, ns. Between them it is the idle policy's spin time, within
/// which clients expect to be seen without a kick. Parking and unparking a poller takes about 2 us of system calls and
/// arming: one used again after more than the lower bound loses a few percent. The upper bound is for lanes that never
/// sleep.
const PARK_NS: RangeInclusive<u64> = 50_000..=1_000_000;

/// Maximum rounds of parked pollers in a turn: each takes some 0.2 us.
const DUE_MAX: usize = 4;

/// A round of a parked poller: its time, ns, and the poller's slot. The earliest is the greatest.
pub(super) type DueRound = Reverse<(u64, Slot)>;

pub(super) fn park_ns(policy: IdlePolicy) -> u64 {
    policy.longest_ns().clamp(*PARK_NS.start(), *PARK_NS.end())
}

impl<S> Lane<S> {
    /// Slots of the pollers that every turn runs, in that order.
    pub fn active(&self) -> &[Slot] {
        &self.active
    }

    /// Slot of a poller that the last turn parked. Its eventfds are polled from now on; if one of them cannot be, or
    /// when one is signalled, the poller is [unparked](Lane::unpark). Called after every turn until it returns `None`.
    #[inline]
    pub fn next_parked(&mut self) -> Option<Slot> {
        self.newly_parked.pop()
    }

    /// Runs a poller again from the next turn on, because its eventfd was signalled. Does nothing if it is not parked.
    pub fn unpark<Cx: ?Sized>(&mut self, slot: Slot)
    where
        S: Poller<Cx>,
    {
        let Some(Some(resident)) = self.slots.get_mut(slot) else { return };
        if !std::mem::take(&mut resident.parked) {
            return;
        }
        resident.busy_ns = self.now_ns;
        resident.due_ns = None;
        // If the active ones are armed, too, the next turn disarms it with them.
        if !self.armed {
            resident.poller.disarm();
        }
        self.parked -= 1;
        self.active.push(slot);
        self.share_turn::<Cx>(Some(slot));
    }

    /// The lane's waker was called: any poller may have something to do.
    #[cold]
    pub fn unpark_all<Cx: ?Sized>(&mut self)
    where
        S: Poller<Cx>,
    {
        self.newly_parked.clear();
        for slot in 0..self.slots.len() {
            if self.parked == 0 {
                break;
            }
            self.unpark(slot);
        }
    }

    /// Makes room for the rounds of all pollers, and as many outdated ones.
    pub(super) fn reserve_due(&mut self) {
        self.due.reserve((2 * self.slots.len()).saturating_sub(self.due.len()));
    }

    /// Time of the next round of a parked poller.
    pub(super) fn next_due_ns(&mut self) -> Option<u64> {
        while let Some(&Reverse((due_ns, slot))) = self.due.peek() {
            if self.is_due(due_ns, slot) {
                return Some(due_ns);
            }
            self.due.pop();
        }
        None
    }

    /// Whether a round is not outdated.
    fn is_due(&self, due_ns: u64, slot: Slot) -> bool {
        self.slots[slot].as_ref().is_some_and(|resident| resident.due_ns == Some(due_ns))
    }

    /// Runs the parked pollers whose deadlines are due. Returns the state of the busiest.
    #[inline]
    pub(super) fn run_due<Cx: ?Sized>(&mut self, cx: &mut Cx) -> PollerState
    where
        S: Poller<Cx>,
    {
        match self.due.peek() {
            Some(&Reverse((due_ns, _))) if due_ns <= self.now_ns => self.run_due_slow(cx),
            _ => PollerState::Idle,
        }
    }

    #[cold]
    fn run_due_slow<Cx: ?Sized>(&mut self, cx: &mut Cx) -> PollerState
    where
        S: Poller<Cx>,
    {
        let mut busiest = PollerState::Idle;
        for _ in 0..DUE_MAX {
            if self.next_due_ns().is_none_or(|due_ns| due_ns > self.now_ns) {
                break;
            }
            let Some(Reverse((_, slot))) = self.due.pop() else { break };
            let resident = resident_mut(&mut self.slots, slot);
            resident.due_ns = None;
            resident.poller.disarm();
            let state = resident.poller.run_once(cx, self.now_ns);
            resident.worked |= state == PollerState::Busy;
            busiest = busiest.max(state);
            let deadline_ns = resident.poller.deadline_ns();
            let is_idle = state == PollerState::Idle && deadline_ns.is_none_or(|deadline_ns| deadline_ns > self.now_ns);
            if !is_idle || resident.poller.arm() {
                self.unpark(slot);
            } else if let Some(deadline_ns) = deadline_ns {
                self.park_until(slot, deadline_ns);
            }
        }
        busiest
    }

    /// Runs a parked poller at this time.
    fn park_until(&mut self, slot: Slot, due_ns: u64) {
        if self.due.len() >= 2 * self.slots.len() {
            let slots = &self.slots;
            self.due.retain(|&Reverse((due_ns, slot))| {
                slots[slot].as_ref().is_some_and(|resident| resident.due_ns == Some(due_ns))
            });
        }
        resident_mut(&mut self.slots, slot).due_ns = Some(due_ns);
        self.due.push(Reverse((due_ns, slot)));
    }

    /// Parks the pollers that have been idle for long, but for the one that was busy last: it is the likeliest to be
    /// wanted next, and a turn has at least one. A poller that finds work while it is armed is not parked, nor one
    /// that is to leave or whose deadline is due. Returns whether one found work.
    #[cold]
    pub(super) fn park<Cx: ?Sized>(&mut self) -> bool
    where
        S: Poller<Cx>,
    {
        let (park_ns, now_ns) = (self.park_ns, self.now_ns);
        let latest = self.active.iter().copied().max_by_key(|&slot| resident(&self.slots, slot).busy_ns);
        let mut active = std::mem::take(&mut self.active);
        let mut finds_work = false;
        active.retain(|&slot| {
            let resident = resident_mut(&mut self.slots, slot);
            if now_ns.saturating_sub(resident.busy_ns) <= park_ns || Some(slot) == latest {
                return true;
            }
            let deadline_ns = resident.poller.deadline_ns();
            let can_wait = !resident.leaving && deadline_ns.is_none_or(|deadline_ns| deadline_ns > now_ns);
            if can_wait && !resident.poller.arm() {
                resident.parked = true;
                self.parked += 1;
                self.newly_parked.push(slot);
                if let Some(deadline_ns) = deadline_ns {
                    self.park_until(slot, deadline_ns);
                }
                return false;
            }
            if can_wait {
                finds_work = true;
                resident.poller.disarm();
            }
            // Checked again after the same time.
            resident.busy_ns = now_ns;
            true
        });
        self.active = active;
        self.share_turn::<Cx>(None);
        finds_work
    }
}
