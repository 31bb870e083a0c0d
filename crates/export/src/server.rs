//! The thread of one export: takes one front-end after another, and handles its messages.
//!
//! While a front-end is connected the next one waits in the socket's backlog, and the log says so. When one leaves, or
//! sends what cannot be answered, its queues finish what they fetched, its memory is let go, and the next finds the
//! disk as it is. Between two messages, or while nobody is connected, the thread does what it is told from outside (see
//! [`crate::orders`]).

use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blkyard_sys::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::QueueRemote;
use crate::advice::{self, Waiters};
use crate::backend::{Backend, BackendConfig};
use crate::handover::{ExportState, Handed, QuiescedExport, SessionState};
use crate::log::ExportLog;
use crate::orders::{Changed, ExportCommand, ExportCommands, ExportHand, orders};
use crate::session::{End, Session};
use crate::socket::BoundSocket;
use crate::view::SessionView;
use crate::wire::{Message, MessageBuffer, RelaySockets};

/// What others may know of an export while it serves.
#[derive(Debug)]
pub struct ExportStatus {
    log: Arc<ExportLog>,
    connected: AtomicBool,
    sessions: AtomicU64,
    offered: AtomicU16,
    /// None is zero.
    depth: AtomicUsize,
    session: Mutex<SessionView>,
}

impl ExportStatus {
    fn new(name: String, offered: u16) -> Arc<ExportStatus> {
        Arc::new(ExportStatus {
            log: Arc::new(ExportLog::new(name)),
            connected: AtomicBool::default(),
            sessions: AtomicU64::default(),
            offered: offered.into(),
            depth: AtomicUsize::default(),
            session: Mutex::default(),
        })
    }

    /// Logs how many lines were left out since its front-ends caused too many. To be called now and then.
    pub fn log_held_back(&self) {
        self.log.tell_held_back();
    }

    /// Whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Front-ends so far.
    pub fn sessions(&self) -> u64 {
        self.sessions.load(Ordering::Relaxed)
    }

    /// Queues that the next front-end is offered.
    pub fn offered(&self) -> u16 {
        self.offered.load(Ordering::Relaxed)
    }

    /// Requests that each queue may have in flight, if that was bounded since they were made.
    pub fn depth(&self) -> Option<usize> {
        Some(self.depth.load(Ordering::Relaxed)).filter(|depth| *depth > 0)
    }

    /// The front-end that is connected, as of its last message; none if there is none.
    pub fn session(&self) -> Option<SessionView> {
        let session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_connected().then(|| session.clone())
    }

    fn note(&self, session: SessionView) {
        *self.session.lock().unwrap_or_else(PoisonError::into_inner) = session;
    }
}

/// An export that serves. Dropped, it is asked to end, and waited for: nothing of it is left behind, its socket either.
pub struct Server {
    /// There until it is waited for.
    thread: Option<JoinHandle<()>>,
    stop: Arc<Stop>,
    status: Arc<ExportStatus>,
    hand: ExportHand,
}

/// How the thread is told to end, wherever it waits.
struct Stop {
    eventfd: EventFd,
    asked: AtomicBool,
}

impl Server {
    /// Serves a disk on a socket, from now on.
    ///
    /// # Errors
    /// The system gives no thread or descriptor.
    pub fn start(socket: impl Into<Arc<BoundSocket>>, config: BackendConfig) -> io::Result<Server> {
        let status = ExportStatus::new(config.name.clone(), config.disk.queues());
        Server::spawn(socket.into(), status, move |context| serve(Begin::Waiting(config), context))
    }

