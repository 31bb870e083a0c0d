//! What others see: the exports.
//!
//! Today one: a vhost-user-blk back-end, for virtual machines and for programs that speak virtio-blk over a socket. The
//! messages of the control path come through the `vhost` crate; rings, requests and data are ours, and every virtqueue
//! feeds a hardware queue: its own, or one that it shares. This crate does no file I/O. One thread waits for all
//! exports of a program, and workers run what they have to do.
//!
//! `core` is what every front end stands on; all other modules are vhost-user's.
#![forbid(unsafe_code)]

mod advice;
mod backend;
mod channel;
mod core;
mod handover;
mod inflight;
mod kicks;
mod memory;
mod notes;
mod orders;
mod pace;
mod queue;
mod remote;
mod server;
mod session;
mod view;
mod wire;

pub use backend::{BackendConfig, QUEUE_SIZE_MAX, QUEUES_MAX, SEG_MAX};
pub use core::{Accepted, Acceptor, BoundSocket, ControlLoop, SocketConfig, SocketError};
pub use handover::{ExportState, Handed, QuiescedExport, SessionState};
pub use orders::{Changed, ExportHand};
pub use queue::{DetachedVirtqueue, VhostQueue, VirtqueueShare};
pub use remote::{PartError, QueueHost, QueueMover, QueuePort, QueueRemote, QueueWatch, on_demand_queue, queue_pair};
pub use server::{ExportStatus, Server, Taking};
pub use view::{QueueView, RingView, SessionView, VringView};
pub use wire::{MESSAGE_BYTES_MAX, MESSAGE_FILES_MAX, Message};
