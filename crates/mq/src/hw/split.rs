//! From bios to requests: bios that are refused, merged, kept waiting for a tag, or split.
//!
//! A bio is merged into a request that waits for the driver if possible (Linux `block/blk-merge.c`): with the one
//! submitted just before, or, when requests are left over from earlier rounds, with any of the last few. Merging takes
//! no tag. Otherwise it becomes a request as soon as there is a tag, in order of submission; several requests if it
//! exceeds the limits of the device. Namespaces take turns, one bio each. A scheduler, if there is one, chooses the
//! next bio (`scheduled.rs`); a rate limit delays it (`rated.rs`).

use super::flush::{self, FlushNext};
use super::{Head, HwQueue, Merging, Plug};
use crate::bio::{FlushSteps, Wait};
use crate::limits::{Cursor, Merge, NoMerge, Shape};
use crate::request::{Look, Marks, Request};
use crate::{Bio, BioFlags, Op, Status, Tag};

/// Requests that are tried for merging, the newest first, as in Linux (`blk_bio_list_merge`).
const LOOK_BACK: usize = 8;

impl<D> HwQueue<D> {
    /// The common case: a fast-path bio with a free tag.
    #[inline(always)]
    pub(super) fn enter_plain(&mut self, tag: Tag, head: Head, marks: Marks, bio: Box<Bio>) {
        // Before the first table lookup, so that it is not kept on the stack.
        let number = tag.put_down();
        let request = &mut self.table.requests[usize::from(number)];
        request.look = Look::idle(head.op, marks);
        // No flag that needs steps: such a bio is not on the fast path.
        request.flags = head.flags;
        request.sectors = head.sectors;
        request.sector = head.sector;
        request.segments = 1;
        request.order = self.order;
        // The slot was empty. Forgotten rather than dropped, which would check for a value.
        std::mem::forget(request.bio.replace(bio));
        self.order = self.order.wrapping_add(1);
        self.plug = Plug { start: head.sector, end: head.sector + u64::from(head.sectors) };
        self.dispatch.push(number);
    }

    /// The slow path: with a scheduler, merging or waiting, or for a bio with special flags.
    #[inline(never)]
    pub(super) fn submit_other(&mut self, bio: Box<Bio>) {
        match &mut self.namespaces[0].scheduled {
            Some(scheduled) if scheduled.takes(&bio) => {
                scheduled.arrive_plain(bio);
                self.unsplit += 1;
            }
            _ => self.submit_slow(bio),
        }
    }

    #[inline(never)]
    fn submit_slow(&mut self, mut bio: Box<Bio>) {
        let number = usize::from(bio.namespace);
        let Some(namespace) = self.namespaces.get(number) else { return self.refuse(0, bio, Status::Invalid) };
        let info = &namespace.info;
        if info.read_only && bio.op.is_write() {
            return self.refuse(number, bio, Status::NotSupported);
        }
        if let Err(status) = namespace.limits.admit(&bio, info.capacity_sectors) {
            return self.refuse(number, bio, status);
        }
        let steps = flush::steps(&bio, info);
        if self.namespaces.len() > 1 {
            self.activate(number);
        }
        (bio.steps, bio.ticket, bio.wait) = (FlushSteps::empty(), 0, Wait::default());
        if steps.is_empty() {
            // A flush of a device without a volatile cache.
            bio.status = Status::Ok;
            return self.over.push_back(bio);
        }
        if steps != FlushSteps::DATA {
            bio.status = Status::Ok;
            bio.steps = steps;
            let Some(back) = self.namespaces[number].flush.begin(bio) else {
                self.namespaces[number].fresh += 1;
                self.unsplit += 1;
                return;
            };
            bio = back;
        }
        if self.namespaces[number].scheduled.is_some() && !bio.flags.contains(BioFlags::RESERVED) {
            return self.arrive(number, bio);
        }
        if self.namespaces[number].rated.is_some() && !bio.flags.contains(BioFlags::RESERVED) {
            return self.await_rate(number, bio);
        }
        // A tag that a waiting flush or another namespace could use is not for a new bio.
        let is_next = !self.namespaces[number].is_waiting() && (self.unsplit == 0 || !self.can_split());
        if is_next || self.may_overtake(number, &bio) {
            match self.place(number, bio) {
                Ok(()) => return,
                Err(back) => bio = back,
            }
        }
        if must_not_wait(&bio) {
            return self.refuse(number, bio, Status::Again);
        }
        let bios = &mut self.namespaces[number].bios;
        if bio.flags.contains(BioFlags::RESERVED) {
            let urgent = bios.iter().take_while(|bio| bio.flags.contains(BioFlags::RESERVED)).count();
            bios.insert(urgent, bio);
        } else {
            bios.push_back(bio);
        }
        self.namespaces[number].fresh += 1;
        self.unsplit += 1;
    }

