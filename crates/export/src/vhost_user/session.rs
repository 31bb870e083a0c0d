//! One front-end, from its first message to its last, or from where another process stopped.
//!
//! Owned by its export, which handles one message at a time, without waiting for the front-end.

use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use blkyard_sys::{EventFlags, PollFlags, is_ready};
use vhost::vhost_user::Error;
use vhost::vhost_user::message::FrontendReq;

use crate::vhost_user::advice::{self, Waiters};
use crate::vhost_user::backend::{Backend, BackendConfig};
use crate::vhost_user::channel::BackendChannel;
use crate::core::AwaitedFd;
use crate::core::BoundSocket;
use crate::core::ExportLog;
use crate::vhost_user::handover::SessionState;
use crate::vhost_user::remote::QueueRemote;
use crate::vhost_user::server::{ExportContext, Subject};
use crate::vhost_user::view::SessionView;
use crate::vhost_user::wire::{Message, MessageBuffer, Relay, RelaySockets, reply};

/// A session.
pub(crate) struct Session {
    log: Arc<ExportLog>,
    backend: Arc<Mutex<Backend>>,
    relay: Relay,
    inbox: MessageBuffer,
    connection: Arc<UnixStream>,
    /// What the front-end said last.
    last: Option<u32>,
    /// It has no room for an answer.
    lacks_room: bool,
    waiters: Waiters,
    /// Whether, and from when on, others are looked for at the export's socket.
    looks_for_others: bool,
    deadline: Option<Instant>,
}

/// What a step came to.
pub(crate) enum SessionStep {
    /// Nothing is there to do.
    Waiting,
    /// A message was handled; there may be more.
    Handled,
    /// The session is over.
    Over(Error),
}

/// How a session ended.
pub(crate) enum End {
    /// The front-end left, or was let go.
    Over(Error),
    /// Another process goes on with it.
    Handed,
    /// The export is to end.
    Stopped,
}

impl Session {
    /// A front-end that has said nothing yet; `sockets` are those of the message layer.
    pub(crate) fn new(
        connection: UnixStream,
        sockets: RelaySockets,
        config: BackendConfig,
        log: &Arc<ExportLog>,
    ) -> Session {
        let (log, connection) = (Arc::clone(log), Arc::new(connection));
        let backend = Arc::new(Mutex::new(Backend::new(config, Arc::clone(&connection), Arc::clone(&log))));
        let relay = Relay::new(sockets, Arc::clone(&backend));
        Session {
            log,
            backend,
            relay,
            inbox: MessageBuffer::default(),
            connection,
            last: None,
            lacks_room: false,
            waiters: Waiters::default(),
            looks_for_others: false,
            deadline: None,
        }
    }

    /// The same, of this process; 0 if that is not known.
    pub(crate) fn of_process(self, pid: i32) -> Session {
        Session { waiters: Waiters::beside(pid), ..self }
    }

    /// A session as it was handed over; nothing runs before [`Session::begin`].
    ///
    /// # Errors
    /// It is none that could have been made here.
    pub(crate) fn resume(
        state: SessionState,
        sockets: RelaySockets,
        mut config: BackendConfig,
        log: &Arc<ExportLog>,
    ) -> Result<(Session, Vec<Message>), String> {
        let (queues, made) = (state.queues, config.queues.len());
        if !(1..=made).contains(&usize::from(queues)) {
            return Err(format!("it has {queues} queues, and {made} were made"));
        }
        config.disk.set_queues(queues);
        // While the guest is served by the other process.
        config.queues[..queues.into()].iter().try_for_each(QueueRemote::open)?;
        let mut session = Session::new(state.connection.into(), sockets, config, log);
        session.inbox =
            MessageBuffer::of(state.part).ok_or("the received part of a message is longer than a message")?;
        for message in &state.setup {
            session.handle(message).1.map_err(|error| error.to_string())?;
        }
        Ok((session, state.run))
    }

    /// Lets its queues run.
    ///
    /// # Errors
    /// One of them cannot.
    pub(crate) fn begin(&mut self, run: &[Message]) -> Result<(), Error> {
        run.iter().try_for_each(|message| self.handle(message).1)
    }

    fn ours(&self) -> MutexGuard<'_, Backend> {
        self.backend.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What there is to see.
    pub(crate) fn view(&self) -> SessionView {
        self.ours().view()
    }

