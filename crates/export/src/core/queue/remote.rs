//! The two ends of a client queue: the poller's end on its lane, and the control path's handle.
//!
//! A running queue belongs to its lane. The control path never accesses it: it sends a command, wakes the lane, and
//! waits for the answer. A suspension is answered when all fetched requests have completed.
//!
//! The queue may move to another lane meanwhile with its mailbox: see [`LaneWaker`].
//!
//! A client queue on a lane has bios, tags and tables for a full ring, some hundred KiB. A queue made [on
//! demand](on_demand_queue) has a poller only from the first start of its ring to the end of the session. Its counters
//! continue over sessions.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use blkyard_mem::{Mailbox, OneshotSender, oneshot};
use blkyard_mq::{DeviceInfo, HwStats, LaneWaker, RateLimit, SchedulerConfig, Wake};
use blkyard_sys::EventFd;

use super::DetachedQueue;
use super::client::ClientQueue;
use super::kicks::KickSet;
use super::protocol::QueueSession;
use super::view::QueueView;

/// Commands of the control path to a queue.
pub(super) enum ClientCommand<S: QueueSession> {
    /// Run a session with this setup; the answer is whether the rings are valid.
    Run(Box<S::Setup>, Sender<Result<(), String>>),
    /// Drain, then report the ring position.
    Suspend(Sender<Option<S::Base>>),
    /// Make all completed writes durable, then report the result.
    Flush(Sender<bool>),
    /// Replace the call eventfd.
    Call(Option<Arc<EventFd>>, Sender<()>),
    /// Have the session handle what the control path has left for it.
    Notify,
    /// Signal an eventfd of the front-end.
    Signal(Arc<EventFd>, Sender<()>),
    /// Change the device of this number; the queue is drained.
    Change(u16, Arc<DeviceInfo>, Sender<Result<(), String>>),
    /// Limit the requests in flight, then report the new limit.
    Depth(usize, Sender<usize>),
    /// Set the scheduler of a device, then answer.
    Schedule(u16, SchedulerConfig, Sender<()>),
    /// Set the rate limits of a device, then confirm.
    Rates(u16, Vec<Arc<RateLimit>>, Sender<()>),
    /// Drain, then leave the hardware queue; the answer is the queue.
    Part(OneshotSender<Box<ClientQueue<S>>>),
    /// Cancel `Part`, unless the queue has already left.
    Stay,
    /// Have the hardware queue serve one more client queue, unless that was taken back, then confirm.
    Adopt(Arc<AdoptSlot<S>>, Sender<()>),
    /// Report the state for inspection, without side effects.
    Look(Sender<QueueView>),
    /// Drain, then never run again.
    Retire,
}

/// A detached client queue on its way to a hardware queue. Taken from here by the lane, or taken back by the sender.
pub(super) struct AdoptSlot<S: QueueSession>(Mutex<Option<Box<DetachedQueue<S>>>>);

impl<S: QueueSession> AdoptSlot<S> {
    pub(super) fn take(&self) -> Option<Box<DetachedQueue<S>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Link from the control path to a poller.
pub(super) struct QueueLink<S: QueueSession> {
    /// Read once a round.
    pub(super) mailbox: Mailbox<ClientCommand<S>>,
    /// Wakes the poller's lane.
    pub(super) waker: LaneWaker,
    /// Whether a [`ClientCommand::Notify`] is under way: one is enough, and a client decides how often there is cause.
    is_notified: AtomicBool,
}

impl<S: QueueSession> QueueLink<S> {
    /// A notification is about to be handled: a later one is another.
    pub(super) fn take_notification(&self) {
        self.is_notified.swap(false, AcqRel);
    }
}

/// A queue as seen by the control path, with or without a poller.
struct RemoteState<S: QueueSession> {
    /// Link to its poller; unset without one.
    link: Mutex<Option<Arc<QueueLink<S>>>>,
    counters: Arc<QueueCounters<S::Refusals>>,
}

/// Counters of a queue, including those of its earlier pollers.
struct QueueCounters<R> {
    /// By device.
    stats: OnceLock<Arc<[Arc<HwStats>]>>,
    refusals: OnceLock<Arc<R>>,
}

impl<S: QueueSession> RemoteState<S> {
    fn new() -> Arc<RemoteState<S>> {
        let counters = QueueCounters { stats: OnceLock::new(), refusals: OnceLock::new() };
        Arc::new(RemoteState { link: Mutex::new(None), counters: Arc::new(counters) })
    }

