//! An encrypted connection of an admin queue: a socket of the system behind a channel of TLS.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use blkyard_nvme::tls::TlsPsk;
use blkyard_tls::{RECORD_BYTES, TlsChannel, TlsError};

use crate::nvme_tcp::admin_stream::AdminSocket;

/// What has most likely happened if a target ends the handshake.
const CURE: &str = "see whether the target knows this host, and has the same key of the same derivation";

/// A socket whose handshake is complete. Reads and writes do not wait.
#[derive(Debug)]
pub(super) struct TlsSocket {
    socket: TcpStream,
    channel: TlsChannel,
    /// For ciphertext that comes.
    buffer: Box<[u8]>,
    /// Whether the last read was as long as it could be: more may be in the channel.
    has_more: bool,
}

impl TlsSocket {
    /// Shakes hands over a connected socket, for this time at most. The error is the cause.
    pub(super) fn connect(mut socket: TcpStream, psk: &TlsPsk, limit: Duration) -> Result<TlsSocket, String> {
        let until = Instant::now() + limit;
        let mut channel = TlsChannel::client(&psk.identity, &psk.key).map_err(|error| error.to_string())?;
        let mut bytes = [0; 4096];
        loop {
            let is_open = channel.shake_hands();
            // Also what tells the target that it has failed.
            let outgoing = channel.outgoing();
            let sent = socket.write_all(outgoing).map(|()| outgoing.len());
            let is_open = is_open.map_err(|error| format!("{error}; {CURE}"))?;
            channel.sent(sent.map_err(|error| error.to_string())?);
            if is_open {
                socket.set_nonblocking(true).map_err(|error| error.to_string())?;
                return Ok(TlsSocket { socket, channel, buffer: vec![0; RECORD_BYTES].into(), has_more: false });
            }
            let rest = until.saturating_duration_since(Instant::now());
            let no_answer = || format!("no answer within {limit:?}; see whether this port speaks TLS");
            if rest.is_zero() {
                return Err(no_answer());
            }
            socket.set_read_timeout(Some(rest)).map_err(|error| error.to_string())?;
            match socket.read(&mut bytes) {
                Ok(0) => return Err(format!("the target has closed the connection; {CURE}")),
                Ok(received) => channel.put(&bytes[..received]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(no_answer());
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

fn broken(error: TlsError) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

impl Read for TlsSocket {
    fn read(&mut self, clear: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut filled = 0;
            while filled < clear.len() {
                match self.channel.read(&mut clear[filled..]) {
                    Ok(0) => break,
                    Ok(read) => filled += read,
                    // It comes again.
                    Err(_) if filled > 0 => break,
                    Err(TlsError::Ended) => return Ok(0),
                    Err(error) => return Err(broken(error)),
                }
            }
            self.has_more = filled == clear.len();
            if filled > 0 {
                return Ok(filled);
            }
            match self.socket.read(&mut self.buffer)? {
                0 => return Ok(0),
                received => self.channel.put(&self.buffer[..received]),
            }
        }
    }
}

impl Write for TlsSocket {
    /// Takes all of it if the system has taken all before.
    fn write(&mut self, clear: &[u8]) -> io::Result<usize> {
        self.flush()?;
        self.channel.write(clear).map_err(broken)?;
        match self.flush() {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(clear.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.is_sending() {
            match self.socket.write(self.channel.outgoing()) {
                Ok(sent) => self.channel.sent(sent),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl AdminSocket for TlsSocket {
    fn peer(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn has_more(&self) -> bool {
        self.has_more
    }

    fn is_sending(&self) -> bool {
        !self.channel.outgoing().is_empty()
    }

    fn finish(&mut self) {
        self.channel.close();
        // A peer that has gone needs none.
        let _ = self.flush();
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}
