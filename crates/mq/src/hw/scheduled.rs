//! Scheduled bios: their way to the scheduler, and from it to a tag.
//!
//! Bios submitted between two rounds are inserted as the next one begins, with its time. While there are tags, the
//! scheduler is asked for a bio. The bio that it dispatches is placed like any other, and then the adjacent bios that
//! the scheduler holds join its request, which takes no tag. A scheduler that dispatches nothing is not asked again
//! before the time it names, or before a bio is inserted or completes.
//!
//! A scheduler can be replaced at any time. Waiting bios move to the next one in order of arrival. Bios in flight then
//! belong to neither: the generation in a bio says which scheduler dispatched it.

use super::edges::Edges;
use super::namespace::Namespace;
use super::{Head, HwQueue, Merging};
use crate::bio::Wait;
use crate::limits::FastPath;
use crate::request::Marks;
use crate::sched::{Reach, Scheduler, SchedulerConfig, SchedulerSnapshot, Selected};
use crate::{Bio, BioFlags, Status};

/// Generation of a waiting fast-path bio. No scheduler has it.
const PLAIN: u16 = u16::MAX;

/// A scheduler, and the bios to be inserted into it.
#[derive(Debug)]
pub(super) struct Scheduled {
    scheduler: Box<dyn Scheduler>,
    /// Generation, recorded in each bio that this scheduler dispatches.
    ticket: u16,
    /// Conditions for bios to be inserted without further checks, to become requests on the fast path: none with
    /// several namespaces.
    fast_path: FastPath,
    /// Bios submitted since the last round.
    arrived: Vec<Box<Bio>>,
    /// Number of the first bios that came from another scheduler: their wait began there.
    carried: usize,
    /// Bios it has.
    waiting: usize,
    /// Where those begin and end.
    edges: Edges,
    /// Time until which the scheduler keeps its bios, without an insertion or a completion.
    kept_until_ns: Option<u64>,
    /// When the last round began.
    round_ns: u64,
}

impl Scheduled {
    /// Whether there is something to ask it for.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        !self.arrived.is_empty() || (self.waiting > 0 && self.kept_until_ns.is_none())
    }

    /// Bios here.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.arrived.len() + self.waiting
    }

    /// Its queue has so many tags from now on, and the scheduler may hand out more.
    pub(super) fn set_depth(&mut self, depth: usize) {
        self.scheduler.set_depth(depth);
        self.kept_until_ns = None;
    }

    /// Sets the fast path's conditions again.
    pub(super) fn set_fast_path(&mut self, fast_path: FastPath) {
        self.fast_path = fast_path;
    }

    /// Whether a bio may be inserted without further checks.
    #[inline]
    pub(super) fn takes(&self, bio: &Bio) -> bool {
        self.fast_path.is(bio)
    }

    /// Adds a fast-path bio to the arrivals.
    #[inline]
    pub(super) fn arrive_plain(&mut self, mut bio: Box<Bio>) {
        bio.ticket = PLAIN;
        self.arrived.push(bio);
    }

    /// Takes out a waiting bio for which this is true.
    pub(super) fn cancel(&mut self, is_its: &mut impl FnMut(&Bio) -> bool) -> Option<Box<Bio>> {
        if let Some(at) = self.arrived.iter().position(|bio| is_its(bio)) {
            self.carried -= usize::from(at < self.carried);
            return Some(self.arrived.remove(at));
        }
        let bio = self.scheduler.take(is_its, self.round_ns)?;
        self.waiting -= 1;
        self.edges.remove(&bio);
        self.kept_until_ns = None;
        Some(bio)
    }

    /// Inserts arrived bios into the scheduler, with the round's time.
    fn begin_round(&mut self, now_ns: u64, clocks_ns: &[u64; 3]) {
        if !self.arrived.is_empty() || self.kept_until_ns.is_some_and(|until_ns| now_ns >= until_ns) {
            self.kept_until_ns = None;
        }
        self.round_ns = now_ns;
        self.waiting += self.arrived.len();
        let carried = std::mem::take(&mut self.carried);
        let mut arrived = self.arrived.drain(..);
        for bio in arrived.by_ref().take(carried) {
            self.edges.add(&bio);
            self.scheduler.insert(bio, now_ns);
        }
        // A copy, so that it is not read anew for each.
        let clocks_ns = *clocks_ns;
        for mut bio in arrived {
            bio.wait.begin(now_ns, &clocks_ns);
            self.edges.add(&bio);
            self.scheduler.insert(bio, now_ns);
        }
    }

    /// Whether it may have a bio that touches a request.
    #[inline]
    fn may_touch(&mut self, reach: Reach) -> bool {
        self.waiting > 0 && self.edges.may_touch(reach)
    }

    pub(super) fn snapshot(&self, now_ns: u64) -> SchedulerSnapshot {
        self.scheduler.snapshot(now_ns)
    }

    /// The next bio, and whether it is of the fast path.
    #[inline]
    fn next(&mut self, now_ns: u64) -> Option<(Box<Bio>, bool)> {
        if self.waiting == 0 || self.kept_until_ns.is_some() {
            return None;
        }
        match self.scheduler.next(now_ns) {
            Selected::Bio(bio) => {
                let is_plain = bio.ticket == PLAIN;
                Some((self.handed_out(bio), is_plain))
            }
            Selected::Wait(until_ns) => {
                self.kept_until_ns = Some(until_ns);
                None
            }
        }
    }

    #[inline]
    fn handed_out(&mut self, mut bio: Box<Bio>) -> Box<Bio> {
        bio.ticket = self.ticket;
        self.waiting -= 1;
        self.edges.remove(&bio);
        bio
    }
}