    fn link(&self) -> MutexGuard<'_, Option<Arc<QueueLink<S>>>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lane's end of a new link.
    fn connect(&self) -> QueuePort<S> {
        let shared = Arc::new(QueueLink {
            mailbox: Mailbox::default(),
            waker: LaneWaker::default(),
            is_notified: AtomicBool::new(false),
        });
        *self.link() = Some(Arc::clone(&shared));
        QueuePort { shared, counters: Arc::clone(&self.counters) }
    }
}

/// The lane's end of a queue, from which a [`QueuePoller`](super::QueuePoller) is made.
pub struct QueuePort<S: QueueSession> {
    pub(super) shared: Arc<QueueLink<S>>,
    counters: Arc<QueueCounters<S::Refusals>>,
}

impl<S: QueueSession> QueuePort<S> {
    /// I/O counters of each device, kept for later sessions.
    pub(super) fn stats(&self, devices: usize) -> Arc<[Arc<HwStats>]> {
        Arc::clone(self.counters.stats.get_or_init(|| (0..devices).map(|_| Arc::default()).collect()))
    }

    /// Counters of the client's invalid requests.
    pub(super) fn refusals(&self) -> Arc<S::Refusals> {
        Arc::clone(self.counters.refusals.get_or_init(Arc::default))
    }
}

#[cfg(test)]
impl<S: QueueSession> QueuePort<S> {
    /// Takes the commands as a lane does; their number.
    pub(crate) fn take_all(&self) -> usize {
        self.shared.take_notification();
        self.shared.mailbox.take().len()
    }
}

impl<S: QueueSession> Drop for QueuePort<S> {
    fn drop(&mut self) {
        self.shared.mailbox.close();
    }
}

/// The control path's end. Dropping it retires the queue, which no other thread can do.
pub struct QueueRemote<S: QueueSession> {
    commands: CommandSender<S>,
    /// Maker of the poller; unset if the poller exists from the start.
    on_demand: Option<OnDemand<S>>,
}

/// A handle for inspection, valid as long as the queue exists. Holds no strong reference.
pub struct QueueWatch<S: QueueSession> {
    commands: CommandSender<S>,
}

/// Handle for the placement of client queues on hardware queues. Holds no strong reference.
pub struct QueueMover<S: QueueSession> {
    commands: CommandSender<S>,
}

/// Reason why a client queue has not moved.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// One of its requests is in flight.
    #[error("it was not drained within {0:?}: a request at its device does not complete; try again later")]
    Undrained(Duration),
    /// The lane has ended.
    #[error("the lane of this queue has ended; see the messages above")]
    Gone,
    /// The lane is blocked, for instance by a driver.
    #[error("the lane of this queue did not respond within {0:?}, held up by one of its devices; see blkyard inspect")]
    Unresponsive(Duration),
    /// The system has no descriptor for a set of kicks.
    #[error("its kick cannot be listened to: {0}; raise the limit on open files")]
    Kicks(io::Error),
}

/// Command channel of the queue.
struct CommandSender<S: QueueSession> {
    state: Arc<RemoteState<S>>,
}

impl<S: QueueSession> Clone for CommandSender<S> {
    fn clone(&self) -> CommandSender<S> {
        CommandSender { state: Arc::clone(&self.state) }
    }
}

impl<S: QueueSession> Clone for QueueWatch<S> {
    fn clone(&self) -> QueueWatch<S> {
        QueueWatch { commands: self.commands.clone() }
    }
}

impl<S: QueueSession> Clone for QueueMover<S> {
    fn clone(&self) -> QueueMover<S> {
        QueueMover { commands: self.commands.clone() }
    }
}

