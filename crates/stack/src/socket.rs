//! Admin connections and the clock of a control side, over the simulated network.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_attach::{AdminAttempt, AdminConnector, AdminSocket};
use blkyard_sys::{EventFd, PollFd, TimeSource};

use crate::network::{Connecting, Ending, Network, Readable, Side};

/// Address of a port.
pub(crate) fn address(port: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1 + port as u8], 4420))
}

/// Number of the port at an address.
pub(crate) fn port_of(address: SocketAddr) -> usize {
    match address {
        SocketAddr::V4(address) => usize::from(address.ip().octets()[3]) - 1,
        SocketAddr::V6(_) => unreachable!("ports have addresses of four bytes"),
    }
}

/// The clock of the world.
#[derive(Clone, Debug)]
pub(crate) struct WorldClock {
    began: Instant,
    network: Network,
}

impl WorldClock {
    pub(crate) fn new(network: &Network) -> WorldClock {
        WorldClock { began: Instant::now(), network: network.clone() }
    }

    /// Time of the world, ns.
    pub(crate) fn ns_of(&self, time: Instant) -> u64 {
        time.saturating_duration_since(self.began).as_nanos() as u64
    }
}

impl TimeSource for WorldClock {
    fn now(&self) -> Instant {
        self.began + Duration::from_nanos(self.network.now_ns())
    }

    fn wait(&self, _fds: &mut [PollFd<'_>], _deadline: Option<Instant>) -> Result<usize> {
        unreachable!("nothing waits in the world")
    }
}

/// Connects in the world.
#[derive(Clone, Debug)]
pub(crate) struct WorldConnector(pub(crate) Network);

#[derive(Debug)]
struct WorldAttempt {
    /// Taken by the socket.
    socket: Option<WorldSocket>,
    until_ns: u64,
}

/// An admin connection.
#[derive(Debug)]
struct WorldSocket {
    network: Network,
    number: u64,
    peer: SocketAddr,
    is_finished: bool,
}

impl AdminConnector for WorldConnector {
    fn begin(&self, address: &str, limit: Duration, _wake: &Arc<EventFd>) -> Box<dyn AdminAttempt> {
        let Ok(peer) = address.parse() else { unreachable!("addresses are made by the world") };
        let number = self.0.connect(port_of(peer));
        let socket = WorldSocket { network: self.0.clone(), number, peer, is_finished: false };
        let until_ns = self.0.now_ns() + limit.as_nanos() as u64;
        Box::new(WorldAttempt { socket: Some(socket), until_ns })
    }
}

impl AdminAttempt for WorldAttempt {
    fn outcome(&mut self) -> Option<std::result::Result<Box<dyn AdminSocket>, String>> {
        let WorldSocket { network, number, .. } = self.socket.as_ref()?;
        match network.connecting(*number) {
            Connecting::Waiting if network.now_ns() < self.until_ns => None,
            Connecting::Waiting => Some(Err("no answer".into())),
            Connecting::Refused => Some(Err("refused".into())),
            Connecting::Open => self.socket.take().map(|socket| Ok(Box::new(socket) as _)),
        }
    }
}

impl AdminSocket for WorldSocket {
    fn peer(&self) -> Result<SocketAddr> {
        Ok(self.peer)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn finish(&mut self) {
        self.is_finished = true;
    }
}

impl Read for WorldSocket {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        match self.network.readable(self.number, Side::Host) {
            Readable::Nothing => Err(ErrorKind::WouldBlock.into()),
            Readable::End => Ok(0),
            Readable::Broken => Err(Error::from(ErrorKind::ConnectionReset)),
            Readable::Bytes => {
                let bytes = self.network.read(self.number, Side::Host, buffer.len());
                buffer[..bytes.len()].copy_from_slice(&bytes);
                Ok(bytes.len())
            }
        }
    }
}

impl Write for WorldSocket {
    fn write(&mut self, buffer: &[u8]) -> Result<usize> {
        match self.network.write(self.number, Side::Host, buffer) {
            0 => Err(ErrorKind::WouldBlock.into()),
            taken => Ok(taken),
        }
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Drop for WorldSocket {
    fn drop(&mut self) {
        let ending = if self.is_finished { Ending::Fin } else { Ending::Death };
        self.network.close(self.number, Side::Host, ending);
    }
}
