//! A session without threads and network, for the simulation of the whole stack: on a clock and over streams that it is
//! given. All else is as in an export; the lanes of its queues and its steps are run by the caller.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::super::NvmeTcpExport;
use super::super::clock::ControllerClock;
use super::NvmeTcpSession;
use crate::core::ExportLog;

impl NvmeTcpSession {
    /// A session on this clock.
    ///
    /// # Errors
    /// The system has no memory or descriptors left.
    pub fn simulated(
        listener: TcpListener,
        config: NvmeTcpExport,
        clock: ControllerClock,
    ) -> io::Result<NvmeTcpSession> {
        let log = Arc::new(ExportLog::new(config.name.clone()));
        let mut session = NvmeTcpSession::new(listener, config, &log)?;
        session.clock = clock;
        Ok(session)
    }

    /// Adds a connection over a stream socket of any kind, local and peer's address.
    ///
    /// # Errors
    /// The system has no memory left.
    pub fn add_stream(&mut self, stream: OwnedFd, addresses: [SocketAddr; 2]) -> io::Result<()> {
        self.add_connection(TcpStream::from(stream), addresses, self.clock.now())
    }
}
