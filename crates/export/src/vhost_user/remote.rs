//! The two ends of a virtqueue: what a poller has of it on its lane, and the handle that the control path has on it.
//!
//! A queue that runs belongs to its lane. The control path never touches it: it sends a command, wakes the lane, and
//! waits for the answer, which for a suspension comes only when all that was fetched is finished.
//!
//! The queue may move to another lane meanwhile, and takes its mailbox along: see [`LaneWaker`].
//!
//! A virtqueue on a lane has bios, tags and tables for a full ring, some hundred KiB. One made
//! [on demand](on_demand_queue) is in a poller only from the first start of its ring to the end of the session; its
//! counters go on over sessions.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use blkyard_mem::Mailbox;
use blkyard_mq::{DeviceInfo, HwStats, LaneWaker, RateLimit, SchedulerConfig, Wake};
use blkyard_sys::EventFd;
use blkyard_virtio::{GuestMemory, Inflight, Refusals, RingBase, RingLayout};

use crate::vhost_user::QueueView;
use crate::core::ExportLog;
use crate::vhost_user::kicks::KickSet;
use crate::vhost_user::notes::Notes;
use crate::vhost_user::queue::{DetachedVirtqueue, GuestQueue};

/// All a queue needs to run.
pub(crate) struct Setup {
    /// For messages: the queue's number in its export.
    pub(crate) name: String,
    pub(crate) log: Arc<ExportLog>,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) layout: RingLayout,
    pub(crate) size: u16,
    /// Where the ring goes on.
    pub(crate) base: RingBase,
    /// Where it records what is in flight. Says where it goes on, once it has been used.
    pub(crate) record: Option<Inflight>,
    /// Where it notes which of the guest's pages it writes.
    pub(crate) notes: Option<Notes>,
    pub(crate) kick: Option<Arc<EventFd>>,
    pub(crate) call: Option<Arc<EventFd>>,
    pub(crate) error: Option<Arc<EventFd>>,
    pub(crate) disk: DiskView,
    /// The connection, to be closed should the shared memory go away under us.
    pub(crate) connection: Arc<UnixStream>,
}

/// What requests are judged by, the same for all queues of a session.
#[derive(Clone)]
pub(crate) struct DiskView {
    pub(crate) features: blkyard_virtio::Features,
    /// Whether writes may be lost until they are flushed; changes while running.
    pub(crate) write_back: Arc<AtomicBool>,
}

pub(crate) enum Command {
    /// Run with this; the answer says whether the rings are sound.
    Run(Box<Setup>, Sender<Result<(), String>>),
    /// Finish what was fetched, then say where the queue stands.
    Suspend(Sender<RingBase>),
    /// Make durable what has completed, then say whether that worked.
    Flush(Sender<bool>),
    /// Ring this from now on.
    Call(Option<Arc<EventFd>>, Sender<()>),
    /// The device is this from now on; the queue is at rest.
    Change(Arc<DeviceInfo>, Sender<Result<(), String>>),
    /// Have no more requests in flight than this, then say how many that are.
    Depth(usize, Sender<usize>),
    /// Have this scheduler order what waits, then say so.
    Schedule(SchedulerConfig, Sender<()>),
    /// Pass these limits from now on, then say so.
    Rates(Vec<Arc<RateLimit>>, Sender<()>),
    /// Finish what was fetched, then leave the hardware queue; the answer is the virtqueue.
    Part(Sender<Box<GuestQueue>>),
    /// Need not leave after all, if it has not left.
    Stay,
    /// Have the hardware queue serve one more virtqueue, then say so.
    Adopt(Box<DetachedVirtqueue>, Sender<()>),
    /// Say what there is to see. Of no consequence to anything else.
    Look(Sender<QueueView>),
    /// Finish what was fetched, then never run again.
    Retire,
}

/// The way from the control path to a poller.
#[derive(Default)]
pub(crate) struct QueueLink {
    /// Looked at once a round.
    pub(crate) mailbox: Mailbox<Command>,
    /// Wakes the lane that the poller lives on.
    pub(crate) waker: LaneWaker,
}

/// A queue as the control path knows it, with or without a poller.
#[derive(Default)]
struct RemoteState {
    /// The way to its poller; unset while it has none.
    link: Mutex<Option<Arc<QueueLink>>>,
    counters: Arc<QueueCounters>,
}

