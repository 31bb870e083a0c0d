//! The whole stack in one simulated world: a guest's rings, the export core, hardware queues, paths, both sides of
//! NVMe/TCP, a network, a target and its device, in virtual time.
//!
//! The machines are the product's. What stands for the outside is here: the network (`network`), a lane's kernel
//! (`lane`) and that of a target (`stream`), sockets and clock of control sides (`socket`), the guest (`guest`) and the
//! device (`medium`); the process of a target (`target`); and the glue of a daemon (`daemon`), which the product has
//! on threads.
//!
//! Faults are drawn from a seed. Two oracles judge: no acknowledged write is lost or overwritten by an earlier one
//! (`oracle`), and every request ends within its bound. The same seed gives the same run.
#![forbid(unsafe_code)]

mod daemon;
mod guest;
mod handover;
mod lane;
mod medium;
mod network;
mod options;
mod oracle;
mod socket;
mod stream;
mod target;
mod world;

pub use options::{Mutation, StackOptions};
pub use world::{FAULT_KINDS, StackResult, run_stack};
