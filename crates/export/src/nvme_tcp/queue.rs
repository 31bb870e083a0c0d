//! The session of one I/O queue: a connection behind the core's queue interface.
//!
//! The queue itself is [`TcpIoQueue`]. A running queue belongs to its lane. A stopped queue is in its
//! [`TcpQueueSlot`], with its connection, where the control path changes, continues or ends it.
//!
//! The kick is an edge-triggered epoll instance with the socket: readable after bytes have come, or room for bytes to
//! be sent.
//!
//! Owned by a lane, in a [`QueuePoller`](crate::QueuePoller).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use blkyard_mem::{GATHER_MAX, RegionTable};
use blkyard_mq::{Bio, SignalEventfd};
use blkyard_nvme::NextBio;
use blkyard_nvme::tcp::{SendList, TcpEnd, TcpIoQueue};
use blkyard_sys::{Epoll, EventFd, EventFlags, Registered};

use super::TRANSFER_BYTES;
use super::clock::ControllerClock;
use super::directory::HostHold;
use super::socket::{Arrived, BufferedSocket};
use crate::core::{BioFeed, ExportLog, QueueSession, QueueSignals, RingView};

/// Bios filled in and commands refused in one round, at most: a full queue, whose answers leave in one call.
const ROUND_MAX: usize = 128;
/// Pieces of a list: 128 reads of a segment each, with their headers, and room for one more. One call sends them.
const PIECES_MAX: usize = 2 * 128 + SendList::PIECES_MIN;
const _: () = assert!(PIECES_MAX <= GATHER_MAX);

/// Notes of running queues for the control path.
#[derive(Debug)]
pub(crate) struct EndedQueues {
    /// Which client queues have a connection that has ended.
    flags: Box<[AtomicBool]>,
    eventfd: EventFd,
}

impl EndedQueues {
    /// Of so many client queues.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub(crate) fn new(queues: usize) -> io::Result<EndedQueues> {
        let flags = (0..queues).map(|_| AtomicBool::new(false)).collect();
        Ok(EndedQueues { flags, eventfd: EventFd::new()? })
    }

    /// Takes the numbers of the queues whose connections have ended.
    pub(crate) fn take(&self) -> Vec<usize> {
        // Cleared before the flags are read: a later one signals again.
        self.eventfd.take();
        let ended = self.flags.iter().enumerate().filter(|(_, flag)| flag.swap(false, Relaxed));
        ended.map(|(number, _)| number).collect()
    }

    /// The queue of this number is another one from now on.
    pub(crate) fn forget(&self, number: usize) {
        self.flags.iter().skip(number).take(1).for_each(|flag| flag.store(false, Relaxed));
    }

    #[cold]
    fn push(&self, number: usize) {
        if let Some(flag) = self.flags.get(number) {
            flag.store(true, Relaxed);
            self.eventfd.signal();
        }
    }
}

impl AsFd for EndedQueues {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

/// An I/O queue with its connection.
#[derive(Debug)]
pub(crate) struct TcpQueueState {
    /// In the set that is the kick.
    socket: Registered<BufferedSocket>,
    kick: Epoll,
    pub(crate) queue: TcpIoQueue,
    list: SendList,
    /// Number of the list that is being sent, and how many of its bytes the kernel has taken.
    sending: Option<(u64, usize)>,
    /// Whether the kernel did not take all at the last attempt: once it has room, the kick is signalled.
    is_full: bool,
    /// Whether the connection has ended, and all that was to be sent is sent.
    is_over: bool,
}

impl TcpQueueState {
    /// A queue whose Connect is accepted.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub(crate) fn new(mut socket: BufferedSocket, queue: TcpIoQueue) -> io::Result<TcpQueueState> {
        socket.reserve();
        let kick = Epoll::new()?;
        let socket = kick.register(socket, 0, EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET)?;
        let list = SendList::new(PIECES_MAX);
        Ok(TcpQueueState { socket, kick, queue, list, sending: None, is_full: false, is_over: false })
    }

    /// The connection of a queue that has ended, and the reason.
    pub(crate) fn into_socket(self) -> (BufferedSocket, Option<TcpEnd>) {
        let end = self.queue.end_reason();
        (self.socket.into_inner(), end)
    }
}

/// Storage of an I/O queue without a running session.
pub(crate) type TcpQueueSlot = Arc<Mutex<Option<Box<TcpQueueState>>>>;

/// Setup of an I/O queue session.
pub struct NvmeTcpQueueSetup {
    /// For messages: the queue's number in its export.
    pub(crate) name: String,
    pub(crate) number: usize,
    pub(crate) log: Arc<ExportLog>,
    pub(crate) slot: TcpQueueSlot,
    /// The regions that bios point into.
    pub(crate) table: Arc<RegionTable>,
    pub(crate) ended: Arc<EndedQueues>,
    /// The clock of the controllers.
    pub(crate) clock: ControllerClock,
    /// Where the queue notes the devices that have its commands, once its association has ended.
    pub(crate) devices: Arc<AtomicU64>,
    /// What its host has to wait for.
    pub(crate) hold: Arc<HostHold>,
}

