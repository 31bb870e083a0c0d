//! The software queue: a submitting thread's own end of a hardware queue that it shares with others.
//!
//! Each thread has a [`SwQueue`] to itself: a ring of wishes, a ring of answers, and a number of places. Between them stands
//! one hardware queue under a [`Baton`]. Whoever finds it idle turns its crank, for all; whoever finds it owned leaves word and
//! goes.
//!
//! ```text
//!   thread A   submit ─▶ sq ─┐                                  ┌─ sq ◀─ submit   thread B
//!              poll  ◀── cq ◀┤  take ─▶ ┌─────────┐ ◀─ take     ├▶ cq ──▶ poll
//!                            ├─────────▶│ HwQueue │◀────────────┤
//!                            └◀─deliver─│  + Cx   │──deliver───▶┘
//!                                       └─────────┘ under the baton
//! ```
//!
//! **Places.** A submitter holds a place from [`submit`](SwQueue::submit) until the bio is given back, and both its rings have as many places. So
//! nothing enters the left ring without a place on the right, and a completion always has room.
//!
//! **Turns.** The owner takes from the rings in turn, a bounded share of each per round, so that first come is first served and
//! nobody's burst keeps the others out. It goes on while work is left or can be made, for a bounded number of rounds; then it passes
//! on: it wakes a sleeper, who will take the queue. If none sleeps, everyone who wants something is running, and comes for it.
//!
//! **Sleep.** A thread sleeps only on its own completion ring. It first announces itself, then goes to the baton as with any
//! work:
//!
//! ```text
//!             announce, take the baton
//!    awake ──────────┬─ owned by another ──▶ parked   the owner cannot leave without hearing of it
//!      ▲             └─ ours: crank; nothing for us ─┬─ nobody keeps watch ──▶ on watch, until a deadline
//!      │                                             └─ somebody does ───────▶ parked
//!      └──── completions came, or its turn to keep watch, or to take the queue over ────┘
//! ```
//!
//! One of the sleepers keeps watch: it is the armed sleeper that hears device and deadlines, and does not hold the queue meanwhile, so a
//! submitter need not wake it to get through. An owner that leaves while threads are parked and nobody keeps watch wakes one of
//! them. What lets all this do with the baton's one word: who sleeps is either written down under the baton, or announced
//! before *work* is set, and so heard before the baton is put down.
//!
//! **The price**: an owner that is preempted delays those who share its queue; they sleep. Threads that only poll come last after
//! those that sleep when the rounds are used up.
//!
//! It starts no thread, reads no clock and makes no system call: time is a closure, sleep is a [`Bed`]. It does not choose the
//! queue for a thread: see [`QueueMap`](crate::QueueMap). It does not bind bios to the thread that issued them: see [`SwQueue::leave`].

use std::sync::Arc;

use blkyard_mem::ring::{Consumer, Producer, channel};
use blkyard_mem::sync::{AtomicBool, Ordering};
use blkyard_mem::{Baton, RegionTable};

use crate::stats::HwStats;
use crate::{Bio, DeviceInfo, Driver, HwQueue, Wake};

/// Bios that one ring may get through in one round: a batch as submitters tend to make them.
const SHARE: usize = 32;
/// Rounds that an owner turns for others before it passes on: 16 rounds of a few batches take about as long as the wake-up of a
/// thread, which is what passing on costs.
const ROUNDS_MAX: u32 = 16;
/// What a bio carries for a cookie on its way: the seat above, the place below.
const SEAT_SHIFT: u32 = 32;
const PLACE_MASK: u64 = (1 << SEAT_SHIFT) - 1;
/// How often requests are looked at that take too long, and so how long a watch lasts at most.
const TICK_NS: u64 = 1_000_000_000;

/// Where one thread sleeps. To [wake](Wake::wake) it works from any thread, and holds for the next sleep if none is going on.
///
/// Both sleeps may end for no reason; whoever slept looks again.
pub trait Bed: Wake {
    /// Sleeps until woken.
    fn sleep(&self);

    /// Keeps watch: sleeps until woken, until the device may have something to say, or until the deadline. If the device
    /// had something to say before and nobody has looked since, returns at once.
    fn watch(&self, deadline_ns: u64);
}

/// What the drivers of a shared queue borrow (`Cx` of [`Driver`]), as its owner for the time being must treat it.
pub trait Context {
    /// Announces to the device what drivers have left to be announced together.
    fn commit(&mut self) {}

    /// Fetches what the device has finished, for drivers to find.
    fn collect(&mut self) {}
}

impl Context for () {}

