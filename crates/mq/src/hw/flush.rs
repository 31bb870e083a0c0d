//! The flush machine: all bios that must become durable at one time share one flush of the device.
//!
//! A bio has up to three steps: a flush before its data, the data, a flush after. Its flags and the device say which
//! are needed (Linux `block/blk-flush.c`, the policy):
//!
//! | device | flush | write, PREFLUSH | write, FUA |
//! |---|---|---|---|
//! | no volatile cache | done at once | data | data |
//! | cache, native FUA | flush | flush, data | data with FUA |
//! | cache | flush | flush, data | data, flush |
//!
//! Two lists ensure that a flush covers only earlier writes: bios that wait for a flush not yet issued, and bios that
//! wait on the one in flight. A flush is issued if none is in flight and a bio waits, as soon as no data of a flush
//! sequence is in flight, whose flush could be shared too, or the first bio has waited too long. Data without a request
//! is not in flight: a rate limit may hold it for any time.
//!
//! Each namespace of each hardware queue has its own machine, owned by the queue. A flush of one still covers what has
//! completed on the others before, since it flushes the device's cache. This module holds bios and decides; requests
//! and tags belong to the queue.

use std::collections::VecDeque;

use crate::bio::FlushSteps;
use crate::{Bio, BioFlags, DeviceInfo, Op, Status};

/// Longest time for which waiting flushes let data of other sequences go first, as in Linux (`FLUSH_PENDING_TIMEOUT`).
const PENDING_MAX_NS: u64 = 5_000_000_000;

/// Steps needed for the flags that the device does not support itself.
pub(super) fn steps(bio: &Bio, info: &DeviceInfo) -> FlushSteps {
    let mut steps = if bio.op == Op::Flush { FlushSteps::empty() } else { FlushSteps::DATA };
    if info.volatile_cache {
        if bio.op == Op::Flush || bio.flags.contains(BioFlags::PREFLUSH) {
            steps |= FlushSteps::PREFLUSH;
        }
        if bio.op != Op::Flush && bio.flags.contains(BioFlags::FUA) && !info.fua {
            steps |= FlushSteps::POSTFLUSH;
        }
    }
    steps
}

/// The flags that a request takes over from its bio: those that its driver must know of.
pub(super) fn request_flags(info: &DeviceInfo) -> BioFlags {
    let fua = if info.volatile_cache && info.fua { BioFlags::FUA } else { BioFlags::empty() };
    fua | BioFlags::NO_UNMAP | BioFlags::ATOMIC
}

/// Bios that wait for a flush in one namespace of one hardware queue.
#[derive(Debug, Default)]
pub(super) struct Flush {
    /// Bios that wait for the next flush.
    pending: VecDeque<Box<Bio>>,
    /// Bios that wait on the flush in flight.
    running: VecDeque<Box<Bio>>,
    in_flight: bool,
    /// Bios of a sequence whose data is in flight.
    data_in_flight: usize,
    /// When the first of `pending` was seen waiting.
    pending_since_ns: Option<u64>,
}

/// Next step of a bio.
#[derive(Debug)]
pub(super) enum FlushNext {
    /// Its data goes to the device, ahead of other waiting bios.
    Data(Box<Bio>),
    /// It has completed.
    Over(Box<Bio>),
}

impl Flush {
    /// Room for `bios_max` bios.
    pub(super) fn new(bios_max: usize) -> Flush {
        Flush {
            pending: VecDeque::with_capacity(bios_max),
            running: VecDeque::with_capacity(bios_max),
            ..Flush::default()
        }
    }

    /// A bio that needs more than its data. Given back if the data comes first.
    pub(super) fn begin(&mut self, bio: Box<Bio>) -> Option<Box<Bio>> {
        if bio.steps.contains(FlushSteps::PREFLUSH) {
            self.pending.push_back(bio);
            return None;
        }
        Some(bio)
    }

    /// The data of a sequence has a request.
    pub(super) fn data_dispatched(&mut self, bio: &mut Bio) {
        bio.steps.insert(FlushSteps::DISPATCHED);
        self.data_in_flight += 1;
    }

    /// Bios that wait for the next flush, the last first.
    pub(super) fn newest_pending(&mut self) -> impl Iterator<Item = &mut Box<Bio>> {
        self.pending.iter_mut().rev()
    }

