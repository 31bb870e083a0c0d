//! One export: accepts one front-end after another, and has its protocol handle their messages.
//!
//! ```text
//!              a connection                       an order to hand over
//!   waiting ─────────────────▶ connected ───────────────────────────────▶ quiesced ─▶ over, if another continues
//!      ▲                        │     ▲                                      │
//!      └── the front-end left ──┘     └──────── resumes its last state ──────┘
//! ```
//!
//! While a front-end is connected, the next one waits in the socket's backlog, which is logged. When a front-end leaves
//! or sends an invalid message, its queues drain and its memory is released before the next one is served. Between two
//! messages, or while no front-end is connected, the export executes orders (see [`super::orders`]).
//!
//! It is an [`Endpoint`] of a control loop: a step waits only for its own queues and for the receiver.

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blkyard_sys::{EventFlags, PollFlags, is_ready};

use super::control_loop::{AwaitedFd, ControlLoop, Endpoint, EndpointCaller, EndpointEnd, EndpointState};
use super::front_end::{ExportConfig, ExportedDisk, FrontEndSession, SessionEnd, SessionStep};
use super::handover::{ExportState, Handed, QuiescedExport};
use super::log::ExportLog;
use super::orders::{Changed, ExportCommand, ExportCommands, ExportHand, orders};
use super::queue::QueueRemote;
use super::socket::BoundSocket;
use super::waiters::Waiters;

/// Pause after a connection could not be accepted, most likely for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// State of a serving export, for other threads.
#[derive(Debug)]
pub struct ExportStatus<V> {
    log: Arc<ExportLog>,
    connected: AtomicBool,
    sessions: AtomicU64,
    offered: AtomicU16,
    /// Zero means unset.
    depth: AtomicUsize,
    session: Mutex<V>,
}

impl<V: Clone + Default> ExportStatus<V> {
    fn new(name: String, offered: u16) -> Arc<ExportStatus<V>> {
        Arc::new(ExportStatus {
            log: Arc::new(ExportLog::new(name)),
            connected: AtomicBool::default(),
            sessions: AtomicU64::default(),
            offered: offered.into(),
            depth: AtomicUsize::default(),
            session: Mutex::default(),
        })
    }

    /// Logs the number of suppressed log lines. To be called periodically.
    pub fn log_held_back(&self) {
        self.log.tell_held_back();
    }

    /// Whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Number of front-ends so far.
    pub fn sessions(&self) -> u64 {
        self.sessions.load(Ordering::Relaxed)
    }

    /// Number of queues offered to the next front-end.
    pub fn offered(&self) -> u16 {
        self.offered.load(Ordering::Relaxed)
    }

    /// Maximum requests in flight of each queue, if limited since the queues were made.
    pub fn depth(&self) -> Option<usize> {
        Some(self.depth.load(Ordering::Relaxed)).filter(|depth| *depth > 0)
    }

    /// View of the connected front-end after its last message, if any.
    pub fn session(&self) -> Option<V> {
        let session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_connected().then(|| session.clone())
    }

    fn note(&self, session: V) {
        *self.session.lock().unwrap_or_else(PoisonError::into_inner) = session;
    }
}

/// A serving export. Dropping it stops the export, waits for its end and removes its socket.
pub struct Server<F: FrontEndSession> {
    end: Arc<EndpointEnd>,
    stop: Stop,
    status: Arc<ExportStatus<F::View>>,
    hand: ExportHand<F>,
    /// Whether the end was awaited already.
    is_done: bool,
    /// Its control loop. Last field, since the drop may end the loop.
    _control: ControlLoop,
}

/// Handle to stop an export.
#[derive(Clone)]
struct Stop {
    asked: Arc<AtomicBool>,
    caller: EndpointCaller,
}

impl<F: FrontEndSession> Server<F> {
    /// Serves a disk on a socket, with a private control loop.
    ///
    /// # Errors
    /// The system has no thread or descriptor left.
    pub fn start(socket: impl Into<Arc<BoundSocket>>, config: ExportConfig<F>) -> io::Result<Server<F>> {
        Server::start_on(&ControlLoop::start()?, socket, config)
    }

