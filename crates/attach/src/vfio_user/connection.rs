//! The socket of a session: commands and their replies, with a time limit for each.
//!
//! One call sends a command and waits for its reply. Commands of the server that arrive meanwhile are answered. Owned
//! by the thread that controls the device; never used on a lane.

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use blkyard_sys::{EventFd, PollFd, PollFlags, TimeSource, is_ready, recv_fds, send_fds};
use blkyard_wire::vfio_user::{Command, DmaAccess, FrameError, MessageHeader, VfioReply, VfioRequest};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::vfio_user::VfioUserError;
use crate::vfio_user::session::{ClientSession, DESCRIPTORS_MAX, PeerLimits, SessionEvent, VfioAnswer};

/// Maximum replies waiting for room in the socket; at the limit, reading stops.
const REPLIES_MAX: usize = 4;

/// Maximum reads of the socket in a row, so a server that keeps sending blocks no other work.
const READS_MAX: usize = 64;

/// Memory that the server accesses by messages.
pub(crate) trait DmaMemory {
    /// Copies bytes out. Returns false if they are not mapped for the server.
    fn read(&self, access: DmaAccess, to: &mut [u8]) -> bool;
    /// Copies bytes in. Returns false if they are not mapped for the server.
    fn write(&self, access: DmaAccess, from: &[u8]) -> bool;
}

/// A message being sent.
#[derive(Debug)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    /// Descriptors; sent with the first byte.
    descriptors: Vec<OwnedFd>,
}

/// A connection to a server.
#[derive(Debug)]
pub(crate) struct ServerConnection {
    stream: UnixStream,
    session: ClientSession<OwnedFd>,
    out: VecDeque<Outgoing>,
    clock: Arc<dyn TimeSource>,
    /// Readable when the device is closed: waiting for replies then ends.
    end: Arc<EventFd>,
    /// Error that made the connection unusable.
    failed: Option<VfioUserError>,
}

impl ServerConnection {
    /// A connection over this socket, with a negotiated version.
    pub(crate) fn open(
        stream: UnixStream,
        clock: Arc<dyn TimeSource>,
        end: Arc<EventFd>,
        reply_max: Duration,
    ) -> Result<ServerConnection, VfioUserError> {
        stream.set_nonblocking(true).map_err(|error| system(&error))?;
        let session = ClientSession::new(reply_max);
        let mut connection = ServerConnection { stream, session, out: VecDeque::new(), clock, end, failed: None };
        connection.call(&ClientSession::<OwnedFd>::proposal(), &[], &())?;
        Ok(connection)
    }

    /// Limits of the server.
    pub(crate) fn peer(&self) -> PeerLimits {
        self.session.peer().expect("a version was agreed on when the connection was opened")
    }

    /// From now on the server has the time of one reply for all of them, until [`ServerConnection::end_series`].
    pub(crate) fn begin_series(&mut self) {
        self.session.begin_series(self.clock.now());
    }

    /// Each reply has its own time again.
    pub(crate) fn end_series(&mut self) {
        self.session.end_series();
    }

    /// Why the connection is of no use any more.
    pub(crate) fn failure(&self) -> Option<&VfioUserError> {
        self.failed.as_ref()
    }

    /// Whether the server has closed its end. It has then released our memory, or its process has ended.
    pub(crate) fn is_closed_by_peer(&self) -> bool {
        is_ready(&self.stream, PollFlags::empty())
    }

    /// Sends a command, and waits for its reply.
    ///
    /// # Errors
    /// [`VfioUserError::Refused`] leaves the connection usable; any other error ends it.
    pub(crate) fn call(
        &mut self,
        request: &VfioRequest<'_>,
        descriptors: &[BorrowedFd<'_>],
        memory: &dyn DmaMemory,
    ) -> Result<VfioAnswer<OwnedFd>, VfioUserError> {
        let command = request.command();
        match self.guarded(|connection| connection.exchange(request, descriptors, memory))? {
            Ok(answer) => Ok(answer),
            Err(errno) => Err(VfioUserError::Refused { request: command, errno }),
        }
    }

    /// Answers pending commands of the server without waiting. To be called when the socket is readable.
    ///
    /// # Errors
    /// The connection is unusable.
    pub(crate) fn look(&mut self, memory: &dyn DmaMemory) -> Result<(), VfioUserError> {
        self.guarded(|connection| {
            connection.send()?;
            for _ in 0..READS_MAX {
                if matches!(connection.receive(memory)?, Received::Nothing) {
                    break;
                }
                connection.send()?;
            }
            Ok(())
        })
    }

    /// Ends the connection because of a refusal that makes it useless.
    pub(crate) fn fail(&mut self, error: &VfioUserError) {
        let _ = self.guarded(|_| Err::<(), _>(error.clone()));
    }

    /// Ends the connection at the first error, with a shutdown visible to the server.
    fn guarded<T>(
        &mut self,
        work: impl FnOnce(&mut ServerConnection) -> Result<T, VfioUserError>,
    ) -> Result<T, VfioUserError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        work(self).inspect_err(|error| {
            self.failed = Some(error.clone());
            // A server that has only ended its sending would seem to have closed: both directions were shut down then.
            if !matches!(error, VfioUserError::Closed) {
                let _ = self.stream.shutdown(Shutdown::Write);
            }
        })
    }

