//! Reads the logs of discovery services: connects, reads, and disconnects, all within a time limit.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use blkyard_nvme::{DiscoveredLog, DiscoveryEntry, DiscoveryWalk, FabricsHostConfig, FabricsHostEvent};
use blkyard_sys::TimeSource;

use crate::AttachError;
use crate::nvme_tcp::client::AdminClient;

/// Time for the answer of one service. One that others refer to is passed over after it.
const SERVICE_MAX: Duration = Duration::from_secs(5);
/// Time after which no further service is asked.
const WALK_MAX: Duration = Duration::from_secs(20);

/// Reads the discovery log at `HOST:PORT`. The subsystem of `host` must be the discovery service's. `name` is for
/// messages.
///
/// # Errors
/// There is no answer within `limit`, an invalid one, or no descriptor left.
pub fn read_discovery_log(
    name: &str,
    address: &str,
    host: FabricsHostConfig,
    limit: Duration,
    clock: Arc<dyn TimeSource>,
) -> Result<DiscoveredLog, AttachError> {
    debug_assert!(host.is_discovery());
    let mut client = AdminClient::start(name, address, host, limit, clock)?;
    client.run_until("discovery log", |event| match event {
        FabricsHostEvent::Discovered(log) => Some(log),
        _ => None,
    })
}

/// What discovery services have said.
#[derive(Clone, Debug, Default)]
pub struct WalkedServices {
    /// The subsystems that they name, in order.
    pub subsystems: Vec<DiscoveryEntry>,
    /// Why services were left out.
    pub warnings: Vec<String>,
}

/// Reads the logs of the discovery service at `HOST:PORT` and of those that it refers to. A service that others refer
/// to and that does not answer is left out, with a warning. `name` is for messages.
///
/// # Errors
/// The first service has no address, or does not answer as it should.
pub fn walk_discovery_services(
    name: &str,
    address: &str,
    host: &FabricsHostConfig,
    clock: &Arc<dyn TimeSource>,
) -> Result<WalkedServices, AttachError> {
    let ask = |service: SocketAddr| {
        let name = format!("{name}: discovery service {service}");
        read_discovery_log(&name, &service.to_string(), host.clone(), SERVICE_MAX, Arc::clone(clock))
    };
    let failed = |cause| AttachError::Controller { disk: name.to_owned(), cause };
    let until = clock.now() + WALK_MAX;
    let addresses = address.to_socket_addrs().map_err(|error| failed(format!("cannot resolve {address}: {error}")))?;
    let mut last = failed(format!("{address} has no address"));
    for address in addresses {
        let mut walk = DiscoveryWalk::new(address);
        let Some(first) = walk.next_service() else { continue };
        match ask(address) {
            Ok(log) => walk.add(first, log.entries),
            Err(error) => {
                last = error;
                continue;
            }
        }
        let mut warnings = Vec::new();
        while let Some(service) = walk.next_service() {
            if clock.now() >= until {
                let service = service.address;
                warnings.push(format!("{name}: the discovery service {service} is not asked: others took too long"));
                continue;
            }
            match ask(service.address) {
                Ok(log) => walk.add(service, log.entries),
                Err(error) => warnings.push(format!("{error}; it is left out, and others refer to it")),
            }
        }
        if walk.dropped() > 0 {
            warnings.push(format!("{name}: {} further discovery services are not asked: too many", walk.dropped()));
        }
        return Ok(WalkedServices { subsystems: walk.subsystems().to_vec(), warnings });
    }
    Err(last)
}