    /// Serves a disk on a socket, with a control loop shared with other exports. No export delays another.
    ///
    /// # Errors
    /// The socket cannot be polled.
    pub fn start_on(
        control: &ControlLoop,
        socket: impl Into<Arc<BoundSocket>>,
        config: ExportConfig<F>,
    ) -> io::Result<Server<F>> {
        let status = ExportStatus::new(config.name.clone(), config.disk.queues());
        Server::add(control, Some(socket.into()), status, ExportPhase::Waiting(config, None))
    }

    /// Serves by one session, which accepts connections by itself and lasts as long as the export.
    ///
    /// # Errors
    /// The session cannot be made.
    pub(crate) fn start_session(
        control: &ControlLoop,
        config: ExportConfig<F>,
        make: impl FnOnce(ExportConfig<F>, &Arc<ExportLog>) -> io::Result<F>,
    ) -> io::Result<Server<F>> {
        let status = ExportStatus::new(config.name.clone(), config.disk.queues());
        let session = make(config, &status.log)?;
        status.note(session.view());
        status.connected.store(true, Ordering::Relaxed);
        let front_end = ConnectedFrontEnd { session, waiters: Waiters::default() };
        Server::add(control, None, status, ExportPhase::Connected(Box::new(front_end)))
    }

    /// Prepares to continue an export that another process has handed over, on its socket. Before [`Taking::go`], no
    /// request is served and the other process is not affected.
    ///
    /// # Errors
    /// The session is invalid for this disk, or the system has no thread or descriptor left.
    pub fn take_over(
        socket: impl Into<Arc<BoundSocket>>,
        config: ExportConfig<F>,
        offered: u16,
        wce: bool,
        session: Option<F::State>,
    ) -> Result<Taking<F>, String> {
        let control = ControlLoop::start().map_err(|error| error.to_string())?;
        Server::take_over_on(&control, socket, config, offered, wce, session)
    }

    /// The same as [`Server::take_over`], with a control loop shared with other exports.
    ///
    /// # Errors
    /// As for [`Server::take_over`].
    pub fn take_over_on(
        control: &ControlLoop,
        socket: impl Into<Arc<BoundSocket>>,
        config: ExportConfig<F>,
        offered: u16,
        wce: bool,
        session: Option<F::State>,
    ) -> Result<Taking<F>, String> {
        Server::prepare(control, Some(socket.into()), config, (offered, wce), |config, log| {
            let Some(state) = session else { return Ok(Begin::Waiting(config)) };
            let reserve = F::reserve().map_err(|error| error.to_string())?;
            let (session, start) = F::resume(state, reserve, config, log)?;
            Ok(Begin::Connected(Box::new(session), start))
        })
    }

    /// The same for a session that accepts connections by itself.
    ///
    /// # Errors
    /// As for [`Server::take_over`].
    pub(crate) fn take_over_session(
        control: &ControlLoop,
        config: ExportConfig<F>,
        offered: u16,
        wce: bool,
        resume: impl FnOnce(ExportConfig<F>, &Arc<ExportLog>) -> Result<(F, F::Start), String>,
    ) -> Result<Taking<F>, String> {
        Server::prepare(control, None, config, (offered, wce), |config, log| {
            let (session, start) = resume(config, log)?;
            Ok(Begin::Connected(Box::new(session), start))
        })
    }

    fn prepare(
        control: &ControlLoop,
        socket: Option<Arc<BoundSocket>>,
        mut config: ExportConfig<F>,
        (offered, wce): (u16, bool),
        begin: impl FnOnce(ExportConfig<F>, &Arc<ExportLog>) -> Result<Begin<F>, String>,
    ) -> Result<Taking<F>, String> {
        let made = config.queues.len();
        if !(1..=made).contains(&usize::from(offered)) {
            return Err(format!("{offered} queues cannot be offered: only {made} exist"));
        }
        config.disk.set_write_cache(wce);
        let status = ExportStatus::new(config.name.clone(), offered);
        let begin = begin(config, &status.log)?;
        let (go, told) = channel();
        let server = Server::add(control, socket, status, ExportPhase::Prepared(told, begin));
        let server = server.map_err(|error| error.to_string())?;
        Ok(Taking { go, server })
    }

