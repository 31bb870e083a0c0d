//! One client, from its first message to its last.
//!
//! An invalid message is answered with an errno, and the session continues. An invalid byte stream ends the session.
//! Owned by its export, which handles one message at a time without waiting for the client.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blkyard_mq::DeviceInfo;
use blkyard_sys::{Epoll, EventFd, EventFlags, PollFlags, Registered, is_ready, recv_fds, send_fds};
use blkyard_wire::vfio_user::{
    DeviceFlags, DeviceRegions, Frame, FrameError, FrameLimits, FrameReader, IrqAction, IrqData, IrqFlags, IrqInfo,
    IrqSetRequest, MessageError, MessageHeader, MessageKind, RegionAccess, RegionFlags, RegionInfo, VERSION,
    VfioCapabilities, VfioReply, VfioRequest, VfioVersion, irq_index, region_index,
};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::device::NvmeFunction;
use super::memory::{MAPS_MAX, PAGE};
use super::pci::{CONFIG_BYTES, MSIX_BYTES};
use super::queue::{NvmeQueueSession, ReplyQueue};
use super::{NvmeDisk, NvmeQueueRemote, VfioUserExport};
use crate::core::{
    Accepted, AwaitedFd, Changed, ExportLog, ExportedDisk, FrontEndSession, LaneGone, SessionEnd, SessionStep,
};

/// Maximum data bytes of one message. No region needs larger accesses, so each reply fits a writable socket.
const DATA_BYTES_MAX: u32 = 4096;
/// Descriptors that are received with one message.
const DESCRIPTORS_MAX: usize = 32;
/// Descriptors that a client is asked to send with one message at most. QEMU refuses a server that announces more.
const DESCRIPTORS_ANNOUNCED: u64 = 16;
/// Bytes of one read of the socket; a whole message fits.
const READ_BYTES: usize = 16 << 10;
/// Region of the MSI-X table: BAR 4.
const MSIX_REGION: u32 = 4;
/// Regions and interrupt types of a PCI device (`VFIO_PCI_NUM_REGIONS`, `VFIO_PCI_NUM_IRQS`).
const REGIONS: u32 = 9;
const IRQS: u32 = 5;

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
    /// I/O completion queues that the host has created.
    pub io_queues: usize,
}

/// Reason for refusing a command.
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
    /// Epoll set of the two descriptors below.
    set: Arc<Epoll>,
    awaited: Option<(Registered<Arc<UnixStream>>, Registered<Arc<ReplyQueue>>)>,
    /// The connection has no room for a reply.
    lacks_room: bool,
    /// The lane of a queue has ended.
    is_lane_gone: bool,
}

impl VfioUserSession {
    /// Reads available bytes, and handles a complete message. Returns false if there is none.
    fn turn(&mut self) -> Result<bool, VfioSessionError> {
        if self.awaited.is_none() {
            let messages = self.set.register(Arc::clone(&self.connection), 0, EventFlags::IN)?;
            let replies = self.set.register(Arc::clone(&self.replies), 1, EventFlags::IN)?;
            self.awaited = Some((messages, replies));
        }
        if is_ready(&*self.replies, PollFlags::IN)
            && let Some(function) = &mut self.function
        {
            function.update(&self.config)?;
        }
        // The reply must fit before a command is read: a client that never reads replies would block the session.
        let lacks_room = !is_ready(&*self.connection, PollFlags::OUT);
        if std::mem::replace(&mut self.lacks_room, lacks_room) != lacks_room
            && let Some((messages, _)) = &self.awaited
        {
            messages.set_events(if lacks_room { EventFlags::OUT } else { EventFlags::IN })?;
        }
        if lacks_room {
            return Ok(false);
        }
        let Some(frame) = self.receive()? else { return Ok(false) };
        self.handle(frame)?;
        Ok(true)
    }

    fn receive(&mut self) -> Result<Option<Frame<OwnedFd>>, VfioSessionError> {
        let mut bytes = [0; READ_BYTES];
        loop {
            let wanted = self.reader.wanted().min(READ_BYTES);
            // One more than allowed, so that an excess descriptor is detected.
            let received =
                match recv_fds(&*self.connection, &mut bytes[..wanted], DESCRIPTORS_MAX + 1, RecvFlags::DONTWAIT) {
                    Err(Errno::AGAIN) => return Ok(None),
                    Err(Errno::CONNRESET) => return Err(VfioSessionError::Left),
                    received => received?,
                };
            if received.truncated {
                return Err(FrameError::Descriptors { max: DESCRIPTORS_MAX }.into());
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
                self.log.warn(format_args!("a message of the client is refused: {why}"));
                MessageHeader::encode_error(id, command, errno.raw_os_error().unsigned_abs()).to_vec()
            }
        };
        if !no_reply {
            self.send(&message)?;
        }
        // Before the version is negotiated there is no reply format.
        if is_first && !(is_version && answer.is_ok()) {
            return Err(VfioSessionError::OutOfTurn);
        }
        Ok(())
    }

