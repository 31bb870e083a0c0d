//! blkyard: multi-queue disks for virtual machines, hosts and programs, from user space.
//!
//! The roof of the house: the only crate that wires the others together. A program opens a disk by its name and uses it
//! from its threads with [`Disk`]; `examples/zeroes.rs` is such a program. One that wants to own the queues, as the
//! daemon and the load generator of the program of the same name do, opens a [`Device`] and drives its queues from
//! lanes.
#![forbid(unsafe_code)]

pub mod bench;
pub mod control;
pub mod floor;
pub mod inspect;
pub mod log;
pub mod plan;
pub mod rate;
pub mod scheduler;
pub mod serve;
pub mod set;
pub mod spec;
pub mod study;
pub mod takeover;

mod device;
mod disk;
mod ending;
mod io_errors;
mod lanes;
mod model;
mod qemu;
mod receiver;
mod threads;
mod watch;

/// The words of the queue core that a program needs.
pub use blkyard_mq::{Bio, BioFlags, Op, Priority, QueueCounts, SECTOR_BYTES, Segment, Span, Status};
pub use device::{Device, DeviceError, DeviceQueue};
pub use disk::{Disk, DiskConfig, DiskError, Queues, Submitter};
pub use lanes::{ServedLanes, Share};
