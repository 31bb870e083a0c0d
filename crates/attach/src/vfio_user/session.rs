//! The client's side of a connection as a state machine: bytes and descriptors in; messages, events and a deadline out.
//!
//! The owner sends the result of [`ClientSession::request`] and passes received bytes to [`ClientSession::receive`], at
//! most [`ClientSession::wanted`]. A reply is matched with its command by its id and compared with it. After an error
//! the session has ended. Uses no socket, never waits and reads no clock.

use std::time::{Duration, Instant};

use blkyard_wire::vfio_user::{
    Command, DeviceRegions, DmaAccess, DmaUnmapRequest, Frame, FrameLimits, FrameReader, IrqInfo, MessageError,
    MessageHeader, MessageKind, RegionAccess, RegionInfo, RegionIoFds, VERSION, VfioCapabilities, VfioReply,
    VfioRequest, VfioVersion,
};

use crate::vfio_user::VfioUserError;

/// Maximum data bytes of a received message: the default of the specification.
const DATA_BYTES_MAX: u32 = 1 << 20;
/// Maximum descriptors of a received message: one for each area of a region, as some servers send, or for each queue.
pub(crate) const DESCRIPTORS_MAX: usize = 64;
/// Maximum bytes of a region's description: 250 areas and some capabilities.
const REGION_REPLY_MAX: u32 = 4096;
/// Maximum bytes of a reply about descriptors for a region: those of two doorbells of each of 170 queues.
const IO_FDS_REPLY_MAX: u32 = 16 << 10;
/// Maximum commands in flight.
const IN_FLIGHT_MAX: usize = 64;

/// Limits of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerLimits {
    /// Bytes of data in one message.
    pub(crate) data_bytes: u32,
    /// Descriptors with one message.
    pub(crate) descriptors: usize,
    /// DMA mappings.
    pub(crate) dma_maps: usize,
    /// Whether it may be asked for descriptors of a region.
    pub(crate) region_io_fds: bool,
}

/// An event from the server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SessionEvent<D> {
    /// The reply to a command, or the errno of its refusal.
    Answer { id: u16, result: Result<VfioAnswer<D>, u32> },
    /// The server reads process memory.
    DmaRead { id: u16, access: DmaAccess },
    /// The server writes process memory.
    DmaWrite { id: u16, access: DmaAccess, data: Vec<u8>, no_reply: bool },
}

/// A reply that matches its command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum VfioAnswer<D> {
    /// Done; also the answer to VERSION, after which [`ClientSession::peer`] is set.
    Done,
    /// Parts of the device.
    Device(DeviceRegions),
    /// A region, and the descriptors that came with it.
    Region(RegionInfo, Vec<D>),
    /// Bytes needed for a region's description.
    RegionNeeds(u32),
    /// Descriptors for parts of a region.
    IoFds(RegionIoFds, Vec<D>),
    /// Bytes needed for the description of these.
    IoFdsNeed(u32),
    /// An interrupt type.
    Irq(IrqInfo),
    /// The bytes of a region.
    Data(Vec<u8>),
}

/// Fields of a command to compare with its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Version,
    DmaMap,
    DmaUnmap(DmaUnmapRequest),
    Device,
    Region { index: u32, argsz: u32 },
    IoFds { index: u32, argsz: u32 },
    Irq { index: u32 },
    SetIrqs,
    Read(RegionAccess),
    Write(RegionAccess),
    Reset,
}