/// One thread's end of a shared hardware queue.
///
/// Made by [`SwQueue::share`], then moved to its thread. Before it goes it must [leave](SwQueue::leave).
pub struct SwQueue<D, Cx> {
    yard: Arc<Yard<D, Cx>>,
    seat: usize,
    sq: Producer<Box<Bio>>,
    cq: Consumer<Box<Bio>>,
    /// By place: the cookie of the bio that holds it, which carries its seat and its place instead on its way; or the next free
    /// place.
    places: Box<[u64]>,
    first_free: u64,
    /// Places that bios hold.
    held: usize,
    /// Seats whose threads are to be woken as soon as the baton is put down.
    calls: Vec<usize>,
}

/// What all who share a queue have in common.
struct Yard<D, Cx> {
    baton: Baton<Core<D, Cx>>,
    seats: Box<[Seat]>,
    info: Arc<DeviceInfo>,
    memory: Arc<RegionTable>,
    stats: Arc<HwStats>,
}

/// What others may know of a thread without holding the baton.
#[repr(align(128))]
struct Seat {
    /// Set by the thread that wants to be parked, cleared by the owner who wakes it.
    parked: AtomicBool,
    bed: Arc<dyn Bed>,
}

/// What is done under the baton alone.
struct Core<D, Cx> {
    hw: HwQueue<D>,
    cx: Cx,
    members: Box<[Member]>,
    /// What ended in this round, before it is dealt out.
    ended: Vec<Box<Bio>>,
    /// Whose turn it is to be served first.
    next: usize,
    /// Members that are parked, by our own record.
    parked: usize,
    watch: Option<Watch>,
    ticked_ns: u64,
}

/// The other ends of a member's rings.
struct Member {
    sq: Consumer<Box<Bio>>,
    cq: Producer<Box<Bio>>,
    parked: bool,
    /// Something was put into `cq` in this round.
    served: bool,
}

/// Who keeps watch, and until when.
#[derive(Clone, Copy)]
struct Watch {
    seat: usize,
    until_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    /// There is something new in the ring.
    Ring,
    /// To see whether anything has come.
    Poll,
    /// Nothing can be done before something has come.
    Wait,
}

/// What going to the baton came to.
enum Turn {
    /// It is owned by another.
    Owned,
    /// We cranked, and put it down.
    Cranked,
    /// The same, and now we are parked.
    Park,
    /// The same, and now we keep watch until then.
    Watch(u64),
}

impl<D: Driver<Cx>, Cx: Context> SwQueue<D, Cx> {
    /// Shares an idle hardware queue, whose memory is set, among as many threads as there are beds. Each may have up to `places` bios out.
    ///
    /// # Panics
    /// If the queue is not idle, or nobody or nothing is to be served.
    pub fn share(hw: HwQueue<D>, cx: Cx, places: usize, beds: Vec<Arc<dyn Bed>>) -> Vec<SwQueue<D, Cx>> {
        assert!(hw.is_idle() && hw.room() > 0 && !beds.is_empty(), "a queue is shared before it is used");
        let seats = beds.len();
        let (mut ends, mut members) = (Vec::with_capacity(seats), Vec::with_capacity(seats));
        for _ in 0..seats {
            let (to_queue, sq) = channel(places);
            let (cq, from_queue) = channel(places);
            ends.push((to_queue, from_queue));
            members.push(Member { sq, cq, parked: false, served: false });
        }
        let ended = Vec::with_capacity(hw.room());
        let (info, memory, stats) = (Arc::clone(hw.info()), Arc::clone(hw.memory()), Arc::clone(hw.stats()));
        let core = Core { hw, cx, members: members.into(), ended, next: 0, parked: 0, watch: None, ticked_ns: 0 };
        let seat = |bed| Seat { parked: AtomicBool::new(false), bed };
        let seats = beds.into_iter().map(seat).collect();
        let yard = Arc::new(Yard { baton: Baton::new(core), seats, info, memory, stats });
        let queue = |(seat, (sq, cq))| SwQueue {
            yard: Arc::clone(&yard),
            seat,
            sq,
            cq,
            places: (1..=places as u64).collect(),
            first_free: 0,
            held: 0,
            calls: Vec::with_capacity(yard.seats.len() + 1),
        };
        ends.into_iter().enumerate().map(queue).collect()
    }

    /// What the device is.
    pub fn info(&self) -> &Arc<DeviceInfo> {
        &self.yard.info
    }

    /// The memory that segments point into.
    pub fn memory(&self) -> &Arc<RegionTable> {
        &self.yard.memory
    }