    fn send(&self, message: &[u8]) -> Result<(), VfioSessionError> {
        let mut sent = 0;
        while sent < message.len() {
            sent += send_fds(&*self.connection, &message[sent..], &[], SendFlags::DONTWAIT)?;
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
        let function = NvmeFunction::new(&self.config, &self.connection, &self.replies, &self.log)?;
        self.function = Some(function);
        let defaults = VfioCapabilities::default();
        let capabilities = VfioCapabilities {
            max_msg_fds: DESCRIPTORS_ANNOUNCED,
            max_data_xfer_size: u64::from(DATA_BYTES_MAX).try_into().unwrap_or(defaults.max_data_xfer_size),
            max_dma_maps: MAPS_MAX as u64,
            pgsizes: PAGE.try_into().unwrap_or(defaults.pgsizes),
            write_multiple: true,
            ..defaults
        };
        Ok(Ok(VfioReply::Version(VfioVersion { major, minor: minor.min(VERSION.1), capabilities })))
    }

    /// Executes a command. The inner result is the reply to the client.
    fn carry_out<'a>(
        &mut self,
        request: &VfioRequest<'_>,
        mut descriptors: Vec<OwnedFd>,
        data: &'a mut Vec<u8>,
    ) -> Result<Result<VfioReply<'a>, RefusedMessage>, VfioSessionError> {
        let VfioUserSession { config, function: Some(function), .. } = self else {
            return Err(VfioSessionError::OutOfTurn);
        };
        let invalid = |what: String| Ok(Err((Errno::INVAL, what)));
        Ok(Ok(match request {
            VfioRequest::Version(_) => return invalid("VERSION was agreed on before".into()),
            VfioRequest::DmaMap(map) => match function.map(config, map, descriptors.pop())? {
                Ok(()) => VfioReply::DmaMap,
                Err(error) => return Ok(Err((error.errno(), format!("DMA_MAP: {error}")))),
            },
            VfioRequest::DmaUnmap(unmap) => match function.unmap(config, unmap)? {
                Ok(()) => VfioReply::DmaUnmap(*unmap),
                Err(error) => return Ok(Err((error.errno(), format!("DMA_UNMAP: {error}")))),
            },
            VfioRequest::DeviceGetInfo => VfioReply::DeviceGetInfo(DeviceRegions {
                flags: DeviceFlags::RESET | DeviceFlags::PCI,
                regions: REGIONS,
                irqs: IRQS,
            }),
            VfioRequest::DeviceGetRegionInfo { index, .. } if *index < REGIONS => {
                let size = match *index {
                    region_index::BAR0 => function.bar0_bytes(),
                    MSIX_REGION => MSIX_BYTES as u64,
                    region_index::CONFIG => CONFIG_BYTES as u64,
                    _ => 0,
                };
                let flags = if size > 0 { RegionFlags::READ | RegionFlags::WRITE } else { RegionFlags::empty() };
                VfioReply::DeviceGetRegionInfo(RegionInfo { index: *index, flags, size, offset: 0, sparse: None })
            }
            VfioRequest::DeviceGetRegionInfo { index, .. } => return invalid(format!("there is no region {index}")),
            VfioRequest::DeviceGetIrqInfo { index } if *index < IRQS => {
                let (flags, count) = match *index {
                    irq_index::MSIX => (IrqFlags::EVENTFD, function.vectors()),
                    _ => (IrqFlags::empty(), 0),
                };
                VfioReply::DeviceGetIrqInfo(IrqInfo { index: *index, flags, count })
            }
            VfioRequest::DeviceGetIrqInfo { index } => return invalid(format!("there is no interrupt type {index}")),
            VfioRequest::DeviceSetIrqs(set) => match set_irqs(function, config, set, descriptors)? {
                Ok(()) => VfioReply::DeviceSetIrqs,
                Err(why) => return invalid(why),
            },
            VfioRequest::RegionRead(access) => match read_region(function, *access, data) {
                Ok(()) => VfioReply::RegionRead(*access, data),
                Err(why) => return invalid(why),
            },
            VfioRequest::RegionWrite(access, bytes) => match write_region(function, config, *access, bytes)? {
                Ok(()) => VfioReply::RegionWrite(*access),
                Err(why) => return invalid(why),
            },
            VfioRequest::RegionWriteMulti(writes) => {
                for write in writes {
                    let bytes = &write.data[..write.access.count as usize];
                    if let Err(why) = write_region(function, config, write.access, bytes)? {
                        return invalid(why);
                    }
                }
                VfioReply::RegionWriteMulti { count: writes.len() as u64 }
            }
            VfioRequest::DeviceReset => {
                function.reset(config)?;
                VfioReply::DeviceReset
            }
            VfioRequest::DeviceGetRegionIoFds { .. } | VfioRequest::DmaRead(_) | VfioRequest::DmaWrite(..) => {
                return Ok(Err((Errno::OPNOTSUPP, format!("{} is not served", request.command()))));
            }
        }))
    }
}