/// A running I/O queue.
pub struct NvmeTcpQueueSession {
    name: String,
    number: usize,
    log: Arc<ExportLog>,
    /// Slot to return the queue to when it stops.
    slot: TcpQueueSlot,
    state: Box<TcpQueueState>,
    table: Arc<RegionTable>,
    ended: Arc<EndedQueues>,
    is_broken: bool,
    clock: ControllerClock,
    /// Whether its association has ended, and no command is executed any more.
    has_expired: bool,
    devices: Arc<AtomicU64>,
    hold: Arc<HostHold>,
    /// Devices whose commands it holds back, as bits modulo 64.
    held: u64,
}

impl QueueSession for NvmeTcpQueueSession {
    type Setup = NvmeTcpQueueSetup;
    type Identity = ();
    /// The command's slot.
    type Pending = u16;
    type Base = ();
    type Refusals = ();

    /// Initial segment capacity: the pages of the longest transfer.
    const SEGMENTS: usize = TRANSFER_BYTES as usize / 4096 + 1;

    fn start(setup: NvmeTcpQueueSetup) -> Result<NvmeTcpQueueSession, String> {
        let NvmeTcpQueueSetup { name, number, log, slot, table, ended, clock, devices, hold } = setup;
        // All of them, as far as is known.
        devices.store(u64::MAX, Relaxed);
        let state = slot.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or("the queue is not there")?;
        Ok(NvmeTcpQueueSession {
            name,
            number,
            log,
            slot,
            state,
            table,
            ended,
            is_broken: false,
            clock,
            has_expired: false,
            devices,
            hold,
            held: 0,
        })
    }

    /// Bytes may have come while the queue was stopped, and the answer to Connect is to be sent.
    fn begin<Cx: ?Sized + SignalEventfd>(&mut self, signals: &mut QueueSignals<'_, Cx>) {
        self.publish(signals);
    }

    fn memory(&self) -> &Arc<RegionTable> {
        &self.table
    }

    fn kick(&self) -> Option<BorrowedFd<'_>> {
        Some(self.state.kick.as_fd())
    }

    fn lose_kick(&mut self, error: &io::Error) {
        self.log.warn(format_args!("{}: the connection cannot be polled and is closed: {error}", self.name));
        self.close();
    }

    fn set_call<Cx: ?Sized + SignalEventfd>(
        &mut self,
        _call: Option<Arc<EventFd>>,
        _signals: &mut QueueSignals<'_, Cx>,
    ) {
    }

    #[inline(always)]
    fn is_broken(&self) -> bool {
        self.is_broken
    }

    #[cold]
    fn stop(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_broken, true) {
            self.log.warn(format_args!("{}: stopped: {why}", self.name));
            self.close();
        }
    }

    /// The memory is ours.
    fn is_lost(&self) -> bool {
        false
    }

    /// Zero: commands that were received stay in the queue.
    fn left(&self) -> usize {
        0
    }

    #[inline(always)]
    fn round_max(&self) -> usize {
        ROUND_MAX
    }

    fn resume(&mut self) {}

    #[inline]
    fn fetch<D>(&mut self, feed: &mut BioFeed<'_, D, Self>, most: usize, _device_idle: bool) -> bool {
        let state = &mut *self.state;
        // A queue that is to drain receives nothing more.
        let mut is_busy = most > 0 && !state.is_over && state.receive();
        if is_past(&self.clock, state.queue.serves_until_ns()) {
            self.expire(feed);
            return false;
        }
        if state.is_over {
            return false;
        }
        let held = self.hold.devices();
        if held | self.held > 0 {
            state.queue.hold(held);
            self.held = held;
        }
        for _ in 0..most {
            if !state.queue.has_ready() {
                break;
            }
            let Some(mut bio) = feed.take() else { break };
            match state.queue.fetch(&mut bio) {
                NextBio::Bio(slot) => feed.submit(bio, slot),
                NextBio::Without => feed.put_back(bio),
                NextBio::Unavailable => {
                    feed.put_back(bio);
                    break;
                }
            }
            is_busy = true;
        }
        is_busy
    }

    #[inline]
    fn end(&mut self, bio: &Bio, slot: u16) {
        self.state.queue.end(slot, bio.status);
    }

    #[inline]
    fn publish<Cx: ?Sized + SignalEventfd>(&mut self, _signals: &mut QueueSignals<'_, Cx>) {
        self.state.send();
    }

    #[inline]
    fn end_round<Cx: ?Sized + SignalEventfd>(&mut self, _signals: &mut QueueSignals<'_, Cx>) -> bool {
        let state = &mut *self.state;
        if state.is_over {
            self.devices.store(state.queue.devices_out(), Relaxed);
            return false;
        }
        // Commands that came when the lane looked before its sleep (`arm`) are answered here: no bio makes a round
        // busy.
        let is_sent = state.has_answers() && state.send();
        let is_ended = state.queue.end_reason().is_some();
        if is_ended {
            self.devices.store(state.queue.devices_out(), Relaxed);
            if !state.has_answers() {
                state.is_over = true;
                self.ended.push(self.number);
            }
        }
        is_sent
    }

    /// Bytes that come later signal the kick, and so does room for bytes in a full socket.
    fn arm(&mut self) -> bool {
        let state = &mut *self.state;
        !state.is_over && (state.queue.has_ready() || state.has_news() || state.receive())
    }

    fn disarm(&mut self) {}

    fn rest<Cx: ?Sized + SignalEventfd>(mut self, _signals: &mut QueueSignals<'_, Cx>) {
        self.state.send();
        *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.state);
    }

    fn view(&self) -> RingView {
        RingView {
            size: self.state.queue.entries(),
            next: 0,
            in_flight: self.state.queue.in_flight() as u16,
            is_recorded: false,
            is_broken: self.is_broken,
        }
    }
}