    /// The counters of the hardware queue, for all who share it.
    pub fn stats(&self) -> &Arc<HwStats> {
        &self.yard.stats
    }

    /// How many more bios may be submitted before one comes back.
    #[inline]
    pub fn room(&self) -> usize {
        self.places.len() - self.held
    }

    /// Bios submitted and not given back.
    #[inline]
    pub fn in_flight(&self) -> usize {
        self.held
    }

    /// Accepts a bio into this thread's ring, where nobody sees it before [`SwQueue::ring`]. It comes back through
    /// [`SwQueue::poll`] or [`SwQueue::wait`], whatever happens.
    ///
    /// # Panics
    /// If there is no [room](SwQueue::room): the caller holds a place before it makes a wish.
    #[inline]
    pub fn submit(&mut self, mut bio: Box<Bio>) {
        let place = self.first_free;
        let Some(kept) = self.places.get_mut(place as usize) else { panic!("a bio was submitted without a place") };
        self.first_free = std::mem::replace(kept, bio.cookie);
        self.held += 1;
        bio.cookie = (self.seat as u64) << SEAT_SHIFT | place;
        let Ok(()) = self.sq.push(bio) else { unreachable!("the ring has a place for each place held") };
    }

    /// Makes visible what was submitted. If the queue is idle, passes it on to the device; if it is owned, its owner will.
    #[inline]
    pub fn ring(&mut self, clock: &impl Fn() -> u64) {
        if self.sq.publish() {
            self.turn(Why::Ring, clock);
        }
    }

    /// Gives back what is over, without waiting. Looks after the queue if nothing has come and nobody else does. Returns how
    /// many bios were given back.
    ///
    /// Bios still to be made visible stay so: see [`SwQueue::ring`].
    #[inline]
    pub fn poll(&mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let ended = self.drain(sink);
        if ended > 0 || self.in_flight() == 0 {
            return ended;
        }
        match self.turn(Why::Poll, clock) {
            Turn::Owned => 0,
            _ => self.drain(sink),
        }
    }

    /// Makes visible what was submitted and sleeps until at least one bio is over. Returns how many were given back: none only if
    /// none is out.
    ///
    /// It sleeps as soon as it can; a thread that rather spins a while polls first.
    pub fn wait(&mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        self.sq.publish();
        loop {
            let ended = self.drain(sink);
            if ended > 0 || self.in_flight() == 0 {
                return ended;
            }
            // Announced here, made known by the baton's read-modify-write: an owner who is there hears it before it leaves.
            // Release, so that an owner who hears it early knows our ring as empty as we left it.
            self.yard.seats[self.seat].parked.store(true, Ordering::Release);
            let turn = self.turn(Why::Wait, clock);
            let seat = &self.yard.seats[self.seat];
            match turn {
                Turn::Cranked => {}
                Turn::Watch(until_ns) => seat.bed.watch(until_ns),
                // Pairs with the store in `Core::rouse`. Only an owner ends this, and strikes us off its record as it does; so
                // nobody who is awake is counted on as a sleeper.
                Turn::Owned | Turn::Park => {
                    while seat.parked.load(Ordering::Acquire) {
                        seat.bed.sleep();
                    }
                }
            }
        }
    }

    /// Leaves: waits until all bios of this thread are given back.
    ///
    /// What this thread has issued for others may still be in flight. Where a device binds I/O to the thread that issued it, as
    /// `io_uring` does, a thread must not end before [all](SwQueue::stats) are done with the queue.
    pub fn leave(mut self, clock: &impl Fn() -> u64, sink: &mut impl FnMut(Box<Bio>)) {
        while self.wait(clock, sink) > 0 {}
    }

    #[inline]
    fn drain(&mut self, sink: &mut impl FnMut(Box<Bio>)) -> usize {
        let mut ended = 0;
        while let Some(mut bio) = self.cq.pop() {
            let place = bio.cookie & PLACE_MASK;
            bio.cookie = std::mem::replace(&mut self.places[place as usize], self.first_free);
            self.first_free = place;
            self.held -= 1;
            ended += 1;
            sink(bio);
        }
        self.cq.release();
        ended
    }

