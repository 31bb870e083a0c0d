//! Taking bios that have not ended out of a queue, to submit them to another one: failover of a path.
//!
//! A bio can be taken whenever its driver does not have it, or any part of it: its memory is not accessed then. What
//! the device may still do is another question. A request that the driver gave back without an answer
//! ([`Done::requeue`](crate::Done::requeue)) may still be executed, so its bios come out as [`TakenBio`]s that need a
//! [`Fenced`](crate::Fenced) if they write.
//!
//! Bios come out in this order, which is that of submission, but for flushes and reserved tags, which have their own:
//!
//! 1. writes that wait for a flush after their data;
//! 2. requests that wait for the driver, in order: merged bios by sector, a split bio in the position of its first
//!    part;
//! 3. bios that wait for a tag, then those in the scheduler, in order of arrival;
//! 4. bios that wait for a flush before their data, and flushes: everything submitted before them is ahead of them.
//!
//! A bio starts again at its first step and its first sector. Segments, cookie and flags are the submitter's and stay,
//! so a registered buffer means the same to every queue that knows it.

use super::{HwQueue, Plug};
use crate::bio::FlushSteps;
use crate::request::{Look, Marks};
use crate::{Bio, PathGeneration, Retry, SchedulerConfig, Status, TakenBio};

impl<D> HwQueue<D> {
    /// Takes out all bios of which the driver has no part, in order, and returns their number. `sent` names the path
    /// of this queue. Bios that have ended come through [`HwQueue::reap`] as ever. Bios that the driver has stay; for
    /// them the owner runs the queue until the driver has completed or requeued them, and calls this again. Nothing is
    /// taken in an order across two calls, so a caller that needs one waits until none is [in
    /// flight](HwQueue::in_flight).
    ///
    /// Schedulers begin with no history afterwards.
    ///
    /// # Panics
    /// If the queue is not [quiesced](HwQueue::quiesce).
    pub fn take_bios(&mut self, sent: PathGeneration, sink: &mut impl FnMut(TakenBio)) -> usize {
        assert!(self.quiesced > 0, "bios were taken out of a queue that is not quiesced");
        if !self.requeued.is_empty() {
            self.requeue();
        }
        let held = self.bios_held;
        self.look_at_waiting();
        for number in 0..self.namespaces.len() {
            while let Some(bio) = self.namespaces[number].flush.take_pending(true) {
                self.unsplit -= 1;
                self.take_bio(bio, false, sent, sink);
            }
        }
        for _ in 0..self.dispatch.len() {
            let Some(number) = self.dispatch.front() else { break };
            self.dispatch.take(1);
            if !self.take_request(number, sent, sink) {
                self.dispatch.push(number);
            }
        }
        for number in 0..self.namespaces.len() {
            self.take_waiting(number, sent, sink);
        }
        if self.dispatch.rewind() {
            (self.retry_ns, self.again) = (None, false);
        }
        self.plug = Plug::NONE;
        self.choose_plain();
        held - self.bios_held
    }

    /// Counts the waiting parts of each split bio, and has the bios of a waiting flush request wait for another one.
    fn look_at_waiting(&mut self) {
        let HwQueue { dispatch, table, tags, namespaces, unsplit, .. } = self;
        let several = namespaces.len() > 1;
        table.bios.splits.iter_mut().for_each(|split| (split.parts_waiting, split.unanswered) = (0, false));
        dispatch.retain(|number| {
            let request = &mut table.requests[usize::from(number)];
            if request.has(Marks::PART) {
                let split = &mut table.bios.splits[usize::from(request.more)];
                split.parts_waiting += 1;
                split.unanswered |= request.has(Marks::UNANSWERED);
            }
            if !request.has(Marks::FLUSH) {
                return true;
            }
            let namespace = &mut namespaces[usize::from(request.namespace)];
            *unsplit += namespace.flush.cancelled();
            namespace.uncount_tag(several);
            request.look = Look::default();
            tags.put_number(number);
            false
        });
    }

    /// Takes the bios of a request that waits for the driver. False if the driver has another part of its bio.
    fn take_request(&mut self, number: u16, sent: PathGeneration, sink: &mut impl FnMut(TakenBio)) -> bool {
        let request = &mut self.table.requests[usize::from(number)];
        let (more, is_part) = (request.more, request.has(Marks::PART));
        if is_part {
            let split = &self.table.bios.splits[usize::from(more)];
            if split.parts_in_flight != split.parts_waiting {
                return false;
            }
        }
        let marks = std::mem::take(&mut request.look).marks();
        let (namespace, first) = (usize::from(request.namespace), request.bio.take());
        let unanswered = marks.contains(Marks::UNANSWERED);
        self.tags.put_number(number);
        self.uncount_tag(namespace);
        if is_part {
            let split = &mut self.table.bios.splits[usize::from(more)];
            split.parts_in_flight -= 1;
            split.parts_waiting -= 1;
            self.take_split(namespace, more, sent, sink);
        } else if let Some(bio) = first {
            self.take_bio(bio, unanswered, sent, sink);
        }
        if marks.contains(Marks::CHAINED) {
            let mut at = more;
            while let Some((bio, next)) = self.table.unlink(at) {
                self.take_bio(bio, unanswered, sent, sink);
                at = next;
            }
        }
        true
    }

    /// Takes a split bio of which the driver has no part, unless it is taken already.
    fn take_split(&mut self, namespace: usize, place: u16, sent: PathGeneration, sink: &mut impl FnMut(TakenBio)) {
        let split = &mut self.table.bios.splits[usize::from(place)];
        let Some(bio) = split.bio.take() else { return };
        let unanswered = split.unanswered || bio.status.retry() == Retry::ElsewhereFenced;
        if std::mem::take(&mut split.unsplit) {
            self.namespaces[namespace].partial = None;
            self.unsplit -= 1;
        }
        self.take_bio(bio, unanswered, sent, sink);
    }

    /// Takes the bios of a namespace that have no request.
    fn take_waiting(&mut self, number: usize, sent: PathGeneration, sink: &mut impl FnMut(TakenBio)) {
        if let Some((place, _)) = self.namespaces[number].partial
            && self.table.bios.splits[usize::from(place)].parts_in_flight == 0
        {
            self.take_split(number, place, sent, sink);
        }
        let config = self.namespaces[number].scheduler;
        if config != SchedulerConfig::None {
            // Its bios join those that wait for a tag.
            self.set_scheduler(number as u16, None);
        }
        while let Some(bio) = self.namespaces[number].bios.pop_front() {
            self.unsplit -= 1;
            self.take_bio(bio, false, sent, sink);
        }
        if config != SchedulerConfig::None {
            self.schedule(number as u16, config);
        }
        while let Some(bio) = self.namespaces[number].flush.take_pending(false) {
            self.unsplit -= 1;
            self.take_bio(bio, false, sent, sink);
        }
        let namespace = &mut self.namespaces[number];
        namespace.fresh = 0;
        if let Some(rated) = &mut namespace.rated {
            rated.release();
        }
    }

    fn take_bio(&mut self, mut bio: Box<Bio>, unanswered: bool, sent: PathGeneration, sink: &mut impl FnMut(TakenBio)) {
        if bio.ticket != 0 {
            self.tell_refused(&mut bio);
        }
        let steps = std::mem::replace(&mut bio.steps, FlushSteps::empty());
        self.namespaces[usize::from(bio.namespace)].flush.data_taken(steps);
        bio.status = Status::Ok;
        self.bios_held -= 1;
        sink(TakenBio::new(bio, unanswered, sent));
    }
}
