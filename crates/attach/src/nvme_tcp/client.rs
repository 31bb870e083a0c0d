//! An association with its admin queue alone, run by the thread that calls: for tools that ask a controller.

use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_nvme::{
    ControllerState, FabricsData, FabricsHostConfig, FabricsHostEvent, IDENTIFY_BYTES, NamespaceScope, NvmeStatus, Sqe,
};
use blkyard_sys::{EventFd, TimeSource};

use crate::AttachError;
use crate::nvme_tcp::admin::AdminConnection;
use crate::nvme_tcp::admin_stream::SystemConnector;

/// Time for an orderly end, beyond which the connection is just closed.
const DISCONNECT_MAX: Duration = Duration::from_secs(1);
/// Time beyond a command's own for the end of its connection, by which a late one ends.
const LATE_MAX: Duration = Duration::from_secs(5);

/// An association that runs while it is called.
pub(super) struct AdminClient {
    name: String,
    admin: AdminConnection,
    wake: Arc<EventFd>,
    clock: Arc<dyn TimeSource>,
    began: Instant,
    limit: Duration,
    until: Instant,
}

impl AdminClient {
    /// Begins to connect to `HOST:PORT`. `name` is for messages.
    pub(super) fn start(
        name: &str,
        address: &str,
        host: FabricsHostConfig,
        limit: Duration,
        clock: Arc<dyn TimeSource>,
    ) -> Result<AdminClient, AttachError> {
        let wake = EventFd::new().map_err(|source| AttachError::System { disk: name.to_owned(), source })?;
        let (wake, began) = (Arc::new(wake), clock.now());
        let connector = Box::new(SystemConnector { tls: host.tls.clone() });
        let mut admin = AdminConnection::new(host, address.to_owned(), connector, Arc::clone(&wake));
        admin.host.start(0);
        Ok(AdminClient { name: name.to_owned(), admin, wake, clock, began, limit, until: began + limit })
    }

    fn now_ns(&self) -> u64 {
        let since = self.clock.now().saturating_duration_since(self.began);
        since.as_nanos().try_into().unwrap_or(u64::MAX)
    }

    /// Runs until there is an event; `None` if it is too late.
    fn run(&mut self) -> Option<FabricsHostEvent> {
        loop {
            self.wake.take();
            let now_ns = self.now_ns();
            self.admin.receive(now_ns);
            let due_ns = self.admin.host.advance(now_ns);
            self.admin.send(now_ns);
            if let Some(event) = self.admin.next_event(now_ns) {
                return Some(event);
            }
            if self.clock.now() >= self.until {
                return None;
            }
            let due = due_ns.map(|due_ns| self.began + Duration::from_nanos(due_ns));
            let until = due.map_or(self.until, |due| due.min(self.until));
            // After an early end everything is checked again.
            let _ = self.clock.wait(&mut self.admin.events(), Some(until));
        }
    }

    /// Runs until an event is the awaited one. A connection that fails is not made again.
    pub(super) fn run_until<T>(
        &mut self,
        awaited: &str,
        mut take: impl FnMut(FabricsHostEvent) -> Option<T>,
    ) -> Result<T, AttachError> {
        let failed = |client: &AdminClient, cause| AttachError::Controller { disk: client.name.clone(), cause };
        loop {
            match self.run() {
                Some(FabricsHostEvent::Retry(_) | FabricsHostEvent::Failed(_)) => {
                    return Err(failed(self, self.admin.why()));
                }
                Some(event) => {
                    if let Some(found) = take(event) {
                        return Ok(found);
                    }
                }
                None => {
                    let cause = format!("no {awaited} within {:?}; check that it is an NVMe/TCP port", self.limit);
                    return Err(failed(self, cause));
                }
            }
        }
    }
}

impl Drop for AdminClient {
    /// Disconnects in order.
    fn drop(&mut self) {
        self.until = self.clock.now() + DISCONNECT_MAX;
        if self.admin.host.state() != ControllerState::DeletingNoIo {
            self.admin.host.disconnect(self.now_ns());
            while self.run().is_some_and(|event| event != FabricsHostEvent::Over) {}
        }
    }
}

/// Result of an admin command: status, result, and the page with its data if it has succeeded and reads data.
pub type TcpAdminResult = (NvmeStatus, u64, Option<Box<[u8; IDENTIFY_BYTES]>>);

/// The admin queue of a controller over TCP, for commands of the user, one at a time.
pub struct TcpAdminClient {
    client: AdminClient,
    /// Number of the last command.
    commands: u64,
}

impl TcpAdminClient {
    /// Connects to a controller at `HOST:PORT`, and brings it up without a look at its namespaces. `name` is for
    /// messages.
    ///
    /// # Errors
    /// The controller is not live within the limit of `host`, or no descriptor is left.
    pub fn open(
        name: &str,
        address: &str,
        host: FabricsHostConfig,
        clock: Arc<dyn TimeSource>,
    ) -> Result<TcpAdminClient, AttachError> {
        let limit = Duration::from_nanos(host.connect_ns.saturating_mul(2));
        // What there is to know of namespaces is read by the user's own commands.
        let host = FabricsHostConfig { scope: NamespaceScope::Nothing, ..host };
        let mut client = AdminClient::start(name, address, host, limit, clock)?;
        client.run_until("controller", |event| (event == FabricsHostEvent::Live).then_some(()))?;
        Ok(TcpAdminClient { client, commands: 0 })
    }

    /// Executes a command with at most one page of data. One that exceeds its timeout ends the association.
    ///
    /// # Errors
    /// The association is lost. A status of the controller is no error.
    pub fn execute(
        &mut self,
        sqe: Sqe,
        data: FabricsData<'_>,
        timeout: Duration,
    ) -> Result<TcpAdminResult, AttachError> {
        self.commands += 1;
        let (client, command) = (&mut self.client, self.commands);
        client.limit = timeout + LATE_MAX;
        client.until = client.clock.now() + client.limit;
        let (now_ns, timeout_ns) = (client.now_ns(), timeout.as_nanos().try_into().unwrap_or(u64::MAX));
        if client.admin.host.submit_admin(sqe, data, command, timeout_ns, now_ns).is_err() {
            return Err(AttachError::Controller { disk: client.name.clone(), cause: client.admin.why() });
        }
        client.run_until("answer", |event| match event {
            FabricsHostEvent::Completed { user, status, result, data } if user == command => {
                Some((status, result, data))
            }
            _ => None,
        })
    }
}
