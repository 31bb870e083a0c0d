//! blkyard: multi-queue disks for virtual machines, hosts and programs, from user space.
//!
//! The roof of the house: the only crate that wires the others together. A program may open a device by its name
//! ([`Device::open`]) and drive its queues from lanes of its own; the daemon and the load generator of the program of
//! the same name do just that.
#![forbid(unsafe_code)]

pub mod bench;
pub mod control;
pub mod floor;
pub mod inspect;
pub mod plan;
pub mod rate;
pub mod scheduler;
pub mod serve;
pub mod set;
pub mod spec;
pub mod study;
pub mod takeover;

mod device;
mod lanes;
mod model;
mod watch;

pub use device::{Device, DeviceError, DeviceQueue};
pub use lanes::{ServedLanes, Share};
