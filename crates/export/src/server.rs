//! The thread of one export: takes one front-end after another, and handles its messages.
//!
//! While a front-end is connected the next one waits in the socket's backlog. When one leaves, or sends what cannot be
//! answered, its queues finish what they fetched, its memory is let go, and the next finds the disk as it is. Between two
//! messages, or while nobody is connected, the thread does what it is told from outside (see [`crate::orders`]).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::backend::{Backend, BackendConfig};
use crate::channel::Channel;
use crate::orders::{Changed, ExportHand, Order, Orders, orders};
use crate::socket::BoundSocket;
use crate::view::SessionView;

/// What others may know of an export while it serves.
#[derive(Debug, Default)]
pub struct ExportStatus {
    connected: AtomicBool,
    sessions: AtomicU64,
    offered: AtomicU16,
    session: Mutex<SessionView>,
}

impl ExportStatus {
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

    /// The front-end that is connected, as of its last message; none if there is none.
    pub fn session(&self) -> Option<SessionView> {
        let session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_connected().then(|| session.clone())
    }

    fn note(&self, session: SessionView) {
        *self.session.lock().unwrap_or_else(PoisonError::into_inner) = session;
    }
}

/// An export that serves.
pub struct Server {
    thread: JoinHandle<()>,
    stop: Arc<Stop>,
    status: Arc<ExportStatus>,
    hand: ExportHand,
}

/// How the thread is told to end, wherever it waits.
struct Stop {
    bell: OwnedFd,
    asked: AtomicBool,
    /// The connection of the session going on.
    session: Mutex<Option<UnixStream>>,
}

impl Server {
    /// Serves a disk on a socket, from now on.
    ///
    /// # Errors
    /// The system gives no thread or descriptor.
    pub fn start(socket: BoundSocket, config: BackendConfig) -> io::Result<Server> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stop = Arc::new(Stop { bell, asked: AtomicBool::new(false), session: Mutex::new(None) });
        let status = Arc::new(ExportStatus { offered: config.disk.queues().into(), ..ExportStatus::default() });
        let (hand, orders) = orders()?;
        let desk = Desk { stop: Arc::clone(&stop), status: Arc::clone(&status), orders };
        let thread = std::thread::Builder::new().name("export".into()).spawn(move || serve(&socket, config, &desk))?;
        Ok(Server { thread, stop, status, hand })
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
        self.thread.is_finished()
    }

    /// Asks it to end: no new front-end is taken, the one there is let go of once what it had fetched is finished.
    pub fn ask_to_stop(&self) {
        self.stop.asked.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.stop.bell, &1_u64.to_ne_bytes());
        if let Ok(session) = self.stop.session.lock()
            && let Some(session) = &*session
        {
            let _ = session.shutdown(std::net::Shutdown::Read);
        }
    }

    /// Waits until it has ended.
    pub fn join(self) {
        if self.thread.join().is_err() {
            tracing::error!("the thread of an export panicked");
        }
    }
}

/// What reaches the thread from outside its socket, and what it tells.
struct Desk {
    stop: Arc<Stop>,
    status: Arc<ExportStatus>,
    orders: Orders,
}

fn serve(socket: &BoundSocket, mut config: BackendConfig, desk: &Desk) {
    while let Some(connection) = next(socket, &mut config, desk) {
        let name = config.name.clone();
        config.disk.set_queues(desk.status.offered());
        let (back, outcome) = session(connection, config, desk);
        config = back;
        if let Err(error) = outcome {
            tracing::error!("{name}: the export ends: {error}");
            break;
        }
        if desk.stop.asked.load(Ordering::SeqCst) {
            break;
        }
    }
    config.queues.iter().for_each(crate::QueueRemote::retire);
}

