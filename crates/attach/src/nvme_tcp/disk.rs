//! A namespace over TCP as a disk: opening and operations.

use std::fmt::Formatter;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use blkyard_mpath::{ConnectionState, PathMonitor};
use blkyard_mq::{DeviceInfo, QueueCounts, QueueKind};
use blkyard_nvme::{FabricsHostConfig, NamespaceIds, ScannedNamespace};
use blkyard_sys::EventFd;

use crate::AttachError;
use crate::mailbox::ControlSender;
use crate::nvme_tcp::admin_stream::{AdminConnector, SystemConnector};
use crate::nvme_tcp::control::TcpControl;
use crate::nvme_tcp::mailbox::{OpenedTcpQueue, TcpCommand};
use crate::nvme_tcp::peer::TcpPeer;
use crate::nvme_tcp::{TcpNamespaceConfig, TcpNamespaceQueue};

/// How long the control thread may take to open a queue. It never waits for the controller.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// State of an attached namespace at one moment, for other threads.
#[derive(Clone, Debug, Default)]
pub struct TcpNamespaceView {
    /// Whether the association is live.
    pub is_connected: bool,
    /// Number of associations that were live, this one included.
    pub sessions: u64,
    /// Reason of the last loss.
    pub last_loss: Option<String>,
}

/// State shared by the disk and its control thread.
#[derive(Debug)]
pub(super) struct TcpShared {
    capacity_sectors: AtomicU64,
    view: Mutex<TcpNamespaceView>,
    /// State and proofs of the association, for a device that has it as one of its paths.
    pub(super) monitor: Arc<PathMonitor>,
    /// Whether it is such a path: path errors end a request at once.
    pub(super) is_path: AtomicBool,
    /// The association, for the other paths to its device; and these.
    pub(super) peer: Arc<TcpPeer>,
    pub(super) peers: Mutex<Vec<Arc<TcpPeer>>>,
    /// Of a spare path: its name and the address of its port, once known.
    pub(super) port: OnceLock<(String, String)>,
    /// Wakes the control thread.
    wake: Arc<EventFd>,
}

impl TcpShared {
    fn new(config: &TcpNamespaceConfig, wake: &Arc<EventFd>) -> TcpShared {
        TcpShared {
            capacity_sectors: AtomicU64::new(0),
            view: Mutex::default(),
            monitor: Arc::default(),
            is_path: AtomicBool::new(false),
            peer: Arc::new(TcpPeer::new(config.host.subsystem.clone(), Arc::clone(wake))),
            peers: Mutex::default(),
            port: OnceLock::new(),
            wake: Arc::clone(wake),
        }
    }

    /// Records a change.
    pub(super) fn note(&self, change: impl FnOnce(&mut TcpNamespaceView)) {
        change(&mut self.view.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The size, sectors; zero before it is known.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity_sectors.load(Relaxed)
    }

    /// Sets the size, sectors. Returns the previous one.
    pub(super) fn set_capacity(&self, sectors: u64) -> u64 {
        self.capacity_sectors.swap(sectors, Relaxed)
    }
}

/// Whether a namespace that is found later is the awaited one: the size of the disk now, sectors; properties and
/// identity of what was found. The error is cause and cure.
pub type AcceptNamespace = dyn Fn(u64, &DeviceInfo, &NamespaceIds) -> Result<(), String> + Send;

/// A namespace that is known from elsewhere, while its controller does not answer.
pub struct LateNamespace {
    /// Properties that users of the disk rely on.
    pub info: DeviceInfo,
    /// Queues and requests in each that they may have open.
    pub queues: usize,
    /// Requests in a queue.
    pub depth: usize,
    /// Why the controller could not be reached.
    pub why: String,
    /// Asked once the controller answers. What is refused is not used, and looked at again after a pause.
    pub accepts: Box<AcceptNamespace>,
}

/// What a control thread has to check of a namespace that was late.
pub(super) struct AwaitedNamespace {
    pub(super) late: LateNamespace,
    /// The disk that it is known from.
    pub(super) beside: Arc<TcpShared>,
}

impl std::fmt::Debug for AwaitedNamespace {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AwaitedNamespace").field("info", &self.late.info).finish_non_exhaustive()
    }
}

/// A way to a namespace that has no port yet, for the one who learns of ports. Does not keep it open.
#[derive(Clone, Debug)]
pub struct TcpSparePath(Arc<TcpShared>);

impl TcpSparePath {
    /// Connects it in the background to a port at `HOST:PORT`, with this name from now on. Without effect if it has
    /// one.
    pub fn connect(&self, name: &str, address: &str) {
        if self.0.port.set((name.to_owned(), address.to_owned())).is_ok() {
            self.0.wake.signal();
        }
    }

