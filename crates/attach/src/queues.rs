//! The queues of a disk, as its control thread sees them: users, memory, and whether all are quiesced.
//!
//! Owned by the control thread. Users get commands (`mailbox.rs`); `control.rs` decides the messages to the back-end.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use blkyard_mem::{DmaDomain, Region};
use blkyard_mq::QueueKind;
use blkyard_sys::EventFd;

use crate::mailbox::{DriverQueueView, QueueCommand, QueueMailbox, RingEnd};
use crate::protocol::QueueShared;

/// One queue of the disk, in use or not.
struct DriverQueue<R> {
    shared: QueueShared,
    deaths: Arc<AtomicU64>,
    /// The end of its ring, while the queue is not in use. Missing if it was closed in the middle of I/O.
    spare: Option<RingEnd<R>>,
    /// It was in use before.
    used: bool,
    user: Option<User<R>>,
}

/// User of a queue.
struct User<R> {
    mailbox: Arc<QueueMailbox<R>>,
    regions: Vec<Arc<Region>>,
    memory_number: u64,
    /// It was given a ring, of those that were made last.
    has_ring: bool,
    /// It has no request in flight, and accepts none until it is told that its memory is known.
    quiesced: bool,
}

/// All queues are asked to quiesce.
struct QuiesceState {
    number: u64,
    until: Instant,
}

/// A queue that was opened.
pub(crate) struct OpenedQueue<R> {
    pub(crate) number: usize,
    pub(crate) mailbox: Arc<QueueMailbox<R>>,
    pub(crate) ring: Option<RingEnd<R>>,
    /// Whether it has had another user before.
    pub(crate) was_used: bool,
}

/// The queues of a disk, by number.
pub(crate) struct DriverQueues<R> {
    all: Vec<DriverQueue<R>>,
    /// The memory that the back-end is to know.
    domain: Arc<DmaDomain>,
    /// Changes of the domain that [`regions`](DriverQueues::regions) has seen.
    domain_changes: u64,
    /// Memory for queues that was made before they have it.
    reserved: Vec<Arc<Region>>,
    quiesce: Option<QuiesceState>,
    /// Number of the last quiesce.
    quiesces: u64,
}