impl<D> HwQueue<D> {
    /// Sets the scheduler of a namespace's bios, or none; returns the previous one, empty. Waiting bios move to the new
    /// one. It must be [made](crate::SchedulerConfig::build) for as many bios as the queue accepts.
    pub fn set_scheduler(
        &mut self,
        namespace: u16,
        scheduler: Option<Box<dyn Scheduler>>,
    ) -> Option<Box<dyn Scheduler>> {
        let (bios_max, number) = (self.config.bios_max, usize::from(namespace));
        let namespace = self.namespaces.get_mut(number)?;
        let had = namespace.scheduled.take().map(|mut had| {
            let mut waiting = Vec::with_capacity(bios_max);
            had.scheduler.drain(&mut |bio| waiting.push(bio));
            let carried = waiting.len() + had.carried;
            waiting.append(&mut had.arrived);
            (had.scheduler, waiting, carried)
        });
        let (had, mut arrived, carried) = match had {
            Some((had, waiting, carried)) => (Some(had), waiting, carried),
            None => (None, Vec::with_capacity(bios_max), 0),
        };
        if let Some(scheduler) = scheduler {
            let ticket = self.next_ticket(number);
            self.namespaces[number].scheduled = Some(Scheduled {
                scheduler,
                ticket,
                fast_path: FastPath::NOTHING,
                arrived,
                carried,
                waiting: 0,
                edges: Edges::new(bios_max),
                kept_until_ns: None,
                round_ns: 0,
            });
        } else {
            arrived.iter_mut().skip(carried).for_each(|bio| bio.wait = Wait::default());
            namespace.fresh += arrived.len() - carried;
            namespace.bios.extend(arrived);
        }
        self.choose_plain();
        had
    }

    /// The generation of the next scheduler of a namespace: zero is for none, and no bio in flight has it.
    fn next_ticket(&mut self, number: usize) -> u16 {
        let HwQueue { namespaces, table, .. } = self;
        let namespace = &mut namespaces[number];
        loop {
            namespace.tickets = namespace.tickets % (PLAIN - 1) + 1;
            let ticket = namespace.tickets;
            let has_it = |bio: &Bio| bio.ticket == ticket;
            if table.count_bios(has_it) == 0 && !namespace.bios.iter().any(|bio| has_it(bio)) {
                return ticket;
            }
        }
    }

    /// [`HwQueue::set_scheduler`] by its configuration. Builds the scheduler, which allocates.
    pub fn schedule(&mut self, namespace: u16, config: SchedulerConfig) {
        let (depth, bios_max) = (self.tags.limit(), self.config.bios_max);
        let Some(of) = self.namespaces.get_mut(usize::from(namespace)) else { return };
        of.scheduler = config;
        let scheduler = config.build(depth, bios_max, &of.info);
        self.set_scheduler(namespace, scheduler);
    }

    /// A bio that is to be scheduled, if it does not rather come back than wait.
    pub(super) fn arrive(&mut self, number: usize, bio: Box<Bio>) {
        if self.must_come_back(number, &bio) {
            return self.refuse(number, bio, Status::Again);
        }
        let Some(scheduled) = &mut self.namespaces[number].scheduled else { unreachable!("asked by the caller") };
        scheduled.arrived.push(bio);
        self.unsplit += 1;
    }

    /// Inserts arrived bios into their schedulers, with the round's time.
    pub(super) fn insert_arrived(&mut self, now_ns: u64) {
        for namespace in &mut self.namespaces {
            if let Some(scheduled) = &mut namespace.scheduled {
                scheduled.begin_round(now_ns, &namespace.clocks_ns);
            }
        }
    }