    /// Its name, once it has a port.
    pub fn name(&self) -> Option<String> {
        self.0.port.get().map(|(name, _)| name.clone())
    }
}

/// A namespace of an NVMe controller over TCP.
///
/// The association ends once this and all its queues are dropped.
#[derive(Debug)]
pub struct TcpNamespace {
    shared: Arc<TcpShared>,
    /// Until the end.
    commands: Option<ControlSender<TcpCommand>>,
    config: TcpNamespaceConfig,
    /// The namespace as it was found.
    found: ScannedNamespace,
    counts: QueueCounts,
    depth: usize,
    control: Mutex<Option<JoinHandle<()>>>,
}

impl TcpNamespace {
    /// Connects to the controller and brings it up.
    ///
    /// # Errors
    /// See [`AttachError`]: each names device, cause and cure.
    pub fn open(config: TcpNamespaceConfig) -> Result<TcpNamespace, AttachError> {
        let (mut control, sender) = TcpNamespace::control_of_system(config)?;
        control.open()?;
        TcpNamespace::of(&control, sender).run(control)
    }

    fn control_of_system(config: TcpNamespaceConfig) -> Result<(TcpControl, ControlSender<TcpCommand>), AttachError> {
        let connector = SystemConnector { tls: config.host.tls.clone() };
        TcpNamespace::control(config, Box::new(connector))
    }

    /// The control side of a new association, and the way to it.
    pub(super) fn control(
        config: TcpNamespaceConfig,
        connector: Box<dyn AdminConnector>,
    ) -> Result<(TcpControl, ControlSender<TcpCommand>), AttachError> {
        let failed = |source| AttachError::System { disk: config.name.clone(), source };
        let wake = Arc::new(EventFd::new().map_err(failed)?);
        let shared = Arc::new(TcpShared::new(&config, &wake));
        let (sender, receiver) = channel();
        let sender = ControlSender::new(sender, &wake, &wake);
        Ok((TcpControl::new(config, shared, receiver, connector, wake), sender))
    }

    /// The disk of an association that has found its namespace.
    pub(super) fn of(control: &TcpControl, commands: ControlSender<TcpCommand>) -> TcpNamespace {
        let (Some(found), Some(counts)) = (control.namespace().cloned(), control.counts()) else {
            unreachable!("the controller is live")
        };
        TcpNamespace::with(control, commands, found, counts, control.depth())
    }

    fn with(
        control: &TcpControl,
        commands: ControlSender<TcpCommand>,
        mut found: ScannedNamespace,
        counts: QueueCounts,
        depth: usize,
    ) -> TcpNamespace {
        let config = control.config.clone();
        (found.info.name, found.info.timeout_ns) = (config.name.clone(), config.io_max_ns);
        found.info.silence_ns = control.silence_ns();
        let shared = Arc::clone(&control.shared);
        TcpNamespace { shared, commands: Some(commands), config, found, counts, depth, control: Mutex::new(None) }
    }

