//! Host side: the driver of an NVMe controller.
//!
//! [`HostController`] controls a controller from its first register access to its end. [`ControllerTransport`] is the
//! access to it: registers, memory, doorbells, interrupts. [`HostQueuePair`] is one pair of rings; the driver of an I/O
//! queue on top of it is in `io_queue.rs`. [`Enable`] and [`Disable`] are the register sequences.
//!
//! All parts are state machines without I/O and without a clock: time is an argument, and a waiting machine returns its
//! deadline ([`HostStep`]). ADR 39 states the ownership and the proofs of a silent controller.

mod admin;
mod bring_up;
mod disable;
pub(crate) mod enable;
mod error;
mod host_controller;
mod io_queues;
mod memory;
pub(crate) mod negotiate;
mod nvm_limits;
mod passthrough;
mod queue_pair;
mod retry;
pub(crate) mod scan;
mod state;
mod teardown;
mod transport;
pub(crate) mod watch;

pub use admin::AdminData;
pub use disable::{Disable, Silence};
pub use enable::{AdminRings, Enable};
pub use error::{HostStep, NvmeHostError};
pub(crate) use host_controller::HostPhase;
pub use host_controller::{HostController, HostEvent, NvmeHostConfig};
pub use negotiate::QueueDemand;
pub use nvm_limits::NvmLimits;
pub use passthrough::{PassthroughQueue, TransferBuffer};
pub use queue_pair::{Completed, CqeFault, CqeFaults, HostQueuePair, QueuePositions, QueueRings};
pub(crate) use queue_pair::{SLOT_MASK, cid};
pub use retry::{CANCELLED_RETRY_NS, Disposition, RETRIES_MAX, Retries, RetryDelays};
pub use scan::{NAMESPACES_MAX, NamespaceIds, NamespaceScope, ScannedNamespace};
pub use state::ControllerState;
pub use transport::{ControllerTransport, DeviceGone};
pub use watch::LateAction;