/// Opens and closes the poller of a queue made [on demand](on_demand_queue).
pub trait QueueHost<S: QueueSession>: Send + Sync {
    /// Has a hardware queue on some lane serve this queue. Returns once it is served.
    ///
    /// # Errors
    /// The cause, as text: object, cause, cure.
    fn open(&self, port: QueuePort<S>) -> Result<(), String>;

    /// Ends the service of a drained queue.
    fn close(&self);
}

/// An on-demand queue with its host.
struct OnDemand<S: QueueSession> {
    host: Box<dyn QueueHost<S>>,
    queue: Arc<RemoteState<S>>,
    poller: Mutex<PollerPresence>,
}

/// State of the poller, and the settings of the next one.
#[derive(Default)]
struct PollerPresence {
    is_open: bool,
    /// Whether the poller is kept until the queues are dropped.
    is_kept: bool,
    /// Limit of requests in flight, if set.
    depth: Option<usize>,
}

impl<S: QueueSession> OnDemand<S> {
    fn poller(&self) -> MutexGuard<'_, PollerPresence> {
        self.poller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, keep: bool) -> Result<(), String> {
        let mut poller = self.poller();
        poller.is_kept |= keep;
        if poller.is_open {
            return Ok(());
        }
        if let Err(why) = self.host.open(self.queue.connect()) {
            *self.queue.link() = None;
            return Err(why);
        }
        poller.is_open = true;
        if let Some(depth) = poller.depth {
            let commands = CommandSender { state: Arc::clone(&self.queue) };
            commands.ask(|answer| ClientCommand::Depth(depth, answer)).map_err(|gone| gone.to_string())?;
        }
        Ok(())
    }

    fn close(&self) {
        if std::mem::take(&mut self.poller().is_open) {
            // A queue that does not leave its lane has at least ended, and does not delay the end of the lane.
            let link = self.queue.link().take();
            link.iter().for_each(|link| drop(link.send(ClientCommand::Retire)));
            self.host.close();
        }
    }
}

impl<S: QueueSession> Drop for OnDemand<S> {
    fn drop(&mut self) {
        self.close();
    }
}

/// The lane of a queue has ended.
#[derive(Debug, thiserror::Error)]
#[error("the lane of this queue has ended")]
pub struct LaneGone;

/// A pending suspension.
pub struct Suspension<B>(Receiver<Option<B>>);

impl<B> Suspension<B> {
    /// Waits until the queue has drained, or until this time. Returns whether it has; then it is not to be asked again.
    ///
    /// # Errors
    /// Its lane has ended.
    pub fn wait_until(&self, until: Option<Instant>) -> Result<bool, LaneGone> {
        receive_until(&self.0, until).map(|drained| drained.is_some())
    }

    /// Waits until the queue has drained; returns the ring position, if a session ran.
    ///
    /// # Errors
    /// Its lane has ended.
    pub fn wait(self) -> Result<Option<B>, LaneGone> {
        self.0.recv().map_err(|_| LaneGone)
    }
}

/// A pending flush.
pub struct PendingFlush(Receiver<bool>);

impl PendingFlush {
    /// Waits until the writes are durable; true on success.
    ///
    /// # Errors
    /// The lane has ended.
    pub fn wait(self) -> Result<bool, LaneGone> {
        self.0.recv().map_err(|_| LaneGone)
    }

    /// Waits until the writes are durable, or until this time. Returns the result, once.
    ///
    /// # Errors
    /// The lane has ended.
    pub fn wait_until(&self, until: Option<Instant>) -> Result<Option<bool>, LaneGone> {
        receive_until(&self.0, until)
    }
}

