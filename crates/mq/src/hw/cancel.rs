//! Cancelled bios: bios that are taken back before the device has them, for a submitter that aborts them.
//!
//! A device cannot cancel a request, so a bio is taken back only while no part of it is at the driver. It may wait for
//! a tag, a rate limit, its scheduler or a flush, or its request may wait for the driver. A bio that is split in part,
//! shares a request with others, or was requeued without an answer of the device is not taken back.

use super::namespace::Namespace;
use super::{HwQueue, Plug};
use crate::request::{Marks, RequestState};
use crate::{Bio, Status};

impl Namespace {
    /// Takes out a waiting bio for which this is true.
    fn cancel(&mut self, is_its: &mut impl FnMut(&Bio) -> bool) -> Option<Box<Bio>> {
        if let Some(at) = self.bios.iter().position(|bio| is_its(bio)) {
            return self.bios.remove(at);
        }
        let scheduled = self.scheduled.as_mut().and_then(|scheduled| scheduled.cancel(is_its));
        scheduled.or_else(|| self.flush.cancel(is_its))
    }
}

impl<D> HwQueue<D> {
    /// Takes back the bios for which `is_its` is true, of which there are `left` in this queue at most: the next reap
    /// returns them with [`Status::Again`]. Returns their number. `left` decreases by each bio found, also by those
    /// that are not taken back.
    ///
    /// For rare use. It looks at each bio of the queue.
    #[cold]
    pub fn cancel(&mut self, left: &mut usize, mut is_its: impl FnMut(&Bio) -> bool) -> usize {
        let before = *left;
        for number in 0..self.namespaces.len() {
            self.cancel_waiting(number, left, &mut is_its);
        }
        self.cancel_ready(left, &mut is_its);
        let cancelled = before - *left;
        *left -= self.table.count_bios(&mut is_its).min(*left);
        cancelled
    }

    /// Takes back waiting bios of a namespace.
    fn cancel_waiting(&mut self, number: usize, left: &mut usize, is_its: &mut impl FnMut(&Bio) -> bool) {
        while *left > 0 {
            let Some(bio) = self.namespaces[number].cancel(is_its) else { break };
            *left -= 1;
            self.unsplit -= 1;
            self.refuse(number, bio, Status::Again);
        }
        self.end_empty_hold(number);
    }

    /// Takes back bios whose requests wait for the driver.
    fn cancel_ready(&mut self, left: &mut usize, is_its: &mut impl FnMut(&Bio) -> bool) {
        while *left > 0 {
            let HwQueue { dispatch, table, .. } = self;
            let found = dispatch.newest_first().find(|number| {
                let request = &table.requests[usize::from(*number)];
                let is_whole = !request.has(Marks::CHAINED | Marks::PART | Marks::FLUSH | Marks::UNANSWERED);
                is_whole && request.bio.as_ref().is_some_and(|bio| is_its(bio))
            });
            let Some(number) = found else { return };
            dispatch.retain(|other| other != number);
            let request = &mut table.requests[usize::from(number)];
            debug_assert_eq!(request.state(), RequestState::Idle);
            let (namespace, bio) = (usize::from(request.namespace), request.bio.take());
            (request.look, request.taken_back, request.grace_ms) = Default::default();
            self.tags.put_number(number);
            self.uncount_tag(namespace);
            // No request is left to merge with, or to offer again.
            self.plug = Plug::NONE;
            if self.dispatch.rewind() {
                (self.again, self.retry_ns) = (false, None);
            }
            let Some(bio) = bio else { unreachable!("found by its bio") };
            *left -= 1;
            self.refuse(namespace, bio, Status::Again);
        }
    }
}
