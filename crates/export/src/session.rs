//! One front-end, from its first message to its last, or from where another process stopped.
//!
//! Owned by the export's thread, which handles one message at a time.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::Error;
use vhost::vhost_user::message::FrontendReq;

use crate::advice::{self, Waiters};
use crate::backend::{Backend, BackendConfig};
use crate::channel::BackendChannel;
use crate::handover::SessionState;
use crate::log::ExportLog;
use crate::remote::QueueRemote;
use crate::server::{Call, ExportContext, Subject};
use crate::view::SessionView;
use crate::wire::{Message, MessageBuffer, Relay, RelaySockets, reply};

/// Not at all.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A session.
pub(crate) struct Session {
    log: Arc<ExportLog>,
    backend: Arc<Mutex<Backend>>,
    relay: Relay,
    inbox: MessageBuffer,
    connection: Arc<UnixStream>,
    /// What the front-end said last.
    last: Option<u32>,
    waiters: Waiters,
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
        let (last, waiters) = (None, Waiters::default());
        Session { log, backend, relay, inbox: MessageBuffer::default(), connection, last, waiters }
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

    /// Handles messages until the session ends.
    pub(crate) fn run(&mut self, context: &ExportContext) -> End {
        let mut awaited = PollFlags::IN;
        loop {
            match context.wait_beside(&self.connection, awaited, &mut self.waiters) {
                Ok(Call::Stop) => return End::Stopped,
                Err(error) => return End::Over(Error::SocketError(error.into())),
                Ok(Call::Order) => {
                    let mut backend = self.backend.lock().unwrap_or_else(PoisonError::into_inner);
                    if context.obey(&mut Subject::Connected(&mut backend, &self.inbox)).is_break() {
                        return End::Handed;
                    }
                }
                Ok(Call::Socket) => {
                    // Room for the answer comes before the question: one that asks and never reads would keep us in the
                    // middle of an answer, out of reach.
                    awaited = if self.may_answer() { PollFlags::IN } else { PollFlags::OUT };
                    if awaited == PollFlags::IN
                        && let Err(error) = self.turn()
                    {
                        return End::Over(error);
                    }
                }
            }
            context.note(self.view());
        }
    }

    /// Whether the front-end has room for an answer, or is gone.
    fn may_answer(&self) -> bool {
        // Writable means three quarters of the buffer are free, and no answer is longer than a page.
        poll(&mut [PollFd::new(&self.connection, PollFlags::OUT)], Some(&AT_ONCE)).is_ok_and(|ready| ready > 0)
    }

    /// Takes what has come, and handles a message that is whole by now.
    fn turn(&mut self) -> Result<(), Error> {
        let Some(message) = self.inbox.take(&self.connection)? else { return Ok(()) };
        self.last = message.request();
        let (answer, outcome) = self.handle(&message);
        reply(&self.connection, &answer).and(outcome)
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
