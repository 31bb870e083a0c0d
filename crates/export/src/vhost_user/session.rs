//! The session of one front-end, from its first message or from its handover state to its end.
//!
//! Owned by its export, which handles one message at a time without waiting for the front-end.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use blkyard_mq::DeviceInfo;
use blkyard_sys::{EventFlags, PollFlags, is_ready};
use blkyard_virtio::BlkConfig;
use vhost::vhost_user::Error;
use vhost::vhost_user::message::FrontendReq;

use crate::core::{Accepted, AwaitedFd, Changed, ExportLog, ExportedDisk, FrontEndSession, SessionEnd, SessionStep};
use crate::vhost_user::BackendConfig;
use crate::vhost_user::advice;
use crate::vhost_user::backend::Backend;
use crate::vhost_user::channel::BackendChannel;
use crate::vhost_user::handover::SessionState;
use crate::vhost_user::view::SessionView;
use crate::vhost_user::virtqueue::VirtqueueSession;
use crate::vhost_user::wire::{Message, MessageBuffer, Relay, RelaySockets, reply};

/// A session over vhost-user.
pub struct VhostUserSession {
    log: Arc<ExportLog>,
    backend: Arc<Mutex<Backend>>,
    relay: Relay,
    inbox: MessageBuffer,
    connection: Arc<UnixStream>,
    /// The front-end's last message.
    last: Option<u32>,
    /// The connection has no room for a reply.
    lacks_room: bool,
}

impl VhostUserSession {
    /// A front-end that has sent no message yet; `sockets` are those of the message layer.
    fn new(
        connection: UnixStream,
        sockets: RelaySockets,
        config: BackendConfig,
        log: &Arc<ExportLog>,
    ) -> VhostUserSession {
        let (log, connection) = (Arc::clone(log), Arc::new(connection));
        let backend = Arc::new(Mutex::new(Backend::new(config, Arc::clone(&connection), Arc::clone(&log))));
        let relay = Relay::new(sockets, Arc::clone(&backend));
        VhostUserSession {
            log,
            backend,
            relay,
            inbox: MessageBuffer::default(),
            connection,
            last: None,
            lacks_room: false,
        }
    }

    fn ours(&self) -> MutexGuard<'_, Backend> {
        self.backend.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the front-end has room for a reply, or is gone.
    fn may_answer(&self) -> bool {
        // Writable means that three quarters of the buffer are free; a reply is at most a page long.
        is_ready(&*self.connection, PollFlags::OUT)
    }

    /// Reads available bytes, and handles a complete message. Returns false if there is none.
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
}

impl FrontEndSession for VhostUserSession {
    type Queue = VirtqueueSession;
    type Disk = BlkConfig;
    /// The sockets of the message layer.
    type Reserve = RelaySockets;
    type State = SessionState;
    type Start = Vec<Message>;
    type View = SessionView;
    type Error = Error;

    fn reserve() -> io::Result<RelaySockets> {
        RelaySockets::new()
    }

    fn accept(
        connection: Accepted,
        sockets: RelaySockets,
        config: BackendConfig,
        log: &Arc<ExportLog>,
    ) -> VhostUserSession {
        VhostUserSession::new(connection.stream, sockets, config, log)
    }

    fn resume(
        state: SessionState,
        sockets: RelaySockets,
        mut config: BackendConfig,
        log: &Arc<ExportLog>,
    ) -> Result<(VhostUserSession, Vec<Message>), String> {
        let (queues, made) = (state.queues, config.queues.len());
        if !(1..=made).contains(&usize::from(queues)) {
            return Err(format!("it has {queues} queues, and {made} were made"));
        }
        config.disk.set_queues(queues);
        let mut session = VhostUserSession::new(state.connection.into(), sockets, config, log);
        session.inbox =
            MessageBuffer::of(state.part).ok_or("the received part of a message is longer than a message")?;
        for message in &state.setup {
            session.handle(message).1.map_err(|error| error.to_string())?;
        }
        // Before the other process has ended its service.
        session.ours().open_queues(&state.run)?;
        Ok((session, state.run))
    }

    fn begin(&mut self, run: Option<Vec<Message>>) -> Result<(), Error> {
        run.iter().flatten().try_for_each(|message| self.handle(message).1)
    }

    fn step(&mut self) -> SessionStep<Error> {
        // The reply must fit before a message is read: a front-end that never reads replies would block the session.
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

    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Waits for a message, or for room for a reply.
    fn interest(&self) -> (AwaitedFd, EventFlags) {
        (Arc::clone(&self.connection) as _, if self.lacks_room { EventFlags::OUT } else { EventFlags::IN })
    }

    fn with_config<T>(&mut self, change: impl FnOnce(&mut BackendConfig) -> T) -> T {
        change(self.ours().config_mut())
    }

    /// Notifies the front-end of a changed size.
    fn change(&mut self, _device: u16, info: &Arc<DeviceInfo>) -> Result<Changed, String> {
        self.ours().change(info)
    }

    fn hand_over(&mut self) -> (Vec<usize>, Result<SessionState, String>) {
        match self.inbox.part() {
            Ok(part) => self.ours().hand_over(part),
            Err(error) => (Vec::new(), Err(error.to_string())),
        }
    }

    fn go_on(&mut self, running: Vec<usize>) {
        self.ours().go_on(running);
    }

    fn view(&self) -> SessionView {
        self.ours().view()
    }

    fn end(self, end: &SessionEnd<Error>) -> (BackendConfig, Result<(), Error>) {
        let VhostUserSession { log, backend, relay, connection, last, .. } = self;
        // The message layer's reference to the back-end; the connection stays open until the queues have drained.
        drop(relay);
        let Some(backend) = Arc::into_inner(backend) else {
            unreachable!("the message layer had the only other share")
        };
        let (config, ended) = backend.into_inner().unwrap_or_else(PoisonError::into_inner).end();
        drop(connection);
        match end {
            SessionEnd::Handed => log.info("the session was handed over to another process"),
            SessionEnd::Stopped => log.info("the front-end is disconnected: the export ends"),
            SessionEnd::Over(Error::Disconnected) if last == Some(FrontendReq::GET_QUEUE_NUM.into()) => {
                log.warn(advice::left_at_queues(config.disk.queues().into()));
            }
            SessionEnd::Over(Error::Disconnected) => log.info("the front-end left"),
            SessionEnd::Over(error) => log.warn(format_args!("the front-end is disconnected: {error}")),
        }
        (config, ended)
    }
}

impl ExportedDisk for BlkConfig {
    fn infos(&self) -> Vec<&DeviceInfo> {
        vec![BlkConfig::info(self)]
    }

    fn set_info(&mut self, _device: u16, info: &Arc<DeviceInfo>) {
        BlkConfig::set_info(self, info);
    }

    fn queues(&self) -> u16 {
        BlkConfig::queues(self)
    }

    fn set_queues(&mut self, queues: u16) {
        BlkConfig::set_queues(self, queues);
    }

    fn write_cache(&self) -> bool {
        self.wce()
    }

    fn set_write_cache(&mut self, write_back: bool) {
        self.set_wce(write_back);
    }
}