    /// Dispatches the scheduler's next bio, and its neighbours. False without a bio or a tag; or if the queue is
    /// quiesced, since dispatched bios count as in flight, also for others that share the device.
    pub(super) fn step_scheduled(&mut self, number: usize, now_ns: u64) -> bool {
        if self.quiesced > 0 || !self.may_take(number, BioFlags::empty()) {
            return false;
        }
        if self.rated && !self.scheduled_may_pass(number, now_ns) {
            return false;
        }
        let Namespace { scheduled: Some(scheduled), clocks_ns, .. } = &mut self.namespaces[number] else {
            return false;
        };
        let Some((mut bio, is_plain)) = scheduled.next(now_ns) else { return false };
        // This field of a fast-path bio of this round is never read: its request has no mark.
        let has_waited = bio.wait.since_ns != now_ns;
        if has_waited || !is_plain {
            bio.wait.toggle(clocks_ns);
        }
        let charge = self.charge(number, &bio);
        self.unsplit -= 1;
        // As in `submit`: with no request left over, a fast-path bio becomes a request. Neighbours come from the
        // scheduler, which knows the waiting bios.
        if is_plain
            && !self.slow_path
            && let Some(tag) = self.tags.take()
        {
            let marks = if has_waited { Marks::SHARED | Marks::HELD } else { Marks::SHARED };
            self.enter_plain(tag, Head::of(&bio), marks, bio);
        } else {
            self.split_first(number, bio);
        }
        self.pay(number, charge, now_ns);
        if self.config.merging != Merging::Off {
            self.join_neighbours(number, now_ns);
        }
        true
    }

    /// Whether there is a bio to ask for, and it may pass its limits.
    fn scheduled_may_pass(&mut self, number: usize, now_ns: u64) -> bool {
        self.namespaces[number].scheduled.as_ref().is_some_and(Scheduled::is_ready) && self.may_pass(number, now_ns)
    }

    /// Lets bios join the request made last that its scheduler has beside it.
    fn join_neighbours(&mut self, number: usize, now_ns: u64) {
        while let Some(at) = self.dispatch.newest() {
            let request = &self.table.requests[usize::from(at)];
            let reach = Reach { start: request.sector, end: request.sector + u64::from(request.sectors) };
            let is_own = usize::from(request.namespace) == number;
            let scheduled = self.namespaces[number].scheduled.as_mut().filter(|_| is_own);
            if !scheduled.is_some_and(|scheduled| scheduled.may_touch(reach)) {
                return;
            }
            if self.rated && !self.scheduled_may_pass(number, now_ns) {
                return;
            }
            let Some(shape) = self.table.shape(at) else { return };
            let namespace = &mut self.namespaces[number];
            let Some(scheduled) = &mut namespace.scheduled else { return };
            let (limits, mut joined) = (&namespace.limits, None);
            let mut fits = |bio: &Bio| {
                let mut shape = shape;
                let merge = if bio.steps.is_empty() { limits.merge(&mut shape, bio).ok() } else { None };
                joined = merge.map(|merge| (merge, shape));
                joined.is_some()
            };
            let bio = scheduled.scheduler.join(reach, &mut fits, now_ns);
            let (Some(bio), Some((merge, shape))) = (bio, joined) else { return };
            let mut bio = scheduled.handed_out(bio);
            bio.wait.toggle(&namespace.clocks_ns);
            let charge = self.charge(number, &bio);
            if let Some(back) = self.join(at, merge, shape, bio) {
                // There is no link for it: it goes next, by itself.
                bio = back;
                let namespace = &mut self.namespaces[number];
                bio.wait.toggle(&namespace.clocks_ns);
                return namespace.bios.push_front(bio);
            }
            self.unsplit -= 1;
            self.pay(number, charge, now_ns);
        }
    }

    /// A bio that a scheduler handed out will not go to the driver.
    pub(super) fn tell_refused(&mut self, bio: &mut Bio) {
        let namespace = &mut self.namespaces[usize::from(bio.namespace)];
        let round_ns = namespace.scheduled.as_ref().map_or(0, |scheduled| scheduled.round_ns);
        namespace.tell_scheduler(bio, round_ns, round_ns);
    }

    /// Time of the scheduler's next call, if it keeps bios. Not needed while no tag is free.
    pub(super) fn scheduled_due_ns(&self) -> Option<u64> {
        let may_ask = |number: &usize| self.may_take(*number, BioFlags::empty());
        let kept = |number: usize| {
            let scheduled = self.namespaces[number].scheduled.as_ref().filter(|scheduled| scheduled.waiting > 0)?;
            scheduled.kept_until_ns.filter(|until_ns| *until_ns < u64::MAX)
        };
        (0..self.namespaces.len()).filter(may_ask).filter_map(kept).min()
    }
}

impl Namespace {
    /// The data of a bio that a scheduler dispatched has completed.
    #[inline]
    pub(super) fn tell_scheduler(&mut self, bio: &mut Bio, start_ns: u64, now_ns: u64) {
        let ticket = std::mem::take(&mut bio.ticket);
        if let Some(scheduled) = &mut self.scheduled
            && scheduled.ticket == ticket
        {
            scheduled.kept_until_ns = None;
            scheduled.scheduler.ended(bio, start_ns, now_ns);
        }
    }
}
