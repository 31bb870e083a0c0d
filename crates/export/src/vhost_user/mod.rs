//! The vhost-user-blk back-end: its messages, and a virtqueue as a client queue of the core.
//!
//! Messages of the control path are parsed by the `vhost` crate. `core` does not depend on it.

mod advice;
mod backend;
mod channel;
mod handover;
mod inflight;
mod memory;
mod notes;
mod session;
mod view;
mod virtqueue;
mod wire;

use crate::core;

pub use backend::{QUEUE_SIZE_MAX, QUEUES_MAX, SEG_MAX};
pub use handover::SessionState;
pub use session::VhostUserSession;
pub use view::{SessionView, VringView};
pub use virtqueue::{VirtqueueSession, VirtqueueSetup};
pub use wire::{MESSAGE_BYTES_MAX, MESSAGE_FILES_MAX, Message};

/// Configuration of a vhost-user export.
pub type BackendConfig = core::ExportConfig<VhostUserSession>;
/// A serving vhost-user export.
pub type VhostUserServer = core::Server<VhostUserSession>;
/// A vhost-user export prepared for a takeover.
pub type VhostUserTaking = core::Taking<VhostUserSession>;
/// State of a vhost-user export, for other threads.
pub type VhostUserStatus = core::ExportStatus<SessionView>;
/// Handle to control a vhost-user export.
pub type VhostUserHand = core::ExportHand<VhostUserSession>;
/// A hardware queue and the virtqueues that feed it.
pub type VirtqueuePoller<D> = core::QueuePoller<D, VirtqueueSession>;
/// A virtqueue detached from its hardware queue, on its way to another.
pub type DetachedVirtqueue = core::DetachedQueue<VirtqueueSession>;
/// The lane's end of a virtqueue.
pub type VirtqueuePort = core::QueuePort<VirtqueueSession>;
/// The control path's end of a virtqueue.
pub type VirtqueueRemote = core::QueueRemote<VirtqueueSession>;
/// Handle for the placement of virtqueues on hardware queues.
pub type VirtqueueMover = core::QueueMover<VirtqueueSession>;
/// A handle for the inspection of a virtqueue.
pub type VirtqueueWatch = core::QueueWatch<VirtqueueSession>;
