//! What others see: the exports.
//!
//! Today one: a vhost-user-blk back-end, for virtual machines and for programs that speak virtio-blk over a socket. The
//! messages of the control path come through the `vhost` crate; rings, requests and data are ours, and every virtqueue
//! feeds a hardware queue: its own, or one that it shares. This crate does no file I/O. One thread waits for all
//! exports of a program, and workers run what they have to do.
//!
//! `core` is what every front end stands on; `vhost_user` is the one protocol there is.
#![forbid(unsafe_code)]

mod core;
mod vhost_user;

pub use core::{Accepted, Acceptor, BoundSocket, ControlLoop, SocketConfig, SocketError};
pub use vhost_user::*;
