//! The parked pollers of a lane, which its turns leave out.
//!
//! An idle poller is parked: armed by itself, in no turn, and in no preparation for a sleep. [`Lane::unpark`] brings
//! it back when one of its eventfds is signalled, [`Lane::unpark_all`] when the lane's waker was called. A poller with
//! completions or deadlines outstanding is not idle, and is not parked.
//!
//! The lane's runner does the other half: it listens to the eventfds of each poller that [`Lane::next_parked`]
//! returns, and keeps listening across turns and sleeps.

use std::ops::RangeInclusive;

use super::{Lane, Poller, Slot, resident, resident_mut};
use crate::idle::IdlePolicy;

/// Bounds of the idle time after which a poller is parked, ns. Between them it is the idle policy's spin time, within
/// which clients expect to be seen without a kick. Parking and unparking a poller takes about 2 us of system calls and
/// arming: one used again after more than the lower bound loses a few percent. The upper bound is for lanes that never
/// sleep.
const PARK_NS: RangeInclusive<u64> = 50_000..=1_000_000;

pub(super) fn park_ns(policy: IdlePolicy) -> u64 {
    policy.spin_ns.clamp(*PARK_NS.start(), *PARK_NS.end())
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

    /// Parks the pollers that have been idle for long, but for the one that was busy last: it is the likeliest to be
    /// wanted next, and a turn has at least one. A poller that finds work while it is armed is not parked, nor one
    /// that is to leave or has a deadline.
    #[cold]
    pub(super) fn park<Cx: ?Sized>(&mut self)
    where
        S: Poller<Cx>,
    {
        let Lane { slots, active, newly_parked, parked, park_ns, now_ns, .. } = self;
        let latest = active.iter().copied().max_by_key(|&slot| resident(slots, slot).busy_ns);
        active.retain(|&slot| {
            let resident = resident_mut(slots, slot);
            if now_ns.saturating_sub(resident.busy_ns) <= *park_ns || Some(slot) == latest {
                return true;
            }
            let waits_for_eventfd = !resident.leaving && resident.poller.deadline_ns().is_none();
            if waits_for_eventfd && !resident.poller.arm() {
                resident.parked = true;
                *parked += 1;
                newly_parked.push(slot);
                return false;
            }
            if waits_for_eventfd {
                resident.poller.disarm();
            }
            // Checked again after the same time.
            resident.busy_ns = *now_ns;
            true
        });
        self.share_turn::<Cx>(None);
    }
}