    /// Goes to the baton, and cranks the queue if it is ours.
    fn turn(&mut self, why: Why, clock: &impl Fn() -> u64) -> Turn {
        let SwQueue { yard, seat: me, cq, calls, .. } = self;
        let seats = &yard.seats[..];
        let taken = if why == Why::Poll { yard.baton.take_if_idle() } else { yard.baton.take() };
        let Some(mut holder) = taken else { return Turn::Owned };
        if why == Why::Wait {
            holder.get_up(*me, seats);
        }
        let (mut rounds, mut left) = (0, true);
        let turn = loop {
            // Nobody is woken later than the round after.
            call(seats, calls);
            let heeded = holder.heed();
            if heeded {
                holder.hear(seats, calls);
            }
            let mut may_go_on = rounds < ROUNDS_MAX || (why == Why::Wait && cq.is_empty());
            if may_go_on {
                left = holder.round(clock, seats, calls);
                rounds += 1;
                may_go_on = rounds < ROUNDS_MAX || (why == Why::Wait && cq.is_empty());
            } else {
                left |= heeded;
            }
            if left && may_go_on {
                continue;
            }
            let turn = if why == Why::Wait && cq.is_empty() {
                holder.lie_down(*me, seats, calls)
            } else {
                holder.pass_on(left, seats, calls);
                Turn::Cranked
            };
            match holder.give_back() {
                Ok(()) => break turn,
                Err(still) => {
                    holder = still;
                    if why == Why::Wait {
                        holder.get_up(*me, seats);
                    }
                }
            }
        };
        call(seats, calls);
        turn
    }
}

#[inline]
fn put_back(cq: &mut Producer<Box<Bio>>, bio: Box<Bio>) {
    let Ok(()) = cq.push(bio) else { unreachable!("its submitter holds a place for it") };
}

/// Wakes those who are to be woken.
#[inline]
fn call(seats: &[Seat], calls: &mut Vec<usize>) {
    calls.drain(..).for_each(|seat| seats[seat].bed.wake());
}

impl<D: Driver<Cx>, Cx: Context> Core<D, Cx> {
    /// One round: takes from the rings, passes on, gives back. True if there is more to do that the device will not tell us of.
    #[inline]
    fn round(&mut self, clock: &impl Fn() -> u64, seats: &[Seat], calls: &mut Vec<usize>) -> bool {
        let mut now_ns = clock();
        let more = self.take_in();
        let issued = self.hw.issue(&mut self.cx, now_ns);
        self.cx.commit();
        if issued > 0 {
            // Devices that work on the spot have taken their time meanwhile.
            now_ns = clock();
        }
        self.cx.collect();
        if self.deliver(now_ns) > 0 {
            self.publish(seats, calls);
        }
        if now_ns.saturating_sub(self.ticked_ns) >= TICK_NS {
            self.ticked_ns = now_ns;
            self.hw.mark_slow(now_ns);
        }
        self.hw.has_work() || (more && self.hw.room() > 0)
    }

    /// Takes from the members' rings, in turn, while the hardware queue has room. True if something may be left in them.
    #[inline]
    fn take_in(&mut self) -> bool {
        let Core { hw, members, next, .. } = self;
        let mut more = false;
        for step in 0..members.len() {
            let seat = if *next + step < members.len() { *next + step } else { *next + step - members.len() };
            let room = hw.room();
            if room == 0 {
                // Who was not served is first in the next round.
                *next = seat;
                return true;
            }
            let sq = &mut members[seat].sq;
            let share = SHARE.min(room);
            let mut taken = 0;
            while taken < share
                && let Some(bio) = sq.pop()
            {
                hw.submit(bio);
                taken += 1;
            }
            sq.release();
            more |= taken == share && !sq.is_empty();
        }
        more
    }

    /// Puts what is over into its submitter's ring.
    #[inline]
    fn deliver(&mut self, now_ns: u64) -> usize {
        let Core { hw, cx, members, ended, .. } = self;
        let count = hw.reap(cx, now_ns, &mut |bio| ended.push(bio));
        // In runs, since what one thread submitted together tends to end together.
        let mut bios = ended.drain(..);
        let mut next = bios.next();
        while let Some(first) = next.take() {
            let seat = first.cookie >> SEAT_SHIFT;
            let member = &mut members[seat as usize];
            member.served = true;
            put_back(&mut member.cq, first);
            for bio in bios.by_ref() {
                if bio.cookie >> SEAT_SHIFT != seat {
                    next = Some(bio);
                    break;
                }
                put_back(&mut member.cq, bio);
            }
        }
        drop(bios);
        count
    }

    /// Tells the members what was put into their rings, and wakes those who sleep on them.
    #[inline]
    fn publish(&mut self, seats: &[Seat], calls: &mut Vec<usize>) {
        for seat in 0..self.members.len() {
            let member = &mut self.members[seat];
            if !std::mem::take(&mut member.served) {
                continue;
            }
            member.cq.publish();
            if member.parked {
                self.rouse(seat, seats, calls);
            } else if self.watch.is_some_and(|watch| watch.seat == seat) {
                self.watch = None;
                calls.push(seat);
            }
        }
    }

