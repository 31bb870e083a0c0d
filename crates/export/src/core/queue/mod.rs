//! A hardware queue and the client queues that feed it, as a poller of a lane, for any protocol. An export of several
//! devices, the namespaces of a controller, has a hardware queue for each ([`hw_set`]).
//!
//! A round returns completions and publishes them, fetches the clients' requests (half of them, if the device is idle
//! and the protocol paces itself), publishes those that it answered itself, and submits the others. A client queue is
//! called at each of the two publications at most once. The time is that of the lane's turn. A request is fetched only
//! while a bio is free. An invalid request is completed with an error status or stops its queue with a counted reason;
//! other queues are not affected.
//!
//! A client queue is, for instance, a virtqueue: the protocol that implements [`QueueSession`] knows its ring. Several
//! client queues of an export may share a hardware queue ([`members`]). They feed it in turn by plain calls, and each
//! has its own state ([`client`]) and counters. One can move to the hardware queue of another lane while the others
//! continue.
//!
//! Owned by its lane. The control path sends commands (see [`remote`]). A queue that moves to another lane drains first
//! and keeps its sessions: a connected front-end only sees a pause.

mod bios;
mod client;
mod hw_set;
mod kicks;
mod members;
mod pace;
mod protocol;
mod remote;
mod view;

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use blkyard_mq::{Driver, Poller, PollerState, SIGNAL_AGAIN_NS, SignalEventfd, Wake};

use self::bios::member_of;
use self::client::ClientQueue;
pub use self::hw_set::HwQueueSet;
use self::kicks::KickSet;
pub use self::members::DetachedQueue;
pub use self::pace::FetchPace;
pub use self::protocol::{BioFeed, QueueSession, QueueSignals};
use self::remote::ClientCommand;
pub use self::remote::{
    LaneGone, PartError, PendingFlush, QueueHost, QueueMover, QueuePort, QueueRemote, QueueWatch, Suspension,
    on_demand_queue, queue_pair,
};
pub use self::view::{QueueView, RingView};

/// Shortest and longest polling interval of a queue without a kick descriptor. In between it is an eighth of the time
/// since the last work, so a request waits for at most an eighth of the pause before it. Each poll of a sleeping lane
/// takes 20 to 100 us of a CPU, by the load beside it; at the longest interval that is at most 0.5 % of it.
const POLL_NS: RangeInclusive<u64> = 200_000..=20_000_000;

/// A hardware queue for each device of an export, and its members, the client queues that feed them.
pub struct QueuePoller<D, S: QueueSession> {
    hw: HwQueueSet<D>,
    /// At least one, except for a moment after the last one has left.
    members: Vec<ClientQueue<S>>,
    /// Index in `members` by member number.
    positions: Vec<u8>,
    /// The kicks of all members, once there were several.
    kicks: Option<KickSet>,
    /// Wakes its lane.
    waker: Option<Arc<dyn Wake>>,
    /// Index of the member that feeds the hardware queue first in the next round.
    first: usize,
    now_ns: u64,
    /// Time at which the first held member fetches again; `u64::MAX` if none is held.
    held_until_ns: u64,
    /// Time at which clients are signalled again, if that was impossible.
    again_ns: Option<u64>,
    /// Time of the last round with work.
    busy_ns: u64,
}

/// Limits of each client queue of a hardware queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueShare {
    /// Number of bios.
    pub bios: usize,
    /// Maximum requests in flight. Client queues that share a hardware queue have the summed limit together, and each
    /// may use the unused share of the others until a limit is [set](QueueRemote::set_depth). If a scheduler orders,
    /// the device sees no more than the limit of one.
    pub depth: usize,
    /// Devices of the export, each with a hardware queue of its own. The limit of requests is that of each.
    pub devices: usize,
}

