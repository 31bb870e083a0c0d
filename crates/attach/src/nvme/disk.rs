//! Namespaces of a controller as disks: opening and operations.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use blkyard_mem::DmaDomain;
use blkyard_mq::{DeviceInfo, QueueKind};
use blkyard_nvme::{NamespaceIds, ScannedNamespace};
use blkyard_sys::EventFd;

use crate::AttachError;
use crate::mailbox::ControlSender;
use crate::nvme::control::NvmeControl;
use crate::nvme::mailbox::NvmeCommand;
use crate::nvme::{HostParts, NamespaceConfig, NamespaceQueue, NvmeTransport};

/// Pools so far.
static POOLS: AtomicU64 = AtomicU64::new(0);

/// State of an attached namespace at one moment, for other threads.
#[derive(Clone, Debug, Default)]
pub struct NamespaceView {
    /// Whether its controller is connected.
    pub is_connected: bool,
    /// Whether its controller is shut down until it is resumed.
    pub is_suspended: bool,
    /// Number of connections that were made, this one included.
    pub sessions: u64,
    /// Number of late commands that were aborted.
    pub aborts: u64,
    /// Number of resets for late commands.
    pub resets: u64,
    /// Reason of the last loss.
    pub last_loss: Option<String>,
}

/// State shared by the disks of a controller and its control thread.
#[derive(Debug)]
pub(crate) struct NamespaceShared {
    pub(crate) config: NamespaceConfig,
    /// By index of the namespace.
    capacity_sectors: Box<[AtomicU64]>,
    depth: AtomicUsize,
    view: Mutex<NamespaceView>,
}