    /// Prepares to go on with an export that another process has handed over, on its socket. Nothing is served, and
    /// nothing of the other process is touched, before [`Taking::go`].
    ///
    /// # Errors
    /// The session is none that this disk could have, or the system gives no thread or descriptor.
    pub fn take_over(
        socket: impl Into<Arc<BoundSocket>>,
        mut config: BackendConfig,
        offered: u16,
        wce: bool,
        session: Option<SessionState>,
    ) -> Result<Taking, String> {
        let made = config.queues.len();
        if !(1..=made).contains(&usize::from(offered)) {
            return Err(format!("{offered} queues cannot be offered: only {made} exist"));
        }
        config.disk.set_wce(wce);
        let said = |error: io::Error| error.to_string();
        let status = ExportStatus::new(config.name.clone(), offered);
        let begin = match session {
            None => Begin::Waiting(config),
            Some(state) => {
                let sockets = RelaySockets::new().map_err(said)?;
                let (session, run) = Session::resume(state, sockets, config, &status.log)?;
                Begin::Connected(session, run)
            }
        };
        let (go, told) = channel();
        let server = Server::spawn(socket.into(), status, move |context| {
            // Without a word it was all for nothing.
            if told.recv().is_err() {
                return;
            }
            context.socket.set_owned(true);
            serve(begin, context);
        });
        Ok(Taking { go, server: server.map_err(said)? })
    }

    fn spawn(
        socket: Arc<BoundSocket>,
        status: Arc<ExportStatus>,
        serve: impl FnOnce(&ExportContext) + Send + 'static,
    ) -> io::Result<Server> {
        let stop = Arc::new(Stop { eventfd: EventFd::new()?, asked: AtomicBool::new(false) });
        let (hand, orders) = orders()?;
        let context = ExportContext { socket, stop: Arc::clone(&stop), status: Arc::clone(&status), orders };
        let thread = std::thread::Builder::new().name("export".into()).spawn(move || serve(&context))?;
        Ok(Server { thread: Some(thread), stop, status, hand })
    }

    /// For changing it while it serves.
    pub fn hand(&self) -> &ExportHand {
        &self.hand
    }

    /// What others may know of it.
    pub fn status(&self) -> &Arc<ExportStatus> {
        &self.status
    }

    /// Whether the thread has ended by itself, which it does only when its lanes are gone.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Asks it to end: no new front-end is taken, the one there is let go of once what it had fetched is finished.
    pub fn ask_to_stop(&self) {
        self.stop.asked.store(true, Ordering::SeqCst);
        self.stop.eventfd.signal();
    }

    /// Waits until it has ended, by itself or because it was asked to.
    pub fn join(mut self) {
        self.wait();
    }

    fn wait(&mut self) {
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of an export panicked");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.ask_to_stop();
            // What a panic has left may never come to rest.
            if !std::thread::panicking() {
                self.wait();
            }
        }
    }
}

/// An export that is about to be taken over. Dropped, it leaves everything as it was.
pub struct Taking {
    /// Goes before the server, which waits for its thread, which waits for this.
    go: Sender<()>,
    server: Server,
}

impl Taking {
    /// Serves from now on: the other process has let go.
    pub fn go(self) -> Server {
        // The thread waits for this and nothing else.
        let _ = self.go.send(());
        self.server
    }

    /// The export to be.
    pub fn server(&self) -> &Server {
        &self.server
    }
}

/// What an export begins with: nobody, or a front-end whose queues run once they are told this.
enum Begin {
    Waiting(BackendConfig),
    Connected(Session, Vec<Message>),
}

/// What the thread has to do with: its socket, what reaches it from elsewhere, and what it tells.
pub(crate) struct ExportContext {
    socket: Arc<BoundSocket>,
    stop: Arc<Stop>,
    status: Arc<ExportStatus>,
    orders: ExportCommands,
}

/// Serves one front-end after another. The queues are retired with what is dropped in the end.
fn serve(mut begin: Begin, context: &ExportContext) {
    loop {
        let (mut session, run) = match begin {
            Begin::Connected(session, run) => (session, run),
            Begin::Waiting(config) => match next(config, context) {
                Some(session) => (session, Vec::new()),
                None => return,
            },
        };
        context.note(session.view());
        context.status.connected.store(true, Ordering::Relaxed);
        context.status.sessions.fetch_add(1, Ordering::Relaxed);
        let end = match session.begin(&run) {
            Ok(()) => session.run(context),
            Err(error) => End::Over(error),
        };
        let (config, outcome) = session.end(&end);
        context.status.connected.store(false, Ordering::Relaxed);
        if let Err(error) = outcome {
            tracing::error!("{}: the export ends: {error}", config.name);
            return;
        }
        if matches!(end, End::Handed) || context.stop.asked.load(Ordering::SeqCst) {
            return;
        }
        begin = Begin::Waiting(config);
    }
}