impl<D, S: QueueSession> QueuePoller<D, S> {
    /// A client queue with a private hardware queue, on its lane, stopped.
    pub fn new(hw: impl Into<HwQueueSet<D>>, identity: S::Identity, port: QueuePort<S>) -> QueuePoller<D, S> {
        let hw = hw.into();
        let share = QueueShare { bios: hw.room(), depth: hw.depth(), devices: hw.devices() };
        QueuePoller::of(hw, vec![ClientQueue::new(0, identity, port, share)], None)
    }

    fn of(hw: HwQueueSet<D>, members: Vec<ClientQueue<S>>, kicks: Option<KickSet>) -> QueuePoller<D, S> {
        let mut queue = QueuePoller {
            hw,
            members,
            positions: Vec::new(),
            kicks,
            waker: None,
            first: 0,
            now_ns: 0,
            held_until_ns: u64::MAX,
            again_ns: None,
            busy_ns: 0,
        };
        queue.members_changed();
        queue
    }

    /// Executes commands of the control path to a member. Commands for the hardware queue are sent to all client queues
    /// of an export, and executed once.
    #[cold]
    fn read_mail<Cx: ?Sized + SignalEventfd>(&mut self, index: usize, cx: &mut Cx)
    where
        D: Driver<Cx>,
    {
        let is_first = index == 0;
        for command in self.members[index].port.shared.mailbox.take() {
            match command {
                ClientCommand::Adopt(slot, adopted) => {
                    if let Some(queue) = slot.take() {
                        self.adopt(*queue, cx);
                        let _ = adopted.send(());
                    }
                }
                ClientCommand::Depth(depth, answer) => {
                    let depth = self.members[index].set_depth(depth);
                    self.set_depth(None);
                    let _ = answer.send(depth);
                }
                ClientCommand::Schedule(device, config, answer) => {
                    if is_first {
                        // A scheduler is made for the present depth.
                        self.set_depth(Some((device, config.orders())));
                        self.hw.schedule(device, config);
                    }
                    let _ = answer.send(());
                }
                ClientCommand::Rates(device, limits, answer) => {
                    if is_first {
                        self.hw.set_rates(device, limits);
                    }
                    let _ = answer.send(());
                }
                ClientCommand::Look(answer) => {
                    let _ = answer.send(self.members[index].view(&self.hw, is_first, self.now_ns));
                }
                command => {
                    let shares = (others_run(&self.members, index), self.now_ns);
                    self.members[index].obey(&mut self.hw, self.kicks.as_ref(), cx, shares, command);
                    self.end_holds();
                }
            }
        }
    }

    /// Lets the members fetch whose time has come.
    #[cold]
    fn end_holds(&mut self) {
        self.members.iter_mut().for_each(|member| member.end_hold(self.now_ns));
        self.held_until_ns = self.members.iter().filter_map(ClientQueue::held_until_ns).min().unwrap_or(u64::MAX);
    }

    /// Signals clients that could not be signalled once it is time, and then as long as it remains impossible.
    #[cold]
    fn signal_again<Cx: ?Sized + SignalEventfd>(&mut self, cx: &mut Cx) {
        if self.again_ns.take_if(|again_ns| self.now_ns >= *again_ns).is_some() {
            self.members.iter_mut().for_each(|member| member.signal_again(cx));
        }
        let owes = self.members.iter().any(ClientQueue::owes_signals);
        self.again_ns = owes.then(|| self.again_ns.unwrap_or(self.now_ns + SIGNAL_AGAIN_NS));
    }
}

/// Time of the next poll: within this interval, and at a multiple of a power of two, so that a sleeping lane wakes once
/// for all queues with similar intervals.
fn poll_time_ns(now_ns: u64, interval_ns: u64) -> u64 {
    (now_ns + interval_ns) & !((1 << interval_ns.ilog2()) - 1)
}

/// Whether any other member runs.
fn others_run<S: QueueSession>(members: &[ClientQueue<S>], index: usize) -> bool {
    members.iter().enumerate().any(|(other, member)| other != index && member.session.is_some())
}

