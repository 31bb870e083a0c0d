//! The protocols of exports, side by side: pollers and handles whose protocol is known at run time only.
//!
//! A lane serves exports of all protocols. The protocol of a poller is looked up once a round, never for an I/O.
//! Control handles forward each call to the handle of their protocol.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use blkyard::DeviceQueue;
use blkyard_export::{
    Changed, DetachedQueue, DetachedVirtqueue, ExportHand, ExportState, ExportStatus, FrontEndSession, Handed,
    HwQueueSet, NvmeQueuePoller, NvmeQueueRemote, NvmeQueueSession, NvmeTcpQueuePoller, NvmeTcpQueueRemote,
    NvmeTcpQueueSession, NvmeTcpServer, NvmeTcpSession, NvmeTcpState, NvmeTcpView, PartError, QueueMover, QueueRemote,
    QueueSession, QueueView, QueueWatch, Server, SessionState, SessionView, VfioSessionState, VfioSessionView,
    VfioUserServer, VfioUserSession, VhostUserServer, VhostUserSession, VirtqueueMover, VirtqueuePoller,
    VirtqueueRemote, VirtqueueSession, VirtqueueWatch,
};
use blkyard_mq::{DeviceInfo, HwStats, Poller, PollerState, RateLimit, SchedulerConfig, Wake};
use blkyard_virtio::SerialId;

/// A value of the type that one of the protocols has.
#[derive(Clone, Copy, Debug)]
pub enum ByProtocol<V, N, T> {
    /// vhost-user-blk.
    VhostUser(V),
    /// NVMe over vfio-user.
    VfioUser(N),
    /// NVMe over TCP.
    NvmeTcp(T),
}

/// Evaluates the same expression for the value of any protocol.
macro_rules! either {
    ($value:expr, $inner:pat => $result:expr) => {
        match $value {
            ByProtocol::VhostUser($inner) => $result,
            ByProtocol::VfioUser($inner) => $result,
            ByProtocol::NvmeTcp($inner) => $result,
        }
    };
}

/// Names of protocols.
pub type Protocol = ByProtocol<(), (), ()>;
/// A hardware queue with the client queues that feed it, as a poller of a lane.
pub type ServedPoller =
    ByProtocol<VirtqueuePoller<DeviceQueue>, NvmeQueuePoller<DeviceQueue>, NvmeTcpQueuePoller<DeviceQueue>>;
/// A client queue without a hardware queue.
pub type DetachedClient =
    ByProtocol<DetachedVirtqueue, DetachedQueue<NvmeQueueSession>, DetachedQueue<NvmeTcpQueueSession>>;
/// Handle for the placement of a client queue.
pub type ClientMover = ByProtocol<VirtqueueMover, QueueMover<NvmeQueueSession>, QueueMover<NvmeTcpQueueSession>>;
/// Handle for the inspection of a client queue.
pub type ClientWatch = ByProtocol<VirtqueueWatch, QueueWatch<NvmeQueueSession>, QueueWatch<NvmeTcpQueueSession>>;
/// The control path's ends of new client queues of an export.
pub type ClientRemotes = ByProtocol<Vec<VirtqueueRemote>, Vec<NvmeQueueRemote>, Vec<NvmeTcpQueueRemote>>;
/// A serving export.
pub type ServedServer = ByProtocol<VhostUserServer, VfioUserServer, NvmeTcpServer>;
/// State of a session that is handed over.
pub type ClientSessionState = ByProtocol<SessionState, VfioSessionState, NvmeTcpState>;
/// State of an export that is handed over.
pub type ClientState = ExportState<ClientSessionState>;
/// Handle to inspect and change an export.
pub type ServedFrontEnd =
    ByProtocol<FrontEndHandle<VhostUserSession>, FrontEndHandle<VfioUserSession>, FrontEndHandle<NvmeTcpSession>>;
/// State of the session of an export.
pub type ClientView = ByProtocol<SessionView, VfioSessionView, NvmeTcpView>;

impl Protocol {
    /// The protocol of an export with this scheme.
    pub fn of_scheme(scheme: &str) -> Option<Protocol> {
        match scheme {
            "vhost-user-blk" => Some(Protocol::VhostUser(())),
            "vfio-user" => Some(Protocol::VfioUser(())),
            "nvme-tcp" => Some(Protocol::NvmeTcp(())),
            _ => None,
        }
    }
}

