//! The real world: rings of system calls, files, threads, descriptors, connections, CPUs, signals, the clock.
//!
//! Everything below this floor gets time and events as arguments; here they come from. A lane thread owns one
//! [`Ring`] and lends it to its queues; a [`FileDevice`] gives out queues that read and write through it. Nothing
//! here knows what is exported, or to whom.

mod caches;
mod child;
mod clock;
mod descriptors;
mod file;
mod lane_thread;
mod lanes;
mod parker;
mod receiver;
mod ring;
mod signals;
mod topology;
mod wake;

pub use caches::cache_bytes;
pub use child::bind_to_us;
pub use clock::{Clock, SystemClock, now_ns, thread_cpu_ns};
pub use descriptors::allow_all_descriptors;
pub use file::{Direct, FileConfig, FileCounters, FileDevice, FileQueue, Mode, OpenError};
pub use lane_thread::{LaneConfig, LaneError, LaneThread, spawn};
pub use lanes::{Lanes, Moves};
pub use parker::RingParker;
pub use receiver::{AcceptedConnection, Receiver, receive_for_daemon};
pub use ring::{Attachment, FixedBuffers, Holdings, NopRing, Ring, RingConfig, RingCounters, RingError};
pub use signals::{Signal, Signals};
pub use topology::{cpu_places, lanes_default};
