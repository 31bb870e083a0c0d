//! Queues over TCP: both sides against each other on byte streams, and each side against a hostile peer.
#![forbid(unsafe_code)]

mod alloc;
mod hostile_host;
mod hostile_target;
mod io_queue;
#[path = "../common/seeds.rs"]
mod seeds;
mod walk;
mod world;