fn errno_of(error: &MessageError) -> Errno {
    if matches!(error, MessageError::UnknownCommand(_)) { Errno::OPNOTSUPP } else { Errno::INVAL }
}

/// Sets eventfds of vectors, or triggers them. The inner result is the errno of the client.
fn set_irqs(
    function: &mut NvmeFunction,
    config: &VfioUserExport,
    set: &IrqSetRequest<'_>,
    descriptors: Vec<OwnedFd>,
) -> Result<Result<(), String>, VfioSessionError> {
    let range = set.range;
    let end = range.start.checked_add(range.count).filter(|end| *end <= function.vectors());
    let Some(end) = end.filter(|_| range.index == irq_index::MSIX && set.action == IrqAction::Trigger) else {
        return Ok(Err(format!("DEVICE_SET_IRQS: {:?} of {range:?} is not served", set.action)));
    };
    match set.data {
        IrqData::SetEventfds => {
            // All descriptors are checked before the first is set.
            let eventfds: Result<Vec<_>, _> = descriptors.into_iter().map(EventFd::from_foreign).collect();
            let eventfds = match eventfds {
                Ok(eventfds) => eventfds,
                Err(error) => return Ok(Err(format!("DEVICE_SET_IRQS: {error}"))),
            };
            for (vector, eventfd) in (range.start..end).zip(eventfds) {
                function.set_vector(config, vector, Some(&Arc::new(eventfd)))?;
            }
        }
        IrqData::RemoveEventfds => {
            for vector in range.start..end {
                function.set_vector(config, vector, None)?;
            }
        }
        // An empty range disables all vectors.
        IrqData::All if range.count == 0 => {
            for vector in 0..function.vectors() {
                function.set_vector(config, vector, None)?;
            }
        }
        IrqData::All => (range.start..end).for_each(|vector| function.signal(vector)),
        IrqData::Some(wanted) => {
            let vectors = (range.start..end).zip(wanted).filter(|(_, byte)| **byte != 0);
            vectors.for_each(|(vector, _)| function.signal(vector));
        }
    }
    Ok(Ok(()))
}

fn outside(access: RegionAccess) -> String {
    format!("an access of {} bytes at {:#x} leaves region {}", access.count, access.offset, access.region)
}

fn read_region(function: &NvmeFunction, access: RegionAccess, data: &mut Vec<u8>) -> Result<(), String> {
    data.resize(access.count as usize, 0);
    let read = match access.region {
        region_index::CONFIG => function.pci.read_config(access.offset, data),
        MSIX_REGION => function.pci.read_msix(access.offset, data),
        region_index::BAR0 => {
            check_bar0(function, access)?;
            let value = function.read_register(access.offset, data.len()).map_err(|fault| fault.to_string())?;
            data.copy_from_slice(&value.to_le_bytes()[..access.count as usize]);
            Some(())
        }
        _ => None,
    };
    read.ok_or_else(|| outside(access))
}

fn write_region(
    function: &mut NvmeFunction,
    config: &VfioUserExport,
    access: RegionAccess,
    bytes: &[u8],
) -> Result<Result<(), String>, VfioSessionError> {
    let written = match access.region {
        region_index::CONFIG => function.pci.write_config(access.offset, bytes),
        MSIX_REGION => function.pci.write_msix(access.offset, bytes),
        region_index::BAR0 => {
            if let Err(why) = check_bar0(function, access) {
                return Ok(Err(why));
            }
            let mut value = [0; 8];
            // Other sizes are refused by the register file.
            let len = bytes.len().min(8);
            value[..len].copy_from_slice(&bytes[..len]);
            let value = u64::from_le_bytes(value);
            match function.write_register(config, access.offset, bytes.len(), value)? {
                Ok(()) => Some(()),
                Err(fault) => return Ok(Err(fault.to_string())),
            }
        }
        _ => None,
    };
    Ok(written.ok_or_else(|| outside(access)))
}

