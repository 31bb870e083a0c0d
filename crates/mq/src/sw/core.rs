//! What the holder of a shared queue's baton does: rounds of the queue, its record of who sleeps, and whom it wakes.
//!
//! Owned by the [`Baton`](blkyard_mem::Baton) of a [`SharedHwQueue`], whose threads it knows by number. It wakes nobody
//! itself: those to be woken are listed, and called by the thread that holds it.

use std::sync::PoisonError;

use blkyard_mem::ring::Consumer;
use blkyard_mem::sync::Ordering;

use super::shared::{BatonOutcome, SharedHwQueue, Why};
use super::{Context, Ends, Member};
use crate::{Bio, Driver, HwQueue};

/// Bios that one ring may get through in one round: a batch as submitters tend to make them.
const SHARE: usize = 32;
/// Interval of the scan for slow requests, and so the longest watch.
const TICK_NS: u64 = 1_000_000_000;

/// State that only the holder of the baton accesses.
pub(super) struct Core<D, Cx> {
    hw: HwQueue<D>,
    cx: Cx,
    members: Box<[Member]>,
    /// Word was left by others, and something may be in their rings.
    heard: bool,
    /// Submitter that is served first.
    next: usize,
    /// By submitter: whether it is recorded as parked.
    asleep: Box<[bool]>,
    /// How many are.
    parked: usize,
    watch: Option<SleepWatch>,
    ticked_ns: u64,
    /// Accepts no more bios, permanently.
    frozen: bool,
    /// The device was asked to signal its eventfd.
    armed: bool,
}

/// The watching thread, and its deadline.
#[derive(Clone, Copy)]
struct SleepWatch {
    submitter: usize,
    until_ns: u64,
}

impl<D, Cx> Core<D, Cx> {
    /// An idle queue for these members and as many submitters, under whose baton nothing has happened yet.
    pub(super) fn new(hw: HwQueue<D>, cx: Cx, members: Vec<Member>, submitters: usize) -> Core<D, Cx> {
        Core {
            hw,
            cx,
            members: members.into(),
            heard: true,
            next: 0,
            asleep: vec![false; submitters].into(),
            parked: 0,
            watch: None,
            ticked_ns: 0,
            frozen: false,
            armed: false,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.hw.is_idle()
    }

    /// Whether a thread keeps watch.
    #[inline]
    pub(super) fn is_watched(&self) -> bool {
        self.watch.is_some()
    }

    /// The members with their rings.
    pub(super) fn into_members(self) -> Vec<Member> {
        self.members.into()
    }
}

impl<D: Driver<Cx>, Cx: Context> Core<D, Cx> {
    /// One round: takes bios, dispatches, returns completions. True if there is more work that the device will not
    /// signal.
    #[inline]
    pub(super) fn round(
        &mut self,
        me: usize,
        why: Why,
        ends: &mut Ends,
        clock: &impl Fn() -> u64,
        shared: &SharedHwQueue<D, Cx>,
        calls: &mut Vec<usize>,
    ) -> bool {
        if std::mem::take(&mut self.armed) {
            self.hw.disarm::<Cx>();
        }
        let mut now_ns = clock();
        let more = self.take_in(me, (why == Why::Ring).then_some(&mut ends.plug));
        let issued = self.issue(now_ns);
        self.cx.commit();
        if issued > 0 {
            // Devices that work on the spot have taken their time meanwhile.
            now_ns = clock();
        }
        self.cx.collect();
        // Rings without new entries are left to their threads.
        if self.reap(me, &mut ends.own, now_ns) {
            self.publish(shared, calls);
        }
        if why == Why::Ring {
            ends.dispatched_ns = now_ns;
        }
        if now_ns.saturating_sub(self.ticked_ns) >= TICK_NS {
            self.ticked_ns = now_ns;
            self.hw.mark_slow(now_ns);
        }
        self.hw.has_work() || (more && self.hw.room() > 0) || self.cx.has_more()
    }

    // Not inlined, like `reap`: each loop has the registers to itself. A loop's stack slots may alias the queue in the
    // cache, which slows both.
    #[inline(never)]
    fn issue(&mut self, now_ns: u64) -> usize {
        self.hw.issue(&mut self.cx, now_ns)
    }

    /// Reaps completions: this thread's own into its list, the others into rings. True if there are others.
    #[inline(never)]
    fn reap(&mut self, me: usize, own: &mut Vec<Box<Bio>>, now_ns: u64) -> bool {
        let Core { hw, cx, members, .. } = self;
        let mut crossed = false;
        hw.reap(cx, now_ns, &mut |bio| {
            if usize::from(bio.submitter) == me {
                own.push(bio);
            } else {
                put_back(members, bio);
                crossed = true;
            }
        });
        crossed
    }

