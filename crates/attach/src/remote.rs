//! The disk that a back-end serves: opening and operations, for any protocol.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::JoinHandle;

use blkyard_mem::{DmaDomain, Region};
use blkyard_mq::{DeviceInfo, QueueKind};
use blkyard_sys::EventFd;

use crate::AttachError;
use crate::control::{Control, Discovered};
use crate::mailbox::{ControlSender, DeviceCommand};
use crate::protocol::{RemoteOptions, RemoteSession};
use crate::queue::RemoteQueue;
use crate::shared::{AttachedView, SharedState};

/// A disk that a back-end serves.
///
/// Closed once this and all its queues are dropped.
#[derive(Debug)]
pub struct RemoteDisk<S: RemoteSession> {
    shared: Arc<SharedState>,
    domain: Arc<DmaDomain>,
    /// Until the end.
    commands: Option<ControlSender<DeviceCommand<S::Ring>>>,
    info: DeviceInfo,
    agreed: S::Agreed,
    queues: usize,
    depth_max: usize,
    control: Option<JoinHandle<()>>,
}

impl<S: RemoteSession> RemoteDisk<S> {
    /// Connects to the back-end and agrees on everything but memory.
    pub(crate) fn connect(config: S::Config, options: RemoteOptions) -> Result<RemoteDisk<S>, AttachError> {
        let disk = options.name.clone();
        let failed = |source| AttachError::System { disk: disk.clone(), source };
        let wake = Arc::new(EventFd::new().map_err(failed)?);
        let end = Arc::new(EventFd::new().map_err(failed)?);
        let (sender, receiver) = channel();
        let (control, found) = Control::<S>::open(config, options, receiver, &wake, &end)?;
        let Discovered { shared, domain, mut info, agreed, queues, depth_max } = found;
        info.timeout_ns = shared.options.io_max.as_nanos().try_into().unwrap_or(u64::MAX);
        let thread = std::thread::Builder::new().name("attach".into());
        let control = Some(thread.spawn(move || control.run()).map_err(failed)?);
        let commands = Some(ControlSender::new(sender, &wake, &end));
        Ok(RemoteDisk { shared, domain, commands, info, agreed, queues, depth_max, control })
    }

    /// Properties of the disk when it was attached.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Result of the first negotiation, valid for all sessions.
    pub(crate) fn agreed(&self) -> &S::Agreed {
        &self.agreed
    }

    /// Its size now, sectors: the back-end may tell of another one at any time.
    pub fn capacity_sectors(&self) -> u64 {
        self.shared.capacity()
    }

    /// Queues that can be open at one time.
    pub fn queues_max(&self) -> usize {
        self.queues
    }

    /// Requests that one queue can have in flight.
    pub fn depth_max(&self) -> usize {
        self.depth_max
    }

    /// Whether its control thread has ended, which never happens by itself while this exists.
    pub fn is_finished(&self) -> bool {
        self.control.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// State for inspection.
    pub fn view(&self) -> AttachedView {
        self.shared.view()
    }

    /// The memory that the back-end knows. The owner of memory for several queues maps it here before they have it, and
    /// until they are done with it: then the back-end hears of it once, and not whenever a queue stops.
    pub fn dma_domain(&self) -> &Arc<DmaDomain> {
        &self.domain
    }

    /// Memory that queues will use, for as long as the disk is open. Memory made before the first queue has memory is
    /// announced to the back-end together with it, and needs no later change. Each call takes one of the regions that a
    /// back-end can know, some as few as eight: use one for all queues.
    ///
    /// # Errors
    /// The system has no room.
    pub fn memory(&self, bytes: usize) -> std::io::Result<Arc<Region>> {
        let region = Region::shared(bytes)?;
        if let Some(commands) = &self.commands {
            commands.send(DeviceCommand::Reserve(Arc::clone(&region)));
        }
        Ok(region)
    }

    /// Opens one more queue of `depth` requests. One for polling never has the back-end call.
    ///
    /// # Errors
    /// All queues are open, the depth is more than a ring holds, or the back-end holds up the control thread.
    pub fn queue(&self, kind: QueueKind, depth: usize) -> Result<RemoteQueue<S::Ring>, AttachError> {
        let disk = self.shared.options.name.clone();
        if depth > self.depth_max {
            return Err(AttachError::Depth { disk, depth, room: self.depth_max, cure: S::depth_cure() });
        }
        let (answer, wait) = channel();
        let Some(commands) = self.commands.clone().filter(|to| to.send(DeviceCommand::Open(kind, answer))) else {
            return Err(AttachError::Ended { disk });
        };
        // The conversation that is under way, and the one after it that a loss of the first begins.
        let limit = 2 * self.shared.options.reply_max;
        let opened = wait.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => AttachError::Busy { disk, limit },
            RecvTimeoutError::Disconnected => AttachError::Ended { disk },
        })??;
        Ok(RemoteQueue::new(opened, &self.domain, commands))
    }
}

impl<S: RemoteSession> Drop for RemoteDisk<S> {
    /// Lets the back-end go, if no queue is left to do so.
    fn drop(&mut self) {
        let is_last = self.commands.take().is_some_and(|commands| commands.is_last());
        if let Some(control) = self.control.take().filter(|_| is_last) {
            // The end event ends all its waits.
            let _ = control.join();
        }
    }
}
