//! Rate limits of a queue: how much it books of the [limits](crate::RateLimit) it shares, and when waiting bios may
//! pass.
//!
//! A bio passes when it gets a tag, or joins a request. Until then it waits where bios wait for tags, so the rules of
//! those apply to it, and a scheduler orders it. A limit is not consulted before a bio waits:
//!
//! ```text
//!   waits ──▶ booked ──▶ held until its time ──▶ passes: a tag, or a request it joins
//!                 └───── or at once ───────────────▲
//! ```
//!
//! A queue books for a number of waiting bios, not for a certain one: up to [`LOT_NS`] of its share. So queues that
//! wait for the same limit get lots in turn, and one with a limit of a hundred thousand a second books four thousand
//! times a second. Bookings that it has not used stay its own, and are returned when the limit changes or the queue is
//! dropped.
//!
//! Each bio counts as one I/O, even if it is split or joins another's request, and as the bytes it moves. Not held are
//! flushes, since the data of others waits for them; bios with a reserved tag; the rest of a split bio; and requests
//! that the device handed back.
//!
//! A queue that is [frozen](HwQueue::freeze) or [in a hurry](HwQueue::set_hurry) is to be empty soon. Its bios then
//! pass at once and are still charged: later ones wait for it.

use std::sync::Arc;

use super::HwQueue;
use super::split::must_not_wait;
use crate::rate::{Meter, RateLimit};
use crate::{Bio, BioFlags, SECTOR_BYTES, Status};

/// Time of which a queue books the rate at once, and shortest time for which it is held: long against the cost of a
/// wake-up, short against what a user notices of a limit.
const LOT_NS: u64 = 250_000;

/// Rate limits of a namespace of a queue, and its bookings.
#[derive(Debug)]
pub(super) struct Rated {
    limits: Box<[Arc<RateLimit>]>,
    /// I/Os booked that have not passed.
    ios: u64,
    /// Bytes booked that have not passed.
    bytes: u64,
    /// When those may.
    at_ns: u64,
    /// Bytes of the bio that passed last: the estimate for the next.
    usual_bytes: u64,
    /// No bio passes before this time.
    held_until_ns: Option<u64>,
    /// Since when.
    held_since_ns: u64,
}

impl Rated {
    fn ios_meters(&self) -> impl Iterator<Item = &Meter> {
        self.limits.iter().filter_map(|limit| limit.ios.as_ref())
    }

    fn bytes_meters(&self) -> impl Iterator<Item = &Meter> {
        self.limits.iter().filter_map(|limit| limit.bytes.as_ref())
    }

    /// Whether no bio passes now.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.held_until_ns.is_some()
    }

    /// Releases the waiting bios until the next check.
    pub(super) fn release(&mut self) {
        self.held_until_ns = None;
    }

    /// For how much longer.
    pub(super) fn held_ns(&self, now_ns: u64) -> Option<u64> {
        self.held_until_ns.map(|until_ns| until_ns.saturating_sub(now_ns))
    }

    /// Whether one of `waiting` bios may pass now. Books it, unless it is booked, and holds all of them if it may not.
    fn may_pass(&mut self, waiting: usize, now_ns: u64) -> bool {
        if self.is_held() {
            return false;
        }
        if self.ios == 0 || (self.bytes == 0 && self.bytes_meters().next().is_some()) {
            self.book(waiting as u64, now_ns);
        }
        if now_ns >= self.at_ns {
            return true;
        }
        self.held_until_ns = Some(self.at_ns.max(now_ns + LOT_NS));
        self.held_since_ns = now_ns;
        false
    }

    /// Books a lot: for one at least.
    #[inline(never)]
    fn book(&mut self, waiting: u64, now_ns: u64) {
        let each_bytes = self.usual_bytes;
        let ios_ns = self.ios_meters().map(|meter| meter.takes_ns(1));
        let each_ns = ios_ns.chain(self.bytes_meters().map(|meter| meter.takes_ns(each_bytes))).max();
        let lot = (LOT_NS / each_ns.unwrap_or(1).max(1)).min(waiting).max(1);
        // The rest of the previous lot counts.
        let (ios, bytes) = (lot.saturating_sub(self.ios), (lot * each_bytes).saturating_sub(self.bytes));
        let book = |meter: &Meter, units: u64, one: u64| {
            if units == 0 { 0 } else { meter.book(now_ns, units, one.min(units)) }
        };
        let ios_at = self.ios_meters().map(|meter| book(meter, ios, 1));
        let at_ns = ios_at.chain(self.bytes_meters().map(|meter| book(meter, bytes, each_bytes))).max();
        self.at_ns = at_ns.unwrap_or(0);
        self.ios += ios;
        self.bytes += bytes;
    }

    /// A bio has passed.
    fn passed(&mut self, bytes: u64, now_ns: u64) {
        // A queue in a hurry has booked nothing for this bio, and an estimate may have been short.
        let (ios_short, bytes_short) = (1_u64.saturating_sub(self.ios), bytes.saturating_sub(self.bytes));
        self.ios = self.ios.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
        if ios_short > 0 {
            self.ios_meters().for_each(|meter| meter.charge(now_ns, ios_short));
        }
        if bytes_short > 0 {
            self.bytes_meters().for_each(|meter| meter.charge(now_ns, bytes_short));
        }
        if bytes > 0 {
            self.usual_bytes = bytes;
        }
    }
}