    /// Writes down who has announced that it wants to be parked. Called after the baton's word was heeded.
    fn hear(&mut self, seats: &[Seat], calls: &mut Vec<usize>) {
        for seat in 0..self.members.len() {
            // Pairs with the store in `SwQueue::wait`.
            if self.members[seat].parked || !seats[seat].parked.load(Ordering::Acquire) {
                continue;
            }
            // Who comes off its watch and finds the queue owned is parked from here on.
            if self.watch.is_some_and(|watch| watch.seat == seat) {
                self.watch = None;
            }
            self.members[seat].parked = true;
            self.parked += 1;
            // It looked before we published, perhaps in an earlier round, when we did not know of it.
            if !self.members[seat].cq.is_empty() {
                self.rouse(seat, seats, calls);
            }
        }
    }

    /// Strikes a parked member off the record, and notes that it is to be woken.
    fn rouse(&mut self, seat: usize, seats: &[Seat], calls: &mut Vec<usize>) {
        self.members[seat].parked = false;
        self.parked -= 1;
        // Pairs with the load in `SwQueue::wait`.
        seats[seat].parked.store(false, Ordering::Release);
        calls.push(seat);
    }

    /// Rouses one parked member, if there is one, in turn.
    fn rouse_one(&mut self, seats: &[Seat], calls: &mut Vec<usize>) -> bool {
        if self.parked == 0 {
            return false;
        }
        let count = self.members.len();
        let first = (0..count).map(|step| (self.next + step) % count).find(|seat| self.members[*seat].parked);
        let Some(seat) = first else { unreachable!("those parked are counted") };
        self.next = seat;
        self.rouse(seat, seats, calls);
        true
    }

    /// Before the owner goes on with its own: sees to it that those who sleep are not forgotten.
    #[inline]
    fn pass_on(&mut self, left: bool, seats: &[Seat], calls: &mut Vec<usize>) {
        let roused = (left || self.watch.is_none()) && self.rouse_one(seats, calls);
        // Whoever was roused takes the queue, and then keeps watch itself. Who keeps watch already is disturbed if there is nobody else to
        // take over, or if it would sleep too long.
        if let Some(watch) = self.watch
            && !roused
            && (left || self.due_ns() < watch.until_ns)
        {
            self.watch = None;
            calls.push(watch.seat);
        }
    }

    /// Before the owner sleeps: it keeps watch if nobody does so well enough.
    fn lie_down(&mut self, me: usize, seats: &[Seat], calls: &mut Vec<usize>) -> Turn {
        let due_ns = self.due_ns();
        match self.watch {
            Some(watch) if watch.until_ns <= due_ns => {
                self.members[me].parked = true;
                self.parked += 1;
                seats[me].parked.store(true, Ordering::Relaxed);
                Turn::Park
            }
            other => {
                calls.extend(other.map(|watch| watch.seat));
                self.watch = Some(Watch { seat: me, until_ns: due_ns });
                Turn::Watch(due_ns)
            }
        }
    }

    /// The owner is awake, whatever was announced or written down before.
    fn get_up(&mut self, me: usize, seats: &[Seat]) {
        if self.watch.is_some_and(|watch| watch.seat == me) {
            self.watch = None;
        }
        if std::mem::take(&mut self.members[me].parked) {
            self.parked -= 1;
        }
        seats[me].parked.store(false, Ordering::Relaxed);
    }

    /// When somebody must look after the queue although nothing may have come.
    fn due_ns(&self) -> u64 {
        let tick_ns = self.ticked_ns + TICK_NS;
        self.hw.deadline_ns::<Cx>().map_or(tick_ns, |due_ns| due_ns.min(tick_ns))
    }
}

impl<D, Cx> Drop for SwQueue<D, Cx> {
    fn drop(&mut self) {
        if self.yard.baton.is_broken() {
            // They find out as they look again.
            for seat in &self.yard.seats {
                seat.parked.store(false, Ordering::Release);
                seat.bed.wake();
            }
        }
        assert!(self.held == 0 || std::thread::panicking(), "a thread left its queue with {} bios out", self.held);
    }
}

impl<D, Cx> std::fmt::Debug for SwQueue<D, Cx> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SwQueue")
            .field("device", &self.yard.info.name)
            .field("seat", &self.seat)
            .field("held", &self.held)
            .field("places", &self.places.len())
            .finish_non_exhaustive()
    }
}