/// The next front-end; none once the export is to end.
fn next(mut config: BackendConfig, context: &ExportContext) -> Option<Session> {
    let (listener, path) = (context.socket.listener(), context.socket.path().display());
    // One that poll has seen may be gone: another process may have the same listener.
    if let Err(error) = listener.set_nonblocking(true) {
        tracing::error!("{path}: cannot wait for a connection: {error}");
        return None;
    }
    let log = &context.status.log;
    loop {
        match context.wait(listener.as_fd(), PollFlags::IN) {
            Ok(Call::Stop) => return None,
            Ok(Call::Order) => {
                if context.obey(&mut Subject::Waiting(&mut config)).is_break() {
                    log.info("the export was handed over to another process");
                    return None;
                }
            }
            // Sockets first: a connection that was taken must not be lost for want of them.
            Ok(Call::Socket) => match RelaySockets::new().and_then(|sockets| Ok((sockets, context.socket.accept()?))) {
                Ok((sockets, Some(taken))) => {
                    log.info("a front-end connected");
                    config.disk.set_queues(context.status.offered());
                    return Some(Session::new(taken.stream, sockets, config, log).of_process(taken.pid));
                }
                Ok((_, None)) => {}
                Err(error) => {
                    let cure = "check the limit on open files";
                    log.warn(format_args!("a connection could not be accepted: {error}; {cure}"));
                    // Out of descriptors, most likely: do not spin until somebody closes some.
                    std::thread::sleep(Duration::from_millis(100));
                }
            },
            Err(error) => {
                tracing::error!("{}: cannot wait for a connection: {error}", config.name);
                return None;
            }
        }
    }
}

/// What the thread has to turn to.
pub(crate) enum Call {
    Stop,
    Order,
    /// A connection, a message, or room for an answer.
    Socket,
}

impl ExportContext {
    /// Waits until there is something to do, or the socket is as awaited; what comes from our own side goes first.
    pub(crate) fn wait(&self, socket: BorrowedFd<'_>, awaited: PollFlags) -> Result<Call, Errno> {
        loop {
            if let (Some(call), _) = self.poll(socket, awaited, false, None)? {
                return Ok(call);
            }
        }
    }

    /// The same while a front-end is connected. Others that wait at the export's socket meanwhile are told of in the
    /// log, and wait on.
    pub(crate) fn wait_beside(
        &self,
        connection: &UnixStream,
        awaited: PollFlags,
        waiters: &mut Waiters,
    ) -> Result<Call, Errno> {
        loop {
            let (looks, time) = waiters.look(Instant::now());
            let (call, waits) = self.poll(connection.as_fd(), awaited, looks, time)?;
            // Whoever has left, or says something, goes first: the other may be its successor.
            if let Some(call) = call {
                return Ok(call);
            }
            if looks && waiters.found(waits, Instant::now()) {
                self.status.log.warn(advice::second_front_end(waiters.connected()));
            }
        }
    }

