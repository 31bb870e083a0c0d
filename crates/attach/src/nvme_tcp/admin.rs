//! A host with its admin connection: what an association and a look at a discovery service have in common.
//!
//! Owned by one thread, which calls [`AdminConnection::receive`] when the socket or the eventfd has something and at
//! deadlines, then sends and takes events until there are none. A receive takes a bounded part of what has come, so
//! that a target that sends without end does not keep it from its deadlines.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use blkyard_nvme::tcp::SendList;
use blkyard_nvme::{FabricsHost, FabricsHostConfig, FabricsHostError, FabricsHostEvent};
use blkyard_sys::{EventFd, PollFd, PollFlags};

use crate::nvme_tcp::admin_stream::{AdminAttempt, AdminConnector, AdminStream, AdminStreamState};

/// Receives in one step.
const RECEIVES_MAX: usize = 16;

#[derive(Debug)]
pub(super) struct AdminConnection {
    pub(super) host: FabricsHost,
    /// `HOST:PORT`, resolved before each connect.
    address: String,
    connect_max: Duration,
    wake: Arc<EventFd>,
    /// The association that waits for its stream.
    awaited: Option<u64>,
    connector: Box<dyn AdminConnector>,
    /// The connect under way, and the association that it is for.
    attempt: Option<(u64, Box<dyn AdminAttempt>)>,
    stream: Option<AdminStream>,
    list: SendList,
    /// Address of the controller: that of the last stream.
    peer: Option<SocketAddr>,
    /// Why the last attempt failed.
    pub(super) cause: Option<String>,
}

impl AdminConnection {
    /// `wake` is signalled when an attempt to connect has ended, and when bytes are left of which the socket does not
    /// tell.
    pub(super) fn new(
        config: FabricsHostConfig,
        address: String,
        connector: Box<dyn AdminConnector>,
        wake: Arc<EventFd>,
    ) -> AdminConnection {
        AdminConnection {
            connect_max: Duration::from_nanos(config.connect_ns),
            host: FabricsHost::new(config),
            address,
            wake,
            awaited: None,
            connector,
            attempt: None,
            stream: None,
            list: SendList::new(SendList::PIECES_MIN),
            peer: None,
            cause: None,
        }
    }

    /// Sets the address for the next connects, `HOST:PORT`.
    pub(super) fn set_address(&mut self, address: String) {
        self.address = address;
    }

    /// Address of the controller, once there was a stream.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Why the last attempt failed, or the association was lost.
    pub(super) fn why(&self) -> String {
        let error = self.host.error().map(|error| error.to_string());
        match (&self.cause, error) {
            // A reset of our own, for this cause.
            (Some(cause), _) if self.host.error() == Some(FabricsHostError::Reset) => cause.clone(),
            (Some(cause), Some(error)) => format!("{cause}; {error}"),
            (Some(cause), None) => cause.clone(),
            (None, error) => error.unwrap_or_else(|| "the association failed".into()),
        }
    }

    /// Takes what has come: the outcome of a connect, and bytes.
    pub(super) fn receive(&mut self, now_ns: u64) {
        self.look_at_attempt(now_ns);
        for _ in 0..RECEIVES_MAX {
            let Some(stream) = &mut self.stream else { return };
            let association = stream.association;
            let (bytes, mut state) = stream.receive();
            if bytes.is_empty() && state == AdminStreamState::Open {
                state = stream.send();
                if state == AdminStreamState::Open {
                    return;
                }
            } else {
                self.host.admin_receive(association, bytes, now_ns);
            }
            if state == AdminStreamState::Lost {
                self.stream = None;
                self.host.admin_lost(association, now_ns);
                return self.host.admin_closed(association, now_ns);
            }
        }
        if self.stream.as_ref().is_some_and(AdminStream::has_more) {
            self.wake.signal();
        }
    }

    /// Sends what the host has for the socket.
    pub(super) fn send(&mut self, now_ns: u64) {
        while let Some(stream) = self.stream.as_mut().filter(|stream| stream.can_send())
            && self.host.admin_wants_send()
        {
            self.list.clear();
            let Some(number) = self.host.admin_fill(&mut self.list) else { return };
            stream.push(self.host.admin_memory(), &self.list);
            // What fails is seen with the next receive.
            stream.send();
            let association = stream.association;
            // The list was copied.
            self.host.admin_sent(association, number, now_ns);
        }
    }

