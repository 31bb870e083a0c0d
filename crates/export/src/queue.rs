//! A hardware queue and the virtqueues that feed it, as a poller of a lane.
//!
//! A round gives back what the device finished, fetches what the guest published (half of it, if the device has
//! nothing), and passes it on: one look at the clock, and for each virtqueue one used index and at most one call.
//! A chain is fetched only while a bio is at hand to carry it. The guest's mistakes end in an error status, or
//! stop this virtqueue with a counted reason; they reach nobody else.
//!
//! Most hardware queues serve one virtqueue. Several share one where their order matters to the device
//! ([`VhostQueue::shared`]): a scheduler then sees all of them. They feed it in turn by plain calls, and each has its
//! own state ([`virtqueue`]).
//!
//! Owned by its lane. What the control path wants comes as commands (see [`crate::remote`]). A queue that moves to
//! another lane comes to rest first and takes its sessions along: a connected front-end notices a pause only.

mod virtqueue;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mq::{Driver, HwQueue, Poller, PollerState, RegionTable, SignalEventfd, Wake};
use blkyard_virtio::SerialId;

use self::virtqueue::{GuestQueue, virtqueue_of};
use crate::kicks::KickSet;
use crate::remote::{QueuePort, SharedQueuePort};

/// How often a queue without a kick descriptor looks for work by itself.
const POLL_NS: u64 = 200_000;

/// A hardware queue and its virtqueues.
pub struct VhostQueue<D> {
    hw: HwQueue<D>,
    /// At least one.
    virtqueues: Vec<GuestQueue>,
    /// The kicks of all virtqueues, if there are several.
    kicks: Option<KickSet>,
    /// The virtqueue that feeds the hardware queue first in the next round.
    first: usize,
    now_ns: u64,
}

impl<D> VhostQueue<D> {
    /// A virtqueue with a hardware queue of its own, on its lane, stopped.
    pub fn new(mut hw: HwQueue<D>, serial: SerialId, port: QueuePort) -> VhostQueue<D> {
        port.count(&mut hw);
        let virtqueue = GuestQueue::new(0, serial, port, hw.room());
        VhostQueue { hw, virtqueues: vec![virtqueue], kicks: None, first: 0, now_ns: 0 }
    }

    /// Virtqueues of one export that share a hardware queue, stopped. Each has an equal part of the bios that the
    /// hardware queue takes. Its counters are those of the first virtqueue.
    pub fn shared(mut hw: HwQueue<D>, serial: SerialId, port: SharedQueuePort) -> VhostQueue<D> {
        let SharedQueuePort { ports, kicks } = port;
        ports[0].count(&mut hw);
        let bios = hw.room() / ports.len();
        let virtqueue = |(number, port)| GuestQueue::new(number, serial, port, bios);
        let virtqueues = ports.into_iter().enumerate().map(virtqueue).collect();
        VhostQueue { hw, virtqueues, kicks, first: 0, now_ns: 0 }
    }

    /// The same, and bios say who submits them, for schedulers: no two virtqueues that share a device's queue have the
    /// same stream.
    #[must_use]
    pub fn with_stream(self, stream: u32) -> VhostQueue<D> {
        self.with_streams([stream])
    }

    /// The same for several virtqueues: a stream for each.
    #[must_use]
    pub fn with_streams(mut self, streams: impl IntoIterator<Item = u32>) -> VhostQueue<D> {
        self.virtqueues.iter_mut().zip(streams).for_each(|(virtqueue, stream)| virtqueue.set_stream(stream));
        self
    }

    /// Does what the control path asks of a virtqueue.
    #[cold]
    fn read_mail<Cx: ?Sized + SignalEventfd>(&mut self, index: usize, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        let shares = others_run(&self.virtqueues, index);
        self.virtqueues[index].read_mail(&mut self.hw, self.kicks.as_ref(), cx, shares, self.now_ns);
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
    kicks: Option<&KickSet>,
    first: usize,
    cx: &mut Cx,
    had_mail: bool,
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
        return if had_mail { PollerState::Busy } else { PollerState::Idle };
    }
    let mut busy = had_mail;
    if !hw.is_idle() {
        virtqueues.iter_mut().for_each(GuestQueue::resume);
        busy |= hw.reap(cx, now_ns, &mut |bio| match &mut *virtqueues {
            [only] => only.end(bio),
            several => several[virtqueue_of(bio.cookie)].end(bio),
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
    had_mail: bool,
    now_ns: u64,
) -> PollerState {
    let first = queue.first;
    queue.first = if first + 1 < queue.virtqueues.len() { first + 1 } else { 0 };
    round(&mut queue.hw, &mut queue.virtqueues, queue.kicks.as_ref(), first, cx, had_mail, now_ns)
}

impl<Cx: ?Sized + SignalEventfd, D: Driver<Cx>> Poller<Cx> for VhostQueue<D> {
    fn enter(&mut self, cx: &mut Cx, waker: &Arc<dyn Wake>) {
        let running = self.virtqueues.iter().find_map(|virtqueue| virtqueue.session.as_ref());
        if let Some(session) = running {
            self.hw.set_memory(cx, Arc::clone(session.memory.table()));
        }
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
        match &mut self.virtqueues[..] {
            [only] => round(&mut self.hw, std::slice::from_mut(only), None, 0, cx, had_mail, now_ns),
            _ => shared_round(self, cx, had_mail, now_ns),
        }
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