/// The next front-end; none once the export is to stop.
fn next(socket: &BoundSocket, config: &mut BackendConfig, desk: &Desk) -> Option<UnixStream> {
    let listener = socket.listener();
    loop {
        match desk.wait(listener.as_fd()) {
            Ok(Call::Stop) => return None,
            Ok(Call::Order) => desk.obey(&mut Subject::Waiting(config)),
            Ok(Call::Socket) => match listener.accept() {
                Ok((connection, _)) => return Some(connection),
                Err(error) => {
                    tracing::warn!("{}: a connection failed: {error}", socket.path().display());
                    // Out of descriptors, most likely: do not spin until somebody closes some.
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            },
            Err(error) => {
                tracing::error!("{}: cannot wait for a connection: {error}", socket.path().display());
                return None;
            }
        }
    }
}

/// What the thread has to turn to.
enum Call {
    Stop,
    Order,
    /// A connection, or a message.
    Socket,
}

impl Desk {
    /// Waits until there is something to do; what comes from our own side goes first.
    fn wait(&self, socket: BorrowedFd<'_>) -> Result<Call, Errno> {
        loop {
            // The bell is never silenced, so this also finds that we were asked while nobody looked.
            let mut fds = [
                PollFd::new(&self.stop.bell, PollFlags::IN),
                PollFd::new(self.orders.bell(), PollFlags::IN),
                PollFd::from_borrowed_fd(socket, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
                Ok(_) if !fds[0].revents().is_empty() => return Ok(Call::Stop),
                Ok(_) if !fds[1].revents().is_empty() => return Ok(Call::Order),
                Ok(_) => return Ok(Call::Socket),
            }
        }
    }

    /// Does what was ordered.
    fn obey(&self, subject: &mut Subject<'_>) {
        while let Some(order) = self.orders.next() {
            match order {
                Order::Change(info, answer) => {
                    let _ = answer.send(match subject {
                        Subject::Waiting(config) => config.change(&info).map(|()| Changed::Unseen),
                        Subject::Connected(backend) => backend.change(&info),
                    });
                }
                Order::Depth(depth, answer) => {
                    let _ = answer.send(subject.config().set_depth(depth));
                }
                Order::Offer(queues, answer) => {
                    let made = subject.config().queues.len();
                    let _ = answer.send(if (1..=made).contains(&usize::from(queues)) {
                        self.status.offered.store(queues, Ordering::Relaxed);
                        Ok(if matches!(subject, Subject::Connected(_)) { Changed::Silent } else { Changed::Unseen })
                    } else {
                        Err(format!("{queues} queues cannot be offered: {made} were made"))
                    });
                }
            }
        }
    }
}

/// What orders are about: an export that waits, or one with a front-end.
enum Subject<'a> {
    Waiting(&'a mut BackendConfig),
    Connected(&'a mut Backend),
}

impl Subject<'_> {
    fn config(&mut self) -> &mut BackendConfig {
        match self {
            Subject::Waiting(config) => config,
            Subject::Connected(backend) => backend.config_mut(),
        }
    }
}

/// Waits until the front-end has room for an answer; false if we are to stop instead. One that asks and never reads would
/// otherwise keep us in the middle of an answer, out of reach.
fn may_answer(connection: &UnixStream, stop: &Stop) -> bool {
    loop {
        // Writable means three quarters of the buffer are free, and no answer is longer than a page.
        let mut fds = [PollFd::new(connection, PollFlags::OUT), PollFd::new(&stop.bell, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => {}
            Err(_) => return false,
            Ok(_) => return fds[1].revents().is_empty(),
        }
    }
}

/// One front-end from its first message to its last. Gives back what the next session needs, and whether there can be one.
fn session(connection: UnixStream, config: BackendConfig, desk: &Desk) -> (BackendConfig, Result<(), Error>) {
    let name = config.name.clone();
    let (stop, status) = (Arc::clone(&desk.stop), Arc::clone(&desk.status));
    let (Ok(for_stop), Ok(for_queues)) = (connection.try_clone(), connection.try_clone()) else {
        tracing::warn!("{name}: no descriptors left for a connection");
        return (config, Ok(()));
    };
    let for_queues = Arc::new(for_queues);
    if let Ok(mut session) = stop.session.lock() {
        *session = Some(for_stop);
    }
    status.note(SessionView::default());
    status.connected.store(true, Ordering::Relaxed);
    status.sessions.fetch_add(1, Ordering::Relaxed);
    tracing::info!("{name}: a front-end connected");
    let backend = Arc::new(Mutex::new(Backend::new(config, Arc::clone(&for_queues))));
    let mut handler = BackendReqHandler::from_stream(connection, Arc::clone(&backend));
    let ours = || backend.lock().unwrap_or_else(PoisonError::into_inner);
    let error = loop {
        match desk.wait(for_queues.as_fd()) {
            Ok(Call::Stop) | Err(_) => break Error::Disconnected,
            Ok(Call::Order) => desk.obey(&mut Subject::Connected(&mut ours())),
            Ok(Call::Socket) => {
                if !may_answer(&for_queues, &stop) {
                    break Error::Disconnected;
                }
                let channel = Channel::of_next_message(&for_queues);
                if let Err(error) = handler.handle_request() {
                    break error;
                }
                if let Some(channel) = channel {
                    ours().set_channel(channel);
                }
            }
        }
        status.note(ours().view());
    };
    if let Ok(mut session) = stop.session.lock() {
        *session = None;
    }
    // The handler's share of the back-end; the connection stays open until the queues have finished.
    drop(handler);
    let Some(backend) = Arc::into_inner(backend) else { unreachable!("the handler had the only other share") };
    let (config, ended) = backend.into_inner().unwrap_or_else(PoisonError::into_inner).end();
    drop(for_queues);
    status.connected.store(false, Ordering::Relaxed);
    match error {
        Error::Disconnected => tracing::info!("{name}: the front-end left"),
        error => tracing::warn!("{name}: the front-end is let go: {error}"),
    }
    (config, ended)
}