impl<R> DriverQueues<R> {
    pub(crate) fn new(count: usize, domain: Arc<DmaDomain>) -> std::io::Result<DriverQueues<R>> {
        let queue = |_| {
            let shared = QueueShared { call: Arc::new(EventFd::new()?), violations: Arc::default() };
            Ok(DriverQueue { shared, deaths: Arc::default(), spare: None, used: false, user: None })
        };
        let all = (0..count).map(queue).collect::<std::io::Result<_>>()?;
        Ok(DriverQueues { all, domain, domain_changes: 0, reserved: Vec::new(), quiesce: None, quiesces: 0 })
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Shared state of each queue's rings.
    pub(crate) fn shared(&self) -> Vec<QueueShared> {
        self.all.iter().map(|queue| queue.shared.clone()).collect()
    }

    fn users(&self) -> impl Iterator<Item = &User<R>> {
        self.all.iter().filter_map(|queue| queue.user.as_ref())
    }

    fn user_mut(&mut self, number: u16) -> Option<&mut User<R>> {
        self.all[usize::from(number)].user.as_mut()
    }

    /// State of the queues in use, for other threads.
    pub(crate) fn views(&self) -> Vec<DriverQueueView> {
        self.users().map(|user| user.mailbox.view.clone()).collect()
    }

    /// The name of a queue, if it is in use.
    pub(crate) fn name(&self, number: u16) -> Option<&str> {
        self.all[usize::from(number)].user.as_ref().map(|user| &*user.mailbox.view.name)
    }

    /// Sends a command to each user.
    pub(crate) fn post_all(&self, command: impl Fn() -> QueueCommand<R>) {
        self.users().for_each(|user| user.mailbox.post(command()));
    }

    /// Opens a free queue, preferably one without an earlier user. `None` if all are in use.
    pub(crate) fn open(&mut self, kind: QueueKind) -> Option<OpenedQueue<R>> {
        let is_free = |queue: &DriverQueue<R>| queue.user.is_none();
        let fresh = self.all.iter().position(|queue| is_free(queue) && !queue.used);
        let number = fresh.or_else(|| self.all.iter().position(is_free))?;
        let queue = &mut self.all[number];
        let name = format!("{}.{number}", if kind == QueueKind::Poll { "req_poll" } else { "req" });
        let QueueShared { call, violations } = &queue.shared;
        let view = DriverQueueView { name, violations: Arc::clone(violations), deaths: Arc::clone(&queue.deaths) };
        let mailbox = Arc::new(QueueMailbox::new(kind, call, view));
        let ring = queue.spare.take();
        queue.user = Some(User {
            mailbox: Arc::clone(&mailbox),
            regions: Vec::new(),
            memory_number: 0,
            has_ring: ring.is_some(),
            quiesced: true,
        });
        let was_used = std::mem::replace(&mut queue.used, true);
        Some(OpenedQueue { number, mailbox, ring, was_used })
    }

    /// A queue is not in use any more. Keeps the end of its ring if that has this number.
    pub(crate) fn close(&mut self, number: u16, end: Option<RingEnd<R>>, ring: Option<u64>) {
        let queue = &mut self.all[usize::from(number)];
        let Some(user) = queue.user.take() else { return };
        // It may have a new one by now, and not know.
        let unread = user.mailbox.take().into_iter().filter_map(|command| match command {
            QueueCommand::Run(end) => Some(end),
            _ => None,
        });
        queue.spare = unread.chain(end).find(|end| Some(end.number) == ring);
    }

    /// Memory that queues will use.
    pub(crate) fn reserve(&mut self, region: Arc<Region>) {
        self.reserved.push(region);
    }

    /// Sets the memory of a queue, under this number. False if it is not in use. One that is not quiesced has requests
    /// in flight, and is asked to before the session's memory changes.
    pub(crate) fn set_memory(
        &mut self,
        number: u16,
        memory_number: u64,
        regions: Vec<Arc<Region>>,
        is_quiesced: bool,
    ) -> bool {
        let Some(user) = self.user_mut(number) else { return false };
        (user.regions, user.memory_number, user.quiesced) = (regions, memory_number, is_quiesced);
        true
    }

    /// Some queue has memory: rings are wanted.
    pub(crate) fn have_memory(&self) -> bool {
        self.users().any(|user| user.memory_number > 0)
    }

    /// Whether the domain has changed since its regions were read.
    pub(crate) fn is_domain_changed(&self) -> bool {
        self.domain.changes() != self.domain_changes
    }

    /// All memory that the back-end is to know, that of the rings first. `knows` says whether it knows a region now.
    pub(crate) fn regions(
        &mut self,
        rings: Option<Arc<Region>>,
        knows: impl Fn(&Arc<Region>) -> bool,
    ) -> Vec<Arc<Region>> {
        // A region without other holders is unused; the session holds those that it knows.
        self.reserved.retain(|region| Arc::strong_count(region) > 1 + usize::from(knows(region)));
        // Before the regions, so that a change in between is seen again.
        self.domain_changes = self.domain.changes();
        let mut wanted: Vec<_> = rings.into_iter().collect();
        for region in self.reserved.iter().chain(&self.domain.regions()) {
            if !has(&wanted, region) {
                wanted.push(Arc::clone(region));
            }
        }
        wanted
    }

    /// Whether all users have a ring of those that were made last.
    pub(crate) fn users_have_rings(&self) -> bool {
        self.users().all(|user| user.has_ring)
    }

    /// The same for free queues: none was closed with I/O in flight.
    pub(crate) fn all_have_rings(&self) -> bool {
        self.all.iter().all(|queue| queue.user.as_ref().map_or(queue.spare.is_some(), |user| user.has_ring))
    }

    /// Hands a ring to the user of each queue, and keeps those of the others.
    pub(crate) fn give_rings(&mut self, ends: Vec<RingEnd<R>>) {
        for (queue, end) in self.all.iter_mut().zip(ends) {
            match &mut queue.user {
                Some(user) => {
                    user.has_ring = true;
                    user.mailbox.post(QueueCommand::Run(end));
                }
                None => queue.spare = Some(end),
            }
        }
    }

    /// Resumes all queues with their memory, as far as the back-end knows it.
    pub(crate) fn resume(&mut self, knows: impl Fn(&[Arc<Region>]) -> bool) {
        self.quiesce = None;
        for user in self.all.iter_mut().filter_map(|queue| queue.user.as_mut()) {
            user.quiesced = false;
            user.mailbox.post(QueueCommand::Memory(user.memory_number, knows(&user.regions)));
        }
    }

    /// Asks all queues to quiesce within this time, unless they were asked.
    pub(crate) fn quiesce(&mut self, now: Instant, limit: Duration) {
        if self.quiesce.is_some() {
            return;
        }
        self.quiesces += 1;
        self.quiesce = Some(QuiesceState { number: self.quiesces, until: now + limit });
        let running = self.users().filter(|user| !user.quiesced);
        running.for_each(|user| user.mailbox.post(QueueCommand::Rest(self.quiesces)));
    }

    /// A queue has answered the request to quiesce of this number.
    pub(crate) fn set_quiesced(&mut self, number: u16, quiesce: u64) {
        let is_current = self.quiesce.as_ref().is_some_and(|asked| asked.number == quiesce);
        if let Some(user) = self.user_mut(number) {
            user.quiesced |= is_current;
        }
    }

    /// Whether no queue has anything in flight or takes anything.
    pub(crate) fn are_quiesced(&self) -> bool {
        self.users().all(|user| user.quiesced)
    }

    /// The session is over: no queue need answer any more.
    pub(crate) fn end_quiesce(&mut self) {
        self.quiesce = None;
    }

    /// When all queues have to be quiesced, if they were asked.
    pub(crate) fn quiesce_deadline(&self) -> Option<Instant> {
        self.quiesce.as_ref().map(|quiesce| quiesce.until)
    }

    /// Name of a queue that has not answered in time; empty if one has left meanwhile. `None` before the limit.
    pub(crate) fn overdue(&self, now: Instant) -> Option<String> {
        self.quiesce_deadline().filter(|until| now >= *until)?;
        let running = self.users().find(|user| !user.quiesced);
        Some(running.map(|user| user.mailbox.view.name.clone()).unwrap_or_default())
    }
}

/// Whether a region is among these.
pub(crate) fn has(regions: &[Arc<Region>], region: &Arc<Region>) -> bool {
    regions.iter().any(|known| Arc::ptr_eq(known, region))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Commands that a queue has not read, by name.
    fn unread(mailbox: &QueueMailbox<()>) -> Vec<String> {
        let name = |command| format!("{command:?}");
        mailbox.take().into_iter().map(name).collect()
    }

    fn queues(count: usize) -> DriverQueues<()> {
        DriverQueues::new(count, DmaDomain::new(|| {})).unwrap()
    }

    fn end(number: u64) -> RingEnd<()> {
        RingEnd { ring: Box::new(()), kick: Arc::new(EventFd::new().unwrap()), number }
    }

    #[test]
    fn queues_are_quiesced_when_all_have_answered_the_last_question() {
        let mut queues = queues(3);
        let opened = [(); 2].map(|()| queues.open(QueueKind::Default).unwrap());
        queues.resume(|_| true);
        assert!(!queues.are_quiesced());
        let now = Instant::now();
        queues.quiesce(now, SECOND);
        queues.quiesce(now + SECOND / 2, SECOND);
        assert_eq!(unread(&opened[0].mailbox), ["Memory(0, true)", "Rest(1)"], "asked once");
        queues.set_quiesced(0, 1);
        queues.set_quiesced(1, 7);
        assert!(!queues.are_quiesced(), "the second has answered another question");
        assert_eq!((queues.overdue(now + SECOND / 2), queues.quiesce_deadline()), (None, Some(now + SECOND)));
        assert_eq!(queues.overdue(now + SECOND).as_deref(), Some("req.1"));
        queues.set_quiesced(1, 1);
        assert!(queues.are_quiesced());
        queues.resume(|_| true);
        assert!(!queues.are_quiesced() && queues.quiesce_deadline().is_none());
        queues.set_quiesced(0, 1);
        assert!(!queues.are_quiesced(), "a late answer");
    }

    #[test]
    fn queue_that_never_was_in_use_is_given_first() {
        let mut queues = queues(2);
        queues.give_rings(vec![end(1), end(2)]);
        let first = queues.open(QueueKind::Default).unwrap();
        assert!((first.number, first.was_used) == (0, false) && first.ring.is_some());
        queues.close(0, first.ring, Some(1));
        let second = queues.open(QueueKind::Poll).unwrap();
        assert_eq!((second.number, queues.name(1)), (1, Some("req_poll.1")));
        let again = queues.open(QueueKind::Default).unwrap();
        assert!((again.number, again.was_used) == (0, true) && again.ring.is_some());
        assert!(queues.open(QueueKind::Default).is_none());
    }

    #[test]
    fn ring_of_a_closed_queue_is_kept_only_if_it_is_the_last_one() {
        let mut queues = queues(1);
        queues.give_rings(vec![end(1)]);
        let mut opened = queues.open(QueueKind::Default).unwrap();
        queues.close(0, opened.ring.take(), Some(2));
        assert!(!queues.all_have_rings(), "an old ring");
        let opened = queues.open(QueueKind::Default).unwrap();
        assert!(opened.ring.is_none() && !queues.users_have_rings());
        queues.give_rings(vec![end(2)]);
        assert!(queues.users_have_rings());
        queues.close(0, None, Some(2));
        assert!(queues.all_have_rings(), "it was sent and not read");
    }

    #[test]
    fn memory_is_wanted_once_and_as_long_as_somebody_has_it() {
        let domain = DmaDomain::new(|| {});
        let mut queues = DriverQueues::<()>::new(2, Arc::clone(&domain)).unwrap();
        let regions = [(); 3].map(|()| Region::shared(1).unwrap());
        let [rings, buffers, other] = &regions;
        queues.reserve(Arc::clone(buffers));
        assert!(queues.open(QueueKind::Default).is_some() && !queues.have_memory());
        let mapping = domain.map(vec![Arc::clone(buffers), Arc::clone(other)]);
        assert!(queues.set_memory(0, 1, Vec::new(), true) && queues.have_memory() && queues.is_domain_changed());
        assert!(!queues.set_memory(1, 1, Vec::new(), true), "nobody uses it");
        let wanted = queues.regions(Some(Arc::clone(rings)), |_| true);
        assert!(wanted.len() == 3 && wanted.iter().zip(&regions).all(|(wanted, region)| Arc::ptr_eq(wanted, region)));
        drop((wanted, queues.regions(None, |_| true)));
        assert!(!queues.is_domain_changed());
        drop(mapping);
        assert!(queues.is_domain_changed(), "one of them nobody has any more");
        let [rings, buffers, _] = regions;
        assert!(has(&queues.regions(Some(rings), |_| false), &buffers));
        drop(buffers);
        assert!(queues.regions(None, |_| false).is_empty());
    }
}
