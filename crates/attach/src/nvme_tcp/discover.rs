//! Reads the log of a discovery service: connects, reads, and disconnects, all within a time limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use blkyard_nvme::{DiscoveredLog, FabricsHostConfig, FabricsHostEvent};
use blkyard_sys::{EventFd, TimeSource};

use crate::AttachError;
use crate::nvme_tcp::admin::AdminConnection;

/// Time for an orderly end, beyond which the connection is just closed.
const DISCONNECT_MAX: Duration = Duration::from_secs(1);

/// Reads the discovery log at `HOST:PORT`. The subsystem of `host` must be the discovery service's.
///
/// # Errors
/// There is no answer within `limit`, an invalid one, or no descriptor left.
pub fn read_discovery_log(
    address: &str,
    host: FabricsHostConfig,
    limit: Duration,
    clock: Arc<dyn TimeSource>,
) -> Result<DiscoveredLog, AttachError> {
    debug_assert!(host.is_discovery());
    let wake = EventFd::new().map_err(|source| AttachError::System { disk: address.to_owned(), source })?;
    let wake = Arc::new(wake);
    let began = clock.now();
    let mut reader = DiscoveryReader {
        admin: AdminConnection::new(host, address.to_owned(), Arc::clone(&wake)),
        wake,
        clock,
        began,
        until: began + limit,
    };
    reader.admin.host.start(0);
    let failed = |cause: String| AttachError::Controller { disk: address.to_owned(), cause };
    let found = loop {
        match reader.run() {
            Some(FabricsHostEvent::Discovered(log)) => break Ok(log),
            Some(FabricsHostEvent::Retry(_) | FabricsHostEvent::Failed(_)) => break Err(failed(reader.admin.why())),
            Some(_) => {}
            None => {
                let cause = format!("no discovery log within {limit:?}; check that it is an NVMe/TCP port");
                return Err(failed(cause));
            }
        }
    };
    reader.until = reader.clock.now() + DISCONNECT_MAX;
    reader.admin.host.disconnect(reader.now_ns());
    while reader.run().is_some_and(|event| event != FabricsHostEvent::Over) {}
    found
}

struct DiscoveryReader {
    admin: AdminConnection,
    wake: Arc<EventFd>,
    clock: Arc<dyn TimeSource>,
    began: Instant,
    until: Instant,
}

impl DiscoveryReader {
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
}
