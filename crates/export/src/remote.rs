//! The two ends of a queue: the poller on its lane, and the hand that the control path has on it.
//!
//! A queue that runs belongs to its lane. The control path never touches it: it sends a command, wakes the lane, and
//! waits for the answer, which for a suspension comes only when all that was fetched is finished.
//!
//! The queue may move to another lane meanwhile, and takes its mailbox along: see [`LaneWaker`].

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

use blkyard_mem::Mailbox;
use blkyard_mq::{DeviceInfo, HwStats, LaneWaker, RateLimit, SchedulerConfig, Wake};
use blkyard_sys::EventFd;
use blkyard_virtio::{GuestMemory, Inflight, RingBase, RingLayout};

use crate::QueueView;
use crate::kicks::KickSet;
use crate::log::ExportLog;
use crate::notes::Notes;

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
    /// Say what there is to see. Of no consequence to anything else.
    Look(Sender<QueueView>),
    /// Finish what was fetched, then never run again.
    Retire,
}

#[derive(Default)]
pub(crate) struct RemoteState {
    /// Looked at once a round.
    pub(crate) mailbox: Mailbox<Command>,
    /// Wakes the lane that the queue lives on.
    pub(crate) waker: LaneWaker,
    pub(crate) stats: OnceLock<Arc<HwStats>>,
    pub(crate) refusals: OnceLock<Arc<blkyard_virtio::Refusals>>,
    /// Number of the queue with which the hardware queue is shown, if that is another.
    shown_with: Option<usize>,
}

/// The lane's end, from which a [`VhostQueue`](crate::VhostQueue) is made.
pub struct QueuePort {
    pub(crate) shared: Arc<RemoteState>,
}

impl Drop for QueuePort {
    fn drop(&mut self) {
        self.shared.mailbox.close();
    }
}

/// The lane's end of several queues of one export, from which a [`VhostQueue`](crate::VhostQueue) is made that all of
/// them share.
pub struct SharedQueuePort {
    /// At least one.
    pub(crate) ports: Vec<QueuePort>,
    /// Where their kicks are heard, if they are several.
    pub(crate) kicks: Option<KickSet>,
}

/// The control path's end. A queue without it is retired: nobody else could ever end it.
pub struct QueueRemote {
    commands: Commands,
}

/// The hand of one who looks on: sees the queue for as long as it is there, and keeps nothing alive.
#[derive(Clone)]
pub struct QueueWatch {
    commands: Commands,
}

/// How commands reach the queue.
#[derive(Clone)]
struct Commands {
    shared: Arc<RemoteState>,
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
    pair(None)
}

/// Makes the two ends of all queues of an export, which share a hardware queue.
///
/// # Errors
/// The system has no descriptor to hear several kicks by.
///
/// # Panics
/// If there is to be no queue.
pub fn shared_queue_pair(queues: usize) -> io::Result<(Vec<QueueRemote>, SharedQueuePort)> {
    assert!(queues > 0, "a hardware queue of no virtqueue");
    let kicks = if queues > 1 { Some(KickSet::new()?) } else { None };
    let (remotes, ports) = (0..queues).map(|number| pair((number > 0).then_some(0))).unzip();
    Ok((remotes, SharedQueuePort { ports, kicks }))
}

fn pair(shown_with: Option<usize>) -> (QueueRemote, QueuePort) {
    let shared = Arc::new(RemoteState { shown_with, ..RemoteState::default() });
    let remote = QueueRemote { commands: Commands { shared: Arc::clone(&shared) } };
    (remote, QueuePort { shared })
}

impl QueueRemote {
    /// Ends the queue once it has finished what it fetched.
    pub fn retire(&self) {
        let _ = self.commands.send(Command::Retire);
    }

    pub(crate) fn run(&self, setup: Setup) -> Result<Result<(), String>, Gone> {
        let (answer, wait) = channel();
        self.commands.send(Command::Run(Box::new(setup), answer))?;
        wait.recv().map_err(|_| Gone)
    }

