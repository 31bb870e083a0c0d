//! A hardware queue and the virtqueues that feed it, as a poller of a lane.
//!
//! A round returns what the device finished, fetches what the guest published (half of it, if the device has
//! nothing), and passes it on: for each virtqueue one used index and at most one call. The time is that of the lane's
//! turn. A chain is fetched only while a bio is free to carry it. The guest's mistakes end in an error status, or
//! stop this virtqueue with a counted reason; they reach nobody else.
//!
//! Several virtqueues of an export may share a hardware queue ([`members`]). They feed it in turn by plain
//! calls, and each has its own state ([`virtqueue`]) and counters. One can leave for the hardware queue of another lane
//! while the others go on.
//!
//! Owned by its lane. What the control path wants comes as commands (see [`crate::vhost_user::remote`]). A queue that moves to
//! another lane comes to rest first and takes its sessions along: a connected front-end notices a pause only.

mod members;
mod virtqueue;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mq::{Driver, HwQueue, Poller, PollerState, RegionTable, SignalEventfd, Wake};
use blkyard_virtio::SerialId;

pub use self::members::DetachedVirtqueue;
pub(crate) use self::virtqueue::GuestQueue;
use self::virtqueue::virtqueue_of;
use crate::vhost_user::kicks::KickSet;
use crate::vhost_user::remote::{Command, QueuePort};

/// How often a queue without a kick descriptor looks for work by itself.
const POLL_NS: u64 = 200_000;

/// A hardware queue and its virtqueues.
pub struct VhostQueue<D> {
    hw: HwQueue<D>,
    /// At least one, but for the moment after the last one left.
    virtqueues: Vec<GuestQueue>,
    /// Index in `virtqueues`, by the number of a virtqueue.
    positions: Vec<u8>,
    /// The kicks of all virtqueues, if there are several or were.
    kicks: Option<KickSet>,
    /// Wakes its lane.
    waker: Option<Arc<dyn Wake>>,
    /// The virtqueue that feeds the hardware queue first in the next round.
    first: usize,
    now_ns: u64,
}

/// What each virtqueue of a hardware queue may use of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtqueueShare {
    /// Bios it has.
    pub bios: usize,
    /// Requests in flight, at most. Virtqueues that share a hardware queue have the sum together; where its scheduler
    /// orders, the device sees no more than from one.
    pub depth: usize,
}

impl<D> VhostQueue<D> {
    /// A virtqueue with a hardware queue of its own, on its lane, stopped.
    pub fn new(hw: HwQueue<D>, serial: SerialId, port: QueuePort) -> VhostQueue<D> {
        let share = VirtqueueShare { bios: hw.room(), depth: hw.depth() };
        VhostQueue::of(hw, vec![GuestQueue::new(0, serial, port, share)], None)
    }

    fn of(hw: HwQueue<D>, virtqueues: Vec<GuestQueue>, kicks: Option<KickSet>) -> VhostQueue<D> {
        let mut queue = VhostQueue { hw, virtqueues, positions: Vec::new(), kicks, waker: None, first: 0, now_ns: 0 };
        queue.members_changed();
        queue
    }

    /// Does what the control path asks of a virtqueue. What concerns the hardware queue is asked of all virtqueues of
    /// an export alike, and done once.
    #[cold]
    fn read_mail<Cx: ?Sized + SignalEventfd>(&mut self, index: usize, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        let is_first = index == 0;
        for command in self.virtqueues[index].port.shared.mailbox.take() {
            match command {
                Command::Adopt(virtqueue, adopted) => {
                    self.adopt(*virtqueue, cx);
                    let _ = adopted.send(());
                }
                Command::Depth(depth, answer) => {
                    let depth = self.virtqueues[index].set_depth(depth);
                    self.set_depth(self.hw.scheduler().orders());
                    let _ = answer.send(depth);
                }
                Command::Schedule(config, answer) => {
                    if is_first {
                        // A scheduler is made for the depth there is.
                        self.set_depth(config.orders());
                        self.hw.schedule(0, config);
                    }
                    let _ = answer.send(());
                }
                Command::Rates(limits, answer) => {
                    if is_first {
                        self.hw.set_rates(0, limits);
                    }
                    let _ = answer.send(());
                }
                Command::Look(answer) => {
                    let _ = answer.send(self.virtqueues[index].view(&self.hw, is_first, self.now_ns));
                }
                command => {
                    let shares = others_run(&self.virtqueues, index);
                    self.virtqueues[index].obey(&mut self.hw, self.kicks.as_ref(), cx, shares, command);
                }
            }
        }
    }
}

/// Whether another virtqueue than this runs.
fn others_run(virtqueues: &[GuestQueue], index: usize) -> bool {
    virtqueues.iter().enumerate().any(|(other, virtqueue)| other != index && virtqueue.session.is_some())
}

