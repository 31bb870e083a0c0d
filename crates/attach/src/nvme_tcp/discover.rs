//! Reads the log of a discovery service: connects, reads, and disconnects, all within a time limit.

use std::sync::Arc;
use std::time::Duration;

use blkyard_nvme::{DiscoveredLog, FabricsHostConfig, FabricsHostEvent};
use blkyard_sys::TimeSource;

use crate::AttachError;
use crate::nvme_tcp::client::AdminClient;

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
    let mut client = AdminClient::start(address, address, host, limit, clock)?;
    client.run_until("discovery log", |event| match event {
        FabricsHostEvent::Discovered(log) => Some(log),
        _ => None,
    })
}
