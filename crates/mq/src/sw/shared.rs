//! State shared by the threads of a hardware queue: the queue under its baton, and the submitters.
//!
//! Who holds the baton, who sleeps, and the end of a queue are here; what its holder does with the queue is in
//! [`Core`]; [`SwQueue`](super::SwQueue) is a thread's view.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blkyard_mem::sync::{AtomicBool, Ordering};
use blkyard_mem::{Baton, Holder};

use super::core::Core;
use super::{Context, Ends, Member, PanicNotice, Parker, rings};
use crate::stats::HwStats;
use crate::{DeviceInfo, Driver, HwQueue};

/// Rounds that an owner runs for others before it passes the queue on: 16 rounds of a few batches take about as long as
/// the wake-up of a thread, the cost of passing on.
const ROUNDS_MAX: u32 = 16;
/// Bios from which on a batch is worth waiting for the queue itself to come over, some sixty cache lines once, instead
/// of being carried to it: two lines for each bio, there and back.
const WORTH_A_STAY: usize = 16;
/// Time within which a thread returns with its next batch if the device completes at once. For slower devices no thread
/// is made to wait.
const BACK_NS: u64 = 2_000;
/// How long a thread that is back so soon lets the others have the queue: some hundred batches, for which its lines
/// cross once. They take 0.6 us to come over if the CPUs are near each other, and 2.4 us if they are far apart; this is
/// long against either, and no longer than a wake-up may take.
const HOLD_NS: u64 = 64_000;
/// Limit of clock reads in that time, in case the clock stands still.
const HOLD_READS_MAX: u32 = 8192;
/// Attempts to take the baton after that time; it is released between two batches.
const ATTEMPTS_MAX: u32 = 64;
/// Interval at which a queue is run for a command that has to be repeated.
const REPEAT: Duration = Duration::from_millis(1);
/// Work for the present or next owner of a queue.
pub(super) type OwnerCommand<D, Cx> = Box<dyn FnOnce(&mut HwQueue<D>, &mut Cx) + Send>;

/// A shared hardware queue.
pub(crate) struct SharedHwQueue<D, Cx> {
    /// Empty once the queue is closed.
    baton: Baton<Option<Core<D, Cx>>>,
    /// Slots of the members, and one for the thread that closes the queue, if any.
    pub(super) submitters: Box<[SubmitterSlot]>,
    /// The queue is to accept no more bios. Set before the baton is requested, and so seen by its holder.
    pub(super) closing: AtomicBool,
    /// Commands for the owner, and whether there are any. Posted before the baton is requested, and so seen by its
    /// holder.
    pub(super) commands: Mutex<Vec<OwnerCommand<D, Cx>>>,
    pub(super) has_commands: AtomicBool,
    /// Poll queue: no thread sleeps here.
    polled: bool,
    info: Arc<DeviceInfo>,
    stats: Arc<HwStats>,
}

/// State of a thread that others may read without the baton.
#[repr(align(128))]
pub(super) struct SubmitterSlot {
    /// Set by a thread that wants to be parked, cleared by the owner that wakes it.
    pub(super) parked: AtomicBool,
    /// Set by a thread that has woken up, whatever is recorded; cleared by the owner that has seen it.
    pub(super) up: AtomicBool,
    parker: Arc<dyn Parker>,
    /// Index of our device among those of the parker.
    beside: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// There is something new in the ring.
    Ring,
    /// To see whether anything has come.
    Poll,
    /// No progress is possible before an event.
    Wait,
    /// Something has come elsewhere: we do not sleep here any more.
    Up,
}

/// Result of a request for the baton.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatonOutcome {
    /// It is owned by another.
    Owned,
    /// We run, and put it down.
    Ran,
    /// The same, and now we are parked.
    Park,
    /// The same, and now we keep watch until then.
    Watch(u64),
    /// The queue has been moved.
    Closed,
}