    /// The next event that is not about the stream.
    pub(super) fn next_event(&mut self, now_ns: u64) -> Option<FabricsHostEvent> {
        loop {
            match self.host.next_event()? {
                FabricsHostEvent::Open(association) => {
                    self.awaited = Some(association);
                    self.connect();
                }
                FabricsHostEvent::Close(association) => {
                    self.awaited = None;
                    self.send(now_ns);
                    if let Some(stream) = self.stream.take() {
                        stream.close();
                    }
                    self.host.admin_closed(association, now_ns);
                }
                event => return Some(event),
            }
        }
    }

    /// What to wait for.
    pub(super) fn events(&self) -> Vec<PollFd<'_>> {
        let mut events = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        if let Some((socket, flags)) = self.stream.as_ref().and_then(AdminStream::events) {
            events.push(PollFd::from_borrowed_fd(socket, flags));
        }
        events
    }

    fn look_at_attempt(&mut self, now_ns: u64) {
        let Some((association, attempt)) = &mut self.attempt else { return };
        let (association, Some(outcome)) = (*association, attempt.outcome()) else { return };
        self.attempt = None;
        if self.awaited != Some(association) {
            // It was given up meanwhile.
            return self.connect();
        }
        self.awaited = None;
        match outcome.map(|socket| AdminStream::new(association, socket)) {
            Ok(Some(stream)) => {
                (self.peer, self.cause) = (Some(stream.peer), None);
                self.stream = Some(stream);
                self.host.admin_opened(association, now_ns);
            }
            Ok(None) => self.host.admin_closed(association, now_ns),
            Err(cause) => {
                self.cause = Some(cause);
                self.host.admin_closed(association, now_ns);
            }
        }
    }

    /// Begins to connect, unless an earlier attempt has not ended.
    fn connect(&mut self) {
        if let (None, Some(association)) = (&self.attempt, self.awaited) {
            let attempt = self.connector.begin(&self.address, self.connect_max, &self.wake);
            self.attempt = Some((association, attempt));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read, Write};
    use std::os::fd::BorrowedFd;

    use blkyard_nvme::fabrics::{DISCOVERY_NQN, Nqn};

    use super::*;
    use crate::nvme_tcp::admin_stream::AdminSocket;

    /// A target that sends without end, of which no descriptor tells.
    #[derive(Debug)]
    struct Flood {
        reads: usize,
    }

    impl Read for Flood {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.reads += 1;
            assert!(self.reads <= RECEIVES_MAX, "it is read without end");
            Ok(bytes.len())
        }
    }

    impl Write for Flood {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl AdminSocket for Flood {
        fn peer(&self) -> io::Result<SocketAddr> {
            Ok(([127, 0, 0, 1], 4420).into())
        }

        fn descriptor(&self) -> Option<BorrowedFd<'_>> {
            None
        }

        fn has_more(&self) -> bool {
            true
        }

        fn finish(&mut self) {}
    }

    impl AdminConnector for Flood {
        fn begin(&self, _: &str, _: Duration, _: &Arc<EventFd>) -> Box<dyn AdminAttempt> {
            Box::new(Flood { reads: 0 })
        }
    }

    impl AdminAttempt for Flood {
        fn outcome(&mut self) -> Option<Result<Box<dyn AdminSocket>, String>> {
            Some(Ok(Box::new(Flood { reads: 0 })))
        }
    }

    #[test]
    fn target_that_sends_without_end_is_read_in_parts() {
        let [host, discovery] = ["nqn.host", DISCOVERY_NQN].map(|name| Nqn::new(name).unwrap());
        let config = FabricsHostConfig::new(host, [7; 16], discovery);
        let wake = Arc::new(EventFd::new().unwrap());
        let mut admin = AdminConnection::new(config, String::new(), Box::new(Flood { reads: 0 }), Arc::clone(&wake));
        admin.host.start(0);
        assert_eq!(admin.next_event(0), None);
        admin.receive(0);
        // What is left has no descriptor: the owner is not to sleep.
        assert!(wake.take());
    }
}
