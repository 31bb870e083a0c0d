//! One client, from its first message to its last.
//!
//! An invalid message is answered with an errno, and the session continues. An invalid byte stream ends the session.
//! Owned by its export, which handles one message at a time without waiting for the client.

mod commands;

use std::io;
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_mq::DeviceInfo;
use blkyard_sys::{Epoll, EventFd, EventFlags, PASSED_FDS_MAX, PollFlags, Registered, is_ready, recv_fds, send_fds};
use blkyard_wire::vfio_user::{
    Frame, FrameError, FrameLimits, FrameReader, MessageError, MessageHeader, MessageKind, RegionInfo, VERSION,
    VfioCapabilities, VfioReply, VfioRequest, VfioVersion,
};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use self::commands::begins_change;
use super::device::NvmeFunction;
use super::handover::{VfioSessionRecord, VfioSessionState};
use super::memory::{MAPS_MAX, PAGE};
use super::queue::{NvmeQueueSession, ReplyQueue};
use super::{NvmeDisk, NvmeQueueRemote, VfioUserExport};
use crate::core::{
    Accepted, AwaitedFd, Changed, ExportLog, ExportedDisk, FrontEndSession, LaneGone, SessionEnd, SessionStep,
    out_of_descriptors,
};

/// Maximum data bytes of one message. No region needs larger accesses, so each reply fits a writable socket.
const DATA_BYTES_MAX: u32 = 4096;
/// Descriptors that a client is asked to send with one message at most. QEMU refuses a server that announces more.
const DESCRIPTORS_ANNOUNCED: u64 = 16;
/// Bytes of one read of the socket; a whole message fits.
const READ_BYTES: usize = 16 << 10;

