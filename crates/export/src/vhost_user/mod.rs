//! The vhost-user-blk back-end: what its messages mean, and a virtqueue as a client queue of the core.
//!
//! The messages of the control path come through the `vhost` crate. Stands on `core`, which names nothing of it.

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
pub use virtqueue::VirtqueueSession;
pub use wire::{MESSAGE_BYTES_MAX, MESSAGE_FILES_MAX, Message};

/// What a vhost-user export serves.
pub type BackendConfig = core::ExportConfig<VhostUserSession>;
/// A vhost-user export that serves.
pub type VhostUserServer = core::Server<VhostUserSession>;
/// A vhost-user export that is about to be taken over.
pub type VhostUserTaking = core::Taking<VhostUserSession>;
/// What others may know of a vhost-user export.
pub type VhostUserStatus = core::ExportStatus<SessionView>;
/// A hand on a vhost-user export.
pub type VhostUserHand = core::ExportHand<VhostUserSession>;
/// A vhost-user export that is handed over, its queues at rest.
pub type VhostUserState = core::ExportState<SessionState>;
/// A hardware queue and the virtqueues that feed it.
pub type VirtqueuePoller<D> = core::QueuePoller<D, VirtqueueSession>;
/// A virtqueue between two hardware queues.
pub type DetachedVirtqueue = core::DetachedQueue<VirtqueueSession>;
/// The lane's end of a virtqueue.
pub type VirtqueuePort = core::QueuePort<VirtqueueSession>;
/// The control path's end of a virtqueue.
pub type VirtqueueRemote = core::QueueRemote<VirtqueueSession>;
/// The handle of whoever places virtqueues on hardware queues.
pub type VirtqueueMover = core::QueueMover<VirtqueueSession>;
/// A handle that only looks at a virtqueue.
pub type VirtqueueWatch = core::QueueWatch<VirtqueueSession>;
