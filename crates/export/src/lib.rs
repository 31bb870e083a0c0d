//! Exports: disks served to others.
//!
//! `core` is shared by all front ends: queues, bios, bounds, commands, the server. A protocol implements
//! [`QueueSession`] for the ring of one of its queues and [`FrontEndSession`] for a connection.
//!
//! Two protocols are served. `vfio_user` is an NVMe controller, for virtual machines and for programs with an NVMe
//! driver. `vhost_user` is a vhost-user-blk back-end, for virtual machines and for programs that speak virtio-blk over
//! a socket. Rings, requests and data are ours, and every queue of a client feeds a hardware queue: a private one, or a
//! shared one. This crate does no file I/O. One thread waits for all exports of a program, and workers run their steps.
#![forbid(unsafe_code)]

mod core;
mod vfio_user;
mod vhost_user;

pub use core::*;
pub use vfio_user::*;
pub use vhost_user::*;
