//! NVMe over fabrics, host side: an association with a controller, and its queues over TCP.
//!
//! [`FabricsHost`] is the association as its owner sees it, from the first Connect over every reconnect to the end; it
//! has the admin queue. [`FabricsIoQueue`] is one I/O queue, owned by a lane. [`DiscoveryWalk`] asks discovery services
//! for subsystems. All are state machines without I/O and without a clock: the owner of a stream passes bytes.
//!
//! They share with the host of controllers with registers (`host/`) what both have: states, the scan of namespaces,
//! keep-alive, the number of queues and retries. Not here: sockets, name resolution, TLS.

mod admin;
mod cross_reset;
mod discovery;
mod error;
mod host;
mod io_queue;
mod recovery;
mod setup;

pub use admin::FabricsData;
pub use discovery::{DISCOVERY_SERVICES_MAX, DiscoveryService, DiscoveryWalk};
pub use error::FabricsHostError;
pub use host::{FabricsHost, FabricsHostAuth, FabricsHostConfig, FabricsHostEvent};
pub use io_queue::{
    FabricsConnect, FabricsIoQueue, FabricsIoQueueOptions, FabricsQueueCommand, FabricsQueueReport, StreamRequest,
};
