//! Interface of a protocol to an export's control path: the session of one front-end, and its disk.
//!
//! The core accepts, executes orders, stops, hands over and takes over ([`Server`](super::Server)). A protocol handles
//! a front-end's messages, one at a time, and runs and suspends the queues.

use std::fmt::{Debug, Display};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

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
    /// Properties of its devices, by number: one, or each namespace of a controller.
    fn infos(&self) -> Vec<&DeviceInfo>;

    /// Changes the device of this number.
    fn set_info(&mut self, device: u16, info: &Arc<DeviceInfo>);

    /// Number of queues offered to a front-end.
    fn queues(&self) -> u16;

    /// Sets the number of offered queues.
    fn set_queues(&mut self, queues: u16);

    /// Whether the cache is write-back, as far as a front-end can choose.
    fn write_cache(&self) -> bool;

    /// Sets the cache to write-back or write-through.
    fn set_write_cache(&mut self, write_back: bool);
}

/// The session of one front-end, from its first message or handover state to its end. Owned by its export. A method may
/// wait only for the export's queues.
pub trait FrontEndSession: Sized + Send + 'static {
    /// The session of one of its queues.
    type Queue: QueueSession;
    /// The disk as shown to the front-end.
    type Disk: ExportedDisk;
    /// System resources of a session, allocated before a connection is accepted: an accepted connection must not fail
    /// for lack of them.
    type Reserve: Send;
    /// State of a handed-over session with drained queues.
    type State: Send;
    /// Value that starts its queues afterwards.
    type Start: Send;
    /// Its state for inspection.
    type View: Clone + Debug + Default + Send;
    /// Reason for its end.
    type Error: Display;

    /// Allocates the resources of a session.
    ///
    /// # Errors
    /// The system has no resources left.
    fn reserve() -> io::Result<Self::Reserve>;

    /// A session that has received no message yet.
    fn accept(connection: Accepted, reserve: Self::Reserve, config: ExportConfig<Self>, log: &Arc<ExportLog>) -> Self;

    /// A session from its handover state. No queue runs before [`begin`](FrontEndSession::begin).
    ///
    /// # Errors
    /// The state is invalid for this export.
    fn resume(
        state: Self::State,
        reserve: Self::Reserve,
        config: ExportConfig<Self>,
        log: &Arc<ExportLog>,
    ) -> Result<(Self, Self::Start), String>;

    /// Starts the queues of a session that was handed over.
    ///
    /// # Errors
    /// A queue cannot run.
    fn begin(&mut self, start: Option<Self::Start>) -> Result<(), Self::Error>;

    /// Handles one message, if available. Does not wait for the front-end.
    fn step(&mut self) -> SessionStep<Self::Error>;

    /// Descriptor to wait for, and the awaited events.
    fn interest(&self) -> (AwaitedFd, EventFlags);

    /// Latest time of the next step, if any: it runs also without a ready descriptor.
    fn deadline(&self) -> Option<Instant>;

    /// The export's configuration, for changes that are invisible to a front-end.
    fn with_config<T>(&mut self, change: impl FnOnce(&mut ExportConfig<Self>) -> T) -> T;

    /// Changes the device of this number: queues drain, change and continue.
    ///
    /// # Errors
    /// A queue cannot resume.
    fn change(&mut self, device: u16, info: &Arc<DeviceInfo>) -> Result<Changed, String>;

    /// Its listening socket, if it accepts connections by itself.
    fn listener(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Drains, and returns the handover state. Returns the numbers of the queues that ran in any case.
    fn hand_over(&mut self) -> (Vec<usize>, Result<Self::State, String>);

    /// Resumes these queues after a failed handover.
    fn go_on(&mut self, running: Vec<usize>);

    /// Its state for inspection.
    fn view(&self) -> Self::View;

    /// Ends the session once its queues have drained, and logs the reason. Returns the configuration, and an error if
    /// no next session is possible.
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

/// Cause of the end of a session.
pub enum SessionEnd<E> {
    /// The front-end left, or was disconnected.
    Over(E),
    /// Another process continues with it.
    Handed,
    /// The export stops.
    Stopped,
}

/// Configuration of one export.
pub struct ExportConfig<F: FrontEndSession> {
    /// Name, for messages.
    pub name: String,
    /// The disk as front-ends see it.
    pub disk: F::Disk,
    /// One for each client queue.
    pub queues: Vec<QueueRemote<F::Queue>>,
    /// DMA domains for front-end memory, one for each path that maps memory. Empty if the device uses process
    /// addresses.
    pub domains: Vec<Arc<DmaDomain>>,
}

impl<F: FrontEndSession> ExportConfig<F> {
    /// Changes the device of this number. Its queues are drained.
    ///
    /// # Errors
    /// A queue does not drain, or its lane has ended.
    pub fn change(&mut self, device: u16, info: &Arc<DeviceInfo>) -> Result<(), String> {
        for (number, queue) in self.queues.iter().enumerate() {
            let changed = queue.change(device, info).unwrap_or_else(|gone| Err(gone.to_string()));
            changed.map_err(|why| format!("queue {number}: {why}"))?;
        }
        self.disk.set_info(device, info);
        Ok(())
    }

    /// Adds queues with the settings of the existing ones; adds none if one fails.
    pub(super) fn add(&mut self, more: Vec<QueueRemote<F::Queue>>, depth: Option<usize>) -> Result<(), String> {
        let infos: Vec<_> = self.disk.infos().into_iter().cloned().map(Arc::new).collect();
        for queue in &more {
            for (device, info) in (0..).zip(&infos) {
                queue.change(device, info).map_err(|gone| gone.to_string())??;
            }
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

    /// Sets the scheduler of a device in each queue.
    pub(super) fn schedule(&mut self, device: u16, config: SchedulerConfig) -> Result<(), String> {
        self.queues.iter().try_for_each(|queue| queue.schedule(device, config)).map_err(|gone| gone.to_string())
    }

    /// Sets the rate limits of a device in each queue.
    pub(super) fn set_rates(&mut self, device: u16, limits: &[Arc<RateLimit>]) -> Result<(), String> {
        let mut queues = self.queues.iter();
        queues.try_for_each(|queue| queue.set_rates(device, limits.to_vec())).map_err(|gone| gone.to_string())
    }
}
