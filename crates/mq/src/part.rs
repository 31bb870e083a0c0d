//! Parts of a batch, for a driver over several drivers of the same requests: the paths to one device.
//!
//! Such a driver gives each request to one part, offers each part to its driver, and passes completions on. A request
//! that a part's driver has given back or failed comes out as a [`TakenRequest`], by the same rule as bios that are
//! taken out of a queue ([`fence`](crate::fence)): a write that the device may still execute is an [`UnfencedRequest`],
//! which goes to another part only with a [`Fenced`].

use crate::driver::{Batch, Done, Shortage};
use crate::fifo::put_first;
use crate::request::{Marks, RequestState};
use crate::{Fenced, PathGeneration, Retry, Status, Tag};

/// Requests for one of several drivers, and those that it has given back.
#[derive(Debug)]
pub struct BatchPart {
    offered: Vec<u16>,
    ended: Vec<(u16, Status)>,
    requeued: Vec<u16>,
}

impl BatchPart {
    /// An empty part, with room for the requests of a queue of this depth.
    pub fn new(depth: usize) -> BatchPart {
        let room = || Vec::with_capacity(depth);
        BatchPart { offered: room(), ended: Vec::with_capacity(depth), requeued: room() }
    }

    /// Whether no request is to be offered.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.offered.is_empty()
    }

    /// Whether requests have ended or were given back, and are not passed on.
    #[inline]
    pub fn has_ends(&self) -> bool {
        !self.ended.is_empty() || !self.requeued.is_empty()
    }

    /// Moves ended requests to a list, except those for which `is_final` is false.
    #[inline]
    fn pass_on(&mut self, to: &mut Vec<(u16, Status)>, mut is_final: impl FnMut(usize, Status) -> bool) {
        let mut kept = 0;
        for at in 0..self.ended.len() {
            let (number, status) = self.ended[at];
            if is_final(usize::from(number), status) {
                to.push((number, status));
            } else {
                self.ended[kept] = (number, status);
                kept += 1;
            }
        }
        self.ended.truncate(kept);
    }
}

impl Batch<'_> {
    /// Slot of the next request.
    #[inline]
    pub fn next_slot(&self) -> Option<usize> {
        self.offered.get(self.taken).map(|number| usize::from(*number))
    }

    /// Moves the next request to a part. It is not in flight until the part's driver takes it.
    #[inline]
    pub fn assign(&mut self, part: &mut BatchPart) {
        if let Some(number) = self.offered.get(self.taken) {
            self.taken += 1;
            part.offered.push(*number);
        }
    }

    /// Has `queue` offer a part to its driver. Requests that are left return to this batch, in their old positions;
    /// `left` is called with the slot of each. Returns why the driver left them.
    #[inline]
    pub fn offer(
        &mut self,
        part: &mut BatchPart,
        queue: impl FnOnce(&mut Batch<'_>),
        mut left: impl FnMut(usize),
    ) -> Shortage {
        let mut batch = Batch {
            offered: &mut part.offered,
            taken: 0,
            table: self.table,
            done: &mut part.ended,
            now_ns: self.now_ns,
            shortage: Shortage::Device,
            bytes_left: self.bytes_left,
        };
        queue(&mut batch);
        let (taken, shortage) = (batch.taken, batch.shortage);
        self.bytes_left = batch.bytes_left;
        for number in part.offered.drain(taken..) {
            left(usize::from(number));
            let requests = &self.table.requests;
            let order = requests[usize::from(number)].order;
            self.taken -= 1;
            put_first(&mut self.offered[self.taken..], number, |other| {
                requests[usize::from(other)].is_later_than(order)
            });
        }
        part.offered.clear();
        shortage
    }

    /// Passes on requests of a part that were completed on the spot. `is_final` gets slot and status of each; those for
    /// which it is false stay in the part, for [`Done::next_given_back`].
    #[inline]
    pub fn pass_on(&mut self, part: &mut BatchPart, is_final: impl FnMut(usize, Status) -> bool) {
        part.pass_on(self.done, is_final);
    }
}

impl Done<'_> {
    /// Has `poll` poll the driver of a part, or ask it about a timeout.
    #[inline]
    pub fn poll_part<R>(&mut self, part: &mut BatchPart, poll: impl FnOnce(&mut Done<'_>) -> R) -> R {
        let mut done = Done {
            ended: &mut part.ended,
            requeued: &mut part.requeued,
            table: self.table,
            bytes_left: self.bytes_left,
        };
        let result = poll(&mut done);
        self.bytes_left = done.bytes_left;
        result
    }

    /// Passes on completed requests of a part, as [`Batch::pass_on`].
    #[inline]
    pub fn pass_on(&mut self, part: &mut BatchPart, is_final: impl FnMut(usize, Status) -> bool) {
        part.pass_on(self.ended, is_final);
    }

    /// The next request that the driver of a part has given back, or has ended with a status that is not final, and
    /// that status. It stays in flight for this queue until its tag comes back. `sent` is the path of the part, and its
    /// generation when those requests were sent.
    #[cold]
    pub fn next_given_back(
        &mut self,
        part: &mut BatchPart,
        sent: PathGeneration,
    ) -> Option<(TakenRequest, Option<Status>)> {
        let (number, status) = match part.requeued.pop() {
            Some(number) => (number, None),
            None => part.ended.pop().map(|(number, status)| (number, Some(status)))?,
        };
        let request = &mut self.table.requests[usize::from(number)];
        request.look.set_state(RequestState::InFlight);
        let may_execute = status.map_or(request.has(Marks::UNANSWERED), |status| status.retry() != Retry::Elsewhere);
        let tag = Tag::pick_up(number);
        let taken = if may_execute && request.op().is_write() {
            TakenRequest::Unfenced(UnfencedRequest { tag, sent })
        } else {
            TakenRequest::Free(tag)
        };
        Some((taken, status))
    }
}

/// A request that a part's driver does not have any more.
#[derive(Debug)]
#[must_use = "dropping it loses a tag"]
pub enum TakenRequest {
    /// May go to another part at once.
    Free(Tag),
    /// May go to another part once its path is fenced.
    Unfenced(UnfencedRequest),
}

/// A request that the device may still execute.
#[derive(Debug)]
#[must_use = "dropping it loses a tag"]
pub struct UnfencedRequest {
    tag: Tag,
    sent: PathGeneration,
}

impl UnfencedRequest {
    /// The request, for a proof that covers it; otherwise itself again.
    ///
    /// # Errors
    /// The proof does not cover it.
    pub fn release(self, proof: &Fenced) -> Result<Tag, UnfencedRequest> {
        if proof.covers(self.sent) { Ok(self.tag) } else { Err(self) }
    }

    /// Path and generation that it was sent on.
    pub fn sent(&self) -> PathGeneration {
        self.sent
    }

    /// Its slot.
    pub fn index(&self) -> usize {
        self.tag.index()
    }

    /// Requeues it. It must be offered to the same path again, which knows what became of it.
    pub fn requeue_same(self, done: &mut Done<'_>) {
        done.requeue(self.tag);
    }

    /// Ends it: its submitter learns that the outcome is unknown.
    ///
    /// # Panics
    /// For [`Status::Path`], which promises that the device does not execute it, and for success.
    pub fn fail(self, done: &mut Done<'_>, status: Status) {
        assert!(!status.is_ok() && status != Status::Path, "the outcome of an unfenced write is not {status}");
        done.complete(self.tag, status);
    }

    /// Gives it up with its queue, whose submitters are gone.
    pub fn forget(self) {
        std::mem::forget(self.tag);
    }
}