impl Drop for Rated {
    fn drop(&mut self) {
        self.ios_meters().for_each(|meter| meter.give_back(self.ios));
        self.bytes_meters().for_each(|meter| meter.give_back(self.bytes));
    }
}

impl<D> HwQueue<D> {
    /// Sets the rate limits of a namespace; all of them apply, and an empty list is no limit. Bookings of the previous
    /// limits are returned.
    pub fn set_rates(&mut self, namespace: u16, limits: Vec<Arc<RateLimit>>) {
        self.release();
        let Some(namespace) = self.namespaces.get_mut(usize::from(namespace)) else { return };
        namespace.rated = (!limits.is_empty()).then(|| Rated {
            limits: limits.into(),
            ios: 0,
            bytes: 0,
            at_ns: 0,
            usual_bytes: SECTOR_BYTES,
            held_until_ns: None,
            held_since_ns: 0,
        });
        self.rated = self.namespaces.iter().any(|namespace| namespace.rated.is_some());
        self.choose_plain();
    }

    /// Whether limits hold no bio, because the queue is to be drained: bios pass at once and are charged.
    pub fn set_hurry(&mut self, hurry: bool) {
        self.hurry = hurry;
        if hurry {
            self.release();
        }
    }

    /// Whether they do not, for that reason.
    #[inline]
    pub fn is_in_hurry(&self) -> bool {
        self.hurry
    }

    /// Whether there are limits.
    #[inline]
    pub fn is_rated(&self) -> bool {
        self.rated
    }

    /// Releases held bios until the next check.
    pub(super) fn release(&mut self) {
        self.namespaces.iter_mut().filter_map(|namespace| namespace.rated.as_mut()).for_each(Rated::release);
    }

    /// A bio that has to pass a limit.
    pub(super) fn await_rate(&mut self, number: usize, bio: Box<Bio>) {
        if self.must_come_back(number, &bio) {
            return self.refuse(number, bio, Status::Again);
        }
        self.namespaces[number].bios.push_back(bio);
        self.namespaces[number].fresh += 1;
        self.unsplit += 1;
    }

    /// Whether the next bio of a namespace may pass now.
    #[inline]
    pub(super) fn may_pass(&mut self, number: usize, now_ns: u64) -> bool {
        !self.rated || self.may_pass_slow(number, now_ns)
    }

    #[inline(never)]
    fn may_pass_slow(&mut self, number: usize, now_ns: u64) -> bool {
        if self.hurry || self.frozen > 0 {
            return true;
        }
        let namespace = &mut self.namespaces[number];
        let waiting = namespace.waiting();
        let Some(rated) = &mut namespace.rated else { return true };
        let was_held = rated.is_held();
        let may_pass = rated.may_pass(waiting, now_ns);
        if !may_pass && !was_held && self.config.stats {
            namespace.stats.held();
        }
        may_pass
    }

    /// Accounts for a bio that has passed, if there is a limit.
    #[inline]
    pub(super) fn charge(&self, number: usize, bio: &Bio) -> Option<u64> {
        let pays = self.rated && self.namespaces[number].rated.is_some() && !bio.flags.contains(BioFlags::RESERVED);
        pays.then(|| bio.moves_bytes())
    }

    /// A bio has passed.
    #[inline]
    pub(super) fn pay(&mut self, number: usize, charge: Option<u64>, now_ns: u64) {
        if let Some(bytes) = charge
            && let Some(rated) = &mut self.namespaces[number].rated
        {
            rated.passed(bytes, now_ns);
        }
    }

    /// Begins a round: held bios may have waited long enough.
    #[inline(never)]
    pub(super) fn look_at_rates(&mut self, now_ns: u64) {
        for namespace in &mut self.namespaces {
            if let Some(rated) = &mut namespace.rated
                && rated.held_until_ns.is_some_and(|until_ns| now_ns >= until_ns)
            {
                rated.held_until_ns = None;
                if self.config.stats {
                    namespace.stats.held_for(now_ns.saturating_sub(rated.held_since_ns));
                }
            }
        }
    }

    /// `NOWAIT` bios are not held. Those that the scheduler has already are not searched.
    #[inline(never)]
    pub(super) fn refuse_held(&mut self) {
        for number in 0..self.namespaces.len() {
            let namespace = &self.namespaces[number];
            if !namespace.is_held() || !namespace.bios.iter().any(|bio| must_not_wait(bio)) {
                continue;
            }
            for _ in 0..self.namespaces[number].bios.len() {
                let Some(bio) = self.namespaces[number].bios.pop_front() else { break };
                if must_not_wait(&bio) {
                    self.unsplit -= 1;
                    self.refuse(number, bio, Status::Again);
                } else {
                    self.namespaces[number].bios.push_back(bio);
                }
            }
            self.end_empty_hold(number);
        }
    }

    /// Ends the hold of a namespace without held bios: no later event would.
    pub(super) fn end_empty_hold(&mut self, number: usize) {
        let namespace = &mut self.namespaces[number];
        if namespace.waiting() == usize::from(namespace.partial.is_some())
            && let Some(rated) = &mut namespace.rated
        {
            rated.held_until_ns = None;
        }
    }

    /// Time at which held bios may pass. Not needed while no tag is free.
    pub(super) fn rated_due_ns(&self) -> Option<u64> {
        let may_ask = |number: &usize| self.may_take(*number, BioFlags::empty());
        let held = |number: usize| self.namespaces[number].rated.as_ref()?.held_until_ns;
        (0..self.namespaces.len()).filter(may_ask).filter_map(held).min()
    }
}