    /// Whether a `NOWAIT` bio would have to wait: it is held, the free tags are needed by earlier bios, or none is
    /// free.
    pub(super) fn must_come_back(&self, number: usize, bio: &Bio) -> bool {
        let namespace = &self.namespaces[number];
        must_not_wait(bio)
            && (namespace.is_held() || namespace.waiting() >= self.tags.free() || !self.may_take(number, bio.flags))
    }

    /// Gives a bio back that is not worth a request.
    pub(super) fn refuse(&mut self, number: usize, mut bio: Box<Bio>, status: Status) {
        bio.status = status;
        if self.config.stats {
            self.stats_of(number as u16, bio.submitter).refused();
        }
        if bio.ticket != 0 {
            self.tell_refused(&mut bio);
        }
        if let Some(bio) = self.leave_sequence(bio) {
            self.over.push_back(bio);
        }
    }

    /// Merges a bio, or makes a request of it. Given back if there is no tag.
    pub(super) fn place(&mut self, number: usize, bio: Box<Bio>) -> Result<(), Box<Bio>> {
        let Some(bio) = self.merge(number, bio) else { return Ok(()) };
        if !self.may_take(number, bio.flags) {
            return Err(bio);
        }
        self.split_first(number, bio);
        Ok(())
    }

    pub(super) fn may_take(&self, number: usize, flags: BioFlags) -> bool {
        let reserved = flags.contains(BioFlags::RESERVED) && self.tags.reserved_free() > 0;
        reserved || (self.tags.free() > 0 && (self.namespaces.len() == 1 || self.namespaces[number].may_take()))
    }

    /// Whether a bio need not wait behind others: there is a reserved tag for it, and it is one request. One bio is
    /// split at a time.
    fn may_overtake(&self, number: usize, bio: &Bio) -> bool {
        bio.flags.contains(BioFlags::RESERVED)
            && self.tags.reserved_free() > 0
            && self.namespaces[number]
                .limits
                .split(bio, Cursor::default())
                .is_ok_and(|part| part.sectors == bio.sectors)
    }

    /// Whether anything that waits could become a request now.
    pub(super) fn can_split(&self) -> bool {
        self.namespaces.iter().enumerate().any(|(number, namespace)| {
            let waits = namespace.is_waiting() || (self.quiesced == 0 && namespace.is_ready());
            let waits = waits && self.may_take(number, self.next_flags(number));
            let overtakes = namespace.bios.front().is_some_and(|bio| self.may_overtake(number, bio));
            waits || overtakes || (namespace.flush.is_free() && self.may_take(number, BioFlags::empty()))
        })
    }

    /// Flags of the next bio of a namespace: the partly split one, or the first that waits.
    fn next_flags(&self, number: usize) -> BioFlags {
        let namespace = &self.namespaces[number];
        let bio = match namespace.partial {
            Some((place, _)) => self.table.bios.splits[usize::from(place)].bio.as_ref(),
            None => namespace.bios.front(),
        };
        bio.map_or(BioFlags::empty(), |bio| bio.flags)
    }