/// Reason for the end of a session.
#[derive(Debug, thiserror::Error)]
pub enum VfioSessionError {
    /// The client closed the connection.
    #[error("the client left")]
    Left,
    /// The byte stream is invalid.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A reply without a request, or a command before VERSION.
    #[error("the client sent a message out of turn")]
    OutOfTurn,
    /// The client speaks another version.
    #[error("the client speaks version {major}.{minor}; 0.1 is served")]
    Version {
        /// The client's major version.
        major: u16,
        /// The client's minor version.
        minor: u16,
    },
    /// The socket failed, or the system has no memory or descriptors left.
    #[error("{0}")]
    System(#[from] io::Error),
    /// The client truncated memory that it shares.
    #[error("the client truncated memory that it shares")]
    Truncated,
    /// A queue cannot run.
    #[error("a queue does not run: {0}")]
    Queue(String),
    /// The lane of a queue has ended: no session can continue or start.
    #[error(transparent)]
    LaneGone(#[from] LaneGone),
}

impl From<Errno> for VfioSessionError {
    fn from(errno: Errno) -> VfioSessionError {
        VfioSessionError::System(errno.into())
    }
}

/// System resources of a session.
pub struct VfioSessionReserve {
    set: Epoll,
    replies: Arc<ReplyQueue>,
}

/// State of a session for inspection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VfioSessionView {
    /// DMA mappings.
    pub dma_maps: usize,
    /// Bytes of memory that the client shares.
    pub memory_bytes: u64,
    /// I/O completion queues that the host has created.
    pub io_queues: usize,
    /// What waits for requests in flight to end, and for how long.
    pub waits: Option<(&'static str, Duration)>,
}

/// The reply to a command that begins a change.
struct PendingReply {
    message: Vec<u8>,
    no_reply: bool,
}

/// Reason for refusing a command, for the log unless it is empty.
type RefusedMessage = (Errno, String);

/// A session over vfio-user.
pub struct VfioUserSession {
    config: VfioUserExport,
    log: Arc<ExportLog>,
    connection: Arc<UnixStream>,
    reader: FrameReader<OwnedFd>,
    /// Set once the version is negotiated.
    function: Option<NvmeFunction>,
    replies: Arc<ReplyQueue>,
    /// Epoll set of the descriptors below.
    set: Arc<Epoll>,
    messages: Option<Registered<Arc<UnixStream>>>,
    queue_replies: Option<Registered<Arc<ReplyQueue>>>,
    admin_doorbell: Option<Registered<Arc<EventFd>>>,
    /// Descriptors that the client takes with a message.
    descriptors_max: usize,
    /// Events of the connection that are waited for.
    events: EventFlags,
    /// Sent once the change of the controller is made.
    pending: Option<PendingReply>,
    /// The next command that begins a change, behind that one. No message is read before it is handled.
    deferred: Option<Frame<OwnedFd>>,
    /// The session has ended for this reason; its device is not silent yet.
    ending: Option<VfioSessionError>,
    /// The lane of a queue has ended.
    is_lane_gone: bool,
    /// The log has said that the client's memory is not shared.
    is_unshared_told: bool,
    /// Reason for which its queues did not continue after a failed handover.
    failed: Option<VfioSessionError>,
}

impl VfioUserSession {
    /// A session that has received no message yet.
    fn new(
        connection: UnixStream,
        reserve: VfioSessionReserve,
        config: VfioUserExport,
        log: &Arc<ExportLog>,
    ) -> VfioUserSession {
        VfioUserSession {
            reader: FrameReader::new(FrameLimits::for_data(DATA_BYTES_MAX, config.disk.descriptors_max())),
            config,
            log: Arc::clone(log),
            connection: Arc::new(connection),
            function: None,
            replies: reserve.replies,
            set: Arc::new(reserve.set),
            messages: None,
            queue_replies: None,
            admin_doorbell: None,
            descriptors_max: 0,
            events: EventFlags::IN,
            pending: None,
            deferred: None,
            ending: None,
            is_lane_gone: false,
            is_unshared_told: false,
            failed: None,
        }
    }

    /// Drains the queues and saves the session, which can continue unchanged. A client that is owed a reply and reads
    /// none is disconnected: it must not keep others from the next process.
    fn save(&mut self) -> Result<VfioSessionState, String> {
        let said = |error: io::Error| error.to_string();
        while self.pending.is_some() || self.deferred.is_some() {
            if !is_ready(&*self.connection, PollFlags::OUT) {
                self.log.warn("the client is disconnected: it does not read replies, and a takeover waits for it");
                self.connection.shutdown(Shutdown::Both).map_err(said)?;
                (self.pending, self.deferred) = (None, None);
                break;
            }
            self.finish_pending(None).map_err(|error| error.to_string())?;
        }
        let (part, part_files) = self.reader.part();
        let files: io::Result<Vec<_>> = part_files.iter().map(OwnedFd::try_clone).collect();
        let (part, part_files, mut files) = (part.to_vec(), part_files.len(), files.map_err(said)?);
        let function = self.function.as_mut().map(|function| function.hand_over(&self.config, &mut files));
        let record = VfioSessionRecord {
            queues: self.config.disk.queues(),
            part,
            part_files,
            is_unshared_told: self.is_unshared_told,
            function: function.transpose()?,
        };
        Ok(VfioSessionState { connection: self.connection.try_clone().map_err(said)?.into(), record, files })
    }

    /// Continues with the received part of a message.
    fn resume_message(&mut self, mut part: &[u8], files: Vec<OwnedFd>) -> Result<(), String> {
        let mut files = Some(files);
        while !part.is_empty() {
            let (bytes, rest) = part.split_at(self.reader.wanted().min(part.len()));
            let frame = self.reader.push(bytes, files.take().into_iter().flatten());
            if frame.map_err(|error| error.to_string())?.is_some() {
                return Err("the received part of a message is a whole message".into());
            }
            part = rest;
        }
        Ok(())
    }

    /// Reads available bytes, and handles a complete message. Returns false if there is none.
    fn turn(&mut self) -> Result<bool, VfioSessionError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if self.messages.is_none() {
            self.messages = Some(self.set.register(Arc::clone(&self.connection), 0, self.events)?);
            self.queue_replies = Some(self.set.register(Arc::clone(&self.replies), 1, EventFlags::IN)?);
        }
        if let Some(function) = &mut self.function {
            if self.admin_doorbell.is_none()
                && let Some(eventfd) = function.admin_doorbell()
            {
                self.admin_doorbell = Some(self.set.register(Arc::clone(eventfd), 2, EventFlags::IN)?);
            }
            // Reset before the doorbell is read: a later write signals again.
            let is_rung = function.admin_doorbell().is_some_and(|eventfd| eventfd.take());
            if is_rung || is_ready(&*self.replies, PollFlags::IN) {
                function.update(&self.config)?;
            }
        }
        // The reply must fit before a command is read: a client that never reads replies would block the session.
        let has_room = is_ready(&*self.connection, PollFlags::OUT);
        if has_room && self.finish_pending(Some(Instant::now()))? {
            return Ok(true);
        }
        let events = match (has_room, &self.deferred) {
            (false, _) => EventFlags::OUT,
            (true, Some(_)) => EventFlags::RDHUP,
            (true, None) => EventFlags::IN,
        };
        if std::mem::replace(&mut self.events, events) != events
            && let Some(messages) = &self.messages
        {
            messages.set_events(events)?;
        }
        let frame = match events {
            EventFlags::IN => self.receive()?,
            EventFlags::RDHUP if is_ready(&*self.connection, PollFlags::RDHUP) => return Err(VfioSessionError::Left),
            _ => None,
        };
        match (frame, &mut self.function) {
            (Some(frame), _) => {
                if self.pending.is_some() && begins_change(&frame) {
                    self.deferred = Some(frame);
                    return Ok(true);
                }
                self.handle(frame)?;
                // A client that always has a message must not delay what waits for queues.
                if let Some(function) = self.function.as_mut().filter(|function| function.is_drain_due()) {
                    function.update(&self.config)?;
                }
                return Ok(true);
            }
            // After the messages: a Keep Alive among them is in time.
            (None, Some(function)) if function.is_due() => function.update(&self.config)?,
            _ => {}
        }
        Ok(false)
    }

    /// Makes the pending change if that is possible by then, sends its reply, and handles the command behind it.
    /// Returns whether there was one.
    fn finish_pending(&mut self, until: Option<Instant>) -> Result<bool, VfioSessionError> {
        if let Some(function) = &mut self.function
            && !function.advance_change(&self.config, until)?
        {
            return Ok(false);
        }
        if let Some(PendingReply { message, no_reply }) = &self.pending {
            if !no_reply {
                self.send(message, &[])?;
            }
            self.pending = None;
            return Ok(true);
        }
        let Some(frame) = self.deferred.take() else { return Ok(false) };
        self.handle(frame)?;
        Ok(true)
    }

    fn receive(&mut self) -> Result<Option<Frame<OwnedFd>>, VfioSessionError> {
        let mut bytes = [0; READ_BYTES];
        loop {
            let wanted = self.reader.wanted().min(READ_BYTES);
            // One more than allowed, so that an excess descriptor is detected.
            let max = self.reader.descriptors_max();
            let received = match recv_fds(&*self.connection, &mut bytes[..wanted], max + 1, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::CONNRESET) => return Err(VfioSessionError::Left),
                received => received?,
            };
            if received.truncated && received.fds.len() <= max {
                return Err(out_of_descriptors().into());
            }
            if received.truncated {
                return Err(FrameError::Descriptors { max }.into());
            }
            if received.bytes == 0 {
                self.reader.end()?;
                return Err(VfioSessionError::Left);
            }
            if let Some(frame) = self.reader.push(&bytes[..received.bytes], received.fds)? {
                return Ok(Some(frame));
            }
        }
    }