impl NvmeTcpQueueSession {
    /// Ends the queue, whose association has ended. No command begins, and those that no device has are taken back.
    #[cold]
    fn expire<D>(&mut self, feed: &mut BioFeed<'_, D, Self>) {
        if !std::mem::replace(&mut self.has_expired, true) {
            self.close();
            feed.cancel(usize::MAX, |_| true);
        }
    }

    #[cold]
    fn close(&mut self) {
        self.state.queue.abandon(TcpEnd::Closed);
        self.ended.push(self.number);
    }
}

/// Whether the controllers' clock is past the time until which a queue is served. The control path may learn later that
/// an association has ended: after a process was stopped, its lanes may run first.
///
/// The time of the lane's round does not do: the process may have been stopped since, and what was received then is of
/// an association that ended meanwhile. Called after the bytes were read, so that only a stop between this and the
/// device's system call is not noticed, and that only with commands from before it.
#[inline]
fn is_past(clock: &ControllerClock, until_ns: u64) -> bool {
    // An association without a keep-alive timer costs no reading of the clock.
    until_ns < u64::MAX && clock.now_ns() >= until_ns
}

impl TcpQueueState {
    /// Receives and handles bytes. Returns whether there were any. The rest of them waits for a slot.
    fn receive(&mut self) -> bool {
        let TcpQueueState { socket, queue, .. } = self;
        match socket.get_mut().receive(usize::MAX) {
            Arrived::Bytes => {
                let mut bytes = socket.get().unread();
                let before = bytes.len();
                queue.receive(&mut bytes);
                let left = bytes.len();
                socket.get_mut().keep(left);
                left < before
            }
            Arrived::Nothing => false,
            Arrived::End => {
                if queue.end_reason().is_some() {
                    return false;
                }
                queue.abandon(TcpEnd::Closed);
                true
            }
        }
    }

    /// Whether the next round sends answers, or reports the end of the connection. A lane may look for work twice
    /// before that round: to park the queue, and to sleep. What the first look received is not lost at the second.
    fn has_news(&self) -> bool {
        !self.is_full && (self.queue.wants_send() || self.queue.end_reason().is_some())
    }

    /// Whether something is to be sent.
    fn has_answers(&self) -> bool {
        self.queue.wants_send() || self.sending.is_some() || self.socket.get().is_sending()
    }

    /// Makes all that a stopped queue has to send into bytes, which its socket keeps: its commands and their memory are
    /// then released.
    pub(crate) fn collect(&mut self) {
        let TcpQueueState { socket, queue, list, sending, .. } = self;
        loop {
            let Some((number, sent)) = sending.take().or_else(|| Some((queue.fill(list)?, 0))) else { return };
            socket.get_mut().add_rest(list, &queue.memory().table, sent);
            queue.sent(number);
            list.clear();
            queue.receive(&mut &[][..]);
        }
    }

    /// The connection.
    pub(crate) fn socket(&self) -> &BufferedSocket {
        self.socket.get()
    }

    /// Sends answers, as far as the kernel takes them. Returns whether it took anything.
    fn send(&mut self) -> bool {
        let TcpQueueState { socket, queue, list, sending, is_full, .. } = self;
        let mut is_moved = false;
        *is_full = true;
        if socket.get().is_sending() {
            // Left of a handover.
            is_moved = socket.get_mut().flush();
            if socket.get().is_sending() {
                return is_moved;
            }
        }
        loop {
            if sending.is_none() {
                *sending = queue.fill(list).map(|number| (number, 0));
            }
            let Some((number, sent)) = sending else {
                *is_full = socket.get().is_sending();
                return is_moved;
            };
            let taken = socket.get_mut().send_list(list, &queue.memory().table, *sent);
            *sent += taken;
            is_moved |= taken > 0;
            if *sent < list.total() {
                return is_moved;
            }
            queue.sent(*number);
            list.clear();
            *sending = None;
            // Slots and memory are free again.
            queue.receive(&mut &[][..]);
        }
    }
}

#[cfg(test)]
mod tests;
