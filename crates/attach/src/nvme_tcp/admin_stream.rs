//! The connection of the admin queue: a socket of the control thread, and how it is connected.
//!
//! The traits are those of the system's sockets ([`SystemConnector`]), and of the simulation's.

use std::fmt::Debug;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use blkyard_mem::RegionTable;
use blkyard_nvme::tcp::SendList;
use blkyard_nvme::tls::TlsPsk;
use blkyard_sys::{EventFd, PollFlags};

use crate::nvme_tcp::tls_socket::TlsSocket;

/// Bytes read at once.
const READ_BYTES: usize = 16 << 10;

/// Connects the streams of admin queues.
pub trait AdminConnector: Debug + Send {
    /// Begins to connect to `HOST:PORT`, for this time at most. `wake` is signalled at the end.
    fn begin(&self, address: &str, limit: Duration, wake: &Arc<EventFd>) -> Box<dyn AdminAttempt>;
}

/// A connect under way.
pub trait AdminAttempt: Debug + Send {
    /// The outcome, once there is one. The error is the cause.
    fn outcome(&mut self) -> Option<Result<Box<dyn AdminSocket>, String>>;
}

/// A connected stream. Reads and writes do not wait.
pub trait AdminSocket: Read + Write + Debug + Send {
    /// Address of the other end.
    ///
    /// # Errors
    /// The connection is broken already.
    fn peer(&self) -> io::Result<SocketAddr>;

    /// Descriptor to wait for; unset for one that signals its owner otherwise.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Whether bytes have come of which the descriptor does not tell.
    fn has_more(&self) -> bool {
        false
    }

    /// Whether the system has not taken all that was written: once it has room, [`Write::flush`] goes on.
    fn is_sending(&self) -> bool {
        false
    }

    /// The other end is to see the end of the stream behind what was written.
    fn finish(&mut self);
}

impl AdminSocket for TcpStream {
    fn peer(&self) -> io::Result<SocketAddr> {
        self.peer_addr()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }

    fn finish(&mut self) {
        // A peer that has gone needs none.
        let _ = self.shutdown(Shutdown::Write);
    }
}

/// Connects sockets of the system, each on a thread of its own.
#[derive(Debug)]
pub(super) struct SystemConnector {
    /// Key of the connections, if they are encrypted.
    pub(super) tls: Option<Arc<TlsPsk>>,
}

impl AdminConnector for SystemConnector {
    /// Resolves the address and connects, to the first of its addresses that answers.
    fn begin(&self, address: &str, limit: Duration, wake: &Arc<EventFd>) -> Box<dyn AdminAttempt> {
        let (sender, outcome) = channel();
        let (address, wake, psk) = (address.to_owned(), Arc::clone(wake), self.tls.clone());
        let failed = sender.clone();
        let thread = std::thread::Builder::new().name("nvme-connect".into()).spawn(move || {
            let _ = sender.send(connect(&address, psk.as_deref(), limit));
            wake.signal();
        });
        if let Err(error) = thread {
            let _ = failed.send(Err(format!("no thread to connect: {error}; see the limits on threads and memory")));
        }
        Box::new(SystemAttempt(outcome))
    }
}

/// A connect on a thread of its own.
#[derive(Debug)]
struct SystemAttempt(Receiver<Result<Box<dyn AdminSocket>, String>>);

impl AdminAttempt for SystemAttempt {
    fn outcome(&mut self) -> Option<Result<Box<dyn AdminSocket>, String>> {
        match self.0.try_recv() {
            Ok(outcome) => Some(outcome),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err("the thread that connects has ended".into())),
        }
    }
}

fn connect(address: &str, psk: Option<&TlsPsk>, limit: Duration) -> Result<Box<dyn AdminSocket>, String> {
    let addresses = address.to_socket_addrs().map_err(|error| format!("cannot resolve {address}: {error}"))?;
    connect_to(&addresses.collect::<Vec<_>>(), psk, limit)
}