    /// Latest time of the next look at waiting bios, even without a completion.
    pub(super) fn waiting_due_ns(&self) -> Option<u64> {
        if self.unsplit == 0 {
            return None;
        }
        // For want of a tag a flush waits until one comes back.
        let free = |number: &usize| self.may_take(*number, BioFlags::empty());
        let flushes =
            (0..self.namespaces.len()).filter(free).filter_map(|number| self.namespaces[number].flush.due_ns());
        flushes.chain(self.rest_due_ns()).chain(self.scheduled_due_ns()).chain(self.rated_due_ns()).min()
    }

    /// Turns waiting bios into requests while there are tags.
    #[inline(never)]
    pub(super) fn split(&mut self, now_ns: u64) {
        self.look_for_idle(now_ns);
        for namespace in &mut self.namespaces {
            namespace.advance_clocks(now_ns);
            if namespace.fresh > 0 {
                namespace.begin_waits(now_ns);
            }
        }
        if self.rated {
            self.look_at_rates(now_ns);
        }
        self.insert_arrived(now_ns);
        for number in 0..self.namespaces.len() {
            if self.may_take(number, BioFlags::empty()) && self.namespaces[number].flush.is_due(now_ns) {
                self.enter_flush(number);
            }
        }
        // Ends when no namespace could proceed in a whole turn.
        let mut stuck = 0;
        while stuck < self.namespaces.len() {
            if self.turn >= self.namespaces.len() {
                self.turn = 0;
            }
            stuck = if self.step(self.turn, now_ns) { 0 } else { stuck + 1 };
            self.turn += 1;
        }
        if self.rated {
            self.refuse_held();
        }
        // With no waiting bio the last cause may stay: its clock advances, but is not read.
        if self.unsplit > 0 {
            self.note_causes();
        }
    }

    /// Moves one bio of a namespace on, or one part of it. False if it cannot.
    fn step(&mut self, number: usize, now_ns: u64) -> bool {
        if let Some((place, from)) = self.namespaces[number].partial {
            let may = self.may_take(number, self.next_flags(number));
            if may {
                self.split_part(number, place, from);
                return true;
            }
            if !self.namespaces[number].bios.front().is_some_and(|bio| self.may_overtake(number, bio)) {
                return false;
            }
        }
        let Some(bio) = self.namespaces[number].bios.front() else { return self.step_scheduled(number, now_ns) };
        let charge = self.charge(number, bio);
        if charge.is_some() && !self.may_pass(number, now_ns) {
            return false;
        }
        let namespace = &mut self.namespaces[number];
        let Some(mut bio) = namespace.bios.pop_front() else { return false };
        bio.wait.toggle(&namespace.clocks_ns);
        match self.place(number, bio) {
            Ok(()) => {
                self.unsplit -= 1;
                self.pay(number, charge, now_ns);
                true
            }
            Err(mut bio) => {
                let namespace = &mut self.namespaces[number];
                bio.wait.toggle(&namespace.clocks_ns);
                namespace.bios.push_front(bio);
                false
            }
        }
    }

    /// Turns a bio into a request, or into the first of several. There is a tag.
    pub(super) fn split_first(&mut self, number: usize, mut bio: Box<Bio>) {
        let namespace = &mut self.namespaces[number];
        let clocks_at_ns = namespace.clocks_at_ns;
        let part = namespace.limits.split(&bio, Cursor::default());
        if part.is_ok() && !bio.steps.is_empty() {
            namespace.flush.data_dispatched(&mut bio);
        }
        match part {
            Ok(part) if part.sectors == bio.sectors => {
                let shared = if self.namespaces.len() > 1 || bio.ticket != 0 { Marks::SHARED } else { Marks::empty() };
                let marks = if bio.steps.is_empty() { shared } else { Marks::SEQUENCE };
                let in_its_round = [Wait::UNKNOWN, clocks_at_ns].contains(&bio.wait.since_ns);
                let marks = if in_its_round { marks } else { marks | Marks::HELD };
                let (op, flags, sector, sectors) = (bio.op, bio.flags, bio.sector, bio.sectors);
                let request = self.enter(number, op, flags, sector, sectors);
                request.look.set_marks(marks);
                request.segments = part.segments;
                request.bio = Some(bio);
                self.plug = Plug { start: sector, end: sector + u64::from(sectors) };
            }
            Ok(_) => {
                let place = self.table.free_split();
                let split = &mut self.table.bios.splits[usize::from(place)];
                split.bio.insert(bio).status = Status::Ok;
                split.parts_in_flight = 0;
                split.start_ns = u64::MAX;
                split.unsplit = true;
                namespace.partial = Some((place, Cursor::default()));
                self.unsplit += 1;
                self.split_part(number, place, Cursor::default());
            }
            Err(status) => self.refuse(number, bio, status),
        }
    }