/// One round of a hardware queue, fed by these virtqueues, the one at `first` first. Inlined twice: for a lone
/// virtqueue, whose slice the compiler knows to be of one, it is a round without loops.
#[inline(always)]
fn round<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
    hw: &mut HwQueue<D>,
    virtqueues: &mut [GuestQueue],
    positions: &[u8],
    kicks: Option<&KickSet>,
    first: usize,
    cx: &mut Cx,
    now_ns: u64,
) -> PollerState {
    let (mut stopping, mut running) = (false, false);
    for virtqueue in virtqueues.iter_mut() {
        stopping |= virtqueue.is_stopping();
        if virtqueue.session.is_some() {
            running = true;
        } else {
            virtqueue.answer_at_rest();
        }
    }
    if stopping != hw.is_in_hurry() {
        hw.set_hurry(stopping);
    }
    if !running {
        return PollerState::Idle;
    }
    let mut busy = false;
    if !hw.is_idle() {
        virtqueues.iter_mut().for_each(GuestQueue::resume);
        busy |= hw.reap(cx, now_ns, &mut |bio| match &mut *virtqueues {
            [only] => only.end(bio),
            several => several[usize::from(positions[virtqueue_of(bio.cookie)])].end(bio),
        }) > 0;
    }
    let device_idle = hw.is_idle();
    for step in 0..virtqueues.len() {
        let index = first + step;
        let index = if index < virtqueues.len() { index } else { index - virtqueues.len() };
        busy = virtqueues[index].feed(hw, cx, device_idle, busy);
    }
    busy |= hw.issue(cx, now_ns) > 0;
    for index in 0..virtqueues.len() {
        let (before, rest) = virtqueues.split_at_mut(index);
        let Some((virtqueue, after)) = rest.split_first_mut() else { break };
        let shares = || before.iter().chain(&*after).any(|other| other.session.is_some());
        busy |= virtqueue.end_round(hw, kicks, cx, shares);
    }
    match (busy || hw.has_work(), hw.is_idle()) {
        (true, _) => PollerState::Busy,
        (false, false) => PollerState::Waiting,
        (false, true) => PollerState::Idle,
    }
}

/// A round of several virtqueues. Who comes first is another one each time: what a round may take is used up by those
/// before.
#[inline(never)]
fn shared_round<Cx: ?Sized + SignalEventfd, D: Driver<Cx>>(
    queue: &mut VhostQueue<D>,
    cx: &mut Cx,
    now_ns: u64,
) -> PollerState {
    let first = queue.first;
    queue.first = if first + 1 < queue.virtqueues.len() { first + 1 } else { 0 };
    let VhostQueue { hw, virtqueues, positions, kicks, .. } = queue;
    round(hw, virtqueues, positions, kicks.as_ref(), first, cx, now_ns)
}

impl<Cx: ?Sized + SignalEventfd, D: Driver<Cx>> Poller<Cx> for VhostQueue<D> {
    fn enter(&mut self, cx: &mut Cx, waker: &Arc<dyn Wake>) {
        let running = self.virtqueues.iter().find_map(|virtqueue| virtqueue.session.as_ref());
        if let Some(session) = running {
            self.hw.set_memory(cx, Arc::clone(session.memory.table()));
        }
        self.waker = Some(Arc::clone(waker));
        for virtqueue in &mut self.virtqueues {
            virtqueue.set_leaving(false);
            // Before the first run, which looks for mail.
            virtqueue.port.shared.waker.register(waker);
        }
    }

    fn leave(&mut self, cx: &mut Cx) -> bool {
        self.virtqueues.iter_mut().for_each(|virtqueue| virtqueue.set_leaving(true));
        if !self.hw.is_idle() {
            return false;
        }
        self.virtqueues.iter_mut().for_each(|virtqueue| virtqueue.leave(cx));
        self.hw.set_memory(cx, Arc::new(RegionTable::default()));
        true
    }

    fn stay(&mut self) {
        self.virtqueues.iter_mut().for_each(|virtqueue| virtqueue.set_leaving(false));
    }

    fn set_turn_bytes(&mut self, bytes: u64) {
        self.hw.set_turn_bytes(bytes);
    }

    fn run_once(&mut self, cx: &mut Cx, now_ns: u64) -> PollerState {
        self.now_ns = now_ns;
        let mut had_mail = false;
        for index in 0..self.virtqueues.len() {
            if self.virtqueues[index].port.shared.mailbox.is_pending() {
                had_mail = true;
                self.read_mail(index, cx);
            }
        }
        let state = match &mut self.virtqueues[..] {
            [only] => {
                let kicks = self.kicks.as_ref();
                round(&mut self.hw, std::slice::from_mut(only), &[], kicks, 0, cx, now_ns)
            }
            _ => shared_round(self, cx, now_ns),
        };
        if had_mail || self.hw.is_in_hurry() { state.max(self.end_slow_round(had_mail, cx)) } else { state }
    }

    fn arm(&mut self) -> bool {
        let room = self.hw.room();
        // Each is armed, even after one has work.
        let work = self.virtqueues.iter_mut().fold(false, |work, virtqueue| virtqueue.arm(room) | work);
        let finished = self.hw.arm::<Cx>();
        work || finished || self.virtqueues.iter().any(|virtqueue| virtqueue.port.shared.mailbox.is_pending())
    }

    fn disarm(&mut self) {
        self.virtqueues.iter_mut().for_each(GuestQueue::disarm);
        self.hw.disarm::<Cx>();
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        match (&self.kicks, &self.virtqueues[..]) {
            (Some(kicks), _) => Some(kicks.as_fd()),
            (None, [only]) => only.kick(),
            (None, _) => None,
        }
    }

    fn device_eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.hw.eventfd::<Cx>()
    }

    fn deadline_ns(&self) -> Option<u64> {
        let poll = self.virtqueues.iter().any(GuestQueue::is_polled).then_some(self.now_ns + POLL_NS);
        [self.hw.deadline_ns(), poll].into_iter().flatten().min()
    }

    fn tick(&mut self, now_ns: u64) {
        self.hw.mark_slow(now_ns);
    }

    fn is_over(&self) -> bool {
        self.virtqueues.iter().all(GuestQueue::is_over)
    }
}
