//! What a protocol is to an export's control path: the session of one front-end, and the disk that it is shown.
//!
//! The core accepts, obeys orders from outside, stops, hands over and takes over ([`Server`](super::Server)). A
//! protocol handles what a front-end says, one message at a time, and runs and suspends the queues.

use std::fmt::{Debug, Display};
use std::io;
use std::sync::Arc;

use blkyard_mem::DmaDomain;
use blkyard_mq::{DeviceInfo, RateLimit, SchedulerConfig};
use blkyard_sys::EventFlags;

use super::acceptor::Accepted;
use super::control_loop::AwaitedFd;
use super::log::ExportLog;
use super::orders::Changed;
use super::queue::{QueueRemote, QueueSession};

/// A disk as front-ends see it.
pub trait ExportedDisk: Send + 'static {
    /// What the device is.
    fn info(&self) -> &DeviceInfo;

    /// The device is this from now on.
    fn set_info(&mut self, info: &Arc<DeviceInfo>);

    /// Queues that a front-end is offered.
    fn queues(&self) -> u16;

    /// Offers so many queues.
    fn set_queues(&mut self, queues: u16);

    /// Whether the cache is write-back, as far as a front-end may choose.
    fn write_cache(&self) -> bool;

    /// The cache is write-back, or is not.
    fn set_write_cache(&mut self, write_back: bool);
}

/// The session of one front-end, from its first message to its last, or from where another process stopped. Owned by
/// its export. A method may wait for the export's queues, and for nothing else.
pub trait FrontEndSession: Sized + Send + 'static {
    /// The session of one of its queues.
    type Queue: QueueSession;
    /// The disk as it is shown.
    type Disk: ExportedDisk;
    /// What a session needs of the system, taken before the connection is: one that was accepted must not be lost for
    /// want of it.
    type Reserve: Send;
    /// A session that is handed over, its queues at rest.
    type State: Send;
    /// What then lets its queues run.
    type Start: Send;
    /// What there is to see of it.
    type View: Clone + Debug + Default + Send;
    /// Why it ends.
    type Error: Display;

    /// Takes what a session needs.
    ///
    /// # Errors
    /// The system has none left.
    fn reserve() -> io::Result<Self::Reserve>;

    /// A front-end that has said nothing yet.
    fn accept(connection: Accepted, reserve: Self::Reserve, config: ExportConfig<Self>, log: &Arc<ExportLog>) -> Self;

    /// A session as it was handed over. Nothing runs before it [begins](FrontEndSession::begin).
    ///
    /// # Errors
    /// It is none that could have been made here.
    fn resume(
        state: Self::State,
        reserve: Self::Reserve,
        config: ExportConfig<Self>,
        log: &Arc<ExportLog>,
    ) -> Result<(Self, Self::Start), String>;

    /// Begins: a session that was handed over has its queues run.
    ///
    /// # Errors
    /// One of them cannot.
    fn begin(&mut self, start: Option<Self::Start>) -> Result<(), Self::Error>;

    /// Handles a message, if one is there. Does not wait for the front-end.
    fn step(&mut self) -> SessionStep<Self::Error>;

    /// The descriptor that it waits for, and how.
    fn interest(&self) -> (AwaitedFd, EventFlags);

    /// What the export serves, for what changes nothing that a front-end sees.
    fn with_config<T>(&mut self, change: impl FnOnce(&mut ExportConfig<Self>) -> T) -> T;

    /// The device is this from now on: queues finish what they fetched, change and go on where they stood.
    ///
    /// # Errors
    /// A queue does not go on.
    fn change(&mut self, info: &Arc<DeviceInfo>) -> Result<Changed, String>;

    /// Comes to rest, and describes itself. Returns the numbers of the queues that ran, whether it can be described or
    /// not.
    fn hand_over(&mut self) -> (Vec<usize>, Result<Self::State, String>);

    /// Nobody goes on with it but us: has these queues run again.
    fn go_on(&mut self, running: Vec<usize>);

    /// What there is to see.
    fn view(&self) -> Self::View;

    /// Lets go of the front-end once its queues have finished, and logs why. Returns what the next session needs, and
    /// whether there can be one.
    fn end(self, end: &SessionEnd<Self::Error>) -> (ExportConfig<Self>, Result<(), Self::Error>);
}

/// What a step of a session came to.
pub enum SessionStep<E> {
    /// There is nothing to do.
    Waiting,
    /// A message was handled; there may be more.
    Handled,
    /// The session is over.
    Over(E),
}

/// How a session ends.
pub enum SessionEnd<E> {
    /// The front-end left, or is let go.
    Over(E),
    /// Another process goes on with it.
    Handed,
    /// The export is to end.
    Stopped,
}

/// What one export serves.
pub struct ExportConfig<F: FrontEndSession> {
    /// Its name, for messages.
    pub name: String,
    /// The disk as front-ends see it.
    pub disk: F::Disk,
    /// One for each client queue.
    pub queues: Vec<QueueRemote<F::Queue>>,
    /// Where the device reaches the memory of front-ends: one for each of its paths that maps memory. None for a device
    /// that uses our addresses.
    pub domains: Vec<Arc<DmaDomain>>,
}

impl<F: FrontEndSession> ExportConfig<F> {
    /// The device is this from now on. Its queues are at rest.
    ///
    /// # Errors
    /// A queue is not at rest, or its lane has ended.
    pub fn change(&mut self, info: &Arc<DeviceInfo>) -> Result<(), String> {
        for (number, queue) in self.queues.iter().enumerate() {
            let changed = queue.change(info).unwrap_or_else(|gone| Err(gone.to_string()));
            changed.map_err(|why| format!("queue {number}: {why}"))?;
        }
        self.disk.set_info(info);
        Ok(())
    }

    /// Has more queues, which serve what the others do; none of them if one cannot.
    pub(super) fn add(&mut self, more: Vec<QueueRemote<F::Queue>>, depth: Option<usize>) -> Result<(), String> {
        let info = Arc::new(self.disk.info().clone());
        for queue in &more {
            queue.change(&info).map_err(|gone| gone.to_string())??;
            depth.map(|depth| queue.set_depth(depth)).transpose().map_err(|gone| gone.to_string())?;
        }
        self.queues.extend(more);
        Ok(())
    }

    /// Bounds the requests in flight of each queue; says what the bound has become.
    pub(super) fn set_depth(&mut self, depth: usize) -> Result<usize, String> {
        let set = self.queues.iter().map(|queue| queue.set_depth(depth));
        let depths = set.collect::<Result<Vec<_>, _>>().map_err(|gone| gone.to_string())?;
        Ok(depths.into_iter().min().unwrap_or(depth))
    }

    /// Has each queue order what waits by this scheduler.
    pub(super) fn schedule(&mut self, config: SchedulerConfig) -> Result<(), String> {
        self.queues.iter().try_for_each(|queue| queue.schedule(config)).map_err(|gone| gone.to_string())
    }

    /// Has what passes the queues pass these limits.
    pub(super) fn set_rates(&mut self, limits: &[Arc<RateLimit>]) -> Result<(), String> {
        self.queues.iter().try_for_each(|queue| queue.set_rates(limits.to_vec())).map_err(|gone| gone.to_string())
    }
}