impl<D, Cx> SharedHwQueue<D, Cx> {
    /// Shares an idle hardware queue among members. Each has a parker, with its index for this device; one more is for
    /// the thread that [closes](SharedHwQueue::close) the queue, if any.
    ///
    /// # Panics
    /// If the queue is not idle.
    pub(crate) fn open(
        hw: HwQueue<D>,
        cx: Cx,
        members: Vec<Member>,
        parkers: Vec<(Arc<dyn Parker>, usize)>,
        polled: bool,
    ) -> SharedHwQueue<D, Cx> {
        assert!(hw.is_idle() && hw.room() > 0, "a queue is shared before it is used");
        assert!(parkers.len() >= members.len() && u16::try_from(parkers.len()).is_ok(), "{} submitters", parkers.len());
        let (info, stats) = (Arc::clone(hw.info()), Arc::clone(hw.stats()));
        let core = Core::new(hw, cx, members, parkers.len());
        let submitter = |(parker, beside)| SubmitterSlot {
            parked: AtomicBool::new(false),
            up: AtomicBool::new(false),
            parker,
            beside,
        };
        let submitters = parkers.into_iter().map(submitter).collect();
        let (baton, closing) = (Baton::new(Some(core)), AtomicBool::new(false));
        let (commands, has_commands) = (Mutex::default(), AtomicBool::new(false));
        SharedHwQueue { baton, submitters, closing, commands, has_commands, polled, info, stats }
    }

    pub(crate) fn info(&self) -> &Arc<DeviceInfo> {
        &self.info
    }

    pub(crate) fn stats(&self) -> &Arc<HwStats> {
        &self.stats
    }

    /// Submitters that can be called in one turn.
    pub(crate) fn calls_max(&self) -> usize {
        self.submitters.len() + 1
    }

    #[inline]
    pub(super) fn is_polled(&self) -> bool {
        self.polled
    }

    pub(super) fn parker(&self, submitter: usize) -> &Arc<dyn Parker> {
        &self.submitters[submitter].parker
    }

    /// Announces that the thread will be parked.
    pub(super) fn announce(&self, submitter: usize) {
        self.submitters[submitter].parked.store(true, Ordering::Release);
    }

    /// The thread is not parked any more, and does not keep watch.
    pub(super) fn announce_up(&self, submitter: usize) {
        self.submitters[submitter].parked.store(false, Ordering::Release);
        self.submitters[submitter].up.store(true, Ordering::Release);
    }

    /// Sleeps as prepared.
    pub(super) fn rest(&self, submitter: usize, turn: BatonOutcome) {
        let parker = &self.submitters[submitter].parker;
        match turn {
            // Also until the rings have arrived at the next queue.
            _ if self.polled => parker.give_way(),
            BatonOutcome::Watch(until_ns) => parker.watch_one(self.submitters[submitter].beside, until_ns),
            // Pairs with the store in `Core::wake_sleeper`. Only an owner ends this sleep, and removes us from its
            // record at the same time; so an awake thread never counts as a sleeper.
            BatonOutcome::Owned | BatonOutcome::Park => {
                while self.submitters[submitter].parked.load(Ordering::Acquire) {
                    parker.sleep();
                }
            }
            // The moving thread wakes us when the rings have arrived.
            BatonOutcome::Closed => parker.sleep(),
            BatonOutcome::Ran => {}
        }
    }

    /// Wakes all threads; they find the queue closed and follow their rings.
    pub(crate) fn wake_all(&self) {
        for submitter in &self.submitters {
            submitter.parked.store(false, Ordering::Release);
            submitter.parker.wake();
        }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.baton.is_broken()
    }

    /// Wakes the listed threads.
    #[inline]
    fn call(&self, calls: &mut Vec<usize>) {
        calls.drain(..).for_each(|submitter| self.submitters[submitter].parker.wake());
    }

    /// Releases the baton of a closed queue. Threads that set the pending bit rely on us, and are woken after the
    /// release: earlier they might find us here again, and again.
    #[inline(never)]
    fn leave_closed(&self, mut holder: Holder<'_, Option<Core<D, Cx>>>, me: usize) {
        self.submitters[me].parked.store(false, Ordering::Relaxed);
        let mut pending = holder.take_pending();
        while let Err(still) = holder.give_back() {
            holder = still;
            pending |= holder.take_pending();
        }
        if pending {
            self.wake_all();
        }
    }
}