    /// Does what was ordered from outside: see [`ExportContext::obey`].
    pub(crate) fn obey(&mut self, context: &ExportContext) -> Option<(Receiver<()>, Vec<usize>)> {
        let mut backend = self.backend.lock().unwrap_or_else(PoisonError::into_inner);
        context.obey(&mut Subject::Connected(&mut backend, &self.inbox))
    }

    /// Nobody goes on with it but us.
    pub(crate) fn go_on(&self, running: Vec<usize>) {
        self.ours().go_on(running);
    }

    /// Handles a message, if one is whole by now.
    pub(crate) fn step(&mut self) -> SessionStep {
        // Room for the answer comes before the question: one that asks and never reads would keep us in the middle of
        // an answer, out of reach.
        self.lacks_room = !self.may_answer();
        if self.lacks_room {
            return SessionStep::Waiting;
        }
        match self.turn() {
            Ok(true) => SessionStep::Handled,
            Ok(false) => SessionStep::Waiting,
            Err(error) => SessionStep::Over(error),
        }
    }

    /// What it waits for: a message, or room for an answer.
    pub(crate) fn interest(&self) -> (AwaitedFd, EventFlags) {
        (Arc::clone(&self.connection) as _, if self.lacks_room { EventFlags::OUT } else { EventFlags::IN })
    }

    /// Looks for others that wait at the export's socket, if it is time to, and tells of them in the log. They wait on.
    pub(crate) fn look_for_others(&mut self, socket: &BoundSocket) {
        loop {
            let now = Instant::now();
            let (looks, time) = self.waiters.look(now);
            self.looks_for_others = looks && time.is_none();
            self.deadline = time.map(|time| now + time);
            if !looks {
                return;
            }
            let waits = is_ready(socket.listener(), PollFlags::IN);
            if self.waiters.found(waits, now) {
                self.log.warn(advice::second_front_end(self.waiters.connected()));
            } else if self.looks_for_others && !waits {
                // Until somebody comes.
                return;
            }
        }
    }

    /// Whether it is to be run when somebody waits at the export's socket.
    pub(crate) fn looks_for_others(&self) -> bool {
        self.looks_for_others
    }

    /// When it is to be run although nothing has come.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether the front-end has room for an answer, or is gone.
    fn may_answer(&self) -> bool {
        // Writable means three quarters of the buffer are free, and no answer is longer than a page.
        is_ready(&*self.connection, PollFlags::OUT)
    }

    /// Takes what has come, and handles a message that is whole by now. False if none is.
    fn turn(&mut self) -> Result<bool, Error> {
        let Some(message) = self.inbox.take(&self.connection)? else { return Ok(false) };
        self.last = message.request();
        let (answer, outcome) = self.handle(&message);
        reply(&self.connection, &answer).and(outcome).map(|()| true)
    }

    fn handle(&mut self, message: &Message) -> (Message, Result<(), Error>) {
        if message.request() == Some(FrontendReq::SET_LOG_FD.into()) {
            return self.ours().handle_log_eventfd(message);
        }
        let (answer, outcome) = self.relay.handle(message);
        if outcome.is_ok()
            && let Some(channel) = BackendChannel::of(message)
        {
            self.ours().set_channel(channel);
        }
        (answer, outcome)
    }

    /// Lets go of the front-end once its queues have finished. Gives back what the next session needs, and whether
    /// there can be one.
    pub(crate) fn end(self, end: &End) -> (BackendConfig, Result<(), Error>) {
        let Session { log, backend, relay, connection, last, .. } = self;
        // The message layer's share of the back-end; the connection stays open until the queues have finished.
        drop(relay);
        let Some(backend) = Arc::into_inner(backend) else {
            unreachable!("the message layer had the only other share")
        };
        let (config, ended) = backend.into_inner().unwrap_or_else(PoisonError::into_inner).end();
        drop(connection);
        match end {
            End::Handed => log.info("the session was handed over to another process"),
            End::Stopped => log.info("the front-end is disconnected: the export ends"),
            End::Over(Error::Disconnected) if last == Some(FrontendReq::GET_QUEUE_NUM.into()) => {
                log.warn(advice::left_at_queues(config.disk.queues().into()));
            }
            End::Over(Error::Disconnected) => log.info("the front-end left"),
            End::Over(error) => log.warn(format_args!("the front-end is disconnected: {error}")),
        }
        (config, ended)
    }
}