impl<Cx: ?Sized, V: Poller<Cx>, N: Poller<Cx>, T: Poller<Cx>> Poller<Cx> for ByProtocol<V, N, T> {
    fn enter(&mut self, cx: &mut Cx, waker: &Arc<dyn Wake>) {
        either!(self, poller => poller.enter(cx, waker));
    }

    fn leave(&mut self, cx: &mut Cx) -> bool {
        either!(self, poller => poller.leave(cx))
    }

    fn stay(&mut self) {
        either!(self, poller => poller.stay());
    }

    fn set_turn_bytes(&mut self, bytes: u64) {
        either!(self, poller => poller.set_turn_bytes(bytes));
    }

    #[inline]
    fn run_once(&mut self, cx: &mut Cx, now_ns: u64) -> PollerState {
        either!(self, poller => poller.run_once(cx, now_ns))
    }

    fn arm(&mut self) -> bool {
        either!(self, poller => poller.arm())
    }

    fn disarm(&mut self) {
        either!(self, poller => poller.disarm());
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        either!(self, poller => poller.eventfd())
    }

    fn device_eventfd(&self) -> Option<BorrowedFd<'_>> {
        either!(self, poller => poller.device_eventfd())
    }

    fn deadline_ns(&self) -> Option<u64> {
        either!(self, poller => poller.deadline_ns())
    }

    fn served(&self) -> u64 {
        either!(self, poller => poller.served())
    }

    fn tick(&mut self, now_ns: u64) {
        either!(self, poller => poller.tick(now_ns));
    }

    fn is_over(&self) -> bool {
        either!(self, poller => poller.is_over())
    }
}

/// The client queue of a protocol, as a daemon makes it.
pub trait ServedQueue: QueueSession {
    /// The identity of a disk with this serial number.
    fn identity(serial: SerialId) -> Self::Identity;

    /// A detached queue among those of all protocols.
    fn detached(queue: DetachedQueue<Self>) -> DetachedClient;

    /// A mover among those of all protocols.
    fn mover(mover: QueueMover<Self>) -> ClientMover;

    /// A watch among those of all protocols.
    fn watch(watch: QueueWatch<Self>) -> ClientWatch;
}

impl ServedQueue for VirtqueueSession {
    fn identity(serial: SerialId) -> SerialId {
        serial
    }

    fn detached(queue: DetachedVirtqueue) -> DetachedClient {
        ByProtocol::VhostUser(queue)
    }

    fn mover(mover: VirtqueueMover) -> ClientMover {
        ByProtocol::VhostUser(mover)
    }

    fn watch(watch: VirtqueueWatch) -> ClientWatch {
        ByProtocol::VhostUser(watch)
    }
}

impl ServedQueue for NvmeQueueSession {
    /// The controller has the serial number.
    fn identity(_serial: SerialId) {}

    fn detached(queue: DetachedQueue<NvmeQueueSession>) -> DetachedClient {
        ByProtocol::VfioUser(queue)
    }

    fn mover(mover: QueueMover<NvmeQueueSession>) -> ClientMover {
        ByProtocol::VfioUser(mover)
    }

    fn watch(watch: QueueWatch<NvmeQueueSession>) -> ClientWatch {
        ByProtocol::VfioUser(watch)
    }
}

impl ServedQueue for NvmeTcpQueueSession {
    /// The controller has the serial number.
    fn identity(_serial: SerialId) {}

    fn detached(queue: DetachedQueue<NvmeTcpQueueSession>) -> DetachedClient {
        ByProtocol::NvmeTcp(queue)
    }

    fn mover(mover: QueueMover<NvmeTcpQueueSession>) -> ClientMover {
        ByProtocol::NvmeTcp(mover)
    }

    fn watch(watch: QueueWatch<NvmeTcpQueueSession>) -> ClientWatch {
        ByProtocol::NvmeTcp(watch)
    }
}

impl DetachedClient {
    /// A poller of this client queue on these hardware queues.
    pub(crate) fn into_poller(self, hw: HwQueueSet<DeviceQueue>) -> ServedPoller {
        match self {
            ByProtocol::VhostUser(queue) => ByProtocol::VhostUser(VirtqueuePoller::of_detached(hw, queue)),
            ByProtocol::VfioUser(queue) => ByProtocol::VfioUser(NvmeQueuePoller::of_detached(hw, queue)),
            ByProtocol::NvmeTcp(queue) => ByProtocol::NvmeTcp(NvmeTcpQueuePoller::of_detached(hw, queue)),
        }
    }
}