    /// Executes a command and sends the reply.
    fn handle(&mut self, frame: Frame<OwnedFd>) -> Result<(), VfioSessionError> {
        let Frame { header, payload, descriptors } = frame;
        let MessageHeader { id, command, kind, .. } = header;
        let MessageKind::Command { no_reply } = kind else { return Err(VfioSessionError::OutOfTurn) };
        let request = VfioRequest::parse(command, &payload, descriptors.len(), DATA_BYTES_MAX);
        let is_version = matches!(request, Ok(VfioRequest::Version(_)));
        let is_first = self.function.is_none();
        let was_pending = self.pending.is_some();
        let mut data = Vec::new();
        let answer = match request {
            Ok(VfioRequest::Version(version)) if is_first => self.agree(&version)?,
            _ if is_first => Err((Errno::INVAL, "VERSION comes first".to_owned())),
            Ok(request) => self.carry_out(&request, descriptors, &mut data)?,
            Err(error) => Err((errno_of(&error), error.to_string())),
        };
        let message = match &answer {
            Ok(reply) => reply.encode(id),
            Err((errno, why)) => {
                if !why.is_empty() {
                    self.log.warn(format_args!("a message of the client is refused: {why}"));
                }
                MessageHeader::encode_error(id, command, errno.raw_os_error().unsigned_abs()).to_vec()
            }
        };
        if !was_pending && self.function.as_ref().is_some_and(NvmeFunction::is_changing) {
            self.pending = Some(PendingReply { message, no_reply });
        } else if !no_reply {
            let function = self.function.as_ref();
            let descriptors = match &answer {
                Ok(VfioReply::DeviceGetRegionInfo(RegionInfo { sparse: Some(_), .. })) => {
                    function.and_then(NvmeFunction::shared_doorbells).map(|(_, file)| file).into_iter().collect()
                }
                Ok(VfioReply::DeviceGetRegionIoFds(fds)) if !fds.parts.is_empty() => {
                    function.map_or_else(Vec::new, NvmeFunction::offered_descriptors)
                }
                _ => Vec::new(),
            };
            self.send(&message, &descriptors)?;
        }
        // Before the version is negotiated there is no reply format.
        if is_first && !(is_version && answer.is_ok()) {
            return Err(VfioSessionError::OutOfTurn);
        }
        Ok(())
    }