/// What a queue has counted, also by pollers that it had before.
#[derive(Default)]
struct QueueCounters {
    stats: OnceLock<Arc<HwStats>>,
    refusals: OnceLock<Arc<Refusals>>,
}

impl RemoteState {
    fn link(&self) -> MutexGuard<'_, Option<Arc<QueueLink>>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The other end of a new link.
    fn connect(&self) -> QueuePort {
        let shared = Arc::new(QueueLink::default());
        *self.link() = Some(Arc::clone(&shared));
        QueuePort { shared, counters: Arc::clone(&self.counters) }
    }
}

/// The lane's end, from which a [`VhostQueue`](crate::VhostQueue) is made.
pub struct QueuePort {
    pub(crate) shared: Arc<QueueLink>,
    counters: Arc<QueueCounters>,
}

impl QueuePort {
    /// Where its I/O is counted, now and in later sessions.
    pub(crate) fn stats(&self) -> Arc<HwStats> {
        Arc::clone(self.counters.stats.get_or_init(Arc::default))
    }

    /// Where the guest's mistakes are counted.
    pub(crate) fn refusals(&self) -> Arc<Refusals> {
        Arc::clone(self.counters.refusals.get_or_init(Arc::default))
    }
}

impl Drop for QueuePort {
    fn drop(&mut self) {
        self.shared.mailbox.close();
    }
}

/// The control path's end. A queue without it is retired: nobody else could ever end it.
pub struct QueueRemote {
    commands: Commands,
    /// What makes the poller, if it is not there from the start.
    on_demand: Option<OnDemand>,
}

/// A handle that only looks: sees the queue for as long as it is there, and keeps nothing alive.
#[derive(Clone)]
pub struct QueueWatch {
    commands: Commands,
}

/// The handle of whoever places virtqueues on hardware queues. It keeps nothing alive.
#[derive(Clone)]
pub struct QueueMover {
    commands: Commands,
}

/// Why a virtqueue stays where it is.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// A request of its own is in flight.
    #[error("it was not drained within {0:?}: a request at its device does not complete; try again later")]
    Undrained(Duration),
    /// The lane has ended.
    #[error("the lane of this queue has ended; see the messages above")]
    Gone,
    /// There is no descriptor to hear several kicks by.
    #[error("its kick cannot be listened to: {0}; raise the limit on open files")]
    Kicks(io::Error),
}

/// How commands reach the queue.
#[derive(Clone)]
struct Commands {
    state: Arc<RemoteState>,
}

/// Has a queue made [on demand](on_demand_queue) served, and takes it back.
pub trait QueueHost: Send + Sync {
    /// Has a hardware queue on some lane serve the virtqueue with this end. Returns when it does.
    ///
    /// # Errors
    /// Says in words why there is none: object, cause, cure.
    fn open(&self, port: QueuePort) -> Result<(), String>;

    /// Has it served no more. It is at rest.
    fn close(&self);
}

/// A queue that is served while a session needs it.
struct OnDemand {
    host: Box<dyn QueueHost>,
    queue: Arc<RemoteState>,
    poller: Mutex<PollerPresence>,
}

/// Whether there is a poller, and how the next one is set.
#[derive(Default)]
struct PollerPresence {
    is_open: bool,
    /// It stays until the queues are dropped.
    is_kept: bool,
    /// Requests that it may have in flight, if that was bounded.
    depth: Option<usize>,
}

impl OnDemand {
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
            let commands = Commands { state: Arc::clone(&self.queue) };
            commands.ask(|answer| Command::Depth(depth, answer)).map_err(|gone| gone.to_string())?;
        }
        Ok(())
    }

    fn close(&self) {
        if std::mem::take(&mut self.poller().is_open) {
            // Should it not leave its lane, it is over at least, and holds up no end of the lane.
            let link = self.queue.link().take();
            link.iter().for_each(|link| drop(link.send(Command::Retire)));
            self.host.close();
        }
    }
}

impl Drop for OnDemand {
    fn drop(&mut self) {
        self.close();
    }
}

/// The lane is gone.
#[derive(Debug, thiserror::Error)]
#[error("the lane of this queue has ended")]
pub(crate) struct Gone;

