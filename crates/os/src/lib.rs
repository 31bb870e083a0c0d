//! The operating system: io_uring, files, threads, descriptors, connections, CPUs, signals, the clock, PCI devices
//! through VFIO, and the kernel's NVMe driver by ioctls and io_uring.
//!
//! All crates below get time and events as arguments; this one provides them. A lane thread owns one [`Ring`] and lends
//! it to its queues; a [`FileDevice`] has queues that read and write through it. Exports are unknown here.

mod caches;
mod child;
mod clock;
mod descriptors;
mod file;
mod lane_thread;
mod lanes;
mod node_threads;
mod nvme_char;
mod nvme_ioctl;
mod parker;
mod receiver;
mod ring;
mod signals;
mod slice;
mod topology;
mod vfio;
mod wake;

pub use caches::cache_bytes;
pub use child::bind_to_us;
pub use clock::{Clock, SystemClock, now_ns, process_cpu_ns, thread_cpu_ns};
pub use descriptors::allow_all_descriptors;
pub use file::{Direct, FileConfig, FileCounters, FileDevice, FileQueue, Indirect, Mode, OpenError};
pub use lane_thread::{
    Admission, LaneConfig, LaneError, LaneThread, MakePoller, NotAdmitted, PolicyChange, Release, spawn,
};
pub use lanes::{ANSWER_MAX, Lanes, Moves, REST_MAX};
pub use node_threads::NodeThreads;
pub use nvme_char::{NvmeCharConfig, NvmeCharData, NvmeCharDevice, NvmeCharError, NvmeCharLimits, NvmeCharQueue};
pub use nvme_ioctl::{NvmeDeviceNode, NvmeIoctlQueue, NvmeIoctlResult};
pub use parker::RingParker;
pub use receiver::{AcceptedConnection, Receiver, receive_for_daemon};
pub use ring::{Attachment, FixedBuffers, Holdings, NopRing, Ring, RingConfig, RingCounters, RingError};
pub use signals::{Signal, Signals};
pub use topology::{cpu_places, lanes_default, node_of};
pub use vfio::{HostPciDevice, PciAddress, VfioDevice, VfioError, VfioInterface};