    /// Splits the next request from the bio that is split in part. There is a tag.
    fn split_part(&mut self, number: usize, place: u16, from: Cursor) {
        let namespace = &mut self.namespaces[number];
        let split = &mut self.table.bios.splits[usize::from(place)];
        let Some(bio) = &mut split.bio else { unreachable!("the bio being split is in its place") };
        match namespace.limits.split(bio, from) {
            Ok(part) => {
                split.parts_in_flight += 1;
                split.unsplit = part.end.sectors < bio.sectors;
                namespace.partial = split.unsplit.then_some((place, part.end));
                self.unsplit -= usize::from(!split.unsplit);
                let (op, flags, sector) = (bio.op, bio.flags, bio.sector + u64::from(from.sectors));
                let request = self.enter(number, op, flags, sector, part.sectors);
                request.segments = part.segments;
                request.from = from;
                request.more = place;
                request.look.set_marks(Marks::PART);
                self.plug = Plug::NONE;
            }
            Err(status) => {
                bio.status = bio.status.and(status);
                split.unsplit = false;
                namespace.partial = None;
                self.unsplit -= 1;
                if split.parts_in_flight == 0
                    && let Some(bio) = split.bio.take()
                {
                    let status = bio.status;
                    self.refuse(number, bio, status);
                }
            }
        }
    }

    /// Creates a request and adds it to the dispatch list; the caller sets its bio. A tag is free.
    fn enter(&mut self, number: usize, op: Op, flags: BioFlags, sector: u64, sectors: u32) -> &mut Request {
        let reserved = if flags.contains(BioFlags::RESERVED) { self.tags.take_reserved() } else { None };
        let Some(tag) = reserved.or_else(|| self.tags.take()) else { unreachable!("checked by the caller") };
        self.count_tag(number);
        let namespace = &self.namespaces[number];
        let request = &mut self.table.requests[tag.index()];
        request.look = Look::idle(op, Marks::empty());
        request.flags = flags & namespace.request_flags;
        request.namespace = number as u16;
        request.sector = sector;
        request.sectors = sectors;
        request.segments = 0;
        request.order = self.order;
        self.order = self.order.wrapping_add(1);
        self.dispatch.push(tag.put_down());
        request
    }

    /// Issues a flush for all that wait for one, ahead of all waiting requests. A tag is free.
    fn enter_flush(&mut self, number: usize) {
        let Some(tag) = self.tags.take() else { unreachable!("checked by the caller") };
        self.count_tag(number);
        let namespace = &mut self.namespaces[number];
        self.unsplit -= namespace.flush.riders().0;
        namespace.flush.issued();
        if self.config.stats {
            namespace.stats.flush_issued();
        }
        // Created now, but first in order: also after a requeue.
        let first = self.dispatch.front().map(|first| self.table.requests[usize::from(first)].order.wrapping_sub(1));
        let request = &mut self.table.requests[tag.index()];
        *request = Request {
            look: Look::idle(Op::Flush, Marks::FLUSH),
            namespace: number as u16,
            order: first.unwrap_or(self.order),
            ..Request::default()
        };
        self.order = self.order.wrapping_add(1);
        self.dispatch.push_front(tag.put_down());
    }