    /// Takes out a bio that waits for the next flush and has moved no data, for which this is true.
    pub(super) fn cancel(&mut self, is_its: &mut impl FnMut(&Bio) -> bool) -> Option<Box<Bio>> {
        let at = self.pending.iter().position(|bio| bio.steps.contains(FlushSteps::PREFLUSH) && is_its(bio))?;
        let mut bio = self.pending.remove(at)?;
        bio.steps = FlushSteps::empty();
        if self.pending.is_empty() {
            self.pending_since_ns = None;
        }
        Some(bio)
    }

    /// Whether a flush is to be issued now.
    pub(super) fn is_due(&mut self, now_ns: u64) -> bool {
        if self.pending.is_empty() || self.in_flight {
            return false;
        }
        let since_ns = *self.pending_since_ns.get_or_insert(now_ns);
        self.data_in_flight == 0 || now_ns.saturating_sub(since_ns) >= PENDING_MAX_NS
    }

    /// Whether a flush could be issued without waiting for anything but a tag.
    pub(super) fn is_free(&self) -> bool {
        self.is_wanted() && self.data_in_flight == 0
    }

    /// When a flush becomes due by waiting alone.
    pub(super) fn due_ns(&self) -> Option<u64> {
        let waits = !self.pending.is_empty() && !self.in_flight;
        waits.then(|| self.pending_since_ns.map_or(0, |since_ns| since_ns + PENDING_MAX_NS))
    }

    /// A flush has been issued for the waiting bios.
    pub(super) fn issued(&mut self) {
        debug_assert!(!self.in_flight && self.running.is_empty());
        std::mem::swap(&mut self.pending, &mut self.running);
        self.in_flight = true;
        self.pending_since_ns = None;
    }

    /// The flush in flight has completed. Each bio that waited on it makes its next step; the last comes first, so that
    /// inserting each ahead of the others keeps their order.
    pub(super) fn flushed(&mut self, status: Status, mut each: impl FnMut(FlushNext)) {
        self.in_flight = false;
        while let Some(mut bio) = self.running.pop_back() {
            // It rode for the step it was at: a flush before its data while that is to come, else the one after.
            let before = bio.steps.contains(FlushSteps::PREFLUSH);
            bio.steps.remove(if before { FlushSteps::PREFLUSH } else { FlushSteps::POSTFLUSH });
            if status.is_ok() && bio.steps.contains(FlushSteps::DATA) {
                each(FlushNext::Data(bio));
            } else {
                bio.status = bio.status.and(status);
                bio.steps = FlushSteps::empty();
                each(FlushNext::Over(bio));
            }
        }
    }

    /// The data of a sequence has completed, with its status in the bio. Returns the bio if that was its last step.
    pub(super) fn data_ended(&mut self, mut bio: Box<Bio>) -> Option<Box<Bio>> {
        self.data_taken(bio.steps);
        bio.steps.remove(FlushSteps::DATA | FlushSteps::DISPATCHED);
        if bio.status.is_ok() && bio.steps.contains(FlushSteps::POSTFLUSH) {
            self.pending.push_back(bio);
            return None;
        }
        bio.steps = FlushSteps::empty();
        Some(bio)
    }

    /// The flush issued is not done: its bios wait again. Returns their number.
    pub(super) fn cancelled(&mut self) -> usize {
        self.in_flight = false;
        let bios = self.running.len();
        while let Some(bio) = self.running.pop_back() {
            self.pending.push_front(bio);
        }
        bios
    }

    /// Takes out the first bio that waits for a flush not issued, after its data or before.
    pub(super) fn take_pending(&mut self, after_data: bool) -> Option<Box<Bio>> {
        let at = self.pending.iter().position(|bio| bio.steps.contains(FlushSteps::PREFLUSH) != after_data)?;
        let bio = self.pending.remove(at);
        if self.pending.is_empty() {
            self.pending_since_ns = None;
        }
        bio
    }

    /// A bio with these steps is taken out.
    pub(super) fn data_taken(&mut self, steps: FlushSteps) {
        self.data_in_flight -= usize::from(steps.contains(FlushSteps::DISPATCHED));
    }

    /// Whether someone waits for a flush that is not issued.
    pub(super) fn is_wanted(&self) -> bool {
        !self.pending.is_empty() && !self.in_flight
    }

    /// Bios that wait for the next flush, and on the one in flight.
    pub(super) fn riders(&self) -> (usize, usize) {
        (self.pending.len(), self.running.len())
    }
}