impl Asked {
    /// Fields of a request of an NVMe client.
    ///
    /// # Panics
    /// For all other requests.
    fn of(request: &VfioRequest<'_>) -> Asked {
        match request {
            VfioRequest::Version(_) => Asked::Version,
            VfioRequest::DmaMap(_) => Asked::DmaMap,
            VfioRequest::DmaUnmap(unmap) => Asked::DmaUnmap(*unmap),
            VfioRequest::DeviceGetInfo => Asked::Device,
            VfioRequest::DeviceGetRegionInfo { argsz, index } => Asked::Region { index: *index, argsz: *argsz },
            VfioRequest::DeviceGetRegionIoFds { argsz, index } => Asked::IoFds { index: *index, argsz: *argsz },
            VfioRequest::DeviceGetIrqInfo { index } => Asked::Irq { index: *index },
            VfioRequest::DeviceSetIrqs(_) => Asked::SetIrqs,
            VfioRequest::RegionRead(access) => Asked::Read(*access),
            VfioRequest::RegionWrite(access, _) => Asked::Write(*access),
            VfioRequest::DeviceReset => Asked::Reset,
            VfioRequest::DmaRead(_) | VfioRequest::DmaWrite(..) | VfioRequest::RegionWriteMulti(_) => {
                panic!("{} is not sent by this client", request.command())
            }
        }
    }
}

/// A command in flight.
#[derive(Debug)]
struct InFlightCommand {
    id: u16,
    command: Command,
    asked: Asked,
    deadline: Instant,
}

/// One connection, from its first byte to its end.
#[derive(Debug)]
pub(crate) struct ClientSession<D> {
    reader: FrameReader<D>,
    in_flight: Vec<InFlightCommand>,
    next_id: u16,
    /// Set once the version is negotiated.
    peer: Option<PeerLimits>,
    /// Time limit of replies.
    reply_max: Duration,
    /// When all replies of a series of commands are due.
    series_deadline: Option<Instant>,
}

impl<D> ClientSession<D> {
    /// A session without messages so far.
    pub(crate) fn new(reply_max: Duration) -> ClientSession<D> {
        let reader = FrameReader::new(FrameLimits::for_data(DATA_BYTES_MAX, DESCRIPTORS_MAX));
        ClientSession { reader, in_flight: Vec::new(), next_id: 0, peer: None, reply_max, series_deadline: None }
    }