    /// Before a watch: arms the device's eventfd, if it has one. True if a completion came before the device saw that.
    #[inline]
    pub(super) fn arm(&mut self) -> bool {
        let Core { hw, cx, armed, .. } = self;
        let Some(eventfd) = hw.eventfd::<Cx>() else { return false };
        cx.listen(eventfd);
        *armed = true;
        hw.arm::<Cx>()
    }

    /// Takes this thread's bios, and others' if they set the pending bit, while the hardware queue has room. True if
    /// bios may be left.
    #[inline]
    fn take_in(&mut self, me: usize, plug: Option<&mut Vec<Box<Bio>>>) -> bool {
        self.heard = if self.heard { self.take_from_all(me, plug) } else { self.take_from(me, plug) };
        self.heard
    }

    /// Takes from all members in turn.
    fn take_from_all(&mut self, me: usize, mut plug: Option<&mut Vec<Box<Bio>>>) -> bool {
        let (first, count) = (self.next, self.members.len());
        let mut more = false;
        for step in 0..count {
            let submitter = if first + step < count { first + step } else { first + step - count };
            if self.hw.room() == 0 {
                // A member that was not served is first in the next round.
                self.next = submitter;
                return true;
            }
            more |= self.take_from(submitter, if submitter == me { plug.take() } else { None });
        }
        more
    }

    /// Takes a member's share from its ring, then from its plug. True if something may be left.
    #[inline]
    fn take_from(&mut self, submitter: usize, plug: Option<&mut Vec<Box<Bio>>>) -> bool {
        let Core { hw, members, .. } = self;
        let Some(Member { sq, .. }) = members.get_mut(submitter) else { return false };
        let mut share = SHARE.min(hw.room());
        if !sq.is_empty() {
            share -= take_from_ring(hw, sq, submitter, share);
        }
        let Some(plug) = plug else { return share == 0 && !sq.is_empty() };
        let count = plug.len().min(share);
        for mut bio in plug.drain(..count) {
            bio.submitter = submitter as u16;
            hw.accept(bio);
        }
        !plug.is_empty() || (share == 0 && !sq.is_empty())
    }

    /// Publishes the members' rings, and wakes the threads that sleep on them.
    #[inline]
    fn publish(&mut self, shared: &SharedHwQueue<D, Cx>, calls: &mut Vec<usize>) {
        for submitter in 0..self.members.len() {
            let member = &mut self.members[submitter];
            if !member.cq.publish() {
                continue;
            }
            if self.asleep[submitter] {
                self.wake_sleeper(submitter, shared, calls);
            } else if self.watch.is_some_and(|watch| watch.submitter == submitter) {
                self.watch = None;
                calls.push(submitter);
            }
        }
    }

    /// Records threads that have announced a sleep or a wake-up. Called after the baton's word was acknowledged.
    pub(super) fn record_sleepers(&mut self, shared: &SharedHwQueue<D, Cx>, calls: &mut Vec<usize>) {
        self.heard = true;
        // Pairs with the store in `SharedHwQueue::freeze`.
        if !self.frozen && shared.closing.load(Ordering::Acquire) {
            self.frozen = true;
            self.hw.freeze();
        }
        // Pairs with the store in `SharedHwQueue::obtain`.
        if shared.has_commands.load(Ordering::Acquire) {
            self.obey(shared);
        }
        for (submitter, place) in shared.submitters.iter().enumerate() {
            // Pairs with the store in `SharedHwQueue::announce_up`: its later announcements are seen below.
            if place.up.load(Ordering::Relaxed) && place.up.swap(false, Ordering::Acquire) {
                self.clear_sleeper(submitter);
            }
            // Pairs with the store in `SharedHwQueue::announce`.
            if self.asleep[submitter] || !place.parked.load(Ordering::Acquire) {
                continue;
            }
            // A watching thread that wakes and finds the queue owned is parked from here on.
            if self.watch.is_some_and(|watch| watch.submitter == submitter) {
                self.watch = None;
            }
            self.asleep[submitter] = true;
            self.parked += 1;
            // It checked before we published, perhaps in an earlier round.
            if self.members.get_mut(submitter).is_some_and(|member| !member.cq.is_empty()) {
                self.wake_sleeper(submitter, shared, calls);
            }
        }
    }

    #[cold]
    fn obey(&mut self, shared: &SharedHwQueue<D, Cx>) {
        shared.has_commands.store(false, Ordering::Relaxed);
        let commands = std::mem::take(&mut *shared.commands.lock().unwrap_or_else(PoisonError::into_inner));
        commands.into_iter().for_each(|command| command(&mut self.hw, &mut self.cx));
    }

