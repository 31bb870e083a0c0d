//! The disk behind a socket: how it is opened, what can be asked of it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use blkyard_mem::Region;
use blkyard_mq::{DeviceInfo, QueueKind};
use blkyard_sys::{EventFd, TimeSource};
use blkyard_virtio::Features;

use crate::connector::{Connector, DirectConnector};
use crate::control::Control;
use crate::mailbox::{ControlSender, DeviceCommand, DriverQueueView};
use crate::{AttachError, AttachedQueue};

/// Entries of a ring, at most: as many as QEMU's back-ends take.
pub const QUEUE_SIZE_MAX: u16 = 1024;

/// How a disk is attached.
#[derive(Clone, Debug)]
pub struct AttachConfig {
    /// The back-end's socket.
    pub socket: PathBuf,
    /// Makes the connections to it.
    pub connector: Arc<dyn Connector>,
    /// The clock of its control thread.
    pub clock: Arc<dyn TimeSource>,
    /// Queues to use; all that the back-end has, if it is not said.
    pub queues: Option<u16>,
    /// Entries of each ring: a power of two, up to [`QUEUE_SIZE_MAX`].
    pub queue_size: u16,
    /// Packed rings.
    pub packed: bool,
    /// How long the back-end may take to answer messages: all of a set-up, or of one change.
    pub reply_max: Duration,
    /// How long it may take for a request. After that its session is given up.
    pub io_max: Duration,
    /// How long I/O waits for a back-end that is gone, or is done again at one that does not answer it. After that it
    /// fails, until there is one again.
    pub gone_max: Duration,
}

impl AttachConfig {
    /// The defaults, for a socket.
    pub fn new(socket: impl Into<PathBuf>, clock: Arc<dyn TimeSource>) -> AttachConfig {
        AttachConfig {
            socket: socket.into(),
            connector: Arc::new(DirectConnector),
            clock,
            queues: None,
            // Twice what the usual hardware queue has out, and memory that is taken as it is used.
            queue_size: 256,
            packed: false,
            // A busy machine answers within milliseconds, and hardly ever within seconds.
            reply_max: Duration::from_secs(10),
            // As in Linux; a flush of a full cache takes that long.
            io_max: Duration::from_secs(30),
            // A daemon restarts within seconds, a supervisor may take its time; guests give a disk half a minute or
            // more.
            gone_max: Duration::from_mins(1),
        }
    }

    /// The name of the disk, for messages.
    pub fn name(&self) -> String {
        format!("vhost-user:{}", self.socket.display())
    }
}

/// What others may see of a disk at one moment.
#[derive(Clone, Debug, Default)]
pub struct AttachedView {
    /// A back-end serves it.
    pub is_connected: bool,
    /// Connections that were made, this one included.
    pub sessions: u64,
    /// Rings that a back-end broke.
    pub faults: u64,
    /// Why the last connection was left.
    pub last_loss: Option<String>,
    /// What was agreed on.
    pub features: Features,
    /// The back-end keeps account of what is in flight, for the one after it.
    pub is_tracked: bool,
    /// Queues in use.
    pub queues: Vec<DriverQueueView>,
}

/// What the disk, its queues and its control thread have in common.
#[derive(Debug)]
pub(crate) struct SharedState {
    pub(crate) config: AttachConfig,
    capacity_sectors: AtomicU64,
    view: Mutex<AttachedView>,
}

impl SharedState {
    pub(crate) fn new(config: AttachConfig, capacity_sectors: u64) -> SharedState {
        SharedState { config, capacity_sectors: AtomicU64::new(capacity_sectors), view: Mutex::default() }
    }