    /// Waits once, for a time at most: what there is to do, and whether somebody waits at the export's socket, if that
    /// is looked at.
    fn poll(
        &self,
        socket: BorrowedFd<'_>,
        awaited: PollFlags,
        looks: bool,
        time: Option<Duration>,
    ) -> Result<(Option<Call>, bool), Errno> {
        // The eventfd is never silenced, so this also finds that we were asked while nobody looked.
        let mut fds = [
            PollFd::new(&self.stop.eventfd, PollFlags::IN),
            PollFd::new(self.orders.eventfd(), PollFlags::IN),
            PollFd::from_borrowed_fd(socket, awaited),
            PollFd::new(self.socket.listener(), PollFlags::IN),
        ];
        let fds = &mut fds[..if looks { 4 } else { 3 }];
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        match poll(fds, time.as_ref()) {
            Err(Errno::INTR) => return Ok((None, false)),
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        let calls = [Call::Stop, Call::Order, Call::Socket];
        let call = calls.into_iter().zip(&*fds).find(|(_, fd)| !fd.revents().is_empty()).map(|(call, _)| call);
        Ok((call, fds.get(3).is_some_and(|fd| !fd.revents().is_empty())))
    }

    /// Does what was ordered. Breaks off once another process goes on with all there is.
    pub(crate) fn obey(&self, subject: &mut Subject<'_>) -> ControlFlow<()> {
        while let Some(order) = self.orders.next() {
            match order {
                ExportCommand::HandOver(answer) => self.hand_over(subject, &answer)?,
                ExportCommand::Hear(answer) => drop(answer.send(())),
                ExportCommand::Change(info, answer) => {
                    let _ = answer.send(match subject {
                        Subject::Waiting(config) => config.change(&info).map(|()| Changed::Unseen),
                        Subject::Connected(backend, _) => backend.change(&info),
                    });
                }
                ExportCommand::Depth(depth, answer) => {
                    let set = subject.config().set_depth(depth);
                    set.iter().for_each(|depth| self.status.depth.store(*depth, Ordering::Relaxed));
                    let _ = answer.send(set);
                }
                ExportCommand::Schedule(config, answer) => {
                    let _ = answer.send(subject.config().schedule(config));
                }
                ExportCommand::Rates(limits, answer) => {
                    let _ = answer.send(subject.config().set_rates(&limits));
                }
                ExportCommand::Offer(queues, more, answer) => {
                    let _ = answer.send(self.offer(subject, queues, more));
                }
            }
        }
        ControlFlow::Continue(())
    }

    /// Has these queues as well, and offers so many to the next front-end: one that is connected keeps what it has.
    fn offer(&self, subject: &mut Subject<'_>, queues: u16, more: Vec<QueueRemote>) -> Result<Changed, String> {
        subject.config().add(more, self.status.depth())?;
        let made = subject.config().queues.len();
        if !(1..=made).contains(&usize::from(queues)) {
            return Err(format!("{queues} queues cannot be offered: only {made} exist"));
        }
        self.status.offered.store(queues, Ordering::Relaxed);
        Ok(if matches!(subject, Subject::Connected(..)) { Changed::Silent } else { Changed::Unseen })
    }

    /// Rests until it is known whether somebody goes on with what there is; goes on if nobody does.
    fn hand_over(&self, subject: &mut Subject<'_>, answer: &Sender<Result<Handed, String>>) -> ControlFlow<()> {
        let (running, session) = match subject {
            Subject::Waiting(_) => (Vec::new(), Ok(None)),
            Subject::Connected(backend, inbox) => match inbox.part() {
                Ok(part) => {
                    let (running, session) = backend.hand_over(part);
                    (running, session.map(Some))
                }
                Err(error) => (Vec::new(), Err(error.to_string())),
            },
        };
        let state = session.and_then(|session| {
            Ok(ExportState {
                listener: self.socket.listener().as_fd().try_clone_to_owned().map_err(|error| error.to_string())?,
                path: std::path::absolute(self.socket.path()).map_err(|error| error.to_string())?,
                identity: self.socket.identity(),
                made: subject.config().queues.len() as u16,
                offered: self.status.offered(),
                depth: self.status.depth(),
                wce: subject.config().disk.wce(),
                session,
            })
        });
        // Whoever drops the one lets us know through the other.
        let (verdict, said) = channel();
        let told = answer.send(state.map(|state| Handed { state, rest: QuiescedExport(verdict) })).is_ok();
        if told && said.recv().is_ok() {
            self.socket.set_owned(false);
            return ControlFlow::Break(());
        }
        if let Subject::Connected(backend, _) = subject {
            backend.go_on(running);
        }
        ControlFlow::Continue(())
    }

    /// Tells what there is to see of a session.
    pub(crate) fn note(&self, session: SessionView) {
        self.status.note(session);
    }
}

/// What orders are about: an export that waits, or one with a front-end, of whose message this has come.
pub(crate) enum Subject<'a> {
    Waiting(&'a mut BackendConfig),
    Connected(&'a mut Backend, &'a MessageBuffer),
}

impl Subject<'_> {
    fn config(&mut self) -> &mut BackendConfig {
        match self {
            Subject::Waiting(config) => config,
            Subject::Connected(backend, _) => backend.config_mut(),
        }
    }
}
