//! Host side: what drives an NVMe controller.
//!
//! [`HostQueuePair`] is one pair of rings. [`ControllerTransport`] is how a controller is reached: registers, memory,
//! doorbells, interrupts.

mod queue_pair;
mod transport;

pub use queue_pair::{Completed, CqeFault, CqeFaults, HostQueuePair, QueueRings};
pub use transport::{ControllerTransport, DeviceGone};