/// A queue that was asked to come to rest.
pub(crate) struct Suspension(Receiver<RingBase>);

impl Suspension {
    /// Waits until all that was fetched is finished; says where the queue stands.
    pub(crate) fn wait(self) -> Result<RingBase, Gone> {
        self.0.recv().map_err(|_| Gone)
    }
}

/// Makes the two ends of a queue.
pub fn queue_pair() -> (QueueRemote, QueuePort) {
    let state = Arc::new(RemoteState::default());
    let port = state.connect();
    (QueueRemote { commands: Commands { state }, on_demand: None }, port)
}

/// Makes the control path's end of a queue that `host` has served from the first start of its ring to the end of each
/// session.
pub fn on_demand_queue(host: Box<dyn QueueHost>) -> QueueRemote {
    let queue = Arc::new(RemoteState::default());
    let on_demand = OnDemand { host, queue: Arc::clone(&queue), poller: Mutex::default() };
    QueueRemote { commands: Commands { state: queue }, on_demand: Some(on_demand) }
}

impl QueueRemote {
    /// Ends the queue once it has finished what it fetched.
    pub fn retire(&self) {
        let _ = self.commands.send(Command::Retire);
    }

    /// Has a poller from now on, if one is made on demand. Otherwise that is done with the first start of the ring.
    ///
    /// # Errors
    /// Says in words why there is none: object, cause, cure.
    pub fn open(&self) -> Result<(), String> {
        self.on_demand.as_ref().map_or(Ok(()), |on_demand| on_demand.open(false))
    }

    /// The same, and for good: the poller stays when sessions end. For devices with a bounded number of queues.
    ///
    /// # Errors
    /// As for [`QueueRemote::open`].
    pub fn open_for_good(&self) -> Result<(), String> {
        self.on_demand.as_ref().map_or(Ok(()), |on_demand| on_demand.open(true))
    }

    /// Gives a poller back that was made on demand. The queue, and all that share the poller, are at rest.
    pub(crate) fn close(&self) {
        if let Some(on_demand) = self.on_demand.as_ref().filter(|on_demand| !on_demand.poller().is_kept) {
            on_demand.close();
        }
    }

    /// Whether it has no poller now: it is made with the device and all settings as they are then.
    fn is_closed(&self) -> bool {
        self.on_demand.as_ref().is_some_and(|on_demand| !on_demand.poller().is_open)
    }

    pub(crate) fn run(&self, setup: Setup) -> Result<Result<(), String>, Gone> {
        if let Err(why) = self.open() {
            return Ok(Err(why));
        }
        self.commands.ask(|answer| Command::Run(Box::new(setup), answer))
    }

    /// Asks the queue to come to rest. Several may be asked before any is waited for.
    pub(crate) fn suspend(&self) -> Result<Suspension, Gone> {
        let (answer, wait) = channel();
        self.commands.send(Command::Suspend(answer))?;
        Ok(Suspension(wait))
    }

    /// Makes durable what has completed, whichever queue it came by; true if that worked.
    pub(crate) fn flush(&self) -> Result<bool, Gone> {
        self.commands.ask(Command::Flush)
    }

    /// Has the queue, which is at rest, serve a device that is this from now on.
    pub(crate) fn change(&self, info: &Arc<DeviceInfo>) -> Result<Result<(), String>, Gone> {
        if self.is_closed() {
            return Ok(Ok(()));
        }
        self.commands.ask(|answer| Command::Change(Arc::clone(info), answer))
    }

    /// Bounds the requests in flight; says what the bound has become.
    pub(crate) fn set_depth(&self, depth: usize) -> Result<usize, Gone> {
        if let Some(on_demand) = &self.on_demand {
            on_demand.poller().depth = Some(depth);
        }
        if self.is_closed() {
            return Ok(depth);
        }
        self.commands.ask(|answer| Command::Depth(depth, answer))
    }

    /// Has this scheduler order the bios that wait, from now on.
    pub(crate) fn schedule(&self, config: SchedulerConfig) -> Result<(), Gone> {
        if self.is_closed() {
            return Ok(());
        }
        self.commands.ask(|answer| Command::Schedule(config, answer))
    }

