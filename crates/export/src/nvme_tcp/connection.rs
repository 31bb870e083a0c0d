//! A connection on the control path: before its Connect, or the admin queue of a controller, or until its peer has seen
//! its end.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_nvme::auth::AuthTarget;
use blkyard_nvme::fabrics::ConnectCommand;
use blkyard_nvme::tcp::{SendList, TcpAdminEvent, TcpAdminQueue, TcpEnd, TcpTargetOptions};
use blkyard_nvme::tls::TlsHosts;
use blkyard_nvme::{AdminCompletion, ConnectedQueue, NvmeStatus};
use blkyard_sys::{Epoll, EventFlags, Registered};
use blkyard_tls::{HANDSHAKE, TlsChannel, TlsError};

use super::socket::{Arrived, BufferedSocket};
use super::{IN_CAPSULE_BYTES, TRANSFER_BYTES};

/// Bytes received at once: a few admin commands, so that no connection delays the others.
const RECEIVE_BYTES: usize = 8 << 10;
/// Time for ICReq and Connect, and then for the authentication.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// Time for a peer to see a TermReq and to close.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// A Connect that waits for the end of the host's earlier association.
#[derive(Debug)]
pub(super) struct WaitingConnect {
    pub(super) slot: u16,
    pub(super) command: ConnectCommand,
    pub(super) data: Vec<u8>,
    /// The last answer of the authentication, which has taken place: it is given in place of that to the Connect.
    pub(super) answer: Option<AdminCompletion>,
}

/// What follows once the host of a connection is authenticated.
#[derive(Debug)]
pub(super) enum AfterAuth {
    /// It is the admin queue of the new controller.
    Admin,
    /// It is this I/O queue.
    Io(ConnectedQueue, WaitingConnect),
    /// The association before ends, and a new one begins.
    Replace(WaitingConnect),
}

/// What a connection is.
#[derive(Debug)]
pub(super) enum ConnectionPhase {
    /// Not connected to a controller.
    New,
    /// A Connect waits.
    Connecting(WaitingConnect),
    /// The host of this controller is being authenticated.
    Authenticating(u16, Box<AfterAuth>),
    /// The admin queue of this controller.
    Admin(u16),
    /// Ended: its peer is to close.
    Closing,
}

/// A connection on the control path.
#[derive(Debug)]
pub(super) struct TargetConnection {
    socket: Registered<BufferedSocket>,
    pub(super) queue: TcpAdminQueue,
    pub(super) phase: ConnectionPhase,
    /// The authentication that is going on.
    pub(super) auth: Option<AuthTarget>,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    list: SendList,
    /// Latest time of the next phase.
    pub(super) until: Option<Instant>,
    /// Whether the set reports room for bytes to be sent.
    awaits_room: bool,
    /// Hosts with keys, for a peer that begins with a handshake of TLS. Unset without TLS, and behind the first byte.
    tls: Option<Arc<TlsHosts>>,
}

impl TargetConnection {
    /// Options of a connection before its Connect.
    pub(super) const OPTIONS: TcpTargetOptions = TcpTargetOptions {
        slots: 1,
        segments_max: 1,
        in_capsule: IN_CAPSULE_BYTES,
        maxh2cdata: TRANSFER_BYTES,
        header_digest: true,
        data_digest: true,
        alignment: 0,
    };

    /// A new connection, local and peer's address, in a set under this token. One that the peer has left already is
    /// none of the errors: its end is found by the first receive.
    ///
    /// # Errors
    /// The system has no memory left.
    pub(super) fn accept(
        (stream, addresses): (TcpStream, [SocketAddr; 2]),
        tls: Option<&Arc<TlsHosts>>,
        set: &Epoll,
        token: u64,
        now: Instant,
    ) -> io::Result<TargetConnection> {
        let queue = TcpAdminQueue::new(TargetConnection::OPTIONS)?;
        let mut connection = TargetConnection::with(BufferedSocket::new(stream)?, addresses, queue, set, token, now)?;
        connection.tls = tls.cloned();
        Ok(connection)
    }

    /// A connection with this queue.
    ///
    /// # Errors
    /// The system has no memory left.
    pub(super) fn with(
        socket: BufferedSocket,
        [local, peer]: [SocketAddr; 2],
        queue: TcpAdminQueue,
        set: &Epoll,
        token: u64,
        now: Instant,
    ) -> io::Result<TargetConnection> {
        let socket = set.register(socket, token, EventFlags::IN)?;
        Ok(TargetConnection {
            socket,
            queue,
            phase: ConnectionPhase::New,
            auth: None,
            local,
            peer,
            list: SendList::new(SendList::PIECES_MIN),
            until: Some(now + CONNECT_TIME),
            awaits_room: false,
            tls: None,
        })
    }