    fn add(
        control: &ControlLoop,
        socket: Option<Arc<BoundSocket>>,
        status: Arc<ExportStatus<F::View>>,
        phase: ExportPhase<F>,
    ) -> io::Result<Server<F>> {
        // The polled connection may be gone: another process may share the listener.
        socket.iter().try_for_each(|socket| socket.listener().set_nonblocking(true))?;
        let asked = Arc::new(AtomicBool::new(false));
        let (about, stopped) = (Arc::clone(&status), Arc::clone(&asked));
        let mut hand = None;
        let (caller, end) = control.add(|caller| {
            let (given, orders) = orders(caller.clone());
            hand = Some(given);
            let stop = Stop { asked: stopped, caller };
            ExportEndpoint { context: ExportContext { socket, stop, status: about, orders }, phase }
        });
        let Some(hand) = hand else { unreachable!("the endpoint was made") };
        let stop = Stop { asked, caller };
        Ok(Server { end, stop, status, hand, is_done: false, _control: control.clone() })
    }

    /// Handle for changes while the export serves.
    pub fn hand(&self) -> &ExportHand<F> {
        &self.hand
    }

    /// The state of the export, for other threads.
    pub fn status(&self) -> &Arc<ExportStatus<F::View>> {
        &self.status
    }

    /// Whether the export has ended by itself, which happens only after the end of its lanes.
    pub fn is_finished(&self) -> bool {
        self.end.is_set()
    }

    /// Stops the export: it accepts no new front-end, and disconnects the present one once its queues have drained.
    pub fn ask_to_stop(&self) {
        self.stop.asked.store(true, Ordering::SeqCst);
        self.stop.caller.call();
    }

    /// Waits for the end of the export, by itself or after a stop.
    pub fn join(mut self) {
        self.end.wait();
        self.is_done = true;
    }
}

impl<F: FrontEndSession> Drop for Server<F> {
    fn drop(&mut self) {
        if !self.is_done {
            self.ask_to_stop();
            // After a panic an endpoint may never drain.
            if !std::thread::panicking() {
                self.end.wait();
            }
        }
    }
}

/// A prepared takeover. Dropping it leaves the export with the other process.
pub struct Taking<F: FrontEndSession> {
    /// Declared before the server: its drop ends the export, for which the drop of the server waits.
    go: Sender<()>,
    server: Server<F>,
}

impl<F: FrontEndSession> Taking<F> {
    /// Starts to serve: the other process has ended its service.
    pub fn go(self) -> Server<F> {
        // The export waits for this message.
        let _ = self.go.send(());
        self.server.stop.caller.call();
        self.server
    }

    /// The prepared export.
    pub fn server(&self) -> &Server<F> {
        &self.server
    }
}

/// Initial state of an export: without a front-end, or with a session and the value that starts its queues.
enum Begin<F: FrontEndSession> {
    Waiting(ExportConfig<F>),
    Connected(Box<F>, F::Start),
}

/// A connected front-end, and other front-ends waiting at its socket.
struct ConnectedFrontEnd<F> {
    session: F,
    waiters: Waiters,
}

/// State of an export.
enum ExportPhase<F: FrontEndSession> {
    /// Handed over by another process that still serves.
    Prepared(Receiver<()>, Begin<F>),
    /// No front-end is connected. No connection is accepted before this time, if set.
    Waiting(ExportConfig<F>, Option<Instant>),
    /// A front-end is connected.
    Connected(Box<ConnectedFrontEnd<F>>),
    /// Quiesced until the result of the handover.
    Resting(Receiver<()>, Rested<F>),
    /// Ended.
    Over,
}

