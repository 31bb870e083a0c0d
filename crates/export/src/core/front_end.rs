//! Interface of a protocol to an export's control path: the session of one front-end, and its disk.
//!
//! The core accepts, executes orders, stops, hands over and takes over ([`Server`](super::Server)). A protocol handles
//! a front-end's messages, one at a time, and runs and suspends the queues.

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
    /// Properties of the device.
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

/// The session of one front-end, from its first message to its last, or from the state of another process. Owned by its
/// export. A method may wait only for the export's queues.
pub trait FrontEndSession: Sized + Send + 'static {
    /// The session of one of its queues.
    type Queue: QueueSession;
    /// The disk as it is shown.
    type Disk: ExportedDisk;
    /// System resources of a session, allocated before the connection is accepted: an accepted connection must not be
    /// lost for want of them.
    type Reserve: Send;
    /// State of a session that is handed over, with drained queues.
    type State: Send;
    /// Value that then lets its queues run.
    type Start: Send;
    /// Its state for inspection.
    type View: Clone + Debug + Default + Send;
    /// Why it ends.
    type Error: Display;

    /// Allocates the resources of a session.
    ///
    /// # Errors
    /// The system has none left.
    fn reserve() -> io::Result<Self::Reserve>;

    /// A front-end without messages so far.
    fn accept(connection: Accepted, reserve: Self::Reserve, config: ExportConfig<Self>, log: &Arc<ExportLog>) -> Self;

    /// A session from its handover state. No queue runs before it [begins](FrontEndSession::begin).
    ///
    /// # Errors
    /// The state is impossible here.
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

    /// Handles a message, if one is available. Does not wait for the front-end.
    fn step(&mut self) -> SessionStep<Self::Error>;

    /// The descriptor that it waits for, and how.
    fn interest(&self) -> (AwaitedFd, EventFlags);

    /// The export's configuration, for changes that a front-end does not see.
    fn with_config<T>(&mut self, change: impl FnOnce(&mut ExportConfig<Self>) -> T) -> T;

    /// Changes the device: queues drain, change and continue.
    ///
    /// # Errors
    /// A queue does not continue.
    fn change(&mut self, info: &Arc<DeviceInfo>) -> Result<Changed, String>;

    /// Drains, and describes itself. Returns the numbers of the queues that ran, with or without a description.
    fn hand_over(&mut self) -> (Vec<usize>, Result<Self::State, String>);

    /// The handover has failed: runs these queues again.
    fn go_on(&mut self, running: Vec<usize>);

    /// Its state for inspection.
    fn view(&self) -> Self::View;

    /// Ends the session once its queues have drained, and logs the cause. Returns the configuration for the next
    /// session, and whether there can be one.
    fn end(self, end: &SessionEnd<Self::Error>) -> (ExportConfig<Self>, Result<(), Self::Error>);
}

/// Result of a session's step.
pub enum SessionStep<E> {
    /// No message is available.
    Waiting,
    /// A message was handled; there may be more.
    Handled,
    /// The session has ended.
    Over(E),
}

/// How a session ends.
pub enum SessionEnd<E> {
    /// The front-end left, or was disconnected.
    Over(E),
    /// Another process continues with it.
    Handed,
    /// The export is to end.
    Stopped,
}

/// Configuration of one export.
pub struct ExportConfig<F: FrontEndSession> {
    /// Its name, for messages.
    pub name: String,
    /// The disk as front-ends see it.
    pub disk: F::Disk,
    /// One for each client queue.
    pub queues: Vec<QueueRemote<F::Queue>>,
    /// DMA domains in which the device reaches front-ends' memory: one for each path that maps memory. Empty for a
    /// device that uses our addresses.
    pub domains: Vec<Arc<DmaDomain>>,
}

impl<F: FrontEndSession> ExportConfig<F> {
    /// Changes the device. Its queues are drained.
    ///
    /// # Errors
    /// A queue is not drained, or its lane has ended.
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

    /// Limits the requests in flight of each queue; returns the new limit.
    pub(super) fn set_depth(&mut self, depth: usize) -> Result<usize, String> {
        let set = self.queues.iter().map(|queue| queue.set_depth(depth));
        let depths = set.collect::<Result<Vec<_>, _>>().map_err(|gone| gone.to_string())?;
        Ok(depths.into_iter().min().unwrap_or(depth))
    }

    /// Sets the scheduler of each queue.
    pub(super) fn schedule(&mut self, config: SchedulerConfig) -> Result<(), String> {
        self.queues.iter().try_for_each(|queue| queue.schedule(config)).map_err(|gone| gone.to_string())
    }

    /// Sets the rate limits of the queues.
    pub(super) fn set_rates(&mut self, limits: &[Arc<RateLimit>]) -> Result<(), String> {
        self.queues.iter().try_for_each(|queue| queue.set_rates(limits.to_vec())).map_err(|gone| gone.to_string())
    }
}