impl NamespaceShared {
    /// Records a change.
    pub(crate) fn note(&self, change: impl FnOnce(&mut NamespaceView)) {
        change(&mut self.view.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Sets the size of a disk, sectors. Returns the previous one.
    pub(crate) fn set_capacity(&self, index: usize, sectors: u64) -> u64 {
        self.capacity_sectors[index].swap(sectors, Relaxed)
    }

    /// Requests that a queue can have in flight; zero before there is one.
    pub(crate) fn depth(&self) -> usize {
        self.depth.load(Relaxed)
    }

    pub(crate) fn set_depth(&self, depth: usize) {
        self.depth.store(depth, Relaxed);
    }

    /// Reason of the last loss.
    pub(crate) fn last_loss(&self) -> Option<String> {
        self.view().last_loss
    }

    fn view(&self) -> NamespaceView {
        self.view.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A namespace that shares the queues of its controller with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePoolMember {
    /// Number of the controller, of all that this process opened.
    pub pool: u64,
    /// Number of the namespace among those opened with it.
    pub index: usize,
}

/// A namespace of an NVMe controller that is reached over a transport.
///
/// The controller is closed once all its namespaces and their queues are dropped.
#[derive(Debug)]
pub struct RemoteNamespace {
    shared: Arc<NamespaceShared>,
    domain: Arc<DmaDomain>,
    wake: Arc<EventFd>,
    end: Arc<EventFd>,
    /// Until the end.
    commands: Option<ControlSender<NvmeCommand>>,
    info: DeviceInfo,
    /// Index among the opened namespaces of its controller.
    index: usize,
    nsid: u32,
    ids: NamespaceIds,
    queues: usize,
    /// Set if a queue may serve several namespaces.
    pool: Option<u64>,
    control: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl RemoteNamespace {
    /// Opens the controller and brings it up.
    ///
    /// # Errors
    /// See [`AttachError`]: each names device, cause and cure.
    pub fn open<T: NvmeTransport>(
        transport: T::Config,
        config: NamespaceConfig,
    ) -> Result<RemoteNamespace, AttachError> {
        let nsid = config.namespace;
        let mut opened = RemoteNamespace::open_each::<T>(transport, config, &[nsid])?;
        Ok(opened.remove(0))
    }

    /// Opens the controller and brings it up, for several of its namespaces. Each may have as many queues as the
    /// configuration says. If the controller grants fewer, all namespaces share them: see
    /// [`queue_pool`](RemoteNamespace::queue_pool).
    ///
    /// # Errors
    /// See [`AttachError`]: each names device, cause and cure.
    ///
    /// # Panics
    /// If no namespace is named.
    pub fn open_all<T: NvmeTransport>(
        transport: T::Config,
        config: NamespaceConfig,
        namespaces: &[u32],
    ) -> Result<Vec<RemoteNamespace>, AttachError> {
        assert!(!namespaces.is_empty(), "no namespace is named");
        let namespaces: Vec<_> = namespaces.iter().copied().map(Some).collect();
        RemoteNamespace::open_each::<T>(transport, config, &namespaces)
    }

    fn open_each<T: NvmeTransport>(
        transport: T::Config,
        mut config: NamespaceConfig,
        namespaces: &[Option<u32>],
    ) -> Result<Vec<RemoteNamespace>, AttachError> {
        let count = namespaces.len();
        let demand = &mut config.host.queues;
        for queues in [&mut demand.submitters, &mut demand.write_queues, &mut demand.poll_queues] {
            *queues = queues.saturating_mul(count as u16);
        }
        let disk = config.options.name.clone();
        let failed = |source| AttachError::System { disk: disk.clone(), source };
        let wake = Arc::new(EventFd::new().map_err(failed)?);
        let end = Arc::new(EventFd::new().map_err(failed)?);
        let vectors = config.host.queues.total().saturating_add(1);
        let dma_changed = Arc::new(EventFd::new().map_err(failed)?);
        let parts = HostParts::new(vectors, dma_changed, Arc::clone(&end)).map_err(failed)?;
        let domain = Arc::clone(&parts.domain);
        let shared = NamespaceShared {
            config,
            capacity_sectors: namespaces.iter().map(|_| AtomicU64::new(0)).collect(),
            depth: AtomicUsize::new(0),
            view: Mutex::default(),
        };
        let shared = Arc::new(shared);
        let (sender, receiver) = channel();
        let control =
            NvmeControl::<T>::open(transport, namespaces, Arc::clone(&shared), parts, receiver, Arc::clone(&wake))?;
        let (found, queues) = (control.namespaces().to_vec(), control.share());
        let pool = control.shares_queues().then(|| POOLS.fetch_add(1, Relaxed));
        let thread = std::thread::Builder::new().name("nvme".into());
        let control = Arc::new(Mutex::new(Some(thread.spawn(move || control.run()).map_err(failed)?)));
        // The end of a controller is orderly: its waits are not cut short.
        let commands = ControlSender::new(sender, &wake, &wake);
        let options = &shared.config.options;
        let namespace = |(index, found): (usize, ScannedNamespace)| {
            let mut info = found.info;
            let nsid = found.namespace.nsid;
            info.name = if count > 1 { format!("{}?namespace={nsid}", options.name) } else { options.name.clone() };
            info.timeout_ns = options.io_max.as_nanos().try_into().unwrap_or(u64::MAX);
            RemoteNamespace {
                shared: Arc::clone(&shared),
                domain: Arc::clone(&domain),
                wake: Arc::clone(&wake),
                end: Arc::clone(&end),
                commands: Some(commands.clone()),
                info,
                index,
                nsid,
                ids: found.ids,
                queues,
                pool,
                control: Arc::clone(&control),
            }
        };
        Ok(found.into_iter().enumerate().map(namespace).collect())
    }

    /// Properties of the disk when it was attached.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Number of the namespace.
    pub fn nsid(&self) -> u32 {
        self.nsid
    }

    /// Identity of the namespace.
    pub fn ids(&self) -> &NamespaceIds {
        &self.ids
    }

    /// Its size now, sectors: the controller may tell of another one at any time.
    pub fn capacity_sectors(&self) -> u64 {
        self.shared.capacity_sectors[self.index].load(Relaxed)
    }

    /// Queues that can be open at one time; of all members together if it is in a pool.
    pub fn queues_max(&self) -> usize {
        self.queues
    }

    /// Which namespaces have their queues in common with this one, as the controller has too few for each to have its
    /// own. Unset if each has.
    pub fn queue_pool(&self) -> Option<QueuePoolMember> {
        self.pool.map(|pool| QueuePoolMember { pool, index: self.index })
    }

    /// Requests that one queue can have in flight.
    pub fn depth_max(&self) -> usize {
        self.shared.depth()
    }

    /// Whether its control thread has ended, which never happens by itself while this exists.
    pub fn is_finished(&self) -> bool {
        self.control.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// State for inspection.
    pub fn view(&self) -> NamespaceView {
        self.shared.view()
    }

    /// The memory that the controller knows. The owner of memory for several queues maps it here before they have it,
    /// and until they are done with it.
    pub fn dma_domain(&self) -> &Arc<DmaDomain> {
        &self.domain
    }

    /// Shuts the controller down, as before a machine sleeps or a device is taken out, or brings it up again. Requests
    /// in flight complete first; later ones of all namespaces wait without a limit.
    ///
    /// # Errors
    /// The controller is not connected, does not get there in time, or the opposite was asked for meanwhile. What was
    /// asked for last still holds.
    pub fn set_suspended(&self, is_suspended: bool) -> Result<(), AttachError> {
        self.ask(|answer| NvmeCommand::Suspend(is_suspended, answer))
    }

    /// Sends the control thread a command, and waits for its answer.
    fn ask<R>(&self, command: impl FnOnce(Sender<Result<R, AttachError>>) -> NvmeCommand) -> Result<R, AttachError> {
        let options = &self.shared.config.options;
        let disk = options.name.clone();
        let (answer, wait) = channel();
        if !self.commands.as_ref().is_some_and(|to| to.send(command(answer))) {
            return Err(AttachError::Ended { disk });
        }
        // The access that is under way, and the one after it that a loss of the first begins.
        let limit = 2 * options.reply_max;
        wait.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => AttachError::Busy { disk, limit },
            RecvTimeoutError::Disconnected => AttachError::Ended { disk },
        })?
    }

    /// Opens one more queue of `depth` requests. One for polling gets a queue without interrupts, if there is one.
    ///
    /// # Errors
    /// All queues are open, the depth is more than a ring holds, or the controller holds up the control thread.
    pub fn queue(&self, kind: QueueKind, depth: usize) -> Result<NamespaceQueue, AttachError> {
        self.queue_of(&[self.index], kind, depth)
    }

    /// The same for these members of its [pool](RemoteNamespace::queue_pool), whose requests number them in this order.
    ///
    /// # Errors
    /// As above.
    pub fn queue_of(&self, members: &[usize], kind: QueueKind, depth: usize) -> Result<NamespaceQueue, AttachError> {
        let options = &self.shared.config.options;
        let disk = options.name.clone();
        let room = self.depth_max();
        if depth > room {
            let cure = "lower the depth, or raise ?queue_size=N if the controller has longer queues".into();
            return Err(AttachError::Depth { disk, depth, room, cure });
        }
        let Some(commands) = self.commands.clone() else { return Err(AttachError::Ended { disk }) };
        let opened = self.ask(|answer| NvmeCommand::Open(members.into(), kind, answer))?;
        Ok(NamespaceQueue::new(opened, &self.domain, &self.wake, commands))
    }
}

impl Drop for RemoteNamespace {
    /// Shuts the controller down, if no queue or other namespace is left to do so.
    fn drop(&mut self) {
        let is_last = self.commands.take().is_some_and(|commands| commands.is_last());
        if Arc::strong_count(&self.control) == 1 && !self.shared.view().is_connected {
            // Nothing is to be shut down in order: ends a wait for the device.
            self.end.signal();
        }
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner).take_if(|_| is_last);
        if let Some(control) = control {
            let _ = control.join();
        }
    }
}