impl<D: Driver<Cx>, Cx: Context> SharedHwQueue<D, Cx> {
    /// Goes to the baton, and runs the queue if it is free.
    pub(super) fn turn(
        &self,
        me: usize,
        why: Why,
        ends: &mut Ends,
        calls: &mut Vec<usize>,
        clock: &impl Fn() -> u64,
    ) -> BatonOutcome {
        let _notice = PanicNotice(self);
        let taken = match why {
            Why::Poll => self.baton.take_if_idle(),
            Why::Ring => self.take_with(ends, clock),
            Why::Wait | Why::Up => self.baton.take(),
        };
        let Some(mut holder) = taken else { return BatonOutcome::Owned };
        if holder.is_none() {
            if why == Why::Ring {
                ends.publish();
            }
            self.leave_closed(holder, me);
            return BatonOutcome::Closed;
        }
        if matches!(why, Why::Wait | Why::Up) {
            core(&mut holder).unpark(me, self);
        }
        let (mut rounds, mut left) = (0, true);
        let turn = loop {
            // Threads are woken one round later at the latest.
            self.call(calls);
            let pending = holder.take_pending();
            let core = core(&mut holder);
            if pending {
                core.record_sleepers(self, calls);
            }
            let mut may_go_on = rounds < ROUNDS_MAX || (why == Why::Wait && ends.is_empty());
            if may_go_on {
                left = core.round(me, why, ends, clock, self, calls);
                rounds += 1;
                may_go_on = rounds < ROUNDS_MAX || (why == Why::Wait && ends.is_empty());
            } else {
                left |= pending;
            }
            if left && may_go_on {
                continue;
            }
            let sleeps = why == Why::Wait && ends.is_empty();
            if (sleeps || core.is_watched()) && core.arm() {
                left = true;
                if may_go_on {
                    continue;
                }
            }
            if why == Why::Ring {
                // Bios that did not fit: the queue knows that there are more.
                ends.publish();
            }
            let turn = if sleeps {
                core.prepare_park(me, self, calls)
            } else {
                core.pass_on(left, self, calls);
                BatonOutcome::Ran
            };
            match holder.give_back() {
                Ok(()) => break turn,
                Err(still) => {
                    holder = still;
                    if why == Why::Wait {
                        self::core(&mut holder).unpark(me, self);
                    }
                }
            }
        };
        self.call(calls);
        turn
    }