/// One round of a hardware queue, fed by these members, starting with the one at `first`. Inlined twice: for a single
/// member, whose slice is known to have one element, the round has no loops.
#[inline(always)]
fn round<Cx: ?Sized + SignalEventfd, D: Driver<Cx>, S: QueueSession>(
    hw: &mut HwQueueSet<D>,
    members: &mut [ClientQueue<S>],
    positions: &[u8],
    kicks: Option<&KickSet>,
    first: usize,
    cx: &mut Cx,
    now_ns: u64,
) -> PollerState {
    let (mut stopping, mut running) = (false, false);
    for member in members.iter_mut() {
        stopping |= member.is_draining();
        if member.session.is_none() {
            member.answer_at_rest();
        }
        running |= member.session.is_some() || member.is_flushing();
    }
    if stopping != hw.is_in_hurry() {
        hw.set_hurry(stopping);
    }
    if !running {
        // A driver has messages and events of its connection also without a client; they would keep the lane awake.
        if hw.is_idle() && hw.wants_poll::<Cx>() {
            hw.reap(cx, now_ns, &mut |bio| unreachable!("an idle queue ended {bio:?}"));
        }
        return PollerState::Idle;
    }
    let mut busy = false;
    hw.set_round_spent(false);
    // An idle queue is polled for messages and connections of its driver only (`Driver::wants_poll`).
    if !hw.is_idle() || hw.wants_poll::<Cx>() {
        members.iter_mut().for_each(ClientQueue::resume);
        busy |= hw.reap(cx, now_ns, &mut |bio| match &mut *members {
            [only] => only.end(bio),
            several => several[usize::from(positions[member_of(bio.cookie)])].end(bio),
        }) > 0;
    }
    let device_idle = hw.is_idle();
    // The bios of a drained member exceed the limits at once, and so would bios that others fetch meanwhile.
    let waits = members.len() > 1 && stopping && hw.is_rated();
    for step in 0..members.len() {
        let index = first + step;
        let index = if index < members.len() { index } else { index - members.len() };
        busy = members[index].feed(hw, cx, device_idle, waits, busy);
    }
    busy |= hw.issue(cx, now_ns) > 0;
    for index in 0..members.len() {
        let (before, rest) = members.split_at_mut(index);
        let Some((member, after)) = rest.split_first_mut() else { break };
        let shares = || before.iter().chain(&*after).any(|other| other.session.is_some());
        busy |= member.end_round(hw, kicks, cx, shares);
    }
    match (busy || hw.has_work(), hw.is_idle()) {
        (true, _) => PollerState::Busy,
        (false, false) => PollerState::Waiting,
        (false, true) => PollerState::Idle,
    }
}

/// A round of several members. The first one changes each time, since earlier members may use up the round's bounds.
#[inline(never)]
fn shared_round<Cx: ?Sized + SignalEventfd, D: Driver<Cx>, S: QueueSession>(
    queue: &mut QueuePoller<D, S>,
    cx: &mut Cx,
    now_ns: u64,
) -> PollerState {
    let first = queue.first;
    queue.first = if first + 1 < queue.members.len() { first + 1 } else { 0 };
    let QueuePoller { hw, members, positions, kicks, .. } = queue;
    round(hw, members, positions, kicks.as_ref(), first, cx, now_ns)
}

impl<Cx: ?Sized + SignalEventfd, D: Driver<Cx>, S: QueueSession> Poller<Cx> for QueuePoller<D, S> {
    fn enter(&mut self, cx: &mut Cx, waker: &Arc<dyn Wake>) {
        let running = self.members.iter().filter_map(|member| member.session.as_ref());
        if let Some(newest) = running.max_by_key(|session| session.memory_version()) {
            self.hw.set_memory(cx, newest);
        }
        self.waker = Some(Arc::clone(waker));
        for member in &mut self.members {
            member.set_leaving(false);
            // Before the first run reads commands.
            member.port.shared.waker.register(waker);
        }
    }