    /// Asks the queue to come to rest. Several may be asked before any is waited for.
    pub(crate) fn suspend(&self) -> Result<Suspension, Gone> {
        let (answer, wait) = channel();
        self.commands.send(Command::Suspend(answer))?;
        Ok(Suspension(wait))
    }

    /// Makes durable what has completed, whichever queue it came by; true if that worked.
    pub(crate) fn flush(&self) -> Result<bool, Gone> {
        let (answer, wait) = channel();
        self.commands.send(Command::Flush(answer))?;
        wait.recv().map_err(|_| Gone)
    }

    /// Has the queue, which is at rest, serve a device that is this from now on.
    pub(crate) fn change(&self, info: &Arc<DeviceInfo>) -> Result<Result<(), String>, Gone> {
        let (answer, wait) = channel();
        self.commands.send(Command::Change(Arc::clone(info), answer))?;
        wait.recv().map_err(|_| Gone)
    }

    /// Bounds the requests in flight; says what the bound has become.
    pub(crate) fn set_depth(&self, depth: usize) -> Result<usize, Gone> {
        let (answer, wait) = channel();
        self.commands.send(Command::Depth(depth, answer))?;
        wait.recv().map_err(|_| Gone)
    }

    /// Has this scheduler order the bios that wait, from now on.
    pub(crate) fn schedule(&self, config: SchedulerConfig) -> Result<(), Gone> {
        let (answer, wait) = channel();
        self.commands.send(Command::Schedule(config, answer))?;
        wait.recv().map_err(|_| Gone)
    }

    /// Has what passes the queue pass these limits, from now on.
    pub(crate) fn set_rates(&self, limits: Vec<Arc<RateLimit>>) -> Result<(), Gone> {
        let (answer, wait) = channel();
        self.commands.send(Command::Rates(limits, answer))?;
        wait.recv().map_err(|_| Gone)
    }

    /// Has the queue ring this from now on. Waited for, as everything a front-end asks for is: else one that asks
    /// faster than a lane hears would have us hold descriptors without end.
    pub(crate) fn set_call(&self, call: Option<Arc<EventFd>>) -> Result<(), Gone> {
        let (answer, wait) = channel();
        self.commands.send(Command::Call(call, answer))?;
        wait.recv().map_err(|_| Gone)
    }

    /// A hand on the queue that only looks.
    pub fn watch(&self) -> QueueWatch {
        QueueWatch { commands: self.commands.clone() }
    }
}

impl QueueWatch {
    /// The counters of the hardware queue, once it is on its lane; none if it is [shown with another
    /// queue](QueueWatch::shown_with).
    pub fn stats(&self) -> Option<&Arc<HwStats>> {
        self.commands.shared.stats.get()
    }

    /// Number of the queue of its export with which the hardware queue is shown that it feeds: its counters, and what
    /// it has in flight. None if it is this one.
    pub fn shown_with(&self) -> Option<usize> {
        self.commands.shared.shown_with
    }

    /// What the guest sent that made no sense, by reason.
    pub fn refusals(&self) -> Option<&Arc<blkyard_virtio::Refusals>> {
        self.commands.shared.refusals.get()
    }

    /// Asks the queue's owner what there is to see; the answer comes once its lane has turned. Nothing if the lane has
    /// ended.
    pub fn look(&self) -> Option<Receiver<QueueView>> {
        let (answer, wait) = channel();
        self.commands.send(Command::Look(answer)).ok()?;
        Some(wait)
    }
}

impl Commands {
    fn send(&self, command: Command) -> Result<(), Gone> {
        self.shared.mailbox.send(command).map_err(|_| Gone)?;
        self.shared.waker.wake();
        Ok(())
    }
}

impl Drop for QueueRemote {
    fn drop(&mut self) {
        self.retire();
    }
}