/// A quiesced export: without a front-end, or with a session and the indexes of its queues that ran.
enum Rested<F: FrontEndSession> {
    Waiting(ExportConfig<F>),
    Connected(Box<ConnectedFrontEnd<F>>, Vec<usize>),
}

/// An export as an endpoint of the control loop.
struct ExportEndpoint<F: FrontEndSession> {
    context: ExportContext<F>,
    phase: ExportPhase<F>,
}

/// Resources of an export: its socket, orders and published state.
struct ExportContext<F: FrontEndSession> {
    /// Unset if its session accepts connections by itself.
    socket: Option<Arc<BoundSocket>>,
    stop: Stop,
    status: Arc<ExportStatus<F::View>>,
    orders: ExportCommands<F>,
}

impl<F: FrontEndSession> Endpoint for ExportEndpoint<F> {
    fn step(&mut self) -> EndpointState {
        loop {
            let phase = std::mem::replace(&mut self.phase, ExportPhase::Over);
            let (phase, goes_on) = self.context.advance(phase);
            self.phase = phase;
            if !goes_on {
                break;
            }
        }
        match &self.phase {
            ExportPhase::Over => EndpointState::Over,
            ExportPhase::Waiting(_, until) => EndpointState::Waiting(*until),
            ExportPhase::Connected(front_end) => {
                let deadlines = [front_end.waiters.deadline, front_end.session.deadline()];
                EndpointState::Waiting(deadlines.into_iter().flatten().min())
            }
            ExportPhase::Prepared(..) | ExportPhase::Resting(..) => EndpointState::Waiting(None),
        }
    }

    fn interests(&self) -> Vec<(AwaitedFd, EventFlags)> {
        let listener = || Some((Arc::clone(self.context.socket.as_ref()?) as _, EventFlags::IN));
        match &self.phase {
            ExportPhase::Waiting(_, None) => listener().into_iter().collect(),
            ExportPhase::Connected(front_end) => {
                let others = if front_end.waiters.looks { listener() } else { None };
                others.into_iter().chain([front_end.session.interest()]).collect()
            }
            _ => Vec::new(),
        }
    }
}

impl<F: FrontEndSession> ExportContext<F> {
    /// Whether the socket's file is removed at the end.
    fn set_owned(&self, is_owned: bool) {
        self.socket.iter().for_each(|socket| socket.set_owned(is_owned));
    }

    /// One state transition; returns whether another may follow at once.
    fn advance(&self, phase: ExportPhase<F>) -> (ExportPhase<F>, bool) {
        let stops = self.stop.asked.load(Ordering::SeqCst);
        match phase {
            ExportPhase::Over => (ExportPhase::Over, false),
            ExportPhase::Prepared(told, begin) => match told.try_recv() {
                Ok(()) => {
                    self.set_owned(true);
                    match begin {
                        Begin::Waiting(config) => (ExportPhase::Waiting(config, None), true),
                        Begin::Connected(session, start) => (self.begin(*session, 0, Some(start)), true),
                    }
                }
                Err(TryRecvError::Empty) if !stops => (ExportPhase::Prepared(told, begin), false),
                // The other process ended without a message: drops the preparation.
                Err(_) => (ExportPhase::Over, false),
            },
            ExportPhase::Waiting(..) if stops => (ExportPhase::Over, false),
            ExportPhase::Waiting(mut config, until) => {
                if let Some((said, _)) = self.obey(&mut Subject::Waiting(&mut config)) {
                    return (ExportPhase::Resting(said, Rested::Waiting(config)), true);
                }
                if until.is_some_and(|until| Instant::now() < until) {
                    return (ExportPhase::Waiting(config, until), false);
                }
                self.accept(config)
            }
            ExportPhase::Connected(front_end) if stops => (self.end(front_end.session, &SessionEnd::Stopped), true),
            ExportPhase::Connected(mut front_end) => {
                if let Some((said, running)) = self.obey(&mut Subject::Connected(&mut front_end.session)) {
                    return (ExportPhase::Resting(said, Rested::Connected(front_end, running)), true);
                }
                let step = front_end.session.step();
                self.status.note(front_end.session.view());
                match step {
                    SessionStep::Waiting => {
                        if let Some(socket) = &self.socket {
                            front_end.waiters.look_at(socket, &self.status.log);
                        }
                        (ExportPhase::Connected(front_end), false)
                    }
                    SessionStep::Handled => (ExportPhase::Connected(front_end), true),
                    SessionStep::Over(error) => (self.end(front_end.session, &SessionEnd::Over(error)), true),
                }
            }
            ExportPhase::Resting(said, rested) => match (said.try_recv(), rested) {
                (Err(TryRecvError::Empty), rested) => (ExportPhase::Resting(said, rested), false),
                (Ok(()), rested) => {
                    self.set_owned(false);
                    match rested {
                        Rested::Waiting(_) => {
                            self.status.log.info("the export was handed over to another process");
                            (ExportPhase::Over, false)
                        }
                        Rested::Connected(front_end, _) => (self.end(front_end.session, &SessionEnd::Handed), true),
                    }
                }
                (Err(TryRecvError::Disconnected), Rested::Waiting(config)) => {
                    (ExportPhase::Waiting(config, None), true)
                }
                (Err(TryRecvError::Disconnected), Rested::Connected(mut front_end, running)) => {
                    front_end.session.go_on(running);
                    (ExportPhase::Connected(front_end), true)
                }
            },
        }
    }