    /// The version proposal, which is the first request.
    pub(crate) fn proposal() -> VfioRequest<'static> {
        let (major, minor) = VERSION;
        let capabilities = VfioCapabilities { max_msg_fds: DESCRIPTORS_MAX as u64, ..VfioCapabilities::default() };
        VfioRequest::Version(VfioVersion { major, minor, capabilities })
    }

    /// Limits of the server; unset before the version is negotiated.
    pub(crate) fn peer(&self) -> Option<PeerLimits> {
        self.peer
    }

    /// The message of a command: its id and bytes. Its reply is due within the time limit.
    ///
    /// # Panics
    /// If too many commands are in flight, or this one exceeds the server's limits, which the owner must check.
    pub(crate) fn request(&mut self, request: &VfioRequest<'_>, now: Instant) -> (u16, Vec<u8>) {
        assert!(self.in_flight.len() < IN_FLIGHT_MAX, "{IN_FLIGHT_MAX} commands are in flight");
        assert!(self.peer.is_some() || request.command() == Command::Version, "the version comes first");
        let asked = Asked::of(request);
        if let (Asked::Read(access) | Asked::Write(access), Some(peer)) = (asked, self.peer) {
            assert!(access.count <= peer.data_bytes, "{} bytes in one message", access.count);
        }
        while self.in_flight.iter().any(|command| command.id == self.next_id) {
            self.next_id = self.next_id.wrapping_add(1);
        }
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let deadline = self.series_deadline.into_iter().fold(now + self.reply_max, Instant::min);
        self.in_flight.push(InFlightCommand { id, command: request.command(), asked, deadline });
        (id, request.encode(id, false))
    }

    /// From now on the server has the time of one reply for all of them, until [`ClientSession::end_series`].
    pub(crate) fn begin_series(&mut self, now: Instant) {
        self.series_deadline = Some(now + self.reply_max);
    }

    /// Each reply has its own time again.
    pub(crate) fn end_series(&mut self) {
        self.series_deadline = None;
    }

    /// When the first reply is overdue.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.in_flight.iter().map(|command| command.deadline).min()
    }

    /// Checks that no reply is overdue.
    ///
    /// # Errors
    /// [`VfioUserError::Late`]
    pub(crate) fn check_deadline(&self, now: Instant) -> Result<(), VfioUserError> {
        match self.in_flight.iter().find(|command| command.deadline <= now) {
            None => Ok(()),
            Some(command) => Err(VfioUserError::Late { request: command.command, limit: self.reply_max }),
        }
    }

    /// Bytes that may be received next, at least one.
    pub(crate) fn wanted(&self) -> usize {
        self.reader.wanted()
    }

    /// Handles the end of the stream: the server has closed the connection.
    pub(crate) fn end(&self) -> VfioUserError {
        self.reader.end().map_or_else(VfioUserError::from, |()| VfioUserError::Closed)
    }

    /// Handles received bytes.
    ///
    /// # Errors
    /// The session has ended.
    pub(crate) fn receive(
        &mut self,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = D>,
    ) -> Result<Option<SessionEvent<D>>, VfioUserError> {
        let Some(frame) = self.reader.push(bytes, descriptors)? else { return Ok(None) };
        let MessageHeader { id, command, kind, .. } = frame.header;
        if let MessageKind::Command { no_reply } = kind {
            return self.command(&frame, no_reply).map(Some);
        }
        let position = self.in_flight.iter().position(|command| command.id == id);
        let position = position.ok_or(VfioUserError::UnknownReply { id })?;
        let InFlightCommand { command: asked_command, asked, .. } = self.in_flight.swap_remove(position);
        if asked_command as u16 != command {
            return Err(VfioUserError::OtherCommand { asked: asked_command, came: command });
        }
        let result = match kind {
            MessageKind::Error(errno) => Err(errno),
            _ => Ok(self.answer(asked_command, asked, frame)?),
        };
        Ok(Some(SessionEvent::Answer { id, result }))
    }

    /// A command of the server.
    fn command(&mut self, frame: &Frame<D>, no_reply: bool) -> Result<SessionEvent<D>, VfioUserError> {
        if self.peer.is_none() {
            return Err(VfioUserError::Early);
        }
        let MessageHeader { id, command, .. } = frame.header;
        match VfioRequest::parse(command, &frame.payload, frame.descriptors.len(), DATA_BYTES_MAX)? {
            VfioRequest::DmaRead(access) => Ok(SessionEvent::DmaRead { id, access }),
            VfioRequest::DmaWrite(access, data) => {
                Ok(SessionEvent::DmaWrite { id, access, data: data.to_vec(), no_reply })
            }
            _ => Err(MessageError::UnknownCommand(command).into()),
        }
    }

    /// The payload of a reply, compared with its request.
    fn answer(&mut self, request: Command, asked: Asked, frame: Frame<D>) -> Result<VfioAnswer<D>, VfioUserError> {
        let mismatch = VfioUserError::Mismatch { request };
        let reply = VfioReply::parse(request, &frame.payload, frame.descriptors.len(), DATA_BYTES_MAX)?;
        Ok(match (asked, reply) {
            (Asked::Version, VfioReply::Version(version)) => {
                self.agree(version)?;
                VfioAnswer::Done
            }
            (Asked::DmaUnmap(asked), VfioReply::DmaUnmap(done)) if asked == done => VfioAnswer::Done,
            (Asked::DmaMap, VfioReply::DmaMap)
            | (Asked::SetIrqs, VfioReply::DeviceSetIrqs)
            | (Asked::Reset, VfioReply::DeviceReset) => VfioAnswer::Done,
            (Asked::Device, VfioReply::DeviceGetInfo(device)) => VfioAnswer::Device(device),
            (Asked::Region { index, .. }, VfioReply::DeviceGetRegionInfo(info)) if info.index == index => {
                VfioAnswer::Region(info, frame.descriptors)
            }
            (Asked::Region { index, argsz: had }, VfioReply::RegionInfoCut { argsz, fixed })
                if fixed.index == index && (had + 1..=REGION_REPLY_MAX).contains(&argsz) =>
            {
                VfioAnswer::RegionNeeds(argsz)
            }
            (Asked::IoFds { index, .. }, VfioReply::DeviceGetRegionIoFds(fds)) if fds.index == index => {
                VfioAnswer::IoFds(fds, frame.descriptors)
            }
            (Asked::IoFds { index: asked, argsz: had }, VfioReply::RegionIoFdsCut { argsz, index })
                if index == asked && (had + 1..=IO_FDS_REPLY_MAX).contains(&argsz) =>
            {
                VfioAnswer::IoFdsNeed(argsz)
            }
            (Asked::Irq { index }, VfioReply::DeviceGetIrqInfo(info)) if info.index == index => VfioAnswer::Irq(info),
            (Asked::Read(access), VfioReply::RegionRead(came, data)) if came == access => {
                VfioAnswer::Data(data.to_vec())
            }
            (Asked::Write(access), VfioReply::RegionWrite(came)) if came == access => VfioAnswer::Done,
            _ => return Err(mismatch),
        })
    }

    fn agree(&mut self, version: VfioVersion) -> Result<(), VfioUserError> {
        let VfioVersion { major, minor, capabilities } = version;
        // A second socket was not offered, and pages of 4 KiB are mapped.
        let is_offered = !capabilities.twin_socket.supported && capabilities.pgsizes.get() & 4096 != 0;
        if major != VERSION.0 || minor > VERSION.1 || !is_offered {
            return Err(VfioUserError::Version { major, minor });
        }
        let within = |value: u64, max: u64| value.min(max) as usize;
        self.peer = Some(PeerLimits {
            data_bytes: within(capabilities.max_data_xfer_size.get(), u64::from(DATA_BYTES_MAX)) as u32,
            descriptors: within(capabilities.max_msg_fds, blkyard_sys::PASSED_FDS_MAX as u64),
            dma_maps: within(capabilities.max_dma_maps, u64::from(u16::MAX)),
            region_io_fds: capabilities.region_io_fds,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use blkyard_wire::vfio_user::{DeviceFlags, FrameError, IoFd, IoFdKind, RegionFlags, SparseArea, TwinSocket};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn feed(session: &mut ClientSession<u32>, bytes: &[u8]) -> Result<Option<SessionEvent<u32>>, VfioUserError> {
        feed_with(session, bytes, &[])
    }

    /// Passes whole messages, as from a socket, and returns the last event.
    fn feed_with(
        session: &mut ClientSession<u32>,
        mut bytes: &[u8],
        descriptors: &[u32],
    ) -> Result<Option<SessionEvent<u32>>, VfioUserError> {
        let (mut last, mut descriptors) = (None, descriptors.to_vec());
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(session.wanted().min(bytes.len()));
            last = session.receive(now, descriptors.drain(..))?.or(last);
            bytes = rest;
        }
        Ok(last)
    }

    fn version(major: u16, minor: u16, capabilities: VfioCapabilities) -> VfioReply<'static> {
        VfioReply::Version(VfioVersion { major, minor, capabilities })
    }

    /// A session with a negotiated version.
    fn ready(now: Instant) -> ClientSession<u32> {
        let mut session = ClientSession::new(LIMIT);
        let (id, _) = session.request(&ClientSession::<u32>::proposal(), now);
        let capabilities = VfioCapabilities { max_msg_fds: 8, ..VfioCapabilities::default() };
        let answer = feed(&mut session, &version(0, 1, capabilities).encode(id)).unwrap();
        assert_eq!(answer, Some(SessionEvent::Answer { id, result: Ok(VfioAnswer::Done) }));
        session
    }

    #[test]
    fn a_version_sets_the_limits_of_the_server() {
        let session = ready(Instant::now());
        assert_eq!(
            session.peer(),
            Some(PeerLimits { data_bytes: 1 << 20, descriptors: 8, dma_maps: 65535, region_io_fds: false })
        );
        let proposal = ClientSession::<u32>::proposal().encode(0, false);
        let text = String::from_utf8_lossy(&proposal[20..]).into_owned();
        assert!(text.contains("\"max_msg_fds\":64") && text.ends_with("}}\0"), "{text}");
    }

    #[test]
    fn versions_that_were_not_proposed_are_refused() {
        let twin = TwinSocket { supported: true, fd_index: None };
        let pages = VfioCapabilities { pgsizes: (1 << 21).try_into().unwrap(), ..VfioCapabilities::default() };
        for (major, minor, capabilities) in [
            (1, 0, VfioCapabilities::default()),
            (0, 2, VfioCapabilities::default()),
            (0, 1, VfioCapabilities { twin_socket: twin, ..VfioCapabilities::default() }),
            (0, 1, pages),
        ] {
            let mut session: ClientSession<u32> = ClientSession::new(LIMIT);
            let (id, _) = session.request(&ClientSession::<u32>::proposal(), Instant::now());
            let refused = feed(&mut session, &version(major, minor, capabilities).encode(id));
            assert_eq!(refused, Err(VfioUserError::Version { major, minor }));
            assert_eq!(session.peer(), None);
        }
    }

    #[test]
    fn replies_are_matched_by_id_in_any_order() {
        let now = Instant::now();
        let mut session = ready(now);
        let device = DeviceRegions { flags: DeviceFlags::PCI, regions: 9, irqs: 5 };
        let (first, _) = session.request(&VfioRequest::DeviceGetInfo, now);
        let (second, bytes) = session.request(&VfioRequest::DeviceReset, now);
        assert!(first != second && bytes[..2] == second.to_ne_bytes());
        let done = SessionEvent::Answer { id: second, result: Ok(VfioAnswer::Done) };
        assert_eq!(feed(&mut session, &VfioReply::DeviceReset.encode(second)), Ok(Some(done)));
        let answer = SessionEvent::Answer { id: first, result: Ok(VfioAnswer::Device(device)) };
        assert_eq!(feed(&mut session, &VfioReply::DeviceGetInfo(device).encode(first)), Ok(Some(answer)));
        let (third, _) = session.request(&VfioRequest::DeviceReset, now);
        let refused = SessionEvent::Answer { id: third, result: Err(95) };
        assert_eq!(feed(&mut session, &MessageHeader::encode_error(third, 13, 95)), Ok(Some(refused)));
        assert_eq!(session.deadline(), None);
    }

    #[test]
    fn refusal_that_repeats_the_access_is_a_refusal() {
        let now = Instant::now();
        let mut session = ready(now);
        let access = RegionAccess { offset: 0x1000, region: 0, count: 4 };
        for _ in 0..2 {
            let (id, _) = session.request(&VfioRequest::RegionWrite(access, &[0; 4]), now);
            let kind = MessageKind::Error(22);
            let header = MessageHeader { id, command: Command::RegionWrite as u16, payload_bytes: 16, kind };
            let refused = SessionEvent::Answer { id, result: Err(22) };
            assert_eq!(feed(&mut session, &[header.encode(), [0xa5; 16]].concat()), Ok(Some(refused)));
        }
    }

    #[test]
    fn ids_in_flight_are_not_used_again() {
        let now = Instant::now();
        let mut session = ready(now);
        let (kept, _) = session.request(&VfioRequest::DeviceReset, now);
        for _ in 0..0x1_0010 {
            let (id, _) = session.request(&VfioRequest::DeviceReset, now);
            assert_ne!(id, kept);
            feed(&mut session, &VfioReply::DeviceReset.encode(id)).unwrap();
        }
    }

    #[test]
    fn a_reply_is_due_within_the_limit() {
        let now = Instant::now();
        let mut session = ready(now);
        session.request(&VfioRequest::DeviceReset, now);
        session.request(&VfioRequest::DeviceGetInfo, now + LIMIT / 2);
        assert_eq!(session.deadline(), Some(now + LIMIT));
        assert_eq!(session.check_deadline(now + LIMIT / 2), Ok(()));
        let late = VfioUserError::Late { request: Command::DeviceReset, limit: LIMIT };
        assert_eq!(session.check_deadline(now + LIMIT), Err(late));
    }

    #[test]
    fn replies_that_do_not_match_are_named() {
        let now = Instant::now();
        let access = RegionAccess { offset: 8, region: 0, count: 4 };
        let info = |index| RegionInfo { index, flags: RegionFlags::READ, size: 4096, offset: 0, sparse: None };
        let cut = |index, argsz| VfioReply::RegionInfoCut { argsz, fixed: info(index) };
        let region = VfioRequest::DeviceGetRegionInfo { argsz: 64, index: 7 };
        let read = VfioRequest::RegionRead(access);
        let unmap = |address| DmaUnmapRequest::Range { address, size: 4096 };
        for (request, reply) in [
            (&read, VfioReply::RegionRead(RegionAccess { offset: 12, ..access }, &[0; 4])),
            (&read, VfioReply::RegionRead(RegionAccess { region: 1, ..access }, &[0; 4])),
            (&read, VfioReply::RegionRead(RegionAccess { count: 3, ..access }, &[0; 3])),
            (&read, VfioReply::RegionRead(RegionAccess { count: 5, ..access }, &[0; 5])),
            (&VfioRequest::RegionWrite(access, &[0; 4]), VfioReply::RegionWrite(RegionAccess { count: 0, ..access })),
            (&region, VfioReply::DeviceGetRegionInfo(info(0))),
            (&region, cut(0, 80)),
            // Repeated requests for a longer description, and one above the maximum.
            (&region, cut(7, 64)),
            (&region, cut(7, REGION_REPLY_MAX + 1)),
            (&region, cut(7, u32::MAX)),
            (
                &VfioRequest::DeviceGetIrqInfo { index: 2 },
                VfioReply::DeviceGetIrqInfo(IrqInfo {
                    index: 1,
                    flags: blkyard_wire::vfio_user::IrqFlags::EVENTFD,
                    count: 1,
                }),
            ),
            (&VfioRequest::DmaUnmap(unmap(4096)), VfioReply::DmaUnmap(unmap(8192))),
        ] {
            let mut session = ready(now);
            let (id, _) = session.request(request, now);
            let error = VfioUserError::Mismatch { request: request.command() };
            assert_eq!(feed(&mut session, &reply.encode(id)), Err(error), "{reply:?}");
        }
    }

    #[test]
    fn a_region_comes_with_its_descriptors() {
        let now = Instant::now();
        let mut session = ready(now);
        let sparse = Some(vec![SparseArea { offset: 4096, size: 4096 }]);
        let info = RegionInfo { index: 0, flags: RegionFlags::MMAP, size: 8192, offset: 0, sparse };
        let (id, _) = session.request(&VfioRequest::DeviceGetRegionInfo { argsz: 64, index: 0 }, now);
        let bytes = VfioReply::DeviceGetRegionInfo(info.clone()).encode(id);
        let answer = SessionEvent::Answer { id, result: Ok(VfioAnswer::Region(info, vec![5, 6])) };
        assert_eq!(feed_with(&mut session, &bytes, &[5, 6]), Ok(Some(answer)));
    }

    #[test]
    fn descriptors_for_a_region_come_once_their_length_is_known() {
        let now = Instant::now();
        let mut session = ready(now);
        let kind = IoFdKind::ShadowEventFd { memory: 1, at: 4096 };
        let part = IoFd { offset: 4096, size: 4, fd_index: 0, kind, flags: 0, value: 0 };
        let fds = RegionIoFds { index: 0, parts: vec![part] };
        let ask = |argsz| VfioRequest::DeviceGetRegionIoFds { argsz, index: 0 };
        let (id, _) = session.request(&ask(16), now);
        let cut = VfioReply::RegionIoFdsCut { argsz: 64, index: 0 }.encode(id);
        let needs = SessionEvent::Answer { id, result: Ok(VfioAnswer::IoFdsNeed(64)) };
        assert_eq!(feed(&mut session, &cut), Ok(Some(needs)));
        let (id, _) = session.request(&ask(64), now);
        let bytes = VfioReply::DeviceGetRegionIoFds(fds.clone()).encode(id);
        let answer = SessionEvent::Answer { id, result: Ok(VfioAnswer::IoFds(fds, vec![5, 6])) };
        assert_eq!(feed_with(&mut session, &bytes, &[5, 6]), Ok(Some(answer)));
        // No longer than before, and longer than any.
        for (argsz, needed) in [(64, 64), (16, IO_FDS_REPLY_MAX + 1)] {
            let mut session = ready(now);
            let (id, _) = session.request(&ask(argsz), now);
            let cut = VfioReply::RegionIoFdsCut { argsz: needed, index: 0 }.encode(id);
            assert!(feed(&mut session, &cut).is_err(), "{needed}");
        }
    }

    #[test]
    fn a_server_that_lies_gets_a_named_error() {
        let now = Instant::now();
        let map = DmaUnmapRequest::All;
        for (bytes, error) in [
            (VfioReply::DeviceReset.encode(9), VfioUserError::UnknownReply { id: 9 }),
            (
                VfioReply::DmaMap.encode(1),
                VfioUserError::OtherCommand { asked: Command::DeviceReset, came: Command::DmaMap as u16 },
            ),
            (
                MessageHeader::encode_error(1, 77, 5).to_vec(),
                VfioUserError::OtherCommand { asked: Command::DeviceReset, came: 77 },
            ),
            (VfioRequest::DmaUnmap(map).encode(0, false), MessageError::UnknownCommand(3).into()),
            (
                VfioRequest::DmaRead(DmaAccess { address: 0, count: (1 << 20) + 1 }).encode(0, false),
                MessageError::DataTooLong { command: Command::DmaRead, count: (1 << 20) + 1, max: 1 << 20 }.into(),
            ),
            (vec![0xff; 16], FrameError::Size { size: u32::MAX, max: (1 << 20) + 4096 + 80 }.into()),
            (
                [VfioReply::DeviceReset.encode(1), VfioReply::DeviceReset.encode(1)].concat(),
                VfioUserError::UnknownReply { id: 1 },
            ),
        ] {
            let mut session = ready(now);
            let (id, _) = session.request(&VfioRequest::DeviceReset, now);
            assert_eq!(id, 1);
            assert_eq!(feed(&mut session, &bytes), Err(error), "{bytes:?}");
        }
        let mut session = ready(now);
        let surplus = vec![0; DESCRIPTORS_MAX + 1];
        let many = feed_with(&mut session, &VfioReply::DeviceReset.encode(1), &surplus);
        assert_eq!(many, Err(FrameError::Descriptors { max: DESCRIPTORS_MAX }.into()));
    }

    #[test]
    fn commands_of_the_server_are_events_once_a_version_is_agreed_on() {
        let access = DmaAccess { address: 0x1000, count: 3 };
        let (read, write) = (VfioRequest::DmaRead(access), VfioRequest::DmaWrite(access, b"abc"));
        let mut session = ready(Instant::now());
        assert_eq!(feed(&mut session, &read.encode(7, false)), Ok(Some(SessionEvent::DmaRead { id: 7, access })));
        let event = SessionEvent::DmaWrite { id: 8, access, data: b"abc".to_vec(), no_reply: true };
        assert_eq!(feed(&mut session, &write.encode(8, true)), Ok(Some(event)));
        let mut early: ClientSession<u32> = ClientSession::new(LIMIT);
        early.request(&ClientSession::<u32>::proposal(), Instant::now());
        assert_eq!(feed(&mut early, &read.encode(0, false)), Err(VfioUserError::Early));
    }

    #[test]
    fn an_end_inside_a_message_is_told_from_one_between() {
        let mut session = ready(Instant::now());
        assert_eq!(session.end(), VfioUserError::Closed);
        feed(&mut session, &[0; 5]).unwrap();
        assert_eq!(session.end(), FrameError::Truncated { bytes: 5 }.into());
    }
}