    /// Strikes a parked member off the record, and notes that it is to be woken.
    fn wake_sleeper(&mut self, submitter: usize, shared: &SharedHwQueue<D, Cx>, calls: &mut Vec<usize>) {
        self.asleep[submitter] = false;
        self.parked -= 1;
        // Pairs with the load in `SwQueue::wait`.
        shared.submitters[submitter].parked.store(false, Ordering::Release);
        calls.push(submitter);
    }

    /// Rouses one parked member, if there is one, in turn.
    fn rouse_one(&mut self, shared: &SharedHwQueue<D, Cx>, calls: &mut Vec<usize>) -> bool {
        if self.parked == 0 {
            return false;
        }
        let count = self.asleep.len();
        let first = (0..count).map(|step| (self.next + step) % count).find(|submitter| self.asleep[*submitter]);
        let Some(submitter) = first else { unreachable!("those parked are counted") };
        self.next = if submitter < self.members.len() { submitter } else { 0 };
        self.wake_sleeper(submitter, shared, calls);
        true
    }

    /// Before the owner continues with its own bios: makes sure that a sleeper will be woken.
    #[inline]
    pub(super) fn pass_on(&mut self, left: bool, shared: &SharedHwQueue<D, Cx>, calls: &mut Vec<usize>) {
        if self.frozen {
            self.tell_closer(shared, calls);
        }
        let roused = (left || self.watch.is_none()) && self.rouse_one(shared, calls);
        // A woken sleeper takes the queue, and then watches. The current watcher is woken if no other thread can take
        // over, or if it would sleep too long.
        if let Some(watch) = self.watch
            && !roused
            && (left || self.due_ns() < watch.until_ns)
        {
            self.watch = None;
            calls.push(watch.submitter);
        }
    }

    /// Before the owner sleeps: it watches if no thread does so with an early enough deadline.
    pub(super) fn prepare_park(
        &mut self,
        me: usize,
        shared: &SharedHwQueue<D, Cx>,
        calls: &mut Vec<usize>,
    ) -> BatonOutcome {
        if self.frozen {
            self.tell_closer(shared, calls);
        }
        let due_ns = self.due_ns();
        match self.watch {
            Some(watch) if watch.until_ns <= due_ns => {
                self.asleep[me] = true;
                self.parked += 1;
                shared.submitters[me].parked.store(true, Ordering::Relaxed);
                BatonOutcome::Park
            }
            other => {
                calls.extend(other.map(|watch| watch.submitter));
                self.watch = Some(SleepWatch { submitter: me, until_ns: due_ns });
                BatonOutcome::Watch(due_ns)
            }
        }
    }

    /// Wakes the closing thread once the queue is empty.
    #[inline(never)]
    fn tell_closer(&mut self, shared: &SharedHwQueue<D, Cx>, calls: &mut Vec<usize>) {
        let closer = shared.submitters.len() - 1;
        if !self.hw.is_idle() {
            return;
        }
        if self.asleep[closer] {
            self.wake_sleeper(closer, shared, calls);
        } else if self.watch.is_some_and(|watch| watch.submitter == closer) {
            self.watch = None;
            calls.push(closer);
        }
    }

    /// Marks this thread as awake, whatever was announced or recorded before.
    pub(super) fn unpark(&mut self, me: usize, shared: &SharedHwQueue<D, Cx>) {
        self.clear_sleeper(me);
        shared.submitters[me].parked.store(false, Ordering::Relaxed);
        shared.submitters[me].up.store(false, Ordering::Relaxed);
    }

    /// Removes a submitter from the record of sleepers.
    fn clear_sleeper(&mut self, submitter: usize) {
        if self.watch.is_some_and(|watch| watch.submitter == submitter) {
            self.watch = None;
        }
        if std::mem::take(&mut self.asleep[submitter]) {
            self.parked -= 1;
        }
    }

    /// Latest time of the queue's next run, even without an event.
    fn due_ns(&self) -> u64 {
        let tick_ns = self.ticked_ns + TICK_NS;
        self.hw.deadline_ns::<Cx>().map_or(tick_ns, |due_ns| due_ns.min(tick_ns))
    }
}

/// Puts completed bios into their submitter's ring.
// Not inlined, like `take_from_ring`: crossing threads costs more than a call, and the other path has fewer values to
// keep.
#[inline(never)]
fn put_back(members: &mut [Member], bio: Box<Bio>) {
    let Ok(()) = members[usize::from(bio.submitter)].cq.push(bio) else {
        unreachable!("its submitter holds a place for it")
    };
}

/// Takes up to `max` bios from a member's ring. Returns how many.
#[inline(never)]
fn take_from_ring<D>(hw: &mut HwQueue<D>, sq: &mut Consumer<Box<Bio>>, submitter: usize, most: usize) -> usize {
    let mut taken = 0;
    while taken < most
        && let Some(mut bio) = sq.pop()
    {
        bio.submitter = submitter as u16;
        hw.submit(bio);
        taken += 1;
    }
    sq.release();
    taken
}