    /// Accepts the next front-end, if one waits.
    fn accept(&self, mut config: ExportConfig<F>) -> (ExportPhase<F>, bool) {
        let Some(socket) = &self.socket else { return (ExportPhase::Over, false) };
        if !is_ready(socket.listener(), PollFlags::IN) {
            return (ExportPhase::Waiting(config, None), false);
        }
        let log = &self.status.log;
        match F::reserve().and_then(|reserve| Ok((reserve, socket.accept()?))) {
            Ok((reserve, Some(taken))) => {
                log.info("a front-end connected");
                config.disk.set_queues(self.status.offered());
                let pid = taken.pid;
                (self.begin(F::accept(taken, reserve, config, log), pid, None), true)
            }
            Ok((_, None)) => (ExportPhase::Waiting(config, None), false),
            Err(error) => {
                let cure = "check the limit on open files";
                log.warn(format_args!("a connection could not be accepted: {error}; {cure}"));
                (ExportPhase::Waiting(config, Some(Instant::now() + ACCEPT_PAUSE)), false)
            }
        }
    }

    /// Starts a session with a front-end of this process; 0 if unknown.
    fn begin(&self, mut session: F, pid: i32, start: Option<F::Start>) -> ExportPhase<F> {
        self.status.note(session.view());
        self.status.connected.store(true, Ordering::Relaxed);
        self.status.sessions.fetch_add(1, Ordering::Relaxed);
        match session.begin(start) {
            Ok(()) => ExportPhase::Connected(Box::new(ConnectedFrontEnd { session, waiters: Waiters::beside(pid) })),
            Err(error) => self.end(session, &SessionEnd::Over(error)),
        }
    }

    /// Ends a session: drains its queues.
    fn end(&self, session: F, end: &SessionEnd<F::Error>) -> ExportPhase<F> {
        let (config, outcome) = session.end(end);
        self.status.connected.store(false, Ordering::Relaxed);
        if let Err(error) = outcome {
            tracing::error!("{}: the export ends: {error}", config.name);
            return ExportPhase::Over;
        }
        if matches!(end, SessionEnd::Handed) { ExportPhase::Over } else { ExportPhase::Waiting(config, None) }
    }

