//! Exports: disks served to virtual machines and other programs.
//!
//! `core` is shared by all front ends: queues, bios, bounds, commands, the server. A protocol implements
//! [`QueueSession`] for the ring of one of its queues and [`FrontEndSession`] for a connection.
//!
//! Three protocols are served. `nvme_tcp` is an NVMe subsystem for hosts on the network. `vfio_user` is an NVMe
//! controller, for virtual machines and for programs with an NVMe driver. `vhost_user` is a vhost-user-blk back-end,
//! for virtual machines and for programs that speak virtio-blk over a socket. Every client queue feeds a private or
//! shared hardware queue. This crate does no file I/O. One control thread waits for all exports of a program, and
//! worker threads run their steps.
#![forbid(unsafe_code)]

mod core;
mod nvme_tcp;
mod vfio_user;
mod vhost_user;

pub use core::*;
pub use nvme_tcp::*;
pub use vfio_user::*;
pub use vhost_user::*;