fn check_bar0(function: &NvmeFunction, access: RegionAccess) -> Result<(), String> {
    let end = access.offset.checked_add(u64::from(access.count));
    end.filter(|end| *end <= function.bar0_bytes()).map(drop).ok_or_else(|| outside(access))
}

impl FrontEndSession for VfioUserSession {
    type Queue = NvmeQueueSession;
    type Disk = NvmeDisk;
    type Reserve = VfioSessionReserve;
    /// Never constructed: sessions are not handed over.
    type State = Infallible;
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
        VfioUserSession {
            config,
            log: Arc::clone(log),
            connection: Arc::new(connection.stream),
            reader: FrameReader::new(FrameLimits::for_data(DATA_BYTES_MAX, DESCRIPTORS_MAX)),
            function: None,
            replies: reserve.replies,
            set: Arc::new(reserve.set),
            awaited: None,
            lacks_room: false,
            is_lane_gone: false,
        }
    }

    fn resume(
        state: Infallible,
        _reserve: VfioSessionReserve,
        _config: VfioUserExport,
        _log: &Arc<ExportLog>,
    ) -> Result<(VfioUserSession, ()), String> {
        match state {}
    }

    fn begin(&mut self, _start: Option<()>) -> Result<(), VfioSessionError> {
        Ok(())
    }

    fn step(&mut self) -> SessionStep<VfioSessionError> {
        match self.turn() {
            Ok(true) => SessionStep::Handled,
            Ok(false) => SessionStep::Waiting,
            Err(error) => {
                self.is_lane_gone |= matches!(error, VfioSessionError::LaneGone(_));
                SessionStep::Over(error)
            }
        }
    }

    /// Waits for a message, room for a reply, or replies of a queue.
    fn interest(&self) -> (AwaitedFd, EventFlags) {
        (Arc::clone(&self.set) as _, EventFlags::IN)
    }

    fn with_config<T>(&mut self, change: impl FnOnce(&mut VfioUserExport) -> T) -> T {
        change(&mut self.config)
    }

    /// The host is notified by an asynchronous event, if it has requested one.
    fn change(&mut self, info: &Arc<DeviceInfo>) -> Result<Changed, String> {
        let Some(function) = &mut self.function else { return self.config.change(info).map(|()| Changed::Unseen) };
        function.suspend_all(&self.config).map_err(|gone| gone.to_string())?;
        let changed = self.config.change(info);
        function.set_device(&self.config).map_err(|error| error.to_string())?;
        changed.map(|()| Changed::Told)
    }

    fn hand_over(&mut self) -> (Vec<usize>, Result<Infallible, String>) {
        (Vec::new(), Err("a vfio-user session cannot be handed over: disconnect its client first".into()))
    }

    fn go_on(&mut self, _running: Vec<usize>) {}

    fn view(&self) -> VfioSessionView {
        let function = self.function.as_ref();
        VfioSessionView {
            dma_maps: function.map_or(0, NvmeFunction::dma_maps),
            io_queues: function.map_or(0, NvmeFunction::io_queues),
        }
    }

    fn end(self, end: &SessionEnd<VfioSessionError>) -> (VfioUserExport, Result<(), VfioSessionError>) {
        let VfioUserSession { config, log, function, mut is_lane_gone, .. } = self;
        if let Some(mut function) = function {
            is_lane_gone |= function.suspend_all(&config).is_err();
        }
        config.queues.iter().for_each(NvmeQueueRemote::close);
        match end {
            SessionEnd::Handed => unreachable!("sessions are not handed over"),
            SessionEnd::Stopped => log.info("the client is disconnected: the export ends"),
            SessionEnd::Over(VfioSessionError::Left) => log.info("the client left"),
            SessionEnd::Over(error) => log.warn(format_args!("the client is disconnected: {error}")),
        }
        let ended = if is_lane_gone { Err(LaneGone.into()) } else { Ok(()) };
        (config, ended)
    }
}

impl ExportedDisk for NvmeDisk {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn set_info(&mut self, info: &Arc<DeviceInfo>) {
        self.info = DeviceInfo::clone(info);
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