    /// Another way to the namespace of `beside`, whose controller does not answer. It is connected in the background,
    /// as after a loss. Its queues can be opened at once.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn later(
        config: TcpNamespaceConfig,
        beside: &TcpNamespace,
        late: LateNamespace,
    ) -> Result<TcpNamespace, AttachError> {
        let (mut control, namespace) = TcpNamespace::late(config, beside, late)?;
        control.shared.monitor.change(|state| state.connection = ConnectionState::Connecting);
        control.start();
        namespace.run(control)
    }

    /// The same for a port that is not known yet: it is connected once [`TcpSparePath::connect`] is called. Until then
    /// it is a path that cannot come back. The address of `config` is not used.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn spare(
        config: TcpNamespaceConfig,
        beside: &TcpNamespace,
        late: LateNamespace,
    ) -> Result<(TcpNamespace, TcpSparePath), AttachError> {
        let (mut control, namespace) = TcpNamespace::late(config, beside, late)?;
        control.shared.monitor.change(|state| state.connection = ConnectionState::Dead);
        control.awaits_port = true;
        let spare = TcpSparePath(Arc::clone(&control.shared));
        Ok((namespace.run(control)?, spare))
    }

    fn late(
        config: TcpNamespaceConfig,
        beside: &TcpNamespace,
        late: LateNamespace,
    ) -> Result<(TcpControl, TcpNamespace), AttachError> {
        let (mut control, sender) = TcpNamespace::control_of_system(config)?;
        control.shared.note(|view| view.last_loss = Some(late.why.clone()));
        let (counts, depth) = (beside.counts, late.depth);
        let found = ScannedNamespace { info: late.info.clone(), ..beside.found.clone() };
        control.wait_for(found.clone(), AwaitedNamespace { late, beside: Arc::clone(&beside.shared) }, counts);
        let namespace = TcpNamespace::with(&control, sender, found, counts, depth);
        Ok((control, namespace))
    }

    /// Starts the control thread.
    fn run(self, control: TcpControl) -> Result<TcpNamespace, AttachError> {
        let failed = |source| AttachError::System { disk: self.config.name.clone(), source };
        let thread = std::thread::Builder::new().name("nvme-tcp".into());
        let thread = thread.spawn(move || control.run()).map_err(failed)?;
        *self.control.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(self)
    }

    /// Properties of the disk when it was attached.
    pub fn info(&self) -> &DeviceInfo {
        &self.found.info
    }

    /// Number of the namespace.
    pub fn nsid(&self) -> u32 {
        self.found.namespace.nsid
    }

    /// Its identity.
    pub fn ids(&self) -> &NamespaceIds {
        &self.found.ids
    }

    /// Makes it one of several paths to a device. Queues that are opened later end a request at once if the controller
    /// refuses it on this path. Returns the state of the path.
    pub fn as_path(&self) -> Arc<PathMonitor> {
        self.shared.is_path.store(true, Relaxed);
        Arc::clone(&self.shared.monitor)
    }

    /// Its association, for other paths to the same device.
    pub fn peer(&self) -> &Arc<TcpPeer> {
        &self.shared.peer
    }

    /// Sets the associations that are other paths to the same device. Those with the same subsystem are asked to have
    /// the controller reset when the association is lost.
    pub fn set_peers(&self, peers: &[Arc<TcpPeer>]) {
        let own = &self.shared.peer;
        let others = peers.iter().filter(|peer| !Arc::ptr_eq(peer, own) && peer.is_of(&self.config.host.subsystem));
        *self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner) = others.cloned().collect();
    }

    /// Its size now, sectors: the controller may tell of another one at any time. Zero before the first connection.
    pub fn capacity_sectors(&self) -> u64 {
        self.shared.capacity()
    }

    /// Queues that can be open at one time.
    pub fn queues_max(&self) -> usize {
        self.counts.total()
    }

    /// Requests that one queue can have in flight.
    pub fn depth_max(&self) -> usize {
        self.depth
    }

    /// Whether its control thread has ended, which never happens by itself while this exists.
    pub fn is_finished(&self) -> bool {
        self.control.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// State for inspection.
    pub fn view(&self) -> TcpNamespaceView {
        self.shared.view.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Opens one more queue of `depth` requests.
    ///
    /// # Errors
    /// All queues are open, or the depth is more than the controller allows.
    pub fn queue(&self, kind: QueueKind, depth: usize) -> Result<TcpNamespaceQueue, AttachError> {
        self.begin_queue(kind, depth)?.wait(ANSWER_MAX)
    }

    /// The same without a wait for the control side.
    ///
    /// # Errors
    /// The depth is more than the controller allows.
    pub fn begin_queue(&self, kind: QueueKind, depth: usize) -> Result<TcpQueueOpening, AttachError> {
        let (disk, room) = (self.config.name.clone(), self.depth);
        if depth > room {
            let cure = "lower the depth, or raise ?queue_size=N if the controller has longer queues".into();
            return Err(AttachError::Depth { disk, depth, room, cure });
        }
        let (answer, wait) = channel();
        let Some(commands) = self.commands.clone().filter(|to| to.send(TcpCommand::Open(kind, answer))) else {
            return Err(AttachError::Ended { disk });
        };
        Ok(TcpQueueOpening { disk, wait, commands, host: self.config.host.clone() })
    }
}

/// A queue that is being opened.
#[derive(Debug)]
pub struct TcpQueueOpening {
    disk: String,
    wait: Receiver<Result<OpenedTcpQueue, AttachError>>,
    commands: ControlSender<TcpCommand>,
    host: FabricsHostConfig,
}

impl TcpQueueOpening {
    /// Waits for the control side.
    ///
    /// # Errors
    /// All queues are open, or there is no answer in this time.
    pub fn wait(self, limit: Duration) -> Result<TcpNamespaceQueue, AttachError> {
        let TcpQueueOpening { disk, wait, commands, host } = self;
        let opened = wait.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => AttachError::Busy { disk, limit },
            RecvTimeoutError::Disconnected => AttachError::Ended { disk },
        })??;
        Ok(TcpNamespaceQueue::new(opened, commands, host.connect_ns, host.tls))
    }
}

impl Drop for TcpNamespace {
    /// Disconnects, if no queue is left to do so.
    fn drop(&mut self) {
        let is_last = self.commands.take().is_some_and(|commands| commands.is_last());
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner).take_if(|_| is_last);
        if let Some(control) = control {
            let _ = control.join();
        }
    }
}