    /// A flush has completed: the bios that waited on it continue.
    pub(super) fn flushed(&mut self, number: usize, status: Status, now_ns: u64) {
        self.namespaces[number].advance_clocks(now_ns);
        let mut ended = 0;
        let HwQueue { namespaces, over, unsplit, .. } = self;
        let namespace = &mut namespaces[number];
        let (bios, clocks_ns) = (&mut namespace.bios, &namespace.clocks_ns);
        // Either list has room for all bios of the queue.
        namespace.flush.flushed(status, |next| match next {
            FlushNext::Data(mut bio) => {
                *unsplit += 1;
                bio.wait.toggle(clocks_ns);
                // Behind those that have a right to a reserved tag.
                let reserved = |bio: &Bio| bio.flags.contains(BioFlags::RESERVED);
                let urgent = if reserved(&bio) { 0 } else { bios.iter().take_while(|bio| reserved(bio)).count() };
                bios.insert(urgent, bio);
            }
            FlushNext::Over(bio) => {
                ended += 1;
                over.push_front(bio);
            }
        });
        self.over.iter().take(ended).for_each(|bio| self.count_sequence(bio, now_ns));
    }

    /// The data of a bio has completed. Returns the bio if no step of a flush sequence is left.
    #[inline]
    pub(super) fn leave_sequence(&mut self, bio: Box<Bio>) -> Option<Box<Bio>> {
        if bio.steps.is_empty() {
            return Some(bio);
        }
        let back = self.namespaces[usize::from(bio.namespace)].flush.data_ended(bio);
        self.unsplit += usize::from(back.is_none());
        back
    }

    /// Merges a bio into a request that waits for the driver. Given back if it cannot be.
    fn merge(&mut self, number: usize, bio: Box<Bio>) -> Option<Box<Bio>> {
        let look_back = match self.config.merging {
            Merging::Recent if self.busy > 0 => LOOK_BACK,
            Merging::Recent | Merging::Last => 1,
            Merging::Off => 0,
        };
        if !bio.steps.is_empty() {
            return Some(bio);
        }
        let found = {
            let newest = self.dispatch.newest_first().take(LOOK_BACK);
            let of_same = newest.filter(|at| usize::from(self.table.requests[usize::from(*at)].namespace) == number);
            let mut tried = of_same.take(look_back).map(|at| (at, self.try_merge(number, at, &bio)));
            // The first that is of a kind to merge with decides.
            tried.find(|(_, tried)| !matches!(tried, Err(NoMerge::Kind)))
        };
        match found {
            Some((at, Ok((merge, shape)))) => self.join(at, merge, shape, bio),
            Some((at, Err(_))) => {
                self.table.requests[usize::from(at)].mark(Marks::NO_MERGE);
                Some(bio)
            }
            None => Some(bio),
        }
    }

    pub(super) fn join(&mut self, at: u16, merge: Merge, shape: Shape, bio: Box<Bio>) -> Option<Box<Bio>> {
        let number = usize::from(bio.namespace);
        let is_unknown = bio.wait.since_ns == Wait::UNKNOWN;
        self.joined |= is_unknown && self.table.requests[usize::from(at)].has(Marks::HELD);
        let submitter = bio.submitter;
        let chained = match merge {
            Merge::Back | Merge::Discard => self.table.chain_back(at, bio),
            Merge::Front => self.table.chain_front(at, bio),
        };
        if let Err(bio) = chained {
            return Some(bio);
        }
        self.table.set_shape(at, shape);
        if self.dispatch.newest() == Some(at) {
            self.plug = Plug { start: shape.sector, end: shape.sector + u64::from(shape.sectors) };
        }
        if self.config.stats {
            self.stats_of(number as u16, submitter).merged(merge);
        }
        None
    }

    fn try_merge(&self, number: usize, at: u16, bio: &Bio) -> Result<(Merge, Shape), NoMerge> {
        let mut shape = self.table.shape(at).ok_or(NoMerge::Kind)?;
        let merge = self.namespaces[number].limits.merge(&mut shape, bio)?;
        Ok((merge, shape))
    }
}

/// Whether a bio is to come back rather than wait. One that is done in steps has begun already.
#[inline]
pub(super) fn must_not_wait(bio: &Bio) -> bool {
    bio.flags.contains(BioFlags::NOWAIT) && bio.steps.is_empty()
}