    /// Notes what has changed.
    pub(crate) fn note(&self, change: impl FnOnce(&mut AttachedView)) {
        change(&mut self.view.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The disk has this size from now on. Returns what it had.
    pub(crate) fn set_capacity(&self, sectors: u64) -> u64 {
        self.capacity_sectors.swap(sectors, Ordering::Relaxed)
    }
}

/// A disk that a vhost-user-blk back-end serves.
///
/// It is let go of once this and all its queues are gone.
#[derive(Debug)]
pub struct Attached {
    shared: Arc<SharedState>,
    /// Until the end.
    line: Option<ControlSender>,
    info: DeviceInfo,
    queues: usize,
    depth: usize,
    features: Features,
    control: Option<JoinHandle<()>>,
}

impl Attached {
    /// Connects to the back-end and agrees on everything but memory. Takes no longer than the back-end's answers may.
    ///
    /// # Errors
    /// See [`AttachError`]: each names the socket, what is wrong and what helps.
    pub fn open(config: AttachConfig) -> Result<Attached, AttachError> {
        let path = config.socket.clone();
        let failed = |source| AttachError::System { path: path.clone(), source };
        let wake = Arc::new(EventFd::new().map_err(failed)?);
        let end = Arc::new(EventFd::new().map_err(failed)?);
        let (sender, orders) = channel();
        let control = Control::open(config, orders, &wake, &end)?;
        let (shared, mut disk) = (Arc::clone(control.shared()), control.disk().clone());
        disk.info.timeout_ns = shared.config.io_max.as_nanos().try_into().unwrap_or(u64::MAX);
        let (queues, depth) = (control.queues(), usize::from(disk.depth(shared.config.queue_size)));
        let thread = std::thread::Builder::new().name("attach".into());
        let thread = thread.spawn(move || control.run()).map_err(failed)?;
        let (line, control) = (Some(ControlSender::new(sender, &wake, &end)), Some(thread));
        Ok(Attached { shared, line, info: disk.info, queues, depth, features: disk.features, control })
    }

    /// What the disk was when it was attached.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Its size now, sectors: the back-end may tell of another one at any time.
    pub fn capacity_sectors(&self) -> u64 {
        self.shared.capacity_sectors.load(Ordering::Relaxed)
    }

    /// Queues that can be open at one time.
    pub fn queues_max(&self) -> usize {
        self.queues
    }

    /// Requests that one queue can have in flight.
    pub fn depth_max(&self) -> usize {
        self.depth
    }

    /// What was agreed on.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Whether its control thread has ended, which it does not by itself while this is there.
    pub fn is_finished(&self) -> bool {
        self.control.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// What there is to see.
    pub fn view(&self) -> AttachedView {
        self.shared.view.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Memory that queues will use, for as long as the disk is open. What is made before the first queue has memory is
    /// announced to the back-end with it, and changes nothing later. Each call takes one of the regions that a back-end
    /// can know, some as few as eight: one for all queues is best.
    ///
    /// # Errors
    /// The system has no room.
    pub fn memory(&self, bytes: usize) -> std::io::Result<Arc<Region>> {
        let region = Region::shared(bytes)?;
        if let Some(line) = &self.line {
            line.send(DeviceCommand::Reserve(Arc::clone(&region)));
        }
        Ok(region)
    }

    /// Opens one more queue of `depth` requests. One for polling never has the back-end call.
    ///
    /// # Errors
    /// All queues are open, the depth is more than a ring holds, or the back-end holds up the control thread.
    pub fn queue(&self, kind: QueueKind, depth: usize) -> Result<AttachedQueue, AttachError> {
        let path = self.shared.config.socket.clone();
        if depth > self.depth {
            return Err(AttachError::Depth { path, depth, room: self.depth });
        }
        let (answer, wait) = channel();
        let Some(line) = self.line.clone().filter(|line| line.send(DeviceCommand::Open(kind, answer))) else {
            return Err(AttachError::Ended { path });
        };
        // The conversation that is under way, and the one after it that a loss of the first begins.
        let limit = 2 * self.shared.config.reply_max;
        let opened = wait.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => AttachError::Busy { path, limit },
            RecvTimeoutError::Disconnected => AttachError::Ended { path },
        })??;
        Ok(AttachedQueue::new(opened, line))
    }
}

impl Drop for Attached {
    /// Lets the back-end go, if no queue is left to do so.
    fn drop(&mut self) {
        let is_last = self.line.take().is_some_and(|line| line.is_last());
        if let Some(control) = self.control.take().filter(|_| is_last) {
            // Whatever it waits for, it waits no longer.
            let _ = control.join();
        }
    }
}
