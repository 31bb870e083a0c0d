//! What others see: the exports.
//!
//! Today one: a vhost-user-blk back-end, for virtual machines and for programs that speak virtio-blk over a socket. The
//! messages of the control path come through the `vhost` crate; rings, requests and data are ours, and every virtqueue
//! feeds a hardware queue: its own, or one that it shares. This crate does no file I/O and starts one thread per
//! export, for its socket.
#![forbid(unsafe_code)]

mod acceptor;
mod advice;
mod backend;
mod channel;
mod handover;
mod inflight;
mod kicks;
mod log;
mod memory;
mod notes;
mod orders;
mod pace;
mod queue;
mod remote;
mod server;
mod session;
mod socket;
mod view;
mod wire;

pub use acceptor::{Accepted, Acceptor};
pub use backend::{BackendConfig, QUEUE_SIZE_MAX, QUEUES_MAX, SEG_MAX};
pub use handover::{ExportState, Handed, QuiescedExport, SessionState};
pub use orders::{Changed, ExportHand};
pub use queue::{DetachedVirtqueue, VhostQueue, VirtqueueShare};
pub use remote::{
    PartError, QueueHost, QueueMover, QueuePort, QueueRemote, QueueWatch, SharedQueuePort, on_demand_queues,
    queue_pair, shared_queue_pair,
};
pub use server::{ExportStatus, Server, Taking};
pub use socket::{BoundSocket, SocketConfig, SocketError};
pub use view::{QueueView, RingView, SessionView, VringView};
pub use wire::{MESSAGE_BYTES_MAX, MESSAGE_FILES_MAX, Message};