    /// Sends a message. Descriptors come with its first byte.
    fn send(&self, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), VfioSessionError> {
        let mut sent = 0;
        while sent < message.len() {
            let descriptors = if sent == 0 { descriptors } else { &[] };
            sent += send_fds(&*self.connection, &message[sent..], descriptors, SendFlags::DONTWAIT)?;
        }
        Ok(())
    }

    /// The first message; it powers the controller on.
    fn agree(&mut self, version: &VfioVersion) -> Result<Result<VfioReply<'static>, RefusedMessage>, VfioSessionError> {
        let VfioVersion { major, minor, .. } = *version;
        if major != VERSION.0 {
            let error = VfioSessionError::Version { major, minor };
            return Ok(Err((Errno::INVAL, error.to_string())));
        }
        let function = NvmeFunction::new(&self.config, &self.replies, &self.log)?;
        self.function = Some(function);
        // The number of vectors may have been set since the client connected.
        self.reader.set_descriptors_max(self.config.disk.descriptors_max());
        self.descriptors_max = version.capabilities.max_msg_fds.min(PASSED_FDS_MAX as u64) as usize;
        let defaults = VfioCapabilities::default();
        let capabilities = VfioCapabilities {
            max_msg_fds: DESCRIPTORS_ANNOUNCED,
            max_data_xfer_size: u64::from(DATA_BYTES_MAX).try_into().unwrap_or(defaults.max_data_xfer_size),
            max_dma_maps: MAPS_MAX as u64,
            pgsizes: PAGE.try_into().unwrap_or(defaults.pgsizes),
            write_multiple: true,
            region_io_fds: true,
            ..defaults
        };
        Ok(Ok(VfioReply::Version(VfioVersion { major, minor: minor.min(VERSION.1), capabilities })))
    }
}

fn errno_of(error: &MessageError) -> Errno {
    if matches!(error, MessageError::UnknownCommand(_)) { Errno::OPNOTSUPP } else { Errno::INVAL }
}

impl FrontEndSession for VfioUserSession {
    type Queue = NvmeQueueSession;
    type Disk = NvmeDisk;
    type Reserve = VfioSessionReserve;
    type State = VfioSessionState;
    type Start = ();
    type View = VfioSessionView;
    type Error = VfioSessionError;

    fn reserve() -> io::Result<VfioSessionReserve> {
        Ok(VfioSessionReserve { set: Epoll::new()?, replies: Arc::new(ReplyQueue::new()?) })
    }

    fn accept(
        connection: Accepted,
        reserve: VfioSessionReserve,
        config: VfioUserExport,
        log: &Arc<ExportLog>,
    ) -> VfioUserSession {
        VfioUserSession::new(connection.stream, reserve, config, log)
    }

    fn resume(
        state: VfioSessionState,
        reserve: VfioSessionReserve,
        mut config: VfioUserExport,
        log: &Arc<ExportLog>,
    ) -> Result<(VfioUserSession, ()), String> {
        let VfioSessionState { connection, record, files } = state;
        let (queues, made) = (record.queues, config.queues.len());
        if !(1..=made).contains(&usize::from(queues)) {
            return Err(format!("it has {queues} queues, and {made} were made"));
        }
        config.disk.set_queues(queues);
        let mut session = VfioUserSession::new(connection.into(), reserve, config, log);
        let mut files = files.into_iter();
        session.resume_message(&record.part, files.by_ref().take(record.part_files).collect())?;
        session.is_unshared_told = record.is_unshared_told;
        if let Some(function) = &record.function {
            let parts = (&session.replies, &session.log);
            session.function = Some(NvmeFunction::take_over(&session.config, parts, function, &mut files)?);
        }
        if files.len() > 0 {
            return Err(format!("{} surplus descriptors", files.len()));
        }
        Ok((session, ()))
    }

    fn begin(&mut self, start: Option<()>) -> Result<(), VfioSessionError> {
        match (start, &mut self.function) {
            (Some(()), Some(function)) => function.update(&self.config),
            _ => Ok(()),
        }
    }