    fn leave(&mut self, cx: &mut Cx) -> bool {
        self.members.iter_mut().for_each(|member| member.set_leaving(true));
        if !self.hw.is_idle() {
            return false;
        }
        self.members.iter_mut().for_each(|member| member.leave(cx));
        self.hw.clear_memory(cx);
        true
    }

    fn stay(&mut self) {
        self.members.iter_mut().for_each(|member| member.set_leaving(false));
    }

    fn set_turn_bytes(&mut self, bytes: u64) {
        self.hw.set_turn_bytes(bytes);
    }

    fn run_once(&mut self, cx: &mut Cx, now_ns: u64) -> PollerState {
        self.now_ns = now_ns;
        let mut had_mail = false;
        for index in 0..self.members.len() {
            if self.members[index].port.shared.mailbox.is_pending() {
                had_mail = true;
                self.read_mail(index, cx);
            }
        }
        if now_ns >= self.held_until_ns {
            self.end_holds();
        }
        let state = match &mut self.members[..] {
            [only] => {
                let kicks = self.kicks.as_ref();
                round(&mut self.hw, std::slice::from_mut(only), &[], kicks, 0, cx, now_ns)
            }
            _ => shared_round(self, cx, now_ns),
        };
        if state == PollerState::Busy {
            self.busy_ns = now_ns;
        }
        if self.again_ns.is_some() || self.members.iter().any(ClientQueue::owes_signals) {
            self.signal_again(cx);
        }
        if had_mail || self.hw.is_in_hurry() { state.max(self.end_slow_round(had_mail, cx)) } else { state }
    }

    fn arm(&mut self) -> bool {
        let room = self.hw.room();
        let waits = self.hw.is_rated() && self.members.iter().any(ClientQueue::is_draining);
        // Each member is armed, even if an earlier one has work.
        let work = self.members.iter_mut().fold(false, |work, member| member.arm(room, waits) | work);
        let finished = self.hw.arm::<Cx>();
        work || finished || self.members.iter().any(|member| member.port.shared.mailbox.is_pending())
    }

    fn disarm(&mut self) {
        self.members.iter_mut().for_each(ClientQueue::disarm);
        self.hw.disarm::<Cx>();
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        match (&self.kicks, &self.members[..]) {
            (Some(kicks), _) => Some(kicks.as_fd()),
            (None, [only]) => only.kick(),
            (None, _) => None,
        }
    }

    fn device_eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.hw.eventfd::<Cx>()
    }

    fn deadline_ns(&self) -> Option<u64> {
        let poll = self.members.iter().any(ClientQueue::is_polled).then(|| {
            let idle_ns = self.now_ns.saturating_sub(self.busy_ns);
            poll_time_ns(self.now_ns, (idle_ns / 8).clamp(*POLL_NS.start(), *POLL_NS.end()))
        });
        let held = Some(self.held_until_ns).filter(|until_ns| *until_ns < u64::MAX);
        [self.hw.deadline_ns::<Cx>(), poll, held, self.again_ns].into_iter().flatten().min()
    }

    fn served(&self) -> u64 {
        let stats = self.members.iter().flat_map(ClientQueue::stats);
        stats.fold(0, |sum, stats| sum.wrapping_add(stats.ios()))
    }

    fn tick(&mut self, now_ns: u64) {
        self.hw.mark_slow(now_ns);
    }

    fn is_over(&self) -> bool {
        self.members.iter().all(ClientQueue::is_over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_with_similar_intervals_are_polled_at_the_same_times() {
        for interval_ns in [1, 200_000, 3_333_333, 10_000_000] {
            let mut times = std::collections::BTreeSet::new();
            for now_ns in (0..20).map(|step| 5_000_000_000 + step * interval_ns / 20) {
                let next_ns = poll_time_ns(now_ns, interval_ns);
                assert!(now_ns < next_ns && next_ns <= now_ns + interval_ns, "{now_ns} {interval_ns}");
                times.insert(next_ns);
            }
            assert!(times.len() <= 3, "{interval_ns}: {times:?}");
        }
    }
}
