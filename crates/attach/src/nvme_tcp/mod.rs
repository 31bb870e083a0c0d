//! Namespaces of controllers over NVMe/TCP as disks: the host of crate `nvme` with real sockets.
//!
//! ```text
//!   control thread: FabricsHost, admin connection      lane: TcpNamespaceQueue, one for each I/O queue
//!          ── commands (mailbox, eventfd) ──▶              FabricsIoQueue ◀── StreamService of the lane
//!          ◀────────── reports ──────────────
//! ```
//!
//! The control thread owns the association and the admin connection, an ordinary socket. It connects on a thread of its
//! own, since names are resolved there too, and nothing else waits for that. Each I/O queue is the driver of a hardware
//! queue and owns its stream, on the lane. Requests of a lost connection stay in flight until its stream is closed, and
//! wait for the next association.
//!
//! Connections with a key are encrypted by a [`TlsChannel`](blkyard_tls::TlsChannel) between socket and queue.
//!
//! Not here: several paths.

mod admin;
mod admin_stream;
mod association;
mod client;
mod control;
mod discover;
mod disk;
mod mailbox;
mod peer;
mod queue;
mod tls_socket;

use std::sync::Arc;

use blkyard_nvme::FabricsHostConfig;
use blkyard_sys::TimeSource;

pub use admin_stream::{AdminAttempt, AdminConnector, AdminSocket};
pub use association::TcpAssociation;
pub use client::{TcpAdminClient, TcpAdminResult};
pub use discover::{WalkedServices, read_discovery_log, walk_discovery_services};
pub use disk::{AcceptNamespace, LateNamespace, TcpNamespace, TcpNamespaceView, TcpQueueOpening, TcpSparePath};
pub use peer::TcpPeer;
pub use queue::TcpNamespaceQueue;

/// How a namespace is attached over TCP.
#[derive(Clone, Debug)]
pub struct TcpNamespaceConfig {
    /// Name of the disk, for messages.
    pub name: String,
    /// Address of the target, `HOST:PORT`; resolved before each connect.
    pub address: String,
    /// The association.
    pub host: FabricsHostConfig,
    /// The namespace; if unset, the controller must have exactly one.
    pub namespace: Option<u32>,
    /// Time that a request may take, ns.
    pub io_max_ns: u64,
    /// The clock of the control thread.
    pub clock: Arc<dyn TimeSource>,
}