    fn step(&mut self) -> SessionStep<VfioSessionError> {
        let error = match self.ending.take() {
            Some(error) => error,
            None => match self.turn() {
                Ok(true) => return SessionStep::Handled,
                Ok(false) => return SessionStep::Waiting,
                Err(error) => error,
            },
        };
        self.is_lane_gone |= matches!(error, VfioSessionError::LaneGone(_));
        if let Some(function) = self.function.as_mut().filter(|_| !self.is_lane_gone) {
            // The connection stays open until the device is silent: a client takes its end for that.
            self.messages = None;
            self.admin_doorbell = None;
            // Nobody reads a reply any more.
            (self.pending, self.deferred) = (None, None);
            match function.advance_end(&self.config) {
                Ok(true) => {}
                Ok(false) => {
                    self.ending = Some(error);
                    return SessionStep::Waiting;
                }
                Err(_) => self.is_lane_gone = true,
            }
        }
        SessionStep::Over(error)
    }

    /// Waits for a message, room for a reply, or replies of a queue.
    fn interest(&self) -> (AwaitedFd, EventFlags) {
        (Arc::clone(&self.set) as _, EventFlags::IN)
    }

    /// The time of the controller.
    fn deadline(&self) -> Option<Instant> {
        self.function.as_ref()?.deadline()
    }

    fn with_config<T>(&mut self, change: impl FnOnce(&mut VfioUserExport) -> T) -> T {
        change(&mut self.config)
    }

    /// The host is notified by an asynchronous event, if it has requested one.
    fn change(&mut self, device: u16, info: &Arc<DeviceInfo>) -> Result<Changed, String> {
        let Some(function) = &mut self.function else {
            return self.config.change(device, info).map(|()| Changed::Unseen);
        };
        function.suspend_all(&self.config).map_err(|gone| gone.to_string())?;
        let changed = self.config.change(device, info);
        function.set_device(&self.config).map_err(|error| error.to_string())?;
        changed.map(|()| Changed::Told)
    }

    /// The session knows itself which of its queues ran.
    fn hand_over(&mut self) -> (Vec<usize>, Result<VfioSessionState, String>) {
        (Vec::new(), self.save())
    }

    fn go_on(&mut self, _running: Vec<usize>) {
        if let Some(function) = &mut self.function {
            self.failed = function.update(&self.config).err();
        }
    }

    fn view(&self) -> VfioSessionView {
        let function = self.function.as_ref();
        VfioSessionView {
            dma_maps: function.map_or(0, NvmeFunction::dma_maps),
            memory_bytes: function.map_or(0, NvmeFunction::memory_bytes),
            io_queues: function.map_or(0, NvmeFunction::io_queues),
            waits: function.and_then(NvmeFunction::pending_change),
        }
    }

    fn end(self, end: &SessionEnd<VfioSessionError>) -> (VfioUserExport, Result<(), VfioSessionError>) {
        let VfioUserSession { config, log, function, mut is_lane_gone, .. } = self;
        if let Some(mut function) = function {
            is_lane_gone |= function.suspend_all(&config).is_err();
        }
        config.queues.iter().for_each(NvmeQueueRemote::close);
        match end {
            SessionEnd::Handed => log.info("the session was handed over to another process"),
            SessionEnd::Stopped => log.info("the client is disconnected: the export ends"),
            SessionEnd::Over(VfioSessionError::Left) => log.info("the client left"),
            SessionEnd::Over(error) => log.warn(format_args!("the client is disconnected: {error}")),
        }
        let ended = if is_lane_gone { Err(LaneGone.into()) } else { Ok(()) };
        (config, ended)
    }
}

impl ExportedDisk for NvmeDisk {
    fn infos(&self) -> Vec<&DeviceInfo> {
        self.namespaces.iter().map(|(_, info)| info).collect()
    }

    fn set_info(&mut self, device: u16, info: &Arc<DeviceInfo>) {
        if let Some((_, known)) = self.namespaces.get_mut(usize::from(device)) {
            *known = DeviceInfo::clone(info);
        }
    }

    fn queues(&self) -> u16 {
        self.queues
    }

    fn set_queues(&mut self, queues: u16) {
        self.queues = queues;
    }

    fn write_cache(&self) -> bool {
        self.write_cache
    }

    fn set_write_cache(&mut self, write_back: bool) {
        self.write_cache = write_back;
    }
}