    /// Has what passes the queue pass these limits, from now on.
    pub(crate) fn set_rates(&self, limits: Vec<Arc<RateLimit>>) -> Result<(), Gone> {
        if self.is_closed() {
            return Ok(());
        }
        self.commands.ask(|answer| Command::Rates(limits, answer))
    }

    /// Has the queue signal this from now on. Waited for, as everything a front-end asks for is: else one that asks
    /// faster than a lane hears would have us hold descriptors without end.
    pub(crate) fn set_call(&self, call: Option<Arc<EventFd>>) -> Result<(), Gone> {
        self.commands.ask(|answer| Command::Call(call, answer))
    }

    /// For whoever places virtqueues on hardware queues.
    pub fn mover(&self) -> QueueMover {
        QueueMover { commands: self.commands.clone() }
    }

    /// A handle that only looks.
    pub fn watch(&self) -> QueueWatch {
        QueueWatch { commands: self.commands.clone() }
    }
}

impl QueueWatch {
    /// What is counted of its I/O, once it is on its lane. The first virtqueue of a hardware queue also counts what
    /// concerns that as a whole, such as the batches it gives its driver.
    pub fn stats(&self) -> Option<&Arc<HwStats>> {
        self.commands.state.counters.stats.get()
    }

    /// What the guest sent that made no sense, by reason.
    pub fn refusals(&self) -> Option<&Arc<blkyard_virtio::Refusals>> {
        self.commands.state.counters.refusals.get()
    }

    /// Whether it has a poller now: one that is made on demand has none while no front-end needs it.
    pub fn is_open(&self) -> bool {
        self.commands.state.link().is_some()
    }

    /// Asks the queue's owner what there is to see; the answer comes once its lane has turned. Nothing if it has no
    /// poller now, or the lane has ended.
    pub fn look(&self) -> Option<Receiver<QueueView>> {
        let (answer, wait) = channel();
        self.commands.send(Command::Look(answer)).ok()?;
        Some(wait)
    }
}

impl QueueMover {
    /// Has the virtqueue leave its hardware queue: it finishes what it fetched, whatever others have in flight there.
    /// If that takes longer than `limit` it stays and continues.
    ///
    /// # Errors
    /// See [`PartError`].
    pub fn part(&self, limit: Duration) -> Result<DetachedVirtqueue, PartError> {
        // What it may need where it arrives: found missing before anything has changed.
        let kicks = KickSet::new().map_err(PartError::Kicks)?;
        let (answer, wait) = channel();
        self.commands.send(Command::Part(answer)).map_err(|Gone| PartError::Gone)?;
        let virtqueue = match wait.recv_timeout(limit) {
            Ok(virtqueue) => virtqueue,
            Err(RecvTimeoutError::Disconnected) => return Err(PartError::Gone),
            Err(RecvTimeoutError::Timeout) => {
                self.commands.send(Command::Stay).map_err(|Gone| PartError::Gone)?;
                // It may have left at the last moment.
                wait.recv().map_err(|_| PartError::Undrained(limit))?
            }
        };
        Ok(DetachedVirtqueue { virtqueue, kicks })
    }

    /// Has the hardware queue that serves this virtqueue serve another one of its export, too.
    ///
    /// # Errors
    /// The lane has ended, and the other virtqueue with it.
    pub fn adopt(&self, detached: DetachedVirtqueue) -> Result<(), PartError> {
        let (adopted, wait) = channel();
        self.commands.send(Command::Adopt(Box::new(detached), adopted)).map_err(|Gone| PartError::Gone)?;
        wait.recv().map_err(|_| PartError::Gone)
    }
}

impl QueueLink {
    fn send(&self, command: Command) -> Result<(), Gone> {
        self.mailbox.send(command).map_err(|_| Gone)?;
        self.waker.wake();
        Ok(())
    }
}

impl Commands {
    fn send(&self, command: Command) -> Result<(), Gone> {
        let link = self.state.link().clone();
        link.ok_or(Gone)?.send(command)
    }

    /// Sends a command that is answered, and waits for the answer.
    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Result<T, Gone> {
        let (answer, wait) = channel();
        self.send(command(answer))?;
        wait.recv().map_err(|_| Gone)
    }
}

impl Drop for QueueRemote {
    fn drop(&mut self) {
        // One that is made on demand is given back by its host.
        if self.on_demand.is_none() {
            self.retire();
        }
    }
}
