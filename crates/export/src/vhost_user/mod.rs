//! The vhost-user-blk back-end.
//!
//! Stands on `core`, which names nothing of it.

mod advice;
mod backend;
mod channel;
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
pub use handover::{ExportState, Handed, QuiescedExport, SessionState};
pub use orders::{Changed, ExportHand};
pub use queue::{DetachedVirtqueue, VhostQueue, VirtqueueShare};
pub use remote::{PartError, QueueHost, QueueMover, QueuePort, QueueRemote, QueueWatch, on_demand_queue, queue_pair};
pub use server::{ExportStatus, Server, Taking};
pub use view::{QueueView, RingView, SessionView, VringView};
pub use wire::{MESSAGE_BYTES_MAX, MESSAGE_FILES_MAX, Message};