    /// Takes the baton for the submitted bios; or makes them visible and sets the pending bit.
    #[inline]
    fn take_with(&self, ends: &mut Ends, clock: &impl Fn() -> u64) -> Option<Holder<'_, Option<Core<D, Cx>>>> {
        let mut holder = self.baton.take_if_idle();
        if holder.is_none() && ends.plug.len() >= WORTH_A_STAY {
            holder = self.take_after_hold(&mut ends.dispatched_ns, clock);
        }
        holder.or_else(|| {
            ends.publish();
            self.baton.take()
        })
    }

    /// Takes the baton if it is released, after the others' `HOLD_NS`. Time alone counts: a holder that is off its CPU
    /// is not waited for.
    #[inline(never)]
    fn take_after_hold(
        &self,
        dispatched_ns: &mut u64,
        clock: &impl Fn() -> u64,
    ) -> Option<Holder<'_, Option<Core<D, Cx>>>> {
        let start_ns = clock();
        // Counts as a dispatch: otherwise a thread that set the pending bit once would be too late for `HOLD_NS` from
        // then on.
        let last_ns = std::mem::replace(dispatched_ns, start_ns);
        if start_ns.saturating_sub(last_ns) >= BACK_NS {
            return None;
        }
        for _ in 0..HOLD_READS_MAX {
            if clock().saturating_sub(start_ns) >= HOLD_NS {
                break;
            }
            std::hint::spin_loop();
        }
        for _ in 0..ATTEMPTS_MAX {
            let holder = self.baton.take_if_idle();
            if holder.is_some() {
                return holder;
            }
            std::hint::spin_loop();
        }
        *dispatched_ns = clock();
        None
    }

    /// Takes bios from the rings, for threads that may not know their new location yet.
    pub(crate) fn start(&self, calls: &mut Vec<usize>, clock: &impl Fn() -> u64) {
        let (mut nobody, _) = rings(1);
        self.turn(self.submitters.len() - 1, Why::Up, &mut nobody, calls, clock);
    }

    /// Accepts no more bios. The current owner sees it.
    pub(crate) fn freeze(&self, calls: &mut Vec<usize>) {
        // Published by the baton's read-modify-write, like all announcements.
        self.closing.store(true, Ordering::Release);
        self.set_pending(false, calls);
    }

    /// Sets the pending bit for the owner, or acts in its place. If work may be `left`, the owner runs the queue, or a
    /// sleeper is woken that does; if none sleeps, every thread with work is running, and will take it.
    pub(super) fn set_pending(&self, left: bool, calls: &mut Vec<usize>) {
        let _notice = PanicNotice(self);
        let Some(mut holder) = self.baton.take() else { return };
        loop {
            holder.take_pending();
            core(&mut holder).record_sleepers(self, calls);
            core(&mut holder).pass_on(left, self, calls);
            match holder.give_back() {
                Ok(()) => break,
                Err(still) => holder = still,
            }
        }
        self.call(calls);
    }

    /// Has the owner of the queue call this, again and again until it returns true; between two calls the queue runs.
    ///
    /// # Panics
    /// If a thread has panicked in the queue.
    pub(crate) fn obtain<T>(&self, command: &Arc<T>, calls: &mut Vec<usize>, clock: &impl Fn() -> u64)
    where
        T: Fn(&mut HwQueue<D>, &mut Cx) -> bool + Send + Sync + 'static,
    {
        loop {
            let (answer, answered) = sync_channel(1);
            let command = Arc::clone(command);
            let obey = move |hw: &mut HwQueue<D>, cx: &mut Cx| {
                let is_done = command(hw, cx);
                // What it holds is let go of before the caller continues. That one waits.
                drop(command);
                let _ = answer.send(is_done);
            };
            self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(obey));
            // Published by the baton's read-modify-write, like all announcements.
            self.has_commands.store(true, Ordering::Release);
            self.set_pending(true, calls);
            let is_done = loop {
                match answered.recv_timeout(REPEAT) {
                    Ok(is_done) => break is_done,
                    Err(RecvTimeoutError::Timeout) => assert!(!self.is_broken(), "a thread has panicked in the queue"),
                    Err(RecvTimeoutError::Disconnected) => panic!("a command has panicked in the queue"),
                }
            };
            // What the driver has begun continues, whether a thread has I/O or not.
            self.start(calls, clock);
            if is_done {
                return;
            }
            std::thread::sleep(REPEAT);
        }
    }

    /// Waits until a frozen queue is empty, and dismantles it. Returns the members with their rings; queue and context
    /// are dropped.
    pub(crate) fn close(&self, calls: &mut Vec<usize>, clock: &impl Fn() -> u64) -> Vec<Member> {
        let me = self.submitters.len() - 1;
        let (mut nobody, _) = rings(1);
        let _notice = PanicNotice(self);
        loop {
            if !self.polled {
                self.announce(me);
            }
            let Some(mut holder) = self.baton.take() else {
                self.rest(me, BatonOutcome::Owned);
                continue;
            };
            let turn = loop {
                core(&mut holder).unpark(me, self);
                self.call(calls);
                holder.take_pending();
                core(&mut holder).record_sleepers(self, calls);
                if core(&mut holder).is_idle() {
                    let core = holder.take();
                    self.leave_closed(holder, me);
                    self.call(calls);
                    return core.map_or_else(Vec::new, Core::into_members);
                }
                let left = core(&mut holder).round(me, Why::Up, &mut nobody, clock, self, calls);
                if left || core(&mut holder).is_idle() || (!self.polled && core(&mut holder).arm()) {
                    continue;
                }
                let turn =
                    if self.polled { BatonOutcome::Ran } else { core(&mut holder).prepare_park(me, self, calls) };
                match holder.give_back() {
                    Ok(()) => break turn,
                    Err(still) => holder = still,
                }
            };
            self.call(calls);
            self.rest(me, turn);
        }
    }
}

/// The state under the baton of a queue that is not closed.
#[inline]
fn core<'a, D, Cx>(holder: &'a mut Holder<'_, Option<Core<D, Cx>>>) -> &'a mut Core<D, Cx> {
    let Some(core) = holder.as_mut() else { unreachable!("a queue is closed by one thread, and looked at before") };
    core
}