/// Waits for an answer of a lane until this time, or without limit.
fn receive_until<T>(answer: &Receiver<T>, until: Option<Instant>) -> Result<Option<T>, LaneGone> {
    let Some(until) = until else { return answer.recv().map(Some).map_err(|_| LaneGone) };
    match answer.recv_timeout(until.saturating_duration_since(Instant::now())) {
        Ok(value) => Ok(Some(value)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(LaneGone),
    }
}

/// Makes both ends of a queue.
pub fn queue_pair<S: QueueSession>() -> (QueueRemote<S>, QueuePort<S>) {
    let state = RemoteState::new();
    let port = state.connect();
    (QueueRemote { commands: CommandSender { state }, on_demand: None }, port)
}

/// Makes the control path's end of a queue that `host` serves from the first start of its ring to a session's end.
pub fn on_demand_queue<S: QueueSession>(host: Box<dyn QueueHost<S>>) -> QueueRemote<S> {
    let queue = RemoteState::new();
    let on_demand = OnDemand { host, queue: Arc::clone(&queue), poller: Mutex::default() };
    QueueRemote { commands: CommandSender { state: queue }, on_demand: Some(on_demand) }
}

impl<S: QueueSession> QueueRemote<S> {
    /// Drains and ends the queue.
    pub fn retire(&self) {
        let _ = self.commands.send(ClientCommand::Retire);
    }

    /// Makes the poller of an on-demand queue now instead of at the first start of the ring.
    ///
    /// # Errors
    /// The cause, as text: object, cause, cure.
    pub fn open(&self) -> Result<(), String> {
        self.on_demand.as_ref().map_or(Ok(()), |on_demand| on_demand.open(false))
    }

    /// The same, but the poller stays when sessions end. For devices with a bounded number of queues.
    ///
    /// # Errors
    /// As for [`QueueRemote::open`].
    pub fn open_for_good(&self) -> Result<(), String> {
        self.on_demand.as_ref().map_or(Ok(()), |on_demand| on_demand.open(true))
    }

    /// Drops the poller of an on-demand queue, unless it is [permanent](QueueRemote::open_for_good). This queue and all
    /// that share the poller must be drained.
    pub fn close(&self) {
        if let Some(on_demand) = self.on_demand.as_ref().filter(|on_demand| !on_demand.poller().is_kept) {
            on_demand.close();
        }
    }

    /// Whether the queue has no poller now. The next poller gets the device and settings of that time.
    fn is_closed(&self) -> bool {
        self.on_demand.as_ref().is_some_and(|on_demand| !on_demand.poller().is_open)
    }

    /// Runs a session; the answer is whether its ring is valid.
    ///
    /// # Errors
    /// Its lane has ended.
    pub fn run(&self, setup: S::Setup) -> Result<Result<(), String>, LaneGone> {
        if let Err(why) = self.open() {
            return Ok(Err(why));
        }
        self.commands.ask(|answer| ClientCommand::Run(Box::new(setup), answer))
    }

    /// The same for a queue with a poller, without a wait: the answer comes once its lane has read the command.
    ///
    /// # Errors
    /// Its lane has ended.
    pub fn begin_run(&self, setup: S::Setup) -> Result<Receiver<Result<(), String>>, LaneGone> {
        let (answer, wait) = channel();
        self.commands.send(ClientCommand::Run(Box::new(setup), answer))?;
        Ok(wait)
    }

    /// Requests suspension. Several queues may be asked before the first is awaited.
    ///
    /// # Errors
    /// Its lane has ended.
    pub fn suspend(&self) -> Result<Suspension<S::Base>, LaneGone> {
        let (answer, wait) = channel();
        self.commands.send(ClientCommand::Suspend(answer))?;
        Ok(Suspension(wait))
    }

    /// Makes durable what this queue has fetched before, and what has completed on others; true on success.
    ///
    /// # Errors
    /// Its lane has ended.
    pub fn flush(&self) -> Result<bool, LaneGone> {
        self.commands.ask(ClientCommand::Flush)
    }

    /// The same without a wait.
    ///
    /// # Errors
    /// Its lane has ended.
    pub fn begin_flush(&self) -> Result<PendingFlush, LaneGone> {
        let (answer, wait) = channel();
        self.commands.send(ClientCommand::Flush(answer))?;
        Ok(PendingFlush(wait))
    }

    /// Changes the device of a drained queue.
    pub(crate) fn change(&self, device: u16, info: &Arc<DeviceInfo>) -> Result<Result<(), String>, LaneGone> {
        if self.is_closed() {
            return Ok(Ok(()));
        }
        self.commands.ask(|answer| ClientCommand::Change(device, Arc::clone(info), answer))
    }

    /// Limits the requests in flight; returns the new limit.
    ///
    /// # Errors
    /// Its lane has ended.
    pub fn set_depth(&self, depth: usize) -> Result<usize, LaneGone> {
        if let Some(on_demand) = &self.on_demand {
            on_demand.poller().depth = Some(depth);
        }
        if self.is_closed() {
            return Ok(depth);
        }
        self.commands.ask(|answer| ClientCommand::Depth(depth, answer))
    }

    /// Replaces the scheduler; waiting bios are kept.
    pub(crate) fn schedule(&self, device: u16, config: SchedulerConfig) -> Result<(), LaneGone> {
        if self.is_closed() {
            return Ok(());
        }
        self.commands.ask(|answer| ClientCommand::Schedule(device, config, answer))
    }

    /// Sets the queue's rate limits.
    pub(crate) fn set_rates(&self, device: u16, limits: Vec<Arc<RateLimit>>) -> Result<(), LaneGone> {
        if self.is_closed() {
            return Ok(());
        }
        self.commands.ask(|answer| ClientCommand::Rates(device, limits, answer))
    }

    /// Replaces the call eventfd. Waits for the answer, like all requests of a front-end; otherwise a front-end that
    /// sends faster than a lane reads could accumulate descriptors without limit.
    ///
    /// # Errors
    /// Its lane has ended.
    pub fn set_call(&self, call: Option<Arc<EventFd>>) -> Result<(), LaneGone> {
        self.commands.ask(|answer| ClientCommand::Call(call, answer))
    }

    /// Has its lane signal an eventfd of the front-end, which may have made that blocking and full: a write of this
    /// thread would wait then. Opens the poller of an on-demand queue. Waits for the answer, as above.
    ///
    /// # Errors
    /// Its lane has ended. The inner error is as for [`QueueRemote::open`].
    pub fn signal(&self, eventfd: &Arc<EventFd>) -> Result<Result<(), String>, LaneGone> {
        if let Err(why) = self.open() {
            return Ok(Err(why));
        }
        self.commands.ask(|answer| ClientCommand::Signal(Arc::clone(eventfd), answer)).map(Ok)
    }

    /// Has a running session handle the requests that its protocol has left for it
    /// ([`QueueSession::notified`]). Without effect on a queue at rest. Waits for nothing.
    ///
    /// # Errors
    /// Its lane has ended.
    pub fn notify(&self) -> Result<(), LaneGone> {
        let link = self.commands.state.link().clone().ok_or(LaneGone)?;
        // What was left before is seen by the lane, which handles it after it has taken the notification.
        if link.is_notified.swap(true, AcqRel) { Ok(()) } else { link.send(ClientCommand::Notify) }
    }

    /// Handle for the placement of client queues on hardware queues.
    pub fn mover(&self) -> QueueMover<S> {
        QueueMover { commands: self.commands.clone() }
    }

    /// A handle for inspection.
    pub fn watch(&self) -> QueueWatch<S> {
        QueueWatch { commands: self.commands.clone() }
    }
}

impl<S: QueueSession> QueueWatch<S> {
    /// Counters of its I/O on each device once it is on a lane; empty before. The first client queue of a hardware
    /// queue also counts queue-wide events, such as the batches of its driver.
    pub fn stats(&self) -> &[Arc<HwStats>] {
        self.commands.state.counters.stats.get().map_or(&[], |stats| stats)
    }

    /// Counters of invalid requests, by reason.
    pub fn refusals(&self) -> Option<&Arc<S::Refusals>> {
        self.commands.state.counters.refusals.get()
    }

    /// Whether the queue has a poller now: an on-demand queue has none while no front-end needs it.
    pub fn is_open(&self) -> bool {
        self.commands.state.link().is_some()
    }

    /// Requests the queue's state from its owner, which answers in its lane's next turn. `None` without a poller, or if
    /// the lane has ended.
    pub fn look(&self) -> Option<Receiver<QueueView>> {
        let (answer, wait) = channel();
        self.commands.send(ClientCommand::Look(answer)).ok()?;
        Some(wait)
    }
}

impl<S: QueueSession> QueueMover<S> {
    /// Detaches the client queue from its hardware queue once its own fetched requests have completed, independent of
    /// other queues there. If that takes longer than `drain`, the queue stays and continues. Its lane must confirm that
    /// within `answer`.
    ///
    /// # Errors
    /// See [`PartError`].
    pub fn part(&self, drain: Duration, answer: Duration) -> Result<DetachedQueue<S>, PartError> {
        // The new hardware queue may need this; a failure is detected before any change.
        let kicks = KickSet::new().map_err(PartError::Kicks)?;
        let (parted, wait) = oneshot();
        self.commands.send(ClientCommand::Part(parted)).map_err(|_| PartError::Gone)?;
        let queue = match wait.recv_timeout(drain) {
            Ok(queue) => queue,
            Err(RecvTimeoutError::Disconnected) => return Err(PartError::Gone),
            Err(RecvTimeoutError::Timeout) => {
                self.commands.send(ClientCommand::Stay).map_err(|_| PartError::Gone)?;
                // The queue may have left at the last moment.
                match wait.recv_timeout(answer) {
                    Ok(queue) => queue,
                    Err(RecvTimeoutError::Disconnected) => return Err(PartError::Undrained(drain)),
                    // From here on the lane keeps the queue.
                    Err(RecvTimeoutError::Timeout) => wait.close().ok_or(PartError::Unresponsive(answer))?,
                }
            }
        };
        Ok(DetachedQueue { queue, kicks })
    }

    /// Has the hardware queue of this client queue serve another client queue of the same export. If its lane does not
    /// read the command within `answer`, that queue is taken back.
    ///
    /// # Errors
    /// The lane has ended together with the other queue; or it does not respond, and the queue is returned.
    pub fn adopt(
        &self,
        detached: DetachedQueue<S>,
        answer: Duration,
    ) -> Result<(), (PartError, Option<DetachedQueue<S>>)> {
        let (adopted, wait) = channel();
        let slot = Arc::new(AdoptSlot(Mutex::new(Some(Box::new(detached)))));
        let refused = |error| Err((error, slot.take().map(|detached| *detached)));
        if self.commands.send(ClientCommand::Adopt(Arc::clone(&slot), adopted)).is_err() {
            return refused(PartError::Gone);
        }
        match wait.recv_timeout(answer) {
            Ok(()) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => refused(PartError::Gone),
            Err(RecvTimeoutError::Timeout) => match refused(PartError::Unresponsive(answer)) {
                // The lane has taken it.
                Err((_, None)) => Ok(()),
                refused => refused,
            },
        }
    }
}

impl<S: QueueSession> QueueLink<S> {
    fn send(&self, command: ClientCommand<S>) -> Result<(), LaneGone> {
        self.mailbox.send(command).map_err(|_| LaneGone)?;
        self.waker.wake();
        Ok(())
    }
}

impl<S: QueueSession> CommandSender<S> {
    fn send(&self, command: ClientCommand<S>) -> Result<(), LaneGone> {
        let link = self.state.link().clone();
        link.ok_or(LaneGone)?.send(command)
    }

    /// Sends a command and waits for its answer.
    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> ClientCommand<S>) -> Result<T, LaneGone> {
        let (answer, wait) = channel();
        self.send(command(answer))?;
        wait.recv().map_err(|_| LaneGone)
    }
}

impl<S: QueueSession> Drop for QueueRemote<S> {
    fn drop(&mut self) {
        // The poller of an on-demand queue is closed by its host.
        if self.on_demand.is_none() {
            self.retire();
        }
    }
}