/// Connects to the first of these addresses that answers. Each has an equal part of the time that is left: the owner of
/// the connection waits for no longer, and one that drops all packets would keep it from the others at each attempt.
fn connect_to(addresses: &[SocketAddr], psk: Option<&TlsPsk>, limit: Duration) -> Result<Box<dyn AdminSocket>, String> {
    let until = Instant::now() + limit;
    let mut last = "the name has no address".to_owned();
    for (address, left) in addresses.iter().zip((1..=addresses.len() as u32).rev()) {
        // Zero is no time that the system takes.
        let part = (until.saturating_duration_since(Instant::now()) / left).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(address, part) {
            Ok(socket) => {
                // Commands are small, and their answers are awaited.
                let _ = socket.set_nodelay(true);
                if let Some(psk) = psk {
                    let shaken = TlsSocket::connect(socket, psk, limit);
                    return match shaken {
                        Ok(socket) => Ok(Box::new(socket)),
                        Err(cause) => Err(format!("TLS with {address}: {cause}")),
                    };
                }
                socket.set_nonblocking(true).map_err(|error| error.to_string())?;
                return Ok(Box::new(socket));
            }
            Err(error) => last = format!("cannot connect to {address}: {error}"),
        }
    }
    Err(last)
}

/// State of the connection after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdminStreamState {
    Open,
    /// The peer has closed it, or it is broken.
    Lost,
}

/// A connection.
#[derive(Debug)]
pub(super) struct AdminStream {
    pub(super) association: u64,
    pub(super) peer: SocketAddr,
    socket: Box<dyn AdminSocket>,
    /// Bytes to be sent. Data of commands is copied: there is little.
    outgoing: Vec<u8>,
    buffer: Box<[u8]>,
}

impl AdminStream {
    pub(super) fn new(association: u64, socket: Box<dyn AdminSocket>) -> Option<AdminStream> {
        let peer = socket.peer().ok()?;
        Some(AdminStream { association, peer, socket, outgoing: vec![], buffer: vec![0; READ_BYTES].into() })
    }

    /// Whether the next list is taken.
    pub(super) fn can_send(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Copies a list, to be sent.
    pub(super) fn push(&mut self, memory: &RegionTable, list: &SendList) {
        list.copy(memory, 0, list.total(), &mut self.outgoing);
    }

    /// Sends as much as the socket takes.
    pub(super) fn send(&mut self) -> AdminStreamState {
        while !self.outgoing.is_empty() {
            match self.socket.write(&self.outgoing) {
                Ok(sent) => drop(self.outgoing.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return AdminStreamState::Lost,
            }
        }
        match self.socket.flush() {
            Err(error) if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                AdminStreamState::Lost
            }
            _ => AdminStreamState::Open,
        }
    }

    /// Receives once. `take` gets the bytes; none if nothing has come.
    pub(super) fn receive(&mut self) -> (&[u8], AdminStreamState) {
        match self.socket.read(&mut self.buffer) {
            Ok(0) => (&[], AdminStreamState::Lost),
            Ok(received) => (&self.buffer[..received], AdminStreamState::Open),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                (&[], AdminStreamState::Open)
            }
            Err(_) => (&[], AdminStreamState::Lost),
        }
    }

    /// Whether bytes have come of which [`AdminStream::events`] does not tell.
    pub(super) fn has_more(&self) -> bool {
        self.socket.has_more()
    }

    /// What to wait for.
    pub(super) fn events(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let is_sending = !self.outgoing.is_empty() || self.socket.is_sending();
        let out = if is_sending { PollFlags::OUT } else { PollFlags::empty() };
        Some((self.socket.descriptor()?, PollFlags::IN | out))
    }

    /// Closes it, with the end of the stream behind what was sent.
    pub(super) fn close(mut self) {
        self.send();
        self.socket.finish();
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rustix::net::listen;

    use super::*;

    /// An address whose full queue of connections answers no further one, as a firewall does that drops them.
    fn silent_address() -> (TcpListener, TcpStream, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        (listener, TcpStream::connect(address).unwrap(), address)
    }

    #[test]
    fn address_that_does_not_answer_leaves_time_for_the_next() {
        let (_queue, _first, silent) = silent_address();
        let target = TcpListener::bind("127.0.0.1:0").unwrap();
        let limit = Duration::from_secs(2);
        let began = Instant::now();
        let socket = connect_to(&[silent, target.local_addr().unwrap()], None, limit).unwrap();
        assert_eq!(socket.peer().unwrap(), target.local_addr().unwrap());
        // The owner of the connection waits for no longer.
        assert!(began.elapsed() < limit, "{:?}", began.elapsed());
        let error = connect_to(&[silent, silent], None, limit).unwrap_err();
        assert!(error.contains(&silent.to_string()), "{error}");
    }
}