    fn exchange(
        &mut self,
        request: &VfioRequest<'_>,
        descriptors: &[BorrowedFd<'_>],
        memory: &dyn DmaMemory,
    ) -> Result<Result<VfioAnswer<OwnedFd>, u32>, VfioUserError> {
        let descriptors = descriptors.iter().map(BorrowedFd::try_clone_to_owned).collect::<io::Result<Vec<_>>>();
        let descriptors = descriptors.map_err(|error| system(&error))?;
        let (id, bytes) = self.session.request(request, self.clock.now());
        self.out.push_back(Outgoing { bytes, sent: 0, descriptors });
        loop {
            self.send()?;
            match self.receive(memory)? {
                Received::Reply(answered, result) if answered == id => return Ok(result),
                Received::Reply(..) | Received::Part => {}
                Received::Nothing => self.wait()?,
            }
            self.session.check_deadline(self.clock.now())?;
        }
    }

    /// Sends as much as fits the socket.
    fn send(&mut self) -> Result<(), VfioUserError> {
        while let Some(message) = self.out.front_mut() {
            let descriptors: Vec<_> = message.descriptors.iter().map(AsFd::as_fd).collect();
            match send_fds(&self.stream, &message.bytes[message.sent..], &descriptors, SendFlags::empty()) {
                Ok(sent) => {
                    message.sent += sent;
                    message.descriptors.clear();
                    if message.sent == message.bytes.len() {
                        self.out.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(lost(error)),
            }
        }
        Ok(())
    }

    /// Receives once, without waiting.
    fn receive(&mut self, memory: &dyn DmaMemory) -> Result<Received, VfioUserError> {
        if self.out.len() > REPLIES_MAX {
            return Ok(Received::Nothing);
        }
        let mut bytes = vec![0; self.session.wanted()];
        let received = match recv_fds(&self.stream, &mut bytes, DESCRIPTORS_MAX, RecvFlags::empty()) {
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            Err(error) => return Err(lost(error)),
            Ok(received) if received.bytes == 0 => return Err(self.session.end()),
            Ok(received) if received.truncated => {
                return Err(FrameError::Descriptors { max: DESCRIPTORS_MAX }.into());
            }
            Ok(received) => received,
        };
        let reply = match self.session.receive(&bytes[..received.bytes], received.fds)? {
            None => return Ok(Received::Part),
            Some(SessionEvent::Answer { id, result }) => return Ok(Received::Reply(id, result)),
            Some(SessionEvent::DmaRead { id, access }) => {
                let mut data = vec![0; access.count as usize];
                if memory.read(access, &mut data) {
                    VfioReply::DmaRead(access, &data).encode(id)
                } else {
                    refusal(id, Command::DmaRead)
                }
            }
            Some(SessionEvent::DmaWrite { id, access, data, no_reply }) => {
                match (memory.write(access, &data), no_reply) {
                    (_, true) => return Ok(Received::Part),
                    (true, _) => VfioReply::DmaWrite(access).encode(id),
                    (false, _) => refusal(id, Command::DmaWrite),
                }
            }
        };
        self.out.push_back(Outgoing { bytes: reply, sent: 0, descriptors: Vec::new() });
        Ok(Received::Part)
    }

    /// Waits until data arrives, the socket has room, or a reply is overdue.
    fn wait(&self) -> Result<(), VfioUserError> {
        let what = match self.out.len() {
            0 => PollFlags::IN,
            1..=REPLIES_MAX => PollFlags::IN | PollFlags::OUT,
            _ => PollFlags::OUT,
        };
        let mut fds = [PollFd::new(&self.stream, what), PollFd::new(&*self.end, PollFlags::IN)];
        self.clock.wait(&mut fds, self.session.deadline()).map_err(|error| system(&error))?;
        if fds[1].revents().is_empty() { Ok(()) } else { Err(VfioUserError::LetGo) }
    }
}

impl AsFd for ServerConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Result of one read of the socket.
enum Received {
    /// No data.
    Nothing,
    /// A part of a message, or a command of the server that was executed.
    Part,
    /// The reply to the command with this id.
    Reply(u16, Result<VfioAnswer<OwnedFd>, u32>),
}

/// No accessible memory.
impl DmaMemory for () {
    fn read(&self, _access: DmaAccess, _to: &mut [u8]) -> bool {
        false
    }

    fn write(&self, _access: DmaAccess, _from: &[u8]) -> bool {
        false
    }
}

fn refusal(id: u16, command: Command) -> Vec<u8> {
    MessageHeader::encode_error(id, command as u16, Errno::FAULT.raw_os_error().unsigned_abs()).to_vec()
}

fn lost(error: Errno) -> VfioUserError {
    match error {
        Errno::PIPE | Errno::CONNRESET => VfioUserError::Closed,
        error => system(&error.into()),
    }
}

fn system(error: &io::Error) -> VfioUserError {
    VfioUserError::System(error.to_string())
}