impl ClientMover {
    /// See [`QueueMover::part`].
    pub(crate) fn part(&self, drain: Duration, answer: Duration) -> Result<DetachedClient, PartError> {
        match self {
            ByProtocol::VhostUser(mover) => mover.part(drain, answer).map(ByProtocol::VhostUser),
            ByProtocol::VfioUser(mover) => mover.part(drain, answer).map(ByProtocol::VfioUser),
            ByProtocol::NvmeTcp(mover) => mover.part(drain, answer).map(ByProtocol::NvmeTcp),
        }
    }

    /// See [`QueueMover::adopt`]. The other queue must be of the same export, and so of the same protocol.
    pub(crate) fn adopt(
        &self,
        detached: DetachedClient,
        answer: Duration,
    ) -> Result<(), (PartError, Option<DetachedClient>)> {
        match (self, detached) {
            (ByProtocol::VhostUser(mover), ByProtocol::VhostUser(queue)) => {
                mover.adopt(queue, answer).map_err(|(error, back)| (error, back.map(ByProtocol::VhostUser)))
            }
            (ByProtocol::VfioUser(mover), ByProtocol::VfioUser(queue)) => {
                mover.adopt(queue, answer).map_err(|(error, back)| (error, back.map(ByProtocol::VfioUser)))
            }
            (ByProtocol::NvmeTcp(mover), ByProtocol::NvmeTcp(queue)) => {
                mover.adopt(queue, answer).map_err(|(error, back)| (error, back.map(ByProtocol::NvmeTcp)))
            }
            _ => unreachable!("the queues of an export have one protocol"),
        }
    }
}

impl ClientWatch {
    /// See [`QueueWatch::stats`].
    pub fn stats(&self) -> &[Arc<HwStats>] {
        either!(self, watch => watch.stats())
    }

    /// Counts of invalid requests, by reason. An NVMe controller does not count them; it has them in its error log.
    pub fn refusals(&self) -> Vec<(&'static str, u64)> {
        match self {
            ByProtocol::VhostUser(watch) => watch.refusals().into_iter().flat_map(|counts| counts.iter()).collect(),
            ByProtocol::VfioUser(_) | ByProtocol::NvmeTcp(_) => Vec::new(),
        }
    }

    /// See [`QueueWatch::is_open`].
    pub fn is_open(&self) -> bool {
        either!(self, watch => watch.is_open())
    }

    /// See [`QueueWatch::look`].
    pub fn look(&self) -> Option<Receiver<QueueView>> {
        either!(self, watch => watch.look())
    }
}

impl ClientRemotes {
    /// Handles for their inspection.
    pub(crate) fn watches(&self) -> Vec<ClientWatch> {
        fn all<S: ServedQueue>(remotes: &[QueueRemote<S>]) -> Vec<ClientWatch> {
            remotes.iter().map(|remote| S::watch(remote.watch())).collect()
        }
        either!(self, remotes => all(remotes))
    }
}

impl ServedServer {
    /// See [`Server::ask_to_stop`].
    pub fn ask_to_stop(&self) {
        either!(self, server => server.ask_to_stop());
    }

    /// See [`Server::is_finished`].
    pub fn is_finished(&self) -> bool {
        either!(self, server => server.is_finished())
    }

    /// See [`Server::join`].
    pub fn join(self) {
        either!(self, server => server.join());
    }
}

/// Handle to inspect and change an export of one protocol.
pub struct FrontEndHandle<F: FrontEndSession> {
    status: Arc<ExportStatus<F::View>>,
    hand: ExportHand<F>,
}

impl<F: FrontEndSession> FrontEndHandle<F> {
    /// The handle of this export.
    pub(crate) fn of(server: &Server<F>) -> FrontEndHandle<F> {
        FrontEndHandle { status: Arc::clone(server.status()), hand: server.hand().clone() }
    }
}

impl ServedFrontEnd {
    /// The protocol of the export.
    pub fn protocol(&self) -> Protocol {
        match self {
            ByProtocol::VhostUser(_) => Protocol::VhostUser(()),
            ByProtocol::VfioUser(_) => Protocol::VfioUser(()),
            ByProtocol::NvmeTcp(_) => Protocol::NvmeTcp(()),
        }
    }

    /// See [`ExportStatus::log_held_back`].
    pub fn log_held_back(&self) {
        either!(self, front_end => front_end.status.log_held_back());
    }

    /// See [`ExportStatus::is_connected`].
    pub fn is_connected(&self) -> bool {
        either!(self, front_end => front_end.status.is_connected())
    }