    /// A connection of an I/O queue that has ended, until its peer has seen that.
    ///
    /// # Errors
    /// The system has no memory left, or the peer has closed it.
    pub(super) fn closing(
        socket: BufferedSocket,
        set: &Epoll,
        token: u64,
        now: Instant,
    ) -> io::Result<TargetConnection> {
        let stream = socket.stream().try_clone()?;
        drop(socket);
        let addresses = [stream.local_addr()?, stream.peer_addr()?];
        let mut connection = TargetConnection::accept((stream, addresses), None, set, token, now)?;
        connection.close(now);
        Ok(connection)
    }

    /// Receives bytes, once. False at the end of the stream.
    pub(super) fn receive(&mut self) -> bool {
        let socket = self.socket.get_mut();
        let arrived = socket.receive(RECEIVE_BYTES);
        if arrived != Arrived::Bytes {
            return arrived != Arrived::End;
        }
        // Its first byte: no PDU of NVMe/TCP that a host may begin with has this type.
        let Some(hosts) = self.tls.take().filter(|_| socket.unread()[0] == HANDSHAKE) else { return true };
        let Ok(channel) = TlsChannel::server(move |identity| hosts.key(identity).map(<[u8]>::to_vec)) else {
            return false;
        };
        socket.start_tls(channel);
        socket.receive(RECEIVE_BYTES) != Arrived::End
    }

    /// The identity by which the peer is known, if the connection is encrypted.
    pub(super) fn tls_identity(&self) -> Option<String> {
        self.socket.get().tls_identity()
    }

    /// Whether it is encrypted.
    pub(super) fn is_encrypted(&self) -> bool {
        self.socket.get().is_encrypted()
    }

    /// Why its encryption is broken, once.
    pub(super) fn take_tls_error(&mut self) -> Option<TlsError> {
        self.socket.get_mut().take_tls_error()
    }

    /// The next event in the received bytes.
    pub(super) fn next_event(&mut self) -> Option<TcpAdminEvent> {
        let TargetConnection { socket, queue, phase, .. } = self;
        let socket = socket.get_mut();
        let mut bytes = if let ConnectionPhase::Closing = phase { &[][..] } else { socket.unread() };
        let event = queue.receive(&mut bytes);
        let left = bytes.len();
        socket.keep(left);
        event
    }

    /// Answers a command without data.
    pub(super) fn respond(&mut self, slot: u16, status: NvmeStatus, result: u64) {
        self.queue.complete(AdminCompletion { slot, status, result, data: Vec::new() });
    }

    /// Begins an authentication, in the time that there is for one.
    pub(super) fn authenticate(&mut self, auth: AuthTarget, id: u16, then: AfterAuth, now: Instant) {
        self.auth = Some(auth);
        self.phase = ConnectionPhase::Authenticating(id, Box::new(then));
        self.until = Some(now + CONNECT_TIME);
    }

    /// Sends what is to be sent, as far as the kernel takes it.
    pub(super) fn send(&mut self) {
        loop {
            let TargetConnection { socket, queue, list, .. } = self;
            let socket = socket.get_mut();
            while socket.has_room()
                && let Some(number) = queue.fill(list)
            {
                socket.add(list, queue.memory());
                list.clear();
                queue.sent(number);
            }
            socket.flush();
            // Sent data makes room for the next answer; other events come with bytes, which are taken later.
            let event = queue.receive(&mut &[][..]);
            debug_assert!(event.is_none(), "without bytes there is no event: {event:?}");
            if !queue.wants_send() || !socket.has_room() {
                break;
            }
        }
        self.await_room();
    }

    /// Makes all that is to be sent into bytes, which the socket keeps.
    pub(super) fn collect(&mut self) {
        let TargetConnection { socket, queue, list, .. } = self;
        while let Some(number) = queue.fill(list) {
            socket.get_mut().add(list, queue.memory());
            list.clear();
            queue.sent(number);
            let event = queue.receive(&mut &[][..]);
            debug_assert!(event.is_none(), "without bytes there is no event: {event:?}");
        }
    }

    /// The socket.
    pub(super) fn socket(&self) -> &BufferedSocket {
        self.socket.get()
    }

    /// Ends the connection: the peer gets what is to be sent, and the end of the stream.
    pub(super) fn close(&mut self, now: Instant) {
        self.queue.abandon(TcpEnd::Closed);
        self.phase = ConnectionPhase::Closing;
        self.until = Some(now + CLOSE_TIME);
        self.send();
        self.socket.get_mut().shut_down();
    }

    /// The socket and the queue of a connection that is an I/O queue.
    pub(super) fn into_parts(self) -> (BufferedSocket, TcpAdminQueue) {
        (self.socket.into_inner(), self.queue)
    }

    fn await_room(&mut self) {
        let wants = self.socket.get().is_sending();
        if wants != self.awaits_room {
            self.awaits_room = wants;
            // A peer that reads no answers gets no further ones.
            let events = if wants { EventFlags::OUT } else { EventFlags::IN };
            // Without memory for that, it is sent with the next bytes received.
            let _ = self.socket.set_events(events);
        }
    }
}
