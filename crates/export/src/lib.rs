//! Exports: disks served to others.
//!
//! `core` is shared by all front ends: queues, bios, bounds, commands, the server. A protocol implements
//! [`QueueSession`] for the ring of one of its queues and [`FrontEndSession`] for a connection.
//!
//! `vhost_user` is the only protocol: a vhost-user-blk back-end, for virtual machines and for programs that speak
//! virtio-blk over a socket. Rings, requests and data are ours, and every virtqueue feeds a hardware queue: a private
//! one, or a shared one. This crate does no file I/O. One thread waits for all exports of a program, and workers run
//! their steps.
#![forbid(unsafe_code)]

mod core;
mod vhost_user;

pub use core::*;
pub use vhost_user::*;