    /// See [`ExportStatus::sessions`].
    pub fn sessions(&self) -> u64 {
        either!(self, front_end => front_end.status.sessions())
    }

    /// See [`ExportStatus::offered`].
    pub fn offered(&self) -> u16 {
        either!(self, front_end => front_end.status.offered())
    }

    /// See [`ExportStatus::depth`].
    pub fn depth(&self) -> Option<usize> {
        either!(self, front_end => front_end.status.depth())
    }

    /// See [`ExportStatus::session`].
    pub fn session(&self) -> Option<ClientView> {
        match self {
            ByProtocol::VhostUser(front_end) => front_end.status.session().map(ByProtocol::VhostUser),
            ByProtocol::VfioUser(front_end) => front_end.status.session().map(ByProtocol::VfioUser),
            ByProtocol::NvmeTcp(front_end) => front_end.status.session().map(ByProtocol::NvmeTcp),
        }
    }

    /// See [`ExportHand::change`].
    pub fn change(&self, device: u16, info: Arc<DeviceInfo>) -> Receiver<Result<Changed, String>> {
        either!(self, front_end => front_end.hand.change(device, info))
    }

    /// See [`ExportHand::set_depth`].
    pub fn set_depth(&self, depth: usize) -> Receiver<Result<usize, String>> {
        either!(self, front_end => front_end.hand.set_depth(depth))
    }

    /// See [`ExportHand::schedule`].
    pub fn schedule(&self, device: u16, config: SchedulerConfig) -> Receiver<Result<(), String>> {
        either!(self, front_end => front_end.hand.schedule(device, config))
    }

    /// See [`ExportHand::set_rates`].
    pub fn set_rates(&self, device: u16, limits: Vec<Arc<RateLimit>>) -> Receiver<Result<(), String>> {
        either!(self, front_end => front_end.hand.set_rates(device, limits))
    }

    /// See [`ExportHand::offer`]. The queues must be of this export, and so of its protocol.
    pub fn offer(&self, queues: u16, more: ClientRemotes) -> Receiver<Result<Changed, String>> {
        match (self, more) {
            (ByProtocol::VhostUser(front_end), ByProtocol::VhostUser(more)) => front_end.hand.offer(queues, more),
            (ByProtocol::VfioUser(front_end), ByProtocol::VfioUser(more)) => front_end.hand.offer(queues, more),
            (ByProtocol::NvmeTcp(front_end), ByProtocol::NvmeTcp(more)) => front_end.hand.offer(queues, more),
            _ => unreachable!("the queues of an export have one protocol"),
        }
    }

    /// See [`ExportHand::hears`].
    pub fn hears(&self) -> Receiver<()> {
        either!(self, front_end => front_end.hand.hears())
    }

    /// See [`ExportHand::hand_over`].
    pub fn hand_over(&self) -> ExportHandover {
        ExportHandover(match self {
            ByProtocol::VhostUser(front_end) => ByProtocol::VhostUser(front_end.hand.hand_over()),
            ByProtocol::VfioUser(front_end) => ByProtocol::VfioUser(front_end.hand.hand_over()),
            ByProtocol::NvmeTcp(front_end) => ByProtocol::NvmeTcp(front_end.hand.hand_over()),
        })
    }
}

type HandedBy<F> = Receiver<Result<Handed<<F as FrontEndSession>::State>, String>>;

/// The pending handover of an export.
pub struct ExportHandover(ByProtocol<HandedBy<VhostUserSession>, HandedBy<VfioUserSession>, HandedBy<NvmeTcpSession>>);

impl ExportHandover {
    /// The state of the drained export; `None` if it is not drained in time.
    pub(crate) fn wait(self, limit: Duration) -> Option<Result<Handed<ClientSessionState>, String>> {
        fn wait<T, U>(
            answer: &Receiver<Result<Handed<T>, String>>,
            limit: Duration,
            session_of: impl FnOnce(T) -> U,
        ) -> Option<Result<Handed<U>, String>> {
            let handed = answer.recv_timeout(limit).ok()?;
            Some(handed.map(|Handed { state, rest }| Handed { state: state.map_session(session_of), rest }))
        }
        match self.0 {
            ByProtocol::VhostUser(answer) => wait(&answer, limit, ByProtocol::VhostUser),
            ByProtocol::VfioUser(answer) => wait(&answer, limit, ByProtocol::VfioUser),
            ByProtocol::NvmeTcp(answer) => wait(&answer, limit, ByProtocol::NvmeTcp),
        }
    }
}