    /// Executes orders. Stops after draining for a handover: returns the result channel and the queues that ran.
    fn obey(&self, subject: &mut Subject<'_, F>) -> Option<(Receiver<()>, Vec<usize>)> {
        while let Some(order) = self.orders.next() {
            match order {
                ExportCommand::HandOver(answer) => {
                    let resting = self.hand_over(subject, &answer);
                    if resting.is_some() {
                        return resting;
                    }
                }
                ExportCommand::Hear(answer) => drop(answer.send(())),
                ExportCommand::Change(device, info, answer) => {
                    let _ = answer.send(match subject {
                        Subject::Waiting(config) => config.change(device, &info).map(|()| Changed::Unseen),
                        Subject::Connected(session) => session.change(device, &info),
                    });
                }
                ExportCommand::Depth(depth, answer) => {
                    let set = subject.with_config(|config| config.set_depth(depth));
                    set.iter().for_each(|depth| self.status.depth.store(*depth, Ordering::Relaxed));
                    let _ = answer.send(set);
                }
                ExportCommand::Schedule(device, config, answer) => {
                    let _ = answer.send(subject.with_config(|ours| ours.schedule(device, config)));
                }
                ExportCommand::Rates(device, limits, answer) => {
                    let _ = answer.send(subject.with_config(|config| config.set_rates(device, &limits)));
                }
                ExportCommand::Offer(queues, more, answer) => {
                    let _ = answer.send(self.offer(subject, queues, more));
                }
            }
        }
        None
    }

    /// Adds these queues, and offers this number to the next front-end; a connected front-end keeps its number.
    fn offer(
        &self,
        subject: &mut Subject<'_, F>,
        queues: u16,
        more: Vec<QueueRemote<F::Queue>>,
    ) -> Result<Changed, String> {
        subject.with_config(|config| config.add(more, self.status.depth()))?;
        let made = subject.with_config(|config| config.queues.len());
        if !(1..=made).contains(&usize::from(queues)) {
            return Err(format!("{queues} queues cannot be offered: only {made} exist"));
        }
        self.status.offered.store(queues, Ordering::Relaxed);
        Ok(if matches!(subject, Subject::Connected(..)) { Changed::Silent } else { Changed::Unseen })
    }

    /// Drains, and sends the handover state to the requester. Resumes at once if that fails.
    fn hand_over(
        &self,
        subject: &mut Subject<'_, F>,
        answer: &Sender<Result<Handed<F::State>, String>>,
    ) -> Option<(Receiver<()>, Vec<usize>)> {
        let (running, session) = match subject {
            Subject::Waiting(_) => (Vec::new(), Ok(None)),
            Subject::Connected(session) => {
                let (running, state) = session.hand_over();
                (running, state.map(Some))
            }
        };
        let (made, wce) = subject.with_config(|config| (config.queues.len() as u16, config.disk.write_cache()));
        let state = session.and_then(|session| {
            let said = |error: io::Error| error.to_string();
            let own = if let Subject::Connected(session) = &*subject { session.listener() } else { None };
            let (listener, path, identity) = match &self.socket {
                Some(socket) => {
                    let path = std::path::absolute(socket.path()).map_err(said)?;
                    (socket.listener().as_fd(), path, socket.identity())
                }
                None => (own.ok_or("it has no socket that can be handed over")?, PathBuf::new(), (0, 0)),
            };
            Ok(ExportState {
                listener: listener.try_clone_to_owned().map_err(said)?,
                path,
                identity,
                made,
                offered: self.status.offered(),
                depth: self.status.depth(),
                wce,
                session,
            })
        });
        let rests = state.is_ok();
        // The drop of one end is visible at the other.
        let (verdict, said) = channel();
        let rest = QuiescedExport::new(verdict, self.stop.caller.clone());
        let told = answer.send(state.map(|state| Handed { state, rest })).is_ok();
        if told && rests {
            return Some((said, running));
        }
        if let Subject::Connected(session) = subject {
            session.go_on(running);
        }
        None
    }
}

/// Receiver of an order: a waiting export, or one with a front-end.
enum Subject<'a, F: FrontEndSession> {
    Waiting(&'a mut ExportConfig<F>),
    Connected(&'a mut F),
}

impl<F: FrontEndSession> Subject<'_, F> {
    fn with_config<T>(&mut self, change: impl FnOnce(&mut ExportConfig<F>) -> T) -> T {
        match self {
            Subject::Waiting(config) => change(config),
            Subject::Connected(session) => session.with_config(change),
        }
    }
}
