//! blkyard: disks for programs, from user space.
//!
//! A program opens a disk by its name and uses it from its threads with [`Disk`]; `examples/zeroes.rs` is such a
//! program. One that wants to own the hardware queues opens a [`Device`] and drives its queues from lanes, as the
//! daemon `blkyard serve` does. Devices have the same names everywhere: see [`spec`]. [`nvme`] sends single commands to
//! NVMe controllers.
//!
//! It starts no daemon and parses no command line; the program `blkyard` is the crate `blkyard-cli`.
#![forbid(unsafe_code)]

pub mod nvme;
pub mod rate;
pub mod scheduler;
pub mod secrets;
pub mod spec;
pub mod tracker;

mod buffers;
mod device;
mod devices;
mod disk;
mod queues;

/// The words of the queue core that a program needs.
pub use blkyard_attach::Connector;
pub use blkyard_mq::{
    Bio, BioFlags, BufferAccess, Op, Priority, QueueCounts, Region, RegisterError, RegisteredBuffer, SECTOR_BYTES,
    Segment, Span, Status,
};
pub use buffers::DiskBuffers;
pub use device::{
    Backing, Device, DeviceError, DeviceHandover, DeviceOps, DevicePath, DeviceQueue, LatePath, QueueDriver,
    ReceivedDevice,
};
pub use devices::put_path_rules;
pub use disk::{Disk, DiskConfig, DiskError, Meet, Queues, Submitter, queue_depth};
pub use queues::DiskQueues;
